//! Backends: where windows live and how a launch runs.
//!
//! The communicator plans; a backend only carries out. [`host`] is the one this daemon has.

pub(crate) mod host;
