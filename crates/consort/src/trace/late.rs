//! Slices that a pending operation will write. They are joined to their tensor when an op next uses all of it, or a
//! part that overlaps them, so that ops on other parts can run meanwhile.

use std::rc::Rc;

use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::ops::UpdateSlice;

use crate::error::Result;
use crate::tensor::Tensor;

use super::value::Traced;
use super::{Session, Site, current};

/// A tensor with a slice that a pending operation writes.
pub(super) enum Late {
    Flying(Update),
    Joined(Value),
}

#[derive(Clone)]
pub(super) struct Update {
    pub(super) base: Tensor,
    part: Tensor,
    start: Vec<Index>,
}

impl Update {
    /// The line of the start that writes the slice.
    pub(super) fn site(&self) -> Option<Site> {
        self.part.traced.as_ref()?.start().map(|start| start.site)
    }

    /// Whether the box from `start` to `end` provably does not overlap the slice.
    fn is_apart_from(&self, start: &[Index], end: &[Index]) -> bool {
        let before = |a: &Index, b: &Index| (b - a).as_const().is_some_and(|distance| distance >= 0);
        let sizes = self.part.ty.shape.iter();
        self.start
            .iter()
            .zip(sizes)
            .zip(start.iter().zip(end))
            .any(|((own, size), (start, end))| before(end, own) || before(&(own + size), start))
    }
}

/// A tensor with a pending slice that is joined later; `None` if the slice is not pending, or inside a block.
pub(crate) fn update_later(base: &Tensor, part: &Tensor, start: &[Index]) -> Option<Tensor> {
    let session = current()?;
    let flying = part.traced.as_ref().and_then(|traced| traced.start()).is_some_and(|start| !start.waited());
    if !flying || !session.segment.borrow().frames.is_empty() {
        return None;
    }
    let ty = base.ty.with_varies(base.ty.varies.union(part.ty.varies));
    let update = Update { base: base.clone(), part: part.clone(), start: start.to_vec() };
    Some(session.tensor(ty, Traced::late(&session, Late::Flying(update))))
}

/// The tensor to take a box of: without pending slices that the box does not overlap.
pub(crate) fn outside_of_updates(tensor: &Tensor, start: &[Index], size: &[Index], step: &[usize]) -> Tensor {
    let mut tensor = tensor.clone();
    if tensor.traced.is_none() || [start.len(), size.len(), step.len()] != [tensor.rank(); 3] {
        return tensor;
    }
    let ends =
        start.iter().zip(size).zip(step).map(|((start, size), step)| start + &(size * &Index::from(*step)));
    let end: Vec<Index> = ends.collect();
    while let Some(update) = tensor.traced.as_ref().and_then(|traced| traced.update()) {
        if !update.is_apart_from(start, &end) {
            break;
        }
        tensor = update.base;
    }
    tensor
}

impl Session {
    /// Joins a pending slice to its tensor: records its wait.
    pub(super) fn join(self: &Rc<Self>, traced: &Traced, site: Site) -> Result<()> {
        let Some(Update { base, part, start }) = traced.update() else { return Ok(()) };
        let results = self.node(&UpdateSlice { start }, &[base, part], site)?;
        results.into_iter().for_each(|(value, _)| traced.set_joined(value));
        Ok(())
    }

    /// The same for all live tensors.
    pub(super) fn join_all(self: &Rc<Self>, site: Site) -> Result<()> {
        let live: Vec<Rc<Traced>> =
            self.segment.borrow().live.iter().filter_map(std::rc::Weak::upgrade).collect();
        live.iter().filter(|traced| traced.landed().is_none()).try_for_each(|traced| self.join(traced, site))
    }
}
