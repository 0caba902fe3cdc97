//! Nodes that are recorded late: views of what is pending, and slices that a pending operation will write. They are
//! recorded where their result is first used, so that making one does not wait.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::ops::{Alias, Op, OpDef, UpdateSlice, call_name, check_name};
use consort_ir::types::Type;
use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::tensor::{Tensor, Tensors};

use super::value::Traced;
use super::{Session, Site, current};

/// A node that is recorded when one of its results is first used.
pub(super) struct Late {
    is: Is,
    /// How many blocks were open where it was made; it is recorded there.
    pub(super) depth: usize,
    /// Its results, once it is recorded.
    values: RefCell<Option<Vec<Value>>>,
}

enum Is {
    Update(Update),
    View { op: Op, base: Tensor, site: Site },
}

/// A tensor with a slice that a pending operation writes.
#[derive(Clone)]
pub(super) struct Update {
    pub(super) base: Tensor,
    part: Tensor,
    start: Vec<Index>,
}

impl Update {
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

impl Late {
    /// A result, once the node is recorded.
    pub(super) fn value(&self, result: usize) -> Option<Value> {
        self.values.borrow().as_ref()?.get(result).copied()
    }

    /// Whether it is not recorded yet.
    pub(super) fn is_open(&self) -> bool {
        self.values.borrow().is_none()
    }

    /// The slice, while it is pending.
    pub(super) fn update(&self) -> Option<Update> {
        match &self.is {
            Is::Update(update) if self.is_open() => Some(update.clone()),
            _ => None,
        }
    }

    /// The line of the start that it waits for.
    pub(super) fn start_site(&self) -> Option<Site> {
        let waits_for = match &self.is {
            Is::Update(update) => &update.part,
            Is::View { base, .. } => base,
        };
        waits_for.traced.as_ref()?.start_site()
    }

    /// Forgets that it was recorded, unless `keep` its results.
    pub(super) fn reset(&self, keep: impl Fn(Value) -> bool) {
        let mut values = self.values.borrow_mut();
        if values.as_ref().is_some_and(|values| !values.iter().all(|value| keep(*value))) {
            *values = None;
        }
    }
}

/// A tensor with a pending slice that is joined later; `None` if the slice is not pending.
pub(crate) fn update_later(base: &Tensor, part: &Tensor, start: &[Index]) -> Option<Tensor> {
    let session = current()?;
    if !session.is_pending(part) {
        return None;
    }
    let ty = base.ty.with_varies(base.ty.varies.union(part.ty.varies));
    let update = Update { base: base.clone(), part: part.clone(), start: start.to_vec() };
    let late = session.late(Is::Update(update));
    Some(session.tensor(ty, Traced::late(&session, late, 0)))
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
    /// A node that is recorded later, in the current block.
    fn late(&self, is: Is) -> Rc<Late> {
        let mut recording = self.recording.borrow_mut();
        let late = Rc::new(Late { is, depth: recording.frames.len(), values: RefCell::default() });
        recording.late.push(Rc::downgrade(&late));
        late
    }

    /// Whether a tensor needs a wait that is not recorded yet.
    fn is_pending(&self, tensor: &Tensor) -> bool {
        tensor.traced.as_ref().is_some_and(|traced| traced.landed().is_none() && traced.is_pending())
    }

    /// The results of a view of what is pending, to be recorded later; `None` for other ops.
    pub(super) fn view_later(
        self: &Rc<Self>,
        op: &dyn OpDef,
        args: &[Tensor],
        site: Site,
    ) -> Result<Option<Tensors>> {
        let [base] = args else { return Ok(None) };
        // A tensor that outlived its trace is refused where it is recorded.
        if op.alias() != Alias::View || !self.is_pending(base) {
            return Ok(None);
        }
        let name = call_name(op.info().name);
        self.check()?;
        check_name(op.info()).map_err(|failure| Error::of(name, failure, site))?;
        self.last.set(site);
        self.bind_symbols(op, site)?;
        let known = self.build(|builder| builder.guards().len())?;
        let types = self.build(|builder| builder.infer(op, &[Type::Tensor((*base.ty).clone())], &[]))?;
        let types = types.map_err(|failure| Error::of(name, failure, site))?;
        self.check_guards(known, name, site)?;
        let late = self.late(Is::View { op: op.to_op(), base: base.clone(), site });
        let mut tensors = Tensors::new();
        for (result, ty) in types.into_iter().enumerate() {
            let Type::Tensor(ty) = ty else { return Err(Error::new(name, "it gives no tensor", site)) };
            tensors.push(self.tensor(ty, Traced::late(self, Rc::clone(&late), result)));
        }
        Ok(Some(tensors))
    }

    /// Records a late node where it was made: its operands first, of which the pending ones are waited for.
    pub(super) fn join(self: &Rc<Self>, late: &Late, site: Site) -> Result<()> {
        if !late.is_open() {
            return Ok(());
        }
        let (op, args, at): (Op, Tensors, Site) = match &late.is {
            Is::Update(Update { base, part, start }) => {
                (Op::new(UpdateSlice { start: start.clone() }), smallvec![base.clone(), part.clone()], site)
            }
            Is::View { op, base, site } => (op.clone(), smallvec![base.clone()], *site),
        };
        let name = call_name(op.info().name);
        let values = args.iter().map(|arg| self.operand_at(arg, late.depth, name, site));
        let values = values.collect::<Result<Vec<_>>>()?;
        let results = self.build(|builder| {
            builder.outside(late.depth, |builder| {
                builder.set_site(Some(at.into()));
                builder.node(op, &values, Vec::new())
            })
        })?;
        late.values.replace(Some(results.map_err(|failure| Error::of(name, failure, at))?));
        Ok(())
    }

    /// The same for all that were made in the current block and are in use.
    pub(super) fn join_block(self: &Rc<Self>, site: Site) -> Result<()> {
        let open: Vec<Rc<Late>> = {
            let recording = self.recording.borrow();
            let here = |late: &Rc<Late>| late.depth == recording.frames.len() && late.is_open();
            recording.late.iter().filter_map(Weak::upgrade).filter(here).collect()
        };
        open.iter().try_for_each(|late| self.join(late, site))
    }

    /// The same for all live tensors.
    pub(super) fn join_all(self: &Rc<Self>, site: Site) -> Result<()> {
        let live: Vec<Rc<Traced>> = self.recording.borrow().live.iter().filter_map(Weak::upgrade).collect();
        live.iter().filter(|traced| traced.landed().is_none()).try_for_each(|traced| traced.join(self, site))
    }
}
