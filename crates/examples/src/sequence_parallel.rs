//! Tensor and sequence parallel: a two-layer MLP whose weights are sharded along the hidden size, and whose tokens are
//! sharded between the layers. The tokens are gathered before the first product, and the partial sums of the second are
//! reduced and scattered, which moves as much as one all_reduce and keeps a shard of the tokens on each rank.
//!
//! ```text
//! cargo build --release -p consort-examples --example sequence_parallel
//! consort run -n 2 -- target/release/examples/sequence_parallel
//! ```

use consort::{Chain, Dtype, Flatten, Group, Mesh, Reduce, Result, Steady, Tensor, compile};

/// This rank's shard of the weights: columns of `up`, and as many rows of `down`.
#[derive(Flatten, Clone)]
pub struct Mlp {
    up: Tensor,
    down: Tensor,
}

impl Mlp {
    /// Random weights, the same on any number of ranks, which must divide the hidden size.
    pub fn random(group: &Group, width: usize, hidden: usize) -> Result<Mlp> {
        let own = hidden / group.size();
        let first = own * group.my_rank()?;
        let up = Tensor::normal_part(Dtype::F32, &[width, own], &[width, hidden], &[0, first], 1)?;
        let down = Tensor::normal_part(Dtype::F32, &[own, width], &[hidden, width], &[first, 0], 2)?;
        Ok(Mlp { up, down })
    }

    /// From this rank's tokens `[tokens, width]` to as many results.
    pub fn forward(&self, group: &Group, x: &Tensor) -> Result<Tensor> {
        let partial = group.all_gather(x, 0).matmul(&self.up).gelu().matmul(&self.down)?;
        group.reduce_scatter(partial, Reduce::Sum, 0)
    }
}

/// This rank's shard of random tokens.
pub fn tokens(group: &Group, own: usize, width: usize) -> Result<Tensor> {
    let first = own * group.my_rank()?;
    Tensor::normal_part(Dtype::F32, &[own, width], &[own * group.size(), width], &[first, 0], 3)
}

/// The result of the compiled layer for this rank's tokens.
pub fn run(mesh: &Mesh, own: usize, width: usize, hidden: usize) -> Result<Tensor> {
    let (group, mlp) = (mesh.clone(), Mlp::random(mesh, width, hidden)?);
    let layer = compile(move |(mlp, x): (Mlp, Tensor)| mlp.forward(&group, &x)).fullgraph(true);
    let y = layer.call((mlp, tokens(mesh, own, width)?))?;
    layer.expect_steady(Steady::graphs(1))?;
    Ok(y)
}

fn main() -> Result<()> {
    let mesh = consort::init()?;
    println!("{}", run(&mesh, 2, 3, 8 * mesh.size())?);
    Ok(())
}
