//! Hazards of a plan, re-derived from its text alone, by tracking what every byte holds as the lines run.
//!
//! The checker knows nothing of the planner. It walks the lines and tracks, for every byte, whose contents it holds,
//! which start in flight will write it, and which leases hold it ([`bytes`]). Contents are named by the value that was
//! written there; bytes may have several names: parts that an op joined in place, results of blocks, parameters that
//! alias operands. A view has no name of its own: it reads under its operand's.
//!
//! - **H1** A line reads bytes only while they hold the contents of its operand.
//! - **H2** No line reads or writes bytes that a start in flight will write, until its wait.
//! - **H3** Storage of a start's operands and results is written only after its release. A line that writes it, or one
//!   before, must say `release`. Storage that may be leased since before the call is first written by a line that says
//!   `release entry`.
//! - **H4** Arguments that were not donated are not written, and each parameter lies in its own region.
//! - **H5** The bytes that a line writes do not overlap those it reads, unless a result aliases an operand exactly and
//!   the op allows it: the same contiguous elements, and an operand that [`crate::storage::may_take_over`] names, or
//!   the one that a start overwrites. Results of one line do not overlap either.
//! - **H6** An operand of a start is contiguous. If the op overwrites it, the result lies there too, or the line copies
//!   it, unless its contents do not matter on this rank ([`crate::storage::is_needed`]). Nothing else is copied.
//! - **H7** A wait gives its tensors at the places of the start's results; a release is on its line or later.
//! - **H8** The elements of a view need not move.
//! - **H9** Returned values outlive the call: they do not lie in an arena or heap.
//! - **H10** Blocks: operands of a `cond`, and values that every iteration of a `scan` sees, have the places of the
//!   block's parameters, with the same layouts; the final carries lie at the places of the carries.
//!
//! No line states what blocks do at their ends: stacked results of a scan are copied to their entry, and values that
//! are not in place are copied there as one parallel assignment. A pending that must move, or that a scan carries, is
//! waited for; any other stays in flight. Leases of starts that no line of their block waits for end there, since no
//! line can name them any more; others need a `release` in the block.
//!
//! A value whose size is known only at run time occupies its whole region.

mod bytes;
mod flow;
mod lines;

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use bytes::{Bytes, Cell, Values};
use consort_types::{Failure, Headline, Site, overlaps};
use smallvec::{SmallVec, smallvec};

use crate::diagnostic::{Code, Diagnostic, Position};
use crate::entity::{Value, ValueMap};
use crate::index::Sym;
use crate::mesh::Mesh;
use crate::ops::{Effects, EvalCx, Flow};
use crate::plan::{NodePlan, Place, PlanHeader, Region, RegionKind};
use crate::program::{Block, Func};
use crate::storage::{ByteSet, Placement, Ranges, entry_leases, overlap};
use crate::types::Type;

/// Every hazard of a plan that `verify` accepts, in line order; empty for a function that is not a plan. Positions are
/// those in the text of a program with this function alone.
pub fn hazards(mesh: &Mesh, func: &Func) -> Vec<Diagnostic> {
    let Some(head) = &func.plan else { return Vec::new() };
    let symbols: BTreeMap<Sym, i64> = head.symbols.iter().copied().collect();
    let mut checker = Checker {
        sizes: EvalCx { mesh, rank: head.rank, symbols: &symbols },
        func,
        head,
        bytes: Bytes::default(),
        old: ByteSet::default(),
        tensors: ValueMap::default(),
        starts: ValueMap::default(),
        pendings: ValueMap::default(),
        last_use: ValueMap::default(),
        writers: ValueMap::default(),
        next: 0,
        line: Line { at: Position::Func(0), op: "parameter", site: None },
        again: false,
        errors: Vec::new(),
    };
    checker.last_uses(&func.body, &mut 0, false);
    checker.params();
    checker.nodes(&func.body);
    checker.returned();
    checker.errors
}

/// The location of a tensor, and the name under which its bytes are tracked.
struct Tracked {
    root: Value,
    placement: Placement,
    /// All bytes of the root.
    whole: Range<u64>,
    /// The range from its first byte to its last, and whether all of it is its own.
    hull: Range<u64>,
    solid: bool,
}

/// The tensors of a value: one, but for most pendings.
type Tensors = SmallVec<[Rc<Tracked>; 1]>;

/// Tensors of several values, each with the value.
type Operands = SmallVec<[(Value, Rc<Tracked>); 4]>;

impl Tracked {
    fn new(root: Value, placement: Placement, whole: Range<u64>) -> Rc<Tracked> {
        let (hull, solid) = placement.hull().unwrap_or((whole.clone(), true));
        Rc::new(Tracked { root, placement, whole, hull, solid })
    }

    fn region(&self) -> Region {
        self.placement.place.region
    }

    /// Its bytes; all of its root if unknown.
    fn bytes(&self) -> Ranges {
        match self.solid {
            true if self.hull.is_empty() => Ranges::new(),
            true => smallvec![self.hull.clone()],
            false => self.placement.bytes().unwrap_or_else(|| smallvec![self.whole.clone()]),
        }
    }

    fn shares(&self, other: &Tracked) -> Option<Range<u64>> {
        let near = self.region() == other.region() && overlaps(&self.hull, &other.hull);
        if near { overlap(&self.bytes(), &other.bytes()) } else { None }
    }
}

/// The progress of a start.
#[derive(Clone, Copy, Default)]
struct Started {
    waited: bool,
    /// Whether a line of its own block waits for it, so that a line there can also release it.
    waited_here: bool,
    released: bool,
}

/// The state of a pending: a start in flight, or tensors that have arrived.
#[derive(Clone, Copy)]
enum Pending {
    Of(Value),
    There,
}

/// The line being checked.
#[derive(Clone, Copy)]
struct Line {
    at: Position,
    op: &'static str,
    site: Option<Site>,
}

struct Checker<'a> {
    sizes: EvalCx<'a>,
    func: &'a Func,
    head: &'a PlanHeader,
    bytes: Bytes,
    /// The bytes that may be leased since before the call.
    old: ByteSet,
    tensors: ValueMap<Tensors>,
    starts: ValueMap<Started>,
    pendings: ValueMap<Pending>,
    /// The last line that reads each name.
    last_use: ValueMap<usize>,
    /// The line that defines each value, for errors.
    writers: ValueMap<Line>,
    next: usize,
    line: Line,
    /// Whether these lines have been checked before, as an earlier iteration.
    again: bool,
    errors: Vec<Diagnostic>,
}

impl<'a> Checker<'a> {
    fn error(&mut self, rule: &'static str, headline: impl Into<Headline>) {
        let Line { at, op, site } = self.line;
        let failure = Failure { site, ..*Failure::rule(rule, headline).of(op.to_string()) };
        let error = Diagnostic { code: Code::Verify, at, failure: Box::new(failure) };
        if !self.again || !self.errors.contains(&error) {
            self.errors.push(error);
        }
    }

    /// A value as errors name it, with the line that it comes from.
    fn name(&self, value: Value) -> String {
        match self.writers.get(value) {
            Some(Line { op, site: Some(site), .. }) => format!("{value} ({op}, {site})"),
            Some(Line { op, site: None, .. }) => format!("{value} ({op})"),
            None => value.to_string(),
        }
    }

    fn mark(&mut self, op: &'static str, site: Option<Site>) {
        self.line = Line { at: Position::Node(0, self.next), op, site };
        self.next += 1;
    }

    /// Records the last line that reads each name; lines are numbered as in errors.
    fn last_uses(&mut self, block: &Block, next: &mut usize, loops: bool) {
        let mut roots: ValueMap<Value> = ValueMap::default();
        let mut used = |value: Value, roots: &ValueMap<Value>, line: usize| {
            self.last_use.insert(roots.get(value).copied().unwrap_or(value), line);
        };
        let mut inner = Vec::new();
        for node in &block.nodes {
            *next += 1;
            for inside in &node.blocks {
                inner.push((inside, *next, matches!(node.op.flow(), Flow::Loop { .. })));
                *next += lines(inside);
            }
            node.args.iter().for_each(|arg| used(*arg, &roots, *next - 1));
            if let (true, Some(arg)) = (node.plan.as_ref().is_some_and(|plan| plan.view), node.args.first()) {
                let root = roots.get(*arg).copied().unwrap_or(*arg);
                for result in &node.results {
                    roots.insert(*result, root);
                }
            }
        }
        // The next iteration may read the parameters.
        let entered = block.params.iter().filter(|_| loops);
        block.results.iter().chain(entered).for_each(|value| used(*value, &roots, *next));
        *next += 1;
        for (inside, mut first, loops) in inner {
            self.last_uses(inside, &mut first, loops);
        }
    }

    /// Places the tensors of some values.
    fn lodge(&mut self, values: &[Value], places: &[Place]) {
        let mut places = places.iter();
        for value in values {
            let types = self.func.ty(*value).map_or(&[][..], Type::tensors);
            let lodged = types.iter().zip(places.by_ref()).map(|(ty, place)| {
                let placement = Placement::new(*place, ty, &self.sizes);
                let whole = placement.hull().map_or(0..u64::MAX, |(hull, _)| hull);
                Tracked::new(*value, placement, whole)
            });
            let lodged = lodged.collect();
            self.tensors.insert(*value, lodged);
            self.writers.insert(*value, self.line);
        }
    }

    fn tensors(&self, value: Value) -> Tensors {
        self.tensors.get(value).cloned().unwrap_or_default()
    }

    /// The tensors among some values, with their placements.
    fn operands(&self, values: &[Value]) -> Operands {
        let mut operands = Operands::new();
        for value in values {
            let tensors = self.tensors.get(*value).into_iter().flatten();
            operands.extend(tensors.map(|tensor| (*value, Rc::clone(tensor))));
        }
        operands
    }

    fn released(&self, start: Value) -> bool {
        self.starts.get(start).is_some_and(|start| start.released)
    }

    /// Checks that the bytes hold what is read under this name. `hull` is the range from the first byte to the last.
    fn check_read(
        &mut self,
        value: Value,
        root: Value,
        region: Region,
        hull: &Range<u64>,
        ranges: impl FnOnce() -> Ranges,
    ) {
        let fine = |cell: Option<&Cell>| cell.is_some_and(|c| c.flight.is_none() && c.holds.contains(&root));
        // Most views can be checked by their hull alone.
        if self.bytes.over(region, hull.clone()).all(|(_, cell)| fine(cell)) {
            return;
        }
        let ranges = ranges();
        let mut all = ranges.iter().flat_map(|range| self.bytes.over(region, range.clone()));
        let Some((part, cell)) = all.find(|(_, cell)| !fine(*cell)) else { return };
        let at = text(region, &part);
        let (rule, message) = match cell {
            Some(Cell { flight: Some(start), .. }) => {
                ("H2", format!("reads {value} at {at}, which {} may still write", self.name(*start)))
            }
            Some(cell) if !cell.holds.is_empty() => {
                let writer = cell.holds.last().map_or(String::new(), |writer| self.name(*writer));
                ("H1", format!("reads {value} at {at}, which {writer} has overwritten"))
            }
            Some(_) => ("H1", format!("reads {value} at {at}, which does not hold it on every path")),
            None => ("H1", format!("reads {value} at {at}, where nothing has been written")),
        };
        self.error(rule, message);
    }

    fn read(&mut self, value: Value, tensor: &Tracked) {
        self.check_read(value, tensor.root, tensor.region(), &tensor.hull, || tensor.bytes());
    }

    /// Checks that the bytes of a tensor may be written.
    fn check_write(&mut self, value: Value, tensor: &Tracked) {
        self.check_writes(value, tensor.region(), &tensor.hull, || tensor.bytes());
    }

    /// Checks that these bytes may be written. `hull` is the range from the first to the last.
    fn check_writes(&mut self, value: Value, region: Region, hull: &Range<u64>, ranges: impl Fn() -> Ranges) {
        if let (RegionKind::Arg(number), false) = (region.kind, hull.is_empty()) {
            let param = self.func.body.params.get(number as usize);
            if !param.is_some_and(|param| self.head.donated.contains(param)) {
                self.error("H4", format!("writes {value} in {region}, which was not given away"));
            }
        }
        if self.old.meets(region, hull).is_some() {
            let old = ranges().iter().find_map(|range| self.old.meets(region, range));
            if let Some(part) = old {
                let at = text(region, &part);
                let message = "which may be leased since before the call: `release entry`";
                self.error("H3", format!("writes {value} at {at}, {message}"));
                for range in &ranges() {
                    self.old.remove(region, range);
                }
            }
        }
        let is_busy = |cell: Option<&Cell>| cell.is_some_and(|cell| self.is_busy(cell));
        if !self.bytes.over(region, hull.clone()).any(|(_, cell)| is_busy(cell)) {
            return;
        }
        let ranges = ranges();
        let mut all = ranges.iter().flat_map(|range| self.bytes.over(region, range.clone()));
        let busy = all.find_map(|(part, cell)| {
            let cell = cell?;
            let lease = cell.leases.iter().find(|start| !self.released(**start));
            let at = text(region, &part);
            if let Some(start) = cell.flight {
                Some(("H2", format!("writes {value} at {at}, which {} may still write", self.name(start))))
            } else {
                let start = lease?;
                let holder = self.name(*start);
                let waited = self.starts.get(*start).is_some_and(|start| start.waited);
                let hint = if waited { format!(": `release {start}`") } else { String::new() };
                Some(("H3", format!("writes {value} at {at}, which {holder} leases{hint}")))
            }
        });
        if let Some((rule, message)) = busy {
            self.error(rule, message);
        }
    }

    /// Whether bytes must not be written now.
    fn is_busy(&self, cell: &Cell) -> bool {
        cell.flight.is_some() || cell.leases.iter().any(|start| !self.released(*start))
    }

    /// The bytes now hold a value; their previous state is discarded.
    fn set(&mut self, region: Region, ranges: &[Range<u64>], cell: &Cell) {
        ranges.iter().for_each(|range| self.bytes.set(region, range.clone(), cell.clone()));
    }

    fn write(&mut self, value: Value, tensor: &Tracked) {
        self.set(tensor.region(), &tensor.bytes(), &holding(value));
    }

    /// Bytes that hold `from` also hold `to`. Drops names that are dead.
    fn rename(&mut self, region: Region, ranges: &[Range<u64>], from: Value, to: Value) {
        let (line, last_use) = (self.next - 1, &self.last_use);
        for range in ranges {
            self.bytes.update(region, range.clone(), |cell| {
                if cell.holds.contains(&from) {
                    cell.holds
                        .retain(|name| *name != to && last_use.get(*name).is_some_and(|use_| *use_ > line));
                    cell.holds.push(to);
                }
            });
        }
    }

    /// Bytes that hold `from` also hold `to`.
    fn name_too(&mut self, region: Region, ranges: &[Range<u64>], from: Value, to: Value) {
        for range in ranges {
            self.bytes.update(region, range.clone(), |cell| {
                if cell.holds.contains(&from) {
                    cell.holds.retain(|name| *name != to);
                    cell.holds.push(to);
                }
            });
        }
    }

    /// Drops dead names, except the newest.
    fn forget_names(&mut self, region: Region, ranges: &[Range<u64>]) {
        let (line, last_use) = (self.next - 1, &self.last_use);
        for range in ranges {
            self.bytes.update(region, range.clone(), |cell| {
                let newest = cell.holds.last().copied();
                cell.holds.retain(|name| {
                    Some(*name) == newest || last_use.get(*name).is_some_and(|use_| *use_ > line)
                });
            });
        }
    }

    /// `release entry`: older leases on the storage of these values end.
    fn release_entry(&mut self, plan: &NodePlan, values: &[Value]) {
        for (_, tensor) in self.operands(values).iter().filter(|_| plan.entry) {
            for range in &tensor.bytes() {
                self.old.remove(tensor.region(), range);
            }
        }
    }

    fn params(&mut self) {
        for region in entry_leases(self.func) {
            let size = self.head.regions.iter().find(|(of, _)| *of == region).map_or(0, |(_, size)| *size);
            self.old.add(region, 0..size);
        }
        let body = &self.func.body;
        self.lodge(&body.params, &body.places);
        for (number, param) in (0u32..).zip(&body.params) {
            for tensor in self.tensors(*param) {
                if tensor.region().kind != RegionKind::Arg(number) {
                    self.error("H4", format!("{param} lies in {}, not in arg{number}", tensor.region()));
                }
                let mut cell = holding(*param);
                if self.func.ty(*param).is_some_and(Type::is_pending) {
                    cell = flying(*param);
                    self.pendings.insert(*param, Pending::Of(*param));
                    self.starts.insert(*param, Started::default());
                }
                self.set(tensor.region(), &tensor.bytes(), &cell);
            }
        }
    }

    fn nodes(&mut self, block: &'a Block) {
        for node in &block.nodes {
            self.mark(node.op.info().name, node.site);
            let nothing = NodePlan::default();
            let plan = node.plan.as_deref().unwrap_or(&nothing);
            if node.op.effects() == Effects::Wait {
                self.wait(node, plan);
            }
            self.release(plan);
            match (node.op.flow(), node.op.effects()) {
                (Flow::Cond, _) => self.cond(node, plan),
                (Flow::Loop { trips, carries, slices, .. }, _) => {
                    self.repeat(node, plan, trips, carries, slices)
                }
                (_, Effects::Wait) => {}
                (_, Effects::Collective(_) | Effects::Messages(_)) => self.start(node, plan),
                _ if plan.view => self.view(node),
                _ => {
                    self.lodge(&node.results, &plan.places);
                    self.release_entry(plan, &node.results);
                    if node.op.joins() { self.join(node) } else { self.kernel(node) }
                }
            }
        }
        self.mark("return", None);
    }

    fn release(&mut self, plan: &NodePlan) {
        for start in &plan.release {
            match self.starts.get_mut(*start) {
                Some(started) if started.waited => started.released = true,
                _ => self.error("H7", format!("release {start}: nobody has waited for it")),
            }
        }
    }

    fn returned(&mut self) {
        for value in &self.func.body.results {
            let flies = matches!(self.pendings.get(*value), Some(Pending::Of(_)));
            for tensor in self.tensors(*value) {
                if tensor.region().is_kept() && !tensor.bytes().is_empty() {
                    self.error(
                        "H9",
                        format!("{value} lies in {}, which the next call uses", tensor.region()),
                    );
                }
                if !flies {
                    self.read(*value, &tensor);
                }
            }
        }
    }
}

fn holding(value: Value) -> Cell {
    Cell { holds: Values::from_slice(&[value]), ..Cell::default() }
}

/// Bytes that a start will write.
fn flying(start: Value) -> Cell {
    Cell { flight: Some(start), leases: Values::from_slice(&[start]), ..Cell::default() }
}

/// The number of nodes and returns in a block, including nested blocks.
fn lines(block: &Block) -> usize {
    block.nodes.iter().map(|node| 1 + node.blocks.iter().map(lines).sum::<usize>()).sum::<usize>() + 1
}

/// Bytes as errors write them.
fn text(region: Region, range: &Range<u64>) -> String {
    match region.kind {
        RegionKind::Dyn(_) => format!("@{region}"),
        _ => format!("@{region}+{:#x}..{:#x}", range.start, range.end),
    }
}
