//! Why a plan did not run: the op, the user's source line, and what went wrong.

use std::fmt;

use consort_comm::CommError;
use consort_ir::limits::Excess;
use consort_ir::ops::{EvalError, call_name};
use consort_ir::program::Loc;

use crate::kernels::KernelError;

/// Why a plan was not lowered, or did not run to its end on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError(Box<Inner>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Inner {
    op: Option<&'static str>,
    loc: Option<Loc>,
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    Message(String),
    Comm(CommError),
    Limit(Excess),
}

impl RunError {
    pub(super) fn new(message: impl Into<String>) -> RunError {
        RunError(Box::new(Inner { op: None, loc: None, cause: Cause::Message(message.into()) }))
    }

    pub(super) fn limit(excess: Excess) -> RunError {
        RunError(Box::new(Inner { op: None, loc: None, cause: Cause::Limit(excess) }))
    }

    /// Attaches a line, unless the error has one already.
    pub(super) fn at(mut self, op: &'static str, loc: Option<&Loc>) -> RunError {
        if self.0.op.is_none() {
            // Users know an operation by the name of its call.
            self.0.op = Some(call_name(op));
            self.0.loc = loc.cloned();
        }
        self
    }

    /// The op that failed, if any.
    pub fn op(&self) -> Option<&'static str> {
        self.0.op
    }

    /// The user's source line, if it is known.
    pub fn loc(&self) -> Option<&Loc> {
        self.0.loc.as_ref()
    }

    /// The limit that was exceeded, if that is the cause.
    pub fn excess(&self) -> Option<Excess> {
        if let Cause::Limit(excess) = &self.0.cause { Some(*excess) } else { None }
    }

    /// The communication error, if that is the cause.
    pub fn comm_error(&self) -> Option<&CommError> {
        if let Cause::Comm(error) = &self.0.cause { Some(error) } else { None }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { op, loc, cause } = &*self.0;
        let text = match cause {
            Cause::Message(message) => message.clone(),
            Cause::Comm(error) => error.to_string(),
            Cause::Limit(excess) => excess.to_string(),
        };
        let (first, rest) =
            text.split_once('\n').map_or((&text[..], None), |(first, rest)| (first, Some(rest)));
        if let Some(op) = op {
            // A communication error may already begin with the op's name.
            let named = first.strip_prefix(op).is_some_and(|rest| rest.starts_with([':', ' ']));
            if !named {
                write!(f, "{op}: ")?;
            }
        }
        f.write_str(first)?;
        loc.iter().try_for_each(|loc| write!(f, "\n  at {loc}"))?;
        rest.iter().try_for_each(|rest| write!(f, "\n{rest}"))
    }
}

impl std::error::Error for RunError {}

impl From<CommError> for RunError {
    fn from(error: CommError) -> RunError {
        RunError(Box::new(Inner { op: None, loc: None, cause: Cause::Comm(error) }))
    }
}

impl From<KernelError> for RunError {
    fn from(error: KernelError) -> RunError {
        RunError::new(error.0)
    }
}

impl From<EvalError> for RunError {
    fn from(error: EvalError) -> RunError {
        RunError::new(error.0)
    }
}
