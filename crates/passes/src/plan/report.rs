//! The cost of a plan, computed from its text: memory, and bytes copied for communication.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::cost::number as number_of;
use consort_ir::entity::{Value, ValueMap};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, EvalCx, Flow, Trips};
use consort_ir::plan::{NodePlan, Place, Region, RegionKind};
use consort_ir::program::{Block, Func, Node};
use consort_ir::storage::{Extent, Piece, Placement, arrived, copies_for_communication, pieces};
use consort_ir::types::{TensorType, Type};
use consort_types::Held;
use consort_types::layout::Layout;

use super::uses::Uses;

/// The cost of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanReport {
    /// The memory of the plan besides its arguments; unbacked sizes are not counted.
    pub peak_bytes: u64,
    /// The peak of live bytes over all lines.
    pub live_bytes: u64,
    /// Copies for communication.
    pub copies: Vec<Copy>,
    /// The total bytes of all copies of a call, of both blocks of a `cond`.
    pub copied_bytes: u64,
}

/// A copy for communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The node, counted through all blocks.
    pub node: usize,
    /// The operand.
    pub value: Value,
    /// The bytes of all iterations of the loops around it.
    pub bytes: u64,
    /// The reason.
    pub why: Why,
}

/// Why a plan copies for communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The storage of an operand cannot be overwritten, or has gaps.
    Held(Held),
    /// What communication gave goes into a slice of a tensor, and could not be placed there.
    Slice,
}

impl Why {
    /// How reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Why::Held(held) => held.name(),
            Why::Slice => "back into a slice",
        }
    }
}

/// The cost of a plan. A function that is not a plan costs nothing.
pub fn report(mesh: &Mesh, func: &Func) -> PlanReport {
    let Some(head) = &func.plan else { return PlanReport::default() };
    let symbols = head.symbols.iter().copied().collect();
    let sizes = EvalCx { mesh, rank: head.rank, symbols: &symbols };
    let Reader { live, mut report, .. } = Reader::of(func, sizes);
    let counted = |region: &Region| region.is_kept() || matches!(region.kind, RegionKind::Out(_));
    report.peak_bytes = head.regions.iter().filter(|(region, _)| counted(region)).map(|(_, size)| size).sum();
    report.live_bytes = most(&live.into_iter().filter(|held| counted(&held.region)).collect::<Vec<_>>());
    report.copied_bytes = report.copies.iter().fold(0, |all, copy| all.saturating_add(copy.bytes));
    report
}

/// The largest sum of the bytes of a plan that are alive at one time, of the values that `counts` selects by their place:
/// each byte once, those of arguments during the whole call. With a value `over`, only what was defined before it and is
/// read after it.
pub fn alive(mesh: &Mesh, func: &Func, over: Option<Value>, counts: impl Fn(Value, Region) -> bool) -> u64 {
    let Some(head) = &func.plan else { return 0 };
    let symbols = head.symbols.iter().copied().collect();
    let reader = Reader::of(func, EvalCx { mesh, rank: head.rank, symbols: &symbols });
    let line = over.and_then(|over| reader.held_by(&[over]).first().map(|held| reader.live[*held].def));
    let (end, mut live) = (reader.line, reader.live);
    for held in live.iter_mut().filter(|held| held.region.is_arg()) {
        (held.def, held.last) = (0, end);
    }
    live.retain(|held| {
        counts(held.value, held.region) && line.is_none_or(|line| held.def < line && line < held.last)
    });
    most(&live)
}

/// Bytes with their live range.
#[derive(Clone, Copy, Debug)]
struct Lifetime {
    value: Value,
    def: u32,
    last: u32,
    region: Region,
    from: u64,
    to: u64,
}

struct Reader<'a> {
    func: &'a Func,
    sizes: EvalCx<'a>,
    uses: Uses<'a>,
    /// The placement of each tensor of a value; no layout if sizes are unknown.
    located: ValueMap<Vec<(Place, Option<Layout>)>>,
    /// Whether all users of a value are starts.
    only_started: ValueMap<bool>,
    live: Vec<Lifetime>,
    /// The ranges of each value in `live`.
    held: ValueMap<std::ops::Range<usize>>,
    /// The values that hold what communication gave.
    arrived: BTreeSet<Value>,
    /// How often the current block runs.
    trips: u64,
    line: u32,
    node: usize,
    report: PlanReport,
}

impl<'a> Reader<'a> {
    /// Reads all lines of a plan.
    fn of(func: &'a Func, sizes: EvalCx<'a>) -> Reader<'a> {
        let mut reader = Reader {
            func,
            sizes,
            uses: Uses::new(func),
            located: ValueMap::default(),
            only_started: ValueMap::default(),
            live: Vec::new(),
            held: ValueMap::default(),
            arrived: arrived(&func.body),
            trips: 1,
            line: 0,
            node: 0,
            report: PlanReport::default(),
        };
        reader.started(&func.body);
        reader.block(&func.body, false);
        reader
    }

    fn started(&mut self, block: &'a Block) {
        for node in &block.nodes {
            let starts = node.op.effects().starts().is_some();
            for arg in &node.args {
                let only = starts && self.only_started.get(*arg) != Some(&false);
                self.only_started.insert(*arg, only);
            }
            node.blocks.iter().for_each(|block| self.started(block));
        }
        for result in &block.results {
            self.only_started.insert(*result, false);
        }
    }

    /// Reads a block; in that of a loop the parameters are live until its end.
    fn block(&mut self, block: &'a Block, loops: bool) {
        let params: Vec<_> = self.contiguous(&block.params, &block.places);
        let first = self.live.len();
        self.define(&block.params, params);
        let entered = first..self.live.len();
        for node in &block.nodes {
            self.line += 1;
            self.node(node);
        }
        self.line += 1;
        if loops {
            self.live[entered].iter_mut().for_each(|held| held.last = held.last.max(self.line));
        }
    }

    fn node(&mut self, node: &'a Node) {
        let number = self.node;
        self.node += 1;
        let none = NodePlan::default();
        let plan = node.plan.as_deref().unwrap_or(&none);
        for (value, why) in &plan.copies {
            self.copy(number, *value, self.bytes(*value), Why::Held(*why));
        }
        if node.op.alias() == Alias::View && !plan.view {
            let sent = |result: &&Value| self.only_started.get(**result) == Some(&true);
            for result in node.results.iter().filter(sent).collect::<Vec<_>>() {
                self.copy(number, *result, self.bytes(*result), Why::Held(Held::Gaps));
            }
        }
        let outside = self.trips;
        self.trips = match node.op.flow() {
            Flow::Loop { trips: Trips::Count(length), .. } => {
                outside.saturating_mul(number_of(&self.sizes, length))
            }
            Flow::Loop { trips: Trips::While { expected, .. }, .. } => {
                outside.saturating_mul(expected as u64)
            }
            Flow::Straight | Flow::Cond => outside,
        };
        for inside in &node.blocks {
            self.block(inside, matches!(node.op.flow(), Flow::Loop { .. }));
        }
        self.trips = outside;
        let located = if plan.view { self.view(node) } else { self.contiguous(&node.results, &plan.places) };
        self.define(&node.results, located);
        if node.op.joins() {
            self.join(node, number);
        }
        if plan.view {
            // The bytes of a view are live since its operand was defined.
            let def = self.held_by(&node.args).first().map(|held| self.live[*held].def);
            for held in self.held_by(&node.results) {
                self.live[held].def = def.unwrap_or(self.line);
            }
        } else {
            let holds = node.op.effects().starts().map(|_| self.uses.get(node.results[0]).holds);
            for held in self.held_by(&node.args) {
                self.live[held].last = self.live[held].last.max(holds.unwrap_or(self.line));
            }
        }
    }

    fn copy(&mut self, node: usize, value: Value, bytes: u64, why: Why) {
        let bytes = bytes.saturating_mul(self.trips);
        self.report.copies.push(Copy { node, value, bytes, why });
    }

    /// What a join copies of what communication gave, and of the tensor into a slice of which that goes.
    fn join(&mut self, node: &Node, number: usize) {
        let counted = |operand: &usize| copies_for_communication(node, *operand, &self.arrived);
        let counted: Vec<usize> = (0..node.args.len()).filter(counted).collect();
        let args: Option<Vec<Placement>> = node.args.iter().map(|arg| self.placement(*arg)).collect();
        let (Some(args), Some(result)) = (args, self.placement(node.results[0])) else { return };
        let Some(pieces) = pieces(&*node.op, &self.sizes, &args, &result).filter(|_| !counted.is_empty())
        else {
            return;
        };
        // As the executor: the base is copied whole, unless a part lies in place already.
        let is_base = |piece: &Piece| node.op.alias() == Alias::First && piece.operand == 0;
        let at_once = !args[0].same(&result) && !pieces.iter().any(|piece| !is_base(piece) && piece.stays());
        for operand in counted {
            let moved = pieces.iter().filter(|piece| piece.operand == operand && !piece.stays());
            let why = if node.op.alias() == Alias::First && operand == 0 {
                let region = args[0].place.region;
                Why::Held(if region.is_arg() { Held::Argument } else { Held::Needed })
            } else {
                Why::Slice
            };
            let bytes = match at_once && operand == 0 && node.op.alias() == Alias::First {
                true => self.bytes(node.args[0]),
                false => moved.map(|piece| bytes_of(&piece.from)).sum(),
            };
            if bytes > 0 {
                self.copy(number, node.args[operand], bytes, why);
            }
        }
    }

    /// Where the elements of a tensor lie, if that is known.
    fn placement(&self, value: Value) -> Option<Placement> {
        let (place, layout) = self.located.get(value)?.first()?;
        let width = self.func.ty(value).and_then(Type::as_tensor)?.dtype.size();
        Some(Placement { place: *place, width, extent: Extent::At(layout.clone()?) })
    }

    /// The live ranges of some values.
    fn held_by(&self, values: &[Value]) -> Vec<usize> {
        values.iter().filter_map(|value| self.held.get(*value)).cloned().flatten().collect()
    }

    fn bytes(&self, value: Value) -> u64 {
        let bytes = self.func.ty(value).and_then(Type::as_tensor).map(TensorType::bytes);
        bytes.and_then(|bytes| self.sizes.size(&bytes).ok()).unwrap_or(0) as u64
    }

    /// Contiguous placements of values at these places.
    fn contiguous(&self, values: &[Value], places: &[Place]) -> Vec<Vec<(Place, Option<Layout>)>> {
        let mut places = places.iter();
        let mut layouts = |value: &Value| {
            let tensors = self.func.ty(*value).map_or(&[][..], Type::tensors);
            let located = |(tensor, place): (&TensorType, &Place)| {
                let shape: Option<Vec<usize>> =
                    tensor.shape.iter().map(|size| self.sizes.size(size).ok()).collect();
                (*place, shape.map(|shape| Layout::contiguous(&shape)))
            };
            tensors.iter().zip(places.by_ref()).map(located).collect()
        };
        values.iter().map(&mut layouts).collect()
    }

    fn view(&self, node: &Node) -> Vec<Vec<(Place, Option<Layout>)>> {
        let Some((place, layout)) = self.located.get(node.args[0]).and_then(|located| located.first()) else {
            return Vec::new();
        };
        let layouts = layout.as_ref().and_then(|x| node.op.view(&self.sizes, x).ok().flatten());
        let layout = |i: usize| layouts.as_ref().map(|layouts| layouts[i].clone());
        (0..node.results.len()).map(|i| vec![(*place, layout(i))]).collect()
    }

    fn define(&mut self, values: &[Value], located: Vec<Vec<(Place, Option<Layout>)>>) {
        for (value, located) in values.iter().zip(located) {
            let tensors = self.func.ty(*value).map_or(&[][..], Type::tensors);
            let first = self.live.len();
            for ((place, layout), tensor) in located.iter().zip(tensors) {
                let Some(layout) = layout else { continue };
                let element = tensor.dtype.size() as u64;
                let from = place.offset + layout.start as u64 * element;
                let (def, last) = (self.line, self.uses.get(*value).last.max(self.line));
                let to = from + layout.span() as u64 * element;
                self.live.push(Lifetime { value: *value, def, last, region: place.region, from, to });
            }
            self.held.insert(*value, first..self.live.len());
            self.located.insert(*value, located);
        }
    }
}

/// The bytes of the elements.
fn bytes_of(placement: &Placement) -> u64 {
    if let Extent::At(layout) = &placement.extent { (layout.numel() * placement.width) as u64 } else { 0 }
}

/// The peak of live bytes, each counted once.
fn most(live: &[Lifetime]) -> u64 {
    let mut edges: BTreeMap<Region, Vec<u64>> = BTreeMap::new();
    for held in live {
        edges.entry(held.region).or_default().extend([held.from, held.to]);
    }
    let mut counts: BTreeMap<Region, Vec<u32>> = BTreeMap::new();
    for (region, edges) in &mut edges {
        edges.sort_unstable();
        edges.dedup();
        counts.insert(*region, vec![0; edges.len()]);
    }
    // On each line, ranges that begin there are added before those that end there are removed.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * live.len());
    for (i, held) in live.iter().enumerate() {
        events.push((2 * u64::from(held.def), true, i));
        events.push((2 * u64::from(held.last) + 1, false, i));
    }
    events.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, begins, i) in events {
        let Lifetime { region, from, to, .. } = live[i];
        let (Some(edges), Some(counts)) = (edges.get(&region), counts.get_mut(&region)) else { continue };
        let first = edges.partition_point(|edge| *edge < from);
        let pieces = edges[first..].windows(2).zip(&mut counts[first..]);
        for (piece, count) in pieces.take_while(|(piece, _)| piece[0] < to) {
            if begins {
                now += if *count == 0 { piece[1] - piece[0] } else { 0 };
                *count += 1;
            } else {
                *count -= 1;
                now -= if *count == 0 { piece[1] - piece[0] } else { 0 };
            }
        }
        most = most.max(now);
    }
    most
}
