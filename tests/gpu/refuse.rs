//! Calls that are refused: every rank gets the same typed error, and the epoch goes on.

use crate::harness::daemon;
use crate::harness::raw::{NO_HEARTBEATS, block_on, refused};
use crate::rank::{Rank, gpu_of, gpus, join_all, on_each, reduce_well};
use crate::raw::RawGpu;
use allreduce_client::{Algorithm, AllReduceError, AllReduceOptions, Dtype, Op, Refused};
use allreduce_contract::cuda::Context;
use allreduce_contract::v1::ErrorCode;
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
