//! `bench --graph`: what a reduction costs inside a replayed CUDA graph.
//!
//! Owns the graph's rank: a process that captures a number of reductions on its stream, of tensors in memory of its
//! own, replays them, and has the GPU's clock time each replay. Checks the result of the last replay bit by bit before
//! it reports. Refuses lanes that cannot be captured: joining does.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::bench::peer::{PeerError, PeerReport};
use crate::device;
use crate::wire::print_line;
use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::cuda::{DeviceBuffer, StreamHandle};
use allreduce_client::{AllReduceOptions, JoinOptions, bf16, f16};
use allreduce_contract::cuda::{Context, DeviceMemory, Event, Stream, Unavailable};
use allreduce_contract::kernel::{self, Instance};
use allreduce_contract::module::Kernels;
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op};
use allreduce_kernels::reference::reduce_bytes;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// Reductions of a graph: those of the verify step.
pub(crate) const REDUCTIONS: usize = 122;
/// Replays that are not timed, then those that are.
const WARM_UP: usize = 3;
const REPLAYS: usize = 21;

/// A rank that captures and replays.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct GraphSpec {
    pub(crate) socket: PathBuf,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) lane: String,
    pub(crate) algorithm: Option<String>,
    /// How long a kernel of the worker's between two reductions takes; 0 for none.
    pub(crate) gap_ns: u64,
    /// dtype, op, elements.
    pub(crate) cases: Vec<(String, String, usize)>,
}

/// One case's replays.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct GraphReport {
    pub(crate) algorithm: String,
    /// By replay: microseconds for a reduction.
    pub(crate) reduction_us: Vec<f64>,
}

impl GraphReport {
    /// Takes another rank's: a replay is as slow as its slowest rank.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (into, other) in self.reduction_us.iter_mut().zip(&other.reduction_us) {
            *into = into.max(*other);
        }
    }
}

/// Runs the rank.
pub(crate) fn run_rank(spec: &GraphSpec) -> Result<(), PeerError> {
    let device = device::of_rank(Some(Backend::Cuda), spec.rank)?;
    let device = device.ok_or(device::DeviceError::Unavailable(Unavailable::NoDevice))?;
    let lane: Lane = spec.lane.parse()?;
    let algorithm: Option<Algorithm> = spec
        .algorithm
        .as_ref()
        .map(|algorithm| algorithm.parse())
        .transpose()?;
    let options = JoinOptions::new("bench", spec.rank, spec.world_size)
        .backend(Backend::Cuda)
        .lanes([lane])
        .device(device.clone())
        .arena_len_bytes(64 << 20)
        .client_name(format!("bench-{}", spec.rank));
    let pause = match spec.gap_ns {
        0 => None,
        gap_ns => {
            let image = kernel::fatbin().ok_or(PeerError::NoImage)?;
            let context = Context::retain(device.clone())?;
            Some((Kernels::load(&context, image, Instance::N2)?, gap_ns))
        }
    };
    let rank = Rank {
        communicator: Client::connect(&spec.socket)?.join(options)?,
        context: Context::retain(device)?,
        rank: spec.rank,
        world_size: spec.world_size,
        algorithm,
        pause,
    };
    let mut reports = Vec::new();
    for (dtype, op, num_elems) in &spec.cases {
        reports.push(rank.measure(dtype.parse()?, op.parse()?, *num_elems)?);
        print_line(&PeerReport::Listening)?;
    }
    rank.communicator.leave();
    Ok(print_line(&PeerReport::Graphs(reports))?)
}

struct Rank {
    communicator: Communicator,
    context: Arc<Context>,
    rank: u32,
    world_size: u32,
    algorithm: Option<Algorithm>,
    pause: Option<(Kernels, u64)>,
}

/// The tensors of a case: where the lane reads and writes them in place.
enum Place {
    /// Memory of the rank's own.
    Own(DeviceMemory),
    Arena(DeviceBuffer),
}

impl Place {
    fn start(&self) -> u64 {
        match self {
            Place::Own(memory) => memory.start(),
            Place::Arena(buffer) => buffer.ptr(),
        }
    }
}

impl Rank {
    fn measure(&self, dtype: Dtype, op: Op, num_elems: usize) -> Result<GraphReport, PeerError> {
        let stream = Stream::create(&self.context)?;
        let len_bytes = (num_elems * dtype.size_bytes()) as u64;
        let dst_offset = len_bytes.next_multiple_of(256).max(256);
        let memory = match self.communicator.lane() {
            Lane::Delegated => Place::Own(DeviceMemory::allocate(&self.context, 2 * dst_offset)?),
            Lane::Resident | Lane::Rpc => {
                let len_bytes = usize::try_from(2 * dst_offset).unwrap_or(usize::MAX);
                Place::Arena(self.communicator.allocate_device(len_bytes)?)
            }
        };
        let (src, dst) = (memory.start(), memory.start() + dst_offset);
        // SAFETY: the ranges are of the memory above, which this stream alone uses.
        unsafe {
            stream.upload(src, &tensor(self.rank, dtype, num_elems))?;
            stream.fill(dst, 0xff, len_bytes)?;
        }
        let handle = StreamHandle::from_raw(stream.raw().cast());
        let mut options = AllReduceOptions::default();
        if let Some(algorithm) = self.algorithm {
            options = options.algorithm(algorithm);
        }
        let mut used = None;
        stream.synchronize()?;
        stream.begin_capture()?;
        for _ in 0..REDUCTIONS {
            if let Some((kernels, gap_ns)) = &self.pause {
                let entered = self.context.enter()?;
                // SAFETY: the stream is live and of the context that is entered.
                unsafe { kernels.launch_pause(&entered, stream.raw().cast(), *gap_ns) }?;
            }
            // SAFETY: as above; the stream is of the device's primary context.
            let reduction = unsafe {
                self.communicator.all_reduce_on(
                    handle,
                    src,
                    dst,
                    num_elems,
                    dtype,
                    op,
                    options.clone(),
                )
            }?;
            used = Some(reduction.algorithm);
        }
        let graph = stream.end_capture()?;
        let marks: Vec<Event> = (0..=REPLAYS)
            .map(|_| Event::create_timed(&self.context))
            .collect::<Result<_, _>>()?;
        for replay in 0..WARM_UP + REPLAYS {
            // SAFETY: as above; what the graph touches lives until the stream is synchronised.
            unsafe {
                if let Some(mark) = replay.checked_sub(WARM_UP).and_then(|at| marks.get(at)) {
                    mark.record_on(stream.raw().cast())?;
                }
                stream.replay(&graph)?;
            }
        }
        if let Some(mark) = marks.last() {
            // SAFETY: as above.
            unsafe { mark.record_on(stream.raw().cast()) }?;
        }
        let mut found = vec![0; num_elems * dtype.size_bytes()];
        // SAFETY: as above.
        unsafe { stream.download(dst, &mut found) }?;
        stream.synchronize()?;
        self.communicator.check()?;
        self.verify(dtype, op, num_elems, &found)?;
        let reduction_us = marks
            .iter()
            .zip(marks.iter().skip(1))
            .map(|(from, to)| Ok(to.micros_since(from)? / REDUCTIONS as f64))
            .collect::<Result<_, PeerError>>()?;
        self.communicator.close_stream(handle)?;
        Ok(GraphReport {
            algorithm: used.map_or_else(String::new, |algorithm| algorithm.to_string()),
            reduction_us,
        })
    }

    fn verify(
        &self,
        dtype: Dtype,
        op: Op,
        num_elems: usize,
        found: &[u8],
    ) -> Result<(), PeerError> {
        let tensors: Vec<Vec<u8>> = (0..self.world_size)
            .map(|rank| tensor(rank, dtype, num_elems))
            .collect();
        let tensors: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        let expected = reduce_bytes(dtype, op, &tensors).map_err(|error| PeerError::Wrong {
            rank: self.rank,
            reason: error.to_string(),
        })?;
        let size = dtype.size_bytes();
        let pairs = found.chunks(size).zip(expected.chunks(size));
        let wrong = pairs.filter(|(found, expected)| found != expected).count();
        if wrong > 0 {
            return Err(PeerError::Wrong {
                rank: self.rank,
                reason: format!("{wrong} of {num_elems} results of {op} {dtype} are wrong"),
            });
        }
        Ok(())
    }
}

/// A rank's tensor: numbers of some digits, which differ by rank and place.
fn tensor(rank: u32, dtype: Dtype, num_elems: usize) -> Vec<u8> {
    let value = |index: usize| ((index * 7 + rank as usize * 31) % 251) as f32 * 0.37 - 40.0;
    let values = (0..num_elems).map(value);
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values
            .flat_map(|x| f16::from_f32(x).to_le_bytes())
            .collect(),
        Dtype::Bf16 => values
            .flat_map(|x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        Dtype::F64 => values.flat_map(|x| f64::from(x).to_le_bytes()).collect(),
        Dtype::I32 => values.flat_map(|x| (x as i32).to_le_bytes()).collect(),
        Dtype::I64 => values.flat_map(|x| (x as i64).to_le_bytes()).collect(),
    }
}
