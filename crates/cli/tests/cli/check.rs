//! `consort check`: schedules of pipelines on 2 x 2 ranks, and what is wrong with some.

use serde_json::json;

use crate::scratch::{SUM, Scratch};

const GPIPE: [&str; 2] = ["f0 f1 f2 f3 b0 b1 b2 b3", "f0 f1 f2 f3 b0 b1 b2 b3"];
const ONE_F_ONE_B: [&str; 2] = ["f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"];

/// A pipeline of two stages in this order of forward and backward steps. Stage 0 sends micro-batch `m` with tag `m` in step
/// `fm`, and receives its gradient in step `bm`; stage 1 the reverse. All sum over `tp` in each step.
fn pipeline(orders: [&str; 2]) -> String {
    let mut text = String::from("mesh (pp: 2, tp: 2)\n");
    for (stage, order) in orders.into_iter().enumerate() {
        let name = ["first", "last"][stage];
        text.push_str(&format!("\nfunc @{name}(v0: f32[2]{{pp,tp}}) -> f32[2]{{pp}} {{\n"));
        let (mut next, mut last, mut sent) = (1, 0, Vec::new());
        for (at, step) in order.split_whitespace().enumerate() {
            let (kind, tag) = step.split_at(1);
            let (peer, loc) = (format!("[at({}) tag {tag}]", 1 - stage), format!("; {name}.rs:{}", at + 1));
            let (one, two, three) = (next, next + 1, next + 2);
            if (kind == "f") == (stage == 0) {
                text.push_str(&sum(last, one, &loc));
                let start = format!("exchange_start[send={peer}, recv=[], over=pp] v{two}");
                text.push_str(&format!("    v{three} = {start} : pending<> {loc}\n"));
                sent.push(three);
                next += 3;
            } else {
                let start = format!("exchange_start[send=[], recv={peer}, over=pp] v0");
                text.push_str(&format!("    v{one} = {start} : pending<f32[2]{{pp,tp}}> {loc}\n"));
                text.push_str(&format!("    v{two} = wait v{one} : f32[2]{{pp,tp}} {loc}\n"));
                last = two;
                next += 2;
            }
        }
        sent.iter().for_each(|sent| text.push_str(&format!("    wait v{sent}\n")));
        text.push_str(&sum(last, next, ""));
        text.push_str(&format!("    return v{}\n}}\n", next + 1));
    }
    text
}

/// The sum of a value over `tp`, as the values `to` and `to + 1`.
fn sum(of: usize, to: usize, loc: &str) -> String {
    let start =
        format!("    v{to} = all_reduce_start[reduce=sum, over=tp] v{of} : pending<f32[2]{{pp}}> {loc}\n");
    format!("{start}    v{} = wait v{to} : f32[2]{{pp}} {loc}\n", to + 1)
}

const ROLES: &str = "--role first=0,1 --role @last=2,3";

#[test]
fn f1_gpipe_and_1f1b_fit() {
    let scratch = Scratch::new();
    for (name, orders) in [("gpipe", GPIPE), ("1f1b", ONE_F_ONE_B)] {
        scratch.write("p.csr", pipeline(orders));
        let expected = "@first on ranks 0,1, @last on ranks 2,3: fits together, 52 starts on 4 groups\n";
        assert_eq!(scratch.run(&format!("check p.csr {ROLES}")).parts(), (0, expected, ""), "{name}");
    }
    let json = scratch.run(&format!("check p.csr {ROLES} --json"));
    assert_eq!((json.code, &json.json()["ok"]), (0, &json!(true)));
    // Alone, each function is checked as if all ranks ran it: then nobody receives.
    let alone = scratch.run("check p.csr");
    assert_eq!(alone.code, 1);
    assert!(alone.stderr.contains("error: @first on ranks 0,1,2,3: "), "{}", alone.stderr);
}

#[test]
fn f1_what_does_not_fit_is_refused_with_lines() {
    let scratch = Scratch::new();
    let missing = ["f0 f1 f2 b0 b1 b2", "f0 f1 b0 b1 b2"];
    let crossed = ["b0 f0", "f0 b0"];
    let cases = [
        (
            pipeline(missing),
            "rank 0 at first.rs:3 sends f32[2] to rank 2 with tag 2, but rank 2 does not receive it (J1)",
        ),
        (
            pipeline(GPIPE).replacen("send=[at(1) tag 2]", "send=[at(1) tag 9]", 1),
            "rank 2 at last.rs:3 receives f32[2] from rank 0 with tag 2, but rank 0 does not send it (J1)\n  rank 0 at first.rs:3 sends f32[2] with tag 9 instead",
        ),
        (
            pipeline(GPIPE).replacen("send=[at(1) tag 2]", "send=[at(rank(pp)+5) tag 2]", 1),
            "@first: exchange: expected a peer in 0..2, or -1 for none, got 5 (C2)\n  at first.rs:3\n  note: peers are numbered within the group",
        ),
        (
            pipeline(crossed),
            "these ranks wait for one another, and none can go on (J3)\n  rank 0 at first.rs:1 waits for a message from rank 2 (tag 0)",
        ),
    ];
    for (text, part) in cases {
        scratch.write("p.csr", text);
        let outcome = scratch.run(&format!("check p.csr {ROLES}"));
        assert_eq!((outcome.code, &outcome.stdout[..]), (1, ""), "{part}");
        assert!(outcome.stderr.contains(part), "{part}\n{}", outcome.stderr);
    }
}

#[test]
fn f1_the_program_of_the_page_on_messages_is_refused_as_the_page_says() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let page = std::fs::read_to_string(format!("{root}/docs/messages.md")).expect("the page");
    let options = "examples/pipeline.csr --role first=0,1 --role last=2,3";
    let outcome = Scratch::new().run(&format!("check {root}/{options}"));
    let shown = page.split_once(&format!("$ consort check {options}\n")).map(|(_, shown)| shown);
    assert_eq!(outcome.code, 1);
    assert!(shown.is_some_and(|shown| shown.starts_with(&outcome.stderr)), "{}", outcome.stderr);
}

#[test]
fn an_endless_file_is_refused_after_a_bounded_read() {
    let scratch = Scratch::new();
    for command in ["check", "explain", "opt", "exec -n 2"] {
        let outcome = scratch.run(&format!("{command} /dev/zero"));
        let wanted = "error: cannot read /dev/zero: expected at most 67108864 bytes, got more\n";
        assert_eq!(outcome.parts(), (1, "", wanted), "{command}");
    }
    scratch.write("sum.csr", SUM);
    let input = scratch.run("exec sum.csr -n 2 --input /dev/zero");
    assert_eq!(input.code, 1, "{}", input.stderr);
}

#[test]
fn f1_arguments_of_check() {
    let scratch = Scratch::new();
    scratch.write("sum.csr", SUM);
    let fits = scratch.run("check sum.csr");
    assert_eq!(fits.parts(), (0, "@sum on ranks 0,1: fits together, 2 starts on 1 group\n", ""));
    for (options, part) in [
        ("--role sum=0", "error: --role: expected a role for every rank, got none for rank 1"),
        ("--role sum=0,1 --role sum=1", "error: --role: expected one role for each rank, got two for rank 1"),
        ("--role sum=0,7", "error: --role: expected ranks below 2, got 7"),
        ("--role nothing=0", "error: --role: expected one of @sum, got @nothing"),
        ("--role sum", "error: --role: expected a function and its ranks, such as first=0,1, got `sum`"),
    ] {
        let outcome = scratch.run(&format!("check sum.csr {options}"));
        assert_eq!(outcome.code, 1, "{options}");
        assert!(outcome.stderr.starts_with(part), "{options}: {}", outcome.stderr);
    }
}
