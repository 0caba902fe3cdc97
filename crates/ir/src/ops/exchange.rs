//! Point to point: a permutation of the group, and batches of sends and receives.

use std::fmt::Write;

use consort_types::{Axes, Collective, Failure, GroupName, Kind, Message, Missing, Peer, Rank, Route};

use crate::index::Index;
use crate::literal::Literal;
use crate::mesh::Mesh;
use crate::op;
use crate::ops::attr::ListAttr;
use crate::ops::collective::{by_rank, check_equal_shapes, own};
use crate::ops::{
    Attr, Cost, CostCx, Cotangents, EvalCx, EvalError, Ge, GroupEvalCx, IndexValue, InferCx, OpDef, Term,
    Unmatched, VjpCx, group_rank,
};
use crate::text::{Cursor, ParseError};
use crate::types::{TensorType, Type};

/// Checks that a table has an entry for each member.
fn check_route(route: &Route, rule: &'static str, n: u32) -> Result<(), Box<Failure>> {
    let Route::Table(entries) = route else { return Ok(()) };
    if entries.len() != n as usize {
        return Err(Failure::rule(rule, (format!("a table of {n} entries"), entries.len().to_string())));
    }
    match entries.iter().flatten().find(|to| **to >= n) {
        Some(to) => {
            Err(Failure::rule(rule, (format!("ranks below {n}, the size of the group"), to.to_string())))
        }
        None => Ok(()),
    }
}

impl Attr for Route {
    const KIND: &'static str = "ring(+k), shift(+k) or table(rank or none, ..)";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        let _ = match self {
            Route::Ring(by) => write!(out, "ring({by:+})"),
            Route::Shift(by) => write!(out, "shift({by:+})"),
            Route::Table(entries) => {
                let text = |entry: &Option<u32>| entry.map_or("none".to_string(), |rank| rank.to_string());
                write!(out, "table({})", entries.iter().map(text).collect::<Vec<_>>().join(", "))
            }
        };
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Route, ParseError> {
        let word = cursor.peek();
        if !matches!(word, "ring" | "shift" | "table") {
            return Err(cursor.expected(Self::KIND));
        }
        cursor.next_token();
        cursor.expect("(")?;
        if word == "table" {
            let entry = |cursor: &mut Cursor<'_>| {
                if cursor.eat("none") { Ok(None) } else { cursor.number("a rank or none").map(Some) }
            };
            return Ok(Route::Table(cursor.list(")", entry)?));
        }
        let _ = cursor.eat("+");
        let by = cursor.integer()?;
        cursor.expect(")")?;
        Ok(if word == "ring" { Route::Ring(by) } else { Route::Shift(by) })
    }
}

impl Attr for Missing {
    const KIND: &'static str = "zeros or error";
    fn write(&self, out: &mut String, _mesh: &Mesh) {
        out.push_str(if *self == Missing::Zeros { "zeros" } else { "error" });
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Missing, ParseError> {
        cursor.one_of(Self::KIND, |word| match word {
            "zeros" => Some(Missing::Zeros),
            "error" => Some(Missing::Error),
            _ => None,
        })
    }
}

/// The route of the answers: from each member to the one that sends to it.
fn inverse(route: &Route, n: u32) -> Route {
    match route {
        Route::Ring(by) => Route::Ring(-(by % i64::from(n.max(1)))),
        Route::Shift(by) => Route::Shift(by.saturating_neg()),
        Route::Table(_) => {
            let mut back = vec![None; n as usize];
            for from in 0..n {
                if let Some(to) = route.to(from, n).and_then(|to| back.get_mut(to as usize)) {
                    *to = Some(from);
                }
            }
            Route::Table(back)
        }
    }
}

/// The cotangent of what stands for a message: that of the result where none comes, which is also so on a rank outside of
/// the group; zero elsewhere. None if a message comes on every rank.
fn kept<'c, 'm>(
    cx: &'c VjpCx<'m>,
    message: &Message<Index>,
    over: GroupName,
    g: Term<'c, 'm>,
) -> Option<Term<'c, 'm>> {
    let (mesh, none) = (cx.mesh(), Index::constant(-1));
    let n = mesh.group_size(over);
    let peer = |me: u32| match &message.peer {
        Peer::Route(route) => route.to(me, n).map_or(none.clone(), |to| Index::from(i64::from(to))),
        Peer::At(peer) => peer.clone(),
    };
    let all_have_one = |me| peer(me).as_const().is_some_and(|peer| peer >= 0);
    if mesh.covers(over) && (0..n).all(all_have_one) {
        return None;
    }
    let peer = if mesh.covers(over) {
        Index::pick(&group_rank(mesh, over), &(0..n).map(peer).collect::<Vec<_>>())
    } else {
        by_rank(mesh, over, |me| me.map_or(none.clone(), peer))
    };
    let peer = cx.op(IndexValue { value: peer }, &[]);
    let comes = peer.compare(Ge {}, peer.fill(0.0));
    Some(comes.widen(g).select(g.fill(0.0), g))
}

op! {
    /// Each member sends its tensors along a route; each gets those of the member that sends to it.
    ///
    /// (C1) A table has an entry for each member, below the size of the group.
    ///
    /// (C2) No two members send to one.
    ///
    /// (C3) With `missing=error`, every member gets something.
    ///
    /// (C4) The shapes are equal on all members.
    pub struct PermuteStart("permute_start")(x; more..) {
        /// Where each member sends.
        route: Route,
        /// The result of a member that receives nothing.
        missing: Missing,
        /// The group.
        over: GroupName
    }
    example "mesh (sp: 3)\n\nfunc @f(v0: f32[1]{sp}) -> f32[1]{sp} {\n    v1 = permute_start[route=ring(+1), missing=error, over=sp] v0 : pending<f32[1]{sp}>\n    v2 = wait v1 : f32[1]{sp}\n    return v2\n}\n; run: @f([1] | [2] | [3]) == [3] | [1] | [2]\n"
}

impl OpDef for PermuteStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let n = cx.mesh.group_size(self.over);
        check_route(&self.route, "C1", n)?;
        let mut taken = vec![None; n as usize];
        for from in 0..n {
            if let Some(to) = self.route.to(from, n)
                && let Some(other) = taken[to as usize].replace(from)
            {
                return Err(Failure::rule(
                    "C2",
                    format!("expected one sender to each member, but {other} and {from} send to {to}"),
                ));
            }
        }
        if self.missing == Missing::Error && !self.route.reaches_all(n) {
            let to = taken.iter().position(Option::is_none).unwrap_or(0);
            let violation = Failure::rule(
                "C3",
                format!("expected every member to get something, but nobody sends to {to}"),
            );
            return Err(violation.note("`missing=zeros` gives such members zeros"));
        }
        check_equal_shapes(cx, "C4", self.over)?;
        // A value that is equal on all members stays equal after a permutation, if all members receive.
        let (all, axes) = (self.route.reaches_all(n), cx.mesh.group_axes(self.over));
        let result = |x: &&TensorType| {
            let equal = all && x.varies.intersect(axes).is_empty();
            if equal { (*x).clone() } else { x.with_varies(own(x.varies, self.over, cx.mesh)) }
        };
        Ok(vec![Type::Pending(cx.tensors()?.iter().map(result).collect())])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        Some(Collective { route: Some(&self.route), ..Collective::new(Kind::Permute, self.over) })
    }
    fn eval_group(
        &self,
        cx: &GroupEvalCx<'_>,
        args: &[Vec<Literal>],
    ) -> Result<Vec<Vec<Literal>>, EvalError> {
        let zeros = |x: &Literal| Literal::zeros(x.dtype, x.shape.clone());
        let mut results: Vec<Vec<Literal>> =
            args.iter().map(|member| member.iter().map(zeros).collect()).collect();
        for (from, tensors) in args.iter().enumerate() {
            if let Some(to) = self.route.to(from as u32, cx.n() as u32) {
                results[to as usize] = tensors.clone();
            }
        }
        Ok(results)
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let n = cx.mesh().group_size(self.over);
        let route = inverse(&self.route, n);
        let missing = if route.reaches_all(n) { self.missing } else { Missing::Zeros };
        cx.together(|_, terms| cx.start_wait(PermuteStart { route, missing, over: self.over }, terms))
    }
}

impl Attr for Peer<Index> {
    const KIND: &'static str = "ring(+k), shift(+k), table(..) or at(size expression)";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        match self {
            Peer::Route(route) => route.write(out, mesh),
            Peer::At(index) => drop(write!(out, "at({})", index.display(mesh))),
        }
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Peer<Index>, ParseError> {
        if cursor.eat("at") {
            cursor.expect("(")?;
            let index = cursor.index()?;
            cursor.expect(")")?;
            return Ok(Peer::At(index));
        }
        if !matches!(cursor.peek(), "ring" | "shift" | "table") {
            return Err(cursor.expected(Self::KIND));
        }
        Route::read(cursor).map(Peer::Route)
    }
    fn indices(&self, f: &mut dyn FnMut(&Index)) {
        if let Peer::At(index) = self {
            f(index);
        }
    }
}

/// The rank of the peer of a message, if there is one; `members` are those of its group.
pub fn peer_of(
    message: &Message<Index>,
    cx: &EvalCx<'_>,
    over: GroupName,
    members: &[Rank],
) -> Result<Option<Rank>, EvalError> {
    let n = members.len() as u32;
    let Some(me) = cx.mesh.group_rank(over, cx.rank) else { return Ok(None) };
    match message.peer(me, n, |index| cx.index(index))? {
        -1 => Ok(None),
        to => match members.get(usize::try_from(to).unwrap_or(usize::MAX)) {
            Some(rank) => Ok(Some(*rank)),
            None => {
                let headline = Failure::peer(n, to).headline();
                Err(EvalError::unmatched(headline, Unmatched::Peer { peer: to, size: n }))
            }
        },
    }
}

impl Attr for Message<Index> {
    const KIND: &'static str = "peer and tag";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        self.peer.write(out, mesh);
        let _ = write!(out, " tag {}", self.tag.display(mesh));
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Message<Index>, ParseError> {
        let peer = Peer::read(cursor)?;
        cursor.expect("tag")?;
        Ok(Message { peer, tag: cursor.index()? })
    }
    fn indices(&self, f: &mut dyn FnMut(&Index)) {
        self.peer.indices(f);
        f(&self.tag);
    }
}

impl ListAttr for Message<Index> {
    const LIST: &'static str = "list of messages: peer, then `tag` and a size expression";
}

op! {
    /// A batch of sends and receives. The first operands are sent, one for each entry of `send`; the others
    /// stand for what is received, one for each entry of `recv`: they give the type, and the value where
    /// there is no peer (an open border keeps its elements). The wait returns the received tensors when all
    /// messages of the batch have matched. This is the op of rings and of halo exchange.
    ///
    /// (C1) There is an operand for each send and for each receive.
    ///
    /// (C2) A table has an entry for each member; ranks that are named are below the size of the group.
    ///
    /// (C3) A send and a receive that match carry one element type and one shape (checked when they match).
    pub struct ExchangeStart("exchange_start")(; operands..) {
        /// The sends.
        send: Vec<Message<Index>>,
        /// The receives.
        recv: Vec<Message<Index>>,
        /// The group.
        over: GroupName
    }
    example "mesh (sp: 3)\n\nfunc @f(v0: f32[1]{sp}, v1: f32[1]) -> f32[1]{sp} {\n    v2 = exchange_start[send=[shift(+1) tag 0], recv=[shift(-1) tag 0], over=sp] v0, v1 : pending<f32[1]{sp}>\n    v3 = wait v2 : f32[1]{sp}\n    return v3\n}\n; run: @f([1] | [2] | [3], [-1]) == [-1] | [1] | [2]\n"
}

impl OpDef for ExchangeStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
        let (sends, recvs) = (self.send.len(), self.recv.len());
        if cx.args.len() != sends + recvs {
            let message =
                (format!("{sends} operands to send and {recvs} to receive"), cx.args.len().to_string());
            return Err(Failure::rule("C1", message));
        }
        for message in self.send.iter().chain(&self.recv) {
            let n = cx.mesh.group_size(self.over);
            match &message.peer {
                Peer::Route(route) => check_route(route, "C2", n)?,
                Peer::At(index) if index.is_invalid() => {
                    return Err(Failure::peer(n, "a number that does not fit in 64 bits"));
                }
                Peer::At(index) => match index.as_const() {
                    Some(to) if !(-1..i64::from(n)).contains(&to) => return Err(Failure::peer(n, to)),
                    _ => {}
                },
            }
        }
        // A receive may match any send; one without sends beside it, those of another op, of which nothing is known.
        let operands = cx.tensors()?;
        let sent = match &operands[..sends] {
            [] => cx.mesh.all_axes(),
            sent => sent.iter().fold(Axes::NONE, |set, x| set.union(x.varies)),
        };
        let received = |x: &&TensorType| x.with_varies(own(x.varies.union(sent), self.over, cx.mesh));
        Ok(vec![Type::Pending(operands[sends..].iter().map(received).collect())])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), cx.result_bytes())
    }
    fn collective(&self) -> Option<Collective<'_, Index>> {
        let exchange = Collective::new(Kind::Exchange, self.over);
        Some(Collective { sends: &self.send, receives: &self.recv, ..exchange })
    }
    fn vjp<'c, 'm>(&self, cx: &'c VjpCx<'m>) -> Cotangents<'c, 'm> {
        let sends = self.send.len();
        let is_float = |i: &usize| cx.arg_ty(*i).dtype.is_float();
        // The whole order is reversed, so that messages of one tag meet as they did.
        let received: Vec<usize> = (0..self.recv.len()).rev().filter(|i| is_float(&(sends + i))).collect();
        let sent: Vec<usize> = (0..sends).rev().filter(is_float).collect();
        let mut operands: Vec<Term<'c, 'm>> = received.iter().map(|i| cx.cotangent(*i)).collect();
        operands.extend(sent.iter().map(|i| cx.zeros(&cx.arg_ty(*i))));
        let send = received.iter().map(|i| self.recv[*i].clone()).collect();
        let recv = sent.iter().map(|i| self.send[*i].clone()).collect();
        let back = cx.start_wait(ExchangeStart { send, recv, over: self.over }, &operands);
        let mut all = vec![None; cx.n_args()];
        sent.iter().zip(back).for_each(|(i, term)| all[*i] = Some(term));
        for i in received.into_iter().filter(|i| cx.wants(sends + i)) {
            all[sends + i] = kept(cx, &self.recv[i], self.over, cx.cotangent(i));
        }
        Ok(all)
    }
}
