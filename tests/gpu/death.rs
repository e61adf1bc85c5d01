//! Ranks that die, leave, do not call, or whose streams do not get there: the others get a typed error that names
//! the rank, and the communicator forms again.

use crate::apart::NO_PEER_ACCESS;
use crate::harness::raw::{executor_pid, info};
use crate::harness::worker::Worker;
use crate::harness::{SOON, daemon, eventually, send_signal};
use crate::rank::{
    JOIN_TIMEOUT, Rank, blames, gpu_of, gpus, join_all, on_each, options, reduce_well,
};
use allreduce_client::cuda::Device;
use allreduce_client::{AllReduceError, AllReduceOptions, Dtype, Op};
use allreduced::private::PrivateDaemon;
use nix::sys::signal::Signal;
use std::path::Path;
use std::time::Duration;

const KIND: (Dtype, Op) = (Dtype::F32, Op::Sum);

/// Ranks 0 and 1 as threads, rank 2 as a process.
struct Three {
    threads: Vec<Rank>,
    process: Worker,
}

impl Three {
    fn join(socket: &Path, name: &str, devices: &[Device], mut process: Worker) -> Self {
        process.tell("join");
        let threads = crate::harness::ranks(2, |rank| {
            let device = gpu_of(devices, rank);
            Rank::join(socket, options(name, rank, 3, device), device)
        });
        let answer = process.answer_within(JOIN_TIMEOUT);
        assert!(answer.starts_with("joined "), "{answer}");
        Self { threads, process }
    }

    fn reduce_well(&mut self) {
        self.process.tell("reduce");
        on_each(&self.threads, |rank| rank.reduce_one().unwrap());
        assert_eq!(self.process.answer(), "reduced");
    }

    /// Waits until the GPU is idle, as the executor sees it too.
    fn settle(&self) {
        for rank in &self.threads {
            rank.communicator.wait_settled(SOON).unwrap();
        }
    }

    /// The survivors' next calls answer that rank 2 ended the epoch.
    fn told(&self, words: &str) {
        on_each(&self.threads, |rank| match rank.reduce_one() {
            Err(AllReduceError::EpochEnded(end)) => {
                assert_eq!(end.rank, Some(2), "{end}");
                assert!(end.message.contains(words), "{end}");
            }
            other => panic!("{other:?}"),
        });
    }
}

/// An idle rank is killed, then one leaves in order.
#[test]
fn survivors_of_a_rank_that_goes_are_told_and_form_again() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let name = "goes";
    let start = || Worker::start(daemon.socket(), name, 2, 3);
    let mut three = Three::join(daemon.socket(), name, &devices, start());
    for round in 1..=2 {
        three.reduce_well();
        three.settle();
        three.process.kill_hard();
        three.told("rank 2 is gone");
        drop(three);
        three = Three::join(daemon.socket(), name, &devices, start());
        assert_eq!(three.threads[0].communicator.epoch(), round + 1);
        three.reduce_well();
    }
    three.settle();
    assert_eq!(three.process.ask("leave"), "left");
    three.told("rank 2 left");
    // The same process joins again.
    let Three { threads, process } = three;
    drop(threads);
    let mut three = Three::join(daemon.socket(), name, &devices, process);
    three.reduce_well();
    assert_eq!(info(daemon.socket(), name).unwrap().incarnation, 1);
}

/// What a rank had enqueued before it was told is right: its data was complete. Broken by an orderly end that
/// aborts reductions on the GPU.
#[test]
fn what_was_enqueued_before_a_rank_left_is_right() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    for round in 0..5 {
        let name = "leaves";
        let mut joined = join_all(daemon.socket(), name, 2, &devices);
        let (tensors, sum) = crate::harness::bits::expected(KIND.0, KIND.1, 251, round, 2);
        on_each(&joined, |rank| {
            let at = rank.scratch.ptr();
            let own = &tensors[rank.communicator.rank() as usize];
            rank.upload(rank.stream(), at, own);
            let options = AllReduceOptions::default();
            rank.call(rank.stream(), [at, at], 251, KIND, options)
                .unwrap();
        });
        let leaver = joined.pop().unwrap();
        leaver.stream().synchronize().unwrap();
        leaver.communicator.leave();
        let rank = &joined[0];
        let result = rank.download(rank.stream(), rank.scratch.ptr(), sum.len());
        assert!(result == sum, "round {round}: a wrong sum");
        match rank.reduce_one() {
            Err(AllReduceError::EpochEnded(end)) => assert_eq!(end.rank, Some(1), "{end}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_rank_that_does_not_call_is_named() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "600000")]);
    for epoch in 1..=2 {
        let joined = join_all(daemon.socket(), "silent", 3, &devices);
        assert_eq!(joined[0].communicator.epoch(), epoch);
        reduce_well(&joined);
        let callers = &joined[..2];
        let timed_out = on_each(callers, |rank| {
            let at = rank.scratch.ptr();
            let options = AllReduceOptions::default().timeout(Duration::from_millis(500));
            match rank.call(rank.stream(), [at, at], 8, KIND, options) {
                Err(AllReduceError::Timeout {
                    missing_ranks,
                    message,
                }) => {
                    assert_eq!(missing_ranks, [2]);
                    assert!(message.contains("rank 2 did not call"), "{message}");
                    true
                }
                // This thread was so late that the other's deadline had passed.
                Err(AllReduceError::EpochEnded(end)) => {
                    assert_eq!(end.rank, Some(2), "{end}");
                    false
                }
                other => panic!("{other:?}"),
            }
        });
        assert!(timed_out.contains(&true));
        match joined[2].reduce_one() {
            Err(error @ AllReduceError::EpochEnded(_)) => assert!(blames(&error, 2), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    let joined = join_all(daemon.socket(), "silent", 3, &devices);
    reduce_well(&joined);
}

/// An executor that dies idle takes its windows with it: the ranks are told, and form again on the next one.
#[test]
fn a_killed_executor_is_replaced() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let others = join_all(daemon.socket(), "others", 2, &devices);
    let joined = join_all(daemon.socket(), "killed", 2, &devices);
    reduce_well(&joined);
    for rank in &joined {
        rank.communicator.wait_settled(SOON).unwrap();
    }
    let pid = executor_pid(daemon.socket(), "killed");
    send_signal(pid, Signal::SIGKILL);
    on_each(&joined, |rank| {
        // No copy: what the window holds is nobody's any more.
        let at = rank.scratch.ptr();
        let options = AllReduceOptions::default();
        match rank.call(rank.stream(), [at, at], 8, KIND, options) {
            Err(error @ AllReduceError::ExecutorLost(_)) => assert!(error.is_epoch_over()),
            other => panic!("{other:?}"),
        }
    });
    reduce_well(&others);
    drop(joined);
    let joined = join_all(daemon.socket(), "killed", 2, &devices);
    reduce_well(&joined);
    let now = info(daemon.socket(), "killed").unwrap();
    assert_eq!(now.incarnation, 2);
    assert_ne!(now.executor_pid, pid);
    reduce_well(&others);
}

fn ask_both(workers: &mut [Worker], what: &str) -> Vec<String> {
    for worker in &mut *workers {
        worker.tell(what);
    }
    let answers = workers.iter_mut();
    answers
        .map(|worker| worker.answer_within(JOIN_TIMEOUT))
        .collect()
}

/// Two ranks as processes, joined and warm, of which rank 1's stream is held up, with a reduction enqueued on both.
fn held_up(daemon: &PrivateDaemon, name: &str) -> Vec<Worker> {
    let mut workers: Vec<Worker> = (0..2)
        .map(|rank| Worker::start(daemon.socket(), name, rank, 2))
        .collect();
    for answer in ask_both(&mut workers, "join") {
        assert!(answer.starts_with("joined "), "{answer}");
    }
    assert_eq!(ask_both(&mut workers, "reduce"), ["reduced", "reduced"]);
    assert_eq!(workers[1].ask("close"), "closed");
    // Enqueued, not done: both calls are answered well.
    assert_eq!(ask_both(&mut workers, "call 2000"), ["called", "called"]);
    assert_eq!(workers[1].ask("idle"), "busy");
    workers
}

/// The worker's `check` says that the epoch is over.
fn is_told_of_the_end(worker: &mut Worker) {
    let told = eventually("the rank is told", || {
        let answer = worker.ask("check");
        (answer != "well").then_some(answer)
    });
    println!("the rank is told: {told}");
    assert!(told.contains(" over "), "{told}");
}

/// The stream of a rank comes to its end.
fn is_let_go(worker: &mut Worker) {
    eventually("the stream is let go", || {
        (worker.ask("idle") == "idle").then_some(())
    });
}

/// It does, and what should have been reduced is NaN.
fn is_let_go_with_nan(worker: &mut Worker) {
    is_let_go(worker);
    assert_eq!(worker.ask("nan"), "nan");
}

/// A stream that never gets to its reduction: the ranks are told whose it is, their streams are let go with NaN,
/// others go on, and the communicator forms again on the same executor. The ranks are processes, so that nothing of
/// theirs is in the way of the other communicator's.
fn a_stuck_stream_is_named_and_let_go(devices: &[Device], environment: &[(&str, &str)]) {
    let deadline = ("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "2000");
    let daemon = daemon(&[environment, &[deadline]].concat());
    let others = join_all(daemon.socket(), "others", 2, devices);
    reduce_well(&others);
    let mut workers = held_up(&daemon, "stuck");
    let told = eventually("rank 0 is told", || {
        reduce_well(&others);
        let answer = workers[0].ask("check");
        (answer != "well").then_some(answer)
    });
    println!("rank 0 is told: {told}");
    assert!(told.contains(" over "), "{told}");
    assert!(
        told.contains("rank=Some(1)") || told.starts_with("device over rank=1 "),
        "it does not name rank 1: {told}"
    );
    let again = workers[0].ask("call 2000");
    println!("its next call:  {again}");
    assert!(again.contains(" over "), "{again}");
    is_let_go_with_nan(&mut workers[0]);

    assert_eq!(workers[1].ask("open"), "opened");
    is_told_of_the_end(&mut workers[1]);
    is_let_go_with_nan(&mut workers[1]);
    reduce_well(&others);
    for answer in ask_both(&mut workers, "join") {
        assert!(answer.starts_with("joined "), "{answer}");
    }
    assert_eq!(ask_both(&mut workers, "reduce"), ["reduced", "reduced"]);
    assert_eq!(info(daemon.socket(), "stuck").unwrap().incarnation, 1);
    assert!(others.iter().all(|rank| rank.communicator.epoch() == 1));
    reduce_well(&others);
}

#[test]
fn a_stream_that_does_not_get_there_is_named_and_let_go() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    a_stuck_stream_is_named_and_let_go(&devices, &[]);
}

/// The same through windows in host memory. Broken by an end of the epoch that sets no abort word there.
#[test]
fn a_stream_that_does_not_get_there_is_let_go_without_peer_access() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    a_stuck_stream_is_named_and_let_go(&devices, &[NO_PEER_ACCESS]);
}

/// A rank that dies while its stream is held up: the survivor is told at once, and its stream is let go.
#[test]
fn a_rank_that_dies_with_a_reduction_enqueued_holds_up_nobody() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let others = join_all(daemon.socket(), "others", 2, &devices);
    let mut workers = held_up(&daemon, "dies");
    // Its stream only waits: nothing of it runs, so that MPS loses nothing.
    send_signal(workers[1].pid(), Signal::SIGKILL);
    is_told_of_the_end(&mut workers[0]);
    // The driver that takes the process down may let its held-up stream run on first: then the reduction was done
    // with what the rank's memory held, in an epoch that is over.
    is_let_go(&mut workers[0]);
    println!("rank 0 has {}", workers[0].ask("nan"));
    reduce_well(&others);
}

/// An executor that dies with a reduction enqueued: the ranks are told, their streams are let go with NaN by the
/// client crate, and the communicator forms again on the next one.
#[test]
fn an_executor_that_dies_with_a_reduction_enqueued_holds_up_nobody() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    // On one GPU the executor's stream waits for both ranks before the kernel starts.
    if devices.len() > 1 && devices.iter().all(Device::has_mps) {
        println!(
            "skipped: with MPS, who dies while its kernel waits for another GPU takes all contexts (ARCHITECTURE.md)"
        );
        return;
    }
    let daemon = daemon(&[]);
    let others = join_all(daemon.socket(), "others", 2, &devices);
    let mut workers = held_up(&daemon, "lost");
    send_signal(executor_pid(daemon.socket(), "lost"), Signal::SIGKILL);
    is_told_of_the_end(&mut workers[0]);
    is_let_go_with_nan(&mut workers[0]);
    assert_eq!(workers[1].ask("open"), "opened");
    is_let_go_with_nan(&mut workers[1]);
    reduce_well(&others);
    for answer in ask_both(&mut workers, "join") {
        assert!(answer.starts_with("joined "), "{answer}");
    }
    assert_eq!(ask_both(&mut workers, "reduce"), ["reduced", "reduced"]);
    assert_eq!(info(daemon.socket(), "lost").unwrap().incarnation, 2);
    reduce_well(&others);
}
