//! Assigns offsets to blocks of memory by their live ranges, so that the total is small.
//!
//! Blocks are placed in line order, each in the smallest hole that fits (best fit). If the total is then much larger
//! than the peak of live bytes, and there are few blocks, they are placed again by size. Memory reserved from some line
//! on is a *bin*: before that line it holds blocks at no cost.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Places are aligned to a cache line, so that no two tensors share one.
pub(super) const ALIGN: u64 = 64;

/// Tensors of at least `LARGE` bytes are skewed by `SKEW`, so that neighbours have different page offsets. Stores
/// conflict with loads that are a multiple of the page size away (4K aliasing): a stencil ran 1.3 times as long.
const LARGE: u64 = 64 << 10;
const SKEW: u64 = 5 * ALIGN;

/// The bytes that a block takes outside of bins.
fn room(size: u64, skew: u64) -> u64 {
    size + if size >= LARGE { skew } else { 0 }
}

/// A block of memory with its live range in lines.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) def: u32,
    pub(super) last: u32,
    pub(super) size: u64,
    /// If parts become live later: byte ranges, and the line from which each is live.
    pub(super) pieces: Vec<(u64, u64, u32)>,
}

impl Block {
    /// Its pieces, or the whole as one.
    pub(super) fn rows(&self) -> impl Iterator<Item = (u64, u64, u32)> + '_ {
        let whole = self.pieces.is_empty().then_some((0, self.size, self.def));
        self.pieces.iter().copied().chain(whole)
    }
}

/// Memory that is free before a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin {
    pub(super) before: u32,
    pub(super) size: u64,
}

/// The placement of blocks.
#[derive(Debug)]
pub(super) struct Packed {
    /// For each block the bin, if any, and the offset.
    pub(super) places: Vec<(Option<usize>, u64)>,
    /// The bytes outside of bins.
    pub(super) size: u64,
}

/// More blocks than this are not placed a second time.
const FEW: usize = 1024;

/// Whether the memory size is close to the bytes needed.
pub(super) fn is_close(size: u64, needed: u64) -> bool {
    size <= needed + needed / 20
}

/// Places each block. The sizes must be multiples of the alignment, and their sum must fit in 64 bits.
pub(super) fn pack(blocks: &[Block], bins: &[Bin]) -> Packed {
    let packed = pack_with(SKEW, blocks, bins);
    let left = blocks.iter().zip(&packed.places).filter(|(_, (bin, _))| bin.is_none());
    if is_close(packed.size, most(left.map(|(block, _)| block))) {
        return packed;
    }
    // The skew may keep blocks from fitting into holes.
    let plain = pack_with(0, blocks, bins);
    if plain.size < packed.size { plain } else { packed }
}

fn pack_with(skew: u64, blocks: &[Block], bins: &[Bin]) -> Packed {
    let mut packed = by_line(skew, blocks, bins);
    let rest: Vec<usize> = (0..blocks.len()).filter(|i| packed.places[*i].0.is_none()).collect();
    let left: Vec<&Block> = rest.iter().map(|i| &blocks[*i]).collect();
    if left.len() <= FEW && !is_close(packed.size, most(left.iter().copied())) {
        let (offsets, size) = by_size(skew, &left);
        if size < packed.size {
            packed.size = size;
            rest.into_iter().zip(offsets).for_each(|(i, offset)| packed.places[i].1 = offset);
        }
    }
    packed
}

/// The peak of live bytes.
pub(super) fn most<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> u64 {
    let rows =
        blocks.into_iter().flat_map(|block| block.rows().map(|(from, to, def)| (def, block.last, to - from)));
    let mut rows: Vec<(u32, u32, u64)> = rows.collect();
    rows.sort_unstable();
    let (mut ends, mut now, mut most) = (BinaryHeap::new(), 0, 0);
    for (def, last, size) in rows {
        while let Some(Reverse((last, size))) = ends.peek().copied()
            && last < def
        {
            ends.pop();
            now -= size;
        }
        ends.push(Reverse((last, size)));
        now += size;
        most = most.max(now);
    }
    most
}

/// Free holes between blocks, and the end of the last block.
#[derive(Default)]
struct Free {
    by_offset: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    end: u64,
}

impl Free {
    fn add(&mut self, offset: u64, size: u64) {
        self.by_offset.insert(offset, size);
        self.by_size.insert((size, offset));
    }

    fn remove(&mut self, offset: u64, size: u64) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(size, offset));
    }

    /// The smallest hole that fits.
    fn hole(&self, size: u64) -> Option<(u64, u64)> {
        self.by_size.range((size, 0)..).next().copied()
    }

    /// Takes the start of a hole.
    fn fill(&mut self, (room, offset): (u64, u64), size: u64) -> u64 {
        self.remove(offset, room);
        if room > size {
            self.add(offset + size, room - size);
        }
        offset
    }

    /// Takes a hole, or grows at the end.
    fn take(&mut self, size: u64) -> u64 {
        if let Some(hole) = self.hole(size) {
            return self.fill(hole, size);
        }
        let last = self.by_offset.last_key_value().map(|(offset, room)| (*offset, *room));
        let offset = match last {
            Some((offset, room)) if offset + room == self.end => {
                self.remove(offset, room);
                offset
            }
            _ => self.end,
        };
        self.end = offset + size;
        offset
    }

    fn give(&mut self, mut offset: u64, mut size: u64) {
        if let Some((before, room)) = self.by_offset.range(..offset).next_back().map(|(o, r)| (*o, *r))
            && before + room == offset
        {
            self.remove(before, room);
            (offset, size) = (before, room + size);
        }
        if let Some(room) = self.by_offset.get(&(offset + size)).copied() {
            self.remove(offset + size, room);
            size += room;
        }
        self.add(offset, size);
    }
}

/// In line order, each in the smallest hole that fits, in a bin if possible.
fn by_line(skew: u64, blocks: &[Block], bins: &[Bin]) -> Packed {
    let mut places = vec![(None, 0); blocks.len()];
    // The last entry is for blocks outside of bins.
    let mut free: Vec<Free> = (0..=bins.len()).map(|_| Free::default()).collect();
    for (free, bin) in free.iter_mut().zip(bins) {
        free.add(0, bin.size / ALIGN * ALIGN);
    }
    let mut ends: BinaryHeap<Reverse<(u32, usize)>> = BinaryHeap::new();
    let mut order: Vec<usize> = (0..blocks.len()).filter(|i| blocks[*i].size > 0).collect();
    order.sort_by_key(|i| (blocks[*i].def, Reverse(blocks[*i].size)));
    for i in order {
        let block = &blocks[i];
        while let Some(Reverse((last, ended))) = ends.peek().copied()
            && last < block.def
        {
            ends.pop();
            let (bin, offset): (Option<usize>, u64) = places[ended];
            let size = blocks[ended].size;
            match bin {
                Some(bin) => free[bin].give(offset, size),
                None => free[bins.len()].give(offset, room(size, skew)),
            }
        }
        let holes = bins.iter().enumerate().filter(|(_, bin)| block.last < bin.before);
        let holes = holes.filter_map(|(bin, _)| Some((free[bin].hole(block.size)?, bin)));
        places[i] = match holes.min() {
            Some((hole, bin)) => (Some(bin), free[bin].fill(hole, block.size)),
            None => (None, free[bins.len()].take(room(block.size, skew))),
        };
        ends.push(Reverse((block.last, i)));
    }
    Packed { places, size: free[bins.len()].end }
}

/// Largest first, each in the smallest hole between blocks with overlapping live ranges.
fn by_size(skew: u64, blocks: &[&Block]) -> (Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..blocks.len()).filter(|i| blocks[*i].size > 0).collect();
    order.sort_by_key(|i| (Reverse(blocks[*i].size), blocks[*i].def));
    let mut offsets = vec![0; blocks.len()];
    // Occupied byte and line ranges: from, to, def, last.
    let mut taken: Vec<(u64, u64, u32, u32)> = Vec::new();
    let mut end = 0;
    for i in order {
        let Block { def, last, size, .. } = *blocks[i];
        let size = room(size, skew);
        let (mut at, mut best) = (0u64, None);
        for (from, to, ..) in taken.iter().filter(|(_, _, other, end)| *other <= last && def <= *end) {
            if *from >= at + size && best.is_none_or(|(room, _)| from - at < room) {
                best = Some((from - at, at));
            }
            at = at.max(to.next_multiple_of(ALIGN));
        }
        let offset = best.map_or(at, |(_, at)| at);
        offsets[i] = offset;
        end = end.max(offset + size);
        for (from, to, def) in blocks[i].rows() {
            let to = if to == blocks[i].size { size } else { to };
            let row = (offset + from, offset + to, def, last);
            taken.insert(taken.partition_point(|other| *other <= row), row);
        }
    }
    (offsets, end)
}
