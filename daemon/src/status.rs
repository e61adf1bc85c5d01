//! `allreduced status`: what a running daemon does, for people and as JSON.
//!
//! Owns the printing. It asks the daemon's Admin service and adds nothing to what that says.

use allreduce_contract::transport::{dial, error_chain};
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::{
    ClientInfo, CommunicatorInfo, CommunicatorStats, ErrorCode, GetStatsRequest, GetVersionRequest,
    GetVersionResponse, ListClientsRequest, ListCommunicatorsRequest, Quantiles,
};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// How long the daemon may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatusError {
    #[error(
        "no daemon answers on {socket}: {reason}\nstart one with `allreduced serve`, or name its socket with --socket"
    )]
    Unreachable { socket: String, reason: String },
    #[error("the daemon on {socket} does not answer within {} s", TIMEOUT.as_secs())]
    Silent { socket: String },
    #[error("the daemon on {socket} answers {status}")]
    Refused {
        socket: String,
        status: tonic::Status,
    },
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
}

/// Asks and prints.
pub(crate) fn run(socket: &Path, json: bool) -> Result<(), StatusError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let report = runtime.block_on(async {
        tokio::time::timeout(TIMEOUT, ask(socket))
            .await
            .map_err(|_| StatusError::Silent {
                socket: socket.display().to_string(),
            })?
    })?;
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", text(&report));
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    version: String,
    abi: u32,
    pid: u32,
    uptime_s: u64,
    socket: String,
    communicators: Vec<CommunicatorReport>,
}

#[derive(Debug, Serialize)]
struct CommunicatorReport {
    communicator: String,
    world_size: u32,
    serving: bool,
    stale: bool,
    backend: String,
    backend_reason: String,
    lane: Option<String>,
    lane_reason: String,
    topology: String,
    warnings: Vec<String>,
    incarnation: u64,
    epoch: u64,
    executor_pid: u32,
    executor_socket: String,
    executor_rss_bytes: u64,
    window_bytes: u64,
    reductions: Vec<ReductionReport>,
    /// That every rank has begun itself on its GPU, by the GPUs' count.
    lane_calls: u64,
    reduction_us: QuantileReport,
    skew_us: QuantileReport,
    ranks: Vec<RankReport>,
    errors: Vec<ErrorReport>,
}

#[derive(Debug, Serialize)]
struct ReductionReport {
    dtype: String,
    op: String,
    lane: String,
    algorithm: String,
    operations: u64,
    bytes: u64,
}

#[derive(Debug, Default, Serialize)]
struct QuantileReport {
    count: u64,
    p50: f64,
    p99: f64,
    max: f64,
}

#[derive(Debug, Serialize)]
struct RankReport {
    rank: u32,
    joined: bool,
    pid: Option<u32>,
    client: Option<String>,
    operations: u64,
    lane_calls: u64,
    ring_calls: u64,
    ring_calls_staged: u64,
    times_last: u64,
    lateness_us: QuantileReport,
    buffers: u32,
    buffer_bytes: u64,
}

#[derive(Debug, Serialize)]
struct ErrorReport {
    code: String,
    count: u64,
}

async fn ask(socket: &Path) -> Result<Report, StatusError> {
    let shown = socket.display().to_string();
    let unreachable = |error: tonic::transport::Error| StatusError::Unreachable {
        socket: shown.clone(),
        reason: error_chain(&error),
    };
    let refused = |status| StatusError::Refused {
        socket: shown.clone(),
        status,
    };
    let channel = dial(socket).await.map_err(unreachable)?;
    let mut admin = AdminClient::new(channel);
    let version = admin
        .get_version(GetVersionRequest {})
        .await
        .map_err(refused)?
        .into_inner();
    let infos = admin
        .list_communicators(ListCommunicatorsRequest {})
        .await
        .map_err(refused)?
        .into_inner()
        .communicators;
    let stats = admin
        .get_stats(GetStatsRequest::default())
        .await
        .map_err(refused)?
        .into_inner()
        .communicators;
    let clients = admin
        .list_clients(ListClientsRequest::default())
        .await
        .map_err(refused)?
        .into_inner()
        .clients;
    Ok(report(version, shown.clone(), infos, stats, &clients))
}

fn report(
    version: GetVersionResponse,
    socket: String,
    infos: Vec<CommunicatorInfo>,
    mut stats: Vec<CommunicatorStats>,
    clients: &[ClientInfo],
) -> Report {
    let communicators = infos
        .into_iter()
        .map(|info| {
            let own = stats
                .iter()
                .position(|stats| stats.communicator == info.communicator);
            // A communicator that opened between the two questions has no stats yet.
            let stats = own
                .map(|index| stats.swap_remove(index))
                .unwrap_or_default();
            communicator_report(info, stats, clients)
        })
        .collect();
    Report {
        schema_version: 1,
        version: version.version,
        abi: version.abi,
        pid: version.pid,
        uptime_s: version.uptime_s,
        socket,
        communicators,
    }
}

fn communicator_report(
    info: CommunicatorInfo,
    stats: CommunicatorStats,
    clients: &[ClientInfo],
) -> CommunicatorReport {
    let ranks = stats.ranks.into_iter().map(|rank| {
        let client = clients.iter().find(|client| {
            client.communicator == info.communicator && client.rank == rank.rank && !client.ended
        });
        RankReport {
            rank: rank.rank,
            joined: rank.joined,
            pid: client.map(|client| client.pid),
            client: client.map(|client| client.client_name.clone()),
            operations: rank.operations,
            lane_calls: rank.lane_calls,
            ring_calls: rank.ring_calls,
            ring_calls_staged: rank.ring_calls_staged,
            times_last: rank.times_last,
            lateness_us: quantiles(rank.lateness_us),
            buffers: client.map_or(0, |client| client.buffers),
            buffer_bytes: client.map_or(0, |client| client.buffer_bytes),
        }
    });
    CommunicatorReport {
        world_size: info.world_size,
        serving: info.serving,
        stale: stats.stale,
        backend: name(Backend::from_wire(info.backend)),
        backend_reason: info.backend_reason,
        lane: Lane::from_wire(stats.lane)
            .ok()
            .map(|lane| lane.to_string()),
        lane_reason: stats.lane_reason,
        topology: stats.topology,
        warnings: stats.warnings,
        incarnation: info.incarnation,
        epoch: stats.epoch,
        executor_pid: info.executor_pid,
        executor_socket: info.executor_socket,
        executor_rss_bytes: stats.rss_bytes,
        window_bytes: stats.window_bytes,
        reductions: stats
            .reductions
            .iter()
            .map(|count| ReductionReport {
                dtype: name(Dtype::from_wire(count.dtype)),
                op: name(Op::from_wire(count.op)),
                lane: name(Lane::from_wire(count.lane)),
                algorithm: name(Algorithm::from_wire(count.algorithm)),
                operations: count.operations,
                bytes: count.bytes,
            })
            .collect(),
        lane_calls: stats.lane_calls,
        reduction_us: quantiles(stats.reduction_us),
        skew_us: quantiles(stats.skew_us),
        ranks: ranks.collect(),
        errors: stats
            .errors
            .iter()
            .map(|error| ErrorReport {
                code: error_name(error.code),
                count: error.count,
            })
            .collect(),
        communicator: info.communicator,
    }
}

fn name<T: std::fmt::Display, E>(value: Result<T, E>) -> String {
    value.map_or_else(|_| "unknown".to_owned(), |value| value.to_string())
}

fn error_name(code: i32) -> String {
    ErrorCode::try_from(code).map_or_else(
        |_| format!("code {code}"),
        |code| {
            let name = code.as_str_name();
            name.strip_prefix("ERROR_CODE_")
                .unwrap_or(name)
                .to_lowercase()
        },
    )
}

fn quantiles(quantiles: Option<Quantiles>) -> QuantileReport {
    quantiles.map_or_else(QuantileReport::default, |quantiles| QuantileReport {
        count: quantiles.count,
        p50: quantiles.p50,
        p99: quantiles.p99,
        max: quantiles.max,
    })
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The report for people.
fn text(report: &Report) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(
        out,
        "allreduced {} (window layout {}) on {}, pid {}, up {} s",
        report.version, report.abi, report.socket, report.pid, report.uptime_s
    );
    if report.communicators.is_empty() {
        let _ = writeln!(out, "no communicators");
    }
    for communicator in &report.communicators {
        let _ = write!(out, "{}", communicator_text(communicator));
    }
    out
}

fn communicator_text(communicator: &CommunicatorReport) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    let state = match (communicator.serving, communicator.stale) {
        (true, false) => "serving",
        (true, true) => "not answering (figures are the last known)",
        (false, _) => "down (figures are the last known)",
    };
    let _ = writeln!(
        out,
        "\n{}  {state}  {} ranks  epoch {}  incarnation {}",
        communicator.communicator,
        communicator.world_size,
        communicator.epoch,
        communicator.incarnation
    );
    let _ = writeln!(
        out,
        "  backend   {} ({})",
        communicator.backend, communicator.backend_reason
    );
    match &communicator.lane {
        Some(lane) => {
            let _ = writeln!(out, "  lane      {lane} ({})", communicator.lane_reason);
        }
        None => {
            let _ = writeln!(out, "  lane      none yet: not every rank has joined");
        }
    }
    if !communicator.topology.is_empty() {
        let _ = writeln!(out, "  topology  {}", communicator.topology);
    }
    for warning in &communicator.warnings {
        let _ = writeln!(out, "  warning   {warning}");
    }
    let _ = writeln!(
        out,
        "  executor  pid {}, {} resident, windows of {}, {}",
        communicator.executor_pid,
        mib(communicator.executor_rss_bytes),
        mib(communicator.window_bytes),
        communicator.executor_socket
    );
    for count in &communicator.reductions {
        let _ = writeln!(
            out,
            "  reduced   {} x {} {} by {} on {}, {}",
            count.operations,
            count.dtype,
            count.op,
            count.algorithm,
            count.lane,
            mib(count.bytes)
        );
    }
    if communicator.lane_calls > 0 {
        let _ = writeln!(
            out,
            "  launched  {} calls by every rank itself, by the GPUs' count",
            communicator.lane_calls
        );
    }
    for (what, quantiles) in [
        ("reduction", &communicator.reduction_us),
        ("skew     ", &communicator.skew_us),
    ] {
        if quantiles.count > 0 {
            let _ = writeln!(
                out,
                "  {what} p50 {:.1} us, p99 {:.1} us, max {:.1} us",
                quantiles.p50, quantiles.p99, quantiles.max
            );
        }
    }
    for rank in &communicator.ranks {
        let who = match (&rank.client, rank.pid) {
            (Some(client), Some(pid)) => format!("{client} pid {pid}"),
            _ if rank.joined => "joined".to_owned(),
            _ => "not joined".to_owned(),
        };
        let _ = writeln!(
            out,
            "  rank {:<4} {who}, {} reductions, last in {}, late by p50 {:.1} us, {} buffers of {}",
            rank.rank,
            rank.operations,
            rank.times_last,
            rank.lateness_us.p50,
            rank.buffers,
            mib(rank.buffer_bytes)
        );
        if rank.lane_calls > 0 {
            let _ = writeln!(
                out,
                "            {} calls on its GPU by itself",
                rank.lane_calls
            );
        }
        if rank.ring_calls > 0 {
            let advice = match rank.ring_calls_staged {
                0 => "",
                1.. => ": register their memory to avoid it",
            };
            let _ = writeln!(
                out,
                "            staged: {} of {} calls enqueued or captured{advice}",
                rank.ring_calls_staged, rank.ring_calls
            );
        }
    }
    for error in &communicator.errors {
        let _ = writeln!(out, "  errors    {} x {}", error.count, error.code);
    }
    out
}
