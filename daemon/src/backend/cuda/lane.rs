//! The windows of the lanes `delegated` and `resident`, which ranks can reach.
//!
//! Owns their memory: one for each rank of an epoch, made when the lane is chosen, on the CUDA thread, exported to
//! every rank (`delegated`) or to its own (`resident`), and freed when the last of them is gone, since the driver must
//! not free what is still mapped. They are other memory than the windows of the `rpc` lane, which no rank can reach.
//! With lane `resident` also the kernels that stay. Executors begin the windows and, at the end of the epoch, write their
//! abort words. Refuses to know tensors.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::{Gpu, failed};
use crate::backend::cuda::resident::{Resident, ResidentPlace, ResidentShape};
use crate::backend::cuda::test::gpus_of;
use crate::backend::cuda::window::{GRANULE_BYTES, Window, allocate};
use crate::communicator::GpuError;
use crate::config::CudaConfig;
use crate::slots::BlockSlots;
use allreduce_contract::cuda::{CudaError, DeviceMemory, IPC_HANDLE_LEN};
use allreduce_contract::kernel::{
    CONTROL_BLOCK_BYTES, HEADERS_LEN_BYTES, HEADERS_OFFSET, Instance, MAX_RING_BLOCKS,
    MAX_RING_BUFFERS, RING_ARENA, RING_PARKED_OFFSET, Regions, ResidentState, RingBuffer,
    SIGNAL_BYTES, newest_calls,
};
use allreduce_contract::memory::SealedMemory;
use allreduce_contract::v1::CudaMemory;
use allreduce_contract::window::Abort;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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

/// What an epoch's lane has.
#[derive(Debug)]
pub(crate) struct EpochLane {
    /// By GPU, with lane `resident`. Before the windows: they end before those are freed.
    residents: Vec<Resident>,
    /// The blocks that those have, which are free when they have ended.
    _slots: Option<Arc<BlockSlots>>,
    /// In rank order.
    pub(crate) windows: Vec<LaneWindow>,
}

impl EpochLane {
    pub(crate) fn residents(&self) -> &[Resident] {
        &self.residents
    }

    /// By rank: the number of its newest call in the epoch, modulo 2^32, by what its kernel has told its peers. Waits for the
    /// side stream's copies and no kernel.
    pub(crate) fn newest_calls(&self) -> Result<Vec<u32>, CudaError> {
        // Every rank greets every window, so any will do.
        let window = self.windows.first().map(LaneWindow::newest_calls);
        let mut calls = window.transpose()?.unwrap_or_default();
        calls.truncate(self.windows.len());
        Ok(calls)
    }
}

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

    /// By rank: the newest call that it has announced here.
    fn newest_calls(&self) -> Result<Vec<u32>, CudaError> {
        let mut headers = vec![0; HEADERS_LEN_BYTES];
        let at = self.memory.start() + HEADERS_OFFSET;
        // SYNC: header. Each word carries its number by itself; kernels may write them meanwhile.
        // SAFETY: the headers are inside the window (abi.h, Signal).
        unsafe { self.gpu.side_stream.download(at, &mut headers) }?;
        Ok(newest_calls(&headers))
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

/// What a lane is made by.
#[derive(Debug, Clone)]
pub(crate) struct LaneSpec {
    pub(crate) regions: Regions,
    pub(crate) instance: Instance,
    pub(crate) epoch: u64,
    pub(crate) timeout: Duration,
    /// With lane `resident`.
    pub(crate) resident: Option<ResidentShape>,
    /// With lane `resident`: the GPUs' blocks that the communicator has.
    pub(crate) slots: Option<Arc<BlockSlots>>,
}

/// Makes what an epoch's lane has; `windows` are all ranks', in rank order. On the CUDA thread.
pub(crate) fn create(
    windows: &[Arc<Window>],
    config: &CudaConfig,
    spec: &LaneSpec,
) -> Result<EpochLane, GpuError> {
    let made: Vec<LaneWindow> = windows
        .iter()
        .map(|window| {
            let kernels = window.gpu.kernels(config, spec.instance)?;
            let image = kernels
                .memory()
                .map_err(|error| GpuError::Memory(Arc::new(error)))?;
            LaneWindow::create(window, &spec.regions, image)
        })
        .collect::<Result<_, GpuError>>()?;
    let residents = match spec.resident {
        None => Vec::new(),
        Some(shape) => start_residents(windows, &made, config, spec, shape)?,
    };
    Ok(EpochLane {
        residents,
        _slots: spec.slots.clone(),
        windows: made,
    })
}

fn start_residents(
    windows: &[Arc<Window>],
    lane: &[LaneWindow],
    config: &CudaConfig,
    spec: &LaneSpec,
    shape: ResidentShape,
) -> Result<Vec<Resident>, GpuError> {
    let mut residents = Vec::new();
    for gpu in gpus_of(windows) {
        let mut places = Vec::new();
        for (rank, window) in windows.iter().enumerate() {
            if !Arc::ptr_eq(&window.gpu, gpu) {
                continue;
            }
            let starts = lane.iter().map(|of| of.memory.start());
            let timeout_ns = u64::try_from(spec.timeout.as_nanos()).unwrap_or(u64::MAX);
            let block = window.control_block_of(
                &spec.regions,
                u32::try_from(rank).unwrap_or(u32::MAX),
                spec.epoch,
                timeout_ns,
                starts,
            );
            let mut buffers = [RingBuffer::default(); MAX_RING_BUFFERS];
            let own = lane.get(rank).map_or(0, |of| of.memory.start());
            if let Some(arena) = buffers.get_mut(usize::from(RING_ARENA)) {
                *arena = RingBuffer {
                    start: window.arena_start(),
                    len_bytes: window.arena_len_bytes(),
                };
            }
            let state = ResidentState {
                exited: [0; MAX_RING_BLOCKS as usize],
                stop: 0,
                reserved: [0; 31],
                buffers,
            };
            let place = ResidentPlace {
                window: Arc::clone(window),
                control: Arc::new(allocate(gpu, CONTROL_BLOCK_BYTES)?),
                state: Arc::new(allocate(gpu, size_of::<ResidentState>() as u64)?),
            };
            let parked = [1_u32; MAX_RING_BLOCKS as usize].map(u32::to_le_bytes);
            let stream = &gpu.side_stream;
            // SAFETY: the ranges are inside the memories, which nobody else uses yet; ResidentState is plain integers
            // without padding (asserted where it is declared).
            unsafe {
                let state = std::slice::from_raw_parts(
                    (&raw const state).cast(),
                    size_of::<ResidentState>(),
                );
                stream
                    .fill(place.control.start(), 0, CONTROL_BLOCK_BYTES)
                    .and_then(|()| stream.upload(place.control.start(), block.bytes()))
                    .and_then(|()| stream.upload(place.state.start(), state))
                    .and_then(|()| stream.upload(own + RING_PARKED_OFFSET, parked.as_flattened()))
            }
            .and_then(|()| stream.synchronize())
            .map_err(failed("resident kernel"))?;
            places.push(place);
        }
        let kernels = gpu.kernels(config, spec.instance)?;
        let resident = Resident::start(gpu, kernels, shape, places);
        residents.push(resident.map_err(GpuError::NoKernels)?);
    }
    Ok(residents)
}
