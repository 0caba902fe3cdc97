//! A rank of `consort bench train`: steps of training, each beside the same step without communication.

use std::rc::Rc;
use std::time::Duration;

use consort::nn::{Adam, Config, Llama, Moments, Sgd, Shards};
use consort::{Chain, Dtype, Flatten, Group, Init, Mesh, Reduce, Result, Tensor, compile, value_and_grad};
use serde_json::json;

use super::figures::median;
use super::table::write_out;
use crate::modes::{Mode, in_turns, round};
use crate::report::{Machine, Report};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const TRAIN: &str = "__bench_train";

#[derive(Debug, clap::Args)]
pub(crate) struct TrainArgs {
    #[arg(long)]
    seconds: f64,
    #[arg(long, default_value = "")]
    cases: String,
    #[arg(long)]
    batch: usize,
    #[arg(long)]
    adam: bool,
    #[arg(long)]
    small: bool,
}

/// How long ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The two weights of a block: x + relu(x a) b.
type Block = (Tensor, Tensor);
/// The loss, and its gradient by the parameters, for some rows of data.
type Slope<P> = Rc<dyn Fn(&P, &Tensor) -> Result<(Tensor, P)>>;

/// Parameters and how their gradient is computed.
struct Way<P> {
    params: P,
    slope: Slope<P>,
}

struct Bench {
    mesh: Mesh,
    args: TrainArgs,
    blocks: usize,
    width: usize,
}

/// Runs all cases; rank 0 prints a line for each.
pub(crate) fn run_train_rank(args: TrainArgs) -> anyhow::Result<Report> {
    let run = || -> Result<()> {
        let mesh = Init::new().timeout(TIMEOUT).start()?;
        // One thread for each rank, as the peers are measured.
        mesh.set_threads(1);
        let (blocks, width) = if args.small { (2, 8) } else { (50, 128) };
        let bench = Bench { mesh, args, blocks, width };
        bench.case("dp", bench.data_parallel()?, Some(bench.alone(1)?))?;
        bench.case("zero", bench.zero()?, Some(bench.zero_alone()?))?;
        bench.case("tp", bench.tensor_parallel()?, Some(bench.alone(bench.mesh.size())?))?;
        bench.case("llama", bench.llama()?, None::<Way<Llama>>)?;
        bench.mesh.barrier()
    };
    run().map_err(|error| Machine(format!("{error}")))?;
    Ok(Report::fine(String::new()))
}

/// The loss of blocks, whose partial sums are added over a group.
fn loss(blocks: &[Block], x: &Tensor, over: Option<&Group>) -> Result<Tensor> {
    let mut x = x.clone();
    for (a, b) in blocks {
        let y = x.matmul(a).relu().matmul(b)?;
        x = match over {
            Some(group) => group.all_reduce(y, Reduce::Sum)?.add(&x)?,
            None => y.add(&x)?,
        };
    }
    x.mul(&x).mean_all()
}

/// The gradient of a loss.
fn slope_of<P: Flatten + Clone + 'static>(
    loss: impl Fn(&P, &Tensor) -> Result<Tensor> + 'static,
) -> Slope<P> {
    let loss = Rc::new(loss);
    Rc::new(move |params, x| {
        let (loss, x) = (Rc::clone(&loss), x.clone());
        value_and_grad(move |params: P| loss(&params, &x)).call(params.clone())
    })
}

impl Bench {
    /// The weights of all blocks, of which each has so many of the columns, or rows, between its two weights.
    fn weights(&self, parts: usize, place: impl Fn() -> consort::Index) -> Result<Vec<Block>> {
        let own = self.width / parts;
        let scale = (self.width as f64).powf(-0.5);
        let weight = |key: usize, dim: usize| {
            let whole = Tensor::normal(Dtype::F32, &[self.width, self.width], key as i64)?.mul(scale)?;
            Tensor::concat(&[&whole.narrow(dim, place() * own, own)?], 0)
        };
        (0..self.blocks).map(|block| Ok((weight(2 * block, 1)?, weight(2 * block + 1, 0)?))).collect()
    }

    fn data_parallel(&self) -> Result<Way<Vec<Block>>> {
        let dp = self.mesh.clone();
        let slope =
            slope_of(move |blocks: &Vec<Block>, x| dp.all_reduce(loss(blocks, x, None)?, Reduce::Avg));
        Ok(Way { params: self.weights(1, || 0.into())?, slope })
    }

    fn zero(&self) -> Result<Way<Vec<Shards<Block>>>> {
        let dp = self.mesh.clone();
        let blocks = self.weights(1, || 0.into())?;
        let params = blocks.iter().map(|block| Shards::of(block, &dp)).collect::<Result<_>>()?;
        let slope = slope_of(move |shards: &Vec<Shards<Block>>, x| {
            let mut x = x.clone();
            for shard in shards {
                let (a, b) = shard.whole()?;
                x = x.matmul(&a).relu().matmul(&b).add(&x)?;
            }
            dp.all_reduce(x.mul(&x).mean_all()?, Reduce::Avg)
        });
        Ok(Way { params, slope })
    }

    /// Rows of the weights as of ZeRO, updated with the gradient of whole weights that each rank has beside them.
    fn zero_alone(&self) -> Result<Way<Vec<Block>>> {
        let whole = self.weights(1, || 0.into())?;
        let whole = whole.into_iter().map(|(a, b)| Ok((a.replicated()?, b.replicated()?)));
        let whole = whole.collect::<Result<Vec<Block>>>()?;
        let own = self.width / self.mesh.size();
        let rows = move |blocks: Vec<Block>| -> Result<Vec<Block>> {
            blocks.iter().map(|(a, b)| Ok((a.narrow(0, 0, own)?, b.narrow(0, 0, own)?))).collect()
        };
        let params = rows(whole.clone())?;
        let of_whole = slope_of(|blocks: &Vec<Block>, x| loss(blocks, x, None));
        let slope: Slope<Vec<Block>> = Rc::new(move |_, x| {
            let (loss, slope) = of_whole(&whole, x)?;
            Ok((loss, rows(slope)?))
        });
        Ok(Way { params, slope })
    }

    fn tensor_parallel(&self) -> Result<Way<Vec<Block>>> {
        let tp = self.mesh.clone();
        let params = self.weights(tp.size(), || tp.rank())?;
        let slope = slope_of(move |blocks: &Vec<Block>, x| loss(blocks, x, Some(&tp)));
        Ok(Way { params, slope })
    }

    /// A step without communication, with a part of the weights.
    fn alone(&self, parts: usize) -> Result<Way<Vec<Block>>> {
        let slope = slope_of(|blocks: &Vec<Block>, x| loss(blocks, x, None));
        Ok(Way { params: self.weights(parts, || 0.into())?, slope })
    }

    /// Eight layers of a transformer, tensor parallel: for the time that compiling them takes.
    fn llama(&self) -> Result<Way<Llama>> {
        let config = Config { hidden: 128, layers: 8, feed_forward: 256, ..Config::tiny() };
        let model = Llama::random(&config, &self.mesh, 7)?;
        let tokens = Tensor::iota(Dtype::I64, &[1, 16], 1)?.replicated()?;
        let slope = slope_of(move |model: &Llama, _: &Tensor| model.loss(&tokens, &tokens.add(1)?));
        Ok(Way { params: model, slope })
    }

    /// The data: of this rank for data parallel steps, else the same on all.
    fn data(&self, is_own: bool) -> Result<Tensor> {
        let key = Tensor::normal(Dtype::F32, &[self.args.batch, self.width], 999)?;
        if is_own { key.add(&Tensor::index(self.mesh.rank())?.cast(Dtype::F32)?.mul(1e-3)?) } else { Ok(key) }
    }

    /// Steps of a way, and what each has on this rank: its state and what the plan needs besides.
    fn mode<P: Flatten + Clone + 'static>(
        &self,
        mode: &'static str,
        way: Way<P>,
        x: Tensor,
    ) -> Result<(Mode, usize)> {
        let (adam, slope) = (self.args.adam.then(Adam::default), way.slope);
        let moments = adam.map(|adam| adam.state(&way.params)).transpose()?;
        let function = compile(move |(params, moments, x): (P, Option<Moments<P>>, Tensor)| {
            let (loss, grads) = slope(&params, &x)?;
            Ok(match (adam, moments) {
                (Some(adam), Some(moments)) => {
                    let (params, moments) = adam.step(&params, &grads, &moments, 1e-4)?;
                    (loss, params, Some(moments))
                }
                _ => (loss, Sgd::default().step(&params, &grads, &None, 1e-4)?.0, None),
            })
        });
        let function = Rc::new(function.name(mode));
        let state = (way.params, moments);
        let bytes = state.flatten().iter().map(|x| x.numel() * x.dtype().size()).sum();
        let (called, mut state) = (Rc::clone(&function), Some(state));
        let step = move || {
            let Some((params, moments)) = state.take() else { return Ok(()) };
            let (loss, params, moments) = called.call((params, moments, x.clone()))?;
            state = Some((params, moments));
            // The loss is there before the last weights are.
            state.iter().flat_map(Flatten::flatten).chain([loss]).try_for_each(|tensor| tensor.wait())
        };
        Ok((Mode { mode, step: Box::new(step), explain: Some(Box::new(move || function.explain())) }, bytes))
    }

    fn case<P: Flatten + Clone + 'static, Q: Flatten + Clone + 'static>(
        &self,
        name: &'static str,
        way: Way<P>,
        alone: Option<Way<Q>>,
    ) -> Result<()> {
        if !self.args.cases.split(',').any(|start| name.starts_with(start)) {
            return Ok(());
        }
        let (mode, state) = self.mode(name, way, self.data(name == "dp" || name == "zero")?)?;
        let mut modes = vec![mode];
        if let Some(alone) = alone {
            modes.push(self.mode("no_collectives", alone, self.data(false)?)?.0);
        }
        let measured = in_turns(&self.mesh, &mut modes, self.args.seconds, self.args.small)?;
        if self.mesh.my_rank()? > 0 {
            return Ok(());
        }
        let ms = |place: usize| {
            let seconds = measured.get(place)?.seconds.iter().copied();
            Some(round(1e3 * median(seconds)?))
        };
        let explained = modes[0].explain.as_ref().map(|explain| explain());
        let stats = explained.as_ref().map(|explained| explained.stats);
        let graph = explained.as_ref().and_then(|explained| explained.graphs.first());
        let figure = json!({
            "bench": "train", "case": name, "ranks": self.mesh.size(), "batch": self.args.batch,
            "ms": ms(0), "no_collectives_ms": ms(1),
            "state_bytes": state, "peak_bytes": graph.map(|graph| state as u64 + graph.peak_bytes),
            "wire_bytes": graph.map(|graph| graph.cost.wire),
            "copied_bytes": measured[0].copied(), "copies": graph.map(|graph| graph.copies.clone()),
            "compile_ms": stats.map(|stats| round(1e3 * stats.compiling.as_secs_f64())),
            "breaks": modes[0].breaks(), "samples": measured[0].seconds.len(),
        });
        write_out(&format!("{figure}\n"));
        Ok(())
    }
}
