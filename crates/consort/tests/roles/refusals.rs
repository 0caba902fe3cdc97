//! Calls of functions with roles that are refused, on 2 x 2 ranks. On threads (`tests/roles.rs`) and on processes
//! (`tests/roles_on_processes.rs`).

use std::cell::Cell;
use std::rc::Rc;

use consort::{
    Compiled, Dtype, Group, Mesh, Reduce, Result, Tensor, compile, cond, value_and_grad, while_loop,
};

use super::cases::{GPIPE, batches, first, last, weights};

/// Makes the call, on a mesh with the axes `pp` and `tp`.
type Call = fn(&Mesh, &Group, &Group) -> Result<()>;

/// A call, and what its error has on every rank.
pub(crate) type Refusal = (&'static str, Call, &'static [&'static str]);

/// How errors that name the roles begin.
pub(crate) const HEAD: &str = "compile: role `first` on ranks 0,1, role `last` on ranks 2,3: ";
const HERE: &str = "tests/roles/refusals.rs:";

pub(crate) const REFUSALS: &[Refusal] = &[
    (
        "f1_a_missing_receive",
        |mesh, pp, tp| pipeline(mesh, pp, tp, [GPIPE[0], "f0 f1 f2 b0 b1 b2"]),
        &[HEAD, "rank 0 at", "tests/roles/cases.rs:", "(J1)", "every message must be received"],
    ),
    ("f1_swapped_tags", swapped_tags, &[HEAD, "tag 7", "tag 8", "instead", HERE, "(J1)"]),
    (
        // Each stage waits for what the other sends only after it has received.
        "f1_waits_in_a_circle",
        |mesh, pp, tp| pipeline(mesh, pp, tp, ["b0 f0", "f0 b0"]),
        &[
            HEAD,
            "these ranks wait for one another, and none can go on (J3)",
            "waits for a message from rank 2 (tag 100)",
            "waits for a message from rank 0 (tag 0)",
            "tests/roles/cases.rs:",
        ],
    ),
    (
        "f1_a_role_on_some_ranks_only",
        |_, pp, tp| {
            let f = sum(tp).name("step");
            let f = if pp.my_rank()? == 0 { f.role("first") } else { f };
            f.call(one()?).map(drop)
        },
        &[
            "call 1 of `step` as role `first`",
            "call 1 of `step`   ",
            HERE,
            "a function must have a role on all ranks that call it, or on none",
        ],
    ),
    (
        "f1_ranks_of_one_role_must_have_one_program",
        one_program,
        &["its program must be the same on all ranks of role `last`", "rank 2: ", "rank 3: ", "exp", HERE],
    ),
    (
        "f1_ranks_of_one_role_must_have_one_kind_of_arguments",
        |mesh, pp, tp| {
            // The other role has other arguments, which is fine.
            let x = if pp.my_rank()? == 0 { Tensor::from_iter([1i32])? } else { one()? };
            let x = if mesh.my_rank()? == 3 { x.cast(Dtype::F32)? } else { x };
            in_role(pp, sum(tp))?.call(x).map(drop)
        },
        &[
            "the kinds of its arguments must be the same on all ranks of role `last`",
            "rank 2: f64",
            "rank 3: f32",
        ],
    ),
    (
        "f1_a_role_has_no_breaks",
        |_, pp, tp| {
            let (stage, group) = (pp.my_rank()?, tp.clone());
            let f = compile(move |x: Tensor| {
                let x = group.all_reduce(x, Reduce::Sum)?;
                if stage == 1 { x.mul(x.to_vec::<f64>()?[0]) } else { Ok(x) }
            });
            in_role(pp, f)?.call(one()?).map(drop)
        },
        &["to_vec: expected no host read of a traced tensor in role `last`", HERE],
    ),
    (
        "f1_a_role_has_no_messages_inside_a_while",
        |_, pp, tp| {
            let (stage, group) = (pp.my_rank()?, tp.clone());
            let f = compile(move |x: Tensor| {
                let x = group.all_reduce(x, Reduce::Sum)?;
                if stage == 0 {
                    return Ok(x);
                }
                while_loop(50, x, |x| x.sum_all()?.lt(100.0), |x| group.all_reduce(x, Reduce::Sum))
            });
            in_role(pp, f)?.call(one()?).map(drop)
        },
        &["while: expected no communication inside, got a loop that communicates", HERE],
    ),
    (
        "f1_a_local_function_has_no_role",
        |_, _, _| {
            let f = compile(|x: Tensor| x.neg()).name("alone").local().role("first");
            f.call(one()?).map(drop)
        },
        &["compile: expected no role of `alone`, which was declared local, got role `first`"],
    ),
    (
        // The last stage sums what differs over tp; the first takes the sum to be equal over tp, since its own part is.
        "f1_a_result_that_one_role_takes_to_be_equal_must_be_equal",
        |_, pp, _| {
            let (stage, group) = (pp.my_rank()?, pp.clone());
            let f = compile(move |x: Tensor| {
                let x = if stage == 0 { Tensor::zeros(Dtype::F64, &[1])? } else { x };
                group.all_reduce(x, Reduce::Sum)
            });
            in_role(pp, f)?.call(one()?).map(drop)
        },
        &[
            HEAD,
            "call 0 on `pp` must be the same on all its ranks (J2)",
            "rank 0: all_reduce sum f64[1]  ",
            "rank 2: all_reduce sum f64[1] -> {tp}  ",
            HERE,
        ],
    ),
    (
        "a14_a_comparison_in_one_role_only",
        |_, pp, _| {
            let stage = pp.my_rank()?;
            let f = compile(move |x: Tensor| if stage == 0 { x.neg()?.equal_over(&["pp"]) } else { x.neg() });
            in_role(pp, f)?.call(one()?).map(drop)
        },
        &[
            HEAD,
            "call 0 on `pp` must be the same on all its ranks (J2)",
            "rank 0: equal_over f64[1]  ",
            "rank 2: nothing more",
            HERE,
        ],
    ),
    (
        "a14_a_comparison_in_one_block_of_a_choice",
        |_, pp, _| {
            let chooses = compile(|(x, c): (Tensor, Tensor)| {
                cond(&c.gt(0.5)?, x, |x| x.neg()?.equal_over(&["tp"]), |x| x.exp())
            });
            let other = compile(|(x, _): (Tensor, Tensor)| x.neg());
            let f = if pp.my_rank()? == 0 { chooses.role("first") } else { other.role("last") };
            f.call((one()?, Tensor::scalar(1.0f64)?.replicated()?)).map(drop)
        },
        &[
            "cond: expected the same communication in both blocks",
            "first block: equal_over f64[1]  ",
            "second block: nothing more",
            HERE,
        ],
    ),
    (
        "f1_gradients_that_do_not_fit",
        gradients_that_do_not_fit,
        &[
            HEAD,
            "call 1 on `(pp,tp)` must be the same on all its ranks (J2)",
            "ranks 0,1: all_reduce sum f64[1]",
            "nothing more",
            HERE,
        ],
    ),
    (
        "a14_a_loss_that_differs_within_a_role",
        |_, pp, _| {
            let f = compile(|x: Tensor| value_and_grad(|x: Tensor| x.sum_all()).call(x)?.0.reshape(&[1]));
            in_role(pp, f)?.call(one()?).map(drop)
        },
        &["value_and_grad: expected a loss that is equal on all ranks, got one that differs over tp", HERE],
    ),
    (
        "c1_a_number_that_changes_is_named",
        a_number_that_changes,
        &["its program must be the same at every call", "first: ", "table(", "now: ", HERE],
    ),
    (
        "functions_of_different_names_are_not_called_together",
        |_, pp, _| match pp.my_rank()? {
            0 => compile(|x: Tensor| x.neg()).name("train").role("a").call(one()?).map(drop),
            _ => compile(|x: Tensor| x.exp()).name("eval").role("b").call(one()?).map(drop),
        },
        &["ranks must call the function of one name together", "ranks 0,1: `train`", "ranks 2,3: `eval`"],
    ),
];

/// Fails if the call is not refused, or if its error lacks a part.
pub(crate) fn check(mesh: &Mesh, (name, call, parts): Refusal) -> Result<String> {
    let (pp, tp) = (mesh.axis("pp")?, mesh.axis("tp")?);
    let error = call(mesh, &pp, &tp).expect_err(name).to_string();
    for part in parts {
        assert!(error.contains(part), "{name}, rank {}: {part}\n{error}", mesh.my_rank()?);
    }
    Ok(error)
}

fn one() -> Result<Tensor> {
    Tensor::from_iter([1.0f64])
}

fn sum(group: &Group) -> Compiled<Tensor, Tensor> {
    let group = group.clone();
    compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum))
}

/// The role of this rank's stage.
fn in_role(pp: &Group, f: Compiled<Tensor, Tensor>) -> Result<Compiled<Tensor, Tensor>> {
    Ok(f.role(if pp.my_rank()? == 0 { "first" } else { "last" }))
}

/// A pipeline whose stages run these steps.
fn pipeline(_: &Mesh, pp: &Group, tp: &Group, orders: [&'static str; 2]) -> Result<()> {
    let (stage, groups) = (pp.my_rank()?, (pp.clone(), tp.clone()));
    let w = weights(stage, tp)?;
    match stage {
        0 => first(groups, orders[0]).role("first").call((w, batches(0)?)).map(drop),
        _ => last(groups, orders[1]).role("last").call(w).map(drop),
    }
}

fn swapped_tags(_: &Mesh, pp: &Group, _: &Group) -> Result<()> {
    let (stage, group) = (pp.my_rank()?, pp.clone());
    let f = compile(move |x: Tensor| match stage {
        0 => {
            group.isend(x.neg()?, 1, 7)?.wait()?;
            Ok(x)
        }
        _ => group.irecv(Dtype::F64, &[1], 0, 8)?.add(&x),
    });
    in_role(pp, f)?.call(one()?).map(drop)
}

fn one_program(mesh: &Mesh, pp: &Group, tp: &Group) -> Result<()> {
    let (me, group) = (mesh.my_rank()?, tp.clone());
    let f = compile(move |x: Tensor| {
        let x = if me == 3 { x.exp()? } else { x.neg()? };
        group.all_reduce(x, Reduce::Sum)
    });
    in_role(pp, f)?.call(one()?).map(drop)
}

/// The sum of a gradient is communication too: here the ranks of the last stage take none.
fn gradients_that_do_not_fit(mesh: &Mesh, pp: &Group, _: &Group) -> Result<()> {
    let (stage, group) = (pp.my_rank()?, mesh.clone());
    let f = compile(move |x: Tensor| {
        let w = Tensor::ones(Dtype::F64, &[1])?;
        let group = group.clone();
        let loss = move |w: Tensor| group.all_reduce(w.mul(&x)?.sum_all()?, Reduce::Avg);
        if stage > 0 {
            return loss(w)?.reshape(&[1]);
        }
        let (loss, slope) = value_and_grad(loss).call(w)?;
        slope.add(&loss)
    });
    in_role(pp, f)?.call(one()?).map(drop)
}

fn a_number_that_changes(mesh: &Mesh, _: &Group, _: &Group) -> Result<()> {
    let (me, n, group) = (mesh.my_rank()?, mesh.size(), mesh.clone());
    let step = Rc::new(Cell::new(1));
    let by = Rc::clone(&step);
    let f = compile(move |x: Tensor| {
        let got = group.irecv(Dtype::F64, &[1], (me + n - by.get()) % n, 0)?;
        group.isend(&x, (me + by.get()) % n, 0)?.wait()?;
        Ok(got)
    });
    let x = Tensor::from_iter([me as f64])?;
    f.call(x.clone())?;
    step.set(2);
    f.call(x).map(drop)
}
