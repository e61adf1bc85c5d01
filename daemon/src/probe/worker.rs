//! A child of the probe: does one job on the GPUs, and says each thing when it has it.
//!
//! Owns contexts, memory and kernels for as long as the job takes. Started by `allreduced probe`, which kills it when it is late.
//! Refuses to compute anything but rates and times.
#![allow(unsafe_code)] // room: CUDA bindings

use super::job::{Answer, Job, Visible};
use crate::backend::cuda::probe_kernels;
use crate::communicator::GpuError;
use crate::config::{Config, Flags};
use crate::device::{self, DeviceError};
use crate::wire::{print_line, read_line};
use allreduce_contract::cuda::{
    Context, CudaError, DeviceMemory, DevicePtr, Driver, Event, Stream, Unavailable,
};
use allreduce_contract::module::{ProbeCopy, ProbeFlag, ProbeKernels};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one timed run of copies takes about; above what a launch costs by far.
const RUN: Duration = Duration::from_millis(20);
/// Timed runs, of which the middle counts.
const RUNS: usize = 5;
/// Round trips of a flag.
const ROUNDS: u32 = 10_000;
/// Bytes of a pack.
const PACK_BYTES: u64 = 16;

/// Why a child gives up.
#[derive(Debug, thiserror::Error)]
enum WorkerError {
    #[error("the probe's job: {0}")]
    Job(std::io::Error),
    #[error("standard output: {0}")]
    Output(std::io::Error),
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

fn say(answer: &Answer) -> Result<(), WorkerError> {
    print_line(answer).map_err(WorkerError::Output)
}

/// The child process. What goes wrong is an answer too.
pub(super) fn run() -> Result<(), String> {
    let job: Job = read_line()
        .map_err(WorkerError::Job)
        .map_err(|error| error.to_string())?;
    let done = match &job {
        Job::List => list(),
        Job::Hang => loop {
            std::thread::park();
        },
        Job::Pair {
            from,
            to,
            len_bytes,
            limit_ms,
        } => measure_pair(from, to, *len_bytes, Duration::from_millis(*limit_ms)),
        Job::All { gpus, len_bytes } => measure_all(gpus, *len_bytes),
    };
    done.or_else(|error| match error {
        // Nobody hears.
        WorkerError::Output(_) => Err(error),
        other => say(&Answer::Trouble(other.to_string())),
    })
    .and_then(|()| say(&Answer::Done))
    .map_err(|error| error.to_string())
}

fn list() -> Result<(), WorkerError> {
    let mut visible = Vec::new();
    for device in Driver::get()?.devices()? {
        let domain = device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let slot = device.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        visible.push(Visible {
            uuid: device.uuid().to_owned(),
            product: device.name().to_owned(),
            bus_id: format!("{domain:04x}:{bus:02x}:{slot:02x}.0"),
        });
    }
    say(&Answer::Devices(visible))
}

/// A GPU of a job.
struct Gpu {
    context: Arc<Context>,
    kernels: ProbeKernels,
    stream: Stream,
    /// Enough to keep a link full, twice the multiprocessors.
    blocks: u32,
}

impl Gpu {
    fn open(uuid: &str) -> Result<Self, WorkerError> {
        let device = device::of_uuid(uuid)?;
        let blocks = device.multiprocessors()?.saturating_mul(2).max(1);
        let context = Context::retain(device)?;
        // Where NVRTC is, if this build has no kernels; the rest of a configuration is not the probe's.
        let environment = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let config = Config::load(None, environment, &Flags::default())
            .unwrap_or_default()
            .cuda;
        let kernels = probe_kernels(&context, &config)?;
        let stream = Stream::create(&context)?;
        Ok(Self {
            context,
            kernels,
            stream,
            blocks,
        })
    }

    /// Why this GPU's kernels cannot use memory of `peer`.
    fn no_access(&self, peer: &Self) -> Option<String> {
        match self.context.device().can_access(peer.context.device()) {
            Ok(true) => self
                .context
                .enable_peer(&peer.context)
                .err()
                .map(|error| error.to_string()),
            Ok(false) => Some("cuDeviceCanAccessPeer: no".to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    fn copy(&self, stream: &Stream, copy: ProbeCopy) -> Result<(), CudaError> {
        let entered = self.context.enter()?;
        // SAFETY: the stream is of this context. The ranges are allocations of the job that are long enough (each caller
        // passes whole ones of one length), in this context or in one that it has access to, and live until it is
        // synchronised; each is the destination of one copy at a time.
        unsafe {
            self.kernels
                .launch_copy(&entered, stream.raw().cast(), copy)
        }
    }

    /// GB/s of one copy, alone: the middle of some runs.
    fn rate(&self, copy: ProbeCopy) -> Result<f64, CudaError> {
        let (start, end) = (
            Event::create_timed(&self.context)?,
            Event::create_timed(&self.context)?,
        );
        let timed_us = |passes: u32| {
            // SAFETY: the stream is of the events' context and lives as long as self.
            unsafe { start.record_on(self.stream.raw().cast()) }?;
            self.copy(&self.stream, ProbeCopy { passes, ..copy })?;
            // SAFETY: as above.
            unsafe { end.record_on(self.stream.raw().cast()) }?;
            self.stream.synchronize()?;
            end.micros_since(&start)
        };
        timed_us(1)?;
        let passes = passes_for(RUN, timed_us(1)?);
        let mut runs = [0.0; RUNS];
        for run in &mut runs {
            *run = timed_us(passes)?;
        }
        runs.sort_by(f64::total_cmp);
        let us = runs.get(RUNS / 2).copied().unwrap_or(f64::INFINITY);
        Ok(gbps(copy.packs, passes, us))
    }
}

fn passes_for(run: Duration, one_us: f64) -> u32 {
    (run.as_secs_f64() * 1e6 / one_us.max(1.0)).clamp(1.0, 10_000.0) as u32
}

fn gbps(packs: u64, passes: u32, us: f64) -> f64 {
    (packs * PACK_BYTES) as f64 * f64::from(passes) / us / 1000.0
}

/// Bytes that no shift, swap or repetition of a page leaves the same.
fn pattern(len_bytes: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = usize::try_from(len_bytes / 8).unwrap_or(0);
    let mut bytes = Vec::with_capacity(words * 8);
    for _ in 0..words {
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// How many bytes of a memory are not the pattern's.
fn wrong_bytes(
    stream: &Stream,
    memory: &DeviceMemory,
    expected: &[u8],
) -> Result<usize, CudaError> {
    let mut found = vec![0; expected.len()];
    // SAFETY: the memory is at least as long as the pattern and of the stream's context.
    unsafe { stream.download(memory.start(), &mut found) }?;
    let pairs = found.iter().zip(expected);
    Ok(pairs.filter(|(found, expected)| found != expected).count())
}

fn measure_pair(from: &str, to: &str, len_bytes: u64, limit: Duration) -> Result<(), WorkerError> {
    let near = Gpu::open(from)?;
    let other = if from == to {
        None
    } else {
        Some(Gpu::open(to)?)
    };
    let far = other.as_ref().unwrap_or(&near);
    if other.is_some()
        && let Some(reason) = near.no_access(far)
    {
        return say(&Answer::Access(Some(reason)));
    }
    say(&Answer::Access(None))?;
    let packs = len_bytes / PACK_BYTES;
    let source = DeviceMemory::allocate(&near.context, len_bytes)?;
    let target = DeviceMemory::allocate(&near.context, len_bytes)?;
    let remote = DeviceMemory::allocate(&far.context, len_bytes)?;
    let expected = pattern(packs * PACK_BYTES);
    // SAFETY: the memory is as long as the pattern; only this stream uses it.
    unsafe { near.stream.upload(source.start(), &expected) }?;
    for memory in [&target, &remote] {
        let owner = if std::ptr::eq(memory, &target) {
            &near
        } else {
            far
        };
        // SAFETY: as above.
        unsafe { owner.stream.fill(memory.start(), 0, len_bytes) }?;
        owner.stream.synchronize()?;
    }
    near.stream.synchronize()?;
    let copy = |dst: &DeviceMemory, src: &DeviceMemory| ProbeCopy {
        dst: dst.start(),
        src: src.start(),
        packs,
        passes: 1,
        blocks: near.blocks,
    };
    say(&Answer::WriteGbps(near.rate(copy(&remote, &source))?))?;
    let wrong = wrong_bytes(&far.stream, &remote, &expected)?;
    if wrong > 0 {
        say(&Answer::Wrong(format!("{wrong} bytes wrong after writing")))?;
    }
    say(&Answer::ReadGbps(near.rate(copy(&target, &remote))?))?;
    let wrong = wrong_bytes(&near.stream, &target, &expected)?;
    if wrong > 0 {
        say(&Answer::Wrong(format!("{wrong} bytes wrong after reading")))?;
    }
    if other.is_some()
        && let Some(reason) = far.no_access(&near)
    {
        return say(&Answer::Trouble(format!("flag: no way back: {reason}")));
    }
    measure_flag(&near, far, limit)
}

/// Words of one role: what it polls, and its result 64 bytes on, which is not polled.
const FLAG_LEN_BYTES: u64 = 256;
const RESULT_OFFSET_BYTES: u64 = 64;

fn measure_flag(near: &Gpu, far: &Gpu, limit: Duration) -> Result<(), WorkerError> {
    let words = [
        DeviceMemory::allocate(&near.context, FLAG_LEN_BYTES)?,
        DeviceMemory::allocate(&far.context, FLAG_LEN_BYTES)?,
    ];
    // Streams of their own: on one GPU both kernels must run at once.
    let streams = [
        Stream::create(&near.context)?,
        Stream::create(&far.context)?,
    ];
    for (stream, memory) in streams.iter().zip(&words) {
        // SAFETY: the memory is that long and of the stream's context; nothing else uses it yet.
        unsafe { stream.fill(memory.start(), 0, FLAG_LEN_BYTES) }?;
        stream.synchronize()?;
    }
    let [asks, answers] = &words;
    let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let role = |mine: &DeviceMemory, peers: &DeviceMemory, answers| ProbeFlag {
        mine: mine.start(),
        peers: peers.start(),
        result: mine.start() + RESULT_OFFSET_BYTES,
        rounds: ROUNDS,
        answers,
        limit_ns,
    };
    let [asking, answering] = &streams;
    let launch = |gpu: &Gpu, stream: &Stream, flag: ProbeFlag| {
        let entered = gpu.context.enter()?;
        // SAFETY: the stream is of this context; the words are live until both streams are synchronised below, and each
        // GPU has access to the other's.
        unsafe { gpu.kernels.launch_flag(&entered, stream.raw().cast(), flag) }
    };
    launch(far, answering, role(answers, asks, true))?;
    // Though this may fail, the other ends at its limit, and its words must live until then.
    let asked = launch(near, asking, role(asks, answers, false));
    let ended = [answering.synchronize(), asking.synchronize()];
    asked?;
    for end in ended {
        end?;
    }
    let mut result = [0_u8; 16];
    // SAFETY: the range is within the role's words.
    unsafe { asking.download(asks.start() + RESULT_OFFSET_BYTES, &mut result) }?;
    let (rounds, ns) = result.split_at(8);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let (rounds, ns) = (number(rounds), number(ns));
    if rounds < u64::from(ROUNDS) {
        return say(&Answer::Trouble(format!(
            "flag: {rounds} of {ROUNDS} round trips in {} ms",
            limit.as_millis()
        )));
    }
    let ways = 2 * (rounds.max(2) - 1);
    say(&Answer::FlagUs(ns as f64 / ways as f64 / 1000.0))
}

/// One flow of many.
struct Flow<'a> {
    gpu: &'a Gpu,
    stream: Stream,
    end: Event,
    copy: ProbeCopy,
}

fn measure_all(uuids: &[String], len_bytes: u64) -> Result<(), WorkerError> {
    let gpus = uuids
        .iter()
        .map(|uuid| Gpu::open(uuid))
        .collect::<Result<Vec<_>, _>>()?;
    for (from, gpu) in gpus.iter().enumerate() {
        for (to, peer) in gpus.iter().enumerate().filter(|(to, _)| *to != from) {
            if let Some(reason) = gpu.no_access(peer) {
                return say(&Answer::Trouble(format!(
                    "all at once: GPU {from} to {to}: {reason}"
                )));
            }
        }
    }
    let sources = gpus
        .iter()
        .map(|gpu| DeviceMemory::allocate(&gpu.context, len_bytes))
        .collect::<Result<Vec<_>, _>>()?;
    // By owner and sender.
    let targets = gpus
        .iter()
        .map(|gpu| {
            gpus.iter()
                .map(|_| DeviceMemory::allocate(&gpu.context, len_bytes))
                .collect::<Result<Vec<_>, _>>()
        })
        .collect::<Result<Vec<_>, _>>()?;
    let place = |owner: usize, sender: usize| -> DevicePtr {
        let inbox = targets.get(owner).and_then(|of| of.get(sender));
        inbox.map_or(0, DeviceMemory::start)
    };
    let source = |of: usize| -> DevicePtr { sources.get(of).map_or(0, DeviceMemory::start) };
    for is_write in [true, false] {
        let mut flows = Vec::new();
        for (number, gpu) in gpus.iter().enumerate() {
            let peers = gpus.len().saturating_sub(1);
            // Each begins with its next one: no GPU is everybody's first.
            for peer in (1..gpus.len()).map(|step| (number + step) % gpus.len()) {
                let (dst, src) = match is_write {
                    true => (place(peer, number), source(number)),
                    false => (place(number, peer), source(peer)),
                };
                let share = gpu.blocks / u32::try_from(peers).unwrap_or(1).max(1);
                flows.push(Flow {
                    gpu,
                    stream: Stream::create(&gpu.context)?,
                    end: Event::create_timed(&gpu.context)?,
                    copy: ProbeCopy {
                        dst,
                        src,
                        packs: len_bytes / PACK_BYTES,
                        passes: 1,
                        blocks: share.max(4),
                    },
                });
            }
        }
        let rates = rates_of(&gpus, &flows)?;
        say(&match is_write {
            true => Answer::WriteAllGbps(rates),
            false => Answer::ReadAllGbps(rates),
        })?;
    }
    Ok(())
}

/// GB/s of each GPU, all flows at once.
fn rates_of(gpus: &[Gpu], flows: &[Flow<'_>]) -> Result<Vec<f64>, CudaError> {
    let starts = gpus
        .iter()
        .map(|gpu| Event::create_timed(&gpu.context))
        .collect::<Result<Vec<_>, _>>()?;
    let go = |passes: u32| -> Result<(), CudaError> {
        for (gpu, start) in gpus.iter().zip(&starts) {
            // SAFETY: the stream is of the event's context and lives as long as the GPU.
            unsafe { start.record_on(gpu.stream.raw().cast()) }?;
        }
        for flow in flows {
            let copy = ProbeCopy {
                passes,
                ..flow.copy
            };
            flow.gpu.copy(&flow.stream, copy)?;
            // SAFETY: the stream is of the event's context and lives as long as the flow.
            unsafe { flow.end.record_on(flow.stream.raw().cast()) }?;
        }
        for flow in flows {
            flow.stream.synchronize()?;
        }
        for gpu in gpus {
            gpu.stream.synchronize()?;
        }
        Ok(())
    };
    go(1)?;
    let begin = Instant::now();
    go(1)?;
    // Long beside the time in which the flows begin one after the other.
    let passes = passes_for(5 * RUN, begin.elapsed().as_secs_f64() * 1e6);
    go(passes)?;
    let rate = |(gpu, start): (&Gpu, &Event)| {
        let own = flows
            .iter()
            .filter(|flow| Arc::ptr_eq(&flow.gpu.context, &gpu.context));
        let (mut us, mut packs) = (0.0_f64, 0);
        for flow in own {
            us = us.max(flow.end.micros_since(start)?);
            packs += flow.copy.packs;
        }
        Ok(gbps(packs, passes, us))
    };
    gpus.iter().zip(&starts).map(rate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bytes_over_time() {
        // 16 MB in 1 ms, twice in 2.
        assert_eq!(gbps(1_000_000, 1, 1000.0), 16.0);
        assert_eq!(gbps(1_000_000, 2, 2000.0), 16.0);
        assert_eq!(passes_for(Duration::from_millis(20), 100.0), 200);
        assert_eq!(passes_for(Duration::from_millis(20), 0.0), 10_000);
        assert_eq!(passes_for(Duration::from_millis(20), 1e9), 1);
    }

    #[test]
    fn patterns_do_not_repeat() {
        let bytes = pattern(64);
        assert_eq!(bytes.len(), 64);
        assert_ne!(bytes.get(..32), bytes.get(32..));
    }
}
