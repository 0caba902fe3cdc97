//! Runs the built `consort` as a user does: arguments in; output, files and exit code out.

#[path = "cli/bad_input.rs"]
mod bad_input;
#[path = "cli/bad_program.rs"]
mod bad_program;
#[path = "cli/check.rs"]
mod check;
#[path = "cli/exec.rs"]
mod exec;
#[path = "cli/explain.rs"]
mod explain;
#[path = "cli/grad.rs"]
mod grad;
#[path = "cli/limits.rs"]
mod limits;
#[path = "cli/ops_and_opt.rs"]
mod ops_and_opt;
#[path = "cli/scratch.rs"]
mod scratch;
