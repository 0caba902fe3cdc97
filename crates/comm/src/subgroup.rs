//! Groups made of a group: along an axis of a mesh, by colour, by lists.

use std::collections::BTreeMap;
use std::time::Instant;

use consort_types::{Digest, Failure};

use crate::CommError;
use crate::arguments::check;
use crate::engine::{Engine, with_engine};
use crate::group::Group;
use crate::request::Note;

impl Group {
    /// The group along one axis of a mesh of this shape, in which neighbours along the last axis have consecutive
    /// places. All members must call it.
    #[track_caller]
    pub fn axis(&self, shape: &[usize], axis: usize, until: Instant) -> Result<Group, CommError> {
        let members = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        check(members == Some(self.size()) && axis < shape.len(), || {
            (
                format!("a mesh of {} members and one of its axes", self.size()),
                format!("{shape:?} and {axis}"),
            )
        })?;
        let stride: usize = shape[axis + 1..].iter().product();
        let first = |member: &usize| (member / stride).is_multiple_of(shape[axis]);
        let line = |start: usize| (0..shape[axis]).map(|step| start + step * stride).collect();
        let lists: Vec<Vec<usize>> = (0..self.size()).filter(first).map(line).collect();
        self.subgroup(&lists, until)?.ok_or_else(|| {
            CommError::Argument(Failure::new("no group along the axis contains this member").of("axis"))
        })
    }

    /// The group of all members with the same colour, ordered by key and then by place; `None` if this member gives no
    /// colour. All members must call it.
    #[track_caller]
    pub fn split(&self, colour: Option<u64>, key: i64, until: Instant) -> Result<Option<Group>, CommError> {
        let mine = [u64::from(colour.is_some()), colour.unwrap_or(0), key as u64];
        let bytes: Vec<u8> = mine.iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = self.recorder().name("split the group by colours");
        let all = self.agree(&bytes, Note { text, ..Note::default() })?.wait(until)?;
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let words: Vec<u64> = all[1].bytes()?.chunks_exact(8).map(word).collect();
        let mut lists: BTreeMap<u64, Vec<(i64, usize)>> = BTreeMap::new();
        for (member, words) in words.chunks_exact(3).enumerate().filter(|(_, words)| words[0] == 1) {
            lists.entry(words[1]).or_default().push((words[2] as i64, member));
        }
        lists.values_mut().for_each(|list| list.sort_unstable());
        let lists: Vec<Vec<usize>> =
            lists.into_values().map(|list| list.into_iter().map(|(_, member)| member).collect()).collect();
        self.subgroup(&lists, until)
    }

    /// The group of the list that contains this member, if one does. All members must call it with the same lists of
    /// places in this group; lists must be disjoint.
    #[track_caller]
    pub fn subgroup(&self, lists: &[Vec<usize>], until: Instant) -> Result<Option<Group>, CommError> {
        self.subgroup_as(lists, until, Note::default())
    }

    /// The same with a note for the call that makes the groups.
    #[track_caller]
    pub fn subgroup_as(
        &self,
        lists: &[Vec<usize>],
        until: Instant,
        note: Note,
    ) -> Result<Option<Group>, CommError> {
        let mut seen = vec![false; self.size()];
        for member in lists.iter().flatten() {
            let free = seen.get(*member).is_some_and(|seen| !seen);
            check(free, || (format!("distinct members below {}", self.size()), member.to_string()))?;
            seen[*member] = true;
        }
        let list = lists.iter().find(|list| list.contains(&self.rank()));
        let offer = with_engine!(&self.engine, engine => engine.offer(list.map(Vec::as_slice)))?;
        let number = with_engine!(&self.engine, engine => engine.next());
        let words = self.agree(&offer.word.to_le_bytes(), self.note_of(lists, note))?.wait(until)?;
        let words: Vec<u64> =
            words[1].bytes()?.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let place = |list: &[usize]| list.iter().position(|member| *member == self.rank()).unwrap_or(0);
        let (made, list) = ((number, until), list.map(|list| (place(list), &list[..])));
        let made = with_engine!(&self.engine, engine => engine.subgroup(made, list, offer, &words))?;
        Ok(made.map(Group::new))
    }

    /// The note for making groups of these lists, which must be equal on all members.
    fn note_of(&self, lists: &[Vec<usize>], note: Note) -> Note {
        let mut digest = Digest::default();
        digest.add(note.digest);
        for list in lists {
            digest.add(list.len() as u64);
            digest.add_all(list.iter().map(|member| *member as u64));
        }
        let what = note.text.text(self.heap().segment());
        let text = format!("{}{lists:?}", if what.is_empty() { "make groups of the lists " } else { &what });
        let text: String =
            if text.len() > 400 { text.chars().take(400).chain("..".chars()).collect() } else { text };
        Note { digest: digest.get(), text: self.recorder().name(&text), is_agreement: true, ..note }
    }
}
