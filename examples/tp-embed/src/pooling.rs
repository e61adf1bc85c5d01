//! From token vectors to a sentence's embedding, as sentence-transformers does it for this model.
//!
//! Owns the arithmetic only. Called for the ranks' result and for the reference's.

use crate::job::Batch;
use candle_core::Tensor;

/// The mean over a sentence's tokens, padding left out, scaled to length 1: one vector a sentence.
pub(crate) fn embed(hidden: &Tensor, batch: &Batch) -> candle_core::Result<Vec<Vec<f32>>> {
    let mask = batch.mask(hidden.device())?.unsqueeze(2)?;
    let sum = hidden.broadcast_mul(&mask)?.sum(1)?;
    let mean = sum.broadcast_div(&mask.sum(1)?)?;
    let norm = mean.sqr()?.sum_keepdim(1)?.sqrt()?;
    mean.broadcast_div(&norm)?.to_vec2()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use candle_core::Device;

    #[test]
    fn padding_does_not_count() {
        let hidden = [[[3.0_f32, 0.0], [3.0, 8.0], [100.0, -100.0]]];
        let hidden = Tensor::new(&hidden, &Device::Cpu).unwrap();
        let batch = Batch {
            num_sentences: 1,
            num_tokens: 3,
            token_ids: vec![1, 2, 0],
            mask: vec![1, 1, 0],
        };
        assert_eq!(embed(&hidden, &batch).unwrap(), [[0.6, 0.8]]);
    }
}
