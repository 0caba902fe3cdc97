//! Indices as programs write them. What is printed reads back as the same index.

use std::fmt;

use super::{Atom, Index, Sym};
use crate::mesh::Mesh;

impl Index {
    /// The index as programs write it, with the names that the mesh gives to axes and groups.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| self.print(f, mesh))
    }

    fn print(&self, f: &mut fmt::Formatter<'_>, mesh: &Mesh) -> fmt::Result {
        if self.is_invalid() {
            return f.write_str("invalid");
        }
        for (i, (factors, c)) in self.pieces().enumerate() {
            match (c < 0, i) {
                (true, _) => f.write_str("-")?,
                (false, 0) => {}
                (false, _) => f.write_str("+")?,
            }
            // A quotient or remainder needs no parentheses only if it is alone in its term.
            let alone = c == 1 && factors.len() == 1;
            let mut times = "";
            if c.unsigned_abs() != 1 || factors.is_empty() {
                write!(f, "{}", c.unsigned_abs())?;
                times = "*";
            }
            for atom in factors {
                f.write_str(times)?;
                parenthesised(f, !alone && matches!(atom, Atom::Div(..) | Atom::Mod(..)), &|f| {
                    atom.print(f, mesh)
                })?;
                times = "*";
            }
        }
        if self.as_const() == Some(0) { f.write_str("0") } else { Ok(()) }
    }
}

impl Atom {
    fn print(&self, f: &mut fmt::Formatter<'_>, mesh: &Mesh) -> fmt::Result {
        let call = |f: &mut fmt::Formatter<'_>, name: &str| {
            for (i, child) in self.children().enumerate() {
                write!(f, "{}{}", if i == 0 { name } else { "," }, child.display(mesh))?;
            }
            f.write_str(")")
        };
        match self {
            Atom::Sym(Sym::Backed(id)) => write!(f, "s{id}"),
            Atom::Sym(Sym::Unbacked(id)) => write!(f, "u{id}"),
            Atom::Sym(Sym::Rank(axis)) => write!(f, "rank({})", mesh.axis_name(*axis)),
            Atom::Sym(Sym::GroupRank(group)) => write!(f, "rank({})", mesh.group_name(*group)),
            Atom::Div(a, b) | Atom::Mod(a, b) => {
                // Operators of one precedence bind to the left, so a product may stand before them bare.
                let bare = a.pieces().count() <= 1 && a.pieces().all(|(_, c)| c > 0);
                parenthesised(f, !bare, &|f| a.print(f, mesh))?;
                f.write_str(if matches!(self, Atom::Div(..)) { "/" } else { "%" })?;
                let bare = match b.as_atom() {
                    Some(atom) => !matches!(atom, Atom::Div(..) | Atom::Mod(..)),
                    None => b.as_const().is_some_and(|b| b >= 0),
                };
                parenthesised(f, !bare, &|f| b.print(f, mesh))
            }
            Atom::Min(_) => call(f, "min("),
            Atom::Max(_) => call(f, "max("),
            Atom::Pick(..) => call(f, "pick("),
        }
    }
}

fn parenthesised(
    f: &mut fmt::Formatter<'_>,
    needed: bool,
    inside: &dyn Fn(&mut fmt::Formatter<'_>) -> fmt::Result,
) -> fmt::Result {
    f.write_str(if needed { "(" } else { "" })?;
    inside(f)?;
    f.write_str(if needed { ")" } else { "" })
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, &Mesh::default())
    }
}

impl fmt::Debug for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, &Mesh::default())
    }
}
