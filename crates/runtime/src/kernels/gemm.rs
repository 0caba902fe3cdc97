//! Matrices with strides, and their product by the `gemm-f32` and `gemm-f64` crates, which take pointers.
//!
//! A [`Mat`] and a [`MatMut`] are checked on construction, so multiplying them is safe.

use std::marker::PhantomData;
use std::ops::Range;

use gemm_common::Parallelism;

use crate::kernels::element::{Element, Wide};

/// A matrix for reading. Strides are in elements; 0 broadcasts.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T> {
    data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The stride between rows.
    pub(crate) rs: usize,
    /// The stride between columns.
    pub(crate) cs: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A matrix whose first element is the first of `data`.
    pub(crate) fn new(data: &'a [T], [rows, cols]: [usize; 2], [rs, cs]: [usize; 2]) -> Mat<'a, T> {
        if rows == 0 || cols == 0 {
            return Mat { data: &[], rows, cols, rs, cs };
        }
        let last =
            (rows - 1).checked_mul(rs).zip((cols - 1).checked_mul(cs)).and_then(|(a, b)| a.checked_add(b));
        assert!(last.is_some_and(|last| last < data.len()), "a matrix within its storage");
        Mat { data, rows, cols, rs, cs }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Mat<'a, T> {
        Mat { data: self.data, rows: self.cols, cols: self.rows, rs: self.cs, cs: self.rs }
    }

    /// A part of it.
    pub(crate) fn part(self, rows: Range<usize>, cols: Range<usize>) -> Mat<'a, T> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "a part within a matrix");
        let start = (rows.start * self.rs + cols.start * self.cs).min(self.data.len());
        Mat::new(&self.data[start..], [rows.len(), cols.len()], [self.rs, self.cs])
    }

    /// A row, if its elements are contiguous.
    pub(crate) fn row(self, row: usize) -> Option<&'a [T]> {
        (self.cs == 1).then(|| &self.data[row * self.rs..][..self.cols])
    }

    /// The elements from the first on, including any gaps between them.
    pub(crate) fn data(self) -> &'a [T] {
        self.data
    }
}

/// A matrix for writing. No two of its elements alias.
pub(crate) struct MatMut<'a, T> {
    at: *mut T,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    rs: usize,
    cs: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it is an exclusive borrow of its elements, as a `&mut [T]` would be, and parts of it share none of them.
unsafe impl<T: Send> Send for MatMut<'_, T> {}

impl<'a, T: Element> MatMut<'a, T> {
    /// A row-major matrix whose rows are `stride` apart.
    pub(crate) fn new(data: &'a mut [T], [rows, cols]: [usize; 2], stride: usize) -> MatMut<'a, T> {
        if rows > 0 && cols > 0 {
            let span = (rows - 1).checked_mul(stride).and_then(|last| last.checked_add(cols));
            assert!(span.is_some_and(|span| span <= data.len()), "a matrix within its storage");
            assert!(rows == 1 || stride >= cols, "rows that do not overlap");
        }
        MatMut { at: data.as_mut_ptr(), rows, cols, rs: stride, cs: 1, life: PhantomData }
    }

    /// A reborrow with a shorter lifetime.
    pub(crate) fn reborrow(&mut self) -> MatMut<'_, T> {
        MatMut { life: PhantomData, ..*self }
    }

    /// The transpose.
    pub(crate) fn t(self) -> MatMut<'a, T> {
        MatMut { rows: self.cols, cols: self.rows, rs: self.cs, cs: self.rs, ..self }
    }

    /// The first rows, and the others.
    pub(crate) fn split_rows(self, rows: usize) -> (MatMut<'a, T>, MatMut<'a, T>) {
        assert!(rows <= self.rows, "a part within a matrix");
        let below = self.at.wrapping_add(rows * self.rs);
        (MatMut { rows, ..self }, MatMut { at: below, rows: self.rows - rows, ..self })
    }

    /// The first columns, and the others.
    pub(crate) fn split_cols(self, cols: usize) -> (MatMut<'a, T>, MatMut<'a, T>) {
        let (left, right) = self.t().split_rows(cols);
        (left.t(), right.t())
    }

    /// A range of its columns.
    pub(crate) fn cols(self, cols: Range<usize>) -> MatMut<'a, T> {
        self.split_cols(cols.start).1.split_cols(cols.len()).0
    }

    /// A row, if its elements are contiguous.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> Option<&mut [T]> {
        assert!(row < self.rows, "a row of the matrix");
        let at = self.at.wrapping_add(row * self.rs);
        // SAFETY: the row exists, by the check above, and its elements lie one after another within what this borrows
        // exclusively.
        (self.cs == 1).then(|| unsafe { std::slice::from_raw_parts_mut(at, self.cols) })
    }

    /// Writes part of a row, rounding each element.
    #[inline(always)]
    pub(crate) fn put(&mut self, row: usize, col: usize, values: &[T::Wide]) {
        assert!(
            row < self.rows && col <= self.cols && values.len() <= self.cols - col,
            "a part within a row"
        );
        if let Some(to) = self.row(row) {
            to[col..].iter_mut().zip(values).for_each(|(to, value)| *to = T::narrow(*value));
            return;
        }
        let at = self.at.wrapping_add(row * self.rs + col * self.cs);
        for (i, value) in values.iter().enumerate() {
            // SAFETY: the row and the column exist, by the check above, so the place is one of those that this
            // borrows exclusively.
            unsafe { at.add(i * self.cs).write(T::narrow(*value)) };
        }
    }
}

/// A product of a `gemm` crate.
///
/// # Safety
/// Sizes are rows, columns and inner, and strides come in pairs, of columns first. Elements must lie in memory that may be
/// read, those of the result in memory that may be written; the result's column stride must not be below its row stride.
type Product<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// Types that a `gemm` crate multiplies.
pub(crate) trait Gemm: Wide {
    /// The product for the machine's instruction set.
    fn product() -> Product<Self>;
}

impl Gemm for f32 {
    fn product() -> Product<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
}

impl Gemm for f64 {
    fn product() -> Product<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
}

/// The product of two square matrices by the `gemm-f32` crate alone, as a baseline for measurements.
///
/// # Panics
/// If a matrix has another size.
pub fn gemm_alone(n: usize, a: &[f32], b: &[f32], out: &mut [f32]) {
    let matrix = |data| Mat::new(data, [n, n], [n, 1]);
    gemm(MatMut::new(out, [n, n], n), false, matrix(a), matrix(b), 1.0);
}

/// `out = scale * a * b`, or `out += scale * a * b` if `add`.
pub(crate) fn gemm<T: Gemm>(out: MatMut<'_, T>, add: bool, a: Mat<'_, T>, b: Mat<'_, T>, scale: T) {
    assert!(out.rows == a.rows && out.cols == b.cols && a.cols == b.rows, "sizes that fit");
    if out.cs < out.rs {
        // The crates prefer results whose columns are contiguous.
        return gemm(out.t(), add, b.t(), a.t(), scale);
    }
    // SAFETY: each matrix lies within storage that it borrows, as checked when it was made; `out` borrows its own
    // exclusively and no two of its elements share a place. The crate takes column strides first, and its `alpha`
    // scales what is there.
    unsafe {
        T::product()(
            out.rows,
            out.cols,
            a.cols,
            out.at,
            out.cs as isize,
            out.rs as isize,
            add,
            a.data.as_ptr(),
            a.cs as isize,
            a.rs as isize,
            b.data.as_ptr(),
            b.cs as isize,
            b.rs as isize,
            T::ONE,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
