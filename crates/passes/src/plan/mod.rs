//! Gives every tensor a place: what shares storage, what is done in place, and where it all lies in memory.
//!
//! Assumes: the program verifies, and its lines stand in the order in which they are to run. Keeps: the lines and their
//! order. Promises: what `consort_ir::plan` says of each annotation.
//!
//! 1. `uses`: when each value is used last.
//! 2. `decide`: line by line, which storage each result gets: that of an operand (a view, or work in place), or its
//!    own. Ops that join make the storage of their parts a piece of the whole's, if nobody is in the way.
//! 3. `pack`: offsets in memory for storage that is the plan's own.
//! 4. `annotate`: the plan as text has it, with leases and releases.

mod annotate;
mod control;
mod decide;
mod pack;
mod report;
mod storage;
mod uses;

use std::collections::BTreeMap;
use std::fmt;

use consort_ir::index::Sym;
use consort_ir::mesh::{Mesh, Rank};
use consort_ir::ops::EvalCx;
use consort_ir::plan::{Head, Place, Region};
use consort_ir::program::Func;

pub use report::{PlanReport, report};

use decide::Planner;
use pack::{Block, pack};
use storage::{Kind, Storage};

/// Why a program could not be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// A size has no value for this rank and these symbols.
    UnknownSize {
        /// The function.
        func: String,
        /// The type, as programs write it.
        ty: String,
        /// The size, and why it has no value.
        why: String,
    },
    /// A tensor, or all of them together, would not fit in 64 bits.
    TooLarge {
        /// The function.
        func: String,
        /// What was one too many.
        what: String,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::UnknownSize { func, ty, why } => {
                write!(f, "plan: @{func}: expected sizes that are known, got {ty}: {why}")?;
                write!(f, "\n  note: a plan is made for given values of the symbols; give each of them one")
            }
            PlanError::TooLarge { func, what } => {
                write!(f, "plan: @{func}: {what} does not fit in 64 bits of memory")
            }
        }
    }
}

impl std::error::Error for PlanError {}

/// For which rank and sizes a plan is made, and which arguments it may overwrite.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    /// The rank.
    pub rank: Rank,
    /// What the backed symbols are.
    pub symbols: &'a BTreeMap<Sym, i64>,
    /// Whether each parameter's storage is given away; false where the list is too short.
    pub donated: &'a [bool],
}

/// The function with a place for every tensor, a queue and a number for every start.
pub fn plan(mesh: &Mesh, func: &Func, at: &At<'_>) -> Result<Func, PlanError> {
    let sizes = EvalCx { mesh, rank: at.rank, symbols: at.symbols };
    let mut planner = Planner::new(func, sizes);
    planner.func(at.donated)?;
    let regions = place(&mut planner, func)?;
    let given = func.body.params.iter().zip(at.donated).filter(|(_, donated)| **donated);
    let head = Head {
        rank: at.rank,
        symbols: at.symbols.iter().map(|(sym, value)| (*sym, *value)).collect(),
        regions: regions.into_iter().collect(),
        donated: given.map(|(param, _)| *param).collect(),
    };
    let mut planned = func.clone();
    annotate::annotate(planner, &mut planned);
    planned.plan = Some(Box::new(head));
    Ok(planned)
}

/// Gives all storage its place; the regions and their sizes.
fn place(planner: &mut Planner<'_>, func: &Func) -> Result<BTreeMap<Region, u64>, PlanError> {
    let mut regions = BTreeMap::new();
    // What is returned is numbered in the order in which it is.
    let (mut outs, mut dyns) = (0, 0);
    for result in &func.body.results {
        for part in planner.parts_of(*result) {
            let buf = planner.storage.span(part).buf;
            out(&mut planner.storage, buf, &mut outs, &mut regions);
        }
    }
    let mut packed: [(Region, Vec<u32>, Vec<Block>); 2] =
        [(Region::Arena, Vec::new(), Vec::new()), (Region::Heap, Vec::new(), Vec::new())];
    for number in 0..planner.storage.bufs.len() as u32 {
        if planner.storage.root(number).0 != number {
            continue;
        }
        out(&mut planner.storage, number, &mut outs, &mut regions);
        let buf = &mut planner.storage.bufs[number as usize];
        let region = match buf.kind {
            _ if buf.place.is_some() => continue,
            Kind::Own => {
                let (_, numbers, blocks) = &mut packed[usize::from(buf.shared)];
                numbers.push(number);
                blocks.push(Block { def: buf.def, last: buf.last, size: buf.size });
                continue;
            }
            Kind::Arg(param) => Region::Arg(param),
            Kind::Dyn => {
                dyns += 1;
                Region::Dyn(dyns - 1)
            }
        };
        buf.place = Some(Place { region, offset: 0 });
        regions.insert(region, buf.size);
    }
    for (region, numbers, blocks) in packed {
        if numbers.is_empty() {
            continue;
        }
        let (offsets, size) = pack(&blocks).ok_or_else(|| PlanError::TooLarge {
            func: func.name.clone(),
            what: "all of its memory together".to_string(),
        })?;
        regions.insert(region, size);
        for (number, offset) in numbers.into_iter().zip(offsets) {
            planner.storage.bufs[number as usize].place = Some(Place { region, offset });
        }
    }
    Ok(regions)
}

/// Gives storage that outlives the call a region of its own, once.
fn out(storage: &mut Storage, buf: u32, next: &mut u32, regions: &mut BTreeMap<Region, u64>) {
    let buf = &mut storage.bufs[buf as usize];
    if buf.kind == Kind::Own && buf.outlives && buf.place.is_none() {
        let region = Region::Out(*next);
        *next += 1;
        buf.place = Some(Place { region, offset: 0 });
        regions.insert(region, buf.size);
    }
}
