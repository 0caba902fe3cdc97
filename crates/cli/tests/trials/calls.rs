//! The calls of a trial: started as planned or with a fault in them, and their results against plain loops.

use std::time::Instant;

use consort_comm::{
    Buffer, Buffers, CommError, Common, Group, Message, OperandType, Outcome, Pending, Request,
};
use consort_types::{self as types, Axes, Collective, Dtype, GroupName, Reduce, Route};

use super::plan::{Call, Fault, Kind};

fn value(member: usize, i: usize, salt: usize) -> i32 {
    ((member * 7919 + i * 31 + salt) % 65_521) as i32
}

fn encode(values: impl Iterator<Item = i32>) -> Vec<u8> {
    values.flat_map(i32::to_le_bytes).collect()
}

/// The number of elements of a member in an uneven call: some have none.
fn uneven(call: &Call, member: usize) -> usize {
    call.count * (member % 3) / 2
}

fn sizes(call: &Call, n: usize) -> Vec<usize> {
    (0..n).map(|member| uneven(call, member) * 4).collect()
}

/// Bytes from one member to another in an all_to_all: sometimes none, and different for every count.
fn split(call: &Call, from: usize, to: usize) -> usize {
    call.count * ((from + 2 * to) % 3) / 2 * 4
}

/// A call that was started: waits for it, and gives the bytes of its last result.
pub(crate) type Started = Box<dyn FnOnce(Instant) -> Result<Vec<u8>, CommError>>;

trait Bytes: Outcome + 'static {
    fn bytes(&self) -> Vec<u8>;
}

impl Bytes for Buffers {
    fn bytes(&self) -> Vec<u8> {
        self.last().and_then(|buffer| Some(buffer.bytes().ok()?.to_vec())).unwrap_or_default()
    }
}

impl Bytes for (Buffers, Common) {
    fn bytes(&self) -> Vec<u8> {
        self.1.bytes().to_vec()
    }
}

fn started<T: Bytes>(pending: Result<Pending<T>, CommError>) -> Result<Started, CommError> {
    let pending = pending?;
    Ok(Box::new(move |until| Ok(pending.wait(until)?.bytes())))
}

/// Starts a call, with this fault in it where one is given.
pub(crate) fn start(group: &Group, planned: &Call, fault: Option<Fault>) -> Result<Started, CommError> {
    let (me, n) = (group.rank(), group.size());
    let mut call = *planned;
    let mut element = Dtype::I32;
    match fault {
        // Any other; a barrier is one that every call can be confused with.
        Some(Fault::OtherOp) => {
            let i = Kind::ALL.iter().position(|kind| *kind == call.kind).unwrap_or(0);
            let others = Kind::ALL.len() - 1;
            call.kind = Kind::ALL[(i + 1 + call.salt % (others - 1)) % others];
        }
        Some(Fault::OtherElement) => element = Dtype::U8,
        Some(Fault::OtherBytes) => call.count += 2,
        Some(Fault::OtherReduction) => call.reduce = Reduce::Max,
        Some(Fault::OtherRoot) => call.root += 1 + call.salt % (n - 1),
        _ => {}
    }
    let (count, reduce, root) = (call.count, call.reduce, call.root % n);
    let filled = |count: usize| group.heap().alloc_from(&encode((0..count).map(|i| value(me, i, call.salt))));
    let room = |count: usize| group.heap().alloc(count * 4);
    let at_root = |buffer: Result<Buffer, CommError>| if me == root { buffer.map(Some) } else { Ok(None) };
    match call.kind {
        Kind::AllReduce => started(group.all_reduce(filled(count)?, element, reduce)),
        Kind::AllReduceList => started(group.all_reduce([filled(1)?, filled(count)?], element, reduce)),
        Kind::AllReduceCommon => started(group.all_reduce_common(filled(count)?, element, reduce)),
        Kind::AllGather => started(group.all_gather(filled(count)?, room(count * n)?, 1)),
        Kind::AllGatherList => {
            let collective = Collective::new(types::Kind::AllGather, GroupName::Axes(Axes::NONE));
            let types = [OperandType::new(element, &[])];
            let operands = [filled(2)?, filled(count)?];
            let results = [room(2 * n)?, room(count * n)?];
            started(group.start(Request::new(&collective, &types, operands, results)))
        }
        Kind::AllGatherCommon => started(group.all_gather_common(filled(count)?, 1)),
        Kind::ReduceScatter => {
            started(group.reduce_scatter(filled(count * n)?, room(count)?, element, reduce, 1))
        }
        Kind::AllToAll => {
            let mut ins: Vec<usize> = (0..n).map(|to| split(&call, me, to)).collect();
            if fault == Some(Fault::OtherSplits) {
                ins[(me + 1) % n] += 4;
            }
            let outs: Vec<usize> = (0..n).map(|from| split(&call, from, me)).collect();
            let [operand, result] = [&ins, &outs].map(|sizes| sizes.iter().sum::<usize>() / 4);
            started(group.all_to_all(filled(operand)?, room(result)?, &ins, &outs))
        }
        Kind::Broadcast => started(group.broadcast(filled(count)?, root)),
        Kind::BroadcastCommon => started(group.broadcast_common(at_root(filled(count))?, root)),
        Kind::Reduce => started(group.reduce(filled(count)?, element, reduce, root)),
        Kind::Gather => started(group.gather(filled(count)?, at_root(room(count * n))?, root, 1)),
        Kind::Scatter => started(group.scatter(at_root(filled(count * n))?, room(count)?, root, 1)),
        Kind::AllGatherV => {
            let sizes = sizes(&call, n);
            let whole = sizes.iter().sum::<usize>() / 4;
            started(group.all_gather_v(filled(uneven(&call, me))?, room(whole)?, &sizes, 1))
        }
        Kind::ReduceScatterV => {
            let sizes: Vec<usize> = (0..n).map(|member| uneven(&call, member)).collect();
            let (operand, result) = (filled(sizes.iter().sum())?, room(sizes[me])?);
            // The same bytes, whatever the element type: only what differs by the fault may differ.
            let sizes: Vec<usize> = sizes.iter().map(|size| size * 4 / element.size()).collect();
            started(group.reduce_scatter_v(operand, result, element, reduce, &sizes, 1))
        }
        Kind::Permute => {
            let mut to: Vec<Option<u32>> = (0..n).map(|m| (m + 1 < n).then_some(m as u32 + 1)).collect();
            if fault == Some(Fault::OtherRoute) {
                // Differs from the others only in a part that need not concern this member.
                to[n - 1] = Some(0);
            }
            started(group.permute(filled(count)?, room(count)?, &Route::Table(to)))
        }
        Kind::Barrier => started(group.barrier()),
        Kind::Exchange => {
            let longer = usize::from(fault == Some(Fault::OtherLength));
            let tag = call.salt as u64 % 3;
            let send = Message::new((me + 1) % n, tag, filled(count + longer)?);
            let recv = Message::new((me + n - 1) % n, tag, room(count)?);
            started(group.exchange(vec![send], vec![recv]))
        }
    }
}

/// Whether the bytes are what a plain loop computes.
pub(crate) fn is_right(group: &Group, call: &Call, bytes: &[u8]) -> bool {
    let (me, n, count) = (group.rank(), group.size(), call.count);
    let root = call.root % n;
    let of = |member: usize, i: usize| value(member, i, call.salt);
    let fold = |i: usize| {
        (0..n)
            .map(|member| of(member, i))
            .reduce(|a, b| match call.reduce {
                Reduce::Sum => a.wrapping_add(b),
                Reduce::Min => a.min(b),
                _ => a ^ b,
            })
            .unwrap_or(0)
    };
    let is = |want: Vec<u8>| bytes == want;
    let gathered = || encode((0..n).flat_map(|m| (0..count).map(move |i| of(m, i))));
    match call.kind {
        Kind::Barrier => bytes.is_empty(),
        Kind::AllReduce | Kind::AllReduceList | Kind::AllReduceCommon => is(encode((0..count).map(fold))),
        Kind::AllGather | Kind::AllGatherList | Kind::AllGatherCommon => is(gathered()),
        Kind::Gather if me == root => is(gathered()),
        Kind::ReduceScatter => is(encode((me * count..(me + 1) * count).map(fold))),
        Kind::AllToAll => is(encode((0..n).flat_map(|from| {
            let start = (0..me).map(|to| split(call, from, to)).sum::<usize>() / 4;
            (start..start + split(call, from, me) / 4).map(move |i| of(from, i))
        }))),
        Kind::Broadcast | Kind::BroadcastCommon => is(encode((0..count).map(|i| of(root, i)))),
        Kind::Reduce if me == root => is(encode((0..count).map(fold))),
        Kind::Reduce | Kind::Gather => is(encode((0..count).map(|i| of(me, i)))),
        Kind::Scatter => is(encode((me * count..(me + 1) * count).map(|i| of(root, i)))),
        Kind::AllGatherV => is(encode((0..n).flat_map(|m| (0..uneven(call, m)).map(move |i| of(m, i))))),
        Kind::ReduceScatterV => {
            let start = (0..me).map(|m| uneven(call, m)).sum::<usize>();
            is(encode((start..start + uneven(call, me)).map(fold)))
        }
        Kind::Permute => is(encode((0..count).map(|i| if me == 0 { 0 } else { of(me - 1, i) }))),
        Kind::Exchange => is(encode((0..count).map(|i| of((me + n - 1) % n, i)))),
    }
}
