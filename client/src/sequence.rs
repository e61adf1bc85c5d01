//! Sequence numbers, and which of their calls were answered.
//!
//! Owns the backpressure: a rank is at most `max_in_flight` calls ahead of its oldest unanswered one, which
//! is as far as the executor lets it be. The communicator takes a number for each reduction. Refuses to look
//! at the window: on backend cuda its done word lags behind the answers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The numbers of one epoch.
#[derive(Debug)]
pub(crate) struct Sequences {
    max_in_flight: u64,
    state: Mutex<State>,
    answered: Notify,
    /// Who takes the next number. It is fair: numbers go in the order of the calls' first poll, also when
    /// they have to wait.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    next: u64,
    /// Every number up to this one was answered.
    floor: u64,
    /// Answered numbers above `floor` + 1.
    beyond: BTreeSet<u64>,
}

impl State {
    #[cfg(test)]
    fn is_answered(&self, sequence: u64) -> bool {
        sequence <= self.floor || self.beyond.contains(&sequence)
    }
}

/// A number that is taken; dropping it says that its call was answered.
#[derive(Debug)]
pub(crate) struct Ticket {
    sequence: u64,
    sequences: Arc<Sequences>,
}

impl Ticket {
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.sequences.set_answered(self.sequence);
    }
}

impl Sequences {
    pub(crate) fn new(max_in_flight: u32) -> Arc<Self> {
        Arc::new(Self {
            max_in_flight: u64::from(max_in_flight).max(1),
            state: Mutex::new(State {
                next: 1,
                floor: 0,
                beyond: BTreeSet::new(),
            }),
            answered: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step below panics half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last number taken; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.state().next - 1
    }

    fn try_take(self: &Arc<Self>) -> Option<Ticket> {
        let mut state = self.state();
        if state.next > state.floor.saturating_add(self.max_in_flight) {
            return None;
        }
        let sequence = state.next;
        state.next += 1;
        Some(Ticket {
            sequence,
            sequences: Arc::clone(self),
        })
    }

    fn set_answered(&self, sequence: u64) {
        let mut guard = self.state();
        let state = &mut *guard;
        // In order, as they mostly are, without the set.
        if sequence == state.floor + 1 {
            state.floor = sequence;
        } else {
            state.beyond.insert(sequence);
        }
        while !state.beyond.is_empty() && state.beyond.remove(&(state.floor + 1)) {
            state.floor += 1;
        }
        drop(guard);
        self.answered.notify_waiters();
    }

    /// The next number, if it can be had at once and nobody waits for one.
    pub(crate) fn take_now(self: &Arc<Self>) -> Option<Ticket> {
        let _turn = self.turn.try_lock().ok()?;
        self.try_take()
    }

    /// The next number, once the executor takes it. Nothing is awaited after it is taken, so that a dropped
    /// future leaves no gap.
    pub(crate) async fn take(self: &Arc<Self>) -> Ticket {
        let _turn = self.turn.lock().await;
        loop {
            // Made before looking: an answer after that wakes it, polled or not.
            let answered = self.answered.notified();
            if let Some(ticket) = self.try_take() {
                return ticket;
            }
            answered.await;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    proptest! {
        /// Against the definition: the number is free if it is at most max_in_flight - 1 above the oldest
        /// that is unanswered.
        #[test]
        fn numbers_have_no_gap_and_stay_within_the_limit(
            max_in_flight in 0_u32..5,
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 0..64),
        ) {
            let sequences = Sequences::new(max_in_flight);
            let limit = u64::from(max_in_flight.max(1));
            let mut in_flight: Vec<Ticket> = Vec::new();
            let mut next = 1;
            for (is_take, which) in steps {
                if is_take {
                    let oldest = in_flight.iter().map(Ticket::sequence).min().unwrap_or(next);
                    let ticket = sequences.try_take();
                    prop_assert_eq!(ticket.is_some(), next < oldest + limit);
                    if let Some(ticket) = ticket {
                        prop_assert_eq!(ticket.sequence(), next);
                        next += 1;
                        in_flight.push(ticket);
                    }
                } else if !in_flight.is_empty() {
                    let index = which.index(in_flight.len());
                    drop(in_flight.swap_remove(index));
                }
                prop_assert_eq!(sequences.last(), next - 1);
                for sequence in 0..next {
                    let is_open = in_flight.iter().any(|ticket| ticket.sequence() == sequence);
                    prop_assert_eq!(sequences.state().is_answered(sequence), !is_open);
                }
            }
        }
    }

    #[tokio::test]
    async fn who_waits_is_woken_and_who_gives_up_leaves_no_gap() {
        let sequences = Sequences::new(1);
        let first = sequences.take().await;
        // A future that is dropped while it waits.
        let gave_up = tokio::time::timeout(Duration::from_millis(1), sequences.take()).await;
        assert!(gave_up.is_err());
        let waiter = tokio::spawn({
            let sequences = Arc::clone(&sequences);
            async move { sequences.take().await.sequence() }
        });
        tokio::task::yield_now().await;
        drop(first);
        let second = tokio::time::timeout(Duration::from_secs(60), waiter).await;
        assert_eq!(second.unwrap().unwrap(), 2);
    }
}
