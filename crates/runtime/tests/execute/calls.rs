//! Repeated calls of one plan: memory, waiting, and failing calls.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use consort_comm::{Buffer, spawn_with_heap};
use consort_ir::literal::Literal;
use consort_ir::program::Func;
use consort_runtime::execute::{ArgValue, Out, OutTensor};
use consort_types::Rank;

use super::ranks::{OneRank, tensor};
use super::words::{floats, plan};

/// Reduces and gathers a kilobyte: 16 KiB of results, half of it by communication in memory that is kept.
const LOOP: &str = "mesh (tp: 2)

func @f(v0: f32[1024]{tp} @arg0+0x0) -> (f32[1024]{tp}, f32[2048])
plan (rank 0, arg0: 0x1000, arena: 0x1000, heap: 0x1000, out0: 0x1000, out1: 0x2000) {
    v1 = neg v0 : f32[1024]{tp} @heap+0x0
    v2 = all_gather_start[dims=[0], over=tp] v0 : pending<f32[2048]> @out1+0x0 queue tp #0 lease v0 ; model.rs:4
    v3 = all_reduce_start[reduce=sum, over=tp] v1 : pending<f32[1024]> @heap+0x0 reuse v1 queue tp #1 lease v1 ; model.rs:5
    v4 = add v0, v0 : f32[1024]{tp} @arena+0x0
    v5 = wait v3 : f32[1024] @heap+0x0
    v6 = add v5, v4 : f32[1024]{tp} @out0+0x0 release v3
    v7 = wait v2 : f32[2048] @out1+0x0
    return v6, v7
}
";

fn for_rank(func: &Func, rank: usize) -> Func {
    let mut func = func.clone();
    func.plan.as_mut().unwrap().rank = Rank(rank as u32);
    func
}

fn buffers(outs: &[Out]) -> Vec<Buffer> {
    let one =
        |out: &Out| if let Out::Tensor(OutTensor { buffer, .. }) = out { Some(buffer.clone()) } else { None };
    outs.iter().filter_map(one).collect()
}

#[test]
fn a_thousand_calls_take_no_more_memory_than_one() {
    let program = plan(LOOP);
    // 4 KiB of argument, 8 of memory, 12 of results, and headers: twice the results fit, three times do not.
    let results = spawn_with_heap(2, 40 << 10, |all| {
        let me = all.rank();
        let mut rank = OneRank::new(&program.mesh, all);
        let func = for_rank(&program.funcs[0], me);
        let mut exec = rank.lower(&func).unwrap();
        let input = |call: usize| vec![(1 + me) as f64 + call as f64; 1024];
        let (mut addresses, mut kept) = (Vec::new(), Vec::new());
        for call in 0..1000 {
            let mut args = rank.args(&func, &[floats(&input(call))]);
            let outs = rank.run(&mut exec, &mut args)?;
            addresses.extend(buffers(&outs).iter().map(|buffer| buffer.bytes().unwrap().as_ptr().addr()));
            // Some results are kept through the next call.
            kept = if call % 100 == 7 { outs } else { Vec::new() };
            if let [Out::Tensor(own), Out::Tensor(all)] = &kept[..] {
                let expected = 2.0 * input(call)[0] - (3.0 + 2.0 * call as f64);
                assert!(tensor(own).same(&floats(&vec![expected; 1024])), "call {call}");
                let expected = [vec![1.0 + call as f64; 1024], vec![2.0 + call as f64; 1024]].concat();
                assert!(tensor(all).same(&floats(&expected)), "call {call}");
            }
        }
        drop(kept);
        addresses.sort_unstable();
        addresses.dedup();
        Ok::<_, String>(addresses.len())
    });
    for places in results {
        // Each of two results keeps its address until a caller holds it, and then gets another.
        assert!(places.unwrap() <= 6);
    }
}

#[test]
fn results_that_are_held_are_not_written_again() {
    let program = plan(LOOP);
    spawn_with_heap(2, 1 << 22, |all| {
        let me = all.rank();
        let mut rank = OneRank::new(&program.mesh, all);
        let func = for_rank(&program.funcs[0], me);
        let mut exec = rank.lower(&func).unwrap();
        let mut held = Vec::new();
        for call in 0..8 {
            let mut args = rank.args(&func, &[floats(&vec![call as f64; 1024])]);
            held.push(rank.run(&mut exec, &mut args).unwrap());
        }
        for (call, outs) in held.into_iter().enumerate() {
            let tensors = rank.tensors(outs).unwrap();
            assert!(tensors[0].same(&floats(&vec![0.0; 1024])));
            assert!(tensors[1].same(&floats(&vec![call as f64; 2048])));
        }
    });
}

#[test]
fn an_argument_is_waited_for_when_it_is_needed() {
    let text = "mesh ()

func @f(v0: f32[1] @arg0+0x0, v1: f32[1] @arg1+0x0) -> (f32[1], f32[1])
plan (rank 0, arg0: 0x4, arg1: 0x4, out0: 0x4) {
    v2 = neg v0 : f32[1] @out0+0x0
    return v2, v1
}
";
    let program = plan(text);
    spawn_with_heap(1, 1 << 22, |all| {
        let mut rank = OneRank::new(&program.mesh, all);
        let func = &program.funcs[0];
        let mut exec = rank.lower(func).unwrap();
        let order = Rc::new(Cell::new(0));
        let mut args = rank.args(func, &[floats(&[1.0]), floats(&[2.0])]);
        for (i, arg) in args.iter_mut().enumerate() {
            let order = Rc::clone(&order);
            let ArgValue::Tensor { pending, .. } = arg else { panic!("tensors") };
            *pending = Some(Rc::new(move || {
                order.set(order.get() * 10 + i + 1);
                Ok(())
            }));
        }
        rank.run(&mut exec, &mut args).unwrap();
        assert_eq!(order.get(), 12);
        let ArgValue::Tensor { pending, .. } = &mut args[0] else { panic!("tensors") };
        *pending = Some(Rc::new(|| Err("it was lost".to_string())));
        assert_eq!(rank.run(&mut exec, &mut args).err().unwrap(), "neg: it was lost");
    });
}

/// What rank 0 reports when rank 1 makes `made` of three calls.
fn alone(made: usize, timeout: Duration) -> String {
    let program = plan(LOOP);
    let errors = spawn_with_heap(2, 1 << 22, |all| {
        let me = all.rank();
        let mut rank = OneRank::new(&program.mesh, all);
        rank.timeout = timeout;
        let func = for_rank(&program.funcs[0], me);
        let mut exec = rank.lower(&func).unwrap();
        let input: Literal = floats(&[1.0; 1024]);
        for _ in 0..if me == 0 { 3 } else { made } {
            let mut args = rank.args(&func, std::slice::from_ref(&input));
            if let Err(error) = rank.run(&mut exec, &mut args) {
                return error;
            }
        }
        if me == 1 && timeout < Duration::from_secs(1) {
            std::thread::sleep(3 * timeout);
        }
        String::new()
    });
    errors[0].clone()
}

#[test]
fn a_rank_that_does_not_come_is_an_error_in_time() {
    let start = Instant::now();
    let error = alone(1, Duration::from_millis(300));
    assert!(error.contains("the deadline passed"), "{error}");
    // The last start of rank 1 was the other start of its only call; the error names the user's line.
    assert!(error.contains("rank 1") && error.contains("model.rs:5"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_rank_that_has_left_is_an_error_at_once() {
    let start = Instant::now();
    let error = alone(2, Duration::from_secs(20));
    // Rank 0 may or may not have seen the call that rank 1 left.
    let said = ["rank 1 left the group before", "rank 1 left the group without making this call"];
    assert!(said.iter().any(|said| error.contains(said)), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}
