//! A five-point stencil on a grid that is sharded in boxes. Each rank has its box and a border of one cell around it;
//! the border cells come from the neighbours while the inside is computed.
//!
//! ```text
//! cargo build --release -p consort-examples --example halo
//! consort run -n 4 -- target/release/examples/halo
//! ```

use std::process::ExitCode;

use consort::{Batched, Group, Index, Mesh, Result, Route, Tensor};

/// How a grid is sharded.
#[derive(Clone)]
pub struct Sharing {
    /// The group of ranks in one column.
    pub down: Group,
    /// The group of ranks in one row.
    pub along: Group,
    /// Whether the grid wraps around; otherwise its border is never written.
    pub periodic: bool,
}

impl Sharing {
    /// Over all ranks, `along` of them in each row.
    pub fn new(mesh: &Mesh, along: usize, periodic: bool) -> Result<Sharing> {
        let me = mesh.my_rank()?;
        let (row, column) = (me / along, me % along);
        let down = mesh.split("down", Some(column as u32), row as i64)?;
        Ok(Sharing { down, along: mesh.split("along", Some(row as u32), column as i64)?, periodic })
    }

    /// Whether the columns of the border change: they come from another rank, or the grid wraps around.
    fn has_sides(&self) -> bool {
        self.periodic || self.along.size() > 1
    }

    fn route(&self, by: i64) -> Route {
        if self.periodic { Route::Ring(by) } else { Route::Shift(by) }
    }
}

/// The new cells of a box: a quarter of the sum of their neighbours.
fn update(x: &Tensor, [top, left]: &[Index; 2], size: &[Index; 2]) -> Result<Tensor> {
    let near = |down: i64, right: i64| x.slice(&[top + down, left + right], size, &[1, 1]);
    let sum = ((near(-1, 0)? + near(1, 0)?)? + (near(0, -1)? + near(0, 1)?)?)?;
    sum * 0.25
}

/// One step of this rank's box, `[2 + height, 2 + width]` with its border; at least three cells each way.
pub fn step(grid: &Sharing, mut x: Tensor) -> Result<Tensor> {
    let (height, width) = (x.dim(0)? - 2, x.dim(1)? - 2);
    // Columns are not contiguous: they are packed to be sent, and are received into the border below.
    let sides = i64::from(grid.has_sides());
    let column = |at: Index| x.slice(&[1.into(), at], &[height.clone(), 1.into()], &[1, 1])?.contiguous();
    let (mut left, mut right) = (column(0.into())?, column(&width + 1)?);
    let beside = match sides {
        0 => None,
        _ => Some(grid.along.batch(vec![
            Batched::send(column(1.into())?, grid.route(-1), 0),
            Batched::send(column(width.clone())?, grid.route(1), 1),
            Batched::recv(&mut right, grid.route(1), 0),
            Batched::recv(&mut left, grid.route(-1), 1),
        ])?),
    };
    // Rows are received in place, in the border itself.
    let first = x.narrow(0, 1, 1)?;
    let below = Batched::recv(x.narrow_mut(0, &height + 1, 1)?, grid.route(1), 0);
    let up = grid.down.batch(vec![Batched::send(first, grid.route(-1), 0), below])?;
    let last = x.narrow(0, height.clone(), 1)?;
    let above = Batched::recv(x.narrow_mut(0, 0, 1)?, grid.route(-1), 1);
    let down = grid.down.batch(vec![Batched::send(last, grid.route(1), 1), above])?;
    // The inside does not depend on the border.
    let mut new = Vec::new();
    let mut renew = |x: &Tensor, start: [Index; 2], size: [Index; 2]| -> Result<()> {
        new.push((update(x, &start, &size)?, start, size));
        Ok(())
    };
    renew(&x, [2.into(), (1 + sides).into()], [&height - 2, &width - 2 * sides])?;
    up.wait()?;
    down.wait()?;
    if let Some(beside) = beside {
        beside.wait()?;
        let size = [height.clone(), 1.into()];
        x.slice_mut(&[Index::from(1), 0.into()], &size)?.copy_from(&left)?;
        x.slice_mut(&[1.into(), &width + 1], &size)?.copy_from(&right)?;
        renew(&x, [2.into(), 1.into()], [&height - 2, 1.into()])?;
        renew(&x, [2.into(), width.clone()], [&height - 2, 1.into()])?;
    }
    renew(&x, [1.into(), 1.into()], [1.into(), width.clone()])?;
    renew(&x, [height, 1.into()], [1.into(), width])?;
    for (part, start, size) in new {
        x.slice_mut(&start, &size)?.copy_from(&part)?;
    }
    Ok(x)
}

/// A cell of the grid at the start; the border of an open grid is outside of it, at -1.
pub fn cell(row: i64, column: i64) -> f32 {
    ((row * 7 + column * 13).rem_euclid(31)) as f32 / 31.0
}

/// This rank's box at the start, of a grid with `height` x `width` cells on each rank.
pub fn start(grid: &Sharing, height: usize, width: usize) -> Result<Tensor> {
    let at = |group: &Group, size: usize| -> Result<i64> { Ok((group.my_rank()? * size) as i64) };
    let (top, left) = (at(&grid.down, height)?, at(&grid.along, width)?);
    let (rows, columns) = (height as i64 + 2, width as i64 + 2);
    let cells = (0..rows * columns).map(|i| cell(top + i / columns - 1, left + i % columns - 1));
    Tensor::from_slice(&cells.collect::<Vec<f32>>(), &[height + 2, width + 2])
}

/// The same steps on the whole grid by plain loops; then this rank's cells.
pub fn plain(grid: &Sharing, height: usize, width: usize, steps: usize) -> Result<Vec<f32>> {
    let (rows, columns) = (height * grid.down.size(), width * grid.along.size());
    let place = |row: usize, column: usize| row * (columns + 2) + column;
    let all = (0..(rows + 2) * (columns + 2)).map(|i| (i / (columns + 2), i % (columns + 2)));
    let mut old: Vec<f32> = all.map(|(row, column)| cell(row as i64 - 1, column as i64 - 1)).collect();
    for _ in 0..steps {
        let mut new = old.clone();
        let at = |row: usize, column: usize| match grid.periodic {
            true => old[place((row + rows - 1) % rows + 1, (column + columns - 1) % columns + 1)],
            false => old[place(row, column)],
        };
        for row in 1..=rows {
            for column in 1..=columns {
                let sum =
                    (at(row - 1, column) + at(row + 1, column)) + (at(row, column - 1) + at(row, column + 1));
                new[place(row, column)] = 0.25 * sum;
            }
        }
        old = new;
    }
    let at = |group: &Group, size: usize| -> Result<usize> { Ok(group.my_rank()? * size) };
    let (top, left) = (at(&grid.down, height)?, at(&grid.along, width)?);
    Ok((0..height * width).map(|i| old[place(top + i / width + 1, left + i % width + 1)]).collect())
}

/// This rank's cells, without the border.
pub fn cells(x: &Tensor) -> Result<Vec<f32>> {
    let [height, width] = [x.shape()[0] - 2, x.shape()[1] - 2];
    x.slice(&[1, 1], &[height, width], &[1, 1])?.to_vec()
}

fn run() -> Result<bool> {
    let mut good = true;
    let mesh = consort::init()?;
    let mut grid = Sharing::new(&mesh, if mesh.size() % 2 == 0 { 2 } else { 1 }, false)?;
    for periodic in [false, true] {
        grid.periodic = periodic;
        let mut x = start(&grid, 16, 12)?;
        for _ in 0..10 {
            x = step(&grid, x)?;
        }
        good &= cells(&x)? == plain(&grid, 16, 12, 10)?;
    }
    println!("{}", if good { "as on one rank" } else { "other than on one rank" });
    Ok(good)
}

fn main() -> ExitCode {
    match run() {
        Ok(good) => ExitCode::from(u8::from(!good)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
