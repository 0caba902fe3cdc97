//! The state of every byte, as an interval map: whose contents it holds, which start will write it, who leases it.

use std::collections::{BTreeMap, btree_map};
use std::ops::Range;

use smallvec::SmallVec;

use crate::entity::Value;
use crate::plan::Region;

/// A few values.
pub(super) type Values = SmallVec<[Value; 2]>;

/// The state of a range of bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cell {
    /// The values whose contents they hold: a byte at address `a` holds byte `a - place` of each of these values, which
    /// are contiguous at their places.
    pub holds: Values,
    /// The start in flight that will write its result here.
    pub flight: Option<Value>,
    /// The starts that lease them.
    pub leases: Values,
}

impl Cell {
    /// The same without contents; `None` if no start will write it and none leases it.
    fn held_up(&self) -> Option<Cell> {
        let busy = self.flight.is_some() || !self.leases.is_empty();
        busy.then(|| Cell { holds: Values::new(), flight: self.flight, leases: self.leases.clone() })
    }
}

/// The bytes of all regions; ranges without a cell are unknown.
#[derive(Clone, Debug, Default)]
pub(super) struct Bytes {
    /// Keyed by region and first byte, each with its end.
    cells: BTreeMap<(Region, u64), (u64, Cell)>,
}

impl Bytes {
    /// The cells of a range, clipped to it, and the gaps between them.
    pub(super) fn over(&self, region: Region, range: Range<u64>) -> Over<'_> {
        let before = self.cells.range(..(region, range.start)).next_back();
        let before = before.filter(|((of, _), (end, _))| *of == region && *end > range.start);
        let before = before.map(|((_, start), (end, cell))| (*start, *end, cell));
        let rest = self.cells.range((region, range.start)..(region, range.end.max(range.start)));
        Over { at: range.start, end: range.end, next: before, rest }
    }

    /// Splits the cell that contains this byte.
    fn cut(&mut self, region: Region, at: u64) {
        let Some(((of, _), (end, cell))) = self.cells.range_mut(..(region, at)).next_back() else { return };
        if *of == region && *end > at {
            let rest = (std::mem::replace(end, at), cell.clone());
            self.cells.insert((region, at), rest);
        }
    }

    /// Replaces the state of a range.
    pub(super) fn set(&mut self, region: Region, range: Range<u64>, cell: Cell) {
        if range.is_empty() {
            return;
        }
        let (from, to) = ((region, range.start), (region, range.end));
        match self.cells.get_mut(&from) {
            // Most cells are overwritten by one of the same size.
            Some((end, known)) if *end == range.end => *known = cell,
            _ => {
                self.cut(region, range.start);
                self.cut(region, range.end);
                while let Some((start, _)) = self.cells.range(from..to).next() {
                    let start = *start;
                    self.cells.remove(&start);
                }
                self.cells.insert(from, (range.end, cell));
            }
        }
        self.join_before(to);
        self.join_before(from);
    }

    /// Merges a cell that begins here with the previous one, if both have the same state.
    fn join_before(&mut self, at: (Region, u64)) {
        let Some((end, cell)) = self.cells.get(&at) else { return };
        let (end, before) = (*end, self.cells.range(..at).next_back());
        if let Some((key, (until, other))) = before
            && (key.0, *until, other) == (at.0, at.1, cell)
        {
            let key = *key;
            self.cells.remove(&at);
            if let Some((until, _)) = self.cells.get_mut(&key) {
                *until = end;
            }
        }
    }

    /// Changes the state of the cells in a range.
    pub(super) fn update(&mut self, region: Region, range: Range<u64>, change: impl Fn(&mut Cell)) {
        if range.is_empty() {
            return;
        }
        self.cut(region, range.start);
        self.cut(region, range.end);
        for (_, (_, cell)) in self.cells.range_mut((region, range.start)..(region, range.end)) {
            change(cell);
        }
        let starts: SmallVec<[u64; 8]> = self
            .cells
            .range((region, range.start)..=(region, range.end))
            .map(|((_, start), _)| *start)
            .collect();
        starts.into_iter().for_each(|start| self.join_before((region, start)));
    }

    /// The state after either of two paths: the contents common to both, and the flights and leases of either.
    pub(super) fn join(&self, other: &Bytes) -> Bytes {
        let mut joined = Bytes::default();
        for ((region, start), (end, cell)) in &self.cells {
            for (part, there) in other.over(*region, *start..*end) {
                let both = match there {
                    Some(there) => {
                        let held = cell.holds.iter().filter(|value| there.holds.contains(value));
                        let mut leases = cell.leases.clone();
                        leases.extend(
                            there.leases.iter().filter(|lease| !cell.leases.contains(lease)).copied(),
                        );
                        let flight = cell.flight.or(there.flight);
                        Some(Cell { holds: held.copied().collect(), flight, leases })
                    }
                    None => cell.held_up(),
                };
                let key = (*region, part.start);
                both.and_then(|both| joined.cells.insert(key, (part.end, both)));
            }
        }
        for ((region, start), (end, cell)) in &other.cells {
            let Some(held_up) = cell.held_up() else { continue };
            for (part, _) in self.over(*region, *start..*end).filter(|(_, here)| here.is_none()) {
                joined.cells.insert((*region, part.start), (part.end, held_up.clone()));
            }
        }
        joined
    }
}

/// The cells of a range and the gaps between them, in order.
pub(super) struct Over<'a> {
    at: u64,
    end: u64,
    next: Option<(u64, u64, &'a Cell)>,
    rest: btree_map::Range<'a, (Region, u64), (u64, Cell)>,
}

impl<'a> Iterator for Over<'a> {
    type Item = (Range<u64>, Option<&'a Cell>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        if self.next.is_none() {
            self.next = self.rest.next().map(|((_, start), (end, cell))| (*start, *end, cell));
        }
        let begin = self.at;
        let found = match self.next {
            Some((start, end, cell)) if start <= begin => {
                self.next = None;
                (begin..self.end.min(end), Some(cell))
            }
            Some((start, ..)) => (begin..start, None),
            None => (begin..self.end, None),
        };
        self.at = found.0.end;
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::element_words;

    fn cell(value: u32) -> Cell {
        Cell { holds: Values::from_slice(&[Value(value)]), ..Cell::default() }
    }

    /// Every byte of the heap below 64, one by one.
    fn all(bytes: &Bytes) -> Vec<Option<Cell>> {
        let mut list = Vec::new();
        for (part, cell) in bytes.over(Region::HEAP, 0..64) {
            assert_eq!(part.start, list.len() as u64);
            list.extend(part.map(|_| cell.cloned()));
        }
        list
    }

    #[test]
    fn ranges_are_kept_like_single_bytes() {
        let mut drawn = 0;
        let mut below = |n: usize| {
            drawn += 1;
            element_words(1, drawn)[0] as usize % n
        };
        for _ in 0..200 {
            let (mut bytes, mut list) = (Bytes::default(), vec![None::<Cell>; 64]);
            let nothing = bytes.clone();
            for _ in 0..12 {
                let start = below(60);
                let range = start..start + below(64 - start);
                let value = below(3) as u32;
                let wide = range.start as u64..range.end as u64;
                if below(2) == 0 {
                    bytes.set(Region::HEAP, wide, cell(value));
                    list[range].fill(Some(cell(value)));
                } else {
                    bytes.update(Region::HEAP, wide, |cell| cell.flight = Some(Value(value)));
                    list[range].iter_mut().flatten().for_each(|cell| cell.flight = Some(Value(value)));
                }
                assert_eq!(all(&bytes), list);
                let ends: Vec<_> =
                    bytes.cells.iter().map(|((_, start), (end, cell))| (*start, *end, cell)).collect();
                let joined = ends.windows(2).all(|pair| pair[0].1 < pair[1].0 || pair[0].2 != pair[1].2);
                assert!(joined, "neighbours alike are not joined: {ends:?}");
            }
            // Where one path knows nothing, nothing is held, but a flight of the other path remains.
            let flights = list.iter().map(|cell| cell.as_ref().and_then(|cell| cell.flight));
            for joined in [bytes.join(&nothing), nothing.join(&bytes)] {
                let known = all(&joined).into_iter().map(|cell| {
                    assert!(cell.iter().all(|cell| cell.holds.is_empty()));
                    cell.and_then(|cell| cell.flight)
                });
                assert!(known.eq(flights.clone()));
            }
            assert_eq!(all(&bytes.join(&bytes)), list);
        }
    }

    #[test]
    fn a_join_keeps_what_both_hold() {
        let (mut a, mut b) = (Bytes::default(), Bytes::default());
        a.set(Region::HEAP, 0..8, cell(1));
        b.set(Region::HEAP, 0..8, cell(1));
        b.set(Region::HEAP, 4..6, cell(2));
        b.update(Region::HEAP, 6..8, |cell| cell.leases.push(Value(9)));
        let joined = all(&a.join(&b));
        assert_eq!(joined[3], Some(cell(1)));
        assert_eq!(joined[4], Some(Cell::default()));
        let leased = Values::from_slice(&[Value(9)]);
        assert_eq!(joined[7], Some(Cell { leases: leased.clone(), ..cell(1) }));
        // Bytes that only one path has touched are leased after the join.
        a.set(Region::HEAP, 8..12, Cell { leases: leased.clone(), ..cell(3) });
        for joined in [all(&a.join(&b)), all(&b.join(&a))] {
            assert_eq!(joined[8], Some(Cell { leases: leased.clone(), ..Cell::default() }));
        }
    }
}
