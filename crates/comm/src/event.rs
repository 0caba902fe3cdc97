//! One event of a rank, as the flight recorder keeps it. Everything that the runtime reports is such an event.

use std::fmt;

use serde::{Serialize, Serializer};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// An operation was started; it is published at once, unless an event of `Publish` follows.
    Start,
    /// An operation that had to wait for a slot was published.
    Publish,
    /// A rank went to sleep until the others have done their part of an operation.
    Wait,
    /// An operation finished here.
    Finish,
    /// Storage of an operation may be written again.
    Release,
    /// A kernel ran.
    Kernel,
    /// A program was compiled.
    Compile,
    /// A group failed; `op` is the text of its error.
    Error,
}

impl EventKind {
    /// All of them.
    pub const ALL: [EventKind; 8] = [
        EventKind::Start,
        EventKind::Publish,
        EventKind::Wait,
        EventKind::Finish,
        EventKind::Release,
        EventKind::Kernel,
        EventKind::Compile,
        EventKind::Error,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Start => "start",
            EventKind::Publish => "publish",
            EventKind::Wait => "wait",
            EventKind::Finish => "finish",
            EventKind::Release => "release",
            EventKind::Kernel => "kernel",
            EventKind::Compile => "compile",
            EventKind::Error => "error",
        }
    }
}

/// One event of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// The rank, by its number in the world.
    pub rank: usize,
    /// When, in nanoseconds since the beginning of 1970.
    pub time_ns: u64,
    /// What happened.
    pub kind: EventKind,
    /// The group: `world`, or for those made of it by call 5 `world.5[0,2]`, with the ranks that are in it.
    pub group: String,
    /// The number of the call on its group, or of the batch of messages.
    pub number: u64,
    /// Whether it is a batch of messages.
    #[serde(skip)]
    pub(crate) is_batch: bool,
    /// Whether its operand may have another size on each member.
    #[serde(skip)]
    pub(crate) is_uneven: bool,
    /// What it was: op, reduction, element type, root; the name of a kernel; the text of an error.
    pub op: String,
    /// Bytes of the operand.
    pub bytes: u64,
    /// A hash of the sizes, routes and factors of a call, equal on all members; 0 if there are none.
    #[serde(serialize_with = "hex")]
    pub extra: u64,
    /// The source line.
    pub site: String,
}

impl Event {
    /// Whether it belongs to an operation of a group, and not to a kernel, a compilation or an error.
    pub(crate) fn is_operation(&self) -> bool {
        !matches!(self.kind, EventKind::Kernel | EventKind::Compile | EventKind::Error)
    }

    /// `world call 5`, `world batch 2`, or the kind of an event without a number.
    pub(crate) fn place(&self) -> String {
        match (self.is_operation(), self.is_batch) {
            (true, true) => format!("{} batch {}", self.group, self.number),
            (true, false) => format!("{} call {}", self.group, self.number),
            (false, _) => format!("{} {}", self.group, self.kind.name()),
        }
    }

    /// `all_reduce sum f32, 4000 bytes`.
    pub(crate) fn what(&self) -> String {
        format!("{}, {} bytes", self.op, self.bytes)
    }

    /// One line of JSON, without the newline.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("texts and numbers are JSON")
    }
}

fn hex<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{number:x}"))
}

/// One line: when, who, what happened, to which operation, where.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanoseconds) = (self.time_ns / 1_000_000_000, self.time_ns % 1_000_000_000);
        write!(
            f,
            "{seconds}.{nanoseconds:09}  rank {}  {:7}  {}",
            self.rank,
            self.kind.name(),
            self.place()
        )?;
        write!(f, "  {}", if self.kind == EventKind::Error { self.op.clone() } else { self.what() })?;
        if self.site.is_empty() { Ok(()) } else { write!(f, "  {}", self.site) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event {
            rank: 2,
            time_ns: 12_000_000_345,
            kind: EventKind::Start,
            group: "world.5[0,2]".into(),
            number: 57,
            is_batch: false,
            is_uneven: false,
            op: "all_reduce sum f32".into(),
            bytes: 4000,
            extra: 0xab,
            site: "src/x.rs:10".into(),
        }
    }

    #[test]
    fn an_event_is_one_line() {
        let expected = "12.000000345  rank 2  start    world.5[0,2] call 57  all_reduce sum f32, 4000 bytes  src/x.rs:10";
        assert_eq!(event().to_string(), expected);
        let batch = Event { op: "exchange".into(), is_batch: true, site: String::new(), ..event() };
        assert_eq!(
            batch.to_string(),
            "12.000000345  rank 2  start    world.5[0,2] batch 57  exchange, 4000 bytes"
        );
        let error = Event { kind: EventKind::Error, op: "rank 1 died".into(), ..event() };
        let expected = "12.000000345  rank 2  error    world.5[0,2] error  rank 1 died  src/x.rs:10";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn json_escapes_what_it_must() {
        let event = Event { op: "a \"b\" \\ \n é".into(), ..event() };
        let expected = "{\"rank\":2,\"time_ns\":12000000345,\"kind\":\"start\",\"group\":\"world.5[0,2]\",\"number\":57,\
            \"op\":\"a \\\"b\\\" \\\\ \\n é\",\"bytes\":4000,\"extra\":\"ab\",\"site\":\"src/x.rs:10\"}";
        assert_eq!(event.json(), expected);
    }
}
