//! Tensors of a dropped mesh, and errors of ranks whose calls differ.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use consort::{Batched, CommError, Dtype, Reduce, Route, Tensor};

#[test]
fn a_tensor_of_a_mesh_that_is_gone_is_refused_by_the_next() {
    let first = consort::init().unwrap();
    let x = Tensor::from_slice(&[1.0f32], &[1]).unwrap();
    drop(first);
    let second = consort::init().unwrap();
    let error = second.all_reduce(&x, Reduce::Sum).map(drop).unwrap_err().to_string();
    let expected = "all_reduce: expected tensors of the group's world, got one of another";
    assert!(error.starts_with(expected), "{error}");
    let error = x.add(&x).map(drop).unwrap_err().to_string();
    assert!(
        error.starts_with("add: expected a tensor of this world, got one of a world that was dropped"),
        "{error}"
    );
    assert!(x.to_vec::<f32>().is_ok_and(|x| x == [1.0]), "it can still be read");
}

#[test]
fn a_world_of_one_has_its_axis() {
    let alone = consort::init().unwrap();
    assert_eq!((alone.axis("world").unwrap().size(), alone.my_rank().unwrap()), (1, 0));
    let x = Tensor::scalar(2.0f32).unwrap();
    assert_eq!(x.varies(), ["world"]);
    let sum = alone.axis("world").unwrap().all_reduce(x, Reduce::Sum).unwrap();
    assert!(sum.varies().is_empty() && sum.item::<f32>().unwrap() == 2.0);
    drop(alone);
    let named = consort::Init::new().axes(&[("dp", 1), ("tp", 0)]).start().unwrap();
    assert_eq!((named.axis("dp").unwrap().size(), named.axis("tp").unwrap().size()), (1, 1));
    for n in [1, 2] {
        let sizes = consort::spawn(n, |mesh| Ok(mesh.axis("world")?.size()));
        assert!(sizes.into_iter().all(|size| size.unwrap() == n));
    }
}

#[test]
fn axes_that_do_not_fit_the_ranks_name_the_way_out() {
    let way_out = "note: one size may be 0: it becomes what the others leave";
    let axes: [(&[(&str, usize)], &str); 3] = [
        (&[("dp", 3)], "(dp: 3)"),
        (&[("dp", 0), ("tp", 3)], "(dp: 0, tp: 3)"),
        (&[("dp", 0), ("tp", 0)], "(dp: 0, tp: 0)"),
    ];
    for (axes, got) in axes {
        for error in consort::Init::new().axes(axes).spawn(2, |_| Ok(())) {
            let error = error.unwrap_err().to_string();
            let wanted = format!(
                "spawn: expected axes whose sizes multiply to 2, the number of ranks, got {got}\n  at "
            );
            assert!(error.starts_with(&wanted) && error.ends_with(way_out), "{error}");
            assert!(error.contains("tests/worlds.rs:"), "{error}");
        }
    }
    let large = consort::Mesh::of_shapes(&[("dp", 1 << 33)], 0).map(drop).unwrap_err().to_string();
    assert!(large.starts_with("mesh: more than 1048576 ranks\n"), "{large}");
}

#[test]
fn a_split_into_groups_of_different_sizes_names_the_ranks_of_each_colour() {
    let errors = |colour: fn(usize) -> Option<u32>| {
        let results = consort::spawn(4, move |mesh| {
            let group = mesh.split("parts", colour(mesh.my_rank()?), 0);
            Ok(group.map(drop).unwrap_err().to_string())
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    for error in errors(|rank| Some(u32::from(rank == 2))) {
        let rows = "\n  colour 0: ranks 0,1,3\n  colour 1: rank 2\n  note: give each colour to the same number of ranks";
        assert!(error.starts_with("mesh: group `parts`: lists must have equal sizes"), "{error}");
        assert!(error.contains(rows) && error.contains("tests/worlds.rs:"), "{error}");
    }
    for error in errors(|_| None) {
        assert!(error.starts_with("mesh: group `parts`: no list of ranks\n"), "{error}");
        assert!(error.contains("\n  note: give each colour"), "{error}");
    }
}

#[test]
fn names_of_groups_and_functions_are_checked() {
    let long = "x".repeat(65);
    let mesh = consort::init().unwrap();
    for (name, shown) in [("", "``"), ("a b", "`a b`"), ("a\u{1b}", "`a\\u{1b}`"), (&long, "x..`")] {
        let error = mesh.lists(name, &[&[0]]).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("mesh: ") && error.contains(&format!("{shown} is not a name")), "{error}");
    }
    drop(mesh);
    for name in ["", " ", "a\tb", "\u{1b}[31m", "a`b", &long] {
        // One rank alone has a wrong one, and every rank hears of it.
        let results = consort::spawn(2, |mesh| {
            let (me, x) = (mesh.my_rank()?, Tensor::scalar(1.0f64)?);
            let group = mesh.clone();
            let f = consort::compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum));
            Ok(f.name("f")
                .role(if me == 1 { name } else { "first" })
                .call(x)
                .map(drop)
                .unwrap_err()
                .to_string())
        });
        for error in results.into_iter().map(Result::unwrap) {
            let wanted =
                "expected a role of 1 to 64 characters, none of which is a backtick or a control, got";
            assert!(error.contains(wanted) && error.contains("tests/worlds.rs:"), "{error}");
        }
        let local = consort::spawn(1, |_| {
            consort::compile(|x: Tensor| x.neg()).name(name).local().call(Tensor::scalar(1.0)?)?.wait()
        });
        let error = local[0].as_ref().unwrap_err().to_string();
        assert!(error.starts_with("compile: expected a name of 1 to 64 characters"), "{error}");
    }
}

#[test]
fn a_setting_that_differs_is_an_error_on_every_rank_with_the_values_of_all() {
    let results = consort::spawn(3, |mesh| {
        mesh.parity("threads", "2")?;
        let own = if mesh.my_rank()? == 1 { "plain" } else { "flash" };
        let error = mesh.parity("attention", own).unwrap_err().to_string(); // differs
        // The ranks go on together.
        mesh.parity("threads", "2")?;
        Ok(error)
    });
    let above = include_str!("worlds.rs").lines().position(|line| line.ends_with("// differs")).unwrap();
    for error in results.into_iter().map(Result::unwrap) {
        let wanted = [
            "parity: the setting `attention` must be the same on all ranks\n  at ",
            &format!("tests/worlds.rs:{}\n", above + 1),
            "\n  ranks 0,2: \"flash\"\n  rank 1: \"plain\"",
        ];
        assert!(error.starts_with(wanted[0]) && wanted.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn a_rank_in_no_list_has_no_number_there() {
    let errors = consort::spawn(3, |mesh| {
        let pair = mesh.lists("pair", &[&[2, 0]])?;
        Ok(pair.my_rank().map_err(|error| error.to_string()))
    });
    let places: Vec<_> = errors.into_iter().map(Result::unwrap).collect();
    assert_eq!((&places[0], &places[2]), (&Ok(1), &Ok(0)));
    let error = places[1].as_ref().unwrap_err();
    assert!(
        error.starts_with("my_rank: expected a member of the group, got a rank that is in none"),
        "{error}"
    );
}

#[test]
fn roots_that_differ_are_refused_before_there_is_a_result() {
    let errors = consort::spawn(2, |mesh| {
        let me = mesh.my_rank()?;
        mesh.broadcast(Tensor::from_slice(&[1.0f32], &[1])?, me)?.wait()
    });
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("broadcast: call 0 on world: the root must be the same on all ranks"),
            "{error}"
        );
        assert!(error.contains("rank 1   broadcast[root=1, over=world] f32[1]   "), "{error}");
    }
}

#[test]
fn an_error_that_nobody_saw_has_one_line_of_the_source() {
    let outcomes = consort::spawn(2, |mesh| {
        let me = mesh.my_rank()?;
        mesh.broadcast(Tensor::from_slice(&[1.0f32], &[1])?, me).map(drop)
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("call 0 on world: the root must be the same on all ranks"), "{text}");
        assert_eq!(text.matches("\n  at ").count(), 1, "{text}");
    }
}

#[test]
fn the_notes_of_the_error_with_which_a_rank_leaves_reach_the_others() {
    let outcomes = consort::spawn(2, |mesh| {
        let x = Tensor::ones(Dtype::F32, &[2])?;
        match mesh.my_rank()? {
            0 => mesh.all_reduce(x, Reduce::Sum)?.wait(),
            _ => x.add(&Tensor::ones(Dtype::I32, &[2])?).map(drop),
        }
    });
    let error = outcomes[0].as_ref().unwrap_err();
    let Some(CommError::Elsewhere { rank: 1, error, .. }) = error.comm_error() else { panic!("{error}") };
    assert_eq!(error.notes, ["convert one with `cast`"]);
    assert!(error.got.starts_with("add: expected operands of one element type, got f32 and i32 (C2)\n  at "));
}

#[test]
fn a_group_goes_on_after_a_call_that_all_ranks_were_refused() {
    let sums = consort::spawn(2, |mesh| {
        let x = Tensor::from_slice(&[1.0f32], &[1])?;
        let error = mesh.broadcast(&x, 7).map(drop).unwrap_err().to_string();
        assert!(
            error.starts_with("broadcast: expected a root below 2, the size of the group, got 7 (C1)\n  at "),
            "{error}"
        );
        mesh.all_reduce(x, Reduce::Sum)?.item::<f32>()
    });
    assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 2.0)));
}

#[test]
fn shapes_of_messages_are_nothing_to_later_calls() {
    let sums = consort::spawn(2, |mesh| {
        let me = mesh.my_rank()?;
        let mut got = Tensor::zeros(Dtype::F32, &[5 - me])?;
        let message = |n: usize| Tensor::ones(Dtype::F32, &[n]);
        mesh.batch(vec![
            Batched::send(message(4 + me)?, Route::Ring(1), 0),
            Batched::recv(&mut got, Route::Ring(1), 0),
        ])?
        .wait()?;
        let same = Tensor::from_slice(&[3i64], &[1])?.replicated()?;
        let sent = mesh.isend(message(4 + me)?, Route::Ring(1), 1)?;
        mesh.recv_into(&mut got, Route::Ring(1), 1)?;
        sent.wait()?;
        let pair = mesh.lists("pair", &[&[0, 1]])?;
        // Gathering an empty tensor is an ordinary call.
        assert_eq!(mesh.all_gather(Tensor::zeros(Dtype::F32, &[0, 2])?, 1)?.shape(), [0, 4]);
        let turned = mesh.lists("turned", &[&[1, 0]])?;
        let mine = Tensor::from_slice(&[me as i64 + 1], &[1])?;
        let sum = pair.all_reduce(&mine, Reduce::Sum)?.add(&turned.all_reduce(&mine, Reduce::Sum)?)?;
        Ok((sum.add(&same)?.item::<i64>()?, got.sum_all()?.item::<f32>()?))
    });
    assert_eq!(sums.into_iter().collect::<consort::Result<Vec<_>>>().unwrap(), [(9, 5.0), (9, 4.0)]);
}

#[test]
fn a13_a_rank_that_is_no_rank_of_any_mesh_is_refused() {
    let large = usize::try_from(1u64 << 32).unwrap();
    let errors =
        consort::spawn(2, |mesh| Ok(mesh.lists("g", &[&[large, 1]]).map(drop).unwrap_err().to_string()));
    for error in errors {
        let error = error.unwrap();
        assert!(error.starts_with("mesh: expected ranks below 2, got 4294967296"), "{error}");
    }
}

#[test]
fn what_is_in_flight_advances_while_a_rank_computes() {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    const N: usize = 1 << 20;
    let (started, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let sums = consort::Init::new().timeout(std::time::Duration::from_secs(20)).spawn(2, |mesh| {
        let is_first = mesh.my_rank()? == 0;
        while !is_first && !started.load(SeqCst) {
            std::thread::yield_now();
        }
        let sum = mesh.all_reduce(Tensor::ones(Dtype::F32, &[N])?, Reduce::Sum)?;
        started.store(true, SeqCst);
        if is_first {
            let mut x = Tensor::ones(Dtype::F32, &[1 << 12])?;
            while !done.load(SeqCst) {
                x = x.neg()?;
            }
        } else {
            // The first reduces its part of the sum only now.
            let waited = sum.wait();
            done.store(true, SeqCst);
            waited?;
        }
        sum.sum_all()?.item::<f32>()
    });
    for sum in sums {
        assert_eq!(sum.unwrap(), (2 * N) as f32);
    }
}
