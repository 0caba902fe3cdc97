//! Reads and writes arrays in NumPy's `.npy` format.
//!
//! A file is a magic string, a version, the length of a header, the header and the elements. The header is
//! a Python dictionary with the keys `descr`, `fortran_order` and `shape`. Whatever order and byte order a
//! file has, `read` hands out one layout: row-major and little-endian, which is also all that `write` writes.
//!
//! A file comes from outside, so nothing it claims is believed before it is checked: a shape is compared
//! with the bytes that are there before anything is allocated for it. Every malformed file is one error text.
//! Refused are object arrays (they are pickles, and reading one runs code), structured dtypes, and dtypes
//! that no program has. The format has no name for bf16; a caller who wants one picks its own.
//!
//! ```
//! use consort::npy::{self, Array, NpyDtype};
//!
//! # fn main() -> Result<(), Box<consort::Failure>> {
//! let array = Array { dtype: NpyDtype::U8, shape: vec![2], bytes: vec![7, 9] };
//! let file = npy::write(&array)?;
//! assert_eq!(npy::read(&file)?, array);
//! assert!(npy::read(&file[..file.len() - 1]).is_err());
//! # Ok(()) }
//! ```

use consort_types::{Dtype, Failure};

/// The element type of a file.
///
/// ```
/// use consort::{Dtype, npy::NpyDtype};
///
/// assert_eq!(NpyDtype::F16.dtype(), Dtype::F16);
/// assert_eq!(NpyDtype::of(Dtype::Bf16), None);
/// assert_eq!(NpyDtype::I64.size(), 8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NpyDtype {
    /// `<f4`
    F32,
    /// `<f8`
    F64,
    /// `<f2`
    F16,
    /// `<i4`
    I32,
    /// `<i8`
    I64,
    /// `|u1`
    U8,
    /// `|b1`: one byte, 0 or 1.
    Bool,
}

impl NpyDtype {
    const ALL: [NpyDtype; 7] = [
        NpyDtype::F16,
        NpyDtype::F32,
        NpyDtype::F64,
        NpyDtype::I32,
        NpyDtype::I64,
        NpyDtype::U8,
        NpyDtype::Bool,
    ];

    /// The name without its byte order.
    fn code(self) -> &'static str {
        match self {
            NpyDtype::F32 => "f4",
            NpyDtype::F64 => "f8",
            NpyDtype::F16 => "f2",
            NpyDtype::I32 => "i4",
            NpyDtype::I64 => "i8",
            NpyDtype::U8 => "u1",
            NpyDtype::Bool => "b1",
        }
    }

    /// The element type of a tensor that holds such elements.
    ///
    /// [`NpyDtype`] has an example.
    pub fn dtype(self) -> Dtype {
        match self {
            NpyDtype::F32 => Dtype::F32,
            NpyDtype::F64 => Dtype::F64,
            NpyDtype::F16 => Dtype::F16,
            NpyDtype::I32 => Dtype::I32,
            NpyDtype::I64 => Dtype::I64,
            NpyDtype::U8 => Dtype::U8,
            NpyDtype::Bool => Dtype::Bool,
        }
    }

    /// The element type in which a file can hold such a tensor; `None` for bf16.
    ///
    /// [`NpyDtype`] has an example.
    pub fn of(dtype: Dtype) -> Option<NpyDtype> {
        NpyDtype::ALL.into_iter().find(|one| one.dtype() == dtype)
    }

    /// How many bytes an element has.
    ///
    /// [`NpyDtype`] has an example.
    pub fn size(self) -> usize {
        self.dtype().size()
    }
}

/// The contents of a file: elements in row-major order, each little-endian.
///
/// The [module](self) has an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// The element type.
    pub dtype: NpyDtype,
    /// The size along each dimension; empty for a single number.
    pub shape: Vec<usize>,
    /// The elements; as many bytes as the shape and the dtype say.
    pub bytes: Vec<u8>,
}

const MAGIC: &[u8] = b"\x93NUMPY";

/// NumPy's own limit. It bounds what a header can make us allocate.
const MAX_DIMENSIONS: usize = 64;

/// Reads an array from the bytes of a whole file.
///
/// The [module](self) has an example.
pub fn read(bytes: &[u8]) -> Result<Array, Box<Failure>> {
    read_array(bytes).map_err(|failure| failure.of("npy"))
}

fn read_array(bytes: &[u8]) -> Result<Array, Box<Failure>> {
    let (header, data) = split_header(bytes)?;
    let Header { dtype, big_endian, fortran_order, shape } = parse_header(header)?;
    let expected = byte_count(dtype, &shape)?;
    if data.len() != expected {
        let (code, shape, got) = (dtype.code(), tuple(&shape), data.len());
        let expected = format!("{expected} bytes of data for {code} of shape {shape}");
        return Err(Failure::new((expected, got.to_string())));
    }
    let mut bytes = if fortran_order { from_column_major(data, &shape, dtype.size()) } else { data.to_vec() };
    if big_endian {
        bytes.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
    // Readers take a bool's byte for its value, so bytes other than 0 and 1 are rejected.
    if dtype == NpyDtype::Bool
        && let Some(bad) = bytes.iter().find(|byte| **byte > 1)
    {
        return Err(Failure::new(("every bool to be 0 or 1", bad.to_string())));
    }
    Ok(Array { dtype, shape, bytes })
}

/// Writes an array as the bytes of a file: version 1.0, or 2.0 where the header is too long for it. An array that is
/// not as long as its shape says is an error.
///
/// The [module](self) has an example.
pub fn write(array: &Array) -> Result<Vec<u8>, Box<Failure>> {
    let Array { dtype, shape, bytes } = array;
    let expected = byte_count(*dtype, shape).map_err(|failure| failure.of("npy"))?;
    if expected != bytes.len() {
        let expected = format!("{expected} bytes for shape {}", tuple(shape));
        return Err(Failure::new((expected, bytes.len().to_string())).of("npy"));
    }
    let order = if dtype.size() == 1 { '|' } else { '<' };
    let code = dtype.code();
    let header = format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': {}, }}", tuple(shape));
    // The data begin at a multiple of 64 bytes, so that a mapped file has them aligned. Spaces fill the gap,
    // and a newline ends the header.
    let fixed = MAGIC.len() + 2;
    let padded = |prefix: usize| (prefix + header.len() + 1).next_multiple_of(64) - prefix;
    let short = padded(fixed + 2) <= usize::from(u16::MAX);
    let (version, length_bytes) = if short { (1, 2) } else { (2, 4) };
    let length = padded(fixed + length_bytes);
    let mut file = Vec::with_capacity(fixed + length_bytes + length + bytes.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&[version, 0]);
    file.extend_from_slice(&length.to_le_bytes()[..length_bytes]);
    file.extend_from_slice(header.as_bytes());
    file.resize(fixed + length_bytes + length - 1, b' ');
    file.push(b'\n');
    file.extend_from_slice(bytes);
    Ok(file)
}

/// A shape as Python writes it: `()`, `(3,)`, `(2, 3)`.
fn tuple(shape: &[usize]) -> String {
    match shape {
        [one] => format!("({one},)"),
        _ => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// The byte count of an array. The nonzero dimensions must not overflow even if the array is empty: strides
/// computed from them would.
fn byte_count(dtype: NpyDtype, shape: &[usize]) -> Result<usize, Box<Failure>> {
    let bytes = shape.iter().filter(|d| **d != 0).try_fold(dtype.size(), |n, d| n.checked_mul(*d));
    match bytes {
        None => Err(Failure::new(("a shape that fits into memory", tuple(shape)))),
        Some(_) if shape.contains(&0) => Ok(0),
        Some(bytes) => Ok(bytes),
    }
}

/// The elements in row-major order, from data in which the first dimension varies fastest.
fn from_column_major(data: &[u8], shape: &[usize], size: usize) -> Vec<u8> {
    let mut strides = Vec::with_capacity(shape.len());
    let mut stride = size;
    for d in shape {
        strides.push(stride);
        stride *= d;
    }
    let mut index = vec![0; shape.len()];
    let mut at = 0;
    let mut bytes = Vec::with_capacity(data.len());
    while bytes.len() < data.len() {
        bytes.extend_from_slice(&data[at..at + size]);
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            at += strides[d];
            if index[d] < shape[d] {
                break;
            }
            at -= strides[d] * shape[d];
            index[d] = 0;
        }
    }
    bytes
}

/// The bytes of the header, and those after it.
fn split_header(bytes: &[u8]) -> Result<(&[u8], &[u8]), Box<Failure>> {
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        let got = quote(&bytes[..bytes.len().min(MAGIC.len())]);
        let failure = Failure::new((format!("a file that begins with `{}`", MAGIC.escape_ascii()), got));
        return Err(match bytes.starts_with(b"PK") {
            true => failure.note("this is a zip file; unpack an .npz first"),
            false => failure,
        });
    };
    let Some((version, rest)) = rest.split_at_checked(2) else {
        return Err(Failure::new(("a version after the magic string", END)));
    };
    let length_bytes = match version {
        [1, 0] => 2,
        [2 | 3, 0] => 4,
        _ => {
            return Err(Failure::new(("version 1.0, 2.0 or 3.0", format!("{}.{}", version[0], version[1]))));
        }
    };
    let Some((length, rest)) = rest.split_at_checked(length_bytes) else {
        return Err(Failure::new(("the length of the header after the version", END)));
    };
    let length = length.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte));
    rest.split_at_checked(length).ok_or_else(|| {
        let got = format!("{} to the end of the file", rest.len());
        Failure::new((format!("a header of {length} bytes"), got))
    })
}

/// A parsed header.
struct Header {
    dtype: NpyDtype,
    big_endian: bool,
    fortran_order: bool,
    shape: Vec<usize>,
}

fn parse_header(text: &[u8]) -> Result<Header, Box<Failure>> {
    let mut parser = Parser { rest: text };
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    parser.expect("{")?;
    while !parser.eat("}") {
        let key = parser.string("a key in quotes or `}`")?;
        parser.expect(":")?;
        let twice = match key {
            b"descr" => descr.replace(parser.descr()?).is_some(),
            b"fortran_order" => fortran_order.replace(parser.boolean()?).is_some(),
            b"shape" => shape.replace(parser.shape()?).is_some(),
            _ => {
                return Err(header("the keys descr, fortran_order, shape", quote(key)));
            }
        };
        if twice {
            return Err(header(format!("one key {}", quote(key)), "two"));
        }
        if !parser.eat(",") {
            parser.expect("}")?;
            break;
        }
    }
    parser.skip_space();
    if !parser.rest.is_empty() {
        return Err(header("nothing after `}`", quote(parser.rest)));
    }
    let missing = |key: &str| header(format!("a key `{key}`"), "none");
    let (dtype, big_endian) = parse_descr(descr.ok_or_else(|| missing("descr"))?)?;
    let fortran_order = fortran_order.ok_or_else(|| missing("fortran_order"))?;
    let shape = shape.ok_or_else(|| missing("shape"))?;
    Ok(Header { dtype, big_endian, fortran_order, shape })
}

/// The dtype of a name such as `<f4`, and whether its elements are big-endian.
fn parse_descr(name: &[u8]) -> Result<(NpyDtype, bool), Box<Failure>> {
    let (order, code) = name.split_at(name.len().min(1));
    if code.starts_with(b"O") {
        let failure = Failure::new(("an array of numbers", format!("an object array {}", quote(name))));
        return Err(failure.note("save an array of numbers, as `array.astype('float32')` gives"));
    }
    let dtype = NpyDtype::ALL.into_iter().find(|dtype| dtype.code().as_bytes() == code);
    match (dtype, order) {
        (Some(dtype), b"<") => Ok((dtype, false)),
        (Some(dtype), b">") => Ok((dtype, true)),
        // `|` says that there is no byte order, which is true of single bytes only.
        (Some(dtype @ (NpyDtype::U8 | NpyDtype::Bool)), b"|") => Ok((dtype, false)),
        _ => {
            let known = "a dtype of <f2, <f4, <f8, <i4, <i8, |u1, |b1 (or big-endian with >)";
            let failure = Failure::new((known, quote(name)));
            Err(failure.note("convert it before saving, as in `array.astype('float32')`"))
        }
    }
}

/// Where a file ends too early.
const END: &str = "the end of the file";

/// A header that is not as expected.
fn header(expected: impl Into<String>, got: impl Into<String>) -> Box<Failure> {
    Failure::new((expected.into(), got.into())).of("header")
}

/// Bytes of a file as an error shows them: in backticks, printable, and not all of a long text.
fn quote(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing".to_string();
    }
    let mut text = String::new();
    for byte in bytes.iter().take(32) {
        match byte {
            b' '..=b'~' => text.push(char::from(*byte)),
            _ => text.push_str(&byte.escape_ascii().to_string()),
        }
    }
    format!("`{text}{}`", if bytes.len() > 32 { "..." } else { "" })
}

/// The part of Python's grammar that headers use. Every method first skips white space.
struct Parser<'a> {
    rest: &'a [u8],
}

impl<'a> Parser<'a> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    /// Takes this text if it comes next.
    fn eat(&mut self, text: &str) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(text.as_bytes());
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, text: &str) -> Result<(), Box<Failure>> {
        if self.eat(text) { Ok(()) } else { Err(self.error(&format!("`{text}`"))) }
    }

    fn error(&self, expected: &str) -> Box<Failure> {
        header(expected, quote(self.rest))
    }

    /// A string in either kind of quotes. Escapes are not undone: no name that is accepted has one.
    fn string(&mut self, expected: &str) -> Result<&'a [u8], Box<Failure>> {
        self.skip_space();
        if let [mark @ (b'\'' | b'"'), rest @ ..] = self.rest
            && let Some(end) = rest.iter().position(|byte| byte == mark)
        {
            self.rest = &rest[end + 1..];
            return Ok(&rest[..end]);
        }
        Err(self.error(expected))
    }

    fn descr(&mut self) -> Result<&'a [u8], Box<Failure>> {
        if self.eat("[") {
            let failure = Failure::new(("a single dtype", "a structured one"));
            return Err(failure.note("save each field as an array of its own"));
        }
        self.string("a dtype in quotes")
    }

    fn boolean(&mut self) -> Result<bool, Box<Failure>> {
        if self.eat("True") {
            Ok(true)
        } else if self.eat("False") {
            Ok(false)
        } else {
            Err(self.error("`True` or `False`"))
        }
    }

    fn shape(&mut self) -> Result<Vec<usize>, Box<Failure>> {
        let mut shape = Vec::new();
        self.expect("(")?;
        while !self.eat(")") {
            if shape.len() == MAX_DIMENSIONS {
                return Err(Failure::new((format!("at most {MAX_DIMENSIONS} dimensions"), "more")));
            }
            shape.push(self.dimension()?);
            // Python takes `(3)` for a number, so one dimension needs its comma.
            if !self.eat(",") {
                self.expect(if shape.len() == 1 { "," } else { ")" })?;
                break;
            }
        }
        Ok(shape)
    }

    fn dimension(&mut self) -> Result<usize, Box<Failure>> {
        self.skip_space();
        let text = self.rest;
        let negative = self.eat("-");
        let n_digits = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.rest.split_at(n_digits);
        if digits.is_empty() || (digits.starts_with(b"0") && digits.len() > 1) {
            self.rest = text;
            return Err(self.error("a dimension"));
        }
        let text = quote(&text[..text.len() - rest.len()]);
        if negative {
            return Err(Failure::new(("dimensions of 0 or more", text)));
        }
        self.rest = rest;
        let push = |n: usize, digit: &u8| n.checked_mul(10)?.checked_add(usize::from(digit - b'0'));
        digits
            .iter()
            .try_fold(0, push)
            .ok_or_else(|| Failure::new((format!("a dimension of at most {} bits", usize::BITS), text)))
    }
}

#[cfg(test)]
mod tests;
