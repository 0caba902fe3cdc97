//! Data parallel training of a linear model: each rank has its rows of the data and computes the gradient of their mean
//! square error. The gradients are averaged over all ranks, so that all weights take the same step.
//!
//! ```text
//! cargo build --release -p consort-examples --example data_parallel
//! consort run -n 2 --only 0 -- target/release/examples/data_parallel
//! ```

use consort::{Chain, Dtype, Group, Mesh, Reduce, Result, Steady, Tensor, compile_mut};

/// This rank's rows of the data: `x` is random, and `y` is `x` times the weights 1, 2, 3, ..
pub fn data(mesh: &Mesh, rows: usize, width: usize) -> Result<(Tensor, Tensor)> {
    let (whole, first) = ([rows * mesh.size(), width], [rows * mesh.my_rank()?, 0]);
    let x = Tensor::normal_part(Dtype::F32, &[rows, width], &whole, &first, 1)?;
    let y = x.matmul(&Tensor::iota(Dtype::F32, &[width, 1], 0).add(1.0)?)?;
    Ok((x, y))
}

/// One step of the weights against the gradient. Returns the mean square error before it.
pub fn step(group: &Group, w: &mut Tensor, (x, y): &(Tensor, Tensor), rate: f64) -> Result<Tensor> {
    let off = x.matmul(w).sub(y)?;
    let gradient = x.t().matmul(&off).mul(2.0 / x.shape()[0] as f64)?;
    let gradient = group.all_reduce(gradient, Reduce::Avg)?; // In flight while the error is computed.
    let error = off.mul(&off).mean_all()?;
    w.sub_(&gradient.mul(rate)?)?;
    group.all_reduce(error, Reduce::Avg)
}

/// The weights after `steps` steps, and the error before the last step.
pub fn train(mesh: &Mesh, rows: usize, width: usize, steps: usize) -> Result<(Tensor, f32)> {
    let (group, data) = (mesh.clone(), data(mesh, rows, width)?);
    let step = compile_mut(move |w: &mut Tensor, data: (Tensor, Tensor)| step(&group, w, &data, 0.1));
    let (mut w, mut error) = (Tensor::zeros(Dtype::F32, &[width, 1])?, 0.0);
    for _ in 0..steps {
        error = step.call(&mut w, data.clone())?.item::<f32>()?;
    }
    step.expect_steady(Steady::graphs(1))?;
    Ok((w, error))
}

fn main() -> Result<()> {
    let mesh = consort::init()?;
    let (w, error) = train(&mesh, 32, 4, 100)?;
    println!("error {error:.4}, weights {:.3?}", w.to_vec::<f32>()?);
    Ok(())
}
