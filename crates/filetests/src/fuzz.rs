//! Properties of any text: it is refused with a position, or it is a program whose checks, printing, passes and small
//! runs end without a panic, with the same results after the passes.

use consort_ir::index::Index;
use consort_ir::literal::Literal;
use consort_ir::ops::{Flow, OpTable, Trips};
use consort_ir::program::{Block, Func, Program};
use consort_ir::text::{parse, print, run_lines};
use consort_ir::types::Type;
use consort_ir::verify::{hazards, verify};
use consort_passes::{PASSES, PassCx, PassError, simplify};
use consort_types::Dtype;

/// Runs one text through everything that reads programs. Panics if a property fails.
pub fn check_text(text: &str, ops: &OpTable) {
    // Run lines are read from the same files.
    let _ = run_lines(text);
    let parsed = match parse(text, ops) {
        Ok(parsed) => parsed,
        Err(error) => {
            assert!(error.line >= 1 && error.column >= 1 && !error.headline.to_string().is_empty());
            return;
        }
    };
    let printed = print(&parsed.program);
    let again = parse(&printed, ops)
        .unwrap_or_else(|error| panic!("printed text does not parse: {error}\n{printed}"));
    assert_eq!(print(&again.program), printed, "printing twice differs");
    let errors = verify(&parsed.program);
    let lines: Vec<&str> = text.lines().collect();
    for error in &errors {
        assert!(!error.render("text", &lines, &parsed.lines).is_empty());
    }
    if !errors.is_empty() {
        return;
    }
    for func in &parsed.program.funcs {
        let _ = hazards(&parsed.program.mesh, func);
    }
    let simple = match simplify(&parsed.program, PASSES, &mut PassCx::default()) {
        Ok(simple) => simple,
        Err(PassError::Planned { .. }) => parsed.program.clone(),
        Err(error) => panic!("{error}\n{printed}"),
    };
    if parsed.program.mesh.n_ranks() <= 8 {
        for func in parsed.program.funcs.iter().filter(|func| is_small(func, &func.body)) {
            let inputs = zeros(&parsed.program, func);
            // A failing node may have been removed, so only successful runs are compared.
            let Ok(expected) = consort_oracle::run(&parsed.program, &func.name, &inputs) else { continue };
            let got = consort_oracle::run(&simple, &func.name, &inputs).unwrap_or_default();
            let same = expected.iter().flatten().zip(got.iter().flatten()).all(|(a, b)| a.same(b));
            assert!(same && expected.len() == got.len(), "passes change what comes of\n{printed}");
        }
    }
}

/// Whether the sizes and loops of a function are small enough to run it here.
fn is_small(func: &Func, block: &Block) -> bool {
    let small = |index: &Index| index.as_const().is_none_or(|n| n <= 64);
    block.params.iter().chain(block.nodes.iter().flat_map(|node| &node.results)).all(|value| {
        let mut fits = func.ty(*value).is_none_or(|ty| ty.as_tensor().is_none_or(|t| t.rank() <= 4));
        if let Some(ty) = func.ty(*value) {
            ty.indices(&mut |index| fits &= small(index));
        }
        fits
    }) && block.nodes.iter().all(|node| {
        let short = match node.op.flow() {
            Flow::Loop { trips: Trips::Count(length), .. } => small(length),
            Flow::Loop { trips: Trips::While { limit, .. }, .. } => limit <= 64,
            Flow::Straight | Flow::Cond => true,
        };
        short && node.blocks.iter().all(|inside| is_small(func, inside))
    })
}

/// Zeros for every parameter, with 2 for every symbol; the oracle refuses inputs that do not fit.
fn zeros(program: &Program, func: &Func) -> Vec<Vec<Literal>> {
    let arg = |ty: Option<&Type>| match ty {
        Some(Type::Tensor(tensor)) => {
            let size = |index: &Index| index.as_const().map_or(2, |n| n.clamp(0, 64) as usize);
            Literal::zeros(tensor.dtype, tensor.shape.iter().map(size).collect())
        }
        _ => Literal::ints(Dtype::I64, vec![], vec![2]),
    };
    let args: Vec<Literal> = func.body.params.iter().map(|param| arg(func.ty(*param))).collect();
    vec![args; program.mesh.n_ranks() as usize]
}
