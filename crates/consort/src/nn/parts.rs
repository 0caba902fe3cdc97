//! Parts of tensors: which box of a whole tensor a rank has, and which runs of bytes two boxes have in common.

use std::fmt::{self, Display};
use std::panic::Location;

use consort_types::{Axes, Failure, GroupName};

use crate::error::Error;
use crate::flatten::Visit;
use crate::mesh::Group;
use crate::world::World;
use crate::{Dtype, Flatten, Result, Tensor};

/// A box of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Boxed {
    pub(super) start: Vec<usize>,
    pub(super) shape: Vec<usize>,
}

impl Boxed {
    /// All of a tensor.
    pub(super) fn all(shape: &[usize]) -> Boxed {
        Boxed { start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    pub(super) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether two boxes have an element in common.
    pub(super) fn overlaps(&self, other: &Boxed) -> bool {
        (0..self.shape.len()).all(|dim| {
            let from = self.start[dim].max(other.start[dim]);
            from < (self.start[dim] + self.shape[dim]).min(other.start[dim] + other.shape[dim])
        })
    }

    /// What two boxes have in common, if that is anything.
    pub(super) fn common(&self, other: &Boxed) -> Option<Boxed> {
        let (mut start, mut shape) = (Vec::new(), Vec::new());
        for dim in 0..self.shape.len() {
            let from = self.start[dim].max(other.start[dim]);
            let to = (self.start[dim] + self.shape[dim]).min(other.start[dim] + other.shape[dim]);
            start.push(from);
            shape.push(to.checked_sub(from).filter(|size| *size > 0)?);
        }
        Some(Boxed { start, shape })
    }

    /// The runs of elements of `part`, a box within this one, in this one's row-major order: where each begins in this box,
    /// and in `other`, which contains the part too; and how long they all are.
    pub(super) fn runs(&self, other: &Boxed, part: &Boxed) -> (Vec<(usize, usize)>, usize) {
        // From this dimension on, both boxes are as wide as the part.
        let is_full =
            |dim: &usize| self.shape[*dim] == part.shape[*dim] && other.shape[*dim] == part.shape[*dim];
        let split = part.shape.len() - (0..part.shape.len()).rev().take_while(is_full).count();
        let inner = split.saturating_sub(1);
        let length = part.shape[inner..].iter().product();
        let rows: usize = part.shape[..inner].iter().product();
        let place = |boxed: &Boxed, row: usize| {
            let (mut place, mut step, mut rest) = (0, 1, row);
            for dim in (0..part.shape.len()).rev() {
                let at = if dim < inner { rest % part.shape[dim] } else { 0 };
                rest = if dim < inner { rest / part.shape[dim] } else { rest };
                place += (part.start[dim] - boxed.start[dim] + at) * step;
                step *= boxed.shape[dim];
            }
            place
        };
        ((0..rows).map(|row| (place(self, row), place(other, row))).collect(), length)
    }
}

/// What a rank has of a tensor.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// Its name: the fields that lead to it.
    pub(super) name: String,
    pub(super) dtype: Dtype,
    /// The shape of the whole tensor.
    pub(super) whole: Vec<usize>,
    pub(super) own: Boxed,
    /// The axes over which ranks have other parts.
    pub(super) varies: Axes,
}

impl Part {
    /// Fails unless each element of the whole tensor is in exactly one box, which a rank or a file has.
    pub(super) fn check_cover<T: Display>(
        &self,
        holder: &str,
        boxes: &[(T, Boxed)],
    ) -> std::result::Result<(), Box<Failure>> {
        let failure = |headline: (String, String)| {
            Failure::new(headline).of(format!("`{}`", self.name)).note(
                "`Parts::split` along one dimension must be called in the order in which the tensor was divided",
            )
        };
        for (i, (name, one)) in boxes.iter().enumerate() {
            if let Some((other_name, other)) = boxes[..i].iter().find(|(_, other)| other.overlaps(one)) {
                let text =
                    |name: &T, own: &Boxed| format!("{:?} at {:?} of {holder} {name}", own.shape, own.start);
                let got = format!("{} and {}", text(other_name, other), text(name, one));
                return Err(failure(("parts without common elements".into(), got)));
            }
        }
        let got: usize = boxes.iter().map(|(_, one)| one.numel()).sum();
        let expected: usize = self.whole.iter().product();
        match got == expected {
            true => Ok(()),
            false => Err(failure((format!("parts of {expected} elements in all"), got.to_string()))),
        }
    }
}

/// What each rank has of the tensors of a value: all of them, or a part along some dimensions. A
/// [`Checkpoint`](super::Checkpoint) is saved and loaded by it.
///
/// ```
/// use consort::nn::Parts;
/// use consort::{Dtype, Tensor};
///
/// let done = consort::spawn(2, |mesh| {
///     let rows = Tensor::ones(Dtype::F32, &[1 + mesh.my_rank()?, 4])?; // One row of three, and two.
///     let bias = Tensor::ones(Dtype::F32, &[4])?;
///     let state = (rows, bias);
///     let parts = Parts::whole(&state).split(&mesh, |name, _| (name == "0").then_some(0))?;
///     assert_eq!(parts.shapes(), [vec![3, 4], vec![4]]);
///     Ok(())
/// });
/// assert!(done.into_iter().all(|done| done.is_ok()));
/// ```
#[derive(Clone)]
pub struct Parts {
    pub(super) list: Vec<Part>,
    /// The groups that tensors are split over, and along which dimension each tensor; the first splits the whole.
    splits: Vec<(Group, Vec<Option<usize>>)>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.list).finish()
    }
}

impl Parts {
    /// Every rank has all of every tensor.
    ///
    /// [`Parts`] has an example.
    pub fn whole(value: &impl Flatten) -> Parts {
        let mut named = Named::default();
        value.visit(&mut named);
        let part = |(name, tensor): (String, Tensor)| Part {
            name,
            dtype: tensor.dtype(),
            whole: tensor.shape().to_vec(),
            own: Boxed::all(tensor.shape()),
            varies: Axes::NONE,
        };
        Parts { list: named.found.into_iter().map(part).collect(), splits: Vec::new() }
    }

    /// The members of a group have parts along the dimensions that `dim` names, in their order. Names are those of the fields:
    /// `blocks.0.feed.up.weight`. All members call it.
    ///
    /// A tensor may be split several times. Splits along different dimensions may have any order. Along the same dimension the
    /// first call splits the whole tensor and the next one splits each of these parts, as when the tensor was made: the
    /// [`Shards`](super::Shards) over `dp` of a weight of which each member of `tp` has rows are
    /// `.split(&tp, ..)?.split(&dp, ..)?`.
    ///
    /// ```
    /// use consort::nn::Parts;
    /// use consort::{Dtype, Init, Tensor};
    ///
    /// let done = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
    ///     let rows = Tensor::ones(Dtype::F32, &[3, 2])?; // Each member of tp has 6 of 12 rows, each of dp half of these.
    ///     let parts = Parts::whole(&rows).split(&mesh.axis("tp")?, |_, _| Some(0))?;
    ///     assert_eq!(parts.split(&mesh.axis("dp")?, |_, _| Some(0))?.shapes(), [[12, 2]]);
    ///     Ok(())
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn split(mut self, group: &Group, dim: impl Fn(&str, &[usize]) -> Option<usize>) -> Result<Parts> {
        let site = Location::caller();
        let mut dims = Vec::new();
        for part in &self.list {
            let dim = dim(&part.name, &part.whole);
            if let Some(dim) = dim.filter(|dim| *dim >= part.whole.len()) {
                let headline = consort_types::Headline::dimension(dim, part.whole.len());
                return Err(Error::of("split", Failure::new(headline).of(format!("`{}`", part.name)), site));
            }
            dims.push(dim);
        }
        self.splits.push((group.clone(), dims));
        self.place()?;
        Ok(self)
    }

    /// Where the parts of this rank are. The last split tells the sizes of the parts of the one before it.
    #[track_caller]
    fn place(&mut self) -> Result<()> {
        for part in &mut self.list {
            part.whole.clone_from(&part.own.shape);
            part.own.start.fill(0);
        }
        for (group, dims) in self.splits.iter().rev() {
            let split = || dims.iter().enumerate().filter_map(|(place, dim)| Some((place, (*dim)?)));
            let mine: Vec<i64> = split().map(|(place, dim)| self.list[place].whole[dim] as i64).collect();
            if mine.is_empty() {
                continue;
            }
            let count = mine.len();
            let all = group.all_gather(Tensor::from_iter(mine)?, 0)?.to_vec::<i64>()?;
            let axes = match group.over {
                GroupName::Axes(axes) => axes,
                GroupName::List(_) => World::current()?.mesh().all_axes(),
            };
            for (i, (place, dim)) in split().enumerate() {
                let sizes = all.iter().skip(i).step_by(count).map(|size| *size as usize);
                let part = &mut self.list[place];
                part.whole[dim] = sizes.clone().sum();
                part.own.start[dim] += sizes.take(group.my_rank()?).sum::<usize>();
                part.varies = part.varies.union(axes);
            }
        }
        Ok(())
    }

    /// The shapes of the whole tensors.
    ///
    /// [`Parts`] has an example.
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        self.list.iter().map(|part| part.whole.clone()).collect()
    }
}

/// The tensors of a value, by name.
#[derive(Default)]
struct Named {
    path: Vec<String>,
    found: Vec<(String, Tensor)>,
}

impl Visit for Named {
    fn tensor(&mut self, tensor: &Tensor) {
        let name = if self.path.is_empty() { "value".to_string() } else { self.path.join(".") };
        self.found.push((name, tensor.clone()));
    }
    fn enter(&mut self, field: &dyn Display) {
        self.path.push(field.to_string());
    }
    fn leave(&mut self) {
        self.path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::{Boxed, Part};
    use crate::Dtype;
    use consort_types::Axes;

    /// Copying by runs is copying element by element.
    #[test]
    fn runs_are_the_common_elements() {
        let boxed =
            |start: [usize; 3], shape: [usize; 3]| Boxed { start: start.to_vec(), shape: shape.to_vec() };
        let boxes = [
            boxed([0, 0, 0], [4, 3, 5]),
            boxed([1, 0, 0], [2, 3, 5]),
            boxed([0, 1, 0], [4, 2, 5]),
            boxed([2, 1, 3], [2, 2, 2]),
            boxed([0, 0, 4], [3, 3, 1]),
        ];
        let number = |place: [usize; 3]| place[0] * 100 + place[1] * 10 + place[2];
        let elements = |boxed: &Boxed| -> Vec<usize> {
            let mut all = Vec::new();
            for i in 0..boxed.shape[0] {
                for j in 0..boxed.shape[1] {
                    for k in 0..boxed.shape[2] {
                        all.push(number([boxed.start[0] + i, boxed.start[1] + j, boxed.start[2] + k]));
                    }
                }
            }
            all
        };
        for a in &boxes {
            for b in &boxes {
                let (from, to) = (elements(a), elements(b));
                let expected: Vec<usize> = from.iter().copied().filter(|x| to.contains(x)).collect();
                let Some(part) = a.common(b) else {
                    assert!(expected.is_empty());
                    continue;
                };
                let (runs, length) = a.runs(b, &part);
                let mut got = Vec::new();
                for (in_a, in_b) in runs {
                    assert_eq!(from[in_a..in_a + length], to[in_b..in_b + length]);
                    got.extend_from_slice(&from[in_a..in_a + length]);
                }
                assert_eq!(got, expected);
            }
        }
        let scalar = Boxed::all(&[]);
        assert_eq!(scalar.runs(&scalar, &scalar), (vec![(0, 0)], 1));
    }

    #[test]
    fn parts_cover_each_element_once() {
        let part = Part {
            name: "w".into(),
            dtype: Dtype::F32,
            whole: vec![5],
            own: Boxed::all(&[5]),
            varies: Axes::NONE,
        };
        let check = |ranges: &[(usize, usize)]| {
            let boxed = |(rank, (from, to)): (usize, &(usize, usize))| {
                (rank, Boxed { start: vec![*from], shape: vec![to - from] })
            };
            let boxes: Vec<_> = ranges.iter().enumerate().map(boxed).collect();
            part.check_cover("rank", &boxes).map_err(|failure| failure.to_string())
        };
        assert_eq!(check(&[(2, 5), (0, 2)]), Ok(()));
        let starts_with = |ranges, wanted: &str| assert!(check(ranges).unwrap_err().starts_with(wanted));
        starts_with(&[(0, 2), (3, 5)], "`w`: expected parts of 5 elements in all, got 4");
        // As many elements as the whole tensor has, but one twice and one never.
        let wanted =
            "`w`: expected parts without common elements, got [3] at [0] of rank 0 and [2] at [2] of rank 1";
        starts_with(&[(0, 3), (2, 4)], wanted);
    }
}
