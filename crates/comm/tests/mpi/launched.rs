//! Runs this program under an mpirun, and keeps what came of it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs, process};

use super::ranks::{PROGRAM, RANK};

/// Other mpiruns than those of the system: `PROGRAM` or `PROGRAM=LIBRARY`, separated by commas. All of them must be there.
const VARIABLE: &str = "CONSORT_TEST_MPI";
/// Those of the system. One that is missing is a counted skip.
const OPEN_MPI: &str = "mpirun.openmpi";
const MPICH: &str = "mpirun.mpich";

/// Whose mpirun it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    OpenMpi4,
    OpenMpi5,
    Mpich,
}

impl Family {
    /// Whose a program is; `None` if it is not there.
    fn of(program: &str) -> Option<Family> {
        let output = Command::new(program).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Some(match text {
            _ if text.contains("Open MPI) 4") || text.contains("OpenRTE") => Family::OpenMpi4,
            _ if text.contains("Open MPI") || text.contains("PRRTE") => Family::OpenMpi5,
            _ => Family::Mpich,
        })
    }

    /// As any user; more ranks than cores, if no hosts are given with their numbers.
    fn arguments(self, on_hosts: bool) -> &'static [&'static str] {
        match self {
            Family::OpenMpi4 => &["--allow-run-as-root", "--oversubscribe"],
            Family::OpenMpi5 if on_hosts => &["--allow-run-as-root"],
            Family::OpenMpi5 => &["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"],
            Family::Mpich => &[],
        }
    }

    /// A rank that dies does not end the others. In MPICH this needs besides a shell around each rank that hides its end
    /// and ignores the signal that the others would get.
    fn goes_on(self) -> &'static [&'static str] {
        match self {
            Family::OpenMpi4 => &["--enable-recovery"],
            Family::OpenMpi5 => &["--runtime-options", "recoverable"],
            Family::Mpich => &["-disable-auto-cleanup"],
        }
    }

    fn shell(self) -> &'static [&'static str] {
        match self {
            Family::OpenMpi4 | Family::OpenMpi5 => &[],
            Family::Mpich => &["sh", "-c", "trap '' USR1; \"$0\" \"$@\"; exit 0"],
        }
    }

    /// Starts ranks through the agent of `hosts.sh`, and only over its network, although all hosts are one machine.
    fn on_hosts(self) -> &'static [&'static str] {
        match self {
            Family::OpenMpi4 => &[
                "--mca",
                "plm_rsh_agent",
                AGENT,
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                "tcp,self",
                "--mca",
                "btl_tcp_if_include",
                "eth0",
                "--mca",
                "oob_tcp_if_include",
                "eth0",
                "--host",
            ],
            Family::OpenMpi5 => &[
                "--prtemca",
                "plm_ssh_agent",
                AGENT,
                "--prtemca",
                "prte_if_include",
                "eth0",
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                "tcp,self",
                "--mca",
                "btl_tcp_if_include",
                "eth0",
                "--host",
            ],
            Family::Mpich => &["-launcher", "rsh", "-launcher-exec", AGENT, "-hosts"],
        }
    }
}

/// An mpirun, and the library that its ranks use.
pub(crate) struct Launcher {
    program: String,
    family: Family,
    /// In place of the one that the ranks find.
    library: Option<String>,
    /// A library of another family.
    pub(crate) other_library: Option<&'static str>,
}

/// The launchers that are tried, and those that this machine lacks.
pub(crate) fn launchers() -> (Vec<Launcher>, Vec<&'static str>) {
    let (open_mpi, mpich) = (Family::of(OPEN_MPI), Family::of(MPICH));
    let launcher = |program: &str, family, library: Option<&str>| {
        let other = if family == Family::Mpich {
            open_mpi.map(|_| "libmpi.so.40")
        } else {
            mpich.map(|_| "libmpich.so.12")
        };
        let (program, library) = (program.to_string(), library.map(str::to_string));
        Launcher { program, family, library, other_library: other }
    };
    if let Ok(list) = env::var(VARIABLE) {
        let named = list.split(',').map(|named| {
            let (program, library) = named.split_once('=').map_or((named, None), |(p, l)| (p, Some(l)));
            let family = Family::of(program).unwrap_or_else(|| panic!("{VARIABLE}: no {program}"));
            launcher(program, family, library)
        });
        return (named.collect(), Vec::new());
    }
    let both = [(OPEN_MPI, open_mpi), (MPICH, mpich)];
    let found = both.iter().filter_map(|(program, family)| Some(launcher(program, (*family)?, None)));
    let lacks = both.iter().filter(|(_, family)| family.is_none()).map(|(program, _)| *program);
    (found.collect(), lacks.collect())
}

/// A program in C that starts MPI, makes one call, prints what it gives, and ends with its input.
const MPI_ONLY: &str = "#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int one = 1, sum = 0;
    MPI_Init(&argc, &argv);
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf(\"%d\\n\", sum);
    fflush(stdout);
    while (getchar() != EOF) {}
    return MPI_Finalize();
}
";

/// Runs ranks that do nothing but start MPI; `None` if the launcher has no compiler beside it.
pub(crate) fn run_mpi_only(launcher: &Launcher, n: usize) -> Option<Ran> {
    let folder = Folder::new();
    let (source, program) = (folder.0.join("mpi_only.c"), folder.0.join("mpi_only"));
    fs::write(&source, MPI_ONLY).unwrap();
    let mut compiler = Command::new(launcher.program.replace("mpirun", "mpicc"));
    let compiled = compiler.arg(&source).arg("-o").arg(&program).output().ok()?;
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some(run(launcher, n, "mpi_only", &[(PROGRAM, &program.to_string_lossy())]))
}

/// What a rank told the test before it failed.
pub(crate) struct Told {
    /// Its error.
    pub(crate) text: String,
    /// How long the call took that failed.
    pub(crate) took: Duration,
    /// For how much of the time after its deadline it was ready to run, and other processes had its core.
    pub(crate) starved: Duration,
}

/// What came of a run.
pub(crate) struct Ran {
    what: String,
    /// The exit code of mpirun; none if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) time: Duration,
    pub(crate) told: BTreeMap<usize, Told>,
    /// On how many addresses of networks the ranks listened, all together.
    pub(crate) listened: usize,
}

impl Ran {
    pub(crate) fn is_fine(&self) {
        assert_eq!(self.code, Some(0), "{}", self.text());
    }

    pub(crate) fn text(&self) -> String {
        format!("{}: code {:?} after {:?}\n{}", self.what, self.code, self.time, self.out)
    }
}

const LIMIT: Duration = Duration::from_secs(300);

/// Where `hosts.sh` puts the program that starts others on a host.
pub(crate) const AGENT: &str = "/run/netns/agent";
const SCRIPT: &str = include_str!("hosts.sh");

/// The command that runs another on the first of `count` hosts that `hosts.sh` makes.
fn among_hosts(count: usize, rate: &str, mark: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--uts", "sh", "-ec", SCRIPT, "hosts.sh"]);
    command.args([&count.to_string(), rate, mark]);
    command
}

/// Whether this machine lets a test make hosts.
pub(crate) fn can_make_hosts() -> bool {
    among_hosts(3, SLOW, "none").arg("true").output().is_ok_and(|output| output.status.success())
}

/// Runs `name` of `ranks.rs` on `n` ranks.
pub(crate) fn run(launcher: &Launcher, n: usize, name: &str, variables: &[(&str, &str)]) -> Ran {
    let command = started(Command::new(&launcher.program), launcher, &[], n);
    finish(command, launcher, (n, name), variables, &Folder::new())
}

/// The same, where a rank that dies does not end the others.
pub(crate) fn run_without_cleanup(
    launcher: &Launcher,
    n: usize,
    name: &str,
    variables: &[(&str, &str)],
) -> Ran {
    let (folder, family) = (Folder::new(), launcher.family);
    let mut command = started(Command::new(&launcher.program), launcher, family.goes_on(), n);
    command.args(family.shell());
    finish(command, launcher, (n, name), variables, &folder)
}

/// The rate of a slow network.
pub(crate) const SLOW: &str = "400mbit";

/// Runs `name` of `ranks.rs` on hosts with these numbers of ranks, over a network of this rate. Nothing may be left on
/// any of them.
pub(crate) fn run_on_hosts(
    launcher: &Launcher,
    hosts: &[usize],
    rate: &str,
    name: &str,
    variables: &[(&str, &str)],
) -> Ran {
    let folder = Folder::new();
    let mut command = among_hosts(hosts.len(), rate, &folder.0.to_string_lossy());
    command.arg(&launcher.program);
    let list: Vec<String> = (1..).zip(hosts).map(|(host, ranks)| format!("h{host}:{ranks}")).collect();
    let (list, ranks) = (list.join(","), hosts.iter().sum());
    let more = [launcher.family.on_hosts(), &[&list]].concat();
    let command = started(command, launcher, &more, ranks);
    let ran = finish(command, launcher, (ranks, name), variables, &folder);
    assert!(!ran.out.contains("left behind"), "{}", ran.text());
    ran
}

/// Where ranks leave what they tell; removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("consort-mpi-{}-{}", process::id(), NEXT.fetch_add(1, Relaxed));
        let folder = env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn listened(&self) -> usize {
        let files = fs::read_dir(&self.0).unwrap().map(|file| file.unwrap().path());
        let lists = files.filter(|file| file.to_string_lossy().contains("/listens-"));
        lists.map(|file| fs::read_to_string(file).unwrap().lines().count()).sum()
    }

    fn told(&self) -> BTreeMap<usize, Told> {
        let told = |file: &Path| {
            let rank = file.file_name()?.to_str()?.strip_prefix("rank-")?.parse().ok()?;
            let text = fs::read_to_string(file).unwrap();
            let (times, text) = text.split_once('\n').unwrap();
            let (took, starved) = times.split_once(' ').unwrap();
            let [took, starved] = [took, starved].map(|time| Duration::from_micros(time.parse().unwrap()));
            Some((rank, Told { text: text.to_string(), took, starved }))
        };
        fs::read_dir(&self.0).unwrap().filter_map(|file| told(&file.unwrap().path())).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The arguments of an mpirun, up to the program.
fn started(mut command: Command, launcher: &Launcher, more: &[&str], n: usize) -> Command {
    let on_hosts = more.starts_with(launcher.family.on_hosts());
    command.args(launcher.family.arguments(on_hosts)).args(more).args(["-n", &n.to_string()]);
    command
}

fn finish(
    mut command: Command,
    launcher: &Launcher,
    (n, name): (usize, &str),
    variables: &[(&str, &str)],
    folder: &Folder,
) -> Ran {
    command.arg(env::current_exe().unwrap());
    command.envs(launcher.library.iter().map(|library| ("CONSORT_MPI", library)));
    let library = launcher.library.as_deref().unwrap_or_default();
    let what = format!("{} {library} -n {n} {name} {variables:?}", launcher.program);
    come_of(command, what, name, variables, folder)
}

/// Runs this program as the only rank, without any launcher.
pub(crate) fn run_alone(name: &str, variables: &[(&str, &str)]) -> Ran {
    let command = Command::new(env::current_exe().unwrap());
    come_of(command, format!("alone {name} {variables:?}"), name, variables, &Folder::new())
}

fn come_of(
    mut command: Command,
    what: String,
    name: &str,
    variables: &[(&str, &str)],
    folder: &Folder,
) -> Ran {
    let start = Instant::now();
    command.args([RANK, name]).arg(&folder.0);
    command
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let [out, err] = [read(out), read(err)];
    let code = wait(&mut child, start);
    let out = out.join().unwrap() + &err.join().unwrap();
    let (told, time) = (folder.told(), start.elapsed());
    println!("{what}: {time:?}");
    let ran = Ran { what, code, out, time, told, listened: folder.listened() };
    assert!(!ran.out.contains("panicked at"), "{}", ran.text());
    ran
}

fn read(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, start: Instant) -> Option<i32> {
    while start.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}
