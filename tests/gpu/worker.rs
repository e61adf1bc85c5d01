//! A rank that is a process, to be killed or to get stuck: what it does when it is told.

use crate::captured::Captured;
use crate::cuda::{Cooperative, Gate};
use crate::harness::worker::{asked, describe, say};
use crate::rank::{Rank, gpu_of, options};
use allreduce_client::cuda::devices;
use allreduce_client::{AllReduceOptions, Dtype, Lane, Op};
use allreduce_contract::cuda::{DeviceMemory, Event, relax_capture_mode};
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
    let mut captured: Option<Captured> = None;
    let mut second: Option<Captured> = None;
    let mut cooperative: Option<Cooperative> = None;
    for line in asked.told {
        let words: Vec<&str> = line.split(' ').collect();
        match (words.as_slice(), &joined) {
            (["join", ..], _) => {
                // The old one leaves first.
                drop(joined.take());
                let mut options =
                    options(&asked.communicator, asked.rank, asked.world_size, device);
                if let ["join", lane] = words.as_slice() {
                    options = options.lanes([lane.parse().unwrap()]);
                }
                let rank = Rank::join(&asked.socket, options, device);
                say(&format!("joined {}", rank.communicator.epoch()));
                joined = Some(rank);
            }
            // With these lanes, best first, if they can be had.
            (["join-for", lanes], _) => {
                drop(joined.take());
                let options = options(&asked.communicator, asked.rank, asked.world_size, device);
                let lanes = lanes.split(',').map(|lane| lane.parse().unwrap());
                match Rank::try_join(
                    &asked.socket,
                    options.lanes(lanes.collect::<Vec<Lane>>()),
                    device,
                ) {
                    Ok(rank) => {
                        let communicator = &rank.communicator;
                        let (lane, reason) = (communicator.lane(), communicator.lane_reason());
                        say(&format!("joined {lane} {reason}"));
                        joined = Some(rank);
                    }
                    Err(error) => say(&error.to_string()),
                }
            }
            (["reduce"], Some(rank)) => match rank.reduce_one() {
                Ok(()) => say("reduced"),
                Err(error) => say(&describe(&error)),
            },
            // Lane delegated: a graph.
            (["capture"], Some(rank)) => match Captured::new(rank) {
                Ok(graph) => {
                    captured = Some(graph);
                    say("captured");
                }
                Err(error) => say(&describe(&error)),
            },
            (["capture-second"], Some(rank)) => {
                second = Some(Captured::new(rank).unwrap());
                say("captured");
            }
            // What must not be: on two streams at once. What is in the tensors then, of both.
            (["at-once", "graphs", times], Some(rank)) => {
                let (first, second) = (captured.as_ref().unwrap(), second.as_ref().unwrap());
                for _ in 0..times.parse().unwrap() {
                    first.replay_on(rank, &rank.streams[0], 1);
                    second.replay_on(rank, &rank.streams[1], 1);
                }
                for stream in &rank.streams {
                    stream.synchronize().unwrap();
                }
                say(&format!("{} and {}", first.found(rank), second.found(rank)));
            }
            (["at-once", "calls", times], Some(rank)) => {
                let first = captured.as_ref().unwrap();
                let at = rank.scratch.ptr();
                let [stream, other] = &rank.streams;
                let ones: Vec<u8> = (0..4096).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
                let mut found = "right".to_owned();
                for _ in 0..times.parse().unwrap() {
                    first.replay_on(rank, stream, 3);
                    rank.upload(other, at, &ones);
                    let kind = (Dtype::F32, Op::Sum);
                    let options = AllReduceOptions::default();
                    // Refused, once it has been told.
                    let called = rank.call(other, [at, at], 4096, kind, options);
                    let bytes = rank.download(other, at, ones.len());
                    let sum = (asked.world_size as f32).to_le_bytes();
                    let mut values = bytes.chunks_exact(4);
                    let is_nan =
                        |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap()).is_nan();
                    if called.is_err() || values.clone().all(is_nan) {
                        found = "nan".to_owned();
                    } else if !values.all(|bytes| bytes == sum) {
                        found = "wrong".to_owned();
                        break;
                    }
                }
                stream.synchronize().unwrap();
                say(&format!("{} and {found}", first.found(rank)));
            }
            // One after the other, on two streams: the second waits for an event behind the first.
            (["in-turn", times], Some(rank)) => {
                let (first, second) = (captured.as_ref().unwrap(), second.as_ref().unwrap());
                let event = Event::create(&rank.context).unwrap();
                for _ in 0..times.parse().unwrap() {
                    first.replay_on(rank, &rank.streams[0], 1);
                    rank.order(&event, 0, 1);
                    second.replay_on(rank, &rank.streams[1], 1);
                    rank.order(&event, 1, 0);
                }
                for stream in &rank.streams {
                    stream.synchronize().unwrap();
                }
                say(&format!("{} and {}", first.found(rank), second.found(rank)));
            }
            // As many blocks as an empty GPU holds, which wait for each other.
            (["cooperate"], Some(rank)) => {
                let kernel = cooperative.get_or_insert_with(|| Cooperative::load(&rank.context));
                kernel.launch(&rank.streams[1]);
                say("launched");
            }
            // Waits for it, but not for ever.
            (["cooperated", limit_ms], Some(rank)) => {
                let limit = Duration::from_millis(limit_ms.parse().unwrap());
                let begun = std::time::Instant::now();
                while !rank.streams[1].is_idle().unwrap() && begun.elapsed() < limit {
                    std::thread::sleep(Duration::from_millis(1));
                }
                say(match rank.streams[1].is_idle().unwrap() {
                    true => "completed",
                    false => "waiting",
                });
            }
            // In place, so each call doubles what the one before has left.
            (["two-streams", calls], Some(rank)) => {
                let calls: i32 = calls.parse().unwrap();
                let at = rank.scratch.ptr();
                let first = &rank.streams[0];
                let ones: Vec<u8> = (0..4096).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
                rank.upload(first, at, &ones);
                first.synchronize().unwrap();
                for call in 0..calls {
                    let stream = &rank.streams[usize::from(call % 2 != 0)];
                    let kind = (Dtype::F32, Op::Sum);
                    rank.call(stream, [at, at], 4096, kind, AllReduceOptions::default())
                        .unwrap();
                }
                for stream in &rank.streams {
                    stream.synchronize().unwrap();
                }
                let sum = (asked.world_size as f32).powi(calls);
                let found = rank.download(first, at, 4096 * 4);
                let is_right = |bytes: &[u8]| bytes == sum.to_le_bytes();
                say(match found.chunks(4).all(is_right) {
                    true => "right",
                    false => "wrong",
                });
            }
            // Of ones, whose sum is exact in any order.
            (["reduce-by", algorithm], Some(rank)) => {
                let at = rank.scratch.ptr();
                let ones: Vec<u8> = (0..4099).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
                rank.upload(rank.stream(), at, &ones);
                let options = AllReduceOptions::default().algorithm(algorithm.parse().unwrap());
                let kind = (Dtype::F32, Op::Sum);
                match rank.call(rank.stream(), [at, at], 4099, kind, options) {
                    Ok(reduction) => {
                        assert_eq!(reduction.algorithm.name(), *algorithm);
                        let sum = (asked.world_size as f32).to_le_bytes();
                        let found = rank.download(rank.stream(), at, ones.len());
                        rank.communicator.check().unwrap();
                        say(match found.chunks(4).all(|bytes| bytes == sum) {
                            true => "right",
                            false => "wrong",
                        });
                    }
                    Err(error) => say(&describe(&error)),
                }
            }
            (["arm"], Some(rank)) => {
                rank.communicator.arm().unwrap();
                say("done");
            }
            (["disarm"], Some(rank)) => {
                rank.communicator.disarm().unwrap();
                say("done");
            }
            (["register"], Some(rank)) => {
                let memory = DeviceMemory::allocate(&rank.context, 4 << 20).unwrap();
                rank.register_and_release(memory.start());
                say("done");
            }
            (["join-while-capturing", name, lane], Some(rank)) => {
                let begun = std::sync::Barrier::new(2);
                let other = std::thread::scope(|scope| {
                    let joining = scope.spawn(|| {
                        begun.wait();
                        // For the test's own streams and memory; the client's threads see to theirs.
                        relax_capture_mode().unwrap();
                        let options = options(name, asked.rank, asked.world_size, device);
                        let lane: Lane = lane.parse().unwrap();
                        Rank::join(&asked.socket, options.lanes([lane]), device)
                    });
                    rank.stream().synchronize().unwrap();
                    rank.stream().begin_capture().unwrap();
                    begun.wait();
                    let other = joining.join().unwrap();
                    rank.stream().end_capture().unwrap();
                    other
                });
                drop(other);
                captured = Some(Captured::new(rank).unwrap());
                say("captured");
            }
            (["replay", times], Some(rank)) => {
                captured
                    .as_ref()
                    .unwrap()
                    .replay(rank, times.parse().unwrap());
                say("replayed");
            }
            (["eager"], Some(rank)) => match captured.as_ref().unwrap().eager(rank) {
                Ok(()) => say("called"),
                Err(error) => say(&describe(&error)),
            },
            (["found"], Some(rank)) => say(&captured.as_ref().unwrap().found(rank)),
            (["sync"], Some(rank)) => match rank.stream().synchronize() {
                Ok(()) => say("synced"),
                Err(error) => say(&error.to_string()),
            },
            (["call-elems", num_elems], Some(rank)) => {
                let at = rank.scratch.ptr();
                let num_elems = num_elems.parse().unwrap();
                let options = AllReduceOptions::default();
                rank.fill(rank.stream(), at, 0, 64 * 4);
                let kind = (Dtype::F32, Op::Sum);
                match rank.call(rank.stream(), [at, at], num_elems, kind, options) {
                    Ok(_) => say("called"),
                    Err(error) => say(&describe(&error)),
                }
            }
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
    drop(second);
    drop(cooperative);
}
