//! A mixture of experts, one on each rank: tokens go to the rank of the expert that a router chooses for them, and come
//! back. How many go to each rank is read from a tensor, and differs each time.
//!
//! ```text
//! cargo build --release -p consort-examples --example moe
//! consort run -n 4 -- target/release/examples/moe
//! ```

use std::process::ExitCode;

use consort::{Dtype, Flatten, Group, Mesh, Result, Tensor, tolerance};

/// The weights of a rank.
#[derive(Flatten, Clone)]
pub struct Expert {
    /// `[width, experts]`, the same on all ranks.
    pub router: Tensor,
    /// `[width, hidden]`.
    pub up: Tensor,
    /// `[hidden, width]`.
    pub down: Tensor,
}

impl Expert {
    /// Random weights.
    pub fn new(mesh: &Mesh, width: usize, hidden: usize) -> Result<Expert> {
        let me = mesh.my_rank()? as i64;
        let weight = |rows: usize, columns: usize, key: i64| {
            Tensor::normal(Dtype::F32, &[rows, columns], key)? * (1.0 / rows as f64).sqrt()
        };
        let router = weight(width, mesh.size(), 0)?.replicated()?;
        Ok(Expert {
            router,
            up: weight(width, hidden, 1 + 2 * me)?,
            down: weight(hidden, width, 2 + 2 * me)?,
        })
    }
}

/// Each token plus the output of its expert, `[tokens, width]`.
pub fn moe(ranks: &Group, x: &Tensor, own: &Expert) -> Result<Tensor> {
    let (chance, expert) = x.matmul(&own.router)?.softmax(1)?.topk(1, 1)?;
    let expert = expert.squeeze(1)?;
    // Sorts tokens by expert, and counts those of each.
    let (_, order) = expert.sort(0, false)?;
    let sent = expert.one_hot(ranks.size(), Dtype::I64)?.sum(&[0], false)?;
    let got = ranks.all_to_all(&sent, None, None)?;
    let (sent, got) = (sent.to_sizes()?, got.to_sizes()?);
    let tokens = ranks.all_to_all(x.gather(&order, 0)?, Some(&got), Some(&sent))?;
    let made = tokens.matmul(&own.up)?.silu()?.matmul(&own.down)?;
    let back = ranks.all_to_all(made, Some(&sent), Some(&got))?;
    // Back in their original order.
    x.add(&back.gather(&order.sort(0, false)?.1, 0)?.mul(&chance)?)
}

/// This rank's tokens of some round.
pub fn tokens(mesh: &Mesh, tokens: usize, width: usize, round: usize) -> Result<Tensor> {
    let key = 1000 + (round * mesh.size() + mesh.my_rank()?) as i64;
    Tensor::normal(Dtype::F32, &[tokens, width], key)
}

/// The same by plain loops over the weights of all experts.
pub fn plain(mesh: &Mesh, x: &Tensor, own: &Expert) -> Result<Vec<f32>> {
    let (width, hidden) = (own.up.shape()[0], own.up.shape()[1]);
    let (ups, downs) = (mesh.all_gather(&own.up, 0)?.to_vec::<f32>()?, mesh.all_gather(&own.down, 0)?);
    let (downs, router) = (downs.to_vec::<f32>()?, own.router.to_vec::<f32>()?);
    let dot = |x: &[f32], weights: &[f32], column: usize, columns: usize| {
        x.iter()
            .enumerate()
            .map(|(row, x)| f64::from(*x) * f64::from(weights[row * columns + column]))
            .sum::<f64>()
    };
    let mut all = Vec::new();
    for x in x.to_vec::<f32>()?.chunks(width) {
        let scores: Vec<f64> = (0..mesh.size()).map(|to| dot(x, &router, to, mesh.size())).collect();
        let expert = (0..scores.len()).fold(0, |best, to| if scores[to] > scores[best] { to } else { best });
        let chance = 1.0 / scores.iter().map(|score| (score - scores[expert]).exp()).sum::<f64>();
        let weights = &ups[expert * width * hidden..][..width * hidden];
        let inner = (0..hidden).map(|column| dot(x, weights, column, hidden));
        let inner: Vec<f32> = inner.map(|x| (x / (1.0 + (-x).exp())) as f32).collect();
        let weights = &downs[expert * width * hidden..][..width * hidden];
        let made = (0..width).map(|column| dot(&inner, weights, column, width));
        all.extend(x.iter().zip(made).map(|(x, made)| (f64::from(*x) + made * chance) as f32));
    }
    Ok(all)
}

fn run() -> Result<bool> {
    let mesh = consort::init()?;
    let own = Expert::new(&mesh, 16, 32)?;
    let mut most = 0f64;
    for round in 0..3 {
        let x = tokens(&mesh, 24, 16, round)?;
        let (got, expected) = (moe(&mesh, &x, &own)?.to_vec::<f32>()?, plain(&mesh, &x, &own)?);
        most = most.max(tolerance::difference(&expected, &got));
    }
    println!("differs from plain loops by at most {most:e}");
    Ok(most <= tolerance::of_runs(Dtype::F32))
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
