//! Bytes and descriptors through a Unix socket: the only place that knows how the kernel carries them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

pub(crate) use super::frame::Inbox;
pub(crate) use super::roster::Packet;

/// The kernel carries at most 253 descriptors with one message. Tests have few ranks, but should send several messages.
const FDS_AT_ONCE: usize = if cfg!(test) { 3 } else { 200 };

/// Reads what has arrived into an inbox: how many bytes, 0 at the end. Descriptors are accepted only from a peer that
/// may send them; otherwise the kernel closes them.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    inbox: &mut Inbox,
    take_fds: bool,
    wait: bool,
) -> rustix::io::Result<usize> {
    let mut bytes = [0; 16 * 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
    let mut ancillary = RecvAncillaryBuffer::new(if take_fds { &mut space } else { &mut [] });
    let flags = RecvFlags::CMSG_CLOEXEC | if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            inbox.fds.extend(fds);
        }
    }
    if take_fds && received.flags.contains(ReturnFlags::CTRUNC) {
        // Descriptors were lost, most likely because this process is at its limit of open files.
        return Err(Errno::MFILE);
    }
    inbox.bytes.extend(&bytes[..received.bytes]);
    Ok(received.bytes)
}

/// A packet on its way to one peer.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    bytes: usize,
    fds: usize,
}

/// Sends as much as the socket accepts now; true if that was all. Descriptors go first, each batch with a byte of the
/// frame, so that they have arrived when the frame has.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    packet: &Packet,
    progress: &mut Progress,
) -> rustix::io::Result<bool> {
    while progress.bytes < packet.bytes.len() {
        let fds: Vec<BorrowedFd<'_>> =
            packet.fds[progress.fds..].iter().take(FDS_AT_ONCE).map(AsFd::as_fd).collect();
        let end = if fds.is_empty() { packet.bytes.len() } else { progress.bytes + 1 };
        let piece = &packet.bytes[progress.bytes..end];
        match send_piece(socket, piece, &fds) {
            Ok(sent) => {
                progress.bytes += sent;
                progress.fds += fds.len();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::TOOMANYREFS) => {
                // This user has too many descriptors in transit, until their receivers take them. The socket is ready
                // all the same, so that without a pause a caller that polls it would spin.
                thread::sleep(Duration::from_millis(1));
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn send_piece(socket: BorrowedFd<'_>, piece: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(piece)], &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

/// Waits until a socket is ready, at most until `until`; true if it is ready.
pub(crate) fn wait_ready(socket: BorrowedFd<'_>, flags: PollFlags, until: Instant) -> io::Result<bool> {
    loop {
        let mut fds = [PollFd::new(&socket, flags)];
        match poll(&mut fds, Some(&timespec(until.saturating_duration_since(Instant::now())))) {
            Err(Errno::INTR) => {}
            other => return Ok(other? > 0),
        }
    }
}

/// A duration for `poll`, rounded up, so that the awaited time has passed afterwards.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    let nanoseconds = i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    Timespec { tv_sec: nanoseconds / 1_000_000_000, tv_nsec: nanoseconds % 1_000_000_000 }
}
