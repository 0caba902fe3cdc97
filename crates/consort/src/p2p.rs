//! Sends and receives.

use std::panic::Location;
use std::rc::Rc;

use consort_comm::{Buffers, Note, OperandType, Request};
use consort_ir::index as ir;
use consort_ir::ops::{ExchangeStart, OpDef, no_communication};
use consort_runtime::start::start;
use consort_types::{Dtype, Peer, Route};
use smallvec::{SmallVec, smallvec};

use crate::apply::prepared;
use crate::error::{Error, Named, Result};
use crate::flight::{Flight, Way};
use crate::index::{Index, Shape};
use crate::mesh::Group;
use crate::pending::{Pending, Started};
use crate::place::{Place, SliceMut};
use crate::start::check_world;
use crate::tensor::{CachedLayout, Tensor};
use crate::trace::{is_tracing, record_start, settle, traced_message, uncompiled_at};

/// The peer of a message: a member by its place in the group, or given by a route.
///
/// [`Group::batch`] has an example.
pub struct Other(Peer<ir::Index>);

impl From<usize> for Other {
    fn from(member: usize) -> Other {
        Other(Peer::At(ir::Index::from(member)))
    }
}

impl From<Index> for Other {
    fn from(member: Index) -> Other {
        Other(Peer::At(member.0))
    }
}

impl From<&Index> for Other {
    fn from(member: &Index) -> Other {
        Other::from(member.clone())
    }
}

impl From<&Route> for Other {
    fn from(route: &Route) -> Other {
        Other::from(route.clone())
    }
}

impl From<Route> for Other {
    fn from(route: Route) -> Other {
        Other(Peer::Route(route))
    }
}

/// One message of a batch.
///
/// [`Group::batch`] has an example.
pub enum Batched<'a> {
    /// A tensor that is sent.
    Send {
        /// The tensor.
        x: Tensor,
        /// The receiver.
        to: Other,
        /// Messages match by sender, receiver and tag, in order.
        tag: Index,
    },
    /// A tensor or slice that takes what is received.
    Recv {
        /// The destination.
        into: SliceMut<'a>,
        /// The sender.
        from: Other,
        /// Messages match by sender, receiver and tag, in order.
        tag: Index,
    },
}

impl<'a> Batched<'a> {
    /// A tensor that is sent.
    ///
    /// [`Group::batch`] has an example.
    pub fn send(x: impl Into<Tensor>, to: impl Into<Other>, tag: impl Into<Index>) -> Batched<'a> {
        Batched::Send { x: x.into(), to: to.into(), tag: tag.into() }
    }

    /// A tensor or slice that takes what is received.
    ///
    /// [`Group::batch`] has an example.
    pub fn recv(into: impl Place<'a>, from: impl Into<Other>, tag: impl Into<Index>) -> Batched<'a> {
        Batched::Recv { into: into.into_slice(), from: from.into(), tag: tag.into() }
    }
}

impl Group {
    /// Sends a tensor to a member. The handle says when it is taken; until then the tensor can be read. Peer and tag may
    /// be computed from the rank.
    ///
    /// ```
    /// use consort::{Dtype, Tensor};
    ///
    /// let got = consort::spawn(2, |mesh| {
    ///     match mesh.my_rank()? {
    ///         0 => {
    ///             mesh.isend(Tensor::from_slice(&[42i64], &[1])?, 1, 7)?.wait()?;
    ///             Ok(0)
    ///         }
    ///         _ => mesh.irecv(Dtype::I64, &[1], 0, 7)?.item::<i64>(),
    ///     }
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [0, 42]);
    /// ```
    #[track_caller]
    pub fn isend(
        &self,
        x: impl Into<Tensor>,
        to: impl Into<Other>,
        tag: impl Into<Index>,
    ) -> Result<Pending<()>> {
        let site = Location::caller();
        self.batch_at(vec![Batched::send(x, to, tag)], site).named("isend", site)
    }

    /// Receives a tensor from a member. The first access to its elements waits for it. Its sizes may be symbols, or read
    /// from data ([`Tensor::to_sizes`]).
    ///
    /// [`isend`](Group::isend) has an example.
    #[track_caller]
    pub fn irecv(
        &self,
        dtype: Dtype,
        shape: &(impl Shape + ?Sized),
        from: impl Into<Other>,
        tag: impl Into<Index>,
    ) -> Result<Tensor> {
        let site = Location::caller();
        let sizes: Vec<Index> = self.own_sizes("irecv", shape, site)?.into_iter().map(Index).collect();
        let mut x = match is_tracing() || self.world.heap().is_some() {
            true => Tensor::zeros(dtype, &sizes).named("irecv", site)?,
            false => {
                let sizes: Result<Vec<usize>> = sizes.iter().map(Index::to_usize).collect();
                Tensor::of_shape(dtype, &sizes.named("irecv", site)?)
            }
        };
        let _ = self.batch_at(vec![Batched::recv(&mut x, from, tag)], site).named("irecv", site)?;
        Ok(x)
    }

    /// Receives into a tensor or slice.
    ///
    /// ```
    /// use consort::{Dtype, Route, Tensor};
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let mut x = Tensor::from_slice(&[-1, me], &[2])?;
    ///     let sent = mesh.isend(&x.narrow(0, 1, 1)?, Route::Ring(1), 0)?;
    ///     mesh.recv_into(x.narrow_mut(0, 0usize, 1usize)?, Route::Ring(-1), 0)?;
    ///     sent.wait()?;
    ///     x.to_vec::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [[2, 0], [0, 1], [1, 2]]);
    /// ```
    #[track_caller]
    pub fn recv_into<'a>(
        &self,
        into: impl Place<'a>,
        from: impl Into<Other>,
        tag: impl Into<Index>,
    ) -> Result<()> {
        let site = Location::caller();
        self.batch_at(vec![Batched::recv(into, from, tag)], site).named("recv_into", site).map(drop)
    }

    /// A batch of concurrent sends and receives. Tensors that receive are waited for when their
    /// elements are first needed; the handle completes when the whole batch has.
    ///
    /// ```
    /// use consort::{Batched, Route, Tensor};
    ///
    /// let got = consort::spawn(3, |mesh| {
    ///     let me = mesh.my_rank()? as i64;
    ///     let (x, mut y) = (Tensor::from_slice(&[me], &[1])?, Tensor::from_slice(&[-1i64], &[1])?);
    ///     // An open border: the first member receives nothing, and keeps what it has.
    ///     let batch = vec![Batched::send(&x, Route::Shift(1), 0), Batched::recv(&mut y, Route::Shift(-1), 0)];
    ///     mesh.batch(batch)?.wait()?;
    ///     y.item::<i64>()
    /// });
    /// assert_eq!(got.into_iter().flatten().collect::<Vec<_>>(), [-1, 0, 1]);
    /// ```
    #[track_caller]
    pub fn batch(&self, messages: Vec<Batched<'_>>) -> Result<Pending<()>> {
        let site = Location::caller();
        self.batch_at(messages, site).named("batch", site)
    }

    #[track_caller]
    fn batch_at(&self, messages: Vec<Batched<'_>>, site: &'static Location<'static>) -> Result<Pending<()>> {
        if self.breaks && is_tracing() {
            return self.batch_between(messages, site);
        }
        let (mut send, mut recv, mut args, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for message in messages {
            match message {
                Batched::Send { x, to, tag } => {
                    send.push(traced_message(to.0, tag.0, self.over));
                    args.push(x);
                }
                Batched::Recv { into, from, tag } => {
                    recv.push(traced_message(from.0, tag.0, self.over));
                    places.push(into);
                }
            }
        }
        let (world, name) = (&self.world, "exchange");
        let op = ExchangeStart { send, recv, over: self.over };
        let n_sent = args.len();
        args.extend(places.iter().map(SliceMut::view));
        check_world(name, world, args.iter(), site)?;
        if let Some(traced) = record_start(&op, &args, site) {
            let (results, start) = traced?;
            for (mut place, result) in places.into_iter().zip(results) {
                place.take_result(result, site)?;
            }
            world.add_start(|| Way::Traced(Rc::clone(&start)));
            return Ok(Pending { gives: (), started: Started(smallvec![Way::Traced(start)]) });
        }
        for arg in args.iter_mut().filter(|arg| arg.traced.is_some()) {
            *arg = settle(arg, name, site)?;
        }
        let prepared = prepared(&op, world, &args, site)?;
        let has_data = args.iter().all(|arg| arg.storage.is_some());
        let (true, Some(heap), Some(comm)) = (has_data, world.heap(), &self.comm) else {
            let kinds = places.iter_mut().zip(&prepared.results);
            kinds.for_each(|(place, (ty, _))| place.may_differ(ty.varies));
            return Ok(Pending { gives: (), started: Started::default() });
        };
        let layouts: Vec<Rc<CachedLayout>> = args.iter().map(|arg| Rc::clone(&arg.layout)).collect();
        args.truncate(n_sent);
        let failed = |error| Error::comm(name, error, site);
        let (mut types, mut operands) = (SmallVec::<[OperandType<'_>; 2]>::new(), Buffers::default());
        for ((x, layout), about) in args.into_iter().zip(&layouts).zip(&prepared.messages) {
            // A buffer does not own the storage, so a tensor can receive into one part while it sends another.
            operands.push(self.take_to_read(name, &x, site)?.buffer(&x.ty).map_err(failed)?);
            types.push(OperandType { about: *about, ..OperandType::new(x.dtype(), &layout.shape) });
        }
        let mut taken = Vec::new();
        let received = layouts[n_sent..].iter().zip(&prepared.messages[n_sent..]);
        for (place, (layout, about)) in places.iter_mut().zip(received) {
            place.make_own(site)?;
            // Two owners: the tensor, and this view of it.
            let into = self.take_to_write(name, &place.view(), 2, true, site)?;
            let buffer = into.buffer(&place.tensor.ty).map_err(failed)?;
            for sent in operands[..n_sent].iter_mut().filter(|sent| sent.overlaps(&buffer)) {
                let copy = heap.alloc_from(&sent.bytes().map_err(failed)?).map_err(failed)?;
                world.count_copy(copy.len());
                *sent = copy;
            }
            operands.push(buffer);
            types.push(OperandType { about: *about, ..OperandType::new(place.dtype(), &layout.shape) });
            taken.push(into);
        }
        let mesh = world.mesh();
        let collective =
            op.collective().ok_or_else(|| Error::new(name, no_communication().headline, site))?;
        let (sizes, none) = (world.sizes(&mesh), Buffers::default());
        let (collective, types, note) = (&collective, &types[..], Note::default());
        let request = Request { collective, types, operands, results: none, note, site };
        let pending = start(comm, &sizes, request).map_err(failed)?;
        let flight = Flight::new(pending, world, name, site);
        let results: Vec<Tensor> = prepared
            .results
            .iter()
            .zip(taken)
            .map(|((ty, _), into)| self.awaited(ty, into, &flight))
            .collect();
        for (mut place, result) in places.into_iter().zip(results) {
            place.take_result(result, site)?;
        }
        Ok(Pending { gives: (), started: Started(smallvec![Way::Flying(flight)]) })
    }
}

impl Group {
    /// A batch outside of the graph, at a break. Messages are received into separate tensors first.
    fn batch_between(
        &self,
        messages: Vec<Batched<'_>>,
        site: &'static Location<'static>,
    ) -> Result<Pending<()>> {
        let (mut sends, mut ends, mut views, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for message in messages {
            match message {
                Batched::Send { .. } => sends.push(message),
                Batched::Recv { into, from, tag } => {
                    ends.push((from, tag));
                    views.push(into.view());
                    places.push(into);
                }
            }
        }
        let landed = uncompiled_at("exchange", site, || {
            let settled = views.iter().map(|view| settle(view, "exchange", site));
            let mut landed = settled.collect::<Result<Vec<Tensor>>>()?;
            let recvs = landed.iter_mut().zip(ends).map(|(x, (from, tag))| Batched::recv(x, from, tag));
            self.batch_at(sends.into_iter().chain(recvs).collect(), site)?.wait()?;
            Ok(landed)
        })?;
        for (mut place, result) in places.into_iter().zip(landed) {
            place.take_result(result, site)?;
        }
        Ok(Pending { gives: (), started: Started::default() })
    }
}
