//! A team: the ranks of a job under test, ours or a peer's, that execute commands.
//!
//! Each rank connects to a socket, whose name it gets as its last argument, and says `RANK SIZE`. Then it reads lines
//! `KIND OP BYTES ITERATIONS`, does that, and answers `NANOSECONDS CPU_NANOSECONDS`, or `error` and why. Between the
//! two it sleeps in a read, so that one team does not disturb the other. It ends when the connection does.
//!
//! The socket has no name in the file system and the team's output goes to memory, so nothing can be left behind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::event::{PollFd, PollFlags};

use super::process::{Process, poll_until};
use crate::report::wrong;

/// How long ranks may take to connect.
const START: Duration = Duration::from_secs(60);
/// How long they may take for one command. Loops are made to last some milliseconds.
const ANSWER: Duration = Duration::from_secs(120);

/// A rank's report of a loop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) nanos: f64,
    pub(crate) cpu_nanos: f64,
}

/// A team. It is ended when this is dropped.
pub(crate) struct Team {
    name: &'static str,
    process: Process,
    ranks: Vec<BufReader<UnixStream>>,
}

impl Team {
    /// Starts a command whose `ranks` ranks connect to the socket that it gets as its last argument.
    pub(crate) fn start(name: &'static str, mut command: Command, ranks: usize) -> anyhow::Result<Team> {
        let cannot = || format!("bench: {name}: cannot open a socket");
        let mut token = [0; 16];
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut token)).with_context(cannot)?;
        let socket = format!("consort-bench-{:032x}", u128::from_le_bytes(token));
        let address = SocketAddr::from_abstract_name(&socket).with_context(cannot)?;
        let listener = UnixListener::bind_addr(&address).with_context(cannot)?;
        command.arg(&socket);
        let process = Process::start(command).with_context(|| format!("bench: {name}"))?;
        let mut team = Team { name, process, ranks: Vec::new() };
        let until = Instant::now() + START;
        let mut places: Vec<Option<BufReader<UnixStream>>> = (0..ranks).map(|_| None).collect();
        while places.iter().any(Option::is_none) {
            if !team.process.wait_or(&listener, until) {
                return Err(team.lost("before all its ranks had reported"));
            }
            let Ok((stream, _)) = listener.accept() else { continue };
            // The socket's name is a secret, but not a well kept one.
            let user = rustix::net::sockopt::socket_peercred(&stream).map(|peer| peer.uid);
            if user != Ok(rustix::process::getuid()) {
                continue;
            }
            let (rank, stream) = team.greet(stream, ranks)?;
            places[rank] = Some(stream);
        }
        team.ranks = places.into_iter().flatten().collect();
        Ok(team)
    }

    /// Reads the greeting of a connection: its rank.
    fn greet(&mut self, stream: UnixStream, ranks: usize) -> anyhow::Result<(usize, BufReader<UnixStream>)> {
        stream.set_read_timeout(Some(START)).context("bench: cannot set a deadline")?;
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        // An unreadable line is an invalid greeting.
        let _ = stream.read_line(&mut line);
        let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [rank, size] if size == ranks && rank < ranks => Ok((rank, stream)),
            [_, size] => {
                let failure = wrong(format!("bench: {}", self.name), format!("{ranks} ranks"), size);
                bail!(failure.note(format!("use {} in the command of the peer", crate::mpirun::RANKS)))
            }
            _ => Err(self.lost("without saying which rank it is")),
        }
    }

    /// Sends a command to every rank; returns their answers, in rank order.
    pub(crate) fn ask(
        &mut self,
        kind: &str,
        op: &str,
        bytes: usize,
        iterations: u64,
    ) -> anyhow::Result<Vec<Answer>> {
        let line = format!("{kind} {op} {bytes} {iterations}\n");
        for rank in &mut self.ranks {
            // A rank that is gone is detected below.
            let _ = rank.get_mut().write_all(line.as_bytes());
        }
        let until = Instant::now() + ANSWER;
        let mut answers: Vec<Option<Answer>> = vec![None; self.ranks.len()];
        while answers.iter().any(Option::is_none) {
            let open: Vec<usize> = (0..answers.len()).filter(|rank| answers[*rank].is_none()).collect();
            let streams: Vec<&UnixStream> = open.iter().map(|rank| self.ranks[*rank].get_ref()).collect();
            let ready = wait_for_any(&streams, until);
            if ready.is_empty() {
                return Err(self.lost(&format!("without an answer to `{}` in {ANSWER:?}", line.trim())));
            }
            for rank in ready.into_iter().map(|i| open[i]) {
                let mut text = String::new();
                if !self.ranks[rank].read_line(&mut text).is_ok_and(|len| len > 0) {
                    return Err(self.lost(&format!("at `{}`", line.trim())));
                }
                if let Some(error) = text.strip_prefix("error ") {
                    bail!("bench: {}: rank {rank}: `{}`: {}", self.name, line.trim(), error.trim());
                }
                let numbers: Vec<f64> =
                    text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
                let [nanos, cpu_nanos] = numbers[..] else {
                    let who = format!("bench: {}: rank {rank}", self.name);
                    bail!(wrong(who, "two numbers", format!("`{}`", text.trim())));
                };
                answers[rank] = Some(Answer { nanos, cpu_nanos });
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// The error of a team that was lost: when, how its process ended, and its last output.
    fn lost(&mut self, when: &str) -> anyhow::Error {
        self.ranks.clear();
        let how = match self.process.end() {
            Some(status) if !status.success() => format!(" ({status})"),
            _ => String::new(),
        };
        anyhow!("bench: {} ended{how} {when}{}", self.name, self.process.said())
    }
}

/// The streams that are readable or closed before the time is up.
fn wait_for_any(streams: &[&UnixStream], until: Instant) -> Vec<usize> {
    let mut fds: Vec<PollFd<'_>> = streams.iter().map(|stream| PollFd::new(*stream, PollFlags::IN)).collect();
    poll_until(&mut fds, until);
    (0..fds.len()).filter(|i| !fds[*i].revents().is_empty()).collect()
}

impl Drop for Team {
    fn drop(&mut self) {
        // The ranks end with their connections.
        self.ranks.clear();
        self.process.end();
    }
}
