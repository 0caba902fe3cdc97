//! Every form of every collective: with a handle, compiled, on shapes alone, and against plain loops.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

#[path = "forms/mod.rs"]
mod of;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use consort::{Dtype, Reduce, Tensor, spawn};
use of::cases;
use of::table::forms;

const RANKS: [usize; 4] = [1, 2, 3, 4];

/// The public methods of `Group` in the files of collectives, those that a macro declares included.
#[test]
fn every_method_has_a_row() {
    let mut methods = BTreeSet::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap().flatten() {
        // `mesh.rs` has the methods that do not communicate.
        if entry.file_name() == "mesh.rs" || !entry.file_type().unwrap().is_file() {
            continue;
        }
        let mut of = "";
        let text = fs::read_to_string(entry.path()).unwrap();
        for line in text.lines() {
            match line {
                "impl Group {" => of = "group",
                "collectives! {" => of = "macro",
                "}" => of = "",
                _ => {}
            }
            let name = match of {
                "group" => line.strip_prefix("    pub fn "),
                "macro" => line.strip_prefix("    ").filter(|line| line.starts_with(char::is_lowercase)),
                _ => None,
            };
            let word = |text: &str| {
                text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
            };
            methods.extend(name.map(word));
        }
    }
    let rows: BTreeSet<String> = forms().iter().map(|form| form.name.to_string()).collect();
    assert_eq!(rows, methods);
    assert!(methods.contains("all_reduce") && methods.contains("isend"));
}

/// Runs the cases of a row of SPEC on 1 to 4 ranks that are threads.
fn row(row: &str) {
    for (name, case) in cases::CASES.iter().filter(|(name, _)| name.split('_').next() == Some(row)) {
        for n in RANKS {
            for (rank, outcome) in spawn(n, *case).into_iter().enumerate() {
                outcome.unwrap_or_else(|error| panic!("{name}, rank {rank} of {n}: {error}"));
            }
        }
    }
}

#[test]
fn a2() {
    row("a2");
}

#[test]
fn a12() {
    row("a12");
}

#[test]
fn a15() {
    row("a15");
}

#[test]
fn a11_a_handle_is_complete_when_all_that_it_started_is() {
    let outcomes = spawn(2, |mesh| {
        if mesh.my_rank()? == 1 {
            mesh.irecv(Dtype::I64, &[1], 0, 0)?.wait()?;
            return mesh.barrier();
        }
        let outer = mesh.pending(|| mesh.pending(|| mesh.barrier()))?;
        // The other has not called it yet, and does so only after a message.
        assert!(!outer.test()?);
        mesh.isend(Tensor::from_slice(&[1i64], &[1])?, 1, 0)?.wait()?;
        let inner = outer.wait()?;
        assert!(inner.test()?);
        assert_eq!(mesh.in_flight(), 0);
        inner.wait()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a12_lists_that_do_not_fit_are_refused_before_anything_is_sent() {
    let outcomes = spawn(2, |mesh| {
        let x = |size: usize| Tensor::ones(Dtype::F32, &[size]);
        let half = x(2)?.cast(Dtype::Bf16)?;
        let mut out = vec![x(2)?, x(3)?];
        let above = line!();
        let errors = [
            mesh.reduce_scatter_list(&[x(2)?], Reduce::Sum).map(drop),
            mesh.scatter_list(&[x(2)?, x(3)?], 0).map(drop),
            mesh.all_to_all_list(&[x(2)?, half.clone()]).map(drop),
            mesh.all_gather_list_into(&mut out, x(2)?),
            mesh.all_gather_list_into(&mut out[..1], x(2)?),
            mesh.all_to_all_list_into(&mut out, &[x(2)?, half]),
            mesh.reduce_scatter_coalesced(&[x(2)?], Reduce::Sum, &[0, 0]).map(drop),
            mesh.scatter_list(&[x(1)?, x(1)?], 2).map(drop),
            mesh.gather_(&mut out[1], 0, 0),
        ];
        let below = line!();
        let errors = errors.map(|error| error.unwrap_err());
        for error in &errors {
            let site = error.site();
            assert!(site.file() == file!() && (above..below).contains(&site.line()), "{error}");
        }
        let texts = errors.map(|error| error.to_string());
        let first: Vec<&str> = texts.iter().map(|text| text.lines().next().unwrap()).collect();
        assert_eq!(
            first,
            [
                "reduce_scatter_list: expected a tensor for each of 2 members, got 1",
                "scatter_list: expected tensors of one shape and type, got f32[2] and f32[3]",
                "all_to_all_list: expected tensors of one shape and type, got f32[2] and bf16[2]",
                "all_gather_list_into: expected f32[2], got f32[3]",
                "all_gather_list_into: expected a tensor for each of 2 members, got 1",
                "all_to_all_list_into: expected tensors of one element type, got f32 and bf16",
                "reduce_scatter_coalesced: expected a dimension for each of 1 tensors, got 2",
                "scatter_list: expected a root below 2, the size of the group, got 2 (C3)",
                "gather_: expected dimension 0 to be shared out evenly among 2 members, got 3 places",
            ]
        );
        // The group is usable.
        assert_eq!(mesh.all_reduce(x(1)?, Reduce::Sum)?.item::<f32>()?, 2.0);
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
