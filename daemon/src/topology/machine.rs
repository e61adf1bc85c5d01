//! This machine, as executors of it plan for it: its topology and what `tune` has measured, read once.
//!
//! Owns both, from the first communicator that needs them on. Called on the executor's CUDA thread, since NVML may take its
//! time. Refuses to fail a communicator: without an answer the GPUs are taken for what PCIe of one root does, and a note
//! says so.

use super::{Description, Gpu, LoadError, NO_GPU, Pcie, Root, SCHEMA_VERSION, Topology, load};
use crate::config::TopologyConfig;
use crate::plan::default_island_size;
use crate::plan::model::Costs;
use crate::plan::tuned::TunedTable;
use allreduce_contract::WorldSize;
use std::sync::Arc;

/// What an executor knows of its machine.
#[derive(Debug)]
pub(crate) struct Machine {
    config: TopologyConfig,
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    topology: Result<(Topology, String), LoadError>,
    tuned: Option<Result<TunedTable, String>>,
}

/// The GPUs of a communicator, in a topology.
#[derive(Debug)]
pub(crate) struct Placed {
    topology: Topology,
    placement: Vec<usize>,
    origin: String,
    tuned: Option<TunedTable>,
    /// What is not as it should be, for people.
    pub(crate) notes: Vec<String>,
}

/// GPUs of which nothing is known but that they are there: Gen4 under one root complex.
fn unknown(uuids: &[String]) -> Result<Topology, super::TopologyError> {
    let mut different: Vec<&String> = Vec::new();
    for uuid in uuids {
        if !different.contains(&uuid) {
            different.push(uuid);
        }
    }
    let gpu = |(number, uuid): (usize, &&String)| Gpu {
        name: format!("gpu{number}"),
        uuid: Some((*uuid).clone()),
        product: None,
        bus_id: None,
        parent: "root0".to_owned(),
        pcie: Pcie {
            generation: 4,
            width: 16,
        },
        numa_node: None,
    };
    Topology::new(Description {
        schema_version: SCHEMA_VERSION,
        name: "unknown".to_owned(),
        peer_access: true,
        roots: vec![Root {
            name: "root0".to_owned(),
            socket: None,
        }],
        gpus: different.iter().enumerate().map(gpu).collect(),
        ..Description::default()
    })
}

impl Machine {
    pub(crate) const fn new(config: TopologyConfig) -> Self {
        Self {
            config,
            known: None,
        }
    }

    /// Where the GPUs of these UUIDs are, by rank. None if they are one GPU and nothing was measured or written down: what
    /// connects GPUs is not asked then.
    pub(crate) fn place(&mut self, uuids: &[String]) -> Option<Placed> {
        let is_one = uuids.iter().all(|uuid| uuids.first() == Some(uuid));
        let is_configured =
            !self.config.file.as_os_str().is_empty() || !self.config.tuned.as_os_str().is_empty();
        if is_one && !is_configured {
            return None;
        }
        let config = &self.config;
        let known = self.known.get_or_insert_with(|| Known {
            topology: load(config),
            tuned: config
                .read_tuned()
                .map(|read| read.map_err(|error| error.to_string())),
        });
        let mut notes = Vec::new();
        let mut placed = None;
        match &known.topology {
            Ok((topology, origin)) => match placement(topology, uuids) {
                Ok(placement) => placed = Some((topology.clone(), placement, origin.clone())),
                Err(uuid) => notes.push(format!(
                    "topology {} ({origin}) does not name {uuid}: the GPUs are taken for PCIe Gen4 under one root; write the machine's with `allreduced probe --output`",
                    topology.name()
                )),
            },
            Err(error) => notes.push(format!(
                "{error}: the GPUs are taken for PCIe Gen4 under one root"
            )),
        }
        let (topology, placement, origin) = match placed {
            Some(placed) => placed,
            None => {
                let topology = unknown(uuids).ok()?;
                let placement = placement(&topology, uuids).ok()?;
                (topology, placement, "nothing is known of it".to_owned())
            }
        };
        let fingerprint = topology.fingerprint();
        let tuned = match &known.tuned {
            None => None,
            Some(Ok(table)) if table.fingerprint == fingerprint => Some(table.clone()),
            Some(Ok(table)) => {
                notes.push(stranger(table, &fingerprint));
                None
            }
            Some(Err(error)) => {
                notes.push(unusable(error));
                None
            }
        };
        Some(Placed {
            topology,
            placement,
            origin,
            tuned,
            notes,
        })
    }
}

impl Machine {
    /// Backend host: what was measured of it, what it is and what is not as it should be, for people. Nothing is read where no table is
    /// named.
    pub(crate) fn host(self, world_size: WorldSize) -> (Option<Arc<Costs>>, String, Vec<String>) {
        let nothing = |notes| (None, String::new(), notes);
        let Some(tuned) = self.config.read_tuned() else {
            return nothing(Vec::new());
        };
        let topology = load(&self.config).map_err(|error| error.to_string());
        let known = topology.and_then(|(topology, _)| {
            let table = tuned.map_err(|error| error.to_string())?;
            Ok((topology, table))
        });
        let (topology, table) = match known {
            Ok(known) => known,
            Err(error) => return nothing(vec![unusable(&error)]),
        };
        let fingerprint = topology.fingerprint();
        if table.fingerprint != fingerprint {
            return nothing(vec![stranger(&table, &fingerprint)]);
        }
        let words = format!("{}; algorithms by a tuned table", topology.name());
        let costs = Costs::of(&topology, &vec![NO_GPU; world_size.as_usize()], 1)
            .with_tuned(&table, world_size, 0);
        (Some(Arc::new(costs)), words, Vec::new())
    }
}

fn unusable(error: &str) -> String {
    format!("topology.tuned is not used: {error}")
}

fn stranger(table: &TunedTable, fingerprint: &str) -> String {
    format!(
        "topology.tuned was measured on another topology (fingerprint {}, here {fingerprint}) and is not used: run `allreduced tune` again",
        table.fingerprint
    )
}

/// By rank, or the UUID that is not there.
fn placement(topology: &Topology, uuids: &[String]) -> Result<Vec<usize>, String> {
    let number = |uuid: &String| {
        let mut gpus = topology.gpus().iter();
        gpus.position(|gpu| gpu.uuid.as_ref() == Some(uuid))
            .ok_or_else(|| uuid.clone())
    };
    uuids.iter().map(number).collect()
}

impl Placed {
    /// Ranks of an island.
    pub(crate) fn island_size(&self, world_size: WorldSize) -> u32 {
        let found = self.topology.island_size(&self.placement);
        found.unwrap_or_else(|| default_island_size(world_size))
    }

    /// What the plan chooses by, and what that is, for people. `peer_access`: as the test before Ready found it, which goes
    /// before what the topology says.
    pub(crate) fn costs(
        &self,
        world_size: WorldSize,
        island_size: u32,
        gpus: u32,
        peer_access: bool,
    ) -> (Costs, String) {
        let mut description = self.topology.description().clone();
        description.peer_access &= peer_access;
        // It was built once already.
        let built = Topology::new(description);
        let topology = built.as_ref().unwrap_or(&self.topology);
        let costs = Costs::of(topology, &self.placement, island_size);
        let (costs, basis) = match &self.tuned {
            Some(table) => (
                costs.with_tuned(table, world_size, gpus),
                "a tuned table, else the cost model",
            ),
            None => (costs, "the cost model"),
        };
        let words = format!(
            "{} on {} ({}); algorithms by {basis}",
            costs.fabric,
            self.topology.name(),
            self.origin
        );
        (costs, words)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use crate::topology::Fabric;
    use std::path::PathBuf;

    fn uuid(number: usize) -> String {
        format!("GPU-00000000-0000-0000-0000-{number:012}")
    }

    /// A file of a preset with UUIDs.
    fn file(preset: &str) -> (PathBuf, PathBuf) {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("ard-machine-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut description = crate::topology::preset(preset)
            .unwrap()
            .description()
            .clone();
        for (number, gpu) in description.gpus.iter_mut().enumerate() {
            gpu.uuid = Some(uuid(number));
        }
        let path = folder.join("t.toml");
        std::fs::write(&path, toml::to_string(&description).unwrap()).unwrap();
        (folder, path)
    }

    #[test]
    fn ranks_are_placed_by_uuid_and_strangers_are_noted() {
        let (folder, path) = file("sm120x8-gen5-2socket");
        let mut machine = Machine::new(TopologyConfig {
            file: path,
            ..TopologyConfig::default()
        });
        let uuids: Vec<String> = (0..8).map(uuid).collect();
        let eight = WorldSize::new(8).unwrap();
        let placed = machine.place(&uuids).unwrap();
        assert!(placed.notes.is_empty(), "{:?}", placed.notes);
        assert_eq!(placed.island_size(eight), 4);
        let (costs, words) = placed.costs(eight, 4, 8, true);
        assert_eq!(costs.fabric, Fabric::PcieIslands);
        assert!(
            words.starts_with("pcie_islands on sm120x8-gen5-2socket ("),
            "{words}"
        );
        assert_eq!(
            placed.costs(eight, 4, 8, false).0.fabric,
            Fabric::NoPeerAccess
        );
        let strangers = vec![uuid(0), uuid(99)];
        let placed = machine.place(&strangers).unwrap();
        assert!(placed.notes[0].contains(&uuid(99)), "{:?}", placed.notes);
        let (costs, _) = placed.costs(WorldSize::new(2).unwrap(), 1, 2, true);
        assert_eq!(costs.fabric, Fabric::PcieOneRoot);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_table_of_another_machine_is_not_used_and_that_is_said() {
        let (folder, path) = file("h100x8-nvlink");
        let topology = Topology::read(&path).unwrap();
        let uuids: Vec<String> = (0..8).map(uuid).collect();
        let tuned = folder.join("tuned.toml");
        let table = |fingerprint: &str| {
            format!("schema_version = 1\nfingerprint = {fingerprint:?}\nmeasured = \"now\"\n")
        };
        let mut notes = Vec::new();
        for fingerprint in ["other", topology.fingerprint().as_str()] {
            std::fs::write(&tuned, table(fingerprint)).unwrap();
            let mut machine = Machine::new(TopologyConfig {
                file: path.clone(),
                tuned: tuned.clone(),
                ..TopologyConfig::default()
            });
            let placed = machine.place(&uuids).unwrap();
            let (_, words) = placed.costs(WorldSize::new(8).unwrap(), 4, 8, true);
            notes.push((placed.notes, words));
        }
        assert!(notes[0].0[0].contains("another topology"), "{notes:?}");
        assert!(notes[0].1.ends_with("by the cost model"), "{notes:?}");
        assert!(
            notes[1].0.is_empty() && notes[1].1.contains("tuned"),
            "{notes:?}"
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn one_gpu_asks_nobody() {
        let mut machine = Machine::new(TopologyConfig::default());
        assert!(machine.place(&[uuid(1), uuid(1)]).is_none());
        assert!(machine.known.is_none());
    }
}
