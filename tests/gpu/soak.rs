//! Many hand-offs: nothing grows.

use crate::cuda::free_bytes;
use crate::harness::bits::expected;
use crate::harness::raw::executor_pid;
use crate::harness::{daemon, open_fds, rss_bytes};
use crate::rank::{Rank, gpus, join_all, on_each, reduce_well};
use allreduce_client::{AllReduceOptions, Dtype, Op};
use std::time::Instant;

const WARM_UP: usize = 5_000;
const HAND_OFFS: usize = 50_000;
/// What resident memory may move by.
const RSS_NOISE_BYTES: u64 = 4 << 20;
/// What free memory of the device may move by.
const NOISE_BYTES: u64 = 16 << 20;

/// What is held.
#[derive(Debug, Clone, Copy)]
struct Held {
    executor_rss_bytes: u64,
    executor_fds: usize,
    fds: usize,
    free_bytes: u64,
}

/// Each hand-off leaves flags to write and to wait for, a sequence number and a row of statistics. Broken by any of
/// them that stays: then something grows with the calls.
#[test]
fn many_hand_offs_take_no_memory() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "soak", 2, &devices);
    let executor = executor_pid(daemon.socket(), "soak");
    let kind = (Dtype::Bf16, Op::Sum);
    let (tensors, sum) = expected(kind.0, kind.1, 512, 5, 2);
    let hand_offs = |rank: &Rank, count: usize| {
        let src = rank.scratch.ptr();
        let dst = src + 4096;
        rank.upload(
            rank.stream(),
            src,
            &tensors[rank.communicator.rank() as usize],
        );
        for _ in 0..count {
            let options = AllReduceOptions::default();
            rank.fill(rank.stream(), dst, 0, sum.len());
            rank.call(rank.stream(), [src, dst], 512, kind, options)
                .unwrap();
        }
        let result = rank.download(rank.stream(), dst, sum.len());
        rank.communicator.check().unwrap();
        assert!(
            result == sum,
            "rank {}: a wrong sum",
            rank.communicator.rank()
        );
    };
    let held = || Held {
        executor_rss_bytes: rss_bytes(executor),
        executor_fds: open_fds(executor),
        fds: open_fds(std::process::id()),
        free_bytes: free_bytes(&joined[0].context),
    };
    on_each(&joined, |rank| hand_offs(rank, WARM_UP));
    let before = held();
    let started = Instant::now();
    // In parts, each of which is checked.
    for _ in 0..10 {
        on_each(&joined, |rank| hand_offs(rank, HAND_OFFS / 10));
    }
    println!(
        "{HAND_OFFS} hand-offs of 1 KiB in {:.1} s",
        started.elapsed().as_secs_f32()
    );
    let after = held();
    println!("before: {before:?}\nafter:  {after:?}");
    assert!(after.executor_rss_bytes <= before.executor_rss_bytes + RSS_NOISE_BYTES);
    assert!(after.executor_fds <= before.executor_fds);
    assert!(after.fds <= before.fds);
    assert!(after.free_bytes + NOISE_BYTES >= before.free_bytes);
    assert_eq!(executor_pid(daemon.socket(), "soak"), executor);
    reduce_well(&joined);
}
