//! Whether the facets of an op agree with each other and with the types that it infers. Planner, kernels and groups rely
//! on it, and users' ops may be wrong: then it is an error of the op, before anything runs.

use consort_types::{Collective, Failure, Headline, Kind};

use crate::index::{Facts, Index};
use crate::mesh::Mesh;
use crate::ops::{Alias, Effects, Flow, OpDef, count};
use crate::types::{TensorType, Type};

/// Checks the facets of an op whose results have these types.
pub(crate) fn check_facets(
    op: &dyn OpDef,
    mesh: &Mesh,
    args: &[Type],
    results: &[Type],
    facts: &Facts,
) -> Result<(), Box<Failure>> {
    if op.flow() != Flow::Straight {
        return Ok(());
    }
    let collective = op.collective();
    let over = collective.as_ref().map(|collective| collective.over);
    require(op.effects().starts() == over, || {
        "its effects and its collective must name the same group, or none".into()
    })?;
    if let Some(collective) = collective {
        require(op.alias() == Alias::None && !op.joins(), || {
            "a start must have no alias and no boxes".into()
        })?;
        return check_start(&collective, mesh, args, results, facts);
    }
    if op.effects() == Effects::Wait {
        return require(args.first().is_some_and(Type::is_pending), || {
            "expected a pending to wait for".into()
        });
    }
    let is_pending = results.iter().any(Type::is_pending);
    require(!is_pending, || ("a collective, because it returns a pending", "none").into())?;
    check_storage(op, args, results)
}

/// Checks the types where results may share storage with operands, or consist of their elements.
fn check_storage(op: &dyn OpDef, args: &[Type], results: &[Type]) -> Result<(), Box<Failure>> {
    let (alias, joins) = (op.alias(), op.joins());
    if alias == Alias::None && !joins {
        return Ok(());
    }
    let (first, result) = (args.first().and_then(Type::as_tensor), results.first().and_then(Type::as_tensor));
    let (Some(first), Some(result)) = (first, result) else {
        return Err(Failure::new("an op with an alias or boxes must have an operand and a result"));
    };
    require(alias == Alias::View || results.len() == 1, || {
        ("one result, because of its alias or its boxes", results.len().to_string()).into()
    })?;
    let mut moved = match (alias, joins) {
        (Alias::View, _) => results.iter(),
        (_, true) => args.iter(),
        _ => return Ok(()),
    };
    let same = |ty: &Type| ty.as_tensor().is_some_and(|ty| ty.dtype == first.dtype);
    require(moved.all(same) && result.dtype == first.dtype, || {
        "a view or a join must have one element type in its operands and its results".into()
    })
}

/// Checks that a start returns what its collective gives.
fn check_start(
    collective: &Collective<'_, Index>,
    mesh: &Mesh,
    args: &[Type],
    results: &[Type],
    facts: &Facts,
) -> Result<(), Box<Failure>> {
    let [Type::Pending(got)] = results else {
        return Err(Failure::new(("one pending as the result of a start", types_text(results, mesh))));
    };
    let Some(operands) = args.iter().map(Type::as_tensor).collect::<Option<Vec<_>>>() else {
        return Err(Failure::new(("tensors as the operands of a start", types_text(args, mesh))));
    };
    let kind = collective.kind;
    let n = match kind {
        Kind::Barrier => 0,
        Kind::Exchange => collective.sends.len() + collective.receives.len(),
        _ => operands.len(),
    };
    require(operands.len() == n, || {
        (format!("{} of {}", count(n, "operand"), kind.name()), operands.len().to_string()).into()
    })?;
    // Messages only fill the operands that they receive.
    let given = &operands[collective.sends.len().min(operands.len())..];
    require(given.len() == got.len(), || {
        (format!("{} of {}", count(given.len(), "result"), kind.name()), got.len().to_string()).into()
    })?;
    let strict = keeps_shapes(kind);
    for (i, (x, got)) in given.iter().zip(got).enumerate() {
        let wanted = result_shape(collective, mesh, x, i);
        let fits = |(want, got): (&Option<Index>, &Index)| match want {
            Some(want) if strict => want == got || facts.eq(want, got) == Some(true),
            Some(want) => facts.eq(want, got) != Some(false),
            None => true,
        };
        let same = got.dtype == x.dtype && got.shape.len() == wanted.len();
        require(same && wanted.iter().zip(&got.shape).all(fits), || {
            let size = |size: &Option<Index>| size.as_ref().map(|size| size.display(mesh).to_string());
            let sizes: Vec<String> = wanted.iter().map(|want| size(want).unwrap_or("_".into())).collect();
            let expected = format!("{}[{}] as result {i} of {}", x.dtype, sizes.join(","), kind.name());
            (expected, got.display(mesh).to_string()).into()
        })?;
        if let (Kind::ReduceScatter | Kind::Scatter, Some(size)) = (kind, x.shape.get(dim(collective, i))) {
            let n = members(collective, mesh);
            require(facts.eq(&size.rem(&n), &Index::constant(0)) != Some(false), || {
                let expected = format!("a size that is divisible by {} members", n.display(mesh));
                (expected, size.display(mesh).to_string()).into()
            })?;
        }
    }
    require(strict || mesh.covers(collective.over), || {
        format!("expected a group with every rank in it for {}", kind.name()).into()
    })
}

/// Whether results have the shapes of operands, so that they may overwrite them or be passed through.
fn keeps_shapes(kind: Kind) -> bool {
    match kind {
        Kind::AllReduce | Kind::Broadcast | Kind::Reduce | Kind::Permute => true,
        Kind::Barrier | Kind::Exchange => true,
        Kind::AllGather | Kind::Gather | Kind::AllGatherV | Kind::AllToAll => false,
        Kind::ReduceScatter | Kind::Scatter | Kind::ReduceScatterV => false,
    }
}

fn members(collective: &Collective<'_, Index>, mesh: &Mesh) -> Index {
    Index::from(i64::from(mesh.group_size(collective.over)))
}

/// The dimension along which an operand is split or joined.
fn dim(collective: &Collective<'_, Index>, operand: usize) -> usize {
    collective.dims.get(operand).copied().unwrap_or(0)
}

/// The sizes of a result of a collective; `None` for one that differs between members.
fn result_shape(
    collective: &Collective<'_, Index>,
    mesh: &Mesh,
    x: &TensorType,
    i: usize,
) -> Vec<Option<Index>> {
    let n = members(collective, mesh);
    let mut shape: Vec<Option<Index>> = x.shape.iter().cloned().map(Some).collect();
    let gathers = matches!(collective.kind, Kind::AllGather | Kind::Gather | Kind::AllGatherV);
    if gathers && shape.is_empty() {
        // A 0-d tensor gets one dimension.
        return vec![Some(n)];
    }
    let Some(size) = shape.get_mut(dim(collective, i)) else { return shape };
    *size = match (collective.kind, size.take()) {
        (Kind::AllGather | Kind::Gather, Some(size)) => Some(&size * &n),
        (Kind::ReduceScatter | Kind::Scatter, Some(size)) => Some(size.div(&n)),
        (Kind::AllGatherV, _) => Some(Index::sum(collective.sizes)),
        (Kind::ReduceScatterV, _) => None,
        (Kind::AllToAll, size) => collective.splits.map_or(size, |(_, outs)| Some(Index::sum(outs))),
        (_, size) => size,
    };
    shape
}

fn types_text(types: &[Type], mesh: &Mesh) -> String {
    match types {
        [] => "none".to_string(),
        _ => types.iter().map(|ty| ty.display(mesh).to_string()).collect::<Vec<_>>().join(", "),
    }
}

fn require(holds: bool, otherwise: impl FnOnce() -> Headline) -> Result<(), Box<Failure>> {
    if holds { Ok(()) } else { Err(Failure::new(otherwise())) }
}
