//! The memory that the host lanes share, and what the words in it say.
//!
//! Owns the layout of three kinds of memory, [`Call`], [`Abort`] and the [`Geometry`] that every rank obeys. The executor
//! makes the memories; ranks map them when they are told to share. Called by the client's and the executor's lanes.
//! Refuses to reduce, and to trust: whatever is read here is checked by who uses it.
//!
//! | memory | of | mapped by | what |
//! | --- | --- | --- | --- |
//! | board | the epoch | executor and ranks, to write | abort and failed words, bells |
//! | lane | a rank | executor and the rank, to write; peers, to read | its words, its counts, its staging |
//! | arena | a rank | executor and the rank, to write; peers, to read | its tensors (`window`) |
//!
//! A lane begins with a page of words, a page of counts, and the two halves of the staging. What the words mean and in
//! which order they are stored is in [`protocol`].
//!
//! A rank that scribbles over its lane or the board ends its own epoch, or makes its own tensor's sum wrong; it makes
//! nobody read or write outside of a mapping. Descriptors for peers are opened read-only, which keeps a mistake from
//! writing a peer's memory; it is no wall between processes of one user.
#![allow(unsafe_code)] // room: shared memory

pub mod counts;
#[cfg(test)]
mod model;
pub mod protocol;
pub mod words;

use crate::memory::{Mapping, MemoryError, ReadOnlyMapping, SealedMemory};
use crate::v1;
use crate::{Algorithm, Dtype, Op, Rank, WorldSize};
use protocol::{BoardWords, Entry, Patience, RankWords, Step};
use std::mem::{offset_of, size_of};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use words::Machine;

/// "ARL1", little endian: first word of a board and of a lane.
const MAGIC: u32 = 0x314c_5241;

const PAGE: usize = 4096;

/// Length of a board.
pub const BOARD_LEN_BYTES: NonZeroUsize = NonZeroUsize::new(PAGE).unwrap();

/// Where a lane's counts begin.
const COUNTS_OFFSET_BYTES: usize = PAGE;

/// Where a lane's staging begins.
const STAGING_OFFSET_BYTES: usize = 2 * PAGE;

/// Marks a tensor that is not in its rank's arena.
pub const NOT_IN_ARENA: u64 = u64::MAX;

#[repr(C, align(64))]
struct Header {
    magic: AtomicU32,
    abi: AtomicU32,
    rank: AtomicU32,
    world_size: AtomicU32,
    epoch: AtomicU64,
}

#[repr(C)]
struct BoardPage {
    header: Header,
    words: BoardWords<Machine>,
}

#[repr(C)]
struct LanePage {
    header: Header,
    words: RankWords<Machine>,
}

const _: () = {
    assert!(size_of::<Header>() == 64);
    assert!(offset_of!(BoardPage, words) == 64);
    assert!(offset_of!(BoardWords<Machine>, failed) == 64);
    assert!(offset_of!(BoardWords<Machine>, bells) == 128);
    assert!(offset_of!(BoardWords<Machine>, executor_bell) == 192);
    assert!(size_of::<BoardPage>() <= PAGE);
    assert!(offset_of!(LanePage, words) == 64);
    assert!(offset_of!(RankWords<Machine>, progress) == 128);
    assert!(offset_of!(RankWords<Machine>, reply) == 192);
    assert!(size_of::<protocol::Line<protocol::EntryWords<Machine>>>() == 64);
    assert!(size_of::<LanePage>() <= PAGE);
    assert!(size_of::<counts::CountsPage>() <= PAGE);
};

/// A mapped memory is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum BadLane {
    /// It is shorter than its layout.
    #[error("a lane's memory has {actual} bytes, {needed} are needed")]
    Short {
        /// Bytes it has.
        actual: usize,
        /// Bytes of the layout.
        needed: usize,
    },
    /// Its magic, version, rank, world size or epoch differ.
    #[error("a lane's memory says {found}, expected {expected}")]
    Differs {
        /// What it says.
        found: String,
        /// What it should say.
        expected: String,
    },
    /// Memory failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The rank; 0 on a board.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// The epoch.
    pub epoch: u64,
}

impl Header {
    fn fill(&self, identity: Identity) {
        // Relaxed: the descriptor is passed on, and the page mapped, only after these stores.
        self.magic.store(MAGIC, Ordering::Relaxed);
        self.abi
            .store(crate::window::ABI_VERSION, Ordering::Relaxed);
        self.rank.store(identity.rank, Ordering::Relaxed);
        self.world_size
            .store(identity.world_size, Ordering::Relaxed);
        self.epoch.store(identity.epoch, Ordering::Relaxed);
    }

    fn check(&self, identity: Identity) -> Result<(), BadLane> {
        let text = |magic, abi, identity: Identity| {
            let Identity {
                rank,
                world_size,
                epoch,
            } = identity;
            format!(
                "magic {magic:#x} version {abi} rank {rank} world_size {world_size} epoch {epoch}"
            )
        };
        let found = Identity {
            rank: self.rank.load(Ordering::Relaxed),
            world_size: self.world_size.load(Ordering::Relaxed),
            epoch: self.epoch.load(Ordering::Relaxed),
        };
        let magic = self.magic.load(Ordering::Relaxed);
        let abi = self.abi.load(Ordering::Relaxed);
        if (magic, abi, found) == (MAGIC, crate::window::ABI_VERSION, identity) {
            return Ok(());
        }
        Err(BadLane::Differs {
            found: text(magic, abi, found),
            expected: text(MAGIC, crate::window::ABI_VERSION, identity),
        })
    }
}

fn check_len(actual: usize, needed: usize) -> Result<(), BadLane> {
    match actual < needed {
        true => Err(BadLane::Short { actual, needed }),
        false => Ok(()),
    }
}

/// A mapped board.
#[derive(Debug)]
pub struct Board {
    mapping: Mapping,
}

impl Board {
    /// Executor: makes an epoch's board.
    ///
    /// # Errors
    /// Those of [`SealedMemory::create`] and [`SealedMemory::map`].
    pub fn create(world_size: WorldSize, epoch: u64) -> Result<(Self, SealedMemory), MemoryError> {
        let memory = SealedMemory::create(c"allreduced-board", BOARD_LEN_BYTES)?;
        let board = Self {
            mapping: memory.map()?,
        };
        board.page().header.fill(Identity {
            rank: 0,
            world_size: world_size.get(),
            epoch,
        });
        Ok((board, memory))
    }

    /// Client: maps and checks a board.
    ///
    /// # Errors
    /// [`BadLane`].
    pub fn open(memory: &SealedMemory, world_size: u32, epoch: u64) -> Result<Self, BadLane> {
        let mapping = memory.map()?;
        check_len(mapping.len_bytes(), BOARD_LEN_BYTES.get())?;
        let board = Self { mapping };
        board.page().header.check(Identity {
            rank: 0,
            world_size,
            epoch,
        })?;
        Ok(board)
    }

    fn page(&self) -> &BoardPage {
        // SAFETY: the mapping is page-aligned, at least a page long (both constructors see to it) and lives as long as
        // self. Every field is an atomic for which every bit pattern is valid, so other processes may write it while
        // the reference lives.
        unsafe { self.mapping.start().cast::<BoardPage>().as_ref() }
    }

    /// Its words.
    pub fn words(&self) -> &BoardWords<Machine> {
        &self.page().words
    }
}

/// A rank's lane, as the rank and the executor map it.
#[derive(Debug)]
pub struct Lane {
    mapping: Mapping,
    stage_len_bytes: usize,
}

fn lane_len_bytes(stage_len_bytes: usize) -> Option<usize> {
    stage_len_bytes
        .checked_mul(2)?
        .checked_add(STAGING_OFFSET_BYTES)
}

impl Lane {
    /// Executor: makes a rank's lane, with two halves of staging of `stage_len_bytes`.
    ///
    /// # Errors
    /// Those of [`SealedMemory::create`] and [`SealedMemory::map`].
    pub fn create(
        rank: Rank,
        world_size: WorldSize,
        epoch: u64,
        stage_len_bytes: usize,
    ) -> Result<(Self, SealedMemory), MemoryError> {
        let len_bytes = lane_len_bytes(stage_len_bytes)
            .and_then(NonZeroUsize::new)
            .ok_or(MemoryError::Exhausted {
                needed: stage_len_bytes as u64,
                available: crate::memory::available_bytes(),
            })?;
        let memory = SealedMemory::create(c"allreduced-lane", len_bytes)?;
        let lane = Self {
            mapping: memory.map()?,
            stage_len_bytes,
        };
        lane.page().header.fill(Identity {
            rank: rank.get(),
            world_size: world_size.get(),
            epoch,
        });
        Ok((lane, memory))
    }

    /// Client: maps and checks its own lane.
    ///
    /// # Errors
    /// [`BadLane`].
    pub fn open(
        memory: &SealedMemory,
        identity: Identity,
        stage_len_bytes: usize,
    ) -> Result<Self, BadLane> {
        let mapping = memory.map()?;
        check_len(
            mapping.len_bytes(),
            lane_len_bytes(stage_len_bytes).unwrap_or(usize::MAX),
        )?;
        let lane = Self {
            mapping,
            stage_len_bytes,
        };
        lane.page().header.check(identity)?;
        Ok(lane)
    }

    fn page(&self) -> &LanePage {
        // SAFETY: as for Board::page; constructors see to at least two pages.
        unsafe { self.mapping.start().cast::<LanePage>().as_ref() }
    }

    /// Its words.
    pub fn words(&self) -> &RankWords<Machine> {
        &self.page().words
    }

    /// Its counts.
    pub fn counts(&self) -> &counts::CountsPage {
        // SAFETY: the page of counts lies inside the mapping (constructors), is page-aligned, and is made of atomics.
        unsafe {
            self.mapping
                .start()
                .add(COUNTS_OFFSET_BYTES)
                .cast::<counts::CountsPage>()
                .as_ref()
        }
    }

    /// A half of the staging, for `half` modulo 2.
    pub fn stage(&self, half: u64) -> NonNull<u8> {
        // SAFETY: both halves lie inside the mapping (constructors).
        unsafe {
            self.mapping
                .start()
                .add(stage_offset(half, self.stage_len_bytes))
        }
    }
}

fn stage_offset(half: u64, stage_len_bytes: usize) -> usize {
    match half.is_multiple_of(2) {
        true => STAGING_OFFSET_BYTES,
        false => STAGING_OFFSET_BYTES + stage_len_bytes,
    }
}

/// A rank's lane, as its peers map it.
#[derive(Debug)]
pub struct PeerLane {
    mapping: ReadOnlyMapping,
    stage_len_bytes: usize,
}

impl PeerLane {
    /// Client: maps and checks a peer's lane.
    ///
    /// # Errors
    /// [`BadLane`].
    pub fn open(
        memory: &SealedMemory,
        identity: Identity,
        stage_len_bytes: usize,
    ) -> Result<Self, BadLane> {
        let mapping = memory.map_read_only()?;
        check_len(
            mapping.len_bytes(),
            lane_len_bytes(stage_len_bytes).unwrap_or(usize::MAX),
        )?;
        let lane = Self {
            mapping,
            stage_len_bytes,
        };
        lane.page().header.check(identity)?;
        Ok(lane)
    }

    fn page(&self) -> &LanePage {
        // SAFETY: as for Lane::page. The mapping is read-only: nothing but loads is done through it (RankWords has its
        // stores in methods for the rank and the executor, which have Lane).
        unsafe { self.mapping.start().cast::<LanePage>().as_ref() }
    }

    /// The rank's call of this sequence, once it is published.
    pub fn entry(&self, sequence: u64) -> Option<protocol::Found> {
        self.page().words.entry(sequence)
    }

    /// How far the rank is.
    pub fn progress(&self) -> u64 {
        self.page().words.progress()
    }

    /// A half of the staging, for `half` modulo 2.
    pub fn stage(&self, half: u64) -> *const u8 {
        // SAFETY: both halves lie inside the mapping (open).
        unsafe {
            self.mapping
                .start()
                .as_ptr()
                .cast_const()
                .add(stage_offset(half, self.stage_len_bytes))
        }
    }
}

// Calls.

/// A call: what ranks must agree on, and where each has its tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Which, from 1.
    pub sequence: u64,
    /// What ranks must agree on.
    pub signature: Signature,
    /// Which half of the staging it begins with.
    pub half: u64,
    /// Where the source is in the arena, or [`NOT_IN_ARENA`].
    pub src: u64,
    /// Where the destination is in the arena, or [`NOT_IN_ARENA`].
    pub dst: u64,
    /// Lane resident: the source's buffer; `src` is an offset in it.
    pub src_buffer: u64,
    /// Lane resident: the destination's buffer; `dst` is an offset in it.
    pub dst_buffer: u64,
    /// When the rank called, by [`monotonic_ns`].
    pub arrived_ns: u64,
}

/// What all ranks must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    /// Elements of the tensor.
    pub num_elems: u64,
    /// Their type.
    pub dtype: Dtype,
    /// The operator.
    pub op: Op,
    /// The algorithm asked for, if one is.
    pub algorithm: Option<Algorithm>,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            num_elems,
            dtype,
            op,
            algorithm,
        } = self;
        write!(f, "{num_elems} x {dtype} {op}")?;
        algorithm.map_or(Ok(()), |algorithm| write!(f, " by {algorithm}"))
    }
}

impl Call {
    /// As it is published.
    pub fn to_entry(&self) -> Entry {
        let Signature {
            num_elems,
            dtype,
            op,
            algorithm,
        } = self.signature;
        // Wire enums are small and not negative.
        let byte = |code: i32| u64::from(code.unsigned_abs() & 0xff);
        let kind = byte(v1::Dtype::from(dtype) as i32)
            | byte(v1::Op::from(op) as i32) << 8
            | byte(algorithm.map_or(0, |algorithm| v1::Algorithm::from(algorithm) as i32)) << 16
            | (self.half & 1) << 24;
        Entry {
            sequence: self.sequence,
            num_elems,
            kind,
            src: self.src,
            dst: self.dst,
            src_buffer: self.src_buffer,
            dst_buffer: self.dst_buffer,
            arrived_ns: self.arrived_ns,
        }
    }

    /// What a rank published; none if it is no call.
    pub fn from_entry(entry: &Entry) -> Option<Self> {
        let byte = |shift: u32| i32::from((entry.kind >> shift) as u8);
        if entry.kind >> 25 != 0 {
            return None;
        }
        let algorithm = match byte(16) {
            0 => None,
            code => Some(Algorithm::from_wire(code).ok()?),
        };
        Some(Self {
            sequence: entry.sequence,
            signature: Signature {
                num_elems: entry.num_elems,
                dtype: Dtype::from_wire(byte(0)).ok()?,
                op: Op::from_wire(byte(8)).ok()?,
                algorithm,
            },
            half: entry.kind >> 24 & 1,
            src: entry.src,
            dst: entry.dst,
            src_buffer: entry.src_buffer,
            dst_buffer: entry.dst_buffer,
            arrived_ns: entry.arrived_ns,
        })
    }
}

/// Steps of one call that progress counts, at most; the last says that the rank is through with it.
pub const LAST_STEP: u64 = (1 << 24) - 1;

/// The progress word of a rank that has got to `step` of a call.
pub const fn progress_of(sequence: u64, step: u64) -> u64 {
    sequence << 24 | if step < LAST_STEP { step } else { LAST_STEP }
}

// The end.

/// Why nothing can be reduced on a board any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abort {
    /// What went wrong.
    pub cause: AbortCause,
    /// The ranks it is about, a bit for each.
    pub ranks: u16,
    /// The call it was noticed in, modulo 2^40; 0 if in none.
    pub sequence: u64,
}

/// Causes of an [`Abort`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortCause {
    /// A rank's deadline passed while it waited for these.
    Timeout,
    /// The rank does not keep to the protocol.
    Broken,
    /// The rank gave up a call that it had announced.
    Abandoned,
    /// The executor ended the epoch: the rank left or died, or the executor says more.
    Ended,
    /// The executor is gone.
    ExecutorLost,
    /// The executor could not go on.
    Failed,
    /// A value this version does not know.
    Unknown(u8),
}

impl AbortCause {
    const fn code(self) -> u8 {
        match self {
            AbortCause::Timeout => 1,
            AbortCause::Broken => 2,
            AbortCause::Abandoned => 3,
            AbortCause::Ended => 4,
            AbortCause::ExecutorLost => 5,
            AbortCause::Failed => 6,
            AbortCause::Unknown(code) => code,
        }
    }
}

const SEQUENCE_MASK: u64 = (1 << 40) - 1;

impl Abort {
    /// About one rank, or none.
    pub fn of(cause: AbortCause, rank: Option<u32>, sequence: u64) -> Self {
        Self {
            cause,
            ranks: rank.map_or(0, rank_bit),
            sequence,
        }
    }

    /// Reads an abort word that is not 0.
    pub const fn from_word(word: u64) -> Self {
        let cause = match (word >> 56) as u8 {
            1 => AbortCause::Timeout,
            2 => AbortCause::Broken,
            3 => AbortCause::Abandoned,
            4 => AbortCause::Ended,
            5 => AbortCause::ExecutorLost,
            6 => AbortCause::Failed,
            code => AbortCause::Unknown(code),
        };
        Self {
            cause,
            ranks: (word >> 40) as u16,
            sequence: word & SEQUENCE_MASK,
        }
    }

    /// The word.
    pub const fn to_word(self) -> u64 {
        (self.cause.code() as u64) << 56
            | (self.ranks as u64) << 40
            | (self.sequence & SEQUENCE_MASK)
    }

    /// The ranks it is about, ascending.
    pub fn rank_list(&self) -> Vec<u32> {
        (0..16)
            .filter(|rank| self.ranks & rank_bit(*rank) != 0)
            .collect()
    }
}

/// A rank's bit in [`Abort::ranks`].
pub const fn rank_bit(rank: u32) -> u16 {
    match rank {
        0..16 => 1 << rank,
        _ => 0,
    }
}

impl std::fmt::Display for Abort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list: Vec<String> = self.rank_list().iter().map(u32::to_string).collect();
        let ranks = match list.as_slice() {
            [one] => format!("rank {one}"),
            _ => format!("ranks {}", list.join(", ")),
        };
        let sequence = self.sequence;
        match self.cause {
            AbortCause::Timeout => write!(f, "{ranks} did not get to sequence {sequence} in time"),
            AbortCause::Broken => write!(
                f,
                "{ranks} wrote to the shared memory what no call of sequence {sequence} is"
            ),
            AbortCause::Abandoned => write!(f, "{ranks} gave up sequence {sequence}"),
            AbortCause::Ended if self.ranks == 0 => write!(f, "the executor ended the epoch"),
            AbortCause::Ended => write!(f, "the executor ended the epoch, because of {ranks}"),
            AbortCause::ExecutorLost => write!(f, "the executor is gone"),
            AbortCause::Failed => write!(f, "the executor could not reduce sequence {sequence}"),
            AbortCause::Unknown(code) => write!(f, "reason {code}, {ranks}"),
        }
    }
}

// The plan.

/// What every rank obeys: made by the executor's plan, sent with Peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Tensors up to this many bytes are reduced in one shot.
    pub one_shot_max_bytes: u64,
    /// Two-shot reductions up to this many bytes gather through the stagings, if they fit: a wait less, and a copy of the
    /// slice more.
    pub short_max_bytes: u64,
    /// Bytes of a block of a two-shot reduction.
    pub block_len_bytes: u64,
    /// Bytes of a half of the staging.
    pub stage_len_bytes: u64,
    /// How long a wait looks before it lets others run.
    pub spin: Duration,
    /// How long it lets others run before it sleeps.
    pub yielding: Duration,
}

/// Fewest bytes of a half of the staging, and of a block: the steps of the longest tensor can be counted.
pub const MIN_STAGE_LEN_BYTES: u64 = 64 << 10;

/// Most bytes of a half of the staging.
pub const MAX_STAGE_LEN_BYTES: u64 = 1 << 30;

/// Lane delegated has no such algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("lane delegated reduces by one_shot and two_shot, not by {0}")]
pub struct NotDelegated(pub Algorithm);

impl Geometry {
    /// Whether it can be worked with.
    pub fn is_legal(&self) -> bool {
        let is_length = |bytes: u64| bytes >= MIN_STAGE_LEN_BYTES && bytes.is_multiple_of(4096);
        is_length(self.block_len_bytes)
            && is_length(self.stage_len_bytes)
            && self.stage_len_bytes <= MAX_STAGE_LEN_BYTES
    }

    /// The algorithm of a reduction on lane delegated. The one place that chooses: `plan` and every rank call it.
    ///
    /// # Errors
    /// [`NotDelegated`].
    pub fn algorithm(
        &self,
        len_bytes: u64,
        asked: Option<Algorithm>,
    ) -> Result<Algorithm, NotDelegated> {
        match asked {
            None if len_bytes <= self.one_shot_max_bytes => Ok(Algorithm::OneShot),
            None => Ok(Algorithm::TwoShot),
            Some(algorithm @ (Algorithm::OneShot | Algorithm::TwoShot)) => Ok(algorithm),
            Some(
                algorithm @ (Algorithm::OneShotChunked
                | Algorithm::OneShotPush
                | Algorithm::OneShotPull
                | Algorithm::OneShotPullInband
                | Algorithm::TwoShotPush
                | Algorithm::TwoShotPull
                | Algorithm::TwoShotPullInband
                | Algorithm::Hierarchical
                | Algorithm::HostStaged
                | Algorithm::CopyEngineRing),
            ) => Err(NotDelegated(algorithm)),
        }
    }
}

/// Lane resident of backend host has no such algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("lane resident of backend host reduces by one_shot, not by {0}")]
pub struct NotResident(pub Algorithm);

/// The algorithm of a reduction on lane resident of backend host.
///
/// # Errors
/// [`NotResident`].
pub fn resident_algorithm(asked: Option<Algorithm>) -> Result<Algorithm, NotResident> {
    match asked {
        None | Some(Algorithm::OneShot) => Ok(Algorithm::OneShot),
        Some(
            algorithm @ (Algorithm::OneShotChunked
            | Algorithm::TwoShot
            | Algorithm::OneShotPush
            | Algorithm::OneShotPull
            | Algorithm::OneShotPullInband
            | Algorithm::TwoShotPush
            | Algorithm::TwoShotPull
            | Algorithm::TwoShotPullInband
            | Algorithm::Hierarchical
            | Algorithm::HostStaged
            | Algorithm::CopyEngineRing),
        ) => Err(NotResident(algorithm)),
    }
}

// Waiting.

/// The machine's monotonic clock, the same for all its processes, nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live timespec; this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// The longest sleep: who was not woken, whatever the reason, looks again after it.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// Spins, then lets others run, then sleeps, for a time.
#[derive(Debug)]
pub struct SpinThenSleep {
    spin_ns: u64,
    yield_ns: u64,
    timeout_ns: u64,
    longest_sleep: Duration,
    /// When it first looked at the clock.
    since_ns: Option<u64>,
    looks: u32,
}

impl SpinThenSleep {
    /// With a lane's budgets, for `timeout` from its first look at the clock.
    pub fn new(geometry: &Geometry, timeout: Duration) -> Self {
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let spin_ns = ns(geometry.spin);
        Self {
            spin_ns,
            yield_ns: spin_ns.saturating_add(ns(geometry.yielding)),
            timeout_ns: ns(timeout),
            longest_sleep: LONGEST_SLEEP,
            since_ns: None,
            looks: 0,
        }
    }

    /// With another longest sleep.
    #[must_use]
    pub fn sleeping_at_most(mut self, longest_sleep: Duration) -> Self {
        self.longest_sleep = longest_sleep;
        self
    }
}

impl Patience for SpinThenSleep {
    fn next(&mut self) -> Step {
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS) {
            std::hint::spin_loop();
            return Step::Look;
        }
        let now = monotonic_ns();
        let since = *self.since_ns.get_or_insert(now);
        let waited = now.saturating_sub(since);
        if waited >= self.timeout_ns {
            return Step::Expired;
        }
        if waited < self.spin_ns {
            return Step::Look;
        }
        // From here on each look is followed by another at the clock.
        self.looks = LOOKS - 1;
        if waited < self.yield_ns {
            std::thread::yield_now();
            return Step::Look;
        }
        let left = Duration::from_nanos(self.timeout_ns - waited);
        Step::Sleep(left.min(self.longest_sleep))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use protocol::Found;

    fn world() -> (WorldSize, Rank) {
        let world_size = WorldSize::new(2).unwrap();
        (world_size, world_size.rank(1).unwrap())
    }

    const IDENTITY: Identity = Identity {
        rank: 1,
        world_size: 2,
        epoch: 7,
    };

    #[test]
    fn a_call_crosses_the_memory() {
        let (world_size, rank) = world();
        let (_executor, memory) = Lane::create(rank, world_size, 7, 4096).unwrap();
        let own = Lane::open(&memory, IDENTITY, 4096).unwrap();
        let peer = PeerLane::open(&memory, IDENTITY, 4096).unwrap();
        let call = Call {
            sequence: 1,
            signature: Signature {
                num_elems: 21_504,
                dtype: Dtype::Bf16,
                op: Op::Max,
                algorithm: Some(Algorithm::TwoShot),
            },
            half: 1,
            src: NOT_IN_ARENA,
            dst: 256,
            src_buffer: 3,
            dst_buffer: 4,
            arrived_ns: monotonic_ns(),
        };
        assert_eq!(peer.entry(1), None);
        own.words().publish(&call.to_entry());
        let Some(Found::Here(entry)) = peer.entry(1) else {
            unreachable!("not published");
        };
        assert_eq!(Call::from_entry(&entry), Some(call));
        assert_eq!(peer.entry(3), None);
        let next = Call {
            sequence: 3,
            ..call
        };
        own.words().publish(&next.to_entry());
        assert_eq!(peer.entry(1), Some(Found::Broken { sequence: 3 }));
        let bad = Entry { kind: 0, ..entry };
        assert_eq!(Call::from_entry(&bad), None);
    }

    #[test]
    fn foreign_memory_is_refused() {
        let (world_size, rank) = world();
        let (_lane, memory) = Lane::create(rank, world_size, 7, 4096).unwrap();
        let other = Identity {
            epoch: 8,
            ..IDENTITY
        };
        assert!(matches!(
            Lane::open(&memory, other, 4096),
            Err(BadLane::Differs { .. })
        ));
        assert!(matches!(
            PeerLane::open(&memory, IDENTITY, 8192),
            Err(BadLane::Short { .. })
        ));
        let (_board, memory) = Board::create(world_size, 7).unwrap();
        assert!(Board::open(&memory, 2, 7).is_ok());
        assert!(Board::open(&memory, 3, 7).is_err());
    }

    #[test]
    fn abort_words_round_trip() {
        for cause in [
            AbortCause::Timeout,
            AbortCause::Broken,
            AbortCause::Abandoned,
            AbortCause::Ended,
            AbortCause::ExecutorLost,
            AbortCause::Failed,
            AbortCause::Unknown(77),
        ] {
            let abort = Abort {
                cause,
                ranks: 0x8005,
                sequence: SEQUENCE_MASK,
            };
            assert_eq!(Abort::from_word(abort.to_word()), abort);
            assert_eq!(abort.rank_list(), [0, 2, 15]);
            assert!(!abort.to_string().is_empty());
        }
    }

    #[test]
    fn a_sleeper_is_rung_and_a_deadline_ends_the_wait() {
        let (world_size, rank) = world();
        let (board, memory) = Board::create(world_size, 7).unwrap();
        let other = Board::open(&memory, 2, 7).unwrap();
        let (lane, memory) = Lane::create(rank, world_size, 7, 4096).unwrap();
        let peer = PeerLane::open(&memory, IDENTITY, 4096).unwrap();
        let geometry = Geometry {
            one_shot_max_bytes: 0,
            short_max_bytes: 0,
            block_len_bytes: 4096,
            stage_len_bytes: 4096,
            spin: Duration::ZERO,
            yielding: Duration::ZERO,
        };
        let look = || (peer.progress() == 5).then_some(());
        let mut patience = SpinThenSleep::new(&geometry, Duration::from_millis(1));
        let waited = board.words().wait(0, &mut patience, look);
        assert_eq!(waited, Err(protocol::Stopped::Expired));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut patience = SpinThenSleep::new(&geometry, Duration::MAX);
                board.words().wait(0, &mut patience, look)
            });
            for progress in 1..=5 {
                lane.words().set_progress(progress);
                other.words().ring([0]);
            }
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
        let abort = Abort::of(AbortCause::Ended, Some(1), 0).to_word();
        assert_eq!(other.words().set_abort(abort), abort);
        let mut patience = SpinThenSleep::new(&geometry, Duration::MAX);
        let waited = board
            .words()
            .wait(0, &mut patience, || (peer.progress() == 6).then_some(()));
        assert_eq!(waited, Err(protocol::Stopped::Aborted(abort)));
    }

    #[test]
    fn a_call_is_void_from_the_earliest_failure_on() {
        let (world_size, _) = world();
        let (board, _memory) = Board::create(world_size, 7).unwrap();
        let words = board.words();
        assert!(!words.is_failed(5));
        words.fail(5);
        words.fail(7);
        assert!(!words.is_failed(4) && words.is_failed(5) && words.is_failed(6));
        words.fail(3);
        assert!(words.is_failed(3) && !words.is_failed(2));
    }
}
