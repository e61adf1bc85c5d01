//! What an operator can see: health, reflection, statistics, `allreduced status`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::{AllReduceError, Dtype, Op};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::{self, ErrorCode, GetStatsRequest, GetVersionRequest};
use harness::bits::{reduce_any, tensor};
use harness::raw::{dial, executor_pid, open};
use harness::{Scratch, daemon, join_all, ranks, run, send_signal, watchdog};
use nix::sys::signal::Signal;
use std::path::Path;
use std::time::Duration;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

fn asked(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.to_owned(),
    }
}

#[tokio::test]
async fn health_is_checked_and_watched() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__IDLE_TIMEOUT_MS", "1000")]);
    let mut health = HealthClient::new(dial(daemon.socket()).await);
    for service in ["", "control"] {
        let status = health.check(asked(service)).await.unwrap().into_inner();
        assert_eq!(status.status(), ServingStatus::Serving, "{service:?}");
        let mut changes = health.watch(asked(service)).await.unwrap().into_inner();
        let first = changes.message().await.unwrap().unwrap();
        assert_eq!(first.status(), ServingStatus::Serving, "{service:?}");
    }
    let unknown = health.check(asked("executor/none")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);

    // A watch may come before the communicator, and outlives it.
    let mut changes = health
        .watch(asked("executor/seen"))
        .await
        .unwrap()
        .into_inner();
    let mut next = async || {
        let change = tokio::time::timeout(harness::SOON, changes.message()).await;
        change.unwrap().unwrap().unwrap().status()
    };
    assert_eq!(next().await, ServingStatus::ServiceUnknown);
    let opened = open(daemon.socket(), "seen", 1).await;
    let mut state = next().await;
    if state == ServingStatus::NotServing {
        // While it started.
        state = next().await;
    }
    assert_eq!(state, ServingStatus::Serving);
    let mut own = HealthClient::new(dial(&opened.executor_socket).await);
    for service in ["", "executor/seen"] {
        let status = own.check(asked(service)).await.unwrap().into_inner();
        assert_eq!(status.status(), ServingStatus::Serving, "{service:?}");
    }
    // Nobody joins: it goes.
    assert_eq!(next().await, ServingStatus::ServiceUnknown);
}

#[tokio::test]
async fn health_is_not_serving_while_draining() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let serve = harness::Serve::start(&socket, &[], &[]);
    let _ranks = harness::raw::join_all(&socket, "drained", 1).await;
    let mut health = HealthClient::new(dial(&socket).await);
    let mut changes = health.watch(asked("")).await.unwrap().into_inner();
    let first = changes.message().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    serve.signal(Signal::SIGTERM);
    let second = changes.message().await.unwrap().unwrap();
    assert_eq!(second.status(), ServingStatus::NotServing);
    let control = health.check(asked("control")).await.unwrap().into_inner();
    assert_eq!(control.status(), ServingStatus::NotServing);
}

macro_rules! list_services {
    ($version:ident, $channel:expr) => {{
        use tonic_reflection::pb::$version::ServerReflectionRequest;
        use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
        let ask = |message| ServerReflectionRequest {
            host: String::new(),
            message_request: Some(message),
        };
        let requests = tokio_stream::iter([
            ask(MessageRequest::ListServices(String::new())),
            ask(MessageRequest::FileContainingSymbol(
                "allreduced.v1.Admin".to_owned(),
            )),
        ]);
        let mut answers = ServerReflectionClient::new($channel)
            .server_reflection_info(requests)
            .await
            .unwrap()
            .into_inner();
        let mut next = async || {
            let answer = answers.next().await.unwrap().unwrap();
            answer.message_response.unwrap()
        };
        let mut names = match next().await {
            MessageResponse::ListServicesResponse(list) => list
                .service
                .into_iter()
                .map(|service| service.name)
                .collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        names.sort();
        match next().await {
            MessageResponse::FileDescriptorResponse(files) => {
                assert!(!files.file_descriptor_proto.is_empty());
            }
            other => panic!("{other:?}"),
        }
        names
    }};
}

/// Broken by a service that is served and not described: grpcurl would not find it.
#[tokio::test]
async fn both_versions_of_reflection_list_the_services() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let opened = open(daemon.socket(), "reflected", 1).await;
    let common = ["allreduced.v1.Admin", "grpc.health.v1.Health"];
    for (socket, services) in [
        (daemon.socket(), &["allreduced.v1.Control"][..]),
        (
            Path::new(&opened.executor_socket),
            &[
                "allreduced.v1.Buffers",
                "allreduced.v1.Collectives",
                "allreduced.v1.Communicator",
            ],
        ),
    ] {
        let v1 = list_services!(v1, dial(socket).await);
        let v1alpha = list_services!(v1alpha, dial(socket).await);
        for name in services.iter().chain(&common) {
            assert!(v1.iter().any(|listed| listed == name), "{name}: {v1:?}");
            assert!(
                v1alpha.iter().any(|listed| listed == name),
                "{name}: {v1alpha:?}"
            );
        }
    }
}

#[tokio::test]
async fn versions_are_told() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let version = AdminClient::new(dial(daemon.socket()).await)
        .get_version(GetVersionRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(version.version, allreduce_contract::VERSION);
    assert_eq!(version.abi, allreduce_contract::window::ABI_VERSION);
    assert_eq!(version.pid, daemon.pid());
}

fn status_json(socket: &Path) -> serde_json::Value {
    let ran = run(&["status", "--json", "--socket", socket.to_str().unwrap()]);
    assert!(ran.status.success(), "{}", ran.stderr);
    ran.json()
}

/// The figures are those of what was done. Broken by counting a reduction once for each rank, or not
/// counting errors.
#[test]
fn status_shows_what_is_joined_and_done() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let socket = daemon.socket();
    let empty = status_json(socket);
    assert_eq!(empty["schema_version"], 1);
    assert_eq!(empty["pid"], daemon.pid());
    assert_eq!(empty["abi"], allreduce_contract::window::ABI_VERSION);
    assert_eq!(empty["socket"], socket.display().to_string());
    assert_eq!(empty["communicators"], serde_json::json!([]));

    let communicators = join_all(socket, "shown", 2);
    let held = communicators[1].allocate::<f32>(100).unwrap();
    ranks(2, |rank| {
        let communicator = &communicators[rank as usize];
        let own = tensor(Dtype::Bf16, 1000, 1, rank);
        for _ in 0..3 {
            reduce_any(communicator, Dtype::Bf16, Op::Sum, &own, 0, true).unwrap();
        }
        // 600,000 bytes of each rank are above the bound of inline reductions.
        let own = tensor(Dtype::F32, 150_000, 1, rank);
        reduce_any(communicator, Dtype::F32, Op::Max, &own, 0, true).unwrap();
        let own = tensor(Dtype::I32, 1, 1, rank);
        let refused = reduce_any(communicator, Dtype::I32, Op::Avg, &own, 0, true);
        assert!(matches!(refused, Err(AllReduceError::Refused(_))));
    });
    // The buffers dropped above are on their way back.
    let shown = harness::eventually("the buffers are given back", || {
        let json = status_json(socket);
        let shown = json["communicators"][0].clone();
        (shown["ranks"][0]["buffers"] == 0 && shown["ranks"][1]["buffers"] == 1).then_some(shown)
    });
    for (key, value) in [
        ("communicator", serde_json::json!("shown")),
        ("world_size", 2.into()),
        ("serving", true.into()),
        ("stale", false.into()),
        ("backend", "host".into()),
        ("lane", "rpc".into()),
        ("incarnation", 1.into()),
        ("epoch", 1.into()),
        ("executor_pid", executor_pid(socket, "shown").into()),
        ("window_bytes", (2 * ((1 << 20) + 4096)).into()),
        (
            "reductions",
            serde_json::json!([
                {
                    "dtype": "f32", "op": "max", "lane": "rpc", "algorithm": "one_shot_chunked",
                    "operations": 1, "bytes": 600_000
                },
                {
                    "dtype": "bf16", "op": "sum", "lane": "rpc", "algorithm": "one_shot",
                    "operations": 3, "bytes": 6000
                },
            ]),
        ),
        (
            "errors",
            serde_json::json!([{ "code": "refused", "count": 2 }]),
        ),
    ] {
        assert_eq!(shown[key], value, "{key}: {shown:#}");
    }
    assert_eq!(shown["reduction_us"]["count"], 4);
    assert_eq!(shown["skew_us"]["count"], 4);
    assert!(shown["executor_rss_bytes"].as_u64().unwrap() > 0);
    let times_last: u64 = (0..2)
        .map(|rank| {
            let shown = &shown["ranks"][rank];
            assert_eq!(shown["rank"], rank);
            assert_eq!(shown["joined"], true);
            assert_eq!(shown["pid"], std::process::id());
            assert_eq!(shown["operations"], 4);
            assert_eq!(shown["lateness_us"]["count"], 4);
            shown["times_last"].as_u64().unwrap()
        })
        .sum();
    assert_eq!(times_last, 4, "one rank of each reduction is the last");
    assert_eq!(shown["ranks"][1]["buffer_bytes"], 400);

    let ran = run(&["status", "--socket", socket.to_str().unwrap()]);
    for words in [
        "shown  serving  2 ranks  epoch 1  incarnation 1",
        "backend   host",
        "lane      rpc",
        "3 x bf16 sum by one_shot on rpc",
        "1 x f32 max by one_shot_chunked on rpc",
        "2 x refused",
        "rank 1",
    ] {
        assert!(ran.stdout.contains(words), "no {words:?} in {}", ran.stdout);
    }
    drop(held);

    // One rank leaves: it is shown as not joined, and the other as of an epoch that is over.
    let mut communicators = communicators.into_iter();
    let first = communicators.next().unwrap();
    first.leave();
    let shown = harness::eventually("rank 0 is gone", || {
        let shown = status_json(socket)["communicators"][0].clone();
        (shown["epoch"] == 2).then_some(shown)
    });
    assert_eq!(shown["ranks"][0]["joined"], false);
    assert_eq!(shown["ranks"][1]["joined"], false);
    assert_eq!(shown["lane"], serde_json::Value::Null);
    assert_eq!(shown["reductions"].as_array().unwrap().len(), 2);
}

/// An executor that does not answer delays the others' figures by its deadline at most, and is marked.
#[test]
fn an_executor_that_does_not_answer_is_stale() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let socket = daemon.socket();
    let frozen = join_all(socket, "frozen", 1);
    let moving = join_all(socket, "moving", 1);
    harness::reduce_well(&frozen);
    harness::reduce_well(&moving);
    let before = status_json(socket);
    assert_eq!(before["communicators"][0]["stale"], false);
    let pid = executor_pid(socket, "frozen");
    harness::remember_child(pid);
    send_signal(pid, Signal::SIGSTOP);
    let shown = status_json(socket);
    let text = run(&["status", "--socket", socket.to_str().unwrap()]);
    send_signal(pid, Signal::SIGCONT);
    harness::forget_child(pid);
    let [first, second] = shown["communicators"].as_array().unwrap().as_slice() else {
        panic!("{shown:#}");
    };
    assert_eq!(first["communicator"], "frozen");
    assert_eq!(first["stale"], true);
    // The last known figures.
    assert_eq!(first["reductions"][0]["operations"], 1);
    assert_eq!(second["stale"], false);
    assert!(text.stdout.contains("not answering"), "{}", text.stdout);
    harness::reduce_well(&frozen);
    assert_eq!(status_json(socket)["communicators"][0]["stale"], false);
}

/// Statistics over gRPC, for one communicator and for all.
#[tokio::test]
async fn stats_are_told_by_name_and_for_all() {
    let _watchdog = watchdog();
    let daemon = daemon(&[harness::raw::NO_HEARTBEATS]);
    let mut one = harness::raw::join_all(daemon.socket(), "one", 2).await;
    let _two = harness::raw::join_all(daemon.socket(), "two", 1).await;
    harness::raw::reduce_well(&mut one).await;
    let request = one[0].call();
    let mut twice = request;
    twice.sequence = 1;
    one[0].all_reduce(twice).await.unwrap_err();
    let mut admin = AdminClient::new(dial(daemon.socket()).await);
    let mut stats = async |communicator: &str| {
        let communicator = communicator.to_owned();
        let stats = admin.get_stats(GetStatsRequest { communicator }).await;
        stats.unwrap().into_inner().communicators
    };
    let names: Vec<String> = stats("")
        .await
        .into_iter()
        .map(|stats| stats.communicator)
        .collect();
    assert_eq!(names, ["one", "two"]);
    let own = stats("one").await;
    assert_eq!(own.len(), 1);
    let own = &own[0];
    assert_eq!(own.world_size, 2);
    assert_eq!(own.lane(), v1::Lane::Rpc);
    assert_eq!(own.reductions.len(), 1);
    assert_eq!(own.reductions[0].operations, 1);
    assert_eq!(own.reductions[0].bytes, 32);
    assert_eq!(own.errors.len(), 1);
    assert_eq!(own.errors[0].code(), ErrorCode::BadSequence);
    // The executor's own account is the same.
    let mut direct = AdminClient::new(dial(&one[0].opened.executor_socket).await);
    let direct = direct.get_stats(GetStatsRequest::default()).await;
    let direct = direct.unwrap().into_inner().communicators;
    assert_eq!(direct[0].reductions, own.reductions);
}

#[test]
fn status_without_a_daemon_says_how_to_start_one() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("nobody.sock");
    let ran = run(&["status", "--socket", socket.to_str().unwrap()]);
    assert_eq!(ran.status.code(), Some(69));
    assert!(ran.stdout.is_empty());
    assert!(ran.stderr.contains("allreduced serve"), "{}", ran.stderr);
    assert!(ran.stderr.contains(socket.to_str().unwrap()));
}

/// One client that neither reads nor stops does not delay the others.
#[tokio::test]
async fn a_client_that_does_not_read_delays_nobody() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let opened = open(daemon.socket(), "flood", 2).await;
    let flooding = harness::raw::RawRank::join(&opened, 0, 2).await;
    for nonce in 0..100_000 {
        let beat = v1::Heartbeat { nonce, ring: None };
        let message = v1::attach_request::Message::Heartbeat(beat);
        flooding.stream.send(message);
    }
    let other = harness::raw::join_all(daemon.socket(), "calm", 2).await;
    let mut other = other;
    for _ in 0..20 {
        harness::raw::reduce_well(&mut other).await;
    }
    // It lets its answers pile up, so it counts as gone, and its place is free again.
    let deadline = tokio::time::Instant::now() + harness::SOON;
    let mut admin = AdminClient::new(dial(daemon.socket()).await);
    loop {
        let request = v1::ListClientsRequest {
            communicator: "flood".to_owned(),
        };
        let clients = admin.list_clients(request).await.unwrap().into_inner();
        if clients.clients.is_empty() && clients.stale_communicators.is_empty() {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{clients:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
