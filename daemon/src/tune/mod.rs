//! `allreduced tune`: measures which algorithm is the faster one on this machine, and keeps it.
//!
//! Owns the parent: a private daemon, the workers, the choice and the table. A candidate takes a size from the one that the plan
//! would take only if it is faster beyond the noise of both. The table carries the topology's fingerprint; `serve` uses it
//! (`topology.tuned`) only on that topology. Refuses to keep an algorithm whose result was wrong on any rank: it
//! ends with an error then.

mod worker;

use crate::children::{ChildError, Children};
use crate::cli::{Choice, parse_auto};
use crate::config::Config;
use crate::device::{self, DeviceError};
use crate::explain::{Machine, Question};
use crate::files;
use crate::plan::tuned::{SCHEMA_VERSION, TunedChoice, TunedRow, TunedSet, TunedTable};
use crate::private::{PrivateDaemon, StartError};
use crate::spread::time;
use crate::topology::{self, LoadError, Topology};
use crate::workload::{ReductionSpec, WorkloadError};
use allreduce_contract::{Algorithm, Backend, BadWorldSize, Dtype, Lane, Op, WorldSize};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use worker::{Trial, TuneReport, TuneSpec};

/// How long all workers may be silent.
const SILENCE: Duration = Duration::from_secs(300);

/// Arguments of `tune`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// World sizes, comma-separated.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [2, 4])]
    world_size: Vec<u32>,
    /// Lanes, comma-separated; by default those where the plan has a choice: rpc and delegated.
    #[arg(long, value_name = "L,..", value_delimiter = ',', default_values_t = [Lane::Rpc, Lane::Delegated])]
    lane: Vec<Lane>,
    /// Element types, comma-separated. A table serves all types of the same width.
    #[arg(long, value_name = "D,..", value_delimiter = ',', default_values_t = [Dtype::Bf16, Dtype::F32])]
    dtype: Vec<Dtype>,
    /// Tensor sizes in bytes, comma-separated.
    #[arg(long, value_name = "B,..", value_delimiter = ',', default_values_t = [1 << 10, 4 << 10, 16 << 10, 43_008, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20])]
    bytes: Vec<u64>,
    /// Where windows live: auto (cuda where there is a GPU), host, cuda.
    #[arg(long, value_name = "B", default_value = "auto", value_parser = parse_auto::<Backend>)]
    backend: Choice<Backend>,
    /// Turns of each candidate.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// The topology file that `serve` uses; by default this machine is discovered.
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Where the table goes; without it, it is printed only.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, thiserror::Error)]
enum TuneError {
    #[error(transparent)]
    WorldSize(#[from] BadWorldSize),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Topology(#[from] LoadError),
    #[error("{path}: {error}")]
    Write { path: String, error: std::io::Error },
    #[error(
        "{algorithm}, {bytes} bytes {dtype}, {world_size} ranks, lane {lane}: {wrong} elements of the result are wrong; nothing was kept. Do not use this machine for it, and report it"
    )]
    Wrong {
        algorithm: Algorithm,
        bytes: u64,
        dtype: Dtype,
        world_size: u32,
        lane: Lane,
        wrong: usize,
    },
    #[error("the table: {0}")]
    Table(String),
}

/// Runs `tune`.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    match try_run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("allreduced: tune: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one rank of it.
pub(crate) fn run_worker() -> ExitCode {
    match worker::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("allreduced: tune worker: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(arguments: &Arguments) -> Result<(), TuneError> {
    // Before minutes are spent on what cannot be kept, or measured.
    let unwritable = |path: &Path| {
        let path = path.display().to_string();
        move |error| TuneError::Write { path, error }
    };
    if let Some(path) = &arguments.output {
        files::check_writable(path).map_err(unwritable(path))?;
    }
    let world_sizes: Vec<WorldSize> = arguments
        .world_size
        .iter()
        .map(|ranks| WorldSize::new(*ranks))
        .collect::<Result<_, _>>()?;
    for dtype in &arguments.dtype {
        for bytes in &arguments.bytes {
            ReductionSpec::new(*dtype, Op::Sum, *bytes)?;
        }
    }
    let backend = match arguments.backend.0 {
        Some(backend) => backend,
        None if device::of_rank(None, 0)?.is_some() => Backend::Cuda,
        None => Backend::Host,
    };
    let config = Config::default();
    let (topology, origin) = match &arguments.topology {
        // A preset is not this machine.
        Some(file) => {
            let topology = Topology::read(file).map_err(LoadError::File)?;
            (topology, file.display().to_string())
        }
        None => topology::load(&config.topology)?,
    };
    let machine = Machine {
        topology,
        origin,
        config,
        tuned: None,
    };
    let mut sets = Vec::new();
    for world_size in world_sizes {
        for lane in &arguments.lane {
            for dtype in &arguments.dtype {
                let set = measure(arguments, &machine, (world_size, backend, *lane, *dtype))?;
                if !arguments.json {
                    print_set(&set);
                }
                sets.push(set);
            }
        }
    }
    let table = TunedTable {
        schema_version: SCHEMA_VERSION,
        fingerprint: machine.topology.fingerprint(),
        measured: format!(
            "allreduced {} tune, on {} ({})",
            env!("CARGO_PKG_VERSION"),
            machine.topology.name(),
            machine.origin
        ),
        sets,
    };
    let bad = |error: &dyn std::fmt::Display| TuneError::Table(error.to_string());
    if arguments.json {
        println!(
            "{}",
            serde_json::to_string(&table).map_err(|error| bad(&error))?
        );
    }
    if let Some(path) = &arguments.output {
        let text = toml::to_string(&table).map_err(|error| bad(&error))?;
        files::write_text(path, &text).map_err(unwritable(path))?;
        if !arguments.json {
            println!(
                "written: {}; set topology.tuned to it, and `serve` uses it on this topology",
                path.display()
            );
        }
    } else if !arguments.json {
        println!("nothing is kept: name a file with --output");
    }
    Ok(())
}

/// One kind of communicator.
fn measure(
    arguments: &Arguments,
    machine: &Machine,
    (world_size, backend, lane, dtype): (WorldSize, Backend, Lane, Dtype),
) -> Result<TunedSet, TuneError> {
    let algorithms: Vec<Algorithm> = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| algorithm.backend() == backend)
        .collect();
    let mut bytes = arguments.bytes.clone();
    bytes.sort_unstable();
    bytes.dedup();
    let specs: Vec<ReductionSpec> = bytes
        .iter()
        .map(|bytes| ReductionSpec::new(dtype, Op::Sum, *bytes))
        .collect::<Result<_, _>>()?;
    let daemon = PrivateDaemon::start_own(&[])?;
    let workers: Vec<TuneSpec> = world_size
        .ranks()
        .map(|rank| TuneSpec {
            socket: daemon.socket().to_owned(),
            rank: rank.get(),
            world_size: world_size.get(),
            backend: backend.to_string(),
            lane: lane.to_string(),
            dtype: dtype.to_string(),
            sizes: specs.iter().map(|spec| spec.num_elems).collect(),
            algorithms: algorithms.iter().map(Algorithm::to_string).collect(),
            rounds: arguments.rounds as usize,
        })
        .collect();
    let ranks = Children::<TuneReport>::start("tune-worker", &workers)?;
    // By rank: by size: by candidate.
    let mut heard: Vec<Vec<Vec<Trial>>> = vec![Vec::new(); workers.len()];
    let mut done = vec![false; workers.len()];
    while done.contains(&false) {
        match ranks.next(SILENCE)? {
            Ok((rank, TuneReport::Size(trials))) => {
                if let Some(of) = heard.get_mut(rank) {
                    of.push(trials);
                }
            }
            Ok((rank, TuneReport::Done)) => {
                if let Some(done) = done.get_mut(rank) {
                    *done = true;
                }
            }
            Err(rank) if done.get(rank) == Some(&true) => {}
            Err(rank) => return Err(ChildError::Ended(rank).into()),
        }
    }
    let asked = machine.communicator(world_size, Some(backend), Some(lane));
    let mut choices = Vec::new();
    let mut rows = Vec::new();
    for (number, (bytes, spec)) in bytes.iter().zip(&specs).enumerate() {
        let mut timed: Vec<(Algorithm, f64, f64)> = Vec::new();
        for (place, algorithm) in algorithms.iter().enumerate() {
            let of_ranks: Vec<&Trial> = heard
                .iter()
                .filter_map(|rank| rank.get(number)?.get(place))
                .collect();
            if let Some(wrong) = of_ranks.iter().find_map(|trial| match trial {
                Trial::Wrong(wrong) => Some(*wrong),
                Trial::Timed(_) | Trial::Refused(_) => None,
            }) {
                return Err(TuneError::Wrong {
                    algorithm: *algorithm,
                    bytes: *bytes,
                    dtype,
                    world_size: world_size.get(),
                    lane,
                    wrong,
                });
            }
            if let Some((us, spread_us)) = merge(&of_ranks) {
                timed.push((*algorithm, us, spread_us));
                rows.push(TunedRow {
                    bytes: *bytes,
                    algorithm: algorithm.to_string(),
                    us,
                    spread_us,
                });
            }
        }
        let question = Question {
            num_elems: spec.num_elems as u64,
            dtype,
            op: Op::Sum,
        };
        let planned = asked.plan(question, None).ok().map(|plan| plan.algorithm);
        if let Some(algorithm) = faster(&timed, planned) {
            choices.push(TunedChoice {
                up_to_bytes: *bytes,
                algorithm: algorithm.to_string(),
            });
        }
    }
    Ok(TunedSet {
        world_size: world_size.get(),
        gpus: asked.limits.map_or(0, |limits| limits.gpus),
        lane: lane.to_string(),
        dtype: dtype.to_string(),
        choices: expressible(backend, lane, joined(choices)),
        rows,
    })
}

/// Of all ranks: the median of the slowest in each round, and what lies between its quartiles.
fn merge(trials: &[&Trial]) -> Option<(f64, f64)> {
    let mut slowest: Vec<f64> = Vec::new();
    for trial in trials {
        let Trial::Timed(samples) = trial else {
            return None;
        };
        slowest.resize(samples.len().max(slowest.len()), 0.0);
        for (into, sample) in slowest.iter_mut().zip(samples) {
            *into = into.max(*sample);
        }
    }
    slowest.sort_by(f64::total_cmp);
    let at = |part: usize| slowest.get(slowest.len() * part / 4).copied();
    Some((at(2)?, at(3)? - at(1)?))
}

/// The one to keep: what the plan takes, unless another is faster by more than the spreads of both.
fn faster(timed: &[(Algorithm, f64, f64)], planned: Option<Algorithm>) -> Option<Algorithm> {
    let best = timed
        .iter()
        .min_by(|one, other| one.1.total_cmp(&other.1))?;
    let incumbent = timed
        .iter()
        .find(|(algorithm, ..)| Some(*algorithm) == planned);
    Some(match incumbent {
        Some((algorithm, us, spread)) if best.1 + best.2.max(*spread) >= *us => *algorithm,
        Some(_) | None => best.0,
    })
}

/// Neighbours of one algorithm as one choice.
fn joined(choices: Vec<TunedChoice>) -> Vec<TunedChoice> {
    let mut joined: Vec<TunedChoice> = Vec::new();
    for choice in choices {
        match joined.last_mut() {
            Some(last) if last.algorithm == choice.algorithm => {
                last.up_to_bytes = choice.up_to_bytes
            }
            Some(_) | None => joined.push(choice),
        }
    }
    joined
}

/// Lane delegated of the host has one_shot up to one size, and two_shot beyond: what comes back to it is noise.
fn expressible(backend: Backend, lane: Lane, choices: Vec<TunedChoice>) -> Vec<TunedChoice> {
    match (backend, lane) {
        (Backend::Host, Lane::Delegated) => {
            let last = choices.last().map(|choice| choice.up_to_bytes);
            let is_one = |choice: &TunedChoice| choice.algorithm == Algorithm::OneShot.name();
            let first = choices.into_iter().next().filter(is_one);
            let rest = last.filter(|last| first.as_ref().is_none_or(|one| one.up_to_bytes < *last));
            let rest = rest.map(|up_to_bytes| TunedChoice {
                up_to_bytes,
                algorithm: Algorithm::TwoShot.to_string(),
            });
            first.into_iter().chain(rest).collect()
        }
        (Backend::Host, Lane::Rpc | Lane::Resident) | (Backend::Cuda, _) => choices,
    }
}

fn print_set(set: &TunedSet) {
    println!(
        "{} ranks on {} GPUs, lane {}, {}",
        set.world_size, set.gpus, set.lane, set.dtype
    );
    let mut bytes: Vec<u64> = set.rows.iter().map(|row| row.bytes).collect();
    bytes.dedup();
    for bytes in bytes {
        let mut rows: Vec<&TunedRow> = set.rows.iter().filter(|row| row.bytes == bytes).collect();
        rows.sort_by(|one, other| one.us.total_cmp(&other.us));
        let all: Vec<String> = rows
            .iter()
            .map(|row| {
                format!(
                    "{} {} +-{}",
                    row.algorithm,
                    time(row.us),
                    time(row.spread_us / 2.0)
                )
            })
            .collect();
        println!("{bytes:>10}  {}", all.join(", "));
    }
    let kept: Vec<String> = set
        .choices
        .iter()
        .map(|choice| format!("{} up to {}", choice.algorithm, choice.up_to_bytes))
        .collect();
    println!("      kept  {}", kept.join(", "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_is_kept_only_beyond_noise() {
        let timed = |one: f64, other: f64, spread: f64| {
            vec![
                (Algorithm::OneShotPush, one, spread),
                (Algorithm::TwoShotPush, other, spread),
            ]
        };
        let planned = Some(Algorithm::OneShotPush);
        assert_eq!(faster(&timed(10.0, 9.0, 2.0), planned), planned);
        assert_eq!(
            faster(&timed(10.0, 7.0, 2.0), planned),
            Some(Algorithm::TwoShotPush)
        );
        assert_eq!(
            faster(&timed(10.0, 9.0, 2.0), None),
            Some(Algorithm::TwoShotPush)
        );
        assert_eq!(faster(&[], planned), None);
    }

    #[test]
    fn a_round_is_as_slow_as_its_slowest_rank() {
        let one = Trial::Timed(vec![1.0, 5.0, 3.0, 2.0]);
        let other = Trial::Timed(vec![4.0, 1.0, 1.0, 1.0]);
        assert_eq!(merge(&[&one, &other]), Some((4.0, 2.0)));
        assert_eq!(merge(&[&one, &Trial::Refused("no".to_owned())]), None);
    }

    #[test]
    fn neighbours_are_joined() {
        let choice = |up_to_bytes, algorithm: &str| TunedChoice {
            up_to_bytes,
            algorithm: algorithm.to_owned(),
        };
        let all = vec![
            choice(1, "a"),
            choice(2, "a"),
            choice(3, "b"),
            choice(4, "a"),
        ];
        assert_eq!(
            joined(all),
            vec![choice(2, "a"), choice(3, "b"), choice(4, "a")]
        );
    }
}
