//! The order of streams: what a call waits for, and what it leaves alone.

use crate::cuda::{Gate, begin_capture, end_capture};
use crate::harness::bits::expected;
use crate::harness::raw::block_on;
use crate::harness::{SOON, daemon};
use crate::rank::{AsyncRank, gpu_of, gpus, join_all, on_each, options, reduce_well};
use allreduce_client::cuda::DeviceBuffer;
use allreduce_client::{Algorithm, AllReduceError, AllReduceOptions, Dtype, Op};
use std::time::Duration;

const KIND: (Dtype, Op) = (Dtype::F32, Op::Sum);

/// The call returns once it is enqueued; the reduction reads what is on the stream before it, however late that
/// comes. Broken by a ready flag that is not waited for.
#[test]
fn a_reduction_waits_for_its_streams() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "late", 2, &devices);
    for round in 0..5 {
        let (tensors, sum) = expected(KIND.0, KIND.1, 251, round, 2);
        on_each(&joined, |rank| {
            let number = rank.communicator.rank();
            let (at, stream) = (rank.scratch.ptr(), rank.stream());
            let own = at + 8192;
            rank.upload(stream, own, &tensors[number as usize]);
            // What would be read too early.
            rank.fill(stream, at, 0, sum.len());
            stream.synchronize().unwrap();
            let gate = (number == 1).then(|| Gate::close(stream));
            rank.copy(stream, at, own, sum.len());
            let options = AllReduceOptions::default();
            rank.call(stream, [at, at], 251, KIND, options).unwrap();
            if let Some(gate) = gate {
                // The call has answered, so it did not wait for the GPU.
                assert!(!stream.is_idle().unwrap(), "the gate holds the stream up");
                gate.open();
            }
            let result = rank.download(stream, at, sum.len());
            rank.communicator.check().unwrap();
            assert!(result == sum, "round {round} rank {number}: a wrong sum");
        });
    }
}

/// While a call waits for another rank, its stream goes on with what is enqueued there meanwhile. Broken by a wait for
/// the result that is enqueued before every rank has called.
#[test]
fn a_stream_goes_on_while_its_call_waits_for_a_rank() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "goes-on", 2, &devices);
    let (tensors, sum) = expected(KIND.0, KIND.1, 251, 80, 2);
    for (rank, own) in joined.iter().zip(&tensors) {
        rank.upload(rank.stream(), rank.scratch.ptr(), own);
    }
    let [first, second] = joined.as_slice() else {
        panic!("two ranks");
    };
    std::thread::scope(|scope| {
        let calling = scope.spawn(|| {
            let at = first.scratch.ptr();
            let options = AllReduceOptions::default();
            first.call(first.stream(), [at, at], 251, KIND, options)
        });
        // It is on its way by then; were it not, less would be tested.
        std::thread::sleep(Duration::from_millis(200));
        first.fill(first.stream(), first.scratch.ptr() + 8192, 0x22, 64);
        first.stream().synchronize().unwrap();
        assert!(!calling.is_finished(), "rank 1 has not called");
        let at = second.scratch.ptr();
        let options = AllReduceOptions::default();
        second
            .call(second.stream(), [at, at], 251, KIND, options)
            .unwrap();
        calling.join().unwrap().unwrap();
    });
    for rank in &joined {
        assert!(rank.download(rank.stream(), rank.scratch.ptr(), sum.len()) == sum);
        rank.communicator.check().unwrap();
    }
}

/// Ranks of one process may use one stream: what each writes to its ready flag comes before any wait. Broken as above.
#[test]
fn ranks_may_share_a_stream() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "shared", 2, &devices[..1]);
    let stream = joined[0].stream();
    for round in 0..20 {
        let (tensors, sum) = expected(KIND.0, KIND.1, 251, 90 + round, 2);
        on_each(&joined, |rank| {
            let at = rank.scratch.ptr();
            rank.upload(stream, at, &tensors[rank.communicator.rank() as usize]);
            let options = AllReduceOptions::default();
            rank.call(stream, [at, at], 251, KIND, options).unwrap();
            let result = rank.download(stream, at, sum.len());
            assert!(result == sum, "round {round}: a wrong sum");
            rank.communicator.check().unwrap();
        });
    }
}

/// A call that fails because a rank does not call leaves its stream alone: it is not held up, and nothing is written.
#[test]
fn a_call_that_times_out_leaves_its_stream_alone() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "times-out", 2, &devices);
    reduce_well(&joined);
    let rank = &joined[0];
    let (at, stream) = (rank.scratch.ptr(), rank.stream());
    rank.fill(stream, at, 0x11, 64);
    let options = AllReduceOptions::default().timeout(Duration::from_millis(300));
    match rank.call(stream, [at, at], 16, KIND, options) {
        Err(AllReduceError::Timeout { missing_ranks, .. }) => assert_eq!(missing_ranks, [1]),
        other => panic!("{other:?}"),
    }
    assert!(rank.download(stream, at, 64) == [0x11; 64]);
}

/// The future of a call is dropped when the call is on its way: the reduction is done all the same, the stream does not
/// wait for it, and the next one is right.
#[test]
fn a_call_that_is_given_up_holds_up_nobody() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let (tensors, sum) = expected(KIND.0, KIND.1, 251, 120, 2);
    block_on(async {
        let join = async |rank| {
            let device = gpu_of(&devices, rank);
            let options = options("given-up", rank, 2, device);
            AsyncRank::join(daemon.socket(), options, device).await
        };
        let (first, second) = tokio::join!(join(0), join(1));
        for _ in 0..3 {
            first.upload(&tensors[0]);
            second.upload(&tensors[1]);
            let limit = Duration::from_millis(200);
            let given_up = tokio::time::timeout(limit, first.call(251, KIND)).await;
            assert!(given_up.is_err(), "rank 1 has not called: {given_up:?}");
            first.stream.synchronize().unwrap();
            second.call(251, KIND).await.unwrap();
            first.communicator.wait_settled(SOON).unwrap();
            assert!(first.download(sum.len()) == sum);
            assert!(second.download(sum.len()) == sum);

            first.upload(&tensors[0]);
            second.upload(&tensors[1]);
            let both = tokio::join!(first.call(251, KIND), second.call(251, KIND));
            both.0.and(both.1).unwrap();
            assert!(first.download(sum.len()) == sum);
            assert!(second.download(sum.len()) == sum);
            first.communicator.check().unwrap();
        }
    });
}

/// Two communicators share the GPU, each with its own executor; neither gets the other's data.
#[test]
fn two_communicators_work_at_the_same_time() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let worlds = [2, 3].map(|world_size| {
        join_all(
            daemon.socket(),
            &format!("both-{world_size}"),
            world_size,
            &devices,
        )
    });
    std::thread::scope(|scope| {
        for joined in &worlds {
            scope.spawn(move || {
                on_each(joined, |rank| {
                    let world_size = u64::from(rank.communicator.world_size());
                    for round in 0..300 {
                        let seed = 1000 * world_size + round;
                        rank.reduce_one_at(rank.scratch.ptr(), seed).unwrap();
                    }
                });
            });
        }
    });
    for joined in &worlds {
        assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
    }
}

/// A captured stream is refused before anything is sent or enqueued: the capture can go on, no sequence number
/// is used up. Once before the communicator knows the stream, once after.
#[test]
fn a_captured_stream_is_refused_and_the_capture_ends_well() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "capture", 2, &devices);
    for _ in 0..2 {
        let rank = &joined[0];
        let at = rank.scratch.ptr();
        begin_capture(rank.stream());
        let options = AllReduceOptions::default();
        match rank.call(rank.stream(), [at, at], 8, KIND, options) {
            Err(error @ AllReduceError::Capturing) => {
                assert!(!error.is_epoch_over());
                assert!(error.to_string().contains("captured"), "{error}");
            }
            other => panic!("{other:?}"),
        }
        end_capture(rank.stream());
        reduce_well(&joined);
    }
}

/// In the mode that frameworks capture in, calls of other threads that a capture does not survive end it. What the
/// client does is none of them: neither a call, nor asking whether the stream is idle.
#[test]
fn a_capture_in_another_thread_is_not_disturbed() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "beside", 2, &devices);
    let kind = (Dtype::F32, Op::Max);
    let (tensors, max) = expected(kind.0, kind.1, 64, 4, 2);
    on_each(&joined, |rank| {
        let own = &tensors[rank.communicator.rank() as usize];
        rank.upload(rank.stream(), rank.scratch.ptr(), own);
        rank.stream().synchronize().unwrap();
    });
    let captured = &joined[0].streams[1];
    begin_capture(captured);
    on_each(&joined, |rank| {
        let at = rank.scratch.ptr();
        for _ in 0..100 {
            let options = AllReduceOptions::default();
            rank.call(rank.stream(), [at, at], 64, kind, options)
                .unwrap();
        }
    });
    end_capture(captured);
    on_each(&joined, |rank| {
        assert!(rank.download(rank.stream(), rank.scratch.ptr(), max.len()) == max);
        rank.communicator.check().unwrap();
    });
    reduce_well(&joined);
}

/// A stream that is forgotten can be used again.
#[test]
fn a_stream_that_was_closed_is_opened_again() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "closed", 2, &devices);
    for _ in 0..3 {
        reduce_well(&joined);
        on_each(&joined, |rank| rank.close_stream().unwrap());
    }
    reduce_well(&joined);
}

/// 200 calls on each of two streams without a wait in between: far more than may be enqueued. Each has a fresh copy of
/// the source, and its result is kept. Broken by a call that does nothing, or not in its turn.
#[test]
fn many_calls_without_a_wait_are_right() {
    const CALLS: u64 = 200;
    const STRIDE: u64 = 512;
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "many", 2, &devices);
    let (tensors, sum) = expected(KIND.0, KIND.1, 64, 3, 2);
    on_each(&joined, |rank| {
        let own = &tensors[rank.communicator.rank() as usize];
        let rooms = rank.streams.each_ref().map(|_| {
            let room = (CALLS + 2) * STRIDE;
            rank.communicator.allocate_device(room as usize).unwrap()
        });
        let place = |room: &DeviceBuffer, index: u64| room.ptr() + index * STRIDE;
        for (stream, room) in rank.streams.iter().zip(&rooms) {
            rank.upload(stream, place(room, 0), own);
        }
        for index in 0..CALLS {
            for (stream, room) in rank.streams.iter().zip(&rooms) {
                let at = place(room, 1);
                rank.copy(stream, at, place(room, 0), own.len());
                let options = AllReduceOptions::default();
                rank.call(stream, [at, at], 64, KIND, options).unwrap();
                rank.copy(stream, place(room, 2 + index), at, own.len());
            }
        }
        for (stream, room) in rank.streams.iter().zip(&rooms) {
            for index in 0..CALLS {
                let result = rank.download(stream, place(room, 2 + index), sum.len());
                assert!(result == sum, "call {index}");
            }
        }
        rank.communicator.check().unwrap();
    });
}

/// A stream is forgotten while its reduction is still enqueued, and another one is used at once. Broken by flags that
/// change hands while somebody waits for them.
#[test]
fn a_stream_that_is_closed_with_work_enqueued_keeps_its_flags() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "closed", 2, &devices);
    for round in 0..3 {
        let (tensors, sum) = expected(KIND.0, KIND.1, 251, 40 + round, 2);
        on_each(&joined, |rank| {
            let number = rank.communicator.rank();
            let [first, second] = &rank.streams;
            let [one, other, own] = [0, 8192, 16384].map(|offset| rank.scratch.ptr() + offset);
            rank.upload(first, own, &tensors[number as usize]);
            rank.fill(first, one, 0, sum.len());
            first.synchronize().unwrap();
            let gate = (number == 1).then(|| Gate::close(first));
            rank.copy(first, one, own, sum.len());
            let options = AllReduceOptions::default;
            rank.call(first, [one, one], 251, KIND, options()).unwrap();
            rank.close_stream().unwrap();
            // Busy, so that it writes its flag.
            rank.copy(second, other, own, sum.len());
            rank.call(second, [other, other], 251, KIND, options())
                .unwrap();
            drop(gate);
            for (stream, at) in [(first, one), (second, other)] {
                assert!(rank.download(stream, at, sum.len()) == sum, "round {round}");
            }
            rank.communicator.check().unwrap();
        });
    }
}

/// Reductions of thousands of kernels behind a stream that is held up: more than a GPU's queue takes. The executor
/// answers all the while, and all come out right. Broken by an executor that enqueues until it is blocked.
#[test]
fn long_tensors_behind_a_held_up_stream_block_nobody() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[("ALLREDUCED_CUDA__STAGING_PART_BYTES", "1024")]);
    let joined = join_all(daemon.socket(), "long", 2, &devices);
    // In place, by pieces of 1 KiB: 1024 kernels each.
    let num_elems = 1 << 18;
    let (tensors, sum) = expected(KIND.0, KIND.1, num_elems, 60, 2);
    on_each(&joined, |rank| {
        let number = rank.communicator.rank();
        let stream = rank.stream();
        let room = rank.communicator.allocate_device(sum.len()).unwrap();
        rank.upload(stream, room.ptr(), &tensors[number as usize]);
        stream.synchronize().unwrap();
        let gate = (number == 1).then(|| Gate::close(stream));
        let places = [0, 1, 2].map(|_| rank.communicator.allocate_device(sum.len()).unwrap());
        for place in &places {
            rank.copy(stream, place.ptr(), room.ptr(), sum.len());
            let options = AllReduceOptions::default().algorithm(Algorithm::OneShotPull);
            rank.call(stream, [place.ptr(); 2], num_elems, KIND, options)
                .unwrap();
        }
        for _ in 0..100 {
            rank.communicator.ping().unwrap();
        }
        drop(gate);
        for place in &places {
            assert!(rank.download(stream, place.ptr(), sum.len()) == sum);
        }
        rank.communicator.check().unwrap();
    });
}
