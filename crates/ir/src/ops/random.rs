//! Tensors of random numbers, each a pure function of a key and of its position in a whole, so that a stream is the
//! same however it is divided among ranks. The bits are defined in [`crate::random`].

use consort_types::{Dtype, Failure};

use crate::index::{Guard, Index};
use crate::literal::{Data, Literal, unravel};
use crate::op;
use crate::ops::elementwise::times;
use crate::ops::{Cost, CostCx, EvalCx, EvalError, InferCx, OpDef};
use crate::random::{element_number, element_words, normal, uniform};
use crate::types::{TensorType, Type};

/// The part of a whole that a rank holds.
struct Part<'a> {
    dtype: Dtype,
    shape: &'a [Index],
    of: &'a [Index],
    start: &'a [Index],
}

impl Part<'_> {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        if !self.dtype.is_float() {
            return Err(Failure::rule("C1", ("a float type", self.dtype.to_string())));
        }
        let key = cx.tensor(0)?;
        if key.dtype != Dtype::I64 || key.rank() != 0 {
            return Err(Failure::rule("C2", ("a key of type i64[]", key.display(cx.mesh).to_string())));
        }
        let lengths = [self.shape.len(), self.of.len(), self.start.len()];
        if lengths != [self.shape.len(); 3] {
            let message = ("as many entries in shape, of and start", format!("{lengths:?}"));
            return Err(Failure::rule("C3", message));
        }
        for (i, ((size, of), start)) in self.shape.iter().zip(self.of).zip(self.start).enumerate() {
            cx.require_size("C4", "a size", size)?;
            cx.require_size("C4", "a start", start)?;
            let end = start + size;
            cx.require("C5", Guard::Le(end.clone(), of.clone()), |cx| {
                (format!("to end by {}", of.display(cx.mesh)), end.display(cx.mesh).to_string())
            })
            .map_err(|failure| failure.of(format!("dimension {i}")))?;
        }
        Ok(vec![TensorType::new(self.dtype, self.shape.to_vec(), key.varies).into()])
    }

    fn eval(
        &self,
        cx: &EvalCx<'_>,
        key: &Literal,
        element: impl Fn([u32; 4]) -> f64,
    ) -> Result<Vec<Literal>, EvalError> {
        let Data::Int(key) = &key.data else { return Err(EvalError::new("the key is no integer")) };
        let list =
            |list: &[Index]| list.iter().map(|size| Ok(cx.size(size)? as u64)).collect::<Result<Vec<_>, _>>();
        let (shape, of, start) = (cx.shape(self.shape)?, list(self.of)?, list(self.start)?);
        for (i, size) in shape.iter().enumerate() {
            if start[i].saturating_add(*size as u64) > of[i] {
                let message =
                    format!("dimension {i}: {size} places from {} do not lie inside {}", start[i], of[i]);
                return Err(EvalError::new(message));
            }
        }
        let value = |i: usize| {
            let at: Vec<u64> = unravel(i, &shape).iter().map(|at| *at as u64).collect();
            element(element_words(key[0] as u64, element_number(&start, &at, &of)))
        };
        let n: usize = shape.iter().product();
        let data = (0..n).map(value).collect();
        Ok(vec![Literal::floats(self.dtype, shape, data)])
    }
}

/// Declares an op of random numbers.
macro_rules! random {
    ($($(#[doc = $doc:expr])* $name:ident($text:literal) $example:literal, flops $flops:literal,
        $element:expr;)*) => {$(
        op! {
            $(#[doc = $doc])*
            ///
            /// Element i is a function only of the key and of the row-major index of `start` + i in `of`: ranks with
            /// shards of one tensor and the same key have shards of one stream, on any number of ranks.
            ///
            /// (C1) The element type is a float type.
            ///
            /// (C2) The key is a 0-d i64.
            ///
            /// (C3) `shape`, `of` and `start` have as many entries.
            ///
            /// (C4) No size and no start is negative.
            ///
            /// (C5) The part lies inside the whole.
            pub struct $name($text)(key) {
                /// The element type.
                dtype: Dtype,
                /// The shape of the part that the result is.
                shape: Vec<Index>,
                /// The shape of the whole.
                of: Vec<Index>,
                /// The first place of the part in the whole, in each dimension.
                start: Vec<Index>
            }
            example concat!("mesh (tp: 2)\n\nfunc @f(v0: i64[]) -> f32[1,2]{tp} {\n    v1 = ", $text,
                "[dtype=f32, shape=[1, 2], of=[2, 2], start=[rank(tp), 0]] v0 : f32[1,2]{tp}\n    return v1\n}\n; run: @f(7) == ",
                $example, "\n")
        }

        impl $name {
            fn part(&self) -> Part<'_> {
                Part { dtype: self.dtype, shape: &self.shape, of: &self.of, start: &self.start }
            }
        }

        impl OpDef for $name {
            fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
                self.part().infer(cx)
            }
            fn cost(&self, cx: &CostCx<'_>) -> Cost {
                cx.kernel(times($flops, &cx.result_numel()))
            }
            fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
                let element: fn(Dtype, [u32; 4]) -> f64 = $element;
                self.part().eval(cx, args[0], |words| element(self.dtype, words))
            }
        }
    )*};
}

random! {
    /// Uniformly distributed random numbers in [0, 1), from the generator Philox4x32-10. f64 has
    /// 53 random bits, the others 24; those of f16 and bf16 are rounded towards zero, so that none becomes 1.
    Uniform("uniform") "[[0.9545971155166626, 0.4069603681564331]] | [[0.006075084209442139, 0.39019906520843506]]", flops 80, uniform;
    /// Random numbers of the normal distribution with mean 0 and variance 1, from the generator Philox4x32-10
    /// by the Box-Muller transform in f64, rounded once.
    Normal("normal") "[[1.87387969198, 0.482316047479]] | [[0.0391229036552, 0.595807623464]]", flops 90, |_, words| normal(words);
}
