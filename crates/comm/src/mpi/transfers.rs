//! How each kind of collective moves its data: by MPI's own call where it has one, in place where it can.
//!
//! A list of operands is one call of MPI for each. Operands of several stripes are packed member by member, and results
//! joined again. What has more bytes than a call of MPI takes is cut where that changes nothing, and otherwise moved by
//! broadcasts or messages; all members decide that alike.

use std::sync::Arc;

use consort_types::{Dtype, Kind, Reduce};

use crate::kernels::{Part, reduce};
use crate::mpi::call::{After, Call, Moves, Outcome};
use crate::mpi::comm::Comm;
use crate::mpi::error::MpiError;
use crate::mpi::flight::Flight;
use crate::mpi::span::Span;
use crate::op::Lists;
use crate::shm::heap::Heap;

/// What a call needs to begin.
pub(super) struct Transfers<'a> {
    pub(super) comm: &'a Comm,
    pub(super) heap: &'a Arc<Heap>,
    /// The tag of messages that belong to collectives.
    pub(super) tag: u64,
    /// The most bytes that are passed to one call of MPI.
    pub(super) most: usize,
    pub(super) moves: Moves,
}

/// Multiplies every element.
pub(super) fn scale(bytes: &mut [u8], dtype: Dtype, factor: f64) {
    reduce(bytes, &[Part::Own], dtype, Reduce::PremulSum(factor));
}

/// The pieces of a message, of at most `most` bytes. The last one is always shorter than that, and may be empty: so a
/// receiver that expects another length sees it in the first piece that differs.
pub(super) fn message_pieces(len: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..=len / most).map(move |piece| (piece * most, most.min(len - piece * most)))
}

/// Where each member's part of a stripe begins.
fn starts(sizes: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    sizes.iter().scan(0, |next, size| Some((std::mem::replace(next, *next + size), *size)))
}

/// Copies parts that lie member by member into `outer` stripes.
pub(super) fn join(from: &[u8], into: &mut [u8], outer: usize, sizes: &[usize]) {
    let stripe: usize = sizes.iter().sum();
    let mut at = 0;
    for (start, size) in starts(sizes) {
        for row in 0..outer {
            into[row * stripe + start..][..size].copy_from_slice(&from[at..at + size]);
            at += size;
        }
    }
}

/// The inverse: copies `outer` stripes into parts that lie member by member.
fn cut(from: &[u8], into: &mut [u8], outer: usize, sizes: &[usize]) {
    let stripe: usize = sizes.iter().sum();
    let mut at = 0;
    for (start, size) in starts(sizes) {
        for row in 0..outer {
            into[at..at + size].copy_from_slice(&from[row * stripe + start..][..size]);
            at += size;
        }
    }
}

impl Transfers<'_> {
    /// Starts everything that a call needs.
    pub(super) fn begin(mut self, call: &mut Call) -> Outcome<Moves> {
        let items = call.operands().len().max(call.results().len()).max(usize::from(call.common.is_some()));
        let n = self.comm.size();
        if let (Some(block), Kind::AllReduce) = (&call.common, call.op.kind) {
            // The operand keeps its value.
            Span::of(block).bytes_mut().copy_from_slice(Span::of(&call.operands()[0]).bytes());
        }
        for item in 0..items {
            let operand = call.operands().get(item).map(Span::of);
            let result = call.results().get(item).or(call.common.as_ref()).map(Span::of);
            let equal = |span: &Option<Span>, outer: usize| {
                let len = span.as_ref().map_or(0, Span::len);
                vec![len / outer.max(1) / n; n]
            };
            match (call.op.kind, operand, result) {
                (Kind::AllReduce, Some(operand), result) => {
                    self.all_reduce(result.unwrap_or(operand), call.dtype(item), call.op.reduce)?;
                }
                (Kind::Reduce, Some(operand), _) => self.reduce(operand, call.dtype(item), call.op)?,
                (Kind::ReduceScatter, Some(operand), Some(result)) => {
                    let outer = call.outer(item);
                    let sizes = equal(&Some(operand.part(0, operand.len())), outer);
                    self.reduce_scatter(operand, result, outer, &sizes, (call.dtype(item), call.op.reduce))?;
                }
                (Kind::ReduceScatterV, Some(operand), Some(result)) => {
                    let sizes = sizes(call);
                    self.reduce_scatter(
                        operand,
                        result,
                        call.op.outer,
                        &sizes,
                        (call.op.dtype, call.op.reduce),
                    )?;
                }
                (Kind::AllGather, Some(operand), Some(result)) => {
                    let outer = call.outer(item);
                    let sizes = vec![operand.len() / outer.max(1); n];
                    self.all_gather(operand, result, outer, sizes, true)?;
                }
                (Kind::AllGatherV, Some(operand), Some(result)) => {
                    self.all_gather(operand, result, call.op.outer, sizes(call), false)?;
                }
                (Kind::Gather, Some(operand), result) => {
                    self.gather(operand, result, call.outer(item), call.op.root)?;
                }
                (Kind::Scatter, operand, Some(result)) => {
                    let outer = call.outer(item);
                    let sizes = equal(&operand, outer);
                    self.scatter(operand, result, outer, &sizes, call.op.root)?;
                }
                (Kind::AllToAll, Some(operand), Some(result)) => {
                    self.all_to_all(operand, result, call.op.part, call.lists.as_deref())?;
                }
                (Kind::Broadcast, operand, result) => {
                    if let Some(span) = operand.or(result) {
                        self.broadcast(&span, call.op.root)?;
                    }
                }
                (Kind::Permute, Some(operand), Some(result)) => {
                    if let Some(Lists::Routes(to)) = call.lists.as_deref() {
                        self.permute(&operand, result, to)?;
                    }
                }
                _ => {}
            }
        }
        if call.op.kind == Kind::Barrier {
            self.moves.flights.push(self.comm.barrier()?);
        }
        Ok(self.moves)
    }

    fn me(&self) -> usize {
        self.comm.rank()
    }

    fn n(&self) -> usize {
        self.comm.size()
    }

    fn push(&mut self, flight: Result<Flight, MpiError>) -> Outcome<()> {
        self.moves.flights.push(flight?);
        Ok(())
    }

    /// Memory for data on their way.
    fn room(&self, len: usize) -> Outcome<Span> {
        Ok(Span::of(&self.heap.alloc(len)?))
    }

    /// Pieces of a span, of at most what MPI takes at once.
    fn pieces(&self, len: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let most = self.most;
        (0..len).step_by(most).map(move |from| (from, most.min(len - from)))
    }

    /// A copy of an operand, of stripes laid member by member, times a factor; or the operand itself if it is that.
    fn prepared(&self, operand: Span, outer: usize, sizes: &[usize], of: (Dtype, Reduce)) -> Outcome<Span> {
        let factor = if let Reduce::PremulSum(factor) = of.1 { Some(factor) } else { None };
        if outer == 1 && factor.is_none() {
            return Ok(operand);
        }
        let mut packed = self.room(operand.len())?;
        cut(operand.bytes(), packed.bytes_mut(), outer, sizes);
        factor.into_iter().for_each(|factor| scale(packed.bytes_mut(), of.0, factor));
        Ok(packed)
    }

    /// Divides a sum of all members.
    fn divide(&mut self, span: Span, dtype: Dtype, reduce: Reduce) {
        if reduce == Reduce::Avg {
            self.moves.after.push(After::Scale(span, dtype, 1.0 / self.n() as f64));
        }
    }

    fn all_reduce(&mut self, mut span: Span, dtype: Dtype, reduce: Reduce) -> Outcome<()> {
        if let Reduce::PremulSum(factor) = reduce {
            scale(span.bytes_mut(), dtype, factor);
        }
        for (from, len) in self.pieces(span.len()) {
            self.push(self.comm.all_reduce(span.part(from, len), dtype, reduce))?;
        }
        self.divide(span, dtype, reduce);
        Ok(())
    }

    fn reduce(&mut self, mut span: Span, dtype: Dtype, op: crate::op::Op) -> Outcome<()> {
        let is_root = self.me() == op.root;
        if !is_root {
            let sizes = [span.len()];
            span = self.prepared(span, 1, &sizes, (dtype, op.reduce))?;
        } else if let Reduce::PremulSum(factor) = op.reduce {
            scale(span.bytes_mut(), dtype, factor);
        }
        for (from, len) in self.pieces(span.len()) {
            self.push(self.comm.reduce(span.part(from, len), None, dtype, op.reduce, op.root))?;
        }
        if is_root {
            self.divide(span, dtype, op.reduce);
        }
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        operand: Span,
        result: Span,
        outer: usize,
        sizes: &[usize],
        (dtype, reduce): (Dtype, Reduce),
    ) -> Outcome<()> {
        let from = self.prepared(operand, outer, sizes, (dtype, reduce))?;
        let parts: Vec<usize> = sizes.iter().map(|size| size * outer).collect();
        if from.len() <= self.most {
            let (whole, room) = (from.part(0, from.len()), result.part(0, result.len()));
            self.push(self.comm.reduce_scatter(whole, room, parts.iter().copied(), dtype, reduce))?;
        } else {
            for (root, (start, size)) in starts(&parts).enumerate() {
                for (at, len) in self.pieces(size) {
                    let into = (root == self.me()).then(|| result.part(at, len));
                    self.push(self.comm.reduce(from.part(start + at, len), into, dtype, reduce, root))?;
                }
            }
        }
        self.divide(result, dtype, reduce);
        Ok(())
    }

    fn all_gather(
        &mut self,
        operand: Span,
        result: Span,
        outer: usize,
        sizes: Vec<usize>,
        is_even: bool,
    ) -> Outcome<()> {
        let parts: Vec<usize> = sizes.iter().map(|size| size * outer).collect();
        let into = if outer == 1 { result.part(0, result.len()) } else { self.room(result.len())? };
        let whole = into.part(0, into.len());
        if into.len() > self.most {
            for (root, (start, size)) in starts(&parts).enumerate() {
                let mut part = into.part(start, size);
                if root == self.me() {
                    part.bytes_mut().copy_from_slice(operand.bytes());
                }
                self.broadcast(&part, root)?;
            }
        } else if is_even {
            self.push(self.comm.all_gather(operand, whole))?;
        } else {
            self.push(self.comm.all_gather_v(operand, whole, &parts))?;
        }
        if outer > 1 {
            self.moves.after.push(After::Join(into, result, outer, sizes));
        }
        Ok(())
    }

    fn gather(&mut self, operand: Span, result: Option<Span>, outer: usize, root: usize) -> Outcome<()> {
        let (part, n) = (operand.len(), self.n());
        let into = match &result {
            Some(result) if outer == 1 => Some(result.part(0, result.len())),
            Some(result) => Some(self.room(result.len())?),
            None => None,
        };
        if part * n <= self.most {
            let whole = into.as_ref().map(|into| into.part(0, into.len()));
            self.push(self.comm.gather(operand, whole, root))?;
        } else {
            self.send(&operand, root)?;
            for from in 0..if into.is_some() { n } else { 0 } {
                into.iter().try_for_each(|into| self.receive(&into.part(from * part, part), from))?;
            }
        }
        if let (Some(into), Some(result)) = (into, result)
            && outer > 1
        {
            self.moves.after.push(After::Join(into, result, outer, vec![part / outer; n]));
        }
        Ok(())
    }

    fn scatter(
        &mut self,
        operand: Option<Span>,
        result: Span,
        outer: usize,
        sizes: &[usize],
        root: usize,
    ) -> Outcome<()> {
        let (part, n) = (result.len(), self.n());
        let from = operand.map(|operand| self.prepared(operand, outer, sizes, (Dtype::U8, Reduce::Sum)));
        let from = from.transpose()?;
        if part * n <= self.most {
            return self.push(self.comm.scatter(from, result, root));
        }
        for to in 0..if from.is_some() { n } else { 0 } {
            from.iter().try_for_each(|from| self.send(&from.part(to * part, part), to))?;
        }
        self.receive(&result, root)
    }

    fn all_to_all(&mut self, operand: Span, result: Span, part: usize, lists: Option<&Lists>) -> Outcome<()> {
        let n = self.n();
        let (ins, outs) = match lists {
            Some(Lists::Splits(ins, outs)) => (ins.clone(), outs.clone()),
            _ if part * n <= self.most => return self.push(self.comm.all_to_all(operand, result, part)),
            _ => (vec![part; n], vec![part; n]),
        };
        for (from, (start, size)) in starts(&outs).enumerate() {
            self.receive(&result.part(start, size), from)?;
        }
        for (to, (start, size)) in starts(&ins).enumerate() {
            self.send(&operand.part(start, size), to)?;
        }
        Ok(())
    }

    fn broadcast(&mut self, span: &Span, root: usize) -> Outcome<()> {
        self.pieces(span.len())
            .try_for_each(|(from, len)| self.push(self.comm.broadcast(span.part(from, len), root)))
    }

    fn permute(&mut self, operand: &Span, mut result: Span, to: &[Option<usize>]) -> Outcome<()> {
        let me = self.me();
        match to.iter().position(|to| *to == Some(me)) {
            Some(from) => self.receive(&result, from)?,
            None => result.bytes_mut().fill(0),
        }
        to[me].map_or(Ok(()), |to| self.send(operand, to))
    }

    /// Sends to a member, in pieces.
    fn send(&mut self, span: &Span, to: usize) -> Outcome<()> {
        message_pieces(span.len(), self.most)
            .try_for_each(|(at, len)| self.push(self.comm.send(span.part(at, len), to, self.tag, false)))
    }

    /// Receives from a member, in the same pieces.
    fn receive(&mut self, span: &Span, from: usize) -> Outcome<()> {
        for (at, len) in message_pieces(span.len(), self.most) {
            self.moves.expected.push((self.moves.flights.len(), from));
            self.push(self.comm.receive(span.part(at, len), from, self.tag))?;
        }
        Ok(())
    }
}

/// The bytes of each member in one stripe.
fn sizes(call: &Call) -> Vec<usize> {
    match call.lists.as_deref() {
        Some(Lists::Sizes(list)) => list.clone(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_of_a_message_tell_its_length() {
        let pieces = |len| message_pieces(len, 8).collect::<Vec<_>>();
        assert_eq!(pieces(0), [(0, 0)]);
        assert_eq!(pieces(7), [(0, 7)]);
        assert_eq!(pieces(8), [(0, 8), (8, 0)]);
        assert_eq!(pieces(19), [(0, 8), (8, 8), (16, 3)]);
        // Whatever else is expected, one of the pieces that both have differs.
        let differs = |a: usize, b: usize| pieces(a).iter().zip(pieces(b)).any(|(a, b)| *a != b);
        assert!((0..40).all(|a| (0..40).all(|b| differs(a, b) == (a != b))));
    }

    #[test]
    fn what_is_cut_is_joined_again() {
        let whole: Vec<u8> = (0..24).collect();
        let (mut parts, mut again) = (vec![0; 24], vec![0; 24]);
        cut(&whole, &mut parts, 3, &[2, 0, 5, 1]);
        assert_eq!(parts[..6], [0, 1, 8, 9, 16, 17]);
        assert_eq!(parts[6..11], [2, 3, 4, 5, 6]);
        join(&parts, &mut again, 3, &[2, 0, 5, 1]);
        assert_eq!(again, whole);
    }
}
