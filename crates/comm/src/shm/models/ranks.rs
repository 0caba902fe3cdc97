//! Ranks as threads of a model.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::thread;
#[cfg(shuttle)]
use shuttle::thread;

use crate::cores::Cores;
use crate::deadline::DEFAULT_DEADLINE;
use crate::group::Group;
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::layout::{prepare, reserved, rows};
use crate::shm::progress::Shm;
use crate::shm::segment::Segment;

const STACK: usize = 1 << 16;

/// Runs `f` on `n` ranks with heaps of `heap` bytes, and returns their results in rank order. A rank can raise the
/// alarm itself, as a witness of its death would.
pub(super) fn run<T: Send + 'static>(
    n: usize,
    heap: usize,
    f: impl Fn(Group, &Alarm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let room = heap.next_multiple_of(64) + reserved(n);
    let segment = |_| Arc::new(Segment::private(room).expect("a segment"));
    let segments: Arc<Vec<Arc<Segment>>> = Arc::new((0..n).map(segment).collect());
    let (alarm, f) = (Arc::new(Alarm::default()), Arc::new(f));
    let start = |rank: usize| {
        let (segments, alarm, f) = (Arc::clone(&segments), Arc::clone(&alarm), Arc::clone(&f));
        let body = move || {
            // One core for all, so that nobody spins: in a model each poll is a step like any other, and spinning never
            // ends.
            let cores = Cores::of(n, [&[1][..]]);
            let (heap, recorder) = prepare(&segments, rank, &alarm, cores, "world");
            let settings = Rc::new(Settings::new(DEFAULT_DEADLINE, false));
            let alarm = Arc::clone(&alarm);
            let group = Group::new(Shm::of_rows(
                rows(&segments),
                rank,
                heap,
                Arc::clone(&alarm),
                recorder,
                cores,
                settings,
            ));
            f(group, &alarm)
        };
        thread::Builder::new().stack_size(STACK).spawn(body).expect("a thread of the model")
    };
    let threads: Vec<_> = (0..n).map(start).collect();
    threads.into_iter().map(|thread| thread.join().expect("the rank does not panic")).collect()
}

/// A time that no model reaches.
pub(super) fn never() -> Instant {
    Instant::now() + Duration::from_secs(4 * 3600)
}
