//! Every kernel against its op's own evaluation: all element types, operands in every layout, in place if supported.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "table/cases.rs"]
mod cases;
mod common;

use std::collections::{BTreeMap, BTreeSet};

use cases::{Case, Holds, Operand, cases, examples};
use common::{Place, Placed, call, eval_cx, repeated, results};
use consort_ir::literal::Literal;
use consort_ir::ops::BUILT_IN;
use consort_ir::tolerance;
use consort_runtime::kernels::{Kernel, find};
use consort_runtime::threads::Threads;
use consort_types::layout::Layout;
use consort_types::{Dtype, Rng};

/// A tensor for an operand; `special` adds infinities, NaN and zeros of both signs to floats.
fn tensor(operand: &Operand, special: bool, rng: &mut Rng) -> Literal {
    let (dtype, shape) = (operand.dtype, operand.shape.clone());
    let n: usize = shape.iter().product();
    match &operand.holds {
        Holds::Below(end) => {
            return Literal::ints(dtype, shape, (0..n).map(|_| rng.below(*end) as i64).collect());
        }
        Holds::These(tensor) => return tensor.clone(),
        Holds::Anything => {}
    }
    if !dtype.is_float() {
        let (low, high) = dtype.int_range();
        let number = |at: usize| [low, high, 0, 1, -1][at];
        let small = |x: u64| (x % 40) as i64 - 20;
        let pick = |rng: &mut Rng| match rng.below(12) {
            at @ 0..5 => number(at),
            _ => small(rng.next_u64()),
        };
        return Literal::ints(dtype, shape, (0..n).map(|_| pick(rng)).collect());
    }
    let specials = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1.0, 1e-40, -2.5];
    let pick = |rng: &mut Rng| {
        if special && rng.below(12) == 0 {
            return rng.pick(&specials);
        }
        let wide = [1.0, 1.0, 1.0, 10.0, 100.0][rng.below(5)];
        ((rng.next_u64() >> 11) as f64 / (1u64 << 52) as f64 - 1.0) * wide
    };
    Literal::floats(dtype, shape, (0..n).map(|_| pick(rng)).collect())
}

/// The types and shapes of the results of a case, if the op's rule accepts the operands.
fn results_of(case: &Case) -> Option<Vec<(Dtype, Vec<usize>)>> {
    let operand = |operand: &Operand| (operand.dtype, operand.shape.clone());
    results(&*case.op, &case.operands.iter().map(operand).collect::<Vec<_>>())
}

/// The threads on which each kernel runs.
struct Bench {
    threads: [Threads; 2],
}

impl Bench {
    /// Runs a kernel and compares; operands that are `None` alias the first result, which initially holds `first`.
    fn run(
        &self,
        case: &Case,
        results: &[(Dtype, Vec<usize>)],
        operands: &[Option<&Placed>],
        first: Option<&Literal>,
    ) -> Result<(), String> {
        let name = case.op.info().name;
        let tensors: Vec<&Literal> =
            operands.iter().map(|x| x.map_or_else(|| first.unwrap(), |x| &x.tensor)).collect();
        for threads in &self.threads {
            let got = call(&*case.op, operands, first, results, threads);
            let got = got.map_err(|error| format!("{name}: {error}"))?;
            tolerance::check(&*case.op, &eval_cx(), &tensors, &got)?;
        }
        Ok(())
    }

    /// Runs a case in all variants; returns the failures.
    fn check(
        &self,
        kernel: &Kernel,
        case: &Case,
        results: &[(Dtype, Vec<usize>)],
        rng: &mut Rng,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut note = |how: String, outcome: Result<(), String>| {
            if let Err(error) = outcome {
                wrong.push(format!("{error}\n    {:?} of {}, {how}", case.op, types(case)));
            }
        };
        for special in [false, true] {
            let tensors: Vec<Literal> =
                case.operands.iter().map(|operand| tensor(operand, special, rng)).collect();
            for layouts in layouts(case, rng) {
                let how = format!("{layouts:?}");
                let placed: Vec<Placed> =
                    tensors.iter().zip(layouts).map(|(x, layout)| Placed::new(x, layout)).collect();
                let operands: Vec<Option<&Placed>> = placed.iter().map(Some).collect();
                note(how, self.run(case, results, &operands, None));
            }
            if kernel.in_place {
                let fits =
                    |i: &usize| (tensors[*i].dtype, &tensors[*i].shape) == (results[0].0, &results[0].1);
                let fitting: Vec<usize> = (0..tensors.len()).filter(fits).collect();
                let transposed = |x: &Literal| Placed::new(x, Place::Transposed.layout(&x.shape));
                let placed: Vec<Placed> = tensors.iter().map(transposed).collect();
                let each = fitting.iter().map(|i| vec![*i]);
                for here in each.chain((fitting.len() > 1).then(|| fitting.clone())) {
                    // Indices must stay valid, so an operand of indices provides the shared contents if one takes part.
                    let Some(first) = here
                        .iter()
                        .rfind(|i| matches!(case.operands[**i].holds, Holds::Below(_)))
                        .or(here.first())
                    else {
                        continue;
                    };
                    let operands: Vec<Option<&Placed>> =
                        placed.iter().enumerate().map(|(i, x)| (!here.contains(&i)).then_some(x)).collect();
                    let outcome = self.run(case, results, &operands, Some(&tensors[*first]));
                    note(format!("in place of operands {here:?}"), outcome);
                }
            }
        }
        wrong
    }
}

fn types(case: &Case) -> String {
    let text = |operand: &Operand| format!("{}{:?}", operand.dtype, operand.shape);
    case.operands.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Each operand in each layout with the others contiguous, and all operands in each layout.
fn layouts(case: &Case, rng: &mut Rng) -> Vec<Vec<Layout>> {
    let all = |place: Place| -> Vec<Layout> {
        case.operands.iter().map(|operand| place.layout(&operand.shape)).collect()
    };
    let places = [Place::Transposed, Place::Sliced, Place::Stepped];
    let along = |shape: &[usize], repeats: usize| repeated(shape, |dim| dim == repeats);
    let mut list = vec![all(Place::Whole)];
    for (i, operand) in case.operands.iter().enumerate() {
        let shape = &operand.shape[..];
        let repeated = (0..shape.len()).map(|dim| along(shape, dim));
        for layout in places.iter().map(|place| place.layout(shape)).chain(repeated) {
            let mut one = all(Place::Whole);
            one[i] = layout;
            list.push(one);
        }
    }
    if case.operands.len() > 1 {
        list.extend(places.map(all));
        list.push(case.operands.iter().map(|x| along(&x.shape, rng.below(x.shape.len().max(1)))).collect());
    }
    list
}

#[test]
fn every_kernel_gives_what_its_op_means() {
    let bench = Bench { threads: [Threads::ONE, Threads::new(2)] };
    let mut rng = Rng::new(7);
    let (mut runs, mut wrong) = (BTreeMap::new(), Vec::new());
    let all = Dtype::ALL.into_iter().flat_map(cases).chain(examples());
    for (case, results, kernel) in all.filter_map(|case| {
        let (results, kernel) = (results_of(&case)?, find(case.op.info().name)?);
        Some((case, results, kernel))
    }) {
        *runs.entry(kernel.op).or_insert(0) += 1;
        wrong.extend(bench.check(kernel, &case, &results, &mut rng));
    }
    let by_op: BTreeSet<&str> = wrong.iter().filter_map(|text| text.split(':').next()).collect();
    assert!(
        wrong.is_empty(),
        "{} runs are wrong, of {by_op:?}:\n{}",
        wrong.len(),
        wrong.iter().take(40).cloned().collect::<Vec<_>>().join("\n")
    );
    let names = BUILT_IN.iter().flat_map(|(_, rows)| rows.iter()).map(|info| info.name);
    let untested: Vec<&str> = names.filter(|name| find(name).is_some() && !runs.contains_key(name)).collect();
    assert!(
        untested.is_empty(),
        "kernels that nothing runs: {untested:?}; crates/runtime/tests/table/cases.rs must have a case for an op whose \
         example needs more than one rank"
    );
    println!("{} ops, {} cases", runs.len(), runs.values().sum::<usize>());
}
