//! What the lines of a plan do with storage: where a value's elements lie, which bytes those are, what a line reads,
//! and what it may leave or write where an operand lies.
//!
//! These are the meanings of `plan.rs` in numbers. The checker of hazards and the plan oracle both ask here, and so
//! may whoever makes or runs plans.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::layout::{Layout, numel};
use crate::ops::{Alias, BroadcastStart, Concat, Effects, EvalCx, EvalError, OpDef, Reshape, UpdateSlice};
use crate::plan::Place;
use crate::types::TensorType;
use crate::views;

/// Where a tensor's elements lie: somewhere from a place on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// The place of the storage that its layout counts from.
    pub place: Place,
    /// Bytes of one element.
    pub width: usize,
    /// Where from there.
    pub lies: Lies,
}

/// Where elements lie from a place on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lies {
    /// Here.
    At(Layout),
    /// Without gaps at the place; how many they are is known only as the program runs.
    Whole,
    /// Somewhere in the storage at the place.
    Within,
}

/// Ranges of bytes.
pub type Ranges = SmallVec<[Range<u64>; 1]>;

/// Where it takes more runs than this to say which bytes a view has, all bytes from its first to its last stand for
/// them.
const MAX_RUNS: usize = 1 << 20;

impl Spot {
    /// A tensor without gaps at a place.
    pub fn new(place: Place, ty: &TensorType, sizes: &EvalCx<'_>) -> Spot {
        let shape: Result<Vec<usize>, EvalError> = ty.shape.iter().map(|size| sizes.size(size)).collect();
        let lies = match shape {
            Ok(shape) if numel(&shape).is_some() => Lies::At(Layout::contiguous(&shape)),
            _ => Lies::Whole,
        };
        Spot { place, width: ty.dtype.size(), lies }
    }

    /// The results of an op as views of this; none where elements must move for it.
    pub fn views(&self, op: &dyn OpDef, sizes: &EvalCx<'_>, results: usize) -> Option<Vec<Spot>> {
        let spot = |lies| Spot { lies, ..self.clone() };
        let unknown = |lies: Lies| Some(vec![spot(lies); results]);
        match &self.lies {
            Lies::At(layout) => match views::view(op, sizes, layout) {
                Ok(Some(layouts)) if layouts.iter().all(|layout| numel(&layout.shape).is_some()) => {
                    Some(layouts.into_iter().map(|layout| spot(Lies::At(layout))).collect())
                }
                Ok(None) => None,
                _ => unknown(Lies::Within),
            },
            // Only a reshape is known to leave no gaps.
            Lies::Whole if op.as_any().is::<Reshape>() => unknown(Lies::Whole),
            _ => unknown(Lies::Within),
        }
    }

    /// A part of it by its layout, where that is known.
    fn part(&self, part: impl FnOnce(&Layout) -> Layout) -> Spot {
        match &self.lies {
            Lies::At(layout) => Spot { lies: Lies::At(part(layout)), ..self.clone() },
            _ => Spot { lies: Lies::Within, ..self.clone() },
        }
    }

    /// Entry `at` of the first dimension, with that dimension gone.
    #[must_use]
    pub fn entry(&self, at: usize) -> Spot {
        self.part(|layout| {
            let mut entry = layout.narrowed(0, at, 1);
            entry.shape.remove(0);
            entry.strides.remove(0);
            entry
        })
    }

    /// Whether it is known to lie without gaps.
    pub fn is_dense(&self) -> bool {
        match &self.lies {
            Lies::At(layout) => layout.is_contiguous(),
            Lies::Whole => true,
            Lies::Within => false,
        }
    }

    /// Where its first element lies in its region.
    pub fn address(&self) -> u64 {
        let start = if let Lies::At(layout) = &self.lies { layout.start } else { 0 };
        self.place.offset + (start * self.width) as u64
    }

    /// Whether both are known to be the same bytes in the same order. Without elements there are none, wherever the
    /// places are.
    pub fn same(&self, other: &Spot) -> bool {
        let near = self.place.region == other.place.region;
        match (&self.lies, &other.lies) {
            _ if self.width != other.width => false,
            (Lies::At(a), Lies::At(b)) => {
                let apart = |i: usize| a.shape[i] > 1 && a.strides[i] != b.strides[i];
                let there = || self.address() == other.address() && !(0..a.shape.len()).any(apart);
                a.shape == b.shape && (a.shape.contains(&0) || near && there())
            }
            (Lies::Whole, Lies::Whole) => self.place == other.place,
            _ => false,
        }
    }

    /// All bytes of its region from its first to its last, and whether each of them is its own; none where they are not
    /// known.
    pub fn hull(&self) -> Option<(Range<u64>, bool)> {
        let Lies::At(layout) = &self.lies else { return None };
        let (first, span) = (self.address(), layout.span());
        // Elements that are repeated count once.
        let sizes = layout.shape.iter().zip(&layout.strides);
        let own =
            sizes.filter(|(_, stride)| **stride > 0).fold(1usize, |n, (size, _)| n.saturating_mul(*size));
        let solid = span == if span == 0 { 0 } else { own };
        Some((first..first + span as u64 * self.width as u64, solid))
    }

    /// Its bytes as rising ranges of its region; none where they are not known.
    pub fn bytes(&self) -> Option<Ranges> {
        let (hull, solid) = self.hull()?;
        let Lies::At(layout) = &self.lies else { return None };
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

/// Bytes that two lists of rising ranges share.
pub fn overlap(a: &[Range<u64>], b: &[Range<u64>]) -> Option<Range<u64>> {
    let (few, many) = if a.len() < b.len() { (a, b) } else { (b, a) };
    few.iter().find_map(|x| {
        let y = many.get(many.partition_point(|y| y.end <= x.start))?;
        let shared = x.start.max(y.start)..x.end.min(y.end);
        (!shared.is_empty()).then_some(shared)
    })
}

/// Whether result `result` of a kernel may lie exactly where operand `operand` does.
pub fn may_take_over(op: &dyn OpDef, result: usize, operand: usize) -> bool {
    match op.alias() {
        Alias::Reuse => result == 0,
        Alias::First => result == 0 && operand == 0,
        Alias::None | Alias::View(_) => false,
    }
}

/// Whether the contents of an operand of a start matter on this rank. Those of a receive with a peer do not, nor do
/// those of a broadcast on the members that get them.
pub fn is_read(op: &dyn OpDef, operand: usize, sizes: &EvalCx<'_>) -> bool {
    if let Some(BroadcastStart { root, over }) = op.as_any().downcast_ref() {
        let member = sizes.mesh.group_rank(*over, sizes.rank);
        return member.is_none_or(|member| member as usize == *root);
    }
    let (sends, receives) = op.messages();
    let receive = operand.checked_sub(sends.len()).and_then(|at| receives.get(at));
    let (Some(message), Effects::Messages(group)) = (receive, op.effects()) else { return true };
    let Some(members) = sizes.mesh.members(group, sizes.rank) else { return true };
    // A peer that is not known yet may be none.
    !matches!(message.peer(sizes, group, &members), Ok(Some(_)))
}

/// A part of what an op joins: elements of an operand, and where they belong in the result.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Which operand.
    pub operand: usize,
    /// Where they lie.
    pub from: Spot,
    /// Where they belong.
    pub to: Spot,
}

impl Piece {
    /// Whether they are there already.
    pub fn stays(&self) -> bool {
        self.from.same(&self.to)
    }
}

/// Whether the op moves only what is not yet where it belongs.
pub fn joins(op: &dyn OpDef) -> bool {
    op.as_any().is::<Concat>() || op.as_any().is::<UpdateSlice>()
}

/// The pieces of an op that joins, which together are its result; none where sizes or places in it are not known.
pub fn pieces(op: &dyn OpDef, sizes: &EvalCx<'_>, args: &[Spot], result: &Spot) -> Option<Vec<Piece>> {
    let layouts: Option<Vec<&Layout>> = args
        .iter()
        .chain([result])
        .map(|spot| if let Lies::At(layout) = &spot.lies { Some(layout) } else { None })
        .collect();
    let layouts = layouts?;
    let mut pieces = Vec::new();
    if let Some(Concat { dim }) = op.as_any().downcast_ref() {
        let mut start = 0;
        for (operand, from) in args.iter().enumerate() {
            let size = layouts[operand].shape[*dim];
            let to = result.part(|layout| layout.narrowed(*dim, start, size));
            pieces.push(Piece { operand, from: from.clone(), to });
            start += size;
        }
        return Some(pieces);
    }
    let UpdateSlice { start } = op.as_any().downcast_ref()?;
    let start: Vec<usize> = start.iter().map(|at| sizes.size(at).ok()).collect::<Option<_>>()?;
    let (whole, size) = (&layouts[0].shape, &layouts[1].shape);
    if (0..whole.len()).any(|dim| start[dim].checked_add(size[dim]).is_none_or(|end| end > whole[dim])) {
        return None;
    }
    // What surrounds the box: before and after it in each dimension, inside it in all dimensions further out.
    let inside = |layout: &Layout, dims: usize| {
        (0..dims).fold(layout.clone(), |layout, dim| layout.narrowed(dim, start[dim], size[dim]))
    };
    for dim in 0..whole.len() {
        let after = start[dim] + size[dim];
        for (first, n) in [(0, start[dim]), (after, whole[dim] - after)].into_iter().filter(|(_, n)| *n > 0) {
            let slab = |layout: &Layout| inside(layout, dim).narrowed(dim, first, n);
            pieces.push(Piece { operand: 0, from: args[0].part(slab), to: result.part(slab) });
        }
    }
    let to = result.part(|layout| inside(layout, whole.len()));
    pieces.push(Piece { operand: 1, from: args[1].clone(), to });
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Index;
    use crate::mesh::{Mesh, Rank};
    use crate::plan::Region;

    fn spot(offset: u64, layout: Layout) -> Spot {
        Spot { place: Place { region: Region::Heap, offset }, width: 4, lies: Lies::At(layout) }
    }

    /// The bytes of every element, one by one.
    fn slow(spot: &Spot) -> Vec<u64> {
        let Lies::At(layout) = &spot.lies else { return Vec::new() };
        let mut bytes = Vec::new();
        for i in 0..layout.numel() {
            let at = crate::tensor::unravel(i, &layout.shape);
            let offset: usize = at.iter().zip(&layout.strides).map(|(at, stride)| at * stride).sum();
            bytes.extend((0..4).map(|byte| spot.place.offset + ((layout.start + offset) * 4 + byte) as u64));
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
            let spot = spot(0x40, view);
            let ranges = spot.bytes().unwrap();
            assert!(ranges.is_sorted_by(|a, b| a.end <= b.start), "{ranges:?}");
            let (hull, solid) = spot.hull().unwrap();
            let ends = ranges.first().zip(ranges.last()).map(|(first, last)| first.start..last.end);
            assert_eq!(ends.unwrap_or(hull.start..hull.start), hull);
            assert_eq!(solid, hull.clone().eq(slow(&spot)), "{ranges:?}");
            assert_eq!(ranges.into_iter().flatten().collect::<Vec<_>>(), slow(&spot));
        }
        let column = spot(0, base.narrowed(2, 4, 1)).bytes().unwrap();
        assert_eq!((column.len(), &column[..2]), (12, &[16..20, 36..40][..]));
        assert_eq!(spot(0, base.narrowed(0, 1, 2)).bytes().unwrap().len(), 1);
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
        let whole = spot(0x100, Layout::contiguous(&[4, 6, 3]));
        let op = UpdateSlice { start: [1, 2, 0].map(Index::constant).to_vec() };
        let args =
            [spot(0x1000, Layout::contiguous(&[4, 6, 3])), spot(0x2000, Layout::contiguous(&[2, 3, 3]))];
        let pieces = pieces(&op, &sizes, &args, &whole).unwrap();
        let mut covered: Vec<u64> = pieces.iter().flat_map(|piece| slow(&piece.to)).collect();
        covered.sort_unstable();
        assert_eq!(covered, (0x100..0x100 + 4 * 72).collect::<Vec<u64>>());
        assert!(pieces.iter().all(|piece| !piece.stays()));
        // Elements keep their place in the whole: those of operand 0 all lie as far from where they belong.
        for piece in pieces.iter().filter(|piece| piece.operand == 0) {
            assert_eq!(piece.from.address() - piece.to.address(), 0x1000 - 0x100);
        }
    }
}
