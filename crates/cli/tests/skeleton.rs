//! The walking skeleton: one program from text through verify, plan and executor on two threads, equal to the
//! oracle. What each stage leaves is the section "The life of a program" of ARCHITECTURE.md.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use consort_ir::dtype::Dtype;
use consort_ir::mesh::Rank;
use consort_ir::ops::OpTable;
use consort_ir::tensor::Tensor;
use consort_ir::text::{parse, print};
use consort_ir::verify::verify;
use consort_ir::{oracle, program::Program};

const SOURCE: &str = "mesh (dp: 2)

func @f(v0: f32[4]{dp}) -> f32[4] {
    v1 = constant[dtype=f32, shape=[4], value=1.0]   : f32[4] ; model.rs:2
    v2 = add v0, v1                                  : f32[4]{dp} ; model.rs:2
    v3 = all_reduce_start[reduce=sum, over=dp] v2    : pending<f32[4]> ; model.rs:3
    v4 = wait v3                                     : f32[4] ; model.rs:3
    v5 = constant[dtype=f32, shape=[4], value=2.0]   : f32[4] ; model.rs:4
    v6 = mul v4, v5                                  : f32[4] ; model.rs:4
    return v6
}
";

fn inputs() -> Vec<Vec<Tensor>> {
    let rank = |x: f64| vec![Tensor::floats(Dtype::F32, vec![4], vec![x, 2.0 * x, 3.0 * x, 4.0 * x])];
    vec![rank(1.0), rank(10.0)]
}

/// The plan on two threads; each rank's results or what went wrong there.
fn execute(plan: &Program) -> Vec<Result<Vec<Tensor>, consort_runtime::RunError>> {
    let inputs = inputs();
    consort_comm::spawn(2, |group| {
        let until = Instant::now() + Duration::from_secs(10);
        consort_runtime::execute(&plan.mesh, &plan.funcs[0], &group, &inputs[group.rank()], until)
    })
}

/// The plan of the first rank, which has the same lines on the others.
fn planned(program: &Program) -> Program {
    let at = consort_passes::At { rank: Rank(0), symbols: &BTreeMap::new(), donated: &[] };
    let func = consort_passes::plan(&program.mesh, &program.funcs[0], &at).unwrap();
    Program { mesh: program.mesh.clone(), funcs: vec![func] }
}

#[test]
fn a_program_runs_from_text_to_ranks() {
    let program = parse(SOURCE, &OpTable::built_in()).unwrap().program;
    assert_eq!(print(&program), SOURCE);
    assert_eq!(verify(&program), []);
    let plan = planned(&program);
    assert_eq!(verify(&plan), []);
    let results: Vec<Vec<Tensor>> = execute(&plan).into_iter().map(|results| results.unwrap()).collect();
    // (x + 1 summed over both ranks) times 2, by hand.
    let expected = Tensor::floats(Dtype::F32, vec![4], vec![26.0, 48.0, 70.0, 92.0]);
    assert!(results.iter().all(|results| results[0].same(&expected)), "{results:?}");
    let oracle = oracle::run(&program, "f", &inputs()).unwrap();
    assert!(oracle.iter().flatten().zip(results.iter().flatten()).all(|(a, b)| a.same(b)));
    life(&plan, &results[0][0]);
}

/// Writes or checks the section of ARCHITECTURE.md.
fn life(plan: &Program, result: &Tensor) {
    let text = format!(
        "`text::parse` and `verify::verify`: what the user wrote, rank-free. `x + 1`, an all_reduce, `* 2`.\n\n\
         ```csr\n{SOURCE}\n; run: @f([1, 2, 3, 4] | [10, 20, 30, 40]) == {0}\n```\n\n\
         `passes::plan`: the same lines with a place for every tensor, and a queue for every start.\n\n\
         ```text\n{1}```\n\n\
         `runtime::execute` on two ranks, and `oracle::run`, give `{0}` on both.\n",
        result.text(),
        print(plan),
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../ARCHITECTURE.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("<!-- life: begin -->\n", "<!-- life: end -->");
    let (before, rest) = document.split_once(begin).unwrap();
    let (shown, after) = rest.split_once(end).unwrap();
    if std::env::var_os("CONSORT_BLESS").is_some() {
        std::fs::write(path, format!("{before}{begin}\n{text}\n{end}{after}")).unwrap();
    } else {
        assert_eq!(shown.trim(), text.trim(), "run CONSORT_BLESS=1 cargo test --workspace");
    }
}

#[test]
fn an_op_the_executor_lacks_is_an_error_on_every_rank() {
    let source = SOURCE.replace("all_reduce_start[reduce=sum, over=dp]", "broadcast_start[root=0, over=dp]");
    let program = parse(&source, &OpTable::built_in()).unwrap().program;
    let plan = planned(&program);
    for result in execute(&plan) {
        assert!(
            result.unwrap_err().to_string().starts_with("broadcast_start: the executor cannot run it yet")
        );
    }
}
