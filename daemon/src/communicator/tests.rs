#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]
//! The state machine on its own: no memory, no sockets, no clock but the numbers given.

use super::*;
use crate::plan::NoStaying;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

const MS: Duration = Duration::from_millis(1);

struct Harness {
    communicator: Communicator<u32>,
    now: Instant,
    sessions: Vec<u64>,
    buffers: Vec<u64>,
    next_reply: u32,
}

fn settings(world_size: u32) -> Settings {
    Settings {
        backend: Backend::Host,
        world_size: WorldSize::new(world_size).unwrap(),
        max_in_flight: 4,
        max_buffers: 3,
        join_timeout: 100 * MS,
        max_threads: 2,
        geometry: crate::plan::lane_geometry(
            allreduce_contract::Lane::Rpc,
            WorldSize::ONE,
            1,
            &crate::config::Host::default(),
        ),
        costs: None,
        topology: String::new(),
    }
}

fn joining(rank: Rank) -> Joining {
    static SESSIONS: AtomicU64 = AtomicU64::new(1 << 40);
    Joining {
        session: SESSIONS.fetch_add(1, Ordering::Relaxed),
        rank,
        lanes: vec![Lane::Rpc],
        arena_len_bytes: 4096,
        pid: 1,
        client_name: "test".to_owned(),
    }
}

impl Harness {
    fn new(world_size: u32) -> Self {
        let mut harness = Self {
            communicator: Communicator::new(settings(world_size)),
            now: Instant::now(),
            sessions: Vec::new(),
            buffers: Vec::new(),
            next_reply: 0,
        };
        harness.form();
        harness
    }

    /// Joins every rank and gives each a buffer of 256 bytes.
    fn form(&mut self) {
        let world_size = self.communicator.settings.world_size;
        self.sessions = world_size
            .ranks()
            .map(|rank| self.communicator.join(joining(rank), self.now).unwrap().0)
            .collect();
        self.buffers = self
            .sessions
            .iter()
            .map(|session| self.communicator.allocate(*session, 256).unwrap().0)
            .collect();
        let effects = self.communicator.take_effects();
        assert!(
            effects
                .iter()
                .any(|effect| matches!(effect, Effect::Ready { .. })),
            "{effects:?}"
        );
    }

    fn call(&mut self, rank: usize, sequence: u64) -> Call<u32> {
        self.next_reply += 1;
        let range = Some(AskedRange {
            buffer_id: self.buffers[rank],
            offset_bytes: 0,
        });
        Call {
            reply_to: self.next_reply,
            session: self.sessions[rank],
            epoch: self.communicator.epoch(),
            sequence,
            src: range,
            dst: range,
            num_elems: 8,
            dtype: Ok(Dtype::F32),
            op: Ok(Op::Sum),
            timeout: 50 * MS,
            unsignalled: None,
            algorithm: Ok(None),
            ticket: Ok(None),
        }
    }

    fn send(&mut self, call: Call<u32>) -> Vec<Effect<u32>> {
        self.communicator.all_reduce(call, self.now);
        self.communicator.take_effects()
    }

    fn finish(&mut self, effects: &[Effect<u32>]) -> Vec<Effect<u32>> {
        let launch = effects
            .iter()
            .find_map(|effect| match effect {
                Effect::Launch(launch) => Some(launch.clone()),
                _ => None,
            })
            .unwrap_or_else(|| panic!("no launch in {effects:?}"));
        self.communicator.reduced(&launch, MS);
        self.communicator.take_effects()
    }
}

fn gpus_tested() -> GpusTested {
    GpusTested {
        limits: GPUS,
        costs: None,
        topology: "loopback".to_owned(),
    }
}

const GPUS: GpuLimits = GpuLimits {
    gpus: 1,
    ranks_per_gpu: 2,
    resident_blocks: 64,
    push_slot_bytes: 4096,
    inband_part_bytes: 4096,
    staging_part_bytes: 4096,
    resident: Err(NoStaying::NotConfigured),
    shared_by_mps: true,
    island_size: 1,
    peer_access: true,
    host_staged_bytes: None,
};

/// Two ranks on backend cuda, joined; none has its window mapped.
fn cuda_ranks() -> (Communicator<u32>, Vec<u64>) {
    let settings = Settings {
        backend: Backend::Cuda,
        ..settings(2)
    };
    let mut communicator = Communicator::new(settings);
    let ranks = communicator.settings.world_size.ranks();
    let sessions = ranks
        .map(|rank| communicator.join(joining(rank), Instant::now()).unwrap().0)
        .collect();
    assert!(communicator.take_effects().is_empty());
    (communicator, sessions)
}

#[test]
fn on_cuda_nobody_is_ready_before_the_test() {
    let (mut communicator, sessions) = cuda_ranks();
    communicator.mapped(sessions[1], None);
    assert!(communicator.take_effects().is_empty());
    communicator.mapped(sessions[0], None);
    let effects = communicator.take_effects();
    let [
        Effect::Test {
            sessions: tested,
            epoch: 1,
        },
    ] = effects.as_slice()
    else {
        panic!("{effects:?}");
    };
    assert_eq!(*tested, sessions);
    // Another epoch's verdict says nothing about this one.
    communicator.tested(7, Ok(gpus_tested()));
    assert!(communicator.take_effects().is_empty());
    communicator.tested(1, Ok(gpus_tested()));
    assert!(matches!(
        communicator.take_effects().as_slice(),
        [Effect::Ready { epoch: 1, .. }]
    ));
    communicator.gpu_failed(1, None, "lost".to_owned());
    let ends = communicator.take_effects();
    let is_gpu = |effect: &Effect<u32>| matches!(effect, Effect::Ended { end, .. } if matches!(end.cause, EndCause::Gpu { .. }));
    assert!(ends.len() == 2 && ends.iter().all(is_gpu), "{ends:?}");
}

/// A rank that cannot map its peers' memory refuses every rank only if somebody asked for the lane.
#[test]
fn a_lane_that_nobody_asked_for_gives_way_to_rpc() {
    for asked in [false, true] {
        let settings = Settings {
            backend: Backend::Cuda,
            ..settings(2)
        };
        let mut communicator = Communicator::<u32>::new(settings);
        let ranks = communicator.settings.world_size.ranks();
        let sessions: Vec<u64> = ranks
            .map(|rank| {
                let lanes = match asked && rank.get() == 0 {
                    true => vec![Lane::Delegated],
                    false => Vec::new(),
                };
                let joining = Joining {
                    lanes,
                    ..joining(rank)
                };
                communicator.join(joining, Instant::now()).unwrap().0
            })
            .collect();
        for session in &sessions {
            communicator.mapped(*session, None);
        }
        communicator.tested(1, Ok(gpus_tested()));
        let is_share = |effect: &Effect<u32>| {
            matches!(
                effect,
                Effect::Share {
                    lane: Lane::Delegated,
                    ..
                }
            )
        };
        assert!(communicator.take_effects().iter().any(is_share));
        communicator.shared(sessions[0], None);
        assert!(communicator.take_effects().is_empty());
        communicator.shared(sessions[1], Some("no peer access".to_owned()));
        let effects = communicator.take_effects();
        if asked {
            let is_refusal = |effect: &Effect<u32>| {
                matches!(effect, Effect::Ended { end, .. }
                    if matches!(end.cause, EndCause::Ineligible { .. }))
            };
            assert_eq!(
                effects.iter().filter(|effect| is_refusal(effect)).count(),
                2
            );
        } else {
            let [Effect::Unshare { epoch: 1 }, Effect::Ready { lane, .. }] = effects.as_slice()
            else {
                panic!("{effects:?}");
            };
            assert_eq!(lane.lane, Lane::Rpc);
            assert!(
                lane.reason
                    .contains("rank 1 cannot use lane delegated: no peer access")
            );
            // It comes late, and changes nothing.
            communicator.shared(sessions[0], Some("gave up".to_owned()));
            assert!(communicator.take_effects().is_empty());
        }
    }
}

#[test]
fn one_verdict_refuses_all_ranks() {
    let rank = settings(2).world_size.rank(1).unwrap();
    for fails_at in 0..3 {
        let (mut communicator, sessions) = cuda_ranks();
        if fails_at == 0 {
            communicator.mapped(sessions[1], Some("CUDA_ERROR_INVALID_VALUE".to_owned()));
        } else {
            communicator.mapped(sessions[0], None);
            communicator.mapped(sessions[1], None);
            communicator.take_effects();
            if fails_at == 1 {
                communicator.tested(1, Err((vec![rank], "wrong data".to_owned())));
            } else {
                communicator.expire(Instant::now() + 101 * MS);
            }
        }
        let effects = communicator.take_effects();
        let told = effects.iter().filter(|effect| {
            matches!(effect, Effect::Ended { end, .. }
                if matches!(end.cause, EndCause::Ineligible { .. }) && end.cause.is_of_forming())
        });
        assert_eq!(told.count(), 2, "{effects:?}");
        assert_eq!(communicator.epoch(), 2);
    }
}

#[test]
fn a_window_that_is_never_mapped_is_missed() {
    let (mut communicator, sessions) = cuda_ranks();
    communicator.mapped(sessions[0], None);
    communicator.expire(Instant::now() + 101 * MS);
    let effects = communicator.take_effects();
    let Some(Effect::Ended { end, .. }) = effects.first() else {
        panic!("{effects:?}");
    };
    assert_eq!(end.cause.missing().len(), 1);
    assert_eq!(end.cause.rank().map(Rank::get), Some(1));
}

#[test]
fn a_launch_that_fails_answers_everyone() {
    let mut harness = Harness::new(2);
    for rank in 0..2 {
        let call = harness.call(rank, 1);
        harness.communicator.all_reduce(call, harness.now);
    }
    let effects = harness.communicator.take_effects();
    let Some(Effect::Launch(launch)) = effects.first() else {
        panic!("{effects:?}");
    };
    harness
        .communicator
        .launch_failed(launch, None, "out of resources".to_owned());
    let effects = harness.communicator.take_effects();
    assert_eq!(errors(&effects).len(), 2, "{effects:?}");
    assert_eq!(harness.communicator.epoch(), 2);
}

fn errors(effects: &[Effect<u32>]) -> Vec<CallError> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Reply { result, .. } => result.clone().err(),
            _ => None,
        })
        .collect()
}

fn successes(effects: &[Effect<u32>]) -> usize {
    effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Reply { result: Ok(_), .. }))
        .count()
}

#[test]
fn a_reduction_runs_when_all_have_called() {
    let mut harness = Harness::new(3);
    for rank in [2, 0] {
        let call = harness.call(rank, 1);
        assert!(harness.send(call).is_empty());
    }
    let call = harness.call(1, 1);
    let effects = harness.send(call);
    let done = harness.finish(&effects);
    assert_eq!(successes(&done), 3);
    let told = done
        .iter()
        .filter(|effect| matches!(effect, Effect::Done { sequence: 1, .. }));
    assert_eq!(told.count(), 3);
    assert_eq!(harness.communicator.stats().reduction.quantiles().count, 1);
}

#[test]
fn done_covers_no_call_that_may_still_come() {
    let mut harness = Harness::new(2);
    let mut bad = harness.call(0, 2);
    bad.num_elems = 1000;
    let told = |effects: &[Effect<u32>]| {
        let done = effects.iter().find_map(|effect| match effect {
            Effect::Done { sequence, .. } => Some(*sequence),
            _ => None,
        });
        done.unwrap()
    };
    assert_eq!(told(&harness.send(bad)), 0);
    let call = harness.call(0, 1);
    assert!(harness.send(call).is_empty());
    let call = harness.call(1, 1);
    let launched = harness.send(call);
    assert_eq!(told(&harness.finish(&launched)), 2);
}

#[test]
fn disagreement_reaches_every_rank_and_the_next_sequence_runs() {
    let mut harness = Harness::new(3);
    let first = harness.call(0, 1);
    assert!(harness.send(first).is_empty());
    let mut other = harness.call(1, 1);
    other.num_elems = 9;
    let effects = harness.send(other);
    let texts: Vec<String> = errors(&effects).iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 2, "{effects:?}");
    for text in texts {
        assert!(text.contains("rank 0 reduces 8 x f32 sum"), "{text}");
        assert!(text.contains("rank 1 reduces 9 x f32 sum"), "{text}");
    }
    // The late rank hears the same, and may already be ahead.
    for rank in [0, 1] {
        let call = harness.call(rank, 2);
        assert!(errors(&harness.send(call)).is_empty());
    }
    let late = harness.call(2, 1);
    assert!(matches!(
        errors(&harness.send(late)).as_slice(),
        [CallError::Mismatch { .. }]
    ));
    let call = harness.call(2, 2);
    let effects = harness.send(call);
    assert_eq!(successes(&harness.finish(&effects)), 3);
}

#[test]
fn wrong_arguments_consume_the_sequence_for_all() {
    type Spoil = fn(&mut Call<u32>);
    let cases: [(&str, Spoil); 9] = [
        ("src is missing", |call| call.src = None),
        ("names buffer 999", |call| {
            call.dst.as_mut().unwrap().buffer_id = 999;
        }),
        ("takes 4000 bytes", |call| call.num_elems = 1000),
        ("bytes from offset", |call| {
            call.src.as_mut().unwrap().offset_bytes = u64::MAX - 3;
        }),
        ("not a multiple of the element size 4", |call| {
            call.src.as_mut().unwrap().offset_bytes = 2;
        }),
        ("overlap", |call| {
            call.src.as_mut().unwrap().offset_bytes = 4;
        }),
        ("dtype = 77", |call| {
            call.dtype = Dtype::from_wire(77);
        }),
        ("integer dtype i32", |call| {
            call.dtype = Ok(Dtype::I32);
            call.op = Ok(Op::Avg);
        }),
        ("ready word does not hold 5", |call| {
            call.unsignalled = Some(5);
        }),
    ];
    for (text, spoil) in cases {
        let mut harness = Harness::new(2);
        let good = harness.call(0, 1);
        assert!(harness.send(good).is_empty());
        let mut bad = harness.call(1, 1);
        spoil(&mut bad);
        let effects = harness.send(bad);
        let errors = errors(&effects);
        assert_eq!(errors.len(), 2, "{text}: {effects:?}");
        for error in errors {
            assert!(error.to_string().contains(text), "{text}: {error}");
        }
        for rank in 0..2 {
            let call = harness.call(rank, 2);
            let effects = harness.send(call);
            if rank == 1 {
                assert_eq!(successes(&harness.finish(&effects)), 2, "{text}");
            }
        }
    }
}

#[test]
fn errors_of_the_call_alone_disturb_nobody() {
    let mut harness = Harness::new(2);
    let good = harness.call(0, 1);
    assert!(harness.send(good).is_empty());
    let mut unknown = harness.call(1, 1);
    unknown.session = 12345;
    let mut wrong_epoch = harness.call(1, 1);
    wrong_epoch.epoch = 9;
    let mut ahead = harness.call(1, 6);
    ahead.sequence = 6;
    let zero = harness.call(1, 0);
    let twice = harness.call(0, 1);
    for call in [unknown, wrong_epoch, ahead, zero, twice] {
        assert_eq!(errors(&harness.send(call)).len(), 1);
    }
    let good = harness.call(1, 1);
    let effects = harness.send(good);
    assert_eq!(successes(&harness.finish(&effects)), 2);
    let consumed = harness.call(1, 1);
    assert!(matches!(
        errors(&harness.send(consumed)).as_slice(),
        [CallError::BadSequence { next: 2, .. }]
    ));
}

#[test]
fn a_timeout_names_who_is_missing_and_ends_the_epoch() {
    let mut harness = Harness::new(4);
    for rank in [0, 2] {
        let call = harness.call(rank, 1);
        harness.send(call);
    }
    harness.now += 49 * MS;
    harness.communicator.expire(harness.now);
    assert!(harness.communicator.take_effects().is_empty());
    harness.now += MS;
    assert_eq!(harness.communicator.next_deadline(), Some(harness.now));
    harness.communicator.expire(harness.now);
    let effects = harness.communicator.take_effects();
    let errors = errors(&effects);
    assert_eq!(errors.len(), 2);
    for error in errors {
        let CallError::Timeout(end) = &error else {
            panic!("{error:?}");
        };
        let missing: Vec<u32> = end.cause.missing().iter().map(|rank| rank.get()).collect();
        assert_eq!(missing, [1, 3]);
        assert!(error.to_string().contains("ranks 1, 3"), "{error}");
    }
    let ended = effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Ended { .. }));
    assert_eq!(ended.count(), 4);
    let mut late = harness.call(1, 1);
    late.epoch = 1;
    assert!(matches!(
        super::tests::errors(&harness.send(late)).as_slice(),
        [CallError::EpochEnded(_)]
    ));
    assert_eq!(harness.communicator.next_deadline(), None);
    // The next epoch works, while the old sessions still hold their memory.
    harness.form();
    assert_eq!(harness.communicator.epoch(), 2);
    for rank in 0..4 {
        let call = harness.call(rank, 1);
        let effects = harness.send(call);
        if rank == 3 {
            assert_eq!(successes(&harness.finish(&effects)), 4);
        }
    }
}

#[test]
fn a_rank_that_goes_aborts_the_others_by_name() {
    let mut harness = Harness::new(3);
    let call = harness.call(0, 1);
    harness.send(call);
    harness
        .communicator
        .detach(harness.sessions[1], Gone::Disconnected);
    let effects = harness.communicator.take_effects();
    let errors = errors(&effects);
    assert!(matches!(errors.as_slice(), [CallError::EpochEnded(_)]));
    assert!(
        errors[0].to_string().contains("rank 1 is gone"),
        "{errors:?}"
    );
    assert!(
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::Forget { .. }))
    );
    assert_eq!(harness.communicator.num_sessions(), 2);
}

#[test]
fn memory_outlives_a_reduction_that_runs() {
    let mut harness = Harness::new(2);
    let call = harness.call(0, 1);
    harness.send(call);
    let call = harness.call(1, 1);
    let launched = harness.send(call);
    harness
        .communicator
        .detach(harness.sessions[1], Gone::Disconnected);
    let effects = harness.communicator.take_effects();
    assert!(effects.is_empty(), "{effects:?}");
    // The next epoch forms and even calls sequence 1 before the old one is through.
    harness.form();
    let call = harness.call(0, 1);
    assert!(harness.send(call).is_empty());
    let effects = harness.finish(&launched);
    assert_eq!(successes(&effects), 2);
    let position = |wanted: fn(&Effect<u32>) -> bool| effects.iter().position(wanted);
    let replied = position(|effect| matches!(effect, Effect::Reply { .. }));
    let forgotten = position(|effect| matches!(effect, Effect::Forget { .. }));
    assert!(replied < forgotten && forgotten.is_some(), "{effects:?}");
    let call = harness.call(1, 1);
    let effects = harness.send(call);
    assert_eq!(successes(&harness.finish(&effects)), 2);
}

#[test]
fn joining_has_a_deadline_and_a_place_for_each() {
    let world_size = WorldSize::new(3).unwrap();
    let mut communicator: Communicator<u32> = Communicator::new(settings(3));
    let now = Instant::now();
    let rank = |number| world_size.rank(number).unwrap();
    let (session, epoch) = communicator.join(joining(rank(0)), now).unwrap();
    assert_eq!(epoch, 1);
    assert!(matches!(
        communicator.join(joining(rank(0)), now),
        Err(JoinError::RankTaken(_))
    ));
    communicator.expire(now + 100 * MS);
    let effects = communicator.take_effects();
    let [
        Effect::Ended {
            session: ended,
            end,
        },
    ] = effects.as_slice()
    else {
        panic!("{effects:?}");
    };
    assert_eq!(*ended, session);
    assert!(end.to_string().contains("ranks 1, 2 did not join"), "{end}");
    // One who leaves while forming takes the deadline along.
    let (session, _) = communicator.join(joining(rank(1)), now).unwrap();
    communicator.detach(session, Gone::Left);
    assert_eq!(communicator.next_deadline(), None);
}

#[test]
fn buffers_belong_to_sessions_and_wait_for_calls() {
    let mut harness = Harness::new(2);
    let (one, other) = (harness.sessions[0], harness.sessions[1]);
    let foreign = harness.buffers[1];
    assert!(matches!(
        harness.communicator.release(one, foreign),
        Err(BufferError::UnknownBuffer { .. })
    ));
    assert!(matches!(
        harness.communicator.allocate(one, 4000),
        Err(BufferError::ArenaFull {
            available: 3840,
            ..
        })
    ));
    let call = harness.call(0, 1);
    harness.send(call);
    let own = harness.buffers[0];
    harness.communicator.release(one, own).unwrap();
    assert!(harness.communicator.release(one, own).is_err());
    assert!(harness.communicator.allocate(one, 4000).is_err());
    let call = harness.call(1, 1);
    let effects = harness.send(call);
    harness.finish(&effects);
    let (all, _) = harness.communicator.allocate(one, 4000).unwrap();
    harness.communicator.release(one, all).unwrap();

    let handle = harness
        .communicator
        .keep_memory(other, Some(1), 1000)
        .unwrap();
    assert!(
        harness
            .communicator
            .keep_memory(other, Some(0), 1000)
            .is_err()
    );
    for (offset, length) in [(8, 8), (992, 16), (u64::MAX - 15, 32)] {
        let result = harness.communicator.register(other, handle, offset, length);
        assert!(result.is_err(), "{offset} {length}");
    }
    assert!(harness.communicator.register(one, handle, 0, 8).is_err());
    let registered = [0, 1].map(|_| {
        let communicator = &mut harness.communicator;
        communicator.register(other, handle, 16, 984).unwrap()
    });
    assert!(matches!(
        harness.communicator.register(other, handle, 0, 8),
        Err(BufferError::Limit { limit: 3, .. })
    ));
    // The memory goes with its last buffer.
    harness.communicator.take_effects();
    for (buffer, expected) in registered.into_iter().zip([0, 1]) {
        harness.communicator.release(other, buffer).unwrap();
        let effects = harness.communicator.take_effects();
        let forgotten = effects
            .iter()
            .filter(|effect| matches!(effect, Effect::ForgetMemory { .. }));
        assert_eq!(forgotten.count(), expected);
    }
    assert!(harness.communicator.register(other, handle, 0, 8).is_err());
}

#[derive(Debug, Clone)]
enum Step {
    Call { rank: usize, ahead: u64, elems: u64 },
    Finish,
    Detach { rank: usize },
    Wait { ms: u32 },
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..3_usize, 1..3_u64, prop_oneof![9 => Just(8_u64), 1 => Just(5)])
            .prop_map(|(rank, ahead, elems)| Step::Call { rank, ahead, elems }),
        4 => Just(Step::Finish),
        1 => (0..3_usize).prop_map(|rank| Step::Detach { rank }),
        1 => (0..80_u32).prop_map(|ms| Step::Wait { ms }),
    ]
}

proptest! {
    /// Whatever happens, every call is answered exactly once, a launch has every rank once in order,
    /// and after the deadlines nothing waits.
    #[test]
    fn every_call_is_answered_once(steps in proptest::collection::vec(steps(), 1..120)) {
        let mut harness = Harness::new(3);
        let mut launched: Vec<Launch> = Vec::new();
        let mut answers = BTreeMap::<u32, u32>::new();
        let mut next = [1_u64; 3];
        let mut done = HashMap::<u64, u64>::new();
        let mut absorb = |effects: Vec<Effect<u32>>, launched: &mut Vec<Launch>| {
            for effect in effects {
                match effect {
                    Effect::Reply { reply_to, .. } => *answers.entry(reply_to).or_default() += 1,
                    Effect::Launch(launch) => launched.push(launch),
                    Effect::Done { session, sequence } => {
                        let before = done.insert(session, sequence).unwrap_or(0);
                        assert!(before <= sequence, "done went back");
                    }
                    Effect::Ready { .. }
                    | Effect::Test { .. }
                    | Effect::Ended { .. }
                    | Effect::ForgetMemory { .. }
                    | Effect::Share { .. }
                    | Effect::Unshare { .. }
                    | Effect::Forget { .. } => {}
                }
            }
        };
        for step in steps {
            if harness.communicator.members.iter().all(Option::is_none) {
                harness.form();
                next = [1; 3];
            }
            match step {
                Step::Call { rank, ahead, elems } => {
                    let sequence = next[rank] + ahead - 1;
                    next[rank] = sequence + 1;
                    let mut call = harness.call(rank, sequence);
                    call.num_elems = elems;
                    harness.communicator.all_reduce(call, harness.now);
                }
                Step::Finish => {
                    if let Some(launch) = launched.pop() {
                        harness.communicator.reduced(&launch, MS);
                    }
                }
                Step::Detach { rank } => {
                    harness.communicator.detach(harness.sessions[rank], Gone::Disconnected);
                }
                Step::Wait { ms } => {
                    harness.now += ms * MS;
                    harness.communicator.expire(harness.now);
                }
            }
            absorb(harness.communicator.take_effects(), &mut launched);
            prop_assert!(launched.len() <= 1);
        }
        for _ in 0..200 {
            if let Some(launch) = launched.pop() {
                prop_assert_eq!(launch.ranks.len(), 3);
                harness.communicator.reduced(&launch, MS);
            }
            harness.now += 1000 * MS;
            harness.communicator.expire(harness.now);
            absorb(harness.communicator.take_effects(), &mut launched);
        }
        prop_assert!(harness.communicator.next_deadline().is_none());
        let expected: BTreeMap<u32, u32> = (1..=harness.next_reply).map(|reply| (reply, 1)).collect();
        prop_assert_eq!(answers, expected);
    }
}
