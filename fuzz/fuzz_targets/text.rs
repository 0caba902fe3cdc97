//! `cargo +nightly fuzz run text`: any bytes at all through parser, verifier, printer and oracle.
#![no_main]

use consort_ir::ops::OpTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| consort_filetests::fuzz::check_text(text, &OpTable::built_in()));
