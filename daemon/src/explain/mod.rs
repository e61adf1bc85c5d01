//! `allreduced explain`: asks the plan, for this machine or one that is only described.
//!
//! Owns the question and the answer in words, JSON and pictures. What is asked is the function that executors obey
//! ([`crate::plan::plan`]), with what a communicator would know on such a machine, so there is no second opinion. It
//! touches no GPU. Refuses to measure: its times are predictions, and called so.

mod answer;
mod map;

use crate::cli::{Choice, parse_auto};
use crate::config::{Config, Host};
use crate::files;
use crate::plan::tuned::{TunedError, TunedTable};
use crate::plan::{
    self, GpuLimits, LaneChoice, Plan, PlanRequest, Refusal, choose_lane, lane_geometry,
    model::Costs, tuned_geometry,
};
use crate::topology::{self, LoadError, Topology};
use crate::workload::{self, ReductionSpec, Workload, WorkloadError};
use allreduce_contract::{
    Algorithm, Backend, BadWorldSize, Dtype, Lane, MAX_WORLD_SIZE, Op, WorldSize,
};
use answer::Answer;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A topology file, or a preset's name (docs/topology.md); by default this machine.
    #[arg(long, value_name = "FILE|PRESET")]
    topology: Option<String>,
    /// Number of ranks; by default one for each GPU.
    #[arg(long, value_name = "N")]
    world_size: Option<u32>,
    /// Bytes of a tensor.
    #[arg(long, value_name = "B", default_value_t = 43_008)]
    bytes: u64,
    /// Its element type.
    #[arg(long, value_name = "D", default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// The operator.
    #[arg(long, value_name = "O", default_value_t = Op::Sum)]
    op: Op,
    /// Where windows live: auto (cuda where there are GPUs), host, cuda.
    #[arg(long, value_name = "B", default_value = "auto", value_parser = parse_auto::<Backend>)]
    backend: Choice<Backend>,
    /// The lane: auto, rpc, resident, delegated.
    #[arg(long, value_name = "L", default_value = "auto", value_parser = parse_auto::<Lane>)]
    lane: Choice<Lane>,
    /// What `tune` has measured, to be shown beside the prediction, and to be obeyed if it was measured on this topology.
    #[arg(long, value_name = "FILE")]
    tuned: Option<PathBuf>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
    /// The algorithm for every world size and size instead of one.
    #[arg(long, conflicts_with_all = ["world_size", "bytes", "simulate"])]
    sweep: bool,
    /// Draw (SVG): the predicted latency of every algorithm over size; with --sweep the map of algorithms.
    #[arg(long, value_name = "FILE", conflicts_with = "simulate")]
    plot: Option<PathBuf>,
    /// Replay a workload's step on a model of the links that flows share, for every algorithm.
    #[arg(long)]
    simulate: bool,
    /// With --simulate: the workload, as `demo` takes it.
    #[arg(long, value_name = "NAME|FILE", default_value = workload::DEFAULT, requires = "simulate")]
    workload: String,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum ExplainError {
    #[error(transparent)]
    Topology(#[from] LoadError),
    #[error(transparent)]
    WorldSize(#[from] BadWorldSize),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Tuned(#[from] TunedError),
    #[error("{path}: {error}")]
    Write { path: String, error: std::io::Error },
    #[error(
        "there is nothing to draw: everything is refused, or nothing is predicted (leave --plot out to see why)"
    )]
    NoMap,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// A machine, as communicators of it would know it.
pub(crate) struct Machine {
    pub(crate) topology: Topology,
    /// Where the topology is from.
    pub(crate) origin: String,
    pub(crate) config: Config,
    pub(crate) tuned: Option<TunedTable>,
}

/// A communicator of a machine, before it is made.
pub(crate) struct Asked {
    pub(crate) backend: Backend,
    pub(crate) world_size: WorldSize,
    /// The GPU of each rank.
    pub(crate) placement: Vec<usize>,
    pub(crate) limits: Option<GpuLimits>,
    pub(crate) costs: Costs,
    pub(crate) lane: Result<LaneChoice, Refusal>,
    processors: usize,
}

impl Machine {
    /// The communicator of so many ranks, dealt out to the GPUs in order, with the backend and the lane that they ask for; without,
    /// with the GPUs that there are.
    pub(crate) fn communicator(
        &self,
        world_size: WorldSize,
        backend: Option<Backend>,
        lane: Option<Lane>,
    ) -> Asked {
        let gpus = self.topology.gpus().len();
        let backend = backend.unwrap_or(match gpus {
            0 => Backend::Host,
            _ => Backend::Cuda,
        });
        let gpus = match backend {
            Backend::Host => 0,
            Backend::Cuda => gpus,
        };
        let ranks = world_size.as_usize();
        let placement: Vec<usize> = match gpus {
            0 => vec![topology::NO_GPU; ranks],
            gpus => (0..ranks)
                .map(|rank| rank * gpus.min(ranks) / ranks)
                .collect(),
        };
        let limits = (gpus > 0).then(|| {
            plan::described_limits(&self.config.cuda, &self.topology, world_size, &placement)
        });
        let island_size = limits.map_or(1, |limits| limits.island_size);
        let used = limits.map_or(0, |limits| limits.gpus);
        let mut costs = Costs::of(&self.topology, &placement, island_size);
        if let Some(table) = self.tuned.as_ref().filter(|table| self.is_tuned_by(table)) {
            costs = costs.with_tuned(table, world_size, used);
        }
        let asked: Vec<Lane> = lane.into_iter().collect();
        let wanted = vec![asked.as_slice(); world_size.as_usize()];
        Asked {
            backend,
            world_size,
            placement,
            lane: match (backend, gpus) {
                (Backend::Cuda, 0) => Err(Refusal::NoSuchBackend {
                    backend,
                    reason: "the topology has no GPUs",
                }),
                (Backend::Host | Backend::Cuda, _) => {
                    choose_lane(backend, &wanted, limits.as_ref())
                }
            },
            limits,
            costs,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Whether a table was measured on this topology.
    pub(crate) fn is_tuned_by(&self, table: &TunedTable) -> bool {
        table.fingerprint == self.topology.fingerprint()
    }
}

/// A reduction that is asked about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    pub(crate) num_elems: u64,
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
}

impl Question {
    /// Bytes of a rank's tensor.
    pub(crate) const fn len_bytes(&self) -> u64 {
        self.num_elems * self.dtype.size_bytes() as u64
    }
}

impl Asked {
    /// What is run on the lane that was chosen, by the plan's choice or one that is named.
    ///
    /// # Errors
    /// The plan's refusal, or that of the lane.
    pub(crate) fn plan(
        &self,
        question: Question,
        algorithm: Option<Algorithm>,
    ) -> Result<Plan, Refusal> {
        let choice = self.lane.as_ref().map_err(Clone::clone)?;
        plan::plan(self.request(choice.lane, question, algorithm))
    }

    /// What the plan is asked.
    pub(crate) fn request(
        &self,
        lane: Lane,
        question: Question,
        algorithm: Option<Algorithm>,
    ) -> PlanRequest<'_> {
        PlanRequest {
            backend: self.backend,
            lane,
            world_size: self.world_size,
            num_elems: question.num_elems,
            dtype: question.dtype,
            op: question.op,
            algorithm,
            // What holds for any tensors.
            in_place: true,
            max_threads: self.processors,
            geometry: tuned_geometry(
                lane_geometry(lane, self.world_size, self.processors, &Host::default()),
                Some(&self.costs),
            ),
            gpus: self.limits,
            costs: Some(&self.costs),
        }
    }
}

/// Answers.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let written = explain(arguments).and_then(|text| {
        let written = std::io::stdout().write_all(text.as_bytes());
        written.map_err(|error| ExplainError::Write {
            path: "standard output".to_owned(),
            error,
        })
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("allreduced: {error}");
            ExitCode::FAILURE
        }
    }
}

fn explain(arguments: &Arguments) -> Result<String, ExplainError> {
    let config = Config::default();
    let (topology, origin) = match &arguments.topology {
        Some(name) => topology::find(name)?,
        None => topology::load(&config.topology)?,
    };
    let tuned = arguments
        .tuned
        .as_deref()
        .map(TunedTable::read)
        .transpose()?;
    let machine = Machine {
        topology,
        origin,
        config,
        tuned,
    };
    if arguments.sweep {
        let map = map::sweep(
            &machine,
            (arguments.backend.0, arguments.lane.0),
            arguments.dtype,
            arguments.op,
        );
        draw(arguments.plot.as_deref(), || map.svg())?;
        return Ok(match arguments.json {
            true => json(&map)?,
            false => map.table(),
        });
    }
    let gpus = u32::try_from(machine.topology.gpus().len()).unwrap_or(MAX_WORLD_SIZE);
    let default = if gpus == 0 { 4 } else { gpus };
    let world_size = WorldSize::new(arguments.world_size.unwrap_or(default))?;
    let asked = machine.communicator(world_size, arguments.backend.0, arguments.lane.0);
    if arguments.simulate {
        let workload = Workload::find(&arguments.workload)?;
        let steps = answer::simulate(&machine, &asked, &workload);
        return Ok(match arguments.json {
            true => json(&steps)?,
            false => steps.table(),
        });
    }
    let spec = ReductionSpec::new(arguments.dtype, arguments.op, arguments.bytes)?;
    let question = Question {
        num_elems: spec.num_elems as u64,
        dtype: spec.dtype,
        op: spec.op,
    };
    let answer = Answer::to(&machine, &asked, question);
    draw(arguments.plot.as_deref(), || {
        map::lines(&machine, &asked, question)
    })?;
    Ok(match arguments.json {
        true => json(&answer)?,
        false => answer.text(),
    })
}

fn draw(path: Option<&Path>, picture: impl FnOnce() -> Option<String>) -> Result<(), ExplainError> {
    let Some(path) = path else {
        return Ok(());
    };
    let picture = picture().ok_or(ExplainError::NoMap)?;
    files::write_text(path, &picture).map_err(|error| ExplainError::Write {
        path: path.display().to_string(),
        error,
    })
}

fn json(value: &impl serde::Serialize) -> Result<String, ExplainError> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
