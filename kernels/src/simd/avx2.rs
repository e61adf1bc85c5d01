//! AVX2 and F16C: 256-bit registers.
//!
//! Owns the mapping of [`Isa`] to intrinsics. Called through that trait. Refuses fused
//! multiply-add, which rounds differently.

use std::arch::x86_64::*;

use super::isa::{Isa, compute};

/// Proof that the CPU has AVX2 and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// Safe to call only where the features are enabled, so the token proves them.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn new() -> Self {
        Avx2(())
    }
}

type Register = __m256i;

/// The first operand as f32 lanes.
macro_rules! ps {
    ($register:expr) => {
        _mm256_castsi256_ps($register)
    };
}

/// The first operand as f64 lanes.
macro_rules! pd {
    ($register:expr) => {
        _mm256_castsi256_pd($register)
    };
}

impl Isa for Avx2 {
    type Register = Register;

    const BYTES: usize = 32;

    compute! {
        fn zero() -> Register { _mm256_setzero_si256() }
        fn splat_32(bits: u32) -> Register { _mm256_set1_epi32(bits.cast_signed()) }
        fn splat_64(bits: u64) -> Register { _mm256_set1_epi64x(bits.cast_signed()) }

        fn or(a: Register, b: Register) -> Register { _mm256_or_si256(a, b) }
        fn xor(a: Register, b: Register) -> Register { _mm256_xor_si256(a, b) }
        fn and(a: Register, b: Register) -> Register { _mm256_and_si256(a, b) }
        fn shift_up_16(a: Register) -> Register { _mm256_slli_epi32::<16>(a) }
        fn shift_down_16(a: Register) -> Register { _mm256_srli_epi32::<16>(a) }
        fn blend_halves(lower: Register, upper: Register) -> Register {
            _mm256_blend_epi16::<0b1010_1010>(lower, upper)
        }

        fn add_f32(a: Register, b: Register) -> Register {
            _mm256_castps_si256(_mm256_add_ps(ps!(a), ps!(b)))
        }
        fn mul_f32(a: Register, b: Register) -> Register {
            _mm256_castps_si256(_mm256_mul_ps(ps!(a), ps!(b)))
        }
        fn lesser_f32(a: Register, b: Register) -> Register {
            _mm256_castps_si256(_mm256_min_ps(ps!(a), ps!(b)))
        }
        fn replace_nan_f32(a: Register, instead: Register) -> Register {
            _mm256_castps_si256(_mm256_blendv_ps(
                ps!(a),
                ps!(instead),
                _mm256_cmp_ps::<_CMP_UNORD_Q>(ps!(a), ps!(a)),
            ))
        }
        fn has_nan_f32(a: Register, b: Register) -> bool {
            _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(ps!(a), ps!(b))) != 0
        }

        fn add_f64(a: Register, b: Register) -> Register {
            _mm256_castpd_si256(_mm256_add_pd(pd!(a), pd!(b)))
        }
        fn mul_f64(a: Register, b: Register) -> Register {
            _mm256_castpd_si256(_mm256_mul_pd(pd!(a), pd!(b)))
        }
        fn lesser_f64(a: Register, b: Register) -> Register {
            _mm256_castpd_si256(_mm256_min_pd(pd!(a), pd!(b)))
        }
        fn replace_nan_f64(a: Register, instead: Register) -> Register {
            _mm256_castpd_si256(_mm256_blendv_pd(
                pd!(a),
                pd!(instead),
                _mm256_cmp_pd::<_CMP_UNORD_Q>(pd!(a), pd!(a)),
            ))
        }

        fn add_i32(a: Register, b: Register) -> Register { _mm256_add_epi32(a, b) }
        fn mul_i32(a: Register, b: Register) -> Register { _mm256_mullo_epi32(a, b) }
        fn min_i32(a: Register, b: Register) -> Register { _mm256_min_epi32(a, b) }
        fn max_i32(a: Register, b: Register) -> Register { _mm256_max_epi32(a, b) }

        fn add_i64(a: Register, b: Register) -> Register { _mm256_add_epi64(a, b) }
        // AVX2 has no 64-bit product: the low halves' product, plus the crossed ones' low halves
        // 32 bits up; the high halves' product is beyond bit 63.
        fn mul_i64(a: Register, b: Register) -> Register {{
            let a_high = _mm256_srli_epi64::<32>(a);
            let b_high = _mm256_srli_epi64::<32>(b);
            let crossed = _mm256_add_epi64(_mm256_mul_epu32(a_high, b), _mm256_mul_epu32(a, b_high));
            _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64::<32>(crossed))
        }}
        fn min_i64(a: Register, b: Register) -> Register {
            _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b))
        }
        fn max_i64(a: Register, b: Register) -> Register {
            _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi64(a, b))
        }

        fn widen_f16(a: Register) -> [Register; 2] {
            [
                _mm256_castps_si256(_mm256_cvtph_ps(_mm256_castsi256_si128(a))),
                _mm256_castps_si256(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(a))),
            ]
        }
        fn narrow_f16(halves: [Register; 2]) -> Register {{
            let [lower, upper] = halves;
            _mm256_set_m128i(
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(ps!(upper)),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(ps!(lower)),
            )
        }}

        fn fence() -> () { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> Register {
        // SAFETY: the caller gives 32 readable bytes; the token proves the features.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8, register: Register) {
        // SAFETY: the caller gives 32 writable bytes; the token proves the features.
        unsafe { _mm256_storeu_si256(to.cast(), register) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8, register: Register) {
        // SAFETY: the caller gives 32 writable bytes, aligned to 32; the token proves the features.
        unsafe { _mm256_stream_si256(to.cast(), register) }
    }

    #[inline(always)]
    unsafe fn load_partial(self, from: *const u8, len_bytes: usize) -> Register {
        // SAFETY: the masked load touches only the whole 32-bit words within len_bytes; the 16-bit
        // load that may remain is within it and aligned, as len_bytes and the address are even.
        // The token proves the features.
        unsafe {
            let words = _mm256_maskload_epi32(from.cast(), first_words(len_bytes / 4));
            if len_bytes.is_multiple_of(4) {
                return words;
            }
            let last = from.add(len_bytes - 2).cast::<u16>().read();
            let last_word =
                _mm256_cmpeq_epi32(word_indices(), _mm256_set1_epi32((len_bytes / 4) as i32));
            _mm256_or_si256(
                words,
                _mm256_and_si256(last_word, _mm256_set1_epi32(i32::from(last))),
            )
        }
    }

    #[inline(always)]
    unsafe fn store_partial(self, to: *mut u8, register: Register, len_bytes: usize) {
        // SAFETY: as for load_partial, with stores. `lanes` is local, and holds the whole register.
        unsafe {
            _mm256_maskstore_epi32(to.cast(), first_words(len_bytes / 4), register);
            if !len_bytes.is_multiple_of(4) {
                let lanes = [register];
                let last = lanes.as_ptr().cast::<u16>().add(len_bytes / 2 - 1).read();
                to.add(len_bytes - 2).cast::<u16>().write(last);
            }
        }
    }
}

/// The number of each 32-bit lane.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn word_indices() -> Register {
    // SAFETY: no memory is touched; the features are the caller's.
    unsafe { _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7) }
}

/// All ones in the first `count` 32-bit lanes, zeros in the others.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn first_words(count: usize) -> Register {
    // SAFETY: no memory is touched; the features are the caller's.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), word_indices()) }
}
