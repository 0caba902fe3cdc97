//! Peers and tags given as numbers. They may differ between ranks, which run one program all the same: the numbers of all
//! ranks are a table in it.

use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_types::{GroupName, Message, Peer, Rank, Route};

use super::{Session, current};

/// For each rank that runs the program, the numbers of its peers and tags in the order of the messages.
pub(crate) struct Peers {
    ranks: Vec<Rank>,
    numbers: Vec<Vec<i64>>,
}

impl Peers {
    /// The tables of these ranks; `None` if their numbers are equal, or if they have not the same messages.
    pub(crate) fn new(ranks: Vec<Rank>, numbers: Vec<Vec<i64>>) -> Option<Peers> {
        let (first, others) = numbers.split_first()?;
        let is_alike = others.iter().all(|other| other.len() == first.len());
        (is_alike && others.iter().any(|other| other != first)).then_some(Peers { ranks, numbers })
    }

    /// The number of each rank at a place in the order, of which this rank names one; `None` if all are equal, or if this
    /// rank named another before.
    fn named(&self, place: usize, mine: (Rank, i64)) -> Option<Vec<(Rank, i64)>> {
        let named = self.ranks.iter().zip(&self.numbers);
        let named: Vec<(Rank, i64)> =
            named.filter_map(|(rank, list)| Some((*rank, *list.get(place)?))).collect();
        let differ = named.iter().any(|(_, other)| *other != mine.1);
        (differ && named.contains(&mine)).then_some(named)
    }

    /// The peer of a message: a table over the members of the group, or over all ranks if members at the same place in
    /// their groups have different peers.
    fn peer(named: &[(Rank, i64)], over: GroupName, mesh: &Mesh) -> Peer<Index> {
        let mut table: Vec<Option<i64>> = vec![None; mesh.group_size(over) as usize];
        let mut by_member = true;
        for (rank, number) in named {
            let place = mesh.group_rank(over, *rank).and_then(|place| table.get_mut(place as usize));
            let Some(place) = place else { continue };
            by_member &= *place.get_or_insert(*number) == *number;
        }
        if by_member {
            let entry = |number: Option<i64>| number.and_then(|number| u32::try_from(number).ok());
            return Peer::Route(Route::Table(table.into_iter().map(entry).collect()));
        }
        Peer::At(by_rank(named, mesh))
    }
}

/// The number of the executing rank, from a table of all; -1 for ranks without one.
fn by_rank(named: &[(Rank, i64)], mesh: &Mesh) -> Index {
    let mut here = Index::constant(0);
    for axis in mesh.all_axes().iter() {
        here = &here * &Index::from(i64::from(mesh.axis_size(axis))) + &Index::sym(Sym::Rank(axis));
    }
    let of = |rank: u32| named.iter().find(|(own, _)| own.0 == rank).map_or(-1, |(_, number)| *number);
    let table: Vec<Index> = (0..mesh.n_ranks()).map(|rank| Index::constant(of(rank))).collect();
    Index::pick(&here, &table)
}

/// A message over a group, in the current trace.
pub(crate) fn traced_message(peer: Peer<Index>, tag: Index, over: GroupName) -> Message<Index> {
    match current() {
        Some(session) => session.message(peer, tag, over),
        None => Message { peer, tag },
    }
}

impl Session {
    fn message(&self, peer: Peer<Index>, tag: Index, over: GroupName) -> Message<Index> {
        let mesh = self.world.mesh();
        let peer = match &peer {
            Peer::At(at) => self.named(at).map_or(peer, |named| Peers::peer(&named, over, &mesh)),
            Peer::Route(_) => peer,
        };
        let tag = self.named(&tag).map_or(tag, |named| by_rank(&named, &mesh));
        Message { peer, tag }
    }

    /// The numbers that ranks name where this one names this; `None` if it is a symbol, or if they are equal.
    fn named(&self, number: &Index) -> Option<Vec<(Rank, i64)>> {
        let number = number.as_const()?;
        let mut numbers = self.numbers.borrow_mut();
        numbers.push(number);
        self.about.peers.as_ref()?.named(numbers.len() - 1, (self.world.rank, number))
    }

    /// The peers and tags that were named by numbers so far.
    pub(crate) fn peers(&self) -> Vec<i64> {
        self.numbers.borrow().clone()
    }
}
