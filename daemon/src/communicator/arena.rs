//! Which bytes of a window's arena are taken.
//!
//! Owns a first-fit free list, in offsets; no memory. Called by the communicator for Allocate and
//! Release. Refuses nothing but what does not fit.

use allreduce_contract::window::BUFFER_ALIGN_BYTES;
use std::collections::BTreeMap;

/// The free list: gaps by offset, never adjacent, never empty.
#[derive(Debug)]
pub(crate) struct Arena {
    gaps: BTreeMap<u64, u64>,
    len_bytes: u64,
}

/// No gap is large enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArenaFull {
    /// Bytes needed, rounded up to the alignment.
    pub(crate) needed: u64,
    /// The largest gap.
    pub(crate) available: u64,
}

impl Arena {
    /// All of `len_bytes` is free.
    pub(crate) fn new(len_bytes: u64) -> Self {
        let mut gaps = BTreeMap::new();
        if len_bytes > 0 {
            gaps.insert(0, len_bytes);
        }
        Self { gaps, len_bytes }
    }

    /// The arena's length.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Takes `len_bytes`; the offset is a multiple of the buffer alignment. 0 bytes take nothing.
    pub(crate) fn allocate(&mut self, len_bytes: u64) -> Result<u64, ArenaFull> {
        let taken = rounded(len_bytes);
        if taken == 0 && len_bytes == 0 {
            return Ok(0);
        }
        let fit = self
            .gaps
            .iter()
            .find(|(_, gap)| **gap >= taken)
            .map(|(offset, gap)| (*offset, *gap));
        let Some((offset, gap)) = fit else {
            return Err(ArenaFull {
                needed: taken,
                available: self.gaps.values().copied().max().unwrap_or(0),
            });
        };
        self.gaps.remove(&offset);
        if gap > taken {
            self.gaps.insert(offset + taken, gap - taken);
        }
        Ok(offset)
    }

    /// Gives back what [`Self::allocate`] answered for `len_bytes`.
    pub(crate) fn release(&mut self, offset: u64, len_bytes: u64) {
        let mut start = offset;
        let mut end = offset.saturating_add(rounded(len_bytes));
        if start == end {
            return;
        }
        if let Some((before, gap)) = self.gaps.range(..start).next_back()
            && before + gap == start
        {
            start = *before;
        }
        if let Some(gap) = self.gaps.remove(&end) {
            end += gap;
        }
        self.gaps.insert(start, end - start);
    }
}

/// The next multiple of the alignment; u64::MAX, which fits nowhere, if there is none.
fn rounded(len_bytes: u64) -> u64 {
    len_bytes
        .checked_next_multiple_of(BUFFER_ALIGN_BYTES)
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn buffers_never_overlap_and_all_comes_back(
            steps in proptest::collection::vec((any::<bool>(), 0_u64..3000, any::<prop::sample::Index>()), 1..200)
        ) {
            let len = 16 * 1024;
            let mut arena = Arena::new(len);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, bytes, index) in steps {
                if take || held.is_empty() {
                    match arena.allocate(bytes) {
                        Ok(offset) => {
                            prop_assert_eq!(offset % BUFFER_ALIGN_BYTES, 0);
                            prop_assert!(offset + bytes <= len);
                            for (other, length) in &held {
                                let apart = offset + bytes <= *other || other + length <= offset;
                                prop_assert!(apart || bytes == 0 || *length == 0);
                            }
                            held.push((offset, bytes));
                        }
                        Err(full) => prop_assert!(full.available < full.needed),
                    }
                } else {
                    let (offset, bytes) = held.swap_remove(index.index(held.len()));
                    arena.release(offset, bytes);
                }
            }
            for (offset, bytes) in held {
                arena.release(offset, bytes);
            }
            prop_assert_eq!(arena.gaps, BTreeMap::from([(0, len)]));
        }
    }

    #[test]
    fn what_cannot_fit_is_said() {
        let mut arena = Arena::new(1024);
        assert_eq!(
            arena.allocate(u64::MAX).map_err(|full| full.available),
            Err(1024)
        );
        assert_eq!(arena.allocate(1025).map_err(|full| full.needed), Err(1280));
        assert_eq!(arena.allocate(1024), Ok(0));
        assert_eq!(arena.allocate(0), Ok(0));
        assert_eq!(arena.allocate(1).map_err(|full| full.available), Err(0));
    }
}
