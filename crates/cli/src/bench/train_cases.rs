//! A rank of `consort bench train`: steps of training, each beside the same step without communication.

use std::rc::Rc;
use std::time::Duration;

use consort::nn::{Adam, Config, Llama, Moments, Sgd, Shards};
use consort::{
    Chain, Compiled, Dtype, Flatten, Group, Init, Mesh, Reduce, Result, Tensor, compile, recompute,
    value_and_grad,
};
use serde_json::{Value, json};

use super::figures::median;
use super::table::write_out;
use super::train_memory::Memory;
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

/// What a case alternates with: the same step without communication, or one that keeps what the case computes again.
const NO_COLLECTIVES: &str = "no_collectives";
const KEPT: &str = "kept";

/// How long ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The two weights of a block: x + relu(x a) b.
type Block = (Tensor, Tensor);
/// The weights of a layer: x + gelu(norm(x) a) b.
type Layer = (Tensor, Tensor, Tensor);
/// The loss, and its gradient by the parameters, for some rows of data.
type Slope<P> = Rc<dyn Fn(&P, &Tensor) -> Result<(Tensor, P)>>;

/// Parameters and how their gradient is computed.
struct Way<P> {
    params: P,
    slope: Slope<P>,
}

/// A step: from parameters, the state of the optimizer and data to the loss and the next ones.
type Step<P> = Compiled<(P, Option<Moments<P>>, Tensor), (Tensor, P, Option<Moments<P>>)>;

struct Bench {
    mesh: Mesh,
    args: TrainArgs,
    blocks: usize,
    layers: usize,
    width: usize,
}

/// Runs all cases; rank 0 prints a line for each.
pub(crate) fn run_train_rank(args: TrainArgs) -> anyhow::Result<Report> {
    let run = || -> Result<()> {
        let mesh = Init::new().timeout(TIMEOUT).start()?;
        // One thread for each rank, as the peers are measured.
        mesh.set_threads(1);
        let (blocks, layers, width) = if args.small { (2, 2, 8) } else { (50, 8, 128) };
        let bench = Bench { mesh, args, blocks, layers, width };
        bench.case("dp", Bench::data_parallel, Some((NO_COLLECTIVES, |bench: &Bench| bench.alone(1))))?;
        bench.case("zero", Bench::zero, Some((NO_COLLECTIVES, Bench::zero_alone)))?;
        let alone = |bench: &Bench| bench.alone(bench.mesh.size());
        bench.case("tp", Bench::tensor_parallel, Some((NO_COLLECTIVES, alone)))?;
        let [again, kept] = [true, false].map(|again| move |bench: &Bench| bench.deep(again));
        bench.case("recompute", again, Some((KEPT, kept)))?;
        bench.case("llama", Bench::llama, None::<(_, fn(&Bench) -> Result<Way<Llama>>)>)?;
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
    /// One of `parts` parts of the weights of all blocks: columns of the first weight of a block, rows of the second.
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

    /// Data parallel layers, four times as wide between their weights; all are under `recompute` or none.
    fn deep(&self, again: bool) -> Result<Way<Vec<Layer>>> {
        let (dp, width) = (self.mesh.clone(), self.width);
        let weight = |key: usize, shape: [usize; 2]| {
            Tensor::normal(Dtype::F32, &shape, key as i64)?.mul((shape[0] as f64).powf(-0.5))
        };
        let layer = |at: usize| -> Result<Layer> {
            let norm = Tensor::ones(Dtype::F32, &[width])?;
            Ok((norm, weight(2 * at, [width, 4 * width])?, weight(2 * at + 1, [4 * width, width])?))
        };
        let params = (0..self.layers).map(layer).collect::<Result<_>>()?;
        let forward = |((norm, a, b), x): (Layer, Tensor)| {
            x.rms_norm(&norm, 1e-6)?.matmul(&a).gelu().matmul(&b).add(&x)
        };
        let slope = slope_of(move |layers: &Vec<Layer>, x| {
            let x = layers.iter().try_fold(x.clone(), |x, layer| {
                let args = (layer.clone(), x);
                if again { recompute(forward)(args) } else { forward(args) }
            })?;
            dp.all_reduce(x.mul(&x)?.mean_all()?, Reduce::Avg)
        });
        Ok(Way { params, slope })
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

    fn step<P: Flatten + Clone + 'static>(&self, mode: &str, slope: Slope<P>) -> Step<P> {
        let adam = self.args.adam.then(Adam::default);
        let step = compile(move |(params, moments, x): (P, Option<Moments<P>>, Tensor)| {
            let (loss, grads) = slope(&params, &x)?;
            Ok(match (adam, moments) {
                (Some(adam), Some(moments)) => {
                    let (params, moments) = adam.step(&params, &grads, &moments, 1e-4)?;
                    (loss, params, Some(moments))
                }
                _ => (loss, Sgd::default().step(&params, &grads, &None, 1e-4)?.0, None),
            })
        });
        step.name(mode)
    }

    fn moments<P: Flatten>(&self, params: &P) -> Result<Option<Moments<P>>> {
        self.args.adam.then(|| Adam::default().state(params)).transpose()
    }

    /// Steps of a way, and the bytes of its state on this rank.
    fn mode<P: Flatten + Clone + 'static>(
        &self,
        mode: &'static str,
        way: Way<P>,
        x: Tensor,
    ) -> Result<(Mode, usize)> {
        let moments = self.moments(&way.params)?;
        let function = Rc::new(self.step(mode, way.slope));
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

    /// The memory of a step, from its plan with a symbol for the number of rows.
    fn memory<P: Flatten + Clone + 'static>(&self, way: Way<P>, x: Tensor) -> Result<Option<Memory>> {
        let moments = self.moments(&way.params)?;
        let n_state = way.params.flatten().len() + moments.flatten().len();
        let step = self.step("memory", way.slope).dynamic(n_state, 0);
        let (loss, ..) = step.call((way.params, moments, x))?;
        loss.wait()?;
        Ok(step.explain().graphs.first().and_then(|graph| Memory::of(graph.plan.as_ref()?, n_state)))
    }

    fn case<P: Flatten + Clone + 'static, Q: Flatten + Clone + 'static>(
        &self,
        name: &'static str,
        way: impl Fn(&Bench) -> Result<Way<P>>,
        beside: Option<(&'static str, impl Fn(&Bench) -> Result<Way<Q>>)>,
    ) -> Result<()> {
        if !self.args.cases.split(',').any(|start| name.starts_with(start)) {
            return Ok(());
        }
        let is_own = ["dp", "zero", "recompute"].contains(&name);
        let memory = [
            Some(self.memory(way(self)?, self.data(is_own)?)?),
            match &beside {
                Some((KEPT, beside)) => Some(self.memory(beside(self)?, self.data(is_own)?)?),
                _ => None,
            },
        ]
        .map(Option::flatten);
        let (mode, state) = self.mode(name, way(self)?, self.data(is_own)?)?;
        let mut modes = vec![mode];
        if let Some((beside, way)) = beside {
            modes.push(self.mode(beside, way(self)?, self.data(is_own && beside == KEPT)?)?.0);
        }
        let measured = in_turns(&self.mesh, &mut modes, self.args.seconds, self.args.small)?;
        if self.mesh.my_rank()? > 0 {
            return Ok(());
        }
        let ms = |mode: &str| {
            let place = modes.iter().position(|other| other.mode == mode)?;
            Some(round(1e3 * median(measured[place].seconds.iter().copied())?))
        };
        let bytes = |place: usize, of: fn(&Memory) -> u64| memory[place].as_ref().map(of);
        let explained = modes[0].explain.as_ref().map(|explain| explain());
        let stats = explained.as_ref().map(|explained| explained.stats);
        let graph = explained.as_ref().and_then(|explained| explained.graphs.first());
        let mut figure = json!({
            "bench": "train", "case": name, "ranks": self.mesh.size(), "batch": self.args.batch,
            "ms": ms(name), "no_collectives_ms": ms(NO_COLLECTIVES),
            "state_bytes": state, "peak_bytes": graph.map(|graph| state as u64 + graph.peak_bytes),
            "weights_bytes": bytes(0, |memory| memory.weights),
            "activations_bytes": bytes(0, |memory| memory.activations),
            "saved_bytes": bytes(0, |memory| memory.saved),
            "wire_bytes": graph.map(|graph| graph.cost.wire),
            "copied_bytes": measured[0].copied(), "copies": graph.map(|graph| graph.copies.clone()),
            "compile_ms": stats.map(|stats| round(1e3 * stats.compiling.as_secs_f64())),
            "breaks": modes[0].breaks(), "samples": measured[0].seconds.len(),
        });
        if let (Some(kept), Value::Object(fields)) = (ms(KEPT), &mut figure) {
            fields.insert("kept_ms".to_string(), json!(kept));
            fields.insert("kept_saved_bytes".to_string(), json!(bytes(1, |memory| memory.saved)));
        }
        if let ("zero", Value::Object(fields)) = (name, &mut figure) {
            // Two whole weights.
            fields.insert("layer_bytes".to_string(), json!(2 * self.width * self.width * size_of::<f32>()));
        }
        write_out(&format!("{figure}\n"));
        Ok(())
    }
}
