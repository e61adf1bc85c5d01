//! Backends: where windows live and how a launch runs.
//!
//! The communicator plans; a backend only carries out.

pub(crate) mod cuda;
pub(crate) mod host;
pub(crate) mod host_lanes;
pub(crate) mod host_resident;
pub(crate) mod jobs;

/// A deliberate fault, to test who must notice: flips one bit of one rank's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Fault {
    /// Counts the executor's reductions of at least one element, from 1.
    pub(crate) reduction: u64,
    /// Whose result.
    pub(crate) rank: u32,
    /// Which bit of it.
    pub(crate) bit: u64,
}
