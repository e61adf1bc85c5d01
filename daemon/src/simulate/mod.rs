//! The simulation: how long a reduction takes on a machine that need not be there.
//!
//! Owns [`reduce`]: the flows of a schedule share the links of a topology in time, and each rank goes to its
//! next phase when its own bytes are there. Called by `explain`. Refuses to decide what is best, to look at a machine or
//! a clock, and to answer for what it cannot run ([`NotSimulated`]). docs/design-notes/simulation.md says what is assumed and
//! what is left out.

mod engine;
pub(crate) mod plot;
mod routes;
#[cfg(test)]
mod tests;

use crate::plan::model;
use crate::plan::schedule::{Flow, Phase, Place, schedule};
use crate::topology::{Access, Fabric, Topology};
use allreduce_contract::{Algorithm, Backend, MAX_WORLD_SIZE};
use engine::Job;
use routes::Routes;

/// Times that do not depend on bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fixed {
    /// A kernel of one phase in a graph, with nothing to do.
    pub(crate) launch_us: f64,
    /// Each further phase.
    pub(crate) phase_us: f64,
    /// What a one-way trip costs over the flag of the pair ([`Topology::flag_us`]).
    pub(crate) hop_us: f64,
    /// A flag between a GPU and memory of the host, one way.
    pub(crate) host_flag_us: f64,
    /// A copy engine, until the first byte leaves.
    pub(crate) engine_us: f64,
}

impl Fixed {
    /// Those of a topology: measured where it has them, else those of the cost model.
    pub(crate) fn of(topology: &Topology) -> Self {
        Self {
            launch_us: topology.rates().launch_us.unwrap_or(model::LAUNCH_US),
            phase_us: model::PHASE_US,
            hop_us: model::HOP_OVERHEAD_US,
            host_flag_us: topology.host_flag_us(),
            engine_us: model::COPY_US,
        }
    }
}

/// What a reduction did.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Simulated {
    /// Until the slowest rank has its result; infinite if some bytes never arrive.
    pub(crate) us: f64,
    /// What each phase adds, by the slowest rank; `us` is their sum and the launch.
    pub(crate) by_phase: Vec<f64>,
    /// The busiest link, port or memory; none if nothing was moved.
    pub(crate) busiest: Option<Busiest>,
    /// Bytes that arrived at another rank or the host.
    pub(crate) arrived_bytes: f64,
    /// Events that it took.
    pub(crate) events: usize,
}

/// The link that was used most.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Busiest {
    /// Its name.
    pub(crate) link: String,
    /// Bytes that went through it, of those that would have in the time of the call: 0 to 1.
    pub(crate) utilisation: f64,
}

/// Why a reduction is not simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotSimulated {
    /// It moves nothing between GPUs.
    #[error("algorithm {0} is one of backend host: only those of backend cuda are simulated")]
    Host(Algorithm),
    /// No communicator has as many.
    #[error("{0} ranks: a communicator has 1 to {MAX_WORLD_SIZE}")]
    WorldSize(usize),
    /// A rank is placed on a GPU that is not described.
    #[error("rank {rank} is on GPU {gpu}: the topology has {gpus}")]
    NoSuchGpu {
        /// The rank.
        rank: usize,
        /// Its GPU.
        gpu: usize,
        /// How many there are.
        gpus: usize,
    },
    /// Islands are equal.
    #[error("{world_size} ranks make no islands of {island_size}")]
    Islands {
        /// Number of ranks.
        world_size: usize,
        /// Ranks in an island, as asked for.
        island_size: usize,
    },
    /// The algorithm moves bytes between two GPUs that cannot.
    #[error(
        "algorithm {algorithm}: GPU {from} cannot reach the memory of GPU {to}: only host_staged runs there"
    )]
    NoPeerAccess {
        /// The algorithm.
        algorithm: Algorithm,
        /// One of them.
        from: usize,
        /// The other.
        to: usize,
    },
}

/// One reduction. `placement`: the GPU of each rank. `island_size`: ranks in an island, for the hierarchical algorithm; others do not
/// look at it. `len_bytes` of a rank's tensor, whose elements have `elem_bytes`.
///
/// # Errors
/// [`NotSimulated`].
pub(crate) fn reduce(
    topology: &Topology,
    placement: &[usize],
    algorithm: Algorithm,
    elem_bytes: usize,
    island_size: usize,
    len_bytes: usize,
    fixed: Fixed,
) -> Result<Simulated, NotSimulated> {
    let world_size = placement.len();
    match algorithm.backend() {
        Backend::Cuda => {}
        Backend::Host => return Err(NotSimulated::Host(algorithm)),
    }
    if world_size == 0 || world_size > MAX_WORLD_SIZE as usize {
        return Err(NotSimulated::WorldSize(world_size));
    }
    let gpus = topology.gpus().len();
    let mut placed = placement.iter().enumerate();
    if let Some((rank, gpu)) = placed.find(|(_, gpu)| **gpu >= gpus) {
        return Err(NotSimulated::NoSuchGpu {
            rank,
            gpu: *gpu,
            gpus,
        });
    }
    let is_islands = island_size > 0 && world_size.is_multiple_of(island_size);
    if algorithm == Algorithm::Hierarchical && !is_islands {
        return Err(NotSimulated::Islands {
            world_size,
            island_size,
        });
    }
    let peer_access = topology.fabric(placement) != Fabric::NoPeerAccess;
    let phases = schedule(algorithm, world_size, elem_bytes, island_size, peer_access);
    let start_us = match algorithm {
        Algorithm::CopyEngineRing => fixed.engine_us,
        Algorithm::OneShot
        | Algorithm::OneShotChunked
        | Algorithm::TwoShot
        | Algorithm::OneShotPush
        | Algorithm::OneShotPull
        | Algorithm::OneShotPullInband
        | Algorithm::TwoShotPush
        | Algorithm::TwoShotPull
        | Algorithm::TwoShotPullInband
        | Algorithm::Hierarchical
        | Algorithm::HostStaged => 0.0,
    };
    let flows = phases.iter().flat_map(|phase| &phase.flows);
    for flow in flows {
        if let (Place::Rank(from), Place::Rank(to)) = (flow.from, flow.to) {
            let (from, to) = (gpu_of(placement, from), gpu_of(placement, to));
            if !topology.has_peer_access(from, to) {
                return Err(NotSimulated::NoPeerAccess {
                    algorithm,
                    from,
                    to,
                });
            }
        }
    }
    Ok(run(
        topology, placement, &phases, len_bytes, fixed, start_us,
    ))
}

fn gpu_of(placement: &[usize], rank: usize) -> usize {
    placement.get(rank).copied().unwrap_or(usize::MAX)
}

/// The phases, on a machine. `start_us`: what the start of a flow takes.
fn run(
    topology: &Topology,
    placement: &[usize],
    phases: &[Phase],
    len_bytes: usize,
    fixed: Fixed,
    start_us: f64,
) -> Simulated {
    let host = placement.len();
    let len_bytes = len_bytes as f64;
    let node = |place| match place {
        Place::Rank(rank) => rank,
        Place::Host => host,
    };
    let mut routes = Routes::new(topology);
    let mut jobs = Vec::new();
    for (number, phase) in phases.iter().enumerate() {
        for flow in &phase.flows {
            let (hops_before, hops_after) = trips(flow.access, phase.hops);
            let hop_us = hop_us(topology, placement, flow, fixed);
            let mover = match flow.access {
                Access::Write => flow.from,
                Access::Read => flow.to,
            };
            for (part, uses) in routes.ways(flow, placement) {
                jobs.push(Job {
                    phase: number,
                    from: node(flow.from),
                    to: node(flow.to),
                    mover: node(mover),
                    bytes: flow.share * part * len_bytes,
                    before_us: start_us + f64::from(hops_before) * hop_us,
                    after_us: f64::from(hops_after) * hop_us,
                    uses,
                });
            }
        }
    }
    let between_ranks = jobs.len();
    // What a kernel does in its own memory, while bytes are on their way.
    for (number, phase) in phases.iter().enumerate() {
        for (rank, gpu) in placement.iter().enumerate() {
            jobs.extend(routes.memory(*gpu).map(|uses| Job {
                phase: number,
                from: rank,
                to: rank,
                mover: rank,
                bytes: phase.local * len_bytes,
                before_us: 0.0,
                after_us: 0.0,
                uses,
            }));
        }
    }
    let bounds = routes.into_bounds();
    let outcome = engine::run(
        placement.len(),
        phases.len(),
        fixed.phase_us,
        &jobs,
        &bounds,
    );
    let us = fixed.launch_us + outcome.ends_us.last().copied().unwrap_or(0.0);
    let starts = std::iter::once(&0.0).chain(&outcome.ends_us);
    let by_phase = outcome.ends_us.iter().zip(starts);
    let mut busiest: Option<Busiest> = None;
    for (bound, full_us) in bounds.iter().zip(&outcome.full_us) {
        let utilisation = full_us / us;
        let most = busiest.as_ref().map_or(0.0, |busiest| busiest.utilisation);
        // The first of several that are used alike, whatever rounding did.
        if utilisation > most * (1.0 + 1e-9) {
            busiest = Some(Busiest {
                link: bound.name.clone(),
                utilisation: utilisation.min(1.0),
            });
        }
    }
    Simulated {
        us,
        by_phase: by_phase
            .map(|(end, start)| if end > start { end - start } else { 0.0 })
            .collect(),
        busiest,
        arrived_bytes: outcome.arrived.iter().take(between_ranks).sum(),
        events: outcome.events,
    }
}

/// One-way trips before the first byte leaves, and after the last has left. A write: the others before, its own after. A read: whatever
/// goes to the source before (a flag, the request), what goes back after (the bytes, a flag that they are over).
fn trips(access: Access, hops: u32) -> (u32, u32) {
    let after = match access {
        Access::Write => hops.min(1),
        Access::Read => hops / 2,
    };
    (hops - after, after)
}

fn hop_us(topology: &Topology, placement: &[usize], flow: &Flow, fixed: Fixed) -> f64 {
    let flag_us = match (flow.from, flow.to) {
        (Place::Rank(from), Place::Rank(to)) => {
            topology.flag_us(gpu_of(placement, from), gpu_of(placement, to))
        }
        (Place::Host, _) | (_, Place::Host) => fixed.host_flag_us,
    };
    flag_us + fixed.hop_us
}
