//! Every failure ends in one error on every member, and nothing waits past its deadline.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::sync::Barrier;
use std::time::{Duration, Instant};

use consort_comm::{
    About, Buffer, CommError, Group, Message, Note, OperandType, Pending, Request, spawn, spawn_with_heap,
    take_unseen,
};
use consort_types::{Axes, Collective, Dtype, GroupName, Kind, Reduce, Route};

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
        // From then on the group fails at once.
        assert_eq!(group.barrier().and_then(|pending| pending.wait(soon())).map(drop).unwrap_err(), error);
        error.to_string()
    })
}

/// All members say what differs, and name both sides.
fn check_mismatch(texts: &[String], difference: &str, sides: [&str; 2]) {
    for text in texts {
        assert!(
            text.starts_with(&format!("call 0 on world: {difference} must be the same on all ranks\n")),
            "{text}"
        );
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
            group.all_reduce(zeros(group, 64), Dtype::F32, reduce)
        });
        check_mismatch(
            &texts,
            "the reduction",
            ["all_reduce sum f32, 64 bytes", "all_reduce max f32, 64 bytes"],
        );
        let texts = errors(n, |group| {
            let dtype = if last(group) { Dtype::I32 } else { Dtype::F32 };
            group.all_reduce(zeros(group, 64), dtype, Reduce::Sum)
        });
        check_mismatch(&texts, "the element type", ["all_reduce sum f32", "all_reduce sum i32"]);
        let gather = |group: &Group, len| group.all_gather(zeros(group, len), zeros(group, len * n), 1);
        let texts = errors(n, |group| gather(group, if last(group) { 8 } else { 16 }));
        check_mismatch(&texts, "the size", ["all_gather, 16 bytes", "all_gather, 8 bytes"]);
        let texts = errors(n, |group| if last(group) { group.barrier() } else { gather(group, 8) });
        check_mismatch(&texts, "the operation", ["all_gather, 8 bytes", "barrier, 0 bytes"]);
        let texts = errors(n, |group| {
            let factor = if last(group) { 0.25 } else { 0.5 };
            group.all_reduce(zeros(group, 64), Dtype::F32, Reduce::PremulSum(factor))
        });
        let others =
            if n == 2 { "rank 0 ".to_string() } else { format!("ranks {}", ["0,1 ", "0,1,2 "][n - 3]) };
        let last = format!("rank {} ", n - 1);
        check_mismatch(&texts, "types, shapes, sizes, routes or factors", [&others, &last]);
    }
}

/// Every member compares with every other, whether or not data moves between the two, so that nobody gets a result.
#[test]
fn what_differs_is_refused_by_members_that_need_nothing_of_each_other() {
    for n in [2, 3, 4] {
        for guilty in 0..n {
            let odd =
                |group: &Group, usual: usize| if group.rank() == guilty { (usual + 1) % n } else { usual };
            let texts = errors(n, |group| group.broadcast(zeros(group, 8), odd(group, 0)));
            check_mismatch(&texts, "the root", ["broadcast root 0", "broadcast root 1"]);
            let texts = errors(n, |group| group.broadcast(zeros(group, 9000), odd(group, 0)));
            check_mismatch(
                &texts,
                "the root",
                ["broadcast root 0, 9000 bytes", "broadcast root 1, 9000 bytes"],
            );
            let texts =
                errors(n, |group| group.reduce(zeros(group, 8), Dtype::I32, Reduce::Sum, odd(group, 0)));
            check_mismatch(&texts, "the root", ["reduce sum i32 root 0", "reduce sum i32 root 1"]);
            let texts = errors(n, |group| {
                let root = odd(group, 0);
                let result = (group.rank() == root).then(|| zeros(group, 8 * n));
                group.gather(zeros(group, 8), result, root, 1)
            });
            check_mismatch(&texts, "the root", ["gather root 0", "gather root 1"]);
            let texts = errors(n, |group| {
                let root = odd(group, 0);
                let operand = (group.rank() == root).then(|| zeros(group, 8 * n));
                group.scatter(operand, zeros(group, 8), root, 1)
            });
            check_mismatch(&texts, "the root", ["scatter root 0", "scatter root 1"]);
            let texts = errors(n, |group| {
                let route =
                    if group.rank() == guilty { Route::Table(vec![None; n]) } else { Route::Shift(1) };
                group.permute(zeros(group, 8), zeros(group, 8), &route)
            });
            let odd = format!("rank {guilty} ");
            check_mismatch(
                &texts,
                "types, shapes, sizes, routes or factors",
                ["permute, 8 bytes, digest ", &odd],
            );
            let texts = errors(n, |group| match group.rank() == guilty {
                true => group.reduce(zeros(group, 16), Dtype::I32, Reduce::Sum, 0),
                false => group.broadcast(zeros(group, 16), 0),
            });
            check_mismatch(&texts, "the operation", ["reduce sum i32 root 0", "broadcast root 0"]);
        }
    }
}

#[test]
fn what_a_caller_says_of_its_call_is_compared_and_printed() {
    let texts = errors(3, |group| {
        let (digest, shape) = if group.rank() == 1 { (1, "[7,4]") } else { (2, "[8,4]") };
        let text = group.recorder().name(&format!("broadcast f32{shape} root 0"));
        let note = Note { digest, text, ..Note::default() };
        let of = Collective::new(Kind::Broadcast, GroupName::Axes(Axes::NONE));
        let of = Collective { root: Some(0), ..of };
        group.start(Request { note, ..Request::new(&of, &[], zeros(group, 8), None) })
    });
    let sides =
        ["\n  ranks 0,2   broadcast f32[8,4] root 0   ", "\n  rank 1      broadcast f32[7,4] root 0   "];
    check_mismatch(&texts, "types, shapes, sizes, routes or factors", sides);
}

/// All members check all pairs, so that members whose own pairs agree reject the call, too.
#[test]
fn splits_that_do_not_fit() {
    let texts = errors(3, |group| {
        // Rank 0 expects more of rank 1 than it sends.
        let outs = if group.rank() == 0 { vec![4, 8, 4] } else { vec![4; 3] };
        group.all_to_all(zeros(group, 12), zeros(group, outs.iter().sum()), &[4; 3], &outs)
    });
    let lines: Vec<&str> = texts[0].lines().collect();
    assert_eq!(lines[0], "all_to_all: call 0: splits must fit together");
    assert!(
        lines[1].starts_with("  rank 1   sends 4 bytes to rank 0     ") && lines[1].contains("failures.rs:")
    );
    assert!(
        lines[2].starts_with("  rank 0   expects 8 bytes of rank 1   ") && lines[2].contains("failures.rs:")
    );
    assert!(texts[1..].iter().all(|text| *text == texts[0]), "{texts:?}");
}

#[test]
fn lists_of_groups_are_compared() {
    for n in [2, 3, 4] {
        let texts = spawn_with_heap(n, HEAP, |group| {
            let mut list: Vec<usize> = (0..n).collect();
            if group.rank() == n - 1 {
                list.swap(0, 1);
            }
            group.subgroup(&[list], soon()).map(drop).unwrap_err().to_string()
        });
        let sides =
            [format!("make groups of the lists [[0, 1{}", if n > 2 { ", " } else { "]]" }), "[[1, 0".into()];
        check_mismatch(&texts, "the call", [&sides[0], &sides[1]]);
    }
}

#[test]
fn messages_that_are_not_what_their_receiver_expects() {
    // By length, and by the description at each end.
    let about = |group: &Group, digest: u64, text: &str| About { digest, text: group.recorder().name(text) };
    for by_length in [true, false] {
        let texts = spawn_with_heap(3, HEAP, |group| {
            group.set_strict(true);
            if group.rank() == 2 {
                // It is not part of the message, and learns of the error in its next wait.
                return group
                    .barrier()
                    .and_then(|pending| pending.wait(soon()))
                    .map(drop)
                    .unwrap_err()
                    .to_string();
            }
            let (len, what) = match (group.rank(), by_length) {
                (0, true) => (8, About::default()),
                (_, true) => (12, About::default()),
                (0, false) => (8, about(&group, 1, "f32[2]")),
                (_, false) => (8, about(&group, 2, "i32[2]")),
            };
            let message = Message { about: what, ..Message::new(1 - group.rank(), 3, zeros(&group, len)) };
            let batch = match group.rank() {
                0 => group.exchange(vec![message], vec![]),
                _ => group.exchange(vec![], vec![message]),
            };
            batch.and_then(|pending| pending.wait(soon())).map(drop).unwrap_err().to_string()
        });
        let (sent, received) = if by_length { ("8 bytes", "12 bytes") } else { ("f32[2]", "i32[2]") };
        let lines: Vec<&str> = texts[1].lines().collect();
        assert_eq!(lines[0], "exchange: a message must have the type and shape that its receiver expects");
        assert!(lines[1].starts_with(&format!("  rank 0   send {sent}, tag 3")), "{}", lines[1]);
        assert!(lines[2].starts_with(&format!("  rank 1   receive {received}, tag 3")), "{}", lines[2]);
        assert!(lines[1..3].iter().all(|line| line.contains("failures.rs:")));
        for other in [0, 2] {
            assert_eq!(texts[other], format!("rank 1 stopped: {}", texts[1].replace("\n  ", "\n    ")));
        }
    }
}

#[test]
fn a_member_that_does_not_come_ends_the_wait_at_the_deadline() {
    let over = Barrier::new(3);
    let results = spawn_with_heap(3, HEAP, |world| {
        let group = world.subgroup(&[vec![0, 1, 2]], soon()).unwrap().unwrap();
        if group.rank() == 1 {
            // It holds the group, and makes no call.
            over.wait();
            return None;
        }
        let start = Instant::now();
        let until = start + Duration::from_millis(200);
        let pending = group.all_reduce(zeros(&group, 8), Dtype::F64, Reduce::Sum).unwrap();
        let error = pending.wait(until).map(drop).unwrap_err();
        over.wait();
        Some((error, start.elapsed()))
    });
    let mut by_deadline = 0;
    for (error, time) in results.into_iter().flatten() {
        assert_eq!(error.culprits(), [1], "{error}");
        let text = error.to_string();
        if let CommError::Deadline { .. } = error {
            assert!(time >= Duration::from_millis(200));
            by_deadline += 1;
        }
        // The member that reaches its deadline first tells the other.
        let said = "all_reduce sum f64: call 0 on world.0[0,1,2]: the deadline passed; missing: rank 1\n";
        assert!(text.starts_with(said) || text.contains(&format!(" stopped: {said}")), "{text}");
        // Its last operation, with its line.
        assert!(
            text.contains("  rank 1   finished: world call 0, make groups of the lists [[0, 1, 2]]"),
            "{text}"
        );
        assert!(text.contains("failures.rs:"), "{text}");
    }
    assert!(by_deadline > 0);
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
            text(group.all_reduce(buffer(8), Dtype::Bool, Reduce::Avg)),
            "`avg` is not defined for bool"
        );
        let mixed = [OperandType::new(Dtype::U8, &[4]), OperandType::new(Dtype::F32, &[1])];
        let sum = Collective {
            reduce: Some(Reduce::Sum),
            ..Collective::new(Kind::AllReduce, GroupName::Axes(Axes::NONE))
        };
        assert_eq!(
            text(group.start(Request::new(&sum, &mixed, [buffer(3), buffer(4)], None))),
            "expected the operands with larger elements first, got f32 after 3 bytes"
        );
        assert_eq!(text(group.broadcast(buffer(8), 2)), "expected a root below 2, got 2");
        assert!(
            text(group.all_reduce(buffer(7), Dtype::F32, Reduce::Sum))
                .starts_with("expected 7 bytes to be a multiple of 4")
        );
        assert!(
            text(group.reduce_scatter(buffer(4), buffer(2), Dtype::F32, Reduce::Sum, 1))
                .contains("multiple of 8")
        );
        assert!(text(group.all_gather(buffer(4), buffer(8), 0)).contains("0 stripes"));
        assert!(
            text(group.permute(buffer(4), buffer(4), &Route::Table(vec![Some(1), Some(1)])))
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
        let peer = vec![Message::new(5, 0, buffer(4))];
        assert_eq!(text(group.exchange(peer, vec![])), "expected a peer below 2, got 5");
        // Nothing was started, so the group still works.
        group.barrier().unwrap().wait(soon()).unwrap();
    });
}

/// A wait on one group advances the others: two members may wait for two groups in different orders.
#[test]
fn groups_may_be_waited_for_in_any_order() {
    let turn = Barrier::new(2);
    spawn_with_heap(2, 64 << 20, |world| {
        let part = world.subgroup(&[vec![0, 1]], soon()).unwrap().unwrap();
        let start = |group: &Group| group.all_reduce(zeros(group, 1 << 20), Dtype::I32, Reduce::Sum).unwrap();
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
                let _pending = world.all_reduce(zeros(&world, 1 << 20), Dtype::I32, Reduce::Sum).unwrap();
                panic!("enough");
            }
            let start = Instant::now();
            let error = part.barrier().and_then(|pending| pending.wait(soon())).map(drop).unwrap_err();
            assert_eq!(error, CommError::Panicked { rank: 0 });
            // It used to take the whole second for which a dropped group waits.
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
            drop(group.all_reduce(zeros(&group, 8), Dtype::F64, Reduce::Sum).unwrap());
            return String::new();
        }
        let (start, until) = (Instant::now(), Instant::now() + Duration::from_secs(20));
        group.all_reduce(zeros(&group, 8), Dtype::F64, Reduce::Sum).unwrap().wait(until).unwrap();
        let error = group.barrier().unwrap().wait(until).map(drop).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10));
        error.to_string()
    });
    for text in [&texts[0], &texts[2]] {
        // It may also have seen, before it left, that they had made a call that it had not.
        let said = "call 1 on world: rank 1 left the group before it had done its part of this call";
        assert!(
            text.contains(said)
                || text.contains("call 1 on world: rank 1 left the group without making this call"),
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
    assert_eq!(texts[1], format!("rank 0 stopped: {}", texts[0].replace("\n  ", "\n    ")));
}

/// Deadlocked ranks are all told at once, however far away the deadline is.
#[test]
fn a_circle_of_waits_is_found_and_named() {
    let start = Instant::now();
    for n in [2, 3, 4] {
        for len in [8, 9000] {
            let texts = spawn_with_heap(n, HEAP, |group| {
                group.set_strict(true);
                // All send first and wait for that, and only then would they receive.
                let send = group.send(Message::new((group.rank() + 1) % n, 5, zeros(&group, len)));
                send.and_then(|pending| pending.wait(soon())).map(drop).unwrap_err().to_string()
            });
            for text in &texts {
                let text = text.split_once(" stopped: ").map_or(&text[..], |(_, text)| text);
                let mut lines = text.lines();
                assert_eq!(
                    lines.next().unwrap(),
                    "deadlock: no rank can go on: each of these waits for the next"
                );
                for (rank, line) in lines.by_ref().take(n).enumerate() {
                    let next = (rank + 1) % n;
                    let said =
                        format!("  rank {rank}   send , tag 5: waits for rank {next} to receive it   ");
                    assert!(
                        line.starts_with(&said.replace(" ,", ",")) && line.contains("failures.rs:"),
                        "{line}"
                    );
                }
            }
        }
        // Two groups in different orders.
        let texts = spawn_with_heap(n, HEAP, |world| {
            let part = world.subgroup(&[(0..n).collect()], soon()).unwrap().unwrap();
            let (first, second) = if world.rank() == 0 { (&world, &part) } else { (&part, &world) };
            let outcome = first.barrier().and_then(|pending| pending.wait(soon())).map(drop);
            let outcome = outcome.and_then(|()| second.barrier()?.wait(soon()).map(drop));
            outcome.unwrap_err().to_string()
        });
        assert!(texts.iter().all(|text| text.contains("deadlock: no rank can go on")), "{texts:?}");
        assert!(texts.iter().all(|text| text.contains("barrier, call ")), "{texts:?}");
    }
    assert!(start.elapsed() < Duration::from_secs(15));
}

/// A late rank is no cycle, and neither are waits that will end.
#[test]
fn slow_ranks_are_no_circle() {
    spawn_with_heap(3, HEAP, |group| {
        group.set_strict(true);
        let (me, next, before) = (group.rank(), (group.rank() + 1) % 3, (group.rank() + 2) % 3);
        for round in 0..3 {
            if me == round {
                std::thread::sleep(Duration::from_millis(300));
            }
            let send = Message::new(next, 0, zeros(&group, 8));
            let receive = Message::new(before, 0, zeros(&group, 8));
            group.exchange(vec![send], vec![receive]).unwrap().wait(soon()).unwrap();
            group.barrier().unwrap().wait(soon()).unwrap();
        }
    });
}

/// At a deadline the rank at the end of the chain of waits is named, not one that waits for it.
#[test]
fn blame_follows_waits_to_their_end() {
    let over = Barrier::new(4);
    let named = spawn_with_heap(4, HEAP, |group| {
        // 0 waits for 1, 1 for 2, and 2 for 3, which does not come.
        let outcome = match group.rank() {
            3 => Ok(()),
            me => {
                let until = Instant::now() + Duration::from_millis(300);
                let receive = group.recv(Message::new(me + 1, 0, zeros(&group, 8)));
                receive.and_then(|pending| pending.wait(until)).map(drop)
            }
        };
        over.wait();
        outcome.map_err(|error| error.culprits())
    });
    assert_eq!(named, [Err(vec![3]), Err(vec![3]), Err(vec![3]), Ok(())]);
}

/// A rank that gave up and left is not blamed for the failure that made it leave, on any group.
#[test]
fn causes_go_before_departures() {
    let named = spawn_with_heap(4, HEAP, |world| {
        let part = world.subgroup(&[vec![0, 1], vec![2, 3]], soon()).unwrap().unwrap();
        match world.rank() {
            // It leaves without its part of what rank 1 waits for.
            0 => Ok(()),
            1 => {
                // It is not involved with the others, and leaves when it has failed.
                part.barrier()
                    .and_then(|pending| pending.wait(soon()))
                    .map(drop)
                    .map_err(|error| error.culprits())
            }
            _ => world
                .barrier()
                .and_then(|pending| pending.wait(soon()))
                .map(drop)
                .map_err(|error| error.culprits()),
        }
    });
    assert!(named[1..].iter().all(|named| *named == Err(vec![0])), "{named:?}");
}

/// Unseen errors are found when the group is dropped.
#[test]
fn errors_that_nobody_saw_are_reported_at_the_end() {
    let unseen = |f: &(dyn Fn(Group) + Sync)| {
        spawn_with_heap(2, HEAP, |group| {
            f(group);
            take_unseen().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        })
    };
    // A call that differs, and whose handle is dropped.
    let texts = unseen(&|group| {
        let len = if group.rank() == 0 { 8 } else { 12 };
        drop(group.all_reduce(zeros(&group, len), Dtype::F32, Reduce::Sum).unwrap());
    });
    assert!(
        texts.iter().all(|text| text.contains("call 0 on world: the size must be the same")),
        "{texts:?}"
    );
    // A message that nobody receives, small or large, and one that nobody sends.
    for (len, strict) in [(8, false), (8, true), (9000, false)] {
        let texts = unseen(&|group| {
            group.set_strict(strict);
            if group.rank() == 0 {
                drop(group.send(Message::new(1, 7, zeros(&group, len))).unwrap());
            }
        });
        let said = "exchange: a message of rank 0 to rank 1 was never received";
        assert!(texts.iter().any(|text| text.starts_with(said)), "{texts:?}");
        assert!(texts.iter().all(|text| text.is_empty() || text.contains(said)), "{texts:?}");
        assert!(!texts[0].is_empty(), "its sender knows: {texts:?}");
    }
    let texts = unseen(&|group| {
        if group.rank() == 0 {
            drop(group.recv(Message::new(1, 7, zeros(&group, 8))).unwrap());
        }
    });
    assert!(texts[0].contains("rank 1 left the group before it had done its part of this call"), "{texts:?}");
    // A message to itself.
    let texts = unseen(&|group| drop(group.send(Message::new(group.rank(), 7, zeros(&group, 8))).unwrap()));
    assert!(texts.iter().all(|text| text.contains("was never received")), "{texts:?}");
    // Seen errors are not reported again, and success is silent.
    let texts = unseen(&|group| {
        let len = if group.rank() == 0 { 8 } else { 12 };
        let outcome = group.all_reduce(zeros(&group, len), Dtype::F32, Reduce::Sum).unwrap().wait(soon());
        assert!(outcome.is_err());
    });
    assert_eq!(texts, ["", ""]);
    let texts = unseen(&|group| {
        drop(group.all_reduce(zeros(&group, 8), Dtype::F32, Reduce::Sum).unwrap());
        let other = 1 - group.rank();
        drop(group.send(Message::new(other, 7, zeros(&group, 8))).unwrap());
        drop(group.recv(Message::new(other, 7, zeros(&group, 8))).unwrap());
    });
    assert_eq!(texts, ["", ""]);
}

/// An unread result keeps neither the memory nor the records of later operations.
#[test]
fn an_unread_result_does_not_pin_what_comes_after_it() {
    spawn_with_heap(2, HEAP, |group| {
        let kept = group.all_reduce(zeros(&group, 64), Dtype::F32, Reduce::Sum).unwrap();
        let waiting = group.recv(Message::new(1 - group.rank(), 9, zeros(&group, 64))).unwrap();
        let before = group.heap().in_use();
        for _ in 0..3000 {
            drop(group.all_reduce(zeros(&group, 2400), Dtype::F32, Reduce::Sum).unwrap());
            drop(group.send(Message::new(1 - group.rank(), 1, zeros(&group, 2400))).unwrap());
            group.recv(Message::new(1 - group.rank(), 1, zeros(&group, 2400))).unwrap().wait(soon()).unwrap();
        }
        group.barrier().unwrap().wait(soon()).unwrap();
        assert!(
            group.heap().in_use() < before + (400 << 10),
            "{} bytes more",
            group.heap().in_use() - before
        );
        group.send(Message::new(1 - group.rank(), 9, zeros(&group, 64))).unwrap().wait(soon()).unwrap();
        assert_eq!(waiting.wait(soon()).unwrap()[0].len(), 64);
        assert_eq!(kept.wait(soon()).unwrap()[0].len(), 64);
        assert_eq!(group.in_flight(), 0);
    });
}

/// The memory of a group that all members have dropped is used again.
#[test]
fn dropped_groups_give_their_memory_back() {
    spawn_with_heap(2, 4 << 20, |group| {
        let operand = zeros(&group, 64);
        for round in 0..300 {
            let part = group.subgroup(&[vec![1, 0]], soon()).unwrap().unwrap();
            // A lease that outlives the group keeps its rows as long as it must.
            let buffer = zeros(&group, 9000);
            part.broadcast(buffer, round % 2).unwrap().wait(soon()).unwrap();
        }
        drop(operand);
    });
}

/// The last of three members fails, panics or leaves; the others have an operation in flight that needs it, and this is the error of
/// what they do then.
fn errors_without_the_last(
    last: impl Fn(&Group) + Sync,
    others: impl Fn(&mut Pending, Buffer) -> Result<(), CommError> + Sync,
) -> Vec<CommError> {
    let started = Barrier::new(3);
    let results = spawn_with_heap(3, 4 * HEAP, |group| {
        if group.rank() == 2 {
            started.wait();
            last(&group);
            return None;
        }
        let operand = zeros(&group, HEAP);
        let view = operand.clone();
        let mut pending = group.all_reduce(operand, Dtype::F64, Reduce::Sum).unwrap();
        started.wait();
        Some(others(&mut pending, view).unwrap_err())
    });
    results.into_iter().flatten().collect()
}

/// It waits for what does not come.
fn fail(group: &Group) {
    let until = Instant::now() + Duration::from_millis(50);
    let room = group.heap().alloc(4).unwrap();
    let error = group.recv(Message::new(0, 9, room)).unwrap().wait(until).map(drop).unwrap_err();
    assert!(matches!(error, CommError::Deadline { .. }), "{error}");
}

fn tested(pending: &mut Pending) -> Result<(), CommError> {
    while pending.test()?.is_none() {}
    Ok(())
}

#[test]
fn a_test_fails_when_another_member_fails_or_leaves() {
    let errors = errors_without_the_last(fail, |pending, _| tested(pending));
    assert_eq!(errors.len(), 2);
    for error in errors {
        // The member that it waited for had told it first, or the other one had.
        assert!(matches!(error, CommError::Elsewhere { rank: 2, .. }), "{error}");
        assert!(error.to_string().contains("exchange: the deadline passed"), "{error}");
    }
    let errors = errors_without_the_last(|_| {}, |pending, _| tested(pending));
    assert_eq!(errors.len(), 2);
    for error in errors {
        assert!(error.to_string().contains("rank 2 left the group without making this call"), "{error}");
    }
}

#[test]
fn a_wait_for_a_buffer_fails_with_the_operation_that_uses_it() {
    let errors = errors_without_the_last(fail, |_, mut view| view.bytes_mut(soon()).map(drop));
    assert_eq!(errors.len(), 2);
    for error in errors {
        assert!(matches!(error, CommError::Elsewhere { rank: 2, .. }), "{error}");
    }
    let over = Barrier::new(3);
    let errors = errors_without_the_last(
        |_| {
            over.wait();
        },
        |_, mut view| {
            let error = view.bytes_mut(Instant::now() + Duration::from_millis(200)).map(drop);
            over.wait();
            error
        },
    );
    assert_eq!(errors.len(), 2);
    for error in errors {
        assert_eq!(error.culprits(), [2], "{error}");
        let said = "all_reduce sum f64: call 0 on world: the deadline passed; missing: rank 2";
        assert!(error.to_string().contains(said), "{error}");
    }
}

/// A caller that can do something else waits a little, and the operation does not fail.
#[test]
fn a_wait_without_a_deadline_fails_nothing() {
    let has_looked = Barrier::new(2);
    spawn_with_heap(2, 4 * HEAP, |group| {
        let operand = zeros(&group, HEAP);
        let view = operand.clone();
        if group.rank() == 1 {
            has_looked.wait();
        }
        let pending = group.all_reduce(operand, Dtype::F64, Reduce::Sum).unwrap();
        if group.rank() == 0 {
            assert!(!view.is_released_by(Instant::now() + Duration::from_millis(5)));
            has_looked.wait();
        }
        assert!(pending.wait(soon()).unwrap()[0].bytes().unwrap().iter().all(|byte| *byte == 0));
    });
}
