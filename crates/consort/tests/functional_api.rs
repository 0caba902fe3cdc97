//! Forms of PyTorch's functional collectives that no other test compiles: docs/from-pytorch.md names them.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Compiled, Dtype, Flatten, Mesh, Reduce, Result, Tensor, compile, spawn};

/// Runs on 1 to 3 ranks; all of them must succeed.
fn on_ranks(f: impl Fn(Mesh) -> Result<()> + Sync) {
    for n in 1..=3 {
        for (rank, outcome) in spawn(n, &f).into_iter().enumerate() {
            outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
        }
    }
}

/// Elements that differ between ranks.
fn numbers(mesh: &Mesh, shape: &[usize]) -> Result<Tensor> {
    let me = mesh.my_rank()?;
    let n = shape.iter().product::<usize>();
    Tensor::from_slice(&(0..n).map(|i| ((i * 7 + me * 3) % 11 + 1) as f32).collect::<Vec<_>>(), shape)
}

fn same(a: &[Tensor], b: &[Tensor]) -> Result<()> {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()));
        assert_eq!(a.cast(Dtype::F64)?.to_vec::<f64>()?, b.cast(Dtype::F64)?.to_vec::<f64>()?);
    }
    Ok(())
}

/// The number of starts in the only program of a function.
fn starts<A: Flatten + 'static, R: Flatten + 'static>(f: &Compiled<A, R>) -> usize {
    let explained = f.explain();
    assert_eq!((explained.stats.graphs, explained.stats.breaks), (1, 0), "{explained}");
    explained.graphs[0].program.matches("_start[").count()
}

#[test]
fn lists_are_traced() {
    on_ranks(|mesh| {
        let n = mesh.size();
        let list = || -> Result<Vec<Tensor>> {
            Ok(vec![numbers(&mesh, &[n, 2])?, numbers(&mesh, &[3, 2 * n])?.cast(Dtype::I64)?])
        };
        let group = mesh.clone();
        let gather = compile(move |list: Vec<Tensor>| group.all_gather_coalesced(&list));
        same(&gather.call(list()?)?, &mesh.all_gather_coalesced(&list()?)?)?;
        assert_eq!(starts(&gather), 1);
        let group = mesh.clone();
        let scatter =
            compile(move |list: Vec<Tensor>| group.reduce_scatter_coalesced(&list, Reduce::Sum, &[0, 1]));
        same(&scatter.call(list()?)?, &mesh.reduce_scatter_coalesced(&list()?, Reduce::Sum, &[0, 1])?)?;
        assert_eq!(starts(&scatter), 1);
        Ok(())
    });
}

#[test]
fn a_list_of_scalars_is_traced() {
    on_ranks(|mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| group.all_gather_list(x));
        let all = f.call(numbers(&mesh, &[])?)?;
        let numbers = all.iter().map(|x| x.item::<f32>()).collect::<Result<Vec<_>>>()?;
        assert_eq!(numbers, (0..mesh.size()).map(|rank| (rank * 3 + 1) as f32).collect::<Vec<_>>());
        assert_eq!(starts(&f), 1);
        Ok(())
    });
}

#[test]
fn out_parameters_are_traced() {
    on_ranks(|mesh| {
        let n = mesh.size();
        let step = move |mesh: &Mesh, x: Tensor| -> Result<Tensor> {
            let mut out = Tensor::zeros(Dtype::F32, &[2 * n, 3])?;
            mesh.all_to_all_into(&mut out, &x, None, None)?;
            mesh.all_to_all_(&mut out)?;
            out.add(&x)
        };
        let group = mesh.clone();
        let f = compile(move |x: Tensor| step(&group, x));
        let x = numbers(&mesh, &[2 * n, 3])?;
        same(&[f.call(x.clone())?], &[step(&mesh, x.clone())?])?;
        // There and back again.
        same(&[step(&mesh, x.clone())?], &[x.add(&x)?])?;
        assert_eq!(starts(&f), 2);
        Ok(())
    });
}

#[test]
fn every_reduction_is_traced() {
    use Reduce::{And, Avg, Max, Min, Or, PremulSum, Product, Sum, Xor};
    on_ranks(|mesh| {
        for reduce in [Sum, Avg, Product, Min, Max, And, Or, Xor, PremulSum(0.5)] {
            let dtype = if reduce.takes(Dtype::F32) { Dtype::F32 } else { Dtype::I64 };
            let group = mesh.clone();
            let f = compile(move |x: Tensor| group.all_reduce(x, reduce));
            let x = numbers(&mesh, &[5])?.cast(dtype)?;
            same(&[f.call(x.clone())?], &[mesh.all_reduce(&x, reduce)?])?;
            assert_eq!(starts(&f), 1);
        }
        Ok(())
    });
}
