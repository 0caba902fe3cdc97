//! Functions of floats for vectorised loops.
#![allow(
    clippy::excessive_precision,
    clippy::approx_constant,
    reason = "coefficients are written with the digits of their fit, and those near a constant are not it"
)]

pub(crate) mod double;
pub(crate) mod single;

#[cfg(test)]
mod tests;
