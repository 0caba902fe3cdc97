//! How a process or thread becomes a rank: `init`, `spawn` and their settings.

use std::panic::Location;
use std::time::Duration;

use consort_ir::mesh;
use consort_runtime::kernels::isa::{check_isa, isa};
use consort_types::{Axes, Failure, GroupName};

use crate::compile::{check_log, is_retraced};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::world::{HEAP, World};

/// How this process becomes a rank: axes of the mesh, size of the heap, how long to wait.
///
/// ```
/// use std::time::Duration;
///
/// # fn main() -> consort::Result<()> {
/// let mesh = consort::Init::new().heap(1 << 30).timeout(Duration::from_secs(5)).start()?;
/// assert_eq!(mesh.size(), 1); // Started alone, a program is a world of one.
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Init {
    axes: Vec<(String, usize)>,
    heap: usize,
    timeout: Option<Duration>,
    strict: Option<bool>,
}

impl Default for Init {
    fn default() -> Init {
        Init::new()
    }
}

impl Init {
    /// One axis, `world`, over all ranks, also if there is only one.
    ///
    /// [`Init`] has an example.
    pub fn new() -> Init {
        Init { axes: Vec::new(), heap: HEAP, timeout: None, strict: None }
    }

    /// Named axes with their sizes, outermost first: neighbouring ranks are neighbours along the last axis. Together they
    /// have as many ranks as there are. One size may be 0: it becomes what the others leave, and so may be 1.
    ///
    /// ```
    /// let init = consort::Init::new().axes(&[("dp", 0), ("tp", 2)]);
    /// let places = init.spawn(6, |mesh| Ok((mesh.axis("dp")?.my_rank()?, mesh.axis("tp")?.my_rank()?)));
    /// let places: Vec<_> = places.into_iter().flatten().collect();
    /// assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
    /// ```
    #[must_use]
    pub fn axes(mut self, axes: &[(&str, usize)]) -> Init {
        self.axes = axes.iter().map(|(name, size)| (name.to_string(), *size)).collect();
        self
    }

    /// Bytes of this rank's heap. Pages are allocated on first use.
    ///
    /// [`Init`] has an example.
    #[must_use]
    pub fn heap(mut self, bytes: usize) -> Init {
        self.heap = bytes;
        self
    }

    /// The deadline of operations that wait for other ranks, startup included. Without it, that of
    /// `consort run --deadline`, or else five minutes.
    ///
    /// [`Init`] has an example.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Init {
        self.timeout = Some(timeout);
        self
    }

    /// Whether the wait of a send needs its receive, however small the message is, so that a deadlock does not depend on
    /// sizes. Without it, as `CONSORT_STRICT` says (`0` or `1`), or else in debug builds only.
    ///
    /// ```
    /// use consort::{Init, Tensor};
    ///
    /// // Both send first, and would receive then: neither ever does.
    /// let results = Init::new().strict(true).spawn(2, |mesh| {
    ///     let other = 1 - mesh.my_rank()?;
    ///     mesh.isend(Tensor::from_iter([1i64])?, other, 0)?.wait()
    /// });
    /// assert!(results.into_iter().all(|result| result.is_err_and(|error| error.to_string().contains("deadlock"))));
    /// ```
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Init {
        self.strict = Some(strict);
        self
    }

    /// Connects with the other ranks that `consort run`, mpirun, srun or torchrun started. A process that was started
    /// alone is a world of one.
    ///
    /// [`Init`] has an example.
    #[track_caller]
    pub fn start(&self) -> Result<Mesh> {
        let site = Location::caller();
        let failed = |failure: Box<Failure>| Error::of("init", failure, site);
        let control = self.join().map_err(|error| failed(error.failure()))?;
        or_abort(&control, check_environment())?;
        let mesh = or_abort(&control, self.mesh(control.size()))?;
        self.check_parity(&mesh, &control).map_err(failed)?;
        let timeout = control.deadline();
        let all = control.group(self.heap, timeout).map_err(|error| error.failure());
        let all = or_abort(&control, all)?;
        self.mesh_of(mesh, all, Some(control), timeout, site)
    }

    /// Runs `f` on `n` ranks, each a thread of this process, and returns their results, in rank order. Each rank has its
    /// own error, and a program should look at all of them, as [`spawn`] shows. If a rank panics, the waits of the others
    /// fail, and the panic is resumed when all ranks have ended. If the ranks cannot be started, because they are more than
    /// 1024 or the machine does not have the memory, one error is returned.
    ///
    /// ```
    /// use consort::{Init, Reduce, Tensor};
    ///
    /// let sums = Init::new().spawn(3, |mesh| {
    ///     let x = Tensor::from_slice(&[mesh.my_rank()? as f32], &[1])?;
    ///     mesh.all_reduce(x, Reduce::Sum)?.item::<f32>()
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 3.0)));
    /// ```
    #[track_caller]
    pub fn spawn<T: Send>(&self, n: usize, f: impl Fn(Mesh) -> Result<T> + Sync) -> Vec<Result<T>> {
        let site = Location::caller();
        let failed = |failure| Error::of("spawn", failure, site);
        let outcomes = consort_comm::try_spawn(n, self.heap, |all| {
            check_environment().map_err(failed)?;
            let mesh = self.mesh(n).map_err(failed)?;
            let timeout = self.timeout.unwrap_or(consort_comm::DEFAULT_DEADLINE);
            let outcome = f(self.mesh_of(mesh, all, None, timeout, site)?);
            // The mesh has been dropped, and with it all pending operations.
            match (consort_comm::take_unseen().into_iter().next(), outcome) {
                (Some(unseen), Ok(_)) => Err(Error::of("spawn", Box::new(unseen), site)),
                (_, outcome) => outcome,
            }
        });
        outcomes.unwrap_or_else(|failure| vec![Err(failed(failure))])
    }

    /// Fails on every rank if they differ in what changes results or behaviour, besides their version.
    #[track_caller]
    fn check_parity(&self, mesh: &mesh::Mesh, control: &consort_comm::World) -> Result<(), Box<Failure>> {
        let axes: Vec<String> = mesh.axes().iter().map(|(name, size)| format!("{name}: {size}")).collect();
        let settings = Settings {
            mesh: axes.join(", "),
            is_debug: cfg!(debug_assertions),
            has_ndarray: cfg!(feature = "ndarray"),
            isa: isa().name(),
            is_strict: self.strict.unwrap_or_else(consort_comm::is_strict),
            is_retraced: is_retraced(),
        };
        control.parity_of(&settings.pairs()).map_err(|error| {
            let failure = error.failure();
            match failure.rows.iter().any(|row| row.contains("CONSORT_ISA")) {
                true => failure
                    .note("CONSORT_ISA=avx2 or CONSORT_ISA=baseline on every rank makes machines alike"),
                false => failure,
            }
        })
    }

    /// Connects with the other ranks.
    #[track_caller]
    fn join(&self) -> std::result::Result<consort_comm::World, consort_comm::InitError> {
        let launch = consort_comm::env::Launch::from_env().map_err(consort_comm::InitError::Env)?;
        let deadline = self.timeout.or(launch.deadline).unwrap_or(consort_comm::DEFAULT_DEADLINE);
        consort_comm::World::join(&launch, deadline)
    }

    fn mesh(&self, ranks: usize) -> Result<mesh::Mesh, Box<Failure>> {
        let axes = match &self.axes[..] {
            [] => vec![("world".to_string(), ranks)],
            axes => axes.to_vec(),
        };
        let known = axes.iter().filter(|(_, size)| *size > 0);
        let known = known.fold(1, |n: usize, (_, size)| n.saturating_mul(*size));
        let fits = match axes.iter().filter(|(_, size)| *size == 0).count() {
            0 => ranks == known,
            1 => ranks.is_multiple_of(known),
            _ => false,
        };
        if !fits {
            let given: Vec<String> = axes.iter().map(|(name, size)| format!("{name}: {size}")).collect();
            let failure = Failure::new((
                format!("axes whose sizes multiply to {ranks}, the number of ranks"),
                format!("({})", given.join(", ")),
            ));
            return Err(failure.note("one size may be 0: it becomes what the others leave"));
        }
        let size = |size: usize| if size == 0 { ranks / known } else { size };
        let size = |given: usize| u32::try_from(size(given)).unwrap_or(u32::MAX);
        mesh::Mesh::new(axes.into_iter().map(|(name, given)| (name, size(given))))
            .map_err(|error| Failure::new(error.0))
    }

    fn mesh_of(
        &self,
        mesh: mesh::Mesh,
        all: consort_comm::Group,
        control: Option<consort_comm::World>,
        timeout: Duration,
        site: &'static Location<'static>,
    ) -> Result<Mesh> {
        if let Some(strict) = self.strict {
            all.set_strict(strict);
        }
        let world = World::join(mesh, all, control);
        world.set_timeout(timeout);
        // The groups of single axes are created here, so that asking for one needs no agreement of all ranks.
        let axes = world.mesh().all_axes();
        for axis in axes.iter() {
            let group = world.group(GroupName::Axes(Axes::one(axis)), site);
            group.map_err(|error| Error::comm("init", error, site))?;
        }
        Mesh::new(world, site)
    }
}

/// What changes results or behaviour, besides the version: it must be the same on every rank.
#[derive(Clone)]
struct Settings {
    mesh: String,
    is_debug: bool,
    has_ndarray: bool,
    isa: &'static str,
    is_strict: bool,
    is_retraced: bool,
}

impl Settings {
    /// Keys and values, as the ranks compare them.
    fn pairs(&self) -> [(&'static str, &str); 6] {
        let on = |on: bool| if on { "on" } else { "off" };
        [
            ("mesh", &self.mesh[..]),
            ("build", if self.is_debug { "debug" } else { "release" }),
            ("features", if self.has_ndarray { "ndarray" } else { "none" }),
            ("instruction set (CONSORT_ISA)", self.isa),
            ("strict messages (CONSORT_STRICT)", on(self.is_strict)),
            ("retraces (CONSORT_RETRACE)", on(self.is_retraced)),
        ]
    }
}

/// The outcome of a part of start-up. The others wait for this rank, so they hear why it failed.
#[track_caller]
fn or_abort<T>(world: &consort_comm::World, outcome: Result<T, Box<Failure>>) -> Result<T> {
    match outcome {
        Ok(value) => Ok(value),
        Err(failure) => {
            world.abort(&failure.title());
            Err(Error::of("init", failure, Location::caller()))
        }
    }
}

/// Fails if the environment asks for something that does not exist.
fn check_environment() -> Result<(), Box<Failure>> {
    check_log()?;
    check_isa()
}

/// Connects with the other ranks, as [`Init::start`] does; all of them are one axis, `world`.
///
/// ```
/// # fn main() -> consort::Result<()> {
/// let mesh = consort::init()?;
/// println!("one of {} ranks", mesh.size());
/// assert_eq!(mesh.axis("world")?.size(), mesh.size()); // Also in a world of one.
/// # Ok(()) }
/// ```
#[track_caller]
pub fn init() -> Result<Mesh> {
    Init::new().start()
}

/// Runs `f` on `n` ranks that are threads, as [`Init::spawn`] does. A program that prints the error of every rank, and
/// fails if there is one:
///
/// ```
/// use std::process::ExitCode;
///
/// use consort::{Mesh, Reduce, Result, Tensor};
///
/// fn rank(mesh: Mesh) -> Result<()> {
///     let x = Tensor::ones(consort::Dtype::F32, &[mesh.my_rank()? + 1])?; // Every rank has another size.
///     println!("{}", mesh.all_reduce(x, Reduce::Sum)?);
///     Ok(())
/// }
///
/// fn run() -> ExitCode {
///     let mut code = ExitCode::SUCCESS;
///     for (rank, outcome) in consort::spawn(2, rank).into_iter().enumerate() {
///         if let Err(error) = outcome {
///             eprintln!("[{rank}] {error}"); // all_reduce: call 0 on world: .. must be the same on all ranks
///             code = ExitCode::FAILURE;
///         }
///     }
///     code
/// }
/// # assert_eq!(format!("{:?}", run()), format!("{:?}", ExitCode::FAILURE));
/// ```
#[track_caller]
pub fn spawn<T: Send>(n: usize, f: impl Fn(Mesh) -> Result<T> + Sync) -> Vec<Result<T>> {
    Init::new().spawn(n, f)
}

#[cfg(test)]
mod tests {
    use super::Settings;

    #[test]
    fn a_debug_build_with_ndarray_differs_from_a_release_build_without_in_two_settings() {
        let debug = Settings {
            mesh: "dp: 2, tp: 1".to_string(),
            is_debug: true,
            has_ndarray: true,
            isa: "avx2",
            is_strict: false,
            is_retraced: true,
        };
        let release = Settings { is_debug: false, has_ndarray: false, ..debug.clone() };
        let (ours, theirs) = (debug.pairs(), release.pairs());
        assert!(ours.iter().zip(&theirs).all(|((key, _), (other, _))| key == other));
        let differing = ours.iter().zip(&theirs).filter(|(own, other)| own != other);
        let differing: Vec<_> = differing.map(|((key, own), (_, other))| (*key, *own, *other)).collect();
        assert_eq!(differing, [("build", "debug", "release"), ("features", "ndarray", "none")]);
    }

    #[test]
    fn each_setting_is_one_of_the_pairs() {
        let plain = Settings {
            mesh: "world: 2".to_string(),
            is_debug: false,
            has_ndarray: false,
            isa: "baseline",
            is_strict: false,
            is_retraced: false,
        };
        let others = [
            Settings { mesh: "dp: 2".to_string(), ..plain.clone() },
            Settings { is_debug: true, ..plain.clone() },
            Settings { has_ndarray: true, ..plain.clone() },
            Settings { isa: "avx2", ..plain.clone() },
            Settings { is_strict: true, ..plain.clone() },
            Settings { is_retraced: true, ..plain.clone() },
        ];
        for (at, other) in others.iter().enumerate() {
            let (plain, other) = (plain.pairs(), other.pairs());
            let differing: Vec<usize> = (0..plain.len()).filter(|i| plain[*i] != other[*i]).collect();
            assert_eq!(differing, [at]);
        }
    }
}
