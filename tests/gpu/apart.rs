//! GPUs that cannot reach each other's memory, as the daemon is told to take these for: the executor reduces through host
//! memory and by copy engines, and says so; what needs peer access is refused with why.

use crate::harness::bits::expected;
use crate::harness::daemon;
use crate::rank::{JOIN_TIMEOUT, Rank, gpu_of, gpus, join_all, on_each, options, reduce_well};
use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::cuda::Device;
use allreduce_client::{
    Algorithm, AllReduceError, AllReduceOptions, Backend, Dtype, JoinError, JoinOptions, Lane, Op,
};
use allreduce_contract::v1::ErrorCode;
use std::path::Path;

/// Has the daemon take GPUs for unable to reach each other, also several ranks' one GPU.
pub const NO_PEER_ACCESS: (&str, &str) = ("ALLREDUCED_CUDA__ASSUME_NO_PEER_ACCESS", "true");

/// Joins two ranks by the lanes that are named.
fn join_by(
    socket: &Path,
    name: &str,
    devices: &[Device],
    lanes: &[Lane],
) -> Vec<Result<Communicator, JoinError>> {
    crate::harness::ranks(2, |rank| {
        let options = JoinOptions::new(name, rank, 2)
            .device(gpu_of(devices, rank).clone())
            .lanes(lanes)
            .timeout(JOIN_TIMEOUT);
        Client::connect(socket).unwrap().join(options)
    })
}

fn is_not_eligible(joined: Result<Communicator, JoinError>, words: &[&str]) {
    let Err(JoinError::Refused(refused)) = joined else {
        panic!("{:?}", joined.err());
    };
    println!("{refused}");
    assert_eq!(refused.kind, ErrorCode::NotEligible);
    for word in words {
        assert!(refused.message.contains(word), "no {word:?} in {refused}");
    }
}

/// Reduces `num_elems` halves in place, and checks every bit; by which algorithm that was.
fn reduce(rank: &Rank, num_elems: usize, asked: Option<Algorithm>) -> Algorithm {
    let kind = (Dtype::Bf16, Op::Avg);
    let (number, world_size) = (rank.communicator.rank(), rank.communicator.world_size());
    let (tensors, average) = expected(kind.0, kind.1, num_elems, 11, world_size);
    let buffer = rank.communicator.allocate_device(average.len()).unwrap();
    let at = buffer.ptr();
    rank.upload(rank.stream(), at, &tensors[number as usize]);
    let options = AllReduceOptions {
        algorithm: asked,
        ..AllReduceOptions::default()
    };
    let reduction = rank
        .call(rank.stream(), [at, at], num_elems, kind, options)
        .unwrap();
    let found = rank.download(rank.stream(), at, average.len());
    rank.communicator.check().unwrap();
    assert!(found == average, "rank {number}: {num_elems} elements");
    reduction.algorithm
}

#[test]
fn ranks_without_peer_access_reduce_through_host_memory_and_say_so() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_PEER_ACCESS]);
    for world_size in [2, 3, 8] {
        let name = format!("apart-{world_size}");
        let joined = crate::harness::ranks(world_size, |rank| {
            let device = gpu_of(&devices, rank);
            // Any lane.
            let options = options(&name, rank, world_size, device)
                .lanes(Vec::new())
                .arena_len_bytes(8 << 20);
            Rank::join(daemon.socket(), options, device)
        });
        for rank in &joined {
            let reason = rank.communicator.lane_reason();
            assert_eq!(rank.communicator.lane(), Lane::Rpc, "{reason}");
            assert!(reason.contains("peer access"), "{reason}");
            let warnings = rank.communicator.warnings().join("\n");
            assert!(warnings.contains("through host memory"), "{warnings}");
            assert!(warnings.contains("assume_no_peer_access"), "{warnings}");
        }
        on_each(&joined, |rank| {
            // By the table of one GPU, or by what the links of several cost; the larger is more than one launch through host
            // memory would take.
            let ways = [Algorithm::HostStaged, Algorithm::CopyEngineRing];
            for num_elems in [21_504, 1_048_583] {
                let algorithm = reduce(rank, num_elems, None);
                assert!(ways.contains(&algorithm), "{num_elems}: {algorithm}");
            }
            for algorithm in [Algorithm::CopyEngineRing, Algorithm::HostStaged] {
                for num_elems in [1, 7, 4099, 1_048_583] {
                    assert_eq!(reduce(rank, num_elems, Some(algorithm)), algorithm);
                }
            }
        });
        reduce_well(&joined);
        assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
    }
}

/// The epoch goes on after it.
#[test]
fn algorithms_that_need_peer_access_are_refused_without() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_PEER_ACCESS]);
    let joined = join_all(daemon.socket(), "algorithms", 2, &devices);
    for algorithm in Algorithm::ALL {
        if algorithm.backend() != Backend::Cuda
            || matches!(algorithm, Algorithm::HostStaged | Algorithm::CopyEngineRing)
        {
            continue;
        }
        on_each(&joined, |rank| {
            is_refused(rank, algorithm, &["peer access", algorithm.name()]);
        });
    }
    reduce_well(&joined);
    assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
}

fn is_refused(rank: &Rank, algorithm: Algorithm, words: &[&str]) {
    let at = rank.scratch.ptr();
    let options = AllReduceOptions::default().algorithm(algorithm);
    match rank.call(rank.stream(), [at, at], 8, (Dtype::F32, Op::Sum), options) {
        Err(AllReduceError::Refused(refused)) => {
            assert_eq!(refused.kind, ErrorCode::Refused, "{refused:?}");
            for word in words {
                assert!(refused.message.contains(word), "no {word:?} in {refused}");
            }
        }
        other => panic!("{algorithm}: {other:?}"),
    }
}

#[test]
fn lanes_that_need_peer_access_are_refused_without() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_PEER_ACCESS]);
    for lane in [Lane::Delegated, Lane::Resident] {
        let name = format!("asked-{lane}");
        for refused in join_by(daemon.socket(), &name, &devices, &[lane]) {
            is_not_eligible(refused, &["peer access", lane.name()]);
        }
    }
    // Who names lane rpc too gets that.
    let both = [Lane::Delegated, Lane::Rpc];
    let joined = join_by(daemon.socket(), "both", &devices, &both);
    for joined in &joined {
        let lane = joined.as_ref().map(Communicator::lane);
        assert!(matches!(lane, Ok(Lane::Rpc)), "{lane:?}");
    }
}

#[test]
fn without_windows_in_host_memory_the_pair_is_refused() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_PEER_ACCESS, ("ALLREDUCED_CUDA__HOST_STAGED", "never")]);
    for refused in join_by(daemon.socket(), "never", &devices, &[Lane::Rpc]) {
        let words = ["ranks 0", "and 1", "peer access", "cuda.host_staged"];
        is_not_eligible(refused, &words);
    }
}

/// What this communicator has not, though the backend has: refused with what to do.
#[test]
fn algorithms_that_are_not_to_be_had_here_are_refused() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    // One GPU reaches itself.
    let joined = join_all(daemon.socket(), "islands", 3, &devices[..1]);
    on_each(&joined, |rank| {
        is_refused(rank, Algorithm::Hierarchical, &["islands", "3 ranks"]);
        is_refused(rank, Algorithm::HostStaged, &["cuda.host_staged"]);
        assert_eq!(
            reduce(rank, 4099, Some(Algorithm::CopyEngineRing)),
            Algorithm::CopyEngineRing
        );
    });
    reduce_well(&joined);
    assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
}
