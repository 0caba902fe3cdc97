//! Gradients by central differences: arguments are changed a little, and the loss is computed again.
//!
//! An argument that is equal on some ranks is changed on all of them at once: it is one number. The loss is the first
//! result, a 0-d float equal on all ranks. Differences of two sizes are compared, since near a corner of a function
//! they say nothing: such an element has none.

use std::collections::BTreeMap;

use consort_ir::literal::{Data, Literal};
use consort_ir::program::Program;
use consort_ir::types::Type;
use consort_types::{Axes, Rank};

use crate::{OracleError, run};

/// The step for an element of size 1; half of it is the second step.
const STEP: f64 = 1e-4;

/// How far the differences of two sizes may be apart, relative to the larger and at least absolute.
const SMOOTH: f64 = 1e-5;

/// For each argument in `wrt` and each rank, the difference for each element; NaN where there is none.
pub fn differences(
    program: &Program,
    func: &str,
    wrt: &[usize],
    inputs: &[Vec<Literal>],
) -> Result<Vec<Vec<Vec<f64>>>, OracleError> {
    let mut all = Vec::new();
    for argument in wrt {
        let mut of_ranks: Vec<Vec<f64>> = vec![Vec::new(); inputs.len()];
        for ranks in alike(program, func, *argument) {
            let n = inputs[ranks[0]][*argument].numel();
            let mut slopes = Vec::new();
            for i in 0..n {
                let slope = |step| slope(program, func, inputs, (&ranks, *argument, i), step);
                let (wide, narrow) = (slope(STEP)?, slope(STEP / 2.0)?);
                let near = (wide - narrow).abs() <= SMOOTH * wide.abs().max(1.0);
                slopes.push(if near { narrow } else { f64::NAN });
            }
            ranks.iter().for_each(|rank| of_ranks[*rank] = slopes.clone());
        }
        all.push(of_ranks);
    }
    Ok(all)
}

/// The ranks on which an argument is one value, by its type.
fn alike(program: &Program, func: &str, argument: usize) -> Vec<Vec<usize>> {
    let func = program.func(func);
    let ty = func.and_then(|func| func.ty(*func.body.params.get(argument)?));
    let varies = ty.map_or(Axes::NONE, Type::varies);
    let mut groups: BTreeMap<Vec<u32>, Vec<usize>> = BTreeMap::new();
    for rank in 0..program.mesh.n_ranks() {
        let place = varies.iter().map(|axis| program.mesh.coordinate(Rank(rank), axis)).collect();
        groups.entry(place).or_default().push(rank as usize);
    }
    groups.into_values().collect()
}

fn slope(
    program: &Program,
    func: &str,
    inputs: &[Vec<Literal>],
    (ranks, argument, element): (&[usize], usize, usize),
    step: f64,
) -> Result<f64, OracleError> {
    let mut size = step;
    let mut loss = |sign: f64| {
        let mut changed = inputs.to_vec();
        for rank in ranks {
            if let Data::Float(data) = &mut changed[*rank][argument].data {
                size = step * data[element].abs().max(1.0);
                data[element] += sign * size;
            }
        }
        let results = run(program, func, &changed)?;
        Ok(match results[0].first().map(|loss| &loss.data) {
            Some(Data::Float(data)) => data[0],
            _ => f64::NAN,
        })
    };
    let (above, below) = (loss(1.0)?, loss(-1.0)?);
    Ok((above - below) / (2.0 * size))
}

/// Compares a gradient program's cotangents with differences; the number of elements compared.
pub fn check_gradient(
    program: &Program,
    gradient: &Program,
    func: &str,
    wrt: &[usize],
    inputs: &[Vec<Literal>],
    tolerance: f64,
) -> Result<usize, String> {
    let expected = differences(program, func, wrt, inputs).map_err(|error| error.to_string())?;
    let got = run(gradient, func, inputs).map_err(|error| format!("the gradient: {error}"))?;
    let mut compared = 0;
    for (number, (argument, expected)) in wrt.iter().zip(expected).enumerate() {
        for (rank, (slopes, results)) in expected.iter().zip(&got).enumerate() {
            let cotangent = results.len() - wrt.len() + number;
            let Data::Float(data) = &results[cotangent].data else {
                return Err(format!("the cotangent of argument {argument} is no float"));
            };
            for (i, (slope, got)) in
                slopes.iter().zip(data).enumerate().filter(|(_, (slope, _))| !slope.is_nan())
            {
                compared += 1;
                let far = (slope - got).abs() > tolerance * slope.abs().max(1.0);
                if far || got.is_nan() {
                    return Err(format!(
                        "argument {argument}, element {i}, rank {rank}: expected {slope} by differences, got {got}"
                    ));
                }
            }
        }
    }
    Ok(compared)
}
