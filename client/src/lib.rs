//! The client crate of allreduced: what a worker embeds to reduce tensors with its peers.
//!
//! ```no_run
//! use allreduce_client::{AllReduceError, JoinOptions, Op, blocking::Client};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("/run/allreduced/allreduced.sock")?;
//! // Every rank joins; this returns when all have.
//! let communicator = client.join(JoinOptions::new("tp0", 0, 2))?;
//! let mut tensor = communicator.allocate::<f32>(1024)?;
//! tensor.as_mut_slice().fill(1.0);
//! // In place; the buffer comes back when the result is in it.
//! let tensor = communicator.all_reduce(tensor, Op::Sum)?;
//! assert_eq!(tensor.as_slice()[0], 2.0);
//! // A failed reduction gives the buffer back too; who does not want it takes the error alone.
//! let tensor = communicator
//!     .all_reduce(tensor, Op::Max)
//!     .map_err(AllReduceError::from)?;
//! # Ok(())
//! # }
//! ```
//!
//! There are two fronts over one core: [`Client`] for async code on tokio, [`blocking::Client`] for the
//! rest (and for the lowest latency: it drives its connection on the calling thread).
//!
//! Membership is a connection of its own, kept by a thread of this crate, so that a worker busy
//! computing stays a member. When an epoch ends (a rank died, left, or did not call in time) every call
//! answers a typed error; [`Client::join`] again forms the next one, redialling the daemon and its
//! executors as needed.
//!
//! With feature `cuda`, tensors may be in GPU memory and reductions in the order of a CUDA stream: module
//! `cuda`. Nothing of CUDA is needed to build it; the driver is looked for when a rank brings a GPU.

mod attach;
pub mod blocking;
mod buffer;
mod client;
mod communicator;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
mod cuda_lane;
mod error;
mod host_lane;
mod sequence;

pub use allreduce_contract::memory::MemoryError;
pub use allreduce_contract::window::{Abort, AbortReason};
pub use allreduce_contract::{Algorithm, Backend, CommunicatorId, Dtype, Lane, Op};
pub use buffer::{Buffer, Element, Memory};
pub use client::{Client, JoinOptions, default_socket};
pub use communicator::{AllReduceOptions, Communicator, Outcome, Reduction};
pub use error::{
    AllReduceError, BufferError, ConnectError, EpochEnd, Failed, JoinError, Refused, StillRunning,
};
pub use half::{bf16, f16};
