//! The plan oracle: runs the plans of all ranks in one thread, on real bytes, with adversarial timing.
//!
//! Every region of a plan is an array of bytes, and every line reads and writes where it says. Events between a start
//! and its wait, and between the wait and the release, happen as early or as late as allowed:
//!
//! - the bytes of a result are poisoned by its start, and written when all starts that it needs have happened, or by
//!   the wait of this rank;
//! - the operands are read by the start, or as late as each member can: by its own wait, or when the rank that owns them
//!   releases them, or at the end. No leased byte of a start may have changed by then. Results are leased too: peers may
//!   gather from them;
//! - what a call finds in memory that is kept, or in an argument that was given away, is read by peers as late as they can:
//!   when a line says `release entry`, or at the end.
//!
//! Lines are as careless as allowed, too: a kernel poisons its results before it reads operands that are not exactly in
//! place, a start ignores gaps between elements, and the arena and the heap are poisoned after the call. A plan without
//! hazards gives the results of the program's oracle under every timing.

mod memory;
mod rank;

use std::fmt::Display;

use consort_ir::limits::{Excess, Limits, Resource};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::EvalCx;
use consort_ir::program::{Func, Node, Program};
use consort_ir::verify::verify;
use consort_types::{Rank, Rng};
use memory::{Memory, TypedPlacement};
use rank::PlanRank;

use crate::comm::{Comm, PendingId};
use crate::rank::Step;
use crate::{OracleError, Stuck, bind};

/// The timing of events that may happen early or late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// As early as possible; lower ranks run ahead.
    Earliest,
    /// As late as possible; higher ranks run ahead.
    Latest,
    /// As late as possible; this rank runs ahead of all others.
    Ahead(Rank),
    /// Early or late for each start of each rank, drawn from this seed. Rank `seed % n` runs ahead.
    Mixed(u64),
}

/// Runs the plans, one for each rank in order; `inputs` has the arguments of each. Fails if a line fails, on a
/// deadlock, or if an argument that was not donated was written.
pub fn run(
    mesh: &Mesh,
    plans: &[Func],
    inputs: &[Vec<Literal>],
    timing: Timing,
) -> Result<Vec<Vec<Literal>>, String> {
    let Some(first) = plans.first() else { return Err("there are no plans".into()) };
    let symbols = bind(mesh, first, inputs).map_err(|failure| failure.to_string())?;
    if plans.len() != inputs.len() {
        return Err(format!("expected {} plans, got {}", inputs.len(), plans.len()));
    }
    let limits = Limits::ORACLE;
    let (mut memories, mut bytes) = (Vec::new(), 0u64);
    for ((rank, plan), symbols) in (0u32..).map(Rank).zip(plans).zip(&symbols) {
        let program = Program { mesh: mesh.clone(), funcs: vec![plan.clone()] };
        let errors: Vec<_> =
            verify(&program).into_iter().filter(|error| error.failure.rule != "V9").collect();
        if !errors.is_empty() {
            return Err(OracleError::Program(errors).to_string());
        }
        let Some(head) = plan.plan.as_ref().filter(|head| head.rank == rank) else {
            return Err(format!("@{} is no plan for {rank}", plan.name));
        };
        if let Some((sym, _)) = head.symbols.iter().find(|(sym, value)| symbols.get(sym) != Some(value)) {
            return Err(format!("the plan of {rank} is for another value of {sym:?}"));
        }
        bytes = head.regions.iter().fold(bytes, |all, (_, size)| all.saturating_add(*size));
        Excess::check(Resource::Bytes, limits.bytes, bytes).map_err(|excess| at(rank, "plan", excess))?;
        memories.push(Memory::new(head, timing.poison()));
    }
    let mut world = World { comm: Comm::new(mesh, first), memories, flights: Vec::new(), timing };
    let mut ranks = Vec::new();
    for ((rank, plan), (symbols, inputs)) in
        (0u32..).map(Rank).zip(plans).zip(symbols.into_iter().zip(inputs))
    {
        ranks.push(PlanRank::new(mesh, plan, rank, symbols, inputs, &mut world)?);
    }
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    timing.arrange(&mut order);
    let mut steps = 0;
    // Steps the first rank that can advance, so that ranks early in the order run as far ahead as possible.
    loop {
        let mut moved = Step::Stands;
        for rank in &order {
            moved = ranks[*rank].step(&mut world)?;
            if moved == Step::Moved {
                break;
            }
        }
        if moved == Step::Stands {
            break;
        }
        steps += 1;
        Excess::check(Resource::Steps, limits.steps, steps).map_err(|excess| excess.to_string())?;
    }
    let stuck: Vec<Stuck> = ranks.iter().filter_map(|rank| rank.stuck(&world)).collect();
    if !stuck.is_empty() {
        return Err(OracleError::Deadlock(stuck).to_string());
    }
    for (rank, inputs) in ranks.iter().zip(inputs) {
        rank.check_arguments(inputs, &mut world)?;
    }
    for flight in 0..world.flights.len() {
        world.check_leased(PendingId(flight))?;
    }
    for (rank, memory) in (0u32..).map(Rank).zip(&mut world.memories) {
        memory.end_call().map_err(|error| at(rank, "return", error))?;
    }
    ranks.iter().map(|rank| rank.results(&mut world)).collect()
}

impl Timing {
    /// A float of 0xff bytes is NaN. A truth value of 0xff is true, so some runs use zeros.
    fn poison(self) -> u8 {
        match self {
            Timing::Mixed(seed) if seed % 4 == 3 => 0,
            _ => 0xff,
        }
    }

    fn arrange(self, order: &mut [usize]) {
        match self {
            Timing::Earliest => {}
            Timing::Latest => order.reverse(),
            Timing::Ahead(rank) => order.sort_by_key(|other| *other != rank.0 as usize),
            Timing::Mixed(seed) => {
                let mut rng = Rng::new(seed);
                let ahead = (seed % order.len() as u64) as usize;
                order.swap(0, ahead);
                for i in (2..order.len()).rev() {
                    let other = 1 + rng.below(i);
                    order.swap(i, other);
                }
            }
        }
    }

    fn pace(self, rank: usize, start: usize) -> Pace {
        match self {
            Timing::Earliest => Pace::Early,
            Timing::Latest | Timing::Ahead(_) => Pace::Late,
            Timing::Mixed(seed) => {
                let mut rng = Rng::new(seed ^ (rank as u64) << 32 ^ (start as u64) << 8);
                rng.pick(&[Pace::Early, Pace::LateWrite, Pace::Late])
            }
        }
    }
}

/// When a start of a rank reads the operands of all members and writes its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// Both at once, when all starts that it needs have happened.
    Early,
    /// Operands at their start, the result at the wait.
    LateWrite,
    /// Both at the wait.
    Late,
}

/// A start of a rank, until its release.
struct Flight {
    rank: usize,
    pace: Pace,
    results: Vec<TypedPlacement>,
    /// Bytes that peers may read and that must not change: operands from the start, results once they are written.
    leased: Vec<(TypedPlacement, Vec<u8>)>,
    written: bool,
    /// Whether a line of its own block has waited for it.
    waited_here: bool,
    released: bool,
}

struct World<'a> {
    comm: Comm<'a>,
    memories: Vec<Memory>,
    /// Indexed by `PendingId`.
    flights: Vec<Flight>,
    timing: Timing,
}

impl<'a> World<'a> {
    /// Starts an operation of a rank with these operands; those in `leased` are read in place.
    fn start(
        &mut self,
        cx: &EvalCx<'_>,
        node: &'a Node,
        args: Vec<Literal>,
        results: Vec<TypedPlacement>,
        leased: &[TypedPlacement],
    ) -> Result<PendingId, String> {
        let rank = cx.rank.0 as usize;
        let memory = &mut self.memories[rank];
        let leased: Result<Vec<_>, String> =
            leased.iter().map(|seat| Ok((seat.clone(), memory.bytes(seat)?))).collect();
        let pace = self.timing.pace(rank, self.flights.len());
        self.flights.push(Flight {
            rank,
            pace,
            results,
            leased: leased?,
            written: false,
            waited_here: false,
            released: false,
        });
        let id = self.comm.start(cx, node, args).map_err(|error| error.to_string())?;
        let early = (0..self.flights.len()).filter(|at| {
            let flight = &self.flights[*at];
            flight.pace == Pace::Early && !flight.written && self.comm.ready(PendingId(*at))
        });
        for at in early.collect::<Vec<_>>() {
            self.complete(PendingId(at))?;
        }
        Ok(id)
    }

    /// Checks that no line has changed bytes that an operation still leases.
    fn check_leased(&mut self, PendingId(at): PendingId) -> Result<(), String> {
        let flight = &self.flights[at];
        for (seat, bytes) in flight.leased.iter().filter(|_| !flight.released) {
            if self.memories[flight.rank].bytes(seat)? != *bytes {
                let place = seat.placement.place;
                return Err(format!("rank {}: {place} was written before its release", flight.rank));
            }
        }
        Ok(())
    }

    /// Completes an operation that is ready: reads what it has not read yet and writes its results.
    fn complete(&mut self, id: PendingId) -> Result<(), String> {
        if self.flights[id.0].written {
            return Ok(());
        }
        if self.flights[id.0].pace == Pace::Late {
            for source in self.comm.sources(id).to_vec() {
                self.check_leased(source)?;
            }
        }
        let tensors = self.comm.take(id);
        let flight = &mut self.flights[id.0];
        let memory = &mut self.memories[flight.rank];
        for (seat, tensor) in flight.results.iter().zip(&tensors) {
            memory.write(seat, tensor)?;
        }
        for seat in &flight.results {
            flight.leased.push((seat.clone(), memory.bytes(seat)?));
        }
        flight.written = true;
        Ok(())
    }

    /// Ends the lease of an operation, whose bytes must not have changed. False if it cannot end yet.
    fn release(&mut self, id: PendingId) -> Result<bool, String> {
        if !self.comm.ready(id) {
            return Ok(false);
        }
        self.check_leased(id)?;
        self.flights[id.0].released = true;
        Ok(true)
    }
}

fn at(rank: Rank, op: &str, error: impl Display) -> String {
    format!("{op}: {rank}: {error}")
}
