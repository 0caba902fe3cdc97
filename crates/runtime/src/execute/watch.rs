//! Loops look from time to time whether another rank has failed: one that does not communicate would run on for as long
//! as its limit allows, while the others have ended.

use consort_comm::look;
use consort_ir::cost::Total;

use crate::RunError;

/// Work between two looks, in bytes of memory traffic: some milliseconds.
const LOOK: u64 = 1 << 24;

/// What an iteration counts at least: a loop of small ones looks at every 64th.
const LEAST: u64 = LOOK / 64;

/// The work of loops since the last look.
#[derive(Default)]
pub(super) struct Watch(u64);

impl Watch {
    /// Counts an iteration of this known work, and looks if enough was done. Reads no clock: a local computation is not
    /// late by itself.
    pub(super) fn iteration(&mut self, work: Total) -> Result<(), RunError> {
        let work = work.bytes.saturating_add(work.flops / 4);
        self.0 = self.0.saturating_add(work.max(LEAST));
        if self.0 < LOOK {
            return Ok(());
        }
        self.0 = 0;
        Ok(look()?)
    }
}
