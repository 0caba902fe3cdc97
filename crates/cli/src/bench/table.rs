//! Figures as lines: a table for people, objects for programs.

use std::fmt::Write as _;
use std::io::{Write, stdout};

use serde_json::{Value, json};

use super::figures::Figure;
use super::options::{Options, Transport};

/// Prints each figure when it is measured.
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Output {
        Output { json }
    }

    /// Prints text, not with --json; false if the reader is gone.
    pub(crate) fn text(&mut self, text: &str) -> bool {
        self.json || write_out(text)
    }

    /// A figure, as a row or as an object.
    pub(crate) fn figure(&mut self, row: &str, figure: &Figure, transport: Transport) -> bool {
        if self.json { write_out(&format!("{}\n", object(figure, transport))) } else { write_out(row) }
    }
}

/// Writes at once, since the next line may take seconds.
pub(crate) fn write_out(text: &str) -> bool {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// Rounded to the resolution of the clock.
fn number(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}

/// The fields in their documented order, which a JSON map would not keep.
fn object(figure: &Figure, transport: Transport) -> String {
    let fields = [
        ("bench", Some(json!("comm"))),
        ("op", Some(json!(figure.op.name()))),
        ("transport", Some(json!(transport.name()))),
        ("ranks", Some(json!(figure.ranks))),
        ("bytes", Some(json!(figure.bytes))),
        ("us", Some(number(figure.us))),
        ("bound_us", Some(number(figure.bound_us))),
        ("gbs", Some(number(figure.gbs()))),
        ("live", Some(json!(1))),
        ("line_us", Some(number(figure.line_us))),
        ("mode", Some(json!(figure.mode.name()))),
        ("samples", Some(json!(figure.samples))),
        ("cpu_us", Some(number(figure.cpu_us))),
        ("cpu_ns_per_byte", Some(number(figure.cpu_ns_per_byte()))),
        ("bound_ratio", figure.bound_ratio.map(number)),
        ("plain_us", figure.plain_us.map(number)),
        ("plain_ratio", figure.plain_ratio.map(number)),
        ("peer_us", figure.peer_us.map(number)),
        ("peer_cpu_us", figure.peer_cpu_us.map(number)),
        ("ratio", figure.ratio.map(number)),
        ("nonblocking_us", figure.nonblocking_us.map(number)),
        ("nonblocking_ratio", figure.nonblocking_ratio.map(number)),
        ("nonblocking_more_us", figure.nonblocking_more_us.map(number)),
        ("check_us", figure.check_us.map(number)),
    ];
    let text = |(key, value): (&str, Option<Value>)| Some(format!("{}:{}", json!(key), value?));
    format!("{{{}}}", fields.into_iter().filter_map(text).collect::<Vec<_>>().join(","))
}

/// The heading above the rows of a number of ranks.
pub(crate) fn heading(options: &Options, ranks: usize) -> String {
    let kind = match options.transport {
        Transport::Shm => "processes",
        Transport::Local => "threads",
        Transport::Mpi => "processes over MPI",
    };
    let peer = options.peer.as_ref().map_or(String::new(), |peer| format!(", peer `{peer}`"));
    let head = format!("{ranks} {kind}, live data, medians{peer}\n\n");
    if options.transport == Transport::Mpi {
        return head
            + &format!(
                "{:<15} {:>8} {:<5} {:>9} {:>11} {:>8} {:>6} {:>9} {:>6} {:>8} {:>4}\n",
                "op", "block", "cores", "time", "nonblocking", "more", "x", "blocking", "x", "check", "of"
            );
    }
    head + &format!(
        "{:<18} {:>8} {:<5} {:>9} {:>9} {:>6} {:>9} {:>6} {:>7} {:>9} {:>4}\n",
        "op", "block", "cores", "time", "bound", "x", "peer", "x", "GB/s", "cpu", "of"
    )
}

/// A row of the table.
pub(crate) fn row(figure: &Figure, transport: Transport) -> String {
    let none = || "-".to_string();
    if transport == Transport::Mpi {
        return format!(
            "{:<15} {:>8} {:<5} {:>9} {:>11} {:>8} {:>6} {:>9} {:>6} {:>8} {:>4}\n",
            figure.op.name(),
            size(figure.bytes),
            figure.mode.name(),
            time(figure.us),
            figure.nonblocking_us.map_or_else(none, time),
            figure.nonblocking_more_us.map_or_else(none, time),
            figure.nonblocking_ratio.map_or_else(none, ratio),
            figure.peer_us.map_or_else(none, time),
            figure.ratio.map_or_else(none, ratio),
            figure.check_us.map_or_else(none, time),
            figure.samples,
        );
    }
    format!(
        "{:<18} {:>8} {:<5} {:>9} {:>9} {:>6} {:>9} {:>6} {:>7} {:>9} {:>4}\n",
        figure.op.name(),
        size(figure.bytes),
        figure.mode.name(),
        time(figure.us),
        time(figure.bound_us),
        figure.bound_ratio.map_or_else(none, ratio),
        figure.peer_us.map_or_else(none, time),
        figure.ratio.map_or_else(none, ratio),
        format!("{:.2}", figure.gbs()),
        time(figure.cpu_us),
        figure.samples,
    )
}

/// The most that our time may be over MPI's nonblocking call: microseconds for 4 B, and a ratio from 64 KiB on.
const BARS: (f64, f64) = (0.5, 1.05);

/// Whether a figure over MPI misses its target.
fn misses(figure: &Figure) -> bool {
    let [more, ratio] =
        [figure.nonblocking_more_us, figure.nonblocking_ratio].map(|value| value.unwrap_or(0.0));
    figure.bytes == 4 && more > BARS.0 || figure.bytes >= 64 << 10 && ratio > BARS.1
}

/// A summary of all figures.
pub(crate) fn summary(figures: &[Figure], transport: Transport) -> String {
    let mut text = match transport {
        Transport::Mpi => String::from(
            "\ntime: one operation on the slowest rank; nonblocking, blocking: the same call of MPI in the peer;\n\
             more: time less nonblocking; x: time over the column before; check: what CONSORT_CHECK=1 adds;\n\
             of: samples in that mode.\n",
        ),
        _ => String::from(
            "\ntime: one operation on the slowest rank; bound: plain loops that move the same bytes;\n\
             x: time over the column before; cpu: CPU time of all ranks; of: samples in that mode.\n",
        ),
    };
    let mut section = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            let _ = write!(text, "\n{title}\n{}", lines.concat());
        }
    };
    let plain = figures.iter().filter_map(|figure| {
        let (us, times) = (figure.plain_us?, figure.plain_ratio?);
        let name = format!("{} {} {}", figure.op.name(), size(figure.bytes), figure.mode.name());
        Some(format!("  {name:<40} {:>9}, {} of {}\n", time(figure.us), ratio(times), time(us)))
    });
    section("Against the plain form: separate results, or one extra copy each way", plain.collect());
    let missed = figures.iter().filter(|figure| misses(figure)).map(|figure| {
        let name = format!("{} {} {}", figure.op.name(), size(figure.bytes), figure.mode.name());
        format!("  {name:<40} {} ranks\n", figure.ranks)
    });
    let title = format!("More than {} us (4 B) or {}x (from 64 KiB) of the nonblocking call", BARS.0, BARS.1);
    section(&title, missed.collect());
    if transport == Transport::Mpi {
        return text;
    }
    let slower =
        figures.iter().filter(|figure| figure.ratio.is_some_and(|ratio| ratio > 1.0)).map(|figure| {
            let name = format!("{} {} {}", figure.op.name(), size(figure.bytes), figure.mode.name());
            let [peer, bound] =
                [figure.ratio, figure.bound_ratio].map(|value| value.map_or("-".into(), ratio));
            format!("  {name:<40} {} ranks   {peer} of the peer   {bound} of the bound\n", figure.ranks)
        });
    section("Slower than the peer", slower.collect());
    let two = |figure: &Figure| {
        let same = |two: &&Figure| {
            (two.op, two.bytes, two.mode, two.ranks) == (figure.op, figure.bytes, figure.mode, 2)
        };
        figures.iter().find(same).map(|two| figure.cpu_ns_per_byte() / two.cpu_ns_per_byte())
    };
    let more = figures.iter().filter(|figure| figure.ranks > 2).filter_map(|figure| {
        let name = format!("{} {} {}", figure.op.name(), size(figure.bytes), figure.mode.name());
        Some(format!("  {name:<40} {} ranks   {} of 2 ranks\n", figure.ranks, ratio(two(figure)?)))
    });
    section("CPU time per byte", more.collect());
    text
}

/// `64 KiB`.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", decimal(bytes as f64 / 1024.0)),
        _ => format!("{} MiB", decimal(bytes as f64 / 1_048_576.0)),
    }
}

/// One decimal, unless it is 0.
fn decimal(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

/// `12.3 us`, with three significant digits.
pub(crate) fn time(us: f64) -> String {
    let (value, unit) = if us.abs() < 1e3 { (us, "us") } else { (us / 1e3, "ms") };
    let digits = if value.abs() < 9.995 { 2 } else { usize::from(value.abs() < 99.95) };
    format!("{value:.digits$} {unit}")
}

/// `1.23x`; large ones, as on a machine that is busy, without digits that a column has no room for.
pub(super) fn ratio(value: f64) -> String {
    let digits = if value.abs() < 99.995 { 2 } else { 0 };
    format!("{value:.digits$}x")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!(
            [4, 1024, 1536, 65536, 64 << 20].map(size),
            ["4 B", "1 KiB", "1.5 KiB", "64 KiB", "64 MiB"]
        );
        assert_eq!([1.234, 99.99, 1569.72].map(ratio), ["1.23x", "99.99x", "1570x"]);
        assert_eq!([0.254, 12.34, 999.0, 4264.0].map(time), ["0.25 us", "12.3 us", "999 us", "4.26 ms"]);
    }
}
