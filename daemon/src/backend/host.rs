//! The host backend: windows in memfds, reductions by this process's processors.
//!
//! Owns the windows and the threads. The executor's task calls it with ranges that the communicator
//! has checked. Refuses to decide anything: the plan says how many threads.
#![allow(unsafe_code)] // room: shared memory

use crate::backend::Fault;
use crate::communicator::{ARENA, Launch, Place};
use crate::plan::Shape;
use allreduce_contract::memory::{Mapping, MemoryError, SealedMemory};
use allreduce_contract::window::Control;
use allreduce_contract::{Rank, WorldSize};
use allreduce_kernels::reduce::STREAMING_MIN_FOOTPRINT_BYTES;
use allreduce_kernels::{ReduceError, Reducer, Stores, chunk};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One session's memory.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) control: Control,
    control_memory: SealedMemory,
    arena: Arc<Mapping>,
    arena_memory: SealedMemory,
    /// By handle: what the rank handed over. The memory is kept to know it again.
    handed: HashMap<u64, (Arc<Mapping>, SealedMemory)>,
}

impl Window {
    /// Makes a window whose arena has at least `arena_len_bytes` (rounded up to a page).
    pub(crate) fn create(
        rank: Rank,
        world_size: WorldSize,
        arena_len_bytes: u64,
    ) -> Result<Self, MemoryError> {
        let exhausted = MemoryError::Exhausted {
            needed: arena_len_bytes,
            available: allreduce_contract::memory::available_bytes(),
        };
        let len_bytes = usize::try_from(arena_len_bytes)
            .ok()
            .and_then(|len| len.max(1).checked_next_multiple_of(4096))
            .and_then(NonZeroUsize::new)
            .ok_or(exhausted)?;
        let (control, control_memory) = Control::create(rank, world_size)?;
        let arena_memory = SealedMemory::create(c"allreduced-arena", len_bytes)?;
        Ok(Self {
            control,
            control_memory,
            arena: Arc::new(arena_memory.map()?),
            arena_memory,
            handed: HashMap::new(),
        })
    }

    pub(crate) fn arena_len_bytes(&self) -> u64 {
        self.arena_memory.len_bytes().get() as u64
    }

    pub(crate) fn control_len_bytes(&self) -> u64 {
        self.control_memory.len_bytes().get() as u64
    }

    pub(crate) fn control_fd(&self) -> BorrowedFd<'_> {
        self.control_memory.as_fd()
    }

    pub(crate) fn arena_fd(&self) -> BorrowedFd<'_> {
        self.arena_memory.as_fd()
    }

    /// For a peer, which may only read it.
    pub(crate) fn arena_fd_for_peer(&self) -> std::io::Result<OwnedFd> {
        self.arena_memory.read_only_fd()
    }

    /// Keeps a memory that the rank handed over, mapped.
    pub(crate) fn keep(&mut self, handle: u64, mapping: Mapping, memory: SealedMemory) {
        self.handed.insert(handle, (Arc::new(mapping), memory));
    }

    /// Whether `memory` is one of this window's.
    pub(crate) fn knows(&self, memory: &SealedMemory) -> bool {
        let identity = memory.identity();
        self.handed
            .values()
            .map(|(_, handed)| handed)
            .chain([&self.arena_memory, &self.control_memory])
            .any(|known| known.identity() == identity)
    }

    /// Unmaps a memory that the rank handed over, as soon as no job holds it.
    pub(crate) fn forget(&mut self, handle: u64) {
        self.handed.remove(&handle);
    }

    /// A memory of the session: its arena, or one that it handed over.
    pub(crate) fn mapping(&self, memory: u64) -> Option<&Arc<Mapping>> {
        if memory == ARENA {
            Some(&self.arena)
        } else {
            self.handed.get(&memory).map(|(mapping, _)| mapping)
        }
    }
}

/// A launch with its pointers, and what keeps them valid.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) launch: Launch,
    reducer: Reducer,
    srcs: Vec<*const u8>,
    dsts: Vec<*mut u8>,
    _keep: Vec<Arc<Mapping>>,
}

// SAFETY: the pointers are into mappings that `_keep` holds, which any thread may use.
unsafe impl Send for Job {}
// SAFETY: as above; the threads that share a job work on disjoint chunks of it.
unsafe impl Sync for Job {}

/// A launch cannot be run. The communicator forgets sessions only when nothing runs on them, and plans
/// only what the kernels take, so this is a defect of ours; it is reported, not assumed away.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadLaunch {
    #[error("memory {memory} at {offset_bytes} of session {session} is not mapped")]
    NotMapped {
        session: u64,
        memory: u64,
        offset_bytes: u64,
    },
    #[error(transparent)]
    Kernel(#[from] ReduceError),
}

impl Job {
    /// Finds the launch's places in the windows.
    pub(crate) fn new(launch: Launch, windows: &HashMap<u64, Window>) -> Result<Self, BadLaunch> {
        let elem_bytes = launch.signature.dtype.size_bytes() as u64;
        let len_bytes = launch.signature.num_elems.saturating_mul(elem_bytes);
        let mut keep = Vec::with_capacity(2 * launch.ranks.len());
        let mut find = |session: u64, place: Place| {
            let missing = BadLaunch::NotMapped {
                session,
                memory: place.memory,
                offset_bytes: place.offset_bytes,
            };
            let mapping = windows
                .get(&session)
                .and_then(|window| window.mapping(place.memory));
            match mapping
                .and_then(|found| Some((found, found.range(place.offset_bytes, len_bytes)?)))
            {
                Some((mapping, start)) => {
                    keep.push(Arc::clone(mapping));
                    Ok(start)
                }
                None => Err(missing),
            }
        };
        let mut srcs = Vec::with_capacity(launch.ranks.len());
        let mut dsts = Vec::with_capacity(launch.ranks.len());
        for rank in &launch.ranks {
            srcs.push(find(rank.session, rank.src)?.as_ptr().cast_const());
            dsts.push(find(rank.session, rank.dst)?.as_ptr());
        }
        // The threads of a chunked launch each see a part; how to store depends on the whole.
        let footprint = len_bytes.saturating_mul(2 * launch.ranks.len() as u64);
        let stores = if footprint >= STREAMING_MIN_FOOTPRINT_BYTES as u64 {
            Stores::Streaming
        } else {
            Stores::Cached
        };
        let reducer =
            Reducer::new(launch.signature.dtype, launch.signature.op)?.with_stores(stores);
        Ok(Self {
            launch,
            reducer,
            srcs,
            dsts,
            _keep: keep,
        })
    }

    /// Reduces elements `start..end`.
    fn reduce_range(&self, start: usize, end: usize) {
        let skip = start * self.launch.signature.dtype.size_bytes();
        // SAFETY: start <= end <= num_elems, and num_elems elements from each pointer lie inside a
        // mapping (Job::new checked) that lives as long as the job, so the offsets stay inside.
        let (srcs, dsts): (Vec<*const u8>, Vec<*mut u8>) = unsafe {
            (
                self.srcs.iter().map(|src| src.add(skip)).collect(),
                self.dsts.iter().map(|dst| dst.add(skip)).collect(),
            )
        };
        // SAFETY: as above for the ranges; the communicator checked that offsets are multiples of the
        // element size (mappings are page-aligned) and that a rank's source and destination are equal
        // or apart; different ranks' buffers are in
        // different memories. (The task hands no memory over
        // twice.) Ranks may write meanwhile,
        // which the reducer allows.
        let done = unsafe { self.reducer.run(&srcs, &dsts, end - start) };
        if let Err(error) = done {
            // As in Task::launch: who cannot reduce must not say it did.
            tracing::error!(%error, "cannot reduce");
            std::process::abort();
        }
    }

    fn num_elems(&self) -> usize {
        usize::try_from(self.launch.signature.num_elems).unwrap_or(usize::MAX)
    }

    /// Reduces all of it on this thread.
    pub(crate) fn run(&self) -> Duration {
        let start = Instant::now();
        self.reduce_range(0, self.num_elems());
        start.elapsed()
    }

    /// Reduces all of it on `pool`, whose thread this is.
    fn run_chunked(&self) -> Duration {
        let start = Instant::now();
        // More chunks than threads, so that a thread that is held up does not hold up all.
        let threads = match self.launch.plan.shape {
            Shape::Host { threads } => threads,
            Shape::Cuda { .. } | Shape::Copies { .. } => 1,
        };
        let count = NonZeroUsize::new(threads.saturating_mul(4)).unwrap_or(NonZeroUsize::MIN);
        (0..count.get()).into_par_iter().for_each(|index| {
            let range = chunk(self.launch.signature.dtype, self.num_elems(), index, count);
            self.reduce_range(range.start, range.end);
        });
        start.elapsed()
    }

    /// Carries out a fault.
    pub(crate) fn damage(&self, fault: Fault) {
        let len_bytes = self
            .num_elems()
            .saturating_mul(self.launch.signature.dtype.size_bytes());
        let byte = usize::try_from(fault.bit / 8).unwrap_or(usize::MAX);
        let dst = usize::try_from(fault.rank)
            .ok()
            .and_then(|rank| self.dsts.get(rank));
        let Some(dst) = dst.filter(|_| byte < len_bytes) else {
            return;
        };
        // SAFETY: byte is inside the destination, which has len_bytes.
        unsafe {
            let byte = dst.add(byte);
            byte.write(byte.read() ^ (1 << (fault.bit % 8)));
        }
    }
}

/// The threads that share large reductions.
#[derive(Debug)]
pub(crate) struct Pool(rayon::ThreadPool);

impl Pool {
    pub(crate) fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("reduce-{index}"))
            .build()
            .map(Self)
    }

    /// Runs a job on the pool, then calls `done` there.
    pub(crate) fn spawn(&self, job: Job, done: impl FnOnce(Job, Duration) + Send + 'static) {
        self.0.spawn(move || {
            let took = job.run_chunked();
            done(job, took);
        });
    }
}
