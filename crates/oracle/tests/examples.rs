//! The example of each op gives the stated results.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::ops::{BUILT_IN, OpTable};
use consort_ir::text::{parse, run_lines};
use consort_oracle::run;

#[test]
fn examples_give_what_they_say() {
    for info in BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()) {
        let program = parse(info.example, &OpTable::built_in()).unwrap().program;
        for line in run_lines(info.example).unwrap() {
            let inputs = line.inputs(&program).unwrap();
            let outcome = run(&program, &line.func, &inputs).map_err(|error| error.to_string());
            line.check(&program, &outcome).unwrap_or_else(|error| panic!("{}: {error}", info.name));
        }
    }
}
