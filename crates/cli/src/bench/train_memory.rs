//! The memory of a step of training, from its plan: weights apart from activations, and what the backward finds.

use std::collections::BTreeSet;

use consort_ir::entity::Value;
use consort_ir::index::{Index, Sym};
use consort_ir::ops::OpTable;
use consort_ir::plan::Region;
use consort_ir::text::parse;
use consort_ir::types::Type;
use consort_passes::alive;

/// Bytes on a rank, each the largest sum that is alive at one time. Activations are the values of which a size depends on the
/// number of rows; all others (parameters, gradients, state of the optimizer, weights that are gathered) count as weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    /// Of weights, over the whole step. Those that are arguments are there during all of it.
    pub(super) weights: u64,
    /// Of activations, over the whole step, without the data.
    pub(super) activations: u64,
    /// Of activations that are computed before the loss and read after it.
    pub(super) saved: u64,
}

impl Memory {
    /// Reads the plan of a step whose first result is the loss, and whose argument number `data` has a symbol for the number
    /// of its rows. `None` if nothing is computed of that.
    pub(super) fn of(plan: &str, data: usize) -> Option<Memory> {
        let program = parse(plan, &OpTable::built_in()).ok()?.program;
        let (mesh, func) = (&program.mesh, program.funcs.first()?);
        let rows = func.ty(*func.body.params.get(data)?)?.as_tensor()?.shape.first()?;
        let depends = |value: Value| {
            let tensors = func.ty(value).map_or(&[][..], Type::tensors);
            tensors
                .iter()
                .flat_map(|tensor| &tensor.shape)
                .any(|size| symbols(size).is_superset(&symbols(rows)))
        };
        // In the storage of arguments lie only the data, and weights that are repeated for each row.
        let is_own = |value: Value, region: Region| depends(value) && !region.is_arg();
        let activations = alive(mesh, func, None, is_own);
        let loss = func.body.results.first().copied()?;
        (!symbols(rows).is_empty() && activations > 0).then(|| Memory {
            weights: alive(mesh, func, None, |value, _| !depends(value)),
            activations,
            saved: alive(mesh, func, Some(loss), is_own),
        })
    }
}

fn symbols(size: &Index) -> BTreeSet<Sym> {
    let mut symbols = BTreeSet::new();
    size.symbols(&mut |sym| _ = symbols.insert(sym));
    symbols
}
