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
    pub(crate) other_library: Option<&'static str>,
}

/// The launchers of this machine, and those that it lacks.
pub(crate) fn launchers() -> (Vec<Launcher>, Vec<&'static str>) {
    let known = [
        ("mpirun.openmpi", &["--allow-run-as-root", "--oversubscribe"][..], "libmpich.so.12"),
        ("mpirun.mpich", &[][..], "libmpi.so.40"),
    ];
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    let (found, lacks): (Vec<_>, Vec<_>) = known.into_iter().partition(|(program, ..)| there(program));
    let both = lacks.is_empty();
    let launcher =
        |(program, arguments, other)| Launcher { program, arguments, other_library: both.then_some(other) };
    (found.into_iter().map(launcher).collect(), lacks.into_iter().map(|(program, ..)| program).collect())
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

/// Runs `name` of `ranks.rs` on `n` ranks.
pub(crate) fn run(launcher: &Launcher, n: usize, name: &str, variables: &[(&str, &str)]) -> Ran {
    let start = Instant::now();
    let mut command = Command::new(launcher.program);
    command.args(launcher.arguments).args(["-n", &n.to_string()]);
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
    let what = format!("{} -n {n} {name} {variables:?}", launcher.program);
    println!("{what}: {:?}", start.elapsed());
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
