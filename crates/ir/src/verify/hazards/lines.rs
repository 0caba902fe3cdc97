//! The reads and writes of each kind of line.

use std::ops::Range;
use std::rc::Rc;

use consort_types::overlaps;
use smallvec::smallvec;

use super::bytes::Values;
use super::{Checker, Pending, Started, Tracked, flying, holding, text};
use crate::entity::Value;
use crate::ops::Effects;
use crate::plan::NodePlan;
use crate::program::Node;
use crate::storage::{Extent, Piece, Placement, Ranges, is_needed, may_take_over, overlap, pieces};
use crate::types::Type;

impl Checker<'_> {
    pub(super) fn view(&mut self, node: &Node) {
        if node.op.effects() == Effects::Host {
            self.operands(&node.args).iter().for_each(|(arg, tensor)| self.read(*arg, tensor));
        }
        let Some(tensor) = node.args.first().and_then(|arg| self.tensors.get(*arg)?.first().cloned()) else {
            return;
        };
        let placements = tensor.placement.views(&*node.op, &self.sizes, node.results.len());
        if placements.is_none() {
            self.error("H8", format!("elements of {} must move for this view", node.args[0]));
        }
        for (i, result) in node.results.iter().enumerate() {
            let placement = placements.as_ref().and_then(|placements| placements.get(i).cloned());
            let placement =
                placement.unwrap_or(Placement { extent: Extent::Within, ..tensor.placement.clone() });
            let seen = Tracked::new(tensor.root, placement, tensor.whole.clone());
            self.tensors.insert(*result, smallvec![seen]);
            self.writers.insert(*result, self.line);
        }
    }

    /// Whether a result aliases an operand exactly, and both have one shape.
    fn in_place(&self, result: &(Value, Rc<Tracked>), arg: &(Value, Rc<Tracked>)) -> bool {
        let shape = |value: Value| self.func.ty(value).and_then(Type::as_tensor).map(|ty| &ty.shape);
        let unsized_ = result.1.placement.hull().is_none();
        result.1.placement.same(&arg.1.placement) && (!unsized_ || shape(result.0) == shape(arg.0))
    }

    pub(super) fn overlaps(
        &mut self,
        (a, at): &(Value, Rc<Tracked>),
        word: &str,
        (b, of): &(Value, Rc<Tracked>),
    ) {
        if let Some(part) = at.shares(of) {
            self.error("H5", format!("{a} shares {} with {word} {b}", text(at.region(), &part)));
        }
    }

    /// Checks that the results of one line share no byte.
    fn apart(&mut self, results: &[(Value, Rc<Tracked>)]) {
        for (i, result) in results.iter().enumerate() {
            results[..i].iter().for_each(|other| self.overlaps(result, "result", other));
        }
    }

    pub(super) fn kernel(&mut self, node: &Node) {
        let args = self.operands(&node.args);
        args.iter().for_each(|(arg, tensor)| self.read(*arg, tensor));
        let results = self.operands(&node.results);
        for (k, result) in results.iter().enumerate() {
            for (j, arg) in args.iter().enumerate() {
                let takes_over = may_take_over(&*node.op, k, j)
                    && result.1.placement.is_dense()
                    && self.in_place(result, arg);
                if !takes_over {
                    self.overlaps(result, "operand", arg);
                }
            }
            self.check_write(result.0, &result.1);
        }
        self.apart(&results);
        results.iter().for_each(|(value, tensor)| self.write(*value, tensor));
    }

    /// `concat` and `update_slice`: pieces in place stay, unread, whatever they hold; the others are written.
    pub(super) fn join(&mut self, node: &Node) {
        let args = self.operands(&node.args);
        let Some(result) = self.operands(&node.results).pop() else { return };
        let region = result.1.region();
        let placements: Vec<Placement> = args.iter().map(|(_, tensor)| tensor.placement.clone()).collect();
        let Some(pieces) = pieces(&*node.op, &self.sizes, &placements, &result.1.placement) else {
            self.join_unknown(node, &args, &result);
            return;
        };
        let (stay, go): (Vec<Piece>, Vec<Piece>) = pieces.into_iter().partition(Piece::stays);
        // If no piece stays, the whole result is written, without a gap.
        let hulls = go.iter().filter_map(|piece| piece.to.hull()).map(|(hull, _)| hull);
        let hull = match stay.is_empty() {
            true => result.1.hull.clone(),
            false => hulls.filter(|hull| !hull.is_empty()).reduce(around).unwrap_or(0..0),
        };
        let whole = stay.is_empty();
        let written = || {
            let mut written: Ranges = match whole {
                true => result.1.bytes(),
                false => go.iter().flat_map(|piece| piece.to.bytes().unwrap_or_default()).collect(),
            };
            written.sort_unstable_by_key(|range| range.start);
            written
        };
        for piece in &go {
            let (value, tensor) = &args[piece.operand];
            let from = piece.from.hull().map_or(0..0, |(hull, _)| hull);
            let bytes = || piece.from.bytes().unwrap_or_default();
            self.check_read(*value, tensor.root, tensor.region(), &from, bytes);
            let near = tensor.region() == region && overlaps(&from, &hull);
            let shared = if near { overlap(&bytes(), &written()) } else { None };
            if let Some(part) = shared {
                self.error("H5", format!("{} shares {} with operand {value}", result.0, text(region, &part)));
            }
        }
        self.check_writes(result.0, region, &hull, written);
        if self.takes_over(&result.1, &stay, &args) {
            self.write(result.0, &result.1);
            return;
        }
        self.set(region, &written(), &holding(result.0));
        for piece in &stay {
            let ranges = piece.to.bytes().unwrap_or_default();
            self.rename(region, &ranges, args[piece.operand].1.root, result.0);
        }
    }

    /// Whether all pieces that a join leaves in place hold what the result means and are dead under their other names:
    /// then the bytes hold the result alone, as if all had been written.
    fn takes_over(&self, result: &Tracked, stay: &[Piece], args: &[(Value, Rc<Tracked>)]) -> bool {
        let line = self.next - 1;
        let read_later = |name: &Value| self.last_use.get(*name).is_some_and(|last| *last > line);
        let root = stay.first().map(|piece| args[piece.operand].1.root);
        let (Some(root), true) = (root, stay.iter().all(|piece| Some(args[piece.operand].1.root) == root))
        else {
            return false;
        };
        self.bytes.over(result.region(), result.hull.clone()).all(|(_, cell)| {
            cell.is_some_and(|cell| {
                !self.is_busy(cell) && cell.holds.contains(&root) && !cell.holds.iter().any(read_later)
            })
        })
    }

    /// A join with unknown placements: the base of an update may alias the result.
    fn join_unknown(&mut self, node: &Node, args: &[(Value, Rc<Tracked>)], result: &(Value, Rc<Tracked>)) {
        for (j, arg) in args.iter().enumerate() {
            self.read(arg.0, &arg.1);
            if !(may_take_over(&*node.op, 0, j) && self.in_place(result, arg)) {
                self.overlaps(result, "operand", arg);
            }
        }
        self.check_write(result.0, &result.1);
        self.write(result.0, &result.1);
    }

    pub(super) fn start(&mut self, node: &Node, plan: &NodePlan) {
        self.lodge(&node.results, &plan.places);
        self.release_entry(plan, &node.results);
        let Some(pending) = node.results.first().copied() else { return };
        let args = self.operands(&node.args);
        let results = self.operands(&node.results);
        let reads: Vec<bool> = (0..args.len()).map(|j| is_needed(&*node.op, j, &self.sizes)).collect();
        // Operands that are overwritten in place by their result, and those that are copied to it.
        let mut in_place = vec![false; args.len()];
        let mut copied = vec![false; args.len()];
        for (k, result) in results.iter().enumerate() {
            let Some(j) = node.op.overwrites(k).filter(|j| *j < args.len()) else { continue };
            in_place[j] = result.1.placement.same(&args[j].1.placement);
            copied[j] = !in_place[j] && plan.copies.iter().any(|(value, _)| *value == args[j].0);
            if !in_place[j] && !copied[j] && reads[j] {
                let (arg, at) = (args[j].0, result.1.placement.place);
                let message = format!("overwrites {arg} at {at}, where it does not lie: `copy {arg}`");
                self.error("H6", message);
            }
        }
        for (value, _) in &plan.copies {
            if !(0..args.len()).any(|j| copied[j] && args[j].0 == *value) {
                self.error("H6", format!("copy {value}: no result is written over it elsewhere"));
            }
        }
        for (j, arg) in args.iter().enumerate().filter(|(j, _)| reads[*j]) {
            self.read(arg.0, &arg.1);
            if !copied[j] && !arg.1.placement.is_dense() {
                self.error("H6", format!("{} has gaps, and communication takes none", arg.0));
            }
            for (k, result) in results.iter().enumerate() {
                let over = node.op.overwrites(k);
                // Copies precede the operation, so only the copies' own writes can overwrite their sources.
                let apart = !copied[j] || over.is_some_and(|j| copied[j]);
                if apart && !(in_place[j] && over == Some(j)) {
                    self.overlaps(result, "operand", arg);
                }
            }
        }
        self.apart(&results);
        for (_, tensor) in &results {
            self.check_write(pending, tensor);
            self.set(tensor.region(), &tensor.bytes(), &flying(pending));
        }
        for (j, (_, tensor)) in args.iter().enumerate() {
            if reads[j] && !copied[j] && !in_place[j] {
                for range in tensor.bytes() {
                    self.bytes.update(tensor.region(), range, |cell| cell.leases.push(pending));
                }
            }
        }
        self.pendings.insert(pending, Pending::Of(pending));
        self.starts.insert(pending, Started::default());
    }

    pub(super) fn wait(&mut self, node: &Node, plan: &NodePlan) {
        self.lodge(&node.results, &plan.places);
        let Some(pending) = node.args.first().copied() else { return };
        let (given, there) = (self.operands(&node.results), self.tensors(pending));
        for ((value, tensor), there) in given.iter().zip(&there) {
            if tensor.placement.place != there.placement.place {
                let (expected, got) = (there.placement.place, tensor.placement.place);
                let expected = format!("{value} at {expected}, where {pending} put it");
                self.error("H7", (expected, got.to_string()));
            }
        }
        self.arrive(pending);
        if let Some(started) = self.starts.get_mut(pending) {
            started.waited_here = true;
        }
        let known = self.errors.len();
        for ((value, tensor), there) in given.iter().zip(&there) {
            let ranges = there.bytes();
            self.check_read(pending, pending, there.region(), &there.hull, || there.bytes());
            if self.errors.len() == known && tensor.placement.place == there.placement.place {
                self.rename(there.region(), &ranges, pending, *value);
            } else {
                self.write(*value, tensor);
            }
        }
    }

    /// The tensors of a pending have arrived under its name. Its leases remain.
    pub(super) fn arrive(&mut self, pending: Value) {
        let Some(Pending::Of(start)) = self.pendings.get(pending).copied() else { return };
        for tensor in self.tensors(pending) {
            for range in tensor.bytes() {
                self.bytes.update(tensor.region(), range, |cell| {
                    if cell.flight == Some(start) {
                        cell.flight = None;
                        cell.holds = Values::from_slice(&[pending]);
                    }
                });
            }
        }
        if let Some(started) = self.starts.get_mut(start) {
            started.waited = true;
        }
        self.pendings.insert(pending, Pending::There);
    }
}

/// The smallest range that contains both.
fn around(a: Range<u64>, b: Range<u64>) -> Range<u64> {
    a.start.min(b.start)..a.end.max(b.end)
}
