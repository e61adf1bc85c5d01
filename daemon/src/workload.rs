//! Workloads: sequences of reductions that a step of a model makes.
//!
//! Owns the file format and the shipped workloads. `demo` and `bench` run them. Refuses sizes that are
//! no whole number of elements, unknown names and keys.
//!
//! ```toml
//! about = "what it is"      # optional
//! steps = 20                # optional, of a demo that does not say
//! [[reductions]]            # in order
//! repeat = 122              # optional, 1
//! op = "sum"
//! dtype = "bf16"
//! bytes = 43008             # of one rank's tensor
//! ```

use crate::config::Host;
use crate::plan::{PlanRequest, Refusal, lane_geometry, plan};
use allreduce_contract::{Backend, Dtype, Lane, Op, UnknownName, WorldSize};
use serde::Deserialize;
use std::path::PathBuf;

/// The workloads that come with the daemon, by name.
const SHIPPED: [(&str, &str); 5] = [
    (
        "kimi-k2.5-verify",
        include_str!("../workloads/kimi-k2.5-verify.toml"),
    ),
    (
        "llama-3-70b-decode-1",
        include_str!("../workloads/llama-3-70b-decode-1.toml"),
    ),
    (
        "llama-3-70b-decode-8",
        include_str!("../workloads/llama-3-70b-decode-8.toml"),
    ),
    (
        "llama-3-70b-decode-64",
        include_str!("../workloads/llama-3-70b-decode-64.toml"),
    ),
    (
        "llama-3-70b-prefill-8k",
        include_str!("../workloads/llama-3-70b-prefill-8k.toml"),
    ),
];

/// The one that `demo` runs when none is named.
pub(crate) const DEFAULT: &str = "kimi-k2.5-verify";

/// Reductions of one step, at most: beyond it, a file is a mistake.
const MAX_REDUCTIONS: usize = 1_000_000;

/// One reduction of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ReductionSpec {
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
    pub(crate) num_elems: usize,
}

impl ReductionSpec {
    /// From a length in bytes.
    pub(crate) fn new(dtype: Dtype, op: Op, bytes: u64) -> Result<Self, WorkloadError> {
        let elem_bytes = dtype.size_bytes() as u64;
        let bad = WorkloadError::NotWhole { bytes, dtype };
        if !bytes.is_multiple_of(elem_bytes) {
            return Err(bad);
        }
        let num_elems = usize::try_from(bytes / elem_bytes).map_err(|_| bad)?;
        let request = PlanRequest {
            backend: Backend::Host,
            lane: Lane::Rpc,
            world_size: WorldSize::ONE,
            num_elems: num_elems as u64,
            dtype,
            op,
            algorithm: None,
            in_place: true,
            max_threads: 1,
            geometry: lane_geometry(Lane::Rpc, WorldSize::ONE, 1, &Host::default()),
            gpus: None,
            costs: None,
        };
        plan(request)?;
        Ok(Self {
            dtype,
            op,
            num_elems,
        })
    }

    /// Bytes of one rank's tensor.
    pub(crate) fn len_bytes(&self) -> usize {
        self.num_elems * self.dtype.size_bytes()
    }
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Workload {
    pub(crate) name: String,
    pub(crate) about: String,
    /// Steps that a demo runs if it does not say.
    pub(crate) steps: u64,
    pub(crate) reductions: Vec<ReductionSpec>,
}

/// A workload cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    #[error("{name:?} is neither a shipped workload ({known}) nor a file: {source}")]
    Unknown {
        name: String,
        known: String,
        source: std::io::Error,
    },
    #[error("{name}: {source}")]
    Syntax {
        name: String,
        source: Box<toml::de::Error>,
    },
    #[error("{bytes} bytes are no whole number of {dtype} elements")]
    NotWhole { bytes: u64, dtype: Dtype },
    #[error("{name}: a step has at least 1 and at most {MAX_REDUCTIONS} reductions")]
    Length { name: String },
    #[error(transparent)]
    Name(#[from] UnknownName),
    #[error(transparent)]
    Plan(#[from] Refusal),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    about: String,
    #[serde(default = "twenty")]
    steps: u64,
    reductions: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default = "once")]
    repeat: usize,
    op: String,
    dtype: String,
    bytes: u64,
}

fn twenty() -> u64 {
    20
}

fn once() -> usize {
    1
}

impl Workload {
    /// A shipped workload, or one from a file.
    ///
    /// # Errors
    /// [`WorkloadError`].
    pub(crate) fn find(name: &str) -> Result<Self, WorkloadError> {
        if let Some((_, text)) = SHIPPED.iter().find(|(known, _)| *known == name) {
            return Self::parse(name, text);
        }
        let path = PathBuf::from(name);
        let text = crate::files::read_text(&path).map_err(|source| WorkloadError::Unknown {
            name: name.to_owned(),
            known: SHIPPED.map(|(known, _)| known).join(", "),
            source,
        })?;
        let mut workload = Self::parse(name, &text)?;
        if let Some(stem) = path.file_stem() {
            workload.name = stem.to_string_lossy().into_owned();
        }
        Ok(workload)
    }

    /// The same reduction, over and over.
    pub(crate) fn uniform(spec: ReductionSpec, repeat: usize) -> Self {
        Self {
            name: "custom".to_owned(),
            about: format!(
                "{repeat} x {} {} {} bytes",
                spec.dtype,
                spec.op,
                spec.len_bytes()
            ),
            steps: twenty(),
            reductions: vec![spec; repeat],
        }
    }

    fn parse(name: &str, text: &str) -> Result<Self, WorkloadError> {
        let file: File = toml::from_str(text).map_err(|source| WorkloadError::Syntax {
            name: name.to_owned(),
            source: Box::new(source),
        })?;
        let length = || WorkloadError::Length {
            name: name.to_owned(),
        };
        let mut reductions = Vec::new();
        for entry in file.reductions {
            let spec = ReductionSpec::new(entry.dtype.parse()?, entry.op.parse()?, entry.bytes)?;
            if entry.repeat > MAX_REDUCTIONS - reductions.len() {
                return Err(length());
            }
            reductions.extend(std::iter::repeat_n(spec, entry.repeat));
        }
        if reductions.is_empty() {
            return Err(length());
        }
        Ok(Self {
            name: name.to_owned(),
            about: file.about,
            steps: file.steps.clamp(1, 1_000_000),
            reductions,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn what_is_shipped_is_what_the_models_do() {
        for (name, count, bytes) in [
            ("kimi-k2.5-verify", 122, 3 * 7168 * 2),
            ("llama-3-70b-decode-1", 160, 8192 * 2),
            ("llama-3-70b-decode-8", 160, 8 * 8192 * 2),
            ("llama-3-70b-decode-64", 160, 64 * 8192 * 2),
            ("llama-3-70b-prefill-8k", 160, 8192 * 8192 * 2),
        ] {
            let workload = Workload::find(name).unwrap();
            assert_eq!(workload.reductions.len(), count, "{name}");
            let lengths = workload.reductions.iter().map(ReductionSpec::len_bytes);
            assert_eq!(lengths.max(), Some(bytes), "{name}");
        }
        assert_eq!(SHIPPED.len(), 5);
    }

    #[test]
    fn bad_workloads_are_refused_in_words() {
        let parse = |text: &str| Workload::parse("w", text).unwrap_err().to_string();
        let entry = |fields: &str| format!("[[reductions]]\n{fields}\n");
        for (text, expected) in [
            (String::new(), "missing field `reductions`"),
            ("reductions = []".to_owned(), "at least 1"),
            (
                entry("op=\"sum\"\ndtype=\"bf16\"\nbytes=3"),
                "3 bytes are no whole number of bf16",
            ),
            (
                entry("op=\"mean\"\ndtype=\"bf16\"\nbytes=4"),
                "unknown op \"mean\"",
            ),
            (
                entry("op=\"avg\"\ndtype=\"i32\"\nbytes=4"),
                "not defined for the integer dtype",
            ),
            (
                entry("op=\"sum\"\ndtype=\"f32\"\nbytes=4\nrepeat=1000001"),
                "at most 1000000",
            ),
            (
                entry("op=\"sum\"\ndtype=\"f32\"\nbytes=4\nsize=1"),
                "unknown field `size`",
            ),
        ] {
            let found = parse(&text);
            assert!(found.contains(expected), "{text}: {found}");
        }
        let unknown = Workload::find("no-such-workload").unwrap_err().to_string();
        assert!(unknown.contains("kimi-k2.5-verify"), "{unknown}");
    }
}
