//! The loop that every machine has.
//!
//! Owns the portable reduction over raw memory. Called through the kernel that [`select`] returns.
//! Refuses nothing but the average of integers; relies on the invariants of [`Job`].
//!
//! A block of elements is accumulated in a local array, one rank after the other: all loads of an
//! element come before its stores, each is loaded once, and the compiler can use whatever vectors
//! the target has.
#![allow(unsafe_code)] // room: SIMD

use std::marker::PhantomData;

use allreduce_contract::{Dtype, Op};

use crate::arithmetic::{Arithmetic, Avg, Max, Min, Operator, Prod, Sum};
use crate::job::{Job, Kernel};
use crate::number::{Bf16, Element, F16, Number};

/// Elements accumulated before they are stored.
const BLOCK_ELEMS: usize = 64;

/// The kernel for a dtype and an operator; `None` for the average of integers.
pub(crate) fn select(dtype: Dtype, op: Op) -> Option<Kernel> {
    if dtype.is_integer() && op == Op::Avg {
        return None;
    }
    Some(match dtype {
        Dtype::F32 => select_op::<f32>(op),
        Dtype::F64 => select_op::<f64>(op),
        Dtype::F16 => select_op::<F16>(op),
        Dtype::Bf16 => select_op::<Bf16>(op),
        Dtype::I32 => select_op::<i32>(op),
        Dtype::I64 => select_op::<i64>(op),
    })
}

fn select_op<E: Element>(op: Op) -> Kernel {
    match op {
        Op::Sum => run::<E, Sum>,
        Op::Avg => run::<E, Avg>,
        Op::Min => run::<E, Min>,
        Op::Max => run::<E, Max>,
        Op::Prod => run::<E, Prod>,
    }
}

/// # Safety
/// The invariants of [`Job`], for elements of type `E`.
unsafe fn run<E: Element, O: Operator>(job: &Job<'_>) {
    let num_elems = job.len_bytes / size_of::<E>();
    let mut start = 0;
    while num_elems - start >= BLOCK_ELEMS {
        // SAFETY: the job's invariants are the caller's; the block ends within num_elems.
        unsafe { run_block::<E, O>(job, start, BLOCK_ELEMS) };
        start += BLOCK_ELEMS;
    }
    // SAFETY: as above, and fewer than BLOCK_ELEMS remain.
    unsafe { run_block::<E, O>(job, start, num_elems - start) };
}

/// Reduces elements `start..start + count`.
///
/// # Safety
/// The invariants of [`Job`], `start + count` elements lie within it, `count` is at most
/// [`BLOCK_ELEMS`].
#[inline(always)]
unsafe fn run_block<E: Element, O: Operator>(job: &Job<'_>, start: usize, count: usize) {
    let scalar = Scalar::<E::Accumulator>(PhantomData);
    let reciprocal = scalar.reciprocal(job.srcs.len());
    let mut accumulators = [E::Accumulator::default(); BLOCK_ELEMS];
    for (rank, src) in job.srcs.iter().enumerate() {
        let src = src.cast::<E>();
        for (index, accumulator) in accumulators.iter_mut().take(count).enumerate() {
            // SAFETY: READ and ALIGNED of the job, and start + count elements lie within it.
            let value = unsafe { src.add(start + index).read() }.widen();
            *accumulator = if rank == 0 {
                value
            } else {
                O::combine(scalar, *accumulator, value)
            };
        }
    }
    let mut results = [E::narrow(E::Accumulator::default()); BLOCK_ELEMS];
    for (result, accumulator) in results.iter_mut().zip(&accumulators).take(count) {
        *result = E::narrow(O::finish(scalar, *accumulator, reciprocal));
    }
    for dst in job.dsts {
        let dst = dst.cast::<E>();
        // SAFETY: WRITE and ALIGNED of the job, and start + count elements lie within it;
        // `results` is local, so the two do not overlap.
        unsafe {
            dst.add(start)
                .copy_from_nonoverlapping(results.as_ptr(), count)
        };
    }
}

/// [`Arithmetic`] on one value.
struct Scalar<N>(PhantomData<N>);

impl<N> Clone for Scalar<N> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<N> Copy for Scalar<N> {}

impl<N: Number> Arithmetic for Scalar<N> {
    type Value = N;

    #[inline(always)]
    fn add(self, left: N, right: N) -> N {
        left.add(right)
    }

    #[inline(always)]
    fn mul(self, left: N, right: N) -> N {
        left.mul(right)
    }

    #[inline(always)]
    fn minimum(self, left: N, right: N) -> N {
        left.minimum(right)
    }

    #[inline(always)]
    fn maximum(self, left: N, right: N) -> N {
        left.maximum(right)
    }

    #[inline(always)]
    fn reciprocal(self, world_size: usize) -> N {
        N::reciprocal(world_size)
    }
}
