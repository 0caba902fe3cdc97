//! The layout of a tensor's elements: sizes, strides and the offset of the first. Views change only the layout.

use smallvec::SmallVec;

/// Sizes or strides; few tensors have more than six dimensions.
pub type Dims = SmallVec<[usize; 6]>;

/// A layout in storage, in elements. A stride of 0 broadcasts an element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The sizes, outermost first.
    pub shape: Dims,
    /// The stride of each dimension.
    pub strides: Dims,
    /// The offset of the first element.
    pub start: usize,
}

/// The number of elements of a shape, or `None` on overflow.
pub fn numel(shape: &[usize]) -> Option<usize> {
    // A size of zero makes the tensor empty, however large the others are.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size))
}

/// The strides of a contiguous tensor, in row-major order.
pub fn row_major(shape: &[usize]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i]);
    }
    strides
}

impl Layout {
    /// The layout of a contiguous tensor, in row-major order.
    pub fn contiguous(shape: &[usize]) -> Layout {
        Layout { shape: Dims::from_slice(shape), strides: row_major(shape), start: 0 }
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().fold(1, |n: usize, size| n.saturating_mul(*size))
    }

    /// Whether the elements are contiguous in row-major order.
    pub fn is_contiguous(&self) -> bool {
        is_row_major(&self.shape, &self.strides)
    }

    /// Whether elements are broadcast, so that several share an address.
    pub fn repeats(&self) -> bool {
        self.shape.iter().zip(&self.strides).any(|(size, stride)| *size > 1 && *stride == 0)
    }

    /// The extent in storage, in elements, from the first one on.
    pub fn span(&self) -> usize {
        span(&self.shape, &self.strides)
    }

    /// Permutes the dimensions.
    #[must_use]
    pub fn permuted(&self, dims: &[usize]) -> Layout {
        let pick = |from: &Dims| dims.iter().map(|dim| from[*dim]).collect();
        Layout { shape: pick(&self.shape), strides: pick(&self.strides), start: self.start }
    }

    /// The part of a dimension that begins at `start` and has `size` entries.
    #[must_use]
    pub fn narrowed(&self, dim: usize, start: usize, size: usize) -> Layout {
        let mut layout = self.clone();
        layout.shape[dim] = size;
        // An empty part has no first element, so its start does not matter.
        if !layout.shape.contains(&0) {
            layout.start += start * self.strides[dim];
        }
        layout
    }

    /// The box that begins at `start` and has these sizes.
    #[must_use]
    pub fn narrowed_to(&self, start: &[usize], size: &[usize]) -> Layout {
        (0..size.len()).fold(self.clone(), |layout, dim| layout.narrowed(dim, start[dim], size[dim]))
    }

    /// Broadcasts to a larger shape: sizes are aligned at the end, and sizes of 1 are repeated.
    #[must_use]
    pub fn broadcast(&self, shape: &[usize]) -> Layout {
        let new = shape.len() - self.shape.len();
        let stride = |i: usize| if i < new || self.shape[i - new] == 1 { 0 } else { self.strides[i - new] };
        Layout {
            shape: Dims::from_slice(shape),
            strides: (0..shape.len()).map(stride).collect(),
            start: self.start,
        }
    }

    /// The same elements in another shape, if no element has to move.
    pub fn reshaped(&self, shape: &[usize]) -> Option<Layout> {
        let mut strides = row_major(shape);
        if self.is_contiguous() {
            return Some(Layout { shape: Dims::from_slice(shape), strides, start: self.start });
        }
        if self.numel() == 0 {
            return Some(Layout { shape: Dims::from_slice(shape), strides, start: self.start });
        }
        // Adjacent old dimensions are coalesced; each such run becomes a run of new dimensions.
        let old: SmallVec<[(usize, usize); 6]> = self
            .shape
            .iter()
            .copied()
            .zip(self.strides.iter().copied())
            .filter(|(size, _)| *size != 1)
            .collect();
        let (mut i, mut j) = (0, 0);
        while i < old.len() {
            let (mut have, mut want, first) = (old[i].0, 1, j);
            while j < shape.len() && (want < have || shape[j] == 1) {
                want *= shape[j];
                j += 1;
            }
            let mut last = i;
            while have != want {
                if have < want {
                    last += 1;
                    let (size, stride) = *old.get(last)?;
                    if old[last - 1].1 != size * stride {
                        return None;
                    }
                    have *= size;
                } else {
                    want *= shape.get(j)?;
                    j += 1;
                }
            }
            let mut stride = old[last].1;
            for dim in (first..j).rev() {
                strides[dim] = stride;
                stride *= shape[dim];
            }
            i = last + 1;
        }
        Some(Layout { shape: Dims::from_slice(shape), strides, start: self.start })
    }
}

/// Whether a layout is contiguous in row-major order.
pub fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    for (size, stride) in shape.iter().zip(strides).rev() {
        if *size != 1 {
            if *size == 0 {
                return true;
            }
            if *stride != expected {
                // An empty tensor has no gaps.
                return shape.contains(&0);
            }
            expected = expected.saturating_mul(*size);
        }
    }
    // An outer size of zero makes it empty; inner strides do not matter then.
    true
}

/// The extent of a layout in storage, in elements.
pub fn span(shape: &[usize], strides: &[usize]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    let reach = shape.iter().zip(strides).map(|(size, stride)| (size - 1).saturating_mul(*stride));
    reach.fold(1, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The offset of each element, in row-major order.
    fn places(layout: &Layout) -> Vec<usize> {
        let mut places = Vec::new();
        for i in 0..layout.numel() {
            let mut rest = i;
            let mut at = layout.start;
            for (size, stride) in layout.shape.iter().zip(&layout.strides).rev() {
                at += rest % size * stride;
                rest /= size;
            }
            places.push(at);
        }
        places
    }

    #[test]
    fn a_reshape_keeps_every_element_in_its_place_or_says_that_it_cannot() {
        let base = Layout::contiguous(&[4, 6, 5]);
        let views = [
            base.clone(),
            base.permuted(&[1, 0, 2]),
            base.permuted(&[2, 1, 0]),
            base.narrowed(0, 1, 2),
            base.narrowed(1, 2, 3),
            base.narrowed(2, 0, 4),
            base.narrowed(1, 3, 1),
            Layout::contiguous(&[1, 6, 1]).broadcast(&[4, 6, 5]),
            Layout::contiguous(&[]).broadcast(&[2, 3]),
        ];
        let shapes: [&[usize]; 12] = [
            &[120],
            &[24, 5],
            &[4, 30],
            &[2, 2, 6, 5],
            &[4, 3, 2, 5],
            &[6, 4, 5],
            &[60],
            &[12, 5],
            &[2, 30],
            &[96],
            &[6],
            &[3, 2],
        ];
        let mut made = 0;
        for view in &views {
            for shape in shapes {
                if numel(shape) != Some(view.numel()) {
                    continue;
                }
                if let Some(reshaped) = view.reshaped(shape) {
                    assert_eq!(places(&reshaped), places(view), "{view:?} as {shape:?}");
                    made += 1;
                } else {
                    assert!(!view.is_contiguous());
                }
            }
        }
        assert_eq!(made, 14);
        assert!(base.permuted(&[1, 0, 2]).reshaped(&[24, 5]).is_none());
        assert!(base.narrowed(1, 2, 3).reshaped(&[4, 15]).is_some());
    }

    #[test]
    fn spans_and_gaps() {
        let base = Layout::contiguous(&[4, 6]);
        assert_eq!((base.span(), base.is_contiguous()), (24, true));
        let middle = base.narrowed(1, 2, 3);
        assert_eq!((middle.start, middle.span(), middle.is_contiguous()), (2, 21, false));
        assert!(base.narrowed(0, 1, 2).is_contiguous());
        assert_eq!(base.narrowed(0, 1, 0).span(), 0);
        assert!(middle.narrowed(0, 1, 0).is_contiguous() && middle.narrowed(1, 1, 0).is_contiguous());
        let repeated = Layout::contiguous(&[4, 1]).broadcast(&[4, 6]);
        assert!(repeated.repeats() && !repeated.narrowed(1, 2, 1).repeats() && !middle.repeats());
        assert_eq!(numel(&[0, usize::MAX, usize::MAX]), Some(0));
        assert_eq!(numel(&[usize::MAX, 2]), None);
        let empty = Layout::contiguous(&[0, 1 << 40, 1 << 40, 1 << 40]);
        assert_eq!(empty.narrowed(1, 5, 3).start, 0, "saturated strides of an empty tensor are not used");
    }
}
