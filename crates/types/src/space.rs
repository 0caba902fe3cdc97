//! Where memory is.

use std::fmt;

/// A memory in which tensors lie. A rank has at most one device, so there is no number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Space {
    /// The memory of the host, which its kernels and the program read.
    #[default]
    Host,
    /// The memory of a device. Only its kernels, and engines that know it, read and write there.
    Device,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Host => "host",
            Space::Device => "device",
        })
    }
}
