//! Checkpoints: the tensors of a training state and the number of its step, as safetensors.
//!
//! A rank writes the boxes that it is the first to have, so that nothing is gathered and no element is written twice. A rank
//! that loads reads the boxes that overlap its own, so that any number of ranks may load what any number has saved. A file
//! gets its name, and a folder its index, by a rename after all is on the disk: a save that fails or is killed leaves the
//! last checkpoint as it was.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::Location;
use std::path::{Path, PathBuf};

use consort_types::{Digest, Failure};
use serde_json::{Map, Value, json};

use super::parts::{Boxed, Part, Parts};
use crate::error::Error;
use crate::files::{Fault, Safetensors, header};
use crate::mesh::Mesh;
use crate::trace::is_tracing;
use crate::{Flatten, Result, Tensor};

type Site = &'static Location<'static>;

/// The index of a folder.
const INDEX: &str = "index.json";

/// Where a training state is saved and loaded: one file, or a folder with a file for each rank.
///
/// ```
/// use consort::nn::{Checkpoint, Parts};
/// use consort::{Dtype, Tensor};
///
/// # fn main() -> consort::Result<()> {
/// let path = std::env::temp_dir().join(format!("consort-checkpoint-{}.safetensors", std::process::id()));
/// let rows = |mesh: &consort::Mesh| {
///     let (own, first) = (4 / mesh.size(), 4 / mesh.size() * mesh.my_rank()?);
///     Tensor::iota(Dtype::F32, &[4, 2], 0)?.narrow(0, first, own)
/// };
/// for (ranks, step) in [(2, 7), (4, 8)] {
///     let done = consort::spawn(ranks, |mesh| {
///         let state = rows(&mesh)?;
///         let parts = Parts::whole(&state).split(&mesh, |_, _| Some(0))?;
///         let checkpoint = Checkpoint::file(&path, &mesh);
///         if ranks == 2 {
///             return checkpoint.save(&state, &parts, step);
///         }
///         let (loaded, step) = checkpoint.load(&state, &parts)?;
///         assert_eq!((loaded.to_vec::<f32>()?, step), (state.to_vec::<f32>()?, 7));
///         Ok(())
///     });
///     assert!(done.into_iter().all(|done| done.is_ok()));
/// }
/// # let _ = std::fs::remove_file(&path);
/// # Ok(()) }
/// ```
pub struct Checkpoint {
    path: PathBuf,
    /// A folder with a file for each rank.
    is_folder: bool,
    mesh: Mesh,
}

/// The boxes of a tensor that ranks have, each once, with the first rank that has it.
type Owners = Vec<Vec<(usize, Boxed)>>;

impl Checkpoint {
    /// One file with whole tensors, which other programs read too.
    ///
    /// [`Checkpoint`] has an example.
    pub fn file(path: impl AsRef<Path>, mesh: &Mesh) -> Checkpoint {
        Checkpoint { path: path.as_ref().to_path_buf(), is_folder: false, mesh: mesh.clone() }
    }

    /// A folder, in which each rank has a file of its own.
    ///
    /// [`Checkpoint`] has an example with a file.
    pub fn folder(path: impl AsRef<Path>, mesh: &Mesh) -> Checkpoint {
        Checkpoint { is_folder: true, ..Checkpoint::file(path, mesh) }
    }

    /// Whether something was saved. All ranks call it, and get the answer of rank 0.
    #[track_caller]
    pub fn exists(&self) -> Result<bool> {
        let path = if self.is_folder { self.path.join(INDEX) } else { self.path.clone() };
        let mine = [i64::from(self.mesh.my_rank()? == 0 && path.exists())];
        let all = self.mesh.world.gather("look for a checkpoint", &mine, Location::caller())?;
        Ok(all.contains(&1))
    }

    /// Saves a state, over the last one. All ranks call it; if one fails, all do, and the last checkpoint is as it was. What
    /// several ranks have must be equal on them.
    ///
    /// [`Checkpoint`] has an example.
    #[track_caller]
    pub fn save(&self, state: &impl Flatten, parts: &Parts, step: u64) -> Result<()> {
        let site = Location::caller();
        let tensors = state.flatten();
        let digest = |tensor: &Tensor| tensor.with_bytes("checkpoint", site, Digest::of_many);
        let digests = self
            .check(&tensors, parts, site)
            .and_then(|()| tensors.iter().map(digest).collect::<Result<Vec<u64>>>());
        let owners = self.owners(parts, &self.together(digests, site)?, site)?;
        match self.is_folder {
            false => self.save_file(&tensors, parts, &owners, step, site),
            true => self.save_folder(&tensors, parts, &owners, step, site),
        }
    }

    /// The state that was saved last and its step, as parts of this rank. What is no tensor comes from `like`. All ranks call
    /// it; if one fails, all do.
    ///
    /// [`Checkpoint`] has an example.
    #[track_caller]
    pub fn load<S: Flatten>(&self, like: &S, parts: &Parts) -> Result<(S, u64)> {
        let site = Location::caller();
        let outcome = self.check(&like.flatten(), parts, site).and_then(|()| self.read(parts, site));
        let (tensors, step) = self.together(outcome, site)?;
        Ok((like.unflatten(tensors)?, step))
    }

    fn fault(&self, site: Site) -> Fault<'_> {
        Fault { op: "checkpoint", path: &self.path, site }
    }

    fn check(&self, tensors: &[Tensor], parts: &Parts, site: Site) -> Result<()> {
        if is_tracing() {
            let failure = Failure::new("a checkpoint cannot be a part of a compiled function");
            return Err(Error::of("checkpoint", failure.note("save and load between its calls"), site));
        }
        let shapes = |list: Vec<&[usize]>| format!("tensors of shapes {list:?}");
        let expected: Vec<&[usize]> = parts.list.iter().map(|part| &part.own.shape[..]).collect();
        let got: Vec<&[usize]> = tensors.iter().map(Tensor::shape).collect();
        match expected == got {
            true => Ok(()),
            false => Err(self.fault(site).error((shapes(expected), shapes(got)))),
        }
    }

    /// Which ranks have which boxes. Fails on all ranks if tensors differ, if ranks have other elements of one box, by their
    /// digests, or if the boxes are not the whole tensors.
    fn owners(&self, parts: &Parts, digests: &[u64], site: Site) -> Result<Owners> {
        let mut mine = Vec::new();
        for (part, elements) in parts.list.iter().zip(digests) {
            let mut form = Digest::default();
            form.add_bytes(part.name.as_bytes());
            form.add(part.dtype as u64);
            form.add_all(part.whole.iter().map(|size| *size as u64));
            mine.extend(part.own.start.iter().chain(&part.own.shape).map(|number| *number as i64));
            mine.extend([*elements as i64, form.get() as i64]);
        }
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.mesh.world.gather_bytes("compare the parts of a checkpoint", &bytes, site)?;
        if all.iter().any(|other| other.len() != bytes.len()) {
            return Err(self.fault(site).failed(other_form(None)));
        }
        let numbers = |bytes: &Vec<u8>| -> Vec<i64> {
            bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
        };
        let ranks: Vec<Vec<i64>> = all.iter().map(numbers).collect();
        let (mut owners, mut at) = (Owners::new(), 0);
        for part in &parts.list {
            let n = part.whole.len();
            let form = at + 2 * n + 1;
            if ranks.iter().any(|numbers| numbers[form] != mine[form]) {
                return Err(self.fault(site).failed(other_form(Some(&part.name))));
            }
            let mut boxes: Vec<(usize, Boxed)> = Vec::new();
            for (rank, numbers) in ranks.iter().enumerate() {
                let sizes = |from: usize| numbers[from..from + n].iter().map(|size| *size as usize).collect();
                let one = Boxed { start: sizes(at), shape: sizes(at + n) };
                match boxes.iter().find(|(_, other)| *other == one) {
                    None if one.numel() > 0 => boxes.push((rank, one)),
                    Some((first, _)) if ranks[*first][at + 2 * n] != numbers[at + 2 * n] => {
                        return Err(self.fault(site).failed(other_elements(&part.name, *first, rank)));
                    }
                    _ => {}
                }
            }
            at = form + 1;
            part.check_cover("rank", &boxes).map_err(|failure| self.fault(site).failed(failure))?;
            owners.push(boxes);
        }
        Ok(owners)
    }

    fn save_file(
        &self,
        tensors: &[Tensor],
        parts: &Parts,
        owners: &Owners,
        step: u64,
        site: Site,
    ) -> Result<()> {
        let fault = self.fault(site);
        let wholes: Vec<_> =
            parts.list.iter().map(|part| (&part.name[..], part.dtype, &part.whole[..])).collect();
        let (head, starts, length) = header(&fault, &wholes, Some(of_step(step)))?;
        let me = self.mesh.my_rank()?;
        let temporary = beside(&self.path);
        let first = || -> Result<File> {
            let file = locked(&temporary).map_err(|error| fault.failed(error))?;
            let emptied = file.set_len(0).and_then(|()| file.write_all_at(&head, 0));
            emptied.and_then(|()| file.set_len(length)).map_err(|error| fault.error(error.to_string()))?;
            Ok(file)
        };
        let all = || -> Result<()> {
            let file = OpenOptions::new().write(true).open(&temporary);
            let file = file.map_err(|error| fault.error(error.to_string()))?;
            for (place, (tensor, part)) in tensors.iter().zip(&parts.list).enumerate() {
                if owners[place].iter().any(|(rank, own)| *rank == me && *own == part.own) {
                    write(&fault, &file, starts[place], tensor, &part.own, &Boxed::all(&part.whole))?;
                }
            }
            file.sync_all().map_err(|error| fault.error(error.to_string()))
        };
        self.check_name(site)?;
        // Rank 0 holds the lock until the file has its name.
        let lock = self.together(if me == 0 { first().map(Some) } else { Ok(None) }, site)?;
        let done = self.together(all(), site);
        let named = || fs::rename(&temporary, &self.path).and_then(|()| sync_folder(&self.path));
        let done = done.and_then(|()| {
            let named = if me == 0 { named() } else { Ok(()) };
            self.together(named.map_err(|error| fault.error(error.to_string())), site)
        });
        if done.is_err() && lock.is_some() {
            let _ = fs::remove_file(&temporary);
        }
        done
    }

    /// Fails on all ranks if the file's name belongs to something else, which a rename would replace.
    fn check_name(&self, site: Site) -> Result<()> {
        let there = fs::symlink_metadata(&self.path).ok().filter(|there| !there.is_file());
        let other = there.map(|there| match there.file_type() {
            form if form.is_dir() => "a folder",
            form if form.is_symlink() => "a symbolic link",
            _ => "a device, a pipe or a socket",
        });
        let failed = |other| self.fault(site).failed(Failure::new(("a regular file, or nothing", other)));
        self.together(other.map_or(Ok(()), |other| Err(failed(other))), site)
    }

    fn save_folder(
        &self,
        tensors: &[Tensor],
        parts: &Parts,
        owners: &Owners,
        step: u64,
        site: Site,
    ) -> Result<()> {
        let (fault, me) = (self.fault(site), self.mesh.my_rank()?);
        let failed = |error: std::io::Error| fault.error(error.to_string());
        let last = || -> Result<(Option<File>, i64)> {
            fs::create_dir_all(&self.path).map_err(failed)?;
            let lock = File::open(&self.path).map_err(failed)?;
            lock.try_lock().map_err(|error| fault.failed(lock_failure(error)))?;
            // Without a readable index nothing is lost if its files are.
            let index = fs::read(self.path.join(INDEX)).ok();
            let index: Option<Value> = index.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            Ok((Some(lock), index.and_then(|index| index["save"].as_i64()).unwrap_or(0)))
        };
        // Rank 0 holds the lock until it returns.
        let (_lock, last) = self.together(if me == 0 { last() } else { Ok((None, 0)) }, site)?;
        let save = self.mesh.world.gather("number the saves of a checkpoint", &[last], site)?[0] + 1;
        let name = |rank: usize| format!("{save}-{rank}.safetensors");
        let path = self.path.join(name(me));
        let own: Vec<usize> = (0..tensors.len())
            .filter(|place| {
                owners[*place].iter().any(|(rank, own)| *rank == me && *own == parts.list[*place].own)
            })
            .collect();
        let write_own = || -> Result<()> {
            let part = |place: &usize| {
                (&parts.list[*place].name[..], parts.list[*place].dtype, &parts.list[*place].own.shape[..])
            };
            let (head, starts, length) = header(&fault, &own.iter().map(part).collect::<Vec<_>>(), None)?;
            let file = File::create(&path).map_err(failed)?;
            file.write_all_at(&head, 0).and_then(|()| file.set_len(length)).map_err(failed)?;
            for (start, place) in starts.iter().zip(&own) {
                write(
                    &fault,
                    &file,
                    *start,
                    &tensors[*place],
                    &parts.list[*place].own,
                    &parts.list[*place].own,
                )?;
            }
            file.sync_all().map_err(failed)
        };
        let index = || -> std::io::Result<()> {
            let mut all = Map::new();
            for (part, boxes) in parts.list.iter().zip(owners) {
                let piece = |(rank, own): &(usize, Boxed)| json!({ "file": name(*rank), "start": own.start, "shape": own.shape });
                let pieces: Vec<Value> = boxes.iter().map(piece).collect();
                all.insert(part.name.clone(), json!({ "shape": part.whole, "parts": pieces }));
            }
            let (index, temporary) = (self.path.join(INDEX), beside(&self.path.join(INDEX)));
            let text = json!({ "step": step, "save": save, "tensors": all }).to_string();
            let written = File::create(&temporary)
                .and_then(|file| file.write_all_at(text.as_bytes(), 0).and_then(|()| file.sync_all()))
                .and_then(|()| fs::rename(&temporary, &index))
                .and_then(|()| sync_folder(&index));
            if written.is_err() {
                let _ = fs::remove_file(&temporary);
            }
            written
        };
        let done = self.together(write_own(), site).and_then(|()| {
            let index = if me == 0 { index() } else { Ok(()) };
            self.together(index.map_err(failed), site)
        });
        match done {
            Err(_) => drop(fs::remove_file(&path)),
            Ok(()) if me == 0 => self.remove_others(save),
            Ok(()) => {}
        }
        done
    }

    /// Removes the files of other saves, also of those that were killed.
    fn remove_others(&self, save: i64) {
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let parsed = name.to_str().and_then(|name| name.strip_suffix(".safetensors")?.split_once('-'));
            let parsed = parsed
                .and_then(|(save, rank)| Some((save.parse::<i64>().ok()?, rank.parse::<usize>().ok()?)));
            if parsed.is_some_and(|(other, rank)| other != save || rank >= self.mesh.size()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// This rank's parts, and the step.
    fn read(&self, parts: &Parts, site: Site) -> Result<(Vec<Tensor>, u64)> {
        let fault = self.fault(site);
        let (index, whole) = match self.is_folder {
            true => (self.index(site)?, None),
            false => (Value::Null, Some(Safetensors::open_at(&self.path, site)?)),
        };
        let step = match &whole {
            Some(file) => file.note("step").and_then(|step| step.parse().ok()),
            None => index["step"].as_u64(),
        };
        let step = step.ok_or_else(|| fault.error(("a checkpoint, with the number of its step", "none")))?;
        let mut files: BTreeMap<String, Safetensors> = BTreeMap::new();
        let mut tensors = Vec::new();
        for part in &parts.list {
            let Some(whole) = &whole else {
                let pieces = self.pieces(&index, part, site)?;
                for (name, _) in &pieces {
                    if !files.contains_key(name) {
                        files.insert(name.clone(), Safetensors::open_at(&self.path.join(name), site)?);
                    }
                }
                let pieces: Vec<_> = pieces.iter().map(|(name, piece)| (&files[name], piece)).collect();
                tensors.push(self.assemble(part, &pieces, step, site)?);
                continue;
            };
            whole.check_shape(&part.name, &part.whole)?;
            tensors.push(self.assemble(part, &[(whole, &Boxed::all(&part.whole))], step, site)?);
        }
        Ok((tensors, step))
    }

    fn index(&self, site: Site) -> Result<Value> {
        let fault = self.fault(site);
        let bytes =
            fs::read(self.path.join(INDEX)).map_err(|error| fault.error_of(INDEX, error.to_string()))?;
        serde_json::from_slice(&bytes).map_err(|error| fault.error_of(INDEX, error.to_string()))
    }

    /// Where the pieces of a tensor are, as the index says.
    fn pieces(&self, index: &Value, part: &Part, site: Site) -> Result<Vec<(String, Boxed)>> {
        let refuse =
            |headline: (String, String)| self.fault(site).error_of(&format!("`{}`", part.name), headline);
        let Some(entry) = index["tensors"].get(&part.name) else {
            return Err(refuse((format!("a tensor `{}`", part.name), String::new())));
        };
        let sizes = |value: &Value| -> Option<Vec<usize>> {
            let sizes = value.as_array()?.iter().map(|size| usize::try_from(size.as_u64()?).ok());
            sizes.collect::<Option<Vec<_>>>().filter(|sizes| sizes.len() == part.whole.len())
        };
        let shape = sizes(&entry["shape"]);
        if shape.as_ref() != Some(&part.whole) {
            return Err(refuse((format!("the shape {:?}", part.whole), entry["shape"].to_string())));
        }
        let piece = |value: &Value| {
            let name = value["file"].as_str().filter(|name| !name.contains('/'))?;
            let (start, shape) = (sizes(&value["start"])?, sizes(&value["shape"])?);
            let ends = start.iter().zip(&shape).map(|(start, size)| start.checked_add(*size));
            let is_inside = ends.zip(&part.whole).all(|(end, whole)| end.is_some_and(|end| end <= *whole));
            is_inside.then(|| (name.to_string(), Boxed { start, shape }))
        };
        let pieces = entry["parts"].as_array().map(|list| list.iter().map(piece).collect::<Option<Vec<_>>>());
        let pieces: Vec<(String, Boxed)> =
            pieces.flatten().ok_or_else(|| refuse(("a list of parts".into(), entry["parts"].to_string())))?;
        part.check_cover("file", &pieces).map_err(|failure| self.fault(site).failed(failure))?;
        Ok(pieces)
    }

    /// A rank's part from pieces that files have.
    fn assemble(
        &self,
        part: &Part,
        pieces: &[(&Safetensors, &Boxed)],
        step: u64,
        site: Site,
    ) -> Result<Tensor> {
        let fault = self.fault(site);
        let refuse = |headline: (String, String)| fault.error_of(&format!("`{}`", part.name), headline);
        let size = part.dtype.size();
        let tensor = Tensor::build("checkpoint", part.dtype, &part.own.shape, site, |bytes| {
            let mut read = 0;
            for (file, piece) in pieces {
                let Some(common) = piece.common(&part.own) else { continue };
                let got = file.dtype(&part.name)?;
                if got != part.dtype {
                    return Err(refuse((part.dtype.to_string(), got.to_string())));
                }
                file.check_shape(&part.name, &piece.shape)?;
                let (runs, length) = piece.runs(&part.own, &common);
                for (from, to) in runs {
                    let bytes = &mut bytes[to * size..(to + length) * size];
                    file.read_at(&part.name, (from * size) as u64, bytes, site)?;
                }
                read += common.numel();
            }
            match read == part.own.numel() {
                true => Ok(()),
                false => Err(refuse((format!("{} elements", part.own.numel()), read.to_string()))),
            }
        })?;
        let mut digest = Digest::default();
        digest.add_bytes(part.name.as_bytes());
        digest.add(step);
        digest.add_all(part.whole.iter().map(|size| *size as u64));
        Ok(tensor.with_origin(digest, part.varies))
    }

    /// The outcome of this rank, unless another one failed: then all do, with its error.
    fn together<T>(&self, outcome: Result<T>, site: Site) -> Result<T> {
        let mine = outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let all = self.mesh.world.gather_bytes("compare how a checkpoint went", mine.as_bytes(), site)?;
        let value = outcome?;
        match all.iter().position(|text| !text.is_empty()) {
            None => Ok(value),
            Some(rank) => {
                let failure = Failure::new(format!("rank {rank} failed"));
                let text = String::from_utf8_lossy(&all[rank]).into_owned();
                let failure =
                    text.lines().fold(failure, |failure, line| failure.row(line.trim().to_string()));
                Err(self.fault(site).failed(failure).blaming(&[rank]))
            }
        }
    }
}

/// The failure that ranks have another name, type or whole shape.
fn other_form(name: Option<&str>) -> Box<Failure> {
    let failure = Failure::new("names, types and whole shapes must be the same on all ranks")
        .note("what is a part of a tensor must be declared with `Parts::split`");
    match name {
        Some(name) => failure.of(format!("`{name}`")),
        None => failure,
    }
}

/// The failure that two ranks have other elements of what they both declare as theirs.
fn other_elements(name: &str, first: usize, rank: usize) -> Box<Failure> {
    let expected = format!("equal elements on ranks {first} and {rank}, which declare the same part");
    Failure::new((expected, "others"))
        .of(format!("`{name}`"))
        .note("what is a part of a tensor must be declared with `Parts::split`, what is whole must be equal on all ranks")
}

/// What the header of a file says of the step.
fn of_step(step: u64) -> BTreeMap<String, String> {
    BTreeMap::from([("step".to_string(), step.to_string())])
}

/// The name of a file while it is written.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.tmp"))
}

/// A file that no other save writes, until it is dropped.
fn locked(path: &Path) -> std::result::Result<File, Box<Failure>> {
    let failed = |error: std::io::Error| Failure::new(error.to_string());
    loop {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(failed)?;
        file.try_lock().map_err(lock_failure)?;
        // The save that held the lock before may have given this file its own name.
        let id = |data: fs::Metadata| (data.dev(), data.ino());
        let own = id(file.metadata().map_err(failed)?);
        if fs::symlink_metadata(path).ok().map(id) == Some(own) {
            return Ok(file);
        }
    }
}

fn lock_failure(error: TryLockError) -> Box<Failure> {
    match error {
        TryLockError::WouldBlock => Failure::new("another save of this checkpoint has not ended")
            .note("each job must save to a place of its own"),
        TryLockError::Error(error) => Failure::new(error.to_string()),
    }
}

/// Makes a rename in a folder last.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Writes a box of a tensor whose elements begin at `start` in a file.
fn write(
    fault: &Fault<'_>,
    file: &File,
    start: u64,
    tensor: &Tensor,
    own: &Boxed,
    whole: &Boxed,
) -> Result<()> {
    let (runs, length) = own.runs(whole, own);
    let size = tensor.dtype().size();
    let write = |bytes: &[u8]| {
        runs.iter().try_for_each(|(from, to)| {
            file.write_all_at(&bytes[from * size..(from + length) * size], start + (to * size) as u64)
        })
    };
    tensor.with_bytes(fault.op, fault.site, write)?.map_err(|error| fault.error(error.to_string()))
}
