//! Tensor-parallel layers, one code, eager and compiled, on any number of ranks; and the parts of training.
//!
//! Each layer holds this rank's shard of its weights and the group that shares them. Heads, rows of the vocabulary and
//! columns of the hidden layers are sharded as evenly as possible, so that any number of ranks works. Weights have the
//! layout of files: `[out, in]`.
//!
//! ```
//! use consort::nn::{Config, Llama};
//!
//! let done = consort::spawn(2, |mesh| {
//!     let config = Config::tiny();
//!     let model = Llama::random(&config, &mesh, 7)?;
//!     let tokens = model.generate(&[1, 2, 3], 4, None)?;
//!     assert_eq!(tokens.len(), 4);
//!     Ok(tokens)
//! });
//! let tokens: Vec<_> = done.into_iter().map(|tokens| tokens.ok()).collect();
//! assert_eq!(tokens[0], tokens[1]); // All ranks have the same.
//! ```

mod attention;
mod checkpoint;
mod generate;
mod layers;
mod losses;
mod model;
mod optimizers;
mod parts;
mod schedule;
mod shards;
mod train;
mod weights;

pub use attention::{Attention, KvCache, rotate};
pub use checkpoint::Checkpoint;
pub use generate::{Generator, Sampling};
pub use layers::{ColumnLinear, Embedding, RmsNorm, RowLinear, SwiGlu};
pub use losses::{cross_entropy, mean_squared_error};
pub use model::{Block, Config, Llama};
pub use optimizers::{Adam, Moments, Sgd};
pub use parts::Parts;
pub use schedule::{Cosine, Linear};
pub use shards::Shards;
pub use train::{cast, clip, mean_of, norm};
pub use weights::Weights;

use std::ops::Range;

/// A member's range of `entries` that are sharded as evenly as possible; an empty one for a number that no member has.
///
/// ```
/// use consort::nn::share;
///
/// assert_eq!([share(16, 0, 3), share(16, 1, 3), share(16, 2, 3)], [0..5, 5..10, 10..16]);
/// assert_eq!([share(16, 3, 3), share(16, 0, 0)], [16..16, 16..16]);
/// ```
pub fn share(entries: usize, member: usize, members: usize) -> Range<usize> {
    // At most `entries`, so that it is a usize again.
    let start = |member: usize| (entries as u128 * member as u128 / members as u128) as usize;
    if member < members { start(member)..start(member + 1) } else { entries..entries }
}
