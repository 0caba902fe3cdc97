//! Types that contain tensors: users' structs, lists, options. Their tensors can be taken out in order, and put back.

use std::fmt::Display;
use std::panic::Location;

use crate::error::{Error, Result};
use crate::index::Index;
use crate::mesh::{Group, Mesh};
use crate::pending::{Pending, Started};
use crate::tensor::Tensor;

/// A type that contains tensors, in a fixed order. Derive it for your own structs and enums; numbers, strings and the
/// like contain none and are kept. Nothing here blocks: pending tensors stay pending.
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
///
/// A field may be declared equal over axes of the mesh. A compiled function takes its tensors as such, which is checked at
/// its first call, and must return them so: a step that forgets to reduce a gradient is an error of the trace.
///
/// ```
/// use consort::{Flatten, Init, Reduce, Tensor, compile_mut};
///
/// #[derive(Flatten)]
/// struct Model {
///     #[flatten(equal_over = "dp")]
///     weight: Tensor,
/// }
///
/// let results = Init::new().axes(&[("dp", 2)]).spawn(2, |mesh| {
///     let dp = mesh.axis("dp")?;
///     let forgets = compile_mut(|model: &mut Model, grad: Tensor| model.weight.sub_(&grad));
///     let sums = compile_mut(move |model: &mut Model, grad: Tensor| {
///         model.weight.sub_(&dp.all_reduce(grad, Reduce::Sum)?)
///     });
///     let mut model = Model { weight: Tensor::from_iter([1.0f32])? };
///     let error = forgets.call(&mut model, Tensor::from_iter([0.5f32])?).unwrap_err().to_string();
///     assert!(error.contains("expected field `weight` equal over dp"), "{error}");
///     sums.call(&mut model, Tensor::from_iter([0.5f32])?)?;
///     model.weight.to_vec::<f32>()
/// });
/// assert!(results.into_iter().all(|weight| weight.is_ok_and(|weight| weight == [0.0])));
/// ```
pub trait Flatten: Sized {
    /// Visits every tensor, size, handle and setting, in order.
    fn visit(&self, visit: &mut dyn Visit);

    /// A copy with its tensors and sizes replaced, in order.
    #[must_use]
    fn map(&self, map: &mut dyn Map) -> Self;

    /// Its tensors, in order.
    fn flatten(&self) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        self.visit(&mut VisitTensors(|tensor: &Tensor| tensors.push(tensor.clone())));
        tensors
    }

    /// A copy with its tensors replaced by these.
    #[track_caller]
    fn unflatten(&self, tensors: Vec<Tensor>) -> Result<Self> {
        let mut expected = 0;
        self.visit(&mut VisitTensors(|_: &Tensor| expected += 1));
        if tensors.len() != expected {
            let message = (format!("{expected} tensors"), tensors.len().to_string());
            return Err(Error::new("unflatten", message, Location::caller()));
        }
        let mut tensors = tensors.into_iter();
        Ok(self.map(&mut MapTensors(|own: &Tensor| tensors.next().unwrap_or_else(|| own.clone()))))
    }
}

/// A visitor of the leaves of a value.
///
/// ```
/// use consort::{Flatten, Static, Tensor, Visit};
///
/// /// Counts settings.
/// struct Count(usize);
/// impl Visit for Count {
///     fn tensor(&mut self, _: &Tensor) {}
///     fn setting(&mut self, _: Static<'_>) {
///         self.0 += 1;
///     }
/// }
///
/// let mut count = Count(0);
/// (1usize, true).visit(&mut count);
/// assert_eq!(count.0, 2);
/// ```
pub trait Visit {
    /// A tensor.
    fn tensor(&mut self, tensor: &Tensor);
    /// A tensor of a field that is declared equal over axes, as [`Flatten`] shows.
    fn equal_over(&mut self, tensor: &Tensor, _field: &'static str, _axes: &[&'static str]) {
        self.tensor(tensor);
    }
    /// A size or place.
    fn index(&mut self, _index: &Index) {}
    /// What a handle waits for.
    fn started(&mut self, _started: &Started) {}
    /// Any other leaf: a compiled function is recompiled if it changes.
    fn setting(&mut self, _setting: Static<'_>) {}
    /// The leaves up to [`leave`](Visit::leave) are in this field, or at this place of a list.
    fn enter(&mut self, _field: &dyn Display) {}
    /// The end of a field.
    fn leave(&mut self) {}
}

/// A map over the leaves of a value.
///
/// [`Flatten::unflatten`] uses it.
pub trait Map {
    /// The replacement of a tensor.
    fn tensor(&mut self, tensor: &Tensor) -> Tensor;
    /// The replacement of a size or index.
    fn index(&mut self, index: &Index) -> Index {
        index.clone()
    }
    /// The replacement of what a handle waits for.
    fn started(&mut self, started: &Started) -> Started {
        started.clone()
    }
}

/// A leaf that is not a tensor: a number, a string, the variant of an enum.
///
/// [`Visit`] has an example.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Static<'a> {
    /// An integer, a bool, a length.
    Int(i128),
    /// A floating-point number.
    Float(f64),
    /// A string, or the name of a variant.
    Text(&'a str),
}

/// Visits tensors alone.
pub(crate) struct VisitTensors<F>(pub(crate) F);

impl<F: FnMut(&Tensor)> Visit for VisitTensors<F> {
    fn tensor(&mut self, tensor: &Tensor) {
        self.0(tensor);
    }
}

/// Replaces tensors alone.
pub(crate) struct MapTensors<F>(pub(crate) F);

impl<F: FnMut(&Tensor) -> Tensor> Map for MapTensors<F> {
    fn tensor(&mut self, tensor: &Tensor) -> Tensor {
        self.0(tensor)
    }
}

impl Flatten for Tensor {
    fn visit(&self, visit: &mut dyn Visit) {
        visit.tensor(self);
    }
    fn map(&self, map: &mut dyn Map) -> Tensor {
        map.tensor(self)
    }
}

impl Flatten for Index {
    fn visit(&self, visit: &mut dyn Visit) {
        visit.index(self);
    }
    fn map(&self, map: &mut dyn Map) -> Index {
        map.index(self)
    }
}

impl<T: Flatten> Flatten for Pending<T> {
    fn visit(&self, visit: &mut dyn Visit) {
        self.gives.visit(visit);
        visit.started(&self.started);
    }
    fn map(&self, map: &mut dyn Map) -> Pending<T> {
        Pending { gives: self.gives.map(map), started: map.started(&self.started) }
    }
}

fn visit_list<T: Flatten>(list: &[T], visit: &mut dyn Visit) {
    for (place, one) in list.iter().enumerate() {
        visit.enter(&place);
        one.visit(visit);
        visit.leave();
    }
}

impl<T: Flatten> Flatten for Vec<T> {
    fn visit(&self, visit: &mut dyn Visit) {
        visit.setting(Static::Int(self.len() as i128));
        visit_list(self, visit);
    }
    fn map(&self, map: &mut dyn Map) -> Vec<T> {
        self.iter().map(|one| one.map(map)).collect()
    }
}

impl<T: Flatten, const N: usize> Flatten for [T; N] {
    fn visit(&self, visit: &mut dyn Visit) {
        visit_list(self, visit);
    }
    fn map(&self, map: &mut dyn Map) -> [T; N] {
        std::array::from_fn(|i| self[i].map(map))
    }
}

impl<T: Flatten> Flatten for Option<T> {
    fn visit(&self, visit: &mut dyn Visit) {
        visit.setting(Static::Int(self.is_some().into()));
        self.iter().for_each(|one| one.visit(visit));
    }
    fn map(&self, map: &mut dyn Map) -> Option<T> {
        self.as_ref().map(|one| one.map(map))
    }
}

impl<T: Flatten> Flatten for Box<T> {
    fn visit(&self, visit: &mut dyn Visit) {
        (**self).visit(visit);
    }
    fn map(&self, map: &mut dyn Map) -> Box<T> {
        Box::new((**self).map(map))
    }
}

macro_rules! tuples {
    ($(($($name:ident $place:tt),+))*) => {$(
        impl<$($name: Flatten),+> Flatten for ($($name,)+) {
            fn visit(&self, visit: &mut dyn Visit) {
                $(
                    visit.enter(&$place);
                    self.$place.visit(visit);
                    visit.leave();
                )+
            }
            fn map(&self, map: &mut dyn Map) -> Self {
                ($(self.$place.map(map),)+)
            }
        }
    )*};
}

tuples! {
    (A 0) (A 0, B 1) (A 0, B 1, C 2) (A 0, B 1, C 2, D 3) (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5) (A 0, B 1, C 2, D 3, E 4, F 5, G 6) (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}

macro_rules! settings {
    ($($ty:ty, $value:ident => $setting:expr;)*) => {$(
        impl Flatten for $ty {
            fn visit(&self, visit: &mut dyn Visit) {
                let $value = self;
                visit.setting($setting);
            }
            fn map(&self, _: &mut dyn Map) -> $ty {
                self.clone()
            }
        }
    )*};
}

settings! {
    bool, x => Static::Int((*x).into());
    u8, x => Static::Int((*x).into());
    u32, x => Static::Int((*x).into());
    u64, x => Static::Int((*x).into());
    usize, x => Static::Int(*x as i128);
    i32, x => Static::Int((*x).into());
    i64, x => Static::Int((*x).into());
    f32, x => Static::Float((*x).into());
    f64, x => Static::Float(*x);
    String, x => Static::Text(x);
    &'static str, x => Static::Text(x);
    crate::Dtype, x => Static::Text(x.name());
    Group, x => Static::Int(x.id());
    Mesh, x => Static::Int(x.id());
}

impl Flatten for () {
    fn visit(&self, _: &mut dyn Visit) {}
    fn map(&self, _: &mut dyn Map) {}
}
