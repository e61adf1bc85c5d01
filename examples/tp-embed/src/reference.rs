//! The reference: candle-transformers' own BertModel, unsharded, in the parent.
//!
//! Owns the whole model while it runs. Called by the parent after the ranks are done, so that it takes no
//! core from them. Shares with the ranks' model the tokens and the pooling, and no other code.

use crate::folder::{self, FolderError};
use crate::job::Batch;
use crate::pooling;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};
use std::io;
use std::path::Path;

/// The reference did not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReferenceError {
    /// config.json was not read.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The weights were not read.
    #[error("the weights: {0}")]
    Read(#[from] io::Error),
    /// candle refused.
    #[error("the reference: {0}")]
    Candle(#[from] candle_core::Error),
}

/// Embeds the batches without any sharding.
///
/// # Errors
/// [`ReferenceError`].
pub(crate) fn embed(model: &Path, batches: &[Batch]) -> Result<Vec<Vec<f32>>, ReferenceError> {
    let device = Device::Cpu;
    let config: Config = folder::read_config(model)?;
    let weights = std::fs::read(model.join(folder::WEIGHTS))?;
    let weights = VarBuilder::from_buffered_safetensors(weights, DType::F32, &device)?;
    let bert = BertModel::load(weights, &config)?;
    let mut embeddings = Vec::new();
    for batch in batches {
        let token_ids = batch.token_ids(&device)?;
        let mask = batch.mask(&device)?;
        let hidden = bert.forward(&token_ids, &token_ids.zeros_like()?, Some(&mask))?;
        embeddings.extend(pooling::embed(&hidden, batch)?);
    }
    Ok(embeddings)
}
