//! How the ranks agree on what to compile: they gather what each would do, in the order of their other calls.

use std::panic::Location;
use std::time::Instant;

use consort_comm::{Buffer, CommError, Element, Reduce};

use crate::error::{Error, Result};
use crate::world::World;

type Site = &'static Location<'static>;

/// All ranks' bytes, in rank order.
pub(crate) fn gather(world: &World, mine: &[u8], site: Site) -> Result<Vec<Vec<u8>>> {
    let Some(all) = world.all().filter(|all| all.size() > 1) else { return Ok(vec![mine.to_vec()]) };
    let failed = |error| Error::comm("compile", error, site);
    let until = || Instant::now() + world.timeout();
    let lengths = (|| {
        let operand = all.heap().alloc_from(&(mine.len() as u64).to_le_bytes())?;
        let result = all.heap().alloc(8 * all.size())?;
        all.said_at(all.recorder().site(site));
        let got = all.all_gather(operand, result.clone(), 1)?.wait(until())?;
        drop(got);
        let lengths = numbers(&result.bytes()?);
        Ok::<_, CommError>(lengths)
    })();
    let lengths: Vec<usize> = lengths.map_err(failed)?.into_iter().map(|length| length as usize).collect();
    let bytes = (|| {
        let operand = all.heap().alloc_from(mine)?;
        let result = all.heap().alloc(lengths.iter().sum())?;
        all.said_at(all.recorder().site(site));
        let got = all.all_gather_v(operand, result.clone(), lengths.clone(), 1)?.wait(until())?;
        drop(got);
        let bytes = result.bytes()?.to_vec();
        Ok::<_, CommError>(bytes)
    })();
    let bytes = bytes.map_err(failed)?;
    let mut rest = &bytes[..];
    let part = |length: &usize| {
        let (part, after) = rest.split_at(*length);
        rest = after;
        part.to_vec()
    };
    Ok(lengths.iter().map(part).collect())
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    bytes.chunks_exact(8).map(number).collect()
}

/// A digest of bytes: eight at a time, each step mixed well enough that a difference anywhere shows.
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

/// An error on all ranks where a text is not the same on all: the first line that differs, and who has which.
pub(crate) fn check_same(world: &World, what: &str, text: &str, site: Site) -> Result<()> {
    let mine = digest(text.as_bytes());
    let all = gather(world, &mine.to_le_bytes(), site)?;
    if all.iter().all(|other| other[..] == mine.to_le_bytes()) {
        return Ok(());
    }
    let texts = gather(world, text.as_bytes(), site)?;
    let texts: Vec<String> = texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
    let message = difference(what, &texts);
    Err(Error::new(
        "compile",
        format!("{message}\n  note: what it captures or reads from outside is the same on all ranks"),
        site,
    ))
}

/// The first line in which texts differ, and the ranks of each.
pub(crate) fn difference(what: &str, texts: &[String]) -> String {
    let lines: Vec<Vec<&str>> = texts.iter().map(|text| text.lines().collect()).collect();
    let longest = lines.iter().map(Vec::len).max().unwrap_or(0);
    let line = |rank: usize, at: usize| lines[rank].get(at).copied().unwrap_or("nothing more").trim();
    let first = (0..longest).find(|at| (1..lines.len()).any(|rank| line(rank, *at) != line(0, *at)));
    let Some(at) = first else { return format!("expected one {what} on all ranks, got several") };
    let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
    for rank in 0..lines.len() {
        match groups.iter_mut().find(|(text, _)| *text == line(rank, at)) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((line(rank, at), vec![rank])),
        }
    }
    let mut message = format!("expected one {what} on all ranks; the first difference is in line {}", at + 1);
    for (text, ranks) in groups {
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        message.push_str(&format!("\n  {word} {}: {text}", ranks.join(", ")));
    }
    message
}

/// What a rank is about to do at a call.
pub(crate) const MISS: u64 = 0;

/// Whether all ranks are about to do the same, which is not to miss. Costs a line of cache to each of them.
pub(crate) fn envelope(world: &World, key: u64, site: Site) -> Result<bool> {
    let Some(all) = world.all().filter(|all| all.size() > 1) else { return Ok(key != MISS) };
    // The largest of the keys and of their complements: they are a key and its own where all are equal.
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&key.to_le_bytes());
    bytes[8..].copy_from_slice(&(!key).to_le_bytes());
    let outcome = (|| {
        // The one handle of it goes into the operation and comes back, so that nothing need be noted.
        let buffer = match world.envelope.take().filter(Buffer::is_released) {
            Some(kept) => {
                kept.try_bytes_mut()?.copy_from_slice(&bytes);
                kept
            }
            None => all.heap().alloc_from(&bytes)?,
        };
        all.said_at(all.recorder().site(site));
        let back = all.all_reduce(buffer, Element::I64, Reduce::Max)?.wait_within(world.timeout())?.remove(0);
        let same = back.bytes()?[..] == bytes;
        world.envelope.set(Some(back));
        Ok::<_, CommError>(same)
    })();
    Ok(outcome.map_err(|error| Error::comm("compile", error, site))? && key != MISS)
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn ranks_are_grouped_by_the_line_that_differs() {
        let texts = ["a\nb\nc", "a\nx\nc", "a\nb\nd"].map(str::to_string);
        let text = difference("program", &texts);
        assert!(text.ends_with("line 2\n  ranks 0, 2: b\n  rank 1: x"), "{text}");
        let texts = ["a", "a\nb"].map(str::to_string);
        assert!(difference("program", &texts).ends_with("line 2\n  rank 0: nothing more\n  rank 1: b"));
    }
}
