//! Small programs that exercise every file with unsafe code: words, stages, leases, common results, messages, parts of
//! blocks, groups that end early. They are meant for miri, which takes a thousand times as long:
//!
//! ```text
//! MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" RUSTFLAGS="--cfg rustix_use_libc" \
//!     cargo +nightly miri test --target-dir target/miri -p consort-comm --test soundness
//! ```
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::time::{Duration, Instant};

use consort_comm::{Buffer, CommError, Group, Message, spawn_with_heap};
use consort_types::{Dtype, Reduce};

const HEAP: usize = 1 << 20;
/// In the slot, in the stage, and in the buffer itself.
const SIZES: [usize; 3] = [8, 200, 600];

fn until() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn filled(group: &Group, len: usize, value: u8) -> Result<Buffer, CommError> {
    group.heap().alloc_from(&vec![value; len])
}

fn on_two(f: impl Fn(&Group) -> Result<(), CommError> + Sync) {
    for outcome in spawn_with_heap(2, HEAP, |group| f(&group)) {
        outcome.unwrap();
    }
}

#[test]
fn sums_in_place_and_common() {
    for len in SIZES {
        on_two(|group| {
            let sum = group.all_reduce(filled(group, len, 3)?, Dtype::U8, Reduce::Sum)?.wait(until())?;
            assert!(sum[0].bytes()?.iter().all(|byte| *byte == 6));
            let (_, common) =
                group.all_reduce_common(filled(group, len, 4)?, Dtype::U8, Reduce::Sum)?.wait(until())?;
            assert!(common.bytes().iter().all(|byte| *byte == 8));
            Ok(())
        });
    }
}

#[test]
fn common_results_of_one_block_are_kept_apart() {
    on_two(|group| {
        let me = group.rank();
        let block = if me == 0 { Some(filled(group, 600, 5)?) } else { None };
        let mut again = block.clone();
        let (_, first) = group.broadcast_common(block, 0)?.wait(until())?;
        let (_, second) = group.broadcast_common(again.take(), 0)?.wait(until())?;
        drop(first);
        // Where the block lay, if it were free.
        let others: Vec<Buffer> = (0..8).map(|_| filled(group, 600, 7)).collect::<Result<_, _>>()?;
        assert!(second.bytes().iter().all(|byte| *byte == 5));
        drop(others);
        Ok(())
    });
}

#[test]
fn parts_of_a_block_are_gathered_written_and_read() {
    for len in SIZES {
        on_two(|group| {
            let me = group.rank() as u8;
            let own = filled(group, len, me + 1)?;
            let whole = group.heap().alloc(2 * len)?;
            let got = group.all_gather(own.clone(), whole, 1)?.wait(until())?;
            let result = got.last().unwrap();
            let bytes = result.bytes()?;
            assert!(bytes[..len].iter().all(|byte| *byte == 1) && bytes[len..].iter().all(|byte| *byte == 2));
            drop(bytes);
            let mut own = own;
            own.bytes_mut(until())?.fill(9);
            Ok(())
        });
    }
}

#[test]
fn messages_are_taken_from_where_they_lie() {
    for len in SIZES {
        on_two(|group| {
            let (me, other) = (group.rank() as u8, 1 - group.rank());
            let send = Message::new(other, 7, filled(group, len, me)?);
            let receive = Message::new(other, 7, filled(group, len, 99)?);
            let mut got = group.exchange(vec![send], vec![receive])?.wait(until())?;
            assert!(got.last().unwrap().bytes()?.iter().all(|byte| *byte == other as u8));
            got[0].bytes_mut(until())?.fill(1);
            Ok(())
        });
    }
}

#[test]
fn groups_of_groups_come_and_go() {
    on_two(|group| {
        for round in 0..3 {
            let part = group.subgroup(&[vec![1, 0]], until())?.unwrap();
            let sum = part.all_reduce(filled(&part, 16, round)?, Dtype::U8, Reduce::Max)?;
            drop(part);
            assert_eq!(sum.wait(until())?[0].bytes()?[0], round);
        }
        Ok(())
    });
}

#[test]
fn what_differs_hands_out_nothing() {
    let outcomes = spawn_with_heap(2, HEAP, |group| {
        let len = 8 * (group.rank() + 1);
        group.all_reduce(filled(&group, len, 1)?, Dtype::U8, Reduce::Sum)?.wait(until()).map(drop)
    });
    assert!(outcomes.into_iter().all(|outcome| matches!(outcome, Err(CommError::Mismatch { .. }))));
}

#[test]
fn a_rank_that_leaves_gives_its_memory_back() {
    let outcomes = spawn_with_heap(2, HEAP, |group| {
        let buffer = filled(&group, 600, 1)?;
        if group.rank() == 0 {
            return Ok(());
        }
        group.broadcast(buffer, 0)?.wait(until()).map(drop)
    });
    assert!(outcomes[1].as_ref().is_err_and(|error| error.culprits() == [0]));
}
