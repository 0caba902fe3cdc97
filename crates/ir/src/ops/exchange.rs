//! Point to point: a permutation of the group, and batches of sends and receives.

use std::fmt::Write;

use crate::index::Index;
use crate::mesh::{Axes, Group, Mesh, Rank};
use crate::op;
use crate::ops::attr::ListAttr;
use crate::ops::collective::{check_equal_shapes, own};
use crate::ops::{Attr, Cost, CostCx, Effects, EvalCx, EvalError, GroupEvalCx, InferCx, OpDef, Violation};
use crate::tensor::Tensor;
use crate::text::{Cursor, ParseError};
use crate::types::{TensorType, Type};

/// From a rank of a group to another, or to none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The rank so many places further, around the ends: `ring(+1)`.
    Ring(i64),
    /// The rank so many places further, or none past the ends: `shift(+1)`.
    Shift(i64),
    /// An entry for each rank: `table(1, 0, none)`.
    Table(Vec<Option<u32>>),
}

impl Route {
    /// Where rank `from` of a group of `n` goes.
    pub fn to(&self, from: u32, n: u32) -> Option<u32> {
        let (at, n) = (i64::from(from), i64::from(n));
        let to = match self {
            Route::Ring(by) => at.wrapping_add(by % n).rem_euclid(n),
            Route::Shift(by) => at.checked_add(*by).filter(|to| (0..n).contains(to))?,
            Route::Table(entries) => i64::from((*entries.get(from as usize)?)?),
        };
        u32::try_from(to).ok()
    }

    /// Whether every rank gets something.
    pub fn reaches_all(&self, n: u32) -> bool {
        (0..n).filter_map(|from| self.to(from, n)).count() == n as usize
    }

    fn check(&self, rule: &'static str, n: u32) -> Result<(), Violation> {
        let Route::Table(entries) = self else { return Ok(()) };
        if entries.len() != n as usize {
            return Err(Violation::new(
                rule,
                format!("expected a table of {n} entries, got {}", entries.len()),
            ));
        }
        match entries.iter().flatten().find(|to| **to >= n) {
            Some(to) => Err(Violation::new(
                rule,
                format!("expected ranks below {n}, the size of the group, got {to}"),
            )),
            None => Ok(()),
        }
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

/// What ranks get that nobody sends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Zeros.
    Zeros,
    /// There must be none: the program is refused.
    Error,
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
        /// What a member gets that nobody sends to.
        missing: Missing,
        /// The group.
        over: Group
    }
    example "mesh (sp: 3)\n\nfunc @f(v0: f32[1]{sp}) -> f32[1]{sp} {\n    v1 = permute_start[route=ring(+1), missing=error, over=sp] v0 : pending<f32[1]{sp}>\n    v2 = wait v1 : f32[1]{sp}\n    return v2\n}\n; run: @f([1] | [2] | [3]) == [3] | [1] | [2]\n"
}

impl OpDef for PermuteStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let n = cx.mesh.group_size(self.over);
        self.route.check("C1", n)?;
        let mut taken = vec![None; n as usize];
        for from in 0..n {
            if let Some(to) = self.route.to(from, n)
                && let Some(other) = taken[to as usize].replace(from)
            {
                return Err(Violation::new(
                    "C2",
                    format!("expected one sender to each member, but {other} and {from} send to {to}"),
                ));
            }
        }
        if self.missing == Missing::Error && !self.route.reaches_all(n) {
            let to = taken.iter().position(Option::is_none).unwrap_or(0);
            let violation = Violation::new(
                "C3",
                format!("expected every member to get something, but nobody sends to {to}"),
            );
            return Err(violation.note("`missing=zeros` gives such members zeros"));
        }
        check_equal_shapes(cx, "C4", self.over)?;
        // What is equal on all members is still equal after they have exchanged it, if all got something.
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
    fn effects(&self) -> Effects {
        Effects::Collective(self.over)
    }
    fn eval_group(&self, cx: &GroupEvalCx<'_>, args: &[Vec<Tensor>]) -> Result<Vec<Vec<Tensor>>, EvalError> {
        let zeros = |x: &Tensor| Tensor::zeros(x.dtype, x.shape.clone());
        let mut results: Vec<Vec<Tensor>> =
            args.iter().map(|member| member.iter().map(zeros).collect()).collect();
        for (from, tensors) in args.iter().enumerate() {
            if let Some(to) = self.route.to(from as u32, cx.n() as u32) {
                results[to as usize] = tensors.clone();
            }
        }
        Ok(results)
    }
}

/// The other end of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Along a route from this member.
    Route(Route),
    /// The member of this number, or none where it is -1: `at(s0)`.
    At(Index),
}

impl Attr for Peer {
    const KIND: &'static str = "ring(+k), shift(+k), table(..) or at(size expression)";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        match self {
            Peer::Route(route) => route.write(out, mesh),
            Peer::At(index) => drop(write!(out, "at({})", index.display(mesh))),
        }
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Peer, ParseError> {
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

/// One send or receive: its other end and its tag, both of which may differ between members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// To whom, or from whom.
    pub peer: Peer,
    /// Messages match by sender, receiver and tag, in order.
    pub tag: Index,
}

impl Message {
    /// The rank at the other end of a message of this rank, if there is one; `members` are those of its group.
    pub fn peer(&self, cx: &EvalCx<'_>, group: Group, members: &[Rank]) -> Result<Option<Rank>, EvalError> {
        let n = members.len() as u32;
        let to = match &self.peer {
            Peer::Route(route) => cx.mesh.group_rank(group, cx.rank).and_then(|me| route.to(me, n)),
            Peer::At(index) => match cx.index(index)? {
                -1 => None,
                to => match u32::try_from(to) {
                    Ok(to) if to < n => Some(to),
                    _ => {
                        let message = format!("expected a peer in 0..{n}, or -1 for none, got {to}");
                        return Err(EvalError(message));
                    }
                },
            },
        };
        Ok(to.map(|to| members[to as usize]))
    }
}

impl Attr for Message {
    const KIND: &'static str = "peer and tag";
    fn write(&self, out: &mut String, mesh: &Mesh) {
        self.peer.write(out, mesh);
        let _ = write!(out, " tag {}", self.tag.display(mesh));
    }
    fn read(cursor: &mut Cursor<'_>) -> Result<Message, ParseError> {
        let peer = Peer::read(cursor)?;
        cursor.expect("tag")?;
        Ok(Message { peer, tag: cursor.index()? })
    }
    fn indices(&self, f: &mut dyn FnMut(&Index)) {
        self.peer.indices(f);
        f(&self.tag);
    }
}

impl ListAttr for Message {
    const LIST: &'static str = "list of messages: peer, then `tag` and a size expression";
}

op! {
    /// A batch of sends and receives. The first operands are sent, one for each entry of `send`; the others
    /// stand for what is received, one for each entry of `recv`: they give the type, and the value where
    /// there is no peer (an open border keeps what was there). The wait gives the received tensors when all
    /// messages of the batch have met their other end.
    ///
    /// (C1) There is an operand for each send and for each receive.
    ///
    /// (C2) A table has an entry for each member; ranks that are named are below the size of the group.
    ///
    /// (C3) A send and a receive that match carry one element type and one shape (checked as they meet).
    pub struct ExchangeStart("exchange_start")(; operands..) {
        /// The sends.
        send: Vec<Message>,
        /// The receives.
        recv: Vec<Message>,
        /// The group.
        over: Group
    }
    example "mesh (sp: 3)\n\nfunc @f(v0: f32[1]{sp}, v1: f32[1]) -> f32[1]{sp} {\n    v2 = exchange_start[send=[shift(+1) tag 0], recv=[shift(-1) tag 0], over=sp] v0, v1 : pending<f32[1]{sp}>\n    v3 = wait v2 : f32[1]{sp}\n    return v3\n}\n; run: @f([1] | [2] | [3], [-1]) == [-1] | [1] | [2]\n"
}

impl OpDef for ExchangeStart {
    fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Violation> {
        let (sends, recvs) = (self.send.len(), self.recv.len());
        if cx.args.len() != sends + recvs {
            let message =
                format!("expected {sends} operands to send and {recvs} to receive, got {}", cx.args.len());
            return Err(Violation::new("C1", message));
        }
        for message in self.send.iter().chain(&self.recv) {
            let n = cx.mesh.group_size(self.over);
            match &message.peer {
                Peer::Route(route) => route.check("C2", n)?,
                Peer::At(index) => match index.as_const() {
                    Some(to) if !(-1..i64::from(n)).contains(&to) => {
                        return Err(Violation::new(
                            "C2",
                            format!("expected a peer in 0..{n}, or -1 for none, got {to}"),
                        ));
                    }
                    _ => {}
                },
            }
        }
        // Any send may be what a receive meets.
        let operands = cx.tensors()?;
        let sent = operands[..sends].iter().fold(Axes::NONE, |set, x| set.union(x.varies));
        let received = |x: &&TensorType| x.with_varies(own(x.varies.union(sent), self.over, cx.mesh));
        Ok(vec![Type::Pending(operands[sends..].iter().map(received).collect())])
    }
    fn cost(&self, cx: &CostCx<'_>) -> Cost {
        cx.comm(Index::constant(0), cx.result_bytes())
    }
    fn overwrites(&self, result: usize) -> Option<usize> {
        Some(self.send.len() + result)
    }
    fn effects(&self) -> Effects {
        Effects::Messages(self.over)
    }
    fn messages(&self) -> (&[Message], &[Message]) {
        (&self.send, &self.recv)
    }
}
