//! The operations that are measured: their names, how much they take and give, and what they are measured beside.

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
    AllReduceOutside,
}

impl Op {
    pub(crate) const ALL: [Op; 8] = [
        Op::AllReduce,
        Op::AllGather,
        Op::ReduceScatter,
        Op::AllToAll,
        Op::Broadcast,
        Op::Pingpong,
        Op::Ring,
        Op::AllReduceOutside,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllToAll => "all_to_all",
            Op::Broadcast => "broadcast",
            Op::Pingpong => "pingpong",
            Op::Ring => "ring",
            Op::AllReduceOutside => "all_reduce_outside",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Op> {
        Op::ALL.into_iter().find(|op| op.name() == name)
    }

    /// What the peer calls it. Where there are several, the best one counts.
    pub(crate) fn peer_names(self) -> &'static [&'static str] {
        match self {
            Op::AllReduce | Op::AllReduceOutside => &["all_reduce"],
            Op::AllGather => &["all_gather"],
            Op::ReduceScatter => &["reduce_scatter", "reduce_scatter_v"],
            Op::AllToAll => &["all_to_all"],
            Op::Broadcast => &["broadcast"],
            Op::Pingpong => &["pingpong"],
            Op::Ring => &["ring"],
        }
    }

    /// The bytes of the operand on `n` ranks.
    pub(crate) fn operand(self, n: usize, block: usize) -> usize {
        block * if matches!(self, Op::ReduceScatter | Op::AllToAll) { n } else { 1 }
    }

    /// The bytes of the result on `n` ranks. In place it is the operand.
    pub(crate) fn result(self, n: usize, block: usize) -> usize {
        block * if matches!(self, Op::AllGather | Op::AllToAll) { n } else { 1 }
    }

    /// Whether the result takes the place of the operand.
    pub(crate) fn is_in_place(self) -> bool {
        matches!(self, Op::AllReduce | Op::Broadcast | Op::AllReduceOutside)
    }

    /// Whether it is also measured in a plain form, which says what the special form costs or saves.
    pub(crate) fn has_plain(self) -> bool {
        matches!(self, Op::AllReduceOutside)
    }

    /// How many operations an iteration counts as.
    pub(crate) fn per_iteration(self) -> f64 {
        if self == Op::Pingpong { 2.0 } else { 1.0 }
    }

    /// The plain movement of the same bytes.
    pub(crate) fn movement(self) -> Movement {
        match self {
            Op::AllReduce | Op::AllReduceOutside => Movement::FoldAndCopy,
            Op::AllGather => Movement::Gather,
            Op::ReduceScatter => Movement::Fold,
            Op::AllToAll => Movement::Exchange,
            Op::Broadcast => Movement::Broadcast,
            Op::Pingpong => Movement::Pingpong,
            Op::Ring => Movement::Ring,
        }
    }

    /// What a block of the result holds on a rank if rank r brings r + 1; an iteration of an even number.
    pub(crate) fn expected(self, n: usize, rank: usize, block: usize) -> f32 {
        let whole = match self {
            Op::AllReduce | Op::AllReduceOutside | Op::ReduceScatter => n * (n + 1) / 2,
            Op::AllGather | Op::AllToAll => block + 1,
            Op::Broadcast => 1,
            Op::Pingpong => 2 - rank.min(1),
            Op::Ring => (rank + n - 1) % n + 1,
        };
        whole as f32
    }
}
