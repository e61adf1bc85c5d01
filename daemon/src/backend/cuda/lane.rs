//! The windows through which ranks meet that launch themselves (lane `delegated`).
//!
//! Owns their memory: one for each rank of an epoch, made when the lane is chosen, on the CUDA thread, exported to
//! every rank, and freed when the last of them is gone, since the driver must not free what is still mapped. They
//! are other memory than the windows of the `rpc` lane, which no rank can reach. Executors only begin them and, at
//! the end of the epoch, write their abort words. Refuses to know tensors.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::{Gpu, failed};
use crate::backend::cuda::window::{GRANULE_BYTES, Window, allocate};
use crate::communicator::GpuError;
use allreduce_contract::cuda::{CudaError, DeviceMemory, IPC_HANDLE_LEN};
use allreduce_contract::kernel::{Instance, Regions, SIGNAL_BYTES};
use allreduce_contract::memory::SealedMemory;
use allreduce_contract::v1::CudaMemory;
use allreduce_contract::window::Abort;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One rank's window of a lane.
#[derive(Debug)]
pub(crate) struct LaneWindow {
    gpu: Arc<Gpu>,
    memory: DeviceMemory,
    handle: [u8; IPC_HANDLE_LEN],
    generation: u64,
    /// The image of the kernels, of the rank's GPU.
    kernels: OwnedFd,
    kernels_len_bytes: u64,
}

/// The windows of an epoch's lane, in rank order.
pub(crate) type LaneWindows = Arc<Vec<LaneWindow>>;

impl LaneWindow {
    /// Makes the window of the rank that has `window`, as an epoch starts from. `regions` are of the whole world.
    fn create(
        window: &Window,
        regions: &Regions,
        kernels: &SealedMemory,
    ) -> Result<Self, GpuError> {
        static GENERATIONS: AtomicU64 = AtomicU64::new(1);
        let gpu = Arc::clone(&window.gpu);
        // A whole allocation, which the handle names.
        let len_bytes = regions.len_bytes().next_multiple_of(GRANULE_BYTES);
        let memory = allocate(&gpu, len_bytes)?;
        let handle = memory.export().map_err(failed("lane window"))?;
        let stream = &gpu.side_stream;
        let slots = regions.staging_offset() - regions.push_offset();
        // SAFETY: the ranges are inside the memory, which nobody else knows yet.
        unsafe {
            stream
                .fill(memory.start(), 0, SIGNAL_BYTES)
                .and_then(|()| stream.fill(memory.start() + regions.push_offset(), 0xff, slots))
        }
        .and_then(|()| stream.synchronize())
        .map_err(failed("lane window"))?;
        let kernels_len_bytes = kernels.len_bytes().get() as u64;
        let kernels = kernels.as_fd().try_clone_to_owned();
        Ok(Self {
            gpu,
            memory,
            handle,
            // Relaxed: only uniqueness matters.
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            kernels: kernels.map_err(|error| GpuError::NoKernels(error.to_string()))?,
            kernels_len_bytes,
        })
    }

    /// How ranks map it.
    pub(crate) fn exported(&self) -> CudaMemory {
        CudaMemory {
            ipc_handle: self.handle.to_vec(),
            generation: self.generation,
            len_bytes: self.memory.len_bytes(),
            device_uuid: self.gpu.device().uuid().to_owned(),
        }
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    /// The image of the kernels for the rank's GPU, and its length.
    pub(crate) fn kernels(&self) -> (&OwnedFd, u64) {
        (&self.kernels, self.kernels_len_bytes)
    }

    /// Tells the rank's kernels, those that wait and those to come, that the epoch is over. Waits for nothing.
    pub(crate) fn abort(&self, abort: Abort) -> Result<(), CudaError> {
        // SYNC: abort.
        // SAFETY: the window's first word is its abort word (abi.h, Signal), which anybody may set at any time.
        unsafe {
            let word = abort.to_word().to_le_bytes();
            self.gpu.side_stream.upload(self.memory.start(), &word)
        }
    }
}

/// Makes the windows of an epoch, in rank order. On the CUDA thread.
pub(crate) fn create(
    windows: &[Arc<Window>],
    config: &crate::config::CudaConfig,
    regions: &Regions,
    instance: Instance,
) -> Result<Vec<LaneWindow>, GpuError> {
    windows
        .iter()
        .map(|window| {
            let kernels = window.gpu.kernels(config, instance)?;
            let image = kernels
                .memory()
                .map_err(|error| GpuError::Memory(Arc::new(error)))?;
            LaneWindow::create(window, regions, image)
        })
        .collect()
}
