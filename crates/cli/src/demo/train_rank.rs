//! A rank of `consort demo train`: trains a small model on a text, in one of three ways to split the work. It goes on from the
//! last checkpoint, if there is one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use consort::nn::{
    Adam, Block, Checkpoint, Config, Cosine, Embedding, Llama, Moments, Parts, RmsNorm, Shards, clip,
};
use consort::{Flatten, Group, Init, Mesh, Reduce, Result, Tensor, compile, value_and_grad};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::json;

use crate::bench::write_out;
use crate::report::{Machine, Report};

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const TRAIN: &str = "__train";

/// The text, of which the model learns to predict the next letter.
const TEXT: &str = include_str!("text.txt");
/// How long ranks wait for one another.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(crate) struct TrainArgs {
    #[arg(value_enum)]
    split: Split,
    /// Where checkpoints are.
    #[arg(long)]
    folder: PathBuf,
    /// The last rank kills itself after this step.
    #[arg(long)]
    kill: Option<u64>,
    #[arg(long)]
    small: bool,
}

/// A way to split the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Split {
    /// Data parallel
    Dp,
    /// ZeRO-3
    Zero,
    /// Tensor parallel
    Tp,
}

impl Split {
    pub(crate) const ALL: [Split; 3] = [Split::Dp, Split::Zero, Split::Tp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Split::Dp => "dp",
            Split::Zero => "zero",
            Split::Tp => "tp",
        }
    }
}

/// How long the training is.
#[derive(Clone, Copy)]
pub(crate) struct Length {
    pub(crate) steps: u64,
    /// The number of steps between two checkpoints.
    pub(crate) save: u64,
    /// Letters of a sequence.
    letters: usize,
}

impl Length {
    pub(crate) fn new(small: bool) -> Length {
        match small {
            true => Length { steps: 12, save: 4, letters: 12 },
            false => Length { steps: 80, save: 20, letters: 48 },
        }
    }
}

/// The model with every weight as rows.
#[derive(Flatten, Clone)]
struct Zero {
    embedding: Shards<Embedding>,
    blocks: Vec<Shards<Block>>,
    norm: Shards<RmsNorm>,
    head: Shards<Embedding>,
}

impl Zero {
    fn of(model: &Llama, dp: &Group) -> Result<Zero> {
        Ok(Zero {
            embedding: Shards::of(&model.embedding, dp)?,
            blocks: model.blocks.iter().map(|block| Shards::of(block, dp)).collect::<Result<_>>()?,
            norm: Shards::of(&model.norm, dp)?,
            head: Shards::of(&model.head, dp)?,
        })
    }

    /// As [`Llama::loss`], with weights gathered where they are used.
    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.whole()?.forward(tokens)?;
        for block in &self.blocks {
            x = block.whole()?.attend(&x)?;
        }
        self.head.whole()?.cross_entropy(&self.norm.whole()?.forward(&x)?, targets)
    }
}

/// Trains, and reports each step and the end.
pub(crate) fn run_train_rank(args: &TrainArgs) -> anyhow::Result<Report> {
    let run = || -> Result<()> {
        let (dp, tp) = if args.split == Split::Tp { (1, 0) } else { (0, 1) };
        let mesh = Init::new().axes(&[("dp", dp), ("tp", tp)]).timeout(TIMEOUT).start()?;
        let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
        let mut letters: Vec<u8> = TEXT.bytes().collect();
        letters.sort_unstable();
        letters.dedup();
        let sizes = if args.small { (32, 2, 48) } else { (64, 2, 176) };
        let config = Config {
            vocabulary: letters.len(),
            hidden: sizes.0,
            layers: sizes.1,
            feed_forward: sizes.2,
            heads: 8,
            kv_heads: 8,
            ..Config::tiny()
        };
        let text = TEXT.bytes().map(|byte| letters.partition_point(|other| *other < byte) as i64).collect();
        let model = Llama::random(&config, &tp, 7)?;
        let run = Run { mesh: &mesh, args, text, length: Length::new(args.small) };
        match args.split {
            Split::Zero => run.train(Zero::of(&model, &dp)?, &dp, rows, Zero::loss),
            Split::Dp | Split::Tp => run.train(model, &tp, |name, _| Llama::split(name), Llama::loss),
        }
    };
    run().map_err(|error| Machine(format!("{error}")))?;
    Ok(Report::fine(String::new()))
}

/// The dimension along which shards of all weights are split.
fn rows(_: &str, shape: &[usize]) -> Option<usize> {
    (!shape.is_empty()).then_some(0)
}

struct Run<'a> {
    mesh: &'a Mesh,
    args: &'a TrainArgs,
    /// The text as numbers of letters.
    text: Vec<i64>,
    length: Length,
}

impl Run<'_> {
    fn train<M: Flatten + Clone + 'static>(
        &self,
        model: M,
        group: &Group,
        dim: impl Fn(&str, &[usize]) -> Option<usize>,
        loss: fn(&M, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let Length { steps, save, letters } = self.length;
        let (adam, rate) =
            (Adam::default(), Cosine { peak: 0.01, least: 0.001, warmup: 10, total: steps as usize });
        let mut state = (adam.state(&model)?, model);
        let parts = Parts::whole(&state).split(group, dim)?;
        let checkpoint = Checkpoint::folder(self.args.folder.join(self.args.split.name()), self.mesh);
        let mut step = 0;
        if checkpoint.exists()? {
            (state, step) = checkpoint.load(&state, &parts)?;
        }
        let dp = self.mesh.axis("dp")?;
        let function = compile(move |((moments, model), text): ((Moments<M>, M), Tensor)| {
            let (tokens, targets) = (text.narrow(1, 0, letters)?, text.narrow(1, 1, letters)?);
            let dp = dp.clone();
            let mean =
                value_and_grad(move |model: M| dp.all_reduce(loss(&model, &tokens, &targets)?, Reduce::Avg));
            let (loss, slope) = mean.call(model.clone())?;
            let (model, moments) =
                adam.step(&model, &clip(&slope, 1.0)?.0, &moments, &rate.at(&moments.step)?)?;
            Ok(((moments, model), loss))
        });
        let function = function.name(self.args.split.name()).fullgraph(true);
        let mut copied = 0;
        while step < steps {
            let (start, before) = (Instant::now(), self.mesh.copied_bytes());
            let (next, loss) = function.call((state, self.batch(step)?))?;
            let loss = loss.item::<f32>()?;
            (state, step) = (next, step + 1);
            copied = self.mesh.copied_bytes() - before;
            let rate = (self.sequences() * letters) as f64 / start.elapsed().as_secs_f64();
            self.say(&json!({ "step": step, "loss": loss, "tokens_per_second": rate.round() }))?;
            if self.args.kill == Some(step) && self.mesh.my_rank()? + 1 == self.mesh.size() {
                // As a machine that fails: nothing is told to anybody.
                let _ = kill_process(getpid(), Signal::KILL);
            }
            if step.is_multiple_of(save) {
                checkpoint.save(&state, &parts, step)?;
            }
        }
        let bytes: usize = state.flatten().iter().map(|x| x.numel() * x.dtype().size()).sum();
        let explained = function.explain();
        let graph = explained.graphs.first();
        self.say(&json!({
            "ranks": self.mesh.size(), "state_bytes": bytes, "step_bytes": graph.map(|graph| graph.peak_bytes),
            "wire_bytes": graph.map(|graph| graph.cost.wire), "copied_bytes": copied, "copies": graph.map(|graph| &graph.copies),
            "graphs": explained.stats.graphs, "breaks": explained.stats.breaks,
        }))
    }

    /// How many sequences a step has on all ranks.
    fn sequences(&self) -> usize {
        let ranks = self.mesh.size();
        ranks * 16usize.div_ceil(ranks)
    }

    /// This rank's sequences of a step, which are the same on any number of runs.
    fn batch(&self, step: u64) -> Result<Tensor> {
        let (dp, width) = (self.mesh.axis("dp")?, self.length.letters + 1);
        let rows = self.sequences() / dp.size();
        let mut batch = Vec::new();
        for row in rows * dp.my_rank()?..rows * (dp.my_rank()? + 1) {
            // A multiplicative hash spreads the places over the text.
            let number =
                (step * self.sequences() as u64 + row as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let place = (number >> 32) as usize % (self.text.len() - width);
            batch.extend_from_slice(&self.text[place..place + width]);
        }
        Tensor::from_slice(&batch, &[rows, width])?.equal_over(&["tp"])
    }

    fn say(&self, value: &serde_json::Value) -> Result<()> {
        if self.mesh.my_rank()? == 0 {
            write_out(&format!("{value}\n"));
        }
        Ok(())
    }
}
