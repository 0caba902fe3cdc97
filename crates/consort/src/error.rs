//! Errors: what failed, as facts, at the user's source line, with the communication error behind it.

use std::fmt;
use std::panic::Location;

use consort_comm::CommError;
use consort_ir::ops::built_in;
use consort_runtime::RunError;
use consort_types::{Failure, Headline, Site};

use crate::trace::is_tracing;

/// The result type of this crate's functions.
///
/// ```
/// fn double(x: &consort::Tensor) -> consort::Result<consort::Tensor> {
///     x + x
/// }
/// # assert!(consort::Tensor::from_iter([1i32]).and_then(|x| double(&x)).is_ok());
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an op or a collective failed.
///
/// ```
/// # fn main() -> consort::Result<()> {
/// let x = consort::Tensor::from_iter([1i32, 2, 3])?;
/// let error = x.reshape(&[2, 2]).map(drop).unwrap_err();
/// assert_eq!(error.op(), "reshape");
/// assert!(error.site().file().ends_with(".rs")); // The line that called it.
/// assert_eq!(error.failure().rule, "C1"); // The rule of the op, as `consort ops reshape` prints it.
/// assert!(error.comm_error().is_none()); // The other ranks had no part in it.
/// assert!(error.to_string().starts_with("reshape: expected"));
/// assert_eq!(format!("{error:?}"), error.to_string()); // So a `main` that gives it prints it well.
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    /// The call; the failure may name a part of it.
    op: String,
    failure: Failure,
    site: Site,
    comm: Option<CommError>,
}

impl Error {
    pub(crate) fn new(op: &str, headline: impl Into<Headline>, site: &'static Location<'static>) -> Error {
        Error::of(op, Failure::new(headline), site)
    }

    /// The failure of a call at a line, unless it names its own.
    pub(crate) fn of(op: &str, failure: Box<Failure>, site: &'static Location<'static>) -> Error {
        Error::caused(op, failure, site, None)
    }

    pub(crate) fn comm(op: &str, error: CommError, site: &'static Location<'static>) -> Error {
        Error::caused(op, error.failure(), site, Some(error))
    }

    /// A plan that failed while it ran; a communication error is kept as the cause.
    pub(crate) fn run(op: &str, error: &RunError, site: &'static Location<'static>) -> Error {
        let name = error.op().map_or(op, method_of);
        match error.comm_error() {
            Some(cause) => {
                let failure = cause.failure();
                let failure = match error.site() {
                    Some(line) => failure.at(line),
                    None => failure,
                };
                Error::caused(name, failure, site, Some(cause.clone()))
            }
            None if error.site().is_none() => Error::of(op, error.failure(), site),
            None => {
                let mut failure = error.failure().row(format!("called at {}", Site::from(site)));
                if error.op().is_some_and(|op| failure.op == op) {
                    failure.op = name.to_string().into();
                }
                Error::of(name, failure, site)
            }
        }
    }

    fn caused(
        op: &str,
        failure: Box<Failure>,
        site: &'static Location<'static>,
        comm: Option<CommError>,
    ) -> Error {
        let op = op.to_string();
        let failure = failure.of(op.clone()).at(site);
        let site = failure.site.unwrap_or(site.into());
        Error(Box::new(Inner { op, failure: *failure, site, comm })).noted()
    }

    /// Records which ranks caused the error.
    pub(crate) fn blaming(self, ranks: &[usize]) -> Error {
        consort_comm::note_trouble(Box::new(self.0.failure.clone()), ranks);
        self
    }

    /// The same as a failure of the method that the user called at `site`, not of an op that the method runs. Errors of
    /// other lines keep their names, and so do those of communication, which all ranks know by its op.
    fn named(mut self, method: &str, site: &'static Location<'static>) -> Error {
        let Inner { op, failure, comm, .. } = &mut *self.0;
        let is_local = matches!(comm, None | Some(CommError::Argument(_) | CommError::Exhausted { .. }));
        if !is_local || failure.site != Some(site.into()) || op == method {
            return self;
        }
        if !failure.rule.is_empty() && !method.starts_with(&op[..]) && built_in(op).is_some() {
            failure.notes.push(format!("{} is a rule of `{op}`", failure.rule));
        }
        let part = failure.op.strip_prefix(&op[..]).unwrap_or_default();
        failure.op = format!("{method}{part}").into();
        *op = method.to_string();
        self.noted()
    }

    /// Reports the error to the other ranks, should this one exit because of it. An error in a trace is not reported:
    /// the function may then run uncompiled.
    pub(crate) fn noted(self) -> Error {
        if !is_tracing() {
            consort_comm::note_trouble(Box::new(self.0.failure.clone()), &[]);
        }
        self
    }

    /// The same with one more way out.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Error {
        self.0.failure.notes.push(note.into());
        self.noted()
    }

    /// The same with one more row.
    pub(crate) fn row(mut self, row: impl Into<String>) -> Error {
        self.0.failure.rows.push(row.into());
        self.noted()
    }

    /// The facts.
    ///
    /// [`Error`] has an example.
    pub fn failure(&self) -> &Failure {
        &self.0.failure
    }

    /// The communication error, if it was one.
    ///
    /// [`Error`] has an example.
    pub fn comm_error(&self) -> Option<&CommError> {
        self.0.comm.as_ref()
    }

    /// The op.
    ///
    /// [`Error`] has an example.
    pub fn op(&self) -> &str {
        &self.0.op
    }

    /// Where it was called.
    ///
    /// [`Error`] has an example.
    pub fn site(&self) -> Site {
        self.0.site
    }
}

/// The method or function by which users call an op.
fn method_of(op: &str) -> &str {
    match op {
        "while" => "while_loop",
        "to_size" => "to_sizes",
        op => op,
    }
}

/// Results of methods that run ops of other names.
pub(crate) trait Named {
    /// The same; an error names the method that the user called at `site`.
    fn named(self, method: &str, site: &'static Location<'static>) -> Self;
}

impl<T> Named for Result<T> {
    #[inline]
    fn named(self, method: &str, site: &'static Location<'static>) -> Self {
        match self {
            Ok(value) => Ok(value),
            Err(error) => Err(error.named(method, site)),
        }
    }
}

/// The same text as `Display`, since a program whose `main` returns an error prints this.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.failure.fmt(f)
    }
}

impl std::error::Error for Error {}
