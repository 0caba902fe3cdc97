//! What a plan adds to a program: the place of each value, the queue of each start, and the leases of peers.
//!
//! A plan is made for one rank and for given values of the symbols; its lines are the program's own. They stand in
//! the order in which they run and carry
//!
//! - a *place* for each tensor they define: a region and a byte offset (`@heap+0x40`). Tensors are contiguous there,
//!   in row-major order. A region in the memory of a device has its space before it (`@device_heap+0x40`);
//! - `view`: nothing runs. The results are the operand's own elements, in the op's layout; their place is that of the
//!   operand, and their first element and strides follow from the op ([`OpDef::view`](crate::ops::OpDef::view));
//! - `reuse vN`: the result takes over the storage of a dead value, or of a part of it;
//! - `copy vN (why)`: this operand of a start cannot take part in place, so its elements are copied to the place of the
//!   result before the operation starts;
//! - `queue NAME #k`: communication runs on its group's queue, as start number `k` there;
//! - `lease vN`: peers may read the storage of these values from here until release;
//! - `release vN`: the leases of these starts must end before this line runs; the executor waits for that;
//! - `release entry`: leases that are older than the call, on the storage of the results, must end before this line runs.
//!   No line can name them: they are those of an earlier call of the plan, or of whoever gave an argument away. The first
//!   write in a call to such storage says so ([`crate::storage::entry_leases`]).
//!
//! Joins move only elements that are not in place yet: parts of a `concat` that lie at their place in its result stay
//! there, and so do the base and the new part of an `update_slice`. A start whose result takes the place of an
//! operand ([`crate::ops::OpDef::overwrites`]) works in place.
//!
//! The structural rules, checked by `verify`, are the invariants P1 to P4 at the head of `verify/mod.rs`;
//! hazards between buffers are re-derived from the text alone by `verify::hazards`, and run by the plan oracle.

use std::fmt;

use consort_types::{GroupName, Held, Rank, Space};

use crate::entity::Value;
use crate::index::Sym;
use crate::mesh::Mesh;

/// The header of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanHeader {
    /// The rank that it is for.
    pub rank: Rank,
    /// The values of the backed symbols.
    pub symbols: Vec<(Sym, i64)>,
    /// The memory regions, in order, and their sizes in bytes; 0 for a `dyn` region.
    pub regions: Vec<(Region, u64)>,
    /// The donated parameters, whose storage may be written.
    pub donated: Vec<Value>,
}

/// A memory region: one of each kind in each space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region {
    /// The memory that it is in. Written before the kind, unless it is the host's.
    pub space: Space,
    /// What it holds.
    pub kind: RegionKind,
}

/// What a memory region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegionKind {
    /// The storage of a parameter, by the parameter's position.
    Arg(u32),
    /// Memory private to this rank.
    Arena,
    /// The part of memory that peers can map.
    Heap,
    /// Storage of a result, which outlives the call. Peers can map it.
    Out(u32),
    /// Storage whose size is known only at run time. Peers can map it.
    Dyn(u32),
}

impl Region {
    /// The spellings, for errors.
    pub const NAMES: &str = "a region (arg0, .., arena, heap, out0, .., dyn0, .., or device_heap, ..)";

    /// Memory of the host that is private to the rank.
    pub const ARENA: Region = Region::of(RegionKind::Arena);
    /// Memory of the host that peers can map.
    pub const HEAP: Region = Region::of(RegionKind::Heap);

    /// A region of the host.
    pub const fn of(kind: RegionKind) -> Region {
        Region { space: Space::Host, kind }
    }

    /// The region of this spelling.
    pub fn from_name(name: &str) -> Option<Region> {
        let (space, kind) = match name.strip_prefix("device_") {
            Some(kind) => (Space::Device, kind),
            None => (Space::Host, name),
        };
        RegionKind::from_name(kind).map(|kind| Region { space, kind })
    }

    /// Whether it is the storage of a parameter.
    pub fn is_arg(self) -> bool {
        matches!(self.kind, RegionKind::Arg(_))
    }

    /// Whether its size is known only at run time.
    pub fn is_dyn(self) -> bool {
        matches!(self.kind, RegionKind::Dyn(_))
    }

    /// Whether a plan keeps its storage from call to call.
    pub fn is_kept(self) -> bool {
        matches!(self.kind, RegionKind::Arena | RegionKind::Heap)
    }
}

impl RegionKind {
    /// The kind of this spelling.
    pub fn from_name(name: &str) -> Option<RegionKind> {
        let number = |prefix: &str| {
            let digits = name.strip_prefix(prefix)?;
            digits.parse::<u32>().ok().filter(|number| number.to_string() == digits)
        };
        match name {
            "arena" => Some(RegionKind::Arena),
            "heap" => Some(RegionKind::Heap),
            _ => None
                .or_else(|| number("arg").map(RegionKind::Arg))
                .or_else(|| number("out").map(RegionKind::Out))
                .or_else(|| number("dyn").map(RegionKind::Dyn)),
        }
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.space {
            Space::Host => self.kind.fmt(f),
            Space::Device => write!(f, "{}_{}", self.space, self.kind),
        }
    }
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegionKind::Arg(number) => write!(f, "arg{number}"),
            RegionKind::Arena => f.write_str("arena"),
            RegionKind::Heap => f.write_str("heap"),
            RegionKind::Out(number) => write!(f, "out{number}"),
            RegionKind::Dyn(number) => write!(f, "dyn{number}"),
        }
    }
}

/// The location of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The region.
    pub region: Region,
    /// Bytes from its start.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{}+{:#x}", self.region, self.offset)
    }
}

/// The annotations of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// One place for each tensor that the node defines, those inside a pending included.
    pub places: Vec<Place>,
    /// Whether the results are views of operand 0, so that nothing runs.
    pub view: bool,
    /// Values whose storage the results take over.
    pub reuse: Vec<Value>,
    /// Operands that are copied for communication.
    pub copies: Vec<(Value, Held)>,
    /// The group on whose queue the op starts, and its number there.
    pub queue: Option<(GroupName, u32)>,
    /// Values whose storage peers may read from here until release.
    pub lease: Vec<Value>,
    /// Starts whose leases must end before this node runs.
    pub release: Vec<Value>,
    /// Whether leases older than the call on the storage that this node writes must end before it runs.
    pub entry: bool,
}

impl NodePlan {
    /// The annotations as plans write them, each with a space before it.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| {
            for place in &self.places {
                write!(f, " {place}")?;
            }
            if self.view {
                f.write_str(" view")?;
            }
            write_values(f, "reuse", &self.reuse)?;
            for (i, (value, why)) in self.copies.iter().enumerate() {
                write!(f, "{}{value} ({})", if i == 0 { " copy " } else { ", " }, why.name())?;
            }
            if let Some((group, number)) = self.queue {
                write!(f, " queue {} #{number}", mesh.group_text(group))?;
            }
            write_values(f, "lease", &self.lease)?;
            if self.entry {
                f.write_str(" release entry")?;
                return self.release.iter().try_for_each(|start| write!(f, ", {start}"));
            }
            write_values(f, "release", &self.release)
        })
    }
}

fn write_values(f: &mut fmt::Formatter<'_>, word: &str, values: &[Value]) -> fmt::Result {
    for (i, value) in values.iter().enumerate() {
        write!(f, "{}{value}", if i == 0 { format!(" {word} ") } else { ", ".to_string() })?;
    }
    Ok(())
}
