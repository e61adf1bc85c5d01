//! Backend cuda from end to end: workers on streams, the daemon, executors, kernels.
//!
//! Ranks are threads of this process, each with its own communicator; those that die or get stuck are
//! processes. Several share a GPU where there are fewer GPUs than ranks. Without a GPU each test says
//! "skipped: no GPU", but for those of [`without`], which are about that. Nothing is asserted of absolute time.
//! `ALLREDUCED_BIN=… gpu-tests --test-threads=1 --nocapture` runs the executable where there is no cargo; the
//! tests measure memory of the whole device, so they run one at a time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

#[path = "gpu/apart.rs"]
mod apart;
#[path = "gpu/captured.rs"]
mod captured;
#[path = "gpu/conform.rs"]
mod conform;
#[path = "gpu/cuda.rs"]
mod cuda;
#[path = "gpu/death.rs"]
mod death;
#[path = "gpu/eligible.rs"]
mod eligible;
#[path = "gpu/lanes.rs"]
mod lanes;
#[path = "gpu/memory.rs"]
mod memory;
#[path = "gpu/nvrtc.rs"]
mod nvrtc;
#[path = "gpu/observe.rs"]
mod observe;
#[path = "gpu/order.rs"]
mod order;
#[path = "gpu/probe.rs"]
mod probe;
#[path = "gpu/rank.rs"]
mod rank;
#[path = "gpu/raw.rs"]
mod raw;
#[path = "gpu/refuse.rs"]
mod refuse;
#[path = "gpu/soak.rs"]
mod soak;
#[path = "gpu/tax.rs"]
mod tax;
#[path = "gpu/without.rs"]
mod without;
#[path = "gpu/worker.rs"]
mod worker;

#[test]
fn worker_entry() {
    worker::run_if_asked();
}
