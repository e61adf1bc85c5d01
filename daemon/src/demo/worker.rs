//! One rank of the demo: a process that reduces through the client crate, as a serving worker does.
//!
//! Owns the loop: fill, reduce (timed), check. It reads its [`WorkerSpec`] from standard input and
//! prints one [`Report`] a line on standard output.

use crate::demo::tensor::{AnyTensor, Rank, TensorError};
use crate::demo::verify::TensorId;
use crate::device::{self, DeviceError, WorkerStream};
use crate::wire::{print_line, read_line};
use crate::workload::{ReductionSpec, Workload};
use allreduce_client::blocking::Client;
use allreduce_client::{AllReduceOptions, BufferError, ConnectError, JoinError, JoinOptions};
use allreduce_contract::cuda::CudaError;
use allreduce_contract::{Backend, Dtype, Lane, Op};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

/// Bytes of buffers that a rank holds at once, unless a single tensor is larger. A step that needs more
/// is done in batches; filling and checking happen between them, outside the times.
const BATCH_BYTES: usize = 64 << 20;

/// What a worker is told.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WorkerSpec {
    pub(crate) socket: PathBuf,
    pub(crate) communicator: String,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) backend: Option<String>,
    /// Its GPU, by UUID; dealt out by rank if none is named.
    #[serde(default)]
    pub(crate) device: Option<String>,
    pub(crate) lane: Option<String>,
    pub(crate) steps: u64,
    pub(crate) seed: u64,
    pub(crate) reductions: Vec<(String, String, usize)>,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// It joined.
    Joined {
        backend: String,
        lane: String,
        lane_reason: String,
        /// The GPU it uses, if it uses one.
        device: Option<String>,
        warnings: Vec<String>,
    },
    /// It did and checked these reductions of a step: a sign of life in a long one.
    Progress { reductions: u64 },
    /// It did a step.
    Step {
        step_us: f64,
        reductions: Vec<ReductionReport>,
    },
    /// It is through, and has left.
    Done,
}

/// One reduction of a step.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReductionReport {
    pub(crate) us: f64,
    pub(crate) algorithm: String,
    /// Of the result's bits.
    pub(crate) fingerprint: u64,
    /// Elements that are wrong; none where another rank checks this reduction.
    pub(crate) wrong: Option<usize>,
}

/// Why a worker gives up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerError {
    #[error("the worker's spec: {0}")]
    Spec(String),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error(transparent)]
    Buffer(#[from] BufferError),
    #[error(transparent)]
    Reduce(#[from] TensorError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Bytes that a reduction takes of an arena.
fn arena_bytes(spec: &ReductionSpec) -> usize {
    spec.len_bytes().next_multiple_of(256).max(256)
}

/// Cuts a step into batches that fit.
fn batches(reductions: &[ReductionSpec]) -> Vec<&[ReductionSpec]> {
    let mut batches = Vec::new();
    let mut rest = reductions;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fitting = rest.iter().take_while(|spec| {
            bytes += arena_bytes(spec);
            bytes <= BATCH_BYTES
        });
        let count = fitting.count().max(1);
        let (batch, after) = rest.split_at(count);
        batches.push(batch);
        rest = after;
    }
    batches
}

/// Runs a worker process.
pub(crate) fn run() -> Result<(), WorkerError> {
    let spec: WorkerSpec = read_line().map_err(|error| WorkerError::Spec(error.to_string()))?;
    let bad = |error: &dyn std::fmt::Display| WorkerError::Spec(error.to_string());
    let reductions: Vec<ReductionSpec> = spec
        .reductions
        .iter()
        .map(|(dtype, op, num_elems)| {
            Ok(ReductionSpec {
                dtype: dtype.parse().map_err(|error| bad(&error))?,
                op: op.parse().map_err(|error| bad(&error))?,
                num_elems: *num_elems,
            })
        })
        .collect::<Result<_, WorkerError>>()?;
    let batches = batches(&reductions);
    let arena_len_bytes = batches
        .iter()
        .map(|batch| batch.iter().map(arena_bytes).sum::<usize>())
        .max()
        .unwrap_or(0)
        // One more for the barrier's buffer.
        + 256;
    let mut options = JoinOptions::new(&spec.communicator, spec.rank, spec.world_size)
        .arena_len_bytes(arena_len_bytes as u64)
        .client_name(format!("demo-{}", spec.rank));
    let backend: Option<Backend> = spec
        .backend
        .as_ref()
        .map(|backend| backend.parse().map_err(|error| bad(&error)))
        .transpose()?;
    if let Some(backend) = backend {
        options = options.backend(backend);
    }
    let device = match &spec.device {
        Some(uuid) => Some(device::of_uuid(uuid)?),
        None => device::of_rank(backend, spec.rank)?,
    };
    if let Some(device) = &device {
        options = options.device(device.clone());
    }
    if let Some(lane) = &spec.lane {
        let lane: Lane = lane.parse().map_err(|error| bad(&error))?;
        options = options.lanes([lane]);
    }
    let communicator = Client::connect(&spec.socket)?.join(options)?;
    let on_gpu = communicator.backend() == Backend::Cuda;
    let device = device.filter(|_| on_gpu);
    print_line(&Report::Joined {
        backend: communicator.backend().to_string(),
        lane: communicator.lane().to_string(),
        lane_reason: communicator.lane_reason().to_owned(),
        device: device.as_ref().map(|device| device.to_string()),
        warnings: communicator.warnings().to_vec(),
    })?;
    let stream = device.map(WorkerStream::on).transpose()?;
    let rank = Rank {
        communicator: &communicator,
        stream: stream.as_ref(),
    };
    // An empty tensor: reducing it is a barrier.
    let empty = ReductionSpec {
        dtype: Dtype::F32,
        op: Op::Sum,
        num_elems: 0,
    };
    let mut runner = Runner {
        barrier: Some(AnyTensor::allocate(&rank, empty)?),
        tensors: Vec::new(),
        shape: Vec::new(),
        rank: &rank,
        spec: &spec,
    };
    for step in 0..spec.steps {
        let report = runner.run_step(step, &batches)?;
        print_line(&report)?;
    }
    drop(runner);
    communicator.leave();
    print_line(&Report::Done)?;
    Ok(())
}

/// What lasts from step to step.
struct Runner<'a> {
    rank: &'a Rank<'a>,
    spec: &'a WorkerSpec,
    barrier: Option<AnyTensor>,
    /// The last batch's tensors, for the next batch of the same shape.
    tensors: Vec<AnyTensor>,
    shape: Vec<ReductionSpec>,
}

impl Runner<'_> {
    fn run_step(&mut self, step: u64, batches: &[&[ReductionSpec]]) -> Result<Report, WorkerError> {
        let mut reductions = Vec::new();
        let mut step_us = 0.0;
        for batch in batches {
            let first = TensorId {
                seed: self.spec.seed,
                step,
                reduction: reductions.len() as u64,
            };
            step_us += self.run_batch(first, batch, &mut reductions)?;
            print_line(&Report::Progress {
                reductions: batch.len() as u64,
            })?;
        }
        Ok(Report::Step {
            step_us,
            reductions,
        })
    }

    /// Fills, waits for the others, reduces back to back, checks; the time of the reductions.
    fn run_batch(
        &mut self,
        first: TensorId,
        batch: &[ReductionSpec],
        reports: &mut Vec<ReductionReport>,
    ) -> Result<f64, WorkerError> {
        let WorkerSpec {
            rank: number,
            world_size,
            ..
        } = *self.spec;
        let ids = (first.reduction..).map(|reduction| TensorId { reduction, ..first });
        if self.shape != batch {
            self.tensors.clear();
            self.shape = batch.to_vec();
            for spec in batch {
                let tensor = AnyTensor::allocate(self.rank, *spec)?;
                self.tensors.push(tensor);
            }
        }
        for (tensor, id) in self.tensors.iter_mut().zip(ids.clone()) {
            tensor.fill(self.rank, id, number)?;
        }
        if let Some(barrier) = self.barrier.take() {
            self.barrier = Some(
                barrier
                    .reduce(self.rank, Op::Sum, AllReduceOptions::default())?
                    .0,
            );
        }
        let mut done = Vec::with_capacity(batch.len());
        let tensors = std::mem::take(&mut self.tensors);
        let start = Instant::now();
        let mut before = start;
        for (tensor, spec) in tensors.into_iter().zip(batch) {
            let (tensor, algorithm) =
                tensor.reduce(self.rank, spec.op, AllReduceOptions::default())?;
            let after = Instant::now();
            self.tensors.push(tensor);
            done.push((algorithm, micros(before, after)));
            before = after;
        }
        for (((algorithm, us), id), (tensor, spec)) in done
            .into_iter()
            .zip(ids)
            .zip(self.tensors.iter_mut().zip(batch))
        {
            // The ranks share the checking; the fingerprints say that what one checked is what all have.
            let is_mine = id.reduction % u64::from(world_size) == u64::from(number);
            let (fingerprint, wrong) = tensor.check(self.rank, id, world_size, spec.op, is_mine)?;
            reports.push(ReductionReport {
                us,
                algorithm: algorithm.to_string(),
                fingerprint,
                wrong,
            });
        }
        Ok(micros(start, before))
    }
}

fn micros(from: Instant, to: Instant) -> f64 {
    (to - from).as_secs_f64() * 1e6
}

/// The spec's form of a workload.
pub(crate) fn wire_reductions(workload: &Workload) -> Vec<(String, String, usize)> {
    workload
        .reductions
        .iter()
        .map(|spec| (spec.dtype.to_string(), spec.op.to_string(), spec.num_elems))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn batches_cover_a_step_and_fit() {
        let spec = |bytes| ReductionSpec::new(Dtype::Bf16, Op::Sum, bytes).unwrap();
        let step = [
            spec(40 << 20),
            spec(20 << 20),
            spec(10 << 20),
            spec(200 << 20),
            spec(0),
        ];
        let cut = batches(&step);
        let lengths: Vec<usize> = cut.iter().map(|batch| batch.len()).collect();
        assert_eq!(lengths, [2, 1, 1, 1]);
        assert_eq!(cut.concat(), step);
    }
}
