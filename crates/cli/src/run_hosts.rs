//! `consort run --hosts`: runs a program as the ranks of a job on several hosts, through the mpirun of this one.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write, stderr, stdout};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::bail;

use crate::mpirun::words;
use crate::report::{Machine, Report, wrong};
use crate::run::check_only;

/// The environment variable that names another mpirun.
const MPIRUN: &str = "CONSORT_MPIRUN";
/// The one that `--deadline` sets.
const DEADLINE: &str = "CONSORT_DEADLINE";

/// Whose mpirun it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    OpenMpi4,
    /// From version 5 on.
    OpenMpi,
    /// Also of Intel MPI, and others that use Hydra.
    Mpich,
}

impl Family {
    fn of_version(text: &str) -> Family {
        if text.contains("Open MPI) 4") || text.contains("OpenRTE") {
            Family::OpenMpi4
        } else if text.contains("Open MPI") || text.contains("PRRTE") {
            Family::OpenMpi
        } else {
            Family::Mpich
        }
    }

    /// The arguments for these hosts. All of them must see these variables: MPICH's mpirun passes all that there are.
    fn arguments(self, hosts: &str, ranks: usize, variables: &[String]) -> Vec<String> {
        let count = ranks.to_string();
        let own: &[&str] = match self {
            Family::OpenMpi4 => &["--tag-output", "--host", hosts, "-n", &count],
            Family::OpenMpi => &["--output", "tag", "--host", hosts, "-n", &count],
            Family::Mpich => {
                return ["-prepend-rank", "-hosts", hosts, "-n", &count].map(str::to_string).into();
            }
        };
        let passed = variables.iter().flat_map(|name| ["-x".to_string(), name.clone()]);
        own.iter().map(|argument| argument.to_string()).chain(passed).collect()
    }
}

/// How many ranks a list `a:2,b:2` asks for.
fn ranks(hosts: &str) -> Option<usize> {
    let of = |host: &str| match host.rsplit_once(':') {
        Some((name, count)) if !name.is_empty() => count.parse().ok().filter(|count| *count > 0),
        Some(_) => None,
        None => (!host.is_empty()).then_some(1),
    };
    hosts.split(',').map(of).sum()
}

/// The rank that printed a line, and its text; `None` for a line of mpirun itself.
fn of_rank(line: &str, family: Family) -> Option<(usize, &str)> {
    let tagged = line.strip_prefix('[')?;
    if family == Family::Mpich {
        let (rank, text) = tagged.split_once("] ")?;
        return Some((rank.parse().ok()?, text));
    }
    let (tag, rest) = tagged.split_once("]<std")?;
    let (_, text) = rest.split_once('>')?;
    let rank = tag.rsplit(',').next()?.parse().ok()?;
    let colon = if family == Family::OpenMpi4 { ":" } else { ": " };
    Some((rank, text.strip_prefix(colon).unwrap_or(text)))
}

/// A line of a rank as `consort run` prints it: `[2] text`; none of other ranks if one is given. Lines of mpirun itself stay as
/// they are.
fn prefixed(line: &str, family: Family, only: Option<usize>) -> Option<String> {
    match of_rank(line, family) {
        Some((rank, _)) if only.is_some_and(|only| only != rank) => None,
        Some((rank, text)) => Some(format!("[{rank}] {text}")),
        None => Some(line.to_string()),
    }
}

/// Runs the program on these hosts, and gives mpirun's exit code.
pub(crate) fn run(
    hosts: &str,
    only: Option<usize>,
    deadline: Option<Duration>,
    program: &[OsString],
) -> anyhow::Result<Report> {
    let Some(count) = ranks(hosts) else {
        bail!(wrong("run: --hosts", "hosts with their numbers of ranks, such as a:2,b:2", hosts));
    };
    check_only(only, count)?;
    let named = env::var_os(MPIRUN).map_or("mpirun".into(), |named| named.to_string_lossy().into_owned());
    let words = words(MPIRUN, &named, count)?;
    let (mpirun, flags) = (&words[0], &words[1..]);
    let failed = |error| {
        Machine(format!(
            "run: cannot run {mpirun}: {error}\n  note: install an MPI, or name its mpirun by {MPIRUN}"
        ))
    };
    let version = Command::new(mpirun).arg("--version").output().map_err(failed)?;
    let family = Family::of_version(&String::from_utf8_lossy(&version.stdout));
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut variables: Vec<String> = names.filter(|name| name.starts_with("CONSORT_")).collect();
    let mut command = Command::new(mpirun);
    if let Some(deadline) = deadline {
        command.env(DEADLINE, deadline.as_secs_f64().to_string());
        variables.push(DEADLINE.to_string());
    }
    variables.sort_unstable();
    variables.dedup();
    command.args(flags).args(family.arguments(hosts, count, &variables)).args(program);
    let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().map_err(failed)?;
    let errors = child.stderr.take().map(|from| thread::spawn(move || copy(from, stderr(), family, None)));
    child.stdout.take().into_iter().for_each(|from| copy(from, stdout(), family, only));
    errors.into_iter().for_each(|errors| drop(errors.join()));
    let status = child.wait().map_err(failed)?;
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(Report { code: u8::try_from(code).unwrap_or(1), ..Report::fine(String::new()) })
}

/// Copies lines with their prefixes, of all ranks or of one. A closed pipe is no error: the reader has stopped.
fn copy(from: impl Read, mut to: impl Write, family: Family, only: Option<usize>) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        let text = String::from_utf8_lossy(&line);
        if let Some(text) = prefixed(text.trim_end_matches('\n'), family, only) {
            let _ = writeln!(to, "{text}");
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_counted() {
        assert_eq!(ranks("a:2,b:2"), Some(4));
        assert_eq!(ranks("a,b:3"), Some(4));
        for wrong in ["", "a:", "a:0", "a:x", ":2", "a,,b"] {
            assert_eq!(ranks(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn lines_of_each_mpirun_get_the_same_prefix() {
        let lines = [
            (Family::OpenMpi4, "[1,2]<stdout>: loss 0.1", Some(2), "[2]  loss 0.1"),
            (Family::OpenMpi, "[prterun-vm-77@1,3]<stderr>: error", Some(3), "[3] error"),
            (Family::Mpich, "[2] loss 0.1", Some(2), "[2] loss 0.1"),
            (Family::OpenMpi, "mpirun detected [something]", None, "mpirun detected [something]"),
            (Family::Mpich, "[mpiexec@h1] killed", None, "[mpiexec@h1] killed"),
        ];
        for (family, line, rank, text) in lines {
            assert_eq!(prefixed(line, family, None).as_deref(), Some(text));
            assert_eq!(prefixed(line, family, rank.or(Some(7))).as_deref(), Some(text));
            assert_eq!(prefixed(line, family, Some(9)).is_none(), rank.is_some(), "{line}");
        }
    }

    #[test]
    fn each_mpirun_says_whose_it_is() {
        assert_eq!(Family::of_version("mpirun (Open MPI) 4.1.4\n"), Family::OpenMpi4);
        assert_eq!(Family::of_version("mpirun.openmpi (OpenRTE) 4.1.4\n"), Family::OpenMpi4);
        assert_eq!(Family::of_version("mpirun (Open MPI) 5.0.11\n"), Family::OpenMpi);
        assert_eq!(Family::of_version("HYDRA build details:\n    Version: 4.0.2\n"), Family::Mpich);
        let arguments = Family::Mpich.arguments("a:2,b:1", 3, &["CONSORT_DEADLINE".to_string()]);
        assert_eq!(arguments, ["-prepend-rank", "-hosts", "a:2,b:1", "-n", "3"]);
        let arguments = Family::OpenMpi4.arguments("a", 1, &["CONSORT_DEADLINE".to_string()]);
        assert_eq!(arguments, ["--tag-output", "--host", "a", "-n", "1", "-x", "CONSORT_DEADLINE"]);
    }
}
