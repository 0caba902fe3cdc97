//! The loops of a rank on live data: each iteration writes the whole input and reads the whole result.

use std::hint::black_box;
use std::panic::Location;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use consort_comm::{Buffer, Common, Group, Message, Note, OperandType, Pending, Probe, Request};
use consort_types::{Axes, Collective, Dtype, GroupName, Kind, Reduce};

use super::ops::Op;
use crate::report::wrong;

/// One rank's group, its buffers for the operation under test, and the probe of the machine.
pub(crate) struct Live {
    group: Group,
    /// None over MPI, where ranks share no memory.
    probe: Option<Probe>,
    block: usize,
    /// Both are present between loops. For an in-place operation the result is only for the probe.
    operand: Option<Buffer>,
    result: Option<Buffer>,
    /// Present between an operation and the end of its iteration.
    common: Option<Common>,
    /// The data of an operation on memory outside of the heap.
    outside: Vec<u8>,
}

/// How long a loop may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

fn until() -> Instant {
    Instant::now() + LIMIT
}

/// The bytes of eight floats, written over and over.
type Pattern = [u8; 32];

fn pattern(values: [f32; 8]) -> Pattern {
    let mut pattern = [0; 32];
    pattern.chunks_exact_mut(4).zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
    pattern
}

/// The pattern that an iteration writes.
fn changing(iteration: u64) -> Pattern {
    pattern([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0].map(|x| x + (iteration % 4) as f32))
}

fn write(to: &mut [u8], pattern: &Pattern) {
    let mut chunks = to.chunks_exact_mut(pattern.len());
    chunks.by_ref().for_each(|chunk| chunk.copy_from_slice(pattern));
    let rest = chunks.into_remainder();
    rest.copy_from_slice(&pattern[..rest.len()]);
    black_box(to);
}

fn read(from: &[u8]) {
    let float = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut sums = [0f32; 8];
    let mut chunks = black_box(from).chunks_exact(32);
    for chunk in chunks.by_ref() {
        for (sum, bytes) in sums.iter_mut().zip(chunk.chunks_exact(4)) {
            *sum += float(bytes);
        }
    }
    sums[0] += chunks.remainder().chunks_exact(4).map(float).sum::<f32>();
    black_box(sums);
}

impl Live {
    pub(crate) fn new(group: Group, is_mpi: bool) -> anyhow::Result<Live> {
        let probe = if is_mpi { None } else { Some(Probe::new(&group, until())?) };
        Ok(Live { group, probe, block: 0, operand: None, result: None, common: None, outside: Vec::new() })
    }

    pub(crate) fn probe(&mut self) -> anyhow::Result<&mut Probe> {
        self.probe.as_mut().context("no probe over MPI")
    }

    /// Allocates the buffers of an operation, touches them, and checks the operation's result.
    pub(crate) fn prepare(&mut self, op: Op, block: usize) -> anyhow::Result<()> {
        (self.operand, self.result, self.outside) = (None, None, Vec::new());
        // No peer reads the previous buffers any more.
        self.meet()?;
        let (n, me) = (self.group.size(), self.group.rank());
        self.block = block;
        if op.is_outside() {
            self.outside = vec![0; block];
        }
        let own = pattern([me as f32 + 1.0; 8]);
        for (place, len) in
            [(&mut self.operand, op.operand(n, block)), (&mut self.result, op.result(n, block))]
        {
            let buffer = place.insert(self.group.heap().alloc(len)?);
            write(&mut buffer.bytes_mut(until())?, &own);
        }
        self.outside.chunks_exact_mut(4).for_each(|float| float.copy_from_slice(&own[..4]));
        self.once(op, 0, until())?;
        if op == Op::Pingpong && me > 1 {
            return Ok(());
        }
        self.arrived(op, |arrived| {
            for (i, got) in arrived.chunks_exact(block).enumerate() {
                let expected = op.expected(n, me, i);
                if got.chunks_exact(4).any(|bytes| bytes != expected.to_le_bytes()) {
                    let expected = format!("{expected} in block {i} of the result");
                    bail!(wrong(op.name(), expected, "a different value"));
                }
            }
            Ok(())
        })??;
        self.common = None;
        Ok(())
    }

    /// Waits until all ranks are awake: those that slept before the first barrier are awake after it.
    pub(crate) fn meet(&self) -> anyhow::Result<()> {
        for _ in 0..3 {
            self.group.barrier()?.wait(until())?;
        }
        Ok(())
    }

    /// The loop with the operation.
    pub(crate) fn run(&mut self, op: Op, iterations: u64) -> anyhow::Result<()> {
        let until = until();
        for iteration in 0..iterations {
            self.write(op, &changing(iteration), until)?;
            self.once(op, iteration, until)?;
            self.arrived(op, read)?;
            self.common = None;
        }
        Ok(())
    }

    /// The loop without the operation.
    pub(crate) fn run_base(&mut self, op: Op, iterations: u64) -> anyhow::Result<()> {
        let until = until();
        for iteration in 0..iterations {
            self.write(op, &changing(iteration), until)?;
            self.arrived(op, read)?;
        }
        Ok(())
    }

    /// The loop with plain movement of the same bytes; returns how long it took.
    pub(crate) fn run_bound(&mut self, op: Op, iterations: u64) -> anyhow::Result<Duration> {
        self.run_base(op, 1)?;
        let buffers = [take(&mut self.operand)?, take(&mut self.result)?];
        let write = |to: &mut [u8], iteration| write(to, &changing(iteration));
        let (spent, [operand, result]) =
            self.probe()?.run(op.movement(), iterations, buffers, write, read, until())?;
        (self.operand, self.result) = (Some(operand), Some(result));
        Ok(spent)
    }

    fn write(&mut self, op: Op, pattern: &Pattern, until: Instant) -> anyhow::Result<()> {
        if op.is_outside() {
            write(&mut self.outside, pattern);
        } else {
            // A root that gave its operand away allocates another.
            let operand = match self.operand.take() {
                Some(operand) => operand,
                None => self.group.heap().alloc(op.operand(self.group.size(), self.block))?,
            };
            write(&mut self.operand.insert(operand).bytes_mut(until)?, pattern);
        }
        Ok(())
    }

    /// Looks at the result of the operation, or at the place where it would be.
    fn arrived<R>(&self, op: Op, look: impl FnOnce(&[u8]) -> R) -> anyhow::Result<R> {
        if let Some(common) = &self.common {
            return Ok(look(common.bytes()));
        }
        if op.is_outside() {
            return Ok(look(&self.outside));
        }
        let buffer = if op.is_in_place() { &self.operand } else { &self.result };
        Ok(look(&buffer.as_ref().context(MISSING)?.bytes()?))
    }

    /// The operation.
    fn once(&mut self, op: Op, iteration: u64, until: Instant) -> anyhow::Result<()> {
        match op {
            Op::Pingpong => self.pingpong(until),
            Op::AllReduceOutside | Op::AllReduceCopied => self.outside(op, until),
            Op::AllReduceCommon | Op::AllGatherCommon | Op::BroadcastCommon => {
                self.common(op, iteration, until)
            }
            _ => self.separate(op, iteration, until),
        }
    }

    /// An operation with a result for each rank.
    fn separate(&mut self, op: Op, iteration: u64, until: Instant) -> anyhow::Result<()> {
        let (group, n, me) = (&self.group, self.group.size(), self.group.rank());
        let operand = take(&mut self.operand)?;
        let mut result = || take(&mut self.result);
        let started = match op {
            Op::Broadcast => group.broadcast(operand, iteration as usize % n)?,
            Op::AllGather => group.all_gather(operand, result()?, 1)?,
            Op::ReduceScatter => group.reduce_scatter(operand, result()?, Dtype::F32, Reduce::Sum, 1)?,
            Op::AllToAll => all_to_all(group, operand, result()?)?,
            Op::Ring => {
                let send = Message::new((me + 1) % n, 0, operand);
                let recv = Message::new((me + n - 1) % n, 0, result()?);
                group.exchange([send], [recv])?
            }
            _ => group.all_reduce(operand, Dtype::F32, Reduce::Sum)?,
        };
        let mut got = started.wait(until)?.into_iter();
        self.operand = got.next();
        self.result = got.next().or(self.result.take());
        Ok(())
    }

    /// An operation with one result for all ranks.
    fn common(&mut self, op: Op, iteration: u64, until: Instant) -> anyhow::Result<()> {
        let (group, root) = (&self.group, iteration as usize % self.group.size());
        let started = match op {
            Op::BroadcastCommon => {
                let operand = if root == group.rank() { self.operand.take() } else { None };
                group.broadcast_common(operand, root)?
            }
            Op::AllGatherCommon => group.all_gather_common(take(&mut self.operand)?, 1)?,
            _ => group.all_reduce_common(take(&mut self.operand)?, Dtype::F32, Reduce::Sum)?,
        };
        let (operands, common) = started.wait(until)?;
        self.operand = operands.into_iter().next().or(self.operand.take());
        self.common = Some(common);
        Ok(())
    }

    /// An operation on memory outside of the heap.
    fn outside(&mut self, op: Op, until: Instant) -> anyhow::Result<()> {
        let group = &self.group;
        let operand = if op == Op::AllReduceOutside {
            group.heap().alloc_from(&self.outside)?
        } else {
            let mut operand = take(&mut self.operand)?;
            operand.bytes_mut(until)?.copy_from_slice(&self.outside);
            operand
        };
        let mut got = group.all_reduce(operand, Dtype::F32, Reduce::Sum)?.wait(until)?;
        self.outside.copy_from_slice(&got[0].bytes()?);
        if op == Op::AllReduceCopied {
            self.operand = Some(got.remove(0));
        }
        Ok(())
    }

    /// Rank 0 sends to rank 1, which receives before it sends back. The other ranks do nothing.
    fn pingpong(&mut self, until: Instant) -> anyhow::Result<()> {
        let me = self.group.rank();
        if me > 1 {
            return Ok(());
        }
        let message = |buffer| Message::new(1 - me, 0, buffer);
        let send = [message(take(&mut self.operand)?)];
        let recv = [message(take(&mut self.result)?)];
        if me == 0 {
            let mut got = self.group.exchange(send, recv)?.wait(until)?.into_iter();
            (self.operand, self.result) = (got.next(), got.next());
        } else {
            self.result = self.group.exchange([], recv)?.wait(until)?.into_iter().next();
            self.operand = self.group.exchange(send, [])?.wait(until)?.into_iter().next();
        }
        Ok(())
    }
}

/// A block of the operand for each member.
fn all_to_all(group: &Group, operand: Buffer, result: Buffer) -> anyhow::Result<Pending> {
    let collective = &Collective::new(Kind::AllToAll, GroupName::Axes(Axes::NONE));
    let types = &[OperandType::new(Dtype::U8, &[])];
    let (note, site) = (Note::default(), Location::caller());
    Ok(group.start(Request { collective, types, operands: operand, results: [result], note, site })?)
}

const MISSING: &str = "expected `prepare` before a loop";

fn take(buffer: &mut Option<Buffer>) -> anyhow::Result<Buffer> {
    buffer.take().context(MISSING)
}
