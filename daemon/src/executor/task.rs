//! The executor's one task: all transitions of the communicator and all its memory.
//!
//! Owns the [`Communicator`] and the [`Backend`]: windows, threads, GPUs. The rpc services and the companion socket talk
//! to it through a [`Handle`]; it answers through oneshots, and tells ranks through their
//! [`Tell`] channels. Small reductions run right here: handing them over would cost more.

use crate::backend::Fault;
use crate::backend::cuda::{self, CudaBackend, Freed, GpuTrouble, Stuck};
use crate::backend::host::{Job, Pool, Window};
use crate::backend::host_lanes::{EpochLanes, LaneCounts};
use crate::backend::host_resident::{self, BufferTable, ResidentStats};
use crate::backend::jobs::JobThread;
use crate::communicator::{
    ARENA, BufferError, Call, CallError, Communicator, Count, Effect, EpochEnd, Gone, GpuError,
    GpusTested, JoinError, Joining, LaneCalls, Launch, Quantiles, RankStats, Reduced,
    ReductionKind, SessionInfo, Settings, Signature, Stats,
};
use crate::config::ms;
use crate::executor::ExecutorSpec;
use crate::health::HealthTable;
use crate::plan::{LaneChoice, Plan, ResidentBlocks, lane_geometry, tuned_geometry};
use crate::topology::Machine;
use allreduce_contract::companion::{Kind, Refusal, TOKEN_LEN};
use allreduce_contract::cuda::ImportedMemory;
use allreduce_contract::kernel::{Instance, MAX_RING_BUFFERS, Regions};
use allreduce_contract::lane::Abort;
use allreduce_contract::memory::{Mapping, MemoryError, SealedMemory};
use allreduce_contract::v1::{
    CudaMemory, ErrorCode, GaveUp, Hello, HostLane, RegionKind, RingCounts, Shared,
};
use allreduce_contract::window::{ABI_VERSION, Control};
use allreduce_contract::{Algorithm, Backend as BackendKind, Lane, Rank};
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// A timer that fires later than this says that the process did not run.
const LATE: Duration = Duration::from_millis(50);

/// How often memory that is being made or freed is looked at.
const POLL: Duration = Duration::from_millis(1);

/// How often the calls that ranks make themselves on GPUs are counted, asked or not: their numbers wrap, after hours.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// How long a kernel that stays waits for its peers before Ready, while ranks still load theirs.
const LANE_TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// What a rank is told on its Attach stream.
#[derive(Debug, Clone)]
pub(crate) enum Tell {
    Ready {
        epoch: u64,
        lane: LaneChoice,
        warnings: Vec<String>,
    },
    /// The lane has ranks reach each other's memory.
    Peers {
        epoch: u64,
        lane: Lane,
        /// By rank: what it shares.
        peers: Vec<Vec<SharedRegion>>,
        /// Of a kernel that stays, for each rank.
        resident_blocks: u32,
        /// On backend cuda: ranks of an island.
        island_size: u32,
        /// On backend host: how the lane works.
        host: Option<HostLane>,
    },
    Ended(EpochEnd),
    Drain,
}

/// A memory that a rank shares with the others.
#[derive(Debug, Clone)]
pub(crate) struct SharedRegion {
    pub(crate) kind: RegionKind,
    pub(crate) len_bytes: u64,
    /// GPU memory; none is on the companion socket.
    pub(crate) cuda: Option<CudaMemory>,
}

/// A rank is in.
#[derive(Debug)]
pub(crate) struct JoinedAs {
    pub(crate) rank: Rank,
    pub(crate) session: u64,
    pub(crate) epoch: u64,
    pub(crate) control_len_bytes: u64,
    pub(crate) arena_len_bytes: u64,
    pub(crate) arena: ArenaAt,
    pub(crate) told: mpsc::UnboundedReceiver<Tell>,
}

/// Where a rank finds its arena.
#[derive(Debug)]
pub(crate) enum ArenaAt {
    /// On the companion socket.
    Companion,
    /// In GPU memory, whose first bytes hold the nonce.
    Cuda { memory: CudaMemory, nonce: u64 },
}

/// A rank's allocation, to be registered.
#[derive(Debug)]
pub(crate) struct RegisterCuda {
    pub(crate) session: u64,
    pub(crate) memory: CudaMemory,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    /// Lane resident: by which number commands name it; 0 for none.
    pub(crate) ring_memory: u32,
}

/// What Admin shows.
#[derive(Debug)]
pub(crate) struct StatsReport {
    pub(crate) epoch: u64,
    pub(crate) lane: Option<LaneChoice>,
    pub(crate) reductions: Vec<(ReductionKind, Count)>,
    pub(crate) reduction: Quantiles,
    pub(crate) skew: Quantiles,
    pub(crate) ranks: Vec<RankReport>,
    pub(crate) errors: Vec<(ErrorCode, u64)>,
    pub(crate) window_bytes: u64,
    pub(crate) warnings: Vec<String>,
    pub(crate) topology: String,
    /// That every rank has begun.
    pub(crate) lane_calls: u64,
}

/// One rank of a [`StatsReport`].
#[derive(Debug)]
pub(crate) struct RankReport {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    pub(crate) lateness: Quantiles,
    pub(crate) times_last: u64,
    pub(crate) joined: bool,
    pub(crate) lane_calls: u64,
    pub(crate) rings: RingCounts,
}

pub(crate) type CallReply = oneshot::Sender<Result<Reduced, CallError>>;
type JoinReply = oneshot::Sender<Result<JoinedAs, JoinError>>;
type HandReply = oneshot::Sender<Result<u64, Refusal>>;

/// What the task is asked. Each carries where the answer goes.
#[derive(Debug)]
enum Command {
    Join {
        hello: Box<Hello>,
        reply: JoinReply,
    },
    /// A rank's window is made, by the memory thread or the CUDA thread.
    Prepared {
        preparing: Box<Preparing>,
        window: Result<Made, JoinError>,
    },
    Mapped {
        session: u64,
        error: Option<String>,
    },
    /// A rank has mapped its peers' memory, or could not.
    Shared {
        session: u64,
        shared: Shared,
    },
    /// What a rank of lane resident has counted on a GPU.
    Rung {
        session: u64,
        rank: Rank,
        counts: RingCounts,
    },
    /// Read how many calls the ranks have made themselves on GPUs. Answered when it is done, or cannot be.
    CountCalls(oneshot::Sender<()>),
    /// The CUDA thread has read the numbers of the ranks' newest calls, or could not.
    Counted {
        epoch: u64,
        /// For the last time.
        is_last: bool,
        calls: Option<Vec<u32>>,
    },
    /// Launch the kernel that stays, or have it park.
    SetArmed {
        session: u64,
        armed: bool,
        reply: oneshot::Sender<Result<(), CallError>>,
    },
    /// The windows of an epoch's lane are made, or cannot be.
    LaneMade(LaneMade),
    /// How a rank that launches itself is to reduce.
    Plan {
        session: u64,
        signature: Signature,
        reply: oneshot::Sender<Result<Plan, CallError>>,
    },
    /// The memory thread has made what the ranks of an epoch share.
    LanesMade {
        epoch: u64,
        lane: Lane,
        lanes: Result<Box<EpochLanes>, MemoryError>,
    },
    /// The thread of lane resident does not go on.
    ResidentStopped {
        epoch: u64,
        abort: Abort,
    },
    /// A rank could not finish a reduction of its own.
    GaveUp {
        session: u64,
        gave_up: GaveUp,
    },
    /// The CUDA thread has tested an epoch's windows.
    Tested {
        sessions: Vec<u64>,
        epoch: u64,
        verdict: cuda::Verdict,
    },
    /// The CUDA thread has found out whose streams hold up a GPU.
    Late {
        stuck: Stuck,
        late: Vec<Rank>,
    },
    Detach {
        session: u64,
        how: Gone,
        reply: oneshot::Sender<()>,
    },
    Allocate {
        session: u64,
        len_bytes: u64,
        reply: oneshot::Sender<Result<(u64, u64), BufferError>>,
    },
    Register {
        session: u64,
        handle: u64,
        offset_bytes: u64,
        len_bytes: u64,
        reply: oneshot::Sender<Result<u64, BufferError>>,
    },
    RegisterCuda {
        request: RegisterCuda,
        reply: oneshot::Sender<Result<u64, BufferError>>,
    },
    /// The CUDA thread has mapped a rank's allocation.
    Imported {
        request: RegisterCuda,
        import: Result<Arc<ImportedMemory>, BufferError>,
        reply: oneshot::Sender<Result<u64, BufferError>>,
    },
    Release {
        session: u64,
        buffer_id: u64,
        reply: oneshot::Sender<Result<(), BufferError>>,
    },
    AllReduce(Box<Call<CallReply>>),
    Reduced {
        launch: Launch,
        took: Duration,
    },
    Region {
        session: u64,
        rank: u32,
        kind: Kind,
        peer: u32,
        reply: oneshot::Sender<Result<(OwnedFd, u64), Refusal>>,
    },
    Hand {
        session: u64,
        rank: u32,
        memory: SealedMemory,
        reply: HandReply,
    },
    /// The memory thread has mapped what was handed over.
    Handed {
        session: u64,
        handle: u64,
        mapped: Result<(Mapping, SealedMemory), MemoryError>,
        reply: HandReply,
    },
    RecordError(ErrorCode),
    Orphaned,
    Stats(oneshot::Sender<StatsReport>),
    Clients(oneshot::Sender<Vec<SessionInfo>>),
    Drain,
}

/// The windows of an epoch's lane.
#[derive(Debug)]
struct LaneMade {
    /// In rank order.
    sessions: Vec<u64>,
    epoch: u64,
    lane: Lane,
    made: Result<Arc<cuda::EpochLane>, GpuError>,
}

/// Talks to the task. Every method waits for its answer; [`Stopped`] if the task is over.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    token: Arc<[u8; TOKEN_LEN]>,
}

/// The executor is exiting.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the executor is exiting")]
pub(crate) struct Stopped;

impl Handle {
    async fn ask<R>(
        &self,
        command: impl FnOnce(oneshot::Sender<R>) -> Command,
    ) -> Result<R, Stopped> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(command(reply))
            .await
            .map_err(|_| Stopped)?;
        answer.await.map_err(|_| Stopped)
    }

    async fn tell(&self, command: Command) {
        // A task that is over needs to be told nothing.
        let _ = self.commands.send(command).await;
    }

    pub(crate) fn is_token(&self, token: &[u8]) -> bool {
        token == self.token.as_slice()
    }

    pub(crate) async fn join(&self, hello: Hello) -> Result<Result<JoinedAs, JoinError>, Stopped> {
        let hello = Box::new(hello);
        self.ask(|reply| Command::Join { hello, reply }).await
    }

    /// A rank has mapped its window, or could not.
    pub(crate) async fn mapped(&self, session: u64, error: Option<String>) {
        self.tell(Command::Mapped { session, error }).await;
    }

    /// A rank has mapped its peers' memory, or could not.
    pub(crate) async fn shared(&self, session: u64, shared: Shared) {
        self.tell(Command::Shared { session, shared }).await;
    }

    /// What a rank of lane resident has counted on a GPU.
    pub(crate) async fn rung(&self, session: u64, rank: Rank, counts: RingCounts) {
        let command = Command::Rung {
            session,
            rank,
            counts,
        };
        self.tell(command).await;
    }

    /// A rank could not finish a reduction of its own.
    pub(crate) async fn gave_up(&self, session: u64, gave_up: GaveUp) {
        self.tell(Command::GaveUp { session, gave_up }).await;
    }

    /// Detaches a session, and waits until its memory is free.
    pub(crate) async fn detach(&self, session: u64, how: Gone) {
        // An executor that is exiting frees everything.
        let _ = self
            .ask(|reply| Command::Detach {
                session,
                how,
                reply,
            })
            .await;
    }

    pub(crate) async fn register_cuda(
        &self,
        request: RegisterCuda,
    ) -> Result<Result<u64, BufferError>, Stopped> {
        self.ask(|reply| Command::RegisterCuda { request, reply })
            .await
    }

    pub(crate) async fn allocate(
        &self,
        session: u64,
        len_bytes: u64,
    ) -> Result<Result<(u64, u64), BufferError>, Stopped> {
        self.ask(|reply| Command::Allocate {
            session,
            len_bytes,
            reply,
        })
        .await
    }

    pub(crate) async fn register(
        &self,
        session: u64,
        handle: u64,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Result<u64, BufferError>, Stopped> {
        self.ask(|reply| Command::Register {
            session,
            handle,
            offset_bytes,
            len_bytes,
            reply,
        })
        .await
    }

    pub(crate) async fn release(
        &self,
        session: u64,
        buffer_id: u64,
    ) -> Result<Result<(), BufferError>, Stopped> {
        self.ask(|reply| Command::Release {
            session,
            buffer_id,
            reply,
        })
        .await
    }

    pub(crate) async fn all_reduce(
        &self,
        call: impl FnOnce(CallReply) -> Call<CallReply>,
    ) -> Result<Result<Reduced, CallError>, Stopped> {
        self.ask(|reply| Command::AllReduce(Box::new(call(reply))))
            .await
    }

    /// Launches the kernel that stays, or has it park.
    pub(crate) async fn set_armed(
        &self,
        session: u64,
        armed: bool,
    ) -> Result<Result<(), CallError>, Stopped> {
        self.ask(|reply| Command::SetArmed {
            session,
            armed,
            reply,
        })
        .await
    }

    /// How a rank that launches itself is to reduce.
    pub(crate) async fn plan(
        &self,
        session: u64,
        signature: Signature,
    ) -> Result<Result<Plan, CallError>, Stopped> {
        self.ask(|reply| Command::Plan {
            session,
            signature,
            reply,
        })
        .await
    }

    pub(crate) async fn region(
        &self,
        session: u64,
        rank: u32,
        kind: Kind,
        peer: u32,
    ) -> Result<Result<(OwnedFd, u64), Refusal>, Stopped> {
        self.ask(|reply| Command::Region {
            session,
            rank,
            kind,
            peer,
            reply,
        })
        .await
    }

    pub(crate) async fn hand(
        &self,
        session: u64,
        rank: u32,
        memory: SealedMemory,
    ) -> Result<Result<u64, Refusal>, Stopped> {
        self.ask(|reply| Command::Hand {
            session,
            rank,
            memory,
            reply,
        })
        .await
    }

    pub(crate) async fn record_error(&self, code: ErrorCode) {
        self.tell(Command::RecordError(code)).await;
    }

    /// Has the calls counted that ranks make themselves on GPUs, for the next [`Self::stats`]. A GPU may take its time.
    pub(crate) async fn count_calls(&self) -> Result<(), Stopped> {
        self.ask(Command::CountCalls).await
    }

    pub(crate) async fn stats(&self) -> Result<StatsReport, Stopped> {
        self.ask(Command::Stats).await
    }

    pub(crate) async fn clients(&self) -> Result<Vec<SessionInfo>, Stopped> {
        self.ask(Command::Clients).await
    }

    pub(crate) async fn orphaned(&self) {
        self.tell(Command::Orphaned).await;
    }

    pub(crate) async fn drain(&self) {
        self.tell(Command::Drain).await;
    }
}

/// Why the task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TaskEnd {
    /// No rank for the idle timeout.
    Idle,
    /// Told to drain, or without a supervisor, and every rank has left.
    Drained,
    /// A GPU does not go on, or a context is lost: only another process helps.
    Lost(String),
}

/// The memory of the host backend, the thread that makes it, and those that share its large reductions.
struct HostBackend {
    windows: HashMap<u64, Window>,
    /// Makes and frees memory: a GiB of pages takes a third of a second.
    memory: JobThread<()>,
    pool: Option<Pool>,
    max_threads: usize,
    /// What the ranks of the current epoch share, on lanes that share.
    lanes: Option<Arc<EpochLanes>>,
    processors: usize,
    /// Every buffer, for lane resident.
    table: BufferTable,
    /// What lane resident has counted, since the executor's start.
    resident_stats: ResidentStats,
}

impl HostBackend {
    /// A session was given a buffer of its arena, or of a memory that it handed over.
    fn note_buffer(&self, session: u64, buffer_id: u64, memory: u64, start: u64, len: u64) {
        let window = self.windows.get(&session);
        if let Some(mapping) = window.and_then(|window| window.mapping(memory)) {
            self.table.insert(session, buffer_id, mapping, start, len);
        }
    }

    /// The epoch is over: whoever waits in the shared memory learns it. What was counted there.
    fn end_lanes(&mut self, end: &EpochEnd) -> Option<(Lane, LaneCounts)> {
        let lanes = self.lanes.take_if(|lanes| lanes.epoch == end.epoch)?;
        // A thread that serves them lets go of them then.
        lanes.end(end.cause.ranks());
        let counts = lanes.counts();
        self.memory.run(move |()| drop(lanes));
        Some((Lane::Delegated, counts))
    }

    /// A memory of a rank of the current epoch, for that rank or a peer, who may not write it.
    fn peer_region(
        &self,
        kind: Kind,
        rank: Rank,
        peer: Rank,
        peer_session: u64,
    ) -> Result<(OwnedFd, u64), Refusal> {
        let lanes = self.lanes.as_ref().ok_or(Refusal::Malformed)?;
        let window = self.windows.get(&peer_session);
        let (fd, len_bytes) = match kind {
            Kind::Board => (lanes.board_fd(), lanes.board_len_bytes()),
            Kind::Lane => (lanes.lane_fd(peer, rank == peer), lanes.lane_len_bytes()),
            Kind::Arena => {
                let window = window.ok_or(Refusal::UnknownSession)?;
                (window.arena_fd_for_peer(), window.arena_len_bytes())
            }
            Kind::Control | Kind::Kernels | Kind::Hand => return Err(Refusal::Malformed),
        };
        Ok((fd.map_err(|_| Refusal::NoMemory)?, len_bytes))
    }

    /// Whether `memory` is part of a window. Two buffers of one memory could overlap unseen.
    fn knows(&self, memory: &SealedMemory) -> bool {
        self.windows.values().any(|window| window.knows(memory))
    }
}

/// Where windows live and who reduces.
enum Backend {
    Host(HostBackend),
    Cuda(Box<CudaBackend>),
}

impl Backend {
    fn control(&self, session: u64) -> Option<&Control> {
        match self {
            Backend::Host(host) => host.windows.get(&session).map(|window| &window.control),
            Backend::Cuda(cuda) => cuda.window(session).map(|window| &window.control),
        }
    }

    /// Whether memory is being made or freed, or a GPU is not done: somebody has to come back and look.
    fn is_active(&self) -> bool {
        match self {
            Backend::Host(host) => host.memory.is_busy(),
            Backend::Cuda(cuda) => cuda.is_active(),
        }
    }

    /// How often somebody has to come back and look.
    fn poll_interval(&self) -> Option<Duration> {
        match self {
            Backend::Host(host) => host.memory.is_busy().then_some(POLL),
            Backend::Cuda(cuda) => cuda.poll_interval(),
        }
    }

    fn window_bytes(&self) -> u64 {
        match self {
            Backend::Host(host) => {
                let of_window =
                    |window: &Window| window.arena_len_bytes() + window.control_len_bytes();
                let windows: u64 = host.windows.values().map(of_window).sum();
                windows + host.lanes.as_ref().map_or(0, |lanes| lanes.len_bytes())
            }
            Backend::Cuda(cuda) => cuda.window_bytes(),
        }
    }
}

/// The task's state.
pub(crate) struct Task {
    spec: Arc<ExecutorSpec>,
    communicator: Communicator<CallReply>,
    backend: Backend,
    health: HealthTable,
    told: HashMap<u64, mpsc::UnboundedSender<Tell>>,
    /// By session and memory: told when the memory is unmapped.
    releasing: HashMap<(u64, u64), oneshot::Sender<Result<(), BufferError>>>,
    /// By session: told when its memory is free.
    detaching: HashMap<u64, oneshot::Sender<()>>,
    /// By session: whether the rank's process is a client of MPS.
    has_mps: HashMap<u64, bool>,
    warnings: Vec<String>,
    /// What ranks reduce themselves on GPUs.
    lane_calls: LaneCalls,
    /// By session of the epoch that forms: calls with which it has tried its lane.
    tried: HashMap<u64, u32>,
    /// Who waits for a count that is under way.
    counting: Option<Vec<oneshot::Sender<()>>>,
    counted_at: Instant,
    /// When the backend, being at work, is to be looked at next.
    next_poll: Option<Instant>,
    /// How long enqueueing the last reduction took.
    enqueue_time: Duration,
    lost: Option<String>,
    reductions: u64,
    commands: mpsc::Receiver<Command>,
    own: mpsc::WeakSender<Command>,
    draining: bool,
    /// The supervisor is gone: nobody can find this executor any more.
    orphaned: bool,
    /// Since when there has been no session.
    idle_since: Instant,
}

impl Task {
    pub(crate) fn new(
        spec: Arc<ExecutorSpec>,
        health: HealthTable,
    ) -> std::io::Result<(Self, Handle)> {
        let (sender, commands) = mpsc::channel(1024);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let max_threads = match spec.host.reduce_threads {
            0 => processors.min(8),
            threads => threads as usize,
        };
        let (costs, topology, notes) = match spec.backend() {
            BackendKind::Host => Machine::new(spec.topology.clone()).host(spec.world_size()),
            // Its GPUs are looked at when they are tested.
            BackendKind::Cuda => (None, String::new(), Vec::new()),
        };
        for note in &notes {
            tracing::warn!("{note}");
        }
        let geometry = lane_geometry(Lane::Delegated, spec.world_size(), processors, &spec.host);
        let settings = Settings {
            backend: spec.backend(),
            world_size: spec.world_size(),
            max_in_flight: u64::from(spec.communicator.max_in_flight),
            max_buffers: u64::from(spec.communicator.max_buffers),
            join_timeout: ms(spec.communicator.join_timeout_ms),
            max_threads,
            geometry: tuned_geometry(geometry, costs.as_deref()),
            costs,
            topology,
        };
        let handle = Handle {
            commands: sender.clone(),
            token: Arc::new(spec.token),
        };
        let task = Self {
            communicator: Communicator::new(settings),
            backend: match spec.backend() {
                BackendKind::Host => Backend::Host(HostBackend {
                    windows: HashMap::new(),
                    memory: JobThread::start("memory", ())?,
                    pool: None,
                    max_threads,
                    lanes: None,
                    processors,
                    table: BufferTable::default(),
                    resident_stats: Arc::new(Mutex::new(Stats::new(spec.world_size()))),
                }),
                BackendKind::Cuda => {
                    let backend = CudaBackend::start(
                        spec.cuda.clone(),
                        spec.topology.clone(),
                        spec.world_size(),
                        spec.socket.parent().unwrap_or(Path::new(".")).to_owned(),
                    )?;
                    Backend::Cuda(Box::new(backend))
                }
            },
            health,
            told: HashMap::new(),
            releasing: HashMap::new(),
            detaching: HashMap::new(),
            has_mps: HashMap::new(),
            warnings: notes,
            lane_calls: LaneCalls::new(spec.world_size()),
            tried: HashMap::new(),
            counting: None,
            counted_at: Instant::now(),
            next_poll: None,
            enqueue_time: Duration::ZERO,
            lost: None,
            reductions: 0,
            commands,
            own: sender.downgrade(),
            draining: false,
            orphaned: false,
            idle_since: Instant::now(),
            spec,
        };
        Ok((task, handle))
    }

    /// Runs until there is nothing left to own.
    pub(crate) async fn run(mut self) -> TaskEnd {
        loop {
            if let Some(reason) = self.lost.take() {
                // Freeing GPU memory would wait for the GPU that does not go on; the process ends anyway.
                std::mem::forget(self);
                return TaskEnd::Lost(reason);
            }
            let is_active = self.backend.is_active();
            // What a job has told is in the queue by the time it has ended.
            let idle =
                self.communicator.num_sessions() == 0 && !is_active && self.commands.is_empty();
            if (self.draining || self.orphaned) && idle {
                return TaskEnd::Drained;
            }
            let idle_deadline =
                idle.then(|| self.idle_since + ms(self.spec.communicator.idle_timeout_ms));
            let interval = self.backend.poll_interval();
            self.next_poll = interval.map(|interval| {
                let soon = Instant::now() + interval;
                self.next_poll.map_or(soon, |at| at.min(soon))
            });
            let deadline = [
                self.communicator.next_deadline(),
                idle_deadline,
                self.next_poll,
            ]
            .into_iter()
            .flatten()
            .min();
            let command = match deadline {
                None => self.commands.recv().await,
                Some(at) => match tokio::time::timeout_at(at.into(), self.commands.recv()).await {
                    Ok(command) => command,
                    Err(_) => {
                        let now = Instant::now();
                        if idle_deadline.is_some_and(|at| at <= now) {
                            return TaskEnd::Idle;
                        }
                        if at.elapsed() > LATE {
                            // This process did not run for a while. What ranks have sent meanwhile is
                            // still in their sockets: it is read and handled before anybody is missed.
                            tokio::time::sleep(LATE).await;
                            while let Ok(command) = self.commands.try_recv() {
                                self.handle(command);
                                self.carry_out();
                                self.launch_accepted().await;
                            }
                        }
                        self.communicator.expire(now);
                        self.look_at_gpus();
                        self.carry_out();
                        self.launch_accepted().await;
                        continue;
                    }
                },
            };
            let Some(command) = command else {
                return TaskEnd::Drained;
            };
            self.handle(command);
            self.carry_out();
            self.launch_accepted().await;
            // Calls that come in all the time leave the timer no chance.
            if self.next_poll.is_some_and(|at| at <= Instant::now()) {
                self.look_at_gpus();
                self.carry_out();
            }
        }
    }

    fn handle(&mut self, command: Command) {
        // Who asked may have gone meanwhile: an answer that nobody takes is dropped.
        match command {
            Command::Join { hello, reply } => self.join(&hello, reply),
            Command::Prepared { preparing, window } => {
                let Preparing {
                    joining,
                    has_mps,
                    reply,
                } = *preparing;
                self.idle_since = Instant::now();
                let joined = window.and_then(|window| {
                    let may_join = match self.draining {
                        true => Err(JoinError::Draining),
                        false => self.communicator.may_join(joining.rank),
                    };
                    match may_join {
                        Ok(()) => self.admit(joining, window),
                        Err(error) => {
                            self.discard(window);
                            Err(error)
                        }
                    }
                });
                if let Ok(joined) = &joined {
                    self.has_mps.insert(joined.session, has_mps);
                }
                self.answer_join(reply, joined);
            }
            Command::Mapped { session, error } => self.communicator.mapped(session, error),
            Command::Shared {
                session,
                shared: Shared { error, calls },
            } => {
                self.tried.insert(session, calls);
                let error = (!error.is_empty()).then_some(error);
                self.communicator.shared(session, error);
            }
            Command::Rung {
                session,
                rank,
                counts,
            } => {
                // Of one that is gone nothing is kept.
                if self.told.contains_key(&session) {
                    self.lane_calls.tell_rings(session, rank, counts);
                }
            }
            Command::CountCalls(reply) => self.count_calls(Some(reply)),
            Command::Counted {
                epoch,
                is_last,
                calls,
            } => self.counted(epoch, is_last, calls.as_deref()),
            Command::LaneMade(made) => self.lane_made(made),
            Command::SetArmed {
                session,
                armed,
                reply,
            } => {
                let known = self.communicator.check_session(session);
                if let (Ok(()), Backend::Cuda(cuda)) = (&known, &self.backend) {
                    for resident in cuda.lane().iter().flat_map(|lane| lane.residents()) {
                        match armed {
                            true => resident.arm(),
                            false => resident.disarm(),
                        }
                    }
                }
                let _ = reply.send(known);
            }
            Command::Plan {
                session,
                signature,
                reply,
            } => {
                let _ = reply.send(self.communicator.plan_in_lane(session, signature));
            }
            Command::LanesMade { epoch, lane, lanes } => self.lanes_made(epoch, lane, lanes),
            Command::ResidentStopped { epoch, abort } => {
                let ranks = abort.rank_list();
                let rank = ranks.first().filter(|_| ranks.len() == 1);
                let rank = rank.and_then(|rank| self.spec.world_size().rank(*rank).ok());
                self.communicator
                    .lane_failed(epoch, rank, abort.to_string());
            }
            Command::GaveUp { session, gave_up } => self.communicator.gave_up(session, &gave_up),
            Command::Tested {
                sessions,
                epoch,
                verdict,
            } => self.tested(sessions, epoch, verdict),
            Command::Late { stuck, late } => {
                if let Backend::Cuda(cuda) = &self.backend {
                    cuda.let_go_late(stuck.epoch, &late);
                }
                let rank = late.first().copied().filter(|_| late.len() == 1);
                let reason = stuck.reason(&late);
                tracing::warn!(reason, "let go");
                self.communicator.gpu_failed(stuck.epoch, rank, reason);
            }
            Command::Detach {
                session,
                how,
                reply,
            } => {
                // Dropped, and so answered, if there is no such session.
                if self.told.contains_key(&session) {
                    self.detaching.insert(session, reply);
                }
                self.communicator.detach(session, how);
            }
            Command::Allocate {
                session,
                len_bytes,
                reply,
            } => {
                let allocated = self.communicator.allocate(session, len_bytes);
                if let (Ok((buffer_id, offset_bytes)), Backend::Host(host)) =
                    (&allocated, &self.backend)
                {
                    host.note_buffer(session, *buffer_id, ARENA, *offset_bytes, len_bytes);
                }
                let _ = reply.send(allocated);
            }
            Command::Register {
                session,
                handle,
                offset_bytes,
                len_bytes,
                reply,
            } => {
                let registered = match &self.backend {
                    Backend::Host(host) => {
                        let registered =
                            self.communicator
                                .register(session, handle, offset_bytes, len_bytes);
                        if let Ok(id) = &registered {
                            host.note_buffer(session, *id, handle, offset_bytes, len_bytes);
                        }
                        registered
                    }
                    Backend::Cuda(_) => Err(BufferError::WrongBackend {
                        what: "memory_handle",
                        needed: BackendKind::Host,
                        backend: BackendKind::Cuda,
                    }),
                };
                let _ = reply.send(registered);
            }
            Command::RegisterCuda { request, reply } => self.import(request, reply),
            Command::Imported {
                request,
                import,
                reply,
            } => {
                let registered = import.and_then(|import| self.register_import(&request, import));
                let _ = reply.send(registered);
            }
            Command::Release {
                session,
                buffer_id,
                reply,
            } => match (self.communicator.release(session, buffer_id), &self.backend) {
                // The worker may free its memory when this is answered.
                (Ok(Some(memory)), Backend::Cuda(_)) => {
                    self.releasing.insert((session, memory), reply);
                }
                (released, backend) => {
                    if let (Ok(_), Backend::Host(host)) = (&released, backend) {
                        host.table.remove(session, buffer_id);
                    }
                    let _ = reply.send(released.map(|_| ()));
                }
            },
            Command::AllReduce(mut call) => {
                // SYNC: ready, through Control::is_ready.
                let control = self.backend.control(call.session);
                call.unsignalled = call
                    .unsignalled
                    .filter(|value| control.is_some_and(|control| !control.is_ready(*value)));
                self.communicator.all_reduce(*call, Instant::now());
            }
            Command::Reduced { launch, took } => self.communicator.reduced(&launch, took),
            Command::Region {
                session,
                rank,
                kind,
                peer,
                reply,
            } => {
                let _ = reply.send(self.region(session, rank, kind, peer));
            }
            Command::Hand {
                session,
                rank,
                memory,
                reply,
            } => self.hand(session, rank, memory, reply),
            Command::Handed {
                session,
                handle,
                mapped,
                reply,
            } => {
                let _ = reply.send(self.handed(session, handle, mapped));
            }
            Command::RecordError(code) => self.communicator.stats_mut().record_error(code),
            Command::Stats(reply) => {
                let _ = reply.send(self.report());
            }
            Command::Clients(reply) => {
                let _ = reply.send(self.communicator.sessions());
            }
            Command::Orphaned => self.orphaned = true,
            Command::Drain => {
                self.draining = true;
                for told in self.told.values() {
                    let _ = told.send(Tell::Drain);
                }
            }
        }
    }

    /// Has a rank's window made; the answer comes with [`Command::Prepared`].
    fn join(&mut self, hello: &Hello, reply: JoinReply) {
        let joining = match self.check_hello(hello) {
            Ok(joining) => joining,
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        };
        let world_size = self.spec.world_size();
        let (rank, arena_len_bytes) = (joining.rank, joining.arena_len_bytes);
        let session = joining.session;
        let preparing = Box::new(Preparing {
            joining,
            has_mps: hello.has_mps,
            reply,
        });
        let own = self.own.clone();
        match &self.backend {
            Backend::Host(host) => host.memory.run(move |()| {
                // Whose caller has gone meanwhile takes no memory.
                if preparing.reply.is_closed() {
                    return;
                }
                let window = Window::create(rank, world_size, arena_len_bytes)
                    .map(|window| Made::Host(Box::new(window)))
                    .map_err(|source| JoinError::Memory { rank, source });
                tell_task(&own, Command::Prepared { preparing, window });
            }),
            Backend::Cuda(cuda) => {
                let spec = cuda::WindowSpec {
                    rank,
                    world_size,
                    arena_len_bytes,
                    regions: cuda.regions(),
                    // As hard to guess as the session it is made with, and told to the same rank only.
                    nonce: session.rotate_left(32) ^ 0x5bd1_e995_97f4_a7c1,
                };
                let uuid = hello.device_uuid.clone();
                cuda.submit(
                    "making a GPU window",
                    move |devices| devices.create_window(&uuid, &spec),
                    move |window| {
                        let window = window
                            .map(|window| Made::Cuda(Box::new(window)))
                            .map_err(|source| JoinError::Gpu { rank, source });
                        tell_task(&own, Command::Prepared { preparing, window });
                    },
                );
            }
        }
    }

    /// Frees a window that is not needed after all.
    fn discard(&mut self, window: Made) {
        match (window, &mut self.backend) {
            (Made::Host(window), Backend::Host(host)) => {
                host.memory.run(move |()| drop(window));
            }
            (Made::Cuda(window), Backend::Cuda(cuda)) => cuda.discard(Some(*window), None),
            // A backend makes its own windows.
            (Made::Host(_), Backend::Cuda(_)) | (Made::Cuda(_), Backend::Host(_)) => {}
        }
    }

    fn answer_join(&mut self, reply: JoinReply, joined: Result<JoinedAs, JoinError>) {
        // A rank whose connection ended while it joined has nobody to detach it.
        if let Err(Ok(joined)) = reply.send(joined) {
            self.communicator.detach(joined.session, Gone::Disconnected);
        }
    }

    fn check_hello(&self, hello: &Hello) -> Result<Joining, JoinError> {
        if self.draining {
            return Err(JoinError::Draining);
        }
        if hello.token != self.spec.token {
            return Err(JoinError::BadToken);
        }
        if hello.abi != ABI_VERSION {
            return Err(JoinError::Abi {
                client: hello.abi,
                executor: ABI_VERSION,
            });
        }
        let world_size = self.spec.world_size();
        if hello.world_size != world_size.get() {
            return Err(JoinError::WorldSizeDiffers {
                expected: hello.world_size,
                actual: world_size,
            });
        }
        let rank = world_size.rank(hello.rank)?;
        let lanes: Vec<Lane> = hello
            .lanes
            .iter()
            .map(|lane| Lane::from_wire(*lane))
            .collect::<Result<_, _>>()
            .map_err(JoinError::BadLane)?;
        self.communicator.may_join(rank)?;
        let (default, limit, key) = match self.spec.backend() {
            BackendKind::Host => {
                let host = &self.spec.host;
                (host.arena_len_bytes, host.max_arena_len_bytes, "host")
            }
            BackendKind::Cuda => {
                let cuda = &self.spec.cuda;
                (cuda.arena_len_bytes, cuda.max_arena_len_bytes, "cuda")
            }
        };
        let asked = match hello.arena_len_bytes {
            0 => default,
            asked => asked,
        };
        if asked > limit {
            return Err(JoinError::ArenaLimit { asked, limit, key });
        }
        Ok(Joining {
            session: u64::from_le_bytes(crate::random::bytes().map_err(JoinError::NoSession)?),
            rank,
            lanes,
            arena_len_bytes: asked,
            pid: hello.pid,
            client_name: shortened(&hello.client_name),
        })
    }

    /// Takes a rank in with the window that was made for it.
    fn admit(&mut self, mut joining: Joining, window: Made) -> Result<JoinedAs, JoinError> {
        let (rank, pid) = (joining.rank, joining.pid);
        joining.arena_len_bytes = match &window {
            Made::Host(window) => window.arena_len_bytes(),
            Made::Cuda(window) => window.arena_len_bytes(),
        };
        let arena_len_bytes = joining.arena_len_bytes;
        let (session, epoch) = self.communicator.join(joining, Instant::now())?;
        let (sender, told) = mpsc::unbounded_channel();
        self.told.insert(session, sender);
        let (control_len_bytes, arena) = match (window, &mut self.backend) {
            (Made::Host(window), Backend::Host(host)) => {
                let len_bytes = window.control_len_bytes();
                window.control.set_epoch(epoch);
                host.windows.insert(session, *window);
                (len_bytes, ArenaAt::Companion)
            }
            (Made::Cuda(window), Backend::Cuda(cuda)) => {
                let len_bytes = window.control_len_bytes();
                let memory = CudaMemory {
                    ipc_handle: window.arena_handle.to_vec(),
                    generation: window.generation,
                    len_bytes: window.allocation_len_bytes(),
                    device_uuid: window.gpu.device().uuid().to_owned(),
                };
                let nonce = window.nonce;
                window.control.set_epoch(epoch);
                cuda.keep_window(session, *window);
                (len_bytes, ArenaAt::Cuda { memory, nonce })
            }
            // A backend makes its own windows.
            (Made::Host(_), Backend::Cuda(_)) | (Made::Cuda(_), Backend::Host(_)) => {
                (0, ArenaAt::Companion)
            }
        };
        tracing::info!(%rank, epoch, pid, arena_len_bytes, "rank joined");
        Ok(JoinedAs {
            rank,
            session,
            epoch,
            control_len_bytes,
            arena_len_bytes,
            arena,
            told,
        })
    }

    // CUDA.

    fn test(&mut self, sessions: Vec<u64>, epoch: u64) {
        let Backend::Cuda(cuda) = &self.backend else {
            return;
        };
        let windows: Vec<Arc<cuda::Window>> = sessions
            .iter()
            .filter_map(|session| cuda.window(*session).cloned())
            .collect();
        let timeout = ms(self.spec.communicator.default_timeout_ms);
        let own = self.own.clone();
        cuda.submit(
            "testing the GPUs",
            move |devices| devices.test(&windows, epoch, timeout),
            move |verdict| {
                tell_task(
                    &own,
                    Command::Tested {
                        sessions,
                        epoch,
                        verdict,
                    },
                );
            },
        );
    }

    fn tested(&mut self, sessions: Vec<u64>, epoch: u64, verdict: cuda::Verdict) {
        let Backend::Cuda(cuda) = &mut self.backend else {
            return;
        };
        if epoch != self.communicator.epoch() {
            return;
        }
        let verdict = verdict.and_then(|tested| {
            let cuda::Tested {
                mut limits,
                costs,
                topology,
                notes,
            } = tested;
            limits.shared_by_mps = cuda.is_shared_by_mps(&sessions, &self.has_mps);
            self.warnings = cuda.warnings(&sessions, &self.has_mps);
            self.warnings.extend(notes);
            match (self.communicator.lane_on(&limits), limits.resident) {
                (Some(Lane::Resident), Ok(asked)) => {
                    limits.resident = cuda.take_blocks(&sessions, asked);
                    if let Ok(ResidentBlocks { blocks, .. }) = limits.resident
                        && blocks < asked.blocks
                    {
                        self.warnings.push(format!(
                            "lane resident has {blocks} blocks of a GPU for each rank, not {}: other communicators have the rest of those that may stay there (cuda.resident_blocks_per_gpu)",
                            asked.blocks
                        ));
                    }
                }
                _ => cuda.give_blocks_back(),
            }
            cuda.begin_epoch(epoch, sessions)
                .map(|()| GpusTested {
                    limits,
                    costs,
                    topology,
                })
                .map_err(|error| (Vec::new(), error.to_string()))
        });
        if let Ok(GpusTested {
            limits, topology, ..
        }) = &verdict
        {
            tracing::info!(%topology, "GPUs tested");
            for warning in &self.warnings {
                tracing::warn!("{warning}");
            }
            let name = format!("executor/{}/mps", self.spec.communicator_name);
            self.health.set(&name, limits.shared_by_mps);
        }
        self.communicator.tested(epoch, verdict);
    }

    fn import(&mut self, request: RegisterCuda, reply: oneshot::Sender<Result<u64, BufferError>>) {
        let Backend::Cuda(cuda) = &self.backend else {
            let _ = reply.send(Err(BufferError::WrongBackend {
                what: "registering GPU memory",
                needed: BackendKind::Cuda,
                backend: self.spec.backend(),
            }));
            return;
        };
        let handle = cuda::ipc_handle(&request.memory.ipc_handle);
        let window = cuda.window(request.session).cloned();
        let unknown = BufferError::UnknownSession(request.session);
        let (handle, window) = match (handle, window) {
            (Ok(handle), Some(window)) => (handle, window),
            (Err(error), _) => {
                let _ = reply.send(Err(error));
                return;
            }
            (_, None) => {
                let _ = reply.send(Err(unknown));
                return;
            }
        };
        let own = self.own.clone();
        let uuid = request.memory.device_uuid.clone();
        let generation = request.memory.generation;
        cuda.submit(
            "mapping a rank's memory",
            move |devices| devices.import(&window, &uuid, handle, generation),
            move |import| {
                let command = Command::Imported {
                    request,
                    import,
                    reply,
                };
                tell_task(&own, command);
            },
        );
    }

    fn register_import(
        &mut self,
        request: &RegisterCuda,
        import: Arc<ImportedMemory>,
    ) -> Result<u64, BufferError> {
        let RegisterCuda {
            session,
            ref memory,
            offset_bytes,
            len_bytes,
            ring_memory,
        } = *request;
        let mapped = import.len_bytes();
        if ring_memory as usize >= MAX_RING_BUFFERS {
            return Err(BufferError::BadHandle(format!(
                "ring_memory {ring_memory} is not below {MAX_RING_BUFFERS}"
            )));
        }
        let kept = if memory.len_bytes > mapped {
            Err(BufferError::BadMemory(format!(
                "it was announced with {} bytes and has {mapped}",
                memory.len_bytes
            )))
        } else {
            self.communicator
                .keep_memory(session, None, memory.len_bytes)
        };
        let registered = kept.and_then(|handle| {
            let registered = self
                .communicator
                .register(session, handle, offset_bytes, len_bytes);
            if registered.is_err() {
                self.communicator.forget_memory(session, handle);
            }
            Ok((registered?, handle))
        });
        match (registered, &mut self.backend) {
            (Ok((buffer_id, handle)), Backend::Cuda(cuda)) => {
                let ring = (ring_memory > 0).then_some(cuda::RingMemory {
                    number: ring_memory,
                    start: import.start() + offset_bytes,
                    len_bytes,
                });
                cuda.keep_import(session, handle, import, ring);
                Ok(buffer_id)
            }
            (Ok((buffer_id, _)), Backend::Host(_)) => Ok(buffer_id),
            (Err(error), Backend::Cuda(cuda)) => {
                cuda.discard(None, Some(import));
                Err(error)
            }
            (Err(error), Backend::Host(_)) => Err(error),
        }
    }

    /// Has the calls counted that ranks of the current epoch have made themselves; `reply` is told when it is done.
    fn count_calls(&mut self, reply: Option<oneshot::Sender<()>>) {
        if let Some(waiting) = &mut self.counting {
            waiting.extend(reply);
            return;
        }
        self.counted_at = Instant::now();
        let epoch = self.communicator.epoch();
        // Else dropped, which answers too.
        if self.lane_calls.is_open(epoch) && self.read_calls(epoch, false) {
            self.counting = Some(reply.into_iter().collect());
        }
    }

    fn read_calls(&self, epoch: u64, is_last: bool) -> bool {
        let Backend::Cuda(cuda) = &self.backend else {
            return false;
        };
        let own = self.own.clone();
        cuda.count_calls(epoch, move |calls| {
            let counted = Command::Counted {
                epoch,
                is_last,
                calls,
            };
            tell_task(&own, counted);
        })
    }

    fn counted(&mut self, epoch: u64, is_last: bool, calls: Option<&[u32]>) {
        if let Some(calls) = calls {
            self.lane_calls.read(epoch, calls);
        }
        if is_last {
            return self.lane_calls.settle(epoch);
        }
        for reply in self.counting.take().into_iter().flatten() {
            let _ = reply.send(());
        }
    }

    /// Carries out what waited for the GPUs, and notices what went wrong on them.
    fn look_at_gpus(&mut self) {
        self.next_poll = None;
        if self.counted_at.elapsed() >= COUNT_INTERVAL {
            self.count_calls(None);
        }
        let Backend::Cuda(cuda) = &mut self.backend else {
            return;
        };
        let trouble = match cuda.stuck_in() {
            Some(what) => Err(GpuTrouble::Lost {
                rank: None,
                reason: format!(
                    "{what} did not end within {} ms (cuda.setup_timeout_ms)",
                    self.spec.cuda.setup_timeout_ms
                ),
            }),
            None => cuda.poll(),
        };
        if let Err(trouble) = trouble {
            self.suffer(trouble);
        }
    }

    /// Ends the epoch that a trouble is about.
    fn suffer(&mut self, trouble: GpuTrouble) {
        if let Some((epoch, rank, reason)) = self.note(trouble) {
            self.communicator.gpu_failed(epoch, rank, reason);
        }
    }

    /// Splits a trouble into epoch, rank and reason. One that this process does not survive ends it after ranks
    /// were told; of one whose rank is not known yet more is heard later.
    fn note(&mut self, trouble: GpuTrouble) -> Option<(u64, Option<Rank>, String)> {
        match trouble {
            GpuTrouble::Aborted {
                epoch,
                rank,
                reason,
            } => Some((epoch, rank, reason)),
            GpuTrouble::Stuck(stuck) => {
                if let Backend::Cuda(cuda) = &self.backend {
                    let own = self.own.clone();
                    cuda.ask_who_is_late(&stuck.clone(), move |late| {
                        tell_task(&own, Command::Late { stuck, late });
                    });
                }
                None
            }
            GpuTrouble::Lost { rank, reason } => {
                self.lost = Some(reason.clone());
                Some((self.communicator.epoch(), rank, reason))
            }
        }
    }

    fn region(
        &self,
        session: u64,
        rank: u32,
        kind: Kind,
        peer: u32,
    ) -> Result<(OwnedFd, u64), Refusal> {
        if !self.communicator.owns(session, rank) {
            return Err(Refusal::UnknownSession);
        }
        let is_shared = match kind {
            Kind::Lane | Kind::Board => true,
            Kind::Arena => peer != rank,
            Kind::Control | Kind::Kernels | Kind::Hand => false,
        };
        if is_shared && let Backend::Host(host) = &self.backend {
            let (rank, peer, peer_session) = self
                .communicator
                .peers(session, rank, peer)
                .ok_or(Refusal::UnknownSession)?;
            return host.peer_region(kind, rank, peer, peer_session);
        }
        let (fd, len_bytes) = match &self.backend {
            Backend::Host(host) => {
                let window = host.windows.get(&session).ok_or(Refusal::UnknownSession)?;
                match kind {
                    Kind::Control => (window.control_fd(), window.control_len_bytes()),
                    Kind::Arena => (window.arena_fd(), window.arena_len_bytes()),
                    Kind::Lane | Kind::Board | Kind::Kernels | Kind::Hand => {
                        return Err(Refusal::Malformed);
                    }
                }
            }
            Backend::Cuda(cuda) => {
                let window = cuda.window(session).ok_or(Refusal::UnknownSession)?;
                match kind {
                    Kind::Control => (window.control_fd(), window.control_len_bytes()),
                    Kind::Kernels => {
                        let lane = cuda.lane_window(session);
                        let (fd, len_bytes) = lane.ok_or(Refusal::UnknownSession)?.kernels();
                        (fd.as_fd(), len_bytes)
                    }
                    // The arena is GPU memory, which no descriptor names.
                    Kind::Arena | Kind::Lane | Kind::Board | Kind::Hand => {
                        return Err(Refusal::Malformed);
                    }
                }
            }
        };
        let fd = fd.try_clone_to_owned().map_err(|_| Refusal::NoMemory)?;
        Ok((fd, len_bytes))
    }

    /// Has a memory mapped that a rank hands over; the answer comes with [`Command::Handed`].
    fn hand(&mut self, session: u64, rank: u32, memory: SealedMemory, reply: HandReply) {
        let Backend::Host(host) = &self.backend else {
            // Memory of the host, which no kernel reads.
            let _ = reply.send(Err(Refusal::Malformed));
            return;
        };
        let len_bytes = memory.len_bytes().get() as u64;
        let kept = match host.knows(&memory) {
            true => Err(Refusal::Known),
            false => self
                .communicator
                .keep_memory(session, Some(rank), len_bytes)
                .map_err(|error| match error {
                    BufferError::Limit { .. } => Refusal::TooMany,
                    _ => Refusal::UnknownSession,
                }),
        };
        let handle = match kept {
            Ok(handle) => handle,
            Err(refusal) => {
                let _ = reply.send(Err(refusal));
                return;
            }
        };
        let own = self.own.clone();
        host.memory.run(move |()| {
            let mapped = memory
                .reserve()
                .and_then(|()| memory.map())
                .map(|mapping| (mapping, memory));
            let command = Command::Handed {
                session,
                handle,
                mapped,
                reply,
            };
            tell_task(&own, command);
        });
    }

    fn handed(
        &mut self,
        session: u64,
        handle: u64,
        mapped: Result<(Mapping, SealedMemory), MemoryError>,
    ) -> Result<u64, Refusal> {
        let Backend::Host(host) = &mut self.backend else {
            return Err(Refusal::Malformed);
        };
        let kept = match mapped {
            Err(_) => Err(Refusal::NoMemory),
            // Handed over twice while it was being mapped.
            Ok((_, memory)) if host.knows(&memory) => Err(Refusal::Known),
            Ok((mapping, memory)) => host
                .windows
                .get_mut(&session)
                .map(|window| window.keep(handle, mapping, memory))
                .ok_or(Refusal::UnknownSession),
        };
        if kept.is_err() {
            self.communicator.forget_memory(session, handle);
        }
        kept.map(|()| handle)
    }

    /// Carries out what the communicator asks for, until it asks no more.
    fn carry_out(&mut self) {
        loop {
            let effects = self.communicator.take_effects();
            if effects.is_empty() {
                break;
            }
            for effect in effects {
                self.carry_out_one(effect);
            }
        }
        if self.communicator.num_sessions() > 0 {
            self.idle_since = Instant::now();
        } else if let Backend::Cuda(cuda) = &mut self.backend {
            cuda.give_blocks_back();
        }
    }

    fn carry_out_one(&mut self, effect: Effect<CallReply>) {
        match effect {
            Effect::Reply { reply_to, result } => {
                let _ = reply_to.send(result);
            }
            Effect::Launch(launch) => self.launch(launch),
            Effect::Test { sessions, epoch } => self.test(sessions, epoch),
            Effect::Share {
                sessions,
                epoch,
                lane,
            } => self.share(sessions, epoch, lane),
            Effect::Unshare { epoch } => {
                if let Backend::Cuda(cuda) = &self.backend {
                    cuda.unshare(epoch);
                }
            }
            Effect::Done { session, sequence } => match &mut self.backend {
                Backend::Host(host) => {
                    if let Some(window) = host.windows.get(&session) {
                        window.control.set_done(sequence);
                    }
                }
                Backend::Cuda(cuda) => cuda.done_later(session, sequence),
            },
            Effect::Ready {
                sessions,
                epoch,
                lane,
            } => {
                tracing::info!(epoch, lane = %lane.lane, reason = lane.reason, "ready");
                let tried = std::mem::take(&mut self.tried);
                if let Backend::Cuda(cuda) = &self.backend {
                    let timeout = ms(self.spec.communicator.default_timeout_ms);
                    for resident in cuda.lane().iter().flat_map(|lane| lane.residents()) {
                        resident.set_timeout(timeout);
                    }
                    let of = |session| tried.get(session).copied().unwrap_or(0).into();
                    match lane.lane {
                        Lane::Delegated | Lane::Resident => {
                            self.lane_calls
                                .begin(epoch, sessions.iter().map(of).collect());
                        }
                        Lane::Rpc => {}
                    }
                }
                for session in sessions {
                    let tell = Tell::Ready {
                        epoch,
                        lane: lane.clone(),
                        warnings: self.warnings.clone(),
                    };
                    self.tell(session, tell);
                }
            }
            Effect::Ended { session, end } => {
                match &mut self.backend {
                    Backend::Host(host) => {
                        if let Some(window) = host.windows.get(&session) {
                            window.control.set_ended();
                        }
                        if let Some((lane, counts)) = host.end_lanes(&end) {
                            self.communicator.stats_mut().record_lane(lane, &counts);
                        }
                    }
                    Backend::Cuda(cuda) => {
                        let is_orderly = end.cause.is_orderly();
                        cuda.end_epoch(end.epoch, end.cause.rank(), is_orderly);
                        cuda.ended_later(session);
                        // Told for each session, read once; before its windows are freed on the same thread.
                        if self.lane_calls.end(end.epoch) && !self.read_calls(end.epoch, true) {
                            self.lane_calls.settle(end.epoch);
                        }
                    }
                }
                self.tell(session, Tell::Ended(end));
            }
            Effect::ForgetMemory { session, memory } => {
                let waiting = self.releasing.remove(&(session, memory));
                match &mut self.backend {
                    Backend::Host(host) => {
                        if let Some(window) = host.windows.get_mut(&session) {
                            window.forget(memory);
                        }
                    }
                    Backend::Cuda(cuda) => {
                        let freed = waiting.map(|reply| -> Freed {
                            Box::new(move || {
                                let _ = reply.send(Ok(()));
                            })
                        });
                        cuda.forget_memory(session, memory, freed);
                    }
                }
            }
            Effect::Forget { session, rank } => {
                tracing::info!(%rank, "rank gone, its window is freed");
                self.told.remove(&session);
                self.has_mps.remove(&session);
                self.tried.remove(&session);
                self.lane_calls.forget(session);
                let waiting = self.detaching.remove(&session);
                // Their memory goes with the session's.
                let released = self.releasing.extract_if(|(owner, _), _| *owner == session);
                for (_, reply) in released {
                    let _ = reply.send(Err(BufferError::UnknownSession(session)));
                }
                match &mut self.backend {
                    Backend::Host(host) => {
                        host.table.forget(session);
                        let window = host.windows.remove(&session);
                        host.memory.run(move |()| drop((window, waiting)));
                    }
                    Backend::Cuda(cuda) => {
                        cuda.forget(session, Some(Box::new(move || drop(waiting))));
                    }
                }
            }
        }
    }

    /// Has made what ranks share with each other; they are told with [`Command::LaneMade`] or
    /// [`Command::LanesMade`].
    fn share(&self, sessions: Vec<u64>, epoch: u64, lane: Lane) {
        match &self.backend {
            // Told when they are made.
            Backend::Host(host) => {
                let world_size = self.spec.world_size();
                let geometry = lane_geometry(lane, world_size, host.processors, &self.spec.host);
                let geometry =
                    tuned_geometry(geometry, self.communicator.settings().costs.as_deref());
                let own = self.own.clone();
                host.memory.run(move |()| {
                    let lanes = EpochLanes::create(world_size, epoch, geometry).map(Box::new);
                    tell_task(&own, Command::LanesMade { epoch, lane, lanes });
                });
            }
            Backend::Cuda(cuda) => {
                let windows: Vec<Arc<cuda::Window>> = sessions
                    .iter()
                    .filter_map(|session| cuda.window(*session).cloned())
                    .collect();
                let spec =
                    cuda::LaneSpec {
                        regions: Regions {
                            island_size: self.communicator.island_size(),
                            ..cuda.regions()
                        },
                        instance: Instance::of(self.spec.world_size()),
                        epoch,
                        timeout: LANE_TEST_TIMEOUT,
                        slots: cuda.slots().cloned(),
                        resident: match lane {
                            Lane::Resident => self.communicator.resident_shape().map(|shape| {
                                cuda::ResidentShape {
                                    blocks: shape.blocks,
                                    data_threads: shape.data_threads,
                                    idle: Duration::from_micros(
                                        cuda.config().resident_idle_us.into(),
                                    ),
                                    wake_poll: Duration::from_micros(
                                        cuda.config().resident_wake_poll_us.into(),
                                    ),
                                }
                            }),
                            Lane::Delegated | Lane::Rpc => None,
                        },
                    };
                let own = self.own.clone();
                cuda.submit(
                    "making the lane's windows",
                    move |devices| devices.create_lane(&windows, &spec),
                    move |made| {
                        let made = LaneMade {
                            sessions,
                            epoch,
                            lane,
                            made: made.map(Arc::new),
                        };
                        tell_task(&own, Command::LaneMade(made));
                    },
                );
            }
        }
    }

    /// Tells ranks where the windows of their lane are.
    fn lane_made(&mut self, made: LaneMade) {
        let LaneMade {
            sessions,
            epoch,
            lane,
            made,
        } = made;
        let Backend::Cuda(cuda) = &mut self.backend else {
            return;
        };
        if epoch != self.communicator.epoch() {
            // Freed where it was made, with whatever comes next there.
            if let Ok(made) = made {
                cuda.discard_lane(made);
            }
            return;
        }
        let made = match made {
            Ok(made) => made,
            Err(error) => {
                if let Some(session) = sessions.first() {
                    self.communicator.shared(*session, Some(error.to_string()));
                }
                return;
            }
        };
        cuda.keep_lane(&made);
        let peers: Vec<Vec<SharedRegion>> = made
            .windows
            .iter()
            .map(|window| {
                let (_, kernels_len_bytes) = window.kernels();
                vec![
                    SharedRegion {
                        kind: RegionKind::Window,
                        len_bytes: window.len_bytes(),
                        cuda: Some(window.exported()),
                    },
                    SharedRegion {
                        kind: RegionKind::Kernels,
                        len_bytes: kernels_len_bytes,
                        cuda: None,
                    },
                ]
            })
            .collect();
        let resident = self.communicator.resident_shape();
        let resident_blocks = resident.map_or(0, |shape| shape.blocks);
        for (rank, session) in sessions.into_iter().enumerate() {
            let mut peers = peers.clone();
            if lane == Lane::Resident {
                // Each reaches its own only.
                for (peer, regions) in peers.iter_mut().enumerate() {
                    if peer != rank {
                        regions.clear();
                    }
                }
            }
            let tell = Tell::Peers {
                epoch,
                lane,
                peers,
                resident_blocks,
                island_size: self.communicator.island_size(),
                host: None,
            };
            self.tell(session, tell);
        }
    }

    fn tell_peers(
        &self,
        sessions: &[u64],
        epoch: u64,
        lane: Lane,
        peers: &[Vec<SharedRegion>],
        host: Option<HostLane>,
    ) {
        for session in sessions {
            let tell = Tell::Peers {
                epoch,
                lane,
                peers: peers.to_vec(),
                resident_blocks: 0,
                island_size: 0,
                host,
            };
            self.tell(*session, tell);
        }
    }

    /// The memory that the ranks of an epoch share is there, or cannot be had.
    fn lanes_made(&mut self, epoch: u64, lane: Lane, lanes: Result<Box<EpochLanes>, MemoryError>) {
        let Backend::Host(host) = &mut self.backend else {
            return;
        };
        if epoch != self.communicator.epoch() {
            host.memory.run(move |()| drop(lanes));
            return;
        }
        let lanes = match lanes {
            Ok(lanes) => lanes,
            Err(error) => {
                let reason = format!("no memory for lane {lane}: {error}");
                return self.communicator.cannot_share(epoch, reason);
            }
        };
        let sessions = self.communicator.member_sessions();
        let region = |kind, len_bytes| SharedRegion {
            kind,
            len_bytes,
            cuda: None,
        };
        let of_session = |session: &u64| {
            let arena = host.windows.get(session);
            vec![
                region(RegionKind::Lane, lanes.lane_len_bytes()),
                region(
                    RegionKind::Arena,
                    arena.map_or(0, |window| window.arena_len_bytes()),
                ),
            ]
        };
        let peers: Vec<Vec<SharedRegion>> = sessions.iter().map(of_session).collect();
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let geometry = &lanes.geometry;
        let message = HostLane {
            board_len_bytes: lanes.board_len_bytes(),
            one_shot_max_bytes: geometry.one_shot_max_bytes,
            short_max_bytes: geometry.short_max_bytes,
            block_len_bytes: geometry.block_len_bytes,
            stage_len_bytes: geometry.stage_len_bytes,
            spin_ns: ns(geometry.spin),
            yield_ns: ns(geometry.yielding),
        };
        let lanes: Arc<EpochLanes> = Arc::from(lanes);
        host.lanes = Some(Arc::clone(&lanes));
        if lane == Lane::Resident {
            let own = self.own.clone();
            let stopped = move |abort| tell_task(&own, Command::ResidentStopped { epoch, abort });
            let started = host_resident::start(
                self.spec.world_size(),
                lanes,
                sessions.clone(),
                host.table.clone(),
                Arc::clone(&host.resident_stats),
                stopped,
            );
            if let Err(error) = started {
                let reason = format!("no thread for lane {lane}: {error}");
                return self.communicator.cannot_share(epoch, reason);
            }
        }
        self.tell_peers(&sessions, epoch, lane, &peers, Some(message));
    }

    fn tell(&self, session: u64, tell: Tell) {
        if let Some(told) = self.told.get(&session) {
            let _ = told.send(tell);
        }
    }

    fn launch(&mut self, launch: Launch) {
        let fault = self.fault_of(&launch);
        match &mut self.backend {
            Backend::Host(_) => self.launch_on_host(launch, fault),
            Backend::Cuda(cuda) => {
                match cuda.accept(launch.clone(), fault) {
                    // Answered first, enqueued while the answers are on their way: the ranks' streams wait for
                    // flags, which need not have been promised to the GPU yet. The time is that of the one
                    // before.
                    Ok(()) => self.communicator.reduced(&launch, self.enqueue_time),
                    Err(trouble) => {
                        if let Some((_, rank, reason)) = self.note(trouble) {
                            self.communicator.launch_failed(&launch, rank, reason);
                        }
                    }
                }
            }
        }
    }

    /// Enqueues what was answered. The answers are written first: a turn of the runtime does that.
    async fn launch_accepted(&mut self) {
        match &self.backend {
            Backend::Cuda(cuda) if cuda.is_launching() => tokio::task::yield_now().await,
            Backend::Cuda(_) | Backend::Host(_) => return,
        }
        let Backend::Cuda(cuda) = &mut self.backend else {
            return;
        };
        let start = Instant::now();
        let launched = cuda.launch_accepted();
        self.enqueue_time = start.elapsed();
        if let Err(trouble) = launched {
            self.suffer(trouble);
            self.carry_out();
        }
    }

    fn launch_on_host(&mut self, launch: Launch, fault: Option<Fault>) {
        let Backend::Host(host) = &mut self.backend else {
            return;
        };
        let job = match Job::new(launch.clone(), &host.windows) {
            Ok(job) => job,
            Err(error) => {
                // A defect of ours. Nothing was reduced, so nobody may be told it was: the process is
                // the fault domain, and ends.
                tracing::error!(%error, "cannot launch");
                std::process::abort();
            }
        };
        if launch.plan.algorithm == Algorithm::OneShotChunked {
            self.launch_chunked(job, fault);
            return;
        }
        let took = job.run();
        if let Some(fault) = fault {
            job.damage(fault);
        }
        self.communicator.reduced(&launch, took);
    }

    fn launch_chunked(&mut self, job: Job, fault: Option<Fault>) {
        let Backend::Host(host) = &mut self.backend else {
            return;
        };
        if host.pool.is_none() {
            match Pool::new(host.max_threads) {
                Ok(pool) => host.pool = Some(pool),
                Err(error) => {
                    tracing::warn!(%error, "cannot start reduction threads: reducing on one");
                    let took = job.run();
                    if let Some(fault) = fault {
                        job.damage(fault);
                    }
                    self.communicator.reduced(&job.launch, took);
                    return;
                }
            }
        }
        let (Some(pool), Some(own)) = (&host.pool, self.own.upgrade()) else {
            // As in launch_on_host: what was not reduced must not look as if it were.
            tracing::error!("no pool to launch on");
            std::process::abort();
        };
        pool.spawn(job, move |job, took| {
            if let Some(fault) = fault {
                job.damage(fault);
            }
            let launch = job.launch.clone();
            drop(job);
            let _ = own.blocking_send(Command::Reduced { launch, took });
        });
    }

    /// Counts the reduction; the fault, if it is the one to be damaged.
    fn fault_of(&mut self, launch: &Launch) -> Option<Fault> {
        if launch.signature.num_elems > 0 {
            self.reductions += 1;
        }
        self.spec
            .fault
            .filter(|fault| launch.signature.num_elems > 0 && fault.reduction == self.reductions)
    }

    fn report(&self) -> StatsReport {
        let mut merged = None;
        if let Backend::Host(host) = &self.backend {
            let resident = host.resident_stats.lock();
            let resident = resident.unwrap_or_else(PoisonError::into_inner);
            let mut stats = self.communicator.stats().with(&resident);
            // What ranks of the current epoch have reduced themselves; the stats hold that of earlier ones.
            if let Some(lanes) = &host.lanes {
                stats.record_lane(Lane::Delegated, &lanes.counts());
            }
            merged = Some(stats);
        }
        let Stats {
            reductions,
            reduction,
            skew,
            ranks,
            errors,
        } = merged.as_ref().unwrap_or(self.communicator.stats());
        let report = |(rank, stats): (Rank, &RankStats)| RankReport {
            operations: stats.count.operations,
            bytes: stats.count.bytes,
            lateness: stats.lateness.quantiles(),
            times_last: stats.times_last,
            joined: self.communicator.is_joined(rank),
            lane_calls: self.lane_calls.of(rank),
            rings: self.lane_calls.rings(rank),
        };
        StatsReport {
            epoch: self.communicator.epoch(),
            lane: self.communicator.lane().cloned(),
            reductions: reductions
                .iter()
                .map(|(kind, count)| (*kind, *count))
                .collect(),
            reduction: reduction.quantiles(),
            skew: skew.quantiles(),
            ranks: self
                .spec
                .world_size()
                .ranks()
                .zip(ranks)
                .map(report)
                .collect(),
            errors: errors.iter().map(|(code, count)| (*code, *count)).collect(),
            window_bytes: self.backend.window_bytes(),
            warnings: self.warnings.clone(),
            topology: self.communicator.topology().to_owned(),
            lane_calls: self.lane_calls.of_all(),
        }
    }
}

/// A window could not be made for want of memory: what was needed and what there was.
pub(crate) fn exhausted(error: &MemoryError) -> Option<(u64, u64)> {
    match error {
        MemoryError::Exhausted { needed, available } => Some((*needed, *available)),
        MemoryError::Create { len_bytes, .. } | MemoryError::Reserve { len_bytes, .. } => Some((
            *len_bytes as u64,
            allreduce_contract::memory::available_bytes(),
        )),
        MemoryError::NotSealed | MemoryError::Length { .. } | MemoryError::Map { .. } => None,
    }
}

/// A rank that waits for its window.
#[derive(Debug)]
struct Preparing {
    joining: Joining,
    has_mps: bool,
    reply: JoinReply,
}

/// A window that was made for a rank.
#[derive(Debug)]
enum Made {
    Host(Box<Window>),
    Cuda(Box<cuda::Window>),
}

/// From the memory thread or the CUDA thread. A task that is over needs to be told nothing.
fn tell_task(own: &mpsc::WeakSender<Command>, command: Command) {
    if let Some(own) = own.upgrade() {
        let _ = own.blocking_send(command);
    }
}

/// What a client says of itself, fit for a terminal.
fn shortened(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(64).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::config::Config;
    use crate::executor::Identity;
    use crate::listen::Access;
    use allreduce_contract::WorldSize;
    use std::num::NonZeroUsize;
    use std::os::fd::AsFd;

    const TOKEN: [u8; TOKEN_LEN] = [7; TOKEN_LEN];

    fn task() -> (Task, Handle) {
        let identity = Identity {
            communicator_name: "test".to_owned(),
            world_size: WorldSize::new(2).unwrap(),
            backend: BackendKind::Host,
            backend_reason: String::new(),
            incarnation: 1,
            token: TOKEN,
            socket: "unused.sock".into(),
        };
        let spec = ExecutorSpec::new(
            identity,
            &Config::default(),
            Access::from_parts(0o600, None),
            None,
        );
        Task::new(Arc::new(spec), HealthTable::new()).unwrap()
    }

    fn hello(rank: u32) -> Hello {
        Hello {
            token: TOKEN.to_vec(),
            abi: ABI_VERSION,
            world_size: 2,
            rank,
            arena_len_bytes: 4096,
            ..Hello::default()
        }
    }

    /// Runs `test` beside the task, for a minute at most.
    async fn beside(task: Task, test: impl Future<Output = ()>) {
        let limit = tokio::time::sleep(Duration::from_secs(60));
        tokio::select! {
            end = task.run() => panic!("the task ended: {end:?}"),
            () = test => {}
            () = limit => panic!("no end within a minute"),
        }
    }

    #[tokio::test]
    async fn the_task_answers_while_a_window_is_made() {
        let (task, handle) = task();
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let Backend::Host(host) = &task.backend else {
            panic!("not the host backend");
        };
        host.memory.run(move |()| gate.recv().unwrap());
        beside(task, async move {
            let first = {
                let handle = handle.clone();
                tokio::spawn(async move { handle.join(hello(0)).await })
            };
            let second = {
                let handle = handle.clone();
                tokio::spawn(async move { handle.join(hello(1)).await })
            };
            // Both asked, and neither can be answered yet.
            tokio::task::yield_now().await;
            assert_eq!(handle.stats().await.unwrap().window_bytes, 0);
            assert!(!first.is_finished() && !second.is_finished());
            // The caller of the first goes: its place stays free, and no window is made for it.
            first.abort();
            assert!(first.await.unwrap_err().is_cancelled());
            open.send(()).unwrap();
            let second = second.await.unwrap().unwrap().unwrap();
            let report = handle.stats().await.unwrap();
            assert_eq!(
                report.window_bytes,
                second.control_len_bytes + second.arena_len_bytes
            );
            let again = handle.join(hello(0)).await.unwrap().unwrap();
            assert_eq!(again.rank.get(), 0);
        })
        .await;
    }

    #[tokio::test]
    async fn draining_answers_a_rank_whose_window_is_being_made() {
        let (task, handle) = task();
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let Backend::Host(host) = &task.backend else {
            panic!("not the host backend");
        };
        host.memory.run(move |()| gate.recv().unwrap());
        let drained = async {
            handle.drain().await;
            open.send(()).unwrap();
        };
        let all = async { tokio::join!(task.run(), handle.join(hello(0)), drained) };
        let limit = Duration::from_secs(60);
        let (end, joined, ()) = tokio::time::timeout(limit, all).await.unwrap();
        assert_eq!(end, TaskEnd::Drained);
        assert!(matches!(joined, Ok(Err(JoinError::Draining))), "{joined:?}");
    }

    #[tokio::test]
    async fn a_memory_handed_over_twice_at_once_is_known() {
        let (task, handle) = task();
        beside(task, async move {
            let joined = handle.join(hello(0)).await.unwrap().unwrap();
            let len_bytes = NonZeroUsize::new(8192).unwrap();
            let memory = SealedMemory::create(c"test", len_bytes).unwrap();
            let same = memory.as_fd().try_clone_to_owned().unwrap();
            let same = SealedMemory::adopt(same, 8192).unwrap();
            // The task has both before the memory thread can have told it of the first.
            let (one, other) = tokio::join!(
                handle.hand(joined.session, 0, memory),
                handle.hand(joined.session, 0, same)
            );
            assert!(one.unwrap().is_ok());
            assert_eq!(other.unwrap(), Err(Refusal::Known));
        })
        .await;
    }
}
