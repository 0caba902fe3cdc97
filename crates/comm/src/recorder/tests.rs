//! Rings that wrap, records that are torn, memory that is garbage.

use consort_types::Rng;

use super::*;

/// A recorder in shared memory, with the segment and its descriptor.
fn recorder() -> (Recorder, Arc<Segment>, std::os::fd::OwnedFd) {
    let (segment, fd) = Segment::shared(SIZE + 4096).unwrap();
    let segment = Arc::new(segment);
    (Recorder::new(Arc::clone(&segment), "world"), segment, fd)
}

fn call(number: u64) -> CallRecord {
    // all_reduce, f32 (the first element type), sum (the first reduction).
    let key = Key { what: 1 << 8 | 1 << 16, bytes: 8 * number, extra: 7 };
    CallRecord { number, key, text: CallText::default() }
}

fn start(recorder: &Recorder, number: u64) {
    recorder.call(EventKind::Start, call(number), Name::default());
}

#[test]
fn an_operation_that_is_over_says_when() {
    let (recorder, segment, _fd) = recorder();
    let event = recorder.call(EventKind::Start, call(0), Name::default());
    start(&recorder, 1);
    let started = ticks();
    while ticks() <= started {}
    recorder.finish(event, true);
    // An event that was overwritten since is left alone.
    recorder.finish(event + CAPACITY as u64, true);
    let tape = read_segment(&segment, 0).unwrap();
    let seen: Vec<_> = tape.events.iter().map(|e| (e.kind, e.number)).collect();
    assert_eq!(seen, [(EventKind::Start, 0), (EventKind::Start, 1), (EventKind::Finish, 0)]);
}

#[test]
fn what_is_recorded_is_read_back_by_mapping_and_by_descriptor() {
    let (recorder, segment, fd) = recorder();
    let before = now_ns();
    recorder.call(EventKind::Start, call(3), recorder.site(Location::caller()));
    let subgroup = recorder.for_subgroup(5, &[0, 2]).for_subgroup(1, &[2]);
    subgroup.call(EventKind::Wait, CallRecord::batch(9, 77), Name::default());
    let line = line!() + 1;
    recorder.record(EventKind::Kernel, recorder.name("matmul é"), 12);
    recorder.error(4, &Failure::new("rank 1 died").note("why"), Name::default());
    let text = CallText { name: recorder.name("of `f`"), number: 3 };
    let key = Key { what: UNEVEN, ..call(5).key };
    recorder.call(EventKind::Start, CallRecord { key, text, ..call(5) }, Name::default());
    let after = now_ns();
    let tape = read_segment(&segment, 6).unwrap();
    assert_eq!(tape.lost, 0);
    let seen: Vec<_> = tape
        .events
        .iter()
        .map(|e| (e.rank, e.kind, e.group.as_str(), e.number, e.op.as_str(), e.bytes, e.extra))
        .collect();
    let expected = [
        (6, EventKind::Start, "world", 3, "all_reduce sum f32", 24, 7),
        (6, EventKind::Wait, "world.5[0,2].1[2]", 9, "exchange", 77, 0),
        (6, EventKind::Kernel, "world", 0, "matmul é", 12, 0),
        (6, EventKind::Error, "world", 4, "rank 1 died", 0, 0),
        (6, EventKind::Start, "world", 5, "call 3 of `f`", 40, 7),
    ];
    assert_eq!(seen, expected);
    assert!(tape.events[2].site.ends_with(&format!("recorder/tests.rs:{line}")), "{:?}", tape.events[2].site);
    assert_eq!(tape.events[3].site, "");
    let facts: Vec<_> = tape.events.iter().map(|e| (e.is_batch, e.is_uneven)).collect();
    assert_eq!(facts, [(false, false), (true, false), (false, false), (false, false), (false, true)]);
    // The two clocks are not read at exactly the same moment.
    let slack = 50_000_000;
    assert!(tape.events.iter().all(|e| (before - slack..after + slack).contains(&e.time_ns)));
    assert!(tape.events.is_sorted_by_key(|e| e.time_ns));
    let other = read_descriptor(&fd, 6).unwrap();
    let names = |tape: &Tape| tape.events.iter().map(|e| (e.op.clone(), e.site.clone())).collect::<Vec<_>>();
    assert_eq!(names(&other), names(&tape));
}

#[test]
fn a_ring_keeps_the_last_events() {
    let (recorder, segment, _fd) = recorder();
    let many = 3 * CAPACITY as u64 + 100;
    (0..many).for_each(|number| start(&recorder, number));
    let tape = read_segment(&segment, 0).unwrap();
    assert_eq!(tape.lost, many - CAPACITY as u64);
    let numbers: Vec<u64> = tape.events.iter().map(|event| event.number).collect();
    assert_eq!(numbers, (many - CAPACITY as u64..many).collect::<Vec<_>>());
}

#[test]
fn a_torn_record_is_left_out() {
    let (recorder, segment, _fd) = recorder();
    (0..4).for_each(|number| start(&recorder, number));
    let numbers = || read_segment(&segment, 0).unwrap().events.iter().map(|e| e.number).collect::<Vec<_>>();
    // A writer that died in the middle of the second record.
    segment.word(LINE + LINE).store(0, Relaxed);
    assert_eq!(numbers(), [0, 2, 3]);
    // A stamp that belongs to another record.
    segment.word(LINE + 2 * LINE).store(50, Relaxed);
    assert_eq!(numbers(), [0, 3]);
    // A record that changes between the two copies: the first word of the fourth record's body.
    let copies = Cell::new(0);
    let copy = |at: usize, count: usize| {
        let mut words: Vec<u64> = (0..count).map(|i| segment.word(at + i * 8).load(Acquire)).collect();
        if at == LINE {
            copies.set(copies.get() + 1);
            words[3 * WORDS + 5] += copies.get();
        }
        Some(words)
    };
    let tape = read(copy, 0).unwrap();
    assert_eq!(tape.events.iter().map(|e| e.number).collect::<Vec<_>>(), [0]);
}

#[test]
fn a_reader_beside_a_writer_sees_only_whole_records() {
    let (recorder, segment, fd) = recorder();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let done = &done;
        scope.spawn(move || {
            (0..200_000).for_each(|number| start(&recorder, number));
            done.store(true, Release);
        });
        let mut rounds = 0;
        while !done.load(Acquire) || rounds < 2 {
            for tape in [read_segment(&segment, 0).unwrap(), read_descriptor(&fd, 0).unwrap()] {
                assert!(tape.events.iter().all(|e| e.bytes == 8 * e.number && e.op == "all_reduce sum f32"));
                assert!(tape.events.is_sorted_by_key(|e| e.number));
            }
            rounds += 1;
        }
    });
}

#[test]
fn garbage_is_no_event_and_no_panic() {
    let (recorder, segment, fd) = recorder();
    (0..40).for_each(|number| start(&recorder, number));
    // Wrong words everywhere but in the stamps and the magic.
    let mut rng = Rng::new(1);
    let words = SIZE / 8;
    for word in (2..words).filter(|word| *word < 8 || !word.is_multiple_of(WORDS)) {
        segment.word(word * 8).store(rng.next_u64(), Relaxed);
    }
    for tape in [read_segment(&segment, 0), read_descriptor(&fd, 0)] {
        assert!(tape.unwrap().events.len() <= 40);
    }
    for value in [0, u64::MAX, 1 << 63] {
        (2..words).for_each(|word| segment.word(word * 8).store(value, Relaxed));
        assert!(read_segment(&segment, 0).unwrap().events.len() <= CAPACITY);
    }
    segment.word(0).store(MAGIC + 1, Relaxed);
    assert_eq!(read_segment(&segment, 0), None, "another version");
    let short = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&short, 100).unwrap();
    assert_eq!(read_descriptor(&short, 0), None, "shorter than it should be");
    let (reads, _writes) = std::io::pipe().unwrap();
    assert_eq!(read_descriptor(&reads, 0), None, "no memory at all");
}

#[test]
fn texts_are_kept_once_and_may_run_out() {
    let (recorder, segment, _fd) = recorder();
    let used = || segment.word(TEXT_BYTES).load(Relaxed);
    let name = recorder.name("a text");
    let before = used();
    assert_eq!((recorder.clone().name("a text"), used()), (name, before));
    let long = |i: usize| format!("{i:16000}");
    let names: Vec<Name> = (0..200).map(|i| recorder.name(&long(i))).collect();
    assert!(names[0] != Name(0) && names[199] == Name(0) && used() as usize <= SIZE - TEXTS);
    assert_eq!(names[100].text(&segment), long(100), "names reach all of the area");
    recorder.record(EventKind::Kernel, names[199], 1);
    recorder.record(EventKind::Kernel, name, 2);
    let ops: Vec<String> = read_segment(&segment, 0).unwrap().events.into_iter().map(|e| e.op).collect();
    assert_eq!(ops, ["", "a text"]);
}

#[test]
fn ticks_lie_on_the_line_through_two_moments() {
    let clock = Clock { then: (1000, 50), now: (3000, 1050) };
    assert_eq!([1000, 1200, 3000, 3200, 800].map(|ticks| clock.nanoseconds(ticks)), [50, 150, 1050, 1150, 0]);
    let stuck = Clock { then: (1000, 50), now: (1000, 60) };
    assert_eq!(stuck.nanoseconds(u64::MAX), 50);
    let wide = Clock { then: (0, 0), now: (1, u64::MAX) };
    assert_eq!(wide.nanoseconds(u64::MAX), 0, "out of range, no panic");
}
