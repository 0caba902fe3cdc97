//! Runs communication: starts and waits.

use consort_comm::{About, Group, Note};
use consort_ir::index::Index;
use consort_ir::program::Loc;
use consort_types::{Collective, Dtype, Kind};
use smallvec::SmallVec;

use super::memory::SlotId;
use super::state::State;
use super::step::{Call, Flight, FlightId, Said, Start};
use super::{RunCx, RunError};
use crate::start::{Operand, Operands, Outs, call_text, digest, message_digest, start, type_text};

impl State {
    pub(super) fn start(&mut self, line: &Start, loc: Option<&Loc>, cx: &RunCx<'_>) -> Result<(), RunError> {
        for (from, to, counted) in &line.copies {
            self.copy(*from, *to, *counted, cx)?;
        }
        for slot in &line.zeros {
            self.memory.write(&self.slots[*slot], cx.timeout)?.fill(0);
        }
        for slot in &line.written {
            self.memory.release(&self.slots[*slot], cx.timeout)?;
        }
        // A rank outside the group passes its operands through.
        let Some(number) = line.group else { return Ok(()) };
        let Some(group) = cx.groups.get(number).and_then(Option::as_ref) else {
            return Err(RunError::new("this rank is a member of a group that it was not given"));
        };
        let mut pending = SmallVec::new();
        for (index, call) in line.calls.iter().enumerate() {
            for slot in call.operands.iter().chain(&call.results) {
                self.hold(*slot)?;
            }
            let collective = call.collective()?;
            self.say(line.flight, index, (call, &collective), loc, group);
            let said = &self.said[line.flight][index];
            let mut operands = Operands::new();
            for (i, slot) in call.operands.iter().enumerate() {
                let buffer = self.handle(*slot)?;
                let slot = &self.slots[*slot];
                if !slot.layout.is_contiguous() {
                    return Err(RunError::new("an operand has gaps: the plan should have copied it"));
                }
                let about = said.messages.get(i).copied().unwrap_or_default();
                operands.push(Operand { buffer, dtype: slot.dtype, shape: &slot.layout.shape, about });
            }
            let results = call.results.iter().map(|slot| self.handle(*slot)).collect::<Result<Outs, _>>()?;
            group.note(said.note);
            pending.push(start(&collective, &self.sizes(), group, &operands, &results)?);
        }
        self.in_flight[number] += 1;
        self.all_in_flight += 1;
        self.flights[line.flight] =
            Some(Flight { group: number, pending, zeros_after: line.zeros_after.clone() });
        Ok(())
    }

    /// Determines what ranks tell each other about a call: the user's source line, the call, and a digest of its types.
    /// Texts are rebuilt only if types have changed since the last call.
    fn say(
        &mut self,
        flight: FlightId,
        index: usize,
        (call, collective): (&Call, &Collective<'_, Index>),
        loc: Option<&Loc>,
        group: &Group,
    ) {
        let types = || {
            call.operands.iter().map(|slot| (self.slots[*slot].dtype, &self.slots[*slot].layout.shape[..]))
        };
        let digest = digest(collective, types());
        if self.said[flight].get(index).is_some_and(|said| said.note.digest == digest) {
            return;
        }
        let recorder = group.recorder();
        let site = recorder.name(&loc.map_or("no source line".to_string(), Loc::to_string));
        let text = recorder.name(&call_text(&*call.op, &self.mesh, types()));
        let message = |(dtype, shape): (Dtype, &[usize])| About {
            digest: message_digest(dtype, shape),
            text: recorder.name(&type_text(dtype, shape)),
        };
        let messages = match collective.kind == Kind::Exchange {
            true => types().map(message).collect(),
            false => SmallVec::new(),
        };
        let said = Said { note: Note { digest, text, site, ..Note::default() }, messages };
        match self.said[flight].get_mut(index) {
            Some(place) => *place = said,
            None => self.said[flight].push(said),
        }
    }

    /// Waits for a start; returns at once if it was waited for before.
    pub(super) fn wait(&mut self, flight: FlightId, cx: &RunCx<'_>) -> Result<(), RunError> {
        let Some(Flight { group, pending, zeros_after }) = self.flights[flight].take() else { return Ok(()) };
        self.in_flight[group] = self.in_flight[group].saturating_sub(1);
        self.all_in_flight = self.all_in_flight.saturating_sub(1);
        for pending in pending {
            pending.wait_within(cx.timeout)?;
        }
        for slot in zeros_after {
            self.memory.write(&self.slots[slot], cx.timeout)?.fill(0);
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
