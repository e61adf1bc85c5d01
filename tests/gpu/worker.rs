//! A rank that is a process, to be killed or to get stuck: what it does when it is told.

use crate::cuda::Gate;
use crate::harness::worker::{asked, describe, say};
use crate::rank::{Rank, gpu_of, options};
use allreduce_client::cuda::devices;
use allreduce_client::{AllReduceOptions, Dtype, Op};
use std::time::Duration;

/// Runs as a worker, and exits, if this process was started as one.
pub fn run_if_asked() {
    let Some(asked) = asked() else {
        return;
    };
    let devices = devices().unwrap();
    let device = gpu_of(&devices, asked.rank);
    let mut joined: Option<Rank> = None;
    let mut gate: Option<Gate> = None;
    for line in asked.told {
        let words: Vec<&str> = line.split(' ').collect();
        match (words.as_slice(), &joined) {
            (["join"], _) => {
                // The old one leaves first.
                drop(joined.take());
                let options = options(&asked.communicator, asked.rank, asked.world_size, device);
                let rank = Rank::join(&asked.socket, options, device);
                say(&format!("joined {}", rank.communicator.epoch()));
                joined = Some(rank);
            }
            (["reduce"], Some(rank)) => match rank.reduce_one() {
                Ok(()) => say("reduced"),
                Err(error) => say(&describe(&error)),
            },
            // Holds the stream up.
            (["close"], Some(rank)) => {
                gate = Some(Gate::close(rank.stream()));
                say("closed");
            }
            (["open"], _) => {
                gate = None;
                say("opened");
            }
            // Calls, and waits for nothing.
            (["call", timeout_ms], Some(rank)) => {
                let timeout = Duration::from_millis(timeout_ms.parse().unwrap());
                let options = AllReduceOptions::default().timeout(timeout);
                let at = rank.scratch.ptr();
                match rank.call(rank.stream(), [at, at], 64, (Dtype::F32, Op::Sum), options) {
                    Ok(_) => say("called"),
                    Err(error) => say(&describe(&error)),
                }
            }
            (["check"], Some(rank)) => match rank.communicator.check() {
                Ok(()) => say("well"),
                Err(error) => say(&describe(&error)),
            },
            // Whether the tensor of "call" is NaN.
            (["nan"], Some(rank)) => {
                let found = rank.download(rank.stream(), rank.scratch.ptr(), 64 * 4);
                let mut values = found.chunks_exact(4);
                let is_nan = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap()).is_nan();
                say(if values.all(is_nan) { "nan" } else { "numbers" });
            }
            (["idle"], Some(rank)) => say(match rank.stream().is_idle() {
                Ok(true) => "idle",
                Ok(false) => "busy",
                Err(_) => "broken",
            }),
            (["leave"], Some(_)) => {
                if let Some(rank) = joined.take() {
                    rank.communicator.leave();
                }
                say("left");
            }
            (other, _) => panic!("{other:?}"),
        }
    }
    drop(gate);
}
