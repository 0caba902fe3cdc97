//! Files: a round trip, reading of parts, and one error that names the file for every damaged one.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fs;
use std::path::PathBuf;

use consort::{Dtype, Safetensors, Tensor};

/// A temporary path of this test, removed at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Temporary {
        Temporary(std::env::temp_dir().join(format!("consort-files-{}-{name}", std::process::id())))
    }

    fn with(name: &str, bytes: &[u8]) -> Temporary {
        let file = Temporary::new(name);
        fs::write(&file.0, bytes).unwrap();
        file
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// One tensor of every element type, each with a layout that is not contiguous.
fn every_type() -> Vec<(String, Tensor)> {
    let x = Tensor::from_slice(&[0.0f32, 1.0, -2.0, 0.5, 3.0, 1.0], &[2, 3]).unwrap();
    let one = |dtype: Dtype| (dtype.to_string(), x.cast(dtype).unwrap().permute(&[1, 0]).unwrap());
    Dtype::ALL.into_iter().map(one).collect()
}

#[test]
fn every_element_type_comes_back() {
    let file = Temporary::new("types.safetensors");
    let tensors = every_type();
    let borrowed: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, x)| (name.as_str(), x)).collect();
    Tensor::save_safetensors(&file.0, &borrowed).unwrap();
    let loaded = Tensor::load_safetensors(&file.0).unwrap();
    assert_eq!(loaded.len(), tensors.len());
    for (name, x) in &loaded {
        let (_, was) = tensors.iter().find(|(other, _)| other == name).unwrap();
        assert_eq!((x.dtype(), x.to_string()), (was.dtype(), was.to_string()), "{name}");
        if x.dtype() == Dtype::Bf16 {
            let error = x.to_npy_bytes().unwrap_err().to_string();
            assert!(
                error.starts_with("to_npy_bytes: expected an element type that npy has, got bf16\n  at ")
            );
            assert!(
                error.ends_with(
                    "note: cast it to f32, which holds the same values, or save it as safetensors"
                )
            );
            continue;
        }
        let back = Tensor::from_npy_bytes(&x.to_npy_bytes().unwrap()).unwrap();
        assert_eq!((back.dtype(), back.to_string()), (x.dtype(), x.to_string()));
    }
}

#[test]
fn the_crate_that_others_use_reads_our_files() {
    let file = Temporary::new("other.safetensors");
    let x = Tensor::from_slice(&[1i32, -2], &[2]).unwrap();
    let empty = Tensor::zeros(Dtype::F64, &[0, 3]).unwrap();
    Tensor::save_safetensors(&file.0, &[("x", &x), ("empty", &empty)]).unwrap();
    let bytes = fs::read(&file.0).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.tensor("x").unwrap().data(), [1, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff]);
    assert_eq!(theirs.tensor("empty").unwrap().shape(), [0, 3]);
    assert_eq!(Safetensors::open(&file.0).unwrap().part("empty", 1, 1, 2).unwrap().shape(), [0, 2]);
}

#[test]
fn parts_equal_parts_of_the_whole() {
    let file = Temporary::new("parts.safetensors");
    let x = Tensor::from_iter(0..60i64).unwrap().reshape(&[3, 4, 5]).unwrap();
    Tensor::save_safetensors(&file.0, &[("before", &Tensor::ones(Dtype::F64, &[3]).unwrap()), ("x", &x)])
        .unwrap();
    let file = Safetensors::open(&file.0).unwrap();
    for (dim, size) in [3, 4, 5].into_iter().enumerate() {
        for start in 0..=size {
            for n in 0..=size - start {
                let part = file.part("x", dim, start, n).unwrap();
                assert_eq!(part.shape()[dim], n);
                if n > 0 {
                    let expected = x.narrow(dim, start, n).unwrap().to_vec::<i64>().unwrap();
                    assert_eq!(part.to_vec::<i64>().unwrap(), expected, "{dim} {start} {n}");
                }
            }
        }
    }
}

#[test]
fn a_part_of_a_file_larger_than_memory_is_read_alone() {
    // A sparse file of 256 GiB: reading all of it would never finish.
    let n: u64 = 1 << 38;
    let header = format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{},4],\"data_offsets\":[0,{n}]}}}}", n / 4);
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let file = Temporary::with("large.safetensors", &bytes);
    fs::OpenOptions::new().write(true).open(&file.0).unwrap().set_len(bytes.len() as u64 + n).unwrap();
    let part = Safetensors::open(&file.0).unwrap().part("w", 0, 1 << 35, 2).unwrap();
    assert_eq!(part.to_vec::<u8>().unwrap(), [0; 8]);
}

#[test]
fn every_damaged_file_is_an_error_with_its_name() {
    let whole = {
        let file = Temporary::new("whole.safetensors");
        let (x, b) = (Tensor::ones(Dtype::F16, &[2, 2]).unwrap(), Tensor::from_slice(&[true], &[1]).unwrap());
        Tensor::save_safetensors(&file.0, &[("x", &x), ("b", &b)]).unwrap();
        fs::read(&file.0).unwrap()
    };
    let npy = Tensor::ones(Dtype::F32, &[2, 2]).unwrap().to_npy_bytes().unwrap();
    for end in 0..whole.len() {
        let file = Temporary::with("cut.safetensors", &whole[..end]);
        let error = Tensor::load_safetensors(&file.0).unwrap_err().to_string();
        assert!(error.starts_with(&format!("safetensors: {}: ", file.0.display())), "{end}: {error}");
        assert!(error.contains("\n  at crates/consort/tests/files.rs:"), "{error}");
    }
    for end in 0..npy.len() {
        let file = Temporary::with("cut.npy", &npy[..end]);
        let error = Tensor::from_npy(&file.0).unwrap_err().to_string();
        assert!(error.starts_with(&format!("from_npy: {}: npy: ", file.0.display())), "{end}: {error}");
    }
    // Any of these changes to any byte of a file causes an error at most.
    for at in 0..whole.len() {
        for byte in [0, 1, 0xff, b'"', b'9', b'}'] {
            let mut damaged = whole.clone();
            damaged[at] = byte;
            let file = Temporary::with("damaged.safetensors", &damaged);
            let _ = Tensor::load_safetensors(&file.0);
        }
    }
    let mut bad_bool = whole.clone();
    *bad_bool.last_mut().unwrap() = 2;
    let file = Temporary::with("bool.safetensors", &bad_bool);
    let error = Tensor::load_safetensors(&file.0).unwrap_err().to_string();
    assert!(error.contains("`b`: expected every bool to be 0 or 1, got 2"), "{error}");
}

#[test]
fn what_is_asked_for_must_be_there() {
    let file = Temporary::new("asked.safetensors");
    let x = Tensor::ones(Dtype::F32, &[2, 3]).unwrap();
    Tensor::save_safetensors(&file.0, &[("x", &x)]).unwrap();
    let twice = Tensor::save_safetensors(&file.0, &[("x", &x), ("x", &x)]).unwrap_err().to_string();
    assert!(twice.contains("expected each name once, got `x` again"), "{twice}");
    let open = Safetensors::open(&file.0).unwrap();
    let text = |error: consort::Error| error.to_string();
    let error = text(open.tensor("y").unwrap_err());
    assert!(error.contains("expected a tensor `y`\n  at ") && error.ends_with("note: it has x"), "{error}");
    let error = text(open.part("x", 2, 0, 1).unwrap_err());
    assert!(error.contains("`x`: expected a dimension below 2, got 2"), "{error}");
    let error = open.part("x", 2, 0, 1).unwrap_err();
    assert_eq!((&error.failure().expected[..], &error.failure().got[..]), ("a dimension below 2", "2"));
    for (start, size) in [(2, 2), (4, 0), (usize::MAX, 2)] {
        let error = text(open.part("x", 1, start, size).unwrap_err());
        let expected = format!("expected a part of 0..3 along dimension 1, got {size} entries from {start}");
        assert!(error.contains(&expected), "{error}");
    }
    let folder = text(Tensor::from_npy(std::env::temp_dir()).unwrap_err());
    assert!(folder.contains("expected a file, got a folder, a pipe or a device"), "{folder}");
    let shape = Tensor::of_shape(Dtype::F32, &[2]);
    let errors = [
        Safetensors::open("/nowhere/x").map(drop),
        x.to_npy("/nowhere/x"),
        Tensor::save_safetensors("/nowhere/x", &[("s", &x)]),
        // A tensor without elements has nothing to write.
        Tensor::save_safetensors("/nowhere/x", &[("s", &shape)]),
    ];
    let first = |outcome: consort::Result<()>| {
        outcome.unwrap_err().to_string().lines().next().unwrap_or_default().to_string()
    };
    let missing = "/nowhere/x: No such file or directory (os error 2)";
    assert_eq!(
        errors.map(first),
        [
            format!("safetensors: {missing}"),
            format!("to_npy: {missing}"),
            format!("save_safetensors: {missing}"),
            "save_safetensors: expected a tensor with data, got a shape".to_string()
        ]
    );
}
