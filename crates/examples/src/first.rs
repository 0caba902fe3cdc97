//! The program of the README: a layer whose weight is sharded by rows, so that a rank has half of the sum.

use consort::{Dtype, Reduce, Result, Steady, Tensor, compile};

fn main() -> Result<()> {
    let mesh = consort::init()?; // A rank of `consort run -n 2 -- PROGRAM`, or alone.
    let rank = mesh.my_rank()?;
    let group = mesh.clone();
    let layer = compile(move |(x, w): (Tensor, Tensor)| group.all_reduce(x.matmul(&w)?, Reduce::Sum)?.relu());
    let w = Tensor::full(Dtype::F32, &[2, 2], rank as f64 + 1.0)?; // This rank's rows of the weight.
    for step in 1..3 {
        let x = Tensor::full(Dtype::F32, &[1, 2], f64::from(step))?; // And its columns of the input.
        println!("step {step}: {}", layer.call((x, w.clone()))?); // Traced at the first call, then replayed.
    }
    layer.expect_steady(Steady::graphs(1)) // No graph breaks and no recompilation.
}
