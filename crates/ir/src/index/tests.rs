//! Identities by name, and random expressions against brute force.

use consort_types::{Axes, Rng};

use super::*;
use crate::mesh::Mesh;

const AXIS: Axis = Axis(0);
const GROUP: GroupId = GroupId(0);
const SYMS: [Sym; 4] = [Sym::Backed(0), Sym::Backed(1), Sym::Unbacked(0), Sym::Rank(AXIS)];

fn s(id: u32) -> Index {
    Index::sym(Sym::Backed(id))
}

fn u(id: u32) -> Index {
    Index::sym(Sym::Unbacked(id))
}

fn k(value: i64) -> Index {
    Index::constant(value)
}

fn mesh() -> Mesh {
    let mut mesh = Mesh::new([("tp", 4)]).unwrap();
    mesh.add_split_group("pairs", &[Some(0), Some(0), Some(1), Some(1)], &[0; 4]).unwrap();
    mesh
}

/// The index of a text, by a parser of its own.
fn parse(text: &str) -> Index {
    let mut parser = Parser { text: text.as_bytes(), at: 0 };
    let index = parser.sum();
    assert_eq!(parser.at, text.len(), "{text}");
    index
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn take(&mut self, wanted: &[u8]) -> Option<u8> {
        let byte = *self.text.get(self.at).filter(|byte| wanted.contains(byte))?;
        self.at += 1;
        Some(byte)
    }

    fn word(&mut self) -> String {
        let rest = &self.text[self.at..];
        let len = rest.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count();
        self.at += len;
        String::from_utf8(rest[..len].to_vec()).unwrap()
    }

    fn sum(&mut self) -> Index {
        let negative = self.take(b"-").is_some();
        let first = self.product();
        let mut index = if negative { -first } else { first };
        while let Some(sign) = self.take(b"+-") {
            let next = self.product();
            index = if sign == b'+' { index + next } else { index - next };
        }
        index
    }

    fn product(&mut self) -> Index {
        let mut index = self.primary();
        while let Some(operator) = self.take(b"*/%") {
            let next = self.primary();
            index = match operator {
                b'*' => index * next,
                b'/' => index.div(&next),
                _ => index.rem(&next),
            };
        }
        index
    }

    fn primary(&mut self) -> Index {
        let word = self.word();
        if self.take(b"(").is_none() {
            return match word.split_at(usize::from(!word.starts_with(|c: char| c.is_ascii_digit()))) {
                ("s", id) => s(id.parse().unwrap()),
                ("u", id) => u(id.parse().unwrap()),
                (_, digits) => k(digits.parse().unwrap()),
            };
        }
        if word == "rank" {
            let sym = if self.word() == "tp" { Sym::Rank(AXIS) } else { Sym::GroupRank(GROUP) };
            self.take(b")").unwrap();
            return Index::sym(sym);
        }
        let mut list = vec![self.sum()];
        while self.take(b",").is_some() {
            list.push(self.sum());
        }
        self.take(b")").unwrap();
        match &word[..] {
            "" => list[0].clone(),
            "pick" => Index::pick(&list[0], &list[1..]),
            word => Index::extreme(word == "min", list),
        }
    }
}

fn within(rng: &mut Rng, low: i64, high: i64) -> i64 {
    low + rng.below((high - low) as usize + 1) as i64
}

/// An expression as written, before any simplification.
#[derive(Debug)]
enum Tree {
    Const(i64),
    Sym(Sym),
    Op(u8, Box<Tree>, Box<Tree>),
    Pick(Box<Tree>, Vec<Tree>),
}

impl Tree {
    fn random(random: &mut Rng, depth: u32, extreme: bool) -> Tree {
        match random.below(if depth == 0 { 4 } else { 12 }) {
            0 if extreme && random.below(4) == 0 => {
                Tree::Const([i64::MIN, i64::MAX, 1 << 62, -(1 << 61)][random.below(4)])
            }
            0 | 1 => Tree::Const(within(random, -5, 9)),
            2 | 3 => Tree::Sym(SYMS[random.below(4)]),
            11 => {
                let at = Tree::random(random, depth - 1, extreme);
                let len = 1 + random.below(3);
                Tree::Pick(at.into(), (0..len).map(|_| Tree::random(random, depth - 1, extreme)).collect())
            }
            op => {
                let left = Tree::random(random, depth - 1, extreme);
                let right = Tree::random(random, depth - 1, extreme);
                Tree::Op(op as u8 - 4, left.into(), right.into())
            }
        }
    }

    fn index(&self) -> Index {
        match self {
            Tree::Const(value) => k(*value),
            Tree::Sym(sym) => Index::sym(*sym),
            Tree::Op(op, a, b) => {
                let (a, b) = (a.index(), b.index());
                match op {
                    0 => a + b,
                    1 => a - b,
                    2 => a * b,
                    3 => a.div(&b),
                    4 => a.rem(&b),
                    5 => Index::min(&a, &b),
                    _ => Index::max(&a, &b),
                }
            }
            Tree::Pick(at, table) => {
                Index::pick(&at.index(), &table.iter().map(Tree::index).collect::<Vec<_>>())
            }
        }
    }

    /// The value, if there is one.
    fn eval(&self, env: &dyn Fn(Sym) -> Option<i64>) -> Option<i128> {
        match self {
            Tree::Const(value) => Some((*value).into()),
            Tree::Sym(sym) => env(*sym).map(i128::from),
            Tree::Op(op, a, b) => {
                let (a, b) = (a.eval(env)?, b.eval(env)?);
                let floor = |a: i128, b: i128| {
                    let q = a.checked_div(b)?;
                    Some(if a % b != 0 && (a < 0) != (b < 0) { q - 1 } else { q })
                };
                match op {
                    0 => a.checked_add(b),
                    1 => a.checked_sub(b),
                    2 => a.checked_mul(b),
                    3 => floor(a, b),
                    4 => Some(a - b * floor(a, b)?),
                    5 => Some(a.min(b)),
                    _ => Some(a.max(b)),
                }
            }
            Tree::Pick(at, table) => table.get(usize::try_from(at.eval(env)?).ok()?)?.eval(env),
        }
    }
}

fn random_env(random: &mut Rng, high: i64) -> impl Fn(Sym) -> Option<i64> + use<> {
    let values = [(); 4].map(|()| within(random, -4, high));
    move |sym| SYMS.iter().position(|s| *s == sym).map(|at| values[at])
}

/// Checks normal forms of random expressions against the expressions as written.
fn check_normal_forms(seed: u64, cases: u32, depth: u32, extreme: bool) {
    let (random, mesh) = (&mut Rng::new(seed), mesh());
    for _ in 0..cases {
        let tree = Tree::random(random, depth, extreme);
        let index = tree.index();
        if index.is_invalid() {
            continue;
        }
        for _ in 0..24 {
            let env = random_env(random, 6);
            let Some(value) = tree.eval(&env) else { continue };
            match (i64::try_from(value), index.eval(&env)) {
                (Ok(value), Ok(found)) => assert_eq!(value, found, "{tree:?} as {index:?}"),
                (Err(_), Err(IndexError::Overflow)) => {}
                (_, Err(IndexError::Overflow)) if extreme => {}
                (value, found) => panic!("{tree:?} as {index:?}: {value:?} and {found:?}"),
            }
        }
        let text = index.display(&mesh).to_string();
        if !text.contains("9223372036854775808") {
            assert_eq!(parse(&text), index, "{tree:?} as {text}");
        }
        let rebuilt = index.substitute(&|sym| Some(Index::sym(sym)));
        assert_eq!(rebuilt, index, "{tree:?}");
        let (sym, value) = (SYMS[random.below(4)], Tree::random(random, 1, extreme).index());
        let replaced = index.substitute(&|s| (s == sym).then(|| value.clone()));
        for _ in 0..8 {
            let env = random_env(random, 6);
            let Ok(inner) = value.eval(&env) else { continue };
            let outer = index.eval(&|s| if s == sym { Some(inner) } else { env(s) });
            if let (Ok(outer), false) = (outer, replaced.is_invalid()) {
                assert!(extreme || replaced.eval(&env) == Ok(outer), "{index:?} with {sym:?} as {value:?}");
            }
        }
    }
}

#[test]
fn random_normal_forms() {
    check_normal_forms(1, 6000, 2, false);
    check_normal_forms(2, 4000, 4, false);
    check_normal_forms(3, 2000, 3, true);
}

#[test]
fn identities() {
    for (left, right) in [
        ("s0*4/4", "s0"),
        ("s0*8%8", "0"),
        ("(4*s0+3)/4", "s0"),
        ("(4*s0+6)/4", "s0+1"),
        ("6*s0/4", "s0+s0/2"),
        ("6*s0%4", "2*(s0%2)"),
        ("(2*s0+1)%4", "2*(s0%2)+1"),
        ("s0*s1/s1", "s0"),
        ("s0*s1%s1", "0"),
        ("(s0*s1+s0)/s0", "s1+1"),
        ("(s0*s1+5)/s0", "s1+5/s0"),
        ("s0*s1/(s0*s2)", "s1/s2"),
        ("s0*s1%(2*s0)", "s0*(s1%2)"),
        ("s0%s0", "0"),
        ("s0/1", "s0"),
        ("s0%1", "0"),
        ("0/s0", "0"),
        ("s0/3/4", "s0/12"),
        ("(s0/3+s1)/4", "(s0+3*s1)/12"),
        ("s0/(0-4)", "(-s0)/4"),
        ("s0%(0-4)", "-((-s0)%4)"),
        ("(6*s0+6*s1)/(s0+s1)", "6"),
        ("(s0+s1)*s2/(s0+s1)", "s2"),
        ("(s0+s1)*s2%(s0+s1)", "0"),
        ("s0%8%4", "s0%4"),
        ("(s0%8+s1)%8", "(s0+s1)%8"),
        ("(s0+8)%8", "s0%8"),
        ("min(s0,min(8,s0),9)", "min(s0,8)"),
        ("min(s0,s0+1)", "s0"),
        ("max(s0,s0+1)", "s0+1"),
        ("max(s0-1,0)", "max(0,s0-1)"),
        ("pick(1,3,s0)", "s0"),
        ("pick(s0,u0+1,1+u0)", "u0+1"),
        ("(s0+1)*(s0-1)", "s0*s0-1"),
        ("s0-s0", "0"),
    ] {
        assert_eq!(parse(left), parse(right), "{left}");
    }
}

#[test]
fn printing() {
    let mesh = mesh();
    for text in [
        "4*s0*s1+2*s0+3",
        "-s0+8",
        "(s0+1)/2",
        "s0%8",
        "2*(s0/3)",
        "-(s0/3)+1",
        "s0/3+u0%2-1",
        "(s0/3)*(s0/3)",
        "min(s0,8)",
        "max(0,s0-1)",
        "pick(rank(tp),3,2)",
        "s0*s1+u0*rank(pairs)+rank(tp)",
        "3*s0/4",
        "s0*s1/4",
        "s0/s1/4",
        "s0/(s1/4)",
        "s0%(2*s1)",
        "s0/(s0+1)",
        "(-1)/s0",
        "0",
        "-7",
    ] {
        assert_eq!(parse(text).display(&mesh).to_string(), text);
    }
    assert_eq!(Index::INVALID.display(&mesh).to_string(), "invalid");
}

#[test]
fn results_that_do_not_fit_are_invalid() {
    let x = s(0);
    assert!((k(i64::MAX) + 1).is_invalid());
    assert!((-k(i64::MIN)).is_invalid());
    assert!(((&x * i64::MAX) * 2).is_invalid());
    assert!(Index::from(usize::MAX).is_invalid());
    assert!(x.div(&k(0)).is_invalid() && x.rem(&k(0)).is_invalid() && k(1).div(&k(0)).is_invalid());
    assert!(Index::pick(&k(2), &[k(1), k(2)]).is_invalid() && Index::pick(&x, &[]).is_invalid());
    let bad = k(1).div(&k(0));
    for result in [
        &bad + &x,
        &x * &bad,
        &bad * k(0),
        Index::min(&x, &bad),
        bad.rem(&x),
        Index::pick(&x, &[k(1), bad.clone()]),
    ] {
        assert!(result.is_invalid());
    }
    assert_eq!(bad.eval(&|_| Some(1)), Err(IndexError::Overflow));
}

#[test]
fn expressions_stay_within_their_limits() {
    let x = s(0);
    let mut nested = x.clone();
    for _ in 0..MAX_DEPTH {
        nested = (nested + 1).div(&s(1));
    }
    assert!(!nested.is_invalid() && (nested + 1).div(&s(1)).is_invalid());
    let mut power = x.clone();
    for _ in 1..MAX_FACTORS {
        power = power * &x;
    }
    assert!(!power.is_invalid() && (power * &x).is_invalid());
    let many: Vec<Index> = (0..=MAX_TERMS as u32).map(s).collect();
    assert!(!Index::sum(&many[1..]).is_invalid() && Index::sum(&many).is_invalid());
    // Each step refers to the last one twice, so the expression as a tree doubles.
    let mut doubling = x.clone();
    for i in 0..MAX_DEPTH {
        doubling = (&doubling + 1).div(&s(i)) * (&doubling - 1).rem(&s(i + 1));
    }
    assert!(doubling.is_invalid());
}

#[test]
fn evaluation_reports_what_fails() {
    let env = |sym| (sym == Sym::Backed(0)).then_some(i64::MAX);
    assert_eq!(parse("s0/s1").eval(&env), Err(IndexError::Unbound(Sym::Backed(1))));
    assert_eq!(parse("1/(s0-9223372036854775807)").eval(&env), Err(IndexError::DivisionByZero));
    assert_eq!(parse("pick(s0,1,2)").eval(&env), Err(IndexError::OutOfTable));
    assert_eq!(parse("s0+1").eval(&env), Err(IndexError::Overflow));
    assert_eq!(parse("s0*s0/(s0+1)").eval(&env), Ok(i64::MAX - 1));
}

/// The guard of a text such as `s0 <= s1`.
fn guard(text: &str) -> Guard {
    match text.split_once(" == ") {
        Some((a, b)) => Guard::Eq(parse(a), parse(b)),
        None => text.split_once(" <= ").map(|(a, b)| Guard::Le(parse(a), parse(b))).unwrap(),
    }
}

/// The facts that sizes are at least zero, the ranks of the mesh are as they are, and these guards hold.
fn facts(guards: &[&str]) -> Facts {
    let mut facts = Facts::new(&mesh());
    for id in 0..3 {
        assert!(facts.declare(Sym::Backed(id), SymbolFacts::default()));
        assert!(facts.declare(Sym::Unbacked(id), SymbolFacts::default()));
    }
    for text in guards {
        assert_eq!(facts.assume(guard(text)), Assumed::New, "{text}");
    }
    facts
}

#[test]
fn guards_decide_what_follows_from_them() {
    let cases: &[(&[&str], &[&str], &[&str])] = &[
        (
            &[],
            &["s0/2 <= s0", "min(s0,8) <= s0", "s0 <= max(s0,s1)", "4*(s0/4)+s0%4 == s0"],
            &["s0+s1+1 == 0"],
        ),
        (&[], &["rank(tp) <= 3", "rank(tp)/4 == 0", "(rank(tp)+4)%8 == rank(tp)+4"], &["4 <= rank(tp)"]),
        (&[], &["2*rank(tp)+pick(rank(tp),3,2,2,2) <= 8"], &["4*s0+2 == 4*s1", "2*(s0%2) == 3"]),
        (&["1 <= s0"], &["(s0+3)/4 <= s0", "1 <= (s0+3)/4"], &["s0*s1+1 <= 0", "s0 == 0"]),
        (&["s0%4 == 0"], &["s0%2 == 0", "s0/4*4 == s0", "(s0+3)/4 == s0/4"], &["s0%4 == 1", "s0 == 6"]),
        (&["s0%4 == 0", "s0%6 == 0"], &["s0%12 == 0"], &["s0 == 18"]),
        (&["u0 == s0", "u0%4 == 0"], &["s0%4 == 0", "(u0+s0)%8 == 0"], &["s0+u0+4 == 4*s1+2"]),
        (&["(s0+s1)%8 == 0"], &["(s0+s1)%4 == 0", "(s0+s1)/8*8 == s0+s1"], &["(s0+s1)%8 == 3"]),
        (&["s0*s1 == 12"], &["s0*s1*s2 == 12*s2", "s0*s1 <= 12"], &["s0*s1 == 13"]),
        (&["s0*s2 == 12", "s2 == s1"], &["s0*s1 == 12"], &["s0*s1 <= 11"]),
        (&["u0 == 2*s0"], &["u0/2 == s0", "u0%2 == 0", "s0 <= u0"], &["u0 == 2*s0+1"]),
        (&["s0 <= s1", "s1 <= s2"], &["s0 <= s2", "3*s0 <= 3*s1", "s0+1 <= s2+1"], &["s2+1 <= s0"]),
        (&["s0 <= s1", "s1 <= s0"], &["s0 == s1"], &["s0 == s1+1"]),
        (&["u0 == 2*s0", "u0 <= 9", "1 <= u0"], &["s0 <= 4", "1 <= s0"], &["s0 == 5"]),
        (&["s0/4 == 3"], &["12 <= s0", "s0 <= 15", "s0/4*s1 == 3*s1"], &["s0 == 16"]),
        (&["s0 == s1", "s1 == s2"], &["s0/3 == s2/3"], &["s0 == s2+1"]),
    ];
    for (guards, yes, no) in cases {
        let facts = facts(guards);
        for (texts, answer) in [(yes, true), (no, false)] {
            for text in *texts {
                assert_eq!(facts.holds(&guard(text)), Some(answer), "{guards:?}: {text}");
                let assumed = if answer { Assumed::Known } else { Assumed::Contradiction };
                assert_eq!(facts.clone().assume(guard(text)), assumed);
            }
        }
    }
    let facts = facts(&["s0 <= s1"]);
    for text in ["s0 == s1", "s1 <= s0", "s0%2 == 0", "s0/s1 == 0", "u0 == s0"] {
        assert_eq!(facts.holds(&guard(text)), None, "{text}");
    }
}

#[test]
fn symbols_enter_and_leave_scope() {
    let mut facts = facts(&["u0 == 4*s0", "u0 <= 8", "s1%2 == 0"]);
    assert!(!facts.declare(Sym::Backed(0), SymbolFacts { min: 7, ..SymbolFacts::default() }));
    assert_eq!(facts.get(Sym::Backed(0)), Some(&SymbolFacts::default()));
    assert_eq!(facts.bounds(&s(0)), (Some(0), Some(2)));
    assert_eq!(facts.bounds(&parse("s0*s1+3")), (Some(3), None));
    assert_eq!(facts.bounds(&parse("s0-9223372036854775807-s0")), (Some(-i64::MAX), Some(-i64::MAX)));
    facts.forget(&[Sym::Unbacked(0)]);
    assert_eq!(facts.guards(), [guard("s1%2 == 0")]);
    assert_eq!(facts.bounds(&s(0)), (Some(0), None));
    assert_eq!(facts.divides(&k(2), &s(1)), Some(true));
    facts.assume(guard("u1 == s2"));
    facts.assume(guard("u1%4 == 0"));
    assert_eq!(facts.divides(&k(4), &s(2)), Some(true));
    facts.forget(&[Sym::Unbacked(1)]);
    assert_eq!(facts.divides(&k(4), &s(2)), None);
    assert!(facts.declare(Sym::Unbacked(1), SymbolFacts { min: 2, ..SymbolFacts::default() }));
    assert_eq!(facts.unknown_symbol(&parse("s0+min(u0,s1)")), Some(Sym::Unbacked(0)));
    assert_eq!(facts.unknown_symbol(&parse("s0+min(u1,s1)")), None);
    assert_eq!(facts.symbols().count(), 7);
    let axes = Axes::one(AXIS);
    assert_eq!(facts.varies(&parse("s0*pick(rank(tp),1,2)")), axes);
    assert_eq!(facts.varies(&parse("s0+s1")), Axes::NONE);
    assert_eq!(guard("s0/2 == 1").display(&mesh()).to_string(), "s0/2 == 1");
    assert_eq!(guard("s0 <= rank(pairs)").display(&mesh()).to_string(), "s0 <= rank(pairs)");
}

#[test]
fn invalid_indices_decide_nothing() {
    let (mut facts, bad) = (facts(&[]), Index::INVALID);
    assert_eq!(facts.eq(&bad, &bad), None);
    assert_eq!(facts.le(&bad, &s(0)), None);
    assert_eq!(facts.divides(&k(0), &k(4)), None);
    assert_eq!(facts.bounds(&bad), (None, None));
    assert_eq!(facts.assume(Guard::Le(bad.clone(), k(1))), Assumed::New);
    assert_eq!(facts.assume(Guard::Eq(bad, k(1))), Assumed::New);
    assert_eq!(facts.eq(&s(0), &(s(0) + 1)), Some(false));
}

/// Values of the symbols, in the order of `SYMS`.
type Values = [i64; 4];

fn env(values: &Values) -> impl Fn(Sym) -> Option<i64> + use<'_> {
    |sym| SYMS.iter().position(|s| *s == sym).map(|at| values[at])
}

/// The brute-force answer: the common answer if all agree and there is at least one.
fn unanimous(answers: impl Iterator<Item = bool>) -> Option<bool> {
    let (mut yes, mut no) = (false, false);
    answers.for_each(|answer| *(if answer { &mut yes } else { &mut no }) = true);
    (yes != no).then_some(yes)
}

/// An index that is likely to be related to the guards.
fn random_index(random: &mut Rng, guards: &[Guard], depth: u32, extreme: bool) -> Index {
    let sides: Vec<&Index> = guards
        .iter()
        .flat_map(|guard| match guard {
            Guard::Eq(a, b) | Guard::Le(a, b) => [a, b],
        })
        .collect();
    let part = match sides.len() {
        0 => None,
        n => Some(sides[random.below(n)].clone()),
    };
    let fresh = Tree::random(random, depth, extreme).index();
    match (part, random.below(8)) {
        (Some(part), 0) => part + fresh,
        (Some(part), 1) => part * fresh,
        (Some(part), 2) => part + within(random, -2, 2),
        (Some(part), 3) => part.rem(&k(within(random, 1, 6))),
        (Some(part), 4) => part.div(&k(within(random, 1, 6))) + within(random, -1, 1),
        _ => fresh,
    }
}

/// A guard of one of the kinds that facts treat differently.
fn random_guard(random: &mut Rng, guards: &[Guard], extreme: bool) -> Guard {
    let depth = random.below(3) as u32;
    let left = random_index(random, guards, depth, extreme);
    let right = random_index(random, guards, 1, extreme);
    let sym = Index::sym(SYMS[random.below(4)]);
    match random.below(6) {
        0 => Guard::Eq(sym.rem(&k(within(random, 2, 6))), k(0)),
        1 => Guard::Eq(left.rem(&k(within(random, 2, 6))), k(within(random, 0, 1))),
        2 => Guard::Eq(sym, right),
        3 => Guard::Eq(left, right),
        4 => Guard::Le(sym, right),
        _ => Guard::Le(left, right),
    }
}

/// Checks what random facts decide against all values that satisfy them. Returns how many of the questions
/// that brute force can answer were decided, and how many there were.
fn check_facts(seed: u64, cases: u32, extreme: bool) -> (u32, u32) {
    let random = &mut Rng::new(seed);
    let (mut decided, mut answerable) = (0, 0);
    for case in 0..cases {
        let mut facts = Facts::new(&mesh());
        let mut all: Vec<Values> = vec![[0; 4]];
        for (at, sym) in SYMS.into_iter().enumerate() {
            let rank = matches!(sym, Sym::Rank(_));
            let far = [i64::MIN + 2, i64::MAX - 9, 1 << 62, 1 << 32][random.below(4)];
            let base = if extreme && random.below(3) == 0 { far } else { 0 };
            let min = if rank { 0 } else { base + within(random, -2, 3) };
            let max = if rank { 3 } else { min + within(random, 0, 6) };
            let multiple_of = if rank || random.below(2) == 0 { 1 } else { within(random, 1, 4) };
            let declared = Some(max).filter(|_| random.below(4) != 0);
            facts.declare(sym, SymbolFacts { min, max: declared, multiple_of, varies: Axes::NONE });
            let values = || (min..=max).filter(|value| value % multiple_of == 0);
            all = all
                .iter()
                .flat_map(|old| {
                    values().map(|v| {
                        let mut new = *old;
                        new[at] = v;
                        new
                    })
                })
                .collect();
        }
        for _ in 0..random.below(6) {
            let guard = random_guard(random, facts.guards(), extreme);
            let holds = |values: &Values| guard.holds(&env(values)).ok();
            let left: Vec<Values> =
                all.iter().copied().filter(|values| holds(values) == Some(true)).collect();
            if left.is_empty() {
                continue;
            }
            match facts.assume(guard.clone()) {
                Assumed::Contradiction => panic!("case {case}: {guard:?} contradicts {facts:?}"),
                Assumed::Known => {
                    let wrong = all.iter().find(|values| holds(values) == Some(false));
                    assert_eq!(wrong, None, "case {case}: {guard:?} does not follow from {facts:?}");
                }
                Assumed::New => {}
            }
            all = left;
        }
        for _ in 0..6 {
            let depth = random.below(3) as u32;
            let a = random_index(random, facts.guards(), depth, extreme);
            let b = if random.below(3) == 0 {
                &a + within(random, -3, 3)
            } else {
                random_index(random, facts.guards(), 1, extreme)
            };
            let evaluated = |values: &Values| Some((a.eval(&env(values)).ok()?, b.eval(&env(values)).ok()?));
            let pairs: Vec<(i64, i64)> = all.iter().filter_map(evaluated).collect();
            let divisible = pairs.iter().filter_map(|(a, b)| Some(a.checked_rem(*b)? == 0));
            for (question, found, truth) in [
                ("==", facts.eq(&a, &b), unanimous(pairs.iter().map(|(a, b)| a == b))),
                ("<=", facts.le(&a, &b), unanimous(pairs.iter().map(|(a, b)| a <= b))),
                ("is a multiple of", facts.divides(&b, &a), unanimous(divisible.clone())),
            ] {
                let any = if question.len() > 2 { divisible.clone().count() } else { pairs.len() };
                assert!(
                    found.is_none() || found == truth || any == 0,
                    "case {case}: {a:?} {question} {b:?}: {found:?}, not {truth:?}, from {facts:?}"
                );
                decided += u32::from(truth.is_some() && found.is_some());
                answerable += u32::from(truth.is_some());
            }
            let (low, high) = facts.bounds(&a);
            for (value, _) in pairs {
                let inside = low.is_none_or(|low| low <= value) && high.is_none_or(|high| value <= high);
                assert!(inside, "case {case}: {a:?} is {value}, outside {low:?}..{high:?}, from {facts:?}");
            }
        }
    }
    (decided, answerable)
}

#[test]
fn random_facts() {
    let (decided, answerable) = check_facts(4, 1500, false);
    // Soundness is checked inside; this only notices when deciding becomes much weaker.
    assert!(decided * 10 > answerable * 8, "{decided} of {answerable}");
    check_facts(5, 700, true);
}

/// After symbols end, the facts are those from before the symbols were declared, even if there are more guards than are
/// used for deciding.
#[test]
fn forgetting_leaves_what_never_knew() {
    let u = |i| Index::sym(Sym::Unbacked(i));
    for before in [0, 3, 126, 200] {
        let mut facts = Facts::default();
        for i in 0..=before {
            facts.declare(Sym::Backed(i), SymbolFacts::default());
        }
        for i in 0..before {
            assert_eq!(facts.assume(Guard::Le(s(i) + 2, s(i + 1))), Assumed::New);
        }
        let mut grown = facts.clone();
        for i in 0..4 {
            grown.declare(Sym::Unbacked(i), SymbolFacts { multiple_of: 2, ..SymbolFacts::default() });
            grown.assume(Guard::Eq(u(i).rem(&Index::constant(3)), Index::constant(0)));
            grown.assume(Guard::Le(s(i.min(before)) + u(i), Index::constant(40)));
        }
        grown.forget(&[Sym::Unbacked(3), Sym::Unbacked(1)]);
        grown.forget(&[Sym::Unbacked(0), Sym::Unbacked(2), Sym::Unbacked(7)]);
        assert_eq!(grown.guards(), facts.guards());
        for i in 0..=before {
            assert_eq!(grown.bounds(&s(i)), facts.bounds(&s(i)), "s{i} of {before}");
            assert_eq!(grown.le(&s(i), &s(before)), facts.le(&s(i), &s(before)), "s{i} of {before}");
        }
        assert!(grown.get(Sym::Unbacked(0)).is_none());
    }
}
