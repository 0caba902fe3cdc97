//! Type inference of a node: the checks that every op shares, around the op's own rule.
//!
//! The builder and the verifier both come through here, so a program that was built verifies.

use consort_types::{Axes, Failure};

use crate::index::Facts;
use crate::mesh::Mesh;
use crate::ops::{Alias, BlockType, Effects, Flow, InferCx, OpDef, Takes, Undecided, check_facets, count};
use crate::types::{TensorType, Type};

/// Infers the types of a node's results. A pure op's results differ between ranks wherever an operand or an attribute
/// does; the rule of a communication op says which axes of its operands it removes and adds. The rules of control flow
/// state all axes. A tensor always differs wherever its sizes do.
pub fn infer(
    op: &dyn OpDef,
    mesh: &Mesh,
    args: &[Type],
    blocks: &[BlockType],
    facts: &mut Facts,
    undecided: Undecided,
) -> Result<Vec<Type>, Box<Failure>> {
    check_shape_of_node(op, mesh, args, blocks)?;
    check_attributes(op, mesh, facts)?;
    let mut results = op.infer(&mut InferCx { mesh, args, blocks, facts, undecided })?;
    check_facets(op, mesh, args, &results, facts)?;
    let mut differs = Axes::NONE;
    // A view that checks its operands states its own axes: it may find that they are equal. So does what returns operands.
    let states = op.is_rule_alone() || op.effects() == Effects::Host && op.alias() == Alias::View;
    if matches!(op.effects(), Effects::Pure | Effects::Host) && op.flow() == Flow::Straight && !states {
        differs = args.iter().fold(Axes::NONE, |set, ty| set.union(ty.varies()));
    }
    if op.flow() == Flow::Straight {
        op.indices(&mut |index| differs = differs.union(facts.varies(index)));
    }
    for ty in &mut results {
        let mut invalid = false;
        ty.indices(&mut |index| invalid |= index.is_invalid());
        if invalid {
            return Err(Failure::rule(
                "V5",
                "a size of the result does not fit in 64 bits or is too large an expression",
            ));
        }
        match ty {
            Type::Tensor(tensor) => widen(tensor, facts, differs),
            Type::Pending(tensors) => tensors.iter_mut().for_each(|tensor| widen(tensor, facts, differs)),
            // A size states its own axes: it may be equal where the tensor it is read from is not.
            Type::Size(..) => {}
        }
    }
    Ok(results)
}

fn widen(tensor: &mut TensorType, facts: &Facts, differs: Axes) {
    let sizes = tensor.shape.iter().fold(Axes::NONE, |set, size| set.union(facts.varies(size)));
    tensor.varies = tensor.varies.union(sizes).union(differs);
}

/// Checks the numbers and kinds of operands and blocks.
fn check_shape_of_node(
    op: &dyn OpDef,
    mesh: &Mesh,
    args: &[Type],
    blocks: &[BlockType],
) -> Result<(), Box<Failure>> {
    let (least, most) = op.info().arity();
    if args.len() < least || most.is_some_and(|most| args.len() > most) {
        let expected = match (least, most) {
            (0, Some(_)) => "no operands".to_string(),
            (_, Some(_)) => format!("{} ({})", count(least, "operand"), op.info().args.join(", ")),
            (_, None) => format!("at least {} ({}..)", count(least, "operand"), op.info().args.join(", ")),
        };
        let message = (expected.to_string(), args.len().to_string());
        return Err(Failure::rule("V2", message));
    }
    let labels = op.flow().labels();
    if blocks.len() != labels.len() {
        return Err(Failure::rule("V2", (count(labels.len(), "block"), blocks.len().to_string())));
    }
    for (i, arg) in args.iter().enumerate() {
        let (fits, expected) = match op.takes() {
            Takes::Tensors => (arg.as_tensor().is_some(), "a tensor"),
            Takes::Pending => (arg.is_pending(), "a pending"),
            Takes::Any => (true, ""),
        };
        if fits {
            continue;
        }
        let headline = (expected, arg.display(mesh).to_string());
        let failure = match arg.is_pending() {
            true => Failure::rule("V8", headline)
                .note("only `wait` turns a pending into a tensor; put one before this op"),
            false => Failure::rule("V2", headline),
        };
        return Err(failure.of(format!("operand {i}")));
    }
    Ok(())
}

/// Checks that groups exist and that attributes mention only symbols that have a value.
fn check_attributes(op: &dyn OpDef, mesh: &Mesh, facts: &Facts) -> Result<(), Box<Failure>> {
    let mut missing = false;
    op.groups(&mut |group| missing |= !mesh.has(group));
    if missing {
        return Err(Failure::rule("V4", "a group or axis that the mesh does not have"));
    }
    let mut unknown = None;
    op.indices(&mut |index| unknown = unknown.or(facts.unknown_symbol(index)));
    match unknown {
        Some(sym) => {
            let text = crate::index::Index::sym(sym).display(mesh).to_string();
            Err(Failure::rule("V5", format!("an attribute mentions `{text}`, which has no value here")))
        }
        None => Ok(()),
    }
}

/// Whether a value of one type may be used where another type is declared: equal element types and shapes, and
/// differing over no more axes.
pub fn fits(value: &Type, declared: &Type, facts: &Facts) -> bool {
    match (value, declared) {
        (Type::Tensor(value), Type::Tensor(declared)) => tensor_fits(value, declared, facts),
        (Type::Size(value, varies), Type::Size(declared, wider)) => {
            varies.is_subset(*wider) && facts.eq(value, declared) == Some(true)
        }
        (Type::Pending(value), Type::Pending(declared)) => {
            value.len() == declared.len()
                && value.iter().zip(declared).all(|(value, declared)| tensor_fits(value, declared, facts))
        }
        _ => false,
    }
}

fn tensor_fits(value: &TensorType, declared: &TensorType, facts: &Facts) -> bool {
    value.dtype == declared.dtype
        && value.varies.is_subset(declared.varies)
        && value.shape.len() == declared.shape.len()
        && value.shape.iter().zip(&declared.shape).all(|(a, b)| a == b || facts.eq(a, b) == Some(true))
}

/// Whether two types are equal, given what is known of the symbols.
pub fn same_type(a: &Type, b: &Type, facts: &Facts) -> bool {
    a == b || fits(a, b, facts) && fits(b, a, facts)
}
