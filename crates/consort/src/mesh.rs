//! Meshes and groups: which ranks there are, and which of them communicate.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::panic::Location;
use std::rc::Rc;
use std::time::Duration;

use consort_ir::index::{self as ir, Sym};
use consort_ir::mesh;
use consort_ir::ops::built_in;
use consort_runtime::kernels::Kernel;
use consort_types::{Axes, Failure, GroupId, GroupName, Rank, ranks_text};

use crate::error::{Error, Result};
use crate::index::Index;
use crate::trace::is_tracing;
use crate::world::{Unwaited, World};

/// All ranks, along named axes. It is also the group of all of them.
///
/// ```
/// use consort::{Init, Reduce, Tensor};
///
/// let results = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
///     let tp = mesh.axis("tp")?;
///     assert_eq!((mesh.size(), tp.size()), (4, 2));
///     let x = Tensor::from_slice(&[1.0f32], &[1])?;
///     tp.all_reduce(x, Reduce::Sum)?.item::<f32>()
/// });
/// assert!(results.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
/// ```
#[derive(Clone)]
pub struct Mesh {
    all: Group,
}

impl Deref for Mesh {
    type Target = Group;
    fn deref(&self) -> &Group {
        &self.all
    }
}

/// Ranks that communicate: an axis of a mesh, several axes, or one of some lists.
///
/// ```
/// use consort::{Init, Tensor};
///
/// let results = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
///     let tp = mesh.axis("tp")?;
///     assert_eq!((tp.size(), tp.has_me(), tp.in_flight()), (2, true, 0));
///     let mine = Tensor::index(tp.rank())?; // Its place, which differs between ranks.
///     assert_eq!(mine.varies(), ["tp"]);
///     tp.poll()?;
///     tp.my_rank()
/// });
/// assert_eq!(results.into_iter().flatten().collect::<Vec<_>>(), [0, 1, 0, 1]);
/// ```
#[derive(Clone)]
pub struct Group {
    pub(crate) world: Rc<World>,
    pub(crate) over: GroupName,
    /// `None` if there are only shapes, or if this rank is in no list.
    pub(crate) comm: Option<consort_comm::Group>,
    /// Whether its operations end the graph of a compiled function.
    pub(crate) breaks: bool,
}

impl Mesh {
    pub(crate) fn new(world: Rc<World>, site: &'static Location<'static>) -> Result<Mesh> {
        let over = GroupName::Axes(world.mesh().all_axes());
        Ok(Mesh { all: group(world, over, "mesh", site)? })
    }

    /// A mesh without ranks behind it, as `rank` of it would see it: tensors over it are shapes without data, and
    /// nothing communicates.
    ///
    /// ```
    /// use consort::{Dtype, Mesh, Reduce, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let mesh = Mesh::of_shapes(&[("tp", 8)], 0)?;
    /// let x = Tensor::of_shape(Dtype::F32, &[1024, 4096]);
    /// assert_eq!(mesh.reduce_scatter(&x, Reduce::Sum, 0)?.shape(), [128, 4096]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn of_shapes(axes: &[(&str, usize)], rank: usize) -> Result<Mesh> {
        let site = Location::caller();
        let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let axes = axes.iter().map(|(name, given)| (name.to_string(), size(*given)));
        let mesh = mesh::Mesh::new(axes).map_err(|error| refused(error, site))?;
        if rank >= mesh.n_ranks() as usize {
            let message = (format!("a rank below {}", mesh.n_ranks()), rank.to_string());
            return Err(Error::new("mesh", message, site));
        }
        Mesh::new(World::of_shapes(mesh, Rank(rank as u32)), site)
    }

    /// The group along an axis.
    ///
    /// [`Mesh`] has an example.
    #[track_caller]
    pub fn axis(&self, name: &str) -> Result<Group> {
        self.axes(&[name])
    }

    /// The group along several axes. All ranks must create a new one together. Its members are numbered in the order in
    /// which the mesh lists its axes, whatever the order of the names.
    ///
    /// ```
    /// use consort::{Init, Reduce, Tensor};
    ///
    /// let results = Init::new().axes(&[("pp", 2), ("dp", 2), ("tp", 2)]).spawn(8, |mesh| {
    ///     let group = mesh.axes(&["tp", "dp"])?;
    ///     assert_eq!(group.my_rank()?, 2 * mesh.axis("dp")?.my_rank()? + mesh.axis("tp")?.my_rank()?);
    ///     group.all_reduce(Tensor::from_slice(&[1i64], &[1])?, Reduce::Sum)?.item::<i64>()
    /// });
    /// assert!(results.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 4)));
    /// ```
    #[track_caller]
    pub fn axes(&self, names: &[&str]) -> Result<Group> {
        let site = Location::caller();
        let axes: Axes = names.iter().map(|name| self.axis_of(name, site)).collect::<Result<_>>()?;
        group(Rc::clone(&self.world), GroupName::Axes(axes), "mesh", site)
    }

    fn axis_of(&self, name: &str, site: &'static Location<'static>) -> Result<consort_types::Axis> {
        let mesh = self.world.mesh();
        mesh.axis(name).ok_or_else(|| {
            let names: Vec<&str> = mesh.axes().iter().map(|(name, _)| name.as_str()).collect();
            Error::new("mesh", (format!("one of the axes {}", names.join(", ")), format!("`{name}`")), site)
        })
    }

    /// The group of the list that contains this rank. The lists must be disjoint and of one length, and all ranks must
    /// call this with the same lists. A rank in no list passes its tensors through.
    ///
    /// The group stays as long as the mesh: a later call with the same name and lists finds it without communication, also
    /// inside a compiled function.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let results = consort::spawn(4, |mesh| {
    ///     let pairs = mesh.lists("pairs", &[&[0, 3], &[1, 2]])?;
    ///     let x = Tensor::from_slice(&[mesh.my_rank()? as f32], &[1])?;
    ///     pairs.all_reduce(x, Reduce::Sum)?.item::<f32>()
    /// });
    /// assert!(results.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 3.0)));
    /// ```
    #[track_caller]
    pub fn lists(&self, name: &str, lists: &[&[usize]]) -> Result<Group> {
        let site = Location::caller();
        let n = self.world.mesh().n_ranks();
        let outside = lists.iter().flat_map(|list| list.iter()).find(|rank| u32::try_from(**rank).is_err());
        if let Some(rank) = outside {
            return Err(Error::new("mesh", (format!("ranks below {n}"), rank.to_string()), site));
        }
        let ranks = |list: &&[usize]| -> Vec<Rank> { list.iter().map(|rank| Rank(*rank as u32)).collect() };
        let lists: Vec<Vec<Rank>> = lists.iter().map(ranks).collect();
        if let Some((id, made)) = self.list_group(name) {
            return match made.lists == lists {
                true => group(Rc::clone(&self.world), GroupName::List(id), "mesh", site),
                false => {
                    let made = format!("the lists {}", lists_text(&made.lists));
                    Err(other_group(name, &made, &lists_text(&lists), site))
                }
            };
        }
        let id = self.world.change_mesh(|mesh| mesh.add_list_group(name, lists));
        let id = id.map_err(|error| refused(error, site))?;
        group(Rc::clone(&self.world), GroupName::List(id), "mesh", site)
    }

    /// The group of all ranks with the same colour, ordered by key; all groups must have one size. A rank without a
    /// colour is in no group, and passes its tensors through. All ranks must call it.
    ///
    /// The group stays as long as the mesh: a later call with the same name, colour and key finds it without communication,
    /// also inside a compiled function.
    ///
    /// ```
    /// let sizes = consort::spawn(4, |mesh| {
    ///     let me = mesh.my_rank()?;
    ///     let halves = mesh.split("halves", Some(me as u32 % 2), 0)?;
    ///     Ok((halves.size(), halves.my_rank()?))
    /// });
    /// let sizes: Vec<_> = sizes.into_iter().flatten().collect();
    /// assert_eq!(sizes, [(2, 0), (2, 0), (2, 1), (2, 1)]);
    /// ```
    #[track_caller]
    pub fn split(&self, name: &str, colour: Option<u32>, key: i64) -> Result<Group> {
        let site = Location::caller();
        if let Some((id, made)) = self.list_group(name) {
            let text = |(colour, key): (Option<u32>, i64)| match colour {
                Some(colour) => format!("colour {colour} and key {key}"),
                None => "no colour".to_string(),
            };
            let before = self.world.splits.borrow().get(name).copied();
            let before = before.map_or_else(|| format!("the lists {}", lists_text(&made.lists)), text);
            return match before == text((colour, key)) {
                true => group(Rc::clone(&self.world), GroupName::List(id), "mesh", site),
                false => Err(other_group(name, &before, &text((colour, key)), site)),
            };
        }
        let mine = [i64::from(colour.is_some()), i64::from(colour.unwrap_or(0)), key];
        let all = self.world.gather(&format!("split the mesh into `{name}`"), &mine, site)?;
        let colours: Vec<Option<u32>> =
            all.chunks(3).map(|one| (one[0] == 1).then_some(one[1] as u32)).collect();
        let keys: Vec<i64> = all.chunks(3).map(|one| one[2]).collect();
        let id = self.world.change_mesh(|mesh| mesh.add_split_group(name, &colours, &keys));
        let id = id.map_err(|error| refused_split(error, &colours, site))?;
        self.world.splits.borrow_mut().insert(name.to_string(), (colour, key));
        group(Rc::clone(&self.world), GroupName::List(id), "mesh", site)
    }

    /// A group that was made by lists or a split.
    fn list_group(&self, name: &str) -> Option<(GroupId, mesh::ListGroup)> {
        let mesh = self.world.mesh();
        let id = mesh.list_group(name)?;
        Some((id, mesh.groups().get(usize::from(id.0))?.clone()))
    }

    /// The names of the groups that [`lists`](Mesh::lists) and [`split`](Mesh::split) made, in order.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// let mesh = consort::init()?;
    /// mesh.lists("alone", &[&[0]])?;
    /// mesh.lists("alone", &[&[0]])?; // Found again.
    /// assert_eq!(mesh.groups(), ["alone"]);
    /// # Ok(()) }
    /// ```
    pub fn groups(&self) -> Vec<String> {
        self.world.mesh().groups().iter().map(|group| group.name.clone()).collect()
    }

    /// How long operations may wait for the other ranks, from now on.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use std::time::Duration;
    ///
    /// let mesh = consort::init()?;
    /// mesh.set_timeout(Duration::from_secs(5));
    /// mesh.set_threads(2);
    /// mesh.parity("dropout", "0.1")?; // On every rank the same.
    /// assert_eq!(mesh.copied_bytes(), 0);
    /// # Ok(()) }
    /// ```
    pub fn set_timeout(&self, timeout: Duration) {
        self.world.set_timeout(timeout);
    }

    /// How many threads the kernels of this rank use: one at first, and never more than there are cores.
    ///
    /// [`set_timeout`](Mesh::set_timeout) has an example.
    pub fn set_threads(&self, n: usize) {
        self.world.cpu().set_threads(n);
    }

    /// Gives the groups of this rank threads that advance large reductions while it computes, eagerly or compiled. True if
    /// this host has a core for each besides those of its ranks; without one, a rank advances them between its ops.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let sums = consort::spawn(2, |mesh| {
    ///     mesh.start_progress_threads(); // Results do not depend on it.
    ///     mesh.all_reduce(Tensor::from_iter([1i64])?, Reduce::Sum)?.item::<i64>()
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2)));
    /// ```
    pub fn start_progress_threads(&self) -> bool {
        self.world.start_progress_threads()
    }

    /// For tests: progress threads start without cores for them.
    #[doc(hidden)]
    pub fn force_progress_threads(&self) {
        self.world.all().into_iter().for_each(|all| all.force_progress_threads());
    }

    /// Warm-up: calls compiled functions so that they are compiled and their memory is allocated before timed steps.
    /// All ranks must do so together, with arguments like those of real steps. The calls are not counted, and no rank
    /// returns before all are done.
    ///
    /// ```
    /// use consort::{Reduce, Steady, Tensor, compile};
    ///
    /// let done = consort::spawn(2, |mesh| {
    ///     let group = mesh.clone();
    ///     let step = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum));
    ///     mesh.warm_up(|| step.call(Tensor::from_iter([0.0f32])?).map(drop))?;
    ///     assert_eq!((step.stats().calls, step.stats().graphs), (0, 1));
    ///     step.call(Tensor::from_iter([1.0f32])?)?;
    ///     step.expect_steady(Steady::graphs(1))
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn warm_up<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = self.world.warming.replace(true);
        let outcome = f();
        self.world.warming.set(before);
        let given = outcome?;
        self.barrier()?;
        Ok(given)
    }

    /// Bytes that were copied for communication: operands with other owners, and those
    /// that were not contiguous.
    ///
    /// [`set_timeout`](Mesh::set_timeout) has an example.
    pub fn copied_bytes(&self) -> u64 {
        self.world.copied()
    }

    /// The operations whose results were dropped before anybody waited for them. They completed all the same.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let lists = consort::spawn(2, |mesh| {
    ///     drop(mesh.all_reduce(Tensor::from_slice(&[1.0f32], &[1])?, Reduce::Sum)?);
    ///     Ok(mesh.unwaited())
    /// });
    /// for list in lists.into_iter().flatten() {
    ///     assert_eq!(list[0].op, "all_reduce");
    /// }
    /// ```
    pub fn unwaited(&self) -> Vec<Unwaited> {
        self.world.unwaited()
    }

    /// Checks that a setting has the same value on every rank: an error on all of them if not.
    ///
    /// [`set_timeout`](Mesh::set_timeout) has an example.
    #[track_caller]
    pub fn parity(&self, key: &str, value: &str) -> Result<()> {
        let site = Location::caller();
        let what = format!("compare the setting `{key}`");
        // A numbered call, so that a rank that does something else is a mismatch, not a timeout.
        let values = self.world.gather_bytes(&what, value.as_bytes(), site)?;
        let mut groups: Vec<(&[u8], Vec<usize>)> = Vec::new();
        for (rank, value) in values.iter().enumerate() {
            match groups.iter_mut().find(|(other, _)| *other == &value[..]) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((value, vec![rank])),
            }
        }
        if groups.len() < 2 {
            return Ok(());
        }
        let failure = Failure::new(format!("the setting `{key}` must be the same on all ranks"));
        let row = |(value, ranks): &(&[u8], Vec<usize>)| {
            format!("{}: {:?}", ranks_text(ranks), String::from_utf8_lossy(value))
        };
        let failure = groups.iter().map(row).fold(failure, |failure, row| failure.row(row));
        Err(Error::of("parity", failure, site))
    }

    /// Registers a kernel for a user-defined op, which runs through its evaluation otherwise. It reads contiguous operands,
    /// or with `strided` operands where they lie, by their strides.
    ///
    /// ```
    /// # fn main() -> consort::Result<()> {
    /// use consort::kernels::{Arg, Kernel};
    ///
    /// let mesh = consort::init()?;
    /// // For an op `my_copy` of one operand: its bytes as they lie.
    /// let run: consort::kernels::Run = |_cx, _op, args, results| {
    ///     if let ([Arg::View(x)], [y]) = (args, results) {
    ///         y.bytes.copy_from_slice(x.bytes);
    ///     }
    ///     Ok(())
    /// };
    /// mesh.add_kernel(Kernel { op: "my_copy", family: "mine", in_place: false, strided: false, run })?;
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn add_kernel(&self, kernel: Kernel) -> Result<()> {
        // By name, because a kernel has no op: kernels are found by it.
        if built_in(kernel.op).is_some() || self.world.cpu().kernel(kernel.op).is_some() {
            let got = ("an op without a kernel", format!("`{}`", kernel.op));
            return Err(Error::new("add_kernel", got, Location::caller()));
        }
        self.world.add_kernel(kernel);
        Ok(())
    }
}

fn group(world: Rc<World>, over: GroupName, op: &str, site: &'static Location<'static>) -> Result<Group> {
    let comm = world.group(over, site).map_err(|error| Error::comm(op, error, site))?;
    Ok(Group { world, over, comm, breaks: false })
}

/// The error of a mesh or a group that cannot be.
fn refused(error: mesh::MeshError, site: &'static Location<'static>) -> Error {
    Error::new("mesh", error.0.trim_start_matches("mesh: "), site)
}

/// The error of a split, with the ranks of each colour.
fn refused_split(error: mesh::MeshError, colours: &[Option<u32>], site: &'static Location<'static>) -> Error {
    let mut ranks: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (rank, colour) in colours.iter().enumerate() {
        colour.iter().for_each(|colour| ranks.entry(*colour).or_default().push(rank));
    }
    // More than a few colours say no more.
    let rows = ranks.iter().take(8).map(|(colour, ranks)| format!("colour {colour}: {}", ranks_text(ranks)));
    let note = "give each colour to the same number of ranks; a rank with `None` has no part in the group";
    let failure = Failure::new(error.0.trim_start_matches("mesh: ")).rows(rows).note(note);
    Error::of("mesh", failure, site)
}

fn lists_text(lists: &[Vec<Rank>]) -> String {
    let ranks: Vec<Vec<u32>> = lists.iter().map(|list| list.iter().map(|rank| rank.0).collect()).collect();
    format!("{ranks:?}")
}

/// The error of a group that was made in another way.
fn other_group(name: &str, made: &str, got: &str, site: &'static Location<'static>) -> Error {
    let failure = Failure::new((format!("{made}, of which `{name}` was made"), got.to_string()));
    Error::of("mesh", failure.note("give another group another name"), site)
}

impl Group {
    /// A number unique to this group in the mesh, equal on all ranks.
    pub(crate) fn id(&self) -> i128 {
        match self.over {
            GroupName::Axes(axes) => axes.iter().map(|axis| 1i128 << axis.0).sum::<i128>(),
            GroupName::List(id) => -1 - i128::from(id.0),
        }
    }

    /// The same group, with operations that are never compiled: each ends the graph, as [`uncompiled`](crate::uncompiled)
    /// does. Use it to measure what compiling them saves.
    ///
    /// ```
    /// use consort::{Reduce, Tensor, compile};
    ///
    /// let breaks = consort::spawn(2, |mesh| {
    ///     let group = mesh.uncompiled();
    ///     let f = compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum)?.exp());
    ///     assert_eq!(f.call(Tensor::from_iter([0.0f32])?)?.to_vec::<f32>()?, [1.0]);
    ///     Ok((f.stats().breaks, f.stats().graphs))
    /// });
    /// assert!(breaks.into_iter().all(|breaks| breaks.is_ok_and(|breaks| breaks == (1, 2))));
    /// ```
    #[must_use]
    pub fn uncompiled(&self) -> Group {
        Group { breaks: true, ..self.clone() }
    }

    /// Its name in programs: the `over` of ops that communicate over it.
    ///
    /// [`Group::apply`] has an example.
    pub fn name(&self) -> GroupName {
        self.over
    }

    /// How many ranks it has.
    ///
    /// [`Group`] has an example.
    pub fn size(&self) -> usize {
        self.world.mesh().group_size(self.over) as usize
    }

    /// This rank's place in it, as a symbol: sizes and starts that depend on it are known to vary between ranks.
    ///
    /// [`Group`] has an example.
    pub fn rank(&self) -> Index {
        let mesh = self.world.mesh();
        Index(match self.over {
            GroupName::Axes(axes) => axes.iter().fold(ir::Index::constant(0), |at, axis| {
                &(&at * &ir::Index::from(i64::from(mesh.axis_size(axis)))) + &ir::Index::sym(Sym::Rank(axis))
            }),
            GroupName::List(id) => ir::Index::sym(Sym::GroupRank(id)),
        })
    }

    /// This rank's place in it, as a number. Not inside a compiled function, whose program is the same on all ranks:
    /// there [`rank`](Group::rank) is a symbol.
    ///
    /// ```
    /// use consort::{Tensor, compile};
    ///
    /// let places = consort::spawn(2, |mesh| {
    ///     let group = mesh.clone();
    ///     let wrong = compile(move |x: Tensor| x.add(group.my_rank()? as f64));
    ///     let error = wrong.call(Tensor::scalar(1.0f32)?).map(drop).unwrap_err().to_string();
    ///     assert!(error.contains("note: use `rank()`"), "{error}");
    ///     mesh.my_rank()
    /// });
    /// assert_eq!(places.into_iter().flatten().collect::<Vec<_>>(), [0, 1]);
    /// ```
    #[track_caller]
    pub fn my_rank(&self) -> Result<usize> {
        let site = Location::caller();
        if is_tracing() {
            let headline = ("a number that is the same on all ranks", "one that depends on the rank");
            let note = "use `rank()`, a symbol: starts, sizes and peers may depend on it, and `Tensor::index` makes a \
                        tensor of it";
            return Err(Error::of("my_rank", Failure::new(headline).note(note), site));
        }
        let place = self.world.mesh().group_rank(self.over, self.world.rank);
        let none =
            || Error::new("my_rank", ("a member of the group", "a rank that is in none of its lists"), site);
        place.map(|place| place as usize).ok_or_else(none)
    }

    /// The underlying group with operations on buffers; `None` if there are only shapes, or if this rank is no member.
    pub fn raw(&self) -> Option<&consort_comm::Group> {
        self.comm.as_ref()
    }

    /// Whether this rank is in it. All are in a group of axes.
    ///
    /// [`Group`] has an example.
    pub fn has_me(&self) -> bool {
        self.world.mesh().group_rank(self.over, self.world.rank).is_some()
    }

    /// The number of its operations that have not been waited for.
    ///
    /// [`Group`] has an example.
    pub fn in_flight(&self) -> usize {
        self.comm.as_ref().map_or(0, |comm| comm.in_flight())
    }

    /// Advances pending operations; never blocks.
    ///
    /// [`Group`] has an example.
    #[track_caller]
    pub fn poll(&self) -> Result<()> {
        let Some(comm) = &self.comm else { return Ok(()) };
        comm.poll().map_err(|error| Error::comm("poll", error, Location::caller()))
    }
}
