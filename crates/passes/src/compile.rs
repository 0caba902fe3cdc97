//! The one way from a program to a plan: [`compile`] decides everything that is the same on all ranks, and
//! [`Decided::bind`] makes the plan of one rank for given sizes. Each stage is verified, in every build.

use std::fmt;

use consort_ir::diagnostic::Diagnostic;
use consort_ir::mesh::Mesh;
use consort_ir::program::{Func, Program};
use consort_ir::text::print;
use consort_ir::verify::{hazards, verify};
use consort_types::Failure;

use crate::blame::of_user_op;
use crate::pipeline::{PASSES, PassError, Ran, simplify};
use crate::plan::{Binding, PlanError, plan};

/// Options and observers of the passes.
pub struct PassCx<'a> {
    /// The most rewrites. To find a rewrite that breaks a program, bisect this
    /// number.
    pub fuel: u64,
    /// Whether communication may be under a condition that differs between ranks (V9). Such a program may complete; if
    /// it does not, a run reports which ranks wait.
    pub may_diverge: bool,
    watch: Option<&'a mut dyn FnMut(Stage<'_>)>,
}

impl Default for PassCx<'_> {
    fn default() -> Self {
        PassCx { fuel: u64::MAX, may_diverge: false, watch: None }
    }
}

impl<'a> PassCx<'a> {
    /// A context that calls `watch` after each stage.
    pub fn watched(watch: &'a mut dyn FnMut(Stage<'_>)) -> PassCx<'a> {
        PassCx { watch: Some(watch), ..PassCx::default() }
    }

    /// The errors of a program.
    pub(crate) fn verify(&self, program: &Program) -> Vec<Diagnostic> {
        let mut errors = verify(program);
        errors.retain(|error| !(self.may_diverge && error.failure.rule == "V9"));
        errors
    }

    pub(crate) fn over(&mut self, stage: Stage<'_>) {
        if let Some(watch) = &mut self.watch {
            watch(stage);
        }
    }
}

/// A completed stage.
#[derive(Clone, Copy, Debug)]
pub enum Stage<'a> {
    /// A pass ran; its program is not verified yet.
    Pass(Ran<'a>),
    /// The program after the stage of this name was verified.
    Verified(&'static str),
    /// A plan was made.
    Planned,
    /// A plan was checked for hazards.
    Checked,
}

/// Why a program could not be compiled.
#[derive(Clone, Debug, PartialEq)]
pub enum CompileError {
    /// The program does not verify.
    Program(Vec<Diagnostic>),
    /// A pass refused the program, or broke it.
    Pass(PassError),
    /// There is no function of this name.
    Func(String),
    /// It could not be planned for this binding.
    Plan(PlanError),
    /// The plan has a hazard: a defect of the planner.
    Hazard {
        /// The hazard.
        error: Box<Diagnostic>,
        /// The plan.
        plan: String,
    },
    /// A user's op contradicts itself, so that its line of the plan has a hazard.
    UserOp(Box<Failure>),
}

impl CompileError {
    /// Whether it is a defect of consort, and not of the program.
    pub fn is_defect(&self) -> bool {
        matches!(self, CompileError::Pass(PassError::Broken { .. }) | CompileError::Hazard { .. })
    }

    /// The error as a [`Failure`]; of a program that does not verify, the first one.
    pub fn failure(&self) -> Box<Failure> {
        match self {
            CompileError::Program(errors) => match errors.first() {
                Some(error) => error.failure.clone(),
                None => Failure::new("the program does not verify"),
            },
            CompileError::Pass(error) => error.failure(),
            CompileError::Func(name) => Failure::new(format!("there is no function @{name}")),
            CompileError::Plan(error) => error.failure(),
            CompileError::UserOp(failure) => failure.clone(),
            CompileError::Hazard { error, plan } => {
                let headline = error.headline();
                Failure::new(format!("the plan is wrong, which is a defect of consort: {headline}\n{plan}"))
            }
        }
    }
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompileError::Program(errors) => {
                let headlines: Vec<String> = errors.iter().map(Diagnostic::headline).collect();
                f.write_str(&headlines.join("\n"))
            }
            _ => self.failure().fmt(f),
        }
    }
}

impl std::error::Error for CompileError {}

/// A program with all decisions that do not depend on a rank or on sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    program: Program,
}

/// Compiles a program, to the stage that all ranks agree on.
pub fn compile(program: &Program, cx: &mut PassCx<'_>) -> Result<Decided, CompileError> {
    let errors = cx.verify(program);
    if !errors.is_empty() {
        return Err(CompileError::Program(errors));
    }
    cx.over(Stage::Verified("trace"));
    let program = simplify(program, PASSES, cx).map_err(CompileError::Pass)?;
    Ok(Decided { program })
}

impl Decided {
    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The mesh of the program.
    pub fn mesh(&self) -> &Mesh {
        &self.program.mesh
    }

    /// A function of the program.
    pub fn func(&self, name: &str) -> Option<&Func> {
        self.program.funcs.iter().find(|func| func.name == name)
    }

    /// The plan of one rank for a function, at given sizes.
    pub fn bind(&self, func: &str, binding: &Binding<'_>, cx: &mut PassCx<'_>) -> Result<Func, CompileError> {
        let func = self.func(func).ok_or_else(|| CompileError::Func(func.to_string()))?;
        let plan = plan(self.mesh(), func, binding).map_err(CompileError::Plan)?;
        cx.over(Stage::Planned);
        if let Some(error) = hazards(self.mesh(), &plan).into_iter().next() {
            if let Some(failure) = of_user_op(std::slice::from_ref(&plan), &error) {
                return Err(CompileError::UserOp(failure));
            }
            let plan = print(&Program { mesh: self.mesh().clone(), funcs: vec![plan] });
            return Err(CompileError::Hazard { error: Box::new(error), plan });
        }
        cx.over(Stage::Checked);
        Ok(plan)
    }
}
