//! A device that is late: until it is asked a few times, nothing that it was given has happened for the host.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use consort_comm::{Buffer, spawn_with_heap};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, OpDef};
use consort_ir::program::Func;
use consort_runtime::RunError;
use consort_runtime::call::{Operand, Stored};
use consort_runtime::device::{Cpu, Device, Mark};
use consort_runtime::kernels::Kernel;
use consort_types::{Dtype, Space};

use super::ranks::OneRank;

/// How many launches it takes before it is full, and how often it is asked before they are over.
const ROOM: u64 = 3;
const POLLS: u64 = 3;

/// Runs one plan for each rank, once, step by step, each on a late device.
pub(crate) fn run(mesh: &Mesh, plans: &[Func], inputs: &[Vec<Literal>]) -> Vec<Result<Vec<Literal>, String>> {
    spawn_with_heap(plans.len(), 1 << 26, |all| {
        let (me, late) = (all.rank(), Late::default());
        let mut rank = OneRank::new(mesh, all);
        rank.device = Some(&late);
        let mut exec = rank.lower(&plans[me])?;
        let mut args = rank.args(&plans[me], &inputs[me]);
        let (outs, blocked) = rank.step(&mut exec, &mut args)?;
        // Results are given out when all is over.
        assert!(late.launched.get() == late.reached.get());
        assert!((blocked[3] > 0) == (late.launched.get() > 0));
        rank.tensors(outs)
    })
}

/// Its kernels run at once, on the cores. What they wrote is hidden from the host until their mark is reached.
#[derive(Default)]
pub(crate) struct Late {
    cpu: Cpu,
    launched: Cell<u64>,
    reached: Cell<u64>,
    /// How often a mark was not reached.
    pub(crate) unready: Cell<u64>,
    hidden: RefCell<Vec<Hidden>>,
}

/// Bytes that a launch which is not over wrote, and their place.
struct Hidden {
    buffer: Buffer,
    range: Range<usize>,
    bytes: Vec<u8>,
}

impl Late {
    fn show(&self) -> Result<(), RunError> {
        for Hidden { buffer, range, bytes } in self.hidden.borrow().iter() {
            buffer.try_bytes_mut_of(range.clone())?.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Runs a launch after all before it, and hides what it wrote.
    fn queue(
        &self,
        results: &[Stored<'_>],
        launch: impl FnOnce() -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        assert!(self.launched.get() < self.reached.get() + 64, "launches without an end");
        self.show()?;
        launch()?;
        let mut hidden = self.hidden.borrow_mut();
        for result in results {
            let (buffer, range) = (result.buffer.clone(), result.bytes.clone());
            hidden.push(Hidden { buffer, range, bytes: Vec::new() });
        }
        for Hidden { buffer, range, bytes } in hidden.iter_mut() {
            *bytes = buffer.bytes_of(range.clone())?.to_vec();
        }
        for Hidden { buffer, range, .. } in hidden.iter() {
            buffer.try_bytes_mut_of(range.clone())?.fill(0xa5);
        }
        self.launched.set(self.launched.get() + 1);
        Ok(())
    }
}

impl Device for Late {
    fn space(&self) -> Space {
        Space::Host
    }

    fn find(&self, op: &str, args: &[Dtype], results: &[Dtype]) -> Option<Kernel> {
        self.cpu.find(op, args, results)
    }

    fn launch(
        &self,
        sizes: &EvalCx<'_>,
        kernel: (&Kernel, &dyn OpDef),
        args: &[Operand<'_>],
        results: &[Stored<'_>],
    ) -> Result<(), RunError> {
        self.queue(results, || self.cpu.launch(sizes, kernel, args, results))
    }

    fn copy(&self, from: &Stored<'_>, to: &Stored<'_>) -> Result<(), RunError> {
        self.queue(std::slice::from_ref(to), || self.cpu.copy(from, to))
    }

    fn zero(&self, to: &Stored<'_>) -> Result<(), RunError> {
        self.queue(std::slice::from_ref(to), || self.cpu.zero(to))
    }

    fn mark(&self) -> Mark {
        Mark(self.launched.get())
    }

    fn is_reached(&self, mark: Mark) -> Result<bool, RunError> {
        if mark.0 <= self.reached.get() {
            return Ok(true);
        }
        self.unready.set(self.unready.get() + 1);
        if self.unready.get().is_multiple_of(POLLS) {
            self.show()?;
            self.hidden.borrow_mut().clear();
            self.reached.set(self.launched.get());
        }
        Ok(mark.0 <= self.reached.get())
    }

    fn full(&self) -> Option<Mark> {
        (self.launched.get() >= self.reached.get() + ROOM).then(|| self.mark())
    }
}
