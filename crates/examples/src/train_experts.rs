//! Expert parallel: four experts, divided among the ranks. Tokens go to the rank of the expert that a router chooses, and come
//! back; how many go where is read from a tensor. Their gradients go the same way back.
//!
//! ```text
//! cargo build --release -p consort-examples --example train_experts
//! consort run -n 2 --only 0 -- target/release/examples/train_experts
//! ```

use consort::nn::{Adam, Moments, mean_squared_error};
use consort::{Dtype, Group, Mesh, Reduce, Result, Tensor, compile, value_and_grad};

/// The router, equal on all ranks, and this rank's experts `[experts, 8, 8]`.
type Model = (Tensor, Tensor);

/// Each token plus the output of its expert, `[tokens, 8]`.
fn forward(ep: &Group, x: &Tensor, (router, experts): &Model) -> Result<Tensor> {
    let (chance, expert) = x.matmul(router)?.softmax(1)?.topk(1, 1)?;
    let (expert, order) = expert.squeeze(1)?.sort(0, false)?; // Those of one rank are neighbours.
    let own = experts.shape()[0];
    let sent = expert.div(own)?.one_hot(ep.size(), Dtype::I64)?.sum(&[0], false)?;
    let got = ep.all_to_all(&sent, None, None)?;
    let (sent, got) = (sent.to_sizes()?, got.to_sizes()?);
    let tokens = ep.all_to_all(x.gather(&order, 0)?, Some(&got), Some(&sent))?;
    let expert = ep.all_to_all(expert, Some(&got), Some(&sent))?.unsqueeze(1)?;
    let mut made = tokens.mul(0.0)?;
    for i in 0..own {
        let is_its = expert.eq(&Tensor::index(ep.rank() * own + i)?)?;
        made = made.add(&is_its.select(&tokens.matmul(&experts.at(0, i)?)?.tanh()?, 0.0)?)?;
    }
    let back = ep.all_to_all(made, Some(&sent), Some(&got))?;
    x.add(&back.gather(&order.sort(0, false)?.1, 0)?.mul(&chance)?) // In their order.
}

/// The loss before each step.
pub fn train(mesh: &Mesh, dtype: Dtype, steps: usize) -> Result<Vec<f64>> {
    let (ep, n) = (mesh.clone(), mesh.size());
    let own = |x: Tensor| x.narrow(0, mesh.rank() * (x.shape()[0] / n), x.shape()[0] / n);
    let experts = own(Tensor::normal(dtype, &[4, 8, 8], 2)?.mul(0.3)?)?;
    let (mut model, adam) = ((Tensor::normal(dtype, &[8, 4], 1)?, experts), Adam::default());
    let x = own(Tensor::normal(dtype, &[32, 8], 3)?)?;
    let (y, mut moments, mut losses) = (x.sin()?, adam.state(&model)?, Vec::new());
    let step = compile(move |(model, moments, x, y): (Model, Moments<Model>, Tensor, Tensor)| {
        let ep = ep.clone();
        let loss = value_and_grad(move |model: Model| {
            ep.all_reduce(mean_squared_error(&forward(&ep, &x, &model)?, &y)?, Reduce::Avg)
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
