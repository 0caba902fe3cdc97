//! Attention with sharded heads and a cache of keys and values.

use crate::{Dtype, Flatten, Index, Result, Tensor};

use super::layers::{ColumnLinear, RowLinear};
use super::losses::wide;

/// Rotary position embedding: rotates pairs of the last dimension by angles that grow with the position along the one
/// before it, counted from `first`. Entry i of each half form a pair, as in Llama.
///
/// ```
/// use consort::nn::rotate;
/// use consort::{Dtype, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let x = Tensor::from_slice(&[1.0f32, 0.0], &[1, 1, 1, 2])?;
/// assert_eq!(rotate(&x, &0.into(), 10000.0)?.to_vec::<f32>()?, [1.0, 0.0]); // Place 0: not at all.
/// let turned = rotate(&x, &1.into(), 10000.0)?.to_vec::<f32>()?;
/// assert!((turned[0] - 1f32.cos()).abs() < 1e-6 && (turned[1] - 1f32.sin()).abs() < 1e-6);
/// # Ok(()) }
/// ```
#[track_caller]
pub fn rotate(x: &Tensor, first: &Index, base: f64) -> Result<Tensor> {
    let (length, width) = (x.dim(2)?, x.dim(3)?);
    let half = &width / 2;
    // The angle of pair i at position p is p / base^(i / half).
    let dtype = wide(x.dtype());
    let pairs = Tensor::iota(dtype, &[Index::from(1), half.clone()], 1)?;
    let halves = Tensor::index(half.clone())?.cast(dtype)?;
    let speed = pairs.div(&halves)?.mul(-base.ln())?.exp()?;
    let place = Tensor::iota(dtype, &[length, Index::from(1)], 0)?;
    let place = place.add(&Tensor::index(first.clone())?.cast(dtype)?)?;
    let angle = place.mul(&speed)?;
    let (cos, sin) = (angle.cos()?, angle.sin()?);
    let wide = x.cast(dtype)?;
    let (a, b) = (wide.narrow(3, 0, half.clone())?, wide.narrow(3, half.clone(), half)?);
    let turned = [a.mul(&cos)?.sub(&b.mul(&sin)?)?, b.mul(&cos)?.add(&a.mul(&sin)?)?];
    Tensor::concat(&[&turned[0], &turned[1]], 3)?.cast(x.dtype())
}

/// Keys and values of the tokens so far: `[batch, heads, places, width]`.
///
/// [`Attention::forward`] writes to it.
#[derive(Flatten, Clone)]
pub struct KvCache {
    /// The keys.
    pub keys: Tensor,
    /// The values.
    pub values: Tensor,
}

impl KvCache {
    /// A cache for `places` tokens.
    #[track_caller]
    pub fn new(dtype: Dtype, heads: usize, places: usize, width: usize) -> Result<KvCache> {
        // Each member has other heads.
        let zeros = || Tensor::zeros(dtype, &[1, heads, places, width])?.may_differ();
        Ok(KvCache { keys: zeros()?, values: zeros()? })
    }
}

/// Attention of this member's heads; the results are added over the members.
///
/// [`Block`](super::Block) is made of it.
#[derive(Flatten, Clone)]
pub struct Attention {
    /// Queries of this member's heads.
    pub query: ColumnLinear,
    /// Keys of this member's heads.
    pub key: ColumnLinear,
    /// Values of this member's heads.
    pub value: ColumnLinear,
    /// From heads to the hidden dimension.
    pub out: RowLinear,
    /// The width of a head.
    pub width: usize,
    /// The base of the rotary angles.
    pub base: f64,
}

impl Attention {
    /// For tokens `[length, hidden]` from position `first` on: writes their keys and values to the cache. Each token
    /// attends to itself and to earlier ones.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, cache: &mut KvCache, first: &Index) -> Result<Tensor> {
        let length = x.dim(0)?;
        let heads = |y: Tensor| -> Result<Tensor> {
            let heads = y.dim(1)? / self.width;
            y.reshape(&[length.clone(), heads, self.width.into()])?.permute(&[1, 0, 2])?.unsqueeze(0)
        };
        let query = rotate(&heads(self.query.forward(x)?)?, first, self.base)?;
        let key = rotate(&heads(self.key.forward(x)?)?, first, self.base)?;
        let value = heads(self.value.forward(x)?)?;
        cache.keys.narrow_mut(2, first.clone(), length.clone())?.copy_from(&key)?;
        cache.values.narrow_mut(2, first.clone(), length.clone())?.copy_from(&value)?;
        let seen = first + &length;
        let (keys, values) = (cache.keys.narrow(2, 0, seen.clone())?, cache.values.narrow(2, 0, seen)?);
        let scale = 1.0 / (self.width as f64).sqrt();
        let mixed = query.attention(&keys, &values, scale, Some(first.clone()))?.squeeze(0)?;
        let own = mixed.dim(0)? * self.width;
        self.out.forward(&mixed.permute(&[1, 0, 2])?.reshape(&[length, own])?)
    }

    /// For whole sequences `[batch, length, hidden]`, without a cache: what training computes. Each token attends to itself
    /// and to earlier ones.
    #[track_caller]
    pub fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let heads = |layer: &ColumnLinear| -> Result<Tensor> {
            let y = layer.forward(x)?;
            let heads = y.dim(2)? / self.width;
            let shape = [batch.clone(), length.clone(), heads, self.width.into()];
            y.reshape(&shape)?.permute(&[0, 2, 1, 3])
        };
        let query = rotate(&heads(&self.query)?, &0.into(), self.base)?;
        let key = rotate(&heads(&self.key)?, &0.into(), self.base)?;
        let scale = 1.0 / (self.width as f64).sqrt();
        let mixed = query.attention(&key, &heads(&self.value)?, scale, Some(0.into()))?;
        let own = mixed.dim(1)? * self.width;
        self.out.forward(&mixed.permute(&[0, 2, 1, 3])?.reshape(&[batch.clone(), length.clone(), own])?)
    }
}
