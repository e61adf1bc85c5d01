//! Nothing accumulates: descriptors, mappings and processes return to where they were.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::{Lane, Memory, Op};
use harness::raw::{executor_pid, info};
use harness::worker::Worker;
use harness::{children_of, daemon, eventually, join, open_fds, reduce_one, watchdog};
use std::collections::BTreeSet;
use std::num::NonZeroUsize;

#[test]
fn worker_entry() {
    harness::worker::run_if_asked();
}

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    fds: usize,
    windows: usize,
    children: usize,
    threads: usize,
}

/// Mappings are counted by what they are of: the allocator's own come and go with its moods.
fn held(pid: u32) -> Held {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    Held {
        fds: open_fds(pid),
        windows: maps.lines().filter(|line| line.contains("/memfd:")).count(),
        children: children_of(pid).len(),
        threads: tasks.count(),
    }
}

/// All mappings, which may grow by what an allocator takes, not by one a cycle.
fn mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().count()
}

fn shm() -> BTreeSet<std::ffi::OsString> {
    // Without the directory there is nothing in it.
    std::fs::read_dir("/dev/shm").map_or_else(
        |_| BTreeSet::new(),
        |entries| entries.flatten().map(|entry| entry.file_name()).collect(),
    )
}

/// Waits until a process holds no more than before. It may hold less: a connection that was about to
/// close then has closed.
fn returns_to(what: &str, pid: u32, before: Held) {
    let deadline = std::time::Instant::now() + harness::SOON;
    loop {
        let now = held(pid);
        let back = now.fds <= before.fds
            && now.windows <= before.windows
            && now.children <= before.children
            && now.threads <= before.threads;
        if back {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{what}: {before:?} became {now:?}"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Broken by a window, a connection or a session that outlives its rank: one of each a cycle.
#[test]
fn joining_and_leaving_200_times_leaves_nothing() {
    let _watchdog = watchdog();
    join_and_leave(Lane::Rpc);
}

/// The same with the memory that a lane shares, which two ranks map of each other.
#[test]
fn sharing_memory_200_times_leaves_nothing() {
    let _watchdog = watchdog();
    join_and_leave(Lane::Delegated);
}

/// And with a thread of the executor for each epoch.
#[test]
fn residing_200_times_leaves_nothing() {
    let _watchdog = watchdog();
    join_and_leave(Lane::Resident);
}

fn join_and_leave(lane: Lane) {
    const CYCLES: usize = 200;
    let daemon = daemon(&[]);
    let before_shm = shm();
    let world_size = if lane == Lane::Rpc { 1 } else { 2 };
    let mut workers: Vec<Worker> = (0..world_size)
        .map(|rank| Worker::start_on(lane, daemon.socket(), "cycles", rank, world_size))
        .collect();
    let mut cycle = || {
        for (told, expected) in [
            ("join", "joined "),
            ("reduce", "reduced"),
            ("leave", "left"),
        ] {
            for worker in &mut workers {
                worker.tell(told);
            }
            for worker in &mut workers {
                let answer = worker.answer();
                assert!(answer.starts_with(expected), "{answer}");
            }
        }
        workers[0].pid()
    };
    let mut worker = 0;
    for _ in 0..10 {
        worker = cycle();
    }
    let executor = executor_pid(daemon.socket(), "cycles");
    eventually("the last window is unmapped", || {
        (held(executor).windows == 0).then_some(())
    });
    let pids = [daemon.pid(), executor, worker];
    let before = pids.map(held);
    let mapped_before = pids.map(mappings);
    for _ in 0..CYCLES {
        cycle();
    }
    for ((name, pid), before) in ["supervisor", "executor", "worker"]
        .into_iter()
        .zip(pids)
        .zip(before)
    {
        returns_to(name, pid, before);
    }
    for (pid, before) in pids.into_iter().zip(mapped_before) {
        let now = mappings(pid);
        assert!(now < before + CYCLES / 10, "{before} mappings became {now}");
    }
    assert_eq!(executor_pid(daemon.socket(), "cycles"), executor);
    assert_eq!(shm().difference(&before_shm).count(), 0);
}

/// The same for ranks that are killed, and for memory of the worker's own.
#[test]
fn killed_ranks_and_registered_memory_leave_nothing() {
    let _watchdog = watchdog();
    let daemon = daemon(&[]);
    let socket = daemon.socket();
    let cycle = || {
        let communicator = join(socket, "registered", 0, 1);
        for _ in 0..3 {
            let len_bytes = NonZeroUsize::new(8192).unwrap();
            let memory = Memory::create(len_bytes).unwrap();
            let buffer = communicator.register::<f32>(memory).unwrap();
            drop(communicator.all_reduce(buffer, Op::Sum).unwrap());
        }
        communicator.leave();
        let mut worker = Worker::start(socket, "registered", 0, 1);
        assert!(worker.ask("join").starts_with("joined "));
        worker.tell("traffic");
        assert_eq!(worker.answer(), "running");
        worker.kill_hard();
    };
    cycle();
    let executor = executor_pid(socket, "registered");
    eventually("the last window is unmapped", || {
        (held(executor).windows == 0).then_some(())
    });
    let pids = [daemon.pid(), executor];
    let before = pids.map(held);
    for _ in 0..10 {
        cycle();
        // A killed rank's place is free once the executor has noticed.
        eventually("its window is unmapped", || {
            (held(executor).windows == 0).then_some(())
        });
    }
    for (pid, before) in pids.into_iter().zip(before) {
        returns_to("after kills", pid, before);
    }
}

/// Broken by an executor that is not reaped, or whose pipes, sockets or entry stay.
#[test]
fn twenty_executor_lifetimes_leave_nothing() {
    let _watchdog = watchdog();
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__IDLE_TIMEOUT_MS", "250")]);
    let socket = daemon.socket();
    let before_shm = shm();
    let dir = socket.with_file_name("d.sock.d");
    let mut before = None;
    for life in 0..21 {
        let name = format!("life-{life}");
        let communicator = join(socket, &name, 0, 1);
        reduce_one(&communicator).unwrap();
        drop(communicator);
        eventually("it exits", || info(socket, &name).is_none().then_some(()));
        // The first life brings what is allocated once.
        before.get_or_insert_with(|| {
            eventually("the supervisor is at rest", || {
                let now = held(daemon.pid());
                (now.children == 0 && held(daemon.pid()) == now).then_some(now)
            })
        });
    }
    returns_to("supervisor", daemon.pid(), before.unwrap());
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
    assert_eq!(shm().difference(&before_shm).count(), 0);
}
