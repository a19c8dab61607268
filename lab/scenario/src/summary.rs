//! The distribution of a figure over its repetitions.

use serde::Serialize;

/// Count, mean, median, 95th percentile, minimum and maximum of samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleSummary {
    /// The number of samples.
    pub n: usize,
    /// The mean; `None` without samples.
    pub mean: Option<f64>,
    /// Median, nearest rank.
    pub p50: Option<f64>,
    /// 95th percentile, nearest rank.
    pub p95: Option<f64>,
    /// The minimum.
    pub min: Option<f64>,
    /// The maximum.
    pub max: Option<f64>,
}

impl SampleSummary {
    /// The summary of these values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> SampleSummary {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let rank = |share: f64| {
            let nearest = (share * n as f64).ceil().max(1.0) as usize;
            sorted.get(nearest - 1).copied()
        };
        SampleSummary {
            n,
            mean: (n > 0).then(|| sorted.iter().sum::<f64>() / n as f64),
            p50: rank(0.50),
            p95: rank(0.95),
            min: sorted.first().copied(),
            max: sorted.last().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SampleSummary;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let spread = SampleSummary::of((1..=100).rev().map(f64::from));
        assert_eq!(
            (spread.n, spread.mean, spread.p50, spread.p95),
            (100, Some(50.5), Some(50.0), Some(95.0))
        );
        assert_eq!((spread.min, spread.max), (Some(1.0), Some(100.0)));
    }

    #[test]
    fn nothing_has_no_mean() {
        let spread = SampleSummary::of([]);
        assert_eq!((spread.n, spread.mean, spread.p95), (0, None, None));
    }
}
