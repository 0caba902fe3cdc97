//! Symbolic integers for sizes and positions: concretising one in a trace records a guard.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, Div, Mul, Rem, Sub};
use std::panic::Location;

use consort_ir::index;

use crate::error::Result;
use crate::trace;
use crate::world::World;

/// A size or place: a number, or an expression of sizes and ranks that stay symbols while a function is traced.
///
/// Arithmetic keeps symbols. Comparing or converting an index concretises it: in a trace, one that depends on the
/// sizes of arguments records a guard of the compiled function; one that depends on the rank is an error, because
/// the ranks would trace different programs.
///
/// ```
/// use consort::Index;
///
/// # fn main() -> consort::Result<()> {
/// let n = Index::from(6usize);
/// assert_eq!((&n * 2 + 1).to_usize()?, 13);
/// assert!(n == 6 && n < 7 && &n / 4 == 1 && &n % 4 == 2);
/// assert_eq!(n.max(8).to_string(), "8");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Index(pub(crate) index::Index);

impl Index {
    /// Its number on this rank.
    ///
    /// [`Index`] has an example.
    #[track_caller]
    pub fn to_usize(&self) -> Result<usize> {
        let site = Location::caller();
        let number = self.number(site)?;
        usize::try_from(number).map_err(|_| crate::Error::new("index", ("a size", number.to_string()), site))
    }

    /// The smaller of two.
    ///
    /// [`Index`] has an example.
    #[must_use]
    pub fn min(&self, other: impl Into<Index>) -> Index {
        Index(index::Index::min(&self.0, &other.into().0))
    }

    /// The larger of two.
    ///
    /// [`Index`] has an example.
    #[must_use]
    pub fn max(&self, other: impl Into<Index>) -> Index {
        Index(index::Index::max(&self.0, &other.into().0))
    }

    fn number(&self, site: &'static Location<'static>) -> Result<i64> {
        match self.0.as_const() {
            Some(number) => Ok(number),
            None => trace::number_of(&self.0, site),
        }
    }

    /// Compares two indices. In a trace the outcome is recorded as a guard; if it cannot be, the trace fails.
    #[track_caller]
    fn compare(&self, other: &Index) -> Ordering {
        match (self.0.as_const(), other.0.as_const()) {
            (Some(a), Some(b)) => a.cmp(&b),
            _ => trace::compare(&self.0, &other.0, Location::caller()),
        }
    }

    /// Whether one index is at most another, in the same way.
    #[track_caller]
    fn at_most(a: &Index, b: &Index) -> bool {
        match (a.0.as_const(), b.0.as_const()) {
            (Some(a), Some(b)) => a <= b,
            _ => trace::at_most(&a.0, &b.0, Location::caller()),
        }
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match World::current() {
            Ok(world) => write!(f, "{}", self.0.display(&world.mesh())),
            Err(_) => write!(f, "{:?}", self.0),
        }
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<&Index> for Index {
    fn from(index: &Index) -> Index {
        index.clone()
    }
}

/// The comparisons that the compiler would make of `partial_cmp` inside of the standard library: at the user's line, and
/// with a condition that is no stricter than the comparison.
macro_rules! at_most {
    ($ty:ty) => {
        #[track_caller]
        fn lt(&self, other: &$ty) -> bool {
            !Index::at_most(&Index::from(<$ty as Clone>::clone(other)), self)
        }
        #[track_caller]
        fn le(&self, other: &$ty) -> bool {
            Index::at_most(self, &Index::from(<$ty as Clone>::clone(other)))
        }
        #[track_caller]
        fn gt(&self, other: &$ty) -> bool {
            !Index::at_most(self, &Index::from(<$ty as Clone>::clone(other)))
        }
        #[track_caller]
        fn ge(&self, other: &$ty) -> bool {
            Index::at_most(&Index::from(<$ty as Clone>::clone(other)), self)
        }
    };
}

macro_rules! numbers {
    ($($ty:ty),*) => {$(
        impl From<$ty> for Index {
            fn from(number: $ty) -> Index {
                Index(i64::try_from(number).map_or_else(|_| index::Index::from(usize::MAX), index::Index::constant))
            }
        }
        impl PartialEq<$ty> for Index {
            #[track_caller]
            fn eq(&self, other: &$ty) -> bool {
                self.compare(&Index::from(*other)) == Ordering::Equal
            }
        }
        impl PartialOrd<$ty> for Index {
            #[track_caller]
            fn partial_cmp(&self, other: &$ty) -> Option<Ordering> {
                Some(self.compare(&Index::from(*other)))
            }
            at_most!($ty);
        }
    )*};
}

numbers!(usize, i64, i32, u32);

impl PartialEq for Index {
    #[track_caller]
    fn eq(&self, other: &Index) -> bool {
        self.compare(other) == Ordering::Equal
    }
}

impl PartialOrd for Index {
    #[track_caller]
    fn partial_cmp(&self, other: &Index) -> Option<Ordering> {
        Some(self.compare(other))
    }
    at_most!(Index);
}

macro_rules! arithmetic {
    ($($trait:ident $method:ident $f:expr;)*) => {$(
        impl<T: Into<Index>> $trait<T> for &Index {
            type Output = Index;
            fn $method(self, other: T) -> Index {
                let f: fn(&index::Index, &index::Index) -> index::Index = $f;
                Index(f(&self.0, &other.into().0))
            }
        }
        impl<T: Into<Index>> $trait<T> for Index {
            type Output = Index;
            fn $method(self, other: T) -> Index {
                $trait::$method(&self, other)
            }
        }
    )*};
}

arithmetic! {
    Add add |a, b| a + b;
    Sub sub |a, b| a - b;
    Mul mul |a, b| a * b;
    Div div |a, b| a.div(b);
    Rem rem |a, b| a.rem(b);
}

/// Sizes of a shape: numbers, or indices where some are symbols; `()` for no dimensions.
///
/// ```
/// # fn main() -> consort::Result<()> {
/// let x = consort::Tensor::from_iter(0..6i32)?;
/// assert_eq!(x.reshape(&[2, 3])?.shape(), [2, 3]);
/// assert_eq!(x.reshape(&[x.dim(0)? / 3, 3.into()])?.shape(), [2, 3]);
/// assert_eq!(x.narrow(0, 5, 1)?.reshape(&())?.item::<i32>()?, 5);
/// # Ok(()) }
/// ```
pub trait Shape {
    /// The sizes, outermost first.
    fn sizes(&self) -> Vec<Index>;
}

impl Shape for [usize] {
    fn sizes(&self) -> Vec<Index> {
        self.iter().map(|size| Index::from(*size)).collect()
    }
}

impl Shape for [Index] {
    fn sizes(&self) -> Vec<Index> {
        self.to_vec()
    }
}

impl Shape for () {
    fn sizes(&self) -> Vec<Index> {
        Vec::new()
    }
}

macro_rules! shapes {
    ($($ty:ty),*) => {$(
        impl<const N: usize> Shape for [$ty; N] {
            fn sizes(&self) -> Vec<Index> {
                self[..].sizes()
            }
        }
        impl Shape for Vec<$ty> {
            fn sizes(&self) -> Vec<Index> {
                self[..].sizes()
            }
        }
    )*};
}

shapes!(usize, Index);

/// Converts to the indices of op attributes.
pub(crate) fn plain(list: Vec<Index>) -> Vec<index::Index> {
    list.into_iter().map(|index| index.0).collect()
}
