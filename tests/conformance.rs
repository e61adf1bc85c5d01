//! What an accepted reduction answers: the reference's result, bit for bit, on every rank.
//!
//! A covering sample of dtype x op x world size x length x alignment x place, through the client crate
//! and real executors. Broken by: any other order of accumulation, a NaN that is not canonicalised, a
//! tail or a chunk boundary off by one, a rank that gets another rank's bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::{Algorithm, AllReduceError, AllReduceOptions, Dtype, Lane, Op};
use allreduce_contract::v1::ErrorCode;
use harness::bits::{expected, hash, reduce_any, tensor};
use harness::worker::Worker;
use harness::{daemon, options, ranks, watchdog, watchdog_of};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// Bytes read (all ranks' tensors) up to which the executor reduces on its own thread; as in its plan.
const INLINE_MAX_BYTES: usize = 1 << 20;

/// Bytes of a tensor up to which lane delegated reduces it in one shot; as in the daemon's plan.
const ONE_SHOT_MAX_BYTES: usize = 16 << 10;

#[test]
fn worker_entry() {
    harness::worker::run_if_asked();
}

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: Dtype,
    op: Op,
    num_elems: usize,
    in_place: bool,
    /// Each rank's tensor starts at another element.
    skew: usize,
}

type Answer = (Vec<Vec<u8>>, Vec<u8>);

fn kinds() -> Vec<(Dtype, Op)> {
    let all = |dtype: Dtype| Op::ALL.into_iter().map(move |op| (dtype, op));
    let mut kinds: Vec<(Dtype, Op)> = Dtype::ALL.into_iter().flat_map(all).collect();
    kinds.retain(|(dtype, op)| !(dtype.is_integer() && *op == Op::Avg));
    assert_eq!(kinds.len(), 28);
    kinds
}

/// For each kind two short lengths of five, others for each kind and world size, so that all occur; for
/// every second kind one at, or just above, the bound of inline reductions.
fn cases(world_size: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (dtype, op)) in kinds().into_iter().enumerate() {
        let pick = index + world_size as usize;
        let inline = INLINE_MAX_BYTES / (world_size as usize * dtype.size_bytes());
        let short = [0, 1, 7, 21_504, 1023];
        let mut lengths = vec![short[pick % 5], short[(pick + 2) % 5]];
        if pick.is_multiple_of(2) {
            lengths.push(inline + 3 * (pick / 2 % 2));
        }
        for (step, num_elems) in lengths.into_iter().enumerate() {
            cases.push(Case {
                dtype,
                op,
                num_elems,
                in_place: (pick / 2 + step).is_multiple_of(2),
                skew: (pick + step) % 4,
            });
        }
    }
    cases
}

/// The lanes of backend host.
const LANES: [Lane; 3] = Lane::ALL;

/// Joins on a lane, or panics.
fn join(socket: &Path, name: &str, lane: Lane, rank: u32, world_size: u32) -> Communicator {
    let options = options(&format!("{name}-{lane}"), rank, world_size)
        .lanes([lane])
        .arena_len_bytes(8 << 20);
    let communicator = Client::connect(socket).unwrap().join(options).unwrap();
    assert_eq!(communicator.lane(), lane);
    communicator
}

fn algorithm(lane: Lane, tensor_bytes: usize, world_size: u32) -> Algorithm {
    match lane {
        Lane::Rpc if tensor_bytes * world_size as usize > INLINE_MAX_BYTES => {
            Algorithm::OneShotChunked
        }
        Lane::Delegated if tensor_bytes > ONE_SHOT_MAX_BYTES => Algorithm::TwoShot,
        Lane::Rpc | Lane::Resident | Lane::Delegated => Algorithm::OneShot,
    }
}

fn conform(world_size: u32, cases: &[Case], socket: &Path) {
    // By case: computed by the rank that needs it first.
    let answers: Vec<OnceLock<Answer>> = cases.iter().map(|_| OnceLock::new()).collect();
    for lane in LANES {
        conform_on(lane, world_size, cases, &answers, socket);
    }
}

fn conform_on(
    lane: Lane,
    world_size: u32,
    cases: &[Case],
    answers: &[OnceLock<Answer>],
    socket: &Path,
) {
    ranks(world_size, |rank| {
        let communicator = join(
            socket,
            &format!("conform-{world_size}"),
            lane,
            rank,
            world_size,
        );
        for (seed, (case, answer)) in (0..).zip(cases.iter().zip(answers)) {
            let Case {
                dtype,
                op,
                num_elems,
                in_place,
                skew,
            } = *case;
            let (tensors, sum) =
                answer.get_or_init(|| expected(dtype, op, num_elems, seed, world_size));
            let skip = skew * (rank as usize % 3);
            let own = &tensors[rank as usize];
            let (result, reduction) =
                reduce_any(&communicator, dtype, op, own, skip, in_place).unwrap();
            if let Some(at) = (0..sum.len()).find(|at| result[*at] != sum[*at]) {
                panic!(
                    "lane {lane} world_size {world_size} rank {rank} {case:?}: byte {at} is {:#x}, not {:#x}",
                    result[at], sum[at]
                );
            }
            assert_eq!(result.len(), sum.len());
            let algorithm = algorithm(lane, sum.len(), world_size);
            assert_eq!(reduction.algorithm, algorithm, "{case:?}");
        }
    });
}

#[test]
fn small_worlds_equal_the_reference() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let daemon = daemon(&[]);
    for world_size in 1..=5 {
        conform(world_size, &cases(world_size), daemon.socket());
    }
}

#[test]
fn large_worlds_equal_the_reference() {
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let daemon = daemon(&[]);
    for world_size in [8, 16] {
        conform(world_size, &cases(world_size), daemon.socket());
    }
}

/// A length that is cut into chunks, with threads that share it whatever the machine has.
#[test]
fn reductions_shared_by_threads_equal_the_reference() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_HOST__REDUCE_THREADS", "5")]);
    let cases: Vec<Case> = [
        (Dtype::Bf16, Op::Sum),
        (Dtype::F16, Op::Prod),
        (Dtype::I64, Op::Max),
    ]
    .into_iter()
    .zip([600_001, 777_777, 130_003])
    .map(|((dtype, op), num_elems)| Case {
        dtype,
        op,
        num_elems,
        in_place: num_elems % 2 == 0,
        skew: 1,
    })
    .collect();
    conform(3, &cases, daemon.socket());
}

/// The same bits from processes as from threads.
#[test]
fn worker_processes_equal_the_reference() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for world_size in [2, 3] {
        let name = format!("processes-{world_size}");
        let mut workers = Worker::start_all(daemon.socket(), &name, world_size);
        for (dtype, op, num_elems) in [
            (Dtype::Bf16, Op::Sum, 21_504),
            (Dtype::F32, Op::Avg, 1001),
            (Dtype::F64, Op::Min, 7),
            (Dtype::F16, Op::Prod, 400_003),
            (Dtype::I32, Op::Sum, 0),
        ] {
            for worker in &mut workers {
                worker.tell(&format!("hash {dtype} {op} {num_elems} 5"));
            }
            let (_, sum) = expected(dtype, op, num_elems, 5, world_size);
            for worker in &mut workers {
                assert_eq!(worker.answer(), format!("hash {}", hash(&sum)));
            }
        }
    }
}

/// The same call, many times, gives the same bits: no dependence on who calls first.
#[test]
fn repeats_are_identical() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let (tensors, sum) = expected(Dtype::F32, Op::Sum, 4099, 11, 4);
    for lane in LANES {
        ranks(4, |rank| {
            let communicator = join(daemon.socket(), "repeats", lane, rank, 4);
            for _ in 0..50 {
                let own = &tensors[rank as usize];
                let (result, _) =
                    reduce_any(&communicator, Dtype::F32, Op::Sum, own, 0, true).unwrap();
                assert!(result == sum);
            }
        });
    }
}

fn refused(result: Result<(Vec<u8>, allreduce_client::Reduction), AllReduceError>) {
    match result {
        Err(AllReduceError::Refused(refused)) => {
            assert_eq!(refused.code, tonic::Code::InvalidArgument);
            assert_eq!(refused.kind, ErrorCode::Refused);
            assert!(refused.message.contains("avg"), "{refused}");
        }
        other => panic!("{:?}", other.map(|(_, reduction)| reduction)),
    }
}

/// Integers have no average: every rank is told, and the communicator goes on.
#[test]
fn integer_avg_is_refused_on_every_rank() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let every_rank = |lane: Lane, rank: u32| {
        let communicator: Communicator = join(daemon.socket(), "avg", lane, rank, 3);
        for dtype in [Dtype::I32, Dtype::I64] {
            let own = tensor(dtype, 5, 1, rank);
            refused(reduce_any(&communicator, dtype, Op::Avg, &own, 0, true));
            let (_, sum) = expected(dtype, Op::Sum, 5, 1, 3);
            let (result, _) = reduce_any(&communicator, dtype, Op::Sum, &own, 0, true).unwrap();
            assert!(result == sum);
        }
        assert_eq!(communicator.epoch(), 1);
    };
    for lane in LANES {
        ranks(3, |rank| every_rank(lane, rank));
    }
}

/// A worker's own memory is reduced as well as an allocated buffer, in and out.
#[test]
fn registered_memory_equals_the_reference() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    // The longer ones go piece by piece through the staging of lane delegated, one that is no multiple of its length.
    for num_elems in [2048, 64 << 10, 555_555] {
        let (tensors, sum) = expected(Dtype::Bf16, Op::Sum, num_elems, 3, 3);
        let every_rank = |lane: Lane, rank: u32| {
            let name = format!("registered-{num_elems}");
            let communicator = join(daemon.socket(), &name, lane, rank, 3);
            let len_bytes = std::num::NonZeroUsize::new(2 * num_elems).unwrap();
            let memory = allreduce_client::Memory::create(len_bytes).unwrap();
            let mut registered = communicator
                .register::<allreduce_client::bf16>(memory)
                .unwrap();
            for _ in 0..3 {
                harness::bits::write(registered.as_mut_slice(), &tensors[rank as usize]);
                // Rank 0's tensor is in its arena.
                if rank == 0 {
                    let (result, _) =
                        reduce_any(&communicator, Dtype::Bf16, Op::Sum, &tensors[0], 0, true)
                            .unwrap();
                    assert!(result == sum);
                } else {
                    registered = communicator.all_reduce(registered, Op::Sum).unwrap();
                    assert!(harness::bits::read(registered.as_slice()) == sum);
                }
            }
            let memory = registered.into_memory().unwrap();
            assert_eq!(memory.len_bytes(), len_bytes);
        };
        for lane in LANES {
            ranks(3, |rank| every_rank(lane, rank));
        }
    }
}

/// Each algorithm of lane delegated, whatever the plan would choose, and a refusal of those that it has not.
#[test]
fn algorithms_asked_for_equal_the_reference() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let every_rank = |rank: u32| {
        let communicator = join(daemon.socket(), "asked", Lane::Delegated, rank, 3);
        for num_elems in [0, 1, 15, 16, 17, 50_000, 300_001] {
            let (tensors, sum) = expected(Dtype::F32, Op::Sum, num_elems, 8, 3);
            for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
                for _ in 0..3 {
                    let mut buffer = communicator.allocate::<f32>(num_elems).unwrap();
                    harness::bits::write(buffer.as_mut_slice(), &tensors[rank as usize]);
                    let options = AllReduceOptions::default().algorithm(algorithm);
                    let (buffer, reduction) = communicator
                        .all_reduce_with(buffer, Op::Sum, options)
                        .unwrap();
                    assert_eq!(reduction.algorithm, algorithm);
                    assert!(harness::bits::read(buffer.as_slice()) == sum, "{num_elems}");
                }
            }
        }
        let buffer = communicator.allocate::<f32>(3).unwrap();
        let options = AllReduceOptions::default().algorithm(Algorithm::OneShotChunked);
        let error = communicator
            .all_reduce_with(buffer, Op::Sum, options)
            .unwrap_err();
        let AllReduceError::Refused(refused) = &error.error else {
            panic!("{error:?}");
        };
        assert_eq!(refused.kind, ErrorCode::Refused);
        assert!(error.buffers.is_some());
    };
    ranks(3, every_rank);
}
