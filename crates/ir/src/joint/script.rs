//! The script of a function on one rank: blocks are entered, loops of known length unrolled.

use std::collections::{BTreeMap, BTreeSet};

use consort_types::{Collective, Failure, Kind, Message, Rank};

use super::{Action, Event, MessageEnd, Script};
use crate::entity::{Value, ValueMap};
use crate::index::{Index, Sym};
use crate::mesh::Mesh;
use crate::ops::{Digest, Effects, EvalCx, Flow, Trips, peer_of};
use crate::program::{Block, Func, Node};
use crate::types::{TensorType, Type};

/// The most events of a script.
const MAX_EVENTS: usize = 1 << 20;

impl Script {
    /// What a function starts and waits for on a rank, with these values of its symbols. Fails if that depends on data.
    pub fn of(
        mesh: &Mesh,
        func: &Func,
        rank: Rank,
        symbols: &BTreeMap<Sym, i64>,
    ) -> Result<Script, Box<Failure>> {
        let script = Script { rank: rank.0, groups: Vec::new(), events: Vec::new() };
        let compared = ValueMap::default();
        let mut writer = Writer { func, cx: EvalCx { mesh, rank, symbols }, script, compared };
        writer.block(&func.body, &mut ValueMap::default())?;
        Ok(writer.script)
    }

    /// The symbols on whose values the script of a function depends.
    pub fn symbols(func: &Func) -> BTreeSet<Sym> {
        let mut symbols = BTreeSet::new();
        add_symbols(func, &func.body, &mut |index| index.symbols(&mut |sym| _ = symbols.insert(sym)));
        symbols
    }
}

/// Calls `f` with each size that the script of a block depends on.
fn add_symbols(func: &Func, block: &Block, f: &mut dyn FnMut(&Index)) {
    for node in block.nodes.iter().filter(|node| node.op.effects().starts().is_some()) {
        node.op.indices(f);
        for arg in &node.args {
            func.ty(*arg).into_iter().for_each(|ty| ty.indices(f));
        }
    }
    for node in &block.nodes {
        if let Flow::Loop { trips: Trips::Count(count), .. } = node.op.flow()
            && node.blocks.iter().any(communicates)
        {
            f(count);
        }
        node.blocks.iter().for_each(|block| add_symbols(func, block, f));
    }
}

struct Writer<'a> {
    func: &'a Func,
    cx: EvalCx<'a>,
    script: Script,
    /// The tensor of each digest: a gather of digests is the comparison of an `equal_over`.
    compared: ValueMap<Value>,
}

/// The start of each pending, by its position among the events.
type Starts = ValueMap<u32>;

impl Writer<'_> {
    fn block(&mut self, block: &Block, starts: &mut Starts) -> Result<(), Box<Failure>> {
        for node in &block.nodes {
            let failed = |failure: Box<Failure>| match node.site {
                Some(site) => failure.at(site),
                None => failure,
            };
            self.node(node, starts).map_err(failed)?;
            if self.script.events.len() > MAX_EVENTS {
                let headline = format!("its communication has more than {MAX_EVENTS} steps");
                return Err(failed(Failure::new(headline)));
            }
        }
        Ok(())
    }

    fn push(&mut self, node: &Node, action: Action) {
        let site = node.site.map(|site| site.to_string()).unwrap_or_default();
        self.script.events.push(Event { action, site });
    }

    fn node(&mut self, node: &Node, starts: &mut Starts) -> Result<(), Box<Failure>> {
        match (node.op.effects(), node.op.flow()) {
            (Effects::Wait, _) => {
                // A pending that is an argument was started outside of the function.
                if let Some(start) = node.args.first().and_then(|pending| starts.get(*pending)).copied() {
                    self.push(node, Action::Wait(start));
                }
                Ok(())
            }
            (effects, Flow::Straight) => match (effects.starts(), node.op.collective()) {
                (Some(_), Some(collective)) => self.start(node, &collective, starts),
                _ => {
                    if let (true, [tensor], [digest]) =
                        (node.op.info().name == Digest::INFO.name, &node.args[..], &node.results[..])
                    {
                        self.compared.insert(*digest, *tensor);
                    }
                    Ok(())
                }
            },
            (_, Flow::Cond) => self.cond(node, starts),
            (_, Flow::Loop { trips, carries, .. }) => self.repeat(node, trips, carries, starts),
        }
    }

    fn start(
        &mut self,
        node: &Node,
        collective: &Collective<'_, Index>,
        starts: &mut Starts,
    ) -> Result<(), Box<Failure>> {
        let (mesh, rank) = (self.cx.mesh, self.cx.rank);
        let Some(members) = mesh.members(collective.over, rank) else { return Ok(()) };
        let ranks: Vec<u32> = members.iter().map(|rank| rank.0).collect();
        let group = (mesh.group_text(collective.over), ranks);
        let group = match self.script.groups.iter().position(|own| *own == group) {
            Some(known) => known,
            None => {
                self.script.groups.push(group);
                self.script.groups.len() - 1
            }
        } as u32;
        if let Some(pending) = node.results.first() {
            starts.insert(*pending, self.script.events.len() as u32);
        }
        let operands: Vec<&TensorType> = node.args.iter().filter_map(|arg| self.tensor(*arg)).collect();
        let action = if collective.kind == Kind::Exchange {
            let (sent, received) = operands.split_at(collective.sends.len().min(operands.len()));
            let (sends, receives) = (
                self.ends(collective.sends, sent, collective, &members)?,
                self.ends(collective.receives, received, collective, &members)?,
            );
            Action::Exchange { group, sends, receives }
        } else {
            Action::Collective { group, call: self.call(collective, &operands, node) }
        };
        self.push(node, action);
        Ok(())
    }

    fn tensor(&self, value: Value) -> Option<&TensorType> {
        if let Some(Type::Tensor(tensor)) = self.func.ty(value) { Some(tensor) } else { None }
    }

    /// The ends of messages that have a peer.
    fn ends(
        &self,
        messages: &[Message<Index>],
        operands: &[&TensorType],
        collective: &Collective<'_, Index>,
        members: &[Rank],
    ) -> Result<Vec<MessageEnd>, Box<Failure>> {
        let unknown = |what: &str, error: crate::ops::EvalError| match error.unmatched {
            Some(_) => error.failure().of("exchange"),
            None => {
                let expected = format!("a {what} that is known before it runs");
                Failure::new((expected, error.to_string())).of("exchange")
            }
        };
        let mut ends = Vec::new();
        for (message, operand) in messages.iter().zip(operands) {
            let peer = peer_of(message, &self.cx, collective.over, members);
            let Some(peer) = peer.map_err(|error| unknown("peer", error))? else { continue };
            let tag = self.cx.index(&message.tag).map_err(|error| unknown("tag", error))?;
            ends.push(MessageEnd { peer: peer.0, tag, kind: self.kind(operand, None) });
        }
        Ok(ends)
    }

    /// Element type and shape, with `?` for sizes that are not known yet and along the dimension `uneven`.
    fn kind(&self, tensor: &TensorType, uneven: Option<usize>) -> String {
        let size = |(dim, size): (usize, &Index)| match self.cx.index(size) {
            Ok(size) if uneven != Some(dim) => size.to_string(),
            _ => "?".to_string(),
        };
        let sizes: Vec<String> = tensor.shape.iter().enumerate().map(size).collect();
        format!("{}[{}]", tensor.dtype.name(), sizes.join(","))
    }

    /// All of a collective that must be equal on its members.
    fn call(&self, collective: &Collective<'_, Index>, operands: &[&TensorType], node: &Node) -> String {
        let compared = node.args.first().and_then(|arg| self.compared.get(*arg));
        if let Some(tensor) = compared.and_then(|tensor| self.tensor(*tensor)) {
            return format!("equal_over {}", self.kind(tensor, None));
        }
        let mut text = collective.kind.name().to_string();
        if let Some(reduce) = collective.reduce {
            text.push_str(&format!(" {reduce:?}").to_lowercase());
        }
        if let Some(root) = collective.root {
            text.push_str(&format!(" root {root}"));
        }
        if !collective.dims.is_empty() {
            text.push_str(&format!(" dims {:?}", collective.dims));
        }
        if let Some(route) = collective.route {
            text.push_str(&format!(" {route:?}").to_lowercase());
        }
        for operand in operands {
            text.push(' ');
            // A size that is not known on every rank cannot be compared here; it is when it runs.
            text.push_str(&self.kind(operand, collective.uneven()));
        }
        // Where a program takes the result to be equal, it must be so whatever the members of other roles give.
        let varies = node.results.first().and_then(|result| self.func.ty(*result)).map(Type::varies);
        match varies.filter(|varies| !varies.is_empty()) {
            Some(varies) => text + &format!(" -> {{{}}}", self.cx.mesh.axes_text(varies)),
            None => text,
        }
    }

    fn cond(&mut self, node: &Node, starts: &mut Starts) -> Result<(), Box<Failure>> {
        let before = self.script.events.len();
        let mut outcomes = Vec::new();
        for block in &node.blocks {
            self.script.events.truncate(before);
            let mut inside = enter(block, node.args.get(1..).unwrap_or_default(), starts);
            self.block(block, &mut inside)?;
            outcomes.push((self.script.events.split_off(before), leave(block, &inside)));
        }
        let Some((events, results)) = outcomes.pop() else { return Ok(()) };
        for (other, _) in &outcomes {
            let longest = other.len().max(events.len());
            let action = |events: &[Event], at: usize| events.get(at).map(|event| event.action.clone());
            let Some(at) = (0..longest).find(|at| action(other, *at) != action(&events, *at)) else {
                continue;
            };
            let failure = Failure::new(("the same communication in both blocks", "different ones"))
                .row(format!("first block: {}", step_text(other.get(at))))
                .row(format!("second block: {}", step_text(events.get(at))));
            return Err(failure.of("cond").note(
                "which block runs is known only when it runs: communicate before the cond, or alike in both blocks",
            ));
        }
        self.script.events.extend(events);
        give(node, &results, starts);
        Ok(())
    }

    fn repeat(
        &mut self,
        node: &Node,
        trips: Trips<'_>,
        carries: usize,
        starts: &mut Starts,
    ) -> Result<(), Box<Failure>> {
        let Some(block) = node.blocks.first() else { return Ok(()) };
        if !communicates(block) {
            return Ok(());
        }
        let count = match trips {
            Trips::Count(count) => self.cx.index(count).map_err(|error| {
                Failure::new(("a number of iterations that is known before it runs", error.to_string()))
            })?,
            Trips::While { .. } => {
                let failure = Failure::new(("no communication inside", "a loop that communicates"));
                return Err(failure.of("while").note("how often it runs is known only when it runs"));
            }
        };
        let of = |value: &Value| starts.get(*value).copied();
        let mut carried: Vec<Option<u32>> = node.args.iter().take(carries).map(of).collect();
        for _ in 0..count.max(0) {
            let mut inside = Starts::default();
            for (param, start) in block.params.iter().zip(&carried) {
                if let Some(start) = start {
                    inside.insert(*param, *start);
                }
            }
            self.block(block, &mut inside)?;
            carried = leave(block, &inside).into_iter().take(carries).collect();
            if self.script.events.len() > MAX_EVENTS {
                break;
            }
        }
        give(node, &carried, starts);
        Ok(())
    }
}

/// A step of a block in words, with its line.
fn step_text(event: Option<&Event>) -> String {
    let Some(Event { action, site }) = event else { return "nothing more".to_string() };
    let what = match action {
        Action::Collective { call, .. } => &call[..],
        Action::Exchange { .. } => "messages",
        Action::Wait(_) => "a wait",
    };
    if site.is_empty() { what.to_string() } else { format!("{what}  {site}") }
}

/// Whether a block starts or completes communication.
fn communicates(block: &Block) -> bool {
    block.nodes.iter().any(|node| {
        let effects = node.op.effects();
        effects.starts().is_some() || effects == Effects::Wait || node.blocks.iter().any(communicates)
    })
}

/// The starts of a block's pendings, given those of its arguments.
fn enter(block: &Block, args: &[Value], starts: &Starts) -> Starts {
    let mut inside = Starts::default();
    for (param, arg) in block.params.iter().zip(args) {
        if let Some(start) = starts.get(*arg) {
            inside.insert(*param, *start);
        }
    }
    inside
}

/// The starts of the pendings that a block returns.
fn leave(block: &Block, inside: &Starts) -> Vec<Option<u32>> {
    block.results.iter().map(|value| inside.get(*value).copied()).collect()
}

/// Gives the results of a node their starts.
fn give(node: &Node, results: &[Option<u32>], starts: &mut Starts) {
    for (value, start) in node.results.iter().zip(results) {
        if let Some(start) = start {
            starts.insert(*value, *start);
        }
    }
}
