//! Two ways at once, on 2 x 2 ranks: data along `dp`, and the features of each token along `tp`. The weights of the norms are
//! equal over `dp` and split over `tp`, and so are those of the layers: types say which gradients are summed over which axis.
//!
//! ```text
//! cargo build --release -p consort-examples --example train_mesh
//! consort run -n 4 --only 0 -- target/release/examples/train_mesh
//! ```

use consort::nn::{Adam, Moments, RmsNorm, clip, mean_squared_error};
use consort::{Chain, Dtype, Group, Init, Mesh, Reduce, Result, Tensor, compile, value_and_grad};

/// This rank's part of the norm, rows of the first weight and columns of the second.
type Block = (RmsNorm, Tensor, Tensor);

fn random(tp: &Group, key: i64, dtype: Dtype) -> Result<Block> {
    let (own, first) = (8 / tp.size(), tp.rank() * (8 / tp.size()));
    let weight = Tensor::ones(dtype, &[8])?.narrow(0, &first, own)?;
    let up = Tensor::normal(dtype, &[8, 16], 2 * key)?.narrow(0, &first, own)?.mul(0.25)?;
    let down = Tensor::normal(dtype, &[16, 8], 2 * key + 1)?.narrow(1, &first, own)?.mul(0.25)?;
    Ok((RmsNorm { weight, eps: 1e-6, group: Some(tp.clone()) }, up, down))
}

/// From this rank's features of its tokens to as many.
fn forward(tp: &Group, x: &Tensor, (norm, up, down): &Block) -> Result<Tensor> {
    tp.all_reduce(norm.forward(x)?.matmul(up)?, Reduce::Sum).gelu().matmul(down).add(x)
}

/// The loss before each step, with gradients of a norm of at most 0.1.
pub fn train(mesh: &Mesh, dtype: Dtype, steps: usize) -> Result<Vec<f64>> {
    let (all, dp, tp, adam) = (mesh.clone(), mesh.axis("dp")?, mesh.axis("tp")?, Adam::default());
    let mut model = (0..3).map(|key| random(&tp, key, dtype)).collect::<Result<Vec<_>>>()?;
    let x = Tensor::normal(dtype, &[16, 8], 100)?.narrow(0, dp.rank() * (16 / dp.size()), 16 / dp.size())?;
    let x = x.narrow(1, tp.rank() * (8 / tp.size()), 8 / tp.size())?;
    let (y, mut moments, mut losses) = (x.sin()?, adam.state(&model)?, Vec::new());
    let step = compile(move |(model, moments, x, y): (Vec<Block>, Moments<Vec<Block>>, Tensor, Tensor)| {
        let (all, tp) = (all.clone(), tp.clone());
        let loss = value_and_grad(move |model: Vec<Block>| {
            let x = model.iter().try_fold(x.clone(), |x, block| forward(&tp, &x, block))?;
            all.all_reduce(mean_squared_error(&x, &y)?, Reduce::Avg)
        });
        let (loss, slope) = loss.call(model.clone())?;
        Ok((loss.cast(Dtype::F64)?, adam.step(&model, &clip(&slope, 0.1)?.0, &moments, 0.01)?))
    });
    for _ in 0..steps {
        let (loss, next) = step.call((model, moments, x.clone(), y.clone()))?;
        losses.push(loss.item::<f64>()?);
        (model, moments) = next;
    }
    Ok(losses)
}

fn main() -> Result<()> {
    train(&Init::new().axes(&[("dp", 2), ("tp", 2)]).start()?, Dtype::F32, 10)
        .map(|losses| println!("losses {losses:.4?}"))
}
