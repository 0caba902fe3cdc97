//! Checks arguments against a function, and binds its symbols.

use std::collections::BTreeMap;

use consort_types::{Axes, Failure, Rank};

use consort_ir::index::{Index, Sym};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::EvalCx;
use consort_ir::program::Func;
use consort_ir::symbols::check_symbols;
use consort_ir::types::Type;

/// The values of a rank's symbols.
pub(crate) type Symbols = BTreeMap<Sym, i64>;

/// Binds the symbols of each rank from its arguments, and checks everything that the function declares: element types,
/// shapes, ranges, guards, and equality between ranks.
pub fn bind(mesh: &Mesh, func: &Func, inputs: &[Vec<Literal>]) -> Result<Vec<Symbols>, Box<Failure>> {
    bind_all(mesh, func, inputs).map_err(|failure| failure.of(format!("@{}", func.name)))
}

fn bind_all(mesh: &Mesh, func: &Func, inputs: &[Vec<Literal>]) -> Result<Vec<Symbols>, Box<Failure>> {
    if inputs.len() != mesh.n_ranks() as usize {
        let expected = format!("inputs for {} ranks", mesh.n_ranks());
        return Err(Failure::new((expected, inputs.len().to_string())));
    }
    let params: Vec<(String, &Type)> =
        func.body.params.iter().filter_map(|param| Some((param.to_string(), func.ty(*param)?))).collect();
    for (rank, args) in (0u32..).map(Rank).zip(inputs) {
        if args.len() != params.len() {
            let headline = (format!("{} arguments", params.len()), args.len().to_string());
            return Err(Failure::new(headline).of(rank.to_string()));
        }
    }
    let mut all = Vec::new();
    for (rank, args) in (0u32..).map(Rank).zip(inputs) {
        let symbols = bind_rank(mesh, func, rank, &params, args);
        all.push(symbols.map_err(|failure| failure.of(rank.to_string()))?);
    }
    for (i, (name, ty)) in params.iter().enumerate() {
        let values: Vec<&Literal> = inputs.iter().map(|args| &args[i]).collect();
        check_placement(mesh, ty, &values)
            .map_err(|error| Failure::new(error).of(format!("argument {name}")))?;
    }
    let declared = func.declarations();
    for sym in func.bound_symbols() {
        let values: Vec<Literal> =
            all.iter().filter_map(|s| s.get(&sym)).map(|value| Literal::size(*value)).collect();
        let index = Index::sym(sym);
        let name = index.display(mesh).to_string();
        let ty = Type::Size(index, declared.get(&sym).map_or(Axes::NONE, |facts| facts.varies));
        check_placement(mesh, &ty, &values.iter().collect::<Vec<_>>())
            .map_err(|error| Failure::new(error).of(name))?;
    }
    Ok(all)
}

fn bind_rank(
    mesh: &Mesh,
    func: &Func,
    rank: Rank,
    params: &[(String, &Type)],
    args: &[Literal],
) -> Result<Symbols, Box<Failure>> {
    let mut symbols = Symbols::new();
    let differs = |name: &str, expected: String, arg: &Literal| {
        let got = format!("{}{:?}", arg.dtype, arg.shape).replace(' ', "");
        Failure::new((expected, got)).of(format!("argument {name}"))
    };
    for ((name, ty), arg) in params.iter().zip(args) {
        let sizes: Vec<(&Index, i64)> = match ty {
            Type::Tensor(tensor) => {
                if arg.dtype != tensor.dtype || arg.shape.len() != tensor.shape.len() {
                    return Err(differs(name, tensor.display(mesh).to_string(), arg));
                }
                tensor.shape.iter().zip(&arg.shape).map(|(size, got)| (size, *got as i64)).collect()
            }
            Type::Size(index, _) => match arg.as_size() {
                Some(value) => vec![(index, value)],
                None => return Err(differs(name, "an integer".to_string(), arg)),
            },
            Type::Pending(_) => {
                let message = "the oracle takes no pending arguments; start it in the program";
                return Err(Failure::new(message).of(format!("argument {name}")));
            }
        };
        for (size, value) in sizes {
            if let Some(sym @ Sym::Backed(_)) = size.as_sym() {
                match symbols.insert(sym, value) {
                    Some(before) if before != value => {
                        let sym = size.display(mesh).to_string();
                        let message = format!("{sym} is {before} in an earlier argument and {value} here");
                        return Err(Failure::new(message).of(format!("argument {name}")));
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
                .map_err(|error| Failure::new(error.headline))?;
            if !expected.iter().eq(arg.shape.iter().map(|size| *size as i64).collect::<Vec<_>>().iter()) {
                return Err(differs(name, tensor.display(mesh).to_string(), arg));
            }
        }
    }
    check_symbols(mesh, rank, func, &symbols).map_err(Failure::new)?;
    Ok(symbols)
}

/// Checks that values are equal on all ranks on which their type says so.
pub fn check_placement(mesh: &Mesh, ty: &Type, values: &[&Literal]) -> Result<(), String> {
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
