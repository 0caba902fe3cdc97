//! Control flow that stays in a compiled program: a choice and a loop.

use std::panic::Location;

use consort_ir::index::Index;
use consort_ir::ops::{self, Op};
use consort_ir::types::Type;

use crate::error::{Error, Result};
use crate::flatten::{Flatten, MapTensors};
use crate::tensor::Tensor;
use crate::trace::{self, Session};

/// Runs one of two functions: the first if the condition, a 0-d bool tensor, is true. Both must return results of
/// the same shapes. In a trace both become part of the program.
///
/// ```
/// use consort::{Tensor, compile, cond};
///
/// # fn main() -> consort::Result<()> {
/// let f = compile(|x: Tensor| {
///     let large = x.sum_all()?.gt(&Tensor::full(x.dtype(), &[0usize; 0], 3.0)?)?;
///     cond(&large, x, |x| x.neg(), |x| x.exp())
/// });
/// assert_eq!(f.call(Tensor::from_iter([1.0f32, 4.0])?)?.to_vec::<f32>()?, [-1.0, -4.0]);
/// assert_eq!(f.call(Tensor::from_iter([0.0f32, 0.0])?)?.to_vec::<f32>()?, [1.0, 1.0]);
/// assert_eq!(f.stats().graphs, 1);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn cond<A: Flatten, R: Flatten>(
    condition: &Tensor,
    args: A,
    then: impl FnOnce(A) -> Result<R>,
    otherwise: impl FnOnce(A) -> Result<R>,
) -> Result<R> {
    let site = Location::caller();
    let Some(session) = trace::current() else {
        return if condition.item::<bool>()? { then(args) } else { otherwise(args) };
    };
    session.cond(condition, args, then, otherwise, site)
}

/// Runs `body` `length` times. Each iteration takes the carry of the previous one and a slice of `xs` along the first
/// dimension; it returns the next carry and an output. The outputs are stacked along a new first dimension. In a trace
/// the body becomes part of the program once.
///
/// ```
/// use consort::{Tensor, compile, scan};
///
/// # fn main() -> consort::Result<()> {
/// let f = compile(|(x, xs): (Tensor, Tensor)| {
///     scan(xs.dim(0)?, x, xs, |sum: Tensor, x: Tensor| {
///         let sum = sum.add(&x)?;
///         Ok((sum.clone(), sum))
///     })
/// });
/// let (last, all) = f.call((Tensor::from_slice(&[0.0f32], &[])?, Tensor::from_iter([1.0f32, 2.0, 3.0])?))?;
/// assert_eq!((last.item::<f32>()?, all.to_vec::<f32>()?), (6.0, vec![1.0, 3.0, 6.0]));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn scan<C: Flatten, X: Flatten, Y: Flatten>(
    length: impl Into<crate::Index>,
    carry: C,
    xs: X,
    body: impl Fn(C, X) -> Result<(C, Y)>,
) -> Result<(C, Y)> {
    let site = Location::caller();
    let length = length.into();
    match trace::current() {
        Some(session) => session.scan(&length.0, carry, xs, body, site),
        None => eager_scan(length.to_usize()?, carry, xs, body, site),
    }
}

fn eager_scan<C: Flatten, X: Flatten, Y: Flatten>(
    length: usize,
    mut carry: C,
    xs: X,
    body: impl Fn(C, X) -> Result<(C, Y)>,
    site: &'static Location<'static>,
) -> Result<(C, Y)> {
    let (mut parts, mut first): (Vec<Vec<Tensor>>, Option<Y>) = (Vec::new(), None);
    for place in 0..length {
        let cut = cut(&xs, |x| x.at(0, place))?;
        let (next, y) = body(carry, cut)?;
        carry = next;
        parts.push(y.flatten());
        first.get_or_insert(y);
    }
    let first = first.ok_or_else(|| Error::new("scan", "expected at least one iteration, got none", site))?;
    let mut at = 0;
    let ys = cut(&first, |_| {
        let own: Vec<&Tensor> = parts.iter().filter_map(|part| part.get(at)).collect();
        at += 1;
        Tensor::stack(&own, 0)
    })?;
    Ok((carry, ys))
}

/// Maps each tensor of a value with a function that can fail.
fn cut<T: Flatten>(value: &T, mut f: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<T> {
    let mut failed = None;
    let made = value.map(&mut MapTensors(|tensor: &Tensor| {
        f(tensor).unwrap_or_else(|error| {
            failed.get_or_insert(error);
            tensor.clone()
        })
    }));
    failed.map_or(Ok(made), Err)
}

type Site = &'static Location<'static>;

impl Session {
    fn cond<A: Flatten, R: Flatten>(
        self: &std::rc::Rc<Self>,
        condition: &Tensor,
        args: A,
        then: impl FnOnce(A) -> Result<R>,
        otherwise: impl FnOnce(A) -> Result<R>,
        site: Site,
    ) -> Result<R> {
        let condition = self.operands(std::slice::from_ref(condition), "cond", site)?;
        let tensors = args.flatten();
        let mut operands = self.operands(&tensors, "cond", site)?;
        let types = self.types(&operands)?;
        let run = |f: Box<dyn FnOnce(A) -> Result<R> + '_>, captured: &[consort_ir::entity::Value]| {
            let params = self.begin(types.clone(), captured)?;
            let outcome = f(args.unflatten(params)?).and_then(|result| {
                let results = self.operands(&result.flatten(), "cond", site)?;
                Ok((result, results))
            });
            let (result, results) = self.ended(outcome)?;
            let (block, captured) = self.end(&results);
            Ok::<_, Error>((result, block?, captured))
        };
        let (result, mut first, captured) = run(Box::new(then), &[])?;
        let (other, second, all) = run(Box::new(otherwise), &captured)?;
        if !same_settings(&result, &other) {
            let message = "expected both functions to give the same numbers and lists besides tensors";
            return Err(Error::new("cond", message, site));
        }
        for value in &all[captured.len()..] {
            let ty = self.types(std::slice::from_ref(value))?;
            self.add_param(&mut first, ty)?;
        }
        operands.extend(all);
        let args = [condition, operands].concat();
        let values = self.control_node(Op::new(ops::Cond {}), &args, vec![first, second], "cond", site)?;
        result.unflatten(values)
    }

    fn scan<C: Flatten, X: Flatten, Y: Flatten>(
        self: &std::rc::Rc<Self>,
        length: &Index,
        carry: C,
        xs: X,
        body: impl Fn(C, X) -> Result<(C, Y)>,
        site: Site,
    ) -> Result<(C, Y)> {
        let (carries, slices) = (carry.flatten(), xs.flatten());
        let mut operands = self.operands(&[carries.clone(), slices.clone()].concat(), "scan", site)?;
        let mut types = self.types(&operands)?;
        for ty in &mut types[carries.len()..] {
            if let Type::Tensor(tensor) = ty {
                if tensor.shape.is_empty() {
                    return Err(Error::new(
                        "scan",
                        "expected tensors with a first dimension, got a 0-d one",
                        site,
                    ));
                }
                tensor.shape.remove(0);
            }
        }
        // The carry may vary over more axes after an iteration than before the first: then the body is traced again
        // with these axes. There are few axes, so this terminates soon.
        loop {
            let before = self.snapshot();
            let params = self.begin(types.clone(), &[])?;
            let (own, parts) = params.split_at(carries.len());
            let outcome = (|| {
                let (next, ys) = body(carry.unflatten(own.to_vec())?, xs.unflatten(parts.to_vec())?)?;
                let results = self.operands(&[next.flatten(), ys.flatten()].concat(), "scan", site)?;
                Ok((next, ys, results))
            })();
            let (next, ys, results) = self.ended(outcome)?;
            if !same_settings(&carry, &next) {
                let message = "expected what is carried to keep its numbers and lists besides tensors";
                return Err(Error::new("scan", message, site));
            }
            let mut wider = false;
            let given = self.types(&results)?;
            for (ty, after) in types[..carries.len()].iter_mut().zip(&given) {
                if let (Type::Tensor(ty), Type::Tensor(after)) = (ty, after) {
                    wider |= !after.varies.is_subset(ty.varies);
                    ty.varies = ty.varies.union(after.varies);
                }
            }
            let (block, captured) = self.end(&results);
            if wider {
                self.restore(before);
                continue;
            }
            operands.extend(captured);
            let op = ops::Scan { length: length.clone(), carries: carries.len(), slices: slices.len() };
            let values = self.control_node(Op::new(op), &operands, vec![block?], "scan", site)?;
            let (own, stacked) = values.split_at(carries.len());
            return Ok((next.unflatten(own.to_vec())?, ys.unflatten(stacked.to_vec())?));
        }
    }
}

/// Whether two values have equal numbers, strings and lengths; tensors are ignored.
fn same_settings<T: Flatten>(a: &T, b: &T) -> bool {
    use crate::compile::Leaf;
    let settings = |value: &T| {
        let leaves = crate::compile::leaves_of(value).into_iter();
        leaves.filter(|leaf| !matches!(leaf, Leaf::Tensor(_))).collect::<Vec<_>>()
    };
    settings(a) == settings(b)
}
