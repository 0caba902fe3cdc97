//! Which values a gradient passes through: those that depend on an argument that it is taken by, and that the loss, or
//! another result with a cotangent, depends on.
//!
//! Only floats carry gradients. Messages of a group are taken together: a value may come from any send of its group,
//! so all of a group's messages are passed through or none is, on all ranks alike.

use consort_ir::entity::{Value, ValueMap};
use consort_ir::ops::{Effects, Flow};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;
use consort_types::GroupName;

/// The values of a function that a gradient passes through.
pub(super) struct Active {
    varied: ValueMap<()>,
    useful: ValueMap<()>,
    sent: Vec<GroupName>,
    needed: Vec<GroupName>,
}

/// Whether a type has floats.
pub(super) fn has_floats(ty: &Type) -> bool {
    ty.tensors().iter().any(|tensor| tensor.dtype.is_float())
}

impl Active {
    /// Of a function by these parameters, for these results.
    pub(super) fn new(func: &Func, wrt: &[Value], results: &[Value]) -> Active {
        let (varied, useful) = (ValueMap::default(), ValueMap::default());
        let mut finder = Finder {
            func,
            active: Active { varied, useful, sent: Vec::new(), needed: Vec::new() },
            changed: false,
        };
        wrt.iter().for_each(|param| finder.vary(*param));
        finder.until_stable(|finder| finder.forward(&func.body));
        results.iter().for_each(|result| finder.need(*result));
        finder.until_stable(|finder| finder.backward(&func.body));
        finder.active
    }

    /// Whether the cotangent of a value is needed and may be other than zero.
    pub(super) fn has(&self, value: Value) -> bool {
        self.varied.get(value).is_some() && self.useful.get(value).is_some()
    }

    /// Whether a value depends on an argument that the gradient is taken by.
    pub(super) fn is_varied(&self, value: Value) -> bool {
        self.varied.get(value).is_some()
    }

    /// Whether gradients pass through the messages of a group.
    pub(super) fn has_messages(&self, group: GroupName) -> bool {
        self.sent.contains(&group) && self.needed.contains(&group)
    }

    /// Whether a node, or one in its blocks, sends or receives messages that gradients pass through.
    pub(super) fn has_messages_in(&self, node: &Node) -> bool {
        let own = matches!(node.op.effects(), Effects::Messages(group) if self.has_messages(group));
        own || node.blocks.iter().flat_map(|block| &block.nodes).any(|inside| self.has_messages_in(inside))
    }

    /// Whether a gradient passes through a node.
    pub(super) fn passes(&self, node: &Node) -> bool {
        node.results.iter().any(|result| self.has(*result)) || self.has_messages_in(node)
    }
}

struct Finder<'a> {
    func: &'a Func,
    active: Active,
    changed: bool,
}

impl Finder<'_> {
    fn until_stable(&mut self, walk: impl Fn(&mut Self)) {
        loop {
            self.changed = false;
            walk(self);
            if !self.changed {
                break;
            }
        }
    }

    fn vary(&mut self, value: Value) {
        if self.func.ty(value).is_some_and(has_floats) && self.active.varied.insert(value, ()).is_none() {
            self.changed = true;
        }
    }

    fn need(&mut self, value: Value) {
        if self.func.ty(value).is_some_and(has_floats) && self.active.useful.insert(value, ()).is_none() {
            self.changed = true;
        }
    }

    fn varied(&self, value: &Value) -> bool {
        self.active.varied.get(*value).is_some()
    }

    fn useful(&self, value: &Value) -> bool {
        self.active.useful.get(*value).is_some()
    }

    /// What depends on the arguments.
    fn forward(&mut self, block: &Block) {
        for node in &block.nodes {
            for (from, to) in links_in(node) {
                if self.varied(&from) {
                    self.vary(to);
                }
            }
            node.blocks.iter().for_each(|inside| self.forward(inside));
            for (from, to) in links_out(node) {
                if self.varied(&from) {
                    self.vary(to);
                }
            }
            if node.op.flow() != Flow::Straight {
                continue;
            }
            let mut depends = passing(node).any(|arg| self.varied(arg));
            if let Effects::Messages(group) = node.op.effects() {
                if depends && !self.active.sent.contains(&group) {
                    self.active.sent.push(group);
                    self.changed = true;
                }
                depends = self.active.sent.contains(&group);
            }
            if depends {
                node.results.iter().for_each(|result| self.vary(*result));
            }
        }
    }

    /// What the loss depends on.
    fn backward(&mut self, block: &Block) {
        for node in block.nodes.iter().rev() {
            for (from, to) in links_out(node) {
                if self.useful(&to) {
                    self.need(from);
                }
            }
            node.blocks.iter().for_each(|inside| self.backward(inside));
            for (from, to) in links_in(node) {
                if self.useful(&to) {
                    self.need(from);
                }
            }
            if node.op.flow() != Flow::Straight {
                continue;
            }
            let mut serves = node.results.iter().any(|result| self.useful(result));
            if let Effects::Messages(group) = node.op.effects() {
                if serves && !self.active.needed.contains(&group) {
                    self.active.needed.push(group);
                    self.changed = true;
                }
                serves = self.active.needed.contains(&group);
            }
            if serves {
                passing(node).for_each(|arg| self.need(*arg));
            }
        }
    }
}

/// The operands to which a gradient passes from the results.
fn passing(node: &Node) -> impl Iterator<Item = &Value> {
    node.args.iter().enumerate().filter(|(i, _)| node.op.passes_gradient(*i)).map(|(_, arg)| arg)
}

/// Operands with the parameters that they become.
pub(super) fn links_in(node: &Node) -> Vec<(Value, Value)> {
    let skip = usize::from(node.op.flow() == Flow::Cond).min(node.args.len());
    let links = |block: &Block| {
        node.args[skip..].iter().copied().zip(block.params.iter().copied()).collect::<Vec<_>>()
    };
    node.blocks.iter().flat_map(links).collect()
}

/// Results of blocks with what they become: results of the node, and parameters of the next iteration.
pub(super) fn links_out(node: &Node) -> Vec<(Value, Value)> {
    let mut links = Vec::new();
    for block in &node.blocks {
        links.extend(block.results.iter().copied().zip(node.results.iter().copied()));
        if let Flow::Loop { carries, .. } = node.op.flow() {
            links.extend(block.results.iter().copied().zip(block.params.iter().copied()).take(carries));
            // Without iterations, a loop gives back what entered.
            links.extend(node.args.iter().copied().zip(node.results.iter().copied()).take(carries));
        }
    }
    links
}
