//! The leaves of arguments and results: extracted, checked, reassembled.

use std::collections::BTreeMap;
use std::rc::Rc;

use consort_ir::index::{Index, Sym};
use consort_types::Rank;
use smallvec::SmallVec;

use super::agree::{Meeting, digest};
use super::graph::Results;
use super::{Site, guards};
use crate::error::{Error, Result};
use crate::flatten::{Flatten, Map, Static, Visit};
use crate::storage::Storage;
use crate::tensor::Tensor;
use crate::world::World;

/// A leaf of the arguments.
pub(super) enum Part {
    /// A tensor, and whether it can be donated: its storage has no other owner, and no peer reads it.
    Tensor(Tensor, bool),
    Number(i64),
    Other,
}

pub(super) type Parts = SmallVec<[Part; 4]>;

/// Whether some tensor of the arguments has no data.
pub(super) fn has_shapes(args: &impl Flatten) -> bool {
    let mut found = false;
    guards::for_each_tensor(args, |tensor| found |= !tensor.has_data());
    found
}

/// Whether a tensor belongs to this world, and not to a finished trace.
pub(super) fn is_of(tensor: &Tensor, world: &World) -> bool {
    tensor.traced.is_none() && (tensor.world == 0 || tensor.world == world.id)
}

/// Checks that tensors belong to this world, and not to a finished trace.
pub(super) fn check_tensors(args: &impl Flatten, world: &World, site: Site) -> Result<()> {
    let mut wrong = None;
    guards::for_each_tensor(args, |tensor| {
        if !is_of(tensor, world) {
            wrong = Some(
                "expected tensors of this world, got one of another, or one that a traced function kept",
            );
        }
    });
    wrong.map_or(Ok(()), |message| Err(Error::new("compile", message, site)))
}

/// Checks that arguments declared equal on some ranks are equal there: the passes rely on it.
pub(super) fn check_declared(args: &impl Flatten, meeting: &Meeting<'_>) -> Result<()> {
    let (world, site) = (meeting.world, meeting.site);
    let (mut digests, mut declared, mut failed) = (Vec::new(), Vec::new(), None);
    let all_axes = world.mesh().all_axes();
    guards::for_each_tensor(args, |tensor| {
        if tensor.ty.varies == all_axes {
            return;
        }
        match tensor.with_bytes("compile", site, digest) {
            Ok(digest) => digests.extend(digest.to_le_bytes()),
            Err(error) => failed = Some(error),
        }
        declared.push(tensor.ty.varies);
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let all = meeting.gather("what is declared equal", &digests)?;
    let mesh = world.mesh();
    for (place, varies) in declared.iter().enumerate() {
        let of = |rank: usize| all.get(rank).and_then(|digests| digests.get(8 * place..8 * place + 8));
        let row = |rank: usize| {
            varies.iter().map(|axis| mesh.coordinate(Rank(rank as u32), axis)).collect::<Vec<_>>()
        };
        for rank in 1..all.len() {
            let first = (0..rank).find(|first| row(*first) == row(rank)).unwrap_or(rank);
            if of(first) != of(rank) {
                let message = format!(
                    "expected tensor {place} of those declared equal to be so, but ranks {first} and {rank} differ\n  \
                     note: `replicated` declares it; do so only with tensors that are equal"
                );
                return Err(Error::new("compile", message, site));
            }
        }
    }
    Ok(())
}

/// Replaces the traced tensors of a result by concrete ones, and its symbols by numbers.
pub(super) fn fill<R: Flatten>(
    template: &R,
    outs: &[Option<usize>],
    results: &Results,
    hints: &BTreeMap<Sym, i64>,
) -> R {
    struct Fill<'a> {
        outs: std::slice::Iter<'a, Option<usize>>,
        results: &'a Results,
        hints: &'a BTreeMap<Sym, i64>,
    }
    impl Map for Fill<'_> {
        fn tensor(&mut self, tensor: &Tensor) -> Tensor {
            let made = self.outs.next().copied().flatten();
            let made = made.and_then(|place| self.results.get(place)?.first());
            let landed = || tensor.traced.as_ref().and_then(|traced| traced.landed().cloned());
            made.cloned().or_else(landed).unwrap_or_else(|| tensor.clone())
        }
        fn index(&mut self, index: &crate::Index) -> crate::Index {
            crate::Index(index.0.substitute(&|sym| self.hints.get(&sym).map(|value| Index::constant(*value))))
        }
    }
    template.map(&mut Fill { outs: outs.iter(), results, hints })
}

/// The leaves of the arguments.
pub(super) fn parts_of(args: &impl Flatten) -> Parts {
    struct Collect(Parts);
    impl Visit for Collect {
        fn tensor(&mut self, tensor: &Tensor) {
            // A tensor that peers still read is not donated: a plan that writes it would wait for them.
            let is_own =
                |storage: &Rc<Storage>| Rc::strong_count(storage) == 1 && storage.buffer.is_released();
            let own = tensor.storage.as_ref().is_some_and(is_own);
            self.0.push(Part::Tensor(tensor.clone(), own && tensor.layout.is_contiguous()));
        }
        fn index(&mut self, index: &crate::Index) {
            self.0.push(index.0.as_const().map_or(Part::Other, Part::Number));
        }
        fn setting(&mut self, _: Static<'_>) {
            self.0.push(Part::Other);
        }
    }
    let mut collect = Collect(Parts::new());
    args.visit(&mut collect);
    collect.0
}
