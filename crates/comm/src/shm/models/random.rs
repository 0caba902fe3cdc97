//! Random programs of four members in random orders, under shuttle. `mod.rs` says how to run it.
//!
//! All members run the same list of operations, a few in flight at once, wait for them in an order of their own and
//! compare what they get with plain loops. Sizes are such that parts of different members do not share a mark.

use std::sync::Arc;

use consort_types::{Dtype, Reduce, Route};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

use super::futex::rung;
use super::ranks::{never, run};
use crate::{Buffer, Buffers, CommError, Group, Message};

const N: usize = 4;
/// Operations of a program, and how many are in flight at once.
const OPS: usize = 6;
const FLIGHT: usize = 3;
const HEAP: usize = 8 << 10;
/// Steps after which a program is considered hung. None needs a tenth of them.
const STEPS: usize = 200_000;

const KINDS: [Start; 9] = [
    all_reduce,
    all_gather,
    reduce_scatter,
    broadcast,
    all_to_all,
    ring,
    exchange,
    all_reduce_common,
    broadcast_common,
];

/// Places in `KINDS`.
const RING: usize = 5;
const EXCHANGE: usize = 6;
const BROADCAST_COMMON: usize = 8;

/// Starts an operation: its number, bytes of a part, and a root. What it returns waits for it and checks the result.
type Start = fn(&Group, usize, usize, usize) -> Result<Finish, CommError>;
type Finish = Box<dyn FnOnce() -> Result<(), CommError>>;

/// An operation of a program: which kind, bytes of a part, and a root.
type Step = (usize, usize, usize);

fn program() -> Vec<Step> {
    let mut random = thread_rng();
    let step = |_| (random.gen_range(0..KINDS.len()), 8 * random.gen_range(1..20), random.gen_range(0..N));
    (0..OPS).map(step).collect()
}

/// The byte that a rank contributes to an operation, at an offset.
fn given(rank: usize, op: usize, at: usize) -> u8 {
    (rank * 31 + op * 7 + at / 8 + 1) as u8
}

fn sum(op: usize, at: usize) -> u8 {
    (0..N).fold(0, |sum: u8, rank| sum.wrapping_add(given(rank, op, at)))
}

fn operand(group: &Group, op: usize, len: usize) -> Result<Buffer, CommError> {
    group.heap().alloc_from(&(0..len).map(|at| given(group.rank(), op, at)).collect::<Vec<_>>())
}

fn compare(bytes: &[u8], want: impl Fn(usize) -> u8) {
    assert!(
        bytes.iter().enumerate().all(|(at, byte)| *byte == want(at)),
        "another result than the loops give"
    );
}

/// Waits for an operation, checks the last buffer as its result, and overwrites all buffers, which peers may have read.
fn finish(pending: crate::Pending, want: impl Fn(usize) -> u8 + 'static) -> Result<Finish, CommError> {
    Ok(Box::new(move || {
        let buffers = pending.wait(never())?;
        compare(&buffers.last().expect("a result").bytes().expect("it is over"), want);
        spoil(buffers)
    }))
}

fn spoil(buffers: Buffers) -> Result<(), CommError> {
    buffers.into_iter().try_for_each(|mut buffer| buffer.bytes_mut(never()).map(|mut bytes| bytes.fill(0xee)))
}

fn all_reduce(group: &Group, op: usize, part: usize, _: usize) -> Result<Finish, CommError> {
    finish(group.all_reduce(operand(group, op, part)?, Dtype::U8, Reduce::Sum)?, move |at| sum(op, at))
}

fn all_gather(group: &Group, op: usize, part: usize, _: usize) -> Result<Finish, CommError> {
    let result = group.heap().alloc(N * part)?;
    finish(group.all_gather(operand(group, op, part)?, result, 1)?, move |at| given(at / part, op, at % part))
}

fn reduce_scatter(group: &Group, op: usize, part: usize, _: usize) -> Result<Finish, CommError> {
    let (operand, result) = (operand(group, op, N * part)?, group.heap().alloc(part)?);
    let start = group.rank() * part;
    finish(group.reduce_scatter(operand, result, Dtype::U8, Reduce::Sum, 1)?, move |at| sum(op, start + at))
}

fn broadcast(group: &Group, op: usize, part: usize, root: usize) -> Result<Finish, CommError> {
    finish(group.broadcast(operand(group, op, part)?, root)?, move |at| given(root, op, at))
}

fn all_to_all(group: &Group, op: usize, part: usize, _: usize) -> Result<Finish, CommError> {
    let (operand, result) = (operand(group, op, N * part)?, group.heap().alloc(N * part)?);
    let start = group.rank() * part;
    let pending = group.all_to_all(operand, result, &[part; N], &[part; N])?;
    finish(pending, move |at| given(at / part, op, start + at % part))
}

fn ring(group: &Group, op: usize, part: usize, by: usize) -> Result<Finish, CommError> {
    let from = (group.rank() + N - by) % N;
    let result = group.heap().alloc(part)?;
    let pending = group.permute(operand(group, op, part)?, result, &Route::Ring(by as i64))?;
    finish(pending, move |at| given(from, op, at))
}

fn exchange(group: &Group, op: usize, part: usize, by: usize) -> Result<Finish, CommError> {
    let (to, from) = ((group.rank() + by) % N, (group.rank() + N - by) % N);
    let message = |peer, buffer| vec![Message::new(peer, op as u64 % 2, buffer)];
    let (sends, receives) =
        (message(to, operand(group, op, part)?), message(from, group.heap().alloc(part)?));
    finish(group.exchange(sends, receives)?, move |at| given(from, op, at))
}

fn all_reduce_common(group: &Group, op: usize, part: usize, _: usize) -> Result<Finish, CommError> {
    let pending = group.all_reduce_common(operand(group, op, part)?, Dtype::U8, Reduce::Sum)?;
    Ok(Box::new(move || {
        let (operands, common) = pending.wait(never())?;
        compare(common.bytes(), |at| sum(op, at));
        spoil(operands)
    }))
}

fn broadcast_common(group: &Group, op: usize, part: usize, root: usize) -> Result<Finish, CommError> {
    let operand = (group.rank() == root).then(|| operand(group, op, part)).transpose()?;
    let pending = group.broadcast_common(operand, root)?;
    Ok(Box::new(move || {
        let (_, common) = pending.wait(never())?;
        compare(common.bytes(), |at| given(root, op, at));
        Ok(())
    }))
}

/// Runs a program on a member. `order` picks which of `n` pending operations it waits for next; `before` is called
/// before each operation, and may change it.
fn execute(
    group: &Group,
    program: &[Step],
    order: impl Fn(usize) -> usize,
    before: impl Fn(usize, Step) -> Option<Step>,
) -> Result<(), CommError> {
    let mut flight: Vec<Finish> = Vec::new();
    for (op, step) in program.iter().enumerate() {
        let Some((kind, part, root)) = before(op, *step) else { return Ok(()) };
        flight.push(KINDS[kind](group, op, part, root)?);
        if flight.len() == FLIGHT {
            flight.remove(order(FLIGHT))()?;
        }
    }
    while !flight.is_empty() {
        flight.remove(order(flight.len()))()?;
    }
    group.barrier()?.wait(never()).map(drop)
}

fn any_order(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

fn explore(scheduler: impl Scheduler + 'static, model: fn()) {
    let mut config = Config::new();
    config.stack_size = 1 << 17;
    config.max_steps = MaxSteps::FailAfter(STEPS);
    config.silence_warnings = true;
    config.failure_persistence = FailurePersistence::None;
    Runner::new(scheduler, config).run(model);
}

/// Random schedules, and schedules with few preemptions.
fn explore_both(model: fn()) {
    explore(RandomScheduler::new_from_seed(1, 3000), model);
    explore(PctScheduler::new_from_seed(2, 3, 3000), model);
}

#[test]
fn programs_give_what_loops_give() {
    explore_both(|| {
        let program = program();
        run(N, HEAP, move |group, _| {
            execute(&group, &program, any_order, |_, step| Some(step)).expect("nobody fails");
        });
    });
}

#[test]
fn no_program_needs_the_end_of_a_turn_to_go_on() {
    rung(|| {
        explore_both(|| {
            let program = program();
            run(N, HEAP, move |group, _| {
                execute(&group, &program, |_| 0, |_, step| Some(step)).expect("nobody fails");
            });
        });
    });
}

#[test]
fn all_others_learn_of_a_death() {
    explore_both(|| {
        let (program, dies, at) = (program(), any_order(N), any_order(OPS));
        let outcomes = run(N, HEAP, move |group, alarm| {
            let rank = group.rank();
            let before = |op, step| {
                if (rank, op) == (dies, at) {
                    alarm.raise(rank);
                    return None;
                }
                Some(step)
            };
            let outcome = execute(&group, &program, any_order, before);
            if rank == dies {
                // A dead rank does not leave cleanly.
                std::mem::forget(group);
            }
            outcome
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let panicked = CommError::Panicked { rank: dies };
            match outcome {
                Ok(()) => assert_eq!(rank, dies),
                // Another survivor may report it first. Recorders of models have no room for its text.
                Err(CommError::Elsewhere { culprits, .. }) => assert_eq!(culprits, [dies], "rank {rank}"),
                Err(error) => assert_eq!(error, panicked, "rank {rank}"),
            }
        }
    });
}

#[test]
fn all_learn_that_one_called_something_else() {
    explore_both(|| {
        let (program, differs, at) = (Arc::new(program()), any_order(N), any_order(OPS));
        let list = Arc::clone(&program);
        let outcomes = run(N, HEAP, move |group, _| {
            let rank = group.rank();
            let before = |op, (kind, part, root): Step| {
                Some((kind, if (rank, op) == (differs, at) { part + 8 } else { part }, root))
            };
            execute(&group, &list, any_order, before)
        });
        // The length of a common broadcast is the root's, and a member that sends to itself differs from nobody.
        let unseen = matches!(program[at], (BROADCAST_COMMON, ..) | (RING | EXCHANGE, _, 0));
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let found = matches!(
                outcome,
                Err(CommError::Mismatch { .. }
                    | CommError::Message { .. }
                    | CommError::Splits { .. }
                    | CommError::Elsewhere { .. })
            );
            assert!(found || unseen && outcome.is_ok(), "rank {rank}: {outcome:?}");
        }
    });
}
