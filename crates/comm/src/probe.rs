//! What the machine needs for moving the same bytes: the bound that a benchmark puts beside an operation.
//!
//! A [`Probe`] moves bytes between the members' heaps with plain loops and nothing around them but words on which the
//! members spin: no descriptors, no checks, no sleeping. It keeps to one rule, by a word of each member that only
//! grows, its *phase*: in a round of four steps a member writes its operand (after all have finished the round
//! before), says that it is written, says for an all_reduce that its part is reduced, and says that it has finished.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use bytemuck::{cast_slice, cast_slice_mut};

use crate::CommError;
use crate::call::Members;
use crate::group::Group;
use crate::heap::Buffer;

/// Which bytes are moved; sizes are those of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Movement {
    /// The operand of a root, which changes every round, to all, in place.
    Broadcast,
    /// The operands of all, side by side, into every result.
    Gather,
    /// Block `i` of every operand into the result of member `i`.
    Exchange,
    /// The sum of block `i` of every operand into the result of member `i`.
    Fold,
    /// The sum of all operands, in place: each member folds its part, then copies the parts of the others.
    FoldAndCopy,
    /// The operand of the member before into the result.
    Ring,
    /// The operand of member 0 into the result of member 1, then the other way; other members do nothing.
    Pingpong,
}

/// The words of a member, each on a line of its own.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Word {
    Phase,
    Ping,
    /// Where the operand lies; written before the phase that says so.
    Operand,
}

const LINE: usize = 64;
const WORDS: usize = 3 * LINE;

/// The steps of a round.
const WRITTEN: u64 = 1;
const REDUCED: u64 = 2;
const FINISHED: u64 = 3;

/// Up to so many bytes every member folds all of a sum by itself, since one more round trip costs more.
const SMALL: usize = 4096;
/// Floats that are folded at once, so that the sums of many operands stay in the first cache.
const BLOCK: usize = 1024;

/// Plain movement between the members of a group, to be timed.
pub struct Probe {
    members: Members,
    /// Where each member's words lie.
    words: Vec<usize>,
    /// The last phase of the rounds so far, alike on all members.
    phase: u64,
    /// How many times the word of the line probe has gone to and fro.
    pings: u64,
    /// Whether a waiter keeps its core: there is one for each member.
    spins: bool,
}

impl Probe {
    /// All members call it.
    pub fn new(group: &Group, until: Instant) -> Result<Probe, CommError> {
        let heap = group.heap();
        // Never freed: a peer may look at a word later than its owner.
        let at = heap.alloc_for_ever(WORDS)?;
        (0..WORDS).step_by(8).for_each(|word| heap.segment().word(at + word).store(0, Relaxed));
        let mut offset = heap.alloc(8)?;
        offset.bytes_mut(until)?.copy_from_slice(&(at as u64).to_le_bytes());
        let offsets = group.all_gather(offset, 1)?.wait(until)?;
        let place = |bytes: &[u8]| bytes.iter().rev().fold(0usize, |a, b| a << 8 | usize::from(*b));
        let words = offsets[1].bytes().chunks_exact(8).map(place).collect();
        Ok(Probe { members: group.members().clone(), words, phase: 0, pings: 0, spins: group.spins() })
    }

    fn word(&self, member: usize, word: Word) -> &AtomicU64 {
        self.members.rows[member].segment.word(self.words[member] + word as usize * LINE)
    }

    fn wait(&self, member: usize, word: Word, value: u64, until: Instant) -> Result<(), CommError> {
        let word = self.word(member, word);
        for turn in 1u64.. {
            if word.load(Acquire) >= value {
                break;
            }
            if self.spins {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            if turn.is_multiple_of(4096) && Instant::now() >= until {
                return Err(CommError::Deadline { what: "probe".into(), missing: vec![member] });
            }
        }
        Ok(())
    }

    fn wait_for_all(&self, value: u64, until: Instant) -> Result<(), CommError> {
        (0..self.members.n()).try_for_each(|member| self.wait(member, Word::Phase, value, until))
    }

    fn say(&self, value: u64) {
        self.word(self.members.me, Word::Phase).store(value, Release);
    }

    /// Sends a word to and fro between the first two members so many times: how long that takes. The others have
    /// nothing to do. One cache line one way is half a round.
    pub fn line(&mut self, rounds: u64, until: Instant) -> Result<Duration, CommError> {
        let me = self.members.me;
        if me > 1 || self.members.n() < 2 {
            return Ok(Duration::ZERO);
        }
        let start = Instant::now();
        for round in self.pings + 1..=self.pings + rounds {
            if me == 1 {
                self.wait(0, Word::Ping, round, until)?;
            }
            self.word(me, Word::Ping).store(round, Release);
            if me == 0 {
                self.wait(1, Word::Ping, round, until)?;
            }
        }
        self.pings += rounds;
        Ok(start.elapsed())
    }

    /// Makes so many rounds: `write` gets the operand, bytes move, `read` gets what arrived. Gives how long it took,
    /// the operand and the result. All members call it alike.
    pub fn run(
        &mut self,
        movement: Movement,
        rounds: u64,
        mut buffers: [Buffer; 2],
        write: impl Fn(&mut [u8], u64),
        read: impl Fn(&[u8]),
        until: Instant,
    ) -> Result<(Duration, [Buffer; 2]), CommError> {
        for buffer in &mut buffers {
            buffer.bytes_mut(until)?;
        }
        let place = buffers[0].at as u64;
        self.word(self.members.me, Word::Operand).store(place, Relaxed);
        // All are here, and know where the operands lie, before the clock starts.
        self.say(self.phase + FINISHED);
        self.phase += FINISHED;
        let outcome = self.wait_for_all(self.phase, until).and_then(|()| {
            let start = Instant::now();
            for round in 0..rounds {
                self.round(movement, round, &buffers, &write, &read, until)?;
            }
            let spent = start.elapsed();
            self.wait_for_all(self.phase, until)?;
            Ok(spent)
        });
        match outcome {
            Ok(spent) => Ok((spent, buffers)),
            Err(error) => {
                // A peer may still read them.
                std::mem::forget(buffers);
                Err(error)
            }
        }
    }

    fn round(
        &mut self,
        movement: Movement,
        round: u64,
        [operand, result]: &[Buffer; 2],
        write: &impl Fn(&mut [u8], u64),
        read: &impl Fn(&[u8]),
        until: Instant,
    ) -> Result<(), CommError> {
        let (n, me, phase) = (self.members.n(), self.members.me, self.phase);
        let bytes = operand.len();
        self.wait_for_all(phase, until)?;
        write(self.own(operand, 0, bytes), round);
        self.say(phase + WRITTEN);
        let mut arrived = result;
        match movement {
            Movement::Broadcast => {
                let root = round as usize % n;
                arrived = operand;
                if root != me {
                    self.wait(root, Word::Phase, phase + WRITTEN, until)?;
                    self.own(operand, 0, bytes).copy_from_slice(self.operand(root, 0, bytes));
                }
            }
            Movement::Ring => {
                let before = (me + n - 1) % n;
                self.wait(before, Word::Phase, phase + WRITTEN, until)?;
                self.own(result, 0, bytes).copy_from_slice(self.operand(before, 0, bytes));
            }
            Movement::Pingpong if me < 2 => {
                let step = if me == 0 { REDUCED } else { WRITTEN };
                self.wait(1 - me, Word::Phase, phase + step, until)?;
                self.own(result, 0, bytes).copy_from_slice(self.operand(1 - me, 0, bytes));
                self.say(phase + REDUCED);
            }
            Movement::Pingpong => {}
            Movement::Gather | Movement::Exchange => {
                let block = result.len() / n;
                for member in (0..n).map(|i| (me + i) % n) {
                    self.wait(member, Word::Phase, phase + WRITTEN, until)?;
                    let from = if movement == Movement::Gather { 0 } else { me * block };
                    self.own(result, member * block, block)
                        .copy_from_slice(self.operand(member, from, block));
                }
            }
            Movement::Fold => {
                self.wait_for_all(phase + WRITTEN, until)?;
                self.fold(result, 0, me * result.len(), result.len());
            }
            Movement::FoldAndCopy if bytes <= SMALL => {
                self.wait_for_all(phase + WRITTEN, until)?;
                self.fold(result, 0, 0, bytes);
            }
            Movement::FoldAndCopy => {
                let part = |member: usize| (bytes / 4 * member / n * 4, bytes / 4 * (member + 1) / n * 4);
                self.wait_for_all(phase + WRITTEN, until)?;
                let (from, to) = part(me);
                self.fold(operand, from, from, to - from);
                self.say(phase + REDUCED);
                for member in (1..n).map(|i| (me + i) % n) {
                    self.wait(member, Word::Phase, phase + REDUCED, until)?;
                    let (from, to) = part(member);
                    self.own(operand, from, to - from).copy_from_slice(self.operand(member, from, to - from));
                }
                arrived = operand;
            }
        }
        self.say(phase + FINISHED);
        self.phase += FINISHED;
        read(arrived.bytes());
        Ok(())
    }

    /// Sums the same bytes of all operands into a range of one of this member's buffers, which may be its operand.
    fn fold(&self, into: &Buffer, to: usize, from: usize, bytes: usize) {
        let (n, me) = (self.members.n(), self.members.me);
        for start in (0..bytes).step_by(BLOCK * 4) {
            let len = (BLOCK * 4).min(bytes - start);
            let sum: &mut [f32] = cast_slice_mut(self.own(into, to + start, len));
            // In place, the own operand is what the sum begins with.
            if (to, into.at) != (from, self.place(me)) {
                sum.copy_from_slice(cast_slice(self.operand(me, from + start, len)));
            }
            for member in (1..n).map(|i| (me + i) % n) {
                let other: &[f32] = cast_slice(self.operand(member, from + start, len));
                sum.iter_mut().zip(other).for_each(|(a, b)| *a += b);
            }
        }
    }

    fn place(&self, member: usize) -> usize {
        self.word(member, Word::Operand).load(Relaxed) as usize
    }

    /// A range of a member's operand.
    fn operand(&self, member: usize, from: usize, len: usize) -> &[u8] {
        // SAFETY: the owner has said that the range is written, or reduced, and writes it again only after this
        // member has said that it finished the round.
        unsafe { self.members.rows[member].segment.read(self.place(member) + from, len) }
    }

    /// A range of one of this member's own buffers.
    #[allow(clippy::mut_from_ref, reason = "the buffer is owned by the run that asks")]
    fn own(&self, buffer: &Buffer, from: usize, len: usize) -> &mut [u8] {
        assert!(from + len <= buffer.len(), "range {from}+{len} of {}", buffer.len());
        // SAFETY: the buffer belongs to this run. Peers read an operand between `WRITTEN` and their `FINISHED` only:
        // its part is reduced before they read that, and the others' parts are overwritten after they were reduced.
        unsafe { self.members.rows[self.members.me].segment.write(buffer.at + from, len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn_with_heap;

    /// One float of each block after two rounds, in which member m writes m + 1.
    fn moved(n: usize, movement: Movement, bytes: usize, operand: usize, result: usize) -> Vec<Vec<f32>> {
        spawn_with_heap(n, 1 << 20, |group| {
            let until = Instant::now() + Duration::from_secs(20);
            let mut probe = Probe::new(&group, until).unwrap();
            let buffers =
                [group.heap().alloc(bytes * operand).unwrap(), group.heap().alloc(bytes * result).unwrap()];
            let value = group.rank() as f32 + 1.0;
            let seen = std::cell::RefCell::new(Vec::new());
            let write = |to: &mut [u8], _| cast_slice_mut::<u8, f32>(to).fill(value);
            let read = |from: &[u8]| {
                let blocks = from.chunks_exact(bytes);
                let same = |block: &[u8]| {
                    let floats: &[f32] = cast_slice(block);
                    assert!(floats.iter().all(|x| *x == floats[0]));
                    floats[0]
                };
                *seen.borrow_mut() = blocks.map(same).collect();
            };
            probe.run(movement, 2, buffers, write, read, until).unwrap();
            probe.line(10, until).unwrap();
            seen.into_inner()
        })
    }

    #[test]
    fn bytes_arrive_where_the_operation_would_put_them() {
        for bytes in [4, 64, 20_000] {
            assert_eq!(moved(3, Movement::Broadcast, bytes, 1, 1), [[2.0], [2.0], [2.0]]);
            assert_eq!(moved(3, Movement::Gather, bytes, 1, 3), [[1.0, 2.0, 3.0]; 3]);
            assert_eq!(moved(3, Movement::Exchange, bytes, 3, 3), [[1.0, 2.0, 3.0]; 3]);
            assert_eq!(moved(3, Movement::Fold, bytes, 3, 1), [[6.0]; 3]);
            assert_eq!(moved(3, Movement::FoldAndCopy, bytes, 1, 1), [[6.0]; 3]);
            assert_eq!(moved(3, Movement::Ring, bytes, 1, 1), [[3.0], [1.0], [2.0]]);
            assert_eq!(moved(2, Movement::Pingpong, bytes, 1, 1), [[2.0], [1.0]]);
        }
    }
}
