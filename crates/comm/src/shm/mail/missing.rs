//! What unfinished messages wait for, and the errors of those that do not match.

use std::sync::atomic::Ordering::Relaxed;

use super::rings::Outbox;
use super::{Letter, Mails};
use crate::CommError;
use crate::error::{Side, message_text};
use crate::recorder::Name;
use crate::shm::members::Members;
use crate::shm::row::{MAILS, Mail, MailWord, Row};

/// What an unfinished batch waits for.
pub(crate) struct Open {
    /// Whether receives are among it; else it has only sends.
    pub(crate) receives: bool,
    /// Tag, source line and text of the first.
    pub(crate) tag: u64,
    pub(crate) site: Name,
    pub(crate) text: Name,
    /// The members that it waits for.
    pub(crate) members: Vec<usize>,
}

impl Mails {
    /// The members that an unfinished batch waits for.
    pub(crate) fn waits_for(&self, batch: u64) -> Vec<usize> {
        let of = |letter: &Letter| letter.batch == batch;
        let receives = |m: &usize| self.inboxes[*m].receives.iter().any(of);
        let sends = |m: &usize| {
            let outbox = &self.outboxes[*m];
            outbox.sent.iter().any(|(_, letter)| of(letter)) || outbox.waiting.iter().any(of)
        };
        (0..self.inboxes.len()).filter(|m| receives(m) || sends(m)).collect()
    }

    /// What an unfinished batch waits for; the first such batch if `batch` is `None`.
    pub(crate) fn open(&self, batch: Option<u64>) -> Option<Open> {
        let of = |letter: &Letter| batch.is_none_or(|batch| letter.batch == batch);
        let receives = self.inboxes.iter().flat_map(|inbox| &inbox.receives).copied();
        let sends = self.outboxes.iter().flat_map(|outbox| {
            outbox.sent.iter().map(|(_, letter)| *letter).chain(outbox.waiting.iter().copied())
        });
        let receive = receives.filter(of).min_by_key(|letter| letter.batch);
        let letter = receive.or_else(|| sends.filter(of).min_by_key(|letter| letter.batch))?;
        let (tag, site, text) = (letter.tag, letter.site, letter.about.text);
        Some(Open { receives: receive.is_some(), tag, site, text, members: self.waits_for(letter.batch) })
    }

    /// The first message that was posted and that its receiver has not taken.
    pub(crate) fn untaken(&self) -> Option<Open> {
        let members: Vec<usize> =
            (0..self.outboxes.len()).filter(|to| self.outboxes[*to].has_untaken()).collect();
        let outbox = &self.outboxes[*members.first()?];
        let words = outbox.mail(outbox.taken_below());
        let (site, text) = Name::of_pair(words[MailWord::Site as usize].load(Relaxed));
        let tag = words[MailWord::Tag as usize].load(Relaxed);
        Some(Open { receives: false, tag, site, text, members })
    }

    /// Whether every message that was posted was taken.
    pub(crate) fn are_taken(&self) -> bool {
        !self.outboxes.iter().any(Outbox::has_untaken)
    }

    /// The error of an arrived message without a matching receive.
    pub(crate) fn unreceived(&self, members: &Members) -> Option<CommError> {
        let (from, number) = self.inboxes.iter().enumerate().find_map(|(from, inbox)| {
            let is_awaited = |number: u64| {
                let tag = inbox.mail(number)[MailWord::Tag as usize].load(Relaxed);
                inbox.receives.iter().any(|letter| letter.tag == tag)
            };
            let mut mails = inbox.next..inbox.next + MAILS;
            Some((from, mails.find(|number| inbox.has(*number) && !is_awaited(*number))?))
        })?;
        let [sender, receiver] = [from, members.me].map(|member| &members.rows[member]);
        Some(unreceived(self.inboxes[from].mail(number), sender, receiver))
    }

    /// The error of a message to a member that has left without taking it.
    pub(crate) fn refused(&self, members: &Members) -> Option<CommError> {
        let outboxes = self.outboxes.iter().enumerate();
        let mut left = outboxes.filter(|(to, outbox)| outbox.has_untaken() && members.rows[*to].has_left());
        let (to, outbox) = left.next()?;
        Some(unreceived(outbox.mail(outbox.taken_below()), members.mine(), &members.rows[to]))
    }
}

/// The error of a receive whose message differs, with both source lines.
#[cold]
pub(super) fn mismatch(
    members: &Members,
    from: usize,
    words: &Mail,
    letter: Letter,
    expected: usize,
) -> CommError {
    let get = |word: MailWord| words[word as usize].load(Relaxed);
    let side = |member: usize, what: &str, text: Name, bytes: usize, site: Name| {
        let segment = &members.rows[member].segment;
        let about = if text.is_empty() { format!("{bytes} bytes") } else { text.text(segment) };
        Side {
            rank: members.rows[member].rank,
            what: message_text(what, &about, letter.tag),
            site: site.text(segment),
        }
    };
    let (site, text) = Name::of_pair(get(MailWord::Site));
    CommError::Message {
        sides: Box::new([
            side(from, "send", text, get(MailWord::Bytes) as usize, site),
            side(members.me, "receive", letter.about.text, expected, letter.site),
        ]),
    }
}

/// The error of an unreceived mail, from its words in the sender's segment.
fn unreceived(words: &Mail, sender: &Row, receiver: &Row) -> CommError {
    let get = |word: MailWord| words[word as usize].load(Relaxed);
    let (site, text) = Name::of_pair(get(MailWord::Site));
    let what =
        if text.is_empty() { format!("{} bytes", get(MailWord::Bytes)) } else { text.text(&sender.segment) };
    let (from, to, tag, site) = (sender.rank, receiver.rank, get(MailWord::Tag), site.text(&sender.segment));
    CommError::Unreceived { from, to, tag, what, site }
}
