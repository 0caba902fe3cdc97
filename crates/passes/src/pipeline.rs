//! The passes that simplify a program, in the order in which they run.
//!
//! A pass is a function from program to program and one line in [`PASSES`]. Each leaves a program that verifies and
//! gives bit-identical results on all ranks. The decisions of a pass depend on the program alone, which holds no rank,
//! so all ranks get the same program.

use std::fmt;

use consort_ir::diagnostic::Diagnostic;
use consort_ir::program::Program;
use consort_types::Failure;

use crate::blame::of_user_op;
use crate::compile::{PassCx, Stage};
use crate::{fold, remove, share};

/// A pass.
#[derive(Debug)]
pub struct Pass {
    /// Its name, as the command line and the dumps spell it.
    pub name: &'static str,
    /// What it does, in a line.
    pub doc: &'static str,
    run: fn(&mut Program, &mut Fuel),
}

/// The passes in order. Folding comes first, because it makes nodes equal; sharing leaves dead values, so removal comes
/// last.
pub const PASSES: &[Pass] = &[
    Pass {
        name: "fold",
        doc: "computes what is constant, and drops ops that change nothing",
        run: fold::run,
    },
    Pass { name: "share", doc: "computes and communicates equal things once", run: share::run },
    Pass { name: "remove", doc: "removes what nothing uses", run: remove::run },
];

/// The most rounds over all passes.
const MAX_ROUNDS: usize = 4;

/// The pass of this name.
pub fn pass(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|pass| pass.name == name)
}

/// The number of rewrites left.
#[derive(Debug)]
pub(crate) struct Fuel {
    left: u64,
    burnt: u64,
}

impl Fuel {
    /// Fuel for `left` rewrites.
    pub(crate) fn new(left: u64) -> Fuel {
        Fuel { left, burnt: 0 }
    }

    /// Takes one unit; false if none is left, and then the rewrite must not be made.
    pub(crate) fn burn(&mut self) -> bool {
        let some = self.left > 0;
        self.left -= u64::from(some);
        self.burnt += u64::from(some);
        some
    }

    /// Whether no fuel is left.
    pub(crate) fn is_out(&self) -> bool {
        self.left == 0
    }
}

/// The outcome of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Ran<'a> {
    /// The pass.
    pub pass: &'static Pass,
    /// How many rewrites it made.
    pub rewrites: u64,
    /// The program after it, not verified yet.
    pub program: &'a Program,
}

/// Why simplification failed.
#[derive(Clone, Debug, PartialEq)]
pub enum PassError {
    /// A function already has places, which a rewrite would invalidate.
    Planned {
        /// The function.
        func: String,
    },
    /// A pass left a program that does not verify: a defect of the pass.
    Broken {
        /// The pass.
        pass: &'static str,
        /// What the verifier says.
        errors: Vec<Diagnostic>,
    },
    /// A user's op accepted a program and refuses what a pass made of it.
    UserOp(Box<Failure>),
}

impl PassError {
    /// The error as a [`Failure`].
    pub fn failure(&self) -> Box<Failure> {
        match self {
            PassError::Planned { func } => Failure::new(("a program", "a plan"))
                .of(format!("@{func}"))
                .note("passes change what is computed, and a plan has places for it already"),
            PassError::UserOp(failure) => failure.clone(),
            PassError::Broken { pass, errors } => {
                let broken = "the program does not verify any more; this is a defect of consort";
                let failure = Failure::new(broken).of(format!("pass {pass}"));
                errors.iter().fold(failure, |failure, error| failure.row(error.headline()))
            }
        }
    }
}

impl fmt::Display for PassError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl std::error::Error for PassError {}

/// Runs passes in order until none of them changes anything, for at most `MAX_ROUNDS` rounds. The program must
/// verify.
pub fn simplify(
    program: &Program,
    passes: &'static [Pass],
    cx: &mut PassCx<'_>,
) -> Result<Program, PassError> {
    if let Some(func) = program.funcs.iter().find(|func| func.plan.is_some()) {
        return Err(PassError::Planned { func: func.name.clone() });
    }
    let mut program = program.clone();
    let mut fuel = Fuel::new(cx.fuel);
    for _ in 0..MAX_ROUNDS {
        let before_round = fuel.burnt;
        for pass in passes {
            let before = fuel.burnt;
            (pass.run)(&mut program, &mut fuel);
            let rewrites = fuel.burnt - before;
            cx.over(Stage::Pass(Ran { pass, rewrites, program: &program }));
            if rewrites > 0 {
                let errors = cx.verify(&program);
                if let Some(failure) = errors.first().and_then(|error| of_user_op(&program.funcs, error)) {
                    return Err(PassError::UserOp(failure));
                }
                if !errors.is_empty() {
                    return Err(PassError::Broken { pass: pass.name, errors });
                }
                cx.over(Stage::Verified(pass.name));
            }
        }
        if fuel.burnt == before_round || fuel.is_out() {
            break;
        }
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use consort_ir::ops::OpTable;
    use consort_ir::text::parse;
    use consort_types::Rank;

    const TEXT: &str =
        "mesh ()\n\nfunc @f(v0: f32[4]) -> f32[4] {\n    v1 = neg v0 : f32[4]\n    return v1\n}\n";

    /// A broken pass that drops a node whose result is used.
    static SPOILS: [Pass; 1] = [Pass {
        name: "spoil",
        doc: "",
        run: |program, fuel| {
            if fuel.burn() {
                program.funcs[0].body.nodes.pop();
            }
        },
    }];

    #[test]
    fn a_pass_that_breaks_the_program_is_named() {
        let program = parse(TEXT, &OpTable::built_in()).unwrap().program;
        let mut seen = Vec::new();
        let mut watch = |stage: Stage<'_>| {
            if let Stage::Pass(ran) = stage {
                seen.push(ran.rewrites);
            }
        };
        let error = simplify(&program, &SPOILS, &mut PassCx::watched(&mut watch)).unwrap_err();
        let expected = "pass spoil: the program does not verify any more; this is a defect of consort\n  \
                        error[verify]: return: v1 is not defined before it is used (V1)";
        assert_eq!((error.to_string().as_str(), &seen[..]), (expected, &[1][..]));
        let mut no_fuel = PassCx::default();
        no_fuel.fuel = 0;
        assert_eq!(simplify(&program, &SPOILS, &mut no_fuel), Ok(program));
    }

    #[test]
    fn a_plan_is_refused() {
        let program = parse(TEXT, &OpTable::built_in()).unwrap().program;
        let at = crate::Binding { rank: Rank(0), symbols: &std::collections::BTreeMap::new(), donated: &[] };
        let func = crate::plan(&program.mesh, &program.funcs[0], &at).unwrap();
        let planned = Program { mesh: program.mesh, funcs: vec![func] };
        let error = simplify(&planned, PASSES, &mut PassCx::default()).unwrap_err();
        assert_eq!(error, PassError::Planned { func: "f".into() });
    }
}
