//! Compiled functions on ranks that are threads, against the same functions run eagerly.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "compile/cases.rs"]
mod cases;
#[path = "processes/sums.rs"]
mod sums;

/// Runs the cases whose names begin with the prefix.
fn run(prefix: &str) {
    let mut found = 0;
    for (name, sizes, case) in cases::CASES.iter().filter(|(name, ..)| name.starts_with(prefix)) {
        for n in *sizes {
            found += 1;
            for (rank, outcome) in consort::spawn(*n, case).into_iter().enumerate() {
                if let Err(error) = outcome {
                    panic!("{name}: rank {rank} of {n}: {error}");
                }
            }
        }
    }
    assert!(found > 0, "there is no case {prefix}");
}

macro_rules! rows {
    ($($row:ident)*) => {
        /// The rows of the specification that have a test here.
        const ROWS: &[&str] = &[$(stringify!($row)),*];

        $(
            #[test]
            fn $row() {
                run(concat!(stringify!($row), "_"));
            }
        )*
    };
}

rows!(a7 a10 a13 a16 b1 b2 b3 b4 b5 b6 b7 b8 b9 b10 b11 b12 b19 b20 b21 c1 c2 c5 c6 c7 d2 d3 d4 d5 d7 trace);

/// A case whose row is not listed would silently not run.
#[test]
fn every_case_belongs_to_a_row() {
    let row = |name: &str| name.split('_').next().unwrap_or_default().to_string();
    let missing: Vec<&str> =
        cases::CASES.iter().map(|(name, ..)| *name).filter(|name| !ROWS.contains(&&*row(name))).collect();
    assert!(missing.is_empty(), "no test runs {missing:?}");
}

#[test]
fn a_function_that_calls_itself_without_end_is_an_error() {
    use std::cell::RefCell;
    use std::rc::Rc;

    use consort::{Compiled, Tensor, compile};
    type Own = Rc<RefCell<Option<Rc<Compiled<Tensor, Tensor>>>>>;

    let errors = consort::spawn(2, |_| {
        let own: Own = Rc::default();
        let inner = Rc::clone(&own);
        let f = Rc::new(compile(move |x: Tensor| {
            let f = inner.borrow().clone();
            f.map_or(Ok(x.clone()), |f| f.call(x))
        }));
        *own.borrow_mut() = Some(Rc::clone(&f));
        let error = f.call(Tensor::from_iter([1.0f32])?).unwrap_err().to_string();
        own.take();
        Ok(error)
    });
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("calls of itself in a function"), "{error}");
    }
}

#[test]
fn a_panic_in_a_loop_that_the_function_catches_leaves_the_trace_as_it_was() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use consort::{Tensor, compile, while_loop};

    let results = consort::spawn(1, |_| {
        let f = compile(|x: Tensor| {
            let y = x.neg()?;
            let looped = catch_unwind(AssertUnwindSafe(|| {
                while_loop(3, y.clone(), |y| y.max_all()?.gt(0.0), |_| panic!("in the body"))
            }));
            assert!(looped.is_err());
            y.neg()
        });
        f.call(Tensor::from_iter([1.0f32, 2.0])?)?.to_vec::<f32>()
    });
    assert!(results.into_iter().all(|result| result.unwrap() == [1.0, 2.0]));
}
