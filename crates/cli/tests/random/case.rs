//! One random program, its plans, and the expected results.

use std::time::Duration;

use consort_comm::spawn_with_heap;
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::OpDef;
use consort_ir::program::{Func, Program};
use consort_ir::text::{Expect, print};
use consort_ir::tolerance;
use consort_ir::types::Type;
use consort_ir::verify::{hazards, verify};
use consort_oracle::plan::{Timing, run};
use consort_oracle::{bind, generate, naive};
use consort_passes::{Binding, PASSES, PassCx, Wanted, float_arguments, gradient, plan, simplify};
use consort_types::{Dtype, Rank, Reduce};

use super::{grown, rank};

/// How long an operation may wait for other ranks, on a machine that is busy with many.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes of each rank's heap, where ranks are threads.
const HEAP: usize = 1 << 22;

/// How results compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// They are those of the oracle: the same bits, or within the tolerance of the program's ops.
    Same,
    /// They are not, and neither are those of a plan in which every value has its own place: kernels round differently
    /// from the reference, and a discontinuous op amplified the difference.
    Rounded,
}

/// A program and its results by the oracle.
pub(crate) struct Case {
    seed: u64,
    program: Program,
    inputs: Vec<Vec<Literal>>,
    expected: Vec<Vec<Literal>>,
    /// The tolerance of results; zero for every other program that is no gradient.
    tolerance: f64,
    /// The plans of all ranks: first of the program as written, then of the simplified one.
    plans: [Vec<Func>; 2],
}

/// Whether the executor computes the bits of the reference: its kernel is exact, and reductions have a fixed order.
fn is_exact(mesh: &Mesh, op: &dyn OpDef, args: &[Type]) -> bool {
    let reduce = op.collective().and_then(|collective| Some((collective.reduce?, collective.over)));
    match reduce {
        _ if args.iter().flat_map(Type::tensors).all(|ty| !ty.dtype.is_float()) => true,
        Some((Reduce::Min | Reduce::Max, _)) => true,
        Some((Reduce::Sum | Reduce::Product, over)) => mesh.group_size(over) <= 2,
        Some(_) => false,
        None => op.tolerance().is_exact(Dtype::F32),
    }
}

/// Seeds from here on are those of gradients.
pub(crate) const GRADIENTS: u64 = 1 << 32;

/// The program of a seed and its inputs: every other program consists of exact ops. That of a gradient is the program of a
/// loss with its gradient by all floats, for every third seed with nothing kept that can be computed again; `None` if there is
/// no such gradient. Which refusals are right is tested with the passes.
fn program(seed: u64) -> Option<(Program, Vec<Vec<Literal>>)> {
    let size = 4 + seed as usize % 28;
    if seed >= GRADIENTS {
        let loss = grown::program(seed - GRADIENTS, size)?;
        let budget = seed.is_multiple_of(3).then_some(0);
        let wanted = Wanted { budget, ..Wanted::by(float_arguments(&loss.funcs[0])) };
        let inputs = grown::inputs(&loss, seed);
        return Some((gradient(&loss, "f", &wanted).ok()?.program, inputs));
    }
    let program = match seed.is_multiple_of(2) {
        true => generate::program_of(seed, size, &is_exact),
        false => generate::program(seed, size),
    };
    let inputs = generate::inputs(&program, seed);
    Some((program, inputs))
}

/// The number of ranks of a seed's program; `None` if the seed has none.
pub(crate) fn ranks(seed: u64) -> Option<usize> {
    program(seed).map(|(program, _)| program.mesh.n_ranks() as usize)
}

impl Case {
    /// The case of a seed, up to its plans; `None` if the seed has no program.
    pub(crate) fn new(seed: u64) -> Result<Option<Case>, String> {
        let Some((program, inputs)) = program(seed) else { return Ok(None) };
        let text = || print(&program);
        if let Some(error) = verify(&program).first() {
            return Err(format!("verify: {}\n{}", error.headline(), text()));
        }
        let expected = consort_oracle::run(&program, "f", &inputs)
            .map_err(|error| format!("oracle: {error}\n{}", text()))?;
        let simple = simplify(&program, PASSES, &mut PassCx::default())
            .map_err(|error| format!("simplify: {error}\n{}", text()))?;
        let exact = seed.is_multiple_of(2) && seed < GRADIENTS;
        let tolerance = if exact { 0.0 } else { tolerance::of_func(&program.funcs[0]) };
        let plans = [Case::plans(&program, &inputs, seed)?, Case::plans(&simple, &inputs, seed)?];
        Ok(Some(Case { seed, program, inputs, expected, tolerance, plans }))
    }

    fn plans(program: &Program, inputs: &[Vec<Literal>], seed: u64) -> Result<Vec<Func>, String> {
        let (mesh, func) = (&program.mesh, &program.funcs[0]);
        let symbols = bind(mesh, func, inputs).map_err(|failure| failure.to_string())?;
        let of = |(rank, symbols)| {
            // Which arguments are donated differs between ranks.
            let given = |param: usize| seed >> ((rank as usize + param) % 5) & 1 == 1;
            let donated: Vec<bool> = (0..func.body.params.len()).map(given).collect();
            let planned = plan(mesh, func, &Binding { rank: Rank(rank), symbols, donated: &donated });
            planned.map_err(|error| format!("plan: {error}\n{}", print(program)))
        };
        (0u32..).zip(&symbols).map(of).collect()
    }

    fn text(&self, plan: &Func) -> String {
        print(&Program { mesh: self.program.mesh.clone(), funcs: vec![plan.clone()] })
    }

    /// Plans have no hazards, and compute the results on bytes, whatever the timing.
    pub(crate) fn check_plans(&self) -> Result<(), String> {
        let mesh = &self.program.mesh;
        let seed = self.seed;
        let ahead = Rank((seed % u64::from(mesh.n_ranks())) as u32);
        let timings = [
            Timing::Earliest,
            Timing::Latest,
            Timing::Ahead(ahead),
            Timing::Mixed(seed),
            Timing::Mixed(seed.wrapping_add(1)),
        ];
        for plans in &self.plans {
            for plan in plans {
                let errors = verify(&Program { mesh: mesh.clone(), funcs: vec![plan.clone()] });
                if let Some(error) = errors.first().or(hazards(mesh, plan).first()) {
                    return Err(format!("{}\n{}", error.headline(), self.text(plan)));
                }
            }
            for timing in timings {
                let got = run(mesh, plans, &self.inputs, timing);
                let got = got.map_err(|error| format!("{timing:?}: {error}\n{}", self.text(&plans[0])))?;
                if let Some((rank, what)) = self.differs(&got, 0.0) {
                    let plan = self.text(&plans[rank]);
                    return Err(format!("plan oracle, {timing:?}, rank {rank}: {what}\n{plan}"));
                }
            }
        }
        Ok(())
    }

    /// The first rank whose results are not those of the oracle, and what differs.
    fn differs(&self, got: &[Vec<Literal>], tolerance: f64) -> Option<(usize, String)> {
        (0..got.len()).find_map(|rank| Some((rank, self.rank_differs(rank, &got[rank], tolerance)?)))
    }

    fn rank_differs(&self, rank: usize, got: &[Literal], tolerance: f64) -> Option<String> {
        let expected = &self.expected[rank];
        if expected.len() != got.len() {
            return Some(format!("expected {} results, got {}", expected.len(), got.len()));
        }
        let mut pairs = expected.iter().zip(got).enumerate();
        let (i, (a, b)) = pairs.find(|(_, (a, b))| !Expect::close(a, b, tolerance))?;
        Some(format!("result {i}: expected {}, got {}", a.text(), b.text()))
    }

    /// This rank's results of the second run of a plan: its memory has been used before.
    fn play(&self, plan: &Func, all: &consort_comm::Group) -> Result<Vec<Literal>, String> {
        let mut ready = rank::Ready::new(&self.program.mesh, plan.clone(), all, TIMEOUT)
            .map_err(|failure| failure.message)?;
        let inputs = &self.inputs[all.rank()];
        let first = ready.run(inputs).map_err(|failure| failure.message)?;
        let again = ready.run(inputs).map_err(|failure| failure.message)?;
        match first.iter().zip(&again).all(|(a, b)| a.same(b)) {
            true => Ok(again),
            false => Err("a second call gives something else".into()),
        }
    }

    fn threads(&self, plans: &[Func]) -> Result<Vec<Vec<Literal>>, String> {
        let got = spawn_with_heap(plans.len(), HEAP, |all| self.play(&plans[all.rank()], &all));
        // Failures that follow from another rank's say less than that rank's.
        let follows = |error: &&String| error.contains("has left the group");
        let errors: Vec<&String> = got.iter().filter_map(|got| got.as_ref().err()).collect();
        match errors.iter().find(|error| !follows(error)).or(errors.first()) {
            Some(error) => Err(error.to_string()),
            None => Ok(got.into_iter().flatten().collect()),
        }
    }

    /// The executor gives the results, with ranks that are threads.
    pub(crate) fn run_on_threads(&self) -> Result<Outcome, String> {
        for plans in &self.plans {
            let got =
                self.threads(plans).map_err(|error| format!("threads: {error}\n{}", self.text(&plans[0])))?;
            let Some((rank, what)) = self.differs(&got, self.tolerance) else { continue };
            if self.tolerance > 0.0 && self.is_rounded(&got)? {
                return Ok(Outcome::Rounded);
            }
            return Err(format!("threads, rank {rank}: {what}\n{}", self.text(&plans[rank])));
        }
        Ok(Outcome::Same)
    }

    /// Whether a plan that shares no storage computes the same as these results.
    fn is_rounded(&self, got: &[Vec<Literal>]) -> Result<bool, String> {
        let (mesh, func) = (&self.program.mesh, &self.program.funcs[0]);
        let symbols = bind(mesh, func, &self.inputs).map_err(|failure| failure.to_string())?;
        let plans = (0u32..).zip(&symbols);
        let plans: Vec<Func> =
            plans.map(|(rank, symbols)| naive::plan(mesh, func, Rank(rank), symbols, false)).collect();
        let plain = self.threads(&plans)?;
        let close = |(a, b): (&Literal, &Literal)| Expect::close(a, b, self.tolerance);
        Ok(plain.iter().flatten().zip(got.iter().flatten()).all(close))
    }

    /// The same on one rank that is a process, with the simplified program.
    pub(crate) fn run_here(&self, all: &consort_comm::Group) -> Result<(), String> {
        let rank = all.rank();
        let plan = &self.plans[1][rank];
        let got = self.play(plan, all)?;
        match self.rank_differs(rank, &got, self.tolerance) {
            None => Ok(()),
            Some(what) => Err(format!("rank {rank}: {what}\n{}", self.text(plan))),
        }
    }
}
