//! Computes what is constant, drops what changes nothing, and reads through what only moves elements.
//!
//! Nodes are visited in order, so the operands of a node are as simple as they get when its turn comes. A rewrite
//! gives a node another op and operands, or values that stand for its results; it never makes a new value. What
//! takes the place of a value has its element type and its shape, spelled alike, and differs over no more axes.
//! Types that depend on it are inferred again.
//!
//! Does not: touch communication; compute what a kernel may round otherwise; rely on x + 0 = x or 0 * x = 0, which
//! do not hold for floats; decide anything about sizes that the function's `where` clause does not say.

mod constants;
mod identities;
mod slices;

use consort_ir::builder::block_type;
use consort_ir::entity::{Value, ValueMap};
use consort_ir::index::{Facts, Sym};
use consort_ir::infer::infer;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{BlockType, Cond, Op, OpDef, Undecided};
use consort_ir::program::{Block, Func, Node, Program};
use consort_ir::types::{TensorType, Type};
use consort_types::Axes;

use crate::pipeline::Fuel;
use crate::remove::forget;
use crate::scope::Scope;

/// How often one node may be rewritten: reading through a long chain again and again would take quadratic time.
const MAX_STEPS: usize = 32;

/// Runs the pass.
pub(crate) fn run(program: &mut Program, fuel: &mut Fuel) {
    let mesh = &program.mesh;
    for func in &mut program.funcs {
        let (scope, exact) = (Scope::new(mesh, func), returns_more_than_tensors(&func.body, func));
        let body = std::mem::take(&mut func.body);
        let mut folder = Folder {
            mesh,
            scope,
            exact,
            func,
            fuel,
            places: ValueMap::default(),
            replaced: ValueMap::default(),
            narrowed: ValueMap::default(),
            all_narrowed: false,
        };
        let (body, _) = folder.block(body);
        func.body = body;
    }
}

/// Whether a `cond` returns a pending or a size. Both of its blocks must return the same type then, so a type
/// must not change in one of them alone.
fn returns_more_than_tensors(block: &Block, func: &Func) -> bool {
    block.nodes.iter().any(|node| {
        let other = |value: &Value| func.ty(*value).is_some_and(|ty| ty.as_tensor().is_none());
        node.op.as_op::<Cond>().is_some() && node.results.iter().any(other)
            || node.blocks.iter().any(|inside| returns_more_than_tensors(inside, func))
    })
}

/// What a rule makes of a node.
enum Rewrite {
    /// These values stand for its results.
    Values(Vec<Value>),
    /// This op on these operands gives the same.
    Op(Op, Vec<Value>),
}

/// What rules see: the nodes of the block so far, and what is known.
struct View<'a> {
    mesh: &'a Mesh,
    types: &'a ValueMap<Type>,
    facts: &'a Facts,
    nodes: &'a [Node],
    places: &'a ValueMap<(usize, usize)>,
}

impl<'a> View<'a> {
    /// The node that defines a value, and which of its results it is; none for a parameter.
    fn node(&self, value: Value) -> Option<(&'a Node, usize)> {
        let (node, result) = *self.places.get(value)?;
        Some((self.nodes.get(node)?, result))
    }

    /// The op that defines a value as its only result, if it is this one, and its operands.
    fn def<T: OpDef>(&self, value: Value) -> Option<(&'a T, &'a [Value])> {
        let (node, _) = self.node(value)?;
        Some((node.op.as_op::<T>()?, &node.args))
    }

    fn tensor(&self, value: Value) -> Option<&'a TensorType> {
        self.types.get(value)?.as_tensor()
    }
}

/// What becomes of a node.
enum Outcome {
    Stays,
    Goes,
    /// The nodes of a block take its place.
    Becomes(Vec<Node>),
}

struct Folder<'a> {
    mesh: &'a Mesh,
    func: &'a mut Func,
    fuel: &'a mut Fuel,
    scope: Scope,
    /// Whether types must stay as they are.
    exact: bool,
    /// Where values are defined: node of their block, and which result.
    places: ValueMap<(usize, usize)>,
    replaced: ValueMap<Value>,
    /// Values whose type may differ over fewer axes than it did.
    narrowed: ValueMap<()>,
    /// Whether a symbol does, so that any type may.
    all_narrowed: bool,
}

impl Folder<'_> {
    /// A block, and the symbols that it brought into scope.
    fn block(&mut self, block: Block) -> (Block, Vec<Sym>) {
        let mut rest = block.nodes;
        rest.reverse();
        let (mut nodes, mut symbols): (Vec<Node>, _) = (Vec::with_capacity(rest.len()), Vec::new());
        while let Some(mut node) = rest.pop() {
            match self.node(&mut node, &nodes) {
                Outcome::Goes => continue,
                Outcome::Becomes(inside) => {
                    rest.extend(inside.into_iter().rev());
                    continue;
                }
                Outcome::Stays => {}
            }
            // A symbol is the value of a size.
            if node.results.iter().any(|result| matches!(self.func.ty(*result), Some(Type::Size(..)))) {
                symbols.extend(self.scope.define(&*node.op, &self.types(&node.args)));
            }
            for (i, result) in node.results.iter().enumerate() {
                self.places.insert(*result, (nodes.len(), i));
            }
            nodes.push(node);
        }
        let results = block.results.iter().map(|result| self.resolve(*result)).collect();
        (Block { nodes, results, ..block }, symbols)
    }

    fn types(&self, values: &[Value]) -> Vec<Type> {
        values.iter().filter_map(|value| self.func.ty(*value).cloned()).collect()
    }

    /// The value that stands for another, or itself.
    fn resolve(&self, mut value: Value) -> Value {
        while let Some(by) = self.replaced.get(value) {
            value = *by;
        }
        value
    }

    fn node(&mut self, node: &mut Node, nodes: &[Node]) -> Outcome {
        let mut stale = self.all_narrowed || node.args.iter().any(|arg| self.narrowed.get(*arg).is_some());
        node.args.iter_mut().for_each(|arg| *arg = self.resolve(*arg));
        if let Some(inside) = self.inline(node, nodes) {
            return Outcome::Becomes(inside);
        }
        for inside in &mut node.blocks {
            let results = inside.results.clone();
            let (block, symbols) = self.block(std::mem::take(inside));
            self.scope.leave(&symbols);
            stale |= results.iter().any(|result| self.narrowed.get(*result).is_some());
            *inside = block;
        }
        if stale && let Some(types) = self.infer(&node.op, &node.args, &node.blocks) {
            self.retype(node, types);
        }
        for _ in 0..MAX_STEPS {
            let view = View {
                mesh: self.mesh,
                types: &self.func.types,
                facts: &self.scope.facts,
                nodes,
                places: &self.places,
            };
            let rewrite = constants::rewrite(&view, node)
                .or_else(|| identities::rewrite(&view, node))
                .or_else(|| slices::rewrite(&view, node));
            match rewrite {
                Some(Rewrite::Values(values)) => {
                    if self.replace(node, &values) {
                        return Outcome::Goes;
                    }
                    break;
                }
                Some(Rewrite::Op(op, args)) => {
                    let types = self.infer(&op, &args, &[]).filter(|types| self.all_fit(types, node));
                    let Some(types) = types.filter(|_| self.fuel.burn()) else { break };
                    self.retype(node, types);
                    (node.op, node.args) = (op, args);
                }
                None => break,
            }
        }
        Outcome::Stays
    }

    /// The types of a node's results; none where a condition of the op cannot be shown to hold.
    fn infer(&mut self, op: &Op, args: &[Value], blocks: &[Block]) -> Option<Vec<Type>> {
        let blocks: Vec<BlockType> =
            blocks.iter().map(|block| block_type(self.func, block)).collect::<Option<_>>()?;
        let args = self.types(args);
        infer(&**op, self.mesh, &args, &blocks, &mut self.scope.facts, Undecided::Refuse).ok()
    }

    /// Whether types may take the place of those of a node's results.
    fn all_fit(&self, types: &[Type], node: &Node) -> bool {
        types.len() == node.results.len()
            && types.iter().zip(&node.results).all(|(ty, result)| self.fits(ty, *result))
    }

    fn fits(&self, ty: &Type, in_place_of: Value) -> bool {
        self.func.ty(in_place_of).is_some_and(|old| *old == *ty || !self.exact && narrows(ty, old))
    }

    /// Gives a node's results the axes of these types.
    fn retype(&mut self, node: &Node, types: Vec<Type>) {
        for (result, new) in node.results.iter().zip(types) {
            let Some(ty) = self.func.types.get_mut(*result) else { continue };
            if set_axes(ty, &new) {
                self.all_narrowed |= matches!(ty, Type::Size(..));
                self.narrowed.insert(*result, ());
            }
        }
    }

    /// Puts other values in the place of a node's results; false where they may not be there.
    fn replace(&mut self, node: &Node, values: &[Value]) -> bool {
        let types = self.types(values);
        if !self.all_fit(&types, node) || !self.fuel.burn() {
            return false;
        }
        for ((result, value), ty) in node.results.iter().zip(values).zip(&types) {
            self.stand_for(*value, ty, *result);
        }
        true
    }

    /// Puts a value of a type in the place of another.
    fn stand_for(&mut self, value: Value, ty: &Type, other: Value) {
        self.replaced.insert(other, value);
        if self.func.types.remove(other).as_ref() != Some(ty) || self.narrowed.get(value).is_some() {
            self.narrowed.insert(other, ());
        }
    }

    /// The nodes of the block that a `cond` on a constant always runs, with its operands in place of the
    /// parameters. A block that reads sizes stays where it is, because its symbols end with it.
    fn inline(&mut self, node: &Node, nodes: &[Node]) -> Option<Vec<Node>> {
        node.op.as_op::<Cond>()?;
        let (condition, args) = node.args.split_first()?;
        let (constant, _) = self.places.get(*condition)?;
        let taken = constants::truth(nodes.get(*constant)?)?;
        let [then, other] = &node.blocks[..] else { return None };
        let (block, dropped) = if taken { (then, other) } else { (other, then) };
        let same = |a: &[Value], b: &[Value]| {
            a.len() == b.len()
                && a.iter().zip(b).all(|(a, b)| self.func.ty(*a).is_some_and(|ty| self.fits(ty, *b)))
        };
        if !same(args, &block.params) || !same(&block.results, &node.results) {
            return None;
        }
        if self.defines_symbols(then) || self.defines_symbols(other) || !self.fuel.burn() {
            return None;
        }
        for (arg, param) in args.iter().zip(&block.params) {
            let ty = self.func.ty(*arg).cloned()?;
            self.stand_for(*arg, &ty, *param);
        }
        for (inside, result) in block.results.iter().zip(&node.results) {
            self.func.types.remove(*result);
            self.replaced.insert(*result, *inside);
            // Its type may still change with those of the parameters.
            self.narrowed.insert(*result, ());
        }
        dropped.params.iter().for_each(|param| drop(self.func.types.remove(*param)));
        dropped.nodes.iter().for_each(|inside| forget(&mut self.func.types, inside));
        Some(block.nodes.clone())
    }

    fn defines_symbols(&self, block: &Block) -> bool {
        block.nodes.iter().any(|node| {
            !node.op.defines(&self.types(&node.args)).is_empty()
                || node.blocks.iter().any(|inside| self.defines_symbols(inside))
        })
    }
}

/// Whether types are equal, but for axes over which only the old one differs.
fn narrows(ty: &Type, old: &Type) -> bool {
    let tensor = |(ty, old): (&TensorType, &TensorType)| {
        ty.dtype == old.dtype && ty.shape == old.shape && ty.varies.is_subset(old.varies)
    };
    match (ty, old) {
        (Type::Tensor(ty), Type::Tensor(old)) => tensor((ty, old)),
        (Type::Size(ty, varies), Type::Size(old, wider)) => ty == old && varies.is_subset(*wider),
        (Type::Pending(ty), Type::Pending(old)) => ty.len() == old.len() && ty.iter().zip(old).all(tensor),
        _ => false,
    }
}

/// Gives a type the axes of another and keeps its sizes, which may be spelled otherwise; says whether it changed.
fn set_axes(ty: &mut Type, new: &Type) -> bool {
    let set = |axes: &mut Axes, new: Axes| std::mem::replace(axes, new) != new;
    match (ty, new) {
        (Type::Tensor(ty), Type::Tensor(new)) => set(&mut ty.varies, new.varies),
        (Type::Size(_, axes), Type::Size(_, new)) => set(axes, *new),
        (Type::Pending(types), Type::Pending(new)) => types
            .iter_mut()
            .zip(new)
            .fold(false, |changed, (ty, new)| set(&mut ty.varies, new.varies) || changed),
        _ => false,
    }
}
