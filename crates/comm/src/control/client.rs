//! A rank's side of the control plane: typed calls with deadlines, and a thread that listens for failure.
//!
//! A call sends its part and sleeps until the thread has the answer. The thread also keeps the first failure
//! and sets one flag, so that a data path learns of a death with one load, without a call. After a failure
//! every call gives the same error, word for word.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use super::error::ControlError;
use super::failure::{JobFailure, What};
use super::frame::{
    Inbox, MAX_BLOB, MAX_NAME, MAX_REASON, Message, Reader, decode_pairs, encode_pairs, shortened,
};
use super::join::join;
use super::parity::differing;
use super::roster::{HEAPS, Packet};
use super::socket::{Progress, receive, send, wait_ready};
use crate::deadline::from_now;
use crate::job::Job;
use crate::limits::way_out;
use crate::shm::alarm::Watch;

/// How much later than the coordinator a rank gives up by itself: the coordinator's error names the missing ranks.
const SLACK: Duration = Duration::from_millis(50);
/// How long the last message of a rank may take.
const PARTING: Duration = Duration::from_millis(50);

/// What a rank brought to a rendezvous.
#[derive(Debug)]
pub struct Peer {
    /// Its process.
    pub pid: u32,
    /// Its blob.
    pub blob: Vec<u8>,
    /// Its file descriptor, where it brought one.
    pub fd: Option<OwnedFd>,
}

/// A rank's connection with the coordinator of its job.
#[derive(Debug)]
pub struct Control {
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    socket: OwnedFd,
    /// This rank.
    rank: usize,
    size: usize,
    /// The rank that runs the coordinator; `None` if the launcher does.
    host: Option<usize>,
    /// Whether the job failed: the only flag that a data path must check.
    failed: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    /// Callbacks for when the job fails.
    reactions: Mutex<Reactions>,
}

#[derive(Default)]
struct Reactions(Vec<Box<dyn Fn() + Send>>);

impl fmt::Debug for Reactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reactions({})", self.0.len())
    }
}

#[derive(Debug, Default)]
struct State {
    /// A call is in progress; the next one waits until it is over.
    busy: bool,
    /// The call in progress.
    calling: String,
    /// The last call that was answered.
    answered: String,
    answer: Option<Vec<Peer>>,
    failure: Option<JobFailure>,
    /// The error of every call since the first one failed.
    error: Option<ControlError>,
    /// The coordinator ended normally: no failure, but no more calls either.
    closed: bool,
    parted: bool,
}

impl Control {
    /// Connects with the job's coordinator and claims a rank. Retries until the deadline: the coordinator may be a rank
    /// that has not started yet.
    pub fn connect(job: &Job, rank: usize, size: usize, deadline: Duration) -> Result<Control, ControlError> {
        let until = from_now(deadline);
        let mut pause = Duration::from_millis(1);
        let (socket, inbox, launched) = loop {
            let last = match join(job, rank, size, until)? {
                Ok(admitted) => break admitted,
                Err(last) => last,
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ControlError::NotAdmitted { deadline, last });
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(Duration::from_millis(20));
        };
        let state = Mutex::new(State::default());
        let reactions = Mutex::default();
        let failed = AtomicBool::new(false);
        let host = if launched { None } else { Some(0) };
        let shared = Shared { socket, rank, size, host, failed, state, changed: Condvar::new(), reactions };
        let shared = Arc::new(shared);
        let listens = Arc::clone(&shared);
        let thread = thread::Builder::new().name("consort control".into());
        let listener =
            thread.spawn(move || listens.listen(inbox)).map_err(|error| machine("init", &error))?;
        Ok(Control { shared, listener: Some(listener) })
    }

    /// Whether the job failed. One load: cheap enough for the inner loop of a wait.
    #[inline]
    pub fn failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// The first failure of the job, if there was one.
    pub fn failure(&self) -> Option<JobFailure> {
        self.shared.lock().failure.clone()
    }

    /// Registers a callback that the listener thread runs as soon as the job fails.
    pub(crate) fn on_failure(&self, reaction: impl Fn() + Send + 'static) {
        let mut reactions = self.shared.reactions.lock().unwrap_or_else(PoisonError::into_inner);
        if self.failed() {
            reaction();
        }
        reactions.0.push(Box::new(reaction));
    }

    /// A check for a failure of the job that does not need this handle: one load if there is none.
    pub(crate) fn watch(&self) -> Watch {
        let shared = Arc::clone(&self.shared);
        Box::new(move || {
            let failed = shared.failed.load(Ordering::Acquire);
            let told = |failure: &JobFailure| (failure.culprits(), failure.failure());
            if failed { shared.lock().failure.as_ref().map(told) } else { None }
        })
    }

    /// Blocks until all ranks have arrived, and gives what each brought: its process, a blob, perhaps a descriptor.
    #[track_caller]
    pub fn rendezvous(
        &self,
        blob: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Duration,
    ) -> Result<Vec<Peer>, ControlError> {
        self.meet("rendezvous".to_string(), Location::caller(), blob, fd, deadline)
    }

    /// All ranks bring the descriptors of their heaps, which the coordinator keeps for the flight recorder.
    #[track_caller]
    pub(crate) fn share_heap(
        &self,
        blob: &[u8],
        heap: BorrowedFd<'_>,
        deadline: Duration,
    ) -> Result<Vec<Peer>, ControlError> {
        self.meet(HEAPS.to_string(), Location::caller(), blob, Some(heap), deadline)
    }

    /// Blocks until all ranks have arrived. The name must be the same on all.
    #[track_caller]
    pub fn barrier(&self, name: &str, deadline: Duration) -> Result<(), ControlError> {
        let name = format!("barrier \"{}\"", name.escape_debug());
        if name.len() > MAX_NAME {
            let (limit, length) = (MAX_NAME, name.len());
            return Err(ControlError::TooLong { call: "barrier", what: "its name", limit, length });
        }
        self.meet(name, Location::caller(), &[], None, deadline).map(|_| ())
    }

    /// Compares settings: an error on every rank, with every key that differs, unless all are equal.
    #[track_caller]
    pub fn parity(&self, pairs: &[(&str, &str)], deadline: Duration) -> Result<(), ControlError> {
        let mut pairs: Vec<(String, String)> =
            pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        pairs.sort();
        let blob = encode_pairs(&pairs);
        let peers = self.meet("parity".to_string(), Location::caller(), &blob, None, deadline)?;
        let ranks: Vec<Vec<(String, String)>> =
            peers.iter().map(|peer| decode_pairs(&peer.blob).unwrap_or_default()).collect();
        let differing = differing(&ranks);
        if differing.is_empty() {
            return Ok(());
        }
        Err(self.shared.lock().fail(ControlError::Parity { differing }))
    }

    /// Aborts the job: from now on all calls of every rank, this one included, fail with this reason.
    #[track_caller]
    pub fn abort(&self, reason: &str) {
        self.abort_at(reason, site(Location::caller()));
    }

    /// Aborts the job at a source line, which may be empty.
    pub(crate) fn abort_at(&self, reason: &str, site: String) {
        let reason = shortened(reason, MAX_REASON);
        self.shared.part(&Message::Abort { reason, site });
    }

    /// Says that this rank is done. Later calls fail.
    pub fn goodbye(&self) {
        let mut state = self.shared.lock();
        if !std::mem::replace(&mut state.parted, true) {
            state.error.get_or_insert(ControlError::Parted);
            drop(state);
            self.shared.changed.notify_all();
            self.shared.part(&Message::Goodbye);
        }
    }

    #[cfg(test)]
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.shared.socket.as_fd()
    }

    fn meet(
        &self,
        name: String,
        caller: &Location<'_>,
        blob: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Duration,
    ) -> Result<Vec<Peer>, ControlError> {
        if blob.len() > MAX_BLOB {
            let call = if name == "parity" { "parity" } else { "rendezvous" };
            return Err(ControlError::TooLong {
                call,
                what: "its data",
                limit: MAX_BLOB,
                length: blob.len(),
            });
        }
        let until = from_now(deadline);
        let site = site(caller);
        let during = format!("{name} at {site}");
        let milliseconds = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let message = Message::Meet { name: name.clone(), site, milliseconds, blob: blob.to_vec() };
        let fds: Vec<OwnedFd> = match fd.map(|fd| fd.try_clone_to_owned()).transpose() {
            Ok(fd) => fd.into_iter().collect(),
            Err(error) => return Err(machine(&during, &error)),
        };
        let packet = Packet { bytes: message.encode(fds.len()), fds };

        let shared = &*self.shared;
        let ready = |state: &State| !state.busy;
        let mut state = shared.wait(&during, until + SLACK, ready)?;
        state.busy = true;
        state.calling = name;
        drop(state);
        let sent = shared.send(&packet, until);
        let met = match sent {
            Ok(true) => shared
                .wait(&during, until + SLACK, |state| state.answer.is_some())
                .map(|mut state| state.answer.take()),
            Ok(false) => Err(shared.lock().fail(ControlError::Silent { during, host: shared.host })),
            // The connection is broken; the listener knows why, or will within the deadline.
            Err(_) => shared.wait(&during, until + SLACK, |_| false).map(|_| None),
        };
        shared.lock().busy = false;
        shared.changed.notify_all();
        met.map(Option::unwrap_or_default)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.goodbye();
        // Wakes the listener from its read.
        let _ = shutdown(&self.shared.socket, Shutdown::Both);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl State {
    /// Keeps the first error, and returns it.
    fn fail(&mut self, error: ControlError) -> ControlError {
        self.error.get_or_insert(error).clone()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `wanted` holds; a failure or the time `until` ends the wait.
    fn wait(
        &self,
        during: &str,
        until: Instant,
        wanted: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, ControlError> {
        let mut state = self.lock();
        loop {
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            // An answer that came before the failure still counts.
            if wanted(&state) && (state.answer.is_some() || state.failure.is_none()) {
                return Ok(state);
            }
            let during = during.to_string();
            if let Some(failure) = state.failure.clone() {
                return Err(state.fail(ControlError::Failed { during, failure: failure.into() }));
            }
            if state.closed {
                let failure = JobFailure { rank: Some(0), what: What::Left, at: during.clone() };
                return Err(state.fail(ControlError::Failed { during, failure: failure.into() }));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(state.fail(ControlError::Silent { during, host: self.host }));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a packet; false if the socket did not accept it in time.
    fn send(&self, packet: &Packet, until: Instant) -> io::Result<bool> {
        let mut progress = Progress::default();
        while !send(self.socket.as_fd(), packet, &mut progress)? {
            if !wait_ready(self.socket.as_fd(), PollFlags::OUT, until)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends a last message. If it cannot be sent, the closed connection says enough.
    fn part(&self, message: &Message) {
        let _ = self.send(&Packet { bytes: message.encode(0), fds: Vec::new() }, Instant::now() + PARTING);
    }

    /// Listens until the connection closes.
    fn listen(&self, mut inbox: Inbox) {
        loop {
            loop {
                match inbox.next(Reader::Rank(self.size)) {
                    Ok(None) => break,
                    Ok(Some((message, fds))) => self.hear(message, fds),
                    Err(_) => return self.hear_loss(),
                }
            }
            match receive(self.socket.as_fd(), &mut inbox, true, true) {
                Ok(0) | Err(Errno::CONNRESET) => {}
                Ok(_) => continue,
                Err(error) => {
                    // Most likely descriptors could not be received. The others wait for this rank.
                    let error = machine("control", &error.into());
                    let reason = error.failure().title();
                    drop(self.lock().fail(error));
                    self.part(&Message::Abort { reason: reason.clone(), site: String::new() });
                    let what = What::Aborted(reason);
                    return self.hear_failure(JobFailure { rank: Some(self.rank), what, at: String::new() });
                }
            }
            let state = self.lock();
            let expected = state.parted || state.closed;
            drop(state);
            if !expected {
                self.hear_loss();
            }
            return;
        }
    }

    fn hear(&self, message: Message, fds: Vec<OwnedFd>) {
        match message {
            Message::Met { peers } => {
                let mut fds = fds.into_iter();
                let peer =
                    |(pid, has_fd, blob)| Peer { pid, blob, fd: if has_fd { fds.next() } else { None } };
                let mut state = self.lock();
                state.answer = Some(peers.into_iter().map(peer).collect());
                state.answered = std::mem::take(&mut state.calling);
            }
            Message::Failed(failure) => return self.hear_failure(failure),
            Message::Closing => self.lock().closed = true,
            _ => return self.hear_loss(),
        }
        self.changed.notify_all();
    }

    /// The connection to the coordinator is lost, so the rank that ran it has died. The last call that it answered here
    /// is the last that it completed.
    fn hear_loss(&self) {
        let at = self.lock().answered.clone();
        self.hear_failure(JobFailure { rank: self.host, what: What::Lost, at });
    }

    fn hear_failure(&self, failure: JobFailure) {
        self.lock().failure.get_or_insert(failure);
        self.failed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        let reactions = self.reactions.lock().unwrap_or_else(PoisonError::into_inner);
        reactions.0.iter().for_each(|reaction| reaction());
    }
}

pub(super) fn machine(during: &str, error: &io::Error) -> ControlError {
    ControlError::Machine { during: during.to_string(), error: error.to_string(), note: way_out(error) }
}

fn site(caller: &Location<'_>) -> String {
    // The end of a long path says more than its beginning.
    let line = format!(":{}", caller.line());
    let file = caller.file();
    let start = (file.len() + line.len()).saturating_sub(MAX_NAME);
    let start = (start..=file.len()).find(|i| file.is_char_boundary(*i)).unwrap_or(file.len());
    format!("{}{line}", &file[start..])
}
