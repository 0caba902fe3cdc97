//! The joint check: all ranks' communication, checked together before anything runs.
//!
//! What a rank starts and waits for is a finite list, its [`Script`]. Ranks may have different programs (roles); their
//! scripts must fit together:
//!
//! - **J1** Every send meets a receive of the same tag, element type and shape, and the reverse.
//! - **J2** Every member of a group makes the same calls on it in the same order.
//! - **J3** No rank waits in a circle: some order of steps completes every wait.
//!
//! Matching needs no timing: calls on a group match by their number, messages by sender, receiver and tag, in order. A start
//! never blocks, a wait blocks until all that its start takes part in has been started by all partners, so one simulation
//! finds whether the waits can end. Sends count as unfinished until they are received, as in strict mode. Time is linear in
//! the length of all scripts.
//!
//! Does not: decide conditions. Communication under a `cond` whose blocks differ in it, or inside a `while`, has no script,
//! and neither has a message whose peer or tag comes from data ([`Script::of`] fails and names the line).

mod script;
mod text;

use std::collections::{BTreeMap, VecDeque};

use consort_types::{Failure, ranks_text};

/// What a rank starts and waits for, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// The rank.
    pub rank: u32,
    /// The groups that its events name: their text, and their ranks.
    pub groups: Vec<(String, Vec<u32>)>,
    /// The events, in order.
    pub events: Vec<Event>,
}

/// One step of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happens.
    pub action: Action,
    /// The user's source line; empty if it is not known.
    pub site: String,
}

/// What happens at a step of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Starts a collective.
    Collective {
        /// The number of its group in [`Script::groups`].
        group: u32,
        /// All that must be equal on the members.
        call: String,
    },
    /// Starts messages.
    Exchange {
        /// The number of their group in [`Script::groups`].
        group: u32,
        /// What is sent.
        sends: Vec<MessageEnd>,
        /// What is received.
        receives: Vec<MessageEnd>,
    },
    /// Waits for the start at this position among the events.
    Wait(u32),
}

/// One end of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageEnd {
    /// The rank at the other end.
    pub peer: u32,
    /// The tag.
    pub tag: i64,
    /// Element type and shape; a size that is not known yet is `?`.
    pub kind: String,
}

/// Checks that the scripts of all ranks fit together. The error is the same wherever it is computed.
pub fn check(scripts: &[Script]) -> Result<(), Box<Failure>> {
    let joint = Joint { scripts };
    let mut meetings = Meetings::default();
    joint.match_collectives(&mut meetings)?;
    joint.match_messages(&mut meetings)?;
    joint.simulate(meetings)
}

/// A start: which script, which event.
type Start = (usize, usize);

/// The scripts of all ranks, checked together.
struct Joint<'a> {
    scripts: &'a [Script],
}

/// What several starts take part in: one call of a group, or one message.
#[derive(Default)]
struct Meetings {
    /// How many starts are still missing.
    missing: Vec<usize>,
    /// The meetings of each start.
    of: BTreeMap<Start, Vec<usize>>,
    /// For each meeting, the starts that take part.
    starts: Vec<Vec<Start>>,
}

impl Meetings {
    fn add(&mut self, starts: Vec<Start>) {
        let number = self.missing.len();
        for start in &starts {
            self.of.entry(*start).or_default().push(number);
        }
        self.missing.push(starts.len());
        self.starts.push(starts);
    }
}

/// The calls that each rank makes on a group: position in its script, the call.
type Calls<'a> = BTreeMap<u32, Vec<(Start, &'a str)>>;

/// A group, a sender, a receiver and a tag.
type Channel<'a> = (&'a (String, Vec<u32>), u32, u32, i64);

/// The ends of the messages of one sender, receiver and tag: those sent, those received.
type Ends<'a> = [Vec<(Start, &'a MessageEnd)>; 2];

impl<'a> Joint<'a> {
    fn event(&self, (script, event): Start) -> &'a Event {
        &self.scripts[script].events[event]
    }

    /// `rank 0 at model.rs:7`.
    fn who(&self, start: Start) -> String {
        let rank = self.scripts[start.0].rank;
        match &self.event(start).site[..] {
            "" => format!("rank {rank}"),
            site => format!("rank {rank} at {site}"),
        }
    }

    /// All events with their positions.
    fn events(&self) -> impl Iterator<Item = (Start, &'a Script, &'a Event)> {
        self.scripts.iter().enumerate().flat_map(|(at, script)| {
            script.events.iter().enumerate().map(move |(number, event)| ((at, number), script, event))
        })
    }

    /// (J2)
    fn match_collectives(&self, meetings: &mut Meetings) -> Result<(), Box<Failure>> {
        let mut groups: BTreeMap<&(String, Vec<u32>), Calls<'a>> = BTreeMap::new();
        for (start, script, event) in self.events() {
            if let Action::Collective { group, call } = &event.action
                && let Some(group) = script.groups.get(*group as usize)
            {
                groups.entry(group).or_default().entry(script.rank).or_default().push((start, call));
            }
        }
        for ((name, ranks), calls) in groups {
            let none = Vec::new();
            let of = |rank: &u32| calls.get(rank).unwrap_or(&none);
            let longest = ranks.iter().map(|rank| of(rank).len()).max().unwrap_or(0);
            for number in 0..longest {
                let made: Vec<Option<&(Start, &str)>> =
                    ranks.iter().map(|rank| of(rank).get(number)).collect();
                let first = made.iter().flatten().next().map_or("", |(_, call)| *call);
                if made.iter().any(|call| call.is_none_or(|(_, call)| *call != first)) {
                    return Err(self.calls_differ(name, number, ranks, &made));
                }
                meetings.add(made.into_iter().flatten().map(|(start, _)| *start).collect());
            }
        }
        Ok(())
    }

    /// The failure of members that make different calls.
    fn calls_differ(
        &self,
        group: &str,
        number: usize,
        ranks: &[u32],
        made: &[Option<&(Start, &str)>],
    ) -> Box<Failure> {
        let mut rows: Vec<(String, Vec<usize>)> = Vec::new();
        for (rank, call) in ranks.iter().zip(made) {
            let text = match call {
                Some((start, call)) => match &self.event(*start).site[..] {
                    "" => (*call).to_string(),
                    site => format!("{call}  {site}"),
                },
                None => "nothing more".to_string(),
            };
            match rows.iter_mut().find(|(own, _)| *own == text) {
                Some((_, ranks)) => ranks.push(*rank as usize),
                None => rows.push((text, vec![*rank as usize])),
            }
        }
        let headline = format!("call {number} on `{group}` must be the same on all its ranks");
        let rows = rows.into_iter().map(|(text, ranks)| format!("{}: {text}", ranks_text(&ranks)));
        Failure::rule("J2", headline)
            .rows(rows)
            .note("every member must make the same calls in the same order")
    }

    /// (J1)
    fn match_messages(&self, meetings: &mut Meetings) -> Result<(), Box<Failure>> {
        let mut pairs: BTreeMap<Channel<'a>, Ends<'a>> = BTreeMap::new();
        for (start, script, event) in self.events() {
            let Action::Exchange { group, sends, receives } = &event.action else { continue };
            let Some(group) = script.groups.get(*group as usize) else { continue };
            for end in sends {
                pairs.entry((group, script.rank, end.peer, end.tag)).or_default()[0].push((start, end));
            }
            for end in receives {
                pairs.entry((group, end.peer, script.rank, end.tag)).or_default()[1].push((start, end));
            }
        }
        for ((group, from, to, tag), [sent, received]) in &pairs {
            for ((send, what), (receive, expected)) in sent.iter().zip(received) {
                if what.kind != expected.kind && !(what.kind.contains('?') || expected.kind.contains('?')) {
                    let rows = [
                        format!("{} sends {}", self.who(*send), what.kind),
                        format!("{} receives {}", self.who(*receive), expected.kind),
                    ];
                    let headline = format!(
                        "a message from rank {from} to rank {to} with tag {tag} must have one element type and shape"
                    );
                    let note = "a receive must state the element type and the shape of what is sent: convert with \
                                `cast` or `reshape` before the send";
                    return Err(Failure::rule("J1", headline).rows(rows).note(note));
                }
                meetings.add(vec![*send, *receive]);
            }
            if sent.len() != received.len() {
                return Err(self.unmatched(&pairs, (group, *from, *to, *tag)));
            }
        }
        Ok(())
    }

    /// The failure of a message that has one end. Other such messages between the two ranks are named too, since swapped
    /// tags are the usual cause.
    fn unmatched(&self, pairs: &BTreeMap<Channel<'a>, Ends<'a>>, channel: Channel<'a>) -> Box<Failure> {
        // The first end without another, and whether it is sent.
        let alone = |[sent, received]: &Ends<'a>| match sent.len() > received.len() {
            true => sent.get(received.len()).map(|(start, what)| (*start, &what.kind, true)),
            false => received.get(sent.len()).map(|(start, what)| (*start, &what.kind, false)),
        };
        let (group, from, to, tag) = channel;
        let (headline, other) = match pairs.get(&channel).and_then(alone) {
            Some((start, kind, true)) => {
                let (who, what) = (self.who(start), format!("{kind} to rank {to} with tag {tag}"));
                (format!("{who} sends {what}, but rank {to} does not receive it"), to)
            }
            Some((start, kind, false)) => {
                let (who, what) = (self.who(start), format!("{kind} from rank {from} with tag {tag}"));
                (format!("{who} receives {what}, but rank {from} does not send it"), from)
            }
            None => ("a message has one end only".to_string(), to),
        };
        let others = pairs
            .iter()
            .filter(|((own, a, b, other), _)| (*own, *a, *b) == (group, from, to) && *other != tag);
        let rows = others.filter_map(|((.., tag), ends)| {
            let (start, kind, is_sent) = alone(ends)?;
            let verb = if is_sent { "sends" } else { "receives" };
            Some(format!("{} {verb} {kind} with tag {tag} instead", self.who(start)))
        });
        let mut rows: Vec<String> = rows.take(4).collect();
        if rows.is_empty() {
            let end =
                if other == to { format!("receive from rank {from}") } else { format!("send to rank {to}") };
            rows.push(format!("rank {other} has no {end} left over on `{}`", group.0));
        }
        let failure = Failure::rule("J1", headline).rows(rows);
        match from == to {
            true => failure.note("a message to the own rank needs both a send and a receive there"),
            false => failure.note("every message must be received, with the tag that it was sent with"),
        }
    }

    /// (J3)
    fn simulate(&self, mut meetings: Meetings) -> Result<(), Box<Failure>> {
        let mut next = vec![0; self.scripts.len()];
        let mut runnable: VecDeque<usize> = (0..self.scripts.len()).collect();
        // The scripts that wait for each meeting.
        let mut waiting: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        while let Some(at) = runnable.pop_front() {
            while let Some(event) = self.scripts[at].events.get(next[at]) {
                if let Action::Wait(start) = event.action {
                    let open = |number: &&usize| meetings.missing[**number] > 0;
                    let of = meetings.of.get(&(at, start as usize));
                    if let Some(open) = of.and_then(|of| of.iter().find(open)) {
                        waiting.entry(*open).or_default().push(at);
                        break;
                    }
                } else {
                    for number in meetings.of.get(&(at, next[at])).into_iter().flatten() {
                        meetings.missing[*number] -= 1;
                        if meetings.missing[*number] == 0 {
                            runnable.extend(waiting.remove(number).unwrap_or_default());
                        }
                    }
                }
                next[at] += 1;
            }
        }
        match next.iter().zip(self.scripts).any(|(next, script)| *next < script.events.len()) {
            true => Err(self.circle(&next, &meetings)),
            false => Ok(()),
        }
    }

    /// The failure of ranks that wait for one another: those of one circle.
    fn circle(&self, next: &[usize], meetings: &Meetings) -> Box<Failure> {
        // The first meeting that a stuck script waits for, and a stuck script that has not started its part of it.
        let waits_for = |at: usize| -> Option<(Start, Start)> {
            let event = self.scripts[at].events.get(next[at])?;
            let Action::Wait(start) = event.action else { return None };
            let own = (at, start as usize);
            let of = meetings.of.get(&own)?;
            let open = of.iter().find(|number| meetings.missing[**number] > 0)?;
            let late = meetings.starts[*open].iter().find(|(script, event)| next[*script] <= *event)?;
            Some((own, *late))
        };
        let mut path: Vec<usize> = Vec::new();
        let mut at = next.iter().zip(self.scripts).position(|(next, script)| *next < script.events.len());
        while let Some(script) = at.filter(|script| !path.contains(script)) {
            path.push(script);
            at = waits_for(script).map(|(_, late)| late.0);
        }
        let from = at.and_then(|at| path.iter().position(|script| *script == at)).unwrap_or(0);
        let row = |script: &usize| {
            let (start, late) = waits_for(*script)?;
            Some(format!(
                "{} waits for {}, which {} has yet to reach",
                self.who((*script, next[*script])),
                self.start_text(start),
                self.who(late),
            ))
        };
        let rows: Vec<String> = path[from..].iter().filter_map(row).collect();
        Failure::rule("J3", "these ranks wait for one another, and none can go on")
            .rows(rows)
            .note("start receives before waiting for sends, and make calls on several groups in one order")
    }

    /// A start in words.
    fn start_text(&self, start: Start) -> String {
        match &self.event(start).action {
            Action::Collective { call, .. } => call.split(' ').next().unwrap_or_default().to_string(),
            Action::Exchange { sends, receives, .. } => {
                let ends = |verb: &str, ends: &[MessageEnd]| {
                    let ends = ends.iter().map(|end| format!("{verb} rank {} (tag {})", end.peer, end.tag));
                    ends.collect::<Vec<_>>()
                };
                [ends("its message to", sends), ends("a message from", receives)].concat().join(", ")
            }
            Action::Wait(_) => "a wait".to_string(),
        }
    }
}

#[cfg(test)]
mod tests;
