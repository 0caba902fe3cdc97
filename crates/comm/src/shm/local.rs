//! Ranks as threads of one process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use crate::cores::{self, Cores};
use crate::deadline::DEFAULT_DEADLINE;
use crate::group::Group;
use crate::settings::Settings;
use crate::shm::alarm::Alarm;
use crate::shm::layout::{prepare, reserved, rows};
use crate::shm::progress::Shm;
use crate::shm::segment::Segment;

/// Default bytes of each rank's heap. Pages are allocated on first use.
const HEAP: usize = if cfg!(miri) { 1 << 18 } else { 1 << 30 };

/// Runs `f` on `n` ranks, each a thread, and returns what they returned, in rank order.
///
/// If a rank panics, the waits of the others fail with `CommError::Panicked`, and when all ranks have ended the first
/// panic is resumed here.
pub fn spawn<T: Send>(n: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    spawn_with_heap(n, HEAP, f)
}

/// The same with heaps of `heap` bytes.
pub fn spawn_with_heap<T: Send>(n: usize, heap: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let room = heap.saturating_add(reserved(n));
    let segment =
        |_| Arc::new(Segment::private(room).expect("the machine has room for the heap of each rank"));
    let segments: Vec<Arc<Segment>> = (0..n).map(segment).collect();
    let alarm = Arc::new(Alarm::default());
    let cores = Cores::of(n, [&cores::mine()[..]]);
    let run = |rank: usize| {
        let (heap, recorder) = prepare(&segments, rank, &alarm, cores, "world");
        let settings = Rc::new(Settings::new(DEFAULT_DEADLINE, false));
        let group = Group::new(Shm::of_rows(
            rows(&segments),
            rank,
            heap,
            Arc::clone(&alarm),
            recorder,
            cores,
            settings,
        ));
        catch_unwind(AssertUnwindSafe(|| f(group))).inspect_err(|_| alarm.raise(rank))
    };
    let mut results: Vec<thread::Result<T>> = thread::scope(|scope| {
        let start = |rank: usize| {
            let thread = thread::Builder::new().name(format!("rank {rank}"));
            thread.spawn_scoped(scope, move || run(rank)).expect("the machine has a thread for each rank")
        };
        let threads: Vec<_> = (0..n).map(start).collect();
        threads.into_iter().map(|thread| thread.join().and_then(|result| result)).collect()
    });
    if let Some(rank) = alarm.panicked()
        && let Err(panic) = results.swap_remove(rank)
    {
        resume_unwind(panic);
    }
    results.into_iter().flatten().collect()
}
