//! Long waits, which are published to the other ranks, so that each can find out which ranks hold it up.
//!
//! - *Blame.* Missing ranks are followed through their own waits, and through the causes that they published, to the
//!   ranks that wait for nobody.
//! - *Cycles.* A waiting rank starts nothing, and a wait needs all ranks that it waits for. So if ranks wait for one
//!   another in a cycle, and each has checked again and found nothing new since all were seen waiting, none can ever
//!   continue. A rank that waits for others to progress, not to start something, is not part of a cycle: ranks progress
//!   while they wait.
//! - After ten seconds a line on the standard error names the missing ranks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use consort_types::{Failure, ranks_text};

use crate::error::{CommError, Operation, Side, message_text, rows_of};
use crate::flight_record::FlightRecord;
use crate::recorder::read_segment;
use crate::shm::segment::Segment;
use crate::shm::status::{self, WaitKind, Waiting, Waits};
use crate::ticks::now_ns;

/// How long a wait lasts before it is published: most end sooner.
const KNOWN: Duration = Duration::from_millis(20);
/// How often it is published again.
const BEAT: Duration = Duration::from_millis(10);
/// Checks that each rank of a cycle must have made since the cycle was first seen.
const LOOKS: u64 = 2;
/// A rank that has not checked for this long is stopped or dead, whatever it waited for.
const STALE: Duration = Duration::from_secs(1);
/// When a line names the missing ranks.
const NOTICE: Duration = Duration::from_secs(10);

/// All ranks of the world, seen from one of them.
pub(crate) struct Ranks {
    pub(crate) segments: Vec<Arc<Segment>>,
    pub(crate) me: usize,
}

/// A cycle that was seen: each rank, with the `seq` and the `beats` of its record at that time.
type Suspects = Vec<(usize, u64, u64)>;

/// A wait of one rank.
pub(crate) struct Watch<'a> {
    ranks: &'a Ranks,
    since: Instant,
    last: Option<Instant>,
    noticed: bool,
    suspects: Suspects,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(ranks: &'a Ranks, since: Instant) -> Watch<'a> {
        Watch { ranks, since, last: None, noticed: false, suspects: Vec::new() }
    }

    /// Publishes the wait and looks for a deadlock, at most once per `BEAT`.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        waits: impl FnOnce(&mut dyn FnMut(Waits<'_>)),
        what: impl FnOnce() -> Operation,
    ) -> Result<(), CommError> {
        // Models explore the protocol, and this is no part of it.
        if cfg!(any(loom, shuttle)) || now < self.last.map_or(self.since + KNOWN, |last| last + BEAT) {
            return Ok(());
        }
        self.last = Some(now);
        let (mine, mut missing) = (&self.ranks.segments[self.ranks.me], Vec::new());
        waits(&mut |waits| {
            status::set_waiting(mine, waits);
            missing = waits.missing.to_vec();
        });
        if !self.noticed && now >= self.since + NOTICE {
            self.noticed = true;
            let culprits = culprits(self.ranks, &missing);
            let waited = (now - self.since).as_secs();
            let text = format!("waiting for {waited} s; missing: {}", ranks_text(&culprits));
            let notice =
                Failure::new(text).of(what().to_string()).rows(rows_of(&doing(self.ranks, &culprits)));
            eprintln!("consort: rank {}: {notice}", self.ranks.me);
        }
        self.find_cycle()
    }

    /// An error if this rank is part of a cycle, or waits for one, that was seen before and has not changed since.
    fn find_cycle(&mut self) -> Result<(), CommError> {
        let waiting: Vec<Option<Waiting>> =
            self.ranks.segments.iter().map(|segment| status::waiting(segment)).collect();
        let Some(cycle) = cycle(&waiting, self.ranks.me) else {
            self.suspects.clear();
            return Ok(());
        };
        let now: Vec<(usize, &Waiting)> =
            cycle.iter().filter_map(|rank| Some((*rank, waiting[*rank].as_ref()?))).collect();
        let is_same = self.suspects.len() == now.len()
            && self.suspects.iter().zip(&now).all(|(then, (rank, now))| (then.0, then.1) == (*rank, now.seq));
        if !is_same {
            self.suspects = now.iter().map(|(rank, waiting)| (*rank, waiting.seq, waiting.beats)).collect();
            return Ok(());
        }
        let has_looked =
            |((_, _, then), (_, now)): (&(usize, u64, u64), &(usize, &Waiting))| now.beats >= then + LOOKS;
        if !self.suspects.iter().zip(&now).all(has_looked) {
            return Ok(());
        }
        let side = |(rank, waiting): &(usize, &Waiting)| side(&self.ranks.segments[*rank], *rank, waiting);
        let waits = |kind: WaitKind| now.iter().any(|(_, waiting)| waiting.kind == kind);
        let has_messages = waits(WaitKind::Send) && waits(WaitKind::Receive);
        Err(CommError::Deadlock { cycle: now.iter().map(side).collect(), has_messages })
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if self.last.is_some() {
            status::end_waiting(&self.ranks.segments[self.ranks.me]);
        }
    }
}

/// What a rank of a cycle waits for.
fn side(segment: &Segment, rank: usize, waiting: &Waiting) -> Side {
    let [text, site, group] = waiting.texts(segment);
    let number = waiting.number;
    let ranks = ranks_text(&waiting.missing);
    let what = match waiting.kind {
        WaitKind::Start | WaitKind::Progress | WaitKind::Release => {
            format!("{text}, call {number} on {group}: waits for {ranks} to start it")
        }
        WaitKind::Receive => {
            format!("{}: waits for {ranks} to send it", message_text("receive", &text, number))
        }
        WaitKind::Send => {
            format!("{}: waits for {ranks} to receive it", message_text("send", &text, number))
        }
    };
    Side { rank, what, site }
}

/// A cycle of waits that is reachable from a rank, beginning with its lowest rank.
fn cycle(waiting: &[Option<Waiting>], from: usize) -> Option<Vec<usize>> {
    let next = |rank: usize| -> &[usize] {
        match waiting.get(rank) {
            Some(Some(waiting)) if waiting.kind.needs_the_program() => &waiting.missing,
            _ => &[],
        }
    };
    // Depth first: the path from the start, and for each rank on it the next of its edges.
    let (mut path, mut done) = (vec![(from, 0)], BTreeSet::new());
    while let Some((rank, edge)) = path.last_mut() {
        let Some(to) = next(*rank).get(*edge).copied() else {
            done.insert(*rank);
            path.pop();
            continue;
        };
        *edge += 1;
        if let Some(start) = path.iter().position(|(rank, _)| *rank == to) {
            let mut cycle: Vec<usize> = path[start..].iter().map(|(rank, _)| *rank).collect();
            let least = (0..cycle.len()).min_by_key(|i| cycle[*i]).unwrap_or(0);
            cycle.rotate_left(least);
            return Some(cycle);
        }
        if !done.contains(&to) {
            path.push((to, 0));
        }
    }
    None
}

/// The ranks that keep the missing ones from doing their part.
pub(crate) fn culprits(ranks: &Ranks, missing: &[usize]) -> Vec<usize> {
    let (mut open, mut seen, mut found) = (missing.to_vec(), BTreeSet::from([ranks.me]), BTreeSet::new());
    let now = now_ns();
    while let Some(rank) = open.pop() {
        let Some(segment) = ranks.segments.get(rank) else { continue };
        if !seen.insert(rank) {
            continue;
        }
        let waits = status::waiting(segment)
            .filter(|waiting| now.saturating_sub(waiting.beat_ns) < STALE.as_nanos() as u64)
            .map(|waiting| waiting.missing)
            .filter(|missing| !missing.is_empty());
        match (status::cause(segment), waits) {
            (Some(cause), _) if !cause.culprits.is_empty() => found.extend(cause.culprits),
            (_, Some(missing)) => open.extend(missing),
            _ => drop(found.insert(rank)),
        }
    }
    if found.is_empty() { missing.to_vec() } else { found.into_iter().collect() }
}

/// The current or last operation of each rank.
pub(crate) fn doing(ranks: &Ranks, of: &[usize]) -> Vec<Side> {
    let mut flight = FlightRecord::new(of.iter().copied());
    for rank in of {
        if let Some(segment) = ranks.segments.get(*rank) {
            flight.add(*rank, read_segment(segment, *rank));
        }
    }
    flight.sorted().sides()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(kind: WaitKind, missing: &[usize]) -> Option<Waiting> {
        Some(Waiting::of(kind, missing))
    }

    #[test]
    fn circles_are_found_and_nothing_else() {
        use WaitKind::{Progress, Receive, Send, Start};
        let find = |waiting: &[Option<Waiting>], from| cycle(waiting, from);
        // Two ranks that wait for one another, and one that waits for them.
        let waiting = [waits(Receive, &[1]), waits(Start, &[0, 2]), waits(Send, &[0])];
        for from in 0..3 {
            assert_eq!(find(&waiting, from), Some(vec![0, 1]), "from {from}");
        }
        // A chain ends in a rank that does not wait.
        let chain = [waits(Receive, &[1]), waits(Start, &[2]), None];
        assert_eq!(find(&chain, 0), None);
        // A rank that only needs to progress does so while it waits.
        assert_eq!(find(&[waits(Receive, &[1]), waits(Progress, &[0])], 0), None);
        // A rank that waits for itself.
        assert_eq!(find(&[waits(Receive, &[0])], 0), Some(vec![0]));
        // A ring of many.
        let ring: Vec<_> = (0..50).map(|rank| waits(Send, &[(rank + 1) % 50])).collect();
        assert_eq!(find(&ring, 17), Some((0..50).collect()));
    }
}
