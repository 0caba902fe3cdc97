//! The contents of all ranks' flight recorders at one moment: merged, and summarised.

mod divergence;

pub use divergence::Divergence;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use consort_types::{aligned, ranks_text};

use crate::error::Side;
use crate::event::{Event, EventKind};
use crate::recorder::Tape;
use crate::ticks::now_ns;

/// The last events of all ranks. It prints as the last operation of each rank and the first divergence.
#[derive(Clone, Debug)]
pub struct FlightRecord {
    /// The events, in the order of time.
    pub events: Vec<Event>,
    /// How many events of each rank were overwritten; `None` for a rank whose recorder could not be read.
    pub lost: BTreeMap<usize, Option<u64>>,
    /// The end of the recording, on the clock of the events: durations are counted up to here.
    pub until_ns: u64,
}

/// Maximum number of rows of a summary.
const ROWS: usize = 16;

impl FlightRecord {
    pub(crate) fn new(ranks: impl IntoIterator<Item = usize>) -> FlightRecord {
        let lost = ranks.into_iter().map(|rank| (rank, None)).collect();
        FlightRecord { events: Vec::new(), lost, until_ns: now_ns() }
    }

    /// Adds the contents of a rank's ring.
    pub(crate) fn add(&mut self, rank: usize, tape: Option<Tape>) {
        if let Some(tape) = tape {
            self.events.extend(tape.events);
            let lost = self.lost.entry(rank).or_default();
            *lost = Some(lost.unwrap_or(0).saturating_add(tape.lost));
        }
    }

    /// All events ordered by time; simultaneous events of one rank keep their order.
    pub(crate) fn sorted(mut self) -> FlightRecord {
        self.events.sort_by_key(|event| event.time_ns);
        self.until_ns = now_ns();
        self
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The first call that members made differently, or else the first that not all of them made.
    pub fn divergence(&self) -> Option<Divergence> {
        divergence::first(&self.events, &self.lost)
    }

    /// The last `count` events of each rank, a line each, by rank.
    pub fn last_events(&self, count: usize) -> String {
        let mut lines = String::new();
        for events in self.by_rank().values() {
            for event in &events[events.len().saturating_sub(count)..] {
                lines += &format!("{event}\n");
            }
        }
        lines
    }

    /// All events, a line of JSON each.
    pub fn json_lines(&self) -> String {
        self.events.iter().map(|event| event.json() + "\n").collect()
    }

    /// The events of each rank, in the order of time.
    fn by_rank(&self) -> BTreeMap<usize, Vec<&Event>> {
        let mut ranks: BTreeMap<usize, Vec<&Event>> =
            self.lost.keys().map(|rank| (*rank, Vec::new())).collect();
        self.events.iter().for_each(|event| ranks.entry(event.rank).or_default().push(event));
        ranks
    }

    /// A rank's current operation by its events, or else its last event.
    fn last<'a>(&self, events: &[&'a Event]) -> Option<Last<'a>> {
        let mut in_flight: BTreeMap<String, &Event> = BTreeMap::new();
        let (mut last, mut waits, mut failed) = (None, None, None);
        for event in events.iter().copied() {
            match event.kind {
                EventKind::Error => failed = Some(event.time_ns),
                EventKind::Finish => drop(in_flight.remove(&event.place())),
                EventKind::Start | EventKind::Publish | EventKind::Wait => {
                    in_flight.entry(event.place()).or_insert(event);
                }
                EventKind::Release | EventKind::Kernel | EventKind::Compile => {}
            }
            if event.kind == EventKind::Wait {
                waits = Some(event.place());
            }
            if event.kind != EventKind::Error {
                last = Some(event);
            }
        }
        let oldest = || in_flight.values().min_by_key(|event| event.time_ns).copied();
        let waited = waits.and_then(|place| in_flight.get(&place).copied());
        let current = waited.or_else(oldest);
        let (event, state, until) = match (current, failed) {
            (Some(event), Some(failed)) => (event, State::Failed, failed),
            (Some(event), None) if waited.is_some() => (event, State::Waiting, self.until_ns),
            (Some(event), None) => (event, State::InFlight, self.until_ns),
            (None, _) => (last?, State::Finished, self.until_ns),
        };
        Some(Last { event, state, time: Duration::from_nanos(until.saturating_sub(event.time_ns)) })
    }

    /// The current operation or last event of each rank, with its source line.
    pub(crate) fn sides(&self) -> Vec<Side> {
        let ranks = self.by_rank();
        let last = ranks.iter().filter_map(|(rank, events)| Some((*rank, self.last(events)?)));
        let side = |(rank, Last { event, state, .. }): (usize, Last<'_>)| {
            let what = format!("{}: {}, {}", state.name(), event.place(), event.what());
            Side { rank, what, site: event.site.clone() }
        };
        last.map(side).collect()
    }

    /// Ranks and their last operation; ranks with the same one share a row, with the longest time.
    fn rows(&self) -> Vec<[String; 5]> {
        let mut rows: Vec<Ranks> = Vec::new();
        for (rank, events) in self.by_rank() {
            let (cells, state, time) = match self.last(&events) {
                None => {
                    let is_read = self.lost.get(&rank).is_none_or(Option::is_some);
                    let text = if is_read { "nothing recorded" } else { "recorder not read" };
                    ([text.into(), String::new(), String::new()], None, Duration::ZERO)
                }
                Some(Last { event, state, time }) => {
                    ([event.place(), event.what(), event.site.clone()], Some(state), time)
                }
            };
            match rows.iter_mut().find(|row| row.cells == cells && row.state == state) {
                Some(row) => {
                    row.ranks.push(rank);
                    row.time = row.time.max(time);
                }
                None => rows.push(Ranks { ranks: vec![rank], cells, state, time }),
            }
        }
        let text = |Ranks { ranks, cells: [place, what, site], state, time }| {
            let state = state.map_or(String::new(), |state: State| state.text(time));
            [ranks_text(&ranks), place, what, site, state]
        };
        rows.into_iter().map(text).collect()
    }
}

/// Ranks with the same last operation.
struct Ranks {
    ranks: Vec<usize>,
    /// Place, text and source line of the operation.
    cells: [String; 3],
    /// `None` if nothing was recorded.
    state: Option<State>,
    /// The longest.
    time: Duration,
}

/// A rank's last operation, its state, and its duration.
struct Last<'a> {
    event: &'a Event,
    state: State,
    time: Duration,
}

/// The state of an operation at the end of a recording.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Failed,
    Waiting,
    InFlight,
    Finished,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Failed => "failed",
            State::Waiting => "waiting",
            State::InFlight => "in flight",
            State::Finished => "finished",
        }
    }

    /// With the time since its event.
    fn text(self, time: Duration) -> String {
        match self {
            State::Failed => format!("failed after {time:.1?}"),
            State::Finished => format!("finished {time:.1?} before"),
            State::Waiting | State::InFlight => format!("{} for {time:.1?}", self.name()),
        }
    }
}

impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        f.write_str("last operation of each rank:")?;
        for row in aligned(&rows[..rows.len().min(ROWS)]) {
            write!(f, "\n  {row}")?;
        }
        if rows.len() > ROWS {
            write!(f, "\n  and {} more", rows.len() - ROWS)?;
        }
        match self.divergence() {
            Some(divergence) => write!(f, "\nfirst divergence: {divergence}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
