//! SPEC B20: an op that a user declares is read, printed, verified and run like a built-in one.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::index::Index;
use consort_ir::op;
use consort_ir::ops::{Cost, CostCx, EvalCx, EvalError, InferCx, OpDef, OpTable, Violation};
use consort_ir::tensor::{Data, Tensor};
use consort_ir::text::{parse, print, run_lines};
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_oracle::run;

op! {
    /// `a * x + y`, in one go.
    ///
    /// (C1) Both operands are float tensors of one type and shape.
    pub struct Axpy("axpy")(x, y) {
        /// The factor.
        a: f64,
        /// Added to every place, to show a size expression.
        shift: Index
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[s0]{tp}, v1: f32[s0]) -> f32[s0]{tp} {\n    v2 = axpy[a=2.0, shift=s0] v0, v1 : f32[s0]{tp}\n    return v2\n}\n; run: @f([1, 2] | [3, 4], [10, 20]) == [14, 26] | [18, 30]\n"
}

impl OpDef for Axpy {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let (x, y) = (cx.tensor(0)?, cx.tensor(1)?);
        if x.dtype != y.dtype || !x.dtype.is_float() {
            return Err(Violation::new(
                "C1",
                format!("expected one float type, got {} and {}", x.dtype, y.dtype),
            ));
        }
        cx.require_same_shape("C1", "y of shape", &x.shape, &y.shape)?;
        Ok(vec![x.clone().into()])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.kernel(cx.result_numel())
    }
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Tensor]) -> Result<Vec<Tensor>, EvalError> {
        let shift = cx.index(&self.shift)? as f64;
        let (Data::Float(x), Data::Float(y)) = (&args[0].data, &args[1].data) else {
            return Err(EvalError("expected floats".into()));
        };
        let data = x.iter().zip(y).map(|(x, y)| self.a * x + y + shift).collect();
        Ok(vec![Tensor::floats(args[0].dtype, args[0].shape.clone(), data)])
    }
}

static INFO: consort_ir::ops::OpInfo = Axpy::INFO;

#[test]
fn b20_a_user_op_is_like_a_built_in_one() {
    let mut ops = OpTable::built_in();
    assert!(ops.add(&INFO));
    assert!(!ops.add(&INFO), "a name can be taken once");
    let program = parse(INFO.example, &ops).unwrap().program;
    assert_eq!(verify(&program), []);
    assert_eq!(parse(&print(&program), &ops).unwrap().program, program);
    for line in run_lines(INFO.example).unwrap() {
        let outcome = run(&program, "f", &line.inputs(&program).unwrap()).map_err(|error| error.to_string());
        line.check(&program, &outcome).unwrap();
    }
    let wrong = INFO.example.replace("v1: f32[s0])", "v1: f64[s0])");
    let errors = verify(&parse(&wrong, &ops).unwrap().program);
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0].headline(), "error[type]: axpy: expected one float type, got f32 and f64 (C1)");
    assert!(parse(INFO.example, &OpTable::built_in()).is_err(), "unknown to a table without it");
}
