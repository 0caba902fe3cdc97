//! The walking skeleton: one program from text through verify, plan and executor on two threads, equal to the
//! oracle. The output of each stage is the section "The life of a program" of ARCHITECTURE.md.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../src/exec/rank.rs"]
mod rank;

use std::time::Duration;

use consort_filetests::check_file;
use consort_ir::literal::Literal;
use consort_ir::ops::OpTable;
use consort_ir::program::Program;
use consort_ir::text::{parse, print};
use consort_ir::verify::verify;
use consort_types::Dtype;

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

fn inputs() -> Vec<Vec<Literal>> {
    let rank = |x: f64| vec![Literal::floats(Dtype::F32, vec![4], vec![x, 2.0 * x, 3.0 * x, 4.0 * x])];
    vec![rank(1.0), rank(10.0)]
}

/// The program on two threads: the plan of the first rank, and the results of both.
fn execute(program: &Program) -> (Program, Vec<Vec<Literal>>) {
    let inputs = inputs();
    let ranks = consort_comm::spawn(2, |group| {
        let timeout = Duration::from_secs(10);
        let symbols = consort_oracle::bind(&program.mesh, &program.funcs[0], &inputs);
        let symbols = symbols.map_err(|failure| failure.to_string())?;
        let symbols = &symbols[group.rank()];
        let ready = rank::prepare(program, &program.funcs[0], &group, symbols, false, timeout);
        let mut ready = ready.map_err(|failure| failure.message)?;
        let results = ready.run(&inputs[group.rank()]).map_err(|failure| failure.message)?;
        Ok::<_, String>((ready.plan, results))
    });
    let (mut plans, results): (Vec<_>, Vec<_>) = ranks.into_iter().map(|rank| rank.unwrap()).unzip();
    (Program { mesh: program.mesh.clone(), funcs: vec![plans.swap_remove(0)] }, results)
}

#[test]
fn a_program_runs_from_text_to_ranks() {
    let program = parse(SOURCE, &OpTable::built_in()).unwrap().program;
    assert_eq!(print(&program), SOURCE);
    assert_eq!(verify(&program), []);
    let (plan, results) = execute(&program);
    assert_eq!(verify(&plan), []);
    // (x + 1 summed over both ranks) times 2, by hand.
    let expected = Literal::floats(Dtype::F32, vec![4], vec![26.0, 48.0, 70.0, 92.0]);
    assert!(results.iter().all(|results| results[0].same(&expected)), "{results:?}");
    let oracle = consort_oracle::run(&program, "f", &inputs()).unwrap();
    assert!(oracle.iter().flatten().zip(results.iter().flatten()).all(|(a, b)| a.same(b)));
    life(&plan, &results[0][0]);
}

/// Writes or checks the section of ARCHITECTURE.md.
fn life(plan: &Program, result: &Literal) {
    let text = format!(
        "`text::parse` and `verify::verify`: what the user wrote, rank-free. `x + 1`, an all_reduce, `* 2`.\n\n\
         ```csr\n{SOURCE}\n; run: @f([1, 2, 3, 4] | [10, 20, 30, 40]) == {0}\n```\n\n\
         `passes::plan`: the same lines with a place for every tensor, and a queue for every start; here for rank 0.\n\n\
         ```text\n{1}```\n\n\
         `runtime::Exec` on two ranks, and `oracle::run`, give `{0}` on both.\n",
        result.text(),
        print(plan),
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../ARCHITECTURE.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("<!-- life: begin -->\n", "<!-- life: end -->");
    let (before, rest) = document.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    check_file(path, &format!("{before}{begin}\n{text}\n{end}{after}"));
}
