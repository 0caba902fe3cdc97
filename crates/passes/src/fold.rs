//! Constant folding, identities, and reading through ops that only move elements.
//!
//! Nodes are visited in order, so the operands of a node are already simplified when it is visited. A rewrite gives a
//! node another op and operands, or replaces its results by other values; it never creates a value. A replacement has
//! the same element type and shape, spelled alike, and differs over no more axes. Types that depend on it are inferred
//! again.
//!
//! Does not: touch communication; compute what a kernel may round differently; rely on x + 0 = x or 0 * x = 0, which do
//! not hold for floats; decide anything about sizes that the function's `where` clause does not say.

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

/// The most rewrites of one node: reading through a long chain repeatedly would take quadratic time.
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

/// Whether a `cond` returns a pending or a size. Both of its blocks must then return the same type, so a type must not
/// change in one of them alone.
fn returns_more_than_tensors(block: &Block, func: &Func) -> bool {
    block.nodes.iter().any(|node| {
        let other = |value: &Value| func.ty(*value).is_some_and(|ty| ty.as_tensor().is_none());
        node.op.as_op::<Cond>().is_some() && node.results.iter().any(other)
            || node.blocks.iter().any(|inside| returns_more_than_tensors(inside, func))
    })
}

/// The outcome of a rule.
enum Rewrite {
    /// Other values replace its results.
    Values(Vec<Value>),
    /// This op on these operands is equivalent.
    Op(Op, Vec<Value>),
}

/// The input of rules: the nodes of the block so far, and the facts.
struct View<'a> {
    mesh: &'a Mesh,
    types: &'a ValueMap<Type>,
    facts: &'a Facts,
    nodes: &'a [Node],
    places: &'a ValueMap<(usize, usize)>,
}

impl<'a> View<'a> {
    /// The node that defines a value, and the index of the result; `None` for a parameter.
    fn node(&self, value: Value) -> Option<(&'a Node, usize)> {
        let (node, result) = *self.places.get(value)?;
        Some((self.nodes.get(node)?, result))
    }

    /// The op and operands that define a value as their only result, if the op is a `T`.
    fn def<T: OpDef>(&self, value: Value) -> Option<(&'a T, &'a [Value])> {
        let (node, _) = self.node(value)?;
        Some((node.op.as_op::<T>()?, &node.args))
    }

    fn tensor(&self, value: Value) -> Option<&'a TensorType> {
        self.types.get(value)?.as_tensor()
    }
}

/// The outcome for a node.
enum Outcome {
    Stays,
    Goes,
    /// The nodes of a block replace it.
    Becomes(Vec<Node>),
}

struct Folder<'a> {
    mesh: &'a Mesh,
    func: &'a mut Func,
    fuel: &'a mut Fuel,
    scope: Scope,
    /// Whether types must not change.
    exact: bool,
    /// Definitions of values: index of the node in its block, and of the result.
    places: ValueMap<(usize, usize)>,
    replaced: ValueMap<Value>,
    /// Values whose type may now differ over fewer axes.
    narrowed: ValueMap<()>,
    /// Whether that holds for a symbol, so that any type may change.
    all_narrowed: bool,
}

impl Folder<'_> {
    /// Rewrites a block; returns it and the symbols that it defined.
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

    /// The replacement of a value, or the value itself.
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

    /// The types of a node's results; `None` if a condition of the op cannot be proved.
    fn infer(&mut self, op: &Op, args: &[Value], blocks: &[Block]) -> Option<Vec<Type>> {
        let blocks: Vec<BlockType> =
            blocks.iter().map(|block| block_type(self.func, block)).collect::<Option<_>>()?;
        let args = self.types(args);
        infer(&**op, self.mesh, &args, &blocks, &mut self.scope.facts, Undecided::Refuse).ok()
    }

    /// Whether these types may replace those of a node's results.
    fn all_fit(&self, types: &[Type], node: &Node) -> bool {
        types.len() == node.results.len()
            && types.iter().zip(&node.results).all(|(ty, result)| self.fits(ty, *result))
    }

    fn fits(&self, ty: &Type, in_place_of: Value) -> bool {
        self.func.ty(in_place_of).is_some_and(|old| *old == *ty || !self.exact && narrows(ty, old))
    }

    /// Narrows the axes of a node's results to those of these types.
    fn retype(&mut self, node: &Node, types: Vec<Type>) {
        for (result, new) in node.results.iter().zip(types) {
            let Some(ty) = self.func.types.get_mut(*result) else { continue };
            if set_axes(ty, &new) {
                self.all_narrowed |= matches!(ty, Type::Size(..));
                self.narrowed.insert(*result, ());
            }
        }
    }

    /// Replaces a node's results by other values; false if they do not fit.
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

    /// Records `other` as the replacement of a value and narrows its type.
    fn stand_for(&mut self, value: Value, ty: &Type, other: Value) {
        self.replaced.insert(other, value);
        if self.func.types.remove(other).as_ref() != Some(ty) || self.narrowed.get(value).is_some() {
            self.narrowed.insert(other, ());
        }
    }

    /// The nodes of the branch that a `cond` on a constant always takes, with its operands substituted for the
    /// parameters. A block that reads sizes is kept, because its symbols end with it.
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

/// Whether types are equal, except for axes over which only the old one differs.
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

/// Sets the axes of a type to those of another and keeps the spelling of its sizes; returns whether it changed.
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
