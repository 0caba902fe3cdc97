//! Placements: over which axes of the mesh a tensor may differ between ranks, and what users declare about that.

use std::panic::Location;
use std::rc::Rc;

use consort_comm::{CommError, Note};
use consort_ir::index::Facts;
use consort_ir::literal::{Literal, unravel};
use consort_ir::mesh::Mesh;
use consort_ir::ops::{self, OpDef};
use consort_types::{Axes, Digest, Failure, GroupName, Headline};
use smallvec::smallvec;

use crate::apply::{Prepared, run_one};
use crate::error::{Error, Named, Result};
use crate::flatten::{Static, Visit};
use crate::index::Index;
use crate::tensor::Tensor;
use crate::trace::{is_tracing, record_start, settle};
use crate::world::{World, gather};

type Site = &'static Location<'static>;

/// How a tensor was made, if from numbers alone, or from such tensors and others. The type of such a tensor says that it
/// may differ everywhere, since numbers may; among ranks on which the origin is equal, it differs over fewer axes.
///
/// Packed, because every tensor has one, and tensors are moved often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed(4))]
pub(crate) struct Origin {
    /// A digest of the ops, their attributes and the numbers; 0 if there is no origin.
    pub(crate) digest: u64,
    /// The axes over which the tensor may differ among ranks of equal origins.
    pub(crate) varies: Axes,
}

impl Origin {
    pub(crate) const NONE: Origin = Origin { digest: 0, varies: Axes::NONE };

    /// The axes over which a tensor of this type may differ if its origin is equal on ranks that span the axes in
    /// `covered`.
    #[inline]
    pub(crate) fn varies(self, ty: &consort_ir::types::TensorType, covered: Axes) -> Axes {
        if self.digest == 0 { ty.varies } else { self.varies.union(ty.varies.minus(covered)) }
    }

    /// The part of an op and its attributes.
    pub(crate) fn of_op(op: &dyn OpDef, mesh: &Mesh, facts: &Facts) -> Origin {
        let mut text = op.info().name.to_string();
        op.write_attrs(&mut text, mesh);
        let mut varies = Axes::NONE;
        op.indices(&mut |index| varies = varies.union(facts.varies(index)));
        Origin { digest: Digest::of(text.as_bytes()) | 1, varies }
    }

    /// The origin of an op's results.
    #[inline]
    pub(crate) fn of(prepared: &Prepared, args: &[Tensor]) -> Origin {
        let made = args.is_empty() || args.iter().any(|arg| arg.origin.digest != 0);
        if made { Origin::mixed(prepared, args) } else { Origin::NONE }
    }

    fn mixed(prepared: &Prepared, args: &[Tensor]) -> Origin {
        let Origin { digest, mut varies } = prepared.made_by;
        let mut all = Digest::default();
        all.add(digest);
        for arg in args {
            all.add(arg.origin.digest);
            let own = if arg.origin.digest == 0 { arg.ty.varies } else { arg.origin.varies };
            varies = varies.union(own);
        }
        // Ranks may have declared their operands in different ways.
        all.add_all(varies.iter().map(|axis| u64::from(axis.0)));
        match prepared.results.first() {
            Some((ty, _)) if varies != ty.varies => Origin { digest: all.get() | 1, varies },
            _ => Origin::NONE,
        }
    }
}

/// When ranks compare what is declared equal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compare {
    /// In debug builds; in traces the type must say so.
    ByType,
    /// In debug builds; in traces if the type does not say so.
    Traced,
    Always,
}

impl Tensor {
    /// The names of the mesh axes over which it may differ between ranks; empty if it is equal everywhere.
    ///
    /// ```
    /// use consort::{Reduce, Tensor};
    ///
    /// let done = consort::spawn(2, |mesh| {
    ///     let x = Tensor::from_iter([1.0f32])?;
    ///     assert_eq!(x.varies(), ["world"]); // From outside: it may be another on each rank.
    ///     assert!(mesh.all_reduce(&x, Reduce::Sum)?.varies().is_empty());
    ///     assert!(x.replicated()?.varies().is_empty());
    ///     Ok(())
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    pub fn varies(&self) -> Vec<String> {
        let Ok(world) = World::current() else { return Vec::new() };
        let mesh = world.mesh();
        self.ty.varies.iter().map(|axis| mesh.axis_name(axis)).collect()
    }

    /// Declares it equal on all ranks, as [`equal_over`](Tensor::equal_over) does over all axes. In a trace it must follow
    /// from the types, so that a forgotten reduction is an error before anything runs.
    ///
    /// [`varies`](Tensor::varies) has an example.
    #[track_caller]
    pub fn replicated(self) -> Result<Tensor> {
        let all = World::current()?.mesh().all_axes();
        self.declared("replicated", all, Compare::ByType, Location::caller())
    }

    /// Declares it equal over axes of the mesh: ranks that differ only in their places along them have the same elements.
    /// Debug builds of a program compare at once, and so do compiled functions at their first call.
    ///
    /// In a trace it costs nothing where it follows from the types. Elsewhere each call compares, in every build, as
    /// [`expect_equal_over`](Tensor::expect_equal_over) does, and fails on all ranks along these axes at this line.
    ///
    /// ```
    /// use consort::{Init, Tensor};
    ///
    /// let done = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |mesh| {
    ///     let tp = mesh.axis("tp")?;
    ///     // A shard: another one for each place along tp, and the same for all along dp.
    ///     let shard = Tensor::from_iter([tp.my_rank()? as f32])?;
    ///     assert_eq!(shard.equal_over(&["dp"])?.varies(), ["tp"]);
    ///     Ok(())
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    #[track_caller]
    pub fn equal_over(self, axes: &[&str]) -> Result<Tensor> {
        let site = Location::caller();
        let axes = axes_of("equal_over", axes, site)?;
        self.declared("equal_over", axes, Compare::Traced, site)
    }

    /// Declares it equal over axes, and compares in every build: fails on all ranks along these axes if it is not equal.
    /// That reads all its elements, in a trace twice, and costs one exchange of 8 bytes for each axis. Outside of traces
    /// the error shows the elements of a small tensor, or else the first one that differs. In a compiled function each call
    /// compares, also where the type says that it is equal.
    ///
    /// ```
    /// use consort::Tensor;
    ///
    /// let results = consort::spawn(2, |mesh| {
    ///     let same = Tensor::from_iter([1.0f32])?.expect_equal_over(&["world"])?;
    ///     assert!(same.varies().is_empty());
    ///     Tensor::from_iter([mesh.my_rank()? as f32])?.expect_equal_over(&["world"])
    ///         .map(|tensor| tensor.numel())
    /// });
    /// for result in results {
    ///     let error = result.unwrap_err().to_string();
    ///     assert!(error.contains("expected a tensor that is equal over world, got different ones on rank 0 and on rank 1"), "{error}");
    /// }
    /// ```
    #[track_caller]
    pub fn expect_equal_over(self, axes: &[&str]) -> Result<Tensor> {
        let site = Location::caller();
        let axes = axes_of("expect_equal_over", axes, site)?;
        self.declared("expect_equal_over", axes, Compare::Always, site)
    }

    /// The same with an origin: ranks of equal digests have tensors that differ over these axes only.
    pub(crate) fn with_origin(mut self, digest: Digest, varies: Axes) -> Tensor {
        if self.ty.varies != varies {
            self.origin = Origin { digest: digest.get() | 1, varies };
        }
        self
    }

    /// The same with its elements as its origin, as for one that was read from a file.
    pub(crate) fn with_elements_as_origin(self, op: &str, site: Site) -> Result<Tensor> {
        if !self.has_data() {
            return Ok(self);
        }
        let mut digest = Digest::default();
        digest.add(self.dtype() as u64);
        digest.add_all(self.shape().iter().map(|size| *size as u64));
        digest.add(self.with_bytes(op, site, Digest::of_many)?);
        Ok(self.with_origin(digest, Axes::NONE))
    }

    /// Forgets where it is equal. Of use for state that begins equal on all ranks and does not stay so, such as a cache of
    /// zeros: a compiled function takes it as differing from its first call on, and need not be compiled again.
    ///
    /// In a trace it changes nothing: there types say what is known.
    ///
    /// ```
    /// use consort::{Dtype, Init, Tensor};
    ///
    /// let done = Init::new().axes(&[("dp", 2), ("tp", 2)]).spawn(4, |_| {
    ///     let cache = Tensor::zeros(Dtype::F32, &[4])?.replicated()?;
    ///     assert_eq!(cache.may_differ()?.varies(), ["dp", "tp"]);
    ///     Ok(())
    /// });
    /// assert!(done.into_iter().all(|done| done.is_ok()));
    /// ```
    pub fn may_differ(mut self) -> Result<Tensor> {
        if self.traced.is_none() {
            let world = World::current()?;
            let all = world.mesh().all_axes();
            self.ty = world.memo().varying(&self.ty, all);
            self.origin = Origin::NONE;
        }
        Ok(self)
    }

    fn declared(mut self, op: &str, axes: Axes, compare: Compare, site: Site) -> Result<Tensor> {
        let world = World::current()?;
        let unknown: Axes = axes.iter().filter(|axis| self.ty.varies.contains(*axis)).collect();
        let tracing = is_tracing();
        if unknown.is_empty() && compare != Compare::Always {
            return Ok(self);
        }
        if tracing && compare == Compare::ByType {
            let over = world.mesh().axes_text(unknown);
            let expected = format!("a tensor whose type says that it is equal over {over}");
            let failure = Failure::new((expected, "one that may differ"))
                .note("reduce or gather it over these axes, or declare arguments before the call")
                .note("`equal_over` compares at each call what the type does not say");
            return Err(Error::of(op, failure, site));
        }
        if tracing {
            // A type may rest on a declaration, which later calls of a release build do not compare.
            let compared = if compare == Compare::Always { axes } else { unknown };
            return self.declared_in_trace(compared, site).named(op, site);
        }
        if self.traced.is_some() {
            self = settle(&self, op, site)?;
        }
        if (compare == Compare::Always || cfg!(debug_assertions)) && self.storage.is_some() {
            for axis in axes.iter() {
                compare_over(&self, op, Axes::one(axis), &world, site)?;
            }
        }
        self.ty = world.memo().varying(&self.ty, self.ty.varies.minus(axes));
        self.origin = Origin::NONE;
        Ok(self)
    }

    /// A constant that this library makes alike on all ranks, as equal. Compiled functions compare it at their first call.
    pub(crate) fn taken_as_equal(mut self) -> Result<Tensor> {
        self.ty = World::current()?.memo().varying(&self.ty, Axes::NONE);
        self.origin = Origin::NONE;
        Ok(self)
    }

    /// In a trace the comparison becomes a part of the program: along each axis the digests are gathered and compared.
    fn declared_in_trace(self, axes: Axes, site: Site) -> Result<Tensor> {
        let mut x = self;
        for axis in axes.iter() {
            let over = GroupName::Axes(Axes::one(axis));
            let own = run_one(&ops::Digest {}, smallvec![x.clone()], site)?;
            let gather = ops::AllGatherStart { dims: vec![0], over };
            let Some(gathered) = record_start(&gather, &[own], site) else { return Ok(x) };
            let (mut digests, _) = gathered?;
            digests.insert(0, x);
            x = run_one(&ops::EqualOver { over }, digests, site)?;
        }
        Ok(x)
    }
}

/// The axes with these names.
fn axes_of(op: &str, names: &[&str], site: Site) -> Result<Axes> {
    let world = World::current()?;
    let mesh = world.mesh();
    let axis = |name: &&str| {
        mesh.axis(name).ok_or_else(|| {
            let known: Vec<&str> = mesh.axes().iter().map(|(name, _)| name.as_str()).collect();
            Error::new(op, (format!("one of the axes {}", known.join(", ")), format!("`{name}`")), site)
        })
    };
    names.iter().map(axis).collect()
}

/// Fails on all ranks along an axis if a tensor differs over it.
fn compare_over(x: &Tensor, op: &str, axis: Axes, world: &World, site: Site) -> Result<()> {
    let failed = |error| Error::comm(op, error, site);
    let over = GroupName::Axes(axis);
    let Some(group) = world.group(over, site).map_err(failed)?.filter(|group| group.size() > 1) else {
        return Ok(());
    };
    let mesh = world.mesh();
    let mine = x.with_bytes(op, site, Digest::of_many)?;
    let recorder = group.recorder();
    let text = recorder.name(&format!("{op}[over={}] {}", mesh.axes_text(axis), kind_of(x)));
    let note = Note { text, site: recorder.site(site), ..Note::default() };
    let got = group.agree(&mine.to_le_bytes(), note).map_err(failed)?;
    let got = got.wait_within(world.timeout()).map_err(failed)?;
    let digests = got[1].bytes().map_err(failed)?;
    let digests: Vec<&[u8]> = digests.chunks_exact(8).collect();
    if digests.iter().all(|other| *other == digests[0]) {
        return Ok(());
    }
    let members = mesh.members(over, world.rank).unwrap_or_default();
    let ranks: Vec<usize> = members.iter().map(|rank| rank.0 as usize).collect();
    // All members have seen that they differ, so all of them exchange what their errors show.
    let values = x.with_bytes(op, site, |bytes| {
        values_that_differ(x, bytes, |mine| gather(&group, world.timeout(), || note, mine))
    })?;
    let rows =
        ranks.iter().zip(values.map_err(failed)?).map(|(rank, value)| format!("rank {rank} has {value}"));
    let expected = format!("a tensor that is equal over {}", mesh.axes_text(axis));
    let failure = Failure::new(Headline::unequal(expected, &ranks, &digests)).rows(rows);
    Err(Error::of(op, failure, site))
}

/// Element type and shape of a tensor.
fn kind_of(x: &Tensor) -> String {
    format!("{}{:?}", x.dtype(), x.hint_shape())
}

/// The most elements that an error shows.
pub(crate) const SHOWN: usize = 8;

/// What each rank has where tensors differ: another type, all elements of a small one, or the first element that differs.
fn values_that_differ(
    x: &Tensor,
    bytes: &[u8],
    gather: impl Fn(&[u8]) -> std::result::Result<Vec<Vec<u8>>, CommError>,
) -> std::result::Result<Vec<String>, CommError> {
    let kinds = gather(kind_of(x).as_bytes())?;
    if kinds.iter().any(|kind| *kind != kinds[0]) {
        return Ok(kinds.iter().map(|kind| String::from_utf8_lossy(kind).into_owned()).collect());
    }
    let (dtype, shape, size) = (x.dtype(), x.hint_shape().to_vec(), x.dtype().size());
    let text = |shape: &[usize], bytes: &[u8]| {
        Literal::from_bytes(dtype, shape.to_vec(), bytes).map_or_else(String::new, |own| own.text())
    };
    if bytes.len() <= SHOWN * size {
        return Ok(gather(bytes)?.iter().map(|bytes| text(&shape, bytes)).collect());
    }
    // First the part in which the first element lies that differs, by digests of the parts, and then the element.
    let part = size * (bytes.len() / size).div_ceil(1024);
    let digests: Vec<u8> = bytes.chunks(part).flat_map(|part| Digest::of_many(part).to_le_bytes()).collect();
    let start = part * first_that_differs(&gather(&digests)?, 8);
    let parts = gather(&bytes[start.min(bytes.len())..(start + part).min(bytes.len())])?;
    let at = first_that_differs(&parts, size);
    let place = unravel(start / size + at, &shape);
    let element = |part: &Vec<u8>| text(&[], part.get(at * size..(at + 1) * size).unwrap_or_default());
    Ok(parts.iter().map(|part| format!("{} at {place:?}", element(part))).collect())
}

/// The place of the first pieces of this length that are not equal in all lists.
fn first_that_differs(lists: &[Vec<u8>], length: usize) -> usize {
    let piece = |list: &Vec<u8>, at: usize| list.get(at * length..(at + 1) * length).map(<[u8]>::to_vec);
    let pieces = lists.first().map_or(0, |list| list.len() / length);
    (0..pieces).find(|at| lists.iter().any(|list| piece(list, *at) != piece(&lists[0], *at))).unwrap_or(0)
}

/// A visitor of a field that is declared equal over axes; `#[derive(Flatten)]` uses it.
#[doc(hidden)]
pub struct EqualOver<'a> {
    /// The visitor of the whole value.
    pub visit: &'a mut dyn Visit,
    /// The field.
    pub field: &'static str,
    /// The names of the axes.
    pub axes: &'static [&'static str],
}

impl Visit for EqualOver<'_> {
    fn tensor(&mut self, tensor: &Tensor) {
        self.visit.equal_over(tensor, self.field, self.axes);
    }
    fn index(&mut self, index: &Index) {
        self.visit.index(index);
    }
    fn setting(&mut self, setting: Static<'_>) {
        self.visit.setting(setting);
    }
    fn enter(&mut self, field: &dyn std::fmt::Display) {
        self.visit.enter(field);
    }
    fn leave(&mut self) {
        self.visit.leave();
    }
}

/// The axes of a field's declaration that can be compared: those in `covered`. A world of one rank need not have them.
pub(crate) fn declared_axes(world: &World, names: &[&str], covered: Axes) -> Axes {
    let mesh = world.mesh();
    names.iter().filter_map(|name| mesh.axis(name)).filter(|axis| covered.contains(*axis)).collect()
}

/// Fails if a value declares a field equal over an axis that the mesh does not have.
pub(crate) fn check_axes(value: &impl crate::Flatten, world: &World, site: Site) -> Result<()> {
    struct Unknown<'a>(&'a World, Option<(&'static str, &'static str)>);
    impl Visit for Unknown<'_> {
        fn tensor(&mut self, _: &Tensor) {}
        fn equal_over(&mut self, _: &Tensor, field: &'static str, axes: &[&'static str]) {
            let unknown = axes.iter().find(|name| self.0.mesh().axis(name).is_none());
            self.1 = self.1.or(unknown.map(|name| (field, *name)));
        }
    }
    if world.mesh().n_ranks() == 1 {
        return Ok(());
    }
    let mut unknown = Unknown(world, None);
    value.visit(&mut unknown);
    let Some((field, name)) = unknown.1 else { return Ok(()) };
    let mesh = world.mesh();
    let known: Vec<&str> = mesh.axes().iter().map(|(name, _)| name.as_str()).collect();
    let failure = Failure::new((format!("one of the axes {}", known.join(", ")), format!("`{name}`")));
    Err(Error::of("compile", failure.of(format!("field `{field}`")), site))
}

/// A tensor's type as its field declares it.
pub(crate) fn as_declared(
    tensor: &Tensor,
    world: &World,
    names: &[&str],
    covered: Axes,
) -> Rc<consort_ir::types::TensorType> {
    world.memo().varying(&tensor.ty, tensor.ty.varies.minus(declared_axes(world, names, covered)))
}
