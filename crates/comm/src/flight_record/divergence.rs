//! The first divergence: the first call in which the records of a group's members differ.

use std::collections::BTreeMap;
use std::fmt;

use consort_types::ranks_text;

use crate::error::{Parties, Party};
use crate::event::{Event, EventKind};
use crate::recorder::ranks_in;

/// A call that the members of its group did not all make, or made differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The group.
    pub group: String,
    /// The number of the call.
    pub number: u64,
    /// Which ranks made which call, ordered by first rank.
    pub parties: Vec<Party>,
    /// The members that have not made it.
    pub absent: Vec<usize>,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let party = |Party { ranks, what, site }: &Party| format!("{} {what} at {site}", ranks_text(ranks));
        let mut parts: Vec<String> = self.parties.iter().map(party).collect();
        if !self.absent.is_empty() {
            let have = if self.absent.len() == 1 { "has" } else { "have" };
            parts.push(format!("{} {have} not started it", ranks_text(&self.absent)));
        }
        write!(f, "{} call {}: {}", self.group, self.number, parts.join("; "))
    }
}

/// The starts of each rank on a group, by number.
type Starts<'a> = BTreeMap<usize, BTreeMap<u64, &'a Event>>;

/// The first divergence: of calls that differ, or else of calls that some members have not made. `lost` is how many
/// events of each rank are unknown; a rank that may have made a call is not reported as absent.
pub(super) fn first(events: &[Event], lost: &BTreeMap<usize, Option<u64>>) -> Option<Divergence> {
    let mut groups: BTreeMap<&str, Starts<'_>> = BTreeMap::new();
    for event in events {
        // Each member numbers its batches of messages by itself.
        if event.kind == EventKind::Start && !event.is_batch && !event.group.is_empty() {
            let starts = groups.entry(&event.group).or_default().entry(event.rank).or_default();
            starts.insert(event.number, event);
        }
    }
    let found = groups.iter().filter_map(|(group, starts)| of_group(group, starts, lost));
    // Calls that differ are an error; a rank that is absent may only be late.
    let (_, _, divergence) = found.min_by_key(|(differs, time, _)| (!differs, *time))?;
    Some(divergence)
}

/// The first divergence of a group, whether it is of calls that differ, and when the call was first made.
fn of_group(
    group: &str,
    starts: &Starts<'_>,
    lost: &BTreeMap<usize, Option<u64>>,
) -> Option<(bool, u64, Divergence)> {
    let members = ranks_in(group).unwrap_or_else(|| lost.keys().copied().collect());
    let mut numbers: Vec<u64> = starts.values().flat_map(BTreeMap::keys).copied().collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut late = None;
    for number in numbers {
        let made: Vec<&Event> = starts.values().filter_map(|starts| starts.get(&number).copied()).collect();
        let Some(time) = made.iter().map(|event| event.time_ns).min() else { continue };
        let differs = made.iter().any(|event| !is_same(event, made[0]));
        // Later records are overwritten last: if a call is still recorded, so are all later ones.
        let is_absent = |rank: &usize| match starts.get(rank).and_then(|starts| starts.last_key_value()) {
            Some((last, _)) => *last < number,
            None => lost.get(rank) == Some(&Some(0)),
        };
        let absent: Vec<usize> = members.iter().copied().filter(is_absent).collect();
        let divergence =
            || Divergence { group: group.into(), number, parties: parties(&made), absent: absent.clone() };
        if differs {
            return Some((true, time, divergence()));
        }
        if late.is_none() && !absent.is_empty() {
            late = Some((false, time, divergence()));
        }
    }
    late
}

fn is_same(a: &Event, b: &Event) -> bool {
    // Calls of a function in several roles are named differently; what must be equal is in `extra`.
    let in_role = |event: &Event| event.op.contains(" as role `");
    (a.op == b.op || in_role(a) && in_role(b)) && a.extra == b.extra && (a.is_uneven || a.bytes == b.bytes)
}

fn parties(made: &[&Event]) -> Vec<Party> {
    let mut parties = Parties::default();
    for event in made {
        parties.add(event.rank, event.what(), event.site.clone(), event.extra);
    }
    parties.list()
}
