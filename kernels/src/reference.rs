//! The reduction as the contract words it, one element after the other.
//!
//! Owns what "correct" means, bit for bit. Called by the tests and by the daemon's verifier, on
//! memory that is theirs alone. Refuses raw pointers, speed and unequal lengths.

use allreduce_contract::{Dtype, MAX_WORLD_SIZE, Op};

use crate::number::{Bf16, Element, F16, Number};

/// Why there is nothing to compare with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// No rank, or more than a communicator may have.
    #[error("{given} ranks: 1 to {MAX_WORLD_SIZE} can be reduced")]
    WorldSize {
        /// How many sources were given.
        given: usize,
    },
    /// A rank's length differs from rank 0's.
    #[error("rank {rank} has {len}, rank 0 has {expected}")]
    UnequalLengths {
        /// The rank that differs.
        rank: usize,
        /// Its length, in elements or bytes as given.
        len: usize,
        /// Rank 0's length.
        expected: usize,
    },
    /// The bytes are not whole elements.
    #[error("{len_bytes} bytes are not a whole number of {dtype} elements")]
    PartialElement {
        /// Bytes of each rank.
        len_bytes: usize,
        /// The element's type.
        dtype: Dtype,
    },
    /// The ranks cannot be cut into islands of this size.
    #[error("islands of {island_size} do not divide {world_size} ranks")]
    IslandSize {
        /// Ranks of an island, as given.
        island_size: usize,
        /// How many sources were given.
        world_size: usize,
    },
    /// An average of integers.
    #[error("avg of {dtype} is not defined")]
    IntegerAvg {
        /// The integer type.
        dtype: Dtype,
    },
}

/// Reduces `srcs`, one slice of equal length for each rank, in rank order.
///
/// Integers have no average: their factor is 1, so [`Op::Avg`] gives the sum. [`reduce_bytes`],
/// which knows the element type, refuses it.
///
/// # Errors
/// [`ReferenceError::WorldSize`] and [`ReferenceError::UnequalLengths`].
pub fn reduce<E: Element>(op: Op, srcs: &[&[E]]) -> Result<Vec<E>, ReferenceError> {
    reduce_tree(op, srcs, srcs.len())
}

/// Reduces `srcs` by a fixed tree: each island's ranks in rank order, the partials in the accumulator's type; then those in
/// island order. Rank `r` is in island `r / island_size`. One rounding, at the end.
fn reduce_tree<E: Element>(
    op: Op,
    srcs: &[&[E]],
    island_size: usize,
) -> Result<Vec<E>, ReferenceError> {
    split_ranks(srcs)?;
    let world_size = srcs.len();
    if island_size == 0 || !world_size.is_multiple_of(island_size) {
        return Err(ReferenceError::IslandSize {
            island_size,
            world_size,
        });
    }
    let partials: Vec<Vec<E::Accumulator>> = srcs
        .chunks_exact(island_size)
        .map(|island| {
            in_order(
                op,
                island
                    .iter()
                    .map(|src| src.iter().map(|e| e.widen()).collect()),
            )
        })
        .collect();
    let reciprocal = E::Accumulator::reciprocal(world_size);
    Ok(in_order(op, partials)
        .into_iter()
        .map(|accumulator| match op {
            Op::Avg => E::narrow(accumulator.mul(reciprocal)),
            Op::Sum | Op::Min | Op::Max | Op::Prod => E::narrow(accumulator),
        })
        .collect())
}

/// Element by element; the first ones, then each of the others taken in turn.
fn in_order<N: Number>(op: Op, values: impl IntoIterator<Item = Vec<N>>) -> Vec<N> {
    values
        .into_iter()
        .reduce(|mut accumulators, next| {
            for (accumulator, value) in accumulators.iter_mut().zip(next) {
                *accumulator = match op {
                    Op::Sum | Op::Avg => accumulator.add(value),
                    Op::Min => accumulator.minimum(value),
                    Op::Max => accumulator.maximum(value),
                    Op::Prod => accumulator.mul(value),
                };
            }
            accumulators
        })
        .unwrap_or_default()
}

/// Reduces `srcs`, the native-endian bytes of each rank's elements, in rank order.
///
/// # Errors
/// Any [`ReferenceError`].
pub fn reduce_bytes(dtype: Dtype, op: Op, srcs: &[&[u8]]) -> Result<Vec<u8>, ReferenceError> {
    reduce_bytes_tree(dtype, op, srcs, srcs.len())
}

/// Reduces `srcs`, the native-endian bytes of each rank's elements, as the kernel `hierarchical` does: islands of
/// `island_size` consecutive ranks, each in rank order, in the accumulator's type; then their partials in order; one rounding.
/// With islands of 1 or of all ranks it is [`reduce_bytes`].
///
/// # Errors
/// Any [`ReferenceError`].
pub fn reduce_bytes_tree(
    dtype: Dtype,
    op: Op,
    srcs: &[&[u8]],
    island_size: usize,
) -> Result<Vec<u8>, ReferenceError> {
    let (first, _) = split_ranks(srcs)?;
    if !first.len().is_multiple_of(dtype.size_bytes()) {
        return Err(ReferenceError::PartialElement {
            len_bytes: first.len(),
            dtype,
        });
    }
    if dtype.is_integer() && op == Op::Avg {
        return Err(ReferenceError::IntegerAvg { dtype });
    }
    match dtype {
        Dtype::F32 => reduce_encoded::<f32>(op, srcs, island_size),
        Dtype::F64 => reduce_encoded::<f64>(op, srcs, island_size),
        Dtype::F16 => reduce_encoded::<F16>(op, srcs, island_size),
        Dtype::Bf16 => reduce_encoded::<Bf16>(op, srcs, island_size),
        Dtype::I32 => reduce_encoded::<i32>(op, srcs, island_size),
        Dtype::I64 => reduce_encoded::<i64>(op, srcs, island_size),
    }
}

fn reduce_encoded<E: Element>(
    op: Op,
    srcs: &[&[u8]],
    island_size: usize,
) -> Result<Vec<u8>, ReferenceError> {
    let decoded: Vec<Vec<E>> = srcs.iter().map(|src| E::decode(src)).collect();
    let views: Vec<&[E]> = decoded.iter().map(Vec::as_slice).collect();
    Ok(E::encode(&reduce_tree(op, &views, island_size)?))
}

/// Rank 0's slice and the others', once they are known to be of one length and not too many.
fn split_ranks<'a, T>(srcs: &'a [&'a [T]]) -> Result<(&'a [T], &'a [&'a [T]]), ReferenceError> {
    let given = srcs.len();
    let (first, rest) = srcs
        .split_first()
        .filter(|_| given <= MAX_WORLD_SIZE as usize)
        .ok_or(ReferenceError::WorldSize { given })?;
    let expected = first.len();
    match rest.iter().position(|src| src.len() != expected) {
        None => Ok((first, rest)),
        Some(index) => Err(ReferenceError::UnequalLengths {
            rank: index + 1,
            len: rest.get(index).map_or(0, |src| src.len()),
            expected,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_taken_in_order() {
        let ranks: [&[f32]; 3] = [&[1e8], &[-1e8], &[1.0]];
        assert_eq!(reduce(Op::Sum, &ranks), Ok(vec![1.0]));
        let ranks: [&[f32]; 3] = [&[1.0], &[1e8], &[-1e8]];
        assert_eq!(reduce(Op::Sum, &ranks), Ok(vec![0.0]));
    }

    #[test]
    fn halves_accumulate_in_f32_and_round_once() {
        // 2049 is no f16: rounding after each rank would give 2048.
        let ranks: [&[F16]; 3] = [&[F16(0x6800)], &[F16(0x3c00)], &[F16(0x3c00)]];
        assert_eq!(reduce(Op::Sum, &ranks), Ok(vec![F16(0x6801)]));
        // 65504 + 65504 - 65504 passes beyond f16 and comes back.
        let ranks: [&[F16]; 3] = [&[F16(0x7bff)], &[F16(0x7bff)], &[F16(0xfbff)]];
        assert_eq!(reduce(Op::Sum, &ranks), Ok(vec![F16(0x7bff)]));
    }

    #[test]
    fn avg_multiplies_by_the_rounded_reciprocal() {
        let ranks: [&[f32]; 3] = [&[5.0], &[0.0], &[0.0]];
        assert_eq!(reduce(Op::Avg, &ranks), Ok(vec![5.0 * (1.0f32 / 3.0)]));
    }

    #[test]
    fn integers_wrap_and_have_no_average() {
        let ranks: [&[i32]; 2] = [&[i32::MAX, 1 << 20], &[1, 1 << 20]];
        assert_eq!(reduce(Op::Sum, &ranks), Ok(vec![i32::MIN, 1 << 21]));
        assert_eq!(reduce(Op::Prod, &ranks), Ok(vec![i32::MAX, 0]));
        let refused = reduce_bytes(Dtype::I64, Op::Avg, &[&[0; 8]]);
        let dtype = Dtype::I64;
        assert_eq!(refused, Err(ReferenceError::IntegerAvg { dtype }));
    }

    #[test]
    fn islands_are_reduced_first_and_their_partials_in_f32() {
        let ranks: [&[f32]; 4] = [&[1e8], &[1.0], &[-1e8], &[1.0]];
        assert_eq!(reduce(Op::Sum, &ranks), Ok(vec![1.0]));
        assert_eq!(reduce_tree(Op::Sum, &ranks, 2), Ok(vec![0.0]));
        // 1.0 + 2^-8 is no bf16; rounded between, both halves would be lost.
        let ranks: [&[Bf16]; 4] = [
            &[Bf16(0x3f80)],
            &[Bf16(0x3b80)],
            &[Bf16(0x3b80)],
            &[Bf16(0)],
        ];
        assert_eq!(reduce_tree(Op::Sum, &ranks, 2), Ok(vec![Bf16(0x3f81)]));
        // The average's factor is that of all ranks, once.
        let ranks: [&[f32]; 6] = [&[5.0], &[0.0], &[0.0], &[2.0], &[0.0], &[0.0]];
        assert_eq!(
            reduce_tree(Op::Avg, &ranks, 3),
            Ok(vec![7.0 * (1.0f32 / 6.0)])
        );
    }

    #[test]
    fn one_island_and_islands_of_one_are_flat() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for op in [Op::Sum, Op::Avg, Op::Min, Op::Max, Op::Prod] {
                for world_size in 1..=16usize {
                    // Any bits: NaNs, infinities, subnormals and zeros of both signs are among them.
                    let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ world_size as u64;
                    let ranks: Vec<Vec<u8>> = (0..world_size)
                        .map(|_| {
                            (0..4096)
                                .map(|_| {
                                    state ^= state << 13;
                                    state ^= state >> 7;
                                    state ^= state << 17;
                                    (state >> 32) as u8
                                })
                                .collect()
                        })
                        .collect();
                    let views: Vec<&[u8]> = ranks.iter().map(Vec::as_slice).collect();
                    let flat = reduce_bytes(dtype, op, &views);
                    assert!(flat.is_ok());
                    assert_eq!(reduce_bytes_tree(dtype, op, &views, 1), flat);
                    assert_eq!(reduce_bytes_tree(dtype, op, &views, world_size), flat);
                    if matches!(op, Op::Min | Op::Max) && world_size == 12 {
                        assert_eq!(reduce_bytes_tree(dtype, op, &views, 3), flat);
                    }
                }
            }
        }
    }

    #[test]
    fn islands_divide_the_ranks() {
        for island_size in [0, 3, 5, 8] {
            assert_eq!(
                reduce_bytes_tree(Dtype::F32, Op::Sum, &[&[0; 4][..]; 4], island_size),
                Err(ReferenceError::IslandSize {
                    island_size,
                    world_size: 4
                })
            );
        }
    }

    #[test]
    fn refuses_what_it_cannot_reduce() {
        let no_ranks: [&[f32]; 0] = [];
        let given = 0;
        assert_eq!(
            reduce(Op::Sum, &no_ranks),
            Err(ReferenceError::WorldSize { given })
        );
        let given = 17;
        assert_eq!(
            reduce::<f32>(Op::Sum, &[&[][..]; 17]),
            Err(ReferenceError::WorldSize { given })
        );
        assert_eq!(
            reduce(Op::Sum, &[&[1i32, 2][..], &[1]]),
            Err(ReferenceError::UnequalLengths {
                rank: 1,
                len: 1,
                expected: 2
            })
        );
        assert_eq!(
            reduce_bytes(Dtype::F32, Op::Sum, &[&[0; 6]]),
            Err(ReferenceError::PartialElement {
                len_bytes: 6,
                dtype: Dtype::F32
            })
        );
    }
}
