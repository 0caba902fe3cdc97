//! Peers and tags of messages: what they may be, and what is said of those that are wrong.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::time::Duration;

use consort::{Dtype, Index, Init, Mesh, Missing, Result, Route, Steady, Tensor, compile};

fn ones(n: usize) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, &[n])
}

/// Runs a function of two ranks, eager or traced.
fn on_two(traced: bool, f: fn(&Mesh, Tensor) -> Result<Tensor>) -> Vec<Result<Vec<f32>>> {
    Init::new().timeout(Duration::from_secs(20)).spawn(2, |mesh| {
        let x = Tensor::full(Dtype::F32, &[2], mesh.my_rank()? as f64)?;
        match traced {
            false => f(&mesh, x)?.to_vec::<f32>(),
            true => {
                let own = mesh.clone();
                compile(move |x: Tensor| f(&own, x)).call(x)?.to_vec::<f32>()
            }
        }
    })
}

#[test]
fn a_peer_that_is_no_member_is_printed_as_it_was_given() {
    type Send = fn(&Mesh, Tensor) -> Result<Tensor>;
    let cases: [(Send, [&str; 2]); 4] = [
        (|g, x| g.isend(&x, g.rank() - 5, 0)?.wait().map(|()| x), ["-5", "-4"]),
        (|g, x| g.isend(&x, g.rank() + 5, 0)?.wait().map(|()| x), ["5", "6"]),
        (|g, x| g.isend(&x, usize::MAX, 0)?.wait().map(|()| x), ["a number that does not fit in 64 bits"; 2]),
        (|g, x| g.isend(&x, 2, 0)?.wait().map(|()| x), ["2"; 2]),
    ];
    for (send, got) in cases {
        for traced in [false, true] {
            for (error, got) in on_two(traced, send).into_iter().zip(got) {
                let error = error.unwrap_err().to_string();
                let wanted = format!(": expected a peer in 0..2, or -1 for none, got {got}");
                assert!(error.lines().next().unwrap().contains(&wanted), "{error}");
                assert!(error.contains("tests/messages.rs:"), "{error}");
                let note =
                    "\n  note: peers are numbered within the group, as `my_rank` of the group numbers them";
                assert_eq!(error.matches(note).count(), 1, "{error}");
            }
        }
    }
}

#[test]
fn tags_may_be_computed_from_the_rank() {
    for traced in [false, true] {
        // Rank 0 sends with tag 10 and receives with tag 11; rank 1 the reverse.
        let got = on_two(traced, |g, x| {
            let sent = g.isend(&x, Route::Ring(1), g.rank() + 10)?;
            let y = g.irecv(Dtype::F32, &[2], Route::Ring(-1), Index::from(11) - g.rank())?;
            sent.wait()?;
            Ok(y)
        });
        let got: Vec<Vec<f32>> = got.into_iter().map(Result::unwrap).collect();
        assert_eq!(got, [[1.0; 2], [0.0; 2]], "traced: {traced}");
    }
}

#[test]
fn tags_that_are_other_numbers_on_each_rank_are_one_program() {
    let got = Init::new().axes(&[("pp", 2), ("tp", 2)]).timeout(Duration::from_secs(20)).spawn(4, |mesh| {
        let (pp, me) = (mesh.axis("pp")?, mesh.my_rank()? as i64);
        let stage = pp.my_rank()?;
        let f = compile(move |x: Tensor| {
            // Each rank has a tag of its own: that of the sender.
            let sent = pp.isend(&x, 1 - stage, me)?;
            let y = pp.irecv(Dtype::F32, &[1], 1 - stage, (me + 2) % 4)?;
            sent.wait()?;
            Ok(y)
        });
        let mut got = Vec::new();
        for round in 0..3 {
            got.push(f.call(Tensor::full(Dtype::F32, &[1], (me + 10 * round) as f64)?)?.item::<f32>()?);
        }
        f.expect_steady(Steady::graphs(1))?;
        Ok(got)
    });
    for (rank, got) in got.into_iter().enumerate() {
        let other = ((rank + 2) % 4) as f32;
        assert_eq!(got.unwrap(), [other, other + 10.0, other + 20.0]);
    }
}

#[test]
fn peers_and_routes_can_be_used_twice() {
    for traced in [false, true] {
        let got = on_two(traced, |g, x| {
            let (route, peer) = (Route::Ring(1), g.rank() * -1 + 1);
            let y = g.permute(&x, &route, Missing::Error)?;
            let y = g.permute(&y, &route, Missing::Error)?;
            let sent = g.isend(&y, &peer, 0)?;
            let mut z = g.irecv(Dtype::F32, &[2], &peer, 0)?;
            sent.wait()?;
            let sent = g.isend(&z, &route, 1)?;
            let again = g.irecv(Dtype::F32, &[2], &route, 1)?;
            sent.wait()?;
            g.permute_(&mut z, &route, Missing::Error)?;
            z.mul(10.0)?.add(&again)
        });
        // Two ranks, five exchanges: z is the own tensor again, and so is what the last message brings.
        let got: Vec<Vec<f32>> = got.into_iter().map(Result::unwrap).collect();
        assert_eq!(got, [[0.0; 2], [11.0; 2]], "traced: {traced}");
    }
}

#[test]
fn a_tensor_of_another_size_than_its_entry_is_named_by_it() {
    for traced in [false, true] {
        for sizes_differ in [false, true] {
            let errors = Init::new().timeout(Duration::from_secs(20)).spawn(2, |mesh| {
                let (group, me) = (mesh.clone(), mesh.my_rank()?);
                let x = ones(if sizes_differ { me + 1 } else { 2 })?;
                let f = move |x: Tensor| group.all_gather_v(x, 0, &[3, 2]);
                if traced { compile(f).call(x)?.to_vec::<f32>() } else { f(x)?.to_vec::<f32>() }
            });
            // Only rank 0 has a wrong one; the other is told, or finds it in the program.
            let error = errors.into_iter().next().unwrap().unwrap_err().to_string();
            assert!(error.starts_with("all_gather_v: expected dimension 0 to be "), "{error}");
            assert!(error.contains("this member's entry of the sizes"), "{error}");
            assert!(error.contains(if sizes_differ { "got 1" } else { "got 2" }), "{error}");
            assert!(!error.contains("bytes"), "{error}");
        }
    }
}

#[test]
fn a_condition_on_sizes_from_data_says_where_they_are_read_and_what_needs_it() {
    let errors = consort::spawn(1, |_| {
        let f = compile(|(x, n): (Tensor, Tensor)| {
            let sizes = n.to_sizes()?;
            x.narrow(0, 0, sizes[0].clone())
        });
        let read = line!() - 3;
        let error =
            f.call((ones(4)?, Tensor::from_slice(&[9i64, 2], &[2])?)).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("to_sizes: guard `u0 <= 4` failed: 9 and 4\n"), "{error}");
        assert!(error.contains(&format!("\n  at crates/consort/tests/messages.rs:{read}\n")), "{error}");
        let needs = format!("crates/consort/tests/messages.rs:{} needs the condition", read + 1);
        assert!(
            error.contains("note: u0, u1, .. are the sizes read here") && error.contains(&needs),
            "{error}"
        );
        Ok(())
    });
    errors.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn a_size_from_data_in_an_error_of_a_trace_is_explained() {
    let errors = consort::spawn(2, |mesh| {
        let f = compile(move |(x, n): (Tensor, Tensor)| {
            let sizes = n.to_sizes()?;
            mesh.all_reduce(x.narrow(0, 0, &sizes[0])?, consort::Reduce::Sum)
        });
        let read = line!() - 3;
        let n = Tensor::from_slice(&[3i64, 2], &[2])?;
        let error = f.call((ones(4)?, n.neg()?.neg()?)).map(drop).unwrap_err().to_string();
        let note = format!("note: u0 is a size read from data at crates/consort/tests/messages.rs:{read}");
        assert!(error.contains("but u0 differs over world") && error.contains(&note), "{error}");
        Ok(())
    });
    errors.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn slices_have_the_ops_in_place() {
    let f = |mut x: Tensor| {
        x.narrow_mut(0, 1, 2)?.add_(10.0)?;
        x.narrow_mut(0, 0, 2)?.mul_(&Tensor::full(Dtype::F32, &[2], 3.0)?)?;
        x.slice_mut(&[3], &[1])?.neg_()?;
        Ok(x)
    };
    // Of 0, 1, 2, 3: first 0, 11, 12, 3, then 0, 33, 12, 3, then 0, 33, 12, -3.
    let expected = [0.0, 33.0, 12.0, -3.0];
    let x = || Tensor::from_iter([0.0f32, 1.0, 2.0, 3.0]);
    let kept = x().unwrap();
    assert_eq!(f(kept.clone()).unwrap().to_vec::<f32>().unwrap(), expected);
    assert_eq!(kept.to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0], "another owner does not see the write");
    assert_eq!(compile(f).call(x().unwrap()).unwrap().to_vec::<f32>().unwrap(), expected);
    let mut x = x().unwrap();
    let error = x.narrow_mut(0, 0, 2).unwrap().add_(&ones(3).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("add_: expected ") && error.contains("tests/messages.rs:"), "{error}");
    assert_eq!(x.to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0]);
}
