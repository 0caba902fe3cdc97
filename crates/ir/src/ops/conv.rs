//! Convolutions over one and two dimensions, as networks and stencils use them: the kernel is not flipped.

use crate::index::{Guard, Index};
use crate::literal::{Data, Literal, ravel, unravel};
use crate::op;
use crate::ops::elementwise::times;
use crate::ops::{
    Cost, CostCx, Cotangents, EvalCx, EvalError, Flip, InferCx, Op, OpDef, Pad, Slice, Term, VjpCx,
    check_numel,
};
use crate::tolerance::Tolerance;
use crate::types::{TensorType, Type};
use consort_types::Failure;

/// Stride, padding and dilation of the kernel, with an entry for each dimension.
struct Moves<'a> {
    stride: &'a [usize],
    padding: &'a [usize],
    dilation: &'a [usize],
    groups: usize,
}

fn infer(moves: &Moves<'_>, cx: &mut InferCx<'_>, dims: usize) -> Result<Vec<Type>, Box<Failure>> {
    let (x, weight) = (cx.tensor(0)?, cx.tensor(1)?);
    if !x.dtype.is_float() || weight.dtype != x.dtype {
        let message = ("operands of one float type", format!("{} and {}", x.dtype, weight.dtype));
        return Err(Failure::rule("C1", message));
    }
    if [x.rank(), weight.rank()] != [dims + 2; 2] {
        let (x, weight) = (cx.shape_text(&x.shape), cx.shape_text(&weight.shape));
        let message = (format!("{} dimensions each", dims + 2), format!("{x} and {weight}"));
        return Err(Failure::rule("C2", message));
    }
    let lengths = [moves.stride.len(), moves.padding.len(), moves.dilation.len()];
    if lengths != [dims; 3] {
        let message = (format!("{dims} entries in stride, padding and dilation"), format!("{lengths:?}"));
        return Err(Failure::rule("C3", message));
    }
    if moves.stride.iter().chain(moves.dilation).chain([&moves.groups]).any(|n| *n == 0) {
        return Err(Failure::rule("C3", ("stride, dilation and groups of at least 1", "0")));
    }
    let groups = Index::from(moves.groups);
    cx.require_eq("C4", &x.shape[1], &(&groups * &weight.shape[1]), |cx| {
        let (own, channels) = (weight.shape[1].display(cx.mesh), x.shape[1].display(cx.mesh));
        (format!("{} groups of {own} channels in x", moves.groups), channels.to_string())
    })?;
    cx.require_eq("C4", &Index::constant(0), &weight.shape[0].rem(&groups), |cx| {
        let channels = weight.shape[0].display(cx.mesh);
        (format!("a multiple of {} channels of the result", moves.groups), channels.to_string())
    })?;
    let one = Index::constant(1);
    let mut shape = vec![x.shape[0].clone(), weight.shape[0].clone()];
    for i in 0..dims {
        let (size, kernel) = (&x.shape[i + 2], &weight.shape[i + 2]);
        cx.require("C5", Guard::Le(one.clone(), kernel.clone()), |cx| {
            ("a kernel of at least 1", kernel.display(cx.mesh).to_string())
        })?;
        let padded = size + &(&Index::constant(2) * &Index::from(moves.padding[i]));
        let reach = &(&Index::from(moves.dilation[i]) * &(kernel - &one)) + &one;
        cx.require("C5", Guard::Le(reach.clone(), padded.clone()), |cx| {
            let (reach, padded) = (reach.display(cx.mesh), padded.display(cx.mesh));
            (format!("a kernel that reaches over at most {padded} places"), reach.to_string())
        })?;
        shape.push(&(&padded - &reach).div(&Index::from(moves.stride[i])) + &one);
    }
    Ok(vec![x.with_shape(shape).into()])
}

fn cost(cx: &CostCx<'_>) -> Cost {
    let per_element = match cx.args.get(1) {
        Some(Type::Tensor(TensorType { shape, .. })) => Index::product(shape.iter().skip(1)),
        _ => Index::constant(0),
    };
    cx.kernel(times(2, &(&per_element * &cx.result_numel())))
}

fn eval(moves: &Moves<'_>, x: &Literal, weight: &Literal) -> Result<Vec<Literal>, EvalError> {
    let (Data::Float(xs), Data::Float(weights)) = (&x.data, &weight.data) else {
        return Err(EvalError::new("not float tensors"));
    };
    let mut shape = vec![x.shape[0], weight.shape[0]];
    for (i, (size, kernel)) in x.shape.iter().zip(&weight.shape).skip(2).enumerate() {
        // In 128 bits, because paddings and dilations may be arbitrarily large.
        let padded = *size as i128 + 2 * moves.padding[i] as i128;
        let room = padded - moves.dilation[i] as i128 * (*kernel as i128 - 1) - 1;
        let places = if room < 0 { -1 } else { room / moves.stride[i] as i128 + 1 };
        shape.push(usize::try_from(places).map_err(|_| {
            EvalError::new((format!("a kernel that fits in {padded} places"), format!("{kernel} of them")))
        })?);
    }
    check_numel(&shape)?;
    let (window, own) = (&weight.shape[1..], weight.shape[1]);
    if own.checked_mul(moves.groups) != Some(x.shape[1]) || !weight.shape[0].is_multiple_of(moves.groups) {
        let (x, weight) = (&x.shape, &weight.shape);
        return Err(EvalError::new((
            format!("{} groups of channels", moves.groups),
            format!("{x:?} and {weight:?}"),
        )));
    }
    let per_group = weight.shape[0] / moves.groups;
    let per_channel: usize = window.iter().product();
    let element = |i: usize| {
        let at = unravel(i, &shape);
        let (batch, channel) = (at[0], at[1]);
        let mut sum = 0.0;
        'window: for j in 0..per_channel {
            let k = unravel(j, window);
            let mut from = vec![batch, channel / per_group * own + k[0]];
            for (d, size) in x.shape[2..].iter().enumerate() {
                let place = at[d + 2] as i128 * moves.stride[d] as i128
                    + k[d + 1] as i128 * moves.dilation[d] as i128
                    - moves.padding[d] as i128;
                match usize::try_from(place) {
                    Ok(place) if place < *size => from.push(place),
                    // Nothing is added for positions outside x, so that an infinite weight gives no NaN there.
                    _ => continue 'window,
                }
            }
            sum += xs[ravel(&from, &x.shape)] * weights[channel * per_channel + j];
        }
        sum
    };
    let n: usize = shape.iter().product();
    Ok(vec![Literal::floats(x.dtype, shape.clone(), (0..n).map(element).collect())])
}

/// Convolutions again: the cotangent of x is one of the cotangent, with zeros between and around its places, and the
/// kernel flipped; that of the kernel is one of x and the cotangent, with stride and dilation exchanged.
fn vjp<'c, 'm>(moves: &Moves<'_>, cx: &'c VjpCx<'m>, conv: &dyn Fn(&Moves<'_>) -> Op) -> Cotangents<'c, 'm> {
    cx.each(|i| Some(if i == 0 { of_x(moves, cx, conv) } else { of_weight(moves, cx, conv) }))
}

fn of_x<'c, 'm>(moves: &Moves<'_>, cx: &'c VjpCx<'m>, conv: &dyn Fn(&Moves<'_>) -> Op) -> Term<'c, 'm> {
    let (x, weight, dims) = (cx.arg_ty(0).shape, cx.arg_ty(1).shape, moves.stride.len());
    let (one, groups) = (Index::constant(1), Index::from(moves.groups));
    let zero = || vec![Index::constant(0); 2];
    let (mut low, mut high, mut inside) = (zero(), zero(), zero());
    let mut g = cx.cotangent(0);
    for dim in 0..dims {
        g = g.dilate(dim + 2, moves.stride[dim]);
        let reach = &Index::from(moves.dilation[dim]) * &(&weight[dim + 2] - &one);
        let padded = &x[dim + 2] + &Index::from(2 * moves.padding[dim]);
        // Result and padded x have as many places: what is beyond the last position of the kernel gets zeros.
        high.push(&padded - g.ty().shape.get(dim + 2).unwrap_or(&one));
        low.push(reach);
        inside.push(Index::from(moves.padding[dim]));
    }
    g = g.then(Pad { low, high, value: 0.0 });
    // [groups x out, in, k..] to [groups x in, out, k..].
    let out = weight[0].div(&groups);
    let split = [&[groups.clone(), out.clone()], &weight[1..]].concat();
    let swapped: Vec<usize> = [0, 2, 1].into_iter().chain(3..dims + 3).collect();
    let kernel = cx.arg(1).reshape(&split).permute(&swapped);
    let kernel = kernel.reshape(&[&[&groups * &weight[1], out], &weight[2..]].concat());
    let kernel = kernel.then(Flip { dims: (2..dims + 2).collect() });
    let (ones, none) = (vec![1; dims], vec![0; dims]);
    let moves = Moves { stride: &ones, padding: &none, dilation: moves.dilation, groups: moves.groups };
    let padded = cx.node(conv(&moves), &[g, kernel]);
    padded.then(Slice { start: inside, size: x.clone(), step: vec![1; x.len()] })
}

fn of_weight<'c, 'm>(moves: &Moves<'_>, cx: &'c VjpCx<'m>, conv: &dyn Fn(&Moves<'_>) -> Op) -> Term<'c, 'm> {
    let (x, weight, dims) = (cx.arg_ty(0).shape, cx.arg_ty(1).shape, moves.stride.len());
    let groups = Index::from(moves.groups);
    // x as [in, groups x batch, ..] and the cotangent as a kernel [groups x out, batch, ..].
    let split = [&[x[0].clone(), groups.clone(), weight[1].clone()], &x[2..]].concat();
    let swapped: Vec<usize> = [2, 1, 0].into_iter().chain(3..dims + 3).collect();
    let channels = [&[weight[1].clone(), &groups * &x[0]], &x[2..]].concat();
    let rows = cx.arg(0).reshape(&split).permute(&swapped).reshape(&channels);
    let swapped: Vec<usize> = [1, 0].into_iter().chain(2..dims + 2).collect();
    let kernel = cx.cotangent(0).permute(&swapped);
    let moves = Moves { stride: moves.dilation, dilation: moves.stride, ..*moves };
    let mut product = cx.node(conv(&moves), &[rows, kernel]);
    for (dim, size) in weight.iter().enumerate().skip(2) {
        // Strides leave out places of x that no position of the kernel reaches.
        product = product.narrow(dim, &Index::constant(0), size);
    }
    product.permute(&swapped)
}

op! {
    /// The sum of the products of a kernel and x at each position of the kernel. x is `[batch, in, length]`,
    /// the weight `[out, in / groups, k]`, and the result `[batch, out, places]` with
    /// (length + 2 padding - dilation (k - 1) - 1) / stride + 1 places. Channels are divided into `groups` equal
    /// groups; a group of the result depends on the same group of x. Padding adds nothing to a sum; sums are
    /// rounded once.
    ///
    /// (C1) Both operands have one element type, a float type.
    ///
    /// (C2) Both operands have three dimensions.
    ///
    /// (C3) Stride, dilation and groups are at least 1.
    ///
    /// (C4) x has `groups` times the channels of the weight, and the result's are a multiple of `groups`.
    ///
    /// (C5) The kernel has an element, and fits in x with its padding.
    pub struct Conv1d("conv1d")(x, weight) {
        /// The step between positions of the kernel.
        stride: usize,
        /// Padding before and after x.
        padding: usize,
        /// The distance between elements of the kernel.
        dilation: usize,
        /// The number of groups of channels.
        groups: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[1,1,4], v1: f32[1,1,3]) -> f32[1,1,4] {\n    v2 = conv1d[stride=1, padding=1, dilation=1, groups=1] v0, v1 : f32[1,1,4]\n    return v2\n}\n; run: @f([[[1, 2, 3, 4]]], [[[1, 10, 100]]]) == [[[210, 321, 432, 43]]]\n"
}

impl Conv1d {
    fn moves(&self) -> Moves<'_> {
        let one = std::slice::from_ref;
        Moves {
            stride: one(&self.stride),
            padding: one(&self.padding),
            dilation: one(&self.dilation),
            groups: self.groups,
        }
    }
}

impl OpDef for Conv1d {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        infer(&self.moves(), cx, 1)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cost(cx)
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::PRODUCT
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        eval(&self.moves(), args[0], args[1])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let conv = |m: &Moves<'_>| {
            let (stride, padding, dilation) = (m.stride[0], m.padding[0], m.dilation[0]);
            Op::new(Conv1d { stride, padding, dilation, groups: m.groups })
        };
        vjp(&self.moves(), cx, &conv)
    }
}

op! {
    /// `conv1d` in two dimensions: x is `[batch, in, height, width]`, the weight `[out, in / groups, kh, kw]`,
    /// and the result `[batch, out, places, places]`, counted for height and width as `conv1d` counts them.
    ///
    /// (C1) Both operands have one element type, a float type.
    ///
    /// (C2) Both operands have four dimensions.
    ///
    /// (C3) Stride, padding and dilation have two entries, and stride, dilation and groups are at least 1.
    ///
    /// (C4) x has `groups` times the channels of the weight, and the result's are a multiple of `groups`.
    ///
    /// (C5) The kernel has an element, and fits in x with its padding.
    pub struct Conv2d("conv2d")(x, weight) {
        /// The step between positions of the kernel, down and across.
        stride: Vec<usize>,
        /// Padding before and after x, in height and width.
        padding: Vec<usize>,
        /// The distance between elements of the kernel, down and across.
        dilation: Vec<usize>,
        /// The number of groups of channels.
        groups: usize
    }
    example "mesh ()\n\nfunc @f(v0: f32[1,1,2,3], v1: f32[1,1,2,2]) -> f32[1,1,1,2] {\n    v2 = conv2d[stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1] v0, v1 : f32[1,1,1,2]\n    return v2\n}\n; run: @f([[[[1, 2, 3], [4, 5, 6]]]], [[[[1, 10], [100, 1000]]]]) == [[[[5421, 6532]]]]\n"
}

impl Conv2d {
    fn moves(&self) -> Moves<'_> {
        Moves { stride: &self.stride, padding: &self.padding, dilation: &self.dilation, groups: self.groups }
    }
}

impl OpDef for Conv2d {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        infer(&self.moves(), cx, 2)
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cost(cx)
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::PRODUCT
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        eval(&self.moves(), args[0], args[1])
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let conv = |m: &Moves<'_>| {
            let [stride, padding, dilation] = [m.stride, m.padding, m.dilation].map(<[usize]>::to_vec);
            Op::new(Conv2d { stride, padding, dilation, groups: m.groups })
        };
        vjp(&self.moves(), cx, &conv)
    }
}
