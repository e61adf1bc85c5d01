//! `allreduced demo`: the main job, end to end, on this machine.
//!
//! Owns the parent: a private daemon, worker processes, the progress bar, the verdict. What a worker
//! does is in [`worker`], what is right is in [`verify`].

pub(crate) mod tensor;
pub(crate) mod verify;
mod worker;

use crate::backend::Fault;
use crate::children::{ChildError, Children};
use crate::cli::{Choice, parse_auto};
use crate::device::{self, DeviceError, has_kernel};
use crate::private::{PrivateDaemon, StartError};
use crate::spread::{Spread, time};
use crate::workload::{self, ReductionSpec, Workload, WorkloadError};
use allreduce_contract::transport::dial;
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::{CommunicatorStats, GetStatsRequest, ListCommunicatorsRequest};
use allreduce_contract::{Backend, BadWorldSize, Dtype, Lane, Op, WorldSize};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use worker::{ReductionReport, Report, WorkerSpec, wire_reductions};

/// The demo's communicator.
const COMMUNICATOR: &str = "demo";
/// How long all workers may be silent. A batch of the largest shipped workload takes a fraction of it.
const SILENCE: Duration = Duration::from_secs(300);

/// How long the daemon may take to tell its stats.
const STATS_TIMEOUT: Duration = Duration::from_secs(10);

/// Arguments of `demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of ranks, each a process: 1 to 16.
    #[arg(long, value_name = "N", default_value_t = 4)]
    world_size: u32,
    /// A shipped workload (kimi-k2.5-verify, llama-3-70b-decode-1, llama-3-70b-decode-8,
    /// llama-3-70b-decode-64, llama-3-70b-prefill-8k) or a TOML file of the same form (README.md).
    #[arg(long, value_name = "NAME|FILE", default_value = workload::DEFAULT, conflicts_with_all = ["bytes", "dtype", "op"])]
    workload: String,
    /// Instead of a workload: 122 reductions of this many bytes a step.
    #[arg(long, value_name = "B")]
    bytes: Option<u64>,
    /// Instead of a workload: their element type (f32, f64, f16, bf16, i32, i64).
    #[arg(long, value_name = "D")]
    dtype: Option<Dtype>,
    /// Instead of a workload: their operator (sum, avg, min, max, prod).
    #[arg(long, value_name = "O")]
    op: Option<Op>,
    /// How ranks trigger a reduction: auto, rpc, resident, delegated.
    #[arg(long, value_name = "L", default_value = "auto", value_parser = parse_auto::<Lane>)]
    lane: Choice<Lane>,
    /// Where windows live and who reduces: auto, host, cuda.
    #[arg(long, value_name = "B", default_value = "auto", value_parser = parse_auto::<Backend>)]
    backend: Choice<Backend>,
    /// Steps to run; by default what the workload says, or 20.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    steps: Option<u64>,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Flip one bit of one result: REDUCTION:RANK:BIT. Tests the verifier.
    #[arg(long, hide = true, value_parser = crate::cli::parse_fault)]
    inject_bit_flip: Option<Fault>,
}

/// Why the demo has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    WorldSize(#[from] BadWorldSize),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("--inject-bit-flip is for lane rpc only")]
    NoFault,
    #[error("the daemon's stats: {0}")]
    Stats(String),
}

/// Runs `demo`: exit code 0 if every reduction was verified, 1 if not or if it could not run.
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
            if outcome.mismatched == 0 && outcome.verified == outcome.reductions {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("allreduced: demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one rank.
pub(crate) fn run_worker() -> ExitCode {
    match worker::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("allreduced: demo worker: {error}");
            ExitCode::FAILURE
        }
    }
}

fn chosen_workload(arguments: &Arguments) -> Result<Workload, WorkloadError> {
    let Arguments {
        bytes, dtype, op, ..
    } = arguments;
    let default = Workload::find(workload::DEFAULT)?;
    match (bytes, dtype, op, default.reductions.first()) {
        (None, None, None, _) | (_, _, _, None) => Workload::find(&arguments.workload),
        (_, _, _, Some(first)) => {
            let spec = ReductionSpec::new(
                dtype.unwrap_or(first.dtype),
                op.unwrap_or(first.op),
                bytes.unwrap_or(first.len_bytes() as u64),
            )?;
            Ok(Workload::uniform(spec, default.reductions.len()))
        }
    }
}

fn try_run(arguments: &Arguments) -> Result<Outcome, DemoError> {
    let workload = chosen_workload(arguments)?;
    let steps = arguments.steps.unwrap_or(workload.steps);
    let world_size = WorldSize::new(arguments.world_size)?;
    let mut flags = Vec::new();
    if let Some(Fault {
        reduction,
        rank,
        bit,
    }) = arguments.inject_bit_flip
    {
        flags.push(format!("--inject-bit-flip={reduction}:{rank}:{bit}"));
    }
    // The executor's task can damage only what it reduces itself.
    let lane = match (arguments.lane.0, arguments.inject_bit_flip) {
        (lane @ (None | Some(Lane::Rpc)), Some(_)) => lane.or(Some(Lane::Rpc)),
        (Some(Lane::Resident | Lane::Delegated), Some(_)) => return Err(DemoError::NoFault),
        (lane, None) => lane,
    };
    // What only the host can reduce goes there by itself; asked for on cuda, it is refused in words.
    let all_have_kernels = workload
        .reductions
        .iter()
        .all(|spec| has_kernel(spec.dtype, spec.op));
    let auto = (!all_have_kernels).then_some(Backend::Host);
    let backend = arguments.backend.0.or(auto);
    if backend == Some(Backend::Cuda) {
        // Said once, here, instead of by every worker.
        device::of_rank(backend, 0)?;
    }
    let daemon = PrivateDaemon::start_own(&flags)?;
    let specs: Vec<WorkerSpec> = world_size
        .ranks()
        .map(|rank| WorkerSpec {
            socket: daemon.socket().to_owned(),
            communicator: COMMUNICATOR.to_owned(),
            rank: rank.get(),
            world_size: world_size.get(),
            backend: backend.map(|backend| backend.to_string()),
            device: None,
            lane: lane.map(|lane| lane.to_string()),
            steps,
            seed: u64::from(std::process::id()),
            reductions: wire_reductions(&workload),
        })
        .collect();
    let total = steps * workload.reductions.len() as u64;
    let progress = progress(total, arguments.json);
    let mut tally = Tally::new(world_size.as_usize());
    hear(&specs, &mut tally, SILENCE, |done| {
        progress.set_position(done);
    })?;
    progress.finish_and_clear();
    let (backend_reason, stats) = ask_stats(daemon.socket()).map_err(DemoError::Stats)?;
    Ok(tally.outcome(world_size.get(), steps, &workload, backend_reason, &stats))
}

/// Runs the workers and hears them to the end.
fn hear(
    specs: &[WorkerSpec],
    tally: &mut Tally,
    silence: Duration,
    progress: impl Fn(u64),
) -> Result<(), ChildError> {
    let workers = Children::<Report>::start("demo-worker", specs)?;
    while !tally.all_done() {
        match workers.next(silence)? {
            Ok((rank, report)) => tally.absorb(rank, report),
            Err(rank) if tally.is_done(rank) => {}
            Err(rank) => return Err(ChildError::Ended(rank)),
        }
        progress(tally.progress());
    }
    Ok(())
}

/// What two workers have reduced, and how much of it is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) reductions: u64,
    pub(crate) verified: u64,
}

/// Has two workers on two GPUs (or one) reduce through a private daemon, and compares every bit: for `probe`. `silence` is how
/// long both may say nothing.
pub(crate) fn check_pair(devices: [&str; 2], silence: Duration) -> Result<Checked, DemoError> {
    let daemon = PrivateDaemon::start_own(&[])?;
    let workload = Workload::find(workload::DEFAULT)?;
    let world_size = WorldSize::new(2)?;
    let specs: Vec<WorkerSpec> = world_size
        .ranks()
        .zip(devices)
        .map(|(rank, device)| WorkerSpec {
            socket: daemon.socket().to_owned(),
            communicator: COMMUNICATOR.to_owned(),
            rank: rank.get(),
            world_size: world_size.get(),
            backend: Some(Backend::Cuda.to_string()),
            device: Some(device.to_owned()),
            lane: None,
            steps: 1,
            seed: u64::from(std::process::id()),
            reductions: wire_reductions(&workload),
        })
        .collect();
    let mut tally = Tally::new(world_size.as_usize());
    hear(&specs, &mut tally, silence, |_| ())?;
    Ok(Checked {
        reductions: workload.reductions.len() as u64,
        verified: tally.verified(),
    })
}

fn progress(total: u64, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} reductions, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

/// The daemon's own account of the communicator.
fn ask_stats(socket: &Path) -> Result<(String, CommunicatorStats), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let asked = async {
        let channel = dial(socket).await.map_err(|error| error.to_string())?;
        let mut admin = AdminClient::new(channel);
        let named = GetStatsRequest {
            communicator: COMMUNICATOR.to_owned(),
        };
        let stats = admin.get_stats(named).await;
        let stats = stats.map_err(|status| status.to_string())?.into_inner();
        let list = admin.list_communicators(ListCommunicatorsRequest {}).await;
        let list = list.map_err(|status| status.to_string())?.into_inner();
        let info = list.communicators.into_iter().next();
        let stats = stats.communicators.into_iter().next();
        match (info, stats) {
            (Some(info), Some(stats)) => Ok((info.backend_reason, stats)),
            (None, _) | (_, None) => Err("the communicator is gone".to_owned()),
        }
    };
    runtime.block_on(async {
        tokio::time::timeout(STATS_TIMEOUT, asked)
            .await
            .map_err(|_| "no answer in time".to_owned())?
    })
}

/// What the workers have said so far.
struct Tally {
    joined: Option<(String, String, String)>,
    /// The GPUs, each once, in order of their first rank.
    devices: Vec<String>,
    warnings: Vec<String>,
    /// By rank: the reductions it reported, in order.
    ranks: Vec<RankTally>,
    done: Vec<bool>,
}

#[derive(Default)]
struct RankTally {
    progress: u64,
    step_us: Vec<f64>,
    reductions: Vec<ReductionReport>,
}

impl Tally {
    fn new(world_size: usize) -> Self {
        Self {
            joined: None,
            devices: Vec::new(),
            warnings: Vec::new(),
            ranks: (0..world_size).map(|_| RankTally::default()).collect(),
            done: vec![false; world_size],
        }
    }

    fn absorb(&mut self, rank: usize, report: Report) {
        match report {
            Report::Joined {
                backend,
                lane,
                lane_reason,
                device,
                warnings,
            } => {
                self.joined = Some((backend, lane, lane_reason));
                self.warnings = warnings;
                if let Some(device) = device
                    && !self.devices.contains(&device)
                {
                    self.devices.push(device);
                }
            }
            Report::Progress { reductions } => {
                if let Some(tally) = self.ranks.get_mut(rank) {
                    tally.progress += reductions;
                }
            }
            Report::Step {
                step_us,
                reductions,
            } => {
                if let Some(tally) = self.ranks.get_mut(rank) {
                    tally.step_us.push(step_us);
                    tally.reductions.extend(reductions);
                }
            }
            Report::Done => {
                if let Some(done) = self.done.get_mut(rank) {
                    *done = true;
                }
            }
        }
    }

    fn is_done(&self, rank: usize) -> bool {
        self.done.get(rank).copied().unwrap_or(false)
    }

    fn all_done(&self) -> bool {
        self.done.iter().all(|done| *done)
    }

    /// Reductions that every rank has done.
    fn progress(&self) -> u64 {
        let done = self.ranks.iter().map(|rank| rank.progress);
        done.min().unwrap_or(0)
    }

    /// Reductions that every rank has reported.
    fn reductions(&self) -> u64 {
        let reported = self.ranks.iter().map(|rank| rank.reductions.len());
        reported.min().unwrap_or(0) as u64
    }

    /// How many reductions every rank has, bit for bit the same, and one rank found right.
    fn verified(&self) -> u64 {
        let is_verified = |index: usize| {
            let mut reports = self.ranks.iter().map(|rank| rank.reductions.get(index));
            let first = reports.clone().next().flatten();
            let same = reports
                .clone()
                .all(|report| report.map(|r| r.fingerprint) == first.map(|r| r.fingerprint));
            let right = reports.any(|report| report.and_then(|r| r.wrong) == Some(0));
            first.is_some() && same && right
        };
        let count = usize::try_from(self.reductions()).unwrap_or(usize::MAX);
        (0..count).filter(|index| is_verified(*index)).count() as u64
    }

    fn outcome(
        &self,
        world_size: u32,
        steps: u64,
        workload: &Workload,
        backend_reason: String,
        stats: &CommunicatorStats,
    ) -> Outcome {
        let reductions = steps * workload.reductions.len() as u64;
        let verified = self.verified();
        // A step is over when its slowest rank is.
        let indices = 0..usize::try_from(steps).unwrap_or(usize::MAX);
        let mut step_us: Vec<f64> = indices
            .map(|step| {
                let times = self.ranks.iter().filter_map(|rank| rank.step_us.get(step));
                times.copied().fold(0.0, f64::max)
            })
            .collect();
        let mut kinds: BTreeMap<ReductionSpec, (Vec<f64>, String)> = BTreeMap::new();
        let mut all_us = Vec::new();
        for rank in &self.ranks {
            for (spec, report) in workload.reductions.iter().cycle().zip(&rank.reductions) {
                let (times, algorithm) = kinds.entry(*spec).or_default();
                times.push(report.us);
                algorithm.clone_from(&report.algorithm);
                all_us.push(report.us);
            }
        }
        let kinds: Vec<Kind> = kinds
            .into_iter()
            .map(|(spec, (times, algorithm))| Kind::new(spec, times, algorithm, world_size))
            .collect();
        // The kind that occurs most speaks for the workload.
        let main = kinds.iter().max_by_key(|kind| kind.reductions);
        let (backend, lane, lane_reason) = self.joined.clone().unwrap_or_default();
        Outcome {
            schema_version: 1,
            workload: workload.name.clone(),
            about: workload.about.clone(),
            backend,
            backend_reason,
            devices: self.devices.clone(),
            warnings: self.warnings.clone(),
            world_size,
            lane,
            lane_reason,
            algorithm: main.map(|kind| kind.algorithm.clone()).unwrap_or_default(),
            dtype: main.map(|kind| kind.dtype.clone()).unwrap_or_default(),
            op: main.map(|kind| kind.op.clone()).unwrap_or_default(),
            bytes: main.map_or(0, |kind| kind.bytes),
            steps,
            reductions,
            verified,
            mismatched: reductions - verified,
            step_us: Spread::of(&mut step_us),
            reduction_us: Spread::of(&mut all_us),
            busbw_gbps: main.map_or(0.0, |kind| kind.busbw_gbps),
            kinds,
            ranks: stats
                .ranks
                .iter()
                .map(|rank| Lateness {
                    rank: rank.rank,
                    calls: rank.operations,
                    times_last: rank.times_last,
                    late_us_p50: rank.lateness_us.as_ref().map_or(0.0, |late| late.p50),
                    late_us_p99: rank.lateness_us.as_ref().map_or(0.0, |late| late.p99),
                })
                .collect(),
        }
    }
}

/// The reductions of one kind.
#[derive(Debug, Serialize)]
struct Kind {
    dtype: String,
    op: String,
    bytes: u64,
    algorithm: String,
    reductions: u64,
    reduction_us: Spread,
    /// Bytes over time, times 2 (N - 1) / N: what the slowest link of a ring would carry
    /// (nccl-tests, PERFORMANCE.md). From the median.
    busbw_gbps: f64,
}

impl Kind {
    fn new(spec: ReductionSpec, mut times: Vec<f64>, algorithm: String, world_size: u32) -> Self {
        let reduction_us = Spread::of(&mut times);
        let bytes = spec.len_bytes() as u64;
        let ranks = f64::from(world_size);
        let algbw_gbps = bytes as f64 / reduction_us.p50.max(f64::MIN_POSITIVE) / 1000.0;
        Self {
            dtype: spec.dtype.to_string(),
            op: spec.op.to_string(),
            bytes,
            algorithm,
            reductions: times.len() as u64 / u64::from(world_size),
            reduction_us,
            busbw_gbps: algbw_gbps * 2.0 * (ranks - 1.0) / ranks,
        }
    }
}

/// How late one rank calls, by the executor's clock.
#[derive(Debug, Serialize)]
struct Lateness {
    rank: u32,
    /// Of the executor's count: reductions, and the barriers between steps.
    calls: u64,
    times_last: u64,
    late_us_p50: f64,
    late_us_p99: f64,
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Outcome {
    schema_version: u32,
    workload: String,
    about: String,
    backend: String,
    backend_reason: String,
    /// GPUs in use; ranks share them where there are fewer.
    devices: Vec<String>,
    warnings: Vec<String>,
    world_size: u32,
    lane: String,
    lane_reason: String,
    algorithm: String,
    dtype: String,
    op: String,
    bytes: u64,
    steps: u64,
    reductions: u64,
    verified: u64,
    mismatched: u64,
    step_us: Spread,
    reduction_us: Spread,
    busbw_gbps: f64,
    kinds: Vec<Kind>,
    ranks: Vec<Lateness>,
}

impl Outcome {
    fn table(&self) -> String {
        use std::fmt::Write;
        let mut out = String::new();
        // Writing to a String does not fail.
        let mut row = |name: &str, text: String| {
            let _ = writeln!(out, "{name:<15}{text}");
        };
        row("workload", format!("{} ({})", self.workload, self.about));
        row("ranks", format!("{} worker processes", self.world_size));
        row(
            "backend",
            format!("{} ({})", self.backend, self.backend_reason),
        );
        for device in &self.devices {
            row("gpu", device.clone());
        }
        row("lane", format!("{} ({})", self.lane, self.lane_reason));
        for warning in &self.warnings {
            row("warning", warning.clone());
        }
        row(
            "step",
            format!(
                "p50 {}  p99 {}  over {} steps",
                time(self.step_us.p50),
                time(self.step_us.p99),
                self.steps
            ),
        );
        for kind in &self.kinds {
            let Spread { p50, p99, max } = kind.reduction_us;
            row(
                "reduction",
                format!(
                    "p50 {}  p99 {}  max {}  {} {} {} bytes, {}, bus {:.2} GB/s",
                    time(p50),
                    time(p99),
                    time(max),
                    kind.dtype,
                    kind.op,
                    kind.bytes,
                    kind.algorithm,
                    kind.busbw_gbps
                ),
            );
        }
        // Ranks that launch themselves tell nobody when.
        for rank in self.ranks.iter().filter(|rank| rank.calls > 0) {
            row(
                "arrival skew",
                format!(
                    "rank {:<2} late by p50 {}  p99 {}  last in {} of {} (barriers counted)",
                    rank.rank,
                    time(rank.late_us_p50),
                    time(rank.late_us_p99),
                    rank.times_last,
                    rank.calls
                ),
            );
        }
        row(
            "result",
            format!(
                "verified {} of {}{}",
                self.verified,
                self.reductions,
                match self.mismatched {
                    0 => String::new(),
                    mismatched => format!(", {mismatched} mismatched"),
                }
            ),
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(fingerprint: u64, wrong: Option<usize>) -> Report {
        Report::Step {
            step_us: 1.0,
            reductions: vec![ReductionReport {
                us: 1.0,
                algorithm: "one_shot".to_owned(),
                fingerprint,
                wrong,
            }],
        }
    }

    #[test]
    fn only_what_all_ranks_share_and_one_checked_is_verified() {
        let mut tally = Tally::new(2);
        for (first, second) in [
            (report(1, Some(0)), report(1, None)),
            (report(2, None), report(2, Some(0))),
            // Another rank has other bits.
            (report(3, Some(0)), report(4, None)),
            // All the same, and wrong.
            (report(5, Some(1)), report(5, None)),
            // Checked by nobody.
            (report(6, None), report(6, None)),
        ] {
            tally.absorb(0, first);
            tally.absorb(1, second);
        }
        assert_eq!(tally.reductions(), 5);
        assert_eq!(tally.verified(), 2);
    }
}
