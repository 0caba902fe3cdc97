//! Offsets for blocks of memory that are needed from one line to another, so that the whole is small.
//!
//! Blocks are placed in the order of their lines, each in the smallest hole that has room for it. Where that leaves
//! the whole much larger than the most that is needed at once, and there are few, they are placed again by size.

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

/// More blocks than this are not placed a second time.
const FEW: usize = 1024;

/// An offset for each block, and the size of the whole. None where that does not fit in 64 bits.
pub(super) fn pack(blocks: &[Block]) -> Option<(Vec<u64>, u64)> {
    let round = |block: &Block| Some(Block { size: block.size.checked_next_multiple_of(ALIGN)?, ..*block });
    let blocks: Vec<Block> = blocks.iter().map(round).collect::<Option<_>>()?;
    blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(block.size))?;
    let (offsets, size, most) = by_line(&blocks);
    if size > most + most / 20 && blocks.len() <= FEW {
        let (other, smaller) = by_size(&blocks);
        if smaller < size {
            return Some((other, smaller));
        }
    }
    Some((offsets, size))
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

    fn take(&mut self, size: u64) -> u64 {
        if let Some((room, offset)) = self.by_size.range((size, 0)..).next().copied() {
            self.remove(offset, room);
            if room > size {
                self.add(offset + size, room - size);
            }
            return offset;
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

/// Offsets, the size of the whole, and the most bytes that are needed at once.
fn by_line(blocks: &[Block]) -> (Vec<u64>, u64, u64) {
    let mut order: Vec<usize> = (0..blocks.len()).filter(|i| blocks[*i].size > 0).collect();
    order.sort_by_key(|i| (blocks[*i].def, Reverse(blocks[*i].size)));
    let mut offsets = vec![0; blocks.len()];
    let (mut free, mut ends) = (Free::default(), BinaryHeap::new());
    let (mut now, mut most) = (0, 0);
    for i in order {
        let block = blocks[i];
        while let Some(Reverse((last, ended))) = ends.peek().copied()
            && last < block.def
        {
            ends.pop();
            let size = blocks[ended as usize].size;
            free.give(offsets[ended as usize], size);
            now -= size;
        }
        offsets[i] = free.take(block.size);
        ends.push(Reverse((block.last, i as u32)));
        now += block.size;
        most = most.max(now);
    }
    (offsets, free.end, most)
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
