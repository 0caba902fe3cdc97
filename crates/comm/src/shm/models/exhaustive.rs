//! Every interleaving of two members, up to a number of preemptions, under loom. `mod.rs` says how to run it; each
//! model prints how many executions it explored. `LOOM_MAX_PREEMPTIONS` explores more, in more time: two preemptions of
//! the large sum are over a million executions.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use consort_types::{Dtype, Reduce};

use super::futex::rung;
use super::ranks::{never, run};
use crate::cores::Cores;
use crate::shm::alarm::Alarm;
use crate::shm::layout::{ROW, prepare, reserved, rows};
use crate::shm::lease::Lease;
use crate::shm::row::{INLINE, Row, SLOTS, STAGE};
use crate::shm::segment::Segment;
use crate::sync::yield_now;
use crate::{Buffer, CommError, Group, Message};

/// Bytes that do not fit into a stage: two lines.
const LARGE: usize = 2 * STAGE;
/// Room for two blocks of them, with their headers.
const HEAP: usize = 2 * (LARGE + 64);

fn explore(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let (executions, start) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let count = Arc::clone(&executions);
    let mut builder = loom::model::Builder::new();
    let preemptions = *builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = 100_000;
    builder.check(move || {
        count.fetch_add(1, Relaxed);
        model();
    });
    let (count, seconds) = (executions.load(Relaxed), start.elapsed().as_secs_f32());
    println!("{name}: {count} executions, {preemptions} preemptions, {seconds:.1} s");
}

/// Runs the members of a group of two.
fn pair(heap: usize, f: fn(&Group) -> Result<(), CommError>) {
    run(2, heap, move |group, _| f(&group).expect("no member fails"));
}

fn filled(group: &Group, len: usize, value: u8) -> Result<Buffer, CommError> {
    group.heap().alloc_from(&vec![value; len])
}

fn holds(bytes: &[u8], value: u8) {
    assert!(bytes.iter().all(|byte| *byte == value), "expected {value}, got {bytes:?}");
}

/// Broadcasts `len` bytes of `value` from rank 0, and checks the result on every member.
fn broadcast(group: &Group, len: usize, value: u8) -> Result<Buffer, CommError> {
    let buffer = filled(group, len, if group.rank() == 0 { value } else { 0 })?;
    let buffer = group.broadcast(buffer, 0)?.wait(never())?.remove(0);
    holds(&buffer.bytes()?, value);
    Ok(buffer)
}

#[test]
fn what_is_published_is_seen_whole() {
    explore("publish in the line of the stamp", 3, || {
        pair(HEAP, |group| broadcast(group, INLINE, 1).map(drop));
    });
    explore("publish in the stage", 3, || pair(HEAP, |group| broadcast(group, STAGE, 1).map(drop)));
    explore("publish where it lies", 3, || pair(HEAP, |group| broadcast(group, LARGE, 1).map(drop)));
}

#[test]
fn an_operand_is_written_again_only_after_its_readers() {
    explore("release by bytes_mut", 2, || {
        pair(HEAP, |group| broadcast(group, LARGE, 1)?.bytes_mut(never()).map(|mut bytes| bytes.fill(2)));
    });
    // The same buffer in a second call has too many interleavings for two preemptions.
    explore("release by bytes_mut, and again", 1, || {
        pair(HEAP, |group| {
            let mut buffer = broadcast(group, LARGE, 1)?;
            buffer.bytes_mut(never())?.fill(2);
            if group.rank() == 1 {
                buffer.bytes_mut(never())?.fill(0);
            }
            let buffer = group.broadcast(buffer, 0)?.wait(never())?;
            holds(&buffer[0].bytes()?, 2);
            Ok(())
        });
    });
}

#[test]
fn a_block_is_reused_only_after_its_readers() {
    // There is room for one block, so that the second allocation reuses the first.
    explore("release by the heap", 2, || {
        pair(LARGE + 64, |group| {
            drop(broadcast(group, LARGE, 1)?);
            let buffer = loop {
                match filled(group, LARGE, 2) {
                    Err(CommError::Exhausted { .. }) => yield_now(),
                    made => break made?,
                }
            };
            holds(&buffer.bytes()?, 2);
            Ok(())
        });
    });
}

#[test]
fn a_slot_is_reused_only_after_its_readers() {
    explore("slots", 1, || {
        pair(4 * (STAGE + 64), |group| {
            let mut calls = Vec::new();
            for call in 0..SLOTS as u8 + 1 {
                let buffer = filled(group, STAGE, call + group.rank() as u8)?;
                calls.push(group.all_reduce(buffer, Dtype::U8, Reduce::Sum)?);
            }
            for (call, pending) in calls.into_iter().enumerate() {
                holds(&pending.wait(never())?[0].bytes()?, 2 * call as u8 + 1);
            }
            Ok(())
        });
    });
}

#[test]
fn a_large_sum_is_made_in_place_by_parts() {
    // Parts of one line and of two, which are two chunks.
    const BYTES: usize = 3 * 64;
    explore("two phases", 1, || {
        pair(BYTES + 64, |group| {
            let buffer = filled(group, BYTES, group.rank() as u8 + 1)?;
            let mut buffer = group.all_reduce(buffer, Dtype::U8, Reduce::Sum)?.wait(never())?.remove(0);
            holds(&buffer.bytes()?, 3);
            buffer.bytes_mut(never())?.fill(9);
            Ok(())
        });
    });
}

#[test]
fn a_common_result_is_read_by_all_before_its_block_is_reused() {
    explore("common sum", 2, || {
        pair(2 * (LARGE + 64), |group| {
            let operand = filled(group, LARGE, group.rank() as u8 + 1)?;
            let (operands, sum) = group.all_reduce_common(operand, Dtype::U8, Reduce::Sum)?.wait(never())?;
            holds(sum.bytes(), 3);
            drop((operands, sum));
            Ok(())
        });
    });
    // There is room for one block: the second allocation reuses the one that both hold at first.
    explore("common broadcast", 2, || {
        pair(LARGE + 64, |group| {
            let operand = (group.rank() == 0).then(|| filled(group, LARGE, 1)).transpose()?;
            let (_, common) = group.broadcast_common(operand, 0)?.wait(never())?;
            holds(common.bytes(), 1);
            drop(common);
            let buffer = loop {
                match filled(group, LARGE, 2) {
                    Err(CommError::Exhausted { .. }) => yield_now(),
                    made => break made?,
                }
            };
            holds(&buffer.bytes()?, 2);
            Ok(())
        });
    });
}

/// Rank 0 sends mails of these lengths to rank 1, and then writes to the last one's buffer.
fn mails(group: &Group, lens: &[usize]) -> Result<(), CommError> {
    let to = 1 - group.rank();
    let message = |(tag, len): (usize, &usize)| {
        let buffer = filled(group, *len, if group.rank() == 0 { tag as u8 } else { 99 })?;
        Ok(Message::new(to, 0, buffer))
    };
    let messages: Vec<Message> = lens.iter().enumerate().map(message).collect::<Result<_, CommError>>()?;
    if group.rank() == 0 {
        let mut sent = group.exchange(messages, Vec::new())?.wait(never())?;
        sent.iter_mut().try_for_each(|buffer| buffer.bytes_mut(never()).map(|mut bytes| bytes.fill(77)))
    } else {
        let got = group.exchange(Vec::new(), messages)?.wait(never())?;
        got.iter()
            .enumerate()
            .for_each(|(tag, buffer)| holds(&buffer.bytes().expect("it is over"), tag as u8));
        Ok(())
    }
}

#[test]
fn a_mail_is_left_alone_until_it_is_taken() {
    explore("mail in its line", 3, || pair(HEAP, |group| mails(group, &[INLINE])));
    explore("mail in its stage", 3, || pair(HEAP, |group| mails(group, &[STAGE])));
    explore("mail where it lies", 3, || pair(HEAP, |group| mails(group, &[LARGE])));
    explore("more mails than the ring holds", 1, || pair(HEAP, |group| mails(group, &[STAGE; 3])));
}

#[test]
fn no_wake_up_is_lost() {
    rung(|| {
        explore("tell against sleep", 3, || {
            let segment = Arc::new(Segment::private(reserved(1)).expect("a segment"));
            let row = Row::new(&segment, ROW, 0);
            let teller = {
                let row = row.clone();
                loom::thread::spawn(move || (1..3).for_each(|done| row.set_done(done)))
            };
            while row.done() < 2 {
                row.sleep(never(), || row.done() == 2);
            }
            teller.join().expect("it does not panic");
        });
        explore("two readers against sleep", 3, || {
            let segments =
                [(); 2].map(|()| Arc::new(Segment::private(reserved(2) + 128).expect("a segment")));
            let cores = Cores::of(2, [&[1][..]]);
            let (heap, _) = prepare(&segments, 0, &Arc::new(Alarm::default()), cores, "world");
            let rows = Arc::new(rows(&segments));
            let mut buffer = heap.alloc(8).expect("room");
            buffer.lease(Lease::Call(Arc::clone(&rows), 0));
            let readers = [0, 1].map(|reader| {
                let rows = Arc::clone(&rows);
                loom::thread::spawn(move || rows[reader].set_done(1))
            });
            buffer.bytes_mut(never()).expect("it is released").fill(1);
            readers.into_iter().for_each(|reader| reader.join().expect("it does not panic"));
        });
        explore("release against sleep", 2, || {
            pair(HEAP, |group| broadcast(group, LARGE, 1)?.bytes_mut(never()).map(|mut bytes| bytes.fill(2)));
        });
        explore("sum in parts against sleep", 1, || {
            pair(HEAP, |group| {
                let buffer = filled(group, LARGE, 1)?;
                group.all_reduce(buffer, Dtype::U8, Reduce::Sum)?.wait(never()).map(drop)
            });
        });
        explore("mail against sleep", 2, || pair(HEAP, |group| mails(group, &[LARGE])));
        explore("leaving against sleep", 2, || {
            run(2, HEAP, |group, _| {
                if group.rank() == 0 {
                    let outcome = group.barrier().and_then(|pending| pending.wait(never()));
                    // It may or may not see the call that it leaves behind.
                    assert!(matches!(
                        outcome,
                        Err(CommError::Left { rank: 1, .. } | CommError::Elsewhere { rank: 1, .. })
                    ));
                }
            });
        });
        // The send completes at once; only the receiver can tell that its length differs.
        explore("failure against sleep", 2, || {
            run(2, HEAP, |group, _| {
                let outcome = filled(&group, 8 * (group.rank() + 1), 1).and_then(|buffer| {
                    let message = vec![Message::new(1 - group.rank(), 0, buffer)];
                    let (sends, receives) =
                        if group.rank() == 0 { (message, Vec::new()) } else { (Vec::new(), message) };
                    group.exchange(sends, receives)?.wait(never())?;
                    group.barrier()?.wait(never())
                });
                assert!(matches!(outcome, Err(CommError::Message { .. } | CommError::Elsewhere { .. })));
                // Leaving would wake a member that missed the failure.
                std::mem::forget(group);
            });
        });
    });
}
