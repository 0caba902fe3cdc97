//! Limits of the machine and of the user that a call exceeded: which one, its value, and how to raise it.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// What to do about a system error, as a sentence for a note.
pub(crate) fn way_out(error: &io::Error) -> String {
    let limit = |resource| getrlimit(resource).current;
    let addresses =
        limit(Resource::As).map(|bytes| format!("`ulimit -v` allows a process {bytes} bytes of addresses"));
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => match limit(Resource::Nofile) {
            Some(files) => {
                format!("`ulimit -n` allows a process {files} open files; raise it, or start fewer ranks")
            }
            None => "this process has too many open files; close some, or start fewer ranks".to_string(),
        },
        Some(Errno::NFILE) => {
            "the machine has too many open files; raise the setting fs.file-max".to_string()
        }
        Some(Errno::FBIG) => match limit(Resource::Fsize) {
            Some(bytes) => format!(
                "`ulimit -f` allows files of {bytes} bytes, also in memory; raise it, or ask for less"
            ),
            None => "ask for less".to_string(),
        },
        Some(Errno::AGAIN) => {
            let processes = match limit(Resource::Nproc) {
                Some(processes) => format!(
                    "`ulimit -u` allows a user {processes} processes and threads, and a container (pids.max) may allow fewer"
                ),
                None => {
                    "the machine has no more processes and threads (pids.max, kernel.threads-max)".to_string()
                }
            };
            // A thread whose stack cannot be mapped fails in the same way.
            let addresses = addresses.map(|text| format!(", {text}")).unwrap_or_default();
            format!("{processes}{addresses}; raise the limit, or start fewer")
        }
        Some(Errno::NOMEM) => {
            let data = limit(Resource::Data)
                .map(|bytes| format!("`ulimit -d` allows a process {bytes} bytes of data"));
            let limits: Vec<String> = addresses.into_iter().chain(data).collect();
            match limits.is_empty() {
                true => "the machine does not have as much memory to give; ask for less".to_string(),
                false => format!("{}; raise it, or ask for less", limits.join(", ")),
            }
        }
        _ => "the machine or its limits failed, not the job".to_string(),
    }
}

/// Whether a file of `bytes` bytes is allowed. Without this check the kernel kills a process that makes a larger one.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn check_file_size(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if bytes > limit => Err(Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// How many more files this process can open.
pub(crate) fn free_files() -> usize {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    limit.unwrap_or(usize::MAX).saturating_sub(open)
}

/// Whether `more` files can be opened: an error before anything is started is better than one in the middle.
pub(crate) fn check_open_files(more: usize) -> io::Result<()> {
    if free_files() < more { Err(Errno::MFILE.into()) } else { Ok(()) }
}
