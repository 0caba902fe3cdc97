//! Redundant code for random programs: values that are recomputed, split and joined, or changed and changed back. A
//! generated program has little of it, and passes exist to remove it.

use consort_ir::entity::Value;
use consort_ir::index::{Index, Sym};
use consort_ir::ops::{
    Add, Cast, Concat, Constant, Effects, Elements, Flip, Mul, Neg, Op, OpDef, Permute, Reshape, Select,
    Slice, Split, Sub, UpdateSlice, Wait,
};
use consort_ir::program::{Func, Node, Program};
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, Dtype, Rng};

/// The program with redundant code in its function, and with some of its results dropped.
pub(crate) fn roughen(program: &Program, seed: u64) -> Program {
    let mut program = program.clone();
    let func = &mut program.funcs[0];
    let mut nodes = std::mem::take(&mut func.body.nodes);
    let next = func.types.end();
    let mut rough = Rough { func, rng: Rng::new(seed), next, out: Vec::new(), now: Vec::new() };
    let params = rough.func.body.params.clone();
    params.into_iter().for_each(|param| rough.detour(param));
    for node in &mut nodes {
        node.args.iter_mut().for_each(|arg| *arg = rough.current(*arg));
        let results = node.results.clone();
        rough.out.push(node.clone());
        rough.repeat(node);
        for result in results {
            rough.detour(result);
            rough.pieces(result);
        }
    }
    let nodes = std::mem::take(&mut rough.out);
    let (now, mut rng) = (std::mem::take(&mut rough.now), rough.rng.clone());
    let mut results = Vec::new();
    for (value, ty) in func.body.results.iter().zip(&func.results) {
        if ty.is_pending() || !rng.one_in(3) {
            let current = now.iter().rev().find(|(old, _)| old == value).map_or(*value, |(_, new)| *new);
            results.push((current, ty.clone()));
        }
    }
    func.body.nodes = nodes;
    (func.body.results, func.results) = results.into_iter().unzip();
    program
}

struct Rough<'a> {
    func: &'a mut Func,
    rng: Rng,
    next: u32,
    out: Vec<Node>,
    /// The current replacement of each value.
    now: Vec<(Value, Value)>,
}

impl Rough<'_> {
    fn current(&self, value: Value) -> Value {
        self.now.iter().rev().find(|(old, _)| *old == value).map_or(value, |(_, new)| *new)
    }

    fn node(&mut self, op: Op, args: &[Value], types: Vec<Type>) -> Vec<Value> {
        let mut results = Vec::new();
        for ty in types {
            let value = Value(self.next);
            self.next += 1;
            self.func.types.insert(value, ty);
            results.push(value);
        }
        let node = Node {
            op,
            args: args.to_vec(),
            results: results.clone(),
            blocks: vec![],
            site: None,
            plan: None,
        };
        self.out.push(node);
        results
    }

    fn one(&mut self, op: impl OpDef, args: &[Value], ty: &TensorType) -> Value {
        self.node(Op::new(op), args, vec![ty.clone().into()])[0]
    }

    fn constant(&mut self, ty: &TensorType, value: i64) -> Value {
        let elements = if ty.dtype.is_float() { Elements::Float(value as f64) } else { Elements::Int(value) };
        let op = Constant { dtype: ty.dtype, shape: ty.shape.clone(), value: elements };
        self.one(op, &[], &ty.with_varies(Axes::NONE))
    }

    /// Sometimes repeats a node, whose results are used from here on.
    fn repeat(&mut self, node: &Node) {
        let types: Vec<Type> =
            node.results.iter().filter_map(|value| self.func.ty(*value).cloned()).collect();
        let pure = node.op.effects() == Effects::Pure && node.blocks.is_empty();
        let collective = matches!(node.op.effects(), Effects::Collective(_));
        if !self.rng.one_in(3) || !pure && !collective {
            return;
        }
        let again = self.node(node.op.clone(), &node.args, types.clone());
        if pure {
            self.now.extend(node.results.iter().copied().zip(again));
        } else if let Some(Type::Pending(tensors)) = types.into_iter().next() {
            let got = self.node(Op::new(Wait {}), &again, tensors.into_iter().map(Type::Tensor).collect());
            if let Some(first) = got.first().filter(|_| self.rng.one_in(2)) {
                self.func.body.results.push(*first);
                self.func.results.extend(self.func.types.get(*first).cloned());
            }
        }
    }

    /// A box inside a shape of constant sizes: start, size and step.
    fn random_slice(&mut self, shape: &[Index]) -> Slice {
        let (mut start, mut size, mut step) = (Vec::new(), Vec::new(), Vec::new());
        for whole in shape.iter().map(|size| size.as_const().unwrap_or(0)) {
            let by = 1 + self.rng.below(2) as i64;
            let from = self.rng.below(whole as usize + 1) as i64;
            let most = (whole - from + by - 1) / by;
            let n = self.rng.below(most as usize + 1) as i64;
            // An empty box may begin at the end, but not past it.
            let by = if n == 0 { 1 } else { by };
            start.push(Index::constant(from));
            size.push(Index::constant(n));
            step.push(by as usize);
        }
        Slice { start, size, step }
    }

    fn slice(&mut self, x: Value, ty: &TensorType) -> (Value, TensorType) {
        let op = self.random_slice(&ty.shape);
        let ty = ty.with_shape(op.size.clone());
        (self.one(op, &[x], &ty), ty)
    }

    /// Sometimes writes to a tensor, joins it with itself and cuts pieces out of it, which are returned.
    fn pieces(&mut self, value: Value) {
        let Some(Type::Tensor(ty)) = self.func.ty(value).cloned() else { return };
        let constant = ty.rank() > 0 && ty.shape.iter().all(|size| size.as_const().is_some());
        if !constant || !self.rng.one_in(3) {
            return;
        }
        let x = self.current(value);
        let place = self.random_slice(&ty.shape);
        let room =
            |(size, step): (&Index, &usize)| if *step == 1 { size.clone() } else { Index::constant(1) };
        let sizes: Vec<Index> = place.size.iter().zip(&place.step).map(room).collect();
        let ones = self.constant(&ty.with_shape(sizes), 1);
        let written = self.one(UpdateSlice { start: place.start }, &[x, ones], &ty);
        let (piece, piece_ty) = self.slice(written, &ty);
        let inner = self.slice(piece, &piece_ty);
        let mut shape = ty.shape.clone();
        shape[0] = &shape[0] * &Index::constant(2);
        let double = ty.with_shape(shape);
        let both = self.one(Concat { dim: 0 }, &[written, x], &double);
        let (left, right) = (self.slice(both, &double), self.slice(both, &double));
        for (value, ty) in [inner, left, right] {
            self.func.body.results.push(value);
            self.func.results.push(ty.into());
        }
    }

    /// Sometimes replaces a value by another of the same type and elements.
    fn detour(&mut self, value: Value) {
        let Some(Type::Tensor(ty)) = self.func.ty(value).cloned() else { return };
        // For other sizes the verifier might not know that they are not negative.
        let plain = |size: &Index| size.as_const().is_some() || matches!(size.as_sym(), Some(Sym::Backed(_)));
        if !ty.shape.iter().all(plain) || !self.rng.one_in(3) {
            return;
        }
        let x = self.current(value);
        let which = self.rng.below(12);
        let number = ty.dtype != Dtype::Bool;
        let y = match which {
            0..3 if number => self.arithmetic(which, x, &ty),
            8 if ty.dtype == Dtype::F32 => {
                let wide = self.one(Cast { to: Dtype::F64 }, &[x], &ty.with_dtype(Dtype::F64));
                self.one(Cast { to: Dtype::F32 }, &[wide], &ty)
            }
            9 => {
                let truth = self.rng.below(2);
                let condition = self.constant(&ty.with_dtype(Dtype::Bool), truth as i64);
                let other = self.constant(&ty, 1);
                let args = if truth == 1 { [condition, x, other] } else { [condition, other, x] };
                self.one(Select {}, &args, &ty)
            }
            _ => self.movement(which, x, &ty),
        };
        self.now.push((value, y));
    }

    /// The value by arithmetic that keeps its elements.
    fn arithmetic(&mut self, which: usize, x: Value, ty: &TensorType) -> Value {
        match which {
            0 => {
                let negative = self.one(Neg {}, &[x], ty);
                self.one(Neg {}, &[negative], ty)
            }
            1 => {
                let one = self.constant(ty, 1);
                let args = if self.rng.one_in(2) { [x, one] } else { [one, x] };
                self.one(Mul {}, &args, ty)
            }
            _ => {
                // Adding 0 to a float changes -0: the result may differ from the original, but must be the same before
                // and after the passes.
                let zeros = self.constant(ty, 0);
                if self.rng.one_in(2) {
                    self.one(Add {}, &[x, zeros], ty)
                } else {
                    self.one(Sub {}, &[x, zeros], ty)
                }
            }
        }
    }

    /// The value by ops that move its elements back and forth.
    fn movement(&mut self, which: usize, x: Value, ty: &TensorType) -> Value {
        let (n, zero) = (ty.rank(), Index::constant(0));
        match which {
            3 => {
                let flat =
                    self.one(Reshape { shape: vec![ty.numel()] }, &[x], &ty.with_shape(vec![ty.numel()]));
                self.one(Reshape { shape: ty.shape.clone() }, &[flat], ty)
            }
            4 if n > 1 => {
                let dims: Vec<usize> = (0..n).rev().collect();
                let shape = ty.shape.iter().rev().cloned().collect();
                let turned = self.one(Permute { dims: dims.clone() }, &[x], &ty.with_shape(shape));
                self.one(Permute { dims }, &[turned], ty)
            }
            5 if n > 0 => {
                let (sizes, start) = (ty.shape.clone(), vec![zero.clone(); n]);
                let part = self.one(Slice { start: start.clone(), size: sizes, step: vec![1; n] }, &[x], ty);
                let zeros = self.constant(ty, 0);
                self.one(UpdateSlice { start }, &[zeros, part], ty)
            }
            6 if n > 0 && ty.shape[0].as_const().is_some() => {
                let first =
                    Index::constant(self.rng.below(ty.shape[0].as_const().unwrap_or(0) as usize + 1) as i64);
                let sizes = vec![first.clone(), &ty.shape[0] - &first];
                let part = |size: &Index| {
                    let mut shape = ty.shape.clone();
                    shape[0] = size.clone();
                    Type::Tensor(ty.with_shape(shape))
                };
                let types = sizes.iter().map(part).collect();
                let parts = self.node(Op::new(Split { dim: 0, sizes }), &[x], types);
                self.one(Concat { dim: 0 }, &parts, ty)
            }
            7 if n > 0 => {
                let mut shape = ty.shape.clone();
                shape[n - 1] = &shape[n - 1] * &Index::constant(2);
                let zeros = self.constant(ty, 0);
                let last = self.rng.one_in(2);
                let both = if last { [zeros, x] } else { [x, zeros] };
                let double = self.one(Concat { dim: n - 1 }, &both, &ty.with_shape(shape));
                let mut start = vec![zero.clone(); n];
                if last {
                    start[n - 1] = ty.shape[n - 1].clone();
                }
                self.one(Slice { start, size: ty.shape.clone(), step: vec![1; n] }, &[double], ty)
            }
            10 if n > 0 => {
                let dims = vec![self.rng.below(n)];
                let turned = self.one(Flip { dims: dims.clone() }, &[x], ty);
                self.one(Flip { dims }, &[turned], ty)
            }
            _ => {
                // An update, and another that covers it.
                let start = vec![zero.clone(); n];
                let ones = self.constant(ty, 1);
                let first = self.one(UpdateSlice { start: start.clone() }, &[x, ones], ty);
                self.one(UpdateSlice { start }, &[first, x], ty)
            }
        }
    }
}
