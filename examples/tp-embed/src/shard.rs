//! Which part of a dimension a rank owns.
//!
//! Owns the arithmetic of cutting evenly. Called by the model, for heads and for intermediate columns.
//! Refuses a world size that does not divide, so that no rank has a longer part than another.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A dimension cannot be cut evenly.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{len} {what} cannot be cut into {world_size} equal parts")]
pub(crate) struct Indivisible {
    /// What is cut.
    pub(crate) what: &'static str,
    /// How many there are.
    pub(crate) len: usize,
    /// Into how many parts.
    pub(crate) world_size: u32,
}

/// One rank's place among the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shard {
    /// This rank.
    pub(crate) rank: u32,
    /// Number of ranks.
    pub(crate) world_size: u32,
}

impl Shard {
    /// The rank's part of `len` things.
    pub(crate) fn part(self, what: &'static str, len: usize) -> Result<Range<usize>, Indivisible> {
        let indivisible = Indivisible {
            what,
            len,
            world_size: self.world_size,
        };
        let world_size = self.world_size as usize;
        match len.checked_rem(world_size) {
            Some(0) if len > 0 => {}
            _ => return Err(indivisible),
        }
        let part_len = len / world_size;
        let start = self.rank as usize * part_len;
        Ok(start..start + part_len)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parts_cover_the_whole_once() {
        for world_size in [1, 2, 3, 4, 6, 12] {
            let mut next = 0;
            for rank in 0..world_size {
                let part = Shard { rank, world_size }.part("heads", 12).unwrap();
                assert_eq!(part.start, next);
                next = part.end;
            }
            assert_eq!(next, 12);
        }
    }

    #[test]
    fn uneven_parts_are_refused() {
        for (len, world_size) in [(12, 5), (12, 7), (12, 0), (0, 2), (12, 24)] {
            let shard = Shard {
                rank: 0,
                world_size,
            };
            assert!(shard.part("heads", len).is_err(), "{len}/{world_size}");
        }
    }
}
