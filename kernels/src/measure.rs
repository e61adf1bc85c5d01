//! A reduction against a memcpy of as many bytes, timed in one run.
//!
//! Owns the buffers and the clock of that comparison. Called by the daemon's `bench` and the crate's
//! example. Refuses to judge: it gives percentiles, not verdicts.
#![allow(unsafe_code)] // room: SIMD

use std::hint::black_box;
use std::time::Instant;

use allreduce_contract::{Dtype, Op};

use crate::path::Path;
use crate::reduce::{ReduceError, Reducer, Stores};

/// What is measured, on one thread.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The element type.
    pub dtype: Dtype,
    /// The operator.
    pub op: Op,
    /// The number of sources.
    pub world_size: usize,
    /// Bytes of each source; rounded down to whole elements.
    pub len_bytes: usize,
    /// Where the result goes.
    pub destinations: Destinations,
    /// The instruction set.
    pub path: Path,
    /// How results are stored.
    pub stores: Stores,
}

/// Where a measured reduction puts its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destinations {
    /// One buffer that is no source.
    One,
    /// Rank 0's source.
    InPlace,
    /// A buffer for each rank, none a source.
    Each,
}

/// Microseconds of one reduction, and of one memcpy that moves as many bytes.
#[derive(Debug, Clone, Copy)]
pub struct Measurement {
    /// Median of the reductions.
    pub reduce_us_p50: f64,
    /// 99th percentile of the reductions.
    pub reduce_us_p99: f64,
    /// Median of the copies.
    pub memcpy_us_p50: f64,
    /// 99th percentile of the copies.
    pub memcpy_us_p99: f64,
}

impl Measurement {
    /// The reduction's median over the memcpy's.
    pub fn ratio(&self) -> f64 {
        self.reduce_us_p50 / self.memcpy_us_p50
    }
}

/// Times `iterations` (at least 1) reductions on the best path to one destination, and as many memcpys; see
/// [`run`].
///
/// # Errors
/// Those of [`Reducer::new`] and [`Reducer::run`].
pub fn reduction_vs_memcpy(
    dtype: Dtype,
    op: Op,
    world_size: usize,
    len_bytes: usize,
    iterations: usize,
) -> Result<Measurement, ReduceError> {
    let case = Case {
        dtype,
        op,
        world_size,
        len_bytes,
        destinations: Destinations::One,
        path: Path::best(),
        stores: Stores::Auto,
    };
    run(&case, iterations)
}

/// Times `iterations` (at least 1) reductions and as many memcpys, in turn.
///
/// The memcpy goes from one buffer to another and moves as many bytes, read and written together, as the
/// reduction does: with N sources and one destination (N+1)/2 times `len_bytes`. All buffers begin
/// on a page. A first tenth of each is run before the clock.
///
/// # Errors
/// Those of [`Reducer::with_path`] and [`Reducer::run`].
pub fn run(case: &Case, iterations: usize) -> Result<Measurement, ReduceError> {
    let reducer = Reducer::with_path(case.dtype, case.op, case.path)?.with_stores(case.stores);
    let num_elems = case.len_bytes / case.dtype.size_bytes();
    let num_dsts = match case.destinations {
        Destinations::One | Destinations::InPlace => 1,
        Destinations::Each => case.world_size,
    };
    let memcpy_bytes = (case.world_size + num_dsts) * case.len_bytes / 2;

    let mut sources = buffers(case.world_size, case.len_bytes);
    let mut results = buffers(num_dsts, case.len_bytes);
    let mut copies = buffers(2, memcpy_bytes);
    let dsts: Vec<*mut u8> = match case.destinations {
        Destinations::InPlace => sources.iter_mut().take(1).map(Buffer::as_mut_ptr).collect(),
        Destinations::One | Destinations::Each => {
            results.iter_mut().map(Buffer::as_mut_ptr).collect()
        }
    };
    let srcs: Vec<*const u8> = sources
        .iter_mut()
        .map(|source| source.as_mut_ptr().cast_const())
        .collect();
    let copies: Vec<*mut u8> = copies.iter_mut().map(Buffer::as_mut_ptr).collect();
    let [copy_from, copy_to] = copies[..] else {
        return Err(ReduceError::SourceCount { given: 0 });
    };

    let iterations = iterations.max(1);
    let mut reduce_us = Vec::with_capacity(iterations);
    let mut memcpy_us = Vec::with_capacity(iterations);
    for iteration in 0..iterations + iterations / 10 {
        let start = Instant::now();
        // SAFETY: each pointer is to a page-aligned buffer of at least len_bytes, alive to the end
        // of this function and touched only through these pointers; the buffers are disjoint but
        // for a destination that is rank 0's source.
        unsafe { reducer.run(black_box(&srcs), black_box(&dsts), num_elems)? };
        let reduced = start.elapsed();

        let start = Instant::now();
        // SAFETY: two disjoint buffers of memcpy_bytes each.
        unsafe {
            black_box(copy_from).copy_to_nonoverlapping(black_box(copy_to), memcpy_bytes);
        }
        let copied = start.elapsed();

        if iteration >= iterations / 10 {
            reduce_us.push(reduced.as_secs_f64() * 1e6);
            memcpy_us.push(copied.as_secs_f64() * 1e6);
        }
    }
    reduce_us.sort_by(f64::total_cmp);
    memcpy_us.sort_by(f64::total_cmp);
    Ok(Measurement {
        reduce_us_p50: percentile(&reduce_us, 50),
        reduce_us_p99: percentile(&reduce_us, 99),
        memcpy_us_p50: percentile(&memcpy_us, 50),
        memcpy_us_p99: percentile(&memcpy_us, 99),
    })
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let index = sorted.len().saturating_sub(1) * percent / 100;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

const PAGE_BYTES: usize = 4096;

#[derive(Clone)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "read through raw pointers")] [u8; PAGE_BYTES]);

/// Whole pages that hold small numbers whatever they are read as.
struct Buffer(Vec<Page>);

impl Buffer {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

fn buffers(count: usize, len_bytes: usize) -> Vec<Buffer> {
    // 0x3c3c... is 1.06 as f16, 0.0115 as bf16 and f32, and an ordinary f64 and integer.
    let pages = vec![Page([0x3c; PAGE_BYTES]); len_bytes.div_ceil(PAGE_BYTES)];
    (0..count).map(|_| Buffer(pages.clone())).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_kind_of_destination_is_measured() {
        for destinations in [Destinations::One, Destinations::InPlace, Destinations::Each] {
            let case = Case {
                dtype: Dtype::Bf16,
                op: Op::Avg,
                world_size: 3,
                len_bytes: 10_000,
                destinations,
                path: Path::best(),
                stores: Stores::Auto,
            };
            let measured = run(&case, 20).unwrap();
            assert!(measured.ratio().is_finite());
            assert!(measured.reduce_us_p50 <= measured.reduce_us_p99);
            assert!(measured.memcpy_us_p50 <= measured.memcpy_us_p99);
        }
    }

    #[test]
    fn what_cannot_be_reduced_cannot_be_measured() {
        let refused = reduction_vs_memcpy(Dtype::I32, Op::Avg, 2, 64, 1).unwrap_err();
        let dtype = Dtype::I32;
        assert_eq!(refused, ReduceError::IntegerAvg { dtype });
        let refused = reduction_vs_memcpy(Dtype::F32, Op::Sum, 0, 64, 1).unwrap_err();
        assert_eq!(refused, ReduceError::SourceCount { given: 0 });
    }
}
