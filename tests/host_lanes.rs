//! The lanes of backend host on which ranks share memory: what goes wrong there, with real processes.
//!
//! Every rank gets a typed error, soon, whoever dies, stands still, leaves, disagrees or scribbles over the shared memory;
//! the communicator forms again; the executor lives. Results are tested in conformance.rs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::{
    Algorithm, AllReduceError, AllReduceOptions, Buffer, Element, Lane, Op, bf16,
};
use allreduce_contract::companion::{Kind, Reply};
use allreduce_contract::lane::{Abort, AbortCause, Call, NOT_IN_ARENA, Signature};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::attach_request::Message as FromRank;
use allreduce_contract::v1::attach_response::Message as ToRank;
use allreduce_contract::v1::buffers_client::BuffersClient;
use allreduce_contract::v1::{
    self, AllocateRequest, ErrorCode, GetStatsRequest, Hello, Peers, RegionKind, Shared,
};
use harness::raw::{RawRank, block_on, dial, executor_pid, hello, info, open};
use harness::worker::Worker;
use harness::{daemon, options, ranks, send_signal, watchdog};
use nix::sys::signal::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

/// The lanes under test.
const LANES: [Lane; 2] = [Lane::Delegated, Lane::Resident];

#[test]
fn worker_entry() {
    harness::worker::run_if_asked();
}

fn join(socket: &Path, name: &str, lane: Lane, rank: u32, world_size: u32) -> Communicator {
    let options = options(name, rank, world_size)
        .lanes([lane])
        .arena_len_bytes(4 << 20);
    let communicator = Client::connect(socket).unwrap().join(options).unwrap();
    assert_eq!(communicator.lane(), lane);
    communicator
}

fn join_again(workers: &mut [Worker], epoch: u64) {
    for worker in &mut *workers {
        worker.tell("join");
    }
    for worker in &mut *workers {
        assert_eq!(worker.answer(), format!("joined {epoch}"));
    }
}

fn all_answer(workers: &mut [Worker], told: &str, answer: &str) {
    for worker in &mut *workers {
        worker.tell(told);
    }
    for worker in &mut *workers {
        assert_eq!(worker.answer(), answer);
    }
}

/// Small tensors (one shot) and large ones (two shot).
const TRAFFIC: [&str; 2] = ["traffic 64", "traffic 300000"];

/// Broken by a survivor that hangs, by an error that does not name the rank, and by an epoch that does not form again.
#[test]
fn survivors_of_a_killed_rank_are_told_and_form_again() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("killed-{lane}");
        let mut workers = Worker::start_all_on(lane, daemon.socket(), &name, 3);
        let pid = executor_pid(daemon.socket(), &name);
        for (epoch, (victim, traffic)) in (1..).zip([2_usize, 0].into_iter().zip(TRAFFIC)) {
            all_answer(&mut workers, traffic, "running");
            workers[victim].kill_hard();
            for rank in (0..3).filter(|rank| *rank != victim) {
                let answer = workers[rank].answer();
                let expected = format!("ended over rank=Some({victim}) epoch={epoch} ");
                assert!(answer.starts_with(&expected), "rank {rank}: {answer}");
            }
            let rank = u32::try_from(victim).unwrap();
            workers[victim] = Worker::start_on(lane, daemon.socket(), &name, rank, 3);
            join_again(&mut workers, epoch + 1);
            all_answer(&mut workers, "reduce", "reduced");
        }
        assert_eq!(executor_pid(daemon.socket(), &name), pid);
    }
}

/// A rank that stands still past the deadline is named; when it goes on it learns that it is out.
#[test]
fn a_rank_that_stops_past_the_deadline_is_named() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "1000")]);
    for lane in LANES {
        for (index, traffic) in TRAFFIC.into_iter().enumerate() {
            let name = format!("stopped-{lane}-{index}");
            let mut workers = Worker::start_all_on(lane, daemon.socket(), &name, 3);
            all_answer(&mut workers, traffic, "running");
            workers[1].signal(Signal::SIGSTOP);
            for rank in [0, 2] {
                let answer = workers[rank].answer();
                let expected = "timeout over [1] epoch 1 is over: rank 1 did not ";
                assert!(answer.starts_with(expected), "rank {rank}: {answer}");
            }
            workers[1].signal(Signal::SIGCONT);
            let answer = workers[1].answer();
            assert!(answer.starts_with("ended over rank=Some(1) "), "{answer}");
            join_again(&mut workers, 2);
            all_answer(&mut workers, "reduce", "reduced");
        }
    }
}

/// Broken by a wait that only the executor could end.
#[test]
fn ranks_of_a_killed_executor_are_told_and_form_again() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("executor-{lane}");
        let mut workers = Worker::start_all_on(lane, daemon.socket(), &name, 3);
        for traffic in TRAFFIC {
            all_answer(&mut workers, traffic, "running");
            send_signal(executor_pid(daemon.socket(), &name), Signal::SIGKILL);
            for worker in &mut workers {
                let answer = worker.answer();
                assert!(answer.starts_with("lost over "), "{answer}");
            }
            // A new executor, whose epochs begin anew.
            join_again(&mut workers, 1);
            all_answer(&mut workers, "reduce", "reduced");
        }
    }
}

/// An executor that stands still is lost once it answers no heartbeats; what it has begun it may still end, so a rank that had
/// it reduce does not get its tensor back.
#[test]
fn an_executor_that_stops_is_lost() {
    let _watchdog = watchdog();
    let daemon = daemon(&[
        ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_INTERVAL_MS", "100"),
        ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_TIMEOUT_MS", "1500"),
    ]);
    for lane in LANES {
        let name = format!("still-{lane}");
        let mut workers = Worker::start_all_on(lane, daemon.socket(), &name, 2);
        all_answer(&mut workers, "traffic 300000", "running");
        let executor = executor_pid(daemon.socket(), &name);
        send_signal(executor, Signal::SIGSTOP);
        for worker in &mut workers {
            let answer = worker.answer();
            assert!(answer.starts_with("lost over "), "{answer}");
        }
        send_signal(executor, Signal::SIGKILL);
    }
}

/// A rank that waits for one that never calls does not wait for ever when the executor dies: its own thread tells it.
#[test]
fn a_rank_that_sleeps_is_woken_when_the_executor_dies() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("sleeps-{lane}");
        let mut workers = Worker::start_all_on(lane, daemon.socket(), &name, 2);
        workers[0].tell("reduce");
        std::thread::sleep(Duration::from_millis(300));
        send_signal(executor_pid(daemon.socket(), &name), Signal::SIGKILL);
        let answer = workers[0].answer();
        assert!(answer.starts_with("lost over "), "{answer}");
    }
}

/// A rank leaves while others reduce: they are told that it left.
#[test]
fn leaving_in_traffic_is_told() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("leaves-{lane}");
        let mut workers = Worker::start_all_on(lane, daemon.socket(), &name, 3);
        for worker in &mut workers[..2] {
            worker.tell("traffic 64");
        }
        assert_eq!(workers[2].ask("leave"), "left");
        for worker in &mut workers[..2] {
            let answer = worker.answer();
            let expected = "ended over rank=Some(2) epoch=1 epoch 1 is over: rank 2 left";
            assert!(answer.starts_with(expected), "{answer}");
        }
        join_again(&mut workers, 2);
        all_answer(&mut workers, "reduce", "reduced");
    }
}

/// A reduction that is complete is no failure because a peer, which was through first, has left.
#[test]
fn the_last_reduction_is_good_for_every_rank() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        for round in 0..30 {
            let name = format!("last-{lane}-{}", round % 3);
            ranks(3, |rank| {
                let communicator = join(daemon.socket(), &name, lane, rank, 3);
                let num_elems = [16, 20_000, 300_000][round % 3];
                let mut buffer = communicator.allocate::<i32>(num_elems).unwrap();
                buffer.as_mut_slice().fill(1);
                let buffer = communicator.all_reduce(buffer, Op::Sum).unwrap();
                communicator.leave();
                assert!(buffer.as_slice().iter().all(|element| *element == 3));
            });
        }
    }
}

fn mismatch<T: Element>(
    communicator: &Communicator,
    num_elems: usize,
    op: Op,
    algorithm: Option<Algorithm>,
) -> String {
    let buffer = communicator.allocate::<T>(num_elems).unwrap();
    let options = AllReduceOptions {
        algorithm,
        ..AllReduceOptions::default()
    };
    let failed = communicator
        .all_reduce_with(buffer, op, options)
        .unwrap_err();
    assert!(failed.buffers.is_some());
    match failed.error {
        AllReduceError::Mismatch(refused) => {
            assert_eq!(refused.kind, ErrorCode::Mismatch);
            assert_eq!(refused.code, tonic::Code::InvalidArgument);
            refused.message
        }
        other => panic!("{other:?}"),
    }
}

/// Every rank hears of it, in the same words, and the epoch goes on.
#[test]
fn ranks_that_disagree_are_told_so() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("disagree-{lane}");
        let words = ranks(3, |rank| {
            let communicator = join(daemon.socket(), &name, lane, rank, 3);
            let is_odd = rank == 1;
            let mut words = Vec::new();
            // Small and large ones on either side, which take different algorithms.
            for num_elems in [100, 100_000] {
                let count = if is_odd { num_elems + 1 } else { num_elems };
                words.push(mismatch::<f32>(&communicator, count, Op::Sum, None));
                let op = if is_odd { Op::Max } else { Op::Sum };
                words.push(mismatch::<f32>(&communicator, num_elems, op, None));
                words.push(match is_odd {
                    true => mismatch::<bf16>(&communicator, num_elems, Op::Sum, None),
                    false => mismatch::<f32>(&communicator, num_elems, Op::Sum, None),
                });
                let asked = is_odd.then_some(Algorithm::OneShot);
                words.push(mismatch::<f32>(&communicator, num_elems, Op::Sum, asked));
            }
            let count = if is_odd { 5 } else { 1 << 19 };
            words.push(mismatch::<f32>(&communicator, count, Op::Sum, None));
            harness::reduce_one(&communicator).unwrap();
            assert_eq!(communicator.epoch(), 1);
            words
        });
        assert!(words[0] == words[1] && words[1] == words[2], "{words:?}");
        assert!(words[0][0].contains("rank 0 reduces 100 x f32 sum, rank 1 reduces 101 x f32 sum"));
    }
}

/// Two communicators of the same processes, in opposite order.
#[test]
fn two_communicators_at_once() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        ranks(2, |rank| {
            let one = join(daemon.socket(), &format!("one-{lane}"), lane, rank, 2);
            let two = join(daemon.socket(), &format!("two-{lane}"), lane, 1 - rank, 2);
            std::thread::scope(|scope| {
                for communicator in [&one, &two] {
                    scope.spawn(move || {
                        for _ in 0..200 {
                            harness::reduce_one(communicator).unwrap();
                        }
                    });
                }
            });
        });
    }
}

/// Threads of one rank that reduce at once get their turns in order; what the ranks' threads pair up as is their business,
/// unless the tensors differ.
#[test]
fn threads_of_one_rank_take_turns() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        ranks(2, |rank| {
            let communicator = join(daemon.socket(), &format!("turns-{lane}"), lane, rank, 2);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for _ in 0..100 {
                            harness::reduce_one(&communicator).unwrap();
                        }
                    });
                }
            });
            assert_eq!(communicator.epoch(), 1);
        });
    }
}

/// Tasks of one thread may be ranks of one communicator: no call blocks the thread that polls it. A future that is dropped
/// leaves its call running, for the others.
#[test]
fn tasks_of_one_thread_can_be_ranks() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("tasks-{lane}");
        block_on(async {
            let client = allreduce_client::Client::connect(daemon.socket())
                .await
                .unwrap();
            let options = |rank| options(&name, rank, 2).lanes([lane]);
            let (zero, one) = tokio::join!(client.join(options(0)), client.join(options(1)));
            let (zero, one) = (zero.unwrap(), one.unwrap());
            let ones = |buffer: &mut Buffer<i32>| buffer.as_mut_slice().fill(1);
            for _ in 0..20 {
                let mut first = zero.allocate::<i32>(1000).await.unwrap();
                let mut second = one.allocate::<i32>(1000).await.unwrap();
                ones(&mut first);
                ones(&mut second);
                let (first, second) = tokio::join!(
                    zero.all_reduce(first, Op::Sum),
                    one.all_reduce(second, Op::Sum)
                );
                assert_eq!(first.unwrap().as_slice(), second.unwrap().as_slice());
            }
            let mut dropped = zero.allocate::<i32>(1000).await.unwrap();
            let mut second = one.allocate::<i32>(1000).await.unwrap();
            ones(&mut dropped);
            ones(&mut second);
            let call = zero.all_reduce(dropped, Op::Sum);
            let gave_up = tokio::time::timeout(Duration::from_millis(50), call).await;
            assert!(gave_up.is_err(), "nobody else has called yet");
            assert!(zero.wait_settled(Duration::from_millis(1)).is_err());
            let second = one.all_reduce(second, Op::Sum).await.unwrap();
            assert!(second.as_slice().iter().all(|element| *element == 2));
            zero.wait_settled(harness::SOON).unwrap();
        });
    }
}

/// What auto is on backend host, and that the executor counts what ranks reduce themselves.
#[test]
fn auto_is_delegated_and_says_so() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let both = Barrier::new(2);
    ranks(2, |rank| {
        let client = Client::connect(daemon.socket()).unwrap();
        let options = options("auto", rank, 2).lanes([]);
        let communicator = client.join(options).unwrap();
        assert_eq!(communicator.lane(), Lane::Delegated);
        let reason = communicator.lane_reason();
        assert!(reason.starts_with("auto: ranks reduce"), "{reason}");
        for _ in 0..5 {
            harness::reduce_one(&communicator).unwrap();
        }
        let large = communicator.allocate::<f32>(20_000).unwrap();
        communicator.all_reduce(large, Op::Max).unwrap();
        both.wait();
        if rank == 0 {
            check_stats(daemon.socket(), true);
        }
        both.wait();
    });
    // They stay when the epoch is over.
    check_stats(daemon.socket(), false);
}

fn check_stats(socket: &Path, is_ready: bool) {
    let stats = block_on(async {
        let mut admin = AdminClient::new(dial(socket).await);
        let stats = admin.get_stats(GetStatsRequest::default()).await.unwrap();
        stats.into_inner().communicators.remove(0)
    });
    if is_ready {
        assert_eq!(stats.lane(), v1::Lane::Delegated);
        assert!(stats.lane_reason.starts_with("auto: "), "{stats:?}");
    }
    let counts: Vec<_> = stats
        .reductions
        .iter()
        .map(|count| {
            (
                count.lane(),
                count.algorithm(),
                count.operations,
                count.bytes,
            )
        })
        .collect();
    let delegated = v1::Lane::Delegated;
    assert_eq!(
        counts,
        [
            (delegated, v1::Algorithm::TwoShot, 1, 80_000),
            (delegated, v1::Algorithm::OneShot, 5, 60)
        ]
    );
    for rank in &stats.ranks {
        assert_eq!((rank.operations, rank.bytes), (6, 80_060));
    }
}

/// The AllReduce RPC serves on any lane: who cannot map what the lane shares can still call.
#[test]
fn the_rpc_reduces_on_any_lane() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        block_on(async {
            let opened = open(daemon.socket(), &format!("rpc-on-{lane}"), 2).await;
            let mut raw = Vec::new();
            for rank in 0..2 {
                let hello = Hello {
                    lanes: vec![v1::Lane::from(lane) as i32],
                    ..hello(&opened, rank, 2)
                };
                raw.push(RawRank::join_as(&opened, hello).await);
            }
            for rank in &mut raw {
                let Ok(Some(ToRank::Peers(peers))) = rank.stream.next().await else {
                    panic!("not Peers");
                };
                assert_eq!(peers.lane(), v1::Lane::from(lane));
                rank.stream.send(FromRank::Shared(Shared::default()));
            }
            for rank in &mut raw {
                assert_eq!(rank.ready().await.lane(), v1::Lane::from(lane));
            }
            harness::raw::reduce_well(&mut raw).await;
        });
    }
}

/// A rank that cannot map what is shared says so, and every rank is refused with its words.
#[test]
fn a_rank_that_cannot_share_is_named() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for lane in LANES {
        let name = format!("cannot-{lane}");
        block_on(async {
            let opened = open(daemon.socket(), &name, 2).await;
            let mut raw = Vec::new();
            for rank in 0..2 {
                let hello = Hello {
                    lanes: vec![v1::Lane::from(lane) as i32],
                    ..hello(&opened, rank, 2)
                };
                raw.push(RawRank::join_as(&opened, hello).await);
            }
            for rank in &mut raw {
                let peers = rank.stream.next().await;
                assert!(matches!(peers, Ok(Some(ToRank::Peers(_)))), "{peers:?}");
            }
            let error = "no address space".to_owned();
            raw[1]
                .stream
                .send(FromRank::Shared(Shared { error, calls: 0 }));
            for rank in &mut raw {
                let status = rank.stream.next().await.unwrap_err();
                let words = ["rank 1 cannot use lane", "no address space"];
                let (code, kind) = (tonic::Code::FailedPrecondition, ErrorCode::NotEligible);
                harness::raw::refused(&status, code, kind, &words);
            }
        });
    }
}

// A hostile rank.

/// A rank that has joined by hand, and holds the descriptors that it may write.
struct Hostile {
    _stream: harness::raw::Stream,
    lane: File,
    board: File,
    /// Of 400,004 bytes.
    buffer_id: u64,
}

impl Hostile {
    async fn join(socket: &Path, name: &str, lane: Lane) -> Self {
        let opened = open(socket, name, 2).await;
        let hello = Hello {
            lanes: vec![v1::Lane::from(lane) as i32],
            arena_len_bytes: 1 << 20,
            ..hello(&opened, 1, 2)
        };
        let mut stream = harness::raw::attach_with(&opened, FromRank::Hello(hello))
            .await
            .unwrap();
        let Ok(Some(ToRank::Joined(joined))) = stream.next().await else {
            panic!("not Joined");
        };
        let Ok(Some(ToRank::Peers(peers))) = stream.next().await else {
            panic!("not Peers");
        };
        let fetch = |kind: Kind, peer: u32| {
            let mut request = harness::raw::companion_request(&opened, kind, joined.session, 1);
            request.peer = peer;
            let (reply, fd) = harness::raw::exchange(&opened, &request, None).unwrap();
            assert!(matches!(reply, Reply::Region { .. }), "{reply:?}");
            File::from(fd.unwrap())
        };
        let mut buffers = BuffersClient::new(dial(Path::new(&opened.executor_socket)).await);
        let request = AllocateRequest {
            session: joined.session,
            len_bytes: 400_004,
        };
        let allocated = buffers.allocate(request).await.unwrap().into_inner();
        check_peer_is_read_only(&peers, &fetch(Kind::Lane, 0), &fetch(Kind::Arena, 0));
        let hostile = Self {
            lane: fetch(Kind::Lane, 1),
            board: fetch(Kind::Board, 1),
            buffer_id: allocated.buffer_id,
            _stream: stream,
        };
        hostile._stream.send(FromRank::Shared(Shared::default()));
        hostile
    }
}

fn check_peer_is_read_only(peers: &Peers, lane: &File, arena: &File) {
    let kinds: Vec<RegionKind> = peers.peers[0]
        .regions
        .iter()
        .map(v1::Region::kind)
        .collect();
    assert_eq!(kinds, [RegionKind::Lane, RegionKind::Arena]);
    for file in [lane, arena] {
        assert!(
            file.write_at(&[1], 8192).is_err(),
            "a peer's memory was written"
        );
    }
}

/// An entry as it lies in a lane: the odd sequences' is the second line behind the header.
fn forge(hostile: &Hostile, call: &Call, sequence: u64) {
    let mut entry = call.to_entry();
    (entry.src_buffer, entry.dst_buffer) = (hostile.buffer_id, hostile.buffer_id);
    let lane = &hostile.lane;
    let words = [
        entry.num_elems,
        entry.kind,
        entry.src,
        entry.dst,
        entry.src_buffer,
        entry.dst_buffer,
        entry.arrived_ns,
    ];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    lane.write_all_at(&bytes, 128 + 8).unwrap();
    lane.write_all_at(&sequence.to_ne_bytes(), 128).unwrap();
}

fn good_call() -> Call {
    Call {
        sequence: 1,
        signature: Signature {
            num_elems: 100_000,
            dtype: allreduce_client::Dtype::F32,
            op: Op::Sum,
            algorithm: None,
        },
        half: 0,
        src: 0,
        dst: 0,
        src_buffer: 0,
        dst_buffer: 0,
        arrived_ns: 0,
    }
}

/// Noise that is the same in every run.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Whatever a rank writes to what it shares: its peer gets a typed error or a result, soon; the executor lives, and the next
/// epoch is a good one. Broken by an address that is taken from the shared memory unchecked, and by a wait that such a rank
/// can prolong.
#[test]
fn a_hostile_rank_harms_only_its_own_epoch() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "1500")]);
    type Scribble = fn(&Hostile);
    let scribbles: [(&str, Scribble); 9] = [
        ("unknown-kind", |hostile| {
            forge(hostile, &good_call(), 1);
            hostile.lane.write_all_at(&[0xff; 8], 128 + 16).unwrap();
        }),
        ("outside", |hostile| {
            let src = (4 << 20) - 4;
            forge(hostile, &Call { src, ..good_call() }, 1);
        }),
        ("wraps", |hostile| {
            let dst = u64::MAX - 399_999;
            forge(hostile, &Call { dst, ..good_call() }, 1);
        }),
        ("misaligned", |hostile| {
            forge(
                hostile,
                &Call {
                    src: 2,
                    ..good_call()
                },
                1,
            );
        }),
        ("ahead", |hostile| forge(hostile, &good_call(), 7)),
        ("overlaps", |hostile| {
            forge(
                hostile,
                &Call {
                    dst: 4,
                    ..good_call()
                },
                1,
            );
        }),
        ("staged", |hostile| {
            let src = NOT_IN_ARENA;
            forge(hostile, &Call { src, ..good_call() }, 1);
        }),
        ("aborts", |hostile| {
            let abort = Abort::of(AbortCause::Unknown(200), Some(0), 77).to_word();
            hostile
                .board
                .write_all_at(&abort.to_ne_bytes(), 64)
                .unwrap();
        }),
        ("noise", |hostile| {
            hostile.lane.write_all_at(&noise(3, 8192), 0).unwrap();
            hostile.board.write_all_at(&noise(5, 4096), 0).unwrap();
        }),
    ];
    for lane in LANES {
        let name = format!("hostile-{lane}");
        let mut executor = None;
        for (epoch, (what, scribble)) in (1..).zip(scribbles) {
            let (socket, name) = (daemon.socket(), name.as_str());
            let (start, started) = std::sync::mpsc::channel();
            let (scribbled, scribbling) = std::sync::mpsc::channel::<()>();
            let answer = std::thread::scope(|scope| {
                let honest = scope.spawn(move || {
                    let communicator = join(socket, name, lane, 0, 2);
                    assert_eq!(communicator.epoch(), epoch);
                    let buffer = communicator.allocate::<f32>(100_000).unwrap();
                    start.send(()).unwrap();
                    scribbling.recv().unwrap();
                    communicator
                        .all_reduce(buffer, Op::Sum)
                        .map(|_| ())
                        .map_err(|failed| failed.error)
                });
                block_on(async {
                    let hostile = Hostile::join(socket, name, lane).await;
                    tokio::task::spawn_blocking(move || {
                        started.recv_timeout(harness::SOON).unwrap();
                        scribble(&hostile);
                        scribbled.send(()).unwrap();
                        hostile
                    })
                    .await
                    .map(|_hostile| honest.join().unwrap())
                    .unwrap()
                })
            });
            match answer {
                // The executor of lane resident finds it, and tells every rank.
                Err(AllReduceError::Refused(refused)) if lane == Lane::Resident => {
                    assert_eq!(refused.detail.rank, Some(1), "{what}: {refused:?}");
                    let expected = match what {
                        "unknown-kind" => ErrorCode::InvalidField,
                        "misaligned" | "staged" => ErrorCode::Misaligned,
                        "overlaps" => ErrorCode::Overlap,
                        "outside" | "wraps" => ErrorCode::OutOfBounds,
                        _ => panic!("{what}: {refused:?}"),
                    };
                    assert_eq!(refused.kind, expected, "{what}: {refused:?}");
                }
                Err(error) => assert!(error.is_epoch_over(), "{what}: {error:?}"),
                Ok(()) => panic!("{what}: reduced with a rank that did nothing"),
            }
            let pid = executor_pid(socket, name);
            assert_eq!(*executor.get_or_insert(pid), pid, "{what}");
        }
        let epoch = ranks(2, |rank| {
            let communicator = join(daemon.socket(), &name, lane, rank, 2);
            harness::reduce_one(&communicator).unwrap();
            communicator.epoch()
        });
        assert_eq!(epoch, [scribbles.len() as u64 + 1; 2]);
        assert_eq!(info(daemon.socket(), &name).unwrap().incarnation, 1);
    }
}
