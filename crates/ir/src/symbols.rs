//! Checks values of symbols against a function's declarations and guards.

use std::collections::BTreeMap;

use consort_types::Rank;

use crate::index::{Guard, Index, Sym, SymbolFacts};
use crate::mesh::Mesh;
use crate::ops::EvalCx;
use crate::program::Func;

/// Checks values of a function's symbols against its declarations and guards.
pub fn check_symbols(
    mesh: &Mesh,
    rank: Rank,
    func: &Func,
    symbols: &BTreeMap<Sym, i64>,
) -> Result<(), String> {
    let (declared, default) = (func.declarations(), SymbolFacts::default());
    for (sym, value) in symbols {
        let facts = declared.get(sym).copied().unwrap_or(&default);
        if !facts.allow(*value) {
            let name = Index::sym(*sym).display(mesh).to_string();
            return Err(format!("{name} is {value}, but the function declares {facts}"));
        }
    }
    check_guards(mesh, rank, &func.guards, symbols)
}

/// Checks those guards whose symbols all have a value.
pub fn check_guards<'a>(
    mesh: &Mesh,
    rank: Rank,
    guards: impl IntoIterator<Item = &'a Guard>,
    symbols: &BTreeMap<Sym, i64>,
) -> Result<(), String> {
    let cx = EvalCx { mesh, rank, symbols };
    for guard in guards {
        let mut unbound = false;
        guard.symbols(&mut |sym| {
            unbound |= matches!(sym, Sym::Backed(_) | Sym::Unbacked(_)) && !symbols.contains_key(&sym);
        });
        if unbound {
            continue;
        }
        let (Guard::Eq(a, b) | Guard::Le(a, b)) = guard;
        let (a, b) = (cx.index(a).map_err(|e| e.to_string())?, cx.index(b).map_err(|e| e.to_string())?);
        let holds = if matches!(guard, Guard::Eq(..)) { a == b } else { a <= b };
        if !holds {
            return Err(format!("guard `{}` failed: {a} and {b}", guard.display(mesh)));
        }
    }
    Ok(())
}
