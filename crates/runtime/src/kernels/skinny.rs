//! Products of up to four vectors with a matrix. They do little per element of the matrix, so it is read once, in
//! memory order, and converted as it is read.
//!
//! If rows are contiguous, several distant rows at a time are added to the sums, so that memory is read in a few
//! sequential streams; if columns are contiguous, each column is multiplied with the vectors; any other matrix is
//! gathered in small blocks.

use std::array;
use std::hint::black_box;
use std::ops::Range;

use crate::kernels::element::{Element, Wide};
use crate::kernels::gemm::{Mat, MatMut};
use crate::kernels::isa::{Loop, vectorize};
use crate::kernels::scratch::with_scratch;

/// The maximum number of vectors.
pub(crate) const MAX_VECTORS: usize = 4;

/// Sums held at a time, over all vectors. They fit into the L1 cache together with the elements of the vectors.
const HELD: usize = 4096;

/// Rows of a matrix per block: the same for any number of vectors, so that each vector gets the same sums.
const DEPTH: usize = 1024;

/// Elements per vectorised step: two vectors of `f32` with AVX2.
const LANES: usize = 16;

/// Rows that are added at a time, each a memory stream: with two, sums would be written more often; with four, rows and
/// sums would evict each other from the L1 cache if rows are a power of two apart.
const ROWS: usize = 3;

/// Rows and columns of a gathered block.
const GATHERED: (usize, usize) = (3 * ROWS, 256);

/// `out = vectors * matrix`, with up to four vectors as rows.
pub(crate) fn skinny<O, V, E, W>(mut out: MatMut<'_, O>, vectors: Mat<'_, V>, matrix: Mat<'_, E>)
where
    O: Element<Wide = W>,
    V: Element<Wide = W>,
    E: Element<Wide = W>,
    W: Wide,
{
    let (count, depth) = (vectors.rows, matrix.rows);
    if count == 0 {
        return;
    }
    // A vector and its sums that need no conversion are used in place.
    if let (1, Some(vector)) = (count, vectors.row(0).and_then(V::as_wide))
        && let Some(sums) = out.row(0).and_then(O::as_wide_mut)
    {
        sums.fill(W::ZERO);
        for cols in blocks(matrix.cols, HELD) {
            for rows in blocks(depth, DEPTH) {
                add::<E, W, 1>(
                    &mut sums[cols.clone()],
                    &vector[rows.clone()],
                    matrix.part(rows, cols.clone()),
                );
            }
        }
        return;
    }
    let width = HELD / count;
    let sums_len = count * matrix.cols.min(width);
    let held_len = count * depth.min(DEPTH);
    with_scratch(sums_len + held_len, |scratch: &mut [W]| {
        let (sums, held) = scratch.split_at_mut(sums_len);
        for cols in blocks(matrix.cols, width) {
            let sums = &mut sums[..count * cols.len()];
            sums.fill(W::ZERO);
            for rows in blocks(depth, DEPTH) {
                let held = &mut held[..count * rows.len()];
                gather(vectors.part(0..count, rows.clone()), held);
                let block = matrix.part(rows, cols.clone());
                match count {
                    1 => add::<E, W, 1>(sums, held, block),
                    2 => add::<E, W, 2>(sums, held, block),
                    3 => add::<E, W, 3>(sums, held, block),
                    _ => add::<E, W, 4>(sums, held, block),
                }
            }
            for (i, row) in sums.chunks_exact(cols.len()).enumerate() {
                out.put(i, cols.start, row);
            }
        }
    });
}

/// The same for any number of vectors, four at a time.
pub(crate) fn skinny_rows<O, V, E, W>(out: MatMut<'_, O>, vectors: Mat<'_, V>, matrix: Mat<'_, E>)
where
    O: Element<Wide = W>,
    V: Element<Wide = W>,
    E: Element<Wide = W>,
    W: Wide,
{
    let (mut rest, mut row) = (out, 0);
    while rest.rows > 0 {
        let count = MAX_VECTORS.min(rest.rows);
        let (rows, below) = rest.split_rows(count);
        skinny(rows, vectors.part(row..row + count, 0..vectors.cols), matrix);
        (rest, row) = (below, row + count);
    }
}

/// Splits `0..len` into ranges of at most `step`.
pub(crate) fn blocks(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step.max(1)).map(move |start| start..len.min(start + step))
}

/// A widened row-major copy of a matrix.
pub(crate) fn widen<'a, E: Element>(from: Mat<'_, E>, to: &'a mut [E::Wide]) -> Mat<'a, E::Wide> {
    gather(from, to);
    Mat::new(to, [from.rows, from.cols], [from.cols, 1])
}

/// Copies a matrix to contiguous rows, widened.
pub(crate) fn gather<E: Element>(from: Mat<'_, E>, to: &mut [E::Wide]) {
    vectorize(Gather { from, to });
}

struct Gather<'a, E: Element> {
    from: Mat<'a, E>,
    to: &'a mut [E::Wide],
}

impl<E: Element> Loop for Gather<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Mat { rows, cols, rs, cs, .. } = self.from;
        if cols == 0 {
            return;
        }
        let data = self.from.data();
        if rs == 1 && cs > 1 {
            return transpose(data, [rows, cols], cs, self.to);
        }
        for (i, to) in self.to.chunks_exact_mut(cols).enumerate().take(rows) {
            if cs == 1 {
                to.iter_mut().zip(&data[i * rs..]).for_each(|(to, from)| *to = from.wide());
            } else if cs == 0 {
                to.fill(data[i * rs].wide());
            } else {
                to.iter_mut().zip(data[i * rs..].iter().step_by(cs)).for_each(|(to, from)| *to = from.wide());
            }
        }
    }
}

/// Transposes contiguous columns. Whole cache lines are read from a few columns at a time: columns that are a power of
/// two apart compete for the same cache sets.
#[inline(always)]
fn transpose<E: Element>(from: &[E], [rows, cols]: [usize; 2], stride: usize, to: &mut [E::Wide]) {
    const TILE: usize = 8;
    let (whole_rows, whole_cols) = (rows / TILE * TILE, cols / TILE * TILE);
    for col in (0..whole_cols).step_by(TILE) {
        for row in (0..whole_rows).step_by(TILE) {
            let mut tile = [[E::Wide::ZERO; TILE]; TILE];
            for j in 0..TILE {
                let from = &from[(col + j) * stride + row..][..TILE];
                for i in 0..TILE {
                    tile[i][j] = from[i].wide();
                }
            }
            for (i, tile) in tile.iter().enumerate() {
                to[(row + i) * cols + col..][..TILE].copy_from_slice(tile);
            }
        }
        for row in whole_rows..rows {
            (col..col + TILE).for_each(|col| to[row * cols + col] = from[col * stride + row].wide());
        }
    }
    for col in whole_cols..cols {
        (0..rows).for_each(|row| to[row * cols + col] = from[col * stride + row].wide());
    }
}

/// Adds the products with a block of the matrix to the sums.
fn add<E, W, const COUNT: usize>(sums: &mut [W], vectors: &[W], block: Mat<'_, E>)
where
    E: Element<Wide = W>,
    W: Wide,
{
    let (depth, cols) = (block.rows, block.cols);
    if depth == 0 || cols == 0 {
        return;
    }
    // For a single column or row either stride is valid; a single column is summed along its length.
    if block.rs == 1 && (block.cs != 1 || cols == 1) || depth == 1 && block.cs != 1 {
        // For a single vector, columns are read one after the other: interleaved, memory would be slower.
        if COUNT == 1 {
            return vectorize(Columns::<E, W, COUNT, 1, 2> { sums, vectors, block });
        }
        return vectorize(Columns::<E, W, COUNT, 2, 1> { sums, vectors, block });
    }
    if block.cs == 1 || cols == 1 && block.rs > 0 {
        return vectorize(Rows::<E, W, COUNT> { sums, vectors, stride: depth, block, first: 0, width: cols });
    }
    let mut gathered = [W::ZERO; GATHERED.0 * GATHERED.1];
    for first in (0..cols).step_by(GATHERED.1) {
        let width = GATHERED.1.min(cols - first);
        for start in (0..depth).step_by(GATHERED.0) {
            let rows = start..depth.min(start + GATHERED.0);
            let size = [rows.len(), width];
            gather(block.part(rows, first..first + width), &mut gathered);
            let block = Mat::new(&gathered, size, [width, 1]);
            let vectors = &vectors[start..];
            vectorize(Rows::<W, W, COUNT> { sums, vectors, stride: depth, block, first, width: cols });
        }
    }
}

/// `N` runs of `len` elements, `stride` apart.
#[inline(always)]
fn runs<T, const N: usize>(data: &[T], stride: usize, len: usize) -> [&[T]; N] {
    let mut runs = [&data[..0]; N];
    for (i, run) in runs.iter_mut().enumerate() {
        *run = &data[i * stride..][..len];
    }
    runs
}

/// Adds rows of a block, times an element of each vector, to the sums.
struct Rows<'a, E, W, const COUNT: usize> {
    sums: &'a mut [W],
    vectors: &'a [W],
    /// The stride between vectors.
    stride: usize,
    block: Mat<'a, E>,
    /// The first sum of the block, and the number of sums per vector.
    first: usize,
    width: usize,
}

impl<E, W, const COUNT: usize> Loop for Rows<'_, E, W, COUNT>
where
    E: Element<Wide = W>,
    W: Wide,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let apart = self.block.rows / ROWS;
        for row in 0..apart {
            self.add::<ROWS>(row, apart);
        }
        for row in apart * ROWS..self.block.rows {
            self.add::<1>(row, 1);
        }
    }
}

impl<E, W, const COUNT: usize> Rows<'_, E, W, COUNT>
where
    E: Element<Wide = W>,
    W: Wide,
{
    /// Adds `N` rows, `apart` rows apart, at once, so that the sums are read and written once for all of them.
    #[inline(always)]
    fn add<const N: usize>(&mut self, row: usize, apart: usize) {
        let (cols, first) = (self.block.cols, self.first);
        let data = self.block.data();
        let rows: [&[E]; N] = runs(&data[row * self.block.rs..], apart * self.block.rs, cols);
        let mut factors = [[W::ZERO; N]; COUNT];
        for (v, factors) in factors.iter_mut().enumerate() {
            let vector = &self.vectors[v * self.stride + row..];
            factors.iter_mut().enumerate().for_each(|(i, factor)| *factor = vector[i * apart]);
        }
        let mut rest = &mut *self.sums;
        let mut sums: [&mut [W]; COUNT] = array::from_fn(|_| {
            let (here, others) = std::mem::take(&mut rest).split_at_mut(self.width);
            rest = others;
            &mut here[first..][..cols]
        });
        let whole = cols / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            let mut lanes = [[W::ZERO; LANES]; COUNT];
            for (lanes, sums) in lanes.iter_mut().zip(&sums) {
                lanes.copy_from_slice(&sums[at..at + LANES]);
            }
            for (i, row) in rows.iter().enumerate() {
                let row = &row[at..at + LANES];
                for (lanes, factors) in lanes.iter_mut().zip(&factors) {
                    for lane in 0..LANES {
                        lanes[lane] = row[lane].wide().times_plus(factors[i], lanes[lane]);
                    }
                }
            }
            for (lanes, sums) in lanes.iter().zip(&mut sums) {
                sums[at..at + LANES].copy_from_slice(lanes);
            }
        }
        for (sums, factors) in sums.iter_mut().zip(&factors) {
            for (at, sum) in sums.iter_mut().enumerate().skip(whole) {
                *sum = (0..N).fold(*sum, |sum, i| rows[i][at].wide().times_plus(factors[i], sum));
            }
        }
    }
}

/// Adds the products of the vectors with the contiguous columns of a block to the sums: `COUNT` vectors, `OPEN` columns
/// at a time, and `STEPS` independent accumulators.
struct Columns<'a, E, W, const COUNT: usize, const OPEN: usize, const STEPS: usize> {
    sums: &'a mut [W],
    vectors: &'a [W],
    block: Mat<'a, E>,
}

impl<E, W, const COUNT: usize, const OPEN: usize, const STEPS: usize> Loop
    for Columns<'_, E, W, COUNT, OPEN, STEPS>
where
    E: Element<Wide = W>,
    W: Wide,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let mut first = 0;
        while first + OPEN <= self.block.cols {
            self.add::<OPEN>(first);
            first += OPEN;
        }
        while first < self.block.cols {
            self.add::<1>(first);
            first += 1;
        }
    }
}

impl<E, W, const COUNT: usize, const OPEN: usize, const STEPS: usize> Columns<'_, E, W, COUNT, OPEN, STEPS>
where
    E: Element<Wide = W>,
    W: Wide,
{
    /// Accumulates `N` columns at once, so that the vectors are read once for all of them.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "a compiler makes no vectors of loops over iterators here")]
    fn add<const N: usize>(&mut self, first: usize) {
        let (depth, cols) = (self.block.rows, self.block.cols);
        let data = self.block.data();
        let columns: [&[E]; N] = runs(&data[first * self.block.cs..], self.block.cs, depth);
        let vectors: [&[W]; COUNT] = runs(self.vectors, depth, depth);
        let mut lanes = [[[[W::ZERO; LANES]; STEPS]; COUNT]; N];
        let mut at = 0;
        while at + STEPS <= depth / LANES {
            for j in 0..N {
                for step in 0..STEPS {
                    let x = columns[j].as_chunks::<LANES>().0[at + step];
                    for v in 0..COUNT {
                        let y = vectors[v].as_chunks::<LANES>().0[at + step];
                        for i in 0..LANES {
                            let lane = &mut lanes[j][v][step][i];
                            *lane = x[i].wide().times_plus(y[i], *lane);
                        }
                    }
                }
            }
            at += STEPS;
        }
        // Without it, the compiler would scalarise the preceding loop too.
        let lanes = black_box(lanes);
        for j in 0..N {
            for v in 0..COUNT {
                let mut sum = total(&lanes[j][v]);
                for (a, b) in columns[j][at * LANES..].iter().zip(&vectors[v][at * LANES..]) {
                    sum = a.wide().times_plus(*b, sum);
                }
                let to = &mut self.sums[v * cols + first + j];
                *to = to.plus(sum);
            }
        }
    }
}

/// The sum of all lanes, by halving.
#[inline(always)]
fn total<W: Wide, const STEPS: usize>(lanes: &[[W; LANES]; STEPS]) -> W {
    let mut all = lanes[0];
    for other in &lanes[1..] {
        for i in 0..LANES {
            all[i] = all[i].plus(other[i]);
        }
    }
    for i in 0..8 {
        all[i] = all[i].plus(all[i + 8]);
    }
    for i in 0..4 {
        all[i] = all[i].plus(all[i + 4]);
    }
    all[0].plus(all[2]).plus(all[1].plus(all[3]))
}
