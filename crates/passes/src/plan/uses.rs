//! Liveness: the last use of each value, and its kind, in one walk before anything is placed.
//!
//! Lines are numbered from 1 in the order of the text. The end of a block is a line of its own; a node with blocks
//! begins on its own line and ends with its last block.

use consort_ir::entity::{Value, ValueMap};
use consort_ir::ops::{Alias, Effects, Flow};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;

/// The line after all others: a value used there leaves the function.
pub(super) const END: u32 = u32::MAX;

/// The uses of a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    /// The line of its last use. A view is not a use of it, but the uses of the view are.
    pub(super) last: u32,
    /// The same without the function's own return.
    pub(super) read: u32,
    /// For a pending, the line until which its start holds its operands: its wait, or where the pending leaves scope.
    pub(super) holds: u32,
    /// Whether its storage outlives the function.
    pub(super) outlives: bool,
    /// Whether it must be contiguous.
    pub(super) flat: bool,
    /// The start of the pending.
    start: Option<u32>,
    /// The head of the list of nodes that may be views of it.
    views: Option<u32>,
}

/// The uses of all values.
pub(super) struct Uses<'a> {
    func: &'a Func,
    ids: ValueMap<u32>,
    of: Vec<Use>,
    starts: Vec<&'a Node>,
    views: Vec<View<'a>>,
    at: u32,
}

/// A node that may be a view of a value, its line, and the next node in that value's list.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) node: &'a Node,
    pub(super) line: u32,
    next: Option<u32>,
}

/// The owner of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Func,
    Cond,
    Loop,
}

impl<'a> Uses<'a> {
    pub(super) fn new(func: &'a Func) -> Uses<'a> {
        let mut uses = Uses {
            func,
            ids: ValueMap::default(),
            of: Vec::with_capacity(func.body.nodes.len() + func.body.params.len()),
            starts: Vec::new(),
            views: Vec::new(),
            at: 0,
        };
        uses.block(&func.body, Of::Func);
        uses
    }

    /// The number of values.
    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    /// The dense number of a value, in order of definition.
    pub(super) fn id(&self, value: Value) -> usize {
        self.ids.get(value).map_or(usize::MAX, |id| *id as usize)
    }

    pub(super) fn get(&self, value: Value) -> &Use {
        &self.of[self.id(value)]
    }

    /// The node that started a pending, if it is in the same block.
    pub(super) fn start_of(&self, pending: Value) -> Option<&'a Node> {
        self.get(pending).start.map(|start| self.starts[start as usize])
    }

    /// The nodes of its block that may be views of a value.
    pub(super) fn views_of(&self, value: Value) -> impl Iterator<Item = View<'a>> + '_ {
        let view = |number: u32| self.views[number as usize];
        std::iter::successors(self.get(value).views.map(view), move |last| last.next.map(view))
    }

    fn block(&mut self, block: &'a Block, of: Of) {
        block.params.iter().for_each(|param| self.define(*param, None));
        for node in &block.nodes {
            self.node(node);
        }
        self.at += 1;
        let end = if of == Of::Func { END } else { self.at };
        for result in &block.results {
            let id = self.id(*result);
            self.of[id].last = end;
            match of {
                Of::Func => self.of[id].outlives = true,
                _ => self.of[id].read = end,
            }
            if self.is_pending(*result) {
                // A loop waits for the pendings it carries at the end of each iteration.
                self.holds(*result, if of == Of::Loop { end } else { END });
            }
        }
    }

    fn define(&mut self, value: Value, start: Option<u32>) {
        self.ids.insert(value, self.of.len() as u32);
        self.of.push(Use { last: 0, read: 0, holds: 0, outlives: false, flat: false, start, views: None });
    }

    fn is_pending(&self, value: Value) -> bool {
        self.func.ty(value).is_some_and(Type::is_pending)
    }

    fn used(&mut self, value: Value, line: u32) {
        let id = self.id(value);
        let entry = &mut self.of[id];
        entry.last = entry.last.max(line);
        entry.read = entry.read.max(line);
    }

    fn flat(&mut self, value: Value) {
        let id = self.id(value);
        self.of[id].flat = true;
    }

    /// Records until when the start of a pending holds its operands.
    fn holds(&mut self, pending: Value, until: u32) {
        let id = self.id(pending);
        self.of[id].holds = until;
    }

    fn node(&mut self, node: &'a Node) {
        self.at += 1;
        let here = self.at;
        if node.op.alias() == Alias::View {
            let (of, number) = (self.id(node.args[0]), self.views.len() as u32);
            self.views.push(View { node, line: here, next: self.of[of].views.replace(number) });
        }
        if node.op.alias() != Alias::View || node.op.effects() == Effects::Host {
            node.args.iter().for_each(|arg| self.used(*arg, here));
        }
        let mut start = None;
        match (node.op.effects(), node.op.flow()) {
            (Effects::Collective(_) | Effects::Messages(_), _) => {
                let overwritten = overwritten(self.func, node);
                for (arg, _) in node.args.iter().zip(overwritten).filter(|(_, over)| over.is_none()) {
                    self.flat(*arg);
                }
                start = Some(self.starts.len() as u32);
                self.starts.push(node);
            }
            (Effects::Wait, _) => self.holds(node.args[0], here),
            (_, Flow::Straight) => {}
            (_, Flow::Cond) => {
                node.args.iter().for_each(|arg| self.flat(*arg));
                node.blocks.iter().for_each(|block| self.block(block, Of::Cond));
            }
            (_, Flow::Loop { carries, slices, .. }) => {
                node.blocks.iter().for_each(|block| self.block(block, Of::Loop));
                let end = self.at;
                node.args[carries..].iter().for_each(|arg| self.used(*arg, end));
                node.args[carries + slices..].iter().for_each(|arg| self.flat(*arg));
            }
        }
        if !node.blocks.is_empty() {
            let pendings: Vec<Value> =
                node.args.iter().copied().filter(|arg| self.is_pending(*arg)).collect();
            pendings.into_iter().for_each(|pending| self.holds(pending, END));
        }
        node.results.iter().for_each(|result| self.define(*result, start));
    }
}

/// For each operand of a start, the result that overwrites it.
pub(super) fn overwritten(func: &Func, node: &Node) -> Vec<Option<usize>> {
    let mut over = vec![None; node.args.len()];
    let n = node.results.first().and_then(|result| func.ty(*result)).map_or(0, |ty| ty.tensors().len());
    for result in 0..n {
        if let Some(slot) = node.op.overwrites(result).and_then(|operand| over.get_mut(operand)) {
            *slot = Some(result);
        }
    }
    over
}
