//! Gradients: from a program to the program that also computes the cotangents of its arguments.
//!
//! A transformation of programs, never a tape of what ran. Three steps, each a module:
//!
//! - `spread` makes explicit where a value that is equal on ranks enters a computation that differs between them. Only
//!   there does a gradient sum over ranks, whatever the program communicates.
//! - `tape` copies the forward, and lets blocks return what their backward needs; `prune` takes out the rest.
//! - `backward` emits the rules of the ops (`OpDef::vjp`) in reverse order, `blocks` those of ops with blocks.
//!
//! The result is an ordinary function of the same name: its results are those of the function, the first of which is
//! the loss, and then a cotangent for each argument asked for. Each node of the backward has the source line of the
//! node of the forward that it comes from.

mod active;
mod backward;
mod blocks;
mod copy;
mod prune;
mod spread;
mod tape;

use consort_ir::entity::Value;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Constant, Elements};
use consort_ir::program::{Func, Program};
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_types::{Axes, Axis, Failure};

use active::{Active, has_floats};
use backward::{Backward, Cotangents, Values};

/// The program of a function and its gradient by some of its arguments, given by their numbers. The program must verify.
///
/// The function's first result is the loss: a 0-d float that is equal on all ranks.
pub fn gradient(program: &Program, func: &str, wrt: &[usize]) -> Result<Program, Box<Failure>> {
    let found = program.func(func).ok_or_else(|| Failure::new(format!("there is no function @{func}")))?;
    gradient_of(&program.mesh, found, wrt).map_err(|failure| failure.of("grad"))
}

/// The numbers of the arguments that a gradient may be taken by: tensors of floats.
pub fn float_arguments(func: &Func) -> Vec<usize> {
    let is_float = |value| matches!(func.ty(value), Some(Type::Tensor(ty)) if ty.dtype.is_float());
    let params = func.body.params.iter().enumerate();
    params.filter(|(_, param)| is_float(**param)).map(|(number, _)| number).collect()
}

fn gradient_of(mesh: &Mesh, func: &Func, wrt: &[usize]) -> Result<Program, Box<Failure>> {
    if func.plan.is_some() {
        return Err(Failure::new(("a program", "a plan")));
    }
    let loss = check_loss(mesh, func)?;
    let by = arguments(mesh, func, wrt)?;
    let active = Active::new(func, &by, loss);
    let explicit = spread::make_spreads_explicit(mesh, func, &active)?;
    let by: Vec<Value> = wrt.iter().map(|number| explicit.body.params[*number]).collect();
    let active = Active::new(&explicit, &by, explicit.body.results[0]);
    let (copier, tape) = tape::record(mesh, &explicit, &active)?;
    let mut backward = Backward { builder: copier.builder, active: &active };
    let mut cotangents = Cotangents::new();
    let loss = backward.builder.tensor_ty(tape.results[0])?;
    let one = Constant { dtype: loss.dtype, shape: vec![], value: Elements::Float(1.0) };
    backward.builder.set_site(None);
    let one = backward.builder.one(one, &[])?;
    cotangents.insert((tape.results[0], 0), one);
    backward.block(&tape, &Values::Same, &mut cotangents)?;
    backward.builder.set_site(None);
    let mut results = tape.results.clone();
    for number in wrt {
        let param = tape.params[*number];
        let ty = backward.builder.tensor_ty(param)?;
        let made = cotangents.get(&(param, 0)).copied();
        results.push(made.map_or_else(|| backward.zeros(&ty), Ok)?);
    }
    let func = backward.builder.finish(&results);
    let mut program = Program { mesh: mesh.clone(), funcs: vec![func] };
    prune::prune(&mut program);
    match verify(&program).first() {
        Some(error) => {
            let broken = "the gradient does not verify; this is a defect of consort";
            Err(Failure::new(broken).row(error.headline()))
        }
        None => Ok(program),
    }
}

/// The loss: the first result, a 0-d float that is equal on all ranks.
fn check_loss(mesh: &Mesh, func: &Func) -> Result<Value, Box<Failure>> {
    let Some(loss) = func.body.results.first() else {
        return Err(Failure::new(("a loss as the first result", "no results")));
    };
    let ty = match func.ty(*loss) {
        Some(Type::Tensor(ty)) if ty.rank() == 0 && ty.dtype.is_float() => ty,
        Some(ty) => {
            let failure = Failure::new(("a loss that is a 0-d float", ty.display(mesh).to_string()));
            return Err(failure.note("the first result is the loss: `sum` or `mean` reduce it to one number"));
        }
        None => return Err(Failure::new(format!("{loss} has no type"))),
    };
    // Over an axis of one rank nothing differs.
    let differs: Axes = ty.varies.iter().filter(|axis| mesh.axis_size(*axis) > 1).collect();
    if differs.is_empty() {
        return Ok(*loss);
    }
    let axes = mesh.axes_text(differs);
    let failure =
        Failure::new(("a loss that is equal on all ranks", format!("one that differs over {axes}")));
    let rows = differs.iter().map(|axis| brought(mesh, func, *loss, axis));
    Err(failure.rows(rows).note(format!("average it over {axes}: an all_reduce by `avg` makes it equal")))
}

/// What brought an axis into a value: an argument that differs over it, or an op.
fn brought(mesh: &Mesh, func: &Func, value: Value, axis: Axis) -> String {
    let name = mesh.axis_name(axis);
    let differs = |value: &Value| func.ty(*value).is_some_and(|ty| ty.varies().contains(axis));
    let mut at = value;
    let mut nodes = func.body.nodes.iter().rev();
    while let Some(node) = nodes.find(|node| node.results.contains(&at)) {
        match node.args.iter().find(|arg| differs(arg)) {
            Some(arg) => at = *arg,
            None => {
                let line = node.site.map_or_else(String::new, |site| format!(" at {site}"));
                return format!("{name}: from `{}`{line}", node.op.info().name);
            }
        }
    }
    match func.body.params.iter().position(|param| *param == at) {
        Some(number) => format!("{name}: from argument {number}, {at}"),
        None => format!("{name}: from {at}"),
    }
}

/// The parameters of these numbers, which must be floats.
fn arguments(mesh: &Mesh, func: &Func, wrt: &[usize]) -> Result<Vec<Value>, Box<Failure>> {
    let params = &func.body.params;
    let param = |number: &usize| {
        let Some(param) = params.get(*number) else {
            let expected = format!("an argument below {}", params.len());
            return Err(Failure::new((expected, number.to_string())));
        };
        match func.ty(*param) {
            Some(ty @ Type::Tensor(_)) if has_floats(ty) => Ok(*param),
            ty => {
                let ty = ty.map_or_else(String::new, |ty| ty.display(mesh).to_string());
                Err(Failure::new(("a float tensor", ty)).of(format!("argument {number}")))
            }
        }
    };
    wrt.iter().map(param).collect()
}
