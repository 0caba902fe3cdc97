//! Errors: the op first, expected before got, the user's source line, and a note with the way out.

use std::fmt;
use std::panic::Location;

use consort_comm::CommError;
use consort_ir::ops::Violation;
use consort_runtime::execute::RunError;

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
/// assert!(error.comm_error().is_none()); // The other ranks had no part in it.
/// assert!(error.to_string().starts_with("reshape: expected"));
/// assert_eq!(format!("{error:?}"), error.to_string()); // So a `main` that gives it prints it well.
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    op: String,
    cause: Cause,
    site: &'static Location<'static>,
}

#[derive(Clone)]
enum Cause {
    /// A rule of the op is violated: its number, what was expected, a note.
    Rule(Violation),
    /// Communication failed.
    Comm(CommError),
    /// Any other error, as text.
    Other(String),
}

impl Error {
    pub(crate) fn rule(op: &str, violation: Violation, site: &'static Location<'static>) -> Error {
        Error(Box::new(Inner { op: op.to_string(), cause: Cause::Rule(violation), site })).noted()
    }

    pub(crate) fn comm(op: &str, error: CommError, site: &'static Location<'static>) -> Error {
        Error(Box::new(Inner { op: op.to_string(), cause: Cause::Comm(error), site })).noted()
    }

    /// A plan that failed while it ran; a communication error is kept as the cause.
    pub(crate) fn run(op: &str, error: &RunError, site: &'static Location<'static>) -> Error {
        match error.comm_error() {
            Some(cause) => Error::comm(error.op().unwrap_or(op), cause.clone(), site),
            None => Error::new(op, error.to_string(), site),
        }
    }

    pub(crate) fn new(op: &str, message: impl Into<String>, site: &'static Location<'static>) -> Error {
        Error(Box::new(Inner { op: op.to_string(), cause: Cause::Other(message.into()), site })).noted()
    }

    /// Records which ranks caused the error.
    pub(crate) fn blaming(self, ranks: &[usize]) -> Error {
        consort_comm::note_trouble(&self, ranks);
        self
    }

    /// Reports the error to the other ranks, should this one exit because of it. An error in a trace is not reported:
    /// the function may then run uncompiled.
    pub(crate) fn noted(self) -> Error {
        if !is_tracing() {
            consort_comm::note_trouble(&self, &[]);
        }
        self
    }

    /// Appends a note, unless it is empty.
    pub(crate) fn with_note(self, note: &str) -> Error {
        if note.is_empty() {
            return self;
        }
        let Inner { op, cause, site } = *self.0;
        let more = note.trim_start_matches("\n  note: ");
        let joined =
            |note: Option<String>| note.map_or(more.to_string(), |note| format!("{note}\n  note: {more}"));
        let cause = match cause {
            Cause::Rule(violation) => {
                let note = joined(violation.note);
                Cause::Rule(Violation { note: Some(note), ..violation })
            }
            Cause::Other(message) => Cause::Other(format!("{message}\n  note: {more}")),
            Cause::Comm(error) => Cause::Comm(error),
        };
        Error(Box::new(Inner { op, cause, site }))
    }

    /// The communication error, if it was one.
    ///
    /// [`Error`] has an example.
    pub fn comm_error(&self) -> Option<&CommError> {
        if let Cause::Comm(error) = &self.0.cause { Some(error) } else { None }
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
    pub fn site(&self) -> &'static Location<'static> {
        self.0.site
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
        let Inner { op, cause, site } = &*self.0;
        let (message, note) = match cause {
            Cause::Rule(Violation { rule, message, note }) => (format!("{message} ({rule})"), note.clone()),
            Cause::Other(message) => match message.split_once("\n  note: ") {
                Some((message, note)) => (message.to_string(), Some(note.to_string())),
                None => (message.clone(), None),
            },
            Cause::Comm(error) => {
                let text = error.to_string();
                // The text may begin with the op already: `all_reduce sum f32: ..`.
                let named = text.strip_prefix(&op[..]).is_some_and(|rest| rest.starts_with([':', ' ']));
                let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
                if !named {
                    write!(f, "{op}: ")?;
                }
                write!(f, "{first}\n  at {}:{}", site.file(), site.line())?;
                return if rest.is_empty() { Ok(()) } else { write!(f, "\n{rest}") };
            }
        };
        write!(f, "{op}: {message}\n  at {}:{}", site.file(), site.line())?;
        match note {
            Some(note) => write!(f, "\n  note: {note}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}
