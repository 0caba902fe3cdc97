//! Where values lie as a plan runs: a buffer for each region, and slots in them.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, Bytes, BytesMut, Heap};
use consort_ir::plan::Region;
use consort_types::layout::Layout;
use consort_types::{Dtype, overlaps};

use super::RunError;

/// What an argument still waits for, where an operation that will write it is in flight.
pub type Wait = Rc<dyn Fn() -> Result<(), String>>;

/// The number of a slot.
pub(super) type SlotId = usize;

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// The number of its region.
    pub(super) region: usize,
    pub(super) dtype: Dtype,
    /// Counted in elements from the start of the region.
    pub(super) layout: Rc<Layout>,
    /// From its first element to its last.
    pub(super) bytes: Range<usize>,
    /// Whether it is the same at each call.
    pub(super) fixed: bool,
}

impl Slot {
    pub(super) fn new(region: usize, dtype: Dtype, layout: impl Into<Rc<Layout>>, fixed: bool) -> Slot {
        let layout = layout.into();
        // Without elements it may begin anywhere, even where its region has ended.
        let start = if layout.span() == 0 { 0 } else { layout.start.saturating_mul(dtype.size()) };
        let bytes = start..start.saturating_add(layout.span().saturating_mul(dtype.size()));
        Slot { region, dtype, layout, bytes, fixed }
    }

    /// The same storage, seen otherwise.
    pub(super) fn seen_as(&self, layout: Layout) -> Slot {
        Slot::new(self.region, self.dtype, layout, self.fixed)
    }

    /// Whether the elements of both lie at the same places, in the same order.
    pub(super) fn lies_at(&self, other: &Slot) -> bool {
        let (a, b) = (&self.layout, &other.layout);
        if self.region != other.region || self.bytes != other.bytes || self.dtype != other.dtype {
            return false;
        }
        let sizes = a.shape.iter().zip(a.strides.iter().zip(&b.strides));
        (a.is_contiguous() && b.is_contiguous())
            || (a.shape == b.shape && sizes.into_iter().all(|(size, (a, b))| *size == 1 || a == b))
    }

    pub(super) fn overlaps(&self, other: &Slot) -> bool {
        self.region == other.region && overlaps(&self.bytes, &other.bytes)
    }
}

/// A region, and the buffer that it is now.
pub(super) struct RegionMemory {
    pub(super) region: Region,
    /// Bytes that a plan says; those of `dyn` are known as it runs.
    size: usize,
    buffer: Option<Buffer>,
    /// Whether this call has used it, where it is `dyn`.
    opened: bool,
    wait: RefCell<Option<Wait>>,
}

impl RegionMemory {
    pub(super) fn new(region: Region, size: usize) -> RegionMemory {
        RegionMemory { region, size, buffer: None, opened: false, wait: RefCell::new(None) }
    }
}

/// All regions.
pub(super) struct Memory(pub(super) Vec<RegionMemory>);

impl Memory {
    /// Gives a parameter its storage, for one call.
    pub(super) fn give(&mut self, region: usize, buffer: Buffer, wait: Option<Wait>) -> Result<(), RunError> {
        let home = &mut self.0[region];
        if buffer.len() < home.size {
            let (region, expected, got) = (home.region, home.size, buffer.len());
            return Err(RunError::new(format!("{region}: expected at least {expected} bytes, got {got}")));
        }
        home.buffer = Some(buffer);
        *home.wait.get_mut() = wait;
        Ok(())
    }

    /// Before a call: memory that is kept is there, and what is returned is new. True where kept memory is another.
    pub(super) fn open(&mut self, heap: &Arc<Heap>) -> Result<bool, RunError> {
        let mut changed = false;
        for home in &mut self.0 {
            home.opened = false;
            let keep = match (home.region, &home.buffer) {
                (Region::Arg(_) | Region::Dyn(_), _) => true,
                (Region::Arena | Region::Heap, buffer) => {
                    buffer.as_ref().is_some_and(|buffer| buffer.is_in(heap))
                }
                // What the call before returned may have been dropped since.
                (Region::Out(_), buffer) => buffer.as_ref().is_some_and(|buffer| is_free(buffer, heap)),
            };
            if !keep {
                // It is given back first, so that it may be the one that comes.
                home.buffer = None;
                home.buffer = Some(heap.alloc(home.size)?);
                changed |= !matches!(home.region, Region::Out(_));
            }
        }
        Ok(changed)
    }

    /// After a call: arguments are the caller's.
    pub(super) fn close(&mut self) {
        for home in self.0.iter_mut().filter(|home| matches!(home.region, Region::Arg(_))) {
            home.buffer = None;
            *home.wait.get_mut() = None;
        }
    }

    /// Makes room in a region whose size is known now.
    pub(super) fn make_room(
        &mut self,
        region: usize,
        bytes: usize,
        heap: &Arc<Heap>,
    ) -> Result<(), RunError> {
        let home = &mut self.0[region];
        let fits =
            |buffer: &Buffer| buffer.len() >= bytes && (home.opened || buffer.len() / 2 <= bytes.max(64));
        if let Some(buffer) = &home.buffer
            && fits(buffer)
            && (home.opened || is_free(buffer, heap))
        {
            home.opened = true;
            return Ok(());
        }
        let old = home.buffer.take().filter(|_| home.opened);
        let new = heap.alloc(bytes)?;
        if let Some(old) = old {
            let old = old.bytes()?;
            new.try_bytes_mut_of(0..old.len().min(bytes))?.copy_from_slice(&old[..old.len().min(bytes)]);
        }
        (home.buffer, home.opened) = (Some(new), true);
        Ok(())
    }

    /// Whether the buffer of a region is the same at each call.
    pub(super) fn is_kept(&self, region: usize) -> bool {
        matches!(self.0[region].region, Region::Arena | Region::Heap)
    }

    /// The buffer of a region, when what was in flight into it before the call has landed.
    pub(super) fn buffer(&self, region: usize) -> Result<&Buffer, RunError> {
        let home = &self.0[region];
        if home.wait.borrow().is_some()
            && let Some(wait) = home.wait.borrow_mut().take()
        {
            wait().map_err(RunError::new)?;
        }
        let none = || RunError::new(format!("{}: it has no storage", home.region));
        home.buffer.as_ref().ok_or_else(none)
    }

    pub(super) fn read(&self, slot: &Slot) -> Result<Bytes<'_>, RunError> {
        Ok(self.buffer(slot.region)?.bytes_of(slot.bytes.clone())?)
    }

    /// The bytes to write, as soon as no peer reads them any more.
    pub(super) fn write(&self, slot: &Slot, timeout: Duration) -> Result<BytesMut<'_>, RunError> {
        let buffer = self.buffer(slot.region)?;
        if let Ok(bytes) = buffer.try_bytes_mut_of(slot.bytes.clone()) {
            return Ok(bytes);
        }
        self.release(slot, timeout)?;
        Ok(buffer.try_bytes_mut_of(slot.bytes.clone())?)
    }

    /// Waits until no peer reads it any more.
    pub(super) fn release(&self, slot: &Slot, timeout: Duration) -> Result<(), RunError> {
        let buffer = self.buffer(slot.region)?;
        if !buffer.is_released() {
            let mut part = buffer.part(slot.bytes.clone())?;
            if !part.is_released() {
                part.bytes_mut(Instant::now() + timeout)?;
            }
        }
        Ok(())
    }

    /// A handle of it, for an operation.
    pub(super) fn handle(&self, slot: &Slot) -> Result<Buffer, RunError> {
        let buffer = self.buffer(slot.region)?;
        match slot.bytes == (0..buffer.len()) {
            true => Ok(buffer.clone()),
            false => Ok(buffer.part(slot.bytes.clone())?),
        }
    }
}

/// Whether a buffer can be used anew: nobody else has it, here or elsewhere.
fn is_free(buffer: &Buffer, heap: &Arc<Heap>) -> bool {
    buffer.is_only() && buffer.is_released() && buffer.is_in(heap)
}
