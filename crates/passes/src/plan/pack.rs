//! Offsets for blocks of memory that are needed from one line to another, so that the whole is small.
//!
//! Blocks are placed in the order of their lines, each in the smallest hole that has room for it. Where that leaves
//! the whole much larger than the most that is needed at once, and there are few, they are placed again by size.
//! Memory that is wanted for something else from some line on is a *bin*: until then it holds blocks for nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Places are aligned to a cache line, so that no two tensors share one.
pub(super) const ALIGN: u64 = 64;

/// A block of memory that is needed from one line to another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) def: u32,
    pub(super) last: u32,
    pub(super) size: u64,
}

impl Block {
    fn meets(&self, other: &Block) -> bool {
        self.def <= other.last && other.def <= self.last
    }
}

/// Memory that may be used before a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bin {
    pub(super) before: u32,
    pub(super) size: u64,
}

/// Where blocks lie.
#[derive(Debug)]
pub(super) struct Packed {
    /// For each block the bin, if it is in one, and the offset.
    pub(super) places: Vec<(Option<usize>, u64)>,
    /// The size of what is in no bin.
    pub(super) size: u64,
}

/// More blocks than this are not placed a second time.
const FEW: usize = 1024;

/// Whether memory is little more than what is needed of it.
pub(super) fn is_close(size: u64, needed: u64) -> bool {
    size <= needed + needed / 20
}

/// A place for each block. The sizes are multiples of the alignment, and their sum fits in 64 bits.
pub(super) fn pack(blocks: &[Block], bins: &[Bin]) -> Packed {
    let mut packed = by_line(blocks, bins);
    let rest: Vec<usize> = (0..blocks.len()).filter(|i| packed.places[*i].0.is_none()).collect();
    let left: Vec<Block> = rest.iter().map(|i| blocks[*i]).collect();
    if left.len() <= FEW && !is_close(packed.size, most(&left)) {
        let (offsets, size) = by_size(&left);
        if size < packed.size {
            packed.size = size;
            rest.into_iter().zip(offsets).for_each(|(i, offset)| packed.places[i].1 = offset);
        }
    }
    packed
}

/// Blocks in the order in which they begin, the largest first.
fn in_order(blocks: &[Block]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..blocks.len()).filter(|i| blocks[*i].size > 0).collect();
    order.sort_by_key(|i| (blocks[*i].def, Reverse(blocks[*i].size)));
    order
}

/// The most bytes that are needed at once.
pub(super) fn most(blocks: &[Block]) -> u64 {
    let (mut ends, mut now, mut most) = (BinaryHeap::new(), 0, 0);
    for i in in_order(blocks) {
        while let Some(Reverse((last, size))) = ends.peek().copied()
            && last < blocks[i].def
        {
            ends.pop();
            now -= size;
        }
        ends.push(Reverse((blocks[i].last, blocks[i].size)));
        now += blocks[i].size;
        most = most.max(now);
    }
    most
}

/// Holes between blocks, and where the last block ends.
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

    /// The smallest hole that has room.
    fn hole(&self, size: u64) -> Option<(u64, u64)> {
        self.by_size.range((size, 0)..).next().copied()
    }

    /// Takes the beginning of a hole.
    fn fill(&mut self, (room, offset): (u64, u64), size: u64) -> u64 {
        self.remove(offset, room);
        if room > size {
            self.add(offset + size, room - size);
        }
        offset
    }

    /// Takes a hole, or makes room at the end.
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

/// In the order of their lines, each in the smallest hole: of a bin if there is one.
fn by_line(blocks: &[Block], bins: &[Bin]) -> Packed {
    let mut places = vec![(None, 0); blocks.len()];
    // What is in no bin comes last.
    let mut free: Vec<Free> = (0..=bins.len()).map(|_| Free::default()).collect();
    for (free, bin) in free.iter_mut().zip(bins) {
        free.add(0, bin.size / ALIGN * ALIGN);
    }
    let mut ends: BinaryHeap<Reverse<(u32, usize)>> = BinaryHeap::new();
    for i in in_order(blocks) {
        let block = blocks[i];
        while let Some(Reverse((last, ended))) = ends.peek().copied()
            && last < block.def
        {
            ends.pop();
            let (bin, offset): (Option<usize>, u64) = places[ended];
            free[bin.unwrap_or(bins.len())].give(offset, blocks[ended].size);
        }
        let holes = bins.iter().enumerate().filter(|(_, bin)| block.last < bin.before);
        let holes = holes.filter_map(|(bin, _)| Some((free[bin].hole(block.size)?, bin)));
        places[i] = match holes.min() {
            Some((hole, bin)) => (Some(bin), free[bin].fill(hole, block.size)),
            None => (None, free[bins.len()].take(block.size)),
        };
        ends.push(Reverse((block.last, i)));
    }
    Packed { places, size: free[bins.len()].end }
}

/// The largest first, each in the smallest hole between those it meets in time.
fn by_size(blocks: &[Block]) -> (Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..blocks.len()).filter(|i| blocks[*i].size > 0).collect();
    order.sort_by_key(|i| (Reverse(blocks[*i].size), blocks[*i].def));
    let mut offsets = vec![0; blocks.len()];
    // By offset.
    let mut placed: Vec<(u64, usize)> = Vec::new();
    let mut end = 0;
    for i in order {
        let block = blocks[i];
        let (mut at, mut best) = (0, None);
        for (offset, other) in &placed {
            let other = &blocks[*other];
            if !other.meets(&block) {
                continue;
            }
            if *offset >= at + block.size && best.is_none_or(|(room, _)| offset - at < room) {
                best = Some((offset - at, at));
            }
            at = at.max(offset + other.size);
        }
        let offset = best.map_or(at, |(_, at)| at);
        offsets[i] = offset;
        end = end.max(offset + block.size);
        placed.insert(placed.partition_point(|(other, _)| *other <= offset), (offset, i));
    }
    (offsets, end)
}
