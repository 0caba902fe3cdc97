//! Ranks as threads of one process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use consort_types::Failure;

use crate::cores::{self, Cores};
use crate::deadline::DEFAULT_DEADLINE;
use crate::group::Group;
use crate::launch::MAX_RANKS;
use crate::limits::way_out;
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
    try_spawn(n, heap, f).expect("the machine has room for the heap of each rank")
}

/// The same; fails, and runs nothing, if there are too many ranks or the machine does not have as much memory.
pub fn try_spawn<T: Send>(
    n: usize,
    heap: usize,
    f: impl Fn(Group) -> T + Sync,
) -> Result<Vec<T>, Box<Failure>> {
    if n > MAX_RANKS {
        return Err(Failure::new((format!("at most {MAX_RANKS} ranks"), n.to_string())));
    }
    let room = heap.saturating_add(reserved(n));
    let segment = |_| match Segment::private(room) {
        Ok(segment) => Ok(Arc::new(segment)),
        Err(error) => Err(Failure::new(format!("a heap of {heap} bytes for each of {n} ranks: {error}"))
            .note(way_out(&error))),
    };
    let segments = (0..n).map(segment).collect::<Result<Vec<Arc<Segment>>, _>>()?;
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
    Ok(results.into_iter().flatten().collect())
}
