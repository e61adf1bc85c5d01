//! The topology: what connects the GPUs of a machine, and how fast that is.
//!
//! Owns [`Description`] (what a file says, a machine shows, or a probe has measured) and [`Topology`], the same
//! checked and turned into directed links, so that a path between two GPUs is a list of links. Called by the plan
//! (costs of a communicator), `explain`, `probe`, `tune` and the simulation. Refuses to decide: which algorithm is
//! best on it is the plan's business.
//!
//! Rates are in GB/s (10^9 bytes a second), times in microseconds; both are of what programs get, not of the wire's
//! symbols.

mod build;
mod description;
mod discover;
mod file;
mod fingerprint;
mod found;
mod load;
mod machine;
mod nvml;
mod preset;
mod sysfs;

pub(crate) use discover::{DiscoverError, discover, discover_listed};
pub(crate) use file::FileError;
pub(crate) use found::Discovered;
pub(crate) use load::{LoadError, find, load};
pub(crate) use machine::{Machine, Placed};
pub(crate) use preset::{PRESETS, preset};

pub(crate) use description::{
    Description, Gpu, InterSocket, NvLink, NvLinkPair, Pair, Pcie, Rates, Root, Socket, Switch,
};

use std::collections::HashMap;
use std::fmt;

/// Most GPUs of a machine that can be described.
pub(crate) const MAX_GPUS: usize = 16;

/// What the GPUs of a communicator are to each other. The plan matches it exhaustively.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fabric {
    /// All ranks on one GPU.
    Loopback,
    /// NVLink between every two GPUs.
    NvlinkFull,
    /// NVLink between some.
    NvlinkPartial,
    /// PCIe under one root complex (one switch, or switches of one tree).
    PcieOneRoot,
    /// PCIe under several root complexes or sockets.
    PcieIslands,
    /// The same, where writes of one switch to GPUs of several root complexes collapse.
    WriteCollapse,
    /// Some GPU cannot reach another's memory.
    NoPeerAccess,
    /// No GPUs: memory of the host.
    Host,
}

impl Fabric {
    /// Every fabric.
    #[cfg(test)]
    pub(crate) const ALL: [Fabric; 8] = [
        Fabric::Loopback,
        Fabric::NvlinkFull,
        Fabric::NvlinkPartial,
        Fabric::PcieOneRoot,
        Fabric::PcieIslands,
        Fabric::WriteCollapse,
        Fabric::NoPeerAccess,
        Fabric::Host,
    ];

    /// The lower-case name, in files, JSON and output.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Fabric::Loopback => "loopback",
            Fabric::NvlinkFull => "nvlink_full",
            Fabric::NvlinkPartial => "nvlink_partial",
            Fabric::PcieOneRoot => "pcie_one_root",
            Fabric::PcieIslands => "pcie_islands",
            Fabric::WriteCollapse => "write_collapse",
            Fabric::NoPeerAccess => "no_peer_access",
            Fabric::Host => "host",
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One direction of something that bytes go through.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Link {
    /// What it is, for people: "gpu0 out", "sw1 up".
    pub(crate) name: String,
    /// What goes through it at most, whoever shares it; infinite where it is never the narrowest.
    pub(crate) gbps: f64,
    /// Whose port it is.
    pub(crate) kind: LinkKind,
}

/// Whose port a link is: the rate of a GPU's port depends on what is done through it ([`Topology::port_gbps`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkKind {
    /// Out of the GPU, towards PCIe.
    GpuOut(usize),
    /// Into the GPU.
    GpuIn(usize),
    /// NVLink, between two GPUs or between a GPU and the NVSwitches.
    Nvlink,
    /// Anything in between: switch uplinks, sockets.
    Shared,
}

/// In a placement: a rank of backend host, which is on no GPU.
pub(crate) const NO_GPU: usize = usize::MAX;

/// Number of a link in [`Topology::links`].
pub(crate) type LinkId = usize;

/// How a GPU moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Access {
    /// It writes them into the other's memory: posted, one way.
    Write,
    /// It reads them from the other's memory: a request, and an answer.
    Read,
}

/// Why a description is not one of a machine.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum TopologyError {
    /// Two things of one name, or a name that nobody has.
    #[error("{what} {name:?} {why}")]
    BadName {
        /// Kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A number that cannot be.
    #[error("{key} = {value}: {wanted}")]
    BadNumber {
        /// Where it is.
        key: String,
        /// What it is.
        value: f64,
        /// What it should be.
        wanted: &'static str,
    },
    /// No GPU, or too many.
    #[error("{0} GPUs: a topology has 0 (host only) to {MAX_GPUS}")]
    TooManyGpus(usize),
    /// The file's version is not this program's.
    #[error("schema_version = {0}: this program reads {SCHEMA_VERSION}")]
    Version(u32),
}

/// Version of [`Description`].
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// A machine's links.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Topology {
    description: Description,
    links: Vec<Link>,
    /// By pair of GPUs: what bytes from the one to the other go through. Empty on the diagonal.
    paths: HashMap<(usize, usize), Path>,
    /// By GPU.
    places: Vec<PlaceOfGpu>,
}

/// Where a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PlaceOfGpu {
    /// The switch or root complex right above it.
    parent: String,
    root: String,
    socket: String,
    /// Links up to the root complex, and down from it.
    to_host: Vec<LinkId>,
    from_host: Vec<LinkId>,
}

/// From one GPU to another.
#[derive(Debug, Clone, Default, PartialEq)]
struct Path {
    links: Vec<LinkId>,
    is_nvlink: bool,
    peer_access: bool,
    write_gbps: Option<f64>,
    read_gbps: Option<f64>,
    flag_us: Option<f64>,
}

/// Rate of a PCIe port at which programs see bytes go, one peer alone: GB/s of 16 lanes, by generation. From the
/// evidence of public benchmarks: Gen3 about 12, Gen4 21 to 26, Gen5 about 45; the first two and the last two scale.
const fn port_alone_gbps(generation: u32) -> f64 {
    match generation {
        0 | 1 => 3.0,
        2 => 6.0,
        3 => 12.0,
        4 => 24.0,
        5 => 45.0,
        _ => 90.0,
    }
}

/// The same while it exchanges with all peers at once: (writes, reads).
const fn port_shared_gbps(generation: u32) -> (f64, f64) {
    match generation {
        0 | 1 => (3.0, 3.0),
        2 => (6.0, 6.0),
        3 => (12.0, 12.0),
        4 => (21.0, 21.0),
        5 => (25.0, 21.0),
        _ => (50.0, 42.0),
    }
}

/// What 16-byte accesses of a kernel get of NVLink's rate: measured on two H200 (docs/benchmarks.md, "Lanes in a graph, two
/// H200"): from 128 KB to 1 MB one_shot_push goes at 95 GB/s of 450, one_shot_pull_inband at 207.
const fn nvlink_part(access: Access) -> f64 {
    match access {
        Access::Write => 0.21,
        Access::Read => 0.46,
    }
}

/// A store until a poll sees it: under one switch, and what other switches add (0.63 to 0.73 us, about 1.07 us).
const FLAG_US: f64 = 0.7;
const ACROSS_SWITCHES_US: f64 = 0.37;
const NVLINK_FLAG_US: f64 = 0.5;
/// On one GPU.
const LOOPBACK_FLAG_US: f64 = 0.35;

impl Pcie {
    /// What programs get through it, alone.
    pub(crate) fn gbps(self) -> f64 {
        port_alone_gbps(self.generation) * f64::from(self.width) / 16.0
    }

    fn shared_gbps(self) -> (f64, f64) {
        let (write, read) = port_shared_gbps(self.generation);
        let share = f64::from(self.width) / 16.0;
        (write * share, read * share)
    }
}

impl Topology {
    /// Checks a description, and lays its links.
    ///
    /// # Errors
    /// [`TopologyError`] names what is wrong.
    pub(crate) fn new(description: Description) -> Result<Self, TopologyError> {
        build::build(description)
    }

    /// What it was made of.
    pub(crate) fn description(&self) -> &Description {
        &self.description
    }

    /// Its short name.
    pub(crate) fn name(&self) -> &str {
        &self.description.name
    }

    /// Its rates, as given.
    pub(crate) fn rates(&self) -> &Rates {
        &self.description.rates
    }

    /// Its GPUs.
    pub(crate) fn gpus(&self) -> &[Gpu] {
        &self.description.gpus
    }

    /// Every link, by [`LinkId`].
    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    /// What bytes from one GPU's memory to another's go through; nothing if they are the same.
    pub(crate) fn path(&self, from: usize, to: usize) -> &[LinkId] {
        self.between(from, to).map_or(&[], |path| &path.links)
    }

    fn between(&self, from: usize, to: usize) -> Option<&Path> {
        self.paths.get(&(from, to))
    }

    /// Whether NVLink connects them.
    pub(crate) fn is_nvlink(&self, from: usize, to: usize) -> bool {
        self.between(from, to).is_some_and(|path| path.is_nvlink)
    }

    /// Whether each can reach the other's memory.
    pub(crate) fn has_peer_access(&self, one: usize, other: usize) -> bool {
        one == other
            || [(one, other), (other, one)].iter().all(|(from, to)| {
                self.between(*from, *to)
                    .is_some_and(|path| path.peer_access)
            })
    }

    /// From a store in the memory of `to` by `from` until a poll there sees it.
    pub(crate) fn flag_us(&self, from: usize, to: usize) -> f64 {
        let Some(path) = self.between(from, to) else {
            return LOOPBACK_FLAG_US;
        };
        if let Some(measured) = path.flag_us {
            return measured;
        }
        if path.is_nvlink {
            return self.rates().flag_us.unwrap_or(NVLINK_FLAG_US);
        }
        let near = self.rates().flag_us.unwrap_or(FLAG_US);
        let parent = |gpu: usize| self.places.get(gpu).map(|place| &place.parent);
        match parent(from) == parent(to) {
            true => near,
            false => near + ACROSS_SWITCHES_US,
        }
    }

    /// Rate of a GPU's PCIe port for one kind of access: with one peer at a time, or with several.
    pub(crate) fn port_gbps(&self, gpu: usize, access: Access, peers: usize) -> f64 {
        let Some(of) = self.gpus().get(gpu) else {
            return f64::INFINITY;
        };
        let rates = self.rates();
        let (write, read) = of.pcie.shared_gbps();
        match (access, peers) {
            (Access::Write, 0 | 1) => rates.write_gbps.unwrap_or(of.pcie.gbps()),
            (Access::Read, 0 | 1) => rates.read_gbps.unwrap_or(of.pcie.gbps()),
            (Access::Write, _) => rates
                .write_all_gbps
                .or(rates.write_gbps.filter(|rate| *rate < write))
                .unwrap_or(write),
            (Access::Read, _) => rates
                .read_all_gbps
                .or(rates.read_gbps.filter(|rate| *rate < read))
                .unwrap_or(read),
        }
    }

    /// What goes through a link at most: by kind of access, and with how many peers at once.
    pub(crate) fn capacity_gbps(&self, link: LinkId, access: Access, peers: usize) -> f64 {
        match self.links.get(link) {
            None => f64::INFINITY,
            Some(of) => match of.kind {
                LinkKind::GpuOut(gpu) | LinkKind::GpuIn(gpu) => self.port_gbps(gpu, access, peers),
                LinkKind::Nvlink => of.gbps * nvlink_part(access),
                LinkKind::Shared => of.gbps,
            },
        }
    }

    /// The best that a link could do, however the bytes are moved: with one peer at a time, as a measurement found it, or all at once.
    pub(crate) fn best_gbps(&self, link: LinkId, access: Access, peers: usize) -> f64 {
        let raw = self.links.get(link).map_or(f64::INFINITY, |of| of.gbps);
        let alone = self.capacity_gbps(link, access, 1);
        raw.max(alone).max(self.capacity_gbps(link, access, peers))
    }

    /// What one flow between two GPUs gets at most, whatever is free; infinite if only its links count.
    pub(crate) fn pair_gbps(&self, from: usize, to: usize, access: Access) -> f64 {
        let measured = match access {
            Access::Write => self.between(from, to).and_then(|path| path.write_gbps),
            // Measured by who reads: `to` reads from `from`.
            Access::Read => self.between(to, from).and_then(|path| path.read_gbps),
        };
        measured.unwrap_or(f64::INFINITY)
    }

    /// Between a GPU and pinned host memory, all GPUs at once.
    pub(crate) fn host_gbps(&self, gpu: usize, access: Access) -> f64 {
        let port = self.port_gbps(gpu, access, 2);
        match access {
            Access::Write => self.rates().host_write_gbps.unwrap_or(port),
            Access::Read => self.rates().host_read_gbps.unwrap_or(port),
        }
    }

    /// What the GPUs of a communicator are to each other. `placement`: the GPU of each rank.
    pub(crate) fn fabric(&self, placement: &[usize]) -> Fabric {
        let pairs = || {
            placement
                .iter()
                .flat_map(|from| placement.iter().map(move |to| (*from, *to)))
                .filter(|(from, to)| from != to)
        };
        let root = |gpu: usize| self.places.get(gpu).map(|place| &place.root);
        if self.gpus().is_empty() || placement.contains(&NO_GPU) {
            Fabric::Host
        } else if pairs().next().is_none() {
            Fabric::Loopback
        } else if pairs().any(|(from, to)| !self.has_peer_access(from, to)) {
            Fabric::NoPeerAccess
        } else if pairs().all(|(from, to)| self.is_nvlink(from, to)) {
            Fabric::NvlinkFull
        } else if pairs().any(|(from, to)| self.is_nvlink(from, to)) {
            Fabric::NvlinkPartial
        } else if pairs().all(|(from, to)| root(from) == root(to)) {
            Fabric::PcieOneRoot
        } else if self.rates().write_collapse_gbps.is_some() {
            Fabric::WriteCollapse
        } else {
            Fabric::PcieIslands
        }
    }

    /// What bytes from a GPU's memory to the host's go through.
    pub(crate) fn path_to_host(&self, gpu: usize) -> &[LinkId] {
        self.places.get(gpu).map_or(&[], |place| &place.to_host)
    }

    /// What bytes from the host's memory to a GPU's go through.
    pub(crate) fn path_from_host(&self, gpu: usize) -> &[LinkId] {
        self.places.get(gpu).map_or(&[], |place| &place.from_host)
    }

    /// From a store by one side until a poll of the other sees it, in the host's memory.
    pub(crate) fn host_flag_us(&self) -> f64 {
        FLAG_US + ACROSS_SWITCHES_US
    }

    /// The switch or root complex right above a GPU.
    pub(crate) fn parent_of(&self, gpu: usize) -> Option<&str> {
        self.places.get(gpu).map(|place| place.parent.as_str())
    }

    /// The root complex above a GPU.
    pub(crate) fn root_of(&self, gpu: usize) -> Option<&str> {
        self.places.get(gpu).map(|place| place.root.as_str())
    }

    /// How many consecutive ranks make an island for a hierarchical reduction: the ranks of a GPU, NVLink group, switch,
    /// root complex or socket, whichever are the fewest that are not all in one; where nothing parts them, the largest proper divisor.
    /// None if no equal islands of more than one rank are to be had.
    pub(crate) fn island_size(&self, placement: &[usize]) -> Option<u32> {
        let world_size = placement.len();
        let sizes: Vec<usize> = (2..world_size)
            .rev()
            .filter(|size| world_size.is_multiple_of(*size))
            .collect();
        let place = |gpu: usize| self.places.get(gpu);
        let same: [&dyn Fn(usize, usize) -> bool; 4] = [
            &|one, other| one == other || self.is_nvlink(one, other),
            &|one, other| {
                place(one).map(|place| &place.parent) == place(other).map(|place| &place.parent)
            },
            &|one, other| {
                place(one).map(|place| &place.root) == place(other).map(|place| &place.root)
            },
            &|one, other| {
                place(one).map(|place| &place.socket) == place(other).map(|place| &place.socket)
            },
        ];
        let apart = |same: &dyn Fn(usize, usize) -> bool| {
            placement
                .first()
                .is_some_and(|first| placement.iter().any(|gpu| !same(*first, *gpu)))
        };
        let mut parted = same.iter().filter(|same| apart(**same)).peekable();
        let is_parted = parted.peek().is_some();
        let of_kind = |same: &dyn Fn(usize, usize) -> bool, size: usize| {
            placement.chunks(size).all(|island| {
                island
                    .iter()
                    .all(|gpu| island.first().is_some_and(|first| same(*first, *gpu)))
            })
        };
        let found = match is_parted {
            // The widest way in which they are parted, with its largest islands: least goes between them.
            true => parted
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .find_map(|same| sizes.iter().find(|size| of_kind(*same, **size))),
            false => sizes.first(),
        };
        found.and_then(|size| u32::try_from(*size).ok())
    }
}
