//! The results of `consort exec`: as text, as JSON, and as `.npy` files.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use consort::npy::{self, Array, NpyDtype};
use consort_ir::literal::{Data, Literal};
use consort_ir::program::{Func, Program};
use consort_ir::types::Type;
use consort_types::Dtype;
use serde_json::{Value, json};

use crate::exec::inputs::type_text;
use crate::files;
use crate::report::Machine;

/// The longest text of a tensor's elements that is printed in one line.
const LINE: usize = 80;

/// Results of each rank.
pub(super) type Results = Vec<Vec<Literal>>;

/// One line for each group of ranks with equal results, indented.
pub(super) fn text(results: &Results) -> String {
    let mut groups: Vec<(Vec<usize>, &Vec<Literal>)> = Vec::new();
    for (rank, mine) in results.iter().enumerate() {
        let same = |other: &Vec<Literal>| {
            mine.len() == other.len() && mine.iter().zip(other).all(|(a, b)| a.same(b))
        };
        match groups.iter_mut().find(|(_, other)| same(other)) {
            Some((ranks, _)) => ranks.push(rank),
            None => groups.push((vec![rank], mine)),
        }
    }
    let mut out = String::new();
    for (ranks, results) in groups {
        let values: Vec<String> = results.iter().map(value_text).collect();
        let values = if values.is_empty() { "no results".to_string() } else { values.join(", ") };
        let _ = writeln!(out, "  {}: {values}", ranks_text(&ranks));
    }
    out
}

/// A tensor's elements; with its type if some are omitted, and one row per line if rows are long.
fn value_text(tensor: &Literal) -> String {
    let text = tensor.text();
    let ty = if text.contains("..") { type_text(tensor) + " " } else { String::new() };
    if text.len() <= LINE || !text.contains("], ") {
        return ty + &text;
    }
    let rows = text.replace("], ", "],\n     ").replace(".., [", "..,\n     [");
    format!("{}\n    {rows}", ty.trim_end())
}

/// `rank 3`, `ranks 0,1`, `ranks 0-3,6`.
fn ranks_text(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).flat_map(|run| match run {
        [first, _, .., last] => vec![format!("{first}-{last}")],
        short => short.iter().map(ToString::to_string).collect(),
    });
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, runs.collect::<Vec<_>>().join(","))
}

/// The results of each rank as JSON. If they were written to files, the file names replace the elements.
pub(super) fn to_json(results: &Results, files: Option<&[Vec<PathBuf>]>) -> Value {
    let ranks = results.iter().enumerate().map(|(rank, results)| {
        let tensors = results.iter().enumerate().map(|(i, tensor)| {
            let mut object = json!({ "dtype": tensor.dtype.name(), "shape": tensor.shape });
            match files.and_then(|files| files.get(rank)?.get(i)) {
                Some(path) => object["file"] = json!(path.display().to_string()),
                None => object["data"] = data_json(&tensor.data),
            }
            object
        });
        json!({ "rank": rank, "results": tensors.collect::<Vec<_>>() })
    });
    ranks.collect()
}

/// Elements as numbers; JSON has no NaN or infinities, so these are strings.
fn data_json(data: &Data) -> Value {
    match data {
        Data::Int(data) => json!(data),
        Data::Float(data) => {
            data.iter().map(|x| if x.is_finite() { json!(x) } else { json!(x.to_string()) }).collect()
        }
    }
}

/// The file of every result of every rank.
pub(super) fn paths(program: &Program, func: &Func, folder: &Path) -> Vec<Vec<PathBuf>> {
    let tensors =
        func.results.iter().map(|ty| if let Type::Pending(tensors) = ty { tensors.len() } else { 1 });
    let n: usize = tensors.sum();
    let of_rank = |rank| (0..n).map(|i| folder.join(format!("result{i}.rank{rank}.npy"))).collect();
    (0..program.mesh.n_ranks()).map(of_rank).collect()
}

/// Writes every result to its file. Returns a line for each file, and notes for the standard error.
pub(super) fn write(
    results: &Results,
    paths: &[Vec<PathBuf>],
    folder: &Path,
    force: bool,
) -> anyhow::Result<(String, String)> {
    files::create_folder(folder)?;
    let (mut lines, mut notes) = (String::new(), String::new());
    for (rank, (results, paths)) in results.iter().zip(paths).enumerate() {
        for (i, (tensor, path)) in results.iter().zip(paths).enumerate() {
            let stored = stored(tensor);
            let file = npy::write(&array(tensor)).map_err(|failure| Machine(failure.to_string()))?;
            files::write(path, &file, force)?;
            let _ = writeln!(lines, "{}  {}", path.display(), type_text(&stored));
            if stored.dtype != tensor.dtype && rank == 0 {
                let _ =
                    writeln!(notes, "note: result {i} is bf16, which npy lacks: written as f32, same values");
            }
        }
    }
    Ok((lines, notes))
}

/// The tensor in a type that a file can hold: bf16 becomes f32.
fn stored(tensor: &Literal) -> Cow<'_, Literal> {
    match tensor.dtype {
        Dtype::Bf16 => Cow::Owned(Literal { dtype: Dtype::F32, ..tensor.clone() }),
        _ => Cow::Borrowed(tensor),
    }
}

fn array(tensor: &Literal) -> Array {
    let tensor = stored(tensor);
    let dtype = NpyDtype::of(tensor.dtype).unwrap_or(NpyDtype::F32);
    Array { dtype, shape: tensor.shape.clone(), bytes: tensor.to_bytes() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(x: f64) -> Vec<Literal> {
        vec![Literal::floats(Dtype::F32, vec![1], vec![x])]
    }

    #[test]
    fn ranks_with_equal_results_share_a_line() {
        let results = vec![one(1.0), one(2.0), one(1.0), one(2.0), one(2.0), one(2.0), one(f64::NAN)];
        assert_eq!(text(&results), "  ranks 0,2: [1]\n  ranks 1,3-5: [2]\n  rank 6: [NaN]\n");
        assert_eq!(text(&vec![vec![], vec![]]), "  ranks 0,1: no results\n");
        let long = vec![vec![Literal::zeros(Dtype::I32, vec![2, 50]), Literal::size(7)]];
        let rows = "\n    [[0, 0, 0, .., 0, 0, 0],\n     [0, 0, 0, .., 0, 0, 0],\n     [0, 0, 0, .., 0, 0, 0],\n     ..,\n     ";
        let rows = format!("  rank 0: i32[9,50]{rows}{}]\n", ["[0, 0, 0, .., 0, 0, 0]"; 3].join(",\n     "));
        assert_eq!(text(&vec![vec![Literal::zeros(Dtype::I32, vec![9, 50])]]), rows);
        assert_eq!(text(&long), "  rank 0: i32[2,50] [[0, 0, 0, .., 0, 0, 0], [0, 0, 0, .., 0, 0, 0]], 7\n");
    }

    #[test]
    fn json_has_every_number_and_names_the_others() {
        let data = vec![0.5, -0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        assert_eq!(data_json(&Data::Float(data)).to_string(), r#"[0.5,-0.0,"NaN","inf","-inf"]"#);
        assert_eq!(data_json(&Data::Int(vec![i64::MIN, 1])).to_string(), "[-9223372036854775808,1]");
    }

    #[test]
    fn bf16_is_written_as_f32() {
        let array = array(&Literal::floats(Dtype::Bf16, vec![2], vec![1.5, -2.0]));
        assert_eq!((array.dtype, array.bytes), (NpyDtype::F32, vec![0, 0, 0xc0, 0x3f, 0, 0, 0, 0xc0]));
    }
}
