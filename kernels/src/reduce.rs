//! The way in: arguments checked, the kernel chosen, the kernel run.
//!
//! Owns the choice of kernel and of stores, and every refusal. Called by the daemon's host backend, by each of
//! its threads with its own chunk. Refuses averages of integers and impossible counts, before any
//! memory is touched.
#![allow(unsafe_code)] // room: SIMD

use std::mem::MaybeUninit;
use std::ptr;

use allreduce_contract::{Dtype, MAX_WORLD_SIZE, Op};

use crate::chunk::CACHE_LINE_BYTES;
use crate::job::{Job, Kernel};
use crate::path::Path;
use crate::scalar;

/// Why a reduction was refused. No memory was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReduceError {
    /// An average of integers.
    #[error("avg of {dtype} is not defined")]
    IntegerAvg {
        /// The integer type.
        dtype: Dtype,
    },
    /// No source, or more than a communicator may have ranks.
    #[error("{given} sources: 1 to {MAX_WORLD_SIZE} can be reduced")]
    SourceCount {
        /// How many were given.
        given: usize,
    },
    /// No destination, or more than a communicator may have ranks.
    #[error("{given} destinations: 1 to {MAX_WORLD_SIZE} can be written")]
    DestinationCount {
        /// How many were given.
        given: usize,
    },
    /// The buffer's size in bytes does not exist.
    #[error("{num_elems} elements of {dtype} exceed the address space")]
    TooLong {
        /// The element's type.
        dtype: Dtype,
        /// How many were given.
        num_elems: usize,
    },
    /// This machine lacks the path's instructions.
    #[error("this machine has no {path}")]
    PathUnavailable {
        /// The path that was asked for.
        path: Path,
    },
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stores {
    /// [`Stores::Streaming`] from [`STREAMING_MIN_FOOTPRINT_BYTES`] on, else [`Stores::Cached`].
    #[default]
    Auto,
    /// Through the caches: for results that are read soon and fit.
    Cached,
    /// Past the caches where possible, which saves reading the destination's lines before they are
    /// overwritten. For one thread's part of a reduction whose whole is large.
    Streaming,
}

/// Bytes of all sources and destinations of one call together from which on [`Stores::Auto`] streams.
///
/// About a last-level cache's share for one core complex: below it, streaming was measured to be no
/// faster, and it would cost whoever reads the result next.
pub const STREAMING_MIN_FOOTPRINT_BYTES: usize = 24 << 20;

/// Destinations from which on the result is staged: with as many streams of stores next to those of
/// loads, all at one offset of a page, the first-level cache has no room for a line of each.
const STAGING_MIN_DESTINATIONS: usize = 9;

/// Bytes reduced before they are copied to the destinations: a quarter of a first-level cache.
const STAGE_BYTES: usize = 8192;

/// Aligned as a page is, so that copies to pages find both ends aligned.
#[repr(align(4096))]
struct Stage([MaybeUninit<u8>; STAGE_BYTES]);

/// A reduction for one dtype and operator, its kernel chosen. Cheap to make and to copy.
#[derive(Debug, Clone, Copy)]
pub struct Reducer {
    dtype: Dtype,
    op: Op,
    path: Path,
    stores: Stores,
    kernel: Kernel,
}

impl Reducer {
    /// The reducer for the best path of this machine.
    ///
    /// # Errors
    /// [`ReduceError::IntegerAvg`].
    pub fn new(dtype: Dtype, op: Op) -> Result<Self, ReduceError> {
        Self::with_path(dtype, op, Path::best())
    }

    /// The reducer for a given path.
    ///
    /// # Errors
    /// [`ReduceError::IntegerAvg`] and [`ReduceError::PathUnavailable`].
    pub fn with_path(dtype: Dtype, op: Op, path: Path) -> Result<Self, ReduceError> {
        if !path.is_available() {
            return Err(ReduceError::PathUnavailable { path });
        }
        let kernel = match path {
            Path::Scalar => scalar::select(dtype, op),
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => crate::simd::select_avx2(dtype, op),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => crate::simd::select_avx512(dtype, op),
            #[cfg(not(target_arch = "x86_64"))]
            Path::Avx2 | Path::Avx512 => return Err(ReduceError::PathUnavailable { path }),
        };
        Ok(Reducer {
            dtype,
            op,
            path,
            stores: Stores::Auto,
            kernel: kernel.ok_or(ReduceError::IntegerAvg { dtype })?,
        })
    }

    /// The same reducer with another way of storing.
    #[must_use]
    pub fn with_stores(self, stores: Stores) -> Self {
        Reducer { stores, ..self }
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The operator.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The path that runs.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Reduces `srcs`, one pointer for each rank in rank order, element by element, and stores the
    /// result to every one of `dsts`. Every destination gets the same bits, also while a source is
    /// being written. All stores are done, and ordered before any later release, on return.
    ///
    /// # Safety
    /// The caller guarantees, for `len_bytes = num_elems * dtype.size_bytes()`:
    /// - each source is valid for reads of `len_bytes`, each destination for writes of `len_bytes`,
    ///   until the call returns. With `num_elems` 0 any pointer will do;
    /// - each pointer is aligned to the element;
    /// - a destination is equal to a source (of any rank) or disjoint from it; destinations are
    ///   disjoint from each other;
    /// - no Rust reference to the memory is live. Another process may write a source meanwhile (the result
    ///   of the elements concerned is then unspecified), another thread of this process may not.
    ///
    /// # Errors
    /// [`ReduceError::SourceCount`], [`ReduceError::DestinationCount`] and [`ReduceError::TooLong`].
    pub unsafe fn run(
        &self,
        srcs: &[*const u8],
        dsts: &[*mut u8],
        num_elems: usize,
    ) -> Result<(), ReduceError> {
        let legal_counts = 1..=MAX_WORLD_SIZE as usize;
        if !legal_counts.contains(&srcs.len()) {
            return Err(ReduceError::SourceCount { given: srcs.len() });
        }
        if !legal_counts.contains(&dsts.len()) {
            return Err(ReduceError::DestinationCount { given: dsts.len() });
        }
        let len_bytes = num_elems
            .checked_mul(self.dtype.size_bytes())
            .filter(|len_bytes| isize::try_from(*len_bytes).is_ok())
            .ok_or(ReduceError::TooLong {
                dtype: self.dtype,
                num_elems,
            })?;
        let job = Job {
            srcs,
            dsts,
            len_bytes,
            streaming: self.streams(srcs, dsts, len_bytes),
        };
        // SAFETY: COUNT and WHOLE were checked above; READ, WRITE, ALIGNED and OVERLAP are the
        // caller's. The CPU has the path's features: `with_path` checked before choosing the kernel.
        unsafe {
            if dsts.len() < STAGING_MIN_DESTINATIONS || job.streaming {
                (self.kernel)(&job);
            } else {
                self.run_staged(&job);
            }
        }
        Ok(())
    }

    /// Reduces into memory of its own, a block at a time, and copies each block to the destinations.
    ///
    /// As in a kernel, all loads of an element come before its stores, and every destination gets
    /// the same bits: the copies read nothing that anyone else can write.
    ///
    /// # Safety
    /// The invariants of [`Job`], and the CPU has the path's features.
    unsafe fn run_staged(&self, job: &Job<'_>) {
        let mut stage = Stage([MaybeUninit::uninit(); STAGE_BYTES]);
        let stage = stage.0.as_mut_ptr().cast::<u8>();
        let mut srcs = [ptr::null(); MAX_WORLD_SIZE as usize];
        for start in (0..job.len_bytes).step_by(STAGE_BYTES) {
            let len_bytes = STAGE_BYTES.min(job.len_bytes - start);
            for (block, src) in srcs.iter_mut().zip(job.srcs) {
                *block = src.wrapping_add(start);
            }
            let block = Job {
                srcs: srcs.get(..job.srcs.len()).unwrap_or_default(),
                dsts: &[stage],
                len_bytes,
                streaming: false,
            };
            // SAFETY: READ and ALIGNED hold for a part of the job, as start is a multiple of every
            // element's size; WHOLE because STAGE_BYTES is one too; WRITE and OVERLAP because the stage is
            // local and has STAGE_BYTES; COUNT because `srcs` has room for every rank. The CPU's
            // features are the caller's. Then the copies: WRITE of the job, and the kernel has
            // initialised len_bytes of the stage.
            unsafe {
                (self.kernel)(&block);
                for dst in job.dsts {
                    dst.add(start).copy_from_nonoverlapping(stage, len_bytes);
                }
            }
        }
    }

    /// Whether to store past the caches: wanted, the destinations reach alignment together, and
    /// none is a source, whose lines are in the cache already.
    fn streams(&self, srcs: &[*const u8], dsts: &[*mut u8], len_bytes: usize) -> bool {
        let wanted = match self.stores {
            Stores::Auto => {
                let buffers = srcs.len() + dsts.len();
                len_bytes >= STREAMING_MIN_FOOTPRINT_BYTES.div_ceil(buffers)
            }
            Stores::Cached => false,
            Stores::Streaming => true,
        };
        let within_line = |dst: &*mut u8| dst.addr() % CACHE_LINE_BYTES;
        wanted
            && dsts.iter().all(|dst| !srcs.contains(&dst.cast_const()))
            && dsts.iter().map(within_line).is_sorted_by(|a, b| a == b)
    }
}

/// Reduces once: [`Reducer::new`] and [`Reducer::run`].
///
/// # Safety
/// As for [`Reducer::run`].
///
/// # Errors
/// [`ReduceError::IntegerAvg`] and those of [`Reducer::run`].
pub unsafe fn reduce(
    dtype: Dtype,
    op: Op,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    num_elems: usize,
) -> Result<(), ReduceError> {
    // SAFETY: the requirements are the same, and the caller's.
    unsafe { Reducer::new(dtype, op)?.run(srcs, dsts, num_elems) }
}
