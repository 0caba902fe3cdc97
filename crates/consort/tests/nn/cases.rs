//! Tensor-parallel layers: on any number of ranks they equal one rank and plain loops, eager and compiled. The tests run
//! the cases on threads (`tests/nn.rs`), on processes and over MPI (`tests/on_processes.rs`).

use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use consort::nn::{Config, Embedding, Generator, Llama, RmsNorm, Sampling, Weights, rotate, share};
use consort::{Dtype, Index, Mesh, Reduce, Result, Safetensors, Steady, Tensor, compile, spawn, tolerance};

use crate::sums;

type Case = fn(Mesh) -> Result<()>;

/// Each case, and on how many threads it runs.
pub(crate) const CASES: &[(&str, &[usize], Case)] = &[
    (
        "e1_the_model_is_the_same_on_any_number_of_ranks",
        &[2, 3, 4],
        e1_the_model_is_the_same_on_any_number_of_ranks,
    ),
    ("e1_tokens_one_by_one_are_tokens_at_once", &[2], e1_tokens_one_by_one_are_tokens_at_once),
    ("e2_one_code_runs_eager_and_compiled", &[1, 2, 3], e2_one_code_runs_eager_and_compiled),
    ("e4_weights_are_cut_as_they_are_read", &[1, 2, 3, 4], e4_weights_are_cut_as_they_are_read),
    ("e1_layers_give_what_plain_loops_give", &[1, 2, 3, 4], e1_layers_give_what_plain_loops_give),
    ("e2_the_block_compiles_into_one_graph", &[2], e2_the_block_compiles_into_one_graph),
    (
        "a14_files_with_other_elements_on_a_rank_are_not_taken_as_equal",
        &[2],
        a14_files_with_other_elements_on_a_rank_are_not_taken_as_equal,
    ),
];

/// Cases on 2 x 2 ranks: the axes `dp` and `tp`.
pub(crate) const PLACED: &[(&str, Case)] = &[
    ("a14_weights_have_their_exact_placements", a14_weights_have_their_exact_placements),
    (
        "a14_shards_of_files_that_differ_are_an_error_of_the_first_call",
        a14_shards_of_files_that_differ_are_an_error_of_the_first_call,
    ),
    (
        "e1_a_model_that_ranks_of_one_axis_share_and_those_of_another_do_not",
        e1_a_model_that_ranks_of_one_axis_share_and_those_of_another_do_not,
    ),
];

/// What one rank gives.
fn alone<T: Send>(f: impl Fn(Mesh) -> Result<T> + Sync) -> Result<T> {
    spawn(1, f).remove(0)
}

/// Fails if a rank has other elements.
fn equal_on_all(mesh: &Mesh, x: &[f32]) -> Result<()> {
    let all = mesh.all_gather(Tensor::from_slice(x, &[x.len()])?, 0)?.to_vec::<f32>()?;
    assert!(all.chunks(x.len()).all(|other| other == x), "{x:?} {all:?}");
    Ok(())
}

/// The same for tokens.
fn tokens_are_equal(mesh: &Mesh, tokens: &[i64]) -> Result<()> {
    equal_on_all(mesh, &tokens.iter().map(|token| *token as f32).collect::<Vec<_>>())
}

/// A file of one rank; `job` is of all ranks.
fn file(job: i64, rank: usize, name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("consort-nn-{job}-{rank}-{name}"))
}

/// A number that all ranks of a job have, and no other job.
fn job(mesh: &Mesh) -> Result<i64> {
    // On threads all ranks are one process, in which tests run side by side.
    static NEXT: AtomicI64 = AtomicI64::new(0);
    let own = (i64::from(std::process::id()) << 20) + NEXT.fetch_add(1, Relaxed);
    mesh.broadcast(Tensor::scalar(own)?, 0)?.item()
}

fn close(got: &[f32], expected: &[f32]) {
    let off = tolerance::difference(expected, got);
    assert!(off <= tolerance::of_runs(Dtype::F32), "off by {off:e}: {got:?} and {expected:?}");
}

fn same_sums(a: f32, b: f32) {
    assert!(tolerance::difference(&[a], &[b]) <= sums::allowed(Dtype::F32), "{a} {b}");
}

fn configs() -> Vec<Config> {
    vec![Config::tiny(), Config { heads: 8, kv_heads: 4, ..Config::tiny() }]
}

fn logits(mesh: &Mesh, config: &Config) -> Result<(Vec<f32>, Vec<f32>)> {
    let model = Llama::random(config, mesh, 3)?;
    let mut caches = model.caches(config.places)?;
    let tokens = Tensor::from_iter([5i64, 66, 0, 17])?.replicated()?;
    let first = model.forward(&tokens, &mut caches, &Index::from(0))?.to_vec::<f32>()?;
    let more = Tensor::from_iter([9i64, 9])?.replicated()?;
    let second = model.forward(&more, &mut caches, &Index::from(4))?.to_vec::<f32>()?;
    Ok((first, second))
}

fn e1_the_model_is_the_same_on_any_number_of_ranks(mesh: Mesh) -> Result<()> {
    for config in configs() {
        let one = alone(|mesh| logits(&mesh, &config))?;
        assert_eq!(one.0.len(), 4 * config.vocabulary);
        let many = logits(&mesh, &config)?;
        close(&many.0, &one.0);
        close(&many.1, &one.1);
        equal_on_all(&mesh, &many.0)?;
        equal_on_all(&mesh, &many.1)?;
    }
    Ok(())
}

fn e1_tokens_one_by_one_are_tokens_at_once(mesh: Mesh) -> Result<()> {
    let config = Config::tiny();
    let model = Llama::random(&config, &mesh, 3)?;
    let tokens = [5i64, 66, 0, 17];
    let mut caches = model.caches(config.places)?;
    let at_once =
        model.forward(&Tensor::from_iter(tokens)?, &mut caches, &Index::from(0))?.to_vec::<f32>()?;
    let mut caches = model.caches(config.places)?;
    for (place, token) in tokens.into_iter().enumerate() {
        let one = model.forward(&Tensor::from_iter([token])?, &mut caches, &Index::from(place))?;
        close(&one.to_vec::<f32>()?, &at_once[place * config.vocabulary..][..config.vocabulary]);
    }
    Ok(())
}

fn e2_one_code_runs_eager_and_compiled(mesh: Mesh) -> Result<()> {
    let config = Config::tiny();
    let model = Llama::random(&config, &mesh, 3)?;
    let plain = model.generate(&[1, 2, 3], 12, None)?;
    let chance = Some(Sampling { temperature: 0.9, seed: 5 });
    let some = model.generate(&[1, 2, 3], 12, chance)?;
    let mut generator = Generator::new(model, config.places)?;
    assert_eq!(generator.generate(&[1, 2, 3], 12, None)?, plain);
    assert_eq!(generator.generate(&[1, 2, 3], 12, chance)?, some);
    let stats = generator.explain().stats;
    // One graph for the prompt, and one for single tokens, with a symbol for the position.
    assert_eq!((stats.breaks, stats.graphs), (0, 2), "{}", generator.explain());
    tokens_are_equal(&mesh, &plain)
}

/// Writes all weights of a model of one rank under the names that files use.
fn save(model: &Llama, path: &std::path::Path) -> Result<()> {
    let mut all = vec![
        ("model.embed_tokens.weight".to_string(), model.embedding.table.clone()),
        ("model.norm.weight".to_string(), model.norm.weight.clone()),
        ("lm_head.weight".to_string(), model.head.table.clone()),
    ];
    for (layer, block) in model.blocks.iter().enumerate() {
        let parts = [
            ("input_layernorm", &block.norm.weight),
            ("self_attn.q_proj", &block.attention.query.weight),
            ("self_attn.k_proj", &block.attention.key.weight),
            ("self_attn.v_proj", &block.attention.value.weight),
            ("self_attn.o_proj", &block.attention.out.weight),
            ("post_attention_layernorm", &block.feed_norm.weight),
            ("mlp.gate_proj", &block.feed.gate.weight),
            ("mlp.up_proj", &block.feed.up.weight),
            ("mlp.down_proj", &block.feed.down.weight),
        ];
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        all.extend(parts.into_iter().map(|(part, weight)| (name(part), weight.clone())));
    }
    let all: Vec<(&str, &Tensor)> = all.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    Tensor::save_safetensors(path, &all)
}

fn e4_weights_are_cut_as_they_are_read(mesh: Mesh) -> Result<()> {
    let config = Config { heads: 8, kv_heads: 4, ..Config::tiny() };
    // Each rank has a file of its own, with the same weights.
    let path = file(job(&mesh)?, mesh.my_rank()?, "weights");
    let expected = alone(|mesh| {
        let model = Llama::random(&config, &mesh, 3)?;
        save(&model, &path)?;
        model.generate(&[7, 8], 8, None)
    })?;
    assert_eq!(Llama::load(&config, &mesh, &path)?.generate(&[7, 8], 8, None)?, expected);
    let other = Config { hidden: 64, ..config.clone() };
    let error = alone(|mesh| Ok(Llama::load(&other, &mesh, &path).map(drop).unwrap_err().to_string()))?;
    // The embedding is read first, so the error names its shape.
    let expected = format!(
        "safetensors: {}: `model.embed_tokens.weight`: expected the shape [67, 64], got [67, 32]\n  at ",
        path.display()
    );
    assert!(error.starts_with(&expected), "{error}");
    std::fs::remove_file(path).unwrap();
    Ok(())
}

fn e1_layers_give_what_plain_loops_give(mesh: Mesh) -> Result<()> {
    let n = mesh.size();
    let me = mesh.my_rank()?;
    // Embedding and logits of a vocabulary that is not divisible by the number of ranks.
    let (vocabulary, hidden) = (7, 3);
    let own = share(vocabulary, me, n);
    let table: Vec<f32> = (0..vocabulary * hidden).map(|i| (i % 5) as f32 - 1.5).collect();
    let whole = Tensor::from_slice(&table, &[vocabulary, hidden])?;
    let embedding = Embedding {
        table: whole.narrow(0, own.start, own.len())?,
        sizes: (0..n).map(|member| share(vocabulary, member, n).len()).collect(),
        group: (*mesh).clone(),
    };
    let tokens = [6i64, 0, 3, 3, 1];
    let rows = embedding.forward(&Tensor::from_iter(tokens)?)?.to_vec::<f32>()?;
    let expected: Vec<f32> =
        tokens.iter().flat_map(|token| table[*token as usize * hidden..][..hidden].to_vec()).collect();
    assert_eq!(rows, expected);
    let x = [1.0f32, -2.0, 0.5];
    let logits = embedding.logits(&Tensor::from_slice(&x, &[1, 3])?)?.to_vec::<f32>()?;
    let dot = |row: usize| (0..hidden).map(|i| x[i] * table[row * hidden + i]).sum::<f32>();
    close(&logits, &(0..vocabulary).map(dot).collect::<Vec<_>>());
    // A norm over a sharded dimension.
    let own = share(8, me, n);
    let (values, weights): (Vec<f32>, Vec<f32>) = (0..8).map(|i| (i as f32 - 2.5, 1.0 + i as f32)).unzip();
    let norm = RmsNorm {
        weight: Tensor::from_slice(&weights[own.clone()], &[own.len()])?,
        eps: 1e-5,
        group: Some((*mesh).clone()),
    };
    let got = norm.forward(&Tensor::from_slice(&values[own.clone()], &[1, own.len()])?)?.to_vec::<f32>()?;
    let mean = values.iter().map(|x| x * x).sum::<f32>() / 8.0 + 1e-5;
    let expected: Vec<f32> = own.map(|i| values[i] / mean.sqrt() * weights[i]).collect();
    close(&got, &expected);
    // Rotation keeps lengths and rotates by the angle of the position.
    let x = Tensor::from_slice(&[3.0f32, 1.0, 4.0, 1.0], &[1, 1, 1, 4])?;
    let turned = rotate(&x, &Index::from(5), 100.0)?.to_vec::<f32>()?;
    for pair in 0..2 {
        let angle = 5.0 / 100f64.powf(pair as f64 / 2.0);
        let (a, b) = ([3.0, 1.0][pair], [4.0, 1.0][pair]);
        let expected = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()];
        close(&[turned[pair], turned[pair + 2]], &expected.map(|x| x as f32));
    }
    Ok(())
}

fn e2_the_block_compiles_into_one_graph(mesh: Mesh) -> Result<()> {
    let config = Config::tiny();
    let model = Llama::random(&config, &mesh, 3)?;
    let f = compile(|(model, tokens): (Llama, Tensor)| {
        let mut caches = model.caches(16)?;
        model.forward(&tokens, &mut caches, &Index::from(0))
    });
    let tokens = Tensor::from_iter([5i64, 66, 0, 17])?.replicated()?;
    let mut caches = model.caches(16)?;
    let eager = model.forward(&tokens, &mut caches, &Index::from(0))?.to_vec::<f32>()?;
    close(&f.call((model, tokens))?.to_vec::<f32>()?, &eager);
    f.expect_steady(Steady::graphs(1))?;
    assert_eq!(f.stats().copied_bytes, 0, "{}", f.explain());
    Ok(())
}

/// The sum of what the feed-forward part of a model gives, as a program that declares it equal on all ranks; without
/// the reduction over tp if `forgets`.
fn loss(model: &Llama, forgets: bool) -> Result<Tensor> {
    let f = compile(move |(norm, feed, x): (RmsNorm, consort::nn::SwiGlu, Tensor)| {
        let x = norm.forward(&x)?;
        let y = match forgets {
            false => feed.forward(&x)?,
            true => {
                let wide = feed.gate.forward(&x)?.silu()?.mul(&feed.up.forward(&x)?)?;
                wide.matmul(&feed.down.weight.t()?)?
            }
        };
        y.mul(&y)?.sum_all()?.replicated()
    });
    let block = &model.blocks[0];
    let x = Tensor::normal(Dtype::F32, &[3, block.norm.weight.shape()[0]], 5)?;
    let args = || (block.feed_norm.clone(), block.feed.clone(), x.clone());
    let first = f.call(args())?.item::<f32>()?;
    same_sums(f.call(args())?.item::<f32>()?, first);
    f.expect_steady(Steady::graphs(1))?;
    let program = f.explain().graphs[0].program.clone();
    let head = program.lines().find(|line| line.starts_with("func ")).unwrap_or_default().to_string();
    // The norm is equal everywhere, and the shards differ along tp alone.
    let shards = "v1: f32[24,32]{tp}, v2: f32[24,32]{tp}, v3: f32[32,24]{tp}";
    assert!(head.contains(&format!("(v0: f32[32], {shards}, v4: f32[3,32]) -> f32[] ")), "{head}");
    Tensor::scalar(first)
}

fn a14_weights_have_their_exact_placements(mesh: Mesh) -> Result<()> {
    let config = Config::tiny();
    let path = file(job(&mesh)?, mesh.my_rank()?, "placed");
    alone(|mesh| save(&Llama::random(&config, &mesh, 3)?, &path))?;
    let tp = mesh.axis("tp")?;
    let mut losses = Vec::new();
    for model in [Llama::random(&config, &tp, 3)?, Llama::load(&config, &tp, &path)?] {
        losses.push(loss(&model, false)?.item::<f32>()?);
        let error = loss(&model, true).unwrap_err().to_string();
        let wanted =
            "replicated: expected a tensor whose type says that it is equal over tp, got one that may";
        assert!(error.starts_with(wanted), "{error}");
    }
    same_sums(losses[0], losses[1]);
    std::fs::remove_file(&path).unwrap();
    Ok(())
}

fn a14_files_with_other_elements_on_a_rank_are_not_taken_as_equal(mesh: Mesh) -> Result<()> {
    let (me, job, group) = (mesh.my_rank()?, job(&mesh)?, mesh.clone());
    let path = |rank: usize| file(job, rank, "own.npy");
    let x = Tensor::from_iter([1.0f32, me as f32])?;
    x.to_npy(path(me))?;
    mesh.barrier()?;
    let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Max));
    let head = |f: &consort::Compiled<Tensor, Tensor>, i: usize| {
        f.explain().graphs[i].program.lines().find(|line| line.starts_with("func ")).unwrap().to_string()
    };
    // All read one file, and then each its own.
    f.call(Tensor::from_npy(path(0))?)?;
    assert!(head(&f, 0).contains("v0: f32[2])"), "{}", head(&f, 0));
    assert_eq!(f.call(Tensor::from_npy(path(me))?)?.to_vec::<f32>()?, [1.0, mesh.size() as f32 - 1.0]);
    assert!(head(&f, 1).contains("v0: f32[2]{world})"), "{}", head(&f, 1));
    mesh.barrier()?;
    std::fs::remove_file(path(me)).unwrap();
    Ok(())
}

fn a14_shards_of_files_that_differ_are_an_error_of_the_first_call(mesh: Mesh) -> Result<()> {
    let (me, dp, tp) = (mesh.my_rank()?, mesh.axis("dp")?, mesh.axis("tp")?);
    let path = file(job(&mesh)?, me, "shard");
    // Both rows of a rank's part differ between the ranks of dp.
    let w = Tensor::from_slice(&[1.0f32, me as f32, 3.0, me as f32], &[2, 2])?;
    Tensor::save_safetensors(&path, &[("w", &w)])?;
    let file = Weights::File(Safetensors::open(&path)?);
    let row = tp.my_rank()?;
    let part = file.part("w", &[2, 2], 0, (&tp, row..row + 1), Dtype::F32)?;
    let f = compile(move |x: Tensor| dp.all_reduce(x.neg()?, Reduce::Sum));
    let error = f.call(part).unwrap_err().to_string();
    let wanted = "expected tensor 0 of the arguments equal over dp, as its placement says, got different ones on rank 0 and on rank 2\n  at ";
    assert!(error.contains(wanted), "{error}");
    assert!(error.contains("\n  rank 0 has [[1, 0]]\n  rank 2 has [[1, 2]]\n"), "{error}");
    std::fs::remove_file(path).unwrap();
    Ok(())
}

fn e1_a_model_that_ranks_of_one_axis_share_and_those_of_another_do_not(mesh: Mesh) -> Result<()> {
    // 67 tokens, which two ranks do not divide.
    let config = Config::tiny();
    let alone = alone(|mesh| Llama::random(&config, &mesh, 3)?.generate(&[1, 2, 3], 6, None))?;
    let tp = mesh.axis("tp")?;
    let model = Llama::random(&config, &tp, 3)?;
    // What the embedding gives is equal on all ranks, and its type says so.
    let f = compile(|(table, tokens): (Embedding, Tensor)| {
        table.forward(&tokens)?.mul(2.0)?.sum_all()?.replicated()
    });
    let tokens = Tensor::from_iter([5i64, 66, 0, 17])?.replicated()?;
    let sum = f.call((model.embedding.clone(), tokens.clone()))?.item::<f32>()?;
    let eager = model.embedding.forward(&tokens)?.mul(2.0)?.sum_all()?.item::<f32>()?;
    assert_eq!(sum, eager);
    assert_eq!(Generator::new(model, config.places)?.generate(&[1, 2, 3], 6, None)?, alone);
    Ok(())
}
