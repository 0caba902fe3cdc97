//! A mode for tests: all buffers of an operation stay leased until somebody asks for their release, as late as an engine
//! may release them. Whatever forgets to ask is found, however fast the members are.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::CommError;
use crate::engine::{Checked, Said, Ticket};
use crate::message::Parcel;
use crate::shm::buffers::Buffers;
use crate::shm::lease::Lease;
use crate::shm::progress::Shm;

/// The operations whose release nobody has asked for.
#[derive(Default)]
pub(crate) struct Late(RefCell<Vec<(Ticket, Arc<AtomicBool>)>>);

impl Late {
    fn asked(&self, ticket: Ticket) -> Option<Arc<AtomicBool>> {
        let lent = self.0.borrow();
        lent.iter().find(|(other, _)| *other == ticket).map(|(_, asked)| Arc::clone(asked))
    }

    /// Whether nobody has asked for the release of an operation that began in this mode.
    pub(crate) fn holds(&self, ticket: Ticket) -> bool {
        self.asked(ticket).is_some_and(|asked| !asked.load(Relaxed))
    }

    pub(crate) fn ask(&self, ticket: Ticket) {
        self.asked(ticket).into_iter().for_each(|asked| asked.store(true, Relaxed));
    }
}

impl Shm {
    /// Starts a call in this mode.
    #[cold]
    #[inline(never)]
    pub(crate) fn start_late(&self, request: Checked<'_>) -> Result<Ticket, CommError> {
        let lent: Buffers = request.buffers.iter().cloned().collect();
        let ticket = self.start_call(request).map(Ticket::Call)?;
        self.lend(ticket, &lent);
        Ok(ticket)
    }

    /// Starts a batch of messages in this mode.
    #[cold]
    #[inline(never)]
    pub(crate) fn start_batch_late(&self, parcel: &mut Parcel, said: Said<'_>) -> Result<Ticket, CommError> {
        let lent: Buffers = parcel.buffers.iter().cloned().collect();
        let ticket = self.start_messages(parcel, said).map(Ticket::Batch)?;
        self.lend(ticket, &lent);
        Ok(ticket)
    }

    /// Leases the buffers of an operation until somebody asks for their release.
    fn lend(&self, ticket: Ticket, buffers: &Buffers) {
        let asked = Arc::new(AtomicBool::new(false));
        let lease = Lease::Late(Arc::clone(&self.members.rows), self.members.me, Arc::clone(&asked));
        buffers.iter().for_each(|buffer| buffer.lease(lease.clone()));
        let mut lent = self.late.0.borrow_mut();
        lent.retain(|(_, asked)| !asked.load(Relaxed));
        lent.push((ticket, asked));
    }
}
