//! Every form of every collective: with a handle, compiled, on shapes alone, and against plain loops.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "forms/table.rs"]
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use consort::{Dtype, Mesh, Missing, Reduce, Result, Route, Tensor, compile, spawn};
use table::{Form, element, forms, wanted};

const RANKS: [usize; 4] = [1, 2, 3, 4];

/// Runs on 1 to 4 ranks; all of them must succeed.
fn on_ranks(f: impl Fn(&Mesh) -> Result<()> + Sync) {
    for n in RANKS {
        for (rank, outcome) in spawn(n, |mesh| f(&mesh)).into_iter().enumerate() {
            outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}"));
        }
    }
}

fn me(mesh: &Mesh) -> usize {
    mesh.my_rank().unwrap()
}

fn arguments(form: &Form, mesh: &Mesh, dtype: Dtype) -> Result<Vec<Tensor>> {
    let tensor = |(arg, shape): (usize, Vec<usize>)| {
        let numel = shape.iter().product::<usize>();
        let elements: Vec<i64> = (0..numel).map(|i| element(me(mesh), arg, i)).collect();
        Tensor::from_slice(&elements, &shape)?.cast(dtype)
    };
    (form.shapes)(mesh.size()).into_iter().enumerate().map(tensor).collect()
}

fn elements(list: &[Tensor]) -> Result<Vec<Vec<f64>>> {
    list.iter().map(|x| x.cast(Dtype::F64)?.to_vec::<f64>()).collect()
}

/// The public methods of `Group` in the files of collectives, those that a macro declares included.
#[test]
fn every_method_has_a_row() {
    let mut methods = BTreeSet::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap().flatten() {
        // `mesh.rs` has the methods that do not communicate.
        if entry.file_name() == "mesh.rs" || !entry.file_type().unwrap().is_file() {
            continue;
        }
        let mut of = "";
        let text = fs::read_to_string(entry.path()).unwrap();
        for line in text.lines() {
            match line {
                "impl Group {" => of = "group",
                "collectives! {" => of = "macro",
                "}" => of = "",
                _ => {}
            }
            let name = match of {
                "group" => line.strip_prefix("    pub fn "),
                "macro" => line.strip_prefix("    ").filter(|line| line.starts_with(char::is_lowercase)),
                _ => None,
            };
            let word = |text: &str| {
                text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
            };
            methods.extend(name.map(word));
        }
    }
    let rows: BTreeSet<String> = forms().iter().map(|form| form.name.to_string()).collect();
    assert_eq!(rows, methods);
    assert!(methods.contains("all_reduce") && methods.contains("isend"));
}

#[test]
fn a15_shapes_types_and_placements_are_those_of_real_runs() {
    on_ranks(|mesh| {
        let shapes = Mesh::of_shapes(&[("world", mesh.size())], me(mesh))?;
        for form in forms() {
            for (dtype, varies) in Dtype::ALL.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
                // What came by another route may differ between ranks.
                let sent = |mesh: &Mesh, x: &Tensor| match varies {
                    true => mesh.permute(x, Route::Ring(1), Missing::Error),
                    false => Ok(x.clone()),
                };
                let (mut args, mut bare) = (Vec::new(), Vec::new());
                for shape in (form.shapes)(mesh.size()) {
                    args.push(sent(mesh, &Tensor::ones(dtype, &shape)?.replicated()?)?);
                    bare.push(sent(&shapes, &Tensor::of_shape(dtype, &shape))?);
                }
                let (real, shaped) = ((form.call)(mesh, args)?, (form.call)(&shapes, bare)?);
                let describe = |x: &Tensor| (x.dtype(), x.shape().to_vec(), x.varies());
                let (real_types, shaped_types): (Vec<_>, Vec<_>) =
                    (real.iter().map(describe).collect(), shaped.iter().map(describe).collect());
                assert_eq!(shaped_types, real_types, "{} of {dtype} on {} ranks", form.name, mesh.size());
                assert!(
                    shaped.iter().all(|x| !x.has_data()) && real.iter().all(Tensor::has_data),
                    "{}",
                    form.name
                );
            }
        }
        Ok(())
    });
}

#[test]
fn a12_every_form_is_the_plain_loop_with_and_without_a_handle_and_compiled() {
    on_ranks(|mesh| {
        let n = mesh.size();
        for form in forms() {
            let what = format!("{} on rank {} of {n}", form.name, me(mesh));
            let args = || arguments(&form, mesh, Dtype::I64);
            let want: Vec<Vec<f64>> = wanted(form.name, me(mesh), n)
                .into_iter()
                .map(|list| list.into_iter().map(|x| x as f64).collect())
                .collect();
            let before = args()?;
            assert_eq!(elements(&(form.call)(mesh, before.clone())?)?, want, "{what}");
            assert_eq!(elements(&before)?, elements(&args()?)?, "{what}: a shared operand changed");
            let pending = mesh.pending(|| (form.call)(mesh, args()?))?;
            while !pending.test()? {}
            assert_eq!(elements(&pending.wait()?)?, want, "{what}, with a handle");
            let group = mesh.clone();
            let call = form.call;
            let compiled = compile(move |args: Vec<Tensor>| call(&group, args));
            for _ in 0..2 {
                assert_eq!(elements(&compiled.call(args()?)?)?, want, "{what}, compiled");
            }
            let pending = mesh.pending(|| compiled.call(args()?))?;
            assert_eq!(elements(&pending.wait()?)?, want, "{what}, compiled, and its call with a handle");
            let stats = compiled.stats();
            assert_eq!((stats.graphs, stats.breaks), (1, 0), "{what}");
            let group = mesh.clone();
            let handled = compile(move |args: Vec<Tensor>| group.pending(|| call(&group, args))?.wait());
            assert_eq!(elements(&handled.call(args()?)?)?, want, "{what}, compiled with a handle");
        }
        Ok(())
    });
}

#[test]
fn a12_large_tensors_are_gathered_and_scattered_with_at_most_one_copy() {
    on_ranks(|mesh| {
        let (n, me, part) = (mesh.size(), me(mesh), 30_001);
        let number = |member: usize, i: usize| ((member * 7 + i) % 1000) as i64;
        let tensor = || Tensor::from_iter((0..n * part).map(|i| number(me, i)));
        let root = n / 2;
        let mut x = tensor()?;
        let before = mesh.copied_bytes();
        mesh.gather_(&mut x, 0, root)?;
        assert_eq!(mesh.copied_bytes(), before);
        let want = |i: usize| if me == root { number(i / part, i) } else { 0 };
        assert_eq!(x.to_vec::<i64>()?, (0..n * part).map(want).collect::<Vec<_>>());
        let mut x = tensor()?;
        let before = mesh.copied_bytes();
        mesh.scatter_(&mut x, 0, root)?;
        // All of it where peers still read the old elements, and the own part.
        assert!(mesh.copied_bytes() - before <= ((n + 1) * part * 8) as u64);
        let want = |i: usize| number(if i / part == me { root } else { me }, i);
        assert_eq!(x.to_vec::<i64>()?, (0..n * part).map(want).collect::<Vec<_>>());
        // Another owner sees nothing of it.
        let kept = x.clone();
        let values = x.to_vec::<i64>()?;
        mesh.scatter_(&mut x, 0, 0)?;
        mesh.gather_(&mut x, 0, 0)?;
        assert_eq!(kept.to_vec::<i64>()?, values);
        Ok(())
    });
}

#[test]
fn a12_lists_of_different_shapes_are_exchanged() {
    on_ranks(|mesh| {
        let (n, me) = (mesh.size(), me(mesh));
        // From each to each another shape; some are empty.
        let shape = |from: usize, to: usize| [from, to + 1];
        let number = |from: usize, to: usize, i: usize| (100 * from + 10 * to + i) as f32;
        let tensor = |from: usize, to: usize| {
            let numbers: Vec<f32> = (0..from * (to + 1)).map(|i| number(from, to, i)).collect();
            Tensor::from_slice(&numbers, &shape(from, to))
        };
        let sent = (0..n).map(|to| tensor(me, to)).collect::<Result<Vec<_>>>()?;
        let mut got =
            (0..n).map(|from| Tensor::zeros(Dtype::F32, &shape(from, me))).collect::<Result<Vec<_>>>()?;
        mesh.all_to_all_list_into(&mut got, &sent)?;
        for (from, got) in got.iter().enumerate() {
            assert_eq!(got.shape(), shape(from, me));
            assert_eq!(
                got.to_vec::<f32>()?,
                (0..from * (me + 1)).map(|i| number(from, me, i)).collect::<Vec<_>>()
            );
        }
        Ok(())
    });
}

/// Elements that every element type has.
fn small(member: usize, i: usize) -> i64 {
    ((member + i) % 3) as i64
}

#[test]
fn a2_a_list_of_all_element_types_is_one_communication() {
    // All together in a slot's staging area; and more than fits there, in parts that are not cut at tensors.
    for sizes in [[3usize; 8], [1001, 7, 3000, 1, 513, 0, 77, 4099]] {
        on_ranks(|mesh| {
            let (n, me) = (mesh.size(), me(mesh));
            // Smaller elements first, which a group takes last.
            let types = || Dtype::ALL.into_iter().rev().zip(sizes);
            let list = || -> Result<Vec<Tensor>> {
                let one = |(dtype, size): (Dtype, usize)| {
                    Tensor::from_iter((0..size * n).map(|i| small(me, i)))?.cast(dtype)
                };
                types().map(one).collect()
            };
            let sum = |dtype: Dtype, i: usize| {
                let sum: i64 = (0..n).map(|member| small(member, i)).sum();
                if dtype == Dtype::Bool { f64::from(u8::from(sum > 0)) } else { sum as f64 }
            };
            let sums: Vec<Vec<f64>> =
                types().map(|(dtype, size)| (0..size * n).map(|i| sum(dtype, i)).collect()).collect();
            let parts: Vec<Vec<f64>> = sums
                .iter()
                .map(|sums| sums[me * sums.len() / n..(me + 1) * sums.len() / n].to_vec())
                .collect();
            let mut in_place = list()?;
            assert_eq!(mesh.in_flight(), 0);
            let reduced = mesh.all_reduce_coalesced(list()?, Reduce::Sum)?;
            assert_eq!(mesh.in_flight(), 1);
            mesh.all_reduce_coalesced_(&mut in_place, Reduce::Sum)?;
            let scattered = mesh.reduce_scatter_coalesced(&list()?, Reduce::Sum, &[0; 8])?;
            assert_eq!(mesh.in_flight(), 3);
            assert_eq!(elements(&reduced)?, sums);
            assert_eq!(elements(&in_place)?, sums);
            assert_eq!(elements(&scattered)?, parts);
            let group = mesh.clone();
            let compiled = compile(move |list: Vec<Tensor>| {
                let scattered = group.reduce_scatter_coalesced(&list, Reduce::Sum, &[0; 8])?;
                Ok((group.all_reduce_coalesced(list, Reduce::Sum)?, scattered))
            });
            let (reduced, scattered) = compiled.call(list()?)?;
            assert_eq!((elements(&reduced)?, elements(&scattered)?), (sums, parts));
            assert_eq!(compiled.explain().graphs[0].program.matches("_start[").count(), 2);
            Ok(())
        });
    }
}

#[test]
fn a2_an_empty_list_gives_an_empty_list_without_communication() {
    on_ranks(|mesh| {
        // One rank alone makes the calls: nobody is waited for.
        if me(mesh) == 0 {
            assert!(mesh.all_reduce_coalesced(Vec::new(), Reduce::Sum)?.is_empty());
            mesh.all_reduce_coalesced_(&mut [], Reduce::Sum)?;
            assert!(mesh.all_gather_coalesced(&[])?.is_empty());
            mesh.all_gather_coalesced_(&mut [])?;
            mesh.reduce_scatter_coalesced_(&mut [], Reduce::Sum, &[])?;
            assert!(mesh.reduce_scatter_coalesced(&[], Reduce::Sum, &[])?.is_empty());
            assert!(mesh.batch(Vec::new())?.test()?);
        }
        let group = mesh.clone();
        let compiled = compile(move |list: Vec<Tensor>| group.all_reduce_coalesced(list, Reduce::Sum));
        assert!(compiled.call(Vec::new())?.is_empty());
        Ok(())
    });
}

#[test]
fn a11_a_handle_is_complete_when_all_that_it_started_is() {
    let outcomes = spawn(2, |mesh| {
        if me(&mesh) == 1 {
            mesh.irecv(Dtype::I64, &[1], 0, 0)?.wait()?;
            return mesh.barrier();
        }
        let outer = mesh.pending(|| mesh.pending(|| mesh.barrier()))?;
        // The other has not called it yet, and does so only after a message.
        assert!(!outer.test()?);
        mesh.isend(Tensor::from_slice(&[1i64], &[1])?, 1, 0)?.wait()?;
        let inner = outer.wait()?;
        assert!(inner.test()?);
        assert_eq!(mesh.in_flight(), 0);
        inner.wait()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a12_lists_that_do_not_fit_are_refused_before_anything_is_sent() {
    let outcomes = spawn(2, |mesh| {
        let x = |size: usize| Tensor::ones(Dtype::F32, &[size]);
        let half = x(2)?.cast(Dtype::Bf16)?;
        let mut out = vec![x(2)?, x(3)?];
        let above = line!();
        let errors = [
            mesh.reduce_scatter_list(&[x(2)?], Reduce::Sum).map(drop),
            mesh.scatter_list(&[x(2)?, x(3)?], 0).map(drop),
            mesh.all_to_all_list(&[x(2)?, half.clone()]).map(drop),
            mesh.all_gather_list_into(&mut out, x(2)?),
            mesh.all_gather_list_into(&mut out[..1], x(2)?),
            mesh.all_to_all_list_into(&mut out, &[x(2)?, half]),
            mesh.reduce_scatter_coalesced(&[x(2)?], Reduce::Sum, &[0, 0]).map(drop),
            mesh.scatter_list(&[x(1)?, x(1)?], 2).map(drop),
            mesh.gather_(&mut out[1], 0, 0),
        ];
        let below = line!();
        let errors = errors.map(|error| error.unwrap_err());
        for error in &errors {
            let site = error.site();
            assert!(site.file() == file!() && (above..below).contains(&site.line()), "{error}");
        }
        let texts = errors.map(|error| error.to_string());
        let first: Vec<&str> = texts.iter().map(|text| text.lines().next().unwrap()).collect();
        assert_eq!(
            first,
            [
                "reduce_scatter_list: expected a tensor for each of 2 members, got 1",
                "scatter_list: expected tensors of one shape and type, got f32[2] and f32[3]",
                "all_to_all_list: expected tensors of one shape and type, got f32[2] and bf16[2]",
                "all_gather_list_into: expected f32[2], got f32[3]",
                "all_gather_list_into: expected a tensor for each of 2 members, got 1",
                "all_to_all_list_into: expected tensors of one element type, got f32 and bf16",
                "reduce_scatter_coalesced: expected a dimension for each of 1 tensors, got 2",
                "scatter_list: expected a root below 2, the size of the group, got 2 (C3)",
                "gather_: expected dimension 0 to be shared out evenly among 2 members, got 3 places",
            ]
        );
        // The group is usable.
        assert_eq!(mesh.all_reduce(x(1)?, Reduce::Sum)?.item::<f32>()?, 2.0);
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
