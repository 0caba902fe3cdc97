//! Samples, and the figures computed from them.

use super::ops::Op;
use super::team::Answer;

/// The distance between the two cores, by the latency of a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Near,
    Far,
    /// It changed during the sample.
    Mixed,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::Near => "near",
            Mode::Far => "far",
            Mode::Mixed => "mixed",
        }
    }
}

/// The time of one operation, in microseconds: of the slowest rank, and CPU time of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) us: f64,
    pub(crate) cpu_us: f64,
}

impl Cost {
    /// The difference between a loop with the operation and the same loop without it.
    pub(crate) fn of(op: Op, iterations: u64, with: &[Answer], without: &[Answer]) -> Cost {
        let each = iterations as f64 * op.per_iteration() * 1e3;
        let more = with.iter().zip(without).map(|(with, without)| with.nanos - without.nanos);
        let cpu = with.iter().zip(without).map(|(with, without)| with.cpu_nanos - without.cpu_nanos);
        Cost { us: more.fold(f64::NEG_INFINITY, f64::max) / each, cpu_us: cpu.sum::<f64>() / each }
    }

    pub(crate) fn better(self, other: Cost) -> Cost {
        if other.us < self.us { other } else { self }
    }
}

/// The measurements of one sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// One-way latency of a cache line, before and after.
    pub(crate) lines: [f64; 2],
    pub(crate) ours: Cost,
    pub(crate) bound: Cost,
    pub(crate) plain: Option<Cost>,
    pub(crate) peer: Option<Cost>,
    /// Over MPI: the peer's nonblocking call, and ours where members compare every call.
    pub(crate) nonblocking: Option<Cost>,
    pub(crate) checked: Option<Cost>,
}

impl Sample {
    pub(crate) fn mode(&self, near: f64) -> Mode {
        match self.lines.map(|line| line < near) {
            [true, true] => Mode::Near,
            [false, false] => Mode::Far,
            _ => Mode::Mixed,
        }
    }
}

/// The figure of an operation, a size and a number of ranks in one mode. Times are medians, in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) op: Op,
    pub(crate) ranks: usize,
    pub(crate) bytes: usize,
    pub(crate) mode: Mode,
    pub(crate) samples: usize,
    pub(crate) us: f64,
    pub(crate) bound_us: f64,
    pub(crate) line_us: f64,
    pub(crate) cpu_us: f64,
    pub(crate) plain_us: Option<f64>,
    pub(crate) peer_us: Option<f64>,
    pub(crate) peer_cpu_us: Option<f64>,
    /// Medians of the ratios of the samples, not ratios of medians.
    pub(crate) bound_ratio: Option<f64>,
    pub(crate) plain_ratio: Option<f64>,
    pub(crate) ratio: Option<f64>,
    pub(crate) nonblocking_us: Option<f64>,
    pub(crate) nonblocking_ratio: Option<f64>,
    /// Medians of the differences of the samples.
    pub(crate) nonblocking_more_us: Option<f64>,
    pub(crate) check_us: Option<f64>,
}

impl Figure {
    /// Gigabytes of a block per second.
    pub(crate) fn gbs(&self) -> f64 {
        self.bytes as f64 / self.us / 1e3
    }

    /// CPU nanoseconds for each byte of each rank's block.
    pub(crate) fn cpu_ns_per_byte(&self) -> f64 {
        self.cpu_us * 1e3 / (self.bytes * self.ranks) as f64
    }
}

/// One figure for each mode that has samples. Samples whose mode changed count only if there are no others.
pub(crate) fn figures(op: Op, ranks: usize, bytes: usize, near: f64, samples: &[Sample]) -> Vec<Figure> {
    let of = |mode: Mode| -> Vec<Sample> {
        samples.iter().filter(|sample| sample.mode(near) == mode).copied().collect()
    };
    let mut found: Vec<Figure> = Vec::new();
    for mode in [Mode::Near, Mode::Far, Mode::Mixed] {
        let samples = of(mode);
        if samples.is_empty() || mode == Mode::Mixed && !found.is_empty() {
            continue;
        }
        let time = |value: &dyn Fn(&Sample) -> f64| median(samples.iter().map(value)).unwrap_or(f64::NAN);
        let maybe = |value: &dyn Fn(&Sample) -> Option<f64>| median(samples.iter().filter_map(value));
        let to = |other: Option<Cost>, ours: Cost| {
            other.filter(|other| other.us > 0.0 && ours.us > 0.0).map(|other| ours.us / other.us)
        };
        found.push(Figure {
            op,
            ranks,
            bytes,
            mode,
            samples: samples.len(),
            us: time(&|sample| sample.ours.us),
            bound_us: time(&|sample| sample.bound.us),
            line_us: time(&|sample| (sample.lines[0] + sample.lines[1]) / 2.0),
            cpu_us: time(&|sample| sample.ours.cpu_us),
            plain_us: maybe(&|sample| sample.plain.map(|plain| plain.us)),
            peer_us: maybe(&|sample| sample.peer.map(|peer| peer.us)),
            peer_cpu_us: maybe(&|sample| sample.peer.map(|peer| peer.cpu_us)),
            bound_ratio: maybe(&|sample| to(Some(sample.bound), sample.ours)),
            plain_ratio: maybe(&|sample| to(sample.plain, sample.ours)),
            ratio: maybe(&|sample| to(sample.peer, sample.ours)),
            nonblocking_us: maybe(&|sample| sample.nonblocking.map(|other| other.us)),
            nonblocking_ratio: maybe(&|sample| to(sample.nonblocking, sample.ours)),
            nonblocking_more_us: maybe(&|sample| sample.nonblocking.map(|other| sample.ours.us - other.us)),
            check_us: maybe(&|sample| sample.checked.map(|other| other.us - sample.ours.us)),
        });
    }
    found
}

/// The middle value, or the mean of the two middle ones.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[middle - 1] + upper) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(lines: [f64; 2], ours: f64, peer: f64) -> Sample {
        let cost = |us| Cost { us, cpu_us: 2.0 * us };
        let (plain, nonblocking, checked) = (None, Some(cost(peer + 1.0)), Some(cost(ours + 2.0)));
        Sample {
            lines,
            ours: cost(ours),
            bound: cost(1.0),
            plain,
            peer: Some(cost(peer)),
            nonblocking,
            checked,
        }
    }

    #[test]
    fn like_is_compared_with_like() {
        let samples = [
            sample([0.05, 0.05], 1.0, 2.0),
            sample([0.05, 0.06], 3.0, 2.0),
            sample([0.04, 0.05], 2.0, 8.0),
            sample([0.18, 0.17], 10.0, 5.0),
            sample([0.05, 0.18], 1000.0, 1.0),
        ];
        let figures = figures(Op::AllReduce, 2, 4, 0.1, &samples);
        let text: Vec<_> = figures.iter().map(|f| (f.mode, f.samples, f.us, f.peer_us, f.ratio)).collect();
        assert_eq!(
            text,
            [(Mode::Near, 3, 2.0, Some(2.0), Some(0.5)), (Mode::Far, 1, 10.0, Some(5.0), Some(2.0))]
        );
        // Of 1 - 3, 3 - 3 and 2 - 9, and of 1 / 3, 3 / 3 and 2 / 9.
        let near = &figures[0];
        assert_eq!((near.nonblocking_more_us, near.nonblocking_ratio), (Some(-2.0), Some(1.0 / 3.0)));
        assert_eq!((near.nonblocking_us, near.check_us), (Some(3.0), Some(2.0)));
        let mixed = super::figures(Op::AllReduce, 2, 4, 0.1, &samples[4..]);
        assert_eq!((mixed.len(), mixed[0].mode), (1, Mode::Mixed));
    }

    #[test]
    fn the_slowest_rank_counts_and_the_loop_itself_does_not() {
        let answer = |nanos| Answer { nanos, cpu_nanos: nanos };
        let cost = Cost::of(Op::Pingpong, 10, &[answer(9e3), answer(7e3)], &[answer(5e3), answer(1e3)]);
        assert_eq!((cost.us, cost.cpu_us), (0.3, 0.5));
    }

    #[test]
    fn the_median_of_an_even_number_is_between() {
        assert_eq!(median([4.0, 1.0, 2.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median(std::iter::empty()), None);
    }
}
