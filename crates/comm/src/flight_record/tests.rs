//! Divergences and summaries, from events written by hand.

use super::*;

const MS: u64 = 1_000_000;

fn event(rank: usize, ms: u64, kind: EventKind, group: &str, number: u64, op: &str) -> Event {
    let site = "src/x.rs:10".to_string();
    Event {
        rank,
        time_ns: ms * MS,
        kind,
        group: group.into(),
        number,
        is_batch: false,
        is_uneven: false,
        op: op.into(),
        bytes: 40,
        extra: 0,
        site,
    }
}

fn flight(lost: &[Option<u64>], events: Vec<Event>) -> FlightRecord {
    let lost = lost.iter().copied().enumerate().collect();
    FlightRecord { until_ns: 100 * MS, ..FlightRecord { events, lost, until_ns: 0 }.sorted() }
}

const SUM: &str = "all_reduce sum f32";
const MAX: &str = "all_reduce max f32";

/// Ranks 0 to 3 make calls `from..` up to their own last one, finishing each before the next.
fn calls(from: u64, last: [u64; 4]) -> Vec<Event> {
    let mut events = Vec::new();
    for (rank, last) in last.into_iter().enumerate() {
        for number in from..=last {
            events.push(event(rank, number, EventKind::Start, "world", number, SUM));
            if number < last {
                events.push(event(rank, number, EventKind::Finish, "world", number, SUM));
            }
        }
    }
    events
}

fn divergence(flight: &FlightRecord) -> Option<String> {
    flight.divergence().map(|divergence| divergence.to_string())
}

#[test]
fn ranks_that_do_the_same_do_not_diverge() {
    assert_eq!(divergence(&flight(&[Some(0); 4], calls(0, [5; 4]))), None);
    assert_eq!(divergence(&flight(&[Some(0); 4], vec![])), None);
}

#[test]
fn the_first_call_that_differs_is_named_with_both_sides() {
    let mut events = calls(0, [60; 4]);
    for event in events.iter_mut().filter(|event| event.rank == 2 && event.number >= 57) {
        (event.op, event.site) = (MAX.into(), "src/x.rs:12".into());
    }
    let expected = "world call 57: ranks 0,1,3 all_reduce sum f32, 40 bytes at src/x.rs:10; \
        rank 2 all_reduce max f32, 40 bytes at src/x.rs:12";
    assert_eq!(divergence(&flight(&[Some(0); 4], events)).unwrap(), expected);
}

#[test]
fn other_bytes_and_other_sizes_differ_but_not_where_members_may() {
    let change = |change: fn(&mut Event)| {
        let mut events = calls(0, [2; 4]);
        events
            .iter_mut()
            .filter(|event| event.number == 1)
            .for_each(|event| if event.rank == 0 { change(event) } else { event.op = event.op.clone() });
        divergence(&flight(&[Some(0); 4], events))
    };
    let bytes = change(|event| event.bytes = 44).unwrap();
    let expected = "world call 1: rank 0 all_reduce sum f32, 44 bytes at src/x.rs:10; \
        ranks 1,2,3 all_reduce sum f32, 40 bytes at src/x.rs:10";
    assert_eq!(bytes, expected);
    let extra = change(|event| event.extra = 1).unwrap();
    let expected = "world call 1: rank 0 all_reduce sum f32, 40 bytes, digest 0001 at src/x.rs:10; \
        ranks 1,2,3 all_reduce sum f32, 40 bytes, digest 0000 at src/x.rs:10";
    assert_eq!(extra, expected);
    // The same call from two lines is the same call.
    assert_eq!(change(|event| event.site = "src/y.rs:1".into()), None);
    let uneven = (0..2).map(|rank| {
        let event = Event { is_uneven: true, ..event(rank, 1, EventKind::Start, "world", 0, "all_to_all") };
        Event { bytes: 8 * rank as u64, ..event }
    });
    assert_eq!(divergence(&flight(&[Some(0); 2], uneven.collect())), None);
}

#[test]
fn a_call_that_a_member_has_not_made_is_named() {
    let behind = flight(&[Some(0); 4], calls(0, [8, 7, 8, 6]));
    let expected =
        "world call 7: ranks 0,1,2 all_reduce sum f32, 40 bytes at src/x.rs:10; rank 3 has not started it";
    assert_eq!(divergence(&behind).unwrap(), expected);
    // The calls of a rank are unknown if its recorder could not be read, or holds nothing of the group any more.
    for unknown in [None, Some(5)] {
        let events = calls(0, [8, 7, 8, 6]).into_iter().filter(|event| event.rank != 3).collect();
        let text = divergence(&flight(&[Some(0), Some(0), Some(0), unknown], events)).unwrap();
        assert!(
            text.starts_with("world call 8: ranks 0,2 ") && text.ends_with("; rank 1 has not started it"),
            "{text}"
        );
    }
    // A rank that has recorded everything, and nothing of the group, has not made the call.
    let events = calls(0, [1; 4]).into_iter().filter(|event| event.rank < 2).collect();
    let text = divergence(&flight(&[Some(0); 4], events)).unwrap();
    assert!(
        text.starts_with("world call 0: ") && text.ends_with("; ranks 2,3 have not started it"),
        "{text}"
    );
}

#[test]
fn old_calls_that_some_have_forgotten_are_not_compared() {
    let mut events = calls(0, [50; 4]);
    events.retain(|event| event.rank != 1 || event.number >= 40);
    assert_eq!(divergence(&flight(&[Some(0), Some(99), Some(0), Some(0)], events)), None);
}

#[test]
fn a_subgroup_has_the_members_in_its_name() {
    let made = |ranks: &[usize]| {
        let start = |rank: &usize| event(*rank, 1, EventKind::Start, "world.5[0,2]", 0, SUM);
        divergence(&flight(&[Some(0); 4], ranks.iter().map(start).collect()))
    };
    assert_eq!(made(&[0, 2]), None);
    let expected =
        "world.5[0,2] call 0: rank 2 all_reduce sum f32, 40 bytes at src/x.rs:10; rank 0 has not started it";
    assert_eq!(made(&[2]).unwrap(), expected);
}

#[test]
fn calls_that_differ_come_before_one_that_may_be_late() {
    let mut events = calls(0, [3, 3, 3, 2]);
    events.push(event(0, 50, EventKind::Start, "world.1[0,1]", 4, SUM));
    events.push(event(1, 51, EventKind::Start, "world.1[0,1]", 4, MAX));
    let text = divergence(&flight(&[Some(0); 4], events)).unwrap();
    assert!(text.starts_with("world.1[0,1] call 4: rank 0 all_reduce sum f32"), "{text}");
}

#[test]
fn a_summary_says_what_each_rank_was_in() {
    let events = vec![
        event(0, 10, EventKind::Start, "world", 7, SUM),
        event(0, 11, EventKind::Start, "world", 8, "barrier"),
        event(0, 12, EventKind::Wait, "world", 8, "barrier"),
        event(1, 20, EventKind::Start, "world", 7, SUM),
        event(1, 30, EventKind::Start, "world", 8, "barrier"),
        event(2, 40, EventKind::Start, "world", 7, SUM),
        event(2, 41, EventKind::Finish, "world", 7, SUM),
        event(2, 60, EventKind::Kernel, "world", 0, "matmul"),
        event(3, 40, EventKind::Start, "world", 7, SUM),
        event(3, 45, EventKind::Error, "world", 7, "the deadline passed"),
        event(4, 50, EventKind::Start, "world", 7, SUM),
    ];
    let expected = "last operation of each rank:
  rank 0      world call 8        barrier, 40 bytes              src/x.rs:10   waiting for 89.0ms
  ranks 1,4   world call 7        all_reduce sum f32, 40 bytes   src/x.rs:10   in flight for 80.0ms
  rank 2      world kernel        matmul, 40 bytes               src/x.rs:10   finished 40.0ms before
  rank 3      world call 7        all_reduce sum f32, 40 bytes   src/x.rs:10   failed after 5.0ms
  rank 5      recorder not read
first divergence: world call 8: ranks 0,1 barrier, 40 bytes at src/x.rs:10; ranks 2,3,4 have not started it";
    let flight = flight(&[Some(0), Some(0), Some(0), Some(0), Some(0), None], events);
    assert_eq!(flight.to_string(), expected);
    let last = flight.last_events(1);
    assert_eq!(last.lines().count(), 5);
    assert!(
        last.starts_with("0.012000000  rank 0  wait     world call 8  barrier, 40 bytes  src/x.rs:10\n"),
        "{last}"
    );
    assert_eq!(flight.json_lines().lines().count(), 11);
}
