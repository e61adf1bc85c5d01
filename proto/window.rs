//! The layout of a window, the memory a rank shares with its executor.
//!
//! A window is two memories: the control page (signal words) and the arena (buffers). This module owns
//! the control page: its layout, and each signal word's memory order. The executor and the client call
//! it on their mappings of the same page. Refuses to interpret the arena: that is bytes.
//!
//! | word | written by | read by | meaning |
//! | --- | --- | --- | --- |
//! | `ready` | rank | executor | the highest sequence whose source the rank has finished writing |
//! | `done` | executor | rank | the executor touches no buffer of a sequence up to this one any more |
//! | `ended` | executor | rank | 0, or 1 once the epoch is over and the executor touches no buffer at all |
//! | `changes` | executor | rank | counts stores to `done` and `ended`; the futex that waiters sleep on |
//! | `wake` | GPU | executor | lane `resident`: the launch of the resident kernel that the rank's rings need |
//! | `status` | GPU, executor | rank, executor | 0, or the [`Abort`] that a reduction of this rank failed with |
//!
//! # Flags
//!
//! On backend cuda the arena is GPU memory, and behind it, at its length, are [`FLAGS_LEN_BYTES`] of flags, zero at
//! first: for each stream that the rank counts, a ready and a done word of 32 bits, at [`ready_flag`] and
//! [`done_flag`]. They order streams of two processes: written and waited for by the streams themselves
//! (stream memory operations, cuStreamBatchMemOp; "at least", compared modulo 2^32).
//!
//! | flag | written by | waited for by | meaning |
//! | --- | --- | --- | --- |
//! | ready | the rank's stream | the executor's | the stream has got to its call of this value |
//! | done | the executor's stream | the rank's | the executor is through with the call of this value |
//!
//! Whoever has the memory mapped can let a waiting stream go, which no CUDA event allows: the executor writes
//! ready flags when an epoch ends, the client writes done flags when its executor is gone.
//!
//! The executor never trusts the page: a rank can scribble over its own. What it reads there (`ready`)
//! it compares with what the rank announced by RPC; from `status` it learns that a kernel gave up, and a rank that
//! writes there ends its own communicator's epoch.
#![allow(unsafe_code)] // room: shared memory

use crate::memory::{Mapping, MemoryError, SealedMemory};
use std::mem::{offset_of, size_of};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Version of everything in this module, in [`crate::lane`] and in [`crate::companion`]. Hello carries the client's; the
/// executor refuses another.
pub const ABI_VERSION: u32 = 4;

/// Length of the control page, bytes.
pub const CONTROL_LEN_BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// Alignment of each buffer in the arena, bytes.
pub const BUFFER_ALIGN_BYTES: u64 = 256;

/// First word of a control page: "ARW1", little endian.
const MAGIC: u32 = 0x3157_5241;

#[repr(C, align(64))]
struct Line<T>(T);

#[repr(C)]
struct ControlPage {
    magic: AtomicU32,
    abi: AtomicU32,
    rank: AtomicU32,
    world_size: AtomicU32,
    epoch: AtomicU64,
    ready: Line<AtomicU64>,
    done: Line<AtomicU64>,
    ended: AtomicU32,
    changes: AtomicU32,
    status: Line<AtomicU64>,
    wake: Line<AtomicU32>,
}

const _: () = {
    assert!(offset_of!(ControlPage, magic) == 0);
    assert!(offset_of!(ControlPage, abi) == 4);
    assert!(offset_of!(ControlPage, rank) == 8);
    assert!(offset_of!(ControlPage, world_size) == 12);
    assert!(offset_of!(ControlPage, epoch) == 16);
    assert!(offset_of!(ControlPage, ready) == 64);
    assert!(offset_of!(ControlPage, done) == 128);
    assert!(offset_of!(ControlPage, ended) == 192);
    assert!(offset_of!(ControlPage, changes) == 196);
    assert!(offset_of!(ControlPage, status) == STATUS_OFFSET_BYTES);
    assert!(offset_of!(ControlPage, wake) == WAKE_OFFSET_BYTES);
    assert!(size_of::<ControlPage>() <= CONTROL_LEN_BYTES.get());
};

/// Where the status word is in the control page; the executor registers the page with CUDA, so that kernels
/// can store there.
pub const STATUS_OFFSET_BYTES: usize = 256;

/// Where the wake word is in the control page: the launch of the resident kernel that a rank's rings need.
pub const WAKE_OFFSET_BYTES: usize = 320;

/// Why a reduction failed on the GPU: the status word, and the abort word that the kernels pass on
/// (kernels/cuda/abi.h, `abort_word`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abort {
    /// What went wrong.
    pub reason: AbortReason,
    /// The rank that was missing or at fault.
    pub rank: u32,
    /// The epoch, modulo 2^24.
    pub epoch: u32,
    /// The kernel's count of reductions in the epoch.
    pub sequence: u32,
}

/// Reasons of an [`Abort`]. The values are those of abi.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortReason {
    /// The deadline passed while waiting for the rank.
    Timeout,
    /// The rank ran another reduction.
    Mismatch,
    /// The rank was ahead by a whole call.
    Sequence,
    /// The rank's launch was outside the limits of its window.
    BadCall,
    /// The executor ended the epoch: the rank left, died or was evicted.
    Host,
    /// The rank began calls while others of its own were under way: two graphs at once, or a call beside a graph.
    Overlap,
    /// A value this version does not know.
    Unknown(u8),
}

impl AbortReason {
    const fn code(self) -> u8 {
        match self {
            AbortReason::Timeout => 1,
            AbortReason::Mismatch => 2,
            AbortReason::Sequence => 3,
            AbortReason::BadCall => 4,
            AbortReason::Host => 5,
            AbortReason::Overlap => 6,
            AbortReason::Unknown(code) => code & 15,
        }
    }
}

impl Abort {
    /// Reads a status word; none if it is 0.
    pub const fn from_word(word: u64) -> Option<Self> {
        if word == 0 {
            return None;
        }
        let reason = match (word >> 60) as u8 {
            1 => AbortReason::Timeout,
            2 => AbortReason::Mismatch,
            3 => AbortReason::Sequence,
            4 => AbortReason::BadCall,
            5 => AbortReason::Host,
            6 => AbortReason::Overlap,
            code => AbortReason::Unknown(code),
        };
        Some(Self {
            reason,
            rank: (word >> 56) as u32 & 15,
            epoch: (word >> 32) as u32 & 0xff_ffff,
            sequence: word as u32,
        })
    }

    /// The word.
    pub const fn to_word(self) -> u64 {
        self.sequence as u64
            | ((self.epoch & 0xff_ffff) as u64) << 32
            | ((self.rank & 15) as u64) << 56
            | (self.reason.code() as u64) << 60
    }
}

impl std::fmt::Display for Abort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, sequence, .. } = self;
        write!(f, "reduction {sequence} failed on the GPU: ")?;
        match self.reason {
            AbortReason::Timeout => write!(f, "rank {rank} did not arrive in time"),
            AbortReason::Mismatch => write!(f, "rank {rank} ran another reduction"),
            AbortReason::Sequence => write!(f, "rank {rank} was ahead by a whole call"),
            AbortReason::BadCall => write!(
                f,
                "the launch of rank {rank} was outside its window's limits"
            ),
            AbortReason::Host => write!(f, "the executor ended the epoch, because of rank {rank}"),
            AbortReason::Overlap => write!(
                f,
                "rank {rank} began reductions on one stream while others of its own were under way on another: graphs of one communicator must not run at the same time, nor one beside other calls"
            ),
            AbortReason::Unknown(code) => write!(f, "reason {code}, rank {rank}"),
        }
    }
}

/// Streams of a rank that can have flags.
pub const MAX_STREAMS: u32 = 64;

/// Length of the flags behind a GPU arena.
pub const FLAGS_LEN_BYTES: u64 = 64 * MAX_STREAMS as u64;

/// Offset in the flags of a stream's ready word; `stream` counts from 0, below [`MAX_STREAMS`].
pub const fn ready_flag(stream: u32) -> u64 {
    64 * stream as u64
}

/// Offset in the flags of a stream's done word.
pub const fn done_flag(stream: u32) -> u64 {
    ready_flag(stream) + 32
}

/// Whether a flag that holds `found` lets through who waits for `value`: modulo 2^32.
pub const fn flag_reached(found: u32, value: u32) -> bool {
    (found.wrapping_sub(value) as i32) >= 0
}

/// A mapped control page.
#[derive(Debug)]
pub struct Control {
    mapping: Mapping,
}

/// The mapped page is not a control page of this version.
#[derive(Debug, thiserror::Error)]
pub enum BadControl {
    /// It is shorter than a control page.
    #[error("the control region has {0} bytes, {CONTROL_LEN_BYTES} are needed")]
    Short(usize),
    /// Its magic or version differs.
    #[error(
        "the control region says magic {magic:#x} version {abi}; expected {MAGIC:#x} version {ABI_VERSION}"
    )]
    Version {
        /// The magic found.
        magic: u32,
        /// The version found.
        abi: u32,
    },
    /// Memory failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A year: longer timeouts mean "for ever", and would overflow a clock.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// How a wait for a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The executor is done with the sequence.
    Done,
    /// The epoch is over; the executor is done with every sequence.
    Ended,
    /// The deadline passed first.
    Deadline,
}

impl Control {
    /// Executor: creates and fills a control page.
    ///
    /// # Errors
    /// Those of [`SealedMemory::create`] and [`SealedMemory::map`].
    pub fn create(
        rank: crate::Rank,
        world_size: crate::WorldSize,
    ) -> Result<(Self, SealedMemory), MemoryError> {
        let memory = SealedMemory::create(c"allreduced-control", CONTROL_LEN_BYTES)?;
        let control = Self {
            mapping: memory.map()?,
        };
        let page = control.page();
        // Relaxed: the descriptor is passed on, and the page mapped, only after these stores.
        page.magic.store(MAGIC, Ordering::Relaxed);
        page.abi.store(ABI_VERSION, Ordering::Relaxed);
        page.rank.store(rank.get(), Ordering::Relaxed);
        page.world_size.store(world_size.get(), Ordering::Relaxed);
        Ok((control, memory))
    }

    /// Executor: the epoch that the rank is taken into, known only when the window is made.
    pub fn set_epoch(&self, epoch: u64) {
        // Relaxed: the descriptor is passed on, and the page mapped, only after this store.
        self.page().epoch.store(epoch, Ordering::Relaxed);
    }

    /// Client: maps and checks a control page.
    ///
    /// # Errors
    /// [`BadControl`] if it is not one.
    pub fn open(memory: &SealedMemory) -> Result<Self, BadControl> {
        let mapping = memory.map()?;
        if mapping.len_bytes() < CONTROL_LEN_BYTES.get() {
            return Err(BadControl::Short(mapping.len_bytes()));
        }
        let control = Self { mapping };
        let magic = control.page().magic.load(Ordering::Relaxed);
        let abi = control.page().abi.load(Ordering::Relaxed);
        if magic == MAGIC && abi == ABI_VERSION {
            Ok(control)
        } else {
            Err(BadControl::Version { magic, abi })
        }
    }

    fn page(&self) -> &ControlPage {
        // SAFETY: the mapping is page-aligned, at least CONTROL_LEN_BYTES long (both constructors see
        // to it) and lives as long as self. Every field is an atomic and every bit pattern is valid
        // for it, so other processes may write it while the reference lives.
        unsafe { self.mapping.start().cast::<ControlPage>().as_ref() }
    }

    /// Rank: announces that the source of every sequence up to `sequence` is written.
    pub fn set_ready(&self, sequence: u64) {
        // fetch_max: calls may be issued from several threads, and an older announcement must not
        // hide a newer one.
        // SYNC: ready. Release: what the rank wrote to its source before is visible to who acquires.
        self.page().ready.0.fetch_max(sequence, Ordering::Release);
    }

    /// Executor: whether the rank has announced `sequence`.
    pub fn is_ready(&self, sequence: u64) -> bool {
        // SYNC: ready. Acquire: pairs with the rank's release in set_ready.
        self.page().ready.0.load(Ordering::Acquire) >= sequence
    }

    /// Executor: it touches no buffer of a sequence up to `sequence` any more. Wakes waiters.
    pub fn set_done(&self, sequence: u64) {
        // SYNC: done. Release: the results written before are visible to who acquires.
        self.page().done.0.store(sequence, Ordering::Release);
        self.wake();
    }

    /// Executor: the epoch is over, it touches no buffer of this window any more. Wakes waiters.
    pub fn set_ended(&self) {
        // SYNC: ended. Release, as for done.
        self.page().ended.store(1, Ordering::Release);
        self.wake();
    }

    /// Executor: the page's address, to be registered with CUDA. It stays mapped as long as self.
    pub fn page_start(&self) -> std::ptr::NonNull<u8> {
        self.mapping.start()
    }

    /// Why a reduction of this rank failed on the GPU, if one did.
    pub fn status(&self) -> Option<Abort> {
        // SYNC: status. Acquire: pairs with the kernel's system-wide store, or set_status.
        Abort::from_word(self.page().status.0.load(Ordering::Acquire))
    }

    /// Executor: the launch of the resident kernel that the rank's rings need.
    pub fn wanted_launch(&self) -> u32 {
        // SYNC: wake. Acquire: pairs with the ringing kernel's store.
        self.page().wake.0.load(Ordering::Acquire)
    }

    /// Executor: says why, unless a kernel has said so before.
    pub fn set_status(&self, abort: Abort) {
        // SYNC: status. Release: pairs with status().
        let _ = self.page().status.0.compare_exchange(
            0,
            abort.to_word(),
            Ordering::Release,
            Ordering::Relaxed,
        );
    }

    fn wake(&self) {
        // SYNC: changes. Release: who sees the new count sees the store that it announces.
        self.page().changes.fetch_add(1, Ordering::Release);
        futex_wake(&self.page().changes);
    }

    /// Rank: whether the executor is done with `sequence`.
    pub fn settled(&self, sequence: u64) -> Option<Settled> {
        let page = self.page();
        // SYNC: done. Acquire: pairs with set_done; the results are visible.
        if page.done.0.load(Ordering::Acquire) >= sequence {
            return Some(Settled::Done);
        }
        // SYNC: ended. Acquire: pairs with set_ended.
        (page.ended.load(Ordering::Acquire) != 0).then_some(Settled::Ended)
    }

    /// Rank: sleeps until the executor is done with `sequence`, at most for `timeout`.
    pub fn wait_settled(&self, sequence: u64, timeout: Duration) -> Settled {
        let deadline = Instant::now() + timeout.min(LONGEST_WAIT);
        loop {
            // SYNC: changes. Acquire, and before looking: a store after this load changes the count,
            // and the futex then refuses to sleep, so no wake-up is lost.
            let seen = self.page().changes.load(Ordering::Acquire);
            if let Some(settled) = self.settled(sequence) {
                return settled;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Settled::Deadline;
            }
            futex_wait(&self.page().changes, seen, left);
        }
    }
}

/// Sleeps while `word` holds `expected`, at most for `timeout`; may return early for no reason.
/// See futex(2); not the private kind, since the waker is another process.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    // The result says why it returned; the caller looks at the words again whatever it was.
    // SAFETY: word and timeout are live for the call and of the types FUTEX_WAIT takes.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const timeout,
        );
    }
}

/// Wakes every process that sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: word is live for the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::WorldSize;

    fn pair() -> (Control, Control) {
        let world_size = WorldSize::new(2).unwrap();
        let rank = world_size.rank(1).unwrap();
        let (executor, memory) = Control::create(rank, world_size).unwrap();
        (executor, Control::open(&memory).unwrap())
    }

    #[test]
    fn ready_and_done_cross_the_page() {
        let (executor, rank) = pair();
        assert!(!executor.is_ready(1));
        rank.set_ready(2);
        rank.set_ready(1);
        assert!(executor.is_ready(2) && !executor.is_ready(3));
        assert_eq!(rank.settled(1), None);
        executor.set_done(1);
        assert_eq!(rank.settled(1), Some(Settled::Done));
        executor.set_ended();
        assert_eq!(rank.settled(2), Some(Settled::Ended));
    }

    #[test]
    fn a_waiter_is_woken_and_a_deadline_ends_the_wait() {
        let (executor, rank) = pair();
        assert_eq!(
            rank.wait_settled(1, Duration::from_millis(1)),
            Settled::Deadline
        );
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| rank.wait_settled(3, Duration::from_secs(60)));
            for sequence in 1..=3 {
                executor.set_done(sequence);
            }
            assert_eq!(waiter.join().unwrap(), Settled::Done);
        });
    }

    #[test]
    fn flags_are_compared_modulo_2_to_the_32() {
        assert!(flag_reached(5, 5) && flag_reached(6, 5) && !flag_reached(4, 5));
        assert!(flag_reached(1, u32::MAX) && !flag_reached(u32::MAX, 1));
        assert!(done_flag(MAX_STREAMS - 1) + 4 <= FLAGS_LEN_BYTES);
    }

    #[test]
    fn the_first_reason_stays() {
        let (executor, rank) = pair();
        assert_eq!(rank.status(), None);
        let abort = |reason, rank| Abort {
            reason,
            rank,
            epoch: 0xab_cdef,
            sequence: u32::MAX - 1,
        };
        for reason in [
            AbortReason::Timeout,
            AbortReason::Mismatch,
            AbortReason::Sequence,
            AbortReason::BadCall,
            AbortReason::Host,
            AbortReason::Overlap,
            AbortReason::Unknown(15),
        ] {
            let abort = abort(reason, 15);
            assert_eq!(Abort::from_word(abort.to_word()), Some(abort));
        }
        executor.set_status(abort(AbortReason::Timeout, 3));
        executor.set_status(abort(AbortReason::Host, 1));
        assert_eq!(rank.status(), Some(abort(AbortReason::Timeout, 3)));
    }

    #[test]
    fn a_foreign_page_is_refused() {
        let memory = SealedMemory::create(c"test", CONTROL_LEN_BYTES).unwrap();
        assert!(matches!(
            Control::open(&memory),
            Err(BadControl::Version { magic: 0, abi: 0 })
        ));
    }
}
