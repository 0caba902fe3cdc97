//! What the ranks of a job tell one another over MPI besides data: that one has failed or left, and who is late.
//!
//! A rank reads its notices while it waits or tests, and at no other time. One that computes, is stopped or is dead does not
//! answer a question, and so is named.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use consort_types::Failure;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::CommError;
use crate::cause::Cause;
use crate::control::{ControlError, differing};
use crate::cores::{self, Cores};
use crate::deadline::from_now;
use crate::exit;
use crate::flight_record::FlightRecord;
use crate::mpi::calls::Mpi;
use crate::mpi::comm::Comm;
use crate::mpi::error::MpiError;
use crate::mpi::failure::{cause, elsewhere, reason, silent};
use crate::mpi::flight::Flight;
use crate::mpi::groups;
use crate::mpi::options::Options;
use crate::mpi::span::Span;
use crate::mpi::tape::Sent;
use crate::mpi::waiting::pause;
use crate::recorder::Tape;

/// How long a rank waits for answers. After its deadline it asks, then tells the others that it stops, and a call must end
/// within 100 ms: so there is time left in which it may not run.
const ANSWERS: Duration = Duration::from_millis(50);
/// How often a waiting rank looks for notices.
const LOOK: Duration = Duration::from_micros(50);
/// How long a rank that fails makes sure that the others learn of it.
const LAST: Duration = Duration::from_millis(25);
/// How long a rank of a job that failed stays, so that the others hear of it and print their own errors. One that has no
/// error of its own stays longer, since the first process to end may end all.
const LINGER: Duration = Duration::from_millis(100);
const LINGER_LONGER: Duration = Duration::from_millis(300);
/// How many deadlines a rank waits at its end for the others, which may compute or write a file alone.
const DEADLINES_AT_END: u32 = 10;

/// What one rank tells another.
#[derive(Serialize, Deserialize)]
enum Notice {
    /// It stops, and why.
    Stopped(Cause),
    /// It leaves a group, after this number of calls.
    Left { group: u64, calls: u64 },
    /// It asks how many calls of a group the other has started.
    Question { id: u64, group: u64 },
    /// The answer.
    Answer { id: u64, answer: Answer },
    /// It asks for the flight recorder of the other.
    TapeQuestion,
    /// What its flight recorder holds.
    Tape(Sent),
}

/// What a rank answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// How many calls of the group it has started.
    pub(crate) calls: u64,
    /// What it does, and its source line.
    pub(crate) doing: String,
    pub(crate) site: String,
}

#[derive(Default)]
struct Mailbox {
    sending: Vec<Flight>,
    receiving: Vec<Flight>,
    cause: Option<Cause>,
    /// How many calls of a group a rank had started when it left.
    left: BTreeMap<(u64, usize), u64>,
    /// The question that is open, and its answers.
    question: u64,
    answers: BTreeMap<usize, Answer>,
    /// The ranks that have stopped, this one included.
    stopped: BTreeSet<usize>,
    /// What flight recorders hold: those of stopped ranks, which nothing changes any more, and answers.
    tapes: BTreeMap<usize, Tape>,
}

/// This rank's connection with the others.
pub(crate) struct Job {
    mpi: Rc<Mpi>,
    world: Comm,
    /// For notices and settings only.
    control: Comm,
    deadline: Duration,
    options: Options,
    /// The cores of the ranks on this host.
    cores: Cell<Cores>,
    /// This rank among them.
    local_rank: Cell<usize>,
    mailbox: RefCell<Mailbox>,
    looked: Cell<Option<Instant>>,
    /// Whether this rank has told the others that it stops.
    has_stopped: Cell<bool>,
}

impl Job {
    /// Connects the ranks, given the deadline of later calls, and what is left of this one's.
    pub(super) fn new(
        mpi: Rc<Mpi>,
        options: Options,
        (deadline, left): (Duration, Duration),
    ) -> Result<Rc<Job>, MpiError> {
        let world = Comm::world(&mpi)?;
        let control = world.dup(left)?;
        // Until they are known.
        let cores = Cell::new(Cores::of(1, []));
        let (mailbox, looked, has_stopped, local_rank) = Default::default();
        let job =
            Job { mpi, world, control, deadline, options, cores, local_rank, mailbox, looked, has_stopped };
        let open = Failure::new("the process ended while it was a rank").of("mpi");
        exit::open_process(open.note("drop the mesh before: return from `main`, and do not leak it"));
        Ok(Rc::new(job))
    }

    /// Finds out this rank's place on its host, and which cores the ranks there have together.
    pub(super) fn share_cores(&self, local: &Comm, until: Instant) -> Result<(), CommError> {
        self.local_rank.set(local.rank());
        let mask = cores::mine();
        let room = Span::bytes_of(vec![0; mask.len() * local.size()]);
        let flight = local.all_gather(Span::bytes_of(mask.clone()), room)?;
        let flight = self.finish("init", until, flight)?;
        self.cores.set(Cores::of(local.size(), flight.span(1).bytes().chunks_exact(mask.len())));
        Ok(())
    }

    /// What the environment says.
    pub(crate) fn options(&self) -> Options {
        self.options
    }

    pub(super) fn cores(&self) -> Cores {
        self.cores.get()
    }

    /// Checks that settings have the same values on every rank.
    pub(crate) fn parity(
        &self,
        during: &str,
        pairs: &[(&str, &str)],
        deadline: Duration,
    ) -> Result<(), ControlError> {
        let mine: Vec<(String, String)> =
            pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let all = self.exchange(during, &mine, deadline).map_err(|error| ControlError::Mpi(error.into()))?;
        let differing = differing(&all);
        if differing.is_empty() { Ok(()) } else { Err(ControlError::Parity { differing }) }
    }

    pub(super) fn world(&self) -> &Comm {
        &self.world
    }

    /// This rank among those on its host.
    pub(crate) fn local_rank(&self) -> usize {
        self.local_rank.get()
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.me()
    }

    fn me(&self) -> usize {
        self.control.rank()
    }

    /// The library.
    pub(crate) fn library(&self) -> &str {
        &self.mpi.identity.version
    }

    /// Why another rank has stopped.
    pub(super) fn cause(&self) -> Option<Cause> {
        self.mailbox.borrow().cause.clone()
    }

    /// How many calls of a group a rank had started when it left, if it has.
    pub(super) fn left(&self, group: u64, rank: usize) -> Option<u64> {
        self.mailbox.borrow().left.get(&(group, rank)).copied()
    }

    /// Whether any rank has left a group.
    pub(super) fn has_left(&self, group: u64) -> bool {
        self.mailbox.borrow().left.range((group, 0)..=(group, usize::MAX)).next().is_some()
    }

    /// Reads notices, if it is time to, and answers questions.
    pub(super) fn look(&self, now: Instant) -> Result<(), MpiError> {
        if self.control.size() == 1 || self.looked.get().is_some_and(|before| now < before + LOOK) {
            return Ok(());
        }
        self.looked.set(Some(now));
        let mut notices = Vec::new();
        {
            let mailbox = &mut *self.mailbox.borrow_mut();
            while let Some(flight) = self.control.receive_any()? {
                mailbox.receiving.push(flight);
            }
            let mut outcome = Ok(());
            // What fails is tested once: its rank is gone.
            mailbox.receiving.retain_mut(|flight| match flight.test() {
                Ok(true) => {
                    notices
                        .extend(read(flight.span(0).bytes()).map(|notice: Notice| (flight.source, notice)));
                    false
                }
                Ok(false) => true,
                Err(error) => {
                    outcome = Err(error);
                    false
                }
            });
            mailbox.sending.retain_mut(|flight| match flight.test() {
                Ok(over) => !over,
                Err(error) => {
                    outcome = Err(error);
                    false
                }
            });
            outcome?;
        }
        notices.into_iter().try_for_each(|(from, notice)| self.heed(from, notice))
    }

    fn heed(&self, from: usize, notice: Notice) -> Result<(), MpiError> {
        let mailbox = || self.mailbox.borrow_mut();
        match notice {
            Notice::Stopped(cause) => {
                let mailbox = &mut *mailbox();
                mailbox.stopped.insert(from);
                mailbox.cause.get_or_insert(cause);
            }
            Notice::Left { group, calls } => drop(mailbox().left.insert((group, from), calls)),
            Notice::Question { id, group } => {
                return self.tell([from], &Notice::Answer { id, answer: groups::answer(group) });
            }
            Notice::Answer { id, answer } => {
                let mailbox = &mut *mailbox();
                if mailbox.question == id {
                    mailbox.answers.insert(from, answer);
                }
            }
            Notice::TapeQuestion => {
                let tape = groups::tape();
                return tape.map_or(Ok(()), |tape| self.tell([from], &Notice::Tape(Sent::new(tape))));
            }
            Notice::Tape(sent) => {
                sent.tape(from).into_iter().for_each(|tape| drop(mailbox().tapes.insert(from, tape)));
            }
        }
        Ok(())
    }

    /// Sends a notice to these ranks, also if some of them cannot be reached.
    fn tell(&self, ranks: impl IntoIterator<Item = usize>, notice: &Notice) -> Result<(), MpiError> {
        let mut outcome = Ok(());
        for rank in ranks.into_iter().filter(|rank| *rank != self.me()) {
            // The last notice of a rank is over when it is read, so that none is left when MPI ends.
            let strict = matches!(notice, Notice::Left { .. });
            match self.control.send(Span::bytes_of(bytes_of(notice)), rank, 0, strict) {
                Ok(flight) => self.mailbox.borrow_mut().sending.push(flight),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Asks these ranks about a group, and gives the answers that come soon.
    pub(super) fn ask(&self, ranks: &[usize], group: u64) -> BTreeMap<usize, Answer> {
        let id = {
            let mailbox = &mut *self.mailbox.borrow_mut();
            mailbox.question += 1;
            mailbox.answers.clear();
            mailbox.question
        };
        let others = || ranks.iter().copied().filter(|rank| *rank != self.me());
        // A rank that cannot be reached does not answer.
        let _ = self.tell(others(), &Notice::Question { id, group });
        self.look_for(ANSWERS, |mailbox| mailbox.answers.len() == others().count());
        std::mem::take(&mut self.mailbox.borrow_mut().answers)
    }

    /// What the flight recorders of these ranks hold: of those that have stopped, and of those that answer now.
    pub(super) fn flight_record(&self, ranks: &[usize], mine: Option<Tape>) -> FlightRecord {
        let unknown: Vec<usize> = {
            let Mailbox { stopped, tapes, .. } = &mut *self.mailbox.borrow_mut();
            tapes.retain(|rank, _| stopped.contains(rank));
            ranks.iter().copied().filter(|rank| *rank != self.me() && !tapes.contains_key(rank)).collect()
        };
        let _ = self.tell(unknown.iter().copied(), &Notice::TapeQuestion);
        self.look_for(ANSWERS, |mailbox| unknown.iter().all(|rank| mailbox.tapes.contains_key(rank)));
        let mailbox = self.mailbox.borrow();
        let mut flight = FlightRecord::new(ranks.iter().copied());
        for rank in ranks {
            let tape = if *rank == self.me() { mine.as_ref() } else { mailbox.tapes.get(rank) };
            flight.add(*rank, tape.cloned());
        }
        flight.sorted()
    }

    /// Reads notices for a while, until there is no more to wait for. Whoever cannot be reached does not answer.
    fn look_for(&self, limit: Duration, is_over: impl Fn(&Mailbox) -> bool) {
        let until = Instant::now() + limit;
        while !is_over(&self.mailbox.borrow()) && Instant::now() < until {
            self.looked.set(None);
            let _ = self.look(Instant::now());
            thread::yield_now();
        }
    }

    /// Tells all others that this rank gives up.
    pub(crate) fn give_up(&self, cause: &Cause) {
        self.stop(cause, groups::tape());
    }

    /// Tells all others that this rank stops, once, with what its flight recorder holds, and makes sure that they learn of
    /// it.
    pub(super) fn stop(&self, cause: &Cause, tape: Option<Tape>) {
        if self.has_stopped.replace(true) {
            return;
        }
        exit::open_process(reason(self.me(), cause));
        // The cause is sent first and alone: so short a message arrives even if its receiver looks later.
        let _ = self.tell(0..self.control.size(), &Notice::Stopped(cause.clone()));
        if let Some(tape) = &tape {
            let _ = self.tell(0..self.control.size(), &Notice::Tape(Sent::new(tape.clone())));
        }
        {
            let mailbox = &mut *self.mailbox.borrow_mut();
            mailbox.stopped.insert(self.me());
            mailbox.tapes.extend(tape.map(|tape| (self.me(), tape)));
        }
        self.look_for(LAST, |mailbox| mailbox.sending.is_empty());
    }

    /// The others get a moment for their own errors: the first process to end may end all.
    fn linger(&self, until: Instant) {
        self.look_for(until.saturating_duration_since(Instant::now()), |_| false);
    }

    /// Prints what the flight recorders of the ranks hold, if no lower rank has stopped, which does so.
    fn report(&self) {
        let ranks: Vec<usize> = (0..self.control.size()).collect();
        let mine = self.mailbox.borrow().tapes.get(&self.me()).cloned();
        let flight = self.flight_record(&ranks, mine);
        if self.mailbox.borrow().stopped.first() == Some(&self.me()) && !flight.is_empty() {
            eprintln!("{flight}");
        }
    }

    /// Tells the members of a group that this rank leaves it.
    pub(super) fn leave(&self, ranks: &[usize], group: u64, calls: u64) {
        let _ = self.tell(ranks.iter().copied(), &Notice::Left { group, calls });
    }

    /// Waits for a call of its own, on behalf of `during`. If that fails, no such call can be made any more.
    fn finish(&self, during: &str, until: Instant, flight: Flight) -> Result<Flight, CommError> {
        self.finished(during, until, flight).inspect_err(|error| {
            if self.cause().is_none() {
                self.give_up(&cause(self.me(), error));
            }
        })
    }

    fn finished(&self, during: &str, until: Instant, mut flight: Flight) -> Result<Flight, CommError> {
        let start = Instant::now();
        while !flight.test()? {
            let now = Instant::now();
            self.look(now)?;
            if let Some(cause) = self.cause() {
                return Err(elsewhere(&cause));
            }
            if now >= until {
                let all: Vec<usize> = (0..self.control.size()).collect();
                return Err(silent(during, self.me(), &all, &self.ask(&all, 0)));
            }
            pause(start, now);
        }
        Ok(flight)
    }

    /// Waits until all ranks have read all notices, unless one of them stops.
    fn close(&self, until: Instant) -> Result<(), CommError> {
        let start = Instant::now();
        let mut now = start;
        while !self.mailbox.borrow().sending.is_empty() && self.cause().is_none() && now < until {
            self.looked.set(None);
            self.look(now)?;
            pause(start, now);
            now = Instant::now();
        }
        self.finish("finalize", until, self.control.barrier()?).map(drop)
    }

    /// What every rank says.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
        &self,
        during: &str,
        mine: &T,
        deadline: Duration,
    ) -> Result<Vec<T>, CommError> {
        let (n, until) = (self.control.size(), from_now(deadline));
        let mine = bytes_of(mine);
        let len = Span::bytes_of((mine.len() as u64).to_le_bytes().to_vec());
        let flight = self.control.all_gather(len, Span::bytes_of(vec![0; 8 * n]))?;
        let flight = self.finish(during, until, flight)?;
        let lens = flight.span(1).bytes().as_chunks::<8>().0;
        let lens: Vec<usize> = lens.iter().map(|len| u64::from_le_bytes(*len) as usize).collect();
        let room = Span::bytes_of(vec![0; lens.iter().sum()]);
        let flight = self.control.all_gather_v(Span::bytes_of(mine), room, &lens)?;
        let flight = self.finish(during, until, flight)?;
        let mut rest = flight.span(1).bytes();
        let mut all = Vec::with_capacity(n);
        for len in lens {
            let (bytes, others) = rest.split_at(len);
            rest = others;
            let unreadable =
                || MpiError::Call { call: "MPI_Iallgatherv", text: "settings that cannot be read".into() };
            all.push(read(bytes).ok_or_else(unreadable)?);
        }
        Ok(all)
    }
}

fn bytes_of<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_extend(value, Vec::new()).unwrap_or_default()
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    postcard::from_bytes(bytes).ok()
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} over {}", self.me(), self.control.size(), self.library())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let is_over = self.has_stopped.get() || self.cause().is_some() || thread::panicking();
        if !is_over && self.close(from_now(self.deadline.saturating_mul(DEADLINES_AT_END))).is_ok() {
            // An error of the last call of all concerns nobody any more.
            let _ = self.mpi.finalize(self.deadline);
            return exit::close_process();
        }
        // Others may be gone, so MPI cannot be ended in an orderly way.
        if self.has_stopped.get() {
            let until = Instant::now() + LINGER;
            self.report();
            return self.linger(until);
        }
        if let Some(cause) = self.cause() {
            exit::open_process(reason(self.me(), &cause));
        }
        self.linger(Instant::now() + LINGER_LONGER);
    }
}
