//! The communicator: membership, epochs, buffers and the order of reductions.
//!
//! Owns every transition. It is a plain struct without locks, clocks or I/O: the executor's task feeds
//! it events with the time, and carries out the [`Effect`]s it answers. Refuses to touch memory (the
//! backend does) and to know messages (`rpc` does).
//!
//! ```text
//!               rank joins / goes         all joined (host)
//!            +-------------------+    +-----------------------+
//!            |                   v    |  all mapped   tested  v
//!            +---------------- Forming --> Testing --> (lane chosen) --> Sharing --> Ready
//!                                ^   |     (cuda)       |    |   lane     |  all      ^ |
//!                                |   |       |          |    |   shares   |  shared   | |
//!                                |   |       |          |    +---- no ----+-----------+ |
//!     join timeout, failed test, |   |       |          |                 |             | a rank goes, stalls past
//!     no lane: those who joined  +---+-------+----------+-----------------+             | its deadline; the GPU
//!     get EpochEnd               ^                                                      v fails
//!                                +------------- epoch + 1, no members ------------------+
//! ```
//!
//! A session is one rank's membership of one epoch. When the epoch ends, its sessions are told why and
//! serve no more calls, but keep their memory until their own connection ends: the peer has it mapped.

mod arena;
mod error;
mod lane_calls;
mod rendezvous;
mod stats;

pub(crate) use error::{
    BufferError, CallError, EndCause, EpochEnd, Gone, GpuError, JoinError, REGISTER_ALIGN_BYTES,
    Side,
};
pub(crate) use lane_calls::LaneCalls;
pub(crate) use rendezvous::{Place, Signature, Ticket};
pub(crate) use stats::{Count, Quantiles, RankStats, ReductionKind, Stats};

use crate::plan::model::Costs;
use crate::plan::{GpuLimits, LaneChoice, Plan, PlanRequest, ResidentBlocks, choose_lane, plan};
use allreduce_contract::lane::Geometry;
use allreduce_contract::v1::{BadEnum, ErrorCode, GaveUp};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, Rank, WorldSize};
use arena::{Arena, ArenaFull};
use rendezvous::{Arrival, Rendezvous, Stage};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The arena, as a memory of a session; memories that were handed over count from 1.
pub(crate) const ARENA: u64 = 0;

/// GPUs that passed the test.
#[derive(Debug, Clone)]
pub(crate) struct GpusTested {
    /// What they can take.
    pub(crate) limits: GpuLimits,
    /// How long each algorithm takes on their links; none on one GPU.
    pub(crate) costs: Option<Arc<Costs>>,
    /// What is known of their links, for people.
    pub(crate) topology: String,
}

/// What a communicator is told once.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) backend: Backend,
    pub(crate) world_size: WorldSize,
    /// Calls a rank may be ahead of the reduction that runs.
    pub(crate) max_in_flight: u64,
    /// Buffers, and memories handed over, that a session may hold.
    pub(crate) max_buffers: u64,
    /// How long the first rank waits for the others.
    pub(crate) join_timeout: Duration,
    /// Threads that may share a reduction.
    pub(crate) max_threads: usize,
    /// How ranks reduce in shared memory.
    pub(crate) geometry: Geometry,
    /// Backend host: what was measured on this machine, if anything was.
    pub(crate) costs: Option<Arc<Costs>>,
    /// What is known of the machine before its GPUs are, for people.
    pub(crate) topology: String,
}

/// A rank that wants in, already checked against the token.
#[derive(Debug, Clone)]
pub(crate) struct Joining {
    /// Not to be guessed: who knows it may call for the rank.
    pub(crate) session: u64,
    pub(crate) rank: Rank,
    /// What it can use, best first; empty leaves it open.
    pub(crate) lanes: Vec<Lane>,
    pub(crate) arena_len_bytes: u64,
    pub(crate) pid: u32,
    pub(crate) client_name: String,
}

/// A tensor as a call names it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AskedRange {
    pub(crate) buffer_id: u64,
    pub(crate) offset_bytes: u64,
}

/// One rank's AllReduce. Fields that must be present and valid come in as they were sent, since a bad
/// one consumes the sequence number, which only the communicator can do.
#[derive(Debug)]
pub(crate) struct Call<T> {
    pub(crate) reply_to: T,
    pub(crate) session: u64,
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
    pub(crate) src: Option<AskedRange>,
    pub(crate) dst: Option<AskedRange>,
    pub(crate) num_elems: u64,
    pub(crate) dtype: Result<Dtype, BadEnum>,
    pub(crate) op: Result<Op, BadEnum>,
    /// The algorithm asked for, if one is.
    pub(crate) algorithm: Result<Option<Algorithm>, BadEnum>,
    pub(crate) timeout: Duration,
    /// The ready value announced, if the rank's ready word does not hold it.
    pub(crate) unsignalled: Option<u64>,
    /// The stream that was named, if one was.
    pub(crate) ticket: Result<Option<Ticket>, BadStream>,
}

/// A stream that a call cannot name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadStream {
    pub(crate) stream: u32,
    pub(crate) reason: &'static str,
}

/// A reduction was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reduced {
    pub(crate) algorithm: Algorithm,
    pub(crate) took: Duration,
    pub(crate) skew: Duration,
    /// How long this rank waited for the last.
    pub(crate) waited: Duration,
    pub(crate) last_rank: Rank,
}

/// What the backend is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) sequence: u64,
    pub(crate) plan: Plan,
    pub(crate) signature: Signature,
    /// In rank order.
    pub(crate) ranks: Vec<RankLaunch>,
    /// The longest of the ranks' timeouts.
    pub(crate) timeout: Duration,
}

/// One rank's part of a [`Launch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankLaunch {
    pub(crate) rank: Rank,
    pub(crate) session: u64,
    pub(crate) src: Place,
    pub(crate) dst: Place,
    pub(crate) ticket: Option<Ticket>,
}

/// What the executor's task is to do.
#[derive(Debug)]
pub(crate) enum Effect<T> {
    /// Answer a call.
    Reply {
        reply_to: T,
        result: Result<Reduced, CallError>,
    },
    /// Run this, then call [`Communicator::reduced`] or [`Communicator::launch_failed`].
    Launch(Launch),
    /// Every rank has joined and mapped its window: test the GPUs, then call [`Communicator::tested`].
    Test {
        /// In rank order.
        sessions: Vec<u64>,
        epoch: u64,
    },
    /// The lane has ranks reach each other's memory: tell each of these where it is, and call
    /// [`Communicator::shared`] with what it answers.
    Share {
        /// In rank order.
        sessions: Vec<u64>,
        epoch: u64,
        lane: Lane,
    },
    /// Nothing comes of the lane of [`Effect::Share`]: who still tries it is to give up.
    Unshare { epoch: u64 },
    /// The executor touches no buffer of this session's sequences up to this one any more.
    Done { session: u64, sequence: u64 },
    /// Every rank has joined: tell these sessions.
    Ready {
        sessions: Vec<u64>,
        epoch: u64,
        lane: LaneChoice,
    },
    /// The epoch of this session is over and none of its memory is in use: tell it.
    Ended { session: u64, end: EpochEnd },
    /// Nothing refers to this memory, which the session handed over, any more.
    ForgetMemory { session: u64, memory: u64 },
    /// Nothing refers to any of this session's memory any more.
    Forget { session: u64, rank: Rank },
}

/// A buffer of a session.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    memory: u64,
    offset_bytes: u64,
    len_bytes: u64,
    /// Calls in flight that name it.
    users: u32,
    /// Given back while in flight.
    released: bool,
}

#[derive(Debug)]
struct Session {
    rank: Rank,
    epoch: u64,
    lanes: Vec<Lane>,
    /// Whether the rank has its window mapped; on the host backend nobody asks.
    mapped: bool,
    /// Whether the rank has its peers' memory mapped, where the lane needs that.
    shared: bool,
    pid: u32,
    client_name: String,
    arena: Arena,
    /// Memories handed over: handle to length.
    memories: HashMap<u64, u64>,
    buffers: HashMap<u64, Buffer>,
    ended: Option<EpochEnd>,
    /// Its connection is over; it goes as soon as nothing runs on its memory.
    detached: bool,
    /// Every sequence up to this one was called and answered.
    done: u64,
    /// Sequences beyond `done` that were answered.
    answered_ahead: BTreeSet<u64>,
}

impl Session {
    /// Notes that a call was answered; the sequence up to which every call is, none missing. It never
    /// goes back: a later call may be answered first, and an earlier one may still come.
    fn answered(&mut self, sequence: u64) -> u64 {
        self.answered_ahead.insert(sequence);
        while self.answered_ahead.remove(&(self.done + 1)) {
            self.done += 1;
        }
        self.done
    }

    fn alive(&self) -> Result<(), EpochEnd> {
        self.ended.clone().map_or(Ok(()), Err)
    }

    fn use_buffer(&mut self, buffer_id: u64) {
        if let Some(buffer) = self.buffers.get_mut(&buffer_id) {
            buffer.users += 1;
        }
    }

    /// A call that names the buffer is answered; as [`Self::free`] if it was given back meanwhile.
    fn settle_buffer(&mut self, buffer_id: u64) -> Option<u64> {
        let buffer = self.buffers.get_mut(&buffer_id)?;
        buffer.users = buffer.users.saturating_sub(1);
        if buffer.users > 0 || !buffer.released {
            return None;
        }
        let buffer = self.buffers.remove(&buffer_id)?;
        self.free(buffer)
    }

    /// Takes back the bytes of a buffer that is no longer in the table. The handle of a memory that was
    /// handed over, if this was the last buffer in it.
    fn free(&mut self, buffer: Buffer) -> Option<u64> {
        if buffer.memory == ARENA {
            self.arena.release(buffer.offset_bytes, buffer.len_bytes);
            return None;
        }
        let in_use = self
            .buffers
            .values()
            .any(|other| other.memory == buffer.memory);
        if in_use {
            return None;
        }
        self.memories.remove(&buffer.memory);
        Some(buffer.memory)
    }
}

/// A session, for display.
#[derive(Debug, Clone)]
pub(crate) struct SessionInfo {
    session: u64,
    pub(crate) rank: Rank,
    pub(crate) epoch: u64,
    pub(crate) pid: u32,
    pub(crate) client_name: String,
    pub(crate) arena_len_bytes: u64,
    pub(crate) buffers: u32,
    pub(crate) buffer_bytes: u64,
    pub(crate) ended: bool,
}

#[derive(Debug)]
enum Phase {
    /// Ranks are joining; the deadline runs from the first.
    Forming { deadline: Option<Instant> },
    /// Every rank is in; the GPUs are being tested.
    Testing { deadline: Option<Instant> },
    /// Every rank is in; they map each other's memory.
    Sharing {
        lane: LaneChoice,
        deadline: Option<Instant>,
    },
    /// Every rank is in.
    Ready { lane: LaneChoice },
}

/// The state of one communicator. See the module's drawing.
#[derive(Debug)]
pub(crate) struct Communicator<T> {
    settings: Settings,
    epoch: u64,
    phase: Phase,
    /// By rank: the session that is a member of the current epoch.
    members: Vec<Option<u64>>,
    sessions: HashMap<u64, Session>,
    rendezvous: BTreeMap<u64, Rendezvous<T>>,
    /// Every sequence up to this one of the current epoch was reduced or skipped.
    floor: u64,
    /// The sequence that the backend runs, and the epoch it belongs to.
    running: Option<u64>,
    /// Arrivals of a launch whose epoch has ended meanwhile.
    orphaned: Vec<Arrival<T>>,
    /// Ends to be told once nothing runs.
    pending_ends: Vec<(u64, EpochEnd)>,
    next_id: u64,
    /// What the GPUs can take, since they were tested.
    gpus: Option<GpuLimits>,
    /// How long each algorithm takes on their links.
    costs: Option<Arc<Costs>>,
    /// What is known of their links, for people.
    topology: String,
    effects: Vec<Effect<T>>,
    stats: Stats,
}

impl<T> Communicator<T> {
    pub(crate) fn new(settings: Settings) -> Self {
        let world_size = settings.world_size;
        let costs = settings.costs.clone();
        let topology = settings.topology.clone();
        Self {
            settings,
            epoch: 1,
            phase: Phase::Forming { deadline: None },
            members: world_size.ranks().map(|_| None).collect(),
            sessions: HashMap::new(),
            rendezvous: BTreeMap::new(),
            floor: 0,
            running: None,
            orphaned: Vec::new(),
            pending_ends: Vec::new(),
            next_id: 1,
            gpus: None,
            costs,
            topology,
            effects: Vec::new(),
            stats: Stats::new(world_size),
        }
    }

    /// Takes what is to be done since the last call.
    pub(crate) fn take_effects(&mut self) -> Vec<Effect<T>> {
        std::mem::take(&mut self.effects)
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }

    pub(crate) fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The lane in use, once Ready.
    pub(crate) fn lane(&self) -> Option<&LaneChoice> {
        match &self.phase {
            Phase::Ready { lane } => Some(lane),
            Phase::Forming { .. } | Phase::Testing { .. } | Phase::Sharing { .. } => None,
        }
    }

    pub(crate) fn is_joined(&self, rank: Rank) -> bool {
        self.members
            .get(rank.as_usize())
            .is_some_and(Option::is_some)
    }

    /// Whether `rank` owns the session.
    pub(crate) fn owns(&self, session: u64, rank: u32) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|found| found.rank.get() == rank)
    }

    /// How many sessions hold memory.
    pub(crate) fn num_sessions(&self) -> usize {
        self.sessions.len()
    }

    pub(crate) fn sessions(&self) -> Vec<SessionInfo> {
        let mut list: Vec<SessionInfo> = self
            .sessions
            .iter()
            .map(|(id, session)| SessionInfo {
                session: *id,
                rank: session.rank,
                epoch: session.epoch,
                pid: session.pid,
                client_name: session.client_name.clone(),
                arena_len_bytes: session.arena.len_bytes(),
                buffers: u32::try_from(session.buffers.len()).unwrap_or(u32::MAX),
                buffer_bytes: session
                    .buffers
                    .values()
                    .map(|buffer| buffer.len_bytes)
                    .sum(),
                ended: session.ended.is_some(),
            })
            .collect();
        list.sort_by_key(|info| (info.rank, info.session));
        list
    }

    fn fresh_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    // Membership.

    /// Whether `rank` may join now; the executor asks before it makes the window.
    pub(crate) fn may_join(&self, rank: Rank) -> Result<(), JoinError> {
        if self.is_joined(rank) {
            Err(JoinError::RankTaken(rank))
        } else {
            Ok(())
        }
    }

    /// Takes a rank in; answers its session and epoch.
    ///
    /// # Errors
    /// [`JoinError::RankTaken`].
    pub(crate) fn join(&mut self, joining: Joining, now: Instant) -> Result<(u64, u64), JoinError> {
        self.may_join(joining.rank)?;
        let id = joining.session;
        if let Some(member) = self.members.get_mut(joining.rank.as_usize()) {
            *member = Some(id);
        }
        let session = Session {
            rank: joining.rank,
            epoch: self.epoch,
            lanes: joining.lanes,
            mapped: self.settings.backend == Backend::Host,
            shared: false,
            pid: joining.pid,
            client_name: joining.client_name,
            arena: Arena::new(joining.arena_len_bytes),
            memories: HashMap::new(),
            buffers: HashMap::new(),
            ended: None,
            detached: false,
            done: 0,
            answered_ahead: BTreeSet::new(),
        };
        self.sessions.insert(id, session);
        if let Phase::Forming { deadline } = &mut self.phase {
            deadline.get_or_insert(now + self.settings.join_timeout);
        }
        self.form();
        Ok((id, self.epoch))
    }

    /// Goes on from Forming once every rank has joined and has its window mapped.
    fn form(&mut self) {
        let Phase::Forming { deadline } = self.phase else {
            return;
        };
        let is_in = |member: &Option<u64>| {
            member
                .and_then(|session| self.sessions.get(&session))
                .is_some_and(|session| session.mapped)
        };
        if !self.members.iter().all(is_in) {
            return;
        }
        match self.settings.backend {
            Backend::Host => self.choose_lane(deadline),
            Backend::Cuda => {
                self.phase = Phase::Testing { deadline };
                self.effects.push(Effect::Test {
                    sessions: self.members.iter().flatten().copied().collect(),
                    epoch: self.epoch,
                });
            }
        }
    }

    /// In rank order.
    pub(crate) fn member_sessions(&self) -> Vec<u64> {
        self.members.iter().flatten().copied().collect()
    }

    /// By rank: the lanes it can use.
    fn wanted_lanes(&self) -> Vec<&[Lane]> {
        let sessions = self.members.iter().flatten();
        sessions
            .filter_map(|session| self.sessions.get(session))
            .map(|session| session.lanes.as_slice())
            .collect()
    }

    /// The lane that those who are in would have on GPUs that can take so much; none if they are to be refused.
    pub(crate) fn lane_on(&self, gpus: &GpuLimits) -> Option<Lane> {
        let choice = choose_lane(self.settings.backend, &self.wanted_lanes(), Some(gpus));
        choice.ok().map(|choice| choice.lane)
    }

    /// Every rank is in, and its memory is as it should be.
    fn choose_lane(&mut self, deadline: Option<Instant>) {
        let sessions = self.member_sessions();
        let wanted = self.wanted_lanes();
        let lane = match choose_lane(self.settings.backend, &wanted, self.gpus.as_ref()) {
            Ok(lane) => lane,
            Err(refusal) => {
                return self.end_epoch(EndCause::Ineligible {
                    ranks: Vec::new(),
                    reason: refusal.to_string(),
                });
            }
        };
        match lane.lane {
            Lane::Rpc => self.become_ready(lane),
            Lane::Resident | Lane::Delegated => {
                self.effects.push(Effect::Share {
                    sessions,
                    epoch: self.epoch,
                    lane: lane.lane,
                });
                self.phase = Phase::Sharing { lane, deadline };
            }
        }
    }

    /// A rank has mapped its peers' memory, or says why it could not.
    pub(crate) fn shared(&mut self, session: u64, error: Option<String>) {
        let Phase::Sharing { lane, .. } = &self.phase else {
            return;
        };
        let lane = lane.clone();
        let Some(found) = self.sessions.get_mut(&session) else {
            return;
        };
        let rank = found.rank;
        if self.members.get(rank.as_usize()) != Some(&Some(session)) {
            return;
        }
        if let Some(error) = error {
            let reason = format!("rank {rank} cannot use lane {}: {error}", lane.lane);
            return self.sharing_failed(vec![rank], reason);
        }
        found.shared = true;
        let mut members = self.members.iter().flatten();
        if members.all(|session| self.sessions.get(session).is_some_and(|found| found.shared)) {
            self.become_ready(lane);
        }
    }

    /// There is no memory that the ranks of `epoch` could share.
    pub(crate) fn cannot_share(&mut self, epoch: u64, reason: String) {
        if epoch == self.epoch && matches!(self.phase, Phase::Sharing { .. }) {
            self.sharing_failed(Vec::new(), reason);
        }
    }

    /// The lane cannot be had after all. One that was asked for refuses every rank; where nobody asked, the ranks go on
    /// with lane rpc, and are told why.
    fn sharing_failed(&mut self, ranks: Vec<Rank>, reason: String) {
        let Phase::Sharing { lane, .. } = &self.phase else {
            return;
        };
        if lane.is_asked {
            return self.end_epoch(EndCause::Ineligible { ranks, reason });
        }
        tracing::warn!(reason, "lane rpc in the place of {}", lane.lane);
        self.effects.push(Effect::Unshare { epoch: self.epoch });
        self.become_ready(LaneChoice {
            lane: Lane::Rpc,
            reason: format!("auto; {reason}"),
            is_asked: false,
        });
    }

    /// The lane of `epoch` does not go on.
    pub(crate) fn lane_failed(&mut self, epoch: u64, rank: Option<Rank>, reason: String) {
        if epoch == self.epoch && !matches!(self.phase, Phase::Forming { .. }) {
            self.end_epoch(EndCause::Lane { rank, reason });
        }
    }

    /// A rank could not finish a reduction of its own: ends its epoch, if it still is.
    pub(crate) fn gave_up(&mut self, session: u64, gave_up: &GaveUp) {
        let Some(found) = self.sessions.get(&session) else {
            return;
        };
        let rank = found.rank;
        if self.members.get(rank.as_usize()) != Some(&Some(session)) {
            return;
        }
        let world_size = self.settings.world_size;
        let about: Vec<Rank> = gave_up
            .ranks
            .iter()
            .filter_map(|rank| world_size.rank(*rank).ok())
            .take(world_size.as_usize())
            .collect();
        let code = match gave_up.timeout_ms {
            0 => ErrorCode::EpochEnded,
            1.. => ErrorCode::Timeout,
        };
        self.stats.record_error(code);
        let cause = match (gave_up.timeout_ms, about.as_slice()) {
            (1.., [_, ..]) => EndCause::Timeout {
                missing: about,
                sequence: gave_up.sequence,
                timeout: Duration::from_millis(u64::from(gave_up.timeout_ms)),
            },
            (_, about) => EndCause::Lane {
                rank: about.first().copied().filter(|_| about.len() == 1),
                reason: format!("rank {rank} gave up: {}", gave_up.reason),
            },
        };
        self.end_epoch(cause);
    }

    /// A session that is a member of the epoch, and a peer of it with its session.
    pub(crate) fn peers(&self, session: u64, rank: u32, peer: u32) -> Option<(Rank, Rank, u64)> {
        let world_size = self.settings.world_size;
        let (rank, peer) = (world_size.rank(rank).ok()?, world_size.rank(peer).ok()?);
        let member = |rank: Rank| self.members.get(rank.as_usize()).copied().flatten();
        if member(rank)? != session {
            return None;
        }
        Some((rank, peer, member(peer)?))
    }

    fn become_ready(&mut self, lane: LaneChoice) {
        let sessions = self.member_sessions();
        self.phase = Phase::Ready { lane: lane.clone() };
        self.effects.push(Effect::Ready {
            sessions,
            epoch: self.epoch,
            lane,
        });
    }

    /// A rank has mapped its window, or says why it could not.
    pub(crate) fn mapped(&mut self, session: u64, error: Option<String>) {
        let Some(found) = self.sessions.get_mut(&session) else {
            return;
        };
        let rank = found.rank;
        if self.members.get(rank.as_usize()) != Some(&Some(session)) {
            return;
        }
        match (error, &self.phase) {
            (None, _) => {
                found.mapped = true;
                self.form();
            }
            (Some(error), Phase::Forming { .. }) => self.end_epoch(EndCause::Ineligible {
                ranks: vec![rank],
                reason: format!("rank {rank} cannot map its window: {error}"),
            }),
            // It said before that it had.
            (Some(_), Phase::Testing { .. } | Phase::Sharing { .. } | Phase::Ready { .. }) => {}
        }
    }

    /// The GPUs of `epoch` were tested: what they can take, or the ranks it is about and why not.
    pub(crate) fn tested(&mut self, epoch: u64, result: Result<GpusTested, (Vec<Rank>, String)>) {
        let Phase::Testing { deadline } = self.phase else {
            return;
        };
        if epoch != self.epoch {
            return;
        }
        match result {
            Ok(GpusTested {
                limits,
                costs,
                topology,
            }) => {
                self.gpus = Some(limits);
                self.costs = costs;
                self.topology = topology;
                self.choose_lane(deadline);
            }
            Err((ranks, reason)) => self.end_epoch(EndCause::Ineligible { ranks, reason }),
        }
    }

    /// Something on the GPU went wrong: ends `epoch`, if it still is.
    pub(crate) fn gpu_failed(&mut self, epoch: u64, rank: Option<Rank>, reason: String) {
        if epoch == self.epoch && !matches!(self.phase, Phase::Forming { .. }) {
            self.end_epoch(EndCause::Gpu { rank, reason });
        }
    }

    /// What [`Effect::Launch`] asked for could not be enqueued: ends the epoch, and answers who called.
    pub(crate) fn launch_failed(&mut self, launch: &Launch, rank: Option<Rank>, reason: String) {
        self.running = None;
        if let Some(rendezvous) = self.rendezvous.get_mut(&launch.sequence)
            && let Stage::Running { arrivals } = &mut rendezvous.stage
        {
            rendezvous.stage = Stage::Waiting {
                arrivals: std::mem::take(arrivals),
            };
        }
        self.end_epoch(EndCause::Gpu { rank, reason });
        self.forget_detached();
    }

    /// A session's connection is over.
    pub(crate) fn detach(&mut self, session: u64, how: Gone) {
        let Some(found) = self.sessions.get_mut(&session) else {
            return;
        };
        found.detached = true;
        let rank = found.rank;
        if self.members.get(rank.as_usize()) == Some(&Some(session)) {
            match &mut self.phase {
                Phase::Ready { .. } | Phase::Testing { .. } | Phase::Sharing { .. } => {
                    self.end_epoch(EndCause::RankGone { rank, how });
                }
                Phase::Forming { deadline } => {
                    if let Some(member) = self.members.get_mut(rank.as_usize()) {
                        *member = None;
                    }
                    if self.members.iter().all(Option::is_none) {
                        *deadline = None;
                    }
                }
            }
        }
        self.forget_detached();
    }

    /// Removes the sessions that are over, unless something runs on their memory.
    fn forget_detached(&mut self) {
        if self.running.is_some() {
            return;
        }
        let gone: Vec<u64> = self
            .sessions
            .iter()
            .filter(|(_, session)| session.detached)
            .map(|(id, _)| *id)
            .collect();
        for session in gone {
            if let Some(Session { rank, .. }) = self.sessions.remove(&session) {
                self.effects.push(Effect::Forget { session, rank });
            }
        }
    }

    /// Ends the epoch: every member's session is over, every waiting call is answered, and the next
    /// epoch forms.
    fn end_epoch(&mut self, cause: EndCause) {
        let end = EpochEnd {
            epoch: self.epoch,
            cause,
        };
        let error = match &end.cause {
            EndCause::Timeout { .. } => CallError::Timeout(end.clone()),
            EndCause::RankGone { .. }
            | EndCause::JoinTimeout { .. }
            | EndCause::Ineligible { .. }
            | EndCause::Gpu { .. }
            | EndCause::Lane { .. } => CallError::EpochEnded(end.clone()),
        };
        if end.cause.is_orderly() {
            tracing::info!(epoch = end.epoch, cause = %end.cause, "epoch ended");
        } else {
            tracing::warn!(epoch = end.epoch, cause = %end.cause, "epoch ended");
        }
        for (_, rendezvous) in std::mem::take(&mut self.rendezvous) {
            match rendezvous.stage {
                Stage::Waiting { arrivals } => {
                    for arrival in arrivals {
                        self.answer(arrival, Err(error.clone()));
                    }
                }
                // Its data is complete, and it ends well; only then may memory go.
                Stage::Running { arrivals } => self.orphaned = arrivals,
                Stage::Failed { .. } => {}
            }
        }
        for session in self.members.iter_mut().filter_map(Option::take) {
            if let Some(found) = self.sessions.get_mut(&session) {
                found.ended = Some(end.clone());
                self.pending_ends.push((session, end.clone()));
            }
        }
        self.epoch += 1;
        self.floor = 0;
        self.gpus = None;
        self.costs.clone_from(&self.settings.costs);
        self.topology.clone_from(&self.settings.topology);
        self.phase = Phase::Forming { deadline: None };
        self.tell_ends();
    }

    fn tell_ends(&mut self) {
        if self.running.is_some() {
            return;
        }
        for (session, end) in std::mem::take(&mut self.pending_ends) {
            self.effects.push(Effect::Ended { session, end });
        }
    }

    // Buffers.

    fn session_mut(&mut self, session: u64) -> Result<&mut Session, BufferError> {
        self.sessions
            .get_mut(&session)
            .filter(|found| !found.detached)
            .ok_or(BufferError::UnknownSession(session))
    }

    /// A session (whose rank the caller claims to be, if it has to) has handed over a memory of this length;
    /// answers its handle.
    ///
    /// # Errors
    /// Unknown session, epoch over, limit.
    pub(crate) fn keep_memory(
        &mut self,
        session: u64,
        rank: Option<u32>,
        len_bytes: u64,
    ) -> Result<u64, BufferError> {
        let (limit, handle) = (self.settings.max_buffers, self.fresh_id());
        let found = self.session_mut(session)?;
        if rank.is_some_and(|rank| found.rank.get() != rank) {
            return Err(BufferError::UnknownSession(session));
        }
        found.alive()?;
        if found.memories.len() as u64 >= limit {
            return Err(BufferError::Limit {
                what: "memories",
                limit,
            });
        }
        found.memories.insert(handle, len_bytes);
        Ok(handle)
    }

    /// A memory that was taken in could not be mapped after all.
    pub(crate) fn forget_memory(&mut self, session: u64, handle: u64) {
        if let Some(found) = self.sessions.get_mut(&session) {
            found.memories.remove(&handle);
        }
    }

    /// Takes a buffer from a session's arena; answers its id and offset.
    ///
    /// # Errors
    /// Unknown session, epoch over, arena full, limit.
    pub(crate) fn allocate(
        &mut self,
        session: u64,
        len_bytes: u64,
    ) -> Result<(u64, u64), BufferError> {
        let (limit, buffer_id) = (self.settings.max_buffers, self.fresh_id());
        let found = self.session_mut(session)?;
        found.alive()?;
        if found.buffers.len() as u64 >= limit {
            return Err(BufferError::Limit {
                what: "buffers",
                limit,
            });
        }
        let offset_bytes =
            found
                .arena
                .allocate(len_bytes)
                .map_err(|ArenaFull { needed, available }| BufferError::ArenaFull {
                    needed,
                    available,
                })?;
        found.buffers.insert(
            buffer_id,
            Buffer {
                memory: ARENA,
                offset_bytes,
                len_bytes,
                users: 0,
                released: false,
            },
        );
        Ok((buffer_id, offset_bytes))
    }

    /// Makes a range of a memory that was handed over a buffer; answers its id.
    ///
    /// # Errors
    /// Unknown session or memory, range outside, misaligned, epoch over, limit.
    pub(crate) fn register(
        &mut self,
        session: u64,
        handle: u64,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<u64, BufferError> {
        let (limit, buffer_id) = (self.settings.max_buffers, self.fresh_id());
        let found = self.session_mut(session)?;
        found.alive()?;
        let memory_len_bytes = *found
            .memories
            .get(&handle)
            .ok_or(BufferError::UnknownMemory { session, handle })?;
        if !offset_bytes.is_multiple_of(REGISTER_ALIGN_BYTES) {
            return Err(BufferError::Misaligned(offset_bytes));
        }
        let inside = offset_bytes
            .checked_add(len_bytes)
            .is_some_and(|end| end <= memory_len_bytes);
        if !inside {
            return Err(BufferError::OutOfBounds {
                offset_bytes,
                len_bytes,
                memory_len_bytes,
            });
        }
        if found.buffers.len() as u64 >= limit {
            return Err(BufferError::Limit {
                what: "buffers",
                limit,
            });
        }
        found.buffers.insert(
            buffer_id,
            Buffer {
                memory: handle,
                offset_bytes,
                len_bytes,
                users: 0,
                released: false,
            },
        );
        Ok(buffer_id)
    }

    /// Gives a buffer back; one that a call in flight names comes back when that is answered. Answers the
    /// memory that [`Effect::ForgetMemory`] will name, if the buffer is in one that was handed over.
    ///
    /// # Errors
    /// Unknown session or buffer. An ended epoch is no error: giving back always works.
    pub(crate) fn release(
        &mut self,
        session: u64,
        buffer_id: u64,
    ) -> Result<Option<u64>, BufferError> {
        let found = self.session_mut(session)?;
        let unknown = BufferError::UnknownBuffer { session, buffer_id };
        let buffer = found.buffers.get_mut(&buffer_id).ok_or(unknown.clone())?;
        if buffer.released {
            return Err(unknown);
        }
        let handed = (buffer.memory != ARENA).then_some(buffer.memory);
        if buffer.users > 0 {
            buffer.released = true;
            return Ok(handed);
        }
        let buffer = found.buffers.remove(&buffer_id).ok_or(unknown)?;
        if let Some(memory) = found.free(buffer) {
            self.effects.push(Effect::ForgetMemory { session, memory });
        }
        Ok(handed)
    }

    // Reductions.

    /// One rank calls AllReduce. The answer comes as an effect, now or later.
    pub(crate) fn all_reduce(&mut self, call: Call<T>, now: Instant) {
        let rank = match self.admit(&call) {
            Ok(rank) => rank,
            Err(error) => {
                self.effects.push(Effect::Reply {
                    reply_to: call.reply_to,
                    result: Err(error),
                });
                return;
            }
        };
        let sequence = call.sequence;
        if let Some(Rendezvous {
            stage: Stage::Failed { error, answered },
        }) = self.rendezvous.get_mut(&sequence)
        {
            answered.push(rank);
            let error = error.clone();
            self.refuse(call, error);
            self.launch_next();
            return;
        }
        let checked = self.check(&call, rank).and_then(|checked| {
            let rendezvous = self.rendezvous.entry(sequence).or_default();
            rendezvous.agrees(sequence, rank, checked.0)?;
            Ok(checked)
        });
        match checked {
            Ok((signature, src, dst)) => {
                if let Some(session) = self.sessions.get_mut(&call.session) {
                    session.use_buffer(src.buffer_id);
                    session.use_buffer(dst.buffer_id);
                }
                let rendezvous = self.rendezvous.entry(sequence).or_default();
                if let Stage::Waiting { arrivals } = &mut rendezvous.stage {
                    arrivals.push(Arrival {
                        rank,
                        session: call.session,
                        sequence,
                        reply_to: call.reply_to,
                        signature,
                        src,
                        dst,
                        ticket: call.ticket.ok().flatten(),
                        at: now,
                        timeout: call.timeout,
                    });
                }
            }
            Err(error) => {
                self.refuse(call, error.clone());
                self.fail(sequence, rank, error);
            }
        }
        self.launch_next();
    }

    /// Checks what concerns the call alone: session, epoch, membership, sequence.
    fn admit(&self, call: &Call<T>) -> Result<Rank, CallError> {
        let session = self
            .sessions
            .get(&call.session)
            .filter(|session| !session.detached)
            .ok_or(CallError::UnknownSession(call.session))?;
        session.alive()?;
        if call.epoch != session.epoch {
            return Err(CallError::WrongEpoch {
                asked: call.epoch,
                session: session.epoch,
            });
        }
        if let Phase::Forming { .. } | Phase::Testing { .. } | Phase::Sharing { .. } = self.phase {
            let missing = |rank: &Rank| !self.is_joined(*rank);
            return Err(CallError::NotReady {
                missing: self.settings.world_size.ranks().filter(missing).collect(),
            });
        }
        let window = self.settings.max_in_flight;
        let bad = |why| CallError::BadSequence {
            sequence: call.sequence,
            why,
            next: self.floor + 1,
            window,
        };
        match self.rendezvous.get(&call.sequence) {
            Some(rendezvous) if rendezvous.has(session.rank) => {
                Err(bad("was called by this rank before"))
            }
            Some(_) => Ok(session.rank),
            None if call.sequence <= self.floor => Err(bad("was consumed before")),
            None if call.sequence > session.done.saturating_add(window) => {
                Err(bad("is too far ahead of this rank's unanswered calls"))
            }
            // Sequences that failed are kept for the ranks that have not called them yet.
            None if call.sequence > self.floor.saturating_add(window.saturating_mul(64)) => {
                Err(bad("is too far ahead of the other ranks"))
            }
            None => Ok(session.rank),
        }
    }

    /// Checks what would be wrong for every rank: fields, ranges, signal.
    fn check(&self, call: &Call<T>, rank: Rank) -> Result<(Signature, Place, Place), CallError> {
        let dtype = call
            .dtype
            .map_err(|source| CallError::BadEnum { rank, source })?;
        let op = call
            .op
            .map_err(|source| CallError::BadEnum { rank, source })?;
        let algorithm = call
            .algorithm
            .map_err(|source| CallError::BadEnum { rank, source })?;
        let signature = Signature {
            num_elems: call.num_elems,
            dtype,
            op,
            algorithm,
        };
        // The plan's refusals come first: they do not depend on the rank.
        self.plan_for(Lane::Rpc, signature, false)?;
        let src = self.place(call, rank, Side::Src, dtype)?;
        let dst = self.place(call, rank, Side::Dst, dtype)?;
        let len_bytes = call.num_elems.saturating_mul(dtype.size_bytes() as u64);
        let apart = src.memory != dst.memory
            || src.offset_bytes == dst.offset_bytes
            || src.offset_bytes.saturating_add(len_bytes) <= dst.offset_bytes
            || dst.offset_bytes.saturating_add(len_bytes) <= src.offset_bytes;
        if !apart {
            return Err(CallError::Overlap { rank });
        }
        if let Err(BadStream { stream, reason }) = call.ticket {
            return Err(CallError::BadStream {
                rank,
                stream,
                reason,
            });
        }
        match call.unsignalled {
            Some(ready_value) => Err(CallError::NotSignalled { rank, ready_value }),
            None => Ok((signature, src, dst)),
        }
    }

    /// Whether a session is of the current epoch.
    ///
    /// # Errors
    /// [`CallError`].
    pub(crate) fn check_session(&self, session: u64) -> Result<(), CallError> {
        let found = self.sessions.get(&session);
        let found = found.ok_or(CallError::UnknownSession(session))?;
        Ok(found.alive()?)
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is known of what connects the GPUs, for people; empty until they were tested.
    pub(crate) fn topology(&self) -> &str {
        &self.topology
    }

    /// Ranks of an island of the GPUs, once they were tested; else all are islands of their own.
    pub(crate) fn island_size(&self) -> u32 {
        self.gpus.map_or(1, |gpus| gpus.island_size)
    }

    /// How the kernel of lane `resident` is launched, once the GPUs were tested.
    pub(crate) fn resident_shape(&self) -> Option<ResidentBlocks> {
        self.gpus.and_then(|gpus| gpus.resident.ok())
    }

    /// How a rank of the lane in use, which launches itself, is to reduce. The same whether in place or not, so that
    /// ranks may differ in that.
    ///
    /// # Errors
    /// [`CallError`].
    pub(crate) fn plan_in_lane(
        &self,
        session: u64,
        signature: Signature,
    ) -> Result<Plan, CallError> {
        self.check_session(session)?;
        match self.lane().map(|choice| choice.lane) {
            Some(lane @ (Lane::Delegated | Lane::Resident)) => self.plan_for(lane, signature, true),
            Some(Lane::Rpc) => Err(CallError::NotInLane),
            None => {
                let missing = |rank: &Rank| !self.is_joined(*rank);
                Err(CallError::NotReady {
                    missing: self.settings.world_size.ranks().filter(missing).collect(),
                })
            }
        }
    }

    fn plan_for(
        &self,
        lane: Lane,
        signature: Signature,
        in_place: bool,
    ) -> Result<Plan, CallError> {
        Ok(plan(PlanRequest {
            backend: self.settings.backend,
            lane,
            world_size: self.settings.world_size,
            num_elems: signature.num_elems,
            dtype: signature.dtype,
            op: signature.op,
            algorithm: signature.algorithm,
            in_place,
            max_threads: self.settings.max_threads,
            geometry: self.settings.geometry,
            gpus: self.gpus,
            costs: self.costs.as_deref(),
        })?)
    }

    fn place(
        &self,
        call: &Call<T>,
        rank: Rank,
        side: Side,
        dtype: Dtype,
    ) -> Result<Place, CallError> {
        let (asked, field) = match side {
            Side::Src => (call.src, "src"),
            Side::Dst => (call.dst, "dst"),
        };
        let AskedRange {
            buffer_id,
            offset_bytes,
        } = asked.ok_or(CallError::Missing { rank, field })?;
        let buffer = self
            .sessions
            .get(&call.session)
            .and_then(|session| session.buffers.get(&buffer_id))
            .filter(|buffer| !buffer.released)
            .ok_or(CallError::UnknownBuffer {
                rank,
                side,
                buffer_id,
            })?;
        let elem_bytes = dtype.size_bytes() as u64;
        if !offset_bytes.is_multiple_of(elem_bytes) {
            return Err(CallError::Misaligned {
                rank,
                side,
                offset_bytes,
                elem_bytes,
            });
        }
        let len_bytes = call.num_elems.saturating_mul(elem_bytes);
        let inside = offset_bytes
            .checked_add(len_bytes)
            .is_some_and(|end| end <= buffer.len_bytes);
        if !inside {
            return Err(CallError::OutOfBounds {
                rank,
                side,
                buffer_id,
                offset_bytes,
                len_bytes,
                buffer_len_bytes: buffer.len_bytes,
            });
        }
        Ok(Place {
            memory: buffer.memory,
            offset_bytes: buffer.offset_bytes + offset_bytes,
            buffer_id,
        })
    }

    /// Answers a call that never became an arrival, but used its sequence number.
    fn refuse(&mut self, call: Call<T>, error: CallError) {
        if let Some(session) = self.sessions.get_mut(&call.session) {
            let sequence = session.answered(call.sequence);
            self.effects.push(Effect::Done {
                session: call.session,
                sequence,
            });
        }
        self.effects.push(Effect::Reply {
            reply_to: call.reply_to,
            result: Err(error),
        });
    }

    /// The sequence will not run: tells who waits, and keeps the reason for who comes late.
    fn fail(&mut self, sequence: u64, rank: Rank, error: CallError) {
        let rendezvous = self.rendezvous.entry(sequence).or_default();
        let waiting = match &mut rendezvous.stage {
            Stage::Waiting { arrivals } => std::mem::take(arrivals),
            Stage::Running { .. } | Stage::Failed { .. } => return,
        };
        let answered = waiting.iter().map(|arrival| arrival.rank).chain([rank]);
        rendezvous.stage = Stage::Failed {
            error: error.clone(),
            answered: answered.collect(),
        };
        for arrival in waiting {
            self.answer(arrival, Err(error.clone()));
        }
    }

    /// Answers a call that was an arrival.
    fn answer(&mut self, arrival: Arrival<T>, result: Result<Reduced, CallError>) {
        if let Some(session) = self.sessions.get_mut(&arrival.session) {
            let forgotten =
                [arrival.src, arrival.dst].map(|place| session.settle_buffer(place.buffer_id));
            let sequence = session.answered(arrival.sequence);
            for memory in forgotten.into_iter().flatten() {
                self.effects.push(Effect::ForgetMemory {
                    session: arrival.session,
                    memory,
                });
            }
            self.effects.push(Effect::Done {
                session: arrival.session,
                sequence,
            });
        }
        self.effects.push(Effect::Reply {
            reply_to: arrival.reply_to,
            result,
        });
    }

    /// The lowest sequence that is neither reduced nor failed.
    fn next_sequence(&self) -> u64 {
        let mut next = self.floor + 1;
        while let Some(Rendezvous {
            stage: Stage::Failed { .. },
        }) = self.rendezvous.get(&next)
        {
            next += 1;
        }
        next
    }

    /// Launches the next reduction if all ranks have called it and none runs.
    fn launch_next(&mut self) {
        // A failed sequence that every rank has heard of is over.
        while let Some(Rendezvous {
            stage: Stage::Failed { answered, .. },
        }) = self.rendezvous.get(&(self.floor + 1))
            && answered.len() == self.settings.world_size.as_usize()
        {
            self.floor += 1;
            self.rendezvous.remove(&self.floor);
        }
        if self.running.is_some() {
            return;
        }
        let sequence = self.next_sequence();
        let world_size = self.settings.world_size;
        let Some(rendezvous) = self
            .rendezvous
            .get_mut(&sequence)
            .filter(|rendezvous| rendezvous.is_complete(world_size))
        else {
            return;
        };
        let Stage::Waiting { arrivals } = &mut rendezvous.stage else {
            return;
        };
        let mut arrivals = std::mem::take(arrivals);
        arrivals.sort_by_key(|arrival| arrival.rank);
        let Some(signature) = arrivals.first().map(|first| first.signature) else {
            return;
        };
        let ranks: Vec<RankLaunch> = arrivals
            .iter()
            .map(|arrival| RankLaunch {
                rank: arrival.rank,
                session: arrival.session,
                src: arrival.src,
                dst: arrival.dst,
                ticket: arrival.ticket,
            })
            .collect();
        let timeouts = arrivals.iter().map(|arrival| arrival.timeout);
        let timeout = timeouts.max().unwrap_or_default();
        let is_same = |one: Place, other: Place| {
            (one.memory, one.offset_bytes) == (other.memory, other.offset_bytes)
        };
        let in_place = ranks.iter().any(|rank| is_same(rank.src, rank.dst));
        rendezvous.stage = Stage::Running { arrivals };
        match self.plan_for(Lane::Rpc, signature, in_place) {
            Ok(plan) => {
                self.running = Some(sequence);
                self.effects.push(Effect::Launch(Launch {
                    sequence,
                    plan,
                    signature,
                    ranks,
                    timeout,
                }));
            }
            // Every arrival was checked against the same plan, so this is not reached; were it, the
            // ranks would be told.
            Err(error) => {
                if let Some(Rendezvous {
                    stage: Stage::Running { arrivals },
                }) = self.rendezvous.remove(&sequence)
                {
                    for arrival in arrivals {
                        self.answer(arrival, Err(error.clone()));
                    }
                }
                self.floor = sequence;
            }
        }
    }

    /// The backend has finished what [`Effect::Launch`] asked for.
    pub(crate) fn reduced(&mut self, launch: &Launch, took: Duration) {
        self.running = None;
        let in_epoch = match self.rendezvous.remove(&launch.sequence) {
            Some(Rendezvous {
                stage: Stage::Running { arrivals },
            }) => {
                self.floor = launch.sequence;
                Some(arrivals)
            }
            // The launch's epoch has ended, and this sequence is the next epoch's.
            Some(other) => {
                self.rendezvous.insert(launch.sequence, other);
                None
            }
            None => None,
        };
        let arrivals = in_epoch.unwrap_or_else(|| std::mem::take(&mut self.orphaned));
        self.finish(launch, arrivals, took);
        let horizon = self.floor.saturating_sub(self.settings.max_in_flight);
        self.rendezvous.retain(|sequence, _| *sequence > horizon);
        self.tell_ends();
        self.forget_detached();
        self.launch_next();
    }

    fn finish(&mut self, launch: &Launch, arrivals: Vec<Arrival<T>>, took: Duration) {
        let first = arrivals.iter().map(|arrival| arrival.at).min();
        let lateness: Vec<(Rank, Duration)> = arrivals
            .iter()
            .map(|arrival| {
                let late = first.map(|first| arrival.at.saturating_duration_since(first));
                (arrival.rank, late.unwrap_or_default())
            })
            .collect();
        let Some((last_rank, skew)) = lateness.iter().max_by_key(|(_, late)| *late).copied() else {
            return;
        };
        let algorithm = launch.plan.algorithm;
        self.stats
            .record_reduction(launch.signature, Lane::Rpc, algorithm, &lateness, took);
        for (arrival, (_, late)) in arrivals.into_iter().zip(lateness) {
            let reduced = Reduced {
                algorithm,
                took,
                skew,
                waited: skew.saturating_sub(late),
                last_rank,
            };
            self.answer(arrival, Ok(reduced));
        }
    }

    // Deadlines.

    /// The sequence that holds up the others, and who has not called it. None while nothing waits, or
    /// while a reduction runs.
    fn blocking(&self) -> Option<(u64, Vec<Rank>)> {
        if self.running.is_some() {
            return None;
        }
        let sequence = self.next_sequence();
        let world_size = self.settings.world_size;
        let missing = match self.rendezvous.get(&sequence) {
            Some(rendezvous) => rendezvous.missing(world_size),
            // Later sequences were called, this one by nobody.
            None => world_size.ranks().collect(),
        };
        Some((sequence, missing))
    }

    fn call_deadline(&self) -> Option<(Instant, Duration)> {
        if self.running.is_some() {
            return None;
        }
        self.rendezvous
            .values()
            .filter_map(Rendezvous::deadline)
            .min()
    }

    /// When [`Self::expire`] is next to be called.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let joining = match &self.phase {
            Phase::Forming { deadline }
            | Phase::Testing { deadline }
            | Phase::Sharing { deadline, .. } => *deadline,
            Phase::Ready { .. } => None,
        };
        let calling = self.call_deadline().map(|(at, _)| at);
        [joining, calling].into_iter().flatten().min()
    }

    /// Ends what has waited past its deadline.
    pub(crate) fn expire(&mut self, now: Instant) {
        let timeout = self.settings.join_timeout;
        match self.phase {
            Phase::Forming {
                deadline: Some(deadline),
            } if deadline <= now => {
                let is_missing = |rank: &Rank| {
                    let session = self.members.get(rank.as_usize()).copied().flatten();
                    !session
                        .and_then(|session| self.sessions.get(&session))
                        .is_some_and(|session| session.mapped)
                };
                let missing = self
                    .settings
                    .world_size
                    .ranks()
                    .filter(is_missing)
                    .collect();
                self.end_epoch(EndCause::JoinTimeout { missing, timeout });
                return;
            }
            Phase::Testing {
                deadline: Some(deadline),
            } if deadline <= now => {
                self.end_epoch(EndCause::Ineligible {
                    ranks: Vec::new(),
                    reason: format!(
                        "the test of the GPUs did not end within {} ms of the first join",
                        timeout.as_millis()
                    ),
                });
                return;
            }
            Phase::Sharing {
                deadline: Some(deadline),
                ..
            } if deadline <= now => {
                let members = self.members.iter().flatten();
                let missing = members
                    .filter_map(|session| self.sessions.get(session))
                    .filter(|session| !session.shared)
                    .map(|session| session.rank)
                    .collect();
                self.end_epoch(EndCause::JoinTimeout { missing, timeout });
                return;
            }
            Phase::Forming { .. }
            | Phase::Testing { .. }
            | Phase::Sharing { .. }
            | Phase::Ready { .. } => {}
        }
        let Some((_, timeout)) = self.call_deadline().filter(|(at, _)| *at <= now) else {
            return;
        };
        if let Some((sequence, missing)) = self.blocking() {
            self.end_epoch(EndCause::Timeout {
                missing,
                sequence,
                timeout,
            });
        }
    }
}

#[cfg(test)]
mod tests;
