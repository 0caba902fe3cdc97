//! The contexts in which an op's rules run: inference, cost, evaluation on one rank and on a group.

use std::collections::BTreeMap;
use std::fmt;

use consort_types::{Axes, Failure, GroupName, Headline, Rank};

use crate::index::{Facts, Guard, Index, IndexError, Sym};
use crate::literal;
use crate::mesh::Mesh;
use crate::types::{TensorType, Type, shape_text};

/// What an op costs one rank. One convention everywhere: `flops` counts additions, multiplications and
/// function calls alike; `bytes` is every operand read once plus every result written once; `wire` is what
/// this rank must receive from others under an algorithm that moves the fewest bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Arithmetic operations.
    pub flops: Index,
    /// Bytes of local memory read and written.
    pub bytes: Index,
    /// Bytes received from other ranks.
    pub wire: Index,
}

/// The context of a cost query.
#[derive(Debug)]
pub struct CostCx<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The types of the operands.
    pub args: &'a [Type],
    /// The types of the results.
    pub results: &'a [Type],
}

impl CostCx<'_> {
    /// Elements of an operand.
    pub fn arg_numel(&self, i: usize) -> Index {
        self.args.get(i).and_then(Type::as_tensor).map_or(Index::constant(0), TensorType::numel)
    }

    /// Elements of all tensors among the results, those inside a pending too.
    pub fn result_numel(&self) -> Index {
        Index::sum(&tensors(self.results).map(TensorType::numel).collect::<Vec<_>>())
    }

    /// Bytes of the operands.
    pub fn arg_bytes(&self) -> Index {
        Index::sum(&tensors(self.args).map(TensorType::bytes).collect::<Vec<_>>())
    }

    /// Bytes of the results.
    pub fn result_bytes(&self) -> Index {
        Index::sum(&tensors(self.results).map(TensorType::bytes).collect::<Vec<_>>())
    }

    /// The cost of a kernel that does `flops` operations and touches each operand and result once.
    pub fn kernel(&self, flops: Index) -> Cost {
        Cost { flops, bytes: &self.arg_bytes() + &self.result_bytes(), wire: Index::constant(0) }
    }

    /// The cost of an op that moves nothing.
    pub fn free(&self) -> Cost {
        Cost { flops: Index::constant(0), bytes: Index::constant(0), wire: Index::constant(0) }
    }

    /// The cost of communication that receives `wire` bytes and reads and writes local memory once.
    pub fn comm(&self, flops: Index, wire: Index) -> Cost {
        Cost { wire, ..self.kernel(flops) }
    }
}

fn tensors(types: &[Type]) -> impl Iterator<Item = &TensorType> {
    types.iter().flat_map(Type::tensors)
}

/// What to do with an undecidable condition on sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undecided {
    /// It is an error: the function's `where` clause must state it.
    Refuse,
    /// It becomes a guard of the function.
    Assume,
}

/// The most combinations of coordinates to try before a condition counts as undecided.
const MAX_COMBINATIONS: i64 = 64;

/// The types of a block's parameters and results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockType {
    /// The types of the parameters.
    pub params: Vec<Type>,
    /// The types of the results.
    pub results: Vec<Type>,
}

/// The context of type inference.
#[derive(Debug)]
pub struct InferCx<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The types of the operands.
    pub args: &'a [Type],
    /// The types of the blocks.
    pub blocks: &'a [BlockType],
    /// The facts about the symbols; grow when undecided conditions are assumed.
    pub facts: &'a mut Facts,
    /// What to do with an undecided condition.
    pub undecided: Undecided,
}

impl<'a> InferCx<'a> {
    /// Operand `i` as a tensor.
    pub fn tensor(&self, i: usize) -> Result<&'a TensorType, Box<Failure>> {
        match &self.args[i] {
            Type::Tensor(tensor) => Ok(tensor),
            other => {
                let headline = ("a tensor", self.text(other).to_string());
                Err(Failure::rule("V2", headline).of(format!("operand {i}")))
            }
        }
    }

    /// All operands as tensors.
    pub fn tensors(&self) -> Result<Vec<&'a TensorType>, Box<Failure>> {
        (0..self.args.len()).map(|i| self.tensor(i)).collect()
    }

    /// A type as programs write it.
    pub fn text(&self, ty: &Type) -> String {
        ty.display(self.mesh).to_string()
    }

    /// A shape as programs write it.
    pub fn shape_text(&self, shape: &[Index]) -> String {
        shape_text(shape, self.mesh)
    }

    /// Requires a condition on sizes; `message` says what was expected and what it got.
    pub fn require<M: Into<Headline>>(
        &mut self,
        rule: &'static str,
        guard: Guard,
        message: impl FnOnce(&Self) -> M,
    ) -> Result<(), Box<Failure>> {
        let (Guard::Eq(a, b) | Guard::Le(a, b)) = &guard;
        if a.is_invalid() || b.is_invalid() {
            return Err(Failure::rule(
                rule,
                "a size has no value: it does not fit in 64 bits, or divides by zero",
            ));
        }
        match self.facts.holds(&guard).or_else(|| self.holds_on_every_rank(&guard)) {
            Some(true) => Ok(()),
            Some(false) => Err(Failure::rule(rule, message(self))),
            None if self.undecided == Undecided::Assume => {
                self.facts.assume(guard);
                Ok(())
            }
            None => {
                let text = guard.display(self.mesh).to_string();
                let note = format!("`{text}` cannot be decided: add it to the function's `where` clause");
                Err(Failure::rule(rule, message(self)).note(note))
            }
        }
    }

    /// Whether a condition that mentions ranks holds for each combination of coordinates.
    fn holds_on_every_rank(&self, guard: &Guard) -> Option<bool> {
        let mut coordinates: Vec<(Sym, i64)> = Vec::new();
        guard.symbols(&mut |sym| {
            let size = match sym {
                Sym::Rank(axis) => self.mesh.axis_size(axis),
                Sym::GroupRank(id) => self.mesh.group_size(GroupName::List(id)),
                _ => return,
            };
            if coordinates.iter().all(|(other, _)| *other != sym) {
                coordinates.push((sym, i64::from(size)));
            }
        });
        let combinations: i64 = coordinates.iter().map(|(_, size)| size).product();
        if coordinates.is_empty() || combinations > MAX_COMBINATIONS {
            return None;
        }
        let mut all = Some(true);
        for number in 0..combinations {
            let mut rest = number;
            let mut here: Vec<(Sym, Index)> = Vec::new();
            for (sym, size) in &coordinates {
                here.push((*sym, Index::constant(rest % size)));
                rest /= size;
            }
            let put = |sym| here.iter().find(|(other, _)| *other == sym).map(|(_, at)| at.clone());
            match self.facts.holds(&guard.substitute(&put)) {
                Some(false) => return Some(false),
                None => all = None,
                Some(true) => {}
            }
        }
        all
    }

    /// Requires that two sizes are equal.
    pub fn require_eq<M: Into<Headline>>(
        &mut self,
        rule: &'static str,
        expected: &Index,
        got: &Index,
        message: impl FnOnce(&Self) -> M,
    ) -> Result<(), Box<Failure>> {
        if expected == got {
            return Ok(());
        }
        self.require(rule, Guard::Eq(expected.clone(), got.clone()), message)
    }

    /// Requires that two shapes are equal; `what` says whose shape it is.
    pub fn require_same_shape(
        &mut self,
        rule: &'static str,
        what: &str,
        expected: &[Index],
        got: &[Index],
    ) -> Result<(), Box<Failure>> {
        let message =
            |cx: &Self| (format!("{what} {}", cx.shape_text(expected)), cx.shape_text(got).to_string());
        if expected.len() != got.len() {
            return Err(Failure::rule(rule, message(self)));
        }
        for (expected, got) in expected.iter().zip(got) {
            self.require_eq(rule, expected, got, message)?;
        }
        Ok(())
    }

    /// Requires that a dimension exists.
    pub fn require_dim(&self, rule: &'static str, dim: usize, rank: usize) -> Result<(), Box<Failure>> {
        if dim < rank { Ok(()) } else { Err(Failure::rule(rule, Headline::dimension(dim, rank))) }
    }

    /// Requires distinct dimensions that exist.
    pub fn require_dims(&self, rule: &'static str, dims: &[usize], rank: usize) -> Result<(), Box<Failure>> {
        for (i, dim) in dims.iter().enumerate() {
            self.require_dim(rule, *dim, rank)?;
            if dims[..i].contains(dim) {
                return Err(Failure::rule(rule, ("distinct dimensions", format!("{dim} twice"))));
            }
        }
        Ok(())
    }

    /// Requires that a number is not negative; `what` says what it is: "a size".
    pub fn require_size(&mut self, rule: &'static str, what: &str, size: &Index) -> Result<(), Box<Failure>> {
        let zero = Index::constant(0);
        self.require(rule, Guard::Le(zero, size.clone()), |cx| {
            (format!("{what} of at least 0"), size.display(cx.mesh).to_string())
        })
    }

    /// Requires that an attribute is equal on all members of a group.
    pub fn require_equal_on(
        &self,
        rule: &'static str,
        what: &str,
        index: &Index,
        group: GroupName,
    ) -> Result<(), Box<Failure>> {
        let differs = self.facts.varies(index).intersect(self.mesh.group_axes(group));
        if differs.is_empty() {
            return Ok(());
        }
        let (text, axes) = (index.display(self.mesh).to_string(), self.mesh.axes_text(differs));
        Err(Failure::rule(
            rule,
            format!("expected {what} to be equal on all members, but {text} differs over {axes}"),
        ))
    }

    /// The axes over which these sizes differ.
    pub fn varies_of<'i>(&self, sizes: impl IntoIterator<Item = &'i Index>) -> Axes {
        sizes.into_iter().fold(Axes::NONE, |set, size| set.union(self.facts.varies(size)))
    }

    /// The position of this rank in its instance of a group, as a symbol.
    pub fn group_rank(&self, group: GroupName) -> Index {
        group_rank(self.mesh, group)
    }
}

/// The position of a rank in its instance of a group, as a symbol.
pub fn group_rank(mesh: &Mesh, group: GroupName) -> Index {
    match group {
        GroupName::Axes(axes) => axes.iter().fold(Index::constant(0), |at, axis| {
            &(&at * &Index::from(i64::from(mesh.axis_size(axis)))) + &Index::sym(Sym::Rank(axis))
        }),
        GroupName::List(id) => Index::sym(Sym::GroupRank(id)),
    }
}

/// Why a reference evaluation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalError {
    /// What was expected and got, or what happened.
    pub headline: Headline,
    /// Which communication cannot be done, if that is the cause.
    pub unmatched: Option<Unmatched>,
}

/// Communication that cannot be done as its ranks ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmatched {
    /// A peer that its group of `size` members does not have.
    Peer {
        /// The peer.
        peer: i64,
        /// The members of the group.
        size: u32,
    },
    /// A message that its receiver does not expect like this.
    Message {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The tag.
        tag: i64,
    },
    /// A part of an `all_to_all` that its receiver does not expect like this.
    Part {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
}

impl EvalError {
    /// What was expected and got, or what happened.
    pub fn new(headline: impl Into<Headline>) -> EvalError {
        EvalError { headline: headline.into(), unmatched: None }
    }

    /// The same of communication that cannot be done.
    pub fn unmatched(headline: impl Into<Headline>, unmatched: Unmatched) -> EvalError {
        EvalError { headline: headline.into(), unmatched: Some(unmatched) }
    }

    /// The same as the failure of a call.
    pub fn failure(&self) -> Box<Failure> {
        match self.unmatched {
            Some(Unmatched::Peer { peer, size }) => Failure::peer(size, peer),
            _ => Failure::new(self.headline.clone()),
        }
    }
}

impl fmt::Display for EvalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.headline.fmt(f)
    }
}

/// The failure of an op that was to communicate and does not.
pub fn no_communication() -> EvalError {
    EvalError::new("not a communication op")
}

/// A number and a noun, which is in the plural unless the number is 1.
pub(crate) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Context of an evaluation on one rank.
#[derive(Clone, Copy)]
pub struct EvalCx<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The rank.
    pub rank: Rank,
    /// The symbols bound so far; ranks' coordinates are known without it.
    pub symbols: &'a BTreeMap<Sym, i64>,
}

impl EvalCx<'_> {
    /// The value of a size expression on this rank.
    pub fn index(&self, index: &Index) -> Result<i64, EvalError> {
        if let Some(value) = index.as_const() {
            return Ok(value);
        }
        let env = |sym| match sym {
            Sym::Rank(axis) => Some(i64::from(self.mesh.coordinate(self.rank, axis))),
            Sym::GroupRank(id) => self.mesh.group_rank(GroupName::List(id), self.rank).map(i64::from),
            sym => self.symbols.get(&sym).copied(),
        };
        index.eval(&env).map_err(|error| {
            let why = match error {
                IndexError::Unbound(_) => "a symbol has no value",
                IndexError::Overflow => "it does not fit in 64 bits",
                IndexError::DivisionByZero => "division by zero",
                IndexError::OutOfTable => "it picks outside its table",
            };
            EvalError::new(format!("{}: {why}", index.display(self.mesh)))
        })
    }

    /// The value of a size expression that must not be negative.
    pub fn size(&self, index: &Index) -> Result<usize, EvalError> {
        let value = self.index(index)?;
        usize::try_from(value).map_err(|_| {
            EvalError::new(format!("{} is {value}, and a size is at least 0", index.display(self.mesh)))
        })
    }

    /// The values of a shape; an error if a tensor of it would be too large for the oracle.
    pub fn shape(&self, shape: &[Index]) -> Result<Vec<usize>, EvalError> {
        let sizes = shape.iter().map(|size| self.size(size)).collect::<Result<Vec<_>, _>>()?;
        check_numel(&sizes)?;
        Ok(sizes)
    }
}

/// Refuses shapes that are too large for the oracle.
pub fn check_numel(shape: &[usize]) -> Result<(), EvalError> {
    match literal::numel(shape) {
        Some(_) => Ok(()),
        None => Err(EvalError::new(format!(
            "a tensor of shape {shape:?} has more than {} elements",
            literal::MAX_ELEMENTS
        ))),
    }
}

/// Context of the evaluation of a collective: all members of one instance of the group.
pub struct GroupEvalCx<'a> {
    /// One context for each member, in group order.
    pub members: &'a [EvalCx<'a>],
}

impl GroupEvalCx<'_> {
    /// The number of members.
    pub fn n(&self) -> usize {
        self.members.len()
    }
}
