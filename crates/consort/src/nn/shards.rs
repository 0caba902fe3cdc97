//! Parameters of which each member of a group keeps its rows (ZeRO-3, FSDP).

use consort_ir::index as ir;

use crate::mesh::Group;
use crate::{Flatten, Index, Result, Tensor};

use super::share;

/// Parameters of which each member of a group keeps some rows, and gathers the others where they are used. Their gradients,
/// and the state of an optimizer, are shards too.
///
/// ```
/// use consort::nn::{Parts, Shards};
/// use consort::{Dtype, Tensor};
///
/// let done = consort::spawn(2, |mesh| {
///     let weight = Tensor::iota(Dtype::F64, &[3, 2], 0)?;
///     let shards = Shards::of(&weight, &mesh)?;
///     assert_eq!(shards.rows.shape(), [1 + mesh.my_rank()?, 2]);
///     assert_eq!(shards.whole()?.to_vec::<f64>()?, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
///     // For a checkpoint: rows of all but 0-d tensors, such as the counter of an optimizer.
///     let parts = Parts::whole(&shards).split(&mesh, |_, shape| (!shape.is_empty()).then_some(0))?;
///     assert_eq!(parts.shapes(), [[3, 2]]);
///     Ok(())
/// });
/// assert!(done.into_iter().all(|done| done.is_ok()));
/// ```
#[derive(Flatten, Clone)]
pub struct Shards<P> {
    /// This member's rows of each tensor; all of a 0-d one.
    pub rows: P,
    /// How many rows each tensor has on all members.
    sizes: Vec<usize>,
    /// The members.
    group: Group,
}

impl<P: Flatten> Shards<P> {
    /// This member's rows of parameters that all members have.
    ///
    /// [`Shards`] has an example.
    #[track_caller]
    pub fn of(whole: &P, group: &Group) -> Result<Shards<P>> {
        let (mut rows, mut sizes) = (Vec::new(), Vec::new());
        for tensor in whole.flatten() {
            let Some(size) = tensor.shape().first().copied() else {
                sizes.push(0);
                rows.push(tensor);
                continue;
            };
            // Of the rank, so that they differ along the axes of the group only.
            let own = |number: fn(std::ops::Range<usize>) -> usize| {
                let all = (0..group.size()).map(|member| number(share(size, member, group.size())));
                let all: Vec<_> = all.map(ir::Index::from).collect();
                Index(ir::Index::pick(&group.rank().0, &all))
            };
            let part = tensor.narrow(0, own(|range| range.start), own(|range| range.len()))?;
            // A copy, so that the whole tensor is freed.
            rows.push(Tensor::concat(&[&part], 0)?);
            sizes.push(size);
        }
        Ok(Shards { rows: whole.unflatten(rows)?, sizes, group: group.clone() })
    }

    /// The parameters, gathered, equal on all members. A gradient does not keep them: it gathers them again.
    ///
    /// [`Shards`] has an example.
    #[track_caller]
    pub fn whole(&self) -> Result<P> {
        let members = self.group.size();
        let mut whole = Vec::new();
        for (rows, size) in self.rows.flatten().into_iter().zip(&self.sizes) {
            whole.push(match rows.rank() {
                0 => rows,
                _ if size.is_multiple_of(members) => self.group.all_gather(rows, 0)?.regather()?,
                _ => {
                    let sizes: Vec<usize> =
                        (0..members).map(|member| share(*size, member, members).len()).collect();
                    self.group.all_gather_v(rows, 0, &sizes)?.regather()?
                }
            });
        }
        self.rows.unflatten(whole)
    }
}
