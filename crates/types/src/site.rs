//! A line of the user's source.

use std::collections::BTreeSet;
use std::fmt;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

/// A line of the user's source. Names of files are interned, so that it is copied for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    file: &'static str,
    line: u32,
}

impl Site {
    /// A source line. White space in the file's name becomes `_`, so that the text reads back.
    pub fn new(file: &str, line: u32) -> Site {
        let plain: String = file.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        Site { file: interned(&plain), line }
    }

    /// Reads `FILE:LINE`; anything else is not a source line.
    pub fn parse(text: &str) -> Option<Site> {
        let (file, line) = text.rsplit_once(':')?;
        let number: u32 = line.parse().ok()?;
        let reads_back = !file.is_empty() && file.chars().all(is_plain) && number.to_string() == line;
        reads_back.then(|| Site { file: interned(file), line: number })
    }

    /// The file.
    pub fn file(&self) -> &'static str {
        self.file
    }

    /// The line, counted from 1.
    pub fn line(&self) -> u32 {
        self.line
    }
}

impl From<&'static Location<'static>> for Site {
    fn from(location: &'static Location<'static>) -> Site {
        match location.file().chars().all(is_plain) {
            true => Site { file: location.file(), line: location.line() },
            false => Site::new(location.file(), location.line()),
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

fn is_plain(c: char) -> bool {
    !c.is_whitespace() && !c.is_control()
}

/// The one copy of a file's name. It is never freed: programs have many source lines and few files.
fn interned(file: &str) -> &'static str {
    static FILES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    match files.get(file) {
        Some(known) => known,
        None => {
            let file: &'static str = Box::leak(file.into());
            files.insert(file);
            file
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back_and_files_are_kept_once() {
        let site = Site::new("a b/c.rs", 12);
        assert_eq!((site.to_string().as_str(), site.file(), site.line()), ("a_b/c.rs:12", "a_b/c.rs", 12));
        assert_eq!(Site::parse(&site.to_string()), Some(site));
        assert!(std::ptr::eq(site.file(), Site::new("a b/c.rs", 13).file()));
        for odd in ["", "c.rs", ":1", "c.rs:", "c.rs:01", "c.rs:-1", "a b.rs:1", "c.rs:4294967296"] {
            assert_eq!(Site::parse(odd), None, "{odd}");
        }
        let here = Location::caller();
        assert_eq!(Site::from(here).to_string(), format!("{}:{}", here.file(), here.line()));
    }
}
