//! Values of a traced function that it keeps: what they are, where they were made, and the way out.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::cell::RefCell;
use std::rc::Rc;

use consort::{
    Dtype, Index, Mesh, Pending, Reduce, Result, Route, Tensor, compile, cond, scan, uncompiled, while_loop,
};

type Kept<T> = Rc<RefCell<Option<T>>>;

fn ones(n: usize) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, &[n])
}

/// A step of a ring that keeps the handle of its send; the line of the send.
fn ring(mesh: &Mesh, kept: &Kept<Pending<()>>) -> (consort::Compiled<Tensor, Tensor>, u32) {
    let (group, kept) = (mesh.clone(), Rc::clone(kept));
    let step = move |x: Tensor| {
        *kept.borrow_mut() = Some(group.isend(&x, Route::Ring(1), 0)?);
        group.irecv(Dtype::F32, &[4], Route::Ring(-1), 0)
    };
    (compile(step), line!() - 3)
}

#[test]
fn a_handle_that_outlived_its_trace_is_an_error_with_the_line_that_made_it() {
    let done = consort::spawn(2, |mesh| {
        let kept: Kept<Pending<()>> = Rc::default();
        let (step, made) = ring(&mesh, &kept);
        assert_eq!(step.call(ones(4)?)?.to_vec::<f32>()?, [1.0; 4]);
        let handle = kept.take().unwrap();
        let (test, wait) = (handle.test().unwrap_err(), handle.wait().unwrap_err());
        for (method, error) in [("test", test), ("wait", wait)] {
            assert_eq!(error.site().line(), line!() - 2);
            let wanted =
                format!("{method}: expected a handle of this call, got one that a traced function kept\n");
            let error = error.to_string();
            assert!(error.starts_with(&wanted), "{error}");
            assert!(
                error.contains(&format!("it was made at crates/consort/tests/kept.rs:{made}\n")),
                "{error}"
            );
            assert!(error.contains("note: return the handle from the compiled function"), "{error}");
        }
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn a_handle_of_another_trace_is_an_error() {
    let done = consort::spawn(2, |mesh| {
        let kept: Kept<Pending<()>> = Rc::default();
        ring(&mesh, &kept).0.call(ones(4)?)?.to_vec::<f32>()?;
        let other = compile(move |x: Tensor| {
            kept.take().unwrap().wait()?;
            x.neg()
        });
        let error = other.call(ones(4)?).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("wait: expected a handle of this call"), "{error}");
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn a_handle_can_be_waited_for_inside_uncompiled_code_and_after_a_break() {
    let done = consort::spawn(2, |mesh| {
        let group = mesh.clone();
        let f = compile(move |x: Tensor| {
            let a = group.isend(&x, Route::Ring(1), 0)?;
            let b = group.pending(|| group.all_reduce(&x, Reduce::Sum))?;
            let y = group.irecv(Dtype::F32, &[4], Route::Ring(-1), 0)?;
            uncompiled(|| a.wait())?;
            y.add(&b.wait()?)
        });
        let me = mesh.my_rank()? as f64;
        let got = f.call(Tensor::full(Dtype::F32, &[4], me)?)?.to_vec::<f32>()?;
        assert_eq!(got, [1.0 - me as f32 + 1.0; 4]);
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn a_tensor_that_outlived_its_trace_names_the_line_that_made_it_also_when_it_is_printed() {
    let done = consort::spawn(1, |_| {
        let kept: Kept<Tensor> = Rc::default();
        let own = Rc::clone(&kept);
        let f = compile(move |x: Tensor| {
            let y = x.neg()?;
            *own.borrow_mut() = Some(y.clone());
            y.exp()
        });
        let made = line!() - 4;
        f.call(ones(4)?)?;
        let y = kept.take().unwrap();
        let error = y.add(&y).map(drop).unwrap_err().to_string();
        let at = format!("\n  it was made at crates/consort/tests/kept.rs:{made}\n");
        assert!(error.contains(&at) && error.contains("note: return it"), "{error}");
        for (method, error) in [("wait", y.wait().unwrap_err()), ("is_ready", y.is_ready().unwrap_err())] {
            assert_eq!(error.site().line(), line!() - 1);
            let error = error.to_string();
            let wanted =
                format!("{method}: expected a tensor of this call, got one that a traced function kept");
            assert!(error.starts_with(&wanted) && error.contains(&at), "{error}");
        }
        let shown = "<print: expected a tensor of this call, got one that a traced function kept>";
        assert_eq!(y.to_string(), shown);
        Ok(made)
    });
    // What could not be printed is an error of the rank, at a line of the user.
    let error = done.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("\n  at crates/consort/tests/kept.rs:"), "{error}");
    assert!(!error.contains("src/print.rs"), "{error}");
}

#[test]
fn a_value_made_inside_a_loop_or_branch_is_refused_outside() {
    type Step = fn(Tensor, &dyn Fn(&Tensor)) -> Result<()>;
    let steps: [(Step, u32); 3] = [
        (
            |x, keep| {
                scan(3usize, x, (), |x: Tensor, (): ()| {
                    let x = x.neg()?;
                    keep(&x);
                    Ok((x, ()))
                })
                .map(|_: (Tensor, ())| ())
            },
            line!() - 6,
        ),
        (
            |x, keep| {
                let positive = x.sum_all()?.gt(0.0)?;
                let then = |x: Tensor| {
                    let x = x.neg()?;
                    keep(&x);
                    Ok(x)
                };
                cond(&positive, x, then, |x: Tensor| Ok(x)).map(drop)
            },
            line!() - 6,
        ),
        (
            |x, keep| {
                let body = |x: Tensor| {
                    let x = x.mul(2.0)?;
                    keep(&x);
                    Ok(x)
                };
                while_loop(10, x, |x: &Tensor| x.sum_all()?.lt(100.0), body).map(drop)
            },
            line!() - 6,
        ),
    ];
    for (step, made) in steps {
        let done = consort::spawn(1, |_| {
            let f = compile(move |x: Tensor| {
                let kept: Kept<Tensor> = Rc::default();
                step(x, &|y| *kept.borrow_mut() = Some(y.clone()))?;
                // A break does not need what was kept; only its use is wrong.
                ones(1)?.mul(2.0)?.item::<f32>()?;
                kept.take().unwrap().exp()
            });
            let error = f.call(ones(4)?).map(drop).unwrap_err().to_string();
            let kept = "exp: expected a tensor of this call, got one that a traced function kept";
            assert!(error.starts_with(kept), "{error}");
            let f = compile(move |x: Tensor| {
                let kept: Kept<Tensor> = Rc::default();
                step(x, &|y| *kept.borrow_mut() = Some(y.clone()))?;
                kept.take().unwrap().exp()
            });
            Ok(f.call(ones(4)?).map(drop).unwrap_err().to_string())
        });
        let error = done.into_iter().next().unwrap().unwrap();
        assert!(
            error.starts_with("exp: expected a tensor that was made outside of the loop or branch"),
            "{error}"
        );
        assert!(error.contains(&format!("it was made at crates/consort/tests/kept.rs:{made}\n")), "{error}");
        assert!(error.contains("note: return it from that function"), "{error}");
    }
}

#[test]
fn a_size_that_outlived_its_trace_says_what_it_is() {
    let done = consort::spawn(1, |_| {
        let kept: Kept<Index> = Rc::default();
        let own = Rc::clone(&kept);
        let f = compile(move |x: Tensor| {
            *own.borrow_mut() = Some(x.dim(0)?);
            x.neg()
        });
        f.dynamic(0, 0).call(ones(4)?)?;
        let size = kept.take().unwrap();
        let error = size.to_usize().unwrap_err().to_string();
        let wanted = "index: expected a size that is known here, got `s0`, which a traced function kept\n";
        assert!(error.starts_with(wanted), "{error}");
        assert!(error.contains("kept.rs:") && error.contains("note: return it"), "{error}");
        let zeros = Tensor::zeros(Dtype::F32, std::slice::from_ref(&size)).map(drop).unwrap_err().to_string();
        let narrow = ones(8)?.narrow(0, 0, &size).map(drop).unwrap_err().to_string();
        for (method, error) in [("zeros", zeros), ("narrow", narrow)] {
            assert!(error.starts_with(&format!("{method}: expected a size that is known here")), "{error}");
            assert!(error.contains("kept.rs:") && error.contains("note: return it"), "{error}");
        }
        let other = compile(move |x: Tensor| x.narrow(0, 0, &size));
        let error = other.call(ones(8)?).map(drop).unwrap_err().to_string();
        assert!(error.starts_with("narrow: expected sizes of this function"), "{error}");
        assert!(error.contains("note: "), "{error}");
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}
