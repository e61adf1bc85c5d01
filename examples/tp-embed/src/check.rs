//! Whether the ranks computed what one process would have.
//!
//! Owns the comparison and its bound. Called by the parent. A NaN anywhere is a difference.

use serde::Serialize;

/// The cosine that the ranks' and the reference's embedding of a sentence must have.
pub(crate) const MIN_COSINE: f64 = 0.9999;

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Verdict {
    /// Rank 0's embeddings equal the reference's, up to the order of additions.
    pub(crate) equal: bool,
    /// Smallest cosine of a sentence's two embeddings.
    pub(crate) min_cosine: f64,
    /// Largest difference of two elements.
    pub(crate) max_abs_difference: f64,
    /// All ranks have the same embeddings, bit by bit.
    pub(crate) bit_identical: bool,
}

impl Verdict {
    /// Compares the ranks' embeddings, as bits, with each other and the first's with the reference's.
    pub(crate) fn new(ranks: &[&[Vec<u32>]], reference: &[Vec<f32>]) -> Self {
        let first = ranks.first().copied().unwrap_or_default();
        let mut min_cosine = f64::INFINITY;
        let mut max_abs_difference = 0.0_f64;
        for (bits, wanted) in first.iter().zip(reference) {
            let found = floats(bits);
            // Unlike f64::min and max, which pass a NaN over, these comparisons keep it.
            let cosine = cosine(&found, wanted);
            if cosine.is_nan() || cosine < min_cosine {
                min_cosine = cosine;
            }
            for (a, b) in found.iter().zip(wanted) {
                let difference = (f64::from(*a) - f64::from(*b)).abs();
                if difference.is_nan() || difference > max_abs_difference {
                    max_abs_difference = difference;
                }
            }
        }
        let same_len = !first.is_empty() && first.len() == reference.len();
        Self {
            equal: same_len && min_cosine >= MIN_COSINE,
            min_cosine,
            max_abs_difference,
            bit_identical: same_len && ranks.iter().all(|rank| *rank == first),
        }
    }

    /// Whether all is as it must be.
    pub(crate) fn is_good(&self) -> bool {
        self.equal && self.bit_identical
    }
}

/// Bits as the numbers that they are.
pub(crate) fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|bits| f32::from_bits(*bits)).collect()
}

/// The cosine of two vectors, in f64; NaN if they differ in length.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn equal_is_equal() {
        let rank = [bits(&[0.6, 0.8])];
        let verdict = Verdict::new(&[&rank, &rank], &[vec![0.6, 0.8]]);
        assert!(verdict.is_good(), "{verdict:?}");
    }

    #[test]
    fn every_difference_is_seen() {
        let good = [bits(&[0.6, 0.8]), bits(&[1.0, 0.0])];
        let reference = [vec![0.6, 0.8], vec![1.0, 0.0]];
        let turned = [bits(&[0.6, 0.8]), bits(&[0.0, 1.0])];
        assert!(!Verdict::new(&[&turned, &turned], &reference).equal);
        let nan = [bits(&[f32::NAN, 0.8]), bits(&[1.0, 0.0])];
        assert!(!Verdict::new(&[&nan, &nan], &reference).equal);
        let last_bit = [bits(&[0.6, 0.8]), bits(&[1.0, -0.0])];
        let verdict = Verdict::new(&[&good, &last_bit], &reference);
        assert!(verdict.equal && !verdict.bit_identical);
        assert!(!Verdict::new(&[&good], &[]).is_good());
        assert!(!Verdict::new(&[], &[]).is_good());
    }
}
