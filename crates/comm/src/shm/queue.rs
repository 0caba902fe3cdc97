//! Operations in flight, in order: added at the end, removed at the beginning. Entries are reused, so that a call is
//! constructed in place and never moved.

/// An operation in flight.
pub(crate) trait Reusable: Default {
    /// Drops what nobody took, when it is over.
    fn empty(&mut self);
}

/// Entries from `begin` to `end` are in flight; the others are free for reuse.
#[derive(Default)]
pub(crate) struct Queue<T> {
    places: Vec<T>,
    begin: usize,
    end: usize,
}

impl<T: Reusable> Queue<T> {
    #[inline]
    pub(crate) fn all(&self) -> &[T] {
        &self.places[self.begin..self.end]
    }

    #[inline]
    pub(crate) fn all_mut(&mut self) -> &mut [T] {
        &mut self.places[self.begin..self.end]
    }

    /// The last one.
    #[inline]
    pub(crate) fn last(&mut self) -> Option<&mut T> {
        if self.begin < self.end { self.places.get_mut(self.end - 1) } else { None }
    }

    /// The entry of one more, with its previous contents.
    #[inline]
    pub(crate) fn take_on(&mut self) -> &mut T {
        if self.end == self.places.len() {
            self.make_room();
        }
        self.end += 1;
        &mut self.places[self.end - 1]
    }

    #[cold]
    fn make_room(&mut self) {
        if self.begin > self.places.len() / 2 {
            self.places.rotate_left(self.begin);
            (self.begin, self.end) = (0, self.end - self.begin);
        } else {
            self.places.push(T::default());
        }
    }

    /// The first one.
    #[inline]
    pub(crate) fn first(&self) -> Option<&T> {
        if self.begin < self.end { self.places.get(self.begin) } else { None }
    }

    /// Takes the first one out.
    pub(crate) fn take_first(&mut self) -> T {
        let first = std::mem::take(&mut self.places[self.begin]);
        self.forget_first();
        first
    }

    /// Removes the first one. What nobody took of it is freed now, not when its entry is reused.
    #[inline]
    pub(crate) fn forget_first(&mut self) {
        self.places[self.begin].empty();
        self.begin += 1;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::call::Call;

    #[test]
    fn calls_come_and_go_in_order() {
        let (mut queue, mut first, mut next) = (Queue::<Call>::default(), 0, 0u64);
        for round in 0..1000u64 {
            for _ in 0..round % 7 {
                queue.take_on().number = next;
                next += 1;
            }
            let count = queue.all().len().min((round % 5) as usize);
            queue.all_mut().iter_mut().for_each(|call| call.more = Some(Box::default()));
            (0..count).for_each(|_| queue.forget_first());
            assert!(queue.places[..queue.begin].iter().all(|call| call.more.is_none()));
            first += count as u64;
            let numbers: Vec<u64> = queue.all().iter().map(|call| call.number).collect();
            assert_eq!(numbers, (first..next).collect::<Vec<_>>(), "round {round}");
        }
        assert!(queue.places.len() < 2 * queue.all().len() + 8, "places are used again");
    }
}
