//! The daemon, from a worker's side: finding executors and joining communicators.

use crate::attach::{Attachment, ExecutorAt, Gpu, Membership, Over};
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::cuda::Device;
use crate::error::{ConnectError, JoinError, Refused};
use allreduce_contract::companion::TOKEN_LEN;
use allreduce_contract::transport::{dial, error_chain};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::control_client::ControlClient;
use allreduce_contract::v1::{
    self, ErrorCode, Hello, ListClientsRequest, OpenRequest, OpenResponse,
};
use allreduce_contract::window::ABI_VERSION;
use allreduce_contract::{Backend, Lane};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;

/// First pause before dialling again; doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A year: longer timeouts mean "for ever", and would overflow a clock.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// Beyond the executor's own deadline for joining (120 s unless configured otherwise), so that its
/// answer, which names the missing ranks, comes first.
const JOIN_TIMEOUT: Duration = Duration::from_secs(150);

/// What a rank without a GPU is told about a communicator on backend cuda.
const HOW_TO_BRING_A_GPU: &str = if cfg!(feature = "cuda") {
    "name a GPU with JoinOptions::device, or ask for backend cuda"
} else {
    "build allreduce-client with feature `cuda`"
};

/// The socket of the node's daemon when none is named: `ALLREDUCED_SOCKET`, else where `serve` of the same
/// user listens ([`allreduce_contract::default_socket`]).
pub fn default_socket() -> PathBuf {
    std::env::var_os("ALLREDUCED_SOCKET")
        .map_or_else(allreduce_contract::default_socket, PathBuf::from)
}

/// How a rank joins.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    communicator: String,
    rank: u32,
    world_size: u32,
    backend: Option<Backend>,
    #[cfg(feature = "cuda")]
    device: Option<Device>,
    lanes: Vec<Lane>,
    arena_len_bytes: u64,
    client_name: String,
    timeout: Duration,
}

impl JoinOptions {
    /// Rank `rank` of `world_size` (1..=16) of a communicator; all ranks name the same one.
    pub fn new(communicator: impl Into<String>, rank: u32, world_size: u32) -> Self {
        let program = std::env::current_exe().ok().and_then(|path| {
            let name = path.file_name()?;
            Some(name.to_string_lossy().into_owned())
        });
        Self {
            communicator: communicator.into(),
            rank,
            world_size,
            backend: None,
            #[cfg(feature = "cuda")]
            device: None,
            lanes: Vec::new(),
            arena_len_bytes: 0,
            client_name: program.unwrap_or_default(),
            timeout: JOIN_TIMEOUT,
        }
    }

    /// Asks for a backend instead of letting the daemon choose. Backend cuda without a
    #[cfg_attr(feature = "cuda", doc = "[device](Self::device)")]
    #[cfg_attr(not(feature = "cuda"), doc = "device (this needs feature `cuda`)")]
    /// takes that of the context which is current in the calling thread, or else the first.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Brings a GPU: the daemon chooses backend cuda if it can, unless one is asked for. A rank that names
    /// neither a device nor a backend stays on backend host.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// The GPU that the rank brings, if the communicator turns out to be on backend cuda.
    fn gpu(&self) -> Result<Option<Gpu>, JoinError> {
        #[cfg(feature = "cuda")]
        match (self.backend, &self.device) {
            (Some(Backend::Host), _) | (None, None) => Ok(None),
            (Some(Backend::Cuda) | None, Some(device)) => Ok(Some(device.clone())),
            (Some(Backend::Cuda), None) => Ok(Some(crate::cuda::default_device()?)),
        }
        #[cfg(not(feature = "cuda"))]
        Ok(None)
    }

    /// Lanes this rank can use, best first, instead of letting the executor choose.
    #[must_use]
    pub fn lanes(mut self, lanes: impl Into<Vec<Lane>>) -> Self {
        self.lanes = lanes.into();
        self
    }

    /// Bytes of memory for this rank's buffers; 0 (the default) takes the daemon's default.
    #[must_use]
    pub fn arena_len_bytes(mut self, len_bytes: u64) -> Self {
        self.arena_len_bytes = len_bytes;
        self
    }

    /// A name to show in `allreduced status`; the program's by default.
    #[must_use]
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = name.into();
        self
    }

    /// How long to wait for the daemon and for the other ranks; 150 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

/// The node's daemon. Holds a path, not a connection: each join dials anew, so that it outlives restarts
/// of the daemon.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Looks whether a daemon answers on `socket`.
    ///
    /// # Errors
    /// [`ConnectError`] if none does.
    pub async fn connect(socket: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let socket = socket.as_ref().to_owned();
        match dial(&socket).await {
            Ok(_) => Ok(Self { socket }),
            Err(error) => Err(ConnectError {
                reason: error_chain(&error),
                socket,
            }),
        }
    }

    /// Joins a communicator, and waits until every rank has. Dials the daemon and the executor again as
    /// long as they are not to be reached, until the timeout.
    ///
    /// # Errors
    /// [`JoinError`]; a refusal is final, and says why.
    pub async fn join(&self, options: JoinOptions) -> Result<Communicator, JoinError> {
        // Before anything is awaited: it looks at the calling thread's context.
        let gpu = options.gpu()?;
        let deadline = Instant::now() + options.timeout.min(LONGEST_WAIT);
        let mut pause = FIRST_PAUSE;
        loop {
            let again = match self.try_join(&options, gpu.as_ref(), deadline).await {
                Ok(communicator) => return Ok(communicator),
                Err(Attempt::Final(error)) => return Err(error),
                Err(Attempt::Again(reason)) => reason,
            };
            if Instant::now() + pause >= deadline {
                return Err(JoinError::Connect(ConnectError {
                    socket: self.socket.clone(),
                    reason: again,
                }));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn open(&self, options: &JoinOptions, has_cuda: bool) -> Result<OpenResponse, Attempt> {
        let channel = dial(&self.socket)
            .await
            .map_err(|error| Attempt::Again(error_chain(&error)))?;
        let request = OpenRequest {
            communicator: options.communicator.clone(),
            world_size: options.world_size,
            backend: options
                .backend
                .map_or(0, |backend| v1::Backend::from(backend) as i32),
            has_cuda,
        };
        match ControlClient::new(channel).open(request).await {
            Ok(response) => Ok(response.into_inner()),
            Err(status) => Err(Attempt::of(Refused::new(&status))),
        }
    }

    async fn try_join(
        &self,
        options: &JoinOptions,
        gpu: Option<&Gpu>,
        deadline: Instant,
    ) -> Result<Communicator, Attempt> {
        let opening = self.open(options, gpu.is_some());
        let opened = match tokio::time::timeout_at(deadline, opening).await {
            Ok(opened) => opened?,
            Err(_) => return Err(Attempt::Again("the daemon does not answer Open".to_owned())),
        };
        let gpu = match (opened.backend(), gpu) {
            (v1::Backend::Cuda, Some(gpu)) => Some(gpu.clone()),
            (v1::Backend::Cuda, None) => {
                return Err(Attempt::Final(JoinError::NoGpu(HOW_TO_BRING_A_GPU)));
            }
            (v1::Backend::Host | v1::Backend::Unspecified, _) => None,
        };
        let (device_uuid, has_mps) = match &gpu {
            #[cfg(feature = "cuda")]
            Some(gpu) => (gpu.uuid().to_owned(), gpu.has_mps()),
            #[cfg(not(feature = "cuda"))]
            Some(gpu) => match *gpu {},
            None => (String::new(), false),
        };
        let token = <[u8; TOKEN_LEN]>::try_from(opened.token.as_slice()).map_err(|_| {
            Attempt::Again("the daemon answered a token of another length".to_owned())
        })?;
        let at = ExecutorAt {
            communicator: format!("{}\n{}", self.socket.display(), options.communicator),
            socket: opened.executor_socket.into(),
            companion: opened.companion_socket.into(),
            token,
        };
        let hello = Hello {
            token: opened.token,
            rank: options.rank,
            world_size: options.world_size,
            abi: ABI_VERSION,
            device_uuid,
            lanes: options
                .lanes
                .iter()
                .map(|lane| v1::Lane::from(*lane) as i32)
                .collect(),
            arena_len_bytes: options.arena_len_bytes,
            pid: std::process::id(),
            client_name: options.client_name.clone(),
            has_mps,
        };
        let attachment = Attachment::start(at.clone(), hello, gpu)
            .map_err(|error| Attempt::Final(JoinError::Thread(error)))?;
        let mut membership = attachment.membership.clone();
        let settled = membership.wait_for(|state| match state {
            Membership::Ready(..) | Membership::Over(_) => true,
            Membership::Joining | Membership::Joined => false,
        });
        let settled = match tokio::time::timeout_at(deadline, settled).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) => return Err(Attempt::Again("the client's thread ended".to_owned())),
            Err(_) => {
                return Err(Attempt::Final(JoinError::Timeout {
                    missing_ranks: missing_ranks(&at.socket, options.world_size).await,
                    message: format!(
                        "rank {} waited {} ms",
                        options.rank,
                        options.timeout.as_millis()
                    ),
                }));
            }
        };
        let (window, ready) = match settled {
            Membership::Ready(window, ready) => (window, ready),
            Membership::Over(over) => return Err(Attempt::from(over)),
            Membership::Joining | Membership::Joined => {
                return Err(Attempt::Again("not settled".to_owned()));
            }
        };
        let channel = dial(&at.socket)
            .await
            .map_err(|error| Attempt::Again(error_chain(&error)))?;
        let unknown = |error: v1::BadEnum| Attempt::Final(JoinError::Window(error.to_string()));
        let lane = Lane::from_wire(ready.lane).map_err(unknown)?;
        let backend = Backend::from_wire(ready.backend).map_err(unknown)?;
        let mapped = window.arena.backend();
        if backend != mapped {
            return Err(Attempt::Final(JoinError::Window(format!(
                "Open said backend {}, Ready says backend {}",
                mapped.name(),
                backend.name()
            ))));
        }
        Ok(Communicator::new(
            attachment,
            at,
            channel,
            window,
            (options.rank, options.world_size),
            (lane, &ready),
        ))
    }
}

/// The ranks that have not joined, by the executor's own account; none if it does not say at once.
async fn missing_ranks(executor: &Path, world_size: u32) -> Vec<u32> {
    let asked = async {
        let mut admin = AdminClient::new(dial(executor).await.ok()?);
        let list = admin
            .list_clients(ListClientsRequest::default())
            .await
            .ok()?;
        Some(list.into_inner().clients)
    };
    let Ok(Some(clients)) = tokio::time::timeout(LONGEST_PAUSE, asked).await else {
        return Vec::new();
    };
    let has_joined = |rank: &u32| {
        let mut joined = clients.iter().filter(|client| !client.ended);
        joined.any(|client| client.rank == *rank)
    };
    (0..world_size).filter(|rank| !has_joined(rank)).collect()
}

/// How an attempt to join ended badly.
enum Attempt {
    Final(JoinError),
    Again(String),
}

impl Attempt {
    fn of(refused: Refused) -> Self {
        if refused.is_transient() || refused.is_transport() {
            Self::Again(refused.message)
        } else if refused.kind == ErrorCode::Timeout {
            Self::Final(JoinError::Timeout {
                missing_ranks: refused.detail.missing_ranks,
                message: refused.message,
            })
        } else {
            Self::Final(JoinError::Refused(refused))
        }
    }
}

impl From<Over> for Attempt {
    fn from(over: Over) -> Self {
        match over {
            Over::Refused(refused) => Self::of(refused),
            Over::Ended(end) => Self::Final(JoinError::EpochEnded(end)),
            Over::Lost(reason) => Self::Again(reason),
            Over::Window(reason) => Self::Final(JoinError::Window(reason)),
            #[cfg(feature = "cuda")]
            Over::Cuda(error) => Self::Final(JoinError::Cuda(error.into())),
            Over::Left => Self::Again("left".to_owned()),
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    #![allow(clippy::panic)]
    use super::*;

    #[test]
    fn a_rank_that_names_no_gpu_stays_on_the_host() {
        let options = JoinOptions::new("c", 0, 2);
        assert!(matches!(options.gpu(), Ok(None)));
        assert!(matches!(options.backend(Backend::Host).gpu(), Ok(None)));
    }

    #[test]
    fn who_asks_for_cuda_gets_a_gpu_or_hears_why_not() {
        let options = JoinOptions::new("c", 0, 2).backend(Backend::Cuda);
        match (crate::cuda::devices(), options.gpu()) {
            (Ok(devices), Ok(gpu)) => assert_eq!(gpu.as_ref(), devices.first()),
            (Err(expected), Err(JoinError::Cuda(error))) => assert_eq!(error, expected),
            (devices, gpu) => panic!("{devices:?}, {gpu:?}"),
        }
    }
}
