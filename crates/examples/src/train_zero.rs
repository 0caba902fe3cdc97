//! ZeRO-3, or FSDP: each rank keeps its rows of every weight, of its gradient and of the state of Adam. A layer's weights are
//! gathered where they are used, and its gradient comes back as rows.
//!
//! ```text
//! cargo build --release -p consort-examples --example train_zero
//! consort run -n 2 --only 0 -- target/release/examples/train_zero
//! ```

use consort::nn::{Adam, Moments, Shards, mean_squared_error};
use consort::{Dtype, Mesh, Reduce, Result, Tensor, compile, value_and_grad};

/// The two weights of a layer.
type Layer = (Tensor, Tensor);
type Model = Vec<Shards<Layer>>;

/// Weights of a layer, which do not depend on the number of ranks.
fn layer(key: i64, dtype: Dtype) -> Result<Layer> {
    let weight = |shape: [usize; 2], key| Tensor::normal(dtype, &shape, key)?.mul(0.25);
    Ok((weight([8, 16], 2 * key)?, weight([16, 8], 2 * key + 1)?))
}

/// The loss before each step.
pub fn train(mesh: &Mesh, dtype: Dtype, steps: usize) -> Result<Vec<f64>> {
    let dp = mesh.clone();
    let mut model: Model = (0..3).map(|key| Shards::of(&layer(key, dtype)?, &dp)).collect::<Result<_>>()?;
    let (rows, first) = (16 / dp.size(), 16 / dp.size() * dp.my_rank()?);
    let x = Tensor::normal_part(dtype, &[rows, 8], &[16, 8], &[first, 0], 100)?;
    let (adam, y) = (Adam::default(), x.sin()?);
    let mut moments = adam.state(&model)?;
    let step = compile(move |(model, moments, x, y): (Model, Moments<Model>, Tensor, Tensor)| {
        let dp = dp.clone();
        let loss = value_and_grad(move |model: Model| {
            let mut x = x.clone();
            for layer in &model {
                let (up, down) = layer.whole()?; // Gathered here.
                x = x.matmul(&up)?.gelu()?.matmul(&down)?.add(&x)?;
            }
            dp.all_reduce(mean_squared_error(&x, &y)?, Reduce::Avg)
        });
        let (loss, slope) = loss.call(model.clone())?;
        Ok((loss.cast(Dtype::F64)?, adam.step(&model, &slope, &moments, 0.01)?))
    });
    let mut losses = Vec::new();
    for _ in 0..steps {
        let (loss, next) = step.call((model, moments, x.clone(), y.clone()))?;
        losses.push(loss.item::<f64>()?);
        (model, moments) = next;
    }
    Ok(losses)
}

fn main() -> Result<()> {
    train(&consort::init()?, Dtype::F32, 10).map(|losses| println!("losses {losses:.4?}"))
}
