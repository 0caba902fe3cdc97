//! A model of the shape of Llama, assembled from the layers.

use std::panic::Location;

use consort_types::Failure;

use crate::mesh::Group;
use crate::{Dtype, Error, Flatten, Index, Result, Tensor};

use super::attention::{Attention, KvCache};
use super::layers::{ColumnLinear, Embedding, RmsNorm, RowLinear, SwiGlu};
use super::share;
use super::weights::Weights;

/// The sizes of a model.
///
/// [`nn`](super) has an example.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The size of the vocabulary.
    pub vocabulary: usize,
    /// The hidden dimension.
    pub hidden: usize,
    /// How many blocks.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values: a divisor of the others.
    pub kv_heads: usize,
    /// The width of the feed-forward part.
    pub feed_forward: usize,
    /// How many tokens a cache has room for.
    pub places: usize,
    /// The base of the rotary angles.
    pub base: f64,
    /// What norms add to the mean square.
    pub eps: f64,
    /// The element type.
    pub dtype: Dtype,
}

impl Config {
    /// A model for tests: two blocks of four heads.
    ///
    /// [`nn`](super) has an example.
    pub fn tiny() -> Config {
        Config {
            vocabulary: 67,
            hidden: 32,
            layers: 2,
            heads: 4,
            kv_heads: 4,
            feed_forward: 48,
            places: 64,
            base: 10000.0,
            eps: 1e-6,
            dtype: Dtype::F32,
        }
    }

    /// The width of a head.
    pub fn width(&self) -> usize {
        self.hidden / self.heads
    }

    /// Fails if members of a group cannot share a model of these sizes.
    fn check(&self, members: usize, site: &'static Location<'static>) -> Result<()> {
        let refuse = |expected: String, got: usize, note: &str| {
            let failure = Failure::new((expected, got.to_string())).note(note);
            Err(Error::of("llama", failure, site))
        };
        for (what, size, of, divisor) in [
            ("the heads", self.heads, "kv_heads", self.kv_heads),
            ("the hidden dimension", self.hidden, "heads", self.heads),
        ] {
            if divisor == 0 || !size.is_multiple_of(divisor) {
                let note = format!("{what} must be divisible by `{of}` of the `Config`");
                return refuse(format!("{what} as a multiple of {divisor}"), size, &note);
            }
        }
        for (what, size) in [("heads of keys", self.kv_heads), ("tokens", self.vocabulary)] {
            if size < members {
                let note = "each member must have at least one: make the group smaller";
                return refuse(format!("at most {size} members, for {size} {what}"), members, note);
            }
        }
        Ok(())
    }
}

/// Attention and the feed-forward part, each after a norm and with a residual connection.
///
/// [`Llama`] is made of them.
#[derive(Flatten, Clone)]
pub struct Block {
    /// The norm before attention.
    pub norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// The norm before the feed-forward part.
    pub feed_norm: RmsNorm,
    /// The feed-forward part.
    pub feed: SwiGlu,
}

impl Block {
    /// For tokens `[length, hidden]` from place `first` on.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, cache: &mut KvCache, first: &Index) -> Result<Tensor> {
        let x = self.attention.forward(&self.norm.forward(x)?, cache, first)?.add(x)?;
        self.feed.forward(&self.feed_norm.forward(&x)?)?.add(&x)
    }

    /// For whole sequences `[batch, length, hidden]`, without a cache.
    #[track_caller]
    pub fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.attention.attend(&self.norm.forward(x)?)?.add(x)?;
        self.feed.forward(&self.feed_norm.forward(&x)?)?.add(&x)
    }
}

/// A model of the shape of Llama; each member of a group has its part of the weights.
///
/// [`nn`](super) has an example.
#[derive(Flatten, Clone)]
pub struct Llama {
    /// The token embedding.
    pub embedding: Embedding,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// The norm after them.
    pub norm: RmsNorm,
    /// The last layer, which computes the logits.
    pub head: Embedding,
}

impl Llama {
    /// A model with random weights, which do not depend on the number of members. All members call it, with the same key.
    ///
    /// [`nn`](super) has an example.
    #[track_caller]
    pub fn random(config: &Config, group: &Group, key: i64) -> Result<Llama> {
        let keys = group.all_gather(Tensor::from_iter([key])?, 0)?;
        let keys = if keys.has_data() { keys.to_vec::<i64>()? } else { Vec::new() };
        if let Some(other) = keys.iter().position(|other| *other != keys[0]) {
            let headline =
                (format!("the key {} of member 0", keys[0]), format!("{} on member {other}", keys[other]));
            return Err(Error::new("llama", headline, Location::caller()));
        }
        Llama::build(config, group, &Weights::Random { key })
    }

    /// A model with the weights of a safetensors file, of which each member reads only its own part. Names are those of
    /// files for Llama: `model.layers.0.self_attn.q_proj.weight` and so on.
    #[track_caller]
    pub fn load(config: &Config, group: &Group, path: impl AsRef<std::path::Path>) -> Result<Llama> {
        Llama::build(config, group, &Weights::File(crate::Safetensors::open(path)?))
    }

    #[track_caller]
    fn build(config: &Config, group: &Group, weights: &Weights) -> Result<Llama> {
        config.check(group.size(), Location::caller())?;
        let Config { vocabulary, hidden, feed_forward, kv_heads, eps, dtype, .. } = *config;
        let (me, n, width) = (group.my_rank()?, group.size(), config.width());
        // A member gets whole groups of heads, so that queries and their keys are on one rank.
        let own_kv = share(kv_heads, me, n);
        let each = config.heads / kv_heads;
        let own = own_kv.start * each * width..own_kv.end * each * width;
        let own_kv = own_kv.start * width..own_kv.end * width;
        let own_feed = share(feed_forward, me, n);
        let column = |name: String, out: usize, own: &std::ops::Range<usize>| -> Result<ColumnLinear> {
            let weight = weights.part(&name, &[out, hidden], 0, (group, own.clone()), dtype)?;
            Ok(ColumnLinear { weight, bias: None })
        };
        let row = |name: String, inputs: usize, own: &std::ops::Range<usize>| -> Result<RowLinear> {
            let weight = weights.part(&name, &[hidden, inputs], 1, (group, own.clone()), dtype)?;
            Ok(RowLinear { weight, bias: None, group: group.clone() })
        };
        let norm = |name: String| -> Result<RmsNorm> {
            Ok(RmsNorm { weight: weights.norm(&name, hidden, dtype)?, eps, group: None })
        };
        let block = |layer: usize| -> Result<Block> {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let (q, kv) = (config.heads * width, kv_heads * width);
            Ok(Block {
                norm: norm(name("input_layernorm"))?,
                attention: Attention {
                    query: column(name("self_attn.q_proj"), q, &own)?,
                    key: column(name("self_attn.k_proj"), kv, &own_kv)?,
                    value: column(name("self_attn.v_proj"), kv, &own_kv)?,
                    out: row(name("self_attn.o_proj"), q, &own)?,
                    width,
                    base: config.base,
                },
                feed_norm: norm(name("post_attention_layernorm"))?,
                feed: SwiGlu {
                    gate: column(name("mlp.gate_proj"), feed_forward, &own_feed)?,
                    up: column(name("mlp.up_proj"), feed_forward, &own_feed)?,
                    down: row(name("mlp.down_proj"), feed_forward, &own_feed)?,
                },
            })
        };
        let table = |name: &str| -> Result<Embedding> {
            let own = share(vocabulary, me, n);
            Ok(Embedding {
                table: weights.part(name, &[vocabulary, hidden], 0, (group, own), dtype)?,
                sizes: (0..n).map(|member| share(vocabulary, member, n).len()).collect(),
                group: group.clone(),
            })
        };
        Ok(Llama {
            embedding: table("model.embed_tokens.weight")?,
            blocks: (0..config.layers).map(block).collect::<Result<_>>()?,
            norm: norm("model.norm.weight".into())?,
            head: table("lm_head.weight")?,
        })
    }

    /// Along which dimension a weight of the model is split, by the name of its fields; `None` if every member has all of it.
    /// [`Parts::split`](super::Parts::split) takes it.
    pub fn split(name: &str) -> Option<usize> {
        let mut fields = name.rsplit('.');
        match (fields.next(), fields.next()) {
            (Some("table"), _) | (Some("weight"), Some("query" | "key" | "value" | "gate" | "up")) => Some(0),
            (Some("weight"), Some("out" | "down")) => Some(1),
            _ => None,
        }
    }

    /// Caches for this member's heads.
    #[track_caller]
    pub fn caches(&self, places: usize) -> Result<Vec<KvCache>> {
        let one = |block: &Block| {
            let width = block.attention.width;
            let weight = &block.attention.key.weight;
            KvCache::new(weight.dtype(), weight.shape()[0] / width, places, width)
        };
        self.blocks.iter().map(one).collect()
    }

    /// Logits of the token that follows each of `tokens`, which begin at position `first`: `[length, vocabulary]`,
    /// replicated on all members.
    #[track_caller]
    pub fn forward(&self, tokens: &Tensor, caches: &mut [KvCache], first: &Index) -> Result<Tensor> {
        let mut x = self.embedding.forward(tokens)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward(&x, cache, first)?;
        }
        self.head.logits(&self.norm.forward(&x)?)
    }

    /// The mean cross-entropy of targets for whole sequences of tokens, both `[batch, length]`: what training minimises.
    #[track_caller]
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(tokens)?;
        for block in &self.blocks {
            x = block.attend(&x)?;
        }
        self.head.cross_entropy(&self.norm.forward(&x)?, targets)
    }
}
