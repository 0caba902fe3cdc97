//! The cache of a function's compilations, and the sizes of its calls. Lookup time does not grow with the cache.

use std::collections::BTreeMap;
use std::rc::Rc;

use consort_types::Digest;

use super::agree::{digest_of, same_program};
use super::call::Entry;
use super::graph::Graph;
use super::guards::{Bound, Leaf, Size, is_kind_of};
use crate::flatten::{Flatten, Static, Visit};
use crate::tensor::Tensor;
use crate::world::World;

/// The compilations of a function.
pub(super) struct Entries<R> {
    /// The most recently used entry, which usually matches again.
    last: Option<Rc<Entry<R>>>,
    /// All entries, by a digest of the kinds of their arguments.
    by_kind: BTreeMap<u64, Vec<Rc<Entry<R>>>>,
    /// All entries, in the order in which they were compiled.
    all: Vec<Rc<Entry<R>>>,
    /// For each structure of arguments, the sizes common to all compilations; `None` for a size that has changed.
    sizes: BTreeMap<u64, Vec<Option<i64>>>,
}

impl<R> Default for Entries<R> {
    fn default() -> Entries<R> {
        Entries { last: None, by_kind: BTreeMap::new(), all: Vec::new(), sizes: BTreeMap::new() }
    }
}

impl<R> Entries<R> {
    /// The number of compilations.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The compilations, in order.
    pub(super) fn all(&self) -> &[Rc<Entry<R>>] {
        &self.all
    }

    /// The most recently used entry.
    pub(super) fn last(&self) -> Option<&Rc<Entry<R>>> {
        self.last.as_ref()
    }

    /// The entry whose guards the arguments satisfy, with the values of its symbols.
    pub(super) fn find(&mut self, args: &impl Flatten, world: &World) -> Option<(Rc<Entry<R>>, Bound)> {
        if let Some(last) = &self.last
            && let Some(bound) = last.fits(args, world)
        {
            return Some((Rc::clone(last), bound));
        }
        if self.all.len() < 2 {
            return None;
        }
        let (entry, bound) = self.by_kind.get(&kind_of(args))?.iter().find_map(|entry| {
            let bound = entry.fits(args, world)?;
            Some((Rc::clone(entry), bound))
        })?;
        self.last = Some(Rc::clone(&entry));
        Some((entry, bound))
    }

    /// The sizes common to all compilations for arguments of this structure; `None` for a size that has changed.
    pub(super) fn sizes(&self, leaves: &[Leaf]) -> Option<&[Option<i64>]> {
        self.sizes.get(&structure_of(leaves)).map(Vec::as_slice)
    }

    /// Adds an entry that was compiled for these arguments.
    pub(super) fn add(&mut self, entry: Rc<Entry<R>>, args: &impl Flatten, leaves: &[Leaf]) {
        let now: Vec<Option<i64>> = entry
            .pattern
            .sizes()
            .map(|size| match size {
                Size::Is(size) => Some(*size),
                Size::Symbol(..) => None,
            })
            .collect();
        let seen = self.sizes.entry(structure_of(leaves)).or_insert_with(|| now.clone());
        seen.iter_mut().zip(now).filter(|(seen, now)| **seen != *now).for_each(|(seen, _)| *seen = None);
        self.by_kind.entry(kind_of(args)).or_default().push(Rc::clone(&entry));
        self.all.push(Rc::clone(&entry));
        self.last = Some(entry);
    }
}

/// A digest of the properties that all guards compare, without sizes.
fn kind_of(args: &impl Flatten) -> u64 {
    struct Kind(Digest);
    impl Visit for Kind {
        fn tensor(&mut self, tensor: &Tensor) {
            self.0.add_all([1, tensor.dtype() as u64, tensor.rank() as u64]);
        }
        fn index(&mut self, index: &crate::Index) {
            self.0.add(2 + u64::from(index.0.as_const().is_some()));
        }
        fn setting(&mut self, setting: Static<'_>) {
            match setting {
                Static::Int(number) => self.0.add_all([4, number as u64, (number >> 64) as u64]),
                Static::Float(number) => self.0.add_all([5, number.to_bits()]),
                Static::Text(text) => {
                    self.0.add(6);
                    self.0.add_bytes(text.as_bytes());
                }
            }
        }
    }
    let mut kind = Kind(Digest::default());
    args.visit(&mut kind);
    kind.0.get()
}

/// A digest of the structure of arguments, without sizes and settings.
fn structure_of(leaves: &[Leaf]) -> u64 {
    let mut digest = Digest::default();
    digest.add_all(leaves.iter().map(is_kind_of));
    digest.get()
}

/// The programs of a function's graphs, by their texts.
#[derive(Default)]
pub(super) struct Graphs {
    /// In the order in which they were made.
    list: Vec<Rc<Graph>>,
    by_text: BTreeMap<u64, Vec<Rc<Graph>>>,
}

impl Graphs {
    pub(super) fn list(&self) -> Vec<Rc<Graph>> {
        self.list.clone()
    }

    /// Forgets a graph that was made last, and is not run.
    pub(super) fn forget(&mut self, graph: &Rc<Graph>) {
        self.list.retain(|known| !Rc::ptr_eq(known, graph) || known.planned.get() > 0);
        self.by_text.values_mut().for_each(|list| {
            list.retain(|known| !Rc::ptr_eq(known, graph) || known.planned.get() > 0);
        });
    }

    /// The known graph with the same text, source lines apart; adds this one if there is none.
    pub(super) fn share(&mut self, graph: Graph) -> Rc<Graph> {
        let same = self.by_text.entry(digest_of(&graph.text)).or_default();
        let is_same = |known: &&Rc<Graph>| {
            known.roles_over == graph.roles_over && same_program(&known.text, &graph.text)
        };
        if let Some(known) = same.iter().find(is_same) {
            return Rc::clone(known);
        }
        let graph = Rc::new(graph);
        same.push(Rc::clone(&graph));
        self.list.push(Rc::clone(&graph));
        graph
    }
}
