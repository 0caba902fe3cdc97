//! Shared memory as an engine.

use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::time::Instant;

use crate::CommError;
use crate::cores::Cores;
use crate::engine::{AnyEngine, Checked, Engine, Given, Made, Offer, Said, Ticket};
use crate::flight_record::FlightRecord;
use crate::group::Group;
use crate::message::Parcel;
use crate::recorder::{Recorder, read_segment};
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::heap::{Heap, LINE};
use crate::shm::members::Members;
use crate::shm::progress::Shm;
use crate::shm::progress_thread::ProgressThread;
use crate::shm::row::Row;
use crate::shm::rows::{Block, Rows};
use crate::shm::siblings;
use crate::shm::waiter::{LOOKS, Waiter};

impl Shm {
    /// One member's side of the group that has these rows.
    pub(crate) fn of_rows(
        rows: Rows,
        me: usize,
        heap: Arc<Heap>,
        alarm: Arc<Alarm>,
        recorder: Recorder,
        cores: Cores,
        settings: Rc<Settings>,
    ) -> Made {
        let ranks = rows.iter().map(|row| row.rank).collect();
        let members = Members::new(rows, me);
        let shm = Rc::new(Shm::new(members, heap, alarm, cores, recorder, settings));
        siblings::add(&shm);
        shm.alarm.add(&shm.members.rows);
        Made { engine: AnyEngine::Shm(shm), me, ranks }
    }

    fn start_thread(&self) -> bool {
        let Some(thread) = ProgressThread::start(&self.members, &self.alarm) else { return false };
        // If there is one already, the new one ends at once.
        let _ = self.progress_thread.set(thread);
        true
    }
}

impl Group {
    /// The engine, if it is that of shared memory.
    pub(crate) fn shm(&self) -> Option<&Shm> {
        match &self.engine {
            AnyEngine::Shm(shm) => Some(shm),
            AnyEngine::Mpi(_) => None,
        }
    }
}

impl Engine for Shm {
    #[inline(always)]
    fn heap(&self) -> &Arc<Heap> {
        &self.heap
    }

    #[inline(always)]
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn settings(&self) -> &Rc<Settings> {
        &self.settings
    }

    #[inline(always)]
    fn start(&self, request: Checked<'_>) -> Result<Ticket, CommError> {
        if self.settings.late.get() {
            return self.start_late(request);
        }
        self.start_call(request).map(Ticket::Call)
    }

    #[inline(always)]
    fn start_batch(&self, parcel: &mut Parcel, said: Said<'_>) -> Result<Ticket, CommError> {
        if self.settings.late.get() {
            return self.start_batch_late(parcel, said);
        }
        self.start_messages(parcel, said).map(Ticket::Batch)
    }

    fn released(&self, ticket: Ticket) -> bool {
        self.is_released(ticket)
    }

    fn release(&self, ticket: Ticket, until: impl FnOnce() -> Instant) -> Result<(), CommError> {
        self.release_ticket(ticket, until)
    }

    // Without a core besides one for each rank on this host, a thread would only take turns with the ranks.
    fn start_progress_thread(&self) -> bool {
        (self.cores.two_each() || self.settings.forced_threads.get()) && self.start_thread()
    }

    fn poll(&self) -> Result<(), CommError> {
        self.advance(&mut self.state()).map_err(|stop| self.give(*stop))
    }

    fn test(&self, ticket: Ticket) -> Result<bool, CommError> {
        let waiter = Waiter { inner: self, what: ticket.into() };
        waiter.test().map_err(|stop| self.give(*stop))
    }

    #[inline(always)]
    fn finish_soon(&self, ticket: Ticket) -> Result<Option<Given>, CommError> {
        let looks = if self.cores.one_each() { LOOKS } else { 0 };
        let given = match ticket {
            Ticket::Call(number) => self.finish_last(number, looks),
            Ticket::Batch(batch) => self.finish_last_batch(batch, looks),
            Ticket::Over => Ok(None),
        };
        given.map_err(|error| self.give(error))
    }

    fn wait(
        &self,
        ticket: Ticket,
        until: impl FnOnce() -> Instant,
        site: &'static Location<'static>,
    ) -> Result<(), CommError> {
        let waiter = Waiter { inner: self, what: ticket.into() };
        waiter.wait(until, site).map_err(|stop| self.give(*stop))
    }

    #[inline(always)]
    fn take(&self, ticket: Ticket) -> Option<Given> {
        let state = &mut *self.state();
        match ticket {
            Ticket::Call(number) => state.take(number),
            Ticket::Batch(batch) => {
                state.mails.take_finished(batch, &self.recorder).map(|buffers| (buffers, None))
            }
            Ticket::Over => None,
        }
    }

    #[inline(always)]
    fn abandon(&self, ticket: Ticket) {
        match ticket {
            Ticket::Call(number) => self.state().abandon(number),
            Ticket::Batch(batch) => self.state().mails.abandon(batch),
            Ticket::Over => {}
        }
    }

    fn close(&self, abort: bool) {
        if !abort {
            return self.leave();
        }
        let state = self.state();
        if state.failed.is_none() {
            self.unclaim_all(&state);
        }
    }

    fn in_flight(&self) -> usize {
        self.state().in_flight()
    }

    fn next(&self) -> u64 {
        self.state().next()
    }

    fn unseen(&self) -> Option<CommError> {
        self.unseen_error().map(|error| self.give(error))
    }

    fn flight_record(&self, ranks: &[usize]) -> FlightRecord {
        let mut flight = FlightRecord::new(ranks.iter().copied());
        for row in self.members.rows.iter() {
            flight.add(row.rank, read_segment(&row.segment, row.rank));
        }
        flight.sorted()
    }

    fn offer(&self, list: Option<&[usize]>) -> Result<Offer, CommError> {
        let Some(list) = list else { return Ok(Offer { word: u64::MAX, block: None }) };
        let size = Row::size(list.len());
        let (start, room) = self.heap.take_row(size)?;
        // Its memory may have been used before; no peer knows yet where it lies.
        for word in (0..size).step_by(8) {
            self.heap.segment().word(start + LINE + word).store(0, Release);
        }
        Ok(Offer { word: (start + LINE) as u64, block: Some((start, room)) })
    }

    // If this fails the row is not freed: peers may have seen it.
    fn subgroup(
        &self,
        (number, _): (u64, Instant),
        list: Option<(usize, &[usize])>,
        offer: Offer,
        words: &[u64],
    ) -> Result<Option<Made>, CommError> {
        let Some((me, list)) = list else { return Ok(None) };
        let place = |member: &usize| {
            let row = &self.members.rows[*member];
            Row::new(&row.segment, words[*member] as usize, row.rank)
        };
        let rows: Vec<Row> = list.iter().map(place).collect();
        let ranks: Vec<usize> = rows.iter().map(|row| row.rank).collect();
        let recorder = self.recorder.for_subgroup(number, &ranks);
        let (heap, alarm, settings) = (&self.heap, Arc::clone(&self.alarm), Rc::clone(&self.settings));
        let block =
            offer.block.map(|(start, room)| Block { heap: Arc::downgrade(heap), member: me, start, room });
        let rows = Rows::new(rows, block);
        Ok(Some(Shm::of_rows(rows, me, Arc::clone(heap), alarm, recorder, self.cores, settings)))
    }
}
