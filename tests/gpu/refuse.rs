//! Calls that are refused: every rank gets the same typed error, and the epoch goes on.

use crate::cuda::Gate;
use crate::harness::bits::expected;
use crate::harness::daemon;
use crate::harness::raw::{NO_HEARTBEATS, block_on, refused};
use crate::rank::{Rank, gpu_of, gpus, join_all, on_each, reduce_well};
use crate::raw::RawGpu;
use allreduce_client::{Algorithm, AllReduceError, AllReduceOptions, Dtype, Op, Refused};
use allreduce_contract::cuda::Context;
use allreduce_contract::v1::ErrorCode;
use std::sync::Barrier;
use tonic::Code;

/// What a rank asks for.
type Asked = (usize, (Dtype, Op), AllReduceOptions);

/// A call in place on the rank's scratch.
fn call(
    rank: &Rank,
    num_elems: usize,
    kind: (Dtype, Op),
    options: AllReduceOptions,
) -> AllReduceError {
    let at = rank.scratch.ptr();
    match rank.call(rank.stream(), [at, at], num_elems, kind, options) {
        Err(error) => {
            assert!(!error.is_epoch_over(), "{error}");
            error
        }
        Ok(reduction) => panic!("not refused: {reduction:?}"),
    }
}

fn assert_refused(refused: &Refused, kind: ErrorCode, words: &[&str]) {
    assert_eq!((refused.code, refused.kind), (Code::InvalidArgument, kind));
    for word in words {
        assert!(refused.message.contains(word), "no {word:?} in {refused}");
    }
}

#[test]
fn ranks_that_disagree_are_all_told() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "disagree", 2, &devices);
    let sum = (Dtype::F32, Op::Sum);
    let differ = |what: fn(u32) -> Asked, words: &[&str]| {
        on_each(&joined, |rank| {
            let (num_elems, kind, options) = what(rank.communicator.rank());
            match call(rank, num_elems, kind, options) {
                AllReduceError::Mismatch(refused) => {
                    assert_refused(&refused, ErrorCode::Mismatch, words);
                }
                other => panic!("{other:?}"),
            }
        });
        reduce_well(&joined);
    };
    let same = AllReduceOptions::default;
    differ(
        |rank| {
            (
                8 + rank as usize,
                (Dtype::F32, Op::Sum),
                AllReduceOptions::default(),
            )
        },
        &["8 x f32 sum", "9 x f32 sum"],
    );
    differ(
        |rank| {
            let op = [Op::Sum, Op::Max][rank as usize];
            (8, (Dtype::F32, op), AllReduceOptions::default())
        },
        &["8 x f32 sum", "8 x f32 max"],
    );
    differ(
        |rank| {
            let dtype = [Dtype::F16, Dtype::Bf16][rank as usize];
            (8, (dtype, Op::Sum), AllReduceOptions::default())
        },
        &["8 x f16 sum", "8 x bf16 sum"],
    );
    differ(
        |rank| {
            let algorithm = [Algorithm::OneShotPush, Algorithm::TwoShotPush][rank as usize];
            let options = AllReduceOptions::default().algorithm(algorithm);
            (8, (Dtype::F32, Op::Sum), options)
        },
        &["one_shot_push", "two_shot_push"],
    );
    // Nothing is sent: the other rank makes no call.
    let at = joined[0].scratch.ptr();
    let outside = joined[0].call(joined[0].stream(), [at, 64], 8, sum, same());
    assert!(
        matches!(outside, Err(AllReduceError::NotABuffer { pointer: 64, .. })),
        "{outside:?}"
    );
    let ranged = joined[0].call(
        joined[0].stream(),
        [at, at],
        8,
        sum,
        AllReduceOptions::prefix(8),
    );
    assert!(
        matches!(ranged, Err(AllReduceError::RangeGiven)),
        "{ranged:?}"
    );
    reduce_well(&joined);
    assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
}

/// A call is refused while the one before is held up by another rank's stream: that one's stream is not let go early,
/// the destination is untouched, and the next call is right. Broken by whoever lets go a stream by a value that is not
/// its turn.
#[test]
fn a_refused_call_between_good_ones_lets_nothing_go_early() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "between", 2, &devices);
    let kind = (Dtype::F32, Op::Sum);
    for round in 0..5 {
        let (tensors, sum) = expected(kind.0, kind.1, 251, 100 + round, 2);
        let all_called = Barrier::new(2);
        on_each(&joined, |rank| {
            let number = rank.communicator.rank() as usize;
            let stream = rank.stream();
            let [first, refused, second, own] =
                [0, 8192, 16384, 24576].map(|offset| rank.scratch.ptr() + offset);
            rank.upload(stream, own, &tensors[number]);
            rank.fill(stream, refused, 0x11, sum.len());
            stream.synchronize().unwrap();
            let gate = (number == 1).then(|| Gate::close(stream));
            let call = |at, num_elems| {
                let options = AllReduceOptions::default();
                rank.call(stream, [at, at], num_elems, kind, options)
            };
            rank.copy(stream, first, own, sum.len());
            call(first, 251).unwrap();
            match call(refused, 8 + number) {
                Err(AllReduceError::Mismatch(_)) => {}
                other => panic!("{other:?}"),
            }
            rank.copy(stream, second, own, sum.len());
            call(second, 251).unwrap();
            // Of rank 0 too, which waits for rank 1's.
            assert!(!stream.is_idle().unwrap(), "the gate holds both up");
            all_called.wait();
            drop(gate);
            for at in [first, second] {
                let result = rank.download(stream, at, sum.len());
                assert!(result == sum, "round {round} rank {number}: a wrong sum");
            }
            let untouched = rank.download(stream, refused, sum.len());
            assert!(untouched.iter().all(|byte| *byte == 0x11));
            rank.communicator.check().unwrap();
        });
    }
    assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
}

/// What the kernels have not is refused with what to do, on every rank.
#[test]
fn what_has_no_kernel_is_refused_on_every_rank() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "kernels", 3, &devices);
    for (dtype, op) in [
        (Dtype::F64, Op::Sum),
        (Dtype::I32, Op::Sum),
        (Dtype::I64, Op::Max),
        (Dtype::F32, Op::Prod),
        (Dtype::Bf16, Op::Prod),
    ] {
        on_each(&joined, |rank| {
            match call(rank, 8, (dtype, op), AllReduceOptions::default()) {
                AllReduceError::Refused(refused) => {
                    let words = [&dtype.to_string(), &op.to_string(), "backend host"];
                    assert_refused(
                        &refused,
                        ErrorCode::Refused,
                        &words.map(|word| word as &str),
                    );
                }
                other => panic!("{dtype} {op}: {other:?}"),
            }
        });
        reduce_well(&joined);
    }
    on_each(&joined, |rank| {
        let options = AllReduceOptions::default().algorithm(Algorithm::OneShot);
        match call(rank, 8, (Dtype::F32, Op::Sum), options) {
            AllReduceError::Refused(refused) => {
                assert_refused(&refused, ErrorCode::Refused, &["one_shot", "host", "cuda"]);
            }
            other => panic!("{other:?}"),
        }
    });
    // Source and destination that overlap in part.
    on_each(&joined, |rank| {
        let at = rank.scratch.ptr();
        let kind = (Dtype::F32, Op::Sum);
        let options = AllReduceOptions::default();
        match rank.call(rank.stream(), [at, at + 4], 8, kind, options) {
            Err(AllReduceError::Refused(refused)) => {
                assert_refused(&refused, ErrorCode::Overlap, &["overlap"]);
            }
            other => panic!("{other:?}"),
        }
    });
    reduce_well(&joined);
    assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
}

/// The flags of streams by plain gRPC: what is wrong fails that call alone.
#[test]
fn a_stream_that_cannot_be_is_refused() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_HEARTBEATS]);
    let context = Context::retain(gpu_of(&devices, 0).clone()).unwrap();
    block_on(async {
        let mut rank = RawGpu::alone(daemon.socket(), "streams", &context).await;
        rank.reduce_well().await;
        let mut unknown = rank.call();
        unknown.event.as_mut().unwrap().stream = 65;
        let status = rank.all_reduce(unknown).await.unwrap_err();
        let words = ["event.stream 65", "0..=64"];
        let detail = refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &words,
        );
        assert_eq!(detail.rank, Some(0));
        rank.reduce_well().await;
        // Where no event is named, nothing is waited for.
        rank.reduce_without_event().await;
        rank.reduce_well().await;
    });
}
