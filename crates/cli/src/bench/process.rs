//! A process under test: its output is kept in memory, and it is ended, with its process group, when no longer needed.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// How long to wait for its end, before and after each signal.
const END: Duration = Duration::from_secs(3);

/// Waits until a descriptor is ready or the time is up.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], until: Instant) {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        if poll(fds, Some(&left)) != Err(rustix::io::Errno::INTR) {
            break;
        }
    }
}

/// A process. It is ended when this is dropped.
pub(crate) struct Process {
    child: Child,
    status: Option<ExitStatus>,
    said: File,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> anyhow::Result<Process> {
        let said = File::from(memfd_create("consort-bench", MemfdFlags::CLOEXEC)?);
        // A process group of its own: it is ended as a whole, and a signal from the terminal ends it through us.
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said.try_clone()?).process_group(0);
        let cannot = format!("cannot start `{}`", command.get_program().display());
        Ok(Process { child: command.spawn().context(cannot)?, status: None, said })
    }

    /// Waits until the listener can be read; false if the process ends first, or the time is up.
    pub(crate) fn wait_or(&self, listener: impl AsFd, until: Instant) -> bool {
        let Some(pidfd) = self.pid().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
            return false;
        };
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN),
        ];
        poll_until(&mut fds, until);
        !fds[0].revents().is_empty()
    }

    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    /// Ends it, gently at first; returns its status if it exited without a signal.
    pub(crate) fn end(&mut self) -> Option<ExitStatus> {
        if self.status.is_some() {
            return self.status;
        }
        let by_itself = self.wait(END);
        for signal in [Signal::TERM, Signal::KILL] {
            // Processes that it started may outlive it, in its group.
            let _ = self.pid().map(|pid| kill_process_group(pid, signal));
            if self.wait(END) {
                break;
            }
        }
        let status = self.child.wait().ok();
        self.status = status;
        status.filter(|_| by_itself)
    }

    /// Waits for its end without reaping it, so that its process id is not reused.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let Some(pidfd) = self.pid().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
            return true;
        };
        let mut fds = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
        poll_until(&mut fds, Instant::now() + time);
        !fds[0].revents().is_empty()
    }

    /// All of its output.
    pub(crate) fn output(&mut self) -> String {
        let mut text = Vec::new();
        let _ = self.said.seek(SeekFrom::Start(0)).and_then(|_| self.said.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    }

    /// The last lines of its output, to be appended to an error.
    pub(crate) fn said(&mut self) -> String {
        let text = self.output();
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        if last.is_empty() { String::new() } else { format!("\n  its output: {}", last.join("\n  ")) }
    }
}

const LAST_LINES: usize = 8;

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}
