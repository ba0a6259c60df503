//! The kinds of metrics that the stages feed, beside the plain ones of the client library.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::{MetricType, TypedMetric};

/// A gauge that may have no value: then it is absent.
#[derive(Clone, Debug)]
pub struct Known(Arc<AtomicU64>);

impl Default for Known {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(f64::NAN.to_bits())))
    }
}

impl Known {
    /// Sets the value; NaN is none.
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    /// Sets a count, as of bytes or rows. Above 2^53 it is rounded.
    #[expect(clippy::cast_precision_loss, reason = "metrics are floating point")]
    pub fn set_count(&self, count: u64) {
        self.set(count as f64);
    }

    /// The value, if there is one.
    pub fn get(&self) -> Option<f64> {
        let value = f64::from_bits(self.0.load(Ordering::Relaxed));
        (!value.is_nan()).then_some(value)
    }

    /// The value as a count, to the nearest one, if there is a value.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates at both ends")]
    pub fn count(&self) -> Option<u64> {
        self.get().map(|value| value.round() as u64)
    }

    /// There is no value.
    pub fn unset(&self) {
        self.set(f64::NAN);
    }
}

impl TypedMetric for Known {
    const TYPE: MetricType = MetricType::Gauge;
}

impl EncodeMetric for Known {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        self.get().map_or(Ok(()), |value| encoder.encode_gauge(&value))
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// Counters of one name that differ in a label. Unlike the client library's family, they can be listed.
#[derive(Clone, Debug)]
pub struct Counters {
    label: &'static str,
    counters: Arc<RwLock<BTreeMap<&'static str, Counter>>>,
}

impl Counters {
    /// The values known from the start are there from the start, with 0: so the first count is seen as a rise.
    pub(super) fn new(label: &'static str, known: &[&'static str]) -> Self {
        let counters = known.iter().map(|value| (*value, Counter::default())).collect();
        Self { label, counters: Arc::new(RwLock::new(counters)) }
    }

    /// The counter of this label value: a cheap handle, to be kept where it is used often.
    pub fn of(&self, value: &'static str) -> Counter {
        // Whoever holds the lock cannot panic with the map half changed.
        self.counters.write().unwrap_or_else(PoisonError::into_inner).entry(value).or_default().clone()
    }

    /// Each label value with its count.
    pub fn all(&self) -> BTreeMap<&'static str, u64> {
        let counters = self.counters.read().unwrap_or_else(PoisonError::into_inner);
        counters.iter().map(|(value, counter)| (*value, counter.get())).collect()
    }
}

impl EncodeMetric for Counters {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        for (value, counter) in &*self.counters.read().unwrap_or_else(PoisonError::into_inner) {
            let label = [(self.label, *value)];
            counter.encode(encoder.encode_family(&label)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

/// Observations by size. Unlike the client library's, it can be read: `/status` tells the median of the last minute.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Spread>);

#[derive(Debug)]
struct Spread {
    /// The upper bounds, ascending; what is larger than the last counts behind it.
    bounds: &'static [f64],
    /// One more than there are bounds.
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

impl Histogram {
    /// `bounds`: the upper bounds of the buckets, ascending.
    pub fn new(bounds: &'static [f64]) -> Self {
        let counts = std::iter::repeat_with(AtomicU64::default).take(bounds.len() + 1).collect();
        Self(Arc::new(Spread { bounds, counts, sum: AtomicU64::new(0.0_f64.to_bits()) }))
    }

    /// Counts a value.
    pub fn observe(&self, value: f64) {
        let place = self.0.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.0.counts.get(place) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let add = |sum| Some((f64::from_bits(sum) + value).to_bits());
        let _ = self.0.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add); // Never refuses.
    }

    /// How many observations fell under each bound, and above the one before it; the last counts those above all.
    pub fn counts(&self) -> Vec<u64> {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// The value below which this share of the observations lies that came from one reading of [`Self::counts`] to
    /// another, about: between two bounds they are taken to be spread evenly. `None` when there are none.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn quantile(&self, from: &[u64], to: &[u64], share: f64) -> Option<f64> {
        let counts = || to.iter().zip(from).map(|(to, from)| to.saturating_sub(*from) as f64);
        let rank = counts().sum::<f64>() * share;
        let (mut below, mut lower) = (0.0, 0.0);
        for (at, count) in counts().enumerate() {
            // Nothing is known of how far above the last bound values lie.
            let upper = self.0.bounds.get(at).copied().unwrap_or(lower);
            if count > 0.0 && below + count >= rank {
                return Some(lower + (upper - lower) * ((rank - below) / count));
            }
            below += count;
            lower = upper;
        }
        None
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let counts = self.counts();
        let bounds = self.0.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        let sum = f64::from_bits(self.0.sum.load(Ordering::Relaxed));
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_what_came_in_between() {
        let histogram = Histogram::new(&[1.0, 2.0, 4.0]);
        assert_eq!(histogram.quantile(&histogram.counts(), &histogram.counts(), 0.5), None);
        (0..100).for_each(|_| histogram.observe(100.0));
        let from = histogram.counts();
        for value in [0.5, 1.5, 1.5, 3.0] {
            histogram.observe(value);
        }
        let to = histogram.counts();
        assert_eq!(to, [1, 2, 1, 100]);
        assert_eq!(histogram.quantile(&from, &to, 0.5), Some(1.5));
        assert_eq!(histogram.quantile(&from, &to, 1.0), Some(4.0));
        assert_eq!(histogram.quantile(&[0; 4], &to, 0.99), Some(4.0), "not beyond the last bound");
    }

    #[test]
    fn a_value_counts_under_the_bound_that_it_equals() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        histogram.observe(1.0);
        histogram.observe(2.5);
        assert_eq!(histogram.counts(), [1, 0, 1]);
    }
}
