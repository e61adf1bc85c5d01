//! Where ranks meet: disagreement, deadlines, joining again, overlapping calls.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::{AllReduceError, AllReduceOptions, Dtype, JoinError, Op, Refused};
use allreduce_contract::v1::ErrorCode;
use harness::bits::{reduce_any, tensor};
use harness::raw::{self, NO_HEARTBEATS, call_all, executor_pid, reduce_well, refused};
use harness::{daemon, join_all, options, ranks, reduce_one, watchdog};
use std::time::Duration;
use tonic::Code;

fn reduced(
    communicator: &Communicator,
    dtype: Dtype,
    op: Op,
    num_elems: usize,
) -> Result<(), AllReduceError> {
    let own = tensor(dtype, num_elems, 1, communicator.rank());
    reduce_any(communicator, dtype, op, &own, 0, true).map(|_| ())
}

fn mismatch(result: Result<(), AllReduceError>) -> Refused {
    match result {
        Err(AllReduceError::Mismatch(refused)) => refused,
        other => panic!("no mismatch: {other:?}"),
    }
}

/// Every rank is told, with both sides' values, and the next call works in the same epoch. Broken by a
/// check that compares only some of count, dtype and op, or that answers only the rank that was late.
#[test]
fn a_mismatch_reaches_every_rank_and_names_both_sides() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let communicators = join_all(daemon.socket(), "mismatch", 3);
    let pid = executor_pid(daemon.socket(), "mismatch");
    let odd_ones = [
        (Dtype::F32, Op::Sum, 8, "8 x f32 sum"),
        (Dtype::F32, Op::Max, 7, "7 x f32 max"),
        (Dtype::I32, Op::Sum, 7, "7 x i32 sum"),
    ];
    for (round, (dtype, op, num_elems, odd)) in odd_ones.into_iter().enumerate() {
        // The odd one is each rank in turn.
        let odd_rank = u32::try_from(round).unwrap();
        let messages = ranks(3, |rank| {
            let communicator = &communicators[rank as usize];
            let refused = if rank == odd_rank {
                mismatch(reduced(communicator, dtype, op, num_elems))
            } else {
                mismatch(reduced(communicator, Dtype::F32, Op::Sum, 7))
            };
            assert_eq!(refused.code, Code::InvalidArgument);
            refused.message
        });
        for message in &messages {
            assert!(message.contains("7 x f32 sum"), "{message}");
            assert!(message.contains(odd), "{message}");
            assert!(message.contains(&format!("rank {odd_rank}")), "{message}");
            assert_eq!(message, &messages[0]);
        }
        harness::reduce_well(&communicators);
    }
    assert!(communicators.iter().all(|joined| joined.epoch() == 1));
    assert_eq!(executor_pid(daemon.socket(), "mismatch"), pid);
}

/// A rank that calls only after the others were told gets the same error for its sequence number, and
/// its next one meets theirs. Broken by forgetting the failure once those who waited are answered.
#[tokio::test]
async fn who_comes_late_to_a_mismatch_is_told_the_same() {
    let _watchdog = watchdog();
    let daemon = daemon(&[NO_HEARTBEATS]);
    let mut ranks = raw::join_all(daemon.socket(), "late", 3).await;
    let mut requests = Vec::new();
    for rank in &mut ranks {
        requests.push(rank.call());
    }
    requests[1].num_elems = 9;
    let late = requests.pop().unwrap();
    let early = call_all(&ranks[..2], requests).await;
    for answer in early {
        let detail = refused(
            &answer.unwrap_err(),
            Code::InvalidArgument,
            ErrorCode::Mismatch,
            &["8 x i32 sum", "9 x i32 sum"],
        );
        assert!(matches!(detail.rank, Some(0 | 1)), "{detail:?}");
    }
    // Both of the others are a whole reduction ahead in their numbers by now.
    let answer = ranks[2].all_reduce(late).await;
    refused(
        &answer.unwrap_err(),
        Code::InvalidArgument,
        ErrorCode::Mismatch,
        &["8 x i32 sum", "9 x i32 sum"],
    );
    reduce_well(&mut ranks).await;
}

/// Broken by a deadline that is not kept, that names the wrong ranks, or an epoch that cannot form
/// again.
#[test]
fn a_deadline_names_the_missing_and_ends_the_epoch() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let communicators = join_all(daemon.socket(), "deadline", 4);
    let pid = executor_pid(daemon.socket(), "deadline");
    harness::reduce_well(&communicators);
    let errors = ranks(4, |rank| {
        if rank.is_multiple_of(2) {
            return None;
        }
        let communicator = &communicators[rank as usize];
        let buffer = communicator.allocate::<f32>(4).unwrap();
        let options = AllReduceOptions {
            timeout: Some(Duration::from_millis(300)),
            ..AllReduceOptions::default()
        };
        let failed = communicator
            .all_reduce_with(buffer, Op::Sum, options)
            .unwrap_err();
        assert!(failed.buffers.is_some(), "the buffer comes back");
        Some(failed.error)
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_epoch_over());
        match error {
            AllReduceError::Timeout {
                missing_ranks,
                message,
            } => {
                assert_eq!(missing_ranks, [0, 2]);
                assert!(message.contains("ranks 0, 2"), "{message}");
                assert!(message.contains("within 300 ms"), "{message}");
            }
            other => panic!("no timeout: {other:?}"),
        }
    }
    // The late ones learn that the epoch is over, and by whom.
    for late in [0, 2] {
        match reduce_one(&communicators[late]) {
            Err(AllReduceError::EpochEnded(end)) => {
                assert_eq!(end.epoch, 1);
                assert!(end.message.contains("ranks 0, 2"), "{end}");
            }
            other => panic!("{other:?}"),
        }
    }
    // While their old sessions still hold memory, the next epoch forms on the same executor.
    let again = join_all(daemon.socket(), "deadline", 4);
    assert!(again.iter().all(|joined| joined.epoch() == 2));
    harness::reduce_well(&again);
    drop(communicators);
    harness::reduce_well(&again);
    assert_eq!(executor_pid(daemon.socket(), "deadline"), pid);
    let info = raw::info(daemon.socket(), "deadline").unwrap();
    assert_eq!(info.incarnation, 1);
}

/// DEADLINE_EXCEEDED on the wire, with the ranks in the detail.
#[tokio::test]
async fn a_deadline_is_typed_on_the_wire() {
    let _watchdog = watchdog();
    let daemon = daemon(&[NO_HEARTBEATS]);
    let mut ranks = raw::join_all(daemon.socket(), "wire", 3).await;
    let mut request = ranks[1].call();
    request.timeout_ms = 200;
    let status = ranks[1].all_reduce(request).await.unwrap_err();
    let detail = refused(
        &status,
        Code::DeadlineExceeded,
        ErrorCode::Timeout,
        &["ranks 0, 2", "within 200 ms"],
    );
    assert_eq!(detail.missing_ranks, [0, 2]);
    assert_eq!(detail.epoch, 1);
    // The rank that was late.
    let request = ranks[0].call();
    let status = ranks[0].all_reduce(request).await.unwrap_err();
    refused(
        &status,
        Code::Aborted,
        ErrorCode::EpochEnded,
        &["epoch 1 is over", "join again"],
    );
}

/// The configured deadline holds for a call that names none.
#[test]
fn the_default_deadline_comes_from_the_configuration() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "250")]);
    let communicators = join_all(daemon.socket(), "default", 2);
    match reduce_one(&communicators[0]) {
        Err(AllReduceError::Timeout {
            missing_ranks,
            message,
        }) => {
            assert_eq!(missing_ranks, [1]);
            assert!(message.contains("within 250 ms"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// Ranks that do not join in time are named, each time. Broken by telling who waits only that the
/// epoch is over.
#[test]
fn a_join_names_the_ranks_that_did_not_come() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__JOIN_TIMEOUT_MS", "200")]);
    for attempt in 0..5 {
        let errors = ranks(4, |rank| {
            if rank % 2 == 1 {
                return None;
            }
            let client = Client::connect(daemon.socket()).unwrap();
            Some(client.join(options("absent", rank, 4)).unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            match error {
                JoinError::Timeout {
                    missing_ranks,
                    message,
                } => {
                    assert_eq!(missing_ranks, [1, 3], "attempt {attempt}: {message}");
                    assert!(message.contains("ranks 1, 3 did not join"), "{message}");
                }
                other => panic!("attempt {attempt}: {other:?}"),
            }
        }
    }
    // And when all come, it forms.
    let communicators = join_all(daemon.socket(), "absent", 4);
    harness::reduce_well(&communicators);
}

/// Several calls of a rank in flight are answered in order, each with its own data. Broken by a
/// reduction that starts before its predecessor is done, or by mixing up sequence numbers.
#[test]
fn overlapping_calls_complete_in_order() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    const CALLS: i32 = 24;
    ranks(3, |rank| {
        raw::block_on(async {
            let client = allreduce_client::Client::connect(daemon.socket())
                .await
                .unwrap();
            let communicator = client.join(options("overlap", rank, 3)).await.unwrap();
            let mut buffers = Vec::new();
            for call in 0..CALLS {
                let mut buffer = communicator.allocate::<i32>(1000).await.unwrap();
                let value = call * 10 + i32::try_from(rank).unwrap();
                buffer.as_mut_slice().fill(value);
                buffers.push(buffer);
            }
            let order = std::cell::RefCell::new(Vec::new());
            let calls = buffers.into_iter().zip(0..).map(|(buffer, call)| {
                let (communicator, order) = (&communicator, &order);
                async move {
                    let buffer = communicator.all_reduce(buffer, Op::Sum).await.unwrap();
                    order.borrow_mut().push(call);
                    assert_eq!(buffer.as_slice(), [call * 30 + 3; 1000]);
                }
            });
            join_futures(calls.collect()).await;
            assert_eq!(order.into_inner().len(), CALLS as usize);
        });
    });
}

/// The sequence numbers say the order, whatever the order of arrival. Broken by running whichever
/// sequence is complete first.
#[tokio::test]
async fn sequences_run_in_order_of_number() {
    let _watchdog = watchdog();
    let daemon = daemon(&[NO_HEARTBEATS]);
    let mut ranks = raw::join_all(daemon.socket(), "order", 2).await;
    let first: Vec<_> = ranks.iter_mut().map(raw::RawRank::call).collect();
    let second: Vec<_> = ranks.iter_mut().map(raw::RawRank::call).collect();
    // All have called 2, one has called 1: nothing may run.
    let later: Vec<_> = ranks
        .iter()
        .zip(second)
        .map(|(rank, request)| {
            let mut collectives = rank.collectives.clone();
            tokio::spawn(async move { collectives.all_reduce(request).await })
        })
        .collect();
    let mut earlier = Vec::new();
    for (rank, request) in ranks.iter().zip(first) {
        for answer in &later {
            assert!(!answer.is_finished(), "sequence 2 ran before 1");
        }
        let mut collectives = rank.collectives.clone();
        earlier.push(tokio::spawn(async move {
            collectives.all_reduce(request).await
        }));
        // A round trip to the executor: what was sent before has been seen.
        let ping = allreduce_contract::v1::PingRequest {};
        rank.collectives.clone().ping(ping).await.unwrap();
    }
    for answer in earlier.into_iter().chain(later) {
        answer.await.unwrap().unwrap();
    }
    reduce_well(&mut ranks).await;
}

/// Polls all until all are done.
async fn join_futures<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut futures: Vec<_> = futures.into_iter().map(|f| Some(Box::pin(f))).collect();
    std::future::poll_fn(|context| {
        let mut pending = false;
        for slot in &mut futures {
            if let Some(future) = slot {
                if future.as_mut().poll(context).is_ready() {
                    *slot = None;
                } else {
                    pending = true;
                }
            }
        }
        if pending {
            std::task::Poll::Pending
        } else {
            std::task::Poll::Ready(())
        }
    })
    .await;
}
