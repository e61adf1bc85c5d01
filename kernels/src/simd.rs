//! The SIMD room: reductions over raw memory, a register at a time.
//!
//! Owns the one loop that all dtypes, operators and instruction sets share, and the table of its
//! instances. Called through the kernel that [`select_avx2`] or [`select_avx512`] returns. Refuses nothing but the
//! average of integers; relies on the invariants of [`Job`].
//!
//! Three layers, each generic over the one below:
//! - [`isa`]: the instructions, on registers of bits. Its tokens prove that the CPU has them.
//! - [`lanes`]: registers as accumulators, and how a register of elements becomes accumulators.
//! - this module: memory, ranks and blocks.
//!
//! All loads of an element come before its stores, so a destination may be a source; each element is
//! loaded once per source, so every destination gets the same bits whatever a peer writes meanwhile.
#![allow(unsafe_code)] // room: SIMD

mod avx2;
mod avx512;
mod isa;
mod lanes;

use allreduce_contract::{Dtype, Op};

use crate::arithmetic::{Arithmetic, Avg, Max, Min, Operator, Prod, Sum};
use crate::job::{Job, Kernel};
use isa::Isa;
use lanes::{Bf16Lanes, F16Lanes, F32Lanes, F64Lanes, Format, I32Lanes, I64Lanes};

/// Registers of elements reduced together: enough that reading the ranks' pointers costs nothing,
/// few enough that a pair of accumulators for each stays in registers.
const UNROLL: usize = 4;

/// Reduces a whole job.
///
/// # Safety
/// The invariants of [`Job`], for elements of format `F`.
#[inline(always)]
unsafe fn drive<I, F, O, const PARTS: usize>(isa: I, job: &Job<'_>)
where
    I: Isa,
    F: Format<I, PARTS>,
    O: Operator,
{
    let reciprocal = F::arithmetic(isa).reciprocal(job.srcs.len());
    let reduction = Reduction::<I, F, O, PARTS> {
        isa,
        job,
        reciprocal,
        of: std::marker::PhantomData,
    };
    let len_bytes = job.len_bytes;
    let mut offset = reduction.bytes_to_alignment();
    // SAFETY: the job's invariants are the caller's; the bytes from `offset` on that each block takes
    // are whole elements within len_bytes, by the condition before it.
    unsafe {
        if offset > 0 {
            reduction.partial(0, offset);
        }
        while len_bytes - offset >= UNROLL * I::BYTES {
            reduction.block::<UNROLL>(offset);
            offset += UNROLL * I::BYTES;
        }
        while len_bytes - offset >= I::BYTES {
            reduction.block::<1>(offset);
            offset += I::BYTES;
        }
        if len_bytes > offset {
            reduction.partial(offset, len_bytes - offset);
        }
    }
    if job.streaming {
        isa.fence();
    }
}

/// A job with what is constant in its loop.
struct Reduction<'a, I: Isa, F, O, const PARTS: usize> {
    isa: I,
    job: &'a Job<'a>,
    reciprocal: I::Register,
    of: std::marker::PhantomData<(F, O)>,
}

impl<I, F, O, const PARTS: usize> Reduction<'_, I, F, O, PARTS>
where
    I: Isa,
    F: Format<I, PARTS>,
    O: Operator,
{
    /// Bytes before the first destination is aligned to a register; at most all there are.
    ///
    /// They are whole elements, because the destination is aligned to one.
    #[inline(always)]
    fn bytes_to_alignment(&self) -> usize {
        let first = self.job.dsts.first().map_or(0, |dst| dst.addr());
        (first.wrapping_neg() % I::BYTES).min(self.job.len_bytes)
    }

    #[inline(always)]
    fn first(&self, register: I::Register) -> [I::Register; PARTS] {
        F::widen(self.isa, register)
    }

    #[inline(always)]
    fn next(
        &self,
        mut accumulators: [I::Register; PARTS],
        register: I::Register,
    ) -> [I::Register; PARTS] {
        let values = F::widen(self.isa, register);
        for (accumulator, value) in accumulators.iter_mut().zip(values) {
            *accumulator = O::combine(F::arithmetic(self.isa), *accumulator, value);
        }
        accumulators
    }

    #[inline(always)]
    fn last(&self, mut accumulators: [I::Register; PARTS]) -> I::Register {
        for accumulator in &mut accumulators {
            *accumulator = O::finish(F::arithmetic(self.isa), *accumulator, self.reciprocal);
        }
        F::narrow(self.isa, accumulators)
    }

    /// Reduces `BLOCK` registers of elements from byte `offset` on.
    ///
    /// # Safety
    /// The invariants of [`Job`]; the block's bytes lie within it.
    #[inline(always)]
    unsafe fn block<const BLOCK: usize>(&self, offset: usize) {
        let isa = self.isa;
        let mut srcs = self.job.srcs.iter();
        let Some(first) = srcs.next() else { return };
        let mut accumulators = [self.first(isa.zero()); BLOCK];
        for (index, accumulator) in accumulators.iter_mut().enumerate() {
            // SAFETY: READ of the job, and the block's bytes lie within it.
            let register = unsafe { isa.load(first.add(offset + index * I::BYTES)) };
            *accumulator = self.first(register);
        }
        for src in srcs {
            for (index, accumulator) in accumulators.iter_mut().enumerate() {
                // SAFETY: as above.
                let register = unsafe { isa.load(src.add(offset + index * I::BYTES)) };
                *accumulator = self.next(*accumulator, register);
            }
        }
        let mut results = [isa.zero(); BLOCK];
        for (result, accumulators) in results.iter_mut().zip(accumulators) {
            *result = self.last(accumulators);
        }
        for dst in self.job.dsts {
            for (index, result) in results.into_iter().enumerate() {
                // SAFETY: WRITE of the job, and the block's bytes lie within it. A streaming job's
                // destinations are congruent modulo a cache line (`Reducer::run` upholds it), and
                // `drive` brought the first to a register's alignment before any block.
                unsafe {
                    let to = dst.add(offset + index * I::BYTES);
                    if self.job.streaming {
                        isa.stream(to, result);
                    } else {
                        isa.store(to, result);
                    }
                }
            }
        }
    }

    /// Reduces fewer bytes than a register holds.
    ///
    /// # Safety
    /// The invariants of [`Job`]; `len_bytes` is less than a register's, a multiple of the element's,
    /// and lies within the job from `offset` on.
    #[inline(always)]
    unsafe fn partial(&self, offset: usize, len_bytes: usize) {
        let isa = self.isa;
        let mut srcs = self.job.srcs.iter();
        let Some(first) = srcs.next() else { return };
        // SAFETY: READ, ALIGNED and WHOLE of the job, and the bytes lie within it.
        let register = unsafe { isa.load_partial(first.add(offset), len_bytes) };
        let mut accumulators = self.first(register);
        for src in srcs {
            // SAFETY: as above.
            let register = unsafe { isa.load_partial(src.add(offset), len_bytes) };
            accumulators = self.next(accumulators, register);
        }
        let result = self.last(accumulators);
        for dst in self.job.dsts {
            // SAFETY: as above, with WRITE.
            unsafe { isa.store_partial(dst.add(offset), result, len_bytes) };
        }
    }
}

/// Defines the entry of an instruction set and its table: dtype and operator to kernel.
macro_rules! kernels {
    ($select:ident, $isa:ty, $features:literal) => {
        /// The kernel for a dtype and an operator; `None` for the average of integers.
        pub(crate) fn $select(dtype: Dtype, op: Op) -> Option<Kernel> {
            /// # Safety
            /// The invariants of [`Job`], and the CPU has the features.
            #[target_feature(enable = $features)]
            unsafe fn run<F: Format<$isa, PARTS>, O: Operator, const PARTS: usize>(job: &Job<'_>) {
                // SAFETY: the job's invariants are the caller's.
                unsafe { drive::<$isa, F, O, PARTS>(<$isa>::new(), job) }
            }

            fn select_op<F: Format<$isa, PARTS>, const PARTS: usize>(op: Op) -> Kernel {
                match op {
                    Op::Sum => run::<F, Sum, PARTS>,
                    Op::Avg => run::<F, Avg, PARTS>,
                    Op::Min => run::<F, Min, PARTS>,
                    Op::Max => run::<F, Max, PARTS>,
                    Op::Prod => run::<F, Prod, PARTS>,
                }
            }

            if dtype.is_integer() && op == Op::Avg {
                return None;
            }
            Some(match dtype {
                Dtype::F32 => select_op::<F32Lanes<$isa>, 1>(op),
                Dtype::F64 => select_op::<F64Lanes<$isa>, 1>(op),
                Dtype::F16 => select_op::<F16Lanes<$isa>, 2>(op),
                Dtype::Bf16 => select_op::<Bf16Lanes<$isa>, 2>(op),
                Dtype::I32 => select_op::<I32Lanes<$isa>, 1>(op),
                Dtype::I64 => select_op::<I64Lanes<$isa>, 1>(op),
            })
        }
    };
}

kernels!(select_avx2, avx2::Avx2, "avx2,f16c");
kernels!(
    select_avx512,
    avx512::Avx512,
    "avx512f,avx512bw,avx512vl,avx512dq"
);
