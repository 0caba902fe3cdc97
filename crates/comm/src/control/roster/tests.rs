//! Transitions of the roster, at times that the tests make up.

use super::*;

struct Table {
    roster: Roster,
    now: Instant,
}

impl Table {
    fn of(size: usize, launched: bool) -> Table {
        let mut roster = Roster::new(size, launched);
        (0..size).for_each(|rank| roster.join(rank, size, 100 + rank as u32).unwrap());
        roster.take_outgoing();
        Table { roster, now: Instant::now() }
    }

    fn arrive(&mut self, rank: usize, name: &str, milliseconds: u64) {
        let until = self.now + Duration::from_millis(milliseconds);
        let site = format!("x.rs:{rank}");
        let arrival = Arrival { name: name.to_string(), site, until, blob: vec![rank as u8], fd: None };
        self.roster.arrive(rank, arrival).unwrap();
    }

    fn failure(&self) -> String {
        self.roster.failure().map_or(String::new(), |failure| failure.to_string())
    }

    fn sent_to(&mut self) -> Vec<usize> {
        self.roster.take_outgoing().iter().map(|(rank, _)| *rank).collect()
    }
}

#[test]
fn all_get_what_all_brought_once_all_came() {
    let mut table = Table::of(3, true);
    for _ in 0..2 {
        table.arrive(2, "a", 100);
        table.arrive(0, "a", 100);
        assert!(table.sent_to().is_empty());
        table.arrive(1, "a", 100);
        let sent = table.roster.take_outgoing();
        let peers = vec![(100, false, vec![0]), (101, false, vec![1]), (102, false, vec![2])];
        assert!(
            sent.iter().all(|(_, packet)| packet.bytes == Message::Met { peers: peers.clone() }.encode(0))
        );
        assert_eq!(sent.len(), 3);
    }
    assert_eq!(table.roster.due(), None);
}

#[test]
fn claims_are_unique_and_in_range() {
    let mut roster = Roster::new(2, true);
    roster.join(1, 2, 7).unwrap();
    assert_eq!(roster.join(1, 2, 8).unwrap_err(), "rank 1 was already claimed by process 7");
    assert_eq!(roster.join(2, 2, 8).unwrap_err(), "expected a rank below 2, got 2");
    assert_eq!(roster.join(0, 3, 8).unwrap_err(), "expected a world of 2 ranks, got 3");
    roster.leave(1);
    assert!(roster.join(1, 2, 7).is_err(), "a rank that left does not come back");
}

#[test]
fn the_deadline_names_the_missing_to_all() {
    let mut table = Table::of(3, true);
    table.arrive(1, "barrier \"a\"", 100);
    table.arrive(0, "barrier \"a\"", 50);
    assert_eq!(table.roster.due(), Some(table.now + Duration::from_millis(50)));
    table.roster.tick(table.now + Duration::from_millis(49));
    assert_eq!(table.failure(), "");
    table.roster.tick(table.now + Duration::from_millis(50));
    assert!(table.failure().starts_with("barrier \"a\": the deadline passed; missing: rank 2\n"));
    assert_eq!(table.sent_to(), [0, 1, 2]);
    table.arrive(2, "barrier \"a\"", 100);
    assert!(table.sent_to().is_empty(), "one that comes late was told already");
}

#[test]
fn another_call_is_told_at_once() {
    let mut table = Table::of(3, true);
    table.arrive(0, "barrier \"a\"", 100);
    table.arrive(2, "parity", 100);
    let calls = "rank 0   barrier \"a\"   x.rs:0\n  rank 2   parity        x.rs:2\n";
    assert!(table.failure().contains(calls), "{}", table.failure());
    assert_eq!(table.sent_to(), [0, 1, 2]);
}

#[test]
fn a_closed_connection_waits_for_the_launchers_word() {
    let mut table = Table::of(3, true);
    (0..3).for_each(|rank| table.arrive(rank, "rendezvous", 100));
    table.sent_to();
    table.roster.lose(1, table.now);
    assert_eq!((table.failure(), table.roster.due()), (String::new(), Some(table.now + WORD)));
    table.roster.end(1, Exit::Signal(9));
    assert!(table.failure().starts_with("rank 1 was killed by SIGKILL (signal 9), after rendezvous\n"));
    assert_eq!(table.sent_to(), [0, 2]);

    let mut table = Table::of(2, true);
    table.roster.lose(1, table.now);
    table.roster.tick(table.now + WORD);
    assert!(table.failure().starts_with("rank 1 closed its connection without a goodbye\n"));

    let mut table = Table::of(2, false);
    table.roster.lose(1, table.now);
    assert!(table.failure().starts_with("rank 1 closed its connection without a goodbye\n"));
}

#[test]
fn an_end_without_goodbye_concerns_those_who_are_here() {
    let mut table = Table::of(2, true);
    table.roster.end(1, Exit::Code(0));
    assert!(table.failure().starts_with("rank 1 exited with code 0 without a goodbye\n"));

    // A rank that never connects, in a program without a control plane, concerns nobody.
    let mut roster = Roster::new(2, true);
    roster.end(0, Exit::Code(0));
    assert_eq!(roster.failure(), None);
    roster.end(1, Exit::Code(3));
    assert_eq!(roster.failure().map(|failure| failure.what.clone()), Some(What::Ended(Exit::Code(3))));
}

#[test]
fn who_waits_for_one_that_left_is_told() {
    let mut table = Table::of(2, true);
    table.roster.leave(1);
    assert_eq!(table.failure(), "");
    table.arrive(0, "barrier \"a\"", 100);
    assert!(table.failure().starts_with("rank 1 said goodbye and does not come to barrier \"a\"\n"));

    let mut roster = Roster::new(2, true);
    roster.end(1, Exit::Code(0));
    roster.join(0, 2, 7).unwrap();
    let mut table = Table { roster, now: Instant::now() };
    table.arrive(0, "rendezvous", 100);
    assert!(table.failure().starts_with("rank 1 exited with code 0 without a goodbye\n"));
}

#[test]
fn the_first_failure_stays_and_is_told_to_newcomers() {
    let mut roster = Roster::new(3, true);
    roster.join(0, 3, 7).unwrap();
    roster.abort(Some(0), "out of memory".to_string(), "x.rs:3".to_string());
    roster.end(2, Exit::Code(1));
    let failure = roster.failure().unwrap().clone();
    assert!(failure.to_string().starts_with("rank 0 aborted at x.rs:3: out of memory\n"));
    roster.take_outgoing();
    roster.join(1, 3, 8).unwrap();
    let frames: Vec<Vec<u8>> = roster.take_outgoing().iter().map(|(_, p)| p.bytes.clone()).collect();
    assert_eq!(frames, [Message::Welcome { launched: true }.encode(0), Message::Failed(failure).encode(0)]);
}
