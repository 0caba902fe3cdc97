//! `compile`: a function over tensors, traced once, planned, and replayed.

mod agree;
mod call;
mod entries;
mod explain;
mod graph;
mod guards;
mod parts;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;

use crate::error::{Error, Result};
use crate::flatten::{Flatten, MapTensors};
use crate::tensor::Tensor;

use entries::{Entries, Segments};
use explain::Log;

pub use explain::{Cost, ExplainedGraph, Explanation, Stats};
pub(crate) use graph::Results;
pub(crate) use guards::{Leaf, leaves_of};

type Site = &'static Location<'static>;

/// The default limit of compilations, after which a function runs uncompiled.
const LIMIT: usize = 8;

/// A compiled function.
///
/// [`compile`] has an example.
pub struct Compiled<A, R> {
    f: Rc<dyn Fn(A) -> Result<R>>,
    options: Options,
    entries: RefCell<Entries<R>>,
    segments: Rc<RefCell<Segments>>,
    calls: Cell<u64>,
    /// Which ranks take part in its calls, as far as known.
    reach: Cell<Reach>,
    /// The cached note for agreement on its calls.
    said: Cell<Option<agree::Said>>,
    log: Rc<RefCell<Log>>,
    site: Site,
    /// How many functions were compiled at the same line before it.
    made: u32,
    takes: PhantomData<fn(A)>,
}

#[derive(Clone)]
struct Options {
    name: String,
    fullgraph: bool,
    limit: usize,
    dynamic: Vec<(usize, usize)>,
    retrace: bool,
}

/// Which ranks take part in the calls of a compiled function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// Not called yet: all ranks meet at the first call to decide.
    Unknown,
    /// This rank alone, since no rank communicated in the first call.
    Local,
    /// This rank alone, as the program says.
    Declared,
    /// All ranks: they meet at each call.
    World,
}

impl Reach {
    /// The reach after a compilation without communication: `World` stays `World`.
    fn without(self) -> Reach {
        if self == Reach::Unknown { Reach::Local } else { self }
    }
}

thread_local! {
    /// How many functions were compiled at each line.
    static MADE: RefCell<BTreeMap<(&'static str, u32, u32), u32>> = const { RefCell::new(BTreeMap::new()) };
}

/// Counts a compilation at a line; returns how many there were before, on this rank.
fn count_made(site: &'static Location<'static>) -> u32 {
    MADE.with_borrow_mut(|made| {
        let count = made.entry((site.file(), site.line(), site.column())).or_default();
        *count += 1;
        *count - 1
    })
}

/// The name of a function, of which several may be made at one line: `layer`, `layer #2`, and so on.
fn name_of(name: &str, made: u32) -> String {
    if made == 0 { name.to_string() } else { format!("{name} #{}", made + 1) }
}

/// Compiles a function over tensors: the first call traces it, later calls with arguments of the same kind replay its
/// plan without running it.
///
/// The function gets its arguments by value and must depend on nothing else that changes: tensors, groups, sizes as
/// [`Index`](crate::Index), settings, in tuples, lists and structs that derive [`Flatten`]. An argument without other
/// owners is donated: the plan may write its result there.
///
/// ```
/// use consort::{Reduce, Tensor, compile};
///
/// let sums = consort::spawn(2, |mesh| {
///     let group = mesh.clone();
///     let step = compile(move |(x, w): (Tensor, Tensor)| group.all_reduce(x.matmul(&w)?.relu()?, Reduce::Sum));
///     let w = Tensor::from_slice(&[1.0f32, 0.0, 0.0, 1.0], &[2, 2])?;
///     for i in 0..3 {
///         let x = Tensor::from_slice(&[i as f32, -1.0], &[1, 2])?;
///         assert_eq!(step.call((x, w.clone()))?.to_vec::<f32>()?, [2.0 * i as f32, 0.0]);
///     }
///     assert_eq!((step.stats().graphs, step.stats().breaks), (1, 0));
///     Ok(())
/// });
/// assert!(sums.into_iter().all(|done| done.is_ok()));
/// ```
#[track_caller]
pub fn compile<A: Flatten, R: Flatten>(f: impl Fn(A) -> Result<R> + 'static) -> Compiled<A, R> {
    let site = Location::caller();
    let file = site.file().rsplit('/').next().unwrap_or_default();
    let made = count_made(site);
    Compiled {
        f: Rc::new(f),
        options: Options {
            name: name_of(&format!("{file}:{}", site.line()), made),
            fullgraph: false,
            limit: LIMIT,
            dynamic: Vec::new(),
            retrace: is_retraced(),
        },
        entries: RefCell::default(),
        segments: Rc::default(),
        calls: Cell::new(0),
        reach: Cell::new(Reach::Unknown),
        said: Cell::new(None),
        log: Rc::default(),
        site,
        made,
        takes: PhantomData,
    }
}

/// The default of `retrace`: true unless `CONSORT_RETRACE=0`.
fn is_retraced() -> bool {
    std::env::var("CONSORT_RETRACE").map_or(true, |value| value.trim() != "0")
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
///     let (x, rate) = (Tensor::from_iter([1.0f32, 1.0])?, Tensor::from_slice(&[0.5f32], &[])?);
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

/// A compiled function that changes its first argument.
///
/// [`compile_mut`] has an example.
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

    /// The underlying compiled function, for options and explanations.
    ///
    /// [`compile_mut`] has an example.
    pub fn compiled(&self) -> &Compiled<(S, A), (S, R)> {
        &self.0
    }

    /// Sets options of the underlying function.
    #[must_use]
    pub fn with(self, options: impl FnOnce(Compiled<(S, A), (S, R)>) -> Compiled<(S, A), (S, R)>) -> Self {
        CompiledMut(options(self.0))
    }
}

impl<A: Flatten + 'static, R: Flatten + 'static> Compiled<A, R> {
    /// Whether graph breaks and captured tensors are errors rather than reported.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Tensor, compile};
    ///
    /// let f = compile(|x: Tensor| x.to_vec::<f32>()).fullgraph(true);
    /// let error = f.call(Tensor::from_iter([1.0f32])?).unwrap_err();
    /// assert!(error.to_string().starts_with("to_vec: expected no host read"), "{error}");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn fullgraph(mut self, fullgraph: bool) -> Self {
        self.options.fullgraph = fullgraph;
        self
    }

    /// A name for explanations and logs; the source line otherwise.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = name_of(name, self.made);
        self
    }

    /// Declares a size of an argument to be a symbol from the first call on: of which tensor, counted from 0 through all
    /// arguments, and along which dimension.
    #[must_use]
    pub fn dynamic(mut self, tensor: usize, dim: usize) -> Self {
        self.options.dynamic.push((tensor, dim));
        self
    }

    /// Declares that it communicates with no other rank, so that ranks need not call it together. Without this, all ranks
    /// meet at its first call, and at every later one if it communicates.
    ///
    /// ```
    /// use consort::{Tensor, compile};
    ///
    /// let norms = consort::spawn(2, |mesh| {
    ///     let norm = compile(|x: Tensor| x.mul(&x)?.sum_all()?.sqrt()).local();
    ///     // On one rank only.
    ///     if mesh.number(&mesh.rank())? == 0 {
    ///         return norm.call(Tensor::from_iter([3.0f32, 4.0])?)?.item::<f32>();
    ///     }
    ///     Ok(0.0)
    /// });
    /// assert_eq!(norms.into_iter().flatten().collect::<Vec<_>>(), [5.0, 0.0]);
    /// ```
    #[must_use]
    pub fn local(self) -> Self {
        self.reach.set(Reach::Declared);
        self
    }

    /// Whether calls 1, 2, 4, 8, .. after the first are traced again and compared, so that captured numbers that changed
    /// are found. It is so by default, unless the environment has `CONSORT_RETRACE=0`.
    #[must_use]
    pub fn retrace(mut self, retrace: bool) -> Self {
        self.options.retrace = retrace;
        self
    }

    /// The limit of compilations; after that it runs uncompiled.
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.options.limit = limit;
        self
    }

    /// Calls it.
    ///
    /// [`compile`] has an example.
    #[track_caller]
    pub fn call(&self, args: A) -> Result<R> {
        self.run(&args, Location::caller()).map_err(Error::noted)
    }

    /// What was compiled, why, and what it does.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Tensor, compile};
    ///
    /// let f = compile(|x: Tensor| x.exp()?.sum_all()).name("loss");
    /// f.call(Tensor::from_iter([0.0f32, 0.0])?)?;
    /// let text = f.explain().to_string();
    /// assert!(text.starts_with("loss: 1 call, 1 graph, 0 breaks, 0 recompiles"), "{text}");
    /// # Ok(()) }
    /// ```
    pub fn explain(&self) -> Explanation {
        let graphs = self.segments.borrow().list();
        self.log.borrow().explain(&self.options.name, self.stats(), &graphs)
    }

    /// Counts, for tests.
    ///
    /// [`explain`](Compiled::explain) says what they mean.
    pub fn stats(&self) -> Stats {
        let graphs = self.segments.borrow().list();
        self.log.borrow().stats(self.calls.get(), &graphs)
    }

    /// Fails with the explanation if there were more breaks, graphs or recompilations than given.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Tensor, compile};
    ///
    /// let f = compile(|x: Tensor| x.exp());
    /// for _ in 0..3 {
    ///     f.call(Tensor::from_iter([0.0f32])?)?;
    /// }
    /// f.expect_steady(0, 1, 0)?;
    /// assert!(f.expect_steady(0, 0, 0).is_err());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn expect_steady(&self, breaks: u64, graphs: u64, recompiles: u64) -> Result<()> {
        let stats = self.stats();
        if stats.breaks <= breaks && stats.graphs <= graphs && stats.recompiles <= recompiles {
            return Ok(());
        }
        let expected =
            format!("expected at most {breaks} breaks, {graphs} graphs and {recompiles} recompiles");
        let got = format!("{}, {} and {}", stats.breaks, stats.graphs, stats.recompiles);
        Err(Error::new(
            "expect_steady",
            format!("{expected}, got {got}\n{}", self.explain()),
            Location::caller(),
        ))
    }

    /// Where it was compiled.
    pub fn site(&self) -> &'static Location<'static> {
        self.site
    }
}
