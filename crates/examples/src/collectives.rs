//! One small program for each collective; docs/collectives.md explains them.
//!
//! `cargo build --example collectives -p consort-examples`, then
//! `consort run -n 4 -- target/debug/examples/collectives all_reduce`.

use consort::{Batched, Dtype, Error, Init, Missing, Reduce, Result, Route, Tensor};

/// A program, with its name.
type Program = (&'static str, fn() -> Result<()>);

/// All programs.
pub const PROGRAMS: [Program; 30] = [
    ("mismatch", mismatch),
    ("all_reduce", all_reduce),
    ("coalesced", coalesced),
    ("all_gather", all_gather),
    ("all_gather_list", all_gather_list),
    ("reduce_scatter", reduce_scatter),
    ("all_to_all", all_to_all),
    ("all_to_all_splits", all_to_all_splits),
    ("broadcast", broadcast),
    ("reduce", reduce),
    ("gather", gather),
    ("scatter", scatter),
    ("member_lists", member_lists),
    ("barrier", barrier),
    ("permute", permute),
    ("all_gather_v", all_gather_v),
    ("reduce_scatter_v", reduce_scatter_v),
    ("sizes_from_data", sizes_from_data),
    ("in_place", in_place),
    ("own_parts", own_parts),
    ("root_parts", root_parts),
    ("into", into),
    ("slices", slices),
    ("messages", messages),
    ("batch", batch),
    ("waiting", waiting),
    ("handles", handles),
    ("axes", axes),
    ("lists", lists),
    ("split", split),
];

/// Runs a program.
pub fn run(name: &str) -> Result<(), String> {
    let found = PROGRAMS.iter().find(|(other, _)| *other == name);
    let names: Vec<&str> = PROGRAMS.iter().map(|(name, _)| *name).collect();
    let (_, program) = found.ok_or_else(|| format!("expected one of {}", names.join(", ")))?;
    program().map_err(|error: Error| error.to_string())
}

fn main() -> std::process::ExitCode {
    match run(&std::env::args().nth(1).unwrap_or_default()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn mismatch() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    let x = Tensor::ones(Dtype::F32, &[if me == 1 { 500 } else { 512 }])?;
    println!("{}", mesh.all_reduce(x, Reduce::Sum)?.sum_all()?);
    Ok(())
}

fn all_reduce() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let x = Tensor::from_slice(&[me + 1, 10], &[2])?;
    println!("{}", mesh.all_reduce(x, Reduce::Sum)?);
    Ok(())
}

fn coalesced() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let list = vec![Tensor::from_slice(&[me], &[1])?, Tensor::from_slice(&[0.5f32, 1.0], &[2])?];
    for sum in mesh.all_reduce_coalesced(list, Reduce::Sum)? {
        println!("{sum}");
    }
    Ok(())
}

fn all_gather() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let x = Tensor::from_slice(&[me, me + 10], &[2])?;
    println!("{}", mesh.all_gather(x, 0)?);
    Ok(())
}

fn all_gather_list() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let parts = mesh.all_gather_list(Tensor::from_slice(&[me, me + 10], &[2])?)?;
    println!("{}", parts[mesh.size() - 1]);
    Ok(())
}

fn reduce_scatter() -> Result<()> {
    let mesh = consort::init()?;
    let x = Tensor::iota(Dtype::I64, &[4], 0)?;
    println!("{}", mesh.reduce_scatter(x, Reduce::Sum, 0)?);
    Ok(())
}

fn all_to_all() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let x = Tensor::from_iter((0..4).map(|i| 10 * me + i))?;
    println!("{}", mesh.all_to_all(x, None, None)?);
    Ok(())
}

fn all_to_all_splits() -> Result<()> {
    let mesh = consort::init()?;
    let (me, n) = (mesh.my_rank()?, mesh.size());
    // One element for member 0, two for member 1, and so on: from each, as many as this rank's place says.
    let (sent, got): (Vec<usize>, Vec<usize>) = ((1..=n).collect(), vec![me + 1; n]);
    let x = Tensor::full(Dtype::I64, &[sent.iter().sum::<usize>()], me as f64)?;
    println!("{}", mesh.all_to_all(x, Some(&got), Some(&sent))?);
    Ok(())
}

fn broadcast() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    println!("{}", mesh.broadcast(Tensor::from_slice(&[5 * me], &[1])?, 1)?);
    Ok(())
}

fn reduce() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    println!("{}", mesh.reduce(Tensor::from_slice(&[me + 1], &[1])?, Reduce::Max, 0)?);
    Ok(())
}

fn gather() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    println!("{}", mesh.gather(Tensor::from_slice(&[me + 1], &[1])?, 0, 0)?);
    Ok(())
}

fn scatter() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let x = Tensor::from_iter((0..mesh.size() as i64).map(|i| 10 * me + i))?;
    println!("{}", mesh.scatter(x, 0, 1)?);
    Ok(())
}

fn member_lists() -> Result<()> {
    let mesh = consort::init()?;
    let (me, n) = (mesh.my_rank()? as i64, mesh.size() as i64);
    let list = (0..n).map(|to| Tensor::from_slice(&[10 * me + to], &[1])).collect::<Result<Vec<_>>>()?;
    let sum = mesh.reduce_scatter_list(&list, Reduce::Sum)?;
    let scattered = mesh.scatter_list(&list, 1)?;
    let received = mesh.all_to_all_list(&list)?;
    println!("{sum} {scattered} {}", received[0]);
    Ok(())
}

fn barrier() -> Result<()> {
    let mesh = consort::init()?;
    mesh.barrier()?;
    println!("all {} are here", mesh.size());
    Ok(())
}

fn permute() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let x = Tensor::from_slice(&[me + 1], &[1])?;
    let ring = mesh.permute(&x, Route::Ring(1), Missing::Error)?;
    let open = mesh.permute(&x, Route::Shift(1), Missing::Zeros)?;
    println!("{ring} {open}");
    Ok(())
}

fn all_gather_v() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    let sizes: Vec<usize> = (1..=mesh.size()).collect();
    let x = Tensor::full(Dtype::I64, &[sizes[me]], me as f64)?;
    println!("{}", mesh.all_gather_v(x, 0, &sizes)?);
    Ok(())
}

fn reduce_scatter_v() -> Result<()> {
    let mesh = consort::init()?;
    let sizes: Vec<usize> = (1..=mesh.size()).collect();
    let x = Tensor::iota(Dtype::I64, &[sizes.iter().sum::<usize>()], 0)?;
    println!("{}", mesh.reduce_scatter_v(x, Reduce::Sum, 0, &sizes)?);
    Ok(())
}

fn sizes_from_data() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    let x = Tensor::full(Dtype::I64, &[me + 1], me as f64)?;
    let sizes = mesh.all_gather(Tensor::index(x.dim(0)?)?, 0)?.to_sizes()?;
    println!("{}", mesh.all_gather_v(x, 0, &sizes)?);
    Ok(())
}

fn in_place() -> Result<()> {
    let mesh = consort::init()?;
    let mut x = Tensor::from_slice(&[1i64], &[1])?;
    mesh.all_reduce_(&mut x, Reduce::Sum)?;
    println!("{x}, {} bytes copied", mesh.copied_bytes());
    let y = x.clone(); // Now the storage has two owners.
    mesh.all_reduce_(&mut x, Reduce::Sum)?;
    println!("{x} and still {y}, {} bytes copied", mesh.copied_bytes());
    Ok(())
}

fn own_parts() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    let mut x = Tensor::zeros(Dtype::I64, &[mesh.size()])?;
    x.narrow_mut(0, me, 1usize)?.copy_from(&Tensor::from_slice(&[me as i64 + 1], &[1])?)?;
    mesh.all_gather_(&mut x, 0)?;
    println!("{x}");
    mesh.reduce_scatter_(&mut x, Reduce::Sum, 0)?;
    println!("{x}");
    Ok(())
}

fn root_parts() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as f64;
    let mut x = Tensor::full(Dtype::I64, &[mesh.size()], me + 1.0)?;
    mesh.scatter_(&mut x, 0, 1)?;
    println!("{x}");
    mesh.gather_(&mut x, 0, 0)?;
    println!("{x}");
    Ok(())
}

fn into() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()? as i64;
    let mut all = Tensor::zeros(Dtype::I64, &[mesh.size()])?;
    mesh.all_gather_into(&mut all, Tensor::from_slice(&[me + 1], &[1])?, 0)?;
    let mut mine = Tensor::zeros(Dtype::I64, &[1])?;
    mesh.reduce_scatter_into(&mut mine, &all, Reduce::Sum, 0)?;
    println!("{all} {mine}");
    Ok(())
}

fn slices() -> Result<()> {
    let mesh = consort::init()?;
    let mut x = Tensor::ones(Dtype::I64, &[4])?;
    mesh.all_reduce_(x.narrow_mut(0, 1usize, 2usize)?, Reduce::Sum)?;
    println!("{x}");
    Ok(())
}

fn messages() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    if me % 2 == 0 {
        mesh.isend(Tensor::from_slice(&[me as i64 + 5], &[1])?, me + 1, 7)?.wait()?;
        println!("sent");
    } else {
        println!("{}", mesh.irecv(Dtype::I64, &[1], me - 1, 7)?);
    }
    Ok(())
}

fn batch() -> Result<()> {
    let mesh = consort::init()?;
    let x = Tensor::from_slice(&[mesh.my_rank()? as i64], &[1])?;
    let (mut left, mut right) = (Tensor::zeros(Dtype::I64, &[1])?, Tensor::zeros(Dtype::I64, &[1])?);
    let all = mesh.batch(vec![
        Batched::send(&x, Route::Ring(1), 0),
        Batched::send(&x, Route::Ring(-1), 1),
        Batched::recv(&mut left, Route::Ring(-1), 0),
        Batched::recv(&mut right, Route::Ring(1), 1),
    ])?;
    all.wait()?;
    println!("{left} {right}");
    Ok(())
}

fn waiting() -> Result<()> {
    let mesh = consort::init()?;
    let y = mesh.all_reduce(Tensor::ones(Dtype::F32, &[3])?, Reduce::Sum)?;
    println!("{} in flight, shape {:?}", mesh.in_flight(), y.shape());
    println!("{y}");
    println!("{} in flight", mesh.in_flight());
    Ok(())
}

fn handles() -> Result<()> {
    let mesh = consort::init()?;
    let mut x = Tensor::ones(Dtype::F32, &[2])?;
    let of_x = mesh.pending(|| mesh.all_reduce_(&mut x, Reduce::Sum))?;
    let of_y = mesh.pending(|| mesh.all_gather(Tensor::ones(Dtype::F32, &[1])?, 0))?;
    while !of_x.test()? {} // Any other work here.
    of_x.wait()?;
    println!("{x} {}", of_y.wait()?);
    Ok(())
}

fn axes() -> Result<()> {
    let mesh = Init::new().axes(&[("dp", 0), ("tp", 2)]).start()?; // dp: what tp leaves.
    let x = Tensor::from_slice(&[mesh.my_rank()? as i64], &[1])?;
    let tp = mesh.axis("tp")?.all_reduce(&x, Reduce::Sum)?;
    let dp = mesh.axis("dp")?.all_reduce(&x, Reduce::Sum)?;
    let both = mesh.axes(&["dp", "tp"])?.all_reduce(&x, Reduce::Sum)?;
    println!("tp {tp}, dp {dp}, both {both}");
    Ok(())
}

fn lists() -> Result<()> {
    let mesh = consort::init()?;
    let lists: Vec<Vec<usize>> = (0..mesh.size() / 2).map(|i| vec![i, mesh.size() - 1 - i]).collect();
    let lists: Vec<&[usize]> = lists.iter().map(Vec::as_slice).collect();
    let pairs = mesh.lists("pairs", &lists)?;
    let x = Tensor::from_slice(&[mesh.my_rank()? as i64], &[1])?;
    println!("{}", pairs.all_gather(x, 0)?);
    Ok(())
}

fn split() -> Result<()> {
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    let group = mesh.split("parity", Some(me as u32 % 2), -(me as i64))?;
    println!("{}", group.all_gather(Tensor::from_slice(&[me as i64], &[1])?, 0)?);
    Ok(())
}
