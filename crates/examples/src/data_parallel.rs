//! Data parallel training of a linear model: each rank has its rows of the data, and the loss is averaged over all ranks. The
//! gradient of the weights, which are equal on all ranks, is then summed over them, so that all take the same step.
//!
//! ```text
//! cargo build --release -p consort-examples --example data_parallel
//! consort run -n 2 --only 0 -- target/release/examples/data_parallel
//! ```

use consort::nn::{Sgd, mean_squared_error};
use consort::{Dtype, Mesh, Reduce, Result, Steady, Tensor, compile, value_and_grad};

/// This rank's rows of the data: `x` is random, and `y` is `x` times the weights 1, 2, 3, ..
pub fn data(mesh: &Mesh, rows: usize, width: usize, dtype: Dtype) -> Result<(Tensor, Tensor)> {
    let (whole, first) = ([rows * mesh.size(), width], [rows * mesh.my_rank()?, 0]);
    let x = Tensor::normal_part(dtype, &[rows, width], &whole, &first, 1)?;
    let y = x.matmul(&Tensor::iota(dtype, &[width, 1], 0)?.add(1.0)?)?;
    Ok((x, y))
}

/// The weights after some steps on this rank's data, and the error before each step.
pub fn train(mesh: &Mesh, (x, y): (Tensor, Tensor), steps: usize) -> Result<(Tensor, Vec<f64>)> {
    let group = mesh.clone();
    let step = compile(move |(w, x, y): (Tensor, Tensor, Tensor)| {
        let group = group.clone();
        let loss = value_and_grad(move |w: Tensor| {
            group.all_reduce(mean_squared_error(&x.matmul(&w)?, &y)?, Reduce::Avg) // The one line.
        });
        let (loss, slope) = loss.call(w.clone())?;
        Ok((loss.cast(Dtype::F64)?, Sgd::default().step(&w, &slope, &None, 0.1)?.0))
    });
    let (mut w, mut errors) = (Tensor::zeros(x.dtype(), &[x.shape()[1], 1])?, Vec::new());
    for _ in 0..steps {
        let (error, next) = step.call((w, x.clone(), y.clone()))?;
        errors.push(error.item::<f64>()?);
        w = next;
    }
    step.expect_steady(Steady::graphs(1))?;
    Ok((w, errors))
}

fn main() -> Result<()> {
    let mesh = consort::init()?;
    let (w, errors) = train(&mesh, data(&mesh, 32, 4, Dtype::F32)?, 100)?;
    println!("error {:.4}, weights {:.3?}", errors[99], w.to_vec::<f32>()?);
    Ok(())
}
