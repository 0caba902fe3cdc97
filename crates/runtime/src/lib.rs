//! The runtime crate.
