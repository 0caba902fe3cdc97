//! The seam between what runs lines, eager code or a plan, and what computes them.
//!
//! A device has one queue. A kernel or a copy that was launched runs after everything launched before it, at some time. A
//! [`Mark`] is a point of the queue, and a later one implies the earlier ones. Nothing here waits: the caller of the
//! executor asks whether a mark is reached, with its own deadline. What the host reads, what an engine moves, and what is
//! given out waits for the mark behind everything that was launched; kernels and copies wait for nothing.
//!
//! [`Cpu`] is the device that there is. It computes while it launches, so each of its marks is reached.

use std::cell::RefCell;
use std::rc::Rc;

use consort_ir::ops::{EvalCx, OpDef};
use consort_types::layout::Layout;
use consort_types::{Dtype, Space, overlaps};

use crate::RunError;
use crate::call::{Operand, Stored, call, view};
use crate::kernels::{self, Kernel, KernelCx, copy};
use crate::threads::Threads;

/// A point in the queue of a device: behind everything that was launched before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(pub u64);

/// What computes.
pub trait Device {
    /// The memory in which its kernels read and write.
    fn space(&self) -> Space;

    /// The kernel of an op for operands and results of these types. It is found when a plan is lowered, so that may take
    /// time.
    fn find(&self, op: &str, args: &[Dtype], results: &[Dtype]) -> Option<Kernel>;

    /// Launches a kernel. Results are contiguous, and all leases on them have ended.
    fn launch(
        &self,
        sizes: &EvalCx<'_>,
        kernel: (&Kernel, &dyn OpDef),
        args: &[Operand<'_>],
        results: &[Stored<'_>],
    ) -> Result<(), RunError>;

    /// Launches a copy to a tensor of the same type and shape, which may overlap the first.
    fn copy(&self, from: &Stored<'_>, to: &Stored<'_>) -> Result<(), RunError>;

    /// Launches what fills a contiguous tensor with zeros.
    fn zero(&self, to: &Stored<'_>) -> Result<(), RunError>;

    /// The mark behind everything that was launched.
    fn mark(&self) -> Mark;

    /// Whether everything before a mark is over.
    fn is_reached(&self, mark: Mark) -> Result<bool, RunError>;

    /// The mark that must be reached before another line is launched; `None` if its queue has room for one.
    fn full(&self) -> Option<Mark>;
}

/// This rank's cores.
pub struct Cpu {
    threads: RefCell<Rc<Threads>>,
    /// Kernels of users' ops.
    own: RefCell<Vec<Kernel>>,
}

impl Default for Cpu {
    fn default() -> Cpu {
        Cpu { threads: RefCell::new(Rc::new(Threads::ONE)), own: RefCell::default() }
    }
}

impl Cpu {
    /// The threads that kernels use.
    pub fn threads(&self) -> Rc<Threads> {
        Rc::clone(&self.threads.borrow())
    }

    /// Sets the number of threads that kernels use.
    pub fn set_threads(&self, n: usize) {
        *self.threads.borrow_mut() = Rc::new(Threads::new(n));
    }

    /// Adds the kernel of a user's op.
    pub fn add(&self, kernel: Kernel) {
        self.own.borrow_mut().push(kernel);
    }

    /// The kernel of an op, whatever its types.
    pub fn kernel(&self, op: &str) -> Option<Kernel> {
        let own = || self.own.borrow().iter().find(|kernel| kernel.op == op).copied();
        kernels::find(op).copied().or_else(own)
    }
}

impl Device for Cpu {
    fn space(&self) -> Space {
        Space::Host
    }

    fn find(&self, op: &str, _: &[Dtype], _: &[Dtype]) -> Option<Kernel> {
        self.kernel(op)
    }

    #[inline]
    fn launch(
        &self,
        sizes: &EvalCx<'_>,
        kernel: (&Kernel, &dyn OpDef),
        args: &[Operand<'_>],
        results: &[Stored<'_>],
    ) -> Result<(), RunError> {
        call(&KernelCx { sizes: *sizes, threads: &self.threads() }, kernel, args, results)
    }

    fn copy(&self, from: &Stored<'_>, to: &Stored<'_>) -> Result<(), RunError> {
        let threads = self.threads();
        let layout = Layout { start: 0, ..to.layout.clone() };
        if std::ptr::eq(from.buffer, to.buffer) && overlaps(&from.bytes, &to.bytes) {
            // Source and destination may interleave.
            let packed = from.packed(&threads)?;
            let gapless = Layout::contiguous(&from.layout.shape);
            let mut out = to.write()?;
            return Ok(copy::copy_into(
                &threads,
                &view(from.dtype, &gapless, packed.bytes()),
                &mut out,
                &layout,
            )?);
        }
        let (mut out, bytes) = (to.write()?, from.read()?);
        let from = view(from.dtype, from.layout, &bytes);
        let copied = match to.layout.is_contiguous() {
            true => copy::copy(&threads, &from, &mut out),
            false => copy::copy_into(&threads, &from, &mut out, &layout),
        };
        copied.map_err(RunError::from)
    }

    fn zero(&self, to: &Stored<'_>) -> Result<(), RunError> {
        to.write()?.fill(0);
        Ok(())
    }

    fn mark(&self) -> Mark {
        Mark(0)
    }

    #[inline]
    fn is_reached(&self, _: Mark) -> Result<bool, RunError> {
        Ok(true)
    }

    #[inline]
    fn full(&self) -> Option<Mark> {
        None
    }
}
