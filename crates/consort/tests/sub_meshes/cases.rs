//! Compiled functions of sub-meshes, on a mesh of 2 x 2 ranks: as threads, as processes, and over MPI.

use consort::{Compiled, Dtype, Group, Mesh, Reduce, Result, Steady, Tensor, compile, grad, value_and_grad};

/// A case by name, on a mesh with the axes `pp` and `tp`, of size 2.
pub(crate) type Case = (&'static str, fn(Mesh) -> Result<()>);

/// Cases after which the ranks can be used for the next case.
pub(crate) const CASES: [Case; 5] = [
    ("d2_each_sub_mesh_has_a_program_of_its_own", d2_each_sub_mesh_has_a_program_of_its_own),
    (
        "d2_overlapping_sub_meshes_follow_the_order_of_their_common_ranks",
        d2_overlapping_sub_meshes_follow_the_order_of_their_common_ranks,
    ),
    (
        "d2_what_is_declared_equal_is_compared_within_the_sub_mesh",
        d2_what_is_declared_equal_is_compared_within_the_sub_mesh,
    ),
    ("a14_a_loss_of_a_sub_mesh_is_equal_on_its_ranks", a14_a_loss_of_a_sub_mesh_is_equal_on_its_ranks),
    (
        "d3_ranks_of_a_sub_mesh_may_meet_at_every_nth_call_only",
        d3_ranks_of_a_sub_mesh_may_meet_at_every_nth_call_only,
    ),
];

/// Those that end in an error.
pub(crate) const REFUSED: [Case; 6] = [
    (
        "d2_a_start_outside_the_sub_mesh_is_an_error_of_the_trace",
        d2_a_start_outside_the_sub_mesh_is_an_error_of_the_trace,
    ),
    (
        "d2_who_differs_is_named_among_the_ranks_of_the_sub_mesh",
        d2_who_differs_is_named_among_the_ranks_of_the_sub_mesh,
    ),
    (IN_ANOTHER_ORDER, d2_overlapping_sub_meshes_in_another_order_are_an_error_on_every_rank),
    (
        "a14_a_loss_that_differs_on_the_ranks_of_a_sub_mesh_is_refused",
        a14_a_loss_that_differs_on_the_ranks_of_a_sub_mesh_is_refused,
    ),
    (
        "d3_a_call_between_meetings_of_a_sub_mesh_that_needs_one_is_an_error",
        d3_a_call_between_meetings_of_a_sub_mesh_that_needs_one_is_an_error,
    ),
    (
        "d3_ranks_of_a_sub_mesh_that_meet_differently_often_are_refused_with_both_numbers",
        d3_ranks_of_a_sub_mesh_that_meet_differently_often_are_refused_with_both_numbers,
    ),
];

/// The case in which calls of two sub-meshes wait for each other.
pub(crate) const IN_ANOTHER_ORDER: &str =
    "d2_overlapping_sub_meshes_in_another_order_are_an_error_on_every_rank";

const HERE: &str = "tests/sub_meshes/cases.rs:";

pub(crate) fn place(group: &Group) -> Result<usize> {
    group.my_rank()
}

pub(crate) fn sum_over(group: &Group) -> Compiled<Tensor, Tensor> {
    let own = group.clone();
    compile(move |x: Tensor| own.all_reduce(x.neg()?, Reduce::Sum)).over(group)
}

/// That the order differs was found by comparison and not by the deadline; the errors name the calls of two ranks at least,
/// with a line of this file.
pub(crate) fn is_found(error: &str, file: &str) {
    let found = ["must be the same on all ranks", ": deadlock: no rank can go on"];
    assert!(found.iter().any(|found| error.contains(found)), "{error}");
    let rows = error.lines().filter(|line| line.starts_with("  ") && line.trim_start().starts_with("rank "));
    assert!(rows.count() >= 2, "{error}");
    assert!(error.contains(file), "{error}");
}

fn d2_each_sub_mesh_has_a_program_of_its_own(mesh: Mesh) -> Result<()> {
    let (stage, tp) = (place(&mesh.axis("pp")?)?, mesh.axis("tp")?);
    let group = tp.clone();
    let f = compile(move |x: Tensor| match stage {
        0 => group.all_reduce(x, Reduce::Sum),
        _ => group.all_gather(x.neg()?, 0),
    });
    let f = f.over(&tp);
    // Sizes may differ between sub-meshes too.
    let got = f.call(Tensor::from_iter((0..2 + stage).map(|i| i as f32))?)?.to_vec::<f32>()?;
    let wanted = [vec![0.0, 2.0], vec![0.0, -1.0, -2.0, 0.0, -1.0, -2.0]];
    assert_eq!(got, wanted[stage]);
    f.expect_steady(Steady::graphs(1))
}

fn d2_a_start_outside_the_sub_mesh_is_an_error_of_the_trace(mesh: Mesh) -> Result<()> {
    let (pp, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
    let (wide, other) = (mesh.clone(), pp);
    let f = compile(move |x: Tensor| wide.all_reduce(x, Reduce::Sum)).over(&tp).name("wide");
    let g = compile(move |x: Tensor| other.all_reduce(x, Reduce::Sum)).over(&tp).name("other");
    for (f, name, over) in [(f, "wide", "(pp,tp)"), (g, "other", "pp")] {
        let error = f.call(Tensor::from_iter([1.0f32])?).unwrap_err().to_string();
        let wanted = format!(
            "expected communication among the ranks of `tp`, which call `{name}`, got some over `{over}`"
        );
        assert!(error.contains(&wanted) && error.contains(HERE), "{error}");
    }
    Ok(())
}

fn d2_who_differs_is_named_among_the_ranks_of_the_sub_mesh(mesh: Mesh) -> Result<()> {
    // Rank 3 traces another program than rank 2; ranks 0 and 1 are not concerned.
    let (tp, me) = (mesh.axis("tp")?, place(&mesh)?);
    let group = tp.clone();
    let f = compile(move |x: Tensor| {
        let x = if me == 3 { x.exp()? } else { x.neg()? };
        group.all_reduce(x, Reduce::Sum)
    });
    let outcome = f.over(&tp).name("step").call(Tensor::from_iter([1.0f64])?);
    if me < 2 {
        assert_eq!(outcome?.to_vec::<f64>()?, [-2.0]);
        return Ok(());
    }
    let error = outcome.unwrap_err().to_string();
    let wanted = "compile: `step`: its program must be the same on all ranks of `tp`";
    assert!(error.starts_with(wanted), "{error}");
    assert!(error.contains("rank 2: ") && error.contains("rank 3: "), "{error}");
    Ok(())
}

fn d2_overlapping_sub_meshes_follow_the_order_of_their_common_ranks(mesh: Mesh) -> Result<()> {
    let (rows, columns) = (sum_over(&mesh.axis("tp")?), sum_over(&mesh.axis("pp")?));
    let mut x = Tensor::from_iter([1.0f64])?;
    for _ in 0..5 {
        x = columns.call(rows.call(x)?)?;
    }
    assert_eq!(x.to_vec::<f64>()?, [1024.0]);
    Ok(())
}

/// One rank calls them in the other order: every rank gets an error, and none waits for ever.
fn d2_overlapping_sub_meshes_in_another_order_are_an_error_on_every_rank(mesh: Mesh) -> Result<()> {
    let (rows, columns) = (sum_over(&mesh.axis("tp")?), sum_over(&mesh.axis("pp")?));
    let [first, second] = if place(&mesh)? == 3 { [columns, rows] } else { [rows, columns] };
    let outcome = first.call(Tensor::from_iter([1.0f64])?).and_then(|x| second.call(x));
    is_found(&outcome.and_then(|x| x.to_vec::<f64>()).unwrap_err().to_string(), HERE);
    Ok(())
}

fn d2_what_is_declared_equal_is_compared_within_the_sub_mesh(mesh: Mesh) -> Result<()> {
    // Equal within tp, and another tensor in each stage.
    let stage = place(&mesh.axis("pp")?)? as f64;
    let x = Tensor::full(Dtype::F64, &[1], stage)?.equal_over(&["tp"])?;
    assert_eq!(sum_over(&mesh.axis("tp")?).call(x)?.to_vec::<f64>()?, [-2.0 * stage]);
    Ok(())
}

fn a14_a_loss_of_a_sub_mesh_is_equal_on_its_ranks(mesh: Mesh) -> Result<()> {
    // Each stage takes the gradient of its own loss: w x in the first, w w x in the last, averaged over its ranks.
    let (stage, tp) = (place(&mesh.axis("pp")?)?, mesh.axis("tp")?);
    let group = tp.clone();
    let f = value_and_grad(move |(w, x): (Tensor, Tensor)| {
        let y = if stage == 0 { w.mul(&x)? } else { w.mul(&w)?.mul(&x)? };
        group.all_reduce(y.sum_all()?, Reduce::Avg)
    });
    let w = Tensor::from_iter([3.0f64])?.equal_over(&["tp"])?;
    let x = Tensor::from_iter([1.0 + 4.0 * place(&tp)? as f64])?;
    let (loss, (of_w, of_x)) = f.over(&tp).call((w, x))?;
    let got = (loss.item::<f64>()?, of_w.to_vec::<f64>()?[0], of_x.to_vec::<f64>()?[0]);
    // The mean of the data is 3.
    assert_eq!(got, [(9.0, 3.0, 1.5), (27.0, 18.0, 4.5)][stage]);
    Ok(())
}

fn a14_a_loss_that_differs_on_the_ranks_of_a_sub_mesh_is_refused(mesh: Mesh) -> Result<()> {
    let f = grad(|x: Tensor| x.sum_all()).over(&mesh.axis("tp")?);
    let outcome = f.call(Tensor::from_iter([1.0f64])?).and_then(|slope| slope.to_vec::<f64>());
    let error = outcome.unwrap_err().to_string();
    let wanted = "grad: expected a loss that is equal on all ranks, got one that differs over tp";
    assert!(error.contains(wanted), "{error}");
    Ok(())
}

/// Calls a function of `tp` with numbers of these sizes, whose ranks meet at every fourth call.
fn meeting_at_every_fourth(mesh: &Mesh, sizes: &[usize]) -> Result<Vec<f64>> {
    let (stage, tp) = (place(&mesh.axis("pp")?)?, mesh.axis("tp")?);
    let group = tp.clone();
    let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).over(&tp).lockstep(4).name("step");
    let mut last = Vec::new();
    for (i, n) in sizes.iter().enumerate() {
        let x = Tensor::from_iter((0..*n).map(|k| (i * k + stage) as f64))?;
        last = f.call(x)?.to_vec::<f64>()?;
    }
    Ok(last)
}

/// The sizes change at a call at which the ranks meet, which compiles.
fn d3_ranks_of_a_sub_mesh_may_meet_at_every_nth_call_only(mesh: Mesh) -> Result<()> {
    let stage = place(&mesh.axis("pp")?)? as f64;
    let last = meeting_at_every_fourth(&mesh, &[2, 2, 2, 2, 3, 3, 3, 3])?;
    assert_eq!(last, [0.0, 14.0, 28.0].map(|sum| sum + 2.0 * stage));
    Ok(())
}

/// And then at one at which they do not: in the second stage only, and the first is not affected.
fn d3_a_call_between_meetings_of_a_sub_mesh_that_needs_one_is_an_error(mesh: Mesh) -> Result<()> {
    if place(&mesh.axis("pp")?)? == 0 {
        assert_eq!(meeting_at_every_fourth(&mesh, &[2; 8])?, [0.0, 14.0]);
        return Ok(());
    }
    let error = meeting_at_every_fourth(&mesh, &[2, 2, 3, 2, 2, 2, 2, 2]).unwrap_err().to_string();
    let parts = [
        "`step`: expected a call for which it was compiled, got another, call 3",
        HERE,
        "dimension 0 of tensor 0 of the arguments: expected 2, got 3",
        "note: with `lockstep(4)` its ranks meet at calls 1, 5, 9, .., and can compile only there",
    ];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    Ok(())
}

fn d3_ranks_of_a_sub_mesh_that_meet_differently_often_are_refused_with_both_numbers(
    mesh: Mesh,
) -> Result<()> {
    let (me, tp) = (place(&mesh)?, mesh.axis("tp")?);
    let (group, every) = (tp.clone(), if me == 3 { 3 } else { 4 });
    let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
    let f = f.over(&tp).lockstep(every).name("step");
    let outcome = f.call(Tensor::from_iter([1.0f64])?).and_then(|y| y.to_vec::<f64>());
    if me < 2 {
        assert_eq!(outcome?, [2.0]);
        return Ok(());
    }
    let error = outcome.unwrap_err().to_string();
    let wanted = "compile: `step`: its ranks must compare their calls equally often\n  at ";
    assert!(error.starts_with(wanted) && error.contains(HERE), "{error}");
    assert!(error.contains("\n  rank 2: `lockstep(4)`\n  rank 3: `lockstep(3)`\n  note: "), "{error}");
    Ok(())
}
