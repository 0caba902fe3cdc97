//! Symbolic sizes as numbers: concretising one in a trace records a guard.

use std::cmp::Ordering;

use consort_ir::index::{Assumed, Guard, Index, Sym};
use consort_ir::ops::{OpDef, call_name};
use consort_types::Failure;

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::world::World;

use super::{Session, Site, current, settle};

fn depends_on_rank() -> Box<Failure> {
    Failure::new(("a number that is the same on all ranks", "one that depends on the rank")).note(
        "ranks that branch apart trace different programs; starts, sizes and peers may stay symbolic, and \
         cond takes a tensor",
    )
}

fn depends_on_data() -> Box<Failure> {
    let failure = Failure::new(("a number that is known while tracing", "a size that is read from data"));
    failure.note("`item` reads it, at the price of a graph break")
}

/// The value of a size on this rank. In a trace this records a guard.
pub(crate) fn number_of(index: &Index, site: Site) -> Result<i64> {
    match current() {
        None => eager(index, site),
        Some(session) => {
            let number = session.hint(index, site)?;
            session.assume(Guard::Eq(index.clone(), Index::constant(number)), site)?;
            Ok(number)
        }
    }
}

/// The value of a size on this rank at this call. Records no guard.
pub(crate) fn size_here(index: &Index, world: &World, site: Site) -> Result<i64> {
    match current() {
        None => value_of(index, world, site),
        Some(_) if mentions(index, |sym| matches!(sym, Sym::Unbacked(_))) => {
            Err(Error::of("index", depends_on_data(), site))
        }
        Some(session) => session.hint_here(index, site),
    }
}

/// Compares two sizes. In a trace the outcome is recorded as a guard; if it cannot be decided, the trace fails.
pub(crate) fn compare(a: &Index, b: &Index, site: Site) -> Ordering {
    let Some(session) = current() else {
        return match eager(a, site).and_then(|a| Ok((a, eager(b, site)?))) {
            Ok((a, b)) => a.cmp(&b),
            Err(error) => {
                if let Ok(world) = World::current() {
                    world.report(&error, "a comparison with it has no outcome");
                }
                a.cmp(b)
            }
        };
    };
    let outcome = (|| {
        let ordering = session.hint(a, site)?.cmp(&session.hint(b, site)?);
        let one = Index::constant(1);
        let guard = match ordering {
            Ordering::Equal => Guard::Eq(a.clone(), b.clone()),
            Ordering::Less => Guard::Le(a + &one, b.clone()),
            Ordering::Greater => Guard::Le(b + &one, a.clone()),
        };
        session.assume(guard, site)?;
        Ok(ordering)
    })();
    outcome.unwrap_or_else(|error: Error| {
        session.fail(error);
        a.cmp(b)
    })
}

/// Whether a size is at most another. In a trace the outcome is recorded as a guard; if it cannot be decided, the trace
/// fails.
pub(crate) fn at_most(a: &Index, b: &Index, site: Site) -> bool {
    let Some(session) = current() else { return compare(a, b, site) != Ordering::Greater };
    let outcome = (|| {
        let holds = session.hint(a, site)? <= session.hint(b, site)?;
        let guard = match holds {
            true => Guard::Le(a.clone(), b.clone()),
            false => Guard::Le(b + &Index::constant(1), a.clone()),
        };
        session.assume(guard, site)?;
        Ok(holds)
    })();
    outcome.unwrap_or_else(|error: Error| {
        session.fail(error);
        a.cmp(b) != Ordering::Greater
    })
}

/// Whether two sizes are equal at this call; if so, that is recorded as a guard. No branch depends on it, so the sizes
/// may differ between ranks.
pub(crate) fn equal(a: &Index, b: &Index, site: Site) -> Result<bool> {
    let Some(session) = current() else { return Ok(a == b) };
    if a == b {
        return Ok(true);
    }
    let same = session.hint_here(a, site)? == session.hint_here(b, site)?;
    if same {
        session.assume(Guard::Eq(a.clone(), b.clone()), site)?;
    }
    Ok(same)
}

/// Concretises a tensor's sizes: symbolic ones record guards, data-dependent ones cause a graph break.
pub(crate) fn pin_shape(tensor: &Tensor, site: Site) {
    let Some(session) = current() else { return };
    if tensor.traced.as_ref().is_none_or(|traced| traced.landed().is_some()) {
        return;
    }
    for size in tensor.ty.shape.iter().filter(|size| size.as_const().is_none()) {
        let outcome = match mentions(size, |sym| matches!(sym, Sym::Unbacked(_))) {
            true => settle(tensor, "shape", site).map(drop),
            false => number_of(size, site).map(drop),
        };
        if let Err(error) = outcome {
            session.fail(error);
        }
    }
}

fn mentions(index: &Index, what: impl Fn(Sym) -> bool) -> bool {
    let mut found = false;
    index.symbols(&mut |sym| found |= what(sym));
    found
}

fn eager(index: &Index, site: Site) -> Result<i64> {
    value_of(index, &*World::current()?, site)
}

fn value_of(index: &Index, world: &World, site: Site) -> Result<i64> {
    let mesh = world.mesh();
    match mentions(index, is_of_a_trace) {
        true => Err(kept_size(index, "index", site)),
        false => world.sizes(&mesh).index(index).map_err(|error| Error::new("index", error.headline, site)),
    }
}

/// Whether a symbol has a value in a trace only.
fn is_of_a_trace(sym: Sym) -> bool {
    matches!(sym, Sym::Backed(_) | Sym::Unbacked(_))
}

/// The error of a size that outlived its trace.
fn kept_size(size: &Index, op: &str, site: Site) -> Error {
    let size = crate::Index(size.clone());
    let got = format!("`{size}`, which a traced function kept");
    let failure = Failure::new(("a size that is known here", got));
    Error::of(op, failure.note("return it from the compiled function, or the tensor that has it"), site)
}

/// Fails if an op that runs now has a size that outlived its trace.
pub(crate) fn check_sizes(op: &dyn OpDef, site: Site) -> Result<()> {
    let mut kept = None;
    op.indices(&mut |index| {
        if kept.is_none() && mentions(index, is_of_a_trace) {
            kept = Some(index.clone());
        }
    });
    kept.map_or(Ok(()), |size| Err(kept_size(&size, call_name(op.info().name), site)))
}

impl Session {
    /// The value of a size at this call, which must be equal on all ranks.
    fn hint(&self, index: &Index, site: Site) -> Result<i64> {
        if mentions(index, |sym| matches!(sym, Sym::Rank(_) | Sym::GroupRank(_))) {
            return Err(Error::of("index", depends_on_rank(), site));
        }
        if mentions(index, |sym| matches!(sym, Sym::Unbacked(_))) {
            return Err(Error::of("index", depends_on_data(), site));
        }
        if !self.varies(index)?.is_empty() {
            return Err(Error::of("index", depends_on_rank(), site));
        }
        self.hint_here(index, site)
    }

    /// The value of a size at this call on this rank.
    fn hint_here(&self, index: &Index, site: Site) -> Result<i64> {
        let (hints, mesh) = (self.hints.borrow(), self.world.mesh());
        let own = |sym: Sym| match sym {
            Sym::Rank(_) | Sym::GroupRank(_) => self.world.sizes(&mesh).index(&Index::sym(sym)).ok(),
            _ => hints.get(&sym).copied(),
        };
        index.eval(&own).map_err(|_| Error::new("index", ("a size of this call", "one of another"), site))
    }

    /// Records a guard that holds at this call.
    fn assume(&self, guard: Guard, site: Site) -> Result<()> {
        let mut missing = Vec::new();
        self.build(|builder| {
            guard.symbols(&mut |sym| {
                if builder.facts().get(sym).is_none() && !missing.contains(&sym) {
                    missing.push(sym);
                }
            });
        })?;
        for sym in missing {
            self.bind(sym, "index", site)?;
        }
        let known = self.build(|builder| builder.guards().len())?;
        match self.build(|builder| builder.assume(guard))? {
            Assumed::New | Assumed::Known => self.check_guards(known, "index", site),
            Assumed::Contradiction => {
                Err(Error::new("index", ("a condition that can hold", "a contradiction"), site))
            }
        }
    }
}
