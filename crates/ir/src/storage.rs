//! How the lines of a plan use storage: where a value's elements lie, which bytes those are, what a line reads, and
//! what it may keep or write in place of an operand.
//!
//! This is the meaning of `plan.rs` in numbers, for the hazard checker, the plan oracle, and any code that makes or
//! runs plans.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use consort_types::layout::{Layout, numel};
use smallvec::{SmallVec, smallvec};

use crate::entity::{Value, ValueMap};
use crate::ops::{Alias, Effects, EvalCx, EvalError, Joined, OpDef, boxes_of, layouts_of};
use crate::plan::{Place, Region, RegionKind};
use crate::program::{Block, Func, Node};
use crate::types::TensorType;

/// The location of a tensor's elements: an extent relative to a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The place of the storage, from which the layout counts.
    pub place: Place,
    /// Bytes per element.
    pub width: usize,
    /// The extent of the elements.
    pub extent: Extent,
}

/// The extent of elements relative to a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// This layout.
    At(Layout),
    /// Contiguous at the place; the number of elements is known only at run time.
    Whole,
    /// Unknown, somewhere in the storage at the place.
    Within,
}

/// Ranges of bytes.
pub type Ranges = SmallVec<[Range<u64>; 1]>;

/// If the bytes of a view need more runs than this, they are approximated by the range from the first byte to the
/// last.
const MAX_RUNS: usize = 1 << 20;

impl Placement {
    /// A contiguous tensor at a place.
    pub fn new(place: Place, ty: &TensorType, sizes: &EvalCx<'_>) -> Placement {
        let shape: Result<Vec<usize>, EvalError> = ty.shape.iter().map(|size| sizes.size(size)).collect();
        let extent = match shape {
            Ok(shape) if numel(&shape).is_some() => Extent::At(Layout::contiguous(&shape)),
            _ => Extent::Whole,
        };
        Placement { place, width: ty.dtype.size(), extent }
    }

    /// The results of an op as views of this; `None` if the op must move elements.
    pub fn views(&self, op: &dyn OpDef, sizes: &EvalCx<'_>, results: usize) -> Option<Vec<Placement>> {
        let placement = |extent| Placement { extent, ..self.clone() };
        let unknown = |extent: Extent| Some(vec![placement(extent); results]);
        match &self.extent {
            Extent::At(layout) => match layouts_of(op, sizes, layout, results) {
                Ok(Some(layouts)) if layouts.iter().all(|layout| numel(&layout.shape).is_some()) => {
                    Some(layouts.into_iter().map(|layout| placement(Extent::At(layout))).collect())
                }
                Ok(None) => None,
                _ => unknown(Extent::Within),
            },
            // A view of unknown size may have gaps.
            Extent::Whole if op.keeps_order() => unknown(Extent::Whole),
            _ => unknown(Extent::Within),
        }
    }

    /// The part that `part` selects from the layout, if that is known.
    fn part(&self, part: impl FnOnce(&Layout) -> Layout) -> Placement {
        match &self.extent {
            Extent::At(layout) => Placement { extent: Extent::At(part(layout)), ..self.clone() },
            _ => Placement { extent: Extent::Within, ..self.clone() },
        }
    }

    /// Entry `at` of the first dimension, with that dimension removed.
    #[must_use]
    pub fn entry(&self, at: usize) -> Placement {
        self.part(|layout| {
            let mut entry = layout.narrowed(0, at, 1);
            entry.shape.remove(0);
            entry.strides.remove(0);
            entry
        })
    }

    /// Whether it is known to be contiguous.
    pub fn is_dense(&self) -> bool {
        match &self.extent {
            Extent::At(layout) => layout.is_contiguous(),
            Extent::Whole => true,
            Extent::Within => false,
        }
    }

    /// The offset of its first element in its region.
    pub fn address(&self) -> u64 {
        let start = if let Extent::At(layout) = &self.extent { layout.start } else { 0 };
        self.place.offset + (start * self.width) as u64
    }

    /// Whether both are known to be the same bytes in the same order. Empty tensors are the same wherever their places
    /// are.
    pub fn same(&self, other: &Placement) -> bool {
        let near = self.place.region == other.place.region;
        match (&self.extent, &other.extent) {
            _ if self.width != other.width => false,
            (Extent::At(a), Extent::At(b)) => {
                let apart = |i: usize| a.shape[i] > 1 && a.strides[i] != b.strides[i];
                let there = || self.address() == other.address() && !(0..a.shape.len()).any(apart);
                a.shape == b.shape && (a.shape.contains(&0) || near && there())
            }
            (Extent::Whole, Extent::Whole) => self.place == other.place,
            _ => false,
        }
    }

    /// The byte range of its region from its first byte to its last, and whether all of it is its own; `None` if
    /// unknown.
    pub fn hull(&self) -> Option<(Range<u64>, bool)> {
        let Extent::At(layout) = &self.extent else { return None };
        let (first, span) = (self.address(), layout.span());
        // Broadcast elements count once.
        let sizes = layout.shape.iter().zip(&layout.strides);
        let own =
            sizes.filter(|(_, stride)| **stride > 0).fold(1usize, |n, (size, _)| n.saturating_mul(*size));
        let solid = span == if span == 0 { 0 } else { own };
        Some((first..first + span as u64 * self.width as u64, solid))
    }

    /// Its bytes as ascending ranges of its region; `None` if unknown.
    pub fn bytes(&self) -> Option<Ranges> {
        let (hull, solid) = self.hull()?;
        let Extent::At(layout) = &self.extent else { return None };
        if hull.is_empty() {
            return Some(Ranges::new());
        }
        if solid {
            return Some(smallvec![hull]);
        }
        let mut dims: SmallVec<[(usize, usize); 6]> =
            layout.strides.iter().copied().zip(layout.shape.iter().copied()).collect();
        dims.retain(|(stride, size)| *size > 1 && *stride > 0);
        dims.sort_unstable();
        let dense = dims.iter().scan(1, |run, (stride, size)| {
            let next = (stride == run).then_some(());
            *run *= size;
            next
        });
        let dense = dense.count();
        let run: usize = dims[..dense].iter().map(|(_, size)| size).product();
        let (first, width) = (hull.start, self.width as u64);
        let outer = &dims[dense..];
        let n: usize = outer.iter().map(|(_, size)| size).product();
        if n > MAX_RUNS {
            return Some(smallvec![hull]);
        }
        let mut starts = vec![0u64];
        for (stride, size) in outer.iter().rev() {
            let steps = |start: u64| (0..*size).map(move |i| start + (i * stride) as u64);
            starts = starts.into_iter().flat_map(steps).collect();
        }
        Some(starts.into_iter().map(|at| first + at * width..first + (at + run as u64) * width).collect())
    }
}

/// A set of bytes of a plan's regions, of which bytes are removed and put back.
#[derive(Clone, Debug, Default)]
pub struct ByteSet {
    /// The end of each range, by its region and first byte.
    ranges: BTreeMap<(Region, u64), u64>,
    /// What was removed, in order.
    removed: Vec<(Region, Range<u64>)>,
}

impl ByteSet {
    /// Adds bytes that are not in the set.
    pub fn add(&mut self, region: Region, range: Range<u64>) {
        if !range.is_empty() {
            self.ranges.insert((region, range.start), range.end);
        }
    }

    /// The last bytes of a range that are in the set.
    pub fn meets(&self, region: Region, range: &Range<u64>) -> Option<Range<u64>> {
        let ((of, start), end) = self.ranges.range(..(region, range.end)).next_back()?;
        let shared = range.start.max(*start)..range.end.min(*end);
        (*of == region && !shared.is_empty()).then_some(shared)
    }

    /// Removes bytes; true if any of them were in the set.
    pub fn remove(&mut self, region: Region, range: &Range<u64>) -> bool {
        let first = self.removed.len();
        while let Some(shared) = self.meets(region, range) {
            let around = self.ranges.range_mut(..=(region, shared.start)).next_back();
            let Some(((_, start), end)) = around else { break };
            let (start, end) = (*start, std::mem::replace(end, shared.start));
            if start == shared.start {
                self.ranges.remove(&(region, start));
            }
            self.add(region, shared.end..end);
            self.removed.push((region, shared));
        }
        self.removed.len() > first
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How much has been removed, for [`ByteSet::restore`].
    pub fn mark(&self) -> usize {
        self.removed.len()
    }

    /// Puts back what was removed since a mark.
    pub fn restore(&mut self, mark: usize) {
        for (region, range) in self.removed.split_off(mark) {
            self.add(region, range);
        }
    }
}

/// The regions of a plan in which peers may still read when a call begins: arguments that were given away, and memory
/// that is kept from call to call and takes part in communication.
pub fn entry_leases(func: &Func) -> BTreeSet<Region> {
    fn add(block: &Block, regions: &mut ValueMap<Region>, all: &mut BTreeSet<Region>) {
        let kept = |place: &Region| place.is_kept();
        for (param, place) in block.params.iter().zip(&block.places) {
            regions.insert(*param, place.region);
        }
        for node in &block.nodes {
            let places = node.plan.as_ref().map_or(&[][..], |plan| &plan.places);
            for (result, place) in node.results.iter().zip(places) {
                regions.insert(*result, place.region);
            }
            if node.op.effects().starts().is_some() {
                all.extend(places.iter().map(|place| place.region).filter(kept));
                all.extend(node.args.iter().filter_map(|arg| regions.get(*arg)).copied().filter(kept));
            }
            node.blocks.iter().for_each(|block| add(block, regions, all));
        }
    }
    let mut all = BTreeSet::new();
    add(&func.body, &mut ValueMap::default(), &mut all);
    let donated = func.plan.as_ref().map_or(&[][..], |head| &head.donated);
    let params = (0u32..).zip(&func.body.params);
    all.extend(
        params
            .filter(|(_, param)| donated.contains(param))
            .map(|(number, _)| Region::of(RegionKind::Arg(number))),
    );
    all
}

/// Bytes that two lists of ascending ranges share.
pub fn overlap(a: &[Range<u64>], b: &[Range<u64>]) -> Option<Range<u64>> {
    let (few, many) = if a.len() < b.len() { (a, b) } else { (b, a) };
    few.iter().find_map(|x| {
        let y = many.get(many.partition_point(|y| y.end <= x.start))?;
        let shared = x.start.max(y.start)..x.end.min(y.end);
        (!shared.is_empty()).then_some(shared)
    })
}

/// Whether result `result` of a kernel may alias operand `operand` exactly.
pub fn may_take_over(op: &dyn OpDef, result: usize, operand: usize) -> bool {
    match op.alias() {
        Alias::Reuse => result == 0,
        Alias::First => result == 0 && operand == 0,
        Alias::None | Alias::View => false,
    }
}

/// Whether the contents of an operand of a start are read on this rank. Ranks outside the group pass theirs through.
pub fn is_needed(op: &dyn OpDef, operand: usize, sizes: &EvalCx<'_>) -> bool {
    let Some(collective) = op.collective() else { return true };
    let Some(me) = sizes.mesh.group_rank(collective.over, sizes.rank) else { return true };
    let n = sizes.mesh.group_size(collective.over);
    collective.needs(operand, me as usize, |message| {
        message.peer(me, n, |index| sizes.index(index)).ok().map(|peer| peer >= 0)
    })
}

/// A piece of a join: elements of an operand, and their place in the result.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Which operand.
    pub operand: usize,
    /// Its placement in the operand.
    pub from: Placement,
    /// Its placement in the result.
    pub to: Placement,
}

impl Piece {
    /// Whether it lies in its place already.
    pub fn stays(&self) -> bool {
        self.from.same(&self.to)
    }
}

/// The pieces of a join, which together are its result; `None` if sizes or places are unknown.
pub fn pieces(
    op: &dyn OpDef,
    sizes: &EvalCx<'_>,
    args: &[Placement],
    result: &Placement,
) -> Option<Vec<Piece>> {
    let layouts: Option<Vec<&Layout>> = args
        .iter()
        .chain([result])
        .map(|placement| if let Extent::At(layout) = &placement.extent { Some(layout) } else { None })
        .collect();
    let layouts = layouts?;
    let shapes: Vec<&[usize]> = layouts[..args.len()].iter().map(|layout| &layout.shape[..]).collect();
    let part = |placement: &Placement, start: &[usize], size: &[usize]| {
        placement.part(|layout| layout.narrowed_to(start, size))
    };
    let piece = |Joined { operand, from, to, size }| Piece {
        operand,
        from: part(&args[operand], &from, &size),
        to: part(result, &to, &size),
    };
    let whole = &layouts.last()?.shape;
    Some(boxes_of(op, sizes, &shapes, whole).ok()?.into_iter().map(piece).collect())
}

/// The tensors that hold what communication gave: results of waits, and views of them.
pub fn arrived(block: &Block) -> BTreeSet<Value> {
    fn add(block: &Block, all: &mut BTreeSet<Value>) {
        for node in &block.nodes {
            let of_view =
                node.op.alias() == Alias::View && node.args.first().is_some_and(|arg| all.contains(arg));
            if of_view || node.op.effects() == Effects::Wait {
                all.extend(&node.results);
            }
            node.blocks.iter().for_each(|block| add(block, all));
        }
    }
    let mut all = BTreeSet::new();
    add(block, &mut all);
    all
}

/// Whether moving an operand of a join copies for communication: it holds what communication gave, or it is the tensor
/// into a slice of which such an operand goes.
pub fn copies_for_communication(node: &Node, operand: usize, arrived: &BTreeSet<Value>) -> bool {
    let is_arrived = |value: &Value| arrived.contains(value);
    let is_base = operand == 0 && node.op.alias() == Alias::First;
    node.args.get(operand).is_some_and(is_arrived) || is_base && node.args.iter().any(is_arrived)
}

#[cfg(test)]
mod tests {
    use crate::ops::UpdateSlice;

    use super::*;
    use crate::index::Index;
    use crate::mesh::Mesh;
    use consort_types::{Rank, Rng};

    fn placement(offset: u64, layout: Layout) -> Placement {
        Placement { place: Place { region: Region::HEAP, offset }, width: 4, extent: Extent::At(layout) }
    }

    /// The bytes of every element, one by one.
    fn slow(placement: &Placement) -> Vec<u64> {
        let Extent::At(layout) = &placement.extent else { return Vec::new() };
        let mut bytes = Vec::new();
        for i in 0..layout.numel() {
            let at = crate::literal::unravel(i, &layout.shape);
            let offset: usize = at.iter().zip(&layout.strides).map(|(at, stride)| at * stride).sum();
            bytes.extend(
                (0..4).map(|byte| placement.place.offset + ((layout.start + offset) * 4 + byte) as u64),
            );
        }
        bytes.sort_unstable();
        bytes.dedup();
        bytes
    }

    #[test]
    fn bytes_are_those_of_the_elements() {
        let base = Layout::contiguous(&[3, 4, 5]);
        let views = [
            base.clone(),
            base.permuted(&[2, 0, 1]),
            base.narrowed(1, 1, 2),
            base.narrowed(2, 4, 1).permuted(&[1, 0, 2]),
            base.narrowed(0, 2, 1).narrowed(2, 1, 3),
            base.narrowed(1, 0, 0),
            Layout::contiguous(&[4, 1]).broadcast(&[3, 4, 5]),
            Layout::contiguous(&[]),
        ];
        for view in views {
            let placement = placement(0x40, view);
            let ranges = placement.bytes().unwrap();
            assert!(ranges.is_sorted_by(|a, b| a.end <= b.start), "{ranges:?}");
            let (hull, solid) = placement.hull().unwrap();
            let ends = ranges.first().zip(ranges.last()).map(|(first, last)| first.start..last.end);
            assert_eq!(ends.unwrap_or(hull.start..hull.start), hull);
            assert_eq!(solid, hull.clone().eq(slow(&placement)), "{ranges:?}");
            assert_eq!(ranges.into_iter().flatten().collect::<Vec<_>>(), slow(&placement));
        }
        let column = placement(0, base.narrowed(2, 4, 1)).bytes().unwrap();
        assert_eq!((column.len(), &column[..2]), (12, &[16..20, 36..40][..]));
        assert_eq!(placement(0, base.narrowed(0, 1, 2)).bytes().unwrap().len(), 1);
    }

    #[test]
    fn a_set_of_bytes_is_kept_like_single_bytes() {
        let mut rng = Rng::new(1);
        for _ in 0..200 {
            let (mut set, mut list) = (ByteSet::default(), vec![true; 64]);
            set.add(Region::HEAP, 0..64);
            set.add(Region::ARENA, 0..64);
            let mut marks = Vec::new();
            for _ in 0..12 {
                let start = rng.below(60);
                let range = start..start + rng.below(64 - start);
                if rng.one_in(4) {
                    marks.push((set.mark(), list.clone()));
                }
                let some = list[range.clone()].contains(&true);
                assert_eq!(set.remove(Region::HEAP, &(range.start as u64..range.end as u64)), some);
                list[range].fill(false);
                if rng.one_in(4)
                    && let Some((mark, before)) = marks.pop()
                {
                    set.restore(mark);
                    list = before;
                }
                assert_eq!(set.ranges.get(&(Region::ARENA, 0)), Some(&64));
                let heap = set.ranges.iter().filter(|((region, _), _)| *region == Region::HEAP);
                let mut all = vec![false; 64];
                heap.for_each(|((_, start), end)| all[*start as usize..*end as usize].fill(true));
                assert_eq!(all, list);
            }
        }
    }

    #[test]
    fn shared_bytes_are_found() {
        assert_eq!(overlap(&[0..4, 8..12, 20..30], &[4..8, 12..22]), Some(20..22));
        assert_eq!(overlap(&[0..4, 8..12], &[4..8, 12..22]), None);
        assert_eq!(overlap(&[], &[0..1, 2..3]), None);
    }

    #[test]
    fn pieces_cover_the_result_once() {
        let mesh = Mesh::default();
        let sizes = EvalCx { mesh: &mesh, rank: Rank(0), symbols: &Default::default() };
        let whole = placement(0x100, Layout::contiguous(&[4, 6, 3]));
        let op = UpdateSlice { start: [1, 2, 0].map(Index::constant).to_vec() };
        let args = [
            placement(0x1000, Layout::contiguous(&[4, 6, 3])),
            placement(0x2000, Layout::contiguous(&[2, 3, 3])),
        ];
        let pieces = pieces(&op, &sizes, &args, &whole).unwrap();
        let mut covered: Vec<u64> = pieces.iter().flat_map(|piece| slow(&piece.to)).collect();
        covered.sort_unstable();
        assert_eq!(covered, (0x100..0x100 + 4 * 72).collect::<Vec<u64>>());
        assert!(pieces.iter().all(|piece| !piece.stays()));
        // All pieces of operand 0 must have the same offset between source and destination.
        for piece in pieces.iter().filter(|piece| piece.operand == 0) {
            assert_eq!(piece.from.address() - piece.to.address(), 0x1000 - 0x100);
        }
    }
}
