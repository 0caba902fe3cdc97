//! Before a rank's program runs: whether it can be run, and the process that becomes it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Access, access};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::error::LaunchError;

/// Becomes the program: asks the kernel for the launcher's fate, then runs the program in this process. It
/// returns only if that cannot be done.
///
/// The launcher may have died before the kernel was asked; then this process has another parent by now.
pub fn become_rank(launcher: u32, program: &[OsString]) -> LaunchError {
    let failed = |what| move |error: rustix::io::Errno| LaunchError::Machine { what, error: error.into() };
    if let Err(error) =
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed("bind to the launcher"))
    {
        return error;
    }
    let parent = getppid().map(|parent| parent.as_raw_nonzero().get());
    if parent.and_then(|parent| u32::try_from(parent).ok()) != Some(launcher) {
        return LaunchError::Orphan { launcher };
    }
    let [name, arguments @ ..] = program else { return LaunchError::NoProgram };
    let error = Command::new(name).args(arguments).exec();
    LaunchError::Exec { program: name.clone(), error }
}

/// Looks for the program as `exec` will, so that what every rank would say is said once.
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

/// An empty place in PATH is the current folder.
fn in_place(place: &Path, name: &OsStr) -> PathBuf {
    if place.as_os_str().is_empty() { Path::new(".").join(name) } else { place.join(name) }
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}
