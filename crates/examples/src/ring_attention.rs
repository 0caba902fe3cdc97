//! Ring attention: each rank has a part of a long sequence. Keys and values go round the ring while queries attend to
//! the local ones, and the partial results are combined.
//!
//! ```text
//! cargo build --release -p consort-examples --example ring_attention
//! consort run -n 4 -- target/release/examples/ring_attention
//! ```

use std::process::ExitCode;

use consort::{Batched, Dtype, Group, Index, Mesh, Result, Route, Tensor, tolerance};

/// The state of some queries after some of the keys.
struct Seen {
    /// The largest score.
    most: Tensor,
    /// The sum of exp(score - most).
    weights: Tensor,
    /// The sum of the weighted values.
    values: Tensor,
}

/// Attends to more keys; masked keys have weight zero.
fn attend(seen: Option<Seen>, q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Seen> {
    let width = q.shape()[3] as f64;
    let mut scores = (q * width.powf(-0.5))?.matmul(&k.transpose(2, 3)?)?;
    if let Some(mask) = mask {
        scores = mask.select(&scores, f64::NEG_INFINITY)?;
    }
    let most = scores.max(&[3], true)?;
    let most = match &seen {
        Some(seen) => most.maximum(&seen.most)?,
        None => most,
    };
    scores.sub_(&most)?;
    scores.exp_()?;
    let (weights, values) = (scores.sum(&[3], true)?, scores.matmul(v)?);
    let Some(seen) = seen else { return Ok(Seen { most, weights, values }) };
    // Earlier sums are scaled down if a larger score has come.
    let less = seen.most.sub(&most)?.exp()?;
    Ok(Seen {
        most,
        weights: seen.weights.mul(&less)?.add(&weights)?,
        values: seen.values.mul(&less)?.add(&values)?,
    })
}

/// Attention of this rank's queries to the keys of all ranks, `[batch, heads, length, width]` each, of which each rank has
/// the same length. Queries are processed `tile` at a time, so that their scores stay in the cache.
pub fn ring_attention(
    ring: &Group,
    q: &Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    tile: usize,
) -> Result<Tensor> {
    let (n, length) = (ring.size(), q.shape()[2]);
    let tiles: Vec<(usize, usize)> =
        (0..length).step_by(tile).map(|first| (first, tile.min(length - first))).collect();
    let mut seen: Vec<Option<Seen>> = tiles.iter().map(|_| None).collect();
    let (mut k, mut v) = (k, v);
    for step in 0..n {
        let (mut next_k, mut next_v) =
            (Tensor::zeros(Dtype::F32, k.shape())?, Tensor::zeros(Dtype::F32, v.shape())?);
        let flying = match step + 1 < n {
            true => Some(ring.batch(vec![
                Batched::send(&k, Route::Ring(1), 0),
                Batched::send(&v, Route::Ring(1), 1),
                Batched::recv(&mut next_k, Route::Ring(-1), 0),
                Batched::recv(&mut next_v, Route::Ring(-1), 1),
            ])?),
            false => None,
        };
        // The local keys were sent by the rank `step` places before this one.
        let from = (ring.rank() + (n - step)) % n;
        for ((first, size), seen) in tiles.iter().zip(&mut seen) {
            let places = |part: &Index, first: usize, shape: [usize; 2], dim: usize| {
                Tensor::iota(Dtype::I64, &shape, dim)?.add(&Tensor::index(part * length + first)?)
            };
            let mask = match causal {
                true => Some(places(&from, 0, [1, length], 1)?.le(&places(
                    &ring.rank(),
                    *first,
                    [*size, 1],
                    0,
                )?)?),
                false => None,
            };
            let q = q.narrow(2, *first, *size)?;
            *seen = Some(attend(seen.take(), &q, &k, &v, mask.as_ref())?);
        }
        if let Some(flying) = flying {
            flying.wait()?;
            (k, v) = (next_k, next_v);
        }
    }
    let parts = seen.into_iter().flatten().map(|seen| seen.values.div(&seen.weights));
    let parts = parts.collect::<Result<Vec<Tensor>>>()?;
    Tensor::concat(&parts.iter().collect::<Vec<_>>(), 2)
}

/// This rank's part of the queries, keys or values of a sequence.
pub fn part(mesh: &Mesh, heads: usize, length: usize, width: usize, key: i64) -> Result<Tensor> {
    let (own, whole) = ([1, heads, length, width], [1, heads, length * mesh.size(), width]);
    let start = [Index::from(0), 0.into(), mesh.rank() * length, 0.into()];
    Tensor::normal_part(Dtype::F32, &own, &whole, &start, key)
}

/// The same by one op on the whole sequence.
pub fn plain(mesh: &Mesh, heads: usize, length: usize, width: usize, causal: bool) -> Result<Vec<f32>> {
    let whole = |key| Tensor::normal(Dtype::F32, &[1, heads, length * mesh.size(), width], key);
    let me = mesh.my_rank()?;
    let q = whole(1)?.narrow(2, me * length, length)?;
    let first = causal.then(|| Index::from(me * length));
    q.attention(&whole(2)?, &whole(3)?, (width as f64).powf(-0.5), first)?.to_vec()
}

fn run() -> Result<bool> {
    let mesh = consort::init()?;
    let mut most = 0f64;
    for causal in [false, true] {
        let [q, k, v] = [1, 2, 3].map(|key| part(&mesh, 4, 96, 32, key));
        let got = ring_attention(&mesh, &q?, k?, v?, causal, 64)?.to_vec::<f32>()?;
        let expected = plain(&mesh, 4, 96, 32, causal)?;
        most = most.max(tolerance::difference(&expected, &got));
    }
    println!("differs from attention on one rank by at most {most:e}");
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
