//! A cache of the outcomes of ops' type rules.
//!
//! A rule is a pure function of the op and of the operands' types. Tensors share their types, so lookups compare
//! addresses; the cache keeps types alive, so their addresses stay valid.

use std::rc::Rc;

use consort_ir::ops::{Op, OpDef};
use consort_ir::types::TensorType;
use consort_types::Axes;
use smallvec::SmallVec;

use crate::apply::Prepared;
use crate::tensor::Tensor;

/// Number of slots; on a collision the new entry replaces the old one.
const PLACES: usize = 256;

/// Calls, hashed by the addresses of their types, and types, hashed by their sizes, so that equal types share an
/// address.
pub(crate) struct Memo {
    places: Vec<Option<Entry>>,
    types: Vec<Option<Rc<TensorType>>>,
}

struct Entry {
    op: Op,
    types: SmallVec<[Rc<TensorType>; 3]>,
    prepared: Rc<Prepared>,
}

impl Default for Memo {
    fn default() -> Memo {
        Memo { places: (0..PLACES).map(|_| None).collect(), types: vec![None; PLACES] }
    }
}

/// The slot of a call. Allocations are aligned to 16 bytes.
fn place(op: &dyn OpDef, args: &[Tensor]) -> usize {
    let mix = |hash: usize, address: usize| (hash ^ (address >> 4)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let start = mix(0, std::ptr::from_ref(op.info()) as usize);
    args.iter().fold(start, |hash, arg| mix(hash, Rc::as_ptr(&arg.ty) as usize)) >> 40 & (PLACES - 1)
}

impl Memo {
    /// The shared copy of an equal type.
    pub(crate) fn share(&mut self, ty: TensorType) -> Rc<TensorType> {
        let place = self.place_of_type(&ty, ty.varies);
        match place {
            Some(known) if **known == ty => Rc::clone(known),
            _ => Rc::clone(place.insert(Rc::new(ty))),
        }
    }

    /// The shared copy of this type with other varying axes.
    pub(crate) fn varying(&mut self, ty: &TensorType, varies: Axes) -> Rc<TensorType> {
        let place = self.place_of_type(ty, varies);
        match place {
            Some(known) if known.varies == varies && known.dtype == ty.dtype && known.shape == ty.shape => {
                Rc::clone(known)
            }
            _ => Rc::clone(place.insert(Rc::new(ty.with_varies(varies)))),
        }
    }

    fn place_of_type(&mut self, ty: &TensorType, varies: Axes) -> &mut Option<Rc<TensorType>> {
        let mix = |hash: usize, number: i64| (hash ^ number as usize).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let sizes = ty.shape.iter().map(|size| size.as_const().unwrap_or(-1));
        let start = mix(ty.dtype as usize, varies.iter().map(|axis| 1 << axis.0).sum());
        &mut self.types[sizes.fold(start, mix) >> 40 & (PLACES - 1)]
    }

    /// The cached outcome of an op's type rule for operands of these types.
    #[inline]
    pub(crate) fn find(&self, op: &dyn OpDef, args: &[Tensor]) -> Option<Rc<Prepared>> {
        let entry = self.places[place(op, args)].as_ref()?;
        let same = entry.types.len() == args.len()
            && entry.types.iter().zip(args).all(|(ty, arg)| Rc::ptr_eq(ty, &arg.ty))
            && entry.op.same(op);
        same.then(|| Rc::clone(&entry.prepared))
    }

    pub(crate) fn keep(&mut self, op: &dyn OpDef, args: &[Tensor], prepared: &Rc<Prepared>) {
        let types = args.iter().map(|arg| Rc::clone(&arg.ty)).collect();
        let entry = Entry { op: op.to_op(), types, prepared: Rc::clone(prepared) };
        self.places[place(op, args)] = Some(entry);
    }
}
