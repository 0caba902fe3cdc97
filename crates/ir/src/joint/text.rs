//! Scripts as text, which ranks exchange: a line for the rank, each group and each event; fields separated by tabs.

use std::fmt::Write;

use super::{Action, Event, MessageEnd, Script};

impl Script {
    /// The script as text.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.rank);
        for (name, ranks) in &self.groups {
            let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
            let _ = writeln!(text, "group\t{name}\t{}", ranks.join(","));
        }
        for Event { action, site } in &self.events {
            let _ = match action {
                Action::Collective { group, call } => write!(text, "call\t{site}\t{group}\t{call}"),
                Action::Exchange { group, .. } => write!(text, "exchange\t{site}\t{group}"),
                Action::Wait(start) => write!(text, "wait\t{site}\t{start}"),
            };
            if let Action::Exchange { sends, receives, .. } = action {
                let mut write_ends = |verb: &str, ends: &[MessageEnd]| {
                    for MessageEnd { peer, tag, kind } in ends {
                        let _ = write!(text, "\t{verb} {peer} {tag} {kind}");
                    }
                };
                write_ends("send", sends);
                write_ends("recv", receives);
            }
            text.push('\n');
        }
        text
    }

    /// Reads the text of a script; `None` if it is none.
    pub fn read(text: &str) -> Option<Script> {
        let mut lines = text.lines();
        let rank = lines.next()?.parse().ok()?;
        let mut script = Script { rank, groups: Vec::new(), events: Vec::new() };
        for line in lines {
            let mut fields = line.split('\t');
            let (kind, second) = (fields.next()?, fields.next()?);
            let action = match kind {
                "group" => {
                    let ranks: Result<Vec<u32>, _> = fields.next()?.split(',').map(str::parse).collect();
                    script.groups.push((second.to_string(), ranks.ok()?));
                    continue;
                }
                "call" => {
                    let group = fields.next()?.parse().ok()?;
                    Action::Collective { group, call: fields.next()?.to_string() }
                }
                "exchange" => read_exchange(fields.next()?.parse().ok()?, fields)?,
                "wait" => Action::Wait(fields.next()?.parse().ok()?),
                _ => return None,
            };
            script.events.push(Event { action, site: second.to_string() });
        }
        Some(script)
    }
}

fn read_exchange<'a>(group: u32, fields: impl Iterator<Item = &'a str>) -> Option<Action> {
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for field in fields {
        let mut words = field.splitn(4, ' ');
        let list = match words.next()? {
            "send" => &mut sends,
            "recv" => &mut receives,
            _ => return None,
        };
        let (peer, tag) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        list.push(MessageEnd { peer, tag, kind: words.next()?.to_string() });
    }
    Some(Action::Exchange { group, sends, receives })
}
