//! A pipeline: each rank is a stage with its own weight. Micro-batches go from stage to stage, so that all stages
//! compute at the same time, each another micro-batch. The stages do different things, so this is eager code.
//!
//! ```text
//! cargo build --release -p consort-examples --example pipeline
//! consort run -n 3 -- target/release/examples/pipeline
//! ```

use consort::{Chain, Dtype, Group, Mesh, Result, Tensor};

/// The weight of a stage.
pub fn weight(stage: usize, width: usize) -> Result<Tensor> {
    Tensor::normal(Dtype::F32, &[width, width], stage as i64)
}

/// A micro-batch, which the first stage loads.
pub fn batch(number: usize, rows: usize, width: usize) -> Result<Tensor> {
    Tensor::uniform(Dtype::F32, &[rows, width], 100 + number as i64)
}

/// What a stage computes.
pub fn stage(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    x.matmul(w).tanh()
}

/// Runs this rank's stage on all micro-batches of one shape. Returns the results on the last stage, and nothing on others.
pub fn forward(group: &Group, batches: usize, shape: [usize; 2]) -> Result<Vec<Tensor>> {
    let (me, last) = (group.my_rank()?, group.size() - 1);
    let w = weight(me, shape[1])?;
    // All receives are started first: a micro-batch arrives while those before it are computed.
    let input = |number: usize| match me {
        0 => batch(number, shape[0], shape[1]),
        _ => group.irecv(Dtype::F32, &shape, me - 1, number as i64),
    };
    let inputs = (0..batches).map(input).collect::<Result<Vec<_>>>()?;
    let (mut sent, mut results) = (Vec::new(), Vec::new());
    for (number, x) in inputs.into_iter().enumerate() {
        let y = stage(&x, &w)?; // Waits for its own input only.
        match me == last {
            true => results.push(y),
            false => sent.push(group.isend(y, me + 1, number as i64)?),
        }
    }
    sent.into_iter().try_for_each(|sent| sent.wait())?;
    Ok(results)
}

fn print(mesh: &Mesh) -> Result<()> {
    for (number, y) in forward(mesh, 4, [1, 3])?.iter().enumerate() {
        println!("micro-batch {number}: {y}");
    }
    Ok(())
}

fn main() -> Result<()> {
    print(&consort::init()?)
}
