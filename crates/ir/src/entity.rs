//! Value ids and tables keyed by them.
//!
//! A value is named by a number, and the number is how the text spells it (`v12`), so a dump, an error and
//! a debugger all speak of the same thing. Ids rather than references: a program is edited by passes, and
//! ids survive that, compare in one instruction and cost four bytes.
//!
//! Passes leave gaps in the numbering, and text may name any number, so tables are pages of pages, made where
//! something is stored: a gap costs a null pointer per 65,536 values, so a file of many functions that all use
//! `v60000000` takes little memory for each.

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

/// The values of one page.
type Page<T> = Box<[Option<T>]>;
/// `PAGE` pages, those that exist.
type Run<T> = Box<[Option<Page<T>>]>;

/// A table keyed by value, for numbers that may have gaps.
#[derive(Clone, Debug)]
pub struct ValueMap<T> {
    runs: Vec<Option<Run<T>>>,
}

/// The indices of a value: run, page in the run, slot in the page.
fn place(value: Value) -> (usize, usize, usize) {
    let at = value.0 as usize;
    (at / (PAGE * PAGE), at / PAGE % PAGE, at % PAGE)
}

/// An empty run or page.
fn empty<T>() -> Box<[Option<T>]> {
    (0..PAGE).map(|_| None).collect()
}

impl<T> Default for ValueMap<T> {
    fn default() -> ValueMap<T> {
        ValueMap { runs: Vec::new() }
    }
}

impl<T> ValueMap<T> {
    /// The entry of a value.
    pub fn get(&self, value: Value) -> Option<&T> {
        let (run, page, at) = place(value);
        self.runs.get(run)?.as_ref()?[page].as_ref()?[at].as_ref()
    }

    /// The entry of a value, mutable.
    pub fn get_mut(&mut self, value: Value) -> Option<&mut T> {
        let (run, page, at) = place(value);
        self.runs.get_mut(run)?.as_mut()?[page].as_mut()?[at].as_mut()
    }

    /// Stores an entry and returns the previous one.
    pub fn insert(&mut self, value: Value, item: T) -> Option<T> {
        let (run, page, at) = place(value);
        if self.runs.len() <= run {
            self.runs.resize_with(run + 1, || None);
        }
        let page = self.runs[run].get_or_insert_with(empty)[page].get_or_insert_with(empty);
        page[at].replace(item)
    }

    /// Removes and returns the entry of a value.
    pub fn remove(&mut self, value: Value) -> Option<T> {
        let (run, page, at) = place(value);
        self.runs.get_mut(run)?.as_mut()?[page].as_mut()?[at].take()
    }

    /// The pages that exist, in ascending order, each with its first number.
    fn pages(&self) -> impl DoubleEndedIterator<Item = (usize, &Page<T>)> {
        let runs = self.runs.iter().enumerate().filter_map(|(r, run)| Some((r, run.as_ref()?)));
        runs.flat_map(|(r, run)| {
            let pages = run.iter().enumerate();
            pages.filter_map(move |(p, page)| Some(((r * PAGE + p) * PAGE, page.as_ref()?)))
        })
    }

    /// All entries, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (Value, &T)> {
        self.pages().flat_map(|(first, page)| {
            let items = page.iter().enumerate();
            items.filter_map(move |(i, item)| Some((Value((first + i) as u32), item.as_ref()?)))
        })
    }

    /// One more than the largest number stored.
    pub fn end(&self) -> u32 {
        let last = self
            .pages()
            .rev()
            .find_map(|(first, page)| Some((first + page.iter().rposition(Option::is_some)? + 1) as u32));
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

    #[test]
    fn one_large_number_takes_a_few_kilobytes() {
        let mut map = ValueMap::default();
        map.insert(Value(Value::LIMIT - 1), 0u64);
        let page = PAGE * size_of::<Option<u64>>();
        let run = PAGE * size_of::<Option<Page<u64>>>();
        let runs = map.runs.len() * size_of::<Option<Run<u64>>>();
        assert!(page + run + runs < 32 << 10, "{page} {run} {runs}");
    }
}
