//! Tensors as bytes: data that hits the special values, and the way from bytes to elements and back.
//!
//! Owns the test data. It is a function of (dtype, seed, rank, index), so that any process can make any
//! rank's tensor.

use allreduce_client::blocking::Communicator;
use allreduce_client::{AllReduceOptions, Dtype, Element, Op, Reduction, bf16, f16};
use allreduce_kernels::reference::reduce_bytes;

/// An element that comes from bytes and goes to bytes, every bit kept.
pub trait Bits: Element {
    fn of(bytes: &[u8]) -> Self;
    fn put(self, bytes: &mut Vec<u8>);
}

macro_rules! bits {
    ($($type:ty),+) => {
        $(impl Bits for $type {
            fn of(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().unwrap())
            }

            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_ne_bytes());
            }
        })+
    };
}

bits!(f32, f64, f16, bf16, i32, i64);

pub fn write<T: Bits>(elements: &mut [T], bytes: &[u8]) {
    let chunks = bytes.chunks_exact(size_of::<T>());
    assert_eq!(elements.len(), chunks.len());
    for (element, chunk) in elements.iter_mut().zip(chunks) {
        *element = T::of(chunk);
    }
}

pub fn read<T: Bits>(elements: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of_val(elements));
    for element in elements {
        element.put(&mut bytes);
    }
    bytes
}

fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Mantissa and exponent bits of a float; none of an integer.
fn float_format(dtype: Dtype) -> Option<(u32, u32)> {
    match dtype {
        Dtype::F32 => Some((23, 8)),
        Dtype::F64 => Some((52, 11)),
        Dtype::F16 => Some((10, 5)),
        Dtype::Bf16 => Some((7, 8)),
        Dtype::I32 | Dtype::I64 => None,
    }
}

/// The bits of one element. Of a float, one in eight is a special value (NaNs of either sign and any
/// payload, infinities, zeros, subnormals, the largest), two have any bits, the others are near 1.
fn element(dtype: Dtype, random: u64) -> u64 {
    let Some((mantissa_bits, exponent_bits)) = float_format(dtype) else {
        return random;
    };
    let sign = (random >> 63) << (mantissa_bits + exponent_bits);
    let mantissa = (random >> 8) & ((1 << mantissa_bits) - 1);
    let all_ones = ((1_u64 << exponent_bits) - 1) << mantissa_bits;
    match random & 7 {
        0 => match (random >> 3) & 7 {
            0 => sign | all_ones,
            1 => sign | all_ones | mantissa.max(1),
            2 | 3 => sign,
            4 => sign | 1,
            5 => sign | mantissa,
            6 => sign | (all_ones - 1),
            _ => sign | (1 << mantissa_bits),
        },
        1 | 2 => random >> 3,
        _ => {
            let bias = (1_u64 << (exponent_bits - 1)) - 1;
            let exponent = bias - 2 + (random >> 3) % 5;
            sign | (exponent << mantissa_bits) | mantissa
        }
    }
}

/// Rank `rank`'s tensor.
pub fn tensor(dtype: Dtype, num_elems: usize, seed: u64, rank: u32) -> Vec<u8> {
    let size_bytes = dtype.size_bytes();
    let mut bytes = Vec::with_capacity(num_elems * size_bytes);
    let stream = mix(seed ^ (u64::from(rank) << 48));
    for index in 0..num_elems as u64 {
        let bits = element(dtype, mix(stream.wrapping_add(index)));
        // The low bytes: native order is little endian wherever the daemon runs.
        bytes.extend_from_slice(&bits.to_le_bytes()[..size_bytes]);
    }
    bytes
}

/// All ranks' tensors, and what they reduce to.
pub fn expected(
    dtype: Dtype,
    op: Op,
    num_elems: usize,
    seed: u64,
    world_size: u32,
) -> (Vec<Vec<u8>>, Vec<u8>) {
    let tensors: Vec<Vec<u8>> = (0..world_size)
        .map(|rank| tensor(dtype, num_elems, seed, rank))
        .collect();
    let views: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
    let reduced = reduce_bytes(dtype, op, &views).unwrap();
    (tensors, reduced)
}

/// FNV-1a, to compare results between processes.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Bytes of one element that a reduction must not touch.
const GUARD: u8 = 0xa5;

/// Reduces `tensor`, `skip` elements into its buffer. Answers the result, after it has checked that
/// nothing around it was touched, and out of place not the source either.
pub fn reduce<T: Bits>(
    communicator: &Communicator,
    op: Op,
    tensor: &[u8],
    skip: usize,
    in_place: bool,
) -> Result<(Vec<u8>, Reduction), allreduce_client::AllReduceError> {
    let num_elems = tensor.len() / size_of::<T>();
    let len = skip + num_elems + 2;
    let range = skip..skip + num_elems;
    let guard = vec![GUARD; len * size_of::<T>()];
    let mut src = communicator.allocate::<T>(len).unwrap();
    write(src.as_mut_slice(), &guard);
    write(&mut src.as_mut_slice()[range.clone()], tensor);
    let options = AllReduceOptions {
        range: Some(range.clone()),
        ..AllReduceOptions::default()
    };
    let (dst, reduction) = if in_place {
        communicator.all_reduce_with(src, op, options)?
    } else {
        let mut dst = communicator.allocate::<T>(len).unwrap();
        write(dst.as_mut_slice(), &guard);
        let ((src, dst), reduction) = communicator.all_reduce_into(src, dst, op, options)?;
        assert!(
            read(&src.as_slice()[range.clone()]) == tensor,
            "the source was written"
        );
        (dst, reduction)
    };
    let around = [
        read(&dst.as_slice()[..range.start]),
        read(&dst.as_slice()[range.end..]),
    ];
    for bytes in around {
        assert!(
            bytes.iter().all(|byte| *byte == GUARD),
            "written outside the range"
        );
    }
    Ok((read(&dst.as_slice()[range]), reduction))
}

/// [`reduce`] for a dtype that is known at run time.
pub fn reduce_any(
    communicator: &Communicator,
    dtype: Dtype,
    op: Op,
    tensor: &[u8],
    skip: usize,
    in_place: bool,
) -> Result<(Vec<u8>, Reduction), allreduce_client::AllReduceError> {
    match dtype {
        Dtype::F32 => reduce::<f32>(communicator, op, tensor, skip, in_place),
        Dtype::F64 => reduce::<f64>(communicator, op, tensor, skip, in_place),
        Dtype::F16 => reduce::<f16>(communicator, op, tensor, skip, in_place),
        Dtype::Bf16 => reduce::<bf16>(communicator, op, tensor, skip, in_place),
        Dtype::I32 => reduce::<i32>(communicator, op, tensor, skip, in_place),
        Dtype::I64 => reduce::<i64>(communicator, op, tensor, skip, in_place),
    }
}
