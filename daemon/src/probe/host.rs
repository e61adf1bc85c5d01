//! What backend host works with: a core that copies, and a flag between two.
//!
//! Owns its threads. Called by `probe`. Refuses to wait for a thread that does not get a processor: all end at a deadline.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;
use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Source and destination that stay in a core's own cache.
const NEAR_LEN_BYTES: usize = 64 << 10;
/// Those that do not.
const FAR_LEN_BYTES: usize = 64 << 20;
/// How long each run takes; the best of several counts, since others use the machine too.
const RUN: Duration = Duration::from_millis(30);
const RUNS: u32 = 5;
/// Round trips of a batch, of which the best counts.
const ROUNDS: u64 = 1000;
/// How long all batches take together.
const FLAG_TIME: Duration = Duration::from_millis(300);

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct HostRates {
    /// One core copies, GB/s, in its cache.
    pub(super) core_copy_gbps: f64,
    /// The same of 64 MiB.
    pub(super) core_copy_far_gbps: f64,
    /// One way between two cores; none with one processor, or if none of the batches came through.
    pub(super) core_flag_us: Option<f64>,
    /// Which two.
    pub(super) cores: Vec<usize>,
}

pub(super) fn measure() -> HostRates {
    let cores = processors();
    let flag = match cores.as_slice() {
        [first, .., last] => flag_us([*first, *last]),
        _ => None,
    };
    HostRates {
        core_copy_gbps: copy_gbps(NEAR_LEN_BYTES),
        core_copy_far_gbps: copy_gbps(FAR_LEN_BYTES),
        core_flag_us: flag,
        cores: match cores.as_slice() {
            [first, .., last] => vec![*first, *last],
            some => some.to_vec(),
        },
    }
}

/// The processors that this process may use.
fn processors() -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(Pid::from_raw(0)) else {
        return Vec::new();
    };
    (0..CpuSet::count())
        .filter(|number| allowed.is_set(*number).unwrap_or(false))
        .collect()
}

/// Keeps this thread on one processor. One that is refused runs where it may.
fn pin(processor: usize) {
    let mut only = CpuSet::new();
    if only.set(processor).is_ok() {
        let _ = sched_setaffinity(Pid::from_raw(0), &only);
    }
}

fn copy_gbps(len_bytes: usize) -> f64 {
    let source = vec![0x5a_u8; len_bytes];
    let mut target = vec![0_u8; len_bytes];
    let mut best = 0.0_f64;
    for _ in 0..RUNS {
        let begin = Instant::now();
        let mut bytes = 0_u64;
        while begin.elapsed() < RUN {
            // Some between two looks at the clock.
            for _ in 0..(1_usize << 20).div_ceil(len_bytes) {
                black_box(&mut target).copy_from_slice(black_box(&source));
                bytes += len_bytes as u64;
            }
        }
        best = best.max(bytes as f64 / begin.elapsed().as_secs_f64() / 1e9);
    }
    black_box(&target);
    best
}

/// A word on cache lines of its own (two, since processors fetch them in twos).
#[repr(align(128))]
#[derive(Default)]
struct Word(AtomicU64);

#[derive(Default)]
struct Flags {
    ask: Word,
    answer: Word,
    is_over: AtomicBool,
}

fn flag_us(cores: [usize; 2]) -> Option<f64> {
    let [near, far] = cores;
    let flags = Arc::new(Flags::default());
    let peer = Arc::clone(&flags);
    let answering = std::thread::spawn(move || {
        pin(far);
        let mut seen = 0;
        // SYNC: probe-core. Relaxed: the number is all there is to see.
        while !peer.is_over.load(Ordering::Relaxed) {
            let asked = peer.ask.0.load(Ordering::Relaxed);
            if asked == seen {
                spin_loop();
            } else {
                seen = asked;
                peer.answer.0.store(asked, Ordering::Relaxed);
            }
        }
    });
    let asking = std::thread::spawn(move || {
        pin(near);
        let begin = Instant::now();
        let mut number = 0;
        let mut best: Option<Duration> = None;
        'batches: while begin.elapsed() < FLAG_TIME {
            let start = Instant::now();
            for _ in 0..ROUNDS {
                number += 1;
                // SYNC: probe-core.
                flags.ask.0.store(number, Ordering::Relaxed);
                let mut polls = 0_u32;
                while flags.answer.0.load(Ordering::Relaxed) != number {
                    spin_loop();
                    polls += 1;
                    if polls.is_multiple_of(4096) && begin.elapsed() > 4 * FLAG_TIME {
                        break 'batches;
                    }
                }
            }
            let took = start.elapsed();
            best = Some(best.map_or(took, |best| best.min(took)));
        }
        flags.is_over.store(true, Ordering::Relaxed);
        best
    });
    // Both end by themselves.
    let best = asking.join().ok().flatten();
    let _ = answering.join();
    best.map(|batch| batch.as_secs_f64() * 1e6 / (2 * ROUNDS) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_measured() {
        let rates = measure();
        assert!(rates.core_copy_gbps > 0.0 && rates.core_copy_far_gbps > 0.0);
        assert_eq!(rates.core_flag_us.is_some(), processors().len() > 1);
        assert!(rates.core_flag_us.is_none_or(|us| us > 0.0));
    }
}
