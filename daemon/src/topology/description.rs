//! What is said of a machine: the file format of topologies.
//!
//! Owns the types that TOML is read into and written from. Refuses unknown keys. docs/topology.md documents the
//! format for people; every field's unit is in its name.

use serde::{Deserialize, Serialize};

/// A machine, or a part of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    /// Version of this format.
    pub(crate) schema_version: u32,
    /// Short name.
    pub(crate) name: String,
    /// What it is, for people.
    #[serde(default)]
    pub(crate) description: String,
    /// Where its numbers are from.
    #[serde(default)]
    pub(crate) sources: Vec<String>,
    /// Whether GPUs can reach each other's memory.
    #[serde(default = "yes")]
    pub(crate) peer_access: bool,
    /// Rates and times.
    #[serde(default)]
    pub(crate) rates: Rates,
    /// Between sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inter_socket: Option<InterSocket>,
    /// NVLink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nvlink: Option<NvLink>,
    /// Sockets; one without a name if there are none.
    #[serde(default, rename = "socket", skip_serializing_if = "Vec::is_empty")]
    pub(crate) sockets: Vec<Socket>,
    /// Root complexes.
    #[serde(default, rename = "root", skip_serializing_if = "Vec::is_empty")]
    pub(crate) roots: Vec<Root>,
    /// PCIe switches.
    #[serde(default, rename = "switch", skip_serializing_if = "Vec::is_empty")]
    pub(crate) switches: Vec<Switch>,
    /// GPUs, in the order of their numbers.
    #[serde(default, rename = "gpu", skip_serializing_if = "Vec::is_empty")]
    pub(crate) gpus: Vec<Gpu>,
    /// What a probe has measured between two GPUs; goes before `rates`.
    #[serde(default, rename = "pair", skip_serializing_if = "Vec::is_empty")]
    pub(crate) pairs: Vec<Pair>,
}

const fn yes() -> bool {
    true
}

/// Rates and times that hold for all GPUs. Whatever is left out follows from PCIe generation and width, or has the
/// default of the cost model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Rates {
    /// A GPU writes to one peer, alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) write_gbps: Option<f64>,
    /// A GPU reads from one peer, alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) read_gbps: Option<f64>,
    /// Each GPU writes to all peers at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) write_all_gbps: Option<f64>,
    /// Each GPU reads from all peers at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) read_all_gbps: Option<f64>,
    /// What is left of the writes of one switch to GPUs of several root complexes; if this is given, the fabric is
    /// write_collapse.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) write_collapse_gbps: Option<f64>,
    /// A GPU writes to pinned host memory, all GPUs at once, each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host_write_gbps: Option<f64>,
    /// A GPU reads pinned host memory, all GPUs at once, each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host_read_gbps: Option<f64>,
    /// GPU memory: read and written by one kernel, the sum of both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_gbps: Option<f64>,
    /// From a store in one GPU until a poll of another (or a peer under the same switch) sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) flag_us: Option<f64>,
    /// A kernel in a graph, with nothing to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) launch_us: Option<f64>,
    /// Host backend: one core copies memory that is not in its cache, as peers' tensors are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) core_copy_gbps: Option<f64>,
    /// Host backend: one core's store until another core's load sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) core_flag_us: Option<f64>,
}

/// Between sockets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InterSocket {
    /// One direction, all flows together.
    pub(crate) gbps: f64,
}

/// NVLink.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NvLink {
    /// NVSwitch: each GPU's rate, one direction, to all others together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) switch_gbps: Option<f64>,
    /// Direct links.
    #[serde(rename = "pair", skip_serializing_if = "Vec::is_empty")]
    pub(crate) pairs: Vec<NvLinkPair>,
}

/// NVLink between two GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NvLinkPair {
    /// Their names.
    pub(crate) gpus: [String; 2],
    /// One direction.
    pub(crate) gbps: f64,
}

/// A socket (NUMA node).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Socket {
    /// Its name.
    pub(crate) name: String,
}

/// A root complex.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Root {
    /// Its name.
    pub(crate) name: String,
    /// The socket it is in, by name; the first if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) socket: Option<String>,
}

/// A PCIe port's generation and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pcie {
    /// 1 to 7.
    pub(crate) generation: u32,
    /// Lanes.
    pub(crate) width: u32,
}

/// A PCIe switch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Switch {
    /// Its name.
    pub(crate) name: String,
    /// The root complex or switch above it.
    pub(crate) parent: String,
    /// Its uplink.
    pub(crate) pcie: Pcie,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gpu {
    /// Its name.
    pub(crate) name: String,
    /// UUID, as NVML prints it; for files of a machine that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
    /// Product.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) product: Option<String>,
    /// PCI bus id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bus_id: Option<String>,
    /// The switch or root complex above it.
    pub(crate) parent: String,
    /// Its port.
    pub(crate) pcie: Pcie,
    /// NUMA node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) numa_node: Option<u32>,
}

/// What was measured between two GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pair {
    /// Who reads or writes.
    pub(crate) from: String,
    /// Whose memory.
    pub(crate) to: String,
    /// Whether the one can reach the other's memory.
    #[serde(default = "yes")]
    pub(crate) peer_access: bool,
    /// Alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) write_gbps: Option<f64>,
    /// Alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) read_gbps: Option<f64>,
    /// One way: half of a round trip of flags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) flag_us: Option<f64>,
}
