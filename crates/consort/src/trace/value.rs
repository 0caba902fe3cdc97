//! Values of a trace, as tensors hold them.

use std::cell::{Cell, OnceCell, RefCell};
use std::panic::Location;
use std::rc::{Rc, Weak};

use consort_ir::entity::Value;
use consort_types::Failure;

use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::tensor::Tensor;

use super::late::{Late, Update};
use super::{Session, Site};

/// A value of a graph, and the tensor that it becomes once the graph has run.
pub(crate) struct Traced {
    session: Weak<Session>,
    graph: u32,
    /// The number of the block in which it was made; 0 outside of blocks.
    block: u32,
    /// The line that made it; for an argument that of the call.
    made: Site,
    is: Is,
    landed: OnceCell<Tensor>,
}

enum Is {
    /// A tensor of the function, and how many blocks were open around it.
    Value(Value, usize),
    /// One of the tensors of a start.
    Pending(Rc<Start>, usize),
    /// One of the results of a node that is recorded later.
    Late(Rc<Late>, usize),
}

/// A start in a trace: its wait is recorded when its results are first used.
pub(crate) struct Start {
    session: Weak<Session>,
    pub(crate) pending: Value,
    /// How many blocks were open around it.
    pub(crate) depth: usize,
    /// How many tensors it gives.
    pub(crate) tensors: usize,
    /// Its source line.
    pub(crate) site: Site,
    waited: RefCell<Option<Vec<Value>>>,
    returned: Cell<bool>,
    /// What it became at a graph break that its pending crossed; `None` if it was over by then.
    landed: OnceCell<Option<Rc<Flight>>>,
}

impl Start {
    pub(super) fn new(
        session: &Rc<Session>,
        pending: Value,
        depth: usize,
        tensors: usize,
        site: Site,
    ) -> Rc<Start> {
        Rc::new(Start {
            session: Rc::downgrade(session),
            pending,
            depth,
            tensors,
            site,
            waited: RefCell::default(),
            returned: Cell::new(false),
            landed: OnceCell::new(),
        })
    }

    /// Waits for it as a handle does: records the wait in its trace, and fails once that has ended.
    pub(crate) fn wait(self: &Rc<Self>, site: Site) -> Result<()> {
        match (self.session.upgrade(), super::current()) {
            (Some(_), _) if self.returned() => self.flight().map_or(Ok(()), Flight::wait),
            (Some(own), Some(session)) if Rc::ptr_eq(&own, &session) => session.wait_for(self, site),
            // Code that runs uncompiled inside of its trace: the graph before has ended, and with it all that it started.
            (Some(_), _) if self.waited() => Ok(()),
            _ => Err(self.kept("wait", site)),
        }
    }

    /// Whether it is over, as a handle tells: all that a trace starts is, or will be waited for.
    pub(crate) fn test(&self, site: Site) -> Result<bool> {
        match self.has_ended() {
            true => Err(self.kept("test", site)),
            false => self.flight().map_or(Ok(true), |flight| flight.test()),
        }
    }

    /// What it became at a graph break, unless it was over by then.
    pub(crate) fn flight(&self) -> Option<&Rc<Flight>> {
        self.landed.get()?.as_ref()
    }

    pub(super) fn land(&self, flight: Option<Rc<Flight>>) {
        // Set once: a graph runs once in a session.
        let _ = self.landed.set(flight);
    }

    /// Whether its trace has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.session.strong_count() == 0
    }

    /// The error of a handle that outlived its trace.
    fn kept(&self, method: &str, site: Site) -> Error {
        let failure = Failure::new(("a handle of this call", "one that a traced function kept"))
            .row(made_at(self.site))
            .note("return the handle from the compiled function and wait for it then, or wait inside");
        Error::of(method, failure, site)
    }

    pub(crate) fn waited(&self) -> bool {
        self.waited.borrow().is_some()
    }

    pub(super) fn set_waited(&self, values: Vec<Value>) {
        *self.waited.borrow_mut() = Some(values);
    }

    /// Forgets the wait, unless its results are to be kept.
    pub(super) fn reset(&self, keep: impl Fn(Value) -> bool) {
        let mut waited = self.waited.borrow_mut();
        if waited.as_ref().is_some_and(|values| !values.iter().all(|value| keep(*value))) {
            *waited = None;
        }
    }

    /// The pending, which the function returns: its caller waits for it.
    pub(super) fn return_pending(&self) -> Value {
        self.returned.set(true);
        self.pending
    }

    pub(super) fn returned(&self) -> bool {
        self.returned.get()
    }
}

impl Traced {
    pub(super) fn value(session: &Rc<Session>, value: Value) -> Traced {
        Traced::at(session, value, 0)
    }

    pub(super) fn at(session: &Rc<Session>, value: Value, depth: usize) -> Traced {
        Traced::new(session, Is::Value(value, depth))
    }

    pub(super) fn pending(session: &Rc<Session>, start: Rc<Start>, place: usize) -> Traced {
        Traced::new(session, Is::Pending(start, place))
    }

    pub(super) fn late(session: &Rc<Session>, late: Rc<Late>, result: usize) -> Traced {
        Traced::new(session, Is::Late(late, result))
    }

    fn new(session: &Rc<Session>, is: Is) -> Traced {
        let (graph, block, made) = (session.graph_number(), session.block_number(), session.last_site());
        Traced { session: Rc::downgrade(session), graph, block, made, is, landed: OnceCell::new() }
    }

    /// The line that made it; for an argument that of the call.
    pub(crate) fn made(&self) -> Site {
        self.made
    }

    /// Whether it was made outside of blocks, or in one that is open.
    pub(super) fn is_in_scope(&self, session: &Session) -> bool {
        session.is_open(self.block)
    }

    /// The tensor that it became, if its graph has run.
    pub(crate) fn landed(&self) -> Option<&Tensor> {
        self.landed.get()
    }

    pub(super) fn land(&self, tensor: Tensor) {
        // Set once: a graph runs once in a session.
        let _ = self.landed.set(tensor);
    }

    /// Its place among the tensors of the pending that the function returns; 0 if it is returned as a tensor.
    pub(super) fn number(&self) -> usize {
        match &self.is {
            Is::Pending(start, number) if start.returned() => *number,
            _ => 0,
        }
    }

    /// The start, if it is a result of one.
    pub(super) fn start(&self) -> Option<Rc<Start>> {
        if let Is::Pending(start, _) = &self.is { Some(Rc::clone(start)) } else { None }
    }

    /// Whether its value needs a wait that is not recorded yet.
    pub(super) fn is_pending(&self) -> bool {
        match &self.is {
            Is::Value(..) => false,
            Is::Pending(start, _) => !start.waited(),
            Is::Late(late, _) => late.is_open(),
        }
    }

    /// The line of the start that it waits for.
    pub(super) fn start_site(&self) -> Option<Site> {
        match &self.is {
            Is::Value(..) => None,
            Is::Pending(start, _) => Some(start.site),
            Is::Late(late, _) => late.start_site(),
        }
    }

    /// The value and how many blocks were open around it, once its wait or its late node is recorded.
    pub(super) fn place(&self) -> (Value, usize) {
        match &self.is {
            Is::Value(value, depth) => (*value, *depth),
            Is::Pending(start, place) => {
                let value = start.waited.borrow().as_ref().and_then(|values| values.get(*place).copied());
                (value.unwrap_or(start.pending), start.depth)
            }
            // The other value is not reached: callers record the node first.
            Is::Late(late, result) => (late.value(*result).unwrap_or(Value(u32::MAX)), late.depth),
        }
    }

    /// The slice, while it is pending.
    pub(super) fn update(&self) -> Option<Update> {
        if let Is::Late(late, _) = &self.is
            && self.landed().is_none()
        {
            late.update()
        } else {
            None
        }
    }

    /// Records the node that makes it, if that was left for later.
    pub(super) fn join(&self, session: &Rc<Session>, site: Site) -> Result<()> {
        if let Is::Late(late, _) = &self.is
            && self.landed().is_none()
        {
            session.join(late, site)
        } else {
            Ok(())
        }
    }

    /// Fails if it is not a value of the session's current graph.
    pub(super) fn check(&self, session: &Rc<Session>, op: &str, site: Site) -> Result<()> {
        let here = self.session.upgrade().is_some_and(|own| Rc::ptr_eq(&own, session));
        if !here || self.graph != session.graph_number() {
            return Err(self.kept(op, site));
        }
        if !self.is_in_scope(session) {
            let expected = "a tensor that was made outside of the loop or branch";
            let got = "one made inside of it: in a function given to `cond`, `scan`, `while_loop` or `grad`";
            let failure = Failure::new((expected, got))
                .row(made_at(self.made))
                .note("return it from that function: the results are its values outside");
            return Err(Error::of(op, failure, site));
        }
        Ok(())
    }

    /// The error of a tensor that outlived its trace.
    fn kept(&self, op: &str, site: Site) -> Error {
        let failure = Failure::new(("a tensor of this call", "one that a traced function kept"))
            .row(made_at(self.made))
            .note("return it from the compiled function instead");
        Error::of(op, failure, site)
    }

    /// Records the wait of its start, or waits for the tensor that it became.
    pub(crate) fn wait(&self, site: Site) -> Result<()> {
        if let Some(landed) = self.landed() {
            return landed.wait();
        }
        let session = self.own_session("wait", site)?;
        match self.start() {
            Some(start) => session.wait_for(&start, site),
            None => self.join(&session, site),
        }
    }

    /// Whether the tensor that it became is available; in the trace it is, or will be waited for.
    pub(crate) fn is_ready(&self, site: Site) -> Result<bool> {
        match self.landed() {
            Some(landed) => landed.is_ready(),
            None => self.own_session("is_ready", site).map(|_| true),
        }
    }

    /// The session that is tracing now; fails if this is not a value of it.
    fn own_session(&self, op: &str, site: Site) -> Result<Rc<Session>> {
        let session = super::current().ok_or_else(|| self.kept(op, site))?;
        self.check(&session, op, site)?;
        Ok(session)
    }

    pub(crate) fn session(&self) -> Option<Rc<Session>> {
        self.session.upgrade()
    }
}

/// Where a value was made, as errors say it.
fn made_at(made: Site) -> String {
    format!("it was made at {}:{}", made.file(), made.line())
}

/// The concrete tensor of a traced one, by a graph break if necessary.
#[track_caller]
pub(crate) fn settle(tensor: &Tensor, op: &str, site: &'static Location<'static>) -> Result<Tensor> {
    let Some(traced) = &tensor.traced else { return Ok(tensor.clone()) };
    if let Some(landed) = traced.landed() {
        return Ok(landed.clone());
    }
    match traced.session() {
        Some(session) if super::current().is_some_and(|now| Rc::ptr_eq(&now, &session)) => {
            traced.check(&session, op, site)?;
            session.break_at(op, site)?;
        }
        _ => return Err(traced.kept(op, site)),
    }
    traced.landed().cloned().ok_or_else(|| traced.kept(op, site))
}
