//! Resource limits of a run. A program may name any size and any number of iterations, but memory and time are limited.
//! A run that would exceed a limit is refused before it begins, or as soon as its sizes are known.

use std::fmt;

use consort_types::Headline;

use crate::cost::Total;

/// The resource limits of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory: per rank, or of all ranks together in the oracle.
    pub bytes: u64,
    /// Nodes that one rank runs, plus iterations of its loops.
    pub steps: u64,
    /// Arithmetic operations and bytes of memory traffic on one rank, as [`crate::cost`] counts them.
    pub operations: u64,
}

impl Limits {
    /// For ranks that run kernels: some minutes of small ops, of large ones, or of both.
    pub const RANKS: Limits = Limits { bytes: 32 << 30, steps: 100_000_000, operations: 4_000_000_000_000 };
    /// For the oracle, which evaluates definitions element by element.
    pub const ORACLE: Limits = Limits { bytes: 8 << 30, steps: 10_000_000, operations: 40_000_000_000 };
}

/// A limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// [`Limits::bytes`].
    Bytes,
    /// [`Limits::steps`].
    Steps,
    /// [`Limits::operations`].
    Operations,
}

/// A limit was exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The resource.
    pub resource: Resource,
    /// The limit.
    pub limit: u64,
    /// The amount required, at least.
    pub got: u64,
}

impl Excess {
    /// An error if `got` exceeds the limit.
    pub fn check(resource: Resource, limit: u64, got: u64) -> Result<(), Excess> {
        if got <= limit { Ok(()) } else { Err(Excess { resource, limit, got }) }
    }
}

impl Excess {
    /// The limit and the amount, as facts.
    pub fn headline(&self) -> Headline {
        let noun = match self.resource {
            Resource::Bytes => "bytes of memory",
            Resource::Steps => "steps",
            Resource::Operations => "operations",
        };
        // Sums saturate.
        let got = if self.got == u64::MAX { "more".to_string() } else { self.got.to_string() };
        (format!("at most {} {noun}", self.limit), got).into()
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.headline().fmt(f)
    }
}

/// The work that one rank has done, and its limits.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    limits: Limits,
    done: Total,
}

impl Budget {
    /// A full budget.
    pub fn new(limits: Limits) -> Budget {
        Budget { limits, done: Total::default() }
    }

    /// Checks that the limits allow `more` work.
    pub fn check(&self, more: Total) -> Result<(), Excess> {
        let all = self.done.plus(more);
        Excess::check(Resource::Steps, self.limits.steps, all.steps)?;
        Excess::check(Resource::Operations, self.limits.operations, all.operations())
    }

    /// Charges `more` work, if the limits allow it.
    pub fn spend(&mut self, more: Total) -> Result<(), Excess> {
        self.check(more)?;
        self.done = self.done.plus(more);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_counts_until_the_limit() {
        let mut budget = Budget::new(Limits { bytes: 0, steps: 3, operations: 10 });
        let work = |steps, flops, bytes| Total { steps, flops, bytes, wire: 99 };
        assert_eq!(budget.spend(work(1, 2, 3)), Ok(()));
        assert_eq!(budget.check(work(2, 2, 3)), Ok(()));
        let error = budget.spend(work(2, 2, 4)).unwrap_err();
        assert_eq!(error.to_string(), "expected at most 10 operations, got 11");
        assert_eq!(budget.spend(work(2, 2, 3)), Ok(()));
        let error = budget.spend(work(u64::MAX, 0, 0)).unwrap_err();
        assert_eq!(error.to_string(), "expected at most 3 steps, got more");
    }
}
