//! The operators, written once for every way of holding values.
//!
//! Owns the mapping from an operator to the steps it takes. Called by the scalar loop and the SIMD
//! loop, which differ only in their [`Arithmetic`]: one value, or a register of them. Refuses to
//! know about element types, memory and ranks.

/// Arithmetic on one accumulator, or on a register of them lane by lane.
///
/// Implementors are zero-sized tokens, so that an instruction set's token can prove that the CPU has it.
pub(crate) trait Arithmetic: Copy {
    /// One accumulator, or a register full.
    type Value: Copy;

    /// The sum; integers wrap.
    fn add(self, left: Self::Value, right: Self::Value) -> Self::Value;

    /// The product; integers wrap.
    fn mul(self, left: Self::Value, right: Self::Value) -> Self::Value;

    /// IEEE-754-2019 `minimum`, up to a NaN's payload and sign.
    fn minimum(self, left: Self::Value, right: Self::Value) -> Self::Value;

    /// IEEE-754-2019 `maximum`, up to a NaN's payload and sign.
    fn maximum(self, left: Self::Value, right: Self::Value) -> Self::Value;

    /// 1/world_size rounded to the accumulator's type. Integers have no average, are refused one
    /// before a kernel is chosen, and give 1 here.
    fn reciprocal(self, world_size: usize) -> Self::Value;
}

/// One reduction operator.
pub(crate) trait Operator {
    /// Whether the reduced value is multiplied by 1/world_size.
    const AVERAGES: bool = false;

    /// Takes one more rank's value into the accumulator.
    fn combine<A: Arithmetic>(a: A, accumulator: A::Value, value: A::Value) -> A::Value;

    /// What follows the last rank: the average's factor.
    #[inline(always)]
    fn finish<A: Arithmetic>(a: A, accumulator: A::Value, reciprocal: A::Value) -> A::Value {
        if Self::AVERAGES {
            a.mul(accumulator, reciprocal)
        } else {
            accumulator
        }
    }
}

macro_rules! operator {
    ($name:ident, $step:ident $(, averages: $averages:literal)?) => {
        pub(crate) struct $name;

        impl Operator for $name {
            $(const AVERAGES: bool = $averages;)?

            #[inline(always)]
            fn combine<A: Arithmetic>(a: A, accumulator: A::Value, value: A::Value) -> A::Value {
                a.$step(accumulator, value)
            }
        }
    };
}

operator!(Sum, add);
operator!(Avg, add, averages: true);
operator!(Min, minimum);
operator!(Max, maximum);
operator!(Prod, mul);
