//! Where weights come from: a file of which each member reads its part, or numbers from a key.

use std::ops::Range;

use crate::{Dtype, Result, Safetensors, Tensor};

/// Where weights come from.
pub enum Weights {
    /// Random numbers, which do not depend on the sharding.
    Random {
        /// The key.
        key: i64,
    },
    /// A safetensors file.
    File(Safetensors),
}

impl Weights {
    /// The part along a dimension of a weight of this shape.
    #[track_caller]
    pub fn part(
        &self,
        name: &str,
        shape: &[usize; 2],
        dim: usize,
        own: Range<usize>,
        dtype: Dtype,
    ) -> Result<Tensor> {
        match self {
            Weights::Random { key } => {
                let mut part = *shape;
                part[dim] = own.len();
                let mut start = [0; 2];
                start[dim] = own.start;
                // Scaled so that activations keep their magnitude.
                let scale = (1.0 / shape[1] as f64).sqrt();
                Tensor::normal_part(Dtype::F32, &part, shape, &start, key + number(name))?
                    .mul(scale)?
                    .cast(dtype)
            }
            Weights::File(file) => {
                file.check_shape(name, shape)?;
                file.part(name, dim, own.start, own.len())?.cast(dtype)
            }
        }
    }

    /// The weight of a norm, replicated on all members.
    #[track_caller]
    pub fn norm(&self, name: &str, size: usize, dtype: Dtype) -> Result<Tensor> {
        match self {
            Weights::Random { .. } => Tensor::ones(dtype, &[size]),
            Weights::File(file) => {
                file.check_shape(name, &[size])?;
                file.tensor(name)?.cast(dtype)?.replicated()
            }
        }
    }
}

/// A hash of a name, for the key of its random numbers.
fn number(name: &str) -> i64 {
    name.bytes().fold(0, |number: i64, byte| number.wrapping_mul(131).wrapping_add(i64::from(byte))) >> 8
}
