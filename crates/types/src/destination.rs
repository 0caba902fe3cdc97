//! Where an operation that works in place writes its result. Eager code asks it of tensors, the planner of lines of a
//! plan; both decide by [`Destination::of`].

/// Why the storage of an operand cannot be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It is read later: it has another owner, or peers still read it.
    Needed,
    /// It is an argument that was not donated.
    Argument,
    /// It is also returned.
    Returned,
    /// Its elements are not contiguous.
    Gaps,
}

impl Held {
    /// Every reason.
    pub const ALL: [Held; 4] = [Held::Needed, Held::Argument, Held::Returned, Held::Gaps];

    /// How plans spell it.
    pub fn name(self) -> &'static str {
        match self {
            Held::Needed => "needed",
            Held::Argument => "argument",
            Held::Returned => "returned",
            Held::Gaps => "gaps",
        }
    }

    /// The reason of this spelling.
    pub fn from_name(name: &str) -> Option<Held> {
        Held::ALL.into_iter().find(|held| held.name() == name)
    }
}

/// Where a result that overwrites an operand goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The storage of the operand.
    Operand,
    /// New storage, with the operand's elements copied to it, for this reason.
    Copy(Held),
    /// New storage, whose elements do not matter before.
    New,
}

impl Destination {
    /// `held` says why the operand cannot be overwritten, if so; `needed`, whether the operation reads what it holds.
    #[inline(always)]
    pub fn of(held: Option<Held>, needed: bool) -> Destination {
        match held {
            None => Destination::Operand,
            Some(held) if needed => Destination::Copy(held),
            Some(_) => Destination::New,
        }
    }
}
