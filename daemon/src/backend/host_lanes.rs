//! The host lanes' memory: an epoch's board, and a lane for each of its ranks.
//!
//! Owns the memories that ranks share on lanes delegated and resident, and the last word in them when the epoch ends. The
//! executor's task has them made on the memory thread, hands their descriptors out, and reads the counts. Refuses to
//! believe a word of what ranks write.

use allreduce_contract::lane::counts::{Count, Counts, Kind};
use allreduce_contract::lane::{Abort, AbortCause, Board, Geometry, Lane, rank_bit};
use allreduce_contract::memory::{MemoryError, SealedMemory};
use allreduce_contract::{Rank, WorldSize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// What the ranks of one epoch share.
#[derive(Debug)]
pub(crate) struct EpochLanes {
    pub(crate) epoch: u64,
    pub(crate) geometry: Geometry,
    board: Board,
    board_memory: SealedMemory,
    /// By rank.
    lanes: Vec<(Lane, SealedMemory)>,
}

/// What ranks say they have reduced.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneCounts {
    /// Of each kind, the reductions that every rank has counted.
    pub(crate) reductions: BTreeMap<Kind, Count>,
    /// By rank.
    pub(crate) ranks: Vec<Counts>,
}

impl EpochLanes {
    /// Makes them.
    pub(crate) fn create(
        world_size: WorldSize,
        epoch: u64,
        geometry: Geometry,
    ) -> Result<Self, MemoryError> {
        let (board, board_memory) = Board::create(world_size, epoch)?;
        let stage_len_bytes =
            usize::try_from(geometry.stage_len_bytes).map_err(|_| MemoryError::Exhausted {
                needed: geometry.stage_len_bytes,
                available: allreduce_contract::memory::available_bytes(),
            })?;
        let lanes = world_size
            .ranks()
            .map(|rank| Lane::create(rank, world_size, epoch, stage_len_bytes))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            epoch,
            geometry,
            board,
            board_memory,
            lanes,
        })
    }

    pub(crate) fn board(&self) -> &Board {
        &self.board
    }

    /// In rank order.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().map(|(lane, _)| lane)
    }

    pub(crate) fn board_len_bytes(&self) -> u64 {
        self.board_memory.len_bytes().get() as u64
    }

    /// Length of each rank's lane.
    pub(crate) fn lane_len_bytes(&self) -> u64 {
        let first = self.lanes.first();
        first.map_or(0, |(_, memory)| memory.len_bytes().get() as u64)
    }

    /// Bytes of all of it.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.board_len_bytes() + self.lane_len_bytes() * self.lanes.len() as u64
    }

    pub(crate) fn board_fd(&self) -> io::Result<OwnedFd> {
        self.board_memory.as_fd().try_clone_to_owned()
    }

    /// A rank's lane, to be written only by its owner.
    pub(crate) fn lane_fd(&self, rank: Rank, is_owner: bool) -> io::Result<OwnedFd> {
        let (_, memory) = self
            .lanes
            .get(rank.as_usize())
            .ok_or(io::ErrorKind::NotFound)?;
        match is_owner {
            true => memory.as_fd().try_clone_to_owned(),
            false => memory.read_only_fd(),
        }
    }

    /// Tells everybody who waits in the shared memory that the epoch is over.
    pub(crate) fn end(&self, ranks: impl IntoIterator<Item = Rank>) {
        let ranks = ranks
            .into_iter()
            .fold(0, |bits, rank| bits | rank_bit(rank.get()));
        let abort = Abort {
            cause: AbortCause::Ended,
            ranks,
            sequence: 0,
        };
        // What ranks have said before stays.
        self.board.words().set_abort(abort.to_word());
    }

    /// What ranks have counted so far.
    pub(crate) fn counts(&self) -> LaneCounts {
        let ranks: Vec<Counts> = self.lanes().map(|lane| lane.counts().read()).collect();
        let pages: Vec<BTreeMap<Kind, Count>> = ranks
            .iter()
            .map(|counts| counts.kinds.iter().copied().collect())
            .collect();
        let mut reductions = BTreeMap::new();
        let kinds = pages.first().into_iter().flat_map(BTreeMap::keys);
        for kind in kinds {
            // A reduction that some rank is not through with does not count yet.
            let of_all = pages
                .iter()
                .map(|page| page.get(kind).copied().unwrap_or_default())
                .min_by_key(|count| count.operations)
                .filter(|count| count.operations > 0);
            if let Some(count) = of_all {
                reductions.insert(*kind, count);
            }
        }
        LaneCounts { reductions, ranks }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use crate::communicator::Stats;
    use allreduce_contract::lane::counts::Seen;
    use allreduce_contract::{Algorithm, Dtype, Lane, Op};
    use std::time::Duration;

    #[test]
    fn what_every_rank_has_counted_counts() {
        let geometry = Geometry {
            one_shot_max_bytes: 0,
            short_max_bytes: 0,
            block_len_bytes: 4096,
            stage_len_bytes: 4096,
            spin: Duration::ZERO,
            yielding: Duration::ZERO,
        };
        let lanes = EpochLanes::create(WorldSize::new(2).unwrap(), 3, geometry).unwrap();
        let kind = (Dtype::F32, Op::Sum, Algorithm::TwoShot);
        let other = (Dtype::F64, Op::Max, Algorithm::OneShot);
        let seen = |kind, bytes, is_last| Seen {
            kind,
            bytes,
            late: Duration::from_micros(3),
            skew: Duration::from_micros(3),
            reduce: Duration::from_micros(9),
            is_last,
        };
        for _ in 0..3 {
            lanes.lanes[0].0.counts().add(&seen(kind, 100, true));
        }
        lanes.lanes[1].0.counts().add(&seen(kind, 100, false));
        lanes.lanes[1].0.counts().add(&seen(other, u64::MAX, false));
        let counts = lanes.counts();
        let one = Count {
            operations: 1,
            bytes: 100,
        };
        assert_eq!(counts.reductions, BTreeMap::from([(kind, one)]));
        let last: Vec<u64> = counts.ranks.iter().map(|count| count.times_last).collect();
        assert_eq!(last, [3, 0]);
        let mut stats = Stats::new(WorldSize::new(2).unwrap());
        stats.record_lane(Lane::Delegated, &counts);
        let operations: Vec<u64> = stats
            .ranks
            .iter()
            .map(|rank| rank.count.operations)
            .collect();
        assert_eq!(operations, [3, 2]);
        assert_eq!(stats.ranks[1].count.bytes, u64::MAX);
        let late = stats.ranks[0].lateness.quantiles();
        assert!(
            late.count == 3 && (2.5..3.5).contains(&late.p50),
            "{late:?}"
        );
        assert_eq!(stats.skew.quantiles().count, 3);
    }
}
