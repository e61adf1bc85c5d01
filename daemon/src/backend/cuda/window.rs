//! One session's memory on backend cuda.
//!
//! Owns the window (signals, slots, staging: the executor's alone), the arena with the streams' flags behind it
//! (exported to the rank), the
//! control block of the kernels, the control page in host memory with its status word, and, where GPUs go through host
//! memory, the [`HostWindow`]. Made and freed on the CUDA thread.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::{Gpu, failed};
use crate::backend::cuda::host_window::HostWindow;
use crate::communicator::GpuError;
use allreduce_contract::cuda::{
    Context, CudaError, DeviceMemory, DevicePtr, IPC_HANDLE_LEN, RegisteredPage, check,
};
use allreduce_contract::kernel::{CONTROL_BLOCK_BYTES, ControlBlock, Regions, SIGNAL_BYTES};
use allreduce_contract::memory::SealedMemory;
use allreduce_contract::window::{
    Abort, Control, FLAGS_LEN_BYTES, done_flag, flag_reached, ready_flag,
};
use allreduce_contract::{Rank, WorldSize};
use cudarc::driver::sys;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What is exported are whole allocations of this granularity: the driver hands out smaller ones as parts of a larger,
/// and an IPC handle always names the whole.
pub(crate) const GRANULE_BYTES: u64 = 2 << 20;

pub(crate) fn allocate(gpu: &Gpu, len_bytes: u64) -> Result<DeviceMemory, GpuError> {
    DeviceMemory::allocate(&gpu.context, len_bytes).map_err(|error| {
        if error.is_out_of_memory() {
            GpuError::NoMemory {
                needed: len_bytes,
                available: free_bytes(&gpu.context),
            }
        } else {
            failed("window")(error)
        }
    })
}

/// What a window is made by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowSpec {
    pub(crate) rank: Rank,
    pub(crate) world_size: WorldSize,
    pub(crate) arena_len_bytes: u64,
    pub(crate) regions: Regions,
    /// Put into the arena's first 8 bytes.
    pub(crate) nonce: u64,
}

/// What an epoch, or a test, begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begin {
    pub(crate) epoch: u64,
    pub(crate) timeout_ns: u64,
    /// Of its ranks.
    pub(crate) island_size: u32,
}

/// The windows that kernels meet in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// In the GPUs' memory.
    Gpus,
    /// In the host's.
    Host,
}

/// A session's memory.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) rank: Rank,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) nonce: u64,
    /// How the rank maps the arena.
    pub(crate) arena_handle: [u8; IPC_HANDLE_LEN],
    /// Differs for each arena of this process.
    pub(crate) generation: u64,
    control_block: DeviceMemory,
    regions: Regions,
    /// Made by the test before Ready, if any is.
    host: OnceLock<HostWindow>,
    memory: DeviceMemory,
    arena: DeviceMemory,
    // Before the control page: it is registered memory of that.
    page: RegisteredPage,
    pub(crate) control: Control,
    control_memory: SealedMemory,
}

impl Window {
    pub(crate) fn create(gpu: Arc<Gpu>, spec: &WindowSpec) -> Result<Self, GpuError> {
        static GENERATIONS: AtomicU64 = AtomicU64::new(1);
        let arena_len_bytes = spec
            .arena_len_bytes
            .checked_add(FLAGS_LEN_BYTES)
            .and_then(|len| len.checked_next_multiple_of(GRANULE_BYTES))
            .ok_or(GpuError::NoMemory {
                needed: spec.arena_len_bytes,
                available: free_bytes(&gpu.context),
            })?;
        let memory = allocate(&gpu, spec.regions.len_bytes())?;
        let arena = allocate(&gpu, arena_len_bytes)?;
        let control_block = allocate(&gpu, CONTROL_BLOCK_BYTES)?;
        let arena_handle = arena.export().map_err(failed("arena"))?;
        let (control, control_memory) = Control::create(spec.rank, spec.world_size)
            .map_err(|error| GpuError::Memory(Arc::new(error)))?;
        // SAFETY: the window drops it before the page, and is freed when no kernel uses it any more.
        let page = unsafe { RegisteredPage::register(&gpu.context, &control) }
            .map_err(failed("control page"))?;
        let window = Self {
            rank: spec.rank,
            nonce: spec.nonce,
            arena_handle,
            // Relaxed: only uniqueness matters.
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            control_block,
            regions: spec.regions,
            host: OnceLock::new(),
            memory,
            arena,
            page,
            control,
            control_memory,
            gpu,
        };
        let stream = &window.gpu.side_stream;
        // SAFETY: the arena is this window's, has at least 8 bytes and the flags, and nobody else knows it yet.
        unsafe {
            stream
                .upload(window.arena.start(), &spec.nonce.to_le_bytes())
                .and_then(|()| stream.fill(window.flags_start(), 0, FLAGS_LEN_BYTES))
        }
        .and_then(|()| stream.synchronize())
        .map_err(failed("arena"))?;
        Ok(window)
    }

    pub(crate) fn arena_start(&self) -> DevicePtr {
        self.arena.start()
    }

    /// Without the flags behind it.
    pub(crate) fn arena_len_bytes(&self) -> u64 {
        self.arena.len_bytes() - FLAGS_LEN_BYTES
    }

    /// Length of the allocation that the arena and its flags are in.
    pub(crate) fn allocation_len_bytes(&self) -> u64 {
        self.arena.len_bytes()
    }

    fn flags_start(&self) -> DevicePtr {
        self.arena.start() + self.arena_len_bytes()
    }

    /// Where a stream of the rank says that it has got to a call.
    pub(crate) fn ready_flag(&self, stream: u32) -> DevicePtr {
        self.flags_start() + ready_flag(stream)
    }

    /// Where this executor says that it is through with a call.
    pub(crate) fn done_flag(&self, stream: u32) -> DevicePtr {
        self.flags_start() + done_flag(stream)
    }

    /// Whether a stream of the rank has got to its call of this value.
    pub(crate) fn has_reached(&self, stream: u32, value: u32) -> Result<bool, CudaError> {
        let mut found = [0; 4];
        let flag = self.ready_flag(stream);
        // SAFETY: the flag is in the arena's allocation.
        unsafe { self.gpu.side_stream.download(flag, &mut found) }?;
        Ok(flag_reached(u32::from_le_bytes(found), value))
    }

    /// Lets go whoever waits for a stream of the rank to get to its call of this value.
    pub(crate) fn let_go(&self, stream: u32, value: u32) -> Result<(), CudaError> {
        let flag = self.ready_flag(stream);
        // SAFETY: as above; a flag may be written at any time.
        unsafe { self.gpu.side_stream.upload(flag, &value.to_le_bytes()) }
    }

    /// Where kernels look whether the epoch is over (abi.h, Signal: the window's first word).
    pub(crate) fn abort_word(&self) -> DevicePtr {
        self.memory.start()
    }

    pub(crate) fn control_len_bytes(&self) -> u64 {
        self.control_memory.len_bytes().get() as u64
    }

    pub(crate) fn control_fd(&self) -> BorrowedFd<'_> {
        self.control_memory.as_fd()
    }

    /// Memory that it takes, the host's and the GPU's.
    pub(crate) fn len_bytes(&self) -> u64 {
        let gpu = self.memory.len_bytes() + self.arena.len_bytes() + self.control_block.len_bytes();
        gpu + self.control_len_bytes() + self.host.get().map_or(0, HostWindow::len_bytes)
    }

    /// Makes the window in host memory, if there is none.
    pub(crate) fn make_host_window(
        &self,
        world_size: WorldSize,
        inband_part_bytes: u64,
    ) -> Result<(), GpuError> {
        if self.host.get().is_none() {
            let made = HostWindow::create(&self.gpu, world_size, inband_part_bytes)?;
            // Made on the CUDA thread only, so no other is there.
            let _ = self.host.set(made);
        }
        Ok(())
    }

    pub(crate) fn has_host_window(&self) -> bool {
        self.host.get().is_some()
    }

    /// The control block of kernels that meet there, if there are such windows.
    pub(crate) fn control_block(&self, meeting: Meeting) -> Option<DevicePtr> {
        match meeting {
            Meeting::Gpus => Some(self.control_block.start()),
            Meeting::Host => self.host.get().map(HostWindow::control_block),
        }
    }

    /// The staging region, of an epoch of the whole world: where it starts, and its length.
    pub(crate) fn staging(&self) -> (DevicePtr, u64) {
        let offset = self.regions.staging_offset();
        let len_bytes = self.regions.len_bytes() - offset;
        (self.memory.start() + offset, len_bytes)
    }

    /// Whether the rank has answered the nonce: proof that it sees the same memory.
    pub(crate) fn is_answered(&self) -> Result<bool, CudaError> {
        let mut found = [0; 8];
        // SAFETY: the arena is live and has at least 8 bytes.
        unsafe {
            self.gpu
                .side_stream
                .download(self.arena.start(), &mut found)
        }?;
        Ok(u64::from_le_bytes(found) == !self.nonce)
    }

    /// The control block of the rank at `place`, for windows that start there, in rank order.
    pub(crate) fn control_block_of(
        &self,
        regions: &Regions,
        place: u32,
        epoch: u64,
        timeout_ns: u64,
        windows: impl IntoIterator<Item = DevicePtr>,
    ) -> ControlBlock {
        ControlBlock::new(
            regions,
            place,
            epoch,
            timeout_ns,
            self.page.status(),
            windows,
        )
    }

    /// Enqueues what an epoch (or a test) of these ranks starts from: no flags, empty slots,
    /// the control block. `windows` are all ranks', in rank order, this one at `place`.
    ///
    /// # Safety
    /// No kernel uses the window until the stream has done it.
    pub(crate) unsafe fn begin_epoch(
        &self,
        windows: &[Arc<Window>],
        place: u32,
        begin: Begin,
    ) -> Result<(), CudaError> {
        let Begin {
            epoch,
            timeout_ns,
            island_size,
        } = begin;
        let ranks = u32::try_from(windows.len()).unwrap_or(u32::MAX);
        let regions = Regions {
            world_size: ranks,
            island_size,
            ..self.regions
        };
        let starts = windows.iter().map(|of| of.memory.start());
        let mut block = self.control_block_of(&regions, place, epoch, timeout_ns, starts);
        for (arena, of) in block.arena.iter_mut().zip(windows) {
            *arena = of.arena.start();
        }
        let stream = &self.gpu.stream;
        let start = self.memory.start();
        let slots = regions.staging_offset() - regions.push_offset();
        // SAFETY: the ranges are inside this window's memory and control block (fewer ranks take less room
        // than it was made for); the rest is the caller's.
        unsafe {
            stream.fill(start, 0, SIGNAL_BYTES)?;
            stream.fill(start + regions.push_offset(), 0xff, slots)?;
            stream.fill(self.control_block.start(), 0, CONTROL_BLOCK_BYTES)?;
            stream.upload(self.control_block.start(), block.bytes())?;
        }
        let starts = windows.iter().map(|of| Some(of.host.get()?.start()));
        let (Some(host), Some(starts)) = (self.host.get(), starts.collect::<Option<Vec<_>>>())
        else {
            return Ok(());
        };
        let regions = host.regions(ranks);
        let block = self.control_block_of(&regions, place, epoch, timeout_ns, starts);
        // SAFETY: the caller's.
        unsafe { host.begin_epoch(&block) }
    }

    /// Tells kernels that wait, or have yet to start, that the epoch is over. Does not wait for them.
    pub(crate) fn abort(&self, abort: Abort) -> Result<(), CudaError> {
        self.control.set_status(abort);
        if let Some(host) = self.host.get() {
            host.abort(abort);
        }
        // SAFETY: the window's first word is its abort word (abi.h, Signal), which anybody may set at any time.
        unsafe {
            self.gpu
                .side_stream
                .upload(self.memory.start(), &abort.to_word().to_le_bytes())
        }
    }
}

/// Free memory of the context's device, by the driver's account; 0 if it does not say.
pub(crate) fn free_bytes(context: &Context) -> u64 {
    let Ok(_entered) = context.enter() else {
        return 0;
    };
    let (mut free, mut total) = (0, 0);
    // SAFETY: the places are lengths; a context is current.
    let told = check("cuMemGetInfo", unsafe {
        sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
    });
    told.map_or(0, |()| free as u64)
}
