//! Routes: which bounds the bytes of a flow share, on a machine.
//!
//! Owns the bounds of a simulation: links, what a GPU's port gives by kind of access and number of peers, what a pair of GPUs gives,
//! what is left of writes that collapse, the memory of a GPU. Called by the simulation for each flow. Refuses to know time.

use super::engine::Bound;
use crate::plan::schedule::{Flow, Place};
use crate::topology::{Access, LinkKind, MAX_GPUS, Topology};
use std::collections::BTreeMap;

/// What a bound is of.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Link(usize),
    /// By kind of access.
    Nvlink(usize, bool),
    /// A GPU's port, by what the GPU does.
    Port(usize, bool),
    /// The same towards the host.
    HostPort(usize, bool),
    /// From one GPU to another.
    Pair(usize, usize, bool),
    /// Writes that leave a switch.
    Collapse(String),
    Memory(usize),
}

/// The bounds that are in use so far.
pub(super) struct Routes<'a> {
    topology: &'a Topology,
    bounds: Vec<Bound>,
    numbers: BTreeMap<Key, usize>,
    /// By GPU: the nodes above it, up to its root complex.
    above: Vec<Vec<&'a str>>,
}

/// Bounds of one flow: number, and group there.
type Uses = Vec<(usize, usize)>;

impl<'a> Routes<'a> {
    pub(super) fn new(topology: &'a Topology) -> Self {
        let description = topology.description();
        let parent = |name: &str| {
            let mut switches = description.switches.iter();
            switches
                .find(|switch| switch.name == name)
                .map(|switch| switch.parent.as_str())
        };
        // A switch that is above itself is no topology: no chain is longer than all switches.
        let above = |gpu: &'a crate::topology::Gpu| {
            std::iter::successors(Some(gpu.parent.as_str()), |name| parent(name))
                .take(description.switches.len() + 1)
                .collect()
        };
        Self {
            topology,
            bounds: Vec::new(),
            numbers: BTreeMap::new(),
            above: description.gpus.iter().map(above).collect(),
        }
    }

    /// All of them, by number.
    pub(super) fn into_bounds(self) -> Vec<Bound> {
        self.bounds
    }

    fn number(&mut self, key: Key, bound: impl FnOnce(&Topology) -> (String, Vec<f64>)) -> usize {
        let bounds = &mut self.bounds;
        let topology = self.topology;
        *self.numbers.entry(key).or_insert_with(|| {
            let (name, gbps) = bound(topology);
            bounds.push(Bound { name, gbps });
            bounds.len() - 1
        })
    }

    fn name(&self, gpu: usize) -> &'a str {
        let found = self.topology.gpus().get(gpu);
        found.map_or("", |gpu| gpu.name.as_str())
    }

    /// Work of a kernel in its own memory; none if its rate is not known.
    pub(super) fn memory(&mut self, gpu: usize) -> Option<Uses> {
        let gbps = self.topology.rates().memory_gbps?;
        let name = format!("{} memory", self.name(gpu));
        Some(vec![(
            self.number(Key::Memory(gpu), |_| (name, vec![gbps])),
            0,
        )])
    }

    /// The ways of a flow's bytes: what part of them takes which. `placement`: the GPU of each rank.
    pub(super) fn ways(&mut self, flow: &Flow, placement: &[usize]) -> Vec<(f64, Uses)> {
        let gpu_of = |rank: usize| placement.get(rank).copied().unwrap_or(usize::MAX);
        match (flow.from, flow.to) {
            (Place::Rank(from), Place::Rank(to)) => {
                let (from, to) = (gpu_of(from), gpu_of(to));
                let uses = match from == to {
                    true => self.memory(from).unwrap_or_default(),
                    false => self.between(from, to, flow.access),
                };
                vec![(1.0, uses)]
            }
            (Place::Rank(rank), Place::Host) => {
                vec![(1.0, self.host(gpu_of(rank), Access::Write, None))]
            }
            (Place::Host, Place::Rank(rank)) => {
                // What the others have written is in the memory of their sockets.
                let own = gpu_of(rank);
                let mut sockets: BTreeMap<&str, u32> = BTreeMap::new();
                for (_, gpu) in placement.iter().enumerate().filter(|(of, _)| *of != rank) {
                    *sockets.entry(self.socket(*gpu)).or_default() += 1;
                }
                if sockets.is_empty() {
                    sockets.insert(self.socket(own), 1);
                }
                let all = f64::from(sockets.values().sum::<u32>());
                sockets
                    .into_iter()
                    .map(|(socket, ranks)| {
                        let uses = self.host(own, Access::Read, Some(socket));
                        (f64::from(ranks) / all, uses)
                    })
                    .collect()
            }
            (Place::Host, Place::Host) => Vec::new(),
        }
    }

    /// The socket of a GPU, by name; the first where none is said.
    fn socket(&self, gpu: usize) -> &'a str {
        let description = self.topology.description();
        let root = self.above.get(gpu).and_then(|above| above.last());
        let mut roots = description.roots.iter();
        let of = roots.find(|of| Some(&of.name.as_str()) == root);
        let first = description.sockets.first().map(|of| of.name.as_str());
        of.and_then(|of| of.socket.as_deref())
            .or(first)
            .unwrap_or_default()
    }

    fn link(&mut self, link: usize) -> Option<(usize, usize)> {
        let of = self.topology.links().get(link)?;
        let bound = |topology: &Topology| {
            let gbps = match of.kind {
                // As fast as a measurement found it, if that is faster than its generation is said to be.
                LinkKind::GpuOut(gpu) | LinkKind::GpuIn(gpu) => [Access::Write, Access::Read]
                    .iter()
                    .map(|access| topology.port_gbps(gpu, *access, 1))
                    .fold(of.gbps, f64::max),
                LinkKind::Nvlink | LinkKind::Shared => of.gbps,
            };
            (of.name.clone(), vec![gbps])
        };
        Some((self.number(Key::Link(link), bound), 0))
    }

    /// A link whose rate depends on what is done through it.
    fn nvlink(&mut self, link: usize, access: Access) -> Option<(usize, usize)> {
        let name = self.topology.links().get(link)?.name.clone();
        let bound = |topology: &Topology| (name, vec![topology.capacity_gbps(link, access, 1)]);
        let key = Key::Nvlink(link, access == Access::Write);
        Some((self.number(key, bound), 0))
    }

    fn between(&mut self, from: usize, to: usize, access: Access) -> Uses {
        let topology = self.topology;
        let links = topology.path(from, to);
        let is_write = access == Access::Write;
        let mut uses: Uses = match topology.is_nvlink(from, to) {
            true => links
                .iter()
                .filter_map(|link| self.nvlink(*link, access))
                .collect(),
            false => links.iter().filter_map(|link| self.link(*link)).collect(),
        };
        let pair = topology.pair_gbps(from, to, access);
        if pair.is_finite() {
            let name = format!("{} to {}", self.name(from), self.name(to));
            let key = Key::Pair(from, to, is_write);
            uses.push((self.number(key, |_| (name, vec![pair])), 0));
        }
        if topology.is_nvlink(from, to) {
            return uses;
        }
        // The port of whoever moves the bytes, by the number of its peers.
        let (mover, peer, port) = match access {
            Access::Write => (from, to, "out"),
            Access::Read => (to, from, "in"),
        };
        let name = format!("{} {port}", self.name(mover));
        let by_peers = |topology: &Topology| {
            let gbps = (1..=MAX_GPUS).map(|peers| topology.port_gbps(mover, access, peers));
            (name, gbps.collect())
        };
        uses.push((self.number(Key::Port(mover, is_write), by_peers), peer));
        if is_write && let Some((switch, root)) = self.leaves(from, to) {
            // Groups: root complexes that are written to at the moment.
            let collapsed = topology.rates().write_collapse_gbps;
            let name = format!("{switch} writes to several roots");
            let bound = |_: &Topology| {
                let gbps = vec![f64::INFINITY, collapsed.unwrap_or(f64::INFINITY)];
                (name, gbps)
            };
            let key = Key::Collapse(switch.to_owned());
            uses.push((self.number(key, bound), root));
        }
        uses
    }

    /// The switch below a root complex that bytes between two GPUs leave, and the number of the root complex that they go to.
    fn leaves(&self, from: usize, to: usize) -> Option<(&'a str, usize)> {
        self.topology.rates().write_collapse_gbps?;
        let (from, to) = (self.above.get(from)?, self.above.get(to)?);
        let top = |above: &[&'a str]| {
            let below_root = above.len().checked_sub(2)?;
            above.get(below_root).copied()
        };
        let switch = top(from)?;
        let root = to.last()?;
        let roots = &self.topology.description().roots;
        let number = roots.iter().position(|of| of.name == *root)?;
        (top(to) != Some(switch)).then_some((switch, number))
    }

    /// Between a GPU and the memory of its own socket, or that of `socket`.
    fn host(&mut self, gpu: usize, access: Access, socket: Option<&str>) -> Uses {
        let topology = self.topology;
        let (direction, kind) = match access {
            Access::Write => ("up", LinkKind::GpuOut(gpu)),
            Access::Read => ("down", LinkKind::GpuIn(gpu)),
        };
        let nodes = self.above.get(gpu).map_or(&[][..], Vec::as_slice);
        let mut names: Vec<String> = nodes
            .iter()
            .map(|node| format!("{node} {direction}"))
            .collect();
        let own = self.socket(gpu);
        if let Some(other) = socket.filter(|socket| *socket != own) {
            names.push(format!("{other} to {own}"));
        }
        let links = topology.links().iter().enumerate();
        let on_the_way: Vec<usize> = links
            .filter(|(_, link)| link.kind == kind || names.contains(&link.name))
            .map(|(number, _)| number)
            .collect();
        let mut uses: Uses = on_the_way
            .iter()
            .filter_map(|link| self.link(*link))
            .collect();
        let name = format!("{} to host", self.name(gpu));
        let key = Key::HostPort(gpu, access == Access::Write);
        let bound = |topology: &Topology| (name, vec![topology.host_gbps(gpu, access)]);
        uses.push((self.number(key, bound), 0));
        uses
    }
}
