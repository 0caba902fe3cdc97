//! The coordinator's handle: starts the server in a thread, tells it what the launcher knows, ends it.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::geteuid;

use super::failure::{Exit, JobFailure};
use super::server::{Desk, Order, Server};
use crate::flight_record::FlightRecord;
use crate::job::Job;
use crate::limits::check_open_files;
use crate::recorder::read_descriptor;

/// The coordinator of a job, to which all ranks are connected: a thread of the launcher or of rank 0.
#[derive(Debug)]
pub struct Coordinator {
    desk: Arc<Desk>,
    wake: Arc<OwnedFd>,
    size: usize,
    thread: Option<JoinHandle<()>>,
}

impl Coordinator {
    /// Starts to serve a job of `size` ranks. `launched` says that the caller will call `ended` for every rank, so that
    /// a closed connection can wait for the reason.
    pub fn start(job: &Job, size: usize, launched: bool) -> io::Result<Coordinator> {
        Coordinator::start_for(job, size, launched, geteuid().as_raw())
    }

    pub(super) fn start_for(job: &Job, size: usize, launched: bool, uid: u32) -> io::Result<Coordinator> {
        let listener = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        bind(&listener, &SocketAddrUnix::new_abstract_name(job.socket().as_bytes())?)?;
        listen(&listener, 1024)?;
        // One connection per rank.
        check_open_files(size + 8)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let desk = Arc::new(Desk::default());
        let woken = wake.try_clone()?;
        let mut server =
            Server::new(listener, woken, Arc::clone(&desk), job.secret.clone(), uid, (size, launched));
        let thread = thread::Builder::new().name("consort coordinator".into()).spawn(move || server.run())?;
        Ok(Coordinator { desk, wake, size, thread: Some(thread) })
    }

    /// The process of a rank ended. Every survivor is told, unless the rank said goodbye and succeeded.
    pub fn ended(&self, rank: usize, exit: Exit) {
        self.order(Order::End(rank, exit));
    }

    /// Aborts the job: every rank is told why.
    pub fn abort(&self, reason: String) {
        self.order(Order::Abort(reason));
    }

    /// The first failure of the job, if there was one.
    pub fn failure(&self) -> Option<JobFailure> {
        self.desk.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the flight recorders of all ranks hold, even of ranks that are dead, stopped or stuck. Empty before the
    /// ranks have made a group.
    pub fn flight_record(&self) -> FlightRecord {
        let kept = self.desk.heaps.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut flight = FlightRecord::new(0..self.size);
        for heaps in kept {
            for (rank, heap) in heaps.ranks.iter().zip(&heaps.packet.fds) {
                flight.add(*rank, read_descriptor(heap, *rank));
            }
        }
        flight.sorted()
    }

    /// How many connections were rejected: of another user, without the secret, or silent.
    pub fn strangers(&self) -> u64 {
        self.desk.strangers.load(Ordering::Relaxed)
    }

    /// Ends the service; ranks that are still connected are told. Afterwards failure and strangers are final.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.order(Order::Stop);
            // The thread does not panic; if it did, there would be nothing left to stop.
            let _ = thread.join();
        }
    }

    fn order(&self, order: Order) {
        self.desk.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        // Fails only if the counter is at its maximum, and then a wake-up is pending already.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.stop();
    }
}
