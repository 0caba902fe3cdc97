//! Processes that this one must end: its children, and the descendants that come to it when their parents end.
//!
//! A subreaper becomes the parent of every descendant whose own parent has ended, whatever session or process group it
//! is in. So killing the children, and then the processes that become children, ends a whole tree. Only children are
//! ever signalled: a child's id is its own until it is reaped, so that no other process can be hit by mistake.

use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, getpgid, getpid, kill_process,
    kill_process_group, set_child_subreaper, waitid, waitpid,
};

/// How long processes may take to end after a SIGKILL before they are given up: one that is stuck in the kernel, or
/// that runs as another user, does not end.
pub(super) const KILLED: Duration = Duration::from_secs(2);

/// Makes this process the parent of its descendants whose parents end.
pub(super) fn adopt() -> io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Whether this process has a child, dead or alive.
pub(super) fn any() -> bool {
    peek(WaitId::All) != Err(Errno::CHILD)
}

/// Whether a child has ended and was not reaped.
pub(super) fn any_ended() -> bool {
    peek(WaitId::All) == Ok(true)
}

/// Whether a child has ended. It is not reaped, so that its id stays its own.
pub(super) fn has_ended(child: Pid) -> bool {
    peek(WaitId::Pid(child)) == Ok(true)
}

fn peek(id: WaitId<'_>) -> rustix::io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(id, options).map(|status| status.is_some())
}

/// Reaps a child that has ended; `None` if it has not.
pub(super) fn reap(child: Pid) -> Option<WaitStatus> {
    waitpid(Some(child), WaitOptions::NOHANG).ok().flatten().map(|(_, status)| status)
}

/// Sends a signal to a child, and to the process group that it leads, if it leads one.
pub(super) fn signal(child: Pid, signal: Signal) {
    // Fails if the child has ended, or runs as another user: nothing more can be done then.
    let _ = match getpgid(Some(child)) {
        Ok(group) if group == child => kill_process_group(child, signal),
        _ => kill_process(child, signal),
    };
}

/// The children of this process, dead or alive.
pub(super) fn children() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists: Vec<String> =
        tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect();
    if lists.is_empty() {
        // A kernel without these lists: all processes whose parent is this one.
        return all_processes().filter(|process| parent(*process) == Some(getpid())).collect();
    }
    lists.iter().flat_map(|list| list.split_whitespace()).filter_map(process).collect()
}

fn all_processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| process(entry.file_name().to_str()?))
}

fn process(text: &str) -> Option<Pid> {
    text.parse().ok().and_then(Pid::from_raw)
}

fn parent(of: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", of.as_raw_nonzero())).ok()?;
    // The name of a program stands in parentheses, and may contain anything. After it: state, parent.
    process(stat.rsplit_once(") ")?.1.split(' ').nth(1)?)
}

/// For a program whose children all belong to its jobs: processes that a job leaves behind because its watcher was
/// killed become children of this process, and end when this value is dropped.
#[derive(Debug)]
pub struct Orphans(());

impl Orphans {
    /// Makes this process the parent of its descendants whose parents end.
    pub fn adopt() -> io::Result<Orphans> {
        adopt().map(Orphans)
    }
}

impl Drop for Orphans {
    fn drop(&mut self) {
        let until = Instant::now() + KILLED;
        while any() && Instant::now() < until {
            for child in children() {
                signal(child, Signal::KILL);
                reap(child);
            }
            // Not a blocking wait, which has no deadline.
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn both_ways_to_find_children_see_them() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let id = process(&child.id().to_string()).unwrap();
        assert!(children().contains(&id) && any());
        assert_eq!((parent(id), has_ended(id)), (Some(getpid()), false));
        assert!(all_processes().any(|process| process == id));
        signal(id, Signal::KILL);
        let until = Instant::now() + Duration::from_secs(20);
        while !has_ended(id) {
            assert!(Instant::now() < until);
            thread::yield_now();
        }
        assert!(children().contains(&id), "it is nobody else's until it is waited for");
        child.wait().unwrap();
        assert!(!children().contains(&id));
    }
}
