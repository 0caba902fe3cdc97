//! Starts a program's communication on a real group: which call of `comm` an op is, and which buffers it takes.

use consort_comm::{About, Buffer, CommError, Element, Group, Message, Moved, Pending};
use consort_ir::dtype::Dtype;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{
    self, AllGatherStart, AllGatherVStart, AllReduceStart, AllToAllStart, BarrierStart, BroadcastStart,
    EvalCx, ExchangeStart, GatherStart, OpDef, Peer, PermuteStart, ReduceScatterStart, ReduceScatterVStart,
    ReduceStart, ScatterStart,
};
use smallvec::SmallVec;

/// An operand of a start: without gaps, in row-major order.
pub struct Operand<'a> {
    /// Its bytes.
    pub buffer: Buffer,
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: &'a [usize],
    /// What the ends of a message compare; nothing where it is none.
    pub about: About,
}

/// Operands in order.
pub type Operands<'a> = SmallVec<[Operand<'a>; 2]>;
/// Buffers for results, in order.
pub type Outs = SmallVec<[Buffer; 2]>;

/// What a member's results are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Results {
    /// The operands' own buffers, written in place.
    InPlace,
    /// The operands, which are only read.
    Same,
    /// Other buffers.
    New,
    /// Other buffers that nothing is written to: this member gets zeros.
    Zeros,
    /// There are none.
    None,
}

/// What the results of a start are made of at this member of the group.
pub fn results_of(op: &dyn OpDef, me: usize) -> Results {
    let op = op.as_any();
    let at_root = |root: usize, then: Results, other: Results| if root == me { then } else { other };
    if op.is::<AllReduceStart>() {
        Results::InPlace
    } else if let Some(BroadcastStart { root, .. }) = op.downcast_ref() {
        at_root(*root, Results::Same, Results::InPlace)
    } else if let Some(ReduceStart { root, .. }) = op.downcast_ref() {
        at_root(*root, Results::InPlace, Results::Zeros)
    } else if let Some(GatherStart { root, .. }) = op.downcast_ref() {
        at_root(*root, Results::New, Results::Zeros)
    } else if op.is::<BarrierStart>() {
        Results::None
    } else if op.is::<ExchangeStart>() {
        Results::InPlace
    } else {
        Results::New
    }
}

/// A digest of the types and sizes that all members of a group must have in common in a start. Sizes that may differ are
/// left out.
pub fn digest<'a>(op: &dyn OpDef, operands: impl Iterator<Item = (Dtype, &'a [usize])>) -> u64 {
    let uneven = match op.as_any() {
        op if op.is::<AllToAllStart>() => Some(0),
        op => op.downcast_ref().map(|AllGatherVStart { dim, .. }| *dim),
    };
    operands.fold(SEED, |hash, (dtype, shape)| type_digest(hash, dtype, shape, uneven))
}

/// A digest of the type and the sizes of a message.
pub fn message_digest(dtype: Dtype, shape: &[usize]) -> u64 {
    type_digest(SEED, dtype, shape, None)
}

/// FNV-1a over words.
const SEED: u64 = 0xcbf2_9ce4_8422_2325;

fn type_digest(hash: u64, dtype: Dtype, shape: &[usize], uneven: Option<usize>) -> u64 {
    let mix = |hash: u64, number: u64| (hash ^ number).wrapping_mul(0x0000_0100_0000_01b3);
    let sizes = shape.iter().enumerate().filter(|(dim, _)| Some(*dim) != uneven);
    let start = mix(mix(hash, dtype as u64), shape.len() as u64);
    sizes.fold(start, |hash, (_, size)| mix(hash, *size as u64))
}

/// A start as messages between ranks name it: `all_reduce[reduce=sum, over=tp] f32[8,4]`.
pub fn call_text<'a>(
    op: &dyn OpDef,
    mesh: &Mesh,
    operands: impl Iterator<Item = (Dtype, &'a [usize])>,
) -> String {
    let name = op.info().name;
    let mut text = name.strip_suffix("_start").unwrap_or(name).to_string();
    op.write_attrs(&mut text, mesh);
    for (i, (dtype, shape)) in operands.enumerate() {
        text.push_str(if i == 0 { " " } else { ", " });
        text.push_str(&type_text(dtype, shape));
    }
    // A list of hundreds of tensors is told apart by its digest.
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

/// Characters of a call that messages show.
const LONGEST: usize = 400;

/// `f32[8,4]`.
pub fn type_text(dtype: Dtype, shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("{dtype}[{}]", sizes.join(","))
}

/// Starts an op that communicates. `results` are buffers of their own where `results_of` says so. Operands of an
/// exchange are the sends, then the receives, which are written in place.
#[track_caller]
pub fn start(
    op: &dyn OpDef,
    sizes: &EvalCx<'_>,
    group: &Group,
    operands: &[Operand<'_>],
    results: &[Buffer],
) -> Result<Pending, CommError> {
    let (n, op) = (group.size(), op.as_any());
    let several = operands.len() != 1;
    if let Some(AllReduceStart { reduce, .. }) = op.downcast_ref() {
        let Some(dtype) = one_type(operands)? else { return group.barrier() };
        let element = element(dtype);
        return match several {
            false => group.all_reduce(operands[0].buffer.clone(), element, reduction(*reduce)),
            true => group.all_reduce(buffers(operands), element, reduction(*reduce)),
        };
    }
    if let Some(AllGatherStart { dims, .. }) = op.downcast_ref() {
        return match several {
            false => {
                let Moved { operand, result, outer } = alone(operands, results, dims)?;
                group.all_gather(operand, result, outer)
            }
            true => group.all_gather_list(moved(operands, results, dims)),
        };
    }
    if let Some(ReduceScatterStart { reduce, dims, .. }) = op.downcast_ref() {
        let element = element(one_type(operands)?.unwrap_or(Dtype::F32));
        let reduce = reduction(*reduce);
        return match several {
            false => {
                let Moved { operand, result, outer } = alone(operands, results, dims)?;
                group.reduce_scatter(operand, result, element, reduce, outer)
            }
            true => group.reduce_scatter_list(moved(operands, results, dims), element, reduce),
        };
    }
    if let Some(AllToAllStart { in_splits, out_splits, .. }) = op.downcast_ref() {
        let operand = first(operands)?;
        let row = row_bytes(operand, 0);
        let given = |list: &Option<Vec<_>>| match list {
            None => Ok(vec![operand.buffer.len() / n; n]),
            Some(list) => bytes_of(sizes, list, row),
        };
        let (ins, outs) = (given(in_splits)?, given(out_splits)?);
        return group.all_to_all(operand.buffer.clone(), only(results)?, &ins, &outs);
    }
    if let Some(AllGatherVStart { dim, sizes: list, .. }) = op.downcast_ref() {
        let operand = first(operands)?;
        let list = bytes_of(sizes, list, row_bytes(operand, *dim))?;
        let outer = outer(operand.shape, *dim);
        return group.all_gather_v(operand.buffer.clone(), only(results)?, list, outer);
    }
    if let Some(ReduceScatterVStart { reduce, dim, sizes: list, .. }) = op.downcast_ref() {
        let operand = first(operands)?;
        let list = bytes_of(sizes, list, row_bytes(operand, *dim))?;
        let (outer, element) = (outer(operand.shape, *dim), element(operand.dtype));
        let (operand, result) = (operand.buffer.clone(), only(results)?);
        return group.reduce_scatter_v(operand, result, element, reduction(*reduce), list, outer);
    }
    if let Some(BroadcastStart { root, .. }) = op.downcast_ref() {
        return match several {
            false => group.broadcast(operands[0].buffer.clone(), *root),
            true => group.broadcast(buffers(operands), *root),
        };
    }
    if let Some(ReduceStart { reduce, root, .. }) = op.downcast_ref() {
        let element = element(one_type(operands)?.unwrap_or(Dtype::F32));
        return group.reduce(buffers(operands), element, reduction(*reduce), *root);
    }
    if let Some(GatherStart { dims, root, .. }) = op.downcast_ref() {
        let operand = first(operands)?;
        let outer = outer(operand.shape, dims.first().copied().unwrap_or(0));
        return group.gather(operand.buffer.clone(), results.first().cloned(), *root, outer);
    }
    if let Some(ScatterStart { dims, root, .. }) = op.downcast_ref() {
        let operand = first(operands)?;
        let outer = outer(operand.shape, dims.first().copied().unwrap_or(0));
        let given = (*root == group.rank()).then(|| operand.buffer.clone());
        return group.scatter(given, only(results)?, *root, outer);
    }
    if let Some(PermuteStart { route, .. }) = op.downcast_ref() {
        let to = (0..n).map(|from| route.to(from as u32, n as u32).map(|to| to as usize)).collect();
        return group.permute(first(operands)?.buffer.clone(), only(results)?, to);
    }
    if op.is::<BarrierStart>() {
        return group.barrier();
    }
    if let Some(ExchangeStart { send, recv, .. }) = op.downcast_ref() {
        let (mut sends, mut recvs): (SmallVec<[Message; 2]>, SmallVec<[Message; 2]>) = Default::default();
        for (i, (message, operand)) in send.iter().chain(recv).zip(operands).enumerate() {
            let peer = match &message.peer {
                Peer::Route(route) => route.to(group.rank() as u32, n as u32).map(|peer| peer as usize),
                Peer::At(index) => match sizes.index(index).map_err(argument)? {
                    -1 => None,
                    peer => Some(usize::try_from(peer).unwrap_or(usize::MAX)),
                },
            };
            let Some(peer) = peer else { continue };
            let tag = sizes.index(&message.tag).map_err(argument)? as u64;
            let list = if i < send.len() { &mut sends } else { &mut recvs };
            list.push(Message { about: operand.about, ..Message::new(peer, tag, operand.buffer.clone()) });
        }
        return group.exchange(sends, recvs);
    }
    Err(CommError::Argument("not a communication op".into()))
}

fn argument(error: ops::EvalError) -> CommError {
    CommError::Argument(error.0)
}

/// The element type of all operands; none where there are no operands.
fn one_type(operands: &[Operand<'_>]) -> Result<Option<Dtype>, CommError> {
    let Some(first) = operands.first().map(|operand| operand.dtype) else { return Ok(None) };
    match operands.iter().all(|operand| operand.dtype == first) {
        true => Ok(Some(first)),
        false => Err(CommError::Argument(format!(
            "expected tensors of one element type in one communication, got {first} and others"
        ))),
    }
}

/// Each operand with its result, along a dimension of its own.
fn moved(operands: &[Operand<'_>], results: &[Buffer], dims: &[usize]) -> Vec<Moved> {
    let moved = |((operand, result), dim): ((&Operand<'_>, &Buffer), &usize)| Moved {
        outer: outer(operand.shape, *dim),
        operand: operand.buffer.clone(),
        result: result.clone(),
    };
    operands.iter().zip(results).zip(dims).map(moved).collect()
}

/// The only operand with its result.
fn alone(operands: &[Operand<'_>], results: &[Buffer], dims: &[usize]) -> Result<Moved, CommError> {
    let operand = first(operands)?;
    let outer = outer(operand.shape, dims.first().copied().unwrap_or(0));
    Ok(Moved { operand: operand.buffer.clone(), result: only(results)?, outer })
}

fn only(results: &[Buffer]) -> Result<Buffer, CommError> {
    match results {
        [result] => Ok(result.clone()),
        _ => Err(CommError::Argument("expected a buffer for the result".into())),
    }
}

fn first<'a, 'b>(operands: &'a [Operand<'b>]) -> Result<&'a Operand<'b>, CommError> {
    match operands {
        [operand] => Ok(operand),
        _ => Err(CommError::Argument("expected one operand".into())),
    }
}

fn buffers(operands: &[Operand<'_>]) -> Vec<Buffer> {
    operands.iter().map(|operand| operand.buffer.clone()).collect()
}

/// How often the layout along a dimension repeats; once where there is nothing to repeat.
fn outer(shape: &[usize], dim: usize) -> usize {
    shape[..dim.min(shape.len())].iter().product::<usize>().max(1)
}

/// Bytes of one place along a dimension; none where there is nothing outside it to repeat.
fn row_bytes(operand: &Operand<'_>, dim: usize) -> usize {
    let empty = operand.shape.iter().take(dim).any(|size| *size == 0);
    let row = operand.shape.iter().skip(dim + 1).product::<usize>() * operand.dtype.size();
    if empty { 0 } else { row }
}

fn bytes_of(
    sizes: &EvalCx<'_>,
    list: &[consort_ir::index::Index],
    row: usize,
) -> Result<Vec<usize>, CommError> {
    list.iter().map(|size| Ok(sizes.size(size).map_err(argument)? * row)).collect()
}

/// The element type as the group knows it.
pub fn element(dtype: Dtype) -> Element {
    match dtype {
        Dtype::F32 => Element::F32,
        Dtype::F64 => Element::F64,
        Dtype::F16 => Element::F16,
        Dtype::Bf16 => Element::Bf16,
        Dtype::I32 => Element::I32,
        Dtype::I64 => Element::I64,
        Dtype::U8 => Element::U8,
        Dtype::Bool => Element::Bool,
    }
}

/// The reduction as the group knows it.
pub fn reduction(reduce: ops::Reduce) -> consort_comm::Reduce {
    match reduce {
        ops::Reduce::Sum => consort_comm::Reduce::Sum,
        ops::Reduce::Avg => consort_comm::Reduce::Avg,
        ops::Reduce::Product => consort_comm::Reduce::Product,
        ops::Reduce::Min => consort_comm::Reduce::Min,
        ops::Reduce::Max => consort_comm::Reduce::Max,
        ops::Reduce::And => consort_comm::Reduce::And,
        ops::Reduce::Or => consort_comm::Reduce::Or,
        ops::Reduce::Xor => consort_comm::Reduce::Xor,
        ops::Reduce::PremulSum(factor) => consort_comm::Reduce::PremulSum(factor),
    }
}
