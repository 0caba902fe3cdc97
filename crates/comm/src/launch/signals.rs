//! Signals to the launcher, as bytes to be read: those that end a job, and the one that asks for a report.
//!
//! Signals that the launcher's parent set to be ignored, such as SIGHUP under `nohup`, stay ignored, for the ranks too.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use signal_hook::low_level::{pipe, unregister};
use signal_hook::{SigId, flag};

const TAKEN: [Signal; 5] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, ASKS];
/// Asks for what the flight recorders hold. Only the launcher handles it, and the job continues.
pub(super) const ASKS: Signal = Signal::USR1;

/// The signals that the launcher takes, until it is dropped.
pub(super) struct Signals {
    taken: Vec<(Signal, SigId, UnixStream)>,
    file_too_large: SigId,
}

impl Signals {
    pub(super) fn take() -> io::Result<Signals> {
        // Files of `--tee` or redirected output may reach `ulimit -f`: that is an error of the write, and must not kill
        // the launcher.
        let file_too_large = flag::register(Signal::XFSZ.as_raw(), Arc::default())?;
        let mut signals = Signals { taken: Vec::new(), file_too_large };
        for signal in not_ignored() {
            let (reads, writes) = UnixStream::pair()?;
            reads.set_nonblocking(true)?;
            signals.taken.push((signal, pipe::register(signal.as_raw(), writes)?, reads));
        }
        Ok(signals)
    }

    /// The descriptors to poll for a signal.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.taken.iter().map(|(_, _, reads)| PollFd::new(reads, PollFlags::IN))
    }

    /// The descriptors to poll for a signal that ends the job.
    pub(super) fn poll_fds_of_ends(&self) -> impl Iterator<Item = PollFd<'_>> {
        let ends = self.taken.iter().filter(|(signal, _, _)| *signal != ASKS);
        ends.map(|(_, _, reads)| PollFd::new(reads, PollFlags::IN))
    }

    /// The signals since the last call of this, as often as each came.
    pub(super) fn received(&self) -> Vec<Signal> {
        let mut received = Vec::new();
        for (signal, _, reads) in &self.taken {
            let count = (&mut &*reads).read(&mut [0; 16]).unwrap_or(0);
            received.extend(std::iter::repeat_n(*signal, count));
        }
        received
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (_, id, _) in &self.taken {
            unregister(*id);
        }
        unregister(self.file_too_large);
    }
}

/// Keeps a watcher alive when a signal for the launcher reaches it too, as from `pkill consort`. Ranks do not inherit
/// the handlers, as they would inherit ignored signals.
pub(super) fn leave_to_launcher() -> io::Result<()> {
    not_ignored().try_for_each(|signal| flag::register(signal.as_raw(), Arc::default()).map(drop))
}

fn not_ignored() -> impl Iterator<Item = Signal> {
    let ignored = ignored();
    TAKEN.into_iter().filter(move |signal| ignored >> (signal.as_raw() - 1) & 1 == 0)
}

/// A bit for each signal that this process ignores.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
