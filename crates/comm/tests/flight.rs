//! The flight recorder of ranks that are threads: every member reads what all of them did.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, Event, EventKind, Group, Message, spawn_with_heap};
use consort_types::{Dtype, Reduce};

const HEAP: usize = 1 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn zeros(group: &Group, len: usize) -> Buffer {
    let mut buffer = group.heap().alloc(len).unwrap();
    buffer.bytes_mut(soon()).unwrap().fill(0);
    buffer
}

fn reduce(group: &Group, len: usize, reduce: Reduce) -> Result<(), consort_comm::CommError> {
    group.all_reduce(zeros(group, len), Dtype::F32, reduce)?.wait(soon()).map(drop)
}

/// The events of a rank, without waits, which vary between runs.
fn of(events: &[Event], rank: usize) -> Vec<(EventKind, String, u64, String, u64)> {
    let mine = events.iter().filter(|event| event.rank == rank && event.kind != EventKind::Wait);
    mine.map(|event| (event.kind, event.group.clone(), event.number, event.op.clone(), event.bytes)).collect()
}

#[test]
fn every_member_reads_what_all_of_them_did() {
    spawn_with_heap(4, HEAP, |group| {
        let me = group.rank();
        reduce(&group, 40, Reduce::Sum).unwrap();
        let pairs = group.subgroup(&[vec![0, 2], vec![3, 1]], soon()).unwrap().unwrap();
        pairs.broadcast(zeros(&pairs, 16), 1).unwrap().wait(soon()).unwrap();
        let message = |peer| Message::new(peer, 0, zeros(&group, 24));
        let (next, before) = ((me + 1) % 4, (me + 3) % 4);
        group.exchange(vec![message(next)], vec![message(before)]).unwrap().wait(soon()).unwrap();
        group.recorder().record(EventKind::Kernel, group.recorder().name("matmul"), 640);
        group.barrier().unwrap().wait(soon()).unwrap();
        // What a member did before the barrier is there; some may have gone further.
        let events = group.events();
        assert!(events.is_sorted_by_key(|event| event.time_ns));
        for rank in 0..4 {
            let half = if rank % 2 == 0 { "world.1[0,2]" } else { "world.1[3,1]" };
            let expected = [
                (EventKind::Start, "world", 0, "all_reduce sum f32", 40),
                (EventKind::Finish, "world", 0, "all_reduce sum f32", 40),
                (EventKind::Start, "world", 1, "make groups of the lists [[0, 2], [3, 1]]", 8),
                (EventKind::Finish, "world", 1, "make groups of the lists [[0, 2], [3, 1]]", 8),
                (EventKind::Start, half, 0, "broadcast root 1", 16),
                (EventKind::Finish, half, 0, "broadcast root 1", 16),
                (EventKind::Start, "world", 0, "exchange", 48),
                (EventKind::Finish, "world", 0, "exchange", 48),
                (EventKind::Kernel, "world", 0, "matmul", 640),
                (EventKind::Start, "world", 2, "barrier", 0),
            ]
            .map(|(kind, group, number, op, bytes)| (kind, group.to_string(), number, op.to_string(), bytes));
            let found = of(&events, rank);
            assert_eq!(found[..10], expected, "rank {rank}");
            assert!(
                events
                    .iter()
                    .filter(|event| event.rank == rank)
                    .all(|event| event.site.contains("flight.rs:"))
            );
        }
        // Others may be in the next barrier already, which is no difference.
        assert!(group.flight_record().divergence().is_none_or(|divergence| divergence.number == 3));
        assert!(pairs.flight_record().lost.keys().eq(if me % 2 == 0 { &[0, 2] } else { &[1, 3] }));
        // Nobody starts the next call before all have looked.
        group.barrier().unwrap().wait(soon()).unwrap();
    });
}

#[test]
fn a_difference_is_named_by_what_was_recorded() {
    let texts = spawn_with_heap(3, HEAP, |group| {
        (0..5).for_each(|_| reduce(&group, 40, Reduce::Sum).unwrap());
        let kind = if group.rank() == 1 { Reduce::Max } else { Reduce::Sum };
        let error = reduce(&group, 40, kind).unwrap_err();
        let flight = group.flight_record();
        let recorded =
            flight.events.iter().find(|event| event.kind == EventKind::Error && event.rank == group.rank());
        let recorded = recorded.unwrap();
        let said = "call 5 on world: the reduction must be the same on all ranks";
        assert_eq!((recorded.number, recorded.op.as_str()), (5, said));
        assert!(error.to_string().starts_with(&recorded.op));
        flight.divergence().unwrap()
    });
    for divergence in texts {
        // The first member may not have seen the third member start.
        assert_eq!((divergence.group.as_str(), divergence.number), ("world", 5));
        assert_eq!(divergence.parties.len(), 2);
        for party in divergence.parties {
            let kind = if party.ranks == [1] { "max" } else { "sum" };
            assert_eq!(party.what, format!("all_reduce {kind} f32, 40 bytes"));
            assert!(party.site.contains("flight.rs:"), "{}", party.site);
        }
    }
}

#[test]
fn a_member_that_does_not_come_is_seen_in_its_last_operation() {
    let over = Barrier::new(3);
    let texts = spawn_with_heap(3, HEAP, |group| {
        reduce(&group, 4, Reduce::Sum).unwrap();
        if group.rank() == 1 {
            // It holds the group, and makes no call.
            over.wait();
            return None;
        }
        let pending = group.barrier().unwrap();
        pending.wait(Instant::now() + Duration::from_millis(200)).map(drop).unwrap_err();
        let text = group.flight_record().to_string();
        over.wait();
        Some(text)
    });
    for text in texts.into_iter().flatten() {
        let divergence = text.lines().last().unwrap();
        assert!(
            divergence.starts_with("first divergence: world call 1: ranks 0,2 barrier, 0 bytes at "),
            "{text}"
        );
        assert!(divergence.ends_with("; rank 1 has not started it"), "{text}");
        let row = text.lines().find(|line| line.starts_with("  rank 1 ")).unwrap();
        assert!(row.contains("   world call 0   all_reduce sum f32, 4 bytes   "), "{text}");
        assert!(row.contains("   finished ") && row.ends_with("ms before"), "{text}");
    }
}

#[test]
fn calls_beyond_the_slots_are_recorded_when_they_are_published() {
    spawn_with_heap(2, HEAP, |group| {
        let pending: Vec<_> = (0..40).map(|_| group.barrier().unwrap()).collect();
        pending.into_iter().for_each(|pending| drop(pending.wait(soon()).unwrap()));
        let events = group.events();
        let numbers = |kind: EventKind| -> Vec<u64> {
            let mine = events.iter().filter(|event| event.rank == group.rank() && event.kind == kind);
            mine.map(|event| event.number).collect()
        };
        assert_eq!(numbers(EventKind::Start), (0..40).collect::<Vec<_>>());
        // What the other member publishes meanwhile may let a later call finish first.
        let mut finished = numbers(EventKind::Finish);
        finished.sort();
        assert_eq!(finished, (0..40).collect::<Vec<_>>());
        assert!(numbers(EventKind::Publish).iter().all(|number| *number >= 32));
    });
}
