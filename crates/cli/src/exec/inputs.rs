//! The arguments of `consort exec`: what each `--input` names, read and compared with the function.
//!
//! A file is `.npy`, or `FILE.safetensors:NAME`; `{rank}` in it is replaced by the rank. Elements are not converted:
//! a file of another element type than the parameter's is refused.

use std::path::Path;

use anyhow::{Context, anyhow, bail};
use consort::npy;
use consort_ir::limits::{Excess, Resource};
use consort_ir::literal::{Literal, MAX_ELEMENTS};
use consort_ir::mesh::Mesh;
use consort_ir::program::{Func, Program};
use consort_ir::types::{Type, shape_text};
use consort_types::Dtype;
use safetensors::{Dtype as FileDtype, SafeTensors};

use super::rank::raises;
use crate::files;
use crate::report::{count, wrong};

/// The placeholder for the rank in the name of a file.
const RANK: &str = "{rank}";
/// Separates a file's name from the name of a tensor in it.
const IN_SAFETENSORS: &str = ".safetensors:";
/// How many names of tensors an error lists.
const LISTED: usize = 8;

/// The arguments of every rank, from one pattern for each parameter. Their total is at most `most` bytes.
pub(super) fn read(
    program: &Program,
    func: &Func,
    patterns: &[String],
    most: u64,
) -> anyhow::Result<Vec<Vec<Literal>>> {
    let params = &func.body.params;
    if params.len() != patterns.len() {
        let failure = wrong(format!("@{}", func.name), count(params.len(), "input"), patterns.len());
        bail!(failure.note(signature(program, func)));
    }
    let n = program.mesh.n_ranks() as usize;
    let (mut by_rank, mut taken) = (vec![Vec::new(); n], 0u64);
    for (param, pattern) in params.iter().zip(patterns) {
        let Some(ty) = func.ty(*param) else { continue };
        let mut room = |bytes: u64| {
            taken = taken.saturating_add(bytes);
            Excess::check(Resource::Bytes, most, taken)
                .map_err(|excess| anyhow!("{excess}{}", raises(Resource::Bytes)))
        };
        let values = argument(&program.mesh, ty, pattern, &mut room)
            .with_context(|| format!("@{}: {param}", func.name))?;
        for (rank, args) in by_rank.iter_mut().enumerate() {
            // One file without a rank in its name is used for all ranks.
            args.extend(values.get(rank).or(values.first()).cloned());
        }
    }
    Ok(by_rank)
}

/// The parameters of a function in the syntax of programs, for a note.
pub(super) fn signature(program: &Program, func: &Func) -> String {
    let params: Vec<String> = func
        .body
        .params
        .iter()
        .filter_map(|param| Some(format!("{param}: {}", func.ty(*param)?.display(&program.mesh))))
        .collect();
    if params.is_empty() {
        return format!("@{} has no parameters", func.name);
    }
    format!("give one --input for each parameter of @{}({})", func.name, params.join(", "))
}

/// The values of one parameter: one for each rank, or one for all.
fn argument(
    mesh: &Mesh,
    ty: &Type,
    pattern: &str,
    room: &mut dyn FnMut(u64) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Literal>> {
    let expected = match ty {
        Type::Tensor(_) => ty.display(mesh).to_string(),
        Type::Size(..) => format!("an integer or a file of i64[] for {}", ty.display(mesh)),
        Type::Pending(_) => {
            bail!("a pending cannot be read from a file\n  note: start the communication inside the program")
        }
    };
    if let (Type::Size(..), Ok(value)) = (ty, pattern.parse()) {
        return Ok(vec![Literal::size(value)]);
    }
    let files = if pattern.contains(RANK) { mesh.n_ranks() } else { 1 };
    let value = |rank: u32| {
        let place = pattern.replace(RANK, &rank.to_string());
        // Nothing is read of a file that is too large.
        let size = std::fs::metadata(file_of(&place)).map_or(0, |file| file.len());
        room(size).with_context(|| place.clone())?;
        let value = tensor(&place)?;
        // Each rank has a tensor of its own.
        room(8 * value.numel() as u64 * u64::from(mesh.n_ranks() / files)).with_context(|| place.clone())?;
        if !fits(ty, &value) {
            let note = note(ty, &value, &place);
            let failure = wrong(place, expected.clone(), type_text(&value));
            bail!(note.into_iter().fold(failure, |failure, note| failure.note(note)));
        }
        Ok(value)
    };
    (0..files).map(value).collect()
}

/// Whether a value may be an argument of the type, as far as one rank's file can tell. Sizes with symbols are checked
/// when all arguments are known.
fn fits(ty: &Type, value: &Literal) -> bool {
    let Type::Tensor(tensor) = ty else { return value.dtype == Dtype::I64 && value.shape.is_empty() };
    let sizes = tensor.shape.iter().zip(&value.shape);
    value.dtype == tensor.dtype
        && value.shape.len() == tensor.shape.len()
        && sizes.into_iter().all(|(size, got)| size.as_const().is_none_or(|size| size == *got as i64))
}

/// A note on how to fix a wrong element type.
fn note(ty: &Type, value: &Literal, place: &str) -> Option<String> {
    let Type::Tensor(tensor) = ty else { return None };
    match (tensor.dtype, place.contains(IN_SAFETENSORS)) {
        (dtype, _) if dtype == value.dtype => None,
        (Dtype::Bf16, false) => {
            Some("npy has no bf16: give a BF16 tensor as FILE.safetensors:NAME".to_string())
        }
        (dtype, _) => {
            let (dtype, got) = (numpy_name(dtype), value.dtype);
            Some(format!("save it as {dtype}, or declare the parameter as {got} and cast it in the program"))
        }
    }
}

fn numpy_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 | Dtype::Bf16 => "float32",
        Dtype::F64 => "float64",
        Dtype::F16 => "float16",
        Dtype::I32 => "int32",
        Dtype::I64 => "int64",
        Dtype::U8 => "uint8",
        Dtype::Bool => "bool",
    }
}

/// The type of a tensor: `f32[2,3]`.
pub(super) fn type_text(tensor: &Literal) -> String {
    let shape: Vec<_> = tensor.shape.iter().map(|size| (*size as i64).into()).collect();
    format!("{}{}", tensor.dtype, shape_text(&shape, &Mesh::default()))
}

/// The file of a pattern with its rank filled in.
fn file_of(place: &str) -> &str {
    match place.split_once(IN_SAFETENSORS) {
        Some((stem, _)) => &place[..stem.len() + IN_SAFETENSORS.len() - 1],
        None => place,
    }
}

/// Reads the tensor that a pattern, with its rank filled in, names.
fn tensor(place: &str) -> anyhow::Result<Literal> {
    let file = file_of(place);
    let bytes = files::read(Path::new(file), files::MAX_ARRAYS)?;
    let tensor = if file.ends_with(IN_SAFETENSORS.trim_end_matches(':')) {
        from_safetensors(&bytes, place[file.len()..].strip_prefix(':'))
    } else {
        from_npy(&bytes).map_err(|error| anyhow!(error))
    };
    tensor.with_context(|| file.to_string())
}

fn from_npy(bytes: &[u8]) -> Result<Literal, String> {
    let array = npy::read(bytes).map_err(|failure| failure.to_string())?;
    Literal::from_bytes(array.dtype.dtype(), array.shape, &array.bytes).ok_or_else(too_large)
}

fn from_safetensors(bytes: &[u8], name: Option<&str>) -> anyhow::Result<Literal> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| anyhow!("safetensors: {error}"))?;
    let Some(name) = name else {
        bail!(
            wrong("", "the name of a tensor after a colon", "none").note(format!("it has {}", names(&file)))
        );
    };
    let Ok(view) = file.tensor(name) else {
        bail!("no tensor `{name}`\n  note: it has {}", names(&file));
    };
    let dtype = match view.dtype() {
        FileDtype::F32 => Dtype::F32,
        FileDtype::F64 => Dtype::F64,
        FileDtype::F16 => Dtype::F16,
        FileDtype::BF16 => Dtype::Bf16,
        FileDtype::I32 => Dtype::I32,
        FileDtype::I64 => Dtype::I64,
        FileDtype::U8 => Dtype::U8,
        FileDtype::BOOL => Dtype::Bool,
        other => bail!(wrong(format!("`{name}`"), "F32, F64, F16, BF16, I32, I64, U8 or BOOL", other)),
    };
    Literal::from_bytes(dtype, view.shape().to_vec(), view.data()).ok_or_else(|| anyhow!(too_large()))
}

/// The names of a file's tensors, sorted: the format keeps no order.
fn names(file: &SafeTensors<'_>) -> String {
    let mut names = file.names();
    names.sort_unstable();
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    let rest = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{rest}", if names.is_empty() { "no tensors".to_string() } else { names.join(", ") })
}

fn too_large() -> String {
    wrong("", format!("at most {MAX_ELEMENTS} elements"), "more").to_string()
}
