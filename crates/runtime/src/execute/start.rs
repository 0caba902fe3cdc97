//! Runs communication: starts and waits.

use std::panic::Location;

use consort_comm::{About, Buffers, Group, Note, OperandType, Pending, Request, Ticket};
use consort_ir::index::Index;

use consort_types::{Collective, Dtype, Kind, Site};
use smallvec::SmallVec;

use super::RunCx;
use super::memory::SlotId;
use super::state::State;
use super::step::{Call, Flight, FlightId, Release, Said, Start};
use crate::RunError;
use crate::start::{call_text, digest, message_digest, start, type_text};

impl State {
    pub(super) fn start(&mut self, line: &Start, site: Option<Site>, cx: &RunCx<'_>) -> Result<(), RunError> {
        for slot in &line.written {
            if !self.memory.stored(&self.slots[*slot])?.is_released()? {
                return Err(RunError::leased());
            }
        }
        // A rank outside the group passes its operands through.
        let Some(number) = line.group else { return Ok(()) };
        let Some(group) = cx.groups.get(number).and_then(Option::as_ref) else {
            return Err(RunError::new("this rank is a member of a group that it was not given"));
        };
        let pending = match &line.call {
            Some(call) => Some(self.start_call(line.flight, call, site, group)?),
            None => None,
        };
        self.in_flight[number] += 1;
        self.all_in_flight += 1;
        self.lent[line.flight] = pending.as_ref().map(|pending| (number, pending.ticket()));
        self.flights[line.flight] = Some(Flight {
            group: number,
            pending,
            zeros_after: line.zeros_after.clone(),
            start: line.flight,
            leaves: line.leaves,
        });
        Ok(())
    }

    /// The group and the operation of a start in flight.
    pub(super) fn ticket(&self, flight: FlightId) -> Option<(usize, Ticket)> {
        let flight = self.flights[flight].as_ref()?;
        Some((flight.group, flight.pending.as_ref()?.ticket()))
    }

    /// Whether some of these leases are held. What is not held any more is forgotten.
    pub(super) fn holds(&mut self, leases: &Release, cx: &RunCx<'_>) -> Result<bool, RunError> {
        let is_held = |(group, ticket): (usize, Ticket)| {
            cx.groups.get(group).and_then(Option::as_ref).is_some_and(|group| !group.is_released(ticket))
        };
        if leases.starts.iter().any(|start| self.lent[*start].is_some_and(is_held)) {
            return Ok(true);
        }
        for slot in &leases.entry {
            if self.memory.is_old(&self.slots[*slot])? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until these leases have ended.
    pub(super) fn release(&mut self, leases: &Release, cx: &RunCx<'_>) -> Result<(), RunError> {
        leases.starts.iter().try_for_each(|start| self.release_start(*start, cx))?;
        for slot in &leases.entry {
            let slot = &self.slots[*slot];
            if self.memory.is_old(slot)? {
                self.memory.stored(slot)?.release(|| cx.deadline())?;
            }
        }
        Ok(())
    }

    /// Waits until the leases of a start have ended.
    fn release_start(&mut self, start: FlightId, cx: &RunCx<'_>) -> Result<(), RunError> {
        if let Some((group, ticket)) = self.lent[start].take()
            && let Some(group) = cx.groups.get(group).and_then(Option::as_ref)
        {
            group.release(ticket, || cx.deadline())?;
        }
        Ok(())
    }

    fn start_call(
        &mut self,
        flight: FlightId,
        call: &Call,
        site: Option<Site>,
        group: &Group,
    ) -> Result<Pending, RunError> {
        for slot in call.operands.iter().chain(&call.results) {
            self.hold(*slot)?;
        }
        let collective = call.collective()?;
        let said = self.say(flight, (call, &collective), site, group);
        let (mut types, mut operands) = (SmallVec::<[OperandType<'_>; 2]>::new(), Buffers::default());
        for (i, slot) in call.operands.iter().enumerate() {
            operands.push(self.handle(*slot)?);
            let slot = &self.slots[*slot];
            if !slot.layout.is_contiguous() {
                return Err(RunError::new("an operand has gaps: the plan should have copied it"));
            }
            let about = said.messages.get(i).copied().unwrap_or_default();
            types.push(OperandType { about, ..OperandType::new(slot.dtype, &slot.layout.shape) });
        }
        let results = call.results.iter().map(|slot| self.handle(*slot)).collect::<Result<Buffers, _>>()?;
        let (collective, types, note, site) = (&collective, &types[..], said.note, Location::caller());
        let request = Request { collective, types, operands, results, note, site };
        let pending = start(group, &self.sizes(), request)?;
        self.said[flight] = Some(said);
        Ok(pending)
    }

    /// Determines what ranks tell each other about a call: the user's source line, the call, and a digest of its types.
    /// Texts are rebuilt only if types have changed since the last call.
    fn say(
        &mut self,
        flight: FlightId,
        (call, collective): (&Call, &Collective<'_, Index>),
        site: Option<Site>,
        group: &Group,
    ) -> Said {
        let types = || {
            call.operands.iter().map(|slot| (self.slots[*slot].dtype, &self.slots[*slot].layout.shape[..]))
        };
        let digest = digest(collective, types());
        if let Some(said) = self.said[flight].take().filter(|said| said.note.digest == digest) {
            return said;
        }
        let recorder = group.recorder();
        let site = recorder.name(&site.map_or("no source line".to_string(), |site| site.to_string()));
        let text = recorder.name(&call_text(&*call.op, &self.mesh, types()));
        let message = |(dtype, shape): (Dtype, &[usize])| About {
            digest: message_digest(dtype, shape),
            text: recorder.name(&type_text(dtype, shape)),
        };
        let messages = match collective.kind == Kind::Exchange {
            true => types().map(message).collect(),
            false => SmallVec::new(),
        };
        Said { note: Note { digest, text, site, ..Note::default() }, messages }
    }

    /// Waits for a start; returns at once if it was waited for before.
    pub(super) fn wait(&mut self, flight: FlightId, cx: &RunCx<'_>) -> Result<(), RunError> {
        let Some(flight) = self.flights[flight].take() else { return Ok(()) };
        let Flight { group, pending, zeros_after, start, leaves } = flight;
        self.in_flight[group] = self.in_flight[group].saturating_sub(1);
        self.all_in_flight = self.all_in_flight.saturating_sub(1);
        if let Some(pending) = pending {
            pending.wait_by(|| cx.deadline())?;
        }
        if leaves || !zeros_after.is_empty() {
            self.release_start(start, cx)?;
        }
        for slot in zeros_after {
            cx.device.zero(&self.memory.stored(&self.slots[slot])?)?;
        }
        Ok(())
    }

    /// Creates the handle of a fixed slot, once.
    fn hold(&mut self, slot: SlotId) -> Result<(), RunError> {
        let place = &self.slots[slot];
        if self.handles[slot].is_none() && place.fixed && self.memory.is_kept(place.region) {
            self.handles[slot] = Some(self.memory.handle(place)?);
        }
        Ok(())
    }

    fn handle(&self, slot: SlotId) -> Result<consort_comm::Buffer, RunError> {
        match &self.handles[slot] {
            Some(handle) => Ok(handle.clone()),
            None => self.memory.handle(&self.slots[slot]),
        }
    }
}
