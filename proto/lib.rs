//! What daemon, client and kernels agree on: the protobuf messages, the vocabulary, the layout of
//! windows, the protocol that passes their file descriptors, and the shape of errors.
//!
//! Owns no state and starts nothing. The daemon and the client call it; it depends on neither.

pub mod companion;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", feature = "kernels"))]
pub mod kernel;
pub mod lane;
pub mod memory;
#[cfg(feature = "cuda")]
pub mod module;
pub mod status;
pub mod transport;
mod types;
pub mod v1;
pub mod window;

use std::path::{Path, PathBuf};

pub use types::{
    Algorithm, Backend, BadCommunicatorId, BadRank, BadWorldSize, CommunicatorId, Dtype, Lane,
    MAX_COMMUNICATOR_NAME_LEN, MAX_WORLD_SIZE, Op, Rank, UnknownName, WorldSize,
};

/// Version of the software, of daemon and client alike.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Largest gRPC message either side accepts, in bytes. No message of the contract comes near it: data
/// travels through windows. A larger one is answered OUT_OF_RANGE and touches no other connection.
pub const MAX_MESSAGE_LEN_BYTES: usize = 64 * 1024;

/// Longest path a Unix socket may have on Linux, in bytes (`sun_path` less its NUL).
pub const MAX_SOCKET_PATH_LEN: usize = 107;

/// The socket when none is named: under /run/allreduced for root, else under XDG_RUNTIME_DIR, else in
/// a directory of the user's under /tmp.
pub fn default_socket() -> PathBuf {
    let uid = nix::unistd::geteuid();
    let dir = if uid.is_root() {
        PathBuf::from("/run/allreduced")
    } else {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) => Path::new(&dir).join("allreduced"),
            None => PathBuf::from(format!("/tmp/allreduced-{uid}")),
        }
    };
    dir.join("allreduced.sock")
}
