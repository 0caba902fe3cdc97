//! Checkpoints: what any number of ranks save, any number loads; a save that fails leaves the last one and nothing else.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::fs;
use std::path::{Path, PathBuf};

use consort::nn::{Adam, Checkpoint, Config, Llama, Moments, Parts, Shards, share};
use consort::{Dtype, Flatten, Init, Mesh, Reduce, Result, Steady, Tensor, compile};

/// An empty folder of this test, removed at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Temporary {
        let path = std::env::temp_dir().join(format!("consort-checkpoints-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Temporary(path)
    }

    /// What is in a folder, sorted.
    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Flatten, Clone)]
struct Named {
    w: Tensor,
}

#[derive(Flatten, Clone)]
struct State {
    rows: Tensor,
    columns: Tensor,
    equal: Vec<Tensor>,
    rate: f64,
}

/// A rank's part of a state whose elements tell where they are, in two layouts of the ranks.
fn state(mesh: &Mesh) -> Result<(State, Parts)> {
    let (me, n) = (mesh.my_rank()?, mesh.size());
    let whole = Tensor::from_iter((0..35i64).map(|i| i as f64))?.reshape(&[5, 7])?;
    let part = |dim: usize| {
        let own = share([5, 7][dim], me, n);
        whole.narrow(dim, own.start, own.len())?.contiguous()
    };
    let equal = vec![Tensor::from_iter([true, false])?, Tensor::scalar(7i64)?];
    let state = State { rows: part(0)?, columns: part(1)?.cast(Dtype::Bf16)?, equal, rate: 0.1 };
    let parts = Parts::whole(&state).split(mesh, |name, _| match name {
        "rows" => Some(0),
        "columns" => Some(1),
        _ => None,
    })?;
    Ok((state, parts))
}

fn elements(state: &State) -> Result<Vec<Vec<f64>>> {
    state.flatten().iter().map(|tensor| tensor.cast(Dtype::F64)?.to_vec()).collect()
}

fn all<T: Send>(n: usize, f: impl Fn(Mesh) -> Result<T> + Sync) -> Vec<T> {
    consort::spawn(n, f).into_iter().map(|outcome| outcome.unwrap()).collect()
}

fn checkpoint(path: &Path, is_folder: bool, mesh: &Mesh) -> Checkpoint {
    if is_folder { Checkpoint::folder(path, mesh) } else { Checkpoint::file(path, mesh) }
}

#[test]
fn any_number_of_ranks_loads_what_any_number_saved() {
    for is_folder in [false, true] {
        let folder = Temporary::new(&format!("any-{is_folder}"));
        let path = folder.0.join("state");
        for (saved, step) in [(1, 3), (2, 4), (4, 5), (3, 6)] {
            all(saved, |mesh| {
                let (state, parts) = state(&mesh)?;
                checkpoint(&path, is_folder, &mesh).save(&state, &parts, step)
            });
            for n in [1, 2, 4] {
                all(n, |mesh| {
                    let (own, parts) = state(&mesh)?;
                    let blank = own.unflatten(
                        own.flatten()
                            .iter()
                            .map(|x| Tensor::zeros(x.dtype(), x.shape()))
                            .collect::<Result<_>>()?,
                    )?;
                    let (got, at) = checkpoint(&path, is_folder, &mesh).load(&blank, &parts)?;
                    assert_eq!((elements(&got)?, got.rate, at), (elements(&own)?, 0.1, step));
                    Ok(())
                });
            }
            // Files of earlier saves are gone.
            let names = Temporary::names(if is_folder { &path } else { &folder.0 });
            assert_eq!(names.len(), if is_folder { saved + 1 } else { 1 }, "{names:?}");
        }
        if !is_folder {
            // Whole tensors by the names of the fields.
            let file = Tensor::load_safetensors(&path).unwrap();
            let names: Vec<&str> = file.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["columns", "equal.0", "equal.1", "rows"]);
            assert_eq!(file[3].1.to_vec::<f64>().unwrap(), (0..35).map(f64::from).collect::<Vec<_>>());
        }
    }
}

/// The errors of all ranks, and that the last checkpoint is as it was.
fn fails(
    name: &str,
    is_folder: bool,
    break_it: impl Fn(&Path),
    f: impl Fn(&Mesh, &Checkpoint) -> Result<()> + Sync,
) -> Vec<String> {
    let folder = Temporary::new(name);
    let path = folder.0.join("state");
    all(2, |mesh| {
        let (state, parts) = state(&mesh)?;
        checkpoint(&path, is_folder, &mesh).save(&state, &parts, 1)
    });
    let before = [Temporary::names(&folder.0), if is_folder { Temporary::names(&path) } else { vec![] }];
    break_it(&path);
    let errors = consort::spawn(2, |mesh| f(&mesh, &checkpoint(&path, is_folder, &mesh)));
    for undo in ["2-1.safetensors", ".index.json.tmp"] {
        let _ = fs::remove_dir(path.join(undo));
    }
    let _ = fs::remove_dir(folder.0.join(".state.tmp"));
    let after = [Temporary::names(&folder.0), if is_folder { Temporary::names(&path) } else { vec![] }];
    assert_eq!(before, after);
    all(1, |mesh| {
        let (own, parts) = state(&mesh)?;
        let (got, step) = checkpoint(&path, is_folder, &mesh).load(&own, &parts)?;
        assert_eq!((elements(&got)?, step), (elements(&own)?, 1));
        Ok(())
    });
    errors.into_iter().map(|error| error.unwrap_err().to_string()).collect()
}

fn save(mesh: &Mesh, checkpoint: &Checkpoint) -> Result<()> {
    let (state, parts) = state(mesh)?;
    checkpoint.save(&state, &parts, 2)
}

#[test]
fn a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last() {
    // A folder where rank 1 would write its file.
    let block = |path: &Path| fs::create_dir(path.join("2-1.safetensors")).unwrap();
    let errors = fails("rank", true, block, save);
    assert!(errors[0].contains("rank 1 failed") && errors[0].contains("directory"), "{errors:?}");
    assert!(errors[1].contains("checkpoint: ") && errors[1].contains("directory"), "{errors:?}");
    // One where the first rank would write the index.
    let block = |path: &Path| fs::create_dir(path.join(".index.json.tmp")).unwrap();
    let errors = fails("index", true, block, save);
    assert!(errors[1].contains("rank 0 failed"), "{errors:?}");
    let block = |path: &Path| fs::create_dir(path.with_file_name(".state.tmp")).unwrap();
    let errors = fails("file", false, block, save);
    assert!(errors[1].contains("rank 0 failed"), "{errors:?}");
    // Parts that are not those of the state, on one rank only.
    let errors = fails(
        "parts",
        false,
        |_| {},
        |mesh, checkpoint| {
            let (mut state, parts) = state(mesh)?;
            if mesh.my_rank()? == 1 {
                state.rows = state.columns.clone();
            }
            checkpoint.save(&state, &parts, 2)
        },
    );
    assert!(
        errors[0].contains("rank 1 failed") && errors[1].contains("expected tensors of shapes"),
        "{errors:?}"
    );
    // Parts that are not declared as such.
    let errors = fails(
        "undeclared",
        false,
        |_| {},
        |mesh, checkpoint| {
            let (state, _) = state(mesh)?;
            checkpoint.save(&state, &Parts::whole(&state), 2)
        },
    );
    let expected = "names, types and whole shapes must be the same on all ranks";
    assert!(
        errors.iter().all(|error| error.contains(expected) && error.contains("Parts::split")),
        "{errors:?}"
    );
}

fn texts(outcomes: Vec<Result<()>>) -> Vec<String> {
    outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect()
}

fn loaded_step(path: &Path, is_folder: bool) -> u64 {
    all(1, |mesh| {
        let (own, parts) = state(&mesh)?;
        let (got, step) = checkpoint(path, is_folder, &mesh).load(&own, &parts)?;
        assert_eq!(elements(&got)?, elements(&own)?);
        Ok(step)
    })[0]
}

/// Another job's save is one that holds the lock.
#[test]
fn two_saves_at_once_do_not_mix() {
    for (name, is_folder) in [("busy-folder", true), ("busy-file", false)] {
        let folder = Temporary::new(name);
        let path = folder.0.join("state");
        let save = |step| {
            consort::spawn(2, |mesh| {
                let (state, parts) = state(&mesh)?;
                checkpoint(&path, is_folder, &mesh).save(&state, &parts, step)
            })
        };
        assert!(save(1).iter().all(Result::is_ok));
        let locked = if is_folder { path.clone() } else { folder.0.join(".state.tmp") };
        let other = if is_folder { fs::File::open(locked) } else { fs::File::create(locked) };
        let other = other.unwrap();
        other.try_lock().unwrap();
        let errors = texts(save(2));
        assert!(errors[0].contains("another save of this checkpoint has not ended"), "{errors:?}");
        assert!(errors[1].contains("rank 0 failed"), "{errors:?}");
        drop(other);
        assert!(save(3).iter().all(Result::is_ok));
        assert_eq!(loaded_step(&path, is_folder), 3);
    }
}

#[test]
fn a_file_replaces_nothing_but_a_file() {
    let folder = Temporary::new("forms");
    let (path, target) = (folder.0.join("state"), folder.0.join("target"));
    let save = || {
        consort::spawn(2, |mesh| {
            let (state, parts) = state(&mesh)?;
            Checkpoint::file(&path, &mesh).save(&state, &parts, 1)
        })
    };
    fs::write(&target, "kept").unwrap();
    std::os::unix::fs::symlink(&target, &path).unwrap();
    let errors = texts(save());
    assert!(errors.iter().all(|error| error.contains("got a symbolic link")), "{errors:?}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let errors = texts(save());
    assert!(errors.iter().all(|error| error.contains("got a folder")), "{errors:?}");
    fs::remove_dir(&path).unwrap();
    assert!(save().iter().all(Result::is_ok));
    assert_eq!(loaded_step(&path, false), 1);
}

#[test]
fn what_differs_between_ranks_is_not_saved_as_whole() {
    for is_folder in [false, true] {
        let folder = Temporary::new(&format!("differs-{is_folder}"));
        let path = folder.0.join("state");
        // Rows 0 and 1 on the first rank, 2 and 3 on the other.
        let errors = all(2, |mesh| {
            let state = (Tensor::scalar(7i64)?, Shards::of(&Tensor::iota(Dtype::F64, &[4, 2], 0)?, &mesh)?);
            let saved = checkpoint(&path, is_folder, &mesh).save(&state, &Parts::whole(&state), 1);
            Ok(saved.unwrap_err().to_string())
        });
        let wanted =
            "`1.rows`: expected equal elements on ranks 0 and 1, which declare the same part, got others";
        for error in errors {
            assert!(error.contains(wanted) && error.contains("checkpoints.rs:"), "{error}");
            assert!(error.contains("note: ") && error.contains("`Parts::split`"), "{error}");
        }
        assert!(Temporary::names(&folder.0).is_empty());
    }
}

/// This rank's part of `whole`, which is split over tp along `dims[0]`, and each part over dp along `dims[1]`.
fn split_twice(whole: &Tensor, mesh: &Mesh, dims: [usize; 2]) -> Result<Tensor> {
    let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
    let own = share(whole.shape()[dims[0]], tp.my_rank()?, tp.size());
    let part = whole.narrow(dims[0], own.start, own.len())?;
    let own = share(part.shape()[dims[1]], dp.my_rank()?, dp.size());
    part.narrow(dims[1], own.start, own.len())?.contiguous()
}

#[test]
fn shards_of_tensor_parallel_weights_are_saved_and_loaded() {
    // The rows of tp are divided equally and not; of 10 rows each rank of tp has 5, and those of dp 2 and 3 of these.
    for (rows, dims) in [(8, [0, 0]), (10, [0, 0]), (7, [0, 0]), (8, [1, 0]), (10, [0, 1]), (7, [1, 1])] {
        for is_folder in [false, true] {
            let folder = Temporary::new(&format!("twice-{rows}-{dims:?}-{is_folder}"));
            let path = folder.0.join("state");
            let numbers: Vec<f64> = (0..rows * 7).map(f64::from).collect();
            let run = |axes: [(&str, usize); 2], saves: bool| {
                let all = Init::new().axes(&axes).spawn(axes[0].1 * axes[1].1, |mesh| {
                    let whole = Tensor::from_slice(&numbers, &[rows as usize, 7])?;
                    let part = split_twice(&whole, &mesh, dims)?;
                    let parts = Parts::whole(&part).split(&mesh.axis("tp")?, |_, _| Some(dims[0]))?;
                    let parts = parts.split(&mesh.axis("dp")?, |_, _| Some(dims[1]))?;
                    assert_eq!(parts.shapes(), [[rows as usize, 7]]);
                    let checkpoint = checkpoint(&path, is_folder, &mesh);
                    if saves {
                        return checkpoint.save(&part, &parts, 1);
                    }
                    let loaded = checkpoint.load(&part.mul(0.0)?, &parts)?.0;
                    assert_eq!(loaded.to_vec::<f64>()?, part.to_vec::<f64>()?);
                    Ok(())
                });
                all.into_iter().for_each(|outcome| outcome.unwrap());
            };
            run([("dp", 2), ("tp", 2)], true);
            for axes in [
                [("dp", 2), ("tp", 2)],
                [("dp", 1), ("tp", 1)],
                [("dp", 1), ("tp", 3)],
                [("dp", 3), ("tp", 1)],
            ] {
                run(axes, false);
            }
            if !is_folder {
                let file = Tensor::load_safetensors(&path).unwrap();
                assert_eq!(file[0].1.to_vec::<f64>().unwrap(), numbers);
            }
        }
    }
}

#[test]
fn shards_of_a_tensor_parallel_weight_are_parts_of_parts() {
    let folder = Temporary::new("shards");
    let path = folder.0.join("state");
    let all = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
        let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
        // Rows 0 to 4 on the first rank of tp, 5 to 9 on the other.
        let first = 5 * tp.my_rank()?;
        let own = Tensor::from_iter((first..first + 5).map(|i| i as f32))?;
        let shards = Shards::of(&own, &dp)?;
        let parts = Parts::whole(&shards).split(&tp, |_, _| Some(0))?.split(&dp, |_, _| Some(0))?;
        Checkpoint::file(&path, &mesh).save(&shards, &parts, 1)?;
        let loaded = Checkpoint::file(&path, &mesh).load(&shards, &parts)?.0;
        loaded.rows.to_vec::<f32>()
    });
    let all: Vec<Vec<f32>> = all.into_iter().map(|rows| rows.unwrap()).collect();
    assert_eq!(all, [vec![0.0, 1.0], vec![5.0, 6.0], vec![2.0, 3.0, 4.0], vec![7.0, 8.0, 9.0]]);
    let file = Tensor::load_safetensors(&path).unwrap();
    assert_eq!(file[0].1.to_vec::<f32>().unwrap(), (0..10).map(|i| i as f32).collect::<Vec<_>>());
}

#[test]
fn parts_that_overlap_or_leave_gaps_are_refused() {
    // Sizes of the parts of ranks (dp, tp), of which one split is left out: over tp, and over dp.
    for (sizes, wanted) in [
        (
            [[2, 3], [3, 2]],
            "`w`: expected parts without common elements, got [2] at [0] of rank 0 and [3] at [0] of rank 1",
        ),
        ([[1, 2], [2, 2]], "names, types and whole shapes must be the same"),
    ] {
        for is_folder in [false, true] {
            let folder = Temporary::new(&format!("overlap-{}-{is_folder}", sizes[0][0]));
            let path = folder.0.join("state");
            let errors = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
                let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
                let w = Tensor::ones(Dtype::F32, &[sizes[dp.my_rank()?][tp.my_rank()?]])?;
                let state = Named { w };
                let group = if sizes[0][0] == 2 { &dp } else { &tp };
                let parts = Parts::whole(&state).split(group, |_, _| Some(0))?;
                checkpoint(&path, is_folder, &mesh).save(&state, &parts, 1)
            });
            for error in errors {
                let error = error.unwrap_err().to_string();
                assert!(
                    error.contains(wanted) && error.contains("`w`: ") && error.contains("note: "),
                    "{error}"
                );
            }
            assert!(Temporary::names(&folder.0).is_empty());
        }
    }
}

#[test]
fn a_load_that_fails_on_one_rank_fails_on_all() {
    for is_folder in [false, true] {
        let errors = fails(
            "load",
            is_folder,
            |_| {},
            |mesh, checkpoint| {
                let (state, mut parts) = state(mesh)?;
                if mesh.my_rank()? == 1 {
                    parts = Parts::whole(&state);
                }
                checkpoint.load(&state, &parts).map(drop)
            },
        );
        assert!(errors[0].contains("rank 1 failed"), "{errors:?}");
        assert!(
            errors[1].contains("`rows`: expected the shape [3, 7], got [5, 7]")
                || errors[1].contains("[5,7]"),
            "{errors:?}"
        );
    }
    // An index whose part begins where no tensor has elements.
    let folder = Temporary::new("far");
    let load = |mesh: Mesh| {
        let (state, parts) = state(&mesh)?;
        let checkpoint = Checkpoint::folder(&folder.0, &mesh);
        checkpoint.save(&state, &parts, 1)?;
        let index = folder.0.join("index.json");
        let text = fs::read_to_string(&index).unwrap();
        let far = text.replacen("\"start\":[0,0]", "\"start\":[18446744073709551615,0]", 1);
        assert_ne!(far, text);
        fs::write(&index, far).unwrap();
        checkpoint.load(&state, &parts).map(drop)
    };
    let error = texts(consort::spawn(1, load)).remove(0);
    assert!(error.contains("expected a list of parts"), "{error}");
    let folder = Temporary::new("none");
    let errors = consort::spawn(2, |mesh| {
        let (state, parts) = state(&mesh)?;
        Checkpoint::file(folder.0.join("none"), &mesh).load(&state, &parts).map(drop)
    });
    assert!(errors.into_iter().all(|error| error.unwrap_err().to_string().contains("No such file")));
}

#[test]
fn training_goes_on_from_a_checkpoint_on_other_ranks() {
    // One weight is split over both axes, one over tp, one over none.
    type Weights = (Tensor, Tensor, Tensor);
    let run = |axes: [(&str, usize); 2], path: Option<&Path>, from: u64, to: u64, save: Option<&Path>| {
        let n = axes[0].1 * axes[1].1;
        let all = Init::new().axes(&axes).spawn(n, |mesh| {
            let (dp, tp) = (mesh.axis("dp")?, mesh.axis("tp")?);
            let (a, b) = (share(4, dp.my_rank()?, dp.size()), share(6, tp.my_rank()?, tp.size()));
            let normal = |shape: &[usize], of: &[usize], start: &[usize], key| {
                Tensor::normal_part(Dtype::F64, shape, of, start, key)
            };
            let w: Weights = (
                normal(&[a.len(), b.len()], &[4, 6], &[a.start, b.start], 1)?,
                normal(&[b.len()], &[6], &[b.start], 2)?.equal_over(&["dp"])?,
                Tensor::ones(Dtype::F64, &[2])?,
            );
            let adam = Adam::default();
            let mut state = (w.clone(), adam.state(&w)?);
            let parts = Parts::whole(&state).split(&dp, |name, _| name.ends_with(".0").then_some(0))?.split(
                &tp,
                |name, _| match name.rsplit('.').next() {
                    Some("0") => Some(1),
                    Some("1") => Some(0),
                    _ => None,
                },
            )?;
            let mut step = 0;
            if let Some(path) = path {
                (state, step) = Checkpoint::folder(path, &mesh).load(&state, &parts)?;
            }
            assert_eq!(step, from);
            let group = mesh.clone();
            let f = compile(move |(w, moments): (Weights, Moments<Weights>)| {
                let sum =
                    |x: &Tensor, over: &consort::Group| over.all_reduce(x.mul(x)?.sum_all()?, Reduce::Sum);
                let loss = sum(&w.0, &group)?.add(&sum(&w.1, &tp)?)?.add(&w.2.mul(&w.2)?.sum_all()?)?;
                let (w, moments) = adam.step(&w, &w, &moments, 0.05)?;
                Ok((loss, (w, moments)))
            });
            let mut losses = Vec::new();
            while step < to {
                let (loss, next) = f.call(state)?;
                (state, step) = (next, step + 1);
                losses.push(loss.item::<f64>()?);
            }
            // What was loaded is placed as what was made.
            f.expect_steady(Steady::graphs(1))?;
            if let Some(path) = save {
                Checkpoint::folder(path, &mesh).save(&state, &parts, step)?;
            }
            Ok(losses)
        });
        all.into_iter().map(|losses| losses.unwrap()).next().unwrap()
    };
    let folder = Temporary::new("train");
    let whole = run([("dp", 1), ("tp", 1)], None, 0, 9, None);
    let mut split = run([("dp", 2), ("tp", 2)], None, 0, 3, Some(&folder.0));
    split.extend(run([("dp", 1), ("tp", 2)], Some(&folder.0), 3, 6, Some(&folder.0)));
    split.extend(run([("dp", 4), ("tp", 1)], Some(&folder.0), 6, 9, None));
    for (a, b) in whole.iter().zip(&split) {
        assert!((a - b).abs() <= 1e-12 * a.abs(), "{whole:?} {split:?}");
    }
    assert_eq!(whole.len(), split.len());
}

/// The parts of all ranks, side by side, are the weights of one rank.
#[test]
fn initial_weights_do_not_depend_on_the_number_of_ranks() {
    let config = Config { heads: 8, kv_heads: 4, ..Config::tiny() };
    let folder = Temporary::new("initial");
    let path = |n: usize| folder.0.join(format!("{n}.safetensors"));
    for n in [1, 2, 3, 4] {
        all(n, |mesh| {
            let model = Llama::random(&config, &mesh, 5)?;
            let parts = Parts::whole(&model).split(&mesh, |name, _| Llama::split(name))?;
            Checkpoint::file(path(n), &mesh).save(&model, &parts, 0)
        });
        assert_eq!(fs::read(path(n)).unwrap(), fs::read(path(1)).unwrap(), "{n} ranks");
    }
}
