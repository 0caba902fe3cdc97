//! Calls in flight, in order: taken on at the end, forgotten at the beginning. Their places are used again, so that a
//! call is filled in where it stays and never moved.

use crate::call::Call;

/// The calls from `begin` to `end` are in flight; the others are places to use again.
#[derive(Default)]
pub(crate) struct Queue {
    calls: Vec<Call>,
    begin: usize,
    end: usize,
}

impl Queue {
    pub(crate) fn all(&self) -> &[Call] {
        &self.calls[self.begin..self.end]
    }

    pub(crate) fn all_mut(&mut self) -> &mut [Call] {
        &mut self.calls[self.begin..self.end]
    }

    /// The place of one more, with whatever was there before.
    #[inline]
    pub(crate) fn take_on(&mut self) -> &mut Call {
        if self.end == self.calls.len() {
            self.make_room();
        }
        self.end += 1;
        &mut self.calls[self.end - 1]
    }

    fn make_room(&mut self) {
        if self.begin > self.calls.len() / 2 {
            self.calls.rotate_left(self.begin);
            (self.begin, self.end) = (0, self.end - self.begin);
        } else {
            self.calls.push(Call::default());
        }
    }

    /// Forgets so many at the beginning. What nobody took of them is freed now, not when their places are used again.
    pub(crate) fn forget(&mut self, count: usize) {
        self.calls[self.begin..self.begin + count].iter_mut().for_each(Call::empty);
        self.begin += count;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_come_and_go_in_order() {
        let (mut queue, mut first, mut next) = (Queue::default(), 0, 0u64);
        for round in 0..1000u64 {
            for _ in 0..round % 7 {
                queue.take_on().number = next;
                next += 1;
            }
            let count = queue.all().len().min((round % 5) as usize);
            queue.all_mut().iter_mut().for_each(|call| call.more = Some(Box::default()));
            queue.forget(count);
            assert!(queue.calls[..queue.begin].iter().all(|call| call.more.is_none()));
            first += count as u64;
            let numbers: Vec<u64> = queue.all().iter().map(|call| call.number).collect();
            assert_eq!(numbers, (first..next).collect::<Vec<_>>(), "round {round}");
        }
        assert!(queue.calls.len() < 2 * queue.all().len() + 8, "places are used again");
    }
}
