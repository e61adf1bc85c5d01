//! The plan: the one place that decides how a reduction runs.
//!
//! Owns [`plan`], a total function from what is asked to a [`Plan`] that the executor can launch, or a
//! typed [`Refusal`] that reaches every rank before anything is launched. Its matches have no
//! catch-all, so a new algorithm, lane or backend does not compile until it is decided here. Called by
//! the communicator (each reduction) and the executor (the lane, at join). Refuses to look at a
//! machine: what it needs to know comes in [`PlanRequest`].

pub(crate) mod model;
pub(crate) mod schedule;
#[cfg(test)]
mod space;
pub(crate) mod tuned;

use crate::config::{CudaConfig, Host, HostStaged};
use crate::plan::model::Costs;
use crate::plan::tuned::Thresholds;
use crate::topology::{Fabric, Topology};
use allreduce_contract::kernel::{
    self, Instance, MAX_BLOCKS, MAX_PACKS, MAX_RING_BLOCKS, PACK_BYTES,
};
use allreduce_contract::lane::{Geometry, NotDelegated, NotResident, resident_algorithm};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, WorldSize};
use std::collections::HashSet;
use std::time::Duration;

/// What is to be reduced, and with what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PlanRequest<'a> {
    /// Where the windows live.
    pub backend: Backend,
    /// How the reduction is triggered.
    pub lane: Lane,
    /// Number of ranks.
    pub world_size: WorldSize,
    /// Elements of each rank's tensor.
    pub num_elems: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Operator.
    pub op: Op,
    /// The algorithm that the ranks ask for, if they do.
    pub algorithm: Option<Algorithm>,
    /// Whether any rank's destination is its source.
    pub in_place: bool,
    /// Threads that may share one reduction, at least 1.
    pub max_threads: usize,
    /// How ranks reduce in shared memory.
    pub geometry: Geometry,
    /// What the GPUs can take; known once they were tested.
    pub gpus: Option<GpuLimits>,
    /// How long each algorithm takes on their links; without it, the table of one GPU counts.
    pub costs: Option<&'a Costs>,
}

/// What the GPUs of a communicator can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuLimits {
    /// Number of GPUs that the ranks are on.
    pub gpus: u32,
    /// Most ranks on one GPU.
    pub ranks_per_gpu: u32,
    /// Blocks of the largest size that one GPU holds at once, on the one that holds fewest. Blocks wait for
    /// each other, so a launch must never have more.
    pub resident_blocks: u32,
    /// Bytes of a push slot.
    pub push_slot_bytes: u64,
    /// Bytes of an in-band part.
    pub inband_part_bytes: u64,
    /// Bytes of a staging part.
    pub staging_part_bytes: u64,
    /// The kernel that stays, for each rank, or why there is none.
    pub resident: Result<ResidentBlocks, NoStaying>,
    /// Whether the executor and the ranks of each GPU that several ranks are on are clients of MPS.
    pub shared_by_mps: bool,
    /// Ranks of an island, which are consecutive; divides the world size.
    pub island_size: u32,
    /// Whether every GPU can reach every other's memory.
    pub peer_access: bool,
    /// Bytes of an in-band part of the windows in host memory; none if there are no such windows.
    pub host_staged_bytes: Option<u64>,
}

/// Ranks of an island where nothing is known of what connects the GPUs: as large as islands can be that are not all
/// ranks; 1 for a world that has no such.
pub(crate) fn default_island_size(world_size: WorldSize) -> u32 {
    let mut smaller = (1..world_size.get()).rev();
    smaller
        .find(|size| world_size.get().is_multiple_of(*size))
        .unwrap_or(1)
}

/// Blocks of the largest size that a GPU which is only described holds at once: two on each of 100 multiprocessors,
/// which all GPUs of the presets have or nearly have.
const DESCRIBED_BLOCKS: u32 = 200;

/// What the GPUs of a described machine can take, as the test before Ready would find it; with MPS where ranks share one.
pub(crate) fn described_limits(
    config: &CudaConfig,
    topology: &Topology,
    world_size: WorldSize,
    placement: &[usize],
) -> GpuLimits {
    let here = |gpu: &usize| placement.iter().filter(|other| *other == gpu).count();
    let ranks_per_gpu = placement.iter().map(here).max().unwrap_or(1);
    let ranks_per_gpu = u32::try_from(ranks_per_gpu).unwrap_or(u32::MAX);
    let gpus: HashSet<&usize> = placement.iter().collect();
    let peer_access = topology.fabric(placement) != Fabric::NoPeerAccess;
    let host_windows = match config.host_staged {
        HostStaged::Auto => !peer_access,
        HostStaged::Always => true,
        HostStaged::Never => false,
    };
    GpuLimits {
        gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
        ranks_per_gpu,
        resident_blocks: DESCRIBED_BLOCKS,
        push_slot_bytes: config.push_slot_bytes,
        inband_part_bytes: config.inband_part_bytes,
        staging_part_bytes: config.staging_part_bytes,
        resident: resident_blocks(
            Instance::of(world_size),
            config.resident_blocks,
            ranks_per_gpu,
            DESCRIBED_BLOCKS,
        ),
        shared_by_mps: true,
        island_size: topology
            .island_size(placement)
            .unwrap_or_else(|| default_island_size(world_size)),
        peer_access,
        host_staged_bytes: host_windows.then_some(config.host_staged_bytes),
    }
}

/// What a kernel that stays has for each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResidentBlocks {
    /// Blocks.
    pub blocks: u32,
    /// Data threads of each.
    pub data_threads: u32,
    /// Blocks of all kernels that stay on the GPU: they fit twice, since one launch takes over from another.
    pub room: u32,
}

/// Why no kernel stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoStaying {
    /// It is not configured, or would not fit twice.
    NotConfigured,
    /// Other communicators have the blocks.
    Full {
        /// That may stay on the GPU.
        budget: u32,
        /// Of them, those that are free.
        free: u32,
        /// Ranks there.
        ranks: u32,
    },
    /// What others have is not known.
    NotCounted,
}

impl From<NoStaying> for Refusal {
    fn from(none: NoStaying) -> Self {
        match none {
            NoStaying::NotConfigured => Refusal::NoResident,
            NoStaying::Full {
                budget,
                free,
                ranks,
            } => Refusal::NoBlocksLeft {
                budget,
                free,
                ranks,
            },
            NoStaying::NotCounted => Refusal::BlocksNotCounted,
        }
    }
}

/// Data threads of a block of the kernel that stays: 43,008 bytes are a pack for each thread of 6 blocks.
const RESIDENT_THREADS: u32 = 448;

/// The kernel that stays, with the blocks asked for, where a GPU that `ranks` ranks are on holds `staying_blocks` of it
/// at once: twice, since one launch takes over from the other.
pub(crate) fn resident_blocks(
    instance: Instance,
    asked: u32,
    ranks: u32,
    staying_blocks: u32,
) -> Result<ResidentBlocks, NoStaying> {
    let room = staying_blocks / 2;
    let blocks = asked.min(room / ranks.max(1)).min(MAX_RING_BLOCKS);
    if blocks == 0 {
        return Err(NoStaying::NotConfigured);
    }
    Ok(ResidentBlocks {
        blocks,
        data_threads: RESIDENT_THREADS.min(instance.max_data_threads()),
        room,
    })
}

/// How it is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Who does it.
    pub shape: Shape,
    /// Why this one.
    pub basis: Basis,
}

/// Where peers find what a rank has to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staging {
    /// In the tensor itself, which the executor has mapped.
    Direct,
    /// In the rank's window, where its kernel has put it.
    Window,
    /// In the rank's window in memory of the host.
    HostWindow,
}

/// What decided between the algorithms that could be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Basis {
    /// The caller named it.
    Asked,
    /// The lane has no other.
    Only,
    /// Measured on this machine by `tune`.
    Tuned,
    /// Measured on such a machine; the table is part of the program.
    Shipped,
    /// The cost model.
    Model,
}

impl Basis {
    /// In words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Basis::Asked => "asked for",
            Basis::Only => "the lane has no other",
            Basis::Tuned => "measured fastest on this machine",
            Basis::Shipped => {
                "by the table that is shipped: measured on one H200, or on two cores for backend host (docs/benchmarks.md)"
            }
            Basis::Model => "predicted fastest by the cost model",
        }
    }
}

/// How the work is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Threads of the executor; 1 is the one that owns the communicator.
    Host {
        /// How many.
        threads: usize,
    },
    /// Blocks of a kernel.
    Cuda {
        /// Blocks of each rank.
        blocks: u32,
        /// Threads of a block that move data.
        data_threads: u32,
        /// Elements that one launch takes at most, a multiple of a pack's; a longer tensor takes several.
        launch_elems: u64,
        /// From where peers get a rank's elements.
        staging: Staging,
    },
    /// Copies by the GPUs' copy engines, and a kernel that reduces what they have brought.
    Copies {
        /// Blocks of the kernel, for each rank; it waits for nobody.
        blocks: u32,
        /// Threads of a block.
        threads: u32,
        /// Elements that are moved at a time, a pack's in each of world_size slices; a longer tensor takes several.
        launch_elems: u64,
    },
}

impl Plan {
    /// Launches that a tensor takes, at least one.
    pub(crate) fn launches(&self, num_elems: u64) -> u64 {
        match self.shape {
            Shape::Host { .. } => 1,
            Shape::Cuda { launch_elems, .. } | Shape::Copies { launch_elems, .. } => {
                num_elems.div_ceil(launch_elems.max(1)).max(1)
            }
        }
    }
}

/// Why it is not reduced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The mean of integers has no exact value.
    #[error("op avg is not defined for the integer dtype {0}: use sum and divide")]
    IntegerAvg(Dtype),
    /// The tensor's length in bytes does not fit 64 bits.
    #[error("{num_elems} elements of {dtype} are more bytes than 64 bits count")]
    TooLarge {
        /// Elements asked for.
        num_elems: u64,
        /// Their type.
        dtype: Dtype,
    },
    /// The GPU kernels do not have it.
    #[error(
        "backend cuda reduces f32, f16 and bf16 by sum, avg, min and max: for {dtype} {op} use backend host"
    )]
    NoKernel {
        /// The type asked for.
        dtype: Dtype,
        /// The operator asked for.
        op: Op,
    },
    /// The backend does not have the algorithm that was asked for.
    #[error("algorithm {algorithm} is one of backend {}, the communicator has backend {backend}", algorithm.backend())]
    NoSuchAlgorithm {
        /// The algorithm asked for.
        algorithm: Algorithm,
        /// The backend in use.
        backend: Backend,
    },
    /// Lane rpc has one_shot and one_shot_chunked.
    #[error(
        "algorithm {0} is one of lane delegated: lane rpc reduces by one_shot and one_shot_chunked"
    )]
    OnlyDelegated(Algorithm),
    /// Lane delegated has others.
    #[error(transparent)]
    NotDelegated(#[from] NotDelegated),
    /// Lane resident has others.
    #[error(transparent)]
    NotResident(#[from] NotResident),
    /// One block for each rank is already too much.
    #[error(
        "the GPU holds {resident_blocks} blocks at once, and {ranks} ranks share it: use fewer ranks on a GPU"
    )]
    TooFewBlocks {
        /// Blocks it holds.
        resident_blocks: u32,
        /// Ranks on it.
        ranks: u32,
    },
    /// Nothing is known of the GPUs yet.
    #[error("the GPUs of the communicator have not been tested yet")]
    NotTested,
    /// Kernels of several processes on one GPU, which wait for each other, would take turns.
    #[error(
        "lane {lane} needs MPS: kernels of several processes on one GPU, which wait for each other, would take turns; start nvidia-cuda-mps-control -d as the user of daemon and workers, with one CUDA_MPS_PIPE_DIRECTORY for all, then restart them"
    )]
    NeedsMps {
        /// The lane asked for.
        lane: Lane,
    },
    /// No kernel may stay.
    #[error(
        "lane resident has no blocks: cuda.resident_blocks is 0, or more than the GPU holds twice"
    )]
    NoResident,
    /// Kernels that stay leave room on a GPU, all communicators' together.
    #[error(
        "lane resident has no block left for each of {ranks} ranks of a GPU: of the {budget} blocks that may stay there (cuda.resident_blocks_per_gpu, or half of what it holds) {free} are free, other communicators have the rest"
    )]
    NoBlocksLeft {
        /// That may stay on the GPU.
        budget: u32,
        /// Of them, those that are free.
        free: u32,
        /// Ranks there.
        ranks: u32,
    },
    /// The files that count the blocks cannot be used.
    #[error(
        "the blocks that stay on the GPUs of lane resident cannot be counted: the executor's log says why"
    )]
    BlocksNotCounted,
    /// The kernel that stays has another algorithm.
    #[error("the kernel that stays has no {algorithm}, only one_shot_pull_inband")]
    NotStaying {
        /// The one asked for.
        algorithm: Algorithm,
    },
    /// Ranks that launch, or ring, reach their peers' memory.
    #[error(
        "lane {lane} needs peer access between the GPUs, which these have not: lane rpc reduces through host memory"
    )]
    NoPeerAccess {
        /// The lane asked for.
        lane: Lane,
    },
    /// Kernels of the algorithm reach peers' memory.
    #[error(
        "algorithm {algorithm} needs peer access between the GPUs, which these have not: host_staged and copy_engine_ring do without"
    )]
    NotReachable {
        /// The one asked for.
        algorithm: Algorithm,
    },
    /// There is nothing to go through.
    #[error(
        "algorithm host_staged has no windows in host memory here: cuda.host_staged = \"always\" makes them; \"auto\" does where GPUs have no peer access"
    )]
    NoHostWindows,
    /// One island, or islands of one, have nothing of a hierarchy.
    #[error(
        "algorithm hierarchical needs islands of more than one rank and fewer than all, of one size: {world_size} ranks in islands of {island_size} are none"
    )]
    NoIslands {
        /// Number of ranks.
        world_size: u32,
        /// Ranks of an island.
        island_size: u32,
    },
    /// What only the executor can do.
    #[error("algorithm {algorithm} is the executor's: lane {lane} has no part in it, lane rpc has")]
    OnlyRpc {
        /// The one asked for.
        algorithm: Algorithm,
        /// The lane in use.
        lane: Lane,
    },
    /// The ranks ask for different lanes.
    #[error("no lane is named by every rank that names any: have all ranks name the same, or none")]
    NoCommonLane,
    /// This machine has no such backend.
    #[error("backend {backend} is not available here: {reason}; available: host")]
    NoSuchBackend {
        /// The backend asked for.
        backend: Backend,
        /// Why not.
        reason: &'static str,
    },
}

/// Bytes read (all ranks' tensors) up to which a reduction runs on the communicator's own thread. There
/// one thread takes some 30 us (docs/benchmarks.md, lane "reduce"), a fraction of a round trip; more, and
/// every other call of the communicator would wait for it noticeably.
pub(crate) const INLINE_MAX_BYTES: u64 = 1 << 20;

/// Bytes read for each thread that shares a reduction, at least.
const BYTES_PER_THREAD: u64 = 512 << 10;

/// Decides.
///
/// # Errors
/// A [`Refusal`] says why this cannot be run.
pub(crate) fn plan(request: PlanRequest<'_>) -> Result<Plan, Refusal> {
    let PlanRequest {
        backend,
        lane,
        num_elems,
        dtype,
        op,
        algorithm,
        ..
    } = request;
    check_op(dtype, op)?;
    let len_bytes = num_elems
        .checked_mul(dtype.size_bytes() as u64)
        .ok_or(Refusal::TooLarge { num_elems, dtype })?;
    if let Some(algorithm) = algorithm.filter(|algorithm| algorithm.backend() != backend) {
        return Err(Refusal::NoSuchAlgorithm { algorithm, backend });
    }
    match backend {
        Backend::Host => match lane {
            Lane::Rpc => plan_host(&request, len_bytes),
            Lane::Resident => Ok(Plan {
                algorithm: resident_algorithm(algorithm)?,
                // The executor's thread for this lane.
                shape: Shape::Host { threads: 1 },
                basis: Basis::Only,
            }),
            Lane::Delegated => {
                let chosen = request.geometry.algorithm(len_bytes, algorithm)?;
                let tuned = request.costs.and_then(|costs| costs.tuned(lane, dtype));
                let is_tuned = tuned.and_then(|tuned| tuned.choice(len_bytes)) == Some(chosen);
                Ok(Plan {
                    algorithm: chosen,
                    // Each rank's own.
                    shape: Shape::Host { threads: 1 },
                    basis: match (algorithm, is_tuned) {
                        (Some(_), _) => Basis::Asked,
                        (None, true) => Basis::Tuned,
                        (None, false) => Basis::Shipped,
                    },
                })
            }
        },
        Backend::Cuda => plan_cuda(&request, len_bytes),
    }
}

fn plan_host(request: &PlanRequest<'_>, len_bytes: u64) -> Result<Plan, Refusal> {
    let bytes_read = len_bytes.saturating_mul(u64::from(request.world_size.get()));
    let tuned = request.costs.and_then(|costs| {
        let tuned = costs.tuned(Lane::Rpc, request.dtype)?;
        tuned.choice(len_bytes)
    });
    let (algorithm, basis) = match (request.algorithm, tuned) {
        (Some(asked), _) => (asked, Basis::Asked),
        (None, Some(tuned @ (Algorithm::OneShot | Algorithm::OneShotChunked))) => {
            (tuned, Basis::Tuned)
        }
        (None, Some(_) | None) if bytes_read <= INLINE_MAX_BYTES => {
            (Algorithm::OneShot, Basis::Shipped)
        }
        (None, Some(_) | None) => (Algorithm::OneShotChunked, Basis::Shipped),
    };
    let worth = usize::try_from(bytes_read / BYTES_PER_THREAD).unwrap_or(usize::MAX);
    let threads = match algorithm {
        Algorithm::OneShotChunked => worth.clamp(1, request.max_threads.max(1)),
        Algorithm::TwoShot => return Err(Refusal::OnlyDelegated(algorithm)),
        // Those of the other backend were refused.
        Algorithm::OneShot
        | Algorithm::OneShotPush
        | Algorithm::OneShotPull
        | Algorithm::OneShotPullInband
        | Algorithm::TwoShotPush
        | Algorithm::TwoShotPull
        | Algorithm::TwoShotPullInband
        | Algorithm::Hierarchical
        | Algorithm::HostStaged
        | Algorithm::CopyEngineRing => 1,
    };
    Ok(Plan {
        algorithm,
        shape: Shape::Host { threads },
        basis,
    })
}

/// How long a wait spins without letting others run: the time of an exchange of flags, and not more, since two ranks on one
/// processor pay it at each wait.
const LONGEST_SPIN: Duration = Duration::from_micros(1);

/// How ranks reduce in shared memory themselves. As measured (docs/benchmarks.md, "host lanes").
pub(crate) fn lane_geometry(
    lane: Lane,
    world_size: WorldSize,
    processors: usize,
    host: &Host,
) -> Geometry {
    let parties = match lane {
        Lane::Rpc | Lane::Delegated => world_size.as_usize(),
        // The executor's thread too.
        Lane::Resident => world_size.as_usize() + 1,
    };
    let budget = Duration::from_micros(u64::from(host.lane_spin_us));
    // Who spins may keep the processor from the very rank that it waits for, and does with more of them than
    // processors; with enough, the scheduler may still have put two on one, beside others' work.
    let spin = match parties <= processors {
        true => budget.min(LONGEST_SPIN),
        false => Duration::ZERO,
    };
    let yielding = budget.saturating_sub(spin);
    Geometry {
        one_shot_max_bytes: host.lane_stage_bytes.min(16 << 10),
        // Where waiting is dear: a rank that waits for another gives its processor up.
        short_max_bytes: match parties <= processors {
            true => 0,
            false => host.lane_stage_bytes,
        },
        block_len_bytes: 512 << 10,
        stage_len_bytes: host.lane_stage_bytes,
        spin,
        yielding,
    }
}

/// With what was measured of lane delegated on this machine: up to where one shot is the faster one. The lane knows sizes, not
/// types; that of 4-byte elements counts, else that of 2.
pub(crate) fn tuned_geometry(geometry: Geometry, costs: Option<&Costs>) -> Geometry {
    let tuned = costs.and_then(|costs| {
        let of = |dtype| costs.tuned(Lane::Delegated, dtype);
        of(Dtype::F32).or_else(|| of(Dtype::Bf16))
    });
    match tuned {
        None => geometry,
        Some(tuned) => Geometry {
            one_shot_max_bytes: tuned
                .largest(Algorithm::OneShot)
                .unwrap_or(0)
                .min(geometry.stage_len_bytes),
            ..geometry
        },
    }
}

fn plan_cuda(request: &PlanRequest<'_>, len_bytes: u64) -> Result<Plan, Refusal> {
    let PlanRequest {
        world_size,
        dtype,
        op,
        lane,
        costs,
        ..
    } = *request;
    if kernel::dtype_name(dtype).is_none() || kernel::op_code(op).is_none() {
        return Err(Refusal::NoKernel { dtype, op });
    }
    let limits = request.gpus.ok_or(Refusal::NotTested)?;
    if lane == Lane::Resident {
        return plan_resident(request, &limits);
    }
    let launched = |algorithm, basis| launched(request, len_bytes, &limits, (algorithm, basis));
    if let Some(algorithm) = request.algorithm {
        return launched(algorithm, Basis::Asked);
    }
    // What was measured, if it can be launched here.
    let tuned = costs.and_then(|costs| costs.tuned(lane, dtype));
    let tuned = tuned.and_then(|tuned| tuned.choice(len_bytes));
    if let Some(plan) = tuned.and_then(|algorithm| launched(algorithm, Basis::Tuned).ok()) {
        return Ok(plan);
    }
    let costs = costs.filter(|costs| costs.fabric != Fabric::Loopback);
    let Some(costs) = costs else {
        return launched(shipped(world_size, &limits, len_bytes), Basis::Shipped);
    };
    // The first of equals, so that there is one answer.
    let mut best: Option<(f64, Plan)> = None;
    let mut refused = None;
    for algorithm in Algorithm::ALL {
        if algorithm.backend() != Backend::Cuda {
            continue;
        }
        match launched(algorithm, Basis::Model) {
            Ok(plan) => {
                let us = costs
                    .cost(algorithm, dtype)
                    .us_in_launches(len_bytes, plan.launches(request.num_elems));
                if best.is_none_or(|(least, _)| us < least) {
                    best = Some((us, plan));
                }
            }
            Err(refusal) => refused = refused.or(Some(refusal)),
        }
    }
    best.map(|(_, plan)| plan)
        .ok_or_else(|| refused.unwrap_or(Refusal::NotTested))
}

/// Without costs: of one GPU's table; of GPUs apart, through host memory what one launch takes.
fn shipped(world_size: WorldSize, limits: &GpuLimits, len_bytes: u64) -> Algorithm {
    match (limits.peer_access, limits.host_staged_bytes) {
        (true, _) => Thresholds::shipped(world_size)
            .choice(len_bytes)
            .unwrap_or(Algorithm::TwoShotPull),
        (false, Some(one_launch)) if len_bytes <= one_launch => Algorithm::HostStaged,
        (false, Some(_) | None) => Algorithm::CopyEngineRing,
    }
}

/// One algorithm of the lanes that launch, as these GPUs can take it.
fn launched(
    request: &PlanRequest<'_>,
    len_bytes: u64,
    limits: &GpuLimits,
    (algorithm, basis): (Algorithm, Basis),
) -> Result<Plan, Refusal> {
    let PlanRequest {
        world_size,
        dtype,
        in_place,
        lane,
        ..
    } = *request;
    let staging = match (algorithm, lane) {
        // What is in a GPU's memory can others not read.
        (Algorithm::HostStaged, _) => Staging::HostWindow,
        // The executor has mapped every rank's tensors, which the ranks have not.
        (_, Lane::Rpc) => Staging::Direct,
        (_, Lane::Resident | Lane::Delegated) => Staging::Window,
    };
    let is_direct = staging == Staging::Direct;
    // Where ranks launch, a call's blocks are resident while those of the one before finish.
    let calls_at_once = match lane {
        Lane::Rpc => 1,
        Lane::Delegated | Lane::Resident => 2,
    };
    check_algorithm(algorithm, lane, world_size, limits)?;
    // Where a launch keeps what peers read or write (abi.h, "Largest tensor").
    let ranks_u64 = u64::from(world_size.get());
    let launch_bytes = match algorithm {
        Algorithm::OneShotPush => limits.push_slot_bytes,
        Algorithm::TwoShotPush => limits.push_slot_bytes / 2 * ranks_u64,
        Algorithm::Hierarchical => limits.push_slot_bytes / 2 * u64::from(limits.island_size),
        Algorithm::OneShotPullInband => limits.inband_part_bytes,
        Algorithm::TwoShotPullInband if is_direct => limits.inband_part_bytes * ranks_u64,
        Algorithm::TwoShotPullInband => limits.inband_part_bytes,
        Algorithm::HostStaged => limits.host_staged_bytes.ok_or(Refusal::NoHostWindows)?,
        Algorithm::OneShotPull if in_place || !is_direct => limits.staging_part_bytes,
        Algorithm::TwoShotPull if in_place || !is_direct => limits.staging_part_bytes,
        Algorithm::TwoShotPull => limits.staging_part_bytes * ranks_u64,
        Algorithm::CopyEngineRing => return Ok(plan_copies(request, limits, (len_bytes, basis))),
        // Host algorithms were refused.
        Algorithm::OneShotPull
        | Algorithm::OneShot
        | Algorithm::OneShotChunked
        | Algorithm::TwoShot => u64::MAX,
    };
    let ranks = limits.ranks_per_gpu.max(1);
    let most_blocks = (limits.resident_blocks / ranks / calls_at_once).min(MAX_BLOCKS);
    if most_blocks == 0 {
        return Err(Refusal::TooFewBlocks {
            resident_blocks: limits.resident_blocks,
            ranks,
        });
    }
    let launch_packs =
        (launch_bytes / PACK_BYTES).clamp(ranks_u64, MAX_PACKS) / ranks_u64 * ranks_u64;
    let pack_elems = PACK_BYTES / dtype.size_bytes() as u64;
    let packs = len_bytes.div_ceil(PACK_BYTES).min(launch_packs);
    let (blocks, data_threads) = cuda_shape(Instance::of(world_size), most_blocks, packs);
    Ok(Plan {
        algorithm,
        shape: Shape::Cuda {
            blocks,
            data_threads,
            launch_elems: launch_packs * pack_elems,
            staging,
        },
        basis,
    })
}

/// The plan of a test before Ready: that of lane rpc, for a sum out of place by a named algorithm.
///
/// # Errors
/// [`Refusal`].
pub(crate) fn plan_of_test(
    world_size: WorldSize,
    num_elems: u64,
    (dtype, algorithm): (Dtype, Algorithm),
    limits: GpuLimits,
) -> Result<Plan, Refusal> {
    plan(PlanRequest {
        backend: Backend::Cuda,
        lane: Lane::Rpc,
        world_size,
        num_elems,
        dtype,
        op: Op::Sum,
        algorithm: Some(algorithm),
        in_place: false,
        max_threads: 1,
        geometry: lane_geometry(Lane::Rpc, world_size, 1, &Host::default()),
        gpus: Some(limits),
        costs: None,
    })
}

/// Parts of the staging region, all of which copies may use: no kernel is at work there meanwhile.
const STAGING_PARTS: u64 = 4;
/// Threads of a block of the kernel that reduces copies.
const COPIES_THREADS: u32 = 256;
/// Most blocks of it: as many packs are under way as the memory of any GPU needs.
const COPIES_MAX_BLOCKS: u64 = 512;

/// Each rank's slice of a piece, from every rank, is in its staging at once.
fn plan_copies(
    request: &PlanRequest<'_>,
    limits: &GpuLimits,
    (len_bytes, basis): (u64, Basis),
) -> Plan {
    let ranks = u64::from(request.world_size.get());
    let room = limits.staging_part_bytes.saturating_mul(STAGING_PARTS) / PACK_BYTES;
    let slice_packs = (room / ranks).max(1);
    let packs = len_bytes.div_ceil(PACK_BYTES).div_ceil(ranks);
    let blocks = packs
        .min(slice_packs)
        .div_ceil(u64::from(COPIES_THREADS))
        .clamp(1, COPIES_MAX_BLOCKS);
    let pack_elems = PACK_BYTES / request.dtype.size_bytes() as u64;
    Plan {
        algorithm: Algorithm::CopyEngineRing,
        shape: Shape::Copies {
            blocks: u32::try_from(blocks).unwrap_or(1),
            threads: COPIES_THREADS,
            launch_elems: slice_packs * ranks * pack_elems,
        },
        basis,
    }
}

/// Whether an algorithm of backend cuda can be had, whatever the tensor.
///
/// # Errors
/// [`Refusal`].
pub(crate) fn check_algorithm(
    algorithm: Algorithm,
    lane: Lane,
    world_size: WorldSize,
    limits: &GpuLimits,
) -> Result<(), Refusal> {
    if lane != Lane::Rpc && !limits.peer_access {
        return Err(Refusal::NoPeerAccess { lane });
    }
    let (world_size, island_size) = (world_size.get(), limits.island_size);
    match algorithm {
        Algorithm::HostStaged | Algorithm::CopyEngineRing if lane != Lane::Rpc => {
            Err(Refusal::OnlyRpc { algorithm, lane })
        }
        Algorithm::HostStaged if limits.host_staged_bytes.is_none() => Err(Refusal::NoHostWindows),
        Algorithm::HostStaged | Algorithm::CopyEngineRing => Ok(()),
        Algorithm::OneShotPush
        | Algorithm::OneShotPull
        | Algorithm::OneShotPullInband
        | Algorithm::TwoShotPush
        | Algorithm::TwoShotPull
        | Algorithm::TwoShotPullInband
        | Algorithm::Hierarchical
            if !limits.peer_access =>
        {
            Err(Refusal::NotReachable { algorithm })
        }
        Algorithm::Hierarchical if !kernel::has_islands(world_size, island_size) => {
            Err(Refusal::NoIslands {
                world_size,
                island_size,
            })
        }
        Algorithm::OneShotPush
        | Algorithm::OneShotPull
        | Algorithm::OneShotPullInband
        | Algorithm::TwoShotPush
        | Algorithm::TwoShotPull
        | Algorithm::TwoShotPullInband
        | Algorithm::Hierarchical => Ok(()),
        Algorithm::OneShot | Algorithm::OneShotChunked | Algorithm::TwoShot => {
            Err(Refusal::NoSuchAlgorithm {
                algorithm,
                backend: Backend::Cuda,
            })
        }
    }
}

/// The kernel that stays has one algorithm and one shape.
fn plan_resident(request: &PlanRequest<'_>, limits: &GpuLimits) -> Result<Plan, Refusal> {
    let only = Algorithm::OneShotPullInband;
    if !limits.peer_access {
        let lane = Lane::Resident;
        return Err(Refusal::NoPeerAccess { lane });
    }
    if let Some(algorithm) = request.algorithm.filter(|asked| *asked != only) {
        return Err(Refusal::NotStaying { algorithm });
    }
    let ResidentBlocks {
        blocks,
        data_threads,
        room: _,
    } = limits.resident?;
    Ok(Plan {
        algorithm: only,
        shape: Shape::Cuda {
            blocks,
            data_threads,
            launch_elems: (limits.inband_part_bytes / PACK_BYTES).clamp(1, MAX_PACKS)
                * (PACK_BYTES / request.dtype.size_bytes() as u64),
            staging: Staging::Window,
        },
        basis: Basis::Only,
    })
}

/// Blocks and data threads for `packs` packs: a pack for each thread as long as the blocks suffice, in
/// blocks of 7 warps (measured best from 43 KB to 128 KB), then the largest blocks.
fn cuda_shape(instance: Instance, most_blocks: u32, packs: u64) -> (u32, u32) {
    const WARP: u64 = 32;
    let most_threads = u64::from(instance.max_data_threads());
    let most = u64::from(most_blocks);
    let medium = most_threads.min(224);
    let (blocks, threads) = if packs <= medium {
        (1, packs.next_multiple_of(WARP).max(WARP))
    } else if packs <= medium * most {
        (packs.div_ceil(medium), medium)
    } else {
        (packs.div_ceil(most_threads).min(most), most_threads)
    };
    // Both are below 2^32: the one at most most_blocks, the other most_threads.
    (
        u32::try_from(blocks).unwrap_or(most_blocks),
        u32::try_from(threads).unwrap_or(32),
    )
}

/// Whether these ranks can have a lane of their backend.
fn check_lane(backend: Backend, lane: Lane, gpus: Option<&GpuLimits>) -> Result<(), Refusal> {
    match (backend, lane, gpus) {
        (Backend::Cuda, Lane::Delegated | Lane::Resident, Some(limits)) if !limits.peer_access => {
            Err(Refusal::NoPeerAccess { lane })
        }
        // The ranks' kernels wait for each other; and the ranks' for the executor's.
        (Backend::Cuda, Lane::Delegated, Some(limits))
            if limits.ranks_per_gpu > 1 && !limits.shared_by_mps =>
        {
            Err(Refusal::NeedsMps { lane })
        }
        (Backend::Cuda, Lane::Resident, Some(limits)) if !limits.shared_by_mps => {
            Err(Refusal::NeedsMps { lane })
        }
        (Backend::Cuda, Lane::Delegated | Lane::Resident, None) => Err(Refusal::NotTested),
        (Backend::Cuda, Lane::Resident, Some(limits)) => Ok(limits.resident.map(drop)?),
        (Backend::Host | Backend::Cuda, Lane::Rpc | Lane::Delegated | Lane::Resident, _) => Ok(()),
    }
}

fn check_op(dtype: Dtype, op: Op) -> Result<(), Refusal> {
    match (op, dtype) {
        (Op::Avg, Dtype::I32 | Dtype::I64) => Err(Refusal::IntegerAvg(dtype)),
        (Op::Avg, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16)
        | (Op::Sum | Op::Min | Op::Max | Op::Prod, _) => Ok(()),
    }
}

/// The lane a rank gets, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LaneChoice {
    /// The lane.
    pub lane: Lane,
    /// Why, for people.
    pub reason: String,
    /// Whether a rank has asked for it: then no other takes its place.
    pub is_asked: bool,
}

/// The lanes that `auto` looks at, best first, and why the first is.
const fn auto_lanes(backend: Backend) -> ([Lane; 3], &'static str) {
    match backend {
        Backend::Host => (
            [Lane::Delegated, Lane::Rpc, Lane::Resident],
            "auto: ranks reduce in shared memory themselves, without a round trip",
        ),
        Backend::Cuda => (
            [Lane::Delegated, Lane::Resident, Lane::Rpc],
            "auto: ranks launch the kernels themselves, also in graphs, without a round trip",
        ),
    }
}

/// Chooses the lane of all ranks: the first that each of them names or leaves open, in the order of the first rank
/// that names any, and that can be had. `wanted`: by rank, what it can use, best first; empty leaves it open.
///
/// # Errors
/// [`Refusal::NoCommonLane`] if the ranks have none in common, else why the first of those cannot be had.
pub(crate) fn choose_lane(
    backend: Backend,
    wanted: &[&[Lane]],
    gpus: Option<&GpuLimits>,
) -> Result<LaneChoice, Refusal> {
    let asked = wanted.iter().copied().find(|lanes| !lanes.is_empty());
    let (auto, best) = auto_lanes(backend);
    let candidates = asked.unwrap_or(&auto).iter().copied();
    let is_common = |lane: &Lane| {
        let mut ranks = wanted.iter();
        ranks.all(|lanes| lanes.is_empty() || lanes.contains(lane))
    };
    let mut refused: Vec<(Lane, Refusal)> = Vec::new();
    for lane in candidates.filter(is_common) {
        match check_lane(backend, lane, gpus) {
            Ok(()) => {
                let who = if asked.is_some() { "asked for" } else { "auto" };
                let better: Vec<String> = refused
                    .iter()
                    .map(|(lane, why)| format!("not {lane}: {why}"))
                    .collect();
                let reason = match (better.as_slice(), asked) {
                    ([], Some(_)) => who.to_owned(),
                    ([], None) => best.to_owned(),
                    ([..], _) => format!("{who}; {}", better.join("; ")),
                };
                let is_asked = asked.is_some();
                return Ok(LaneChoice {
                    lane,
                    reason,
                    is_asked,
                });
            }
            Err(why) => refused.push((lane, why)),
        }
    }
    let first = refused.into_iter().next();
    Err(first.map_or(Refusal::NoCommonLane, |(_, why)| why))
}

/// The backend a communicator gets, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackendChoice {
    /// The backend.
    pub backend: Backend,
    /// Why, for people.
    pub reason: String,
}

/// Why backend cuda is refused where there is no GPU.
const NO_GPU: &str = "this machine shows no NVIDIA GPU (no /dev/nvidiactl)";

/// Chooses a backend. `has_cuda`: the rank can use CUDA; `has_gpu`: the machine shows a GPU.
///
/// # Errors
/// [`Refusal::NoSuchBackend`].
pub(crate) fn choose_backend(
    wanted: Option<Backend>,
    has_cuda: bool,
    has_gpu: bool,
) -> Result<BackendChoice, Refusal> {
    let choice = |backend, reason: &str| BackendChoice {
        backend,
        reason: reason.to_owned(),
    };
    match wanted {
        Some(Backend::Cuda) if !has_gpu => Err(Refusal::NoSuchBackend {
            backend: Backend::Cuda,
            reason: NO_GPU,
        }),
        Some(backend @ (Backend::Host | Backend::Cuda)) => Ok(choice(backend, "asked for")),
        None if has_cuda && has_gpu => Ok(choice(
            Backend::Cuda,
            "auto: there is a GPU, and the ranks can use it",
        )),
        None if has_gpu => Ok(choice(Backend::Host, "auto: the ranks do not use CUDA")),
        None => Ok(choice(Backend::Host, "auto: no GPU on this machine")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::topology;
    use proptest::option;
    use proptest::prelude::*;
    use proptest::sample::select;
    use std::sync::OnceLock;

    fn limits() -> impl Strategy<Value = GpuLimits> {
        (
            1_u32..=16,
            0_u32..600,
            1_u64..4096,
            1_u64..4096,
            1_u64..4096,
            any::<[bool; 2]>(),
            option::of(32_u64..4096),
        )
            .prop_map(
                |(
                    gpus,
                    resident_blocks,
                    push,
                    inband,
                    staging,
                    [shared_by_mps, peer_access],
                    host_staged,
                )| GpuLimits {
                    gpus,
                    ranks_per_gpu: 16_u32.div_ceil(gpus),
                    resident_blocks,
                    push_slot_bytes: 1024 * push,
                    inband_part_bytes: 1024 * inband,
                    staging_part_bytes: 1024 * staging,
                    resident: match resident_blocks {
                        301.. => Ok(ResidentBlocks {
                            blocks: 6,
                            data_threads: 160,
                            room: 100,
                        }),
                        150..=300 => Err(NoStaying::Full {
                            budget: 24,
                            free: 1,
                            ranks: 2,
                        }),
                        ..150 => Err(NoStaying::NotConfigured),
                    },
                    shared_by_mps,
                    // Of the world: see `requests`.
                    island_size: 1,
                    peer_access,
                    host_staged_bytes: host_staged.map(|packs| 32 * packs),
                },
            )
    }

    /// The machines that are described, each with its ranks on as many GPUs as it has, or all on one.
    fn machines() -> &'static [Topology] {
        static MACHINES: OnceLock<Vec<Topology>> = OnceLock::new();
        MACHINES.get_or_init(|| {
            let names = topology::PRESETS.iter().map(|(name, _)| *name);
            names.map(|name| topology::preset(name).unwrap()).collect()
        })
    }

    /// By machine and world size.
    fn costs_of(machine: usize, world_size: u32) -> Option<&'static Costs> {
        static COSTS: OnceLock<Vec<Vec<Costs>>> = OnceLock::new();
        let all = COSTS.get_or_init(|| {
            let by_world = |topology: &Topology| {
                let gpus = topology.gpus().len().max(1);
                (1..=16)
                    .map(|ranks| {
                        let placement: Vec<usize> = (0..ranks).map(|rank| rank % gpus).collect();
                        let island = topology.island_size(&placement).unwrap_or(1);
                        Costs::of(topology, &placement, island)
                    })
                    .collect()
            };
            machines().iter().map(by_world).collect()
        });
        all.get(machine)?.get(world_size as usize - 1)
    }

    fn requests() -> impl Strategy<Value = PlanRequest<'static>> {
        let sizes = prop_oneof![
            0_u64..64,
            (0_u32..64, 0_u64..3)
                .prop_map(|(bit, off)| (1_u64 << bit).wrapping_add(off).wrapping_sub(1)),
            any::<u64>(),
        ];
        (
            (
                select(&Backend::ALL[..]),
                select(&Lane::ALL[..]),
                1_u32..=16,
                sizes,
                select(&Dtype::ALL[..]),
                select(&Op::ALL[..]),
            ),
            option::of(select(&Algorithm::ALL[..])),
            any::<bool>(),
            0_usize..9,
            option::weighted(0.9, limits()),
            option::of(0..machines().len()),
            0_usize..5,
        )
            .prop_map(
                |(
                    (backend, lane, world_size, num_elems, dtype, op),
                    algorithm,
                    in_place,
                    max_threads,
                    gpus,
                    machine,
                    divisor,
                )| PlanRequest {
                    backend,
                    lane,
                    world_size: WorldSize::new(world_size).unwrap(),
                    num_elems,
                    dtype,
                    op,
                    algorithm,
                    in_place,
                    max_threads,
                    geometry: lane_geometry(
                        lane,
                        WorldSize::new(world_size).unwrap(),
                        max_threads,
                        &Host::default(),
                    ),
                    gpus: gpus.map(|gpus| GpuLimits {
                        island_size: (1..=world_size)
                            .filter(|size| world_size.is_multiple_of(*size))
                            .nth(divisor)
                            .unwrap_or(1),
                        ..gpus
                    }),
                    costs: machine.and_then(|machine| costs_of(machine, world_size)),
                },
            )
    }

    /// Whether there is a reason to refuse in what these GPUs can take.
    fn gpus_refuse(request: &PlanRequest, gpus: &GpuLimits) -> bool {
        let is_unreachable = request.lane != Lane::Rpc && !gpus.peer_access;
        let is_ineligible = request.algorithm.is_some_and(|asked| {
            check_algorithm(asked, request.lane, request.world_size, gpus).is_err()
        });
        let is_short = match request.lane {
            // Copies wait for nobody.
            Lane::Rpc => {
                gpus.resident_blocks < gpus.ranks_per_gpu
                    && request.algorithm != Some(Algorithm::CopyEngineRing)
            }
            Lane::Delegated => gpus.resident_blocks < 2 * gpus.ranks_per_gpu,
            Lane::Resident => {
                let only = Algorithm::OneShotPullInband;
                gpus.resident.is_err() || request.algorithm.is_some_and(|asked| asked != only)
            }
        };
        is_unreachable || is_ineligible || is_short
    }

    /// Whether a plan can be launched.
    pub(super) fn launchable(request: &PlanRequest<'_>, plan: &Plan) -> Result<(), TestCaseError> {
        prop_assert_eq!(plan.algorithm.backend(), request.backend);
        prop_assert!(
            request
                .algorithm
                .is_none_or(|asked| asked == plan.algorithm)
        );
        match plan.shape {
            Shape::Host { threads } => {
                prop_assert!(threads >= 1 && threads <= request.max_threads.max(1));
                prop_assert!(plan.algorithm == Algorithm::OneShotChunked || threads == 1);
                let of_lane = match request.lane {
                    Lane::Delegated => [Algorithm::OneShot, Algorithm::TwoShot],
                    Lane::Rpc => [Algorithm::OneShot, Algorithm::OneShotChunked],
                    Lane::Resident => [Algorithm::OneShot; 2],
                };
                prop_assert!(of_lane.contains(&plan.algorithm));
            }
            Shape::Cuda {
                blocks,
                data_threads,
                launch_elems,
                staging,
            } => {
                let limits = request.gpus.unwrap();
                let most = Instance::of(request.world_size).max_data_threads();
                prop_assert!((1..=MAX_BLOCKS).contains(&blocks));
                let at_once = match request.lane {
                    Lane::Rpc => blocks * limits.ranks_per_gpu,
                    // One call's, and the next's.
                    Lane::Delegated => 2 * blocks * limits.ranks_per_gpu,
                    // They are there already.
                    Lane::Resident => 0,
                };
                prop_assert!(at_once <= limits.resident_blocks);
                prop_assert!(
                    data_threads.is_multiple_of(32) && (32..=most).contains(&data_threads)
                );
                let launch_bytes = u128::from(launch_elems) * request.dtype.size_bytes() as u128;
                prop_assert!(launch_elems >= 1 && launch_bytes.is_multiple_of(16));
                let ranks = u64::from(request.world_size.get());
                let is_direct = staging == Staging::Direct;
                prop_assert_eq!(
                    is_direct,
                    request.lane == Lane::Rpc && plan.algorithm != Algorithm::HostStaged
                );
                let room = match plan.algorithm {
                    Algorithm::OneShotPush => limits.push_slot_bytes,
                    Algorithm::TwoShotPush => limits.push_slot_bytes / 2 * ranks,
                    Algorithm::Hierarchical => {
                        prop_assert!(kernel::has_islands(
                            request.world_size.get(),
                            limits.island_size
                        ));
                        limits.push_slot_bytes / 2 * u64::from(limits.island_size)
                    }
                    Algorithm::OneShotPullInband => limits.inband_part_bytes,
                    Algorithm::TwoShotPullInband if is_direct => limits.inband_part_bytes * ranks,
                    Algorithm::TwoShotPullInband => limits.inband_part_bytes,
                    Algorithm::HostStaged => limits.host_staged_bytes.unwrap(),
                    Algorithm::OneShotPull if is_direct && !request.in_place => u64::MAX,
                    Algorithm::TwoShotPull if is_direct && !request.in_place => {
                        limits.staging_part_bytes * ranks
                    }
                    Algorithm::OneShotPull | Algorithm::TwoShotPull => limits.staging_part_bytes,
                    Algorithm::CopyEngineRing
                    | Algorithm::OneShot
                    | Algorithm::OneShotChunked
                    | Algorithm::TwoShot => 0,
                };
                prop_assert!(limits.peer_access || plan.algorithm == Algorithm::HostStaged);
                prop_assert!(launch_bytes <= u128::from(room), "{}", launch_bytes);
            }
            Shape::Copies {
                blocks,
                threads,
                launch_elems,
            } => {
                let limits = request.gpus.unwrap();
                prop_assert_eq!(plan.algorithm, Algorithm::CopyEngineRing);
                prop_assert_eq!(request.lane, Lane::Rpc);
                prop_assert!(blocks >= 1 && threads.is_multiple_of(32));
                prop_assert!((32..=kernel::REDUCE_COPIED_THREADS).contains(&threads));
                // Whole packs in each slice, and a slice of every rank at once.
                let launch_bytes = launch_elems * request.dtype.size_bytes() as u64;
                let ranks = u64::from(request.world_size.get());
                prop_assert!(launch_bytes > 0 && launch_bytes.is_multiple_of(16 * ranks));
                prop_assert!(launch_bytes <= 4 * limits.staging_part_bytes);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn every_point_is_a_plan_that_can_be_launched_or_a_reasoned_refusal(request in requests()) {
            match plan(request) {
                Ok(plan) => launchable(&request, &plan)?,
                Err(refusal) => {
                    prop_assert!(!refusal.to_string().is_empty());
                    let cuda_refuses = request.backend == Backend::Cuda
                        && (!matches!(request.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
                            || request.op == Op::Prod
                            || request.gpus.is_none_or(|gpus| gpus_refuse(&request, &gpus)));
                    let refused = cuda_refuses
                        || (request.backend == Backend::Host
                            && request.algorithm.is_some_and(|asked| match request.lane {
                                Lane::Delegated => request.geometry.algorithm(0, Some(asked)).is_err(),
                                Lane::Resident => resident_algorithm(Some(asked)).is_err(),
                                Lane::Rpc => asked == Algorithm::TwoShot,
                            }))
                        || request.algorithm.is_some_and(|asked| asked.backend() != request.backend)
                        || (request.op == Op::Avg && request.dtype.is_integer())
                        || request.num_elems.checked_mul(request.dtype.size_bytes() as u64).is_none();
                    prop_assert!(refused, "{}", refusal);
                }
            }
            prop_assert_eq!(plan(request), plan(request));
        }
    }

    #[test]
    fn lanes_fall_back_only_to_what_was_named() {
        let backend = Backend::Cuda;
        let both: &[Lane] = &[Lane::Resident, Lane::Rpc];
        let choice = choose_lane(backend, &[both, &[]], None).unwrap();
        assert_eq!(choice.lane, Lane::Rpc);
        assert!(choice.reason.contains("resident"), "{}", choice.reason);
        assert!(choose_lane(backend, &[&[Lane::Resident], both], None).is_err());
        assert_eq!(
            choose_lane(backend, &[&[], &[]], None).unwrap().lane,
            Lane::Rpc
        );
        assert_eq!(
            choose_lane(backend, &[&[Lane::Resident], &[Lane::Rpc]], None),
            Err(Refusal::NoCommonLane)
        );
    }

    #[test]
    fn islands_are_the_largest_that_are_not_all_ranks() {
        let sizes: Vec<u32> = (1..=16)
            .map(|ranks| default_island_size(WorldSize::new(ranks).unwrap()))
            .collect();
        assert_eq!(sizes, [1, 1, 1, 2, 1, 3, 1, 4, 3, 5, 1, 6, 1, 7, 5, 8]);
    }

    const APART: GpuLimits = GpuLimits {
        gpus: 8,
        ranks_per_gpu: 1,
        resident_blocks: 264,
        push_slot_bytes: 256 << 10,
        inband_part_bytes: 1 << 20,
        staging_part_bytes: 4 << 20,
        resident: Ok(ResidentBlocks {
            blocks: 6,
            data_threads: 352,
            room: 66,
        }),
        shared_by_mps: true,
        island_size: 4,
        peer_access: false,
        host_staged_bytes: Some(1 << 20),
    };

    #[test]
    fn where_other_communicators_have_the_blocks_the_next_lane_is_taken() {
        let full = GpuLimits {
            peer_access: true,
            resident: Err(NoStaying::Full {
                budget: 24,
                free: 1,
                ranks: 2,
            }),
            ..APART
        };
        let choose = |wanted: &[Lane]| choose_lane(Backend::Cuda, &[wanted, &[]], Some(&full));
        let refusal = Refusal::NoBlocksLeft {
            budget: 24,
            free: 1,
            ranks: 2,
        };
        assert_eq!(choose(&[Lane::Resident]), Err(refusal.clone()));
        let next = choose(&[Lane::Resident, Lane::Delegated]).unwrap();
        assert_eq!(next.lane, Lane::Delegated);
        assert_eq!(next.reason, format!("asked for; not resident: {refusal}"));
        assert_eq!(choose(&[]).unwrap().lane, Lane::Delegated);
        let left = GpuLimits {
            resident: APART.resident,
            ..full
        };
        let lane = choose_lane(Backend::Cuda, &[&[Lane::Resident]], Some(&left));
        assert_eq!(lane.unwrap().lane, Lane::Resident);
        // The kernel that stays must fit twice, with those of all communicators.
        let blocks = |asked, ranks, staying| {
            resident_blocks(Instance::N2, asked, ranks, staying).map(|has| (has.blocks, has.room))
        };
        assert_eq!(blocks(6, 2, 264), Ok((6, 132)));
        assert_eq!(blocks(6, 2, 20), Ok((5, 10)));
        assert_eq!(blocks(0, 2, 264), Err(NoStaying::NotConfigured));
        assert_eq!(blocks(6, 2, 3), Err(NoStaying::NotConfigured));
    }

    #[test]
    fn without_peer_access_the_executor_goes_through_host_memory() {
        let request = |lane, num_elems, algorithm| PlanRequest {
            backend: Backend::Cuda,
            lane,
            world_size: WorldSize::new(8).unwrap(),
            num_elems,
            dtype: Dtype::Bf16,
            op: Op::Sum,
            algorithm,
            in_place: true,
            max_threads: 1,
            geometry: lane_geometry(lane, WorldSize::new(8).unwrap(), 1, &Host::default()),
            gpus: Some(APART),
            costs: None,
        };
        let chosen = |num_elems| plan(request(Lane::Rpc, num_elems, None)).unwrap().algorithm;
        assert_eq!(chosen(21_504), Algorithm::HostStaged);
        assert_eq!(chosen(16 << 20), Algorithm::CopyEngineRing);
        for algorithm in Algorithm::ALL {
            let planned = plan(request(Lane::Rpc, 21_504, Some(algorithm)));
            let is_to_be_had =
                matches!(algorithm, Algorithm::HostStaged | Algorithm::CopyEngineRing);
            assert_eq!(planned.is_ok(), is_to_be_had, "{algorithm}: {planned:?}");
        }
        for lane in [Lane::Delegated, Lane::Resident] {
            let refused = Err(Refusal::NoPeerAccess { lane });
            assert_eq!(plan(request(lane, 21_504, None)), refused);
            let asked = choose_lane(Backend::Cuda, &[&[lane], &[]], Some(&APART));
            assert_eq!(asked, Err(Refusal::NoPeerAccess { lane }));
        }
        let auto = choose_lane(Backend::Cuda, &[&[], &[]], Some(&APART)).unwrap();
        assert_eq!(auto.lane, Lane::Rpc);
        assert!(auto.reason.contains("peer access"), "{}", auto.reason);
    }

    #[test]
    fn what_the_executor_alone_can_do_is_refused_to_ranks_that_launch() {
        let limits = GpuLimits {
            peer_access: true,
            ..APART
        };
        let world_size = WorldSize::new(8).unwrap();
        let check = |algorithm, lane| check_algorithm(algorithm, lane, world_size, &limits);
        for algorithm in [Algorithm::HostStaged, Algorithm::CopyEngineRing] {
            let lane = Lane::Delegated;
            assert_eq!(check(algorithm, Lane::Rpc), Ok(()));
            assert_eq!(
                check(algorithm, lane),
                Err(Refusal::OnlyRpc { algorithm, lane })
            );
        }
        assert_eq!(check(Algorithm::Hierarchical, Lane::Delegated), Ok(()));
        let flat = GpuLimits {
            island_size: 8,
            host_staged_bytes: None,
            ..limits
        };
        let check = |algorithm| check_algorithm(algorithm, Lane::Rpc, world_size, &flat);
        let none = Refusal::NoIslands {
            world_size: 8,
            island_size: 8,
        };
        assert_eq!(check(Algorithm::Hierarchical), Err(none));
        assert_eq!(check(Algorithm::HostStaged), Err(Refusal::NoHostWindows));
    }

    #[test]
    fn cuda_is_chosen_where_it_is_to_be_had() {
        let chosen = |wanted, has_cuda, has_gpu| {
            choose_backend(wanted, has_cuda, has_gpu).map(|choice| choice.backend)
        };
        assert_eq!(chosen(None, true, true), Ok(Backend::Cuda));
        for (has_cuda, has_gpu) in [(false, true), (true, false), (false, false)] {
            assert_eq!(chosen(None, has_cuda, has_gpu), Ok(Backend::Host));
        }
        assert_eq!(chosen(Some(Backend::Host), true, true), Ok(Backend::Host));
        assert_eq!(chosen(Some(Backend::Cuda), false, true), Ok(Backend::Cuda));
        assert!(chosen(Some(Backend::Cuda), true, false).is_err());
    }
}
