//! Builds a function node by node and infers types on the way.
//!
//! Conditions on sizes that cannot be decided become guards of the function, so the result always verifies. The tracer,
//! expansions of composites, gradients and the random-program generator all use it.

use std::collections::{BTreeMap, BTreeSet};

use crate::entity::{Value, ValueMap};
use crate::index::{Assumed, Facts, Guard, Index, Sym, SymbolFacts};
use crate::infer::infer;
use crate::mesh::Mesh;
use crate::ops::{BlockType, Flow, Op, OpDef, Undecided};
use crate::program::{Block, Func, Node};
use crate::types::{TensorType, Type};
use consort_types::{Failure, Site};

/// A function under construction.
#[derive(Clone, Debug)]
pub struct Builder<'a> {
    mesh: &'a Mesh,
    draft: Draft,
}

/// A paused builder; continue with [`Builder::resume`].
#[derive(Clone, Debug)]
pub struct Draft {
    func: Func,
    facts: Facts,
    /// The block being filled, and those around it.
    open: Vec<Block>,
    next_value: u32,
    next_unbacked: u32,
    site: Option<Site>,
}

impl Draft {
    /// The conditions on sizes that have been assumed so far.
    pub fn guards(&self) -> &[Guard] {
        &self.func.guards
    }

    /// The number of parameters so far.
    pub fn params(&self) -> usize {
        self.open.first().map_or(0, |body| body.params.len())
    }

    /// Whether a value was built before this snapshot was taken.
    pub fn has(&self, value: Value) -> bool {
        value.0 < self.next_value
    }
}

impl<'a> Builder<'a> {
    /// An empty function.
    pub fn new(mesh: &'a Mesh, name: &str) -> Builder<'a> {
        let draft = Draft {
            func: Func { name: name.to_string(), ..Func::default() },
            facts: Facts::new(mesh),
            open: vec![Block::default()],
            next_value: 0,
            next_unbacked: 0,
            site: None,
        };
        Builder { mesh, draft }
    }

    /// Resumes a draft. The mesh must be the one it was begun with, possibly with more groups.
    pub fn resume(mesh: &'a Mesh, mut draft: Draft) -> Builder<'a> {
        draft.facts.add_groups(mesh);
        Builder { mesh, draft }
    }

    /// Pauses the builder.
    pub fn pause(self) -> Draft {
        self.draft
    }

    /// The mesh.
    pub fn mesh(&self) -> &'a Mesh {
        self.mesh
    }

    /// Sets the source line of the nodes that follow.
    pub fn set_site(&mut self, site: Option<Site>) {
        self.draft.site = site;
    }

    /// The source line of the nodes that follow.
    pub fn site(&self) -> Option<Site> {
        self.draft.site
    }

    /// Declares the facts of a backed symbol before a parameter binds it.
    pub fn declare(&mut self, sym: Sym, facts: SymbolFacts) {
        if self.draft.func.symbols.iter().all(|(other, _)| *other != sym) {
            self.draft.func.symbols.push((sym, facts));
        }
    }

    /// A symbol that no `to_size` of this function has used yet.
    pub fn fresh_symbol(&mut self) -> Sym {
        self.draft.next_unbacked += 1;
        Sym::Unbacked(self.draft.next_unbacked - 1)
    }

    /// Records a condition on sizes as a guard, unless it is known to hold.
    pub fn assume(&mut self, guard: Guard) -> Assumed {
        let assumed = self.draft.facts.assume(guard.clone());
        if assumed == Assumed::New {
            self.draft.func.guards.push(guard);
        }
        assumed
    }

    /// The number of open blocks around the current one; 0 in the function's body.
    pub fn depth(&self) -> usize {
        self.draft.open.len().saturating_sub(1)
    }

    /// Builds in an outer block that is still open.
    pub fn outside<T>(&mut self, depth: usize, f: impl FnOnce(&mut Self) -> T) -> T {
        let inner = self.draft.open.split_off((depth + 1).min(self.draft.open.len()));
        let outcome = f(self);
        self.draft.open.extend(inner);
        outcome
    }

    /// The nodes of the current block so far.
    pub fn nodes(&self) -> &[Node] {
        self.draft.open.last().map_or(&[], |block| &block.nodes)
    }

    /// Takes the last nodes of the current block out of it, all from number `from` on. They are put back by
    /// `put_nodes`; until then nothing may use their results.
    pub fn take_nodes(&mut self, from: usize) -> Vec<Node> {
        match self.draft.open.last_mut() {
            Some(block) => block.nodes.split_off(from.min(block.nodes.len())),
            None => Vec::new(),
        }
    }

    /// Appends nodes that were built in this function to the current block.
    pub fn put_nodes(&mut self, nodes: Vec<Node>) {
        if let Some(block) = self.draft.open.last_mut() {
            block.nodes.extend(nodes);
        }
    }

    /// The conditions on sizes that have been assumed so far.
    pub fn guards(&self) -> &[Guard] {
        &self.draft.func.guards
    }

    /// The facts about the symbols.
    pub fn facts(&self) -> &Facts {
        &self.draft.facts
    }

    fn value(&mut self, ty: Type) -> Value {
        let value = Value(self.draft.next_value);
        self.draft.next_value += 1;
        self.draft.func.types.insert(value, ty);
        value
    }

    /// Adds a parameter to the function, or to the current block.
    pub fn param(&mut self, ty: impl Into<Type>) -> Value {
        let ty = ty.into();
        ty.indices(&mut |index| {
            if let Some(sym @ Sym::Backed(_)) = index.as_sym() {
                self.draft.facts.declare(sym, self.draft.func.declared(sym));
            }
        });
        let value = self.value(ty);
        if let Some(block) = self.draft.open.last_mut() {
            block.params.push(value);
        }
        value
    }

    /// The type of a value built here.
    pub fn ty(&self, value: Value) -> Result<&Type, Box<Failure>> {
        self.draft.func.ty(value).ok_or_else(|| undefined(value))
    }

    /// The type of a tensor built here.
    pub fn tensor_ty(&self, value: Value) -> Result<TensorType, Box<Failure>> {
        match self.ty(value)? {
            Type::Tensor(tensor) => Ok(tensor.clone()),
            other => Err(Failure::rule("V2", ("a tensor", other.display(self.mesh).to_string()))),
        }
    }

    /// Adds a node and returns its results.
    pub fn op(&mut self, op: impl OpDef, args: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        self.node(Op::new(op), args, Vec::new())
    }

    /// Adds a node that has one result.
    pub fn one(&mut self, op: impl OpDef, args: &[Value]) -> Result<Value, Box<Failure>> {
        let results = self.op(op, args)?;
        results.first().copied().ok_or_else(|| Failure::rule("V2", ("a result", "none")))
    }

    /// Adds a start and its wait.
    pub fn start_wait(&mut self, op: impl OpDef, args: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        let pending = self.one(op, args)?;
        self.op(crate::ops::Wait {}, &[pending])
    }

    /// Opens a block with these parameters; nodes go into it until `end_block`.
    pub fn begin_block(&mut self, params: Vec<Type>) -> Vec<Value> {
        self.draft.open.push(Block::default());
        params.into_iter().map(|ty| self.param(ty)).collect()
    }

    /// Adds a parameter to a block that is closed already.
    pub fn add_param(&mut self, block: &mut Block, ty: Type) -> Value {
        let value = self.value(ty);
        block.params.push(value);
        value
    }

    /// Closes the block that was opened last.
    pub fn end_block(&mut self, results: &[Value]) -> Block {
        let mut block = self.draft.open.pop().unwrap_or_default();
        block.results = results.to_vec();
        let mut symbols = Vec::new();
        for node in &block.nodes {
            let args: Vec<Type> =
                node.args.iter().filter_map(|arg| self.draft.func.ty(*arg).cloned()).collect();
            symbols.extend(node.op.defines(&args).into_iter().map(|(sym, _)| sym));
        }
        self.draft.facts.forget(&symbols);
        block
    }

    /// A function of its own made of a closed block: its parameters are the block's, and then every backed symbol as a
    /// size.
    pub fn func_of(&mut self, block: Block) -> Func {
        let mut func = Func { name: self.draft.func.name.clone(), ..Func::default() };
        func.results = block.results.iter().filter_map(|value| self.draft.func.ty(*value).cloned()).collect();
        self.copy_types(&block, &mut func);
        func.body = block;
        let symbols: Vec<(Sym, SymbolFacts)> =
            self.draft.facts.symbols().map(|(sym, facts)| (sym, facts.clone())).collect();
        for (sym, facts) in symbols.into_iter().filter(|(sym, _)| matches!(sym, Sym::Backed(_))) {
            let value = Value(self.draft.next_value);
            self.draft.next_value += 1;
            func.types.insert(value, Type::Size(Index::sym(sym), facts.varies));
            func.body.params.push(value);
            func.symbols.push((sym, facts));
        }
        func.guards = self.draft.func.guards.clone();
        func.guards.retain(|guard| {
            let mut backed = true;
            guard.symbols(&mut |sym| backed &= matches!(sym, Sym::Backed(_)));
            backed
        });
        func
    }

    fn copy_types(&self, block: &Block, func: &mut Func) {
        let values = block.params.iter().chain(block.nodes.iter().flat_map(|node| &node.results));
        for value in values {
            if let Some(ty) = self.draft.func.ty(*value) {
                func.types.insert(*value, ty.clone());
            }
        }
        block.nodes.iter().flat_map(|node| &node.blocks).for_each(|inside| self.copy_types(inside, func));
    }

    /// Adds the nodes of a function to the current block, with these values in place of its first parameters; the others
    /// must be sizes, which nothing reads. Returns its results.
    pub fn splice(&mut self, func: &Func, args: &[Value]) -> Result<Vec<Value>, Box<Failure>> {
        let mut values: BTreeMap<Value, Value> = BTreeMap::new();
        values.extend(func.body.params.iter().copied().zip(args.iter().copied()));
        let mut types = BTreeMap::new();
        params_of(&func.body, &func.types, &mut types);
        self.splice_nodes(&types, &func.body, &mut values)
    }

    /// Copies of blocks of this function, which define values of their own.
    pub fn copies(&mut self, blocks: &[Block]) -> Result<Vec<Block>, Box<Failure>> {
        let mut types = BTreeMap::new();
        blocks.iter().for_each(|block| params_of(block, &self.draft.func.types, &mut types));
        blocks.iter().map(|block| self.splice_block(&types, block, &mut BTreeMap::new())).collect()
    }

    /// A copy of a block; `types` has those of the parameters.
    fn splice_block(
        &mut self,
        types: &BTreeMap<Value, Type>,
        block: &Block,
        values: &mut BTreeMap<Value, Value>,
    ) -> Result<Block, Box<Failure>> {
        let params = block.params.iter().filter_map(|param| types.get(param).cloned()).collect();
        let params = self.begin_block(params);
        values.extend(block.params.iter().copied().zip(params));
        let results = self.splice_nodes(types, block, values);
        let block = self.end_block(results.as_deref().unwrap_or(&[]));
        results.map(|_| block)
    }

    fn splice_nodes(
        &mut self,
        types: &BTreeMap<Value, Type>,
        block: &Block,
        values: &mut BTreeMap<Value, Value>,
    ) -> Result<Vec<Value>, Box<Failure>> {
        let here = |values: &BTreeMap<Value, Value>, list: &[Value]| {
            let one = |value: &Value| values.get(value).copied().ok_or_else(|| undefined(*value));
            list.iter().map(one).collect::<Result<Vec<Value>, _>>()
        };
        for node in &block.nodes {
            let args = here(values, &node.args)?;
            let inside = node.blocks.iter().map(|inside| self.splice_block(types, inside, values));
            let blocks = inside.collect::<Result<Vec<Block>, _>>()?;
            self.set_site(node.site);
            let results = self.node(node.op.clone(), &args, blocks)?;
            values.extend(node.results.iter().copied().zip(results));
        }
        here(values, &block.results)
    }

    /// The state to which `undo` goes back: the number of nodes of the current block, and the next value.
    pub fn mark(&self) -> (usize, Value) {
        (self.nodes().len(), Value(self.draft.next_value))
    }

    /// Takes out the nodes and the values that were added since a mark. All of them are in the current block.
    pub fn undo(&mut self, (nodes, next): (usize, Value)) {
        self.take_nodes(nodes);
        for value in next.0..self.draft.next_value {
            self.draft.func.types.remove(Value(value));
        }
        self.draft.next_value = next.0;
    }

    /// Adds a node with blocks.
    pub fn node(&mut self, op: Op, args: &[Value], blocks: Vec<Block>) -> Result<Vec<Value>, Box<Failure>> {
        let arg_types = args.iter().map(|arg| self.ty(*arg).cloned()).collect::<Result<Vec<_>, _>>()?;
        let block_types = blocks
            .iter()
            .map(|block| block_type(&self.draft.func, block))
            .collect::<Option<Vec<_>>>()
            .unwrap_or_default();
        let types = self.infer(&*op, &arg_types, &block_types)?;
        for (sym, facts) in op.defines(&arg_types) {
            self.draft.facts.declare(sym, facts);
        }
        let results: Vec<Value> = types.into_iter().map(|ty| self.value(ty)).collect();
        let node = Node {
            op,
            args: args.to_vec(),
            results: results.clone(),
            blocks,
            site: self.draft.site,
            plan: None,
        };
        if let Some(block) = self.draft.open.last_mut() {
            block.nodes.push(node);
        }
        Ok(results)
    }

    /// The types of an op's results, without a node. Undecided conditions on sizes become guards.
    pub fn infer(
        &mut self,
        op: &dyn OpDef,
        args: &[Type],
        blocks: &[BlockType],
    ) -> Result<Vec<Type>, Box<Failure>> {
        let known = self.draft.facts.guards().len();
        let types = infer(op, self.mesh, args, blocks, &mut self.draft.facts, Undecided::Assume)?;
        // Stored in the function, because facts about a symbol end with the block that defines it.
        self.draft.func.guards.extend_from_slice(self.draft.facts.guards().get(known..).unwrap_or(&[]));
        Ok(types)
    }

    /// Ends the function, whose result types are those of `results`.
    pub fn finish(mut self, results: &[Value]) -> Func {
        self.draft.func.body = self.end_block(results);
        self.draft.func.results =
            results.iter().filter_map(|value| self.draft.func.ty(*value).cloned()).collect();
        let bound: BTreeSet<Sym> = self.draft.func.bound_symbols().into_iter().collect();
        self.draft.func.symbols.retain(|(sym, _)| bound.contains(sym));
        self.draft.func
    }
}

/// The types of all parameters of blocks inside a block, and of its own.
fn params_of(block: &Block, types: &ValueMap<Type>, all: &mut BTreeMap<Value, Type>) {
    all.extend(block.params.iter().filter_map(|param| Some((*param, types.get(*param)?.clone()))));
    block.nodes.iter().flat_map(|node| &node.blocks).for_each(|inside| params_of(inside, types, all));
}

fn undefined(value: Value) -> Box<Failure> {
    Failure::rule("V1", format!("{value} is not defined"))
}

/// The types of a block's parameters and results; `None` if a value has no type.
pub fn block_type(func: &Func, block: &Block) -> Option<BlockType> {
    let types =
        |values: &[Value]| values.iter().map(|value| func.ty(*value).cloned()).collect::<Option<Vec<_>>>();
    Some(BlockType { params: types(&block.params)?, results: types(&block.results)? })
}

/// A function equivalent to one composite node, expanded; `None` if the op is not a composite.
pub fn expand(mesh: &Mesh, op: &dyn OpDef, args: &[Type]) -> Option<Result<Func, Box<Failure>>> {
    if !matches!(op.flow(), Flow::Straight) {
        return None;
    }
    let mut builder = Builder::new(mesh, op.info().name);
    let params: Vec<Value> = args.iter().map(|ty| builder.param(ty.clone())).collect();
    let results = op.expand(&mut builder, &params)?;
    Some(results.map(|results| builder.finish(&results)))
}
