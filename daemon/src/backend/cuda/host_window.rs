//! One rank's window in host memory: through it GPUs reduce that cannot reach each other's memory.
//!
//! Owns pinned memory laid out as a window, in which only signals and the in-band region have room, and the control
//! block, in the memory of the rank's GPU, by which kernels find every rank's. Made by the test before Ready, on the CUDA
//! thread, and freed with the rank's other window. The kernels are those that pull in-band, and stage: what they wait
//! for and what they leave is the same wherever a window is. Refuses direct sources: those are in a GPU's memory.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::{Gpu, failed};
use crate::backend::cuda::window::allocate;
use crate::communicator::GpuError;
use allreduce_contract::WorldSize;
use allreduce_contract::cuda::{CudaError, DeviceMemory, DevicePtr, PinnedMemory};
use allreduce_contract::kernel::{CONTROL_BLOCK_BYTES, ControlBlock, Regions, SIGNAL_BYTES};
use allreduce_contract::window::Abort;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct HostWindow {
    gpu: Arc<Gpu>,
    memory: PinnedMemory,
    /// Of the whole world.
    regions: Regions,
    control_block: DeviceMemory,
}

impl HostWindow {
    pub(super) fn create(
        gpu: &Arc<Gpu>,
        world_size: WorldSize,
        inband_part_bytes: u64,
    ) -> Result<Self, GpuError> {
        let regions = Regions {
            world_size: world_size.get(),
            island_size: world_size.get(),
            push_slot_bytes: 0,
            inband_part_bytes,
            staging_part_bytes: 0,
        };
        let memory = PinnedMemory::allocate(&gpu.context, regions.len_bytes())
            .map_err(failed("window in host memory"))?;
        Ok(Self {
            control_block: allocate(gpu, CONTROL_BLOCK_BYTES)?,
            gpu: Arc::clone(gpu),
            memory,
            regions,
        })
    }

    /// Where it starts, for every GPU.
    pub(super) fn start(&self) -> DevicePtr {
        self.memory.start()
    }

    pub(super) fn control_block(&self) -> DevicePtr {
        self.control_block.start()
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.memory.len_bytes() + self.control_block.len_bytes()
    }

    /// Its layout, shared by `ranks` ranks.
    pub(super) fn regions(&self, ranks: u32) -> Regions {
        Regions {
            world_size: ranks,
            island_size: ranks,
            ..self.regions
        }
    }

    /// What an epoch starts from: no flags, empty slots, and, enqueued on the GPU's stream, the control block.
    ///
    /// # Safety
    /// No kernel uses the window, and none will before the stream has done it.
    pub(super) unsafe fn begin_epoch(&self, block: &ControlBlock) -> Result<(), CudaError> {
        let start = self.memory.host_start();
        let signals = SIGNAL_BYTES as usize;
        let slots = self.memory.len_bytes() as usize - signals;
        let stream = &self.gpu.stream;
        // SAFETY: the ranges are the window's and the control block's own, which no kernel uses (the caller's). Kernels
        // that are launched from here on see what the host has written: a launch is behind it.
        unsafe {
            start.write_bytes(0, signals);
            start.add(signals).write_bytes(0xff, slots);
            stream.fill(self.control_block.start(), 0, CONTROL_BLOCK_BYTES)?;
            stream.upload(self.control_block.start(), block.bytes())
        }
    }

    /// Tells kernels that wait, or have yet to start, that the epoch is over.
    pub(super) fn abort(&self, abort: Abort) {
        let word = self.memory.host_start().cast::<AtomicU64>();
        // SAFETY: the window's first word is its abort word (abi.h, Signal), aligned to a page, live as long as self,
        // and only ever stored to and loaded whole.
        let word = unsafe { word.as_ref() };
        // SYNC: abort. Release: what was done before is before whatever a kernel does that has seen it. Polled by the GPU.
        word.store(abort.to_word(), Ordering::Release);
    }
}
