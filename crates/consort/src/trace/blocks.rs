//! Blocks of cond and scan: opened, filled by a function, closed, with their captured values. Functions that are traced
//! as one of their own, for gradients.

use std::cell::Cell;
use std::panic::Location;
use std::rc::{Rc, Weak};

use consort_ir::builder::Draft;
use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::infer::fits;
use consort_ir::ops::{Op, OpDef};
use consort_ir::program::{Block, Func};
use consort_ir::types::Type;
use consort_types::{Axes, Failure};

use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::tensor::Tensor;

use super::{Frame, Session, Site, Start, Traced};

/// How many blocks may be open. The passes and the executor call themselves for what is inside a block, and a thread's
/// stack must have room for that.
const MAX_NESTED: usize = 64;

/// A function that was traced as one of its own.
pub(crate) struct Own<R> {
    /// Its parameters are those of the block, and then the captured values.
    pub(crate) func: Func,
    /// The values outside that it reads.
    pub(crate) captured: Vec<Value>,
    /// What it returned; its tensors are results of the function.
    pub(crate) made: R,
}

/// Closes the block of a function that panics, so that a program which catches the panic can continue its trace.
pub(crate) struct OpenBlock(Rc<Session>);

impl Drop for OpenBlock {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.end(&[]);
        }
    }
}

impl Session {
    /// Guards the block that was opened last, while its function runs.
    pub(crate) fn open_block(self: &Rc<Self>) -> OpenBlock {
        OpenBlock(Rc::clone(self))
    }

    /// The values of tensors, as operands in the current block.
    pub(crate) fn operands(self: &Rc<Self>, tensors: &[Tensor], op: &str, site: Site) -> Result<Vec<Value>> {
        // What is made next, a parameter of a block or a result, is made at this line.
        self.last.set(site);
        tensors.iter().map(|tensor| self.operand(tensor, op, site)).collect()
    }

    pub(crate) fn types(&self, values: &[Value]) -> Result<Vec<Type>> {
        let types = self.build(|builder| {
            values.iter().map(|value| builder.ty(*value).cloned()).collect::<std::result::Result<Vec<_>, _>>()
        })?;
        types.map_err(|failure| Error::of("compile", failure, Location::caller()))
    }

    /// The axes over which a size may differ.
    pub(crate) fn varies(&self, size: &Index) -> Result<Axes> {
        self.build(|builder| builder.facts().varies(size))
    }

    /// Opens a block of a function of this name; returns its parameters. Values that an earlier block captured are captured
    /// first.
    pub(crate) fn begin(
        self: &Rc<Self>,
        name: &'static str,
        types: Vec<Type>,
        captured: &[Value],
    ) -> Result<Vec<Tensor>> {
        if self.recording.borrow().frames.len() >= MAX_NESTED {
            let expected = format!("at most {MAX_NESTED} loops, branches and gradients inside one another");
            let failure = Failure::new((expected, format!("more than {MAX_NESTED}")))
                .note("use one `scan` or `while_loop` instead of one inside another");
            return Err(Error::of("compile", failure, self.last_site()));
        }
        let more = self.types(captured)?;
        let values = self.build(|builder| builder.begin_block([types.clone(), more].concat()))?;
        let (own, inner) = values.split_at(types.len());
        let depth = {
            let mut recording = self.recording.borrow_mut();
            let number = self.blocks.get() + 1;
            self.blocks.set(number);
            let captured = captured.iter().copied().zip(inner.iter().copied()).collect();
            recording.frames.push(Frame { number, name, captured });
            recording.frames.len()
        };
        let tensor = |(value, ty): (&Value, Type)| match ty {
            Type::Tensor(ty) => Ok(self.tensor(ty, Traced::at(self, *value, depth))),
            _ => Err(Error::new("compile", "expected tensors", Location::caller())),
        };
        own.iter().zip(types).map(tensor).collect()
    }

    /// Passes on the outcome of a block's function; closes the block if it failed.
    pub(crate) fn ended<T>(self: &Rc<Self>, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            let _ = self.end(&[]);
        }
        outcome
    }

    /// Closes a block; returns it and the values that it captured.
    pub(crate) fn end(self: &Rc<Self>, results: &[Value]) -> (Result<Block>, Vec<Value>) {
        // What is pending in the block ends with it.
        let joined = self.join_block(self.last_site());
        let depth = self.recording.borrow().frames.len();
        let open: Vec<Rc<Start>> = {
            let recording = self.recording.borrow();
            recording.starts.iter().filter(|start| start.depth == depth && !start.waited()).cloned().collect()
        };
        let waited = open.iter().try_for_each(|start| self.wait_for(start, start.site));
        let block = self.build(|builder| builder.end_block(results));
        let frame = self.recording.borrow_mut().frames.pop();
        let captured = frame.map_or_else(Vec::new, |frame| frame.captured);
        (joined.and(waited).and(block), captured.into_iter().map(|(outer, _)| outer).collect())
    }

    pub(crate) fn add_param(&self, block: &mut Block, types: Vec<Type>) -> Result<()> {
        self.build(|builder| {
            for ty in types {
                builder.add_param(block, ty);
            }
        })
    }

    /// Records a node with blocks.
    pub(crate) fn control_node(
        self: &Rc<Self>,
        op: Op,
        args: &[Value],
        blocks: Vec<Block>,
        name: &str,
        site: Site,
    ) -> Result<Vec<Tensor>> {
        self.check()?;
        self.bind_symbols(&*op, site)?;
        let depth = self.recording.borrow().frames.len();
        let results = self.build(|builder| {
            builder.set_site(Some(site.into()));
            let results = builder.node(op, args, blocks)?;
            results
                .into_iter()
                .map(|value| Ok((value, builder.ty(value)?.clone())))
                .collect::<std::result::Result<Vec<_>, _>>()
        })?;
        let results = results.map_err(|failure| Error::of(name, failure, site))?;
        let tensor = |(value, ty): (Value, Type)| match ty {
            Type::Tensor(ty) => Ok(self.tensor(ty, Traced::at(self, value, depth))),
            _ => Err(Error::new(name, "expected tensors", site)),
        };
        results.into_iter().map(tensor).collect()
    }

    /// Traces a function as a block of parameters of these types, and takes it out as a function of its own.
    pub(crate) fn own_function<R: Flatten>(
        self: &Rc<Self>,
        types: Vec<Type>,
        (name, site): (&'static str, Site),
        run: impl FnOnce(Vec<Tensor>) -> Result<R>,
    ) -> Result<Own<R>> {
        let params = self.begin(name, types, &[])?;
        let open = self.open_block();
        let outcome = run(params).and_then(|made| {
            let results = self.operands(&made.flatten(), name, site)?;
            Ok((made, results))
        });
        drop(open);
        let (made, results) = self.ended(outcome)?;
        let (block, captured) = self.end(&results);
        let block = block?;
        Ok(Own { func: self.build(|builder| builder.func_of(block))?, captured, made })
    }

    /// Records the nodes of a function, with these values as its arguments.
    pub(crate) fn splice(
        self: &Rc<Self>,
        func: &Func,
        args: &[Value],
        (name, site): (&str, Site),
    ) -> Result<Vec<Tensor>> {
        self.check()?;
        let values = self.build(|builder| builder.splice(func, args))?;
        let values = values.map_err(|failure| Error::of(name, failure, site))?;
        self.tensors(&values, (name, site))
    }

    /// Values of the current block as tensors.
    pub(crate) fn tensors(
        self: &Rc<Self>,
        values: &[Value],
        (name, site): (&str, Site),
    ) -> Result<Vec<Tensor>> {
        let depth = self.recording.borrow().frames.len();
        let tensor = |(value, ty): (&Value, Type)| match ty {
            Type::Tensor(ty) => Ok(self.tensor(ty, Traced::at(self, *value, depth))),
            _ => Err(Error::new(name, "expected tensors", site)),
        };
        values.iter().zip(self.types(values)?).map(tensor).collect()
    }

    /// Records a node that is no tensor's own, such as a mark for gradients; returns its results.
    pub(crate) fn mark(
        &self,
        op: &dyn OpDef,
        args: &[Value],
        (name, site): (&str, Site),
    ) -> Result<Vec<Value>> {
        let made = self.build(|builder| {
            builder.set_site(Some(site.into()));
            builder.node(op.to_op(), args, Vec::new())
        })?;
        made.map_err(|failure| Error::of(name, failure, site))
    }

    /// Whether a value of one type may stand where another type is expected.
    pub(crate) fn fits(&self, value: &Type, expected: &Type) -> Result<bool> {
        self.build(|builder| fits(value, expected, builder.facts()))
    }

    /// Whether what is traced is a function of which a gradient is taken.
    pub(crate) fn takes_gradient(&self) -> bool {
        self.gradients_open.get() > 0
    }

    /// Says that what `run` traces is a function of which a gradient is taken.
    pub(crate) fn taking_gradient<T>(&self, run: impl FnOnce() -> T) -> T {
        /// Counts down, also after a panic.
        struct Open<'a>(&'a Cell<usize>);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() - 1);
            }
        }
        self.gradients_open.set(self.gradients_open.get() + 1);
        let _open = Open(&self.gradients_open);
        run()
    }

    /// A snapshot of the trace, for `restore`.
    pub(crate) fn snapshot(&self) -> Option<Draft> {
        self.recording.borrow().draft.clone()
    }

    /// Restores a snapshot. Parameters for constants that were added later are removed, and waits and late nodes that
    /// were recorded later are open again.
    pub(crate) fn restore(&self, draft: Option<Draft>) {
        let mut recording = self.recording.borrow_mut();
        let known = draft.as_ref().map_or(0, Draft::params);
        let keep = |value| draft.as_ref().is_some_and(|draft| draft.has(value));
        recording.starts.iter().for_each(|start| start.reset(keep));
        recording.late.iter().filter_map(Weak::upgrade).for_each(|late| late.reset(keep));
        recording.inputs.truncate(known);
        recording.draft = draft;
        let depth = recording.frames.len();
        recording.starts.retain(|start| start.depth <= depth);
    }
}
