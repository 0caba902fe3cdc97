//! Compiled functions that change their first argument.

use std::panic::Location;

use super::{Compiled, Explanation, Stats, Steady, compile};
use crate::error::Result;
use crate::flatten::{Flatten, MapTensors};
use crate::mesh::Group;
use crate::tensor::Tensor;

/// The options of [`Compiled`].
macro_rules! options {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        #[doc = concat!("As [`Compiled::", stringify!($name), "`].")]
        ///
        /// [`CompiledMut`] has an example.
        #[must_use]
        pub fn $name(self $(, $arg: $ty)*) -> Self {
            CompiledMut(self.0.$name($($arg),*))
        }
    )*};
}

/// Compiles a function that updates its first argument: new tensors replace the old ones, in place if their storage has
/// one owner.
///
/// ```
/// use consort::{Flatten, Tensor, compile_mut};
///
/// #[derive(Flatten)]
/// struct Model {
///     weight: Tensor,
/// }
///
/// # fn main() -> consort::Result<()> {
/// let step = compile_mut(|model: &mut Model, (x, rate): (Tensor, Tensor)| {
///     let grad = x.mul(&rate)?;
///     model.weight.sub_(&grad)?;
///     model.weight.sum_all()
/// });
/// let mut model = Model { weight: Tensor::from_iter([1.0f32, 2.0])? };
/// for _ in 0..2 {
///     let (x, rate) = (Tensor::from_iter([1.0f32, 1.0])?, Tensor::scalar(0.5f32)?);
///     step.call(&mut model, (x, rate))?;
/// }
/// assert_eq!(model.weight.to_vec::<f32>()?, [0.0, 1.0]);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn compile_mut<S: Flatten + 'static, A: Flatten, R: Flatten>(
    f: impl Fn(&mut S, A) -> Result<R> + 'static,
) -> CompiledMut<S, A, R> {
    CompiledMut(compile(move |(mut state, args): (S, A)| {
        let result = f(&mut state, args)?;
        Ok((state, result))
    }))
}

/// A compiled function that changes its first argument. It has the options and reports of [`Compiled`].
///
/// ```
/// use consort::{Steady, Tensor, compile_mut};
///
/// # fn main() -> consort::Result<()> {
/// let add = compile_mut(|sum: &mut Tensor, x: Tensor| sum.add_(&x)).name("add").fullgraph(true);
/// let mut sum = Tensor::scalar(0i64)?;
/// for _ in 0..3 {
///     add.call(&mut sum, Tensor::scalar(2i64)?)?;
/// }
/// assert_eq!((sum.item::<i64>()?, add.stats().calls), (6, 3));
/// assert!(add.explain().to_string().starts_with("add: 3 calls, 1 graph"));
/// add.expect_steady(Steady::graphs(1))
/// # }
/// ```
pub struct CompiledMut<S, A, R>(Compiled<(S, A), (S, R)>);

impl<S: Flatten + 'static, A: Flatten + 'static, R: Flatten + 'static> CompiledMut<S, A, R> {
    /// Calls it. If it fails before anything ran, the state is unchanged; if the ranks fail during the run, its tensors
    /// may hold partial results.
    ///
    /// [`compile_mut`] has an example.
    #[track_caller]
    pub fn call(&self, state: &mut S, args: A) -> Result<R> {
        // The tensors are moved into the call, so that it sees no additional owner.
        let moved = state.map(&mut MapTensors(|tensor: &Tensor| tensor.clone()));
        *state = moved.map(&mut MapTensors(|tensor: &Tensor| Tensor::of_shape(tensor.dtype(), &[])));
        let args = (moved, args);
        match self.0.run(&args, Location::caller()) {
            Ok((new, result)) => {
                *state = new;
                Ok(result)
            }
            Err(error) => {
                *state = args.0;
                Err(error.noted())
            }
        }
    }

    options! {
        fullgraph(fullgraph: bool);
        name(name: &str);
        dynamic(tensor: usize, dim: usize);
        local();
        over(group: &Group);
        role(name: &str);
        lockstep(every: usize);
        retrace(retrace: bool);
        limit(limit: usize);
    }

    /// What was compiled, why, and what it does, as [`Compiled::explain`].
    ///
    /// [`CompiledMut`] has an example.
    pub fn explain(&self) -> Explanation {
        self.0.explain()
    }

    /// Counts, for tests, as [`Compiled::stats`].
    ///
    /// [`CompiledMut`] has an example.
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Fails with the reasons if there were more graphs, breaks or recompilations than given, as
    /// [`Compiled::expect_steady`].
    ///
    /// [`CompiledMut`] has an example.
    #[track_caller]
    pub fn expect_steady(&self, steady: Steady) -> Result<()> {
        self.0.expect_steady(steady)
    }

    /// Where it was compiled.
    pub fn site(&self) -> &'static Location<'static> {
        self.0.site()
    }
}
