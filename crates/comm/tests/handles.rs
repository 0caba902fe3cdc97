//! Several handles of one block: who may read, who may write, and when.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, CommError, Group, Message, spawn};
use consort_types::{Dtype, Reduce};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn filled(group: &Group, len: usize, byte: u8) -> Buffer {
    group.heap().alloc_from(&vec![byte; len]).unwrap()
}

fn message(peer: usize, buffer: Buffer) -> Message {
    Message::new(peer, 0, buffer)
}

#[test]
fn an_operand_is_read_while_it_is_gathered_and_written_only_after() {
    for len in [8, 100_000] {
        spawn(3, |group| {
            let me = group.rank() as u8;
            let mut operand = filled(&group, len, me);
            let result = group.heap().alloc(3 * len).unwrap();
            let pending = group.all_gather(operand.clone(), result, 1).unwrap();
            assert!(operand.bytes().unwrap().iter().all(|byte| *byte == me));
            // This waits until all have read it, though nobody here has waited for the operation.
            operand.bytes_mut(soon()).unwrap().fill(77);
            let got = pending.wait(soon()).unwrap();
            let want: Vec<u8> = (0..3u8).flat_map(|rank| vec![rank; len]).collect();
            assert!(*got[1].bytes().unwrap() == want);
            assert!(operand.bytes().unwrap().iter().all(|byte| *byte == 77));
        });
    }
}

#[test]
fn rows_of_one_block_are_sent_and_received_in_place_at_once() {
    const ROW: usize = 5000;
    spawn(4, |group| {
        let (n, me) = (group.size(), group.rank());
        let (next, before) = ((me + 1) % n, (me + n - 1) % n);
        let mut whole = group.heap().alloc(6 * ROW).unwrap();
        for round in 0..50u8 {
            let own = round.wrapping_mul(10) + me as u8;
            whole.bytes_mut(soon()).unwrap().fill(own);
            let row = |i: usize| whole.part(i * ROW..(i + 1) * ROW).unwrap();
            let sends = [message(before, row(1)), message(next, row(4))];
            let recvs = [message(before, row(0)), message(next, row(5))];
            let pending = group.exchange(sends, recvs).unwrap();
            // The middle can be read and written meanwhile, the rows on their way to others can be read.
            let mut middle = whole.part(2 * ROW..4 * ROW).unwrap();
            middle.bytes_mut(soon()).unwrap().fill(own + 1);
            assert!(row(1).bytes().unwrap().iter().all(|byte| *byte == own));
            pending.wait(soon()).unwrap();
            let from = |rank: usize| round.wrapping_mul(10) + rank as u8;
            let want = [from(before), own, own + 1, own + 1, own, from(next)];
            let got = whole.bytes().unwrap();
            assert!((0..6).all(|i| got[i * ROW..(i + 1) * ROW].iter().all(|byte| *byte == want[i])));
        }
    });
}

#[test]
fn a_part_is_reduced_in_place_and_the_rest_left_alone() {
    for floats in [2, 20_000] {
        spawn(3, |group| {
            let ones: Vec<u8> = (0..3 * floats).flat_map(|_| 1f32.to_le_bytes()).collect();
            let whole = group.heap().alloc_from(&ones).unwrap();
            let part = whole.part(4 * floats..8 * floats).unwrap();
            let pending = group.all_reduce(part, Dtype::F32, Reduce::Sum).unwrap();
            pending.wait(soon()).unwrap();
            let bytes = whole.bytes().unwrap();
            let got: Vec<f32> =
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            let want = |i: usize| if i / floats == 1 { 3.0 } else { 1.0 };
            assert!(got.iter().enumerate().all(|(i, x)| *x == want(i)));
        });
    }
}

#[test]
fn what_would_be_read_and_written_at_once_is_refused() {
    let both = Barrier::new(2);
    spawn(2, |group| {
        let other = 1 - group.rank();
        let is_refused = |outcome: Result<(), CommError>| matches!(outcome, Err(CommError::Argument(_)));
        let mut whole = filled(&group, 40_000, 1);
        // A result over its own operand.
        let (a, b) = (whole.part(0..16_000).unwrap(), whole.part(8_000..40_000).unwrap());
        assert!(is_refused(group.all_gather(a, b, 1).map(drop)));
        // A buffer that is being read.
        let look = whole.bytes().unwrap();
        assert!(is_refused(group.all_reduce(whole.clone(), Dtype::U8, Reduce::Max).map(drop)));
        drop(look);
        // What is received there is read or taken by nobody else meanwhile, the rest is.
        let half = whole.part(0..20_000).unwrap();
        let recv = group.recv(message(other, half.clone())).unwrap();
        assert!(is_refused(whole.bytes().map(drop)));
        assert!(is_refused(group.send(message(other, whole.part(19_999..20_001).unwrap())).map(drop)));
        assert!(whole.part(20_000..40_000).unwrap().bytes().is_ok());
        assert!(is_refused(whole.try_bytes_mut().map(drop)));
        assert!(!whole.is_released_by(Instant::now() + Duration::from_millis(5)));
        both.wait();
        let send = group.send(message(other, filled(&group, 20_000, 9))).unwrap();
        recv.wait(soon()).unwrap();
        send.wait(soon()).unwrap();
        assert!(half.bytes().unwrap().iter().all(|byte| *byte == 9));
        whole.bytes_mut(soon()).unwrap().fill(3);
        // Outside of the block, and where no element begins.
        assert!(is_refused(whole.part(0..40_001).map(drop)));
        assert!(is_refused(group.all_reduce(whole.part(2..6).unwrap(), Dtype::F32, Reduce::Sum).map(drop)));
        // A part has no header that could count who holds it.
        let part = (group.rank() == 0).then(|| whole.part(64..128).unwrap());
        let outcome = group.broadcast_common(part, 0);
        assert_eq!(outcome.is_err(), group.rank() == 0);
    });
}

#[test]
fn a_buffer_of_another_heap_is_refused() {
    // Two worlds of one rank, both on this thread.
    let world = || consort_comm::init().unwrap().group(1 << 20, Duration::from_secs(5)).unwrap();
    let (one, other) = (world(), world());
    let outcome = one.all_reduce(filled(&other, 8, 1), Dtype::U8, Reduce::Max);
    assert!(
        matches!(outcome.map(drop), Err(CommError::Argument(failure)) if failure.got == "one of another")
    );
}

#[test]
fn a_block_lives_as_long_as_any_handle_of_it() {
    spawn(1, |group| {
        let part = filled(&group, 1 << 20, 5).part(100..200).unwrap();
        let others: Vec<Buffer> = (0..16).map(|_| filled(&group, 1 << 20, 6)).collect();
        assert!(part.bytes().unwrap().iter().all(|byte| *byte == 5));
        drop(others);
    });
}

#[test]
fn a_failed_group_gives_its_buffers_back() {
    spawn(2, |group| {
        let mut whole = filled(&group, 30_000, 1);
        let kept = whole.clone();
        if group.rank() == 0 {
            let pending = group.recv(message(1, kept)).unwrap();
            assert!(pending.wait(Instant::now() + Duration::from_millis(20)).is_err());
            whole.bytes_mut(soon()).unwrap().fill(2);
        }
    });
}

#[test]
fn a_handle_is_the_only_one_when_nobody_else_has_any_of_its_block() {
    spawn(2, |group| {
        let buffer = filled(&group, 64, 1);
        assert!(buffer.is_only());
        let part = buffer.part(0..8).unwrap();
        assert!(!buffer.is_only() && !part.is_only());
        drop(part);
        let copy = buffer.clone();
        assert!(!buffer.is_only());
        drop(copy);
        // An operation has one, until its outcome is taken.
        let result = group.heap().alloc(128).unwrap();
        let pending = group.all_gather(buffer.clone(), result, 1).unwrap();
        assert!(!buffer.is_only());
        drop(pending.wait(soon()).unwrap());
        assert!(buffer.is_only());
    });
}

#[test]
fn what_was_lent_to_a_group_that_is_dead_stays_lent() {
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let is_done = std::sync::Mutex::new(is_done);
    const LEN: usize = 1 << 20;
    spawn(2, |group| {
        if group.rank() == 1 {
            // It makes no call, and stays until the other one has looked.
            return is_done.lock().unwrap().recv().unwrap();
        }
        let before = group.heap().in_use();
        let operand = filled(&group, LEN, 1);
        let result = group.heap().alloc(2 * LEN).unwrap();
        let pending = group.all_gather(operand.clone(), result, 1).unwrap();
        let ticket = pending.ticket();
        assert!(matches!(pending.wait(Instant::now()), Err(CommError::Deadline { .. })));
        assert!(!group.is_released(ticket) && !operand.is_released());
        assert!(operand.try_bytes_mut().is_err());
        assert!(group.release(ticket, Instant::now).is_err());
        let heap = std::sync::Arc::clone(group.heap());
        drop((operand, group));
        // The operand alone is kept.
        assert!((before + LEN..before + 2 * LEN).contains(&heap.in_use()), "{} of {before}", heap.in_use());
        done.send(()).unwrap();
    });
}

#[test]
fn a_ticket_says_when_its_operation_is_released() {
    for len in [8, 100_000] {
        let gate = Barrier::new(2);
        spawn(2, |group| {
            let operand = filled(&group, len, group.rank() as u8);
            if group.rank() == 1 {
                gate.wait();
            }
            let result = group.heap().alloc(2 * len).unwrap();
            let pending = group.all_gather(operand.clone(), result, 1).unwrap();
            let ticket = pending.ticket();
            if group.rank() == 0 {
                // The other member has not begun.
                assert!(!group.is_released(ticket));
                gate.wait();
            }
            drop(pending.wait(soon()).unwrap());
            group.release(ticket, soon).unwrap();
            assert!(group.is_released(ticket));
            operand.try_bytes_mut().unwrap().fill(9);
        });
    }
}
