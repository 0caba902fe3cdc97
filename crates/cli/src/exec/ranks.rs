//! All ranks of `consort exec`: processes of this program, started as `consort run` starts them.
//!
//! The job, the arguments of each rank and then its answer are in memory files that have no name in the file
//! system and that ranks open through this process, so nothing can be left behind. No rank sees another's arguments.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use consort_comm::init;
use consort_comm::launch::{Options, Sink};
use consort_ir::index::Sym;
use consort_ir::limits::Limits;
use consort_ir::literal::Literal;
use consort_ir::ops::OpTable;
use consort_ir::text::parse;
use consort_types::Dtype;
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

use super::limits;
use super::rank::{Failure, prepare};
use super::results::Results;
use crate::report::{Machine, Report};
use crate::run;

/// The name of the entry that becomes a rank. It is not for users.
pub(crate) const EXEC: &str = "__exec";

#[derive(Debug, clap::Args)]
pub(crate) struct RankArgs {
    /// What to run.
    job: PathBuf,
    /// Where each rank finds its arguments, and says what came of them.
    #[arg(required = true)]
    own: Vec<PathBuf>,
}

/// The first failure.
pub(super) struct Failed {
    pub(super) text: String,
    /// Whether it was refused, because it exceeds a limit.
    pub(super) refused: bool,
}

/// Runs a function of a program on as many processes as `inputs` has ranks: their results, or the first failure.
pub(super) fn run_on_processes(
    text: &str,
    func: &str,
    (inputs, symbols): (&[Vec<Literal>], &[BTreeMap<Sym, i64>]),
    timeout: Duration,
    limits: &Limits,
) -> anyhow::Result<Result<Results, Failed>> {
    let machine = |error: std::io::Error| {
        Machine(format!("exec: cannot allocate memory for the ranks' values: {error}"))
    };
    let memory = || memfd_create("consort-exec", MemfdFlags::CLOEXEC).map(File::from);
    let memory = || memory().map_err(|error| machine(error.into()));
    let mut job = memory()?;
    let (seconds, limits) = (timeout.as_secs_f64(), limits::to_json(limits));
    let head = json!({ "text": text, "func": func, "seconds": seconds, "limits": limits });
    write(&mut job, &head, [].into_iter()).map_err(machine)?;
    let mut outs = Vec::new();
    for (inputs, symbols) in inputs.iter().zip(symbols) {
        let mut own = memory()?;
        let types: Vec<Value> = inputs.iter().map(type_json).collect();
        let symbols: Vec<Value> = symbols.iter().map(symbol_json).collect();
        write(&mut own, &json!({ "inputs": types, "symbols": symbols }), inputs.iter()).map_err(machine)?;
        outs.push(own);
    }
    let path = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into();
    let mut program = vec!["/proc/self/exe".into(), EXEC.into(), path(&job)];
    program.extend(outs.iter().map(path));
    let mut said = memory()?;
    let options = Options {
        ranks: inputs.len(),
        program,
        entry: run::entry(),
        tee: None,
        only: None,
        flight: None,
        timeout: None,
        grace: run::GRACE,
        deadline: None,
    };
    let sink = || said.try_clone().map(Sink::new).map_err(machine);
    let outcome = run::launch_alone(&options, sink()?, sink()?)?;
    let mut answers = Vec::new();
    for out in &mut outs {
        // A rank that did not answer has left its arguments there.
        let said = read(out).ok().filter(|(head, _)| head["inputs"].is_null());
        answers.push(said.map(|(head, bytes)| answer(&head, &bytes)));
    }
    if answers.iter().any(Option::is_none) {
        if let Some(interrupted) = outcome.interrupted {
            return Err(anyhow::Error::new(interrupted).context("exec"));
        }
        // It died, or could not start.
        let mut text = Vec::new();
        let _ = said.seek(SeekFrom::Start(0)).and_then(|_| said.read_to_end(&mut text));
        let text = String::from_utf8_lossy(&text).into_owned() + &outcome.summary;
        return Err(Machine(format!("exec: a rank ended without results\n{}", text.trim_end())).into());
    }
    let mut results = Vec::new();
    let mut failures = Vec::new();
    for (rank, answer) in answers.into_iter().flatten().enumerate() {
        match answer? {
            Ok(list) => results.push(list),
            Err(failure) => failures.push((rank, failure)),
        }
    }
    // Failures that follow from another one are not reported beside it.
    let first = failures.iter().find(|(_, failure)| !failure.follows).or(failures.first());
    Ok(match first {
        None => Ok(results),
        Some((rank, Failure { op, message, refused, .. })) => {
            let op = op.as_ref().map_or(String::new(), |op| format!("{op}: "));
            let text = format!("error[run]: {op}rank {rank}: {message}");
            Err(Failed { text, refused: *refused })
        }
    })
}

/// Runs a job as one of its ranks. The answer goes to the file that the launching process reads.
pub(crate) fn run_rank(args: &RankArgs) -> anyhow::Result<Report> {
    let mut job = File::open(&args.job).context("exec: cannot read the job")?;
    let (head, _) = read(&mut job)?;
    let world = init()?;
    let path = args.own.get(world.rank()).context("exec: no arguments for this rank")?;
    let mut own = File::options().read(true).write(true).open(path).context("exec: cannot read arguments")?;
    let (mine, symbols) = {
        let (head, bytes) = read(&mut own)?;
        (tensors(&head["inputs"], &mut &bytes[..])?, symbols(&head["symbols"])?)
    };
    let seconds = head["seconds"].as_f64().unwrap_or(0.0);
    let timeout = Duration::try_from_secs_f64(seconds).context("exec: invalid timeout")?;
    let limits = limits::from_json(&head["limits"]);
    let all = world.group(limits::heap(&limits), timeout)?;
    // As in the oracle, so that a deadlock does not depend on sizes.
    if std::env::var_os("CONSORT_STRICT").is_none() {
        all.set_strict(true);
    }
    let parsed = parse(head["text"].as_str().unwrap_or_default(), &OpTable::built_in());
    let program = parsed.map_err(|error| anyhow::anyhow!("{error}"))?.program;
    let func = program.func(head["func"].as_str().unwrap_or_default()).context("exec: no such function")?;
    // Arguments are read for this call only, so they are donated.
    let outcome = prepare(&program, func, &all, &symbols, true, timeout).and_then(|mut ready| {
        limits::check(&program.mesh, &ready.plan, &limits)?;
        ready.limit(limits);
        ready.run(&mine)
    });
    own.set_len(0).and_then(|()| own.rewind()).context("exec: cannot write results")?;
    match outcome {
        Ok(results) => {
            let types: Vec<Value> = results.iter().map(type_json).collect();
            write(&mut own, &json!({ "results": types }), results.iter())?;
        }
        Err(Failure { op, message, follows, refused }) => {
            let head = json!({ "error": message, "op": op, "follows": follows, "refused": refused });
            write(&mut own, &head, [].into_iter())?;
        }
    }
    Ok(Report::fine(String::new()))
}

fn answer(head: &Value, mut bytes: &[u8]) -> anyhow::Result<Result<Vec<Literal>, Failure>> {
    if let Some(message) = head["error"].as_str() {
        let (follows, refused) = (head["follows"] == json!(true), head["refused"] == json!(true));
        let op = head["op"].as_str().map(str::to_string);
        return Ok(Err(Failure { op, message: message.to_string(), follows, refused }));
    }
    Ok(Ok(tensors(&head["results"], &mut bytes)?))
}

/// A symbol that arguments bind, and its value.
fn symbol_json((sym, value): (&Sym, &i64)) -> Value {
    if let Sym::Backed(id) = sym { json!([id, value]) } else { Value::Null }
}

fn symbols(list: &Value) -> anyhow::Result<BTreeMap<Sym, i64>> {
    let pairs: Vec<(u32, i64)> = serde_json::from_value(list.clone())?;
    Ok(pairs.into_iter().map(|(id, value)| (Sym::Backed(id), value)).collect())
}

fn type_json(tensor: &Literal) -> Value {
    json!([tensor.dtype.to_string(), tensor.shape])
}

/// A line of JSON, then the bytes of tensors.
fn write<'a>(to: &mut File, head: &Value, tensors: impl Iterator<Item = &'a Literal>) -> std::io::Result<()> {
    to.write_all(format!("{head}\n").as_bytes())?;
    for tensor in tensors {
        to.write_all(&tensor.to_bytes())?;
    }
    Ok(())
}

fn read(from: &mut File) -> anyhow::Result<(Value, Vec<u8>)> {
    let mut all = Vec::new();
    from.seek(SeekFrom::Start(0))?;
    from.read_to_end(&mut all)?;
    let end = all.iter().position(|byte| *byte == b'\n').context("exec: the file is empty")?;
    let bytes = all.split_off(end + 1);
    Ok((serde_json::from_slice(&all)?, bytes))
}

/// The tensors of a list of types, from the bytes that follow.
fn tensors(types: &Value, bytes: &mut &[u8]) -> anyhow::Result<Vec<Literal>> {
    let mut list = Vec::new();
    for ty in types.as_array().map_or(&[][..], |types| types) {
        let dtype = ty[0].as_str().and_then(Dtype::from_name).context("exec: unknown element type")?;
        let shape: Vec<usize> = serde_json::from_value(ty[1].clone())?;
        let n = consort_ir::literal::numel(&shape).context("exec: a tensor is too large")? * dtype.size();
        if bytes.len() < n {
            bail!("exec: values are missing");
        }
        let (mine, rest) = bytes.split_at(n);
        *bytes = rest;
        list.extend(Literal::from_bytes(dtype, shape, mine));
    }
    Ok(list)
}
