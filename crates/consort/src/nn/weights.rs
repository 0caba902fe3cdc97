//! Where weights come from: a file of which each member reads its part, or numbers from a key.

use std::ops::Range;

use consort_types::{Axes, Digest, GroupName};

use crate::mesh::Group;
use crate::{Dtype, Result, Safetensors, Tensor};

/// Where weights come from.
///
/// Ranks that differ only in their places along other axes than those of the group get the same part, and all ranks the
/// same norms: compiled functions take them so, and compare them at their first call.
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
    /// A member's part along a dimension of a weight of this shape, of which each member of the group has its own.
    #[track_caller]
    pub fn part(
        &self,
        name: &str,
        shape: &[usize; 2],
        dim: usize,
        (group, own): (&Group, Range<usize>),
        dtype: Dtype,
    ) -> Result<Tensor> {
        let part = match self {
            Weights::Random { key } => {
                let mut part = *shape;
                part[dim] = own.len();
                let mut start = [0; 2];
                start[dim] = own.start;
                // Scaled so that activations keep their magnitude.
                let scale = (1.0 / shape[1] as f64).sqrt();
                Tensor::normal_part(Dtype::F32, &part, shape, &start, key + number(name))?
                    .mul(scale)?
                    .cast(dtype)?
            }
            Weights::File(file) => {
                file.check_shape(name, shape)?;
                file.part(name, dim, own.start, own.len())?.cast(dtype)?
            }
        };
        let GroupName::Axes(axes) = group.over else { return Ok(part) };
        Ok(part.with_origin(self.origin(name, shape, dim, (axes, dtype)), axes))
    }

    /// The weight of a norm, the same on all ranks.
    #[track_caller]
    pub fn norm(&self, name: &str, size: usize, dtype: Dtype) -> Result<Tensor> {
        match self {
            Weights::Random { .. } => Tensor::ones(dtype, &[size]),
            Weights::File(file) => {
                file.check_shape(name, &[size])?;
                file.tensor(name)?.cast(dtype)
            }
        }
    }

    /// What a weight is a part of, and how it is divided: the same for all members, which differ in their places alone. The
    /// key of random numbers is left out, so that weights of ranks with different keys are compared and refused.
    fn origin(&self, name: &str, shape: &[usize; 2], dim: usize, (axes, dtype): (Axes, Dtype)) -> Digest {
        let mut digest = match self {
            Weights::Random { .. } => Digest::default(),
            Weights::File(file) => file.digest(),
        };
        digest.add_bytes(name.as_bytes());
        digest.add_all([shape[0], shape[1], dim, dtype as usize].map(|number| number as u64));
        digest.add_all(axes.iter().map(|axis| u64::from(axis.0)));
        digest
    }
}

/// A hash of a name, for the key of its random numbers.
fn number(name: &str) -> i64 {
    name.bytes().fold(0, |number: i64, byte| number.wrapping_mul(131).wrapping_add(i64::from(byte))) >> 8
}
