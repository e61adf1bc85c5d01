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
mod health;
mod lines;
mod listen;
mod log;
mod plan;
pub mod private;
mod probe;
mod random;
mod rpc;
mod spread;
mod status;
mod supervisor;
#[allow(dead_code, unused_imports)]
// load, presets and costs: the executor and explain are to use them
mod topology;
mod wire;
mod workload;
