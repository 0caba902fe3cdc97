//! One attempt of a rank to be admitted by the coordinator.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

use super::client::machine;
use super::error::ControlError;
use super::frame::{Inbox, Message, PROTOCOL, Reader};
use super::roster::Packet;
use super::socket::{Progress, receive, send, wait_ready};
use crate::job::Job;

/// The connection and whether a launcher runs the coordinator, or how the attempt failed if a retry may succeed.
pub(super) type Attempt = Result<(OwnedFd, Inbox, bool), String>;

/// Connects and claims a rank, waiting no longer than `until`.
pub(super) fn join(job: &Job, rank: usize, size: usize, until: Instant) -> Result<Attempt, ControlError> {
    let failed = |error: Errno| machine("init", &error.into());
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    let address = SocketAddrUnix::new_abstract_name(job.socket().as_bytes()).map_err(failed)?;
    match connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED) => return Ok(Err("no coordinator".to_string())),
        Err(Errno::AGAIN) => return Ok(Err("a coordinator with a full queue".to_string())),
        Err(error) => return Err(failed(error)),
    }
    // The secret is for a coordinator of the same user, not for a process that took the name before it.
    if socket_peercred(&socket).map_err(failed)?.uid != geteuid() {
        return Ok(Err("a coordinator of another user".to_string()));
    }
    let hello = Message::Hello {
        protocol: PROTOCOL,
        rank: rank as u32,
        size: size as u32,
        secret: job.secret.bytes(),
    };
    let packet = Packet { bytes: hello.encode(0), fds: Vec::new() };
    let closed = || Ok(Err("a closed connection".to_string()));
    if send(socket.as_fd(), &packet, &mut Progress::default()).is_err() {
        return closed();
    }
    let mut inbox = Inbox::default();
    let launched = loop {
        match inbox.next(Reader::Rank(size)) {
            Ok(Some((Message::Welcome { launched }, _))) => break launched,
            Ok(Some((Message::Refused { reason }, _))) => return Err(ControlError::Refused { reason }),
            Ok(None) => {}
            _ => return Ok(Err("an answer that is no message".to_string())),
        }
        match receive(socket.as_fd(), &mut inbox, true, false) {
            Ok(0) => return closed(),
            Err(Errno::AGAIN) => {
                let ready = wait_ready(socket.as_fd(), PollFlags::IN, until);
                if !ready.map_err(|error| machine("init", &error))? {
                    return Ok(Err("no answer".to_string()));
                }
            }
            Err(_) => return closed(),
            Ok(_) => {}
        }
    };
    // From here on the listener blocks in its reads; each send asks not to block.
    rustix::io::ioctl_fionbio(&socket, false).map_err(failed)?;
    Ok(Ok((socket, inbox, launched)))
}
