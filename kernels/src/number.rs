//! What the numeric rules mean for one value.
//!
//! Owns the arithmetic of the accumulators ([`Number`]) and the conversions between elements and
//! accumulators ([`Element`]). Called by [`reference`](mod@crate::reference) and by the scalar loop. Refuses
//! anything clever: this is what the SIMD code is held against.

/// An accumulator: f32, f64, i32 or i64. Sealed.
pub trait Number: Copy + Default + sealed::Sealed {
    /// The sum; integers wrap.
    fn add(self, other: Self) -> Self;

    /// The product; integers wrap.
    fn mul(self, other: Self) -> Self;

    /// IEEE-754-2019 `minimum`: NaN propagates, -0 is below +0.
    fn minimum(self, other: Self) -> Self;

    /// IEEE-754-2019 `maximum`: NaN propagates, +0 is above -0.
    fn maximum(self, other: Self) -> Self;

    /// The value, any NaN made the one with a clear sign and only the top mantissa bit set.
    fn canonical(self) -> Self;

    /// 1/world_size, rounded to this type; 1 for integers, which have no average.
    fn reciprocal(world_size: usize) -> Self;
}

macro_rules! float_number {
    ($float:ty, $canonical_nan:literal) => {
        impl Number for $float {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    Self::NAN
                } else if self.total_cmp(&other).is_lt() {
                    self
                } else {
                    other
                }
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    Self::NAN
                } else if self.total_cmp(&other).is_gt() {
                    self
                } else {
                    other
                }
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() {
                    Self::from_bits($canonical_nan)
                } else {
                    self
                }
            }

            #[inline(always)]
            fn reciprocal(world_size: usize) -> Self {
                1.0 / world_size as Self
            }
        }
    };
}

float_number!(f32, 0x7fc0_0000);
float_number!(f64, 0x7ff8_0000_0000_0000);

macro_rules! integer_number {
    ($integer:ty) => {
        impl Number for $integer {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }

            #[inline(always)]
            fn reciprocal(_world_size: usize) -> Self {
                1
            }
        }
    };
}

integer_number!(i32);
integer_number!(i64);

/// The bits of an IEEE-754 binary16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The bits of a bfloat16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An element of a tensor: one type for each [`Dtype`](allreduce_contract::Dtype). Sealed.
pub trait Element: Copy + sealed::Sealed {
    /// What it is accumulated in.
    type Accumulator: Number;

    /// The element as an accumulator, exactly (a NaN stays some NaN).
    fn widen(self) -> Self::Accumulator;

    /// The accumulator rounded once, to nearest even; any NaN becomes the canonical one.
    fn narrow(accumulator: Self::Accumulator) -> Self;

    /// The elements held by `bytes`, native-endian; a last part that is no whole element is dropped.
    fn decode(bytes: &[u8]) -> Vec<Self>;

    /// The bytes of `elements`, native-endian.
    fn encode(elements: &[Self]) -> Vec<u8>;
}

macro_rules! element {
    ($element:ty as $bits:ty, $to_bits:expr, $from_bits:expr, $accumulator:ty, $widen:expr, $narrow:expr) => {
        impl sealed::Sealed for $element {}

        impl Element for $element {
            type Accumulator = $accumulator;

            #[inline(always)]
            fn widen(self) -> $accumulator {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(accumulator: $accumulator) -> Self {
                $narrow(accumulator.canonical())
            }

            fn decode(bytes: &[u8]) -> Vec<Self> {
                let (elements, _rest) = bytes.as_chunks();
                elements
                    .iter()
                    .map(|element| $from_bits(<$bits>::from_ne_bytes(*element)))
                    .collect()
            }

            fn encode(elements: &[Self]) -> Vec<u8> {
                elements
                    .iter()
                    .flat_map(|element| <$bits>::to_ne_bytes($to_bits(*element)))
                    .collect()
            }
        }
    };
    ($number:ty as $bits:ty, $to_bits:expr, $from_bits:expr) => {
        element!(
            $number as $bits,
            $to_bits,
            $from_bits,
            $number,
            std::convert::identity,
            std::convert::identity
        );
    };
}

element!(f32 as u32, f32::to_bits, f32::from_bits);
element!(f64 as u64, f64::to_bits, f64::from_bits);
element!(i32 as i32, std::convert::identity, std::convert::identity);
element!(i64 as i64, std::convert::identity, std::convert::identity);
element!(F16 as u16, |f: F16| f.0, F16, f32, f16_to_f32, f32_to_f16);
element!(
    Bf16 as u16,
    |b: Bf16| b.0,
    Bf16,
    f32,
    bf16_to_f32,
    f32_to_bf16
);

#[inline(always)]
fn bf16_to_f32(element: Bf16) -> f32 {
    f32::from_bits(u32::from(element.0) << 16)
}

/// Expects a canonical NaN: the rounding would carry other NaNs into the exponent and the sign.
#[inline(always)]
fn f32_to_bf16(canonical: f32) -> Bf16 {
    let bits = canonical.to_bits();
    // Half of the last kept bit, less one where that bit is even: a tie goes to even.
    let rounded = bits + 0x7fff + (bits >> 16 & 1);
    Bf16((rounded >> 16) as u16)
}

/// 2^-24, the smallest positive binary16 and the unit of its subnormals.
const F16_UNIT: f32 = 1.0 / 16_777_216.0;

#[inline(always)]
fn f16_to_f32(element: F16) -> f32 {
    let sign = u32::from(element.0 & 0x8000) << 16;
    let exponent = element.0 >> 10 & 0x1f;
    let mantissa = element.0 & 0x3ff;
    let magnitude = match exponent {
        0 => (f32::from(mantissa) * F16_UNIT).to_bits(),
        // Infinity and NaN: exponent all ones in binary32 too.
        31 => 0x7f80_0000 | u32::from(mantissa) << 13,
        // Same mantissa; the exponent's bias goes from 15 to 127.
        _ => (u32::from(exponent) + 112) << 23 | u32::from(mantissa) << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// Expects a canonical NaN, whose upper mantissa bits are those of the canonical binary16.
#[inline(always)]
fn f32_to_f16(canonical: f32) -> F16 {
    let sign = (canonical.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = canonical.abs();
    let bits = magnitude.to_bits();
    let narrowed = if magnitude.is_nan() {
        0x7e00
    } else if magnitude >= 65_520.0 {
        // From half-way between the largest finite value, 65504, and 2^16 on: infinity.
        0x7c00
    } else if magnitude < 1024.0 * F16_UNIT {
        // Subnormal: a count of units. 0.5 has a last place of one unit, so adding it rounds to
        // whole units and leaves their number in the mantissa's low bits.
        ((magnitude + 0.5).to_bits() - 0.5f32.to_bits()) as u16
    } else {
        // As for bfloat16, with 13 bits dropped; then the exponent's bias goes from 127 to 15.
        let rounded = bits + 0xfff + (bits >> 13 & 1);
        ((rounded >> 13) - (112 << 10)) as u16
    };
    F16(sign | narrowed)
}

mod sealed {
    pub trait Sealed {}
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp)]

    use super::*;

    fn same_f16(bits: u32) {
        let value = f32::from_bits(bits);
        let expected = if value.is_nan() {
            0x7e00
        } else {
            half::f16::from_f32(value).to_bits()
        };
        assert_eq!(F16::narrow(value).0, expected, "{bits:#x}");
    }

    fn same_bf16(bits: u32) {
        let value = f32::from_bits(bits);
        let expected = if value.is_nan() {
            0x7fc0
        } else {
            half::bf16::from_f32(value).to_bits()
        };
        assert_eq!(Bf16::narrow(value).0, expected, "{bits:#x}");
    }

    #[test]
    fn every_f16_and_bf16_widens_as_half_does_and_comes_back() {
        for bits in 0..=u16::MAX {
            let f16 = half::f16::from_bits(bits);
            let widened = F16(bits).widen();
            assert_eq!(widened.is_nan(), f16.is_nan(), "{bits:#x}");
            if !f16.is_nan() {
                assert_eq!(widened.to_bits(), f16.to_f32().to_bits(), "{bits:#x}");
                assert_eq!(F16::narrow(widened), F16(bits));
            }
            let bf16 = half::bf16::from_bits(bits);
            let widened = Bf16(bits).widen();
            assert_eq!(widened.is_nan(), bf16.is_nan(), "{bits:#x}");
            if !bf16.is_nan() {
                assert_eq!(widened.to_bits(), bf16.to_f32().to_bits(), "{bits:#x}");
                assert_eq!(Bf16::narrow(widened), Bf16(bits));
            }
        }
    }

    /// Each representable value, each midpoint between two, and the f32 next to each of those.
    #[test]
    fn narrowing_agrees_with_half_around_every_value_and_every_midpoint() {
        for upper in 0..=u16::MAX {
            let base = u32::from(upper) << 16;
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                same_bf16(base | low);
            }
            let widened = F16(upper).widen().to_bits();
            // Half a unit in the last place of a normal f16, and of each size of subnormal.
            for shift in 0..=13 {
                let middle = widened ^ (0x1000 << shift & 0x7f_ffff);
                for bits in [widened, middle] {
                    same_f16(bits.wrapping_sub(1));
                    same_f16(bits);
                    same_f16(bits.wrapping_add(1));
                }
            }
        }
    }

    #[test]
    fn minimum_and_maximum_order_zeros_and_keep_nan() {
        fn check<N: Number + Into<f64>>(zero: N, minus_zero: N, one: N, nan: N) {
            let negative = |n: N| n.into().is_sign_negative();
            for (a, b) in [(zero, minus_zero), (minus_zero, zero)] {
                assert!(negative(a.minimum(b)));
                assert!(!negative(a.maximum(b)));
            }
            for (a, b) in [(nan, one), (one, nan), (nan, nan)] {
                assert!(a.minimum(b).into().is_nan());
                assert!(a.maximum(b).into().is_nan());
            }
            assert!(one.minimum(zero).into() == 0.0 && one.maximum(zero).into() == 1.0);
            assert!(zero.minimum(one).into() == 0.0 && zero.maximum(one).into() == 1.0);
        }
        check(0.0f32, -0.0, 1.0, f32::NAN);
        check(0.0f64, -0.0, 1.0, -f64::NAN);
    }

    #[test]
    fn a_nan_becomes_the_canonical_one() {
        for bits in [0x7f80_0001, 0xff80_0001, 0xffff_ffff, 0x7fff_ffff] {
            let nan = f32::from_bits(bits);
            assert_eq!(f32::narrow(nan).to_bits(), 0x7fc0_0000);
            assert_eq!(F16::narrow(nan).0, 0x7e00);
            assert_eq!(Bf16::narrow(nan).0, 0x7fc0);
        }
        let nan = f64::from_bits(0xfff0_0000_0000_0001);
        assert_eq!(f64::narrow(nan).to_bits(), 0x7ff8_0000_0000_0000);
    }
}
