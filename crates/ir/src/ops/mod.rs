//! The ops: one definition each, and the table that lists them.
//!
//! `docs/contributing/add-an-op.md` adds one, place by place.

mod attention;
mod attr;
mod checked;
mod collective;
mod composite;
mod control;
mod conv;
mod create;
mod cx;
mod def;
mod docs;
mod elementwise;
mod exact;
mod exchange;
mod facets;
mod functions;
mod gradient;
mod lookup;
mod matmul;
mod norm;
mod order;
mod placement;
mod random;
mod reduce;
mod reduction;
mod rooted;
mod shape;
mod sizes;
mod slopes;
mod uneven;
mod vjp;

use consort_types::Failure;
use std::collections::BTreeMap;

pub use attention::*;
pub use attr::{Attr, AttrSpec, Flag, ListAttr, OptionAttr, end_attrs, read_attr, write_attr, write_float};
pub use checked::{boxes_of, eval_of, layouts_of, view_of};
pub use collective::*;
pub use composite::*;
pub use control::*;
pub use conv::*;
pub use create::*;
pub(crate) use cx::count;
pub use cx::*;
pub use def::*;
pub use docs::{ops_markdown, reductions_markdown};
pub use elementwise::*;
pub use exchange::*;
pub(crate) use facets::check_facets;
pub use gradient::*;
pub use lookup::*;
pub use matmul::*;
pub use norm::*;
pub use order::*;
pub use placement::*;
pub use random::*;
pub use reduce::*;
pub use reduction::fold;
pub use rooted::*;
pub use shape::*;
pub use sizes::*;
pub use uneven::*;
pub use vjp::{Cotangents, Term, VjpCx, VjpNode, gradient_words};

/// The built-in ops by kind, in the order in which docs list them.
pub const BUILT_IN: &[(&str, &[OpInfo])] = &[
    (
        "Communication",
        &[
            AllReduceStart::INFO,
            AllGatherStart::INFO,
            ReduceScatterStart::INFO,
            AllToAllStart::INFO,
            BroadcastStart::INFO,
            ReduceStart::INFO,
            GatherStart::INFO,
            ScatterStart::INFO,
            AllGatherVStart::INFO,
            ReduceScatterVStart::INFO,
            PermuteStart::INFO,
            ExchangeStart::INFO,
            BarrierStart::INFO,
            Wait::INFO,
        ],
    ),
    (
        "Arithmetic",
        &[
            Add::INFO,
            Sub::INFO,
            Mul::INFO,
            Div::INFO,
            Rem::INFO,
            Maximum::INFO,
            Minimum::INFO,
            Pow::INFO,
            Atan2::INFO,
            Neg::INFO,
            Abs::INFO,
            Exp::INFO,
            Log::INFO,
            Sqrt::INFO,
            Rsqrt::INFO,
            Tanh::INFO,
            Sigmoid::INFO,
            Erf::INFO,
            Gelu::INFO,
            Silu::INFO,
            Softplus::INFO,
            Relu::INFO,
            Sign::INFO,
            Recip::INFO,
            Sin::INFO,
            Cos::INFO,
            Exp2::INFO,
            Expm1::INFO,
            Log2::INFO,
            Log1p::INFO,
            Floor::INFO,
            Ceil::INFO,
            Round::INFO,
        ],
    ),
    (
        "Comparison, logic, conversion",
        &[
            Eq::INFO,
            Ne::INFO,
            Lt::INFO,
            Le::INFO,
            Gt::INFO,
            Ge::INFO,
            IsNan::INFO,
            IsFinite::INFO,
            And::INFO,
            Or::INFO,
            Xor::INFO,
            Not::INFO,
            Select::INFO,
            Cast::INFO,
        ],
    ),
    (
        "Reductions and products",
        &[
            Sum::INFO,
            Prod::INFO,
            Mean::INFO,
            Max::INFO,
            Min::INFO,
            Any::INFO,
            All::INFO,
            Argmax::INFO,
            Argmin::INFO,
            Matmul::INFO,
            Conv1d::INFO,
            Conv2d::INFO,
        ],
    ),
    (
        "Shape",
        &[
            Reshape::INFO,
            Permute::INFO,
            Slice::INFO,
            UpdateSlice::INFO,
            Concat::INFO,
            Split::INFO,
            Pad::INFO,
            Broadcast::INFO,
            Flip::INFO,
        ],
    ),
    ("Order", &[Cumsum::INFO, Sort::INFO, Topk::INFO]),
    ("Lookup", &[Gather::INFO, TakeAlong::INFO, Scatter::INFO, ScatterAdd::INFO, OneHot::INFO]),
    ("Creation", &[Constant::INFO, Iota::INFO, IndexValue::INFO, Uniform::INFO, Normal::INFO]),
    ("Sizes", &[SizeOf::INFO, ToSize::INFO]),
    ("Placement", &[Digest::INFO, EqualOver::INFO]),
    (
        "Composites",
        &[
            Softmax::INFO,
            LogSoftmax::INFO,
            Logsumexp::INFO,
            RmsNorm::INFO,
            LayerNorm::INFO,
            Attention::INFO,
            AttentionBackward::INFO,
        ],
    ),
    (
        "Gradients",
        &[Spread::INFO, StopGradient::INFO, Recompute::INFO, Keep::INFO, Regather::INFO, Again::INFO],
    ),
    ("Control", &[Cond::INFO, Scan::INFO, While::INFO]),
];

/// The built-in elementwise ops without attributes: what holds for one of them is tested and generated for all.
pub fn elementwise_ops() -> impl Iterator<Item = Op> {
    let rows = BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()).filter(|info| info.attrs.is_empty());
    rows.filter_map(OpInfo::example_op).filter(|op| op.is_elementwise())
}

/// The built-in op of this name.
pub fn built_in(name: &str) -> Option<&'static OpInfo> {
    BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()).find(|info| info.name == name)
}

/// Fails if an op that is not built in has the name of a built-in one, by which passes and kernels find that one.
pub fn check_name(info: &OpInfo) -> Result<(), Box<Failure>> {
    match built_in(info.name) {
        Some(own) if own.doc != info.doc || own.example != info.example => {
            Err(Failure::new(("a name that no built-in op has", format!("`{}`", info.name)))
                .note("`consort ops` lists the names that are taken"))
        }
        _ => Ok(()),
    }
}

/// The ops that a text may name.
#[derive(Debug)]
pub struct OpTable {
    by_name: BTreeMap<&'static str, &'static OpInfo>,
}

impl OpTable {
    /// The built-in ops.
    pub fn built_in() -> OpTable {
        let rows = BUILT_IN.iter().flat_map(|(_, rows)| rows.iter());
        OpTable { by_name: rows.map(|info| (info.name, info)).collect() }
    }

    /// Adds a user's op; false if an op of its name exists already.
    pub fn add(&mut self, info: &'static OpInfo) -> bool {
        let free = !self.by_name.contains_key(info.name);
        if free {
            self.by_name.insert(info.name, info);
        }
        free
    }

    /// The op of this name.
    pub fn get(&self, name: &str) -> Option<&'static OpInfo> {
        self.by_name.get(name).copied()
    }

    /// All ops by name.
    pub fn iter(&self) -> impl Iterator<Item = &'static OpInfo> {
        self.by_name.values().copied()
    }

    /// The op whose name is closest to a misspelled one.
    pub fn nearest(&self, name: &str) -> Option<&'static str> {
        let start = format!("{name}_start");
        if let Some((known, _)) = self.by_name.get_key_value(start.as_str()) {
            return Some(known);
        }
        let best = self.by_name.keys().min_by_key(|known| edits(known, name))?;
        (edits(best, name) <= name.len() / 3).then_some(best)
    }
}

/// The edit distance of two words.
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.bytes().enumerate() {
            let change = before + usize::from(a != b);
            before = row[j + 1];
            row[j + 1] = change.min(before + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_op_gets_the_nearest_name() {
        let ops = OpTable::built_in();
        assert_eq!(ops.nearest("all_reduce"), Some("all_reduce_start"));
        assert_eq!(ops.nearest("mtmul"), Some("matmul"));
        assert_eq!(ops.nearest("sofmax"), Some("softmax"));
        assert_eq!(ops.nearest("frobnicate"), None);
        assert_eq!(ops.nearest(""), None);
        assert_eq!(edits("kitten", "sitting"), 3);
    }
}
