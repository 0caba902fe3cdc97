//! SPEC C2: the ring kernel gives one result in every order that its data and its starts allow, and the seeded bug is
//! detected in all of them.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod planned;

use consort_ir::entity::Value;
use consort_ir::literal::Literal;
use consort_ir::ops::OpTable;
use consort_ir::plan::{Place, Region, RegionKind};
use consort_ir::program::{Func, Node, Program};
use consort_ir::text::{parse, run_lines};
use consort_oracle::plan;
use consort_oracle::plan::Timing;
use consort_types::Rng;
use planned::{check, plans, refused, same, setting};

fn kernel(ranks: u32) -> (Program, Vec<Vec<Literal>>) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests/programs");
    let text = std::fs::read_to_string(format!("{folder}/c2-ring-kernel-on-{ranks}-ranks.csr")).unwrap();
    let program = parse(&text, &OpTable::built_in()).unwrap().program;
    let inputs = run_lines(&text).unwrap()[0].inputs(&program).unwrap();
    (program, inputs)
}

/// For each node, its predecessors: the definitions of its operands, and the previous start on its queue.
fn before(nodes: &[Node]) -> Vec<Vec<usize>> {
    let of = |at: usize| {
        let node = &nodes[at];
        let reads = |other: &Node| other.results.iter().any(|result| node.args.contains(result));
        let mut list: Vec<usize> = (0..at).filter(|other| reads(&nodes[*other])).collect();
        if let Some(group) = node.op.effects().starts() {
            list.extend((0..at).rev().find(|other| nodes[*other].op.effects().starts() == Some(group)));
        }
        list
    };
    (0..nodes.len()).map(of).collect()
}

/// The nodes that may run next.
fn next(before: &[Vec<usize>], order: &[usize]) -> Vec<usize> {
    let may = |at: &usize| !order.contains(at) && before[*at].iter().all(|other| order.contains(other));
    (0..before.len()).filter(may).collect()
}

/// Calls `f` with every legal order, up to `most`; returns how many there were.
fn every_order(
    before: &[Vec<usize>],
    order: &mut Vec<usize>,
    most: usize,
    f: &mut impl FnMut(&[usize], usize),
) -> usize {
    fn go(
        before: &[Vec<usize>],
        order: &mut Vec<usize>,
        most: usize,
        n: &mut usize,
        f: &mut impl FnMut(&[usize], usize),
    ) {
        if order.len() == before.len() {
            f(order, *n);
            *n += 1;
            return;
        }
        for at in next(before, order) {
            if *n < most {
                order.push(at);
                go(before, order, most, n, f);
                order.pop();
            }
        }
    }
    let mut n = 0;
    go(before, order, most, &mut n, f);
    n
}

fn ordered(program: &Program, order: &[usize]) -> Program {
    let mut program = program.clone();
    let nodes = &program.funcs[0].body.nodes;
    program.funcs[0].body.nodes = order.iter().map(|at| nodes[*at].clone()).collect();
    program
}

const TIMINGS: [Timing; 5] =
    [Timing::Earliest, Timing::Latest, Timing::Mixed(0), Timing::Mixed(1), Timing::Mixed(2)];

/// Plans one order and runs it; receive buffers are donated in every other one.
fn check_order(
    program: &Program,
    inputs: &[Vec<Literal>],
    order: &[usize],
    number: usize,
    timings: &[Timing],
) {
    let program = ordered(program, order);
    let func = &program.funcs[0];
    let plans = plans(&program, func, inputs, |_, param| number % 2 == 1 && param > 0);
    check(&program, func, &plans, inputs, timings, &format!("order {order:?}"));
}

#[test]
fn every_legal_order_on_two_and_three_ranks() {
    for ranks in [2, 3] {
        let (program, inputs) = kernel(ranks);
        let before = before(&program.funcs[0].body.nodes);
        let most = setting("CONSORT_SCHEDULES", 4000) as usize;
        let n = every_order(&before, &mut Vec::new(), most, &mut |order, number| {
            check_order(&program, &inputs, order, number, &TIMINGS);
        });
        println!("{n} orders on {ranks} ranks{}", if n < most { ", all there are" } else { "" });
        assert!(n > 1000);
    }
}

#[test]
fn random_orders_on_eight_ranks() {
    let (program, inputs) = kernel(8);
    let before = before(&program.funcs[0].body.nodes);
    let mut rng = Rng::new(8);
    let all: Vec<Timing> = TIMINGS.into_iter().chain((3..8).map(Timing::Mixed)).collect();
    for number in 0..60 {
        let mut order = Vec::new();
        while order.len() < before.len() {
            order.push(rng.pick(&next(&before, &order)));
        }
        check_order(&program, &inputs, &order, number, &all);
    }
}

/// The wait of the second exchange reads the buffer passed for the receive instead of the received one.
fn plant(plan: &mut Func) {
    let wait = plan.body.nodes.iter_mut().find(|node| node.results == [Value(13)]).unwrap();
    let places = &mut wait.plan.as_mut().unwrap().places;
    assert_ne!(places[0].region, Region::of(RegionKind::Arg(2)));
    *places = vec![Place { region: Region::of(RegionKind::Arg(2)), offset: 0 }];
}

#[test]
fn the_bug_of_the_seed_is_seen_in_every_order() {
    let (program, inputs) = kernel(3);
    let before = before(&program.funcs[0].body.nodes);
    let expected = consort_oracle::run(&program, "kernel", &inputs).unwrap();
    every_order(&before, &mut Vec::new(), 200, &mut |order, _| {
        let program = ordered(&program, order);
        let mut plans = plans(&program, &program.funcs[0], &inputs, |_, _| false);
        plans.iter_mut().for_each(plant);
        assert!(plans.iter().all(|plan| !refused(&program.mesh, plan).is_empty()), "{order:?}");
        let wrong = |timing: &Timing| {
            plan::run(&program.mesh, &plans, &inputs, *timing).map_or(true, |got| !same(&got, &expected))
        };
        assert!(TIMINGS.iter().any(wrong), "{order:?}");
    });
}
