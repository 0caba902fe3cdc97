//! Cases of forms of collectives, on any number of ranks: threads and processes.

use consort::{Dtype, Group, Mesh, Missing, Place, Reduce, Result, Route, Tensor, compile};

use super::table::{Form, element, forms, wanted};

/// A case and its name.
type Case = (&'static str, fn(Mesh) -> Result<()>);

/// All of them.
pub(crate) const CASES: &[Case] = &[
    (
        "a15_shapes_types_and_placements_are_those_of_real_runs",
        a15_shapes_types_and_placements_are_those_of_real_runs,
    ),
    (
        "a12_every_form_is_the_plain_loop_with_and_without_a_handle_and_compiled",
        a12_every_form_is_the_plain_loop_with_and_without_a_handle_and_compiled,
    ),
    (
        "a12_large_tensors_are_gathered_and_scattered_with_at_most_one_copy",
        a12_large_tensors_are_gathered_and_scattered_with_at_most_one_copy,
    ),
    (
        "a12_a_list_of_tensors_and_slices_is_reduced_in_place",
        a12_a_list_of_tensors_and_slices_is_reduced_in_place,
    ),
    ("a12_lists_of_different_shapes_are_exchanged", a12_lists_of_different_shapes_are_exchanged),
    (
        "a2_an_empty_list_gives_an_empty_list_without_communication",
        a2_an_empty_list_gives_an_empty_list_without_communication,
    ),
    (
        "a2_a_list_of_all_element_types_is_one_communication",
        a2_a_list_of_all_element_types_is_one_communication,
    ),
    (
        "a15_uneven_sizes_and_other_reductions_over_axes_and_lists",
        a15_uneven_sizes_and_other_reductions_over_axes_and_lists,
    ),
];

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

pub(crate) fn a15_shapes_types_and_placements_are_those_of_real_runs(mesh: Mesh) -> Result<()> {
    let mesh = &mesh;
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
}

pub(crate) fn a12_every_form_is_the_plain_loop_with_and_without_a_handle_and_compiled(
    mesh: Mesh,
) -> Result<()> {
    let mesh = &mesh;
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
}

pub(crate) fn a12_large_tensors_are_gathered_and_scattered_with_at_most_one_copy(mesh: Mesh) -> Result<()> {
    let mesh = &mesh;
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
}

/// A list of a tensor and of rows of another is reduced where it is; the rest of the other is kept, and a clone too.
fn a12_a_list_of_tensors_and_slices_is_reduced_in_place(mesh: Mesh) -> Result<()> {
    let (n, me) = (mesh.size(), me(&mesh));
    let number = |member: usize, i: usize| (100 * member + i) as i64;
    let tensor = |len: usize| Tensor::from_iter((0..len).map(|i| number(me, i)));
    let (mut x, mut y) = (tensor(3)?, tensor(8)?);
    let before = mesh.copied_bytes();
    mesh.all_reduce_coalesced_([Place::into_slice(&mut x), y.narrow_mut(0, 2usize, 4usize)?], Reduce::Sum)?;
    assert_eq!(mesh.in_flight(), 1);
    let sum = |i: usize| (0..n).map(|member| number(member, i)).sum();
    let want = |i: usize| if (2..6).contains(&i) { sum(i) } else { number(me, i) };
    let (sums, mixed): (Vec<i64>, Vec<i64>) = ((0..3).map(sum).collect(), (0..8).map(want).collect());
    assert_eq!((x.to_vec::<i64>()?, y.to_vec::<i64>()?), (sums.clone(), mixed.clone()));
    assert_eq!(mesh.copied_bytes(), before);
    let kept = (x.clone(), y.clone());
    mesh.all_reduce_coalesced_([&mut x, &mut y], Reduce::Max)?;
    assert_eq!((kept.0.to_vec::<i64>()?, kept.1.to_vec::<i64>()?), (sums, mixed));
    Ok(())
}

pub(crate) fn a12_lists_of_different_shapes_are_exchanged(mesh: Mesh) -> Result<()> {
    let mesh = &mesh;
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
}

pub(crate) fn a2_an_empty_list_gives_an_empty_list_without_communication(mesh: Mesh) -> Result<()> {
    let mesh = &mesh;
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
}

/// Elements that every element type has.
fn small(member: usize, i: usize) -> i64 {
    ((member + i) % 3) as i64
}

pub(crate) fn a2_a_list_of_all_element_types_is_one_communication(mesh: Mesh) -> Result<()> {
    let mesh = &mesh;
    // All together in a slot's staging area; and more than fits there, in parts that are not cut at tensors.
    for sizes in [[3usize; 8], [1001, 7, 3000, 1, 513, 0, 77, 4099]] {
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
        let parts: Vec<Vec<f64>> =
            sums.iter().map(|sums| sums[me * sums.len() / n..(me + 1) * sums.len() / n].to_vec()).collect();
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
    }
    Ok(())
}

/// Shapes without data are those of real runs, over an axis and over a list: uneven sizes, and reductions of floats.
pub(crate) fn a15_uneven_sizes_and_other_reductions_over_axes_and_lists(mesh: Mesh) -> Result<()> {
    let mesh = &mesh;
    let n = mesh.size();
    let bare = Mesh::of_shapes(&[("world", n)], me(mesh))?;
    let reversed: Vec<usize> = (0..n).rev().collect();
    let groups = |mesh: &Mesh| Ok([mesh.axis("world")?, mesh.lists("reversed", &[&reversed])?]);
    let floats = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16];
    for (group, shapes) in groups(mesh)?.into_iter().zip(groups(&bare)?) {
        let (size, own) = (group.size(), group.my_rank()?);
        let parts: Vec<usize> = (0..size).map(|member| (member + 1) % 3).collect();
        let whole: usize = parts.iter().sum();
        let (out, into): (Vec<usize>, Vec<usize>) =
            ((0..size).map(|to| (own + to) % 3).collect(), (0..size).map(|from| (from + own) % 3).collect());
        let splits = (out.iter().sum::<usize>(), out, into);
        for (dtype, reduce) in floats.into_iter().flat_map(|dtype| {
            [Reduce::Avg, Reduce::PremulSum(0.5), Reduce::Max].map(|reduce| (dtype, reduce))
        }) {
            let calls = |group: &Group, make: &dyn Fn(&[usize]) -> Result<Tensor>| -> Result<Vec<Tensor>> {
                let (sent, out, into) = &splits;
                Ok(vec![
                    group.all_reduce(make(&[2, 3])?, reduce)?,
                    group.reduce(make(&[2, 3])?, reduce, size - 1)?,
                    group.reduce_scatter(make(&[2 * size, 3])?, reduce, 0)?,
                    group.all_gather_v(make(&[2, parts[own]])?, 1, &parts)?,
                    group.reduce_scatter_v(make(&[whole, 2])?, reduce, 0, &parts)?,
                    group.all_to_all(make(&[*sent, 2])?, Some(into), Some(out))?,
                ])
            };
            let real = calls(&group, &|shape| Tensor::ones(dtype, shape)?.may_differ())?;
            let shaped = calls(&shapes, &|shape| Tensor::of_shape(dtype, shape).may_differ())?;
            let describe = |x: &Tensor| (x.dtype(), x.shape().to_vec(), x.varies());
            let (real_types, shaped_types): (Vec<_>, Vec<_>) =
                (real.iter().map(describe).collect(), shaped.iter().map(describe).collect());
            assert_eq!(shaped_types, real_types, "{reduce:?} of {dtype} on {size} of {n} ranks");
            let wanted = [
                vec![2, 3],
                vec![2, 3],
                vec![2, 3],
                vec![2, whole],
                vec![parts[own], 2],
                vec![splits.2.iter().sum(), 2],
            ];
            assert_eq!(real_types.into_iter().map(|(_, shape, _)| shape).collect::<Vec<_>>(), wanted);
        }
    }
    Ok(())
}
