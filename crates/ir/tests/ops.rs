//! Holds over the whole table of ops: names, docs, constraints, examples.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::ops::{BUILT_IN, OpInfo, OpTable};
use consort_ir::program::Program;
use consort_ir::text::{parse, print, run_lines};
use consort_ir::verify::verify;

fn all() -> impl Iterator<Item = &'static OpInfo> {
    BUILT_IN.iter().flat_map(|(_, rows)| rows.iter())
}

fn program(info: &OpInfo) -> Program {
    match parse(info.example, &OpTable::built_in()) {
        Ok(parsed) => parsed.program,
        Err(error) => panic!("{}: {error}\n{}", info.name, info.example),
    }
}

#[test]
fn names_are_distinct_and_docs_are_sentences() {
    let mut names: Vec<&str> = all().map(|info| info.name).collect();
    assert!(names.len() >= 60, "only {} ops", names.len());
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all().count());
    for info in all() {
        let first = info.doc.split("\n\n").next().unwrap().trim();
        assert!(first.ends_with('.'), "{}: {first}", info.name);
        assert!(
            info.attrs.iter().all(|attr| attr.doc.trim().ends_with('.')),
            "{}: attribute docs",
            info.name
        );
        let rules: Vec<String> = info.constraints().into_iter().map(|(rule, _)| rule).collect();
        let expected: Vec<String> = (1..=rules.len()).map(|i| format!("C{i}")).collect();
        assert_eq!(rules, expected, "{}: constraints are numbered from C1", info.name);
    }
}

#[test]
fn examples_verify_and_read_back() {
    for info in all() {
        let program = program(info);
        let errors: Vec<String> = verify(&program).iter().map(|error| error.headline()).collect();
        assert!(errors.is_empty(), "{}: {errors:?}", info.name);
        let used =
            program.funcs.iter().flat_map(|func| &func.body.nodes).any(|n| n.op.info().name == info.name);
        assert!(used, "{}: the example does not use it", info.name);
        let text = print(&program);
        let again = parse(&text, &OpTable::built_in()).unwrap().program;
        assert_eq!(again, program, "{}", info.name);
        assert_eq!(print(&again), text);
        assert!(!run_lines(info.example).unwrap().is_empty(), "{}: nothing is run", info.name);
    }
}

#[test]
fn costs_are_not_negative_and_communication_has_wire_bytes() {
    for info in all() {
        let program = program(info);
        let func = &program.funcs[0];
        for node in func.body.nodes.iter().filter(|node| node.op.info().name == info.name) {
            let types =
                |values: &[_]| values.iter().map(|v| func.ty(*v).unwrap().clone()).collect::<Vec<_>>();
            let (args, results) = (types(&node.args), types(&node.results));
            let cx = consort_ir::ops::CostCx { mesh: &program.mesh, args: &args, results: &results };
            let cost = node.op.cost(&cx);
            let facts = func.entry_facts(&program.mesh);
            for part in [&cost.flops, &cost.bytes, &cost.wire] {
                assert!(!part.is_invalid(), "{}", info.name);
                assert!(facts.bounds(part).0.is_none_or(|low| low >= 0), "{}", info.name);
            }
            let moves = node.op.effects().starts().is_some() && info.name != "barrier_start";
            assert_eq!(cost.wire.as_const() != Some(0), moves, "{}: wire bytes", info.name);
        }
    }
}
