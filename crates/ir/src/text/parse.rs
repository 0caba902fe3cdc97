//! Text to program. Types and names are taken as written; the verifier decides whether they are right.

use consort_types::{Axes, Held, Rank};

use super::cursor::Cursor;
use super::lexer::ParseError;
use crate::diagnostic::LineMap;
use crate::entity::Value;
use crate::index::{Guard, SymbolFacts};
use crate::mesh::{Mesh, is_name};
use crate::ops::OpTable;
use crate::plan::{NodePlan, Place, PlanHeader, Region};
use crate::program::{Block, Func, Node, Program};
use crate::types::Type;

/// A program and the positions of its parts in the text.
#[derive(Clone, Debug)]
pub struct Parsed {
    /// The program.
    pub program: Program,
    /// The line of each node.
    pub lines: LineMap,
}

/// Reads a program or plan. Ops are looked up in the table.
pub fn parse(text: &str, ops: &OpTable) -> Result<Parsed, ParseError> {
    let mut cursor = Cursor::new(text, Mesh::default())?;
    cursor.mesh = mesh(&mut cursor)?;
    while cursor.eat("group") {
        group(&mut cursor)?;
    }
    let mut funcs = Vec::new();
    let mut lines = LineMap::default();
    while !cursor.at_end() {
        let first = cursor.line();
        if !cursor.eat("func") {
            return Err(cursor.expected(if funcs.is_empty() { "`group` or `func`" } else { "`func`" }));
        }
        let mut reader = FuncReader { cursor: &mut cursor, ops, func: Func::default(), lines: Vec::new() };
        reader.func()?;
        let FuncReader { func, lines: node_lines, .. } = reader;
        funcs.push(func);
        lines.funcs.push((first, node_lines));
    }
    if funcs.is_empty() {
        return Err(cursor.expected("`func`"));
    }
    Ok(Parsed { program: Program { mesh: cursor.mesh, funcs }, lines })
}

fn mesh(cursor: &mut Cursor<'_>) -> Result<Mesh, ParseError> {
    cursor.expect("mesh")?;
    let start = cursor.error("");
    cursor.expect("(")?;
    let axes = cursor.list(")", |cursor| {
        let name = name(cursor, "the name of an axis")?;
        cursor.expect(":")?;
        Ok((name, cursor.number("the size of the axis")?))
    })?;
    Mesh::new(axes).map_err(|error| ParseError { headline: error.0.into(), ..start })
}

fn group(cursor: &mut Cursor<'_>) -> Result<(), ParseError> {
    let start = cursor.error("");
    let name = name(cursor, "the name of a group")?;
    cursor.expect("=")?;
    cursor.expect("[")?;
    let lists = cursor.list("]", |cursor| {
        cursor.expect("[")?;
        cursor.list("]", |cursor| Ok(Rank(cursor.number("a rank")?)))
    })?;
    match cursor.mesh.add_list_group(&name, lists) {
        Ok(_) => Ok(()),
        Err(error) => Err(ParseError { headline: error.0.into(), ..start }),
    }
}

fn name(cursor: &mut Cursor<'_>, what: &str) -> Result<String, ParseError> {
    cursor.one_of(what, |word| is_name(word).then(|| word.to_string()))
}

struct FuncReader<'a, 'c> {
    cursor: &'c mut Cursor<'a>,
    ops: &'c OpTable,
    func: Func,
    /// The lines of nodes and returns, in printing order.
    lines: Vec<u32>,
}

impl FuncReader<'_, '_> {
    fn func(&mut self) -> Result<(), ParseError> {
        self.cursor.expect("@")?;
        self.func.name = name(self.cursor, "the name of a function")?;
        let mut donated = Vec::new();
        let params = self.params(&mut donated)?;
        if self.cursor.eat("->") {
            self.func.results = if self.cursor.eat("(") {
                self.cursor.list(")", Cursor::ty)?
            } else {
                vec![self.cursor.ty()?]
            };
        }
        if self.cursor.eat("where") {
            self.conditions()?;
        }
        if self.cursor.eat("plan") {
            self.func.plan = Some(Box::new(self.head(donated)?));
        } else if let Some(value) = donated.first() {
            return Err(self.cursor.error(format!("{value} is donated, but the function is no plan")));
        }
        self.func.body = self.block_body(params)?;
        Ok(())
    }

    /// `(rank 0, s0 = 8, arena: 0x40)`.
    fn head(&mut self, donated: Vec<Value>) -> Result<PlanHeader, ParseError> {
        self.cursor.expect("(")?;
        self.cursor.expect("rank")?;
        let mut head =
            PlanHeader { rank: Rank(self.cursor.number("a rank")?), donated, ..PlanHeader::default() };
        while self.cursor.eat(",") {
            if let Some(region) = Region::from_name(self.cursor.peek()) {
                self.cursor.next_token();
                self.cursor.expect(":")?;
                head.regions.push((region, self.cursor.number("the size of the region")?));
            } else if let Some(sym) = self.cursor.try_sym()? {
                self.cursor.expect("=")?;
                head.symbols.push((sym, self.cursor.integer()?));
            } else {
                return Err(self.cursor.expected(&format!("a symbol or {}", Region::NAMES)));
            }
        }
        self.cursor.expect(")")?;
        Ok(head)
    }

    fn params(&mut self, donated: &mut Vec<Value>) -> Result<(Vec<Value>, Vec<Place>), ParseError> {
        self.cursor.expect("(")?;
        let types = &mut self.func.types;
        let mut places = Vec::new();
        let params = self.cursor.list(")", |cursor| {
            let value = cursor.value()?;
            cursor.expect(":")?;
            define(types, value, cursor.ty()?);
            while cursor.peek() == "@" {
                places.push(place(cursor)?);
            }
            if cursor.eat("donated") {
                donated.push(value);
            }
            Ok(value)
        })?;
        Ok((params, places))
    }

    /// The `where` clause: declarations of symbols, and guards.
    fn conditions(&mut self) -> Result<(), ParseError> {
        loop {
            let left = self.cursor.index()?;
            let declares = matches!(self.cursor.peek(), "in" | "{");
            match left.as_sym().filter(|_| declares) {
                Some(sym) => {
                    let varies = self.cursor.axis_set()?;
                    let facts = self.symbol_facts(varies)?;
                    self.func.symbols.push((sym, facts));
                }
                None => {
                    let le = self.cursor.eat("<=");
                    if !le && !self.cursor.eat("==") {
                        return Err(self.cursor.expected("`==`, `<=`, or for a symbol `in` or its axes"));
                    }
                    let right = self.cursor.index()?;
                    self.func.guards.push(if le { Guard::Le(left, right) } else { Guard::Eq(left, right) });
                }
            }
            if !self.cursor.eat(",") {
                return Ok(());
            }
        }
    }

    fn symbol_facts(&mut self, varies: Axes) -> Result<SymbolFacts, ParseError> {
        let mut facts = SymbolFacts { varies, ..SymbolFacts::default() };
        if self.cursor.eat("in") {
            facts.min = self.cursor.integer()?;
            if self.cursor.eat("..=") {
                let max = self.cursor.integer()?;
                if max < facts.min {
                    let got = format!("{}..={max}", facts.min);
                    return Err(self.cursor.error(("a range that is not empty", got)));
                }
                facts.max = Some(max);
            } else {
                self.cursor.expect("..")?;
            }
            if self.cursor.eat("by") {
                facts.multiple_of = self.cursor.integer()?;
                if facts.multiple_of < 1 {
                    return Err(self.cursor.error(("a positive multiple", "")));
                }
            }
        }
        Ok(facts)
    }

    /// `{ nodes return }`.
    fn block_body(&mut self, (params, places): (Vec<Value>, Vec<Place>)) -> Result<Block, ParseError> {
        self.cursor.expect("{")?;
        let mut block = Block { params, places, ..Block::default() };
        while self.cursor.peek() != "return" {
            if matches!(self.cursor.peek(), "}" | "") {
                return Err(self.cursor.expected("`return` or a node"));
            }
            block.nodes.push(self.node()?);
        }
        self.lines.push(self.cursor.line());
        self.cursor.next_token();
        if self.cursor.on_same_line() && self.cursor.at_value() {
            block.results = self.values()?;
        }
        self.cursor.expect("}")?;
        Ok(block)
    }

    fn values(&mut self) -> Result<Vec<Value>, ParseError> {
        let mut values = vec![self.cursor.value()?];
        while self.cursor.eat(",") {
            values.push(self.cursor.value()?);
        }
        Ok(values)
    }

    fn node(&mut self) -> Result<Node, ParseError> {
        let line = self.cursor.line();
        self.lines.push(line);
        let mut results = Vec::new();
        if self.cursor.at_value() {
            results = self.values()?;
            self.cursor.expect("=")?;
        }
        let Some(info) = self.ops.get(self.cursor.peek()) else {
            let mut error = self.cursor.expected("the name of an op");
            error.note = self.ops.nearest(self.cursor.peek()).map(|name| format!("there is an op `{name}`"));
            return Err(error);
        };
        self.cursor.next_token();
        let op = (info.read)(self.cursor)?;
        if self.cursor.peek() == "[" {
            let more = if info.attrs.is_empty() { "no" } else { "no more" };
            return Err(self.cursor.error(format!("{} has {more} attributes", info.name)));
        }
        let mut args = Vec::new();
        if self.cursor.on_same_line() && self.cursor.at_value() {
            args = self.values()?;
        }
        if !results.is_empty() {
            for (i, result) in results.iter().enumerate() {
                if !self.cursor.eat(if i == 0 { ":" } else { "," }) {
                    let mark = if i == 0 { "`:` and a type" } else { "`,` and a type for each result" };
                    return Err(self.cursor.expected_on_line(mark));
                }
                let ty = self.cursor.ty()?;
                define(&mut self.func.types, *result, ty);
            }
        }
        let plan = self.node_plan()?;
        let labels = op.flow().labels();
        let mut blocks = Vec::new();
        if !labels.is_empty() {
            self.cursor.expect("{")?;
            for label in labels {
                self.cursor.expect(label)?;
                let mut donated = Vec::new();
                let params = self.params(&mut donated)?;
                if let Some(value) = donated.first() {
                    return Err(self.cursor.error(format!("{value}: a parameter of a block is not donated")));
                }
                self.cursor.deeper()?;
                blocks.push(self.block_body(params)?);
                self.cursor.shallower();
            }
            self.cursor.expect("}")?;
        }
        Ok(Node { op, args, results, blocks, site: self.cursor.site(line), plan })
    }

    fn node_plan(&mut self) -> Result<Option<Box<NodePlan>>, ParseError> {
        let mut plan = NodePlan::default();
        let mut given: Vec<&str> = Vec::new();
        loop {
            let word = self.cursor.peek();
            if word != "@" && given.contains(&word) {
                return Err(self.cursor.error(format!("`{word}` is given twice")));
            }
            match word {
                "@" => plan.places.push(place(self.cursor)?),
                "view" => {
                    self.cursor.next_token();
                    plan.view = true;
                }
                "copy" => {
                    self.cursor.next_token();
                    plan.copies.push(self.copy()?);
                    while self.cursor.eat(",") {
                        plan.copies.push(self.copy()?);
                    }
                }
                "reuse" => plan.reuse = self.annotated_values()?,
                "lease" => plan.lease = self.annotated_values()?,
                "release" => {
                    self.cursor.next_token();
                    plan.entry = self.cursor.eat("entry");
                    if !plan.entry || self.cursor.eat(",") {
                        plan.release = self.values()?;
                    }
                }
                "queue" => {
                    self.cursor.next_token();
                    let group = self.cursor.group()?;
                    self.cursor.expect("#")?;
                    plan.queue = Some((group, self.cursor.number("a sequence number")?));
                }
                _ => return Ok((!given.is_empty()).then(|| Box::new(plan))),
            }
            given.push(word);
        }
    }

    /// `v2 (needed)`.
    fn copy(&mut self) -> Result<(Value, Held), ParseError> {
        let value = self.cursor.value()?;
        self.cursor.expect("(")?;
        let why = self
            .cursor
            .one_of(&format!("a reason ({})", Held::ALL.map(Held::name).join(", ")), Held::from_name)?;
        self.cursor.expect(")")?;
        Ok((value, why))
    }

    fn annotated_values(&mut self) -> Result<Vec<Value>, ParseError> {
        self.cursor.next_token();
        self.values()
    }
}

/// Records the type of a value. A second definition is for the verifier to report; the first type is kept.
fn define(types: &mut crate::entity::ValueMap<Type>, value: Value, ty: Type) {
    if types.get(value).is_none() {
        types.insert(value, ty);
    }
}

fn place(cursor: &mut Cursor<'_>) -> Result<Place, ParseError> {
    cursor.expect("@")?;
    let region = cursor.one_of(Region::NAMES, Region::from_name)?;
    cursor.expect("+")?;
    Ok(Place { region, offset: cursor.number("an offset")? })
}
