//! `compile`: a function over tensors, traced once, planned, and replayed.

mod agree;
mod agreed;
mod call;
mod compiled_mut;
mod entries;
mod explain;
mod graph;
mod guards;
mod log;
mod misfit;
mod parts;
mod roles;
mod steady;
mod traced;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;

use consort_types::Failure;

use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::mesh::Group;

use entries::{Entries, Graphs};
use explain::Log;

pub use compiled_mut::{CompiledMut, compile_mut};
pub use explain::{Cost, ExplainedGraph, Explanation, Stats};
pub(crate) use graph::Results;
pub(crate) use guards::{Leaf, leaves_of};
pub(crate) use log::check_log;
pub use steady::Steady;

type Site = &'static Location<'static>;

/// The default limit of compilations, after which a function runs uncompiled.
const LIMIT: usize = 8;

/// The most characters of the name of a function or a role.
const MAX_NAME: usize = 64;

/// A name as errors and logs print it, and the name as it was given if it is none.
fn checked_name(what: &'static str, name: &str) -> (String, Option<(&'static str, String)>) {
    let shown: String = name.chars().take(MAX_NAME).collect();
    let shown = shown.replace(|c: char| c.is_control() || c == '`', " ");
    let is_name = shown == name && !name.trim().is_empty();
    (shown, (!is_name).then(|| (what, name.chars().take(MAX_NAME + 1).collect())))
}

/// A compiled function.
///
/// [`compile`] has an example.
pub struct Compiled<A, R> {
    f: Rc<dyn Fn(A) -> Result<R>>,
    options: Options,
    entries: RefCell<Entries<R>>,
    graphs: Rc<RefCell<Graphs>>,
    calls: Cell<u64>,
    /// How many of its calls run uncompiled now, one inside the other.
    depth: Cell<u32>,
    /// The calls that its ranks count together: not those of a function that is local so far.
    counted: Cell<u64>,
    /// Which ranks take part in its calls, as far as known.
    reach: Cell<Reach>,
    /// The cached note for agreement on its calls.
    said: Cell<Option<agree::Said>>,
    /// The roles of its ranks, once they are known.
    roles: RefCell<Option<Rc<roles::Roles>>>,
    log: Rc<RefCell<Log>>,
    site: Site,
    /// How many functions were compiled at the same line before it.
    made: u32,
    takes: PhantomData<fn(A)>,
}

#[derive(Clone)]
struct Options {
    name: String,
    /// The name without a number, if the user gave it.
    given_name: Option<String>,
    fullgraph: bool,
    limit: usize,
    dynamic: Vec<(usize, usize)>,
    retrace: bool,
    /// The ranks that call it, if not all.
    over: Option<Group>,
    /// Its role on this rank.
    role: Option<String>,
    /// A name or role that was given and is none, which the first call refuses: what it is, and its text.
    refused: Option<(&'static str, String)>,
    /// Its ranks meet at every call of which the number, counted from 0, is a multiple of this.
    lockstep: u64,
}

/// Which ranks take part in the calls of a compiled function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// Not called yet: its ranks meet at the first call to decide.
    Unknown,
    /// This rank alone, since no rank communicated in the first call.
    Local,
    /// This rank alone, as the program says.
    Declared,
    /// All its ranks: they meet at each call.
    Joint,
}

impl Reach {
    /// The reach after a compilation without communication: `Joint` stays `Joint`.
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
            given_name: None,
            fullgraph: false,
            limit: LIMIT,
            dynamic: Vec::new(),
            retrace: is_retraced(),
            over: None,
            role: None,
            refused: None,
            lockstep: 1,
        },
        entries: RefCell::default(),
        graphs: Rc::default(),
        calls: Cell::new(0),
        depth: Cell::new(0),
        counted: Cell::new(0),
        reach: Cell::new(Reach::Unknown),
        said: Cell::new(None),
        roles: RefCell::default(),
        log: Rc::default(),
        site,
        made,
        takes: PhantomData,
    }
}

/// The default of `retrace`: true unless `CONSORT_RETRACE=0`.
pub(crate) fn is_retraced() -> bool {
    std::env::var("CONSORT_RETRACE").map_or(true, |value| value.trim() != "0")
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
        let (name, refused) = checked_name("name", name);
        self.options.name = name_of(&name, self.made);
        self.options.given_name = Some(name);
        self.options.refused = self.options.refused.or(refused);
        self
    }

    /// Declares a size of an argument to be a symbol from the first call on: of which tensor, counted from 0 through all
    /// arguments, and along which dimension.
    #[must_use]
    pub fn dynamic(mut self, tensor: usize, dim: usize) -> Self {
        self.options.dynamic.push((tensor, dim));
        self
    }

    /// Declares that the ranks of a group call it together, and no others: they alone agree on it, and its communication
    /// stays among them. Calls on groups without common ranks do not wait for one another.
    ///
    /// ```
    /// use consort::{Init, Reduce, Tensor, compile};
    ///
    /// let results = Init::new().axes(&[("pp", 2), ("tp", 2)]).spawn(4, |mesh| {
    ///     let (stage, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
    ///     let (stage, group) = (stage.my_rank()?, tp.clone());
    ///     // Each stage of a pipeline has a function of its own.
    ///     let f = match stage {
    ///         0 => compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)),
    ///         _ => compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Max)),
    ///     };
    ///     f.over(&tp).call(Tensor::from_iter([1.0f32])?)?.to_vec::<f32>()
    /// });
    /// let results: Vec<Vec<f32>> = results.into_iter().flatten().collect();
    /// assert_eq!(results, [[2.0], [2.0], [-1.0], [-1.0]]);
    /// ```
    #[must_use]
    pub fn over(mut self, group: &Group) -> Self {
        self.options.over = Some(group.clone());
        self
    }

    /// Declares the role of this rank among those that call it: ranks of other roles run other functions, such as the stages
    /// of a pipeline. Within a role all ranks have one program; the communication of all roles is checked together before it
    /// runs: every send meets its receive, members of a group make the same calls, and no ranks wait in a circle. All ranks
    /// that call it declare a role, or none does. `docs/pipeline.md` has the rules.
    ///
    /// ```
    /// use consort::{Dtype, Tensor, compile};
    ///
    /// let results = consort::spawn(2, |mesh| {
    ///     let (group, x) = (mesh.clone(), Tensor::from_iter([3.0f32])?);
    ///     let first = compile({
    ///         let group = group.clone();
    ///         move |x: Tensor| {
    ///             group.isend(x.neg()?, 1, 0)?.wait()?;
    ///             Ok(x)
    ///         }
    ///     });
    ///     let second = compile(move |x: Tensor| group.irecv(Dtype::F32, &[1], 0, 0)?.mul(&x));
    ///     match mesh.my_rank()? {
    ///         0 => first.role("first").call(x)?.item::<f32>(),
    ///         _ => second.role("second").call(x)?.item::<f32>(),
    ///     }
    /// });
    /// assert_eq!(results.into_iter().flatten().collect::<Vec<_>>(), [3.0, -9.0]);
    /// ```
    #[must_use]
    pub fn role(mut self, name: &str) -> Self {
        let (role, refused) = checked_name("role", name);
        self.options.role = Some(role);
        self.options.refused = self.options.refused.or(refused);
        self
    }

    /// How often its ranks compare their calls: at the first call and at every `every`-th call after it. The default is 1, every
    /// call. Between two comparisons, a call that needs another compilation is an error.
    ///
    /// ```
    /// use consort::{Reduce, Tensor, compile};
    ///
    /// let done = consort::spawn(2, |mesh| {
    ///     let group = mesh.clone();
    ///     let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).lockstep(8);
    ///     for _ in 0..16 {
    ///         assert_eq!(f.call(Tensor::from_iter([1.0f32])?)?.to_vec::<f32>()?, [2.0]);
    ///     }
    ///     Ok(())
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[must_use]
    pub fn lockstep(mut self, every: usize) -> Self {
        self.options.lockstep = (every as u64).max(1);
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
    ///     if mesh.my_rank()? == 0 {
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
        let graphs = self.graphs.borrow().list();
        let entries = self.entries.borrow();
        let last = entries.last().and_then(|entry| entry.graph());
        let last = last.and_then(|last| graphs.iter().position(|graph| Rc::ptr_eq(graph, last)));
        let (name, role) = (self.options.name.clone(), self.options.role.clone());
        self.log.borrow().explain((name, role), self.stats(), &graphs, last)
    }

    /// Counts, for tests.
    ///
    /// [`explain`](Compiled::explain) says what they mean.
    pub fn stats(&self) -> Stats {
        let graphs = self.graphs.borrow().list();
        self.log.borrow().stats(self.calls.get(), &graphs)
    }

    /// Fails with the reasons if there were more graphs, breaks or recompilations than given.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::{Steady, Tensor, compile};
    ///
    /// let f = compile(|x: Tensor| x.exp());
    /// for _ in 0..3 {
    ///     f.call(Tensor::from_iter([0.0f32])?)?;
    /// }
    /// f.expect_steady(Steady::graphs(1))?;
    /// assert!(f.expect_steady(Steady::graphs(0).breaks(1).recompiles(1)).is_err());
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn expect_steady(&self, steady: Steady) -> Result<()> {
        let site = Location::caller();
        match steady.exceeded(&self.stats()) {
            None => Ok(()),
            Some(more) => {
                let failure = self.explain().reasons().fold(Failure::new(more), Failure::row);
                Err(Error::of("expect_steady", failure.note("`explain` shows the programs"), site))
            }
        }
    }

    /// Where it was compiled.
    pub fn site(&self) -> &'static Location<'static> {
        self.site
    }
}
