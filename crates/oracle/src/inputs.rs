//! Checks arguments against a function, and binds its symbols.

use std::collections::BTreeMap;

use consort_types::{Axes, Rank};

use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_ir::ops::EvalCx;
use consort_ir::program::Func;
use consort_ir::symbols::check_symbols;
use consort_ir::tensor::Tensor;
use consort_ir::types::Type;

/// The values of a rank's symbols.
pub(crate) type Symbols = BTreeMap<Sym, i64>;

/// Binds the symbols of each rank from its arguments, and checks everything that the function declares: element types,
/// shapes, ranges, guards, and equality between ranks.
pub fn bind(mesh: &Mesh, func: &Func, inputs: &[Vec<Tensor>]) -> Result<Vec<Symbols>, String> {
    if inputs.len() != mesh.n_ranks() as usize {
        return Err(format!(
            "@{}: expected inputs for {} ranks, got {}",
            func.name,
            mesh.n_ranks(),
            inputs.len()
        ));
    }
    let params: Vec<(String, &Type)> =
        func.body.params.iter().filter_map(|param| Some((param.to_string(), func.ty(*param)?))).collect();
    for (rank, args) in (0u32..).map(Rank).zip(inputs) {
        if args.len() != params.len() {
            return Err(format!(
                "@{}: {rank}: expected {} arguments, got {}",
                func.name,
                params.len(),
                args.len()
            ));
        }
    }
    let mut all = Vec::new();
    for (rank, args) in (0u32..).map(Rank).zip(inputs) {
        let symbols =
            bind_rank(mesh, func, rank, &params, args).map_err(|e| format!("@{}: {rank}: {e}", func.name))?;
        all.push(symbols);
    }
    for (i, (name, ty)) in params.iter().enumerate() {
        let values: Vec<&Tensor> = inputs.iter().map(|args| &args[i]).collect();
        check_placement(mesh, ty, &values)
            .map_err(|error| format!("@{}: argument {name}: {error}", func.name))?;
    }
    let declared = func.declarations();
    for sym in func.bound_symbols() {
        let values: Vec<Tensor> =
            all.iter().filter_map(|s| s.get(&sym)).map(|value| Tensor::size(*value)).collect();
        let index = Index::sym(sym);
        let name = index.display(mesh).to_string();
        let ty = Type::Size(index, declared.get(&sym).map_or(Axes::NONE, |facts| facts.varies));
        check_placement(mesh, &ty, &values.iter().collect::<Vec<_>>())
            .map_err(|error| format!("@{}: {name}: {error}", func.name))?;
    }
    Ok(all)
}

fn bind_rank(
    mesh: &Mesh,
    func: &Func,
    rank: Rank,
    params: &[(String, &Type)],
    args: &[Tensor],
) -> Result<Symbols, String> {
    let mut symbols = Symbols::new();
    let got = |arg: &Tensor| format!("{}{:?}", arg.dtype, arg.shape).replace(' ', "");
    for ((name, ty), arg) in params.iter().zip(args) {
        let sizes: Vec<(&Index, i64)> = match ty {
            Type::Tensor(tensor) => {
                if arg.dtype != tensor.dtype || arg.shape.len() != tensor.shape.len() {
                    return Err(format!(
                        "argument {name}: expected {}, got {}",
                        tensor.display(mesh),
                        got(arg)
                    ));
                }
                tensor.shape.iter().zip(&arg.shape).map(|(size, got)| (size, *got as i64)).collect()
            }
            Type::Size(index, _) => match arg.as_size() {
                Some(value) => vec![(index, value)],
                None => return Err(format!("argument {name}: expected an integer, got {}", got(arg))),
            },
            Type::Pending(_) => {
                return Err(format!(
                    "argument {name}: the oracle takes no pending arguments; start it in the program"
                ));
            }
        };
        for (size, value) in sizes {
            if let Some(sym @ Sym::Backed(_)) = size.as_sym() {
                match symbols.insert(sym, value) {
                    Some(before) if before != value => {
                        let sym = size.display(mesh).to_string();
                        return Err(format!(
                            "argument {name}: {sym} is {before} in an earlier argument and {value} here"
                        ));
                    }
                    _ => {}
                }
            }
        }
    }
    let cx = EvalCx { mesh, rank, symbols: &symbols };
    for ((name, ty), arg) in params.iter().zip(args) {
        if let Type::Tensor(tensor) = ty {
            let expected = tensor
                .shape
                .iter()
                .map(|size| cx.index(size))
                .collect::<Result<Vec<_>, _>>()
                .map_err(|e| e.0)?;
            if !expected.iter().eq(arg.shape.iter().map(|size| *size as i64).collect::<Vec<_>>().iter()) {
                return Err(format!("argument {name}: expected {}, got {}", tensor.display(mesh), got(arg)));
            }
        }
    }
    check_symbols(mesh, rank, func, &symbols)?;
    Ok(symbols)
}

/// Checks that values are equal on all ranks on which their type says so.
pub fn check_placement(mesh: &Mesh, ty: &Type, values: &[&Tensor]) -> Result<(), String> {
    let mut first: BTreeMap<Vec<u32>, usize> = BTreeMap::new();
    for (rank, value) in values.iter().enumerate() {
        let place = ty.varies().iter().map(|axis| mesh.coordinate(Rank(rank as u32), axis)).collect();
        let other = *first.entry(place).or_insert(rank);
        if !values[other].same(value) {
            let text = ty.display(mesh).to_string();
            return Err(format!(
                "{text} is declared equal on ranks {other} and {rank}, but their values differ"
            ));
        }
    }
    Ok(())
}
