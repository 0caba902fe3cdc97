//! The corpus through the fuzz check, and thousands of damaged variants of it.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::path::Path;

use consort_filetests::{cases, fuzz::check_text};
use consort_ir::ops::OpTable;
use consort_ir::text::print;
use consort_oracle::generate::program;
use consort_types::Rng;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// All cases, the corpus of texts that once failed, and some random programs.
fn corpus() -> Vec<String> {
    let folders = ["filetests", "fuzz/corpus/text"].map(|folder| Path::new(ROOT).join(folder));
    let paths = folders.iter().flat_map(|folder| cases(folder).unwrap());
    let mut texts: Vec<String> = paths.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    texts.extend((0..40).map(|seed| print(&program(seed, 16))));
    texts
}

/// A text with random damage of the kinds that break parsers.
fn damaged(text: &str, other: &str, rng: &mut Rng) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..1 + rng.below(3) {
        if bytes.is_empty() {
            break;
        }
        let at = rng.below(bytes.len());
        let end = at + rng.below((bytes.len() - at).min(24) + 1);
        let tokens = [
            "v0",
            "s0",
            "u0",
            "9223372036854775807",
            "99999999999999999999",
            "-1",
            "0",
            "[",
            "]",
            "{",
            "}",
            "(",
            ")",
            "<",
            ">",
            ",",
            "rank(tp)",
            "pick(rank(tp),1,2)",
            "f32",
            "pending<",
            "size<",
            "none",
            "nan",
            "1e999",
            "*",
            "/0",
            "%",
            "where ",
            "return",
            "\n",
            ";",
            "@heap+0xffffffffffffffff",
            "é",
            "\0",
        ];
        match rng.below(5) {
            0 => bytes[at] = rng.next_u64() as u8,
            1 => drop(bytes.drain(at..end)),
            2 => {
                let copy = bytes[at..end].to_vec();
                let to = rng.below(bytes.len() + 1);
                drop(bytes.splice(to..to, copy));
            }
            3 => drop(bytes.splice(at..at, rng.pick(&tokens).bytes())),
            _ => {
                let other = other.as_bytes();
                let from = rng.below(other.len().max(1)).min(other.len());
                let to = (from + rng.below(60)).min(other.len());
                drop(bytes.splice(at..end, other[from..to].to_vec()));
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn no_text_makes_anything_panic() {
    let ops = OpTable::built_in();
    let corpus = corpus();
    corpus.iter().for_each(|text| check_text(text, &ops));
    // `CONSORT_FUZZ` sets the number of rounds.
    let rounds = std::env::var("CONSORT_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000u64);
    for seed in 0..rounds {
        let mut rng = Rng::new(seed);
        let text = damaged(&rng.pick(&corpus), &rng.pick(&corpus), &mut rng);
        let outcome = std::panic::catch_unwind(|| check_text(&text, &ops));
        assert!(outcome.is_ok(), "seed {seed} panics on\n{text}");
    }
}
