//! The short example programs, on ranks that are threads: their results equal those of plain loops or of one rank.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use std::path::Path;

use consort::{Dtype, Init, Mesh, Result, Tensor, tolerance};
use consort_examples::{data_parallel, heat, pipeline, pipeline_parallel, sequence_parallel, wrong};

/// Runs `f` on `n` ranks.
fn on<T: Send>(init: &Init, n: usize, f: impl Fn(Mesh) -> Result<T> + Sync) -> Vec<T> {
    let outcomes = init.spawn(n, f).into_iter().enumerate();
    outcomes
        .map(|(rank, outcome)| outcome.unwrap_or_else(|error| panic!("rank {rank} of {n}: {error}")))
        .collect()
}

fn close(got: &[f32], expected: &[f32]) {
    let off = tolerance::difference(expected, got);
    assert!(off <= tolerance::of_runs(Dtype::F32), "off by {off:e}: {got:?} and {expected:?}");
}

/// Gradient steps on all rows, by plain loops: the weights, and the error before the last step.
fn trained(x: &[f32], y: &[f32], width: usize, steps: usize) -> (Vec<f32>, f32) {
    let (rows, mut w, mut error) = (y.len(), vec![0f32; width], 0.0);
    for _ in 0..steps {
        let product = |row: &[f32]| row.iter().zip(&w).map(|(x, w)| x * w).sum::<f32>();
        let off: Vec<f32> = x.chunks(width).zip(y).map(|(row, y)| product(row) - y).collect();
        error = off.iter().map(|off| off * off).sum::<f32>() / rows as f32;
        for (column, w) in w.iter_mut().enumerate() {
            let sum: f32 = off.iter().enumerate().map(|(row, off)| off * x[row * width + column]).sum();
            *w -= 0.1 * 2.0 * sum / rows as f32;
        }
    }
    (w, error)
}

#[test]
fn data_parallel_steps_are_those_of_one_loop() {
    for n in [1, 2, 4] {
        on(&Init::new(), n, |mesh| {
            let (x, y) = data_parallel::data(&mesh, 8, 3, Dtype::F32)?;
            let (w, errors) = data_parallel::train(&mesh, (x.clone(), y.clone()), 20)?;
            let [x, y] = [mesh.all_gather(x, 0)?.to_vec::<f32>()?, mesh.all_gather(y, 0)?.to_vec::<f32>()?];
            let (expected, before) = trained(&x, &y, 3, 20);
            close(&w.to_vec::<f32>()?, &expected);
            close(&[errors[19] as f32], &[before]);
            Ok(())
        });
    }
}

#[test]
fn sequence_parallel_is_one_rank() {
    let whole = on(&Init::new(), 1, |mesh| sequence_parallel::run(&mesh, 8, 3, 12)?.to_vec::<f32>()).concat();
    for n in [2, 4] {
        close(
            &on(&Init::new(), n, |mesh| sequence_parallel::run(&mesh, 8 / n, 3, 12)?.to_vec::<f32>())
                .concat(),
            &whole,
        );
    }
}

/// The cells of the whole plate, by plain loops.
fn plate(n: usize, eps: f64) -> Vec<f64> {
    let (mut x, mut change) = (vec![0.0; n * n], f64::INFINITY);
    while change > eps {
        let at = |row: usize, column: usize| match (row, column) {
            (0, _) => 1.0, // Rows and columns count from 1: 0 and n + 1 are the edges.
            (row, column) if row > n || column == 0 || column > n => 0.0,
            (row, column) => x[(row - 1) * n + column - 1],
        };
        let cell = |i: usize| {
            let (row, column) = (i / n + 1, i % n + 1);
            ((at(row - 1, column) + at(row + 1, column)) + (at(row, column - 1) + at(row, column + 1))) * 0.25
        };
        let next: Vec<f64> = (0..n * n).map(cell).collect();
        change = next.iter().zip(&x).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        x = next;
    }
    x
}

#[test]
fn heat_is_that_of_one_plate() {
    let init = Init::new().axes(&heat::AXES);
    let boxes = on(&init, 4, |mesh| heat::solve(&mesh, 3, 1e-4)?.to_vec::<f64>());
    let whole = plate(6, 1e-4);
    for (i, cell) in whole.iter().enumerate() {
        let (row, column) = (i / 6, i % 6);
        assert_eq!(
            boxes[row / 3 * 2 + column / 3][row % 3 * 3 + column % 3],
            *cell,
            "row {row}, column {column}"
        );
    }
}

#[test]
fn a_pipeline_is_its_stages_one_after_the_other() {
    for n in [1, 2, 4] {
        let results = on(&Init::new(), n, |mesh| {
            let results = pipeline::forward(&mesh, 5, [2, 3])?;
            results.iter().map(Tensor::to_vec::<f32>).collect::<Result<Vec<_>>>()
        });
        let (last, others) = results.split_last().unwrap();
        assert!(others.iter().all(Vec::is_empty) && last.len() == 5);
        for (number, got) in last.iter().enumerate() {
            let mut x = pipeline::batch(number, 2, 3).unwrap();
            for stage in 0..n {
                x = pipeline::stage(&x, &pipeline::weight(stage, 3).unwrap()).unwrap();
            }
            close(got, &x.to_vec::<f32>().unwrap());
        }
    }
}

/// The product of two row-major matrices, by plain loops.
fn product(x: &[f32], y: &[f32], inner: usize) -> Vec<f32> {
    let columns = y.len() / inner;
    let entry =
        |row: &[f32], column: usize| -> f32 { (0..inner).map(|k| row[k] * y[k * columns + column]).sum() };
    x.chunks(inner).flat_map(|row| (0..columns).map(move |column| entry(row, column))).collect()
}

fn transposed(x: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| x.iter().skip(column).step_by(columns).copied()).collect()
}

#[test]
fn a_pipeline_of_tensor_parallel_stages_is_one_loop() {
    const STEPS: usize = 3;
    let (batches, layers, width) = (5, 4, 8);
    let got = on(&Init::new().axes(&[("pp", 2), ("tp", 2)]), 4, |mesh| {
        let (losses, (a, b)) = pipeline_parallel::train(&mesh, Dtype::F32, STEPS)?;
        // Columns of the first weights as rows, so that those of two ranks are one after the other.
        Ok((losses, a.permute(&[0, 2, 1])?.to_vec::<f32>()?, b.to_vec::<f32>()?))
    });
    let weight = |key| Tensor::normal(Dtype::F32, &[layers, width, width], key).unwrap().mul(0.3).unwrap();
    let matrices = |key| {
        let all = weight(key).to_vec::<f32>().unwrap();
        all.chunks(width * width).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let (mut a, mut b) = (matrices(1), matrices(2));
    let data = Tensor::normal(Dtype::F32, &[batches, 4, width], 3).unwrap().to_vec::<f32>().unwrap();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let (mut loss, mut of_a, mut of_b) = (0.0, vec![vec![0f32; width * width]; layers], Vec::new());
        of_b.clone_from(&of_a);
        for batch in data.chunks(4 * width) {
            // Layers x + tanh(x a) b; the loss is the mean of the squares of what the last gives, less the sines of the data.
            let (mut xs, mut hs) = (vec![batch.to_vec()], Vec::new());
            for (a, b) in a.iter().zip(&b) {
                let x = &xs[xs.len() - 1];
                let h: Vec<f32> = product(x, a, width).into_iter().map(f32::tanh).collect();
                let next = product(&h, b, width).iter().zip(x).map(|(y, x)| y + x).collect();
                xs.push(next);
                hs.push(h);
            }
            let off: Vec<f32> = xs[layers].iter().zip(batch).map(|(y, x)| y - x.sin()).collect();
            let share = 1.0 / (off.len() * batches) as f32;
            loss += off.iter().map(|off| off * off * share).sum::<f32>();
            let mut grad: Vec<f32> = off.iter().map(|off| 2.0 * off * share).collect();
            for layer in (0..layers).rev() {
                let (x, h) = (&xs[layer], &hs[layer]);
                let inner = product(&grad, &transposed(&b[layer], width), width);
                let inner: Vec<f32> = inner.iter().zip(h).map(|(slope, h)| slope * (1.0 - h * h)).collect();
                let own =
                    [product(&transposed(x, width), &inner, 4), product(&transposed(h, width), &grad, 4)];
                for (sum, own) in [&mut of_a[layer], &mut of_b[layer]].into_iter().zip(own) {
                    sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                }
                let through = product(&inner, &transposed(&a[layer], width), width);
                grad.iter_mut().zip(through).for_each(|(grad, through)| *grad += through);
            }
        }
        losses.push(loss);
        for (w, slope) in a.iter_mut().zip(&of_a).chain(b.iter_mut().zip(&of_b)) {
            w.iter_mut().zip(slope).for_each(|(w, slope)| *w -= 0.1 * slope);
        }
    }
    let half = layers / 2;
    for (rank, (own_losses, columns, rows)) in got.iter().enumerate() {
        close(&own_losses.iter().map(|loss| *loss as f32).collect::<Vec<_>>(), &losses);
        let (stage, part) = (rank / 2, rank % 2 * width * width / 2);
        for (at, layer) in (stage * half..(stage + 1) * half).enumerate() {
            let (from, size) = (at * width * width / 2, width * width / 2);
            close(&columns[from..from + size], &transposed(&a[layer], width)[part..part + size]);
            close(&rows[from..from + size], &b[layer][part..part + size]);
        }
    }
}

#[test]
fn wrong_programs_are_refused() {
    for (what, program, part) in wrong::PROGRAMS {
        let errors = wrong::errors(program);
        assert!(errors.len() == 2 && errors.iter().all(|error| error.contains(part)), "{what}: {errors:?}");
    }
}

/// They are to be read in one screen.
#[test]
fn short_programs_are_short() {
    let training = ["train_experts", "train_mesh", "train_pipeline", "train_sequence", "train_zero"];
    let others = ["data_parallel", "sequence_parallel", "heat", "pipeline", "pipeline_parallel", "wrong"];
    for name in training.into_iter().chain(others) {
        let path = format!("{}/src/{name}.rs", env!("CARGO_MANIFEST_DIR"));
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= 60, "{path}: {lines} lines");
    }
}

/// The shape of a tensor without dimensions is written `&()`.
#[test]
fn empty_shapes_are_plain() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md")];
    for folder in ["crates/examples/src", "docs", "docs/contributing", "docs/design"] {
        pages.extend(std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    pages.retain(|path| path.is_file());
    assert!(pages.len() > 50, "{} pages", pages.len());
    for path in pages {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("0usize; 0"), "{}: write `&()`", path.display());
    }
}
