//! Test data and the check of results.
//!
//! Owns the generator of every rank's input and the bound within which a result must lie of a reference
//! in f64. Independent of the reductions it checks: it shares no code with the kernels.
//!
//! The bound, for N inputs x and accumulator unit roundoff u_a (2^-24 for f32, f16 and bf16, 2^-53 for
//! f64) and result unit roundoff u_r: |got - ref| <= (N + 1) u_a S + u_r |ref| + tiny, S = sum |x| for
//! sum and avg (over N for avg), S = |ref| for prod (Higham, Accuracy and Stability of Numerical
//! Algorithms, section 4.2). min, max and integers must be equal.

use allreduce_client::{Element, bf16, f16};
use allreduce_contract::Op;

/// Which tensor: the same for all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorId {
    pub(crate) seed: u64,
    pub(crate) step: u64,
    pub(crate) reduction: u64,
}

/// Splitmix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl TensorId {
    /// The generator of one rank's tensor; element i comes from its output i.
    fn stream(self, rank: u32) -> u64 {
        let key = mix(self.seed ^ mix(self.step.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        mix(key ^ mix(self.reduction << 8 | u64::from(rank)))
    }
}

/// An element type that can be generated and checked.
pub(crate) trait Sample: Element {
    /// A value from 64 random bits: of either sign, and of a size that products of 16 of them survive.
    fn from_bits(bits: u64) -> Self;

    /// The reference for all ranks' values, and how far a result may be from it.
    fn reference(values: &[Self], op: Op) -> (Self::Wide, f64);

    /// What the reference is computed in.
    type Wide: Copy + PartialEq + std::fmt::Debug;

    /// Whether a result is within `bound` of the reference.
    fn is_close(self, reference: Self::Wide, bound: f64) -> bool;
}

fn float_reference(
    values: impl Iterator<Item = f64> + Clone,
    op: Op,
    u_acc: f64,
    u_result: f64,
    tiny: f64,
) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let acc = (count + 1.0) * u_acc;
    let bound = |reference: f64, scale: f64| acc * scale + u_result * reference.abs() + tiny;
    match op {
        Op::Sum | Op::Avg => {
            // Neumaier's compensated sum: also good enough a reference for f64 inputs.
            let (mut sum, mut lost) = (0.0_f64, 0.0_f64);
            for value in values.clone() {
                let next = sum + value;
                lost += if sum.abs() >= value.abs() {
                    (sum - next) + value
                } else {
                    (value - next) + sum
                };
                sum = next;
            }
            let divisor = if op == Op::Avg { count } else { 1.0 };
            let reference = (sum + lost) / divisor;
            let scale = values.map(f64::abs).sum::<f64>() / divisor;
            (reference, bound(reference, scale))
        }
        Op::Prod => {
            let reference: f64 = values.product();
            (reference, bound(reference, reference.abs()))
        }
        // The generator makes no NaN and no zero, on which f64's min and max would differ.
        Op::Min => (values.fold(f64::INFINITY, f64::min), 0.0),
        Op::Max => (values.fold(f64::NEG_INFINITY, f64::max), 0.0),
    }
}

/// A float of a binary format with `EXPONENT` and `MANTISSA` bits, from random bits: of either sign, its
/// size in [0.5, 1.5), so that sums cancel and products neither vanish nor overflow.
const fn float_bits(bits: u64, exponent_bits: u32, mantissa_bits: u32) -> u64 {
    let mut mantissa = bits & ((1 << mantissa_bits) - 1);
    let from_one = (bits >> 62) & 1;
    if from_one == 1 {
        // [1, 1.5) instead of [1, 2).
        mantissa &= (1 << (mantissa_bits - 1)) - 1;
    }
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = bias - 1 + from_one;
    let sign = bits >> 63;
    sign << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa
}

macro_rules! float_sample {
    ($type:ty, $from:expr, $to:expr, $u_acc:expr, $u_result:expr, $tiny:expr) => {
        impl Sample for $type {
            type Wide = f64;

            #[inline]
            fn from_bits(bits: u64) -> Self {
                let from: fn(u64) -> $type = $from;
                from(bits)
            }

            #[inline]
            fn reference(values: &[Self], op: Op) -> (f64, f64) {
                let to: fn($type) -> f64 = $to;
                let values = values.iter().map(|value| to(*value));
                float_reference(values, op, $u_acc, $u_result, $tiny)
            }

            #[inline]
            fn is_close(self, reference: f64, bound: f64) -> bool {
                let to: fn($type) -> f64 = $to;
                // False for NaN.
                (to(self) - reference).abs() <= bound
            }
        }
    };
}

const U_F64: f64 = 1.0 / (1_u64 << 53) as f64;
const U_F32: f64 = 1.0 / (1_u64 << 24) as f64;
const U_F16: f64 = 1.0 / (1_u64 << 11) as f64;
const U_BF16: f64 = 1.0 / (1_u64 << 8) as f64;

float_sample!(
    f64,
    |bits| f64::from_bits(float_bits(bits, 11, 52)),
    |x| x,
    U_F64,
    U_F64,
    f64::MIN_POSITIVE
);
float_sample!(
    f32,
    |bits| f32::from_bits(float_bits(bits, 8, 23) as u32),
    f64::from,
    U_F32,
    U_F32,
    f32::MIN_POSITIVE as f64
);
// Half the smallest subnormal of f16 is 2^-25.
float_sample!(
    f16,
    |bits| f16::from_bits(float_bits(bits, 5, 10) as u16),
    |x| f64::from(x.to_f32()),
    U_F32,
    U_F16,
    U_F32 / 2.0
);
float_sample!(
    bf16,
    |bits| bf16::from_bits(float_bits(bits, 8, 7) as u16),
    |x| f64::from(x.to_f32()),
    U_F32,
    U_BF16,
    f32::MIN_POSITIVE as f64
);

macro_rules! integer_sample {
    ($type:ty) => {
        impl Sample for $type {
            type Wide = $type;

            fn from_bits(bits: u64) -> Self {
                bits as $type
            }

            fn reference(values: &[Self], op: Op) -> ($type, f64) {
                let values = values.iter().copied();
                let reference = match op {
                    Op::Sum | Op::Avg => values.fold(0, <$type>::wrapping_add),
                    Op::Prod => values.fold(1, <$type>::wrapping_mul),
                    Op::Min => values.fold(<$type>::MAX, <$type>::min),
                    Op::Max => values.fold(<$type>::MIN, <$type>::max),
                };
                (reference, 0.0)
            }

            fn is_close(self, reference: $type, _bound: f64) -> bool {
                self == reference
            }
        }
    };
}

integer_sample!(i32);
integer_sample!(i64);

/// Fills a rank's tensor.
pub(crate) fn fill<T: Sample>(tensor: &mut [T], id: TensorId, rank: u32) {
    let stream = id.stream(rank);
    for (index, value) in (0_u64..).zip(tensor) {
        *value = T::from_bits(mix(
            stream.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        ));
    }
}

/// How many elements of a result are not within the bound of the reference.
pub(crate) fn wrong_elements<T: Sample>(
    result: &[T],
    id: TensorId,
    world_size: u32,
    op: Op,
) -> usize {
    let streams: Vec<u64> = (0..world_size).map(|rank| id.stream(rank)).collect();
    let mut values = Vec::with_capacity(streams.len());
    let mut wrong = 0;
    for (index, got) in (0_u64..).zip(result) {
        let offset = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        values.clear();
        values.extend(
            streams
                .iter()
                .map(|stream| T::from_bits(mix(stream.wrapping_add(offset)))),
        );
        let (reference, bound) = T::reference(&values, op);
        wrong += usize::from(!got.is_close(reference, bound));
    }
    wrong
}

/// A hash of a result's bits, to compare ranks by. Each step is a bijection of the hash so far and, for a
/// given hash so far, of the element: results that differ in one element never have the same hash.
pub(crate) fn fingerprint<T: BitsOf>(result: &[T]) -> u64 {
    result.iter().fold(0, |hash: u64, value| {
        (hash.rotate_left(5) ^ value.bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

/// The bits of an element.
pub(crate) trait BitsOf: Copy {
    /// Zero-extended.
    fn bits(self) -> u64;
}

macro_rules! bits_of {
    ($($type:ty: $bits:expr),+) => {
        $(impl BitsOf for $type {
            fn bits(self) -> u64 {
                let bits: fn($type) -> u64 = $bits;
                bits(self)
            }
        })+
    };
}

bits_of!(
    f64: f64::to_bits,
    f32: |x| u64::from(x.to_bits()),
    f16: |x| u64::from(x.to_bits()),
    bf16: |x| u64::from(x.to_bits()),
    i32: |x| u64::from(x.cast_unsigned()),
    i64: i64::cast_unsigned
);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use allreduce_contract::Dtype;
    use allreduce_kernels::reference::reduce_bytes;

    const ID: TensorId = TensorId {
        seed: 1,
        step: 2,
        reduction: 3,
    };

    fn bytes_of<T: Sample + BitsOf>(values: &[T]) -> Vec<u8> {
        let width = size_of::<T>();
        let bytes = |value: &T| value.bits().to_le_bytes()[..width].to_vec();
        values.iter().flat_map(bytes).collect()
    }

    /// What the kernels' scalar reference gives is accepted; one bit away in the accumulated result is
    /// not, wherever the bound is tighter than a bit.
    fn check<T: Sample + BitsOf>(read: fn(&[u8]) -> T) {
        for world_size in [1, 2, 3, 8, 16] {
            for op in Op::ALL {
                if op == Op::Avg && T::DTYPE.is_integer() {
                    continue;
                }
                let inputs: Vec<Vec<u8>> = (0..world_size)
                    .map(|rank| {
                        let mut tensor = vec![T::from_bits(0); 500];
                        fill(&mut tensor, ID, rank);
                        bytes_of(&tensor)
                    })
                    .collect();
                let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                let result = reduce_bytes(T::DTYPE, op, &inputs).unwrap();
                let mut result: Vec<T> = result.chunks(size_of::<T>()).map(read).collect();
                let what = format!("{} {op} {world_size}", T::DTYPE);
                assert_eq!(wrong_elements(&result, ID, world_size, op), 0, "{what}");
                let before = fingerprint(&result);
                result.swap(3, 4);
                assert_ne!(before, fingerprint(&result), "{what}");
                assert_eq!(wrong_elements(&result, ID, world_size, op), 2, "{what}");
            }
        }
    }

    #[test]
    fn right_results_pass_and_wrong_ones_do_not() {
        check::<f32>(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        check::<f64>(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()));
        check::<i32>(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()));
        check::<i64>(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()));
        check::<f16>(|bytes| f16::from_le_bytes(bytes.try_into().unwrap()));
        check::<bf16>(|bytes| bf16::from_le_bytes(bytes.try_into().unwrap()));
        assert_eq!(Dtype::ALL.len(), 6);
    }

    #[test]
    fn samples_have_both_signs_and_sizes_around_one() {
        fn sizes<T: Sample>(to: fn(T) -> f64) -> Vec<f64> {
            let mut tensor = vec![T::from_bits(0); 2000];
            fill(&mut tensor, ID, 0);
            tensor.into_iter().map(to).collect()
        }
        for values in [
            sizes::<f64>(|x| x),
            sizes::<f32>(f64::from),
            sizes::<f16>(f64::from),
            sizes::<bf16>(f64::from),
        ] {
            assert!(values.iter().all(|x| (0.5..1.5).contains(&x.abs())));
            let below_one = values.iter().filter(|x| x.abs() < 1.0).count();
            let negative = values.iter().filter(|x| **x < 0.0).count();
            assert!((800..1200).contains(&below_one), "{below_one}");
            assert!((800..1200).contains(&negative), "{negative}");
        }
    }

    #[test]
    fn one_flipped_bit_changes_the_fingerprint() {
        let result = [1.0_f32, 2.0, 3.0];
        for index in 0..3 {
            for bit in 0..32 {
                let mut other = result;
                other[index] = f32::from_bits(other[index].to_bits() ^ (1 << bit));
                assert_ne!(fingerprint(&result), fingerprint(&other), "{index} {bit}");
            }
        }
    }

    #[test]
    fn nan_is_never_right() {
        assert_eq!(wrong_elements(&[f32::NAN], ID, 2, Op::Sum), 1);
        assert_eq!(wrong_elements(&[f32::INFINITY], ID, 2, Op::Max), 1);
    }
}
