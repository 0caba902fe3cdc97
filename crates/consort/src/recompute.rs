//! Functions whose intermediate values a gradient computes again instead of keeping them.

use std::panic::Location;
use std::rc::Rc;

use consort_ir::entity::Value;
use consort_ir::ops::{self, OpDef};

use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::trace::{self, Session};

type Site = &'static Location<'static>;

/// The function, of which a gradient keeps the arguments alone: what it computes, communication included, is computed again
/// for the backward. Without a gradient it is the function itself.
///
/// Nothing else repeats communication. Messages between ranks are not repeated here either: what they bring is kept.
///
/// ```
/// use consort::{Tensor, grad, recompute};
///
/// # fn main() -> consort::Result<()> {
/// let layer = recompute(|x: Tensor| x.exp()?.sin()?.exp());
/// let plain = grad(|x: Tensor| x.exp()?.sin()?.exp()?.sum_all());
/// let again = grad(move |x: Tensor| layer(x)?.sum_all());
/// let x = Tensor::from_iter([0.5f64, 1.0])?;
/// assert_eq!(again.call(x.clone())?.to_vec::<f64>()?, plain.call(x)?.to_vec::<f64>()?);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn recompute<A: Flatten, R: Flatten>(f: impl Fn(A) -> Result<R>) -> impl Fn(A) -> Result<R> {
    let site = Location::caller();
    move |args| match trace::current().filter(|session| session.takes_gradient()) {
        Some(session) => session.recompute(&f, args, site),
        None => f(args),
    }
}

impl Session {
    fn recompute<A: Flatten, R: Flatten>(
        self: &Rc<Self>,
        f: &impl Fn(A) -> Result<R>,
        args: A,
        site: Site,
    ) -> Result<R> {
        let at @ (name, _) = ("recompute", site);
        let operands = self.operands(&args.flatten(), name, site)?;
        let own = self.own_function(self.types(&operands)?, at, |params| f(args.unflatten(params)?))?;
        let marked = |op: &dyn OpDef, values: &[Value]| {
            let marked =
                values.iter().map(|value| self.mark(op, &[*value], at)).collect::<Result<Vec<_>>>()?;
            Ok::<_, Error>(marked.concat())
        };
        let begun = marked(&ops::Recompute {}, &[operands, own.captured].concat())?;
        let results = self.operands(&self.splice(&own.func, &begun, at)?, name, site)?;
        own.made.unflatten(self.tensors(&marked(&ops::Keep {}, &results)?, at)?)
    }
}
