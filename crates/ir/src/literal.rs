//! Literals: tensors with which ops are defined and constants are folded, slow and obvious.
//!
//! Elements are `f64` or `i64`, exactly representable in the element type (see `dtype.rs`), in row-major order. Nothing
//! here is optimised.

use std::fmt::Write;

use consort_types::{Dtype, to_bf16, to_f16};
use half::{bf16, f16};

/// The elements, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Of a float type.
    Float(Vec<f64>),
    /// Of an integer type, or truth values as 0 and 1.
    Int(Vec<i64>),
}

/// A tensor with its elements, as definitions of ops compute with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Literal {
    /// The element type.
    pub dtype: Dtype,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Data,
}

/// The most elements of a literal: a program may name any size, a machine has little memory.
pub const MAX_ELEMENTS: usize = 1 << 27;

/// The number of elements of a shape, if at most `MAX_ELEMENTS`.
pub fn numel(shape: &[usize]) -> Option<usize> {
    let n = shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size))?;
    (n <= MAX_ELEMENTS).then_some(n)
}

impl Literal {
    /// A tensor of floats, each rounded to the element type.
    pub fn floats(dtype: Dtype, shape: Vec<usize>, data: Vec<f64>) -> Literal {
        Literal { dtype, shape, data: Data::Float(data.into_iter().map(|x| dtype.round(x)).collect()) }
    }

    /// A tensor of integers or truth values, each wrapped to the element type.
    pub fn ints(dtype: Dtype, shape: Vec<usize>, data: Vec<i64>) -> Literal {
        Literal { dtype, shape, data: Data::Int(data.into_iter().map(|x| dtype.wrap(x)).collect()) }
    }

    /// A tensor of zeros; `shape` must have at most `MAX_ELEMENTS` elements.
    pub fn zeros(dtype: Dtype, shape: Vec<usize>) -> Literal {
        let n = shape.iter().product();
        let data = if dtype.is_float() { Data::Float(vec![0.0; n]) } else { Data::Int(vec![0; n]) };
        Literal { dtype, shape, data }
    }

    /// A 0-d `i64`: how sizes are held at run time.
    pub fn size(value: i64) -> Literal {
        Literal::ints(Dtype::I64, vec![], vec![value])
    }

    /// How many elements it has.
    pub fn numel(&self) -> usize {
        match &self.data {
            Data::Float(data) => data.len(),
            Data::Int(data) => data.len(),
        }
    }

    /// The only element of a 0-d integer tensor.
    pub fn as_size(&self) -> Option<i64> {
        match &self.data {
            Data::Int(data) if data.len() == 1 => Some(data[0]),
            _ => None,
        }
    }

    /// The tensor of the same element type whose element at `i` is element `from(i)` of this one.
    pub fn pick(&self, shape: Vec<usize>, from: impl Fn(usize) -> usize) -> Literal {
        let n: usize = shape.iter().product();
        let data = match &self.data {
            Data::Float(data) => Data::Float((0..n).map(|i| data[from(i)]).collect()),
            Data::Int(data) => Data::Int((0..n).map(|i| data[from(i)]).collect()),
        };
        Literal { dtype: self.dtype, shape, data }
    }

    /// Copies one element of another tensor of the same element type.
    pub fn set(&mut self, at: usize, other: &Literal, from: usize) {
        match (&mut self.data, &other.data) {
            (Data::Float(data), Data::Float(other)) => data[at] = other[from],
            (Data::Int(data), Data::Int(other)) => data[at] = other[from],
            _ => {}
        }
    }

    /// The part of a dimension that begins at `start` and has `size` entries.
    pub fn narrow(&self, dim: usize, start: usize, size: usize) -> Literal {
        let mut shape = self.shape.clone();
        shape[dim] = size;
        let out_shape = shape.clone();
        self.pick(shape, |i| {
            let mut at = unravel(i, &out_shape);
            at[dim] += start;
            ravel(&at, &self.shape)
        })
    }

    /// Joins tensors along a dimension; there is at least one, and they agree in every other dimension.
    pub fn concat(parts: &[&Literal], dim: usize) -> Literal {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
        let mut out = Literal::zeros(parts[0].dtype, shape);
        let mut start = 0;
        for part in parts {
            for i in 0..part.numel() {
                let mut at = unravel(i, &part.shape);
                at[dim] += start;
                let to = ravel(&at, &out.shape);
                out.set(to, part, i);
            }
            start += part.shape[dim];
        }
        out
    }

    /// The same elements in another shape of as many elements.
    #[must_use]
    pub fn reshaped(&self, shape: Vec<usize>) -> Literal {
        Literal { dtype: self.dtype, shape, data: self.data.clone() }
    }

    /// The elements as little-endian bytes of the element type.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.numel() * self.dtype.size());
        match &self.data {
            Data::Float(data) => data.iter().for_each(|x| match self.dtype {
                Dtype::F32 => out.extend((*x as f32).to_le_bytes()),
                Dtype::F16 => out.extend(to_f16(*x).to_le_bytes()),
                Dtype::Bf16 => out.extend(to_bf16(*x).to_le_bytes()),
                _ => out.extend(x.to_le_bytes()),
            }),
            Data::Int(data) => data.iter().for_each(|x| match self.dtype {
                Dtype::I32 => out.extend((*x as i32).to_le_bytes()),
                Dtype::I64 => out.extend(x.to_le_bytes()),
                _ => out.push(*x as u8),
            }),
        }
        out
    }

    /// Reads little-endian elements; `None` if the byte count does not match the shape.
    pub fn from_bytes(dtype: Dtype, shape: Vec<usize>, bytes: &[u8]) -> Option<Literal> {
        let n = numel(&shape)?;
        if bytes.len() != n * dtype.size() {
            return None;
        }
        let items = bytes.chunks_exact(dtype.size());
        let float = |read: fn(&[u8]) -> f64| Data::Float(items.clone().map(read).collect());
        let int = |read: fn(&[u8]) -> i64| Data::Int(items.clone().map(read).collect());
        let data = match dtype {
            Dtype::F32 => float(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            Dtype::F64 => float(|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])),
            Dtype::F16 => float(|b| f16::from_le_bytes([b[0], b[1]]).to_f64()),
            Dtype::Bf16 => float(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()),
            Dtype::I32 => int(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            Dtype::I64 => int(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])),
            Dtype::U8 => int(|b| i64::from(b[0])),
            Dtype::Bool => int(|b| i64::from(b[0] != 0)),
        };
        Some(Literal { dtype, shape, data })
    }

    /// Whether types, shapes and elements are equal; a NaN equals a NaN, and 0 differs from -0.
    pub fn same(&self, other: &Literal) -> bool {
        let data = match (&self.data, &other.data) {
            (Data::Float(a), Data::Float(b)) => {
                a.len() == b.len()
                    && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
            }
            (a, b) => a == b,
        };
        self.dtype == other.dtype && self.shape == other.shape && data
    }

    /// The elements in nested brackets, shortened when there are many.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // A tensor without elements may still print any number of empty brackets.
        let shown = self.shape.iter().take_while(|size| **size > 0);
        let shown = shown.fold(1usize, |all, size| all.saturating_mul(*size));
        let limit = if shown > 64 { 3 } else { usize::MAX };
        self.write(&mut out, 0, 0, limit);
        out
    }

    fn write(&self, out: &mut String, dim: usize, at: usize, limit: usize) {
        if dim == self.shape.len() {
            self.write_element(out, at);
            return;
        }
        let size = self.shape[dim];
        let stride: usize = self.shape[dim + 1..].iter().product();
        out.push('[');
        let (first, last) = if limit < size / 2 { (limit, size - limit) } else { (size, size) };
        for i in (0..first).chain(last..size) {
            if i == last {
                out.push_str(", ..");
            }
            if i > 0 {
                out.push_str(", ");
            }
            self.write(out, dim + 1, at + i * stride, limit);
        }
        out.push(']');
    }

    fn write_element(&self, out: &mut String, at: usize) {
        let _ = match (&self.data, self.dtype) {
            (Data::Float(data), Dtype::F64) => write!(out, "{}", data[at]),
            // The shortest digits that read back as the same f32; f16 and bf16 are f32 too.
            (Data::Float(data), _) => write!(out, "{}", data[at] as f32),
            (Data::Int(data), Dtype::Bool) => write!(out, "{}", data[at] != 0),
            (Data::Int(data), _) => write!(out, "{}", data[at]),
        };
    }
}

/// The coordinates of element `i` in row-major order.
pub fn unravel(i: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = i;
    let mut at = vec![0; shape.len()];
    for (at, size) in at.iter_mut().zip(shape).rev() {
        *at = rest % size;
        rest /= size;
    }
    at
}

/// The row-major number of the element at these coordinates.
pub fn ravel(at: &[usize], shape: &[usize]) -> usize {
    at.iter().zip(shape).fold(0, |i, (at, size)| i * size + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_back_in_every_dtype() {
        for dtype in Dtype::ALL {
            let tensor = if dtype.is_float() {
                Literal::floats(dtype, vec![2, 2], vec![0.1, -2.5, f64::INFINITY, 1e-3])
            } else {
                Literal::ints(dtype, vec![2, 2], vec![1, 0, -7, 200])
            };
            let bytes = tensor.to_bytes();
            assert_eq!(bytes.len(), 4 * dtype.size());
            assert!(Literal::from_bytes(dtype, vec![2, 2], &bytes).unwrap().same(&tensor), "{dtype}");
            assert!(Literal::from_bytes(dtype, vec![3], &bytes).is_none());
        }
    }

    #[test]
    fn narrow_and_concat_are_inverse() {
        let t = Literal::ints(Dtype::I32, vec![2, 3], (0..6).collect());
        let (a, b) = (t.narrow(1, 0, 1), t.narrow(1, 1, 2));
        assert_eq!(b.data, Data::Int(vec![1, 2, 4, 5]));
        assert!(Literal::concat(&[&a, &b], 1).same(&t));
        assert_eq!(t.text(), "[[0, 1, 2], [3, 4, 5]]");
    }

    #[test]
    fn long_tensors_print_shortened() {
        let t = Literal::ints(Dtype::I64, vec![100], (0..100).collect());
        assert_eq!(t.text(), "[0, 1, 2, .., 97, 98, 99]");
        let empty = Literal::ints(Dtype::I64, vec![1_000_000_000_000, 0], vec![]);
        assert_eq!(empty.text(), "[[], [], [], .., [], [], []]");
        assert_eq!(Literal::ints(Dtype::I64, vec![0, 1_000_000_000_000], vec![]).text(), "[]");
    }
}
