//! The coordinator's state of the ranks, and its transitions. No sockets and no clock: the server passes in what
//! happened and when, and takes out what to send.
//!
//! Ranks meet: a rank brings a name, a source line, a blob and perhaps a descriptor, and gets those of all ranks once
//! all have arrived. Rendezvous, parity and barrier are such meetings. A rank arrives at its next meeting only after
//! the last one was complete, so there is at most one at a time, and the k-th meeting of every rank is the same. A rank
//! that arrives under a different name than the first is a mismatch, reported to all at once.
//!
//! The first failure is the job's. It is kept, and sent to every rank that is connected or connects later.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::failure::{Exit, JobFailure, What};
use super::frame::{MAX_REASON, Message, shortened};
use crate::cause::Cause;

/// How long a closed connection waits for the launcher's report on how the process ended. The kernel closes a dying
/// process's sockets just before it reports the death, so the report comes within a millisecond.
const WORD: Duration = Duration::from_millis(50);

/// The name of the meeting to which ranks bring their heaps.
pub(super) const HEAPS: &str = "start-up";

/// A message and its descriptors, ready to be sent to several ranks.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// What a rank brings to a meeting.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) name: String,
    pub(super) site: String,
    pub(super) until: Instant,
    pub(super) blob: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemberState {
    /// It has not connected yet.
    Absent,
    Here,
    /// It said goodbye.
    Left,
    /// Its connection closed at this time, without a goodbye.
    Lost(Instant),
    /// Its process ended without a goodbye.
    Gone(Exit),
}

struct Member {
    state: MemberState,
    pid: u32,
    /// The last call it completed.
    last: String,
    /// Why it stopped, if it has published that.
    cause: Option<Cause>,
    arrival: Option<Arrival>,
}

pub(super) struct Roster {
    members: Vec<Member>,
    /// How many meetings were completed.
    meetings: u64,
    failure: Option<JobFailure>,
    /// Whether a launcher reports how processes end.
    launched: bool,
    /// Packets to send, each with its rank.
    outgoing: Vec<(usize, Arc<Packet>)>,
    /// The heaps that were brought to the last meeting of heaps, until they are taken.
    heaps: Option<Heaps>,
}

/// The ranks' heaps of one group: which ranks brought one, and the packet that holds them in that order.
#[derive(Clone, Debug)]
pub(super) struct Heaps {
    pub(super) ranks: Vec<usize>,
    pub(super) packet: Arc<Packet>,
}

impl Roster {
    pub(super) fn new(size: usize, launched: bool) -> Roster {
        let absent =
            || Member { state: MemberState::Absent, pid: 0, last: String::new(), cause: None, arrival: None };
        let members = (0..size).map(|_| absent()).collect();
        Roster { members, meetings: 0, failure: None, launched, outgoing: Vec::new(), heaps: None }
    }

    /// The packets to send since the last call of this.
    pub(super) fn take_outgoing(&mut self) -> Vec<(usize, Arc<Packet>)> {
        std::mem::take(&mut self.outgoing)
    }

    /// The heaps that ranks brought since the last call of this.
    pub(super) fn take_heaps(&mut self) -> Option<Heaps> {
        self.heaps.take()
    }

    pub(super) fn failure(&self) -> Option<&JobFailure> {
        self.failure.as_ref()
    }

    /// A process that knows the secret claims a rank.
    pub(super) fn join(&mut self, rank: usize, size: usize, pid: u32) -> Result<(), String> {
        if size != self.members.len() {
            return Err(format!("expected a world of {} ranks, got {size}", self.members.len()));
        }
        let Some(member) = self.members.get_mut(rank) else {
            return Err(format!("expected a rank below {size}, got {rank}"));
        };
        if member.state != MemberState::Absent {
            return Err(format!("rank {rank} was already claimed by process {}", member.pid));
        }
        (member.state, member.pid) = (MemberState::Here, pid);
        self.send(rank, &Message::Welcome { launched: self.launched });
        if let Some(failure) = self.failure.clone() {
            self.send(rank, &Message::Failed(failure));
        }
        Ok(())
    }

    /// A rank arrives at its next meeting; an error if it has arrived already.
    pub(super) fn arrive(&mut self, rank: usize, arrival: Arrival) -> Result<(), ()> {
        if self.members[rank].arrival.is_some() || self.members[rank].state != MemberState::Here {
            return Err(());
        }
        self.members[rank].arrival = Some(arrival);
        if self.failure.is_none() {
            self.compare_names(rank);
            self.proceed();
        }
        Ok(())
    }

    /// A rank stops, and has published why. This must come before all other consequences.
    pub(super) fn explain(&mut self, rank: usize, mut cause: Cause) {
        let size = self.members.len();
        cause.culprits.retain(|rank| *rank < size);
        cause.text = shortened(&cause.text, MAX_REASON);
        cause.notes = shortened(&cause.notes, MAX_REASON);
        if cause.by < size && !cause.culprits.is_empty() {
            self.members[rank].cause = Some(cause);
        }
    }

    /// A rank said goodbye.
    pub(super) fn leave(&mut self, rank: usize) {
        self.members[rank].state = MemberState::Left;
        self.proceed();
    }

    /// The coordinator failed.
    pub(super) fn abort_here(&mut self, reason: String) {
        let host = if self.launched { None } else { Some(0) };
        self.abort(host, reason, String::new());
    }

    /// A rank aborts the job.
    pub(super) fn abort(&mut self, rank: Option<usize>, reason: String, site: String) {
        self.fail(JobFailure { rank, what: What::Aborted(reason), at: site });
    }

    /// A rank's connection closed.
    pub(super) fn lose(&mut self, rank: usize, now: Instant) {
        if self.members[rank].state == MemberState::Here {
            self.members[rank].state = MemberState::Lost(now);
            if !self.launched {
                self.fail_by(rank, What::Lost);
            }
        }
    }

    /// The launcher reports how a rank's process ended. All that the process sent has been read before this.
    pub(super) fn end(&mut self, rank: usize, exit: Exit) {
        let was = self.members[rank].state;
        if was != MemberState::Left {
            self.members[rank].state = MemberState::Gone(exit);
        }
        let others_here = self.members.iter().any(|member| member.state == MemberState::Here);
        let vanished = matches!(was, MemberState::Here | MemberState::Lost(_)) && others_here;
        if vanished || !exit.is_success() {
            self.fail_by(rank, What::Ended(exit));
        } else {
            // A rank that never connected concerns the others only if they wait for it.
            self.proceed();
        }
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Instant) {
        for rank in 0..self.members.len() {
            if matches!(self.members[rank].state, MemberState::Lost(since) if now >= since + WORD) {
                self.fail_by(rank, What::Lost);
            }
        }
        if self.deadline().is_some_and(|deadline| now >= deadline) {
            let missing: Vec<usize> =
                (0..self.members.len()).filter(|rank| self.members[*rank].arrival.is_none()).collect();
            let at = self.meeting_text();
            self.fail(JobFailure { rank: missing.first().copied(), what: What::Late(missing), at });
        }
    }

    /// When the next tick is due.
    pub(super) fn due(&self) -> Option<Instant> {
        if self.failure.is_some() {
            return None;
        }
        let words = self.members.iter().filter_map(|member| match member.state {
            MemberState::Lost(since) => Some(since + WORD),
            _ => None,
        });
        words.chain(self.deadline()).min()
    }

    /// The coordinator ends: tells the ranks that are still connected.
    pub(super) fn close(&mut self) {
        self.broadcast(&Message::Closing);
    }

    /// The earliest deadline of the ranks at the meeting.
    fn deadline(&self) -> Option<Instant> {
        self.members.iter().filter_map(|member| Some(member.arrival.as_ref()?.until)).min()
    }

    /// The current meeting, as text.
    fn meeting_text(&self) -> String {
        let first = self.members.iter().find_map(|member| member.arrival.as_ref());
        first.map_or(String::new(), |arrival| arrival.name.clone())
    }

    fn compare_names(&mut self, came: usize) {
        let mut calls: Vec<(String, String, Vec<usize>)> = Vec::new();
        for (rank, member) in self.members.iter().enumerate() {
            let Some(arrival) = &member.arrival else { continue };
            match calls.iter_mut().find(|(name, site, _)| *name == arrival.name && *site == arrival.site) {
                Some((_, _, ranks)) => ranks.push(rank),
                None => calls.push((arrival.name.clone(), arrival.site.clone(), vec![rank])),
            }
        }
        // The same call from two source lines is the same call; its lines are shown only in a mismatch.
        if calls.iter().any(|(name, _, _)| *name != calls[0].0) {
            let at = format!("call {}", self.meetings);
            self.fail(JobFailure { rank: Some(came), what: What::Differs(calls), at });
        }
    }

    /// Completes the meeting if all have arrived; fails if a rank that has not arrived never will.
    fn proceed(&mut self) {
        let came = self.members.iter().filter(|member| member.arrival.is_some()).count();
        if self.failure.is_some() || came == 0 {
            return;
        }
        if came == self.members.len() {
            return self.complete();
        }
        let absent = |member: &Member| match member.state {
            MemberState::Left => Some(What::Left),
            MemberState::Gone(exit) => Some(What::Ended(exit)),
            _ => None,
        };
        let never = self.members.iter().enumerate().find_map(|(rank, member)| Some((rank, absent(member)?)));
        if let Some((rank, what)) = never {
            let at = if what == What::Left { self.meeting_text() } else { self.members[rank].last.clone() };
            self.fail(self.blamed(rank, what, at));
        }
    }

    fn complete(&mut self) {
        let (mut peers, mut fds, mut ranks) = (Vec::new(), Vec::new(), Vec::new());
        let brings_heaps = self.meeting_text() == HEAPS;
        for (rank, member) in self.members.iter_mut().enumerate() {
            let Some(arrival) = member.arrival.take() else { continue };
            peers.push((member.pid, arrival.fd.is_some(), arrival.blob));
            ranks.extend(arrival.fd.is_some().then_some(rank));
            fds.extend(arrival.fd);
            member.last = arrival.name;
        }
        self.meetings += 1;
        let bytes = Message::Met { peers }.encode(fds.len());
        let packet = Arc::new(Packet { bytes, fds });
        if brings_heaps {
            self.heaps = Some(Heaps { ranks, packet: Arc::clone(&packet) });
        }
        self.outgoing.extend((0..self.members.len()).map(|rank| (rank, Arc::clone(&packet))));
    }

    /// A failure of a rank, after the last call it completed.
    fn fail_by(&mut self, rank: usize, what: What) {
        self.fail(self.blamed(rank, what, self.members[rank].last.clone()));
    }

    /// A failure of a rank, or the cause that it published.
    fn blamed(&self, rank: usize, what: What, at: String) -> JobFailure {
        match &self.members[rank].cause {
            Some(cause) => {
                let rank = cause.culprits.first().copied();
                JobFailure { rank, what: What::Caused(cause.clone()), at }
            }
            None => JobFailure { rank: Some(rank), what, at },
        }
    }

    fn fail(&mut self, failure: JobFailure) {
        if self.failure.is_none() {
            self.broadcast(&Message::Failed(failure.clone()));
            self.failure = Some(failure);
        }
    }

    fn send(&mut self, rank: usize, message: &Message) {
        self.outgoing.push((rank, Arc::new(Packet { bytes: message.encode(0), fds: Vec::new() })));
    }

    fn broadcast(&mut self, message: &Message) {
        let here = (0..self.members.len()).filter(|rank| self.members[*rank].state == MemberState::Here);
        let packet = Arc::new(Packet { bytes: message.encode(0), fds: Vec::new() });
        self.outgoing.extend(here.map(|rank| (rank, Arc::clone(&packet))));
    }
}

#[cfg(test)]
mod tests;
