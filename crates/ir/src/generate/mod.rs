//! Random well-typed programs of several ranks, and inputs for them.
//!
//! Every pass and every engine is run on these and compared with the oracle. A program is a function of its
//! seed alone. It is grown node by node through the builder; a node whose guards do not hold for the symbols'
//! chosen values is taken back, so that the inputs made here always fit. Starts are waited for at a random
//! later place. All tensors that fit are returned, so that a wrong value anywhere shows.

mod recipes;

use std::collections::BTreeMap;

use crate::builder::Builder;
use crate::dtype::Dtype;
use crate::entity::Value;
use crate::index::{Index, Sym, SymbolFacts};
use crate::mesh::{Axes, Axis, Group, Mesh, Rank};
use crate::ops::{EvalCx, Wait};
use crate::program::{Func, Loc, Program};
use crate::tensor::Tensor;
use crate::types::{TensorType, Type};

/// A small generator of numbers (splitmix64): the same everywhere, for ever.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// One of these.
    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The most elements a generated tensor has.
const MAX_ELEMENTS: i64 = 256;

/// The values that symbols have on each rank, chosen before the program is grown.
type Chosen = Vec<BTreeMap<Sym, i64>>;

/// A program being grown.
#[derive(Clone)]
struct Growing<'a> {
    builder: Builder<'a>,
    rng: Rng,
    chosen: Chosen,
    /// Tensors that nodes may read.
    tensors: Vec<Value>,
    /// Starts that are not waited for yet.
    pending: Vec<Value>,
}

/// A random program of one function `@f` with about `size` nodes.
pub fn program(seed: u64, size: usize) -> Program {
    let mut rng = Rng::new(seed);
    let mesh = random_mesh(&mut rng);
    let func = random_func(&mesh, rng, size);
    Program { mesh, funcs: vec![func] }
}

fn random_mesh(rng: &mut Rng) -> Mesh {
    let shapes: [&[(&str, u32)]; 7] = [
        &[],
        &[("tp", 1)],
        &[("tp", 2)],
        &[("sp", 3)],
        &[("dp", 2), ("tp", 2)],
        &[("dp", 2), ("tp", 3)],
        &[("pp", 2), ("dp", 2), ("tp", 2)],
    ];
    let mut mesh = Mesh::new(rng.pick(&shapes).iter().copied()).unwrap_or_default();
    let n = mesh.n_ranks();
    if n >= 4 && n.is_multiple_of(2) && rng.one_in(2) {
        let pairs = (0..n / 2).map(|i| vec![Rank(i), Rank(n - 1 - i)]).collect();
        let declared = mesh.add_list_group("pairs", pairs);
        debug_assert!(declared.is_ok());
    }
    if n >= 3 && rng.one_in(3) {
        let declared = mesh.add_list_group("some", vec![vec![Rank(2), Rank(0)]]);
        debug_assert!(declared.is_ok());
    }
    mesh
}

fn random_func(mesh: &Mesh, mut rng: Rng, size: usize) -> Func {
    let mut builder = Builder::new(mesh, "f");
    let mut chosen: Chosen = vec![BTreeMap::new(); mesh.n_ranks() as usize];
    let symbols = [(Sym::Backed(0), 4), (Sym::Backed(1), 3)];
    for (sym, value) in symbols {
        for symbols in &mut chosen {
            symbols.insert(sym, value);
        }
    }
    if rng.one_in(2) {
        builder.declare(
            Sym::Backed(0),
            SymbolFacts { min: 2, max: Some(8), multiple_of: 2, ..SymbolFacts::default() },
        );
    }
    let mut growing = Growing { builder, rng, chosen, tensors: Vec::new(), pending: Vec::new() };
    for _ in 0..3 {
        growing.param();
    }
    let mut tries = 0;
    let mut nodes = 0;
    while nodes < size && tries < size * 8 {
        tries += 1;
        let before = growing.clone();
        let line = growing.rng.below(90) as u32 + 1;
        growing.builder.set_loc(growing.rng.one_in(3).then(|| Loc::new("model.rs", line)));
        let grown = recipes::grow(&mut growing);
        if grown.is_some() && growing.fits() {
            nodes += 1;
        } else {
            // The numbers drawn are kept: the same attempt again would fail again.
            let rng = growing.rng.clone();
            growing = Growing { rng, ..before };
        }
    }
    growing.finish()
}

impl Growing<'_> {
    fn param(&mut self) {
        let sizes = [
            Index::constant(4),
            Index::constant(3),
            Index::constant(1),
            Index::constant(6),
            Index::sym(Sym::Backed(0)),
            Index::sym(Sym::Backed(1)),
        ];
        let dtypes = [
            Dtype::F32,
            Dtype::F32,
            Dtype::F32,
            Dtype::F64,
            Dtype::Bf16,
            Dtype::F16,
            Dtype::I32,
            Dtype::I64,
            Dtype::U8,
            Dtype::Bool,
        ];
        let rank = self.rng.below(4);
        let shape = (0..rank).map(|_| self.rng.pick(&sizes)).collect();
        let dtype = self.rng.pick(&dtypes);
        let varies = self.axes();
        let value = self.builder.param(TensorType::new(dtype, shape, varies));
        self.tensors.push(value);
    }

    /// A random set of axes, more often than not one of them.
    fn axes(&mut self) -> Axes {
        let mesh = self.builder.mesh();
        let n = mesh.axes().len();
        if n == 0 || self.rng.one_in(4) {
            return Axes::NONE;
        }
        if self.rng.one_in(4) { mesh.all_axes() } else { Axes::one(Axis(self.rng.below(n) as u8)) }
    }

    /// A random group.
    fn group(&mut self) -> Group {
        let mesh = self.builder.mesh();
        if !mesh.groups().is_empty() && self.rng.one_in(3) {
            return Group::List(crate::mesh::GroupId(self.rng.below(mesh.groups().len()) as u16));
        }
        Group::Axes(self.axes())
    }

    /// Whether all guards hold on all ranks, and no tensor is large.
    fn fits(&self) -> bool {
        let mesh = self.builder.mesh();
        let holds = |(rank, symbols): (u32, &BTreeMap<Sym, i64>)| {
            let cx = EvalCx { mesh, rank: Rank(rank), symbols };
            let env = |sym: Sym| cx.index(&Index::sym(sym)).ok();
            let guards = self.builder.guards().iter().all(|guard| guard.holds(&env) == Ok(true));
            let small = |value: &Value| match self.builder.ty(*value) {
                Ok(Type::Tensor(ty)) => cx.index(&ty.numel()).is_ok_and(|n| n <= MAX_ELEMENTS),
                Ok(Type::Pending(types)) => {
                    types.iter().all(|ty| cx.index(&ty.numel()).is_ok_and(|n| n <= MAX_ELEMENTS))
                }
                _ => true,
            };
            guards && self.tensors.iter().rev().take(4).chain(&self.pending).all(small)
        };
        (0u32..).zip(&self.chosen).all(holds)
    }

    fn wait(&mut self) -> Option<()> {
        if self.pending.is_empty() {
            return None;
        }
        let at = self.rng.below(self.pending.len());
        let pending = self.pending.swap_remove(at);
        let results = self.builder.op(Wait {}, &[pending]).ok()?;
        self.tensors.extend(results);
        Some(())
    }

    fn finish(mut self) -> Func {
        while !self.pending.is_empty() {
            if self.rng.one_in(8) && self.pending.len() == 1 {
                break;
            }
            if self.wait().is_none() {
                break;
            }
        }
        let results: Vec<Value> = self.tensors.iter().rev().take(24).chain(&self.pending).copied().collect();
        self.builder.finish(&results)
    }
}

/// Inputs for a generated program: small numbers, equal on ranks wherever the types say so.
pub fn inputs(program: &Program, seed: u64) -> Vec<Vec<Tensor>> {
    let (mesh, func) = (&program.mesh, &program.funcs[0]);
    let symbols = BTreeMap::from([(Sym::Backed(0), 4), (Sym::Backed(1), 3)]);
    let rank_inputs = |rank: u32| {
        let cx = EvalCx { mesh, rank: Rank(rank), symbols: &symbols };
        let input = |(i, param): (usize, &Value)| {
            let Some(Type::Tensor(ty)) = func.ty(*param) else { return Tensor::size(0) };
            let place =
                ty.varies.iter().fold(1u64, |at, axis| at * 31 + u64::from(mesh.coordinate(cx.rank, axis)));
            let mut rng = Rng::new(seed ^ (i as u64) << 32 ^ place << 8);
            let shape = cx.shape(&ty.shape).unwrap_or_default();
            let n: usize = shape.iter().product();
            if ty.dtype.is_float() {
                Tensor::floats(ty.dtype, shape, (0..n).map(|_| rng.below(65) as f64 / 16.0 - 2.0).collect())
            } else {
                Tensor::ints(ty.dtype, shape, (0..n).map(|_| rng.below(7) as i64 - 2).collect())
            }
        };
        func.body.params.iter().enumerate().map(input).collect()
    };
    (0..mesh.n_ranks()).map(rank_inputs).collect()
}
