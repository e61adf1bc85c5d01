//! Which communicator is served by which executor process.
//!
//! Owns the table of open communicators and one task for each, which starts the executor, notices its
//! death and starts the next. The rpc services ask it; it asks nobody. Refuses to know ranks.
//!
//! ```text
//!            Open                 "ready"                exit 0 (idle, drained)
//!   (none) --------> Starting ------------> Serving ---------------------------> (none)
//!                       ^  |                   |
//!                       |  | no "ready"        | any other exit
//!                       |  v                   v
//!                       +-- Down (why; next try after a growing pause)
//! ```

use crate::backend::Fault;
use crate::config::Config;
use crate::executor::{ExecutorSpec, Identity};
use crate::health::HealthTable;
use crate::listen::{Access, ensure_executor_dir, executor_name};
use crate::plan::{BackendChoice, Refusal, choose_backend};
use crate::supervisor::Private;
use allreduce_contract::companion::TOKEN_LEN;
use allreduce_contract::v1::{BadEnum, CommunicatorStats};
use allreduce_contract::{Backend, BadCommunicatorId, BadWorldSize, CommunicatorId, WorldSize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;

/// How long an executor may take to say "ready".
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before the first restart; doubles with each that fails.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Starts of a communicator that never served, before it is given up.
const MAX_FAILED_STARTS: u32 = 5;
/// Longest pause before a restart.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Whether the machine shows an NVIDIA GPU. The supervisor loads no CUDA, so it looks for the driver's files.
fn shows_gpu() -> bool {
    ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"]
        .iter()
        .any(|path| Path::new(path).exists())
}

/// Why Open does not answer a place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    BadName(#[from] BadCommunicatorId),
    #[error(transparent)]
    BadWorldSize(#[from] BadWorldSize),
    #[error(transparent)]
    BadBackend(#[from] BadEnum),
    #[error(transparent)]
    Plan(#[from] Refusal),
    #[error("communicator {name} is open with {what} {open}, not {asked}")]
    Differs {
        name: String,
        what: &'static str,
        open: String,
        asked: String,
    },
    #[error("{limit} communicators are open, which is the limit (communicator.max_open)")]
    Limit { limit: u32 },
    #[error("the daemon is draining and opens no communicators")]
    Draining,
    #[error("the executor of communicator {name} does not start: {reason}")]
    NotStarted { name: String, reason: String },
    #[error("there is no communicator {0:?} on this node")]
    Unknown(String),
}

/// Where an executor listens.
#[derive(Debug, Clone)]
pub(crate) struct ServingAt {
    pub(crate) socket: PathBuf,
    pub(crate) pid: u32,
    token: [u8; TOKEN_LEN],
}

/// A communicator, as it is placed now.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) name: String,
    pub(crate) world_size: WorldSize,
    pub(crate) backend: Backend,
    pub(crate) backend_reason: String,
    pub(crate) incarnation: u64,
    pub(crate) serving: Option<ServingAt>,
}

/// What Open answers.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) socket: PathBuf,
    pub(crate) companion: PathBuf,
    pub(crate) token: [u8; TOKEN_LEN],
    pub(crate) incarnation: u64,
    pub(crate) backend: Backend,
    pub(crate) backend_reason: String,
}

#[derive(Debug, Clone)]
enum State {
    Starting,
    Serving(ServingAt),
    Down(String),
    Gone,
}

#[derive(Debug)]
struct Entry {
    world_size: WorldSize,
    backend: BackendChoice,
    incarnation: u64,
    state: watch::Sender<State>,
    /// The last stats an executor of it gave.
    last_stats: Option<CommunicatorStats>,
}

/// The table. Its lock is held for look-ups only, never across a wait.
#[derive(Debug)]
pub(crate) struct Placement {
    config: Config,
    access: Access,
    executor_dir: PathBuf,
    health: HealthTable,
    fault: Option<Fault>,
    entries: Mutex<BTreeMap<CommunicatorId, Entry>>,
    draining: watch::Sender<bool>,
    kill: watch::Sender<bool>,
    /// How many executor tasks live.
    tasks: watch::Sender<usize>,
}

impl Placement {
    pub(crate) fn new(
        config: Config,
        access: Access,
        executor_dir: PathBuf,
        health: HealthTable,
        private: Private,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            access,
            executor_dir,
            health,
            fault: private.fault,
            entries: Mutex::new(BTreeMap::new()),
            draining: watch::Sender::new(false),
            kill: watch::Sender::new(false),
            tasks: watch::Sender::new(0),
        })
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<CommunicatorId, Entry>> {
        // A panic while holding it would have left the map itself sound.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds or starts the executor of a communicator, and waits until it serves.
    pub(crate) async fn open(
        self: &Arc<Self>,
        name: &str,
        world_size: u32,
        backend: i32,
        has_cuda: bool,
    ) -> Result<Place, OpenError> {
        let id = CommunicatorId::new(name)?;
        let world_size = WorldSize::new(world_size)?;
        let wanted = match backend {
            0 => None,
            other => Some(Backend::from_wire(other)?),
        };
        let choice = choose_backend(wanted, has_cuda, shows_gpu())?;
        if *self.draining.borrow() {
            return Err(OpenError::Draining);
        }
        let mut state = self.find_or_start(&id, world_size, choice)?;
        let serving = tokio::time::timeout(START_TIMEOUT + LONGEST_PAUSE, async {
            let settled = |state: &State| match state {
                State::Serving(_) | State::Down(_) | State::Gone => true,
                State::Starting => false,
            };
            state.wait_for(settled).await.map(|state| state.clone())
        });
        let not_started = |reason: &str| OpenError::NotStarted {
            name: name.to_owned(),
            reason: reason.to_owned(),
        };
        let at = match serving.await {
            Ok(Ok(State::Serving(at))) => at,
            Ok(Ok(State::Down(reason))) => return Err(not_started(&reason)),
            Ok(Ok(State::Starting | State::Gone) | Err(_)) => {
                return Err(not_started("it just exited; try again"));
            }
            Err(_) => return Err(not_started("no answer in time; try again")),
        };
        let entries = self.entries();
        let entry = entries
            .get(&id)
            .ok_or_else(|| not_started("it just exited; try again"))?;
        Ok(Place {
            companion: at.socket.with_extension("fd"),
            socket: at.socket,
            token: at.token,
            incarnation: entry.incarnation,
            backend: entry.backend.backend,
            backend_reason: entry.backend.reason.clone(),
        })
    }

    fn find_or_start(
        self: &Arc<Self>,
        id: &CommunicatorId,
        world_size: WorldSize,
        backend: BackendChoice,
    ) -> Result<watch::Receiver<State>, OpenError> {
        let mut entries = self.entries();
        if let Some(entry) = entries.get(id) {
            let differs = |what, open: String, asked: String| OpenError::Differs {
                name: id.to_string(),
                what,
                open,
                asked,
            };
            if entry.world_size != world_size {
                let (open, asked) = (entry.world_size.to_string(), world_size.to_string());
                return Err(differs("world_size", open, asked));
            }
            if entry.backend.backend != backend.backend {
                let (open, asked) = (&entry.backend.backend, &backend.backend);
                return Err(differs("backend", open.to_string(), asked.to_string()));
            }
            return Ok(entry.state.subscribe());
        }
        let limit = self.config.communicator.max_open;
        if entries.len() >= limit as usize {
            return Err(OpenError::Limit { limit });
        }
        let state = watch::Sender::new(State::Starting);
        let receiver = state.subscribe();
        entries.insert(
            id.clone(),
            Entry {
                world_size,
                backend,
                incarnation: 0,
                state,
                last_stats: None,
            },
        );
        drop(entries);
        self.tasks.send_modify(|tasks| *tasks += 1);
        tokio::spawn(Arc::clone(self).keep(id.clone()));
        Ok(receiver)
    }

    /// Everything open, by name.
    pub(crate) fn list(&self) -> Vec<Placed> {
        self.entries()
            .iter()
            .map(|(id, entry)| Placed {
                name: id.to_string(),
                world_size: entry.world_size,
                backend: entry.backend.backend,
                backend_reason: entry.backend.reason.clone(),
                incarnation: entry.incarnation,
                serving: match &*entry.state.borrow() {
                    State::Serving(at) => Some(at.clone()),
                    State::Starting | State::Down(_) | State::Gone => None,
                },
            })
            .collect()
    }

    /// Keeps fresh stats, or answers the last known, marked stale.
    pub(crate) fn remember_stats(
        &self,
        placed: &Placed,
        fresh: Option<CommunicatorStats>,
    ) -> CommunicatorStats {
        let mut entries = self.entries();
        let entry = entries
            .iter_mut()
            .find(|(id, _)| id.as_str() == placed.name)
            .map(|(_, entry)| entry);
        match (fresh, entry) {
            (Some(stats), Some(entry)) => {
                entry.last_stats = Some(stats.clone());
                stats
            }
            (Some(stats), None) => stats,
            (None, entry) => {
                let last = entry.and_then(|entry| entry.last_stats.clone());
                let mut stats = last.unwrap_or_else(|| CommunicatorStats {
                    communicator: placed.name.clone(),
                    world_size: placed.world_size.get(),
                    backend: allreduce_contract::v1::Backend::from(placed.backend) as i32,
                    incarnation: placed.incarnation,
                    ..CommunicatorStats::default()
                });
                stats.stale = true;
                stats
            }
        }
    }

    // Draining.

    /// Opens nothing more, and tells every executor to drain.
    pub(crate) fn begin_drain(&self) {
        self.draining.send_replace(true);
    }

    /// Waits until no executor is left.
    pub(crate) async fn all_gone(&self) {
        let mut tasks = self.tasks.subscribe();
        // The sender lives as long as self.
        let _ = tasks.wait_for(|tasks| *tasks == 0).await;
    }

    /// Kills what is left, and waits for it.
    pub(crate) async fn kill_all(&self) {
        self.kill.send_replace(true);
        self.all_gone().await;
    }

    // The task of one communicator.

    fn set_state(&self, id: &CommunicatorId, state: State) {
        let serving = matches!(state, State::Serving(_));
        self.health.set(&format!("executor/{id}"), serving);
        if let Some(entry) = self.entries().get(id) {
            entry.state.send_replace(state);
        }
    }

    /// Keeps an executor of the communicator running until it is no longer wanted.
    async fn keep(self: Arc<Self>, id: CommunicatorId) {
        let mut pause = FIRST_PAUSE;
        let mut failed_starts = 0;
        let mut has_served = false;
        loop {
            self.set_state(&id, State::Starting);
            let reason = match self.start(&id).await {
                Ok(running) => {
                    has_served = true;
                    let since = Instant::now();
                    let ended = self.watch(&id, running).await;
                    if since.elapsed() > LONGEST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                    match ended {
                        Ok(()) => break,
                        Err(reason) => reason,
                    }
                }
                Err(error) => format!("it did not start: {error}"),
            };
            tracing::error!(communicator = %id, reason, "executor down");
            self.set_state(&id, State::Down(reason));
            failed_starts += 1;
            if !has_served && failed_starts >= MAX_FAILED_STARTS {
                // Nobody has ever joined it; who wants it opens it again, and its place is free meanwhile.
                break;
            }
            let drained = until_true(self.draining.subscribe());
            if tokio::time::timeout(pause, drained).await.is_ok() {
                break;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        if let Some(entry) = self.entries().remove(&id) {
            entry.state.send_replace(State::Gone);
        }
        self.health.remove(&format!("executor/{id}"));
        self.tasks.send_modify(|tasks| *tasks -= 1);
    }

    async fn start(&self, id: &CommunicatorId) -> io::Result<Running> {
        // A cleaner of temporary files may have taken it.
        ensure_executor_dir(&self.config.listen.path, self.access).map_err(io::Error::other)?;
        let socket = self
            .executor_dir
            .join(executor_name()?)
            .with_extension("sock");
        let token = crate::random::bytes()?;
        let identity = {
            let mut entries = self.entries();
            let entry = entries
                .get_mut(id)
                .ok_or_else(|| io::Error::other("the communicator is gone"))?;
            entry.incarnation += 1;
            Identity {
                communicator_name: id.to_string(),
                world_size: entry.world_size,
                backend: entry.backend.backend,
                backend_reason: entry.backend.reason.clone(),
                incarnation: entry.incarnation,
                token,
                socket: socket.clone(),
            }
        };
        let spec = ExecutorSpec::new(identity, &self.config, self.access, self.fault);
        // Not by its path: a package upgrade may have replaced the file there, and an executor must be
        // of the supervisor's own version.
        let mut child = Command::new("/proc/self/exe")
            .arg0(crate::cli::CHILD_NAME)
            .args(["executor", "--", id.as_str()])
            // Kernels loaded at their first launch would block behind whatever then runs.
            .env("CUDA_MODULE_LOADING", "EAGER")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A group of its own: Ctrl-C at the terminal is for the supervisor, which drains.
            .process_group(0)
            .spawn()?;
        let killed = until_true(self.kill.subscribe());
        let started = tokio::select! {
            started = tokio::time::timeout(START_TIMEOUT, handshake(&mut child, &spec)) => started,
            () = killed => Ok(Err(io::Error::other("told to end before it was ready"))),
        };
        let stdin = match started {
            Ok(Ok(stdin)) => stdin,
            Ok(Err(error)) => {
                let status = reap(&mut child, &socket).await;
                return Err(io::Error::other(format!("{error} ({status})")));
            }
            Err(_) => {
                let status = reap(&mut child, &socket).await;
                let limit = START_TIMEOUT.as_secs();
                return Err(io::Error::other(format!(
                    "not ready in {limit} s ({status})"
                )));
            }
        };
        let pid = child
            .id()
            .ok_or_else(|| io::Error::other("it exited as soon as it was ready"))?;
        Ok(Running {
            child,
            _stdin: stdin,
            at: ServingAt { socket, pid, token },
        })
    }

    /// Waits for the end of a running executor: Ok if it was meant to end.
    async fn watch(&self, id: &CommunicatorId, mut running: Running) -> Result<(), String> {
        let pid = running.at.pid;
        let socket = running.at.socket.clone();
        tracing::info!(communicator = %id, pid, socket = %socket.display(), "executor serving");
        self.set_state(id, State::Serving(running.at.clone()));
        let draining = self.draining.subscribe();
        let kill = self.kill.subscribe();
        let (mut drain, mut kill) = (pin!(until_true(draining)), pin!(until_true(kill)));
        let mut told = false;
        let status = loop {
            tokio::select! {
                status = running.child.wait() => break status,
                () = &mut drain, if !told => {
                    told = true;
                    terminate(pid);
                }
                () = &mut kill => {
                    reap(&mut running.child, &socket).await;
                    return Ok(());
                }
            }
        };
        remove_sockets(&socket);
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(describe(status)),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// An executor that has said "ready".
struct Running {
    child: Child,
    /// Open as long as the supervisor lives: its end tells the executor.
    _stdin: ChildStdin,
    at: ServingAt,
}

/// Sends the spec and waits for "ready"; answers the executor's standard input, to be kept open.
async fn handshake(child: &mut Child, spec: &ExecutorSpec) -> io::Result<ChildStdin> {
    let no_pipe = || io::Error::other("no pipe to the executor");
    let mut stdin = child.stdin.take().ok_or_else(no_pipe)?;
    let mut line = serde_json::to_vec(spec).map_err(io::Error::other)?;
    line.push(b'\n');
    stdin.write_all(&line).await?;
    let stdout = child.stdout.take().ok_or_else(no_pipe)?;
    let mut answer = String::new();
    BufReader::new(stdout).read_line(&mut answer).await?;
    if answer == "ready\n" {
        Ok(stdin)
    } else {
        Err(io::Error::other(
            "it exited before it was ready; its log says why",
        ))
    }
}

/// Kills an executor, waits for it, and removes its sockets.
async fn reap(child: &mut Child, socket: &Path) -> String {
    // It may have exited by itself.
    let _ = child.start_kill();
    let status = child.wait().await;
    remove_sockets(socket);
    status.map_or_else(|error| error.to_string(), describe)
}

fn remove_sockets(socket: &Path) {
    for path in [socket.to_owned(), socket.with_extension("fd")] {
        // An executor that exits by itself removes them.
        let _ = std::fs::remove_file(path);
    }
}

fn describe(status: ExitStatus) -> String {
    format!("the executor ended with {status}")
}

fn terminate(pid: u32) {
    if let Ok(pid) = i32::try_from(pid) {
        // It may have exited: then there is nobody to tell.
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid),
            nix::sys::signal::Signal::SIGTERM,
        );
    }
}

/// Waits until the value is true; its sender lives as long as the placement.
async fn until_true(mut value: watch::Receiver<bool>) {
    if value.wait_for(|value| *value).await.is_err() {
        std::future::pending::<()>().await;
    }
}
