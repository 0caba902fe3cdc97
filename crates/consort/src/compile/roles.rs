//! Roles: ranks of one set that run different functions. Within a role all have one program; what the ranks of all roles
//! start and wait for is checked together, on every rank with the same outcome.

use std::rc::Rc;

use consort_ir::joint::{Script, check};
use consort_ir::mesh::Mesh;
use consort_types::{Axes, Digest, Failure, GroupName, Rank, ranks_text};

use super::agree::{MISS, Meeting, digest_of, pair, role_text};
use crate::error::{Error, Result};
use crate::trace::Peers;

/// The roles of the ranks of a function, as all of them know them.
pub(crate) struct Roles {
    /// In the order of their first ranks.
    names: Vec<String>,
    /// The role of each rank, by its place.
    of: Vec<usize>,
    /// The role of this rank.
    mine: usize,
    /// The axes along which roles differ. A program of one role says nothing of ranks of another.
    pub(super) over: Axes,
}

impl Roles {
    /// The roles of some ranks, given by name.
    pub(super) fn new(
        given: &[String],
        members: &[Rank],
        me: Rank,
        (mesh, group): (&Mesh, GroupName),
    ) -> Roles {
        let mut names: Vec<String> = Vec::new();
        let mut of = Vec::new();
        for name in given {
            let known = names.iter().position(|own| own == name).unwrap_or_else(|| {
                names.push(name.clone());
                names.len() - 1
            });
            of.push(known);
        }
        let mine = members.iter().position(|rank| *rank == me).and_then(|place| of.get(place).copied());
        let over = match group {
            _ if names.len() == 1 => Axes::NONE,
            GroupName::List(_) => mesh.all_axes(),
            GroupName::Axes(axes) => axes
                .iter()
                .filter(|axis| {
                    let others = |rank: Rank| -> Vec<u32> {
                        axes.iter().filter(|own| own != axis).map(|own| mesh.coordinate(rank, own)).collect()
                    };
                    let mut seen: Vec<(Vec<u32>, usize)> = Vec::new();
                    members.iter().zip(&of).any(|(rank, role)| {
                        let place = others(*rank);
                        let differs = seen.iter().any(|(other, own)| *other == place && own != role);
                        seen.push((place, *role));
                        differs
                    })
                })
                .collect(),
        };
        Roles { names, of, mine: mine.unwrap_or_default(), over }
    }

    /// The roles by number.
    pub(super) fn all(&self) -> std::ops::Range<usize> {
        0..self.names.len()
    }

    /// The places of the ranks of a role.
    pub(super) fn places(&self, role: usize) -> Vec<usize> {
        (0..self.of.len()).filter(|place| self.of[*place] == role).collect()
    }

    /// The number of this rank's role.
    pub(super) fn mine(&self) -> usize {
        self.mine
    }

    /// Whether the ranks at two places have one role.
    pub(super) fn is_same(&self, a: usize, b: usize) -> bool {
        self.of.get(a) == self.of.get(b)
    }

    /// Where something must be the same: `on all ranks of role ..`.
    pub(super) fn all_text(&self, role: usize) -> String {
        format!("on all ranks of {}", role_text(&self.names[role]))
    }

    /// Each role with its ranks.
    fn text(&self, ranks: &[usize]) -> String {
        let of = |role: usize| -> Vec<usize> {
            self.places(role).iter().filter_map(|place| ranks.get(*place).copied()).collect()
        };
        let roles =
            self.all().map(|role| format!("{} on {}", role_text(&self.names[role]), ranks_text(&of(role))));
        roles.collect::<Vec<_>>().join(", ")
    }

    /// What a rank gives to the max-reduction by which ranks compare a call: the number of their agreement, which is equal
    /// on all of them, and a key for each role, of which it knows its own.
    pub(super) fn envelope(&self, key: u64, joint: u64) -> Vec<u8> {
        let joint = if key == MISS { MISS } else { joint };
        let mut bytes = pair(joint).to_vec();
        for role in self.all() {
            match role == self.mine {
                true => bytes.extend(pair(key)),
                false => bytes.extend([i64::MIN.to_le_bytes(); 2].concat()),
            }
        }
        bytes
    }

    /// Whether the reduction says that the ranks of each role have equal keys, and all ranks one agreement.
    pub(super) fn is_hit(reduced: &[u8]) -> bool {
        let (words, _) = reduced.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        pairs.iter().all(|[key, not]| u64::from_le_bytes(*key) == !u64::from_le_bytes(*not))
    }
}

/// What a rank tells of the program that it traced in its role.
pub(super) struct Part<'a> {
    /// The text of the program.
    pub(super) text: &'a str,
    /// The peers that it names by numbers.
    pub(super) peers: &'a [i64],
    /// What it starts and waits for.
    pub(super) script: Script,
}

/// The same, as other ranks know it.
struct Told {
    digest: u64,
    peers: Vec<i64>,
    script: Script,
}

impl Part<'_> {
    fn bytes(&self) -> Vec<u8> {
        let peers: Vec<String> = self.peers.iter().map(i64::to_string).collect();
        format!("{}\n{}\n{}", digest_of(self.text), peers.join(" "), self.script.text()).into_bytes()
    }
}

impl Told {
    fn read(bytes: &[u8]) -> Option<Told> {
        let mut parts = std::str::from_utf8(bytes).ok()?.splitn(3, '\n');
        let digest = parts.next()?.parse().ok()?;
        let peers: Result<Vec<i64>, _> = parts.next()?.split_whitespace().map(str::parse).collect();
        Some(Told { digest, peers: peers.ok()?, script: Script::read(parts.next()?)? })
    }
}

/// What ranks with roles found when they compared their programs.
pub(super) enum Verdict {
    /// They fit together: the number of the agreement, and whether any of them communicates.
    Fit { joint: u64, communicates: bool },
    /// In some roles only peers given by numbers may differ: they trace again, with these tables on this rank.
    Retrace(Option<Peers>),
}

impl Meeting<'_> {
    /// Compares the programs within each role, and checks the communication of all ranks together.
    pub(super) fn agree_on_roles(&self, part: Result<&Part<'_>, &Error>, is_last: bool) -> Result<Verdict> {
        let lost = || Error::new("compile", "another rank's program cannot be read", self.site);
        let roles = self.roles.borrow().clone().ok_or_else(lost)?;
        let (ranks, members) = (self.ranks(), self.members());
        let bytes = part.map(Part::bytes);
        let all =
            self.all_fine(self.gather_outcomes("its program", bytes.as_deref().map_err(|error| *error))?)?;
        let told: Vec<Told> =
            all.iter().map(|bytes| Told::read(bytes)).collect::<Option<_>>().ok_or_else(lost)?;
        let differs = |role: &usize| {
            let places = roles.places(*role);
            places.iter().any(|place| told[*place].digest != told[places[0]].digest)
        };
        let unlike: Vec<usize> = roles.all().filter(differs).collect();
        let Some(first) = unlike.first() else {
            let communicates = told.iter().any(|told| !told.script.events.is_empty());
            let scripts: Vec<Script> = told.into_iter().map(|told| told.script).collect();
            check(&scripts)
                .map_err(|failure| Error::of("compile", failure.of(roles.text(&ranks)), self.site))?;
            let mut joint = Digest::default();
            all.iter().for_each(|bytes| joint.add_bytes(bytes));
            // Positive as an i64, since ranks compare it by a signed maximum.
            return Ok(Verdict::Fit { joint: (joint.get() >> 1) | 1, communicates });
        };
        let tables = |role: &usize| {
            let places = roles.places(*role);
            let peers = places.iter().map(|place| told[*place].peers.clone()).collect();
            Peers::new(places.iter().map(|place| members[*place]).collect(), peers)
        };
        if !is_last && unlike.iter().all(|role| tables(role).is_some()) {
            return Ok(Verdict::Retrace(unlike.iter().find(|role| **role == roles.mine()).and_then(tables)));
        }
        let text = part.map_or("", |part| part.text);
        let texts = self.all_fine(self.gather_outcomes("its program", Ok(text.as_bytes()))?)?;
        let places = roles.places(*first);
        let texts: Vec<String> =
            places.iter().map(|place| String::from_utf8_lossy(&texts[*place]).into_owned()).collect();
        Err(self.difference((&places, &roles.all_text(*first)), &texts, "its program", "line"))
    }

    /// Fails on all ranks if they declare a function in different ways. Ranks that declare nothing fit any.
    pub(super) fn check_alike(&self, rule: &str, declared: &[String], note: &str) -> Result<()> {
        let mut given: Vec<(&str, Vec<usize>)> = Vec::new();
        for (text, rank) in declared.iter().zip(self.ranks()).filter(|(text, _)| !text.is_empty()) {
            match given.iter_mut().find(|(other, _)| other == text) {
                Some((_, ranks)) => ranks.push(rank),
                None => given.push((text, vec![rank])),
            }
        }
        if given.len() < 2 {
            return Ok(());
        }
        let rows = given.iter().map(|(text, ranks)| format!("{}: {text}", ranks_text(ranks)));
        Err(self.error(Failure::new(rule).rows(rows).note(note)))
    }

    /// Learns the roles of its ranks, by place.
    pub(super) fn set_roles(&self, given: &[String]) {
        let mesh = self.world.mesh();
        let (members, group) = (self.members(), self.group_name());
        *self.roles.borrow_mut() =
            Some(Rc::new(Roles::new(given, &members, self.world.rank, (&mesh, group))));
    }
}
