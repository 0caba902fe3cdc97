//! Messages between members of a group: routes, peers and tags.

/// A map from members of a group to other members, or to none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The member at this offset, with wraparound: `ring(+1)`.
    Ring(i64),
    /// The member at this offset, or none past the ends: `shift(+1)`.
    Shift(i64),
    /// An entry for each member: `table(1, 0, none)`.
    Table(Vec<Option<u32>>),
}

impl From<&Route> for Route {
    fn from(route: &Route) -> Route {
        route.clone()
    }
}

impl Route {
    /// The destination of member `from` in a group of `n`.
    pub fn to(&self, from: u32, n: u32) -> Option<u32> {
        let (at, n) = (i64::from(from), i64::from(n));
        let to = match self {
            Route::Ring(by) => at.wrapping_add(by % n).rem_euclid(n),
            Route::Shift(by) => at.checked_add(*by).filter(|to| (0..n).contains(to))?,
            Route::Table(entries) => i64::from((*entries.get(from as usize)?)?),
        };
        u32::try_from(to).ok()
    }

    /// Whether every member receives something.
    pub fn reaches_all(&self, n: u32) -> bool {
        (0..n).filter_map(|from| self.to(from, n)).count() == n as usize
    }
}

/// What a member gets if no member sends to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Zeros.
    Zeros,
    /// The program is refused.
    Error,
}

/// The peer of a message. `S` is the type of sizes: an expression in programs, a number at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer<S> {
    /// Along a route from this member.
    Route(Route),
    /// The member of this number, or none if -1: `at(s0)`.
    At(S),
}

/// One send or receive: its peer and its tag, both of which may differ between members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<S> {
    /// The destination of a send, or the source of a receive.
    pub peer: Peer<S>,
    /// Messages match by sender, receiver and tag, in order.
    pub tag: S,
}

impl Message<usize> {
    /// The number at which there is no peer.
    pub const NOBODY: usize = usize::MAX;

    /// The number of the peer, if there is one. `me` is this member of a group of `n`.
    #[inline]
    pub fn member(&self, me: u32, n: u32) -> Option<usize> {
        match &self.peer {
            Peer::Route(route) => route.to(me, n).map(|to| to as usize),
            Peer::At(peer) => Some(*peer).filter(|peer| *peer != Self::NOBODY),
        }
    }
}

impl<S> Message<S> {
    /// The number of the peer, or -1 for none. `me` is this member of a group of `n`; `value` gives the value of a
    /// size.
    pub fn peer<E>(&self, me: u32, n: u32, value: impl FnOnce(&S) -> Result<i64, E>) -> Result<i64, E> {
        match &self.peer {
            Peer::Route(route) => Ok(route.to(me, n).map_or(-1, i64::from)),
            Peer::At(size) => value(size),
        }
    }
}
