//! Follows every byte of a plan on one rank: each element of each value has a name, memory holds names, and a line that
//! reads must find those it means. Blocks of `cond` are both run, those of `scan` twice.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::entity::Value;
use consort_ir::index::Sym;
use consort_ir::layout::Layout;
use consort_ir::ops::{Alias, BroadcastStart, Concat, Effects, EvalCx, ExchangeStart, Flow, UpdateSlice};
use consort_ir::plan::{NodePlan, Place, Region};
use consort_ir::program::{Block, Func, Node, Program};
use consort_ir::views;

/// A tensor: where it lies, and the names of its elements. One whose sizes are not known is not followed.
#[derive(Clone)]
struct Lies {
    place: Place,
    layout: Layout,
    element: u64,
    names: Vec<u64>,
}

#[derive(Clone)]
struct Flight {
    /// What must still be there when it is waited for.
    reads: Vec<Lies>,
    writes: Vec<(Region, u64)>,
    leased: BTreeSet<(Region, u64)>,
    waited: bool,
}

#[derive(Clone)]
struct State<'a> {
    func: &'a Func,
    sizes: EvalCx<'a>,
    memory: BTreeMap<(Region, u64), u64>,
    values: BTreeMap<Value, Vec<Option<Lies>>>,
    /// Starts whose leases have not ended.
    flights: BTreeMap<Value, Flight>,
    next: u64,
}

/// Panics where a plan of one function is wrong.
pub(crate) fn follow(program: &Program) {
    let func = &program.funcs[0];
    let head = func.plan.as_ref().expect("a plan");
    let symbols: BTreeMap<Sym, i64> = head.symbols.iter().copied().collect();
    let sizes = EvalCx { mesh: &program.mesh, rank: head.rank, symbols: &symbols };
    let mut state = State {
        func,
        sizes,
        memory: BTreeMap::new(),
        values: BTreeMap::new(),
        flights: BTreeMap::new(),
        next: 1,
    };
    state.define(&func.body.params, &func.body.places);
    state.fill(&func.body.params);
    state.block(&func.body);
    for result in &func.body.results {
        if !func.ty(*result).unwrap().is_pending() {
            state.read(*result);
        }
    }
    for flight in state.flights.values().filter(|flight| !flight.waited) {
        flight.reads.iter().for_each(|lies| state.find(lies));
        let kept = |(region, _): &(Region, u64)| !matches!(region, Region::Arena | Region::Heap);
        assert!(flight.leased.iter().all(kept), "what is in flight at the end outlives the call");
    }
}

fn bytes_of(lies: &Lies) -> impl Iterator<Item = (Region, u64, u64)> + '_ {
    let n = lies.layout.numel();
    (0..n).flat_map(move |i| {
        let at = lies.place.offset + offset(&lies.layout, i) as u64 * lies.element;
        (0..lies.element).map(move |byte| (lies.place.region, at + byte, lies.names[i] * 8 + byte))
    })
}

/// Where element `i` lies, in row-major order.
fn offset(layout: &Layout, i: usize) -> usize {
    let (mut rest, mut at) = (i, layout.start);
    for (size, stride) in layout.shape.iter().zip(&layout.strides).rev() {
        at += rest % size * stride;
        rest /= size;
    }
    at
}

impl<'a> State<'a> {
    fn lies(&self, value: Value) -> Vec<Lies> {
        self.values[&value].iter().flatten().cloned().collect()
    }

    /// Values that lie without gaps, of new elements.
    fn define(&mut self, values: &[Value], places: &[Place]) {
        let mut places = places.iter();
        for value in values {
            let mut list = Vec::new();
            for tensor in self.func.ty(*value).unwrap().tensors() {
                let place = *places.next().expect("a place");
                let shape: Result<Vec<usize>, _> =
                    tensor.shape.iter().map(|size| self.sizes.size(size)).collect();
                list.push(shape.ok().map(|shape| {
                    let layout = Layout::contiguous(&shape);
                    let names = (0..layout.numel() as u64).map(|i| self.next + i).collect();
                    self.next += layout.numel() as u64;
                    Lies { place, layout, element: tensor.dtype.size() as u64, names }
                }));
            }
            self.values.insert(*value, list);
        }
    }

    /// Memory holds these values, however it came to.
    fn fill(&mut self, values: &[Value]) {
        for lies in values.iter().flat_map(|value| self.lies(*value)).collect::<Vec<_>>() {
            for (region, at, name) in bytes_of(&lies) {
                self.memory.insert((region, at), name);
            }
        }
    }

    fn find(&self, lies: &Lies) {
        for (region, at, name) in bytes_of(lies) {
            assert_eq!(self.memory.get(&(region, at)), Some(&name), "{region}+{at:#x} holds something else");
        }
    }

    fn read(&self, value: Value) {
        self.lies(value).iter().for_each(|lies| self.find(lies));
    }

    /// A line may write these bytes.
    fn may_write(&self, bytes: impl Iterator<Item = (Region, u64)>) {
        let donated = &self.func.plan.as_ref().unwrap().donated;
        for (region, at) in bytes {
            if let Region::Arg(number) = region {
                assert!(donated.contains(&self.func.body.params[number as usize]), "writes an argument");
            }
            for (start, flight) in &self.flights {
                assert!(!flight.leased.contains(&(region, at)), "{region}+{at:#x} is leased by {start}");
            }
        }
    }

    fn write(&mut self, value: Value) {
        for lies in self.lies(value) {
            self.may_write(bytes_of(&lies).map(|(region, at, _)| (region, at)));
        }
        self.fill(&[value]);
    }

    fn block(&mut self, block: &'a Block) {
        for node in &block.nodes {
            let none = NodePlan::default();
            let plan = node.plan.as_deref().unwrap_or(&none);
            let own: Vec<Value> = if node.op.effects() == Effects::Wait { node.args.clone() } else { vec![] };
            for start in &plan.release {
                let flight = self.flights.remove(start).expect("released once");
                assert!(flight.waited || own.contains(start), "{start} is released before its wait");
                if !flight.waited {
                    flight.reads.iter().for_each(|lies| self.find(lies));
                }
            }
            self.node(node, plan);
        }
    }

    fn node(&mut self, node: &'a Node, plan: &NodePlan) {
        match (node.op.effects(), node.op.flow()) {
            (Effects::Collective(_) | Effects::Messages(_), _) => self.start(node, plan),
            (Effects::Wait, _) => self.wait(node, plan),
            (_, Flow::Cond) => self.cond(node, plan),
            (_, Flow::Scan { carries, slices, .. }) => self.scan(node, plan, carries, slices),
            (_, Flow::Straight) => self.straight(node, plan),
        }
    }

    fn straight(&mut self, node: &'a Node, plan: &NodePlan) {
        self.define(&node.results, &plan.places);
        let named = self.named(node);
        if let Some(names) = &named {
            for (result, names) in node.results.iter().zip(names) {
                self.values.get_mut(result).unwrap()[0].as_mut().unwrap().names.clone_from(names);
            }
        }
        if plan.view {
            let Some(Some(from)) = self.values[&node.args[0]].first().cloned() else {
                return node.results.iter().for_each(|result| drop(self.values.insert(*result, vec![None])));
            };
            let layouts = views::view(&*node.op, &self.sizes, &from.layout).unwrap().unwrap();
            for (result, layout) in node.results.iter().zip(layouts) {
                self.values.get_mut(result).unwrap()[0].as_mut().unwrap().layout = layout;
            }
            return;
        }
        let moves = node.op.as_op::<Concat>().is_some() || node.op.as_op::<UpdateSlice>().is_some();
        if !(moves && named.is_some()) {
            node.args.iter().for_each(|arg| self.read(*arg));
            return node.results.iter().for_each(|result| self.write(*result));
        }
        // Only what is not there yet is moved.
        let sources: BTreeSet<u64> = node
            .args
            .iter()
            .flat_map(|arg| self.lies(*arg))
            .flat_map(|lies| bytes_of(&lies).collect::<Vec<_>>())
            .filter(|(region, at, name)| self.memory.get(&(*region, *at)) == Some(name))
            .map(|(_, _, name)| name)
            .collect();
        let result = self.lies(node.results[0]).remove(0);
        let moved: Vec<_> = bytes_of(&result)
            .filter(|(region, at, name)| self.memory.get(&(*region, *at)) != Some(name))
            // An update that is next to come replaces what is missing here; whoever reads it finds out.
            .filter(|(_, _, name)| sources.contains(name) || node.op.as_op::<Concat>().is_some())
            .collect();
        assert!(moved.iter().all(|(_, _, name)| sources.contains(name)), "a part is gone");
        self.may_write(moved.iter().map(|(region, at, _)| (*region, *at)));
        for (region, at, name) in moved {
            self.memory.insert((region, at), name);
        }
    }

    /// The names of the results' elements, where the op only moves them.
    fn named(&self, node: &Node) -> Option<Vec<Vec<u64>>> {
        let from: Option<Vec<Lies>> = node.args.iter().map(|arg| self.values[arg].first()?.clone()).collect();
        let from = from?;
        if node.results.iter().any(|result| !matches!(self.values[result][..], [Some(_)])) {
            return None;
        }
        if node.op.alias() == Alias::View(0) {
            let whole = Layout::contiguous(&from[0].layout.shape);
            let layouts = views::view(&*node.op, &self.sizes, &whole).ok()??;
            let pick =
                |layout: &Layout| (0..layout.numel()).map(|i| from[0].names[offset(layout, i)]).collect();
            return Some(layouts.iter().map(pick).collect());
        }
        let shape = self.values[node.results.first()?][0].as_ref().unwrap().layout.shape.clone();
        let (mut names, starts): (Vec<u64>, Vec<Vec<usize>>) = if let Some(op) = node.op.as_op::<Concat>() {
            let mut at = 0;
            let starts = from.iter().map(|part| {
                let mut start = vec![0; shape.len()];
                start[op.dim] = at;
                at += part.layout.shape[op.dim];
                start
            });
            (vec![0; shape.iter().product()], starts.collect())
        } else if let Some(op) = node.op.as_op::<UpdateSlice>() {
            let start = op.start.iter().map(|start| self.sizes.size(start)).collect::<Result<_, _>>().ok()?;
            (from[0].names.clone(), vec![vec![0; shape.len()], start])
        } else {
            return None;
        };
        for (part, start) in from.iter().zip(starts) {
            let mut place = Layout::contiguous(&shape);
            for (dim, start) in start.iter().enumerate() {
                place = place.narrowed(dim, *start, part.layout.shape[dim]);
            }
            (0..part.names.len()).for_each(|i| names[offset(&place, i)] = part.names[i]);
        }
        Some(vec![names])
    }

    fn start(&mut self, node: &'a Node, plan: &NodePlan) {
        let mut list = Vec::new();
        let mut places = plan.places.iter();
        self.define(&node.results, &plan.places);
        let results = self.values[&node.results[0]].clone();
        let mut over = BTreeSet::new();
        for (i, result) in results.iter().enumerate() {
            let place = *places.next().unwrap();
            let Some(operand) = node.op.overwrites(i) else { continue };
            over.insert(operand);
            let Some(Some(from)) = self.values[&node.args[operand]].first() else { continue };
            let at = from.place.offset + from.layout.start as u64 * from.element;
            let in_place =
                from.layout.is_contiguous() && (from.place.region, at) == (place.region, place.offset);
            let copied = plan.copies.iter().any(|(value, _)| *value == node.args[operand]);
            if in_place || copied {
                self.find(from);
            } else {
                let known =
                    node.op.as_op::<ExchangeStart>().is_some() || node.op.as_op::<BroadcastStart>().is_some();
                assert!(known, "{result:?} begins with nothing", result = result.as_ref().map(|r| r.place));
            }
        }
        for (i, arg) in node.args.iter().enumerate().filter(|(i, _)| !over.contains(i)) {
            for lies in self.lies(*arg) {
                assert!(lies.layout.is_contiguous(), "operand {i} has gaps");
                self.find(&lies);
                list.push(lies);
            }
        }
        let written: Vec<(Region, u64)> = results
            .iter()
            .flatten()
            .flat_map(|lies| bytes_of(lies).map(|b| (b.0, b.1)).collect::<Vec<_>>())
            .collect();
        let distinct: BTreeSet<_> = written.iter().copied().collect();
        assert_eq!(distinct.len(), written.len(), "results lie over each other");
        for lies in &list {
            assert!(
                !bytes_of(lies).any(|(region, at, _)| distinct.contains(&(region, at))),
                "an operand is written"
            );
        }
        self.may_write(written.iter().copied());
        self.memory.extend(written.iter().map(|byte| (*byte, 0)));
        let operands = node.args.iter().flat_map(|arg| self.lies(*arg));
        let mut leased: BTreeSet<(Region, u64)> =
            operands.flat_map(|lies| bytes_of(&lies).map(|b| (b.0, b.1)).collect::<Vec<_>>()).collect();
        leased.extend(&written);
        self.flights.insert(node.results[0], Flight { reads: list, writes: written, leased, waited: false });
    }

    fn wait(&mut self, node: &'a Node, plan: &NodePlan) {
        if let Some(flight) = self.flights.get_mut(&node.args[0]) {
            flight.waited = true;
            let flight = flight.clone();
            flight.reads.iter().for_each(|lies| self.find(lies));
            assert!(
                flight.writes.iter().all(|byte| self.memory.get(byte) == Some(&0)),
                "a result was written over"
            );
        }
        self.define(&node.results, &plan.places);
        let pending = self.values[&node.args[0]].clone();
        let places: Vec<_> = pending.iter().flatten().map(|lies| lies.place).collect();
        let mine: Vec<_> =
            node.results.iter().flat_map(|result| self.lies(*result)).map(|lies| lies.place).collect();
        assert_eq!(places, mine);
        self.fill(&node.results);
    }

    /// Parameters of a block that lie where the operands do. A block may wait for what is in flight.
    fn enter(&mut self, params: &[Value], args: &[Value]) {
        self.end_flights(args);
        for (param, arg) in params.iter().zip(args) {
            for i in 0..self.values[param].len() {
                let from = self.values[arg][i].clone();
                let Some(lies) = self.values.get_mut(param).unwrap()[i].as_mut() else { continue };
                lies.names = from.unwrap().names;
                let lies = lies.clone();
                if !self.func.ty(*param).unwrap().is_pending() {
                    self.find(&lies);
                }
            }
        }
    }

    fn end_flights(&mut self, pendings: &[Value]) {
        for pending in pendings {
            if let Some(flight) = self.flights.get_mut(pending) {
                flight.waited = true;
            }
        }
    }

    /// The starts of a block that are still held when it is left are out of sight.
    fn leave(&mut self, before: &BTreeSet<Value>, results: &[Value]) {
        let held: Vec<Value> = self.flights.keys().filter(|start| !before.contains(start)).copied().collect();
        for start in held {
            assert!(results.contains(&start), "{start} is not released in its block");
            self.flights.remove(&start);
        }
    }

    fn cond(&mut self, node: &'a Node, plan: &NodePlan) {
        self.read(node.args[0]);
        let before: BTreeSet<Value> = self.flights.keys().copied().collect();
        self.define(&node.results, &plan.places);
        let mut ends = Vec::new();
        for block in &node.blocks {
            let mut state = self.clone();
            state.define(&block.params, &block.places);
            state.enter(&block.params, &node.args[1..]);
            state.block(block);
            state.leave(&before, &block.results);
            state.results(
                block.results.iter().map(|value| state.values[value].clone()).collect(),
                &node.results,
            );
            ends.push(state);
        }
        let other = ends.pop().unwrap();
        let mut state = ends.pop().unwrap();
        for (byte, name) in &mut state.memory {
            if other.memory.get(byte) != Some(name) {
                *name = 0;
            }
        }
        for byte in other.memory.keys() {
            state.memory.entry(*byte).or_insert(0);
        }
        state.next = state.next.max(other.next);
        *self = state;
    }

    /// What a block returns goes where it belongs, unless it is there.
    fn results(&mut self, inner: Vec<Vec<Option<Lies>>>, outer: &[Value]) {
        let mut move_to = Vec::new();
        for (inner, outer) in inner.into_iter().zip(outer) {
            let pending = self.func.ty(*outer).unwrap().is_pending();
            for (from, to) in inner.into_iter().zip(self.values[outer].clone()) {
                let (Some(from), Some(to)) = (from, to) else { continue };
                if !pending {
                    self.find(&from);
                }
                let there = from.layout.is_contiguous()
                    && from.place.region == to.place.region
                    && from.place.offset + from.layout.start as u64 * from.element == to.place.offset;
                move_to.push((to, there));
            }
        }
        for (to, there) in move_to {
            if !there {
                self.may_write(bytes_of(&to).map(|(region, at, _)| (region, at)));
            }
            for (region, at, name) in bytes_of(&to) {
                self.memory.insert((region, at), name);
            }
        }
    }

    fn scan(&mut self, node: &'a Node, plan: &NodePlan, carries: usize, slices: usize) {
        let block = &node.blocks[0];
        let before: BTreeSet<Value> = self.flights.keys().copied().collect();
        node.args[carries..].iter().for_each(|arg| self.read(*arg));
        self.define(&block.params, &block.places);
        self.end_flights(&node.args);
        for (param, arg) in block.params[..carries].iter().zip(&node.args) {
            let pending = self.func.ty(*arg).unwrap().is_pending();
            for (to, from) in self.lies(*param).iter().zip(self.lies(*arg)) {
                if !pending {
                    self.find(&from);
                }
                let first = from.place.offset + from.layout.start as u64 * from.element;
                if (to.place.region, to.place.offset) != (from.place.region, first) {
                    self.may_write(bytes_of(to).map(|(region, at, _)| (region, at)));
                }
            }
        }
        self.fill(&block.params[..carries]);
        for _ in 0..2 {
            for param in &block.params[carries..carries + slices] {
                self.write(*param);
            }
            self.enter(&block.params[carries + slices..], &node.args[carries + slices..]);
            self.block(block);
            self.leave(&before, &block.results);
            block.results[carries..].iter().for_each(|result| self.read(*result));
            let results = block.results[..carries].iter().map(|value| self.values[value].clone()).collect();
            // New names for the next iteration.
            self.define(&block.params, &block.places);
            self.results(results, &block.params[..carries]);
        }
        self.define(&node.results, &plan.places);
        for (result, param) in node.results[..carries].iter().zip(&block.params) {
            let named = self.values[param].clone();
            let places: Vec<_> = named.iter().flatten().map(|lies| lies.place).collect();
            assert_eq!(places, self.lies(*result).iter().map(|lies| lies.place).collect::<Vec<_>>());
            self.values.insert(*result, named);
        }
        node.results[carries..].iter().for_each(|result| self.write(*result));
    }
}
