//! BERT, cut over the ranks.
//!
//! Owns this rank's weights. Called by the worker. Each layer is a pair of blocks of one form: a
//! column-parallel linear layer, something that needs no other rank, a row-parallel linear layer, the sum
//! over the ranks. Attention's heads are independent of each other, and so are the MLP's intermediate
//! columns, so nothing else is exchanged. Refuses configurations that it does not implement.

use crate::checkpoint::{Checkpoint, CheckpointError, Cut};
use crate::job::Batch;
use crate::rank_sum::{RankSum, SumError};
use crate::shard::{Indivisible, Shard};
use candle_core::{D, Device, Tensor};
use candle_nn::{LayerNorm, Linear, Module};
use serde::Deserialize;
use std::ops::Range;

/// The model was not built, or did not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ModelError {
    /// The configuration asks for what this model does not do.
    #[error("config.json: {key} is {value:?}; only {supported:?} is implemented")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The value that is implemented.
        supported: &'static str,
    },
    /// The heads do not divide the hidden vector.
    #[error("config.json: {num_attention_heads} heads do not divide hidden_size {hidden_size}")]
    HeadSize {
        /// Width of a token's vector.
        hidden_size: usize,
        /// Heads of a layer's attention.
        num_attention_heads: usize,
    },
    /// The world size does not divide the model.
    #[error(transparent)]
    Indivisible(#[from] Indivisible),
    /// A weight was not read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The ranks did not sum.
    #[error(transparent)]
    Sum(#[from] SumError),
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The part of config.json that matters here.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Config {
    /// Width of a token's vector.
    pub(crate) hidden_size: usize,
    /// Heads of a layer's attention, all ranks together.
    pub(crate) num_attention_heads: usize,
    /// Columns between the MLP's two linear layers, all ranks together.
    pub(crate) intermediate_size: usize,
    /// Layers.
    pub(crate) num_hidden_layers: usize,
    layer_norm_eps: f64,
    hidden_act: String,
    #[serde(default = "absolute")]
    position_embedding_type: String,
}

fn absolute() -> String {
    "absolute".to_owned()
}

/// What one rank owns of every layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owned {
    /// Attention heads.
    pub(crate) heads: Range<usize>,
    /// Intermediate columns of the MLP.
    pub(crate) columns: Range<usize>,
}

impl Config {
    /// What a rank owns.
    ///
    /// # Errors
    /// [`ModelError`] if the model is another than this code's, or the ranks would own unequal parts.
    pub(crate) fn owned(&self, shard: Shard) -> Result<Owned, ModelError> {
        let fixed = [
            ("hidden_act", &self.hidden_act, "gelu"),
            (
                "position_embedding_type",
                &self.position_embedding_type,
                "absolute",
            ),
        ];
        for (key, value, supported) in fixed {
            if value != supported {
                return Err(ModelError::Unsupported {
                    key,
                    value: value.clone(),
                    supported,
                });
            }
        }
        if self.hidden_size.checked_rem(self.num_attention_heads) != Some(0) {
            return Err(ModelError::HeadSize {
                hidden_size: self.hidden_size,
                num_attention_heads: self.num_attention_heads,
            });
        }
        Ok(Owned {
            heads: shard.part("attention heads", self.num_attention_heads)?,
            columns: shard.part("intermediate columns", self.intermediate_size)?,
        })
    }

    fn head_size(&self) -> usize {
        // `owned` has seen that there are heads, and that they divide.
        self.hidden_size / self.num_attention_heads.max(1)
    }
}

/// Reads the tensors below one prefix.
struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    prefix: String,
}

impl Weights<'_> {
    fn below(&self, name: &str) -> Self {
        Self {
            checkpoint: self.checkpoint,
            prefix: format!("{}{name}.", self.prefix),
        }
    }

    fn read(&self, name: &str, cut: &Cut) -> Result<Tensor, CheckpointError> {
        self.checkpoint.read(&format!("{}{name}", self.prefix), cut)
    }

    fn layer_norm(&self, eps: f64) -> Result<LayerNorm, CheckpointError> {
        let weight = self.read("weight", &Cut::Whole)?;
        let bias = self.read("bias", &Cut::Whole)?;
        Ok(LayerNorm::new(weight, bias, eps))
    }

    /// A linear layer of which this rank computes some outputs, with their biases. Every rank has all
    /// inputs; nothing is exchanged.
    fn column_parallel(&self, outputs: &Range<usize>) -> Result<Linear, CheckpointError> {
        // Columns of the matrix that the input is multiplied with are rows of the stored weight.
        let cut = Cut::Rows(outputs.clone());
        let weight = self.read("weight", &cut)?;
        Ok(Linear::new(weight, Some(self.read("bias", &cut)?)))
    }

    /// A linear layer of which this rank has some inputs.
    fn row_parallel(&self, inputs: &Range<usize>) -> Result<RowParallel, CheckpointError> {
        let weight = self.read("weight", &Cut::Columns(inputs.clone()))?;
        Ok(RowParallel {
            partial: Linear::new(weight, None),
            bias: self.read("bias", &Cut::Whole)?,
        })
    }
}

/// A linear layer whose inputs are spread over the ranks.
#[derive(Debug)]
struct RowParallel {
    partial: Linear,
    bias: Tensor,
}

impl RowParallel {
    fn forward(&self, inputs: &Tensor, ranks: &mut dyn RankSum) -> Result<Tensor, ModelError> {
        let sum = ranks.sum(&self.partial.forward(inputs)?)?;
        // After the sum: in it, the bias would count once for each rank.
        Ok(sum.broadcast_add(&self.bias)?)
    }
}

/// Attention with this rank's heads.
#[derive(Debug)]
struct Attention {
    num_heads: usize,
    head_size: usize,
    query: Linear,
    key: Linear,
    value: Linear,
    output: RowParallel,
    norm: LayerNorm,
}

impl Attention {
    fn load(weights: &Weights<'_>, config: &Config, owned: &Owned) -> Result<Self, ModelError> {
        let head_size = config.head_size();
        // A head is `head_size` neighbouring outputs of query, key and value, and as many inputs of output.
        let elems = owned.heads.start * head_size..owned.heads.end * head_size;
        let output = weights.below("output");
        Ok(Self {
            num_heads: owned.heads.len(),
            head_size,
            query: weights.below("self.query").column_parallel(&elems)?,
            key: weights.below("self.key").column_parallel(&elems)?,
            value: weights.below("self.value").column_parallel(&elems)?,
            output: output.below("dense").row_parallel(&elems)?,
            norm: output
                .below("LayerNorm")
                .layer_norm(config.layer_norm_eps)?,
        })
    }

    /// (batch, tokens, heads * head_size) -> (batch, heads, tokens, head_size).
    fn by_head(&self, projected: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, tokens, _) = projected.dims3()?;
        projected
            .reshape((batch, tokens, self.num_heads, self.head_size))?
            .transpose(1, 2)?
            .contiguous()
    }

    fn forward(
        &self,
        hidden: &Tensor,
        mask: &Tensor,
        ranks: &mut dyn RankSum,
    ) -> Result<Tensor, ModelError> {
        let query = self.by_head(&self.query.forward(hidden)?)?;
        let key = self.by_head(&self.key.forward(hidden)?)?;
        let value = self.by_head(&self.value.forward(hidden)?)?;
        let scale = 1.0 / (self.head_size as f64).sqrt();
        let scores = (query.matmul(&key.t()?)? * scale)?.broadcast_add(mask)?;
        let context = candle_nn::ops::softmax_last_dim(&scores)?
            .matmul(&value)?
            .transpose(1, 2)?
            .flatten_from(D::Minus2)?;
        let output = self.output.forward(&context, ranks)?;
        Ok(self.norm.forward(&(output + hidden)?)?)
    }
}

/// The MLP with this rank's intermediate columns.
#[derive(Debug)]
struct Mlp {
    intermediate: Linear,
    output: RowParallel,
    norm: LayerNorm,
}

impl Mlp {
    fn load(weights: &Weights<'_>, config: &Config, owned: &Owned) -> Result<Self, ModelError> {
        let output = weights.below("output");
        Ok(Self {
            intermediate: weights
                .below("intermediate.dense")
                .column_parallel(&owned.columns)?,
            output: output.below("dense").row_parallel(&owned.columns)?,
            norm: output
                .below("LayerNorm")
                .layer_norm(config.layer_norm_eps)?,
        })
    }

    fn forward(&self, hidden: &Tensor, ranks: &mut dyn RankSum) -> Result<Tensor, ModelError> {
        let intermediate = self.intermediate.forward(hidden)?.gelu_erf()?;
        let output = self.output.forward(&intermediate, ranks)?;
        Ok(self.norm.forward(&(output + hidden)?)?)
    }
}

/// One rank's part of the model.
#[derive(Debug)]
pub(crate) struct Bert {
    words: Tensor,
    positions: Tensor,
    /// The first segment's vector: there is only one segment.
    segment: Tensor,
    norm: LayerNorm,
    layers: Vec<(Attention, Mlp)>,
}

impl Bert {
    /// Reads this rank's weights. Embeddings, layer norms and the biases of row-parallel layers are whole
    /// on every rank.
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        config: &Config,
        shard: Shard,
    ) -> Result<Self, ModelError> {
        let owned = config.owned(shard)?;
        let root = Weights {
            checkpoint,
            prefix: String::new(),
        };
        let embeddings = root.below("embeddings");
        let layers = (0..config.num_hidden_layers)
            .map(|layer| {
                let weights = root.below(&format!("encoder.layer.{layer}"));
                Ok((
                    Attention::load(&weights.below("attention"), config, &owned)?,
                    Mlp::load(&weights, config, &owned)?,
                ))
            })
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            words: embeddings.read("word_embeddings.weight", &Cut::Whole)?,
            positions: embeddings.read("position_embeddings.weight", &Cut::Whole)?,
            segment: embeddings.read("token_type_embeddings.weight", &Cut::Rows(0..1))?,
            norm: embeddings
                .below("LayerNorm")
                .layer_norm(config.layer_norm_eps)?,
            layers,
        })
    }

    /// The last hidden state, (batch, tokens, hidden_size), the same bits on every rank.
    pub(crate) fn forward(
        &self,
        batch: &Batch,
        ranks: &mut dyn RankSum,
    ) -> Result<Tensor, ModelError> {
        let token_ids = batch.token_ids(&Device::Cpu)?;
        let (num_sentences, num_tokens) = token_ids.dims2()?;
        let words = self.words.index_select(&token_ids.flatten_all()?, 0)?;
        let positions = self.positions.narrow(0, 0, num_tokens)?;
        let mut hidden = words
            .reshape((num_sentences, num_tokens, ()))?
            .broadcast_add(&positions)?
            .broadcast_add(&self.segment)?;
        hidden = self.norm.forward(&hidden)?;
        let mask = additive_mask(&batch.mask(&Device::Cpu)?)?;
        for (attention, mlp) in &self.layers {
            hidden = attention.forward(&hidden, &mask, ranks)?;
            hidden = mlp.forward(&hidden, ranks)?;
        }
        Ok(hidden)
    }
}

/// (batch, tokens) of ones and zeros -> (batch, 1, 1, tokens) of zeros and minus infinities, to be added
/// to the scores: no token attends to padding. Each sentence has at least one token.
fn additive_mask(mask: &Tensor) -> candle_core::Result<Tensor> {
    let is_token = mask.unsqueeze(1)?.unsqueeze(1)?;
    let zero = is_token.zeros_like()?;
    let masked = (is_token.ones_like()? * f64::NEG_INFINITY)?;
    is_token
        .to_dtype(candle_core::DType::U8)?
        .where_cond(&zero, &masked)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn padding_is_masked() {
        let mask = Tensor::new(&[[1.0_f32, 1.0, 0.0], [1.0, 0.0, 0.0]], &Device::Cpu).unwrap();
        let additive = additive_mask(&mask).unwrap();
        assert_eq!(additive.dims(), [2, 1, 1, 3]);
        let none = f32::NEG_INFINITY;
        assert_eq!(
            additive.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            [0.0, 0.0, none, 0.0, none, none]
        );
    }

    fn config(json: &str) -> Config {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn other_models_are_refused() {
        let shard = Shard {
            rank: 1,
            world_size: 3,
        };
        let good = r#"{"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536,
            "num_hidden_layers": 6, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}"#;
        let owned = config(good).owned(shard).unwrap();
        assert_eq!((owned.heads, owned.columns), (4..8, 512..1024));
        for (from, to) in [
            ("\"gelu\"", "\"relu\""),
            (": 12", ": 7"),
            (": 12", ": 16"),
            (": 12", ": 0"),
            (": 1536", ": 1537"),
        ] {
            assert!(
                config(&good.replace(from, to)).owned(shard).is_err(),
                "{from} -> {to}"
            );
        }
    }
}
