//! Holds `docs/ops.md` to the definitions of the ops and the kernels that there are.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::ops::ops_markdown;
use consort_runtime::kernels::label;

#[test]
fn the_reference_is_fresh() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ops.md");
    let fresh = ops_markdown(&|info| label(info.name));
    if std::env::var_os("CONSORT_BLESS").is_some() {
        std::fs::write(path, &fresh).unwrap();
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(stored == fresh, "docs/ops.md is stale: run CONSORT_BLESS=1 cargo test --workspace");
}
