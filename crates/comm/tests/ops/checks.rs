//! Every operation in every element type, reduction, root, dimension and size, against plain loops: one description,
//! run by threads here and by processes in `crates/cli/tests/ops.rs`.

use std::time::{Duration, Instant};

use consort_comm::{Buffer, Buffers, CommError, Common, Element, Group, Message, Moved, Pending, Reduce};

use super::elements::{operand, reduced};

/// The numbers of ranks that are tried.
pub(crate) const RANKS: [usize; 6] = [1, 2, 3, 4, 5, 8];
pub(crate) const HEAP: usize = 256 << 20;

/// Enough elements that every member's part of a reduction is made in several chunks.
const LARGE: usize = 700_001;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// All checks on a group and on parts of it.
pub(crate) fn check_all(world: &Group) {
    check(&Checks { group: world, large: true });
    let n = world.size();
    let alone = (0..n).map(|member| vec![member]).collect();
    let reversed = vec![(0..n).rev().collect()];
    let halves = vec![(0..n).filter(|m| m % 2 == 1).collect(), (0..n).filter(|m| m % 2 == 0).collect()];
    for lists in [alone, reversed, halves] {
        let part = world.subgroup(&lists, soon()).unwrap().unwrap();
        check(&Checks { group: &part, large: false });
        assert_eq!(part.in_flight(), 0);
    }
    assert_eq!(world.in_flight(), 0);
}

fn check(checks: &Checks<'_>) {
    checks.all_reduce();
    checks.all_reduce_lists();
    checks.all_gather();
    checks.reduce_scatter();
    checks.uneven();
    checks.all_to_all();
    checks.from_and_to_every_root();
    checks.permute();
    checks.exchange();
    checks.group.barrier().unwrap().wait(soon()).unwrap();
}

/// Numbers of elements: none, one, an odd one, and those around what fits into a slot (16 bytes) and into a staging area
/// (4096).
fn counts(element: Element) -> Vec<usize> {
    let around = |bytes: usize| bytes / element.size() - 1..=bytes / element.size() + 1;
    let mut counts: Vec<usize> = [0, 1, 37].into_iter().chain(around(16)).chain(around(4096)).collect();
    counts.sort();
    counts.dedup();
    counts
}

fn reductions(element: Element) -> impl Iterator<Item = Reduce> {
    let others = Reduce::ALL.into_iter().filter(|reduce| !matches!(reduce, Reduce::PremulSum(_)));
    // A factor that is no power of two, so that it rounds.
    others.chain([Reduce::PremulSum(0.3)]).filter(move |reduce| reduce.takes(element))
}

fn wait(pending: Result<Pending, CommError>) -> Buffers {
    pending.unwrap().wait(soon()).unwrap()
}

fn wait_common(pending: Result<Pending<(Buffers, Common)>, CommError>) -> (Buffers, Common) {
    pending.unwrap().wait(soon()).unwrap()
}

/// How a tensor of three dimensions is cut or joined along one: the rows before it, and the elements of one row.
fn dimensions() -> impl Iterator<Item = (usize, usize)> {
    let shapes = [[1, 1, 1], [2, 3, 5], [3, 0, 2], [4, 7, 300]];
    shapes.into_iter().flat_map(|shape| {
        (0..3)
            .map(move |dim| (shape[..dim].iter().product::<usize>(), shape[dim..].iter().product::<usize>()))
    })
}

/// Rows of each of the operands side by side.
fn joined(operands: &[Vec<u8>], outer: usize) -> Vec<u8> {
    let mut result = Vec::new();
    for row in 0..outer {
        for operand in operands {
            let size = operand.len() / outer;
            result.extend(&operand[row * size..(row + 1) * size]);
        }
    }
    result
}

/// The part of every row that begins and ends there.
fn cut(whole: &[u8], outer: usize, from: usize, to: usize) -> Vec<u8> {
    let row = whole.len() / outer;
    (0..outer).flat_map(|i| whole[i * row + from..i * row + to].to_vec()).collect()
}

struct Checks<'a> {
    group: &'a Group,
    /// Also what is large.
    large: bool,
}

impl Checks<'_> {
    fn me(&self) -> usize {
        self.group.rank()
    }

    fn n(&self) -> usize {
        self.group.size()
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        self.group.heap().alloc_from(bytes).unwrap()
    }

    /// Where a result goes; what was there before is not zero, so that a result that is not written is seen.
    fn room(&self, len: usize) -> Buffer {
        let mut buffer = self.group.heap().alloc(len).unwrap();
        buffer.bytes_mut(soon()).unwrap().fill(0xa5);
        buffer
    }

    /// The operands of all members.
    fn operands(&self, element: Element, count: usize, salt: usize) -> Vec<Vec<u8>> {
        (0..self.n()).map(|member| operand(element, member, count, salt)).collect()
    }

    fn all_reduce(&self) {
        for element in Element::ALL {
            for (salt, reduce) in reductions(element).enumerate() {
                for count in counts(element) {
                    self.all_reduce_one(element, reduce, count, salt);
                }
            }
            if self.large {
                let reduce = if reductions(element).any(|reduce| reduce == Reduce::Sum) {
                    Reduce::Sum
                } else {
                    Reduce::Xor
                };
                self.all_reduce_one(element, reduce, LARGE, 3);
            }
        }
    }

    fn all_reduce_one(&self, element: Element, reduce: Reduce, count: usize, salt: usize) {
        let what = || format!("all_reduce {element:?} {reduce:?} x {count} on {} ranks", self.n());
        let operands = self.operands(element, count, salt);
        let want = reduced(element, reduce, &operands);
        let mine = &operands[self.me()];
        let mut got = wait(self.group.all_reduce(self.buffer(mine), element, reduce));
        assert!(got.len() == 1 && got[0].bytes() == want, "{}", what());
        let (kept, common) = wait_common(self.group.all_reduce_common(self.buffer(mine), element, reduce));
        assert!(common.bytes() == want && common.len() == want.len(), "{}, common", what());
        assert!(kept.len() == 1 && kept[0].bytes() == mine, "{}, common: the operand is as it was", what());
        // The same buffer once more.
        let mut again = got.remove(0);
        again.bytes_mut(soon()).unwrap().copy_from_slice(mine);
        let got = wait(self.group.all_reduce(again, element, reduce));
        assert!(got[0].bytes() == want, "{}, again", what());
    }

    fn all_reduce_lists(&self) {
        let large = if self.large { 100_003 } else { 2000 };
        // All staged together; too many for that; with a large one in the middle.
        for counts in [vec![1], vec![0, 2, 1], vec![3, 5000 / 8, 0, 1], vec![1, large, 7], vec![1; 40]] {
            for element in Element::ALL {
                for reduce in [Reduce::Max, Reduce::Sum].into_iter().filter(|reduce| reduce.takes(element)) {
                    let what = format!("{element:?} {reduce:?} x {counts:?} on {} ranks", self.n());
                    let all: Vec<Vec<Vec<u8>>> = (counts.iter().enumerate())
                        .map(|(i, count)| self.operands(element, *count, i))
                        .collect();
                    let mine =
                        || -> Vec<Buffer> { all.iter().map(|all| self.buffer(&all[self.me()])).collect() };
                    let wants: Vec<Vec<u8>> = all.iter().map(|all| reduced(element, reduce, all)).collect();
                    let got = wait(self.group.all_reduce(mine(), element, reduce));
                    assert!(is(&got, &wants), "all_reduce {what}");
                    let root = counts.len() % self.n();
                    let got = wait(self.group.reduce(mine(), element, reduce, root));
                    let own: Vec<Vec<u8>> = all.iter().map(|all| all[self.me()].clone()).collect();
                    assert!(is(&got, if root == self.me() { &wants } else { &own }), "reduce {what}");
                    let got = wait(self.group.broadcast(mine(), root));
                    let roots: Vec<Vec<u8>> = all.iter().map(|all| all[root].clone()).collect();
                    assert!(is(&got, &roots), "broadcast {what}");
                }
            }
        }
    }

    fn all_gather(&self) {
        for element in Element::ALL {
            for (outer, inner) in dimensions().chain(counts(element).into_iter().map(|count| (1, count))) {
                if outer == 0 {
                    continue;
                }
                let operands = self.operands(element, outer * inner, 1);
                let (mine, want) = (&operands[self.me()], joined(&operands, outer));
                let what = format!("all_gather {element:?} x {outer} x {inner} on {} ranks", self.n());
                let got = wait(self.group.all_gather(self.buffer(mine), self.room(want.len()), outer));
                assert!(is(&got, &[mine.clone(), want.clone()]), "{what}");
                let (kept, common) = wait_common(self.group.all_gather_common(self.buffer(mine), outer));
                assert!(common.bytes() == want && is(&kept, &[mine.clone()]), "{what}, common");
            }
            self.all_gather_list(element);
        }
        if self.large {
            let operands = self.operands(Element::F32, LARGE, 1);
            let (mine, want) = (&operands[self.me()], joined(&operands, 1));
            let got = wait(self.group.all_gather(self.buffer(mine), self.room(want.len()), 1));
            assert!(got[1].bytes() == want);
        }
    }

    fn all_gather_list(&self, element: Element) {
        let items = [(1, 3), (2, 0), (3, 700), (5, 1)];
        let all: Vec<Vec<Vec<u8>>> =
            items.iter().enumerate().map(|(i, (o, c))| self.operands(element, o * c, i)).collect();
        let list = items.iter().zip(&all).map(|((outer, _), all)| Moved {
            operand: self.buffer(&all[self.me()]),
            result: self.room(all[0].len() * self.n()),
            outer: *outer,
        });
        let got = wait(self.group.all_gather_list(list.collect()));
        let results = items.iter().zip(&all).map(|((outer, _), all)| joined(all, *outer));
        let want: Vec<Vec<u8>> = all.iter().map(|all| all[self.me()].clone()).chain(results).collect();
        assert!(is(&got, &want), "all_gather_list {element:?} on {} ranks", self.n());
    }

    fn reduce_scatter(&self) {
        let (me, n) = (self.me(), self.n());
        for element in Element::ALL {
            for (salt, reduce) in reductions(element).enumerate() {
                let all_dimensions = dimensions().filter(|(outer, _)| *outer > 0);
                let sizes = all_dimensions.chain(counts(element).into_iter().map(|count| (1, count)));
                for (outer, part) in sizes {
                    let operands = self.operands(element, outer * part * n, salt);
                    let part = part * element.size();
                    let want = cut(&reduced(element, reduce, &operands), outer, me * part, (me + 1) * part);
                    let (mine, room) = (self.buffer(&operands[me]), self.room(part * outer));
                    let got = wait(self.group.reduce_scatter(mine, room, element, reduce, outer));
                    let what =
                        format!("reduce_scatter {element:?} {reduce:?} x {outer} x {part} on {n} ranks");
                    assert!(is(&got, &[operands[me].clone(), want]), "{what}");
                }
            }
            // A list: the caller's are not changed.
            let items = [(1, 3), (2, 0), (3, 300), (5, 1)];
            let all: Vec<Vec<Vec<u8>>> =
                items.iter().enumerate().map(|(i, (o, c))| self.operands(element, o * c * n, i)).collect();
            let list = items.iter().zip(&all).map(|((outer, _), all)| Moved {
                operand: self.buffer(&all[me]),
                result: self.room(all[0].len() / n),
                outer: *outer,
            });
            let got = wait(self.group.reduce_scatter_list(list.collect(), element, Reduce::Max));
            let results = items.iter().zip(&all).map(|((outer, count), all)| {
                let part = count * element.size();
                cut(&reduced(element, Reduce::Max, all), *outer, me * part, (me + 1) * part)
            });
            let want: Vec<Vec<u8>> = all.iter().map(|all| all[me].clone()).chain(results).collect();
            assert!(is(&got, &want), "reduce_scatter_list {element:?} on {n} ranks");
        }
    }

    fn uneven(&self) {
        let (me, n) = (self.me(), self.n());
        for element in Element::ALL {
            // Some members have nothing, all have nothing, one has much.
            for scale in [0, 1, 5, 1001] {
                for outer in [1, 2, 3] {
                    let counts: Vec<usize> = (0..n).map(|member| member % 3 * scale).collect();
                    let sizes: Vec<usize> = counts.iter().map(|count| count * element.size()).collect();
                    let (start, whole) = (sizes[..me].iter().sum::<usize>(), sizes.iter().sum::<usize>());
                    let what = format!("{element:?} x {scale} x {outer} on {n} ranks");
                    let operands: Vec<Vec<u8>> =
                        (0..n).map(|member| operand(element, member, counts[member] * outer, 2)).collect();
                    let (mine, room) = (self.buffer(&operands[me]), self.room(whole * outer));
                    let got = wait(self.group.all_gather_v(mine, room, sizes.clone(), outer));
                    assert!(
                        is(&got, &[operands[me].clone(), joined(&operands, outer)]),
                        "all_gather_v {what}"
                    );
                    for reduce in reductions(element) {
                        let operands = self.operands(element, whole / element.size() * outer, 4);
                        let (mine, room) = (self.buffer(&operands[me]), self.room(sizes[me] * outer));
                        let got = wait(self.group.reduce_scatter_v(
                            mine,
                            room,
                            element,
                            reduce,
                            sizes.clone(),
                            outer,
                        ));
                        let want = cut(&reduced(element, reduce, &operands), outer, start, start + sizes[me]);
                        assert!(got[1].bytes() == want, "reduce_scatter_v {reduce:?} {what}");
                    }
                }
            }
        }
    }

    fn all_to_all(&self) {
        let (me, n) = (self.me(), self.n());
        // Bytes from one to another: nothing, one, even, uneven with nothing now and then, around the limits, large.
        let splits: [fn(usize, usize) -> usize; 7] = [
            |_, _| 0,
            |_, _| 1,
            |_, _| 64,
            |from, to| (from * 7 + to * 3) % 5 * 3,
            |from, to| [15, 16, 17][(from + to) % 3],
            |from, to| [4095, 4096, 4097][(from + 2 * to) % 3],
            |from, to| if from == to { 0 } else { 100_003 },
        ];
        for (i, split) in splits.iter().enumerate() {
            let whole = |from| (0..n).map(|to| split(from, to)).sum::<usize>();
            let operands: Vec<Vec<u8>> =
                (0..n).map(|from| operand(Element::U8, from, whole(from), i)).collect();
            let ins: Vec<usize> = (0..n).map(|to| split(me, to)).collect();
            let outs: Vec<usize> = (0..n).map(|from| split(from, me)).collect();
            let mut want = Vec::new();
            for from in 0..n {
                let start = (0..me).map(|to| split(from, to)).sum::<usize>();
                want.extend(&operands[from][start..start + split(from, me)]);
            }
            let (mine, room) = (self.buffer(&operands[me]), self.room(want.len()));
            let got = wait(self.group.all_to_all(mine, room, ins, outs));
            assert!(is(&got, &[operands[me].clone(), want]), "all_to_all {i} on {n} ranks");
        }
    }

    fn from_and_to_every_root(&self) {
        for root in 0..self.n() {
            for element in Element::ALL {
                for count in counts(element) {
                    self.with_root(element, root, 1, count);
                }
                dimensions()
                    .filter(|(outer, _)| *outer > 0)
                    .for_each(|(o, i)| self.with_root(element, root, o, i));
            }
            if self.large {
                self.with_root(Element::F32, root, 1, 100_003);
            }
        }
    }

    fn with_root(&self, element: Element, root: usize, outer: usize, inner: usize) {
        let (me, n, is_root) = (self.me(), self.n(), self.me() == root);
        let what = format!("{element:?} x {outer} x {inner} root {root} on {n} ranks");
        let operands = self.operands(element, outer * inner, root);
        let mine = operands[me].clone();
        let got = wait(self.group.broadcast(self.buffer(&mine), root));
        assert!(is(&got, &[operands[root].clone()]), "broadcast {what}");
        let operand = is_root.then(|| self.buffer(&mine));
        let (kept, common) = wait_common(self.group.broadcast_common(operand, root));
        assert!(common.bytes() == operands[root] && kept.is_empty(), "broadcast_common {what}");
        // Another reduction for every root.
        let all: Vec<Reduce> = reductions(element).collect();
        let reduce = all[(root + inner) % all.len()];
        let got = wait(self.group.reduce(self.buffer(&mine), element, reduce, root));
        let want = if is_root { reduced(element, reduce, &operands) } else { mine.clone() };
        assert!(is(&got, &[want]), "reduce {reduce:?} {what}");
        let room = is_root.then(|| self.room(mine.len() * n));
        let got = wait(self.group.gather(self.buffer(&mine), room, root, outer));
        let want = if is_root { vec![mine.clone(), joined(&operands, outer)] } else { vec![mine.clone()] };
        assert!(is(&got, &want), "gather {what}");
        let whole = self.operands(element, outer * inner * n, root);
        let operand = is_root.then(|| self.buffer(&whole[root]));
        let got = wait(self.group.scatter(operand, self.room(mine.len()), root, outer));
        let part = inner * element.size();
        let part = cut(&whole[root], outer, me * part, (me + 1) * part);
        assert!(
            is(&got, &if is_root { vec![whole[root].clone(), part] } else { vec![part] }),
            "scatter {what}"
        );
    }

    fn permute(&self) {
        let (me, n) = (self.me(), self.n());
        let tables: [Vec<Option<usize>>; 5] = [
            (0..n).map(|member| Some((member + 1) % n)).collect(),
            (0..n).map(|member| (member + 1 < n).then_some(member + 1)).collect(),
            (0..n).map(Some).collect(),
            (0..n).map(|member| Some(n - 1 - member)).collect(),
            vec![None; n],
        ];
        for (i, to) in tables.iter().enumerate() {
            for element in Element::ALL {
                let large = self.large.then_some(100_003);
                for count in counts(element).into_iter().chain(large) {
                    let operands = self.operands(element, count, i);
                    let mine = operands[me].clone();
                    let got = wait(self.group.permute(self.buffer(&mine), self.room(mine.len()), to.clone()));
                    let from = to.iter().position(|to| *to == Some(me));
                    let want = from.map_or(vec![0; mine.len()], |from| operands[from].clone());
                    assert!(is(&got, &[mine, want]), "permute {to:?} {element:?} x {count}");
                }
            }
        }
    }

    /// Everybody sends to everybody, itself included, with two tags, in another order than it is received.
    fn exchange(&self) {
        let (me, n) = (self.me(), self.n());
        let large = if self.large { 300_007 } else { 5000 };
        for len in [0, 1, 15, 16, 17, 4095, 4096, 4097, large] {
            let data =
                |from: usize, to: usize, tag: u64| operand(Element::U8, from, len, to * 2 + tag as usize);
            let message = |peer, tag, buffer| Message { peer, tag, buffer };
            let pairs = || (0..n).flat_map(|peer| [(peer, 0), (peer, 1)]);
            let sends = pairs().map(|(to, tag)| message(to, tag, self.buffer(&data(me, to, tag)))).collect();
            let recvs = pairs().rev().map(|(from, tag)| message(from, tag, self.room(len))).collect();
            let got = wait(self.group.exchange(sends, recvs));
            let sent = pairs().map(|(to, tag)| data(me, to, tag));
            let received = pairs().rev().map(|(from, tag)| data(from, me, tag));
            let want: Vec<Vec<u8>> = sent.chain(received).collect();
            assert!(is(&got, &want), "exchange x {len} on {n} ranks");
        }
    }
}

fn is(got: &Buffers, want: &[Vec<u8>]) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(got, want)| got.bytes() == want)
}
