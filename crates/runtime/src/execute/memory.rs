//! The memory of a running plan: a buffer for each region, and slots in them.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use consort_comm::{Buffer, Bytes, Heap};
use consort_ir::plan::{Region, RegionKind};
use consort_types::layout::Layout;
use consort_types::{Dtype, overlaps};

use crate::RunError;
use crate::call::Stored;

/// Waits for the operation in flight that will write an argument.
pub type Wait = Rc<dyn Fn() -> Result<(), String>>;

/// The number of a slot.
pub(super) type SlotId = usize;

/// A tensor of a plan: region, type and layout.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// The number of its region.
    pub(super) region: usize,
    pub(super) dtype: Dtype,
    /// Counted in elements from the start of the region.
    pub(super) layout: Rc<Layout>,
    /// From its first byte to its last.
    pub(super) bytes: Range<usize>,
    /// Whether it is the same at each call.
    pub(super) fixed: bool,
}

impl Slot {
    pub(super) fn new(region: usize, dtype: Dtype, layout: impl Into<Rc<Layout>>, fixed: bool) -> Slot {
        let layout = layout.into();
        // Without elements it may begin anywhere, even past the end of its region.
        let start = if layout.span() == 0 { 0 } else { layout.start.saturating_mul(dtype.size()) };
        let bytes = start..start.saturating_add(layout.span().saturating_mul(dtype.size()));
        Slot { region, dtype, layout, bytes, fixed }
    }

    /// A view of the same storage with another layout.
    pub(super) fn seen_as(&self, layout: Layout) -> Slot {
        Slot::new(self.region, self.dtype, layout, self.fixed)
    }

    /// Whether both have their elements at the same addresses, in the same order.
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

/// A region and its current buffer.
pub(super) struct RegionMemory {
    pub(super) region: Region,
    /// Bytes as the plan states them; those of `dyn` are known only at run time.
    size: usize,
    buffer: Option<Buffer>,
    /// For `dyn`: whether this call has used it.
    opened: bool,
    /// Whether a line says `release entry` for a part of it.
    pub(super) entry: bool,
    /// Whether this call found a part of it leased or in flight.
    is_old: bool,
    wait: Option<Wait>,
}

impl RegionMemory {
    pub(super) fn new(region: Region, size: usize) -> RegionMemory {
        let (buffer, wait) = (None, None);
        RegionMemory { region, size, buffer, opened: false, entry: false, is_old: false, wait }
    }
}

/// All regions.
pub(super) struct Memory(pub(super) Vec<RegionMemory>);

impl Memory {
    /// Binds a parameter to its storage for one call.
    pub(super) fn give(&mut self, region: usize, buffer: Buffer, wait: Option<Wait>) -> Result<(), RunError> {
        let home = &mut self.0[region];
        if buffer.len() < home.size {
            let headline = (format!("at least {} bytes", home.size), buffer.len().to_string());
            return Err(RunError::of(home.region.to_string(), headline));
        }
        if buffer.space() != home.region.space {
            let headline = (format!("memory of the {}", home.region.space), buffer.space().to_string());
            return Err(RunError::of(home.region.to_string(), headline));
        }
        home.buffer = Some(buffer);
        home.wait = wait;
        Ok(())
    }

    /// Before a call: allocates kept regions that are missing, and new results, and finds out which regions older leases
    /// hold. True if a kept region was reallocated.
    pub(super) fn open(&mut self, heap: &Arc<Heap>) -> Result<bool, RunError> {
        let mut changed = false;
        for home in &mut self.0 {
            home.opened = false;
            let keep = match (home.region.kind, &home.buffer) {
                (RegionKind::Arg(_) | RegionKind::Dyn(_), _) => true,
                (RegionKind::Arena | RegionKind::Heap, buffer) => {
                    buffer.as_ref().is_some_and(|buffer| buffer.is_in(heap))
                }
                // The result of the previous call may have been dropped since.
                (RegionKind::Out(_), buffer) => buffer.as_ref().is_some_and(|buffer| is_free(buffer, heap)),
            };
            if !keep {
                // Freed first, so that the allocator may return the same memory.
                home.buffer = None;
                home.buffer = Some(heap.alloc(home.size)?);
                changed |= !matches!(home.region.kind, RegionKind::Out(_));
            }
            home.is_old = home.entry && home.buffer.as_ref().is_some_and(|buffer| !buffer.is_released());
        }
        Ok(changed)
    }

    /// After a call: drops the arguments, which belong to the caller.
    pub(super) fn close(&mut self) {
        for home in self.0.iter_mut().filter(|home| home.region.is_arg()) {
            home.buffer = None;
            home.wait = None;
        }
    }

    /// Ensures the capacity of a region whose size is known only now.
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

    /// Whether a region keeps its buffer from call to call.
    pub(super) fn is_kept(&self, region: usize) -> bool {
        self.0[region].region.is_kept()
    }

    /// Whether an operation that was in flight before the call may still write a region.
    pub(super) fn arrives(&self, region: usize) -> bool {
        self.0[region].wait.is_some()
    }

    /// Waits for it.
    pub(super) fn arrive(&mut self, region: usize) -> Result<(), RunError> {
        self.0[region].wait.take().map_or(Ok(()), |wait| wait().map_err(RunError::new))
    }

    /// The buffer of a region, which nothing from before the call writes any more.
    pub(super) fn buffer(&self, region: usize) -> Result<&Buffer, RunError> {
        let home = &self.0[region];
        let none = || RunError::new(format!("{}: it has no storage", home.region));
        home.buffer.as_ref().ok_or_else(none)
    }

    /// A slot in its buffer.
    pub(super) fn stored<'a>(&'a self, slot: &'a Slot) -> Result<Stored<'a>, RunError> {
        let Slot { region, dtype, layout, bytes, .. } = slot;
        Ok(Stored { buffer: self.buffer(*region)?, bytes: bytes.clone(), dtype: *dtype, layout })
    }

    pub(super) fn read<'a>(&'a self, slot: &'a Slot) -> Result<Bytes<'a>, RunError> {
        self.stored(slot)?.read()
    }

    /// Whether leases older than the call may hold a slot.
    pub(super) fn is_old(&self, slot: &Slot) -> Result<bool, RunError> {
        Ok(self.0[slot.region].is_old && !self.stored(slot)?.is_released()?)
    }

    /// A buffer handle of the slot, for an operation.
    pub(super) fn handle(&self, slot: &Slot) -> Result<Buffer, RunError> {
        let buffer = self.buffer(slot.region)?;
        match slot.bytes == (0..buffer.len()) {
            true => Ok(buffer.clone()),
            false => Ok(buffer.part(slot.bytes.clone())?),
        }
    }
}

/// Whether a buffer can be reused: no other handle of it exists and no peer leases it.
fn is_free(buffer: &Buffer, heap: &Arc<Heap>) -> bool {
    buffer.is_only() && buffer.is_released() && buffer.is_in(heap)
}
