//! The plan over its whole space: every described machine, one GPU, and the host.
//!
//! Owns the walk. It asks as `explain` asks, so what it shows of the plan holds for that too. Each point is a plan that can be
//! launched or a refusal with a reason; where the algorithm changes, the sizes on both sides are looked at.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use crate::config::{Config, CudaConfig, HostStaged};
use crate::explain::{Asked, Machine, Question};
use crate::plan::tests::launchable;
use crate::plan::{Refusal, plan};
use crate::topology::{Description, Fabric, NvLink, NvLinkPair, PRESETS, Topology, preset};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, WorldSize};
use std::collections::BTreeSet;

const LARGEST_BYTES: u64 = 64 << 20;

/// The presets, each as it is and with host windows, one GPU of the first, and the host.
fn machines() -> Vec<Machine> {
    let machine = |topology, host_staged| Machine {
        topology,
        origin: "test".to_owned(),
        config: Config {
            cuda: CudaConfig {
                host_staged,
                ..CudaConfig::default()
            },
            ..Config::default()
        },
        tuned: None,
    };
    let described = |name| preset(name).unwrap();
    let mut machines: Vec<Machine> = PRESETS
        .iter()
        .map(|(name, _)| machine(described(name), HostStaged::Auto))
        .collect();
    machines.push(machine(described(PRESETS[0].0), HostStaged::Always));
    machines.push(machine(described("4090x4-nop2p"), HostStaged::Never));
    let mut bridged = described("l40sx8-gen4").description().clone();
    bridged.nvlink = Some(NvLink {
        switch_gbps: None,
        pairs: vec![NvLinkPair {
            gpus: ["gpu0".to_owned(), "gpu1".to_owned()],
            gbps: 50.0,
        }],
    });
    machines.push(machine(Topology::new(bridged).unwrap(), HostStaged::Auto));
    let mut alone = described(PRESETS[0].0).description().clone();
    alone.gpus.truncate(1);
    machines.push(machine(Topology::new(alone).unwrap(), HostStaged::Auto));
    let host = Description {
        schema_version: crate::topology::SCHEMA_VERSION,
        name: "host".to_owned(),
        peer_access: true,
        ..Description::default()
    };
    machines.push(machine(Topology::new(host).unwrap(), HostStaged::Auto));
    machines
}

/// Elements at and around every power of two, and some that are none.
fn sizes(dtype: Dtype) -> BTreeSet<u64> {
    let elem = dtype.size_bytes() as u64;
    let powers = (0..=26).map(|bits| (1_u64 << bits) / elem);
    let around = powers.flat_map(|elems| [elems.saturating_sub(1), elems, elems + 1]);
    around
        .chain([0, 1, 3, 7, 21_504])
        .filter(|elems| elems * elem <= LARGEST_BYTES)
        .collect()
}

/// Who is asked, and what about.
struct Walk<'a> {
    asked: &'a Asked,
    lane: Lane,
    points: u64,
    plans: u64,
}

impl Walk<'_> {
    /// The algorithm of a point, which is checked.
    fn at(&mut self, question: Question) -> Option<Algorithm> {
        self.points += 1;
        let request = self.asked.request(self.lane, question, None);
        match plan(request) {
            Ok(found) => {
                self.plans += 1;
                launchable(&request, &found).unwrap();
                // Asked by name it is the same launch: all ranks can be told the name.
                let named = plan(
                    self.asked
                        .request(self.lane, question, Some(found.algorithm)),
                );
                assert_eq!(named.unwrap().shape, found.shape, "{request:?}");
                Some(found.algorithm)
            }
            Err(refusal) => {
                assert!(!refusal.to_string().is_empty());
                assert!(
                    !matches!(refusal, Refusal::NotTested),
                    "refused without a reason: {request:?}"
                );
                None
            }
        }
    }

    /// All sizes of a kind; where two neighbours differ, the size at which it changes.
    fn sizes(&mut self, dtype: Dtype, op: Op) {
        let mut before: Option<(u64, Option<Algorithm>)> = None;
        for num_elems in sizes(dtype) {
            let question = |num_elems| Question {
                num_elems,
                dtype,
                op,
            };
            let found = self.at(question(num_elems));
            if let Some((smaller, other)) = before
                && other != found
            {
                assert!(
                    other.is_some() == found.is_some(),
                    "sizes are refused: {num_elems} {dtype} {op}"
                );
                let (mut low, mut high) = (smaller, num_elems);
                while high - low > 1 {
                    let middle = low.midpoint(high);
                    match self.at(question(middle)) == other {
                        true => low = middle,
                        false => high = middle,
                    }
                }
                // Neither gap nor overlap: one says the one, the next another.
                assert_eq!(self.at(question(low)), other);
                assert_ne!(self.at(question(high)), other);
            }
            before = Some((num_elems, found));
        }
    }
}

#[test]
fn every_point_of_every_machine_is_a_plan_or_a_reasoned_refusal() {
    let (mut points, mut plans) = (0, 0);
    let mut seen: BTreeSet<Algorithm> = BTreeSet::new();
    let mut fabrics: BTreeSet<&str> = BTreeSet::new();
    for machine in machines() {
        for world_size in (1..=16).map(|ranks| WorldSize::new(ranks).unwrap()) {
            for lane in Lane::ALL {
                let asked = machine.communicator(world_size, None, Some(lane));
                let mut walk = Walk {
                    asked: &asked,
                    lane,
                    points: 0,
                    plans: 0,
                };
                for dtype in Dtype::ALL {
                    for op in Op::ALL {
                        walk.sizes(dtype, op);
                    }
                }
                for bytes in [1 << 10, 1 << 16, 1 << 20, 1 << 26] {
                    let question = Question {
                        num_elems: bytes / 2,
                        dtype: Dtype::Bf16,
                        op: Op::Sum,
                    };
                    seen.extend(walk.at(question));
                }
                fabrics.insert(asked.costs.fabric.name());
                points += walk.points;
                plans += walk.plans;
                // A lane that is refused as a whole says why, and one that is not has plans.
                let is_refused = asked.lane.is_err();
                assert_eq!(
                    walk.plans == 0,
                    is_refused,
                    "{} {lane}",
                    machine.topology.name()
                );
            }
        }
    }
    assert!(plans > points / 4, "{plans} of {points}");
    let all: BTreeSet<&str> = Fabric::ALL.iter().map(|fabric| fabric.name()).collect();
    assert_eq!(fabrics, all);
    // What nobody would ever be given is dead.
    let never: Vec<Algorithm> = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| algorithm.backend() == Backend::Cuda && !seen.contains(algorithm))
        .collect();
    assert!(never.is_empty(), "{never:?}");
    println!("{points} points, {plans} plans");
}
