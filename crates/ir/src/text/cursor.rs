//! A position in a token list, and the basic readers that larger ones are built from.

use consort_types::{Axes, Dtype, GroupName, Headline, Site};

use super::lexer::{ParseError, Tokens, tokens};
use crate::entity::Value;
use crate::index::{Index, Sym};
use crate::mesh::Mesh;

use crate::types::{TensorType, Type};

/// How deep expressions and blocks may nest, so that no text can exhaust the stack.
const MAX_DEPTH: u32 = 64;

/// The digits of `i64::MIN`.
const SMALLEST: &str = "9223372036854775808";

/// Reads a text from left to right. Attributes read themselves through it.
pub struct Cursor<'a> {
    tokens: Tokens<'a>,
    at: usize,
    depth: u32,
    /// The mesh declared so far; names of axes and groups are looked up here.
    pub mesh: Mesh,
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of a text.
    pub fn new(text: &'a str, mesh: Mesh) -> Result<Cursor<'a>, ParseError> {
        Ok(Cursor { tokens: tokens(text)?, at: 0, depth: 0, mesh })
    }

    /// The token here; empty at the end of the text.
    pub fn peek(&self) -> &'a str {
        self.tokens.text(self.at)
    }

    /// The token after the one here.
    pub(super) fn peek_second(&self) -> &'a str {
        self.tokens.text(self.at + 1)
    }

    /// Whether the next two tokens are these.
    pub fn at_pair(&self, first: &str, second: &str) -> bool {
        self.peek() == first && self.peek_second() == second
    }

    /// Whether all tokens are read.
    pub fn at_end(&self) -> bool {
        self.tokens.get(self.at).is_none()
    }

    /// Moves past the token here and returns it.
    pub fn next_token(&mut self) -> &'a str {
        let text = self.peek();
        self.at += 1;
        text
    }

    /// The line of the token here.
    pub(super) fn line(&self) -> u32 {
        self.tokens.get(self.at).map_or(0, |token| token.line)
    }

    /// Whether the token here is on the same line as the one before it.
    pub(super) fn on_same_line(&self) -> bool {
        let before = self.at.checked_sub(1).and_then(|at| self.tokens.get(at));
        before.is_some_and(|before| self.tokens.get(self.at).is_some_and(|here| here.line == before.line))
    }

    /// Whether the token here is this mark, with no space before it.
    fn glued(&self, mark: &str) -> bool {
        self.peek() == mark && self.tokens.glued(self.at)
    }

    /// The source location on a line.
    pub(super) fn site(&self, line: u32) -> Option<Site> {
        self.tokens.site(line)
    }

    /// An error here.
    pub fn error(&self, headline: impl Into<Headline>) -> ParseError {
        let (line, column) = self.tokens.position(self.at);
        ParseError { line, column, headline: headline.into(), note: None }
    }

    /// An error here that says what was expected.
    pub fn expected(&self, what: &str) -> ParseError {
        let got =
            if self.at_end() { "the end of the text".to_string() } else { format!("`{}`", self.peek()) };
        self.error((what, got))
    }

    /// The same if the token must be on the line of the previous one: the error is at the end of that line.
    pub fn expected_on_line(&self, what: &str) -> ParseError {
        if self.at_end() || self.on_same_line() {
            return self.expected(what);
        }
        let (line, column) = self.tokens.after(self.at);
        ParseError { line, column, headline: (what, "the end of the line").into(), note: None }
    }

    /// Moves past the token here if it is this one.
    pub fn eat(&mut self, text: &str) -> bool {
        let found = self.peek() == text;
        if found {
            self.at += 1;
        }
        found
    }

    /// Moves past this mark or word, or says that it was expected.
    pub fn expect(&mut self, text: &str) -> Result<(), ParseError> {
        if self.eat(text) { Ok(()) } else { Err(self.expected(&format!("`{text}`"))) }
    }

    /// Moves past the name of an attribute.
    pub fn expect_word(&mut self, name: &str) -> Result<(), ParseError> {
        if self.eat(name) { Ok(()) } else { Err(self.expected(&format!("attribute `{name}`"))) }
    }

    /// Reads one word that `f` knows.
    pub fn one_of<T>(&mut self, what: &str, f: impl Fn(&str) -> Option<T>) -> Result<T, ParseError> {
        let found = f(self.peek()).ok_or_else(|| self.expected(what))?;
        self.at += 1;
        Ok(found)
    }

    /// Reads items between commas up to and including the closing mark.
    pub fn list<T>(
        &mut self,
        end: &str,
        mut item: impl FnMut(&mut Self) -> Result<T, ParseError>,
    ) -> Result<Vec<T>, ParseError> {
        let mut items = Vec::new();
        if self.eat(end) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.eat(end) {
                return Ok(items);
            }
            if !self.eat(",") {
                return Err(self.expected(&format!("`,` or `{end}`")));
            }
        }
    }

    /// Runs a reader one level deeper.
    pub(super) fn nested<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, ParseError>,
    ) -> Result<T, ParseError> {
        self.deeper()?;
        let result = f(self);
        self.shallower();
        result
    }

    /// Enters a level; an error if the nesting is too deep.
    pub(super) fn deeper(&mut self) -> Result<(), ParseError> {
        if self.depth == MAX_DEPTH {
            return Err(self.error(format!("nested more than {MAX_DEPTH} deep")));
        }
        self.depth += 1;
        Ok(())
    }

    /// Leaves a level.
    pub(super) fn shallower(&mut self) {
        self.depth -= 1;
    }

    /// Reads a whole number without sign.
    pub fn number<T: TryFrom<u64>>(&mut self, what: &str) -> Result<T, ParseError> {
        let text = self.peek();
        let number = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        let number = number.ok().and_then(|n| T::try_from(n).ok()).ok_or_else(|| self.expected(what))?;
        self.at += 1;
        Ok(number)
    }

    /// Reads a whole number with an optional sign.
    pub fn integer(&mut self) -> Result<i64, ParseError> {
        let start = self.at;
        let negative = self.eat("-");
        let number: u64 = self.number("an integer")?;
        let value = if negative { 0i64.checked_sub_unsigned(number) } else { i64::try_from(number).ok() };
        value.ok_or_else(|| {
            self.at = start;
            self.error("integer does not fit in 64 bits")
        })
    }

    /// Whether the token here is an integer, with an optional sign, and not a float.
    pub fn at_integer(&self) -> bool {
        let digits = if self.peek() == "-" { self.peek_second() } else { self.peek() };
        !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
    }

    /// Reads a float: digits, `inf`, `nan`, or `nan(0x..)` with its bits; a sign may stand before it.
    pub fn float(&mut self) -> Result<f64, ParseError> {
        let negative = self.eat("-");
        let text = self.peek();
        let value = match text {
            "inf" => f64::INFINITY,
            "nan" if self.peek_second() == "(" => {
                self.at += 2;
                let bits = f64::from_bits(self.number("the bits of a nan")?);
                if !bits.is_nan() || negative {
                    return Err(self.error(("the bits of a nan", "")));
                }
                self.expect(")")?;
                return Ok(bits);
            }
            "nan" => f64::NAN,
            _ if text.starts_with(|c: char| c.is_ascii_digit()) => {
                text.parse().map_err(|_| self.expected("a float"))?
            }
            _ => return Err(self.expected("a float")),
        };
        self.at += 1;
        Ok(if negative { -value } else { value })
    }

    /// Reads an element type.
    pub fn dtype(&mut self) -> Result<Dtype, ParseError> {
        self.one_of("an element type (f32 f64 f16 bf16 i32 i64 u8 bool)", Dtype::from_name)
    }

    /// Reads a value: `v12`.
    pub fn value(&mut self) -> Result<Value, ParseError> {
        let number = numbered(self.peek(), "v").ok_or_else(|| self.expected("a value such as `v0`"))?;
        if number >= Value::LIMIT {
            return Err(self.error(format!("value numbers end at v{}", Value::LIMIT - 1)));
        }
        self.at += 1;
        Ok(Value(number))
    }

    /// Whether the token here is a value.
    pub(super) fn at_value(&self) -> bool {
        numbered(self.peek(), "v").is_some()
    }

    /// Reads the name of an axis or a list group.
    fn axis_or_group(&mut self) -> Result<GroupName, ParseError> {
        let name = self.peek();
        let found = self.mesh.axis(name).map(|axis| GroupName::Axes(Axes::one(axis)));
        let found = found.or_else(|| self.mesh.list_group(name).map(GroupName::List));
        let Some(group) = found else {
            let mut error = self.error(format!("unknown axis or group `{name}`"));
            let known: Vec<&str> = self.mesh.axes().iter().map(|(name, _)| name.as_str()).collect();
            let groups: Vec<&str> = self.mesh.groups().iter().map(|group| group.name.as_str()).collect();
            error.note =
                Some(format!("the mesh has axes [{}] and groups [{}]", known.join(", "), groups.join(", ")));
            return Err(error);
        };
        self.at += 1;
        Ok(group)
    }

    /// Reads a group: `tp`, `(dp,tp)`, or the name of a list group.
    pub fn group(&mut self) -> Result<GroupName, ParseError> {
        if !self.eat("(") {
            return self.axis_or_group();
        }
        Ok(GroupName::Axes(self.axes(")")?))
    }

    /// Reads axes up to the closing mark.
    fn axes(&mut self, end: &str) -> Result<Axes, ParseError> {
        let axes = self.list(end, |cursor| match cursor.axis_or_group()? {
            GroupName::Axes(axes) => Ok(axes),
            GroupName::List(_) => {
                cursor.at -= 1;
                Err(cursor.expected("an axis"))
            }
        })?;
        Ok(axes.into_iter().fold(Axes::NONE, Axes::union))
    }

    /// Reads a set of axes that follows without a space: `{dp,tp}`; empty if there is no brace.
    pub(super) fn axis_set(&mut self) -> Result<Axes, ParseError> {
        if !self.glued("{") {
            return Ok(Axes::NONE);
        }
        self.at += 1;
        self.axes("}")
    }

    /// Reads a symbol: `s0`, `u0`, `rank(tp)`.
    pub fn sym(&mut self) -> Result<Sym, ParseError> {
        self.try_sym()?.ok_or_else(|| self.expected("a symbol such as `s0`, `u0` or `rank(axis)`"))
    }

    /// Reads a symbol, if there is one here.
    pub(super) fn try_sym(&mut self) -> Result<Option<Sym>, ParseError> {
        let word = self.peek();
        let sym = if let Some(number) = numbered(word, "s") {
            Sym::Backed(number)
        } else if let Some(number) = numbered(word, "u") {
            Sym::Unbacked(number)
        } else if word == "rank" {
            self.at += 1;
            self.expect("(")?;
            let sym = match self.axis_or_group()? {
                GroupName::Axes(axes) => match axes.iter().next() {
                    Some(axis) => Sym::Rank(axis),
                    None => return Err(self.expected("an axis")),
                },
                GroupName::List(id) => Sym::GroupRank(id),
            };
            self.expect(")")?;
            return Ok(Some(sym));
        } else {
            return Ok(None);
        };
        self.at += 1;
        Ok(Some(sym))
    }

    /// Reads a size expression.
    pub fn index(&mut self) -> Result<Index, ParseError> {
        let start = self.at;
        let index = self.nested(Self::index_sum)?;
        if index.is_invalid() {
            self.at = start;
            return Err(
                self.error("size expression does not fit in 64 bits, divides by zero, looks outside its table, or is too large")
            );
        }
        Ok(index)
    }

    fn index_sum(&mut self) -> Result<Index, ParseError> {
        let mut sum = self.index_product()?;
        loop {
            if self.eat("+") {
                sum = &sum + &self.index_product()?;
            } else if self.peek() == "-" && self.peek_second() == SMALLEST {
                // The printer writes a coefficient of i64::MIN after a minus, where its digits alone do not fit an i64.
                let smallest = Index::constant(self.integer()?);
                sum = &sum + &self.index_product_of(smallest)?;
            } else if self.eat("-") {
                sum = &sum - &self.index_product()?;
            } else {
                return Ok(sum);
            }
        }
    }

    fn index_product(&mut self) -> Result<Index, ParseError> {
        let first = self.index_factor()?;
        self.index_product_of(first)
    }

    fn index_product_of(&mut self, first: Index) -> Result<Index, ParseError> {
        let mut product = first;
        loop {
            if self.eat("*") {
                product = &product * &self.index_factor()?;
            } else if self.eat("/") {
                product = product.div(&self.index_factor()?);
            } else if self.eat("%") {
                product = product.rem(&self.index_factor()?);
            } else {
                return Ok(product);
            }
        }
    }

    fn index_factor(&mut self) -> Result<Index, ParseError> {
        if self.eat("(") {
            let inner = self.nested(Self::index_sum)?;
            self.expect(")")?;
            return Ok(inner);
        }
        if self.peek() == "-" {
            if self.peek_second().starts_with(|c: char| c.is_ascii_digit()) {
                return Ok(Index::from(self.integer()?));
            }
            self.at += 1;
            return Ok(-&self.nested(Self::index_factor)?);
        }
        if let Some(sym) = self.try_sym()? {
            return Ok(Index::sym(sym));
        }
        let word = self.peek();
        if matches!(word, "min" | "max" | "pick") {
            self.at += 1;
            self.expect("(")?;
            let items = self.list(")", |cursor| cursor.nested(Self::index_sum))?;
            let Some((first, rest)) = items.split_first().filter(|(_, rest)| !rest.is_empty()) else {
                return Err(self.error(format!("`{word}` takes at least two arguments")));
            };
            return Ok(match word {
                "min" => rest.iter().fold(first.clone(), |a, b| Index::min(&a, b)),
                "max" => rest.iter().fold(first.clone(), |a, b| Index::max(&a, b)),
                _ => Index::pick(first, rest),
            });
        }
        let number: u64 = self.number("a size expression")?;
        match i64::try_from(number) {
            Ok(number) => Ok(Index::from(number)),
            Err(_) => {
                self.at -= 1;
                Err(self.error("integer does not fit in 64 bits"))
            }
        }
    }

    /// Reads the type of a tensor: `f32[8,s0]{dp}`.
    pub fn tensor_type(&mut self) -> Result<TensorType, ParseError> {
        let dtype = self.dtype()?;
        self.expect("[")?;
        let shape = self.list("]", Self::index)?;
        Ok(TensorType::new(dtype, shape, self.axis_set()?))
    }

    /// Reads a type.
    pub fn ty(&mut self) -> Result<Type, ParseError> {
        match self.peek() {
            "size" => {
                self.at += 1;
                self.expect("<")?;
                let index = self.index()?;
                self.expect(">")?;
                Ok(Type::Size(index, self.axis_set()?))
            }
            "pending" => {
                self.at += 1;
                self.expect("<")?;
                Ok(Type::Pending(self.list(">", Self::tensor_type)?))
            }
            word if Dtype::from_name(word).is_some() => Ok(Type::Tensor(self.tensor_type()?)),
            _ => Err(self.expected("a type such as `f32[4]{tp}`, `size<s0>` or `pending<f32[4]>`")),
        }
    }
}

/// The number in a word such as `v12`, spelled as the printer spells it.
fn numbered(word: &str, letter: &str) -> Option<u32> {
    let digits = word.strip_prefix(letter)?;
    let plain = digits == "0" || !digits.starts_with('0');
    (plain && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}
