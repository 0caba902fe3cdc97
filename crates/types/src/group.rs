//! Ranks, axes and groups as programs name them. The mesh that gives them meaning is in `consort-ir`.

use std::fmt;

/// One rank of the mesh, numbered row-major over its axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// An axis of the mesh, by its position in the mesh's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axis(pub u8);

/// A list group, by its position in the list of declarations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u16);

/// A set of mesh axes: those over which a value may differ, or over which an op communicates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axes(u32);

impl Axes {
    /// No axis: equal everywhere.
    pub const NONE: Axes = Axes(0);

    /// The set of one axis.
    pub fn one(axis: Axis) -> Axes {
        Axes(1 << axis.0)
    }

    /// The axes of both sets.
    #[must_use]
    pub fn union(self, other: Axes) -> Axes {
        Axes(self.0 | other.0)
    }

    /// The axes of this set that are not in the other.
    #[must_use]
    pub fn minus(self, other: Axes) -> Axes {
        Axes(self.0 & !other.0)
    }

    /// The axes in both sets.
    #[must_use]
    pub fn intersect(self, other: Axes) -> Axes {
        Axes(self.0 & other.0)
    }

    /// Whether every axis of this set is in the other.
    pub fn is_subset(self, other: Axes) -> bool {
        self.0 & !other.0 == 0
    }

    /// Whether the set has no axis.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the set has this axis.
    pub fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis.0) != 0
    }

    /// The axes in mesh order.
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        (0..32u8).filter(move |i| self.0 & (1 << i) != 0).map(Axis)
    }
}

impl FromIterator<Axis> for Axes {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> Axes {
        axes.into_iter().fold(Axes::NONE, |set, axis| set.union(Axes::one(axis)))
    }
}

/// The ranks an op communicates with, as a program names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupName {
    /// The ranks that differ from this one only along these axes.
    Axes(Axes),
    /// The list, among those of a declared list group, that holds this rank.
    List(GroupId),
}
