//! Every program shown in the docs is one: it verifies, is printed as shown, and gives what its run lines say.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::path::Path;

use consort_filetests::run_case;
use consort_ir::ops::OpTable;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

#[test]
fn programs_in_the_docs_hold() {
    let ops = OpTable::built_in();
    let mut shown = 0;
    for file in ["README.md", "ARCHITECTURE.md", "docs/tour.md", "docs/ir.md", "docs/passes.md"] {
        let text = std::fs::read_to_string(Path::new(ROOT).join(file)).unwrap();
        for block in text.split("```csr\n").skip(1) {
            let program = block.split("```").next().unwrap();
            let case = format!("; test: verify\n; test: print\n; test: oracle\n{program}");
            run_case(&case, &ops, false).unwrap_or_else(|error| panic!("{file}: {error}\n{program}"));
            shown += 1;
        }
    }
    assert!(shown >= 7, "only {shown} programs");
}
