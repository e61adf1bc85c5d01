//! One rank of `tune`: a process that reduces by every candidate in turn.
//!
//! Owns the timed loop. Each size begins with a check: every candidate reduces once, and its result is compared on every
//! rank; one that is refused, or wrong, is not timed. Then rounds, in each of which every candidate has its turn, so that all meet
//! the same weather. Refuses to judge: it reports samples.

#![allow(unsafe_code)] // room: CUDA bindings

use crate::demo::tensor::{AnyTensor, Rank, TensorError};
use crate::demo::verify::TensorId;
use crate::device::{self, DeviceError, WorkerStream};
use crate::wire::{print_line, read_line};
use crate::workload::ReductionSpec;
use allreduce_client::blocking::Client;
use allreduce_client::{
    AllReduceError, AllReduceOptions, BufferError, ConnectError, JoinError, JoinOptions,
};
use allreduce_contract::cuda::CudaError;
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, UnknownName};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

/// Bytes that a turn may move, all ranks together.
const TURN_BYTES: usize = 32 << 20;
/// Reductions of a turn, at most.
const MOST: usize = 50;
/// The same where they are in a graph.
const MOST_IN_A_GRAPH: usize = 122;

/// What a rank is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TuneSpec {
    pub(crate) socket: PathBuf,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) backend: String,
    pub(crate) lane: String,
    pub(crate) dtype: String,
    /// Elements.
    pub(crate) sizes: Vec<usize>,
    /// The candidates.
    pub(crate) algorithms: Vec<String>,
    pub(crate) rounds: usize,
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum TuneReport {
    /// It is through with a size: by candidate.
    Size(Vec<Trial>),
    /// It is through.
    Done,
}

/// One candidate at one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Trial {
    /// Microseconds for a reduction, by round.
    Timed(Vec<f64>),
    /// It cannot be launched here.
    Refused(String),
    /// Elements of its result that are wrong.
    Wrong(usize),
}

/// Why a rank gives up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TuneError {
    #[error("the worker's spec: {0}")]
    Spec(std::io::Error),
    #[error(transparent)]
    Name(#[from] UnknownName),
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
    Output(std::io::Error),
}

/// Runs a worker process.
pub(crate) fn run() -> Result<(), TuneError> {
    let spec: TuneSpec = read_line().map_err(TuneError::Spec)?;
    let backend: Backend = spec.backend.parse()?;
    let lane: Lane = spec.lane.parse()?;
    let dtype: Dtype = spec.dtype.parse()?;
    let algorithms: Vec<Algorithm> = spec
        .algorithms
        .iter()
        .map(|name| name.parse())
        .collect::<Result<_, _>>()?;
    let longest = spec.sizes.iter().copied().max().unwrap_or(0);
    let longest = longest.saturating_mul(dtype.size_bytes());
    let mut options = JoinOptions::new("tune", spec.rank, spec.world_size)
        .backend(backend)
        .lanes([lane])
        // The tensor, and a barrier's.
        .arena_len_bytes(longest as u64 + (1 << 16))
        .client_name(format!("tune-{}", spec.rank));
    let device = device::of_rank(Some(backend), spec.rank)?;
    if let Some(device) = &device {
        options = options.device(device.clone());
    }
    let communicator = Client::connect(&spec.socket)?.join(options)?;
    let stream = device.map(WorkerStream::on).transpose()?;
    let rank = Rank {
        communicator: &communicator,
        stream: stream.as_ref(),
    };
    for (number, num_elems) in (0..).zip(&spec.sizes) {
        let case = Case {
            rank: &rank,
            lane,
            spec: ReductionSpec {
                dtype,
                op: Op::Sum,
                num_elems: *num_elems,
            },
            world_size: spec.world_size,
            number,
        };
        let mut trials = Vec::new();
        for algorithm in &algorithms {
            trials.push(case.check(*algorithm)?);
        }
        for _ in 0..spec.rounds {
            for (algorithm, trial) in algorithms.iter().zip(&mut trials) {
                if let Trial::Timed(samples) = trial {
                    samples.push(case.time(*algorithm)?);
                }
            }
        }
        print_line(&TuneReport::Size(trials)).map_err(TuneError::Output)?;
    }
    communicator.leave();
    print_line(&TuneReport::Done).map_err(TuneError::Output)
}

/// One size.
struct Case<'a> {
    rank: &'a Rank<'a>,
    lane: Lane,
    spec: ReductionSpec,
    world_size: u32,
    number: u64,
}

impl Case<'_> {
    fn options(algorithm: Algorithm) -> AllReduceOptions {
        AllReduceOptions::default().algorithm(algorithm)
    }

    /// Reduces once, and looks at the result. Ranks are refused alike, so that they go on alike.
    fn check(&self, algorithm: Algorithm) -> Result<Trial, TuneError> {
        let id = TensorId {
            seed: 1,
            step: self.number,
            reduction: 0,
        };
        let mut tensor = AnyTensor::allocate(self.rank, self.spec)?;
        tensor.fill(self.rank, id, self.rank.communicator.rank())?;
        match tensor.reduce(self.rank, self.spec.op, Self::options(algorithm)) {
            Ok((mut tensor, _)) => {
                let (_, wrong) =
                    tensor.check(self.rank, id, self.world_size, self.spec.op, true)?;
                Ok(match wrong {
                    Some(wrong) if wrong > 0 => Trial::Wrong(wrong),
                    Some(_) | None => Trial::Timed(Vec::new()),
                })
            }
            Err(TensorError::AllReduce(AllReduceError::Refused(refused))) => {
                Ok(Trial::Refused(refused.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A turn: microseconds for a reduction, from a barrier on. Where a graph can be captured by the GPU's clock, so that the
    /// processor is not what is measured; else by this rank's.
    fn time(&self, algorithm: Algorithm) -> Result<f64, TuneError> {
        let bytes = self.spec.len_bytes() * self.world_size as usize;
        let is_graph = self.rank.stream.is_some() && self.lane != Lane::Rpc;
        let most = if is_graph { MOST_IN_A_GRAPH } else { MOST };
        let count = (TURN_BYTES / bytes.max(1)).clamp(2, most);
        let mut tensor = AnyTensor::allocate(self.rank, self.spec)?;
        tensor.fill(
            self.rank,
            TensorId {
                seed: 2,
                step: 0,
                reduction: 0,
            },
            0,
        )?;
        let barrier = AnyTensor::allocate(
            self.rank,
            ReductionSpec {
                num_elems: 0,
                ..self.spec
            },
        )?;
        // min: sums of sums would not stay finite.
        let op = Op::Min;
        let graph = match (self.rank.stream, self.lane) {
            (Some(stream), Lane::Delegated | Lane::Resident) => {
                let graph = tensor.capture(self.rank, op, &Self::options(algorithm), count)?;
                Some((stream, graph))
            }
            (Some(_) | None, Lane::Rpc) | (None, Lane::Delegated | Lane::Resident) => None,
        };
        barrier.reduce(self.rank, Op::Sum, AllReduceOptions::default())?;
        if let Some((stream, graph)) = graph {
            // SAFETY: the tensor and the communicator outlive it.
            let us = unsafe { stream.time(&graph) }?;
            self.rank.communicator.check().map_err(TensorError::from)?;
            return Ok(us / count as f64);
        }
        let start = Instant::now();
        for _ in 0..count {
            tensor = tensor.reduce(self.rank, op, Self::options(algorithm))?.0;
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / count as f64)
    }
}
