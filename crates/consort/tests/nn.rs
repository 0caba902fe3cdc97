//! The cases of tensor-parallel layers on ranks that are threads.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "nn/cases.rs"]
mod cases;
#[path = "processes/sums.rs"]
mod sums;

use consort::nn::{Config, Embedding, Llama, Shards, share};
use consort::{Dtype, Init, Mesh, Result, Tensor, compile, spawn};

fn on(init: &Init, n: usize, case: fn(Mesh) -> Result<()>) {
    for (rank, outcome) in init.spawn(n, case).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
    }
}

/// Runs the cases whose names begin with the prefix.
fn run(prefix: &str) {
    for (_, sizes, case) in cases::CASES.iter().filter(|(name, ..)| name.starts_with(prefix)) {
        sizes.iter().for_each(|n| on(&Init::new(), *n, *case));
    }
    for (_, case) in cases::PLACED.iter().filter(|(name, _)| name.starts_with(prefix)) {
        on(&Init::new().axes(&[("dp", 2), ("tp", 2)]), 4, *case);
    }
}

macro_rules! rows {
    ($($row:ident)*) => {
        /// The rows of the specification that have a test here.
        const ROWS: &[&str] = &[$(stringify!($row)),*];

        $(
            #[test]
            fn $row() {
                run(concat!(stringify!($row), "_"));
            }
        )*
    };
}

rows!(a14 e1 e2 e4);

/// A case whose row is not listed would silently not run.
#[test]
fn every_case_belongs_to_a_row() {
    let names =
        cases::CASES.iter().map(|(name, ..)| *name).chain(cases::PLACED.iter().map(|(name, _)| *name));
    let row = |name: &str| name.split('_').next().unwrap_or_default().to_string();
    let missing: Vec<&str> = names.filter(|name| !ROWS.contains(&&*row(name))).collect();
    assert!(missing.is_empty(), "no test runs {missing:?}");
}

/// The errors of all ranks.
fn errors<T>(init: &Init, n: usize, case: impl Fn(Mesh) -> Result<T> + Sync) -> Vec<String> {
    let outcomes = init.spawn(n, |mesh| case(mesh).map(drop));
    outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect()
}

#[test]
fn tokens_outside_of_the_vocabulary_are_refused() {
    let call = |n: usize, is_compiled: bool, tokens: [i64; 2], targets: [i64; 2]| {
        spawn(n, move |mesh| {
            let model = Llama::random(&Config::tiny(), &mesh, 1)?;
            let tensor = |list: [i64; 2]| Tensor::from_slice(&list, &[1, 2]);
            let args = (model, tensor(tokens)?, tensor(targets)?);
            let loss = |(model, tokens, targets): (Llama, Tensor, Tensor)| model.loss(&tokens, &targets);
            let loss = if is_compiled { compile(loss).call(args)? } else { loss(args)? };
            loss.item::<f32>()
        })
    };
    for n in [1, 2, 3] {
        for is_compiled in [false, true] {
            assert!(call(n, is_compiled, [0, 66], [66, 0]).into_iter().all(|loss| loss.is_ok()));
            for bad in [-100, -1, 67, 999] {
                for (tokens, targets) in [([1, bad], [2, 3]), ([1, 2], [bad, 3])] {
                    for outcome in call(n, is_compiled, tokens, targets) {
                        let error = outcome.unwrap_err().to_string();
                        assert!(error.contains(&format!("expected places in 0..67, got {bad}")), "{error}");
                        assert!(error.contains("nn.rs:"), "{error}");
                    }
                }
            }
        }
        // The layer alone, with rows that ranks do not divide equally.
        for bad in [-1, 5] {
            let table = |mesh: &Mesh| -> Result<Embedding> {
                let own = share(5, mesh.my_rank()?, n);
                let table = Tensor::ones(Dtype::F32, &[own.len(), 3])?;
                let sizes = (0..n).map(|member| share(5, member, n).len()).collect();
                Ok(Embedding { table, sizes, group: (**mesh).clone() })
            };
            let places = || Tensor::from_iter([0i64, bad]);
            let rows = errors(&Init::new(), n, |mesh| table(&mesh)?.forward(&places()?)?.to_vec::<f32>());
            let loss = errors(&Init::new(), n, |mesh| {
                table(&mesh)?.cross_entropy(&Tensor::ones(Dtype::F32, &[2, 3])?, &places()?)?.item::<f32>()
            });
            for error in rows.into_iter().chain(loss) {
                assert!(error.contains(&format!("expected places in 0..5, got {bad}")), "{error}");
            }
        }
    }
}

#[test]
fn sizes_that_cannot_be_shared_are_refused() {
    let tiny = Config::tiny();
    for (config, wanted) in [
        (tiny.clone(), "llama: expected at most 4 members, for 4 heads of keys, got 6"),
        (Config { heads: 6, ..tiny.clone() }, "llama: expected the heads as a multiple of 4, got 6"),
        (
            Config { hidden: 30, ..tiny.clone() },
            "llama: expected the hidden dimension as a multiple of 4, got 30",
        ),
        (
            Config { heads: 8, kv_heads: 8, vocabulary: 5, ..tiny },
            "llama: expected at most 5 members, for 5 tokens, got 6",
        ),
    ] {
        for error in errors(&Init::new(), 6, |mesh| Llama::random(&config, &mesh, 1)) {
            assert!(
                error.contains(wanted) && error.contains("nn.rs:") && error.contains("note: "),
                "{error}"
            );
        }
    }
}

#[test]
fn ranks_with_different_keys_are_refused() {
    // Members of the group, which share the weights.
    for error in errors(&Init::new(), 2, |mesh| Llama::random(&Config::tiny(), &mesh, mesh.my_rank()? as i64))
    {
        assert!(error.contains("llama: expected the key 0 of member 0, got 1 on member 1"), "{error}");
        assert!(error.contains("nn.rs:"), "{error}");
    }
    // Ranks along another axis, which have the same part.
    let init = Init::new().axes(&[("dp", 2), ("tp", 2)]);
    let found = errors(&init, 4, |mesh| {
        let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
        let model = Llama::random(&Config::tiny(), &tp, dp.my_rank()? as i64)?;
        compile(|model: Llama| model.head.table.neg()).call(model)
    });
    for error in found {
        assert!(error.contains("equal over dp, as its placement says, got different ones"), "{error}");
    }
}

#[test]
fn the_field_in_which_arguments_differ_is_named() {
    // Rows of a weight that the ranks of tp do not divide: 2 and 3 of them, a size that `Shards` keeps as a number.
    let found = errors(&Init::new().axes(&[("dp", 2), ("tp", 2)]), 4, |mesh| {
        let own = share(5, mesh.axis("tp")?.my_rank()?, 2);
        let shards = Shards::of(&Tensor::ones(Dtype::F32, &[own.len(), 2])?, &mesh.axis("dp")?)?;
        compile(|shards: Shards<Tensor>| shards.whole()).call(shards)
    });
    for error in found {
        assert!(error.contains("the kinds of its arguments must be the same on all ranks"), "{error}");
        assert!(error.contains("\n  ranks 0,2: `sizes` 2\n  ranks 1,3: `sizes` 3"), "{error}");
    }
}
