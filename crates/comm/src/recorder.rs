//! The flight recorder: a ring of the last events of a rank, at the beginning of its segment.
//!
//! Any process that has the segment, mapped or as a descriptor, can read the ring, even if the owner is dead. It is
//!
//! - a header of one line: magic, capacity, how many events were ever written, the same moment on both clocks, and how
//!   many bytes of text are used;
//! - records of one line each: a stamp (the event's number plus one), ticks, ticks when it was over, number and kind,
//!   group and site, op and whether sizes may differ between members, bytes, extra. The stamp is 0 while a record is written, and is stored last;
//! - texts, each written once: a record has a text's offset and length, in half a word.
//!
//! An operation is one record: its end is noted in it, which costs less than another record.
//!
//! A reader copies the ring twice and takes the records that have a stamp and are equal both times: between the loads
//! of the two stamps such a record did not change, so one of the copies is whole. It converts ticks by the moment in
//! the header and one of its own, so that the rate of the ticks need not be known.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::panic::Location;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, PoisonError};

use consort_types::Failure;
use rustix::fs::{FileType, fstat};
use rustix::io::pread;

use crate::event::{Event, EventKind};
use crate::op::{Key, UNEVEN, describe};
use crate::shm::fixed::Fixed;
use crate::shm::segment::Segment;
use crate::sync::{AtomicU64, fence};
use crate::ticks::{now_ns, ticks};

/// Bytes of the whole recorder. Pages are allocated on first use.
pub(crate) const SIZE: usize = if cfg!(any(loom, shuttle)) { 512 } else { 2 << 20 };
/// Events that are kept.
pub(crate) const CAPACITY: usize = if cfg!(any(loom, shuttle)) { 2 } else { 1024 };

const LINE: usize = 64;
const WORDS: usize = LINE / 8;
const TEXTS: usize = LINE + CAPACITY * LINE;
/// A name has 14 bits for a length and 18 for a place, in words.
const MAX_TEXT: usize = (1 << 14) - 1;
const MAGIC: u64 = u64::from_le_bytes(*b"consort1");

/// The words of a record that say when it started and when it was over; 0 if it is not over.
const STARTED: usize = 1;
const OVER: usize = 2;

// The words of the header.
const COUNT: usize = 16;
const TICKS: usize = 24;
const NANOSECONDS: usize = 32;
const TEXT_BYTES: usize = 40;

/// The bits of an op that are not a name and its number.
const MARKS: u64 = 0xf << 60;
/// Marks an op that is given by its code instead of a text. Members need not agree on this bit.
const CODE: u64 = 1 << 63;
/// The code of a batch of messages.
const EXCHANGE_CODE: u64 = 0xff;

/// Number of call sites whose texts are cached without a lock.
const SITES: usize = 32;

/// Records what a rank does, for one group. Cheap: no lock, no allocation and no formatting, except on the first use of
/// a text. Each thread of a rank has a clone.
#[derive(Clone)]
pub struct Recorder {
    ring: Arc<Ring>,
    group: Name,
    group_name: Arc<str>,
    sites: [Cell<(usize, Name)>; SITES],
}

struct Ring {
    segment: Arc<Segment>,
    /// How many events were ever written.
    count: Fixed<AtomicU64>,
    records: Fixed<[[AtomicU64; WORDS]; CAPACITY]>,
    texts: Mutex<Texts>,
}

#[derive(Default)]
struct Texts {
    by_text: BTreeMap<String, Name>,
    /// By the address of the site.
    by_site: BTreeMap<usize, Name>,
}

/// A text that a recorder knows: at which word it begins, and in the lower 14 bits how long it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Name(u32);

impl Name {
    /// The word that others find in a slot.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.0)
    }

    /// Two names in one word.
    #[inline(always)]
    pub(crate) fn pair(lower: Name, upper: Name) -> u64 {
        lower.word() | upper.word() << 32
    }

    /// The two names of a word.
    pub(crate) fn of_pair(word: u64) -> (Name, Name) {
        (Name(word as u32), Name((word >> 32) as u32))
    }

    /// Whether it is empty: there was no text, or no room for it.
    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Where the text lies in its segment, and how long it is. The word is not trusted.
    fn place(self) -> (usize, usize) {
        let at = ((self.0 >> 14) as usize * 8) & (SIZE - 1);
        (at, (self.0 as usize & MAX_TEXT).min(SIZE - at))
    }

    /// The text, given the segment of its recorder.
    pub(crate) fn text(self, segment: &Segment) -> String {
        let (at, len) = self.place();
        // Texts are written once, before their name is published, and never again.
        let words = (0..len.div_ceil(8)).map(|i| segment.word(at + i * 8).load(Relaxed));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take(len).collect();
        printable(&bytes)
    }
}

/// What a caller calls an operation: a text, and a number that goes with it. Texts are kept forever, and so must not
/// change from call to call; the number may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallText {
    pub(crate) name: Name,
    /// From 1 on; 0 for none.
    pub(crate) number: u32,
}

impl CallText {
    /// The word of a record. The upper bits are left to marks: the number is shown modulo 2^28.
    #[inline(always)]
    fn word(self) -> u64 {
        (self.name.word() | u64::from(self.number) << 32) & !MARKS
    }

    fn of_word(word: u64) -> CallText {
        let (name, Name(number)) = Name::of_pair(word & !MARKS);
        CallText { name, number }
    }

    /// In words, given the segment of its recorder.
    pub(crate) fn text(self, segment: &Segment) -> String {
        self.with(self.name.text(segment))
    }

    /// `call 3 of ..`, where the text is `of ..`.
    fn with(self, text: String) -> String {
        if self.number == 0 { text } else { format!("call {} {text}", self.number) }
    }
}

/// Untrusted bytes, as a text without control characters other than newlines.
fn printable(bytes: &[u8]) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' { '?' } else { c };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}

/// An operation, in words of a record.
#[derive(Clone, Copy)]
pub(crate) struct CallRecord {
    pub(crate) number: u64,
    pub(crate) key: Key,
    /// The caller's text for it.
    pub(crate) text: CallText,
}

impl CallRecord {
    /// A batch of messages.
    pub(crate) fn batch(number: u64, bytes: usize) -> CallRecord {
        let key = Key { what: EXCHANGE_CODE, extra: 0, bytes: bytes as u64 };
        CallRecord { number, key, text: CallText::default() }
    }
}

impl Recorder {
    /// The recorder of a new segment.
    pub(crate) fn new(segment: Arc<Segment>, group: &str) -> Recorder {
        for (at, value) in [(8, CAPACITY as u64), (TICKS, ticks()), (NANOSECONDS, now_ns())] {
            segment.word(at).store(value, Relaxed);
        }
        segment.word(0).store(MAGIC, Release);
        let ring = Arc::new(Ring {
            count: Fixed::new(&segment, |segment| segment.word(COUNT)),
            records: Fixed::new(&segment, |segment| segment.words(LINE)),
            segment,
            texts: Mutex::default(),
        });
        Recorder { group: ring.name(group), ring, group_name: group.into(), sites: Default::default() }
    }

    /// The recorder of the same rank for a group of these world ranks, made by call `made_by` on this group.
    pub(crate) fn for_subgroup(&self, made_by: u64, ranks: &[usize]) -> Recorder {
        let name = subgroup_name(&self.group_name, made_by, ranks);
        Recorder { group: self.ring.name(&name), group_name: name.into(), ..self.clone() }
    }

    /// The name for a text. Ask once and keep it: this takes a lock.
    pub fn name(&self, text: &str) -> Name {
        self.ring.name(text)
    }

    /// Records an event that is not an operation of a group: a kernel, a compilation.
    #[track_caller]
    #[inline]
    pub fn record(&self, kind: EventKind, name: Name, bytes: u64) {
        let site = self.site(Location::caller());
        self.write(kind, [0, name.word(), bytes, 0], site);
    }

    /// Records an operation of the group, and returns the number of the event.
    #[inline]
    pub(crate) fn call(&self, kind: EventKind, call: CallRecord, site: Name) -> u64 {
        let Key { what, extra, bytes } = call.key;
        let op = if call.text.name.is_empty() { what | CODE } else { call.text.word() | what & UNEVEN };
        self.write(kind, [call.number, op, bytes, extra], site)
    }

    /// Notes that an operation is over, if its event is still recorded. The clock costs a tenth of a small operation
    /// and nothing during a wait, so one that was over at the first poll gets the time of its start.
    #[inline]
    pub(crate) fn finish(&self, event: u64, timed: bool) {
        let record = self.ring.record(event);
        if record[0].load(Relaxed) == event + 1 {
            let ticks = if timed { ticks() } else { record[STARTED].load(Relaxed) };
            record[OVER].store(ticks, Relaxed);
        }
    }

    /// Records an error of the group, found in a call, by the first line of its text.
    pub(crate) fn error(&self, number: u64, failure: &Failure, site: Name) {
        let name = self.ring.name(&failure.title().chars().take(200).collect::<String>());
        self.write(EventKind::Error, [number, name.word(), 0, 0], site);
    }

    /// The name of the group.
    pub(crate) fn group(&self) -> Name {
        self.group
    }

    /// The name of the group, as a text.
    pub(crate) fn group_name(&self) -> &str {
        &self.group_name
    }

    #[inline]
    fn write(&self, kind: EventKind, [number, op, bytes, extra]: [u64; 4], site: Name) -> u64 {
        let event = self.ring.count.fetch_add(1, Relaxed);
        let record = self.ring.record(event);
        record[0].store(0, Relaxed);
        // The stamp is cleared before anything else changes.
        fence(Release);
        let texts = self.group.word() << 32 | site.word();
        let values = [ticks(), 0, number << 8 | kind as u64, texts, op, bytes, extra];
        for (word, value) in record[1..].iter().zip(values) {
            word.store(value, Relaxed);
        }
        record[0].store(event + 1, Release);
        event
    }

    /// The name of a source line.
    #[inline]
    pub fn site(&self, site: &'static Location<'static>) -> Name {
        let key = std::ptr::from_ref(site).addr();
        let near = &self.sites[(key >> 3 ^ key >> 8) % SITES];
        let (at, name) = near.get();
        if at == key {
            return name;
        }
        let name = self.ring.site(key, site);
        near.set((key, name));
        name
    }
}

impl Ring {
    fn record(&self, event: u64) -> &[AtomicU64; WORDS] {
        &self.records[event as usize % CAPACITY]
    }

    fn site(&self, key: usize, site: &Location<'_>) -> Name {
        let known = self.lock().by_site.get(&key).copied();
        known.unwrap_or_else(|| {
            let name = self.name(&format!("{}:{}", site.file(), site.line()));
            self.lock().by_site.insert(key, name);
            name
        })
    }

    /// The name of a text, which is written if it is new. Once there is no more room, new texts are empty.
    fn name(&self, text: &str) -> Name {
        let mut texts = self.lock();
        if let Some(name) = texts.by_text.get(text) {
            return *name;
        }
        let at = TEXTS + self.segment.word(TEXT_BYTES).load(Relaxed) as usize;
        let room = text.len().next_multiple_of(8);
        if text.is_empty() || text.len() > MAX_TEXT || at + room > SIZE {
            return Name(0);
        }
        for (i, bytes) in text.as_bytes().chunks(8).enumerate() {
            self.segment.word(at + i * 8).store(word_of(bytes), Relaxed);
        }
        self.segment.word(TEXT_BYTES).store((at + room - TEXTS) as u64, Relaxed);
        let name = Name(((at / 8) as u32 * (1 << 14)) | text.len() as u32);
        texts.by_text.insert(text.to_string(), name);
        name
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Texts> {
        // Nothing panics while it holds the lock.
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of a group of these ranks, made by call `made_by` on another: `world.5[0,2]`.
fn subgroup_name(of: &str, made_by: u64, ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{of}.{made_by}[{}]", list.join(","))
}

/// The ranks that the name of a group lists; `None` for a group of all ranks. A record has room for the name only.
pub(crate) fn ranks_in(group: &str) -> Option<Vec<usize>> {
    let (_, list) = group.strip_suffix(']')?.rsplit_once('[')?;
    list.split(',').map(|rank| rank.parse().ok()).collect()
}

/// What a reader found in a rank's ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tape {
    /// The events that are left, oldest first.
    pub(crate) events: Vec<Event>,
    /// How many events were overwritten.
    pub(crate) lost: u64,
}

/// Reads the ring of a rank whose segment is mapped here.
pub(crate) fn read_segment(segment: &Segment, rank: usize) -> Option<Tape> {
    let copy = |at, count| Some((0..count).map(|i| segment.word(at + i * 8).load(Acquire)).collect());
    if segment.len() < SIZE { None } else { read(copy, rank) }
}

/// Reads the ring through a descriptor of a rank's segment.
pub(crate) fn read_descriptor(fd: impl AsFd, rank: usize) -> Option<Tape> {
    read(|at, count| copy_words(&fd, at, count), rank)
}

/// The text of a name, through a descriptor of its recorder's segment.
pub(crate) fn text_in(fd: impl AsFd, name: Name) -> Option<String> {
    let (at, len) = name.place();
    let words = copy_words(fd, at, len.div_ceil(8))?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).take(len).collect();
    Some(printable(&bytes))
}

/// `count` words of a descriptor that a rank sent. Nothing is mapped, so that a rank can do no harm by truncating it;
/// the contents are not trusted.
pub(crate) fn copy_words(fd: impl AsFd, at: usize, count: usize) -> Option<Vec<u64>> {
    // Reading a file that is not memory may block forever.
    let stat = fstat(&fd).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let mut bytes = vec![0; count * 8];
    let mut done = 0;
    while done < bytes.len() {
        match pread(&fd, &mut bytes[done..], (at + done) as u64) {
            Ok(0) => return None,
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(bytes.chunks_exact(8).map(word_of).collect())
}

fn word_of(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Reads a ring, given a function that copies words at an offset. `None` if there is no ring.
fn read(copy: impl Fn(usize, usize) -> Option<Vec<u64>>, rank: usize) -> Option<Tape> {
    let header = copy(0, WORDS)?;
    if header[..2] != [MAGIC, CAPACITY as u64] {
        return None;
    }
    let (first, second) = (copy(LINE, CAPACITY * WORDS)?, copy(LINE, CAPACITY * WORDS)?);
    // Read after the records, so that the texts that they refer to are included.
    let used = (copy(TEXT_BYTES, 1)?[0] as usize).min(SIZE - TEXTS) / 8;
    let texts: Vec<u8> = copy(TEXTS, used)?.iter().flat_map(|word| word.to_le_bytes()).collect();
    let clock = Clock { then: (header[TICKS / 8], header[NANOSECONDS / 8]), now: (ticks(), now_ns()) };
    let mut events: Vec<(u64, u64, Event)> = Vec::new();
    let copies = first.chunks_exact(WORDS).zip(second.chunks_exact(WORDS));
    for (place, (record, again)) in copies.enumerate() {
        let Some(number) = record[0].checked_sub(1) else { continue };
        // The end of an operation may be noted at any time.
        let same = record[0] == again[0] && record[OVER + 1..] == again[OVER + 1..];
        if same && number as usize % CAPACITY == place {
            for (ticks, event) in decode(again, &texts, &clock, rank).into_iter().flatten() {
                events.push((ticks, number, event));
            }
        }
    }
    // By ticks: nanoseconds are coarser, and equal for all events if the clock of the host was set back.
    events.sort_by_key(|&(ticks, number, _)| (ticks, number));
    let lost = header[COUNT / 8].saturating_sub(CAPACITY as u64);
    Some(Tape { events: events.into_iter().map(|(_, _, event)| event).collect(), lost })
}

/// The event of a record, and its finish event, if it finished, each with its ticks.
fn decode(record: &[u64], texts: &[u8], clock: &Clock, rank: usize) -> Option<Vec<(u64, Event)>> {
    let &[_, started, over, number, names, op, bytes, extra] = record else { return None };
    let text = |name: u64| {
        let (at, len) = Name(name as u32).place();
        Some(printable(texts.get(at.checked_sub(TEXTS)?..)?.get(..len)?).replace('\n', " "))
    };
    let (is_batch, is_uneven) = (op == EXCHANGE_CODE | CODE, op & UNEVEN != 0);
    let op = match op & !CODE {
        _ if is_batch => consort_types::Kind::Exchange.name().to_string(),
        what if op & CODE != 0 => describe(what),
        word => CallText::of_word(word).with(text(word).unwrap_or_default()),
    };
    let event = Event {
        rank,
        time_ns: clock.nanoseconds(started),
        kind: *EventKind::ALL.get(number as usize & 0xff)?,
        group: text(names >> 32).unwrap_or_default(),
        number: number >> 8,
        is_batch,
        is_uneven,
        op,
        bytes,
        extra,
        site: text(names & 0xffff_ffff).unwrap_or_default(),
    };
    let finish = (over > 0).then(|| {
        (over, Event { kind: EventKind::Finish, time_ns: clock.nanoseconds(over), ..event.clone() })
    });
    Some([(started, event)].into_iter().chain(finish).collect())
}

/// Two moments, each on both clocks.
struct Clock {
    then: (u64, u64),
    now: (u64, u64),
}

impl Clock {
    /// The time of `ticks`, on the straight line through the two moments.
    fn nanoseconds(&self, ticks: u64) -> u64 {
        let ((ticks_then, ns_then), (ticks_now, ns_now)) = (self.then, self.now);
        let [since, ticks, nanoseconds] = [(ticks, ticks_then), (ticks_now, ticks_then), (ns_now, ns_then)]
            .map(|(a, b)| i128::from(a) - i128::from(b));
        // The numbers come from another rank, and may be anything.
        let passed = if ticks > 0 { since.checked_mul(nanoseconds).map(|all| all / ticks) } else { Some(0) };
        let moment = passed.and_then(|passed| passed.checked_add(i128::from(ns_then)));
        moment.and_then(|moment| u64::try_from(moment).ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
