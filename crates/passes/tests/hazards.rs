//! Plans have no hazards, and run on bytes they match the program's oracle under every timing.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

mod planned;

use std::path::{Path, PathBuf};

use consort_ir::ops::OpTable;
use consort_ir::text::{parse, run_lines};
use consort_ir::verify::verify;
use consort_oracle::generate;
use consort_oracle::plan::Timing;

use planned::{check, plans, seeds};

#[test]
fn random_programs() {
    for seed in seeds(300) {
        let program = generate::program(seed, 8 + seed as usize % 24);
        let func = &program.funcs[0];
        let inputs = generate::inputs(&program, seed);
        let plans =
            plans(&program, func, &inputs, |rank, param| (seed >> ((rank as usize + param) % 5)) & 1 == 1);
        let timings = [Timing::Earliest, Timing::Latest, Timing::Mixed(seed)];
        check(&program, func, &plans, &inputs, &timings, &format!("seed {seed}"));
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

/// Every program of the filetests that runs, with its own inputs.
#[test]
fn programs_of_the_filetests() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests"));
    let mut ran = 0;
    for path in files(folder) {
        let name = path.strip_prefix(folder).unwrap().display().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        let (Ok(parsed), Ok(lines)) = (parse(&text, &OpTable::built_in()), run_lines(&text)) else {
            continue;
        };
        let program = parsed.program;
        if program.funcs.iter().any(|func| func.plan.is_some()) || !verify(&program).is_empty() {
            continue;
        }
        for line in lines {
            let Some(func) = program.func(&line.func) else { continue };
            let Ok(inputs) = line.inputs(&program) else { continue };
            if consort_oracle::run(&program, &line.func, &inputs).is_err() {
                continue;
            }
            for given in [false, true] {
                let plans = plans(&program, func, &inputs, |_, _| given);
                let timings = [Timing::Earliest, Timing::Latest, Timing::Mixed(ran)];
                check(&program, func, &plans, &inputs, &timings, &format!("{name}:{}", line.line));
                ran += 1;
            }
        }
    }
    println!("{ran} runs");
    assert!(ran > 1000, "{ran} runs");
}
