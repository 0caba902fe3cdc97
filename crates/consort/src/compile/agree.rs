//! Agreement of the ranks on a call of a compiled function. It is a numbered call on the group of its ranks, so that one
//! that does something else is reported as a mismatch, not as a timeout.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;

use consort_comm::{Buffer, CommError, Group, Name, Note, Party};
use consort_types::{Axes, Digest, Failure, GroupName, Rank, Site as Line, ranks_text};

use super::roles::Roles;
use crate::error::{Error, Result};
use crate::trace::Peers;
use crate::world::{World, gather};

type Site = &'static Location<'static>;

/// One call of a compiled function, as the ranks identify it.
pub(crate) struct Meeting<'a> {
    pub(crate) world: &'a Rc<World>,
    /// The ranks that call it; all of the world if `None`.
    pub(crate) over: Option<&'a crate::Group>,
    /// The function: the name that it was given, or its source line.
    pub(crate) name: &'a str,
    /// The number of the call, counted from 1.
    pub(crate) call: u64,
    /// The line that calls it.
    pub(crate) site: Site,
    /// The part of the note that is equal for every call, cached.
    pub(crate) said: &'a Cell<Option<Said>>,
    /// The role that it has on this rank, if it was declared with one.
    pub(crate) role: Option<&'a str>,
    /// The roles of its ranks, once they are known.
    pub(crate) roles: &'a RefCell<Option<Rc<Roles>>>,
}

/// The part of a function's notes that is equal for every call: the world, the recorded name and its digest.
#[derive(Clone, Copy)]
pub(crate) struct Said {
    world: u32,
    text: Name,
    digest: u64,
}

impl Meeting<'_> {
    /// The group of its ranks, if it has more than one.
    fn all(&self) -> Option<&Group> {
        let all = match self.over {
            Some(over) => over.comm.as_ref(),
            None => self.world.all(),
        };
        all.filter(|all| all.size() > 1)
    }

    /// The group of its ranks, by name.
    pub(crate) fn group_name(&self) -> GroupName {
        self.over.map_or_else(|| GroupName::Axes(self.world.mesh().all_axes()), |over| over.over)
    }

    /// Its ranks, in the order in which bytes are gathered.
    pub(crate) fn members(&self) -> Vec<Rank> {
        self.world.mesh().members(self.group_name(), self.world.rank).unwrap_or_default()
    }

    /// The same as numbers.
    pub(crate) fn ranks(&self) -> Vec<usize> {
        self.members().into_iter().map(|rank| rank.0 as usize).collect()
    }

    /// The ranks at these places among its ranks.
    pub(super) fn ranks_at(&self, places: &[usize]) -> Vec<usize> {
        let ranks = self.ranks();
        places.iter().filter_map(|place| ranks.get(*place).copied()).collect()
    }

    /// The failure of texts that must be the same, and the ranks to blame. `places` are those of the texts, `over` says of
    /// which ranks they are.
    pub(super) fn difference(
        &self,
        (places, over): (&[usize], &str),
        texts: &[String],
        what: &str,
        unit: &str,
    ) -> Error {
        let ranks = self.ranks_at(places);
        let at =
            |texts: &[usize]| texts.iter().filter_map(|text| ranks.get(*text).copied()).collect::<Vec<_>>();
        let failure = Difference::of(texts).failure(what, unit, over, |texts| ranks_text(&at(texts)));
        let failure = match unit {
            "line" => failure
                .note("captured values, and all that it reads from outside, must be equal on all ranks"),
            _ => failure,
        };
        self.error(failure).blaming(&at(&fewest(texts)))
    }

    /// The axes along which the roles of its ranks differ.
    pub(super) fn roles_over(&self) -> Axes {
        self.roles.borrow().as_ref().map_or(Axes::NONE, |roles| roles.over)
    }

    /// The ranks that must run one program: all, or those of each role. By place, and in words.
    pub(super) fn sets_alike(&self) -> Vec<(Vec<usize>, String)> {
        match &*self.roles.borrow() {
            None => vec![((0..self.members().len()).collect(), self.all_text())],
            Some(roles) => roles.all().map(|role| (roles.places(role), roles.all_text(role))).collect(),
        }
    }

    /// The tables of peers that ranks name by numbers; `None` if these are equal on all ranks, or cannot be compared.
    pub(super) fn peers(&self, mine: &[i64]) -> Result<Option<Peers>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let numbers =
            |bytes: &Vec<u8>| bytes.as_chunks::<8>().0.iter().map(|one| i64::from_le_bytes(*one)).collect();
        let all = self.gather("its peers", &bytes)?;
        Ok(Peers::new(self.members(), all.iter().map(numbers).collect()))
    }

    /// Whether the ranks at two places have one role.
    pub(super) fn is_same_role(&self, a: usize, b: usize) -> bool {
        self.roles.borrow().as_ref().is_none_or(|roles| roles.is_same(a, b))
    }

    /// Whether the rank at a place has the role of this one.
    pub(super) fn is_my_role(&self, place: usize) -> bool {
        self.roles.borrow().as_ref().is_none_or(|roles| roles.places(roles.mine()).contains(&place))
    }

    /// Its ranks in words.
    pub(super) fn all_text(&self) -> String {
        match self.over {
            Some(over) => format!("on all ranks of `{}`", self.world.mesh().group_text(over.over)),
            None => "on all ranks".to_string(),
        }
    }

    /// The failure of another of its ranks, by its place among them.
    pub(crate) fn elsewhere(&self, places: &[usize], error: &str) -> Error {
        let ranks = self.ranks_at(places);
        let first = ranks.first().copied().unwrap_or_default();
        self.error(Failure::elsewhere(first, error)).blaming(&ranks)
    }

    /// The function as errors name it, and as all ranks identify it: by its name, or as one with a role, since functions
    /// of different roles stand on different lines.
    fn titles(&self) -> (String, String) {
        match self.role {
            None => (format!("of `{}`", self.name), format!("of `{}`", self.name)),
            Some(role) => (format!("of `{}` as {}", self.name, role_text(role)), "of a role".to_string()),
        }
    }

    /// The note of a part of the agreement: a digest of `part`, which must be equal on all ranks. Errors print `shown`.
    fn note(&self, all: &Group, (part, shown): (&str, &str)) -> Note {
        let (title, identity) = self.titles();
        let text = all.recorder().name(&format!("{title}: {shown}"));
        self.note_of(all, text, digest(format!("{identity}: {part}").as_bytes()))
    }

    /// The note of the call itself.
    fn call_note(&self, all: &Group) -> Note {
        let said = self.said.get().filter(|said| said.world == self.world.id).unwrap_or_else(|| {
            let (title, identity) = self.titles();
            let (world, digest) = (self.world.id, digest(identity.as_bytes()));
            Said { world, text: all.recorder().name(&title), digest }
        });
        self.said.set(Some(said));
        self.note_of(all, said.text, said.digest)
    }

    fn note_of(&self, all: &Group, text: Name, digest: u64) -> Note {
        Note {
            digest: digest ^ self.call.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            text,
            site: all.recorder().site(self.site),
            number: u32::try_from(self.call).unwrap_or(u32::MAX),
            is_agreement: true,
        }
    }

    /// A failure of this function.
    pub(crate) fn error(&self, failure: Box<Failure>) -> Error {
        Error::of("compile", failure.of(format!("`{}`", self.name)), self.site)
    }

    fn failed(&self, error: CommError) -> Error {
        let has_role = |party: &Party| party.what.contains("` as role `");
        let is_compiled = |party: &Party| party.what.contains(" of `");
        let note = match &error {
            CommError::Mismatch { parties, .. } if parties.iter().all(is_compiled) => {
                let is_mixed = parties.iter().any(has_role) && !parties.iter().all(has_role);
                is_mixed.then_some("a function must have a role on all ranks that call it, or on none")
            }
            CommError::Mismatch { .. } | CommError::Skipped { .. } => Some(
                "a function without communication that not all ranks call must be declared with `.local()`",
            ),
            _ => None,
        };
        let error = Error::comm("compile", error, self.site);
        match note {
            Some(note) => error.note(note),
            None => error,
        }
    }

    /// All ranks' bytes, in rank order.
    pub(crate) fn gather(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather_as((what, what), mine)
    }

    /// The same with a separate text to print if another rank makes a different call.
    fn gather_as(&self, what: (&str, &str), mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let Some(all) = self.all() else { return Ok(vec![mine.to_vec()]) };
        gather(all, self.world.timeout(), || self.note(all, what), mine).map_err(|error| self.failed(error))
    }

    /// All ranks' bytes, or the texts of the errors that they have instead, in rank order.
    pub(crate) fn gather_outcomes(&self, what: &str, mine: Outcome<'_>) -> Result<Vec<GatheredOutcome>> {
        Ok(self.gather(what, &outcome_bytes(mine))?.iter().map(|bytes| read_outcome(bytes)).collect())
    }

    /// Fails on all ranks if a text differs between them, source lines apart: prints the first differing line, and which
    /// ranks have it. A rank may have an error instead.
    pub(crate) fn check_same(&self, what: &str, text: Result<&str, &Error>) -> Result<()> {
        match self.is_same(what, text)? {
            true => Ok(()),
            false => self.differ(what, text),
        }
    }

    /// Whether all ranks have the same text, source lines apart.
    pub(crate) fn is_same(&self, what: &str, text: Result<&str, &Error>) -> Result<bool> {
        let key = match text {
            Ok(text) => digest_of(text),
            Err(error) => digest(&outcome_bytes(Err(error))),
        };
        let shown = match text {
            Ok(_) => what.to_string(),
            Err(error) => format!("no program: {}", error.failure().title()),
        };
        let key = key.to_le_bytes();
        Ok(self.gather_as((what, &shown), &key)?.iter().all(|other| other[..] == key))
    }

    /// Fails on all ranks, whose texts differ.
    pub(crate) fn differ(&self, what: &str, text: Result<&str, &Error>) -> Result<()> {
        let outcomes = self.gather_outcomes(what, text.map(str::as_bytes))?;
        let texts = self.all_fine(outcomes)?.into_iter();
        let texts: Vec<String> = texts.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect();
        let places: Vec<usize> = (0..texts.len()).collect();
        Err(self.difference((&places, &self.all_text()), &texts, what, "line"))
    }

    /// What all ranks tell; fails if one of them has an error.
    pub(crate) fn all_fine(&self, outcomes: Vec<GatheredOutcome>) -> Result<Vec<Vec<u8>>> {
        let failed = outcomes.iter().enumerate().filter(|(_, outcome)| outcome.is_err());
        let places: Vec<usize> = failed.map(|(place, _)| place).collect();
        let fine: Result<Vec<_>, String> = outcomes.into_iter().collect();
        fine.map_err(|error| self.elsewhere(&places, &error))
    }

    /// Whether all ranks have a cache hit with the same key. Costs each of them one cache line of communication.
    ///
    /// Ranks with roles compare `joint`, of their agreement, and each role its own keys.
    pub(crate) fn envelope(&self, key: u64, joint: u64) -> Result<bool> {
        let Some(all) = self.all() else { return Ok(key != MISS) };
        let same = match &*self.roles.borrow() {
            None => self.envelope_on(all, &pair(key), |back| back == pair(key)),
            Some(roles) => self.envelope_on(all, &roles.envelope(key, joint), Roles::is_hit),
        };
        Ok(same.map_err(|error| self.failed(error))? && key != MISS)
    }

    fn envelope_on(
        &self,
        all: &Group,
        bytes: &[u8],
        same: impl FnOnce(&[u8]) -> bool,
    ) -> Result<bool, CommError> {
        let fits = |kept: &Buffer| kept.is_released() && kept.len() == bytes.len();
        // The only handle of the buffer moves into the operation and back, so no bookkeeping is needed.
        let buffer = match self.world.envelope.take().filter(fits) {
            Some(kept) => {
                kept.try_bytes_mut()?.copy_from_slice(bytes);
                kept
            }
            None => all.heap().alloc_from(bytes)?,
        };
        let sent = all.envelope(buffer, self.call_note(all))?;
        let back = sent.wait_within(self.world.timeout())?.remove(0);
        let same = same(&back.bytes()?);
        self.world.envelope.set(Some(back));
        Ok(same)
    }
}

/// A key and its complement: a max-reduction returns a rank's own pair exactly if all keys are equal.
#[inline]
pub(super) fn pair(key: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&key.to_le_bytes());
    bytes[8..].copy_from_slice(&(!key).to_le_bytes());
    bytes
}

/// A role in words.
pub(super) fn role_text(role: &str) -> String {
    format!("role `{role}`")
}

/// What a rank tells the others: bytes, or the error that it has instead.
type Outcome<'a> = Result<&'a [u8], &'a Error>;

/// What another rank tells: bytes, or the text of its error.
pub(super) type GatheredOutcome = Result<Vec<u8>, String>;

/// An outcome as bytes, of which the first says whether it is an error.
fn outcome_bytes(outcome: Outcome<'_>) -> Vec<u8> {
    match outcome {
        Ok(bytes) => [&[0], bytes].concat(),
        Err(error) => [&[1], error.to_string().as_bytes()].concat(),
    }
}

fn read_outcome(bytes: &[u8]) -> GatheredOutcome {
    match bytes {
        [0, bytes @ ..] => Ok(bytes.to_vec()),
        bytes => Err(String::from_utf8_lossy(bytes.get(1..).unwrap_or_default()).into_owned()),
    }
}

/// The places outside the largest group of equal texts; all places if two groups tie.
fn fewest(texts: &[String]) -> Vec<usize> {
    let same = |text: &String| texts.iter().filter(|other| *other == text).count();
    let most = texts.iter().map(same).max().unwrap_or(0);
    let only = texts.iter().filter(|text| same(text) == most).count() == most;
    (0..texts.len()).filter(|rank| !only || same(&texts[*rank]) < most).collect()
}

/// The key of a call that no compilation matches: a cache miss.
pub(crate) const MISS: u64 = 0;

/// A digest of bytes.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    Digest::of_many(bytes)
}

/// A line of a program without the source line at its end: equal ops may stand on different lines.
fn without_site(line: &str) -> &str {
    match line.rsplit_once(" ; ") {
        Some((op, site)) if Line::parse(site).is_some() => op.trim_end(),
        _ => line,
    }
}

/// Whether two programs are equal, source lines apart.
pub(super) fn same_program(a: &str, b: &str) -> bool {
    a.lines().map(without_site).eq(b.lines().map(without_site))
}

/// The digest of a program without its source lines.
pub(super) fn digest_of(program: &str) -> u64 {
    let lines: Vec<&str> = program.lines().map(without_site).collect();
    digest(lines.join("\n").as_bytes())
}

/// The first line in which texts differ, source lines apart, and which of them have which line there.
pub(crate) struct Difference {
    /// Counted from 0; `None` if there is none.
    at: Option<usize>,
    groups: Vec<(String, Vec<usize>)>,
}

impl Difference {
    pub(crate) fn of(texts: &[String]) -> Difference {
        let lines: Vec<Vec<&str>> = texts.iter().map(|text| text.lines().collect()).collect();
        let longest = lines.iter().map(Vec::len).max().unwrap_or(0);
        let line = |text: usize, at: usize| lines[text].get(at).copied().unwrap_or("nothing more").trim();
        let plain = |text: usize, at: usize| without_site(line(text, at));
        let differs = |at: &usize| (1..lines.len()).any(|text| plain(text, *at) != plain(0, *at));
        // If results differ, so does the head of the function; the op that causes it is more informative.
        let is_head = |at: &usize| (0..lines.len()).any(|text| line(text, *at).starts_with("func "));
        let at = (0..longest).find(|at| differs(at) && !is_head(at)).or_else(|| (0..longest).find(differs));
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        for (text, at) in at.iter().flat_map(|at| (0..lines.len()).map(move |text| (text, *at))) {
            match groups.iter_mut().find(|(one, _)| without_site(one) == plain(text, at)) {
                Some((_, texts)) => texts.push(text),
                None => groups.push((line(text, at).to_string(), vec![text])),
            }
        }
        Difference { at, groups }
    }

    /// The failure of texts that must be the same: their noun, what a line of them is called, where they must be the
    /// same, and who has which. Lines of a program are counted from 1, parts of arguments from 0.
    pub(crate) fn failure(
        self,
        what: &str,
        unit: &str,
        over: &str,
        who: impl Fn(&[usize]) -> String,
    ) -> Box<Failure> {
        let Some(at) = self.at else { return Failure::new(format!("{what} must be the same {over}")) };
        let number = at + usize::from(unit == "line");
        let headline = format!("{what} must be the same {over}; the first difference is in {unit} {number}");
        let rows = self.groups.into_iter().map(|(text, texts)| format!("{}: {text}", who(&texts)));
        rows.fold(Failure::new(headline), |failure, row| failure.row(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_error_is_read_as_one() {
        let error = Error::new("sum", ("4", "5"), Location::caller());
        assert_eq!(read_outcome(&outcome_bytes(Err(&error))), Err(error.to_string()));
        for text in ["", "no program: none", "error "] {
            assert_eq!(read_outcome(&outcome_bytes(Ok(text.as_bytes()))), Ok(text.as_bytes().to_vec()));
        }
    }

    #[test]
    fn ranks_are_grouped_by_the_line_that_differs() {
        let text = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| text.to_string()).collect();
            Difference::of(&texts).failure("program", "line", "on all ranks", ranks_text).to_string()
        };
        let wanted = "program must be the same on all ranks; the first difference is in line 2";
        assert_eq!(
            text(&["a\nb\nc", "a\nx\nc", "a\nb\nd"]),
            format!("{wanted}\n  ranks 0,2: b\n  rank 1: x")
        );
        assert_eq!(text(&["a", "a\nb"]), format!("{wanted}\n  rank 0: nothing more\n  rank 1: b"));
    }
}
