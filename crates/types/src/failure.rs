//! Why a call failed: facts, which are put into words here and nowhere else.

use std::borrow::Cow;
use std::fmt;

use crate::Site;

/// Why a call failed. Errors of all crates carry their facts in it; its `Display` is the one wording:
///
/// ```
/// use consort_types::{Failure, Site};
///
/// let failure = Failure::rule("C2", ("operands of one type", "f32 and i32")).note("convert one with `cast`");
/// let failure = failure.of("add").at(Site::new("model.rs", 7));
/// let text = "add: expected operands of one type, got f32 and i32 (C2)\n  at model.rs:7\n  note: convert one with `cast`";
/// assert_eq!(failure.to_string(), text);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// The op or function that was called; empty if it is not known yet.
    pub op: Cow<'static, str>,
    /// The rule that does not hold: `C1` of the op, `V2` of the verifier; empty for none.
    pub rule: &'static str,
    /// What was expected; empty if `got` is a statement of what happened.
    pub expected: String,
    /// What there is instead; empty if that goes without saying.
    pub got: String,
    /// The rank on which it failed, if not on this one.
    pub rank: Option<usize>,
    /// Rows below the headline: who called what, and where.
    pub rows: Vec<String>,
    /// Ways out.
    pub notes: Vec<String>,
    /// The user's source line.
    pub site: Option<Site>,
}

/// The headline of a failure: what was expected and what there is, or a statement of what happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headline {
    expected: String,
    got: String,
}

impl<E: Into<String>, G: Into<String>> From<(E, G)> for Headline {
    fn from((expected, got): (E, G)) -> Headline {
        Headline { expected: expected.into(), got: got.into() }
    }
}

impl From<String> for Headline {
    fn from(statement: String) -> Headline {
        Headline { expected: String::new(), got: statement }
    }
}

impl From<&str> for Headline {
    fn from(statement: &str) -> Headline {
        statement.to_string().into()
    }
}

impl Headline {
    /// A dimension that a tensor of `rank` dimensions does not have.
    pub fn dimension(dim: usize, rank: usize) -> Headline {
        match rank {
            0 => (format!("a tensor with a dimension {dim}"), "a 0-d one").into(),
            _ => (format!("a dimension below {rank}"), dim.to_string()).into(),
        }
    }

    /// Ranks that must have equal tensors and do not, by what stands for the tensor of each.
    pub fn unequal<T: PartialEq>(expected: impl Into<String>, ranks: &[usize], values: &[T]) -> Headline {
        let mut groups: Vec<(&T, Vec<usize>)> = Vec::new();
        for (rank, value) in ranks.iter().zip(values) {
            match groups.iter_mut().find(|(other, _)| *other == value) {
                Some((_, ranks)) => ranks.push(*rank),
                None => groups.push((value, vec![*rank])),
            }
        }
        let on: Vec<String> = groups.iter().map(|(_, ranks)| format!("on {}", ranks_text(ranks))).collect();
        let got = match on.split_last() {
            Some((last, others)) if !others.is_empty() => {
                format!("different ones {} and {last}", others.join(", "))
            }
            _ => "different ones".to_string(),
        };
        (expected, got).into()
    }
}

impl fmt::Display for Headline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.expected[..], &self.got[..]) {
            ("", got) => f.write_str(got),
            (expected, "") => write!(f, "expected {expected}"),
            (expected, got) => write!(f, "expected {expected}, got {got}"),
        }
    }
}

impl Failure {
    /// A failure that no rule describes.
    pub fn new(headline: impl Into<Headline>) -> Box<Failure> {
        Failure::rule("", headline)
    }

    /// A rule that does not hold.
    pub fn rule(rule: &'static str, headline: impl Into<Headline>) -> Box<Failure> {
        let Headline { expected, got } = headline.into();
        Box::new(Failure { rule, expected, got, ..Failure::default() })
    }

    /// The peer of a message that its group of `size` members does not have.
    pub fn peer(size: u32, got: impl fmt::Display) -> Box<Failure> {
        let headline = (format!("a peer in 0..{size}, or -1 for none"), got.to_string());
        Failure::rule("C2", headline)
            .note("peers are numbered within the group, as `my_rank` of the group numbers them")
    }

    /// The failure of another rank, whose text is `got`; empty if it did not say why.
    pub fn elsewhere(rank: usize, got: impl Into<String>) -> Box<Failure> {
        Box::new(Failure { rank: Some(rank), got: got.into(), ..Failure::default() })
    }

    /// The same with one more way out.
    #[must_use]
    pub fn note(mut self: Box<Self>, note: impl Into<String>) -> Box<Failure> {
        self.notes.push(note.into());
        self
    }

    /// The same with one more row.
    #[must_use]
    pub fn row(mut self: Box<Self>, row: impl Into<String>) -> Box<Failure> {
        self.rows.push(row.into());
        self
    }

    /// The same with more rows.
    #[must_use]
    pub fn rows(mut self: Box<Self>, rows: impl IntoIterator<Item = String>) -> Box<Failure> {
        self.rows.extend(rows);
        self
    }

    /// The same as a failure of a call. A failure that names a part of that call keeps its name.
    #[must_use]
    pub fn of(mut self: Box<Self>, op: impl Into<Cow<'static, str>>) -> Box<Failure> {
        let op = op.into();
        self.op = match self.op.is_empty() {
            true => op,
            false if self.op.split([' ', '[', ':']).next() == Some(&op) => self.op,
            false => format!("{op}: {}", self.op).into(),
        };
        self
    }

    /// The same at a source line, unless it has one already.
    #[must_use]
    pub fn at(mut self: Box<Self>, site: impl Into<Site>) -> Box<Failure> {
        self.site.get_or_insert_with(|| site.into());
        self
    }

    /// The op and the headline, without the rule.
    pub fn message(&self) -> String {
        match &self.op[..] {
            "" => self.headline().to_string(),
            op => format!("{op}: {}", self.headline()),
        }
    }

    /// The headline, without the op and the rule.
    pub fn headline(&self) -> Headline {
        Headline { expected: self.expected.clone(), got: self.got.clone() }
    }

    /// The first line of the text: op, headline and rule.
    pub fn title(&self) -> String {
        self.lines().0
    }

    /// The first line, and what follows it of a headline of several lines.
    fn lines(&self) -> (String, String) {
        let headline = match (self.rank, self.headline().to_string()) {
            (None, text) => text,
            (Some(rank), text) if text.is_empty() => format!("rank {rank} stopped"),
            (Some(rank), text) => format!("rank {rank} stopped: {}", text.replace("\n  ", "\n    ")),
        };
        let (first, rest) = headline.split_at(headline.find('\n').unwrap_or(headline.len()));
        let op = if self.op.is_empty() { String::new() } else { format!("{}: ", self.op) };
        let rule = if self.rule.is_empty() { String::new() } else { format!(" ({})", self.rule) };
        (format!("{op}{first}{rule}"), rest.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (title, rest) = self.lines();
        f.write_str(&title)?;
        self.site.iter().try_for_each(|site| write!(f, "\n  at {site}"))?;
        f.write_str(&rest)?;
        self.rows.iter().try_for_each(|row| write!(f, "\n  {row}"))?;
        self.notes.iter().try_for_each(|note| write!(f, "\n  note: {note}"))
    }
}

impl std::error::Error for Failure {}

/// Rows with aligned columns.
pub fn aligned<const N: usize>(rows: &[[String; N]]) -> Vec<String> {
    let widths: [usize; N] =
        std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
    let text = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("   ").trim_end().to_string()
    };
    rows.iter().map(text).collect()
}

/// `rank 2`, `ranks 0,1,3`.
pub fn ranks_text(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, list.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_op_is_named_once() {
        let named = |op: &'static str| Failure { op: op.into(), got: "late".into(), ..Failure::default() };
        let text = |op: &'static str| Box::new(named(op)).of("all_reduce").to_string();
        assert_eq!(text(""), "all_reduce: late");
        assert_eq!(text("all_reduce sum f32[4]"), "all_reduce sum f32[4]: late");
        assert_eq!(text("call 3 on tp"), "all_reduce: call 3 on tp: late");
    }

    #[test]
    fn a_dimension_that_is_not_there() {
        assert_eq!(Headline::dimension(2, 2).to_string(), "expected a dimension below 2, got 2");
        assert_eq!(
            Headline::dimension(1, 0).to_string(),
            "expected a tensor with a dimension 1, got a 0-d one"
        );
    }

    #[test]
    fn ranks_with_equal_tensors_are_named_together() {
        assert_eq!(
            Headline::unequal("equal tensors", &[1, 3, 5], &[7, 9, 7]).to_string(),
            "expected equal tensors, got different ones on ranks 1,5 and on rank 3"
        );
        let three = Headline::unequal("equal tensors", &[0, 1, 2], &[7, 8, 9]).to_string();
        assert!(three.ends_with("got different ones on rank 0, on rank 1 and on rank 2"), "{three}");
    }

    #[test]
    fn the_failure_of_another_rank_is_indented_below_the_own_line() {
        let inner = Failure::new(("4", "5")).of("sum").at(Site::new("a.rs", 1)).note("look");
        let outer = Failure::elsewhere(2, inner.to_string()).of("compile").at(Site::new("b.rs", 2));
        let text =
            "compile: rank 2 stopped: sum: expected 4, got 5\n  at b.rs:2\n    at a.rs:1\n    note: look";
        assert_eq!(outer.to_string(), text);
        assert_eq!(outer.title(), "compile: rank 2 stopped: sum: expected 4, got 5");
        assert_eq!(Failure::elsewhere(2, "").to_string(), "rank 2 stopped");
    }
}
