//! The connection between the launcher and its watcher: messages of one size, over a socket that only they have.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;

use crate::control::socket::{Inbox, Packet, Progress, receive, send};

/// The messages between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// From the launcher: start a rank. Its standard output and error come with the message.
    Start { rank: usize },
    /// From the launcher: send a signal to all ranks and their process groups.
    Signal { signal: i32 },
    /// From the launcher: end the remaining processes: SIGTERM now, SIGKILL after the grace period.
    End { grace: Duration },
    /// From the watcher: a rank runs as this process.
    Started { rank: usize, pid: u32 },
    /// From the watcher: a rank was not started, because of this system error.
    NotStarted { rank: usize, error: i32 },
    /// From the watcher: a rank ended, with this status as `wait` gives it.
    Ended { rank: usize, status: i32 },
    /// From the watcher, last: all processes have ended except `left` of them.
    Done { left: usize },
}

/// The bytes of a message: its kind and a rank, 4 bytes each, and a number, 8 bytes; little-endian.
const SIZE: usize = 16;

impl Message {
    fn encode(self) -> Vec<u8> {
        let (kind, rank, number) = match self {
            Message::Start { rank } => (1, rank, 0),
            Message::Signal { signal } => (2, 0, i64::from(signal)),
            Message::End { grace } => (3, 0, i64::try_from(grace.as_nanos()).unwrap_or(i64::MAX)),
            Message::Started { rank, pid } => (4, rank, i64::from(pid)),
            Message::NotStarted { rank, error } => (5, rank, i64::from(error)),
            Message::Ended { rank, status } => (6, rank, i64::from(status)),
            Message::Done { left } => (7, left, 0),
        };
        [&u32::to_le_bytes(kind)[..], &(rank as u32).to_le_bytes(), &number.to_le_bytes()].concat()
    }

    fn decode(bytes: [u8; SIZE]) -> Option<Message> {
        let [a, b, c, d, e, f, g, h, number @ ..] = bytes;
        let rank = u32::from_le_bytes([e, f, g, h]) as usize;
        let number = i64::from_le_bytes(number);
        Some(match u32::from_le_bytes([a, b, c, d]) {
            1 => Message::Start { rank },
            2 => Message::Signal { signal: i32::try_from(number).ok()? },
            3 => Message::End { grace: Duration::from_nanos(u64::try_from(number).ok()?) },
            4 => Message::Started { rank, pid: u32::try_from(number).ok()? },
            5 => Message::NotStarted { rank, error: i32::try_from(number).ok()? },
            6 => Message::Ended { rank, status: i32::try_from(number).ok()? },
            7 => Message::Done { left: rank },
            _ => return None,
        })
    }
}

/// One end of the connection. Nothing here blocks.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    inbox: Inbox,
    outbox: VecDeque<(Packet, Progress)>,
}

impl Link {
    pub(super) fn new(socket: OwnedFd) -> Link {
        Link { socket, inbox: Inbox::default(), outbox: VecDeque::new() }
    }

    /// Sends a message and descriptors, as soon as the socket accepts them. An error means that the peer is gone.
    pub(super) fn send(&mut self, message: Message, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        self.outbox.push_back((Packet { bytes: message.encode(), fds }, Progress::default()));
        self.flush()
    }

    /// Sends what the socket accepts now.
    pub(super) fn flush(&mut self) -> Result<(), Errno> {
        while let Some((packet, progress)) = self.outbox.front_mut() {
            if !send(self.socket.as_fd(), packet, progress)? {
                break;
            }
            self.outbox.pop_front();
        }
        Ok(())
    }

    /// Whether something is queued to be sent.
    pub(super) fn is_behind(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether a message was read from the socket and is not received yet: the socket does not show it any more.
    pub(super) fn has_read(&self) -> bool {
        self.inbox.bytes.len() >= SIZE
    }

    /// The next message that has arrived, if one has. An error means that the peer is gone, or that its message could
    /// not be received.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, Errno> {
        while self.inbox.bytes.len() < SIZE {
            match receive(self.socket.as_fd(), &mut self.inbox, true, false) {
                Ok(0) => return Err(Errno::CONNRESET),
                Ok(_) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let mut bytes = [0; SIZE];
        self.inbox.bytes.drain(..SIZE).zip(&mut bytes).for_each(|(from, to)| *to = from);
        Message::decode(bytes).ok_or(Errno::BADMSG).map(Some)
    }

    /// The descriptors of the start that was received last: standard output and error.
    pub(super) fn take_fds(&mut self) -> Option<(OwnedFd, OwnedFd)> {
        Some((self.inbox.fds.pop_front()?, self.inbox.fds.pop_front()?))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut here, mut there) = (Link::new(here.into()), Link::new(there.into()));
        let all = [
            Message::Start { rank: 1023 },
            Message::Signal { signal: 15 },
            Message::End { grace: Duration::from_millis(1500) },
            Message::Started { rank: 3, pid: u32::MAX },
            Message::NotStarted { rank: 0, error: 11 },
            Message::Ended { rank: 7, status: i32::MIN },
            Message::Done { left: 2 },
        ];
        assert_eq!(there.receive(), Ok(None));
        for message in all {
            here.send(message, Vec::new()).unwrap();
            assert_eq!(there.receive(), Ok(Some(message)));
        }
        let (out, err) = std::io::pipe().unwrap();
        here.send(all[0], vec![out.into(), err.into()]).unwrap();
        assert_eq!(there.receive(), Ok(Some(all[0])));
        assert!(there.take_fds().is_some() && there.take_fds().is_none());
        drop(here);
        assert_eq!(there.receive(), Err(Errno::CONNRESET));
        assert!(there.send(all[0], Vec::new()).is_err());
    }
}
