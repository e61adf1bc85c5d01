//! The map: which algorithm, for every world size and size.
//!
//! Owns the sweep, its table and its JSON form; the picture is drawn by [`crate::simulate::plot`]. Called by `explain`.

use crate::explain::answer::{Split, predicted};
use crate::explain::{Asked, Machine, Question};
use crate::simulate::plot::{lines_svg, map_svg};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, MAX_WORLD_SIZE, Op, WorldSize};
use serde::Serialize;
use std::fmt::Write;

/// Smallest and largest size of a sweep, as powers of two.
const BITS: std::ops::RangeInclusive<u32> = 8..=28;

/// The map.
#[derive(Debug, Serialize)]
pub(crate) struct Map {
    schema_version: u32,
    topology: String,
    dtype: String,
    op: String,
    rows: Vec<Row>,
}

/// One world size.
#[derive(Debug, Serialize)]
struct Row {
    world_size: u32,
    fabric: String,
    lane: Option<String>,
    cells: Vec<Cell>,
}

/// One size.
#[derive(Debug, Serialize)]
struct Cell {
    bytes: u64,
    algorithm: Option<String>,
    predicted_us: Option<f64>,
    refused: Option<String>,
}

/// Asks for every world size that the machine has GPUs for (host: all), and every power of two from 256 bytes to 256 MiB.
pub(crate) fn sweep(
    machine: &Machine,
    (backend, lane): (Option<Backend>, Option<Lane>),
    dtype: Dtype,
    op: Op,
) -> Map {
    let gpus = u32::try_from(machine.topology.gpus().len()).unwrap_or(MAX_WORLD_SIZE);
    let most = match gpus {
        0 | 1 => MAX_WORLD_SIZE,
        several => several.min(MAX_WORLD_SIZE),
    };
    let rows = (2..=most)
        .filter_map(|ranks| WorldSize::new(ranks).ok())
        .map(|world_size| {
            let asked = machine.communicator(world_size, backend, lane);
            let cell = |bits: u32| {
                let bytes = 1_u64 << bits;
                let question = Question {
                    num_elems: bytes / dtype.size_bytes() as u64,
                    dtype,
                    op,
                };
                match asked.plan(question, None) {
                    Ok(plan) => Cell {
                        bytes,
                        algorithm: Some(plan.algorithm.to_string()),
                        predicted_us: predicted(&asked, &plan, question).map(Split::total_us),
                        refused: None,
                    },
                    Err(refusal) => Cell {
                        bytes,
                        algorithm: None,
                        predicted_us: None,
                        refused: Some(refusal.to_string()),
                    },
                }
            };
            Row {
                world_size: world_size.get(),
                fabric: asked.costs.fabric.to_string(),
                lane: asked
                    .lane
                    .as_ref()
                    .ok()
                    .map(|choice| choice.lane.to_string()),
                cells: BITS.map(cell).collect(),
            }
        });
    Map {
        schema_version: 1,
        topology: machine.topology.name().to_owned(),
        dtype: dtype.to_string(),
        op: op.to_string(),
        rows: rows.collect(),
    }
}

impl Map {
    /// Ranges of sizes, by world size.
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "{}: {} {}; from which size on which algorithm (predicted us there)",
            self.topology, self.dtype, self.op
        );
        for row in &self.rows {
            let lane = row.lane.as_deref().unwrap_or("no lane");
            let _ = write!(
                out,
                "N={:<3} {:<16} {:<10}",
                row.world_size, row.fabric, lane
            );
            let mut before: Option<&str> = None;
            for cell in &row.cells {
                let name = cell.algorithm.as_deref().unwrap_or("refused");
                if before != Some(name) {
                    let us = cell
                        .predicted_us
                        .map_or_else(String::new, |us| format!(" ({us:.1})"));
                    let _ = write!(out, "  {} {name}{us}", size(cell.bytes));
                    before = Some(name);
                }
            }
            let _ = writeln!(out);
        }
        out
    }

    /// The picture; none if something is refused.
    pub(crate) fn svg(&self) -> Option<String> {
        let chosen = |world_size: usize, bytes: usize| {
            let row = self
                .rows
                .iter()
                .find(|row| row.world_size as usize == world_size)?;
            let cell = row.cells.iter().find(|cell| cell.bytes == bytes as u64)?;
            let algorithm: Algorithm = cell.algorithm.as_ref()?.parse().ok()?;
            Some((algorithm, cell.predicted_us.unwrap_or(f64::NAN)))
        };
        let worlds: Vec<usize> = self
            .rows
            .iter()
            .map(|row| row.world_size as usize)
            .collect();
        let sizes: Vec<usize> = BITS.map(|bits| 1 << bits).collect();
        let title = format!(
            "{}, {} {}: algorithm by size and world size, predicted us",
            self.topology, self.dtype, self.op
        );
        map_svg(&title, &worlds, &sizes, &chosen)
    }
}

/// Latency over size of one communicator, a line for each algorithm that it can have.
pub(crate) fn lines(machine: &Machine, asked: &Asked, question: Question) -> Option<String> {
    let lane = asked.lane.as_ref().ok()?.lane;
    let Question { dtype, op, .. } = question;
    let title = format!(
        "{}, {} ranks, lane {lane}, {dtype} {op}",
        machine.topology.name(),
        asked.world_size
    );
    let sizes: Vec<usize> = BITS.map(|bits| 1 << bits).collect();
    lines_svg(&title, &Algorithm::ALL, &sizes, &|algorithm, bytes| {
        let question = Question {
            num_elems: (bytes / dtype.size_bytes()) as u64,
            dtype,
            op,
        };
        let plan = asked.plan(question, Some(algorithm)).ok()?;
        predicted(asked, &plan, question).map(Split::total_us)
    })
}

/// A size in words.
fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes}B"),
        1024..0x10_0000 => format!("{}K", bytes >> 10),
        _ => format!("{}M", bytes >> 20),
    }
}
