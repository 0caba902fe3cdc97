//! Moves elements between slots: one routine that copies, and what is made of it.

use consort_ir::layout::{Layout, row_major};

use crate::kernels::copy::copy_into;

use super::memory::{Slot, SlotId};
use super::state::{State, seen};
use super::step::Moves;
use super::{RunCx, RunError};

impl State {
    /// Copies a tensor to another place, where it is not there yet.
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

    /// Copies elements from one place to another, where they are not there yet, and says how many bytes that was.
    fn copy_elements(&self, from: &Slot, to: &Slot, cx: &RunCx<'_>) -> Result<usize, RunError> {
        let bytes = from.layout.numel() * from.dtype.size();
        if bytes == 0 || from.lies_at(to) {
            return Ok(0);
        }
        // What has no gaps may be another shape of as many elements.
        let strides = match to.layout.is_contiguous() {
            true => row_major(&from.layout.shape),
            false => to.layout.strides.clone(),
        };
        let layout = Layout { shape: from.layout.shape.clone(), strides, start: 0 };
        if layout.numel() != to.layout.numel() || from.dtype != to.dtype {
            let (a, b) = (&from.layout.shape, &to.layout.shape);
            return Err(RunError::new(format!("a tensor of shape {a:?} does not fit in one of {b:?}")));
        }
        if from.overlaps(to) {
            // Elements of both may lie in turns, or on top of one another.
            let packed = self.packed(from, cx)?;
            let from = Slot::new(from.region, from.dtype, Layout::contiguous(&from.layout.shape), false);
            let mut out = self.memory.write(to, cx.timeout)?;
            copy_into(cx.threads, &seen(&from, packed.bytes()), &mut out, &layout)?;
        } else {
            let mut out = self.memory.write(to, cx.timeout)?;
            copy_into(cx.threads, &seen(from, &self.memory.read(from)?), &mut out, &layout)?;
        }
        Ok(bytes)
    }

    /// Joins tensors along a dimension. Those that lie at their place stay there.
    pub(super) fn concat(
        &mut self,
        dim: usize,
        parts: &[SlotId],
        result: SlotId,
        cx: &RunCx<'_>,
    ) -> Result<(), RunError> {
        let (whole, mut start) = (&self.slots[result], 0);
        for part in parts {
            let part = &self.slots[*part];
            let size = part.layout.shape[dim];
            self.copy_elements(part, &whole.seen_as(whole.layout.narrowed(dim, start, size)), cx)?;
            start += size;
        }
        Ok(())
    }

    /// Replaces a part of a tensor. Whatever lies at its place stays there.
    pub(super) fn update_slice(
        &mut self,
        start: &[usize],
        [base, part, result]: [SlotId; 3],
        cx: &RunCx<'_>,
    ) -> Result<(), RunError> {
        let (base, part, result) = (&self.slots[base], &self.slots[part], &self.slots[result]);
        let mut place = Layout::clone(&result.layout);
        for (dim, start) in start.iter().enumerate() {
            let (size, of) = (part.layout.shape[dim], result.layout.shape[dim]);
            if start.saturating_add(size) > of {
                let message = format!("dimension {dim}: {size} places from {start} do not lie inside {of}");
                return Err(RunError::new(message));
            }
            place = place.narrowed(dim, *start, size);
        }
        let place = result.seen_as(place);
        if !part.lies_at(&place) {
            self.copy_elements(base, result, cx)?;
            self.copy_elements(part, &place, cx)?;
        } else if !base.lies_at(result) {
            self.copy_around(base, result, start, &part.layout.shape, cx)?;
        }
        Ok(())
    }

    /// Copies a tensor but for a box: what lies before and behind it along each dimension in turn.
    fn copy_around(
        &self,
        from: &Slot,
        to: &Slot,
        start: &[usize],
        sizes: &[usize],
        cx: &RunCx<'_>,
    ) -> Result<(), RunError> {
        let (mut from, mut to) = (from.clone(), to.clone());
        for (dim, (start, size)) in start.iter().zip(sizes).enumerate() {
            let end = start + size;
            for (start, size) in [(0, *start), (end, to.layout.shape[dim] - end)] {
                let part = |of: &Slot| of.seen_as(of.layout.narrowed(dim, start, size));
                self.copy_elements(&part(&from), &part(&to), cx)?;
            }
            from = from.seen_as(from.layout.narrowed(dim, *start, *size));
            to = to.seen_as(to.layout.narrowed(dim, *start, *size));
        }
        Ok(())
    }

    /// Copies an entry of the first dimension to or from a tensor of its own.
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

    /// Moves values to other places, all at the same time.
    pub(super) fn move_all(&mut self, moves: &Moves, cx: &RunCx<'_>) -> Result<(), RunError> {
        for flight in &moves.land {
            self.wait(*flight, cx)?;
        }
        for (from, to) in &moves.flights {
            self.flights[*to] = self.flights[*from].take();
        }
        let mut aside = Vec::new();
        for one in moves.tensors.iter().filter(|one| one.staged) {
            aside.push(self.packed(&self.slots[one.from], cx)?);
        }
        let mut aside = aside.into_iter();
        for one in &moves.tensors {
            match one.staged.then(|| aside.next()).flatten() {
                Some(packed) => {
                    self.memory.write(&self.slots[one.to], cx.timeout)?.copy_from_slice(packed.bytes())
                }
                None => self.copy(one.from, one.to, false, cx)?,
            }
        }
        Ok(())
    }
}
