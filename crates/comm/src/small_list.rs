//! A list that mostly holds nothing or one thing. To ask whether it is empty is one comparison, and what it holds first
//! lies in it.

/// Things in no order.
pub struct SmallList<T> {
    first: Option<T>,
    /// Empty where there is no first.
    rest: Vec<T>,
}

impl<T> Default for SmallList<T> {
    fn default() -> SmallList<T> {
        SmallList { first: None, rest: Vec::new() }
    }
}

impl<T> SmallList<T> {
    /// Whether it holds nothing.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// How many it holds.
    pub fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    /// The one that came first, as long as none was taken out.
    pub fn first(&self) -> Option<&T> {
        self.first.as_ref()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.rest)
    }

    /// All of them, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.first.iter_mut().chain(&mut self.rest)
    }

    /// Whether something holds for one of them.
    #[inline]
    pub fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        match &self.first {
            None => false,
            Some(first) => is(first) || self.rest.iter().any(is),
        }
    }

    /// Puts one in.
    #[inline]
    pub fn push(&mut self, one: T) {
        match &self.first {
            None => self.first = Some(one),
            Some(_) => self.rest.push(one),
        }
    }

    /// Takes one out for which something holds.
    #[inline]
    pub fn take(&mut self, is: impl Fn(&T) -> bool) -> Option<T> {
        if is(self.first.as_ref()?) {
            return std::mem::replace(&mut self.first, self.rest.pop());
        }
        let at = self.rest.iter().position(is)?;
        Some(self.rest.swap_remove(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_is_taken_out_once() {
        let mut few = SmallList::default();
        assert!(few.is_empty() && few.take(|_| true).is_none() && !few.any(|_| true));
        (0..5).for_each(|i| few.push(i));
        assert!(few.len() == 5 && few.any(|i| *i == 4) && !few.any(|i| *i == 5));
        assert_eq!(few.take(|i| *i == 3), Some(3));
        assert_eq!(few.take(|i| *i == 3), None);
        // The first goes, and another takes its place.
        assert_eq!(few.take(|i| *i == 0), Some(0));
        assert!(!few.is_empty() && few.first().is_some());
        few.iter_mut().for_each(|i| *i += 10);
        let mut left: Vec<i32> = few.iter().copied().collect();
        left.sort_unstable();
        assert_eq!(left, [11, 12, 14]);
        while few.take(|_| true).is_some() {}
        assert!(few.is_empty());
    }
}
