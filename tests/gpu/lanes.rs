//! Lanes `delegated` and `resident`: ranks that are processes launch the kernels themselves, or ring the executor's, also
//! inside of graphs.

use crate::harness::raw::{block_on, dial, executor_pid, info};
use crate::harness::worker::Worker;
use crate::harness::{daemon, eventually, send_signal};
use crate::rank::{JOIN_TIMEOUT, Rank, gpu_of, gpus, options};
use allreduce_client::cuda::Device;
use allreduce_client::{
    AllReduceError, AllReduceOptions, Dtype, JoinError, JoinOptions, Lane, Op, blocking::Client,
};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::{CommunicatorStats, GetStatsRequest};
use allreduced::private::PrivateDaemon;
use nix::sys::signal::Signal;

/// The GPUs, if they can have the lanes: with MPS.
pub(crate) fn gpus_with_mps() -> Option<(crate::harness::Watchdog, Vec<Device>)> {
    let (watchdog, devices) = gpus()?;
    if !devices.iter().all(Device::has_mps) {
        println!("skipped: no MPS");
        return None;
    }
    Some((watchdog, devices))
}

fn ask_all(workers: &mut [Worker], what: &str) -> Vec<String> {
    for worker in workers.iter_mut() {
        worker.tell(what);
    }
    workers
        .iter_mut()
        .map(|worker| worker.answer_within(JOIN_TIMEOUT))
        .collect()
}

fn join_all(workers: &mut [Worker], lane: Lane) {
    for answer in ask_all(workers, &format!("join {lane}")) {
        assert!(answer.starts_with("joined "), "{answer}");
    }
}

pub(crate) fn start(daemon: &PrivateDaemon, name: &str, ranks: u32, lane: Lane) -> Vec<Worker> {
    let mut workers: Vec<Worker> = (0..ranks)
        .map(|rank| Worker::start(daemon.socket(), name, rank, ranks))
        .collect();
    join_all(&mut workers, lane);
    workers
}

/// All do it, and answer the same.
pub(crate) fn all_answer(workers: &mut [Worker], what: &str, expected: &str) {
    for (rank, answer) in ask_all(workers, what).iter().enumerate() {
        assert_eq!(answer, expected, "{what}, rank {rank}");
    }
}

fn replay_well(workers: &mut [Worker], times: u32) {
    all_answer(workers, &format!("replay {times}"), "replayed");
    all_answer(workers, "sync", "synced");
    all_answer(workers, "found", "right");
    all_answer(workers, "check", "well");
}

fn graphs_are_right_however_often_and_beside_eager_calls(lane: Lane) {
    let daemon = daemon(&[]);
    for ranks in [1, 2, 3] {
        let mut workers = start(&daemon, &format!("graphs{ranks}"), ranks, lane);
        all_answer(&mut workers, "capture", "captured");
        replay_well(&mut workers, 1);
        replay_well(&mut workers, 20);
        all_answer(&mut workers, "eager", "called");
        replay_well(&mut workers, 2);
        all_answer(&mut workers, "leave", "left");
    }
}

#[test]
fn graphs_are_right_however_often_and_beside_eager_calls_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    graphs_are_right_however_often_and_beside_eager_calls(Lane::Delegated);
}

#[test]
fn graphs_are_right_however_often_and_beside_eager_calls_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    graphs_are_right_however_often_and_beside_eager_calls(Lane::Resident);
}

/// By islands, from the ranks' own processes (which have tried it before Ready); what only the executor can do is refused
/// to them, and the epoch goes on.
#[test]
fn ranks_that_launch_reduce_by_islands() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    let daemon = daemon(&[("ALLREDUCED_CUDA__HOST_STAGED", "always")]);
    for ranks in [4, 6] {
        let mut workers = start(&daemon, &format!("islands{ranks}"), ranks, Lane::Delegated);
        all_answer(&mut workers, "reduce-by hierarchical", "right");
        for algorithm in ["host_staged", "copy_engine_ring"] {
            for answer in ask_all(&mut workers, &format!("reduce-by {algorithm}")) {
                assert!(answer.contains("lane rpc"), "{answer}");
                assert!(answer.contains(algorithm), "{answer}");
            }
        }
        all_answer(&mut workers, "reduce-by hierarchical", "right");
        all_answer(&mut workers, "leave", "left");
    }
}

/// A rank that is stopped while the others replay: NaN, the rank is named, later replays return; and the same graph is
/// right again once the communicator has formed anew.
fn a_rank_that_stops_ends_a_replay_and_the_graph_outlives_it(lane: Lane) {
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "1000")]);
    let mut workers = start(&daemon, "stops", 2, lane);
    all_answer(&mut workers, "capture", "captured");
    replay_well(&mut workers, 3);
    workers[1].signal(Signal::SIGSTOP);
    let survivor = &mut workers[0];
    assert_eq!(survivor.ask("replay 3"), "replayed");
    assert_eq!(survivor.ask("sync"), "synced");
    assert_eq!(survivor.ask("found"), "nan");
    let told = survivor.ask("check");
    assert!(told.contains("over") && told.contains("rank"), "{told}");
    assert!(
        told.contains("rank=1") || told.contains("rank=Some(1)"),
        "{told}"
    );
    assert_eq!(survivor.ask("replay 50"), "replayed");
    assert_eq!(survivor.ask("sync"), "synced");
    assert_eq!(survivor.ask("found"), "nan");
    workers[1].signal(Signal::SIGCONT);
    join_all(&mut workers, lane);
    replay_well(&mut workers, 5);
}

#[test]
fn a_rank_that_stops_ends_a_replay_and_the_graph_outlives_it_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    a_rank_that_stops_ends_a_replay_and_the_graph_outlives_it(Lane::Delegated);
}

#[test]
fn a_rank_that_stops_ends_a_replay_and_the_graph_outlives_it_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    a_rank_that_stops_ends_a_replay_and_the_graph_outlives_it(Lane::Resident);
}

/// A rank that dies between replays.
fn a_rank_that_dies_ends_a_replay_and_the_graph_outlives_it(lane: Lane) {
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "600000")]);
    let mut workers = start(&daemon, "dies", 2, lane);
    all_answer(&mut workers, "capture", "captured");
    replay_well(&mut workers, 3);
    // The survivor's replay waits for a rank that never comes.
    assert_eq!(workers[0].ask("replay 3"), "replayed");
    workers[1].kill_hard();
    assert_eq!(workers[0].ask("sync"), "synced");
    assert_eq!(workers[0].ask("found"), "nan");
    let told = workers[0].ask("check");
    assert!(
        told.contains("over") && told.contains("rank=Some(1)"),
        "{told}"
    );
    workers[1] = Worker::start(daemon.socket(), "dies", 1, 2);
    join_all(&mut workers, lane);
    assert_eq!(workers[1].ask("capture"), "captured");
    replay_well(&mut workers, 5);
}

#[test]
fn a_rank_that_dies_ends_a_replay_and_the_graph_outlives_it_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    a_rank_that_dies_ends_a_replay_and_the_graph_outlives_it(Lane::Delegated);
}

#[test]
fn a_rank_that_dies_ends_a_replay_and_the_graph_outlives_it_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    a_rank_that_dies_ends_a_replay_and_the_graph_outlives_it(Lane::Resident);
}

fn an_executor_that_dies_ends_a_replay_and_the_graph_outlives_it(lane: Lane) {
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "600000")]);
    let mut workers = start(&daemon, "executor", 2, lane);
    all_answer(&mut workers, "capture", "captured");
    replay_well(&mut workers, 3);
    let pid = executor_pid(daemon.socket(), "executor");
    if lane == Lane::Delegated {
        assert_eq!(workers[0].ask("replay 3"), "replayed");
        send_signal(pid, Signal::SIGKILL);
    } else {
        // Its kernel has parked: MPS takes down all clients of a GPU with one that is killed while its kernel runs.
        assert_eq!(workers[0].ask("disarm"), "done");
        std::thread::sleep(std::time::Duration::from_millis(50));
        send_signal(pid, Signal::SIGKILL);
        assert_eq!(workers[0].ask("replay 3"), "replayed");
    }
    assert_eq!(workers[0].ask("sync"), "synced");
    assert_eq!(workers[0].ask("found"), "nan");
    for worker in &mut workers {
        let told = eventually("loss", || {
            let told = worker.ask("check");
            (told != "well").then_some(told)
        });
        assert!(told.starts_with("lost over"), "{told}");
    }
    eventually("the next executor", || {
        let info = info(daemon.socket(), "executor")?;
        (info.executor_pid != 0 && info.executor_pid != pid).then_some(())
    });
    join_all(&mut workers, lane);
    replay_well(&mut workers, 5);
}

#[test]
fn an_executor_that_dies_ends_a_replay_and_the_graph_outlives_it_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    an_executor_that_dies_ends_a_replay_and_the_graph_outlives_it(Lane::Delegated);
}

#[test]
fn an_executor_that_dies_ends_a_replay_and_the_graph_outlives_it_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    an_executor_that_dies_ends_a_replay_and_the_graph_outlives_it(Lane::Resident);
}

fn ranks_that_disagree_get_no_sums(lane: Lane) {
    let daemon = daemon(&[]);
    let mut workers = start(&daemon, "disagree", 2, lane);
    assert_eq!(workers[0].ask("call-elems 64"), "called");
    assert_eq!(workers[1].ask("call-elems 65"), "called");
    all_answer(&mut workers, "sync", "synced");
    all_answer(&mut workers, "nan", "nan");
    for told in ask_all(&mut workers, "check") {
        assert!(told.contains("over"), "{told}");
        assert!(told.contains("ran another reduction"), "{told}");
    }
    join_all(&mut workers, lane);
    all_answer(&mut workers, "call-elems 64", "called");
    all_answer(&mut workers, "sync", "synced");
    all_answer(&mut workers, "check", "well");
}

#[test]
fn ranks_that_disagree_get_no_sums_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    ranks_that_disagree_get_no_sums(Lane::Delegated);
}

#[test]
fn ranks_that_disagree_get_no_sums_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    ranks_that_disagree_get_no_sums(Lane::Resident);
}

/// Joining another communicator, with all that its threads do, while a stream is captured in the mode that fails on any
/// call that could disturb it.
fn a_capture_survives_a_join_in_another_thread(lane: Lane) {
    let daemon = daemon(&[]);
    let mut workers = start(&daemon, "captures", 2, lane);
    all_answer(
        &mut workers,
        &format!("join-while-capturing other {lane}"),
        "captured",
    );
    replay_well(&mut workers, 2);
}

#[test]
fn a_capture_survives_a_join_in_another_thread_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    a_capture_survives_a_join_in_another_thread(Lane::Delegated);
}

#[test]
fn a_capture_survives_a_join_in_another_thread_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    a_capture_survives_a_join_in_another_thread(Lane::Resident);
}

#[test]
fn bad_tensors_are_refused_and_nothing_is_launched() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let device = gpu_of(&devices, 0);
    let options = options("bad", 0, 1, device).lanes([Lane::Delegated]);
    let rank = Rank::join(daemon.socket(), options, device);
    assert_eq!(rank.communicator.lane(), Lane::Delegated);
    let at = rank.scratch.ptr();
    let call = |ends: [u64; 2], num_elems, kind| {
        rank.call(
            rank.stream(),
            ends,
            num_elems,
            kind,
            AllReduceOptions::default(),
        )
    };
    let sum = (Dtype::F32, Op::Sum);
    let error = call([at + 1, at + 1], 8, sum).unwrap_err();
    assert!(
        matches!(error, AllReduceError::Misaligned { .. }),
        "{error}"
    );
    let error = call([at, at + 16], 8, sum).unwrap_err();
    assert!(matches!(error, AllReduceError::Overlap { .. }), "{error}");
    let error = call([at, at], 8, (Dtype::F64, Op::Sum)).unwrap_err();
    assert!(matches!(error, AllReduceError::Refused(_)), "{error}");
    let error = call([at, at], 8, (Dtype::F32, Op::Prod)).unwrap_err();
    assert!(matches!(error, AllReduceError::Refused(_)), "{error}");
    rank.communicator.check().unwrap();
    rank.reduce_one().unwrap();
}

/// Two ranks of one GPU would wait for each other's turn: refused, or auto goes on to lane rpc and says why.
#[test]
fn without_mps_ranks_that_share_a_gpu_do_not_launch() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    if devices.len() >= 2 || devices.iter().all(Device::has_mps) {
        println!("skipped: every rank has its GPU, or there is MPS");
        return;
    }
    let daemon = daemon(&[]);
    let join = |name: &str, rank: u32, lanes: &[Lane]| {
        let options = JoinOptions::new(name, rank, 2)
            .device(devices[0].clone())
            .lanes(lanes)
            .timeout(JOIN_TIMEOUT);
        Client::connect(daemon.socket()).unwrap().join(options)
    };
    let asked = crate::harness::ranks(2, |rank| join("asked", rank, &[Lane::Delegated]));
    for refused in asked {
        match refused {
            Err(JoinError::Refused(refused)) => {
                assert!(refused.message.contains("needs MPS"), "{refused:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    let auto = crate::harness::ranks(2, |rank| join("auto", rank, &[]));
    for joined in auto {
        let joined = joined.unwrap();
        assert_eq!(joined.lane(), Lane::Rpc);
        let reason = joined.lane_reason();
        assert!(reason.contains("MPS"), "{reason}");
    }
}

/// Windows, handles and pages come and go with epochs.
fn joining_and_leaving_costs_no_memory(lane: Lane) {
    let devices = allreduce_client::cuda::devices().unwrap();
    let daemon = daemon(&[]);
    let mut workers = start(&daemon, "memory", 2, lane);
    let device = gpu_of(&devices, 0);
    let context = allreduce_contract::cuda::Context::retain(device.clone()).unwrap();
    let mut before = None;
    for round in 0..6 {
        all_answer(&mut workers, "leave", "left");
        join_all(&mut workers, lane);
        let free = crate::cuda::free_bytes(&context);
        // Modules, heaps and the driver's own are there after the first rounds.
        if round == 2 {
            before = Some(free);
        }
    }
    let after = crate::cuda::free_bytes(&context);
    let lost = before.unwrap().saturating_sub(after);
    assert!(
        lost < 8 << 20,
        "{lost} bytes of GPU memory did not come back"
    );
}

#[test]
fn joining_and_leaving_costs_no_memory_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    joining_and_leaving_costs_no_memory(Lane::Delegated);
}

#[test]
fn joining_and_leaving_costs_no_memory_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    joining_and_leaving_costs_no_memory(Lane::Resident);
}

/// Calls that alternate between two streams, the one's result the other's source: each is ordered behind the one before.
fn calls_from_two_streams_go_in_order(lane: Lane) {
    let daemon = daemon(&[]);
    let mut workers = start(&daemon, "streams", 2, lane);
    for _ in 0..5 {
        all_answer(&mut workers, "two-streams 40", "right");
        all_answer(&mut workers, "check", "well");
    }
}

#[test]
fn calls_from_two_streams_go_in_order_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    calls_from_two_streams_go_in_order(Lane::Delegated);
}

#[test]
fn calls_from_two_streams_go_in_order_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    calls_from_two_streams_go_in_order(Lane::Resident);
}

/// The kernel that stays parks when it is idle or told to, and the next ring wakes it, whatever else goes on.
#[test]
fn a_parked_kernel_is_woken_by_a_ring() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    let lane = Lane::Resident;
    let daemon = daemon(&[]);
    let mut workers = start(&daemon, "parks", 3, lane);
    all_answer(&mut workers, "capture", "captured");
    for round in 0..20 {
        match round % 4 {
            // Long enough to park.
            0 => std::thread::sleep(std::time::Duration::from_millis(5)),
            1 => assert_eq!(workers[round % 3].ask("disarm"), "done"),
            2 => assert_eq!(workers[round % 3].ask("arm"), "done"),
            _ => {}
        }
        all_answer(&mut workers, "replay 2", "replayed");
        // In the middle of it.
        assert_eq!(workers[round % 3].ask("disarm"), "done");
        // The executor maps and unmaps memory, which would wait for a kernel that stays.
        assert_eq!(workers[0].ask("register"), "done");
        all_answer(&mut workers, "sync", "synced");
        all_answer(&mut workers, "found", "right");
        all_answer(&mut workers, "check", "well");
    }
}

fn ask_for(workers: &mut [Worker], lanes: &str, expected: &str) {
    for answer in ask_all(workers, &format!("join-for {lanes}")) {
        assert!(answer.contains(expected), "{answer}");
    }
}

/// Several communicators keep a kernel on the GPU: together they leave room. Who comes late has fewer blocks, or another lane,
/// and says so; who goes, or dies, gives them back.
#[test]
fn communicators_that_keep_kernels_on_a_gpu_share_its_blocks() {
    let Some((_watchdog, devices)) = gpus_with_mps() else {
        return;
    };
    if devices.len() > 1 {
        println!("skipped: the ranks have a GPU each");
        return;
    }
    let lane = Lane::Resident;
    let daemon = daemon(&[
        ("ALLREDUCED_CUDA__RESIDENT_BLOCKS", "3"),
        ("ALLREDUCED_CUDA__RESIDENT_BLOCKS_PER_GPU", "9"),
    ]);
    let mut first = start(&daemon, "first", 2, lane);
    assert_eq!(stats(&daemon, "first").warnings, Vec::<String>::new());
    let mut second = start(&daemon, "second", 2, lane);
    let warnings = stats(&daemon, "second").warnings;
    assert!(
        warnings
            .iter()
            .any(|warning| warning.contains("has 1 blocks")),
        "{warnings:?}"
    );
    for workers in [&mut first, &mut second] {
        all_answer(workers, "capture", "captured");
    }
    for _ in 0..5 {
        // Both at the same time.
        all_answer(&mut first, "replay 5", "replayed");
        all_answer(&mut second, "replay 5", "replayed");
        for workers in [&mut first, &mut second] {
            all_answer(workers, "sync", "synced");
            all_answer(workers, "found", "right");
            all_answer(workers, "check", "well");
        }
    }
    let mut third: Vec<Worker> = (0..2)
        .map(|rank| Worker::start(daemon.socket(), "third", rank, 2))
        .collect();
    let refused = "no block left for each of 2 ranks";
    ask_for(&mut third, "resident", refused);
    ask_for(&mut third, "resident,delegated", refused);
    ask_for(&mut third, "resident,delegated", "joined delegated");
    all_answer(&mut third, "reduce", "reduced");
    all_answer(&mut third, "leave", "left");
    // Joining again costs the first nothing more.
    join_all(&mut first, lane);
    assert_eq!(stats(&daemon, "first").warnings, Vec::<String>::new());
    all_answer(&mut second, "leave", "left");
    eventually("the blocks that the second has given back", || {
        let answers = ask_all(&mut third, "join-for resident");
        let joined = |answer: &String| answer.starts_with("joined resident ");
        answers.iter().all(joined).then_some(())
    });
    replay_well(&mut first, 3);
    all_answer(&mut third, "reduce", "reduced");
    // Parked, since MPS takes down who shares the GPU with a client that is killed at work.
    for workers in [&mut first, &mut third] {
        assert_eq!(workers[0].ask("disarm"), "done");
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    let pid = executor_pid(daemon.socket(), "first");
    send_signal(pid, Signal::SIGKILL);
    all_answer(&mut third, "leave", "left");
    let mut fourth: Vec<Worker> = (0..3)
        .map(|rank| Worker::start(daemon.socket(), "fourth", rank, 3))
        .collect();
    eventually("all blocks", || {
        ask_for(&mut fourth, "resident", "joined resident");
        let warnings = stats(&daemon, "fourth").warnings;
        warnings.is_empty().then_some(())
    });
    all_answer(&mut fourth, "reduce", "reduced");
}

pub(crate) fn stats(daemon: &PrivateDaemon, name: &str) -> CommunicatorStats {
    let request = GetStatsRequest {
        communicator: name.to_owned(),
    };
    let answer = block_on(async {
        let mut admin = AdminClient::new(dial(daemon.socket()).await);
        admin.get_stats(request).await.unwrap().into_inner()
    });
    answer.communicators.into_iter().next().unwrap()
}

/// Calls that every rank, and each, has begun by itself; all alike, since nothing is under way.
fn calls_made(daemon: &PrivateDaemon, name: &str) -> u64 {
    let stats = stats(daemon, name);
    let of_ranks: Vec<u64> = stats.ranks.iter().map(|rank| rank.lane_calls).collect();
    assert!(
        of_ranks.iter().all(|calls| *calls == stats.lane_calls),
        "{of_ranks:?}, all: {}",
        stats.lane_calls
    );
    stats.lane_calls
}

/// No CPU of ours sees a replay; the GPU's own numbers are counted, over epochs, and nothing else is.
fn what_ranks_do_themselves_is_counted(lane: Lane) {
    let daemon = daemon(&[]);
    let name = "counted";
    let mut workers = start(&daemon, name, 3, lane);
    assert_eq!(calls_made(&daemon, name), 0, "trying the lane is no call");
    all_answer(&mut workers, "capture", "captured");
    assert_eq!(calls_made(&daemon, name), 0, "nor is capturing");
    replay_well(&mut workers, 1);
    // Six reductions, one of them longer than a slot.
    let replay = calls_made(&daemon, name);
    assert!(replay > 6, "{replay}");
    replay_well(&mut workers, 10);
    assert_eq!(calls_made(&daemon, name), 11 * replay);
    all_answer(&mut workers, "eager", "called");
    all_answer(&mut workers, "sync", "synced");
    assert_eq!(calls_made(&daemon, name), 11 * replay + 1);
    // Of an epoch that is over.
    all_answer(&mut workers, "leave", "left");
    eventually("the count of the epoch", || {
        (calls_made(&daemon, name) == 11 * replay + 1).then_some(())
    });
    join_all(&mut workers, lane);
    assert_eq!(calls_made(&daemon, name), 11 * replay + 1);
    replay_well(&mut workers, 2);
    assert_eq!(calls_made(&daemon, name), 13 * replay + 1);

    let rings = || -> Vec<[u64; 2]> {
        let ranks = stats(&daemon, name).ranks;
        let rings = ranks.iter();
        rings
            .map(|rank| [rank.ring_calls, rank.ring_calls_staged])
            .collect()
    };
    // Captured once, called once; all but the empty one of memory that is not registered.
    let expected = match lane {
        Lane::Resident => [7, 6],
        _ => [0, 0],
    };
    eventually("what clients tell with their heartbeats", || {
        (rings() == [expected; 3]).then_some(())
    });
    if lane == Lane::Resident {
        // In the arena: not copied.
        all_answer(&mut workers, "call-elems 64", "called");
        eventually("one more that is not staged", || {
            (rings() == [[8, 6]; 3]).then_some(())
        });
    }
    let socket = daemon.socket().to_str().unwrap();
    let text = crate::harness::run(&["status", "--socket", socket]).stdout;
    println!("{text}");
    assert!(text.contains("calls by every rank itself"), "{text}");
    let says = text.contains("staged: 6 of 8 calls enqueued or captured: register their memory");
    assert_eq!(says, lane == Lane::Resident, "{text}");
    let json = crate::harness::run(&["status", "--json", "--socket", socket]).json();
    let shown = &json["communicators"][0];
    assert_eq!(shown["lane_calls"], shown["ranks"][0]["lane_calls"]);
    all_answer(&mut workers, "leave", "left");
}

#[test]
fn what_ranks_do_themselves_is_counted_delegated() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    what_ranks_do_themselves_is_counted(Lane::Delegated);
}

#[test]
fn what_ranks_do_themselves_is_counted_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    what_ranks_do_themselves_is_counted(Lane::Resident);
}

/// No worker does that, and no sum may be wrong for it: two graphs of a communicator on two streams, or calls beside a graph.
/// Either they happened to come one after the other, or every rank is told; and joining again makes the same graphs right.
fn what_runs_at_once_is_refused(lane: Lane) {
    let daemon = daemon(&[("ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS", "5000")]);
    let mut workers = start(&daemon, "at-once", 2, lane);
    all_answer(&mut workers, "capture", "captured");
    all_answer(&mut workers, "capture-second", "captured");
    // In turn they may, on whatever streams.
    all_answer(&mut workers, "in-turn 10", "right and right");
    all_answer(&mut workers, "check", "well");
    let mut refused = 0;
    for round in 0..6 {
        let what = match round % 2 {
            0 => "at-once graphs 5",
            _ => "at-once calls 5",
        };
        for answer in ask_all(&mut workers, what) {
            println!("{what}: {answer}");
            assert!(!answer.contains("wrong"), "{what}: {answer}");
        }
        for told in ask_all(&mut workers, "check") {
            println!("{told}");
            // Ranks that were let through in different orders disagree, which is seen too.
            let known = [
                "of its own were under way",
                "another reduction",
                "ahead by a whole",
                "the executor ended the epoch",
            ];
            assert!(
                told == "well" || known.iter().any(|words| told.contains(words)),
                "{told}"
            );
            refused += u32::from(told.contains("of its own were under way"));
        }
        join_all(&mut workers, lane);
        replay_well(&mut workers, 2);
        all_answer(&mut workers, "in-turn 2", "right and right");
        all_answer(&mut workers, "check", "well");
    }
    assert!(refused > 0, "nothing ran at once");
}

#[test]
fn what_runs_at_once_is_refused_resident() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    what_runs_at_once_is_refused(Lane::Resident);
}

/// A worker's kernel of as many blocks as the empty GPU holds, which wait for each other, has completed.
fn gets_the_whole_gpu(worker: &mut Worker) {
    worker.tell("cooperated 20000");
    assert_eq!(worker.answer_within(JOIN_TIMEOUT), "completed");
}

/// A worker's kernel that wants every multiprocessor gets them, though a kernel stays there between reductions: it parks. (Not
/// while another rank's reduction is under way on the same GPU: the ring of that rank would have no room either.)
#[test]
fn a_kernel_that_wants_the_whole_gpu_gets_it_once_the_one_that_stays_parks() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    let lane = Lane::Resident;
    let daemon = daemon(&[]);
    let mut workers = start(&daemon, "whole", 2, lane);
    all_answer(&mut workers, "capture", "captured");
    for round in 0..10 {
        replay_well(&mut workers, 2);
        // Right behind reductions, and when it was armed for some.
        if round % 3 > 0 {
            assert_eq!(workers[0].ask("arm"), "done");
        }
        let worker = &mut workers[round % 2];
        assert_eq!(worker.ask("cooperate"), "launched");
        gets_the_whole_gpu(worker);
    }
}

/// One that does not park by itself is told to.
#[test]
fn disarming_lets_a_kernel_have_the_whole_gpu() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    let lane = Lane::Resident;
    let daemon = daemon(&[("ALLREDUCED_CUDA__RESIDENT_IDLE_US", "100000000")]);
    let mut workers = start(&daemon, "whole", 2, lane);
    all_answer(&mut workers, "capture", "captured");
    for _ in 0..3 {
        replay_well(&mut workers, 2);
        assert_eq!(workers[0].ask("arm"), "done");
        assert_eq!(workers[0].ask("cooperate"), "launched");
        let before = workers[0].ask("cooperated 200");
        println!("beside a kernel that stays: {before}");
        assert_eq!(workers[0].ask("disarm"), "done");
        gets_the_whole_gpu(&mut workers[0]);
        replay_well(&mut workers, 2);
    }
}
