//! A planner independent of the real one: every value has its own place, and everything that may be copied is.

use std::collections::{BTreeMap, BTreeSet};

use consort_ir::entity::Value;
use consort_ir::index::Sym;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Alias, Effects, EvalCx, Flow};
use consort_ir::plan::{NodePlan, Place, PlanHeader, Region, RegionKind};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::TensorType;
use consort_types::{Held, Rank};

struct Naive<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    rank: Rank,
    symbols: &'a BTreeMap<Sym, i64>,
    /// Whether views stay views, and blocks take operands in place.
    lazy: bool,
    used: BTreeMap<Region, u64>,
    returned: BTreeSet<Value>,
    /// Values that must be contiguous because communication or a block takes them.
    whole: BTreeSet<Value>,
    places: BTreeMap<Value, Vec<Place>>,
    views: BTreeSet<Value>,
    queues: BTreeMap<String, u32>,
    next: u32,
}

/// A plan of a function for one rank. If `lazy`, views stay views, and blocks take operands in place.
pub fn plan(mesh: &Mesh, func: &Func, rank: Rank, symbols: &BTreeMap<Sym, i64>, lazy: bool) -> Func {
    let mut naive = Naive {
        mesh,
        func,
        rank,
        symbols,
        lazy,
        used: BTreeMap::from([(Region::ARENA, 0), (Region::HEAP, 0)]),
        returned: func.body.results.iter().copied().collect(),
        whole: func.body.results.iter().copied().collect(),
        places: BTreeMap::new(),
        views: BTreeSet::new(),
        queues: BTreeMap::new(),
        next: 0,
    };
    naive.wholes(&func.body);
    let mut planned = func.clone();
    for (number, param) in (0u32..).zip(&func.body.params) {
        let tensors = func.ty(*param).map_or(&[][..], |ty| ty.tensors());
        let places: Vec<Place> =
            tensors.iter().map(|ty| naive.take(Region::of(RegionKind::Arg(number)), ty)).collect();
        planned.body.places.extend(&places);
        naive.places.insert(*param, places);
    }
    naive.block(&mut planned.body);
    planned.plan = Some(Box::new(PlanHeader {
        rank,
        symbols: symbols.iter().map(|(sym, value)| (*sym, *value)).collect(),
        regions: naive.used.into_iter().collect(),
        donated: Vec::new(),
    }));
    planned
}

impl Naive<'_> {
    fn wholes(&mut self, block: &Block) {
        self.whole.extend(&block.results);
        for node in block.nodes.iter().rev() {
            if node.op.effects().starts().is_some() || node.op.flow() != Flow::Straight {
                self.whole.extend(&node.args);
            }
            if node.op.effects() == Effects::Wait && node.results.iter().any(|r| self.returned.contains(r)) {
                self.returned.insert(node.args[0]);
            }
            node.blocks.iter().for_each(|block| self.wholes(block));
        }
    }

    fn take(&mut self, region: Region, ty: &TensorType) -> Place {
        let sizes = EvalCx { mesh: self.mesh, rank: self.rank, symbols: self.symbols };
        let bytes = sizes.index(&ty.bytes()).unwrap_or(0) as u64;
        let used = self.used.entry(region).or_default();
        let offset = used.next_multiple_of(64);
        if !region.is_dyn() {
            *used = offset + bytes;
        }
        Place { region, offset }
    }

    fn fresh(&mut self, value: Value, kept: Region) -> Vec<Place> {
        let tensors = self.func.ty(value).map_or(&[][..], |ty| ty.tensors());
        let mut places = Vec::new();
        for ty in tensors {
            let mut unbacked = false;
            ty.shape.iter().for_each(|s| s.symbols(&mut |sym| unbacked |= matches!(sym, Sym::Unbacked(_))));
            self.next += 1;
            let region = match (unbacked, self.returned.contains(&value)) {
                (true, _) => Region::of(RegionKind::Dyn(self.next)),
                (false, true) => Region::of(RegionKind::Out(self.next)),
                (false, false) => kept,
            };
            places.push(self.take(region, ty));
        }
        self.places.insert(value, places.clone());
        places
    }

    fn block(&mut self, block: &mut Block) {
        let mut starts = BTreeSet::new();
        for node in &mut block.nodes {
            let mut plan = self.node(node);
            // Leases end as early as they can, and every write waits for older ones.
            let is_wait = node.op.effects() == Effects::Wait;
            plan.release.extend(node.args.iter().filter(|arg| is_wait && starts.contains(*arg)));
            plan.entry = !is_wait && !plan.view && !plan.places.is_empty();
            starts.extend(node.results.iter().filter(|_| node.op.effects().starts().is_some()).copied());
            for inside in &mut node.blocks {
                let args = if node.op.flow() == Flow::Cond { &node.args[1..] } else { &node.args[..] };
                for (param, arg) in inside.params.clone().into_iter().zip(args) {
                    let shared = self.lazy && node.op.flow() == Flow::Cond && !self.views.contains(arg);
                    let places = match shared {
                        true => self.places[arg].clone(),
                        false => self.fresh(param, Region::HEAP),
                    };
                    inside.places.extend(&places);
                    self.places.insert(param, places);
                }
                self.block(inside);
            }
            node.plan = (plan != NodePlan::default()).then(|| Box::new(plan));
        }
    }

    fn node(&mut self, node: &Node) -> NodePlan {
        let mut plan = NodePlan::default();
        if node.op.effects() == Effects::Wait {
            let places = self.places[&node.args[0]].clone();
            for (result, place) in node.results.iter().zip(&places) {
                self.places.insert(*result, vec![*place]);
            }
            plan.places = places;
            return plan;
        }
        let free = node.results.iter().all(|result| !self.whole.contains(result));
        if self.lazy && node.op.alias() == Alias::View && free && !node.op.keeps_order() {
            for result in &node.results {
                let place = self.places[&node.args[0]].clone();
                plan.places.extend(&place);
                self.places.insert(*result, place);
                self.views.insert(*result);
            }
            plan.view = true;
            return plan;
        }
        let start = node.op.effects().starts();
        for result in &node.results {
            let region = if start.is_some() { Region::HEAP } else { Region::ARENA };
            plan.places.extend(self.fresh(*result, region));
        }
        let Some(group) = start else { return plan };
        let next = self.queues.entry(self.mesh.group_text(group)).or_default();
        plan.queue = Some((group, *next));
        *next += 1;
        let written: Vec<usize> = (0..plan.places.len()).filter_map(|at| node.op.overwrites(at)).collect();
        for (_, arg) in node.args.iter().enumerate().filter(|(at, _)| !written.contains(at)) {
            if !plan.lease.contains(arg) {
                plan.lease.push(*arg);
            }
        }
        for result in 0..plan.places.len() {
            if let Some(arg) = node.op.overwrites(result)
                && plan.copies.iter().all(|(value, _)| *value != node.args[arg])
            {
                plan.copies.push((node.args[arg], Held::Needed));
            }
        }
        plan
    }
}
