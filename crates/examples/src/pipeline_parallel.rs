//! Training by a pipeline of stages, each of tensor parallel ranks. A stage is a role of one compiled call, with the messages
//! inside: micro-batches go forward, gradients back, in the order 1F1B. The backward of a stage is its `vjp`.
//! ```text
//! cargo build --release -p consort-examples --example pipeline_parallel
//! consort run -n 4 --only 0 -- target/release/examples/pipeline_parallel
//! ```
use consort::{Chain, Dtype, Group, Init, Mesh, Reduce, Result, Tensor, compile_mut, nn, vjp};
type Weights = (Tensor, Tensor);
const BATCHES: usize = 5; // Of four rows, of width 8.
/// Part of four layers: those of this rank's stage; of these, its columns of the first weight and rows of the second.
fn weights(pp: &Group, tp: &Group, dtype: Dtype) -> Result<Weights> {
    let ([p, t], [i, j]) = ([4 / pp.size(), 8 / tp.size()], [pp.my_rank()?, tp.my_rank()?]);
    let a = Tensor::normal_part(dtype, &[p, 8, t], &[4, 8, 8], &[p * i, 0, t * j], 1)?.mul(0.3)?;
    Ok((a, Tensor::normal_part(dtype, &[p, t, 8], &[4, 8, 8], &[p * i, t * j, 0], 2)?.mul(0.3)?))
}
/// The layers of a stage: x + tanh(x a) b.
fn forward(tp: &Group, x: &Tensor, (a, b): &Weights) -> Result<Tensor> {
    (0..a.shape()[0]).try_fold(x.clone(), |x, i| {
        tp.all_reduce(x.matmul(&a.at(0, i)?).tanh().matmul(&b.at(0, i)?)?, Reduce::Sum)?.add(&x)
    })
}
/// The loss before each step, and this rank's weights after the last.
pub fn train(mesh: &Mesh, dtype: Dtype, steps: usize) -> Result<(Vec<f64>, Weights)> {
    let (pp, tp, data) = (mesh.axis("pp")?, mesh.axis("tp")?, Tensor::normal(dtype, &[BATCHES, 4, 8], 3)?);
    let (stage, behind, mut w) = (pp.my_rank()?, pp.size() - 1 - pp.my_rank()?, weights(&pp, &tp, dtype)?);
    let step = compile_mut(move |w: &mut Weights, data: Tensor| {
        let (mut xs, mut sent, mut slope) = (vec![], vec![], (w.0.mul(0.0)?, w.1.mul(0.0)?));
        let mut loss = Tensor::zeros(dtype, &())?;
        let recv = |from: usize, m: usize| pp.irecv(dtype, &[4, 8], from, m as i64)?.equal_over(&["tp"]);
        let order = (0..BATCHES + behind).flat_map(|k| [(true, k), (false, k.wrapping_sub(behind))]);
        for (is_forward, m) in order.filter(|(_, m)| *m < BATCHES) {
            let (out, to) = if is_forward {
                xs.push(if stage == 0 { data.at(0, m)? } else { recv(stage - 1, m)? });
                (forward(&tp, &xs[m], w)?, stage + 1)
            } else {
                let (tp, target) = (tp.clone(), data.at(0, m)?.sin()?);
                let backward = vjp(move |(x, w): (Tensor, Weights)| {
                    let y = forward(&tp, &x, &w)?;
                    if behind > 0 { Ok(y) } else { nn::mean_squared_error(&y, &target)?.div(BATCHES as f64) }
                });
                let by = if behind > 0 { recv(stage + 1, m)? } else { Tensor::ones(dtype, &())? };
                let (y, (of_x, of_w)) = backward.call(((xs[m].clone(), w.clone()), by))?;
                slope = (slope.0.add(&of_w.0)?, slope.1.add(&of_w.1)?);
                loss = if behind > 0 { loss } else { loss.add(&y)? };
                (of_x, stage.wrapping_sub(1))
            };
            sent.extend((to < pp.size()).then(|| pp.isend(out, to, m as i64)).transpose()?);
        }
        sent.into_iter().try_for_each(|sent| sent.wait())?;
        *w = nn::Sgd::default().step(&*w, &slope, &None, 0.1)?.0;
        pp.broadcast(loss, pp.size() - 1)?.cast(Dtype::F64)
    });
    let step = step.role(&format!("stage {stage}"));
    let losses = (0..steps).map(|_| step.call(&mut w, data.clone())?.item::<f64>()).collect::<Result<_>>()?;
    Ok((losses, w))
}
fn main() -> Result<()> {
    let mesh = Init::new().axes(&[("pp", 2), ("tp", 2)]).start()?;
    train(&mesh, Dtype::F32, 10).map(|(losses, _)| println!("losses {losses:.4?}"))
}
