//! Mutated plans: the checker must refuse every one whose results differ under any timing.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod planned;

use std::collections::BTreeMap;

use consort_ir::entity::Value;
use consort_ir::mesh::Mesh;
use consort_ir::plan::{NodePlan, Place};
use consort_ir::program::{Block, Func, Program};
use consort_ir::verify::verify;
use consort_oracle::generate;
use consort_oracle::plan::{Timing, run};
use consort_types::{Rank, Rng};
use planned::{plans, refused, same, seeds, text};

/// Every annotated line, those in blocks too.
fn lines<'a>(block: &'a mut Block, found: &mut Vec<&'a mut NodePlan>) {
    for node in &mut block.nodes {
        found.extend(node.plan.as_deref_mut());
        node.blocks.iter_mut().for_each(|inside| lines(inside, found));
    }
}

fn places(func: &mut Func) -> Vec<Place> {
    let mut found = Vec::new();
    lines(&mut func.body, &mut found);
    let mut places: Vec<Place> = found.iter().flat_map(|plan| plan.places.clone()).collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// Moves everything at one place to another.
fn move_all(block: &mut Block, from: Place, to: Place) {
    for place in &mut block.places {
        *place = if *place == from { to } else { *place };
    }
    for node in &mut block.nodes {
        for place in node.plan.iter_mut().flat_map(|plan| &mut plan.places) {
            *place = if *place == from { to } else { *place };
        }
        node.blocks.iter_mut().for_each(|inside| move_all(inside, from, to));
    }
}

fn shifted(place: Place, rng: &mut Rng) -> Place {
    let by = rng.pick(&[1, 2, 4, 8, 16, 64]);
    let offset = if rng.one_in(2) { place.offset + by } else { place.offset.saturating_sub(by) };
    Place { offset, ..place }
}

/// Makes one change to a plan; returns its kind, or `None` if there was nothing to change.
fn mutate(func: &mut Func, rng: &mut Rng) -> Option<&'static str> {
    let all = places(func);
    let kind = rng.below(8);
    if kind < 2 {
        let from = rng.pick(&all);
        let to = if kind == 0 { rng.pick(&all) } else { shifted(from, rng) };
        move_all(&mut func.body, from, to);
        return (from != to).then_some("moved everywhere");
    }
    if kind == 2 {
        let n = func.body.nodes.len();
        let at = rng.below(n.max(2) - 1);
        func.body.nodes.swap(at, (at + 1).min(n - 1));
        return Some("lines swapped");
    }
    if kind == 3 {
        let head = func.plan.as_mut()?;
        let at = rng.below(head.donated.len().max(1));
        return (at < head.donated.len()).then(|| head.donated.remove(at)).map(|_| "not given away");
    }
    let mut found = Vec::new();
    lines(&mut func.body, &mut found);
    found.retain(|plan| match kind {
        4 => !plan.release.is_empty(),
        5 => !plan.copies.is_empty(),
        _ => !plan.places.is_empty(),
    });
    let at = rng.below(found.len().max(1));
    let plan = found.into_iter().nth(at)?;
    match kind {
        4 => {
            let at = rng.below(plan.release.len());
            plan.release.remove(at);
            Some("release dropped")
        }
        5 => {
            plan.copies.pop();
            Some("copy dropped")
        }
        6 => {
            let at = rng.below(plan.places.len());
            let (from, other) = (plan.places[at], rng.pick(&all));
            plan.places[at] = if rng.one_in(2) { other } else { shifted(from, rng) };
            (plan.places[at] != from).then_some("moved once")
        }
        _ => {
            plan.view = !plan.view;
            Some("view or not")
        }
    }
}

/// Whether the verifier refuses it even without the hazard check.
fn malformed(mesh: &Mesh, plan: &Func) -> bool {
    !verify(&Program { mesh: mesh.clone(), funcs: vec![plan.clone()] }).is_empty()
}

#[test]
fn no_mutant_that_differs_is_accepted() {
    // Per kind of change: how many, how many of them refused, how many differ.
    let mut counts: BTreeMap<&'static str, [usize; 3]> = BTreeMap::new();
    for seed in seeds(200) {
        let program = generate::program(seed, 6 + seed as usize % 20);
        let inputs = generate::inputs(&program, seed);
        let mut rng = Rng::new(seed);
        let given = rng.next_u64();
        let good = plans(&program, &program.funcs[0], &inputs, |_, param| given >> param & 1 == 1);
        if places(&mut good[0].clone()).is_empty() {
            continue;
        }
        let expected = consort_oracle::run(&program, "f", &inputs).unwrap();
        for _ in 0..40 {
            let mut plans = good.clone();
            // The same change on every rank, or one on one rank.
            let change = rng.clone();
            let only = rng.below(2 * plans.len());
            let mut what = None;
            for (rank, plan) in plans.iter_mut().enumerate() {
                if only >= good.len() || only == rank {
                    what = mutate(plan, &mut change.clone()).or(what);
                }
            }
            rng.next_u64();
            let Some(what) = what else { continue };
            if plans.iter().any(|plan| malformed(&program.mesh, plan)) {
                continue;
            }
            let errors: Vec<String> = plans.iter().flat_map(|plan| refused(&program.mesh, plan)).collect();
            let timings = [Timing::Earliest, Timing::Latest].into_iter().chain([0, 3].map(Timing::Mixed));
            let differs =
                timings.into_iter().find_map(|timing| match run(&program.mesh, &plans, &inputs, timing) {
                    Ok(got) if same(&got, &expected) => None,
                    Ok(_) => Some(format!("{timing:?}: results differ")),
                    Err(error) => Some(format!("{timing:?}: {error}")),
                });
            let count = counts.entry(what).or_default();
            count[0] += 1;
            count[1] += usize::from(!errors.is_empty());
            count[2] += usize::from(differs.is_some());
            if let (Some(differs), true) = (differs, errors.is_empty()) {
                let rank = plans.iter().zip(&good).position(|(plan, good)| plan != good).unwrap_or(0);
                let (got, was) = (text(&program.mesh, &plans[rank]), text(&program.mesh, &good[rank]));
                panic!("seed {seed}, {what} on rank {rank}: {differs}\n{got}\nwas\n{was}");
            }
        }
    }
    let total = counts.values().fold([0; 3], |sum, count| [0, 1, 2].map(|i| sum[i] + count[i]));
    println!("changed: all, refused, different: {counts:#?}\n{total:?}");
    let programs = seeds(200).count();
    assert!(total[0] > 10 * programs && total[2] > total[0] / 8, "{total:?}");
}

/// The lines of the function's own block without nested blocks: their releases are for their own writes. A loop says
/// `release` for all that an iteration might write, and a block at its end for later lines.
fn own_lines(func: &mut Func) -> Vec<&mut NodePlan> {
    let nodes = func.body.nodes.iter_mut().filter(|node| node.blocks.is_empty());
    nodes.filter_map(|node| node.plan.as_deref_mut()).collect()
}

/// The size of the group of a start.
fn members(mesh: &Mesh, func: &Func, start: Value) -> u32 {
    let node = func.body.nodes.iter().find(|node| node.results.first() == Some(&start));
    node.and_then(|node| node.op.effects().starts()).map_or(1, |group| mesh.group_size(group))
}

/// A plan says `release` only where it must: the checker refuses every plan that lacks one, and in the plan oracle a peer
/// reads overwritten bytes. `cli/tests/releases.rs` has the executor.
#[test]
fn no_release_can_be_left_out() {
    let (mut all, mut differ) = (0, 0);
    for seed in seeds(200) {
        let program = generate::program(seed, 6 + seed as usize % 20);
        let inputs = generate::inputs(&program, seed);
        let given = Rng::new(seed).next_u64();
        let good = plans(&program, &program.funcs[0], &inputs, |_, param| given >> param & 1 == 1);
        let expected = consort_oracle::run(&program, "f", &inputs).unwrap();
        for rank in 0..good.len() {
            let lists: Vec<Vec<Value>> =
                own_lines(&mut good[rank].clone()).iter().map(|plan| plan.release.clone()).collect();
            for (at, start) in
                (0..).zip(lists).flat_map(|(at, list)| list.into_iter().map(move |start| (at, start)))
            {
                let mut plans = good.clone();
                own_lines(&mut plans[rank])[at].release.retain(|other| *other != start);
                let what = || {
                    format!("seed {seed}, rank {rank}: release {start}\n{}", text(&program.mesh, &good[rank]))
                };
                assert!(!refused(&program.mesh, &plans[rank]).is_empty(), "{}", what());
                // A group of one rank has no other readers.
                if members(&program.mesh, &good[rank], start) < 2 {
                    continue;
                }
                all += 1;
                let timing = Timing::Ahead(Rank(rank as u32));
                let got = run(&program.mesh, &plans, &inputs, timing);
                differ += usize::from(!got.is_ok_and(|got| same(&got, &expected)));
            }
        }
    }
    println!("{all} releases, {differ} of which the plan oracle finds where they are left out");
    // A write of the bytes that are there already does not show.
    assert!(seeds(200).count() < 200 || all > 100 && differ > all / 3, "{differ} of {all}");
}
