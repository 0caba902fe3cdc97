//! The passes crate.
