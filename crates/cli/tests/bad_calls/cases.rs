//! Wrong calls, one for each case. The line that is to blame ends with a comment that names its case.

use consort::{Dtype, Init, Mesh, Missing, Reduce, Result, Route, Tensor};

/// `n` elements.
fn new(dtype: Dtype, n: usize) -> Result<Tensor> {
    Tensor::ones(dtype, &[n])
}

/// Runs a case on this rank.
pub(crate) fn play(case: &str) -> Result<()> {
    if case == "axes_differ" {
        return axes_differ();
    }
    let mesh = consort::init()?;
    let me = mesh.my_rank()?;
    let x = new(Dtype::F32, 4)?;
    match case {
        "shapes" => mesh.all_reduce(new(Dtype::F32, 4 + me)?, Reduce::Sum)?.wait(), // shapes
        "turned" => {
            let x = new(Dtype::F32, 6)?.reshape(&[2 + me, 3 - me])?;
            mesh.all_reduce(x, Reduce::Sum)?.wait() // turned
        }
        "gathered_types" => {
            let x = new(if me == 0 { Dtype::F32 } else { Dtype::I32 }, 4)?;
            mesh.all_gather(x, 0)?.wait() // gathered_types
        }
        "dtypes" => {
            let x = new(if me == 0 { Dtype::F32 } else { Dtype::I32 }, 4)?;
            mesh.all_reduce(x, Reduce::Sum)?.wait() // dtypes
        }
        "reductions" => {
            let reduce = if me == 0 { Reduce::Sum } else { Reduce::Max };
            mesh.all_reduce(x, reduce)?.wait() // reductions
        }
        "list_types" => {
            let other = if me == 0 { Dtype::Bf16 } else { Dtype::F16 };
            let list = vec![x, new(other, 4)?, new(Dtype::I32, 2)?];
            mesh.all_reduce_coalesced(list, Reduce::Sum)?[0].wait() // list_types
        }
        "list_of_other_shapes" => {
            let list = [x, new(Dtype::F32, 3)?];
            mesh.reduce_scatter_list(&list, Reduce::Sum)?.wait() // list_of_other_shapes
        }
        "avg_of_integers" => mesh.all_reduce(new(Dtype::I32, 4)?, Reduce::Avg)?.wait(), // avg_of_integers
        "bits_of_floats" => mesh.all_reduce(new(Dtype::F32, 4)?, Reduce::Xor)?.wait(),  // bits_of_floats
        "not_divisible" => mesh.reduce_scatter(new(Dtype::F32, 3)?, Reduce::Sum, 0)?.wait(), // not_divisible
        "no_dimension" => mesh.all_gather(x, 1)?.wait(),                                // no_dimension
        "splits_too_few" => mesh.all_to_all(x, Some(&[2, 2]), Some(&[1, 1]))?.wait(),   // splits_too_few
        "splits_one_way" => mesh.all_to_all(x, None, Some(&[2, 2]))?.wait(),            // splits_one_way
        "splits_count" => mesh.all_to_all(x, Some(&[4]), Some(&[4]))?.wait(),           // splits_count
        "splits_other_side" => mesh.all_to_all(x, Some(&[1, 3]), Some(&[2, 2]))?.wait(), // splits_other_side
        "root_too_large" => mesh.broadcast(x, 7)?.wait(),                               // root_too_large
        "roots_differ" => mesh.broadcast(x, me)?.wait(),                                // roots_differ
        "member_too_large" => mesh.isend(x, 7, 0)?.wait(),                              // member_too_large
        "message_length" => match me {
            0 => mesh.isend(x, 1, 0)?.wait(),                // message_length
            _ => mesh.irecv(Dtype::F32, &[3], 0, 0)?.wait(), // message_length
        },
        "sizes_v" => mesh.all_gather_v(x, 0, &[4, 5])?.wait(), // sizes_v
        "sizes_v_differ" => mesh.reduce_scatter_v(x, Reduce::Sum, 0, &[4 - me, me])?.wait(), // sizes_v_differ
        "nobody_sends" => mesh.permute(x, Route::Shift(1), Missing::Error)?.wait(), // nobody_sends
        "order" => match me {
            0 => mesh.barrier(),                          // order
            _ => mesh.all_reduce(x, Reduce::Sum)?.wait(), // order
        },
        "list_lengths" => {
            let list = vec![x; 2 + me];
            mesh.all_reduce_coalesced(list, Reduce::Sum)?[0].wait() // list_lengths
        }
        "dims_of_list" => mesh.reduce_scatter_coalesced(&[x], Reduce::Sum, &[0, 0]).map(drop), // dims_of_list
        "out_dtype" => {
            let mut out = new(Dtype::I64, 8)?;
            mesh.all_gather_into(&mut out, x, 0) // out_dtype
        }
        "out_shape" => {
            let mut out = new(Dtype::F32, 7)?;
            mesh.all_gather_into(&mut out, x, 0) // out_shape
        }
        "mixed_dtypes" => x.add(&new(Dtype::I32, 4)?).map(drop), // mixed_dtypes
        "unknown_axis" => mesh.axis("tp").map(drop),             // unknown_axis
        "unequal_lists" => mesh.lists("g", &[&[0, 1], &[]]).map(drop), // unequal_lists
        "rank_in_two_lists" => mesh.lists("g", &[&[0], &[0]]).map(drop), // rank_in_two_lists
        "rank_of_no_list" => mesh.lists("g", &[&[0], &[9]]).map(drop), // rank_of_no_list
        "after_error" => {
            let first = mesh.all_reduce(new(Dtype::F32, 4 + me)?, Reduce::Sum);
            assert!(first.and_then(|y| y.wait()).is_err());
            mesh.all_reduce(x, Reduce::Sum)?.wait() // after_error
        }
        "mesh_is_gone" => {
            drop(mesh);
            x.add(&x).map(drop) // mesh_is_gone
        }
        "init_again" => {
            drop((mesh, x));
            consort::init().map(drop) // init_again
        }
        "second_init" => consort::init().map(drop), // second_init
        "rank_leaves" => match me {
            0 => mesh.all_reduce(x, Reduce::Sum)?.wait(), // rank_leaves
            _ => mesh.axis("nothing").map(drop),
        },
        "other_world" => other_world(&mesh, &x),
        _ => panic!("no case {case}"),
    }
}

/// Uses a tensor of the ranks' world in another world, made by this process alone.
fn other_world(mesh: &Mesh, x: &Tensor) -> Result<()> {
    let shapes = Mesh::of_shapes(&[("tp", 2)], 0)?;
    mesh.barrier()?;
    shapes.all_reduce(x, Reduce::Sum).map(drop) // other_world
}

fn axes_differ() -> Result<()> {
    let axes = if std::env::var("CONSORT_RANK").is_ok_and(|rank| rank == "0") { "dp" } else { "tp" };
    Init::new().axes(&[(axes, 2)]).start().map(drop) // axes_differ
}
