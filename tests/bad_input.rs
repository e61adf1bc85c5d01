//! Bad input against a running daemon: each has its documented code, kind and words, harms nobody else,
//! and a good reduction on the same communicator still works after it.
//!
//! Most speak plain gRPC, since the client crate refuses first or cannot say it. Broken by: a check that
//! is missing or overflows, a panic in a service, a refusal that ends more than its own call.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::blocking::Client;
use allreduce_client::{
    AllReduceError, AllReduceOptions, Backend, BufferError, JoinError, Lane, Op,
};
use allreduce_contract::companion::{Kind, Refusal, Reply};
use allreduce_contract::memory::SealedMemory;
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::attach_request::Message as FromRank;
use allreduce_contract::v1::attach_response::Message as ToRank;
use allreduce_contract::v1::{
    self, AllReduceRequest, AllocateRequest, BufferRange, ErrorCode, Event, GetStatsRequest,
    GetVersionRequest, Heartbeat, Leave, ListClientsRequest, PingRequest, RegisterRequest,
    ReleaseRequest,
};
use allreduce_contract::window::ABI_VERSION;
use allreduced::private::PrivateDaemon;
use harness::raw::{
    NO_HEARTBEATS, RawRank, attach_with, call_all, companion, companion_request, dial, exchange,
    hello, join_all, open, reduce_well, refused, refused_hello, try_open,
};
use harness::{Scratch, daemon, is_alive, join, open_fds, options, ranks, watchdog};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use std::io::IoSlice;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd};
use tonic::{Code, Status};

fn quiet_daemon() -> PrivateDaemon {
    daemon(&[NO_HEARTBEATS])
}

/// The daemon answers, and is the process it was.
async fn lives(daemon: &PrivateDaemon) {
    let version = AdminClient::new(dial(daemon.socket()).await)
        .get_version(GetVersionRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(version.pid, daemon.pid());
}

#[tokio::test]
async fn unknown_communicators_are_not_found() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "known", 2).await;
    let executor = dial(&ranks[0].opened.executor_socket).await;
    for channel in [dial(daemon.socket()).await, executor] {
        let mut admin = AdminClient::new(channel);
        let communicator = "unknown".to_owned();
        let stats = admin
            .get_stats(GetStatsRequest {
                communicator: communicator.clone(),
            })
            .await;
        let clients = admin
            .list_clients(ListClientsRequest { communicator })
            .await;
        for status in [stats.unwrap_err(), clients.unwrap_err()] {
            refused(
                &status,
                Code::NotFound,
                ErrorCode::UnknownCommunicator,
                &["\"unknown\""],
            );
        }
    }
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

/// Broken by an executor that takes its communicator's name for an option.
#[tokio::test]
async fn names_that_look_like_options_are_names() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    for name in ["--help", "-V", "-", "--", "-x.y_z", &"-".repeat(64)] {
        let mut ranks = join_all(daemon.socket(), name, 1).await;
        reduce_well(&mut ranks).await;
    }
}

#[tokio::test]
async fn open_refuses_bad_names_and_world_sizes() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "good", 2).await;
    let long = "x".repeat(65);
    for name in ["", "a/b", "../up", "a b", "nul\0", "ü", "/", &long] {
        let status = try_open(daemon.socket(), name, 2, 0).await.unwrap_err();
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &["communicator name", "1 to 64 bytes"],
        );
    }
    for world_size in [0, 17, u32::MAX] {
        let status = try_open(daemon.socket(), "w", world_size, 0)
            .await
            .unwrap_err();
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &[&format!("world_size {world_size} is not in 1..=16")],
        );
    }
    let status = try_open(daemon.socket(), "good", 3, 0).await.unwrap_err();
    refused(
        &status,
        Code::FailedPrecondition,
        ErrorCode::CommunicatorDiffers,
        &["good", "world_size 2", "not 3"],
    );
    let cuda = v1::Backend::Cuda as i32;
    let status = try_open(daemon.socket(), "gpu", 2, cuda).await.unwrap_err();
    refused(
        &status,
        Code::FailedPrecondition,
        ErrorCode::Unsupported,
        &["cuda", "host"],
    );
    let status = try_open(daemon.socket(), "odd", 2, 77).await.unwrap_err();
    refused(
        &status,
        Code::InvalidArgument,
        ErrorCode::InvalidField,
        &["backend", "77"],
    );
    // Nothing was opened by any of these.
    let list = AdminClient::new(dial(daemon.socket()).await)
        .list_communicators(v1::ListCommunicatorsRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(list.communicators.len(), 1);
    // The longest legal name.
    assert!(try_open(daemon.socket(), &long[1..], 1, 0).await.is_ok());
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

#[tokio::test]
async fn too_many_communicators_are_refused_with_the_limit() {
    let _watchdog = watchdog();
    let daemon = daemon(&[NO_HEARTBEATS, ("ALLREDUCED_COMMUNICATOR__MAX_OPEN", "2")]);
    let mut ranks = join_all(daemon.socket(), "one", 2).await;
    open(daemon.socket(), "two", 1).await;
    let status = try_open(daemon.socket(), "three", 1, 0).await.unwrap_err();
    let detail = refused(
        &status,
        Code::ResourceExhausted,
        ErrorCode::Limit,
        &["2 communicators", "communicator.max_open"],
    );
    assert_eq!((detail.needed, detail.available), (3, 2));
    // Opening one that is open is no new one.
    open(daemon.socket(), "two", 1).await;
    reduce_well(&mut ranks).await;
}

#[tokio::test]
async fn hello_refuses_who_does_not_fit() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "hello", 2).await;
    let opened = ranks[0].opened.clone();
    let good = hello(&opened, 0, 2);

    // A member's rank, in a Ready communicator.
    let status = refused_hello(&opened, good.clone()).await;
    let detail = refused(
        &status,
        Code::AlreadyExists,
        ErrorCode::RankTaken,
        &["rank 0 is already joined"],
    );
    assert_eq!(detail.rank, Some(0));

    for rank in [2, 16, u32::MAX] {
        let mut bad = good.clone();
        bad.rank = rank;
        let status = refused_hello(&opened, bad).await;
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &[&format!("rank {rank} is not below world_size 2")],
        );
    }
    for world_size in [0, 1, 3, 17] {
        let mut bad = good.clone();
        bad.world_size = world_size;
        let status = refused_hello(&opened, bad).await;
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &["has world_size 2", &format!("expects {world_size}")],
        );
    }
    for token in [vec![], vec![0; 16], vec![0; 1000]] {
        let mut bad = good.clone();
        bad.token = token;
        let status = refused_hello(&opened, bad).await;
        refused(
            &status,
            Code::Unauthenticated,
            ErrorCode::BadToken,
            &["token", "Control.Open"],
        );
    }
    let mut bad = good.clone();
    bad.abi = ABI_VERSION + 1;
    let status = refused_hello(&opened, bad).await;
    refused(
        &status,
        Code::FailedPrecondition,
        ErrorCode::AbiMismatch,
        &[&format!("layout {}", ABI_VERSION + 1)],
    );
    for lane in [0, 99] {
        let mut bad = good.clone();
        bad.lanes = vec![lane];
        let status = refused_hello(&opened, bad).await;
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &["lane"],
        );
    }
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

/// While a communicator forms, its ranks are taken too, and a refusal frees nothing.
#[tokio::test]
async fn a_rank_is_taken_while_forming() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let opened = open(daemon.socket(), "forming", 2).await;
    let mut first = RawRank::join(&opened, 0, 2).await;
    let status = refused_hello(&opened, hello(&opened, 0, 2)).await;
    refused(
        &status,
        Code::AlreadyExists,
        ErrorCode::RankTaken,
        &["rank 0"],
    );
    // Nor can it reduce alone: the missing are named.
    let request = first.call();
    let status = first.all_reduce(request).await.unwrap_err();
    let detail = refused(
        &status,
        Code::FailedPrecondition,
        ErrorCode::NotReady,
        &["rank 1 missing"],
    );
    assert_eq!(detail.missing_ranks, [1]);
    first.sequence = 0;
    let mut second = RawRank::join(&opened, 1, 2).await;
    first.ready().await;
    second.ready().await;
    reduce_well(&mut [first, second]).await;
}

#[tokio::test]
async fn attach_takes_hello_first_and_once() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "first", 2).await;
    let opened = ranks[0].opened.clone();
    for first in [
        FromRank::Heartbeat(Heartbeat {
            nonce: 1,
            ring: None,
        }),
        FromRank::Leave(Leave { ring: None }),
    ] {
        let status = attach_with(&opened, first).await.err().unwrap();
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::InvalidField,
            &["first message on Attach must be Hello"],
        );
    }
    reduce_well(&mut ranks).await;

    // A second Hello ends the one who says it, not the executor.
    let opened = open(daemon.socket(), "twice", 1).await;
    let mut rank = RawRank::join(&opened, 0, 1).await;
    rank.ready().await;
    rank.stream.send(FromRank::Hello(hello(&opened, 0, 1)));
    let status = rank.stream.next().await.unwrap_err();
    refused(
        &status,
        Code::InvalidArgument,
        ErrorCode::InvalidField,
        &["only Heartbeat, Mapped, Shared, GaveUp and Leave"],
    );
    let mut again = RawRank::join(&opened, 0, 1).await;
    again.ready().await;
    reduce_well(&mut [again]).await;
    lives(&daemon).await;
}

/// A heartbeat comes back with its nonce.
#[tokio::test]
async fn heartbeats_are_answered() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "beat", 1).await;
    for nonce in [0, 7, u64::MAX] {
        ranks[0]
            .stream
            .send(FromRank::Heartbeat(Heartbeat { nonce, ring: None }));
        match ranks[0].stream.next().await {
            Ok(Some(ToRank::Heartbeat(heartbeat))) => assert_eq!(heartbeat.nonce, nonce),
            other => panic!("{other:?}"),
        }
    }
}

/// Sends one rank's bad call while the other makes a good one: both get the same refusal, it consumes
/// the sequence number, and the next reduction is right.
async fn both_refused(
    ranks: &mut [RawRank],
    bad: impl FnOnce(&mut AllReduceRequest),
    code: Code,
    kind: ErrorCode,
    words: &[&str],
) {
    let mut requests: Vec<_> = ranks.iter_mut().map(RawRank::call).collect();
    bad(&mut requests[1]);
    let answers = call_all(ranks, requests).await;
    for answer in &answers {
        let detail = refused(answer.as_ref().unwrap_err(), code, kind, words);
        if kind != ErrorCode::Refused {
            assert_eq!(detail.rank, Some(1), "{words:?}");
        }
    }
    assert_eq!(
        answers[0].as_ref().unwrap_err().message(),
        answers[1].as_ref().unwrap_err().message()
    );
    reduce_well(ranks).await;
}

#[tokio::test]
async fn ranges_are_checked_against_the_buffer() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "ranges", 2).await;
    let buffer_id = ranks[1].buffer_id;
    let at = |offset_bytes| {
        Some(BufferRange {
            buffer_id,
            offset_bytes,
        })
    };
    let (invalid, outside) = (Code::InvalidArgument, ErrorCode::OutOfBounds);
    // The buffer has 4096 bytes. Both sides are checked.
    for offset_bytes in [4096 - 28, 4096, 4096 + 4, u64::MAX - 31, u64::MAX - 3] {
        let words = [&*format!("from offset {offset_bytes}"), "which has 4096"];
        let src = |request: &mut AllReduceRequest| request.src = at(offset_bytes);
        both_refused(&mut ranks, src, invalid, outside, &words).await;
        let dst = |request: &mut AllReduceRequest| request.dst = at(offset_bytes);
        both_refused(&mut ranks, dst, invalid, outside, &words).await;
    }
    // Counts whose bytes leave the buffer, wrap in 64 bits, or are more than 64 bits count.
    for num_elems in [1025, 1 << 40, u64::MAX / 4] {
        let count = |request: &mut AllReduceRequest| request.num_elems = num_elems;
        both_refused(&mut ranks, count, invalid, outside, &["rank 1", "4096"]).await;
    }
    for num_elems in [u64::MAX / 4 + 1, u64::MAX] {
        let count = |request: &mut AllReduceRequest| request.num_elems = num_elems;
        let words = [&*num_elems.to_string(), "64 bits"];
        both_refused(&mut ranks, count, invalid, ErrorCode::Refused, &words).await;
    }
    for offset_bytes in [1, 2, 3, 5, u64::MAX] {
        let offset = |request: &mut AllReduceRequest| request.src = at(offset_bytes);
        let words = ["src.offset_bytes", "multiple of the element size 4"];
        both_refused(&mut ranks, offset, invalid, ErrorCode::Misaligned, &words).await;
    }
    // 8 elements of 4 bytes at 0: 4 and 28 overlap, 32 does not.
    for offset_bytes in [4, 28] {
        let overlap = |request: &mut AllReduceRequest| request.dst = at(offset_bytes);
        let words = ["rank 1", "overlap"];
        both_refused(&mut ranks, overlap, invalid, ErrorCode::Overlap, &words).await;
    }
    let mut requests: Vec<_> = ranks.iter_mut().map(RawRank::call).collect();
    requests[1].dst = at(32);
    for answer in call_all(&ranks, requests).await {
        answer.unwrap();
    }
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

#[tokio::test]
async fn missing_and_unknown_fields_are_named() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "fields", 2).await;
    let (invalid, field) = (Code::InvalidArgument, ErrorCode::InvalidField);
    for value in [0, 7, -1, i32::MAX] {
        let shown = format!("= {value} is not");
        let dtype = |request: &mut AllReduceRequest| request.dtype = value;
        both_refused(
            &mut ranks,
            dtype,
            invalid,
            field,
            &["rank 1", "dtype", &shown],
        )
        .await;
        let op = |request: &mut AllReduceRequest| request.op = value;
        both_refused(&mut ranks, op, invalid, field, &["rank 1", "op", &shown]).await;
    }
    let no_src = |request: &mut AllReduceRequest| request.src = None;
    both_refused(&mut ranks, no_src, invalid, field, &["src is missing"]).await;
    let no_dst = |request: &mut AllReduceRequest| request.dst = None;
    both_refused(&mut ranks, no_dst, invalid, field, &["dst is missing"]).await;
    let average = |request: &mut AllReduceRequest| request.op = v1::Op::Avg as i32;
    let words = ["avg", "i32"];
    both_refused(&mut ranks, average, invalid, ErrorCode::Refused, &words).await;
    let unsignalled = |request: &mut AllReduceRequest| {
        request.event = Some(Event {
            ready_value: 5,
            ..Event::default()
        });
    };
    both_refused(
        &mut ranks,
        unsignalled,
        Code::FailedPrecondition,
        ErrorCode::NotSignalled,
        &["rank 1", "does not hold 5"],
    )
    .await;
    lives(&daemon).await;
}

#[tokio::test]
async fn buffers_are_the_sessions_own() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "owners", 2).await;
    let session = ranks[1].joined.session;
    let foreign = ranks[0].buffer_id;
    let request = AllocateRequest {
        session,
        len_bytes: 64,
    };
    let mut buffers = ranks[1].buffers.clone();
    let released = buffers.allocate(request).await.unwrap().into_inner();
    let release = ReleaseRequest {
        session,
        buffer_id: released.buffer_id,
    };
    buffers.release(release).await.unwrap();

    for buffer_id in [foreign, released.buffer_id, 0, u64::MAX] {
        let name = |request: &mut AllReduceRequest| {
            request.src = Some(BufferRange {
                buffer_id,
                offset_bytes: 0,
            });
        };
        let words = ["rank 1", &*format!("buffer {buffer_id}")];
        both_refused(
            &mut ranks,
            name,
            Code::NotFound,
            ErrorCode::UnknownBuffer,
            &words,
        )
        .await;
        // Nor can it be given back.
        let release = ReleaseRequest { session, buffer_id };
        let status = buffers.release(release).await.unwrap_err();
        refused(
            &status,
            Code::NotFound,
            ErrorCode::UnknownBuffer,
            &[&format!("no buffer {buffer_id}")],
        );
    }
    // The owner's is untouched by that.
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

#[tokio::test]
async fn unknown_sessions_are_not_found() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "sessions", 2).await;
    let mut buffers = ranks[0].buffers.clone();
    for session in [0, 999, u64::MAX] {
        let mut request = ranks[0].call();
        ranks[0].sequence -= 1;
        request.session = session;
        let statuses: Vec<Status> = vec![
            ranks[0].all_reduce(request).await.unwrap_err(),
            buffers
                .allocate(AllocateRequest {
                    session,
                    len_bytes: 1,
                })
                .await
                .unwrap_err(),
            buffers
                .register(RegisterRequest {
                    session,
                    memory_handle: 1,
                    offset_bytes: 0,
                    len_bytes: 1,
                    cuda: None,
                    ring_memory: 0,
                })
                .await
                .unwrap_err(),
            buffers
                .release(ReleaseRequest {
                    session,
                    buffer_id: 1,
                })
                .await
                .unwrap_err(),
        ];
        for status in statuses {
            refused(
                &status,
                Code::NotFound,
                ErrorCode::UnknownSession,
                &[&format!("no session {session}")],
            );
        }
    }
    // Another epoch's number is refused, and consumes nothing.
    let mut request = ranks[0].call();
    ranks[0].sequence -= 1;
    request.epoch = 9;
    let status = ranks[0].all_reduce(request).await.unwrap_err();
    refused(
        &status,
        Code::InvalidArgument,
        ErrorCode::InvalidField,
        &["epoch 9"],
    );
    reduce_well(&mut ranks).await;
}

#[tokio::test]
async fn sequence_numbers_are_used_once_and_in_a_window() {
    let _watchdog = watchdog();
    let daemon = daemon(&[
        NO_HEARTBEATS,
        ("ALLREDUCED_COMMUNICATOR__MAX_IN_FLIGHT", "4"),
    ]);
    let mut ranks = join_all(daemon.socket(), "window", 2).await;
    reduce_well(&mut ranks).await;
    reduce_well(&mut ranks).await;
    // 1 and 2 are used up; 3 to 6 are in the window.
    for (sequence, why) in [
        (0, "consumed before"),
        (1, "consumed before"),
        (2, "consumed before"),
        (7, "too far ahead"),
        (u64::MAX, "too far ahead"),
    ] {
        let mut request = ranks[0].call();
        ranks[0].sequence -= 1;
        request.sequence = sequence;
        let status = ranks[0].all_reduce(request).await.unwrap_err();
        refused(
            &status,
            Code::OutOfRange,
            ErrorCode::BadSequence,
            &[&format!("sequence {sequence}"), why, "is 3", "4 ahead"],
        );
    }
    // The same number while the first call waits.
    let request = ranks[0].call();
    let mut collectives = ranks[0].collectives.clone();
    let waiting = tokio::spawn(async move { collectives.all_reduce(request).await });
    // On the same connection, so after it.
    let mut ping = ranks[0].collectives.clone();
    ping.ping(PingRequest {}).await.unwrap();
    let status = ranks[0].all_reduce(request).await.unwrap_err();
    refused(
        &status,
        Code::OutOfRange,
        ErrorCode::BadSequence,
        &["sequence 3", "called by this rank before"],
    );
    let request = ranks[1].call();
    ranks[1].all_reduce(request).await.unwrap();
    waiting.await.unwrap().unwrap();
    reduce_well(&mut ranks).await;
}

/// A message over the limit is refused by the transport, on the socket of the supervisor and on an
/// executor's; who is connected otherwise does not notice.
#[tokio::test]
async fn a_message_over_the_limit_touches_no_other_connection() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "large", 2).await;
    let opened = ranks[0].opened.clone();
    let large = "x".repeat(64 * 1024);
    let status = try_open(daemon.socket(), &large, 2, 0).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    let mut bad = hello(&opened, 0, 2);
    bad.client_name = large.clone();
    let status = refused_hello(&opened, bad).await;
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    let mut admin = AdminClient::new(dial(&opened.executor_socket).await);
    let request = GetStatsRequest {
        communicator: large,
    };
    let status = admin.get_stats(request).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    // Just below it, the name itself is what is wrong.
    let status = try_open(daemon.socket(), &"x".repeat(63 * 1024), 2, 0)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

#[tokio::test]
async fn arenas_that_cannot_be_had_say_how_much_there_is() {
    let _watchdog = watchdog();
    let limit = (1_u64 << 50).to_string();
    let daemon = daemon(&[
        NO_HEARTBEATS,
        ("ALLREDUCED_HOST__MAX_ARENA_LEN_BYTES", &limit),
    ]);
    let mut ranks = join_all(daemon.socket(), "other", 2).await;
    let opened = open(daemon.socket(), "arena", 1).await;
    let asking = |arena_len_bytes| {
        let mut hello = hello(&opened, 0, 1);
        hello.arena_len_bytes = arena_len_bytes;
        hello
    };
    for asked in [(1 << 50) + 1, u64::MAX] {
        let status = refused_hello(&opened, asking(asked)).await;
        let detail = refused(
            &status,
            Code::ResourceExhausted,
            ErrorCode::Limit,
            &[&asked.to_string(), "host.max_arena_len_bytes"],
        );
        assert_eq!((detail.needed, detail.available), (asked, 1 << 50));
    }
    // Within the limit, beyond the machine: refused before it is tried.
    let status = refused_hello(&opened, asking(1 << 50)).await;
    let detail = refused(
        &status,
        Code::ResourceExhausted,
        ErrorCode::NoMemory,
        &["not enough memory", "rank 0"],
    );
    assert_eq!(detail.needed, 1 << 50);
    assert!(detail.available > 0 && detail.available < detail.needed);
    // The rank is still free.
    let mut rank = RawRank::join(&opened, 0, 1).await;
    rank.ready().await;
    reduce_well(&mut [rank]).await;
    reduce_well(&mut ranks).await;
    lives(&daemon).await;
}

#[tokio::test]
async fn a_full_arena_and_too_many_buffers_are_refused() {
    let _watchdog = watchdog();
    let daemon = daemon(&[NO_HEARTBEATS, ("ALLREDUCED_COMMUNICATOR__MAX_BUFFERS", "3")]);
    let mut ranks = join_all(daemon.socket(), "full", 2).await;
    let session = ranks[0].joined.session;
    let mut buffers = ranks[0].buffers.clone();
    // The arena has 64 KiB, 4 KiB of which are taken.
    for len_bytes in [(60 << 10) + 1, 1 << 40, u64::MAX] {
        let request = AllocateRequest { session, len_bytes };
        let status = buffers.allocate(request).await.unwrap_err();
        let detail = refused(
            &status,
            Code::ResourceExhausted,
            ErrorCode::NoMemory,
            &["no gap", "61440"],
        );
        assert!(detail.needed >= len_bytes, "{detail:?}");
        assert_eq!(detail.available, 60 << 10);
    }
    let mut ids = Vec::new();
    for len_bytes in [60 << 10, 0] {
        let request = AllocateRequest { session, len_bytes };
        let allocated = buffers.allocate(request).await.unwrap().into_inner();
        ids.push(allocated.buffer_id);
    }
    let request = AllocateRequest {
        session,
        len_bytes: 0,
    };
    let status = buffers.allocate(request).await.unwrap_err();
    let detail = refused(
        &status,
        Code::ResourceExhausted,
        ErrorCode::Limit,
        &["holds 3 buffers"],
    );
    assert_eq!((detail.needed, detail.available), (4, 3));
    for buffer_id in ids {
        let request = ReleaseRequest { session, buffer_id };
        buffers.release(request).await.unwrap();
    }
    let request = AllocateRequest {
        session,
        len_bytes: 60 << 10,
    };
    buffers.allocate(request).await.unwrap();
    reduce_well(&mut ranks).await;
}

fn sealed(len_bytes: usize) -> SealedMemory {
    SealedMemory::create(c"test", NonZeroUsize::new(len_bytes).unwrap()).unwrap()
}

#[tokio::test]
async fn registering_checks_handle_range_and_alignment() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "register", 2).await;
    let opened = ranks[0].opened.clone();
    let session = ranks[0].joined.session;
    let mut request = companion_request(&opened, Kind::Hand, session, 0);
    request.len_bytes = 8192;
    let memory = sealed(8192);
    let Ok((Reply::Kept { handle }, None)) = exchange(&opened, &request, Some(memory.as_fd()))
    else {
        panic!("not kept");
    };
    let mut buffers = ranks[0].buffers.clone();
    let ask = |memory_handle, offset_bytes, len_bytes| RegisterRequest {
        session,
        memory_handle,
        offset_bytes,
        len_bytes,
        cuda: None,
        ring_memory: 0,
    };
    for (request, code, kind, word) in [
        (
            ask(handle + 1000, 0, 16),
            Code::NotFound,
            ErrorCode::UnknownBuffer,
            "no memory",
        ),
        (
            ask(0, 0, 16),
            Code::NotFound,
            ErrorCode::UnknownBuffer,
            "no memory 0",
        ),
        (
            ask(handle, 0, 8193),
            Code::InvalidArgument,
            ErrorCode::OutOfBounds,
            "8192",
        ),
        (
            ask(handle, 16, u64::MAX),
            Code::InvalidArgument,
            ErrorCode::OutOfBounds,
            "8192",
        ),
        (
            ask(handle, u64::MAX - 15, 16),
            Code::InvalidArgument,
            ErrorCode::OutOfBounds,
            "8192",
        ),
        (
            ask(handle, 8, 16),
            Code::InvalidArgument,
            ErrorCode::Misaligned,
            "multiple of 16",
        ),
    ] {
        let status = buffers.register(request).await.unwrap_err();
        refused(&status, code, kind, &[word]);
    }
    // Another session cannot use the handle.
    let mut foreign = ask(handle, 0, 16);
    foreign.session = ranks[1].joined.session;
    let status = ranks[1].buffers.register(foreign).await.unwrap_err();
    refused(
        &status,
        Code::NotFound,
        ErrorCode::UnknownBuffer,
        &["no memory"],
    );
    buffers.register(ask(handle, 16, 8176)).await.unwrap();
    reduce_well(&mut ranks).await;
}

#[tokio::test]
async fn the_companion_socket_refuses_strangers() {
    let _watchdog = watchdog();
    let daemon = quiet_daemon();
    let mut ranks = join_all(daemon.socket(), "companion", 2).await;
    let opened = ranks[0].opened.clone();
    let session = ranks[0].joined.session;
    let executor = harness::raw::executor_pid_of(daemon.socket(), "companion").await;
    let before = open_fds(executor);

    let good = companion_request(&opened, Kind::Arena, session, 0);
    let refusal = |answer| match answer {
        Ok((Reply::Refused(refusal), None)) => refusal,
        other => panic!("{other:?}"),
    };
    let mut bad = good;
    bad.token[0] ^= 1;
    assert_eq!(
        refusal(exchange(&opened, &bad, None)),
        Refusal::BadToken,
        "wrong token"
    );
    for (session, rank) in [
        (session, 1),
        (ranks[1].joined.session, 0),
        (0, 0),
        (u64::MAX, u32::MAX),
    ] {
        for kind in [Kind::Control, Kind::Arena] {
            let bad = companion_request(&opened, kind, session, rank);
            assert_eq!(
                refusal(exchange(&opened, &bad, None)),
                Refusal::UnknownSession
            );
        }
    }

    let mut hand = companion_request(&opened, Kind::Hand, session, 0);
    hand.len_bytes = 4096;
    assert_eq!(
        refusal(exchange(&opened, &hand, None)),
        Refusal::Malformed,
        "no descriptor"
    );
    let unsealed = memfd_create(c"unsealed", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&unsealed, 4096).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for fd in [unsealed.as_fd(), null.as_fd()] {
        assert_eq!(
            refusal(exchange(&opened, &hand, Some(fd))),
            Refusal::NotSealed
        );
    }
    // Sealed, but of another length than announced.
    let memory = sealed(8192);
    assert_eq!(
        refusal(exchange(&opened, &hand, Some(memory.as_fd()))),
        Refusal::NotSealed
    );
    // To another rank's session.
    let mut foreign = hand;
    foreign.rank = 1;
    foreign.len_bytes = 8192;
    assert_eq!(
        refusal(exchange(&opened, &foreign, Some(memory.as_fd()))),
        Refusal::UnknownSession
    );

    // Packets that are none, with and without descriptors; and a connection that says nothing.
    let silent = companion(&opened);
    for (packet, fds) in [
        (&b"x"[..], 0),
        (&[0xff; 48], 0),
        (&[0; 4096], 0),
        (&[7; 48], 1),
        (&[7; 48], 3),
    ] {
        let socket = companion(&opened);
        let fds = vec![null.as_raw_fd(); fds];
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        sendmsg::<UnixAddr>(
            socket.as_raw_fd(),
            &[IoSlice::new(packet)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .unwrap();
        let reply = Reply::receive(socket.as_fd());
        assert_eq!(refusal(reply), Refusal::Malformed);
    }
    drop(silent);

    // The owner still gets its own, and nothing that was sent was kept.
    assert!(matches!(
        exchange(&opened, &good, None),
        Ok((Reply::Region { .. }, Some(_)))
    ));
    reduce_well(&mut ranks).await;
    harness::eventually("the descriptors are closed", || {
        (open_fds(executor) <= before).then_some(())
    });
    assert!(is_alive(executor));
    lives(&daemon).await;
}

/// What the client crate itself refuses, and what it says about a daemon's refusal.
#[test]
fn the_client_crate_types_its_refusals() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let client = Client::connect(daemon.socket()).unwrap();
    let kind = |result: Result<_, JoinError>| match result {
        Err(JoinError::Refused(refused)) => (refused.code, refused.kind),
        other => panic!("{other:?}"),
    };
    for (options, code, expected) in [
        (
            options("c", 2, 2),
            Code::InvalidArgument,
            ErrorCode::InvalidField,
        ),
        (
            options("c", 0, 17),
            Code::InvalidArgument,
            ErrorCode::InvalidField,
        ),
        (
            options("a/b", 0, 2),
            Code::InvalidArgument,
            ErrorCode::InvalidField,
        ),
        (
            options("c", 0, 2).arena_len_bytes(u64::MAX),
            Code::ResourceExhausted,
            ErrorCode::Limit,
        ),
    ] {
        assert_eq!(kind(client.join(options)), (code, expected));
    }
    // Where there is no GPU, the client itself says why.
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        let refused = client.join(options("c", 0, 2).backend(Backend::Cuda));
        assert!(matches!(refused, Err(JoinError::Cuda(_))), "{refused:?}");
    }
    let both = options("lanes", 0, 1).lanes([Lane::Rpc, Lane::Resident]);
    let joined = client.join(both).unwrap();
    assert_eq!(joined.lane(), Lane::Rpc);
    assert_eq!(joined.lane_reason(), "asked for");

    let other = join(daemon.socket(), "other", 0, 1);
    let foreign = other.allocate::<f32>(4).unwrap();
    let failed = joined.all_reduce(foreign, Op::Sum).unwrap_err();
    assert!(matches!(failed.error, AllReduceError::ForeignBuffer));
    let foreign = failed.buffers.unwrap();
    other.all_reduce(foreign, Op::Sum).unwrap();

    let buffer = joined.allocate::<f32>(4).unwrap();
    let outside = AllReduceOptions {
        range: Some(2..5),
        ..AllReduceOptions::default()
    };
    let failed = joined
        .all_reduce_with(buffer, Op::Sum, outside)
        .unwrap_err();
    assert!(matches!(
        failed.error,
        AllReduceError::OutOfRange {
            start: 2,
            end: 5,
            num_elems: 4
        }
    ));
    joined.all_reduce(failed.buffers.unwrap(), Op::Sum).unwrap();
    match joined.allocate::<f64>(1 << 40) {
        Err(BufferError::Refused(refused)) => assert_eq!(refused.kind, ErrorCode::NoMemory),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        joined.allocate::<f64>(usize::MAX),
        Err(BufferError::TooLarge { .. })
    ));
    harness::reduce_well(&[joined]);
}

/// What is no daemon, or none any more, is an error that names the socket.
#[test]
fn connecting_to_nobody_names_the_socket() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let nobody = scratch.path("nobody.sock");
    let error = Client::connect(&nobody).unwrap_err();
    let shown = error.to_string();
    assert!(shown.contains(&nobody.display().to_string()), "{shown}");
}

/// One rank's refused call neither disturbs nor delays another communicator on the daemon.
#[test]
fn other_communicators_do_not_notice() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let good = harness::join_all(daemon.socket(), "good", 2);
    let bad = harness::join_all(daemon.socket(), "bad", 2);
    for _ in 0..20 {
        ranks(2, |rank| {
            let communicator = &bad[rank as usize];
            let buffer = communicator.allocate::<i32>(1).unwrap();
            let failed = communicator.all_reduce(buffer, Op::Avg).unwrap_err();
            assert!(matches!(failed.error, AllReduceError::Refused(_)));
        });
        harness::reduce_well(&good);
    }
    harness::reduce_well(&bad);
    assert!(good.iter().chain(&bad).all(|joined| joined.epoch() == 1));
}
