//! The definition of ops: one trait and one macro. The contexts of its rules are in `cx.rs`.
//!
//! An op is a struct whose fields are its attributes, declared with `op!` and given its rules by
//! `impl OpDef`. The macro writes what follows from the declaration alone: the name, the docs with their
//! numbered constraints, reading and printing of attributes. Everything that asks about ops (parser,
//! verifier, oracle, passes, docs) asks through this trait, so an op that a user declares with the same
//! macro and adds to an `OpTable` is traced, compiled and run like a built-in one.

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use consort_types::layout::{Dims, Layout};
use consort_types::{Collective, Failure, GroupName, Headline, Kind};
use smallvec::SmallVec;

use crate::builder::Builder;
use crate::entity::Value;
use crate::index::{Index, Sym, SymbolFacts};
use crate::literal::Literal;
use crate::mesh::Mesh;
use crate::ops::OpTable;
use crate::ops::attr::AttrSpec;
use crate::ops::cx::{Cost, CostCx, EvalCx, EvalError, GroupEvalCx, InferCx};
use crate::ops::vjp::{Cotangents, VjpCx};
use crate::text::{Cursor, ParseError, parse};
use crate::tolerance::Tolerance;
use crate::types::Type;

/// An op with its attributes, as a node holds it. Cheap to clone.
#[derive(Clone)]
pub struct Op(Arc<dyn OpDef>);

impl Op {
    /// An op.
    pub fn new(op: impl OpDef) -> Op {
        Op(Arc::new(op))
    }

    /// The operand that result `result` of a start overwrites, if it works in place.
    pub fn overwrites(&self, result: usize) -> Option<usize> {
        self.0.collective()?.overwrites(result)
    }

    /// The op as its own type, to read its attributes.
    pub fn as_op<T: OpDef>(&self) -> Option<&T> {
        self.0.as_any().downcast_ref()
    }
}

impl Deref for Op {
    type Target = dyn OpDef;
    fn deref(&self) -> &dyn OpDef {
        &*self.0
    }
}

impl PartialEq for Op {
    fn eq(&self, other: &Op) -> bool {
        self.0.same(&*other.0)
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The static description of an op: a row of the table.
#[derive(Debug)]
pub struct OpInfo {
    /// How programs spell it.
    pub name: &'static str,
    /// What it does, and its constraints, each a paragraph that begins with `(C1)`, `(C2)`, ..
    pub doc: &'static str,
    /// The names of its operands; the last may be variadic.
    pub args: &'static [&'static str],
    /// Whether the last operand is variadic.
    pub variadic: bool,
    /// Its attributes, in the order in which programs write them.
    pub attrs: &'static [AttrSpec],
    /// A program that uses it, with `; run:` lines that hold.
    pub example: &'static str,
    /// Reads the attributes.
    pub read: fn(&mut Cursor<'_>) -> Result<Op, ParseError>,
}

/// An op's name as users call it: a start without its suffix.
pub fn call_name(op: &str) -> &str {
    op.strip_suffix("_start").unwrap_or(op)
}

impl OpInfo {
    /// The minimum number of operands, and the maximum if there is one.
    pub fn arity(&self) -> (usize, Option<usize>) {
        let n = self.args.len();
        if self.variadic { (n - 1, None) } else { (n, Some(n)) }
    }

    /// The op with the attributes that its example gives it.
    pub fn example_op(&self) -> Option<Op> {
        let program = parse(self.example, &OpTable::built_in()).ok()?.program;
        let mut nodes = program.funcs.iter().flat_map(|func| &func.body.nodes);
        nodes.find(|node| node.op.info().name == self.name).map(|node| node.op.clone())
    }

    /// The numbered constraints: `("C1", "text")`.
    pub fn constraints(&self) -> Vec<(String, String)> {
        let paragraphs = self.doc.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
        let numbered = paragraphs.filter_map(|p| {
            let (rule, text) = p.strip_prefix('(')?.split_once(") ")?;
            let digits = rule.strip_prefix('C')?;
            digits.parse::<u32>().ok().map(|_| (rule.to_string(), text.to_string()))
        });
        numbered.collect()
    }
}

/// The part of an op that `op!` writes.
pub trait OpBase: Any + fmt::Debug + Send + Sync {
    /// The op's row of the table.
    fn info(&self) -> &'static OpInfo;
    /// Appends the attributes as programs write them: `[reduce=sum, over=tp]`, or nothing.
    fn write_attrs(&self, out: &mut String, mesh: &Mesh);
    /// Calls `f` with every size expression in the attributes.
    fn indices(&self, f: &mut dyn FnMut(&Index));
    /// Calls `f` with every group in the attributes.
    fn groups(&self, f: &mut dyn FnMut(GroupName));
    /// Whether the other is the same op with equal attributes.
    fn same(&self, other: &dyn OpDef) -> bool;
    /// For `Op::as_op`.
    fn as_any(&self) -> &dyn Any;
    /// The op as a node holds it.
    fn to_op(&self) -> Op;
}

/// The rules of an op.
pub trait OpDef: OpBase {
    /// The types of the results, or the constraint that failed. The operands have the number and the kinds that the
    /// declaration states.
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>>;

    /// The cost of running it.
    fn cost(&self, cx: &CostCx<'_>) -> Cost;

    /// How far a kernel may be from `eval`. If it gives the same bits, a pass may compute constants by `eval`.
    fn tolerance(&self) -> Tolerance {
        Tolerance::Bits
    }

    /// Its effects besides computing its results.
    fn effects(&self) -> Effects {
        match self.collective() {
            Some(collective) if collective.kind == Kind::Exchange => Effects::Messages(collective.over),
            Some(collective) => Effects::Collective(collective.over),
            None => Effects::Pure,
        }
    }

    /// The collective or the messages that it starts.
    fn collective(&self) -> Option<Collective<'_, Index>> {
        None
    }

    /// Whether a result may share storage with an operand.
    fn alias(&self) -> Alias {
        Alias::None
    }

    /// Whether each element of the result depends only on the elements at its position in the operands.
    fn is_elementwise(&self) -> bool {
        self.alias() == Alias::Reuse
    }

    /// The results as views of operand 0, which has this layout; `None` if elements must move. For ops whose `alias` is
    /// a view.
    fn view(&self, _cx: &EvalCx<'_>, _x: &Layout) -> Result<Option<Layouts>, EvalError> {
        Ok(None)
    }

    /// Whether its one result is operand 0 with its dimensions regrouped: then it is a contiguous view of a contiguous
    /// operand, whatever the sizes are.
    fn keeps_order(&self) -> bool {
        false
    }

    /// Whether the result consists of boxes of its operands, given by `boxes`: a box that lies in place already is not
    /// moved.
    fn joins(&self) -> bool {
        false
    }

    /// The boxes of a join, which cover its result exactly once, for operands of these shapes.
    fn boxes(&self, _cx: &EvalCx<'_>, _shapes: &[&[usize]]) -> Result<Vec<Joined>, EvalError> {
        Err(EvalError::new("it joins nothing"))
    }

    /// Its blocks and how they run.
    fn flow(&self) -> Flow<'_> {
        Flow::Straight
    }

    /// Whether operands are tensors (the default), pendings, or anything.
    fn takes(&self) -> Takes {
        Takes::Tensors
    }

    /// The symbols that its results define: result `i` is the value of symbol `i`.
    fn defines(&self, _args: &[Type]) -> Vec<(Sym, SymbolFacts)> {
        Vec::new()
    }

    /// The reference evaluation on one rank. Ops that communicate or have blocks have none.
    fn eval(&self, _cx: &EvalCx<'_>, _args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Err(EvalError::new("has no evaluation on one rank"))
    }

    /// The reference evaluation of a collective: all members' operands to all members' results.
    fn eval_group(
        &self,
        _cx: &GroupEvalCx<'_>,
        _args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        Err(EvalError::new("has no evaluation over a group"))
    }

    /// The expansion of a composite into simpler ops. The op itself is still lowered to its own kernel.
    fn expand(&self, _b: &mut Builder<'_>, _args: &[Value]) -> Option<Result<Vec<Value>, Box<Failure>>> {
        None
    }

    /// Whether a gradient takes its results as constants.
    fn stops_gradient(&self) -> bool {
        false
    }

    /// Whether a gradient passes from its results to an operand.
    fn passes_gradient(&self, _operand: usize) -> bool {
        !self.stops_gradient()
    }

    /// Whether its results are its first operands, with no work and no wider type: then it is there for its gradient alone,
    /// and goes when that has been taken.
    fn is_rule_alone(&self) -> bool {
        false
    }

    /// The gradient rule: emits the cotangents of the operands, given those of the results; or says why there are none.
    /// A cotangent has the element type and the shape of its operand, and differs over no more axes. It is asked only
    /// where a cotangent reaches a result; ops with blocks have none, since the pass that takes gradients enters them.
    fn vjp<'c, 'm>(&self, _cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        Err(Failure::new("has no gradient yet"))
    }
}

/// The effects of an op besides computing its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effects {
    /// None: it may be removed, repeated and moved.
    Pure,
    /// Starts an operation in which every member of the group takes part.
    Collective(GroupName),
    /// Starts sends and receives between members of the group.
    Messages(GroupName),
    /// Completes a start.
    Wait,
    /// Runs on the host, for example to read a tensor into sizes. It is never removed, repeated or moved. A view with this
    /// effect reads all its operands where it stands, and may fail there.
    Host,
}

impl Effects {
    /// The group, if it is a start.
    pub fn starts(self) -> Option<GroupName> {
        match self {
            Effects::Collective(group) | Effects::Messages(group) => Some(group),
            _ => None,
        }
    }
}

/// Layouts of an op's results.
pub type Layouts = SmallVec<[Layout; 1]>;

/// A box of an operand, and its place in the result of a join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Which operand.
    pub operand: usize,
    /// The start of the box in the operand, in each dimension.
    pub from: Dims,
    /// Its start in the result.
    pub to: Dims,
    /// Its sizes.
    pub size: Dims,
}

/// Whether a result may share storage with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alias {
    /// No.
    None,
    /// The results may be views of operand 0.
    View,
    /// The result may overwrite any dead operand of its type, because the op is elementwise.
    Reuse,
    /// The result may overwrite operand 0, if that is dead.
    First,
}

/// The blocks of an op and how they run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Flow<'a> {
    /// None.
    Straight,
    /// Two: the first runs when operand 0 is true, the second when it is false; both take the others.
    Cond,
    /// One, again and again: operands are the carries, tensors sliced along their first dimension, and
    /// values that every iteration sees.
    Loop {
        /// The number of iterations.
        trips: Trips<'a>,
        /// The number of operands that are carried from one iteration to the next.
        carries: usize,
        /// The number of operands that are sliced.
        slices: usize,
        /// Whether iteration i of n takes and stacks entry n - 1 - i instead of entry i.
        reverse: bool,
    },
}

/// How often a loop runs its block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trips<'a> {
    /// This number of times.
    Count(&'a Index),
    /// As long as the first carry, a 0-d bool, is true.
    While {
        /// The largest number of iterations: the loop fails if the carry is still true then.
        limit: usize,
        /// The number of iterations that costs are computed with.
        expected: usize,
    },
}

impl Trips<'_> {
    /// The error of a loop whose condition is still true after its last iteration.
    pub fn unfinished(limit: usize) -> Headline {
        let limit = super::count(limit, "iteration");
        (format!("a condition that is false after at most {limit}"), "true").into()
    }
}

impl Flow<'_> {
    /// The entry that an iteration of a loop of known length takes and stacks.
    pub fn entry(reverse: bool, length: usize, iteration: usize) -> usize {
        if reverse { length - 1 - iteration } else { iteration }
    }

    /// The labels of the blocks of a node.
    pub fn labels(self) -> &'static [&'static str] {
        match self {
            Flow::Straight => &[],
            Flow::Cond => &["then", "else"],
            Flow::Loop { .. } => &["body"],
        }
    }
}

/// The kinds of operands an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Tensors.
    Tensors,
    /// One pending.
    Pending,
    /// Anything that its rule allows, including pendings.
    Any,
}

/// Declares an op: docs with numbered constraints, name, operands, attributes and an example.
///
/// `pub struct Concat("concat")(parts..) { dim: usize }` declares `concat[dim=0] v0, v1, v2`. The rules
/// follow in `impl OpDef for Concat`.
#[macro_export]
macro_rules! op {
    (
        $(#[doc = $doc:expr])*
        $vis:vis struct $name:ident($text:literal)($($arg:ident),* $(; $rest:ident..)?)
        { $($(#[doc = $adoc:expr])* $attr:ident: $ty:ty),* $(,)? }
        example $example:expr
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Debug)]
        $vis struct $name {
            $($(#[doc = $adoc])* pub $attr: $ty,)*
        }

        impl $name {
            /// The op's row of the table.
            pub const INFO: $crate::ops::OpInfo = $crate::ops::OpInfo {
                name: $text,
                doc: concat!($($doc, "\n"),*),
                args: &[$(stringify!($arg),)* $(stringify!($rest),)?],
                variadic: $crate::op!(@variadic $($rest)?),
                attrs: &[$($crate::ops::AttrSpec {
                    name: stringify!($attr),
                    kind: <$ty as $crate::ops::Attr>::KIND,
                    doc: concat!($($adoc),*),
                },)*],
                example: $example,
                read: |_cursor| {
                    #[allow(unused_mut, unused_assignments, reason = "ops without attributes leave it alone")]
                    let mut first = true;
                    $(let $attr = $crate::ops::read_attr(_cursor, stringify!($attr), &mut first)?;)*
                    $crate::ops::end_attrs(_cursor, !first)?;
                    Ok($crate::ops::Op::new($name { $($attr),* }))
                },
            };
        }

        impl $crate::ops::OpBase for $name {
            fn info(&self) -> &'static $crate::ops::OpInfo {
                static INFO: $crate::ops::OpInfo = $name::INFO;
                &INFO
            }
            fn write_attrs(&self, _out: &mut String, _mesh: &$crate::mesh::Mesh) {
                #[allow(unused_mut, reason = "ops without attributes leave it alone")]
                let mut _first = true;
                $($crate::ops::write_attr(_out, _mesh, stringify!($attr), &self.$attr, &mut _first);)*
                if !_first {
                    _out.push(']');
                }
            }
            fn indices(&self, _f: &mut dyn FnMut(&$crate::index::Index)) {
                $($crate::ops::Attr::indices(&self.$attr, _f);)*
            }
            fn groups(&self, _f: &mut dyn FnMut($crate::GroupName)) {
                $($crate::ops::Attr::groups(&self.$attr, _f);)*
            }
            fn same(&self, other: &dyn $crate::ops::OpDef) -> bool {
                let Some(_other) = other.as_any().downcast_ref::<$name>() else { return false };
                true $(&& $crate::ops::Attr::same(&self.$attr, &_other.$attr))*
            }
            fn as_any(&self) -> &dyn std::any::Any {
                self
            }
            fn to_op(&self) -> $crate::ops::Op {
                $crate::ops::Op::new(self.clone())
            }
        }
    };
    (@variadic) => { false };
    (@variadic $rest:ident) => { true };
}
