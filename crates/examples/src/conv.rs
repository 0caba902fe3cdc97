//! Convolutions over a sharded dimension: the rows that a kernel needs from the neighbours are sent while the
//! inside is computed.
//!
//! ```text
//! cargo build --release -p consort-examples --example conv
//! consort run -n 4 -- target/release/examples/conv
//! ```

use std::process::ExitCode;

use consort::{Dtype, Group, Index, Mesh, Missing, Result, Route, Tensor, tolerance};

/// The convolution of positions where the kernel lies inside of dimension 2, with zero padding in the others.
fn inner(x: &Tensor, weight: &Tensor, around: usize) -> Result<Tensor> {
    match x.rank() {
        3 => x.conv1d(weight, 1, around, 1, 1),
        _ => x.conv2d(weight, [1, 1], [around, weight.shape()[3] / 2], [1, 1], 1),
    }
}

/// A convolution with zero padding, of `[batch, in, length]` or `[batch, in, height, width]` and a kernel of odd sizes.
/// Dimension 2 is sharded; each rank has at least as many entries of it as the kernel.
pub fn conv(ranks: &Group, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (size, reach) = (x.dim(2)?, weight.shape()[2] / 2);
    if reach == 0 {
        return inner(x, weight, 0);
    }
    // The first rank has no neighbour before it and gets zeros, the last has none after it.
    let (first, last) = (x.narrow(2, 0, reach)?, x.narrow(2, &size - reach, reach)?);
    let before = ranks.permute(last, Route::Shift(1), Missing::Zeros)?;
    let after = ranks.permute(first, Route::Shift(-1), Missing::Zeros)?;
    let inside = inner(x, weight, 0)?;
    let near = |start: Index| x.narrow(2, start, 2 * reach);
    let top = inner(&Tensor::concat(&[&before, &near(0.into())?], 2)?, weight, 0)?;
    let bottom = inner(&Tensor::concat(&[&near(&size - 2 * reach)?, &after], 2)?, weight, 0)?;
    Tensor::concat(&[&top, &inside, &bottom], 2)
}

/// An input of shape `own` on each rank, with dimension 2 sharded: this rank's part, and all of it.
pub fn input(mesh: &Mesh, own: &[usize], key: i64) -> Result<(Tensor, Tensor)> {
    let mut whole = own.to_vec();
    whole[2] *= mesh.size();
    let all = Tensor::normal(Dtype::F32, &whole, key)?;
    Ok((all.narrow(2, mesh.rank() * own[2], own[2])?.contiguous()?, all))
}

/// This rank's part of the same convolution by one op.
pub fn plain(mesh: &Mesh, whole: &Tensor, weight: &Tensor) -> Result<Vec<f32>> {
    let own = whole.dim(2)? / mesh.size();
    inner(whole, weight, weight.shape()[2] / 2)?.narrow(2, mesh.rank() * &own, own)?.to_vec()
}

fn run() -> Result<bool> {
    let mesh = consort::init()?;
    let mut most = 0f64;
    for (own, kernel) in [(vec![2, 3, 20], vec![4, 3, 5]), (vec![1, 3, 12, 10], vec![4, 3, 3, 3])] {
        let ((x, whole), weight) = (input(&mesh, &own, 1)?, Tensor::normal(Dtype::F32, &kernel, 2)?);
        let got = conv(&mesh, &x, &weight)?.to_vec::<f32>()?;
        let expected = plain(&mesh, &whole, &weight)?;
        most = most.max(tolerance::difference(&expected, &got));
    }
    println!("differs from convolutions on one rank by at most {most:e}");
    Ok(most <= tolerance::of_runs(Dtype::F32))
}

fn main() -> ExitCode {
    match run() {
        Ok(good) => ExitCode::from(u8::from(!good)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
