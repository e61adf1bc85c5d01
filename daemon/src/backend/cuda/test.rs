//! The test before Ready: can these GPUs work together, by the kernels that will be used?
//!
//! Owns the test. Run on the CUDA thread when every rank has joined and mapped its window. For each pair of
//! ranks, then for all of them together, it runs real reductions on the real windows, on the way that [`Work`] takes (and
//! before that, each rank's flags are written and waited for) and compares every bit with
//! the reference: what drivers say about peers has been wrong, and a copy that works proves no kernel. GPUs that by the
//! driver's word cannot reach each other are not tried in pairs: all ranks reduce through host memory, if that is
//! allowed. Every wait has a deadline. The verdict is one for all ranks, and names whom it is about.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::window::{Begin, Window};
use crate::backend::cuda::work::{Part, Site, Work};
use crate::communicator::Signature;
use crate::config::{CudaConfig, HostStaged};
use crate::plan::model::Costs;
use crate::plan::{GpuLimits, check_algorithm, default_island_size, plan_of_test};
use crate::topology::Placed;
use allreduce_contract::cuda::{CudaError, DeviceMemory, wait_flags, write_flags};
use allreduce_contract::kernel::Instance;
use allreduce_contract::window::MAX_STREAMS;
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, Rank, WorldSize};
use allreduce_kernels::reference::reduce_bytes_tree;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Elements of a test's tensors: several blocks, and a tail that is no whole pack.
const NUM_ELEMS: usize = 4099;
/// How long a kernel of a test may wait for its peers.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the host waits for a test's kernels, which end by themselves before.
const TEST_DEADLINE: Duration = Duration::from_secs(5);

/// What GPUs that passed can take.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tested {
    pub(crate) limits: GpuLimits,
    /// How long each algorithm takes on their links; none where nothing connects them: one GPU.
    pub(crate) costs: Option<Arc<Costs>>,
    /// What is known of what connects them, for people.
    pub(crate) topology: String,
    /// What makes them slower than they could be, for people.
    pub(crate) notes: Vec<String>,
}

/// The ranks that a failure is about, and why they cannot work together.
type Failure = (Vec<Rank>, String);

pub(crate) type Verdict = Result<Tested, Failure>;

/// Tests the windows of an epoch, in rank order, and leaves them as the epoch starts from.
pub(crate) fn test(
    windows: &[Arc<Window>],
    config: &CudaConfig,
    placed: Option<&Placed>,
    epoch: u64,
    timeout: Duration,
) -> Verdict {
    for window in windows {
        let about = |error: &dyn std::fmt::Display| {
            (
                vec![window.rank],
                format!("rank {} ({}): {error}", window.rank, window.gpu.device()),
            )
        };
        match window.is_answered() {
            Ok(true) => {}
            Ok(false) => {
                return Err(about(
                    &"it says that it has mapped its window, but what it wrote there does not arrive",
                ));
            }
            Err(error) => return Err(about(&error)),
        }
    }
    for window in windows {
        test_flags(window).map_err(|reason| {
            let device = window.gpu.device();
            (
                vec![window.rank],
                format!("rank {} ({device}): flags: {reason}", window.rank),
            )
        })?;
    }
    let apart = find_apart(windows, config)?;
    let mut notes = placed.map_or_else(Vec::new, |placed| placed.notes.clone());
    match apart {
        None => test_pairs(windows, config)?,
        Some((ranks, reason)) if config.host_staged == HostStaged::Never => {
            let never = "cuda.host_staged = \"never\" refuses to go through host memory";
            return Err((ranks, format!("{reason}; {never}")));
        }
        Some((_, ref reason)) => {
            notes.push(format!("{reason}: reductions go through host memory"));
        }
    }
    let all = |reason: String| (Vec::new(), format!("all ranks together: {reason}"));
    let world_size = world_size_of(windows).map_err(all)?;
    if apart.is_some() || config.host_staged == HostStaged::Always {
        for window in windows {
            window
                .make_host_window(world_size, config.host_staged_bytes)
                .map_err(|error| all(error.to_string()))?;
        }
    }
    let limits = GpuLimits {
        peer_access: apart.is_none(),
        island_size: placed.map_or_else(
            || default_island_size(world_size),
            |placed| placed.island_size(world_size),
        ),
        ..limits(windows, config).map_err(all)?
    };
    for algorithm in Algorithm::ALL {
        let is_to_be_had = match algorithm.backend() {
            Backend::Host => false,
            Backend::Cuda => check_algorithm(algorithm, Lane::Rpc, world_size, &limits).is_ok(),
        };
        if is_to_be_had {
            run(windows, algorithm, Dtype::Bf16, config, limits).map_err(all)?;
        }
    }
    prepare(windows, epoch, timeout, limits).map_err(all)?;
    let costs = placed.map(|placed| {
        placed.costs(
            world_size,
            limits.island_size,
            limits.gpus,
            limits.peer_access,
        )
    });
    let (costs, topology) = costs.map_or_else(
        || {
            (
                None,
                "loopback; algorithms by the table of one GPU".to_owned(),
            )
        },
        |(costs, words)| (Some(Arc::new(costs)), words),
    );
    Ok(Tested {
        limits,
        costs,
        topology,
        notes,
    })
}

fn world_size_of(windows: &[Arc<Window>]) -> Result<WorldSize, String> {
    u32::try_from(windows.len())
        .ok()
        .and_then(|ranks| WorldSize::new(ranks).ok())
        .ok_or_else(|| "no ranks".to_owned())
}

/// By index, each pair of ranks once.
fn pairs(windows: &[Arc<Window>]) -> impl Iterator<Item = [&Arc<Window>; 2]> {
    let numbered = windows.iter().enumerate();
    numbered.flat_map(|(index, one)| {
        windows
            .iter()
            .skip(index + 1)
            .map(move |other| [one, other])
    })
}

/// What went wrong between two ranks.
fn of_pair([one, other]: [&Arc<Window>; 2], reason: &str) -> Failure {
    (
        vec![one.rank, other.rank],
        format!(
            "ranks {} ({}) and {} ({}): {reason}",
            one.rank,
            one.gpu.device(),
            other.rank,
            other.gpu.device()
        ),
    )
}

/// Has the GPUs reach each other's memory. Answers the first pair of ranks whose GPUs cannot, and why.
fn find_apart(windows: &[Arc<Window>], config: &CudaConfig) -> Result<Option<Failure>, Failure> {
    for pair in pairs(windows) {
        if config.assume_no_peer_access {
            let why = "no peer access, by cuda.assume_no_peer_access";
            return Ok(Some(of_pair(pair, why)));
        }
        let [one, other] = pair;
        if Arc::ptr_eq(&one.gpu, &other.gpu) {
            continue;
        }
        for (from, to) in [(one, other), (other, one)] {
            let failed = |error: CudaError| of_pair(pair, &error.to_string());
            let can_access = from.gpu.device().can_access(to.gpu.device());
            if !can_access.map_err(failed)? {
                let why = "the driver gives no peer access (cuDeviceCanAccessPeer is 0)";
                return Ok(Some(of_pair(pair, why)));
            }
            let enabled = from.gpu.context.enable_peer(&to.gpu.context);
            enabled.map_err(failed)?;
        }
    }
    Ok(None)
}

/// Reduces with each pair of ranks alone.
fn test_pairs(windows: &[Arc<Window>], config: &CudaConfig) -> Result<(), Failure> {
    for pair in pairs(windows) {
        let two = pair.map(Arc::clone);
        let limits = limits(&two, config).map_err(|reason| of_pair(pair, &reason))?;
        // One that writes to the peer, and one that reads from it.
        for algorithm in [Algorithm::OneShotPush, Algorithm::OneShotPull] {
            run(&two, algorithm, Dtype::F32, config, limits)
                .map_err(|reason| of_pair(pair, &reason))?;
        }
    }
    Ok(())
}

/// Writes a flag and waits for it, as reductions do. The rank's streams have not used theirs yet.
fn test_flags(window: &Window) -> Result<(), String> {
    let text = |error: CudaError| error.to_string();
    let flag = (window.ready_flag(MAX_STREAMS - 1), 1);
    {
        let entered = window.gpu.context.enter().map_err(text)?;
        let stream = window.gpu.stream.raw().cast();
        // SAFETY: the stream is live and of the context that is entered; the flag is in the window's arena.
        unsafe {
            write_flags(&entered, stream, [flag])
                .and_then(|()| wait_flags(&entered, stream, [flag]))
                .map_err(text)?;
        }
    }
    // SAFETY: as above.
    unsafe { window.gpu.stream.fill(flag.0, 0, 4) }.map_err(text)?;
    wait_idle(&[&window.gpu])
}

/// The GPUs of `windows`, each once, in order of their first rank.
pub(crate) fn gpus_of<'a>(windows: impl IntoIterator<Item = &'a Arc<Window>>) -> Vec<&'a Arc<Gpu>> {
    let mut gpus: Vec<&Arc<Gpu>> = Vec::new();
    for window in windows {
        if !gpus.iter().any(|gpu| Arc::ptr_eq(gpu, &window.gpu)) {
            gpus.push(&window.gpu);
        }
    }
    gpus
}

fn wait_idle(gpus: &[&Arc<Gpu>]) -> Result<(), String> {
    let deadline = Instant::now() + TEST_DEADLINE;
    for gpu in gpus {
        while !gpu.stream.is_idle().map_err(|error| error.to_string())? {
            if Instant::now() > deadline {
                let ms = TEST_DEADLINE.as_millis();
                return Err(format!(
                    "{}: the GPU was not done after {ms} ms",
                    gpu.device()
                ));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    Ok(())
}

/// Puts the windows into the state that `epoch` starts from, and waits until they are.
fn prepare(
    windows: &[Arc<Window>],
    epoch: u64,
    timeout: Duration,
    limits: GpuLimits,
) -> Result<(), String> {
    let begin = Begin {
        epoch,
        timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
        island_size: limits.island_size,
    };
    for (place, window) in (0..).zip(windows) {
        // SAFETY: nothing is launched on these windows: the epoch is being formed, and tests wait for their
        // end (one that did not end has failed the epoch).
        unsafe { window.begin_epoch(windows, place, begin) }.map_err(|error| error.to_string())?;
    }
    wait_idle(&gpus_of(windows))
}

/// Bytes that look like nothing else, the same in every run: finite values of both signs.
fn data(place: usize, dtype: Dtype) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(place as u64 + 1);
    let mut bytes = Vec::with_capacity(NUM_ELEMS * dtype.size_bytes());
    for _ in 0..NUM_ELEMS {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // A sign, an exponent around zero, any mantissa; bf16 is the upper half.
        let random = (state >> 32) as u32;
        let value = (random & 0x807f_ffff) | ((120 + (random >> 23 & 7)) << 23);
        let all = value.to_le_bytes();
        let skip = 4 - dtype.size_bytes().min(4);
        bytes.extend_from_slice(all.get(skip..).unwrap_or_default());
    }
    bytes
}

/// One reduction over `windows`, checked bit for bit.
fn run(
    windows: &[Arc<Window>],
    algorithm: Algorithm,
    dtype: Dtype,
    config: &CudaConfig,
    limits: GpuLimits,
) -> Result<(), String> {
    let fail = |error: &dyn std::fmt::Display| format!("{algorithm}: {error}");
    let world_size = world_size_of(windows)?;
    let signature = Signature {
        num_elems: NUM_ELEMS as u64,
        dtype,
        op: Op::Sum,
        algorithm: Some(algorithm),
    };
    let plan = plan_of_test(world_size, signature.num_elems, (dtype, algorithm), limits)
        .map_err(|error| fail(&error))?;
    prepare(windows, 1, KERNEL_TIMEOUT, limits)?;
    let len_bytes = (NUM_ELEMS * dtype.size_bytes()) as u64;
    let dst_offset = len_bytes.next_multiple_of(256);
    let mut tensors = Vec::with_capacity(windows.len());
    let mut inputs = Vec::with_capacity(windows.len());
    for (place, window) in windows.iter().enumerate() {
        let tensor = DeviceMemory::allocate(&window.gpu.context, 2 * dst_offset)
            .map_err(|error| fail(&error))?;
        let input = data(place, dtype);
        let stream = &window.gpu.stream;
        // SAFETY: the memory is this test's, just allocated, and long enough for both.
        unsafe {
            stream
                .upload(tensor.start(), &input)
                .and_then(|()| stream.fill(tensor.start() + dst_offset, 0xcc, len_bytes))
        }
        .map_err(|error| fail(&error))?;
        tensors.push(tensor);
        inputs.push(input);
    }
    let gpus = gpus_of(windows);
    wait_idle(&gpus)?;
    let parts = windows.iter().zip(&tensors).map(|(window, tensor)| Part {
        window: Arc::clone(window),
        src: tensor.start(),
        dst: tensor.start() + dst_offset,
        ticket: None,
    });
    let work = Work::new(plan, signature, parts.collect()).map_err(|error| fail(&error))?;
    let sites = gpus.iter().map(|gpu| {
        Ok(Site {
            gpu: Arc::clone(gpu),
            kernels: gpu
                .kernels(config, Instance::of(world_size))
                .map_err(|error| fail(&error))?,
        })
    });
    let sites = sites.collect::<Result<Vec<Site>, String>>()?;
    let sites: Vec<&Site> = sites.iter().collect();
    // Windows and control blocks were prepared, the tensors are this test's, and all of it lives until wait_idle below has
    // seen the end; if it does not come, the error path leaks no launch into freed memory, since freeing GPU memory waits
    // for the GPU.
    let mut first = 0;
    while first < signature.num_elems {
        first += work.enqueue(&sites, first).map_err(|error| fail(&error))?;
    }
    wait_idle(&gpus).map_err(|error| fail(&error))?;
    let sources: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let island_size = match algorithm == Algorithm::Hierarchical {
        true => limits.island_size as usize,
        // Rank order.
        false => sources.len(),
    };
    let expected =
        reduce_bytes_tree(dtype, Op::Sum, &sources, island_size).map_err(|error| fail(&error))?;
    for (window, tensor) in windows.iter().zip(&tensors) {
        if let Some(abort) = window.control.status() {
            return Err(fail(&format!("rank {}: {abort}", window.rank)));
        }
        let mut found = vec![0; expected.len()];
        // SAFETY: the tensor is live and long enough.
        unsafe {
            window
                .gpu
                .stream
                .download(tensor.start() + dst_offset, &mut found)
        }
        .map_err(|error| fail(&error))?;
        let elems = expected
            .chunks(dtype.size_bytes())
            .zip(found.chunks(dtype.size_bytes()));
        let wrong = elems.filter(|(one, other)| one != other).count();
        if wrong > 0 {
            return Err(fail(&format!(
                "{wrong} of {NUM_ELEMS} elements are wrong on rank {}",
                window.rank
            )));
        }
    }
    Ok(())
}

/// What the GPUs can take, where each can reach each other's memory.
fn limits(windows: &[Arc<Window>], config: &CudaConfig) -> Result<GpuLimits, String> {
    let world_size = world_size_of(windows)?;
    let gpus = gpus_of(windows);
    let mut resident_blocks = u32::MAX;
    let mut staying_blocks = u32::MAX;
    let mut ranks_per_gpu = 0;
    for gpu in &gpus {
        let kernels = gpu
            .kernels(config, Instance::of(world_size))
            .map_err(|error| error.to_string())?;
        resident_blocks = resident_blocks.min(kernels.resident_blocks());
        staying_blocks = staying_blocks.min(kernels.staying_blocks());
        let here = windows
            .iter()
            .filter(|window| Arc::ptr_eq(&window.gpu, gpu));
        ranks_per_gpu = ranks_per_gpu.max(u32::try_from(here.count()).unwrap_or(u32::MAX));
    }
    let has_host_windows = windows.iter().all(|window| window.has_host_window());
    Ok(GpuLimits {
        gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
        ranks_per_gpu,
        resident_blocks,
        push_slot_bytes: config.push_slot_bytes,
        inband_part_bytes: config.inband_part_bytes,
        staging_part_bytes: config.staging_part_bytes,
        resident: crate::plan::resident_blocks(
            Instance::of(world_size),
            config.resident_blocks,
            ranks_per_gpu,
            staying_blocks,
        ),
        // The task knows.
        shared_by_mps: false,
        island_size: default_island_size(world_size),
        peer_access: true,
        host_staged_bytes: has_host_windows.then_some(config.host_staged_bytes),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use allreduce_kernels::reference::reduce_bytes;

    #[test]
    fn test_data_differs_by_rank_and_is_finite() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let (one, other) = (data(0, dtype), data(1, dtype));
            assert_eq!(one.len(), NUM_ELEMS * dtype.size_bytes());
            assert_ne!(one, other);
            let sum = reduce_bytes(dtype, Op::Sum, &[&one, &other]).unwrap();
            assert!(sum != one && sum != other);
        }
        for value in data(3, Dtype::F32).chunks(4) {
            let value = f32::from_le_bytes(value.try_into().unwrap());
            assert!(value.is_finite() && value != 0.0);
        }
    }
}
