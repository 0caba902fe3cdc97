//! Runs this program under an mpirun, and keeps what came of it.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::ranks::RANK;

/// An mpirun, and the library of another family.
pub(crate) struct Launcher {
    program: &'static str,
    arguments: &'static [&'static str],
    /// Starts ranks over the network between the hosts of `hosts.sh`.
    on_hosts: &'static [&'static str],
    pub(crate) other_library: Option<&'static str>,
}

/// The launchers of this machine, and those that it lacks.
pub(crate) fn launchers() -> (Vec<Launcher>, Vec<&'static str>) {
    let open_mpi = Launcher {
        program: "mpirun.openmpi",
        arguments: &["--allow-run-as-root", "--oversubscribe"],
        on_hosts: OPEN_MPI_ON_HOSTS,
        other_library: Some("libmpich.so.12"),
    };
    let mpich = Launcher {
        program: "mpirun.mpich",
        arguments: &[],
        on_hosts: MPICH_ON_HOSTS,
        other_library: Some("libmpi.so.40"),
    };
    let there = |launcher: &Launcher| Command::new(launcher.program).arg("--version").output().is_ok();
    let (mut found, lacks): (Vec<_>, Vec<_>) = [open_mpi, mpich].into_iter().partition(there);
    if !lacks.is_empty() {
        found.iter_mut().for_each(|launcher| launcher.other_library = None);
    }
    (found, lacks.into_iter().map(|launcher| launcher.program).collect())
}

/// What came of a run.
pub(crate) struct Ran {
    what: String,
    /// The exit code of mpirun; none if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) time: Duration,
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

/// Where `hosts.sh` puts the program that starts others on a host; and its hosts, with their numbers of ranks.
const AGENT: &str = "/run/netns/agent";
const HOSTS: &str = "h1:1,h2:2";
const SCRIPT: &str = include_str!("hosts.sh");

/// Only the network, although both hosts are one machine.
const OPEN_MPI_ON_HOSTS: &[&str] = &[
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
    HOSTS,
];
const MPICH_ON_HOSTS: &[&str] = &["-launcher", "rsh", "-launcher-exec", AGENT, "-hosts", HOSTS];

/// The command that runs another where `hosts.sh` has made two hosts.
fn among_hosts() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--uts", "sh", "-ec", SCRIPT, "hosts.sh"]);
    command
}

/// Whether this machine lets a test make hosts.
pub(crate) fn can_make_hosts() -> bool {
    among_hosts().arg("true").output().is_ok_and(|output| output.status.success())
}

/// Runs `name` of `ranks.rs` on `n` ranks.
pub(crate) fn run(launcher: &Launcher, n: usize, name: &str, variables: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(launcher.program);
    command.args(launcher.arguments).args(["-n", &n.to_string()]);
    finish(command, format!("{} -n {n} {name}", launcher.program), name, variables)
}

/// Runs `name` of `ranks.rs` on three ranks of two hosts.
pub(crate) fn run_on_hosts(launcher: &Launcher, name: &str, variables: &[(&str, &str)]) -> Ran {
    let mut command = among_hosts();
    command.arg(launcher.program).args(launcher.arguments).args(launcher.on_hosts).args(["-n", "3"]);
    finish(command, format!("{} on two hosts: {name}", launcher.program), name, variables)
}

fn finish(mut command: Command, what: String, name: &str, variables: &[(&str, &str)]) -> Ran {
    let start = Instant::now();
    command.arg(std::env::current_exe().unwrap()).args([RANK, name]);
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
    println!("{what} {variables:?}: {:?}", start.elapsed());
    Ran { what, code, out, time: start.elapsed() }
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
