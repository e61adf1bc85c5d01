//! What is said of a communicator on a GPU: warnings, status, statistics, health; and backend host beside it.

use crate::harness::raw::{block_on, dial, info};
use crate::harness::{self, daemon};
use crate::rank::{JOIN_TIMEOUT, gpu_of, gpus, join_all, options, reduce_well};
use allreduce_client::blocking::Client;
use allreduce_client::{Backend, BufferError, JoinError, JoinOptions};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::{self, ErrorCode, GetStatsRequest};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Without MPS every change between worker and executor costs: whoever looks is told, and what to do.
#[test]
fn what_makes_it_slow_is_said_everywhere() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let socket = daemon.socket().to_str().unwrap();
    let joined = join_all(daemon.socket(), "slow", 2, &devices);
    reduce_well(&joined);
    let has_mps = gpu_of(&devices, 0).has_mps();
    // Of tests/gpu/run, which has started it.
    assert!(has_mps || std::env::var_os("ALLREDUCED_TEST_EXPECT_MPS").is_none());
    let warnings = joined[0].communicator.warnings();
    println!("MPS: {has_mps}; warnings: {warnings:#?}");
    assert_eq!(joined[1].communicator.warnings(), warnings);
    if has_mps {
        assert!(warnings.is_empty());
    } else {
        let says = |warning: &String| {
            warning.contains("no MPS")
                && warning.contains(gpu_of(&devices, 0).uuid())
                && warning.contains("nvidia-cuda-mps-control")
        };
        assert!(warnings.iter().any(says));
    }

    let text = harness::run(&["status", "--socket", socket]);
    println!("{}", text.stdout);
    assert!(text.status.success(), "{}", text.stderr);
    let json = harness::run(&["status", "--json", "--socket", socket]).json();
    let shown = &json["communicators"][0];
    assert_eq!(shown["backend"], "cuda");
    assert_eq!(shown["communicator"], "slow");
    assert_eq!(shown["warnings"], serde_json::json!(warnings));
    for warning in warnings {
        assert!(text.stdout.contains(warning.as_str()));
    }

    let executor = info(daemon.socket(), "slow").unwrap().executor_socket;
    let (stats, health) = block_on(async {
        let request = GetStatsRequest::default();
        let stats = AdminClient::new(dial(daemon.socket()).await)
            .get_stats(request)
            .await
            .unwrap()
            .into_inner();
        let request = HealthCheckRequest {
            service: "executor/slow/mps".to_owned(),
        };
        let health = HealthClient::new(dial(&executor).await)
            .check(request)
            .await
            .unwrap()
            .into_inner();
        (stats, health.status())
    });
    let stats = &stats.communicators[0];
    assert_eq!(stats.backend(), v1::Backend::Cuda);
    assert_eq!(stats.warnings, warnings);
    assert!(!stats.stale);
    // Two windows of 4 MiB of arena each, and what the kernels need.
    assert!(stats.window_bytes > 8 << 20, "{}", stats.window_bytes);
    let operations: u64 = stats.reductions.iter().map(|row| row.operations).sum();
    assert_eq!(operations, 1);
    let expected = if has_mps {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    assert_eq!(health, expected);
}

/// Backend host works on the same machine, beside backend cuda; what belongs to one is refused by the other.
#[test]
fn backend_host_works_beside_it() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let on_gpu = join_all(daemon.socket(), "gpu", 2, &devices);
    let client = || Client::connect(daemon.socket()).unwrap();
    let on_host = harness::ranks(2, |rank| {
        // Asked for, it wins over a device.
        let options = options("host", rank, 2, gpu_of(&devices, rank)).backend(Backend::Host);
        client().join(options).unwrap()
    });
    for _ in 0..3 {
        harness::reduce_well(&on_host);
        reduce_well(&on_gpu);
    }
    assert_eq!(on_host[0].backend(), Backend::Host);
    assert_eq!(on_host[0].device(), None);
    assert!(on_host[0].warnings().is_empty());
    match on_host[0].allocate_device(64) {
        Err(BufferError::WrongBackend(Backend::Host)) => {}
        other => panic!("{other:?}"),
    }
    match on_gpu[0].communicator.allocate::<f32>(64) {
        Err(BufferError::WrongBackend(Backend::Cuda)) => {}
        other => panic!("{:?}", other.map(|_| ())),
    }
    // A rank that brings no GPU to a communicator on one, and one that does to one on the host.
    let bare = JoinOptions::new("gpu", 0, 2).timeout(JOIN_TIMEOUT);
    let brings = options("host", 0, 2, gpu_of(&devices, 0)).backend(Backend::Cuda);
    for (options, words) in [(bare, "cuda, not host"), (brings, "host, not cuda")] {
        match client().join(options) {
            Err(JoinError::Refused(refused)) => {
                assert_eq!(refused.kind, ErrorCode::CommunicatorDiffers);
                assert!(refused.message.contains(words), "{refused}");
            }
            other => panic!("{other:?}"),
        }
    }
    harness::reduce_well(&on_host);
    reduce_well(&on_gpu);
}

/// Asked for without a device, backend cuda takes the first; a device alone is enough to get it.
#[test]
fn a_rank_gets_a_gpu_without_naming_one() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let client = Client::connect(daemon.socket()).unwrap();
    let options = JoinOptions::new("default", 0, 1)
        .backend(Backend::Cuda)
        .arena_len_bytes(1 << 20)
        .timeout(JOIN_TIMEOUT);
    let communicator = client.join(options).unwrap();
    assert_eq!(communicator.backend(), Backend::Cuda);
    assert_eq!(communicator.device(), Some(&devices[0]));
    communicator.leave();
}
