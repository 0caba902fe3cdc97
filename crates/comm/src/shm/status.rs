//! A rank's status, behind its flight recorder, for its peers and for the launcher: why it stopped, and what it waits
//! for. Peers read it in their mappings, the launcher through the descriptor, even if the rank is dead.
//!
//! A *cause* is written once, before its rank leaves any group: a text, and the ranks to blame.
//!
//! A *wait* is written when it has lasted for a while, and again at every check: `seq` is odd while the rank waits and
//! changes whenever the record does; `beats` counts checks that found nothing new.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::cause::Cause;
use crate::recorder::{self, CallText, Name, Recorder, copy_words, text_in};
use crate::shm::segment::Segment;
use crate::sync::fence;
use crate::ticks::now_ns;

/// Its offset in a segment.
const AT: usize = recorder::SIZE;
/// Its size in bytes.
pub(crate) const SIZE: usize = 512;

/// Maximum number of ranks in a set; those above are left out.
const RANKS: usize = 1024;
const SET: usize = RANKS / 64;

// The words.
const CAUSED: usize = 0;
const CAUSE: usize = 1;
const SEQ: usize = 2;
const BEATS: usize = 3;
const BEAT_NS: usize = 4;
const WHAT: usize = 5;
const NUMBER: usize = 6;
const NAMES: usize = 7;
const GROUP: usize = 8;
const FOUND_BY: usize = 9;
const MOVED: usize = 10;
const TEXT_NUMBER: usize = 11;
const DEADLOCK: usize = 12;
const CULPRITS: usize = 16;

// Values of `CAUSED` if there is a cause.
const FAILED: u64 = 1;
const TROUBLED: u64 = 2;

const MISSING: usize = CULPRITS + SET;
const WORDS: usize = MISSING + SET;
const _: () = assert!(WORDS * 8 <= SIZE);

/// The kind of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitKind {
    /// Members that have not started a collective.
    Start = 1,
    /// Members that have started it, and must make their part of it.
    Progress = 2,
    /// A message that was not sent.
    Receive = 3,
    /// A message that was not taken.
    Send = 4,
    /// Memory that peers still read.
    Release = 5,
}

impl WaitKind {
    const ALL: [WaitKind; 5] =
        [WaitKind::Start, WaitKind::Progress, WaitKind::Receive, WaitKind::Send, WaitKind::Release];

    /// Whether only the awaited rank's program can end it, by starting something, which a waiting rank does not do.
    pub(crate) fn needs_the_program(self) -> bool {
        matches!(self, WaitKind::Start | WaitKind::Receive | WaitKind::Send)
    }
}

/// A rank's wait, as it writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waits<'a> {
    pub(crate) kind: WaitKind,
    /// The number of the call, or the tag of the message.
    pub(crate) number: u64,
    pub(crate) site: Name,
    /// What was called.
    pub(crate) text: CallText,
    pub(crate) group: Name,
    /// How often messages of this rank were posted or completed: a change means that the rank made progress.
    pub(crate) moved: u64,
    /// All ranks of the world that it needs.
    pub(crate) missing: &'a [usize],
}

/// A rank's wait, as others read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) seq: u64,
    pub(crate) beats: u64,
    pub(crate) beat_ns: u64,
    pub(crate) kind: WaitKind,
    pub(crate) number: u64,
    site: Name,
    text: CallText,
    group: Name,
    pub(crate) missing: Vec<usize>,
}

impl Waiting {
    #[cfg(test)]
    pub(crate) fn of(kind: WaitKind, missing: &[usize]) -> Waiting {
        let (site, text, group) = (Name::default(), CallText::default(), Name::default());
        let (seq, beats, beat_ns, number) = (1, 0, 0, 0);
        Waiting { seq, beats, beat_ns, kind, number, site, text, group, missing: missing.to_vec() }
    }

    /// What was called, its source line, and the group, in the segment where it was found.
    pub(crate) fn texts(&self, segment: &Segment) -> [String; 3] {
        [self.text.text(segment), self.site.text(segment), self.group.text(segment)]
    }
}

fn word(segment: &Segment, word: usize) -> &crate::sync::AtomicU64 {
    segment.word(AT + word * 8)
}

fn store_set(segment: &Segment, at: usize, ranks: &[usize]) {
    for part in 0..SET {
        let bits =
            ranks.iter().filter(|rank| **rank / 64 == part).fold(0, |bits, rank| bits | 1 << (rank % 64));
        word(segment, at + part).store(bits, Relaxed);
    }
}

fn load_set(load: impl Fn(usize) -> u64, at: usize) -> Vec<usize> {
    (0..RANKS).filter(|rank| load(at + rank / 64) >> (rank % 64) & 1 == 1).collect()
}

/// Publishes why this rank stops, with texts that the recorder of its segment keeps; the first cause counts, unless it came from `set_trouble`.
pub(crate) fn set_cause(segment: &Segment, recorder: &Recorder, cause: &Cause) {
    if word(segment, CAUSED).load(Relaxed) != FAILED {
        word(segment, FOUND_BY).store(cause.by as u64, Relaxed);
        let [text, notes] = [&cause.text, &cause.notes].map(|text| recorder.name(text));
        word(segment, CAUSE).store(Name::pair(text, notes), Relaxed);
        word(segment, DEADLOCK).store(u64::from(cause.is_deadlock), Relaxed);
        store_set(segment, CULPRITS, &cause.culprits);
        word(segment, CAUSED).store(FAILED, Release);
    }
}

/// Publishes that this rank leaves after an error that does not involve the others.
pub(crate) fn set_trouble(segment: &Segment, recorder: &Recorder, cause: &Cause) {
    if word(segment, CAUSED).load(Relaxed) == 0 {
        set_cause(segment, recorder, cause);
        word(segment, CAUSED).store(TROUBLED, Release);
    }
}

/// Why a rank stopped, if it has published that.
pub(crate) fn cause(segment: &Segment) -> Option<Cause> {
    if word(segment, CAUSED).load(Acquire) == 0 {
        return None;
    }
    read_cause(|at| word(segment, at).load(Relaxed), |name| Some(name.text(segment)))
}

/// The same, through a descriptor of the rank's segment.
pub(crate) fn cause_in(fd: impl AsFd) -> Option<Cause> {
    let words = copy_words(&fd, AT, WORDS)?;
    if words[CAUSED] == 0 {
        return None;
    }
    read_cause(|at| words[at], |name| text_in(&fd, name))
}

fn read_cause(load: impl Fn(usize) -> u64, text: impl Fn(Name) -> Option<String>) -> Option<Cause> {
    let (error, notes) = Name::of_pair(load(CAUSE));
    Some(Cause {
        by: load(FOUND_BY) as usize,
        text: text(error)?,
        notes: text(notes)?,
        is_deadlock: load(DEADLOCK) != 0,
        culprits: load_set(load, CULPRITS),
    })
}

/// Publishes what this rank waits for; a changed record gets another `seq`.
pub(crate) fn set_waiting(segment: &Segment, waits: Waits<'_>) {
    let values = [
        (WHAT, waits.kind as u64),
        (NUMBER, waits.number),
        (NAMES, Name::pair(waits.site, waits.text.name)),
        (TEXT_NUMBER, u64::from(waits.text.number)),
        (GROUP, waits.group.word()),
        (MOVED, waits.moved),
    ];
    let load = |at: usize| word(segment, at).load(Relaxed);
    let seq = load(SEQ);
    let same = seq % 2 == 1
        && values.iter().all(|(at, value)| load(*at) == *value)
        && load_set(load, MISSING)
            == waits.missing.iter().copied().filter(|rank| *rank < RANKS).collect::<Vec<_>>();
    if !same {
        // Even while it is written, so that nobody reads a torn record.
        word(segment, SEQ).store((seq | 1) + 1, Relaxed);
        fence(Release);
        values.iter().for_each(|(at, value)| word(segment, *at).store(*value, Relaxed));
        store_set(segment, MISSING, waits.missing);
        word(segment, BEATS).store(0, Relaxed);
        word(segment, BEAT_NS).store(now_ns(), Relaxed);
        word(segment, SEQ).store((seq | 1) + 2, Release);
        return;
    }
    word(segment, BEAT_NS).store(now_ns(), Relaxed);
    word(segment, BEATS).fetch_add(1, AcqRel);
}

/// The wait is over.
pub(crate) fn end_waiting(segment: &Segment) {
    let seq = word(segment, SEQ).load(Relaxed);
    if seq % 2 == 1 {
        word(segment, SEQ).store(seq + 1, Release);
    }
}

/// What a rank waits for, if it does.
pub(crate) fn waiting(segment: &Segment) -> Option<Waiting> {
    let seq = word(segment, SEQ).load(Acquire);
    if seq.is_multiple_of(2) {
        return None;
    }
    let load = |at: usize| word(segment, at).load(Relaxed);
    let beats = word(segment, BEATS).load(Acquire);
    let kind = WaitKind::ALL.into_iter().find(|kind| *kind as u64 == load(WHAT))?;
    let (site, name) = Name::of_pair(load(NAMES));
    let waiting = Waiting {
        seq,
        beats,
        beat_ns: load(BEAT_NS),
        kind,
        number: load(NUMBER),
        site,
        text: CallText { name, number: load(TEXT_NUMBER) as u32 },
        group: Name::of_pair(load(GROUP)).0,
        missing: load_set(load, MISSING),
    };
    fence(Acquire);
    (word(segment, SEQ).load(Relaxed) == seq).then_some(waiting)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use consort_types::Failure;
    use std::sync::Arc;

    #[test]
    fn a_cause_is_kept_and_read_from_both_sides() {
        let (segment, fd) = Segment::shared(AT + SIZE).unwrap();
        let segment = Arc::new(segment);
        let recorder = Recorder::new(Arc::clone(&segment), "world");
        assert_eq!((cause(&segment), cause_in(&fd)), (None, None));
        let failure = Failure::new("call 3 differs").row("rank 2").note("look").note("and wait");
        let expected = Cause { is_deadlock: true, ..Cause::new(4, failure.clone(), vec![0, 2, 1023]) };
        assert_eq!(expected.text, "call 3 differs\n  rank 2");
        assert_eq!(expected.failure().to_string(), failure.to_string());
        set_cause(&segment, &recorder, &expected);
        set_cause(&segment, &recorder, &Cause::new(5, Failure::new("later"), vec![1]));
        assert_eq!(cause(&segment), Some(expected.clone()));
        assert_eq!(cause_in(&fd), Some(expected));
    }

    #[test]
    fn a_wait_beats_while_nothing_changes() {
        let segment = Arc::new(Segment::private(AT + SIZE).unwrap());
        let recorder = Recorder::new(Arc::clone(&segment), "world");
        let (site, group) = (recorder.name("x.rs:1"), recorder.group());
        let text = CallText { name: recorder.name("of `f`"), number: 3 };
        let waits = |missing: &'static [usize]| Waits {
            kind: WaitKind::Start,
            number: 7,
            site,
            text,
            group,
            moved: 0,
            missing,
        };
        assert_eq!(waiting(&segment), None);
        set_waiting(&segment, waits(&[1, 3]));
        let first = waiting(&segment).unwrap();
        assert_eq!((first.beats, first.number, &first.missing[..]), (0, 7, &[1, 3][..]));
        assert_eq!(first.texts(&segment), ["call 3 of `f`", "x.rs:1", "world"]);
        set_waiting(&segment, waits(&[1, 3]));
        let second = waiting(&segment).unwrap();
        assert_eq!((second.seq, second.beats), (first.seq, 1));
        set_waiting(&segment, waits(&[3]));
        let third = waiting(&segment).unwrap();
        assert!(third.seq != first.seq && third.beats == 0 && third.missing == [3]);
        end_waiting(&segment);
        assert_eq!(waiting(&segment), None);
    }
}
