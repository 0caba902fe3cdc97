//! The mesh of ranks: named axes, and the groups that communicate over them.
//!
//! Ranks are numbered row-major over the axes in the order in which the mesh lists them, so the last axis
//! is the one along which neighbouring ranks lie. A program never holds a rank: it names an axis, several
//! axes, or a list group, and each rank finds its own instance of that group here.
//!
//! Axes are small ids (`Axis`, a bit in `Axes`), not names, so that types compare in one instruction;
//! the mesh turns them back into names for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use consort_types::{Axes, Axis, GroupId, GroupName, Rank};

/// A declared group that is not a set of axes: disjoint lists of ranks, all of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListGroup {
    /// How programs spell it.
    pub name: String,
    /// The lists; a rank is in at most one.
    pub lists: Vec<Vec<Rank>>,
}

/// Named axes with their sizes, and the list groups declared over their ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<(String, u32)>,
    groups: Vec<ListGroup>,
    group_names: BTreeMap<String, GroupId>,
}

/// The most characters of the name of an axis or a group.
const MAX_NAME: usize = 64;

/// Why a mesh or a group over it was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshError(pub String);

impl fmt::Display for MeshError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MeshError {}

impl Mesh {
    /// The most axes a mesh may have (they are bits of a word).
    pub const MAX_AXES: usize = 32;
    /// The most ranks a mesh may have.
    pub const MAX_RANKS: u64 = 1 << 20;

    /// A mesh of these axes. No axes make a world of one rank.
    pub fn new<S: Into<String>>(axes: impl IntoIterator<Item = (S, u32)>) -> Result<Mesh, MeshError> {
        let mut mesh = Mesh::default();
        let mut ranks = 1u64;
        for (name, size) in axes {
            let name = name.into();
            mesh.check_new_name(&name)?;
            if size == 0 {
                return Err(MeshError(format!("mesh: axis `{name}` has size 0")));
            }
            ranks = ranks.saturating_mul(u64::from(size));
            if ranks > Mesh::MAX_RANKS {
                return Err(MeshError(format!("mesh: more than {} ranks", Mesh::MAX_RANKS)));
            }
            if mesh.axes.len() == Mesh::MAX_AXES {
                return Err(MeshError(format!("mesh: more than {} axes", Mesh::MAX_AXES)));
            }
            mesh.axes.push((name, size));
        }
        Ok(mesh)
    }

    /// Declares a group by lists of ranks. The lists have one length and share no rank; ranks in none of
    /// them pass through the ops of the group.
    pub fn add_list_group(&mut self, name: &str, lists: Vec<Vec<Rank>>) -> Result<GroupId, MeshError> {
        self.check_new_name(name)?;
        let Some(first) = lists.first() else {
            return Err(MeshError(format!("group `{name}`: no list of ranks")));
        };
        if first.is_empty() {
            return Err(MeshError(format!("group `{name}`: an empty list of ranks")));
        }
        let (n, mut seen) = (self.n_ranks(), BTreeSet::new());
        for list in &lists {
            if list.len() != first.len() {
                return Err(MeshError(format!(
                    "group `{name}`: lists must have equal sizes, but one has {} ranks and another {}",
                    first.len(),
                    list.len()
                )));
            }
            for rank in list {
                if rank.0 >= n {
                    return Err(MeshError(format!("group `{name}`: {rank} is outside a mesh of {n} ranks")));
                }
                if !seen.insert(*rank) {
                    return Err(MeshError(format!("group `{name}`: {rank} is listed twice")));
                }
            }
        }
        if self.groups.len() == usize::from(u16::MAX) {
            return Err(MeshError(format!("group `{name}`: more than {} groups", u16::MAX)));
        }
        let id = GroupId(self.groups.len() as u16);
        self.group_names.insert(name.to_string(), id);
        self.groups.push(ListGroup { name: name.to_string(), lists });
        Ok(id)
    }

    /// Declares a group by a split: ranks of one colour form a list, ordered by key and then by rank.
    /// A rank with no colour is in no list.
    pub fn add_split_group(
        &mut self,
        name: &str,
        colours: &[Option<u32>],
        keys: &[i64],
    ) -> Result<GroupId, MeshError> {
        let n = self.n_ranks() as usize;
        if colours.len() != n || keys.len() != n {
            return Err(MeshError(format!(
                "group `{name}`: a split of {n} ranks needs {n} colours and keys, got {} and {}",
                colours.len(),
                keys.len()
            )));
        }
        let mut lists = BTreeMap::<u32, Vec<Rank>>::new();
        for (rank, colour) in colours.iter().enumerate() {
            if let Some(colour) = colour {
                lists.entry(*colour).or_default().push(Rank(rank as u32));
            }
        }
        for list in lists.values_mut() {
            list.sort_by_key(|rank| (keys[rank.0 as usize], *rank));
        }
        self.add_list_group(name, lists.into_values().collect())
    }

    fn check_new_name(&self, name: &str) -> Result<(), MeshError> {
        if !is_name(name) || name.len() > MAX_NAME {
            // Shortened and without control characters, which would break the lines of an error.
            let shown: String = name.chars().take(MAX_NAME).collect();
            let (shown, rest) = (shown.escape_debug(), if shown.len() < name.len() { ".." } else { "" });
            return Err(MeshError(format!(
                "mesh: `{shown}{rest}` is not a name (letters, digits and _, not a digit first, at most {MAX_NAME})"
            )));
        }
        if self.axis(name).is_some() || self.list_group(name).is_some() {
            return Err(MeshError(format!("mesh: duplicate name `{name}`")));
        }
        Ok(())
    }

    /// The axes with their sizes, in order.
    pub fn axes(&self) -> &[(String, u32)] {
        &self.axes
    }

    /// The declared list groups, in order.
    pub fn groups(&self) -> &[ListGroup] {
        &self.groups
    }

    /// How many ranks there are.
    pub fn n_ranks(&self) -> u32 {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// The axis of this name.
    pub fn axis(&self, name: &str) -> Option<Axis> {
        self.axes.iter().position(|(n, _)| n == name).map(|i| Axis(i as u8))
    }

    /// The list group of this name.
    pub fn list_group(&self, name: &str) -> Option<GroupId> {
        self.group_names.get(name).copied()
    }

    /// The spelling of an axis; `?` and its number if the mesh has no such axis.
    pub fn axis_name(&self, axis: Axis) -> String {
        match self.axes.get(usize::from(axis.0)) {
            Some((name, _)) => name.clone(),
            None => format!("?{}", axis.0),
        }
    }

    /// The spelling of a list group; `?` and its number if there is none.
    pub fn group_name(&self, group: GroupId) -> String {
        match self.groups.get(usize::from(group.0)) {
            Some(group) => group.name.clone(),
            None => format!("?{}", group.0),
        }
    }

    /// The size of an axis; 1 if the mesh has no such axis.
    pub fn axis_size(&self, axis: Axis) -> u32 {
        self.axes.get(usize::from(axis.0)).map_or(1, |(_, size)| *size)
    }

    /// All axes: the world.
    pub fn all_axes(&self) -> Axes {
        (0..self.axes.len() as u8).map(Axis).collect()
    }

    /// Whether the axes or the list of a group exist in this mesh.
    pub fn has(&self, group: GroupName) -> bool {
        match group {
            GroupName::Axes(axes) => axes.is_subset(self.all_axes()),
            GroupName::List(id) => usize::from(id.0) < self.groups.len(),
        }
    }

    /// How many members each instance of a group has.
    pub fn group_size(&self, group: GroupName) -> u32 {
        match group {
            GroupName::Axes(axes) => axes.iter().map(|axis| self.axis_size(axis)).product(),
            GroupName::List(id) => self.groups.get(usize::from(id.0)).map_or(1, |g| g.lists[0].len() as u32),
        }
    }

    /// The axes over which two ranks in one instance of the group may differ: all of them for a list group.
    pub fn group_axes(&self, group: GroupName) -> Axes {
        match group {
            GroupName::Axes(axes) => axes,
            GroupName::List(_) => self.all_axes(),
        }
    }

    /// Whether every rank of the mesh is in some instance of the group.
    pub fn covers(&self, group: GroupName) -> bool {
        match group {
            GroupName::Axes(_) => true,
            GroupName::List(id) => {
                let lists = self.groups.get(usize::from(id.0)).map_or(0, |g| g.lists.len());
                lists as u32 * self.group_size(group) == self.n_ranks()
            }
        }
    }

    /// A rank's coordinate along an axis.
    pub fn coordinate(&self, rank: Rank, axis: Axis) -> u32 {
        let stride: u32 = self.axes.iter().skip(usize::from(axis.0) + 1).map(|(_, size)| size).product();
        rank.0 / stride.max(1) % self.axis_size(axis)
    }

    /// The members of a rank's instance of a group, in group order; `None` if the rank is in no list.
    pub fn members(&self, group: GroupName, rank: Rank) -> Option<Vec<Rank>> {
        match group {
            GroupName::Axes(axes) => {
                let mut members = vec![Rank(0)];
                for (i, (_, size)) in self.axes.iter().enumerate() {
                    let axis = Axis(i as u8);
                    let here = self.coordinate(rank, axis);
                    let along = if axes.contains(axis) { 0..*size } else { here..here + 1 };
                    members = members
                        .iter()
                        .flat_map(|m| along.clone().map(move |c| Rank(m.0 * size + c)))
                        .collect();
                }
                Some(members)
            }
            GroupName::List(id) => {
                self.groups.get(usize::from(id.0))?.lists.iter().find(|list| list.contains(&rank)).cloned()
            }
        }
    }

    /// A rank's place in its instance of a group.
    pub fn group_rank(&self, group: GroupName, rank: Rank) -> Option<u32> {
        match group {
            GroupName::Axes(axes) => {
                Some(axes.iter().fold(0, |at, axis| at * self.axis_size(axis) + self.coordinate(rank, axis)))
            }
            GroupName::List(_) => {
                self.members(group, rank)?.iter().position(|m| *m == rank).map(|i| i as u32)
            }
        }
    }

    /// A set of axes as programs write it: `dp,tp`.
    pub fn axes_text(&self, axes: Axes) -> String {
        axes.iter().map(|axis| self.axis_name(axis)).collect::<Vec<_>>().join(",")
    }

    /// A group as programs write it: `tp`, `(dp,tp)`, or the name of a list group.
    pub fn group_text(&self, group: GroupName) -> String {
        match group {
            GroupName::Axes(axes) if axes.iter().count() == 1 => self.axes_text(axes),
            GroupName::Axes(axes) => format!("({})", self.axes_text(axes)),
            GroupName::List(id) => self.group_name(id),
        }
    }
}

/// Whether a string may name an axis, a group or a function.
pub fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        Mesh::new([("dp", 2), ("tp", 3)]).unwrap()
    }

    fn ranks(list: &[u32]) -> Vec<Rank> {
        list.iter().map(|r| Rank(*r)).collect()
    }

    #[test]
    fn members_of_axis_groups_are_row_major() {
        let mesh = mesh();
        let (dp, tp) = (mesh.axis("dp").unwrap(), mesh.axis("tp").unwrap());
        assert_eq!(mesh.members(GroupName::Axes(Axes::one(tp)), Rank(4)), Some(ranks(&[3, 4, 5])));
        assert_eq!(mesh.members(GroupName::Axes(Axes::one(dp)), Rank(4)), Some(ranks(&[1, 4])));
        assert_eq!(mesh.members(GroupName::Axes(mesh.all_axes()), Rank(4)), Some(ranks(&[0, 1, 2, 3, 4, 5])));
        assert_eq!(mesh.members(GroupName::Axes(Axes::NONE), Rank(4)), Some(ranks(&[4])));
        assert_eq!(mesh.coordinate(Rank(4), dp), 1);
        assert_eq!(mesh.coordinate(Rank(4), tp), 1);
        assert_eq!(mesh.group_rank(GroupName::Axes(mesh.all_axes()), Rank(5)), Some(5));
        assert_eq!(mesh.group_rank(GroupName::Axes(Axes::one(dp)), Rank(5)), Some(1));
    }

    #[test]
    fn splits_order_by_key_then_rank() {
        let mut mesh = mesh();
        let colours = [Some(1), Some(0), Some(1), Some(0), None, None];
        let id = mesh.add_split_group("halves", &colours, &[0, 9, 0, 1, 0, 0]).unwrap();
        let group = GroupName::List(id);
        assert_eq!(mesh.members(group, Rank(1)), Some(ranks(&[3, 1])));
        assert_eq!(mesh.members(group, Rank(2)), Some(ranks(&[0, 2])));
        assert_eq!(mesh.members(group, Rank(4)), None);
        assert_eq!(mesh.group_rank(group, Rank(1)), Some(1));
        assert!(!mesh.covers(group));
        assert_eq!(mesh.group_size(group), 2);
    }

    #[test]
    fn bad_meshes_and_groups_are_refused() {
        let error = |lists: &[&[u32]]| {
            mesh().add_list_group("g", lists.iter().map(|l| ranks(l)).collect()).unwrap_err().0
        };
        assert_eq!(
            error(&[&[0, 1], &[2]]),
            "group `g`: lists must have equal sizes, but one has 2 ranks and another 1"
        );
        assert_eq!(error(&[&[0, 6]]), "group `g`: rank 6 is outside a mesh of 6 ranks");
        assert_eq!(error(&[&[0, 1], &[1, 2]]), "group `g`: rank 1 is listed twice");
        assert_eq!(error(&[&[]]), "group `g`: an empty list of ranks");
        assert_eq!(error(&[]), "group `g`: no list of ranks");
        assert_eq!(
            mesh().add_list_group("tp", vec![ranks(&[0])]).unwrap_err().0,
            "mesh: duplicate name `tp`"
        );
        assert_eq!(Mesh::new([("a", 0)]).unwrap_err().0, "mesh: axis `a` has size 0");
        assert_eq!(Mesh::new([("a", 2), ("a", 2)]).unwrap_err().0, "mesh: duplicate name `a`");
        assert_eq!(Mesh::new([("a", 1 << 20), ("b", 2)]).unwrap_err().0, "mesh: more than 1048576 ranks");
        assert_eq!(
            Mesh::new([("2x", 2)]).unwrap_err().0,
            "mesh: `2x` is not a name (letters, digits and _, not a digit first, at most 64)"
        );
        let long = Mesh::new([("x".repeat(65), 2)]).unwrap_err().0;
        assert!(long.starts_with(&format!("mesh: `{}..` is not a name", "x".repeat(64))), "{long}");
        let odd = mesh().add_list_group("a\n", vec![ranks(&[0])]).unwrap_err().0;
        assert!(odd.starts_with("mesh: `a\\n` is not a name"), "{odd}");
        let axes = (0..33).map(|i| (format!("a{i}"), 1));
        assert_eq!(Mesh::new(axes).unwrap_err().0, "mesh: more than 32 axes");
    }
}
