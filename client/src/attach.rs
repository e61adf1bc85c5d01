//! Membership: the thread that keeps a rank joined.
//!
//! Owns the Attach stream, its heartbeats, and errands that must not wait for the worker (giving
//! buffers back, leaving). One thread for each joined communicator, so that a worker that computes, or
//! is stuck in a native library, stays a member; it dies with the process, and the membership with it.
//! CUDA calls block, so threads that it starts make them.
//!
//! ```text
//!   Joining --Joined, window mapped--> Joined --Ready--> Ready
//!      |                                  |                |
//!      +-----------------+----------------+----------------+--> Over (refused, ended, lost, left)
//! ```

use crate::error::{EpochEnd, Refused, connection_ended};
use crate::host_lane::{HostLane, LaneKind, Peer};
#[cfg(feature = "cuda")]
use crate::{cuda, cuda_lane};
use allreduce_contract::Backend;
use allreduce_contract::companion::{Kind, Reply, Request, TOKEN_LEN};
#[cfg(feature = "cuda")]
use allreduce_contract::kernel::RING_STAGING;
use allreduce_contract::lane::{Board, Geometry, Identity, Lane};
use allreduce_contract::memory::{Mapping, SealedMemory};
use allreduce_contract::transport::{dial, error_chain};
use allreduce_contract::v1;
#[cfg(feature = "cuda")]
use allreduce_contract::v1::RegisterRequest;
use allreduce_contract::v1::attach_request::Message as FromRank;
use allreduce_contract::v1::attach_response::Message as ToRank;
use allreduce_contract::v1::buffers_client::BuffersClient;
use allreduce_contract::v1::communicator_client::CommunicatorClient;
use allreduce_contract::v1::{
    AttachRequest, GaveUp, Heartbeat, Hello, Joined, Leave, Mapped, Notice, NoticeKind, Peers,
    Ready, RegionKind, ReleaseRequest, RingCounts, Shared,
};
use allreduce_contract::window::Control;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

/// How long an exchange on the companion socket may take.
const COMPANION_TIMEOUT_S: i64 = 10;
/// How long leaving may take: then the connection is simply dropped.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The GPU of a rank on backend cuda, and its context once that is made.
#[cfg(feature = "cuda")]
pub(crate) use allreduce_contract::cuda::Device as Gpu;
#[cfg(feature = "cuda")]
type GpuContext = Arc<allreduce_contract::cuda::Context>;
/// A build without feature `cuda` has none.
#[cfg(not(feature = "cuda"))]
#[derive(Debug, Clone)]
pub(crate) enum Gpu {}
#[cfg(not(feature = "cuda"))]
type GpuContext = Gpu;

/// Where a membership is.
#[derive(Debug, Clone)]
pub(crate) enum Membership {
    Joining,
    Joined,
    Ready(Arc<Window>, Arc<Ready>),
    Over(Over),
}

/// Why a membership is over.
#[derive(Debug, Clone)]
pub(crate) enum Over {
    /// Attach was refused.
    Refused(Refused),
    /// The executor ended the epoch.
    Ended(EpochEnd),
    /// The executor died, or does not answer.
    Lost(String),
    /// The window could not be mapped.
    Window(String),
    /// The GPU could not be used.
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaError),
    /// This side left.
    Left,
}

/// A rank's mapped window.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) joined: Joined,
    /// Where this rank launches the kernels itself. Before the control page, to which they store.
    #[cfg(feature = "cuda")]
    pub(crate) lane: OnceLock<cuda_lane::Lane>,
    pub(crate) control: Control,
    pub(crate) arena: Arena,
    /// On backend host, on a lane that shares memory.
    pub(crate) host_lane: OnceLock<Arc<HostLane>>,
}

impl Window {
    /// Unmaps what the executor may not free while it is mapped here.
    async fn close(self: &Arc<Self>) {
        match &self.arena {
            // A mapped memfd outlives its maker.
            Arena::Host(_) => {}
            #[cfg(feature = "cuda")]
            Arena::Cuda(_) => {
                let window = Arc::clone(self);
                // It may block until kernels of this process are done.
                let closing = cuda::on_helper_thread(move || {
                    if let Some(lane) = window.lane.get() {
                        lane.close();
                    }
                    if let Arena::Cuda(arena) = &window.arena {
                        arena.close(&window.control);
                    }
                });
                // If that thread was cut off, so is this one.
                let _ = closing.await;
            }
        }
    }
}

impl Window {
    /// Lane `resident` on backend cuda: what this rank has enqueued or captured.
    fn ring_counts(&self) -> Option<RingCounts> {
        #[cfg(feature = "cuda")]
        return self.lane.get()?.ring_counts();
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// The executor is gone: lets go whatever waits for it in shared memory or on a GPU. Blocks until that is done.
    fn let_go(&self) {
        if let Some(lane) = self.host_lane.get() {
            lane.executor_lost();
        }
        match &self.arena {
            Arena::Host(_) => {}
            #[cfg(feature = "cuda")]
            // If the GPU is lost too, nothing waits there any more.
            Arena::Cuda(arena) => {
                drop(self.lane.get().map(cuda_lane::Lane::abort));
                drop(arena.let_go(&self.control));
            }
        }
    }
}

/// The buffers of a window.
#[derive(Debug)]
pub(crate) enum Arena {
    Host(Arc<Mapping>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Arena),
}

impl Arena {
    pub(crate) fn backend(&self) -> Backend {
        match self {
            Arena::Host(_) => Backend::Host,
            #[cfg(feature = "cuda")]
            Arena::Cuda(_) => Backend::Cuda,
        }
    }
}

/// Why there is no window.
enum Unmapped {
    /// This rank gives up.
    Window(String),
    /// The executor is told why, and refuses every rank.
    #[cfg(feature = "cuda")]
    Gpu(String),
}

impl From<String> for Unmapped {
    fn from(reason: String) -> Self {
        Unmapped::Window(reason)
    }
}

/// What the thread does for the worker.
#[derive(Debug)]
pub(crate) enum Errand {
    /// Give a buffer back.
    Release(u64),
    /// Tell the executor that a reduction could not be finished.
    GaveUp(GaveUp),
    /// Say when everything asked before is done.
    Flush(oneshot::Sender<()>),
    /// Leave, then end.
    Leave,
}

/// Where an executor is, and how to show that one may.
#[derive(Debug, Clone)]
pub(crate) struct ExecutorAt {
    /// Names the communicator in this process: the daemon's socket, and its name there.
    pub(crate) communicator: String,
    pub(crate) socket: PathBuf,
    pub(crate) companion: PathBuf,
    pub(crate) token: [u8; TOKEN_LEN],
}

/// A running membership. Dropping it leaves.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub(crate) errands: mpsc::UnboundedSender<Errand>,
    pub(crate) membership: watch::Receiver<Membership>,
    pub(crate) draining: watch::Receiver<bool>,
    leaving: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Attachment {
    /// Starts the thread, which dials and says hello; on backend cuda it makes the GPU's context first.
    pub(crate) fn start(at: ExecutorAt, hello: Hello, gpu: Option<Gpu>) -> io::Result<Self> {
        let (errands, todo) = mpsc::unbounded_channel();
        let (state, membership) = watch::channel(Membership::Joining);
        let (drain, draining) = watch::channel(false);
        let (leaving, told_to_leave) = watch::channel(false);
        let thread = std::thread::Builder::new()
            .name("allreduce-attach".to_owned())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                let mapped = OnceLock::new();
                let over = match runtime {
                    Ok(runtime) => {
                        let over = runtime.block_on(async {
                            let member = Member {
                                at,
                                state: &state,
                                drain,
                                window: &mapped,
                            };
                            tokio::select! {
                                over = member.run(hello, gpu, todo) => over,
                                // Whatever it is stuck in, an executor that does not answer say.
                                () = cut_off(told_to_leave) => Over::Left,
                            }
                        });
                        // A blocking exchange with an executor that hangs may still be under way.
                        runtime.shutdown_background();
                        over
                    }
                    Err(error) => Over::Lost(error.to_string()),
                };
                let is_lost = matches!(over, Over::Lost(_));
                // What ended it first stays the reason.
                state.send_if_modified(|state| {
                    let first = !matches!(state, Membership::Over(_));
                    if first {
                        *state = Membership::Over(over);
                    }
                    first
                });
                if let Some(window) = mapped.get().filter(|_| is_lost) {
                    window.let_go();
                }
            })?;
        Ok(Self {
            errands,
            membership,
            draining,
            leaving,
            thread: Some(thread),
        })
    }

    /// Leaves, and waits until the executor has been told.
    pub(crate) fn leave(&mut self) {
        // A thread that is over has left.
        let _ = self.errands.send(Errand::Leave);
        self.leaving.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // It ends within LEAVE_TIMEOUT (see cut_off); a panic there has been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Ends [`LEAVE_TIMEOUT`] after the worker wants to leave.
async fn cut_off(mut told_to_leave: watch::Receiver<bool>) {
    // The sender is dropped only after it has said so.
    let _ = told_to_leave.wait_for(|leaving| *leaving).await;
    tokio::time::sleep(LEAVE_TIMEOUT).await;
}

struct Member<'a> {
    at: ExecutorAt,
    state: &'a watch::Sender<Membership>,
    drain: watch::Sender<bool>,
    /// Set once it is mapped.
    window: &'a OnceLock<Arc<Window>>,
}

fn lost(error: impl std::fmt::Display) -> Over {
    Over::Lost(error.to_string())
}

impl Member<'_> {
    /// Maps what ranks share on backend host.
    async fn share(&self, rank: u32, window: &Arc<Window>, peers: Peers) -> Result<(), String> {
        let at = self.at.clone();
        let joined = window.joined.clone();
        // The companion socket is blocking.
        let mapping =
            tokio::task::spawn_blocking(move || map_host_lane(&at, rank, &joined, &peers));
        let lane = mapping.await.map_err(|error| error.to_string())??;
        // Peers comes once.
        let _ = window.host_lane.set(Arc::new(lane));
        Ok(())
    }

    async fn run(
        &self,
        hello: Hello,
        gpu: Option<Gpu>,
        mut errands: mpsc::UnboundedReceiver<Errand>,
    ) -> Over {
        let context = match gpu {
            None => None,
            #[cfg(feature = "cuda")]
            Some(gpu) => match cuda::retain(gpu).await {
                Ok(context) => Some(context),
                Err(over) => return over,
            },
        };
        let channel = match dial(&self.at.socket).await {
            Ok(channel) => channel,
            Err(error) => return lost(error_chain(&error)),
        };
        let (outbound, messages) = mpsc::unbounded_channel();
        let rank = hello.rank;
        let send = |message| {
            outbound
                .send(AttachRequest {
                    message: Some(message),
                })
                .is_ok()
        };
        send(FromRank::Hello(hello));
        let attach = CommunicatorClient::new(channel.clone())
            .attach(UnboundedReceiverStream::new(messages))
            .await;
        let mut inbound = match attach {
            Ok(response) => response.into_inner(),
            Err(status) => return refused_or_lost(&status),
        };
        let buffers = BuffersClient::new(channel);
        let mut releases = JoinSet::new();
        let mut opening = JoinSet::new();
        let mut window: Option<Arc<Window>> = None;
        let mut interval = Duration::from_secs(1);
        let mut timeout = Duration::from_secs(10);
        let mut next_beat = Instant::now() + interval;
        let mut heard = Instant::now();
        let mut nonce = 0;
        loop {
            tokio::select! {
                message = inbound.message() => {
                    heard = Instant::now();
                    let message = match message {
                        Ok(Some(response)) => response.message,
                        Ok(None) => return lost("the executor closed the connection"),
                        Err(status) => return refused_or_lost(&status),
                    };
                    match message {
                        Some(ToRank::Joined(joined)) => {
                            interval = Duration::from_millis(u64::from(joined.heartbeat_interval_ms));
                            timeout = Duration::from_millis(u64::from(joined.heartbeat_timeout_ms));
                            next_beat = heard + interval;
                            let at = self.at.clone();
                            let context = context.clone();
                            let is_cuda = context.is_some();
                            let mapping = tokio::task::spawn_blocking(move || {
                                map_window(&at, rank, context, joined)
                            });
                            let mapped = mapping
                                .await
                                .unwrap_or_else(|error| Err(Unmapped::Window(error.to_string())));
                            match mapped {
                                Ok(mapped) => {
                                    let mapped = Arc::new(mapped);
                                    // Joined comes once.
                                    let _ = self.window.set(Arc::clone(&mapped));
                                    window = Some(mapped);
                                    if is_cuda {
                                        send(FromRank::Mapped(Mapped::default()));
                                    }
                                    self.state.send_replace(Membership::Joined);
                                }
                                Err(Unmapped::Window(reason)) => return Over::Window(reason),
                                // The verdict comes as the stream's status.
                                #[cfg(feature = "cuda")]
                                Err(Unmapped::Gpu(error)) => {
                                    send(FromRank::Mapped(Mapped { error }));
                                }
                            }
                        }
                        Some(ToRank::Ready(ready)) => {
                            if let Some(window) = &window {
                                let ready = Membership::Ready(Arc::clone(window), Arc::new(ready));
                                self.state.send_replace(ready);
                            }
                        }
                        Some(ToRank::Peers(peers)) => {
                            let Some(window) = &window else {
                                return lost("Peers came before Joined");
                            };
                            if let Some(context) = &context {
                                let lane = open_lane(
                                    self.at.clone(),
                                    buffers.clone(),
                                    rank,
                                    Arc::clone(window),
                                    context.clone(),
                                    peers,
                                );
                                opening.spawn(lane);
                            } else {
                                let shared = self.share(rank, window, peers).await;
                                let error = shared.err().unwrap_or_default();
                                send(FromRank::Shared(Shared { error, calls: 0 }));
                            }
                        }
                        Some(ToRank::Notice(notice)) => match notice.kind() {
                            NoticeKind::Abort => {
                                // Over for reductions; the stream stays, and the memory with it, until
                                // the worker lets go of the communicator.
                                self.state.send_replace(Membership::Over(ended(notice)));
                            }
                            NoticeKind::Drain => {
                                self.drain.send_replace(true);
                            }
                            NoticeKind::Epoch | NoticeKind::Lane | NoticeKind::Unspecified => {}
                        },
                        Some(ToRank::Heartbeat(_)) | None => {}
                    }
                }
                () = tokio::time::sleep_until(next_beat) => {
                    // A beat that comes late by more than an interval says that this process did not
                    // run (it was stopped, or the machine slept), and nothing about the executor: what
                    // that has said meanwhile is still to be read.
                    if next_beat.elapsed() > interval {
                        heard = Instant::now();
                    } else if heard.elapsed() > timeout {
                        return lost("the executor does not answer heartbeats");
                    }
                    nonce += 1;
                    next_beat = Instant::now() + interval;
                    // If the executor has closed the stream, its status is still to be read above.
                    let ring = window.as_ref().and_then(|window| window.ring_counts());
                    send(FromRank::Heartbeat(Heartbeat { nonce, ring }));
                }
                Some(_) = releases.join_next() => {}
                // It waits for the other ranks, which may take long; heartbeats go on.
                Some(opened) = opening.join_next() => {
                    let opened = opened.unwrap_or_else(|error| Err(error.to_string()));
                    let shared = match opened {
                        Ok(calls) => Shared { error: String::new(), calls },
                        Err(error) => Shared { error, calls: 0 },
                    };
                    send(FromRank::Shared(shared));
                }
                errand = errands.recv() => match errand {
                    Some(Errand::Release(buffer_id)) => {
                        let Some(window) = &window else { continue };
                        let session = window.joined.session;
                        let mut buffers = buffers.clone();
                        // Beside the heartbeats: the executor finishes reductions first. An executor that
                        // hangs is found by its heartbeats.
                        releases.spawn(async move {
                            // A refusal says that it was given back before, or with the session.
                            let _ = buffers.release(ReleaseRequest { session, buffer_id }).await;
                        });
                    }
                    Some(Errand::GaveUp(gave_up)) => {
                        send(FromRank::GaveUp(gave_up));
                    }
                    Some(Errand::Flush(done)) => {
                        let mut earlier = std::mem::take(&mut releases);
                        releases.spawn(async move {
                            while earlier.join_next().await.is_some() {}
                            // Who waits may have given up.
                            let _ = done.send(());
                        });
                    }
                    Some(Errand::Leave) | None => {
                        if let Some(window) = &window {
                            window.close().await;
                        }
                        // One that is being opened has seen that it is closed.
                        while opening.join_next().await.is_some() {}
                        let ring = window.as_ref().and_then(|window| window.ring_counts());
                        send(FromRank::Leave(Leave { ring }));
                        drop(outbound);
                        let closed = async { while let Ok(Some(_)) = inbound.message().await {} };
                        // The executor closes its side once it has read Leave.
                        let _ = tokio::time::timeout(LEAVE_TIMEOUT, closed).await;
                        return Over::Left;
                    }
                }
            }
        }
    }
}

/// Maps what the ranks share, and tries the lane; how many calls that took.
#[cfg(feature = "cuda")]
async fn open_lane(
    at: ExecutorAt,
    buffers: BuffersClient<Channel>,
    rank: u32,
    window: Arc<Window>,
    context: GpuContext,
    peers: Peers,
) -> Result<u32, String> {
    if peers.lane() == v1::Lane::Resident {
        let (own, communicator) = (Arc::clone(&context), at.communicator.clone());
        let staging = cuda::on_helper_thread(move || cuda_lane::staging(&own, &communicator, rank));
        let memory = staging.await.flatten()?;
        let request = RegisterRequest {
            session: window.joined.session,
            len_bytes: memory.len_bytes,
            cuda: Some(memory),
            ring_memory: RING_STAGING.into(),
            ..RegisterRequest::default()
        };
        let mut buffers = buffers;
        // Given back with the session.
        let registered = buffers.register(request).await;
        registered.map_err(|status| format!("the staging memory: {}", status.message()))?;
    }
    let opening = cuda::on_helper_thread(move || {
        let own = peers.peers.get(rank as usize);
        let kernels = own
            .and_then(|own| {
                let mut regions = own.regions.iter();
                regions.find(|region| region.kind() == RegionKind::Kernels)
            })
            .ok_or("Peers names no kernels")?;
        let session = window.joined.session;
        let request = Request {
            kind: Kind::Kernels,
            token: at.token,
            session,
            rank,
            peer: rank,
            len_bytes: 0,
        };
        let image = fetch_region(&at, &request, kernels.len_bytes)?;
        let image = image.read().map_err(|error| error.to_string())?;
        let opener = cuda_lane::Opener {
            communicator: &at.communicator,
            rank,
            session,
            arena: match &window.arena {
                Arena::Host(_) => (0, 0),
                Arena::Cuda(arena) => arena.range(),
            },
        };
        cuda_lane::Lane::open_in(&window, &context, opener, &peers, &image)
    });
    opening.await.flatten()
}

#[cfg(not(feature = "cuda"))]
#[expect(clippy::unused_async, reason = "as with feature cuda")]
async fn open_lane(
    _at: ExecutorAt,
    _buffers: BuffersClient<Channel>,
    _rank: u32,
    _window: Arc<Window>,
    _context: GpuContext,
    peers: Peers,
) -> Result<u32, String> {
    Err(format!(
        "this client has no lane {}",
        peers.lane().as_str_name()
    ))
}

fn refused_or_lost(status: &tonic::Status) -> Over {
    let refused = Refused::new(status);
    if refused.is_transport() {
        Over::Lost(connection_ended(&refused))
    } else {
        Over::Refused(refused)
    }
}

fn ended(notice: Notice) -> Over {
    Over::Ended(EpochEnd {
        epoch: notice.epoch,
        rank: notice.rank,
        message: notice.reason,
    })
}

fn map_window(
    at: &ExecutorAt,
    rank: u32,
    context: Option<GpuContext>,
    joined: Joined,
) -> Result<Window, Unmapped> {
    let of_window = |kind: Kind, region: RegionKind| {
        let announced = joined
            .regions
            .iter()
            .find(|found| found.kind() == region)
            .map(|found| found.len_bytes)
            .ok_or_else(|| format!("Joined names no region {region:?}"))?;
        let request = Request {
            kind,
            token: at.token,
            session: joined.session,
            rank,
            peer: rank,
            len_bytes: 0,
        };
        fetch_region(at, &request, announced)
    };
    let control = of_window(Kind::Control, RegionKind::Control)?;
    let control = Control::open(&control).map_err(|error| error.to_string())?;
    let arena = match context {
        None => {
            let arena = of_window(Kind::Arena, RegionKind::Arena)?;
            Arena::Host(Arc::new(arena.map().map_err(|error| error.to_string())?))
        }
        #[cfg(feature = "cuda")]
        Some(context) => Arena::Cuda(cuda::Arena::open(&context, &joined).map_err(Unmapped::Gpu)?),
    };
    Ok(Window {
        joined,
        #[cfg(feature = "cuda")]
        lane: OnceLock::new(),
        control,
        arena,
        host_lane: OnceLock::new(),
    })
}

/// Fetches a region of `announced` bytes.
fn fetch_region(
    at: &ExecutorAt,
    request: &Request,
    announced: u64,
) -> Result<SealedMemory, String> {
    match exchange(&at.companion, request, None)? {
        (Reply::Region { len_bytes }, Some(fd)) if len_bytes == announced => {
            SealedMemory::adopt(fd, announced).map_err(|error| error.to_string())
        }
        (Reply::Refused(refusal), _) => Err(refusal.to_string()),
        (reply, _) => Err(format!("unexpected reply {reply:?}")),
    }
}

/// Maps the board, the own lane, and the lanes and arenas of the peers.
fn map_host_lane(
    at: &ExecutorAt,
    rank: u32,
    joined: &Joined,
    peers: &Peers,
) -> Result<HostLane, String> {
    let host = peers
        .host
        .as_ref()
        .ok_or("Peers does not say how the lane works")?;
    let geometry = Geometry {
        one_shot_max_bytes: host.one_shot_max_bytes,
        short_max_bytes: host.short_max_bytes,
        block_len_bytes: host.block_len_bytes,
        stage_len_bytes: host.stage_len_bytes,
        spin: Duration::from_nanos(host.spin_ns),
        yielding: Duration::from_nanos(host.yield_ns),
    };
    let stage_len_bytes = usize::try_from(host.stage_len_bytes)
        .ok()
        .filter(|_| geometry.is_legal())
        .ok_or_else(|| format!("Peers names lengths that no lane has: {geometry:?}"))?;
    let world_size = u32::try_from(peers.peers.len()).unwrap_or(u32::MAX);
    let fetch = |kind: Kind, peer: u32, announced: u64| {
        let request = Request {
            kind,
            token: at.token,
            session: joined.session,
            rank,
            peer,
            len_bytes: 0,
        };
        fetch_region(at, &request, announced)
    };
    let text = |error: allreduce_contract::lane::BadLane| error.to_string();
    let board = fetch(Kind::Board, rank, host.board_len_bytes)?;
    let board = Board::open(&board, world_size, joined.epoch).map_err(text)?;
    let mut own = None;
    let mut mapped = Vec::new();
    for (peer, shared) in (0..world_size).zip(&peers.peers) {
        let announced = |kind: RegionKind| {
            let region = shared.regions.iter().find(|found| found.kind() == kind);
            region
                .map(|region| region.len_bytes)
                .ok_or_else(|| format!("Peers names no region {kind:?} of rank {peer}"))
        };
        let identity = Identity {
            rank: peer,
            world_size,
            epoch: joined.epoch,
        };
        let lane = fetch(Kind::Lane, peer, announced(RegionKind::Lane)?)?;
        if peer == rank {
            own = Some(Lane::open(&lane, identity, stage_len_bytes).map_err(text)?);
            mapped.push(None);
        } else {
            let arena = fetch(Kind::Arena, peer, announced(RegionKind::Arena)?)?;
            mapped.push(Some(Peer::open(&lane, &arena, identity, stage_len_bytes)?));
        }
    }
    let own = own.ok_or("Peers does not name this rank")?;
    let lane = match peers.lane() {
        v1::Lane::Delegated => LaneKind::Delegated,
        v1::Lane::Resident => LaneKind::Resident,
        other @ (v1::Lane::Rpc | v1::Lane::Unspecified) => {
            return Err(format!("Peers names lane {}", other.as_str_name()));
        }
    };
    Ok(HostLane::new(
        lane,
        rank,
        geometry,
        stage_len_bytes,
        board,
        own,
        mapped,
    ))
}

/// One exchange on the companion socket, at most [`COMPANION_TIMEOUT_S`] for each direction.
pub(crate) fn exchange(
    companion: &Path,
    request: &Request,
    memory: Option<BorrowedFd<'_>>,
) -> Result<(Reply, Option<OwnedFd>), String> {
    let text = |error: nix::errno::Errno| format!("companion socket: {error}");
    let socket = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(text)?;
    let limit = TimeVal::seconds(COMPANION_TIMEOUT_S);
    setsockopt(&socket, sockopt::ReceiveTimeout, &limit).map_err(text)?;
    setsockopt(&socket, sockopt::SendTimeout, &limit).map_err(text)?;
    let address = UnixAddr::new(companion).map_err(text)?;
    connect(socket.as_raw_fd(), &address).map_err(text)?;
    request
        .send(socket.as_fd(), memory)
        .map_err(|error| error.to_string())?;
    Reply::receive(socket.as_fd()).map_err(|error| error.to_string())
}
