//! `bench --plot FILE`: the rows as a picture, latency over size.
//!
//! Owns what is a line: one for each lane, world size and dtype. Refuses to judge: what the rows say is drawn.

use crate::bench::Row;
use crate::svg::{self, COLOURS, Line};
use std::collections::BTreeMap;

/// Backend, lane, world size, dtype.
type Name = (String, String, u32, String);

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
    let lines: Vec<Line<'_>> = lines
        .into_iter()
        .enumerate()
        .map(
            |(index, ((backend, lane, world_size, dtype), points))| Line {
                name: format!("{backend} {lane}, N={world_size}, {dtype}"),
                colour: COLOURS.get(index % COLOURS.len()).unwrap_or(&"#000"),
                is_dashed: index >= COLOURS.len(),
                points,
            },
        )
        .collect();
    svg::lines("", "bytes of a rank's tensor; p50 of a reduction", &lines)
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
        assert_eq!(svg::is_well_formed(&picture), Ok(()));
        let [left, right, top, bottom] = svg::FRAME;
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
