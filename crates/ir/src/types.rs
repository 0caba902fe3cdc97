//! The types of values: element type, sizes, and the mesh axes over which they may differ.
//!
//! `f32[8,512]{dp}` is a tensor that may differ between ranks along `dp` and is equal along every other
//! axis; no set means equal everywhere. `size<u0>{ep}` is an integer that sizes may mention by its symbol.
//! `pending<..>` is communication under way: its tensors exist only after `wait`.

use std::fmt;

use consort_types::{Axes, Dtype};

use crate::index::Index;
use crate::mesh::Mesh;

/// The type of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// The element type.
    pub dtype: Dtype,
    /// The sizes on one rank, outermost first.
    pub shape: Vec<Index>,
    /// The axes over which the value may differ between ranks.
    pub varies: Axes,
}

impl TensorType {
    /// A tensor type.
    pub fn new(dtype: Dtype, shape: Vec<Index>, varies: Axes) -> TensorType {
        TensorType { dtype, shape, varies }
    }

    /// How many dimensions it has.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// How many elements one rank holds.
    pub fn numel(&self) -> Index {
        Index::product(&self.shape)
    }

    /// How many bytes one rank holds.
    pub fn bytes(&self) -> Index {
        &self.numel() * &Index::from(self.dtype.size())
    }

    /// The same type with another shape.
    #[must_use]
    pub fn with_shape(&self, shape: Vec<Index>) -> TensorType {
        TensorType { shape, ..*self }
    }

    /// The same type with another set of axes.
    #[must_use]
    pub fn with_varies(&self, varies: Axes) -> TensorType {
        TensorType { dtype: self.dtype, shape: self.shape.clone(), varies }
    }

    /// The same type with another element type.
    #[must_use]
    pub fn with_dtype(&self, dtype: Dtype) -> TensorType {
        TensorType { dtype, shape: self.shape.clone(), varies: self.varies }
    }
}

/// The type of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// Data.
    Tensor(TensorType),
    /// An integer known to sizes as this expression, and the axes over which it may differ.
    Size(Index, Axes),
    /// Communication under way, with the tensors that its wait will give.
    Pending(Vec<TensorType>),
}

impl Type {
    /// The tensor type, if it is one.
    pub fn as_tensor(&self) -> Option<&TensorType> {
        match self {
            Type::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// Its tensors: one, those inside a pending, or none.
    pub fn tensors(&self) -> &[TensorType] {
        match self {
            Type::Tensor(tensor) => std::slice::from_ref(tensor),
            Type::Pending(tensors) => tensors,
            Type::Size(..) => &[],
        }
    }

    /// The same type, which may differ over these axes too.
    #[must_use]
    pub fn widened(&self, axes: Axes) -> Type {
        let wide = |tensor: &TensorType| tensor.with_varies(tensor.varies.union(axes));
        match self {
            Type::Tensor(tensor) => Type::Tensor(wide(tensor)),
            Type::Size(index, varies) => Type::Size(index.clone(), varies.union(axes)),
            Type::Pending(tensors) => Type::Pending(tensors.iter().map(wide).collect()),
        }
    }

    /// Whether it is communication under way.
    pub fn is_pending(&self) -> bool {
        matches!(self, Type::Pending(_))
    }

    /// The axes over which the value may differ; for a pending, those of its tensors together.
    pub fn varies(&self) -> Axes {
        match self {
            Type::Tensor(tensor) => tensor.varies,
            Type::Size(_, varies) => *varies,
            Type::Pending(tensors) => tensors.iter().fold(Axes::NONE, |set, t| set.union(t.varies)),
        }
    }

    /// Calls `f` with every size expression in the type.
    pub fn indices(&self, f: &mut dyn FnMut(&Index)) {
        match self {
            Type::Tensor(tensor) => tensor.shape.iter().for_each(f),
            Type::Size(index, _) => f(index),
            Type::Pending(tensors) => tensors.iter().flat_map(|t| &t.shape).for_each(f),
        }
    }

    /// The type as programs write it.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| match self {
            Type::Tensor(tensor) => write!(f, "{}", tensor.display(mesh)),
            Type::Size(index, varies) => {
                write!(f, "size<{}>", index.display(mesh))?;
                write_axes(f, mesh, *varies)
            }
            Type::Pending(tensors) => {
                f.write_str("pending<")?;
                for (i, tensor) in tensors.iter().enumerate() {
                    write!(f, "{}{}", if i == 0 { "" } else { ", " }, tensor.display(mesh))?;
                }
                f.write_str(">")
            }
        })
    }
}

impl From<TensorType> for Type {
    fn from(tensor: TensorType) -> Type {
        Type::Tensor(tensor)
    }
}

impl TensorType {
    /// The type as programs write it.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| {
            write!(f, "{}{}", self.dtype, shape_text(&self.shape, mesh))?;
            write_axes(f, mesh, self.varies)
        })
    }
}

/// A shape as programs write it: `[8,s0*2]`.
pub fn shape_text(shape: &[Index], mesh: &Mesh) -> String {
    let sizes: Vec<String> = shape.iter().map(|size| size.display(mesh).to_string()).collect();
    format!("[{}]", sizes.join(","))
}

fn write_axes(f: &mut fmt::Formatter<'_>, mesh: &Mesh, axes: Axes) -> fmt::Result {
    if axes.is_empty() { Ok(()) } else { write!(f, "{{{}}}", mesh.axes_text(axes)) }
}
