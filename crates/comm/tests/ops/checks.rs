//! Every operation in every element type, reduction, root, dimension and size, against plain loops: one description,
//! run by threads (`tests/ops.rs`) and by processes (`tests/ops_on_processes.rs`).

use std::cell::RefCell;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, Buffers, CommError, Common, Group, Message, OperandType, Pending, Request};
use consort_types::{Axes, Collective, Dtype, GroupName, Kind, Reduce, Route};

use super::elements::{IS_EXACT, operand, reduced};

#[path = "lists.rs"]
mod lists;

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
    check(&Checks::new(world, true));
    let n = world.size();
    let alone = (0..n).map(|member| vec![member]).collect();
    let reversed = vec![(0..n).rev().collect()];
    let halves = vec![(0..n).filter(|m| m % 2 == 1).collect(), (0..n).filter(|m| m % 2 == 0).collect()];
    for lists in [alone, reversed, halves] {
        let part = world.subgroup(&lists, soon()).unwrap().unwrap();
        check(&Checks::new(&part, false));
        assert_eq!(part.in_flight(), 0);
    }
    assert_eq!(world.in_flight(), 0);
}

fn check(checks: &Checks<'_>) {
    checks.all_reduce();
    checks.all_reduce_lists();
    checks.mixed_lists();
    checks.all_gather();
    checks.reduce_scatter();
    checks.uneven();
    checks.all_to_all();
    checks.every_root();
    checks.permute();
    checks.exchange();
    checks.expect(checks.group.barrier(), Vec::new(), "barrier".into());
    checks.settle();
}

/// Numbers of elements: none, one, an odd one, and those around what fits into a slot (16 bytes) and into a staging
/// area (4096).
fn counts(dtype: Dtype) -> Vec<usize> {
    let around = |bytes: usize| bytes / dtype.size() - 1..=bytes / dtype.size() + 1;
    let mut counts: Vec<usize> = [0, 1, 37].into_iter().chain(around(16)).chain(around(4096)).collect();
    counts.sort();
    counts.dedup();
    counts
}

fn reductions(dtype: Dtype) -> impl Iterator<Item = Reduce> {
    let is_exact = IS_EXACT.load(Relaxed);
    let is_other = move |reduce: &Reduce| match reduce {
        Reduce::PremulSum(_) => false,
        Reduce::Avg => !is_exact,
        _ => true,
    };
    // A factor that is no power of two rounds.
    let factor = Reduce::PremulSum(if is_exact { 0.5 } else { 0.3 });
    let others = Reduce::ALL.into_iter().filter(is_other);
    others.chain([factor]).filter(move |reduce| reduce.takes(dtype))
}

/// How tensors are cut or joined along each dimension: the rows before it, and the elements of one row. One dimension
/// in all numbers of elements, and three.
fn sizes(dtype: Dtype) -> impl Iterator<Item = (usize, usize)> {
    let rows = counts(dtype).into_iter().map(|count| (1, count));
    let shapes = [[2, 3, 5], [3, 0, 2], [4, 3, 90]];
    let cuts = shapes.into_iter().flat_map(|shape: [usize; 3]| {
        (0..3).map(move |dim| (shape[..dim].iter().product(), shape[dim..].iter().product()))
    });
    rows.chain(cuts.filter(|(outer, _)| *outer > 0))
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
    /// Every element type, and large operands; or some types, and small operands.
    whole: bool,
    /// Operations in flight: each closure waits for one and checks it.
    later: RefCell<Vec<Box<dyn FnOnce()>>>,
}

/// How many operations are in flight at most: some, because one at a time takes as long as all ranks need to be woken.
const IN_FLIGHT: usize = 16;

impl<'a> Checks<'a> {
    fn new(group: &'a Group, whole: bool) -> Checks<'a> {
        Checks { group, whole, later: RefCell::default() }
    }

    /// An operation must give these results.
    fn expect(&self, pending: Result<Pending, CommError>, want: Vec<Vec<u8>>, what: String) {
        let pending = pending.unwrap();
        self.look_later(move || {
            let got = pending.wait(soon()).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(is(&got, &want), "{what}");
        });
    }

    /// An operation must give back these and this common result.
    fn expect_common(
        &self,
        pending: Result<Pending<(Buffers, Common)>, CommError>,
        (kept, common): (Vec<Vec<u8>>, Vec<u8>),
        what: String,
    ) {
        let pending = pending.unwrap();
        self.look_later(move || {
            let got = pending.wait(soon()).unwrap_or_else(|error| panic!("{what}, common: {error}"));
            assert!(is(&got.0, &kept) && got.1.bytes() == common, "{what}, common");
            assert_eq!((got.1.len(), got.1.is_empty()), (common.len(), common.is_empty()));
        });
    }

    fn look_later(&self, look: impl FnOnce() + 'static) {
        self.later.borrow_mut().push(Box::new(look));
        if self.later.borrow().len() == IN_FLIGHT {
            self.settle();
        }
    }

    /// Waits for all that is in flight, the last first.
    fn settle(&self) {
        self.later.take().into_iter().rev().for_each(|look| look());
    }

    fn me(&self) -> usize {
        self.group.rank()
    }

    fn n(&self) -> usize {
        self.group.size()
    }

    fn elements(&self) -> &'static [Dtype] {
        if self.whole { &Dtype::ALL } else { &[Dtype::F32, Dtype::Bool] }
    }

    /// `count` elements if large operands are checked, in one type.
    fn large(&self, dtype: Dtype, count: usize) -> Option<usize> {
        (self.whole && dtype == Dtype::F32).then_some(count)
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
    fn operands(&self, dtype: Dtype, count: usize, salt: usize) -> Vec<Vec<u8>> {
        (0..self.n()).map(|member| operand(dtype, member, count, salt)).collect()
    }

    fn all_reduce(&self) {
        for &dtype in self.elements() {
            for (salt, reduce) in reductions(dtype).enumerate() {
                for count in counts(dtype) {
                    self.all_reduce_one(dtype, reduce, count, salt);
                }
            }
            // In parts, and in chunks of parts.
            let reduce = if dtype == Dtype::Bool { Reduce::Xor } else { Reduce::Sum };
            let in_parts = self.whole.then_some(20_001);
            for count in in_parts.into_iter().chain(self.large(dtype, LARGE)) {
                self.all_reduce_one(dtype, reduce, count, 3);
            }
        }
    }

    fn all_reduce_one(&self, dtype: Dtype, reduce: Reduce, count: usize, salt: usize) {
        let n = self.n();
        let what = format!("all_reduce {dtype:?} {reduce:?} x {count} on {n} ranks");
        let operands = self.operands(dtype, count, salt);
        let (mine, want) = (&operands[self.me()], reduced(dtype, reduce, &operands));
        self.expect(
            self.group.all_reduce(self.buffer(mine), dtype, reduce),
            vec![want.clone()],
            what.clone(),
        );
        let common = self.group.all_reduce_common(self.buffer(mine), dtype, reduce);
        self.expect_common(common, (vec![mine.clone()], want), what);
    }

    fn all_reduce_lists(&self) {
        for &dtype in self.elements() {
            let large = self.large(dtype, 100_003).unwrap_or(2000);
            // All staged together; too many for that; with a large one in the middle; very many.
            for counts in [vec![1], vec![0, 2, 1], vec![3, 625, 0, 1], vec![1, large, 7], vec![1; 40]] {
                for reduce in [Reduce::Max, Reduce::Sum].into_iter().filter(|reduce| reduce.takes(dtype)) {
                    let what = format!("a list of {dtype:?} {reduce:?} x {counts:?} on {} ranks", self.n());
                    let all: Vec<Vec<Vec<u8>>> = (counts.iter().enumerate())
                        .map(|(i, count)| self.operands(dtype, *count, i))
                        .collect();
                    let mine =
                        || -> Vec<Buffer> { all.iter().map(|all| self.buffer(&all[self.me()])).collect() };
                    let wants: Vec<Vec<u8>> = all.iter().map(|all| reduced(dtype, reduce, all)).collect();
                    self.expect(self.group.all_reduce(mine(), dtype, reduce), wants.clone(), what.clone());
                    let root = counts.len() % self.n();
                    let own: Vec<Vec<u8>> = all.iter().map(|all| all[self.me()].clone()).collect();
                    let want = if root == self.me() { wants } else { own };
                    self.expect(self.group.reduce(mine(), dtype, reduce, root), want, what.clone());
                    let roots: Vec<Vec<u8>> = all.iter().map(|all| all[root].clone()).collect();
                    self.expect(self.group.broadcast(mine(), root), roots, what);
                }
            }
        }
    }

    fn all_gather(&self) {
        for &dtype in self.elements() {
            let large = self.large(dtype, LARGE).map(|count| (1, count));
            for (outer, inner) in sizes(dtype).chain(large) {
                let operands = self.operands(dtype, outer * inner, 1);
                let (mine, want) = (&operands[self.me()], joined(&operands, outer));
                let what = format!("all_gather {dtype:?} x {outer} x {inner} on {} ranks", self.n());
                let got = self.group.all_gather(self.buffer(mine), self.room(want.len()), outer);
                self.expect(got, vec![mine.clone(), want.clone()], what.clone());
                let common = self.group.all_gather_common(self.buffer(mine), outer);
                self.expect_common(common, (vec![mine.clone()], want), what);
            }
            self.all_gather_list(dtype);
        }
    }

    /// Starts a list of operands, each of rows of elements, along the second dimension.
    fn start_list(
        &self,
        kind: Kind,
        reduce: Option<Reduce>,
        (dtype, items): (Dtype, &[(usize, usize)]),
        operands: Buffers,
        room: Buffers,
    ) -> Result<Pending, CommError> {
        let cut = if kind == Kind::ReduceScatter { self.n() } else { 1 };
        let shapes: Vec<[usize; 2]> = items.iter().map(|(outer, count)| [*outer, count * cut]).collect();
        let types: Vec<OperandType<'_>> = shapes.iter().map(|shape| OperandType::new(dtype, shape)).collect();
        let dims = vec![1; items.len()];
        let of = Collective::new(kind, GroupName::Axes(Axes::NONE));
        self.group.start(Request::new(&Collective { reduce, dims: &dims, ..of }, &types, operands, room))
    }

    fn all_gather_list(&self, dtype: Dtype) {
        let items = [(1, 3), (2, 0), (3, 700), (5, 1)];
        let all: Vec<Vec<Vec<u8>>> =
            items.iter().enumerate().map(|(i, (o, c))| self.operands(dtype, o * c, i)).collect();
        let operands = all.iter().map(|all| self.buffer(&all[self.me()])).collect();
        let room = all.iter().map(|all| self.room(all[0].len() * self.n())).collect();
        let got = self.start_list(Kind::AllGather, None, (dtype, &items), operands, room);
        let results = items.iter().zip(&all).map(|((outer, _), all)| joined(all, *outer));
        let want: Vec<Vec<u8>> = all.iter().map(|all| all[self.me()].clone()).chain(results).collect();
        self.expect(got, want, format!("all_gather_list {dtype:?} on {} ranks", self.n()));
    }

    fn reduce_scatter(&self) {
        let (me, n) = (self.me(), self.n());
        for &dtype in self.elements() {
            for (salt, reduce) in reductions(dtype).enumerate() {
                let large =
                    self.large(dtype, 50_003).filter(|_| reduce == Reduce::Sum).map(|count| (1, count));
                for (outer, part) in sizes(dtype).chain(large) {
                    let operands = self.operands(dtype, outer * part * n, salt);
                    let part = part * dtype.size();
                    let want = cut(&reduced(dtype, reduce, &operands), outer, me * part, (me + 1) * part);
                    let (mine, room) = (self.buffer(&operands[me]), self.room(part * outer));
                    let got = self.group.reduce_scatter(mine, room, dtype, reduce, outer);
                    let what = format!("reduce_scatter {dtype:?} {reduce:?} x {outer} x {part} on {n} ranks");
                    self.expect(got, vec![operands[me].clone(), want], what);
                }
            }
            // A list: the caller's are not changed.
            let items = [(1, 3), (2, 0), (3, 300), (5, 1)];
            let all: Vec<Vec<Vec<u8>>> =
                items.iter().enumerate().map(|(i, (o, c))| self.operands(dtype, o * c * n, i)).collect();
            let operands = all.iter().map(|all| self.buffer(&all[me])).collect();
            let room = all.iter().map(|all| self.room(all[0].len() / n)).collect();
            let got =
                self.start_list(Kind::ReduceScatter, Some(Reduce::Max), (dtype, &items), operands, room);
            let results = items.iter().zip(&all).map(|((outer, count), all)| {
                let part = count * dtype.size();
                cut(&reduced(dtype, Reduce::Max, all), *outer, me * part, (me + 1) * part)
            });
            let want: Vec<Vec<u8>> = all.iter().map(|all| all[me].clone()).chain(results).collect();
            self.expect(got, want, format!("reduce_scatter_list {dtype:?} on {n} ranks"));
        }
    }

    fn uneven(&self) {
        let (me, n) = (self.me(), self.n());
        for &dtype in self.elements() {
            // All have nothing, or some.
            for scale in [0, 1, 101] {
                for outer in [1, 3] {
                    let counts: Vec<usize> = (0..n).map(|member| member % 3 * scale).collect();
                    let sizes: Vec<usize> = counts.iter().map(|count| count * dtype.size()).collect();
                    let (start, whole) = (sizes[..me].iter().sum::<usize>(), sizes.iter().sum::<usize>());
                    let what = format!("{dtype:?} x {scale} x {outer} on {n} ranks");
                    let operands: Vec<Vec<u8>> =
                        (0..n).map(|member| operand(dtype, member, counts[member] * outer, 2)).collect();
                    let (mine, room) = (self.buffer(&operands[me]), self.room(whole * outer));
                    let got = self.group.all_gather_v(mine, room, &sizes, outer);
                    let want = vec![operands[me].clone(), joined(&operands, outer)];
                    self.expect(got, want, format!("all_gather_v {what}"));
                    for reduce in reductions(dtype) {
                        let operands = self.operands(dtype, whole / dtype.size() * outer, 4);
                        let (mine, room) = (self.buffer(&operands[me]), self.room(sizes[me] * outer));
                        let want = cut(&reduced(dtype, reduce, &operands), outer, start, start + sizes[me]);
                        let got = self.group.reduce_scatter_v(mine, room, dtype, reduce, &counts, outer);
                        let want = vec![operands[me].clone(), want];
                        self.expect(got, want, format!("reduce_scatter_v {reduce:?} {what}"));
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
            |from, to| if from == to { 0 } else { 30_011 },
        ];
        for (i, split) in splits.iter().enumerate() {
            let whole = |from| (0..n).map(|to| split(from, to)).sum::<usize>();
            let operands: Vec<Vec<u8>> =
                (0..n).map(|from| operand(Dtype::U8, from, whole(from), i)).collect();
            let ins: Vec<usize> = (0..n).map(|to| split(me, to)).collect();
            let outs: Vec<usize> = (0..n).map(|from| split(from, me)).collect();
            let mut want = Vec::new();
            for from in 0..n {
                let start = (0..me).map(|to| split(from, to)).sum::<usize>();
                want.extend(&operands[from][start..start + split(from, me)]);
            }
            let (mine, room) = (self.buffer(&operands[me]), self.room(want.len()));
            let got = self.group.all_to_all(mine, room, &ins, &outs);
            self.expect(got, vec![operands[me].clone(), want], format!("all_to_all {i} on {n} ranks"));
        }
    }

    fn every_root(&self) {
        for root in 0..self.n() {
            for &dtype in self.elements() {
                let large = self.large(dtype, 50_003).map(|count| (1, count));
                sizes(dtype)
                    .chain(large)
                    .for_each(|(outer, inner)| self.with_root(dtype, root, outer, inner));
            }
        }
    }

    fn with_root(&self, dtype: Dtype, root: usize, outer: usize, inner: usize) {
        let (me, n, is_root) = (self.me(), self.n(), self.me() == root);
        let what = format!("{dtype:?} x {outer} x {inner} root {root} on {n} ranks");
        let operands = self.operands(dtype, outer * inner, root);
        let mine = operands[me].clone();
        let roots = operands[root].clone();
        let got = self.group.broadcast(self.buffer(&mine), root);
        self.expect(got, vec![roots.clone()], format!("broadcast {what}"));
        let given = is_root.then(|| self.buffer(&mine));
        let got = self.group.broadcast_common(given, root);
        self.expect_common(got, (Vec::new(), roots), format!("broadcast {what}"));
        // Another reduction for every root.
        let all: Vec<Reduce> = reductions(dtype).collect();
        let reduce = all[(root + inner) % all.len()];
        let got = self.group.reduce(self.buffer(&mine), dtype, reduce, root);
        let want = if is_root { reduced(dtype, reduce, &operands) } else { mine.clone() };
        self.expect(got, vec![want], format!("reduce {reduce:?} {what}"));
        let room = is_root.then(|| self.room(mine.len() * n));
        let got = self.group.gather(self.buffer(&mine), room, root, outer);
        let joined = is_root.then(|| joined(&operands, outer));
        self.expect(got, [mine.clone()].into_iter().chain(joined).collect(), format!("gather {what}"));
        let whole = operand(dtype, root, outer * inner * n, root);
        let given = is_root.then(|| self.buffer(&whole));
        let got = self.group.scatter(given, self.room(mine.len()), root, outer);
        let part = inner * dtype.size();
        let part = cut(&whole, outer, me * part, (me + 1) * part);
        let want = if is_root { vec![whole, part] } else { vec![part] };
        self.expect(got, want, format!("scatter {what}"));
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
            let route = Route::Table(to.iter().map(|to| to.map(|to| to as u32)).collect());
            for &dtype in self.elements() {
                for count in counts(dtype).into_iter().chain(self.large(dtype, 100_003)) {
                    let of = |member| operand(dtype, member, count, i);
                    let mine = of(me);
                    let got = self.group.permute(self.buffer(&mine), self.room(mine.len()), &route);
                    let from = to.iter().position(|to| *to == Some(me));
                    let want = from.map_or(vec![0; mine.len()], of);
                    self.expect(got, vec![mine, want], format!("permute {to:?} {dtype:?} x {count}"));
                }
            }
        }
    }

    /// Everybody sends to everybody, itself included, with two tags, in another order than it is received.
    fn exchange(&self) {
        let (me, n) = (self.me(), self.n());
        let large = self.large(Dtype::F32, 50_003).unwrap_or(5000);
        for len in [0, 1, 15, 16, 17, 4095, 4096, 4097, large] {
            let data =
                |from: usize, to: usize, tag: u64| operand(Dtype::U8, from, len, to * 2 + tag as usize);
            let message = |peer, tag, buffer| Message::new(peer, tag, buffer);
            let pairs = || (0..n).flat_map(|peer| [(peer, 0), (peer, 1)]);
            let sends: Vec<_> =
                pairs().map(|(to, tag)| message(to, tag, self.buffer(&data(me, to, tag)))).collect();
            let recvs: Vec<_> = pairs().rev().map(|(from, tag)| message(from, tag, self.room(len))).collect();
            let got = self.group.exchange(sends, recvs);
            let sent = pairs().map(|(to, tag)| data(me, to, tag));
            let received = pairs().rev().map(|(from, tag)| data(from, me, tag));
            let want: Vec<Vec<u8>> = sent.chain(received).collect();
            self.expect(got, want, format!("exchange x {len} on {n} ranks"));
        }
    }
}

fn is(got: &Buffers, want: &[Vec<u8>]) -> bool {
    got.len() == want.len()
        && got.iter().zip(want).all(|(got, want)| *got.bytes().expect("it is over") == want[..])
}
