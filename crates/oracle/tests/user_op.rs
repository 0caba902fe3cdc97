//! SPEC B20: an op that a user declares is read, printed, verified and run like a built-in one.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::index::Index;
use consort_ir::literal::{Data, Literal};
use consort_ir::op;
use consort_ir::ops::{Cost, CostCx, EvalCx, EvalError, InferCx, OpDef, OpTable};
use consort_ir::text::{parse, print, run_lines};
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_oracle::run;
use consort_types::{Collective, Failure, GroupName, Kind};

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
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (x, y) = (cx.tensor(0)?, cx.tensor(1)?);
        if x.dtype != y.dtype || !x.dtype.is_float() {
            return Err(Failure::rule(
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
    fn eval(&self, cx: &EvalCx<'_>, args: &[&Literal]) -> Result<Vec<Literal>, EvalError> {
        let shift = cx.index(&self.shift)? as f64;
        let (Data::Float(x), Data::Float(y)) = (&args[0].data, &args[1].data) else {
            return Err(EvalError::new("expected floats"));
        };
        let data = x.iter().zip(y).map(|(x, y)| self.a * x + y + shift).collect();
        Ok(vec![Literal::floats(args[0].dtype, args[0].shape.clone(), data)])
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

op! {
    /// Sends one tensor and receives another.
    pub struct SwapStart("swap_start")(x) {
        /// The group.
        over: GroupName
    }
    example "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[2]{tp} {\n    v1 = swap_start[over=tp] v0 : pending<f32[2]{tp}>\n    v2 = wait v1 : f32[2]{tp}\n    return v2\n}\n"
}

impl OpDef for SwapStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        Ok(vec![Type::Pending(vec![cx.tensor(0)?.clone()])])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.free()
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective::new(Kind::Exchange, self.over))
    }
}

/// It describes no message, so that nothing would be received.
#[test]
fn b20_a_start_that_contradicts_its_messages_does_not_verify() {
    static INFO: consort_ir::ops::OpInfo = SwapStart::INFO;
    let mut ops = OpTable::built_in();
    assert!(ops.add(&INFO));
    let errors = verify(&parse(INFO.example, &ops).unwrap().program);
    let headlines: Vec<String> = errors.iter().map(|error| error.headline()).collect();
    assert_eq!(
        headlines[0], "error[verify]: swap_start: expected 0 operands of exchange, got 1",
        "{headlines:?}"
    );
}
