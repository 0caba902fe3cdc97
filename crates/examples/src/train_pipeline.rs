//! Pipeline parallel: four layers, divided among the ranks as stages. A `scan` of ticks: each stage computes one micro-batch and
//! passes it on. The gradient of the scan is the pipeline backwards.
//!
//! ```text
//! cargo build --release -p consort-examples --example train_pipeline
//! consort run -n 2 --only 0 -- target/release/examples/train_pipeline
//! ```

use consort::nn::{Adam, Moments, mean_squared_error};
use consort::{Dtype, Group, Mesh, Missing, Reduce, Result, Route, Tensor, compile, scan, value_and_grad};

/// The results of all micro-batches `[batches, rows, 8]`, on the last stage. A stage has some layers `[layers, 8, 8]`.
fn pipeline(pp: &Group, batches: &Tensor, layers: &Tensor) -> Result<Tensor> {
    let (stages, shape) = (pp.size(), batches.shape().to_vec());
    let is_first = Tensor::index(pp.rank())?.eq(0)?;
    // Micro-batch t enters at tick t, and leaves the last stage some ticks later.
    let rest = Tensor::zeros(batches.dtype(), &[stages - 1, shape[1], 8])?;
    let fresh = Tensor::concat(&[batches, &rest], 0)?;
    let nothing = Tensor::zeros(batches.dtype(), &[shape[1], 8])?;
    let (_, made) = scan(shape[0] + stages - 1, nothing, fresh, |arrived: Tensor, fresh: Tensor| {
        let mut x = is_first.select(&fresh, &arrived)?;
        for i in 0..layers.shape()[0] {
            x = x.matmul(&layers.at(0, i)?)?.tanh()?.add(&x)?;
        }
        Ok((pp.permute(&x, Route::Shift(1), Missing::Zeros)?, x))
    })?;
    made.narrow(0, stages - 1, shape[0])
}

/// The loss before each step.
pub fn train(mesh: &Mesh, dtype: Dtype, steps: usize) -> Result<Vec<f64>> {
    let (pp, adam, own) = (mesh.clone(), Adam::default(), 4 / mesh.size());
    let layers = Tensor::normal(dtype, &[4, 8, 8], 1)?.mul(0.3)?;
    let mut layers = layers.narrow(0, pp.rank() * own, own)?;
    let x = Tensor::normal(dtype, &[6, 3, 8], 2)?; // Six micro-batches.
    let (y, mut moments, mut losses) = (x.sin()?, adam.state(&layers)?, Vec::new());
    let step = compile(move |(layers, moments, x, y): (Tensor, Moments<Tensor>, Tensor, Tensor)| {
        let pp = pp.clone();
        let loss = value_and_grad(move |layers: Tensor| {
            let loss = mean_squared_error(&pipeline(&pp, &x, &layers)?, &y)?;
            let is_last = Tensor::index(pp.rank())?.eq(pp.size() - 1)?;
            pp.all_reduce(is_last.select(&loss, 0.0)?, Reduce::Sum)
        });
        let (loss, slope) = loss.call(layers.clone())?;
        Ok((loss.cast(Dtype::F64)?, adam.step(&layers, &slope, &moments, 0.01)?))
    });
    for _ in 0..steps {
        let (loss, next) = step.call((layers, moments, x.clone(), y.clone()))?;
        losses.push(loss.item::<f64>()?);
        (layers, moments) = next;
    }
    Ok(losses)
}

fn main() -> Result<()> {
    train(&consort::init()?, Dtype::F32, 10).map(|losses| println!("losses {losses:.4?}"))
}
