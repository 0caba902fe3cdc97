//! Tensor and sequence parallel, as in Megatron: weights are split along the hidden size, and tokens between the layers. The
//! weights of the norms are equal on all ranks and see only their tokens: the sums of their gradients follow from types.
//!
//! ```text
//! cargo build --release -p consort-examples --example train_sequence
//! consort run -n 2 --only 0 -- target/release/examples/train_sequence
//! ```

use consort::nn::{Adam, Moments, mean_squared_error};
use consort::{Chain, Dtype, Group, Mesh, Reduce, Result, Tensor, compile, value_and_grad};

/// The norm, columns of the first weight and rows of the second.
type Block = (Tensor, Tensor, Tensor);

/// Random weights, which do not depend on the number of ranks.
fn random(group: &Group, key: i64, dtype: Dtype) -> Result<Block> {
    // Of the rank as a symbol, so that they are known to differ along this group only.
    let (own, first) = (16 / group.size(), group.rank() * (16 / group.size()));
    let up = Tensor::normal(dtype, &[8, 16], 2 * key)?.narrow(1, &first, own)?.mul(0.25)?;
    let down = Tensor::normal(dtype, &[16, 8], 2 * key + 1)?.narrow(0, &first, own)?.mul(0.25)?;
    Ok((Tensor::ones(dtype, &[8])?, up, down))
}

/// From this rank's tokens `[tokens, 8]` to as many.
fn forward(group: &Group, x: &Tensor, (norm, up, down): &Block) -> Result<Tensor> {
    let whole = group.all_gather(x.rms_norm(norm, 1e-6)?, 0)?;
    let partial = whole.matmul(up).gelu().matmul(down)?;
    group.reduce_scatter(partial, Reduce::Sum, 0).add(x)
}

/// The loss before each step.
pub fn train(mesh: &Mesh, dtype: Dtype, steps: usize) -> Result<Vec<f64>> {
    let (tp, adam) = (mesh.clone(), Adam::default());
    let mut model = (0..3).map(|key| random(&tp, key, dtype)).collect::<Result<Vec<_>>>()?;
    let x = Tensor::normal(dtype, &[16, 8], 100)?.narrow(0, tp.rank() * (16 / tp.size()), 16 / tp.size())?;
    let (y, mut moments, mut losses) = (x.sin()?, adam.state(&model)?, Vec::new());
    let step = compile(move |(model, moments, x, y): (Vec<Block>, Moments<Vec<Block>>, Tensor, Tensor)| {
        let tp = tp.clone();
        let loss = value_and_grad(move |model: Vec<Block>| {
            let x = model.iter().try_fold(x.clone(), |x, block| forward(&tp, &x, block))?;
            tp.all_reduce(mean_squared_error(&x, &y)?, Reduce::Avg)
        });
        let (loss, slope) = loss.call(model.clone())?;
        Ok((loss.cast(Dtype::F64)?, adam.step(&model, &slope, &moments, 0.01)?))
    });
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
