//! Attributes: the values in brackets after an op's name, and how they are read and printed.
//!
//! Every attribute but a `Flag` that is false is always printed, in the order of its declaration, so that a line says
//! everything about its op and two texts of one program are equal byte for byte.

use std::fmt::{self, Write};

use consort_types::{Dtype, GroupName};

use crate::index::{Index, Sym};
use crate::mesh::Mesh;
use crate::text::{Cursor, ParseError};

/// An attribute of an op, as the table lists it.
#[derive(Debug)]
pub struct AttrSpec {
    /// Its name.
    pub name: &'static str,
    /// What kind of value it takes, in words.
    pub kind: &'static str,
    /// What it means.
    pub doc: &'static str,
}

/// A kind of attribute.
pub trait Attr: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// The kind in words, for docs and errors.
    const KIND: &'static str;
    /// Appends the value as programs write it.
    fn write(&self, out: &mut String, mesh: &Mesh);
    /// Reads the value.
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, ParseError>;
    /// The value that programs leave out, with its name.
    fn left_out() -> Option<Self> {
        None
    }
    /// Whether both print alike; floats are compared by their bits.
    fn same(&self, other: &Self) -> bool {
        self == other
    }
    /// Calls `f` with every size expression in the value.
    fn indices(&self, _f: &mut dyn FnMut(&Index)) {}
    /// Calls `f` with every group in the value.
    fn groups(&self, _f: &mut dyn FnMut(GroupName)) {}
}

/// Reads `name=value` and the comma or bracket before it.
pub fn read_attr<A: Attr>(cursor: &mut Cursor<'_>, name: &str, first: &mut bool) -> Result<A, ParseError> {
    let before = if *first { "[" } else { "," };
    if let Some(value) = A::left_out().filter(|_| !cursor.at_pair(before, name)) {
        return Ok(value);
    }
    if !cursor.eat(before) {
        return Err(
            cursor.expected_on_line(&format!("{}attribute `{name}`", if *first { "`[` and " } else { "" }))
        );
    }
    *first = false;
    cursor.expect_word(name)?;
    cursor.expect("=")?;
    A::read(cursor)
}

/// Reads the closing bracket of the attributes, if there are any.
pub fn end_attrs(cursor: &mut Cursor<'_>, any: bool) -> Result<(), ParseError> {
    if any && cursor.peek() == "," {
        return Err(cursor.error("there are no more attributes"));
    }
    if any { cursor.expect("]") } else { Ok(()) }
}

/// Writes `name=value` and the comma or bracket before it, unless it is left out.
pub fn write_attr<A: Attr>(out: &mut String, mesh: &Mesh, name: &str, value: &A, first: &mut bool) {
    if A::left_out().is_some_and(|left_out| left_out.same(value)) {
        return;
    }
    out.push_str(if *first { "[" } else { ", " });
    *first = false;
    let _ = write!(out, "{name}=");
    value.write(out, mesh);
}

impl Attr for usize {
    const KIND: &'static str = "number";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        let _ = write!(out, "{self}");
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<usize, ParseError> {
        cursor.number("a number")
    }
}

impl Attr for bool {
    const KIND: &'static str = "true or false";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        let _ = write!(out, "{self}");
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<bool, ParseError> {
        cursor.one_of("true or false", |word| word.parse().ok())
    }
}

/// True or false; programs write it only if it is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flag(pub bool);

impl Attr for Flag {
    const KIND: &'static str = "true, or left out";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        self.0.write(out, mesh);
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Flag, ParseError> {
        cursor.expect("true").map(|()| Flag(true))
    }
    fn left_out() -> Option<Flag> {
        Some(Flag(false))
    }
}

impl Attr for f64 {
    const KIND: &'static str = "float";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        write_float(out, *self);
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<f64, ParseError> {
        cursor.float()
    }
    fn same(&self, other: &f64) -> bool {
        self.to_bits() == other.to_bits()
    }
}

/// Appends a float so that it parses back to the same bits.
pub fn write_float(out: &mut String, x: f64) {
    let _ = if x.is_nan() {
        if x.to_bits() == f64::NAN.to_bits() {
            write!(out, "nan")
        } else {
            write!(out, "nan({:#x})", x.to_bits())
        }
    } else {
        write!(out, "{x:?}")
    };
}

impl Attr for Dtype {
    const KIND: &'static str = "element type";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        out.push_str(self.name());
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Dtype, ParseError> {
        cursor.dtype()
    }
}

impl Attr for Index {
    const KIND: &'static str = "size expression";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        let _ = write!(out, "{}", self.display(mesh));
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Index, ParseError> {
        cursor.index()
    }
    fn indices(&self, f: &mut dyn FnMut(&Index)) {
        f(self);
    }
}

impl Attr for Sym {
    const KIND: &'static str = "symbol";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        let _ = write!(out, "{}", Index::sym(*self).display(mesh));
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Sym, ParseError> {
        cursor.sym()
    }
}

impl Attr for GroupName {
    const KIND: &'static str = "group: an axis, (axes), or a list group";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        out.push_str(&mesh.group_text(*self));
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<GroupName, ParseError> {
        cursor.group()
    }
    fn groups(&self, f: &mut dyn FnMut(GroupName)) {
        f(*self);
    }
}

impl<A: Attr + ListAttr> Attr for Vec<A> {
    const KIND: &'static str = A::LIST;
    fn write(&self, out: &mut String, mesh: &Mesh) {
        out.push('[');
        for (i, item) in self.iter().enumerate() {
            out.push_str(if i == 0 { "" } else { ", " });
            item.write(out, mesh);
        }
        out.push(']');
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Vec<A>, ParseError> {
        if !cursor.eat("[") {
            return Err(cursor.expected(&format!("a {}", A::LIST)));
        }
        cursor.list("]", A::read)
    }
    fn same(&self, other: &Vec<A>) -> bool {
        self.len() == other.len() && self.iter().zip(other).all(|(a, b)| a.same(b))
    }
    fn indices(&self, f: &mut dyn FnMut(&Index)) {
        self.iter().for_each(|item| item.indices(f));
    }
}

/// An attribute that can form lists; `LIST` describes the list.
pub trait ListAttr {
    /// The list in words.
    const LIST: &'static str;
}

impl ListAttr for usize {
    const LIST: &'static str = "list of numbers";
}
impl ListAttr for Index {
    const LIST: &'static str = "list of size expressions";
}
impl ListAttr for Sym {
    const LIST: &'static str = "list of symbols";
}
impl ListAttr for f64 {
    const LIST: &'static str = "list of floats";
}

/// A value or `none`.
impl<A: Attr + OptionAttr> Attr for Option<A> {
    const KIND: &'static str = A::OPTION;
    fn write(&self, out: &mut String, mesh: &Mesh) {
        match self {
            None => out.push_str("none"),
            Some(value) => value.write(out, mesh),
        }
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Option<A>, ParseError> {
        if cursor.eat("none") { Ok(None) } else { A::read(cursor).map(Some) }
    }
    fn same(&self, other: &Option<A>) -> bool {
        match (self, other) {
            (Some(a), Some(b)) => a.same(b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }
    fn indices(&self, f: &mut dyn FnMut(&Index)) {
        if let Some(value) = self {
            value.indices(f);
        }
    }
}

/// An attribute that may be absent; `OPTION` describes it.
pub trait OptionAttr {
    /// The kind in words.
    const OPTION: &'static str;
}

impl OptionAttr for Index {
    const OPTION: &'static str = "size expression or none";
}
impl OptionAttr for Vec<Index> {
    const OPTION: &'static str = "list of size expressions or none";
}
