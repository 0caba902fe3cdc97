//! How the launcher's own program becomes a watcher or a rank, and whether a rank's program can be run.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Access, access};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::error::LaunchError;
use super::watcher::watch;

/// The command that starts the watcher of this process, for a rank's entry and program.
pub(super) fn watcher_command(entry: &[OsString], program: &[OsString]) -> Vec<OsString> {
    let part = [WATCH.into(), own_id(), entry.len().to_string().into()];
    [entry, &part, entry, program].concat()
}

/// The command that starts a rank of this process.
pub(super) fn rank_command(entry: &[OsString], program: &[OsString]) -> Vec<OsString> {
    [entry, &[RANK.into(), own_id()], program].concat()
}

const WATCH: &str = "watch";
const RANK: &str = "rank";

fn own_id() -> OsString {
    std::process::id().to_string().into()
}

/// Becomes the watcher or a rank, by the arguments that the launcher or the watcher put after its entry. As a watcher
/// it returns when the job is over; as a rank only if it cannot become the program.
pub fn enter(arguments: &[OsString]) -> Result<(), LaunchError> {
    let number = |text: &OsString| text.to_str().and_then(|text| text.parse().ok());
    let [part, parent, rest @ ..] = arguments else { return Err(LaunchError::Entry) };
    let parent = number(parent).ok_or(LaunchError::Entry)?;
    if part == RANK {
        return Err(become_rank(parent, rest));
    }
    let (words, rest) = rest.split_first().filter(|_| part == WATCH).ok_or(LaunchError::Entry)?;
    let words = number(words).map(|words| words as usize);
    let (entry, program) = words.and_then(|words| rest.split_at_checked(words)).ok_or(LaunchError::Entry)?;
    watch(parent, entry, program)
}

/// Becomes the program: asks the kernel to kill this process when the watcher dies, then runs the program in it.
/// Returns only if that fails.
///
/// The watcher may have died before the kernel was asked; then this process already has another parent.
fn become_rank(watcher: u32, program: &[OsString]) -> LaunchError {
    let failed = |what| move |error: rustix::io::Errno| LaunchError::Machine { what, error: error.into() };
    if let Err(error) =
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed("bind to the watcher"))
    {
        return error;
    }
    let parent = getppid().map(|parent| parent.as_raw_nonzero().get());
    if parent.and_then(|parent| u32::try_from(parent).ok()) != Some(watcher) {
        return LaunchError::Orphan { parent: watcher };
    }
    let [name, arguments @ ..] = program else { return LaunchError::NoProgram };
    let error = Command::new(name).args(arguments).exec();
    LaunchError::Exec { program: name.clone(), error }
}

/// Looks the program up as `exec` will, so that an error of every rank is reported once.
pub(super) fn find(program: &[OsString]) -> Result<(), LaunchError> {
    let Some(name) = program.first().filter(|name| !name.is_empty()) else {
        return Err(LaunchError::NoProgram);
    };
    if name.as_bytes().contains(&b'/') {
        let path = Path::new(name);
        return match path.metadata() {
            Err(error) => Err(LaunchError::Unreadable { program: name.clone(), error }),
            Ok(_) if is_executable(path) => Ok(()),
            Ok(_) => Err(LaunchError::NotExecutable { program: name.clone() }),
        };
    }
    let places = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    let candidates: Vec<PathBuf> =
        std::env::split_paths(&places).map(|place| in_place(&place, name)).collect();
    if candidates.iter().any(|path| is_executable(path)) {
        return Ok(());
    }
    let here = Path::new(name).is_file();
    Err(LaunchError::NotFound { program: name.clone(), here })
}

/// An empty entry of PATH is the current folder.
fn in_place(place: &Path, name: &OsStr) -> PathBuf {
    if place.as_os_str().is_empty() { Path::new(".").join(name) } else { place.join(name) }
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}
