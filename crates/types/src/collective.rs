//! The description of a collective or a batch of messages. Verifier, planner, hazard checker, lowering, eager code and
//! groups all use it, so these decisions are made only once.

use crate::group::GroupName;
use crate::message::{Message, Route};
use crate::reduce::Reduce;

/// The kinds of communication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Every member gets the reduction of all operands.
    AllReduce,
    /// Every member gets all operands, joined.
    AllGather,
    /// Every member gets its part of the reduction.
    ReduceScatter,
    /// Every member gets a part of each operand.
    AllToAll,
    /// Every member gets the root's operand.
    Broadcast,
    /// The root gets the reduction of all operands.
    Reduce,
    /// The root gets all operands, joined.
    Gather,
    /// Every member gets its part of the root's operand.
    Scatter,
    /// As `AllGather`, with a size for each member.
    AllGatherV,
    /// As `ReduceScatter`, with a size for each member.
    ReduceScatterV,
    /// Every member gets the operand of the member that sends to it.
    Permute,
    /// No member continues before all have arrived.
    #[default]
    Barrier,
    /// Sends and receives.
    Exchange,
}

/// The role of a member in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// Whether peers read its operands.
    pub is_read: bool,
    /// Where its results are written.
    pub written: Written,
}

/// Where the results of a member are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The storage of the operands.
    InPlace,
    /// Nowhere: the results are the unchanged operands.
    Same,
    /// Other storage.
    New,
    /// Other storage, which this member fills with zeros.
    Zeros,
    /// There are no results.
    Nothing,
}

impl Kind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Kind; 13] = [
        Kind::AllReduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllGatherV,
        Kind::ReduceScatterV,
        Kind::Permute,
        Kind::Barrier,
        Kind::Exchange,
    ];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::AllGatherV => "all_gather_v",
            Kind::ReduceScatterV => "reduce_scatter_v",
            Kind::Permute => "permute",
            Kind::Barrier => "barrier",
            Kind::Exchange => "exchange",
        }
    }

    /// Whether it has a root.
    #[inline(always)]
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    /// Whether it has a reduction.
    #[inline(always)]
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::ReduceScatterV)
    }

    /// Whether member `me` passes operands to a group. All members of a program have an operand in a `Scatter`; only the
    /// root's is read.
    #[inline(always)]
    pub fn has_operands(self, root: Option<usize>, me: usize) -> bool {
        match self {
            Kind::Scatter => root == Some(me),
            Kind::Barrier => false,
            _ => true,
        }
    }

    /// The role of member `me`, where `root` is the root, if any. A member that sends nothing in a `Permute` or an
    /// `Exchange` is not read either.
    #[inline(always)]
    pub fn role(self, root: Option<usize>, me: usize) -> Role {
        let is_root = root == Some(me);
        let (is_read, written) = match self {
            Kind::AllReduce => (true, Written::InPlace),
            Kind::AllGather
            | Kind::ReduceScatter
            | Kind::AllToAll
            | Kind::AllGatherV
            | Kind::ReduceScatterV
            | Kind::Permute => (true, Written::New),
            Kind::Broadcast => (is_root, if is_root { Written::Same } else { Written::InPlace }),
            Kind::Reduce => (!is_root, if is_root { Written::InPlace } else { Written::Zeros }),
            Kind::Gather => (!is_root, if is_root { Written::New } else { Written::Zeros }),
            Kind::Scatter => (is_root, Written::New),
            Kind::Barrier => (false, Written::Nothing),
            Kind::Exchange => (true, Written::InPlace),
        };
        Role { is_read, written }
    }

    /// Whether one call takes a list of operands, of any element types.
    #[inline(always)]
    pub fn takes_list(self) -> bool {
        !matches!(self, Kind::AllToAll | Kind::AllGatherV | Kind::ReduceScatterV | Kind::Barrier)
    }
}

/// A collective, or a batch of messages. `S` is the type of sizes: an expression in programs, a number at run time.
#[derive(Clone, Copy, Debug)]
pub struct Collective<'a, S> {
    /// The kind.
    pub kind: Kind,
    /// The group.
    pub over: GroupName,
    /// The reduction, if it reduces.
    pub reduce: Option<Reduce>,
    /// The root: the source or destination of all data.
    pub root: Option<usize>,
    /// The dimension along which each operand is split or joined.
    pub dims: &'a [usize],
    /// The size of each member's part along that dimension, if they differ.
    pub sizes: &'a [S],
    /// The sizes that an all_to_all sends to each member, and those that it receives, if they differ.
    pub splits: Option<(&'a [S], &'a [S])>,
    /// The route of a permute.
    pub route: Option<&'a Route>,
    /// The sends of an exchange: its first operands.
    pub sends: &'a [Message<S>],
    /// The receives of an exchange: its remaining operands.
    pub receives: &'a [Message<S>],
}

impl<'a, S> Collective<'a, S> {
    /// A collective without optional parts.
    #[inline(always)]
    pub fn new(kind: Kind, over: GroupName) -> Collective<'a, S> {
        Collective {
            kind,
            over,
            reduce: None,
            root: None,
            dims: &[],
            sizes: &[],
            splits: None,
            route: None,
            sends: &[],
            receives: &[],
        }
    }

    /// The role of member `me`.
    #[inline(always)]
    pub fn role(&self, me: usize) -> Role {
        self.kind.role(self.root, me)
    }

    /// Whether member `me` passes operands to a group.
    #[inline(always)]
    pub fn has_operands(&self, me: usize) -> bool {
        self.kind.has_operands(self.root, me)
    }

    /// Whether it has no sizes and no messages, so that nothing is left to be evaluated.
    pub fn is_plain(&self) -> bool {
        self.sizes.is_empty() && self.splits.is_none() && self.sends.is_empty() && self.receives.is_empty()
    }

    /// The operand that a result overwrites, if receiving members work in place.
    pub fn overwrites(&self, result: usize) -> Option<usize> {
        match self.kind {
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce => Some(result),
            Kind::Exchange => Some(self.sends.len() + result),
            _ => None,
        }
    }

    /// Whether the contents of an operand matter at member `me`: not if a broadcast overwrites it, nor if a message
    /// that `comes` does. A message not known to come counts as missing.
    pub fn needs(&self, operand: usize, me: usize, comes: impl FnOnce(&Message<S>) -> Option<bool>) -> bool {
        let receive = operand.checked_sub(self.sends.len()).and_then(|at| self.receives.get(at));
        match receive {
            Some(message) => comes(message) != Some(true),
            None => self.kind != Kind::Broadcast || self.root == Some(me),
        }
    }

    /// The dimension along which operands may differ between members.
    pub fn uneven(&self) -> Option<usize> {
        match self.kind {
            Kind::AllToAll => Some(0),
            Kind::AllGatherV => self.dims.first().copied(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_result_has_a_reader_or_an_operand_of_its_own() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number, "{}", kind.name());
            let root = kind.has_root().then_some(1);
            let roles: Vec<Role> = (0..3).map(|me| kind.role(root, me)).collect();
            // If any member receives data of others, some member must be read.
            let gets = roles.iter().any(|role| matches!(role.written, Written::New | Written::InPlace));
            assert_eq!(roles.iter().any(|role| role.is_read), gets, "{}", kind.name());
            let collective =
                Collective::<usize> { root, ..Collective::new(kind, GroupName::Axes(crate::Axes::NONE)) };
            let in_place = roles.iter().any(|role| role.written == Written::InPlace);
            assert_eq!(collective.overwrites(0).is_some(), in_place, "{}", kind.name());
        }
    }
}
