//! Why a call needed another compilation: which condition of the last one failed, and the line that recorded it.

use consort_ir::index::{Guard, Index, Sym};
use consort_ir::mesh::Mesh;
use consort_types::{Axes, Failure};

use super::Site;
use super::graph::Graph;
use super::guards::{Expected, Leaf, Pattern, Setting, Signature, Size};

/// A call that a compilation does not fit.
pub(super) struct Misfit<'a> {
    pub(super) pattern: &'a Pattern,
    /// The program, if the function has no breaks.
    pub(super) graph: Option<&'a Graph>,
    pub(super) leaves: &'a [Leaf],
    /// The fields of the settings among them; empty for those in no field.
    pub(super) settings: &'a [String],
    /// What the ranks of the function proposed to trace with, and which ranks these are.
    pub(super) signatures: &'a [Signature],
    pub(super) ranks: &'a [usize],
    pub(super) mesh: &'a Mesh,
    /// The line of the call.
    pub(super) site: Site,
}

impl Misfit<'_> {
    /// How many conditions failed.
    pub(super) fn failed(&self) -> usize {
        match self.pattern.leaves.len() == self.leaves.len() {
            true => self.arguments().len().max(1),
            false => usize::MAX,
        }
    }

    /// The conditions that failed, as one failure: the first is its headline, the others are rows.
    pub(super) fn failure(&self) -> Box<Failure> {
        let (expected, got) = (self.pattern.leaves.len(), self.leaves.len());
        if expected != got {
            let headline = (format!("{expected} tensors, numbers and settings"), got.to_string());
            return Failure::new(headline).of("the arguments").at(self.site);
        }
        let mut failed = self.arguments();
        if failed.is_empty() {
            return self.guard().unwrap_or_else(|| self.elsewhere());
        }
        let first = Box::new(failed.remove(0)).at(self.site);
        let first = failed.iter().fold(first, |first, other| first.row(format!("and {}", other.message())));
        failed.into_iter().flat_map(|other| other.notes).fold(first, Failure::note)
    }

    /// The arguments that are not as expected.
    fn arguments(&self) -> Vec<Failure> {
        let (mut failed, mut counts) = (Vec::new(), [0; 3]);
        for (expected, leaf) in self.pattern.leaves.iter().zip(self.leaves) {
            let (kind, noun) = match expected {
                Expected::Tensor { .. } => (0, "tensor"),
                Expected::Number(_) | Expected::Expression(_) => (1, "number"),
                Expected::Setting(_) => (2, "setting"),
            };
            let name = match self.settings.get(counts[2]).filter(|field| kind == 2 && !field.is_empty()) {
                Some(field) => format!("{noun} `{field}` of the arguments"),
                None => format!("{noun} {} of the arguments", counts[kind]),
            };
            counts[kind] += 1;
            self.argument(expected, leaf, &name, &mut failed);
        }
        failed
    }

    fn argument(&self, expected: &Expected, leaf: &Leaf, name: &str, failed: &mut Vec<Failure>) {
        let mesh = self.mesh;
        let mut fail = |of: String, expected: String, got: String| {
            failed.push(*Failure::new((expected, got)).of(of));
        };
        match (expected, leaf) {
            (
                Expected::Tensor { dtype, varies, sizes, by_origin, origin: made, .. },
                Leaf::Tensor(ty, origin),
            ) => {
                if ty.dtype != *dtype {
                    fail(format!("element type of {name}"), dtype.to_string(), ty.dtype.to_string());
                }
                let over = self.pattern.roles_over;
                let is_made = *by_origin
                    && origin.varies(ty, self.pattern.covered) == *varies
                    && (!self.pattern.exact || origin == made);
                if ty.varies.union(over) != varies.union(over) && !is_made {
                    let text = |varies: Axes| match varies.is_empty() {
                        true => "equal on all ranks".to_string(),
                        false => format!("one that may differ over {}", mesh.axes_text(varies)),
                    };
                    fail(format!("placement of {name}"), text(*varies), text(ty.varies));
                }
                if ty.shape.len() != sizes.len() {
                    let dims = |n: usize| format!("{n} dimension{}", if n == 1 { "" } else { "s" });
                    return fail(format!("shape of {name}"), dims(sizes.len()), dims(ty.shape.len()));
                }
                for (dim, (expected, got)) in sizes.iter().zip(&ty.shape).enumerate() {
                    let got = got.as_const().unwrap_or(-1);
                    if !takes(expected, got) {
                        fail(
                            format!("dimension {dim} of {name}"),
                            size_text(expected, mesh),
                            got.to_string(),
                        );
                    }
                }
            }
            (Expected::Number(expected), Leaf::Number(got)) => {
                if !takes(expected, *got) {
                    fail(name.to_string(), size_text(expected, mesh), got.to_string());
                }
            }
            (Expected::Expression(own), Leaf::Expression(other)) if own == other => {}
            (Expected::Setting(own), Leaf::Setting(other)) if own == other => {}
            (expected, leaf) => {
                fail(name.to_string(), expected.text(mesh), leaf.text(mesh));
                let way_out = match leaf {
                    Leaf::Setting(Setting::Int(_)) => {
                        "an Index in its place may change without a compilation"
                    }
                    Leaf::Setting(Setting::Float(_)) => {
                        "a 0-d tensor in its place may change without a compilation"
                    }
                    _ => return,
                };
                if let Some(last) = failed.pop() {
                    failed.push(*Box::new(last).note(way_out));
                }
            }
        }
    }

    /// The condition on sizes that failed, at the line that recorded it.
    fn guard(&self) -> Option<Box<Failure>> {
        let sizes = self.leaves.iter().flat_map(Leaf::sizes);
        let symbol = |(expected, got): (&Size, i64)| match expected {
            Size::Symbol(sym, _) => Some((*sym, got)),
            Size::Is(_) => None,
        };
        let symbols: Vec<(Sym, i64)> = self.pattern.sizes().zip(sizes).filter_map(symbol).collect();
        let (guard, site) = self.graph?.failed_guard(&symbols)?;
        let mut failure =
            Failure::new((format!("`{}`", guard.display(self.mesh)), self.values(guard, &symbols)));
        failure = failure.of("condition on sizes");
        if let Some(site) = site {
            failure = failure.at(site).row(format!("called at {}:{}", self.site.file(), self.site.line()));
        }
        let failure = failure.at(self.site);
        let notes = self.pattern.sizes_named((&[self.own()?], self.ranks), self.mesh, &failure);
        Some(notes.into_iter().fold(failure, Failure::note))
    }

    /// `s0 = 5, s1 = 3`: the values of the symbols of a guard.
    fn values(&self, guard: &Guard, symbols: &[(Sym, i64)]) -> String {
        let mut mentioned = Vec::new();
        guard.symbols(&mut |sym| {
            if !mentioned.contains(&sym) {
                mentioned.push(sym);
            }
        });
        let value = |sym: &Sym| {
            let (_, value) = symbols.iter().find(|(own, _)| own == sym)?;
            Some(format!("{} = {value}", Index::sym(*sym).display(self.mesh)))
        };
        mentioned.iter().filter_map(value).collect::<Vec<_>>().join(", ")
    }

    /// This rank's signature, of sizes alone.
    fn own(&self) -> Option<Signature> {
        let sizes = self.leaves.iter().flat_map(Leaf::sizes).collect();
        Some(Signature { sizes, ..self.signatures.first()?.clone() })
    }

    /// The failure if the compilation fits this rank: the sizes of other ranks that it does not fit.
    fn elsewhere(&self) -> Box<Failure> {
        let names = self.size_names();
        let mut rows = Vec::new();
        for (signature, rank) in self.signatures.iter().zip(self.ranks) {
            let sizes = self.pattern.sizes().zip(&signature.sizes).zip(&names);
            let wrong = sizes.filter(|((expected, got), _)| !takes(expected, **got));
            rows.extend(wrong.map(|((expected, got), name)| {
                format!("rank {rank}: {name}: expected {}, got {got}", size_text(expected, self.mesh))
            }));
        }
        if rows.is_empty() {
            rows = self.unlike_made();
        }
        let headline = "it fits the arguments of this rank, and not those of others";
        rows.into_iter().fold(Failure::new(headline), |failure, row| failure.row(row)).at(self.site)
    }

    /// The tensors that were taken as equal because of how they were made, and that ranks have made of other things.
    fn unlike_made(&self) -> Vec<String> {
        let taken = self.pattern.leaves.iter().filter_map(|leaf| match leaf {
            Expected::Tensor { by_origin, .. } => Some(*by_origin),
            _ => None,
        });
        let differs = |tensor: usize| {
            let mut origins = self.signatures.iter().map(|one| one.origins.get(tensor));
            let first = origins.next();
            origins.any(|other| Some(other) != first)
        };
        let differing = taken.enumerate().filter(|(tensor, taken)| *taken && differs(*tensor));
        let row = |(tensor, _)| {
            format!("tensor {tensor} of the arguments: expected one made of the same numbers on all ranks")
        };
        differing.map(row).collect()
    }

    /// The names of all sizes of the arguments, in order.
    fn size_names(&self) -> Vec<String> {
        let (mut names, mut tensors, mut numbers) = (Vec::new(), 0, 0);
        for leaf in self.leaves {
            match leaf {
                Leaf::Tensor(ty, _) => {
                    let dims = 0..ty.shape.len();
                    names.extend(
                        dims.map(|dim| format!("dimension {dim} of tensor {tensors} of the arguments")),
                    );
                    tensors += 1;
                }
                Leaf::Number(_) => {
                    names.push(format!("number {numbers} of the arguments"));
                    numbers += 1;
                }
                Leaf::Expression(_) => numbers += 1,
                Leaf::Setting(_) => {}
            }
        }
        names
    }
}

fn takes(expected: &Size, got: i64) -> bool {
    match expected {
        Size::Is(size) => *size == got,
        Size::Symbol(_, least) => got >= *least,
    }
}

fn size_text(expected: &Size, mesh: &Mesh) -> String {
    match expected {
        Size::Is(size) => size.to_string(),
        Size::Symbol(sym, least) => format!("{} of at least {least}", Index::sym(*sym).display(mesh)),
    }
}
