//! The threads of one rank. One by default: ranks fill the cores.

use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

/// How many threads kernels of this rank may use.
#[derive(Debug)]
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
}

impl Threads {
    /// This thread alone.
    pub const ONE: Threads = Threads { pool: None };

    /// `n` threads, at most as many as there are cores.
    pub fn new(n: usize) -> Threads {
        let n = n.min(available_parallelism().map_or(1, usize::from));
        let pool = (n > 1).then(|| rayon::ThreadPoolBuilder::new().num_threads(n).build().ok()).flatten();
        Threads { pool }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Calls `work` with each part of a list. The parts, and so the results, do not depend on how many threads there
    /// are.
    pub fn for_each<T: Send>(&self, parts: Vec<T>, work: impl Fn(T) + Sync) {
        match &self.pool {
            Some(pool) if parts.len() > 1 => {
                let parts = Mutex::new(parts.into_iter());
                let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                on_each(pool, &|| {
                    while let Some(part) = next() {
                        work(part);
                    }
                });
            }
            _ => parts.into_iter().for_each(work),
        }
    }
}

/// Calls `work` on each thread. Not generic, because the code around a pool is large.
fn on_each(pool: &rayon::ThreadPool, work: &(dyn Fn() + Sync)) {
    pool.broadcast(|_| work());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_worked_on_once() {
        for threads in [Threads::ONE, Threads::new(2)] {
            let mut data = vec![0u32; 1000];
            let parts: Vec<(usize, &mut [u32])> = data.chunks_mut(64).enumerate().collect();
            threads.for_each(parts, |(i, part)| part.iter_mut().for_each(|x| *x += 1 + i as u32));
            assert!(data.chunks(64).enumerate().all(|(i, part)| part.iter().all(|x| *x == 1 + i as u32)));
        }
        assert!(Threads::new(1000).count() <= available_parallelism().map_or(1, usize::from));
    }
}
