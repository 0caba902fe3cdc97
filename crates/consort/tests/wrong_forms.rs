//! Wrong calls: each error names the call that the user made, once, with both shapes where shapes are wrong.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Error, Mesh, Reduce, Result, Route, Tensor, cond, scan};

type Call = fn(&Mesh, Tensor) -> Result<()>;

fn ones(shape: &[usize]) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, shape)
}

/// Calls with an out tensor of a wrong shape or type: their name, what is expected, what there is.
const OUT: [(&str, &str, &str, Call); 12] = [
    ("all_gather_into", "f32[8]", "f32[7]", |g, x| g.all_gather_into(&mut ones(&[7])?, x, 0)),
    ("all_gather_into", "f32[8]", "f32[4, 2]", |g, x| g.all_gather_into(&mut ones(&[4, 2])?, x, 0)),
    ("all_gather_into", "f32[8]", "i64[8]", |g, x| {
        g.all_gather_into(&mut Tensor::ones(Dtype::I64, &[8])?, x, 0)
    }),
    ("all_gather_into", "f32[8]", "f32[6]", |g, x| {
        g.all_gather_into(ones(&[9])?.narrow_mut(0, 1usize, 6usize)?, x, 0)
    }),
    ("reduce_scatter_into", "f32[2]", "f32[3]", |g, x| {
        g.reduce_scatter_into(&mut ones(&[3])?, x, Reduce::Sum, 0)
    }),
    ("reduce_scatter_into", "f32[2]", "f32[1]", |g, x| {
        g.reduce_scatter_into(ones(&[4])?.narrow_mut(0, 1usize, 1usize)?, x, Reduce::Sum, 0)
    }),
    ("all_to_all_into", "f32[4]", "f32[5]", |g, x| g.all_to_all_into(&mut ones(&[5])?, x, None, None)),
    ("all_to_all_into", "f32[4]", "f32[2]", |g, x| {
        g.all_to_all_into(ones(&[4])?.narrow_mut(0, 1usize, 2usize)?, x, None, None)
    }),
    ("gather_into", "f32[8]", "f32[4]", |g, x| g.gather_into(&mut ones(&[4])?, x, 0, 0)),
    ("gather_into", "f32[8]", "f32[3]", |g, x| {
        g.gather_into(ones(&[4])?.narrow_mut(0, 1usize, 3usize)?, x, 0, 0)
    }),
    ("scatter_into", "f32[2]", "f32[4]", |g, x| g.scatter_into(&mut ones(&[4])?, x, 0, 0)),
    ("scatter_into", "f32[2]", "f32[3]", |g, x| {
        g.scatter_into(ones(&[4])?.narrow_mut(0, 1usize, 3usize)?, x, 0, 0)
    }),
];

/// Other wrong calls, eager and in a trace.
const OTHERS: [(&str, Call); 30] = [
    ("add", |_, x| x.add(&ones(&[3])?).map(drop)),
    ("add_", |_, mut x| x.add_(&ones(&[3])?)),
    ("matmul", |_, x| x.matmul(&ones(&[3, 2])?).map(drop)),
    ("reshape", |_, x| x.reshape(&[3]).map(drop)),
    ("narrow", |_, x| x.narrow(1, 0usize, 1usize).map(drop)),
    ("narrow_mut", |_, mut x| x.narrow_mut(0, 3usize, 2usize).map(drop)),
    ("permute", |_, x| x.permute(&[0, 1]).map(drop)),
    ("softmax", |_, x| x.softmax(3).map(drop)),
    ("sum", |_, x| x.sum(&[0, 0], false).map(drop)),
    ("dim", |_, x| x.dim(4).map(drop)),
    ("copy_from", |_, mut x| x.copy_from(&ones(&[3])?)),
    ("copy_from", |_, mut x| x.narrow_mut(0, 0usize, 2usize)?.copy_from(&ones(&[3])?)),
    ("broadcast_to", |_, x| x.broadcast_to(&[3]).map(drop)),
    ("gather", |_, x| x.gather(&ones(&[1])?, 0).map(drop)),
    ("select", |_, x| x.select(&x, 0.0).map(drop)),
    ("conv1d", |_, x| x.conv1d(&x, 1, 0, 1, 1).map(drop)),
    ("all_reduce", |g, x| g.all_reduce(x.cast(Dtype::I32)?, Reduce::Avg).map(drop)),
    ("all_reduce_", |g, x| g.all_reduce_(&mut x.cast(Dtype::I32)?, Reduce::Avg)),
    ("all_gather", |g, x| g.all_gather(x, 4).map(drop)),
    ("all_gather_", |g, _| g.all_gather_(&mut ones(&[3])?, 0)),
    ("reduce_scatter", |g, _| g.reduce_scatter(ones(&[3])?, Reduce::Sum, 0).map(drop)),
    ("reduce_scatter_", |g, _| g.reduce_scatter_(&mut ones(&[3])?, Reduce::Sum, 0)),
    ("all_to_all", |g, _| g.all_to_all(ones(&[3])?, None, None).map(drop)),
    ("broadcast", |g, x| g.broadcast(x, 9).map(drop)),
    ("broadcast_", |g, mut x| g.broadcast_(&mut x, 9)),
    ("isend", |g, x| g.isend(x, Route::Table(vec![None; 5]), 0).map(drop)),
    ("all_gather_v", |g, x| g.all_gather_v(x, 0, &[1, 2, 3]).map(drop)),
    ("equal_over", |_, x| x.equal_over(&["nothing"]).map(drop)),
    ("add", |_, x| {
        scan(2usize, x, (), |x: Tensor, (): ()| Ok((x.add(&ones(&[3])?)?, ()))).map(|_: (Tensor, ())| ())
    }),
    ("add", |_, x| {
        cond(&x.sum_all()?.gt(0.0)?, x, |x: Tensor| x.add(&ones(&[3])?), |x: Tensor| Ok(x))
            .map(|_: Tensor| ())
    }),
];

/// The first line names nothing twice in a row.
fn check_named_once(error: &str) {
    let title = error.lines().next().unwrap();
    let parts: Vec<&str> = title.split(": ").collect();
    assert!(parts.windows(2).all(|pair| pair[0] != pair[1]), "{error}");
    assert!(title.matches("compile:").count() < 2, "{error}");
}

fn run(mesh: &Mesh, call: Call, traced: bool) -> Error {
    let x = ones(&[4]).unwrap();
    if !traced {
        return call(mesh, x).unwrap_err();
    }
    let own = mesh.clone();
    let f = consort::compile(move |x: Tensor| {
        call(&own, x.clone())?;
        Ok(x)
    });
    f.call(x).map(|_| ()).unwrap_err()
}

#[test]
fn a12_a_wrong_out_tensor_is_an_error_of_the_call_with_both_shapes() {
    let done = consort::spawn(2, |mesh| {
        for (name, expected, got, call) in OUT {
            for traced in [false, true] {
                let error = run(&mesh, call, traced).to_string();
                let wanted = format!("{name}: expected {expected} for the result, got {got}\n  at ");
                assert!(error.starts_with(&wanted), "traced: {traced}: {error}");
                assert!(error.contains("tests/wrong_forms.rs:"), "{error}");
            }
        }
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn d9_errors_name_each_call_once() {
    let done = consort::spawn(2, |mesh| {
        for (name, call) in OTHERS {
            for traced in [false, true] {
                let error = run(&mesh, call, traced).to_string();
                check_named_once(&error);
                assert!(error.starts_with(&format!("{name}: ")), "{name}: {error}");
                assert!(error.contains("\n  at crates/consort/tests/wrong_forms.rs:"), "{name}: {error}");
            }
        }
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}
