//! Where values of the forward are in a block of the backward: those that were kept, and those that are computed again
//! where the backward first reads them.

use std::collections::BTreeSet;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::ops::{Again, Op, Recompute, Regather};
use consort_ir::types::Type;
use consort_types::Failure;

use super::backward::Backward;
use super::tape::Tape;

/// Values of the forward, as a block of the backward has them.
#[derive(Default)]
pub(super) struct Values {
    /// Parameters, and what was computed again.
    known: ValueMap<Value>,
    /// Whether the block is that of the forward, so that it has all other values too.
    same: bool,
}

impl Values {
    /// In the block of the forward itself.
    pub(super) fn same() -> Values {
        Values { known: ValueMap::default(), same: true }
    }

    /// A value that is there under another name.
    pub(super) fn know(&mut self, value: Value, here: Value) {
        self.known.insert(value, here);
    }

    /// Where a value is; `None` if it has to be computed again, or cannot be had.
    pub(super) fn get(&self, tape: &Tape<'_>, value: Value) -> Option<Value> {
        let own = (self.same && tape.again.get(value).is_none()).then_some(value);
        self.known.get(value).copied().or(own)
    }
}

impl Backward<'_, '_> {
    /// Where a value is; computed again if it was not kept. `None` if it depends on what cannot be had.
    pub(super) fn have(
        &mut self,
        tape: &Tape<'_>,
        values: &mut Values,
        value: Value,
    ) -> Result<Option<Value>, Box<Failure>> {
        if let Some(here) = values.get(tape, value) {
            return Ok(Some(here));
        }
        // What has to be computed, in the order of the forward.
        let (mut needed, mut open) = (BTreeSet::new(), vec![value]);
        while let Some(value) = open.pop() {
            if let (None, Some(at)) = (values.get(tape, value), tape.again.get(value))
                && needed.insert(*at)
            {
                open.extend(&tape.entries[*at].args);
            }
        }
        for at in needed {
            self.again(tape, values, at)?;
        }
        Ok(values.get(tape, value))
    }

    /// Computes the results of an entry again, if its operands can be had.
    fn again(&mut self, tape: &Tape<'_>, values: &mut Values, at: usize) -> Result<(), Box<Failure>> {
        let entry = &tape.entries[at];
        let args: Option<Vec<Value>> = entry.args.iter().map(|arg| values.get(tape, *arg)).collect();
        let Some(mut args) = args else { return Ok(()) };
        self.builder.set_site(entry.node.site);
        if values.same && args == entry.args {
            // All operands are those of the forward: the node must not be made one with that of the forward.
            for arg in &mut args {
                if matches!(self.builder.ty(*arg)?, Type::Tensor(_)) {
                    *arg = self.builder.one(Again {}, &[*arg])?;
                    break;
                }
            }
        }
        let op = &entry.node.op;
        if op.as_op::<Recompute>().is_some() || op.as_op::<Regather>().is_some() {
            values.know(entry.results[0], args[0]);
            return Ok(());
        }
        let blocks = self.builder.copies(&entry.made)?;
        // An op that reads a size of its own iteration cannot be repeated outside of it.
        let Ok(made) = self.builder.node(Op::clone(&entry.node.op), &args, blocks) else { return Ok(()) };
        let inside = entry.blocks.iter().flat_map(|inside| &inside.saved).map(|(_, outside)| *outside);
        for (old, new) in entry.results.iter().copied().chain(inside).zip(made) {
            values.know(old, new);
        }
        Ok(())
    }
}
