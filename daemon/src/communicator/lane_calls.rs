//! What ranks reduce themselves on GPUs (lanes `delegated` and `resident` of backend cuda), where no host sees a call.
//!
//! Owns the counts: calls by the device's own numbers, which the executor reads now and then, and what clients tell of their
//! rings. The executor's task feeds it, Admin shows it. Refuses to read memory (the backend does), and to trust: whatever
//! ranks write or tell, counts only grow.

use allreduce_contract::v1::RingCounts;
use allreduce_contract::{Rank, WorldSize};
use std::collections::{BTreeMap, HashMap};

/// Calls of one epoch.
#[derive(Debug, Clone)]
struct EpochCalls {
    /// By rank: calls that were no reductions of the worker's, but tried the lane.
    tried: Vec<u64>,
    /// By rank: the newest that is known to have begun, counted from 1 in the epoch, without the device's wrap.
    newest: Vec<u64>,
    /// Whether the last look at it is under way.
    is_ending: bool,
}

impl EpochCalls {
    fn counts(&self) -> impl Iterator<Item = u64> + '_ {
        let both = self.newest.iter().zip(&self.tried);
        both.map(|(newest, tried)| newest.saturating_sub(*tried))
    }
}

/// The counts, since the executor's start.
#[derive(Debug, Clone)]
pub(crate) struct LaneCalls {
    /// Of epochs that are settled: by rank, and those that every rank began.
    ranks: Vec<u64>,
    all: u64,
    /// Epochs that are not, by number.
    epochs: BTreeMap<u64, EpochCalls>,
    /// By rank: what clients have told.
    rings: Vec<RingCounts>,
    /// By session: what of that it has told.
    told: HashMap<u64, RingCounts>,
}

impl LaneCalls {
    pub(crate) fn new(world_size: WorldSize) -> Self {
        Self {
            ranks: vec![0; world_size.as_usize()],
            all: 0,
            epochs: BTreeMap::new(),
            rings: vec![RingCounts::default(); world_size.as_usize()],
            told: HashMap::new(),
        }
    }

    /// An epoch begins in which ranks reduce themselves. `tried`, in rank order: calls that each has made already.
    pub(crate) fn begin(&mut self, epoch: u64, tried: Vec<u64>) {
        let calls = EpochCalls {
            newest: tried.clone(),
            tried,
            is_ending: false,
        };
        self.epochs.insert(epoch, calls);
    }

    /// Whether there is something to be read of an epoch.
    pub(crate) fn is_open(&self, epoch: u64) -> bool {
        self.epochs
            .get(&epoch)
            .is_some_and(|calls| !calls.is_ending)
    }

    /// The epoch is over; whether it is still to be read, for the last time, and then [`Self::settle`]d.
    pub(crate) fn end(&mut self, epoch: u64) -> bool {
        let open = self.epochs.get_mut(&epoch);
        open.is_some_and(|calls| !std::mem::replace(&mut calls.is_ending, true))
    }

    /// The numbers of the ranks' newest calls, modulo 2^32, as the GPU has them. To be read before they have gone on by
    /// 2^31.
    pub(crate) fn read(&mut self, epoch: u64, numbers: &[u32]) {
        let Some(calls) = self.epochs.get_mut(&epoch) else {
            return;
        };
        for (newest, number) in calls.newest.iter_mut().zip(numbers) {
            let ahead = number.wrapping_sub(*newest as u32) as i32;
            *newest = newest.saturating_add(u64::try_from(ahead).unwrap_or(0));
        }
    }

    /// Nothing more is to be learned of an epoch.
    pub(crate) fn settle(&mut self, epoch: u64) {
        let Some(calls) = self.epochs.remove(&epoch) else {
            return;
        };
        self.all = self.all.saturating_add(calls.counts().min().unwrap_or(0));
        for (sum, count) in self.ranks.iter_mut().zip(calls.counts()) {
            *sum = sum.saturating_add(count);
        }
    }

    /// What a rank has counted since it joined.
    pub(crate) fn tell_rings(&mut self, session: u64, rank: Rank, counts: RingCounts) {
        let before = self.told.entry(session).or_default();
        if let Some(sum) = self.rings.get_mut(rank.as_usize()) {
            let calls = counts.calls.saturating_sub(before.calls);
            let staged = counts.staged.saturating_sub(before.staged);
            sum.calls = sum.calls.saturating_add(calls);
            // Told by a client, which may say anything.
            sum.staged = sum.staged.saturating_add(staged).min(sum.calls);
        }
        before.calls = before.calls.max(counts.calls);
        before.staged = before.staged.max(counts.staged);
    }

    /// The session is gone.
    pub(crate) fn forget(&mut self, session: u64) {
        self.told.remove(&session);
    }

    /// Calls that every rank has begun.
    pub(crate) fn of_all(&self) -> u64 {
        let open = self.epochs.values();
        let open = open.map(|calls| calls.counts().min().unwrap_or(0));
        open.fold(self.all, u64::saturating_add)
    }

    /// Calls that a rank has begun.
    pub(crate) fn of(&self, rank: Rank) -> u64 {
        let settled = self.ranks.get(rank.as_usize()).copied().unwrap_or(0);
        let open = self.epochs.values();
        let open = open.filter_map(|calls| calls.counts().nth(rank.as_usize()));
        open.fold(settled, u64::saturating_add)
    }

    /// What a rank has enqueued or captured on lane `resident`.
    pub(crate) fn rings(&self, rank: Rank) -> RingCounts {
        self.rings.get(rank.as_usize()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    fn two() -> (LaneCalls, Vec<Rank>) {
        let world_size = WorldSize::new(2).unwrap();
        (LaneCalls::new(world_size), world_size.ranks().collect())
    }

    #[test]
    fn epochs_add_up_without_what_tried_the_lane() {
        let (mut calls, ranks) = two();
        calls.begin(7, vec![5, 5]);
        assert_eq!((calls.of(ranks[0]), calls.of_all()), (0, 0));
        calls.read(7, &[105, 104]);
        assert_eq!((calls.of(ranks[0]), calls.of(ranks[1])), (100, 99));
        assert_eq!(calls.of_all(), 99);
        assert!(calls.is_open(7) && calls.end(7));
        assert!(!calls.is_open(7) && !calls.end(7), "it is read once more");
        // The next forms before the last look at this one has come back.
        calls.begin(8, vec![65, 65]);
        calls.read(8, &[66, 66]);
        calls.read(7, &[106, 106]);
        assert_eq!(calls.of_all(), 102);
        calls.settle(7);
        assert_eq!((calls.of(ranks[0]), calls.of_all()), (102, 102));
        // Nothing is counted twice.
        calls.settle(7);
        calls.read(7, &[1000, 1000]);
        assert_eq!((calls.of(ranks[1]), calls.of_all()), (102, 102));
    }

    #[test]
    fn what_cannot_be_read_stays_as_it_was() {
        let (mut calls, ranks) = two();
        calls.begin(1, vec![0, 0]);
        calls.read(1, &[10, 10]);
        calls.settle(1);
        assert_eq!((calls.of(ranks[0]), calls.of_all()), (10, 10));
        assert!(!calls.is_open(2) && !calls.end(2));
    }

    #[test]
    fn the_devices_numbers_wrap_and_the_counts_do_not() {
        let (mut calls, ranks) = two();
        calls.begin(1, vec![1, 0]);
        for number in [1_u64 << 30, 2 << 30, 3 << 30, (1 << 32) + 9] {
            calls.read(1, &[number as u32 - 1, 3]);
        }
        assert_eq!(calls.of(ranks[0]), (1 << 32) + 7);
        assert_eq!(calls.of(ranks[1]), 3);
        // Whatever a rank has written into its peers' windows.
        calls.read(1, &[0, 0x8000_0004]);
        assert_eq!(calls.of(ranks[0]), (1 << 32) + 7);
        assert_eq!(calls.of(ranks[1]), 3);
    }

    #[test]
    fn rings_add_up_over_sessions() {
        let (mut calls, ranks) = two();
        let told = |calls, staged| RingCounts { calls, staged };
        calls.tell_rings(1, ranks[1], told(10, 3));
        calls.tell_rings(1, ranks[1], told(12, 3));
        calls.forget(1);
        calls.tell_rings(2, ranks[1], told(5, 5));
        assert_eq!(calls.rings(ranks[1]), told(17, 8));
        assert_eq!(calls.rings(ranks[0]), told(0, 0));
        // A client that says anything.
        calls.tell_rings(2, ranks[1], told(1, 2));
        calls.tell_rings(2, ranks[1], told(6, u64::MAX));
        assert_eq!(calls.rings(ranks[1]), told(18, 18));
    }
}
