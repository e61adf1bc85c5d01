//! A short name for a machine and its links.
//!
//! Owns what belongs to it: GPUs, their places and what connects them. Called by whoever keeps something that holds for one machine only
//! (the table of `tune`). Refuses measured rates, words for people and names, which change while the machine does not.

use super::{Pcie, Topology};

/// FNV-1a, 64 bits. Nobody gains from a collision.
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, text: &str) {
        // A byte that no text has ends each, so that "ab", "c" and "a", "bc" differ.
        for byte in text.bytes().chain([0xff]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn pcie(&mut self, pcie: Pcie) {
        self.add(&format!("gen{} x{}", pcie.generation, pcie.width));
    }
}

impl Topology {
    /// 16 hexadecimal digits: the same for the same GPUs in the same places with the same links.
    pub(crate) fn fingerprint(&self) -> String {
        let description = self.description();
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        hash.add("allreduced topology 1");
        // Roots and switches by number: names may be anything.
        let parents: Vec<&str> = description
            .roots
            .iter()
            .map(|of| of.name.as_str())
            .chain(description.switches.iter().map(|of| of.name.as_str()))
            .collect();
        let place = |name: &str| {
            let found = parents.iter().position(|known| *known == name);
            found.map_or_else(String::new, |number| number.to_string())
        };
        let socket = |name: Option<&String>| {
            let found = name.and_then(|name| {
                description
                    .sockets
                    .iter()
                    .position(|known| known.name == *name)
            });
            found.unwrap_or(0).to_string()
        };
        for root in &description.roots {
            hash.add("root");
            hash.add(&socket(root.socket.as_ref()));
        }
        for switch in &description.switches {
            hash.add("switch");
            hash.add(&place(&switch.parent));
            hash.pcie(switch.pcie);
        }
        for gpu in &description.gpus {
            hash.add("gpu");
            hash.add(gpu.product.as_deref().unwrap_or_default());
            hash.add(gpu.uuid.as_deref().unwrap_or_default());
            hash.add(&place(&gpu.parent));
            hash.pcie(gpu.pcie);
            hash.add(
                &gpu.numa_node
                    .map_or_else(String::new, |node| node.to_string()),
            );
        }
        let num_gpus = description.gpus.len();
        for (from, to) in (0..num_gpus).flat_map(|from| (0..num_gpus).map(move |to| (from, to))) {
            hash.add(
                match (self.is_nvlink(from, to), self.has_peer_access(from, to)) {
                    (_, false) => "apart",
                    (false, true) => "pcie",
                    (true, true) => "nvlink",
                },
            );
        }
        // How many links there are: their nominal rate says it.
        let nvlink = description.nvlink.as_ref();
        let switched = nvlink.and_then(|of| of.switch_gbps);
        for gbps in switched.into_iter().chain(
            nvlink
                .into_iter()
                .flat_map(|of| &of.pairs)
                .map(|pair| pair.gbps),
        ) {
            hash.add(&gbps.to_string());
        }
        format!("{:016x}", hash.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use crate::topology::{Description, InterSocket, Pair, Rates, Topology, preset};

    fn of(description: Description) -> String {
        Topology::new(description).unwrap().fingerprint()
    }

    fn base() -> Description {
        let mut description = preset("a800x8-gen4-2x4").unwrap().description().clone();
        for (number, gpu) in description.gpus.iter_mut().enumerate() {
            gpu.uuid = Some(format!("GPU-00000000-0000-0000-0000-{number:012x}"));
        }
        description
    }

    #[test]
    fn measuring_and_naming_change_nothing() {
        let before = of(base());
        // Of this version for good: tables are kept by it.
        assert_eq!(before.len(), 16);
        let mut other = base();
        other.rates = Rates {
            write_gbps: Some(1.5),
            flag_us: Some(2.0),
            write_collapse_gbps: Some(3.0),
            ..Rates::default()
        };
        other.inter_socket = Some(InterSocket { gbps: 1.0 });
        other.name = "x".to_owned();
        other.description = "y".to_owned();
        other.sources = vec!["z".to_owned()];
        other.pairs = vec![Pair {
            from: "gpu0".to_owned(),
            to: "gpu1".to_owned(),
            peer_access: true,
            write_gbps: Some(20.0),
            read_gbps: None,
            flag_us: Some(1.0),
        }];
        assert_eq!(of(other), before);
        let mut renamed = base();
        renamed.switches[0].name = "other".to_owned();
        for gpu in renamed.gpus.iter_mut().take(4) {
            gpu.parent = "other".to_owned();
        }
        assert_eq!(of(renamed), before);
    }

    #[test]
    fn any_other_machine_is_another() {
        type Change = fn(&mut Description);
        let changes: [(&str, Change); 12] = [
            ("product", |of| of.gpus[3].product = Some("B".to_owned())),
            ("uuid", |of| of.gpus[3].uuid = None),
            ("width", |of| of.gpus[3].pcie.width = 8),
            ("generation", |of| of.gpus[3].pcie.generation = 3),
            ("parent", |of| of.gpus[3].parent = "plx1".to_owned()),
            ("uplink", |of| of.switches[0].pcie.width = 8),
            ("root", |of| of.switches[1].parent = "root0".to_owned()),
            ("socket", |of| {
                of.roots[1].socket = Some("socket0".to_owned())
            }),
            ("fewer", |of| drop(of.gpus.pop())),
            ("order", |of| of.gpus.swap(0, 7)),
            ("access", |of| of.peer_access = false),
            ("nvlink", |of| {
                of.nvlink = preset("h100x8-nvlink")
                    .unwrap()
                    .description()
                    .nvlink
                    .clone();
            }),
        ];
        let mut seen = vec![("none", of(base()))];
        for (what, change) in changes {
            let mut description = base();
            change(&mut description);
            let print = of(description);
            let same = seen.iter().find(|(_, known)| *known == print);
            assert!(same.is_none(), "{what} is as {same:?}");
            seen.push((what, print));
        }
    }
}
