//! Signals to the launcher, as bytes to be read: those that end a job, and the one that asks what it is doing.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use signal_hook::SigId;
use signal_hook::low_level::{pipe, unregister};

const TAKEN: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, ASKS];
/// Asks for what the flight recorders hold. It is for the launcher alone, and the job goes on.
pub(super) const ASKS: Signal = Signal::USR1;

/// The signals that the launcher takes, until it is dropped.
pub(super) struct Signals(Vec<(Signal, SigId, UnixStream)>);

impl Signals {
    /// Takes them, but for those that whoever started us wants ignored, such as SIGHUP under `nohup`.
    pub(super) fn take() -> io::Result<Signals> {
        let ignored = ignored();
        let mut signals = Signals(Vec::new());
        for signal in TAKEN.into_iter().filter(|signal| ignored >> (signal.as_raw() - 1) & 1 == 0) {
            let (reads, writes) = UnixStream::pair()?;
            reads.set_nonblocking(true)?;
            signals.0.push((signal, pipe::register(signal.as_raw(), writes)?, reads));
        }
        Ok(signals)
    }

    /// What to poll in order to learn of one.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(|(_, _, reads)| PollFd::new(reads, PollFlags::IN))
    }

    /// What to poll in order to learn of one that ends the job.
    pub(super) fn poll_fds_of_ends(&self) -> impl Iterator<Item = PollFd<'_>> {
        let ends = self.0.iter().filter(|(signal, _, _)| *signal != ASKS);
        ends.map(|(_, _, reads)| PollFd::new(reads, PollFlags::IN))
    }

    /// The signals since the last time this was asked, as often as each came.
    pub(super) fn received(&self) -> Vec<Signal> {
        let mut received = Vec::new();
        for (signal, _, reads) in &self.0 {
            let count = (&mut &*reads).read(&mut [0; 16]).unwrap_or(0);
            received.extend(std::iter::repeat_n(*signal, count));
        }
        received
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (_, id, _) in &self.0 {
            unregister(*id);
        }
    }
}

/// A bit for each signal that this process ignores.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
