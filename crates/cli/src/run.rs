//! `consort run -n N -- PROGRAM ARGS`: runs a program as the ranks of a job on this host.

use std::ffi::OsString;
use std::fs::File;
use std::io::{stderr, stdout};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use consort_comm::launch::{LaunchError, Options, Orphans, Outcome, Sink, enter, forward_signals, launch};

use crate::report::{Machine, Report, wrong};
use crate::run_hosts;

const EXAMPLES: &str = "\
Each line of the ranks' output is prefixed with its rank: `[2] loss 0.1`. Their standard input is empty.
When a rank fails, the others are told and have a grace period (--grace, 2 seconds) to exit; then they get a
SIGTERM, and after another grace period a SIGKILL. The same applies to ranks that do not exit after a signal.
The report then shows the last operation of each rank and the first call in which ranks diverged, read from
their flight recorders, which outlive them; its last line names the first failure. SIGUSR1 to this command
prints the same for a running job, which continues, and is not forwarded. SIGINT, SIGTERM, SIGHUP and SIGQUIT
are forwarded to the ranks; a second SIGINT kills them. Processes that ranks have started end with the job, even
if this command is killed.

The exit code is 0 if all ranks exit with 0, else that of the rank that failed first: its own, or 128 plus the
signal that killed it; 124 after --timeout; 1 or 2 if the job could not be started.

Examples:
  consort run -n 4 -- ./train --steps 100     four ranks on this host
  consort run -n 2 --tee logs -- ./train      also writes logs/rank-0.out, logs/rank-0.err, ..
  consort run -n 4 --only 0 -- ./train        prints the standard output of rank 0 alone
  consort run -n 2 --timeout 60 -- ./train    stops the job after a minute
  consort run -n 2 --deadline 10 -- ./train   a call that waits 10 seconds for another rank fails
  consort run --hosts a:2,b:2 -- ./train      four ranks on two hosts, started by mpirun: docs/hosts.md
  consort run -n 2 --flight f.jsonl -- ./train   on a failure or SIGUSR1, all recorded events as JSON lines";

/// Run a program as the ranks of a job on this host
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of ranks
    #[arg(short = 'n', value_name = "N", required_unless_present = "hosts")]
    ranks: Option<usize>,
    /// Run on several hosts, with so many ranks on each: `a:2,b:2`. The mpirun of this host starts them
    #[arg(long, value_name = "HOSTS", conflicts_with_all = ["ranks", "tee", "flight", "timeout", "grace"])]
    hosts: Option<String>,
    /// Also write each rank's output to DIR/rank-N.out and DIR/rank-N.err
    #[arg(long, value_name = "DIR")]
    tee: Option<PathBuf>,
    /// Print the standard output of rank N alone; the standard errors of all ranks are printed
    #[arg(long, value_name = "N")]
    only: Option<usize>,
    /// Write the flight recorders of all ranks to FILE as JSON lines, on a failure and on SIGUSR1
    #[arg(long, value_name = "FILE")]
    flight: Option<PathBuf>,
    /// Stop the job after SECS seconds
    #[arg(long, value_name = "SECS")]
    timeout: Option<f64>,
    /// Deadline of calls that wait for other ranks and set none themselves [default: 300]
    #[arg(long, value_name = "SECS")]
    deadline: Option<f64>,
    /// How long ranks may take to exit after a failure or a signal
    #[arg(long, value_name = "SECS", default_value_t = 2.0)]
    grace: f64,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// The first argument of a process that becomes a watcher or a rank. It is not for users.
pub(crate) const ENTRY: &str = "__rank";

/// How long ranks may take to end by default.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// How long the processes of a subcommand may take to end after a signal: a launcher among them gives its ranks two
/// grace periods.
const CHILDREN_GRACE: Duration = Duration::from_secs(6);

/// Runs a subcommand that starts launchers and other programs: they end with it, also after a signal.
pub(crate) fn forwarding(
    name: &'static str,
    work: impl FnOnce() -> anyhow::Result<Report>,
) -> anyhow::Result<Report> {
    forward_signals(CHILDREN_GRACE, work)
        .map_err(|error| Machine(format!("{name}: cannot forward signals: {error}")))?
        .unwrap_or_else(|interrupted| Err(anyhow::Error::new(interrupted).context(name)))
}

/// The command for `Options::entry`. Not the path of this program, which may have been replaced since it started.
pub(crate) fn entry() -> Vec<OsString> {
    vec!["/proc/self/exe".into(), ENTRY.into()]
}

/// Runs the subcommand. The ranks' output does not wait for the report.
pub(crate) fn run(args: Args) -> anyhow::Result<Report> {
    let deadline = seconds("deadline", args.deadline)?;
    if let Some(hosts) = &args.hosts {
        return run_hosts::run(hosts, args.only, deadline, &args.program);
    }
    let (ranks, timeout) = (args.ranks.unwrap_or(0), seconds("timeout", args.timeout)?);
    check_only(args.only, ranks)?;
    let options = Options {
        ranks,
        program: args.program,
        entry: entry(),
        tee: args.tee,
        only: args.only,
        flight: args.flight,
        timeout,
        grace: seconds("grace", Some(args.grace))?.unwrap_or(GRACE),
        deadline,
    };
    let outcome = launch_alone(&options, sink(stdout())?, sink(stderr())?)?;
    Ok(Report { text: String::new(), notes: outcome.summary, code: outcome.code })
}

/// Fails if the rank whose output is printed is none of the job's.
pub(crate) fn check_only(only: Option<usize>, ranks: usize) -> anyhow::Result<()> {
    if let Some(only) = only.filter(|only| *only >= ranks) {
        bail!(wrong("run: --only", format!("a rank below {ranks}"), only));
    }
    Ok(())
}

/// The seconds of an option.
fn seconds(option: &str, given: Option<f64>) -> anyhow::Result<Option<Duration>> {
    match given.map(Duration::try_from_secs_f64) {
        Some(Ok(duration)) if !duration.is_zero() => Ok(Some(duration)),
        None => Ok(None),
        _ => bail!(wrong(format!("run: --{option}"), "a number of seconds above 0", given.unwrap_or(0.0))),
    }
}

/// Runs a job in this process, which has no other children: it ends all processes that the job leaves behind.
pub(crate) fn launch_alone(options: &Options, out: Sink, err: Sink) -> anyhow::Result<Outcome> {
    let orphans = Orphans::adopt();
    let _orphans = orphans.map_err(|error| Machine(format!("run: cannot adopt orphans: {error}")))?;
    launch(options, out, err).map_err(report_error)
}

/// A stream without the lock of this process, because a writer may be blocked in it while the job ends.
fn sink(stream: impl AsFd) -> anyhow::Result<Sink> {
    let copy = stream.as_fd().try_clone_to_owned();
    Ok(Sink::terminal(File::from(
        copy.map_err(|error| Machine(format!("run: cannot copy a stream: {error}")))?,
    )))
}

/// Becomes a watcher or a rank.
pub(crate) fn run_entry(arguments: &[OsString]) -> anyhow::Result<Report> {
    enter(arguments).map_err(report_error)?;
    Ok(Report::fine(String::new()))
}

fn report_error(error: LaunchError) -> anyhow::Error {
    if error.is_machine() { Machine(error.to_string()).into() } else { error.into() }
}
