//! What a flight recorder holds, as ranks send it to one another: the last events, since it must arrive soon.

use serde::{Deserialize, Serialize};

use crate::event::{Event, EventKind};
use crate::recorder::Tape;

/// The most events that are sent.
const EVENTS: usize = 128;

/// The last events of a rank, and how many came before them.
#[derive(Serialize, Deserialize)]
pub(super) struct Sent {
    events: Vec<SentEvent>,
    lost: u64,
}

#[derive(Serialize, Deserialize)]
struct SentEvent {
    time_ns: u64,
    /// Its place in [`EventKind::ALL`].
    kind: u8,
    group: String,
    number: u64,
    is_batch: bool,
    is_uneven: bool,
    op: String,
    bytes: u64,
    extra: u64,
    site: String,
}

impl Sent {
    pub(super) fn new(tape: Tape) -> Sent {
        let skipped = tape.events.len().saturating_sub(EVENTS);
        let lost = tape.lost + skipped as u64;
        let events = tape.events.into_iter().skip(skipped).map(SentEvent::new).collect();
        Sent { events, lost }
    }

    /// What `rank` sent; `None` if it is nothing that a rank sends.
    pub(super) fn tape(self, rank: usize) -> Option<Tape> {
        let events: Option<Vec<Event>> = self.events.into_iter().map(|event| event.event(rank)).collect();
        Some(Tape { events: events?, lost: self.lost })
    }
}

impl SentEvent {
    fn new(event: Event) -> SentEvent {
        let Event { rank: _, time_ns, kind, group, number, is_batch, is_uneven, op, bytes, extra, site } =
            event;
        SentEvent { time_ns, kind: kind as u8, group, number, is_batch, is_uneven, op, bytes, extra, site }
    }

    fn event(self, rank: usize) -> Option<Event> {
        let SentEvent { time_ns, kind, group, number, is_batch, is_uneven, op, bytes, extra, site } = self;
        let kind = *EventKind::ALL.get(usize::from(kind))?;
        Some(Event { rank, time_ns, kind, group, number, is_batch, is_uneven, op, bytes, extra, site })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u64) -> Event {
        Event {
            rank: 3,
            time_ns: 1000 + number,
            kind: EventKind::ALL[number as usize % EventKind::ALL.len()],
            group: "world.5[0,3]".into(),
            number,
            is_batch: number.is_multiple_of(2),
            is_uneven: number.is_multiple_of(3),
            op: format!("op {number}"),
            bytes: 8 * number,
            extra: !number,
            site: "x.rs:1".into(),
        }
    }

    #[test]
    fn the_last_events_arrive_as_they_were() {
        let events: Vec<Event> = (0..EVENTS as u64 + 7).map(event).collect();
        let sent = Sent::new(Tape { events: events.clone(), lost: 5 });
        let bytes = postcard::to_extend(&sent, Vec::new()).unwrap();
        let read: Sent = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(read.tape(3), Some(Tape { events: events[7..].to_vec(), lost: 12 }));
    }
}
