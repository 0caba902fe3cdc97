//! Forwarding of signals, for a program that starts jobs and other programs as its children and waits for them.
//!
//! A thread receives the signals. The work is not interrupted: its children end, so that its waits do, and it ends by
//! itself, with its destructors.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;

use super::descendants::{self, Orphans};
use super::signals::{ASKS, Signals};
use crate::control::socket::timespec;
use crate::control::{Exit, signal_name};
use crate::deadline::from_now;

/// How often children that the work started after a signal are looked for.
const LOOK: Duration = Duration::from_millis(10);

/// Work was ended by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    signal: i32,
}

impl Interrupted {
    pub(super) fn by(signal: Signal) -> Interrupted {
        Interrupted { signal: signal.as_raw() }
    }

    /// The exit code that a shell reports for it: 128 plus the signal.
    pub fn code(self) -> u8 {
        Exit::Signal(self.signal).code()
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by {}", signal_name(self.signal).unwrap_or("a signal"))
    }
}

impl Error for Interrupted {}

/// Runs work that starts processes and waits for them. A signal that would end this process goes to these processes,
/// each of which must lead a process group, and to those that the work starts afterwards; after `grace` they get a
/// SIGKILL. What they leave behind ends with the work. Returns the work's result, or the first such signal.
pub fn forward_signals<T>(grace: Duration, work: impl FnOnce() -> T) -> io::Result<Result<T, Interrupted>> {
    let _orphans = Orphans::adopt()?;
    let signals = Signals::take()?;
    let (working, ended) = UnixStream::pair()?;
    thread::scope(|scope| {
        let forward = || {
            Forward { signals: &signals, first: None, kill_at: None, told: BTreeSet::new() }
                .run(&ended, grace)
        };
        let thread = thread::Builder::new().name("consort signals".into()).spawn_scoped(scope, forward)?;
        // Its end, also by a panic, is what the thread sees.
        let working = working;
        let result = work();
        drop(working);
        let first = thread.join().unwrap_or_default();
        Ok(first.map_or(Ok(result), |signal| Err(Interrupted::by(signal))))
    })
}

struct Forward<'a> {
    signals: &'a Signals,
    /// The first signal that ends the work.
    first: Option<Signal>,
    /// When the children get a SIGKILL.
    kill_at: Option<Instant>,
    /// The children that got the first signal.
    told: BTreeSet<i32>,
}

impl Forward<'_> {
    /// Forwards signals until the work has ended; returns the first that ends it.
    fn run(mut self, ended: &UnixStream, grace: Duration) -> Option<Signal> {
        while self.wait(ended) {
            for signal in self.signals.received() {
                let children = descendants::children();
                children.iter().for_each(|child| descendants::signal(*child, signal));
                if signal != ASKS && self.first.is_none() {
                    self.first = Some(signal);
                    self.kill_at = Some(from_now(grace));
                    self.told.extend(children.iter().map(|child| child.as_raw_nonzero().get()));
                }
            }
            if let (Some(first), Some(kill_at)) = (self.first, self.kill_at) {
                let kill = Instant::now() >= kill_at;
                for child in descendants::children() {
                    if kill {
                        descendants::signal(child, Signal::KILL);
                    } else if self.told.insert(child.as_raw_nonzero().get()) {
                        descendants::signal(child, first);
                    }
                }
            }
        }
        self.first
    }

    /// Blocks until a signal comes or, after the first one, for a moment; false once the work has ended.
    fn wait(&self, ended: &UnixStream) -> bool {
        let mut fds = vec![PollFd::new(ended, PollFlags::IN)];
        fds.extend(self.signals.poll_fds());
        let moment = self.first.map(|_| timespec(LOOK));
        // An interrupted poll found nothing yet.
        poll(&mut fds, moment.as_ref()).is_err() || fds[0].revents().is_empty()
    }
}
