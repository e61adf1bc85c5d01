//! AVX-512 F, BW, VL and DQ: 512-bit registers.
//!
//! Owns the mapping of [`Isa`] to intrinsics. Called through that trait. Refuses fused
//! multiply-add, which rounds differently, and the bf16 conversions, which flush subnormals.

use std::arch::x86_64::*;

use super::isa::{Isa, compute};

/// Proof that the CPU has AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// Safe to call only where the features are enabled, so the token proves them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) fn new() -> Self {
        Avx512(())
    }
}

type Register = __m512i;

/// The operand as f32 lanes.
macro_rules! ps {
    ($register:expr) => {
        _mm512_castsi512_ps($register)
    };
}

/// The operand as f64 lanes.
macro_rules! pd {
    ($register:expr) => {
        _mm512_castsi512_pd($register)
    };
}

/// To nearest even, raising no exception.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Isa for Avx512 {
    type Register = Register;

    const BYTES: usize = 64;

    compute! {
        fn zero() -> Register { _mm512_setzero_si512() }
        fn splat_32(bits: u32) -> Register { _mm512_set1_epi32(bits.cast_signed()) }
        fn splat_64(bits: u64) -> Register { _mm512_set1_epi64(bits.cast_signed()) }

        fn or(a: Register, b: Register) -> Register { _mm512_or_si512(a, b) }
        fn xor(a: Register, b: Register) -> Register { _mm512_xor_si512(a, b) }
        fn and(a: Register, b: Register) -> Register { _mm512_and_si512(a, b) }
        fn shift_up_16(a: Register) -> Register { _mm512_slli_epi32::<16>(a) }
        fn shift_down_16(a: Register) -> Register { _mm512_srli_epi32::<16>(a) }
        fn blend_halves(lower: Register, upper: Register) -> Register {
            _mm512_mask_blend_epi16(0xaaaa_aaaa, lower, upper)
        }

        fn add_f32(a: Register, b: Register) -> Register {
            _mm512_castps_si512(_mm512_add_ps(ps!(a), ps!(b)))
        }
        fn mul_f32(a: Register, b: Register) -> Register {
            _mm512_castps_si512(_mm512_mul_ps(ps!(a), ps!(b)))
        }
        fn lesser_f32(a: Register, b: Register) -> Register {
            _mm512_castps_si512(_mm512_min_ps(ps!(a), ps!(b)))
        }
        fn replace_nan_f32(a: Register, instead: Register) -> Register {
            _mm512_mask_mov_epi32(a, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(ps!(a), ps!(a)), instead)
        }
        fn has_nan_f32(a: Register, b: Register) -> bool {
            _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(ps!(a), ps!(b)) != 0
        }

        fn add_f64(a: Register, b: Register) -> Register {
            _mm512_castpd_si512(_mm512_add_pd(pd!(a), pd!(b)))
        }
        fn mul_f64(a: Register, b: Register) -> Register {
            _mm512_castpd_si512(_mm512_mul_pd(pd!(a), pd!(b)))
        }
        fn lesser_f64(a: Register, b: Register) -> Register {
            _mm512_castpd_si512(_mm512_min_pd(pd!(a), pd!(b)))
        }
        fn replace_nan_f64(a: Register, instead: Register) -> Register {
            _mm512_mask_mov_epi64(a, _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(pd!(a), pd!(a)), instead)
        }

        fn add_i32(a: Register, b: Register) -> Register { _mm512_add_epi32(a, b) }
        fn mul_i32(a: Register, b: Register) -> Register { _mm512_mullo_epi32(a, b) }
        fn min_i32(a: Register, b: Register) -> Register { _mm512_min_epi32(a, b) }
        fn max_i32(a: Register, b: Register) -> Register { _mm512_max_epi32(a, b) }

        fn add_i64(a: Register, b: Register) -> Register { _mm512_add_epi64(a, b) }
        fn mul_i64(a: Register, b: Register) -> Register { _mm512_mullo_epi64(a, b) }
        fn min_i64(a: Register, b: Register) -> Register { _mm512_min_epi64(a, b) }
        fn max_i64(a: Register, b: Register) -> Register { _mm512_max_epi64(a, b) }

        fn widen_f16(a: Register) -> [Register; 2] {
            [
                _mm512_castps_si512(_mm512_cvtph_ps(_mm512_castsi512_si256(a))),
                _mm512_castps_si512(_mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(a))),
            ]
        }
        fn narrow_f16(halves: [Register; 2]) -> Register {{
            let [lower, upper] = halves;
            _mm512_inserti64x4::<1>(
                _mm512_castsi256_si512(_mm512_cvtps_ph::<NEAREST>(ps!(lower))),
                _mm512_cvtps_ph::<NEAREST>(ps!(upper)),
            )
        }}

        fn fence() -> () { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> Register {
        // SAFETY: the caller gives 64 readable bytes; the token proves the features.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8, register: Register) {
        // SAFETY: the caller gives 64 writable bytes; the token proves the features.
        unsafe { _mm512_storeu_si512(to.cast(), register) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8, register: Register) {
        // SAFETY: the caller gives 64 writable bytes, aligned to 64; the token proves the features.
        unsafe { _mm512_stream_si512(to.cast(), register) }
    }

    #[inline(always)]
    unsafe fn load_partial(self, from: *const u8, len_bytes: usize) -> Register {
        // SAFETY: only the first len_bytes bytes are touched, which the caller gives; the token
        // proves the features.
        unsafe { _mm512_maskz_loadu_epi8(first_bytes(len_bytes), from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_partial(self, to: *mut u8, register: Register, len_bytes: usize) {
        // SAFETY: as for load_partial, with stores.
        unsafe { _mm512_mask_storeu_epi8(to.cast(), first_bytes(len_bytes), register) }
    }
}

/// A mask of the first `len_bytes` bytes; less than 64.
#[inline(always)]
fn first_bytes(len_bytes: usize) -> __mmask64 {
    (1 << len_bytes) - 1
}
