//! Releases, with an engine that releases as late as it may: every plan gets along with it, and none without one of its
//! releases.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[allow(dead_code, reason = "its other tests use the rest")]
#[path = "../../runtime/tests/execute/ranks.rs"]
mod ranks;

use std::collections::BTreeMap;
use std::path::Path;

use consort_comm::spawn_with_heap;
use consort_ir::entity::Value;
use consort_ir::index::Index;
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{EvalCx, ExchangeStart, OpTable, peer_of};
use consort_ir::plan::NodePlan;
use consort_ir::program::{Func, Program};
use consort_ir::text::{Expect, parse, print, run_lines};
use consort_ir::tolerance;
use consort_ir::verify::hazards;
use consort_oracle::generate;
use consort_passes::Binding;
use consort_types::{Message, Rank, Rng};
use ranks::OneRank;

/// What the executor says of a write that meets a lease.
const LEASED: &str = "a line of the plan must say `release` before";

/// Runs one plan for each rank some times, with an engine that releases late; gives the last results.
fn late(
    mesh: &Mesh,
    plans: &[Func],
    inputs: &[Vec<Literal>],
    calls: usize,
) -> Vec<Result<Vec<Literal>, String>> {
    spawn_with_heap(plans.len(), 1 << 24, |all| {
        all.release_late();
        let me = all.rank();
        let mut rank = OneRank::new(mesh, all);
        let mut exec = rank.lower(&plans[me])?;
        let mut results = Vec::new();
        for _ in 0..calls {
            let mut args = rank.args(&plans[me], &inputs[me]);
            let outs = rank.run(&mut exec, &mut args)?;
            results = rank.tensors(outs)?;
        }
        Ok(results)
    })
}

/// A plan for each rank.
fn plans(
    program: &Program,
    func: &Func,
    inputs: &[Vec<Literal>],
    given: impl Fn(usize) -> bool,
) -> Option<Vec<Func>> {
    let symbols = consort_oracle::bind(&program.mesh, func, inputs).ok()?;
    let donated: Vec<bool> = (0..func.body.params.len()).map(given).collect();
    let plan = |(rank, symbols)| {
        let binding = Binding { rank: Rank(rank), symbols, donated: &donated };
        consort_passes::plan(&program.mesh, func, &binding).ok()
    };
    (0u32..).zip(&symbols).map(plan).collect()
}

/// Programs with inputs: those that tests of the planner run, and random ones.
fn samples(random: u64) -> Vec<(String, Program, String, Vec<Vec<Literal>>)> {
    let mut found = Vec::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/plan");
    for path in consort_filetests::cases(&folder).unwrap() {
        let (name, text) = (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
        let program = parse(&text, &OpTable::built_in()).unwrap().program;
        for line in run_lines(&text).unwrap() {
            let Ok(inputs) = line.inputs(&program) else { continue };
            found.push((name.clone(), program.clone(), line.func.clone(), inputs));
        }
    }
    for seed in 0..random {
        let program = generate::program(seed, 6 + seed as usize % 20);
        let inputs = generate::inputs(&program, seed);
        found.push((format!("seed {seed}"), program, "f".to_string(), inputs));
    }
    found
}

/// The annotated lines of the function's own block that have no blocks: their releases are for their own writes.
fn own_lines(func: &mut Func) -> Vec<&mut NodePlan> {
    let nodes = func.body.nodes.iter_mut().filter(|node| node.blocks.is_empty());
    nodes.filter_map(|node| node.plan.as_deref_mut()).collect()
}

/// Whether a start lends what its plan says: others are in its group, and each of its messages has a peer that is another
/// rank. (A plan has the releases of a rank that sends and receives, whatever its peers are.)
fn lends(mesh: &Mesh, func: &Func, start: Value, rank: Rank) -> bool {
    let Some(node) = func.body.nodes.iter().find(|node| node.results.first() == Some(&start)) else {
        return false;
    };
    let symbols = BTreeMap::new();
    let cx = EvalCx { mesh, rank, symbols: &symbols };
    let is_other = |message: &Message<Index>, over| {
        let members = mesh.members(over, rank).unwrap_or_default();
        peer_of(message, &cx, over, &members).is_ok_and(|peer| peer.is_some_and(|peer| peer != rank))
    };
    match node.op.as_op() {
        Some(ExchangeStart { send, recv, over }) => {
            send.iter().chain(recv).all(|message| is_other(message, *over))
        }
        None => node.op.effects().starts().is_some_and(|group| mesh.group_size(group) > 1),
    }
}

#[test]
fn no_release_can_be_left_out() {
    let (mut ran, mut all, mut caught, mut silent) = (0, 0, 0, Vec::new());
    let (mut alone, mut entries, mut entries_caught) = (0, 0, 0);
    for (seed, (name, program, func, inputs)) in (0..).zip(samples(120)) {
        let expected = consort_oracle::run(&program, &func, &inputs);
        let func = program.func(&func).unwrap();
        let given = Rng::new(seed).next_u64();
        let good = plans(&program, func, &inputs, |param| given >> param & 1 == 1);
        let (Ok(expected), Some(good)) = (&expected, good) else { continue };
        let text =
            |rank: usize| print(&Program { mesh: program.mesh.clone(), funcs: vec![good[rank].clone()] });
        ran += 1;
        let got = late(&program.mesh, &good, &inputs, 2);
        let tolerance = tolerance::of_func(func);
        for (rank, (got, expected)) in got.iter().zip(expected).enumerate() {
            let got =
                got.as_ref().unwrap_or_else(|error| panic!("{name}, rank {rank}: {error}\n{}", text(rank)));
            let same = expected.iter().zip(got).all(|(a, b)| Expect::close(a, b, tolerance));
            assert!(same && got.len() == expected.len(), "{name}, rank {rank}\n{}", text(rank));
        }
        for rank in 0..good.len() {
            let lines: Vec<(Vec<Value>, bool)> = own_lines(&mut good[rank].clone())
                .iter()
                .map(|plan| (plan.release.clone(), plan.entry))
                .collect();
            for (at, (starts, entry)) in lines.into_iter().enumerate() {
                for start in starts {
                    if !lends(&program.mesh, &good[rank], start, Rank(rank as u32)) {
                        alone += 1;
                        continue;
                    }
                    let mut plans = good.clone();
                    own_lines(&mut plans[rank])[at].release.retain(|other| *other != start);
                    all += 1;
                    match &late(&program.mesh, &plans, &inputs, 1)[rank] {
                        Err(error) if error.contains(LEASED) => caught += 1,
                        got => silent
                            .push(format!("{name}, rank {rank}: release {start}: {got:?}\n{}", text(rank))),
                    }
                }
                if entry {
                    let mut plans = good.clone();
                    own_lines(&mut plans[rank])[at].entry = false;
                    assert!(
                        !hazards(&program.mesh, &plans[rank]).is_empty(),
                        "{name}, rank {rank}\n{}",
                        text(rank)
                    );
                    entries += 1;
                    let got = &late(&program.mesh, &plans, &inputs, 2)[rank];
                    entries_caught += usize::from(got.as_ref().is_err_and(|error| error.contains(LEASED)));
                }
            }
        }
    }
    println!(
        "{ran} plans, {all} releases, {caught} caught, {alone} skipped of starts that lend nothing; \
         {entries} older, {entries_caught} caught"
    );
    assert!(silent.is_empty(), "{} of {all} are not caught\n{}", silent.len(), silent.join("\n"));
    assert!(all > 40 && entries_caught > 20);
}
