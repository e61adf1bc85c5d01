//! What a rank has reduced itself, for the executor to read: nobody else sees it.
//!
//! Owns the page of counts. The rank adds, the executor reads. Refuses to be believed: the rank may write anything.

use crate::{Algorithm, Dtype, Op};
use std::sync::atomic::{AtomicU64, Ordering};

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

impl CountsPage {
    /// Rank: one more. Only one thread of the rank adds at a time.
    pub fn add(&self, kind: Kind, bytes: u64) {
        let Some((operations, sum)) = index(kind).and_then(|index| self.kinds.get(index)) else {
            return;
        };
        // Relaxed: the counts order nothing, and who reads them may see one without the other.
        let more = |word: &AtomicU64, by: u64| {
            word.store(
                word.load(Ordering::Relaxed).wrapping_add(by),
                Ordering::Relaxed,
            );
        };
        more(operations, 1);
        more(sum, bytes);
    }

    /// Executor: what is there, without the kinds of which nothing is.
    pub fn read(&self) -> Vec<(Kind, Count)> {
        kinds()
            .zip(&self.kinds)
            .map(|(kind, (operations, bytes))| {
                let count = Count {
                    operations: operations.load(Ordering::Relaxed),
                    bytes: bytes.load(Ordering::Relaxed),
                };
                (kind, count)
            })
            .filter(|(_, count)| *count != Count::default())
            .collect()
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
}
