//! Splitting a reduction among threads.
//!
//! Owns the arithmetic of the split. Called by whoever runs a reduction on several threads. Refuses
//! to start or count threads.

use std::num::NonZeroUsize;
use std::ops::Range;

use allreduce_contract::Dtype;

/// Bytes of a cache line, on whose multiples chunks begin.
pub const CACHE_LINE_BYTES: usize = 64;

/// The elements of chunk `index` of `count`, of `num_elems` in all.
///
/// Chunks are in order, disjoint and cover every element. Each begins on a multiple of
/// [`CACHE_LINE_BYTES`] from the buffer's start, so where buffers begin on a cache line no two
/// chunks share one. Their sizes differ by at most one cache line; where there are fewer lines
/// than chunks, the last are empty, as is any chunk whose index is `count` or more.
pub fn chunk(dtype: Dtype, num_elems: usize, index: usize, count: NonZeroUsize) -> Range<usize> {
    let elems_per_line = CACHE_LINE_BYTES / dtype.size_bytes();
    let lines = num_elems.div_ceil(elems_per_line);
    let lines_each = lines / count;
    let longer_chunks = lines % count;
    let begin = |index: usize| {
        let index = index.min(count.get());
        let line = index * lines_each + index.min(longer_chunks);
        // The last line may be partial, and its end then beyond usize.
        line.saturating_mul(elems_per_line).min(num_elems)
    };
    begin(index)..begin(index.saturating_add(1))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_are_shared_out_evenly() {
        let chunks = [0, 1, 2, 3].map(|index| chunk(Dtype::F32, 100, index, 3.try_into().unwrap()));
        assert_eq!(chunks, [0..48, 48..80, 80..100, 100..100]);
    }

    proptest! {
        #[test]
        fn chunks_cover_every_element_once(
            dtype in proptest::sample::select(&Dtype::ALL[..]),
            num_elems in prop_oneof![0..5000usize, Just(usize::MAX), Just(usize::MAX - 7)],
            count in 1..40usize,
        ) {
            let elems_per_line = CACHE_LINE_BYTES / dtype.size_bytes();
            let mut next = 0;
            for index in 0..count {
                let range = chunk(dtype, num_elems, index, count.try_into().unwrap());
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end >= range.start);
                prop_assert!(range.start.is_multiple_of(elems_per_line) || range.start == num_elems);
                next = range.end;
            }
            prop_assert_eq!(next, num_elems);
            prop_assert!(chunk(dtype, num_elems, count, count.try_into().unwrap()).is_empty());
        }
    }
}
