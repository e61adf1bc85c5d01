//! What a process of the probe is told, and what it says.
//!
//! Owns the words between `allreduced probe` and its children, which alone touch CUDA: a driver or GPU that hangs costs the
//! child, and what it said before still counts.

use serde::{Deserialize, Serialize};

/// The one line a child is told. GPUs are named by UUID.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Job {
    /// Which GPUs CUDA shows.
    List,
    /// Nothing, for ever: tests that a child which hangs is given up.
    Hang,
    /// One GPU and the memory of another, or its own.
    Pair {
        from: String,
        to: String,
        len_bytes: u64,
        /// After which a kernel that waits ends.
        limit_ms: u64,
    },
    /// Every GPU and the memory of all others, at once.
    All { gpus: Vec<String>, len_bytes: u64 },
}

/// A GPU that CUDA shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Visible {
    pub(super) uuid: String,
    pub(super) product: String,
    /// As sysfs writes it.
    pub(super) bus_id: String,
}

/// One line of a child's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Answer {
    Devices(Vec<Visible>),
    /// Why the one cannot reach the other's memory; none if it can.
    Access(Option<String>),
    WriteGbps(f64),
    ReadGbps(f64),
    /// One way.
    FlagUs(f64),
    /// By GPU.
    WriteAllGbps(Vec<f64>),
    /// By GPU.
    ReadAllGbps(Vec<f64>),
    /// Something was not measured.
    Trouble(String),
    /// Something was copied, and is not what it was.
    Wrong(String),
    /// That was all.
    Done,
}
