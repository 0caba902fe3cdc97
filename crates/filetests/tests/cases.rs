//! Every case under `filetests/` as a test of its own: `cargo test -p consort-filetests --test cases -- NAME` runs those
//! whose path has NAME in it.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::fs;
use std::path::{Path, PathBuf};

use consort_filetests::{blessing, cases, run_case};
use consort_ir::ops::OpTable;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../filetests"));
    let trial = |path: PathBuf| {
        let name = path.strip_prefix(folder).unwrap().display().to_string();
        Trial::test(name, move || check(&path))
    };
    let trials = cases(folder).unwrap().into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn check(path: &Path) -> Result<(), Failed> {
    if let Some(blessed) = run_case(&fs::read_to_string(path)?, &OpTable::built_in(), blessing())? {
        fs::write(path, blessed)?;
    }
    Ok(())
}
