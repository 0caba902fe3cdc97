//! Random well-typed programs of several ranks, and inputs for them.
//!
//! Every pass and every engine is run on these and compared with the oracle. A program is a function of its seed alone.
//! It is grown node by node through the builder; a node whose guards do not hold for the symbols' chosen values is
//! undone, so that the inputs generated here always fit. Starts are waited for at a random later place, at the end of
//! their block, or not at all: then the pending is returned.
//!
//! Values die. A plan reuses storage, writes slices in place and releases leases only when values are dead, so a
//! program that returned all its values would test none of that. Unused values are returned, so that a wrong value
//! anywhere is visible, and a few of the others.

mod known;
mod recipes;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use consort_ir::builder::Builder;
use consort_ir::entity::Value;
use consort_ir::index::{Index, Sym, SymbolFacts};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, OpDef, UpdateSlice, Wait};
use consort_ir::program::{Func, Node, Program};
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, Axis, Dtype, GroupName, Rank, Rng, Site};

use known::Known;

/// The most elements a generated tensor has.
const MAX_ELEMENTS: i64 = 256;

/// The values that symbols have on each rank, chosen before the program is grown.
type Chosen = Vec<BTreeMap<Sym, i64>>;

/// Whether a program may have a node with this op, on operands of these types.
pub type Accepts<'a> = &'a dyn Fn(&Mesh, &dyn OpDef, &[Type]) -> bool;

/// A program being grown.
#[derive(Clone)]
struct Growing<'a> {
    builder: Builder<'a>,
    accepts: Accepts<'a>,
    known: Rc<Known>,
    rng: Rng,
    chosen: Chosen,
    /// Tensors of the block being filled that nodes may read.
    tensors: Vec<Value>,
    /// Starts of this block that are not waited for yet.
    flying: Vec<Flying>,
    /// The axes over which this block must not communicate.
    quiet: Axes,
}

/// A start in flight.
#[derive(Clone)]
struct Flying {
    pending: Value,
    /// Where its results are written after the wait.
    into: Option<Into>,
}

/// A tensor, and the place of each result in it.
#[derive(Clone)]
struct Into {
    base: Value,
    starts: Vec<Vec<Index>>,
}

/// A random program of one function `@f` with about `size` steps.
pub fn program(seed: u64, size: usize) -> Program {
    program_of(seed, size, &|_, _, _| true)
}

/// The same, restricted to ops that `accepts` allows with operands of given types.
pub fn program_of(seed: u64, size: usize, accepts: Accepts<'_>) -> Program {
    let mut rng = Rng::new(seed);
    let mesh = random_mesh(&mut rng);
    let func = random_func(&mesh, rng, size, accepts);
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

fn random_func<'a>(mesh: &'a Mesh, mut rng: Rng, size: usize, accepts: Accepts<'a>) -> Func {
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
    let (tensors, flying, quiet) = (Vec::new(), Vec::new(), Axes::NONE);
    let known = Rc::new(Known::new());
    let mut growing = Growing { builder, accepts, known, rng, chosen, tensors, flying, quiet };
    for _ in 0..3 {
        growing.param();
    }
    let mut tries = 0;
    let mut nodes = 0;
    while nodes < size && tries < size * 8 {
        tries += 1;
        nodes += usize::from(growing.step());
    }
    growing.finish()
}

impl Growing<'_> {
    /// Tries a random step, and undoes it if it does not fit.
    fn step(&mut self) -> bool {
        let before = self.clone();
        let known = self.builder.nodes().len();
        let line = self.rng.below(90) as u32 + 1;
        self.builder.set_site(self.rng.one_in(3).then(|| Site::new("model.rs", line)));
        let fits = recipes::grow(self).is_some() && self.fits() && self.accepted(known);
        if !fits {
            // The random state is kept: the same attempt would fail again.
            let rng = self.rng.clone();
            *self = Growing { rng, ..before };
        }
        fits
    }

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

    /// A random set of axes, usually a single one.
    fn axes(&mut self) -> Axes {
        let mesh = self.builder.mesh();
        let n = mesh.axes().len();
        if n == 0 || self.rng.one_in(4) {
            return Axes::NONE;
        }
        if self.rng.one_in(4) { mesh.all_axes() } else { Axes::one(Axis(self.rng.below(n) as u8)) }
    }

    /// A random group over which communication is allowed here.
    fn group(&mut self) -> GroupName {
        let mesh = self.builder.mesh();
        if !mesh.groups().is_empty() && self.quiet.is_empty() && self.rng.one_in(3) {
            return GroupName::List(consort_types::GroupId(self.rng.below(mesh.groups().len()) as u16));
        }
        GroupName::Axes(self.axes().minus(self.quiet))
    }

    /// Whether all nodes of this block from `known` on, and those inside them, are accepted.
    fn accepted(&self, known: usize) -> bool {
        self.builder.nodes().iter().skip(known).all(|node| self.accepts_node(node))
    }

    fn accepts_node(&self, node: &Node) -> bool {
        let types: Vec<Type> =
            node.args.iter().filter_map(|arg| self.builder.ty(*arg).ok().cloned()).collect();
        (self.accepts)(self.builder.mesh(), &*node.op, &types)
            && node.blocks.iter().flat_map(|block| &block.nodes).all(|inside| self.accepts_node(inside))
    }

    /// Whether all guards hold on all ranks, no tensor is large, and none has a size that ended with a block.
    fn fits(&self) -> bool {
        let mesh = self.builder.mesh();
        let recent =
            self.tensors.iter().rev().take(8).chain(self.flying.iter().map(|flying| &flying.pending));
        let types: Vec<&TensorType> =
            recent.filter_map(|value| self.builder.ty(*value).ok()).flat_map(Type::tensors).collect();
        let known = |size: &Index| self.builder.facts().unknown_symbol(size).is_none();
        let fits = |(rank, symbols): (u32, &BTreeMap<Sym, i64>)| {
            let cx = EvalCx { mesh, rank: Rank(rank), symbols };
            let env = |sym: Sym| cx.index(&Index::sym(sym)).ok();
            let guards = self.builder.guards().iter().all(|guard| guard.holds(&env) == Ok(true));
            guards && types.iter().all(|ty| cx.index(&ty.numel()).is_ok_and(|n| n <= MAX_ELEMENTS))
        };
        types.iter().all(|ty| ty.shape.iter().all(known)) && (0u32..).zip(&self.chosen).all(fits)
    }

    /// Waits for a start and writes its results to their places.
    fn wait(&mut self) -> Option<()> {
        if self.flying.is_empty() {
            return None;
        }
        let at = self.rng.below(self.flying.len());
        let Flying { pending, into } = self.flying.swap_remove(at);
        let results = self.builder.op(Wait {}, &[pending]).ok()?;
        let Some(Into { mut base, starts }) = into else {
            self.tensors.extend(results);
            return Some(());
        };
        for (start, result) in starts.into_iter().zip(results) {
            base = self.builder.one(UpdateSlice { start }, &[base, result]).ok()?;
            if self.rng.one_in(4) {
                self.tensors.push(result);
            }
        }
        self.tensors.push(base);
        Some(())
    }

    fn finish(mut self) -> Func {
        let mut returned = Vec::new();
        while !self.flying.is_empty() {
            let last = self.flying.len() - 1;
            if self.flying[last].into.is_none() && self.rng.one_in(6) {
                returned.extend(self.flying.pop().map(|flying| flying.pending));
            } else if self.wait().is_none() {
                break;
            }
        }
        let func = self.builder.clone().finish(&[]);
        let read: BTreeSet<Value> = func.body.nodes.iter().flat_map(|node| node.args.clone()).collect();
        let mut results = Vec::new();
        for value in self.tensors.iter().rev() {
            if !read.contains(value) || self.rng.one_in(8) {
                results.push(*value);
            }
        }
        self.builder.finish(&[results, returned].concat())
    }
}

/// Inputs for a generated program: small numbers, equal on ranks wherever the types say so.
pub fn inputs(program: &Program, seed: u64) -> Vec<Vec<Literal>> {
    let (mesh, func) = (&program.mesh, &program.funcs[0]);
    let symbols = BTreeMap::from([(Sym::Backed(0), 4), (Sym::Backed(1), 3)]);
    let rank_inputs = |rank: u32| {
        let cx = EvalCx { mesh, rank: Rank(rank), symbols: &symbols };
        let input = |(i, param): (usize, &Value)| {
            let Some(Type::Tensor(ty)) = func.ty(*param) else { return Literal::size(0) };
            let place =
                ty.varies.iter().fold(1u64, |at, axis| at * 31 + u64::from(mesh.coordinate(cx.rank, axis)));
            let mut rng = Rng::new(seed ^ (i as u64) << 32 ^ place << 8);
            let shape = cx.shape(&ty.shape).unwrap_or_default();
            let n: usize = shape.iter().product();
            if ty.dtype.is_float() {
                Literal::floats(ty.dtype, shape, (0..n).map(|_| rng.below(65) as f64 / 16.0 - 2.0).collect())
            } else {
                Literal::ints(ty.dtype, shape, (0..n).map(|_| rng.below(7) as i64 - 2).collect())
            }
        };
        func.body.params.iter().enumerate().map(input).collect()
    };
    (0..mesh.n_ranks()).map(rank_inputs).collect()
}
