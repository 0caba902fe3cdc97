//! Runs what communicates: starts and waits.

use consort_ir::program::Loc;
use smallvec::SmallVec;

use crate::start::{Operand, Operands, Outs, start};

use super::memory::SlotId;
use super::state::State;
use super::step::{Flight, FlightId, Start};
use super::{RunCx, RunError};

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
        // What ranks tell each other of a call is the user's line.
        let site = match (self.sites[line.flight], loc) {
            (None, Some(loc)) => group.recorder().name(&loc.to_string()),
            (site, _) => site.unwrap_or_default(),
        };
        self.sites[line.flight] = Some(site);
        let mut pending = SmallVec::new();
        for call in &line.calls {
            for slot in call.operands.iter().chain(&call.results) {
                self.hold(*slot)?;
            }
            let mut operands = Operands::new();
            for slot in &call.operands {
                let buffer = self.handle(*slot)?;
                let slot = &self.slots[*slot];
                if !slot.layout.is_contiguous() {
                    return Err(RunError::new("an operand has gaps: the plan should have copied it"));
                }
                operands.push(Operand { buffer, dtype: slot.dtype, shape: &slot.layout.shape });
            }
            let results = call.results.iter().map(|slot| self.handle(*slot)).collect::<Result<Outs, _>>()?;
            group.said_at(site);
            pending.push(start(&*call.op, &self.sizes(), group, &operands, &results)?);
        }
        self.in_flight[number] += 1;
        self.all_in_flight += 1;
        self.flights[line.flight] =
            Some(Flight { group: number, pending, zeros_after: line.zeros_after.clone() });
        Ok(())
    }

    /// Waits for what a start began; nothing, where it has landed before.
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

    /// Makes a handle of a slot that is the same at each call, once.
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
