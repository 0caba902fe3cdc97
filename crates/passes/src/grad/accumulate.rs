//! Adds cotangents. That of a slice is zeros with a part in them, so it is added where the part lies: a value that is read
//! through many slices has one tensor of its size, which is updated in place, and the work is that of the parts.

use std::collections::BTreeMap;

use consort_ir::entity::Value;
use consort_ir::index::{Facts, Index};
use consort_ir::ops::{Add, Pad, Slice, UpdateSlice};
use consort_types::Failure;

use super::backward::{Backward, Cotangents};

/// The most parts of one cotangent that a new one is compared with.
const MAX_PARTS: usize = 256;

/// A part of a cotangent, and where it lies in each dimension.
#[derive(Clone)]
struct Part {
    value: Value,
    start: Vec<Index>,
    size: Vec<Index>,
}

impl Part {
    /// Whether it is known to share no element with another.
    fn is_apart(&self, other: &Part, facts: &Facts) -> bool {
        let ends_before = |a: &Part, b: &Part, dim: usize| {
            facts.le(&(&a.start[dim] + &a.size[dim]), &b.start[dim]) == Some(true)
        };
        (0..self.start.len()).any(|dim| ends_before(self, other, dim) || ends_before(other, self, dim))
    }
}

/// A cotangent that is zero outside of its parts.
struct Sparse {
    parts: Vec<Part>,
    /// Whether no two share an element, so that it holds each of them as it is.
    apart: bool,
}

/// What is known of cotangents that are zero but for some parts.
#[derive(Default)]
pub(super) struct Parts(BTreeMap<Value, Sparse>);

impl Backward<'_, '_> {
    /// Remembers which values of a rule, whose first node is `from`, are padded with zeros.
    pub(super) fn note_parts(&mut self, from: usize) -> Result<(), Box<Failure>> {
        for node in self.builder.nodes().iter().skip(from) {
            let Some(pad) = node.op.as_op::<Pad>().filter(|pad| pad.value == 0.0) else { continue };
            if pad.low.iter().chain(&pad.high).all(|n| n.as_const() == Some(0)) {
                continue;
            }
            let (value, size) = (node.args[0], self.builder.tensor_ty(node.args[0])?.shape);
            let parts = vec![Part { value, start: pad.low.clone(), size }];
            self.parts.0.insert(node.results[0], Sparse { parts, apart: true });
        }
        Ok(())
    }

    /// Adds to the cotangent of a tensor.
    pub(super) fn add(
        &mut self,
        cotangents: &mut Cotangents,
        key: (Value, usize),
        value: Value,
    ) -> Result<(), Box<Failure>> {
        let sum = match cotangents.get(&key) {
            Some(before) => self.sum(*before, value)?,
            None => value,
        };
        cotangents.insert(key, sum);
        Ok(())
    }

    /// The sum of two cotangents. The parts of one are put into the other.
    pub(super) fn sum(&mut self, a: Value, b: Value) -> Result<Value, Box<Failure>> {
        let parts = |value: &Value| self.parts.0.get(value).filter(|sparse| sparse.apart);
        let (into, parts) = match (parts(&a), parts(&b)) {
            (_, Some(sparse)) => (a, sparse.parts.clone()),
            (Some(sparse), None) => (b, sparse.parts.clone()),
            (None, None) => return self.builder.one(Add {}, &[a, b]),
        };
        parts.into_iter().try_fold(into, |into, part| self.put(into, part))
    }

    /// A cotangent with a part added to it, or in the place of its zeros there.
    fn put(&mut self, into: Value, part: Part) -> Result<Value, Box<Failure>> {
        let sparse = self.parts.0.remove(&into).filter(|sparse| sparse.parts.len() < MAX_PARTS);
        let facts = self.builder.facts();
        let apart = |sparse: &Sparse| sparse.parts.iter().all(|other| part.is_apart(other, facts));
        let is_zero = sparse.as_ref().is_some_and(apart);
        let start = part.start.clone();
        let new = if is_zero {
            part.value
        } else {
            let (start, size, step) = (start.clone(), part.size.clone(), vec![1; start.len()]);
            let old = self.builder.one(Slice { start, size, step }, &[into])?;
            self.builder.one(Add {}, &[old, part.value])?
        };
        let sum = self.builder.one(UpdateSlice { start }, &[into, new])?;
        if let Some(mut sparse) = sparse {
            sparse.parts.push(part);
            sparse.apart &= is_zero;
            self.parts.0.insert(sum, sparse);
        }
        Ok(sum)
    }
}
