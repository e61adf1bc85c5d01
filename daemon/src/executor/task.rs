//! The executor's one task: all transitions of the communicator and all its memory.
//!
//! Owns the [`Communicator`], the windows and the pool. The rpc services and the companion socket talk
//! to it through a [`Handle`]; it answers through oneshots, and tells ranks through their
//! [`Tell`] channels. Small reductions run right here: handing them over would cost more.

use crate::backend::host::{Fault, Job, Pool, Window};
use crate::communicator::{
    BufferError, Call, CallError, Communicator, Count, Effect, EpochEnd, Gone, JoinError, Joining,
    Launch, Quantiles, RankStats, Reduced, ReductionKind, SessionInfo, Settings, Stats,
};
use crate::config::ms;
use crate::executor::ExecutorSpec;
use crate::plan::{LaneChoice, choose_lane};
use allreduce_contract::companion::{Kind, Refusal, TOKEN_LEN};
use allreduce_contract::memory::{MemoryError, SealedMemory};
use allreduce_contract::v1::{ErrorCode, Hello};
use allreduce_contract::window::ABI_VERSION;
use allreduce_contract::{Algorithm, Backend, Lane, Rank};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// A timer that fires later than this says that the process did not run.
const LATE: Duration = Duration::from_millis(50);

/// What a rank is told on its Attach stream.
#[derive(Debug, Clone)]
pub(crate) enum Tell {
    Ready { epoch: u64, lane: LaneChoice },
    Ended(EpochEnd),
    Drain,
}

/// A rank is in.
#[derive(Debug)]
pub(crate) struct JoinedAs {
    pub(crate) rank: Rank,
    pub(crate) session: u64,
    pub(crate) epoch: u64,
    pub(crate) control_len_bytes: u64,
    pub(crate) arena_len_bytes: u64,
    pub(crate) told: mpsc::UnboundedReceiver<Tell>,
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
}

/// One rank of a [`StatsReport`].
#[derive(Debug)]
pub(crate) struct RankReport {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
    pub(crate) lateness: Quantiles,
    pub(crate) times_last: u64,
    pub(crate) joined: bool,
}

pub(crate) type CallReply = oneshot::Sender<Result<Reduced, CallError>>;

/// What the task is asked. Each carries where the answer goes.
#[derive(Debug)]
enum Command {
    Join {
        hello: Box<Hello>,
        reply: oneshot::Sender<Result<JoinedAs, JoinError>>,
    },
    Detach {
        session: u64,
        how: Gone,
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
        reply: oneshot::Sender<Result<(OwnedFd, u64), Refusal>>,
    },
    Hand {
        session: u64,
        rank: u32,
        memory: SealedMemory,
        reply: oneshot::Sender<Result<u64, Refusal>>,
    },
    RecordError(ErrorCode),
    Orphaned,
    Stats(oneshot::Sender<StatsReport>),
    Clients(oneshot::Sender<Vec<SessionInfo>>),
    Drain,
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

    pub(crate) async fn detach(&self, session: u64, how: Gone) {
        self.tell(Command::Detach { session, how }).await;
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

    pub(crate) async fn region(
        &self,
        session: u64,
        rank: u32,
        kind: Kind,
    ) -> Result<Result<(OwnedFd, u64), Refusal>, Stopped> {
        self.ask(|reply| Command::Region {
            session,
            rank,
            kind,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskEnd {
    /// No rank for the idle timeout.
    Idle,
    /// Told to drain, or without a supervisor, and every rank has left.
    Drained,
}

/// The task's state.
pub(crate) struct Task {
    spec: Arc<ExecutorSpec>,
    communicator: Communicator<CallReply>,
    windows: HashMap<u64, Window>,
    told: HashMap<u64, mpsc::UnboundedSender<Tell>>,
    pool: Option<Pool>,
    max_threads: usize,
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
    pub(crate) fn new(spec: Arc<ExecutorSpec>) -> (Self, Handle) {
        let (sender, commands) = mpsc::channel(1024);
        let max_threads = match spec.host.reduce_threads {
            0 => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(8),
            threads => threads as usize,
        };
        let settings = Settings {
            backend: Backend::Host,
            world_size: spec.world_size(),
            max_in_flight: u64::from(spec.communicator.max_in_flight),
            max_buffers: u64::from(spec.communicator.max_buffers),
            join_timeout: ms(spec.communicator.join_timeout_ms),
            max_threads,
        };
        let handle = Handle {
            commands: sender.clone(),
            token: Arc::new(spec.token),
        };
        let task = Self {
            communicator: Communicator::new(settings),
            windows: HashMap::new(),
            told: HashMap::new(),
            pool: None,
            max_threads,
            reductions: 0,
            commands,
            own: sender.downgrade(),
            draining: false,
            orphaned: false,
            idle_since: Instant::now(),
            spec,
        };
        (task, handle)
    }

    /// Runs until there is nothing left to own.
    pub(crate) async fn run(mut self) -> TaskEnd {
        loop {
            let idle = self.communicator.num_sessions() == 0;
            if (self.draining || self.orphaned) && idle {
                return TaskEnd::Drained;
            }
            let idle_deadline =
                idle.then(|| self.idle_since + ms(self.spec.communicator.idle_timeout_ms));
            let deadline = [self.communicator.next_deadline(), idle_deadline]
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
                            }
                        }
                        self.communicator.expire(now);
                        self.carry_out();
                        continue;
                    }
                },
            };
            let Some(command) = command else {
                return TaskEnd::Drained;
            };
            self.handle(command);
            self.carry_out();
        }
    }

    fn handle(&mut self, command: Command) {
        // Who asked may have gone meanwhile: an answer that nobody takes is dropped.
        match command {
            Command::Join { hello, reply } => {
                // A rank whose connection ended while it joined has nobody to detach it.
                if let Err(Ok(joined)) = reply.send(self.join(&hello)) {
                    self.communicator.detach(joined.session, Gone::Disconnected);
                }
            }
            Command::Detach { session, how } => self.communicator.detach(session, how),
            Command::Allocate {
                session,
                len_bytes,
                reply,
            } => {
                let _ = reply.send(self.communicator.allocate(session, len_bytes));
            }
            Command::Register {
                session,
                handle,
                offset_bytes,
                len_bytes,
                reply,
            } => {
                let registered =
                    self.communicator
                        .register(session, handle, offset_bytes, len_bytes);
                let _ = reply.send(registered);
            }
            Command::Release {
                session,
                buffer_id,
                reply,
            } => {
                let _ = reply.send(self.communicator.release(session, buffer_id));
            }
            Command::AllReduce(mut call) => {
                // SYNC: ready, through Control::is_ready.
                let window = self.windows.get(&call.session);
                call.unsignalled = call
                    .unsignalled
                    .filter(|value| window.is_some_and(|window| !window.control.is_ready(*value)));
                self.communicator.all_reduce(*call, Instant::now());
            }
            Command::Reduced { launch, took } => self.communicator.reduced(&launch, took),
            Command::Region {
                session,
                rank,
                kind,
                reply,
            } => {
                let _ = reply.send(self.region(session, rank, kind));
            }
            Command::Hand {
                session,
                rank,
                memory,
                reply,
            } => {
                let _ = reply.send(self.hand(session, rank, memory));
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

    fn join(&mut self, hello: &Hello) -> Result<JoinedAs, JoinError> {
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
        let wanted: Vec<Lane> = hello
            .lanes
            .iter()
            .map(|lane| Lane::from_wire(*lane))
            .collect::<Result<_, _>>()
            .map_err(JoinError::BadLane)?;
        let lane = choose_lane(Backend::Host, &wanted).map_err(JoinError::Plan)?;
        self.communicator.may_join(rank)?;
        let limit = self.spec.host.max_arena_len_bytes;
        let asked = match hello.arena_len_bytes {
            0 => self.spec.host.arena_len_bytes,
            asked => asked,
        };
        if asked > limit {
            return Err(JoinError::ArenaLimit { asked, limit });
        }
        let window = Window::create(rank, world_size, self.communicator.epoch(), asked)
            .map_err(|source| JoinError::Memory { rank, source })?;
        let arena_len_bytes = window.arena_len_bytes();
        let joining = Joining {
            session: u64::from_le_bytes(crate::random::bytes().map_err(JoinError::NoSession)?),
            rank,
            lane,
            arena_len_bytes,
            pid: hello.pid,
            client_name: shortened(&hello.client_name),
        };
        let (session, epoch) = self.communicator.join(joining, Instant::now())?;
        let (sender, told) = mpsc::unbounded_channel();
        let control_len_bytes = window.control_len_bytes();
        self.windows.insert(session, window);
        self.told.insert(session, sender);
        tracing::info!(%rank, epoch, pid = hello.pid, arena_len_bytes, "rank joined");
        Ok(JoinedAs {
            rank,
            session,
            epoch,
            control_len_bytes,
            arena_len_bytes,
            told,
        })
    }

    fn region(&self, session: u64, rank: u32, kind: Kind) -> Result<(OwnedFd, u64), Refusal> {
        let window = self
            .windows
            .get(&session)
            .filter(|_| self.communicator.owns(session, rank))
            .ok_or(Refusal::UnknownSession)?;
        let (fd, len_bytes) = match kind {
            Kind::Control => (window.control_fd(), window.control_len_bytes()),
            Kind::Arena => (window.arena_fd(), window.arena_len_bytes()),
            Kind::Hand => return Err(Refusal::Malformed),
        };
        let fd = fd.try_clone_to_owned().map_err(|_| Refusal::NoMemory)?;
        Ok((fd, len_bytes))
    }

    fn hand(&mut self, session: u64, rank: u32, memory: SealedMemory) -> Result<u64, Refusal> {
        if self.windows.values().any(|window| window.knows(&memory)) {
            return Err(Refusal::Known);
        }
        let len_bytes = memory.len_bytes().get() as u64;
        let handle = self
            .communicator
            .keep_memory(session, rank, len_bytes)
            .map_err(|error| match error {
                BufferError::Limit { .. } => Refusal::TooMany,
                _ => Refusal::UnknownSession,
            })?;
        let mapping = memory.reserve().and_then(|()| memory.map());
        match (mapping, self.windows.get_mut(&session)) {
            (Ok(mapping), Some(window)) => {
                window.keep(handle, mapping, memory);
                Ok(handle)
            }
            (Err(_), _) | (_, None) => {
                self.communicator.forget_memory(session, handle);
                Err(Refusal::NoMemory)
            }
        }
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
        }
    }

    fn carry_out_one(&mut self, effect: Effect<CallReply>) {
        match effect {
            Effect::Reply { reply_to, result } => {
                let _ = reply_to.send(result);
            }
            Effect::Launch(launch) => self.launch(launch),
            Effect::Done { session, sequence } => {
                if let Some(window) = self.windows.get(&session) {
                    window.control.set_done(sequence);
                }
            }
            Effect::Ready {
                sessions,
                epoch,
                lane,
            } => {
                tracing::info!(epoch, lane = %lane.lane, reason = lane.reason, "ready");
                for session in sessions {
                    let lane = lane.clone();
                    self.tell(session, Tell::Ready { epoch, lane });
                }
            }
            Effect::Ended { session, end } => {
                if let Some(window) = self.windows.get(&session) {
                    window.control.set_ended();
                }
                self.tell(session, Tell::Ended(end));
            }
            Effect::ForgetMemory { session, memory } => {
                if let Some(window) = self.windows.get_mut(&session) {
                    window.forget(memory);
                }
            }
            Effect::Forget { session, rank } => {
                tracing::info!(%rank, "rank gone, its window is freed");
                self.windows.remove(&session);
                self.told.remove(&session);
            }
        }
    }

    fn tell(&self, session: u64, tell: Tell) {
        if let Some(told) = self.told.get(&session) {
            let _ = told.send(tell);
        }
    }

    fn launch(&mut self, launch: Launch) {
        let job = match Job::new(launch.clone(), &self.windows) {
            Ok(job) => job,
            Err(error) => {
                // A defect of ours. Nothing was reduced, so nobody may be told it was: the process is
                // the fault domain, and ends.
                tracing::error!(%error, "cannot launch");
                std::process::abort();
            }
        };
        let fault = self.fault_of(&launch);
        match launch.plan.algorithm {
            Algorithm::OneShot => {
                let took = job.run();
                if let Some(fault) = fault {
                    job.damage(fault);
                }
                self.communicator.reduced(&launch, took);
            }
            Algorithm::OneShotChunked => self.launch_chunked(job, fault),
        }
    }

    fn launch_chunked(&mut self, job: Job, fault: Option<Fault>) {
        if self.pool.is_none() {
            match Pool::new(self.max_threads) {
                Ok(pool) => self.pool = Some(pool),
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
        let (Some(pool), Some(own)) = (&self.pool, self.own.upgrade()) else {
            // As in launch: what was not reduced must not look as if it were.
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
        let Stats {
            reductions,
            reduction,
            skew,
            ranks,
            errors,
        } = self.communicator.stats();
        let report = |(rank, stats): (Rank, &RankStats)| RankReport {
            operations: stats.count.operations,
            bytes: stats.count.bytes,
            lateness: stats.lateness.quantiles(),
            times_last: stats.times_last,
            joined: self.communicator.is_joined(rank),
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
            window_bytes: self
                .windows
                .values()
                .map(|window| window.arena_len_bytes() + window.control_len_bytes())
                .sum(),
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

/// What a client says of itself, fit for a terminal.
fn shortened(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(64).collect()
}
