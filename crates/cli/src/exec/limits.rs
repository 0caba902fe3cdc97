//! The limits of a run of `consort exec`, their defaults, and the needs of a plan.

use consort_ir::cost;
use consort_ir::limits::{Excess, Limits, Resource};
use consort_ir::literal::MAX_ELEMENTS;
use consort_ir::mesh::Mesh;
use consort_ir::ops::EvalCx;
use consort_ir::program::{Block, Func};
use consort_ir::types::{TensorType, Type};
use consort_oracle::OracleError;
use consort_types::Site;
use serde_json::{Value, json};

use super::rank::{Failure, raises};

/// What a run may take
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Limit of memory per rank, or of the oracle, in bytes
    #[arg(long, value_name = "N")]
    limit_bytes: Option<u64>,
    /// Limit of steps per rank: ops run and loop iterations
    #[arg(long, value_name = "N")]
    limit_steps: Option<u64>,
    /// Limit of work per rank: arithmetic operations and bytes moved
    #[arg(long, value_name = "N")]
    limit_work: Option<u64>,
}

impl LimitArgs {
    /// The limits of each of `ranks` ranks.
    pub(super) fn of_ranks(&self, ranks: u32) -> Limits {
        self.or(Limits::RANKS, available().map(|bytes| bytes / u64::from(ranks.max(1))))
    }

    /// The limits of the oracle.
    pub(super) fn of_oracle(&self) -> Limits {
        self.or(Limits::ORACLE, available())
    }

    fn or(&self, default: Limits, share: Option<u64>) -> Limits {
        Limits {
            bytes: self.limit_bytes.unwrap_or(default.bytes.min(share.unwrap_or(u64::MAX))),
            steps: self.limit_steps.unwrap_or(default.steps),
            operations: self.limit_work.unwrap_or(default.operations),
        }
    }
}

/// Three quarters of the memory that is free on this machine, and in the control group of this process.
fn available() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let table = std::fs::read_to_string("/proc/meminfo").ok();
    let of_machine = table.as_deref().and_then(|table| {
        let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let of_group = [
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ];
    let of_group =
        of_group.iter().filter_map(|(most, used)| Some(number(most)?.saturating_sub(number(used)?)));
    of_machine.into_iter().chain(of_group).min().map(|bytes| bytes / 4 * 3)
}

/// An error of the oracle with a note on how to raise the limit.
pub(super) fn with_note(error: &OracleError) -> String {
    let note = match error {
        OracleError::Limit { excess, .. } => raises(excess.resource),
        _ => "",
    };
    format!("{error}{note}")
}

/// Encodes limits for a rank.
pub(super) fn to_json(limits: &Limits) -> Value {
    json!([limits.bytes, limits.steps, limits.operations])
}

/// The limits that the launching process has set.
pub(super) fn from_json(value: &Value) -> Limits {
    let number = |i: usize, default: u64| value[i].as_u64().unwrap_or(default);
    let Limits { bytes, steps, operations } = Limits::RANKS;
    Limits { bytes: number(0, bytes), steps: number(1, steps), operations: number(2, operations) }
}

/// Bytes of a rank's heap: the limit of the plan, and room for fragmentation. They cost memory only as they
/// are used.
pub(super) fn heap(limits: &Limits) -> usize {
    let bytes = limits.bytes.saturating_add(limits.bytes / 16).saturating_add(1 << 24);
    usize::try_from(bytes.min(1 << 46)).unwrap_or(usize::MAX)
}

/// The largest tensor of a plan, and where it is made.
struct Largest<'a> {
    bytes: u64,
    value: String,
    op: &'static str,
    site: Option<&'a Site>,
}

/// Bytes of an argument or a result in transit from or to the launching process: in its own type, and as a reference
/// tensor.
fn carried(sizes: &EvalCx<'_>, tensor: &TensorType) -> u64 {
    cost::number(sizes, &tensor.numel()).saturating_mul(tensor.dtype.size() as u64 + 8)
}

/// Bytes that a plan is known to need on its rank: its regions, and its arguments and results in transit.
fn needed(sizes: &EvalCx<'_>, plan: &Func) -> u64 {
    let regions = plan.plan.iter().flat_map(|head| &head.regions).map(|(_, bytes)| *bytes);
    let ends = plan.body.params.iter().chain(&plan.body.results).filter_map(|value| plan.ty(*value));
    let carried = ends.flat_map(Type::tensors).map(|tensor| carried(sizes, tensor));
    regions.chain(carried).fold(0, u64::saturating_add)
}

/// Refuses a plan that needs too much memory, before it runs.
pub(super) fn check(mesh: &Mesh, plan: &Func, limits: &Limits) -> Result<(), Failure> {
    let Some(head) = &plan.plan else { return Ok(()) };
    let symbols = head.symbols.iter().copied().collect();
    let sizes = EvalCx { mesh, rank: head.rank, symbols: &symbols };
    for result in &plan.body.results {
        let tensors = plan.ty(*result).map_or(&[][..], Type::tensors);
        let numel = tensors.iter().map(|tensor| cost::number(&sizes, &tensor.numel())).max().unwrap_or(0);
        if numel > MAX_ELEMENTS as u64 {
            return Err(Failure::too_many(&result.to_string(), numel));
        }
    }
    let Err(excess) = Excess::check(Resource::Bytes, limits.bytes, needed(&sizes, plan)) else {
        return Ok(());
    };
    let mut largest = None;
    find_largest(&sizes, plan, &plan.body, "parameter", None, &mut largest);
    let (op, of, site) = largest.map_or(("plan", String::new(), None), |largest| {
        (largest.op, format!(", {} of them for {}", largest.bytes, largest.value), largest.site)
    });
    let at = site.map_or(String::new(), |site| format!("\n  at {site}"));
    Err(Failure::refused(op, format!("{excess}{of}{at}{}", raises(Resource::Bytes))))
}

/// The largest value of a block that has its own memory; a view has none.
fn find_largest<'a>(
    sizes: &EvalCx<'_>,
    plan: &'a Func,
    block: &'a Block,
    op: &'static str,
    site: Option<&'a Site>,
    largest: &mut Option<Largest<'a>>,
) {
    let mut note = |value: &consort_ir::entity::Value, op, site| {
        let tensors = plan.ty(*value).map_or(&[][..], Type::tensors);
        let bytes =
            tensors.iter().fold(0u64, |all, tensor| all.saturating_add(cost::number(sizes, &tensor.bytes())));
        if largest.as_ref().is_none_or(|largest| largest.bytes < bytes) {
            *largest = Some(Largest { bytes, value: value.to_string(), op, site });
        }
    };
    block.params.iter().for_each(|param| note(param, op, site));
    for node in block.nodes.iter().filter(|node| node.plan.as_ref().is_none_or(|plan| !plan.view)) {
        node.results.iter().for_each(|result| note(result, node.op.info().name, node.site.as_ref()));
    }
    for node in &block.nodes {
        for inside in &node.blocks {
            find_largest(sizes, plan, inside, node.op.info().name, node.site.as_ref(), largest);
        }
    }
}
