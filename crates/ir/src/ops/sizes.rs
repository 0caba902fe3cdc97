//! Sizes as values: reading one from a tensor's shape, and making one from data.

use consort_types::{Axes, Dtype, Failure};

use crate::index::{Index, Sym, SymbolFacts};
use crate::literal::{Data, Literal};
use crate::op;
use crate::ops::{Cost, CostCx, Effects, EvalCx, EvalError, InferCx, OpDef};
use crate::types::Type;

op! {
    /// A size of a tensor, as a value.
    ///
    /// (C1) The dimension exists.
    pub struct SizeOf("size_of")(x) {
        /// Which dimension.
        dim: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[s0,2]) -> size<s0> {\n    v1 = size_of[dim=0] v0 : size<s0>\n    return v1\n}\n; run: @f([[1, 2], [3, 4], [5, 6]]) == 3\n"
}

impl OpDef for SizeOf {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        cx.require_dim("C1", self.dim, x.rank())?;
        let size = &x.shape[self.dim];
        Ok(vec![Type::Size(size.clone(), cx.facts.varies(size))])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        Ok(vec![Literal::size(args[0].shape[self.dim] as i64)])
    }
}

op! {
    /// Reads sizes out of an integer tensor. Each becomes an unbacked symbol that types and attributes may
    /// mention from here on; an element outside the stated range is an error when the program runs.
    ///
    /// (C1) The operand is a 0-d or 1-d tensor of type i32 or i64.
    ///
    /// (C2) There is a symbol for each element.
    ///
    /// (C3) The symbols are unbacked (`u0`), distinct, and defined nowhere else.
    ///
    /// (C4) The range is not empty.
    pub struct ToSize("to_size")(x) {
        /// The symbols that the sizes are known by.
        symbols: Vec<Sym>,
        /// The smallest they may be.
        min: Index,
        /// The largest they may be.
        max: Option<Index>
    }
    example "mesh ()\n\nfunc @f(v0: i64[2]) -> f32[u0+u1] {\n    v1, v2 = to_size[symbols=[u0, u1], min=0, max=none] v0 : size<u0>, size<u1>\n    v3 = iota[dtype=f32, shape=[u0+u1], dim=0] : f32[u0+u1]\n    return v3\n}\n; run: @f([2, 1]) == [0, 1, 2]\n"
}

impl ToSize {
    fn bounds(&self) -> (i64, Option<i64>) {
        (self.min.as_const().unwrap_or(0), self.max.as_ref().and_then(Index::as_const))
    }
}

impl OpDef for ToSize {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let x = cx.tensor(0)?;
        if x.rank() > 1 || !matches!(x.dtype, Dtype::I32 | Dtype::I64) {
            return Err(Failure::rule(
                "C1",
                ("i32 or i64 in at most 1 dimension", cx.text(&cx.args[0]).to_string()),
            ));
        }
        let n = self.symbols.len();
        cx.require_eq("C2", &x.numel(), &Index::from(n), |cx| {
            (format!("a symbol for each of {} elements", x.numel().display(cx.mesh)), n.to_string())
        })?;
        for (i, sym) in self.symbols.iter().enumerate() {
            let known = cx.facts.get(*sym).is_some() || self.symbols[..i].contains(sym);
            if known || !matches!(sym, Sym::Unbacked(_)) {
                let text = Index::sym(*sym).display(cx.mesh).to_string();
                let message = ("a new unbacked symbol", text.to_string());
                return Err(Failure::rule("C3", message)
                    .note("unbacked symbols are spelled u0, u1, .. and defined once"));
            }
        }
        let (min, max) = self.bounds();
        let constant =
            self.min.as_const().is_some() && self.max.as_ref().is_none_or(|max| max.as_const().is_some());
        if !constant || max.is_some_and(|max| max < min) {
            let got = |bound: &Index| bound.display(cx.mesh).to_string();
            let max = self.max.as_ref().map_or("none".to_string(), got);
            let message = ("constants with min at most max", format!("{} and {max}", got(&self.min)));
            return Err(Failure::rule("C4", message));
        }
        Ok(self.symbols.iter().map(|sym| Type::Size(Index::sym(*sym), x.varies)).collect())
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn effects(&self) -> Effects {
        Effects::Host
    }
    fn defines(&self, args: &[Type]) -> Vec<(Sym, SymbolFacts)> {
        let (min, max) = self.bounds();
        let varies = args.first().map_or(Axes::NONE, Type::varies);
        self.symbols.iter().map(|sym| (*sym, SymbolFacts { min, max, multiple_of: 1, varies })).collect()
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let (min, max) = self.bounds();
        let Data::Int(data) = &args[0].data else {
            return Err(EvalError::new("the sizes are not integers"));
        };
        if data.len() != self.symbols.len() {
            return Err(EvalError::new((format!("{} sizes", self.symbols.len()), data.len().to_string())));
        }
        if let Some(bad) = data.iter().find(|x| **x < min || max.is_some_and(|max| **x > max)) {
            let to = max.map_or_else(String::new, |max| format!("={max}"));
            return Err(EvalError::new((format!("sizes in {min}..{to}"), bad.to_string())));
        }
        Ok(data.iter().map(|x| Literal::size(*x)).collect())
    }
}
