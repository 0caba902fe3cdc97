//! Waiting for the release of memory: until every peer has made its last read of it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::CommError;
use crate::all_groups;
use crate::engine::Ticket;
use crate::error::Operation;
use crate::shm::buffer::busy;
use crate::shm::heap::Heap;
use crate::shm::lease::Lease;
use crate::shm::progress::{BUSY, Shm, cause_of};
use crate::shm::row::Word;
use crate::shm::siblings;
use crate::shm::status::{WaitKind, Waits};
use crate::shm::waiter::spin;
use crate::shm::waiting::Watch;

/// When a wait for a release ends.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// At the deadline of what is in flight, which then fails.
    Deadline(Instant),
    /// When its caller does something else instead: nothing fails.
    Patience(Instant),
}

/// Waits until `bytes` bytes are released, at most until a deadline; `lease` gives a lease that is still held.
pub(crate) fn wait_for_release(
    heap: &Arc<Heap>,
    bytes: usize,
    until: Until,
    is_released: impl Fn() -> bool,
    lease: impl Fn() -> Option<Lease>,
) -> Result<(), CommError> {
    let (start, is_patient) = (Instant::now(), matches!(until, Until::Patience(_)));
    let (Until::Deadline(until) | Until::Patience(until)) = until;
    let late = || if is_patient { None } else { all_groups::late() };
    let mut watch = Watch::new(heap.ranks(), start);
    let spin_until = heap.spins().then(|| start + spin(bytes));
    while !is_released() {
        if spin_until.is_some_and(|spin_until| Instant::now() < spin_until) {
            std::hint::spin_loop();
            continue;
        }
        // The release may need this member's part of a call, or be its own call queued behind others.
        let goes_on = all_groups::advance_all();
        let lease = lease();
        if is_released() {
            break;
        }
        if let Some(error) = heap.alarm().failure() {
            return Err(error);
        }
        let now = Instant::now();
        let Some(lease) = lease else {
            // An operation of this rank, which may wait for any member.
            if !is_patient && let Some(error) = all_groups::failure() {
                return Err(error);
            }
            if now >= until {
                return Err(late().unwrap_or_else(busy));
            }
            std::thread::sleep(Duration::from_micros(20));
            continue;
        };
        if let Some(stopped) = lease.rows().iter().find(|row| row.stopped().is_some()) {
            return Err(cause_of(stopped));
        }
        let Some(row) = lease.holder() else { continue };
        if now >= until {
            // As long as this rank's own part is not done, it may wait for others than those that read.
            let late = if lease.is_in_flight(heap.ranks().me) { late() } else { None };
            return Err(late.unwrap_or(CommError::Leased { rank: row.rank }));
        }
        let (number, missing) = (0, [row.rank]);
        let (site, text, group) = Default::default();
        let moved = siblings::moved(None);
        let waits = Waits { kind: WaitKind::Release, number, site, text, group, moved, missing: &missing };
        watch.look(now, |say| say(waits), || Operation::Write)?;
        let turn = if goes_on { until.min(now + BUSY) } else { until };
        // Once this holder is done it no longer rings its bell, so do not sleep on that bell for another holder.
        row.sleep(turn, || lease.holder().is_none_or(|holder| !std::ptr::eq(holder, row)));
    }
    Ok(())
}

impl Shm {
    /// Whether an operation is over and no peer reads its buffers any more.
    pub(crate) fn is_released(&self, ticket: Ticket) -> bool {
        let is_over = match ticket {
            Ticket::Call(number) => self.state().is_finished(number) && self.lease_of(number).is_none(),
            // A message is over when it was taken, or copied.
            Ticket::Batch(batch) => self.state().mails.is_complete(batch),
            Ticket::Over => true,
        };
        is_over && !self.late.holds(ticket)
    }

    pub(crate) fn release_ticket(
        &self,
        ticket: Ticket,
        until: impl FnOnce() -> Instant,
    ) -> Result<(), CommError> {
        self.late.ask(ticket);
        if self.is_released(ticket) {
            return Ok(());
        }
        let lease = || if let Ticket::Call(number) = ticket { self.lease_of(number) } else { None };
        wait_for_release(&self.heap, 0, Until::Deadline(until()), || self.is_released(ticket), lease)
            .map_err(|error| self.give(error))
    }

    /// The lease of a call, if it has lent operands to peers that may still read them.
    fn lease_of(&self, number: u64) -> Option<Lease> {
        let members = &self.members;
        // The slot of a call is used again only when all members are done with it.
        if members.unpublished(members.me, number).is_some() || members.key(members.me, number).is_small() {
            return None;
        }
        let lent = members.mine().words(number)[Word::Address as usize].load(Relaxed) != 0;
        let lease = Lease::Call(Arc::clone(&members.rows), number);
        (lent && lease.holder().is_some()).then_some(lease)
    }
}
