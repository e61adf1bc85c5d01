//! Deaths: of workers, executors and the supervisor, with real processes and kill -9.
//!
//! Survivors get a typed error that names the rank, soon; the communicator forms again without a restart
//! of the daemon; nobody else notices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::{AllReduceError, Op};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::{ErrorCode, ListClientsRequest};
use harness::raw::{
    block_on, dial, executor_pid, hello, info, open, refused, refused_hello, try_open,
};
use harness::worker::Worker;
use harness::{
    Scratch, Serve, daemon, eventually, is_alive, join_all, options, reduce_one, send_signal,
    watchdog,
};
use nix::sys::signal::Signal;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[test]
fn worker_entry() {
    harness::worker::run_if_asked();
}

/// All join at the same time; the epoch they form.
fn join_again<'a>(workers: impl IntoIterator<Item = &'a mut Worker>, epoch: u64) {
    let mut workers: Vec<_> = workers.into_iter().collect();
    for worker in &mut workers {
        worker.tell("join");
    }
    for worker in &mut workers {
        assert_eq!(worker.answer(), format!("joined {epoch}"));
    }
}

fn all_reduce(workers: &mut [Worker]) {
    for worker in &mut *workers {
        worker.tell("reduce");
    }
    for worker in workers {
        assert_eq!(worker.answer(), "reduced");
    }
}

fn start_traffic(workers: &mut [Worker]) {
    for worker in &mut *workers {
        worker.tell("traffic");
    }
    for worker in workers {
        assert_eq!(worker.answer(), "running");
    }
}

/// Broken by a survivor that hangs until its deadline (30 s here), by an error that does not name the
/// rank, or by an epoch that does not form again.
#[test]
fn survivors_of_a_killed_worker_are_told_and_form_again() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let mut workers = Worker::start_all(daemon.socket(), "killed", 4);
    let pid = executor_pid(daemon.socket(), "killed");
    for (round, victim) in (1..).zip([2_usize, 0]) {
        start_traffic(&mut workers);
        workers[victim].kill_hard();
        for (rank, worker) in workers.iter_mut().enumerate() {
            if rank != victim {
                let answer = worker.answer();
                let expected = format!(
                    "ended over rank=Some({victim}) epoch={round} epoch {round} is over: rank {victim} is gone"
                );
                assert!(answer.starts_with(&expected), "rank {rank}: {answer}");
            }
        }
        let rank = u32::try_from(victim).unwrap();
        workers[victim] = Worker::start(daemon.socket(), "killed", rank, 4);
        join_again(&mut workers, round + 1);
        all_reduce(&mut workers);
    }
    assert_eq!(executor_pid(daemon.socket(), "killed"), pid);
    assert_eq!(info(daemon.socket(), "killed").unwrap().incarnation, 1);
}

/// A rank that stands still is gone once its heartbeats have stopped for the configured time; calls end
/// then, long before their deadline. When it goes on, it learns that it is out, and may join again.
/// Broken by counting only connections, and by an error to the late one that does not say "join again".
#[test]
fn a_stopped_worker_is_dropped_and_may_come_back() {
    let _watchdog = watchdog();
    let daemon = daemon(&[
        ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_INTERVAL_MS", "100"),
        ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_TIMEOUT_MS", "1500"),
        ("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "600000"),
    ]);
    let mut workers = Worker::start_all(daemon.socket(), "stopped", 3);
    start_traffic(&mut workers);
    workers[1].signal(Signal::SIGSTOP);
    for rank in [0, 2] {
        let answer = workers[rank].answer();
        let expected = "ended over rank=Some(1) epoch=1 epoch 1 is over: rank 1 is gone: its heartbeats stopped";
        assert!(answer.starts_with(expected), "{answer}");
    }
    workers[1].signal(Signal::SIGCONT);
    let answer = workers[1].answer();
    assert_eq!(answer.split(' ').nth(1), Some("over"), "{answer}");
    assert!(!answer.starts_with("lost"), "the executor lives: {answer}");
    join_again(&mut workers, 2);
    all_reduce(&mut workers);
}

/// While it computes, a worker stays a member: the heartbeats are the client crate's own thread's.
#[test]
fn a_worker_that_does_not_call_stays_a_member() {
    let _watchdog = watchdog();
    let daemon = daemon(&[
        ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_INTERVAL_MS", "50"),
        ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_TIMEOUT_MS", "1000"),
    ]);
    let communicators = join_all(daemon.socket(), "busy", 2);
    // Well beyond the heartbeat timeout. There is nothing to poll for: what is tested is that nothing
    // happens.
    std::thread::sleep(Duration::from_millis(2500));
    harness::reduce_well(&communicators);
    assert_eq!(communicators[0].epoch(), 1);
}

#[test]
fn a_worker_that_exits_or_leaves_is_named() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let mut workers = Worker::start_all(daemon.socket(), "exits", 2);
    all_reduce(&mut workers);
    workers[0].tell("reduce");
    workers[1].tell("exit");
    let answer = workers[0].answer();
    assert!(
        answer.contains("rank=Some(1)") && answer.contains("its connection ended"),
        "{answer}"
    );
    workers[1] = Worker::start(daemon.socket(), "exits", 1, 2);
    join_again(&mut workers, 2);
    workers[0].tell("reduce");
    assert_eq!(workers[1].ask("leave"), "left");
    let answer = workers[0].answer();
    assert!(
        answer.starts_with("ended over rank=Some(1) epoch=2 epoch 2 is over: rank 1 left"),
        "{answer}"
    );
    join_again(&mut workers, 3);
    all_reduce(&mut workers);
}

/// A rank that dies before the others have come frees its place.
#[test]
fn a_rank_that_dies_while_forming_can_be_replaced() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let mut first = Worker::start(daemon.socket(), "forming", 0, 2);
    first.tell("join");
    let joined = || {
        block_on(async {
            let request = ListClientsRequest {
                communicator: "forming".to_owned(),
            };
            let clients = AdminClient::new(dial(daemon.socket()).await)
                .list_clients(request)
                .await;
            clients.map_or(0, |list| list.into_inner().clients.len())
        })
    };
    eventually("rank 0 joins", || (joined() == 1).then_some(()));
    first.kill_hard();
    eventually("rank 0 is gone", || (joined() == 0).then_some(()));
    let mut workers = Worker::start_all(daemon.socket(), "forming", 2);
    all_reduce(&mut workers);
}

/// What health says of an executor, as it changes.
fn watch_executor(socket: &Path, name: &str) -> std::sync::mpsc::Receiver<ServingStatus> {
    let (sender, seen) = std::sync::mpsc::channel();
    let (socket, service) = (socket.to_owned(), format!("executor/{name}"));
    std::thread::spawn(move || {
        block_on(async {
            let channel =
                tonic::transport::Endpoint::from_shared(format!("unix://{}", socket.display()))
                    .unwrap()
                    .connect()
                    .await
                    .unwrap();
            let mut changes = HealthClient::new(channel)
                .watch(HealthCheckRequest { service })
                .await
                .unwrap()
                .into_inner();
            while let Ok(Some(change)) = changes.message().await {
                if sender.send(change.status()).is_err() {
                    return;
                }
            }
        });
    });
    seen
}

/// The executor is the fault domain: its death is its communicator's alone. Broken by a daemon that
/// dies with it, does not notice, or mixes up incarnations.
#[test]
fn a_killed_executor_is_replaced_and_others_go_on() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let victims = join_all(daemon.socket(), "victim", 2);
    let others = join_all(daemon.socket(), "other", 2);
    let (pid, other_pid) = (
        executor_pid(daemon.socket(), "victim"),
        executor_pid(daemon.socket(), "other"),
    );
    let old = block_on(open(daemon.socket(), "victim", 2));
    let health = watch_executor(daemon.socket(), "victim");
    let next = || health.recv_timeout(harness::SOON).unwrap();
    assert_eq!(next(), ServingStatus::Serving);

    // Rank 0 waits in a call when the executor dies.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| reduce_one(&victims[0]));
        eventually("rank 0 has called", || {
            let status = harness::run(&[
                "status",
                "--json",
                "--socket",
                daemon.socket().to_str().unwrap(),
            ]);
            let json = status.json();
            let victim = json["communicators"]
                .as_array()
                .unwrap()
                .iter()
                .find(|entry| entry["communicator"] == "victim")
                .unwrap()
                .clone();
            (victim["ranks"][0]["buffers"] == 1).then_some(())
        });
        send_signal(pid, Signal::SIGKILL);
        harness::reduce_well(&others);
        match waiting.join().unwrap() {
            Err(error @ AllReduceError::ExecutorLost(_)) => assert!(error.is_epoch_over()),
            other => panic!("{other:?}"),
        }
    });
    match reduce_one(&victims[1]) {
        Err(AllReduceError::ExecutorLost(_)) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(next(), ServingStatus::NotServing);
    assert_eq!(next(), ServingStatus::Serving);
    harness::reduce_well(&others);

    drop(victims);
    let again = join_all(daemon.socket(), "victim", 2);
    harness::reduce_well(&again);
    let now = info(daemon.socket(), "victim").unwrap();
    assert_eq!(now.incarnation, 2);
    assert_ne!(now.executor_pid, pid);
    // The old place is gone, and the old token opens nothing.
    assert!(!Path::new(&old.executor_socket).exists());
    assert!(!Path::new(&old.companion_socket).exists());
    block_on(async {
        let mut opened = open(daemon.socket(), "victim", 2).await;
        assert_eq!(opened.incarnation, 2);
        opened.token.clone_from(&old.token);
        let status = refused_hello(&opened, hello(&opened, 0, 2)).await;
        refused(&status, Code::Unauthenticated, ErrorCode::BadToken, &[]);
    });
    assert_eq!(executor_pid(daemon.socket(), "other"), other_pid);
    assert!(others.iter().all(|joined| joined.epoch() == 1));
    harness::reduce_well(&others);
}

/// An executor that is killed again and again is started again and again.
#[test]
fn an_executor_survives_many_deaths() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    for incarnation in 1..=4 {
        let communicators = join_all(daemon.socket(), "often", 2);
        harness::reduce_well(&communicators);
        assert_eq!(
            info(daemon.socket(), "often").unwrap().incarnation,
            incarnation
        );
        let pid = executor_pid(daemon.socket(), "often");
        send_signal(pid, Signal::SIGKILL);
        eventually("the supervisor reaps it", || {
            (!Path::new(&format!("/proc/{pid}")).exists()).then_some(())
        });
    }
}

/// The data path does not need the supervisor: its ranks finish, then the executor exits. The next
/// daemon needs no manual step. Broken by an executor that dies with its supervisor, or outlives its
/// ranks, or by leftovers that are in the way.
#[test]
fn a_killed_supervisor_leaves_ranks_working_and_nothing_behind() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let mut first = Serve::start(&socket, &[], &[]);
    let mut workers = Worker::start_all(&socket, "orphaned", 2);
    let old = info(&socket, "orphaned").unwrap();
    first.kill_hard();
    all_reduce(&mut workers);
    assert!(is_alive(old.executor_pid));

    let _second = Serve::start(&socket, &[], &[]);
    // The orphan's socket is alive, so it was left alone; the new daemon's communicators are its own.
    assert!(Path::new(&old.executor_socket).exists());
    let mut others = Worker::start_all(&socket, "orphaned", 2);
    all_reduce(&mut others);
    all_reduce(&mut workers);
    assert_ne!(executor_pid(&socket, "orphaned"), old.executor_pid);

    for worker in &mut workers {
        worker.tell("leave");
    }
    eventually("the orphan exits", || {
        (!is_alive(old.executor_pid)).then_some(())
    });
    assert!(!Path::new(&old.executor_socket).exists());
    all_reduce(&mut others);
}

/// Supervisor and executor killed together: the next start removes what they left, and nothing else.
#[test]
fn leftovers_of_a_killed_daemon_are_removed_at_the_next_start() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let executors = scratch.path("d.sock.d");
    let mut first = Serve::start(&socket, &[], &[]);
    let _workers = Worker::start_all(&socket, "left", 2);
    let pid = executor_pid(&socket, "left");
    first.signal(Signal::SIGSTOP);
    send_signal(pid, Signal::SIGKILL);
    first.kill_hard();
    eventually("the executor is gone", || (!is_alive(pid)).then_some(()));
    let names = || {
        let mut names: Vec<_> = std::fs::read_dir(&executors)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names().len(), 2, "what there is to remove: {:?}", names());
    // A process counts as dead when its first thread is; its files close with the last.
    eventually("its socket is dead", || {
        let sockets = names().into_iter().filter(|name| name.ends_with(".sock"));
        let mut paths = sockets.map(|name| executors.join(name));
        paths
            .all(|path| UnixStream::connect(path).is_err())
            .then_some(())
    });
    std::fs::write(executors.join("not-ours"), "x").unwrap();
    let _second = Serve::start(&socket, &[], &[]);
    assert_eq!(names(), ["not-ours"]);
    let communicators = join_all(&socket, "left", 2);
    harness::reduce_well(&communicators);
}

/// Clients that hold a path, not a connection, outlive a restart of the daemon.
#[test]
fn clients_redial_a_restarted_daemon() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let mut first = Serve::start(&socket, &[], &[]);
    let client = allreduce_client::blocking::Client::connect(&socket).unwrap();
    drop(client.join(options("restart", 0, 1)).unwrap());
    first.kill_hard();
    std::thread::scope(|scope| {
        // It dials a dead socket until the new daemon is there.
        let joining = scope.spawn(|| client.join(options("restart", 0, 1)));
        let _second = Serve::start(&socket, &[], &[]);
        let joined = joining.join().unwrap().unwrap();
        reduce_one(&joined).unwrap();
    });
}

/// A dropped future does not take the call back: the others count on it. Its buffer comes back when
/// the executor is done with it. Broken by a buffer that is reused, or kept, too early or for ever.
#[test]
fn a_dropped_future_goes_on_and_gives_its_buffer_back() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let socket = daemon.socket();
    block_on(async {
        let client = allreduce_client::Client::connect(socket).await.unwrap();
        let (own, other) = tokio::join!(
            client.join(options("dropped", 0, 2)),
            client.join(options("dropped", 1, 2))
        );
        let (own, other) = (own.unwrap(), other.unwrap());
        for round in 0..5 {
            let mut buffer = own.allocate::<i32>(100).await.unwrap();
            buffer.as_mut_slice().fill(40 + round);
            let call = own.all_reduce(buffer, Op::Sum);
            let dropped = tokio::time::timeout(Duration::from_millis(30), call).await;
            assert!(dropped.is_err(), "nobody else has called");
            // The executor may still write the buffer.
            assert!(own.wait_settled(Duration::from_millis(1)).is_err());
            let mut buffer = other.allocate::<i32>(100).await.unwrap();
            buffer.as_mut_slice().fill(2);
            let theirs = other.all_reduce(buffer, Op::Sum).await.unwrap();
            assert_eq!(theirs.as_slice(), [42 + round; 100]);
            own.wait_settled(harness::SOON).unwrap();
        }
        // The answers reach this side's tasks, and the buffers go back.
        let mut admin = AdminClient::new(dial(socket).await);
        let deadline = tokio::time::Instant::now() + harness::SOON;
        loop {
            let list = admin.list_clients(ListClientsRequest::default()).await;
            let clients = list.unwrap().into_inner().clients;
            assert_eq!(clients.len(), 2);
            if clients.iter().all(|client| client.buffers == 0) {
                break;
            }
            assert!(tokio::time::Instant::now() < deadline, "{clients:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Its memory is free for the next one.
        let (mine, theirs) = (own.allocate::<i32>(100), other.allocate::<i32>(100));
        let (mine, theirs) = (mine.await.unwrap(), theirs.await.unwrap());
        let (mine, theirs) = tokio::join!(
            own.all_reduce(mine, Op::Max),
            other.all_reduce(theirs, Op::Max)
        );
        assert_eq!(mine.unwrap().as_slice(), theirs.unwrap().as_slice());
    });
}

/// A daemon that cannot start executors says so, typed, and goes on serving what it has.
#[test]
fn draining_daemons_open_nothing() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let serve = Serve::start(&socket, &[], &[]);
    let mut workers = Worker::start_all(&socket, "draining", 2);
    serve.signal(Signal::SIGTERM);
    for worker in &mut workers {
        assert_eq!(worker.ask("draining"), "draining");
    }
    let status = block_on(try_open(&socket, "new", 1, 0)).unwrap_err();
    refused(
        &status,
        Code::Unavailable,
        ErrorCode::Unavailable,
        &["draining"],
    );
    // What is joined may finish.
    all_reduce(&mut workers);
}
