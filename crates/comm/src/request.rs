//! What a call is made of: everything that a group is told of it.

use std::panic::Location;

use consort_types::Collective;

use crate::arguments::OperandType;
use crate::recorder::Name;

/// A collective, or a batch of messages, that all members of a group start.
///
/// `types` has the type of each operand, or one that all have; sizes count along the dimension of an operand. Operands and
/// results are those of this member's role ([`Collective::has_operands`], [`Collective::role`]); operands of a batch are the
/// sends, then the receives, which are written in place. Sizes are `S`: numbers, for a group.
pub struct Request<'a, S, O, R> {
    /// What is done.
    pub collective: &'a Collective<'a, S>,
    /// The types of the operands.
    pub types: &'a [OperandType<'a>],
    /// The buffers that are read, or replaced.
    pub operands: O,
    /// The buffers that are written.
    pub results: R,
    /// What members compare and print of it besides.
    pub note: Note,
    /// The line that starts it, unless the note has another.
    pub site: &'static Location<'static>,
}

impl<'a, S, O, R> Request<'a, S, O, R> {
    /// A request of the calling line, without a note.
    #[track_caller]
    pub fn new(
        collective: &'a Collective<'a, S>,
        types: &'a [OperandType<'a>],
        operands: O,
        results: R,
    ) -> Request<'a, S, O, R> {
        Request { collective, types, operands, results, note: Note::default(), site: Location::caller() }
    }
}

/// What a caller says of an operation besides its arguments.
#[derive(Clone, Copy, Debug, Default)]
pub struct Note {
    /// A digest of what else must be equal on all members: types and shapes, which bytes do not carry.
    pub digest: u64,
    /// A text for messages, by a name of the group's recorder.
    pub text: Name,
    /// The source line, if not that of the starting call: a line of the program itself.
    pub site: Name,
    /// The number of a call that the text belongs to, from 1 on; 0 for none. `of f` with number 3 reads `call 3 of f`:
    /// texts are kept forever, and so must not change from call to call.
    pub number: u32,
    /// Whether it is part of an agreement: then the text stands for the whole call, and a member that makes another
    /// call differs.
    pub is_agreement: bool,
}
