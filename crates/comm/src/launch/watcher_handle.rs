//! The launcher's handle of its watcher: starts it, sends it orders, receives how ranks end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::Options;
use super::descendants::KILLED;
use super::entry::watcher_command;
use super::error::LaunchError;
use super::link::{Link, Message};
use crate::control::Exit;
use crate::control::socket::wait_ready;
use crate::deadline::from_now;
use crate::job::Job;

/// How long the watcher may take to start a rank, on a loaded machine.
const START: Duration = Duration::from_secs(60);

/// The watcher of a job. All processes of the job end with it.
#[derive(Debug)]
pub(super) struct WatcherHandle {
    process: Child,
    /// Becomes readable when the watcher ends.
    pidfd: OwnedFd,
    link: Link,
    /// Messages that arrived during a wait for another one.
    early: VecDeque<Message>,
    /// How the process ended, once it is known.
    status: Option<ExitStatus>,
    /// Whether the launcher killed it.
    given_up: bool,
}

/// The watcher is gone, and with it the ranks.
#[derive(Debug)]
pub(super) struct Gone;

impl WatcherHandle {
    /// Starts the process. The ranks inherit its environment.
    pub(super) fn start(options: &Options, job: &Job) -> io::Result<WatcherHandle> {
        let command = watcher_command(&options.entry, &options.program);
        let [program, arguments @ ..] = &command[..] else { return Err(Errno::INVAL.into()) };
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.args(arguments).env("CONSORT_SIZE", options.ranks.to_string());
        command.env("CONSORT_JOB", &job.name).env("CONSORT_SECRET", job.secret.to_hex());
        if let Some(deadline) = options.deadline {
            command.env("CONSORT_DEADLINE", deadline.as_secs_f64().to_string());
        }
        // A process group of its own: a signal from the terminal is for the launcher.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let mut process = command.spawn()?;
        let id = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let pidfd = id.ok_or(Errno::INVAL).and_then(|id| pidfd_open(id, PidfdFlags::empty()));
        let link = Link::new(ours.into());
        match pidfd {
            Ok(pidfd) => {
                let (early, status, given_up) = (VecDeque::new(), None, false);
                Ok(WatcherHandle { process, pidfd, link, early, status, given_up })
            }
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                Err(error.into())
            }
        }
    }

    /// Starts a rank with these as its standard output and error; returns its process.
    pub(super) fn start_rank(&mut self, rank: usize, out: OwnedFd, err: OwnedFd) -> Result<u32, LaunchError> {
        let failed = |error: io::Error| LaunchError::Machine { what: "start a rank", error };
        let until = from_now(START);
        if self.link.send(Message::Start { rank }, vec![out, err]).is_err() {
            return Err(self.gone());
        }
        loop {
            match self.link.receive() {
                Ok(Some(Message::Started { pid, .. })) => return Ok(pid),
                Ok(Some(Message::NotStarted { error, .. })) => {
                    return Err(failed(io::Error::from_raw_os_error(error)));
                }
                Ok(Some(message)) => self.early.push_back(message),
                Ok(None) => {
                    let more = if self.link.is_behind() { PollFlags::OUT } else { PollFlags::empty() };
                    if !wait_ready(self.link.as_fd(), PollFlags::IN | more, until).map_err(failed)? {
                        return Err(failed(io::ErrorKind::TimedOut.into()));
                    }
                    // If it fails, the next attempt to receive says so.
                    let _ = self.link.flush();
                }
                Err(_) => return Err(self.gone()),
            }
        }
    }

    /// Sends a signal to all ranks and their process groups.
    pub(super) fn signal(&mut self, signal: Signal) {
        // If the watcher is gone, so are the ranks, and `receive` says so.
        let _ = self.link.send(Message::Signal { signal: signal.as_raw() }, Vec::new());
    }

    /// Ends all processes of the job, with SIGKILL after the grace period. `Done` reports that this has happened.
    pub(super) fn end_all(&mut self, grace: Duration) {
        let _ = self.link.send(Message::End { grace }, Vec::new());
    }

    /// The watcher's messages since the last call of this.
    pub(super) fn receive(&mut self) -> Result<Vec<Message>, Gone> {
        let mut messages: Vec<Message> = self.early.drain(..).collect();
        loop {
            match self.link.receive() {
                Ok(Some(message)) => messages.push(message),
                // Messages that it sent before its end still count.
                Ok(None) => break,
                Err(_) if messages.is_empty() => return Err(Gone),
                Err(_) => break,
            }
        }
        Ok(messages)
    }

    /// Whether a message was read that the socket does not show any more.
    pub(super) fn has_read(&self) -> bool {
        !self.early.is_empty() || self.link.has_read()
    }

    /// Kills the watcher, because it does not respond. The kernel then kills the ranks.
    pub(super) fn kill(&mut self) {
        self.given_up = true;
        if self.status.is_none() {
            let _ = self.process.kill();
        }
    }

    /// The error of a job whose watcher is gone.
    pub(super) fn gone(&mut self) -> LaunchError {
        self.wait_for_end();
        let exit = self.status.filter(|_| !self.given_up).map(Exit::from);
        LaunchError::Watcher { pid: self.process.id(), exit }
    }

    /// Waits for the end of the process, as long as ending all others may take. Then it is killed.
    fn wait_for_end(&mut self) {
        if self.status.is_some() {
            return;
        }
        let ends_within = |pidfd: &OwnedFd, time| {
            wait_ready(pidfd.as_fd(), PollFlags::IN, Instant::now() + time).unwrap_or(false)
        };
        if !ends_within(&self.pidfd, 2 * KILLED) {
            self.kill();
        }
        // A process that survives SIGKILL is stuck in the kernel, and not waited for.
        if ends_within(&self.pidfd, KILLED) {
            self.status = self.process.wait().ok();
        }
    }
}

impl AsFd for WatcherHandle {
    /// Becomes readable when there is something to receive.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

impl Drop for WatcherHandle {
    fn drop(&mut self) {
        // The watcher takes this as the end of the launcher: it ends all remaining processes, and itself.
        let _ = shutdown(&self.link, Shutdown::Both);
        self.wait_for_end();
    }
}
