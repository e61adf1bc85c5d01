//! `allreduced bench`: what a reduction costs here, beside peers measured in the same run.
//!
//! Owns the parent: a private daemon, the peers' processes, the rows. What a rank does is in [`peer`].
//! It measures and prints; it judges nothing. Peers, as lanes of their own:
//!
//! | lane | what |
//! | --- | --- |
//! | `executor` | the executor's own time for a reduction: reducing, or enqueueing on a GPU |
//! | `ping` | the null RPC, on the same socket, by all ranks at once |
//! | `echo` | a null RPC to a bare tonic server in a process of its own, by all ranks at once |
//! | `reduce` | the reduction alone: N sources to one destination, one thread, no IPC |
//! | `memcpy` | copying (N + 1) / 2 times the bytes, which moves as much memory |
//! | `openmpi` | MPI_Allreduce of OpenMPI, with `--vs-mpi` |

mod graph;
mod mpi;
mod peer;
mod plot;

use crate::children::{ChildError, Children};
use crate::cli::{Choice, parse_auto};
use crate::device::{self, DeviceError, has_kernel};
use crate::private::{PrivateDaemon, StartError};
use crate::spread::Spread;
use crate::workload::{ReductionSpec, Workload, WorkloadError};
use allreduce_contract::{Algorithm, Backend, BadWorldSize, Dtype, Lane, Op, WorldSize};
use allreduce_kernels::{ReduceError, measure};
use graph::{GraphReport, GraphSpec};
use peer::{CaseReport, PeerReport, PeerSpec, RankSpec};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How long all peers may be silent.
const SILENCE: Duration = Duration::from_secs(120);

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// World sizes, comma-separated.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [2, 4])]
    world_size: Vec<u32>,
    /// Tensor sizes in bytes, comma-separated.
    #[arg(long, value_name = "B,..", value_delimiter = ',', default_values_t = [1024, 43_008, 262_144, 1 << 20, 16 << 20])]
    bytes: Vec<u64>,
    /// Element types, comma-separated.
    #[arg(long, value_name = "D,..", value_delimiter = ',', default_values_t = [Dtype::Bf16, Dtype::F32])]
    dtype: Vec<Dtype>,
    /// Operator.
    #[arg(long, value_name = "O", default_value_t = Op::Sum)]
    op: Op,
    /// Where windows live and who reduces: auto (cuda where there is a GPU), host, cuda.
    #[arg(long, value_name = "B", default_value = "auto", value_parser = parse_auto::<Backend>)]
    backend: Choice<Backend>,
    /// Lanes, comma-separated: rpc, resident, delegated; by default those that the backend has. With --vs-mpi: delegated.
    #[arg(long, value_name = "L,..", value_delimiter = ',')]
    lane: Vec<Lane>,
    /// Measure host lanes and OpenMPI's MPI_Allreduce (mpicc and mpirun on the path) turn by turn, f32 unless --dtype
    /// names one type, sums, out of place, instead of everything else.
    #[arg(long, conflicts_with_all = ["backend", "algorithm", "op", "runtimes"])]
    vs_mpi: bool,
    /// With --vs-mpi: how many turns each has.
    #[arg(long, value_name = "N", default_value_t = 7, requires = "vs_mpi", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// With --vs-mpi, instead of sizes: the reductions of one step of a workload (as `demo` takes it), as f32 of as many bytes,
    /// summed.
    #[arg(
        long,
        value_name = "NAME|FILE",
        requires = "vs_mpi",
        conflicts_with = "bytes"
    )]
    workload: Option<String>,
    /// Algorithms, comma-separated: auto lets the plan choose; others as in the rows.
    #[arg(long, value_name = "A,..", value_delimiter = ',', default_values = ["auto"], value_parser = parse_auto::<Algorithm>)]
    algorithm: Vec<Choice<Algorithm>>,
    /// Backend cuda: reductions inside a replayed CUDA graph instead, for each lane that can be captured.
    #[arg(long)]
    graph: bool,
    /// With --graph: a kernel of this many microseconds before each reduction.
    #[arg(long, value_name = "US", default_value_t = 0.0)]
    gap_us: f64,
    /// With --graph: lanes, comma-separated.
    #[arg(long, value_name = "L,..", value_delimiter = ',', default_values_t = [Lane::Delegated, Lane::Resident])]
    graph_lane: Vec<Lane>,
    /// Also measure echo with multi-thread runtimes: how the daemon's and the client's were chosen.
    #[arg(long)]
    runtimes: bool,
    /// Also draws the rows into this file: latency over size, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
enum BenchError {
    #[error(transparent)]
    WorldSize(#[from] BadWorldSize),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Kernel(#[from] ReduceError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("OpenMPI: {0}")]
    Mpi(std::io::Error),
    #[error("mpicc did not compile the peer: {0}")]
    MpiCompile(std::process::ExitStatus),
    #[error("mpirun failed: {0}")]
    MpiRun(std::process::ExitStatus),
    #[error("the MPI peer says what it should not: {0:?}")]
    MpiLine(String),
    #[error("MPI has no {0}: name --dtype f32, f64, i32 or i64")]
    MpiDtype(Dtype),
    #[error("a peer ended without a report")]
    NoReport,
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Row {
    backend: String,
    lane: String,
    world_size: u32,
    bytes: u64,
    dtype: String,
    algorithm: String,
    p50_us: f64,
    p99_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    /// p50 over the p50 of this row's peer of the same run, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    /// The peer's lane.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
}

/// Resident memory, bytes.
#[derive(Debug, Serialize)]
struct Memory {
    world_size: u32,
    supervisor_rss_bytes: u64,
    /// Without shared memory, which is the windows.
    executor_rss_bytes: u64,
    executor_window_rss_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Outcome {
    schema_version: u32,
    rows: Vec<Row>,
    memory: Vec<Memory>,
    /// What could not be measured, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    skipped: Vec<String>,
}

/// Runs `bench`.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match try_run(arguments) {
        Ok(outcome) => {
            if arguments.json {
                match serde_json::to_string(&outcome) {
                    Ok(line) => println!("{line}"),
                    Err(error) => eprintln!("allreduced: {error}"),
                }
            } else {
                print!("{}", outcome.table());
            }
            if let Some(file) = &arguments.plot {
                let drawn = plot::svg(&outcome.rows).ok_or_else(|| "no row has a size".to_owned());
                let written = drawn.and_then(|picture| {
                    std::fs::write(file, picture).map_err(|error| error.to_string())
                });
                if let Err(reason) = written {
                    eprintln!("allreduced: bench: {}: {reason}", file.display());
                    return ExitCode::FAILURE;
                }
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("allreduced: bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one process of the bench.
pub(crate) fn run_peer() -> ExitCode {
    match peer::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("allreduced: bench peer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_vs_mpi(arguments: &Arguments) -> Result<Outcome, BenchError> {
    let workload = arguments.workload.as_deref().map(Workload::find);
    let steps = mpi::steps(&arguments.bytes, workload.transpose()?.as_ref());
    let lanes = match arguments.lane.as_slice() {
        [] => &[Lane::Delegated],
        lanes => lanes,
    };
    let dtype = match arguments.dtype.as_slice() {
        [one] => *one,
        _ => Dtype::F32,
    };
    let mut outcome = Outcome {
        schema_version: 1,
        rows: Vec::new(),
        memory: Vec::new(),
        skipped: Vec::new(),
    };
    for world_size in &arguments.world_size {
        let world_size = WorldSize::new(*world_size)?;
        let pairs = arguments.pairs as usize;
        let (rows, skipped) = mpi::measure(world_size, lanes, dtype, &steps, pairs)?;
        outcome.rows.extend(rows);
        outcome.skipped.extend(skipped);
    }
    outcome.skipped.dedup();
    Ok(outcome)
}

/// The lanes of a backend.
fn lanes_of(backend: Backend) -> &'static [Lane] {
    match backend {
        Backend::Host => &[Lane::Rpc, Lane::Resident, Lane::Delegated],
        Backend::Cuda => &[Lane::Rpc],
    }
}

fn try_run(arguments: &Arguments) -> Result<Outcome, BenchError> {
    if arguments.vs_mpi {
        return run_vs_mpi(arguments);
    }
    let mut cases = Vec::new();
    for dtype in &arguments.dtype {
        for bytes in &arguments.bytes {
            cases.push(ReductionSpec::new(*dtype, arguments.op, *bytes)?);
        }
    }
    let all_have_kernels = cases.iter().all(|case| has_kernel(case.dtype, case.op));
    let backend = match arguments.backend.0 {
        Some(backend) => backend,
        None if all_have_kernels && device::of_rank(None, 0)?.is_some() => Backend::Cuda,
        None => Backend::Host,
    };
    if arguments.graph {
        return measure_graphs(arguments, &cases);
    }
    let mut rows = Vec::new();
    let mut memory = Vec::new();
    for world_size in &arguments.world_size {
        let world_size = WorldSize::new(*world_size)?;
        let lanes = match arguments.lane.as_slice() {
            [] => lanes_of(backend),
            lanes => lanes,
        };
        for lane in lanes {
            for algorithm in &arguments.algorithm {
                let (measured, used) =
                    measure_lane(world_size, backend, *lane, algorithm.0, &cases)?;
                for (case, report) in cases.iter().zip(measured) {
                    rows.extend(lane_rows(world_size, backend, *lane, *case, report));
                }
                memory.push(used);
            }
        }
        if backend == Backend::Host {
            for case in &cases {
                rows.extend(kernel_rows(world_size, *case)?);
            }
        }
        if arguments.runtimes {
            rows.extend(runtime_rows(world_size)?);
        }
    }
    Ok(Outcome {
        schema_version: 1,
        rows,
        memory,
        skipped: Vec::new(),
    })
}

fn measure_graphs(arguments: &Arguments, cases: &[ReductionSpec]) -> Result<Outcome, BenchError> {
    let mut rows = Vec::new();
    for world_size in &arguments.world_size {
        let world_size = WorldSize::new(*world_size)?;
        for algorithm in &arguments.algorithm {
            for lane in arguments.graph_lane.iter().copied() {
                let gap_ns = (arguments.gap_us.max(0.0) * 1000.0) as u64;
                let reports = measure_graph(world_size, lane, algorithm.0, gap_ns, cases)?;
                for (case, mut report) in cases.iter().zip(reports) {
                    let spread = Spread::of(&mut report.reduction_us);
                    let mut row = row(world_size, *case, lane.name(), &report.algorithm, spread);
                    row.backend = Backend::Cuda.to_string();
                    rows.push(row);
                }
            }
        }
    }
    Ok(Outcome {
        schema_version: 1,
        rows,
        memory: Vec::new(),
        skipped: Vec::new(),
    })
}

/// The reports of all ranks, merged case by case.
fn measure_graph(
    world_size: WorldSize,
    lane: Lane,
    algorithm: Option<Algorithm>,
    gap_ns: u64,
    cases: &[ReductionSpec],
) -> Result<Vec<GraphReport>, BenchError> {
    let daemon = PrivateDaemon::start_own(&[])?;
    let specs: Vec<PeerSpec> = world_size
        .ranks()
        .map(|rank| {
            PeerSpec::Graph(GraphSpec {
                socket: daemon.socket().to_owned(),
                rank: rank.get(),
                world_size: world_size.get(),
                lane: lane.to_string(),
                algorithm: algorithm.map(|algorithm| algorithm.to_string()),
                gap_ns,
                cases: cases.iter().map(named).collect(),
            })
        })
        .collect();
    let ranks = Children::<PeerReport>::start("bench-peer", &specs)?;
    let mut merged: Vec<GraphReport> = Vec::new();
    let mut reported = vec![false; specs.len()];
    while reported.contains(&false) {
        match ranks.next(SILENCE)? {
            Ok((rank, PeerReport::Graphs(reports))) => {
                if let Some(reported) = reported.get_mut(rank) {
                    *reported = true;
                }
                if merged.is_empty() {
                    merged = reports;
                } else {
                    for (into, report) in merged.iter_mut().zip(&reports) {
                        into.merge(report);
                    }
                }
            }
            // Some rank is through with a case, or has ended after it had reported.
            Ok((_, PeerReport::Listening)) => {}
            Err(rank) if reported.get(rank) == Some(&true) => {}
            Err(rank) => return Err(ChildError::Ended(rank).into()),
            Ok((_, PeerReport::Cases(_) | PeerReport::Echoed(_) | PeerReport::Timed(_))) => {
                return Err(BenchError::NoReport);
            }
        }
    }
    Ok(merged)
}

/// As peers are told.
fn named(case: &ReductionSpec) -> (String, String, usize) {
    (case.dtype.to_string(), case.op.to_string(), case.num_elems)
}

/// Starts a bare echo server; it listens when this returns.
fn start_echo(socket: &Path, multi_thread: bool) -> Result<Children<PeerReport>, BenchError> {
    let spec = PeerSpec::Echo {
        socket: socket.to_owned(),
        multi_thread,
    };
    let echo = Children::start("bench-peer", &[spec])?;
    match echo.next(SILENCE)? {
        Ok((_, PeerReport::Listening)) => Ok(echo),
        Ok((
            _,
            PeerReport::Cases(_)
            | PeerReport::Echoed(_)
            | PeerReport::Graphs(_)
            | PeerReport::Timed(_),
        ))
        | Err(_) => Err(BenchError::NoReport),
    }
}

/// The reports of all ranks, merged case by case.
fn measure_lane(
    world_size: WorldSize,
    backend: Backend,
    lane: Lane,
    algorithm: Option<Algorithm>,
    cases: &[ReductionSpec],
) -> Result<(Vec<CaseReport>, Memory), BenchError> {
    let daemon = PrivateDaemon::start_own(&[])?;
    let echo_socket = daemon.socket().with_file_name("echo.sock");
    let _echo = start_echo(&echo_socket, false)?;
    let specs: Vec<PeerSpec> = world_size
        .ranks()
        .map(|rank| {
            PeerSpec::Rank(RankSpec {
                socket: daemon.socket().to_owned(),
                echo_socket: echo_socket.clone(),
                rank: rank.get(),
                world_size: world_size.get(),
                backend: backend.to_string(),
                lane: Some(lane.to_string()),
                algorithm: algorithm.map(|algorithm| algorithm.to_string()),
                cases: cases.iter().map(named).collect(),
            })
        })
        .collect();
    let ranks = Children::<PeerReport>::start("bench-peer", &specs)?;
    let mut merged: Vec<CaseReport> = Vec::new();
    let mut memory = None;
    for _ in 0..specs.len() {
        let reports = loop {
            match ranks.next(SILENCE)? {
                Ok((_, PeerReport::Cases(reports))) => break reports,
                // Some rank is through with a case.
                Ok((
                    _,
                    PeerReport::Listening
                    | PeerReport::Echoed(_)
                    | PeerReport::Graphs(_)
                    | PeerReport::Timed(_),
                )) => {}
                Err(rank) => return Err(ChildError::Ended(rank).into()),
            }
        };
        // The ranks wait for each other before they leave, so the executor still holds its windows.
        memory.get_or_insert_with(|| memory_of(world_size, daemon.pid()));
        if merged.is_empty() {
            merged = reports;
        } else {
            for (into, report) in merged.iter_mut().zip(reports) {
                into.merge(report);
            }
        }
    }
    Ok((merged, memory.ok_or(BenchError::NoReport)?))
}

fn lane_rows(
    world_size: WorldSize,
    backend: Backend,
    lane: Lane,
    case: ReductionSpec,
    mut report: CaseReport,
) -> Vec<Row> {
    let reduced = Spread::of(&mut report.reduce_us);
    let executor = Spread::of(&mut report.executor_us);
    let ping = Spread::of(&mut report.ping_us);
    let echo = Spread::of(&mut report.echo_us);
    let algorithm = &report.algorithm;
    let mut rows =
        vec![row(world_size, case, lane.name(), algorithm, reduced).beside("ping", ping)];
    if lane == Lane::Rpc {
        rows.extend([
            row(world_size, case, "executor", algorithm, executor),
            row(world_size, case, "ping", "none", ping).beside("echo", echo),
            row(world_size, case, "echo", "none", echo),
        ]);
    }
    for row in &mut rows {
        row.backend = backend.to_string();
    }
    rows
}

/// Iterations of a measurement that moves `bytes` each: as many as take a moment, no more.
fn iterations(bytes: usize) -> usize {
    ((512 << 20) / bytes.max(1)).clamp(15, 4000)
}

fn kernel_rows(world_size: WorldSize, case: ReductionSpec) -> Result<Vec<Row>, BenchError> {
    let ReductionSpec { dtype, op, .. } = case;
    let ranks = world_size.as_usize();
    let iterations = iterations(case.len_bytes() * ranks);
    let measured = measure::reduction_vs_memcpy(dtype, op, ranks, case.len_bytes(), iterations)?;
    let spread = |p50, p99| Spread { p50, p99, max: p99 };
    let reduce = spread(measured.reduce_us_p50, measured.reduce_us_p99);
    let memcpy = spread(measured.memcpy_us_p50, measured.memcpy_us_p99);
    Ok(vec![
        row(world_size, case, "reduce", "one_shot", reduce).beside("memcpy", memcpy),
        row(world_size, case, "memcpy", "none", memcpy),
    ])
}

/// Echo with each kind of runtime on either side.
fn runtime_rows(world_size: WorldSize) -> Result<Vec<Row>, BenchError> {
    let mut rows: Vec<Row> = Vec::new();
    // Its directory holds the echo servers' sockets.
    let daemon = PrivateDaemon::start_own(&[])?;
    for (lane, server, client) in [
        ("echo/ct-ct", false, false),
        ("echo/mt-ct", true, false),
        ("echo/ct-mt", false, true),
        ("echo/mt-mt", true, true),
    ] {
        let name = format!("{}.sock", lane.replace('/', "-"));
        let socket = daemon.socket().with_file_name(name);
        let _echo = start_echo(&socket, server)?;
        let spec = PeerSpec::EchoClient {
            socket,
            multi_thread: client,
        };
        let specs = vec![spec; world_size.as_usize()];
        let clients = Children::<PeerReport>::start("bench-peer", &specs)?;
        let mut samples = Vec::new();
        let mut reported = vec![false; specs.len()];
        while reported.contains(&false) {
            match clients.next(SILENCE)? {
                Ok((client, PeerReport::Echoed(us))) => {
                    samples.extend(us);
                    if let Some(reported) = reported.get_mut(client) {
                        *reported = true;
                    }
                }
                Err(client) if reported.get(client) == Some(&true) => {}
                Ok((
                    _,
                    PeerReport::Cases(_)
                    | PeerReport::Listening
                    | PeerReport::Graphs(_)
                    | PeerReport::Timed(_),
                ))
                | Err(_) => {
                    return Err(BenchError::NoReport);
                }
            }
        }
        let case = ReductionSpec::new(Dtype::F32, Op::Sum, 0)?;
        rows.push(row(
            world_size,
            case,
            lane,
            "none",
            Spread::of(&mut samples),
        ));
    }
    Ok(rows)
}

fn row(
    world_size: WorldSize,
    case: ReductionSpec,
    lane: &str,
    algorithm: &str,
    spread: Spread,
) -> Row {
    let ranks = f64::from(world_size.get());
    let bytes = case.len_bytes() as u64;
    let algbw_gbps = bytes as f64 / spread.p50.max(f64::MIN_POSITIVE) / 1000.0;
    Row {
        backend: Backend::Host.to_string(),
        lane: lane.to_owned(),
        world_size: world_size.get(),
        bytes,
        dtype: case.dtype.to_string(),
        algorithm: algorithm.to_owned(),
        p50_us: spread.p50,
        p99_us: spread.p99,
        algbw_gbps,
        busbw_gbps: algbw_gbps * 2.0 * (ranks - 1.0) / ranks,
        ratio: None,
        peer: None,
    }
}

impl Row {
    fn beside(mut self, peer: &str, spread: Spread) -> Self {
        self.ratio = Some(self.p50_us / spread.p50.max(f64::MIN_POSITIVE));
        self.peer = Some(peer.to_owned());
        self
    }
}

/// A number of /proc/PID/status, which are in KiB; 0 if it cannot be read.
fn status_bytes(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
    kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn memory_of(world_size: WorldSize, supervisor: u32) -> Memory {
    let children =
        std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children"))
            .unwrap_or_default();
    let executor = children.split_whitespace().find_map(|pid| pid.parse().ok());
    let of = |field| executor.map_or(0, |pid| status_bytes(pid, field));
    Memory {
        world_size: world_size.get(),
        supervisor_rss_bytes: status_bytes(supervisor, "VmRSS"),
        executor_rss_bytes: of("VmRSS").saturating_sub(of("RssShmem")),
        executor_window_rss_bytes: of("RssShmem"),
    }
}

impl Outcome {
    fn table(&self) -> String {
        use std::fmt::Write;
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "{:<8} {:<10} {:>2} {:>9} {:<5} {:<17} {:>10} {:>10} {:>8} {:>8}  ratio of p50",
            "backend",
            "lane",
            "N",
            "bytes",
            "dtype",
            "algorithm",
            "p50 us",
            "p99 us",
            "alg GB/s",
            "bus GB/s"
        );
        for row in &self.rows {
            let ratio = match (&row.ratio, &row.peer) {
                (Some(ratio), Some(peer)) => format!("{ratio:.2} x {peer}"),
                (None, _) | (_, None) => String::new(),
            };
            let _ = writeln!(
                out,
                "{:<8} {:<10} {:>2} {:>9} {:<5} {:<17} {:>10.2} {:>10.2} {:>8.2} {:>8.2}  {ratio}",
                row.backend,
                row.lane,
                row.world_size,
                row.bytes,
                row.dtype,
                row.algorithm,
                row.p50_us,
                row.p99_us,
                row.algbw_gbps,
                row.busbw_gbps
            );
        }
        for skipped in &self.skipped {
            let _ = writeln!(out, "{skipped}");
        }
        for memory in &self.memory {
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let _ = writeln!(
                out,
                "memory, N={}: supervisor {:.1} MiB, executor {:.1} MiB and windows {:.1} MiB",
                memory.world_size,
                mib(memory.supervisor_rss_bytes),
                mib(memory.executor_rss_bytes),
                mib(memory.executor_window_rss_bytes)
            );
        }
        out
    }
}
