//! Printing tensors as numpy does: nested brackets, columns aligned, large ones shortened.

use std::fmt;
use std::panic::Location;

use consort_types::Dtype;
use half::{bf16, f16};

use crate::element::Element;
use crate::tensor::Tensor;
use crate::trace::current;
use crate::world::World;

/// More elements than this are shortened to the first and last few along each dimension.
const WHOLE: usize = 1000;
/// How many are shown at each end.
const EDGE: usize = 3;
/// The maximum number of decimals.
const PRECISION: usize = 8;
/// The width of a line.
const LINE: usize = 75;
/// The op's name in breaks and errors; in a trace their line is that of the previous op.
const PRINT: &str = "print";

impl fmt::Display for Tensor {
    /// The elements. Waits for them; an error is printed in their place, and is an error of the process, or of the
    /// trace that prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.has_data() {
            return write!(f, "{}{:?} without data", self.dtype(), self.shape());
        }
        let texts = match texts(self) {
            Ok(texts) => texts,
            Err(error) => {
                match (current(), World::current()) {
                    (Some(session), _) => session.fail(error.clone()),
                    (None, Ok(world)) => world.report(
                        &error,
                        "it was printed in the place of a tensor: wait for it first, and handle the error",
                    ),
                    (None, Err(_)) => {}
                }
                // The report contains the rest.
                return write!(f, "<{}>", error.to_string().lines().next().unwrap_or_default());
            }
        };
        let shown = Shown { shape: self.shape(), edge: if self.numel() > WHOLE { EDGE } else { usize::MAX } };
        let width = texts.iter().map(String::len).max().unwrap_or(0);
        shown.write(f, &mut texts.iter(), 0, width)
    }
}

impl fmt::Debug for Tensor {
    /// Type and elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} {self}", self.dtype(), self.shape())
    }
}

/// Which elements are shown.
struct Shown<'a> {
    shape: &'a [usize],
    edge: usize,
}

impl Shown<'_> {
    /// The shown indices along a dimension; `None` for an omitted range.
    fn places(&self, dim: usize) -> Vec<Option<usize>> {
        let size = self.shape[dim];
        if self.edge == usize::MAX || size <= 2 * self.edge {
            return (0..size).map(Some).collect();
        }
        let ends = (0..self.edge).map(Some).chain([None]);
        ends.chain((size - self.edge..size).map(Some)).collect()
    }

    fn write<'t>(
        &self,
        f: &mut fmt::Formatter<'_>,
        texts: &mut impl Iterator<Item = &'t String>,
        dim: usize,
        width: usize,
    ) -> fmt::Result {
        if dim == self.shape.len() {
            return f.write_str(texts.next().map_or("", String::as_str));
        }
        let last = dim + 1 == self.shape.len();
        f.write_str("[")?;
        let mut column = dim + 1;
        for (i, place) in self.places(dim).into_iter().enumerate() {
            if i > 0 && last {
                // A long row continues under its first element.
                if column + 1 + width > LINE {
                    write!(f, "\n{:1$}", "", dim + 1)?;
                    column = dim + 1;
                } else {
                    f.write_str(" ")?;
                    column += 1;
                }
            } else if i > 0 {
                let lines = self.shape.len() - dim - 1;
                write!(f, "{}{:2$}", "\n".repeat(lines), "", dim + 1)?;
            }
            match place {
                None => {
                    f.write_str("...")?;
                    column += 3;
                }
                Some(_) if last => {
                    let text = texts.next().map_or("", String::as_str);
                    write!(f, "{text:>width$}")?;
                    column += width;
                }
                Some(_) => self.write(f, texts, dim + 1, width)?,
            }
        }
        f.write_str("]")
    }
}

/// The elements that are shown, in row-major order, in one format.
fn texts(x: &Tensor) -> crate::Result<Vec<String>> {
    // `Display` has no caller location; in a trace the line of the previous op is close, and for a tensor that outlived
    // its trace the line that made it.
    let site = match (current(), &x.traced) {
        (Some(session), _) => session.last_site(),
        (None, Some(traced)) => traced.made(),
        (None, None) => Location::caller(),
    };
    let shown = Shown { shape: x.shape(), edge: if x.numel() > WHOLE { EDGE } else { usize::MAX } };
    let mut places = vec![0usize];
    for dim in 0..x.rank() {
        let along = shown.places(dim);
        let next = |at: usize| along.iter().flatten().map(move |place| at * x.shape()[dim] + place);
        places = places.into_iter().flat_map(next).collect();
    }
    x.with_bytes(PRINT, site, |bytes| {
        let size = x.dtype().size();
        let picked: Vec<u8> =
            places.iter().flat_map(|at| bytes[at * size..(at + 1) * size].iter().copied()).collect();
        match x.dtype() {
            Dtype::F32 => floats(f32::read(&picked).into_iter().map(Float::single)),
            Dtype::F64 => floats(f64::read(&picked).into_iter().map(Float::double)),
            Dtype::F16 => floats(f16::read(&picked).into_iter().map(|x| Float::single(x.to_f32()))),
            Dtype::Bf16 => floats(bf16::read(&picked).into_iter().map(|x| Float::single(x.to_f32()))),
            Dtype::I32 => i32::read(&picked).iter().map(i32::to_string).collect(),
            Dtype::I64 => i64::read(&picked).iter().map(i64::to_string).collect(),
            Dtype::U8 => picked.iter().map(u8::to_string).collect(),
            Dtype::Bool => {
                picked.iter().map(|byte| if *byte == 0 { "False" } else { "True" }.to_string()).collect()
            }
        }
    })
}

/// A number, and how it is written in its own type.
struct Float {
    value: f64,
    /// The decimals that distinguish it from its neighbours, up to `PRECISION`.
    digits: usize,
    /// With an exponent: its shortest digits, and the exponent.
    exponent: (String, i32),
}

impl Float {
    fn single(x: f32) -> Float {
        let plain = (format!("{x}"), format!("{x:.PRECISION$}"));
        Float::new(f64::from(x), &plain, &[format!("{x:e}"), format!("{x:.PRECISION$e}")])
    }

    fn double(x: f64) -> Float {
        Float::new(
            x,
            &(format!("{x}"), format!("{x:.PRECISION$}")),
            &[format!("{x:e}"), format!("{x:.PRECISION$e}")],
        )
    }

    fn new(value: f64, (shortest, bounded): &(String, String), exponents: &[String; 2]) -> Float {
        let parts = |text: &String| {
            let (digits, exponent) = text.split_once('e').unwrap_or((text, "0"));
            (digits.trim_end_matches('0').to_string(), exponent.parse::<i32>().unwrap_or(0))
        };
        let [a, b] = [parts(&exponents[0]), parts(&exponents[1])];
        // The shortest digits where they are few; `1` has no point to cut zeros behind.
        let whole = exponents[0].split('e').next().is_some_and(|digits| !digits.contains('.'));
        let exponent = if whole {
            (exponents[0].split('e').next().unwrap_or("").to_string(), a.1)
        } else if behind(&a.0) <= PRECISION {
            a
        } else {
            b
        };
        Float { value, digits: behind(shortest).min(behind(bounded)), exponent }
    }
}

/// The number of decimals, without zeros at the end.
fn behind(text: &str) -> usize {
    text.split_once('.').map_or(0, |(_, digits)| digits.trim_end_matches('0').len())
}

/// Formats all numbers with the digits that one of them needs; with exponents if their range is large.
fn floats(numbers: impl Iterator<Item = Float>) -> Vec<String> {
    let numbers: Vec<Float> = numbers.collect();
    let finite = || numbers.iter().map(|x| x.value.abs()).filter(|x| x.is_finite() && *x > 0.0);
    let (least, most) = (finite().fold(f64::INFINITY, f64::min), finite().fold(0.0, f64::max));
    if most >= 1e8 || least < 1e-4 || most / least > 1e3 {
        return scientific(&numbers);
    }
    let finite = numbers.iter().filter(|x| x.value.is_finite());
    let digits = finite.map(|x| x.digits).max().unwrap_or(0);
    let text = |Float { value, digits: own, .. }: &Float| match value.is_finite() {
        false => special(*value),
        true if *own == 0 => format!("{value:.0}.{:digits$}", ""),
        true => format!("{value:.own$}{:1$}", "", digits - own),
    };
    numbers.iter().map(text).collect()
}

fn scientific(numbers: &[Float]) -> Vec<String> {
    let finite = numbers.iter().filter(|x| x.value.is_finite());
    let digits = finite.map(|x| behind(&x.exponent.0)).max().unwrap_or(0);
    let text = |x: &Float| match x.value.is_finite() {
        false => special(x.value),
        true => {
            let (number, exponent) = &x.exponent;
            let (whole, own) = number.split_once('.').unwrap_or((number, ""));
            let sign = if *exponent < 0 { '-' } else { '+' };
            format!("{whole}.{own:0<digits$}e{sign}{:02}", exponent.abs())
        }
    };
    numbers.iter().map(text).collect()
}

fn special(x: f64) -> String {
    match x {
        x if x.is_nan() => "nan".into(),
        x if x > 0.0 => "inf".into(),
        _ => "-inf".into(),
    }
}
