//! Why a plan did not run: the op, the user's source line, and what went wrong.

use std::fmt;

use consort_comm::CommError;
use consort_ir::limits::Excess;
use consort_ir::ops::{EvalError, call_name};
use consort_types::{Failure, Headline, Site};

use crate::kernels::KernelError;

/// Why a plan was not lowered, or did not run to its end on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError(Box<Inner>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Inner {
    op: Option<&'static str>,
    site: Option<Site>,
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    Failure(Box<Failure>),
    Comm(CommError),
    Limit(Excess),
}

impl RunError {
    pub(crate) fn new(headline: impl Into<Headline>) -> RunError {
        RunError::caused(Cause::Failure(Failure::new(headline)))
    }

    /// The same of a part of a plan or of its arguments.
    pub(crate) fn of(part: String, headline: impl Into<Headline>) -> RunError {
        RunError::caused(Cause::Failure(Failure::new(headline).of(part)))
    }

    /// The plan writes too early: it lacks a `release`.
    pub(crate) fn leased() -> RunError {
        RunError::new((
            "storage that no peer reads any more: a line of the plan must say `release` before",
            "storage that is leased or in flight",
        ))
    }

    pub(crate) fn limit(excess: Excess) -> RunError {
        RunError::caused(Cause::Limit(excess))
    }

    fn caused(cause: Cause) -> RunError {
        RunError(Box::new(Inner { op: None, site: None, cause }))
    }

    /// Attaches a line, unless the error has one already.
    pub(crate) fn at(mut self, op: &'static str, site: Option<Site>) -> RunError {
        if self.0.op.is_none() {
            // Users know an operation by the name of its call.
            self.0.op = Some(call_name(op));
            self.0.site = site;
        }
        self
    }

    /// The op that failed, if any.
    pub fn op(&self) -> Option<&'static str> {
        self.0.op
    }

    /// The user's source line, if it is known.
    pub fn site(&self) -> Option<Site> {
        self.0.site
    }

    /// The limit that was exceeded, if that is the cause.
    pub fn excess(&self) -> Option<Excess> {
        if let Cause::Limit(excess) = &self.0.cause { Some(*excess) } else { None }
    }

    /// The communication error, if that is the cause.
    pub fn comm_error(&self) -> Option<&CommError> {
        if let Cause::Comm(error) = &self.0.cause { Some(error) } else { None }
    }

    /// The facts.
    pub fn failure(&self) -> Box<Failure> {
        let Inner { op, site, cause } = &*self.0;
        let mut failure = match cause {
            Cause::Failure(failure) => failure.clone(),
            Cause::Comm(error) => error.failure(),
            Cause::Limit(excess) => Failure::new(excess.headline()),
        };
        if let Some(op) = *op {
            failure = failure.of(op);
        }
        match *site {
            Some(site) => failure.at(site),
            None => failure,
        }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl std::error::Error for RunError {}

impl From<CommError> for RunError {
    fn from(error: CommError) -> RunError {
        RunError::caused(Cause::Comm(error))
    }
}

impl From<KernelError> for RunError {
    fn from(error: KernelError) -> RunError {
        RunError::caused(Cause::Failure(error.0))
    }
}

impl From<EvalError> for RunError {
    fn from(error: EvalError) -> RunError {
        RunError::new(error.headline)
    }
}
