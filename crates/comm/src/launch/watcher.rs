//! The watcher: a process between the launcher and the ranks that ends all remaining processes of a job.
//!
//! The launcher starts it, and it starts the ranks: it is their parent, and the subreaper of all that they start. The
//! launcher tells it over a socket what to do; it tells the launcher how ranks end. It ends the job's processes
//!
//! - when the launcher says so, after the last rank: SIGTERM, then SIGKILL after the grace period;
//! - with SIGKILL at once when the launcher is gone, however it ended;
//! - by its own end, however that comes: the kernel then kills the ranks, and a launcher that is a subreaper
//!   (`Orphans`) gets the rest.
//!
//! It has one thread, waits in one place, and does nothing that could block.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Read};
use std::num::NonZeroI32;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getppid, kill_process_group, pidfd_open};
use signal_hook::low_level::pipe;

use super::descendants::{self, KILLED};
use super::entry::rank_command;
use super::error::LaunchError;
use super::link::{Link, Message};
use super::signals::leave_to_launcher;
use crate::control::socket::timespec;
use crate::deadline::from_now;

/// Watches the ranks that the launcher starts, until all have ended. They run the program, each through the entry.
pub(super) fn watch(launcher: u32, entry: &[OsString], program: &[OsString]) -> Result<(), LaunchError> {
    let failed = |error: io::Error| LaunchError::Machine { what: "watch over the ranks", error };
    let id = i32::try_from(launcher).ok().and_then(Pid::from_raw);
    let pidfd = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok());
    // The launcher may be gone, and its id reused; then this process has another parent.
    let Some(pidfd) = pidfd.filter(|_| getppid() == id) else {
        return Err(LaunchError::Orphan { parent: launcher });
    };
    descendants::adopt().map_err(failed)?;
    leave_to_launcher().map_err(failed)?;
    let (child_ended, tells) = UnixStream::pair().map_err(failed)?;
    child_ended.set_nonblocking(true).map_err(failed)?;
    pipe::register(Signal::CHILD.as_raw(), tells).map_err(failed)?;
    // The launcher gave us the socket as the standard input.
    let link = Link::new(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    let rank_command = rank_command(entry, program);
    Watcher { link, launcher: Some(pidfd), child_ended, rank_command, ranks: Vec::new(), ending: None }.run();
    Ok(())
}

struct Watcher {
    link: Link,
    /// Becomes readable when the launcher ends; `None` once it has.
    launcher: Option<OwnedFd>,
    /// Becomes readable when a child ends.
    child_ended: UnixStream,
    rank_command: Vec<OsString>,
    /// The ranks that have not ended, and their processes.
    ranks: Vec<(usize, Pid)>,
    ending: Option<Ending>,
}

/// The stage of ending all processes.
struct Ending {
    /// When they get a SIGKILL; `None` once they have.
    kill_at: Option<Instant>,
    /// When processes that survive SIGKILL are given up.
    give_up_at: Instant,
    /// The children that have received the current signal.
    told: BTreeSet<NonZeroI32>,
}

impl Watcher {
    fn run(mut self) {
        loop {
            let launcher_lives = self.wait() && self.obey().is_ok() && self.link.flush().is_ok();
            if !launcher_lives && self.launcher.take().is_some() {
                self.end_all(Duration::ZERO);
            }
            self.note_ends();
            if let Some(left) = self.go_on_ending() {
                // If the launcher is gone, nobody receives it.
                let _ = self.link.send(Message::Done { left }, Vec::new());
                return;
            }
        }
    }

    /// Blocks until something can be done; true while the launcher lives.
    fn wait(&mut self) -> bool {
        let due = self.ending.as_ref().map(|ending| ending.kill_at.unwrap_or(ending.give_up_at));
        let left = due.map(|due| timespec(due.saturating_duration_since(Instant::now())));
        let mut fds = vec![PollFd::new(&self.child_ended, PollFlags::IN)];
        if let Some(launcher) = &self.launcher {
            let more = if self.link.is_behind() { PollFlags::OUT } else { PollFlags::empty() };
            fds.extend([PollFd::new(launcher, PollFlags::IN), PollFd::new(&self.link, PollFlags::IN | more)]);
        }
        // An interrupted poll found nothing yet.
        let _ = poll(&mut fds, left.as_ref());
        let launcher_lives = fds.get(1).is_some_and(|launcher| launcher.revents().is_empty());
        // The bytes have no meaning; all children are checked.
        let _ = self.child_ended.read(&mut [0; 64]);
        launcher_lives
    }

    /// Carries out the launcher's orders. An error means that it is gone.
    fn obey(&mut self) -> Result<(), Errno> {
        loop {
            match self.link.receive() {
                Ok(None) => return Ok(()),
                Ok(Some(Message::Start { rank })) => {
                    let report = match self.start(rank) {
                        Ok(pid) => Message::Started { rank, pid },
                        Err(error) => Message::NotStarted { rank, error: error.raw_os_error().unwrap_or(0) },
                    };
                    self.link.send(report, Vec::new())?;
                }
                Ok(Some(Message::Signal { signal })) => {
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        for (_, rank) in &self.ranks {
                            // Fails only if the group is empty.
                            let _ = kill_process_group(*rank, signal);
                        }
                    }
                }
                Ok(Some(Message::End { grace })) => self.end_all(grace),
                Ok(Some(_)) => return Err(Errno::BADMSG),
                Err(error) => return Err(error),
            }
        }
    }

    fn start(&mut self, rank: usize) -> io::Result<u32> {
        // The kernel drops them if this process is at its limit of open files.
        let (out, err) = self.link.take_fds().ok_or(Errno::MFILE)?;
        let [program, arguments @ ..] = &self.rank_command[..] else { return Err(Errno::INVAL.into()) };
        let mut command = Command::new(program);
        command.args(arguments).env("CONSORT_RANK", rank.to_string());
        command.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
        self.ranks.push((rank, pid));
        Ok(child.id())
    }

    /// Reaps the children that have ended: ranks, whose process groups end with them, and orphans.
    fn note_ends(&mut self) {
        let (ended, living) = self.ranks.iter().partition(|(_, rank)| descendants::has_ended(*rank));
        self.ranks = living;
        let ended: Vec<(usize, Pid)> = ended;
        for (rank, pid) in ended {
            // Before it is reaped, while the group's id is its own.
            let _ = kill_process_group(pid, Signal::KILL);
            if let Some(status) = self.reap(pid) {
                // If the launcher is gone, nobody receives it.
                let _ = self.link.send(Message::Ended { rank, status }, Vec::new());
            }
        }
        if descendants::any_ended() {
            // Not the ranks: one that has just ended is handled in the next round.
            for child in descendants::children() {
                if self.ranks.iter().all(|(_, rank)| *rank != child) {
                    self.reap(child);
                }
            }
        }
    }

    fn reap(&mut self, child: Pid) -> Option<i32> {
        let status = descendants::reap(child)?;
        if let Some(ending) = &mut self.ending {
            // From now on the id may be that of another child.
            ending.told.remove(&child.as_raw_nonzero());
        }
        Some(status.as_raw())
    }

    /// Begins to end all processes. A shorter grace period than before replaces it.
    fn end_all(&mut self, grace: Duration) {
        let kill_at = from_now(grace);
        match &mut self.ending {
            None => {
                let give_up_at = kill_at + KILLED;
                self.ending = Some(Ending { kill_at: Some(kill_at), give_up_at, told: BTreeSet::new() });
            }
            Some(ending) => {
                ending.kill_at = ending.kill_at.map(|before| before.min(kill_at));
                ending.give_up_at = ending.give_up_at.min(kill_at + KILLED);
            }
        }
    }

    /// Signals the children that are new since the last time; returns how many are left, once it can do no more.
    fn go_on_ending(&mut self) -> Option<usize> {
        let ending = self.ending.as_mut()?;
        if !descendants::any() {
            return Some(0);
        }
        let now = Instant::now();
        if ending.kill_at.is_some_and(|at| now >= at) {
            ending.kill_at = None;
            ending.told.clear();
        }
        let children = descendants::children();
        if now >= ending.give_up_at {
            return Some(children.len());
        }
        for child in children {
            if !ending.told.insert(child.as_raw_nonzero()) {
                continue;
            }
            match ending.kill_at {
                None => descendants::signal(child, Signal::KILL),
                Some(_) => {
                    descendants::signal(child, Signal::TERM);
                    // A stopped process does not handle it until it continues.
                    descendants::signal(child, Signal::CONT);
                }
            }
        }
        None
    }
}
