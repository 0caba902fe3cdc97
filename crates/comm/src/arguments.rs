//! Whether the arguments of a collective fit its description, before anything is started; and its compact form.

use consort_types::{Collective, Dtype, Failure, Headline, Kind, Reduce, Route, Written};

use crate::CommError;
use crate::message::About;
use crate::op::{Lists, Op};
use crate::shm::buffer::Buffer;
use crate::shm::buffers::bytes;
use crate::shm::row::STAGE;

/// The type of an operand.
#[derive(Clone, Copy, Debug)]
pub struct OperandType<'a> {
    /// The element type.
    pub dtype: Dtype,
    /// The sizes; only those kinds need them that have a dimension.
    pub shape: &'a [usize],
    /// What both ends of a message compare; default for other kinds.
    pub about: About,
}

impl<'a> OperandType<'a> {
    /// The type of an operand that is not a message.
    #[inline(always)]
    pub fn new(dtype: Dtype, shape: &'a [usize]) -> OperandType<'a> {
        OperandType { dtype, shape, about: About { digest: 0, text: Default::default() } }
    }
}

/// What a member passes to a collective. It is copied and not borrowed: what a kind does not need is then never stored.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<'a> {
    pub(crate) collective: Collective<'a, usize>,
    /// One for each operand, or one that all have.
    pub(crate) types: &'a [OperandType<'a>],
    pub(crate) operands: &'a [Buffer],
    pub(crate) results: &'a [Buffer],
    /// The member, and how many there are.
    pub(crate) me: usize,
    pub(crate) n: usize,
    /// Whether the result is common.
    pub(crate) common: bool,
}

/// The stripes of an operand or the bytes of a part, and the lists of a collective.
type Sizes = (usize, Option<Lists>);

impl Arguments<'_> {
    /// Checks everything. Inlined: of a known kind little is left.
    #[inline(always)]
    pub(crate) fn checked(self) -> Result<(Op, Option<Box<Lists>>), CommError> {
        let (kind, n) = (self.collective.kind, self.n);
        let mut op = Op { kind, ..Op::default() };
        if kind.has_root() {
            op.root = self.root()?;
        }
        if kind.reduces() {
            (op.dtype, op.reduce) = self.reduction()?;
        }
        self.check_counts()?;
        let lists;
        match kind {
            Kind::Broadcast | Kind::Barrier | Kind::Exchange => lists = None,
            Kind::AllReduce | Kind::Reduce => lists = self.mixed(),
            Kind::AllGather | Kind::Gather => {
                (op.outer, lists) = self.stripes(|_| (1, "a byte"), |len| len.checked_mul(n))?;
            }
            Kind::ReduceScatter => {
                let unit = |i: usize| (n * self.ty(i).dtype.size(), "the members' elements");
                (op.outer, lists) = self.stripes(unit, |len| Some(len / n))?;
            }
            Kind::Scatter => (op.outer, lists) = self.scattered()?,
            Kind::AllGatherV | Kind::ReduceScatterV => (op.outer, lists) = self.uneven()?,
            Kind::AllToAll => (op.part, lists) = self.splits()?,
            Kind::Permute => lists = Some(self.routes()?),
        }
        Ok((op, lists.map(Box::new)))
    }

    #[inline(always)]
    fn root(self) -> Result<usize, CommError> {
        let Some(root) = self.collective.root else { return Err(refused(("a root", ""))) };
        let n = self.n;
        check(root < n, move || (format!("a root below {n}"), root.to_string()))?;
        Ok(root)
    }

    /// The reduction, which all operands must allow.
    #[inline(always)]
    fn reduction(self) -> Result<(Dtype, Reduce), CommError> {
        let Some(reduce) = self.collective.reduce else { return Err(refused(("a reduction", ""))) };
        let mut start = 0;
        for (i, operand) in self.operands.iter().enumerate() {
            let dtype = self.ty(i).dtype;
            check(reduce.takes(dtype), move || {
                format!("`{}` is not defined for {}", reduce.name(), dtype.name())
            })?;
            check(is_multiple(operand.at(), dtype.size()), move || {
                (format!("a part that begins on a multiple of {} bytes", dtype.size()), "")
            })?;
            check_stripes(operand, (dtype.size(), "the size of an element"), 1)?;
            // Members cut a list, laid end to end, at cache lines: no element may cross one.
            check(is_multiple(start, dtype.size()), move || {
                ("the operands with larger elements first", format!("{dtype} after {start} bytes"))
            })?;
            start += operand.len();
        }
        Ok((self.ty(0).dtype, reduce))
    }

    /// The element types of a list, if they differ.
    #[inline(always)]
    fn mixed(self) -> Option<Lists> {
        let is_one = self.types.len() <= 1 || self.types.iter().all(|ty| ty.dtype == self.types[0].dtype);
        if is_one { None } else { Some(Lists::Operands(self.types.iter().map(|ty| (ty.dtype, 1)).collect())) }
    }

    /// Checks that there are as many operands and results as this member's role needs.
    #[inline(always)]
    fn check_counts(self) -> Result<(), CommError> {
        let Arguments { collective, me, common, .. } = self;
        let (kind, role) = (collective.kind, collective.role(me));
        // The common result of a broadcast is the root's operand itself.
        let is_given = common && kind == Kind::Broadcast;
        let has_operands = if is_given { role.is_read } else { collective.has_operands(me) };
        let is_one = is_given || !kind.takes_list();
        let count = self.operands.len();
        let operands = match (has_operands, is_one) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => count,
        };
        let at_root = |is: bool| if is { collective.root.map(|root| (root, me)) } else { None };
        let at = at_root(is_given || kind == Kind::Scatter);
        check(count == operands, move || counted(("an operand", kind), operands, count, at))?;
        if is_given {
            let is_whole = self.operands.iter().all(Buffer::is_whole);
            check(is_whole, || ("a whole buffer", "a part of one"))?;
        }
        let results = match (role.written, is_one) {
            _ if common => 0,
            (Written::New, true) => 1,
            // Members other than the root of a scatter have only results.
            (Written::New, false) if !has_operands => self.results.len(),
            (Written::New, false) => operands,
            _ => 0,
        };
        let (count, at) = (self.results.len(), at_root(kind == Kind::Gather));
        check(count == results, move || counted(("a result", kind), results, count, at))
    }

    #[inline(always)]
    fn ty(&self, operand: usize) -> OperandType<'_> {
        let ty = self.types.get(operand).or(self.types.first());
        ty.copied().unwrap_or(OperandType::new(Dtype::U8, &[]))
    }

    #[inline(always)]
    fn dim(&self, operand: usize) -> usize {
        let dims = self.collective.dims;
        dims.get(operand).or(dims.first()).copied().unwrap_or(0)
    }

    /// The stripes of an operand of `len` bytes: the product of the sizes outside its dimension. What is empty is one stripe.
    #[inline(always)]
    fn outer(&self, operand: usize, len: usize) -> usize {
        let outer = self.ty(operand).shape.iter().take(self.dim(operand)).product();
        if outer == 0 && len == 0 { 1 } else { outer }
    }

    /// Checks that each operand is a whole number of its units in each stripe, and that its result has `bytes` of its bytes.
    #[inline(always)]
    fn stripes(
        self,
        unit: impl Fn(usize) -> (usize, &'static str),
        bytes: impl Fn(usize) -> Option<usize>,
    ) -> Result<Sizes, CommError> {
        let checked = |i: usize, operand: &Buffer| -> Result<usize, CommError> {
            let outer = self.outer(i, operand.len());
            check_stripes(operand, unit(i), outer)?;
            // Only members whose results are new have any.
            self.results.get(i).map_or(Ok(()), |result| check_result(result, bytes(operand.len())))?;
            Ok(outer)
        };
        if let [operand] = self.operands {
            return Ok((checked(0, operand)?, None));
        }
        let operand = |(i, operand): (usize, &Buffer)| Ok((self.ty(i).dtype, checked(i, operand)?));
        let list = self.operands.iter().enumerate().map(operand).collect::<Result<_, CommError>>()?;
        Ok((0, Some(Lists::Operands(list))))
    }

    #[inline(always)]
    fn scattered(self) -> Result<Sizes, CommError> {
        let checked = |i: usize, result: &Buffer| -> Result<usize, CommError> {
            let outer = self.outer(i, result.len());
            check_stripes(result, (1, "a byte"), outer)?;
            let whole = result.len().checked_mul(self.n);
            self.operands.get(i).map_or(Ok(()), |operand| check_length(operand, "operand", whole))?;
            Ok(outer)
        };
        if let [result] = self.results {
            return Ok((checked(0, result)?, None));
        }
        let result = |(i, result): (usize, &Buffer)| Ok((self.ty(i).dtype, checked(i, result)?));
        let list = self.results.iter().enumerate().map(result).collect::<Result<_, CommError>>()?;
        Ok((0, Some(Lists::Operands(list))))
    }

    /// The bytes of each member in a stripe of the only operand.
    fn uneven(self) -> Result<Sizes, CommError> {
        let (n, dim, OperandType { shape, dtype, .. }) = (self.n, self.dim(0), self.ty(0));
        let len = bytes(self.operands);
        let outer = self.outer(0, len);
        let sizes = bytes_of(self.collective.sizes, shape, dim, dtype);
        let mine = sizes.get(self.me).and_then(|size| size.checked_mul(outer));
        let all = total(&sizes, outer);
        let is_gathered = self.collective.kind == Kind::AllGatherV;
        let (here, result) = if is_gathered { (mine, all) } else { (all, mine) };
        check(outer > 0 && sizes.len() == n && here == Some(len), || match is_gathered {
            true => {
                let expected = format!("a size for each of {n} members, with {len} bytes here");
                (expected, format!("{sizes:?} in {outer} stripes"))
            }
            false => {
                let expected =
                    format!("a size for each of {n} members that add up to {len} bytes in {outer} stripes");
                (expected, format!("{sizes:?}"))
            }
        })?;
        self.results.iter().try_for_each(|buffer| check_result(buffer, result))?;
        Ok((outer, Some(Lists::Sizes(sizes))))
    }

    /// The bytes to each member and from each, one number if all are equal.
    fn splits(self) -> Result<Sizes, CommError> {
        let (n, OperandType { shape, dtype, .. }) = (self.n, self.ty(0));
        let len = bytes(self.operands);
        check(n * 16 <= STAGE, || (format!("at most {} members", STAGE / 16), n.to_string()))?;
        let Some((ins, outs)) = self.collective.splits else {
            let part = len / n;
            check(part * n == len, || (format!("{n} equal parts"), format!("{len} bytes")))?;
            self.results.iter().try_for_each(|result| check_result(result, Some(len)))?;
            return Ok((part, None));
        };
        let [ins, outs] = [ins, outs].map(|sizes| bytes_of(sizes, shape, 0, dtype));
        check(ins.len() == n && outs.len() == n && total(&ins, 1) == Some(len), || {
            (format!("{n} splits each way, with {len} bytes in"), format!("{ins:?} and {outs:?}"))
        })?;
        self.results.iter().try_for_each(|result| check_result(result, total(&outs, 1)))?;
        let part = ins[0];
        match ins.iter().chain(&outs).all(|size| *size == part) {
            true => Ok((part, None)),
            false => Ok((0, Some(Lists::Splits(ins, outs)))),
        }
    }

    /// Where each member sends.
    fn routes(self) -> Result<Lists, CommError> {
        let n = self.n;
        let Some(route) = self.collective.route else { return Err(refused(("a route", ""))) };
        let to: Vec<Option<usize>> =
            (0..n as u32).map(|from| route.to(from, n as u32).map(|to| to as usize)).collect();
        let is_complete = !matches!(route, Route::Table(entries) if entries.len() != n);
        let receivers = || to.iter().flatten();
        let distinct = |(i, a): (usize, &usize)| *a < n && !receivers().take(i).any(|b| a == b);
        check(is_complete && receivers().enumerate().all(distinct), || {
            (format!("{n} entries, distinct members or none"), format!("{route:?}"))
        })?;
        for (operand, result) in self.operands.iter().zip(self.results) {
            check_result(result, Some(operand.len()))?;
        }
        Ok(Lists::Routes(to))
    }
}

/// A wrong number of operands or results; perhaps the root alone has one, given with this member.
#[cold]
fn counted(
    (what, kind): (&str, Kind),
    expected: usize,
    got: usize,
    at: Option<(usize, usize)>,
) -> (String, String) {
    let number = |count: usize| match count {
        0 => "none".to_string(),
        1 => "one".to_string(),
        count => count.to_string(),
    };
    match at {
        Some((root, me)) => {
            (format!("{what} at the root {root} and nowhere else"), format!("{} at {me}", number(got)))
        }
        None => (format!("{what} of {}: {}", kind.name(), number(expected)), number(got)),
    }
}

/// The bytes of sizes along a dimension. Nothing has a size where a dimension outside is empty.
fn bytes_of(sizes: &[usize], shape: &[usize], dim: usize, dtype: Dtype) -> Vec<usize> {
    let is_empty = shape.iter().take(dim).any(|size| *size == 0);
    let one = shape.iter().skip(dim + 1).product::<usize>() * dtype.size();
    sizes.iter().map(|size| if is_empty { 0 } else { size.saturating_mul(one) }).collect()
}

/// Total bytes of `outer` stripes of these sizes, or `None` on overflow.
fn total(sizes: &[usize], outer: usize) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size))?.checked_mul(outer)
}

/// An argument that is refused.
#[cold]
pub(crate) fn refused(headline: impl Into<Headline>) -> CommError {
    CommError::Argument(Failure::new(headline))
}

#[inline(always)]
pub(crate) fn check<H: Into<Headline>>(ok: bool, headline: impl FnOnce() -> H) -> Result<(), CommError> {
    #[cold]
    #[inline(never)]
    fn fail<H: Into<Headline>>(headline: impl FnOnce() -> H) -> CommError {
        refused(headline())
    }
    if ok { Ok(()) } else { Err(fail(headline)) }
}

/// Checks that the bytes are a whole number of units in each of `outer` stripes.
#[inline(always)]
fn check_stripes(
    buffer: &Buffer,
    (unit, what): (usize, &'static str),
    outer: usize,
) -> Result<(), CommError> {
    let (whole, len) = (unit.checked_mul(outer), buffer.len());
    check(whole.is_some_and(|whole| is_multiple(len, whole)), move || {
        (format!("{len} bytes to be a multiple of {unit}, {what}, in each of {outer} stripes"), "")
    })
}

/// A division takes as long as ten other instructions, and most units are powers of two.
#[inline(always)]
fn is_multiple(bytes: usize, unit: usize) -> bool {
    if unit.is_power_of_two() { bytes & (unit - 1) == 0 } else { unit > 0 && bytes.is_multiple_of(unit) }
}

#[inline(always)]
fn check_length(buffer: &Buffer, what: &'static str, bytes: Option<usize>) -> Result<(), CommError> {
    let len = buffer.len();
    check(bytes == Some(len), move || {
        let expected = bytes.map_or("fewer".into(), |bytes| bytes.to_string());
        (format!("{expected} bytes for the {what}"), len.to_string())
    })
}

#[inline(always)]
fn check_result(result: &Buffer, bytes: Option<usize>) -> Result<(), CommError> {
    check_length(result, "result", bytes)
}
