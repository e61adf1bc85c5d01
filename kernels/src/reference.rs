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
    /// An average of integers.
    #[error("avg of {dtype} is not defined")]
    IntegerAvg {
        /// The integer type.
        dtype: Dtype,
    },
    /// Islands that the ranks do not fill.
    #[error("{given} ranks are no whole number of islands of {island_size}")]
    IslandSize {
        /// How many sources were given.
        given: usize,
        /// Ranks of an island asked for.
        island_size: usize,
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
    // One island: rank order.
    reduce_tree(op, srcs, srcs.len())
}

/// Reduces each island of `island_size` consecutive ranks in rank order, then the islands' partial results in order,
/// without rounding in between.
fn reduce_tree<E: Element>(
    op: Op,
    srcs: &[&[E]],
    island_size: usize,
) -> Result<Vec<E>, ReferenceError> {
    split_ranks(srcs)?;
    if !srcs.len().is_multiple_of(island_size) {
        return Err(ReferenceError::IslandSize {
            given: srcs.len(),
            island_size,
        });
    }
    let reciprocal = E::Accumulator::reciprocal(srcs.len());
    let partials = srcs.chunks(island_size).map(|island| {
        let widened = island.iter().map(|src| src.iter().map(|e| e.widen()));
        accumulate(op, widened.map(Iterator::collect))
    });
    let accumulators: Vec<E::Accumulator> = accumulate(op, partials);
    Ok(accumulators
        .into_iter()
        .map(|accumulator| match op {
            Op::Avg => E::narrow(accumulator.mul(reciprocal)),
            Op::Sum | Op::Min | Op::Max | Op::Prod => E::narrow(accumulator),
        })
        .collect())
}

/// Combines values element by element, in their order.
fn accumulate<N: Number>(op: Op, values: impl Iterator<Item = Vec<N>>) -> Vec<N> {
    let combined = values.reduce(|mut accumulators, values| {
        for (accumulator, value) in accumulators.iter_mut().zip(values) {
            *accumulator = match op {
                Op::Sum | Op::Avg => accumulator.add(value),
                Op::Min => accumulator.minimum(value),
                Op::Max => accumulator.maximum(value),
                Op::Prod => accumulator.mul(value),
            };
        }
        accumulators
    });
    combined.unwrap_or_default()
}

/// Reduces `srcs`, the native-endian bytes of each rank's elements, in rank order.
///
/// # Errors
/// Any [`ReferenceError`].
pub fn reduce_bytes(dtype: Dtype, op: Op, srcs: &[&[u8]]) -> Result<Vec<u8>, ReferenceError> {
    reduce_bytes_tree(dtype, op, srcs, srcs.len())
}

/// Reduces `srcs` as [`reduce_bytes`], in the order of a hierarchical reduction: islands of `island_size` consecutive
/// ranks, each in rank order, then their partial results in order, rounded once at the end.
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
    fn islands_are_summed_before_they_are_added() {
        let ranks = [1e8_f32, 1.0, -1e8, 1.0].map(f32::to_ne_bytes);
        let views: Vec<&[u8]> = ranks.iter().map(<[u8; 4]>::as_slice).collect();
        let sum = |island_size| {
            let sum = reduce_bytes_tree(Dtype::F32, Op::Sum, &views, island_size);
            sum.map(|bytes| f32::decode(&bytes))
        };
        // (1e8 + 1) + (-1e8 + 1): each 1 is lost beside 1e8. In rank order only the first is.
        assert_eq!(sum(2), Ok(vec![0.0]));
        assert_eq!(sum(1), Ok(vec![1.0]));
        assert_eq!(sum(4), sum(1));
        for island_size in [0, 3, 5] {
            let given = 4;
            let refused = ReferenceError::IslandSize { given, island_size };
            assert_eq!(sum(island_size), Err(refused));
        }
        // A partial beyond f16 comes back: islands are not rounded.
        let ranks = [0x7bff_u16, 0x7bff, 0xfbff, 0xfbff].map(u16::to_ne_bytes);
        let views: Vec<&[u8]> = ranks.iter().map(<[u8; 2]>::as_slice).collect();
        let sum = reduce_bytes_tree(Dtype::F16, Op::Avg, &views, 2);
        assert_eq!(sum, Ok(vec![0, 0]));
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
