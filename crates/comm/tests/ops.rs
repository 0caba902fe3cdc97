//! Every operation on every element type and many rank counts, against plain loops.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::time::{Duration, Instant};

use consort_comm::{Buffer, Element, Group, Message, Reduce, spawn_with_heap};
use half::{bf16, f16};

const RANKS: [usize; 6] = [1, 2, 3, 4, 5, 8];
const HEAP: usize = 32 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// A small number that every element type holds exactly.
fn value(rank: usize, i: usize, element: Element) -> f64 {
    let small = (rank * 5 + i * 3 + i / 7) % 3;
    if element == Element::Bool { (small % 2) as f64 } else { small as f64 }
}

fn encode(values: &[f64], element: Element) -> Vec<u8> {
    let bytes = |x: &f64| match element {
        Element::F32 => (*x as f32).to_le_bytes().to_vec(),
        Element::F64 => x.to_le_bytes().to_vec(),
        Element::F16 => f16::from_f32(*x as f32).to_le_bytes().to_vec(),
        Element::Bf16 => bf16::from_f32(*x as f32).to_le_bytes().to_vec(),
        Element::I32 => (*x as i64 as i32).to_le_bytes().to_vec(),
        Element::I64 => (*x as i64).to_le_bytes().to_vec(),
        Element::U8 | Element::Bool => vec![*x as i64 as u8],
    };
    values.iter().flat_map(bytes).collect()
}

/// The reduction by a plain loop; all intermediate values are exact.
fn reduced(reduce: Reduce, element: Element, n: usize, at: impl Fn(usize) -> f64) -> f64 {
    let fold = |f: fn(f64, f64) -> f64| (1..n).fold(at(0), |a, rank| f(a, at(rank)));
    let bits = |f: fn(i64, i64) -> i64| (1..n).fold(at(0) as i64, |a, rank| f(a, at(rank) as i64)) as f64;
    match reduce {
        Reduce::Sum => fold(|a, b| a + b),
        Reduce::Avg if element == Element::F64 => fold(|a, b| a + b) / n as f64,
        Reduce::Avg => f64::from(fold(|a, b| a + b) as f32 / n as f32),
        Reduce::Product => fold(|a, b| a * b),
        Reduce::Min => fold(f64::min),
        Reduce::Max => fold(f64::max),
        Reduce::And => bits(|a, b| a & b),
        Reduce::Or => bits(|a, b| a | b),
        Reduce::Xor => bits(|a, b| a ^ b),
        Reduce::PremulSum(factor) => (0..n).map(|rank| at(rank) * factor).sum(),
    }
}

fn buffer(group: &Group, bytes: &[u8]) -> Buffer {
    let mut buffer = group.heap().alloc(bytes.len()).unwrap();
    buffer.bytes_mut(soon()).unwrap().copy_from_slice(bytes);
    buffer
}

/// Room for a result, with something in it.
fn room(group: &Group, count: usize, element: Element) -> Buffer {
    buffer(group, &vec![0xab; count * element.size()])
}

fn input(group: &Group, count: usize, element: Element) -> Buffer {
    let values: Vec<f64> = (0..count).map(|i| value(group.rank(), i, element)).collect();
    buffer(group, &encode(&values, element))
}

#[test]
fn all_reduce_in_every_type_and_reduction() {
    for n in RANKS {
        spawn_with_heap(n, HEAP, |group| {
            for element in Element::ALL {
                for reduce in Reduce::ALL.into_iter().filter(|reduce| reduce.takes(element)) {
                    // Nothing, one element, an odd number in one piece, and in parts.
                    for count in [0, 1, 37, 4097] {
                        let pending =
                            group.all_reduce(input(&group, count, element), element, reduce).unwrap();
                        let got = pending.wait(soon()).unwrap();
                        let want: Vec<f64> = (0..count)
                            .map(|i| reduced(reduce, element, n, |rank| value(rank, i, element)))
                            .collect();
                        assert_eq!(
                            got[0].bytes(),
                            encode(&want, element),
                            "{n} ranks, {element:?} {reduce:?} x {count}"
                        );
                    }
                }
            }
        });
    }
}

#[test]
fn large_all_reduces_move_in_chunks() {
    for n in [2, 3] {
        spawn_with_heap(n, HEAP, |group| {
            let count = 700_001;
            let got =
                group.all_reduce(input(&group, count, Element::F32), Element::F32, Reduce::Sum).unwrap();
            let got = got.wait(soon()).unwrap();
            let want: Vec<f64> = (0..count)
                .map(|i| reduced(Reduce::Sum, Element::F32, n, |r| value(r, i, Element::F32)))
                .collect();
            assert!(got[0].bytes() == encode(&want, Element::F32));
        });
    }
}

#[test]
fn gather_and_scatter_along_any_dimension() {
    let element = Element::I32;
    for n in RANKS {
        spawn_with_heap(n, HEAP, |group| {
            let me = group.rank();
            for (outer, inner) in [(1, 0), (1, 1), (3, 5), (4, 300)] {
                let count = outer * inner;
                let gathered: Vec<f64> = (0..outer)
                    .flat_map(|row| {
                        (0..n).flat_map(move |r| (0..inner).map(move |i| value(r, row * inner + i, element)))
                    })
                    .collect();
                let got = group
                    .all_gather(input(&group, count, element), room(&group, count * n, element), outer)
                    .unwrap();
                let got = got.wait(soon()).unwrap();
                assert_eq!(got[1].bytes(), encode(&gathered, element), "all_gather {n} {outer} {inner}");
                let root = n / 2;
                let got = group
                    .gather(
                        input(&group, count, element),
                        (me == root).then(|| room(&group, count * n, element)),
                        root,
                        outer,
                    )
                    .unwrap();
                let got = got.wait(soon()).unwrap();
                assert_eq!(got.len(), if me == root { 2 } else { 1 });
                if me == root {
                    assert_eq!(got[1].bytes(), encode(&gathered, element), "gather {n} {outer} {inner}");
                }
                let whole = outer * n * inner;
                let place = |row: usize, i: usize| (row * n + me) * inner + i;
                let part = |f: &dyn Fn(usize) -> f64| -> Vec<u8> {
                    encode(
                        &(0..outer)
                            .flat_map(|row| (0..inner).map(move |i| (row, i)))
                            .map(|(row, i)| f(place(row, i)))
                            .collect::<Vec<_>>(),
                        element,
                    )
                };
                let got = group
                    .reduce_scatter(
                        input(&group, whole, element),
                        room(&group, count, element),
                        element,
                        Reduce::Sum,
                        outer,
                    )
                    .unwrap();
                let want = part(&|at| reduced(Reduce::Sum, element, n, |r| value(r, at, element)));
                assert_eq!(got.wait(soon()).unwrap()[1].bytes(), want, "reduce_scatter {n} {outer} {inner}");
                let got = group
                    .scatter(
                        (me == root).then(|| input(&group, whole, element)),
                        room(&group, count, element),
                        root,
                        outer,
                    )
                    .unwrap()
                    .wait(soon())
                    .unwrap();
                assert_eq!(
                    got[got.len() - 1].bytes(),
                    part(&|at| value(root, at, element)),
                    "scatter {n} {outer} {inner}"
                );
            }
        });
    }
}

#[test]
fn uneven_parts() {
    let element = Element::F32;
    for n in RANKS {
        spawn_with_heap(n, HEAP, |group| {
            let me = group.rank();
            // Rank r has r % 3 elements: some have none.
            let counts: Vec<usize> = (0..n).map(|r| r % 3).collect();
            let sizes: Vec<usize> = counts.iter().map(|c| c * 4).collect();
            for outer in [1, 2] {
                let got = group
                    .all_gather_v(
                        input(&group, counts[me] * outer, element),
                        room(&group, counts.iter().sum::<usize>() * outer, element),
                        sizes.clone(),
                        outer,
                    )
                    .unwrap();
                let want: Vec<f64> = (0..outer)
                    .flat_map(|row| {
                        let counts = &counts;
                        (0..n).flat_map(move |r| {
                            (0..counts[r]).map(move |i| value(r, row * counts[r] + i, element))
                        })
                    })
                    .collect();
                assert_eq!(got.wait(soon()).unwrap()[1].bytes(), encode(&want, element));
                let whole: usize = counts.iter().sum();
                let start: usize = counts[..me].iter().sum();
                let got = group
                    .reduce_scatter_v(
                        input(&group, whole * outer, element),
                        room(&group, counts[me] * outer, element),
                        element,
                        Reduce::Max,
                        sizes.clone(),
                        outer,
                    )
                    .unwrap();
                let want: Vec<f64> = (0..outer)
                    .flat_map(|row| (0..counts[me]).map(move |i| row * whole + start + i))
                    .map(|at| reduced(Reduce::Max, element, n, |r| value(r, at, element)))
                    .collect();
                assert_eq!(got.wait(soon()).unwrap()[1].bytes(), encode(&want, element));
            }
            // Rank r sends (r + m) % 4 bytes to m.
            let ins: Vec<usize> = (0..n).map(|m| (me + m) % 4).collect();
            let outs: Vec<usize> = (0..n).map(|m| (m + me) % 4).collect();
            let data: Vec<u8> = (0..n).flat_map(|m| vec![(me * 16 + m) as u8; (me + m) % 4]).collect();
            let got = group
                .all_to_all(buffer(&group, &data), room(&group, outs.iter().sum(), Element::U8), ins, outs)
                .unwrap()
                .wait(soon())
                .unwrap();
            let want: Vec<u8> = (0..n).flat_map(|m| vec![(m * 16 + me) as u8; (me + m) % 4]).collect();
            assert_eq!(got[1].bytes(), want);
        });
    }
}

#[test]
fn roots_permutations_and_barriers() {
    let element = Element::U8;
    for n in RANKS {
        spawn_with_heap(n, HEAP, |group| {
            let me = group.rank();
            for root in 0..n {
                for count in [0, 1, 5000] {
                    let mine: Vec<f64> = (0..count).map(|i| value(me, i, element)).collect();
                    let got =
                        group.broadcast(input(&group, count, element), root).unwrap().wait(soon()).unwrap();
                    let want: Vec<f64> = (0..count).map(|i| value(root, i, element)).collect();
                    assert_eq!(got[0].bytes(), encode(&want, element));
                    let got =
                        group.reduce(input(&group, count, element), element, Reduce::Product, root).unwrap();
                    let want: Vec<f64> = (0..count)
                        .map(|i| reduced(Reduce::Product, element, n, |r| value(r, i, element)))
                        .collect();
                    let want = if me == root { want } else { mine };
                    assert_eq!(got.wait(soon()).unwrap()[0].bytes(), encode(&want, element));
                }
            }
            // Around the ring, and an open shift.
            let ring = (0..n).map(|r| Some((r + 1) % n)).collect();
            let got = group
                .permute(input(&group, 9, element), room(&group, 9, element), ring)
                .unwrap()
                .wait(soon())
                .unwrap();
            let from = (me + n - 1) % n;
            assert_eq!(
                got[1].bytes(),
                encode(&(0..9).map(|i| value(from, i, element)).collect::<Vec<_>>(), element)
            );
            let shift = (0..n).map(|r| (r + 1 < n).then_some(r + 1)).collect();
            let got = group
                .permute(input(&group, 9, element), room(&group, 9, element), shift)
                .unwrap()
                .wait(soon())
                .unwrap();
            let want: Vec<f64> =
                (0..9).map(|i| if me == 0 { 0.0 } else { value(me - 1, i, element) }).collect();
            assert_eq!(got[1].bytes(), encode(&want, element));
            group.barrier().unwrap().wait(soon()).unwrap();
        });
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
                    group
                        .all_reduce(input(&group, count(i), Element::I64), Element::I64, Reduce::Sum)
                        .unwrap()
                })
                .collect();
            for (i, pending) in pendings.into_iter().enumerate().rev() {
                let got = pending.wait(soon()).unwrap();
                let want: Vec<f64> = (0..count(i))
                    .map(|at| reduced(Reduce::Sum, Element::I64, n, |r| value(r, at, Element::I64)))
                    .collect();
                assert_eq!(got[0].bytes(), encode(&want, Element::I64));
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
        let a = row.all_reduce(mine(&row), Element::I64, Reduce::Sum).unwrap();
        let b = column.all_gather(mine(&column), room(&column, 2, Element::I64), 1).unwrap();
        let c = one.all_reduce(mine(&one), Element::I64, Reduce::Product).unwrap();
        let number = |buffer: &Buffer, i: usize| {
            i64::from_le_bytes(buffer.bytes()[i * 8..i * 8 + 8].try_into().unwrap())
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
                |peer, tag, byte: u8, len| Message { peer, tag, buffer: buffer(&group, &vec![byte; len]) };
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
                assert_eq!(got[3].bytes(), vec![round + 100; 3000]);
                assert_eq!(got[4].bytes(), vec![round; 10]);
                assert_eq!(got[5].bytes(), vec![round + 1; 10]);
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
                assert_eq!(pending.wait(soon()).unwrap()[0].bytes(), [i; 64]);
            }
            for pending in sends {
                pending.wait(soon()).unwrap();
            }
        });
    }
}

#[test]
fn a_buffer_is_written_only_after_release() {
    spawn_with_heap(2, HEAP, |group| {
        let len = 1 << 20;
        for round in 0..20u8 {
            let mut mine = buffer(&group, &vec![round; len]);
            mine = group.broadcast(mine, 0).unwrap().wait(soon()).unwrap().remove(0);
            if group.rank() == 0 {
                // The root is finished at once; the other may still be reading.
                mine.bytes_mut(soon()).unwrap().fill(255);
            } else {
                assert!(mine.bytes().iter().all(|byte| *byte == round));
            }
        }
        group.barrier().unwrap().wait(soon()).unwrap();
    });
}

#[test]
fn what_is_dropped_still_completes_for_the_others() {
    for n in [2, 3] {
        spawn_with_heap(n, HEAP, |group| {
            let (me, count) = (group.rank(), 50_000);
            let element = Element::F32;
            let want = encode(
                &(0..count)
                    .map(|i| reduced(Reduce::Sum, element, n, |r| value(r, i, element)))
                    .collect::<Vec<_>>(),
                element,
            );
            for _ in 0..5 {
                let pending = group.all_reduce(input(&group, count, element), element, Reduce::Sum).unwrap();
                // Rank 0 does not want its result; the others do.
                if me == 0 {
                    drop(pending);
                } else {
                    assert!(pending.wait(soon()).unwrap()[0].bytes() == want);
                }
            }
            // More sends than a ring holds, from a rank that leaves at once.
            let message =
                |peer, i: u8| Message { peer, tag: u64::from(i), buffer: buffer(&group, &[i; 100]) };
            if me == 0 {
                drop(group.exchange((0..40).map(|i| message(1, i)).collect(), vec![]).unwrap());
            } else if me == 1 {
                let got = group
                    .exchange(vec![], (0..40).map(|i| message(0, i)).collect())
                    .unwrap()
                    .wait(soon())
                    .unwrap();
                assert!(got.iter().zip(0u8..).all(|(buffer, i)| buffer.bytes() == [i; 100]));
            }
        });
    }
}

#[test]
fn memory_is_constant_over_many_calls() {
    // A heap that would be full after a few calls if anything were kept.
    spawn_with_heap(2, 1 << 20, |group| {
        for round in 0..200 {
            let buffer = input(&group, 20_000, Element::F32);
            let mut got = group.all_reduce(buffer, Element::F32, Reduce::Sum).unwrap().wait(soon()).unwrap();
            let gathered = group
                .all_gather(got.remove(0), room(&group, 40_000, Element::F32), 1)
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
