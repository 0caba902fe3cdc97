//! A random program on ranks that are processes of this test program.

use consort_comm::init;
use consort_comm::launch::{Options, Sink, launch};

use super::case::{Case, TIMEOUT};
use super::said::Said;

/// Bytes of each rank's heap.
const HEAP: usize = 1 << 26;

/// The line that a rank prints if its results are right.
const FINE: &str = "results are those of the oracle";

/// Runs the program of a seed as a job: every rank compares its own results.
pub(crate) fn run(seed: u64, ranks: usize) -> Result<(), String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let own = own.to_str().ok_or("expected a path that is text")?;
    let variable = format!("CONSORT_RANDOM_RANK={seed}");
    let words = ["env", &variable, own, "--exact", "rank_program", "--nocapture", "--quiet"];
    let program = words.iter().map(|word| word.into()).collect();
    let entry = vec![env!("CARGO_BIN_EXE_consort").into(), "__rank".into()];
    let options = Options::new(ranks, program, entry, 2 * TIMEOUT);
    let said = Said::default();
    let outcome =
        launch(&options, Sink::new(said.clone()), Sink::new(said.clone())).map_err(|e| e.to_string())?;
    let said = said.text();
    match said.matches(FINE).count() == ranks && outcome.code == 0 {
        true => Ok(()),
        false => Err(format!("processes: code {}: {}\n{said}", outcome.code, outcome.summary)),
    }
}

/// One rank of such a job.
pub(crate) fn play(seed: u64) {
    let case = Case::new(seed).unwrap_or_else(|error| panic!("{error}")).unwrap();
    let world = init().unwrap();
    let all = world.group(HEAP, TIMEOUT).unwrap();
    case.run_here(&all).unwrap_or_else(|error| panic!("{error}"));
    println!("{FINE}");
}
