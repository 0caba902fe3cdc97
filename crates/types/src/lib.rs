//! Types that all crates share: element types, reductions, layouts, group names, source lines, failures, and the one
//! description of a collective ([`Collective`]).
//!
//! Nothing here runs anything. Programs (`consort-ir`) and groups of ranks (`consort-comm`) do not depend on each
//! other; the meaning of, say, a reduction or the root of a broadcast is defined here once.
//!
//! ```
//! use consort_types::{Dtype, Kind, Reduce, Written};
//!
//! assert!(Reduce::Sum.takes(Dtype::F32) && !Reduce::Avg.takes(Dtype::I32));
//! // The root of a reduce has the sum in its operand's place; everybody else gets zeros.
//! assert_eq!(Kind::Reduce.role(Some(0), 0).written, Written::InPlace);
//! assert_eq!(Kind::Reduce.role(Some(0), 1).written, Written::Zeros);
//! ```
#![forbid(unsafe_code)]

mod collective;
mod destination;
mod digest;
mod dtype;
mod failure;
mod group;
pub mod layout;
mod message;
mod ranges;
mod reduce;
mod rng;
mod site;
mod space;

pub use collective::{Collective, Kind, Role, Written};
pub use destination::{Destination, Held};
pub use digest::Digest;
pub use dtype::{Dtype, to_bf16, to_f16};
pub use failure::{Failure, Headline, aligned, ranks_text};
pub use group::{Axes, Axis, GroupId, GroupName, Rank};
pub use message::{Message, Missing, Peer, Route};
pub use ranges::overlaps;
pub use reduce::Reduce;
pub use rng::Rng;
pub use site::Site;
pub use space::Space;
