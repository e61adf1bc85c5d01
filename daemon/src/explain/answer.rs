//! One answer: the plan for a reduction, beside everything that was not chosen.
//!
//! Owns its words and its JSON form. Called by `explain`.

use crate::explain::{Asked, Machine, Question};
use crate::plan::model::{Cost, RING_US, RPC_US};
use crate::plan::{Plan, Shape};
use crate::simulate::{self, Fixed};
use crate::spread::time;
use crate::workload::{ReductionSpec, Workload};
use allreduce_contract::{Algorithm, Backend, Lane};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Version of the JSON forms here.
const SCHEMA_VERSION: u32 = 1;

/// The answer.
#[derive(Debug, Serialize)]
pub(crate) struct Answer {
    schema_version: u32,
    topology: String,
    origin: String,
    fingerprint: String,
    fabric: String,
    world_size: u32,
    gpus: usize,
    bytes: u64,
    dtype: String,
    op: String,
    lane: Option<String>,
    lane_reason: String,
    /// What is run; none if it is refused.
    algorithm: Option<String>,
    shape: Option<String>,
    predicted_us: Option<f64>,
    floor_us: Option<f64>,
    split: Option<Split>,
    candidates: Vec<Candidate>,
    /// Why this one, or why none.
    reason: String,
    /// Of the table that was named: whether it is of this topology, and so obeyed.
    tuned: Option<&'static str>,
}

/// A prediction's parts, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Split {
    /// What the lane takes to get there and back.
    trigger_us: f64,
    launch_us: f64,
    hops_us: f64,
    wire_us: f64,
    reduce_us: f64,
}

/// An algorithm that was looked at.
#[derive(Debug, Serialize)]
struct Candidate {
    algorithm: String,
    predicted_us: Option<f64>,
    split: Option<Split>,
    /// By `tune`, interpolated.
    measured_us: Option<f64>,
    /// Why it cannot be launched.
    refused: Option<String>,
}

fn split(lane: Lane, cost: &Cost, len_bytes: u64, launches: u64) -> Split {
    let bytes = len_bytes as f64;
    let times = launches as f64;
    Split {
        trigger_us: match lane {
            Lane::Rpc => RPC_US,
            Lane::Resident => RING_US,
            Lane::Delegated => 0.0,
        },
        launch_us: cost.launch_us * times,
        hops_us: cost.hops_us * times,
        wire_us: cost.wire_us_per_byte * bytes,
        reduce_us: cost.reduce_us_per_byte * bytes,
    }
}

impl Split {
    pub(super) fn total_us(self) -> f64 {
        self.trigger_us + self.launch_us + self.hops_us + self.wire_us + self.reduce_us
    }
}

/// A reduction's prediction, if there is a model of what it runs.
pub(super) fn predicted(asked: &Asked, plan: &Plan, question: Question) -> Option<Split> {
    let lane = asked.lane.as_ref().ok()?.lane;
    match (asked.backend, lane) {
        (Backend::Cuda, Lane::Rpc | Lane::Delegated | Lane::Resident)
        | (Backend::Host, Lane::Delegated) => {}
        (Backend::Host, Lane::Rpc | Lane::Resident) => return None,
    }
    let cost = asked.costs.cost(plan.algorithm, question.dtype);
    let launches = plan.launches(question.num_elems);
    (cost != Cost::default()).then(|| split(lane, &cost, question.len_bytes(), launches))
}

fn shape_words(plan: &Plan, question: Question) -> String {
    match plan.shape {
        Shape::Host { threads: 1 } => "1 thread".to_owned(),
        Shape::Host { threads } => format!("{threads} threads"),
        Shape::Copies { .. } => match plan.launches(question.num_elems) {
            1 => "copy engines, 1 piece".to_owned(),
            several => format!("copy engines, {several} pieces"),
        },
        Shape::Cuda {
            blocks,
            data_threads,
            ..
        } => {
            let launches = match plan.launches(question.num_elems) {
                1 => "1 launch".to_owned(),
                several => format!("{several} launches"),
            };
            format!("{blocks} blocks x {data_threads} threads of each rank, {launches}")
        }
    }
}

impl Answer {
    pub(crate) fn to(machine: &Machine, asked: &Asked, question: Question) -> Self {
        let len_bytes = question.len_bytes();
        let lane = asked.lane.as_ref().ok().map(|choice| choice.lane);
        let outcome = asked.plan(question, None);
        let planned = outcome.as_ref().ok();
        let chosen = planned.and_then(|plan| predicted(asked, plan, question));
        let mut candidates: Vec<Candidate> = Algorithm::ALL
            .into_iter()
            .filter(|algorithm| algorithm.backend() == asked.backend)
            .map(|algorithm| candidate(machine, asked, question, algorithm))
            .collect();
        let rank = |one: &Candidate| one.predicted_us.unwrap_or(f64::INFINITY);
        candidates.sort_by(|one, other| rank(one).total_cmp(&rank(other)));
        let floor_us = asked.costs.floor_us(question.dtype, len_bytes);
        Self {
            schema_version: SCHEMA_VERSION,
            topology: machine.topology.name().to_owned(),
            origin: machine.origin.clone(),
            fingerprint: machine.topology.fingerprint(),
            fabric: asked.costs.fabric.to_string(),
            world_size: asked.world_size.get(),
            gpus: machine.topology.gpus().len(),
            bytes: len_bytes,
            dtype: question.dtype.to_string(),
            op: question.op.to_string(),
            lane: lane.map(|lane| lane.to_string()),
            lane_reason: match &asked.lane {
                Ok(choice) => choice.reason.clone(),
                Err(refusal) => refusal.to_string(),
            },
            algorithm: planned.map(|plan| plan.algorithm.to_string()),
            shape: planned.map(|plan| shape_words(plan, question)),
            predicted_us: chosen.map(Split::total_us),
            floor_us: (floor_us.is_finite() && floor_us > 0.0).then_some(floor_us),
            split: chosen,
            candidates,
            reason: match &outcome {
                Ok(plan) => plan.basis.words().to_owned(),
                Err(refusal) => refusal.to_string(),
            },
            tuned: machine
                .tuned
                .as_ref()
                .map(|table| match machine.is_tuned_by(table) {
                    true => "of this topology, and obeyed",
                    false => "of another topology: shown, and not obeyed",
                }),
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "topology   {} ({}): {} GPUs, {}",
            self.topology, self.origin, self.gpus, self.fabric
        );
        let _ = writeln!(
            out,
            "asked      {} ranks, {} bytes {} {}",
            self.world_size, self.bytes, self.dtype, self.op
        );
        let lane = self.lane.as_deref().unwrap_or("none");
        let _ = writeln!(out, "lane       {lane} ({})", self.lane_reason);
        match (&self.algorithm, &self.shape) {
            (Some(algorithm), Some(shape)) => {
                let _ = writeln!(out, "plan       {algorithm}, {shape}");
                let _ = writeln!(out, "reason     {}", self.reason);
            }
            (None, _) | (_, None) => {
                let _ = writeln!(out, "refused    {}", self.reason);
            }
        }
        if let Some(split) = self.split {
            let _ = writeln!(
                out,
                "predicted  {} = {}launch {} + hops {} + wire {} + reduce {} (a prediction, nothing was measured)",
                time(split.total_us()),
                match split.trigger_us {
                    0.0 => String::new(),
                    us => format!("trigger {} + ", time(us)),
                },
                time(split.launch_us),
                time(split.hops_us),
                time(split.wire_us),
                time(split.reduce_us)
            );
        }
        if let Some(tuned) = self.tuned {
            let _ = writeln!(out, "tuned      {tuned}");
        }
        if let Some(floor) = self.floor_us {
            let _ = writeln!(
                out,
                "floor      {} (what these links allow any algorithm, by the same model)",
                time(floor)
            );
        }
        let _ = writeln!(
            out,
            "\n{:<22} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "candidate", "predicted", "launch", "hops", "wire", "reduce", "measured"
        );
        for candidate in &self.candidates {
            let column = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), time);
            if let Some(why) = &candidate.refused {
                let _ = writeln!(out, "{:<22} refused: {why}", candidate.algorithm);
                continue;
            }
            let of = candidate.split;
            let _ = writeln!(
                out,
                "{:<22} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
                candidate.algorithm,
                column(candidate.predicted_us),
                column(of.map(|of| of.launch_us)),
                column(of.map(|of| of.hops_us)),
                column(of.map(|of| of.wire_us)),
                column(of.map(|of| of.reduce_us)),
                column(candidate.measured_us)
            );
        }
        out
    }
}

fn candidate(
    machine: &Machine,
    asked: &Asked,
    question: Question,
    algorithm: Algorithm,
) -> Candidate {
    let outcome = asked.plan(question, Some(algorithm));
    let of = outcome
        .as_ref()
        .ok()
        .and_then(|plan| predicted(asked, plan, question));
    let gpus = asked.limits.map_or(0, |limits| limits.gpus);
    let tuned = machine.tuned.as_ref().and_then(|table| {
        let lane = asked.lane.as_ref().ok()?.lane;
        table.set(asked.world_size, gpus, lane, question.dtype)
    });
    Candidate {
        algorithm: algorithm.to_string(),
        predicted_us: of.map(Split::total_us),
        split: of,
        measured_us: tuned.and_then(|set| set.measured_us(algorithm, question.len_bytes())),
        refused: outcome.err().map(|refusal| refusal.to_string()),
    }
}

/// A step of a workload, for every algorithm.
#[derive(Debug, Serialize)]
pub(crate) struct Steps {
    schema_version: u32,
    topology: String,
    fabric: String,
    world_size: u32,
    workload: String,
    reductions: usize,
    steps: Vec<Step>,
}

/// With one algorithm, or the plan's choice for each reduction.
#[derive(Debug, Serialize)]
struct Step {
    algorithm: String,
    /// Of all reductions, by the simulation.
    simulated_us: Option<f64>,
    /// By the closed form.
    predicted_us: Option<f64>,
    refused: Option<String>,
}

/// Replays a step on a model of the links. Reductions that are alike take alike, so each kind is asked about once.
pub(crate) fn simulate(machine: &Machine, asked: &Asked, workload: &Workload) -> Steps {
    let mut kinds: BTreeMap<ReductionSpec, usize> = BTreeMap::new();
    for spec in &workload.reductions {
        *kinds.entry(*spec).or_default() += 1;
    }
    let algorithms = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| algorithm.backend() == asked.backend);
    let steps = std::iter::once(None)
        .chain(algorithms.map(Some))
        .map(|algorithm| {
            let each = kinds.iter().map(|(spec, count)| {
                let (simulated, closed) = one(machine, asked, *spec, algorithm)?;
                let count = *count as f64;
                Ok((simulated * count, closed * count))
            });
            let sum = each.reduce(|sum: Result<_, String>, next| {
                let ((simulated, closed), next) = (sum?, next?);
                Ok((simulated + next.0, closed + next.1))
            });
            let sum = sum.unwrap_or(Ok((0.0, 0.0)));
            Step {
                algorithm: algorithm.map_or_else(
                    || "auto (the plan)".to_owned(),
                    |algorithm| algorithm.to_string(),
                ),
                simulated_us: sum.as_ref().ok().map(|(simulated, _)| *simulated),
                predicted_us: sum.as_ref().ok().map(|(_, closed)| *closed),
                refused: sum.err(),
            }
        });
    Steps {
        schema_version: SCHEMA_VERSION,
        topology: machine.topology.name().to_owned(),
        fabric: asked.costs.fabric.to_string(),
        world_size: asked.world_size.get(),
        workload: workload.name.clone(),
        reductions: workload.reductions.len(),
        steps: steps.collect(),
    }
}

/// One reduction: simulated, and by the closed form; or why not.
fn one(
    machine: &Machine,
    asked: &Asked,
    spec: ReductionSpec,
    algorithm: Option<Algorithm>,
) -> Result<(f64, f64), String> {
    let question = Question {
        num_elems: spec.num_elems as u64,
        dtype: spec.dtype,
        op: spec.op,
    };
    let plan = asked
        .plan(question, algorithm)
        .map_err(|refusal| refusal.to_string())?;
    let launches = plan.launches(question.num_elems) as f64;
    let island = asked.limits.map_or(1, |limits| limits.island_size);
    let simulated = simulate::reduce(
        &machine.topology,
        &asked.placement,
        plan.algorithm,
        spec.dtype.size_bytes(),
        usize::try_from(island).unwrap_or(1),
        (spec.len_bytes() as f64 / launches) as usize,
        Fixed::of(&machine.topology),
    );
    let simulated = simulated.map_err(|why| why.to_string())?.us * launches;
    let split = predicted(asked, &plan, question);
    Ok((
        simulated + split.map_or(0.0, |split| split.trigger_us),
        split.map_or(0.0, Split::total_us),
    ))
}

impl Steps {
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{}, {} ranks, {}: {} ({} reductions a step). Times of a step; simulated, and predicted by the closed form.",
            self.topology, self.world_size, self.fabric, self.workload, self.reductions
        );
        let _ = writeln!(
            out,
            "\n{:<22} {:>12} {:>12}",
            "algorithm", "simulated", "predicted"
        );
        for step in &self.steps {
            match (step.simulated_us, step.predicted_us, &step.refused) {
                (_, _, Some(why)) => {
                    let _ = writeln!(out, "{:<22} refused: {why}", step.algorithm);
                }
                (simulated, predicted, None) => {
                    let column = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), time);
                    let _ = writeln!(
                        out,
                        "{:<22} {:>12} {:>12}",
                        step.algorithm,
                        column(simulated),
                        column(predicted)
                    );
                }
            }
        }
        out
    }
}
