//! Value ids and tables keyed by them.
//!
//! A value is named by a number, and the number is how the text spells it (`v12`), so a dump, an error and
//! a debugger all speak of the same thing. Ids rather than references: a program is edited by passes, and
//! ids survive that, compare in one instruction and cost four bytes.
//!
//! Passes leave gaps in the numbering, and text may name any number, so tables are paged: a gap costs a
//! null pointer per 256 values, and `v60000000` alone in a file does not take a gigabyte.

use std::fmt;

/// A value of a function: a parameter, or a result of a node. Prints as `v12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(pub u32);

impl Value {
    /// One more than the largest number a value may have.
    pub const LIMIT: u32 = 1 << 26;
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

const PAGE: usize = 256;

/// A table keyed by value, for numbers that may have gaps.
#[derive(Clone, Debug)]
pub struct ValueMap<T> {
    pages: Vec<Option<Box<[Option<T>]>>>,
}

impl<T> Default for ValueMap<T> {
    fn default() -> ValueMap<T> {
        ValueMap { pages: Vec::new() }
    }
}

impl<T> ValueMap<T> {
    /// What is stored for a value.
    pub fn get(&self, value: Value) -> Option<&T> {
        let at = value.0 as usize;
        self.pages.get(at / PAGE)?.as_ref()?[at % PAGE].as_ref()
    }

    /// What is stored for a value, to be changed.
    pub fn get_mut(&mut self, value: Value) -> Option<&mut T> {
        let at = value.0 as usize;
        self.pages.get_mut(at / PAGE)?.as_mut()?[at % PAGE].as_mut()
    }

    /// Stores, and returns what was there.
    pub fn insert(&mut self, value: Value, item: T) -> Option<T> {
        let at = value.0 as usize;
        if self.pages.len() <= at / PAGE {
            self.pages.resize_with(at / PAGE + 1, || None);
        }
        let page = self.pages[at / PAGE].get_or_insert_with(|| (0..PAGE).map(|_| None).collect());
        page[at % PAGE].replace(item)
    }

    /// Takes out what is stored for a value.
    pub fn remove(&mut self, value: Value) -> Option<T> {
        let at = value.0 as usize;
        self.pages.get_mut(at / PAGE)?.as_mut()?[at % PAGE].take()
    }

    /// All entries, by rising number.
    pub fn iter(&self) -> impl Iterator<Item = (Value, &T)> {
        self.pages.iter().enumerate().flat_map(|(p, page)| {
            let items = page.iter().flat_map(|page| page.iter());
            items
                .enumerate()
                .filter_map(move |(i, item)| Some((Value((p * PAGE + i) as u32), item.as_ref()?)))
        })
    }

    /// One more than the largest number stored.
    pub fn end(&self) -> u32 {
        let last = self.pages.iter().enumerate().rev().find_map(|(p, page)| {
            let at = page.as_ref()?.iter().rposition(Option::is_some)?;
            Some((p * PAGE + at + 1) as u32)
        });
        last.unwrap_or(0)
    }
}

impl<T: PartialEq> PartialEq for ValueMap<T> {
    fn eq(&self, other: &ValueMap<T>) -> bool {
        self.iter().eq(other.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_cheap_and_ends_are_found() {
        let mut map = ValueMap::default();
        assert_eq!(map.end(), 0);
        assert_eq!(map.insert(Value(Value::LIMIT - 1), 'a'), None);
        assert_eq!(map.insert(Value(3), 'b'), None);
        assert_eq!(map.insert(Value(3), 'c'), Some('b'));
        assert_eq!(
            map.iter().map(|(v, c)| (v.0, *c)).collect::<Vec<_>>(),
            [(3, 'c'), (Value::LIMIT - 1, 'a')]
        );
        assert_eq!(map.end(), Value::LIMIT);
        assert_eq!(map.remove(Value(Value::LIMIT - 1)), Some('a'));
        assert_eq!(map.end(), 4);
        assert_eq!(map.get(Value(4)), None);
    }
}
