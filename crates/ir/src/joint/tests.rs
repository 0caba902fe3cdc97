//! Schedules of pipelines that fit, and each way not to fit.

use std::collections::BTreeMap;

use consort_types::Rank;

use super::*;
use crate::index::Sym;
use crate::ops::OpTable;
use crate::text::parse;

/// A script of rank `rank` in a world of `n`, from words: `s1.0` sends to rank 1 with tag 0, `r1.0` receives, `c` is a
/// collective of the world, `w3` waits for event 3.
fn script(rank: u32, n: u32, words: &str) -> Script {
    let events = words.split_whitespace().enumerate().map(|(number, word)| {
        let (kind, rest) = word.split_at(1);
        let end = || {
            let (peer, tag) = rest.split_once('.').unwrap();
            vec![MessageEnd { peer: peer.parse().unwrap(), tag: tag.parse().unwrap(), kind: "f32[2]".into() }]
        };
        let action = match kind {
            "s" => Action::Exchange { group: 0, sends: end(), receives: vec![] },
            "r" => Action::Exchange { group: 0, sends: vec![], receives: end() },
            "c" => Action::Collective { group: 0, call: format!("all_reduce {rest}") },
            _ => Action::Wait(rest.parse().unwrap()),
        };
        Event { action, site: format!("r{rank}.rs:{number}") }
    });
    Script { rank, groups: vec![("world".into(), (0..n).collect())], events: events.collect() }
}

fn verdict(scripts: &[&str]) -> String {
    let n = scripts.len() as u32;
    let scripts: Vec<Script> = (0..).zip(scripts).map(|(rank, words)| script(rank, n, words)).collect();
    check(&scripts).map_or_else(|failure| failure.to_string(), |()| "fits".to_string())
}

#[test]
fn f1_schedules_that_fit() {
    for scripts in [
        // Each sends at once, then receives: starts do not block.
        ["s1.0 r1.0 w0 w1", "s0.0 r0.0 w0 w1"],
        // Messages of two tags, received in another order.
        ["s1.0 s1.1 w0 w1", "r0.1 w0 r0.0 w2"],
        ["c c w0 w1", "c w0 c w2"],
        ["", ""],
    ] {
        assert_eq!(verdict(&scripts), "fits", "{scripts:?}");
    }
}

#[test]
fn f1_what_does_not_fit_is_named() {
    let cases: [(&[&str], &str); 7] = [
        (
            &["s1.0 w0", ""],
            "rank 0 at r0.rs:0 sends f32[2] to rank 1 with tag 0, but rank 1 does not receive it (J1)\n  rank 1 has no receive from rank 0 left over on `world`\n  note: every message must be received, with the tag that it was sent with",
        ),
        (
            &["r1.3", ""],
            "rank 0 at r0.rs:0 receives f32[2] from rank 1 with tag 3, but rank 1 does not send it (J1)\n  rank 1 has no send to rank 0 left over on `world`\n  note: every message must be received, with the tag that it was sent with",
        ),
        (
            &["s1.0 s1.2 w0 w1", "r0.0 r0.1 w0 w1"],
            "rank 1 at r1.rs:1 receives f32[2] from rank 0 with tag 1, but rank 0 does not send it (J1)\n  rank 0 at r0.rs:1 sends f32[2] with tag 2 instead\n  note: every message must be received, with the tag that it was sent with",
        ),
        (
            &["s0.0 w0", ""],
            "rank 0 at r0.rs:0 sends f32[2] to rank 0 with tag 0, but rank 0 does not receive it (J1)\n  rank 0 has no receive from rank 0 left over on `world`\n  note: a message to the own rank needs both a send and a receive there",
        ),
        (
            &["csum w0", "cmax w0", "csum w0"],
            "call 0 on `world` must be the same on all its ranks (J2)\n  rank 0: all_reduce sum  r0.rs:0\n  rank 1: all_reduce max  r1.rs:0\n  rank 2: all_reduce sum  r2.rs:0\n  note: every member must make the same calls in the same order",
        ),
        (
            &["c w0 c w2", "c w0"],
            "call 1 on `world` must be the same on all its ranks (J2)\n  rank 0: all_reduce   r0.rs:2\n  rank 1: nothing more\n  note: every member must make the same calls in the same order",
        ),
        (
            &["s1.0 w0 r1.0 w2", "s0.0 w0 r0.0 w2"],
            "these ranks wait for one another, and none can go on (J3)\n  rank 0 at r0.rs:1 waits for its message to rank 1 (tag 0), which rank 1 at r1.rs:2 has yet to reach\n  rank 1 at r1.rs:1 waits for its message to rank 0 (tag 0), which rank 0 at r0.rs:2 has yet to reach\n  note: start receives before waiting for sends, and make calls on several groups in one order",
        ),
    ];
    for (scripts, expected) in cases {
        assert_eq!(verdict(scripts), expected, "{scripts:?}");
    }
}

#[test]
fn f1_a_message_and_a_collective_in_a_circle() {
    // Rank 1 waits for the collective before it sends what rank 0 needs to get there.
    let text = verdict(&["r1.0 w0 c w2", "c w0 s0.0 w2"]);
    assert!(text.starts_with("these ranks wait for one another, and none can go on (J3)"), "{text}");
    assert!(
        text.contains("rank 0 at r0.rs:1 waits for a message from rank 1 (tag 0), which rank 1 at r1.rs:2"),
        "{text}"
    );
    assert!(text.contains("rank 1 at r1.rs:1 waits for all_reduce, which rank 0 at r0.rs:2"), "{text}");
}

#[test]
fn f1_thousands_of_ranks_in_a_ring() {
    let n = 4096;
    let ring = |rank: u32| format!("r{}.0 s{}.0 w0 w1", (rank + n - 1) % n, (rank + 1) % n);
    let scripts: Vec<Script> = (0..n).map(|rank| script(rank, n, &ring(rank))).collect();
    assert_eq!(check(&scripts), Ok(()));
}

#[test]
fn f1_the_script_of_a_program() {
    let source = "mesh (pp: 2, tp: 2)

func @f(v0: f32[4]{pp,tp}, v1: f32[3,4]{pp,tp}) -> f32[4]{pp,tp} {
    v2 = scan[length=3, carries=1, slices=1] v0, v1 : f32[4]{pp,tp} {
        body(v3: f32[4]{pp,tp}, v4: f32[4]{pp,tp}) {
            v5 = exchange_start[send=[shift(+1) tag 7], recv=[shift(-1) tag 7], over=pp] v4, v3 : pending<f32[4]{pp,tp}> ; p.rs:4
            v6 = wait v5 : f32[4]{pp,tp}
            return v6
        }
    }
    v7 = all_reduce_start[reduce=sum, over=tp] v2 : pending<f32[4]{pp}> ; p.rs:9
    v8 = wait v7 : f32[4]{pp} ; p.rs:9
    return v8
}";
    let program = parse(source, &OpTable::built_in()).unwrap().program;
    let of = |rank| Script::of(&program.mesh, &program.funcs[0], Rank(rank), &BTreeMap::new()).unwrap();
    let scripts: Vec<Script> = (0..4).map(of).collect();
    assert_eq!(check(&scripts), Ok(()));
    let first = &scripts[0];
    assert_eq!(first.groups, [("pp".to_string(), vec![0, 2]), ("tp".to_string(), vec![0, 1])]);
    assert_eq!(first.events.len(), 8);
    let sent = MessageEnd { peer: 2, tag: 7, kind: "f32[4]".into() };
    let exchange = Action::Exchange { group: 0, sends: vec![sent], receives: vec![] };
    assert_eq!(first.events[0], Event { action: exchange, site: "p.rs:4".into() });
    assert_eq!(first.events[3].action, Action::Wait(2));
    let sum = Action::Collective { group: 1, call: "all_reduce sum f32[4] -> {pp}".into() };
    assert_eq!(first.events[6], Event { action: sum, site: "p.rs:9".into() });
    for script in &scripts {
        assert_eq!(Script::read(&script.text()).as_ref(), Some(script));
    }
    assert!(Script::symbols(&program.funcs[0]).iter().all(|sym| !matches!(sym, Sym::Backed(_))));
    // One rank of three iterations, the other of two.
    let mut uneven = scripts.clone();
    uneven[0].events.drain(..2);
    assert!(check(&uneven).unwrap_err().to_string().contains("rank 2 at p.rs:4 receives f32[4] from rank 0"));
}
