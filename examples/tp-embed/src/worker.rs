//! One rank: a process that owns its part of the model.
//!
//! Owns the life of a rank: load, join, run, leave, report. Called by main in a process of its own. Computes
//! what a serving engine's worker would; everything it needs from its peers goes through
//! [`AllReduce`].

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::folder::{self, FolderError};
use crate::job::{Job, Joined, Report};
use crate::model::{Bert, Config, ModelError};
use crate::pooling;
use crate::rank_sum::{AllReduce, Identity, RankSum};
use allreduce_client::blocking::Client;
use allreduce_client::{BufferError, ConnectError, JoinError, JoinOptions};

/// A rank did not do its job.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerError {
    /// The model's configuration was not read.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The checkpoint was not opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The daemon was not found.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The ranks did not meet.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// No memory for partial outputs.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The model was not built, or did not run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The hidden state was not pooled.
    #[error("pooling: {0}")]
    Pooling(candle_core::Error),
}

/// Does a rank's job.
///
/// # Errors
/// [`WorkerError`].
pub(crate) fn run(job: &Job) -> Result<Report, WorkerError> {
    let shard = job.shard;
    let config: Config = folder::read_config(&job.model)?;
    let owned = config.owned(shard)?;
    let checkpoint = Checkpoint::open(&job.model.join(folder::WEIGHTS))?;
    let model = Bert::load(&checkpoint, &config, shard)?;

    let client = Client::connect(&job.socket)?;
    let options = JoinOptions::new(&job.communicator, shard.rank, shard.world_size);
    let communicator = client.join(options)?;
    let joined = Joined {
        backend: communicator.backend().to_string(),
        lane: communicator.lane().to_string(),
        lane_reason: communicator.lane_reason().to_owned(),
        epoch: communicator.epoch(),
    };
    let longest = job
        .batches
        .iter()
        .map(|batch| batch.num_sentences * batch.num_tokens * config.hidden_size)
        .max()
        .unwrap_or(0);
    let mut all_reduce = AllReduce::new(communicator, longest)?;
    let mut identity = Identity;
    let ranks: &mut dyn RankSum = if job.replace_all_reduce_by_identity {
        &mut identity
    } else {
        &mut all_reduce
    };

    let mut embeddings = Vec::new();
    for batch in &job.batches {
        let hidden = model.forward(batch, ranks)?;
        embeddings.extend(pooling::embed(&hidden, batch).map_err(WorkerError::Pooling)?);
    }
    Ok(Report {
        shard,
        heads: owned.heads,
        columns: owned.columns,
        weights_len_bytes: checkpoint.read_bytes(),
        joined,
        embeddings: embeddings
            .iter()
            .map(|one| one.iter().map(|value| value.to_bits()).collect())
            .collect(),
        measured: all_reduce.leave(),
    })
}
