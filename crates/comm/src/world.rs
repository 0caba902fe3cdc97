//! `init`: a process becomes a rank of its world.

use std::error::Error;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use consort_types::Failure;

use crate::CommError;
use crate::cause::Cause;
use crate::control::{Control, ControlError, Coordinator};
use crate::deadline::DEFAULT_DEADLINE;
use crate::env::{EnvError, Launch, Launcher, Transport};
use crate::flight_record::FlightRecord;
use crate::job::Job;
use crate::limits::way_out;
use crate::mpi::job::Job as MpiJob;
use crate::mpi::world::{Connected, connect};

/// The ranks of a job, seen from one of them. Dropping it says goodbye; dropping it in a panic tells the
/// others of the panic.
#[derive(Debug)]
pub struct World {
    rank: usize,
    size: usize,
    local_rank: usize,
    /// The deadline of the join, and of calls that name none.
    deadline: Duration,
    /// The control plane; `None` in a world of one, and over MPI.
    control: Option<Control>,
    /// The connection over MPI, if data move over it.
    mpi: Option<Rc<MpiJob>>,
    /// How many groups of all ranks were made.
    groups: AtomicUsize,
    /// Rank 0 runs the coordinator if no launcher does. Dropped after `control`, whose goodbye it must receive.
    coordinator: Option<Coordinator>,
}

/// Reads the environment that the launcher set, connects with the other ranks, waits for all of them, and checks that
/// all run the same version. A process that was started alone is a world of one. The deadline is that of the
/// environment ([`Launch::deadline`]), or else [`DEFAULT_DEADLINE`].
#[track_caller]
pub fn init() -> Result<World, InitError> {
    let launch = Launch::from_env().map_err(InitError::Env)?;
    World::join(&launch, launch.deadline.unwrap_or(DEFAULT_DEADLINE))
}

impl World {
    /// Joins the world that a launch describes, within a deadline that is also the default of later calls.
    #[track_caller]
    pub fn join(launch: &Launch, deadline: Duration) -> Result<World, InitError> {
        let Launch { rank, size, local_rank, by, ref job, .. } = *launch;
        let transport = Transport::from_env().map_err(InitError::Env)?;
        let connected = match (job, by) {
            (Some(job), _) if transport != Transport::Mpi => Connected::OneHost(job.clone()),
            (_, Launcher::Consort | Launcher::Torchrun) if transport == Transport::Mpi => {
                return Err(InitError::NoMpi { by });
            }
            _ if size == 1 && transport != Transport::Mpi => Connected::Alone,
            (_, Launcher::Consort | Launcher::Torchrun | Launcher::Alone) if size > 1 => {
                return Err(InitError::NoJob { rank, size });
            }
            _ => connect(size, transport, deadline).map_err(InitError::Mpi)?,
        };
        let mut world = World {
            rank,
            size,
            local_rank,
            deadline,
            control: None,
            mpi: None,
            groups: AtomicUsize::new(0),
            coordinator: None,
        };
        let job = match connected {
            Connected::Alone => return Ok(world),
            Connected::OneHost(job) => job,
            Connected::Mpi(mpi) => {
                (world.rank, world.local_rank) = (mpi.rank(), mpi.local_rank());
                world.mpi = Some(mpi);
                world.check_version()?;
                return Ok(world);
            }
        };
        let job = &job;
        world.coordinator = if rank == 0 { serve(job, size, by)? } else { None };
        let control = Control::connect(job, rank, size, deadline).map_err(InitError::Control)?;
        control.rendezvous(&[], None, deadline).map_err(InitError::Control)?;
        world.control = Some(control);
        world.check_version()?;
        Ok(world)
    }

    fn check_version(&self) -> Result<(), InitError> {
        let of_mpi = self.mpi.as_ref().map(|job| job.options().settings());
        let mut settings = vec![("consort version", env!("CARGO_PKG_VERSION"))];
        settings.extend(of_mpi.iter().flatten().map(|(key, value)| (*key, value.as_str())));
        self.parity_of(&settings).map_err(InitError::Control)
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// This rank among those on its host, from 0.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The deadline of calls that name none: that of the join.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The control plane; `None` in a world of one, and over MPI.
    pub fn control(&self) -> Option<&Control> {
        self.control.as_ref()
    }

    /// The version of the MPI library that moves the data, if one does.
    pub fn mpi(&self) -> Option<&str> {
        self.mpi.as_ref().map(|job| job.library())
    }

    /// The connection over MPI.
    pub(crate) fn mpi_job(&self) -> Option<&Rc<MpiJob>> {
        self.mpi.as_ref()
    }

    /// Tells the other ranks that this one gives up.
    #[track_caller]
    pub fn abort(&self, reason: &str) {
        if let Some(control) = &self.control {
            control.abort(reason);
        }
        if let Some(job) = &self.mpi {
            job.give_up(&Cause::new(self.rank, Failure::new(reason.to_string()), vec![self.rank]));
        }
    }

    /// What the flight recorders of all ranks hold, even of dead or stuck ranks, if this rank runs the coordinator:
    /// rank 0 under a launcher other than `consort run`. Every rank can ask its group for the same
    /// ([`Group::flight_record`](crate::Group::flight_record)).
    pub fn flight_record(&self) -> Option<FlightRecord> {
        self.coordinator.as_ref().map(Coordinator::flight_record)
    }

    /// The name of the next group of all ranks, the same on all of them: `world`, `world#2`.
    pub(crate) fn name_group(&self) -> String {
        match self.groups.fetch_add(1, Ordering::Relaxed) {
            0 => "world".to_string(),
            before => format!("world#{}", before + 1),
        }
    }

    /// Checks that a setting has the same value on every rank: an error on all of them if not, or if not all have
    /// arrived within the deadline of this world.
    #[track_caller]
    pub fn parity(&self, key: &str, value: &str) -> Result<(), ControlError> {
        self.parity_of(&[(key, value)])
    }

    /// The same for several settings at once.
    #[track_caller]
    pub fn parity_of(&self, pairs: &[(&str, &str)]) -> Result<(), ControlError> {
        match (&self.control, &self.mpi) {
            (Some(control), _) => control.parity(pairs, self.deadline),
            (None, Some(job)) => job.parity("parity", pairs, self.deadline),
            (None, None) => Ok(()),
        }
    }

    /// Blocks until all ranks have arrived at the barrier of this name.
    #[track_caller]
    pub fn barrier(&self, name: &str, deadline: Duration) -> Result<(), ControlError> {
        match (&self.control, &self.mpi) {
            (Some(control), _) => control.barrier(name, deadline),
            (None, Some(job)) => job.parity("barrier", &[("the name of the barrier", name)], deadline),
            (None, None) => Ok(()),
        }
    }
}

/// Starts the coordinator on rank 0, unless `consort run` does, which binds the job's socket before it starts a rank.
/// Its variables may also have been set by hand.
fn serve(job: &Job, size: usize, by: Launcher) -> Result<Option<Coordinator>, InitError> {
    let error = match Coordinator::start(job, size, false) {
        Ok(coordinator) => return Ok(Some(coordinator)),
        Err(error) => error,
    };
    let note = match error.kind() {
        io::ErrorKind::AddrInUse if by == Launcher::Consort => return Ok(None),
        io::ErrorKind::AddrInUse => "CONSORT_JOB must be unique on this host".to_string(),
        _ => way_out(&error),
    };
    Err(InitError::Coordinator { error: error.to_string(), note })
}

impl Drop for World {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        // The panic's own message says where.
        if let Some(control) = &self.control {
            control.abort_at("it panicked", String::new());
        }
        if let Some(job) = &self.mpi {
            job.give_up(&Cause::new(
                self.rank,
                CommError::Panicked { rank: self.rank }.failure(),
                vec![self.rank],
            ));
        }
    }
}

/// Why a process did not become a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitError {
    /// The environment does not say which rank it is.
    Env(EnvError),
    /// There are other ranks, but the environment does not say how to reach them.
    NoJob {
        /// This rank.
        rank: usize,
        /// How many there are.
        size: usize,
    },
    /// Rank 0 could not start the coordinator.
    Coordinator {
        /// The system's error.
        error: String,
        /// What to do about it.
        note: String,
    },
    /// `CONSORT_ENGINE` asks for MPI, and the launcher has none.
    NoMpi {
        /// The launcher.
        by: Launcher,
    },
    /// MPI cannot be used.
    Mpi(CommError),
    /// Joining the other ranks failed.
    Control(ControlError),
}

impl InitError {
    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        match self {
            InitError::Env(error) => error.failure(),
            InitError::NoJob { rank, size } => {
                let expected = format!("CONSORT_JOB and CONSORT_SECRET for rank {rank} of {size}");
                Failure::new((expected, "neither"))
                    .of("init")
                    .note("start with `consort run`, mpirun or srun; or export both, alike for all ranks, before torchrun")
            }
            InitError::Coordinator { error, note } => {
                Failure::new(format!("rank 0 cannot serve the other ranks: {error}"))
                    .of("init")
                    .note(note.clone())
            }
            InitError::NoMpi { by } => {
                let by = if *by == Launcher::Torchrun { "torchrun" } else { "consort run" };
                let headline = ("a launcher with MPI, as CONSORT_ENGINE=mpi asks for", by);
                Failure::new(headline).of("init").note("start with mpirun or srun, or unset CONSORT_ENGINE")
            }
            InitError::Mpi(error) => error.failure().of("init"),
            InitError::Control(error) => error.failure(),
        }
    }
}

impl fmt::Display for InitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl Error for InitError {}
