//! Runs jobs on ranks that are processes: under the launcher, which lets them share memory, and under every mpirun of this
//! machine, over MPI. The ranks are the test program itself, which has no test harness, since the launcher needs a program
//! that it can enter, and MPI is started once in a process.

mod mpirun;

use std::ffi::OsString;
use std::io::{stderr, stdout};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use consort::{Init, Mesh};
use consort_comm::launch::{Options, Orphans, Sink, enter, launch};
use mpirun::mpiruns;

const ENTRY: &str = "__entry";
const RANK: &str = "__rank";
/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(300);

/// Ranks of one start, and what they do.
pub(crate) struct Job {
    pub(crate) name: &'static str,
    pub(crate) ranks: usize,
    /// None: one axis over all ranks.
    pub(crate) axes: &'static [(&'static str, usize)],
    /// Whether it runs over MPI too.
    pub(crate) over_mpi: bool,
    /// Is given the job's name.
    pub(crate) run: fn(Mesh, &str),
}

/// The whole of a test program.
pub(crate) fn run(jobs: &[Job]) {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.split_first() {
        Some((first, rest)) if first == ENTRY => enter(rest).unwrap(),
        Some((first, rest)) if first == RANK => {
            let job = jobs.iter().find(|job| rest == [job.name]).unwrap();
            let mesh = Init::new().axes(job.axes).start().unwrap();
            assert_eq!(mesh.size(), job.ranks);
            (job.run)(mesh, job.name);
        }
        _ => run_all(jobs),
    }
}

fn run_all(jobs: &[Job]) {
    for job in jobs {
        let start = Instant::now();
        share_memory(job);
        println!("{} on {} processes: {:?}", job.name, job.ranks, start.elapsed());
    }
    for mpirun in mpiruns() {
        for job in jobs.iter().filter(|job| job.over_mpi) {
            let start = Instant::now();
            over_mpi(mpirun, job);
            println!("{} over MPI, {mpirun}, {} ranks: {:?}", job.name, job.ranks, start.elapsed());
        }
    }
}

fn over_mpi(mpirun: &str, job: &Job) {
    let start = Instant::now();
    let words = mpirun.replace("{ranks}", &job.ranks.to_string());
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words).arg(std::env::current_exe().unwrap()).args([RANK, job.name]).stdin(Stdio::null());
    // Envelopes of compiled calls differ where eager calls are compared: both are tried.
    let check = if job.ranks == 4 { "0" } else { "1" };
    command.env("CONSORT_ENGINE", "mpi").env("CONSORT_DEADLINE", "60").env("CONSORT_CHECK", check);
    let mut child = command.spawn().unwrap();
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{command:?}: {status}");
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    panic!("{command:?}: still running after {LIMIT:?}");
}

fn share_memory(job: &Job) {
    let program = vec![std::env::current_exe().unwrap().into(), RANK.into(), job.name.into()];
    let entry = vec!["/proc/self/exe".into(), ENTRY.into()];
    let options = Options::new(job.ranks, program, entry, LIMIT);
    let _orphans = Orphans::adopt().unwrap();
    let outcome = launch(&options, Sink::new(stdout()), Sink::new(stderr())).unwrap();
    assert_eq!(outcome.code, 0, "{} on {} ranks: {}", job.name, job.ranks, outcome.summary);
}
