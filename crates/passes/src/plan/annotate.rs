//! Annotates the lines with the plan: places, queues, leases, and which leases must end before a write: those of starts
//! of the plan, by their names, and those that are older than the call.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::entity::Value;
use consort_ir::ops::{Effects, Flow};
use consort_ir::plan::{NodePlan, Place, PlanHeader, Region, RegionKind};
use consort_ir::program::{Block, Func, Node};
use consort_ir::storage::ByteSet;
use consort_types::GroupName;

use super::decide::{Line, Planner};
use super::storage::Span;
use super::uses::overwritten;

/// Writes the plan, except its header.
pub(super) fn annotate(mut planner: Planner<'_>, head: &PlanHeader, func: &mut Func) {
    let lines = std::mem::take(&mut planner.lines).into_iter();
    let mut old = ByteSet::default();
    let params = &func.body.params;
    for (region, size) in &head.regions {
        let is_old = match &region.kind {
            RegionKind::Arg(number) => {
                params.get(*number as usize).is_some_and(|param| head.donated.contains(param))
            }
            // What takes part in communication lies in the heap, which is kept from call to call.
            RegionKind::Heap => true,
            RegionKind::Arena | RegionKind::Out(_) | RegionKind::Dyn(_) => false,
        };
        if is_old {
            old.add(*region, 0..*size);
        }
    }
    let mut annotator =
        Annotator { planner, lines, queues: Vec::new(), leases: Leases::default(), old, blocks: 0 };
    annotator.block(&mut func.body);
}

struct Annotator<'a> {
    planner: Planner<'a>,
    lines: std::vec::IntoIter<Line>,
    /// The next number on each queue.
    queues: Vec<(GroupName, u32)>,
    leases: Leases,
    /// The bytes that may be leased since before the call, because no line before has written them.
    old: ByteSet,
    blocks: u32,
}

impl Annotator<'_> {
    fn place(&mut self, part: u32) -> Place {
        let (buf, at) = (
            self.planner.storage.parts[part as usize].located.buf,
            self.planner.storage.parts[part as usize].located.at,
        );
        let (root, shift) = self.planner.storage.root(buf);
        let place = self.planner.storage.bufs[root as usize].place;
        let place = place.unwrap_or(Place { region: Region::ARENA, offset: 0 });
        Place { region: place.region, offset: place.offset + shift + at }
    }

    fn places(&mut self, values: &[Value]) -> Vec<Place> {
        let mut places = Vec::with_capacity(values.len());
        for value in values {
            for part in self.planner.parts_of(*value) {
                places.push(self.place(part));
            }
        }
        places
    }

    /// The final bytes of a span, if anything is ever written there.
    fn bytes(&self, span: Span) -> Option<Bytes> {
        let buf = &self.planner.storage.bufs[span.buf as usize];
        let place = buf.place.filter(|_| buf.written && span.from < span.to)?;
        let to = place.offset.saturating_add(span.to);
        Some(Bytes { region: place.region, from: place.offset + span.from, to })
    }

    fn spans(&mut self, values: &[Value]) -> Vec<Bytes> {
        let parts: Vec<u32> = values.iter().flat_map(|value| self.planner.parts_of(*value)).collect();
        let spans = parts.into_iter().map(|part| self.planner.storage.span(part)).collect::<Vec<_>>();
        spans.into_iter().filter_map(|span| self.bytes(span)).collect()
    }

    /// Annotates a block; returns the starts outside it whose leases must end before it runs.
    fn block(&mut self, block: &mut Block) -> Vec<u32> {
        let id = self.blocks;
        self.blocks += 1;
        let first = self.leases.starts.len();
        block.places = self.places(&block.params);
        let mut outside = Vec::new();
        for node in &mut block.nodes {
            let mut met = Vec::new();
            let mut plan = self.node(node, &mut met);
            for inside in &mut node.blocks {
                // Another branch, or no iteration, may pass by what a block writes.
                let old = self.old.mark();
                met.extend(self.block(inside));
                self.old.restore(old);
            }
            met.sort_unstable();
            met.dedup();
            for start in met {
                let Start { value, block, .. } = self.leases.starts[start as usize];
                if block == id { plan.release.push(value) } else { outside.push(start) }
            }
            if let Some(group) = node.op.effects().starts() {
                self.start(node, &mut plan, group, id);
            }
            if id > 0 && node.op.effects() == Effects::Wait {
                self.leases.waited(node.args[0], first);
            }
            node.plan = (plan != NodePlan::default()).then(|| Box::new(plan));
        }
        if id > 0 {
            self.leave(block, first);
        }
        outside
    }

    fn node(&mut self, node: &Node, met: &mut Vec<u32>) -> NodePlan {
        let line = self.lines.next().unwrap_or_default();
        let mut plan = NodePlan {
            places: self.places(&node.results),
            view: line.view,
            reuse: line.reuse,
            ..NodePlan::default()
        };
        for copied in line.copies {
            // An empty tensor has no location.
            let Span { from, to, .. } = self.planner.storage.span(copied.from);
            let there = self.planner.storage.first(copied.from) == self.planner.storage.first(copied.to);
            if !there && from < to {
                plan.copies.push((copied.value, copied.why));
            }
        }
        if line.view || node.op.effects() == Effects::Wait || self.leases.is_empty() && self.old.is_empty() {
            return plan;
        }
        let mut written = match line.writes {
            None if node.op.flow() == Flow::Cond => self.left(node),
            None => self.spans(&node.results),
            Some(writes) => {
                let part = self.planner.part(node.results[0]);
                let place = self.place(part);
                let bytes = |(from, to)| Bytes {
                    region: place.region,
                    from: place.offset + from,
                    to: place.offset + to,
                };
                writes.into_iter().map(bytes).collect()
            }
        };
        if let Flow::Loop { carries, slices, .. } = node.op.flow() {
            written.extend(self.spans(&node.blocks[0].params[..carries + slices]));
        }
        for bytes in written {
            plan.entry |= self.old.remove(bytes.region, &(bytes.from..bytes.to));
            self.leases.write(bytes, met);
        }
        if plan.entry {
            // The line waits for all of their storage, also where it writes only a part.
            let params = match node.op.flow() {
                Flow::Loop { carries, slices, .. } => &node.blocks[0].params[..carries + slices],
                Flow::Cond | Flow::Straight => &[],
            };
            let storage = [self.spans(&node.results), self.spans(params)].concat();
            for bytes in storage {
                self.old.remove(bytes.region, &(bytes.from..bytes.to));
            }
        }
        plan
    }

    /// The results of a `cond` that not all blocks leave in their final place.
    fn left(&mut self, node: &Node) -> Vec<Bytes> {
        let mut written = Vec::new();
        for (i, result) in node.results.iter().enumerate() {
            for (k, part) in self.planner.parts_of(*result).enumerate() {
                let place = self.planner.storage.first(part);
                let stays = node.blocks.iter().all(|block| {
                    let part = self.planner.parts_of(block.results[i]).start + k as u32;
                    self.planner.storage.first(part) == place
                });
                let span = self.planner.storage.span(part);
                written.extend(self.bytes(span).filter(|_| !stays));
            }
        }
        written
    }

    fn start(&mut self, node: &Node, plan: &mut NodePlan, group: GroupName, block: u32) {
        let queue = match self.queues.iter().position(|(queue, _)| *queue == group) {
            Some(queue) => queue,
            None => {
                self.queues.push((group, 0));
                self.queues.len() - 1
            }
        };
        plan.queue = Some((group, self.queues[queue].1));
        self.queues[queue].1 += 1;
        // Peers read the operands that are not overwritten, and the results. An operand under a result is leased as
        // part of it; one that was copied, or whose contents do not matter here, is free at once.
        let over = overwritten(self.planner.func, node);
        let (mut read, mut seen) = (Vec::new(), BTreeSet::new());
        for (arg, over) in node.args.iter().zip(over) {
            let here = match over {
                None => {
                    read.push(*arg);
                    true
                }
                Some(result) => {
                    let from = self.planner.part(*arg);
                    let to = self.planner.parts_of(node.results[0]).start + result as u32;
                    self.planner.storage.first(from) == self.planner.storage.first(to)
                }
            };
            if here && seen.insert(*arg) {
                plan.lease.push(*arg);
            }
        }
        let leased = [self.spans(&read), self.spans(&node.results)].concat();
        self.leases.add(Start { value: node.results[0], block, waited: false, released: false }, leased);
    }

    /// Ends the leases taken inside a block: no line outside can name them, and a loop repeats the block.
    fn leave(&mut self, block: &mut Block, first: usize) {
        let held = self.leases.starts[first..].iter().filter(|start| start.waited && !start.released);
        let held: Vec<Value> = held.map(|start| start.value).collect();
        self.leases.starts[first..].iter_mut().for_each(|start| start.released = true);
        if let Some(node) = block.nodes.last_mut().filter(|_| !held.is_empty()) {
            node.plan.get_or_insert_default().release.extend(held);
        }
    }
}

/// Bytes of memory.
#[derive(Clone, Copy, Debug)]
struct Bytes {
    region: Region,
    from: u64,
    to: u64,
}

#[derive(Clone, Copy, Debug)]
struct Start {
    value: Value,
    block: u32,
    /// Whether a line of its block waits for it.
    waited: bool,
    released: bool,
}

/// The leased bytes and their starts. Adjacent bytes with the same leases are one entry.
#[derive(Default)]
struct Leases {
    starts: Vec<Start>,
    held: BTreeMap<(Region, u64), (u64, Vec<u32>)>,
}

impl Leases {
    fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Marks a start of this block as waited for; `first` is the block's first start.
    fn waited(&mut self, pending: Value, first: usize) {
        if let Some(start) = self.starts[first..].iter_mut().rev().find(|start| start.value == pending) {
            start.waited = true;
        }
    }

    /// Before a line writes bytes, their leases end, with all others of the same starts.
    fn write(&mut self, bytes: Bytes, met: &mut Vec<u32>) {
        let Bytes { region, from, to } = bytes;
        if from >= to {
            return;
        }
        let before = self.held.range(..=(region, from)).next_back().map(|(key, (end, _))| (*key, *end));
        let from = match before {
            Some((key, end)) if key.0 == region && end > from => key.1,
            _ => from,
        };
        while let Some((key, _)) = self.held.range((region, from)..(region, to)).next() {
            let key = *key;
            for start in self.held.remove(&key).map_or(Vec::new(), |(_, starts)| starts) {
                if !std::mem::replace(&mut self.starts[start as usize].released, true) {
                    met.push(start);
                }
            }
        }
    }

    /// Splits the entry that contains a byte and the one before it.
    fn cut(&mut self, region: Region, at: u64) {
        if let Some((key, (end, starts))) = self.held.range_mut(..(region, at)).next_back()
            && key.0 == region
            && *end > at
        {
            let rest = (*end, starts.clone());
            *end = at;
            self.held.insert((region, at), rest);
        }
    }

    fn add(&mut self, start: Start, leased: Vec<Bytes>) {
        let number = self.starts.len() as u32;
        self.starts.push(start);
        for Bytes { region, from, to } in leased {
            self.cut(region, from);
            self.cut(region, to);
            let mut at = from;
            let mut holes = Vec::new();
            for (key, (end, starts)) in self.held.range_mut((region, from)..(region, to)) {
                if key.1 > at {
                    holes.push((at, key.1));
                }
                starts.retain(|start| !self.starts[*start as usize].released);
                if starts.last() != Some(&number) {
                    starts.push(number);
                }
                at = *end;
            }
            if at < to {
                holes.push((at, to));
            }
            for (from, to) in holes {
                self.held.insert((region, from), (to, vec![number]));
            }
        }
    }
}
