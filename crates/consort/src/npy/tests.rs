//! The npy format against files assembled by hand, and against damage.

use consort_types::Rng;

use super::*;

/// A file assembled by hand: nothing of `write` is in it.
fn file(version: u8, header: &[u8], data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u32).to_le_bytes();
    let length = if version == 1 { &length[..2] } else { &length[..] };
    [b"\x93NUMPY".as_slice(), &[version, 0], length, header, data].concat()
}

fn file_of(descr: &str, fortran_order: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n");
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
    assert_eq!(read(&file_of("<f8", "True", "(3, 0, 2)", b"")), Ok(array(NpyDtype::F64, &[3, 0, 2], &[])));
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
    assert_eq!(write(&array(NpyDtype::I32, &[2], &[1, 0, 0, 0, 255, 255, 255, 255])), Ok(expected));
    // A header of more than 65,535 bytes needs the four length bytes of 2.0.
    let long = write(&array(NpyDtype::U8, &[1; 30_000], &[7])).unwrap();
    let length = u32::from_le_bytes([long[8], long[9], long[10], long[11]]) as usize;
    assert_eq!((&long[..8], long.len(), length % 64), (b"\x93NUMPY\x02\x00".as_slice(), length + 13, 52));
    assert_eq!(&long[long.len() - 2..], b"\n\x07");
    assert_eq!(read(&long).unwrap_err().to_string(), "npy: expected at most 64 dimensions, got more");
}

#[test]
fn what_is_written_reads_back() {
    for dtype in NpyDtype::ALL {
        for shape in [&[][..], &[0], &[5], &[2, 3], &[1, 1, 4, 2]] {
            let n = shape.iter().product::<usize>() * dtype.size();
            let array = array(dtype, shape, &(0..n).map(|i| (i % 2) as u8).collect::<Vec<_>>());
            let file = write(&array).unwrap();
            assert_eq!((file.len() - n) % 64, 0);
            assert_eq!(read(&file), Ok(array));
        }
    }
}

#[test]
fn malformed_files_are_refused_with_the_reason() {
    let error = |file: &[u8]| read(file).unwrap_err().to_string();
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
    assert_eq!(header_error("{'shape': (), 'shape': ()}"), "npy: header: expected one key `shape`, got two");
    assert_eq!(header_error("{'shape': ()} x"), "npy: header: expected nothing after `}`, got `x`");
    assert_eq!(header_error("{'shape': () 'descr'"), "npy: header: expected `}`, got `'descr'`");
    assert_eq!(header_error("{'fortran_order': 1}"), "npy: header: expected `True` or `False`, got `1}`");
    assert!(header_error("{'shape").contains("expected a key in quotes or `}`"));
}

/// Changes, inserts or removes a few bytes. Half of the new bytes are ones that the grammar knows, to get
/// deeper into the parser.
fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..1 + rng.below(3) {
        let at = rng.below(bytes.len() + 1);
        let byte = rng.next_u64() as u8;
        let byte = if byte < 128 { b"{}()[]'\",:-0129 <>|=TFOfiub"[byte as usize % 27] } else { byte };
        match rng.below(5) {
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
    let (mut rng, mut accepted) = (Rng::new(7), 0);
    for _ in 0..20_000 {
        let (version, header, data) = rng.pick(&valid);
        let mut mutated = header.as_bytes().to_vec();
        // A header of the wrong length fails early, so half of the files get one that is right.
        let file = if rng.one_in(2) {
            mutate(&mut mutated, &mut rng);
            file(version, &mutated, data)
        } else {
            let mut file = file(version, &mutated, data);
            mutate(&mut file, &mut rng);
            file
        };
        if let Ok(array) = read(&file) {
            accepted += 1;
            assert_eq!(byte_count(array.dtype, &array.shape), Ok(array.bytes.len()));
            assert!(array.bytes.len() < file.len());
            assert_eq!(read(&write(&array).unwrap()), Ok(array));
        }
    }
    // Changed spaces and data are still valid files, so both ends of the reader must have been reached.
    assert!((500..19_500).contains(&accepted), "{accepted} of 20000 mutated files were read");
}
