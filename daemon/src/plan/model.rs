//! The cost model: how long each algorithm takes, by what is known of the machine.
//!
//! Owns [`Costs`], made once for a communicator (a topology and the GPU of each rank): for each algorithm a constant and a
//! slope, so that a prediction is two multiplications. T = launch + hops x L + bytes / narrowest link, phase by phase, plus
//! what a rank reads and writes in its own memory. Called by the plan and by `explain`. Refuses to choose.
//!
//! A prediction is called one wherever it is shown. Its constants are not fitted to a machine: launch and phases are those
//! of kernels in a graph on one H200 (docs/benchmarks.md), latencies and rates are the topology's.

use crate::plan::schedule::{Phase, Place, schedule};
use crate::plan::tuned::{Thresholds, TunedSet, TunedTable};
use crate::topology::{Access, Fabric, LinkId, LinkKind, Topology};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, WorldSize};
use std::collections::{HashMap, HashSet};

/// A kernel in a graph, with nothing to do.
pub(crate) const LAUNCH_US: f64 = 2.5;
/// What a kernel does between two phases.
pub(crate) const PHASE_US: f64 = 0.5;
/// From the arrival of a word to the use of what it announces, beyond the topology's flag: the poll's period and a
/// barrier of the block.
pub(crate) const HOP_OVERHEAD_US: f64 = 0.3;
/// A step of copies, until the next begins: handing it over, and its share of the streams' waits for each other. From two virtual
/// ranks on one H200, where four copies and two kernels on one stream take 50 us more than the kernel of another algorithm
/// (docs/benchmarks.md, "tune").
pub(crate) const COPY_US: f64 = 12.0;
/// From the call to the kernel's launch and from its end to the caller, where it is triggered by an RPC: a null round trip of two ranks, and what
/// a reduction adds to it, on one H200 (docs/benchmarks.md, "The rpc lane").
pub(crate) const RPC_US: f64 = 100.0;
/// The same where the rank's stream rings a kernel that stays, beyond a launch.
pub(crate) const RING_US: f64 = 2.5;
/// Memory that a kernel reads and writes on one GPU, where the topology does not say. Beside links it is not counted then.
const LOOPBACK_MEMORY_GBPS: f64 = 1000.0;

/// How long one algorithm takes, as two numbers and where they come from.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Cost {
    /// Launch and phases.
    pub(crate) launch_us: f64,
    /// Latency.
    pub(crate) hops_us: f64,
    /// On the narrowest link of each phase, for each byte of a rank's tensor.
    pub(crate) wire_us_per_byte: f64,
    /// In a rank's own memory, for each byte of its tensor.
    pub(crate) reduce_us_per_byte: f64,
    /// On the links if each port did what it does alone: the part of the floor that grows.
    pub(crate) floor_us_per_byte: f64,
}

impl Cost {
    /// The prediction.
    pub(crate) fn us(&self, len_bytes: u64) -> f64 {
        let bytes = len_bytes as f64;
        self.launch_us + self.hops_us + bytes * (self.wire_us_per_byte + self.reduce_us_per_byte)
    }

    /// The prediction for a tensor that takes several launches, each with its own latencies.
    pub(crate) fn us_in_launches(&self, len_bytes: u64, launches: u64) -> f64 {
        let again = launches.saturating_sub(1) as f64 * (self.launch_us + self.hops_us);
        self.us(len_bytes) + again
    }

    /// What no kernel of this algorithm can beat on these links.
    pub(crate) fn floor_us(&self, len_bytes: u64) -> f64 {
        self.launch_us + self.hops_us + len_bytes as f64 * self.floor_us_per_byte
    }
}

/// What is known of a communicator's machine when it plans.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Costs {
    /// What its GPUs are to each other.
    pub(crate) fabric: Fabric,
    /// By algorithm; for elements of 2 bytes, and of 4 or more: partial sums are f32.
    by_algorithm: [[Cost; 2]; Algorithm::ALL.len()],
    /// What was measured here, by lane, for elements of 2 bytes and of 4.
    tuned: Vec<(Lane, usize, Thresholds)>,
}

impl Costs {
    /// Those of a communicator whose ranks are on these GPUs of the topology.
    pub(crate) fn of(topology: &Topology, placement: &[usize], island_size: u32) -> Self {
        let island = usize::try_from(island_size).unwrap_or(1);
        let fabric = topology.fabric(placement);
        let peer_access = fabric != Fabric::NoPeerAccess;
        let by_algorithm = Algorithm::ALL.map(|algorithm| {
            [2, 4].map(|elem_bytes| {
                let phases = schedule(algorithm, placement.len(), elem_bytes, island, peer_access);
                cost(topology, placement, algorithm, &phases)
            })
        });
        Self {
            fabric,
            by_algorithm,
            tuned: Vec::new(),
        }
    }

    /// With what was measured: `sets` are of this kind of communicator on this machine.
    pub(crate) fn with_tuned(
        mut self,
        table: &TunedTable,
        world_size: WorldSize,
        gpus: u32,
    ) -> Self {
        for lane in Lane::ALL {
            for dtype in [Dtype::Bf16, Dtype::F32] {
                let set = table.set(world_size, gpus, lane, dtype);
                if let Some(Ok(thresholds)) = set.map(TunedSet::thresholds) {
                    self.tuned.push((lane, dtype.size_bytes(), thresholds));
                }
            }
        }
        self
    }

    /// What was measured on a lane.
    pub(crate) fn tuned(&self, lane: Lane, dtype: Dtype) -> Option<&Thresholds> {
        let mut tuned = self.tuned.iter();
        let found = tuned.find(|(of, bytes, _)| *of == lane && *bytes == dtype.size_bytes());
        found.map(|(_, _, thresholds)| thresholds)
    }

    /// That of an algorithm.
    pub(crate) fn cost(&self, algorithm: Algorithm, dtype: Dtype) -> Cost {
        let width = usize::from(dtype.size_bytes() > 2);
        let place = Algorithm::ALL.iter().position(|one| *one == algorithm);
        let of = place.and_then(|place| self.by_algorithm.get(place));
        of.and_then(|widths| widths.get(width))
            .copied()
            .unwrap_or_default()
    }

    /// What nothing can beat here: the cheapest floor.
    pub(crate) fn floor_us(&self, dtype: Dtype, len_bytes: u64) -> f64 {
        Algorithm::ALL
            .into_iter()
            .filter(|algorithm| match algorithm.backend() {
                Backend::Cuda => self.fabric != Fabric::Host,
                Backend::Host => self.fabric == Fabric::Host,
            })
            // GPUs that cannot reach each other have the floor of what goes through the host.
            .filter(|algorithm| {
                self.fabric != Fabric::NoPeerAccess
                    || matches!(algorithm, Algorithm::HostStaged | Algorithm::CopyEngineRing)
            })
            .map(|algorithm| self.cost(algorithm, dtype))
            .filter(|cost| *cost != Cost::default())
            .map(|cost| cost.floor_us(len_bytes))
            .fold(f64::INFINITY, f64::min)
    }
}

/// Microseconds that a byte takes at a rate.
fn us_per_byte(gbps: f64) -> f64 {
    1e-3 / gbps
}

fn cost(topology: &Topology, placement: &[usize], algorithm: Algorithm, phases: &[Phase]) -> Cost {
    if algorithm.backend() == Backend::Host {
        return host_cost(topology, placement.len(), algorithm);
    }
    let launch = topology.rates().launch_us.unwrap_or(LAUNCH_US);
    let memory = topology
        .rates()
        .memory_gbps
        .unwrap_or(match topology.fabric(placement) {
            Fabric::Loopback => LOOPBACK_MEMORY_GBPS,
            Fabric::NvlinkFull
            | Fabric::NvlinkPartial
            | Fabric::PcieOneRoot
            | Fabric::PcieIslands
            | Fabric::WriteCollapse
            | Fabric::NoPeerAccess
            | Fabric::Host => f64::INFINITY,
        });
    let steps = phases.len().saturating_sub(1) as f64;
    let launch_us = match algorithm {
        // Hands over each step, and launches the kernel that reduces.
        Algorithm::CopyEngineRing => 2.0 * launch + phases.len() as f64 * COPY_US,
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
        | Algorithm::HostStaged => launch + steps * PHASE_US,
    };
    let mut cost = Cost {
        launch_us,
        ..Cost::default()
    };
    for phase in phases {
        if phase.flows.is_empty() {
            continue;
        }
        cost.hops_us += f64::from(phase.hops) * hop_us(topology, placement, phase);
        cost.wire_us_per_byte += narrowest(topology, placement, phase, Ports::AsShared);
        cost.floor_us_per_byte += narrowest(topology, placement, phase, Ports::AsAlone);
        cost.reduce_us_per_byte += phase.local * us_per_byte(memory);
    }
    cost
}

/// Ranks that reduce in shared memory themselves, each on a core of its own (lane delegated): nothing is predicted of other
/// lanes of the host, and nothing without the rates that `probe` measures.
fn host_cost(topology: &Topology, world_size: usize, algorithm: Algorithm) -> Cost {
    let rates = topology.rates();
    let (Some(copy_gbps), Some(flag_us)) = (rates.core_copy_gbps, rates.core_flag_us) else {
        return Cost::default();
    };
    let ranks = world_size.max(1) as f64;
    // Copies of the tensor that move as many bytes: reducing N tensors to one moves N + 1, a copy 2. And exchanges.
    let (copies, exchanges) = match algorithm {
        // To the staging, then all stagings to the destination; entries, and the end.
        Algorithm::OneShot => (1.0 + (ranks + 1.0) / 2.0, 2.0),
        // A slice of all, then the other slices; entries, results, and the end.
        Algorithm::TwoShot => ((ranks + 1.0) / 2.0 / ranks + (ranks - 1.0) / ranks, 3.0),
        Algorithm::OneShotChunked
        | Algorithm::OneShotPush
        | Algorithm::OneShotPull
        | Algorithm::OneShotPullInband
        | Algorithm::TwoShotPush
        | Algorithm::TwoShotPull
        | Algorithm::TwoShotPullInband
        | Algorithm::Hierarchical
        | Algorithm::HostStaged
        | Algorithm::CopyEngineRing => return Cost::default(),
    };
    let slope = copies * us_per_byte(copy_gbps);
    Cost {
        launch_us: 0.0,
        hops_us: exchanges * flag_us,
        wire_us_per_byte: 0.0,
        reduce_us_per_byte: slope,
        floor_us_per_byte: slope,
    }
}

/// The longest one-way trip of a phase.
fn hop_us(topology: &Topology, placement: &[usize], phase: &Phase) -> f64 {
    let gpu = |place: Place| match place {
        Place::Rank(rank) => placement.get(rank).copied(),
        Place::Host => None,
    };
    let trips = phase
        .flows
        .iter()
        .map(|flow| match (gpu(flow.from), gpu(flow.to)) {
            (Some(from), Some(to)) => topology.flag_us(from, to),
            (Some(_), None) | (None, Some(_)) => topology.host_flag_us(),
            (None, None) => 0.0,
        });
    trips.fold(0.0, f64::max) + HOP_OVERHEAD_US
}

/// What a GPU's port does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ports {
    /// What it does with as many peers as it has.
    AsShared,
    /// What it does with one, at best.
    AsAlone,
}

/// Microseconds for each byte of the tensor on the narrowest link of a phase.
fn narrowest(topology: &Topology, placement: &[usize], phase: &Phase, ports: Ports) -> f64 {
    // By link and kind of access: bytes, and with whom.
    let mut loads: HashMap<(LinkId, Access), (f64, HashSet<Place>)> = HashMap::new();
    let mut worst = 0.0_f64;
    for flow in &phase.flows {
        let gpu = |place: Place| match place {
            Place::Rank(rank) => placement.get(rank).copied(),
            Place::Host => None,
        };
        let (links, pair) = match (gpu(flow.from), gpu(flow.to)) {
            (Some(from), Some(to)) => (
                topology.path(from, to),
                topology.pair_gbps(from, to, flow.access),
            ),
            (Some(from), None) => (
                topology.path_to_host(from),
                topology.host_gbps(from, flow.access),
            ),
            (None, Some(to)) => (
                topology.path_from_host(to),
                topology.host_gbps(to, flow.access),
            ),
            (None, None) => (&[][..], f64::INFINITY),
        };
        worst = worst.max(flow.share * us_per_byte(pair));
        for link in links {
            let (bytes, peers) = loads.entry((*link, flow.access)).or_default();
            *bytes += flow.share;
            // Who is at the other end of the port.
            let kind = topology.links().get(*link).map(|link| link.kind);
            peers.insert(match kind {
                Some(LinkKind::GpuIn(_)) => flow.from,
                Some(LinkKind::GpuOut(_) | LinkKind::Nvlink | LinkKind::Shared) | None => flow.to,
            });
        }
    }
    for ((link, access), (bytes, peers)) in &loads {
        let gbps = match ports {
            Ports::AsShared => topology.capacity_gbps(*link, *access, peers.len()),
            // The better of both: a floor is for whichever way of moving.
            Ports::AsAlone => topology.best_gbps(*link, *access, peers.len()),
        };
        worst = worst.max(bytes * us_per_byte(gbps));
    }
    if let (Some(gbps), Ports::AsShared) = (topology.rates().write_collapse_gbps, ports) {
        let share = collapsed(topology, placement, phase);
        worst = worst.max(share * us_per_byte(gbps));
    }
    worst
}

/// Bytes of the worst switch whose GPUs write to GPUs of several other root complexes in this phase.
fn collapsed(topology: &Topology, placement: &[usize], phase: &Phase) -> f64 {
    let mut by_switch: HashMap<&str, (f64, HashSet<&str>)> = HashMap::new();
    for flow in phase
        .flows
        .iter()
        .filter(|flow| flow.access == Access::Write)
    {
        let (Place::Rank(from), Place::Rank(to)) = (flow.from, flow.to) else {
            continue;
        };
        let (Some(from), Some(to)) = (placement.get(from), placement.get(to)) else {
            continue;
        };
        let (Some(switch), Some(own), Some(root)) = (
            topology.parent_of(*from),
            topology.root_of(*from),
            topology.root_of(*to),
        ) else {
            continue;
        };
        if own != root && !topology.is_nvlink(*from, *to) {
            let (bytes, roots) = by_switch.entry(switch).or_default();
            *bytes += flow.share;
            roots.insert(root);
        }
    }
    by_switch
        .values()
        .filter(|(_, roots)| roots.len() > 1)
        .map(|(bytes, _)| *bytes)
        .fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::topology::{Description, Gpu, Pcie, Root, SCHEMA_VERSION, Switch};

    /// GPUs under one switch.
    pub(crate) fn one_switch(gpus: usize, generation: u32) -> Topology {
        let pcie = Pcie {
            generation,
            width: 16,
        };
        let description = Description {
            schema_version: SCHEMA_VERSION,
            name: format!("one switch, {gpus} x Gen{generation}"),
            peer_access: true,
            roots: vec![Root {
                name: "root".to_owned(),
                socket: None,
            }],
            switches: vec![Switch {
                name: "switch".to_owned(),
                parent: "root".to_owned(),
                pcie,
            }],
            gpus: (0..gpus)
                .map(|number| Gpu {
                    name: format!("gpu{number}"),
                    uuid: None,
                    product: None,
                    bus_id: None,
                    parent: "switch".to_owned(),
                    pcie,
                    numa_node: None,
                })
                .collect(),
            ..Description::default()
        };
        Topology::new(description).unwrap()
    }

    fn costs(gpus: usize, generation: u32) -> Costs {
        let placement: Vec<usize> = (0..gpus).collect();
        Costs::of(&one_switch(gpus, generation), &placement, 1)
    }

    /// Within a part of what is wanted.
    fn is_near(found: f64, wanted: f64, part: f64) -> bool {
        (found - wanted).abs() <= part * wanted
    }

    /// The floors of a hand calculation: 43,008 bytes, T0 2.5 us, a phase more 0.5 us, a hop 1.0 us.
    #[test]
    fn transfers_are_those_of_the_hand_calculation() {
        const BYTES: u64 = 43_008;
        for (gpus, generation, alone, one_shot, two_shot) in [
            (4, 5, true, 6.4, 6.4),
            (8, 5, true, 10.2, 6.7),
            (8, 5, false, 15.5, 8.0),
            (8, 4, false, 17.8, 8.6),
            (8, 3, false, 28.6, 11.3),
        ] {
            let costs = costs(gpus, generation);
            for (algorithm, wanted) in [
                (Algorithm::OneShotPush, one_shot),
                (Algorithm::TwoShotPush, two_shot),
            ] {
                let cost = costs.cost(algorithm, Dtype::Bf16);
                let wire = match alone {
                    true => cost.floor_us_per_byte,
                    false => cost.wire_us_per_byte,
                };
                let found = cost.launch_us + cost.hops_us + BYTES as f64 * wire;
                assert!(
                    is_near(found, wanted, 0.01),
                    "{algorithm} x {gpus} Gen{generation}: {found}, by hand {wanted}"
                );
            }
        }
    }

    /// Published latencies of one-shot pushes: the median is within a quarter, none off by a factor of two.
    #[test]
    fn predictions_are_near_published_latencies() {
        const KIB: u64 = 1024;
        let v100_plx: &[(u64, f64)] = &[
            (4, 4.0),
            (8, 5.0),
            (16, 7.2),
            (32, 11.8),
            (128, 44.5),
            (384, 120.0),
        ];
        let rtx_pro_6000: &[(u64, f64)] = &[
            (1, 6.1),
            (16, 7.7),
            (32, 9.2),
            (64, 11.8),
            (128, 17.6),
            (256, 28.7),
            (512, 51.0),
        ];
        for (preset, table) in [
            ("v100x4-plx", v100_plx),
            ("rtxpro6000x4-gen5-switch", rtx_pro_6000),
        ] {
            let topology = crate::topology::preset(preset).unwrap();
            let cost =
                Costs::of(&topology, &[0, 1, 2, 3], 1).cost(Algorithm::OneShotPush, Dtype::Bf16);
            let mut off: Vec<f64> = table
                .iter()
                .map(|(kib, published)| cost.us(kib * KIB) / published)
                .collect();
            for (ratio, (kib, published)) in off.iter().zip(table) {
                assert!(
                    (0.5..=2.0).contains(ratio),
                    "{preset} {kib} KiB: {ratio} x {published} us"
                );
            }
            off.sort_by(|one, other| (one - 1.0).abs().total_cmp(&(other - 1.0).abs()));
            let median = off.get(off.len() / 2).unwrap();
            assert!(
                is_near(*median, 1.0, 0.25),
                "{preset}: median {median}, {off:?}"
            );
        }
    }
}
