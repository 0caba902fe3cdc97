//! Lists of several element types: one call each, against plain loops.

use consort_comm::{Buffers, CommError, OperandType, Pending, Request};
use consort_types::{Axes, Collective, Dtype, GroupName, Kind, Reduce, Route};

use super::{Checks, cut, joined};
use crate::elements::reduced;

/// The element types of a list, larger ones first.
const TYPES: [Dtype; 8] =
    [Dtype::F64, Dtype::I64, Dtype::F32, Dtype::I32, Dtype::F16, Dtype::Bf16, Dtype::U8, Dtype::Bool];

/// A list: elements of each operand on all members, in rows of `rows` parts.
struct List {
    rows: Vec<usize>,
    all: Vec<Vec<Vec<u8>>>,
}

impl List {
    fn of(&self, member: usize) -> impl Iterator<Item = &Vec<u8>> {
        self.all.iter().map(move |all| &all[member])
    }
}

impl Checks<'_> {
    pub(super) fn mixed_lists(&self) {
        // All staged together; cut at lines of which none is the start of an operand; in chunks.
        let scales =
            if self.whole { vec![0, 1, 37, 3001 / self.n(), 60_001 / self.n()] } else { vec![1, 301] };
        for scale in scales {
            let rows: Vec<usize> = (0..TYPES.len()).map(|i| 1 + i % 3).collect();
            let counts = rows.iter().enumerate().map(|(i, rows)| rows * (scale + i % 2) * self.n());
            let all = counts.zip(TYPES).enumerate().map(|(i, (count, dtype))| self.operands(dtype, count, i));
            let list = List { all: all.collect(), rows };
            for (i, reduce) in [Reduce::Sum, Reduce::Product, Reduce::Max].into_iter().enumerate() {
                self.reduced_list(&list, reduce, (scale + i) % self.n());
            }
            self.moved_list(&list, scale % self.n());
            self.settle();
        }
    }

    fn start_mixed(
        &self,
        of: Collective<'_, usize>,
        list: &List,
        operands: Buffers,
        results: Buffers,
    ) -> Result<Pending, CommError> {
        let sizes = |(rows, all): (&usize, &Vec<Vec<u8>>)| [*rows, all[0].len() / rows];
        let shapes: Vec<[usize; 2]> = list.rows.iter().zip(&list.all).map(sizes).collect();
        let types: Vec<OperandType<'_>> =
            shapes.iter().zip(TYPES).map(|(shape, dtype)| OperandType::new(dtype, shape)).collect();
        let of = Collective { dims: &[1; TYPES.len()], ..of };
        self.group.start(Request::new(&of, &types, operands, results))
    }

    fn reduced_list(&self, list: &List, reduce: Reduce, root: usize) {
        let (me, n) = (self.me(), self.n());
        let mine = || -> Buffers { list.of(me).map(|bytes| self.buffer(bytes)).collect() };
        let own: Vec<Vec<u8>> = list.of(me).cloned().collect();
        let sums: Vec<Vec<u8>> =
            list.all.iter().zip(TYPES).map(|(all, dtype)| reduced(dtype, reduce, all)).collect();
        let what = format!("a mixed list {reduce:?} of {} bytes on {n} ranks", sums[0].len());
        let of = |kind| Collective { reduce: Some(reduce), ..new(kind) };
        let got = self.start_mixed(of(Kind::AllReduce), list, mine(), Buffers::default());
        self.expect(got, sums.clone(), format!("all_reduce of {what}"));
        let rooted = Collective { root: Some(root), ..of(Kind::Reduce) };
        let got = self.start_mixed(rooted, list, mine(), Buffers::default());
        self.expect(got, if root == me { sums.clone() } else { own.clone() }, format!("reduce of {what}"));
        let room = sums.iter().map(|sum| self.room(sum.len() / n)).collect();
        let got = self.start_mixed(of(Kind::ReduceScatter), list, mine(), room);
        let parts = list.rows.iter().zip(&sums).map(|(rows, sum)| part(sum, *rows, me, n));
        let want = own.into_iter().chain(parts).collect();
        self.expect(got, want, format!("reduce_scatter of {what}"));
    }

    fn moved_list(&self, list: &List, root: usize) {
        let (me, n) = (self.me(), self.n());
        let mine = || -> Buffers { list.of(me).map(|bytes| self.buffer(bytes)).collect() };
        let own: Vec<Vec<u8>> = list.of(me).cloned().collect();
        let what = format!("a mixed list of {} bytes on {n} ranks", own[0].len());
        let of = |kind| Collective { root: Some(root), ..new(kind) };
        let room = if root == me {
            own.iter().map(|own| self.room(own.len() * n)).collect()
        } else {
            Buffers::default()
        };
        let got = self.start_mixed(of(Kind::Gather), list, mine(), room);
        let all = list.rows.iter().zip(&list.all).map(|(rows, all)| joined(all, *rows));
        let gathered = own.iter().cloned().chain(all.filter(|_| root == me)).collect();
        self.expect(got, gathered, format!("gather of {what}"));
        let given = if root == me { mine() } else { Buffers::default() };
        let room = own.iter().map(|own| self.room(own.len() / n)).collect();
        let got = self.start_mixed(of(Kind::Scatter), list, given, room);
        let parts = list.rows.iter().zip(list.of(root)).map(|(rows, whole)| part(whole, *rows, me, n));
        let given = own.iter().filter(|_| root == me).cloned();
        self.expect(got, given.chain(parts).collect(), format!("scatter of {what}"));
        let route = Route::Ring(1);
        let ring = Collective { route: Some(&route), ..new(Kind::Permute) };
        let room = own.iter().map(|own| self.room(own.len())).collect();
        let got = self.start_mixed(ring, list, mine(), room);
        let want = own.iter().chain(list.of((me + n - 1) % n)).cloned().collect();
        self.expect(got, want, format!("permute of {what}"));
    }
}

fn new(kind: Kind) -> Collective<'static, usize> {
    Collective::new(kind, GroupName::Axes(Axes::NONE))
}

/// A member's part of each row.
fn part(whole: &[u8], rows: usize, me: usize, n: usize) -> Vec<u8> {
    let part = whole.len() / rows / n;
    cut(whole, rows, me * part, (me + 1) * part)
}
