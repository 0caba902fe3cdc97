//! The example programs, on ranks that are threads: their results equal those of plain loops or of one op, eager and
//! compiled.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Mesh, Result, Steady, Tensor, compile, tolerance};
use consort_examples::{conv, halo, moe, ring_attention};

/// Runs `f` on `n` ranks.
fn on(n: usize, f: impl Fn(Mesh) -> Result<()> + Sync) {
    for (rank, outcome) in consort::spawn(n, f).into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
    }
}

#[test]
fn c3_stencils_are_those_of_one_rank() {
    for (n, along) in [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)] {
        on(n, |mesh| {
            let mut grid = halo::Sharing::new(&mesh, along, false)?;
            for periodic in [false, true] {
                grid.periodic = periodic;
                let own = grid.clone();
                let step = compile(move |x: Tensor| halo::step(&own, x));
                let (mut eager, mut compiled) = (halo::start(&grid, 5, 4)?, halo::start(&grid, 5, 4)?);
                let before = mesh.copied_bytes();
                for _ in 0..4 {
                    eager = halo::step(&grid, eager)?;
                }
                let copied = mesh.copied_bytes() - before;
                for _ in 0..4 {
                    compiled = step.call(compiled)?;
                }
                let expected = halo::plain(&grid, 5, 4, 4)?;
                assert_eq!(halo::cells(&eager)?, expected, "{n} {along} {periodic}");
                assert_eq!(halo::cells(&compiled)?, expected, "{n} {along} {periodic}");
                step.expect_steady(Steady::graphs(1))?;
                // Rows are sent and received in place. Columns have gaps: the two that are sent are packed, and so
                // are those of an open border, for which nothing is received. Both halo columns go back into the array.
                let me = grid.along.my_rank()?;
                let open = if periodic { 0 } else { u64::from(me == 0) + u64::from(me == along - 1) };
                let columns = if periodic || along > 1 { (2 + open + 2) * 5 * 4 } else { 0 };
                assert_eq!(copied, 0, "{n} {along} {periodic}");
                assert_eq!(step.explain().graphs[0].copied_bytes, columns, "{}", step.explain());
                assert_eq!(step.stats().copied_bytes, 4 * columns, "{}", step.explain());
            }
            Ok(())
        });
    }
}

fn close(got: &[f32], expected: &[f32]) {
    let off = tolerance::difference(expected, got);
    assert!(off <= tolerance::of_runs(Dtype::F32), "off by {off:e}: {got:?} and {expected:?}");
}

#[test]
fn c4_ring_attention_is_attention() {
    for (n, causal) in [1, 2, 3, 4].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        on(n, |mesh| {
            let group = mesh.clone();
            let ring = compile(move |(q, k, v): (Tensor, Tensor, Tensor)| {
                ring_attention::ring_attention(&group, &q, k, v, causal, 4)
            });
            let part = |key| ring_attention::part(&mesh, 2, 6, 8, key);
            let eager = ring_attention::ring_attention(&mesh, &part(1)?, part(2)?, part(3)?, causal, 4)?;
            let expected = ring_attention::plain(&mesh, 2, 6, 8, causal)?;
            close(&eager.to_vec::<f32>()?, &expected);
            for _ in 0..2 {
                close(&ring.call((part(1)?, part(2)?, part(3)?))?.to_vec::<f32>()?, &expected);
            }
            ring.expect_steady(Steady::graphs(1))?;
            // Keys and values are sent and received in place.
            assert_eq!(ring.stats().copied_bytes, 0, "{}", ring.explain());
            // The exchange is pending while the queries attend to the local keys.
            let plan = ring.explain().graphs[0].plan.clone().unwrap();
            let lines: Vec<&str> = plan.lines().collect();
            let at = |what: &str| lines.iter().position(|line| line.contains(what));
            if let (Some(start), Some(wait)) = (at("exchange_start"), at("= wait")) {
                let products = lines[start..wait].iter().filter(|line| line.contains("= matmul"));
                assert_eq!(products.count(), 4, "{plan}");
            }
            Ok(())
        });
    }
}

#[test]
fn c8_convolutions_are_those_of_one_rank() {
    let cases = [
        (vec![2, 3, 6], vec![4, 3, 5]),
        (vec![1, 2, 5], vec![3, 2, 1]),
        (vec![2, 3, 5, 4], vec![2, 3, 3, 3]),
    ];
    for (n, (own, kernel)) in [1, 2, 3, 4].into_iter().flat_map(|n| cases.clone().map(|case| (n, case))) {
        on(n, |mesh| {
            let group = mesh.clone();
            let compiled = compile(move |(x, weight): (Tensor, Tensor)| conv::conv(&group, &x, &weight));
            for key in [1, 2] {
                let ((x, whole), weight) =
                    (conv::input(&mesh, &own, key)?, Tensor::normal(Dtype::F32, &kernel, 3)?);
                let expected = conv::plain(&mesh, &whole, &weight)?;
                close(&conv::conv(&mesh, &x, &weight)?.to_vec::<f32>()?, &expected);
                close(&compiled.call((x, weight))?.to_vec::<f32>()?, &expected);
            }
            compiled.expect_steady(Steady::graphs(1))
        });
    }
}

#[test]
fn a7_tokens_find_their_experts() {
    for n in [1, 2, 3, 4] {
        on(n, |mesh| {
            let own = moe::Expert::new(&mesh, 4, 6)?;
            let group = mesh.clone();
            let compiled =
                compile(move |(x, own): (Tensor, moe::Expert)| moe::moe(&group, &x, &own)).fullgraph(true);
            for round in 0..4 {
                let x = moe::tokens(&mesh, 9, 4, round)?;
                let expected = moe::plain(&mesh, &x, &own)?;
                close(&moe::moe(&mesh, &x, &own)?.to_vec::<f32>()?, &expected);
                close(&compiled.call((x, own.clone()))?.to_vec::<f32>()?, &expected);
            }
            compiled.expect_steady(Steady::graphs(1))
        });
    }
}
