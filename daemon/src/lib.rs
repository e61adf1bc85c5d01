//! The daemon of allreduced: supervisor, executors and command line in one binary.
//!
//! Arrows: `cli` -> {`supervisor`, `executor`, `demo`, `bench`, `probe`, `status`}; `rpc` -> `executor::task` ->
//! `communicator` -> `plan`; `executor::task` -> `backend`. Never back, and no tonic type below `rpc`.

mod backend;
mod bench;
mod children;
pub mod cli;
mod communicator;
pub mod config;
mod demo;
mod device;
mod executor;
mod explain;
mod files;
mod health;
mod lines;
mod listen;
mod log;
#[doc(hidden)]
pub mod measure;
mod plan;
pub mod private;
mod probe;
mod random;
mod rpc;
mod simulate;
mod slots;
mod spread;
mod status;
mod supervisor;
mod svg;
mod topology;
mod tune;
mod wire;
mod workload;
