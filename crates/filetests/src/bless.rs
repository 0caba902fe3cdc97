//! `CONSORT_BLESS=1`: rewrites the expectations of tests from their actual output.

use std::path::Path;

/// Whether expectations are to be rewritten.
pub fn blessing() -> bool {
    std::env::var_os("CONSORT_BLESS").is_some_and(|bless| bless == "1")
}

/// Checks a file against its expected text, or writes that if [`blessing`]. Panics on a difference, for tests.
pub fn check_file(path: impl AsRef<Path>, fresh: &str) {
    let path = path.as_ref();
    if blessing() {
        std::fs::write(path, fresh).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    let differs = stored.lines().zip(fresh.lines()).find(|(stored, fresh)| stored != fresh);
    let (old, new) = differs.unwrap_or(("(its end)", "(its end)"));
    let path = path.display();
    assert!(
        stored == fresh,
        "{path} is stale\n  file: {old}\n  new:  {new}\n  note: CONSORT_BLESS=1 rewrites it"
    );
}
