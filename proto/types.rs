//! The vocabulary shared by every crate: element type, reduction operator, rank and world size.
//!
//! Owns the value types and their numeric rules. Called by the contract's converters, the kernels,
//! the daemon and the client. Refuses to know about messages, memory or scheduling.

use std::fmt;
use std::str::FromStr;

/// Largest number of ranks in one communicator.
pub const MAX_WORLD_SIZE: u32 = 16;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE-754 binary32.
    F32,
    /// IEEE-754 binary64.
    F64,
    /// IEEE-754 binary16; accumulated in f32.
    F16,
    /// bfloat16 (the upper half of a binary32); accumulated in f32.
    Bf16,
    /// Two's complement 32-bit integer; arithmetic wraps.
    I32,
    /// Two's complement 64-bit integer; arithmetic wraps.
    I64,
}

impl Dtype {
    /// Every element type, in the order of the wire enum.
    pub const ALL: [Dtype; 6] = [
        Dtype::F32,
        Dtype::F64,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::I32,
        Dtype::I64,
    ];

    /// Bytes of one element; also its required alignment.
    pub const fn size_bytes(self) -> usize {
        match self {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F64 | Dtype::I64 => 8,
        }
    }

    /// Whether the type is an integer, for which [`Op::Avg`] is refused.
    pub const fn is_integer(self) -> bool {
        match self {
            Dtype::I32 | Dtype::I64 => true,
            Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16 => false,
        }
    }

    /// The lower-case name used on the command line, in JSON and in stats.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
        }
    }
}

/// Reduction operator.
///
/// Floating point: the accumulator starts as rank 0's element and takes ranks 1.. in order, in f32
/// for f32, f16 and bf16, in f64 for f64; the result is rounded once, to nearest even. A NaN result
/// is the canonical one (sign clear, only the top mantissa bit set), whatever NaN went in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Sum; integers wrap.
    Sum,
    /// Sum times 1/world_size, the factor rounded to the accumulator type. Not for integers.
    Avg,
    /// IEEE-754-2019 `minimum`: NaN propagates, -0 is below +0.
    Min,
    /// IEEE-754-2019 `maximum`: NaN propagates, +0 is above -0.
    Max,
    /// Product; integers wrap.
    Prod,
}

impl Op {
    /// Every operator, in the order of the wire enum.
    pub const ALL: [Op; 5] = [Op::Sum, Op::Avg, Op::Min, Op::Max, Op::Prod];

    /// The lower-case name used on the command line, in JSON and in stats.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Sum => "sum",
            Op::Avg => "avg",
            Op::Min => "min",
            Op::Max => "max",
            Op::Prod => "prod",
        }
    }
}

macro_rules! named {
    ($type:ty, $what:literal) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                <$type>::ALL
                    .into_iter()
                    .find(|value| value.name() == text)
                    .ok_or_else(|| UnknownName {
                        what: $what,
                        given: text.to_owned(),
                        known: <$type>::ALL.map(|value| value.name()).join(", "),
                    })
            }
        }
    };
}

named!(Dtype, "dtype");
named!(Op, "op");

/// A name that is none of the known ones; says which are.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {given:?}: one of {known}")]
pub struct UnknownName {
    /// What was being named: "dtype", "op", ...
    pub what: &'static str,
    /// The text that was given.
    pub given: String,
    /// The names that exist, comma-separated.
    pub known: String,
}

/// Number of ranks of a communicator: 1..=[`MAX_WORLD_SIZE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorldSize(u32);

/// A world size outside 1..=[`MAX_WORLD_SIZE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("world_size {0} is not in 1..={MAX_WORLD_SIZE}")]
pub struct BadWorldSize(pub u32);

impl WorldSize {
    /// A communicator of one rank.
    pub const ONE: WorldSize = WorldSize(1);

    /// Checks the range.
    pub const fn new(ranks: u32) -> Result<Self, BadWorldSize> {
        if ranks >= 1 && ranks <= MAX_WORLD_SIZE {
            Ok(Self(ranks))
        } else {
            Err(BadWorldSize(ranks))
        }
    }

    /// The number of ranks.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number of ranks, for indexing.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Checks that `rank` is one of 0..world_size.
    pub const fn rank(self, rank: u32) -> Result<Rank, BadRank> {
        if rank < self.0 {
            Ok(Rank(rank))
        } else {
            Err(BadRank {
                rank,
                world_size: self.0,
            })
        }
    }

    /// All ranks, ascending.
    pub fn ranks(self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator {
        (0..self.0).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A rank, below the world size it was checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(u32);

/// A rank that is not below its world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} is not below world_size {world_size}")]
pub struct BadRank {
    /// The rank given.
    pub rank: u32,
    /// The world size it must be below.
    pub world_size: u32,
}

impl Rank {
    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number, for indexing.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Longest communicator name, in bytes.
pub const MAX_COMMUNICATOR_NAME_LEN: usize = 64;

/// Name of a communicator: 1 to 64 bytes of `[A-Za-z0-9._-]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommunicatorId(String);

/// A name that cannot be a communicator's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "communicator name {0:?} is not 1 to {MAX_COMMUNICATOR_NAME_LEN} bytes of letters, digits, '.', '_' and '-'"
)]
pub struct BadCommunicatorId(pub String);

impl CommunicatorId {
    /// Checks length and characters.
    pub fn new(name: &str) -> Result<Self, BadCommunicatorId> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if (1..=MAX_COMMUNICATOR_NAME_LEN).contains(&name.len()) && name.bytes().all(legal) {
            Ok(Self(name.to_owned()))
        } else {
            let mut shown = name.to_owned();
            shown.truncate(name.floor_char_boundary(2 * MAX_COMMUNICATOR_NAME_LEN));
            Err(BadCommunicatorId(shown))
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CommunicatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// How a rank triggers a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The AllReduce RPC; the executor reduces.
    Rpc,
    /// A doorbell in shared memory; the executor reduces.
    Resident,
    /// The rank reduces on windows that the executor owns.
    Delegated,
}

impl Lane {
    /// Every lane, in the order of the wire enum.
    pub const ALL: [Lane; 3] = [Lane::Rpc, Lane::Resident, Lane::Delegated];

    /// The lower-case name used on the command line, in JSON and in stats.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Rpc => "rpc",
            Lane::Resident => "resident",
            Lane::Delegated => "delegated",
        }
    }
}

/// Where windows live and who reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Backend {
    /// Memfd windows, SIMD reductions.
    Host,
    /// GPU memory, CUDA kernels.
    Cuda,
}

impl Backend {
    /// Every backend, in the order of the wire enum.
    pub const ALL: [Backend; 2] = [Backend::Host, Backend::Cuda];

    /// The lower-case name used on the command line, in JSON and in stats.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Host => "host",
            Backend::Cuda => "cuda",
        }
    }
}

/// How the plan reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// One pass over every rank's data by one thread.
    OneShot,
    /// The same pass, cut into chunks that several threads share.
    OneShotChunked,
    /// Each rank reduces one slice of every rank's data, then takes the other slices from its peers.
    TwoShot,
    /// CUDA: every rank writes its tensor into every peer's window; the data says that it has arrived.
    OneShotPush,
    /// CUDA: every rank reads every peer's tensor; flags say when.
    OneShotPull,
    /// CUDA: every rank reads every peer's window; the data says that it has arrived.
    OneShotPullInband,
    /// CUDA: reduce-scatter by writing to peers, then all-gather by writing to peers.
    TwoShotPush,
    /// CUDA: reduce-scatter by reading peers, then all-gather by reading peers; flags say when.
    TwoShotPull,
    /// CUDA: the same; the data says that it has arrived.
    TwoShotPullInband,
    /// CUDA: islands of ranks reduce-scatter, exchange f32 partials with the other islands, and all-gather; by
    /// writing to peers. The sum is a fixed tree: ranks within an island, then islands.
    Hierarchical,
    /// CUDA: two-shot through pinned host memory, for GPUs that cannot reach each other's.
    HostStaged,
    /// CUDA: two-shot, slices moved by copy engines in a ring of destinations, reduced where they arrive.
    CopyEngineRing,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 12] = [
        Algorithm::OneShot,
        Algorithm::OneShotChunked,
        Algorithm::TwoShot,
        Algorithm::OneShotPush,
        Algorithm::OneShotPull,
        Algorithm::OneShotPullInband,
        Algorithm::TwoShotPush,
        Algorithm::TwoShotPull,
        Algorithm::TwoShotPullInband,
        Algorithm::Hierarchical,
        Algorithm::HostStaged,
        Algorithm::CopyEngineRing,
    ];

    /// The backend that has it.
    pub const fn backend(self) -> Backend {
        match self {
            Algorithm::OneShot | Algorithm::OneShotChunked | Algorithm::TwoShot => Backend::Host,
            Algorithm::OneShotPush
            | Algorithm::OneShotPull
            | Algorithm::OneShotPullInband
            | Algorithm::TwoShotPush
            | Algorithm::TwoShotPull
            | Algorithm::TwoShotPullInband
            | Algorithm::Hierarchical
            | Algorithm::HostStaged
            | Algorithm::CopyEngineRing => Backend::Cuda,
        }
    }

    /// The lower-case name used on the command line, in JSON and in stats.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::OneShot => "one_shot",
            Algorithm::OneShotChunked => "one_shot_chunked",
            Algorithm::TwoShot => "two_shot",
            Algorithm::OneShotPush => "one_shot_push",
            Algorithm::OneShotPull => "one_shot_pull",
            Algorithm::OneShotPullInband => "one_shot_pull_inband",
            Algorithm::TwoShotPush => "two_shot_push",
            Algorithm::TwoShotPull => "two_shot_pull",
            Algorithm::TwoShotPullInband => "two_shot_pull_inband",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::HostStaged => "host_staged",
            Algorithm::CopyEngineRing => "copy_engine_ring",
        }
    }
}

named!(Lane, "lane");
named!(Backend, "backend");
named!(Algorithm, "algorithm");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        for op in Op::ALL {
            assert_eq!(op.name().parse(), Ok(op));
        }
        assert_eq!(
            "bf17".parse::<Dtype>().map_err(|error| error.to_string()),
            Err(r#"unknown dtype "bf17": one of f32, f64, f16, bf16, i32, i64"#.to_owned())
        );
    }

    #[test]
    fn world_size_and_rank_are_bounded() {
        assert_eq!(WorldSize::new(0), Err(BadWorldSize(0)));
        assert_eq!(WorldSize::new(17), Err(BadWorldSize(17)));
        let three = WorldSize::new(3);
        assert_eq!(
            three.map(|size| size.rank(3).is_err() && size.rank(2).is_ok()),
            Ok(true)
        );
    }

    #[test]
    fn communicator_names_are_checked() {
        assert!(CommunicatorId::new("tp0.model-a_1").is_ok());
        for bad in ["", "a/b", "a b", "ü", &"x".repeat(65)] {
            assert!(CommunicatorId::new(bad).is_err(), "{bad:?}");
        }
    }
}
