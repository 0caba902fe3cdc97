//! The coordinator's sockets: admission, reading, sending.
//!
//! One thread polls everything and never blocks on a peer. A new connection waits in the lobby until it has sent a
//! correct hello: from the same user, with the job's secret, in time. All others are strangers: counted, not answered,
//! dropped. The lobby is small; when it is full the connection that has been silent for longest is dropped, so that a
//! flood of strangers costs a rank at most a second attempt.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};

use super::failure::{Exit, JobFailure};
use super::frame::{Garbage, Inbox, MAX_NAME, Message, Reader};
use super::roster::{Arrival, Heaps, Packet, Roster};
use super::socket::{Progress, receive, send, timespec};
use crate::deadline::from_now;
use crate::job::Secret;
use crate::limits::{free_files, way_out};
use crate::shm::status::cause_in;

/// How long a new connection may take for its hello.
const HANDSHAKE: Duration = Duration::from_millis(500);
/// How long ranks may take, when the coordinator ends, to read its last messages.
const FINISH: Duration = Duration::from_secs(1);
/// Maximum number of connections in the lobby.
const LOBBY: usize = 64;
/// Maximum number of groups of all ranks whose heaps are kept: each costs a descriptor for every rank.
const GROUPS: usize = 4;

/// What the launcher tells the coordinator.
#[derive(Debug)]
pub(super) enum Order {
    /// The process of a rank ended.
    End(usize, Exit),
    /// The job is aborted, for this reason.
    Abort(String),
    /// The service ends.
    Stop,
}

/// What the server's thread and the handle share.
#[derive(Debug, Default)]
pub(super) struct Desk {
    pub(super) orders: Mutex<Vec<Order>>,
    pub(super) strangers: AtomicU64,
    pub(super) failed: AtomicBool,
    pub(super) failure: Mutex<Option<JobFailure>>,
    /// The heaps of the last groups, newest last, for the flight recorder.
    pub(super) heaps: Mutex<VecDeque<Heaps>>,
}

/// A connection that has not identified itself.
struct Guest {
    socket: OwnedFd,
    inbox: Inbox,
    pid: u32,
    since: Instant,
}

/// The connection of a rank.
struct Link {
    socket: OwnedFd,
    inbox: Inbox,
    outbox: VecDeque<(Arc<Packet>, Progress)>,
}

pub(super) struct Server {
    listener: OwnedFd,
    wake: OwnedFd,
    desk: Arc<Desk>,
    secret: Secret,
    /// The user that ranks must run as.
    uid: u32,
    roster: Roster,
    lobby: VecDeque<Guest>,
    links: Vec<Option<Link>>,
    /// How many groups' heaps are kept.
    groups: usize,
}

impl Server {
    pub(super) fn new(
        listener: OwnedFd,
        wake: OwnedFd,
        desk: Arc<Desk>,
        secret: Secret,
        uid: u32,
        (size, launched): (usize, bool),
    ) -> Server {
        let links = (0..size).map(|_| None).collect();
        let roster = Roster::new(size, launched);
        // Besides the connections and pipes of the ranks there must be descriptors for the heaps of the next group.
        let groups = (free_files() / size.max(1)).saturating_sub(4).clamp(1, GROUPS);
        Server { listener, wake, desk, secret, uid, roster, lobby: VecDeque::new(), links, groups }
    }

    /// Serves until it is told to stop.
    pub(super) fn run(&mut self) {
        loop {
            self.wait();
            // The orders first: when a process is reported to have ended, all that it sent can be read.
            let orders: Vec<Order> = self.orders();
            self.admit();
            self.read_lobby();
            (0..self.links.len()).for_each(|rank| self.read(rank));
            let mut stop = false;
            for order in orders {
                match order {
                    Order::End(rank, exit) => {
                        self.learn(rank);
                        self.roster.end(rank, exit);
                    }
                    Order::Abort(reason) => self.roster.abort(None, reason, String::new()),
                    Order::Stop => stop = true,
                }
            }
            self.roster.tick(Instant::now());
            if stop {
                self.roster.close();
            }
            // Before a rank learns that all have arrived: what it does next can then be read at once.
            self.publish();
            self.deliver();
            self.publish();
            if stop {
                return self.finish();
            }
        }
    }

    /// Sends what the sockets did not accept yet: some ranks may still wait for what others have received.
    fn finish(&mut self) {
        let until = Instant::now() + FINISH;
        loop {
            let behind = self.links.iter().flatten().filter(|link| !link.outbox.is_empty());
            let mut fds: Vec<PollFd<'_>> =
                behind.map(|link| PollFd::new(&link.socket, PollFlags::OUT)).collect();
            let left = until.saturating_duration_since(Instant::now());
            if fds.is_empty() || left.is_zero() {
                return;
            }
            let _ = poll(&mut fds, Some(&timespec(left)));
            self.deliver();
        }
    }

    /// Blocks until something can be done.
    fn wait(&mut self) {
        let handshake = self.lobby.front().map(|guest| guest.since + HANDSHAKE);
        let due = [handshake, self.roster.due()].into_iter().flatten().min();
        let left = due.map(|due| timespec(due.saturating_duration_since(Instant::now())));
        let mut fds =
            vec![PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
        fds.extend(self.lobby.iter().map(|guest| PollFd::new(&guest.socket, PollFlags::IN)));
        fds.extend(self.links.iter().flatten().map(|link| {
            let more = if link.outbox.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            PollFd::new(&link.socket, PollFlags::IN | more)
        }));
        // An interrupted poll found nothing yet; valid arguments cause no other error.
        let _ = poll(&mut fds, left.as_ref());
    }

    fn orders(&mut self) -> Vec<Order> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut *self.desk.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn stranger(&self) {
        self.desk.strangers.fetch_add(1, Ordering::Relaxed);
    }

    /// Accepts connections into the lobby: at most a lobby's worth, then the ranks are served.
    fn admit(&mut self) {
        for _ in 0..LOBBY {
            let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE) => {
                    // No descriptor is free: dropping the oldest guest frees one for the next connection.
                    if self.lobby.pop_front().is_some() {
                        self.stranger();
                    } else {
                        thread::sleep(Duration::from_millis(1));
                    }
                    return;
                }
                Err(_) => return,
            };
            match socket_peercred(&socket) {
                Ok(peer) if peer.uid.as_raw() == self.uid => {
                    if self.lobby.len() == LOBBY {
                        self.lobby.pop_front();
                        self.stranger();
                    }
                    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or(0);
                    self.lobby.push_back(Guest {
                        socket,
                        inbox: Inbox::default(),
                        pid,
                        since: Instant::now(),
                    });
                }
                _ => self.stranger(),
            }
            // A hello is sent right after connecting, so most of them need not wait for the next round.
            self.read_lobby();
        }
    }

    /// Reads the guests' messages: a correct hello admits a rank, anything else drops the connection.
    fn read_lobby(&mut self) {
        for mut guest in std::mem::take(&mut self.lobby) {
            let open = match receive(guest.socket.as_fd(), &mut guest.inbox, false, false) {
                Ok(n) => n > 0,
                Err(error) => error == Errno::AGAIN,
            };
            match guest.inbox.next(Reader::Lobby) {
                Ok(None) if open && guest.since.elapsed() < HANDSHAKE => self.lobby.push_back(guest),
                Ok(Some((Message::Hello { rank, size, secret, .. }, _))) if self.secret.is(&secret) => {
                    self.greet(guest, rank as usize, size as usize);
                }
                _ => self.stranger(),
            }
        }
    }

    fn greet(&mut self, guest: Guest, rank: usize, size: usize) {
        let mut link = Link { socket: guest.socket, inbox: guest.inbox, outbox: VecDeque::new() };
        match self.roster.join(rank, size, guest.pid) {
            Ok(()) => {
                self.links[rank] = Some(link);
                self.deliver();
            }
            Err(reason) => {
                let packet = Packet { bytes: Message::Refused { reason }.encode(0), fds: Vec::new() };
                link.outbox.push_back((Arc::new(packet), Progress::default()));
                // A new socket accepts so few bytes at once, and they outlive the connection.
                link.flush();
            }
        }
    }

    /// Reads a rank's messages until no more are available.
    fn read(&mut self, rank: usize) {
        while let Some(link) = &mut self.links[rank] {
            match receive(link.socket.as_fd(), &mut link.inbox, true, false) {
                Ok(0) => return self.close(rank),
                Ok(_) => {}
                Err(Errno::AGAIN) => return,
                Err(error @ Errno::MFILE) => {
                    // What the rank sent is lost, which is not the rank's fault.
                    let error = error.into();
                    return self
                        .roster
                        .abort_here(format!("no room for the ranks' heaps: {error}: {}", way_out(&error)));
                }
                Err(_) => return self.close(rank),
            }
            loop {
                let Some(link) = &mut self.links[rank] else { return };
                let obeyed = match link.inbox.next(Reader::Coordinator) {
                    Ok(None) => break,
                    Ok(Some((message, mut fds))) => self.obey(rank, message, fds.pop()),
                    Err(Garbage) => Err(()),
                };
                if obeyed.is_err() {
                    // A rank that sends invalid messages is treated as dead.
                    return self.close(rank);
                }
            }
        }
    }

    fn obey(&mut self, rank: usize, message: Message, fd: Option<OwnedFd>) -> Result<(), ()> {
        match message {
            Message::Meet { name, site, .. } if name.len().max(site.len()) > MAX_NAME => return Err(()),
            Message::Meet { name, site, milliseconds, blob } => {
                let until = from_now(Duration::from_millis(milliseconds));
                self.roster.arrive(rank, Arrival { name, site, until, blob, fd })?;
            }
            Message::Abort { reason, site } => self.roster.abort(Some(rank), reason, site),
            Message::Goodbye => {
                self.learn(rank);
                self.roster.leave(rank);
            }
            _ => return Err(()),
        }
        Ok(())
    }

    /// Reads why a rank stops, before its end is processed.
    fn learn(&mut self, rank: usize) {
        let kept = self.desk.heaps.lock().unwrap_or_else(PoisonError::into_inner);
        let of_rank = |heaps: &Heaps| {
            let at = heaps.ranks.iter().position(|other| *other == rank)?;
            cause_in(heaps.packet.fds.get(at)?)
        };
        if let Some(cause) = kept.iter().find_map(of_rank) {
            self.roster.explain(rank, cause);
        }
    }

    fn close(&mut self, rank: usize) {
        self.links[rank] = None;
        self.learn(rank);
        self.roster.lose(rank, Instant::now());
    }

    /// Sends outgoing packets, as far as the sockets accept them.
    fn deliver(&mut self) {
        for (rank, packet) in self.roster.take_outgoing() {
            if let Some(link) = &mut self.links[rank] {
                link.outbox.push_back((packet, Progress::default()));
            }
        }
        for rank in 0..self.links.len() {
            if self.links[rank].as_mut().is_some_and(|link| !link.flush()) {
                self.close(rank);
            }
        }
    }

    /// Gives the first failure and the ranks' heaps to the handle.
    fn publish(&mut self) {
        if let Some(heaps) = self.roster.take_heaps() {
            let mut kept = self.desk.heaps.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push_back(heaps);
            if kept.len() > self.groups {
                kept.pop_front();
            }
        }
        if let Some(failure) = self.roster.failure()
            && !self.desk.failed.load(Ordering::Relaxed)
        {
            *self.desk.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.clone());
            self.desk.failed.store(true, Ordering::Release);
        }
    }
}

impl Link {
    /// Sends what is queued; false if the connection is broken.
    fn flush(&mut self) -> bool {
        while let Some((packet, progress)) = self.outbox.front_mut() {
            match send(self.socket.as_fd(), packet, progress) {
                Ok(true) => drop(self.outbox.pop_front()),
                Ok(false) => return true,
                Err(_) => return false,
            }
        }
        true
    }
}
