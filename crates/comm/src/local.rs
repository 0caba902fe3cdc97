//! Ranks as threads of one process, meeting under one lock.
//!
//! The k-th call of each rank on a group is the same call, so a rank needs nothing but its own counter to
//! find the others. A call holds what each rank brought. Once all have come, each rank sums for itself, from
//! rank 0 upwards: results are bit-equal everywhere, and the lock is never held over arithmetic, which would
//! make the deadline of one call wait for the sum of another.

use crate::CommError;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The calls that some rank has started and not every rank is done with.
    calls: BTreeMap<u64, Call>,
    /// The ranks that panicked, the first one first.
    panicked: Vec<usize>,
}

struct Call {
    /// What each rank brought.
    data: Vec<Option<Arc<Vec<f32>>>>,
    /// The first disagreement over lengths. It is kept, so that every rank reports the same one.
    mismatch: Option<CommError>,
    /// How many ranks are done with the call; the last one removes it.
    done: usize,
}

impl Shared {
    /// The state. No code panics while it holds the lock, so a poisoned lock guards a sound state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `f` on `n` ranks, each a thread, and returns what they returned, in rank order.
///
/// If a rank panics, the calls that the others wait for fail with `CommError::Panicked`, and when all ranks
/// have ended the panic that came first goes on here.
pub fn spawn<T: Send>(n: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let shared = Arc::new(Shared::default());
    let run = |rank: usize| {
        let group = Group { rank, size: n, shared: Arc::clone(&shared), next_call: Cell::new(0) };
        // Nothing of a rank's state is looked at after its panic but what the lock guards.
        catch_unwind(AssertUnwindSafe(|| f(group))).inspect_err(|_| {
            shared.lock().panicked.push(rank);
            shared.changed.notify_all();
        })
    };
    let mut results: Vec<thread::Result<T>> = thread::scope(|scope| {
        let start = |rank: usize| {
            let thread = thread::Builder::new().name(format!("rank {rank}"));
            thread.spawn_scoped(scope, move || run(rank)).expect("the machine has a thread for each rank")
        };
        let threads: Vec<_> = (0..n).map(start).collect();
        threads.into_iter().map(|thread| thread.join().and_then(|result| result)).collect()
    });
    let first = shared.lock().panicked.first().copied();
    if let Some(rank) = first
        && let Err(panic) = results.swap_remove(rank)
    {
        resume_unwind(panic);
    }
    results.into_iter().flatten().collect()
}

/// A rank's place among the ranks that communicate. It is not `Sync`: its calls have an order.
pub struct Group {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
    next_call: Cell<u64>,
}

impl Group {
    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Starts to sum the data of all ranks element by element. It does not wait for the other ranks; any
    /// number of calls may be in flight, and they may be waited for in any order.
    pub fn all_reduce_start(&self, data: Vec<f32>) -> Pending {
        let call = self.next_call.replace(self.next_call.get() + 1);
        let mut state = self.shared.lock();
        let new = || Call { data: vec![None; self.size], mismatch: None, done: 0 };
        let entry = state.calls.entry(call).or_insert_with(new);
        // Without a mismatch so far, all who came agree: comparing with the first compares with all.
        if let Some(length) = entry.data.iter().flatten().next().map(|first| first.len())
            && length != data.len()
        {
            let came = (0..self.size).filter(|rank| entry.data[*rank].is_some());
            let (ranks, other) = (came.collect(), (self.rank, data.len()));
            entry.mismatch.get_or_insert(CommError::Lengths { call, ranks, length, other });
        }
        entry.data[self.rank] = Some(Arc::new(data));
        drop(state);
        self.shared.changed.notify_all();
        Pending { call, shared: Arc::clone(&self.shared) }
    }
}

/// A sum that is under way. Dropping it gives up this rank's result and nobody else's.
#[must_use = "a sum is read by waiting for it"]
pub struct Pending {
    call: u64,
    shared: Arc<Shared>,
}

impl Pending {
    /// The sum, once every rank has brought its part. It waits no longer than the deadline from now; a rank
    /// that panicked, or lengths that differ, end it at once.
    pub fn wait(self, deadline: Duration) -> Result<Vec<f32>, CommError> {
        let start = Instant::now();
        let mut state = self.shared.lock();
        loop {
            // The call is there: it is removed by the last rank's drop, and this rank's is still to come.
            let entry = &state.calls[&self.call];
            if let Some(mismatch) = &entry.mismatch {
                return Err(mismatch.clone());
            }
            let missing: Vec<usize> = (0..entry.data.len()).filter(|r| entry.data[*r].is_none()).collect();
            if missing.is_empty() {
                let parts: Vec<Arc<Vec<f32>>> = entry.data.iter().flatten().cloned().collect();
                drop(state);
                // The sum begins with rank 0's elements and not with zeros, which would lose a -0.
                let mut sum = parts[0].to_vec();
                for part in &parts[1..] {
                    sum.iter_mut().zip(part.iter()).for_each(|(sum, x)| *sum += x);
                }
                return Ok(sum);
            }
            if let Some(rank) = state.panicked.first() {
                return Err(CommError::Panicked { call: self.call, rank: *rank });
            }
            let Some(left) = deadline.checked_sub(start.elapsed()) else {
                return Err(CommError::Deadline { call: self.call, missing });
            };
            let woken = self.shared.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let Some(entry) = state.calls.get_mut(&self.call) else { return };
        entry.done += 1;
        if entry.done == entry.data.len() {
            state.calls.remove(&self.call);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn sums_in_rank_order_on_every_rank() {
        // From the left, 1e8 swallows the 1 and -1e8 then leaves 0; from the right, the 1 would survive.
        let brought = [1e8, 1.0, -1e8, 0.5, 0.25];
        for (n, expected) in [(1, 1e8), (2, 1e8), (3, 0.0), (5, 0.75f32)] {
            let sums = spawn(n, |group| {
                assert_eq!(group.size(), n);
                let sum = group.all_reduce_start(vec![brought[group.rank()], -0.0]).wait(LONG).unwrap();
                [sum[0].to_bits(), sum[1].to_bits()]
            });
            assert_eq!(sums, vec![[expected.to_bits(), (-0f32).to_bits()]; n]);
        }
        assert!(spawn(0, |group| group.rank()).is_empty());
    }

    #[test]
    fn many_calls_in_flight_are_waited_for_in_reverse() {
        let barrier = Barrier::new(3);
        let sums = spawn(3, |group| {
            let start = |call| group.all_reduce_start(vec![(10 * call + group.rank()) as f32; call]);
            let pending: Vec<Pending> = (0..4).map(start).collect();
            drop(start(9));
            let sums: Vec<_> = pending.into_iter().rev().map(|p| p.wait(LONG).unwrap()).collect();
            barrier.wait();
            assert!(group.shared.lock().calls.is_empty(), "every call was removed, the dropped one too");
            sums
        });
        assert_eq!(sums, vec![[vec![93.0; 3], vec![63.0; 2], vec![33.0], vec![]]; 3]);
    }

    #[test]
    fn different_lengths_are_an_error_on_every_rank() {
        let two_came = Barrier::new(3);
        let errors = spawn(3, |group| {
            let early = (group.rank() != 1).then(|| group.all_reduce_start(vec![1.0; 3]));
            two_came.wait();
            early.unwrap_or_else(|| group.all_reduce_start(vec![1.0; 4])).wait(LONG).unwrap_err()
        });
        let start = "all_reduce: call 0: expected equal lengths, got 3 on ranks 0,2 and 4 on rank 1\n";
        assert!(errors.iter().all(|error| error.to_string().starts_with(start)), "{errors:?}");
    }

    #[test]
    fn a_missing_rank_ends_the_wait_at_the_deadline() {
        let errors = spawn(3, |group| {
            group.all_reduce_start(vec![1.0]).wait(LONG).unwrap();
            (group.rank() == 1).then(|| group.all_reduce_start(vec![1.0]).wait(Duration::from_millis(20)))
        });
        let error = CommError::Deadline { call: 1, missing: vec![0, 2] };
        let start = "all_reduce: call 1: the deadline passed; missing: ranks 0,2\n";
        assert!(error.to_string().starts_with(start));
        assert_eq!(errors, [None, Some(Err(error)), None]);
    }

    #[test]
    fn a_panic_ends_the_other_waits_and_goes_on_after_them() {
        let (errors, all_came) = (Mutex::new(Vec::new()), Barrier::new(3));
        let run = |group: Group| {
            let complete = group.all_reduce_start(vec![1.0]);
            all_came.wait();
            assert_ne!(group.rank(), 1, "rank 1 gives up");
            let error = group.all_reduce_start(vec![1.0]).wait(LONG).unwrap_err();
            errors.lock().unwrap().push((complete.wait(LONG), error));
            panic!("rank {} fails too, but later", group.rank());
        };
        let panic = catch_unwind(AssertUnwindSafe(|| spawn(3, run))).unwrap_err();
        assert!(panic.downcast_ref::<String>().unwrap().contains("rank 1 gives up"));
        // The call that all ranks had made is not lost.
        let expected = (Ok(vec![3.0]), CommError::Panicked { call: 1, rank: 1 });
        assert_eq!(errors.into_inner().unwrap(), [expected.clone(), expected]);
    }
}
