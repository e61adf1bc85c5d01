//! What was measured: tables of the faster algorithm by size, which go before the model.
//!
//! Owns the table that `tune` writes and the executor reads (TOML), and the one that this program ships, of virtual ranks
//! on one GPU. A table is of one machine: it holds only where the topology's fingerprint is the one it was measured on.
//! Refuses to measure.

use allreduce_contract::{Algorithm, Backend, Dtype, Lane, UnknownName, WorldSize};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// Version of the table's format.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// The file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TunedTable {
    /// Version of this format.
    pub(crate) schema_version: u32,
    /// Of the topology that it was measured on.
    pub(crate) fingerprint: String,
    /// When, by what.
    pub(crate) measured: String,
    /// One for each kind of communicator.
    #[serde(default, rename = "set", skip_serializing_if = "Vec::is_empty")]
    pub(crate) sets: Vec<TunedSet>,
}

/// What holds for one kind of communicator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TunedSet {
    /// Number of ranks.
    pub(crate) world_size: u32,
    /// GPUs that they are on.
    pub(crate) gpus: u32,
    /// By name.
    pub(crate) lane: String,
    /// By name; the table is used for other types of the same width.
    pub(crate) dtype: String,
    /// Ascending.
    #[serde(rename = "choice")]
    pub(crate) choices: Vec<TunedChoice>,
    /// What the choices were made from.
    #[serde(default, rename = "row", skip_serializing_if = "Vec::is_empty")]
    pub(crate) rows: Vec<TunedRow>,
}

/// The faster algorithm from the size before to this one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TunedChoice {
    /// Bytes of a tensor, at most.
    pub(crate) up_to_bytes: u64,
    /// By name.
    pub(crate) algorithm: String,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TunedRow {
    /// Bytes of a tensor.
    pub(crate) bytes: u64,
    /// By name.
    pub(crate) algorithm: String,
    /// Median.
    pub(crate) us: f64,
    /// Between the quartiles of its repeats.
    pub(crate) spread_us: f64,
}

/// Why a table is not one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TunedError {
    /// Not read.
    #[error("{path}: {error}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// Not understood.
    #[error("{path}: {message}; make it anew with `allreduced tune --output {path}`")]
    Bad {
        /// The file.
        path: String,
        /// Why.
        message: String,
    },
}

/// Sizes up to which an algorithm is the faster one; what is beyond the last is the model's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Thresholds(Vec<(u64, Algorithm)>);

impl Thresholds {
    /// Ascending, each size once.
    pub(crate) fn new(mut choices: Vec<(u64, Algorithm)>) -> Self {
        choices.sort_by_key(|(up_to_bytes, _)| *up_to_bytes);
        choices.dedup_by_key(|(up_to_bytes, _)| *up_to_bytes);
        Self(choices)
    }

    /// The algorithm for a size.
    pub(crate) fn choice(&self, len_bytes: u64) -> Option<Algorithm> {
        let place = self
            .0
            .partition_point(|(up_to_bytes, _)| *up_to_bytes < len_bytes);
        self.0.get(place).map(|(_, algorithm)| *algorithm)
    }

    /// The largest size for which it is that algorithm.
    pub(crate) fn largest(&self, algorithm: Algorithm) -> Option<u64> {
        let mut sizes = self.0.iter().rev();
        sizes
            .find(|(_, of)| *of == algorithm)
            .map(|(up_to_bytes, _)| *up_to_bytes)
    }

    /// The sizes at which it changes.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|(up_to_bytes, _)| *up_to_bytes)
    }

    /// Virtual ranks on one GPU, as measured on an H200 (docs/benchmarks.md, "CUDA kernels").
    pub(crate) fn shipped(world_size: WorldSize) -> Self {
        const KIB: u64 = 1 << 10;
        const MIB: u64 = 1 << 20;
        let two_shot_from = match world_size.get() {
            0..=2 => None,
            3..=4 => Some(512 * KIB),
            _ => Some(96 * KIB),
        };
        let small = (2 * KIB, Algorithm::OneShotPush);
        let choices = match two_shot_from {
            None => vec![
                small,
                (MIB, Algorithm::OneShotPullInband),
                (u64::MAX, Algorithm::OneShotPull),
            ],
            Some(from) => vec![
                small,
                (from - 1, Algorithm::OneShotPullInband),
                (4 * MIB, Algorithm::TwoShotPullInband),
                (u64::MAX, Algorithm::TwoShotPull),
            ],
        };
        Self::new(choices)
    }
}

impl TunedTable {
    /// Reads a file.
    ///
    /// # Errors
    /// [`TunedError`].
    pub(crate) fn read(path: &Path) -> Result<Self, TunedError> {
        let name = || path.display().to_string();
        let text = crate::files::read_text(path).map_err(|error| TunedError::Read {
            path: name(),
            error,
        })?;
        let bad = |message: String| TunedError::Bad {
            path: name(),
            message,
        };
        let table: Self = toml::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if table.schema_version != SCHEMA_VERSION {
            return Err(bad(format!(
                "schema_version = {}: this program reads {SCHEMA_VERSION}",
                table.schema_version
            )));
        }
        let mut kinds = HashSet::new();
        for set in &table.sets {
            let kind = set
                .check()
                .map_err(|why| bad(format!("set of {}: {why}", set.words())))?;
            if !kinds.insert(kind) {
                return Err(bad(format!("set of {}: it is there twice", set.words())));
            }
        }
        Ok(table)
    }

    /// The set for a kind of communicator, if there is one.
    pub(crate) fn set(
        &self,
        world_size: WorldSize,
        gpus: u32,
        lane: Lane,
        dtype: Dtype,
    ) -> Option<&TunedSet> {
        self.sets.iter().find(|set| {
            let same_width = set
                .dtype
                .parse::<Dtype>()
                .is_ok_and(|of| of.size_bytes() == dtype.size_bytes());
            set.world_size == world_size.get()
                && set.gpus == gpus
                && set.lane == lane.name()
                && same_width
        })
    }
}

/// What there is one set for: world size, GPUs, lane, bytes of an element.
type Kind = (u32, u32, Lane, usize);

impl TunedSet {
    fn words(&self) -> String {
        let Self {
            world_size,
            gpus,
            lane,
            dtype,
            ..
        } = self;
        format!("{world_size} ranks on {gpus} GPUs, lane {lane}, {dtype}")
    }

    /// Whether it can be obeyed as it stands.
    fn check(&self) -> Result<Kind, String> {
        let unknown = |error: UnknownName| error.to_string();
        let lane: Lane = self.lane.parse().map_err(unknown)?;
        let dtype: Dtype = self.dtype.parse().map_err(unknown)?;
        WorldSize::new(self.world_size).map_err(|error| error.to_string())?;
        let backend = match self.gpus {
            0 => Backend::Host,
            _ => Backend::Cuda,
        };
        let choices = self.choices()?;
        let pairs = || choices.iter().zip(choices.iter().skip(1));
        if let Some(((size, _), _)) = pairs().find(|((one, _), (other, _))| one >= other) {
            return Err(format!("up_to_bytes does not ascend after {size}"));
        }
        let strange = choices
            .iter()
            .find(|(_, algorithm)| !is_of(backend, lane, *algorithm));
        if let Some((_, algorithm)) = strange {
            return Err(format!(
                "{algorithm} is none of lane {lane} of backend {backend}"
            ));
        }
        let is_of_geometry = backend == Backend::Host && lane == Lane::Delegated;
        let goes_back = |((_, one), (_, other)): (&(u64, Algorithm), &(u64, Algorithm))| {
            *one == Algorithm::TwoShot && *other == Algorithm::OneShot
        };
        if is_of_geometry && pairs().any(goes_back) {
            return Err(
                "lane delegated of the host has one_shot up to one size, two_shot beyond"
                    .to_owned(),
            );
        }
        for row in &self.rows {
            row.algorithm.parse::<Algorithm>().map_err(unknown)?;
            let is_time = row.us.is_finite() && row.us > 0.0;
            if !is_time || !row.spread_us.is_finite() || row.spread_us < 0.0 {
                return Err(format!("{} us of {} are no time", row.us, row.algorithm));
            }
        }
        Ok((self.world_size, self.gpus, lane, dtype.size_bytes()))
    }

    fn choices(&self) -> Result<Vec<(u64, Algorithm)>, String> {
        let choice = |choice: &TunedChoice| {
            let algorithm = choice.algorithm.parse();
            let algorithm = algorithm.map_err(|error: UnknownName| error.to_string())?;
            Ok((choice.up_to_bytes, algorithm))
        };
        self.choices.iter().map(choice).collect()
    }

    /// What an algorithm took: between two sizes that were measured, by the straight line between them; beyond them, unknown.
    pub(crate) fn measured_us(&self, algorithm: Algorithm, len_bytes: u64) -> Option<f64> {
        let rows = || {
            self.rows
                .iter()
                .filter(|row| row.algorithm == algorithm.name())
        };
        let below = rows()
            .filter(|row| row.bytes <= len_bytes)
            .max_by_key(|row| row.bytes)?;
        let above = rows()
            .filter(|row| row.bytes >= len_bytes)
            .min_by_key(|row| row.bytes)?;
        let width = above.bytes.saturating_sub(below.bytes);
        if width == 0 {
            return Some(below.us);
        }
        let part = len_bytes.saturating_sub(below.bytes) as f64 / width as f64;
        Some(below.us + part * (above.us - below.us))
    }

    /// Its choices.
    ///
    /// # Errors
    /// The name that is none.
    pub(crate) fn thresholds(&self) -> Result<Thresholds, String> {
        Ok(Thresholds::new(self.choices()?))
    }
}

/// Whether a lane can have an algorithm, so that a table may name it.
fn is_of(backend: Backend, lane: Lane, algorithm: Algorithm) -> bool {
    let of_host: &[Algorithm] = match lane {
        Lane::Rpc => &[Algorithm::OneShot, Algorithm::OneShotChunked],
        Lane::Resident => &[Algorithm::OneShot],
        Lane::Delegated => &[Algorithm::OneShot, Algorithm::TwoShot],
    };
    let is_the_executors =
        algorithm == Algorithm::HostStaged || algorithm == Algorithm::CopyEngineRing;
    match (backend, lane) {
        (Backend::Host, _) => of_host.contains(&algorithm),
        (Backend::Cuda, Lane::Rpc) => algorithm.backend() == backend,
        (Backend::Cuda, Lane::Delegated) => algorithm.backend() == backend && !is_the_executors,
        (Backend::Cuda, Lane::Resident) => algorithm == Algorithm::OneShotPullInband,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn thresholds_leave_no_gap() {
        let of = Thresholds::new(vec![
            (100, Algorithm::TwoShotPush),
            (10, Algorithm::OneShotPush),
        ]);
        for (bytes, wanted) in [
            (0, Some(Algorithm::OneShotPush)),
            (10, Some(Algorithm::OneShotPush)),
            (11, Some(Algorithm::TwoShotPush)),
            (100, Some(Algorithm::TwoShotPush)),
            (101, None),
        ] {
            assert_eq!(of.choice(bytes), wanted, "{bytes}");
        }
        for ranks in 1..=16 {
            let shipped = Thresholds::shipped(WorldSize::new(ranks).unwrap());
            for size in shipped.sizes() {
                assert!(shipped.choice(size).is_some());
                assert!(shipped.choice(size.saturating_add(1)).is_some());
            }
            assert!(shipped.choice(u64::MAX).is_some());
        }
    }

    #[test]
    fn a_table_is_read_as_written_and_nonsense_is_refused() {
        let table = TunedTable {
            schema_version: SCHEMA_VERSION,
            fingerprint: "f".to_owned(),
            measured: "today".to_owned(),
            sets: vec![TunedSet {
                world_size: 8,
                gpus: 8,
                lane: "delegated".to_owned(),
                dtype: "bf16".to_owned(),
                choices: vec![TunedChoice {
                    up_to_bytes: 1 << 20,
                    algorithm: "two_shot_push".to_owned(),
                }],
                rows: vec![TunedRow {
                    bytes: 4096,
                    algorithm: "one_shot_push".to_owned(),
                    us: 3.5,
                    spread_us: 0.1,
                }],
            }],
        };
        let folder = std::env::temp_dir().join(format!("allreduced-tuned-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("tuned.toml");
        let text = toml::to_string(&table).unwrap();
        std::fs::write(&path, &text).unwrap();
        assert_eq!(TunedTable::read(&path).unwrap(), table);
        let eight = WorldSize::new(8).unwrap();
        assert!(table.set(eight, 8, Lane::Delegated, Dtype::F16).is_some());
        assert!(table.set(eight, 8, Lane::Delegated, Dtype::F32).is_none());
        assert!(table.set(eight, 4, Lane::Delegated, Dtype::Bf16).is_none());
        for (from, to) in [
            ("two_shot_push", "three_shot"),
            ("delegated", "express"),
            ("world_size = 8", "world_size = 99"),
            ("schema_version = 1", "schema_version = 2"),
            ("measured", "guessed"),
            // The executor's, and the host's.
            (
                "algorithm = \"two_shot_push\"",
                "algorithm = \"host_staged\"",
            ),
            ("algorithm = \"two_shot_push\"", "algorithm = \"two_shot\""),
            ("us = 3.5", "us = nan"),
            ("us = 3.5", "us = -1.0"),
        ] {
            assert!(text.contains(from));
            std::fs::write(&path, text.replace(from, to)).unwrap();
            let error = TunedTable::read(&path).unwrap_err().to_string();
            assert!(error.contains("tuned.toml"), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(TunedTable::read(&path).is_err());
    }
}
