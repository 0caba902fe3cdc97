//! Agreement of the ranks on a call of a compiled function. It is a numbered call on the group of all ranks, so that a
//! rank that does something else is reported as a mismatch, not as a timeout.

use std::cell::Cell;
use std::panic::Location;
use std::rc::Rc;

use consort_comm::{Buffer, CommError, Group, Name, Note};
use consort_types::{Dtype, Reduce};

use crate::error::{Error, Result};
use crate::world::{World, gather};

type Site = &'static Location<'static>;

/// One call of a compiled function, as the ranks identify it.
pub(crate) struct Meeting<'a> {
    pub(crate) world: &'a Rc<World>,
    /// The function: the name that it was given, or its source line.
    pub(crate) name: &'a str,
    /// The number of the call, counted from 1.
    pub(crate) call: u64,
    /// The line that calls it.
    pub(crate) site: Site,
    /// The part of the note that is equal for every call, cached.
    pub(crate) said: &'a Cell<Option<Said>>,
}

/// The part of a function's notes that is equal for every call: the world, the recorded name and its digest.
#[derive(Clone, Copy)]
pub(crate) struct Said {
    world: u32,
    text: Name,
    digest: u64,
}

impl Meeting<'_> {
    /// The group of all ranks, if it has more than one.
    fn all(&self) -> Option<&Group> {
        self.world.all().filter(|all| all.size() > 1)
    }

    /// The note of a part of the agreement: a digest of `part`, which must be equal on all ranks. Errors print `shown`.
    fn note(&self, all: &Group, (part, shown): (&str, &str)) -> Note {
        let text = |part: &str| format!("call {{}} of `{}`: {part}", self.name);
        self.note_of(all, all.recorder().name(&text(shown)), digest(text(part).as_bytes()))
    }

    /// The note of the call itself.
    fn call_note(&self, all: &Group) -> Note {
        let said = self.said.get().filter(|said| said.world == self.world.id).unwrap_or_else(|| {
            let text = format!("call {{}} of `{}`", self.name);
            let (world, digest) = (self.world.id, digest(text.as_bytes()));
            Said { world, text: all.recorder().name(&text), digest }
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

    fn failed(&self, error: CommError) -> Error {
        Error::comm("compile", error, self.site)
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

    /// Fails on all ranks if a text differs between them: prints the first differing line, and which ranks have it.
    pub(crate) fn check_same(&self, what: &str, text: &str) -> Result<()> {
        let mine = digest(text.as_bytes());
        let shown = if text.starts_with(NONE) { text.lines().next().unwrap_or(what) } else { what };
        let all = self.gather_as((what, shown), &mine.to_le_bytes())?;
        if all.iter().all(|other| other[..] == mine.to_le_bytes()) {
            return Ok(());
        }
        let texts = self.gather(what, text.as_bytes())?;
        let texts: Vec<String> =
            texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
        let failed = |(_, text): &(usize, &String)| text.starts_with(NONE);
        if let Some((rank, text)) = texts.iter().enumerate().find(failed) {
            let error = text.trim_start_matches(NONE).replace("\n  ", "\n    ");
            let message = format!("`{}`: rank {rank} stopped: {error}", self.name);
            let ranks: Vec<usize> = texts.iter().enumerate().filter(failed).map(|(rank, _)| rank).collect();
            return Err(Error::new("compile", message, self.site).blaming(&ranks));
        }
        let message = difference(&format!("`{}`: {what}", self.name), "line", &texts);
        let note =
            "\n  note: captured values, and all that it reads from outside, must be equal on all ranks";
        Err(Error::new("compile", message + note, self.site).blaming(&fewest(&texts)))
    }

    /// Whether all ranks have a cache hit with the same key. Costs each of them one cache line of communication.
    pub(crate) fn envelope(&self, key: u64) -> Result<bool> {
        let Some(all) = self.all() else { return Ok(key != MISS) };
        let same = self.envelope_on(all, key).map_err(|error| self.failed(error))?;
        Ok(same && key != MISS)
    }

    fn envelope_on(&self, all: &Group, key: u64) -> Result<bool, CommError> {
        // A max-reduction of (key, !key) returns the rank's own pair exactly if all keys are equal.
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&key.to_le_bytes());
        bytes[8..].copy_from_slice(&(!key).to_le_bytes());
        // The only handle of the buffer moves into the operation and back, so no bookkeeping is needed.
        let buffer = match self.world.envelope.take().filter(Buffer::is_released) {
            Some(kept) => {
                kept.try_bytes_mut()?.copy_from_slice(&bytes);
                kept
            }
            None => all.heap().alloc_from(&bytes)?,
        };
        all.note(self.call_note(all));
        let sent = all.all_reduce(buffer, Dtype::I64, Reduce::Max)?;
        let back = sent.wait_within(self.world.timeout())?.remove(0);
        let same = back.bytes()?[..] == bytes;
        self.world.envelope.set(Some(back));
        Ok(same)
    }
}

/// Prefix of the text that a rank sends instead of its program if it has an error.
pub(crate) const NONE: &str = "no program: ";

/// The ranks outside the largest group of equal texts; all ranks if two groups tie.
fn fewest(texts: &[String]) -> Vec<usize> {
    let same = |text: &String| texts.iter().filter(|other| *other == text).count();
    let most = texts.iter().map(same).max().unwrap_or(0);
    let only = texts.iter().filter(|text| same(text) == most).count() == most;
    (0..texts.len()).filter(|rank| !only || same(&texts[*rank]) < most).collect()
}

/// The key of a call that no compilation matches: a cache miss.
pub(crate) const MISS: u64 = 0;

/// A digest of bytes, eight at a time; each step mixes the state, so that a difference anywhere changes the digest.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let mix = |hash: u64, number: u64| {
        let hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ (hash >> 29)
    };
    let (whole, rest) = bytes.as_chunks::<8>();
    let hash = whole.iter().fold(bytes.len() as u64, |hash, chunk| mix(hash, u64::from_le_bytes(*chunk)));
    mix(hash, number(rest))
}

/// The first line in which texts differ, and the ranks of each. Lines of a program are counted from 1, parts of arguments
/// from 0.
pub(crate) fn difference(what: &str, unit: &str, texts: &[String]) -> String {
    let lines: Vec<Vec<&str>> = texts.iter().map(|text| text.lines().collect()).collect();
    let longest = lines.iter().map(Vec::len).max().unwrap_or(0);
    let line = |rank: usize, at: usize| lines[rank].get(at).copied().unwrap_or("nothing more").trim();
    let differs = |at: &usize| (1..lines.len()).any(|rank| line(rank, *at) != line(0, *at));
    // If results differ, so does the head of the function; the op that causes it is more informative.
    let is_head = |at: &usize| (0..lines.len()).any(|rank| line(rank, *at).starts_with("func "));
    let first = (0..longest).find(|at| differs(at) && !is_head(at)).or_else(|| (0..longest).find(differs));
    let Some(at) = first else { return format!("{what} must be the same on all ranks") };
    let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
    for rank in 0..lines.len() {
        match groups.iter_mut().find(|(text, _)| *text == line(rank, at)) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((line(rank, at), vec![rank])),
        }
    }
    let number = at + usize::from(unit == "line");
    let mut message =
        format!("{what} must be the same on all ranks; the first difference is in {unit} {number}");
    for (text, ranks) in groups {
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        message.push_str(&format!("\n  {word} {}: {text}", ranks.join(", ")));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn ranks_are_grouped_by_the_line_that_differs() {
        let texts = ["a\nb\nc", "a\nx\nc", "a\nb\nd"].map(str::to_string);
        let text = difference("program", "line", &texts);
        assert!(text.ends_with("line 2\n  ranks 0, 2: b\n  rank 1: x"), "{text}");
        let texts = ["a", "a\nb"].map(str::to_string);
        assert!(
            difference("program", "line", &texts).ends_with("line 2\n  rank 0: nothing more\n  rank 1: b")
        );
    }
}
