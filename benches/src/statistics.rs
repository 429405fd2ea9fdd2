//! Medians, quantiles and paired ratios. Pure: the resampling is seeded, so the same samples give the same interval.

use serde::Serialize;

/// Resamples for an interval: more changes its third digit only.
const RESAMPLES: usize = 2_000;
const SEED: u64 = 0x6d76_6d00;

/// A set of samples in a few numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    pub samples: usize,
    pub min: f64,
    pub p25: f64,
    pub median: f64,
    pub p75: f64,
    pub p99: f64,
    pub max: f64,
}

/// Ours over the peer's: the median over pairs taken one after the other, and its bootstrap 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    pub pairs: usize,
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Summary {
    /// `None` without samples.
    #[must_use]
    pub fn of(samples: &[f64]) -> Option<Self> {
        let sorted = sorted(samples);
        let (first, last) = (sorted.first()?, sorted.last()?);
        Some(Self {
            samples: sorted.len(),
            min: *first,
            p25: quantile(&sorted, 0.25),
            median: quantile(&sorted, 0.5),
            p75: quantile(&sorted, 0.75),
            p99: quantile(&sorted, 0.99),
            max: *last,
        })
    }
}

impl Ratio {
    /// Of `(ours, peer)` pairs; `None` without pairs.
    #[must_use]
    pub fn of(pairs: &[(f64, f64)]) -> Option<Self> {
        let ratios: Vec<f64> = pairs.iter().map(|(ours, peer)| ours / peer).collect();
        let median = Summary::of(&ratios)?.median;
        let mut random = fastrand::Rng::with_seed(SEED);
        let medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let drawn: Vec<f64> =
                    (0..ratios.len()).map(|_| ratios[random.usize(..ratios.len())]).collect();
                quantile(&sorted(&drawn), 0.5)
            })
            .collect();
        let medians = sorted(&medians);
        Some(Self {
            pairs: pairs.len(),
            median,
            low: quantile(&medians, 0.025),
            high: quantile(&medians, 0.975),
        })
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Between the two nearest samples. `sorted` must hold at least one.
fn quantile(sorted: &[f64], at: f64) -> f64 {
    let place = at * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_the_nearest_samples() {
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((summary.min, summary.median, summary.max), (1.0, 2.5, 4.0));
        assert_eq!((summary.p25, summary.p75), (1.75, 3.25));
    }

    #[test]
    fn nothing_sampled_is_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Ratio::of(&[]), None);
    }

    #[test]
    fn a_drift_that_hits_both_sides_of_each_pair_leaves_the_ratio_alone() {
        let pairs: Vec<(f64, f64)> = (1..=15).map(|i| (f64::from(i) * 2.0, f64::from(i))).collect();
        let ratio = Ratio::of(&pairs).unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high), (2.0, 2.0, 2.0));
    }

    #[test]
    fn the_interval_holds_the_median_and_is_the_same_twice() {
        let pairs: Vec<(f64, f64)> = (0..20).map(|i| (100.0 + f64::from(i % 7), 100.0)).collect();
        let ratio = Ratio::of(&pairs).unwrap();
        assert!(ratio.low <= ratio.median && ratio.median <= ratio.high);
        assert_eq!(Ratio::of(&pairs), Some(ratio));
    }
}
