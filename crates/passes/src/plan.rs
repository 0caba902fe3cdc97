//! Gives every tensor a place of its own, in program order.
//!
//! Assumes: the program verifies. Keeps: the order of everything. Does not: reuse storage, or plan values
//! whose size is not a constant. Results of communication lie in the heap, where peers will be able to reach
//! them, everything else in the arena.

use std::collections::BTreeMap;
use std::fmt;

use consort_ir::entity::Value;
use consort_ir::index::Sym;
use consort_ir::mesh::{Mesh, Rank};
use consort_ir::plan::{Head, NodePlan, Place, Region};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::{TensorType, Type};

/// Why a program could not be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// The size of a value is not a constant.
    SymbolicSize {
        /// The function.
        func: String,
        /// The type, as programs write it.
        ty: String,
    },
    /// A region would not fit in 64 bits.
    TooLarge {
        /// The function.
        func: String,
        /// The type that was one too many.
        ty: String,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::SymbolicSize { func, ty } => {
                write!(f, "plan: @{func}: expected constant sizes, got {ty}")?;
                write!(f, "\n  note: symbolic sizes are not planned yet; give the function sizes as numbers")
            }
            PlanError::TooLarge { func, ty } => {
                write!(f, "plan: @{func}: {ty} does not fit in 64 bits of memory")
            }
        }
    }
}

impl std::error::Error for PlanError {}

/// For which rank and sizes a plan is made, and which arguments it may overwrite.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    /// The rank.
    pub rank: Rank,
    /// What the backed symbols are.
    pub symbols: &'a BTreeMap<Sym, i64>,
    /// Whether each parameter's storage is given away; false where the list is too short.
    pub donated: &'a [bool],
}

/// Places are aligned to a cache line, so that no two tensors share one.
const ALIGN: u64 = 64;

struct Planner<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    /// How much of each region is taken.
    used: BTreeMap<Region, u64>,
    /// The next number on each queue.
    queues: BTreeMap<String, u32>,
    /// The places inside each pending: its wait gives its tensors where they already lie.
    pending: BTreeMap<Value, Vec<Place>>,
}

/// The function with a place for every tensor, a queue and a number for every start.
pub fn plan(mesh: &Mesh, func: &Func, at: &At<'_>) -> Result<Func, PlanError> {
    let mut planner =
        Planner { mesh, func, used: BTreeMap::new(), queues: BTreeMap::new(), pending: BTreeMap::new() };
    let mut planned = func.clone();
    for (number, param) in func.body.params.iter().enumerate() {
        if let Some(Type::Tensor(tensor)) = func.ty(*param) {
            planned.body.places.push(planner.place(Region::Arg(number as u32), tensor)?);
        }
    }
    planner.block(&mut planned.body)?;
    let given = func.body.params.iter().zip(at.donated).filter(|(_, donated)| **donated);
    planned.plan = Some(Box::new(Head {
        rank: at.rank,
        symbols: at.symbols.iter().map(|(sym, value)| (*sym, *value)).collect(),
        regions: planner.used.into_iter().collect(),
        donated: given.map(|(param, _)| *param).collect(),
    }));
    Ok(planned)
}

impl Planner<'_> {
    fn place(&mut self, region: Region, tensor: &TensorType) -> Result<Place, PlanError> {
        let bytes = tensor.bytes().as_const().and_then(|bytes| u64::try_from(bytes).ok());
        let used = self.used.entry(region).or_default();
        let (func, ty) = (self.func.name.clone(), tensor.display(self.mesh).to_string());
        let Some(bytes) = bytes else { return Err(PlanError::SymbolicSize { func, ty }) };
        let offset = used.checked_next_multiple_of(ALIGN);
        let end = offset.and_then(|offset| offset.checked_add(bytes));
        let (Some(offset), Some(end)) = (offset, end) else { return Err(PlanError::TooLarge { func, ty }) };
        *used = end;
        Ok(Place { region, offset })
    }

    fn block(&mut self, block: &mut Block) -> Result<(), PlanError> {
        for node in &mut block.nodes {
            let plan = self.node(node)?;
            node.plan = (plan != NodePlan::default()).then(|| Box::new(plan));
            for inside in &mut node.blocks {
                self.block(inside)?;
            }
        }
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Result<NodePlan, PlanError> {
        let mut plan = NodePlan::default();
        if let Some(places) = node.args.first().and_then(|arg| self.pending.get(arg)) {
            plan.places = places.clone();
            return Ok(plan);
        }
        for result in &node.results {
            match self.func.ty(*result) {
                Some(Type::Tensor(tensor)) => plan.places.push(self.place(Region::Arena, tensor)?),
                Some(Type::Pending(tensors)) => {
                    let places = tensors
                        .iter()
                        .map(|tensor| self.place(Region::Heap, tensor))
                        .collect::<Result<Vec<_>, _>>()?;
                    plan.places.extend_from_slice(&places);
                    self.pending.insert(*result, places);
                }
                _ => {}
            }
        }
        if let Some(group) = node.op.effects().starts() {
            let next = self.queues.entry(self.mesh.group_text(group)).or_default();
            plan.queue = Some((group, *next));
            *next += 1;
            plan.lease = node.args.clone();
        }
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use consort_ir::ops::OpTable;
    use consort_ir::program::Program;
    use consort_ir::text::{parse, print};
    use consort_ir::verify::verify;

    fn planned(text: &str) -> Result<Program, PlanError> {
        let program = parse(text, &OpTable::built_in()).unwrap().program;
        let at = At { rank: Rank(0), symbols: &BTreeMap::new(), donated: &[] };
        let func = plan(&program.mesh, &program.funcs[0], &at)?;
        Ok(Program { mesh: program.mesh, funcs: vec![func] })
    }

    #[test]
    fn every_value_has_a_place_of_its_own() {
        let text = "mesh (dp: 2)\n\nfunc @f(v0: f32[4]{dp}) -> f32[4] {\n    v1 = neg v0 : f32[4]{dp}\n    \
                    v2 = all_reduce_start[reduce=sum, over=dp] v1 : pending<f32[4]>\n    v3 = wait v2 : f32[4]\n    return v3\n}\n";
        let planned = planned(text).unwrap();
        assert_eq!(verify(&planned), []);
        let expected = "mesh (dp: 2)

func @f(v0: f32[4]{dp} @arg0+0x0) -> f32[4]
plan (rank 0, arg0: 0x10, arena: 0x10, heap: 0x10) {
    v1 = neg v0                                      : f32[4]{dp} @arena+0x0
    v2 = all_reduce_start[reduce=sum, over=dp] v1    : pending<f32[4]> @heap+0x0 queue dp #0 lease v1
    v3 = wait v2                                     : f32[4] @heap+0x0
    return v3
}
";
        assert_eq!(print(&planned), expected);
    }

    #[test]
    fn symbolic_sizes_are_refused() {
        let error = planned("mesh ()\n\nfunc @f(v0: f32[s0]) -> f32[s0] {\n    return v0\n}\n").unwrap_err();
        assert!(error.to_string().starts_with("plan: @f: expected constant sizes, got f32[s0]"));
    }
}
