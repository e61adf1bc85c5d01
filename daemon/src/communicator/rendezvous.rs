//! The meeting of all ranks' calls under one sequence number.
//!
//! Owns who has called with what, and whether they agree. Called by the communicator, which launches
//! and answers. Refuses to know buffers: ranges come in checked.
//!
//! ```text
//!            first call           all called             reduced
//!   (none) ------------> Waiting ------------> Running ----------> (removed, all answered)
//!                           |
//!                           | a call that is wrong, or disagrees
//!                           v
//!                         Failed: who called is answered; who calls late is answered the same
//! ```

use crate::communicator::error::CallError;
use allreduce_contract::{Algorithm, Dtype, Op, Rank, WorldSize};
use std::fmt;
use std::time::{Duration, Instant};

/// What all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    pub(crate) num_elems: u64,
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
    /// The one that is asked for, if one is.
    pub(crate) algorithm: Option<Algorithm>,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            num_elems,
            dtype,
            op,
            algorithm,
        } = self;
        write!(f, "{num_elems} x {dtype} {op}")?;
        algorithm.map_or(Ok(()), |algorithm| write!(f, " by {algorithm}"))
    }
}

/// A tensor's place, checked: in a session's memory, inside a buffer, aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// 0: the arena; else the handle of a memory that was handed over.
    pub(crate) memory: u64,
    /// Offset in that memory.
    pub(crate) offset_bytes: u64,
    /// The buffer it is in.
    pub(crate) buffer_id: u64,
}

/// One rank's call, in a rendezvous. `T` is where its answer goes.
#[derive(Debug)]
pub(crate) struct Arrival<T> {
    pub(crate) rank: Rank,
    pub(crate) session: u64,
    pub(crate) sequence: u64,
    pub(crate) reply_to: T,
    pub(crate) signature: Signature,
    pub(crate) src: Place,
    pub(crate) dst: Place,
    pub(crate) ticket: Option<Ticket>,
    pub(crate) at: Instant,
    pub(crate) timeout: Duration,
}

/// The stream of a rank whose flags fence a call on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// Below `window::MAX_STREAMS`.
    pub(crate) stream: u32,
    /// Of the flags.
    pub(crate) value: u32,
    /// Whether the ready flag is written; else everything before the call on the stream is done.
    pub(crate) wait_ready: bool,
}

/// Where a rendezvous is.
#[derive(Debug)]
pub(crate) enum Stage<T> {
    /// Ranks are missing, or earlier sequences run.
    Waiting { arrivals: Vec<Arrival<T>> },
    /// All called and agreed; the backend reduces.
    Running { arrivals: Vec<Arrival<T>> },
    /// It will not run. `answered`: by rank, who has been told.
    Failed {
        error: CallError,
        answered: Vec<Rank>,
    },
}

/// A meeting.
#[derive(Debug)]
pub(crate) struct Rendezvous<T> {
    pub(crate) stage: Stage<T>,
}

impl<T> Default for Rendezvous<T> {
    fn default() -> Self {
        Self {
            stage: Stage::Waiting {
                arrivals: Vec::new(),
            },
        }
    }
}

impl<T> Rendezvous<T> {
    /// Whether `rank` has called.
    pub(crate) fn has(&self, rank: Rank) -> bool {
        match &self.stage {
            Stage::Waiting { arrivals } | Stage::Running { arrivals } => {
                arrivals.iter().any(|arrival| arrival.rank == rank)
            }
            Stage::Failed { answered, .. } => answered.contains(&rank),
        }
    }

    /// The ranks that have not called; empty unless Waiting.
    pub(crate) fn missing(&self, world_size: WorldSize) -> Vec<Rank> {
        match &self.stage {
            Stage::Waiting { .. } => world_size.ranks().filter(|rank| !self.has(*rank)).collect(),
            Stage::Running { .. } | Stage::Failed { .. } => Vec::new(),
        }
    }

    /// Whether it waits only for its turn.
    pub(crate) fn is_complete(&self, world_size: WorldSize) -> bool {
        match &self.stage {
            Stage::Waiting { arrivals } => arrivals.len() == world_size.as_usize(),
            Stage::Running { .. } | Stage::Failed { .. } => false,
        }
    }

    /// The earliest deadline of those who wait, with the timeout it came from.
    pub(crate) fn deadline(&self) -> Option<(Instant, Duration)> {
        match &self.stage {
            Stage::Waiting { arrivals } => arrivals
                .iter()
                .map(|arrival| (arrival.at + arrival.timeout, arrival.timeout))
                .min(),
            Stage::Running { .. } | Stage::Failed { .. } => None,
        }
    }

    /// Whether `signature` agrees with who called first.
    pub(crate) fn agrees(
        &self,
        sequence: u64,
        rank: Rank,
        signature: Signature,
    ) -> Result<(), CallError> {
        let first = match &self.stage {
            Stage::Waiting { arrivals } => arrivals.first(),
            Stage::Running { .. } | Stage::Failed { .. } => None,
        };
        match first {
            Some(first) if first.signature != signature => Err(CallError::Mismatch {
                sequence,
                one: first.rank,
                one_signature: first.signature,
                other: rank,
                other_signature: signature,
            }),
            Some(_) | None => Ok(()),
        }
    }
}
