//! What goes wrong ends in one error on every member, and nothing waits past its deadline.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, CommError, Element, Group, Message, Pending, Reduce, spawn, spawn_with_heap};

const HEAP: usize = 1 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn zeros(group: &Group, len: usize) -> Buffer {
    let mut buffer = group.heap().alloc(len).unwrap();
    buffer.bytes_mut(soon()).unwrap().fill(0);
    buffer
}

/// The error of a call that every member makes, as text.
fn errors(n: usize, call: impl Fn(&Group) -> Result<Pending, CommError> + Sync) -> Vec<String> {
    spawn_with_heap(n, HEAP, |group| {
        let error = call(&group).and_then(|pending| pending.wait(soon())).map(drop).unwrap_err();
        // From then on the group says so at once.
        assert_eq!(group.barrier().and_then(|pending| pending.wait(soon())).map(drop).unwrap_err(), error);
        error.to_string()
    })
}

/// All members name the same two sides.
fn check_mismatch(texts: &[String], sides: [&str; 2]) {
    for text in texts {
        assert!(text.starts_with("call 0 differs between ranks\n"), "{text}");
        for side in sides {
            assert!(text.contains(side), "expected {side} in\n{text}");
        }
        assert!(text.contains("failures.rs:"), "{text}");
    }
}

#[test]
fn another_reduction_root_type_or_size_is_named_on_every_member() {
    let last = |group: &Group| group.rank() + 1 == group.size();
    for n in [2, 3, 4] {
        let texts = errors(n, |group| {
            let reduce = if last(group) { Reduce::Max } else { Reduce::Sum };
            group.all_reduce(zeros(group, 64), Element::F32, reduce)
        });
        check_mismatch(&texts, ["all_reduce sum f32, 64 bytes", "all_reduce max f32, 64 bytes"]);
        let texts = errors(n, |group| {
            let element = if last(group) { Element::I32 } else { Element::F32 };
            group.all_reduce(zeros(group, 64), element, Reduce::Sum)
        });
        check_mismatch(&texts, ["all_reduce sum f32", "all_reduce sum i32"]);
        let gather = |group: &Group, len| group.all_gather(zeros(group, len), zeros(group, len * n), 1);
        let texts = errors(n, |group| gather(group, if last(group) { 8 } else { 16 }));
        check_mismatch(&texts, ["all_gather, 16 bytes", "all_gather, 8 bytes"]);
        let texts = errors(n, |group| if last(group) { group.barrier() } else { gather(group, 8) });
        check_mismatch(&texts, ["all_gather, 8 bytes", "barrier, 0 bytes"]);
        let texts = errors(n, |group| {
            let factor = if last(group) { 0.25 } else { 0.5 };
            group.all_reduce(zeros(group, 64), Element::F32, Reduce::PremulSum(factor))
        });
        check_mismatch(
            &texts,
            ["all_reduce premul_sum f32, 64 bytes, with other types, shapes, routes or factors", "rank "],
        );
    }
}

#[test]
fn another_root_is_found_by_whoever_waits() {
    let texts = spawn_with_heap(3, HEAP, |group| {
        let root = usize::from(group.rank() == 2);
        let first =
            group.broadcast(zeros(&group, 8), root).and_then(|pending| pending.wait(soon())).map(drop);
        // The root of its own choice does not wait, and learns of it at the next call.
        let second = group.barrier().and_then(|pending| pending.wait(soon())).map(drop);
        first.and(second).unwrap_err().to_string()
    });
    check_mismatch(&texts, ["broadcast root 0", "broadcast root 1"]);
}

#[test]
fn splits_that_do_not_fit() {
    let texts = spawn_with_heap(3, HEAP, |group| {
        // Rank 0 expects more of rank 1 than it sends.
        let outs = if group.rank() == 0 { vec![4, 8, 4] } else { vec![4; 3] };
        let first = group
            .all_to_all(zeros(&group, 12), zeros(&group, outs.iter().sum()), &[4; 3], &outs)
            .and_then(|pending| pending.wait(soon()));
        // The others may have finished their part before, and learn of it at the next call.
        let second = group.barrier().and_then(|pending| pending.wait(soon()));
        first.and(second).map(drop).unwrap_err().to_string()
    });
    let lines: Vec<&str> = texts[0].lines().collect();
    assert_eq!(lines[0], "all_to_all: call 0: a part has another size than its receiver expects");
    assert!(lines[1].starts_with("  rank 1  sends 4 bytes  ") && lines[1].contains("failures.rs:"));
    assert!(lines[2].starts_with("  rank 0  expects 8  ") && lines[2].contains("failures.rs:"));
    let elsewhere = format!("rank 0 stopped: {}", texts[0]);
    assert_eq!(texts[1..], [elsewhere.clone(), elsewhere]);
}

#[test]
fn messages_of_another_length() {
    let texts = spawn_with_heap(2, HEAP, |group| {
        let message = |len| Message { peer: 1 - group.rank(), tag: 3, buffer: zeros(&group, len) };
        let batch = if group.rank() == 0 {
            group.exchange(vec![message(8)], vec![])
        } else {
            group.exchange(vec![], vec![message(12)])
        };
        // A small send is complete at once; its sender learns of it at the next call.
        let first = batch.and_then(|pending| pending.wait(soon())).map(drop);
        let second = group.barrier().and_then(|pending| pending.wait(soon())).map(drop);
        first.and(second).unwrap_err().to_string()
    });
    let lines: Vec<&str> = texts[1].lines().collect();
    assert_eq!(lines[0], "exchange: a message has another length than its receiver expects");
    assert!(lines[1].starts_with("  rank 0  send, 8 bytes, tag 3  ") && lines[1].contains("failures.rs:"));
    assert!(
        lines[2].starts_with("  rank 1  receive, 12 bytes, tag 3  ") && lines[2].contains("failures.rs:")
    );
    assert_eq!(texts[0], format!("rank 1 stopped: {}", texts[1]));
}

#[test]
fn a_member_that_does_not_come_ends_the_wait_at_the_deadline() {
    let over = Barrier::new(3);
    let results = spawn_with_heap(3, HEAP, |world| {
        let group = world.subgroup(&[vec![0, 1, 2]], soon()).unwrap().unwrap();
        if group.rank() == 1 {
            // It has the group, and does nothing with it.
            over.wait();
            return None;
        }
        let start = Instant::now();
        let until = start + Duration::from_millis(200);
        let error = group
            .all_reduce(zeros(&group, 8), Element::F64, Reduce::Sum)
            .unwrap()
            .wait(until)
            .map(drop)
            .unwrap_err();
        assert!(start.elapsed() >= Duration::from_millis(200));
        over.wait();
        Some(error.to_string())
    });
    for text in results.into_iter().flatten() {
        assert!(
            text.starts_with("all_reduce sum f64: call 0: the deadline passed; missing: rank 1\n"),
            "{text}"
        );
        // What it did last, with its line.
        assert!(text.contains("\n  rank 1  finished: world call 0, all_gather, 8 bytes  "), "{text}");
        assert!(text.contains("failures.rs:"), "{text}");
    }
}

#[test]
fn a_panic_ends_the_others_and_goes_on() {
    let caught = std::panic::catch_unwind(|| {
        spawn(3, |group| {
            if group.rank() == 2 {
                panic!("rank 2 has had enough");
            }
            let error = group.barrier().and_then(|pending| pending.wait(soon())).map(drop).unwrap_err();
            assert_eq!(error, CommError::Panicked { rank: 2 });
        })
    });
    let message = caught.unwrap_err();
    assert_eq!(message.downcast_ref::<&str>(), Some(&"rank 2 has had enough"));
}

#[test]
fn a_full_heap_says_who_holds_what() {
    spawn_with_heap(1, 4096, |group| {
        let held = group.heap().alloc(3000).unwrap();
        let error = group.heap().alloc(3000).map(drop).unwrap_err();
        let CommError::Exhausted { asked: 3000, leased: 0, .. } = error else { panic!("{error}") };
        assert!(error.to_string().starts_with("heap: 3000 bytes do not fit: of "), "{error}");
        drop(held);
        assert!(group.heap().alloc(3000).is_ok());
        assert!(group.heap().alloc(usize::MAX).is_err());
    });
}

#[test]
fn wrong_arguments_are_refused_before_anything_starts() {
    spawn_with_heap(2, HEAP, |group| {
        let text = |result: Result<Pending, CommError>| result.map(drop).unwrap_err().to_string();
        let buffer = |len| zeros(&group, len);
        assert_eq!(
            text(group.all_reduce(buffer(8), Element::Bool, Reduce::Sum)),
            "`sum` is not defined for bool"
        );
        assert_eq!(text(group.broadcast(buffer(8), 2)), "expected a root below 2, got 2");
        assert!(
            text(group.all_reduce(buffer(7), Element::F32, Reduce::Sum))
                .starts_with("expected 7 bytes to be a multiple of 4")
        );
        assert!(
            text(group.reduce_scatter(buffer(4), buffer(2), Element::F32, Reduce::Sum, 1))
                .contains("multiple of 8")
        );
        assert!(text(group.all_gather(buffer(4), buffer(8), 0)).contains("0 rows"));
        assert!(
            text(group.permute(buffer(4), buffer(4), vec![Some(1), Some(1)]))
                .starts_with("expected 2 entries")
        );
        assert!(text(group.all_to_all(buffer(4), buffer(4), &[1], &[4])).starts_with("expected 2 splits"));
        assert_eq!(text(group.all_gather(buffer(4), buffer(4), 1)), "expected 8 bytes for the result, got 4");
        let root = (group.rank() == 1).then(|| buffer(8));
        assert_eq!(
            text(group.gather(buffer(4), root, 0, 1)),
            format!(
                "expected a result at the root 0 and nowhere else, got {} at {}",
                ["none", "one"][group.rank()],
                group.rank()
            )
        );
        let peer = vec![Message { peer: 5, tag: 0, buffer: buffer(4) }];
        assert_eq!(text(group.exchange(peer, vec![])), "expected a peer below 2, got 5");
        // Nothing was started, so the group still works.
        group.barrier().unwrap().wait(soon()).unwrap();
    });
}

/// Whoever needs nothing of the others compares its call with theirs all the same.
#[test]
fn a_difference_that_no_data_shows_is_found() {
    let ends = |call: &(dyn Fn(&Group) -> Result<Pending, CommError> + Sync)| {
        let texts = spawn_with_heap(3, HEAP, |group| {
            let first = call(&group).and_then(|pending| pending.wait(soon())).map(drop);
            let second = group.barrier().and_then(|pending| pending.wait(soon())).map(drop);
            first.and(second).unwrap_err().to_string()
        });
        assert!(texts.iter().all(|text| text.starts_with("call 0 differs between ranks")), "{texts:?}");
    };
    // The first takes itself for the root.
    let itself = |group: &Group, root| if group.rank() == root { group.rank() } else { 1 };
    ends(&|group| group.broadcast(zeros(group, 16), itself(group, 0)));
    ends(&|group| group.broadcast(zeros(group, 9000), itself(group, 2)));
    // The root of all others names another.
    ends(&|group| {
        let root = usize::from(group.rank() == 0);
        group.reduce(zeros(group, 16), Element::I32, Reduce::Sum, root)
    });
    ends(&|group| match group.rank() {
        1 => group.reduce(zeros(group, 16), Element::I32, Reduce::Sum, 0),
        _ => group.broadcast(zeros(group, 16), 0),
    });
    ends(&|group| {
        let to = if group.rank() == 0 { vec![None; 3] } else { vec![Some(0), None, None] };
        group.permute(zeros(group, 16), zeros(group, 16), to)
    });
}

/// A wait on one group makes the others go on: two may wait for two groups in different orders.
#[test]
fn groups_may_be_waited_for_in_any_order() {
    let turn = Barrier::new(2);
    spawn_with_heap(2, 64 << 20, |world| {
        let part = world.subgroup(&[vec![0, 1]], soon()).unwrap().unwrap();
        let start =
            |group: &Group| group.all_reduce(zeros(group, 1 << 20), Element::I32, Reduce::Sum).unwrap();
        // Each has started one of the two before the other has, so each has a part of it still to make.
        let (a, b) = if world.rank() == 0 {
            let a = start(&world);
            turn.wait();
            turn.wait();
            (a, start(&part))
        } else {
            turn.wait();
            let both = (start(&world), start(&part));
            turn.wait();
            both
        };
        turn.wait();
        let (first, second) = if world.rank() == 0 { (b, a) } else { (a, b) };
        first.wait(soon()).unwrap();
        second.wait(soon()).unwrap();
    });
}

#[test]
fn a_panic_with_calls_in_flight_is_known_at_once() {
    let caught = std::panic::catch_unwind(|| {
        spawn_with_heap(2, 8 << 20, |world| {
            let part = world.subgroup(&[vec![0, 1]], soon()).unwrap().unwrap();
            if world.rank() == 0 {
                let _pending = world.all_reduce(zeros(&world, 1 << 20), Element::I32, Reduce::Sum).unwrap();
                panic!("enough");
            }
            let start = Instant::now();
            let error = part.barrier().and_then(|pending| pending.wait(soon())).map(drop).unwrap_err();
            assert_eq!(error, CommError::Panicked { rank: 0 });
            // It used to take the whole second for which a dropped group goes on.
            assert!(start.elapsed() < Duration::from_millis(900));
        })
    });
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"enough"));
}

#[test]
fn a_member_that_left_is_not_waited_for() {
    let texts = spawn_with_heap(3, HEAP, |group| {
        if group.rank() == 1 {
            // What it has published still counts.
            drop(group.all_reduce(zeros(&group, 8), Element::F64, Reduce::Sum).unwrap());
            return String::new();
        }
        let (start, until) = (Instant::now(), Instant::now() + Duration::from_secs(20));
        group.all_reduce(zeros(&group, 8), Element::F64, Reduce::Sum).unwrap().wait(until).unwrap();
        let error = group.barrier().unwrap().wait(until).map(drop).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10));
        error.to_string()
    });
    for text in [&texts[0], &texts[2]] {
        assert!(
            text.starts_with("barrier: call 1: rank 1 has left the group without its part of it"),
            "{text}"
        );
    }
}

/// A member without room for its part of a call says so to the others, which need not wait for their deadlines.
#[test]
fn a_full_heap_ends_the_call_on_all_members() {
    let texts = spawn_with_heap(2, HEAP, |group| {
        // The first common result lies with rank 0, which has no room for it.
        let operand = zeros(&group, 300 << 10);
        let _held = (group.rank() == 0).then(|| zeros(&group, 600 << 10));
        let start = Instant::now();
        let ended = group.all_gather_common(operand, 1).and_then(|pending| pending.wait(soon()));
        assert!(start.elapsed() < Duration::from_secs(10));
        ended.map(drop).unwrap_err().to_string()
    });
    assert!(texts[0].starts_with("heap: 614400 bytes do not fit"), "{}", texts[0]);
    assert_eq!(texts[1], format!("rank 0 stopped: {}", texts[0]));
}
