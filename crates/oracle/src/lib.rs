//! The oracles: reference semantics of programs and plans for comparison; and random programs to compare them on.
//!
//! The program oracle ([`run`]) runs all ranks of a program in one thread, slowly and plainly. The plan oracle ([`plan`])
//! runs their plans, on real bytes. Random programs are made by [`generate`], and plans that share nothing with the real
//! planner by [`naive`].
//!
//! ```
//! use consort_ir::{ops::OpTable, literal::Literal, text};
//! use consort_types::Dtype;
//!
//! let source = "mesh (tp: 2)
//!
//! func @f(v0: f32[2]{tp}) -> f32[2] {
//!     v1 = all_reduce_start[reduce=sum, over=tp] v0 : pending<f32[2]>
//!     v2 = wait v1 : f32[2]
//!     return v2
//! }";
//! let program = text::parse(source, &OpTable::built_in())?.program;
//! let input = |x| vec![Literal::floats(Dtype::F32, vec![2], vec![x, 2.0 * x])];
//! let results = consort_oracle::run(&program, "f", &[input(1.0), input(10.0)])?;
//! assert_eq!(results[0][0].text(), "[11, 22]");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`differences`] are gradients by small changes of arguments, to compare others with.
//!
//! In the program oracle, each rank runs until it reaches a wait that cannot end yet; then the next rank runs. A
//! collective is evaluated when its last member starts it; a message is delivered when both its ends have started. If
//! no rank can advance and not all are finished, the program cannot complete under any timing: starts never block, so
//! what a rank has started depends only on its own path. The verdict names every rank that waits, its line, and what
//! it waits for. There is no clock and no timeout: a run is bounded by [`Limits`], and refused before it exceeds
//! them.
//!
//! Only tests, and commands that compare, use this crate. Nothing here reads a file, a clock or the environment, and
//! nothing is `unsafe`.
#![forbid(unsafe_code)]

mod comm;
pub mod differences;
mod failure;
pub mod generate;
mod in_use;
mod inputs;
pub mod naive;
pub mod plan;
mod rank;
mod sizes;

use std::fmt;

use comm::Comm;
use consort_types::{Failure, Rank};
use in_use::InUse;
use rank::{RankState, Step};

use consort_ir::diagnostic::Diagnostic;
use consort_ir::limits::{Excess, Limits};
use consort_ir::literal::Literal;
use consort_ir::ops::EvalError;
use consort_ir::program::Program;
use consort_ir::verify::verify;

pub use failure::{Outcomes, same_error};
pub use inputs::{bind, check_placement};

/// The most ranks the oracle runs.
pub const MAX_RANKS: u32 = 4096;

/// Why a program did not give results.
#[derive(Clone, Debug, PartialEq)]
pub enum OracleError {
    /// The program is wrong; the verifier's findings.
    Program(Vec<Diagnostic>),
    /// The inputs do not fit the program.
    Input(Box<Failure>),
    /// An op failed on a rank.
    Op {
        /// The rank.
        rank: Rank,
        /// The op's name.
        op: &'static str,
        /// The node, as the text has it.
        node: String,
        /// The user's source line, if known.
        site: Option<String>,
        /// What went wrong.
        error: Box<EvalError>,
    },
    /// The next node of a rank, or a loop, would exceed the limits.
    Limit {
        /// The rank.
        rank: Rank,
        /// The op's name.
        op: &'static str,
        /// The node, as the text has it.
        node: String,
        /// The user's source line, if known.
        site: Option<String>,
        /// The excess over the limit.
        excess: Excess,
    },
    /// Deadlock: no rank can advance.
    Deadlock(Vec<Stuck>),
}

/// A rank that cannot advance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The rank.
    pub rank: Rank,
    /// The wait, as the text has it.
    pub node: String,
    /// The user's source line, if known.
    pub site: Option<String>,
    /// What it waits for.
    pub waits_for: String,
}

impl fmt::Display for OracleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = |site: &Option<String>| site.as_ref().map_or(String::new(), |site| format!("  ({site})"));
        match self {
            OracleError::Program(errors) => {
                let lines: Vec<String> = errors.iter().map(Diagnostic::headline).collect();
                f.write_str(&lines.join("\n"))
            }
            OracleError::Input(failure) => write!(f, "error[input]: {failure}"),
            OracleError::Op { rank, op, node, site, error } => {
                write!(f, "error[run]: {op}: {rank}: {error}\n  at {node}{}", from(site))?;
                error.failure().notes.iter().try_for_each(|note| write!(f, "\n  note: {note}"))
            }
            OracleError::Limit { rank, op, node, site, excess } => {
                write!(f, "error[run]: {op}: {rank}: {excess}\n  at {node}{}", from(site))
            }
            OracleError::Deadlock(stuck) => {
                write!(f, "error[deadlock]: no rank can go on")?;
                for Stuck { rank, node, site, waits_for } in stuck {
                    write!(f, "\n  {rank} at {node}{}\n    waits for {waits_for}", from(site))?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for OracleError {}

/// Runs a function on all ranks. `inputs` has the arguments of each rank; sizes are 0-d `i64` tensors. Returns the
/// results of each rank, with the tensors of a returned pending in its place.
pub fn run(program: &Program, func: &str, inputs: &[Vec<Literal>]) -> Result<Vec<Vec<Literal>>, OracleError> {
    run_within(program, func, inputs, &Limits::ORACLE)
}

/// The same with other limits. Those on memory are for all ranks together, those on work for each.
pub fn run_within(
    program: &Program,
    func: &str,
    inputs: &[Vec<Literal>],
    limits: &Limits,
) -> Result<Vec<Vec<Literal>>, OracleError> {
    // Communication under a condition that differs is allowed here: the run may complete, and if it does not, the
    // verdict says more than the rule.
    let errors: Vec<Diagnostic> =
        verify(program).into_iter().filter(|error| error.failure.rule != "V9").collect();
    if !errors.is_empty() {
        return Err(OracleError::Program(errors));
    }
    let Some(func) = program.func(func) else {
        let names: Vec<String> = program.funcs.iter().map(|func| format!("@{}", func.name)).collect();
        let message = format!("no function @{func}; there is {}", names.join(", "));
        return Err(OracleError::Input(Failure::new(message)));
    };
    let mesh = &program.mesh;
    if mesh.n_ranks() > MAX_RANKS {
        let headline = (format!("at most {MAX_RANKS} ranks"), mesh.n_ranks().to_string());
        return Err(OracleError::Input(Failure::new(headline)));
    }
    let symbols = bind(mesh, func, inputs).map_err(OracleError::Input)?;
    let mut comm = Comm::new(mesh, func);
    let in_use = InUse::new(limits.bytes);
    let mut ranks = Vec::new();
    for ((rank, inputs), symbols) in (0u32..).map(Rank).zip(inputs).zip(symbols) {
        ranks.push(RankState::new(mesh, func, rank, inputs, symbols, (*limits, &in_use))?);
    }
    loop {
        let mut moved = false;
        for rank in &mut ranks {
            while let Step::Moved = rank.step(&mut comm)? {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck: Vec<Stuck> = ranks.iter().filter_map(|rank| rank.stuck(&comm)).collect();
    if stuck.is_empty() {
        Ok(ranks.into_iter().map(RankState::results).collect())
    } else {
        Err(OracleError::Deadlock(stuck))
    }
}
