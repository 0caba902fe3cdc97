//! The storage of block parameters and results.

use consort_ir::entity::Value;
use consort_ir::program::{Block, Node};
use consort_ir::types::{TensorType, Type};

use super::PlanError;
use super::decide::{Line, Planner};
use super::storage::{BufKind, Located, Span};
use super::uses::END;

impl<'a> Planner<'a> {
    /// Both blocks take their operands in place, and leave results in a common place if possible.
    pub(super) fn cond(&mut self, node: &'a Node) -> Result<Line, PlanError> {
        let line = self.now;
        node.args.iter().for_each(|arg| self.enters(*arg));
        let mut ids = Vec::with_capacity(node.blocks.len());
        for block in &node.blocks {
            let id = self.inside(block, Vec::new(), |planner| {
                for (param, arg) in block.params.iter().zip(&node.args[1..]) {
                    planner.lies_with(*param, *arg);
                }
            })?;
            ids.push(id);
        }
        for (i, result) in node.results.iter().enumerate() {
            let tensors = self.func.ty(*result).map_or(&[][..], Type::tensors);
            let mut located = Vec::with_capacity(tensors.len());
            for (k, tensor) in tensors.iter().enumerate() {
                let left: Vec<u32> = node
                    .blocks
                    .iter()
                    .map(|block| self.parts_of(block.results[i]).start + k as u32)
                    .collect();
                located.push(match self.meet(&left, *result) {
                    Some(located) => located,
                    None => self.left_in(tensor, &left, &ids, line)?,
                });
            }
            self.define(*result, located);
            self.touch(*result);
        }
        Ok(Line::default())
    }

    /// The common place in which all blocks leave a result, if there is one.
    fn meet(&mut self, left: &[u32], result: Value) -> Option<Located> {
        let first = left.first()?;
        let place = self.storage.first(*first);
        let one =
            |part: &u32| self.storage.first(*part) == place && self.storage.parts[*part as usize].is_flat();
        let together = left.iter().all(one);
        (together && self.returns_there(result, *first))
            .then(|| self.storage.parts[*first as usize].located.without_gaps())
    }

    /// Storage for a result of blocks, in which they compute it if possible.
    fn left_in(
        &mut self,
        tensor: &TensorType,
        left: &[u32],
        blocks: &[u32],
        line: u32,
    ) -> Result<Located, PlanError> {
        let located = self.new_buf(tensor, line)?;
        for (part, block) in left.iter().zip(blocks) {
            let size = self.storage.bufs[located.buf as usize].size;
            let made = self.storage.movable(*part, *block);
            if let Some(made) = made.filter(|made| self.storage.bufs[*made as usize].size == size) {
                self.storage.join(made, located.buf, 0);
            }
        }
        Ok(located)
    }

    /// Carries and slices have places of their own, filled before each iteration; a carry may use the place of its
    /// operand, if that is dead.
    pub(super) fn repeat(
        &mut self,
        node: &'a Node,
        carries: usize,
        slices: usize,
    ) -> Result<Line, PlanError> {
        let mut line = Line::default();
        let block = &node.blocks[0];
        node.args[..carries].iter().for_each(|arg| self.touch(*arg));
        node.results[carries..].iter().try_for_each(|result| self.fresh(*result))?;
        node.args.iter().for_each(|arg| self.enters(*arg));
        for (i, (param, arg)) in block.params.iter().zip(&node.args).enumerate() {
            if i >= carries + slices {
                self.lies_with(*param, *arg);
            } else if i < carries && self.carries_in_place(node, i) {
                let part = self.part(*arg);
                self.take(*param, part);
                line.reuse.push(*arg);
            } else {
                self.fresh(*param)?;
            }
        }
        let spans: Vec<Option<Span>> = block.params[..carries]
            .iter()
            .map(|param| self.parts_of(*param).next().map(|part| self.storage.span(part)))
            .collect();
        let id = self.inside(block, spans, |_| {})?;
        for (result, param) in block.results.iter().zip(&block.params[..carries]) {
            for (from, to) in self.parts_of(*result).zip(self.parts_of(*param)) {
                let to = self.storage.span(to);
                // A start whose pending leaves the block, or is waited for in a nested block, may read the carry until
                // the end of the iteration: then the next carry is copied there afterwards.
                if self.storage.needed(to, self.now - 1).is_none() {
                    self.storage.move_to(from, to, id);
                }
            }
        }
        // Each iteration writes them, even if they are dead afterwards.
        for value in block.params[..carries + slices].iter().chain(&node.results[carries..]) {
            for part in self.parts_of(*value) {
                let buf = self.storage.parts[part as usize].located.buf;
                let (now, buf) = (self.now, self.storage.buf_mut(buf));
                buf.last = buf.last.max(now);
            }
        }
        node.args[carries..].iter().for_each(|arg| self.touch(*arg));
        for (result, param) in node.results.iter().zip(&block.params[..carries]) {
            let located: Vec<Located> =
                self.parts_of(*param).map(|part| self.storage.parts[part as usize].located.clone()).collect();
            self.define(*result, located);
            self.touch(*result);
        }
        Ok(line)
    }

    /// Decides a block of a node; returns its number.
    fn inside(
        &mut self,
        block: &'a Block,
        carries: Vec<Option<Span>>,
        enter: impl FnOnce(&mut Self),
    ) -> Result<u32, PlanError> {
        let id = self.blocks;
        self.blocks += 1;
        let outer = (self.block, self.results, std::mem::replace(&mut self.carries, carries));
        (self.block, self.results) = (id, &block.results);
        enter(self);
        self.body(block)?;
        (self.block, self.results, self.carries) = outer;
        Ok(id)
    }

    /// A pending that enters a block may be waited for there, and then no line outside can release it: its storage is
    /// not reused.
    fn enters(&mut self, value: Value) {
        if self.func.ty(value).is_some_and(Type::is_pending) {
            for part in self.parts_of(value) {
                self.storage.prolong(part, END, END);
                let buf = self.storage.parts[part as usize].located.buf;
                self.storage.buf_mut(buf).writable = false;
            }
        } else {
            self.touch(value);
        }
    }

    /// Places a parameter of a block at its operand.
    fn lies_with(&mut self, param: Value, arg: Value) {
        match self.func.ty(param) {
            Some(Type::Tensor(_)) => {
                let part = self.part(arg);
                self.take(param, part);
            }
            Some(Type::Pending(_)) => self.same(param, self.parts_of(arg)),
            _ => {}
        }
    }

    /// Whether a carry can use the place of its operand.
    fn carries_in_place(&mut self, node: &'a Node, carry: usize) -> bool {
        if self.func.ty(node.args[carry]).and_then(Type::as_tensor).is_none() {
            return false;
        }
        let part = self.part(node.args[carry]);
        let span = self.storage.span(part);
        let alone = node
            .args
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != carry)
            .all(|(_, other)| self.parts_of(*other).all(|other| !self.storage.span(other).meets(&span)));
        alone
            && self.storage.bufs[span.buf as usize].kind != BufKind::Dyn
            && self.held(part).is_none()
            && self.returns_there(node.results[carry], part)
    }
}
