//! The atomics of the lanes, behind a trait: the code that runs between processes is the code that the model checker
//! runs between threads.
//!
//! Owns [`Platform`] and its real implementation, [`Machine`]. Called by [`protocol`](super::protocol). Refuses to know
//! what a word means.

use crate::window::{futex_wait, futex_wake};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// One atomic word.
pub trait Word<V> {
    /// As of the standard atomics.
    fn load(&self, order: Ordering) -> V;
    /// As of the standard atomics.
    fn store(&self, value: V, order: Ordering);
    /// As of the standard atomics; a failure loads with Acquire.
    ///
    /// # Errors
    /// The value found, if it is not `current`.
    fn compare_exchange(&self, current: V, new: V, order: Ordering) -> Result<V, V>;
}

/// Where words live, and how one sleeps on them.
pub trait Platform {
    /// A word of 32 bits.
    type U32: Word<u32>;
    /// A word of 64 bits.
    type U64: Word<u64>;

    /// As of the standard atomics.
    fn fence(order: Ordering);
    /// Sleeps while `word` holds `expected`; may return early for no reason.
    fn sleep(word: &Self::U32, expected: u32, at_most: Duration);
    /// Wakes everybody who sleeps on `word`.
    fn wake(word: &Self::U32);
}

/// Memory that processes share, and futexes.
#[derive(Debug, Clone, Copy)]
pub enum Machine {}

macro_rules! word {
    ($atomic:ty, $value:ty) => {
        impl Word<$value> for $atomic {
            fn load(&self, order: Ordering) -> $value {
                Self::load(self, order)
            }

            fn store(&self, value: $value, order: Ordering) {
                Self::store(self, value, order);
            }

            fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                order: Ordering,
            ) -> Result<$value, $value> {
                Self::compare_exchange(self, current, new, order, Ordering::Acquire)
            }
        }
    };
}

word!(AtomicU32, u32);
word!(AtomicU64, u64);

impl Platform for Machine {
    type U32 = AtomicU32;
    type U64 = AtomicU64;

    fn fence(order: Ordering) {
        fence(order);
    }

    fn sleep(word: &AtomicU32, expected: u32, at_most: Duration) {
        futex_wait(word, expected, at_most);
    }

    fn wake(word: &AtomicU32) {
        futex_wake(word);
    }
}
