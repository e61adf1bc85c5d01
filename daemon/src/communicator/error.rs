//! What a communicator answers when it does not do what was asked, one enum for each operation.
//!
//! Owns the causes and their words. Refuses to know gRPC: `rpc::status` maps these, in one place.

use crate::communicator::rendezvous::Signature;
use crate::plan::Refusal;
use allreduce_contract::cuda::{CudaError, Unavailable};
use allreduce_contract::memory::MemoryError;
use allreduce_contract::{Backend, BadRank, Rank, WorldSize};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Why a rank may not join.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JoinError {
    #[error("the token is not this executor's: call Control.Open again")]
    BadToken,
    #[error("the client was built for window layout {client}, this executor speaks {executor}")]
    Abi { client: u32, executor: u32 },
    #[error("the communicator has world_size {actual}, the rank expects {expected}")]
    WorldSizeDiffers { expected: u32, actual: WorldSize },
    #[error(transparent)]
    BadRank(#[from] BadRank),
    #[error("rank {0} is already joined in this epoch")]
    RankTaken(Rank),
    #[error("lanes: {0}")]
    BadLane(allreduce_contract::v1::BadEnum),
    #[error(
        "arena_len_bytes {asked} is above the configured limit {limit} ({key}.max_arena_len_bytes)"
    )]
    ArenaLimit {
        asked: u64,
        limit: u64,
        key: &'static str,
    },
    #[error("the window of rank {rank}: {source}")]
    Memory { rank: Rank, source: MemoryError },
    #[error("the GPU window of rank {rank}: {source}")]
    Gpu { rank: Rank, source: GpuError },
    #[error("no number for the session: {0}")]
    NoSession(std::io::Error),
    #[error("the executor is draining and takes no new ranks")]
    Draining,
}

/// What a GPU does not do.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum GpuError {
    #[error("no CUDA in the executor: {0}")]
    Unavailable(Unavailable),
    #[error(
        "device {uuid:?} is not visible to the daemon, which sees {}: check CUDA_VISIBLE_DEVICES and the container's devices",
        if visible.is_empty() { "none".to_owned() } else { visible.join(", ") }
    )]
    UnknownDevice { uuid: String, visible: Vec<String> },
    #[error("not enough GPU memory: {needed} bytes needed, {available} available")]
    NoMemory { needed: u64, available: u64 },
    #[error("no kernels for this GPU: {0}")]
    NoKernels(String),
    #[error(transparent)]
    Memory(#[from] Arc<MemoryError>),
    #[error("{0} is not mapped")]
    NotMapped(String),
    #[error("{what}: {error}")]
    Call { what: String, error: CudaError },
}

/// Why a buffer is not made or given back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BufferError {
    #[error("there is no session {0}: it ended, or the executor was restarted")]
    UnknownSession(u64),
    #[error("session {session} has no buffer {buffer_id}")]
    UnknownBuffer { session: u64, buffer_id: u64 },
    #[error("session {session} has handed over no memory {handle}")]
    UnknownMemory { session: u64, handle: u64 },
    #[error(
        "{len_bytes} bytes from offset {offset_bytes} leave the memory, which has {memory_len_bytes}"
    )]
    OutOfBounds {
        offset_bytes: u64,
        len_bytes: u64,
        memory_len_bytes: u64,
    },
    #[error("offset_bytes {0} is not a multiple of {REGISTER_ALIGN_BYTES}")]
    Misaligned(u64),
    #[error(
        "the arena has no gap of {needed} bytes, its largest has {available}: release buffers, or join with a larger arena_len_bytes"
    )]
    ArenaFull { needed: u64, available: u64 },
    #[error("the session holds {limit} {what}, which is the limit")]
    Limit { what: &'static str, limit: u64 },
    #[error(
        "the GPU memory cannot be mapped: {0}; it must be a plain cuMemAlloc (cudaMalloc) allocation of the rank's device, still allocated, of another process than the executor"
    )]
    BadMemory(String),
    #[error("{0}")]
    BadHandle(String),
    #[error("{what} is for backend {needed}, the communicator has backend {backend}")]
    WrongBackend {
        what: &'static str,
        needed: Backend,
        backend: Backend,
    },
    #[error(transparent)]
    EpochEnded(#[from] EpochEnd),
}

/// Where a registered buffer must start: a multiple of this, so that any element type fits.
pub(crate) const REGISTER_ALIGN_BYTES: u64 = 16;

/// Which of the two tensors of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Src,
    Dst,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Src => "src",
            Side::Dst => "dst",
        })
    }
}

/// Why a reduction is not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    // These concern the call alone.
    #[error("there is no session {0}: it ended, or the executor was restarted")]
    UnknownSession(u64),
    #[error("epoch {asked} is not the session's, which is {session}")]
    WrongEpoch { asked: u64, session: u64 },
    #[error("not every rank has joined: {} missing", ranks(missing))]
    NotReady { missing: Vec<Rank> },
    #[error("ranks of lane rpc do not launch: call AllReduce, or join with another lane")]
    NotInLane,
    #[error(
        "sequence {sequence} {why}; the next one this communicator takes is {next}, and at most {window} ahead"
    )]
    BadSequence {
        sequence: u64,
        why: &'static str,
        next: u64,
        window: u64,
    },

    // These consume the sequence number, and every rank gets them.
    #[error("rank {rank}: {field} is missing")]
    Missing { rank: Rank, field: &'static str },
    #[error("rank {rank}: {source}")]
    BadEnum {
        rank: Rank,
        source: allreduce_contract::v1::BadEnum,
    },
    #[error("rank {rank}: {side} names buffer {buffer_id}, which its session has not")]
    UnknownBuffer {
        rank: Rank,
        side: Side,
        buffer_id: u64,
    },
    #[error(
        "rank {rank}: {side} takes {len_bytes} bytes from offset {offset_bytes} of buffer {buffer_id}, which has {buffer_len_bytes}"
    )]
    OutOfBounds {
        rank: Rank,
        side: Side,
        buffer_id: u64,
        offset_bytes: u64,
        len_bytes: u64,
        buffer_len_bytes: u64,
    },
    #[error(
        "rank {rank}: {side}.offset_bytes {offset_bytes} is not a multiple of the element size {elem_bytes}"
    )]
    Misaligned {
        rank: Rank,
        side: Side,
        offset_bytes: u64,
        elem_bytes: u64,
    },
    #[error("rank {rank}: src and dst overlap without being the same range")]
    Overlap { rank: Rank },
    #[error("rank {rank}: its ready word does not hold {ready_value} yet")]
    NotSignalled { rank: Rank, ready_value: u64 },
    #[error("rank {rank}: event.stream {stream} {reason}")]
    BadStream {
        rank: Rank,
        stream: u32,
        reason: &'static str,
    },
    #[error(
        "sequence {sequence}: rank {one} reduces {one_signature}, rank {other} reduces {other_signature}"
    )]
    Mismatch {
        sequence: u64,
        one: Rank,
        one_signature: Signature,
        other: Rank,
        other_signature: Signature,
    },
    #[error(transparent)]
    Plan(#[from] Refusal),

    // These end the epoch.
    /// To who waited when the deadline passed; whoever calls later gets EpochEnded.
    #[error(transparent)]
    Timeout(EpochEnd),
    #[error(transparent)]
    EpochEnded(#[from] EpochEnd),
}

/// An epoch is over: what every later use of its sessions is answered with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("epoch {epoch} is over: {cause}; join again")]
pub(crate) struct EpochEnd {
    pub(crate) epoch: u64,
    pub(crate) cause: EndCause,
}

/// What ended an epoch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EndCause {
    #[error("rank {rank} {how}")]
    RankGone { rank: Rank, how: Gone },
    #[error(
        "{} did not call sequence {sequence} within {} ms",
        ranks(missing),
        timeout.as_millis()
    )]
    Timeout {
        missing: Vec<Rank>,
        sequence: u64,
        timeout: Duration,
    },
    #[error("{} did not join within {} ms", ranks(missing), timeout.as_millis())]
    JoinTimeout {
        missing: Vec<Rank>,
        timeout: Duration,
    },
    /// The test before Ready failed: the epoch never began.
    #[error("the GPUs cannot work together: {reason}")]
    Ineligible { ranks: Vec<Rank>, reason: String },
    /// A rank could not finish a reduction of its own, or the ranks cannot share memory.
    #[error("{reason}")]
    Lane { rank: Option<Rank>, reason: String },
    /// A reduction failed on the GPU, or could not be enqueued.
    #[error("{reason}")]
    Gpu { rank: Option<Rank>, reason: String },
}

impl EndCause {
    /// The rank it is about, if it is about one.
    pub(crate) fn rank(&self) -> Option<Rank> {
        match self {
            EndCause::RankGone { rank, .. } => Some(*rank),
            EndCause::Gpu { rank, .. } | EndCause::Lane { rank, .. } => *rank,
            EndCause::Timeout { missing: ranks, .. }
            | EndCause::JoinTimeout { missing: ranks, .. }
            | EndCause::Ineligible { ranks, .. } => match ranks.as_slice() {
                [rank] => Some(*rank),
                [] | [_, _, ..] => None,
            },
        }
    }

    /// Whether the epoch ended before it was Ready: its ranks' joining fails, nobody needs a notice.
    pub(crate) fn is_of_forming(&self) -> bool {
        match self {
            EndCause::JoinTimeout { .. } | EndCause::Ineligible { .. } => true,
            EndCause::RankGone { .. }
            | EndCause::Timeout { .. }
            | EndCause::Gpu { .. }
            | EndCause::Lane { .. } => false,
        }
    }

    /// Whether nothing went wrong: a rank said that it leaves.
    pub(crate) fn is_orderly(&self) -> bool {
        match self {
            EndCause::RankGone { how, .. } => *how == Gone::Left,
            EndCause::Timeout { .. }
            | EndCause::JoinTimeout { .. }
            | EndCause::Ineligible { .. }
            | EndCause::Gpu { .. }
            | EndCause::Lane { .. } => false,
        }
    }

    /// The ranks it is about.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        match self.rank() {
            Some(rank) => vec![rank],
            None => self.missing().to_vec(),
        }
    }

    /// The ranks that were waited for.
    pub(crate) fn missing(&self) -> &[Rank] {
        match self {
            EndCause::RankGone { .. }
            | EndCause::Ineligible { .. }
            | EndCause::Gpu { .. }
            | EndCause::Lane { .. } => &[],
            EndCause::Timeout { missing, .. } | EndCause::JoinTimeout { missing, .. } => missing,
        }
    }
}

/// How a rank went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// It said Leave.
    Left,
    /// Its connection ended: it exited, crashed or was killed.
    Disconnected,
    /// Its heartbeats stopped.
    Silent,
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gone::Left => "left",
            Gone::Disconnected => "is gone: its connection ended",
            Gone::Silent => "is gone: its heartbeats stopped",
        })
    }
}

/// "rank 1", "ranks 1, 3".
fn ranks(ranks: &[Rank]) -> String {
    let list: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    match list.as_slice() {
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", list.join(", ")),
    }
}
