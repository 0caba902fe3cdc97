//! The meaning of plan annotations: hand-written plans with hand-computed results.

use consort_comm::spawn_with_heap;
use consort_ir::literal::Literal;
use consort_ir::ops::OpTable;
use consort_ir::plan::{Region, RegionKind};
use consort_ir::program::{Func, Program};
use consort_ir::text::parse;
use consort_ir::verify::verify;
use consort_runtime::device::Cpu;
use consort_runtime::execute::{ArgValue, Exec, Out};
use consort_types::{Dtype, Rank};

use super::ranks::{OneRank, tensor};

/// A plan of one rank that verifies.
pub(crate) fn plan(text: &str) -> Program {
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    let errors: Vec<String> = verify(&program).iter().map(|error| error.headline()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    program
}

/// The same plan, for each rank.
fn for_rank(program: &Program, rank: usize) -> Func {
    let mut func = program.funcs[0].clone();
    func.plan.as_mut().unwrap().rank = Rank(rank as u32);
    func
}

pub(crate) fn floats(data: &[f64]) -> Literal {
    Literal::floats(Dtype::F32, vec![data.len()], data.to_vec())
}

fn rows(columns: usize, data: &[f64]) -> Literal {
    Literal::floats(Dtype::F32, vec![data.len() / columns, columns], data.to_vec())
}

/// Runs a plan on all its ranks; returns results, and bytes that were copied for communication.
fn run(text: &str, inputs: &[Vec<Literal>]) -> Vec<(Vec<Literal>, u64)> {
    let program = plan(text);
    let results = spawn_with_heap(inputs.len(), 1 << 22, |all| {
        let me = all.rank();
        let mut rank = OneRank::new(&program.mesh, all);
        let func = for_rank(&program, me);
        let mut exec = rank.lower(&func)?;
        let mut args = rank.args(&func, &inputs[me]);
        let outs = rank.run(&mut exec, &mut args)?;
        Ok::<_, String>((rank.tensors(outs)?, exec.copied_bytes()))
    });
    results.into_iter().map(|result| result.unwrap()).collect()
}

fn assert_runs(text: &str, inputs: &[Vec<Literal>], copied: u64, expected: &[Vec<Literal>]) {
    for (rank, ((got, bytes), expected)) in run(text, inputs).iter().zip(expected).enumerate() {
        let same = got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| a.same(b));
        assert!(same, "rank {rank}: expected {expected:?}, got {got:?}");
        assert_eq!(*bytes, copied, "rank {rank}");
    }
}

const TWO: [[f64; 2]; 2] = [[1.0, 2.0], [10.0, 20.0]];

fn two() -> Vec<Vec<Literal>> {
    TWO.iter().map(|data| vec![floats(data)]).collect()
}

#[test]
fn what_is_dead_is_reduced_where_it_lies() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2]{tp} @arg0+0x0) -> f32[2]
plan (rank 0, arg0: 0x8, out0: 0x8) {
    v1 = neg v0 : f32[2]{tp} @out0+0x0
    v2 = all_reduce_start[reduce=sum, over=tp] v1 : pending<f32[2]> @out0+0x0 reuse v1 queue tp #0 lease v1
    v3 = wait v2 : f32[2] @out0+0x0
    return v3
}
";
    let sum = vec![floats(&[-11.0, -22.0])];
    assert_runs(text, &two(), 0, &[sum.clone(), sum]);
}

#[test]
fn what_is_needed_is_copied_and_counted() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2]{tp} @arg0+0x0) -> (f32[2], f32[2]{tp})
plan (rank 0, arg0: 0x8, out0: 0x8) {
    v1 = all_reduce_start[reduce=sum, over=tp] v0 : pending<f32[2]> @out0+0x0 copy v0 (argument) queue tp #0 lease v0
    v2 = wait v1 : f32[2] @out0+0x0
    return v2, v0
}
";
    let sum = floats(&[11.0, 22.0]);
    assert_runs(text, &two(), 8, &[0, 1].map(|rank| vec![sum.clone(), floats(&TWO[rank])]));
    let error = lower_error(&text.replace(" copy v0 (argument)", ""));
    assert_eq!(error, "all_reduce: v0 lies elsewhere than the result, and the line has no `copy v0`");
}

#[test]
fn a_start_must_name_its_leases_and_the_next_number_of_its_queue() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2]{tp} @arg0+0x0) -> (f32[4], f32[4])
plan (rank 0, arg0: 0x8, out0: 0x10, out1: 0x10) {
    v1 = all_gather_start[dims=[0], over=tp] v0 : pending<f32[4]> @out0+0x0 queue tp #0 lease v0
    v2 = all_gather_start[dims=[0], over=tp] v0 : pending<f32[4]> @out1+0x0 queue tp #1 lease v0
    v3 = wait v1 : f32[4] @out0+0x0
    v4 = wait v2 : f32[4] @out1+0x0
    return v3, v4
}
";
    let both = || floats(&[1.0, 2.0, 10.0, 20.0]);
    assert_runs(text, &two(), 0, &[vec![both(), both()], vec![both(), both()]]);
    for (from, to, error) in [
        (" #0 lease v0", " #0", "all_gather: peers may read v0, and the line has no `lease v0`"),
        (" queue tp #0", "", "all_gather: the line has no `queue`"),
        ("queue tp #1", "queue tp #2", "all_gather: expected start #1 on its queue, got #2"),
        // A number that was used before.
        ("queue tp #1", "queue tp #0", "all_gather: expected start #1 on its queue, got #0"),
    ] {
        assert_eq!(lower_error(&text.replacen(from, to, 1)), error);
    }
}

/// The error of lowering a plan.
fn lower_error(text: &str) -> String {
    let program = parse(text, &OpTable::built_in()).unwrap().program;
    match Exec::lower(&program.mesh, &program.funcs[0], &Cpu::default()) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn results_must_outlive_the_call() {
    let text = "mesh ()

func @f(v0: f32[2] @arg0+0x0) -> f32[2]
plan (rank 0, arg0: 0x8, heap: 0x8) {
    v1 = neg v0 : f32[2] @heap+0x0
    return v1
}
";
    let error = lower_error(text);
    assert_eq!(error, "@f: result v1 lies in memory that is kept, where the next call writes");
    let program = text
        .replace(" @arg0+0x0", "")
        .replace(" @heap+0x0", "")
        .replace("plan (rank 0, arg0: 0x8, heap: 0x8) ", "");
    assert_eq!(lower_error(&program), "@f: expected a plan, got a program without places");
}

#[test]
fn a_donated_argument_is_written_and_returned() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2]{tp} @arg0+0x0 donated) -> f32[2]
plan (rank 0, arg0: 0x8) {
    v1 = all_reduce_start[reduce=sum, over=tp] v0 : pending<f32[2]> @arg0+0x0 reuse v0 queue tp #0 lease v0
    v2 = wait v1 : f32[2] @arg0+0x0
    return v2
}
";
    let program = plan(text);
    spawn_with_heap(2, 1 << 22, |all| {
        let me = all.rank();
        let mut rank = OneRank::new(&program.mesh, all);
        let func = for_rank(&program, me);
        let mut exec = rank.lower(&func).unwrap();
        let mut args = rank.args(&func, &two()[me]);
        let outs = rank.run(&mut exec, &mut args).unwrap();
        let [Out::Tensor(out)] = &outs[..] else { panic!("one tensor") };
        assert_eq!((out.region, exec.copied_bytes()), (Region::of(RegionKind::Arg(0)), 0));
        assert!(tensor(out).same(&floats(&[11.0, 22.0])));
        // It is the caller's own storage.
        let ArgValue::Tensor { buffer, .. } = &args[0] else { panic!("a tensor") };
        assert_eq!(buffer.bytes().unwrap()[..4], 11f32.to_le_bytes());
    });
}

#[test]
fn joins_move_only_what_is_not_at_its_place() {
    let concat = "mesh ()

func @f(v0: f32[2] @arg0+0x0) -> f32[6]
plan (rank 0, arg0: 0x8, out0: 0x18) {
    v1 = neg v0 : f32[2] @out0+0x0
    v2 = add v0, v0 : f32[2] @out0+0x10
    v3 = concat[dim=0] v1, v0, v2 : f32[6] @out0+0x0 reuse v1, v2
    return v3
}
";
    assert_runs(concat, &[vec![floats(&[1.0, 2.0])]], 0, &[vec![floats(&[-1.0, -2.0, 1.0, 2.0, 2.0, 4.0])]]);
    // A row lies in the result already; the base does not, and is copied around it.
    let update = "mesh ()

func @f(v0: f32[3,2] @arg0+0x0, v1: f32[1,2] @arg1+0x0) -> f32[3,2]
plan (rank 0, arg0: 0x18, arg1: 0x8, out0: 0x18) {
    v2 = neg v1 : f32[1,2] @out0+0x8
    v3 = update_slice[start=[1,0]] v0, v2 : f32[3,2] @out0+0x0 reuse v2
    return v3
}
";
    let base = || rows(2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let inputs = [vec![base(), rows(2, &[7.0, 8.0])]];
    assert_runs(update, &inputs, 0, &[vec![rows(2, &[1.0, 2.0, -7.0, -8.0, 5.0, 6.0])]]);
    // The base is in place, and a column is copied into it.
    let update = "mesh ()

func @f(v0: f32[3,2] @arg0+0x0 donated, v1: f32[2,1] @arg1+0x0) -> f32[3,2]
plan (rank 0, arg0: 0x18, arg1: 0x8) {
    v2 = update_slice[start=[1,1]] v0, v1 : f32[3,2] @arg0+0x0 reuse v0
    return v2
}
";
    let inputs = [vec![base(), rows(1, &[7.0, 8.0])]];
    assert_runs(update, &inputs, 0, &[vec![rows(2, &[1.0, 2.0, 3.0, 7.0, 5.0, 8.0])]]);
    // The new part is a view of the base: its elements interleave with those that are written.
    let update = "mesh ()

func @f(v0: f32[3,2] @arg0+0x0 donated) -> f32[3,2]
plan (rank 0, arg0: 0x18) {
    v1 = slice[start=[0,1], size=[3,1], step=[1,1]] v0 : f32[3,1] @arg0+0x0 view
    v2 = update_slice[start=[0,0]] v0, v1 : f32[3,2] @arg0+0x0 reuse v0
    return v2
}
";
    assert_runs(update, &[vec![base()]], 0, &[vec![rows(2, &[2.0, 2.0, 4.0, 4.0, 6.0, 6.0])]]);
}

#[test]
fn a_kernel_may_be_given_its_result_as_an_operand() {
    let text = "mesh ()

func @f(v0: f32[3] @arg0+0x0) -> f32[3]
plan (rank 0, arg0: 0xc, out0: 0xc) {
    v1 = neg v0 : f32[3] @out0+0x0
    v2 = add v1, v1 : f32[3] @out0+0x0 reuse v1
    v3 = mul v2, v0 : f32[3] @out0+0x0 reuse v2
    v4 = cumsum[dim=0] v3 : f32[3] @out0+0x0 reuse v3
    return v4
}
";
    assert_runs(text, &[vec![floats(&[1.0, 2.0, 3.0])]], 0, &[vec![floats(&[-2.0, -10.0, -28.0])]]);
}

#[test]
fn packing_for_communication_is_counted_once_and_nothing_else_is() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2,2]{tp} @arg0+0x0) -> (f32[4,1], f32[1,2]{tp}, f32[2]{tp})
plan (rank 0, arg0: 0x10, arena: 0x8, heap: 0x8, out0: 0x10, out1: 0x8, out2: 0x8) {
    v1 = slice[start=[0,0], size=[2,1], step=[1,1]] v0 : f32[2,1]{tp} @heap+0x0
    v2 = all_gather_start[dims=[0], over=tp] v1 : pending<f32[4,1]> @out0+0x0 queue tp #0 lease v1
    v3 = slice[start=[1,0], size=[1,2], step=[1,1]] v0 : f32[1,2]{tp} @arg0+0x0 view
    v4 = permute_start[route=ring(+1), missing=error, over=tp] v3 : pending<f32[1,2]{tp}> @out1+0x0 queue tp #1 lease v3
    v5 = slice[start=[0,1], size=[2,1], step=[1,1]] v0 : f32[2,1]{tp} @arena+0x0
    v6 = reshape[shape=[2]] v5 : f32[2]{tp} @arena+0x0 view
    v7 = neg v6 : f32[2]{tp} @out2+0x0
    v8 = wait v4 : f32[1,2]{tp} @out1+0x0
    v9 = wait v2 : f32[4,1] @out0+0x0
    return v9, v8, v7
}
";
    let inputs = [vec![rows(2, &[1.0, 2.0, 3.0, 4.0])], vec![rows(2, &[5.0, 6.0, 7.0, 8.0])]];
    let gathered = rows(1, &[1.0, 3.0, 5.0, 7.0]);
    let expected = [
        vec![gathered.clone(), rows(2, &[7.0, 8.0]), floats(&[-2.0, -4.0])],
        vec![gathered, rows(2, &[3.0, 4.0]), floats(&[-6.0, -8.0])],
    ];
    assert_runs(text, &inputs, 8, &expected);
}

#[test]
fn who_is_not_the_root_gets_zeros_where_its_operand_lay() {
    let text = "mesh (tp: 2)

func @f(v0: f32[2]{tp} @arg0+0x0) -> f32[2]{tp}
plan (rank 0, arg0: 0x8, out0: 0x8) {
    v1 = neg v0 : f32[2]{tp} @out0+0x0
    v2 = reduce_start[reduce=sum, root=1, over=tp] v1 : pending<f32[2]{tp}> @out0+0x0 reuse v1 queue tp #0 lease v1
    v3 = wait v2 : f32[2]{tp} @out0+0x0
    return v3
}
";
    assert_runs(text, &two(), 0, &[vec![floats(&[0.0, 0.0])], vec![floats(&[-11.0, -22.0])]]);
    // Also if the pending itself is returned.
    let text = text.replace("    v3 = wait v2 : f32[2]{tp} @out0+0x0\n    return v3", "    return v2");
    let text = text.replace("-> f32[2]{tp}\n", "-> pending<f32[2]{tp}>\n");
    assert_runs(&text, &two(), 0, &[vec![floats(&[0.0, 0.0])], vec![floats(&[-11.0, -22.0])]]);
}

#[test]
fn carries_that_change_places_do_not_overwrite_one_another() {
    let text = "mesh ()

func @f(v0: f32[2] @arg0+0x0, v1: f32[2] @arg1+0x0) -> (f32[2], f32[2], f32[3,2])
plan (rank 0, arg0: 0x8, arg1: 0x8, out0: 0x8, out1: 0x8, out2: 0x18) {
    v2, v3, v4 = scan[length=3, carries=2, slices=0] v0, v1 : f32[2], f32[2], f32[3,2] @out0+0x0 @out1+0x0 @out2+0x0 {
        body(v5: f32[2] @out0+0x0, v6: f32[2] @out1+0x0) {
            return v6, v5, v5
        }
    }
    return v2, v3, v4
}
";
    let (a, b) = (floats(&[1.0, 2.0]), floats(&[3.0, 4.0]));
    let stacked = rows(2, &[1.0, 2.0, 3.0, 4.0, 1.0, 2.0]);
    assert_runs(text, &[vec![a.clone(), b.clone()]], 0, &[vec![b, a, stacked]]);
}

#[test]
fn an_error_names_the_op_and_the_users_line() {
    let text = "mesh ()

func @f(v0: f32[3] @arg0+0x0, v1: i64[1] @arg1+0x0) -> f32[1]
plan (rank 0, arg0: 0xc, arg1: 0x8, out0: 0x4) {
    v2 = gather[dim=0] v0, v1 : f32[1] @out0+0x0 ; model.rs:7
    return v2
}
";
    let program = plan(text);
    spawn_with_heap(1, 1 << 22, |all| {
        let mut rank = OneRank::new(&program.mesh, all);
        let func = &program.funcs[0];
        let mut exec = rank.lower(func).unwrap();
        let at = |place: i64| [floats(&[1.0, 2.0, 3.0]), Literal::ints(Dtype::I64, vec![1], vec![place])];
        let error = rank.run(&mut exec, &mut rank.args(func, &at(5))).err().unwrap();
        assert!(error.starts_with("gather: ") && error.ends_with("\n  at model.rs:7"), "{error}");
        // The next call must succeed.
        let outs = rank.run(&mut exec, &mut rank.args(func, &at(2))).unwrap();
        assert!(rank.tensors(outs).unwrap()[0].same(&floats(&[3.0])));
    });
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let text = "mesh ()

func @f(v0: f32[s0] @arg0+0x0, v1: size<s1>) -> f32[s0]
plan (rank 0, s0 = 2, s1 = 5, arg0: 0x8, out0: 0x8) {
    v2 = neg v0 : f32[s0] @out0+0x0
    return v2
}
";
    let program = plan(text);
    spawn_with_heap(1, 1 << 22, |all| {
        let mut rank = OneRank::new(&program.mesh, all);
        let mut exec = rank.lower(&program.funcs[0]).unwrap();
        let mut refused = |n: usize, mut rest: Vec<ArgValue>| {
            let buffer = rank.all.heap().alloc(n).unwrap();
            let mut args = vec![ArgValue::Tensor { buffer, pending: None }];
            args.append(&mut rest);
            rank.run(&mut exec, &mut args).err().unwrap_or_default()
        };
        assert_eq!(refused(8, vec![ArgValue::Size(5)]), "");
        assert_eq!(refused(4, vec![ArgValue::Size(5)]), "arg0: expected at least 8 bytes, got 4");
        assert_eq!(refused(8, vec![ArgValue::Size(6)]), "@f: the plan is for s1 = 5, got 6");
        assert_eq!(refused(8, vec![]), "@f: expected 2 arguments and 0 groups, got 1 and 0");
    });
}
