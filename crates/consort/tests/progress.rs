//! What advances an operation in flight while its rank makes no call of communication: eager copies and evaluations, which poll,
//! and progress threads. In each test rank 0 does this until rank 1, whose wait needs its part, has its result.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use consort::kernels::{Arg, Kernel, KernelCx, KernelError, ViewMut};
use consort::ops::{Cost, CostCx, EvalCx, EvalError, InferCx, OpDef};
use consort::{Group, Init, Mesh, Reduce, Result, Tensor, apply, compile};
use consort_ir::literal::Literal;
use consort_ir::op;
use consort_ir::types::Type;
use consort_types::Failure;

/// Large enough for a reduction in parts, in which each member has one to do.
const ELEMENTS: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(20);

fn ones() -> Result<Tensor> {
    Tensor::from_slice(&vec![1.0f32; ELEMENTS], &[ELEMENTS])
}

/// Rank 0 starts a large sum over the group that `group` gives, and then only does `work`, until rank 1 has the sum.
fn check(group: impl Fn(&Mesh) -> Result<Group> + Sync, work: impl Fn(&AtomicBool) -> Result<()> + Sync) {
    let (has_started, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let sums = Init::new().timeout(LIMIT).spawn(2, |mesh| {
        let group = group(&mesh)?;
        let start = |group: &Group| group.pending(|| group.all_reduce(ones()?, Reduce::Sum));
        if mesh.my_rank()? == 0 {
            let pending = start(&group)?;
            has_started.store(true, SeqCst);
            let until = Instant::now() + LIMIT;
            while !is_over.load(SeqCst) && Instant::now() < until {
                work(&is_over)?;
            }
            assert!(is_over.load(SeqCst), "nobody advanced the part of rank 0");
            return pending.wait()?.sum_all()?.item::<f32>();
        }
        // Otherwise rank 0 might do its part when it starts.
        idle(&has_started)?;
        let sum = start(&group)?.wait()?;
        is_over.store(true, SeqCst);
        sum.sum_all()?.item::<f32>()
    });
    sums.into_iter().for_each(|sum| assert_eq!(sum.unwrap(), 2.0 * ELEMENTS as f32));
}

fn whole(mesh: &Mesh) -> Result<Group> {
    Ok((**mesh).clone())
}

#[test]
fn eager_copies_advance_what_is_in_flight() {
    // Into a new tensor, and into a part of one that has no gaps.
    check(whole, |_| {
        let x = Tensor::from_slice(&vec![1.0f32; 1 << 16], &[256, 256])?.transpose(0, 1)?;
        x.contiguous().map(drop)
    });
    check(whole, |_| {
        let mut x = Tensor::from_slice(&vec![0.0f32; 1 << 16], &[256, 256])?;
        let y = Tensor::from_slice(&vec![1.0f32; 1 << 15], &[128, 256])?;
        x.slice_mut(&[64, 0], &[128, 256])?.copy_from(&y)
    });
}

op! {
    /// The same elements. With its kernel, rank 0 waits for rank 1.
    pub struct Same("same")(x) {}
    example "mesh ()\n\nfunc @f(v0: f32[2]) -> f32[2] {\n    v1 = same v0 : f32[2]\n    return v1\n}\n; run: @f([1, 2]) == [1, 2]\n"
}

impl OpDef for Same {
    fn infer(&self, cx: &mut InferCx<'_>) -> std::result::Result<Vec<Type>, Box<Failure>> {
        Ok(vec![cx.tensor(0)?.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn eval(&self, _: &EvalCx<'_>, args: &[&Literal]) -> std::result::Result<Vec<Literal>, EvalError> {
        Ok(vec![args[0].clone()])
    }
}

#[test]
fn the_evaluation_of_a_users_op_advances_what_is_in_flight() {
    let x = vec![1.0f32; 1 << 12];
    check(whole, |_| apply(&Same {}, [Tensor::from_slice(&x, &[1 << 12])?]).map(drop));
}

/// A loop that does nothing but test ends at the deadline, and names who is missing.
#[test]
fn a_loop_of_tests_ends_at_the_deadline() {
    let (timeout, is_over) = (Duration::from_millis(300), AtomicBool::new(false));
    let errors = Init::new().timeout(timeout).spawn(2, |mesh| {
        if mesh.my_rank()? == 1 {
            return idle(&is_over).map(|()| None);
        }
        let pending = mesh.pending(|| mesh.all_reduce(Tensor::from_iter([1.0f32])?, Reduce::Sum))?;
        let start = Instant::now();
        let error = loop {
            match pending.test() {
                Ok(is_over) => assert!(!is_over && start.elapsed() < LIMIT),
                Err(error) => break error.to_string(),
            }
        };
        let took = start.elapsed();
        is_over.store(true, SeqCst);
        assert_eq!(pending.wait().unwrap_err().to_string(), error, "it stays failed");
        Ok(Some((error, took)))
    });
    let (error, took) = errors.into_iter().find_map(|error| error.unwrap()).unwrap();
    assert!(error.contains("the deadline passed; missing: rank 1"), "{error}");
    assert!(took >= timeout, "{took:?}");
}

fn helped(mesh: &Mesh) {
    mesh.force_progress_threads();
    assert!(mesh.start_progress_threads());
}

/// Waits for the other rank, and makes no call at all.
fn idle(is_so: &AtomicBool) -> Result<()> {
    let start = Instant::now();
    while !is_so.load(SeqCst) && start.elapsed() < LIMIT {
        thread::yield_now();
    }
    Ok(())
}

#[test]
fn a_progress_thread_advances_eager_operations() {
    check(
        |mesh| {
            helped(mesh);
            whole(mesh)
        },
        idle,
    );
}

#[test]
fn a_group_that_is_made_later_has_a_progress_thread_too() {
    check(
        |mesh| {
            helped(mesh);
            mesh.lists("both", &[&[1, 0]])
        },
        idle,
    );
}

/// That rank 0 has started its sum, and that rank 1 has its own, for the kernel, which is given nothing of a test.
static HAS_STARTED: AtomicBool = AtomicBool::new(false);
static IS_OVER: AtomicBool = AtomicBool::new(false);

const NOTHING: f32 = 0.0;
/// Rank 0 waits for rank 1, and makes no call meanwhile.
const COMPUTES: f32 = 1.0;
/// Rank 1 waits for rank 0, which might do its part when it starts otherwise.
const COMES_LATE: f32 = 2.0;

fn meet<'a>(
    _: &KernelCx<'a>,
    _: &dyn OpDef,
    args: &[Arg<'a>],
    results: &mut [ViewMut<'a>],
) -> std::result::Result<(), KernelError> {
    let [Arg::View(x)] = args else { return Err(KernelError::new("expected one operand")) };
    let x = x.elements::<f32>()?;
    if x[0] == COMPUTES {
        HAS_STARTED.store(true, SeqCst);
        idle(&IS_OVER).map_err(|error| KernelError::new(error.to_string()))?;
        assert!(IS_OVER.load(SeqCst), "nobody advanced the part of rank 0");
    } else if x[0] == COMES_LATE {
        idle(&HAS_STARTED).map_err(|error| KernelError::new(error.to_string()))?;
    }
    results[0].elements::<f32>()?.copy_from_slice(x);
    Ok(())
}

#[test]
fn a_progress_thread_advances_what_a_compiled_function_has_in_flight() {
    let outcomes = Init::new().timeout(LIMIT).spawn(2, |mesh| {
        helped(&mesh);
        mesh.add_kernel(Kernel { op: "same", family: "user", in_place: false, strided: false, run: meet })?;
        let group = mesh.clone();
        let f = compile(move |(x, before, after): (Tensor, Tensor, Tensor)| {
            let before = apply(&Same {}, [before])?;
            let sum = group.all_reduce(x, Reduce::Sum)?;
            let after = apply(&Same {}, [after])?;
            Ok((sum.sum_all()?, before[0].clone(), after[0].clone()))
        });
        let call = |before: f32, after: f32| -> Result<f32> {
            let [before, after] = [before, after].map(|what| Tensor::from_iter([what]));
            f.call((ones()?, before?, after?))?.0.item::<f32>()
        };
        assert_eq!(call(NOTHING, NOTHING)?, 2.0 * ELEMENTS as f32);
        if mesh.my_rank()? == 0 {
            return call(NOTHING, COMPUTES);
        }
        let sum = call(COMES_LATE, NOTHING)?;
        IS_OVER.store(true, SeqCst);
        Ok(sum)
    });
    outcomes.into_iter().for_each(|sum| assert_eq!(sum.unwrap(), 2.0 * ELEMENTS as f32));
}
