//! One rank of `consort exec`: plans a function for itself, lowers the plan and runs it on a group.

use std::time::{Duration, Instant};

use consort_comm::{CommError, Group};
use consort_ir::mesh::{self, Mesh, Rank};
use consort_ir::oracle;
use consort_ir::program::{Block, Func, Program};
use consort_ir::tensor::Tensor;
use consort_ir::types::Type;
use consort_ir::verify::hazards;
use consort_passes::{At, Options, PASSES, simplify};
use consort_runtime::execute::{ArgValue, Exec, Out, OutTensor, RunCx, RunError};
use consort_runtime::threads::Threads;

/// Why a rank gave no results.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    /// Whether it is only what another rank's failure looks like from here.
    pub(crate) follows: bool,
}

impl From<String> for Failure {
    fn from(message: String) -> Failure {
        Failure { message, follows: false }
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Failure {
        let follows = matches!(
            error,
            CommError::Left { .. }
                | CommError::Elsewhere { .. }
                | CommError::Panicked { .. }
                | CommError::OtherGroup { .. }
        );
        Failure { message: error.to_string(), follows }
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        let follows = error.comm_error().is_some_and(|error| Failure::from(error.clone()).follows);
        Failure { message: error.to_string(), follows }
    }
}

/// A function, lowered for this rank, with the groups that it wants.
pub(crate) struct Ready {
    pub(crate) plan: Func,
    pub(crate) exec: Exec,
    groups: Vec<Option<Group>>,
    all: Group,
    timeout: Duration,
}

/// Simplifies, plans and lowers a function for this rank of the group of all. `inputs` has the arguments of every rank;
/// they are given away, or not.
pub(crate) fn prepare(
    program: &Program,
    func: &Func,
    all: &Group,
    inputs: &[Vec<Tensor>],
    donated: bool,
    timeout: Duration,
) -> Result<Ready, Failure> {
    let (mesh, rank) = (&program.mesh, Rank(all.rank() as u32));
    let symbols = oracle::bind(mesh, func, inputs)?;
    let mut alone = Program { mesh: mesh.clone(), funcs: vec![func.clone()] };
    // A plan in a text is one rank's, and every rank makes its own.
    alone.funcs.iter_mut().for_each(|func| func.plan = None);
    alone.funcs.iter_mut().for_each(|func| strip(&mut func.body));
    let alone =
        simplify(&alone, PASSES, &Options::default(), &mut |_| {}).map_err(|error| error.to_string())?;
    let func = alone.funcs.first().ok_or_else(|| "there is no function".to_string())?;
    let donated = vec![donated; func.body.params.len()];
    let at = At { rank, symbols: &symbols[all.rank()], donated: &donated };
    let plan = consort_passes::plan(mesh, func, &at).map_err(|error| error.to_string())?;
    if let Some(error) = hazards(mesh, &plan).first() {
        return Err(format!("the plan is wrong, which is a defect of consort: {}", error.headline()).into());
    }
    Ready::new(mesh, plan, all, timeout)
}

impl Ready {
    /// Lowers a plan of this rank, and makes the groups that it wants.
    pub(crate) fn new(mesh: &Mesh, plan: Func, all: &Group, timeout: Duration) -> Result<Ready, Failure> {
        // All ranks make all groups that the program names, in its order.
        let mut made = Vec::new();
        make_groups(mesh, &plan.body, all, Instant::now() + timeout, &mut made)?;
        let exec = Exec::lower(mesh, &plan, &|_| None)?;
        let group = |over: &mesh::Group| {
            made.iter().find(|(other, _)| other == over).and_then(|(_, group)| group.clone())
        };
        let groups = exec.groups().iter().map(group).collect();
        Ok(Ready { plan, exec, groups, all: all.clone(), timeout })
    }
}

impl Ready {
    /// Runs it once on this rank's arguments.
    pub(crate) fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>, Failure> {
        let Ready { plan, exec, groups, all, timeout } = self;
        let heap = all.heap();
        let mut args = Vec::new();
        for (param, input) in plan.body.params.iter().zip(inputs) {
            args.push(match plan.ty(*param) {
                Some(Type::Size(..)) => ArgValue::Size(input.as_size().unwrap_or(0)),
                _ => ArgValue::Tensor { buffer: heap.alloc_from(&input.to_bytes())?, pending: None },
            });
        }
        let cx = RunCx { heap, groups, threads: &Threads::ONE, timeout: *timeout };
        let mut outs = exec.run(&cx, &mut args)?;
        // Results may lie beside one another in one buffer, which can be read when nothing is in flight into it.
        for out in &mut outs {
            if let Out::Pending { pending, .. } = out {
                for pending in std::mem::take(pending) {
                    pending.wait_within(*timeout)?;
                }
            }
        }
        let mut results = Vec::new();
        for out in outs {
            match out {
                Out::Tensor(out) => results.push(tensor(&out)?),
                Out::Size(value) => results.push(Tensor::size(value)),
                Out::Pending { tensors, .. } => {
                    for out in &tensors {
                        results.push(tensor(out)?);
                    }
                }
            }
        }
        Ok(results)
    }
}

/// A result, element by element.
fn tensor(out: &OutTensor) -> Result<Tensor, Failure> {
    let OutTensor { buffer, layout, dtype, .. } = out;
    let (bytes, width) = (buffer.bytes()?, dtype.size());
    let mut packed = Vec::with_capacity(layout.numel() * width);
    for i in 0..layout.numel() {
        let (mut rest, mut at) = (i, layout.start);
        for (size, stride) in layout.shape.iter().zip(&layout.strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        packed.extend_from_slice(bytes.get(at * width..(at + 1) * width).unwrap_or_default());
    }
    let tensor = Tensor::from_bytes(*dtype, layout.shape.to_vec(), &packed);
    tensor.ok_or_else(|| "a result has more elements than can be shown".to_string().into())
}

/// Takes out what plans say.
fn strip(block: &mut Block) {
    block.places.clear();
    for node in &mut block.nodes {
        node.plan = None;
        node.blocks.iter_mut().for_each(strip);
    }
}

/// The groups that a block names, and what they are here.
fn make_groups(
    mesh: &Mesh,
    block: &Block,
    all: &Group,
    until: Instant,
    made: &mut Vec<(mesh::Group, Option<Group>)>,
) -> Result<(), CommError> {
    for node in &block.nodes {
        if let Some(over) = node.op.effects().starts()
            && made.iter().all(|(other, _)| *other != over)
        {
            let ranks = (0..mesh.n_ranks()).map(Rank);
            let mut lists: Vec<Vec<usize>> = ranks
                .filter_map(|rank| mesh.members(over, rank))
                .map(|members| members.into_iter().map(|rank| rank.0 as usize).collect())
                .collect();
            lists.sort();
            lists.dedup();
            let whole = over == mesh::Group::Axes(mesh.all_axes());
            let group = if whole { Some(all.clone()) } else { all.subgroup(&lists, until)? };
            made.push((over, group));
        }
        for block in &node.blocks {
            make_groups(mesh, block, all, until, made)?;
        }
    }
    Ok(())
}
