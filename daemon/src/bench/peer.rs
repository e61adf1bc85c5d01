//! One process of the bench: a rank, a bare echo server, or a client of one.
//!
//! Owns the timed loops. A rank interleaves its reductions with pings and echoes, round by round, so
//! that all three meet the same weather.

use crate::bench::graph::{self, GraphReport, GraphSpec};
use crate::device::{self, DeviceError, DeviceTensor, WorkerStream};
use crate::spread::Spread;
use crate::wire::{print_line, read_line};
use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::{
    AllReduceError, AllReduceOptions, Buffer, BufferError, ConnectError, Element, JoinError,
    JoinOptions, Reduction, Refused, bf16, f16,
};
use allreduce_contract::cuda::CudaError;
use allreduce_contract::v1::collectives_client::CollectivesClient;
use allreduce_contract::v1::collectives_server::{Collectives, CollectivesServer};
use allreduce_contract::v1::{
    AllReduceRequest, AllReduceResponse, ArmRequest, ArmResponse, DisarmRequest, DisarmResponse,
    PingRequest, PingResponse, PlanRequest, PlanResponse,
};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, UnknownName};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

/// Rounds of a case: reductions, pings, echoes, in turn.
const ROUNDS: usize = 10;
/// Null calls of each kind in a round.
const NULLS: usize = 100;
/// Bytes that a round of reductions may move, all ranks together.
const ROUND_BYTES: usize = 256 << 20;
/// Round trips of an echo client.
const ECHOES: usize = 3000;

/// What a process of the bench is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum PeerSpec {
    Rank(RankSpec),
    Echo { socket: PathBuf, multi_thread: bool },
    EchoClient { socket: PathBuf, multi_thread: bool },
    Graph(GraphSpec),
    Timed(TimedSpec),
}

/// A rank that times steps, beside another program that does the same.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TimedSpec {
    pub(crate) socket: PathBuf,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) lane: String,
    pub(crate) dtype: String,
    pub(crate) cases: Vec<StepCase>,
}

/// What is reduced in a step, one after the other, and how many steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StepCase {
    pub(crate) bytes: Vec<usize>,
    pub(crate) steps: usize,
}

/// How long a step took.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StepReport {
    pub(crate) algorithm: String,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// A rank of the bench.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankSpec {
    pub(crate) socket: PathBuf,
    pub(crate) echo_socket: PathBuf,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) backend: String,
    pub(crate) lane: Option<String>,
    pub(crate) algorithm: Option<String>,
    /// dtype, op, elements.
    pub(crate) cases: Vec<(String, String, usize)>,
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum PeerReport {
    /// The echo server listens; or a rank is through with a case.
    Listening,
    Echoed(Vec<f64>),
    Cases(Vec<CaseReport>),
    Graphs(Vec<GraphReport>),
    Timed(Vec<StepReport>),
}

/// Samples of one case, microseconds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CaseReport {
    pub(crate) algorithm: String,
    /// From the call to the result.
    pub(crate) reduce_us: Vec<f64>,
    /// The executor's own time for it: reducing, or enqueueing on a GPU.
    pub(crate) executor_us: Vec<f64>,
    pub(crate) ping_us: Vec<f64>,
    pub(crate) echo_us: Vec<f64>,
}

impl CaseReport {
    /// Adds another rank's samples.
    pub(crate) fn merge(&mut self, other: Self) {
        self.reduce_us.extend(other.reduce_us);
        self.executor_us.extend(other.executor_us);
        self.ping_us.extend(other.ping_us);
        self.echo_us.extend(other.echo_us);
    }
}

/// Why a peer gives up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Name(#[from] UnknownName),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error(transparent)]
    Buffer(#[from] BufferError),
    #[error(transparent)]
    AllReduce(#[from] AllReduceError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Ping(#[from] Refused),
    #[error("--gap-us needs kernels in the build: build where nvcc is")]
    NoImage,
    #[error("rank {rank}: {reason}")]
    Wrong { rank: u32, reason: String },
    #[error("echo: {0}")]
    Echo(#[from] Box<Status>),
    #[error("echo: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// Runs a process of the bench.
pub(crate) fn run() -> Result<(), PeerError> {
    match read_line()? {
        PeerSpec::Rank(spec) => run_rank(&spec),
        PeerSpec::Graph(spec) => graph::run_rank(&spec),
        PeerSpec::Echo {
            socket,
            multi_thread,
        } => run_echo(&socket, multi_thread),
        PeerSpec::EchoClient {
            socket,
            multi_thread,
        } => {
            let mut echo = EchoClient::dial(&socket, multi_thread)?;
            echo.time(200)?;
            let samples = echo.time(ECHOES)?;
            Ok(print_line(&PeerReport::Echoed(samples))?)
        }
        PeerSpec::Timed(spec) => run_timed(&spec),
    }
}

fn runtime(multi_thread: bool) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = if multi_thread {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    builder.enable_all().build()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// A client of the bare server.
struct EchoClient {
    client: CollectivesClient<Channel>,
    runtime: tokio::runtime::Runtime,
}

impl EchoClient {
    fn dial(socket: &Path, multi_thread: bool) -> Result<Self, PeerError> {
        let runtime = runtime(multi_thread)?;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        let channel = runtime.block_on(endpoint.connect())?;
        Ok(Self {
            client: CollectivesClient::new(channel),
            runtime,
        })
    }

    fn time(&mut self, count: usize) -> Result<Vec<f64>, PeerError> {
        let client = &mut self.client;
        self.runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                client.ping(PingRequest {}).await.map_err(Box::new)?;
                samples.push(micros(start.elapsed()));
            }
            Ok(samples)
        })
    }
}

/// A tonic server with one method that does nothing, and nothing else.
struct Bare;

#[tonic::async_trait]
impl Collectives for Bare {
    async fn all_reduce(
        &self,
        _request: Request<AllReduceRequest>,
    ) -> Result<Response<AllReduceResponse>, Status> {
        Err(Status::unimplemented("this is the bench's echo server"))
    }

    async fn plan(&self, _request: Request<PlanRequest>) -> Result<Response<PlanResponse>, Status> {
        Err(Status::unimplemented("this is the bench's echo server"))
    }

    async fn arm(&self, _request: Request<ArmRequest>) -> Result<Response<ArmResponse>, Status> {
        Err(Status::unimplemented("this is the bench's echo server"))
    }

    async fn disarm(
        &self,
        _request: Request<DisarmRequest>,
    ) -> Result<Response<DisarmResponse>, Status> {
        Err(Status::unimplemented("this is the bench's echo server"))
    }

    async fn ping(&self, _request: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
        Ok(Response::new(PingResponse {}))
    }
}

/// Serves until standard input ends.
fn run_echo(socket: &Path, multi_thread: bool) -> Result<(), PeerError> {
    let runtime = runtime(multi_thread)?;
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::bind(socket)?;
        print_line(&PeerReport::Listening)?;
        let server = Server::builder()
            .add_service(CollectivesServer::new(Bare))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let parent_gone = tokio::task::spawn_blocking(|| {
            let mut ignored = Vec::new();
            std::io::stdin().read_to_end(&mut ignored)
        });
        tokio::select! {
            served = server => Ok(served?),
            _ = parent_gone => Ok(()),
        }
    })
}

fn run_rank(spec: &RankSpec) -> Result<(), PeerError> {
    let mut echo = EchoClient::dial(&spec.echo_socket, false)?;
    let mut cases = Vec::new();
    for (dtype, op, num_elems) in &spec.cases {
        cases.push((dtype.parse::<Dtype>()?, op.parse::<Op>()?, *num_elems));
    }
    let largest = cases
        .iter()
        .map(|(dtype, _, num_elems)| dtype.size_bytes() * num_elems)
        .max();
    let backend: Backend = spec.backend.parse()?;
    let algorithm: Option<Algorithm> = spec
        .algorithm
        .as_ref()
        .map(|algorithm| algorithm.parse())
        .transpose()?;
    let mut options = JoinOptions::new("bench", spec.rank, spec.world_size)
        .backend(backend)
        .arena_len_bytes(largest.unwrap_or(0) as u64 + (1 << 16))
        .client_name(format!("bench-{}", spec.rank));
    if let Some(lane) = &spec.lane {
        options = options.lanes([lane.parse::<Lane>()?]);
    }
    let device = device::of_rank(Some(backend), spec.rank)?;
    if let Some(device) = &device {
        options = options.device(device.clone());
    }
    let communicator = Client::connect(&spec.socket)?.join(options)?;
    let stream = device.map(WorkerStream::on).transpose()?;
    let mut reports = Vec::new();
    for (dtype, op, num_elems) in cases {
        let mut case = Case {
            communicator: &communicator,
            stream: stream.as_ref(),
            algorithm,
            echo: &mut echo,
            op,
            num_elems,
            world_size: spec.world_size as usize,
        };
        reports.push(match dtype {
            Dtype::F32 => case.run::<f32>()?,
            Dtype::F64 => case.run::<f64>()?,
            Dtype::F16 => case.run::<f16>()?,
            Dtype::Bf16 => case.run::<bf16>()?,
            Dtype::I32 => case.run::<i32>()?,
            Dtype::I64 => case.run::<i64>()?,
        });
        print_line(&PeerReport::Listening)?;
    }
    print_line(&PeerReport::Cases(reports))?;
    // Until the parent has looked at the memory: it kills its children when it is through.
    let mut ignored = Vec::new();
    std::io::stdin().read_to_end(&mut ignored)?;
    Ok(())
}

fn run_timed(spec: &TimedSpec) -> Result<(), PeerError> {
    let lengths = spec.cases.iter().flat_map(|case| &case.bytes);
    let longest = lengths.max().copied().unwrap_or(0);
    let lane: Lane = spec.lane.parse()?;
    let options = JoinOptions::new("bench", spec.rank, spec.world_size)
        .backend(Backend::Host)
        .lanes([lane])
        .arena_len_bytes(2 * longest as u64 + (1 << 16))
        .client_name(format!("bench-{}", spec.rank));
    let communicator = Client::connect(&spec.socket)?.join(options)?;
    let reports = match spec.dtype.parse::<Dtype>()? {
        Dtype::F32 => time_cases::<f32>(&communicator, &spec.cases, longest),
        Dtype::F64 => time_cases::<f64>(&communicator, &spec.cases, longest),
        Dtype::F16 => time_cases::<f16>(&communicator, &spec.cases, longest),
        Dtype::Bf16 => time_cases::<bf16>(&communicator, &spec.cases, longest),
        Dtype::I32 => time_cases::<i32>(&communicator, &spec.cases, longest),
        Dtype::I64 => time_cases::<i64>(&communicator, &spec.cases, longest),
    };
    print_line(&PeerReport::Timed(reports?))?;
    // Until the parent has heard every rank: leaving ends the epoch.
    let mut ignored = Vec::new();
    std::io::stdin().read_to_end(&mut ignored)?;
    Ok(())
}

fn time_cases<T: Element>(
    communicator: &Communicator,
    cases: &[StepCase],
    longest: usize,
) -> Result<Vec<StepReport>, PeerError> {
    let mut src = communicator.allocate::<T>(longest / size_of::<T>())?;
    let mut dst = communicator.allocate::<T>(longest / size_of::<T>())?;
    let mut reports = Vec::new();
    for case in cases {
        let report;
        (src, dst, report) = time_steps(communicator, case, src, dst)?;
        reports.push(report);
        print_line(&PeerReport::Listening)?;
    }
    Ok(reports)
}

/// Times steps as mpi_peer.c does: a tenth more first, then a barrier, then one after the other.
fn time_steps<T: Element>(
    communicator: &Communicator,
    case: &StepCase,
    mut src: Buffer<T>,
    mut dst: Buffer<T>,
) -> Result<(Buffer<T>, Buffer<T>, StepReport), PeerError> {
    let mut algorithm = String::new();
    let mut samples = Vec::with_capacity(case.steps);
    let warm_up = case.steps / 10 + 2;
    for step in 0..warm_up + case.steps {
        if step == warm_up {
            let empty = communicator.allocate::<T>(0)?;
            communicator
                .all_reduce(empty, Op::Sum)
                .map_err(AllReduceError::from)?;
        }
        let start = Instant::now();
        let mut used = None;
        for bytes in &case.bytes {
            let options = AllReduceOptions::prefix(bytes / size_of::<T>());
            let reduced = communicator.all_reduce_into(src, dst, Op::Sum, options);
            let (buffers, reduction) = reduced.map_err(AllReduceError::from)?;
            (src, dst) = buffers;
            used = Some(reduction.algorithm);
        }
        if step >= warm_up {
            samples.push(micros(start.elapsed()));
        }
        if let Some(used) = used.filter(|_| algorithm.is_empty()) {
            algorithm = used.to_string();
        }
    }
    let spread = Spread::of(&mut samples);
    let report = StepReport {
        algorithm,
        p50_us: spread.p50,
        p99_us: spread.p99,
    };
    Ok((src, dst, report))
}

struct Case<'a> {
    communicator: &'a Communicator,
    /// On backend cuda.
    stream: Option<&'a WorkerStream>,
    algorithm: Option<Algorithm>,
    echo: &'a mut EchoClient,
    op: Op,
    num_elems: usize,
    world_size: usize,
}

/// What a case reduces.
enum Tensor<T: Element> {
    Host(Buffer<T>),
    Device(DeviceTensor<T>),
}

impl Case<'_> {
    fn allocate<T: Element>(&self, num_elems: usize) -> Result<Tensor<T>, PeerError> {
        Ok(match self.stream {
            None => Tensor::Host(self.communicator.allocate(num_elems)?),
            Some(_) => Tensor::Device(DeviceTensor::allocate(self.communicator, num_elems)?),
        })
    }

    /// Reduces in place, and waits until the result is there.
    fn reduce<T: Element>(
        &self,
        tensor: Tensor<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Result<(Tensor<T>, Reduction), PeerError> {
        match (tensor, self.stream) {
            (Tensor::Device(tensor), Some(stream)) => {
                let reduction = tensor.reduce(self.communicator, stream, op, options)?;
                stream.synchronize()?;
                Ok((Tensor::Device(tensor), reduction))
            }
            (Tensor::Device(_), None) => Err(DeviceError::Unavailable(
                allreduce_contract::cuda::Unavailable::NoDevice,
            )
            .into()),
            (Tensor::Host(buffer), _) => {
                let reduced = self.communicator.all_reduce_with(buffer, op, options);
                let (buffer, reduction) = reduced.map_err(AllReduceError::from)?;
                Ok((Tensor::Host(buffer), reduction))
            }
        }
    }

    fn barrier(&self) -> Result<(), PeerError> {
        let empty = self.allocate::<f32>(0)?;
        self.reduce(empty, Op::Sum, AllReduceOptions::default())?;
        Ok(())
    }

    fn run<T: Element>(&mut self) -> Result<CaseReport, PeerError> {
        let bytes = self.num_elems * size_of::<T>() * self.world_size;
        let reductions = (ROUND_BYTES / bytes.max(1)).clamp(2, NULLS);
        let mut tensor = self.allocate::<T>(self.num_elems)?;
        let mut report = CaseReport {
            algorithm: String::new(),
            reduce_us: Vec::new(),
            executor_us: Vec::new(),
            ping_us: Vec::new(),
            echo_us: Vec::new(),
        };
        for round in 0..=ROUNDS {
            self.barrier()?;
            for _ in 0..reductions {
                let start = Instant::now();
                let mut options = AllReduceOptions::default();
                if let Some(algorithm) = self.algorithm {
                    options = options.algorithm(algorithm);
                }
                let (reduced, reduction) = self.reduce(tensor, self.op, options)?;
                let took = micros(start.elapsed());
                tensor = reduced;
                report.algorithm = reduction.algorithm.to_string();
                report.reduce_us.push(took);
                report.executor_us.push(micros(reduction.reduce_time));
            }
            self.barrier()?;
            for _ in 0..NULLS {
                let start = Instant::now();
                self.communicator.ping()?;
                report.ping_us.push(micros(start.elapsed()));
            }
            self.barrier()?;
            report.echo_us.extend(self.echo.time(NULLS)?);
            if round == 0 {
                // The first round warms up.
                report.reduce_us.clear();
                report.executor_us.clear();
                report.ping_us.clear();
                report.echo_us.clear();
            }
        }
        Ok(report)
    }
}
