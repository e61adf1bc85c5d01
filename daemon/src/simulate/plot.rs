//! Pictures of what was simulated: which algorithm where, and how long each takes.
//!
//! Owns the map and the algorithms' colours. Called by `explain`, which says what is in each cell. Refuses to choose an
//! algorithm.

use crate::svg::{self, Axis, Line, bytes, escaped};
use allreduce_contract::Algorithm;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Colour of an algorithm: white is read on it, and it is read on white.
const fn colour(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::OneShot => "#37474f",
        Algorithm::OneShotChunked => "#4a148c",
        Algorithm::TwoShot => "#1a237e",
        Algorithm::OneShotPush => "#c2185b",
        Algorithm::OneShotPull => "#8d3b1f",
        Algorithm::OneShotPullInband => "#bf4a10",
        Algorithm::TwoShotPush => "#0b6bcb",
        Algorithm::TwoShotPull => "#00695c",
        Algorithm::TwoShotPullInband => "#007a8a",
        Algorithm::Hierarchical => "#2e7d32",
        Algorithm::HostStaged => "#616161",
        Algorithm::CopyEngineRing => "#7d3ac1",
    }
}

/// Left and top of the cells, their right, height of a row, space below.
const LEFT: f64 = 70.0;
const TOP: f64 = 60.0;
const RIGHT: f64 = 980.0;
const ROW: f64 = 26.0;
const BELOW: f64 = 50.0;
/// Height of the legend's rows, and width of its entries.
const LEGEND_ROW: f64 = 20.0;
const LEGEND_ENTRY: f64 = 175.0;
/// A figure in a cell, at its font size: width of a character.
const CHARACTER: f64 = 6.2;

/// Microseconds, in few characters.
fn short_us(us: f64) -> String {
    match us {
        us if us < 99.95 => format!("{us:.1}"),
        us if us < 9_999.5 => format!("{us:.0}"),
        us => format!("{:.0}k", us / 1e3),
    }
}

/// The algorithm of each size (bytes of a rank's tensor; a logarithmic axis, each size in the middle of its cell) and world size (rows), with
/// the microseconds it takes where they fit. None without a cell, or if one has no algorithm; a size of 0 has no place on the axis.
pub(crate) fn map_svg(
    title: &str,
    world_sizes: &[usize],
    sizes: &[usize],
    cell: &dyn Fn(usize, usize) -> Option<(Algorithm, f64)>,
) -> Option<String> {
    let mut sizes: Vec<usize> = sizes.iter().copied().filter(|size| *size > 0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let edges = edges(&sizes)?;
    if world_sizes.is_empty() {
        return None;
    }
    let axis = Axis::exactly(*edges.first()?, *edges.last()?, LEFT, RIGHT);
    let columns: Vec<(usize, f64, f64)> = sizes
        .iter()
        .zip(edges.iter().zip(edges.iter().skip(1)))
        .map(|(size, (from, to))| (*size, axis.place(*from), axis.place(*to)))
        .collect();
    // By their place in the vocabulary, so that two maps have their legends in one order.
    let mut used: BTreeMap<usize, Algorithm> = BTreeMap::new();
    let mut cells = String::new();
    for (row, world_size) in world_sizes.iter().enumerate() {
        let top = TOP + ROW * row as f64;
        // Writing to a String does not fail.
        let _ = writeln!(
            cells,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">N={world_size}</text>"#,
            LEFT - 8.0,
            top + ROW / 2.0 + 4.0
        );
        for (size, left, right) in &columns {
            let (algorithm, us) = cell(*world_size, *size)?;
            let mut all = Algorithm::ALL.iter();
            used.insert(all.position(|of| *of == algorithm)?, algorithm);
            let (width, name) = (right - left, algorithm.name());
            let _ = write!(
                cells,
                r##"<rect x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{ROW}" fill="{}" stroke="#fff"><title>N={world_size}, {size} B: {name}"##,
                colour(algorithm)
            );
            let text = short_us(us);
            match us.is_finite() {
                true => {
                    let _ = write!(cells, ", {us:.2} us</title></rect>");
                }
                false => cells.push_str("</title></rect>"),
            }
            if us.is_finite() && text.len() as f64 * CHARACTER + 4.0 <= width {
                let _ = write!(
                    cells,
                    r##"<text x="{:.1}" y="{:.1}" text-anchor="middle" font-size="11" fill="#fff">{text}</text>"##,
                    (left + right) / 2.0,
                    top + ROW / 2.0 + 4.0
                );
            }
            cells.push('\n');
        }
    }
    let bottom = TOP + ROW * world_sizes.len() as f64;
    let mut free_from = f64::NEG_INFINITY;
    for (size, left, right) in &columns {
        let (middle, text) = ((left + right) / 2.0, bytes(*size as f64));
        let half = text.len() as f64 * CHARACTER / 2.0 + 3.0;
        if middle - half >= free_from {
            let _ = writeln!(
                cells,
                r##"<path d="M{middle:.1} {bottom:.1}v5" stroke="#1b1b1b"/><text x="{middle:.1}" y="{:.1}" text-anchor="middle">{text}</text>"##,
                bottom + 18.0
            );
            free_from = middle + half;
        }
    }
    let per_row = ((RIGHT - LEFT) / LEGEND_ENTRY).floor().max(1.0) as usize;
    let legend_rows = used.len().div_ceil(per_row);
    let height = bottom + BELOW + LEGEND_ROW * legend_rows as f64;
    let mut out = svg::page(RIGHT + 20.0, height);
    let _ = writeln!(
        out,
        r#"<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{}</text>
<text x="{LEFT}" y="44">bytes of a rank's tensor (across), ranks (down); in the cells: predicted us</text>"#,
        escaped(title)
    );
    out.push_str(&cells);
    for (index, algorithm) in used.values().enumerate() {
        let x = LEFT + LEGEND_ENTRY * (index % per_row) as f64;
        let y = bottom + BELOW + LEGEND_ROW * (index / per_row) as f64;
        let _ = writeln!(
            out,
            r#"<rect x="{x:.1}" y="{:.1}" width="14" height="14" fill="{}"/><text x="{:.1}" y="{y:.1}">{algorithm}</text>"#,
            y - 11.0,
            colour(*algorithm),
            x + 20.0
        );
    }
    Some(svg::close(out))
}

/// Where one size's cell ends and the next begins: half way, on a logarithmic axis. None without a size.
fn edges(sizes: &[usize]) -> Option<Vec<f64>> {
    let logs: Vec<f64> = sizes.iter().map(|size| (*size as f64).ln()).collect();
    let (first, last) = (logs.first()?, logs.last()?);
    let pairs = || logs.iter().zip(logs.iter().skip(1));
    let halves: Vec<f64> = pairs().map(|(one, other)| (one + other) / 2.0).collect();
    // The outer cells are as wide on their outer side as on their inner one; a lone one is one power of two.
    let alone = 2_f64.ln() / 2.0;
    let before = halves.first().map_or(alone, |half| half - first);
    let after = halves.last().map_or(alone, |half| last - half);
    let all = std::iter::once(first - before)
        .chain(halves)
        .chain([last + after]);
    Some(all.map(f64::exp).collect())
}

/// Latency over size, a line for each algorithm. `us`: microseconds of an algorithm at bytes of a rank's tensor; none where it does not run.
/// None without a point.
pub(crate) fn lines_svg(
    title: &str,
    algorithms: &[Algorithm],
    sizes: &[usize],
    us: &dyn Fn(Algorithm, usize) -> Option<f64>,
) -> Option<String> {
    let is_drawn = |us: &f64| us.is_finite() && *us > 0.0;
    let lines: Vec<Line<'_>> = algorithms
        .iter()
        .map(|algorithm| Line {
            name: algorithm.to_string(),
            colour: colour(*algorithm),
            is_dashed: false,
            points: sizes
                .iter()
                .filter(|size| **size > 0)
                .filter_map(|size| Some((*size as f64, us(*algorithm, *size).filter(is_drawn)?)))
                .collect(),
        })
        .filter(|line| !line.points.is_empty())
        .collect();
    svg::lines(title, "bytes of a rank's tensor; predicted us", &lines)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_map_is_well_formed_and_every_algorithm_used_is_in_its_legend() {
        let sizes: Vec<usize> = (8..=26).map(|power| 1 << power).rev().collect();
        let cell = |world_size: usize, size: usize| {
            Some(match (world_size, size) {
                (2, _) => (Algorithm::OneShotPush, 3.25),
                (_, 0..=65_536) => (Algorithm::TwoShotPush, 8.0),
                (_, 65_537..=4_194_304) => (Algorithm::Hierarchical, 123_456.0),
                _ => (Algorithm::CopyEngineRing, f64::INFINITY),
            })
        };
        let picture = map_svg("a <b> & c", &[2, 3, 16], &sizes, &cell).unwrap();
        assert_eq!(svg::is_well_formed(&picture), Ok(()));
        for algorithm in [
            Algorithm::OneShotPush,
            Algorithm::TwoShotPush,
            Algorithm::Hierarchical,
            Algorithm::CopyEngineRing,
        ] {
            let entry = format!(">{algorithm}</text>");
            assert_eq!(picture.matches(&entry).count(), 1, "{algorithm}");
        }
        assert!(!picture.contains(">two_shot_pull</text>"));
        assert!(picture.contains(">N=16</text>"));
        // 19 cells a row, each wide enough for a figure; those that are not finite have none.
        assert_eq!(picture.matches("<title>").count(), 3 * 19);
        assert_eq!(picture.matches(">3.2</text>").count(), 19);
        assert_eq!(picture.matches(">8.0</text>").count(), 2 * 9);
        assert!(picture.contains(">123k</text>"));
        assert!(picture.contains(">64 KiB</text>") && picture.contains(">64 MiB</text>"));
    }

    #[test]
    fn figures_are_left_out_where_they_do_not_fit() {
        let sizes: Vec<usize> = (1..=200).map(|size| size * 4096).collect();
        let cell = |_: usize, _: usize| Some((Algorithm::TwoShotPush, 1234.5));
        let picture = map_svg("", &[8], &sizes, &cell).unwrap();
        assert_eq!(svg::is_well_formed(&picture), Ok(()));
        let shown = picture.matches(">1234</text>").count();
        assert!((1..100).contains(&shown), "{shown}");
    }

    #[test]
    fn nothing_is_no_picture_and_one_cell_is_one() {
        let cell = |_: usize, _: usize| Some((Algorithm::TwoShotPush, 1.0));
        assert_eq!(map_svg("", &[], &[1024], &cell), None);
        assert_eq!(map_svg("", &[2], &[0], &cell), None);
        let one = map_svg("", &[2], &[1024, 1024, 0], &cell).unwrap();
        assert_eq!(svg::is_well_formed(&one), Ok(()));
        assert_eq!(one.matches("<title>").count(), 1);
        let most = map_svg("", &[2], &[1, usize::MAX], &cell).unwrap();
        assert_eq!(svg::is_well_formed(&most), Ok(()));
    }

    #[test]
    fn colours_differ_and_white_is_read_on_each() {
        let linear = |hex: &str| {
            let value = f64::from(u8::from_str_radix(hex, 16).unwrap()) / 255.0;
            match value {
                value if value <= 0.040_45 => value / 12.92,
                value => ((value + 0.055) / 1.055).powf(2.4),
            }
        };
        let mut seen = std::collections::BTreeSet::new();
        for algorithm in Algorithm::ALL {
            let colour = colour(algorithm);
            assert!(seen.insert(colour), "{algorithm}");
            let part = |at: usize| linear(colour.get(at..at + 2).unwrap());
            let luminance = 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
            let contrast = 1.05 / (luminance + 0.05);
            assert!(contrast >= 4.5, "{algorithm}: {contrast:.2}");
        }
    }

    #[test]
    fn lines_are_those_of_the_algorithms_that_run() {
        let us = |algorithm: Algorithm, size: usize| match algorithm {
            Algorithm::HostStaged => None,
            Algorithm::TwoShotPush => Some(3.0 + size as f64 / 25e3),
            _ => Some(f64::INFINITY),
        };
        let picture = lines_svg("t", &Algorithm::ALL, &[0, 1024, 1 << 20], &us).unwrap();
        assert_eq!(svg::is_well_formed(&picture), Ok(()));
        assert_eq!(picture.matches("stroke-width=\"2\"").count(), 1);
        assert!(picture.contains(">two_shot_push</text>"));
        assert_eq!(lines_svg("t", &[Algorithm::HostStaged], &[1024], &us), None);
    }
}
