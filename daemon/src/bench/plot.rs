//! `bench --plot FILE`: the rows as a picture, latency over size.
//!
//! Owns the drawing: logarithmic axes, a line for each lane and world size, as SVG text. Refuses to judge: what the rows
//! say is drawn.

use crate::bench::Row;
use std::collections::BTreeMap;
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 540.0;
/// Left, right, top, bottom of the axes.
const FRAME: [f64; 4] = [70.0, 640.0, 30.0, 480.0];
const COLOURS: [&str; 10] = [
    "#0b6bcb", "#c8511b", "#1f8a4c", "#7d3ac1", "#a08200", "#c2185b", "#00838f", "#5d4037",
    "#455a64", "#9e9d24",
];

/// Backend, lane, world size, dtype.
type Name = (String, String, u32, String);

/// A logarithmic axis.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// From the decade below the least to the one above the greatest.
    fn over(values: impl Iterator<Item = f64> + Clone, base: f64, from: f64, to: f64) -> Self {
        let least = values.clone().fold(f64::MAX, f64::min).max(1e-3);
        let greatest = values.fold(f64::MIN, f64::max).max(least);
        let low = base.powf(least.log(base).floor());
        let high = base.powf(greatest.log(base).ceil()).max(low * base);
        Self {
            low,
            high,
            from,
            to,
        }
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        self.from + share * (self.to - self.from)
    }

    fn ticks(&self, base: f64) -> Vec<f64> {
        let steps = (self.high / self.low).log(base).round() as i32;
        (0..=steps).map(|step| self.low * base.powi(step)).collect()
    }
}

/// "42 KiB" of bytes.
fn bytes(value: f64) -> String {
    match value {
        value if value >= 1_048_576.0 => format!("{} MiB", (value / 1_048_576.0).round()),
        value if value >= 1024.0 => format!("{} KiB", (value / 1024.0).round()),
        value => format!("{value} B"),
    }
}

/// The picture; none of no row with a size.
pub(crate) fn svg(rows: &[Row]) -> Option<String> {
    let mut lines: BTreeMap<Name, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.bytes > 0 && row.p50_us > 0.0) {
        let key = (
            row.backend.clone(),
            row.lane.clone(),
            row.world_size,
            row.dtype.clone(),
        );
        let line = lines.entry(key).or_default();
        line.push((row.bytes as f64, row.p50_us));
    }
    let points = || lines.values().flatten();
    points().next()?;
    let [left, right, top, bottom] = FRAME;
    let x = Axis::over(points().map(|(bytes, _)| *bytes), 4.0, left, right);
    let y = Axis::over(points().map(|(_, us)| *us), 10.0, bottom, top);
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">"#
    );
    let _ = writeln!(
        out,
        r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>"##
    );
    for tick in x.ticks(4.0) {
        let at = x.place(tick);
        let _ = writeln!(
            out,
            r##"<path d="M{at:.1} {top}V{bottom}" stroke="#ddd"/><text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
            bottom + 18.0,
            bytes(tick)
        );
    }
    for tick in y.ticks(10.0) {
        let at = y.place(tick);
        let _ = writeln!(
            out,
            r##"<path d="M{left} {at:.1}H{right}" stroke="#ddd"/><text x="{:.1}" y="{:.1}" text-anchor="end">{tick} us</text>"##,
            left - 6.0,
            at + 4.0
        );
    }
    for (index, ((backend, lane, world_size, dtype), mut line)) in lines.into_iter().enumerate() {
        line.sort_by(|one, other| one.0.total_cmp(&other.0));
        let colour = COLOURS.get(index % COLOURS.len()).unwrap_or(&"#000");
        let dash = match index / COLOURS.len() {
            0 => "",
            _ => r#" stroke-dasharray="5 3""#,
        };
        let path: Vec<String> = line
            .iter()
            .map(|(bytes, us)| format!("{:.1} {:.1}", x.place(*bytes), y.place(*us)))
            .collect();
        let _ = writeln!(
            out,
            r#"<path d="M{}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>"#,
            path.join("L")
        );
        let row = top + 10.0 + 18.0 * index as f64;
        let _ = writeln!(
            out,
            r#"<path d="M{:.1} {:.1}h22" stroke="{colour}" stroke-width="3"{dash}/><text x="{:.1}" y="{row:.1}">{backend} {lane}, N={world_size}, {dtype}</text>"#,
            right + 20.0,
            row - 4.0,
            right + 50.0
        );
    }
    let _ = writeln!(
        out,
        r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">bytes of a rank's tensor; p50 of a reduction</text>"#,
        (left + right) / 2.0,
        bottom + 40.0
    );
    out.push_str("</svg>\n");
    Some(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn row(lane: &str, bytes: u64, p50_us: f64) -> Row {
        Row {
            backend: "cuda".to_owned(),
            lane: lane.to_owned(),
            world_size: 2,
            bytes,
            dtype: "bf16".to_owned(),
            algorithm: "one_shot_push".to_owned(),
            p50_us,
            p99_us: p50_us,
            algbw_gbps: 0.0,
            busbw_gbps: 0.0,
            ratio: None,
            peer: None,
        }
    }

    #[test]
    fn every_lane_is_a_line_inside_the_frame() {
        let rows = [
            row("rpc", 1024, 110.0),
            row("delegated", 1024, 1.8),
            row("delegated", 1 << 20, 5.3),
            row("rpc", 1 << 20, 160.0),
            row("ping", 0, 60.0),
        ];
        let picture = svg(&rows).unwrap();
        assert_eq!(picture.matches("stroke-width=\"2\"").count(), 2);
        assert!(picture.contains("cuda delegated, N=2, bf16"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
        let [left, right, top, bottom] = FRAME;
        let drawn = picture
            .lines()
            .filter(|line| line.contains("fill=\"none\""));
        for line in drawn {
            let path = line.split('"').nth(1).unwrap().trim_start_matches('M');
            for point in path.split('L') {
                let (x, y) = point.split_once(' ').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!(
                    (left..=right).contains(&x) && (top..=bottom).contains(&y),
                    "{point}"
                );
            }
        }
        assert_eq!(svg(&[]), None);
    }
}
