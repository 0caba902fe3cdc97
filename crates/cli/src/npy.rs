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

/// What an element of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NpyDtype {
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

    /// How many bytes an element has.
    pub(crate) fn size(self) -> usize {
        match self {
            NpyDtype::U8 | NpyDtype::Bool => 1,
            NpyDtype::F16 => 2,
            NpyDtype::F32 | NpyDtype::I32 => 4,
            NpyDtype::F64 | NpyDtype::I64 => 8,
        }
    }
}

/// The contents of a file: elements in row-major order, each little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Array {
    /// What the elements are.
    pub(crate) dtype: NpyDtype,
    /// The size along each dimension; none of them for a single number.
    pub(crate) shape: Vec<usize>,
    /// The elements; as many bytes as the shape and the dtype say.
    pub(crate) bytes: Vec<u8>,
}

const MAGIC: &[u8] = b"\x93NUMPY";

/// NumPy itself has no array of more dimensions. The limit keeps what a header can make us allocate small.
const MAX_DIMENSIONS: usize = 64;

/// Reads an array from the bytes of a whole file.
pub(crate) fn read(bytes: &[u8]) -> Result<Array, String> {
    read_array(bytes).map_err(|error| format!("npy: {error}"))
}

fn read_array(bytes: &[u8]) -> Result<Array, String> {
    let (header, data) = split_header(bytes)?;
    let Header { dtype, big_endian, fortran_order, shape } = parse_header(header)?;
    let expected = byte_count(dtype, &shape)?;
    if data.len() != expected {
        let (code, shape, got) = (dtype.code(), tuple(&shape), data.len());
        return Err(format!("expected {expected} bytes of data for {code} of shape {shape}, got {got}"));
    }
    let mut bytes = if fortran_order { from_column_major(data, &shape, dtype.size()) } else { data.to_vec() };
    if big_endian {
        bytes.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
    // Whoever reads the array may take a bool's byte for its value, so another byte must not get through.
    if dtype == NpyDtype::Bool
        && let Some(bad) = bytes.iter().find(|byte| **byte > 1)
    {
        return Err(format!("expected every bool to be 0 or 1, got {bad}"));
    }
    Ok(Array { dtype, shape, bytes })
}

/// Writes an array as the bytes of a file: version 1.0, or 2.0 where the header is too long for it.
pub(crate) fn write(array: &Array) -> Vec<u8> {
    let Array { dtype, shape, bytes } = array;
    debug_assert_eq!(
        byte_count(*dtype, shape),
        Ok(bytes.len()),
        "the array is not as long as its shape says"
    );
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
    file
}

/// A shape as Python writes it: `()`, `(3,)`, `(2, 3)`.
fn tuple(shape: &[usize]) -> String {
    match shape {
        [one] => format!("({one},)"),
        _ => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// How many bytes an array has. Zero dimensions do not excuse the others: whoever computes strides from
/// them would overflow all the same.
fn byte_count(dtype: NpyDtype, shape: &[usize]) -> Result<usize, String> {
    let bytes = shape.iter().filter(|d| **d != 0).try_fold(dtype.size(), |n, d| n.checked_mul(*d));
    match bytes {
        None => Err(format!("expected a shape that fits into memory, got {}", tuple(shape))),
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
fn split_header(bytes: &[u8]) -> Result<(&[u8], &[u8]), String> {
    let Some(rest) = bytes.strip_prefix(MAGIC) else {
        let got = quote(&bytes[..bytes.len().min(MAGIC.len())]);
        let note =
            if bytes.starts_with(b"PK") { "\n  note: this is a zip file; unpack an .npz first" } else { "" };
        return Err(format!("expected a file that begins with `{}`, got {got}{note}", MAGIC.escape_ascii()));
    };
    let Some((version, rest)) = rest.split_at_checked(2) else {
        return Err("expected a version after the magic string, got the end of the file".to_string());
    };
    let length_bytes = match version {
        [1, 0] => 2,
        [2 | 3, 0] => 4,
        _ => return Err(format!("expected version 1.0, 2.0 or 3.0, got {}.{}", version[0], version[1])),
    };
    let Some((length, rest)) = rest.split_at_checked(length_bytes) else {
        return Err(
            "expected the length of the header after the version, got the end of the file".to_string()
        );
    };
    let length = length.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte));
    rest.split_at_checked(length).ok_or_else(|| {
        format!("expected a header of {length} bytes, got {} to the end of the file", rest.len())
    })
}

/// What a header says.
struct Header {
    dtype: NpyDtype,
    big_endian: bool,
    fortran_order: bool,
    shape: Vec<usize>,
}

fn parse_header(text: &[u8]) -> Result<Header, String> {
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
                return Err(format!(
                    "header: expected the keys descr, fortran_order, shape, got {}",
                    quote(key)
                ));
            }
        };
        if twice {
            return Err(format!("header: expected one key {}, got two", quote(key)));
        }
        if !parser.eat(",") {
            parser.expect("}")?;
            break;
        }
    }
    parser.skip_space();
    if !parser.rest.is_empty() {
        return Err(format!("header: expected nothing after `}}`, got {}", quote(parser.rest)));
    }
    let missing = |key: &str| format!("header: expected a key `{key}`, got none");
    let (dtype, big_endian) = parse_descr(descr.ok_or_else(|| missing("descr"))?)?;
    let fortran_order = fortran_order.ok_or_else(|| missing("fortran_order"))?;
    let shape = shape.ok_or_else(|| missing("shape"))?;
    Ok(Header { dtype, big_endian, fortran_order, shape })
}

/// The dtype of a name such as `<f4`, and whether its elements are big-endian.
fn parse_descr(name: &[u8]) -> Result<(NpyDtype, bool), String> {
    let (order, code) = name.split_at(name.len().min(1));
    if code.starts_with(b"O") {
        let note = "note: save an array of numbers, as `array.astype('float32')` gives";
        return Err(format!("expected an array of numbers, got an object array {}\n  {note}", quote(name)));
    }
    let dtype = NpyDtype::ALL.into_iter().find(|dtype| dtype.code().as_bytes() == code);
    match (dtype, order) {
        (Some(dtype), b"<") => Ok((dtype, false)),
        (Some(dtype), b">") => Ok((dtype, true)),
        // `|` says that there is no byte order, which is true of single bytes only.
        (Some(dtype @ (NpyDtype::U8 | NpyDtype::Bool)), b"|") => Ok((dtype, false)),
        _ => {
            let known = "<f2, <f4, <f8, <i4, <i8, |u1, |b1 (or big-endian with >)";
            let note = "note: convert it before saving, as in `array.astype('float32')`";
            Err(format!("expected a dtype of {known}, got {}\n  {note}", quote(name)))
        }
    }
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

    fn expect(&mut self, text: &str) -> Result<(), String> {
        if self.eat(text) { Ok(()) } else { Err(self.error(&format!("`{text}`"))) }
    }

    fn error(&self, expected: &str) -> String {
        format!("header: expected {expected}, got {}", quote(self.rest))
    }

    /// A string in either kind of quotes. Escapes are not undone: no name that is accepted has one.
    fn string(&mut self, expected: &str) -> Result<&'a [u8], String> {
        self.skip_space();
        if let [mark @ (b'\'' | b'"'), rest @ ..] = self.rest
            && let Some(end) = rest.iter().position(|byte| byte == mark)
        {
            self.rest = &rest[end + 1..];
            return Ok(&rest[..end]);
        }
        Err(self.error(expected))
    }

    fn descr(&mut self) -> Result<&'a [u8], String> {
        if self.eat("[") {
            let note = "note: save each field as an array of its own";
            return Err(format!("expected a single dtype, got a structured one\n  {note}"));
        }
        self.string("a dtype in quotes")
    }

    fn boolean(&mut self) -> Result<bool, String> {
        if self.eat("True") {
            Ok(true)
        } else if self.eat("False") {
            Ok(false)
        } else {
            Err(self.error("`True` or `False`"))
        }
    }

    fn shape(&mut self) -> Result<Vec<usize>, String> {
        let mut shape = Vec::new();
        self.expect("(")?;
        while !self.eat(")") {
            if shape.len() == MAX_DIMENSIONS {
                return Err(format!("expected at most {MAX_DIMENSIONS} dimensions, got more"));
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

    fn dimension(&mut self) -> Result<usize, String> {
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
            return Err(format!("expected dimensions of 0 or more, got {text}"));
        }
        self.rest = rest;
        let push = |n: usize, digit: &u8| n.checked_mul(10)?.checked_add(usize::from(digit - b'0'));
        digits
            .iter()
            .try_fold(0, push)
            .ok_or_else(|| format!("expected a dimension of at most {} bits, got {text}", usize::BITS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file assembled by hand: nothing of `write` is in it.
    fn file(version: u8, header: &[u8], data: &[u8]) -> Vec<u8> {
        let length = (header.len() as u32).to_le_bytes();
        let length = if version == 1 { &length[..2] } else { &length[..] };
        [b"\x93NUMPY".as_slice(), &[version, 0], length, header, data].concat()
    }

    fn file_of(descr: &str, fortran_order: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let header =
            format!("{{'descr': '{descr}', 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n");
        file(1, header.as_bytes(), data)
    }

    fn array(dtype: NpyDtype, shape: &[usize], bytes: &[u8]) -> Array {
        Array { dtype, shape: shape.to_vec(), bytes: bytes.to_vec() }
    }

    #[test]
    fn every_dtype_reads_in_both_byte_orders() {
        // The bytes are IEEE 754 and two's complement, big-endian, as one would look them up.
        let cases: [(NpyDtype, &str, &[u8]); 7] = [
            (NpyDtype::F16, "f2", b"\x3e\x00\xc0\x00"),       // 1.5, -2
            (NpyDtype::F32, "f4", b"\x3f\xc0\0\0\xc0\0\0\0"), // 1.5, -2
            (NpyDtype::F64, "f8", b"\x3f\xf8\0\0\0\0\0\0\xc0\0\0\0\0\0\0\0"),
            (NpyDtype::I32, "i4", b"\x01\x02\x03\x04\xff\xff\xff\xfe"),
            (NpyDtype::I64, "i8", b"\x01\x02\x03\x04\x05\x06\x07\x08\xff\xff\xff\xff\xff\xff\xff\xfe"),
            (NpyDtype::U8, "u1", b"\x07\xff"),
            (NpyDtype::Bool, "b1", b"\x01\x00"),
        ];
        for (dtype, code, big) in cases {
            let little: Vec<u8> = big.chunks(big.len() / 2).flat_map(|e| e.iter().rev().copied()).collect();
            let expected = Ok(array(dtype, &[2], &little));
            assert_eq!(read(&file_of(&format!(">{code}"), "False", "(2,)", big)), expected);
            assert_eq!(read(&file_of(&format!("<{code}"), "False", "(2,)", &little)), expected);
            let bare = read(&file_of(&format!("|{code}"), "False", "(2,)", &little));
            assert_eq!(bare.is_ok(), little.len() == 2, "{code}");
        }
        let read = read(&file_of(">f4", "False", "(2,)", b"\x3f\xc0\0\0\xc0\0\0\0")).unwrap();
        assert_eq!(read.bytes, [1.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat());
    }

    #[test]
    fn numbers_and_empty_arrays_have_shapes() {
        assert_eq!(read(&file_of("|u1", "False", "()", b"\x05")), Ok(array(NpyDtype::U8, &[], &[5])));
        assert_eq!(
            read(&file_of("<f4", "True", "()", &[1, 2, 3, 4])),
            Ok(array(NpyDtype::F32, &[], &[1, 2, 3, 4]))
        );
        assert_eq!(read(&file_of("<f8", "False", "(0,)", b"")), Ok(array(NpyDtype::F64, &[0], &[])));
        assert_eq!(
            read(&file_of("<f8", "True", "(3, 0, 2)", b"")),
            Ok(array(NpyDtype::F64, &[3, 0, 2], &[]))
        );
    }

    #[test]
    fn fortran_order_becomes_row_major() {
        // [[1, 2, 3], [4, 5, 6]] lies column by column.
        let read_2d = read(&file_of("|u1", "True", "(2, 3)", &[1, 4, 2, 5, 3, 6]));
        assert_eq!(read_2d, Ok(array(NpyDtype::U8, &[2, 3], &[1, 2, 3, 4, 5, 6])));
        // Element (i, j, k) of shape (2, 1, 3) is 10 i + k; i varies fastest in the file.
        let data: Vec<u8> = [0, 10, 1, 11, 2, 12].into_iter().flat_map(i32::to_be_bytes).collect();
        let expected: Vec<u8> = [0, 1, 2, 10, 11, 12].into_iter().flat_map(i32::to_le_bytes).collect();
        let read_3d = read(&file_of(">i4", "True", "(2, 1, 3)", &data));
        assert_eq!(read_3d, Ok(array(NpyDtype::I32, &[2, 1, 3], &expected)));
    }

    #[test]
    fn versions_key_order_and_spacing_do_not_matter() {
        let headers = [
            "{'descr':'|u1','fortran_order':False,'shape':(1,2)}",
            "{\"shape\": (1, 2,), \"descr\": \"|u1\", 'fortran_order': False}   \n",
            "  {\n'fortran_order' :False ,\t'shape' : ( 1 , 2 ) , 'descr' : '|u1' , }",
        ];
        for header in headers {
            for version in [1, 2, 3] {
                let read = read(&file(version, header.as_bytes(), &[8, 9]));
                assert_eq!(read, Ok(array(NpyDtype::U8, &[1, 2], &[8, 9])), "{header}");
            }
        }
    }

    #[test]
    fn writes_what_numpy_writes() {
        let mut expected = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
        expected.extend_from_slice(b"{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }");
        expected.resize(127, b' ');
        expected.extend_from_slice(b"\n\x01\0\0\0\xff\xff\xff\xff");
        assert_eq!(write(&array(NpyDtype::I32, &[2], &[1, 0, 0, 0, 255, 255, 255, 255])), expected);
        // A header of more than 65,535 bytes needs the four length bytes of 2.0.
        let long = write(&array(NpyDtype::U8, &[1; 30_000], &[7]));
        let length = u32::from_le_bytes([long[8], long[9], long[10], long[11]]) as usize;
        assert_eq!((&long[..8], long.len(), length % 64), (b"\x93NUMPY\x02\x00".as_slice(), length + 13, 52));
        assert_eq!(&long[long.len() - 2..], b"\n\x07");
        assert_eq!(read(&long), Err("npy: expected at most 64 dimensions, got more".to_string()));
    }

    #[test]
    fn what_is_written_reads_back() {
        for dtype in NpyDtype::ALL {
            for shape in [&[][..], &[0], &[5], &[2, 3], &[1, 1, 4, 2]] {
                let n = shape.iter().product::<usize>() * dtype.size();
                let array = array(dtype, shape, &(0..n).map(|i| (i % 2) as u8).collect::<Vec<_>>());
                let file = write(&array);
                assert_eq!((file.len() - n) % 64, 0);
                assert_eq!(read(&file), Ok(array));
            }
        }
    }

    #[test]
    fn malformed_files_are_refused_with_the_reason() {
        let error = |file: &[u8]| read(file).unwrap_err();
        let header_error = |header: &str| error(&file(1, header.as_bytes(), b""));
        let shape_error = |shape: &str| error(&file_of("<f4", "False", shape, b""));
        let descr_error = |descr: &str| error(&file_of(descr, "False", "(1,)", &[0; 4]));
        let magic = r"npy: expected a file that begins with `\x93NUMPY`, got";
        assert_eq!(error(b""), format!("{magic} nothing"));
        assert_eq!(error(b"NUMPY\x93rest"), format!("{magic} `NUMPY\\x93`"));
        let zip = "\n  note: this is a zip file; unpack an .npz first";
        assert_eq!(error(b"PK\x03\x04abcd"), format!("{magic} `PK\\x03\\x04ab`{zip}"));
        assert_eq!(
            error(b"\x93NUMPY\x01"),
            "npy: expected a version after the magic string, got the end of the file"
        );
        assert_eq!(error(b"\x93NUMPY\x01\x01\0\0"), "npy: expected version 1.0, 2.0 or 3.0, got 1.1");
        assert_eq!(
            error(b"\x93NUMPY\x02\x00\0\0"),
            "npy: expected the length of the header after the version, got the end of the file"
        );
        assert_eq!(
            error(b"\x93NUMPY\x03\x00\xff\xff\xff\xff{}"),
            "npy: expected a header of 4294967295 bytes, got 2 to the end of the file"
        );
        assert_eq!(
            error(&file_of("<f4", "False", "(2, 3)", &[0; 23])),
            "npy: expected 24 bytes of data for f4 of shape (2, 3), got 23"
        );
        assert_eq!(
            error(&file_of("<f4", "True", "(2,)", &[0; 9])),
            "npy: expected 8 bytes of data for f4 of shape (2,), got 9"
        );
        assert_eq!(
            error(&file_of("|b1", "False", "(2,)", &[1, 2])),
            "npy: expected every bool to be 0 or 1, got 2"
        );
        assert!(descr_error("<c8").contains("got `<c8`\n  note: "));
        assert!(descr_error("=f4").contains("got `=f4`"));
        assert!(descr_error("|f4").contains("got `|f4`"));
        assert!(descr_error("").contains("got nothing"));
        assert!(descr_error("|O").starts_with("npy: expected an array of numbers, got an object array `|O`"));
        assert!(header_error("{'descr': [('x', '<f4')]}").contains("got a structured one"));
        assert_eq!(shape_error("(2, -3)"), "npy: expected dimensions of 0 or more, got `-3`");
        assert_eq!(
            shape_error("(99999999999999999999,)"),
            "npy: expected a dimension of at most 64 bits, got `99999999999999999999`"
        );
        let huge = "(0, 4611686018427387904, 4)";
        assert_eq!(shape_error(huge), format!("npy: expected a shape that fits into memory, got {huge}"));
        assert_eq!(shape_error("(3)"), "npy: header: expected `,`, got `), }\\n`");
        assert_eq!(shape_error("(03,)"), "npy: header: expected a dimension, got `03,), }\\n`");
        assert!(shape_error("(1, , 2)").starts_with("npy: header: expected a dimension, got `, 2)"));
        assert!(shape_error("3").starts_with("npy: header: expected `(`, got `3"));
        assert_eq!(header_error(""), "npy: header: expected `{`, got nothing");
        assert_eq!(header_error("{}"), "npy: header: expected a key `descr`, got none");
        assert_eq!(
            header_error("{'order': 1}"),
            "npy: header: expected the keys descr, fortran_order, shape, got `order`"
        );
        assert_eq!(
            header_error("{'shape': (), 'shape': ()}"),
            "npy: header: expected one key `shape`, got two"
        );
        assert_eq!(header_error("{'shape': ()} x"), "npy: header: expected nothing after `}`, got `x`");
        assert_eq!(header_error("{'shape': () 'descr'"), "npy: header: expected `}`, got `'descr'`");
        assert_eq!(header_error("{'fortran_order': 1}"), "npy: header: expected `True` or `False`, got `1}`");
        assert!(header_error("{'shape").contains("expected a key in quotes or `}`"));
    }

    fn splitmix64(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Changes, inserts or removes a few bytes. Half of the new bytes are ones that the grammar knows, to get
    /// deeper into the parser.
    fn mutate(bytes: &mut Vec<u8>, state: &mut u64) {
        for _ in 0..1 + splitmix64(state) % 3 {
            let at = splitmix64(state) as usize % (bytes.len() + 1);
            let byte = splitmix64(state) as u8;
            let byte = if byte < 128 { b"{}()[]'\",:-0129 <>|=TFOfiub"[byte as usize % 27] } else { byte };
            match splitmix64(state) % 5 {
                0 if at < bytes.len() => bytes[at] = byte,
                1 if at < bytes.len() => bytes[at] ^= 1 << (byte % 8),
                2 if at < bytes.len() => drop(bytes.remove(at)),
                3 => bytes.truncate(bytes.len() - at / 8),
                _ => bytes.insert(at, byte),
            }
        }
    }

    #[test]
    fn mutated_files_never_panic() {
        let valid: [(u8, &str, &[u8]); 4] = [
            (1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }       \n", &[1; 24]),
            (1, "{'descr': '>i8', 'fortran_order': True, 'shape': (2, 1, 2), }\n", &[3; 32]),
            (3, "{'shape': (), 'descr': '|b1', 'fortran_order': False}", &[1]),
            (2, "{'shape': (0, 7), 'descr': \"<f2\", 'fortran_order': True}", &[]),
        ];
        let (mut state, mut accepted) = (7, 0);
        for _ in 0..20_000 {
            let (version, header, data) = valid[splitmix64(&mut state) as usize % valid.len()];
            let mut mutated = header.as_bytes().to_vec();
            // A header of the wrong length fails early, so half of the files get one that is right.
            let file = if splitmix64(&mut state).is_multiple_of(2) {
                mutate(&mut mutated, &mut state);
                file(version, &mutated, data)
            } else {
                let mut file = file(version, &mutated, data);
                mutate(&mut file, &mut state);
                file
            };
            if let Ok(array) = read(&file) {
                accepted += 1;
                assert_eq!(byte_count(array.dtype, &array.shape), Ok(array.bytes.len()));
                assert!(array.bytes.len() < file.len());
                assert_eq!(read(&write(&array)), Ok(array));
            }
        }
        // Changed spaces and data are still valid files, so both ends of the reader must have been reached.
        assert!((500..19_500).contains(&accepted), "{accepted} of 20000 mutated files were read");
    }
}
