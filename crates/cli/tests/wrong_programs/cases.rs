//! Wrong programs, one for each case. A line that is to blame has a comment that names its case.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use consort::{Dtype, Init, Mesh, Missing, Reduce, Result, Route, Tensor, compile, cond};

/// `n` floats.
fn ones(n: usize) -> Result<Tensor> {
    Tensor::ones(Dtype::F32, &[n])
}

/// Runs a case on this rank.
pub(crate) fn play(case: &str) -> Result<()> {
    let mut init = Init::new();
    match case {
        "late" | "leave" => init = init.timeout(Duration::from_secs(1)),
        "longest_timeout" => init = init.timeout(Duration::MAX),
        "send_first_small" => init = init.strict(true),
        _ => {}
    }
    // Rank 1 alone, which is known before it starts.
    let is_one = std::env::var("CONSORT_RANK").is_ok_and(|rank| rank == "1");
    match case {
        "axes_product" => init = init.axes(&[("dp", if is_one { 3 } else { 2 })]),
        "axes_name" => init = init.axes(&[(if is_one { "d p" } else { "dp" }, 2)]),
        "heap_size" if is_one => init = init.heap(usize::MAX),
        "exit_early" if is_one => std::process::exit(0),
        _ => {}
    }
    let mesh = init.start()?; // environment, // axes_product, // axes_name, // heap_size, // exit_early
    if case == "exit_later" && is_one {
        std::process::exit(0);
    }
    let me = mesh.my_rank()?;
    // `none` is an error, which a rank that makes no call after it would report: such cases are in the first topic.
    [messages, different, missing, compiled, captured, right, late, right_compiled]
        .into_iter()
        .find_map(|topic| topic(case, &mesh, me))
        .unwrap_or_else(|| panic!("no case {case}"))
}

/// Calls that differ between ranks.
fn different(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let last = me + 1 == mesh.size();
    let root = usize::from(last);
    let got = |x: Result<Tensor>| x.map(|x| println!("got {x}"));
    let mut known = true;
    let outcome = (|| match case {
        "broadcast_root" => got(mesh.broadcast(ones(4)?, root).and_then(|x| x.wait().map(|()| x))), // broadcast_root
        "scatter_root" => {
            let x = ones(4 * mesh.size())?;
            got(mesh.scatter(x, 0, root).and_then(|x| x.wait().map(|()| x))) // scatter_root
        }
        "reduce_root" => got(mesh.reduce(ones(4)?, Reduce::Sum, root).and_then(|x| x.wait().map(|()| x))), // reduce_root
        "gather_root" => got(mesh.gather(ones(4)?, 0, root).and_then(|x| x.wait().map(|()| x))), // gather_root
        "route" => {
            let route = Route::Shift(if last { -1 } else { 1 });
            got(mesh.permute(ones(4)?, route, Missing::Zeros).and_then(|x| x.wait().map(|()| x))) // route
        }
        "broadcast_dtype" => {
            let x = Tensor::ones(if last { Dtype::I32 } else { Dtype::F32 }, &[4])?;
            got(mesh.broadcast(x, 0).and_then(|x| x.wait().map(|()| x))) // broadcast_dtype
        }
        "list_order" => {
            let mut list: Vec<usize> = (0..mesh.size()).collect();
            if last {
                list.swap(0, 1);
            }
            let group = mesh.lists("g", &[&list])?; // list_order
            got(group.all_gather(ones(1)?, 0))
        }
        "splits" => {
            // Rank 1 expects more from rank 0 than it sends; all other parts match.
            let n = mesh.size();
            let outs: Vec<usize> = (0..n).map(|from| if me == 1 && from == 0 { 2 } else { 1 }).collect();
            got(mesh.all_to_all(ones(n)?, Some(&outs), Some(&vec![1; n])).and_then(|x| x.wait().map(|()| x))) // splits
        }
        "exit_later" => mesh.barrier(), // exit_later
        "parity" => mesh.parity("attention", if me == 0 { "flash" } else { "plain" }), // parity
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

/// Messages that are wrong or missing.
fn messages(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let got = |x: Result<Tensor>| x.map(|x| println!("got {x}"));
    let mut known = true;
    let outcome = (|| match case {
        "message_dtype" | "message_shape" | "message_length" | "message_large" => {
            let (sent, dtype, shape): (Tensor, Dtype, &[usize]) = match case {
                "message_dtype" => (ones(4)?, Dtype::I32, &[4]),
                "message_shape" => (ones(4)?.reshape(&[4, 1])?, Dtype::F32, &[2, 2]),
                "message_length" => (ones(4)?, Dtype::F32, &[3]),
                _ => (ones(8000)?.reshape(&[4000, 2])?, Dtype::F32, &[2, 4000]),
            };
            match me {
                0 => drop(mesh.isend(sent, 1, 3)?), // message_dtype, // message_shape, // message_length, // message_large
                1 => got(mesh.irecv(dtype, shape, 0, 3).and_then(|x| x.wait().map(|()| x)))?, // message_dtype, // message_shape, // message_length, // message_large
                _ => {}
            }
            mesh.barrier()
        }
        "unreceived" => {
            if me == 0 {
                drop(mesh.isend(ones(4)?, 1, 3)?); // unreceived
            }
            Ok(())
        }
        "send_first_small" | "send_first_large" => {
            let x = ones(if case == "send_first_small" { 4 } else { 40_000 })?;
            let other = 1 - me;
            mesh.isend(&x, other, 0)?.wait()?; // send_first_small, // send_first_large
            got(mesh.irecv(Dtype::F32, &[x.numel()], other, 0))
        }
        "receive_first" => {
            let before = (me + 2) % 3;
            let y = mesh.irecv(Dtype::F32, &[4], before, 0)?; // receive_first
            y.wait()?;
            mesh.isend(ones(4)?, (me + 1) % 3, 0)?.wait()
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

/// Calls that a rank leaves out, or whose errors nobody looks at.
fn missing(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let last = me + 1 == mesh.size();
    let got = |x: Result<Tensor>| x.map(|x| println!("got {x}"));
    let mut known = true;
    let outcome = (|| match case {
        "empty" if !last => got(mesh.all_reduce(ones(0)?, Reduce::Sum).and_then(|x| x.wait().map(|()| x))), // empty
        "empty" => {
            std::thread::sleep(Duration::from_millis(300));
            got(mesh.all_gather(ones(3)?, 0).and_then(|x| x.wait().map(|()| x))) // empty
        }
        "leaked_handle" | "leaked_mesh" | "exit_0" => {
            let x = mesh.all_reduce(ones(8 - me)?, Reduce::Sum)?; // leaked_handle, // leaked_mesh, // exit_0
            println!("done");
            match case {
                "leaked_handle" => std::mem::forget(x),
                "leaked_mesh" => std::mem::forget(mesh.clone()),
                _ => {
                    drop(x);
                    std::process::exit(0);
                }
            }
            Ok(())
        }
        "unseen" | "printed" => {
            let mut w = ones(8 - me)?;
            mesh.all_reduce_(&mut w, Reduce::Sum)?; // unseen, // printed
            match case {
                "printed" => println!("checksum {w}"),
                _ => println!("done"),
            }
            Ok(())
        }
        "skip_end" => {
            let y = mesh.all_reduce(ones(4)?, Reduce::Sum)?;
            y.wait()?;
            if last {
                Ok(())
            } else {
                got(mesh.all_reduce(y, Reduce::Max).and_then(|x| x.wait().map(|()| x))) // skip_end
            }
        }
        "late" | "leave" => {
            mesh.barrier()?;
            match me {
                2 if case == "leave" => Ok(()),
                2 => {
                    std::thread::sleep(Duration::from_secs(4));
                    Ok(())
                }
                1 => mesh.irecv(Dtype::I64, &[1], 2, 0)?.wait(),
                _ => mesh.barrier(),
            }
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

/// Compiled functions that run differently on the ranks.
fn compiled(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let group = mesh.clone();
    let got = |x: Tensor| x.wait().map(|()| println!("got {x}"));
    let mut known = true;
    let outcome = (|| match case {
        "one_breaks" | "one_breaks_late" => {
            let late = case == "one_breaks_late";
            let f = compile(move |x: Tensor| {
                let x = if late { group.all_reduce(x, Reduce::Sum)? } else { x };
                if me == 0 {
                    x.to_vec::<f32>()?; // one_breaks, // one_breaks_late
                }
                group.all_reduce(x.exp()?, Reduce::Max)
            })
            .name("step");
            got(f.call(ones(4)?)?)
        }
        "layers" => {
            let layer = |scale: f64| -> Result<_> {
                let (group, w) = (group.clone(), Tensor::full(Dtype::F32, &[4], scale)?);
                Ok((w.clone(), compile(move |x: Tensor| group.all_reduce(x.mul(&w)?, Reduce::Sum))))
            };
            let layers = [layer(10.0)?, layer(20.0)?];
            got(layers[me].1.call(ones(4)?)?) // layers
        }
        "one_fails" | "one_fails_late" => {
            let late = case == "one_fails_late";
            let f = compile(move |x: Tensor| {
                let y = group.all_reduce(&x, Reduce::Sum)?;
                if late {
                    y.to_vec::<f32>()?;
                }
                let y = if me == 1 { y.matmul(&x)? } else { y };
                group.all_reduce(y, Reduce::Max)
            })
            .name("step");
            got(f.call(ones(4)?)?)
        }
        "uneven_other" | "uneven_end" => {
            let f = compile(move |x: Tensor| group.all_reduce(x, Reduce::Sum)).name("step");
            for _ in 0..4 - me {
                f.call(ones(4)?)?.wait()?; // uneven_other // uneven_end
            }
            if case == "uneven_other" {
                got(mesh.all_reduce(ones(4)?, Reduce::Max)?)?; // uneven_other
            }
            Ok(())
        }
        "not_local" => {
            let f = compile(|x: Tensor| x.exp()).name("metrics");
            if me == 0 {
                got(f.call(ones(4)?)?)?; // not_local
            }
            mesh.barrier() // not_local
        }
        "sizes" => {
            let f = compile(move |x: Tensor| group.all_reduce(x.exp()?, Reduce::Sum));
            got(f.call(Tensor::ones(Dtype::F32, &[8 - me, 4])?)?)
        }
        "condition" => {
            let f = compile(move |x: Tensor| {
                let big = x.sum_all()?.gt(10.0)?;
                cond(&big, x, |x| group.all_reduce(x, Reduce::Sum), Ok) // condition
            });
            got(f.call(ones(8 + 8 * me)?.narrow(0, 0, 8)?)?)
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

/// Compiled functions that capture what differs or changes.
fn captured(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let group = mesh.clone();
    let got = |x: Tensor| x.wait().map(|()| println!("got {x}"));
    let mut known = true;
    let outcome = (|| match case {
        "captured_flag" => {
            let f = compile(move |x: Tensor| if me == 0 { group.all_reduce(x, Reduce::Sum) } else { Ok(x) })
                .name("step");
            let y = f.call(ones(4)?)?; // captured_flag
            got(mesh.all_gather(&y, 0)?)
        }
        "settings" => {
            let f = compile(move |(x, twice): (Tensor, bool)| {
                group.all_reduce(if twice { x.add(&x)? } else { x }, Reduce::Sum)
            });
            got(f.call((ones(4)?, me == 0))?) // settings
        }
        "captured_tensor" | "captured_on_one" => {
            let weight = Rc::new(RefCell::new(ones(4)?));
            let own = Rc::clone(&weight);
            let f = compile(move |x: Tensor| group.all_reduce(x.mul(&*own.borrow())?, Reduce::Sum)).name("f"); // captured_tensor, // captured_on_one
            for _ in 0..4 {
                f.call(ones(4)?)?.wait()?;
            }
            if case == "captured_tensor" || me == 0 {
                *weight.borrow_mut() = ones(4)?.add(&ones(4)?)?;
            }
            got(f.call(ones(4)?)?)
        }
        "captured_number" | "captured_list" => {
            let factor = Rc::new(Cell::new(1.0));
            let own = Rc::clone(&factor);
            let listed = case == "captured_list";
            let f = compile(move |x: Tensor| {
                let factor = match listed {
                    true => Tensor::from_slice(&[own.get() as f32; 4], &[4])?,
                    false => Tensor::full(Dtype::F32, &[4], own.get())?,
                };
                group.all_reduce(x.mul(&factor)?, Reduce::Sum) // captured_list
            })
            .name("f");
            for _ in 0..8 {
                f.call(ones(4)?)?.wait()?;
            }
            factor.set(2.0);
            // The next call is traced again.
            got(f.call(ones(4)?)?)
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

thread_local! {
    static KEPT: RefCell<Option<(Mesh, Vec<Tensor>)>> = const { RefCell::new(None) };
}

/// Calls that look wrong and are right.
fn right(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let other = 1usize.wrapping_sub(me);
    let mut known = true;
    let outcome = (|| match case {
        // The receiver comes later in the same program, so that the write must not wait for it.
        "write_after_send" => {
            let mut x = ones(40_000)?;
            let sent = mesh.isend(&x, other, 0)?;
            x.update(|elements: &mut [f32]| elements.fill(7.0))?;
            let slice = ones(10)?;
            x.narrow_mut(0, 0usize, 10usize)?.copy_from(&slice)?;
            let y = mesh.irecv(Dtype::F32, &[40_000], other, 0)?;
            let sum = y.sum_all()?.item::<f32>()?;
            sent.wait()?;
            assert_eq!((sum, x.sum_all()?.item::<f32>()?), (40_000.0, 7.0 * 39_990.0 + 10.0));
            println!("got {sum}");
            Ok(())
        }
        "write_after_gather" => {
            let mut x = ones(40_000)?;
            if me == 0 {
                let all = mesh.all_gather(&x, 0)?;
                x.update(|elements: &mut [f32]| elements.fill(7.0))?;
                mesh.isend(&x, 1, 0)?.wait()?;
                println!("got {}", all.sum_all()?.item::<f32>()?);
            } else {
                let y = mesh.irecv(Dtype::F32, &[40_000], 0, 0)?;
                assert_eq!(y.sum_all()?.item::<f32>()?, 280_000.0);
                println!("got {}", mesh.all_gather(&x, 0)?.sum_all()?.item::<f32>()?);
            }
            Ok(())
        }
        // One result stays unread while many others are dropped unread.
        "kept_and_dropped" => {
            let first = mesh.all_reduce(ones(1)?, Reduce::Sum)?;
            for i in 0..3000 {
                drop(mesh.all_reduce(ones(1000)?, Reduce::Sum)?);
                if i % 100 == 0 {
                    mesh.barrier()?;
                }
            }
            println!("got {}", first.item::<f32>()?);
            Ok(())
        }
        // The mesh is dropped with the thread, after the values that use it.
        "thread_local" => {
            let kept: Vec<Tensor> = (0..20)
                .map(|i| mesh.all_reduce(ones(if i % 2 == 0 { 1 } else { 5000 })?, Reduce::Sum))
                .collect::<Result<_>>()?;
            KEPT.with(|place| *place.borrow_mut() = Some((mesh.clone(), kept)));
            println!("got to the end");
            Ok(())
        }
        // They are never read, and exceed the number of concurrent operations.
        "dropped_messages" => {
            for i in 0..3000 {
                drop(mesh.irecv(Dtype::F32, &[8], Route::Ring(-1), i % 3)?);
                drop(mesh.isend(ones(8)?, Route::Ring(1), i % 3)?);
            }
            println!("got through");
            Ok(())
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

/// Ranks that are late, which is right.
fn late(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let mut known = true;
    let outcome = (|| match case {
        "slow_but_right" => {
            for round in 0..3 {
                if me == round {
                    std::thread::sleep(Duration::from_millis(400));
                }
                let y = mesh.irecv(Dtype::F32, &[4], Route::Ring(-1), 0)?;
                let sent = mesh.isend(ones(4)?, Route::Ring(1), 0)?;
                y.wait()?;
                sent.wait()?;
                mesh.barrier()?;
            }
            println!("got through");
            Ok(())
        }
        "very_slow" => {
            if me == 1 {
                std::thread::sleep(Duration::from_millis(10_500));
            }
            println!("got {}", mesh.all_reduce(ones(1)?, Reduce::Sum)?.item::<f32>()?);
            Ok(())
        }
        "longest_timeout" => {
            if me == 1 {
                std::thread::sleep(Duration::from_millis(50));
            }
            println!("got {}", mesh.all_reduce(ones(5000)?, Reduce::Sum)?.sum_all()?.item::<f32>()?);
            Ok(())
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}

/// Compiled functions that look wrong and are right.
fn right_compiled(case: &str, mesh: &Mesh, me: usize) -> Option<Result<()>> {
    let mut known = true;
    let outcome = (|| match case {
        "local" => {
            let f = compile(|x: Tensor| x.exp()?.sum_all()).name("metrics").local();
            let sum = if me == 0 { f.call(ones(4)?)?.item::<f32>()? } else { 0.0 };
            mesh.barrier()?;
            println!("got {sum}");
            Ok(())
        }
        "prints_in_a_trace" | "prints_in_a_fullgraph" => {
            let group = mesh.clone();
            let f = compile(move |x: Tensor| {
                let y = group.all_reduce(x, Reduce::Sum)?; // prints_in_a_trace, // prints_in_a_fullgraph
                println!("{y}");
                group.all_reduce(y, Reduce::Max)
            })
            .fullgraph(case == "prints_in_a_fullgraph");
            let y = f.call(ones(1)?)?;
            let broken = f.explain().to_string();
            let at = broken.find("wrong_programs/cases.rs:").map_or("nowhere", |at| &broken[at..]);
            println!("got {} at {at}", y.item::<f32>()?);
            Ok(())
        }
        // A handle that is dropped is waited for on the line that started it, wherever it is dropped.
        "dropped_by_two" => {
            let group = mesh.clone();
            fn start(group: &Mesh, x: &Tensor) -> Result<()> {
                drop(group.isend(x, Route::Ring(1), 0)?);
                group.irecv(Dtype::F32, &[4], Route::Ring(-1), 0)?.wait()
            }
            let f = compile(move |x: Tensor| {
                start(&group, &x)?;
                start(&group, &x)?;
                x.exp()
            });
            for _ in 0..5 {
                f.call(ones(4)?)?.wait()?;
            }
            println!("got through");
            Ok(())
        }
        _ => {
            known = false;
            Ok(())
        }
    })();
    known.then_some(outcome)
}
