//! Ranks that speak plain gRPC, for what the client crate would refuse or never do.
//!
//! Owns no process. The arena is read and written through its descriptor, so nothing is mapped here.
//! Raw ranks send no heartbeats: their daemon is configured with a long heartbeat timeout.

use allreduce_contract::companion::{CompanionError, Kind, Reply, Request, TOKEN_LEN};
use allreduce_contract::status::detail_of;
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::attach_request::Message as FromRank;
use allreduce_contract::v1::attach_response::Message as ToRank;
use allreduce_contract::v1::buffers_client::BuffersClient;
use allreduce_contract::v1::collectives_client::CollectivesClient;
use allreduce_contract::v1::communicator_client::CommunicatorClient;
use allreduce_contract::v1::control_client::ControlClient;
use allreduce_contract::v1::{
    AllReduceRequest, AllReduceResponse, AllocateRequest, AttachRequest, AttachResponse,
    BufferRange, CommunicatorInfo, Dtype, ErrorCode, ErrorDetail, Hello, Joined,
    ListCommunicatorsRequest, Op, OpenRequest, OpenResponse, Ready,
};
use allreduce_contract::window::ABI_VERSION;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

/// So long that raw ranks need no heartbeats.
pub const NO_HEARTBEATS: (&str, &str) = ("ALLREDUCED_COMMUNICATOR__HEARTBEAT_TIMEOUT_MS", "600000");

pub async fn dial(socket: impl AsRef<Path>) -> Channel {
    Endpoint::from_shared(format!("unix://{}", socket.as_ref().display()))
        .unwrap()
        .timeout(Duration::from_secs(30))
        .connect()
        .await
        .unwrap()
}

pub fn block_on<R>(future: impl Future<Output = R>) -> R {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// The open communicator of this name, as the supervisor sees it.
pub async fn info_of(socket: &Path, communicator: &str) -> Option<CommunicatorInfo> {
    let list = AdminClient::new(dial(socket).await)
        .list_communicators(ListCommunicatorsRequest {})
        .await
        .unwrap()
        .into_inner();
    list.communicators
        .into_iter()
        .find(|info| info.communicator == communicator)
}

/// [`info_of`], from outside a runtime.
pub fn info(socket: &Path, communicator: &str) -> Option<CommunicatorInfo> {
    block_on(info_of(socket, communicator))
}

/// The process of a communicator's executor.
pub async fn executor_pid_of(socket: &Path, communicator: &str) -> u32 {
    let info = info_of(socket, communicator).await;
    let pid = info.expect("the communicator is open").executor_pid;
    assert_ne!(pid, 0);
    pid
}

/// [`executor_pid_of`], from outside a runtime.
pub fn executor_pid(socket: &Path, communicator: &str) -> u32 {
    block_on(executor_pid_of(socket, communicator))
}

pub async fn try_open(
    socket: &Path,
    communicator: &str,
    world_size: u32,
    backend: i32,
) -> Result<OpenResponse, Status> {
    let request = OpenRequest {
        communicator: communicator.to_owned(),
        world_size,
        backend,
        has_cuda: false,
    };
    ControlClient::new(dial(socket).await)
        .open(request)
        .await
        .map(tonic::Response::into_inner)
}

pub async fn open(socket: &Path, communicator: &str, world_size: u32) -> OpenResponse {
    try_open(socket, communicator, world_size, 0).await.unwrap()
}

pub fn hello(opened: &OpenResponse, rank: u32, world_size: u32) -> Hello {
    Hello {
        token: opened.token.clone(),
        rank,
        world_size,
        abi: ABI_VERSION,
        device_uuid: String::new(),
        lanes: vec![allreduce_contract::v1::Lane::Rpc as i32],
        arena_len_bytes: 64 << 10,
        pid: std::process::id(),
        client_name: "raw".to_owned(),
        has_mps: false,
    }
}

/// A stream of membership: what is sent, and what comes back.
pub struct Stream {
    pub to: mpsc::UnboundedSender<AttachRequest>,
    pub from: Streaming<AttachResponse>,
}

impl Stream {
    pub fn send(&self, message: FromRank) {
        let message = Some(message);
        self.to.send(AttachRequest { message }).unwrap();
    }

    /// The next message, whatever it is; none at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<ToRank>, Status> {
        let next = tokio::time::timeout(super::SOON, self.from.message());
        let message = next.await.expect("no message on Attach in time")?;
        Ok(message.and_then(|response| response.message))
    }
}

/// Opens Attach with a first message.
pub async fn attach_with(opened: &OpenResponse, first: FromRank) -> Result<Stream, Status> {
    let (to, messages) = mpsc::unbounded_channel();
    let message = Some(first);
    to.send(AttachRequest { message }).unwrap();
    let from = CommunicatorClient::new(dial(&opened.executor_socket).await)
        .attach(UnboundedReceiverStream::new(messages))
        .await?
        .into_inner();
    Ok(Stream { to, from })
}

/// The refusal of a Hello.
pub async fn refused_hello(opened: &OpenResponse, hello: Hello) -> Status {
    match attach_with(opened, FromRank::Hello(hello)).await {
        Err(status) => status,
        Ok(_) => panic!("was taken in"),
    }
}

/// A good call: 8 i32, in place at the start of the buffer.
pub fn call(joined: &Joined, sequence: u64, buffer_id: u64) -> AllReduceRequest {
    let range = Some(BufferRange {
        buffer_id,
        offset_bytes: 0,
    });
    AllReduceRequest {
        session: joined.session,
        epoch: joined.epoch,
        sequence,
        src: range,
        dst: range,
        num_elems: 8,
        dtype: Dtype::I32 as i32,
        op: Op::Sum as i32,
        timeout_ms: 15_000,
        event: None,
        algorithm: 0,
    }
}

/// A joined rank.
pub struct RawRank {
    pub opened: OpenResponse,
    pub rank: u32,
    pub world_size: u32,
    pub joined: Joined,
    pub stream: Stream,
    pub collectives: CollectivesClient<Channel>,
    pub buffers: BuffersClient<Channel>,
    pub arena: File,
    /// 4096 bytes of the arena.
    pub buffer_id: u64,
    pub offset_bytes: u64,
    pub sequence: u64,
}

impl RawRank {
    /// Joins and allocates; Ready is still to come.
    pub async fn join(opened: &OpenResponse, rank: u32, world_size: u32) -> Self {
        Self::join_as(opened, hello(opened, rank, world_size)).await
    }

    /// Joins with this Hello.
    pub async fn join_as(opened: &OpenResponse, hello: Hello) -> Self {
        let (rank, world_size) = (hello.rank, hello.world_size);
        let mut stream = attach_with(opened, FromRank::Hello(hello)).await.unwrap();
        let Ok(Some(ToRank::Joined(joined))) = stream.next().await else {
            panic!("the first message is not Joined");
        };
        let channel = dial(&opened.executor_socket).await;
        let mut buffers = BuffersClient::new(channel.clone());
        let request = AllocateRequest {
            session: joined.session,
            len_bytes: 4096,
        };
        let allocated = buffers.allocate(request).await.unwrap().into_inner();
        let request = companion_request(opened, Kind::Arena, joined.session, rank);
        let (_, arena) = exchange(opened, &request, None).unwrap();
        Self {
            opened: opened.clone(),
            rank,
            world_size,
            joined,
            stream,
            collectives: CollectivesClient::new(channel),
            buffers,
            arena: arena.expect("a descriptor").into(),
            buffer_id: allocated.buffer_id,
            offset_bytes: allocated.offset_bytes,
            sequence: 0,
        }
    }

    /// Waits until every rank has joined.
    pub async fn ready(&mut self) -> Ready {
        match self.stream.next().await {
            Ok(Some(ToRank::Ready(ready))) => ready,
            other => panic!("not Ready: {other:?}"),
        }
    }

    /// A good call with the next sequence number: 8 i32 in place.
    pub fn call(&mut self) -> AllReduceRequest {
        self.sequence += 1;
        call(&self.joined, self.sequence, self.buffer_id)
    }

    pub async fn all_reduce(&self, request: AllReduceRequest) -> Result<AllReduceResponse, Status> {
        let mut collectives = self.collectives.clone();
        collectives
            .all_reduce(request)
            .await
            .map(tonic::Response::into_inner)
    }

    fn fill(&self) {
        let value = i32::try_from(self.rank).unwrap() + 1;
        let bytes: Vec<u8> = (0..8).flat_map(|_| value.to_ne_bytes()).collect();
        self.arena.write_all_at(&bytes, self.offset_bytes).unwrap();
    }

    fn check(&self) {
        let mut bytes = [0; 32];
        let at = self.offset_bytes;
        self.arena.read_exact_at(&mut bytes, at).unwrap();
        let ranks = i32::try_from(self.world_size).unwrap();
        let sum = ranks * (ranks + 1) / 2;
        for element in bytes.chunks_exact(4) {
            assert_eq!(element, sum.to_ne_bytes());
        }
    }
}

/// Joins every rank of a fresh communicator.
pub async fn join_all(socket: &Path, communicator: &str, world_size: u32) -> Vec<RawRank> {
    let opened = open(socket, communicator, world_size).await;
    let mut ranks = Vec::new();
    for rank in 0..world_size {
        ranks.push(RawRank::join(&opened, rank, world_size).await);
    }
    for rank in &mut ranks {
        rank.ready().await;
    }
    ranks
}

/// What each rank's call answers, all made at the same time.
pub async fn call_all(
    ranks: &[RawRank],
    requests: Vec<AllReduceRequest>,
) -> Vec<Result<AllReduceResponse, Status>> {
    let tasks: Vec<_> = ranks
        .iter()
        .zip(requests)
        .map(|(rank, request)| {
            let mut collectives = rank.collectives.clone();
            tokio::spawn(async move { collectives.all_reduce(request).await })
        })
        .collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap().map(tonic::Response::into_inner));
    }
    answers
}

/// A good reduction, its sum checked in every rank's memory.
pub async fn reduce_well(ranks: &mut [RawRank]) {
    let mut requests = Vec::new();
    for rank in &mut *ranks {
        rank.fill();
        requests.push(rank.call());
    }
    for answer in call_all(ranks, requests).await {
        answer.unwrap();
    }
    for rank in &*ranks {
        rank.check();
    }
}

/// Checks a refusal: its gRPC code, its kind, and that its words say what is wrong.
pub fn refused(status: &Status, code: Code, kind: ErrorCode, words: &[&str]) -> ErrorDetail {
    assert_eq!(status.code(), code, "{status:?}");
    let detail = detail_of(status).unwrap_or_else(|| panic!("no ErrorDetail: {status:?}"));
    assert_eq!(detail.code(), kind, "{status:?}");
    for word in words {
        assert!(status.message().contains(word), "no {word:?} in {status:?}");
    }
    detail
}

pub fn token_of(opened: &OpenResponse) -> [u8; TOKEN_LEN] {
    opened.token.as_slice().try_into().unwrap()
}

pub fn companion_request(opened: &OpenResponse, kind: Kind, session: u64, rank: u32) -> Request {
    Request {
        kind,
        token: token_of(opened),
        session,
        rank,
        peer: rank,
        len_bytes: 0,
    }
}

/// A connection to the companion socket, with deadlines.
pub fn companion(opened: &OpenResponse) -> OwnedFd {
    let socket = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .unwrap();
    let limit = TimeVal::seconds(10);
    setsockopt(&socket, sockopt::ReceiveTimeout, &limit).unwrap();
    setsockopt(&socket, sockopt::SendTimeout, &limit).unwrap();
    let address = UnixAddr::new(opened.companion_socket.as_str()).unwrap();
    connect(socket.as_raw_fd(), &address).unwrap();
    socket
}

/// One exchange on the companion socket.
pub fn exchange(
    opened: &OpenResponse,
    request: &Request,
    memory: Option<BorrowedFd<'_>>,
) -> Result<(Reply, Option<OwnedFd>), CompanionError> {
    let socket = companion(opened);
    request.send(socket.as_fd(), memory)?;
    Reply::receive(socket.as_fd())
}
