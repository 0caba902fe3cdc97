//! A step of a pipeline of two stages, each of two tensor parallel ranks. Each stage is a role of one compiled call, with the
//! messages inside: micro-batches go forward, gradients (of half the sum of all squares, by hand) back, in the order 1F1B.
//! ```text
//! cargo build --release -p consort-examples --example pipeline_parallel
//! consort run -n 4 -- target/release/examples/pipeline_parallel
//! ```
use consort::{Chain, Compiled, Dtype::F32, Init, Mesh, Reduce, Result, Tensor, compile};
const SHAPE: [usize; 2] = [4, 8]; // Rows of a micro-batch, and its width.
type Weights = (Tensor, Tensor);
type Results = (Vec<Tensor>, Weights);
/// Part `i` of `n` of a stage's weights: columns of the first, rows of the second.
pub fn weights(stage: usize, i: usize, n: usize) -> Result<Weights> {
    let whole = |key: usize| Tensor::normal(F32, &[SHAPE[1], SHAPE[1]], key as i64);
    let (from, size) = (i * SHAPE[1] / n, SHAPE[1] / n);
    Ok((whole(stage).narrow(1, from, size)?, whole(stage + 10).narrow(0, from, size)?))
}
/// Forward and backward steps in turn, after as many forward steps as there are stages `behind` this one.
fn schedule(behind: usize, batches: usize) -> std::collections::BTreeSet<(usize, bool, usize)> {
    let forward = (0..batches).map(|m| (m + m.saturating_sub(behind), true, m));
    forward.chain((0..batches).map(|m| (2 * m + behind + 1, false, m))).collect()
}
/// Takes weights and, in the first stage, micro-batches. Gives results, and the gradients of the weights.
pub fn step(mesh: &Mesh, batches: usize) -> Result<Compiled<(Weights, Vec<Tensor>), Results>> {
    let (pp, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
    let (stage, last) = (pp.my_rank()?, pp.size() - 1);
    let step = compile(move |((a, b), mut xs): (Weights, Vec<Tensor>)| {
        let (mut ys, mut sent, mut grads) = (Vec::<Tensor>::new(), vec![], (a.mul(0.0)?, b.mul(0.0)?));
        let recv = |from: usize, m: usize| pp.irecv(F32, &SHAPE, from, m as i64);
        for (_, is_forward, m) in schedule(last - stage, batches) {
            let (out, to) = if is_forward {
                xs.extend((stage > 0).then(|| recv(stage - 1, m)).transpose()?);
                ys.push(tp.all_reduce(xs[m].matmul(&a).matmul(&b)?, Reduce::Sum)?);
                (ys[m].clone(), stage + 1)
            } else {
                let grad = if stage == last { ys[m].clone() } else { recv(stage + 1, m)? };
                let inner = grad.matmul(&b.t()?)?;
                grads.0 = xs[m].t().matmul(&inner).add(&grads.0)?;
                grads.1 = xs[m].matmul(&a).t().matmul(&grad).add(&grads.1)?;
                (tp.all_reduce(inner.matmul(&a.t()?)?, Reduce::Sum)?, stage.wrapping_sub(1))
            };
            sent.extend((to <= last).then(|| pp.isend(out, to, m as i64)).transpose()?);
        }
        sent.into_iter().try_for_each(|sent| sent.wait())?;
        Ok((ys, grads))
    });
    Ok(step.role(&format!("stage {stage}")))
}
/// The step on this rank's data.
pub fn run(mesh: &Mesh, batches: usize) -> Result<Results> {
    let (stage, tp) = (mesh.axis("pp")?.my_rank()?, mesh.axis("tp")?);
    let (step, w) = (step(mesh, batches)?, weights(stage, tp.my_rank()?, tp.size())?);
    let xs = (0..batches * usize::from(stage == 0)).map(|m| Tensor::uniform(F32, &SHAPE, 100 + m as i64));
    step.call((w, xs.collect::<Result<_>>()?))
}
fn main() -> Result<()> {
    let mesh = Init::new().axes(&[("pp", 2), ("tp", 2)]).start()?;
    let (_, (a, _)) = run(&mesh, 4)?;
    println!("the gradient of this rank's part of the first weight: norm {}", a.mul(&a)?.sum_all()?.sqrt()?);
    Ok(())
}
