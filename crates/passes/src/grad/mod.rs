//! Gradients: from a program to the program that also computes the cotangents of its arguments.
//!
//! A transformation of programs, never a tape of what ran. Three steps, each a module:
//!
//! - `spread` makes explicit where a value that is equal on ranks enters a computation that differs between them. Only
//!   there does a gradient sum over ranks, whatever the program communicates.
//! - `tape` copies the forward, and lets blocks return what their backward needs; `prune` takes out the rest. `keep` says
//!   what is not kept; `values` computes it again.
//! - `backward` emits the rules of the ops (`OpDef::vjp`) in reverse order, `blocks` those of ops with blocks;
//!   `accumulate` adds what they give, the cotangents of slices in place. Then `scatter` makes a sum of which a rank reads its own slice alone a reduce_scatter.
//!
//! The result is an ordinary function of the same name: its results are those of the function, and then a cotangent for
//! each argument asked for. `notes` tells where these are summed over ranks. Each node of the backward has the source line of the
//! node of the forward that it comes from.

mod accumulate;
mod active;
mod backward;
mod blocks;
mod budget;
mod choose;
mod copy;
mod keep;
mod notes;
mod origin;
mod prune;
mod scatter;
mod spread;
mod tape;
mod tiles;
mod values;

use accumulate::Parts;
use consort_ir::entity::Value;
use consort_ir::infer::fits;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Constant, Elements};
use consort_ir::program::{Func, Program};
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_types::{Axes, Axis, Dtype, Failure};

use active::{Active, has_floats};
use backward::{Backward, Cotangents};
use keep::Again;
pub use notes::Summed;
use tape::Tape;
use values::Values;

/// What is asked of a gradient.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The arguments that it is taken by, by their numbers.
    pub by: Vec<usize>,
    /// For each result, the number of the argument that is its cotangent; none for zero. Without it the first result is
    /// the loss: a 0-d float that is equal on all ranks.
    pub cotangents: Option<Vec<Option<usize>>>,
    /// Axes over which the loss may differ: ranks apart along them have losses of their own, of which the sum is meant.
    pub apart: Axes,
    /// The element type of the sums that it takes over ranks, where the summands have a smaller one.
    pub sums: Option<Dtype>,
    /// How many bytes may be kept for the backward; more is kept only if less is not possible.
    pub budget: Option<u64>,
    /// Whether ops that are there for their gradient alone stay, because another gradient will be taken of this one.
    pub keeps_rules: bool,
}

impl Wanted {
    /// The gradient of the loss by some arguments, given by their numbers.
    pub fn by(arguments: impl Into<Vec<usize>>) -> Wanted {
        Wanted { by: arguments.into(), ..Wanted::default() }
    }
}

/// A function with its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradient {
    /// The program of the function, which also returns the cotangents.
    pub program: Program,
    /// For each argument that it is taken by, where its gradient is summed over ranks.
    pub sums: Vec<Summed>,
    /// The bytes that are kept for the backward besides arguments, if there is a budget for them.
    pub kept: Option<u64>,
    /// What is probably not meant.
    pub warnings: Vec<Failure>,
}

/// The program of a function and its gradient. The program must verify.
pub fn gradient(program: &Program, func: &str, wanted: &Wanted) -> Result<Gradient, Box<Failure>> {
    let found = program.func(func).ok_or_else(|| Failure::new(format!("there is no function @{func}")))?;
    gradient_of(&program.mesh, found, wanted).map_err(|failure| failure.of("grad"))
}

/// The numbers of the arguments that a gradient may be taken by: tensors of floats.
pub fn float_arguments(func: &Func) -> Vec<usize> {
    let is_float = |value| matches!(func.ty(value), Some(Type::Tensor(ty)) if ty.dtype.is_float());
    let params = func.body.params.iter().enumerate();
    params.filter(|(_, param)| is_float(**param)).map(|(number, _)| number).collect()
}

fn gradient_of(mesh: &Mesh, func: &Func, wanted: &Wanted) -> Result<Gradient, Box<Failure>> {
    if func.plan.is_some() {
        return Err(Failure::new(("a program", "a plan")));
    }
    let seeds = seeds(mesh, func, wanted)?;
    let from: Vec<Value> = seeds.iter().map(|(result, _)| func.body.results[*result]).collect();
    let active = Active::new(func, &arguments(mesh, func, wanted)?, &from);
    let warnings = notes::warnings(mesh, func, &active);
    let explicit = spread::make_spreads_explicit(mesh, func, &active)?;
    let by: Vec<Value> = wanted.by.iter().map(|number| explicit.body.params[*number]).collect();
    let from: Vec<Value> = seeds.iter().map(|(result, _)| explicit.body.results[*result]).collect();
    let active = Active::new(&explicit, &by, &from);
    let sums = notes::sums(mesh, &explicit, &active, &wanted.by);
    let mut again = Again::marked(&explicit)?;
    let derive = |again: &Again| derive(mesh, (&explicit, &active, again), &seeds, wanted);
    let mut made = derive(&again)?;
    let mut kept = None;
    if let Some(budget) = wanted.budget {
        budget::fit(mesh, &explicit, &made, &mut again, budget);
        made = derive(&again)?;
        kept = Some(budget::kept(mesh, &explicit, &made));
    }
    let Made { mut func, first, .. } = made;
    scatter::scatter_sums(mesh, &mut func, first);
    if !wanted.keeps_rules {
        prune::take_out_rules(&mut func);
    }
    prune::prune(&mut func);
    let program = Program { mesh: mesh.clone(), funcs: vec![func] };
    match verify(&program).first() {
        Some(error) => {
            let broken = "the gradient does not verify; this is a defect of consort";
            Err(Failure::new(broken).row(error.headline()))
        }
        None => Ok(Gradient { program, sums, kept, warnings }),
    }
}

/// A function with its gradient, before it is finished.
struct Made<'a> {
    func: Func,
    tape: Tape<'a>,
    /// The first value of the backward.
    first: Value,
}

/// Makes the gradient, with some values of the forward computed again.
fn derive<'a>(
    mesh: &'a Mesh,
    (func, active, again): (&'a Func, &Active, &Again),
    seeds: &[(usize, Option<usize>)],
    wanted: &Wanted,
) -> Result<Made<'a>, Box<Failure>> {
    let (copier, tape) = tape::record(mesh, func, active, again)?;
    let mut backward =
        Backward { builder: copier.builder, active, sums: wanted.sums, parts: Parts::default() };
    let mut cotangents = Cotangents::new();
    backward.builder.set_site(None);
    let (_, first) = backward.builder.mark();
    for (result, cotangent) in seeds {
        let cotangent = match cotangent {
            Some(number) => tape.params[*number],
            None => {
                let dtype = backward.builder.tensor_ty(tape.results[*result])?.dtype;
                let one = Constant { dtype, shape: vec![], value: Elements::Float(1.0) };
                backward.builder.one(one, &[])?
            }
        };
        backward.add(&mut cotangents, (tape.results[*result], 0), cotangent)?;
    }
    backward.block(&tape, &mut Values::same(), &mut cotangents)?;
    backward.builder.set_site(None);
    let mut results = tape.results.clone();
    for number in &wanted.by {
        let param = tape.params[*number];
        let ty = backward.builder.tensor_ty(param)?;
        let made = cotangents.get(&(param, 0)).copied();
        results.push(made.map_or_else(|| backward.zeros(&ty), Ok)?);
    }
    let mut func = backward.builder.finish(&results);
    prune::prune(&mut func);
    Ok(Made { func, tape, first })
}

/// The results that cotangents start from, each with the argument that is its cotangent; a loss has none, and its
/// cotangent is 1.
fn seeds(mesh: &Mesh, func: &Func, wanted: &Wanted) -> Result<Vec<(usize, Option<usize>)>, Box<Failure>> {
    let Some(cotangents) = &wanted.cotangents else {
        check_loss(mesh, func, wanted.apart)?;
        return Ok(vec![(0, None)]);
    };
    let facts = func.entry_facts(mesh);
    let mut seeds = Vec::new();
    for (i, (result, number)) in func.body.results.iter().zip(cotangents).enumerate() {
        let (Some(number), Some(ty)) = (number, func.ty(*result).filter(|ty| has_floats(ty))) else {
            continue;
        };
        let given = func.body.params.get(*number).and_then(|param| func.ty(*param));
        if !given.is_some_and(|given| fits(given, ty, &facts)) {
            let given = given.map_or_else(|| "none".to_string(), |ty| ty.display(mesh).to_string());
            let expected = format!("a cotangent of result {i} of type {}", ty.display(mesh));
            return Err(Failure::new((expected, given))
                .note("it has the element type and the shape of the result, and differs over no more axes"));
        }
        seeds.push((i, Some(*number)));
    }
    Ok(seeds)
}

/// The loss: the first result, a 0-d float that is equal on all ranks but those apart.
fn check_loss(mesh: &Mesh, func: &Func, apart: Axes) -> Result<(), Box<Failure>> {
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
    let differs = ty.varies.minus(apart).iter().filter(|axis| mesh.axis_size(*axis) > 1).collect::<Axes>();
    if differs.is_empty() {
        return Ok(());
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
fn arguments(mesh: &Mesh, func: &Func, wanted: &Wanted) -> Result<Vec<Value>, Box<Failure>> {
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
                let failure = Failure::new(("a float tensor", ty)).of(format!("argument {number}"));
                Err(failure.note(match wanted.cotangents {
                    // A `vjp` has its cotangents where others have data.
                    Some(_) => "data without a derivative must be captured",
                    None => {
                        "data without a derivative must be captured, or be the second argument of \
                         `value_and_grad_first`"
                    }
                }))
            }
        }
    };
    wanted.by.iter().map(param).collect()
}
