//! Gradients of functions over tensors.

use std::fmt;
use std::panic::Location;
use std::rc::Rc;

use consort_ir::mesh::Mesh;
use consort_ir::program::{Block, Program};
use consort_passes::{Gradient, Wanted, gradient};
use consort_types::{Dtype, Failure};

use crate::compile::{Compiled, compile};
use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::trace::{self, Session};

type Site = &'static Location<'static>;

/// The gradient of a function by all tensors of its argument: a compiled function that returns a value like the
/// argument, with the derivative of the loss in place of each tensor.
///
/// The first tensor that the function returns is the loss: a 0-d float that is equal on all ranks. Tensors that are
/// captured are constants. In a compiled function the gradient becomes part of its program; in one of some ranks
/// ([`over`](Compiled::over), [`role`](Compiled::role), [`local`](Compiled::local)) the loss is equal on these, and on those of
/// the same role.
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
    Backward::new().grad(f)
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
    Backward::new().value_and_grad(f)
}

/// As [`value_and_grad`], of a function of two arguments, by the first alone. The second is data: tensors of any element type,
/// which have no derivative here.
///
/// ```
/// use consort::{Tensor, value_and_grad_first};
///
/// # fn main() -> consort::Result<()> {
/// let rows = |table: Tensor, at: Tensor| table.gather(&at, 0)?.sum_all();
/// let (table, at) = (Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0], &[2, 2])?, Tensor::from_iter([1i64, 1])?);
/// let (sum, slope) = value_and_grad_first(rows).call((table, at))?;
/// assert_eq!((sum.item::<f64>()?, slope.to_vec::<f64>()?), (14.0, vec![0.0, 0.0, 2.0, 2.0]));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn value_and_grad_first<A: Flatten + 'static, B: Flatten + 'static, R: Flatten + 'static>(
    f: impl Fn(A, B) -> Result<R> + 'static,
) -> Compiled<(A, B), (R, A)> {
    Backward::new().value_and_grad_first(f)
}

/// What a function returns, and the gradient of it all weighed by a cotangent: a compiled function of the arguments and a
/// value like the result, with a cotangent in place of each tensor. It has the element type and the shape of its result,
/// and differs over no more axes; that of a result without floats is not read.
///
/// A stage of a pipeline goes forward in one call and backward in another: `vjp` of its function is the second, and
/// computes again what the first has computed.
///
/// ```
/// use consort::{Tensor, vjp};
///
/// # fn main() -> consort::Result<()> {
/// let pull = vjp(|(x, w): (Tensor, Tensor)| x.mul(&w));
/// let (x, w) = (Tensor::from_iter([1.0f64, 2.0])?, Tensor::from_iter([3.0f64, 4.0])?);
/// let (y, (of_x, of_w)) = pull.call(((x, w), Tensor::from_iter([1.0f64, 10.0])?))?;
/// assert_eq!(y.to_vec::<f64>()?, [3.0, 8.0]);
/// assert_eq!((of_x.to_vec::<f64>()?, of_w.to_vec::<f64>()?), (vec![3.0, 40.0], vec![1.0, 20.0]));
/// # Ok(()) }
/// ```
#[track_caller]
pub fn vjp<A: Flatten + 'static, R: Flatten + 'static>(
    f: impl Fn(A) -> Result<R> + 'static,
) -> Compiled<(A, R), (R, A)> {
    Backward::new().vjp(f)
}

/// How a gradient is computed, where the defaults do not fit.
///
/// ```
/// use consort::{Backward, Dtype, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// // Gradients of 16 bits are summed over ranks with 32.
/// let slope = Backward::new().sums_in(Dtype::F32).grad(|x: Tensor| x.mul(&x)?.sum_all());
/// let x = Tensor::from_iter([1.0f32, 2.0])?.cast(Dtype::Bf16)?;
/// assert_eq!(slope.call(x)?.cast(Dtype::F32)?.to_vec::<f32>()?, [2.0, 4.0]);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Backward {
    sums: Option<Dtype>,
    budget: Option<Budget>,
}

/// How much of the forward a gradient may keep for the backward.
///
/// ```
/// use consort::{Backward, Budget, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let f = |x: Tensor| x.exp()?.sin()?.exp()?.sum_all();
/// let slope = Backward::new().within(Budget::bytes(0)).grad(f);
/// slope.call(Tensor::from_iter([1.0f64, 2.0])?)?;
/// assert_eq!(slope.explain().gradients[0].kept, Some(0)); // The argument is there anyway.
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget(u64);

impl Budget {
    /// At most this number of bytes on a rank, besides arguments. What does not fit is computed again for the backward, of
    /// all choices one with the fewest operations. Communication is never repeated for it, so more is kept if less is not
    /// possible. A size that is not known when the function is traced counts as 1024.
    ///
    /// [`Budget`] has an example.
    pub fn bytes(n: u64) -> Budget {
        Budget(n)
    }
}

impl Backward {
    /// The defaults.
    ///
    /// [`Backward`] has an example.
    pub fn new() -> Backward {
        Backward::default()
    }

    /// Sums gradients over ranks in this element type, of floats, where theirs is smaller. The sum is converted back.
    ///
    /// [`Backward`] has an example.
    #[must_use]
    pub fn sums_in(self, dtype: Dtype) -> Backward {
        Backward { sums: Some(dtype), ..self }
    }

    /// Keeps no more of the forward than a budget allows, if that is possible.
    ///
    /// [`Budget`] has an example.
    #[must_use]
    pub fn within(self, budget: Budget) -> Backward {
        Backward { budget: Some(budget), ..self }
    }

    /// The function [`grad`].
    ///
    /// [`Backward`] has an example.
    #[track_caller]
    pub fn grad<A: Flatten + 'static, R: Flatten + 'static>(
        self,
        f: impl Fn(A) -> Result<R> + 'static,
    ) -> Compiled<A, A> {
        let call = self.call("grad");
        compile(move |args| Ok(call.differentiate(&|args, ()| f(args), args, (), None)?.1))
    }

    /// The function [`value_and_grad`].
    ///
    /// ```
    /// use consort::{Backward, Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let slope = Backward::new().sums_in(Dtype::F64).value_and_grad(|x: Tensor| x.mul(&x)?.sum_all());
    /// let (loss, slope) = slope.call(Tensor::from_iter([1.0f32, 2.0])?)?;
    /// assert_eq!((loss.item::<f32>()?, slope.to_vec::<f32>()?), (5.0, vec![2.0, 4.0]));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn value_and_grad<A: Flatten + 'static, R: Flatten + 'static>(
        self,
        f: impl Fn(A) -> Result<R> + 'static,
    ) -> Compiled<A, (R, A)> {
        let call = self.call("value_and_grad");
        compile(move |args| call.differentiate(&|args, ()| f(args), args, (), None))
    }

    /// The function [`value_and_grad_first`].
    ///
    /// ```
    /// use consort::{Backward, Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let how = Backward::new().sums_in(Dtype::F64);
    /// let slope = how.value_and_grad_first(|w: Tensor, x: Tensor| w.mul(&x)?.sum_all());
    /// let (_, slope) = slope.call((Tensor::from_iter([1.0f32, 2.0])?, Tensor::from_iter([5.0f32, 7.0])?))?;
    /// assert_eq!(slope.to_vec::<f32>()?, [5.0, 7.0]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn value_and_grad_first<A: Flatten + 'static, B: Flatten + 'static, R: Flatten + 'static>(
        self,
        f: impl Fn(A, B) -> Result<R> + 'static,
    ) -> Compiled<(A, B), (R, A)> {
        let call = self.call("value_and_grad_first");
        compile(move |(args, data)| call.differentiate(&f, args, data, None))
    }

    /// The function [`vjp`].
    ///
    /// ```
    /// use consort::{Backward, Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let pull = Backward::new().sums_in(Dtype::F64).vjp(|x: Tensor| x.mul(&x));
    /// let (y, slope) = pull.call((Tensor::from_iter([3.0f32])?, Tensor::from_iter([1.0f32])?))?;
    /// assert_eq!((y.item::<f32>()?, slope.item::<f32>()?), (9.0, 6.0));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn vjp<A: Flatten + 'static, R: Flatten + 'static>(
        self,
        f: impl Fn(A) -> Result<R> + 'static,
    ) -> Compiled<(A, R), (R, A)> {
        let call = self.call("vjp");
        compile(move |(args, cotangents): (A, R)| {
            call.differentiate(&|args, ()| f(args), args, (), Some(cotangents))
        })
    }

    #[track_caller]
    fn call(self, name: &'static str) -> Call {
        Call { name, site: Location::caller(), how: self }
    }
}

/// The way out where a gradient is asked of a function that runs uncompiled.
const UNCOMPILED: &str = "after as many compilations as `limit` allows a function runs uncompiled: raise `limit`, or let calls \
    share a compilation: pad sizes, make them `dynamic`, and pass settings that change as tensors";

/// A call of `grad` or one of its kind.
#[derive(Clone, Copy)]
struct Call {
    name: &'static str,
    site: Site,
    how: Backward,
}

impl Call {
    fn failed(&self, failure: Box<Failure>) -> Error {
        Error::of(self.name, failure, self.site)
    }

    /// Traces a function as a block of its own, and records its gradient by `args` in place of it.
    fn differentiate<A: Flatten, B: Flatten, R: Flatten>(
        self,
        f: &impl Fn(A, B) -> Result<R>,
        args: A,
        data: B,
        cotangents: Option<R>,
    ) -> Result<(R, A)> {
        let Some(session) = trace::current() else {
            let failure = Failure::new("a gradient needs a compiled function, and this one runs uncompiled");
            return Err(self.failed(failure.note(UNCOMPILED)));
        };
        if let Some(sums) = self.how.sums.filter(|sums| !sums.is_float()) {
            let failure = Failure::new(("`sums_in` with an element type of floats", sums.to_string()));
            return Err(self.failed(failure));
        }
        let at @ (name, site) = (self.name, self.site);
        let mut tensors = args.flatten();
        let by = 0..tensors.len();
        tensors.extend(data.flatten());
        let read = by.end..tensors.len();
        let seeds = cotangents.map(|cotangents| cotangents.flatten());
        tensors.extend(seeds.iter().flatten().cloned());
        let operands = session.operands(&tensors, name, site)?;
        let types = session.types(&operands)?;
        let own = session.taking_gradient(|| {
            session.own_function(types, at, |params| {
                f(
                    args.unflatten(params[by.clone()].to_vec())?,
                    data.unflatten(params[read.clone()].to_vec())?,
                )
            })
        })?;
        let results = own.func.results.len();
        let cotangents = match seeds {
            None => None,
            Some(seeds) if seeds.len() != results => {
                let expected = format!("a cotangent for each of the {results} results");
                return Err(Error::new(name, (expected, seeds.len().to_string()), site));
            }
            Some(_) => Some((0..results).map(|i| Some(read.end + i)).collect()),
        };
        let program = Program { mesh: session.world.mesh().clone(), funcs: vec![own.func] };
        let wanted = Wanted {
            by: by.collect(),
            cotangents,
            apart: session.about.apart(&session.world.mesh()),
            sums: self.how.sums,
            budget: self.how.budget.map(|Budget(bytes)| bytes),
            keeps_rules: session.takes_gradient(),
        };
        let made_of = gradient(&program, &program.funcs[0].name, &wanted);
        let gradient = made_of.map_err(|mut failure| {
            let part = failure.op.strip_prefix("grad").map(|part| part.trim_start_matches(": ").to_string());
            failure.op = part.map_or(failure.op, Into::into);
            self.failed(failure)
        })?;
        let func = &gradient.program.funcs[0];
        check_starts(&session, &func.body, site)?;
        let values = session.splice(func, &[operands, own.captured].concat(), at)?;
        let (values, slopes) = values.split_at(results);
        let outcome = (own.made.unflatten(values.to_vec())?, args.unflatten(slopes.to_vec())?);
        session.explain_gradient(ExplainedGradient::new(name, site, &program.mesh, gradient));
        Ok(outcome)
    }
}

/// Fails if a gradient communicates where its function may not.
fn check_starts(session: &Rc<Session>, block: &Block, site: Site) -> Result<()> {
    for node in &block.nodes {
        session.check_reach(&*node.op, site)?;
        node.blocks.iter().try_for_each(|inside| check_starts(session, inside, site))?;
    }
    Ok(())
}

/// A gradient of a compiled function: where it is summed over ranks, and what is probably not meant.
///
/// ```
/// use consort::{Reduce, Tensor, grad};
///
/// let texts = consort::spawn(2, |mesh| {
///     let group = mesh.clone();
///     let x = Tensor::from_iter([mesh.my_rank()? as f64])?; // Each rank has its own data.
///     let slope = grad(move |w: Tensor| group.all_reduce(w.mul(&x)?.sum_all()?, Reduce::Avg));
///     slope.call(Tensor::from_iter([0.5f64])?.equal_over(&["world"])?)?;
///     Ok(slope.explain().gradients[0].to_string())
/// });
/// assert!(texts.into_iter().all(|text| text.is_ok_and(|text| text.contains("argument 0: summed over world for"))));
/// ```
#[derive(Clone, Debug)]
pub struct ExplainedGradient {
    /// The line that asks for it.
    pub site: Site,
    /// For each tensor of the argument, the axes over which its gradient is summed, and for which line.
    pub sums: Vec<String>,
    /// The bytes that are kept for the backward, if it has a [`Budget`].
    pub kept: Option<u64>,
    /// What is probably not meant.
    pub warnings: Vec<Failure>,
    name: &'static str,
}

impl ExplainedGradient {
    fn new(name: &'static str, site: Site, mesh: &Mesh, made: Gradient) -> ExplainedGradient {
        let sums = made.sums.iter().map(|one| one.display(mesh).to_string()).collect();
        ExplainedGradient { site, sums, kept: made.kept, warnings: made.warnings, name }
    }
}

impl fmt::Display for ExplainedGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}:{}", self.name, self.site.file(), self.site.line())?;
        self.sums.iter().try_for_each(|sum| write!(f, "\n  {sum}"))?;
        self.kept.map_or(Ok(()), |kept| write!(f, "\n  {kept} bytes are kept for the backward"))?;
        let warning =
            |warning: &Failure| write!(f, "\n  warning: {}", warning.to_string().replace('\n', "\n  "));
        self.warnings.iter().try_for_each(warning)
    }
}
