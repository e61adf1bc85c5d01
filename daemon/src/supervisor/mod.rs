//! The supervisor: the process that `serve` runs.
//!
//! Owns the daemon's socket, health and the [`Placement`] of communicators on executors. It maps no
//! shared memory and is on no data path. main reads: configuration, log, socket, services, signals,
//! bounded drain.

mod placement;

pub(crate) use placement::{OpenError, Placed, Placement};

use crate::backend::Fault;
use crate::config::Config;
use crate::health::HealthTable;
use crate::listen::{Access, ListenError, accept, bind_daemon, prepare_executor_dir};
use crate::rpc::supervisor_routes;
use crate::wire::{announce_ready, stdin_ended};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Time that executors get beyond the drain timeout before they are killed.
const KILL_GRACE: Duration = Duration::from_millis(500);

/// How long a request may take to arrive and be answered. Open waits for an executor to start, at most 15 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Why `serve` does not serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// The socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A system call.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The gRPC server.
    #[error("serving: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// How a private daemon differs from a service.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Private {
    /// Ends when standard input ends, and says "ready" on standard output: the daemon of one parent.
    pub(crate) until_stdin_closes: bool,
    /// A fault that each executor is to commit.
    pub(crate) fault: Option<Fault>,
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn serve(config: Config, private: Private) -> Result<(), ServeError> {
    let access = Access::new(
        config.listen.parsed_mode().map_err(io::Error::other)?,
        &config.listen.group,
    )?;
    // Before any thread exists: binding sets the umask for a moment.
    let socket = bind_daemon(&config.listen.path, access)?;
    let executor_dir = prepare_executor_dir(&config.listen.path, access)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let served = runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(socket.listener.try_clone()?)?;
        let drain_timeout = Duration::from_millis(u64::from(config.shutdown.drain_timeout_ms));
        let health = HealthTable::new();
        let placement = Placement::new(
            config.clone(),
            access,
            executor_dir,
            health.clone(),
            private,
        );
        let routes = supervisor_routes(&placement, &health);
        let server = tonic::transport::Server::builder()
            // Nobody needs more; each may hold a message, and one that is never finished is given up.
            .max_concurrent_streams(16)
            .timeout(REQUEST_TIMEOUT)
            .add_routes(routes)
            .serve_with_incoming(accept(listener));
        health.set("control", true);
        health.set("", true);
        tracing::info!(
            version = allreduce_contract::VERSION,
            socket = %config.listen.path.display(),
            "serving"
        );
        if private.until_stdin_closes {
            announce_ready()?;
        }
        until_told(server, private).await?;
        health.set_all_not_serving();
        drain(&placement, drain_timeout).await;
        Ok(())
    });
    runtime.shutdown_background();
    crate::slots::remove_unused(&crate::listen::executor_dir(&config.listen.path));
    // Empty unless an executor of an earlier supervisor still lives there; before the lock goes, after
    // which another daemon may use it.
    let _ = std::fs::remove_dir(crate::listen::executor_dir(&config.listen.path));
    drop(socket);
    if let Some(dir) = config
        .listen
        .path
        .parent()
        .filter(|_| private.until_stdin_closes)
    {
        // The parent made it for this daemon, and may have been killed. It removes what else it put there.
        let _ = std::fs::remove_dir(dir);
    }
    served
}

/// Serves until a signal, or the end of standard input where that is the lifetime. The server goes on
/// answering health and stats while draining: it lives in a task of its own.
async fn until_told(
    server: impl Future<Output = Result<(), tonic::transport::Error>> + Send + 'static,
    private: Private,
) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut server = tokio::spawn(server);
    let stdin_closes = async {
        if private.until_stdin_closes {
            stdin_ended().await;
        } else {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        served = &mut server => match served {
            Ok(served) => served?,
            Err(error) => return Err(io::Error::other(error).into()),
        },
        _ = terminate.recv() => tracing::info!("SIGTERM: draining"),
        _ = interrupt.recv() => tracing::info!("SIGINT: draining"),
        () = stdin_closes => tracing::info!("standard input closed: draining"),
    }
    Ok(())
}

/// Waits for the executors to drain; a second signal, or the timeout, ends the waiting.
async fn drain(placement: &Arc<Placement>, timeout: Duration) {
    placement.begin_drain();
    let again = async {
        match (
            signal(SignalKind::terminate()),
            signal(SignalKind::interrupt()),
        ) {
            (Ok(mut terminate), Ok(mut interrupt)) => tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            },
            (Err(_), _) | (_, Err(_)) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = placement.all_gone() => tracing::info!("drained"),
        () = tokio::time::sleep(timeout + KILL_GRACE) => {
            tracing::warn!("executors did not drain in time: killing them");
        }
        () = again => tracing::warn!("told twice: killing executors"),
    }
    placement.kill_all().await;
}
