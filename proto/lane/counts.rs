//! What a rank has reduced itself, for the executor to read: nobody else sees it.
//!
//! Owns the page of counts. The rank adds, the executor reads. Refuses to be believed: the rank may write anything.

use crate::{Algorithm, Dtype, Op};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Algorithms of lane delegated.
pub const ALGORITHMS: [Algorithm; 2] = [Algorithm::OneShot, Algorithm::TwoShot];

const KINDS: usize = ALGORITHMS.len() * Dtype::ALL.len() * Op::ALL.len();

/// Reductions of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// How many.
    pub operations: u64,
    /// Bytes of their tensors.
    pub bytes: u64,
}

/// A page of counts.
#[derive(Debug)]
#[repr(C)]
pub struct CountsPage {
    kinds: [(AtomicU64, AtomicU64); KINDS],
    times_last: AtomicU64,
    late: Times,
    skew: Times,
    reduce: Times,
}

/// What is counted apart.
pub type Kind = (Dtype, Op, Algorithm);

fn kinds() -> impl Iterator<Item = Kind> {
    ALGORITHMS.into_iter().flat_map(|algorithm| {
        Dtype::ALL
            .into_iter()
            .flat_map(move |dtype| Op::ALL.into_iter().map(move |op| (dtype, op, algorithm)))
    })
}

fn index((dtype, op, algorithm): Kind) -> Option<usize> {
    let algorithm = ALGORITHMS.iter().position(|found| *found == algorithm)?;
    let dtype = Dtype::ALL.iter().position(|found| *found == dtype)?;
    let op = Op::ALL.iter().position(|found| *found == op)?;
    Some((algorithm * Dtype::ALL.len() + dtype) * Op::ALL.len() + op)
}

/// Durations are counted in four steps to each doubling, from 64 ns on.
const STEPS: usize = 4;
const DOUBLINGS: usize = 28;
const SHORTEST_LOG2: u32 = 6;

/// How often which durations were seen.
#[derive(Debug)]
#[repr(C)]
struct Times([AtomicU64; STEPS * DOUBLINGS]);

impl Times {
    fn add(&self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let index = match ns.checked_ilog2() {
            Some(log2 @ SHORTEST_LOG2..) => {
                let step = (ns >> (log2 - 2)) & 3;
                (log2 - SHORTEST_LOG2) as usize * STEPS + step as usize
            }
            Some(_) | None => 0,
        };
        if let Some(count) = self.0.get(index.min(self.0.len() - 1)) {
            more(count, 1);
        }
    }

    /// The middle of each step that was seen, and how often.
    fn read(&self) -> Vec<(Duration, u64)> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        (0..)
            .zip(counts)
            .filter(|(_, count)| *count > 0)
            .map(|(index, count): (u64, u64)| {
                let (doubling, step) = (index / STEPS as u64, index % STEPS as u64);
                // In eighths of the doubling's beginning, so that the middle of a step is a whole number.
                let eighths = 8 + 2 * step + 1;
                let ns = (eighths << (u64::from(SHORTEST_LOG2) + doubling)) / 8;
                (Duration::from_nanos(ns), count)
            })
            .collect()
    }
}

/// One reduction, as the rank saw it.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// What it was.
    pub kind: Kind,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// How long after the first rank this one called.
    pub late: Duration,
    /// How long after the first rank the last called.
    pub skew: Duration,
    /// How long reducing took, waiting for peers within it included.
    pub reduce: Duration,
    /// Whether this rank was the last.
    pub is_last: bool,
}

/// What a rank has counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// By kind, without those of which there is none.
    pub kinds: Vec<(Kind, Count)>,
    /// How often the rank called last.
    pub times_last: u64,
    /// How late it called, and how often.
    pub late: Vec<(Duration, u64)>,
    /// How long the last rank was behind the first, and how often.
    pub skew: Vec<(Duration, u64)>,
    /// How long reducing took, and how often.
    pub reduce: Vec<(Duration, u64)>,
}

fn more(word: &AtomicU64, by: u64) {
    // Relaxed: the counts order nothing, and who reads them may see one without the other. Only the rank writes.
    word.store(
        word.load(Ordering::Relaxed).wrapping_add(by),
        Ordering::Relaxed,
    );
}

impl CountsPage {
    /// Rank: one more. Only one thread of the rank adds at a time.
    pub fn add(&self, seen: &Seen) {
        if let Some((operations, sum)) = index(seen.kind).and_then(|index| self.kinds.get(index)) {
            more(operations, 1);
            more(sum, seen.bytes);
        }
        if seen.is_last {
            more(&self.times_last, 1);
        }
        self.late.add(seen.late);
        self.skew.add(seen.skew);
        self.reduce.add(seen.reduce);
    }

    /// Executor: what is there.
    pub fn read(&self) -> Counts {
        let kinds = kinds()
            .zip(&self.kinds)
            .map(|(kind, (operations, bytes))| {
                let count = Count {
                    operations: operations.load(Ordering::Relaxed),
                    bytes: bytes.load(Ordering::Relaxed),
                };
                (kind, count)
            })
            .filter(|(_, count)| *count != Count::default())
            .collect();
        Counts {
            kinds,
            times_last: self.times_last.load(Ordering::Relaxed),
            late: self.late.read(),
            skew: self.skew.read(),
            reduce: self.reduce.read(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_kind_has_a_place_of_its_own() {
        for (expected, kind) in kinds().enumerate() {
            assert_eq!(index(kind), Some(expected));
        }
        assert_eq!(kinds().count(), KINDS);
        assert_eq!(
            index((Dtype::F32, Op::Sum, Algorithm::OneShotChunked)),
            None
        );
    }

    #[test]
    fn durations_come_back_within_an_eighth() {
        for ns in [64_u64, 100, 127, 128, 999, 43_008, 1_000_000_007, 16 << 30] {
            let times = Times(std::array::from_fn(|_| AtomicU64::new(0)));
            times.add(Duration::from_nanos(ns));
            let read = times.read();
            let [(found, 1)] = read.as_slice() else {
                unreachable!("{read:?}");
            };
            let found = u64::try_from(found.as_nanos()).unwrap();
            assert!(found.abs_diff(ns) <= ns / 8, "{ns} came back as {found}");
        }
        let times = Times(std::array::from_fn(|_| AtomicU64::new(0)));
        times.add(Duration::ZERO);
        times.add(Duration::MAX);
        assert_eq!(times.read().len(), 2);
    }
}
