//! `allreduced probe`: what connects the GPUs of this machine, measured.
//!
//! Owns the parent: it asks NVML and sysfs, and has children measure, a pair of GPUs each, which are killed when they are late; so a driver
//! or GPU that hangs costs one pair. It never touches CUDA itself. Then a private daemon and two workers reduce on each pair, and every
//! bit is compared: a copy may come out right where kernels do not. What children do is in [`worker`], what comes of it in [`outcome`].
//! Refuses to write a file that nobody asked for.

mod host;
mod job;
mod outcome;
mod worker;

use crate::children::{ChildError, Children};
use crate::cli::{Choice, parse_auto};
use crate::demo;
use crate::topology::{
    Description, Discovered, FileError, TopologyError, discover, discover_listed,
};
use allreduce_contract::Backend;
use job::{Answer, Job, Visible};
use outcome::{AllOutcome, Data, Outcome, PairOutcome, gpu_name};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Arguments of `probe`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write the topology there (TOML, docs/topology.md), with what was measured. Without it nothing is written.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// How long each pair may take to be measured, and again to be checked.
    #[arg(long, value_name = "PER_PAIR", default_value_t = 60_000, value_parser = clap::value_parser!(u32).range(10..=3_600_000))]
    timeout_ms: u32,
    /// What to measure: auto, host, cuda. The host's cores are measured in any case.
    #[arg(long, value_name = "B", default_value = "auto", value_parser = parse_auto::<Backend>)]
    backend: Choice<Backend>,
    /// Bytes of a copy; more than the caches hold.
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(4096..=1 << 32))]
    bytes: u64,
    /// Have the child that lists GPUs hang: tests that it is given up.
    #[arg(long, hide = true)]
    inject_hang: bool,
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
enum ProbeError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("backend cuda: {0}")]
    NoCuda(String),
    #[error("what was discovered is no topology: {0}")]
    Topology(#[from] TopologyError),
}

/// Runs `probe`: exit code 0 if every pair that has access to each other's memory came out right.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match try_run(arguments) {
        Ok(outcome) => {
            if arguments.json {
                match serde_json::to_string(&outcome) {
                    Ok(line) => println!("{line}"),
                    Err(error) => eprintln!("allreduced: {error}"),
                }
            } else {
                print!("{}", outcome.after_the_table());
            }
            match outcome.is_right() {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            }
        }
        Err(error) => {
            eprintln!("allreduced: probe: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one child.
pub(crate) fn run_worker() -> ExitCode {
    match worker::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("allreduced: probe worker: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(arguments: &Arguments) -> Result<Outcome, ProbeError> {
    let timeout = Duration::from_millis(u64::from(arguments.timeout_ms));
    if let Some(path) = &arguments.output {
        // Now, rather than after minutes of measuring.
        Description::check_writable(path)?;
    }
    let mut found = match arguments.backend.0 {
        Some(Backend::Host) => Found::default(),
        wanted => find(arguments, wanted, timeout)?,
    };
    let num_gpus = found.discovered.description.gpus.len();
    let mut pairs = Vec::new();
    let mut all_at_once = Vec::new();
    if num_gpus > 0 {
        let show = |line: &str| {
            if !arguments.json {
                println!("{line}");
            }
        };
        show(&outcome::heading());
        pairs = measure_pairs(&found, arguments.bytes, timeout, |pair| {
            show(&outcome::row(pair));
        });
        if num_gpus > 1 {
            let (all, troubles) = measure_all(&found, arguments.bytes, timeout);
            all_at_once = all;
            found.discovered.hints.extend(troubles);
        }
    }
    let host = host::measure();
    let mut hints = found.discovered.hints;
    hints.extend(outcome::conclusions(&pairs, &all_at_once));
    let mut description = found.discovered.description;
    description.sources.push(format!(
        "measured by allreduced {} probe on {}, driver {}",
        env!("CARGO_PKG_VERSION"),
        today(),
        found.discovered.driver.as_deref().unwrap_or("none")
    ));
    let topology = outcome::measured(description, &pairs, &all_at_once, &host)?;
    if let Some(path) = &arguments.output {
        topology.description().write(path)?;
    }
    let gpus: Vec<usize> = (0..num_gpus).collect();
    Ok(Outcome {
        schema_version: 1,
        backend: if num_gpus > 0 { "cuda" } else { "host" },
        host,
        gpus: topology
            .gpus()
            .iter()
            .map(|gpu| {
                let text = |of: &Option<String>| of.clone().unwrap_or_default();
                format!("{} {} {}", gpu.name, text(&gpu.uuid), text(&gpu.product))
            })
            .collect(),
        pairs,
        all_at_once,
        hints,
        fabric: topology.fabric(&gpus).to_string(),
        fingerprint: topology.fingerprint(),
        output: arguments
            .output
            .as_ref()
            .map(|path| path.display().to_string()),
    })
}

/// What there is to measure.
struct Found {
    discovered: Discovered,
    /// By GPU of the description: whether CUDA shows it.
    is_visible: Vec<bool>,
}

impl Default for Found {
    /// A host.
    fn default() -> Self {
        Self {
            discovered: Discovered::of_host(),
            is_visible: Vec::new(),
        }
    }
}

/// The GPUs: those that CUDA shows, where NVML and sysfs say they are.
fn find(
    arguments: &Arguments,
    wanted: Option<Backend>,
    timeout: Duration,
) -> Result<Found, ProbeError> {
    let job = match arguments.inject_hang {
        true => Job::Hang,
        false => Job::List,
    };
    let (answers, failure) = ask(&job, timeout);
    let mut visible: Vec<Visible> = Vec::new();
    let mut reasons: Vec<String> = failure.into_iter().collect();
    for answer in answers {
        match answer {
            Answer::Devices(devices) => visible = devices,
            Answer::Trouble(reason) => reasons.push(reason),
            _ => {}
        }
    }
    if visible.is_empty() {
        if reasons.is_empty() {
            reasons.push("CUDA shows no GPU to this process (CUDA_VISIBLE_DEVICES)".to_owned());
        }
        if wanted == Some(Backend::Cuda) {
            return Err(ProbeError::NoCuda(reasons.join("; ")));
        }
        let mut host = Found::default();
        host.discovered.hints = reasons;
        return Ok(host);
    }
    let listed = || {
        let gpus = visible.iter();
        discover_listed(
            gpus.map(|gpu| (gpu.uuid.as_str(), gpu.product.as_str(), gpu.bus_id.as_str())),
        )
    };
    let is_shown = |of: Option<&String>| visible.iter().any(|shown| Some(&shown.uuid) == of);
    let mut discovered = match discover(timeout) {
        // Also where CUDA shows something else than NVML, such as MIG instances.
        Ok(discovered) => {
            let mut gpus = discovered.description.gpus.iter();
            match gpus.any(|gpu| is_shown(gpu.uuid.as_ref())) {
                true => discovered,
                false => {
                    let mut by_cuda = listed();
                    by_cuda.hints.extend(discovered.hints);
                    by_cuda.driver = discovered.driver;
                    by_cuda
                }
            }
        }
        Err(error) => {
            let mut by_cuda = listed();
            by_cuda.hints.push(error.to_string());
            by_cuda
        }
    };
    let mut is_visible = Vec::new();
    for gpu in &discovered.description.gpus {
        let is_shown = is_shown(gpu.uuid.as_ref());
        is_visible.push(is_shown);
        if !is_shown {
            discovered.hints.push(format!(
                "{} is not measured: CUDA does not show it to this process (CUDA_VISIBLE_DEVICES, MIG)",
                gpu.name
            ));
        }
    }
    Ok(Found {
        discovered,
        is_visible,
    })
}

/// One child, one job: what it said until it was done, and why it did not come to that.
fn ask(job: &Job, timeout: Duration) -> (Vec<Answer>, Option<String>) {
    let deadline = Instant::now() + timeout;
    let mut answers = Vec::new();
    let child = match Children::<Answer>::start("probe-worker", std::slice::from_ref(job)) {
        Ok(child) => child,
        Err(error) => return (answers, Some(error.to_string())),
    };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match child.next(left) {
            Ok(Ok((_, Answer::Done))) => return (answers, None),
            Ok(Ok((_, answer))) => answers.push(answer),
            Ok(Err(_)) => {
                return (
                    answers,
                    Some("its process ended before it was done".to_owned()),
                );
            }
            Err(ChildError::Silent(_)) => {
                child.kill();
                let reason = format!(
                    "no answer in {} ms, its process was killed: the driver or a GPU hangs, or --timeout-ms is too short",
                    timeout.as_millis()
                );
                return (answers, Some(reason));
            }
            Err(error) => return (answers, Some(error.to_string())),
        }
    }
}

fn uuid(found: &Found, gpu: usize) -> Option<&String> {
    let is_visible = found.is_visible.get(gpu).copied().unwrap_or(false);
    let gpu = found.discovered.description.gpus.get(gpu)?;
    gpu.uuid.as_ref().filter(|_| is_visible)
}

/// Every ordered pair, or the one GPU with itself.
fn measure_pairs(
    found: &Found,
    len_bytes: u64,
    timeout: Duration,
    show: impl Fn(&PairOutcome),
) -> Vec<PairOutcome> {
    let num_gpus = found.discovered.description.gpus.len();
    let mut pairs = Vec::new();
    for one in 0..num_gpus {
        // Both directions, then the check, which is of both.
        for other in one..num_gpus {
            let (Some(one_uuid), Some(other_uuid)) = (uuid(found, one), uuid(found, other)) else {
                continue;
            };
            let mut measured = match (one == other, num_gpus) {
                (true, 1) => vec![measure(
                    (one, one_uuid),
                    (one, one_uuid),
                    len_bytes,
                    timeout,
                )],
                (true, _) => continue,
                (false, _) => vec![
                    measure((one, one_uuid), (other, other_uuid), len_bytes, timeout),
                    measure((other, other_uuid), (one, one_uuid), len_bytes, timeout),
                ],
            };
            // What hung, or copied wrongly, would only do so again.
            let is_sound = |pair: &PairOutcome| pair.peer_access && pair.data != Data::Failed;
            if measured.iter().all(is_sound) {
                let (data, trouble) = check([one_uuid, other_uuid], timeout);
                for pair in &mut measured {
                    pair.data = data;
                    pair.troubles.extend(trouble.clone());
                }
            }
            for pair in measured {
                show(&pair);
                pairs.push(pair);
            }
        }
    }
    pairs
}

fn measure(
    (from, from_uuid): (usize, &String),
    (to, to_uuid): (usize, &String),
    len_bytes: u64,
    timeout: Duration,
) -> PairOutcome {
    let job = Job::Pair {
        from: from_uuid.clone(),
        to: to_uuid.clone(),
        len_bytes: len_bytes / 16 * 16,
        // Before its process is killed, so that it can say how far it came.
        limit_ms: u64::try_from(timeout.as_millis() / 4)
            .unwrap_or(u64::MAX)
            .clamp(1, 5000),
    };
    let (answers, failure) = ask(&job, timeout);
    let mut pair = PairOutcome {
        from,
        to,
        ..PairOutcome::default()
    };
    for answer in answers {
        match answer {
            Answer::Access(None) => pair.peer_access = true,
            Answer::Access(Some(reason)) => {
                pair.troubles.push(format!("no peer access: {reason}"));
            }
            Answer::WriteGbps(gbps) => pair.write_gbps = Some(gbps),
            Answer::ReadGbps(gbps) => pair.read_gbps = Some(gbps),
            Answer::FlagUs(us) => pair.flag_us = Some(us),
            Answer::Wrong(reason) => {
                pair.data = Data::Failed;
                pair.troubles.push(reason);
            }
            Answer::Trouble(reason) => pair.troubles.push(reason),
            Answer::Devices(_)
            | Answer::WriteAllGbps(_)
            | Answer::ReadAllGbps(_)
            | Answer::Done => {}
        }
    }
    if let Some(reason) = failure {
        pair.data = Data::Failed;
        pair.troubles.push(reason);
    }
    pair
}

/// The real kernels, in processes of their own, on real windows.
fn check(uuids: [&str; 2], timeout: Duration) -> (Data, Option<String>) {
    match demo::check_pair(uuids, timeout) {
        Ok(checked) if checked.verified == checked.reductions => (Data::Right, None),
        Ok(checked) => (
            Data::Failed,
            Some(format!(
                "{} of {} reductions right",
                checked.verified, checked.reductions
            )),
        ),
        Err(error) => (Data::Failed, Some(format!("the check: {error}"))),
    }
}

fn measure_all(found: &Found, len_bytes: u64, timeout: Duration) -> (Vec<AllOutcome>, Vec<String>) {
    let num_gpus = found.discovered.description.gpus.len();
    let (numbers, gpus): (Vec<usize>, Vec<String>) = (0..num_gpus)
        .filter_map(|gpu| Some((gpu, uuid(found, gpu)?.clone())))
        .unzip();
    let mut outcomes: Vec<AllOutcome> = numbers
        .iter()
        .map(|gpu| AllOutcome {
            gpu: gpu_name(*gpu),
            write_gbps: None,
            read_gbps: None,
        })
        .collect();
    let mut troubles = Vec::new();
    let job = Job::All {
        gpus,
        len_bytes: len_bytes / 16 * 16,
    };
    let (answers, failure) = ask(&job, timeout);
    for answer in answers {
        match answer {
            Answer::WriteAllGbps(rates) => {
                for (all, gbps) in outcomes.iter_mut().zip(rates) {
                    all.write_gbps = Some(gbps);
                }
            }
            Answer::ReadAllGbps(rates) => {
                for (all, gbps) in outcomes.iter_mut().zip(rates) {
                    all.read_gbps = Some(gbps);
                }
            }
            Answer::Trouble(reason) => troubles.push(reason),
            _ => {}
        }
    }
    troubles.extend(failure.map(|reason| format!("all at once: {reason}")));
    (outcomes, troubles)
}

/// Today, UTC, as 2026-11-29.
fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    date(since.map_or(0, |since| since.as_secs() / 86_400))
}

/// The date so many days after 1970-01-01.
fn date(mut days: u64) -> String {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_088, "2024-12-31"),
            (20_786, "2026-11-29"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
