//! The three binary interfaces of MPI: which handles, constants and sizes a library was compiled with.
//!
//! A handle is an address in Open MPI, a 32-bit number in MPICH, and in the standard interface of MPI 5 a number as wide
//! as an address. All are passed as words: a callee reads the part of the register that it needs. A call that returns a
//! handle of 32 bits writes the lower half of a word that was zero, so the machine must be little-endian.

use std::ffi::c_int;

const _: () = assert!(cfg!(all(target_endian = "little", target_pointer_width = "64")));

/// A handle of any kind.
pub(crate) type Handle = usize;

/// How a library represents handles and numbers constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// The standard one of MPI 5.
    Standard,
    /// Open MPI's, up to version 5.
    OpenMpi,
    /// MPICH's, which Intel MPI, MVAPICH and Cray MPICH share.
    Mpich,
}

impl Abi {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Abi::Standard => "standard ABI",
            Abi::OpenMpi => "Open MPI's ABI",
            Abi::Mpich => "MPICH's ABI",
        }
    }
}

/// A table of handles: the name in MPI, the symbol whose address it is in Open MPI, then the values in MPICH's interface
/// and in the standard one.
macro_rules! handles {
    ($($field:ident $name:literal $symbol:literal $mpich:literal $standard:literal)*) => {
        /// Handles that every program has.
        pub(crate) struct Handles { $(pub(crate) $field: Handle,)* }

        impl Handles {
            /// The handles of a library, given how to find a symbol.
            pub(crate) fn new<E>(abi: Abi, symbol: impl Fn(&'static str) -> Result<Handle, E>) -> Result<Handles, E> {
                Ok(Handles {
                    $($field: match abi {
                        Abi::OpenMpi => symbol($symbol)?,
                        Abi::Mpich => $mpich,
                        Abi::Standard => $standard,
                    },)*
                })
            }

            /// Their names, and the symbols of Open MPI.
            #[cfg(test)]
            pub(crate) const NAMES: &[(&str, &str)] = &[$(($name, $symbol)),*];

            #[cfg(test)]
            pub(crate) fn all(&self) -> Vec<Handle> {
                vec![$(self.$field),*]
            }
        }
    };
}

handles! {
    comm_world "MPI_COMM_WORLD" "ompi_mpi_comm_world" 0x4400_0000 0x101
    comm_self "MPI_COMM_SELF" "ompi_mpi_comm_self" 0x4400_0001 0x102
    comm_null "MPI_COMM_NULL" "ompi_mpi_comm_null" 0x0400_0000 0x100
    info_null "MPI_INFO_NULL" "ompi_mpi_info_null" 0x1c00_0000 0x130
    errors_return "MPI_ERRORS_RETURN" "ompi_mpi_errors_return" 0x5400_0001 0x143
    byte "MPI_BYTE" "ompi_mpi_byte" 0x4c00_010d 0x247
    uint8 "MPI_UINT8_T" "ompi_mpi_uint8_t" 0x4c00_013b 0x241
    uint16 "MPI_UINT16_T" "ompi_mpi_uint16_t" 0x4c00_023c 0x249
    int32 "MPI_INT32_T" "ompi_mpi_int32_t" 0x4c00_0439 0x250
    int64 "MPI_INT64_T" "ompi_mpi_int64_t" 0x4c00_083a 0x258
    float "MPI_FLOAT" "ompi_mpi_float" 0x4c00_040a 0x210
    double "MPI_DOUBLE" "ompi_mpi_double" 0x4c00_080b 0x214
    sum "MPI_SUM" "ompi_mpi_op_sum" 0x5800_0003 0x21
    prod "MPI_PROD" "ompi_mpi_op_prod" 0x5800_0004 0x24
    min "MPI_MIN" "ompi_mpi_op_min" 0x5800_0002 0x22
    max "MPI_MAX" "ompi_mpi_op_max" 0x5800_0001 0x23
    band "MPI_BAND" "ompi_mpi_op_band" 0x5800_0006 0x28
    bor "MPI_BOR" "ompi_mpi_op_bor" 0x5800_0008 0x29
    bxor "MPI_BXOR" "ompi_mpi_op_bxor" 0x5800_000a 0x2a
}

/// Constants, and where the fields of a status are, in words of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) in_place: isize,
    pub(crate) any_source: c_int,
    pub(crate) any_tag: c_int,
    pub(crate) comm_type_shared: c_int,
    pub(crate) tag_ub: c_int,
    pub(crate) thread_serialized: c_int,
    pub(crate) err_truncate: c_int,
    pub(crate) status_source: usize,
    pub(crate) status_tag: usize,
}

/// The words of the largest status.
pub(crate) const STATUS: usize = 8;

impl Numbers {
    pub(crate) fn new(abi: Abi) -> Numbers {
        match abi {
            Abi::Standard => Numbers {
                in_place: 1,
                any_source: -1,
                any_tag: -2,
                comm_type_shared: 221,
                tag_ub: 501,
                thread_serialized: 2048,
                err_truncate: 15,
                status_source: 0,
                status_tag: 1,
            },
            Abi::OpenMpi => Numbers {
                in_place: 1,
                any_source: -1,
                any_tag: -1,
                comm_type_shared: 0,
                tag_ub: 0,
                thread_serialized: 2,
                err_truncate: 15,
                status_source: 0,
                status_tag: 1,
            },
            Abi::Mpich => Numbers {
                in_place: -1,
                any_source: -2,
                any_tag: -1,
                comm_type_shared: 1,
                tag_ub: 0x6440_0001,
                thread_serialized: 2,
                err_truncate: 14,
                status_source: 2,
                status_tag: 3,
            },
        }
    }
}

#[cfg(test)]
mod tests;
