//! Walks a plan line by line: every tensor is read from and written to its place, bytes and all.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use consort_comm::{CommError, Group, Pending};
use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::mesh::{Mesh, Rank};
use consort_ir::ops::{AllReduceStart, Effects, EvalCx, Flow};
use consort_ir::plan::{Place, Region};
use consort_ir::program::{Func, Node};
use consort_ir::tensor::{Tensor, numel};
use consort_ir::types::{TensorType, Type};

use crate::start::{element, reduction};

/// Why a plan did not run to its end on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunError {
    /// The function is no plan, or its plan is not one this executor was given.
    Plan(String),
    /// The op cannot be run here yet.
    NotYet(String),
    /// An op failed.
    Op(String),
    /// Communication failed.
    Comm(CommError),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Plan(message) | RunError::Op(message) => f.write_str(message),
            RunError::NotYet(op) => write!(f, "{op}: the executor cannot run it yet\n  note: the oracle can"),
            RunError::Comm(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RunError {}

/// Runs a planned function on one rank of a group that is the whole mesh. Nothing waits past the time given.
pub fn execute(
    mesh: &Mesh,
    func: &Func,
    group: &Group,
    inputs: &[Tensor],
    until: Instant,
) -> Result<Vec<Tensor>, RunError> {
    let plan = func.plan.as_ref().ok_or_else(|| RunError::Plan(format!("@{} is no plan", func.name)))?;
    if group.size() != mesh.n_ranks() as usize || inputs.len() != func.body.params.len() {
        return Err(RunError::Plan(format!("@{}: the group or the arguments do not fit", func.name)));
    }
    let memory =
        plan.regions.iter().map(|(region, size)| Ok((*region, zeroed(*size)?))).collect::<Result<_, _>>()?;
    let mut run =
        Run { mesh, func, group, until, memory, places: BTreeMap::new(), in_flight: BTreeMap::new() };
    for ((param, place), input) in func.body.params.iter().zip(&func.body.places).zip(inputs) {
        run.places.insert(*param, *place);
        run.write(*place, input)?;
    }
    for node in &func.body.nodes {
        run.node(node)?;
    }
    func.body.results.iter().map(|result| run.read(*result)).collect()
}

/// So many zero bytes, or an error where the machine has not so many.
fn zeroed(size: u64) -> Result<Vec<u8>, RunError> {
    let none = |_| RunError::Plan(format!("the plan wants {size} bytes, which this machine does not have"));
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX)).map_err(none)?;
    bytes.resize(size as usize, 0);
    Ok(bytes)
}

struct Run<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    group: &'a Group,
    until: Instant,
    memory: BTreeMap<Region, Vec<u8>>,
    places: BTreeMap<Value, Place>,
    in_flight: BTreeMap<Value, Pending>,
}

impl Run<'_> {
    fn tensor_type(&self, value: Value) -> Result<&TensorType, RunError> {
        let ty = self.func.ty(value).and_then(Type::as_tensor);
        ty.ok_or_else(|| RunError::Plan(format!("{value} is no tensor")))
    }

    fn shape(&self, value: Value) -> Result<Vec<usize>, RunError> {
        let size = |size: &Index| size.as_const().and_then(|size| usize::try_from(size).ok());
        let shape = self.tensor_type(value)?.shape.iter().map(size).collect::<Option<_>>();
        shape.ok_or_else(|| RunError::Plan(format!("{value} has a size that is not a number")))
    }

    fn read(&self, value: Value) -> Result<Tensor, RunError> {
        let (ty, shape) = (self.tensor_type(value)?, self.shape(value)?);
        let tensor = (|| {
            let place = self.places.get(&value)?;
            let start = usize::try_from(place.offset).ok()?;
            let bytes = numel(&shape)? * ty.dtype.size();
            Tensor::from_bytes(ty.dtype, shape, self.memory.get(&place.region)?.get(start..)?.get(..bytes)?)
        })();
        tensor.ok_or_else(|| RunError::Plan(format!("{value} lies in no region of the plan")))
    }

    fn write(&mut self, place: Place, tensor: &Tensor) -> Result<(), RunError> {
        let bytes = tensor.to_bytes();
        let start = usize::try_from(place.offset).unwrap_or(usize::MAX);
        let region = self
            .memory
            .get_mut(&place.region)
            .and_then(|region| region.get_mut(start..)?.get_mut(..bytes.len()));
        let region =
            region.ok_or_else(|| RunError::Plan(format!("{place} lies in no region of the plan")))?;
        region.copy_from_slice(&bytes);
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Result<(), RunError> {
        let op = node.op.info().name;
        let places = node.plan.as_ref().map_or(&[][..], |plan| &plan.places);
        let results = match (node.op.effects(), node.op.flow()) {
            (Effects::Wait, _) => {
                let pending = self.in_flight.remove(&node.args[0]);
                let pending = pending.ok_or_else(|| RunError::Plan(format!("{op}: nothing is in flight")))?;
                let buffers = pending.wait(self.until).map_err(RunError::Comm)?;
                let mut tensors = Vec::new();
                for (buffer, result) in buffers.iter().zip(&node.results) {
                    let (dtype, shape) = (self.tensor_type(*result)?.dtype, self.shape(*result)?);
                    let tensor = Tensor::from_bytes(dtype, shape, &buffer.bytes().map_err(RunError::Comm)?);
                    tensors.push(tensor.ok_or_else(|| RunError::Plan(format!("{result} has another size")))?);
                }
                tensors
            }
            (Effects::Collective(group), _) => {
                let whole = self.mesh.group_size(group) as usize == self.group.size();
                let (true, 1, Some(all_reduce)) = (whole, node.args.len(), node.op.as_op::<AllReduceStart>())
                else {
                    return Err(RunError::NotYet(op.to_string()));
                };
                let operand = self.read(node.args[0])?;
                let (element, reduce) = (element(operand.dtype), reduction(all_reduce.reduce));
                let pending = (|| {
                    let bytes = operand.to_bytes();
                    let mut buffer = self.group.heap().alloc(bytes.len())?;
                    buffer.bytes_mut(self.until)?.copy_from_slice(&bytes);
                    self.group.all_reduce(buffer, element, reduce)
                })();
                self.in_flight.insert(node.results[0], pending.map_err(RunError::Comm)?);
                return Ok(());
            }
            (Effects::Pure, Flow::Straight) => {
                let args = node.args.iter().map(|arg| self.read(*arg)).collect::<Result<Vec<_>, _>>()?;
                let rank = Rank(self.group.rank() as u32);
                let cx = EvalCx { mesh: self.mesh, rank, symbols: &BTreeMap::new() };
                node.op
                    .eval(&cx, &args.iter().collect::<Vec<_>>())
                    .map_err(|error| RunError::Op(format!("{op}: {error}")))?
            }
            _ => return Err(RunError::NotYet(op.to_string())),
        };
        for ((result, tensor), place) in node.results.iter().zip(&results).zip(places) {
            self.places.insert(*result, *place);
            self.write(*place, tensor)?;
        }
        Ok(())
    }
}
