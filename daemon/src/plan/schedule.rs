//! What an algorithm moves: its phases, and in each who moves how much to whom.
//!
//! Owns the schedules, in bytes for each byte of a rank's tensor. Called by the cost model, which asks for the narrowest
//! link of each phase, and by the simulation, which lets the same flows share links in time: so the two cannot
//! disagree on what is moved. Refuses to know rates.

use crate::topology::Access;
use allreduce_contract::Algorithm;

/// One rank's bytes to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Flow {
    /// In whose GPU's memory they are.
    pub(crate) from: Place,
    /// In whose GPU's memory they are wanted.
    pub(crate) to: Place,
    /// How many, for each byte of the tensor.
    pub(crate) share: f64,
    /// By whom they are moved: written by `from`, or read by `to`.
    pub(crate) access: Access,
}

/// Where bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// In the memory of this rank's GPU.
    Rank(usize),
    /// In pinned memory of the host.
    Host,
}

/// What has to have arrived before the next phase begins.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Phase {
    /// At once.
    pub(crate) flows: Vec<Flow>,
    /// One-way trips between GPUs that one byte's way through this phase takes, its announcement included.
    pub(crate) hops: u32,
    /// Bytes that a rank's kernel reads and writes in its own memory, for each byte of the tensor.
    pub(crate) local: f64,
}

fn pairs(world_size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..world_size)
        .flat_map(move |from| (1..world_size).map(move |step| (from, (from + step) % world_size)))
}

fn all_to_all(world_size: usize, share: f64, access: Access, hops: u32, local: f64) -> Phase {
    let flow = |(from, to)| Flow {
        from: Place::Rank(from),
        to: Place::Rank(to),
        share,
        access,
    };
    Phase {
        flows: pairs(world_size).map(flow).collect(),
        hops,
        local,
    }
}

/// The phases of a GPU algorithm; none for those of the host, which move nothing between GPUs. `elem_bytes` of the tensor's
/// elements, `island_size` ranks in an island. Without `peer_access` the driver takes copies through memory of the host.
pub(crate) fn schedule(
    algorithm: Algorithm,
    world_size: usize,
    elem_bytes: usize,
    island_size: usize,
    peer_access: bool,
) -> Vec<Phase> {
    let ranks = world_size.max(1) as f64;
    let (read, write) = (Access::Read, Access::Write);
    match algorithm {
        Algorithm::OneShot | Algorithm::OneShotChunked | Algorithm::TwoShot => Vec::new(),
        // Stored at the receiver, read there, the result written.
        Algorithm::OneShotPush => vec![all_to_all(world_size, 1.0, write, 1, ranks + 1.0)],
        // A poll that finds the data has gone there and back.
        Algorithm::OneShotPullInband => vec![all_to_all(world_size, 1.0, read, 2, 3.0)],
        // A flag, the reads there and back, and a flag that they are over.
        Algorithm::OneShotPull => vec![all_to_all(world_size, 1.0, read, 4, 2.0)],
        Algorithm::TwoShotPush => vec![
            all_to_all(world_size, 1.0 / ranks, write, 1, 2.0),
            all_to_all(world_size, 1.0 / ranks, write, 1, 2.0),
        ],
        Algorithm::TwoShotPullInband => vec![
            all_to_all(world_size, 1.0 / ranks, read, 2, 2.0),
            all_to_all(world_size, 1.0 / ranks, read, 2, 2.0),
        ],
        Algorithm::TwoShotPull => vec![
            all_to_all(world_size, 1.0 / ranks, read, 3, 2.0),
            all_to_all(world_size, 1.0 / ranks, read, 3, 2.0),
        ],
        Algorithm::Hierarchical => hierarchical(world_size, elem_bytes, island_size),
        Algorithm::HostStaged => vec![
            host(world_size, (ranks - 1.0) / ranks, write),
            host(world_size, (ranks - 1.0) / ranks, read),
            host(world_size, 1.0 / ranks, write),
            host(world_size, (ranks - 1.0) / ranks, read),
        ],
        // Copy engines: step by step, each rank to the next of its ring of destinations.
        Algorithm::CopyEngineRing => {
            let step = |step: usize| Phase {
                flows: (0..world_size)
                    .flat_map(|from| {
                        let to = Place::Rank((from + step) % world_size.max(1));
                        let flow = |from, to, access| Flow {
                            from,
                            to,
                            share: 1.0 / ranks,
                            access,
                        };
                        let from = Place::Rank(from);
                        match peer_access {
                            true => vec![flow(from, to, write)],
                            false => {
                                vec![flow(from, Place::Host, write), flow(Place::Host, to, read)]
                            }
                        }
                    })
                    .collect(),
                hops: 0,
                local: 0.0,
            };
            (1..world_size).chain(1..world_size).map(step).collect()
        }
    }
}

/// Through the host: half of a there-and-back in each direction.
fn host(world_size: usize, share: f64, access: Access) -> Phase {
    let flow = |rank| match access {
        Access::Write => Flow {
            from: Place::Rank(rank),
            to: Place::Host,
            share,
            access,
        },
        Access::Read => Flow {
            from: Place::Host,
            to: Place::Rank(rank),
            share,
            access,
        },
    };
    Phase {
        flows: (0..world_size).map(flow).collect(),
        hops: match access {
            Access::Write => 1,
            Access::Read => 2,
        },
        local: 1.0,
    }
}

fn hierarchical(world_size: usize, elem_bytes: usize, island_size: usize) -> Vec<Phase> {
    let island = island_size.clamp(1, world_size.max(1));
    let slice = 1.0 / island as f64;
    let within = |(from, to): &(usize, usize)| from / island == to / island;
    let across =
        |(from, to): &(usize, usize)| from / island != to / island && from % island == to % island;
    let phase = |keep: &dyn Fn(&(usize, usize)) -> bool, share, local| Phase {
        flows: pairs(world_size)
            .filter(|pair| keep(pair))
            .map(|(from, to)| Flow {
                from: Place::Rank(from),
                to: Place::Rank(to),
                share,
                access: Access::Write,
            })
            .collect(),
        hops: 1,
        local,
    };
    // Partial sums are f32.
    let widened = 4.0 / elem_bytes.clamp(1, 4) as f64;
    vec![
        phase(&within, slice, 2.0),
        phase(&across, slice * widened, 2.0),
        phase(&within, slice, 2.0),
    ]
}
