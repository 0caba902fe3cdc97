//! SPEC B20, eager: an op that a user declares runs on tensors like a built-in one, with a kernel of its own or without.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::kernels::{Arg, Kernel, KernelCx, KernelError, ViewMut};
use consort::ops::{Cost, CostCx, EvalCx, EvalError, InferCx, OpDef, Violation};
use consort::{Dtype, Tensor, apply, spawn};
use consort_ir::op;
use consort_ir::tensor::{Data, Tensor as Reference};
use consort_ir::types::Type;

op! {
    /// `a * x + y`, in one go.
    ///
    /// (C1) Both operands are float tensors of one type and shape.
    pub struct Axpy("axpy")(x, y) {
        /// The factor.
        a: f64
    }
    example "mesh ()\n\nfunc @f(v0: f32[1], v1: f32[1]) -> f32[1] {\n    v2 = axpy[a=2.0] v0, v1 : f32[1]\n    return v2\n}\n; run: @f([1], [10]) == [12]\n"
}

impl OpDef for Axpy {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let (x, y) = (cx.tensor(0)?, cx.tensor(1)?);
        cx.require_same_shape("C1", "y of shape", &x.shape, &y.shape)?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn eval(&self, _cx: &EvalCx<'_>, args: &[&Reference]) -> Result<Vec<Reference>, EvalError> {
        let (Data::Float(x), Data::Float(y)) = (&args[0].data, &args[1].data) else {
            return Err(EvalError("expected floats".into()));
        };
        let data = x.iter().zip(y).map(|(x, y)| self.a * x + y).collect();
        Ok(vec![Reference::floats(args[0].dtype, args[0].shape.clone(), data)])
    }
}

/// A kernel that also adds 1000, to be told from the evaluation.
fn run<'a>(
    _cx: &KernelCx<'a>,
    op: &dyn OpDef,
    args: &[Arg<'a>],
    results: &mut [ViewMut<'a>],
) -> Result<(), KernelError> {
    let (Some(Axpy { a }), [Arg::View(x), Arg::View(y)]) = (op.as_any().downcast_ref(), args) else {
        return Err(KernelError("expected two operands".into()));
    };
    let (x, y) = (x.elements::<f32>()?, y.elements::<f32>()?);
    let out = results[0].elements::<f32>()?;
    out.iter_mut().zip(x.iter().zip(y)).for_each(|(z, (x, y))| *z = *a as f32 * x + y + 1000.0);
    Ok(())
}

#[test]
fn b20_a_user_op_runs_eagerly() {
    let outcomes = spawn(2, |mesh| {
        let (x, y) = (Tensor::from_iter([1.0f32, 2.0])?, Tensor::ones(Dtype::F32, &[2])?);
        let once = |a: f64| apply(&Axpy { a }, [x.clone(), y.clone()]);
        assert_eq!(once(3.0)?[0].to_vec::<f32>()?, [4.0, 7.0]);
        assert_eq!(once(3.0)?[0].varies(), ["world"]);
        mesh.add_kernel(Kernel { op: "axpy", family: "user", in_place: false, run });
        assert_eq!(once(3.0)?[0].to_vec::<f32>()?, [1004.0, 1007.0]);
        assert_eq!(once(-1.0)?[0].to_vec::<f32>()?, [1000.0, 999.0]);
        let error =
            apply(&Axpy { a: 1.0 }, [x.clone(), Tensor::ones(Dtype::F32, &[3])?]).unwrap_err().to_string();
        assert!(error.starts_with("axpy: expected y of shape [2], got [3] (C1)\n  at "), "{error}");
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
