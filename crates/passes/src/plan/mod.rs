//! Assigns a place to every tensor: which share storage, which are computed in place, and where they lie in memory.
//!
//! Assumes: the program verifies, and its lines are in execution order. Keeps: the lines and their order. Guarantees:
//! the meaning of each annotation in `consort_ir::plan`.
//!
//! 1. `uses`: liveness, the last use of each value.
//! 2. `decide`: line by line, which storage each result gets: that of an operand (a view, or in place), or its own.
//!    Joins make the storage of their parts a piece of the whole's storage, if no other line touches those bytes.
//! 3. `pack`: offsets in memory for storage that the plan allocates.
//! 4. `annotate`: the plan as text, with leases and releases.

mod annotate;
mod control;
mod decide;
mod pack;
mod report;
mod starts;
mod storage;
mod uses;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use consort_ir::index::Sym;
use consort_ir::mesh::Mesh;
use consort_ir::ops::EvalCx;
use consort_ir::plan::{Place, PlanHeader, Region, RegionKind};
use consort_ir::program::Func;
use consort_types::{Failure, Rank};

pub use report::{Copy, PlanReport, Why, alive, report};

use decide::Planner;
use pack::{ALIGN, Bin, Block, is_close, most, pack};
use storage::{Buf, BufKind, Storage};
use uses::END;

/// Why planning failed.
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
        /// What exceeded the limit.
        what: String,
    },
}

impl PlanError {
    /// The error as a [`Failure`].
    pub fn failure(&self) -> Box<Failure> {
        match self {
            PlanError::UnknownSize { func, ty, why } => {
                Failure::new(("sizes that are known", format!("{ty}: {why}")))
                    .of(format!("plan: @{func}"))
                    .note("a plan is made for given values of the symbols; give each of them one")
            }
            PlanError::TooLarge { func, what } => {
                Failure::new(format!("{what} does not fit in 64 bits of memory")).of(format!("plan: @{func}"))
            }
        }
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl std::error::Error for PlanError {}

/// The rank and sizes of a plan, and the arguments it may overwrite.
#[derive(Clone, Copy, Debug)]
pub struct Binding<'a> {
    /// The rank.
    pub rank: Rank,
    /// The values of the backed symbols.
    pub symbols: &'a BTreeMap<Sym, i64>,
    /// Whether each parameter is donated; false past the end of the list.
    pub donated: &'a [bool],
}

/// The function with a place for every tensor, a queue and a number for every start.
pub fn plan(mesh: &Mesh, func: &Func, binding: &Binding<'_>) -> Result<Func, PlanError> {
    let sizes = EvalCx { mesh, rank: binding.rank, symbols: binding.symbols };
    let mut planner = Planner::new(func, sizes);
    planner.func(binding.donated)?;
    let regions = place(&mut planner, func)?;
    let given = func.body.params.iter().zip(binding.donated).filter(|(_, donated)| **donated);
    let head = PlanHeader {
        rank: binding.rank,
        symbols: binding.symbols.iter().map(|(sym, value)| (*sym, *value)).collect(),
        regions: regions.into_iter().collect(),
        donated: given.map(|(param, _)| *param).collect(),
    };
    let mut planned = func.clone();
    annotate::annotate(planner, &head, &mut planned);
    planned.plan = Some(Box::new(head));
    Ok(planned)
}

/// Plans that need less memory than this do not share memory between communication and the rest, so that nothing waits
/// for peers only to save memory.
const LITTLE: u64 = 1 << 16;

/// The number of largest result pieces that are reused before they are written.
const BINS: usize = 16;

/// Places all storage; returns the regions and their sizes.
fn place(planner: &mut Planner<'_>, func: &Func) -> Result<BTreeMap<Region, u64>, PlanError> {
    let results = func.body.results.iter().flat_map(|result| planner.parts_of(*result)).collect::<Vec<_>>();
    let storage = &mut planner.storage;
    let mut regions = BTreeMap::new();
    let mut outs = Vec::new();
    // Result regions are numbered in the order of the results.
    for part in results {
        let buf = storage.span(part).buf;
        out(storage, buf, &mut outs);
    }
    let (mut dyns, mut numbers, mut blocks) = (0, Vec::new(), Vec::new());
    for number in 0..storage.bufs.len() as u32 {
        if storage.root(number).0 != number {
            continue;
        }
        out(storage, number, &mut outs);
        let buf = &mut storage.bufs[number as usize];
        let region = match buf.kind {
            _ if buf.place.is_some() => continue,
            BufKind::Own => {
                numbers.push(number);
                let (def, last, size) = (buf.def, buf.last, buf.size.next_multiple_of(ALIGN));
                blocks.push(Block { def, last, size, pieces: storage.pieces(number) });
                continue;
            }
            BufKind::Arg(param) => Region::of(RegionKind::Arg(param)),
            BufKind::Dyn => {
                dyns += 1;
                Region::of(RegionKind::Dyn(dyns - 1))
            }
        };
        buf.place = Some(Place { region, offset: 0 });
        regions.insert(region, buf.size);
    }
    for (number, buf) in (0u32..).zip(&outs) {
        regions.insert(Region::of(RegionKind::Out(number)), storage.bufs[*buf as usize].size);
    }
    let too_large =
        || PlanError::TooLarge { func: func.name.clone(), what: "all of its memory together".to_string() };
    let mut all = regions.values().copied().chain(blocks.iter().map(|block| block.size));
    let all = all
        .try_fold(0u64, u64::checked_add)
        .filter(|all| i64::try_from(*all).is_ok())
        .ok_or_else(too_large)?;
    if blocks.is_empty() {
        return Ok(regions);
    }
    place_own(storage, &numbers, &blocks, (&outs, all), &mut regions);
    Ok(regions)
}

/// Packs the storage that the plan allocates: communication and the rest apart, or together where that saves much.
/// `all` is the size of all memory, `outs` are the results.
fn place_own(
    storage: &mut Storage,
    numbers: &[u32],
    blocks: &[Block],
    (outs, all): (&[u32], u64),
    regions: &mut BTreeMap<Region, u64>,
) {
    let shared: Vec<bool> = numbers.iter().map(|number| storage.bufs[*number as usize].shared).collect();
    let pick = |wanted: bool| -> Vec<Block> {
        blocks
            .iter()
            .zip(&shared)
            .filter(|(_, shared)| **shared == wanted)
            .map(|(block, _)| block.clone())
            .collect()
    };
    let (arena, heap) = (pack(&pick(false), &[]), pack(&pick(true), &[]));
    let mut together = None;
    if all > LITTLE {
        let returned: Vec<Block> = outs
            .iter()
            .map(|buf| {
                let Buf { def, size, .. } = storage.bufs[*buf as usize];
                Block { def, last: END, size, pieces: storage.pieces(*buf) }
            })
            .collect();
        let apart = arena.size + heap.size + returned.iter().map(|block| block.size).sum::<u64>();
        if !is_close(apart, most(blocks.iter().chain(&returned))) {
            let (places, bins) = bins(&returned);
            let packed = pack(blocks, &bins);
            together = Some((packed, places)).filter(|(packed, _)| packed.size < arena.size + heap.size);
        }
    }
    let mut set = |number: u32, region: Region, offset: u64| {
        storage.bufs[number as usize].place = Some(Place { region, offset });
    };
    match together {
        Some((packed, bins)) => {
            let region = if shared.contains(&true) { Region::HEAP } else { Region::ARENA };
            regions.insert(region, packed.size);
            for (number, (bin, offset)) in numbers.iter().zip(packed.places) {
                let (region, start) = bin.map_or((region, 0), |bin| bins[bin]);
                set(*number, region, start + offset);
            }
        }
        None => {
            for (region, packed, wanted) in [(Region::ARENA, arena, false), (Region::HEAP, heap, true)] {
                let numbers = numbers.iter().zip(&shared).filter(|(_, shared)| **shared == wanted);
                for ((number, _), (_, offset)) in numbers.zip(packed.places) {
                    set(*number, region, offset);
                    regions.insert(region, packed.size);
                }
            }
        }
    }
}

/// The largest result pieces, as bins: where each is, and until when it is free.
fn bins(returned: &[Block]) -> (Vec<(Region, u64)>, Vec<Bin>) {
    let mut pieces = Vec::new();
    for (number, block) in (0u32..).zip(returned) {
        for (from, to, before) in block.rows() {
            let from = from.next_multiple_of(ALIGN);
            let bin = Bin { before, size: to.saturating_sub(from) };
            pieces.push(((Region::of(RegionKind::Out(number)), from), bin));
        }
    }
    pieces.sort_by_key(|(_, bin)| Reverse(bin.size));
    pieces.truncate(BINS);
    pieces.into_iter().unzip()
}

/// Gives storage that outlives the call its own region, once.
fn out(storage: &mut Storage, buf: u32, outs: &mut Vec<u32>) {
    let root = &mut storage.bufs[buf as usize];
    if root.kind == BufKind::Own && root.outlives && root.place.is_none() {
        root.place = Some(Place { region: Region::of(RegionKind::Out(outs.len() as u32)), offset: 0 });
        outs.push(buf);
    }
}
