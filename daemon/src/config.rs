//! The configuration: defaults, then the file, then the environment, then flags.
//!
//! Owns [`Config`], its documentation and its checks. The command line loads it once; the supervisor
//! keeps it and tells executors their part. Refuses unknown keys and wrong types, naming key, line and
//! reason. The file is checked by its own types first (the layering crate takes "5" for 5 and knows no
//! lines), then layered.

use crate::lines::{Lines, line_of};
use crate::plan::tuned::{TunedError, TunedTable};
use crate::topology::{FileError, Topology};
use allreduce_contract::default_socket;
use allreduce_contract::kernel::MAX_RING_BLOCKS;
use allreduce_contract::lane::{MAX_STAGE_LEN_BYTES, MIN_STAGE_LEN_BYTES};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prefix of environment variables that set keys: `ALLREDUCED_COMMUNICATOR__DEFAULT_TIMEOUT_MS=500` sets
/// `communicator.default_timeout_ms`.
pub const ENV_PREFIX: &str = "ALLREDUCED_";

/// Names the daemon's socket for every subcommand and for clients.
pub const ENV_SOCKET: &str = "ALLREDUCED_SOCKET";

/// Names the configuration file for `serve`.
pub const ENV_CONFIG: &str = "ALLREDUCED_CONFIG";

/// Most blocks of kernels that stay on a GPU: more than any holds.
const MAX_BLOCKS_PER_GPU: u32 = 1024;

/// Everything that can be configured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The daemon's socket.
    pub listen: Listen,
    /// What is logged, and how.
    pub log: Log,
    /// Limits and deadlines of communicators.
    pub communicator: CommunicatorConfig,
    /// The host backend.
    pub host: Host,
    /// The CUDA backend.
    pub cuda: CudaConfig,
    /// What connects the GPUs of this machine.
    pub topology: TopologyConfig,
    /// How the daemon ends.
    pub shutdown: Shutdown,
}

/// Section `[listen]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// The daemon's gRPC socket; at most 107 bytes. Executors listen in the directory `PATH.d`.
    pub path: PathBuf,
    /// Mode of the sockets, octal, whatever the umask.
    pub mode: String,
    /// Group of the sockets, by name; empty leaves it.
    pub group: String,
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            path: default_socket(),
            mode: "0660".to_owned(),
            group: String::new(),
        }
    }
}

/// Section `[log]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// How a line looks.
    pub format: LogFormat,
    /// What is logged: a level (error, warn, info, debug, trace), or directives as
    /// tracing-subscriber's EnvFilter reads them.
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Auto,
            level: "info".to_owned(),
        }
    }
}

/// How a log line looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Human, with colours if standard error is a terminal.
    #[default]
    Auto,
    /// Human, without colours.
    Human,
    /// One JSON object a line.
    Json,
}

/// Section `[communicator]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommunicatorConfig {
    /// Communicators that may be open at once: each is a process.
    pub max_open: u32,
    /// Deadline of an AllReduce that names none.
    pub default_timeout_ms: u32,
    /// How long the first rank of an epoch waits for the others.
    pub join_timeout_ms: u32,
    /// Interval of heartbeats.
    pub heartbeat_interval_ms: u32,
    /// Silence after which a rank is taken for dead.
    pub heartbeat_timeout_ms: u32,
    /// Calls a rank may be ahead of the reduction that runs.
    pub max_in_flight: u32,
    /// Buffers a rank may hold.
    pub max_buffers: u32,
    /// An executor without ranks exits after this.
    pub idle_timeout_ms: u32,
}

impl Default for CommunicatorConfig {
    fn default() -> Self {
        Self {
            max_open: 64,
            default_timeout_ms: 30_000,
            join_timeout_ms: 120_000,
            heartbeat_interval_ms: 1_000,
            heartbeat_timeout_ms: 10_000,
            max_in_flight: 64,
            max_buffers: 4096,
            idle_timeout_ms: 60_000,
        }
    }
}

/// Section `[host]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Host {
    /// Arena of a rank that names no length.
    pub arena_len_bytes: u64,
    /// Longest arena a rank may ask for.
    pub max_arena_len_bytes: u64,
    /// Threads that share a large reduction of lane rpc; 0 takes the number of processors, at most 8.
    pub reduce_threads: u32,
    /// Lanes delegated and resident: how long a wait looks before it sleeps. It lets others run meanwhile; where there are
    /// as many processors as ranks, not in the first microsecond.
    pub lane_spin_us: u32,
    /// Lanes delegated and resident: bytes of each half of a rank's staging; a multiple of 4096.
    pub lane_stage_bytes: u64,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            arena_len_bytes: 64 << 20,
            max_arena_len_bytes: 16 << 30,
            reduce_threads: 0,
            lane_spin_us: 100,
            lane_stage_bytes: 256 << 10,
        }
    }
}

/// When reductions may go through pinned memory of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostStaged {
    /// Where GPUs of a communicator have no peer access.
    #[default]
    Auto,
    /// Everywhere: also for who asks for algorithm host_staged.
    Always,
    /// Nowhere: GPUs without peer access are refused.
    Never,
}

/// Section `[cuda]`. A rank's window takes 32 KiB, 2 x world_size push slots, 8 in-band parts, 4 staging parts
/// and its arena of GPU memory; tensors longer than a slot or part are reduced piece by piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CudaConfig {
    /// Arena of a rank that names no length, in GPU memory.
    pub arena_len_bytes: u64,
    /// Longest arena a rank may ask for.
    pub max_arena_len_bytes: u64,
    /// Bytes of a push slot; a multiple of 32.
    pub push_slot_bytes: u64,
    /// Bytes of an in-band part; a multiple of 32.
    pub inband_part_bytes: u64,
    /// Bytes of a staging part; a multiple of 32.
    pub staging_part_bytes: u64,
    /// When there are windows in pinned memory of the host too, through which GPUs reduce that cannot reach each other's
    /// memory. Such a window takes 32 KiB and 8 x host_staged_bytes for each rank.
    pub host_staged: HostStaged,
    /// Bytes of an in-band part of a window in host memory, which is the longest tensor of one launch through it; a
    /// multiple of 32.
    pub host_staged_bytes: u64,
    /// Treat the ranks' GPUs as unable to reach each other's memory, also several ranks' one GPU: for tests.
    pub assume_no_peer_access: bool,
    /// Compile the kernels at run time even where the build has them.
    pub use_nvrtc: bool,
    /// Directory of libnvrtc, for a build without kernels; empty looks in CUDA_HOME, /usr/local/cuda and the
    /// loader's path.
    pub nvrtc_dir: PathBuf,
    /// Where kernels compiled at run time are kept; empty takes /var/cache/allreduced for root, else
    /// allreduced in XDG_CACHE_HOME or ~/.cache.
    pub kernel_cache_dir: PathBuf,
    /// Blocks that a kernel which stays on a GPU (lane resident) has for each rank there; 0 refuses the lane.
    pub resident_blocks: u32,
    /// Blocks that such kernels of all communicators may have on one GPU together; 0 refuses the lane. One that finds fewer left
    /// than it is configured for has fewer.
    pub resident_blocks_per_gpu: u32,
    /// After how many microseconds without a reduction it parks, and takes nothing from the GPU.
    pub resident_idle_us: u32,
    /// How often the executor looks whether a parked one is wanted, microseconds.
    pub resident_wake_poll_us: u32,
    /// How long opening a device, compiling, allocating or testing may take before the executor is given up.
    pub setup_timeout_ms: u32,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self {
            arena_len_bytes: 64 << 20,
            max_arena_len_bytes: 16 << 30,
            push_slot_bytes: 256 << 10,
            inband_part_bytes: 1 << 20,
            staging_part_bytes: 4 << 20,
            host_staged: HostStaged::Auto,
            host_staged_bytes: 1 << 20,
            assume_no_peer_access: false,
            use_nvrtc: false,
            nvrtc_dir: PathBuf::new(),
            kernel_cache_dir: PathBuf::new(),
            resident_blocks: 6,
            resident_blocks_per_gpu: 24,
            resident_idle_us: 200,
            resident_wake_poll_us: 20,
            setup_timeout_ms: 120_000,
        }
    }
}

/// Section `[topology]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TopologyConfig {
    /// A topology file (docs/topology.md), as `allreduced probe --output` writes it; empty asks NVML and sysfs.
    pub file: PathBuf,
    /// What `allreduced tune --output` measured; used where the topology's fingerprint is the one that it carries. Empty:
    /// nothing was measured.
    pub tuned: PathBuf,
    /// How long NVML may take to answer.
    pub discover_timeout_ms: u32,
}

impl Default for TopologyConfig {
    fn default() -> Self {
        Self {
            file: PathBuf::new(),
            tuned: PathBuf::new(),
            discover_timeout_ms: 30_000,
        }
    }
}

/// Section `[shutdown]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shutdown {
    /// After SIGTERM: how long ranks have to leave before they are cut off.
    pub drain_timeout_ms: u32,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self {
            drain_timeout_ms: 10_000,
        }
    }
}

/// One thing wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key, dotted; empty where the text as a whole is no TOML.
    pub key: String,
    /// The line in the file, from 1; none if the value comes from elsewhere.
    pub line: Option<usize>,
    /// What is wrong, and what to do.
    pub reason: String,
}

/// A configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It can, but is wrong.
    #[error("{}", Problems { origin, problems })]
    Invalid {
        /// The file, or "environment and flags".
        origin: String,
        /// Everything found wrong, at least one.
        problems: Vec<Problem>,
    },
}

struct Problems<'a> {
    origin: &'a str,
    problems: &'a [Problem],
}

impl fmt::Display for Problems<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            problem.write(self.origin, f)?;
        }
        Ok(())
    }
}

impl Problem {
    /// One line: where it is, and what is wrong.
    pub(crate) fn write(&self, origin: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{origin}")?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": ")?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        write!(f, "{}", self.reason)
    }
}

/// What flags set.
#[derive(Debug, Clone, Default)]
pub struct Flags {
    /// `--socket`, or the variable of that name.
    pub socket: Option<PathBuf>,
}

impl Config {
    /// Loads the file (if one is named), the environment and the flags, and checks the result.
    ///
    /// # Errors
    /// [`ConfigError`], with every problem found.
    pub fn load(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: &Flags,
    ) -> Result<Self, ConfigError> {
        let mut layers = config::Config::builder();
        if let Some(path) = file {
            let text = read(path)?;
            Self::check_text(&path.display().to_string(), &text)?;
            layers = layers.add_source(config::File::from_str(&text, config::FileFormat::Toml));
        }
        let variables: config::Map<String, String> = environment
            .into_iter()
            .filter(|(name, _)| {
                name.starts_with(ENV_PREFIX) && name != ENV_SOCKET && name != ENV_CONFIG
            })
            .collect();
        let origin = "environment and flags";
        let invalid = |reason: String| ConfigError::Invalid {
            origin: origin.to_owned(),
            problems: vec![Problem {
                key: String::new(),
                line: None,
                reason,
            }],
        };
        let merged = layers
            .add_source(
                config::Environment::with_prefix(ENV_PREFIX.trim_end_matches('_'))
                    .prefix_separator("_")
                    .separator("__")
                    .try_parsing(true)
                    .source(Some(variables)),
            )
            .build()
            .and_then(config::Config::try_deserialize::<Self>);
        let mut merged = merged.map_err(|error| invalid(error.to_string()))?;
        if let Some(socket) = &flags.socket {
            merged.listen.path.clone_from(socket);
        }
        let problems: Vec<Problem> = merged
            .problems()
            .into_iter()
            .map(|(key, reason)| Problem {
                key: key.to_owned(),
                line: None,
                reason,
            })
            .collect();
        if problems.is_empty() {
            Ok(merged)
        } else {
            Err(ConfigError::Invalid {
                origin: origin.to_owned(),
                problems,
            })
        }
    }

    /// Checks a file on its own.
    ///
    /// # Errors
    /// [`ConfigError`], with every problem found.
    pub fn check_file(path: &Path) -> Result<Self, ConfigError> {
        Self::check_text(&path.display().to_string(), &read(path)?)
    }

    fn check_text(origin: &str, text: &str) -> Result<Self, ConfigError> {
        let invalid = |problems| ConfigError::Invalid {
            origin: origin.to_owned(),
            problems,
        };
        let lines = Lines::new(text).map_err(|error| {
            invalid(vec![Problem {
                key: String::new(),
                line: error.span().map(|span| line_of(text, span.start)),
                reason: error.message().to_owned(),
            }])
        })?;
        let parsed: Result<Self, toml::de::Error> = toml::from_str(text);
        let config = parsed.map_err(|error| {
            invalid(vec![Problem {
                key: lines.key_of(&error).unwrap_or_default(),
                line: error.span().map(|at| line_of(text, at.start)),
                reason: error.message().to_owned(),
            }])
        })?;
        let problems: Vec<Problem> = config
            .problems()
            .into_iter()
            .map(|(key, reason)| Problem {
                key: key.to_owned(),
                line: lines.line_of_key(key),
                reason,
            })
            .collect();
        if problems.is_empty() {
            Ok(config)
        } else {
            Err(invalid(problems))
        }
    }

    /// What the types do not say: ranges, and values that must fit each other.
    fn problems(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let mut refuse = |key, reason: String| found.push((key, reason));
        let CommunicatorConfig {
            max_open,
            default_timeout_ms,
            join_timeout_ms,
            heartbeat_interval_ms,
            heartbeat_timeout_ms,
            max_in_flight,
            max_buffers,
            idle_timeout_ms,
        } = self.communicator;
        for (key, value) in [
            ("communicator.max_open", max_open),
            ("communicator.default_timeout_ms", default_timeout_ms),
            ("communicator.join_timeout_ms", join_timeout_ms),
            ("communicator.heartbeat_interval_ms", heartbeat_interval_ms),
            ("communicator.max_in_flight", max_in_flight),
            ("communicator.max_buffers", max_buffers),
            ("communicator.idle_timeout_ms", idle_timeout_ms),
            ("cuda.setup_timeout_ms", self.cuda.setup_timeout_ms),
            ("cuda.resident_idle_us", self.cuda.resident_idle_us),
            (
                "cuda.resident_wake_poll_us",
                self.cuda.resident_wake_poll_us,
            ),
            (
                "topology.discover_timeout_ms",
                self.topology.discover_timeout_ms,
            ),
            ("shutdown.drain_timeout_ms", self.shutdown.drain_timeout_ms),
        ] {
            if value == 0 {
                refuse(key, "must be at least 1".to_owned());
            }
        }
        if heartbeat_timeout_ms < heartbeat_interval_ms.saturating_mul(2) {
            refuse(
                "communicator.heartbeat_timeout_ms",
                format!(
                    "{heartbeat_timeout_ms} is less than twice heartbeat_interval_ms ({heartbeat_interval_ms}): one late heartbeat would end a rank"
                ),
            );
        }
        if self.host.arena_len_bytes == 0
            || self.host.arena_len_bytes > self.host.max_arena_len_bytes
        {
            refuse(
                "host.arena_len_bytes",
                format!(
                    "{} is not in 1..=max_arena_len_bytes ({})",
                    self.host.arena_len_bytes, self.host.max_arena_len_bytes
                ),
            );
        }
        if self.cuda.arena_len_bytes == 0
            || self.cuda.arena_len_bytes > self.cuda.max_arena_len_bytes
        {
            refuse(
                "cuda.arena_len_bytes",
                format!(
                    "{} is not in 1..={} (cuda.max_arena_len_bytes)",
                    self.cuda.arena_len_bytes, self.cuda.max_arena_len_bytes
                ),
            );
        }
        for (key, bytes) in [
            ("cuda.push_slot_bytes", self.cuda.push_slot_bytes),
            ("cuda.inband_part_bytes", self.cuda.inband_part_bytes),
            ("cuda.staging_part_bytes", self.cuda.staging_part_bytes),
            ("cuda.host_staged_bytes", self.cuda.host_staged_bytes),
        ] {
            // The least a world of 16 ranks can work with, and the most that makes sense.
            if !(1024..=1 << 30).contains(&bytes) || !bytes.is_multiple_of(32) {
                refuse(
                    key,
                    format!("{bytes} is not a multiple of 32 in 1024..=1073741824"),
                );
            }
        }
        if self.cuda.resident_blocks > MAX_RING_BLOCKS {
            refuse(
                "cuda.resident_blocks",
                format!(
                    "{} is above {MAX_RING_BLOCKS}; 0 refuses lane resident",
                    self.cuda.resident_blocks
                ),
            );
        }
        if self.cuda.resident_blocks_per_gpu > MAX_BLOCKS_PER_GPU {
            refuse(
                "cuda.resident_blocks_per_gpu",
                format!(
                    "{} is above {MAX_BLOCKS_PER_GPU}; 0 refuses lane resident",
                    self.cuda.resident_blocks_per_gpu
                ),
            );
        }
        if self.host.reduce_threads > 256 {
            refuse(
                "host.reduce_threads",
                format!("{} is above 256", self.host.reduce_threads),
            );
        }
        let stage_bytes = self.host.lane_stage_bytes;
        let is_legal = (MIN_STAGE_LEN_BYTES..=MAX_STAGE_LEN_BYTES).contains(&stage_bytes);
        if !is_legal || !stage_bytes.is_multiple_of(4096) {
            refuse(
                "host.lane_stage_bytes",
                format!(
                    "{stage_bytes} is not a multiple of 4096 in {MIN_STAGE_LEN_BYTES}..={MAX_STAGE_LEN_BYTES}"
                ),
            );
        }
        if let Some(Err(error)) = self.topology.read_file() {
            refuse("topology.file", error.to_string());
        }
        if let Some(Err(error)) = self.topology.read_tuned() {
            refuse("topology.tuned", error.to_string());
        }
        if let Err(reason) = self.listen.parsed_mode() {
            refuse("listen.mode", reason);
        }
        if let Err(reason) = crate::listen::check_path(&self.listen.path) {
            refuse("listen.path", reason.to_string());
        }
        let is_word = self.log.level.chars().all(|c| c.is_ascii_alphabetic());
        let levels = ["off", "error", "warn", "info", "debug", "trace"];
        if is_word && !levels.contains(&self.log.level.to_lowercase().as_str()) {
            // EnvFilter would take it for the name of a module, and log nothing.
            let known = levels.join(", ");
            refuse(
                "log.level",
                format!("{:?} is none of {known}", self.log.level),
            );
        } else if let Err(reason) = tracing_subscriber::EnvFilter::try_new(&self.log.level) {
            refuse("log.level", reason.to_string());
        }
        found
    }
}

impl TopologyConfig {
    /// The file, read and checked; none if none is named.
    pub(crate) fn read_file(&self) -> Option<Result<Topology, FileError>> {
        (!self.file.as_os_str().is_empty()).then(|| Topology::read(&self.file))
    }

    /// The table of what was measured, read and checked; none if none is named.
    pub(crate) fn read_tuned(&self) -> Option<Result<TunedTable, TunedError>> {
        (!self.tuned.as_os_str().is_empty()).then(|| TunedTable::read(&self.tuned))
    }
}

impl Listen {
    /// The mode as a number.
    ///
    /// # Errors
    /// The reason, if it is not octal or above 0777.
    pub(crate) fn parsed_mode(&self) -> Result<u32, String> {
        u32::from_str_radix(&self.mode, 8)
            .ok()
            .filter(|mode| *mode <= 0o777)
            .ok_or_else(|| format!("{:?} is not an octal mode such as \"0660\"", self.mode))
    }
}

/// A configured time, which is in milliseconds.
pub(crate) fn ms(ms: u32) -> Duration {
    Duration::from_millis(u64::from(ms))
}

fn read(path: &Path) -> Result<String, ConfigError> {
    crate::files::read_text(path).map_err(|source| ConfigError::Unreadable {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn problem(text: &str) -> String {
        Config::check_text("file", text)
            .map(|_| "accepted".to_owned())
            .unwrap_or_else(|error| error.to_string())
    }

    #[test]
    fn defaults_are_accepted_and_documented() {
        assert_eq!(problem(""), "accepted");
        let example = include_str!("../../deploy/allreduced.toml");
        assert_eq!(problem(example), "accepted");
        let uncommented: String = example
            .lines()
            .map(|line| match line.strip_prefix("#") {
                Some(key) if key.contains(" = ") && !key.starts_with(' ') => key,
                Some(_) | None => line,
            })
            .map(|line| format!("{line}\n"))
            .collect();
        let config = Config::check_text("example", &uncommented).unwrap();
        let mut defaults = Config::default();
        defaults.listen.path = PathBuf::from("/run/allreduced/allreduced.sock");
        assert_eq!(config, defaults);
    }

    #[test]
    fn key_line_and_reason_are_named() {
        for (text, expected) in [
            (
                "[communicator]\nmax_opem = 3\n",
                "file:2: communicator.max_opem: unknown field `max_opem`",
            ),
            (
                "\n[communicator]\nmax_open = \"5\"\n",
                "file:3: communicator.max_open: invalid type: string \"5\", expected u32",
            ),
            (
                "[log]\nformat = \"xml\"\n",
                "file:2: log.format: unknown variant `xml`",
            ),
            ("[listen\n", "file:1: "),
            ("[speed]\nx = 1\n", "file:1: speed: unknown field `speed`"),
            (
                "[communicator]\nheartbeat_interval_ms = 900\nheartbeat_timeout_ms = 1000\n",
                "file:3: communicator.heartbeat_timeout_ms: 1000 is less than twice",
            ),
            (
                "[listen]\nmode = \"rw\"\n",
                "file:2: listen.mode: \"rw\" is not an octal mode",
            ),
            (
                "[log]\nlevel = \"loud\"\n",
                "file:2: log.level: \"loud\" is none of off, error, ",
            ),
            ("[log]\nlevel = \"a=b=c\"\n", "file:2: log.level: "),
            (
                "[cuda]\nhost_staged = \"maybe\"\n",
                "file:2: cuda.host_staged: unknown variant `maybe`",
            ),
            (
                "[cuda]\nhost_staged_bytes = 1040\n",
                "file:2: cuda.host_staged_bytes: 1040 is not a multiple of 32",
            ),
            (
                "[cuda]\nresident_blocks_per_gpu = 1025\n",
                "file:2: cuda.resident_blocks_per_gpu: 1025 is above 1024",
            ),
            (
                "[host]\narena_len_bytes = -1\n",
                "file:2: host.arena_len_bytes: invalid value: integer `-1`",
            ),
        ] {
            let found = problem(text);
            assert!(found.starts_with(expected), "{text:?}: {found}");
        }
    }

    #[test]
    fn topology_files_are_read_with_the_configuration() {
        let found = problem("[topology]\nfile = \"/nowhere/t.toml\"\n");
        let expected = "file:2: topology.file: /nowhere/t.toml: cannot be read: ";
        assert!(found.starts_with(expected), "{found}");
        let dir = std::env::temp_dir().join(format!("allreduced-topology-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("t.toml");
        std::fs::write(&file, "schema_version = 1\nname = \"x\"\nspeed = 1\n").unwrap();
        let text = format!("[topology]\nfile = {file:?}\n");
        let found = problem(&text);
        assert!(found.contains("t.toml:3: speed: unknown field"), "{found}");
        std::fs::write(&file, "schema_version = 1\nname = \"x\"\n").unwrap();
        assert_eq!(problem(&text), "accepted");
        let found = problem("[topology]\ndiscover_timeout_ms = 0\n");
        assert!(
            found.starts_with("file:2: topology.discover_timeout_ms: "),
            "{found}"
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_long_socket_path_is_refused_by_name() {
        let text = format!("[listen]\npath = \"/{}\"\n", "x".repeat(120));
        let found = problem(&text);
        assert!(found.starts_with("file:2: listen.path: "), "{found}");
        assert!(found.contains("107"), "{found}");
    }

    fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn later_layers_win() {
        let dir = std::env::temp_dir().join(format!("allreduced-config-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("a.toml");
        std::fs::write(
            &file,
            "[communicator]\nmax_open = 3\nmax_in_flight = 5\n[listen]\npath = \"/tmp/file.sock\"\n",
        )
        .unwrap();
        let environment = variables(&[
            ("ALLREDUCED_COMMUNICATOR__MAX_OPEN", "4"),
            ("ALLREDUCED_LISTEN__PATH", "/tmp/env.sock"),
            ("ALLREDUCED_SOCKET", "/tmp/not-a-key.sock"),
            ("OTHER", "1"),
        ]);
        let flags = Flags {
            socket: Some(PathBuf::from("/tmp/flag.sock")),
        };
        let config = Config::load(Some(&file), environment, &flags).unwrap();
        assert_eq!(config.communicator.max_open, 4);
        assert_eq!(config.communicator.max_in_flight, 5);
        assert_eq!(config.listen.path, PathBuf::from("/tmp/flag.sock"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn bad_variables_are_refused() {
        for (name, value) in [
            ("ALLREDUCED_COMMUNICATOR__MAX_OPEM", "4"),
            ("ALLREDUCED_COMMUNICATOR__MAX_OPEN", "many"),
            ("ALLREDUCED_NONSENSE", "1"),
            ("ALLREDUCED_COMMUNICATOR__MAX_IN_FLIGHT", "0"),
        ] {
            let result = Config::load(None, variables(&[(name, value)]), &Flags::default());
            assert!(result.is_err(), "{name}={value}");
        }
    }
}
