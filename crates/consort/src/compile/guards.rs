//! The guards of a compiled function on its arguments, and the leaves of a call's arguments.

use std::fmt::{Display, Write};
use std::rc::Rc;

use consort_ir::index::{Index, Sym, SymbolFacts};
use consort_ir::mesh::Mesh;
use consort_ir::types::TensorType;
use consort_types::{Axes, Dtype, Failure};
use smallvec::SmallVec;

use super::parts::is_of;
use crate::flatten::{Flatten, Static, Visit};
use crate::placement::{Origin, as_declared};
use crate::tensor::{Tensor, constant_shape};
use crate::trace::Peers;
use crate::world::World;

/// A leaf of a call's arguments.
#[derive(Clone, PartialEq)]
pub(crate) enum Leaf {
    Tensor(Rc<TensorType>, Origin),
    Number(i64),
    /// A size that depends on the rank; it stays an expression.
    Expression(Index),
    Setting(Setting),
}

/// An owned setting.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Setting {
    Int(i128),
    /// Compared by bits, so that NaN equals itself.
    Float(u64),
    Text(String),
}

impl Setting {
    fn new(setting: Static<'_>) -> Setting {
        match setting {
            Static::Int(number) => Setting::Int(number),
            Static::Float(number) => Setting::Float(number.to_bits()),
            Static::Text(text) => Setting::Text(text.to_string()),
        }
    }

    fn is(&self, setting: Static<'_>) -> bool {
        match (self, setting) {
            (Setting::Int(own), Static::Int(other)) => *own == other,
            (Setting::Float(own), Static::Float(other)) => *own == other.to_bits(),
            (Setting::Text(own), Static::Text(other)) => own == other,
            _ => false,
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Setting::Int(number) => number.to_string(),
            Setting::Float(bits) => format!("{:?}", f64::from_bits(*bits)),
            Setting::Text(text) => format!("{text:?}"),
        }
    }
}

/// A size that a compiled function expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Is(i64),
    /// Any size from the minimum up; a symbol is bound to it.
    Symbol(Sym, i64),
}

/// The guard on a leaf of the arguments.
#[derive(Clone, PartialEq)]
pub(crate) enum Expected {
    Tensor {
        dtype: Dtype,
        varies: Axes,
        sizes: Vec<Size>,
        /// Whether it differs over these axes because its origin is equal on all ranks, which each call compares.
        by_origin: bool,
        /// Its origin when it was traced.
        origin: Origin,
        seen: Rc<TensorType>,
    },
    Number(Size),
    Expression(Index),
    Setting(Setting),
}

/// The guards of a compiled function on its arguments, and what its ranks agreed on besides.
#[derive(Clone)]
pub(crate) struct Pattern {
    pub(crate) leaves: Vec<Expected>,
    pub(crate) symbols: Vec<(Sym, SymbolFacts)>,
    /// The peers that ranks name by different numbers, if any do.
    pub(crate) peers: Option<Rc<Peers>>,
    /// The axes along which the roles of its ranks differ: its arguments differ over them too.
    pub(crate) roles_over: Axes,
    /// The axes that the ranks which compare its arguments span: what is declared over others is not known here.
    pub(crate) covered: Axes,
    /// Symbols that may have one value only, since what was checked with other roles depends on it.
    pub(crate) fixed: Vec<(Sym, i64)>,
    /// Whether tensors that are taken as equal because of how they were made must be made like those that ranks have
    /// compared: later calls compare nothing.
    pub(crate) exact: bool,
}

/// What a call gives a pattern.
#[derive(Default)]
pub(crate) struct Bound {
    /// The values of its symbols, in order.
    pub(crate) sizes: SmallVec<[i64; 8]>,
    /// A digest of the origins that must be equal on all ranks.
    pub(crate) origins: u64,
}

/// The leaves of the arguments, of which declarations over the axes in `covered` count.
pub(crate) fn leaves_of(args: &impl Flatten, covered: Axes) -> Vec<Leaf> {
    struct Collect(Vec<Leaf>, Axes);
    impl Visit for Collect {
        fn tensor(&mut self, tensor: &Tensor) {
            self.0.push(Leaf::Tensor(Rc::clone(&tensor.ty), tensor.origin));
        }
        fn equal_over(&mut self, tensor: &Tensor, _: &'static str, axes: &[&'static str]) {
            let ty = World::current().map(|world| as_declared(tensor, &world, axes, self.1));
            self.0.push(Leaf::Tensor(ty.unwrap_or_else(|_| Rc::clone(&tensor.ty)), tensor.origin));
        }
        fn index(&mut self, index: &crate::Index) {
            self.0.push(match index.0.as_const() {
                Some(number) => Leaf::Number(number),
                None => Leaf::Expression(index.0.clone()),
            });
        }
        fn setting(&mut self, setting: Static<'_>) {
            self.0.push(Leaf::Setting(Setting::new(setting)));
        }
    }
    let mut collect = Collect(Vec::new(), covered);
    args.visit(&mut collect);
    collect.0
}

/// The field of each leaf of the arguments, in order, and whether it is a setting; empty for those in no field.
pub(crate) fn leaf_names(args: &impl Flatten) -> Vec<(String, bool)> {
    #[derive(Default)]
    struct Names {
        names: Vec<(String, bool)>,
        path: Vec<String>,
    }
    impl Names {
        fn leaf(&mut self, is_setting: bool) {
            // Places in lists and tuples are numbers.
            let field = self.path.iter().rev().find(|field| !field.starts_with(|c: char| c.is_ascii_digit()));
            self.names.push((field.cloned().unwrap_or_default(), is_setting));
        }
    }
    impl Visit for Names {
        fn tensor(&mut self, _: &Tensor) {
            self.leaf(false);
        }
        fn index(&mut self, _: &crate::Index) {
            self.leaf(false);
        }
        fn setting(&mut self, _: Static<'_>) {
            self.leaf(true);
        }
        fn enter(&mut self, field: &dyn Display) {
            self.path.push(field.to_string());
        }
        fn leave(&mut self) {
            self.path.pop();
        }
    }
    let mut names = Names::default();
    args.visit(&mut names);
    names.names
}

/// Calls `f` with each tensor of the arguments.
pub(crate) fn for_each_tensor(args: &impl Flatten, f: impl FnMut(&Tensor)) {
    args.visit(&mut crate::flatten::VisitTensors(f));
}

struct Check<'a> {
    world: &'a World,
    expected: std::slice::Iter<'a, Expected>,
    bound: Bound,
    fits: bool,
    roles_over: Axes,
    covered: Axes,
    exact: bool,
}

impl Check<'_> {
    fn size(&mut self, expected: &Size, got: i64) {
        match expected {
            Size::Is(size) => self.fits &= *size == got,
            Size::Symbol(_, least) => {
                self.fits &= got >= *least;
                self.bound.sizes.push(got);
            }
        }
    }
}

impl Check<'_> {
    /// A tensor, of this type.
    #[inline]
    fn tensor_of(&mut self, tensor: &Tensor, ty: &Rc<TensorType>) {
        let Some(Expected::Tensor { dtype, varies, sizes, by_origin, origin, seen }) = self.expected.next()
        else {
            self.fits = false;
            return;
        };
        self.fits &= tensor.storage.is_some() && is_of(tensor, self.world);
        // Along the axes of roles, all tensors are taken to differ.
        let is_placed = ty.varies.union(self.roles_over) == varies.union(self.roles_over);
        if *by_origin {
            let is_made = tensor.origin.varies(ty, self.covered) == *varies;
            self.fits &= is_placed || (is_made && (!self.exact || tensor.origin == *origin));
            self.bound.origins = self.bound.origins.rotate_left(5) ^ tensor.origin.digest;
        }
        if !Rc::ptr_eq(ty, seen) {
            self.fits &= ty.dtype == *dtype && (*by_origin || is_placed) && ty.shape.len() == sizes.len();
        }
        for (expected, got) in sizes.iter().zip(&tensor.layout.shape) {
            self.size(expected, *got as i64);
        }
    }
}

impl Visit for Check<'_> {
    #[inline]
    fn tensor(&mut self, tensor: &Tensor) {
        self.tensor_of(tensor, &tensor.ty);
    }
    fn equal_over(&mut self, tensor: &Tensor, _: &'static str, axes: &[&'static str]) {
        self.tensor_of(tensor, &as_declared(tensor, self.world, axes, self.covered));
    }
    fn index(&mut self, index: &crate::Index) {
        match (self.expected.next(), index.0.as_const()) {
            (Some(Expected::Number(size)), Some(number)) => self.size(size, number),
            (Some(Expected::Expression(own)), None) => self.fits &= *own == index.0,
            _ => self.fits = false,
        }
    }
    fn setting(&mut self, setting: Static<'_>) {
        self.fits &= matches!(self.expected.next(), Some(Expected::Setting(own)) if own.is(setting));
    }
}

impl Pattern {
    /// Whether a tensor is taken as equal because of how it was made.
    pub(crate) fn has_origins(&self) -> bool {
        self.leaves.iter().any(|leaf| matches!(leaf, Expected::Tensor { by_origin: true, .. }))
    }

    /// The values of the symbols, or `None` if a guard fails.
    #[inline]
    pub(crate) fn bind(&self, args: &impl Flatten, world: &World) -> Option<Bound> {
        let (expected, bound) = (self.leaves.iter(), Bound::default());
        let (roles_over, covered, exact) = (self.roles_over, self.covered, self.exact);
        let mut check = Check { world, expected, bound, fits: true, roles_over, covered, exact };
        args.visit(&mut check);
        (check.fits && check.expected.next().is_none()).then_some(check.bound)
    }

    /// The expected sizes of all leaves, in order.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = &Size> {
        self.leaves.iter().flat_map(|leaf| match leaf {
            Expected::Tensor { sizes, .. } => &sizes[..],
            Expected::Number(size) => std::slice::from_ref(size),
            Expected::Expression(_) | Expected::Setting(_) => &[],
        })
    }

    /// Notes on symbols whose sizes differ between ranks, or that a failure names: the argument that binds each, and
    /// its value on each rank.
    pub(crate) fn sizes_named(
        &self,
        (all, ranks): (&[Signature], &[usize]),
        mesh: &Mesh,
        failure: &Failure,
    ) -> Vec<String> {
        let texts = [&failure.expected, &failure.got].into_iter().chain(&failure.notes);
        let is_other = |c: char| !c.is_ascii_alphanumeric();
        let words: Vec<&str> = texts.flat_map(|text| text.split(is_other)).collect();
        let mut notes = Vec::new();
        let (mut at, mut tensor) = (0, 0);
        for leaf in &self.leaves {
            let sizes: &[Size] = match leaf {
                Expected::Tensor { sizes, .. } => sizes,
                Expected::Number(size) => std::slice::from_ref(size),
                _ => &[],
            };
            for (dim, size) in sizes.iter().enumerate() {
                let values: Vec<i64> = all.iter().filter_map(|one| one.sizes.get(at).copied()).collect();
                at += 1;
                let Size::Symbol(sym, _) = size else { continue };
                let name = Index::sym(*sym).display(mesh).to_string();
                let is_same = values.iter().all(|value| *value == values[0]);
                if is_same && !words.contains(&name.as_str()) {
                    continue;
                }
                let what = match leaf {
                    Expected::Tensor { .. } => format!("dimension {dim} of tensor {tensor} of the arguments"),
                    _ => "a number among the arguments".to_string(),
                };
                let ranks = ranks.iter().zip(&values).map(|(rank, value)| match is_same {
                    true => value.to_string(),
                    false => format!("{value} on rank {rank}"),
                });
                let ranks: Vec<String> = ranks.take(if is_same { 1 } else { values.len() }).collect();
                notes.push(format!("{name} is {what}: {}", ranks.join(", ")));
            }
            tensor += usize::from(matches!(leaf, Expected::Tensor { .. }));
        }
        notes
    }
}

/// A number for the kind of a leaf, without its sizes and settings.
pub(crate) fn is_kind_of(leaf: &Leaf) -> u64 {
    match leaf {
        Leaf::Tensor(ty, _) => 16 + ty.shape.len() as u64,
        Leaf::Number(_) => 1,
        Leaf::Expression(_) => 2,
        Leaf::Setting(_) => 3,
    }
}

impl Expected {
    pub(crate) fn text(&self, mesh: &Mesh) -> String {
        let size = |size: &Size| match size {
            Size::Is(size) => size.to_string(),
            Size::Symbol(sym, _) => Index::sym(*sym).display(mesh).to_string(),
        };
        match self {
            Expected::Tensor { .. } => self.ty().map_or_else(String::new, |ty| ty.display(mesh).to_string()),
            Expected::Number(number) => size(number),
            Expected::Expression(index) => index.display(mesh).to_string(),
            Expected::Setting(setting) => setting.text(),
        }
    }

    /// The axes over which a tensor may differ.
    pub(crate) fn varies(&self) -> Option<Axes> {
        if let Expected::Tensor { varies, .. } = self { Some(*varies) } else { None }
    }

    /// The type in a trace, with symbolic sizes.
    pub(crate) fn ty(&self) -> Option<TensorType> {
        let Expected::Tensor { dtype, varies, sizes, .. } = self else { return None };
        let size = |size: &Size| match size {
            Size::Is(size) => Index::constant(*size),
            Size::Symbol(sym, _) => Index::sym(*sym),
        };
        Some(TensorType::new(*dtype, sizes.iter().map(size).collect(), *varies))
    }
}

impl Leaf {
    pub(super) fn text(&self, mesh: &Mesh) -> String {
        match self {
            Leaf::Tensor(ty, _) => ty.display(mesh).to_string(),
            Leaf::Number(number) => number.to_string(),
            Leaf::Expression(index) => index.display(mesh).to_string(),
            Leaf::Setting(setting) => setting.text(),
        }
    }

    pub(super) fn sizes(&self) -> Vec<i64> {
        match self {
            Leaf::Tensor(ty, _) => ty.shape.iter().map(|size| size.as_const().unwrap_or(-1)).collect(),
            Leaf::Number(number) => vec![*number],
            _ => Vec::new(),
        }
    }

    /// The same without its sizes: the part that must be equal on all ranks.
    fn kind(&self, mesh: &Mesh) -> String {
        match self {
            Leaf::Tensor(ty, _) => {
                let ty = ty.with_shape(constant_shape(&vec![0; ty.shape.len()]));
                ty.display(mesh).to_string().replace('0', "?")
            }
            Leaf::Number(_) => "a number".to_string(),
            other => other.text(mesh),
        }
    }
}

/// What a rank proposes to trace with: kinds, which must be equal on all ranks, sizes, and which sizes become symbols.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) kinds: Vec<String>,
    pub(crate) sizes: Vec<i64>,
    pub(crate) symbols: Vec<bool>,
    /// The digests of the origins of its tensors.
    pub(crate) origins: Vec<u64>,
}

impl Signature {
    /// The signature of these arguments: sizes that differ from those of earlier compilations become symbols.
    pub(crate) fn new(
        leaves: &[Leaf],
        before: Option<&[Option<i64>]>,
        dynamic: &[(usize, usize)],
        mesh: &Mesh,
    ) -> Signature {
        let kinds = leaves.iter().map(|leaf| leaf.kind(mesh)).collect();
        let (mut sizes, mut symbols) = (Vec::new(), Vec::new());
        let mut tensors = 0;
        for leaf in leaves {
            for (dim, size) in leaf.sizes().iter().enumerate() {
                let changed = before
                    .and_then(|before| before.get(sizes.len()))
                    .is_some_and(|seen| *seen != Some(*size));
                let declared = matches!(leaf, Leaf::Tensor(..)) && dynamic.contains(&(tensors, dim));
                sizes.push(*size);
                symbols.push(changed || declared);
            }
            tensors += usize::from(matches!(leaf, Leaf::Tensor(..)));
        }
        let origin =
            |leaf: &Leaf| if let Leaf::Tensor(_, origin) = leaf { Some(origin.digest) } else { None };
        Signature { kinds, sizes, symbols, origins: leaves.iter().filter_map(origin).collect() }
    }

    /// Encodes it for the other ranks.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut text = self.origins.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        text.push('\n');
        for (size, symbol) in self.sizes.iter().zip(&self.symbols) {
            let _ = writeln!(text, "{size} {}", u8::from(*symbol));
        }
        text.push('\n');
        text.push_str(&self.kinds.join("\n"));
        text.into_bytes()
    }

    /// Decodes another rank's signature.
    pub(crate) fn read(bytes: &[u8]) -> Option<Signature> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (origins, text) = text.split_once('\n')?;
        let origins = origins.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
        let (numbers, kinds) = match text.strip_prefix('\n') {
            Some(kinds) => ("", kinds),
            None => text.split_once("\n\n")?,
        };
        let (mut sizes, mut symbols) = (Vec::new(), Vec::new());
        for line in numbers.lines() {
            let (size, symbol) = line.split_once(' ')?;
            sizes.push(size.parse().ok()?);
            symbols.push(symbol == "1");
        }
        let kinds =
            if kinds.is_empty() { Vec::new() } else { kinds.split('\n').map(str::to_string).collect() };
        Some(Signature { kinds, sizes, symbols, origins })
    }

    /// The pattern to trace with, from all ranks' signatures of equal kinds: a size is a symbol if a rank proposes one,
    /// or if ranks differ.
    /// Unless later calls compare origins, nothing is taken as equal because of how it was made.
    pub(crate) fn pattern(
        leaves: &[Leaf],
        all: &[Signature],
        mesh: &Mesh,
        covered: Axes,
        compared: bool,
    ) -> Pattern {
        let (mut next, mut tensors) = (0, 0);
        let mut symbols: Vec<(Sym, SymbolFacts)> = Vec::new();
        let mut size = |own: i64, is_number: bool, over: Axes| {
            let at = next;
            next += 1;
            let values = || all.iter().filter_map(move |one| one.sizes.get(at).copied());
            let differ = values().any(|other| other != own);
            let wanted = all.iter().any(|one| one.symbols.get(at).copied().unwrap_or(false));
            // Sizes 0 and 1 have special meanings (empty, broadcast): they are values of a symbol only if ranks differ in
            // it, since then some rank may well have one of them at a later call.
            let least = values().min().unwrap_or(own);
            if !differ && (!wanted || (!is_number && own < 2)) {
                return Size::Is(own);
            }
            let sym = Sym::Backed(symbols.len() as u32);
            // A tensor that is declared equal over axes has equal sizes along them.
            let varies = if differ { over } else { Axes::NONE };
            let min = if is_number || differ { least.min(0) } else { least.min(2) };
            symbols.push((sym, SymbolFacts { min, varies, ..SymbolFacts::default() }));
            Size::Symbol(sym, min)
        };
        let leaves = leaves.iter().map(|leaf| match leaf {
            Leaf::Tensor(ty, origin) => {
                let at = tensors;
                tensors += 1;
                let by_origin = compared
                    && *origin != Origin::NONE
                    && all.iter().all(|one| one.origins.get(at).copied() == Some(origin.digest));
                let varies = if by_origin { origin.varies(ty, covered) } else { ty.varies };
                let size = |own: &Index| size(own.as_const().unwrap_or(-1), false, varies);
                Expected::Tensor {
                    dtype: ty.dtype,
                    varies,
                    sizes: ty.shape.iter().map(size).collect(),
                    by_origin,
                    origin: *origin,
                    seen: Rc::clone(ty),
                }
            }
            Leaf::Number(number) => Expected::Number(size(*number, true, mesh.all_axes())),
            Leaf::Expression(index) => Expected::Expression(index.clone()),
            Leaf::Setting(setting) => Expected::Setting(setting.clone()),
        });
        let leaves = leaves.collect();
        Pattern {
            leaves,
            symbols,
            peers: None,
            roles_over: Axes::NONE,
            covered,
            fixed: Vec::new(),
            exact: false,
        }
    }
}
