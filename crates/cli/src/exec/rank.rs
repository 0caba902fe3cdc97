//! One rank of `consort exec`: plans a function for itself, lowers the plan and runs it on a group.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use consort_comm::{CommError, Group, from_now};
use consort_ir::index::Sym;
use consort_ir::limits::{Excess, Limits, Resource};
use consort_ir::literal::{Literal, MAX_ELEMENTS};
use consort_ir::mesh::Mesh;
use consort_ir::program::{Block, Func, Program};
use consort_ir::types::Type;
use consort_passes::{Binding, PassCx, compile};
use consort_runtime::RunError;
use consort_runtime::device::Cpu;
use consort_runtime::execute::{ArgValue, Exec, Out, OutTensor, RunCx};
use consort_types::{GroupName, Rank};

/// Why a rank failed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failure {
    /// The op that failed, if it was one.
    pub(crate) op: Option<String>,
    pub(crate) message: String,
    /// Whether it is only a consequence of another rank's failure.
    pub(crate) follows: bool,
    /// Whether it was refused, because it exceeds a limit.
    pub(crate) refused: bool,
}

impl Failure {
    /// The failure of a run that exceeds a limit.
    pub(crate) fn refused(op: &str, message: String) -> Failure {
        Failure { op: Some(op.to_string()), message, follows: false, refused: true }
    }

    /// The failure of a result that is too large for the launching process.
    pub(crate) fn too_many(value: &str, numel: u64) -> Failure {
        let got = if numel == u64::MAX { "more".to_string() } else { numel.to_string() };
        let failure = consort_types::Failure::new((format!("at most {MAX_ELEMENTS} elements"), got));
        let failure = failure.of(value.to_string());
        Failure::refused("return", failure.note("return a part of it, or a reduction of it").to_string())
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Failure {
        Failure { message, ..Failure::default() }
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Failure {
        Failure { message: error.to_string(), follows: error.follows(), ..Failure::default() }
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        let follows = error.comm_error().is_some_and(CommError::follows);
        let mut failure = error.failure();
        // A failure may name a part of the call beside the op, and then tells it itself.
        let op = error.op().filter(|op| failure.op == *op).map(str::to_string);
        if op.is_some() {
            failure.op = "".into();
        }
        Failure { op, message: failure.to_string(), follows, refused: false }
    }
}

/// The failure of a run that exceeds a limit, if it does: too much work, or no memory for data-dependent sizes.
fn refusal(error: &RunError, limits: &Limits) -> Option<Failure> {
    let excess = error.excess().or_else(|| match error.comm_error()? {
        CommError::Exhausted { asked, used, .. } => {
            // Other memory in use is counted only if it makes the difference.
            let asked = *asked as u64;
            let got = if asked > limits.bytes { asked } else { asked.saturating_add(*used as u64) };
            Some(Excess { resource: Resource::Bytes, limit: limits.bytes, got })
        }
        _ => None,
    })?;
    let at = error.site().map_or(String::new(), |site| format!("\n  at {site}"));
    Some(Failure::refused(error.op().unwrap_or("plan"), format!("{excess}{at}{}", raises(excess.resource))))
}

/// A note on the option that raises a limit.
pub(crate) fn raises(resource: Resource) -> &'static str {
    match resource {
        Resource::Bytes => "\n  note: --limit-bytes raises the limit",
        Resource::Steps => "\n  note: --limit-steps raises the limit",
        Resource::Operations => "\n  note: --limit-work raises the limit",
    }
}

/// A function, lowered for this rank, with the groups that it needs.
pub(crate) struct Ready {
    pub(crate) plan: Func,
    pub(crate) exec: Exec,
    groups: Vec<Option<Group>>,
    all: Group,
    timeout: Duration,
    limits: Option<Limits>,
}

/// Simplifies, plans and lowers a function for this rank of the group of all, for the symbols that its arguments
/// bind ([`consort_oracle::bind`]). `donated` says whether the arguments are donated.
pub(crate) fn prepare(
    program: &Program,
    func: &Func,
    all: &Group,
    symbols: &BTreeMap<Sym, i64>,
    donated: bool,
    timeout: Duration,
) -> Result<Ready, Failure> {
    let (mesh, rank) = (&program.mesh, Rank(all.rank() as u32));
    let mut alone = Program { mesh: mesh.clone(), funcs: vec![func.clone()] };
    // A plan in a text belongs to one rank, and every rank makes its own.
    alone.funcs.iter_mut().for_each(|func| func.plan = None);
    alone.funcs.iter_mut().for_each(|func| strip(&mut func.body));
    let cx = &mut PassCx::default();
    // The command reports this as a warning.
    cx.may_diverge = true;
    let decided = compile(&alone, cx).map_err(|error| error.to_string())?;
    let donated = vec![donated; func.body.params.len()];
    let binding = Binding { rank, symbols, donated: &donated };
    let plan = decided.bind(&func.name, &binding, cx).map_err(|error| error.to_string())?;
    Ready::new(mesh, plan, all, timeout)
}

impl Ready {
    /// Lowers a plan of this rank, and creates the groups that it needs.
    pub(crate) fn new(mesh: &Mesh, plan: Func, all: &Group, timeout: Duration) -> Result<Ready, Failure> {
        // All ranks create all groups that the program names, in its order.
        let mut made = Vec::new();
        make_groups(mesh, &plan.body, all, from_now(timeout), &mut made)?;
        let exec = Exec::lower(mesh, &plan, &Cpu::default())?;
        let group = |over: &GroupName| {
            made.iter().find(|(other, _)| other == over).and_then(|(_, group)| group.clone())
        };
        let groups = exec.groups().iter().map(group).collect();
        Ok(Ready { plan, exec, groups, all: all.clone(), timeout, limits: None })
    }

    /// Sets the limits of a run.
    pub(crate) fn limit(&mut self, limits: Limits) {
        self.exec.limit(limits);
        self.limits = Some(limits);
    }

    /// Runs it once on this rank's arguments.
    pub(crate) fn run(&mut self, inputs: &[Literal]) -> Result<Vec<Literal>, Failure> {
        let Ready { plan, exec, groups, all, timeout, limits } = self;
        let failure = |error: RunError| match limits.and_then(|limits| refusal(&error, &limits)) {
            Some(refusal) => refusal,
            None => error.into(),
        };
        let heap = all.heap();
        let mut args = Vec::new();
        for (param, input) in plan.body.params.iter().zip(inputs) {
            args.push(match plan.ty(*param) {
                Some(Type::Size(..)) => ArgValue::Size(input.as_size().unwrap_or(0)),
                _ => ArgValue::Tensor { buffer: heap.alloc_from(&input.to_bytes())?, pending: None },
            });
        }
        let cx = RunCx { heap, groups, device: &Cpu::default(), timeout: *timeout, clock: &Instant::now };
        let mut outs = exec.run(&cx, &mut args).map_err(failure)?;
        // Results may share one buffer, which can be read when no pending operation writes to it.
        for out in &mut outs {
            if let Out::Pending { pending, .. } = out
                && let Some(pending) = pending.take()
            {
                pending.wait_within(*timeout)?;
            }
        }
        let mut results = Vec::new();
        for out in outs {
            match out {
                Out::Tensor(out) => results.push(tensor(&out)?),
                Out::Size(value) => results.push(Literal::size(value)),
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
fn tensor(out: &OutTensor) -> Result<Literal, Failure> {
    let OutTensor { buffer, layout, dtype, .. } = out;
    // Elements that share memory are counted separately, and may exceed the machine's memory.
    let numel = layout.shape.iter().fold(1u64, |all, size| all.saturating_mul(*size as u64));
    if numel > MAX_ELEMENTS as u64 {
        return Err(Failure::too_many("a result", numel));
    }
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
    let tensor = Literal::from_bytes(*dtype, layout.shape.to_vec(), &packed);
    tensor.ok_or_else(|| "the size of a result does not match its type".to_string().into())
}

/// Removes the annotations of plans.
fn strip(block: &mut Block) {
    block.places.clear();
    for node in &mut block.nodes {
        node.plan = None;
        node.blocks.iter_mut().for_each(strip);
    }
}

/// Creates the groups that a block names.
fn make_groups(
    mesh: &Mesh,
    block: &Block,
    all: &Group,
    until: Instant,
    made: &mut Vec<(GroupName, Option<Group>)>,
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
            let whole = over == GroupName::Axes(mesh.all_axes());
            let group = if whole { Some(all.clone()) } else { all.subgroup(&lists, until)? };
            made.push((over, group));
        }
        for block in &node.blocks {
            make_groups(mesh, block, all, until, made)?;
        }
    }
    Ok(())
}
