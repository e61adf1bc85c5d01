//! Samples to quantiles, and microseconds to words: what `demo` and `bench` print.

use serde::Serialize;

/// Quantiles of samples, microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Spread {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(samples: &mut [f64]) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |quantile: f64| {
            let rank = (samples.len() as f64 * quantile).ceil() as usize;
            let index = rank.clamp(1, samples.len().max(1)) - 1;
            samples.get(index).copied().unwrap_or(0.0)
        };
        Self {
            p50: at(0.50),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// Microseconds in the unit that reads best.
pub(crate) fn time(us: f64) -> String {
    if us < 1000.0 {
        format!("{us:.1} us")
    } else {
        format!("{:.2} ms", us / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_nearest_rank_quantiles() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let Spread { p50, p99, max } = Spread::of(&mut samples);
        assert_eq!((p50, p99, max), (50.0, 99.0, 100.0));
        assert_eq!(Spread::of(&mut []).p50, 0.0);
        assert_eq!(Spread::of(&mut [7.0]).p99, 7.0);
    }
}
