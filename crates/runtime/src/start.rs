//! Starts a program's communication on a real group: maps a collective to a call of `comm` and its buffers.

use consort_comm::{About, Buffer, CommError, Group, Message, Moved, Pending};
use consort_ir::index::Index;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, EvalError, OpDef, call_name};
use consort_types::{Collective, Digest, Dtype, Kind};
use smallvec::SmallVec;

/// An operand of a start: contiguous, in row-major order.
pub struct Operand<'a> {
    /// Its bytes.
    pub buffer: Buffer,
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: &'a [usize],
    /// What both ends of a message compare; default if it is not a message.
    pub about: About,
}

/// Operands in order.
pub type Operands<'a> = SmallVec<[Operand<'a>; 2]>;
/// Buffers for results, in order.
pub type Outs = SmallVec<[Buffer; 2]>;

/// A digest of the types and sizes that all members of a group must have in common in a start. Sizes that may differ
/// are left out.
pub fn digest<'a>(
    collective: &Collective<'_, Index>,
    operands: impl Iterator<Item = (Dtype, &'a [usize])>,
) -> u64 {
    let mut digest = Digest::default();
    let uneven = collective.uneven();
    operands.for_each(|(dtype, shape)| add_type(&mut digest, dtype, shape, uneven));
    digest.get()
}

/// A digest of the type and the sizes of a message.
pub fn message_digest(dtype: Dtype, shape: &[usize]) -> u64 {
    let mut digest = Digest::default();
    add_type(&mut digest, dtype, shape, None);
    digest.get()
}

fn add_type(digest: &mut Digest, dtype: Dtype, shape: &[usize], uneven: Option<usize>) {
    digest.add(dtype as u64);
    digest.add(shape.len() as u64);
    let sizes = shape.iter().enumerate().filter(|(dim, _)| Some(*dim) != uneven);
    sizes.for_each(|(_, size)| digest.add(*size as u64));
}

/// A start as messages between ranks name it: `all_reduce[reduce=sum, over=tp] f32[8,4]`.
pub fn call_text<'a>(
    op: &dyn OpDef,
    mesh: &Mesh,
    operands: impl Iterator<Item = (Dtype, &'a [usize])>,
) -> String {
    let mut text = call_name(op.info().name).to_string();
    op.write_attrs(&mut text, mesh);
    for (i, (dtype, shape)) in operands.enumerate() {
        text.push_str(if i == 0 { " " } else { ", " });
        text.push_str(&type_text(dtype, shape));
    }
    // Long lists are cut; the digest still distinguishes them.
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

/// The longest call text in messages, in characters.
const LONGEST: usize = 400;

/// `f32[8,4]`.
pub fn type_text(dtype: Dtype, shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("{dtype}[{}]", sizes.join(","))
}

/// Starts communication. `results` are separate buffers if the member's role says so. Operands of an exchange are the
/// sends, then the receives, which are written in place.
#[track_caller]
pub fn start(
    collective: &Collective<'_, Index>,
    sizes: &EvalCx<'_>,
    group: &Group,
    operands: &[Operand<'_>],
    results: &[Buffer],
) -> Result<Pending, CommError> {
    let Collective { dims, root, .. } = *collective;
    let reduce = || collective.reduce.ok_or_else(|| CommError::Argument("expected a reduction".into()));
    let root = || root.ok_or_else(|| CommError::Argument("expected a root".into()));
    let dim = dims.first().copied().unwrap_or(0);
    match collective.kind {
        Kind::AllReduce => {
            let Some(dtype) = one_type(operands)? else { return group.barrier() };
            let reduce = reduce()?;
            match operands {
                [operand] => group.all_reduce(operand.buffer.clone(), dtype, reduce),
                _ => group.all_reduce(buffers(operands), dtype, reduce),
            }
        }
        Kind::AllGather => match operands {
            [operand] => group.all_gather(operand.buffer.clone(), only(results)?, outer(operand.shape, dim)),
            _ => group.all_gather_list(moved(operands, results, dims)),
        },
        Kind::ReduceScatter => {
            let (dtype, reduce) = (one_type(operands)?.unwrap_or(Dtype::F32), reduce()?);
            match operands {
                [operand] => {
                    let outer = outer(operand.shape, dim);
                    group.reduce_scatter(operand.buffer.clone(), only(results)?, dtype, reduce, outer)
                }
                _ => group.reduce_scatter_list(moved(operands, results, dims), dtype, reduce),
            }
        }
        Kind::AllToAll => {
            let (operand, n) = (first(operands)?, group.size());
            let (ins, outs) = match collective.splits {
                None => {
                    let even = vec![operand.buffer.len() / n; n];
                    (even.clone(), even)
                }
                Some((ins, outs)) => {
                    let row = row_bytes(operand, 0);
                    (bytes_of(sizes, ins, row)?, bytes_of(sizes, outs, row)?)
                }
            };
            group.all_to_all(operand.buffer.clone(), only(results)?, &ins, &outs)
        }
        Kind::AllGatherV => {
            let operand = first(operands)?;
            let list = bytes_of(sizes, collective.sizes, row_bytes(operand, dim))?;
            group.all_gather_v(operand.buffer.clone(), only(results)?, list, outer(operand.shape, dim))
        }
        Kind::ReduceScatterV => {
            let operand = first(operands)?;
            let list = bytes_of(sizes, collective.sizes, row_bytes(operand, dim))?;
            let (outer, dtype) = (outer(operand.shape, dim), operand.dtype);
            group.reduce_scatter_v(operand.buffer.clone(), only(results)?, dtype, reduce()?, list, outer)
        }
        Kind::Broadcast => match operands {
            [operand] => group.broadcast(operand.buffer.clone(), root()?),
            _ => group.broadcast(buffers(operands), root()?),
        },
        Kind::Reduce => {
            let dtype = one_type(operands)?.unwrap_or(Dtype::F32);
            group.reduce(buffers(operands), dtype, reduce()?, root()?)
        }
        Kind::Gather => {
            let operand = first(operands)?;
            let outer = outer(operand.shape, dim);
            group.gather(operand.buffer.clone(), results.first().cloned(), root()?, outer)
        }
        Kind::Scatter => {
            let (operand, root) = (first(operands)?, root()?);
            let given = (root == group.rank()).then(|| operand.buffer.clone());
            group.scatter(given, only(results)?, root, outer(operand.shape, dim))
        }
        Kind::Permute => {
            let n = group.size() as u32;
            let to = |from| collective.route.and_then(|route| route.to(from, n)).map(|to| to as usize);
            group.permute(first(operands)?.buffer.clone(), only(results)?, (0..n).map(to).collect())
        }
        Kind::Barrier => group.barrier(),
        Kind::Exchange => exchange(collective, sizes, group, operands),
    }
}

/// Starts the messages that have a peer.
#[track_caller]
fn exchange(
    collective: &Collective<'_, Index>,
    sizes: &EvalCx<'_>,
    group: &Group,
    operands: &[Operand<'_>],
) -> Result<Pending, CommError> {
    let Collective { sends: send, receives, .. } = collective;
    let (mut sends, mut recvs): (SmallVec<[Message; 2]>, SmallVec<[Message; 2]>) = Default::default();
    for (i, (message, operand)) in send.iter().chain(*receives).zip(operands).enumerate() {
        let index = |index: &Index| sizes.index(index).map_err(argument);
        let peer = match message.peer(group.rank() as u32, group.size() as u32, index)? {
            -1 => continue,
            peer => usize::try_from(peer).unwrap_or(usize::MAX),
        };
        let tag = index(&message.tag)? as u64;
        let list = if i < send.len() { &mut sends } else { &mut recvs };
        list.push(Message { about: operand.about, ..Message::new(peer, tag, operand.buffer.clone()) });
    }
    group.exchange(sends, recvs)
}

fn argument(error: EvalError) -> CommError {
    CommError::Argument(error.0)
}

/// The common element type of all operands; `None` without operands.
fn one_type(operands: &[Operand<'_>]) -> Result<Option<Dtype>, CommError> {
    let Some(first) = operands.first().map(|operand| operand.dtype) else { return Ok(None) };
    match operands.iter().all(|operand| operand.dtype == first) {
        true => Ok(Some(first)),
        false => Err(CommError::Argument(format!(
            "expected tensors of one element type in one communication, got {first} and others"
        ))),
    }
}

/// Each operand with its result and its dimension.
fn moved(operands: &[Operand<'_>], results: &[Buffer], dims: &[usize]) -> Vec<Moved> {
    let moved = |((operand, result), dim): ((&Operand<'_>, &Buffer), &usize)| Moved {
        outer: outer(operand.shape, *dim),
        operand: operand.buffer.clone(),
        result: result.clone(),
    };
    operands.iter().zip(results).zip(dims).map(moved).collect()
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

/// The product of the sizes outside a dimension; at least 1.
fn outer(shape: &[usize], dim: usize) -> usize {
    shape[..dim.min(shape.len())].iter().product::<usize>().max(1)
}

/// Bytes of one index along a dimension; 0 if a dimension outside it is empty.
fn row_bytes(operand: &Operand<'_>, dim: usize) -> usize {
    let empty = operand.shape.iter().take(dim).any(|size| *size == 0);
    let row = operand.shape.iter().skip(dim + 1).product::<usize>() * operand.dtype.size();
    if empty { 0 } else { row }
}

fn bytes_of(sizes: &EvalCx<'_>, list: &[Index], row: usize) -> Result<Vec<usize>, CommError> {
    list.iter().map(|size| Ok(sizes.size(size).map_err(argument)? * row)).collect()
}
