//! What holds tensors: structs of users, lists, options. Their tensors can be taken out in order, and put back.

use std::panic::Location;

use crate::error::{Error, Result};
use crate::pending::Pending;
use crate::tensor::Tensor;

/// What holds tensors, in a fixed order. Derive it for your own structs and enums; numbers, texts and the like hold
/// none and stay as they are. Nothing here waits: tensors that are on their way stay so.
///
/// ```
/// use consort::{Dtype, Flatten, Tensor};
///
/// #[derive(Flatten)]
/// struct Layer {
///     weight: Tensor,
///     bias: Option<Tensor>,
///     eps: f64,
/// }
///
/// # fn main() -> consort::Result<()> {
/// let layer = Layer { weight: Tensor::ones(Dtype::F32, &[2, 2])?, bias: None, eps: 1e-6 };
/// let tensors = layer.flatten();
/// assert_eq!(tensors.len(), 1);
/// let doubled = layer.unflatten(vec![tensors[0].add(&tensors[0])?])?;
/// assert_eq!(doubled.weight.to_vec::<f32>()?, [2.0; 4]);
/// assert_eq!(doubled.eps, 1e-6);
/// assert!(layer.unflatten(Vec::new()).is_err());
/// # Ok(()) }
/// ```
pub trait Flatten: Sized {
    /// Calls `visit` with every tensor, in order.
    fn visit(&self, visit: &mut dyn FnMut(&Tensor));

    /// The same with other tensors in the place of its own, asked for in order.
    #[must_use]
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Self;

    /// Its tensors, in order.
    fn flatten(&self) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        self.visit(&mut |tensor| tensors.push(tensor.clone()));
        tensors
    }

    /// The same with these tensors in the place of its own.
    #[track_caller]
    fn unflatten(&self, tensors: Vec<Tensor>) -> Result<Self> {
        let mut expected = 0;
        self.visit(&mut |_| expected += 1);
        if tensors.len() != expected {
            let message = format!("expected {expected} tensors, got {}", tensors.len());
            return Err(Error::new("unflatten", message, Location::caller()));
        }
        let mut tensors = tensors.into_iter();
        Ok(self.map(&mut |own| tensors.next().unwrap_or_else(|| own.clone())))
    }
}

/// Whether a function is being traced rather than run. Nothing traces yet, so it never is.
pub fn is_tracing() -> bool {
    false
}

impl Flatten for Tensor {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        visit(self);
    }
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        map(self)
    }
}

impl<T: Flatten> Flatten for Pending<T> {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.gives.visit(visit);
    }
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Pending<T> {
        Pending { gives: self.gives.map(map), flight: self.flight.clone() }
    }
}

impl<T: Flatten> Flatten for Vec<T> {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|one| one.visit(visit));
    }
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Vec<T> {
        self.iter().map(|one| one.map(map)).collect()
    }
}

impl<T: Flatten, const N: usize> Flatten for [T; N] {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|one| one.visit(visit));
    }
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> [T; N] {
        std::array::from_fn(|i| self[i].map(map))
    }
}

impl<T: Flatten> Flatten for Option<T> {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|one| one.visit(visit));
    }
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Option<T> {
        self.as_ref().map(|one| one.map(map))
    }
}

impl<T: Flatten> Flatten for Box<T> {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        (**self).visit(visit);
    }
    fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Box<T> {
        Box::new((**self).map(map))
    }
}

macro_rules! tuples {
    ($(($($name:ident $place:tt),+))*) => {$(
        impl<$($name: Flatten),+> Flatten for ($($name,)+) {
            fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
                $(self.$place.visit(visit);)+
            }
            fn map(&self, map: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
                ($(self.$place.map(map),)+)
            }
        }
    )*};
}

tuples! { (A 0) (A 0, B 1) (A 0, B 1, C 2) (A 0, B 1, C 2, D 3) (A 0, B 1, C 2, D 3, E 4) }

macro_rules! without_tensors {
    ($($ty:ty),*) => {$(
        impl Flatten for $ty {
            fn visit(&self, _: &mut dyn FnMut(&Tensor)) {}
            fn map(&self, _: &mut dyn FnMut(&Tensor) -> Tensor) -> $ty {
                self.clone()
            }
        }
    )*};
}

without_tensors!((), bool, u8, u32, u64, usize, i32, i64, f32, f64, String, crate::Dtype, crate::Index);
