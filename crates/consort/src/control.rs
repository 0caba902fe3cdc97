//! Control flow that stays in a compiled program: a choice and two loops.

use std::panic::Location;
use std::time::{Duration, Instant};

use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::ops::{self, Op};
use consort_ir::program::Block;
use consort_ir::types::Type;
use consort_types::{Axes, Dtype, Failure};

use crate::error::{Error, Named, Result};
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
///     let large = x.sum_all()?.gt(3.0)?;
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
        return if holds(condition, "cond", site)? { then(args) } else { otherwise(args) };
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
/// let (last, all) = f.call((Tensor::scalar(0.0f32)?, Tensor::from_iter([1.0f32, 2.0, 3.0])?))?;
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

/// How many iterations a [`while_loop`] may have, and how many are expected.
///
/// ```
/// use consort::{Iterations, Tensor, while_loop};
///
/// # fn main() -> consort::Result<()> {
/// let few = Iterations::at_most(100).expect(3);
/// let x = while_loop(few, Tensor::scalar(8i64)?, |x| x.gt(1), |x| x.div(2))?;
/// assert_eq!(x.item::<i64>()?, 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iterations {
    limit: usize,
    expected: usize,
}

impl Iterations {
    /// At most `limit` iterations; the same number is expected.
    ///
    /// [`Iterations`] has an example.
    pub fn at_most(limit: usize) -> Iterations {
        Iterations { limit, expected: limit }
    }

    /// Sets the expected number, from which costs are computed. Results do not depend on it.
    ///
    /// [`Iterations`] has an example.
    #[must_use]
    pub fn expect(self, expected: usize) -> Iterations {
        Iterations { expected, ..self }
    }
}

impl From<usize> for Iterations {
    fn from(limit: usize) -> Iterations {
        Iterations::at_most(limit)
    }
}

/// Runs `body` as long as `condition` of the carry, a 0-d bool tensor, is true; returns the last carry. The condition
/// must be equal on all ranks: compute it from values that are, such as the result of an all_reduce. It is an error if
/// it is still true after the largest number of iterations. In a trace the body becomes part of the program once.
///
/// ```
/// use consort::{Tensor, compile, while_loop};
///
/// # fn main() -> consort::Result<()> {
/// let halve = compile(|x: Tensor| {
///     while_loop(100, x, |x| x.max_all()?.gt(1.0), |x| x * 0.5)
/// });
/// assert_eq!(halve.call(Tensor::from_iter([8.0f32, 3.0])?)?.to_vec::<f32>()?, [1.0, 0.375]);
/// assert_eq!(halve.call(Tensor::from_iter([1.0f32, 0.5])?)?.to_vec::<f32>()?, [1.0, 0.5]);
/// assert_eq!(halve.stats().graphs, 1);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn while_loop<C: Flatten>(
    iterations: impl Into<Iterations>,
    carry: C,
    condition: impl Fn(&C) -> Result<Tensor>,
    body: impl Fn(C) -> Result<C>,
) -> Result<C> {
    let (site, iterations) = (Location::caller(), iterations.into());
    if iterations.expected > iterations.limit {
        let Iterations { limit, expected } = iterations;
        let message = (format!("at most {limit} iterations"), format!("an expected number of {expected}"));
        return Err(Error::new("while_loop", message, site));
    }
    match trace::current() {
        Some(session) => session.while_loop(iterations, carry, condition, body, site),
        None => eager_while(iterations.limit, carry, condition, body, site),
    }
}

/// The iterations of a loop between two looks at the other ranks, and the time, if that is over first.
const LOOK: (usize, Duration) = (64, Duration::from_millis(5));

/// Looks from a loop now and then whether another rank has failed.
struct Watch {
    iterations: usize,
    last: Instant,
}

impl Watch {
    fn new() -> Watch {
        Watch { iterations: 0, last: Instant::now() }
    }

    fn iteration(&mut self, op: &str, site: Site) -> Result<()> {
        self.iterations += 1;
        if self.iterations <= LOOK.0 && self.last.elapsed() < LOOK.1 {
            return Ok(());
        }
        *self = Watch::new();
        consort_comm::look().map_err(|error| Error::comm(op, error, site))
    }
}

/// The value of a condition, outside of a trace.
#[track_caller]
fn holds(condition: &Tensor, op: &str, site: Site) -> Result<bool> {
    check_condition(condition, op, site)?;
    condition.item::<bool>().named(op, site)
}

/// Fails if a condition is no 0-d bool: at its own line, if that is known.
fn check_condition(condition: &Tensor, op: &str, site: Site) -> Result<()> {
    if condition.dtype() == Dtype::Bool && condition.rank() == 0 {
        return Ok(());
    }
    let got = format!("{}{:?}", condition.dtype(), condition.hint_shape());
    let failure = Failure::new(("a condition that is a 0-d bool", got));
    let failure = match condition.dtype() {
        Dtype::Bool => {
            failure.note("`sum_all` of its cast to a number, compared with 0, says whether any is true")
        }
        _ => failure.note("compare it with a number: `gt`, `lt`, `eq`"),
    };
    match condition.traced.as_ref().map(|traced| traced.made()) {
        Some(made) if made != site => {
            let (file, line) = (site.file(), site.line());
            Err(Error::of(op, failure.row(format!("of the {op} at {file}:{line}")), made))
        }
        _ => Err(Error::of(op, failure, site)),
    }
}

fn eager_while<C: Flatten>(
    limit: usize,
    mut carry: C,
    condition: impl Fn(&C) -> Result<Tensor>,
    body: impl Fn(C) -> Result<C>,
    site: Site,
) -> Result<C> {
    let (mut done, mut watch, before) = (0, Watch::new(), texts(&carry));
    loop {
        if !holds(&condition(&carry)?, "while_loop", site)? {
            return Ok(carry);
        }
        watch.iteration("while_loop", site)?;
        if done == limit {
            return Err(Error::new("while_loop", ops::Trips::unfinished(limit), site));
        }
        carry = kept("while_loop", &before, body(carry)?, site)?;
        done += 1;
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
    if let Some(x) = xs.flatten().iter().find(|x| x.shape().first() != Some(&length)) {
        let got = format!("{}{:?}", x.dtype(), x.shape());
        return Err(Error::new("scan", (format!("a first dimension of {length}"), got), site));
    }
    let (mut watch, before) = (Watch::new(), texts(&carry));
    for place in 0..length {
        watch.iteration("scan", site)?;
        let cut = cut(&xs, |x| x.at(0, place))?;
        let (next, y) = body(carry, cut)?;
        carry = kept("scan", &before, next, site)?;
        parts.push(y.flatten());
        first.get_or_insert(y);
    }
    let first = first.ok_or_else(|| Error::new("scan", ("at least one iteration", "none"), site))?;
    let mut at = 0;
    let ys = cut(&first, |_| {
        let own: Vec<&Tensor> = parts.iter().filter_map(|part| part.get(at)).collect();
        at += 1;
        Tensor::stack(&own, 0)
    })?;
    Ok((carry, ys))
}

/// The element types and shapes of a value's tensors.
fn texts(value: &impl Flatten) -> Vec<String> {
    value.flatten().iter().map(|x| format!("{}{:?}", x.dtype(), x.shape())).collect()
}

/// What is carried on, if it has the types that it had before.
fn kept<C: Flatten>(op: &'static str, before: &[String], carry: C, site: Site) -> Result<C> {
    let after = texts(&carry);
    match before.iter().zip(&after).find(|(before, after)| before != after) {
        Some((before, after)) => Err(Error::new(op, (format!("a carry of {before}"), after.clone()), site)),
        None if before.len() != after.len() => Err(Error::new(op, KEEPS, site)),
        None => Ok(carry),
    }
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
        check_condition(condition, "cond", site)?;
        let condition = self.operands(std::slice::from_ref(condition), "cond", site)?;
        let tensors = args.flatten();
        let mut operands = self.operands(&tensors, "cond", site)?;
        let types = self.types(&operands)?;
        let run = |f: Box<dyn FnOnce(A) -> Result<R> + '_>, captured: &[Value]| {
            let params = self.begin("cond", types.clone(), captured)?;
            let open = self.open_block();
            let outcome = f(args.unflatten(params)?).and_then(|result| {
                let results = self.operands(&result.flatten(), "cond", site)?;
                Ok((result, results))
            });
            drop(open);
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
                    let message = ("tensors with a first dimension", "a 0-d one");
                    return Err(Error::new("scan", message, site));
                }
                tensor.shape.remove(0);
            }
        }
        let differs = self.varies(length)?;
        let ((next, ys), block) = self.body(
            &mut types,
            carries.len(),
            &mut operands,
            ("scan", site),
            |_| differs,
            |params| {
                let (own, parts) = params.split_at(carries.len());
                let (next, ys) = body(carry.unflatten(own.to_vec())?, xs.unflatten(parts.to_vec())?)?;
                if !same_settings(&carry, &next) {
                    return Err(Error::new("scan", KEEPS, site));
                }
                let tensors = [next.flatten(), ys.flatten()].concat();
                Ok(((next, ys), tensors))
            },
        )?;
        let op = ops::Scan {
            length: length.clone(),
            carries: carries.len(),
            slices: slices.len(),
            reverse: ops::Flag(false),
        };
        let values = self.control_node(Op::new(op), &operands, vec![block], "scan", site)?;
        let (own, stacked) = values.split_at(carries.len());
        Ok((next.unflatten(own.to_vec())?, ys.unflatten(stacked.to_vec())?))
    }

    fn while_loop<C: Flatten>(
        self: &std::rc::Rc<Self>,
        iterations: Iterations,
        carry: C,
        condition: impl Fn(&C) -> Result<Tensor>,
        body: impl Fn(C) -> Result<C>,
        site: Site,
    ) -> Result<C> {
        let condition = |carry: &C| -> Result<Tensor> {
            let holds = condition(carry)?;
            check_condition(&holds, "while_loop", site)?;
            Ok(holds)
        };
        let first = condition(&carry)?;
        let carries = [vec![first], carry.flatten()].concat();
        let mut operands = self.operands(&carries, "while_loop", site)?;
        let mut types = self.types(&operands)?;
        let (next, block) = self.body(
            &mut types,
            carries.len(),
            &mut operands,
            ("while_loop", site),
            Type::varies,
            |params| {
                let next = body(carry.unflatten(params[1..].to_vec())?)?;
                if !same_settings(&carry, &next) {
                    return Err(Error::new("while_loop", KEEPS, site));
                }
                let tensors = [vec![condition(&next)?], next.flatten()].concat();
                Ok((next, tensors))
            },
        )?;
        let Iterations { limit, expected } = iterations;
        let op = ops::While { limit, expected, carries: carries.len() };
        let values = self.control_node(Op::new(op), &operands, vec![block], "while_loop", site)?;
        next.unflatten(values[1..].to_vec())
    }

    /// Traces the body of a loop as a block of parameters of these types; `run` returns what the body made, and its
    /// tensors. Adds what it captured to the operands. A carry may differ over more axes after an iteration than before
    /// the first, and wherever the number of iterations does, which `differs` tells of the first carry: then the body
    /// is traced again with these axes. There are few axes, so this terminates soon.
    fn body<T>(
        self: &std::rc::Rc<Self>,
        types: &mut [Type],
        carries: usize,
        operands: &mut Vec<Value>,
        (op, site): (&'static str, Site),
        differs: impl Fn(&Type) -> Axes,
        run: impl Fn(&[Tensor]) -> Result<(T, Vec<Tensor>)>,
    ) -> Result<(T, Block)> {
        loop {
            let before = self.snapshot();
            let params = self.begin(op, types.to_vec(), &[])?;
            let open = self.open_block();
            let outcome =
                run(&params).and_then(|(made, tensors)| Ok((made, self.operands(&tensors, op, site)?)));
            drop(open);
            let (made, results) = self.ended(outcome)?;
            let mut wider = false;
            let after = self.types(&results)?;
            let trips = after.first().map_or(Axes::NONE, &differs);
            for (ty, after) in types[..carries].iter_mut().zip(&after) {
                if let (Type::Tensor(ty), Type::Tensor(after)) = (ty, after) {
                    let all = ty.varies.union(after.varies).union(trips);
                    wider |= all != ty.varies;
                    ty.varies = all;
                }
            }
            let (block, captured) = self.end(&results);
            if wider {
                self.restore(before);
                continue;
            }
            operands.extend(captured);
            return Ok((made, block?));
        }
    }
}

const KEEPS: &str = "expected what is carried to keep its numbers and lists besides tensors";

/// Whether two values have equal numbers, strings and lengths; tensors are ignored.
fn same_settings<T: Flatten>(a: &T, b: &T) -> bool {
    use crate::compile::Leaf;
    let settings = |value: &T| {
        let leaves = crate::compile::leaves_of(value, Axes::NONE).into_iter();
        leaves.filter(|leaf| !matches!(leaf, Leaf::Tensor(..))).collect::<Vec<_>>()
    };
    settings(a) == settings(b)
}
