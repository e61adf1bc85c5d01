//! From a description to links.
//!
//! Owns the checks of a description and the paths: PCIe is a tree (socket, root complexes, switches, GPUs), so there is one
//! way between two GPUs; NVLink, where it connects two, takes its place. Refuses whatever does not add up, by name.

use super::description::Description;
use super::{
    Link, LinkId, LinkKind, MAX_GPUS, Path, PlaceOfGpu, SCHEMA_VERSION, Topology, TopologyError,
};
use std::collections::{HashMap, HashSet};

/// A node of the PCIe tree above the GPUs.
struct Node {
    parent: Option<String>,
    /// Its links towards the parent and back; none for what has no link of its own (root complexes, sockets).
    up: Option<LinkId>,
    down: Option<LinkId>,
}

fn positive(key: &str, value: Option<f64>) -> Result<(), TopologyError> {
    match value {
        Some(value) if !(1e-6..=1e9).contains(&value) => Err(TopologyError::BadNumber {
            key: key.to_owned(),
            value,
            wanted: "a number from 0.000001 to 1000000000",
        }),
        Some(_) | None => Ok(()),
    }
}

fn check_numbers(description: &Description) -> Result<(), TopologyError> {
    if description.schema_version != SCHEMA_VERSION {
        return Err(TopologyError::Version(description.schema_version));
    }
    if description.gpus.len() > MAX_GPUS {
        return Err(TopologyError::TooManyGpus(description.gpus.len()));
    }
    let rates = &description.rates;
    for (key, value) in [
        ("rates.write_gbps", rates.write_gbps),
        ("rates.read_gbps", rates.read_gbps),
        ("rates.write_all_gbps", rates.write_all_gbps),
        ("rates.read_all_gbps", rates.read_all_gbps),
        ("rates.write_collapse_gbps", rates.write_collapse_gbps),
        ("rates.host_write_gbps", rates.host_write_gbps),
        ("rates.host_read_gbps", rates.host_read_gbps),
        ("rates.memory_gbps", rates.memory_gbps),
        ("rates.flag_us", rates.flag_us),
        ("rates.launch_us", rates.launch_us),
        ("rates.core_copy_gbps", rates.core_copy_gbps),
        ("rates.core_flag_us", rates.core_flag_us),
        (
            "inter_socket.gbps",
            description.inter_socket.as_ref().map(|of| of.gbps),
        ),
        (
            "nvlink.switch_gbps",
            description.nvlink.as_ref().and_then(|of| of.switch_gbps),
        ),
    ] {
        positive(key, value)?;
    }
    for pair in description.nvlink.iter().flat_map(|nvlink| &nvlink.pairs) {
        positive("nvlink.pair.gbps", Some(pair.gbps))?;
    }
    for pair in &description.pairs {
        let key = |of: &str| format!("pair {} to {}: {of}", pair.from, pair.to);
        positive(&key("write_gbps"), pair.write_gbps)?;
        positive(&key("read_gbps"), pair.read_gbps)?;
        positive(&key("flag_us"), pair.flag_us)?;
    }
    let ports = description.gpus.iter().map(|gpu| (&gpu.name, gpu.pcie));
    let ports = ports.chain(
        description
            .switches
            .iter()
            .map(|switch| (&switch.name, switch.pcie)),
    );
    for (name, pcie) in ports {
        let whole = |key: &str, value: u32, good: bool, wanted| match good {
            true => Ok(()),
            false => Err(TopologyError::BadNumber {
                key: format!("{name}: pcie.{key}"),
                value: f64::from(value),
                wanted,
            }),
        };
        whole(
            "generation",
            pcie.generation,
            (1..=7).contains(&pcie.generation),
            "1 to 7",
        )?;
        let widths = [1, 2, 4, 8, 12, 16, 32];
        whole(
            "width",
            pcie.width,
            widths.contains(&pcie.width),
            "lanes of a port: 1, 2, 4, 8, 12, 16 or 32",
        )?;
    }
    Ok(())
}

/// Numbers of things by name, each once.
fn numbered<'a>(
    what: &'static str,
    names: impl Iterator<Item = &'a String>,
) -> Result<HashMap<&'a str, usize>, TopologyError> {
    let mut found = HashMap::new();
    for (number, name) in names.enumerate() {
        let bad = |why| TopologyError::BadName {
            what,
            name: name.clone(),
            why,
        };
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err(bad("is no name"));
        }
        if found.insert(name.as_str(), number).is_some() {
            return Err(bad("is there twice"));
        }
    }
    Ok(found)
}

/// The nodes from `from` upwards, and the root complex, which is the last of them.
fn climb(
    nodes: &HashMap<String, Node>,
    from: &str,
) -> Result<(Vec<String>, String), TopologyError> {
    let mut chain = Vec::new();
    let mut at = from.to_owned();
    loop {
        let bad = |what, why| TopologyError::BadName {
            what,
            name: at.clone(),
            why,
        };
        let node = nodes
            .get(&at)
            .ok_or_else(|| bad("root or switch", "is not described"))?;
        if chain.contains(&at) {
            return Err(bad("switch", "is above itself"));
        }
        chain.push(at.clone());
        match &node.parent {
            Some(parent) => at.clone_from(parent),
            None => return Ok((chain, at)),
        }
    }
}

/// UUIDs are what NVML and CUDA print, each once.
fn check_uuids(description: &Description) -> Result<(), TopologyError> {
    let uuids = || description.gpus.iter().filter_map(|gpu| gpu.uuid.as_ref());
    numbered("uuid", uuids())?;
    let is_uuid = |uuid: &&String| {
        let digits = uuid
            .strip_prefix("GPU-")
            .or_else(|| uuid.strip_prefix("MIG-"));
        let groups: Vec<&str> = digits.unwrap_or_default().split('-').collect();
        groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
            && groups
                .iter()
                .all(|group| group.bytes().all(|digit| digit.is_ascii_hexdigit()))
    };
    match uuids().find(|uuid| !is_uuid(uuid)) {
        Some(uuid) => Err(TopologyError::BadName {
            what: "uuid",
            name: uuid.clone(),
            why: "is no UUID",
        }),
        None => Ok(()),
    }
}

pub(super) fn build(description: Description) -> Result<Topology, TopologyError> {
    check_numbers(&description)?;
    check_uuids(&description)?;
    let sockets = numbered("socket", description.sockets.iter().map(|of| &of.name))?;
    let gpus = numbered("gpu", description.gpus.iter().map(|of| &of.name))?;
    numbered(
        "root or switch",
        description
            .roots
            .iter()
            .map(|of| &of.name)
            .chain(description.switches.iter().map(|of| &of.name)),
    )?;
    let mut links = Vec::new();
    let mut add = |name: String, gbps: f64, kind| {
        links.push(Link { name, gbps, kind });
        links.len() - 1
    };
    let mut nodes: HashMap<String, Node> = HashMap::new();
    let first_socket = description
        .sockets
        .first()
        .map_or("socket", |of| of.name.as_str());
    for root in &description.roots {
        let socket = root.socket.as_ref();
        if let Some(socket) = socket.filter(|socket| !sockets.contains_key(socket.as_str())) {
            return Err(TopologyError::BadName {
                what: "socket",
                name: socket.clone(),
                why: "is not described",
            });
        }
        nodes.insert(
            root.name.clone(),
            Node {
                parent: None,
                up: None,
                down: None,
            },
        );
    }
    for switch in &description.switches {
        let gbps = switch.pcie.gbps();
        let up = add(format!("{} up", switch.name), gbps, LinkKind::Shared);
        let down = add(format!("{} down", switch.name), gbps, LinkKind::Shared);
        nodes.insert(
            switch.name.clone(),
            Node {
                parent: Some(switch.parent.clone()),
                up: Some(up),
                down: Some(down),
            },
        );
    }
    // A switch that no GPU is below must have a root complex, too.
    for switch in &description.switches {
        climb(&nodes, &switch.name)?;
    }
    // From a GPU upwards: nodes to its root complex.
    let mut chains: Vec<Vec<String>> = Vec::new();
    let mut places = Vec::new();
    for gpu in &description.gpus {
        let (chain, root) = climb(&nodes, &gpu.parent)?;
        let socket = description
            .roots
            .iter()
            .find(|of| of.name == root)
            .and_then(|of| of.socket.clone());
        places.push(PlaceOfGpu {
            parent: gpu.parent.clone(),
            root,
            socket: socket.unwrap_or_else(|| first_socket.to_owned()),
            to_host: Vec::new(),
            from_host: Vec::new(),
        });
        chains.push(chain);
    }
    let ports: Vec<(LinkId, LinkId)> = (0..)
        .zip(&description.gpus)
        .map(|(number, gpu)| {
            let gbps = gpu.pcie.gbps();
            (
                add(format!("{} out", gpu.name), gbps, LinkKind::GpuOut(number)),
                add(format!("{} in", gpu.name), gbps, LinkKind::GpuIn(number)),
            )
        })
        .collect();
    for ((place, chain), (out, into)) in places.iter_mut().zip(&chains).zip(&ports) {
        let above = || chain.iter().filter_map(|node| nodes.get(node));
        place.to_host = std::iter::once(*out)
            .chain(above().filter_map(|node| node.up))
            .collect();
        place.from_host = std::iter::once(*into)
            .chain(above().filter_map(|node| node.down))
            .collect();
    }
    let mut between_sockets: HashMap<(String, String), LinkId> = HashMap::new();
    if let Some(inter) = &description.inter_socket {
        for one in &description.sockets {
            for other in description
                .sockets
                .iter()
                .filter(|other| other.name != one.name)
            {
                let link = add(
                    format!("{} to {}", one.name, other.name),
                    inter.gbps,
                    LinkKind::Shared,
                );
                between_sockets.insert((one.name.clone(), other.name.clone()), link);
            }
        }
    }
    let nvlink = description.nvlink.clone().unwrap_or_default();
    let nvswitch: Option<Vec<(LinkId, LinkId)>> = nvlink.switch_gbps.map(|gbps| {
        description
            .gpus
            .iter()
            .map(|gpu| {
                (
                    add(format!("{} nvlink out", gpu.name), gbps, LinkKind::Nvlink),
                    add(format!("{} nvlink in", gpu.name), gbps, LinkKind::Nvlink),
                )
            })
            .collect()
    });
    let number = |name: &str| {
        gpus.get(name)
            .copied()
            .ok_or_else(|| TopologyError::BadName {
                what: "gpu",
                name: name.to_owned(),
                why: "is not described",
            })
    };
    let mut direct: HashMap<(usize, usize), LinkId> = HashMap::new();
    for pair in &nvlink.pairs {
        let [one, other] = &pair.gpus;
        let (from, to) = (number(one)?, number(other)?);
        if from == to {
            return Err(TopologyError::BadName {
                what: "gpu",
                name: one.clone(),
                why: "has NVLink to itself",
            });
        }
        for (from, to, names) in [(from, to, (one, other)), (to, from, (other, one))] {
            let link = add(
                format!("nvlink {} to {}", names.0, names.1),
                pair.gbps,
                LinkKind::Nvlink,
            );
            if direct.insert((from, to), link).is_some() {
                return Err(TopologyError::BadName {
                    what: "nvlink pair of",
                    name: one.clone(),
                    why: "is there twice",
                });
            }
        }
    }
    let mut paths: HashMap<(usize, usize), Path> = HashMap::new();
    for (from, (from_place, from_chain)) in places.iter().zip(&chains).enumerate() {
        for (to, (to_place, to_chain)) in places.iter().zip(&chains).enumerate() {
            if from == to {
                continue;
            }
            let switched = nvswitch
                .as_ref()
                .and_then(|ports| Some(vec![ports.get(from)?.0, ports.get(to)?.1]));
            let by_nvlink = direct.get(&(from, to)).map(|link| vec![*link]).or(switched);
            let is_nvlink = by_nvlink.is_some();
            let by_pcie = || {
                let mut path = Vec::new();
                path.extend(ports.get(from).map(|(out, _)| *out));
                let is_below = |node: &&String| !to_chain.contains(node);
                path.extend(
                    from_chain
                        .iter()
                        .take_while(is_below)
                        .filter_map(|node| nodes.get(node)?.up),
                );
                if from_place.socket != to_place.socket {
                    path.extend(
                        between_sockets.get(&(from_place.socket.clone(), to_place.socket.clone())),
                    );
                }
                let is_below = |node: &&String| !from_chain.contains(node);
                path.extend(
                    to_chain
                        .iter()
                        .take_while(is_below)
                        .filter_map(|node| nodes.get(node)?.down),
                );
                path.extend(ports.get(to).map(|(_, into)| *into));
                path
            };
            paths.insert(
                (from, to),
                Path {
                    links: by_nvlink.unwrap_or_else(by_pcie),
                    is_nvlink,
                    peer_access: description.peer_access,
                    ..Path::default()
                },
            );
        }
    }
    let mut measured = HashSet::new();
    for pair in &description.pairs {
        let (from, to) = (number(&pair.from)?, number(&pair.to)?);
        if !measured.insert((from, to)) {
            return Err(TopologyError::BadName {
                what: "pair of gpu",
                name: pair.from.clone(),
                why: "is there twice",
            });
        }
        let path = paths
            .get_mut(&(from, to))
            .ok_or_else(|| TopologyError::BadName {
                what: "pair of gpu",
                name: pair.from.clone(),
                why: "is of one GPU with itself",
            })?;
        path.peer_access &= pair.peer_access;
        path.write_gbps = pair.write_gbps;
        path.read_gbps = pair.read_gbps;
        path.flag_us = pair.flag_us;
    }
    Ok(Topology {
        description,
        links,
        paths,
        places,
    })
}
