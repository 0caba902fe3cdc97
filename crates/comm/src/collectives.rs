//! The collectives by name, on bytes: each is the description that `Group::start` takes. An operand is `outer` stripes, each of
//! which is joined or cut.

use consort_types::{Axes, Collective, Dtype, GroupName, Kind, Reduce, Route};

use crate::CommError;
use crate::arguments::OperandType;
use crate::group::Group;
use crate::pending::Pending;
use crate::request::Request;
use crate::shm::buffer::Buffer;
use crate::shm::buffers::Buffers;
use crate::shm::common_result::Common;

/// A collective on a group that is at hand, so that its name does not matter.
#[inline(always)]
pub(crate) fn of(kind: Kind) -> Collective<'static, usize> {
    Collective::new(kind, GroupName::Axes(Axes::NONE))
}

#[inline(always)]
pub(crate) fn reducing(kind: Kind, reduce: Reduce) -> Collective<'static, usize> {
    Collective { reduce: Some(reduce), ..of(kind) }
}

#[inline(always)]
fn rooted(kind: Kind, root: usize) -> Collective<'static, usize> {
    Collective { root: Some(root), ..of(kind) }
}

/// Joined or cut within each stripe.
#[inline(always)]
pub(crate) fn in_stripes(collective: Collective<'_, usize>) -> Collective<'_, usize> {
    Collective { dims: &[1], ..collective }
}

/// The type of an operand of `outer` stripes, whatever their length.
#[inline(always)]
pub(crate) fn stripes(dtype: Dtype, outer: &[usize; 1]) -> [OperandType<'_>; 1] {
    [OperandType::new(dtype, outer)]
}

impl Group {
    /// Reduces the members' buffers, one or a list; every member's then hold the result.
    #[track_caller]
    pub fn all_reduce(
        &self,
        operands: impl Into<Buffers>,
        dtype: Dtype,
        reduce: Reduce,
    ) -> Result<Pending, CommError> {
        let types = [OperandType::new(dtype, &[])];
        self.start_as(Request::new(&reducing(Kind::AllReduce, reduce), &types, operands, None))
    }

    /// Reduces the members' buffers into one common result.
    #[track_caller]
    pub fn all_reduce_common(
        &self,
        operand: Buffer,
        dtype: Dtype,
        reduce: Reduce,
    ) -> Result<Pending<(Buffers, Common)>, CommError> {
        let types = [OperandType::new(dtype, &[])];
        self.start_as(Request::new(&reducing(Kind::AllReduce, reduce), &types, operand, None))
    }

    /// Joins the members' buffers side by side, in each of `outer` stripes.
    #[track_caller]
    pub fn all_gather(&self, operand: Buffer, result: Buffer, outer: usize) -> Result<Pending, CommError> {
        let collective = in_stripes(of(Kind::AllGather));
        self.start_as(Request::new(&collective, &stripes(Dtype::U8, &[outer]), operand, [result]))
    }

    /// Joins the members' buffers side by side, in each of `outer` stripes, into one common result.
    #[track_caller]
    pub fn all_gather_common(
        &self,
        operand: Buffer,
        outer: usize,
    ) -> Result<Pending<(Buffers, Common)>, CommError> {
        let collective = in_stripes(of(Kind::AllGather));
        self.start_as(Request::new(&collective, &stripes(Dtype::U8, &[outer]), operand, None))
    }

    /// Joins buffers of different sizes; `sizes` are those of all members in one stripe.
    #[track_caller]
    pub fn all_gather_v(
        &self,
        operand: Buffer,
        result: Buffer,
        sizes: &[usize],
        outer: usize,
    ) -> Result<Pending, CommError> {
        let collective = Collective { sizes, ..in_stripes(of(Kind::AllGatherV)) };
        self.start_as(Request::new(&collective, &stripes(Dtype::U8, &[outer]), operand, [result]))
    }

    /// Reduces the members' buffers and gives each its part of each of `outer` stripes.
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        operand: Buffer,
        result: Buffer,
        dtype: Dtype,
        reduce: Reduce,
        outer: usize,
    ) -> Result<Pending, CommError> {
        let collective = in_stripes(reducing(Kind::ReduceScatter, reduce));
        self.start_as(Request::new(&collective, &stripes(dtype, &[outer]), operand, [result]))
    }

    /// Reduces the members' buffers and gives each a part of its own size of each stripe. Sizes are in elements.
    #[track_caller]
    pub fn reduce_scatter_v(
        &self,
        operand: Buffer,
        result: Buffer,
        dtype: Dtype,
        reduce: Reduce,
        sizes: &[usize],
        outer: usize,
    ) -> Result<Pending, CommError> {
        let collective = Collective { sizes, ..in_stripes(reducing(Kind::ReduceScatterV, reduce)) };
        self.start_as(Request::new(&collective, &stripes(dtype, &[outer]), operand, [result]))
    }

    /// Sends `ins[m]` bytes to each member m and receives `outs[m]` from it.
    #[track_caller]
    pub fn all_to_all(
        &self,
        operand: Buffer,
        result: Buffer,
        ins: &[usize],
        outs: &[usize],
    ) -> Result<Pending, CommError> {
        let collective = Collective { splits: Some((ins, outs)), ..of(Kind::AllToAll) };
        self.start_as(Request::new(&collective, &[OperandType::new(Dtype::U8, &[])], operand, [result]))
    }

    /// Gives every member the root's bytes, in place, one buffer or a list.
    #[track_caller]
    pub fn broadcast(&self, operands: impl Into<Buffers>, root: usize) -> Result<Pending, CommError> {
        self.start_as(Request::new(&rooted(Kind::Broadcast, root), &[], operands, None))
    }

    /// Gives every member the root's buffer itself, as a common result. The others bring none.
    #[track_caller]
    pub fn broadcast_common(
        &self,
        operand: Option<Buffer>,
        root: usize,
    ) -> Result<Pending<(Buffers, Common)>, CommError> {
        self.start_as(Request::new(&rooted(Kind::Broadcast, root), &[], operand, None))
    }

    /// Reduces the members' buffers, one or a list, into the root's, in place; the others keep theirs.
    #[track_caller]
    pub fn reduce(
        &self,
        operands: impl Into<Buffers>,
        dtype: Dtype,
        reduce: Reduce,
        root: usize,
    ) -> Result<Pending, CommError> {
        let collective = Collective { reduce: Some(reduce), ..rooted(Kind::Reduce, root) };
        self.start_as(Request::new(&collective, &[OperandType::new(dtype, &[])], operands, None))
    }

    /// Joins the members' buffers at the root, which alone brings a buffer for the result.
    #[track_caller]
    pub fn gather(
        &self,
        operand: Buffer,
        result: Option<Buffer>,
        root: usize,
        outer: usize,
    ) -> Result<Pending, CommError> {
        let collective = in_stripes(rooted(Kind::Gather, root));
        self.start_as(Request::new(&collective, &stripes(Dtype::U8, &[outer]), operand, result))
    }

    /// Gives each member its part of each stripe of the buffer that the root alone brings.
    #[track_caller]
    pub fn scatter(
        &self,
        operand: Option<Buffer>,
        result: Buffer,
        root: usize,
        outer: usize,
    ) -> Result<Pending, CommError> {
        let collective = in_stripes(rooted(Kind::Scatter, root));
        self.start_as(Request::new(&collective, &stripes(Dtype::U8, &[outer]), operand, [result]))
    }

    /// Sends along a route; a member that receives nothing gets zeros.
    #[track_caller]
    pub fn permute(&self, operand: Buffer, result: Buffer, route: &Route) -> Result<Pending, CommError> {
        let collective = Collective { route: Some(route), ..of(Kind::Permute) };
        self.start_as(Request::new(&collective, &[], operand, [result]))
    }

    /// Completes after all members have started it.
    #[track_caller]
    pub fn barrier(&self) -> Result<Pending, CommError> {
        self.start_as(Request::new(&of(Kind::Barrier), &[], None, None))
    }
}
