//! What is printed.
//!
//! Owns the words, the tables and the JSON object. Called by main with everything that was found. Refuses
//! to decide anything.

use crate::check::{Verdict, cosine};
use crate::job::{Joined, Report};
use crate::rank_sum::Measured;
use serde::Serialize;
use std::fmt::Write;
use std::ops::Range;
use std::time::Duration;

/// Sentences that the table shows; JSON has all.
const TABLE_MAX: usize = 12;

/// Everything that was found. Its JSON is the output of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome<'a> {
    schema_version: u32,
    world_size: usize,
    communicator: &'a Joined,
    all_reduce_replaced_by_identity: bool,
    sentences: &'a [String],
    /// Cosines of each sentence with each.
    similarity: Vec<Vec<f64>>,
    #[serde(flatten)]
    verdict: Verdict,
    reductions: Reductions,
    ranks: Vec<Rank>,
}

/// What is the same for all ranks.
#[derive(Debug, Serialize)]
struct Reductions {
    /// Made by each rank.
    count: usize,
    /// Elements of the longest.
    max_num_elems: usize,
    /// Medians. From the first rank's call to the last's: they were computing.
    p50_skew_us: u64,
    /// The last rank's call, which waits for nobody: what a reduction costs.
    p50_last_call_us: u64,
    /// The executor's part of that.
    p50_reduce_us: u64,
}

impl Reductions {
    fn new(first: &[Measured], reports: &[Report]) -> Self {
        let last_call = |index: usize| {
            let calls = reports.iter().filter_map(|one| one.measured.get(index));
            calls.map(|one| one.call).min()
        };
        Self {
            count: first.len(),
            max_num_elems: first.iter().map(|one| one.num_elems).max().unwrap_or(0),
            p50_skew_us: p50(first.iter().map(|one| one.skew)),
            p50_last_call_us: p50((0..first.len()).filter_map(last_call)),
            p50_reduce_us: p50(first.iter().map(|one| one.reduce)),
        }
    }
}

/// A rank's part of it.
#[derive(Debug, Serialize)]
struct Rank {
    rank: u32,
    heads: Range<usize>,
    columns: Range<usize>,
    weights_len_bytes: u64,
    reductions: usize,
    /// In calls, from call to return, all together; waiting for other ranks included.
    total_us: u64,
    /// The median call.
    p50_us: u64,
}

impl Rank {
    fn new(report: &Report) -> Self {
        let calls = report.measured.iter().map(|one| one.call);
        Self {
            rank: report.shard.rank,
            heads: report.heads.clone(),
            columns: report.columns.clone(),
            weights_len_bytes: report.weights_len_bytes,
            reductions: report.measured.len(),
            total_us: micros(calls.clone().sum()),
            p50_us: p50(calls),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn p50(times: impl Iterator<Item = Duration>) -> u64 {
    let mut times: Vec<Duration> = times.collect();
    times.sort();
    times.get(times.len() / 2).map_or(0, |time| micros(*time))
}

impl<'a> Outcome<'a> {
    /// Puts together what was found.
    pub(crate) fn new(
        first: &'a Report,
        reports: &[Report],
        sentences: &'a [String],
        embeddings: &[Vec<f32>],
        verdict: Verdict,
        all_reduce_replaced_by_identity: bool,
    ) -> Self {
        Self {
            schema_version: 1,
            world_size: reports.len(),
            communicator: &first.joined,
            all_reduce_replaced_by_identity,
            sentences,
            similarity: embeddings
                .iter()
                .map(|a| embeddings.iter().map(|b| cosine(a, b)).collect())
                .collect(),
            verdict,
            reductions: Reductions::new(&first.measured, reports),
            ranks: reports.iter().map(Rank::new).collect(),
        }
    }

    /// For people.
    ///
    /// # Errors
    /// None but `fmt`'s, which a String does not have.
    pub(crate) fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let out = &mut text;
        let Joined {
            backend,
            lane,
            lane_reason,
            epoch,
        } = self.communicator;
        writeln!(
            out,
            "all-MiniLM-L6-v2, {} sentences, world size {}; epoch {epoch} on backend {backend}",
            self.sentences.len(),
            self.world_size,
        )?;
        writeln!(out, "lane {lane}: {lane_reason}")?;
        if self.all_reduce_replaced_by_identity {
            writeln!(
                out,
                "all-reduce is replaced by the identity: the check must fail"
            )?;
        }
        self.similarity_table(out)?;
        self.rank_table(out)?;
        writeln!(
            out,
            "\nunsharded model: {}, min cosine {:.9}, max abs difference {:.1e}",
            if self.verdict.equal {
                "equal"
            } else {
                "DIFFERENT"
            },
            self.verdict.min_cosine,
            self.verdict.max_abs_difference,
        )?;
        writeln!(
            out,
            "ranks: embeddings {}",
            if self.verdict.bit_identical {
                "bit-identical on all"
            } else {
                "DIFFERENT"
            },
        )?;
        Ok(text)
    }

    fn similarity_table(&self, out: &mut String) -> std::fmt::Result {
        let shown = self.sentences.len().min(TABLE_MAX);
        write!(out, "\nsimilarity")?;
        for number in 1..=shown {
            write!(out, "{number:>7}")?;
        }
        writeln!(out)?;
        let rows = self.similarity.iter().zip(self.sentences);
        for (number, (row, sentence)) in (1..=shown).zip(rows) {
            write!(out, "{number:>10}")?;
            for cosine in row.iter().take(shown) {
                write!(out, "{cosine:>7.3}")?;
            }
            writeln!(out, "  {sentence}")?;
        }
        if shown < self.sentences.len() {
            writeln!(out, "(the first {shown}; --json has all)")?;
        }
        Ok(())
    }

    fn rank_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\nrank   heads  MLP columns  weights  reductions  time in them      p50"
        )?;
        for rank in &self.ranks {
            let heads = format!("{}..{}", rank.heads.start, rank.heads.end);
            let columns = format!("{}..{}", rank.columns.start, rank.columns.end);
            writeln!(
                out,
                "{:>4}  {heads:>6}  {columns:>11}  {:>4.1} MB  {:>10}  {:>9.1} ms  {:>4} us",
                rank.rank,
                rank.weights_len_bytes as f64 / 1e6,
                rank.reductions,
                rank.total_us as f64 / 1e3,
                rank.p50_us,
            )?;
        }
        let Reductions {
            count,
            max_num_elems,
            p50_skew_us,
            p50_last_call_us,
            p50_reduce_us,
        } = self.reductions;
        if count > 0 {
            writeln!(
                out,
                "p50 of reductions of up to {max_num_elems} f32: {p50_skew_us} us until the last rank \
                 calls, then {p50_last_call_us} us ({p50_reduce_us} us of it reducing)",
            )?;
        }
        Ok(())
    }
}
