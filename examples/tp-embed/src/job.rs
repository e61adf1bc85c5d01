//! What parent and ranks tell each other: one JSON line each way.
//!
//! Owns the messages. The parent writes a [`Job`] to a rank's standard input, as an engine's scheduler
//! sends a batch to its workers; the rank answers a [`Report`] on its standard output.

use crate::rank_sum::Measured;
use crate::shard::Shard;
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;

/// Sentences that run through the model together, padded to the longest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Batch {
    /// Sentences.
    pub(crate) num_sentences: usize,
    /// Tokens of each, padding included.
    pub(crate) num_tokens: usize,
    /// Sentence after sentence.
    pub(crate) token_ids: Vec<u32>,
    /// 1 for a token, 0 for padding.
    pub(crate) mask: Vec<u32>,
}

impl Batch {
    /// (num_sentences, num_tokens).
    pub(crate) fn token_ids(&self, device: &Device) -> candle_core::Result<Tensor> {
        let shape = (self.num_sentences, self.num_tokens);
        Tensor::from_slice(&self.token_ids, shape, device)
    }

    /// (num_sentences, num_tokens), f32.
    pub(crate) fn mask(&self, device: &Device) -> candle_core::Result<Tensor> {
        let shape = (self.num_sentences, self.num_tokens);
        Tensor::from_slice(&self.mask, shape, device)?.to_dtype(DType::F32)
    }
}

/// What a rank is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    /// Who it is.
    pub(crate) shard: Shard,
    /// The daemon's socket.
    pub(crate) socket: PathBuf,
    /// The communicator to join.
    pub(crate) communicator: String,
    /// The model's folder.
    pub(crate) model: PathBuf,
    /// What to embed.
    pub(crate) batches: Vec<Batch>,
    /// Sum nothing, to show that the check notices.
    pub(crate) replace_all_reduce_by_identity: bool,
}

/// What the communicator says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Joined {
    /// Where the memory is.
    pub(crate) backend: String,
    /// How reductions are triggered.
    pub(crate) lane: String,
    /// Why so.
    pub(crate) lane_reason: String,
    /// The epoch.
    pub(crate) epoch: u64,
}

/// What a rank has done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Who it is.
    pub(crate) shard: Shard,
    /// Its attention heads.
    pub(crate) heads: Range<usize>,
    /// Its intermediate columns.
    pub(crate) columns: Range<usize>,
    /// Weights it read.
    pub(crate) weights_len_bytes: u64,
    /// What it joined.
    pub(crate) joined: Joined,
    /// The embeddings as the bits of f32, so that "the same" means the same bits.
    pub(crate) embeddings: Vec<Vec<u32>>,
    /// Its reductions, in order.
    pub(crate) measured: Vec<Measured>,
}
