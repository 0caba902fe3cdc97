//! The methods of `Tensor` on results, so that a chain of them has one `?`.

use consort_types::Dtype;

use crate::element::Element;
use crate::error::Result;
use crate::index::{Index, Shape};
use crate::operand::Operand;
use crate::tensor::Tensor;

/// Declares methods of one signature: `[lifetimes] (arguments) -> result: names`.
macro_rules! chain {
    ($($lives:tt $args:tt -> $out:ty: $($name:ident)*;)*) => {
        $($(chain!(@one $name $lives $args -> $out);)*)*
    };
    (@one $name:ident [$($life:lifetime),*] ($($arg:ident: $ty:ty),*) -> $out:ty) => {
        #[doc = concat!("[`Tensor::", stringify!($name), "`] of what the step before returned.")]
        ///
        /// [`Chain`] has an example.
        #[track_caller]
        fn $name<$($life),*>(self $(, $arg: $ty)*) -> Result<$out> {
            self.tensor()?.$name($($arg),*)
        }
    };
}

/// The methods of [`Tensor`] that compute, on the result of one of them: a chain needs a single `?`, at its end. The
/// error is that of the step that failed, with the line of that step.
///
/// `and` and `or` are methods of `Result` itself, which come first: write `x.gt(0)?.and(&y)`.
///
/// ```
/// use consort::{Chain, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let (x, w) = (Tensor::from_iter([1.0f32, 2.0])?.reshape(&[1, 2])?, Tensor::from_iter([3.0f32, -4.0])?);
/// let y = x.matmul(&w.unsqueeze(1)?).add(1.0).relu().sum_all().item::<f32>()?;
/// assert_eq!(y, 0.0);
///
/// let first = line!() + 2;
/// let error = x
///     .matmul(&w.unsqueeze(0)?) // This step fails.
///     .relu()
///     .map(drop)
///     .unwrap_err();
/// assert_eq!((error.op(), error.site().line()), ("matmul", first));
/// # Ok(()) }
/// ```
#[allow(
    clippy::wrong_self_convention,
    reason = "a step takes the result of the step before, under the name of the method"
)]
pub trait Chain: Sized {
    /// The result of the step before.
    #[doc(hidden)]
    fn tensor(self) -> Result<Tensor>;

    chain! {
        [] () -> Tensor: neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt recip sin cos tanh sigmoid erf gelu silu
            softplus relu floor ceil round not is_nan is_finite sum_all mean_all max_all min_all t contiguous replicated
            stop_gradient regather;
        ['a] (other: impl Into<Operand<'a>>) -> Tensor: add sub mul div rem pow atan2 maximum minimum xor eq ne lt le gt
            ge;
        ['a, 'b] (yes: impl Into<Operand<'a>>, no: impl Into<Operand<'b>>) -> Tensor: select;
        ['a, 'b] (low: impl Into<Operand<'a>>, high: impl Into<Operand<'b>>) -> Tensor: clamp;
        [] (to: Dtype) -> Tensor: cast;
        [] (dims: &[usize], keep: bool) -> Tensor: sum mean prod max min argmax argmin any all logsumexp;
        [] (dims: &[usize]) -> Tensor: permute flip;
        [] (dim: usize) -> Tensor: cumsum unsqueeze squeeze softmax log_softmax;
        [] (dim: usize, descending: bool) -> (Tensor, Tensor): sort;
        [] (dim: usize, k: usize) -> (Tensor, Tensor): topk;
        [] (a: usize, b: usize) -> Tensor: transpose;
        [] (shape: &(impl Shape + ?Sized)) -> Tensor: reshape broadcast_to;
        [] (dim: usize, start: impl Into<Index>, size: impl Into<Index>) -> Tensor: narrow;
        [] (start: &(impl Shape + ?Sized), size: &(impl Shape + ?Sized), step: &[usize]) -> Tensor: slice;
        [] (dim: usize, place: impl Into<Index>) -> Tensor: at;
        [] (dim: usize, sizes: &(impl Shape + ?Sized)) -> Vec<Tensor>: split;
        [] (part: &Tensor, start: &(impl Shape + ?Sized)) -> Tensor: update_slice;
        [] (before: &(impl Shape + ?Sized), after: &(impl Shape + ?Sized), value: f64) -> Tensor: pad;
        [] (places: &Tensor, dim: usize) -> Tensor: gather take_along;
        [] (places: &Tensor, updates: &Tensor, dim: usize) -> Tensor: scatter scatter_add;
        [] (classes: usize, dtype: Dtype) -> Tensor: one_hot;
        [] (other: &Tensor) -> Tensor: matmul;
        [] (weight: &Tensor, eps: f64) -> Tensor: rms_norm;
        [] (weight: &Tensor, bias: &Tensor, eps: f64) -> Tensor: layer_norm;
        [] (k: &Tensor, v: &Tensor, scale: f64, causal: Option<Index>) -> Tensor: attention;
        [] (weight: &Tensor, stride: usize, padding: usize, dilation: usize, groups: usize) -> Tensor: conv1d;
        [] (weight: &Tensor, stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], groups: usize) -> Tensor:
            conv2d;
    }

    /// [`Tensor::to_vec`] of what the step before returned.
    ///
    /// [`Chain`] has an example.
    #[track_caller]
    fn to_vec<T: Element>(self) -> Result<Vec<T>> {
        self.tensor()?.to_vec()
    }

    /// [`Tensor::item`] of what the step before returned.
    ///
    /// [`Chain`] has an example.
    #[track_caller]
    fn item<T: Element>(self) -> Result<T> {
        self.tensor()?.item()
    }
}

impl Chain for Result<Tensor> {
    fn tensor(self) -> Result<Tensor> {
        self
    }
}
