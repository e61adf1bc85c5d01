//! The test before Ready: can these GPUs work together, by the kernels that will be used?
//!
//! Owns the test. Run on the CUDA thread when every rank has joined and mapped its window. For each pair of
//! ranks, then for all of them together, it runs real kernels on the real windows (and before that, each rank's
//! flags are written and waited for) and compares every bit with
//! the reference: what drivers say about peers has been wrong, and a copy that works proves no kernel. Every
//! wait has a deadline. The verdict is one for all ranks, and names whom it is about.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::window::Window;
use crate::config::CudaConfig;
use crate::plan::GpuLimits;
use allreduce_contract::cuda::{CudaError, DeviceMemory, wait_flags, write_flags};
use allreduce_contract::kernel::{CALL_DIRECT, Call, CallParts, Instance, op_code};
use allreduce_contract::window::MAX_STREAMS;
use allreduce_contract::{Algorithm, Backend, Dtype, Op, Rank, WorldSize};
use allreduce_kernels::reference::reduce_bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Elements of a test's tensors: several blocks, and a tail that is no whole pack.
const NUM_ELEMS: usize = 1003;
/// Launch shape of a test.
const SHAPE: (u32, u32) = (2, 64);
/// How long a kernel of a test may wait for its peers.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the host waits for a test's kernels, which end by themselves before.
const TEST_DEADLINE: Duration = Duration::from_secs(5);

/// What the GPUs can take, or the ranks it is about and why they cannot work together.
pub(crate) type Verdict = Result<GpuLimits, (Vec<Rank>, String)>;

/// Tests the windows of an epoch, in rank order, and leaves them as the epoch starts from.
pub(crate) fn test(
    windows: &[Arc<Window>],
    config: &CudaConfig,
    epoch: u64,
    timeout: Duration,
) -> Verdict {
    let windows: Vec<&Window> = windows.iter().map(Arc::as_ref).collect();
    for window in &windows {
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
    for window in &windows {
        test_flags(window).map_err(|reason| {
            let device = window.gpu.device();
            (
                vec![window.rank],
                format!("rank {} ({device}): flags: {reason}", window.rank),
            )
        })?;
    }
    for (index, one) in windows.iter().enumerate() {
        for other in windows.iter().skip(index + 1) {
            test_pair(one, other, config).map_err(|reason| {
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
            })?;
        }
    }
    let all = |reason: String| (Vec::new(), format!("all ranks together: {reason}"));
    for algorithm in Algorithm::ALL {
        match algorithm.backend() {
            Backend::Host => {}
            Backend::Cuda => run(&windows, algorithm, Dtype::Bf16, config).map_err(all)?,
        }
    }
    prepare(&windows, epoch, timeout).map_err(all)?;
    limits(&windows, config).map_err(all)
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
    wait_idle(&[window])
}

fn test_pair(one: &Window, other: &Window, config: &CudaConfig) -> Result<(), String> {
    if !Arc::ptr_eq(&one.gpu, &other.gpu) {
        for (from, to) in [(one, other), (other, one)] {
            let can_access = from.gpu.device().can_access(to.gpu.device());
            if !can_access.map_err(|error| error.to_string())? {
                return Err(
                    "the driver gives no peer access (cuDeviceCanAccessPeer is 0)".to_owned(),
                );
            }
            let enabled = from.gpu.context.enable_peer(&to.gpu.context);
            enabled.map_err(|error| error.to_string())?;
        }
    }
    // One that writes to the peer, and one that reads from it.
    for algorithm in [Algorithm::OneShotPush, Algorithm::OneShotPull] {
        run(&[one, other], algorithm, Dtype::F32, config)?;
    }
    Ok(())
}

/// The GPUs of `windows`, each once, in order of their first rank.
pub(crate) fn gpus_of<'a>(windows: &[&'a Window]) -> Vec<&'a Arc<Gpu>> {
    let mut gpus: Vec<&Arc<Gpu>> = Vec::new();
    for window in windows {
        if !gpus.iter().any(|gpu| Arc::ptr_eq(gpu, &window.gpu)) {
            gpus.push(&window.gpu);
        }
    }
    gpus
}

fn wait_idle(windows: &[&Window]) -> Result<(), String> {
    let deadline = Instant::now() + TEST_DEADLINE;
    for gpu in gpus_of(windows) {
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
fn prepare(windows: &[&Window], epoch: u64, timeout: Duration) -> Result<(), String> {
    let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
    for (place, window) in (0..).zip(windows) {
        // SAFETY: nothing is launched on these windows: the epoch is being formed, and tests wait for their
        // end (one that did not end has failed the epoch).
        unsafe { window.begin_epoch(windows, place, epoch, timeout_ns) }
            .map_err(|error| error.to_string())?;
    }
    wait_idle(windows)
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
    windows: &[&Window],
    algorithm: Algorithm,
    dtype: Dtype,
    config: &CudaConfig,
) -> Result<(), String> {
    let fail = |error: &dyn std::fmt::Display| format!("{algorithm}: {error}");
    let world_size = u32::try_from(windows.len())
        .ok()
        .and_then(|ranks| WorldSize::new(ranks).ok())
        .ok_or_else(|| fail(&"no ranks"))?;
    let len_bytes = (NUM_ELEMS * dtype.size_bytes()) as u64;
    let dst_offset = len_bytes.next_multiple_of(256);
    prepare(windows, 1, KERNEL_TIMEOUT)?;
    let mut tensors = Vec::with_capacity(windows.len());
    let mut inputs = Vec::with_capacity(windows.len());
    for (place, window) in windows.iter().enumerate() {
        let tensor = DeviceMemory::allocate(&window.gpu.context, 2 * dst_offset)
            .map_err(|error| fail(&error))?;
        let input = data(place, dtype);
        // SAFETY: the memory is this test's, just allocated, and long enough for both.
        unsafe {
            window
                .gpu
                .stream
                .upload(tensor.start(), &input)
                .and_then(|()| {
                    window
                        .gpu
                        .stream
                        .fill(tensor.start() + dst_offset, 0xcc, len_bytes)
                })
        }
        .map_err(|error| fail(&error))?;
        tensors.push(tensor);
        inputs.push(input);
    }
    wait_idle(windows)?;
    for gpu in gpus_of(windows) {
        let calls: Vec<Call> = windows
            .iter()
            .zip(&tensors)
            .filter(|(window, _)| Arc::ptr_eq(&window.gpu, gpu))
            .map(|(window, tensor)| {
                Call::new(CallParts {
                    control: window.control_block.start(),
                    src: tensor.start(),
                    dst: tensor.start() + dst_offset,
                    num_elems: NUM_ELEMS as u64,
                    elem_bytes: dtype.size_bytes() as u32,
                    op: op_code(Op::Sum).unwrap_or(0),
                    flags: CALL_DIRECT,
                    blocks: SHAPE.0,
                    data_threads: SHAPE.1,
                })
            })
            .collect();
        let kernels = gpu
            .kernels(config, Instance::of(world_size))
            .map_err(|error| fail(&error))?;
        let entered = gpu.context.enter().map_err(|error| fail(&error))?;
        // SAFETY: windows and control blocks were prepared, the tensors are this test's, and all of it lives
        // until wait_idle below has seen the end; if it does not come, the error path leaks no launch into
        // freed memory, since freeing GPU memory waits for the GPU.
        unsafe { kernels.launch(gpu, &entered, (algorithm, dtype), &calls, SHAPE) }
            .map_err(|error| fail(&error))?;
    }
    wait_idle(windows).map_err(|error| fail(&error))?;
    let sources: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let expected = reduce_bytes(dtype, Op::Sum, &sources).map_err(|error| fail(&error))?;
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

fn limits(windows: &[&Window], config: &CudaConfig) -> Result<GpuLimits, String> {
    let world_size = u32::try_from(windows.len())
        .ok()
        .and_then(|ranks| WorldSize::new(ranks).ok())
        .ok_or_else(|| "no ranks".to_owned())?;
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
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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
