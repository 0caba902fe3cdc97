//! A call of every method that communicates, and what it must give, by plain loops.

use consort::{Batched, Group, Missing, Place, Reduce, Result, Route, Tensor, ops};

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
    all_reduce_ [n: [2, n], [4]] |g, x| {
        g.all_reduce_(&mut x[0], SUM)?;
        g.all_reduce_(x[1].narrow_mut(0, 1usize, 2usize)?, SUM)?;
        Ok(x)
    };
    broadcast_ [n: [2, n]] |g, x| g.broadcast_(&mut x[0], g.size() - 1).map(|()| x);
    reduce_ [n: [2, n]] |g, x| g.reduce_(&mut x[0], SUM, g.size() - 1).map(|()| x);
    permute_ [n: [2, n]] |g, x| g.permute_(&mut x[0], NEXT, Missing::Error).map(|()| x);
    all_to_all_ [n: [2 * n, 3]] |g, x| g.all_to_all_(&mut x[0]).map(|()| x);
    all_gather_ [n: [2 * n, 3]] |g, x| g.all_gather_(&mut x[0], 0).map(|()| x);
    reduce_scatter_ [n: [2 * n, 3]] |g, x| g.reduce_scatter_(&mut x[0], SUM, 0).map(|()| x);
    gather_ [n: [2 * n, 3], [2 * n + 2]] |g, x| {
        g.gather_(&mut x[0], 0, g.size() - 1)?;
        g.gather_(x[1].narrow_mut(0, 1usize, 2 * g.size())?, 0, 0)?;
        Ok(x)
    };
    scatter_ [n: [2 * n, 3], [2 * n + 2]] |g, x| {
        g.scatter_(&mut x[0], 0, g.size() - 1)?;
        g.scatter_(x[1].narrow_mut(0, 1usize, 2 * g.size())?, 0, 0)?;
        Ok(x)
    };
    all_gather_into [n: [2 * n, 3], [2, 3]] |g, x| {
        let part = x.remove(1);
        g.all_gather_into(&mut x[0], part, 0).map(|()| x)
    };
    reduce_scatter_into [n: [2, 3], [2 * n, 3]] |g, x| {
        let whole = x.remove(1);
        g.reduce_scatter_into(&mut x[0], whole, SUM, 0).map(|()| x)
    };
    gather_into [n: [2 * n, 3], [2, 3]] |g, x| {
        let part = x.remove(1);
        g.gather_into(&mut x[0], part, 0, g.size() - 1).map(|()| x)
    };
    scatter_into [n: [2, 3], [2 * n, 3]] |g, x| {
        let whole = x.remove(1);
        g.scatter_into(&mut x[0], whole, 0, g.size() - 1).map(|()| x)
    };
    all_to_all_into [n: [2 * n, 3], [2 * n, 3]] |g, x| {
        let (sizes, sent) = (vec![2; g.size()], x.remove(1));
        g.all_to_all_into(&mut x[0], sent, Some(&sizes), Some(&sizes)).map(|()| x)
    };
    all_reduce_coalesced [n: [2, n], [4]] |g, x| g.all_reduce_coalesced(x, SUM);
    all_reduce_coalesced_ [n: [2, n], [4]] |g, x| g.all_reduce_coalesced_(&mut x, SUM).map(|()| x);
    all_gather_coalesced [n: [2, n], [4]] |g, x| g.all_gather_coalesced(&x);
    reduce_scatter_coalesced [n: [2 * n, 3], [n]] |g, x| g.reduce_scatter_coalesced(&x, SUM, &[0, 0]);
    all_gather_coalesced_ [n: [2 * n, 3], [n]] |g, x| g.all_gather_coalesced_(&mut x).map(|()| x);
    reduce_scatter_coalesced_ [n: [2 * n, 3], [n]] |g, x| {
        g.reduce_scatter_coalesced_(&mut x, SUM, &[0, 0]).map(|()| x)
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
    // Each member has `len` elements in the place of its part.
    let parts =
        |arg: usize, len: usize| -> Vec<i64> { (0..n * len).map(|i| element(i / len, arg, i)).collect() };
    let times = |member: usize, factor: usize, len: usize| -> Vec<i64> {
        of(member, 0, len).iter().map(|x| x * factor as i64).collect()
    };
    match name {
        "all_reduce" | "apply" => vec![sums(0, if name == "apply" { 2 * n } else { 6 * n })],
        "all_gather" | "all_gather_v" => vec![joined(0, 2 * n)],
        "reduce_scatter" | "reduce_scatter_v" => vec![(0..6).map(|i| sum(0, me * 6 + i)).collect()],
        "all_to_all" | "all_to_all_" | "all_to_all_into" => {
            let arg = usize::from(name == "all_to_all_into");
            vec![(0..6 * n).map(|i| element(i / 6, arg, me * 6 + i % 6)).collect()]
        }
        "broadcast" | "broadcast_" => vec![of(last, 0, 2 * n)],
        "reduce" | "reduce_" => vec![if_last(sums(0, 2 * n))],
        "gather" => vec![if_last(joined(0, 2 * n))],
        "scatter" => vec![(0..6).map(|i| element(last, 0, me * 6 + i)).collect()],
        "permute" | "permute_" | "isend" | "irecv" => vec![of(before, 0, 2 * n)],
        "batch" => vec![of(before, 0, 2 * n)],
        "barrier" => vec![],
        "all_reduce_" => {
            let mut slice = of(me, 1, 4);
            (1..3).for_each(|i| slice[i] = sum(1, i));
            vec![sums(0, 2 * n), slice]
        }
        "all_gather_" => vec![parts(0, 6)],
        "reduce_scatter_" => {
            vec![(0..6 * n).map(|i| if i / 6 == me { sum(0, i) } else { element(me, 0, i) }).collect()]
        }
        "gather_" => {
            let mut slice = of(me, 1, 2 * n + 2);
            for i in 0..2 * n {
                slice[1 + i] = if me == 0 { element(i / 2, 1, 1 + i) } else { 0 };
            }
            vec![if_last(parts(0, 6)), slice]
        }
        "scatter_" => {
            let mut slice = of(me, 1, 2 * n + 2);
            (2 * me..2 * me + 2).for_each(|i| slice[1 + i] = element(0, 1, 1 + i));
            vec![(0..6 * n).map(|i| element(if i / 6 == me { last } else { me }, 0, i)).collect(), slice]
        }
        "all_gather_into" => vec![joined(1, 6)],
        "reduce_scatter_into" => vec![(0..6).map(|i| sum(1, me * 6 + i)).collect()],
        "gather_into" => vec![if_last(joined(1, 6))],
        "scatter_into" => vec![(0..6).map(|i| element(last, 1, me * 6 + i)).collect()],
        "all_reduce_coalesced" | "all_reduce_coalesced_" => vec![sums(0, 2 * n), sums(1, 4)],
        "all_gather_coalesced" => vec![joined(0, 2 * n), joined(1, 4)],
        "reduce_scatter_coalesced" => vec![(0..6).map(|i| sum(0, me * 6 + i)).collect(), vec![sum(1, me)]],
        "all_gather_coalesced_" => vec![parts(0, 6), parts(1, 1)],
        "reduce_scatter_coalesced_" => {
            let mine = |arg: usize, len: usize| -> Vec<i64> {
                (0..n * len).map(|i| if i / len == me { sum(arg, i) } else { element(me, arg, i) }).collect()
            };
            vec![mine(0, 6), mine(1, 1)]
        }
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
        other => panic!("no plain loop for {other}"),
    }
}
