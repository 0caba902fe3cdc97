//! A job under test: `consort run` as a child process, its output line by line, and its end.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longer than any test takes on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A job that ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    /// The lines of the standard output that have not been taken yet.
    pub(crate) out: Vec<String>,
    pub(crate) err: String,
}

impl Ended {
    /// The lines that a rank wrote to the standard output.
    pub(crate) fn of(&self, rank: usize) -> Vec<&str> {
        let prefix = format!("[{rank}] ");
        self.out.iter().filter_map(|line| line.strip_prefix(&prefix)).collect()
    }

    /// The line of a rank with this beginning, without the beginning.
    pub(crate) fn after(&self, rank: usize, beginning: &str) -> &str {
        let mut lines = self.of(rank).into_iter();
        let found = lines.find_map(|line| line.strip_prefix(beginning));
        found.unwrap_or_else(|| panic!("rank {rank} says nothing of {beginning:?}: {self:?}"))
    }
}

/// A running job. It is ended when it is dropped.
pub(crate) struct Job {
    pub(crate) child: Child,
    out: Receiver<String>,
    err: Option<JoinHandle<String>>,
}

/// `consort run` with these arguments.
pub(crate) fn consort(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.arg("run").args(arguments);
    // Variables set around the tests are not meant for the ranks.
    for name in ["RANK", "SIZE", "JOB", "SECRET", "DEADLINE"] {
        command.env_remove(format!("CONSORT_{name}"));
    }
    command.env_remove("RANK_PROGRAM");
    command
}

/// `consort run -n N` of this test program in a part.
pub(crate) fn ranks(n: usize, part: &str) -> Command {
    let mut command = consort(&["-n", &n.to_string(), "--"]);
    command.arg(own_program()).args(OWN_ARGUMENTS).env("RANK_PROGRAM", part);
    command
}

/// The job of `ranks` with options before the program.
pub(crate) fn with_options(n: usize, part: &str, options: &[&str]) -> Command {
    let plain = ranks(n, part);
    let mut command = consort(options);
    // The first argument is `run`.
    command.args(plain.get_args().skip(1)).env("RANK_PROGRAM", part);
    command
}

/// `consort run -n N` of a shell script.
pub(crate) fn shells(n: usize, script: &str) -> Command {
    consort(&["-n", &n.to_string(), "--", "sh", "-c", script])
}

/// The command as the last arguments of another one, which becomes it.
pub(crate) fn through(wrapper: &[&str], command: &Command) -> Command {
    let [program, arguments @ ..] = wrapper else { panic!("no wrapper") };
    let mut outer = Command::new(program);
    outer.args(arguments).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer
}

/// The arguments with which this test program runs only its part.
pub(crate) const OWN_ARGUMENTS: [&str; 4] = ["--exact", "rank_program", "--nocapture", "--quiet"];

pub(crate) fn own_program() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// Runs a job to its end.
pub(crate) fn run(command: Command) -> Ended {
    Job::start(command).end()
}

impl Job {
    pub(crate) fn start(mut command: Command) -> Job {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (sends, receives) = channel();
        thread::spawn(move || {
            for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
                let _ = sends.send(String::from_utf8_lossy(&line).into_owned());
            }
        });
        let err = thread::spawn(move || {
            let mut text = Vec::new();
            let _ = err.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Job { child, out: receives, err: Some(err) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of the standard output that contains `what`.
    pub(crate) fn line_with(&self, what: &str) -> String {
        let start = Instant::now();
        loop {
            let left = LONG.saturating_sub(start.elapsed());
            let line = self.out.recv_timeout(left).unwrap_or_else(|error| panic!("no {what:?}: {error}"));
            if line.contains(what) {
                return line;
            }
        }
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Ended {
        let mut lines = Vec::new();
        let start = Instant::now();
        // The output ends when no process holds its pipe any more: no process may outlive the job.
        loop {
            match self.out.recv_timeout(LONG.saturating_sub(start.elapsed())) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("the job does not end: {lines:?}"),
            }
        }
        let err = self.err.take().unwrap().join().unwrap();
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        Ended { code, out: lines, err }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process that this test started.
pub(crate) fn kill(signal: &str, pid: u32) {
    let status = Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap();
    assert!(status.success(), "kill -{signal} {pid}");
}

/// Whether a process runs; a zombie does not.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

/// Waits until a condition holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "never: {what}");
        thread::yield_now();
    }
}
