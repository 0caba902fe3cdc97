//! Constant folding by the op's own evaluation, if that is exact: a kernel gives the same bits. A constant with one
//! repeated element stays one, whatever its shape.

use std::collections::BTreeMap;

use consort_ir::literal::{Data, Literal};
use consort_ir::ops::{Constant, Elements, EvalCx, Op, OpDef, built_in};
use consort_ir::program::Node;
use consort_types::{Dtype, Rank};

use super::{Rewrite, View};

/// The most elements, of any operand or of the result, that are folded.
const MAX_ELEMENTS: i64 = 256;

/// How elements of the result depend on those of the operands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Each on the elements at its own position.
    Elementwise,
    /// Each is one of them, moved.
    Moves,
    /// In any other way.
    Whole,
}

/// How an op computes; `None` if it is not computed here.
fn kind(op: &dyn OpDef) -> Option<Kind> {
    Some(match op.info().name {
        // Not users' ops: a kernel that is registered later may differ from the evaluation.
        name if built_in(name).is_none() => return None,
        _ if op.is_elementwise() => Kind::Elementwise,
        "reshape" | "permute" | "slice" | "update_slice" | "concat" | "flip" => Kind::Moves,
        // Not `broadcast`: it is a view, whereas a constant of its shape would be written at each call.
        "pad" | "index" | "sum" | "prod" | "max" | "min" | "any" | "all" => Kind::Whole,
        _ => return None,
    })
}

pub(super) fn rewrite(view: &View<'_>, node: &Node) -> Option<Rewrite> {
    let kind = kind(&*node.op)?;
    let [result] = node.results[..] else { return None };
    let ty = view.tensor(result)?;
    // Else a kernel may round differently.
    if !node.op.tolerance().is_exact(ty.dtype) {
        return None;
    }
    let constant = |arg| view.def::<Constant>(arg).map(|(constant, _)| constant);
    let args: Vec<&Constant> = node.args.iter().map(|arg| constant(*arg)).collect::<Option<_>>()?;
    let splats: Option<Vec<Literal>> = args.iter().map(|arg| splat(arg)).collect();
    let tensor = match (kind, splats) {
        (Kind::Elementwise, Some(splats)) => eval(view, &*node.op, &splats)?,
        (Kind::Moves, Some(splats)) if splats.iter().all(|other| other.same(&splats[0])) => {
            splats.into_iter().next()?
        }
        _ => {
            let mut known = true;
            node.op.indices(&mut |index| known &= index.as_const().is_some());
            let sizes = args.iter().map(|arg| &arg.shape).chain([&ty.shape]);
            let small = |shape: &Vec<_>| {
                consort_ir::index::Index::product(shape).as_const().is_some_and(|n| n <= MAX_ELEMENTS)
            };
            if !known || !sizes.into_iter().all(small) {
                return None;
            }
            let args = args.iter().map(|arg| eval(view, *arg, &[])).collect::<Option<Vec<_>>>()?;
            eval(view, &*node.op, &args)?
        }
    };
    let value = elements(&tensor)?;
    let constant = Constant { dtype: ty.dtype, shape: ty.shape.clone(), value };
    Some(Rewrite::Op(Op::new(constant), Vec::new()))
}

/// The repeated element of a constant, as a 0-d tensor.
pub(super) fn splat(constant: &Constant) -> Option<Literal> {
    let dtype = constant.dtype;
    Some(match &constant.value {
        Elements::Float(x) => Literal::floats(dtype, vec![], vec![*x]),
        Elements::Int(x) => Literal::ints(dtype, vec![], vec![*x]),
        Elements::Floats(list) if list.len() == 1 => Literal::floats(dtype, vec![], list.clone()),
        Elements::Ints(list) if list.len() == 1 => Literal::ints(dtype, vec![], list.clone()),
        _ => return None,
    })
}

/// The truth value of a node, if it is a constant with one repeated element.
pub(super) fn truth(node: &Node) -> Option<bool> {
    let constant = node.op.as_op::<Constant>().filter(|constant| constant.dtype == Dtype::Bool)?;
    splat(constant)?.as_size().map(|truth| truth != 0)
}

/// Evaluates an op that is the same on all ranks and mentions no symbol.
fn eval(view: &View<'_>, op: &dyn OpDef, args: &[Literal]) -> Option<Literal> {
    let cx = EvalCx { mesh: view.mesh, rank: Rank(0), symbols: &BTreeMap::new() };
    let args: Vec<&Literal> = args.iter().collect();
    op.eval(&cx, &args).ok()?.into_iter().next()
}

/// A tensor's elements as a constant, one if they are all equal. `None` if one is NaN: which of the NaN bit patterns
/// results is up to the kernel.
fn elements(tensor: &Literal) -> Option<Elements> {
    Some(match &tensor.data {
        Data::Float(list) if list.iter().any(|x| x.is_nan()) => return None,
        Data::Float(list) => match &list[..] {
            [] => Elements::Float(0.0),
            [first, rest @ ..] if rest.iter().all(|x| x.to_bits() == first.to_bits()) => {
                Elements::Float(*first)
            }
            _ => Elements::Floats(list.clone()),
        },
        Data::Int(list) => match &list[..] {
            [] => Elements::Int(0),
            [first, rest @ ..] if rest.iter().all(|x| x == first) => Elements::Int(*first),
            _ => Elements::Ints(list.clone()),
        },
    })
}
