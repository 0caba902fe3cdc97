//! Checks `docs/ops.md` against the definitions of the ops and the existing kernels.

use consort_filetests::check_file;
use consort_ir::ops::ops_markdown;
use consort_runtime::kernels::label;

#[test]
fn the_reference_is_fresh() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ops.md");
    check_file(path, &ops_markdown(&|info| label(info.name)));
}
