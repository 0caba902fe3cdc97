//! Starts a program's communication on a real group.

use consort_comm::{Buffer, Buffers, CommError, Group, OperandType, Pending, Request};
use consort_ir::index::Index;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, EvalError, OpDef, call_name};
use consort_types::{Collective, Digest, Dtype, Failure, Kind, Message, Peer};
use smallvec::SmallVec;

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

/// Starts communication: evaluates sizes, and hands over to the group. Operands are contiguous, in row-major order; results
/// are those of the member's role.
pub fn start(
    group: &Group,
    sizes: &EvalCx<'_>,
    request: Request<'_, Index, impl Into<Buffers>, impl IntoIterator<Item = Buffer>>,
) -> Result<Pending, CommError> {
    let Request { collective, types, operands, results, note, site } = request;
    let Collective { kind, over, reduce, root, dims, route, .. } = *collective;
    let plain = Collective { reduce, root, dims, route, ..Collective::new(kind, over) };
    if kind.reduces() && types.iter().any(|ty| ty.dtype != types[0].dtype) {
        let (operands, results) = (operands.into(), results.into_iter().collect::<Buffers>());
        let request =
            Request { collective: &plain, types, operands: &operands[..], results: &results[..], note, site };
        return start_mixed(group, request);
    }
    if collective.is_plain() && collective.has_operands(group.rank()) {
        return group.start(Request { collective: &plain, types, operands, results, note, site });
    }
    let operands = if collective.has_operands(group.rank()) { operands.into() } else { Buffers::default() };
    let (ins, outs) = collective.splits.unwrap_or_default();
    let [parts, ins, outs] = [collective.sizes, ins, outs].map(|list| evaluated(sizes, list));
    let (parts, ins, outs) = (parts?, ins?, outs?);
    if let (Kind::AllGatherV, Some(part), [dim], [x]) = (kind, parts.get(group.rank()), dims, types)
        && x.shape.get(*dim) != Some(part)
    {
        let expected = format!("dimension {dim} to be {part}, this member's entry of the sizes {parts:?}");
        let got = x.shape.get(*dim).map_or_else(String::new, usize::to_string);
        return Err(CommError::Argument(Failure::new((expected, got))));
    }
    let splits = collective.splits.map(|_| (&ins[..], &outs[..]));
    let [sends, receives] = [collective.sends, collective.receives].map(|list| messages(sizes, group, list));
    let (sends, receives) = (sends?, receives?);
    let plain = Collective { sizes: &parts, splits, sends: &sends, receives: &receives, ..plain };
    group.start(Request { collective: &plain, types, operands, results, note, site })
}

/// Starts a reduction of several element types. A group takes larger elements first, so that each operand is aligned
/// where the list is laid end to end.
fn start_mixed(
    group: &Group,
    request: Request<'_, usize, &[Buffer], &[Buffer]>,
) -> Result<Pending, CommError> {
    let Request { collective, types, operands, results, note, site } = request;
    let mut order: Vec<usize> = (0..types.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(types[*i].dtype.size()));
    let buffers =
        |list: &[Buffer]| -> Buffers { order.iter().filter_map(|i| list.get(*i).cloned()).collect() };
    let types: Vec<OperandType<'_>> = order.iter().map(|i| types[*i]).collect();
    let dims: Vec<usize> = order.iter().filter_map(|i| collective.dims.get(*i).copied()).collect();
    let collective = &Collective { dims: &dims, ..*collective };
    let (operands, results) = (buffers(operands), buffers(results));
    group.start(Request { collective, types: &types, operands, results, note, site })
}

fn evaluated(sizes: &EvalCx<'_>, list: &[Index]) -> Result<SmallVec<[usize; 4]>, CommError> {
    list.iter().map(|size| sizes.size(size).map_err(argument)).collect()
}

/// Messages with the numbers of their peers.
fn messages(
    sizes: &EvalCx<'_>,
    group: &Group,
    list: &[Message<Index>],
) -> Result<SmallVec<[Message<usize>; 2]>, CommError> {
    let mut messages = SmallVec::new();
    let (me, n) = (group.rank(), group.size());
    for message in list {
        let index = |index: &Index| sizes.index(index).map_err(argument);
        let peer = match message.peer(me as u32, n as u32, index)? {
            -1 => Message::NOBODY,
            peer => match usize::try_from(peer).ok().filter(|peer| *peer < n) {
                Some(peer) => peer,
                None => return Err(CommError::Argument(Failure::peer(n as u32, peer))),
            },
        };
        messages.push(Message { peer: Peer::At(peer), tag: index(&message.tag)? as usize });
    }
    Ok(messages)
}

fn argument(error: EvalError) -> CommError {
    CommError::Argument(error.failure())
}
