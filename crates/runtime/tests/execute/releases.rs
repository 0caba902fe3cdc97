//! Releases of leases that are older than the call, and the clock by which waits end. `cli/tests/releases.rs` drops each
//! release of the sample plans.

use std::time::{Duration, Instant};

use consort_comm::spawn_with_heap;
use consort_runtime::execute::ArgValue;
use consort_types::Rank;

use super::ranks::OneRank;
use super::words::{floats, plan};

/// What the executor says of a write that meets a lease.
const LEASED: &str = "a line of the plan must say `release` before";

/// An argument that the caller gave away is written in place, while a peer may still read it for an earlier operation.
#[test]
fn an_older_lease_is_waited_for() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2] @arg0+0x0 donated) -> f32[2]
plan (rank 0, arg0: 0x8) {
    v1 = neg v0 : f32[2] @arg0+0x0 reuse v0 release entry
    return v1
}
";
    for (text, waits) in [(text.to_string(), true), (text.replace(" release entry", ""), false)] {
        let program = plan(&text);
        let results = spawn_with_heap(2, 1 << 22, |all| {
            all.release_late();
            let mut rank = OneRank::new(&program.mesh, all.clone());
            let mut func = program.funcs[0].clone();
            func.plan.as_mut().unwrap().rank = Rank(all.rank() as u32);
            let mut exec = rank.lower(&func)?;
            let mut args = rank.args(&func, &[floats(&[1.0, 2.0])]);
            let ArgValue::Tensor { buffer, .. } = &args[0] else { panic!("a tensor") };
            let result = all.heap().alloc(16).unwrap();
            let until = Instant::now() + Duration::from_secs(20);
            let gathered = all.all_gather(buffer.clone(), result, 1).unwrap().wait(until).unwrap();
            assert_eq!(gathered.len(), 2);
            assert!(!buffer.is_released());
            let outs = rank.run(&mut exec, &mut args)?;
            rank.tensors(outs)
        });
        for result in results {
            match result {
                Ok(tensors) => assert!(waits && tensors[0].same(&floats(&[-1.0, -2.0]))),
                Err(error) => assert!(!waits && error.contains(LEASED), "{error}"),
            }
        }
    }
}

/// A wait ends by the clock of its context, and not by that of the machine.
#[test]
fn a_simulated_time_ends_a_wait() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2]{tp} @arg0+0x0) -> f32[2]
plan (rank 0, arg0: 0x8, out0: 0x8) {
    v1 = neg v0 : f32[2]{tp} @out0+0x0
    v2 = all_reduce_start[reduce=sum, over=tp] v1 : pending<f32[2]> @out0+0x0 reuse v1 queue tp #0 lease v1
    v3 = wait v2 : f32[2] @out0+0x0
    return v3
}
";
    let program = plan(text);
    let (asked, asks) = std::sync::mpsc::channel::<()>();
    let asks = std::sync::Mutex::new(asks);
    let errors = spawn_with_heap(2, 1 << 22, |all| {
        if all.rank() == 1 {
            // It stays until the other rank has given up.
            asks.lock().unwrap().recv().unwrap();
            return String::new();
        }
        // An hour from an hour and a second ago on.
        let past = || Instant::now() - Duration::from_secs(3601);
        let mut rank = OneRank::new(&program.mesh, all);
        (rank.timeout, rank.clock) = (Duration::from_secs(3600), &past);
        let mut exec = rank.lower(&program.funcs[0]).unwrap();
        let mut args = rank.args(&program.funcs[0], &[floats(&[1.0, 2.0])]);
        let error = rank.run(&mut exec, &mut args).err().unwrap();
        asked.send(()).unwrap();
        error
    });
    assert!(errors[0].contains("the deadline passed"), "{}", errors[0]);
}
