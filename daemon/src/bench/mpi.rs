//! `bench --vs-mpi`: our lanes and OpenMPI's MPI_Allreduce, turn by turn.
//!
//! Owns the peer program (C, compiled with mpicc when it is asked for) and the pairs: a run of our ranks, a run of
//! OpenMPI's, as often as asked, so that both meet the same weather. What is told of a case is the median over the
//! pairs of the slowest rank's median. Refuses to guess: without mpicc it says so, and measures our lanes alone.

use super::peer::{PeerReport, PeerSpec, StepCase, TimedSpec};
use super::{BenchError, Row, SILENCE, row};
use crate::children::{ChildError, Children};
use crate::private::PrivateDaemon;
use crate::spread::Spread;
use crate::workload::{ReductionSpec, Workload};
use allreduce_contract::{Dtype, Lane, Op, WorldSize};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The peer's source.
const SOURCE: &str = include_str!("mpi_peer.c");

/// Bytes that the steps of a case may move, at most.
const CASE_BYTES: usize = 1 << 30;
/// Steps of a case, at least and at most.
const STEPS: std::ops::RangeInclusive<usize> = 30..=2000;

/// A step: what is reduced in it, one after the other.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) bytes: Vec<usize>,
}

impl Step {
    fn len_bytes(&self) -> usize {
        self.bytes.iter().sum()
    }

    fn steps(&self) -> usize {
        let steps = CASE_BYTES / self.len_bytes().max(1);
        steps.clamp(*STEPS.start(), *STEPS.end())
    }
}

/// One reduction of each length, and the step of a workload as f32 of as many bytes: MPI has no bf16.
pub(super) fn steps(bytes: &[u64], workload: Option<&Workload>) -> Vec<Step> {
    match workload {
        Some(workload) => vec![Step {
            name: workload.name.clone(),
            bytes: workload
                .reductions
                .iter()
                .map(|spec| spec.len_bytes().next_multiple_of(8))
                .collect(),
        }],
        None => bytes
            .iter()
            .map(|bytes| Step {
                name: String::new(),
                bytes: vec![usize::try_from(*bytes).unwrap_or(usize::MAX)],
            })
            .collect(),
    }
}

/// The compiled peer; its directory is removed with it.
struct Peer {
    dir: PathBuf,
}

impl Peer {
    /// Compiles it; none where there is no mpicc.
    fn compile() -> Result<Option<Self>, BenchError> {
        let dir = std::env::temp_dir().join(format!("allreduced-mpi-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(BenchError::Mpi)?;
        let peer = Self { dir };
        let source = peer.dir.join("mpi_peer.c");
        std::fs::write(&source, SOURCE).map_err(BenchError::Mpi)?;
        let compiled = Command::new("mpicc")
            .args(["-O2", "-std=gnu11", "-o"])
            .arg(peer.program())
            .arg(&source)
            .stdin(Stdio::null())
            .status();
        match compiled {
            Ok(status) if status.success() => Ok(Some(peer)),
            Ok(status) => Err(BenchError::MpiCompile(status)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(BenchError::Mpi(error)),
        }
    }

    fn program(&self) -> PathBuf {
        self.dir.join("mpi_peer")
    }

    /// Runs all cases; of each the slowest rank's median and 99th percentile.
    fn run(
        &self,
        world_size: WorldSize,
        dtype: Dtype,
        steps: &[Step],
    ) -> Result<Vec<Timed>, BenchError> {
        let mut command = Command::new("mpirun");
        command
            .args(["--oversubscribe", "-n", &world_size.get().to_string()])
            .arg(self.program())
            .arg(dtype.name());
        if nix::unistd::geteuid().is_root() {
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
            command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        for step in steps {
            let bytes: Vec<String> = step.bytes.iter().map(usize::to_string).collect();
            command.arg(format!("{}:{}", step.steps(), bytes.join(",")));
        }
        let ran = command
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(BenchError::Mpi)?;
        if !ran.status.success() {
            return Err(BenchError::MpiRun(ran.status));
        }
        let mut timed = vec![Timed::default(); steps.len()];
        let text = String::from_utf8_lossy(&ran.stdout);
        for line in text.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let parsed = match fields.as_slice() {
                [case, _, p50, p99] => case
                    .parse()
                    .ok()
                    .zip(p50.parse().ok())
                    .zip(p99.parse().ok()),
                _ => None,
            };
            let ((case, p50), p99): ((usize, f64), f64) =
                parsed.ok_or_else(|| BenchError::MpiLine(line.to_owned()))?;
            if let Some(timed) = timed.get_mut(case) {
                timed.slower(p50, p99);
            }
        }
        Ok(timed)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // At worst a file stays in the temporary directory.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A case in one run: the slowest rank's.
#[derive(Debug, Clone, Copy, Default)]
struct Timed {
    p50: f64,
    p99: f64,
}

impl Timed {
    fn slower(&mut self, p50: f64, p99: f64) {
        self.p50 = self.p50.max(p50);
        self.p99 = self.p99.max(p99);
    }

    fn median(runs: impl Iterator<Item = Self>) -> Spread {
        let (mut p50, mut p99): (Vec<f64>, Vec<f64>) = runs.map(|run| (run.p50, run.p99)).unzip();
        Spread {
            p50: Spread::of(&mut p50).p50,
            p99: Spread::of(&mut p99).p50,
            max: 0.0,
        }
    }
}

/// Runs all cases on a lane.
fn run_lane(
    socket: &Path,
    world_size: WorldSize,
    lane: Lane,
    dtype: Dtype,
    steps: &[Step],
) -> Result<(Vec<Timed>, Vec<String>), BenchError> {
    let specs: Vec<PeerSpec> = world_size
        .ranks()
        .map(|rank| {
            PeerSpec::Timed(TimedSpec {
                socket: socket.to_owned(),
                rank: rank.get(),
                world_size: world_size.get(),
                lane: lane.to_string(),
                dtype: dtype.to_string(),
                cases: steps
                    .iter()
                    .map(|step| StepCase {
                        bytes: step.bytes.clone(),
                        steps: step.steps(),
                    })
                    .collect(),
            })
        })
        .collect();
    let ranks = Children::<PeerReport>::start("bench-peer", &specs)?;
    let mut timed = vec![Timed::default(); steps.len()];
    let mut algorithms = Vec::new();
    for _ in 0..specs.len() {
        let reports = loop {
            match ranks.next(SILENCE)? {
                Ok((_, PeerReport::Timed(reports))) => break reports,
                Ok((_, _)) => {}
                Err(rank) => return Err(ChildError::Ended(rank).into()),
            }
        };
        for (timed, report) in timed.iter_mut().zip(&reports) {
            timed.slower(report.p50_us, report.p99_us);
        }
        algorithms = reports.into_iter().map(|report| report.algorithm).collect();
    }
    Ok((timed, algorithms))
}

/// Measures lanes and OpenMPI in `pairs` turns. The reason, if OpenMPI is not there.
pub(super) fn measure(
    world_size: WorldSize,
    lanes: &[Lane],
    dtype: Dtype,
    steps: &[Step],
    pairs: usize,
) -> Result<(Vec<Row>, Option<String>), BenchError> {
    if matches!(dtype, Dtype::F16 | Dtype::Bf16) {
        return Err(BenchError::MpiDtype(dtype));
    }
    let peer = Peer::compile()?;
    let mut mpi_runs: Vec<Vec<Timed>> = Vec::new();
    let mut lane_runs: Vec<Vec<Vec<Timed>>> = lanes.iter().map(|_| Vec::new()).collect();
    let mut algorithms: Vec<Vec<String>> = lanes.iter().map(|_| Vec::new()).collect();
    for _ in 0..pairs {
        for ((lane, runs), algorithms) in lanes.iter().zip(&mut lane_runs).zip(&mut algorithms) {
            // A daemon for each run: it is gone when OpenMPI has its turn.
            let daemon = PrivateDaemon::start_own(&[])?;
            let (timed, used) = run_lane(daemon.socket(), world_size, *lane, dtype, steps)?;
            runs.push(timed);
            *algorithms = used;
        }
        if let Some(peer) = &peer {
            mpi_runs.push(peer.run(world_size, dtype, steps)?);
        }
    }
    let mut rows = Vec::new();
    let of_case = |runs: &[Vec<Timed>], case: usize| {
        Timed::median(runs.iter().filter_map(|run| run.get(case).copied()))
    };
    for (case, step) in steps.iter().enumerate() {
        let spec = ReductionSpec::new(dtype, Op::Sum, step.len_bytes() as u64)?;
        let name = |algorithm: &str| match step.name.is_empty() {
            true => algorithm.to_owned(),
            false => step.name.clone(),
        };
        let mpi = peer.is_some().then(|| of_case(&mpi_runs, case));
        for ((lane, runs), algorithms) in lanes.iter().zip(&lane_runs).zip(&algorithms) {
            let algorithm = name(algorithms.get(case).map_or("", String::as_str));
            let own = row(
                world_size,
                spec,
                lane.name(),
                &algorithm,
                of_case(runs, case),
            );
            rows.push(match mpi {
                Some(mpi) => own.beside("openmpi", mpi),
                None => own,
            });
        }
        if let Some(mpi) = mpi {
            rows.push(row(world_size, spec, "openmpi", &name("none"), mpi));
        }
    }
    let skipped = peer
        .is_none()
        .then(|| "openmpi skipped: no mpicc".to_owned());
    Ok((rows, skipped))
}
