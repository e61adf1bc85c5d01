//! What a communicator counts.
//!
//! Owns counters and histograms; the communicator records, Admin reads. Refuses to keep more than a
//! fixed amount: quantiles come from histograms of three significant digits, not from samples.

use crate::backend::host_lanes::LaneCounts;
use crate::communicator::rendezvous::Signature;
use allreduce_contract::lane;
use allreduce_contract::v1::ErrorCode;
use allreduce_contract::{Algorithm, Dtype, Lane, Op, Rank, WorldSize};
use hdrhistogram::Histogram;
use std::collections::BTreeMap;
use std::time::Duration;

/// A histogram of durations, in units of 10 ns up to ten minutes; longer counts as the longest.
#[derive(Debug, Clone)]
pub(crate) struct Durations(Option<Histogram<u32>>);

const UNIT_NS: u128 = 10;
const LONGEST_UNITS: u64 = 60_000_000_000;

/// Quantiles, microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Quantiles {
    pub(crate) count: u64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Durations {
    pub(crate) fn new() -> Self {
        // The bounds are legal constants; were they not, the stats would be empty, not wrong.
        Self(Histogram::new_with_bounds(1, LONGEST_UNITS, 3).ok())
    }

    pub(crate) fn record(&mut self, duration: Duration) {
        let units = u64::try_from(duration.as_nanos() / UNIT_NS).unwrap_or(u64::MAX);
        if let Some(histogram) = &mut self.0 {
            histogram.saturating_record(units);
        }
    }

    /// Durations, and how often each.
    fn record_all(&mut self, seen: &[(Duration, u64)]) {
        for (duration, count) in seen {
            let units = u64::try_from(duration.as_nanos() / UNIT_NS).unwrap_or(u64::MAX);
            let count = u32::try_from(*count).unwrap_or(u32::MAX);
            if let Some(histogram) = &mut self.0 {
                histogram.saturating_record_n(units, count);
            }
        }
    }

    fn add(&mut self, other: &Self) {
        if let (Some(own), Some(other)) = (&mut self.0, &other.0) {
            // Of the same bounds.
            let _ = own.add(other);
        }
    }

    pub(crate) fn quantiles(&self) -> Quantiles {
        let Some(histogram) = self.0.as_ref().filter(|histogram| !histogram.is_empty()) else {
            return Quantiles::default();
        };
        let us = |units: u64| units as f64 * UNIT_NS as f64 / 1000.0;
        Quantiles {
            count: histogram.len(),
            p50: us(histogram.value_at_quantile(0.50)),
            p99: us(histogram.value_at_quantile(0.99)),
            max: us(histogram.max()),
        }
    }
}

/// What reductions are counted by.
pub(crate) type ReductionKind = (Dtype, Op, Lane, Algorithm);

/// Reductions of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
}

impl Count {
    /// Adds what a rank has counted, which may be anything.
    pub(crate) fn add(&mut self, more: lane::counts::Count) {
        self.operations = self.operations.saturating_add(more.operations);
        self.bytes = self.bytes.saturating_add(more.bytes);
    }
}

/// One rank's counters.
#[derive(Debug, Clone)]
pub(crate) struct RankStats {
    pub(crate) count: Count,
    pub(crate) lateness: Durations,
    pub(crate) times_last: u64,
}

/// A communicator's counters since the executor's start.
#[derive(Debug, Clone)]
pub(crate) struct Stats {
    pub(crate) reductions: BTreeMap<ReductionKind, Count>,
    pub(crate) reduction: Durations,
    pub(crate) skew: Durations,
    pub(crate) ranks: Vec<RankStats>,
    pub(crate) errors: BTreeMap<ErrorCode, u64>,
}

impl Stats {
    pub(crate) fn new(world_size: WorldSize) -> Self {
        let rank = |_| RankStats {
            count: Count::default(),
            lateness: Durations::new(),
            times_last: 0,
        };
        Self {
            reductions: BTreeMap::new(),
            reduction: Durations::new(),
            skew: Durations::new(),
            ranks: world_size.ranks().map(rank).collect(),
            errors: BTreeMap::new(),
        }
    }

    /// These and others, which were counted apart.
    pub(crate) fn with(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        let as_counted = |count: &Count| lane::counts::Count {
            operations: count.operations,
            bytes: count.bytes,
        };
        for (kind, count) in &other.reductions {
            let own = sum.reductions.entry(*kind).or_default();
            own.add(as_counted(count));
        }
        sum.reduction.add(&other.reduction);
        sum.skew.add(&other.skew);
        for (own, other) in sum.ranks.iter_mut().zip(&other.ranks) {
            own.count.add(as_counted(&other.count));
            own.lateness.add(&other.lateness);
            own.times_last += other.times_last;
        }
        for (code, count) in &other.errors {
            *sum.errors.entry(*code).or_default() += count;
        }
        sum
    }

    /// A reduction was done. `lateness`: for each rank, how long after the first it called.
    pub(crate) fn record_reduction(
        &mut self,
        signature: Signature,
        lane: Lane,
        algorithm: Algorithm,
        lateness: &[(Rank, Duration)],
        took: Duration,
    ) {
        let bytes = signature
            .num_elems
            .saturating_mul(signature.dtype.size_bytes() as u64);
        let add = |count: &mut Count| {
            count.operations += 1;
            count.bytes = count.bytes.saturating_add(bytes);
        };
        let key = (signature.dtype, signature.op, lane, algorithm);
        add(self.reductions.entry(key).or_default());
        self.reduction.record(took);
        let last = lateness.iter().max_by_key(|(_, late)| *late);
        if let Some((last, skew)) = last {
            self.skew.record(*skew);
            if let Some(stats) = self.ranks.get_mut(last.as_usize()) {
                stats.times_last += 1;
            }
        }
        for (rank, late) in lateness {
            if let Some(stats) = self.ranks.get_mut(rank.as_usize()) {
                add(&mut stats.count);
                stats.lateness.record(*late);
            }
        }
    }

    /// Adds what ranks have reduced themselves in an epoch that is over.
    pub(crate) fn record_lane(&mut self, lane: Lane, counts: &LaneCounts) {
        for ((dtype, op, algorithm), count) in &counts.reductions {
            let key = (*dtype, *op, lane, *algorithm);
            self.reductions.entry(key).or_default().add(*count);
        }
        for (stats, counts) in self.ranks.iter_mut().zip(&counts.ranks) {
            for (_, count) in &counts.kinds {
                stats.count.add(*count);
            }
            stats.lateness.record_all(&counts.late);
            stats.times_last = stats.times_last.saturating_add(counts.times_last);
        }
        // Each rank has seen the same reductions; rank 0's account stands for all.
        if let Some(first) = counts.ranks.first() {
            self.skew.record_all(&first.skew);
            self.reduction.record_all(&first.reduce);
        }
    }

    /// A call was answered with an error.
    pub(crate) fn record_error(&mut self, code: ErrorCode) {
        *self.errors.entry(code).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn quantiles_come_out_in_microseconds() {
        let mut durations = Durations::new();
        assert_eq!(durations.quantiles(), Quantiles::default());
        for micros in 1..=1000 {
            durations.record(Duration::from_micros(micros));
        }
        let quantiles = durations.quantiles();
        assert_eq!(quantiles.count, 1000);
        for (value, expected) in [
            (quantiles.p50, 500.0),
            (quantiles.p99, 990.0),
            (quantiles.max, 1000.0),
        ] {
            assert!((value - expected).abs() <= 1.0, "{quantiles:?}");
        }
        durations.record(Duration::MAX);
        assert_eq!(durations.quantiles().count, 1001);
    }

    #[test]
    fn the_late_rank_is_named() {
        let world_size = WorldSize::new(2).unwrap();
        let ranks: Vec<Rank> = world_size.ranks().collect();
        let mut stats = Stats::new(world_size);
        let signature = Signature {
            num_elems: 10,
            dtype: Dtype::Bf16,
            op: Op::Sum,
            algorithm: None,
        };
        let lateness = [
            (ranks[0], Duration::ZERO),
            (ranks[1], Duration::from_micros(70)),
        ];
        stats.record_reduction(
            signature,
            Lane::Rpc,
            Algorithm::OneShot,
            &lateness,
            Duration::from_micros(5),
        );
        assert_eq!(
            (stats.ranks[0].times_last, stats.ranks[1].times_last),
            (0, 1)
        );
        assert_eq!(stats.ranks[1].count.bytes, 20);
        assert_eq!(stats.skew.quantiles().count, 1);
    }
}
