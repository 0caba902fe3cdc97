//! SPEC D3 over MPI where eager calls are not compared: a compiled call that differs between ranks, by its function or its
//! number, is an error on every rank. With every mpirun of this machine; the ranks are this program.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "processes/mpirun.rs"]
mod mpirun;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs, process};

use consort::{Compiled, Mesh, Reduce, Result, Tensor, compile};
use mpirun::mpiruns;

const RANK: &str = "__rank";
const RANKS: usize = 3;

/// A case: its name, what ranks do, and what the error of each must have.
type Case = (&'static str, fn(&Mesh) -> Result<()>, &'static [&'static str]);

const CASES: &[Case] = &[
    ("functions", two_functions, &["rank 1      call 2 of `g #2`", "ranks 0,2   call 2 of `f`"]),
    ("skipped", a_skipped_call, &["rank 1      call 2 of `g #2`", "ranks 0,2   call 2 of `f`"]),
    ("numbers", another_number, &["rank 1      call 1 of `f`", "ranks 0,2   call 2 of `f`"]),
    ("roles", a_role_on_one_rank, &["rank 1      call 1 of `f` as role `odd`", "ranks 0,2   call 1 of `f`"]),
];

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match &arguments[..] {
        [first, name, folder] if first == RANK => rank(name, Path::new(folder)),
        _ => mpiruns().into_iter().for_each(|mpirun| CASES.iter().for_each(|case| check(mpirun, case))),
    }
}

fn check(mpirun: &str, (name, _, expected): &Case) {
    let start = Instant::now();
    let folder = env::temp_dir().join(format!("consort-unchecked-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    let words = mpirun.replace("{ranks}", &RANKS.to_string());
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words).arg(env::current_exe().unwrap()).args([RANK, name]).arg(&folder);
    command.env("CONSORT_ENGINE", "mpi").env("CONSORT_CHECK", "0").env("CONSORT_DEADLINE", "120");
    let out = command.output().unwrap();
    let out = [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    for rank in 0..RANKS {
        let text = fs::read_to_string(told(&folder, rank)).unwrap_or_else(|_| panic!("rank {rank}: {out}"));
        for expected in expected.iter().chain(&["the call must be the same on all ranks"]) {
            assert!(text.contains(expected), "expected {expected:?} of rank {rank}: {text}\n{out}");
        }
    }
    fs::remove_dir_all(&folder).unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "none waits for its deadline: {out}");
    println!("{name}, {mpirun}: {:?}", start.elapsed());
}

/// Where a rank writes its error.
fn told(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

fn rank(name: &str, folder: &Path) {
    let start = Instant::now();
    let mesh = consort::init().unwrap();
    let me = mesh.my_rank().unwrap();
    let (_, case, _) = CASES.iter().find(|(own, ..)| *own == name).unwrap();
    let error = case(&mesh).unwrap_err().to_string();
    // At once for all readers.
    let part = folder.join(format!("part-{me}"));
    fs::write(&part, error).unwrap();
    fs::rename(part, told(folder, me)).unwrap();
    // The first to end may end all others.
    while (0..RANKS).any(|rank| !told(folder, rank).exists()) && start.elapsed() < Duration::from_secs(20) {
        thread::sleep(Duration::from_millis(2));
    }
}

fn sum(mesh: &Mesh, name: &str) -> Compiled<Tensor, Tensor> {
    let group = mesh.clone();
    compile(move |x: Tensor| group.all_reduce(x.neg()?, Reduce::Sum)).name(name)
}

/// Calls a function, whose result is known.
fn call(f: &Compiled<Tensor, Tensor>) -> Result<()> {
    assert_eq!(f.call(Tensor::from_iter([1.0f64])?)?.item::<f64>()?, -(RANKS as f64));
    Ok(())
}

/// Functions with equal programs and arguments. The second is named by its number too, since both are compiled on one line.
fn two_functions(mesh: &Mesh) -> Result<()> {
    let (f, g) = (sum(mesh, "f"), sum(mesh, "g"));
    call(&f)?;
    call(&g)?;
    call(if mesh.my_rank()? == 1 { &g } else { &f })
}

fn a_skipped_call(mesh: &Mesh) -> Result<()> {
    let (f, g) = (sum(mesh, "f"), sum(mesh, "g"));
    for step in 0..4 {
        if step != 1 || mesh.my_rank()? != 1 {
            call(&f)?;
        }
        call(&g)?;
    }
    Ok(())
}

/// One rank does not count a call, which was a warm-up there.
fn another_number(mesh: &Mesh) -> Result<()> {
    let f = sum(mesh, "f");
    match mesh.my_rank()? {
        1 => mesh.warm_up(|| call(&f))?,
        _ => call(&f).and_then(|()| mesh.barrier())?,
    }
    call(&f)
}

/// What ranks with roles compare has another length, once they know them.
fn a_role_on_one_rank(mesh: &Mesh) -> Result<()> {
    let f = sum(mesh, "f");
    let f = if mesh.my_rank()? == 1 { f.role("odd") } else { f };
    call(&f)
}
