//! From sentences to batches of tokens.
//!
//! Owns the tokenizer. Called by the parent. Cuts sentences at the length that tokenizer.json says.

use crate::job::Batch;
use std::path::Path;
use tokenizers::{PaddingParams, PaddingStrategy, Tokenizer};

/// Sentences in one batch.
const BATCH_SIZE: usize = 16;

/// Sentences were not tokenized.
#[derive(Debug, thiserror::Error)]
#[error("tokenizer: {0}")]
pub(crate) struct TokenizeError(#[from] tokenizers::Error);

/// Tokenizes sentences, in order.
///
/// # Errors
/// [`TokenizeError`].
pub(crate) fn batches(file: &Path, sentences: &[String]) -> Result<Vec<Batch>, TokenizeError> {
    let mut tokenizer = Tokenizer::from_file(file)?;
    // The file pads to 128 tokens, whatever the sentences; the longest of the batch will do.
    let padding = tokenizer.get_padding().cloned().unwrap_or_default();
    tokenizer.with_padding(Some(PaddingParams {
        strategy: PaddingStrategy::BatchLongest,
        ..padding
    }));
    let batch = |sentences: &[String]| {
        let encodings = tokenizer.encode_batch(sentences.to_vec(), true)?;
        let num_tokens = encodings.iter().map(|one| one.len()).max().unwrap_or(0);
        Ok(Batch {
            num_sentences: encodings.len(),
            num_tokens,
            token_ids: encodings
                .iter()
                .flat_map(|one| one.get_ids().to_vec())
                .collect(),
            mask: encodings
                .iter()
                .flat_map(|one| one.get_attention_mask().to_vec())
                .collect(),
        })
    };
    sentences.chunks(BATCH_SIZE).map(batch).collect()
}
