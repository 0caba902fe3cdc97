//! Peers given as numbers. They may differ between ranks, which run one program all the same: the numbers of all ranks
//! are a table in it.

use consort_ir::index::{Index, Sym};
use consort_ir::mesh::Mesh;
use consort_types::{GroupName, Peer, Rank, Route};

use super::{Session, current};

/// For each rank that runs the program, the numbers of its peers in the order of the messages.
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

    /// The peer of a message, of which this rank names the number: a table over the members of the group, or over all
    /// ranks if members at the same place in their groups have different peers.
    fn peer(&self, message: usize, (rank, number): (Rank, i64), over: GroupName, mesh: &Mesh) -> Peer<Index> {
        let named = self.ranks.iter().zip(&self.numbers);
        let named: Vec<(Rank, i64)> =
            named.filter_map(|(rank, list)| Some((*rank, *list.get(message)?))).collect();
        let agreed = named.contains(&(rank, number));
        if !agreed || named.iter().all(|(_, other)| *other == number) {
            return Peer::At(Index::constant(number));
        }
        let mut table: Vec<Option<i64>> = vec![None; mesh.group_size(over) as usize];
        let mut by_member = true;
        for (rank, number) in &named {
            let place = mesh.group_rank(over, *rank).and_then(|place| table.get_mut(place as usize));
            let Some(place) = place else { continue };
            by_member &= *place.get_or_insert(*number) == *number;
        }
        if by_member {
            let entry = |number: Option<i64>| number.and_then(|number| u32::try_from(number).ok());
            return Peer::Route(Route::Table(table.into_iter().map(entry).collect()));
        }
        let mut here = Index::constant(0);
        for axis in mesh.all_axes().iter() {
            here = &here * &Index::from(i64::from(mesh.axis_size(axis))) + &Index::sym(Sym::Rank(axis));
        }
        let of = |rank: u32| named.iter().find(|(own, _)| own.0 == rank).map_or(-1, |(_, number)| *number);
        let table: Vec<Index> = (0..mesh.n_ranks()).map(|rank| Index::constant(of(rank))).collect();
        Peer::At(Index::pick(&here, &table))
    }
}

/// The peer of a message over a group, in the current trace.
pub(crate) fn traced_peer(peer: Peer<Index>, over: GroupName) -> Peer<Index> {
    match current() {
        Some(session) => session.peer(peer, over),
        None => peer,
    }
}

impl Session {
    fn peer(&self, peer: Peer<Index>, over: GroupName) -> Peer<Index> {
        let Peer::At(at) = &peer else { return peer };
        let Some(number) = at.as_const() else { return peer };
        let mut numbers = self.numbers.borrow_mut();
        numbers.push(number);
        match &self.about.peers {
            Some(peers) => peers.peer(numbers.len() - 1, (self.world.rank, number), over, &self.world.mesh()),
            None => peer,
        }
    }

    /// The peers that were named by numbers so far.
    pub(crate) fn peers(&self) -> Vec<i64> {
        self.numbers.borrow().clone()
    }
}
