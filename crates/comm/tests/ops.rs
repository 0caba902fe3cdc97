//! Operations between threads: every one of them against plain loops, and how they go together.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "ops/checks.rs"]
mod checks;
#[path = "ops/elements.rs"]
mod elements;

use std::time::{Duration, Instant};

use consort_comm::{Buffer, Group, Message, spawn_with_heap};
use consort_types::{Dtype, Reduce};
use elements::{operand, reduced};

const HEAP: usize = 32 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn buffer(group: &Group, bytes: &[u8]) -> Buffer {
    group.heap().alloc_from(bytes).unwrap()
}

fn input(group: &Group, count: usize, dtype: Dtype) -> Buffer {
    buffer(group, &operand(dtype, group.rank(), count, 0))
}

fn sum(n: usize, count: usize, dtype: Dtype) -> Vec<u8> {
    let operands: Vec<Vec<u8>> = (0..n).map(|rank| operand(dtype, rank, count, 0)).collect();
    reduced(dtype, Reduce::Sum, &operands)
}

#[test]
fn every_operation_equals_plain_loops() {
    for n in checks::RANKS {
        spawn_with_heap(n, checks::HEAP, |group| checks::check_all(&group));
    }
}

#[test]
fn the_order_of_a_sum_is_seen_in_its_bits() {
    for dtype in [Dtype::F32, Dtype::F64] {
        let mut operands: Vec<Vec<u8>> = (0..3).map(|rank| operand(dtype, rank, 1000, 0)).collect();
        let sum = reduced(dtype, Reduce::Sum, &operands);
        operands.reverse();
        assert!(reduced(dtype, Reduce::Sum, &operands) != sum, "{dtype:?}");
    }
}

#[test]
fn many_in_flight_waited_for_in_reverse() {
    for n in [2, 3] {
        spawn_with_heap(n, HEAP, |group| {
            // More than there are slots.
            let count = |i: usize| 1 + i * 97;
            let pendings: Vec<_> = (0..100)
                .map(|i| {
                    group.all_reduce(input(&group, count(i), Dtype::I64), Dtype::I64, Reduce::Sum).unwrap()
                })
                .collect();
            for (i, pending) in pendings.into_iter().enumerate().rev() {
                let got = pending.wait(soon()).unwrap();
                assert_eq!(*got[0].bytes().unwrap(), sum(n, count(i), Dtype::I64));
            }
            assert_eq!(group.in_flight(), 0);
        });
    }
}

#[test]
fn subgroups_are_independent() {
    spawn_with_heap(6, HEAP, |world| {
        let rows = [vec![0, 1, 2], vec![3, 4, 5]];
        let columns = [vec![0, 3], vec![4, 1], vec![2, 5]];
        let row = world.subgroup(&rows, soon()).unwrap().unwrap();
        let column = world.subgroup(&columns, soon()).unwrap().unwrap();
        let some = world.subgroup(&[vec![5, 0]], soon()).unwrap();
        assert_eq!(some.is_some(), [0, 5].contains(&world.rank()));
        let one = world.subgroup(&(0..6).map(|r| vec![r]).collect::<Vec<_>>(), soon()).unwrap().unwrap();
        // In flight together, waited for in different orders.
        let mine = |group: &Group| buffer(group, &(world.rank() as i64 + 1).to_le_bytes());
        let a = row.all_reduce(mine(&row), Dtype::I64, Reduce::Sum).unwrap();
        let b = column.all_gather(mine(&column), buffer(&column, &[0; 16]), 1).unwrap();
        let c = one.all_reduce(mine(&one), Dtype::I64, Reduce::Product).unwrap();
        let number = |buffer: &Buffer, i: usize| {
            i64::from_le_bytes(buffer.bytes().unwrap()[i * 8..i * 8 + 8].try_into().unwrap())
        };
        let b = b.wait(soon()).unwrap();
        let want = [[1, 4], [5, 2], [3, 6]][[0, 1, 2, 0, 1, 2][world.rank()]];
        assert_eq!([number(&b[1], 0), number(&b[1], 1)], want);
        assert_eq!(number(&a.wait(soon()).unwrap()[0], 0), [6, 15][world.rank() / 3]);
        assert_eq!(number(&c.wait(soon()).unwrap()[0], 0), world.rank() as i64 + 1);
        if let Some(some) = some {
            assert_eq!(some.ranks(), [5, 0]);
            some.barrier().unwrap().wait(soon()).unwrap();
        }
    });
}

#[test]
fn messages_match_by_sender_and_tag_in_order() {
    for n in [1, 2, 3, 5] {
        spawn_with_heap(n, HEAP, |group| {
            let me = group.rank();
            let (next, before) = ((me + 1) % n, (me + n - 1) % n);
            let message =
                |peer, tag, byte: u8, len| Message::new(peer, tag, buffer(&group, &vec![byte; len]));
            // More than a ring of mails holds; two tags, received in the other order.
            for round in 0..40u8 {
                let sends = vec![
                    message(next, 7, round, 10),
                    message(next, 8, round + 100, 3000),
                    message(next, 7, round + 1, 10),
                ];
                let recvs =
                    vec![message(before, 8, 0, 3000), message(before, 7, 0, 10), message(before, 7, 0, 10)];
                let got = group.exchange(sends, recvs).unwrap().wait(soon()).unwrap();
                assert_eq!(*got[3].bytes().unwrap(), vec![round + 100; 3000]);
                assert_eq!(*got[4].bytes().unwrap(), vec![round; 10]);
                assert_eq!(*got[5].bytes().unwrap(), vec![round + 1; 10]);
            }
            // All in flight at once, many more than a ring of mails holds; every tag finds its own.
            let sends: Vec<_> = (0..50u8)
                .map(|i| group.exchange(vec![message(next, u64::from(i), i, 64)], vec![]).unwrap())
                .collect();
            let recvs: Vec<_> = (0..50u8)
                .rev()
                .map(|i| (i, group.exchange(vec![], vec![message(before, u64::from(i), 0, 64)]).unwrap()))
                .collect();
            for (i, pending) in recvs {
                assert_eq!(*pending.wait(soon()).unwrap()[0].bytes().unwrap(), [i; 64]);
            }
            for pending in sends {
                pending.wait(soon()).unwrap();
            }
        });
    }
}

#[test]
fn messages_go_on_while_small_calls_come_and_go() {
    // More than fit into the ring of their destination: the last ones are posted while other calls are waited for.
    const SENDS: usize = 40;
    spawn_with_heap(2, HEAP, |group| {
        let message = |i: usize| Message::new(1 - group.rank(), 0, buffer(&group, &[i as u8; 4]));
        let mut exchange = match group.rank() {
            0 => group.exchange((0..SENDS).map(message), []).unwrap(),
            _ => group.exchange([], (0..SENDS).map(|_| message(0))).unwrap(),
        };
        let mut got = None;
        for round in 0..5000u32 {
            let ones = buffer(&group, &round.to_le_bytes());
            let sum = group.all_reduce(ones, Dtype::I32, Reduce::Sum).unwrap().wait(soon()).unwrap();
            assert_eq!(*sum[0].bytes().unwrap(), (2 * round).to_le_bytes());
            if group.rank() == 1 && got.is_none() {
                got = exchange.test().unwrap();
            }
        }
        if group.rank() == 1 {
            let got = got.expect("all have come while nobody waited for them");
            assert!(got.iter().enumerate().all(|(i, one)| *one.bytes().unwrap() == [i as u8; 4]));
        }
    });
}

#[test]
fn a_buffer_is_written_only_after_release() {
    spawn_with_heap(2, HEAP, |group| {
        let len = 1 << 20;
        for round in 0..20u8 {
            let mut mine = buffer(&group, &vec![round; len]);
            mine = group.broadcast(mine, 0).unwrap().wait(soon()).unwrap().remove(0);
            if group.rank() == 0 {
                // The root is finished as soon as all have called; the other may still be reading.
                mine.bytes_mut(soon()).unwrap().fill(255);
            } else {
                assert!(mine.bytes().unwrap().iter().all(|byte| *byte == round));
            }
        }
        group.barrier().unwrap().wait(soon()).unwrap();
    });
}

#[test]
fn waiting_for_release_makes_earlier_operations_go_on() {
    let met = std::sync::Barrier::new(2);
    spawn_with_heap(2, HEAP, |group| {
        if group.rank() == 1 {
            met.wait();
        }
        let operand = input(&group, 50_000, Dtype::I64);
        let sum = group.all_reduce(operand, Dtype::I64, Reduce::Sum).unwrap();
        let mut given = buffer(&group, &[7; 10_000]);
        let message = Message::new(1 - group.rank(), 0, given.clone());
        if group.rank() == 0 {
            let sent = group.send(message).unwrap();
            // The other has not begun: the sum, which is before the message, is finished while this waits.
            met.wait();
            given.bytes_mut(soon()).unwrap().fill(8);
            sent.wait(soon()).unwrap();
        } else {
            group.recv(message).unwrap().wait(soon()).unwrap();
            assert!(given.bytes().unwrap().iter().all(|byte| *byte == 7));
        }
        sum.wait(soon()).unwrap();
    });
}

#[test]
fn what_is_dropped_still_completes_for_the_others() {
    for n in [2, 3] {
        spawn_with_heap(n, HEAP, |group| {
            let (me, count) = (group.rank(), 50_000);
            let dtype = Dtype::F32;
            let want = sum(n, count, dtype);
            for _ in 0..5 {
                let pending = group.all_reduce(input(&group, count, dtype), dtype, Reduce::Sum).unwrap();
                // Rank 0 does not want its result; the others do.
                if me == 0 {
                    drop(pending);
                } else {
                    assert!(*pending.wait(soon()).unwrap()[0].bytes().unwrap() == want);
                }
            }
            // More sends than a ring holds, from a rank that leaves at once.
            let message = |peer, i: u8| Message::new(peer, u64::from(i), buffer(&group, &[i; 100]));
            if me == 0 {
                drop(group.exchange((0..40).map(|i| message(1, i)), []).unwrap());
            } else if me == 1 {
                let got = group.exchange([], (0..40).map(|i| message(0, i))).unwrap().wait(soon()).unwrap();
                assert!(got.iter().zip(0u8..).all(|(buffer, i)| *buffer.bytes().unwrap() == [i; 100]));
            }
        });
    }
}

#[test]
fn memory_is_constant_over_many_calls() {
    // A heap that would be full after a few calls if anything were kept.
    spawn_with_heap(2, 1 << 20, |group| {
        for round in 0..200 {
            let mine = input(&group, 20_000, Dtype::F32);
            let mut got = group.all_reduce(mine, Dtype::F32, Reduce::Sum).unwrap().wait(soon()).unwrap();
            let gathered = group
                .all_gather(got.remove(0), buffer(&group, &[0; 160_000]), 1)
                .unwrap()
                .wait(soon())
                .unwrap();
            assert_eq!(gathered[1].len(), 160_000, "round {round}");
            // Dropped blocks come back when the peer is done with them.
            drop(gathered);
            group.barrier().unwrap().wait(soon()).unwrap();
        }
    });
}

#[test]
fn groups_by_axis_and_by_split() {
    spawn_with_heap(6, HEAP, |world| {
        let me = world.rank();
        // Two rows of three: members follow one another along the last axis.
        let (row, column) = (me / 3, me % 3);
        let along = world.axis(&[2, 3], 1, soon()).unwrap();
        assert_eq!(along.ranks(), [3 * row, 3 * row + 1, 3 * row + 2]);
        let across = world.axis(&[2, 3], 0, soon()).unwrap();
        assert_eq!((across.ranks(), across.rank()), (&[column, column + 3][..], row));
        let error = world.axis(&[2, 2], 0, soon()).map(drop).unwrap_err().to_string();
        assert_eq!(error, "expected a mesh of 6 members and one of its axes, got [2, 2] and 0");
        // Even and odd ranks, the highest first; rank 5 in none.
        let colour = (me < 5).then_some(me as u64 % 2);
        let part = world.split(colour, -(me as i64), soon()).unwrap();
        let expected: Option<&[usize]> =
            [Some(&[4, 2, 0][..]), Some(&[3, 1]), None][if me == 5 { 2 } else { me % 2 }];
        assert_eq!(part.as_ref().map(Group::ranks), expected);
        // A message along the axis: to the next in the row, in this group's places.
        let next = (column + 1) % 3;
        let send = along.send(Message::new(next, 1, buffer(&along, &[me as u8]))).unwrap();
        let before = (column + 2) % 3;
        let recv = along.recv(Message::new(before, 1, buffer(&along, &[0]))).unwrap();
        assert_eq!(*recv.wait(soon()).unwrap()[0].bytes().unwrap(), [(3 * row + before) as u8]);
        send.wait(soon()).unwrap();
    });
}

/// The place of a call that nobody waited for is used again, and nothing of it is left there.
#[test]
fn a_call_after_one_that_was_dropped_is_a_call_of_its_own() {
    spawn_with_heap(2, 8 << 20, |group| {
        let me = group.rank();
        for round in 0..50u8 {
            // Large in parts, a list, a common result: each leaves something behind.
            let large = || buffer(&group, &vec![round; 100_000]);
            drop(group.all_reduce(large(), Dtype::U8, Reduce::Max).unwrap());
            drop(group.all_reduce(vec![large(), large()], Dtype::U8, Reduce::Max).unwrap());
            drop(group.all_gather_common(large(), 1).unwrap());
            // A small one must have both members' data, and only its own.
            let got = group.all_reduce(buffer(&group, &[me as u8 + round]), Dtype::U8, Reduce::Sum).unwrap();
            let got = got.wait(soon()).unwrap();
            assert!(got.len() == 1 && *got[0].bytes().unwrap() == [1 + 2 * round], "round {round}");
        }
    });
}

#[test]
fn buffers_of_a_dropped_call_come_back() {
    // Room for three of them and their results.
    spawn_with_heap(2, 1 << 20, |group| {
        for round in 0..20 {
            for _ in 0..3 {
                let (mine, all) = (buffer(&group, &[1; 100_000]), buffer(&group, &[0; 200_000]));
                drop(group.all_gather(mine, all, 1).unwrap());
                group.barrier().unwrap().wait(soon()).unwrap();
            }
            assert_eq!(group.in_flight(), 0, "round {round}");
        }
        // Only the last one's may still be held, by a member that has not reached the end.
        group.barrier().unwrap().wait(soon()).unwrap();
        assert!(group.heap().alloc(900_000).is_ok());
    });
}
