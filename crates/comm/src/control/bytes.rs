//! Numbers, texts, lists and failures as bytes, and back: the small encoding that messages are made of.
//!
//! Numbers are little-endian; a text, a blob or a list begins with its length, 4 bytes.

use super::failure::{Exit, Failure, What};
use crate::status::Cause;

/// Bytes under construction.
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u32(&mut self, number: usize) {
        // Ranks, process ids and lengths under the limits above all fit.
        self.0.extend((number as u32).to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len());
        self.0.extend(bytes);
    }

    pub(super) fn ranks(&mut self, ranks: &[usize]) {
        self.u32(ranks.len());
        ranks.iter().for_each(|rank| self.u32(*rank));
    }

    pub(super) fn failure(&mut self, failure: &Failure) {
        self.u32(failure.rank.map_or(0, |rank| rank + 1));
        self.bytes(failure.at.as_bytes());
        let (kind, number) = match &failure.what {
            What::Ended(Exit::Code(code)) => (0, *code),
            What::Ended(Exit::Signal(signal)) => (1, *signal),
            What::Lost => (2, 0),
            What::Left => (3, 0),
            What::Aborted(_) => (4, 0),
            What::Late(_) => (5, 0),
            What::Differs(_) => (6, 0),
            What::Caused(_) => (7, 0),
        };
        self.0.push(kind);
        self.0.extend(number.to_le_bytes());
        match &failure.what {
            What::Aborted(reason) => self.bytes(reason.as_bytes()),
            What::Late(missing) => self.ranks(missing),
            What::Caused(cause) => {
                self.u32(cause.by);
                self.bytes(cause.text.as_bytes());
                self.ranks(&cause.culprits);
            }
            What::Differs(calls) => {
                self.u32(calls.len());
                for (call, site, ranks) in calls {
                    self.bytes(call.as_bytes());
                    self.bytes(site.as_bytes());
                    self.ranks(ranks);
                }
            }
            _ => {}
        }
    }
}

/// What is left of a body. Every read says none where the bytes do not suffice.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        Some(self.take(1)?[0])
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    pub(super) fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    /// A count and so many items. The list grows with the items that are there, not by the count.
    pub(super) fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()?;
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(item(self)?);
        }
        Some(list)
    }

    pub(super) fn ranks(&mut self) -> Option<Vec<usize>> {
        self.list(|fields| Some(fields.u32()? as usize))
    }

    pub(super) fn failure(&mut self) -> Option<Failure> {
        let rank = (self.u32()? as usize).checked_sub(1);
        let at = self.text()?;
        let kind = self.u8()?;
        let number = i32::from_le_bytes(self.take(4)?.try_into().ok()?);
        let what = match kind {
            0 => What::Ended(Exit::Code(number)),
            1 => What::Ended(Exit::Signal(number)),
            2 => What::Lost,
            3 => What::Left,
            4 => What::Aborted(self.text()?),
            5 => What::Late(self.ranks()?),
            6 => What::Differs(self.list(|fields| Some((fields.text()?, fields.text()?, fields.ranks()?)))?),
            7 => {
                let (by, text) = (self.u32()? as usize, self.text()?);
                What::Caused(Cause { by, text, culprits: self.ranks()? })
            }
            _ => return None,
        };
        Some(Failure { rank, what, at })
    }
}
