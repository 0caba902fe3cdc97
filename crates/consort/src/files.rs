//! Tensors from and to files: NumPy's `.npy`, and safetensors.
//!
//! Files are untrusted: every malformed one is an error that names it, found before anything is allocated for
//! its claimed sizes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::panic::Location;
use std::path::{Path, PathBuf};

use consort_types::layout::numel;
use consort_types::{Digest, Dtype, Failure, Headline};
use safetensors::tensor::{Dtype as FileDtype, Metadata, TensorInfo};

use crate::error::{Error, Result};
use crate::npy::{self, Array, NpyDtype};
use crate::tensor::Tensor;

/// The largest header of a safetensors file: bounds what a malformed file makes us allocate.
const MAX_HEADER: u64 = 100_000_000;

/// The bytes before a safetensors header: its length.
const LENGTH_BYTES: u64 = 8;

/// The context of a file error.
pub(crate) struct Fault<'a> {
    pub(crate) op: &'static str,
    pub(crate) path: &'a Path,
    pub(crate) site: &'static Location<'static>,
}

impl Fault<'_> {
    pub(crate) fn error(&self, headline: impl Into<Headline>) -> Error {
        self.failed(Failure::new(headline))
    }

    /// An error of a part of the file: its header, or a tensor.
    pub(crate) fn error_of(&self, part: &str, headline: impl Into<Headline>) -> Error {
        self.failed(Failure::new(headline).of(part.to_string()))
    }

    pub(crate) fn failed(&self, failure: Box<Failure>) -> Error {
        Error::of(self.op, failure.of(self.path.display().to_string()), self.site)
    }

    /// Opens a file for reading. A pipe or a device never ends, so it is refused before it is opened.
    fn open(&self) -> Result<(File, u64)> {
        let about = fs::metadata(self.path).map_err(|error| self.error(error.to_string()))?;
        if !about.is_file() {
            return Err(self.error(("a file", "a folder, a pipe or a device")));
        }
        Ok((File::open(self.path).map_err(|error| self.error(error.to_string()))?, about.len()))
    }
}

impl Tensor {
    /// The tensor of a `.npy` file. Like any input it may differ between ranks; a compiled function takes it as equal if the
    /// ranks read the same elements.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// # fn main() -> consort::Result<()> {
    /// let path = std::env::temp_dir().join(format!("consort-{}.npy", std::process::id()));
    /// Tensor::from_slice(&[1.0f32, 2.0], &[2, 1])?.to_npy(&path)?;
    /// assert_eq!(Tensor::from_npy(&path)?.to_string(), "[[1.]\n [2.]]");
    /// # let _ = std::fs::remove_file(&path);
    /// assert!(Tensor::from_npy(&path).is_err()); // It is gone.
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn from_npy(path: impl AsRef<Path>) -> Result<Tensor> {
        let fault = Fault { op: "from_npy", path: path.as_ref(), site: Location::caller() };
        let (mut file, _) = fault.open()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| fault.error(error.to_string()))?;
        let array = npy::read(&bytes).map_err(|failure| fault.failed(failure))?;
        of_array(fault.op, &array, fault.site)
    }

    /// Writes it as a `.npy` file, overwriting an existing one. The format has no bf16.
    ///
    /// [`from_npy`](Tensor::from_npy) has an example.
    #[track_caller]
    pub fn to_npy(&self, path: impl AsRef<Path>) -> Result<()> {
        let fault = Fault { op: "to_npy", path: path.as_ref(), site: Location::caller() };
        let bytes = self.npy_bytes(fault.op, fault.site)?;
        fs::write(fault.path, bytes).map_err(|error| fault.error(error.to_string()))
    }

    /// The tensor of a `.npy` file that is in memory.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// # fn main() -> consort::Result<()> {
    /// let file = Tensor::from_slice(&[true, false], &[2])?.to_npy_bytes()?;
    /// assert_eq!(Tensor::from_npy_bytes(&file)?.to_vec::<bool>()?, [true, false]);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn from_npy_bytes(file: &[u8]) -> Result<Tensor> {
        let site = Location::caller();
        let array = npy::read(file).map_err(|failure| Error::of("from_npy_bytes", failure, site))?;
        of_array("from_npy_bytes", &array, site)
    }

    /// The bytes of a `.npy` file that holds it.
    ///
    /// [`from_npy_bytes`](Tensor::from_npy_bytes) has an example.
    #[track_caller]
    pub fn to_npy_bytes(&self) -> Result<Vec<u8>> {
        self.npy_bytes("to_npy_bytes", Location::caller())
    }

    fn npy_bytes(&self, op: &str, site: &'static Location<'static>) -> Result<Vec<u8>> {
        let Some(dtype) = NpyDtype::of(self.dtype()) else {
            let failure = Failure::new(("an element type that npy has", self.dtype().to_string()))
                .note("cast it to f32, which holds the same values, or save it as safetensors");
            return Err(Error::of(op, failure, site));
        };
        let bytes = self.with_bytes(op, site, <[u8]>::to_vec)?;
        npy::write(&Array { dtype, shape: self.shape().to_vec(), bytes })
            .map_err(|failure| Error::of(op, failure, site))
    }

    /// All tensors of a safetensors file, by name. [`Safetensors`] reads some of them, or parts.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// # fn main() -> consort::Result<()> {
    /// let path = std::env::temp_dir().join(format!("consort-{}.safetensors", std::process::id()));
    /// let (up, down) = (Tensor::ones(Dtype::Bf16, &[2])?, Tensor::zeros(Dtype::I64, &[1, 3])?);
    /// Tensor::save_safetensors(&path, &[("up", &up), ("down", &down)])?;
    /// let all = Tensor::load_safetensors(&path)?;
    /// assert_eq!((all[0].0.as_str(), all[0].1.shape()), ("down", &[1, 3][..]));
    /// assert_eq!((all[1].0.as_str(), all[1].1.dtype()), ("up", Dtype::Bf16));
    /// # let _ = std::fs::remove_file(&path);
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn load_safetensors(path: impl AsRef<Path>) -> Result<Vec<(String, Tensor)>> {
        let file = Safetensors::open(path)?;
        // Not a closure, which would not have the caller's line.
        let mut tensors = Vec::new();
        for name in file.entries.keys() {
            tensors.push((name.clone(), file.tensor(name)?));
        }
        Ok(tensors)
    }

    /// Writes tensors as a safetensors file, overwriting an existing one. Waits for them.
    ///
    /// [`load_safetensors`](Tensor::load_safetensors) has an example.
    #[track_caller]
    pub fn save_safetensors(path: impl AsRef<Path>, tensors: &[(&str, &Tensor)]) -> Result<()> {
        let fault = Fault { op: "save_safetensors", path: path.as_ref(), site: Location::caller() };
        for (_, tensor) in tensors {
            tensor.data(fault.op, fault.site)?;
        }
        let infos: Vec<_> =
            tensors.iter().map(|(name, tensor)| (*name, tensor.dtype(), tensor.shape())).collect();
        let (header, starts, _) = header(&fault, &infos, None)?;
        let file = File::create(fault.path).map_err(|error| fault.error(error.to_string()))?;
        let write = |bytes: &[u8], at: u64| {
            file.write_all_at(bytes, at).map_err(|error| fault.error(error.to_string()))
        };
        write(&header, 0)?;
        for ((_, tensor), start) in tensors.iter().zip(starts) {
            tensor.with_bytes(fault.op, fault.site, |bytes| write(bytes, start))??;
        }
        Ok(())
    }
}

/// The header of a safetensors file of these tensors, where each begins in the file, and the length of the file.
pub(crate) fn header(
    fault: &Fault<'_>,
    tensors: &[(&str, Dtype, &[usize])],
    notes: Option<BTreeMap<String, String>>,
) -> Result<(Vec<u8>, Vec<u64>, u64)> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    // Wide elements first, so that all are aligned.
    order.sort_by_key(|place| (std::cmp::Reverse(tensors[*place].1.size()), tensors[*place].0));
    let (mut infos, mut starts, mut end) = (Vec::new(), vec![0; tensors.len()], 0);
    for place in order {
        let (name, dtype, shape) = tensors[place];
        if infos.iter().any(|(other, _)| other == name) || name == "__metadata__" {
            return Err(fault.error(("each name once", format!("`{name}` again"))));
        }
        let start = end;
        starts[place] = start as u64;
        end += shape.iter().product::<usize>() * dtype.size();
        let info = TensorInfo { dtype: file_dtype(dtype), shape: shape.to_vec(), data_offsets: (start, end) };
        infos.push((name.to_string(), info));
    }
    let header = Metadata::new(notes.map(|notes| notes.into_iter().collect()), infos)
        .map_err(|error| fault.error(error.to_string()))?;
    let header = serde_json::to_vec(&header).map_err(|error| fault.error(error.to_string()))?;
    let length = header.len().next_multiple_of(LENGTH_BYTES as usize);
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(LENGTH_BYTES as usize + length, b' ');
    starts.iter_mut().for_each(|start| *start += bytes.len() as u64);
    let whole = (bytes.len() + end) as u64;
    Ok((bytes, starts, whole))
}

fn of_array(op: &str, array: &Array, site: &'static Location<'static>) -> Result<Tensor> {
    let tensor = Tensor::build(op, array.dtype.dtype(), &array.shape, site, |bytes| {
        // Both have the length that the shape implies.
        bytes.iter_mut().zip(&array.bytes).for_each(|(to, from)| *to = *from);
        Ok(())
    });
    tensor?.with_elements_as_origin(op, site)
}

fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::F64 => FileDtype::F64,
        Dtype::F16 => FileDtype::F16,
        Dtype::Bf16 => FileDtype::BF16,
        Dtype::I32 => FileDtype::I32,
        Dtype::I64 => FileDtype::I64,
        Dtype::U8 => FileDtype::U8,
        Dtype::Bool => FileDtype::BOOL,
    }
}

/// A safetensors file, of which only the requested tensors or parts are read: each rank reads its own part.
///
/// ```
/// use consort::{Safetensors, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let path = std::env::temp_dir().join(format!("consort-parts-{}.safetensors", std::process::id()));
/// let w = Tensor::from_iter(0..6i32)?.reshape(&[2, 3])?;
/// Tensor::save_safetensors(&path, &[("w", &w)])?;
///
/// let file = Safetensors::open(&path)?;
/// assert_eq!(file.names().collect::<Vec<_>>(), ["w"]);
/// assert_eq!(file.shape("w")?, [2, 3]);
/// assert_eq!(file.dtype("w")?, consort::Dtype::I32);
/// assert_eq!(file.tensor("w")?.to_string(), "[[0 1 2]\n [3 4 5]]");
/// assert_eq!(file.part("w", 1, 1, 2)?.to_string(), "[[1 2]\n [4 5]]");
/// # let _ = std::fs::remove_file(&path);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    file: File,
    /// Where the data begin.
    start: u64,
    entries: BTreeMap<String, TensorInfo>,
    /// What the header says besides.
    notes: BTreeMap<String, String>,
}

impl Safetensors {
    /// Opens a file and reads its header.
    ///
    /// [`Safetensors`] has an example.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Safetensors> {
        Safetensors::open_at(path.as_ref(), Location::caller())
    }

    pub(crate) fn open_at(path: &Path, site: &'static Location<'static>) -> Result<Safetensors> {
        let fault = Fault { op: "safetensors", path, site };
        let (mut file, length) = fault.open()?;
        let mut header_length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut header_length)
            .map_err(|_| fault.error(("a header of 8 bytes or more", length.to_string())))?;
        let header_length = u64::from_le_bytes(header_length);
        let most = MAX_HEADER.min(length - LENGTH_BYTES);
        if header_length > most {
            let expected = format!("a header of at most {most} bytes");
            return Err(fault.error((expected, format!("one of {header_length}"))));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(|error| fault.error(error.to_string()))?;
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|error| fault.error_of("header", error.to_string()))?;
        let start = LENGTH_BYTES + header_length;
        let (expected, got) = (header.data_len() as u64, length - start);
        if expected != got {
            return Err(fault.error((format!("{expected} bytes of data"), got.to_string())));
        }
        let entries = header.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        let notes = header.metadata().clone().unwrap_or_default().into_iter().collect();
        Ok(Safetensors { path: path.to_path_buf(), file, start, entries, notes })
    }

    /// What the header says besides.
    pub(crate) fn note(&self, key: &str) -> Option<&str> {
        self.notes.get(key).map(String::as_str)
    }

    /// The names of its tensors, sorted.
    ///
    /// [`Safetensors`] has an example.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The sizes of a tensor.
    ///
    /// [`Safetensors`] has an example.
    #[track_caller]
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.entry(name, Location::caller())?.0.shape)
    }

    /// Fails if the shape of a tensor is not `expected`.
    #[track_caller]
    pub(crate) fn check_shape(&self, name: &str, expected: &[usize]) -> Result<()> {
        let got = self.shape(name)?;
        match got == expected {
            true => Ok(()),
            false => {
                let message = (format!("the shape {expected:?}"), format!("{got:?}"));
                Err(self.fault(Location::caller()).error_of(&format!("`{name}`"), message))
            }
        }
    }

    /// The element type of a tensor.
    ///
    /// [`Safetensors`] has an example.
    #[track_caller]
    pub fn dtype(&self, name: &str) -> Result<Dtype> {
        Ok(self.entry(name, Location::caller())?.1)
    }

    /// Reads a whole tensor. Ranks that read the same elements have a tensor that compiled functions take as equal.
    ///
    /// [`Safetensors`] has an example.
    #[track_caller]
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let site = Location::caller();
        let (info, _) = self.entry(name, site)?;
        // The whole tensor as one row.
        let length = info.data_offsets.1 - info.data_offsets.0;
        let tensor = self.read_rows(name, &info.shape, 1, 0, 0, length, site)?;
        tensor.with_elements_as_origin("safetensors", site)
    }

    /// Reads the part of a tensor that begins at `start` along a dimension and has `size` entries, and no other bytes
    /// of the file.
    ///
    /// [`Safetensors`] has an example.
    #[track_caller]
    pub fn part(&self, name: &str, dim: usize, start: usize, size: usize) -> Result<Tensor> {
        let site = Location::caller();
        let (info, dtype) = self.entry(name, site)?;
        let refuse = |headline: Headline| self.fault(site).error_of(&format!("`{name}`"), headline);
        let Some(whole) = info.shape.get(dim).copied() else {
            return Err(refuse(Headline::dimension(dim, info.shape.len())));
        };
        if start.checked_add(size).is_none_or(|end| end > whole) {
            let expected = format!("a part of 0..{whole} along dimension {dim}");
            return Err(refuse((expected, format!("{size} entries from {start}")).into()));
        }
        let mut shape = info.shape.clone();
        shape[dim] = size;
        // If another dimension is empty there is nothing to read, and the products may overflow.
        let (rows, entry) = match numel(&shape) {
            Some(0) | None => (0, 0),
            Some(_) => (shape[..dim].iter().product(), shape[dim + 1..].iter().product::<usize>()),
        };
        let entry = entry * dtype.size();
        self.read_rows(name, &shape, rows, (whole * entry) as u64, start * entry, size * entry, site)
    }

    /// A digest of what the file says that it holds: names, types, sizes.
    pub(crate) fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for (name, info) in &self.entries {
            digest.add_bytes(name.as_bytes());
            digest.add_bytes(info.dtype.to_string().as_bytes());
            digest.add_all(info.shape.iter().map(|size| *size as u64));
        }
        digest
    }

    fn fault(&self, site: &'static Location<'static>) -> Fault<'_> {
        Fault { op: "safetensors", path: &self.path, site }
    }

    fn entry(&self, name: &str, site: &'static Location<'static>) -> Result<(&TensorInfo, Dtype)> {
        let fault = self.fault(site);
        let Some(info) = self.entries.get(name) else {
            let names: Vec<&str> = self.names().take(8).collect();
            let failure = Failure::new((format!("a tensor `{name}`"), ""));
            return Err(fault.failed(failure.note(format!("it has {}", names.join(", ")))));
        };
        let dtype = Dtype::ALL.into_iter().find(|dtype| file_dtype(*dtype) == info.dtype);
        let unknown = || {
            let message = ("F32, F64, F16, BF16, I32, I64, U8 or BOOL", info.dtype.to_string());
            fault.error_of(&format!("`{name}`"), message)
        };
        Ok((info, dtype.ok_or_else(unknown)?))
    }

    /// Reads `rows` pieces of `length` bytes: the first is `skip` bytes into the tensor, and the next ones each follow
    /// `apart` bytes later.
    #[allow(clippy::too_many_arguments, reason = "one read, taken apart for reading")]
    fn read_rows(
        &self,
        name: &str,
        shape: &[usize],
        rows: usize,
        apart: u64,
        skip: usize,
        length: usize,
        site: &'static Location<'static>,
    ) -> Result<Tensor> {
        let (_, dtype) = self.entry(name, site)?;
        Tensor::build("safetensors", dtype, shape, site, |bytes| {
            let mut pieces = bytes.chunks_exact_mut(length.max(1)).take(rows).enumerate();
            pieces.try_for_each(|(row, piece)| {
                self.read_at(name, skip as u64 + row as u64 * apart, piece, site)
            })
        })
    }

    /// Reads the bytes of a tensor from `skip` on.
    pub(crate) fn read_at(
        &self,
        name: &str,
        skip: u64,
        bytes: &mut [u8],
        site: &'static Location<'static>,
    ) -> Result<()> {
        let (info, dtype) = self.entry(name, site)?;
        let fault = self.fault(site);
        let read = self.file.read_exact_at(bytes, self.start + info.data_offsets.0 as u64 + skip);
        read.map_err(|error| fault.error_of(&format!("`{name}`"), error.to_string()))?;
        // Readers take a bool's byte for its value, so bytes other than 0 and 1 are rejected.
        match bytes.iter().find(|byte| dtype == Dtype::Bool && **byte > 1) {
            Some(bad) => {
                let message = ("every bool to be 0 or 1", bad.to_string());
                Err(fault.error_of(&format!("`{name}`"), message))
            }
            None => Ok(()),
        }
    }
}
