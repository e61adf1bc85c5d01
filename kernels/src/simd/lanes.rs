//! Registers as accumulators.
//!
//! Owns the numeric rules in terms of registers, and how a register of each element type becomes
//! accumulators and back. Called by the loop. Refuses memory, and needs no unsafe code.

use crate::arithmetic::Arithmetic;

use super::isa::Isa;

/// How a register of elements is accumulated: as `PARTS` registers.
pub(super) trait Format<I: Isa, const PARTS: usize> {
    /// The arithmetic of the accumulators.
    fn arithmetic(isa: I) -> impl Arithmetic<Value = I::Register>;

    /// A register of elements as accumulators, exactly.
    fn widen(isa: I, register: I::Register) -> [I::Register; PARTS];

    /// The inverse: rounds to nearest even, and makes any NaN the canonical one.
    fn narrow(isa: I, accumulators: [I::Register; PARTS]) -> I::Register;
}

/// An element type that is its own accumulator; floating point names its canonical NaN.
macro_rules! own_accumulator {
    ($lanes:ident $(, $replace_nan:ident, $splat:ident, $nan:literal)?) => {
        #[derive(Clone, Copy)]
        pub(super) struct $lanes<I>(I);

        impl<I: Isa> Format<I, 1> for $lanes<I> {
            #[inline(always)]
            fn arithmetic(isa: I) -> impl Arithmetic<Value = I::Register> {
                $lanes(isa)
            }

            #[inline(always)]
            fn widen(_isa: I, register: I::Register) -> [I::Register; 1] {
                [register]
            }

            #[inline(always)]
            fn narrow(_isa: I, [accumulator]: [I::Register; 1]) -> I::Register {
                $(let accumulator = _isa.$replace_nan(accumulator, _isa.$splat($nan));)?
                accumulator
            }
        }
    };
}

own_accumulator!(F32Lanes, replace_nan_f32, splat_32, 0x7fc0_0000);
own_accumulator!(F64Lanes, replace_nan_f64, splat_64, 0x7ff8_0000_0000_0000);
own_accumulator!(I32Lanes);
own_accumulator!(I64Lanes);

macro_rules! float_arithmetic {
    (
        $lanes:ident, $float:ty, $splat:ident, $add:ident, $mul:ident, $lesser:ident,
        sign: $sign:expr
    ) => {
        impl<I: Isa> Arithmetic for $lanes<I> {
            type Value = I::Register;

            #[inline(always)]
            fn add(self, left: I::Register, right: I::Register) -> I::Register {
                self.0.$add(left, right)
            }

            #[inline(always)]
            fn mul(self, left: I::Register, right: I::Register) -> I::Register {
                self.0.$mul(left, right)
            }

            /// The hardware gives its second operand for two zeros and for a NaN, so asking both ways
            /// round gives both operands: their union is -0 if either is, and a NaN if either is.
            /// Otherwise both ways give the same bits.
            #[inline(always)]
            fn minimum(self, left: I::Register, right: I::Register) -> I::Register {
                let isa = self.0;
                isa.or(isa.$lesser(left, right), isa.$lesser(right, left))
            }

            /// The negated minimum of the negated operands.
            #[inline(always)]
            fn maximum(self, left: I::Register, right: I::Register) -> I::Register {
                let isa = self.0;
                let sign = isa.$splat($sign);
                isa.xor(
                    sign,
                    self.minimum(isa.xor(sign, left), isa.xor(sign, right)),
                )
            }

            #[inline(always)]
            fn reciprocal(self, world_size: usize) -> I::Register {
                self.0.$splat((1.0 / world_size as $float).to_bits())
            }
        }
    };
}

float_arithmetic!(
    F32Lanes, f32, splat_32, add_f32, mul_f32, lesser_f32,
    sign: 1 << 31
);
float_arithmetic!(
    F64Lanes, f64, splat_64, add_f64, mul_f64, lesser_f64,
    sign: 1 << 63
);

macro_rules! integer_arithmetic {
    ($lanes:ident, $splat:ident, $add:ident, $mul:ident, $min:ident, $max:ident) => {
        impl<I: Isa> Arithmetic for $lanes<I> {
            type Value = I::Register;

            #[inline(always)]
            fn add(self, left: I::Register, right: I::Register) -> I::Register {
                self.0.$add(left, right)
            }

            #[inline(always)]
            fn mul(self, left: I::Register, right: I::Register) -> I::Register {
                self.0.$mul(left, right)
            }

            #[inline(always)]
            fn minimum(self, left: I::Register, right: I::Register) -> I::Register {
                self.0.$min(left, right)
            }

            #[inline(always)]
            fn maximum(self, left: I::Register, right: I::Register) -> I::Register {
                self.0.$max(left, right)
            }

            #[inline(always)]
            fn reciprocal(self, _world_size: usize) -> I::Register {
                self.0.$splat(1)
            }
        }
    };
}

integer_arithmetic!(I32Lanes, splat_32, add_i32, mul_i32, min_i32, max_i32);
integer_arithmetic!(I64Lanes, splat_64, add_i64, mul_i64, min_i64, max_i64);

/// Binary16: the register's lower and its upper half as f32.
pub(super) struct F16Lanes<I>(I);

impl<I: Isa> Format<I, 2> for F16Lanes<I> {
    #[inline(always)]
    fn arithmetic(isa: I) -> impl Arithmetic<Value = I::Register> {
        F32Lanes(isa)
    }

    #[inline(always)]
    fn widen(isa: I, register: I::Register) -> [I::Register; 2] {
        isa.widen_f16(register)
    }

    #[inline(always)]
    fn narrow(isa: I, accumulators: [I::Register; 2]) -> I::Register {
        isa.narrow_f16(canonical(isa, accumulators))
    }
}

/// Bfloat16: the even and the odd elements as f32, so that no element crosses a 32-bit lane.
pub(super) struct Bf16Lanes<I>(I);

impl<I: Isa> Format<I, 2> for Bf16Lanes<I> {
    #[inline(always)]
    fn arithmetic(isa: I) -> impl Arithmetic<Value = I::Register> {
        F32Lanes(isa)
    }

    #[inline(always)]
    fn widen(isa: I, register: I::Register) -> [I::Register; 2] {
        let even = isa.shift_up_16(register);
        let odd = isa.and(register, isa.splat_32(0xffff_0000));
        [even, odd]
    }

    #[inline(always)]
    fn narrow(isa: I, accumulators: [I::Register; 2]) -> I::Register {
        let [even, odd] = canonical(isa, accumulators);
        let (even, odd) = (round_upper_half(isa, even), round_upper_half(isa, odd));
        isa.blend_halves(isa.shift_down_16(even), odd)
    }
}

/// The f32 lanes, any NaN made the canonical one. NaNs are rare, and looking for one is cheaper than
/// replacing none.
#[inline(always)]
fn canonical<I: Isa>(isa: I, [left, right]: [I::Register; 2]) -> [I::Register; 2] {
    if !isa.has_nan_f32(left, right) {
        return [left, right];
    }
    let nan = isa.splat_32(0x7fc0_0000);
    [
        isa.replace_nan_f32(left, nan),
        isa.replace_nan_f32(right, nan),
    ]
}

/// Each 32-bit lane rounded to its upper half, to nearest even. The lower half is left over.
#[inline(always)]
fn round_upper_half<I: Isa>(isa: I, register: I::Register) -> I::Register {
    // Half of the last kept bit, less one where that bit is even: a tie goes to even.
    let last_kept = isa.and(isa.shift_down_16(register), isa.splat_32(1));
    isa.add_i32(isa.add_i32(register, isa.splat_32(0x7fff)), last_kept)
}
