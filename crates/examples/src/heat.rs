//! Steady heat in a square plate whose upper edge is at 1 and whose other edges are at 0, on a mesh of 2 x 2 ranks:
//! Jacobi steps until no cell of any rank changes by more than `eps`. Each rank has a box of cells and gets the nearest
//! cells of its neighbours in every step; the loop is a part of the compiled program.
//!
//! ```text
//! cargo build --release -p consort-examples --example heat
//! consort run -n 4 -- target/release/examples/heat
//! ```

use consort::{Chain, Dtype, Group, Init, Mesh, Missing, Reduce, Result, Route, Tensor, compile, while_loop};

/// The mesh: two rows of two ranks.
pub const AXES: [(&str, usize); 2] = [("down", 2), ("along", 2)];

/// New cells: the mean of their four neighbours. Outside of the plate there are zeros, and ones above it.
fn step(down: &Group, along: &Group, x: &Tensor) -> Result<Tensor> {
    let (rows, columns) = (x.dim(0)?, x.dim(1)?);
    let get = |group: &Group, part: Tensor, by: i64| group.permute(part, Route::Shift(by), Missing::Zeros);
    let above = get(down, x.narrow(0, &rows - 1, 1)?, 1)?;
    let below = get(down, x.narrow(0, 0, 1)?, -1)?;
    let left = get(along, x.narrow(1, &columns - 1, 1)?, 1)?;
    let right = get(along, x.narrow(1, 0, 1)?, -1)?;
    let above = Tensor::index(down.rank()).eq(0).select(1.0, &above)?; // The upper edge.
    let tall = Tensor::concat(&[&above, x, &below], 0)?;
    let wide = Tensor::concat(&[&left, x, &right], 1)?;
    let vertical = tall.narrow(0, 0, rows.clone()).add(&tall.narrow(0, 2, rows)?)?;
    let horizontal = wide.narrow(1, 0, columns.clone()).add(&wide.narrow(1, 2, columns)?)?;
    vertical.add(&horizontal).mul(0.25)
}

/// This rank's box of `size` x `size` cells when no cell changes by more than `eps`.
pub fn solve(mesh: &Mesh, size: usize, eps: f64) -> Result<Tensor> {
    let (all, down, along) = (mesh.clone(), mesh.axis("down")?, mesh.axis("along")?);
    let solver = compile(move |x: Tensor| {
        let first = (x, Tensor::scalar(f64::INFINITY)?);
        let goes_on = |(_, change): &(Tensor, Tensor)| change.gt(eps);
        let (x, _) = while_loop(10_000, first, goes_on, |(x, _)| {
            let next = step(&down, &along, &x)?;
            let change = all.all_reduce(next.sub(&x).abs().max_all()?, Reduce::Max)?;
            Ok((next, change))
        })?;
        Ok(x)
    });
    solver.call(Tensor::zeros(Dtype::F64, &[size, size])?)
}

fn main() -> Result<()> {
    println!("{}", solve(&Init::new().axes(&AXES).start()?, 3, 1e-6)?);
    Ok(())
}
