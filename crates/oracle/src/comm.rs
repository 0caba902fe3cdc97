//! Communication in the oracle: collectives wait for their last member, messages for their peer.

use std::collections::{BTreeMap, VecDeque};

use consort_types::{GroupName, Rank};

use super::inputs::Symbols;
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::ops::{Effects, EvalCx, EvalError, GroupEvalCx, Unmatched, no_communication, peer_of};
use consort_ir::program::{Func, Node};
use consort_ir::text::node_text;

/// One started operation of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingId(pub(super) usize);

/// One instance of a group: its spelling, and its first member.
type GroupKey = (String, Rank);

enum Pending {
    /// A collective that not all members have started.
    Collective { slot: (GroupKey, u64) },
    /// A batch of messages, of which some have not met their peer, and its name in a verdict.
    Messages { start: String, open: Vec<String>, received: Vec<Option<Literal>> },
    /// The results are available.
    Ready(Vec<Literal>),
}

/// A member that has started a collective.
struct Arrival<'a> {
    node: &'a Node,
    symbols: Symbols,
    args: Vec<Literal>,
    pending: PendingId,
}

struct Slot<'a> {
    members: Vec<Rank>,
    arrived: Vec<Option<Arrival<'a>>>,
}

/// One end of a message that waits for the other.
struct End {
    pending: PendingId,
    /// Its name in the batch.
    name: String,
    /// The tensor sent; for a receive, the one that gives the type.
    tensor: Literal,
    /// The index of the receive in its batch.
    at: usize,
}

#[derive(Default)]
struct Channel {
    sends: VecDeque<End>,
    recvs: VecDeque<End>,
}

pub(super) struct Comm<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    pendings: Vec<Pending>,
    /// For each operation, those that provide its operands, as far as matched.
    sources: Vec<Vec<PendingId>>,
    /// The number of collectives that each rank has started on each of its groups.
    started: BTreeMap<(GroupKey, Rank), u64>,
    slots: BTreeMap<(GroupKey, u64), Slot<'a>>,
    /// By group, sender, receiver and tag.
    channels: BTreeMap<(GroupKey, Rank, Rank, i64), Channel>,
}

impl<'a> Comm<'a> {
    pub(super) fn new(mesh: &'a Mesh, func: &'a Func) -> Comm<'a> {
        Comm {
            mesh,
            func,
            pendings: Vec::new(),
            sources: Vec::new(),
            started: BTreeMap::new(),
            slots: BTreeMap::new(),
            channels: BTreeMap::new(),
        }
    }

    pub(super) fn ready(&self, id: PendingId) -> bool {
        match &self.pendings[id.0] {
            Pending::Ready(_) => true,
            Pending::Messages { open, .. } => open.is_empty(),
            Pending::Collective { .. } => false,
        }
    }

    /// The results of an operation that is ready.
    pub(super) fn take(&mut self, id: PendingId) -> Vec<Literal> {
        match std::mem::replace(&mut self.pendings[id.0], Pending::Ready(Vec::new())) {
            Pending::Ready(tensors) => tensors,
            Pending::Messages { received, .. } => received.into_iter().flatten().collect(),
            Pending::Collective { .. } => Vec::new(),
        }
    }

    /// The operations, of all ranks, that provide its operands.
    pub(super) fn sources(&self, id: PendingId) -> &[PendingId] {
        &self.sources[id.0]
    }

    /// Describes what an operation waits for.
    pub(super) fn describe(&self, id: PendingId) -> String {
        match &self.pendings[id.0] {
            Pending::Collective { slot } => match self.slots.get(slot) {
                Some(entry) => {
                    let missing =
                        entry.members.iter().zip(&entry.arrived).filter(|(_, arrival)| arrival.is_none());
                    let ranks: Vec<String> = missing.map(|(rank, _)| rank.0.to_string()).collect();
                    let start =
                        entry.arrived.iter().flatten().next().map_or(String::new(), |a| start_text(a.node));
                    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
                    format!(
                        "{start}, call {} on {}: not started by {word} {}",
                        slot.1,
                        slot.0.0,
                        ranks.join(", ")
                    )
                }
                None => "a collective".to_string(),
            },
            Pending::Messages { start, open, .. } => format!("{start}: {}", open.join(", and ")),
            Pending::Ready(_) => "nothing".to_string(),
        }
    }

    fn add(&mut self, pending: Pending) -> PendingId {
        let id = PendingId(self.pendings.len());
        self.pendings.push(pending);
        self.sources.push(vec![id]);
        id
    }

    /// A rank starts an operation.
    pub(super) fn start(
        &mut self,
        cx: &EvalCx<'_>,
        node: &'a Node,
        args: Vec<Literal>,
    ) -> Result<PendingId, EvalError> {
        match node.op.effects() {
            Effects::Collective(group) => self.start_collective(cx, node, group, args),
            Effects::Messages(group) => self.start_messages(cx, node, group, args),
            _ => Err(no_communication()),
        }
    }

    fn start_collective(
        &mut self,
        cx: &EvalCx<'_>,
        node: &'a Node,
        group: GroupName,
        args: Vec<Literal>,
    ) -> Result<PendingId, EvalError> {
        let Some(members) = self.mesh.members(group, cx.rank) else {
            // A rank outside a list group passes its operands through.
            return Ok(self.add(Pending::Ready(args)));
        };
        let key = (self.mesh.group_text(group), members[0]);
        let calls = self.started.entry((key.clone(), cx.rank)).or_default();
        let slot = (key, *calls);
        *calls += 1;
        let member = members.iter().position(|m| *m == cx.rank).unwrap_or(0);
        let pending = self.add(Pending::Collective { slot: slot.clone() });
        let entry = self.slots.entry(slot.clone()).or_insert_with(|| {
            let arrived = members.iter().map(|_| None).collect();
            Slot { members, arrived }
        });
        entry.arrived[member] = Some(Arrival { node, symbols: cx.symbols.clone(), args, pending });
        if entry.arrived.iter().all(Option::is_some)
            && let Some(entry) = self.slots.remove(&slot)
        {
            self.complete(&slot, entry)?;
        }
        Ok(pending)
    }

    /// Completes a collective after all members have arrived: they must have started the same op.
    fn complete(&mut self, (key, call): &(GroupKey, u64), slot: Slot<'a>) -> Result<(), EvalError> {
        let arrivals: Vec<Arrival<'a>> = slot.arrived.into_iter().flatten().collect();
        let types = |arrival: &Arrival<'_>| arrival.args.iter().map(|arg| arg.dtype).collect::<Vec<_>>();
        let differs = |(_, other): &(&Rank, &Arrival<'_>)| {
            other.node.op != arrivals[0].node.op || types(other) != types(&arrivals[0])
        };
        if let Some((rank, other)) = slot.members.iter().zip(&arrivals).find(differs) {
            let text = |node: &Node| {
                let line =
                    node_text(node, self.func, self.mesh).split_whitespace().collect::<Vec<_>>().join(" ");
                line + &node.site.as_ref().map_or(String::new(), |site| format!(" ({site})"))
            };
            return Err(EvalError::new(format!(
                "call {call} on {} differs between ranks\n  {}: {}\n  {rank}: {}",
                key.0,
                slot.members[0],
                text(arrivals[0].node),
                text(other.node)
            )));
        }
        let contexts: Vec<EvalCx<'_>> = slot
            .members
            .iter()
            .zip(&arrivals)
            .map(|(rank, arrival)| EvalCx { mesh: self.mesh, rank: *rank, symbols: &arrival.symbols })
            .collect();
        let args: Vec<Vec<Literal>> = arrivals.iter().map(|arrival| arrival.args.clone()).collect();
        let results = arrivals[0].node.op.eval_group(&GroupEvalCx { members: &contexts }, &args)?;
        let all: Vec<PendingId> = arrivals.iter().map(|arrival| arrival.pending).collect();
        for (arrival, tensors) in arrivals.iter().zip(results) {
            self.sources[arrival.pending.0].clone_from(&all);
            self.pendings[arrival.pending.0] = Pending::Ready(tensors);
        }
        Ok(())
    }

    fn start_messages(
        &mut self,
        cx: &EvalCx<'_>,
        node: &'a Node,
        group: GroupName,
        args: Vec<Literal>,
    ) -> Result<PendingId, EvalError> {
        let (sends, recvs) =
            node.op.collective().map_or((&[][..], &[][..]), |batch| (batch.sends, batch.receives));
        let Some(members) = self.mesh.members(group, cx.rank) else {
            return Ok(self.add(Pending::Ready(args.into_iter().skip(sends.len()).collect())));
        };
        let name = self.mesh.group_text(group);
        let key = (name.clone(), members[0]);
        let pending = self.add(Pending::Messages {
            start: start_text(node),
            open: Vec::new(),
            received: vec![None; recvs.len()],
        });
        let mut touched = Vec::new();
        for (i, (message, tensor)) in sends.iter().chain(recvs).zip(args).enumerate() {
            let peer = peer_of(message, cx, group, &members)?;
            let tag = cx.index(&message.tag)?;
            let is_send = i < sends.len();
            let at = i - if is_send { 0 } else { sends.len() };
            let Some(other) = peer else {
                // No peer: a receive keeps the value passed for it.
                if let (false, Pending::Messages { received, .. }) = (is_send, &mut self.pendings[pending.0])
                {
                    received[at] = Some(tensor);
                }
                continue;
            };
            let (word, from, to) =
                if is_send { ("receive by", cx.rank, other) } else { ("send from", other, cx.rank) };
            let text = format!("a {word} rank {} with tag {tag} on {name}", other.0);
            if let Pending::Messages { open, .. } = &mut self.pendings[pending.0] {
                open.push(text.clone());
            }
            let channel = (key.clone(), from, to, tag);
            let ends = self.channels.entry(channel.clone()).or_default();
            let end = End { pending, name: text, tensor, at };
            if is_send {
                ends.sends.push_back(end)
            } else {
                ends.recvs.push_back(end)
            }
            touched.push(channel);
        }
        for channel in touched {
            self.deliver(&channel)?;
        }
        Ok(pending)
    }

    /// Matches sends and receives of one channel in FIFO order.
    fn deliver(&mut self, channel: &(GroupKey, Rank, Rank, i64)) -> Result<(), EvalError> {
        let Some(ends) = self.channels.get_mut(channel) else { return Ok(()) };
        let mut matched = Vec::new();
        while !ends.sends.is_empty() && !ends.recvs.is_empty() {
            matched.extend(ends.sends.pop_front().zip(ends.recvs.pop_front()));
        }
        for (send, recv) in matched {
            if send.tensor.dtype != recv.tensor.dtype || send.tensor.shape != recv.tensor.shape {
                let (_, from, to, tag) = channel;
                let text = |t: &Literal| format!("{}{:?}", t.dtype, t.shape);
                let (sent, expected) = (text(&send.tensor), text(&recv.tensor));
                let headline =
                    format!("{from} sends {sent} to {to} with tag {tag}, which expects {expected} (C3)");
                return Err(EvalError::unmatched(
                    headline,
                    Unmatched::Message { from: *from, to: *to, tag: *tag },
                ));
            }
            for end in [&send, &recv] {
                if let Pending::Messages { open, .. } = &mut self.pendings[end.pending.0]
                    && let Some(at) = open.iter().position(|name| *name == end.name)
                {
                    open.remove(at);
                }
            }
            self.sources[recv.pending.0].push(send.pending);
            if let Pending::Messages { received, .. } = &mut self.pendings[recv.pending.0] {
                received[recv.at] = Some(send.tensor);
            }
        }
        Ok(())
    }
}

/// A start as verdicts name it: the op, and the user's source line.
fn start_text(node: &Node) -> String {
    format!(
        "{}{}",
        node.op.info().name,
        node.site.as_ref().map_or(String::new(), |site| format!(" ({site})"))
    )
}
