//! What a plan adds to a program: where each value lies, on which queue an op runs, what peers still read.
//!
//! A plan is a function whose lines stand in the order in which they run and carry
//!
//! - a *place* for each tensor they define: a region and a byte offset (`@heap+0x40`). Values of unbacked
//!   size lie in `dyn`, allocated when the size is known, and have no offset;
//! - `reuse vN`: the result takes over storage of a value that is dead, or of which it is a view;
//! - `queue NAME #k`: communication runs on its group's queue, as start number `k` there;
//! - `lease vN`: storage of these values may be read by peers from here until release;
//! - `release vN`: the leases taken by these starts are known to have ended before this line runs.
//!
//! The structural rules, checked by `verify`, are the invariants P1 to P3 at the head of `verify/mod.rs`;
//! hazards between buffers are the plan oracle's business.

use std::fmt;

use crate::entity::Value;
use crate::mesh::{Group, Mesh};

/// A memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Region {
    /// The caller's storage.
    Arg,
    /// Memory of this rank alone.
    Arena,
    /// The part of memory that peers can map.
    Heap,
    /// Storage whose size is known only as the program runs.
    Dyn,
}

impl Region {
    /// Every region.
    pub const ALL: [Region; 4] = [Region::Arg, Region::Arena, Region::Heap, Region::Dyn];

    /// How plans spell it.
    pub fn name(self) -> &'static str {
        match self {
            Region::Arg => "arg",
            Region::Arena => "arena",
            Region::Heap => "heap",
            Region::Dyn => "dyn",
        }
    }

    /// The region of this spelling.
    pub fn from_name(name: &str) -> Option<Region> {
        Region::ALL.into_iter().find(|region| region.name() == name)
    }

    /// Whether places in it have a byte offset.
    pub fn has_offsets(self) -> bool {
        self != Region::Dyn
    }
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The region.
    pub region: Region,
    /// Bytes from its start; 0 in a region without offsets.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{}", self.region.name())?;
        if self.region.has_offsets() { write!(f, "+{:#x}", self.offset) } else { Ok(()) }
    }
}

/// What a plan says of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlan {
    /// One place for each tensor that the node defines, those inside a pending included.
    pub places: Vec<Place>,
    /// Values whose storage the results take over.
    pub reuse: Vec<Value>,
    /// The group on whose queue the op starts, and its number there.
    pub queue: Option<(Group, u32)>,
    /// Values whose storage peers may read from here until release.
    pub lease: Vec<Value>,
    /// Starts whose leases have ended before this node runs.
    pub release: Vec<Value>,
}

impl NodePlan {
    /// The annotations as plans write them, each with a space before it.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| {
            for place in &self.places {
                write!(f, " {place}")?;
            }
            write_values(f, "reuse", &self.reuse)?;
            if let Some((group, number)) = self.queue {
                write!(f, " queue {} #{number}", mesh.group_text(group))?;
            }
            write_values(f, "lease", &self.lease)?;
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
