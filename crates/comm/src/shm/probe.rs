//! The machine's own cost of moving the same bytes: the bound with which a benchmark compares an operation.
//!
//! A [`Probe`] moves bytes between the members' heaps with plain loops and nothing around them but words on which the
//! members spin: no descriptors, no checks, no sleeping. Rounds are numbered, and each word of a member holds the
//! number of the last round in which it has *written* its operand, *reduced* its part of a sum, or *finished*. An
//! operand is written again only after all have finished with it. Small ones travel beside their word, in the same
//! cache line if they fit, and there are two places for them, so that nobody waits for the round before.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use bytemuck::{cast_slice, cast_slice_mut};
use consort_types::{Digest, Failure};

use crate::CommError;
use crate::arguments::refused;
use crate::error::Operation;
use crate::group::Group;
use crate::shm::buffer::Buffer;
use crate::shm::heap::Heap;
use crate::shm::members::Members;
use crate::sync::AtomicU64;

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
    Written,
    Reduced,
    Finished,
    Ping,
    /// Where the operand lies, and what is run; stored before all meet at the start of a run.
    Operand,
    Run,
    /// The first of two places for small operands: the round in which it was written, and the bytes.
    Slots,
}

const LINE: usize = 64;
const SLOT: usize = SMALL + LINE;
const WORDS: usize = Word::Slots as usize * LINE + 2 * SLOT;

/// Operands up to this many bytes are small. Every member folds all of a small sum by itself, since one more round trip
/// costs more.
const SMALL: usize = 4096;
/// Bytes that are folded at once, so that the sums of many operands stay in the L1 cache.
const BLOCK: usize = 4096;

/// Plain movement between the members of a group, to be timed.
pub struct Probe {
    members: Members,
    heap: Arc<Heap>,
    /// Where each member's words lie.
    words: Vec<usize>,
    /// The number of the last round, alike on all members.
    round: u64,
    /// The number of round trips of the line probe so far.
    pings: u64,
    /// Whether a waiter spins: each member has a core.
    spins: bool,
}

impl Probe {
    /// All members must call it.
    pub fn new(group: &Group, until: Instant) -> Result<Probe, CommError> {
        let heap = group.heap();
        // Never freed: a peer may read a word after its owner is done.
        let at = heap.take_row(WORDS)?.0 + LINE;
        (0..WORDS).step_by(8).for_each(|word| heap.segment().word(at + word).store(0, Relaxed));
        let (mine, all) = (heap.alloc_from(&(at as u64).to_le_bytes())?, heap.alloc(group.size() * 8)?);
        let offsets = group.all_gather(mine, all, 1)?.wait(until)?;
        let place = |bytes: &[u8]| bytes.iter().rev().fold(0usize, |a, b| a << 8 | usize::from(*b));
        let words = offsets[1].bytes()?.chunks_exact(8).map(place).collect();
        let Some(shm) = group.shm() else {
            return Err(refused(("a group over shared memory", "one over another engine")));
        };
        let (members, heap, spins) = (shm.members.clone(), Arc::clone(heap), shm.cores.one_each());
        Ok(Probe { members, heap, words, round: 0, pings: 0, spins })
    }

    fn word(&self, member: usize, word: Word) -> &AtomicU64 {
        self.members.rows[member].segment.word(self.words[member] + word as usize * LINE)
    }

    fn wait(&self, member: usize, word: Word, value: u64, until: Instant) -> Result<(), CommError> {
        self.wait_on(self.word(member, word), member, value, self.spins, until)
    }

    fn wait_on(
        &self,
        word: &AtomicU64,
        member: usize,
        value: u64,
        spins: bool,
        until: Instant,
    ) -> Result<(), CommError> {
        for turn in 1u64.. {
            if word.load(Acquire) >= value {
                break;
            }
            if spins {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            if turn.is_multiple_of(4096) && Instant::now() >= until {
                return Err(CommError::Deadline {
                    what: Box::new(Operation::Probe),
                    missing: vec![member],
                    doing: Vec::new(),
                });
            }
        }
        Ok(())
    }

    fn wait_for_all(&self, word: Word, value: u64, until: Instant) -> Result<(), CommError> {
        (0..self.members.n()).try_for_each(|member| self.wait(member, word, value, until))
    }

    fn say(&self, word: Word) {
        self.word(self.members.me, word).store(self.round, Release);
    }

    /// Times `rounds` round trips of a word between the first two members; the others do nothing. One transfer of a
    /// cache line takes half a round trip, if both have a core.
    pub fn line(&mut self, rounds: u64, until: Instant) -> Result<Duration, CommError> {
        let me = self.members.me;
        if me > 1 || self.members.n() < 2 {
            return Ok(Duration::ZERO);
        }
        let other = self.word(1 - me, Word::Ping);
        let start = Instant::now();
        for round in self.pings + 1..=self.pings + rounds {
            if me == 1 {
                self.wait_on(other, 0, round, true, until)?;
            }
            self.word(me, Word::Ping).store(round, Release);
            if me == 0 {
                self.wait_on(other, 1, round, true, until)?;
            }
        }
        let spent = start.elapsed();
        self.pings += rounds;
        Ok(spent)
    }

    /// Times `rounds` rounds, after an untimed one: `write` gets the operand, bytes move, `read` gets what arrived.
    /// Gives the time, the operand and the result. All members must call it with the same arguments.
    pub fn run(
        &mut self,
        movement: Movement,
        rounds: u64,
        mut buffers: [Buffer; 2],
        write: impl Fn(&mut [u8], u64),
        read: impl Fn(&[u8]),
        until: Instant,
    ) -> Result<(Duration, [Buffer; 2]), CommError> {
        self.check(movement, &buffers)?;
        for buffer in &mut buffers {
            buffer.bytes_mut(until)?;
        }
        // After an early end, by an error or a panic of the caller, a peer may still read them: then they are not
        // freed.
        let buffers = ManuallyDrop::new(buffers);
        let place = buffers[0].at() as u64;
        self.word(self.members.me, Word::Operand).store(place, Relaxed);
        // Peers read as many bytes of an operand as their own has, so all members must run the same.
        let lengths = [movement as usize, buffers[0].len(), buffers[1].len(), rounds as usize];
        let mut run = Digest::default();
        run.add_all(lengths.map(|number| number as u64));
        let run = run.get();
        self.word(self.members.me, Word::Run).store(run, Relaxed);
        // All members have arrived, and know where the operands lie, before the clock starts.
        self.round += 1;
        self.say(Word::Finished);
        let outcome = self.wait_for_all(Word::Finished, self.round, until).and_then(|()| {
            let is_same = |member: usize| self.word(member, Word::Run).load(Relaxed) == run;
            if !(0..self.members.n()).all(is_same) {
                let expected = ("the same movement, sizes and rounds on all members", "");
                return Err(CommError::Argument(Failure::new(expected).of("probe")));
            }
            // The first round finds cache lines where other work has left them.
            self.run_round(movement, 0, &buffers, &write, &read, until)?;
            self.wait_for_all(Word::Finished, self.round, until)?;
            let start = Instant::now();
            for index in 0..rounds {
                self.run_round(movement, index, &buffers, &write, &read, until)?;
            }
            let spent = start.elapsed();
            self.wait_for_all(Word::Finished, self.round, until)?;
            Ok(spent)
        });
        Ok((outcome?, ManuallyDrop::into_inner(buffers)))
    }

    /// Checks that the buffers have no other handles, and sizes that fit together.
    fn check(&self, movement: Movement, [operand, result]: &[Buffer; 2]) -> Result<(), CommError> {
        let (n, given, made) = (self.members.n(), operand.len(), result.len());
        let fits = match movement {
            Movement::Broadcast | Movement::Ring | Movement::Pingpong | Movement::FoldAndCopy => {
                made == given
            }
            Movement::Gather => Some(made) == given.checked_mul(n),
            Movement::Exchange => made == given && made.is_multiple_of(n),
            Movement::Fold => Some(given) == made.checked_mul(n),
        };
        let own = |buffer: &Buffer| buffer.is_only() && buffer.is_in(&self.heap);
        let floats = given.is_multiple_of(4) && made.is_multiple_of(4);
        match fits && floats && own(operand) && own(result) {
            true => Ok(()),
            false => {
                let expected = "buffers of this heap with one handle each and sizes that fit";
                let got = format!("{given} and {made} bytes");
                Err(CommError::Argument(Failure::new((expected, got)).of("probe")))
            }
        }
    }

    fn run_round(
        &mut self,
        movement: Movement,
        index: u64,
        [operand, result]: &[Buffer; 2],
        write: &impl Fn(&mut [u8], u64),
        read: &impl Fn(&[u8]),
        until: Instant,
    ) -> Result<(), CommError> {
        self.round += 1;
        let (n, me, bytes) = (self.members.n(), self.members.me, operand.len());
        let small = bytes <= SMALL;
        self.wait_for_all(Word::Finished, self.round - if small { 2 } else { 1 }, until)?;
        write(self.own(self.place(me, small), bytes), index);
        // The member that sends back does so when it has received.
        let answers = movement == Movement::Pingpong && me == 1;
        if !answers {
            self.say_written(small);
        }
        let written = |member: usize| {
            let place = self.slot(member);
            let word = if small {
                self.members.rows[member].segment.word(place)
            } else {
                self.word(member, Word::Written)
            };
            self.wait_on(word, member, self.round, self.spins, until)
        };
        let copy = |member: usize, from: usize, to: usize, len: usize| {
            self.own(to, len).copy_from_slice(self.operand(member, small, from, len));
        };
        let mut arrived = result;
        match movement {
            Movement::Broadcast => {
                let root = index as usize % n;
                written(root)?;
                arrived = if small { result } else { operand };
                if small || root != me {
                    copy(root, 0, arrived.at(), bytes);
                }
            }
            Movement::Ring => {
                let before = (me + n - 1) % n;
                written(before)?;
                copy(before, 0, result.at(), bytes);
            }
            Movement::Pingpong if me < 2 => {
                written(1 - me)?;
                copy(1 - me, 0, result.at(), bytes);
                if answers {
                    self.say_written(small);
                }
            }
            Movement::Pingpong => {}
            Movement::Gather | Movement::Exchange => {
                let block = result.len() / n;
                let from = if movement == Movement::Gather { 0 } else { me * block };
                for member in (0..n).map(|i| (me + i) % n) {
                    written(member)?;
                    copy(member, from, result.at() + member * block, block);
                }
            }
            Movement::Fold | Movement::FoldAndCopy if small => {
                let from = if movement == Movement::Fold { me * result.len() } else { 0 };
                // Its own operand first: a member that reads a line too early delays its writer.
                copy(me, from, result.at(), result.len());
                for member in (1..n).map(|i| (me + i) % n) {
                    written(member)?;
                    self.add(member, small, from, result.at(), result.len());
                }
            }
            Movement::Fold => {
                (0..n).try_for_each(written)?;
                self.fold(me * result.len(), result.at(), result.len());
            }
            Movement::FoldAndCopy => {
                (0..n).try_for_each(written)?;
                self.fold_and_copy(operand, until)?;
                arrived = operand;
            }
        }
        self.say(Word::Finished);
        read(&arrived.bytes()?);
        Ok(())
    }

    /// Folds this member's part of the large operands in place, and copies the others' parts.
    fn fold_and_copy(&self, operand: &Buffer, until: Instant) -> Result<(), CommError> {
        let (n, me, floats) = (self.members.n(), self.members.me, operand.len() / 4);
        let part = |member: usize| (floats * member / n * 4, floats * (member + 1) / n * 4);
        let (from, to) = part(me);
        self.fold(from, operand.at() + from, to - from);
        self.say(Word::Reduced);
        for member in (1..n).map(|i| (me + i) % n) {
            self.wait(member, Word::Reduced, self.round, until)?;
            let (from, to) = part(member);
            let theirs = self.operand(member, false, from, to - from);
            self.own(operand.at() + from, to - from).copy_from_slice(theirs);
        }
        Ok(())
    }

    fn say_written(&self, small: bool) {
        let me = self.members.me;
        if small {
            self.members.rows[me].segment.word(self.slot(me)).store(self.round, Release);
        } else {
            self.say(Word::Written);
        }
    }

    /// Adds the same bytes of a member's operand to a place of this one.
    fn add(&self, member: usize, small: bool, from: usize, to: usize, len: usize) {
        let sum: &mut [f32] = cast_slice_mut(self.own(to, len));
        let other: &[f32] = cast_slice(self.operand(member, small, from, len));
        sum.iter_mut().zip(other).for_each(|(a, b)| *a += b);
    }

    /// Sums the same bytes of all operands into a place of this member, which may be in its operand.
    fn fold(&self, from: usize, to: usize, bytes: usize) {
        let (n, me) = (self.members.n(), self.members.me);
        for start in (0..bytes).step_by(BLOCK) {
            let (from, to, len) = (from + start, to + start, BLOCK.min(bytes - start));
            // In place, the sum begins with this member's operand.
            if to != self.place(me, false) + from {
                self.own(to, len).copy_from_slice(self.operand(me, false, from, len));
            }
            (1..n).for_each(|i| self.add((me + i) % n, false, from, to, len));
        }
    }

    /// Where the word of a member's small operand of this round lies.
    fn slot(&self, member: usize) -> usize {
        self.words[member] + Word::Slots as usize * LINE + (self.round % 2) as usize * SLOT
    }

    /// Where a member's operand of this round lies.
    fn place(&self, member: usize, small: bool) -> usize {
        if small { self.slot(member) + 8 } else { self.word(member, Word::Operand).load(Relaxed) as usize }
    }

    /// A range of a member's operand.
    fn operand(&self, member: usize, small: bool, from: usize, len: usize) -> &[u8] {
        let at = self.place(member, small) + from;
        // SAFETY: the owner has said that the range is written, or reduced, and writes it again only after this
        // member has said that it finished the round.
        unsafe { self.members.rows[member].segment.read(at, len) }
    }

    /// A range of this member's operand or result.
    #[allow(clippy::mut_from_ref, reason = "both belong to the run that asks")]
    fn own(&self, at: usize, len: usize) -> &mut [u8] {
        // SAFETY: the range is in a buffer or slot of this run. Peers read an operand from when it is written to when
        // they have finished: a part is reduced before they read that, and copied over after its owner has read it.
        unsafe { self.members.rows[self.members.me].segment.write(at, len) }
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

    /// Safe code must not be able to make a member read what another one writes.
    #[test]
    fn members_that_disagree_are_refused() {
        let run = |lengths: fn(usize) -> [usize; 2], movement: fn(usize) -> Movement| {
            spawn_with_heap(2, 1 << 20, |group| {
                let until = Instant::now() + Duration::from_secs(20);
                let mut probe = Probe::new(&group, until).unwrap();
                let buffers = lengths(group.rank()).map(|len| group.heap().alloc(len).unwrap());
                let outcome = probe.run(movement(group.rank()), 1, buffers, |_, _| {}, |_| {}, until);
                outcome.map(drop).unwrap_err().to_string()
            })
        };
        let texts = run(|rank| [64 << rank; 2], |_| Movement::Ring);
        assert!(texts.iter().all(|text| text.contains("the same movement, sizes and rounds")), "{texts:?}");
        let texts = run(|_| [64; 2], |rank| [Movement::Ring, Movement::Broadcast][rank]);
        assert!(texts.iter().all(|text| text.contains("the same movement, sizes and rounds")), "{texts:?}");
        let texts = run(|_| [64, 64], |_| Movement::Gather);
        assert!(texts.iter().all(|text| text.contains("sizes that fit")), "{texts:?}");
    }

    #[test]
    fn bytes_arrive_where_the_operation_would_put_them() {
        for bytes in [4, 1024, 20_000] {
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
