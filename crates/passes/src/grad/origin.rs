//! How the values of an open block were made, as far as it decides where they are spread.

use std::collections::BTreeMap;

use consort_ir::entity::Value;
use consort_ir::index::Sym;
use consort_ir::ops::{Broadcast, Cast, Effects, Flow, Op, OpDef, Permute, Recompute, Reshape, Slice, Split};
use consort_ir::types::{TensorType, Type};
use consort_types::Site;

/// How a value from before a loop enters an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Enters {
    Sliced,
    Whole,
}

/// A node without blocks and effects.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub(super) op: Op,
    pub(super) args: Vec<Value>,
    pub(super) results: Vec<Value>,
    pub(super) site: Option<Site>,
    /// The number of the one operand that a gradient passes to; none if there are several.
    pub(super) through: Option<usize>,
}

impl Made {
    /// A node of one operand, which a gradient passes to; without results yet.
    pub(super) fn new(op: impl OpDef, args: Vec<Value>, site: Option<Site>) -> Made {
        Made { op: Op::new(op), args, results: Vec::new(), site, through: Some(0) }
    }
}

/// What a value is made of.
#[derive(Clone, Copy, Debug, Default)]
struct Origin {
    /// It is the same in every iteration: computed from what all iterations see.
    invariant: bool,
    /// It is a value from before the loop, or computed from one of them alone, element by element or as a view.
    outside: bool,
    /// It is an argument of the function in another form.
    argument: bool,
    /// It is spread by spreading the operand of its op.
    earlier: bool,
}

/// How the values of an open block were made.
#[derive(Debug, Default)]
pub(super) struct Origins {
    made: Vec<Made>,
    /// The number of the node that gives a value.
    places: BTreeMap<Value, usize>,
    origins: BTreeMap<Value, Origin>,
}

impl Origins {
    /// An argument of the function.
    pub(super) fn add_argument(&mut self, param: Value) {
        self.origins.insert(param, Origin { argument: true, ..Origin::default() });
    }

    /// A parameter of a loop's block whose value comes from before the loop.
    pub(super) fn add_outer(&mut self, param: Value, enters: Enters) {
        let invariant = enters == Enters::Whole;
        self.origins.insert(param, Origin { invariant, outside: true, ..Origin::default() });
    }

    /// A node of the block, with the types of its operands and of its first result. Others than those without blocks and
    /// effects are not known here.
    pub(super) fn add(&mut self, made: Made, args: &[Type], result: Option<&Type>) {
        let is_pure = made.op.effects() == Effects::Pure && made.op.flow() == Flow::Straight;
        if !is_pure || made.op.is_rule_alone() || !made.op.defines(args).is_empty() {
            return;
        }
        let origin = self.origin(&made, args, result.and_then(Type::as_tensor));
        for result in &made.results {
            self.places.insert(*result, self.made.len());
            self.origins.insert(*result, origin);
        }
        self.made.push(made);
    }

    fn of(&self, value: Value) -> Origin {
        self.origins.get(&value).copied().unwrap_or_default()
    }

    fn origin(&self, made: &Made, args: &[Type], result: Option<&TensorType>) -> Origin {
        let mut invariant = made.args.iter().all(|arg| self.of(*arg).invariant);
        // A size that is read in the loop is not known before it.
        made.op.indices(&mut |index| {
            index.symbols(&mut |sym| invariant &= !matches!(sym, Sym::Unbacked(_)));
        });
        let of_none = Origin { invariant, ..Origin::default() };
        let Some((through, result)) = made.through.zip(result) else { return of_none };
        let (Some(x), Some(from)) = (args.get(through).and_then(Type::as_tensor), made.args.get(through))
        else {
            return of_none;
        };
        let from = self.of(*from);
        let outside = from.outside || from.invariant;
        let (op, gains) = (&made.op, from.earlier || outside);
        let of = |earlier, argument| Origin { invariant, outside, argument, earlier };
        if op.as_op::<Broadcast>().is_some() {
            // Fewer elements are summed before it.
            of(gains || x.numel() != result.numel(), from.argument)
        } else if op.as_op::<Split>().is_some() {
            // One sum instead of one for each part.
            of(true, from.argument)
        } else if op.as_op::<Slice>().is_some() {
            // More elements are summed before it, but not in each iteration.
            Origin { invariant, outside, argument: false, earlier: from.outside && !invariant }
        } else if op.as_op::<Cast>().is_some() {
            // An argument is summed in its own element type, if that is the wider one.
            of(gains || from.argument && x.dtype.size() > result.dtype.size(), from.argument)
        } else if op.as_op::<Reshape>().is_some()
            || op.as_op::<Permute>().is_some()
            || op.as_op::<Recompute>().is_some()
        {
            of(gains, from.argument)
        } else if op.is_elementwise() {
            of(gains, false)
        } else {
            of_none
        }
    }

    /// The node before which a value is spread, if it is spread earlier than where it is used.
    pub(super) fn earlier(&self, value: Value) -> Option<(&Made, usize)> {
        let made = self.made.get(*self.places.get(&value)?)?;
        made.through.filter(|_| self.of(value).earlier).map(|through| (made, through))
    }

    /// The node that gives a value which is the same in every iteration.
    pub(super) fn invariant(&self, value: Value) -> Option<&Made> {
        self.made.get(*self.places.get(&value)?).filter(|_| self.of(value).invariant)
    }
}
