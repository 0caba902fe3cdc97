//! What `explain` says: why a function was compiled again, with the line and the condition, and what a call copies.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Flatten, Index, Init, Iterations, Mesh, Reduce, Result, Steady, Tensor};
use consort::{compile, cond, scan, while_loop};

const SOURCE: &str = include_str!("explain.rs");

/// The line that ends with this comment, as errors name it.
fn line(mark: &str) -> String {
    let mark = format!("// {mark}");
    let at = SOURCE.lines().position(|line| line.ends_with(&mark)).unwrap();
    format!("crates/consort/tests/explain.rs:{}", at + 1)
}

fn alone() -> Mesh {
    consort::init().unwrap()
}

/// On ranks that are threads; all must succeed.
fn on(n: usize, f: impl Fn(Mesh) -> Result<()> + Sync) {
    consort::spawn(n, f).into_iter().for_each(|done| done.unwrap());
}

fn ones(shape: &[usize]) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, shape)
}

/// The recompilations of an explanation.
fn reasons<A: Flatten + 'static, R: Flatten + 'static>(f: &consort::Compiled<A, R>) -> Vec<String> {
    f.explain().recompiles.iter().map(ToString::to_string).collect()
}

#[test]
fn d4_a_recompile_names_the_argument_the_dimension_and_the_call() {
    let _mesh = alone();
    let f = compile(|(x, n, rate, y): (Tensor, Index, f64, Tensor)| {
        x.add(&Tensor::index(n)?.cast(Dtype::F32)?)?.mul(rate)?.add(&y.sum_all()?.cast(Dtype::F32)?)
    });
    f.call((ones(&[2, 3]).unwrap(), 3.into(), 0.5, ones(&[4]).unwrap())).unwrap();
    f.call((ones(&[2, 5]).unwrap(), 3.into(), 0.5, ones(&[4]).unwrap())).unwrap(); // other size
    f.call((ones(&[2, 5]).unwrap(), 4.into(), 0.5, ones(&[4]).unwrap())).unwrap(); // other number
    f.call((ones(&[2, 5]).unwrap(), 4.into(), 0.25, ones(&[4]).unwrap())).unwrap(); // other setting
    let doubles = Tensor::ones(Dtype::F64, &[4]).unwrap();
    f.call((ones(&[2, 5]).unwrap(), 4.into(), 0.25, doubles)).unwrap(); // other type
    f.call((ones(&[5]).unwrap(), 4.into(), 0.5, ones(&[4]).unwrap())).unwrap(); // several
    let at = |mark: &str| format!("\n  at {}", line(mark));
    assert_eq!(
        reasons(&f),
        [
            format!("dimension 1 of tensor 0 of the arguments: expected 3, got 5{}", at("other size")),
            format!(
                "number 0 of the arguments: expected 3, got 4{}\n  compared with graph 1, the nearest of 2",
                at("other number")
            ),
            format!(
                "setting 0 of the arguments: expected 0.5, got 0.25{}\n  compared with graph 2, the nearest of 3\n  \
                 note: a 0-d tensor in its place may change without a compilation",
                at("other setting")
            ),
            format!(
                "element type of tensor 1 of the arguments: expected f32, got f64{}\n  compared with graph 3, the \
                 nearest of 4",
                at("other type")
            ),
            // Of the last one three conditions fail, of the one before the other setting a single one.
            format!(
                "shape of tensor 0 of the arguments: expected 2 dimensions, got 1 dimension{}\n  compared with graph \
                 2, the nearest of 5",
                at("several")
            ),
        ]
    );
}

#[derive(Flatten)]
struct Step {
    x: Tensor,
    rate: f64,
}

#[test]
fn d4_explain_names_settings_and_the_graph_and_the_plans_that_are_kept() {
    let _mesh = alone();
    let f = compile(|(step, power): (Step, i32)| step.x.mul(step.rate)?.mul(f64::from(power))).name("f");
    let call = |n: usize, rate: f64| {
        let x = ones(&[n]).unwrap();
        f.call((Step { x, rate }, 2)).unwrap();
    };
    [2, 3, 4, 3].into_iter().for_each(|n| call(n, 1.0));
    call(3, 2.0);
    assert!(
        reasons(&f)[1].starts_with("setting `rate` of the arguments: expected 1.0, got 2.0\n"),
        "{}",
        f.explain()
    );
    f.call((Step { x: ones(&[3]).unwrap(), rate: 2.0 }, 3)).unwrap();
    // This setting is in no field.
    assert!(reasons(&f)[2].starts_with("setting 1 of the arguments: expected 2, got 3\n"), "{}", f.explain());
    call(3, 1.0);
    let explained = f.explain();
    assert_eq!((explained.graphs.len(), explained.last), (4, Some(1)));
    let plans = ["s0 = 3, v0 donated", "s0 = 4, v0 donated"];
    assert_eq!(explained.graphs[1].plans, plans, "{explained}");
    // The plan that ran last is shown, and it is not the one that was made last.
    let shown = "    plans: for s0 = 4, v0 donated; below, which ran last: for s0 = 3, v0 donated\n";
    let text = explained.to_string();
    assert!(text.contains(shown) && text.contains("\n  graph 1, which ran last: "), "{text}");
    assert!(explained.graphs[1].plan.as_ref().unwrap().contains("s0 = 3"), "{text}");
}

#[test]
fn d4_explain_names_the_role() {
    on(2, |mesh| {
        let (me, group) = (mesh.my_rank()?, mesh.clone());
        let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).name("f");
        let f = f.role(["first", "last"][me]);
        f.call(ones(&[2])?)?.wait()?;
        let head = format!("f as role `{}`: 1 call, 1 graph,", ["first", "last"][me]);
        assert!(f.explain().to_string().starts_with(&head), "{}", f.explain());
        Ok(())
    });
}

#[test]
fn d4_a_failed_condition_names_the_line_that_recorded_it() {
    let _mesh = alone();
    let f = compile(|x: Tensor| {
        // Both branches are the function's own: which one is taken is a condition on a size.
        if x.dim(0)? < 6 { x.neg() } else { x.exp() } // the branch
    })
    .dynamic(0, 0);
    let call = |n: usize| f.call(ones(&[n])?)?.to_vec::<f32>(); // the call
    for n in [3, 4, 5, 6, 7] {
        let one = if n < 6 { -1.0 } else { 1f32.exp() };
        let got = call(n).unwrap();
        assert!(got.len() == n && got.iter().all(|x| (x - one).abs() < 1e-6), "{got:?}");
    }
    let (branch, called) = (line("the branch"), line("the call"));
    let wanted = format!(
        "condition on sizes: expected `s0+1 <= 6`, got s0 = 6\n  at {branch}\n  called at {called}\n  note: s0 is \
         dimension 0 of tensor 0 of the arguments: 6"
    );
    assert_eq!(reasons(&f), [wanted]);
    let graphs = f.explain().graphs;
    assert_eq!(graphs.len(), 2);
    assert_eq!(graphs[0].guards, [format!("s0+1 <= 6 at {branch}")]);
    assert!(
        f.explain().to_string().contains(&format!("    guard: s0+1 <= 6 at {branch}\n")),
        "{}",
        f.explain()
    );
}

#[test]
fn d4_a_condition_that_an_op_records_names_the_op_s_line() {
    let _mesh = alone();
    let f = compile(|x: Tensor| {
        let half = x.dim(0)? / 2;
        x.reshape(&[half, Index::from(2)]) // the reshape
    })
    .dynamic(0, 0);
    f.call(ones(&[8]).unwrap()).unwrap();
    assert_eq!(f.explain().graphs[0].guards, [format!("s0 == 2*(s0/2) at {}", line("the reshape"))]);
    // There is no other program for an odd size.
    assert!(f.call(ones(&[7]).unwrap()).is_err());
}

#[test]
fn d4_a_recompile_for_another_rank_names_its_argument() {
    on(2, |mesh| {
        let (me, group) = (mesh.my_rank()?, mesh.clone());
        let f = compile(move |x: Tensor| group.all_reduce(x.sum_all()?, Reduce::Sum));
        for round in 0..3 {
            let n = if me == 1 && round > 0 { 5 } else { 3 };
            let expected = if round > 0 { 8.0 } else { 6.0 };
            assert_eq!(f.call(ones(&[n])?)?.item::<f32>()?, expected);
        }
        let wanted = match me {
            0 => "it fits the arguments of this rank, and not those of others\n  at ",
            _ => "dimension 0 of tensor 0 of the arguments: expected 3, got 5\n  at ",
        };
        let [reason] = &reasons(&f)[..] else { panic!("{}", f.explain()) };
        assert!(reason.starts_with(wanted), "{reason}");
        let row = "\n  rank 1: dimension 0 of tensor 0 of the arguments: expected 3, got 5";
        assert_eq!(reason.ends_with(row), me == 0, "{reason}");
        Ok(())
    });
}

#[test]
fn d4_a_placement_that_changed_is_named() {
    let done = Init::new().axes(&[("dp", 2), ("tp", 1)]).spawn(2, |mesh| {
        let dp = mesh.axis("dp")?;
        let f = compile(move |x: Tensor| dp.all_reduce(x, Reduce::Sum));
        let x = || Tensor::from_iter([1.0f32]);
        f.call(x()?)?;
        f.call(x()?.replicated()?)?;
        let [reason] = &reasons(&f)[..] else { panic!("{}", f.explain()) };
        let wanted = "placement of tensor 0 of the arguments: expected one that may differ over dp,tp, got equal on \
                      all ranks\n  at ";
        assert!(reason.starts_with(wanted), "{reason}");
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn c6_bytes_that_are_copied_back_into_a_slice_are_counted() {
    on(2, |mesh| {
        let group = mesh.clone();
        // A column has gaps: it is packed, reduced, and copied back.
        let column = compile(move |mut x: Tensor| {
            group.all_reduce_(x.narrow_mut(1, 1, 2)?, Reduce::Sum)?;
            Ok(x)
        });
        let x = column.call(ones(&[8, 4])?)?;
        let expected: Vec<f32> = [1.0, 2.0, 2.0, 1.0].repeat(8);
        assert_eq!(x.to_vec::<f32>()?, expected);
        let graph = &column.explain().graphs[0];
        let bytes = 8 * 2 * 4;
        assert_eq!(graph.copied_bytes, 2 * bytes, "{}", column.explain());
        assert_eq!(column.stats().copied_bytes, 2 * bytes, "{}", column.explain());
        let reasons: Vec<&str> = graph.copies.iter().filter_map(|copy| copy.split(": ").nth(1)).collect();
        let line = line!() - 11; // The all_reduce.
        let wanted = [
            format!("64 bytes (gaps), for `all_reduce` at crates/consort/tests/explain.rs:{line}"),
            format!(
                "64 bytes (back into a slice), for `update_slice` at crates/consort/tests/explain.rs:{line}"
            ),
        ];
        assert_eq!(reasons, wanted);
        // Eager code copies the same bytes.
        let (mut x, before) = (ones(&[8, 4])?, mesh.copied_bytes());
        mesh.all_reduce_(x.narrow_mut(1, 1, 2)?, Reduce::Sum)?;
        assert_eq!(x.to_vec::<f32>()?, expected);
        assert_eq!(mesh.copied_bytes() - before, 2 * bytes);
        // Rows have none.
        let group = mesh.clone();
        let rows = compile(move |mut x: Tensor| {
            group.all_reduce_(x.narrow_mut(0, 1, 2)?, Reduce::Sum)?;
            Ok(x)
        });
        rows.call(ones(&[8, 4])?)?.wait()?;
        assert_eq!(
            (rows.explain().graphs[0].copied_bytes, rows.stats().copied_bytes),
            (0, 0),
            "{}",
            rows.explain()
        );
        Ok(())
    });
}

#[test]
fn c6_an_argument_that_was_kept_is_copied_and_counted() {
    on(2, |mesh| {
        let group = mesh.clone();
        let rows = compile(move |mut x: Tensor| {
            group.all_reduce_(x.narrow_mut(0, 1, 2)?, Reduce::Sum)?;
            Ok(x)
        });
        let x = ones(&[8, 4])?;
        let y = rows.call(x.clone())?;
        assert_eq!((x.to_vec::<f32>()?, y.to_vec::<f32>()?[4]), (vec![1.0; 32], 2.0));
        let graph = &rows.explain().graphs[0];
        assert_eq!(graph.copied_bytes, rows.stats().copied_bytes, "{}", rows.explain());
        // The two rows are copied to be reduced, and at least the other six to the result.
        assert!((128..=160).contains(&graph.copied_bytes), "{}", rows.explain());
        assert!(
            graph.copies.iter().all(|copy| copy.contains(" bytes (argument), for `")),
            "{}",
            rows.explain()
        );
        Ok(())
    });
}

#[test]
fn c6_arguments_with_gaps_are_packed_and_counted() {
    on(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| group.all_reduce(x.exp()?, Reduce::Sum));
        for call in 1..4 {
            let before = mesh.copied_bytes();
            let y = f.call(ones(&[4, 6])?.permute(&[1, 0])?)?;
            assert_eq!(y.shape(), [6, 4]);
            assert_eq!(f.stats().copied_bytes, call * 96, "{}", f.explain());
            assert_eq!(mesh.copied_bytes() - before, 96);
        }
        let graph = &f.explain().graphs[0];
        assert_eq!(
            (graph.copied_bytes, &graph.copies[..]),
            (96, &["v0: 96 bytes (gaps of the argument)".into()][..])
        );
        assert!(f.explain().to_string().contains("copied for communication: 96 bytes\n"), "{}", f.explain());
        Ok(())
    });
}

#[test]
fn d4_work_inside_loops_counts_as_often_as_it_runs() {
    on(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| {
            let own = group.clone();
            let body = move |x: Tensor, (): ()| Ok((own.all_reduce(x.neg()?, Reduce::Sum)?, ()));
            Ok(scan(5usize, x, (), body)?.0)
        });
        f.call(ones(&[16])?)?.wait()?;
        let cost = f.explain().graphs[0].cost;
        // Per iteration: 16 negations, the reduction of half of it, and 64 bytes from the other rank.
        assert_eq!((cost.flops, cost.wire), (5 * (16 + 8), 5 * 64), "{}", f.explain());
        f.expect_steady(Steady::graphs(1))
    });
}

#[test]
fn d4_work_inside_while_counts_as_often_as_expected_and_of_a_choice_the_dearer_block() {
    on(2, |mesh| {
        let cost = |iterations: usize| {
            let group = mesh.clone();
            let f = compile(move |x: Tensor| {
                let large = |x: &Tensor| group.all_reduce(x.max_all()?, Reduce::Max)?.gt(1.0);
                while_loop(Iterations::at_most(100).expect(iterations), x, large, |x: Tensor| x.mul(0.5))
            });
            f.call(ones(&[16])?)?.wait()?;
            Ok::<_, consort::Error>(f.explain().graphs[0].cost)
        };
        // The condition, 4 bytes of a reduction over two, is evaluated once more than the body.
        let costs = [3, 4, 8].map(|iterations| cost(iterations).unwrap());
        assert_eq!(costs.map(|cost| cost.wire), [4, 5, 9].map(|evaluations| 4 * evaluations));
        let [three, four, eight] = costs.map(|cost| cost.flops);
        assert!(four - three >= 16 && eight - three == 5 * (four - three), "{costs:?}");
        let choice = |sines: usize| {
            let f = compile(move |x: Tensor| {
                let many = move |x: Tensor| (0..sines).try_fold(x, |x, _| x.sin());
                cond(&x.sum_all()?.gt(0.0)?, x, many, |x: Tensor| x.exp())
            });
            f.call(Tensor::from_iter([1.0f32; 16])?.replicated()?)?.wait()?;
            Ok::<_, consort::Error>(f.explain().graphs[0].cost.flops)
        };
        assert_eq!(choice(5)? - choice(2)?, 3 * 16);
        Ok(())
    });
}
