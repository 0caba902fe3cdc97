//! The forward pass of a transformer with sharded weights: two sums over all ranks in each layer.

use consort::{Dtype, Flatten, Group, Reduce, Result, Tensor};

/// The sizes of a model.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) ffn: usize,
    pub(crate) seq: usize,
    pub(crate) layers: usize,
}

/// The cases and their sizes.
pub(crate) const SIZES: [(&str, Sizes); 3] = [
    ("tp_brief", Sizes { hidden: 1024, heads: 16, ffn: 2816, seq: 256, layers: 8 }),
    ("tp_decode", Sizes { hidden: 1024, heads: 16, ffn: 2816, seq: 1, layers: 8 }),
    ("tp_tiny", Sizes { hidden: 128, heads: 4, ffn: 256, seq: 16, layers: 8 }),
];

impl Sizes {
    /// Whether `ranks` ranks can share the weights evenly.
    pub(crate) fn divide(&self, ranks: usize) -> bool {
        self.heads.is_multiple_of(ranks) && self.ffn.is_multiple_of(ranks)
    }
}

/// A rank's part of all weights.
#[derive(Clone, Flatten)]
pub(crate) struct Model {
    layers: Vec<Layer>,
    heads: usize,
}

#[derive(Clone, Flatten)]
struct Layer {
    norm1: Tensor,
    qkv: Tensor,
    out: Tensor,
    norm2: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Model {
    /// Weights of the right sizes; their values do not matter.
    pub(crate) fn new(sizes: &Sizes, ranks: usize) -> Result<Model> {
        let Sizes { hidden, heads, ffn, layers, .. } = *sizes;
        let mut key = 0;
        let mut weight = |rows: usize, cols: usize| {
            key += 1;
            &Tensor::uniform(Dtype::F32, &[rows, cols], key)? * (3.0 / rows as f64).sqrt()
        };
        let mut layer = || {
            Ok(Layer {
                norm1: Tensor::ones(Dtype::F32, &[hidden])?,
                qkv: weight(hidden, 3 * hidden / ranks)?,
                out: weight(hidden / ranks, hidden)?,
                norm2: Tensor::ones(Dtype::F32, &[hidden])?,
                gate: weight(hidden, ffn / ranks)?,
                up: weight(hidden, ffn / ranks)?,
                down: weight(ffn / ranks, hidden)?,
            })
        };
        let layers = (0..layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Model { layers, heads: heads / ranks })
    }

    /// With sums over a group; without them the result is wrong, and the time shows what they cost.
    pub(crate) fn forward(&self, group: Option<&Group>, mut x: Tensor) -> Result<Tensor> {
        let reduce = |x: Tensor| match group {
            Some(group) => group.all_reduce(x, Reduce::Sum),
            None => Ok(x),
        };
        for layer in &self.layers {
            x = layer.forward(&reduce, x, self.heads)?;
        }
        Ok(x)
    }
}

impl Layer {
    fn forward(&self, reduce: &dyn Fn(Tensor) -> Result<Tensor>, x: Tensor, heads: usize) -> Result<Tensor> {
        let (seq, own) = (x.shape()[0], self.out.shape()[0]);
        let width = own / heads;
        let qkv = x.rms_norm(&self.norm1, 1e-6)?.matmul(&self.qkv)?;
        let qkv = qkv.reshape(&[seq, 3, heads, width])?.permute(&[1, 2, 0, 3])?;
        let (q, k, v) = (qkv.narrow(0, 0, 1)?, qkv.narrow(0, 1, 1)?, qkv.narrow(0, 2, 1)?);
        let seen = q.attention(&k, &v, 1.0 / (width as f64).sqrt(), Some(0.into()))?;
        let seen = seen.permute(&[0, 2, 1, 3])?.reshape(&[seq, own])?;
        let x = x.add(&reduce(seen.matmul(&self.out)?)?)?;
        let h = x.rms_norm(&self.norm2, 1e-6)?;
        let gated = h.matmul(&self.gate)?.silu()?.mul(&h.matmul(&self.up)?)?;
        x.add(&reduce(gated.matmul(&self.down)?)?)
    }
}
