//! Gradients of functions over tensors.

use std::panic::Location;
use std::rc::Rc;

use consort_ir::program::{Block, Program};
use consort_passes::gradient;
use consort_types::Failure;

use crate::compile::{Compiled, compile};
use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::trace::{self, Session};

type Site = &'static Location<'static>;

/// The gradient of a function by all tensors of its argument: a compiled function that returns a value like the
/// argument, with the derivative of the loss in place of each tensor.
///
/// The first tensor that the function returns is the loss: a 0-d float that is equal on all ranks. Tensors that are
/// captured are constants. In a compiled function the gradient becomes part of its program.
///
/// ```
/// use consort::{Tensor, grad};
///
/// # fn main() -> consort::Result<()> {
/// let cube = grad(|x: Tensor| x.mul(&x)?.mul(&x)?.sum_all());
/// assert_eq!(cube.call(Tensor::from_iter([1.0f64, 2.0])?)?.to_vec::<f64>()?, [3.0, 12.0]);
/// # Ok(()) }
/// ```
///
/// Where values that are equal on ranks meet values that differ, the gradient is summed over these ranks: so averaging
/// the loss over the ranks is all that data parallel training needs.
///
/// ```
/// use consort::{Reduce, Tensor, grad};
///
/// let gradients = consort::spawn(2, |mesh| {
///     let group = mesh.clone();
///     let x = Tensor::from_iter([1.0f64, 2.0])?.add(mesh.rank().to_usize()? as f64)?; // Each rank has its own data.
///     let slope = grad(move |w: Tensor| {
///         let loss = w.mul(&x)?.sum_all()?;
///         group.all_reduce(loss, Reduce::Avg)
///     });
///     let w = Tensor::from_iter([0.5f64, 0.5])?.equal_over(&["world"])?;
///     slope.call(w)?.to_vec::<f64>()
/// });
/// assert!(gradients.into_iter().all(|slope| slope.is_ok_and(|slope| slope == [1.5, 2.5])));
/// ```
#[track_caller]
pub fn grad<A: Flatten + 'static, R: Flatten + 'static>(
    f: impl Fn(A) -> Result<R> + 'static,
) -> Compiled<A, A> {
    let site = Location::caller();
    compile(move |args| Ok(differentiate(&f, args, ("grad", site))?.1))
}

/// What a function returns, and its gradient as by [`grad`]. Its other results are returned unchanged.
///
/// ```
/// use consort::{Flatten, Tensor, value_and_grad};
///
/// #[derive(Flatten)]
/// struct Line {
///     slope: Tensor,
///     start: Tensor,
/// }
///
/// # fn main() -> consort::Result<()> {
/// let fit = value_and_grad(|line: Line| {
///     let x = Tensor::from_iter([0.0f64, 1.0, 2.0])?;
///     let y = x.mul(&line.slope.broadcast_to(&[3])?)?.add(&line.start.broadcast_to(&[3])?)?;
///     Ok((y.mul(&y)?.sum_all()?, y))
/// });
/// let line = Line { slope: Tensor::scalar(2.0f64)?, start: Tensor::scalar(1.0f64)? };
/// let ((loss, y), gradient) = fit.call(line)?;
/// assert_eq!((loss.item::<f64>()?, y.to_vec::<f64>()?), (35.0, vec![1.0, 3.0, 5.0]));
/// assert_eq!((gradient.slope.item::<f64>()?, gradient.start.item::<f64>()?), (26.0, 18.0));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn value_and_grad<A: Flatten + 'static, R: Flatten + 'static>(
    f: impl Fn(A) -> Result<R> + 'static,
) -> Compiled<A, (R, A)> {
    let site = Location::caller();
    compile(move |args| differentiate(&f, args, ("value_and_grad", site)))
}

fn differentiate<A: Flatten, R: Flatten>(
    f: &impl Fn(A) -> Result<R>,
    args: A,
    (name, site): (&str, Site),
) -> Result<(R, A)> {
    let Some(session) = trace::current() else {
        let failure = Failure::new("a gradient needs a compiled function, and this one runs uncompiled");
        return Err(Error::of(name, failure, site));
    };
    session.differentiate(f, args, (name, site))
}

impl Session {
    /// Traces a function as a block of its own, and records its gradient in place of it.
    fn differentiate<A: Flatten, R: Flatten>(
        self: &Rc<Self>,
        f: &impl Fn(A) -> Result<R>,
        args: A,
        (name, site): (&str, Site),
    ) -> Result<(R, A)> {
        let tensors = args.flatten();
        let operands = self.operands(&tensors, name, site)?;
        let params = self.begin(self.types(&operands)?, &[])?;
        let open = self.open_block();
        let outcome = f(args.unflatten(params)?).and_then(|made| {
            let results = self.operands(&made.flatten(), name, site)?;
            Ok((made, results))
        });
        drop(open);
        let (made, results) = self.ended(outcome)?;
        let (block, captured) = self.end(&results);
        let func = self.func_of(block?)?;
        let mut program = Program { mesh: self.world.mesh().clone(), funcs: vec![func] };
        let func_name = program.funcs[0].name.clone();
        let wrt: Vec<usize> = (0..tensors.len()).collect();
        let failed = |mut failure: Box<Failure>| {
            failure.op = failure.op.strip_prefix("grad: ").unwrap_or(&failure.op).to_string().into();
            Error::of(name, failure, site)
        };
        program = gradient(&program, &func_name, &wrt).map_err(failed)?;
        let func = &program.funcs[0];
        self.check_starts(&func.body, site)?;
        let all = [operands, captured].concat();
        let values = self.splice(func, &all, (name, site))?;
        let (values, cotangents) = values.split_at(results.len());
        Ok((made.unflatten(values.to_vec())?, args.unflatten(cotangents.to_vec())?))
    }

    /// Fails if a gradient communicates where its function may not.
    fn check_starts(&self, block: &Block, site: Site) -> Result<()> {
        for node in &block.nodes {
            self.check_reach(&*node.op, site)?;
            node.blocks.iter().try_for_each(|inside| self.check_starts(inside, site))?;
        }
        Ok(())
    }
}
