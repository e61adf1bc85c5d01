//! What NVML and sysfs say of a machine, and the description that follows from it.
//!
//! Owns [`Found`], which is plain data, and the way from there to a [`Description`], which is a pure function. Called by
//! `discover`. Refuses to ask anybody anything, and to guess rates: what nobody said is left out.

use super::{
    Description, Gpu, InterSocket, NvLink, NvLinkPair, Pair, Pcie, Root, SCHEMA_VERSION, Socket,
    Switch,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything that was found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Found {
    /// The driver's version.
    pub(crate) driver: Option<String>,
    /// In NVML's order, which is that of bus ids.
    pub(crate) gpus: Vec<FoundGpu>,
    /// Every ordered pair.
    pub(crate) pairs: Vec<FoundPair>,
    /// Whether an IOMMU is in use.
    pub(crate) has_iommu: bool,
    /// What could not be asked, for people.
    pub(crate) trouble: Vec<String>,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FoundGpu {
    pub(crate) uuid: String,
    pub(crate) product: String,
    /// As sysfs writes it: 0000:3b:00.0.
    pub(crate) bus_id: String,
    /// Best that GPU and slot can do.
    pub(crate) max_generation: Option<u32>,
    pub(crate) max_width: Option<u32>,
    /// Now. The generation falls when the GPU idles; the width is the slot's.
    pub(crate) width: Option<u32>,
    pub(crate) nvlinks: Vec<FoundLink>,
    /// Where it is in the PCIe tree; none if sysfs does not say.
    pub(crate) place: Option<FoundPlace>,
    pub(crate) numa_node: Option<u32>,
    /// Number of its processor package.
    pub(crate) package: Option<u32>,
    /// How the IOMMU treats its group: "DMA", "DMA-FQ", "identity".
    pub(crate) iommu_type: Option<String>,
}

/// Above a GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FoundPlace {
    /// The host bridge, as sysfs calls it: pci0000:00.
    pub(crate) root: String,
    /// From the root port down to the port right above the GPU.
    pub(crate) bridges: Vec<FoundBridge>,
}

/// A port of a root complex or of a switch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FoundBridge {
    pub(crate) bus_id: String,
    /// Of its link upwards, for an upstream port of a switch.
    pub(crate) generation: Option<u32>,
    pub(crate) width: Option<u32>,
    /// Whether ACS sends peers' requests up to the root complex; none if it is not readable (that takes root) or not there.
    pub(crate) redirects: Option<bool>,
}

/// One active NVLink.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FoundLink {
    /// nvmlNvlinkVersion_t.
    pub(crate) version: Option<u32>,
    /// MB/s of one direction, raw, by NVML.
    pub(crate) speed_mbps: Option<u32>,
    /// Bus id of what is at the other end; none if NVML does not say.
    pub(crate) remote: Option<String>,
}

/// The nearest thing above two GPUs, by NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ancestor {
    /// One board.
    Internal,
    /// One switch.
    Single,
    /// Several switches.
    Multiple,
    /// One host bridge.
    HostBridge,
    /// One NUMA node.
    Node,
    /// The machine.
    System,
}

/// From one GPU to another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FoundPair {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) ancestor: Option<Ancestor>,
    /// "ok", or why not; empty if NVML does not say.
    pub(crate) read: String,
    pub(crate) write: String,
    pub(crate) atomics: String,
    pub(crate) nvlink: String,
}

/// A description, and what people should know of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Discovered {
    pub(crate) description: Description,
    /// The driver's version.
    pub(crate) driver: Option<String>,
    /// Things that cost speed or could not be seen, each with what to do.
    pub(crate) hints: Vec<String>,
}

impl Discovered {
    /// A machine without GPUs, or one whose GPUs do not matter.
    pub(crate) fn of_host() -> Self {
        Found::default().describe()
    }
}

/// PCIe of a GPU that does not say: the narrowest guess that is not absurd.
const UNKNOWN_PCIE: Pcie = Pcie {
    generation: 3,
    width: 16,
};

/// What all flows between two sockets get, published for GPUs of PCIe Gen4 and Gen5 (docs/topology.md).
const fn inter_socket_gbps(generation: u32) -> Option<f64> {
    match generation {
        0..=3 => None,
        4 => Some(9.7),
        _ => Some(23.75),
    }
}

/// Nominal GB/s of one NVLink, one direction: 20 for NVLink 1, 25 for 2 to 4, 50 for 5. Drivers disagree on whether the version
/// is an enumerator or the number itself; the speed decides where they say it.
fn nvlink_gbps(link: &FoundLink) -> f64 {
    match (link.speed_mbps, link.version) {
        (Some(45_000..), _) | (None, Some(7)) => 50.0,
        (Some(1..22_000), _) | (None, Some(1)) => 20.0,
        (_, _) => 25.0,
    }
}

fn gpu_name(number: usize) -> String {
    format!("gpu{number}")
}

impl Found {
    /// The machine.
    pub(crate) fn describe(&self) -> Discovered {
        let mut hints = self.trouble.clone();
        let mut description = Description {
            schema_version: SCHEMA_VERSION,
            name: self.name(),
            peer_access: true,
            ..Description::default()
        };
        if self.gpus.is_empty() {
            description.description = "no GPUs: memory of the host".to_owned();
            return self.with(description, hints);
        }
        let driver = self.driver.as_deref().unwrap_or("unknown");
        description.description = "discovered on this machine".to_owned();
        description.sources = vec![format!("NVML of driver {driver}, sysfs")];
        self.lay_tree(&mut description, &mut hints);
        self.lay_nvlink(&mut description, &mut hints);
        self.say_peers(&mut description, &mut hints);
        self.look_for_what_slows(&description, &mut hints);
        self.with(description, hints)
    }

    fn with(&self, description: Description, hints: Vec<String>) -> Discovered {
        Discovered {
            description,
            driver: self.driver.clone(),
            hints,
        }
    }

    fn name(&self) -> String {
        let mut products: Vec<(&str, usize)> = Vec::new();
        for gpu in &self.gpus {
            match products.iter_mut().find(|(known, _)| *known == gpu.product) {
                Some((_, count)) => *count += 1,
                None => products.push((&gpu.product, 1)),
            }
        }
        match products.is_empty() {
            true => "host".to_owned(),
            false => products
                .iter()
                .map(|(product, count)| format!("{count} x {product}"))
                .collect::<Vec<_>>()
                .join(", "),
        }
    }

    fn pcie(&self, gpu: &FoundGpu) -> Pcie {
        let width = match (gpu.width, gpu.max_width) {
            (Some(now), Some(most)) => Some(now.min(most)),
            (now, most) => now.or(most),
        };
        Pcie {
            generation: gpu.max_generation.unwrap_or(UNKNOWN_PCIE.generation),
            width: width
                .filter(|width| *width > 0)
                .unwrap_or(UNKNOWN_PCIE.width),
        }
    }

    fn lay_tree(&self, description: &mut Description, hints: &mut Vec<String>) {
        let by_sysfs = self.gpus.iter().all(|gpu| gpu.place.is_some());
        if !by_sysfs {
            hints.push(
                "sysfs does not show where every GPU is: the tree is NVML's levels, and switches in it are guesses"
                    .to_owned(),
            );
        }
        let sockets = self.sockets();
        for name in &sockets {
            if !description.sockets.iter().any(|of| of.name == *name) {
                description.sockets.push(Socket { name: name.clone() });
            }
        }
        for (number, (gpu, socket)) in self.gpus.iter().zip(&sockets).enumerate() {
            let pcie = self.pcie(gpu);
            let (root, switches) = match &gpu.place {
                Some(place) if by_sysfs => (place.root.clone(), switches_of(place, pcie)),
                Some(_) | None => self.by_levels(number, pcie),
            };
            if !description.roots.iter().any(|of| of.name == root) {
                description.roots.push(Root {
                    name: root.clone(),
                    socket: Some(socket.clone()),
                });
            }
            let mut parent = root;
            for (name, pcie) in switches {
                if !description.switches.iter().any(|of| of.name == name) {
                    description.switches.push(Switch {
                        name: name.clone(),
                        parent,
                        pcie,
                    });
                }
                parent = name;
            }
            description.gpus.push(Gpu {
                name: gpu_name(number),
                uuid: Some(gpu.uuid.clone()),
                product: Some(gpu.product.clone()),
                bus_id: Some(gpu.bus_id.clone()),
                parent,
                pcie,
                numa_node: gpu.numa_node,
            });
        }
        if description.sockets.len() > 1 {
            let generation = self.gpus.iter().filter_map(|gpu| gpu.max_generation).min();
            description.inter_socket = generation
                .and_then(inter_socket_gbps)
                .map(|gbps| InterSocket { gbps });
            description.sources.push(match description.inter_socket {
                Some(_) => {
                    "between sockets: what others measured on this PCIe generation".to_owned()
                }
                None => "between sockets: nothing is known".to_owned(),
            });
        }
    }

    /// By GPU: the processor package where it is known, else the NUMA node; what NVML says is far apart is of two.
    fn sockets(&self) -> Vec<String> {
        let are_known = self
            .gpus
            .iter()
            .all(|gpu| gpu.package.or(gpu.numa_node).is_some());
        let numbers = self.gpus.iter().enumerate().map(|(number, gpu)| {
            let first_near = || {
                (0..number)
                    .find(|other| {
                        self.ancestor(*other, number)
                            .is_some_and(|level| level <= Ancestor::Node)
                    })
                    .unwrap_or(number)
            };
            match are_known {
                true => format!("socket{}", gpu.package.or(gpu.numa_node).unwrap_or(0)),
                // No level at all: a virtual machine, or one GPU.
                false if self.pairs.iter().all(|pair| pair.ancestor.is_none()) => {
                    "socket0".to_owned()
                }
                false => format!("socket-of-gpu{}", first_near()),
            }
        });
        numbers.collect()
    }

    fn ancestor(&self, one: usize, other: usize) -> Option<Ancestor> {
        self.pairs
            .iter()
            .find(|pair| (pair.from, pair.to) == (one, other))
            .and_then(|pair| pair.ancestor)
    }

    /// Root and switches of a GPU by NVML's levels: those at one level are together, by the first of them.
    fn by_levels(&self, number: usize, pcie: Pcie) -> (String, Vec<(String, Pcie)>) {
        let first = |most: Ancestor| {
            (0..number)
                .find(|other| {
                    self.ancestor(*other, number)
                        .is_some_and(|level| level <= most)
                })
                .unwrap_or(number)
        };
        let has_company = |most: Ancestor| {
            (0..self.gpus.len()).any(|other| {
                other != number
                    && self
                        .ancestor(number, other)
                        .is_some_and(|level| level <= most)
            })
        };
        let mut switches = Vec::new();
        for (name, level) in [
            ("switches", Ancestor::Multiple),
            ("switch", Ancestor::Single),
        ] {
            if has_company(level) {
                switches.push((format!("{name}-of-gpu{}", first(level)), pcie));
            }
        }
        (
            format!("root-of-gpu{}", first(Ancestor::HostBridge)),
            switches,
        )
    }

    fn lay_nvlink(&self, description: &mut Description, hints: &mut Vec<String>) {
        let number = |bus_id: &str| self.gpus.iter().position(|gpu| gpu.bus_id == bus_id);
        let mut direct: BTreeMap<(usize, usize), f64> = BTreeMap::new();
        let mut switched = vec![0.0; self.gpus.len()];
        for (from, (gpu, to_switch)) in self.gpus.iter().zip(&mut switched).enumerate() {
            for link in &gpu.nvlinks {
                match link.remote.as_deref().and_then(number) {
                    Some(to) if from < to => {
                        *direct.entry((from, to)).or_default() += nvlink_gbps(link);
                    }
                    // The other end counts it.
                    Some(_) => {}
                    None => *to_switch += nvlink_gbps(link),
                }
            }
        }
        let least = switched.iter().copied().fold(f64::INFINITY, f64::min);
        let most = switched.iter().copied().fold(0.0, f64::max);
        if least < most {
            hints.push(format!(
                "NVLink to the switch: {least} to {most} GB/s by GPU; links are down, see `nvidia-smi nvlink -s`"
            ));
        }
        // With one GPU there is nobody to reach.
        let switch_gbps = (least > 0.0 && self.gpus.len() > 1).then_some(least);
        if switch_gbps.is_some() || !direct.is_empty() {
            description.nvlink = Some(NvLink {
                switch_gbps,
                pairs: direct
                    .into_iter()
                    .map(|((from, to), gbps)| NvLinkPair {
                        gpus: [gpu_name(from), gpu_name(to)],
                        gbps,
                    })
                    .collect(),
            });
            description
                .sources
                .push("NVLink: links that are up, at their version's nominal rate".to_owned());
        }
    }

    fn say_peers(&self, description: &mut Description, hints: &mut Vec<String>) {
        let is_closed = |status: &str| !status.is_empty() && status != "ok";
        let closed: Vec<&FoundPair> = self
            .pairs
            .iter()
            .filter(|pair| is_closed(&pair.read) || is_closed(&pair.write))
            .collect();
        for pair in closed.iter().take(1) {
            let reason = [&pair.read, &pair.write]
                .into_iter()
                .find(|status| is_closed(status));
            hints.push(format!(
                "{} of {} pairs cannot reach each other's memory, gpu{} to gpu{} for one: {}",
                closed.len(),
                self.pairs.len(),
                pair.from,
                pair.to,
                reason.map_or("", String::as_str)
            ));
        }
        if !closed.is_empty() && closed.len() == self.pairs.len() {
            description.peer_access = false;
            return;
        }
        description.pairs = closed
            .into_iter()
            .map(|pair| Pair {
                from: gpu_name(pair.from),
                to: gpu_name(pair.to),
                peer_access: false,
                write_gbps: None,
                read_gbps: None,
                flag_us: None,
            })
            .collect();
    }

    /// What makes PCIe between peers slow or wrong.
    fn look_for_what_slows(&self, description: &Description, hints: &mut Vec<String>) {
        if description.nvlink.is_some() || self.gpus.len() < 2 {
            return;
        }
        let mut redirecting: Vec<&str> = self
            .gpus
            .iter()
            .filter_map(|gpu| gpu.place.as_ref())
            .flat_map(|place| &place.bridges)
            .filter(|bridge| bridge.redirects == Some(true))
            .map(|bridge| bridge.bus_id.as_str())
            .collect();
        redirecting.sort_unstable();
        redirecting.dedup();
        if let Some(first) = redirecting.first() {
            hints.push(format!(
                "ACS of {} ports ({first} for one) sends what peers exchange up to the root complex: switch off ACS in the firmware, or by `setpci -s {first} ECAP_ACS+6.w=0`",
                redirecting.len()
            ));
        }
        let is_unread = |bridge: &FoundBridge| bridge.redirects.is_none();
        let mut bridges = self
            .gpus
            .iter()
            .filter_map(|gpu| gpu.place.as_ref())
            .flat_map(|place| &place.bridges)
            .peekable();
        if bridges.peek().is_some() && bridges.all(is_unread) {
            hints.push(
                "whether ACS redirects what peers exchange is not readable: only root sees it"
                    .to_owned(),
            );
        }
        let translated = |gpu: &&FoundGpu| {
            gpu.iommu_type
                .as_deref()
                .is_some_and(|kind| kind.starts_with("DMA"))
        };
        if self.has_iommu
            && let Some(gpu) = self.gpus.iter().find(translated)
        {
            hints.push(format!(
                "the IOMMU translates what {} sends ({}): peers exchange through it, slower or not at all; boot with iommu=pt",
                gpu.bus_id,
                gpu.iommu_type.as_deref().unwrap_or("")
            ));
        }
        for (number, gpu) in self.gpus.iter().enumerate() {
            if let (Some(now), Some(most)) = (gpu.width, gpu.max_width)
                && now < most
            {
                hints.push(format!(
                    "gpu{number} ({}) has {now} of {most} PCIe lanes: see its slot or riser",
                    gpu.bus_id
                ));
            }
        }
    }
}

/// Switches from the top down: below the root port, ports come in twos, upstream and downstream. A switch is named by its
/// upstream port, which all its GPUs share.
fn switches_of(place: &FoundPlace, gpu: Pcie) -> Vec<(String, Pcie)> {
    let below = place.bridges.get(1..).unwrap_or_default();
    below
        .chunks(2)
        .filter_map(|ports| {
            let up = ports.first()?;
            let pcie = Pcie {
                generation: up.generation.unwrap_or(gpu.generation),
                width: up.width.unwrap_or(gpu.width),
            };
            Some((format!("switch {}", up.bus_id), pcie))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use crate::topology::sysfs::{self, tests::Tree, tests::config_with_acs};
    use crate::topology::{Fabric, Topology};

    fn gpu(product: &str, number: usize, generation: u32) -> FoundGpu {
        FoundGpu {
            uuid: format!("GPU-00000000-0000-0000-0000-{number:012x}"),
            product: product.to_owned(),
            bus_id: format!("0000:{:02x}:00.0", 0x10 + number),
            max_generation: Some(generation),
            max_width: Some(16),
            width: Some(16),
            ..FoundGpu::default()
        }
    }

    /// GPUs that reach each other, at levels that `level` tells.
    fn found(gpus: Vec<FoundGpu>, level: impl Fn(usize, usize) -> Ancestor) -> Found {
        let mut pairs = Vec::new();
        for from in 0..gpus.len() {
            for to in (0..gpus.len()).filter(|to| *to != from) {
                pairs.push(FoundPair {
                    from,
                    to,
                    ancestor: Some(level(from, to)),
                    read: "ok".to_owned(),
                    write: "ok".to_owned(),
                    ..FoundPair::default()
                });
            }
        }
        Found {
            driver: Some("580.159".to_owned()),
            gpus,
            pairs,
            ..Found::default()
        }
    }

    fn built(found: &Found) -> (Topology, Vec<String>) {
        // It is data: what a machine said can be kept and looked at elsewhere.
        let kept: Found = serde_json::from_str(&serde_json::to_string(found).unwrap()).unwrap();
        assert_eq!(kept, *found);
        let Discovered {
            description, hints, ..
        } = kept.describe();
        let text = description.to_toml().unwrap();
        let read = Topology::from_toml("discovered", &text).unwrap();
        assert_eq!(read, Topology::new(description).unwrap());
        (read, hints)
    }

    fn all(topology: &Topology) -> Vec<usize> {
        (0..topology.gpus().len()).collect()
    }

    #[test]
    fn nothing_is_a_host() {
        let nothing = Found {
            trouble: vec!["no NVIDIA driver here".to_owned()],
            ..Found::default()
        };
        let (topology, hints) = built(&nothing);
        assert_eq!(topology.name(), "host");
        assert_eq!(topology.fabric(&[]), Fabric::Host);
        assert_eq!(hints, ["no NVIDIA driver here"]);
    }

    /// A rented GPU in a container: no tree, no NUMA node, NVLinks to a switch that serves others.
    #[test]
    fn one_gpu_is_enough() {
        let mut one = gpu("NVIDIA H200", 0, 5);
        one.nvlinks = vec![
            FoundLink {
                version: Some(6),
                speed_mbps: Some(26_562),
                remote: Some("0000:05:00.0".to_owned()),
            };
            18
        ];
        let (topology, hints) = built(&found(vec![one], |_, _| Ancestor::System));
        assert_eq!(topology.name(), "1 x NVIDIA H200");
        assert_eq!(topology.fabric(&[0, 0]), Fabric::Loopback);
        assert_eq!(topology.description().nvlink, None);
        assert_eq!(hints.len(), 1, "{hints:?}");
    }

    #[test]
    fn h100s_behind_nvswitches_are_one_group() {
        let gpus = (0..8)
            .map(|number| {
                let mut gpu = gpu("NVIDIA H100 80GB HBM3", number, 5);
                gpu.numa_node = Some(number as u32 / 4);
                gpu.package = gpu.numa_node;
                gpu.place = Some(FoundPlace {
                    root: format!("pci0000:{:02x}", number / 2),
                    bridges: vec![
                        FoundBridge {
                            bus_id: format!("0000:{:02x}:01.0", number / 2),
                            redirects: Some(true),
                            ..FoundBridge::default()
                        },
                        FoundBridge {
                            bus_id: format!("0000:{:02x}:00.0", 0x40 + number / 2),
                            generation: Some(5),
                            width: Some(16),
                            ..FoundBridge::default()
                        },
                        FoundBridge {
                            bus_id: format!("0000:{:02x}:{number:02x}.0", 0x50 + number / 2),
                            ..FoundBridge::default()
                        },
                    ],
                });
                // One link is down, and one driver does not tell the other end.
                let links = if number == 3 { 17 } else { 18 };
                gpu.nvlinks = (0..links)
                    .map(|link| FoundLink {
                        version: Some(6),
                        speed_mbps: (number != 5).then_some(26_562),
                        remote: (number != 6).then(|| format!("0000:{:02x}:00.0", 0x80 + link % 4)),
                    })
                    .collect();
                gpu
            })
            .collect();
        let (topology, hints) = built(&found(gpus, |_, _| Ancestor::Node));
        assert_eq!(topology.fabric(&all(&topology)), Fabric::NvlinkFull);
        let nvlink = topology.description().nvlink.clone().unwrap();
        assert_eq!(nvlink.switch_gbps, Some(425.0));
        assert!(nvlink.pairs.is_empty());
        assert_eq!(topology.description().switches.len(), 4);
        assert_eq!(topology.description().sockets.len(), 2);
        assert_eq!(
            hints,
            [
                "NVLink to the switch: 425 to 450 GB/s by GPU; links are down, see `nvidia-smi nvlink -s`"
            ]
        );
    }

    /// Two switches of two on a socket, read from a sysfs, and NVLink between the GPUs of one.
    #[test]
    fn v100s_behind_plx_switches_are_in_its_tree() {
        let tree = Tree::new("plx");
        let mut gpus = Vec::new();
        for number in 0..4_usize {
            let (top, up) = (
                format!("0000:00:0{}.0", 2 + number / 2),
                format!("0000:0{}:00.0", 1 + number / 2),
            );
            let down = format!("0000:0{}:0{}.0", 3 + number / 2, 8 * (number % 2));
            let gpu = gpu("Tesla V100-PCIE-32GB", number, 3);
            tree.device(&["pci0000:00", &top, &up, &down, &gpu.bus_id], 0);
            if number % 2 == 0 {
                tree.link(&format!("pci0000:00/{top}/{up}"), "8.0", 16);
            }
            tree.file(
                &format!("devices/pci0000:00/{top}/{up}/{down}/config"),
                config_with_acs(0b1101),
            );
            tree.file(
                &format!(
                    "devices/pci0000:00/{top}/{up}/{down}/{}/iommu_group/type",
                    gpu.bus_id
                ),
                "DMA-FQ\n",
            );
            gpus.push(gpu);
        }
        tree.file("class/iommu/dmar0", "");
        let mut found = found(gpus, |_, _| Ancestor::Multiple);
        sysfs::add(&tree.0, &mut found);
        let (topology, hints) = built(&found);
        let description = topology.description();
        let switches: Vec<&str> = description
            .switches
            .iter()
            .map(|of| of.name.as_str())
            .collect();
        assert_eq!(switches, ["switch 0000:01:00.0", "switch 0000:02:00.0"]);
        assert_eq!(
            description.switches[0].pcie,
            Pcie {
                generation: 3,
                width: 16
            }
        );
        assert_eq!(description.roots.len(), 1);
        assert_eq!(topology.fabric(&all(&topology)), Fabric::PcieOneRoot);
        assert_eq!(topology.island_size(&all(&topology)), Some(2));
        assert_eq!(topology.path(0, 1).len(), 2);
        assert_eq!(topology.path(0, 2).len(), 4);
        assert_eq!(hints.len(), 2, "{hints:?}");
        assert!(
            hints[0].starts_with("ACS of 4 ports (0000:03:00.0 for one)"),
            "{hints:?}"
        );
        assert!(hints[1].contains("iommu=pt"), "{hints:?}");
        // An NVLink bridge between the first two, of two links.
        let link = |remote: &str| FoundLink {
            version: Some(2),
            speed_mbps: None,
            remote: Some(remote.to_owned()),
        };
        found.gpus[0].nvlinks = vec![link("0000:11:00.0"); 2];
        found.gpus[1].nvlinks = vec![link("0000:10:00.0"); 2];
        let (bridged, _) = built(&found);
        assert_eq!(bridged.fabric(&all(&bridged)), Fabric::NvlinkPartial);
        let nvlink = bridged.description().nvlink.clone().unwrap();
        assert_eq!((nvlink.switch_gbps, nvlink.pairs.len()), (None, 1));
        assert_eq!(nvlink.pairs[0].gpus, ["gpu0", "gpu1"]);
        assert_eq!(nvlink.pairs[0].gbps, 50.0);
        assert_ne!(bridged.fingerprint(), topology.fingerprint());
    }

    fn two_sockets(with_tree: bool) -> Found {
        let gpus = (0..8)
            .map(|number| {
                let mut gpu = gpu("NVIDIA L40S", number, 4);
                if with_tree {
                    // Two NUMA nodes for each package.
                    gpu.numa_node = Some(number as u32 / 2);
                    gpu.package = Some(number as u32 / 4);
                    gpu.place = Some(FoundPlace {
                        root: format!("pci0000:{number:02x}"),
                        bridges: vec![FoundBridge {
                            bus_id: format!("0000:{number:02x}:01.1"),
                            ..FoundBridge::default()
                        }],
                    });
                }
                gpu
            })
            .collect();
        found(gpus, |from, to| match from / 4 == to / 4 {
            true => Ancestor::Node,
            false => Ancestor::System,
        })
    }

    #[test]
    fn two_sockets_are_two_islands() {
        for with_tree in [true, false] {
            let mut machine = two_sockets(with_tree);
            machine.gpus[2].width = Some(8);
            let (topology, hints) = built(&machine);
            assert_eq!(topology.fabric(&all(&topology)), Fabric::PcieIslands);
            assert_eq!(topology.island_size(&all(&topology)), Some(4));
            let description = topology.description();
            assert_eq!(description.sockets.len(), 2);
            assert_eq!(description.roots.len(), 8);
            assert!(description.switches.is_empty());
            assert_eq!(description.inter_socket, Some(InterSocket { gbps: 9.7 }));
            assert_eq!(
                topology.gpus()[2].pcie,
                Pcie {
                    generation: 4,
                    width: 8
                }
            );
            assert!(
                hints
                    .iter()
                    .any(|hint| hint.contains("gpu2 (0000:12:00.0) has 8 of 16")),
                "{hints:?}"
            );
            assert_eq!(topology.path(0, 1).len(), 2);
            assert_eq!(topology.path(0, 5).len(), 3);
        }
    }

    /// Where sysfs is hidden, NVML's levels make the tree.
    #[test]
    fn levels_make_a_tree_too() {
        let gpus = (0..8)
            .map(|number| gpu("NVIDIA A800 80GB PCIe", number, 4))
            .collect();
        let machine = found(gpus, |from, to| {
            match (from / 2 == to / 2, from / 4 == to / 4) {
                (true, _) => Ancestor::Single,
                (_, true) => Ancestor::Multiple,
                _ => Ancestor::System,
            }
        });
        let (topology, hints) = built(&machine);
        assert!(hints[0].starts_with("sysfs does not show"), "{hints:?}");
        let description = topology.description();
        assert_eq!(description.roots.len(), 2);
        assert_eq!(description.switches.len(), 6);
        assert_eq!(topology.path(0, 1).len(), 2);
        assert_eq!(topology.path(0, 2).len(), 4);
        assert_eq!(topology.fabric(&all(&topology)), Fabric::PcieIslands);
        // A virtual machine that says nothing at all.
        let mut silent = machine;
        for pair in &mut silent.pairs {
            pair.ancestor = None;
        }
        let (flat, _) = built(&silent);
        assert_eq!(flat.description().sockets.len(), 1);
    }

    #[test]
    fn closed_pairs_are_named() {
        let mut machine = two_sockets(true);
        for pair in machine
            .pairs
            .iter_mut()
            .filter(|pair| pair.from / 4 != pair.to / 4)
        {
            pair.write = "not between these root complexes".to_owned();
        }
        let (topology, hints) = built(&machine);
        assert_eq!(topology.description().pairs.len(), 32);
        assert!(!topology.has_peer_access(0, 4));
        assert!(topology.has_peer_access(0, 3));
        assert_eq!(topology.fabric(&all(&topology)), Fabric::NoPeerAccess);
        assert_eq!(topology.fabric(&[0, 1, 2, 3]), Fabric::PcieIslands);
        assert!(
            hints[0].starts_with("32 of 56 pairs cannot reach"),
            "{hints:?}"
        );
        for pair in &mut machine.pairs {
            pair.read = "the chipset does not support it".to_owned();
        }
        let (none, _) = built(&machine);
        assert!(!none.description().peer_access);
        assert!(none.description().pairs.is_empty());
    }

    #[test]
    fn more_gpus_than_a_topology_has_are_refused_by_number() {
        let gpus = (0..17).map(|number| gpu("X", number, 5)).collect();
        let Discovered { description, .. } = found(gpus, |_, _| Ancestor::Node).describe();
        let error = Topology::new(description).unwrap_err().to_string();
        assert!(error.starts_with("17 GPUs"), "{error}");
    }
}
