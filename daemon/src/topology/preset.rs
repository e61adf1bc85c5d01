//! Machines by name.
//!
//! Owns the shipped descriptions of daemon/topologies: layouts and rates that somebody published, each with its sources. Called
//! by `explain`, the simulation and tests. Refuses names that it does not have, and lists those it has.

use super::{FileError, Topology};

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../topologies/", $name, ".toml")))),*]
    };
}

/// Every preset: its name, and its file.
pub(crate) const PRESETS: [(&str, &str); 10] = presets![
    "gen5x8-one-root",
    "rtxpro6000x4-gen5-switch",
    "rtxpro6000x8-gen5-3switch",
    "rtxpro6000x8-gen5-4vs-2socket",
    "sm120x8-gen5-2socket",
    "a800x8-gen4-2x4",
    "l40sx8-gen4",
    "v100x4-plx",
    "4090x4-nop2p",
    "h100x8-nvlink",
];

/// No preset of that name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PresetError {
    /// There is none.
    #[error("there is no topology {name:?}: known are {known}", known = names())]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// It is shipped and wrong, which a test excludes.
    #[error(transparent)]
    Wrong(#[from] FileError),
}

fn names() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

/// The preset of that name.
///
/// # Errors
/// [`PresetError`].
pub(crate) fn preset(name: &str) -> Result<Topology, PresetError> {
    let mut presets = PRESETS.into_iter();
    let (_, text) =
        presets
            .find(|(known, _)| *known == name)
            .ok_or_else(|| PresetError::Unknown {
                name: name.to_owned(),
            })?;
    Ok(Topology::from_toml(name, text)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]
    use super::*;
    use crate::topology::{Access, Fabric, LinkKind};

    fn all(topology: &Topology) -> Vec<usize> {
        (0..topology.gpus().len()).collect()
    }

    /// A wrong key, a missing parent or socket, or a rate that changes the fabric.
    #[test]
    fn every_preset_is_the_machine_it_says() {
        for (name, _) in PRESETS {
            let topology = preset(name).unwrap_or_else(|error| panic!("{error}"));
            let gpus = all(&topology);
            let (fabric, island, num_gpus) = match name {
                // Nothing parts them but that each is a GPU of its own.
                "gen5x8-one-root" => (Fabric::PcieOneRoot, None, 8),
                "rtxpro6000x4-gen5-switch" | "v100x4-plx" => (Fabric::PcieOneRoot, None, 4),
                "rtxpro6000x8-gen5-3switch" => (Fabric::PcieOneRoot, Some(4), 8),
                // Two of a switch, four of a socket: the widest counts.
                "rtxpro6000x8-gen5-4vs-2socket" => (Fabric::WriteCollapse, Some(4), 8),
                "sm120x8-gen5-2socket" | "a800x8-gen4-2x4" | "l40sx8-gen4" => {
                    (Fabric::PcieIslands, Some(4), 8)
                }
                "4090x4-nop2p" => (Fabric::NoPeerAccess, None, 4),
                "h100x8-nvlink" => (Fabric::NvlinkFull, Some(4), 8),
                other => panic!("{other}"),
            };
            assert_eq!(topology.name(), name);
            assert_eq!(gpus.len(), num_gpus, "{name}");
            assert_eq!(topology.fabric(&gpus), fabric, "{name}");
            assert_eq!(topology.island_size(&gpus), island, "{name}");
            let description = topology.description();
            assert!(!description.description.is_empty(), "{name}");
            assert!(!description.sources.is_empty(), "{name}");
            assert_eq!(topology.fabric(&gpus[..1]), Fabric::Loopback, "{name}");
        }
    }

    fn path(topology: &Topology, from: usize, to: usize) -> Vec<String> {
        let links = topology.path(from, to).iter();
        links
            .map(|link| topology.links()[*link].name.clone())
            .collect()
    }

    #[test]
    fn paths_go_through_what_is_between() {
        let three = preset("rtxpro6000x8-gen5-3switch").unwrap();
        assert_eq!(path(&three, 0, 3), ["gpu0 out", "gpu3 in"]);
        assert_eq!(
            path(&three, 1, 6),
            ["gpu1 out", "sw1 up", "sw2 down", "gpu6 in"]
        );
        let shared = |topology: &Topology, from, to| {
            let links = topology.path(from, to).iter();
            links
                .filter(|link| topology.links()[**link].kind == LinkKind::Shared)
                .count()
        };
        assert_eq!(shared(&three, 1, 6), 2);
        let two = preset("a800x8-gen4-2x4").unwrap();
        assert_eq!(
            path(&two, 7, 0),
            [
                "gpu7 out",
                "plx1 up",
                "socket1 to socket0",
                "plx0 down",
                "gpu0 in"
            ]
        );
        let direct = preset("sm120x8-gen5-2socket").unwrap();
        assert_eq!(path(&direct, 0, 3), ["gpu0 out", "gpu3 in"]);
        assert_eq!(
            path(&direct, 0, 4),
            ["gpu0 out", "socket0 to socket1", "gpu4 in"]
        );
        let h100 = preset("h100x8-nvlink").unwrap();
        assert_eq!(path(&h100, 2, 5), ["gpu2 nvlink out", "gpu5 nvlink in"]);
        assert!(h100.path(3, 3).is_empty());
    }

    #[test]
    fn rates_are_those_published() {
        let gen5 = preset("gen5x8-one-root").unwrap();
        let rate = |topology: &Topology, access, peers| topology.port_gbps(0, access, peers);
        assert_eq!(rate(&gen5, Access::Write, 1), 45.0);
        assert_eq!(rate(&gen5, Access::Write, 7), 25.0);
        assert_eq!(rate(&gen5, Access::Read, 7), 21.0);
        // Of their generation.
        let v100 = preset("v100x4-plx").unwrap();
        assert_eq!(rate(&v100, Access::Read, 3), 12.0);
        let a800 = preset("a800x8-gen4-2x4").unwrap();
        assert!((21.0..=26.0).contains(&rate(&a800, Access::Write, 1)));
        assert!(!preset("4090x4-nop2p").unwrap().has_peer_access(0, 1));
    }

    /// Of docs/topology.md: its example is read, and its table knows every preset and its fabric.
    #[test]
    fn the_documentation_is_true() {
        let text = include_str!("../../../docs/topology.md");
        let (_, example) = text.split_once("```toml\n").unwrap();
        let (example, _) = example.split_once("```").unwrap();
        let topology = Topology::from_toml("docs/topology.md", example);
        let topology = topology.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(topology.gpus().len(), 4);
        for (name, _) in PRESETS {
            let topology = preset(name).unwrap();
            let fabric = topology.fabric(&all(&topology)).name();
            let row = text
                .lines()
                .find(|line| line.starts_with(&format!("| `{name}` |")));
            let row = row.unwrap_or_else(|| panic!("{name} has no row"));
            assert!(row.contains(&format!("| {fabric} |")), "{row}");
        }
    }

    #[test]
    fn unknown_names_are_told_the_known() {
        let error = preset("dgx").unwrap_err().to_string();
        assert!(error.starts_with("there is no topology \"dgx\": known are gen5x8-one-root, "));
        assert!(error.ends_with("h100x8-nvlink"), "{error}");
    }
}
