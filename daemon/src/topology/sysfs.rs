//! The PCIe tree as sysfs shows it.
//!
//! Owns reading, from a root that tests make themselves. Called by `discover`, for bus ids that NVML gave. Refuses to fail:
//! what is not there or not readable is not said, since containers hide most of it.

use super::found::{Found, FoundBridge, FoundGpu, FoundPlace};
use std::fs;
use std::path::{Path, PathBuf};

/// First line of a small file; none if it cannot be read or is empty.
fn line(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

fn number(path: &Path) -> Option<u32> {
    // NUMA nodes that are none are -1.
    line(path)?.parse().ok()
}

/// "32.0 GT/s PCIe" to 5.
fn generation(path: &Path) -> Option<u32> {
    let text = line(path)?;
    match text.split_whitespace().next()? {
        "2.5" => Some(1),
        "5.0" | "5" => Some(2),
        "8.0" | "8" => Some(3),
        "16.0" | "16" => Some(4),
        "32.0" | "32" => Some(5),
        "64.0" | "64" => Some(6),
        _ => None,
    }
}

/// Adds to what NVML found what is below `root`, which is /sys but in tests.
pub(super) fn add(root: &Path, found: &mut Found) {
    found.has_iommu = fs::read_dir(root.join("class/iommu"))
        .is_ok_and(|mut entries| entries.any(|entry| entry.is_ok()));
    for gpu in &mut found.gpus {
        add_gpu(root, gpu);
    }
}

fn add_gpu(root: &Path, gpu: &mut FoundGpu) {
    let device = root.join("bus/pci/devices").join(&gpu.bus_id);
    let Ok(real) = fs::canonicalize(&device) else {
        return;
    };
    // NVML knows better what GPU and slot can do together.
    gpu.max_generation = gpu
        .max_generation
        .or_else(|| generation(&real.join("max_link_speed")));
    gpu.width = gpu
        .width
        .or_else(|| number(&real.join("current_link_width")));
    gpu.numa_node = number(&real.join("numa_node"));
    gpu.package = gpu.numa_node.and_then(|node| package(root, node));
    gpu.iommu_type = line(&real.join("iommu_group/type"));
    gpu.place = place(&real);
}

/// The processor package of a NUMA node: that of its first processor.
fn package(root: &Path, node: u32) -> Option<u32> {
    let processors = line(&root.join(format!("devices/system/node/node{node}/cpulist")))?;
    let first = processors
        .split(|mark: char| !mark.is_ascii_digit())
        .next()?;
    number(&root.join(format!(
        "devices/system/cpu/cpu{first}/topology/physical_package_id"
    )))
}

/// The directories above a device: the host bridge's, then a bridge in each.
fn place(device: &Path) -> Option<FoundPlace> {
    let mut above: Vec<PathBuf> = Vec::new();
    let mut at = device.parent()?;
    loop {
        let name = at.file_name()?.to_str()?;
        if is_host_bridge(name) {
            let bridges = above.iter().rev().map(|path| bridge(path)).collect();
            return Some(FoundPlace {
                root: name.to_owned(),
                bridges,
            });
        }
        above.push(at.to_owned());
        at = at.parent()?;
    }
}

/// pciDDDD:BB.
fn is_host_bridge(name: &str) -> bool {
    name.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| {
            [domain, bus]
                .iter()
                .all(|part| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_hexdigit()))
        })
}

fn bridge(path: &Path) -> FoundBridge {
    FoundBridge {
        bus_id: path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default()
            .to_owned(),
        generation: generation(&path.join("max_link_speed")),
        width: number(&path.join("current_link_width")).filter(|width| *width > 0),
        redirects: fs::read(path.join("config"))
            .ok()
            .and_then(|config| acs_redirects(&config)),
    }
}

/// Extended capability: Access Control Services, and its control bits P2P Request Redirect and Completion Redirect.
const ACS_ID: u32 = 0x000d;
const ACS_CONTROL_OFFSET_BYTES: usize = 6;
const ACS_REDIRECT: u8 = 0b1100;

/// Whether a port's config space says that ACS redirects; none if the space is cut off (for all but root, after 64
/// bytes) or has no ACS.
fn acs_redirects(config: &[u8]) -> Option<bool> {
    let word = |at: usize| -> Option<u32> {
        let bytes = config.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let mut at = 0x100;
    // A list that goes round ends here too: it cannot have more entries than the space has words.
    for _ in 0..1024 {
        let header = word(at)?;
        if header & 0xffff == ACS_ID {
            let control = config.get(at.checked_add(ACS_CONTROL_OFFSET_BYTES)?)?;
            return Some(control & ACS_REDIRECT != 0);
        }
        at = (header >> 20) as usize;
        if at < 0x100 {
            return None;
        }
    }
    None
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    /// A sysfs of a test's own.
    pub(in crate::topology) struct Tree(pub(in crate::topology) PathBuf);

    impl Tree {
        pub(in crate::topology) fn new(name: &str) -> Self {
            let root = std::env::temp_dir()
                .join(format!("allreduced-sysfs-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
            Self(root)
        }

        /// A file, relative to the root.
        pub(in crate::topology) fn file(&self, path: &str, contents: impl AsRef<[u8]>) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }

        /// A device below the given nodes, the first of which is the host bridge.
        pub(in crate::topology) fn device(&self, chain: &[&str], numa_node: i32) {
            let path = format!("devices/{}", chain.join("/"));
            self.file(&format!("{path}/numa_node"), format!("{numa_node}\n"));
            let link = self.0.join("bus/pci/devices").join(chain[chain.len() - 1]);
            std::os::unix::fs::symlink(format!("../../../{path}"), link).unwrap();
        }

        /// A link of a bridge.
        pub(in crate::topology) fn link(&self, path: &str, speed: &str, width: u32) {
            self.file(
                &format!("devices/{path}/max_link_speed"),
                format!("{speed} GT/s PCIe\n"),
            );
            self.file(
                &format!("devices/{path}/current_link_width"),
                format!("{width}\n"),
            );
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    pub(in crate::topology) fn config_with_acs(control: u8) -> Vec<u8> {
        let mut config = vec![0; 4096];
        // Another capability, then ACS.
        config[0x100..0x104].copy_from_slice(&0x1481_0001_u32.to_le_bytes());
        config[0x148..0x14c].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
        config[0x14e] = control;
        config
    }

    #[test]
    fn acs_is_read_where_it_can_be() {
        assert_eq!(acs_redirects(&config_with_acs(0b1101)), Some(true));
        assert_eq!(acs_redirects(&config_with_acs(0b0001)), Some(false));
        assert_eq!(acs_redirects(&[0; 64]), None);
        assert_eq!(acs_redirects(&[0; 4096]), None);
        assert_eq!(acs_redirects(&[0xff; 4096]), None);
        // A list that goes round.
        let mut round = vec![0; 4096];
        round[0x100..0x104].copy_from_slice(&0x1001_0001_u32.to_le_bytes());
        assert_eq!(acs_redirects(&round), None);
    }

    #[test]
    fn the_tree_above_a_gpu_is_found() {
        let tree = Tree::new("above");
        let chain = [
            "pci0000:3a",
            "0000:3a:00.0",
            "0000:3b:00.0",
            "0000:3c:08.0",
            "0000:3d:00.0",
        ];
        tree.device(&chain, 1);
        let switch = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";
        tree.link(switch, "16.0", 8);
        tree.file(
            &format!("devices/{switch}/0000:3c:08.0/config"),
            config_with_acs(4),
        );
        tree.file("devices/system/node/node1/cpulist", "24-47,72-95\n");
        tree.file(
            "devices/system/cpu/cpu24/topology/physical_package_id",
            "1\n",
        );
        tree.file("class/iommu/dmar0", "");
        let gpu = |bus_id: &str| FoundGpu {
            bus_id: bus_id.to_owned(),
            ..FoundGpu::default()
        };
        let mut found = Found {
            gpus: vec![gpu("0000:3d:00.0"), gpu("0000:99:00.0"), gpu("../../x")],
            ..Found::default()
        };
        add(&tree.0, &mut found);
        assert!(found.has_iommu);
        let place = found.gpus[0].place.as_ref().unwrap();
        assert_eq!(place.root, "pci0000:3a");
        let ids: Vec<&str> = place.bridges.iter().map(|of| of.bus_id.as_str()).collect();
        assert_eq!(ids, &chain[1..4]);
        assert_eq!(place.bridges[1].generation, Some(4));
        assert_eq!(place.bridges[1].width, Some(8));
        assert_eq!(place.bridges[2].redirects, Some(true));
        assert_eq!(
            (found.gpus[0].numa_node, found.gpus[0].package),
            (Some(1), Some(1))
        );
        assert_eq!(found.gpus[1].place, None);
        assert_eq!(found.gpus[2].place, None);
    }
}
