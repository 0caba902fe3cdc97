//! A thread that advances large reductions while the rank's own thread computes.
//!
//! All other operations need nothing more from this member once published. A large reduction can be advanced by either
//! thread, whichever comes first.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::shm::alarm::Alarm;
use crate::shm::algorithms::two_phase::LargeReduction;
use crate::shm::members::Members;

type Shared = Arc<Mutex<LargeReduction>>;

/// How long it polls a word before it sleeps: it has a core to itself.
const SPIN: Duration = Duration::from_micros(50);
/// The longest sleep.
const TURN: Duration = Duration::from_millis(2);

/// A rank's progress thread. Dropping it ends the thread.
pub(crate) struct ProgressThread {
    reductions: Option<Sender<Shared>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ProgressThread {
    /// `None` if the system cannot start a thread.
    pub(crate) fn start(members: &Members, alarm: &Arc<Alarm>) -> Option<ProgressThread> {
        let (reductions, inbox) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (members, alarm, stopped) = (members.clone(), Arc::clone(alarm), Arc::clone(&stop));
        let thread = thread::Builder::new().name("consort progress".into());
        let thread = thread.spawn(move || run(&inbox, &members, &alarm, &stopped)).ok()?;
        Some(ProgressThread { reductions: Some(reductions), stop, thread: Some(thread) })
    }

    /// Gives it a reduction. The rank's own thread may advance it as well.
    pub(crate) fn take_on(&self, reduction: &Shared) {
        if let Some(reductions) = &self.reductions {
            let _ = reductions.send(Arc::clone(reduction));
        }
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.stop.store(true, Release);
        self.reductions = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(inbox: &Receiver<Shared>, members: &Members, alarm: &Alarm, stop: &AtomicBool) {
    let mut reductions: Vec<Shared> = Vec::new();
    while !stop.load(Acquire) {
        if reductions.is_empty() {
            match inbox.recv() {
                Ok(reduction) => reductions.push(reduction),
                Err(_) => return,
            }
        }
        reductions.extend(inbox.try_iter());
        let before = reductions.len();
        // The rank's own thread finds a mismatch too, and reports it.
        reductions.retain(|reduction| match reduction.try_lock() {
            Ok(mut reduction) => reduction.step(members) == Ok(false),
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(_)) => false,
        });
        if reductions.len() < before {
            // A waiter that sleeps until a reduction is finished sleeps on one of the rows.
            members.rows.iter().for_each(|row| row.ring());
        }
        if alarm.failure().is_some() || members.rows.iter().any(|row| row.stopped().is_some()) {
            reductions.clear();
        }
        if let Some(reduction) = reductions.first() {
            rest(reduction, members, stop);
        }
    }
}

/// Polls the word that a reduction waits for, then sleeps until it may have changed.
fn rest(reduction: &Shared, members: &Members, stop: &AtomicBool) {
    let Some((member, word, seen)) =
        reduction.try_lock().ok().and_then(|reduction| reduction.awaits(members))
    else {
        return;
    };
    let start = Instant::now();
    while start.elapsed() < SPIN {
        if word.load(Relaxed) != seen || stop.load(Relaxed) {
            return;
        }
        std::hint::spin_loop();
    }
    members.rows[member].sleep(start + TURN, || word.load(Relaxed) != seen || stop.load(Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use crate::{CommError, spawn_with_heap};
    use consort_types::{Dtype, Reduce};

    #[test]
    fn a_reduction_goes_on_while_its_rank_does_something_else() {
        spawn_with_heap(3, 64 << 20, |group| {
            group.force_progress_threads();
            assert!(group.start_progress_thread());
            let until = Instant::now() + Duration::from_secs(20);
            for round in 0..20 {
                let count = 50_000 + round * 997;
                let bytes: Vec<u8> =
                    (0..count).flat_map(|i| ((group.rank() + i + round) as i64).to_le_bytes()).collect();
                let buffer = group.heap().alloc_from(&bytes).expect("there is room");
                let pending = group.all_reduce(buffer, Dtype::I64, Reduce::Sum).expect("it starts");
                // One member waits at once; the others only check what their progress threads have published.
                if group.rank() != round % 3 {
                    while group.shm().unwrap().members.ready(group.rank(), round as u64) == 0 {
                        assert!(Instant::now() < until, "nobody made it go on");
                        thread::yield_now();
                    }
                }
                let got = pending.wait(until).expect("it ends");
                let want = |i: usize| (0..3).map(|rank| (rank + i + round) as i64).sum::<i64>();
                let bytes = got[0].bytes().expect("it is over");
                let sums = bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8")));
                assert!(sums.enumerate().all(|(i, sum)| sum == want(i)), "round {round}");
            }
        });
    }

    #[test]
    fn after_a_deadline_nothing_writes_to_the_callers_buffer() {
        let step = AtomicUsize::new(0);
        spawn_with_heap(2, 64 << 20, |group| {
            group.force_progress_threads();
            assert!(group.start_progress_thread());
            let len = 8 << 20;
            let buffer = group.heap().alloc_from(&vec![1u8; len]).expect("it is there");
            if group.rank() == 0 {
                let pending = group.all_reduce(buffer.clone(), Dtype::I32, Reduce::Sum).expect("it is there");
                let error = pending
                    .wait(Instant::now() + Duration::from_millis(100))
                    .map(drop)
                    .expect_err("the other does not come");
                assert!(matches!(error, CommError::Deadline { .. }), "{error}");
                let view = buffer.bytes().expect("nothing is in flight any more");
                step.store(1, SeqCst);
                while step.load(SeqCst) == 1 {
                    std::thread::yield_now();
                }
                assert!(view.iter().all(|byte| *byte == 1));
            } else {
                while step.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
                let outcome = group
                    .all_reduce(buffer, Dtype::I32, Reduce::Sum)
                    .and_then(|p| p.wait(Instant::now() + Duration::from_secs(20)));
                assert!(outcome.is_err());
                // Time for a thread that would still write.
                std::thread::sleep(Duration::from_millis(200));
                step.store(2, SeqCst);
            }
        });
    }
}
