//! How the processes that mpirun or srun started become ranks: over shared memory on one host, otherwise over MPI.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consort_types::Failure;

use crate::CommError;
use crate::deadline::from_now;
use crate::env::Transport;
use crate::group::Group;
use crate::job::{Job, Secret};
use crate::limits::way_out;
use crate::mpi::calls::Mpi;
use crate::mpi::comm::Comm;
use crate::mpi::engine::MpiGroup;
use crate::mpi::job::Job as MpiJob;
use crate::mpi::options::Options;
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::layout::{prepare, reserved};
use crate::shm::segment::Segment;

/// How the ranks are connected.
pub(crate) enum Connected {
    /// There is one.
    Alone,
    /// All are on one host, and share this job there.
    OneHost(Job),
    /// Over MPI.
    Mpi(Rc<MpiJob>),
}

/// Starts MPI with the ranks of the launcher, and connects them.
pub(crate) fn connect(
    launched: usize,
    transport: Transport,
    deadline: Duration,
) -> Result<Connected, CommError> {
    let until = from_now(deadline);
    let left = || until.saturating_duration_since(Instant::now());
    let mpi = Mpi::start(launched, deadline)?;
    let options = Options::from_env();
    let all = MpiJob::new(Rc::clone(&mpi), options.clone().unwrap_or_default(), (deadline, left()))?;
    let local = Comm::world(&mpi)?.split_by_host(left())?;
    // Only now, since nobody hears of an error in a call that blocks.
    if let Err(error) = options {
        all.give_up(&super::failure::cause(all.rank(), &error));
        return Err(error);
    }
    let is_one_host = local.size() == launched;
    if is_one_host && transport != Transport::Mpi {
        let made = if all.rank() == 0 { Some(made_job()?) } else { None };
        let first = all.exchange("init", &made, left())?.into_iter().next().flatten();
        let job = first.and_then(|(name, secret)| Some(Job { name, secret: Secret::from_hex(&secret)? }));
        // This is all that is asked of MPI: it ends with the last handle.
        return Ok(Connected::OneHost(job.ok_or_else(|| machine("rank 0 made no job", String::new()))?));
    }
    if transport == Transport::Shm {
        let headline = ("all ranks on one host, as CONSORT_ENGINE=shm asks for", "several hosts");
        let failure = Failure::new(headline).note("unset CONSORT_ENGINE, or start all ranks on one host");
        return Err(CommError::Argument(failure));
    }
    all.share_cores(&local, until)?;
    local.free()?;
    Ok(Connected::Mpi(all))
}

/// A job for the ranks of one host: its name and its secret.
fn made_job() -> Result<(String, String), CommError> {
    let job =
        Job::random().map_err(|error| machine(&format!("no random numbers: {error}"), way_out(&error)))?;
    Ok((job.name, job.secret.to_hex()))
}

fn machine(what: &str, note: String) -> CommError {
    CommError::Machine(Failure::new(what.to_string()).note(note))
}

/// The group of all ranks, over MPI.
pub(crate) fn group(
    job: &Rc<MpiJob>,
    heap: usize,
    name: &str,
    deadline: Duration,
) -> Result<Group, CommError> {
    let segment = heap
        .checked_add(reserved(1))
        .ok_or(std::io::ErrorKind::OutOfMemory.into())
        .and_then(Segment::private);
    let segment = segment
        .map_err(|error| machine(&format!("a heap of {heap} bytes: {error}"), way_out(&error)))
        .inspect_err(|error| job.give_up(&super::failure::cause(job.rank(), error)))?;
    let alarm = Arc::new(Alarm::default());
    let (heap, recorder) = prepare(&[Arc::new(segment)], 0, &alarm, job.cores(), name);
    let shared = (heap, recorder, Rc::new(Settings::new(deadline, true)));
    let data = job.world().dup(deadline)?;
    let ranks = (0..data.size()).collect();
    Ok(Group::new(MpiGroup::of_comm(job, data, ranks, shared, deadline)?))
}
