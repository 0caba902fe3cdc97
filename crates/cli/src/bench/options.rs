//! The arguments of `consort bench comm`, and what they mean.

use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::ValueEnum;

use super::ops::Op;
use crate::mpirun::{RANKS, words};
use crate::report::wrong;

const EXAMPLES: &str = "\
Data are live: every iteration writes the whole input and reads the whole result, and the time of the same loop
without the operation is subtracted. The bound is a plain loop that moves the same bytes. See docs/bench.md.

Examples:
  consort bench comm --ops all_reduce --sizes 4,64k,16m
  consort bench comm --ranks 2,4,8 --json
  consort bench comm --peer 'mpirun --bind-to core -n {ranks} target/peer_mpi'   beside Open MPI
  consort bench comm --transport mpi --peer 'mpirun -n {ranks} target/peer_mpi'  over MPI, beside the same calls in C";

/// Measure communication on live data, against the bound of the machine and a peer
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CommArgs {
    /// Numbers of ranks, measured one after another
    #[arg(long, value_name = "N,..", default_value = "2")]
    ranks: String,
    /// Operations to measure [default: all]
    #[arg(long, value_name = "OP,..")]
    ops: Option<String>,
    /// Bytes of one block; k and m are KiB and MiB
    #[arg(long, value_name = "BYTES,..", default_value = "4,1k,64k,1m,16m,64m")]
    sizes: String,
    /// Time per figure; up to four times as long if samples are few
    #[arg(long, value_name = "SECS", default_value_t = 1.5)]
    seconds: f64,
    /// What moves the data
    #[arg(long, value_enum, default_value_t = Transport::Shm)]
    transport: Transport,
    /// With `--transport mpi`: the command that starts our ranks, split at spaces; {ranks} becomes their number
    #[arg(long, value_name = "COMMAND", default_value = MPIRUN)]
    mpirun: String,
    /// A command that starts the peer's ranks, split at spaces; {ranks} becomes their number, and the name of the
    /// socket they report to is appended
    #[arg(long, value_name = "COMMAND")]
    peer: Option<String>,
    /// Cores are near if one cache line takes less than this one way
    #[arg(long, value_name = "US", default_value_t = 0.1)]
    near: f64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Processes that share memory
    Shm,
    /// Threads of one process
    Local,
    /// Processes over MPI
    Mpi,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Local => "local",
            Transport::Mpi => "mpi",
        }
    }
}

/// What to measure.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) ranks: Vec<usize>,
    pub(crate) ops: Vec<Op>,
    pub(crate) sizes: Vec<usize>,
    pub(crate) time: Duration,
    pub(crate) transport: Transport,
    pub(crate) mpirun: String,
    pub(crate) peer: Option<String>,
    pub(crate) near: f64,
    pub(crate) json: bool,
}

/// The most ranks that are measured.
const MAX_RANKS: usize = 64;

impl CommArgs {
    pub(crate) fn check(&self) -> anyhow::Result<Options> {
        let ranks = list(&self.ranks, |text| text.parse().ok().filter(|n| (2..=MAX_RANKS).contains(n)));
        let refused = |option, expected: String, got| anyhow!(wrong(option, expected, format!("`{got}`")));
        let expected = format!("numbers from 2 to {MAX_RANKS}");
        let ranks = ranks.map_err(|got| refused("bench: --ranks", expected, got))?;
        let names = || Op::ALL.map(Op::name).join(", ");
        let usual = || if self.transport == Transport::Mpi { Op::plain_ones() } else { Op::usual() };
        let ops = self.ops.as_deref().map_or_else(|| Ok(usual()), |ops| list(ops, Op::named));
        let ops = ops.map_err(|got| refused("bench: --ops", format!("some of {}", names()), got))?;
        let expected = "multiples of 4 such as 1024, 64k or 16m, up to 1024m".to_string();
        let sizes = list(&self.sizes, size).map_err(|got| refused("bench: --sizes", expected, got))?;
        let time = seconds(self.seconds)?;
        if !(self.near > 0.0 && self.near.is_finite()) {
            bail!(wrong("bench: --near", "a number of microseconds above 0", self.near));
        }
        let commands = [("--mpirun", Some(&self.mpirun)), ("--peer", self.peer.as_ref())];
        for (option, command) in commands.into_iter().filter_map(|(option, text)| Some((option, text?))) {
            words(&format!("bench: {option}"), command, 0)?;
            if ranks.len() > 1 && !command.contains(RANKS) {
                bail!(
                    "bench: {option}: expected {RANKS} in the command, because --ranks has several numbers"
                );
            }
        }
        if self.transport == Transport::Local && self.peer.is_some() {
            let failure = wrong("bench: --peer", "--transport shm or mpi", "local");
            bail!(failure.note("a peer's ranks are processes"));
        }
        let CommArgs { transport, near, json, .. } = *self;
        let (mpirun, peer) = (self.mpirun.clone(), self.peer.clone());
        Ok(Options { ranks, ops, sizes, time, transport, mpirun, peer, near, json })
    }
}

/// The mpirun that is found.
const MPIRUN: &str = "mpirun -n {ranks}";

/// A duration, which must be positive and at most an hour.
pub(crate) fn seconds(seconds: f64) -> anyhow::Result<Duration> {
    if seconds > 0.0 && seconds <= 3600.0 {
        return Ok(Duration::from_secs_f64(seconds));
    }
    bail!(wrong("bench: --seconds", "a number above 0 and up to 3600", seconds))
}

/// The items of a list, or the first invalid one.
fn list<T>(text: &str, item: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, String> {
    text.split(',').map(|text| item(text.trim()).ok_or_else(|| text.to_string())).collect()
}

/// A number of bytes, a multiple of the size of a float.
fn size(text: &str) -> Option<usize> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix(['m', 'M']).map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    let bytes = digits.parse::<usize>().ok()?.checked_mul(unit)?;
    (bytes.is_multiple_of(4) && (4..=1 << 30).contains(&bytes)).then_some(bytes)
}
