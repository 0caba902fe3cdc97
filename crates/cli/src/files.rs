//! Reads and writes whole files, with errors that name the file and distinguish user errors from machine errors.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

use anyhow::anyhow;

use crate::report::{Machine, wrong};

/// The most bytes of a program's text.
pub(crate) const MAX_TEXT: u64 = 1 << 26;

/// The most bytes of a file with arrays.
pub(crate) const MAX_ARRAYS: u64 = 1 << 32;

/// The most bytes of a pipe or a device, which may never end.
const MAX_STREAM: u64 = 1 << 28;

/// The bytes of a file, of which there may be so many.
pub(crate) fn read(path: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|error| unreadable(&name, &error))?;
    let is_file = file.metadata().is_ok_and(|of| of.is_file());
    read_all(file, &name, if is_file { limit } else { limit.min(MAX_STREAM) })
}

/// The bytes of the standard input, of which there may be so many.
pub(crate) fn read_stdin(limit: u64) -> anyhow::Result<Vec<u8>> {
    read_all(io::stdin().lock(), "the standard input", limit)
}

fn read_all(from: impl Read, name: &str, limit: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limit + 1).read_to_end(&mut bytes).map_err(|error| unreadable(name, &error))?;
    if bytes.len() as u64 > limit {
        let expected = format!("at most {limit} bytes");
        return Err(anyhow!(wrong(format!("cannot read {name}"), expected, "more")));
    }
    Ok(bytes)
}

/// A name that is no readable file is the user's error; any other failure is the machine's.
fn unreadable(name: &str, error: &io::Error) -> anyhow::Error {
    let message = format!("cannot read {name}: {error}");
    match error.kind() {
        ErrorKind::NotFound
        | ErrorKind::PermissionDenied
        | ErrorKind::IsADirectory
        | ErrorKind::NotADirectory
        | ErrorKind::InvalidFilename
        | ErrorKind::InvalidInput => anyhow!(message),
        _ => Machine(message).into(),
    }
}

/// Writes a new file; one that exists is overwritten with `force` and refused without it.
pub(crate) fn write(path: &Path, bytes: &[u8], force: bool) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    // Checked and opened in one step, so that no other process can interfere.
    if force {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    match options.write(true).open(path).and_then(|mut file| file.write_all(bytes)) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(exists(path)),
        Err(error) => Err(Machine(format!("cannot write {}: {error}", path.display())).into()),
    }
}

/// Fails if a file exists.
pub(crate) fn require_free(path: &Path) -> anyhow::Result<()> {
    if fs::symlink_metadata(path).is_ok() { Err(exists(path)) } else { Ok(()) }
}

fn exists(path: &Path) -> anyhow::Error {
    anyhow!("{} exists\n  note: --force overwrites it", path.display())
}

/// Creates a folder and its parents, if they are missing.
pub(crate) fn create_folder(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path)
        .map_err(|error| Machine(format!("cannot create the folder {}: {error}", path.display())).into())
}
