//! The measured operations: their names, the sizes of operands and results, and their baselines.

use consort_comm::Movement;

/// An operation. Sizes are those of one block, as MPI counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Pingpong,
    Ring,
    /// With one result shared by all ranks.
    AllReduceCommon,
    AllGatherCommon,
    BroadcastCommon,
    /// On memory outside of the heap.
    AllReduceOutside,
    /// The same by hand: a copy to an existing buffer, the operation, a copy back.
    AllReduceCopied,
}

impl Op {
    pub(crate) const ALL: [Op; 12] = [
        Op::AllReduce,
        Op::AllGather,
        Op::ReduceScatter,
        Op::AllToAll,
        Op::Broadcast,
        Op::Pingpong,
        Op::Ring,
        Op::AllReduceCommon,
        Op::AllGatherCommon,
        Op::BroadcastCommon,
        Op::AllReduceOutside,
        Op::AllReduceCopied,
    ];

    /// The operations measured by default: all but those that are only baselines.
    pub(crate) fn usual() -> Vec<Op> {
        Op::ALL.into_iter().filter(|op| *op != Op::AllReduceCopied).collect()
    }

    /// Those that are calls of MPI.
    pub(crate) fn plain_ones() -> Vec<Op> {
        Op::usual().into_iter().filter(|op| op.plain().is_none()).collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
            Op::Broadcast => "broadcast",
            Op::Pingpong => "pingpong",
            Op::Ring => "ring",
            Op::AllReduceCommon => "all_reduce_common",
            Op::AllGatherCommon => "all_gather_common",
            Op::BroadcastCommon => "broadcast_common",
            Op::AllReduceOutside => "all_reduce_outside",
            Op::AllReduceCopied => "all_reduce_copied",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Op> {
        Op::ALL.into_iter().find(|op| op.name() == name)
    }

    /// The plain form of a special one, which is measured too, to show what the special form costs or saves.
    pub(crate) fn plain(self) -> Option<Op> {
        match self {
            Op::AllReduceCommon => Some(Op::AllReduce),
            Op::AllGatherCommon => Some(Op::AllGather),
            Op::BroadcastCommon => Some(Op::Broadcast),
            Op::AllReduceOutside => Some(Op::AllReduceCopied),
            _ => None,
        }
    }

    /// The operation without regard to its form.
    fn kind(self) -> Op {
        match self {
            Op::AllReduceCopied => Op::AllReduce,
            _ => self.plain().map_or(self, Op::kind),
        }
    }

    /// The peer's names for it. If there are several, the best one counts.
    pub(crate) fn peer_names(self) -> &'static [&'static str] {
        match self.kind() {
            Op::AllGather => &["all_gather"],
            Op::ReduceScatter => &["reduce_scatter", "reduce_scatter_v"],
            Op::AllToAll => &["all_to_all"],
            Op::Broadcast => &["broadcast"],
            Op::Pingpong => &["pingpong"],
            Op::Ring => &["ring"],
            _ => &["all_reduce"],
        }
    }

    /// The peer's name for the call that our engine over MPI makes.
    pub(crate) fn same_call(self) -> &'static str {
        if self == Op::ReduceScatter { "reduce_scatter_v" } else { self.peer_names()[0] }
    }

    /// The bytes of the operand on `n` ranks.
    pub(crate) fn operand(self, n: usize, block: usize) -> usize {
        block * if matches!(self, Op::ReduceScatter | Op::AllToAll) { n } else { 1 }
    }

    /// The bytes of the result on `n` ranks. In place it is the operand.
    pub(crate) fn result(self, n: usize, block: usize) -> usize {
        block * if matches!(self.kind(), Op::AllGather | Op::AllToAll) { n } else { 1 }
    }

    /// Whether the result replaces the operand, or is read there.
    pub(crate) fn is_in_place(self) -> bool {
        matches!(self, Op::AllReduce | Op::Broadcast | Op::BroadcastCommon)
    }

    /// Whether the data is outside of the heap.
    pub(crate) fn is_outside(self) -> bool {
        matches!(self, Op::AllReduceOutside | Op::AllReduceCopied)
    }

    /// How many operations an iteration contains.
    pub(crate) fn per_iteration(self) -> f64 {
        if self == Op::Pingpong { 2.0 } else { 1.0 }
    }

    /// The plain movement of the same bytes.
    pub(crate) fn movement(self) -> Movement {
        match self.kind() {
            Op::AllGather => Movement::Gather,
            Op::ReduceScatter => Movement::Fold,
            Op::AllToAll => Movement::Exchange,
            Op::Broadcast => Movement::Broadcast,
            Op::Pingpong => Movement::Pingpong,
            Op::Ring => Movement::Ring,
            _ => Movement::FoldAndCopy,
        }
    }

    /// The elements in a block of the result if rank r contributes r + 1, in the first iteration.
    pub(crate) fn expected(self, n: usize, rank: usize, block: usize) -> f32 {
        let whole = match self.kind() {
            Op::AllGather | Op::AllToAll => block + 1,
            Op::Broadcast => 1,
            Op::Pingpong => 2 - rank.min(1),
            Op::Ring => (rank + n - 1) % n + 1,
            _ => n * (n + 1) / 2,
        };
        whole as f32
    }
}
