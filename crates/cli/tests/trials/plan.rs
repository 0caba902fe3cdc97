//! The plan of a trial, derived from a seed, so that every rank and the test itself know it.

use std::fmt;
use std::ops::RangeInclusive;

use consort_types::{Reduce, Rng};

/// The fault of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Nothing,
    /// SIGKILL, sent by the rank to itself, or by another rank while operations are pending.
    Killed,
    KilledByAnother,
    /// The process exits in some other way without a goodbye.
    ExitsWith0,
    ExitsWithCode,
    Panics,
    Aborts,
    /// SIGSTOP, sent by the rank to itself, or by another rank.
    Stopped,
    StoppedByAnother,
    /// It arrives after the others have given up.
    Late,
    /// It makes fewer calls than the others, says goodbye and exits with success.
    Leaves,
    /// It makes a different call than the others.
    OtherOp,
    OtherElement,
    OtherBytes,
    OtherReduction,
    OtherRoot,
    OtherRoute,
    OtherSplits,
    OtherLength,
    /// It makes the calls on two groups in a different order than the others, waiting for each.
    OtherOrder,
}

/// How survivors learn of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Nothing,
    /// The kernel tells the launcher, which tells the ranks.
    Death,
    /// Not reported: the deadline ends the wait, or a deadlock is detected.
    Absence,
    /// The published calls differ.
    Mismatch,
}

impl Fault {
    pub(crate) const ALL: [Fault; 20] = [
        Fault::Nothing,
        Fault::Killed,
        Fault::KilledByAnother,
        Fault::ExitsWith0,
        Fault::ExitsWithCode,
        Fault::Panics,
        Fault::Aborts,
        Fault::Stopped,
        Fault::StoppedByAnother,
        Fault::Late,
        Fault::Leaves,
        Fault::OtherOp,
        Fault::OtherElement,
        Fault::OtherBytes,
        Fault::OtherReduction,
        Fault::OtherRoot,
        Fault::OtherRoute,
        Fault::OtherSplits,
        Fault::OtherLength,
        Fault::OtherOrder,
    ];

    pub(crate) fn class(self) -> Class {
        match self {
            Fault::Nothing => Class::Nothing,
            Fault::Killed | Fault::KilledByAnother | Fault::ExitsWith0 | Fault::ExitsWithCode => Class::Death,
            Fault::Panics | Fault::Aborts => Class::Death,
            Fault::Stopped | Fault::StoppedByAnother | Fault::Late | Fault::Leaves => Class::Absence,
            // Each waits for a call that the other has not made: no published calls differ.
            Fault::OtherOrder => Class::Absence,
            _ => Class::Mismatch,
        }
    }

    /// The kinds of calls that can differ in this way.
    fn kinds(self) -> &'static [Kind] {
        const REDUCING: [Kind; 6] = [
            Kind::AllReduce,
            Kind::AllReduceList,
            Kind::AllReduceCommon,
            Kind::ReduceScatter,
            Kind::ReduceScatterV,
            Kind::Reduce,
        ];
        match self {
            Fault::OtherElement | Fault::OtherReduction => &REDUCING,
            Fault::OtherRoot => {
                &[Kind::Broadcast, Kind::BroadcastCommon, Kind::Reduce, Kind::Gather, Kind::Scatter]
            }
            Fault::OtherRoute => &[Kind::Permute],
            Fault::OtherSplits => &[Kind::AllToAll],
            Fault::OtherLength => &[Kind::Exchange],
            Fault::OtherOrder => &[Kind::AllReduce],
            // All but the last three: those have no size, or one at the root only, or a variable length.
            Fault::OtherBytes => &Kind::ALL[..15],
            Fault::OtherOp => &Kind::ALL[..17],
            _ => &Kind::ALL,
        }
    }
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    AllReduceList,
    AllReduceCommon,
    AllGather,
    AllGatherList,
    AllGatherCommon,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllGatherV,
    ReduceScatterV,
    Permute,
    BroadcastCommon,
    Barrier,
    Exchange,
}

impl Kind {
    pub(crate) const ALL: [Kind; 18] = [
        Kind::AllReduce,
        Kind::AllReduceList,
        Kind::AllReduceCommon,
        Kind::AllGather,
        Kind::AllGatherList,
        Kind::AllGatherCommon,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllGatherV,
        Kind::ReduceScatterV,
        Kind::Permute,
        Kind::BroadcastCommon,
        Kind::Barrier,
        Kind::Exchange,
    ];
}

/// One call, the same on all members but for the fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// On the group of a rank's part, or on the world.
    pub(crate) on_part: bool,
    pub(crate) kind: Kind,
    /// Elements of an even part.
    pub(crate) count: usize,
    pub(crate) reduce: Reduce,
    /// Modulo the size of the group.
    pub(crate) root: usize,
    /// Makes the data of each call different.
    pub(crate) salt: usize,
}

fn within(rng: &mut Rng, range: RangeInclusive<usize>) -> usize {
    range.start() + rng.below(range.end() - range.start() + 1)
}

/// Shuffles a list.
pub(crate) fn shuffle<T>(rng: &mut Rng, list: &mut [T]) {
    (1..list.len()).rev().for_each(|i| list.swap(i, rng.below(i + 1)));
}

/// A trial.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) ranks: usize,
    pub(crate) fault: Fault,
    pub(crate) guilty: usize,
    /// The rank that sends the signal, unless the guilty rank sends it to itself.
    pub(crate) other: usize,
    /// The step of the fault, and the call in it.
    pub(crate) step: usize,
    pub(crate) at: usize,
    /// Whether the fault occurs after the calls of its step were started, or before.
    pub(crate) in_flight: bool,
    /// The partition of the world, with the members of each part in this order.
    pub(crate) parts: Vec<Vec<usize>>,
    /// The calls of each step are started, then waited for.
    pub(crate) steps: Vec<Vec<Call>>,
    /// Whether the wait of a small message needs its receive.
    pub(crate) strict: bool,
    /// Whether a survivor ends with `exit`, or drops its values first.
    pub(crate) exits: bool,
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Plan {
        let mut random = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let fault = Fault::ALL[(seed % Fault::ALL.len() as u64) as usize];
        let ranks = within(&mut random, 2..=8);
        let guilty = within(&mut random, 0..=ranks - 1);
        let other = (guilty + within(&mut random, 1..=ranks - 1)) % ranks;
        let mut order: Vec<usize> = (0..ranks).collect();
        shuffle(&mut random, &mut order);
        let cut = if fault == Fault::OtherOrder { ranks } else { within(&mut random, 1..=ranks) };
        let parts = [&order[..cut], &order[cut..]].map(<[usize]>::to_vec);
        let parts: Vec<Vec<usize>> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        let count = within(&mut random, 1..=8);
        let mut steps: Vec<Vec<Call>> = (0..count)
            .map(|_| (0..within(&mut random, 1..=4)).map(|_| Call::new(&mut random, &Kind::ALL)).collect())
            .collect();
        let step = within(&mut random, 0..=count - 1);
        let at = within(&mut random, 0..=steps[step].len() - 1);
        if matches!(fault.class(), Class::Mismatch) {
            steps[step][at] = Call::new(&mut random, fault.kinds());
            // In a part of one rank nothing can differ.
            steps[step][at].on_part &= fault_can_be_on_part(&parts, guilty);
        } else if fault == Fault::OtherOrder {
            let call = Call::new(&mut random, fault.kinds());
            steps[step] = [false, true].map(|on_part| Call { on_part, ..call }).to_vec();
        }
        let [in_flight, exits, strict] = [(); 3].map(|()| random.below(100) < 50);
        Plan { seed, ranks, fault, guilty, other, step, at, in_flight, parts, steps, strict, exits }
    }
}

fn fault_can_be_on_part(parts: &[Vec<usize>], guilty: usize) -> bool {
    parts.iter().any(|part| part.contains(&guilty) && part.len() > 1)
}

impl Call {
    fn new(random: &mut Rng, kinds: &[Kind]) -> Call {
        // 4 bytes to 1 MiB, log-uniformly.
        let most = 1usize << within(random, 0..=18);
        Call {
            on_part: random.below(100) < 40,
            kind: random.pick(kinds),
            count: within(random, most.div_ceil(2)..=most),
            reduce: random.pick(&[Reduce::Sum, Reduce::Min, Reduce::Xor]),
            root: within(random, 0..=59),
            salt: within(random, 0..=999),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { ranks, fault, guilty, other, step, at, in_flight, exits, strict, parts, .. } = self;
        writeln!(f, "  {ranks} ranks in parts {parts:?}: rank {guilty} {fault:?} (or by {other})")?;
        writeln!(
            f,
            "  in call {at} of step {step}, in flight: {in_flight}; exits: {exits}; strict: {strict}"
        )?;
        for (i, calls) in self.steps.iter().enumerate() {
            for Call { on_part, kind, count, reduce, root, .. } in calls {
                let group = if *on_part { "part" } else { "world" };
                writeln!(f, "    step {i}: {group} {kind:?} x {count} {} root {root}", reduce.name())?;
            }
        }
        Ok(())
    }
}
