//! Why a rank stopped, as it tells the others.

use consort_types::Failure;
use serde::{Deserialize, Serialize};

/// No rank.
pub(crate) const NOBODY: usize = usize::MAX;

/// Why a rank stopped. Its error crosses processes as text, without and with the way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// The rank that found it, which others may repeat; [`NOBODY`] if the control plane reported it.
    pub by: usize,
    /// Its error, without notes.
    pub text: String,
    /// The notes, as they follow one another in a text; empty if there are none.
    pub notes: String,
    /// The ranks to blame, as far as it could find out.
    pub culprits: Vec<usize>,
    /// Whether it is a deadlock, which involves several ranks alike.
    pub is_deadlock: bool,
}

impl Cause {
    /// The cause that a rank found, and that is not a deadlock.
    pub(crate) fn new(by: usize, mut failure: Box<Failure>, culprits: Vec<usize>) -> Cause {
        let notes = std::mem::take(&mut failure.notes).join("\n  note: ");
        Cause { by, text: failure.to_string(), notes, culprits, is_deadlock: false }
    }

    /// Its error.
    pub(crate) fn failure(&self) -> Box<Failure> {
        let failure = Failure::new(self.text.clone());
        if self.notes.is_empty() { failure } else { failure.note(self.notes.clone()) }
    }
}
