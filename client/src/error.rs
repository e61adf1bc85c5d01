//! What can go wrong, one enum for each operation.
//!
//! Owns the reading of a gRPC status into something to match on. Nothing here parses messages: kinds
//! come from the status's `ErrorDetail`.

#[cfg(feature = "cuda")]
use crate::cuda::{CudaError, DeviceError, NotShareable};
use allreduce_contract::Backend;
use allreduce_contract::status::detail_of;
use allreduce_contract::v1::{ErrorCode, ErrorDetail};
use allreduce_contract::window::Abort;
#[cfg(feature = "cuda")]
use allreduce_contract::{Dtype, Op};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The daemon or an executor refused, with its words and its typed reason.
#[derive(Debug, Clone)]
pub struct Refused {
    /// The gRPC status code.
    pub code: tonic::Code,
    /// The kind of error; `Unspecified` if the peer sent none.
    pub kind: ErrorCode,
    /// The peer's words.
    pub message: String,
    /// Ranks, epoch and amounts.
    pub detail: ErrorDetail,
}

impl Refused {
    pub(crate) fn new(status: &tonic::Status) -> Self {
        let detail = detail_of(status).unwrap_or_default();
        Self {
            code: status.code(),
            kind: detail.code(),
            message: status.message().to_owned(),
            detail,
        }
    }

    /// Whether the peer could not be reached or is going away, so that trying again may help.
    pub(crate) fn is_transient(&self) -> bool {
        self.code == tonic::Code::Unavailable || self.kind == ErrorCode::BadToken
    }

    /// Whether the session is gone, or the executor is about to be.
    fn is_epoch_over(&self) -> bool {
        matches!(
            self.kind,
            ErrorCode::EpochEnded | ErrorCode::UnknownSession | ErrorCode::Unavailable
        )
    }

    /// Whether the answer came from the transport instead of from the peer, whose own errors say their
    /// kind. A method or a message that tonic refuses on the peer's side was answered all the same.
    pub(crate) fn is_transport(&self) -> bool {
        self.kind == ErrorCode::Unspecified
            && !matches!(
                self.code,
                tonic::Code::Unimplemented | tonic::Code::OutOfRange
            )
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

impl std::error::Error for Refused {}

/// The daemon cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error("no daemon answers on {}: {reason}", socket.display())]
pub struct ConnectError {
    /// The socket that was dialled.
    pub socket: PathBuf,
    /// Why.
    pub reason: String,
}

/// A rank did not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The daemon or the executor said no.
    #[error("{0}")]
    Refused(Refused),
    /// Not every rank joined in time.
    #[error("not every rank joined in time: {message}")]
    Timeout {
        /// The ranks that were missing, if the executor said so.
        missing_ranks: Vec<u32>,
        /// What was waited for.
        message: String,
    },
    /// The daemon could not be reached until the deadline.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The executor's memory could not be mapped.
    #[error("the window could not be mapped: {0}")]
    Window(String),
    /// The epoch ended before it was ready.
    #[error("{0}")]
    EpochEnded(EpochEnd),
    /// A thread or runtime could not be made.
    #[error("cannot start the client's thread: {0}")]
    Thread(std::io::Error),
    /// The communicator is on backend cuda, and this rank brings no GPU; what to do.
    #[error("the communicator is on backend cuda: {0}")]
    NoGpu(&'static str),
    /// The GPU cannot be used.
    #[cfg(feature = "cuda")]
    #[error("backend cuda is not available: {0}")]
    Cuda(#[from] DeviceError),
}

/// An epoch is over. Join again to form the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochEnd {
    /// The epoch.
    pub epoch: u64,
    /// The rank that ended it, if it was one.
    pub rank: Option<u32>,
    /// The executor's words.
    pub message: String,
}

impl fmt::Display for EpochEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

/// A buffer was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// The executor said no: arena full, too many buffers, epoch over.
    #[error("{0}")]
    Refused(Refused),
    /// The executor died or cannot be reached; join again.
    #[error("the executor is gone: {0}; join again")]
    ExecutorLost(String),
    /// The length in bytes does not fit.
    #[error("{num_elems} elements of {elem_bytes} bytes are more than fit an address space")]
    TooLarge {
        /// Elements asked for.
        num_elems: usize,
        /// Bytes of one.
        elem_bytes: usize,
    },
    /// The answer does not fit the window: a defect of the executor.
    #[error("the executor answered a buffer outside the window: {0}")]
    Window(String),
    /// Buffers of this kind are not to be had on the communicator's backend. Nothing was sent.
    #[error("the communicator is on backend {}, which has no such buffers", .0.name())]
    WrongBackend(Backend),
    /// The buffer belongs to another communicator.
    #[error("the buffer belongs to another communicator, or to an earlier epoch")]
    ForeignBuffer,
    /// Other processes cannot map the memory. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    NotShareable(#[from] NotShareable),
    /// The allocation overlaps a buffer of this communicator. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error(
        "the allocation at {start:#x} ({len_bytes} bytes) is registered already: it overlaps buffer {buffer_id}"
    )]
    Registered {
        /// Where the allocation starts.
        start: u64,
        /// Its length.
        len_bytes: u64,
        /// The buffer's id.
        buffer_id: u64,
    },
    /// CUDA failed. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A thread could not be made. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("the client's thread: {0}")]
    Thread(String),
}

impl BufferError {
    /// Whether joining again is what to do.
    pub fn is_epoch_over(&self) -> bool {
        match self {
            Self::ExecutorLost(_) => true,
            Self::Refused(refused) => refused.is_epoch_over(),
            Self::TooLarge { .. }
            | Self::Window(_)
            | Self::WrongBackend(_)
            | Self::ForeignBuffer => false,
            #[cfg(feature = "cuda")]
            Self::NotShareable(_) | Self::Registered { .. } | Self::Cuda(_) | Self::Thread(_) => {
                false
            }
        }
    }
}

/// A reduction did not happen.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AllReduceError {
    /// Ranks did not call in time; the epoch is over.
    #[error("{message}")]
    Timeout {
        /// The ranks that did not call.
        missing_ranks: Vec<u32>,
        /// The executor's words.
        message: String,
    },
    /// The epoch is over: a rank died, left or timed out.
    #[error("{0}")]
    EpochEnded(EpochEnd),
    /// The ranks disagree on count, dtype or op; the sequence number is used up, the epoch goes on.
    #[error("{0}")]
    Mismatch(Refused),
    /// Another refusal; the sequence number is used up unless the message says otherwise.
    #[error("{0}")]
    Refused(Refused),
    /// The executor died or does not answer; join again.
    #[error("the executor is gone: {0}; join again")]
    ExecutorLost(String),
    /// A buffer belongs to another communicator. Nothing was sent.
    #[error("the buffer belongs to another communicator, or to an earlier epoch")]
    ForeignBuffer,
    /// The range leaves the buffer. Nothing was sent.
    #[error("elements {start}..{end} leave the buffer, which has {num_elems}")]
    OutOfRange {
        /// First element.
        start: usize,
        /// End of the elements.
        end: usize,
        /// Elements in the buffer.
        num_elems: usize,
    },
    /// A reduction failed on the GPU, perhaps one of an earlier call; destinations since hold NaN. The epoch
    /// is over.
    #[error("{0}")]
    Device(Abort),
    /// Reductions of this kind are not to be had on the communicator's backend. Nothing was sent.
    #[error("the communicator is on backend {}, which has no such reductions", .0.name())]
    WrongBackend(Backend),
    /// The stream is being captured into a graph. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error(
        "the stream is being captured, which lane rpc cannot be: join with lane delegated, or reduce outside of the graph"
    )]
    Capturing,
    /// A tensor's address is not a multiple of its element's size. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("{pointer:#x} is not aligned to the element's {elem_bytes} bytes")]
    Misaligned {
        /// Where the tensor starts.
        pointer: u64,
        /// Bytes of an element.
        elem_bytes: usize,
    },
    /// Source and destination share bytes without being the same. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("the {len_bytes} bytes at {src:#x} and at {dst:#x} overlap: reduce in place, or apart")]
    Overlap {
        /// Where the source starts.
        src: u64,
        /// Where the destination starts.
        dst: u64,
        /// Length of each.
        len_bytes: u64,
    },
    /// There is no kernel for this. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("the GPU kernels have no {op} of {dtype}")]
    NoKernel {
        /// The element type.
        dtype: Dtype,
        /// The operator.
        op: Op,
    },
    /// The executor's plan cannot be launched here. Nothing was.
    #[cfg(feature = "cuda")]
    #[error("not launched: {0}")]
    NotLaunched(String),
    /// The stream stands for another one in each thread. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("the per-thread default stream cannot be used: name a stream of its own")]
    PerThreadStream,
    /// The tensor is not inside one buffer of this communicator. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error(
        "{len_bytes} bytes at {pointer:#x} are not inside one buffer of this communicator: allocate or register it"
    )]
    NotABuffer {
        /// Where the tensor starts.
        pointer: u64,
        /// Its length.
        len_bytes: u64,
    },
    /// [`AllReduceOptions::range`](crate::AllReduceOptions) does not go with pointers. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("a reduction on a stream takes pointers: AllReduceOptions::range does not apply")]
    RangeGiven,
    /// More streams are in use than can have flags. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("64 streams are in use: close_stream those that are not needed any more")]
    TooManyStreams,
    /// The GPU is not done with as many reductions as may be enqueued. Nothing was sent.
    #[cfg(feature = "cuda")]
    #[error("the last {queued} reductions were not done after {waited_ms} ms")]
    QueueFull {
        /// Reductions that may be enqueued.
        queued: u64,
        /// How long the call waited.
        waited_ms: u64,
    },
    /// CUDA failed before anything was sent.
    #[cfg(feature = "cuda")]
    #[error("{0}")]
    Cuda(CudaError),
    /// The reduction is enqueued, but the stream could not be made to wait for it: its destination is in use
    /// until [`Communicator::wait_settled`](crate::Communicator::wait_settled) says otherwise.
    #[cfg(feature = "cuda")]
    #[error("the reduction is enqueued, but the stream does not wait for it: {0}")]
    NotOrdered(CudaError),
}

impl AllReduceError {
    pub(crate) fn from_refused(refused: Refused) -> Self {
        match refused.kind {
            ErrorCode::Timeout => Self::Timeout {
                missing_ranks: refused.detail.missing_ranks,
                message: refused.message,
            },
            ErrorCode::EpochEnded => Self::EpochEnded(EpochEnd {
                epoch: refused.detail.epoch,
                rank: refused.detail.rank,
                message: refused.message,
            }),
            ErrorCode::Mismatch => Self::Mismatch(refused),
            _ if refused.is_transport() => Self::ExecutorLost(connection_ended(&refused)),
            _ => Self::Refused(refused),
        }
    }

    /// Whether joining again is what to do.
    pub fn is_epoch_over(&self) -> bool {
        match self {
            Self::Timeout { .. }
            | Self::EpochEnded(_)
            | Self::ExecutorLost(_)
            | Self::Device(_) => true,
            Self::Refused(refused) => refused.is_epoch_over(),
            Self::Mismatch(_)
            | Self::ForeignBuffer
            | Self::OutOfRange { .. }
            | Self::WrongBackend(_) => false,
            #[cfg(feature = "cuda")]
            Self::Capturing
            | Self::Misaligned { .. }
            | Self::Overlap { .. }
            | Self::NoKernel { .. }
            | Self::NotLaunched(_)
            | Self::PerThreadStream
            | Self::NotABuffer { .. }
            | Self::RangeGiven
            | Self::TooManyStreams
            | Self::QueueFull { .. }
            | Self::Cuda(_)
            | Self::NotOrdered(_) => false,
        }
    }
}

/// The words for a connection that broke: the transport's own, which differ with the moment, follow.
pub(crate) fn connection_ended(refused: &Refused) -> String {
    format!("the connection to it ended ({})", refused.message)
}

/// A reduction that did not happen, with the buffers that were given to it.
#[derive(Debug)]
pub struct Failed<B> {
    /// What went wrong.
    pub error: AllReduceError,
    /// The buffers: unchanged, but for the destination of a reduction that lane delegated had begun when the epoch ended;
    /// none after [`AllReduceError::ExecutorLost`] of a call that was sent, since the
    /// executor may still work on them.
    pub buffers: Option<B>,
}

impl<B> fmt::Display for Failed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B: fmt::Debug> std::error::Error for Failed<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<B> From<Box<Failed<B>>> for AllReduceError {
    fn from(failed: Box<Failed<B>>) -> Self {
        failed.error
    }
}

/// The executor may still touch buffers of this communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the executor was not done with every reduction after {} ms", .0.as_millis())]
pub struct StillRunning(pub Duration);
