//! The ranks, from their parent's side.
//!
//! Owns the worker processes: starts one for each rank, hands out jobs, collects reports. When one fails
//! or the value is dropped, the others are ended, so that none stays behind.

use crate::job::{Job, Report};
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;

/// The subcommand that makes a process a rank.
pub(crate) const SUBCOMMAND: &str = "rank";

/// The ranks did not all report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RanksError {
    /// A process or thread did not start.
    #[error("rank {rank} does not start: {source}")]
    Start {
        /// Which.
        rank: u32,
        /// Why.
        source: io::Error,
    },
    /// A rank ended without a report.
    #[error("rank {rank} failed: {status}")]
    Failed {
        /// Which.
        rank: u32,
        /// How it ended; standard error has its words.
        status: ExitStatus,
    },
    /// A rank's output is no report.
    #[error("rank {rank} reported {source}")]
    Report {
        /// Which.
        rank: u32,
        /// What is wrong.
        source: serde_json::Error,
    },
}

/// Running ranks. Dropping ends them.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // No effect on one that has ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Runs one rank for each job; gives their reports in rank order.
///
/// # Errors
/// [`RanksError`] of the rank that failed first.
pub(crate) fn run(executable: &Path, jobs: &[Job]) -> Result<Vec<Report>, RanksError> {
    let (sender, outputs) = mpsc::channel();
    let mut ranks = Ranks(Vec::new());
    for job in jobs {
        let rank = job.shard.rank;
        let start = |source| RanksError::Start { rank, source };
        let mut child = Command::new(executable)
            .arg(SUBCOMMAND)
            .envs(share_of_cores(jobs.len()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(start)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        ranks.0.push(child);
        let (Some(mut stdin), Some(mut stdout)) = (stdin, stdout) else {
            return Err(start(io::Error::other("no pipes")));
        };
        let job = serde_json::to_vec(job).map_err(|error| start(error.into()))?;
        // A rank that ends before it has read all breaks the pipe; its exit status says more.
        let _ = stdin.write_all(&job);
        drop(stdin);
        let sender = sender.clone();
        std::thread::Builder::new()
            .spawn(move || {
                let mut output = Vec::new();
                // A broken pipe leaves no report, which is noticed. The receiver may be gone.
                let _ = stdout.read_to_end(&mut output);
                let _ = sender.send((rank, output));
            })
            .map_err(start)?;
    }
    drop(sender);
    let mut reports = Vec::new();
    // Whichever ends first is looked at first: the others may be waiting for it.
    for (rank, output) in outputs {
        let Some(child) = ranks.0.get_mut(rank as usize) else {
            continue;
        };
        let status = child
            .wait()
            .map_err(|source| RanksError::Start { rank, source })?;
        if !status.success() {
            return Err(RanksError::Failed { rank, status });
        }
        let report: Report = serde_json::from_slice(&output)
            .map_err(|source| RanksError::Report { rank, source })?;
        reports.push(report);
    }
    reports.sort_by_key(|report| report.shard.rank);
    Ok(reports)
}

/// A rank's share of the cores, for candle's threads: else each rank would start one for every core.
/// What the user has set stays.
fn share_of_cores(world_size: usize) -> Option<(&'static str, String)> {
    const THREADS: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(THREADS).is_some() {
        return None;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Some((THREADS, (cores / world_size.max(1)).max(1).to_string()))
}
