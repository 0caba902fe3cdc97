//! A call of every method that communicates, and what it must give, by plain loops.

use consort::{Batched, Group, Missing, Place, Reduce, Result, Route, SliceMut, Tensor, ops};

/// A method: the shapes of its arguments on `n` ranks, and a call that returns all tensors that it gives or writes.
pub(crate) struct Form {
    pub(crate) name: &'static str,
    pub(crate) shapes: fn(usize) -> Vec<Vec<usize>>,
    pub(crate) call: fn(&Group, Vec<Tensor>) -> Result<Vec<Tensor>>,
}

/// An element of an argument of a member.
pub(crate) fn element(member: usize, argument: usize, i: usize) -> i64 {
    (1000 * member + 100 * argument + i) as i64
}

const SUM: Reduce = Reduce::Sum;
const NEXT: Route = Route::Ring(1);
const LAST: Route = Route::Ring(-1);

macro_rules! forms {
    ($($name:ident [$n:ident: $($shape:expr),*] |$group:ident, $args:ident| $call:expr;)*) => {
        /// All of them.
        pub(crate) fn forms() -> Vec<Form> {
            vec![$(Form {
                name: stringify!($name),
                shapes: |$n| vec![$(Vec::from($shape)),*],
                call: |$group, #[allow(unused_mut, reason = "for those that write")] mut $args| $call,
            }),*]
        }
    };
}

/// The first tensor, and slices of the next two with so many rows: rows of one, which have no gaps, and a box of the
/// other, whose rows have gaps between them.
fn places(x: &mut [Tensor], rows: usize) -> Result<Vec<SliceMut<'_>>> {
    let [whole, wide, boxed, ..] = x else { panic!("three tensors to write, got {}", x.len()) };
    Ok(vec![whole.into_slice(), wide.narrow_mut(0, 1usize, rows)?, boxed.slice_mut(&[1, 1], &[rows, 2])?])
}

/// Runs a form on each of the places.
fn in_place(
    group: &Group,
    mut x: Vec<Tensor>,
    form: impl Fn(SliceMut<'_>) -> Result<()>,
) -> Result<Vec<Tensor>> {
    places(&mut x, 2 * group.size())?.into_iter().try_for_each(form)?;
    Ok(x)
}

/// Runs a form that writes to each of the places: the rows have three columns, and two in the box.
fn into(
    rows: usize,
    mut x: Vec<Tensor>,
    form: impl Fn(SliceMut<'_>, &Tensor) -> Result<()>,
) -> Result<Vec<Tensor>> {
    let sent = x.split_off(3);
    let mut sent = [&sent[0], &sent[0], &sent[1]].into_iter();
    places(&mut x, rows)?.into_iter().try_for_each(|out| form(out, sent.next().unwrap()))?;
    Ok(x)
}

/// One result.
fn one(result: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![result?])
}

forms! {
    all_reduce [n: [2 * n, 3]] |g, x| one(g.all_reduce(x.remove(0), SUM));
    all_gather [n: [2, n]] |g, x| one(g.all_gather(x.remove(0), 0));
    reduce_scatter [n: [2 * n, 3]] |g, x| one(g.reduce_scatter(x.remove(0), SUM, 0));
    all_to_all [n: [2 * n, 3]] |g, x| one(g.all_to_all(x.remove(0), None, None));
    broadcast [n: [2, n]] |g, x| one(g.broadcast(x.remove(0), g.size() - 1));
    reduce [n: [2, n]] |g, x| one(g.reduce(x.remove(0), SUM, g.size() - 1));
    gather [n: [2, n]] |g, x| one(g.gather(x.remove(0), 0, g.size() - 1));
    scatter [n: [2 * n, 3]] |g, x| one(g.scatter(x.remove(0), 0, g.size() - 1));
    permute [n: [2, n]] |g, x| one(g.permute(x.remove(0), NEXT, Missing::Error));
    all_gather_v [n: [2, n]] |g, x| one(g.all_gather_v(x.remove(0), 0, &vec![2; g.size()]));
    reduce_scatter_v [n: [2 * n, 3]] |g, x| one(g.reduce_scatter_v(x.remove(0), SUM, 0, &vec![2; g.size()]));
    barrier [_n: ] |g, x| g.barrier().map(|()| x);
    apply [n: [2, n]] |g, x| g.apply(&ops::AllReduceStart { reduce: SUM, over: g.name() }, x);
    all_reduce_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.all_reduce_(x, SUM))
    };
    broadcast_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.broadcast_(x, g.size() - 1))
    };
    reduce_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.reduce_(x, SUM, g.size() - 1))
    };
    permute_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.permute_(x, NEXT, Missing::Error))
    };
    all_to_all_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| in_place(g, x, |x| g.all_to_all_(x));
    all_gather_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.all_gather_(x, 0))
    };
    reduce_scatter_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.reduce_scatter_(x, SUM, 0))
    };
    gather_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.gather_(x, 0, g.size() - 1))
    };
    scatter_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        in_place(g, x, |x| g.scatter_(x, 0, g.size() - 1))
    };
    all_gather_into [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3], [2, 3], [2, 2]] |g, x| {
        into(2 * g.size(), x, |out, x| g.all_gather_into(out, x, 0))
    };
    reduce_scatter_into [n: [2, 3], [4, 3], [4, 3], [2 * n, 3], [2 * n, 2]] |g, x| {
        into(2, x, |out, x| g.reduce_scatter_into(out, x, SUM, 0))
    };
    gather_into [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3], [2, 3], [2, 2]] |g, x| {
        into(2 * g.size(), x, |out, x| g.gather_into(out, x, 0, g.size() - 1))
    };
    scatter_into [n: [2, 3], [4, 3], [4, 3], [2 * n, 3], [2 * n, 2]] |g, x| {
        into(2, x, |out, x| g.scatter_into(out, x, 0, g.size() - 1))
    };
    all_to_all_into [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3], [2 * n, 3], [2 * n, 2]] |g, x| {
        let sizes = vec![2; g.size()];
        into(2 * g.size(), x, |out, x| g.all_to_all_into(out, x, Some(&sizes), Some(&sizes)))
    };
    all_reduce_coalesced [n: [2, n], [4]] |g, x| g.all_reduce_coalesced(x, SUM);
    all_reduce_coalesced_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        g.all_reduce_coalesced_(places(&mut x, 2 * g.size())?, SUM).map(|()| x)
    };
    all_gather_coalesced [n: [2, n], [4]] |g, x| g.all_gather_coalesced(&x);
    reduce_scatter_coalesced [n: [2 * n, 3], [n]] |g, x| g.reduce_scatter_coalesced(&x, SUM, &[0, 0]);
    all_gather_coalesced_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        g.all_gather_coalesced_(places(&mut x, 2 * g.size())?).map(|()| x)
    };
    reduce_scatter_coalesced_ [n: [2 * n, 3], [2 * n + 2, 3], [2 * n + 2, 3]] |g, x| {
        g.reduce_scatter_coalesced_(places(&mut x, 2 * g.size())?, SUM, &[0, 0, 0]).map(|()| x)
    };
    all_gather_list [n: [2, n]] |g, x| g.all_gather_list(x.remove(0));
    all_gather_list_into [n: [2, n], [2, n]] |g, x| {
        let (sent, mut list) = (x.remove(0), vec![x.remove(0); g.size()]);
        g.all_gather_list_into(&mut list, sent).map(|()| list)
    };
    gather_list [n: [2, n]] |g, x| g.gather_list(x.remove(0), g.size() - 1);
    gather_list_into [n: [2, n], [2, n]] |g, x| {
        let (sent, mut list) = (x.remove(0), vec![x.remove(0); g.size()]);
        g.gather_list_into(&mut list, sent, g.size() - 1).map(|()| list)
    };
    reduce_scatter_list_into [n: [2, n], [2, n]] |g, x| {
        let list = multiples(g, &x.remove(0))?;
        g.reduce_scatter_list_into(&mut x[0], &list, SUM).map(|()| x)
    };
    scatter_list_into [n: [2, n], [3, n]] |g, x| {
        let list = multiples(g, &x.remove(0))?;
        g.scatter_list_into(x[0].narrow_mut(0, 1usize, 2usize)?, &list, g.size() - 1).map(|()| x)
    };
    reduce_scatter_list [n: [2, n]] |g, x| one(g.reduce_scatter_list(&multiples(g, &x[0])?, SUM));
    scatter_list [n: [2, n]] |g, x| one(g.scatter_list(&multiples(g, &x[0])?, g.size() - 1));
    all_to_all_list [n: [2, n]] |g, x| g.all_to_all_list(&multiples(g, &x[0])?);
    all_to_all_list_into [n: [2 * n, 3], [2, 3], [2, 3]] |g, x| {
        let (mut wide, out, sent) = (x.remove(0), x.remove(0), x.remove(0));
        let (list, mut out) = (vec![sent; g.size()], vec![out; g.size()]);
        // Whole tensors, and a slice.
        let mut places = vec![wide.narrow_mut(0, 0usize, 2usize)?];
        places.extend(out[1..].iter_mut().map(Place::into_slice));
        g.all_to_all_list_into(places, &list)?;
        out[0] = wide;
        Ok(out)
    };
    isend [n: [2, n]] |g, x| {
        let (sent, got) = (g.isend(&x[0], NEXT, 3)?, g.irecv(x[0].dtype(), &[2, g.size()], LAST, 3)?);
        sent.wait()?;
        Ok(vec![got])
    };
    irecv [n: [2, n]] |g, x| {
        let got = g.irecv(x[0].dtype(), &[2, g.size()], LAST, 4)?;
        g.isend(&x[0], NEXT, 4)?.wait()?;
        Ok(vec![got])
    };
    recv_into [n: [2, n], [4, n]] |g, x| {
        let sent = g.isend(&x[0], NEXT, 5)?;
        g.recv_into(x[1].narrow_mut(0, 1usize, 2usize)?, LAST, 5)?;
        sent.wait()?;
        Ok(vec![x.remove(1)])
    };
    batch [n: [2, n], [2, n]] |g, x| {
        let sent = x.remove(0);
        g.batch(vec![Batched::send(sent, NEXT, 6), Batched::recv(&mut x[0], LAST, 6)])?.wait()?;
        Ok(x)
    };
    pending [n: [2, n], [4]] |g, x| {
        let gathered = g.pending(|| {
            g.all_reduce_(&mut x[1], SUM)?;
            g.all_gather(&x[0], 0)
        })?;
        Ok(vec![gathered.wait()?, x.remove(1)])
    };
}

/// A list with a tensor for each member: `x`, twice `x` and so on.
fn multiples(group: &Group, x: &Tensor) -> Result<Vec<Tensor>> {
    let mut list = vec![x.clone()];
    for _ in 1..group.size() {
        let last = list.last().unwrap_or(x);
        list.push(match x.dtype() {
            consort::Dtype::Bool => last.clone(),
            _ => last.add(x)?,
        });
    }
    Ok(list)
}

/// What a call gives on a rank, as plain lists.
pub(crate) fn wanted(name: &str, me: usize, n: usize) -> Vec<Vec<i64>> {
    let (last, before) = (n - 1, (me + n - 1) % n);
    let of = |member: usize, arg: usize, len: usize| -> Vec<i64> {
        (0..len).map(|i| element(member, arg, i)).collect()
    };
    let sum = |arg: usize, i: usize| -> i64 { (0..n).map(|member| element(member, arg, i)).sum() };
    let sums = |arg: usize, len: usize| -> Vec<i64> { (0..len).map(|i| sum(arg, i)).collect() };
    let joined =
        |arg: usize, len: usize| -> Vec<i64> { (0..n).flat_map(|member| of(member, arg, len)).collect() };
    let if_last = |list: Vec<i64>| if me == last { list } else { vec![0; list.len()] };
    let times = |member: usize, factor: usize, len: usize| -> Vec<i64> {
        of(member, 0, len).iter().map(|x| x * factor as i64).collect()
    };
    match name {
        "all_reduce" | "apply" => vec![sums(0, if name == "apply" { 2 * n } else { 6 * n })],
        "all_gather" | "all_gather_v" => vec![joined(0, 2 * n)],
        "reduce_scatter" | "reduce_scatter_v" => vec![(0..6).map(|i| sum(0, me * 6 + i)).collect()],
        "all_to_all" => vec![(0..6 * n).map(|i| element(i / 6, 0, me * 6 + i % 6)).collect()],
        "broadcast" => vec![of(last, 0, 2 * n)],
        "reduce" => vec![if_last(sums(0, 2 * n))],
        "gather" => vec![if_last(joined(0, 2 * n))],
        "scatter" => vec![(0..6).map(|i| element(last, 0, me * 6 + i)).collect()],
        "permute" | "isend" | "irecv" => vec![of(before, 0, 2 * n)],
        "batch" => vec![of(before, 0, 2 * n)],
        "barrier" => vec![],
        "all_reduce_coalesced" => vec![sums(0, 2 * n), sums(1, 4)],
        "all_gather_coalesced" => vec![joined(0, 2 * n), joined(1, 4)],
        "reduce_scatter_coalesced" => vec![(0..6).map(|i| sum(0, me * 6 + i)).collect(), vec![sum(1, me)]],
        "all_gather_list" | "all_gather_list_into" => (0..n).map(|member| of(member, 0, 2 * n)).collect(),
        "gather_list" | "gather_list_into" => (0..n).map(|member| if_last(of(member, 0, 2 * n))).collect(),
        "reduce_scatter_list" | "reduce_scatter_list_into" => {
            vec![sums(0, 2 * n).iter().map(|x| x * (me + 1) as i64).collect()]
        }
        "scatter_list_into" => vec![[of(me, 1, n), times(last, me + 1, 2 * n)].concat()],
        "scatter_list" => vec![times(last, me + 1, 2 * n)],
        "all_to_all_list" => (0..n).map(|member| times(member, me + 1, 2 * n)).collect(),
        "all_to_all_list_into" => {
            let mut wide = of(me, 0, 6 * n);
            wide[..6].copy_from_slice(&of(0, 2, 6));
            [wide].into_iter().chain((1..n).map(|member| of(member, 2, 6))).collect()
        }
        "recv_into" => {
            let mut whole = of(me, 1, 4 * n);
            whole[n..3 * n].copy_from_slice(&of(before, 0, 2 * n));
            vec![whole]
        }
        "pending" => vec![joined(0, 2 * n), sums(1, 4)],
        other => wanted_in_places(other, me, n),
    }
}

/// What a call writes to the three places, and what the tensors around them keep.
fn wanted_in_places(name: &str, me: usize, n: usize) -> Vec<Vec<i64>> {
    let last = n - 1;
    let rows = if matches!(name, "reduce_scatter_into" | "scatter_into") { 2 } else { 2 * n };
    (0..3)
        .map(|arg| {
            let (width, around) = (if arg == 2 { 2 } else { 3 }, if arg == 0 { 0 } else { 2 });
            // The elements of the place, by their number in the tensor around it.
            let inside = |k: usize| match arg {
                0 => k,
                1 => 3 + k,
                _ => 3 * (1 + k / 2) + 1 + k % 2,
            };
            let x = |member: usize, k: usize| element(member, arg, inside(k));
            let sent = |member: usize, k: usize| element(member, if arg == 2 { 4 } else { 3 }, k);
            // Elements of two rows: the part of a member.
            let part = 2 * width;
            let new = |k: usize| -> i64 {
                let (of, i) = (k / part, k % part);
                match name {
                    "all_reduce_" | "all_reduce_coalesced_" => (0..n).map(|member| x(member, k)).sum(),
                    "broadcast_" => x(last, k),
                    "reduce_" if me == last => (0..n).map(|member| x(member, k)).sum(),
                    "permute_" => x((me + n - 1) % n, k),
                    "all_to_all_" => x(of, me * part + i),
                    "all_gather_" | "all_gather_coalesced_" => x(of, k),
                    "reduce_scatter_" | "reduce_scatter_coalesced_" if of == me => {
                        (0..n).map(|member| x(member, k)).sum()
                    }
                    "gather_" if me == last => x(of, k),
                    "scatter_" if of == me => x(last, k),
                    "reduce_scatter_" | "reduce_scatter_coalesced_" | "scatter_" => x(me, k),
                    "all_gather_into" => sent(of, i),
                    "gather_into" if me == last => sent(of, i),
                    "reduce_scatter_into" => (0..n).map(|member| sent(member, me * part + k)).sum(),
                    "scatter_into" => sent(last, me * part + k),
                    "all_to_all_into" => sent(of, me * part + i),
                    "reduce_" | "gather_" | "gather_into" => 0,
                    other => panic!("no plain loop for {other}"),
                }
            };
            let mut all: Vec<i64> = (0..3 * (rows + around)).map(|i| element(me, arg, i)).collect();
            (0..rows * width).for_each(|k| all[inside(k)] = new(k));
            all
        })
        .collect()
}
