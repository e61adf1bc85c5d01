//! The executor: one process for each communicator, the fault domain.
//!
//! Owns its sockets and the [`task`]. The supervisor starts it with an [`ExecutorSpec`] on standard
//! input, waits for the line "ready" on its standard output, and holds standard input open as long as
//! it lives. Refuses to outlive its use: it exits when no rank has been there for a while, when it has
//! drained after SIGTERM, and, its supervisor gone, when the last rank has left.

mod companion;
mod task;

pub(crate) use task::{
    ArenaAt, Handle, JoinedAs, RegisterCuda, SharedRegion, StatsReport, Stopped, Tell, exhausted,
};

use crate::backend::Fault;
use crate::config::{CommunicatorConfig, CudaConfig, Host, Log, TopologyConfig};
use crate::health::HealthTable;
use crate::listen::{Access, ListenError, accept, bind_seqpacket, bind_stream};
use crate::rpc::executor_routes;
use crate::wire::{announce_ready, read_line, stdin_ended};
use allreduce_contract::companion::TOKEN_LEN;
use allreduce_contract::{Backend, UnknownName, WorldSize};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use task::{Task, TaskEnd};
use tokio::signal::unix::{SignalKind, signal};

/// Everything an executor is told at its start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ExecutorSpec {
    pub(crate) communicator_name: String,
    world_size: u32,
    backend: String,
    pub(crate) backend_reason: String,
    pub(crate) incarnation: u64,
    pub(crate) token: [u8; TOKEN_LEN],
    pub(crate) socket: PathBuf,
    pub(crate) companion: PathBuf,
    pub(crate) mode: u32,
    pub(crate) group: Option<u32>,
    pub(crate) communicator: CommunicatorConfig,
    pub(crate) host: Host,
    pub(crate) cuda: CudaConfig,
    pub(crate) topology: TopologyConfig,
    pub(crate) log: Log,
    pub(crate) drain_timeout_ms: u32,
    pub(crate) fault: Option<Fault>,
}

/// The parts of a spec that the supervisor knows for each executor; the rest is configuration.
pub(crate) struct Identity {
    pub(crate) communicator_name: String,
    pub(crate) world_size: WorldSize,
    pub(crate) backend: Backend,
    pub(crate) backend_reason: String,
    pub(crate) incarnation: u64,
    pub(crate) token: [u8; TOKEN_LEN],
    pub(crate) socket: PathBuf,
}

impl ExecutorSpec {
    pub(crate) fn new(
        identity: Identity,
        config: &crate::config::Config,
        access: Access,
        fault: Option<Fault>,
    ) -> Self {
        let (mode, group) = access.to_parts();
        Self {
            communicator_name: identity.communicator_name,
            world_size: identity.world_size.get(),
            backend: identity.backend.to_string(),
            backend_reason: identity.backend_reason,
            incarnation: identity.incarnation,
            token: identity.token,
            companion: identity.socket.with_extension("fd"),
            socket: identity.socket,
            mode,
            group,
            communicator: config.communicator.clone(),
            host: config.host.clone(),
            cuda: config.cuda.clone(),
            topology: config.topology.clone(),
            log: config.log.clone(),
            drain_timeout_ms: config.shutdown.drain_timeout_ms,
            fault,
        }
    }

    /// The world size; [`read_spec`] checked it.
    pub(crate) fn world_size(&self) -> WorldSize {
        WorldSize::new(self.world_size).unwrap_or(WorldSize::ONE)
    }

    /// The backend; [`read_spec`] checked it.
    pub(crate) fn backend(&self) -> Backend {
        self.backend.parse().unwrap_or(Backend::Host)
    }
}

/// Why an executor did not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecutorError {
    #[error("the spec on standard input: {0}")]
    Spec(io::Error),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("serving: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// How long ranks have to be told before a process whose GPU is lost ends.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Reads the spec, one line of JSON.
pub(crate) fn read_spec() -> Result<ExecutorSpec, ExecutorError> {
    let spec: ExecutorSpec = read_line().map_err(ExecutorError::Spec)?;
    let bad =
        |error: &dyn std::fmt::Display| ExecutorError::Spec(io::Error::other(error.to_string()));
    WorldSize::new(spec.world_size).map_err(|error| bad(&error))?;
    let backend: Result<Backend, UnknownName> = spec.backend.parse();
    backend.map_err(|error| bad(&error))?;
    Ok(spec)
}

/// The whole life of an executor process.
pub(crate) fn run(spec: ExecutorSpec) -> Result<(), ExecutorError> {
    // One thread for everything but large reductions: a call crosses no thread, which measured 56 us
    // against 150 us for a round trip (docs/benchmarks.md, "runtimes").
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(serve(Arc::new(spec)));
    // Standard input may still block a thread of the runtime.
    runtime.shutdown_background();
    ended
}

async fn serve(spec: Arc<ExecutorSpec>) -> Result<(), ExecutorError> {
    let access = Access::from_parts(spec.mode, spec.group);
    let (listener, _socket) = bind_stream(&spec.socket, access)?;
    let (companion_listener, _companion) = bind_seqpacket(&spec.companion, access)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;

    let health = HealthTable::new();
    let (task, handle) = Task::new(Arc::clone(&spec), health.clone())?;
    let routes = executor_routes(&spec, &handle, &health);
    let server = tonic::transport::Server::builder()
        // A rank has its calls in flight, an Attach and a few others; each stream may hold a message.
        .max_concurrent_streams(spec.communicator.max_in_flight.saturating_add(16))
        .add_routes(routes)
        .serve_with_incoming(accept(listener));
    let companion = companion::serve(companion_listener, handle.clone())?;
    let mut terminate = signal(SignalKind::terminate())?;
    health.set("", true);
    health.set(&format!("executor/{}", spec.communicator_name), true);
    announce_ready()?;
    tracing::info!(
        communicator = spec.communicator_name,
        world_size = spec.world_size,
        incarnation = spec.incarnation,
        socket = %spec.socket.display(),
        "executor ready"
    );
    tokio::spawn(watch_supervisor(handle.clone()));

    let mut task = std::pin::pin!(task.run());
    let mut server = std::pin::pin!(server);
    let mut companion = std::pin::pin!(companion);
    let mut forced = std::pin::pin!(std::future::pending::<()>());
    let mut cut_off = None;
    loop {
        let cut_off_at = async {
            match cut_off {
                Some(at) => tokio::time::sleep_until(at).await,
                None => forced.as_mut().await,
            }
        };
        tokio::select! {
            end = &mut task => {
                match end {
                    TaskEnd::Idle => tracing::info!("no rank for the idle timeout: exiting"),
                    TaskEnd::Drained => tracing::info!("drained: exiting"),
                    TaskEnd::Lost(reason) => {
                        tracing::error!(reason, "the GPU is lost to this process: exiting");
                        health.set_all_not_serving();
                        // The ranks' streams still have it to tell.
                        let serving = async { tokio::select! { _ = &mut server => {}, () = &mut companion => {} } };
                        let _ = tokio::time::timeout(LAST_WORDS, serving).await;
                        end_now(70);
                    }
                }
                return Ok(());
            }
            served = &mut server => return Ok(served?),
            () = &mut companion => {}
            _ = terminate.recv() => {
                tracing::info!("SIGTERM: draining");
                health.set_all_not_serving();
                let timeout = Duration::from_millis(u64::from(spec.drain_timeout_ms));
                cut_off.get_or_insert(tokio::time::Instant::now() + timeout);
                // Not awaited here: the task that takes it is run by this very loop.
                let handle = handle.clone();
                tokio::spawn(async move { handle.drain().await });
            }
            () = cut_off_at => {
                tracing::warn!("ranks did not leave within the drain timeout: cutting them off");
                if spec.backend() == Backend::Cuda {
                    // Freeing might wait for a GPU that waits for them.
                    tokio::time::sleep(LAST_WORDS).await;
                    end_now(0);
                }
                return Ok(());
            }
        }
    }
}

/// Ends the process without CUDA's own clean-up, which would wait for the very GPU that does not go on. The
/// supervisor removes the sockets.
#[allow(unsafe_code)] // room: CUDA bindings
fn end_now(code: i32) -> ! {
    // SAFETY: _exit may be called at any time.
    unsafe { nix::libc::_exit(code) }
}

/// Standard input ends when the supervisor does, however it does.
async fn watch_supervisor(handle: Handle) {
    stdin_ended().await;
    handle.orphaned().await;
    tracing::warn!("the supervisor is gone: this executor exits when its ranks have left");
}
