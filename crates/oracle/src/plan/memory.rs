//! The memory of one rank: an array of bytes for each region of its plan.

use std::collections::{BTreeMap, BTreeSet};

use consort_types::Dtype;

use consort_ir::literal::{Literal, unravel};
use consort_ir::plan::{PlanHeader, Region};
use consort_ir::storage::{Extent, Placement};

/// The placement of a tensor's elements, and their type.
#[derive(Clone, Debug)]
pub(super) struct TypedPlacement {
    pub(super) placement: Placement,
    pub(super) dtype: Dtype,
}

impl TypedPlacement {
    fn shape(&self) -> Result<Vec<usize>, String> {
        match &self.placement.extent {
            Extent::At(layout) => Ok(layout.shape.to_vec()),
            _ => Err(format!("{}: its size is not known", self.placement.place)),
        }
    }

    /// The same number of elements, contiguous from the first one.
    pub(super) fn without_gaps(&self) -> TypedPlacement {
        let mut seat = self.clone();
        if let Extent::At(layout) = &mut seat.placement.extent {
            layout.strides = consort_types::layout::row_major(&layout.shape);
        }
        seat
    }

    /// The offset of each element, in row-major order.
    fn elements(&self) -> Result<Vec<usize>, String> {
        let Extent::At(layout) = &self.placement.extent else { return self.shape().map(|_| Vec::new()) };
        let base = self.placement.place.offset as usize;
        let offset = |i: usize| -> usize {
            unravel(i, &layout.shape).iter().zip(&layout.strides).map(|(at, stride)| at * stride).sum()
        };
        Ok((0..layout.numel()).map(|i| base + (layout.start + offset(i)) * self.placement.width).collect())
    }
}

pub(super) struct Memory {
    regions: BTreeMap<Region, Vec<u8>>,
    /// The bytes that peers may still read since before the call, with what they expect there.
    old: BTreeMap<Region, Vec<Option<u8>>>,
    /// The byte of uninitialised memory: 0xff makes floats NaN.
    poison: u8,
}

impl Memory {
    pub(super) fn new(head: &PlanHeader, poison: u8) -> Memory {
        let region = |(region, size): &(Region, u64)| (*region, vec![poison; *size as usize]);
        Memory { regions: head.regions.iter().map(region).collect(), old: BTreeMap::new(), poison }
    }

    /// A call begins, and peers still read all bytes of these regions.
    pub(super) fn lend(&mut self, regions: &BTreeSet<Region>) {
        for (region, bytes) in self.regions.iter().filter(|(region, _)| regions.contains(region)) {
            self.old.insert(*region, bytes.iter().copied().map(Some).collect());
        }
    }

    /// Older leases on a tensor end: peers read its bytes now.
    pub(super) fn release_entry(&mut self, seat: &TypedPlacement) -> Result<(), String> {
        let region = seat.placement.place.region;
        let (Some(old), Some(bytes)) = (self.old.get_mut(&region), self.regions.get(&region)) else {
            return Ok(());
        };
        for at in seat.elements()? {
            for at in at..at + seat.placement.width {
                read_old(region, at, old.get_mut(at).and_then(Option::take), bytes.get(at))?;
            }
        }
        Ok(())
    }

    /// Calls `f` with each element's bytes. A `dyn` region grows as needed.
    fn each(&mut self, seat: &TypedPlacement, mut f: impl FnMut(&mut [u8])) -> Result<(), String> {
        let (region, width, poison) = (seat.placement.place.region, seat.placement.width, self.poison);
        let elements = seat.elements()?;
        let end = elements.iter().max().map_or(0, |last| last + width);
        let bytes = self.regions.get_mut(&region).ok_or_else(|| format!("there is no region {region}"))?;
        if bytes.len() < end && region.is_dyn() {
            bytes.resize(end, poison);
        }
        if bytes.len() < end {
            return Err(format!("{}: {end} bytes in a region of {}", seat.placement.place, bytes.len()));
        }
        elements.into_iter().for_each(|at| f(&mut bytes[at..at + width]));
        Ok(())
    }

    /// The bytes of the elements, in row-major order.
    pub(super) fn bytes(&mut self, seat: &TypedPlacement) -> Result<Vec<u8>, String> {
        let mut all = Vec::new();
        self.each(seat, |bytes| all.extend_from_slice(bytes))?;
        Ok(all)
    }

    pub(super) fn read(&mut self, seat: &TypedPlacement) -> Result<Literal, String> {
        let bytes = self.bytes(seat)?;
        let shape = seat.shape()?;
        Literal::from_bytes(seat.dtype, shape, &bytes)
            .ok_or_else(|| format!("{}: too large", seat.placement.place))
    }

    /// A tensor of poison, if only its type matters.
    pub(super) fn nothing(&self, seat: &TypedPlacement) -> Result<Literal, String> {
        let shape = seat.shape()?;
        let bytes = vec![self.poison; shape.iter().product::<usize>() * seat.placement.width];
        Literal::from_bytes(seat.dtype, shape, &bytes)
            .ok_or_else(|| format!("{}: too large", seat.placement.place))
    }

    pub(super) fn write(&mut self, seat: &TypedPlacement, tensor: &Literal) -> Result<(), String> {
        if (tensor.dtype, &tensor.shape) != (seat.dtype, &seat.shape()?) {
            let got = format!("{}{:?}", tensor.dtype, tensor.shape);
            return Err(format!(
                "{}: expected {}{:?}, got {got}",
                seat.placement.place,
                seat.dtype,
                seat.shape()?
            ));
        }
        let all = tensor.to_bytes();
        let mut from = all.chunks_exact(seat.placement.width);
        self.each(seat, |bytes| bytes.copy_from_slice(from.next().unwrap_or_default()))
    }

    pub(super) fn poison(&mut self, seat: &TypedPlacement) -> Result<(), String> {
        let poison = self.poison;
        self.each(seat, |bytes| bytes.fill(poison))
    }

    /// Ends a call: peers read what they have not read, and memory that is kept from call to call is poisoned.
    pub(super) fn end_call(&mut self) -> Result<(), String> {
        for (region, old) in &self.old {
            let bytes = self.regions.get(region).map_or(&[][..], |bytes| bytes);
            old.iter().enumerate().try_for_each(|(at, old)| read_old(*region, at, *old, bytes.get(at)))?;
        }
        for (region, bytes) in &mut self.regions {
            if region.is_kept() {
                bytes.fill(self.poison);
            }
        }
        Ok(())
    }
}

/// A peer reads a byte that it expects to be as it was before the call, if it does.
fn read_old(region: Region, at: usize, expected: Option<u8>, byte: Option<&u8>) -> Result<(), String> {
    match (expected, byte) {
        (Some(expected), Some(byte)) if *byte != expected => {
            Err(format!("@{region}+{at:#x} was written before its older leases ended"))
        }
        _ => Ok(()),
    }
}
