//! Layers with sharded weights: by outputs, by inputs, by rows of the vocabulary.

use consort_ir::index as ir;

use super::losses::wide;
use crate::mesh::Group;
use crate::{Flatten, Index, Reduce, Result, Tensor};

/// A linear layer sharded by outputs: x is replicated, and each member computes its own columns of the
/// result.
///
/// ```
/// use consort::nn::{ColumnLinear, RowLinear, share};
/// use consort::{Dtype, Tensor};
///
/// // Two layers with one all_reduce between them and the next: columns first, rows second.
/// let sums = consort::spawn(2, |mesh| {
///     let own = share(6, mesh.my_rank()?, mesh.size());
///     let up = ColumnLinear { weight: Tensor::ones(Dtype::F32, &[own.len(), 4])?, bias: None };
///     let down = RowLinear { weight: Tensor::ones(Dtype::F32, &[4, own.len()])?, bias: None, group: (*mesh).clone() };
///     down.forward(&up.forward(&Tensor::ones(Dtype::F32, &[1, 4])?)?)?.to_vec::<f32>()
/// });
/// assert!(sums.into_iter().all(|sums| sums.is_ok_and(|sums| sums == [24.0; 4])));
/// ```
#[derive(Flatten, Clone)]
pub struct ColumnLinear {
    /// This member's rows of `[out, in]`.
    pub weight: Tensor,
    /// This member's part of the bias.
    pub bias: Option<Tensor>,
}

impl ColumnLinear {
    /// This member's columns of the result.
    ///
    /// [`ColumnLinear`] has an example.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight.t()?)?;
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }
}

/// A linear layer sharded by inputs: each member has its columns of x, and the partial results are summed.
///
/// [`ColumnLinear`] has an example.
#[derive(Flatten, Clone)]
pub struct RowLinear {
    /// This member's columns of `[out, in]`.
    pub weight: Tensor,
    /// The bias, the same on all members.
    pub bias: Option<Tensor>,
    /// The group that shares the weight.
    pub group: Group,
}

impl RowLinear {
    /// The result, replicated on all members and pending.
    ///
    /// [`ColumnLinear`] has an example.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.group.all_reduce(x.matmul(&self.weight.t()?)?, Reduce::Sum)?;
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }
}

/// An embedding table, sharded by rows; also usable as the last layer, which computes a logit for each
/// token.
///
/// ```
/// use consort::nn::{Embedding, share};
/// use consort::{Dtype, Tensor};
///
/// let rows = consort::spawn(2, |mesh| {
///     let own = share(5, mesh.my_rank()?, mesh.size());
///     let table = Tensor::iota(Dtype::F32, &[5, 2], 0)?.narrow(0, own.start, own.len())?;
///     let table = Embedding { table, sizes: vec![2, 3], group: (*mesh).clone() };
///     let rows = table.forward(&Tensor::from_iter([4i64, 0])?)?;
///     assert_eq!(table.logits(&Tensor::ones(Dtype::F32, &[1, 2])?)?.to_vec::<f32>()?, [0.0, 2.0, 4.0, 6.0, 8.0]);
///     rows.to_vec::<f32>()
/// });
/// assert!(rows.into_iter().all(|rows| rows.is_ok_and(|rows| rows == [4.0, 4.0, 0.0, 0.0])));
/// ```
#[derive(Flatten, Clone)]
pub struct Embedding {
    /// This member's rows.
    pub table: Tensor,
    /// How many rows each member has.
    pub sizes: Vec<usize>,
    /// The group that shares the table.
    pub group: Group,
}

impl Embedding {
    /// The token of this member's first row: of the rank, so that it differs along the axes of the group only.
    fn first(&self) -> Index {
        let before = self.sizes.iter().scan(0, |sum, size| {
            *sum += size;
            Some(ir::Index::from(*sum - size))
        });
        Index(ir::Index::pick(&self.group.rank().0, &before.collect::<Vec<_>>()))
    }

    /// The rows of `tokens`, which must be in the vocabulary.
    ///
    /// [`Embedding`] has an example.
    #[track_caller]
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        // A token that another member has is looked up as row 0 here, and gives zeros.
        let (place, mine) = self.own_places(tokens)?;
        let found = self.table.gather(&place, 0)?;
        let found = mine.unsqueeze(tokens.rank())?.select(&found, 0.0)?;
        self.group.all_reduce(found, Reduce::Sum)
    }

    /// The rows of tokens in this member's part, 0 for those of other members; and which are its own.
    #[track_caller]
    pub(super) fn own_places(&self, tokens: &Tensor) -> Result<(Tensor, Tensor)> {
        // Each member skips what is not in its part, so what is in no part is found by a lookup of the whole vocabulary.
        let vocabulary = self.sizes.iter().sum::<usize>();
        let checked = Tensor::index(0)?.broadcast_to(&[vocabulary])?.gather(tokens, 0)?.add(tokens)?;
        let place = checked.sub(&Tensor::index(self.first())?)?;
        let (zero, rows) = (Tensor::index(0)?, Tensor::index(self.table.dim(0)?)?);
        let mine = place.ge(&zero)?.and(&place.lt(&rows)?)?;
        Ok((mine.select(&place, &zero)?, mine))
    }

    /// A logit for each token of the vocabulary, along the last dimension, on all members.
    ///
    /// [`Embedding`] has an example.
    #[track_caller]
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let own = x.matmul(&self.table.t()?)?;
        let dim = own.rank() - 1;
        match self.sizes.iter().all(|size| *size == self.sizes[0]) {
            true => self.group.all_gather(own, dim),
            false => self.group.all_gather_v(own, dim, &self.sizes),
        }
    }
}

/// Divides by the root of the mean square along the last dimension, times a weight.
///
/// ```
/// use consort::nn::RmsNorm;
/// use consort::{Dtype, Tensor};
///
/// let rows = consort::spawn(2, |mesh| {
///     // Each member has two of four columns; the mean is over all of them.
///     let norm = RmsNorm { weight: Tensor::ones(Dtype::F32, &[2])?, eps: 0.0, group: Some((*mesh).clone()) };
///     norm.forward(&Tensor::full(Dtype::F32, &[1, 2], 3.0)?)?.to_vec::<f32>()
/// });
/// assert!(rows.into_iter().all(|row| row.is_ok_and(|row| row == [1.0, 1.0])));
/// ```
#[derive(Flatten, Clone)]
pub struct RmsNorm {
    /// The weight: this member's part if the last dimension is sharded.
    pub weight: Tensor,
    /// What is added to the mean square.
    pub eps: f64,
    /// The group that shares the last dimension; `None` if every member has all of it.
    pub group: Option<Group>,
}

impl RmsNorm {
    /// The normalised x.
    ///
    /// [`RmsNorm`] has an example.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some(group) = &self.group else { return x.rms_norm(&self.weight, self.eps) };
        let last = x.rank() - 1;
        let wide = x.cast(wide(x.dtype()))?;
        let columns = group.all_reduce(Tensor::index(x.dim(last)?)?, Reduce::Sum)?.cast(wide.dtype())?;
        let squares = group.all_reduce(wide.mul(&wide)?.sum(&[last], true)?, Reduce::Sum)?;
        let mean = squares.div(&columns)?.add(self.eps)?;
        wide.mul(&mean.rsqrt()?)?.cast(x.dtype())?.mul(&self.weight)
    }
}

/// The two layers of a transformer's feed-forward part: silu(gate x) * (up x), then down.
///
/// [`Block`](super::Block) is made of it.
#[derive(Flatten, Clone)]
pub struct SwiGlu {
    /// The first layer, which passes through silu.
    pub gate: ColumnLinear,
    /// The first layer, which is multiplied with it.
    pub up: ColumnLinear,
    /// The second layer.
    pub down: RowLinear,
}

impl SwiGlu {
    /// The result, the same on all members.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.gate.forward(x)?.silu()?.mul(&self.up.forward(x)?)?)
    }
}
