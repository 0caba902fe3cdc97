//! A list that mostly holds no element or one. Testing for empty is one comparison, and the first element is stored
//! inline.

/// An unordered list.
pub struct SmallList<T> {
    first: Option<T>,
    /// Empty if there is no first.
    rest: Vec<T>,
}

impl<T> Default for SmallList<T> {
    fn default() -> SmallList<T> {
        SmallList { first: None, rest: Vec::new() }
    }
}

impl<T> SmallList<T> {
    /// Whether it is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    /// The element that was added first, as long as none was removed.
    pub fn first(&self) -> Option<&T> {
        self.first.as_ref()
    }

    /// All elements.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.rest)
    }

    /// All elements, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.first.iter_mut().chain(&mut self.rest)
    }

    /// Whether the predicate holds for any element.
    #[inline]
    pub fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        match &self.first {
            None => false,
            Some(first) => is(first) || self.rest.iter().any(is),
        }
    }

    /// Adds an element.
    #[inline]
    pub fn push(&mut self, one: T) {
        match &self.first {
            None => self.first = Some(one),
            Some(_) => self.rest.push(one),
        }
    }

    /// Removes an element for which the predicate holds.
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
        // The first is removed, and another takes its place.
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
