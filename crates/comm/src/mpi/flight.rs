//! A nonblocking call of MPI in flight, with everything that it uses.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use smallvec::SmallVec;

use crate::mpi::abi::{Handle, STATUS};
use crate::mpi::calls::{Mpi, Status};
use crate::mpi::error::MpiError;
use crate::mpi::span::Span;

/// What a call uses while it is in flight.
#[derive(Default)]
pub(super) struct Uses {
    pub(super) spans: SmallVec<[Span; 2]>,
    /// Counts and displacements.
    #[expect(dead_code, reason = "it keeps them")]
    pub(super) ints: Vec<c_int>,
}

/// A call in flight. If it is dropped before it is over, what it uses is leaked, since MPI may still touch it.
pub(crate) struct Flight {
    mpi: Rc<Mpi>,
    request: Handle,
    uses: ManuallyDrop<Uses>,
    is_over: bool,
    /// The source and the tag of a message.
    pub(crate) source: usize,
    pub(crate) tag: u64,
    /// How many bytes a message had.
    pub(crate) received: usize,
}

impl Flight {
    /// Starts a call, given the place for its request.
    pub(super) fn start(
        mpi: &Rc<Mpi>,
        call: &'static str,
        uses: Uses,
        start: impl FnOnce(*mut Handle) -> c_int,
    ) -> Result<Flight, MpiError> {
        let (mpi, uses) = (Rc::clone(mpi), ManuallyDrop::new(uses));
        let mut flight = Flight { mpi, request: 0, uses, is_over: false, source: 0, tag: 0, received: 0 };
        let code = start(&mut flight.request);
        flight.mpi.check(call, code)?;
        Ok(flight)
    }

    /// Whether it is over. Advances everything that MPI has in flight; never blocks.
    pub(crate) fn test(&mut self) -> Result<bool, MpiError> {
        if self.is_over {
            return Ok(true);
        }
        let (mut flag, mut status): (c_int, Status) = (0, [0; STATUS]);
        let mpi = &self.mpi;
        // SAFETY: the request is of a call in flight, and everything that it uses is here.
        let code = unsafe { (mpi.functions.test)(&mut self.request, &mut flag, &mut status) };
        mpi.check("MPI_Test", code)?;
        if flag == 0 {
            return Ok(false);
        }
        (self.source, self.tag, self.received) = mpi.envelope(&status);
        self.is_over = true;
        Ok(true)
    }

    /// The span that a call that is over has used.
    pub(crate) fn span(&self, index: usize) -> &Span {
        &self.uses.spans[index]
    }

    /// Whether it is over, as far as is known.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.is_over {
            // SAFETY: dropped once, and MPI does not use it any more.
            unsafe { ManuallyDrop::drop(&mut self.uses) };
        }
    }
}
