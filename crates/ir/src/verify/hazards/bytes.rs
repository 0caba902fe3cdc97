//! What is known of every byte, as an interval map: whose contents it holds, which start will write it, who leases it.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

use crate::entity::Value;
use crate::plan::Region;

/// A few values.
pub(super) type Values = SmallVec<[Value; 2]>;

/// What is known of some bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cell {
    /// The values whose contents they hold: a byte at address `a` holds byte `a - place` of each of these, whose
    /// elements lie without gaps at their place.
    pub holds: Values,
    /// The start whose result is going to be written here.
    pub flight: Option<Value>,
    /// The starts that lease them.
    pub leases: Values,
}

/// The bytes of all regions; nothing is known of those that no cell covers.
#[derive(Clone, Debug, Default)]
pub(super) struct Bytes {
    /// By region and first byte; each with its end.
    cells: BTreeMap<(Region, u64), (u64, Cell)>,
}

impl Bytes {
    /// The cells of a range, clipped to it, and the gaps between them.
    pub(super) fn over(&self, region: Region, range: Range<u64>) -> Vec<(Range<u64>, Option<&Cell>)> {
        let mut found = Vec::new();
        let mut at = range.start;
        let before = self.cells.range(..(region, range.start)).next_back();
        let before = before.filter(|((of, _), (end, _))| *of == region && *end > range.start);
        for ((_, start), (end, cell)) in
            before.into_iter().chain(self.cells.range((region, range.start)..(region, range.end)))
        {
            if *start > at {
                found.push((at..*start, None));
            }
            let part = at.max(*start)..range.end.min(*end);
            at = part.end;
            found.push((part, Some(cell)));
        }
        if at < range.end {
            found.push((at..range.end, None));
        }
        found
    }

    /// Makes a cell end, and another begin, at this byte.
    fn cut(&mut self, region: Region, at: u64) {
        let Some(((of, _), (end, cell))) = self.cells.range_mut(..(region, at)).next_back() else { return };
        if *of == region && *end > at {
            let rest = (std::mem::replace(end, at), cell.clone());
            self.cells.insert((region, at), rest);
        }
    }

    /// Replaces all that is known of a range.
    pub(super) fn set(&mut self, region: Region, range: Range<u64>, cell: Cell) {
        if range.is_empty() {
            return;
        }
        self.cut(region, range.start);
        self.cut(region, range.end);
        let inside: SmallVec<[u64; 8]> = self
            .cells
            .range((region, range.start)..(region, range.end))
            .map(|((_, start), _)| *start)
            .collect();
        for start in inside {
            self.cells.remove(&(region, start));
        }
        self.cells.insert((region, range.start), (range.end, cell));
        self.merge(region, range);
    }

    /// Changes what is known of the cells in a range.
    pub(super) fn update(&mut self, region: Region, range: Range<u64>, change: impl Fn(&mut Cell)) {
        if range.is_empty() {
            return;
        }
        self.cut(region, range.start);
        self.cut(region, range.end);
        for (_, (_, cell)) in self.cells.range_mut((region, range.start)..(region, range.end)) {
            change(cell);
        }
        self.merge(region, range);
    }

    /// Joins neighbours of which the same is known, in a range and at its ends.
    fn merge(&mut self, region: Region, range: Range<u64>) {
        let starts: SmallVec<[u64; 8]> = self
            .cells
            .range((region, range.start)..=(region, range.end))
            .map(|((_, start), _)| *start)
            .collect();
        for start in starts {
            let Some((end, cell)) = self.cells.get(&(region, start)) else { continue };
            let end = *end;
            let before = self.cells.range(..(region, start)).next_back();
            if let Some((key, (at, other))) = before
                && (key.0, *at, other) == (region, start, cell)
            {
                let key = *key;
                self.cells.remove(&(region, start));
                if let Some((at, _)) = self.cells.get_mut(&key) {
                    *at = end;
                }
            }
        }
    }

    /// What is known after one of two paths: contents that both leave, and everything that either holds up.
    pub(super) fn join(&self, other: &Bytes) -> Bytes {
        let mut joined = Bytes::default();
        for ((region, start), (end, cell)) in &self.cells {
            for (part, there) in other.over(*region, *start..*end) {
                let Some(there) = there else { continue };
                let holds = cell.holds.iter().filter(|value| there.holds.contains(value)).copied().collect();
                let mut leases = cell.leases.clone();
                leases.extend(there.leases.iter().filter(|lease| !cell.leases.contains(lease)).copied());
                let both = Cell { holds, flight: cell.flight.or(there.flight), leases };
                joined.cells.insert((*region, part.start), (part.end, both));
            }
        }
        joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Rng;

    fn cell(value: u32) -> Cell {
        Cell { holds: Values::from_slice(&[Value(value)]), ..Cell::default() }
    }

    /// Every byte of the heap below 64, one by one.
    fn all(bytes: &Bytes) -> Vec<Option<Cell>> {
        let mut list = Vec::new();
        for (part, cell) in bytes.over(Region::Heap, 0..64) {
            assert_eq!(part.start, list.len() as u64);
            list.extend(part.map(|_| cell.cloned()));
        }
        list
    }

    #[test]
    fn ranges_are_kept_like_single_bytes() {
        let mut rng = Rng::new(1);
        for _ in 0..200 {
            let (mut bytes, mut list) = (Bytes::default(), vec![None; 64]);
            let before = (bytes.clone(), list.clone());
            for _ in 0..12 {
                let start = rng.below(60);
                let range = start..start + rng.below(64 - start);
                let value = rng.below(3) as u32;
                let wide = range.start as u64..range.end as u64;
                if rng.one_in(2) {
                    bytes.set(Region::Heap, wide, cell(value));
                    list[range].fill(Some(cell(value)));
                } else {
                    bytes.update(Region::Heap, wide, |cell| cell.flight = Some(Value(value)));
                    list[range].iter_mut().flatten().for_each(|cell| cell.flight = Some(Value(value)));
                }
                assert_eq!(all(&bytes), list);
                let ends: Vec<_> =
                    bytes.cells.iter().map(|((_, start), (end, cell))| (*start, *end, cell)).collect();
                let joined = ends.windows(2).all(|pair| pair[0].1 < pair[1].0 || pair[0].2 != pair[1].2);
                assert!(joined, "neighbours alike are not joined: {ends:?}");
            }
            let nothing = all(&bytes.join(&before.0));
            assert!(nothing.iter().all(Option::is_none));
            assert_eq!(all(&bytes.join(&bytes)), list);
        }
    }

    #[test]
    fn a_join_keeps_what_both_hold() {
        let (mut a, mut b) = (Bytes::default(), Bytes::default());
        a.set(Region::Heap, 0..8, cell(1));
        b.set(Region::Heap, 0..8, cell(1));
        b.set(Region::Heap, 4..6, cell(2));
        b.update(Region::Heap, 6..8, |cell| cell.leases.push(Value(9)));
        let joined = all(&a.join(&b));
        assert_eq!(joined[3], Some(cell(1)));
        assert_eq!(joined[4], Some(Cell::default()));
        assert_eq!(joined[7], Some(Cell { leases: Values::from_slice(&[Value(9)]), ..cell(1) }));
    }
}
