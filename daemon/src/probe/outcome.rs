//! What a probe has found: as a table, as JSON, and as a topology.
//!
//! Owns the numbers once measured. Called by `probe`. Refuses to measure.

use super::host::HostRates;
use crate::topology::{Description, Fabric, Pair, Topology, TopologyError};
use serde::Serialize;
use std::fmt::Write;

/// Of an ordered pair of GPUs, or of one with itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct PairOutcome {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) peer_access: bool,
    pub(super) write_gbps: Option<f64>,
    pub(super) read_gbps: Option<f64>,
    /// One way.
    pub(super) flag_us: Option<f64>,
    pub(super) data: Data,
    /// What went wrong, each in words.
    pub(super) troubles: Vec<String>,
}

/// Whether what two workers reduced was right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Data {
    /// There is no access, or nobody got that far.
    #[default]
    NotChecked,
    /// Every bit.
    Right,
    /// Not every bit, or measuring or checking did not come to an end.
    Failed,
}

impl Data {
    fn word(self) -> &'static str {
        match self {
            Data::NotChecked => "not checked",
            Data::Right => "ok",
            Data::Failed => "FAILED",
        }
    }
}

/// Of a GPU, while all exchange with all.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct AllOutcome {
    pub(super) gpu: String,
    pub(super) write_gbps: Option<f64>,
    pub(super) read_gbps: Option<f64>,
}

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Outcome {
    pub(super) schema_version: u32,
    pub(super) backend: &'static str,
    pub(super) host: HostRates,
    pub(super) gpus: Vec<String>,
    pub(super) pairs: Vec<PairOutcome>,
    pub(super) all_at_once: Vec<AllOutcome>,
    pub(super) hints: Vec<String>,
    pub(super) fabric: String,
    pub(super) fingerprint: String,
    /// The file that was written.
    pub(super) output: Option<String>,
}

impl Outcome {
    /// Whether every pair that was checked came out right.
    pub(super) fn is_right(&self) -> bool {
        self.pairs.iter().all(|pair| pair.data != Data::Failed)
    }

    /// Everything but the rows of the pairs, which were printed as they came.
    pub(super) fn after_the_table(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        for all in &self.all_at_once {
            let _ = writeln!(
                text,
                "all at once: {} writes {} GB/s, reads {} GB/s",
                all.gpu,
                number(all.write_gbps),
                number(all.read_gbps)
            );
        }
        let HostRates {
            core_copy_gbps,
            core_copy_far_gbps,
            core_flag_us,
            cores,
        } = &self.host;
        let _ = write!(
            text,
            "host: one core copies {core_copy_gbps:.1} GB/s in cache, {core_copy_far_gbps:.1} GB/s of 64 MiB; "
        );
        let _ = match (core_flag_us, cores.as_slice()) {
            (Some(us), [one, other]) => {
                writeln!(
                    text,
                    "a flag from core {one} to core {other} takes {us:.3} us"
                )
            }
            _ => writeln!(text, "no flag was measured, which takes two processors"),
        };
        for hint in &self.hints {
            let _ = writeln!(text, "note: {hint}");
        }
        let _ = writeln!(
            text,
            "fabric {}, fingerprint {}",
            self.fabric, self.fingerprint
        );
        let _ = match &self.output {
            Some(file) => writeln!(
                text,
                "written to {file}; [topology] file = {file:?} has the daemon use it"
            ),
            None => writeln!(text, "nothing is written: --output FILE keeps it"),
        };
        text
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

/// The heading of [`row`].
pub(super) fn heading() -> String {
    format!(
        "{:<8} {:<8} {:>10} {:>10} {:>8}  data",
        "from", "to", "write GB/s", "read GB/s", "flag us"
    )
}

/// A pair's line.
pub(super) fn row(pair: &PairOutcome) -> String {
    let mut line = format!(
        "{:<8} {:<8} {:>10} {:>10} {:>8}  {}",
        gpu_name(pair.from),
        gpu_name(pair.to),
        number(pair.write_gbps),
        number(pair.read_gbps),
        number(pair.flag_us),
        pair.data.word()
    );
    for trouble in &pair.troubles {
        line.push_str("; ");
        line.push_str(trouble);
    }
    line
}

/// As discovery names them.
pub(super) fn gpu_name(number: usize) -> String {
    format!("gpu{number}")
}

/// To three decimals, which is more than measuring gives; none if it is no rate or time.
fn positive(value: Option<f64>) -> Option<f64> {
    value
        .map(|value| (value * 1000.0).round() / 1000.0)
        .filter(|value| value.is_finite() && *value > 0.0)
}

fn least(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.min_by(f64::total_cmp)
}

fn most(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.max_by(f64::total_cmp)
}

/// Adds what was measured to what was discovered: pairs, and rates that hold for all.
///
/// # Errors
/// [`TopologyError`]: what was discovered is no topology.
pub(super) fn measured(
    mut description: Description,
    pairs: &[PairOutcome],
    all_at_once: &[AllOutcome],
    host: &HostRates,
) -> Result<Topology, TopologyError> {
    let before = Topology::new(description.clone())?;
    for pair in pairs.iter().filter(|pair| pair.from != pair.to) {
        let (from, to) = (gpu_name(pair.from), gpu_name(pair.to));
        description
            .pairs
            .retain(|known| (&known.from, &known.to) != (&from, &to));
        description.pairs.push(Pair {
            from,
            to,
            // A pair whose data are wrong must not be used, whatever the driver says.
            peer_access: pair.peer_access && pair.data != Data::Failed,
            write_gbps: positive(pair.write_gbps),
            read_gbps: positive(pair.read_gbps),
            flag_us: positive(pair.flag_us),
        });
    }
    let rates = &mut description.rates;
    // These are a PCIe port's: what the best pair gets, which no uplink narrows.
    let by_pcie = || {
        pairs
            .iter()
            .filter(|pair| pair.from != pair.to && !before.is_nvlink(pair.from, pair.to))
    };
    rates.write_gbps = most(by_pcie().filter_map(|pair| positive(pair.write_gbps)));
    rates.read_gbps = most(by_pcie().filter_map(|pair| positive(pair.read_gbps)));
    rates.flag_us = least(
        pairs
            .iter()
            .filter(|pair| pair.from != pair.to)
            .filter_map(|pair| positive(pair.flag_us)),
    );
    let gpus: Vec<usize> = (0..before.gpus().len()).collect();
    // Where links between islands narrow it, this is not the port's rate, and the links are described.
    if before.fabric(&gpus) == Fabric::PcieOneRoot {
        rates.write_all_gbps = least(
            all_at_once
                .iter()
                .filter_map(|all| positive(all.write_gbps)),
        );
        rates.read_all_gbps = least(all_at_once.iter().filter_map(|all| positive(all.read_gbps)));
    }
    let own = pairs.iter().filter(|pair| pair.from == pair.to);
    // A copy reads and writes each byte.
    rates.memory_gbps =
        least(own.filter_map(|pair| positive(pair.write_gbps))).map(|gbps| 2.0 * gbps);
    // A peer's tensor is not in this core's cache.
    rates.core_copy_gbps = positive(Some(host.core_copy_far_gbps));
    rates.core_flag_us = positive(host.core_flag_us);
    Topology::new(description)
}

/// What the numbers say that no interface tells.
pub(super) fn conclusions(pairs: &[PairOutcome], all_at_once: &[AllOutcome]) -> Vec<String> {
    let mut hints = Vec::new();
    let collapsed: Vec<&AllOutcome> = all_at_once
        .iter()
        .filter(
            |all| match (positive(all.write_gbps), positive(all.read_gbps)) {
                (Some(write), Some(read)) => write < 0.4 * read,
                _ => false,
            },
        )
        .collect();
    if let Some(first) = collapsed.first() {
        hints.push(format!(
            "with all at once {} of {} GPUs write at less than 0.4 of what they read ({} {} of {} GB/s): their writes collapse; rates.write_collapse_gbps in the file says so to the plan",
            collapsed.len(),
            all_at_once.len(),
            first.gpu,
            number(first.write_gbps),
            number(first.read_gbps)
        ));
    }
    let failed = pairs
        .iter()
        .filter(|pair| pair.data == Data::Failed)
        .count();
    if failed > 0 {
        hints.push(format!(
            "{failed} pairs failed the check of data, and have peer_access = false in the topology: ACS, an IOMMU or the driver is in the way"
        ));
    }
    hints
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use crate::topology::preset;

    fn host() -> HostRates {
        HostRates {
            core_copy_gbps: 20.0,
            core_copy_far_gbps: 8.0,
            core_flag_us: Some(0.1),
            cores: vec![0, 3],
        }
    }

    fn pairs_of(num_gpus: usize) -> Vec<PairOutcome> {
        let mut pairs = Vec::new();
        for from in 0..num_gpus {
            for to in (0..num_gpus).filter(|to| *to != from) {
                pairs.push(PairOutcome {
                    from,
                    to,
                    peer_access: true,
                    write_gbps: Some(20.0 + from as f64),
                    read_gbps: Some(19.0),
                    flag_us: Some(1.0 - from as f64 / 100.0),
                    data: Data::Right,
                    troubles: Vec::new(),
                });
            }
        }
        pairs
    }

    fn all(write: f64, read: f64) -> Vec<AllOutcome> {
        let of = |gpu: usize| AllOutcome {
            gpu: gpu_name(gpu),
            write_gbps: Some(write + gpu as f64),
            read_gbps: Some(read),
        };
        (0..4).map(of).collect()
    }

    #[test]
    fn measurements_become_a_topology_that_reads_back() {
        let discovered = preset("v100x4-plx").unwrap().description().clone();
        let mut pairs = pairs_of(4);
        pairs[0].peer_access = false;
        pairs[1].data = Data::Failed;
        // A rate that is none must not spoil the file.
        pairs[2].write_gbps = Some(f64::NAN);
        let topology = measured(discovered.clone(), &pairs, &all(11.0, 10.0), &host()).unwrap();
        let rates = topology.rates();
        assert_eq!(rates.write_gbps, Some(23.0));
        assert_eq!(rates.read_gbps, Some(19.0));
        assert_eq!(rates.flag_us, Some(0.97));
        assert_eq!(rates.write_all_gbps, Some(11.0));
        assert_eq!(rates.memory_gbps, None);
        assert_eq!(rates.core_copy_gbps, Some(8.0));
        assert!(!topology.has_peer_access(0, 1));
        assert!(!topology.has_peer_access(0, 2));
        assert!(topology.has_peer_access(2, 3));
        let text = topology.description().to_toml().unwrap();
        assert_eq!(Topology::from_toml("file", &text).unwrap(), topology);
        // Measured again: no pair twice.
        let again = topology.description().clone();
        let again = measured(again, &pairs, &all(11.0, 10.0), &host()).unwrap();
        assert_eq!(again, topology);
        // The machine is the same.
        let good = measured(discovered.clone(), &pairs_of(4), &[], &host()).unwrap();
        let before = Topology::new(discovered).unwrap();
        assert_eq!(good.fingerprint(), before.fingerprint());
    }

    #[test]
    fn one_gpu_tells_its_memory_and_nvlink_no_port() {
        let mut one = preset("h100x8-nvlink").unwrap().description().clone();
        let nvlink = measured(one.clone(), &pairs_of(8), &all(300.0, 290.0), &host()).unwrap();
        assert_eq!(nvlink.rates().write_gbps, None);
        assert_eq!(nvlink.rates().write_all_gbps, None);
        assert_eq!(nvlink.rates().flag_us, Some(0.93));
        one.gpus.truncate(1);
        let own = PairOutcome {
            peer_access: true,
            write_gbps: Some(1500.0),
            flag_us: Some(0.4),
            ..PairOutcome::default()
        };
        let topology = measured(one, &[own], &[], &host()).unwrap();
        assert_eq!(topology.rates().memory_gbps, Some(3000.0));
        assert_eq!(topology.rates().flag_us, None);
        assert!(topology.description().pairs.is_empty());
    }

    #[test]
    fn a_collapse_is_seen() {
        assert!(conclusions(&pairs_of(4), &all(20.0, 21.0)).is_empty());
        let hints = conclusions(&pairs_of(4), &all(2.0, 21.0));
        assert!(
            hints[0].starts_with("with all at once 4 of 4 GPUs write"),
            "{hints:?}"
        );
        let mut pairs = pairs_of(2);
        pairs[1].data = Data::Failed;
        pairs[1]
            .troubles
            .push("12 bytes wrong after writing".to_owned());
        assert!(conclusions(&pairs, &[])[0].starts_with("1 pairs failed"));
        let line = row(&pairs[1]);
        assert!(
            line.ends_with("FAILED; 12 bytes wrong after writing"),
            "{line}"
        );
    }
}
