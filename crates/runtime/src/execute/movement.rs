//! Moves elements between slots: a copy routine, and the operations built on it.

use consort_ir::ops::Joined;
use consort_types::layout::{Layout, row_major};

use super::RunCx;
use super::memory::{Slot, SlotId};
use super::state::State;
use super::step::Moves;
use crate::RunError;
use crate::call::Stored;

impl State {
    /// Copies a tensor to another slot unless it lies there already.
    pub(super) fn copy(
        &mut self,
        from: SlotId,
        to: SlotId,
        counted: bool,
        cx: &RunCx<'_>,
    ) -> Result<(), RunError> {
        let copied = self.copy_elements(&self.slots[from], &self.slots[to], cx)?;
        if counted {
            self.copied += copied as u64;
        }
        Ok(())
    }

    /// Copies elements from one slot to another unless they lie there already, and returns the number of bytes copied.
    fn copy_elements(&self, from: &Slot, to: &Slot, cx: &RunCx<'_>) -> Result<usize, RunError> {
        let bytes = from.layout.numel() * from.dtype.size();
        if bytes == 0 || from.lies_at(to) {
            return Ok(0);
        }
        // A contiguous destination may have another shape with as many elements.
        let strides = match to.layout.is_contiguous() {
            true => row_major(&from.layout.shape),
            false => to.layout.strides.clone(),
        };
        let layout = Layout { shape: from.layout.shape.clone(), strides, start: 0 };
        if layout.numel() != to.layout.numel() || from.dtype != to.dtype {
            let (a, b) = (&from.layout.shape, &to.layout.shape);
            return Err(RunError::new(format!("a tensor of shape {a:?} does not fit in one of {b:?}")));
        }
        let place = Stored { layout: &layout, ..self.memory.stored(to)? };
        cx.device.copy(&self.memory.stored(from)?, &place)?;
        Ok(bytes)
    }

    /// Copies boxes of operands to their places in the result. Boxes that lie there already are not copied. Returns the
    /// bytes that were copied of operands that are counted.
    pub(super) fn join(
        &self,
        boxes: &[Joined],
        (args, counted): (&[SlotId], &[bool]),
        result: SlotId,
        cx: &RunCx<'_>,
    ) -> Result<u64, RunError> {
        let bytes = |operand: usize, bytes: usize| if counted[operand] { bytes as u64 } else { 0 };
        let mut copied = 0;
        let whole = &self.slots[result];
        let at =
            |slot: &Slot, start: &[usize], size: &[usize]| slot.seen_as(slot.layout.narrowed_to(start, size));
        // The base, operand 0, is copied whole before the other boxes, unless one of those lies in place already.
        let is_base = |piece: &Joined| piece.operand == 0 && piece.from == piece.to;
        let parts = || boxes.iter().filter(|piece| !is_base(piece));
        let there = |piece: &Joined| {
            let part = at(&self.slots[args[piece.operand]], &piece.from, &piece.size);
            part.lies_at(&at(whole, &piece.to, &piece.size))
        };
        let base = &self.slots[args[0]];
        let at_once = base.layout.shape == whole.layout.shape && !base.lies_at(whole) && !parts().any(there);
        if at_once {
            copied += bytes(0, self.copy_elements(base, whole, cx)?);
        }
        let stays = at_once || base.lies_at(whole);
        for piece in boxes.iter().filter(|piece| !(stays && is_base(piece))) {
            let from = at(&self.slots[args[piece.operand]], &piece.from, &piece.size);
            let to = at(whole, &piece.to, &piece.size);
            copied += bytes(piece.operand, self.copy_elements(&from, &to, cx)?);
        }
        Ok(copied)
    }

    /// Copies an entry of the first dimension to or from a separate tensor.
    pub(super) fn copy_entry(
        &self,
        whole: SlotId,
        entry: usize,
        one: SlotId,
        into: bool,
        cx: &RunCx<'_>,
    ) -> Result<(), RunError> {
        let (whole, one) = (&self.slots[whole], &self.slots[one]);
        let mut layout = whole.layout.narrowed(0, entry, 1);
        layout.shape.remove(0);
        layout.strides.remove(0);
        let part = whole.seen_as(layout);
        let (from, to) = if into { (one, &part) } else { (&part, one) };
        self.copy_elements(from, to, cx).map(drop)
    }

    /// Moves values to other slots as one parallel assignment.
    pub(super) fn move_all(&mut self, moves: &Moves, cx: &RunCx<'_>) -> Result<(), RunError> {
        for (from, to) in &moves.flights {
            self.flights[*to] = self.flights[*from].take();
        }
        let mut aside = Vec::new();
        for one in moves.tensors.iter().filter(|one| one.staged) {
            let slot = &self.slots[one.from];
            let bytes = 0..slot.layout.numel() * slot.dtype.size();
            let (buffer, layout) = (cx.heap.alloc(bytes.end)?, Layout::contiguous(&slot.layout.shape));
            let place = Stored { buffer: &buffer, bytes, dtype: slot.dtype, layout: &layout };
            cx.device.copy(&self.memory.stored(slot)?, &place)?;
            aside.push((buffer, layout));
        }
        let mut aside = aside.iter();
        for one in &moves.tensors {
            match one.staged.then(|| aside.next()).flatten() {
                Some((buffer, layout)) => {
                    let to = &self.slots[one.to];
                    let from = Stored { buffer, bytes: 0..buffer.len(), dtype: to.dtype, layout };
                    cx.device.copy(&from, &self.memory.stored(to)?)?;
                }
                None => self.copy(one.from, one.to, false, cx)?,
            }
        }
        Ok(())
    }
}
