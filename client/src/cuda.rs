//! Backend cuda: tensors in GPU memory, reduced in the order of a CUDA stream.
//!
//! Owns the rank's mapping of its arena, the table from addresses to buffers, and for each stream the
//! flags by which it and the executor's wait for each other. Workers call it through [`Communicator`]; membership calls it to
//! map and unmap the window. Refuses to give slices (addresses are the GPU's), to synchronise the host with
//! the GPU, and, on lane `rpc`, where the executor launches, to be captured into a graph.
//!
//! Contexts are the devices' primary ones, which PyTorch and the CUDA runtime use too.
//!
//! ```no_run
//! use allreduce_client::cuda::{StreamHandle, devices};
//! use allreduce_client::{AllReduceOptions, Dtype, JoinOptions, Op, blocking::Client};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let raw_stream = std::ptr::null_mut();
//! let device = devices()?.into_iter().next().ok_or("no GPU")?;
//! let client = Client::connect("/run/allreduced/allreduced.sock")?;
//! let communicator = client.join(JoinOptions::new("tp0", 0, 2).device(device))?;
//! let tensor = communicator.allocate_device(1024 * 2)?;
//! let stream = StreamHandle::from_raw(raw_stream);
//! // ... kernels on the stream that write to tensor.ptr() ...
//! // SAFETY: the stream is one of the device's primary context and stays alive; only kernels on it use
//! // the tensor.
//! unsafe {
//!     communicator.all_reduce_on(
//!         stream,
//!         tensor.ptr(),
//!         tensor.ptr(),
//!         1024,
//!         Dtype::Bf16,
//!         Op::Sum,
//!         AllReduceOptions::default(),
//!     )?;
//! }
//! // ... kernels on the stream that read the sum ...
//! communicator.check()?;
//! // ... synchronise the stream, then:
//! communicator.leave();
//! # Ok(())
//! # }
//! ```
#![allow(unsafe_code)] // room: CUDA

use crate::attach::{self, Errand, Over, Window};
use crate::communicator::{
    ANSWER_GRACE, AllReduceOptions, Communicator, Reduction, bounded, buffer_error, cut_off,
    reduction, within,
};
use crate::cuda_lane::{LanePlan, Tensors, ring_number};
use crate::error::{AllReduceError, BufferError, Refused};
use allreduce_contract::cuda::{
    Context, Driver, IPC_HANDLE_LEN, ImportedMemory, Relaxed, Stream, allocation_around, export,
    is_capturing, is_idle, relax_capture_mode, wait_flags, write_flags,
};
use allreduce_contract::v1::{
    self, AllReduceRequest, BufferRange, CudaMemory, Joined, RegionKind, RegisterRequest,
    ReleaseRequest,
};
use allreduce_contract::window::{
    Control, FLAGS_LEN_BYTES, MAX_STREAMS, done_flag, flag_reached, ready_flag,
};
use allreduce_contract::{Backend, Dtype, Lane, Op};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

pub use allreduce_contract::cuda::{CudaError, Device, NotShareable, Unavailable};

/// Most reductions that a communicator may have enqueued and not done.
const MAX_QUEUED: u64 = 64;
/// Reductions that are remembered before those that are done are forgotten: more than may be enqueued, so that a look
/// at all of them is rare.
const MAX_REMEMBERED: usize = 2 * MAX_QUEUED as usize;
/// How long closing the arena waits for streams to get past it.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long a call that waits for the GPU looks again and again; after that it sleeps in between.
const SPIN: Duration = Duration::from_micros(100);
/// How long it sleeps: tokio's clock has no finer tick.
const PAUSE: Duration = Duration::from_millis(1);

/// A GPU cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is no CUDA here.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// CUDA failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The GPUs that this process sees, in its own order (CUDA_VISIBLE_DEVICES).
///
/// # Errors
/// [`DeviceError`]: no driver, no GPU, or the driver fails.
pub fn devices() -> Result<Vec<Device>, DeviceError> {
    Ok(Driver::get()?.devices()?)
}

/// The GPU of a rank that asks for backend cuda and names none: that of the context which is current in this
/// thread, or else the first.
pub(crate) fn default_device() -> Result<Device, DeviceError> {
    let driver = Driver::get()?;
    if let Some(device) = driver.current_device()? {
        return Ok(device);
    }
    let first = driver.devices()?.into_iter().next();
    Ok(first.ok_or(Unavailable::NoDevice)?)
}

/// Runs CUDA calls on a thread of their own, where they block nobody and cannot disturb a stream capture of
/// the worker's. If nobody waits any more, the result is dropped there.
pub(crate) async fn on_helper_thread<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R, String> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new()
        .name("allreduce-cuda".to_owned())
        .spawn(move || {
            if Driver::get().is_ok() {
                // If the driver fails here, it does in `work`, which says so.
                let _ = relax_capture_mode();
            }
            // Who waited may have given up.
            let _ = done.send(work());
        })
        .map_err(|error| error.to_string())?;
    result.await.map_err(|_| "it ended early".to_owned())
}

/// Makes the GPU's context, or finds it.
pub(crate) async fn retain(device: Device) -> Result<Arc<Context>, Over> {
    match on_helper_thread(move || Context::retain(device)).await {
        Ok(retained) => retained.map_err(Over::Cuda),
        Err(reason) => Err(Over::Lost(format!("the client's thread: {reason}"))),
    }
}

/// A rank's arena in GPU memory, which its executor has allocated.
#[derive(Debug)]
pub(crate) struct Arena {
    context: Arc<Context>,
    start: u64,
    len_bytes: u64,
    /// None once closed.
    memory: Mutex<Option<ImportedMemory>>,
    pending: Mutex<Pending>,
}

impl Arena {
    /// Maps the arena that Joined names, and proves that it is the executor's. The error is for the
    /// executor. To be called on a thread of the client's own.
    pub(crate) fn open(context: &Arc<Context>, joined: &Joined) -> Result<Self, String> {
        relax_capture_mode().map_err(|error| error.to_string())?;
        let region = joined
            .regions
            .iter()
            .find(|region| region.kind() == RegionKind::Arena)
            .ok_or("Joined names no arena")?;
        let shared = region
            .cuda
            .as_ref()
            .ok_or("Joined names no GPU memory for the arena")?;
        let own = context.device().uuid();
        if shared.device_uuid != own {
            return Err(format!(
                "the arena is on GPU {}, the rank's is {own}",
                shared.device_uuid
            ));
        }
        let memory = ImportedMemory::open(context, handle(&shared.ipc_handle)?)
            .map_err(|e| e.to_string())?;
        let len_bytes = region.len_bytes;
        let mapped = memory.len_bytes();
        let needed = len_bytes.saturating_add(FLAGS_LEN_BYTES);
        if len_bytes < 8 || mapped < needed {
            return Err(format!(
                "the arena and its flags have {needed} bytes, of which {mapped} are mapped"
            ));
        }
        let arena = Self {
            context: Arc::clone(context),
            start: memory.start(),
            len_bytes,
            memory: Mutex::new(Some(memory)),
            pending: Mutex::default(),
        };
        arena.prove(joined.nonce)?;
        Ok(arena)
    }

    /// Reads the executor's nonce, and writes its complement in the place.
    fn prove(&self, nonce: u64) -> Result<(), String> {
        let text = |error: CudaError| error.to_string();
        let stream = Stream::create(&self.context).map_err(text)?;
        let mut found = [0; 8];
        // SAFETY: open has seen that at least 8 bytes at start are mapped in the stream's context.
        unsafe { stream.download(self.start, &mut found) }.map_err(text)?;
        let found = u64::from_le_bytes(found);
        if found != nonce {
            return Err(format!(
                "the mapped memory is not the executor's: {nonce:#x} was written there, {found:#x} is read"
            ));
        }
        // SAFETY: as above; until Mapped is sent, the executor leaves the arena alone, and no buffer of it
        // has been given out.
        unsafe { stream.upload(self.start, &(!nonce).to_le_bytes()) }.map_err(text)?;
        stream.synchronize().map_err(text)
    }

    /// Where it starts, and its length without the flags.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.start, self.len_bytes)
    }

    fn flags_start(&self) -> u64 {
        self.start + self.len_bytes
    }

    /// The flags as they are now.
    fn read_flags(&self) -> Result<Vec<u8>, CudaError> {
        let stream = Stream::create(&self.context)?;
        let mut flags = vec![0; usize::try_from(FLAGS_LEN_BYTES).unwrap_or(0)];
        // SAFETY: the flags are mapped: the callers hold the lock of `memory`, and it is some.
        unsafe { stream.download(self.flags_start(), &mut flags) }?;
        Ok(flags)
    }

    /// The executor is gone: no stream shall wait for it. Fills with NaN what will not be reduced any more, then
    /// writes the done flags in its place. To be called on a thread of the client's own.
    pub(crate) fn let_go(&self, control: &Control) -> Result<(), CudaError> {
        let memory = locked(&self.memory);
        let mut all = {
            let mut pending = locked(&self.pending);
            // A call that comes back now waits for nobody.
            pending.gone = true;
            std::mem::take(&mut pending.in_flight)
        };
        all.retain(|one| control.settled(one.sequence).is_none());
        if memory.is_none() || all.is_empty() {
            return Ok(());
        }
        let _relaxed = Relaxed::begin()?;
        let flags = self.read_flags()?;
        all.retain(|one| !flag_reached(word(&flags, done_flag(one.place)), one.value));
        let stream = Stream::create(&self.context)?;
        for one in &all {
            // SAFETY: all_reduce_on's caller promises that nothing touches dst until the reduction is done.
            unsafe { stream.fill(one.dst, 0xff, one.len_bytes) }?;
        }
        stream.synchronize()?;
        // In order: the last value of a place lets all of its waits go.
        for one in &all {
            let flag = self.flags_start() + done_flag(one.place);
            // SYNC: done flag, in the executor's place.
            // SAFETY: as in read_flags.
            unsafe { stream.upload(flag, &one.value.to_le_bytes()) }?;
        }
        stream.synchronize()
    }

    /// Makes a stream wait for a reduction that the executor has promised. Refused if the executor is gone.
    ///
    /// Only for a call that was answered well. Then every rank has made it, so what each had to write to its ready
    /// flag is enqueued: no wait is ever ahead of a write that it needs, in whatever order the GPU takes up what this
    /// process has enqueued (ranks may share a stream, and streams that know nothing of each other a hardware
    /// queue). And a call that is refused leaves nothing behind on its stream that somebody had to let go.
    fn wait_for(
        &self,
        control: &Control,
        in_flight: InFlight,
        stream: StreamHandle,
    ) -> Result<(), AllReduceError> {
        let flag = self.flags_start() + done_flag(in_flight.place);
        let value = in_flight.value;
        // Held until the wait is enqueued: whoever lets streams go sees this one, or is seen here.
        let mut pending = locked(&self.pending);
        if pending.gone {
            return Err(AllReduceError::ExecutorLost(
                "it ended before the reduction did".to_owned(),
            ));
        }
        let entered = self.context.enter().map_err(AllReduceError::NotOrdered)?;
        // SYNC: done flag. What comes next on the stream sees the result.
        // SAFETY: all_reduce_on's caller promises a live stream of this context, or null; the flag stays mapped
        // until the wait is over (`in_flight`, and `Arena::close`).
        unsafe { wait_flags(&entered, stream.raw(), [(flag, value)]) }
            .map_err(AllReduceError::NotOrdered)?;
        pending.entered(in_flight, |sequence| control.settled(sequence).is_some());
        Ok(())
    }

    /// Whether no stream of the worker has anything left to do with the flags.
    fn is_quiet(&self, control: &Control) -> bool {
        let (waits, written) = {
            let pending = locked(&self.pending);
            let mut waits = pending.in_flight.iter();
            let waits = waits.any(|one| control.settled(one.sequence).is_none());
            (waits, pending.written.clone())
        };
        if waits {
            return false;
        }
        if written.is_empty() {
            return true;
        }
        let Ok(flags) = Relaxed::begin().and_then(|_relaxed| self.read_flags()) else {
            return false;
        };
        let is_written =
            |(place, value): (&u32, &u32)| flag_reached(word(&flags, ready_flag(*place)), *value);
        written.iter().all(is_written)
    }

    /// Unmaps it, once no stream waits for its flags or is to write one. The executor may free it only then. If
    /// that takes too long, it stays mapped until the process ends: an access to what is unmapped would cost the
    /// whole context.
    pub(crate) fn close(&self, control: &Control) {
        let deadline = std::time::Instant::now() + DRAIN_TIMEOUT;
        let mut memory = locked(&self.memory);
        if memory.is_none() {
            return;
        }
        while !self.is_quiet(control) {
            if std::time::Instant::now() >= deadline {
                std::mem::forget(memory.take());
                return;
            }
            std::thread::sleep(PAUSE);
        }
        drop(memory.take());
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Closed already, unless the executor was lost. Then streams were let go, and the ready flags are all
        // that may still be written.
        let mut memory = locked(&self.memory);
        let is_open = memory.is_some();
        let written = std::mem::take(&mut locked(&self.pending).written);
        if !is_open || written.is_empty() {
            return;
        }
        let flags = Relaxed::begin().and_then(|_relaxed| self.read_flags());
        let is_written = |flags: &[u8]| {
            written
                .iter()
                .all(|(place, value)| flag_reached(word(flags, ready_flag(*place)), *value))
        };
        if !flags.is_ok_and(|flags| is_written(&flags)) {
            // As in close.
            std::mem::forget(memory.take());
        }
    }
}

/// The flag at an offset; 0 outside.
fn word(flags: &[u8], offset: u64) -> u32 {
    let at = usize::try_from(offset).unwrap_or(usize::MAX);
    let word = flags.get(at..).and_then(|rest| rest.first_chunk::<4>());
    word.map_or(0, |word| u32::from_le_bytes(*word))
}

fn handle(bytes: &[u8]) -> Result<[u8; IPC_HANDLE_LEN], String> {
    <[u8; IPC_HANDLE_LEN]>::try_from(bytes).map_err(|_| {
        format!(
            "an IPC handle has {} bytes, {IPC_HANDLE_LEN} are needed",
            bytes.len()
        )
    })
}

/// What is guarded here is never left half changed: a panic elsewhere does not matter.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which buffer an address is in. Ranges that are not empty do not overlap.
#[derive(Debug, Default)]
struct Table {
    /// Length in bytes by (start, buffer id): empty buffers may start where another one does.
    ranges: BTreeMap<(u64, u64), u64>,
}

impl Table {
    fn insert(&mut self, start: u64, id: u64, len_bytes: u64) {
        self.ranges.insert((start, id), len_bytes);
    }

    fn remove(&mut self, start: u64, id: u64) {
        self.ranges.remove(&(start, id));
    }

    /// The buffer that has the whole range, and the range's offset in it.
    fn find(&self, pointer: u64, len_bytes: u64) -> Option<BufferRange> {
        for (&(start, buffer_id), &has) in self.ranges.range(..=(pointer, u64::MAX)).rev() {
            let offset_bytes = pointer - start;
            if offset_bytes
                .checked_add(len_bytes)
                .is_some_and(|end| end <= has)
            {
                return Some(BufferRange {
                    buffer_id,
                    offset_bytes,
                });
            }
            if has > 0 {
                // What starts before it ends before it.
                return None;
            }
        }
        None
    }

    /// A buffer that shares a byte with the range.
    fn overlapping(&self, start: u64, len_bytes: u64) -> Option<u64> {
        let end = start.saturating_add(len_bytes);
        let before_end = self.ranges.range(..(end, 0)).rev();
        let (&(found, id), &has) = before_end.into_iter().find(|(_, has)| **has > 0)?;
        (found.saturating_add(has) > start && len_bytes > 0).then_some(id)
    }
}

/// A CUDA stream of the worker's: a CUstream, or a cudaStream_t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamHandle(*mut c_void);

// SAFETY: only a number here. CUDA takes streams from any thread; whether the stream is alive is promised
// where the handle is used.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

/// The driver's names for default streams, beside null.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl StreamHandle {
    /// A stream of the device's primary context; null for its legacy default stream.
    pub fn from_raw(stream: *mut c_void) -> Self {
        if stream.addr() == LEGACY {
            Self(std::ptr::null_mut())
        } else {
            Self(stream)
        }
    }

    /// The handle.
    pub fn raw(self) -> *mut c_void {
        self.0
    }

    fn key(self) -> usize {
        self.0.addr()
    }
}

/// GPU memory that reductions can work on: a range of the window, or an allocation of the worker's.
///
/// It is an address, not a borrow: who uses it when is the worker's affair. Dropping it gives it back without
/// waiting: reductions that were called are done first, but then the executor may hand a range of the window
/// out again, so whatever else streams do with it must be done. Registered memory must not be freed after a
/// mere drop: see [`Communicator::release_device`]. Addresses in the window end with the communicator.
pub struct DeviceBuffer {
    id: u64,
    start: u64,
    len_bytes: u64,
    registered: bool,
    /// Whether the executor knows already.
    released: bool,
    table: Arc<Mutex<Table>>,
    errands: mpsc::UnboundedSender<Errand>,
}

impl DeviceBuffer {
    /// Where it starts, in the device's primary context.
    pub fn ptr(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> usize {
        usize::try_from(self.len_bytes).unwrap_or(usize::MAX)
    }

    /// Whether it is memory of the worker's own.
    pub fn is_registered(&self) -> bool {
        self.registered
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        locked(&self.table).remove(self.start, self.id);
        if !self.released {
            // If the thread is gone, the session is, and the buffer with it.
            let _ = self.errands.send(Errand::Release(self.id));
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("id", &self.id)
            .field("start", &format_args!("{:#x}", self.start))
            .field("len_bytes", &self.len_bytes)
            .field("registered", &self.registered)
            .finish_non_exhaustive()
    }
}

/// Which flags each stream of the worker has, and how far it has counted on them.
#[derive(Debug)]
struct Streams {
    /// By handle: the place of its flags.
    places: BTreeMap<usize, u32>,
    flags: Vec<Place>,
    /// Where the search for a place goes on: one that was given up is taken again as late as can be.
    next_place: u32,
}

/// The flags of a stream, as this side counts.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    /// The value of the last call. It goes on counting when the place changes hands.
    counted: u32,
    /// The last value that the stream was told to write to its ready flag.
    written: u32,
    /// The sequence of the last call.
    last_sequence: u64,
}

/// An idle stream writes no flag; yet values must stay comparable, so it does after so many.
const MAX_UNWRITTEN: u32 = 1 << 30;

impl Default for Streams {
    fn default() -> Self {
        Self {
            places: BTreeMap::new(),
            flags: vec![Place::default(); MAX_STREAMS as usize],
            next_place: 0,
        }
    }
}

impl Streams {
    /// The place of a stream's flags; none if all are taken, or still in use by what streams that were given up
    /// have enqueued. `is_settled` says whether the GPU is done with a sequence.
    fn place(&mut self, key: usize, is_settled: impl Fn(u64) -> bool) -> Option<u32> {
        if let Some(place) = self.places.get(&key) {
            return Some(*place);
        }
        let is_free = |place: &u32| {
            let taken = self.places.values().any(|taken| taken == place);
            let last = self
                .flags
                .get(*place as usize)
                .map_or(0, |flags| flags.last_sequence);
            !taken && (last == 0 || is_settled(last))
        };
        let from = self.next_place;
        let place = (0..MAX_STREAMS)
            .map(|offset| (from + offset) % MAX_STREAMS)
            .find(is_free)?;
        self.next_place = (place + 1) % MAX_STREAMS;
        self.places.insert(key, place);
        Some(place)
    }

    /// The value of the next call on a place, and whether an idle stream has to write it all the same.
    fn next(&mut self, place: u32) -> (u32, bool) {
        let Some(flags) = self.flags.get_mut(place as usize) else {
            // Places are below MAX_STREAMS.
            return (0, true);
        };
        flags.counted = flags.counted.wrapping_add(1);
        let unwritten = flags.counted.wrapping_sub(flags.written);
        (flags.counted, unwritten >= MAX_UNWRITTEN)
    }

    /// A call of this place is on its way.
    fn called(&mut self, place: u32, sequence: u64) {
        if let Some(flags) = self.flags.get_mut(place as usize) {
            flags.last_sequence = sequence;
        }
    }

    /// The stream was told to write its ready flag.
    fn wrote(&mut self, place: u32, value: u32) {
        if let Some(flags) = self.flags.get_mut(place as usize) {
            flags.written = value;
        }
    }

    fn forget(&mut self, key: usize) {
        self.places.remove(&key);
    }
}

/// What streams of the worker still do with the flags.
#[derive(Debug, Default)]
struct Pending {
    /// Reductions that a stream waits for.
    in_flight: Vec<InFlight>,
    /// By place: the newest value that a stream was told to write.
    written: BTreeMap<u32, u32>,
    /// The executor is gone: nothing may wait for it any more.
    gone: bool,
}

impl Pending {
    /// A stream waits for one more. Those that are over are forgotten now and then: looking at each for every call
    /// would cost more than room for some.
    fn entered(&mut self, in_flight: InFlight, is_settled: impl Fn(u64) -> bool) {
        if self.in_flight.len() >= MAX_REMEMBERED {
            self.in_flight
                .retain(|earlier| !is_settled(earlier.sequence));
        }
        self.in_flight.push(in_flight);
    }
}

/// A reduction that the executor has enqueued, and that a stream of the worker waits for.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    sequence: u64,
    place: u32,
    value: u32,
    dst: u64,
    len_bytes: u64,
}

/// What a communicator on backend cuda has beside its window.
#[derive(Debug)]
pub(crate) struct GpuState {
    context: Arc<Context>,
    table: Arc<Mutex<Table>>,
    /// Held (it is fair) from a call's first poll until its sequence number is taken: so the order of the calls
    /// is that of their first poll, over all streams, and each stream counts in that order.
    streams: tokio::sync::Mutex<Streams>,
    /// One registration at a time, so that none slips between another's look at the table and its entry.
    registering: Arc<tokio::sync::Mutex<()>>,
}

impl GpuState {
    /// None on backend host.
    pub(crate) fn new(window: &Window) -> Option<Self> {
        let arena = arena(window)?;
        Some(Self {
            context: Arc::clone(&arena.context),
            table: Arc::default(),
            streams: tokio::sync::Mutex::default(),
            registering: Arc::default(),
        })
    }
}

fn arena(window: &Window) -> Option<&Arena> {
    match &window.arena {
        attach::Arena::Host(_) => None,
        attach::Arena::Cuda(arena) => Some(arena),
    }
}

/// On backend cuda. Each method answers `WrongBackend` on backend host.
impl Communicator {
    /// The rank's GPU; none on backend host.
    pub fn device(&self) -> Option<&Device> {
        Some(self.gpu.as_ref()?.context.device())
    }

    fn for_buffers(&self) -> Result<(&GpuState, &Arena), BufferError> {
        let both = self.gpu.as_ref().zip(arena(&self.window));
        both.ok_or(BufferError::WrongBackend(Backend::Host))
    }

    fn for_reductions(&self) -> Result<&GpuState, AllReduceError> {
        let gpu = self.gpu.as_ref();
        gpu.ok_or(AllReduceError::WrongBackend(Backend::Host))
    }

    /// Takes `len_bytes` of GPU memory from the window, aligned to 256 bytes. Its contents are whatever was
    /// there.
    ///
    /// # Errors
    /// [`BufferError`]: the arena is full, the epoch is over, the backend is not cuda.
    pub async fn allocate_device(&self, len_bytes: usize) -> Result<DeviceBuffer, BufferError> {
        let (gpu, arena) = self.for_buffers()?;
        let len_bytes = len_bytes as u64;
        let allocated = self.allocate_range(len_bytes).await?;
        let end = allocated.offset_bytes.checked_add(len_bytes);
        if end.is_none_or(|end| end > arena.len_bytes) {
            return Err(BufferError::Window(format!("{allocated:?}")));
        }
        let start = arena.start + allocated.offset_bytes;
        let pending = self.pending(gpu, start, len_bytes);
        Ok(pending.enter(allocated.buffer_id, false))
    }

    fn pending(&self, gpu: &GpuState, start: u64, len_bytes: u64) -> Unnamed {
        Unnamed {
            table: Arc::clone(&gpu.table),
            errands: self.errands(),
            start,
            len_bytes,
        }
    }

    /// Makes an allocation of the worker's a buffer: the whole of the one around `ptr`, so that every tensor
    /// inside can be reduced (frameworks cut tensors out of large allocations). It must come from cuMemAlloc
    /// (cudaMalloc). One that overlaps a buffer of this communicator is refused.
    ///
    /// If the future is dropped, the memory counts as registered until the communicator has been left.
    ///
    /// # Safety
    /// The executor maps the memory: it must not be freed before [`Self::release_device`] has answered Ok, or
    /// the executor has ended. (Leaving unmaps it too, but is not waited for longer than two seconds.)
    ///
    /// # Errors
    /// [`BufferError`].
    pub async unsafe fn register_device(&self, ptr: u64) -> Result<DeviceBuffer, BufferError> {
        let (gpu, _) = self.for_buffers()?;
        let registering = Arc::clone(&gpu.registering).lock_owned().await;
        let context = Arc::clone(&gpu.context);
        let table = Arc::clone(&gpu.table);
        let looking = on_helper_thread(move || {
            let allocation = allocation_around(&context, ptr)?;
            let (start, len_bytes) = (allocation.start, allocation.len_bytes);
            if let Some(buffer_id) = locked(&table).overlapping(start, len_bytes) {
                return Err(BufferError::Registered {
                    start,
                    len_bytes,
                    buffer_id,
                });
            }
            let ipc_handle = export(&context, start)?;
            Ok((allocation, ipc_handle))
        });
        let (allocation, ipc_handle) = looking.await.map_err(BufferError::Thread).flatten()?;
        // The executor cannot map again what it has not let go of since its buffer was dropped.
        self.flush().await;
        let pending = self.pending(gpu, allocation.start, allocation.len_bytes);
        let lane = self.lane() == Lane::Resident;
        let number = lane
            .then(|| ring_number(&gpu.context, allocation.start))
            .flatten();
        let request = RegisterRequest {
            session: self.session(),
            memory_handle: 0,
            offset_bytes: 0,
            ring_memory: number.unwrap_or(0).into(),
            len_bytes: allocation.len_bytes,
            cuda: Some(CudaMemory {
                ipc_handle: ipc_handle.to_vec(),
                generation: allocation.generation,
                len_bytes: allocation.len_bytes,
                device_uuid: gpu.context.device().uuid().to_owned(),
            }),
        };
        let mut buffers = self.buffers.clone();
        let window = Arc::clone(&self.window);
        // In a task of its own: if nobody waits any more, the buffer is dropped, and so released.
        let registered = tokio::spawn(async move {
            let answer = bounded(buffers.register(request)).await;
            let answer = answer.map_err(|status| buffer_error(&status))?.into_inner();
            if let Some(lane) = window.lane.get() {
                lane.set_registered(allocation.start, allocation.len_bytes, number);
            }
            let buffer = pending.enter(answer.buffer_id, true);
            drop(registering);
            Ok(buffer)
        });
        let registered = registered.await;
        registered
            .map_err(|error| BufferError::ExecutorLost(format!("the call was cut off: {error}")))?
    }

    /// Gives a buffer back, and waits until the executor has let go of it: registered memory may be freed
    /// after Ok. Reductions in flight on it are finished first.
    ///
    /// After an error, and if the future is dropped, registered memory may be freed once the communicator has
    /// been left.
    ///
    /// # Errors
    /// [`BufferError`].
    pub async fn release_device(&self, mut buffer: DeviceBuffer) -> Result<(), BufferError> {
        self.for_buffers()?;
        if !buffer.errands.same_channel(&self.attachment.errands) {
            return Err(BufferError::ForeignBuffer);
        }
        // No new call shall find it.
        locked(&buffer.table).remove(buffer.start, buffer.id);
        let request = ReleaseRequest {
            session: self.session(),
            buffer_id: buffer.id,
        };
        let limit = self
            .timeout(&AllReduceOptions::default())
            .saturating_add(ANSWER_GRACE);
        let released = within(limit, self.buffers.clone().release(request)).await;
        // Dropped before, it would tell the executor again, which is harmless.
        buffer.released = released.is_ok();
        released.map(|_| ()).map_err(|status| buffer_error(&status))
    }

    /// Reduces `num_elems` elements at `src` over all ranks into `dst`, in the order of `stream`: after what
    /// was enqueued before, and before what is enqueued after this has returned Ok. `dst` is `src` for in
    /// place; else the two must not overlap. On lane `rpc` each must lie in one buffer of this communicator; on
    /// `delegated` and `resident` they may be anywhere on the device (`resident` copies what is neither in the arena nor
    /// registered).
    ///
    /// On lanes `delegated` and `resident` this launches and returns: it does not wait for the other ranks, a stream may be
    /// captured, and [`AllReduceOptions::timeout`] does not apply (the daemon's default does). Calls go in order, whatever
    /// their streams, but a graph's are where it is launched: two graphs of one communicator must not run at the same time,
    /// nor one beside other calls. That is noticed on the GPU before the second has sent anything, and ends the epoch on every
    /// rank (`AbortReason::Overlap`); each graph, and in a process that has captured each other call, passes a gate for it. All
    /// ranks must make, and replay, the same calls in the same order.
    ///
    /// Ok means **enqueued, not done**: the host is not synchronised with the GPU. In the order of the
    /// stream, `src` may be overwritten and `dst` read as soon as this returns. On lane `rpc` it returns when every rank has
    /// made the call, within the timeout. Once 64 reductions are enqueued and not done, the call waits for the
    /// oldest first.
    ///
    /// A reduction that fails on the GPU (a rank's stream did not get there in time, or the rank died) leaves
    /// NaN in `dst` (in what was not reduced yet of a tensor longer than the window's slots), and so do all later
    /// ones of the epoch. The timeout also covers what the ranks' streams have enqueued before. [`Self::check`] says so, for example after
    /// synchronising the stream, and so do the next call and the executor.
    ///
    /// Calls that overlap in time are made in the order of their first poll, also over several streams; none
    /// is ordered after the other on the GPU unless the first has returned. If the future is dropped once the
    /// call is made, the reduction goes on (the other ranks count on it) but the stream does not wait for it:
    /// leave `src` and `dst` alone until [`Self::wait_settled`] says that it is done.
    ///
    /// # Safety
    /// - `stream` is a live stream of the device's primary context ([`Self::device`]), or null, until this
    ///   has returned or the future is dropped; meanwhile it is neither captured nor closed
    ///   ([`Self::close_stream`]). On lanes `delegated` and `resident` it is live until it is closed, or the
    ///   communicator has been left.
    /// - On those lanes, no replay is enqueued or under way while this rank joins the same communicator again.
    /// - Until the reduction is done, nothing but work ordered with it on the stream touches `src` or `dst`.
    ///
    /// # Errors
    /// [`AllReduceError`]. Where it says that nothing was sent, no sequence number is used up. After
    /// [`AllReduceError::ExecutorLost`] the reduction may run all the same; after any other error but
    /// [`AllReduceError::NotOrdered`] it does not.
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of a collective, in the order that NCCL has made familiar"
    )]
    pub async unsafe fn all_reduce_on(
        &self,
        stream: StreamHandle,
        src: u64,
        dst: u64,
        num_elems: usize,
        dtype: Dtype,
        op: Op,
        options: AllReduceOptions,
    ) -> Result<Reduction, AllReduceError> {
        let gpu = self.for_reductions()?;
        if options.range.is_some() {
            return Err(AllReduceError::RangeGiven);
        }
        self.check()?;
        if stream.key() == PER_THREAD {
            return Err(AllReduceError::PerThreadStream);
        }
        let num_elems = num_elems as u64;
        if matches!(self.lane(), Lane::Delegated | Lane::Resident) {
            let len_bytes = num_elems.saturating_mul(dtype.size_bytes() as u64);
            let known = {
                let table = locked(&gpu.table);
                [src, dst].map(|pointer| table.find(pointer, len_bytes).is_some())
            };
            let tensors = Tensors {
                src,
                dst,
                num_elems,
                dtype,
                op,
                known,
            };
            // SAFETY: the caller's.
            return unsafe { self.launch_on(stream, tensors, &options).await };
        }
        let dst_start = dst;
        let [src, dst] = {
            let len_bytes = num_elems.saturating_mul(dtype.size_bytes() as u64);
            let table = locked(&gpu.table);
            let find = |pointer| {
                table
                    .find(pointer, len_bytes)
                    .ok_or(AllReduceError::NotABuffer { pointer, len_bytes })
            };
            [find(src)?, find(dst)?]
        };
        let timeout = self.timeout(&options);

        let mut streams = gpu.streams.lock().await;
        let control = &self.window.control;
        self.queue_has_room(timeout).await?;
        // Before the number is taken: if it fails, or nothing comes of the call, no number is used up, and
        // nobody waits for the value.
        let arena = arena(&self.window).ok_or(AllReduceError::WrongBackend(Backend::Host))?;
        let Announced { place, value, idle } = announce(arena, control, &mut streams, stream)?;
        let ticket = self.take_sequence().await?;
        // Nothing is awaited from here until the call is on its way.
        let sequence = ticket.sequence();
        streams.called(place, sequence);
        let request = AllReduceRequest {
            sequence,
            src: Some(src),
            dst: Some(dst),
            event: Some(v1::Event {
                ready_value: 0,
                stream: place + 1,
                value,
                idle,
            }),
            ..self.call(num_elems, dtype, op, &options)
        };
        let call = self.send(ticket, request, timeout, ());
        drop(streams);
        // The wait is not enqueued meanwhile: `wait_for` says why.
        let response = match call.await {
            Ok(((), answer)) => answer?,
            Err(error) => return Err(cut_off(&error)),
        };
        let in_flight = InFlight {
            sequence,
            place,
            value,
            dst: dst_start,
            len_bytes: num_elems.saturating_mul(dtype.size_bytes() as u64),
        };
        arena.wait_for(control, in_flight, stream)?;
        reduction(&response)
    }

    /// Lanes `delegated` and `resident`: launches the reduction, or its ring, on the stream.
    ///
    /// # Safety
    /// As [`Self::all_reduce_on`].
    async unsafe fn launch_on(
        &self,
        stream: StreamHandle,
        tensors: Tensors,
        options: &AllReduceOptions,
    ) -> Result<Reduction, AllReduceError> {
        let lane = self.window.lane.get();
        let lane = lane.ok_or(AllReduceError::WrongBackend(Backend::Host))?;
        check_tensors(&tensors)?;
        let plan = match lane.planned(&tensors, options) {
            Some(plan) => plan,
            None => {
                let request = v1::PlanRequest {
                    session: self.session(),
                    num_elems: tensors.num_elems,
                    dtype: v1::Dtype::from(tensors.dtype) as i32,
                    op: v1::Op::from(tensors.op) as i32,
                    algorithm: options
                        .algorithm
                        .map_or(0, |algorithm| v1::Algorithm::from(algorithm) as i32),
                };
                let answer = bounded(self.collectives.clone().plan(request)).await;
                let answer =
                    answer.map_err(|status| AllReduceError::from_refused(Refused::new(&status)))?;
                let plan = LanePlan::of(&answer.into_inner())?;
                lane.remember(&tensors, options, plan);
                plan
            }
        };
        // SAFETY: the caller's.
        unsafe { lane.launch(stream, tensors, &plan) }?;
        Ok(Reduction {
            algorithm: plan.algorithm,
            reduce_time: Duration::ZERO,
            skew: Duration::ZERO,
            waited: Duration::ZERO,
            last_rank: self.rank(),
        })
    }

    /// Waits until the GPU is done with all but [`MAX_QUEUED`] of the reductions called.
    async fn queue_has_room(&self, timeout: Duration) -> Result<(), AllReduceError> {
        let oldest = (self.sequences.last() + 1).saturating_sub(MAX_QUEUED);
        let has_room = || oldest == 0 || self.window.control.settled(oldest).is_some();
        if has_room() {
            return Ok(());
        }
        let started = Instant::now();
        while !has_room() {
            self.check()?;
            let waited = started.elapsed();
            if waited >= timeout {
                return Err(AllReduceError::QueueFull {
                    queued: MAX_QUEUED,
                    waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
                });
            }
            if waited < SPIN {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    /// Forgets a stream, before it is destroyed: at most 64 are known at a time, those of which something is still
    /// enqueued counted. Reductions enqueued before are not touched. A stream that was never used here is no error, nor is using it again.
    ///
    /// # Errors
    /// [`AllReduceError::WrongBackend`].
    pub async fn close_stream(&self, stream: StreamHandle) -> Result<(), AllReduceError> {
        let gpu = self.for_reductions()?;
        gpu.streams.lock().await.forget(stream.key());
        if let Some(lane) = self.window.lane.get() {
            // SAFETY: it is about to be destroyed, as is documented, so it is live.
            unsafe { lane.close_stream(stream) }.map_err(AllReduceError::Cuda)?;
        }
        Ok(())
    }
}

fn check_tensors(tensors: &Tensors) -> Result<(), AllReduceError> {
    let Tensors {
        src,
        dst,
        num_elems,
        dtype,
        ..
    } = *tensors;
    let elem_bytes = dtype.size_bytes();
    for pointer in [src, dst] {
        if !pointer.is_multiple_of(elem_bytes as u64) {
            return Err(AllReduceError::Misaligned {
                pointer,
                elem_bytes,
            });
        }
    }
    let len_bytes = num_elems.saturating_mul(elem_bytes as u64);
    if src != dst && src.abs_diff(dst) < len_bytes {
        return Err(AllReduceError::Overlap {
            src,
            dst,
            len_bytes,
        });
    }
    Ok(())
}

/// A call that its stream has announced, or need not.
struct Announced {
    /// Of the stream's flags.
    place: u32,
    value: u32,
    /// The stream was idle, and writes nothing.
    idle: bool,
}

/// Has the stream write its ready flag; an idle stream has nothing to wait for, and need not, unless it has not for
/// too long. A stream that is captured is refused first. All of it is one stay in the context: each costs.
fn announce(
    arena: &Arena,
    control: &Control,
    streams: &mut Streams,
    stream: StreamHandle,
) -> Result<Announced, AllReduceError> {
    // Asking an idle stream is one of the calls that another thread's capture would not survive.
    let _relaxed = Relaxed::begin().map_err(AllReduceError::Cuda)?;
    let entered = arena.context.enter().map_err(AllReduceError::Cuda)?;
    // SAFETY: all_reduce_on's caller promises a live stream of this context, or null.
    if unsafe { is_capturing(&entered, stream.raw()) }.map_err(AllReduceError::Cuda)? {
        return Err(AllReduceError::Capturing);
    }
    let place = streams
        .place(stream.key(), |sequence| control.settled(sequence).is_some())
        .ok_or(AllReduceError::TooManyStreams)?;
    let (value, must_write) = streams.next(place);
    // SAFETY: as above, and it is not captured.
    let idle =
        !must_write && unsafe { is_idle(&entered, stream.raw()) }.map_err(AllReduceError::Cuda)?;
    if !idle {
        locked(&arena.pending).written.insert(place, value);
        let flag = arena.flags_start() + ready_flag(place);
        // SYNC: ready flag. What the stream has written to the source before is visible to the executor's.
        // SAFETY: as above; the flag stays mapped until the write is done (`written`, and `Arena::close`).
        unsafe { write_flags(&entered, stream.raw(), [(flag, value)]) }
            .map_err(AllReduceError::Cuda)?;
        streams.wrote(place, value);
    }
    Ok(Announced { place, value, idle })
}

/// A buffer that has no id yet.
struct Unnamed {
    table: Arc<Mutex<Table>>,
    errands: mpsc::UnboundedSender<Errand>,
    start: u64,
    len_bytes: u64,
}

impl Unnamed {
    /// The buffer, which the table now knows.
    fn enter(self, id: u64, registered: bool) -> DeviceBuffer {
        let Self {
            table,
            errands,
            start,
            len_bytes,
        } = self;
        locked(&table).insert(start, id, len_bytes);
        DeviceBuffer {
            id,
            start,
            len_bytes,
            registered,
            released: false,
            table,
            errands,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn range(buffer_id: u64, offset_bytes: u64) -> Option<BufferRange> {
        Some(BufferRange {
            buffer_id,
            offset_bytes,
        })
    }

    #[test]
    fn tensors_are_found_in_their_buffers() {
        let mut table = Table::default();
        table.insert(0x1000, 1, 0x100);
        table.insert(0x1100, 2, 0x100);
        table.insert(0x1100, 3, 0);
        table.insert(u64::MAX - 0xff, 4, 0xff);
        assert_eq!(table.find(0x1000, 0x100), range(1, 0));
        assert_eq!(table.find(0x1010, 0xf0), range(1, 0x10));
        assert_eq!(table.find(0x1010, 0xf1), None, "it would reach into 2");
        assert_eq!(table.find(0x1100, 0x100), range(2, 0), "not the empty 3");
        assert_eq!(table.find(0x11ff, 1), range(2, 0xff));
        assert_eq!(
            table.find(0x1200, 0),
            range(2, 0x100),
            "nothing, at the end"
        );
        assert_eq!(table.find(0x1201, 0), None);
        assert_eq!(table.find(0xfff, 2), None);
        assert_eq!(table.find(0, 0), None);
        assert_eq!(table.find(0x1010, u64::MAX), None);
        assert_eq!(table.find(u64::MAX - 1, 1), range(4, 0xfe));
        table.remove(0x1100, 2);
        assert_eq!(table.find(0x1100, 1), None);
        assert_eq!(table.find(0x1100, 0), range(3, 0));
    }

    proptest! {
        /// Against a look at every range.
        #[test]
        fn overlaps_are_seen(
            gaps in prop::collection::vec((0_u64..4, 0_u64..4), 0..8),
            start in 0_u64..40,
            len_bytes in 0_u64..8,
        ) {
            let mut table = Table::default();
            let mut ranges = Vec::new();
            let mut at = 0;
            for (id, (gap, has)) in (1..).zip(gaps) {
                at += gap;
                table.insert(at, id, has);
                ranges.push((at, has, id));
                at += has;
            }
            let shares = |&&(from, has, _): &&(u64, u64, u64)| {
                from.max(start) < (from + has).min(start + len_bytes)
            };
            let expected = ranges.iter().filter(shares).map(|(.., id)| *id).max();
            prop_assert_eq!(table.overlapping(start, len_bytes), expected);
            let holds = |&&(from, has, _): &&(u64, u64, u64)| {
                from <= start && start + len_bytes <= from + has
            };
            let found = table.find(start, len_bytes);
            prop_assert_eq!(found.is_some(), ranges.iter().any(|range| holds(&range)));
            if let Some(found) = found {
                let named = |&&(from, _, id): &&(u64, u64, u64)| {
                    id == found.buffer_id && from + found.offset_bytes == start
                };
                prop_assert!(ranges.iter().filter(holds).any(|range| named(&range)));
            }
        }
    }

    #[test]
    fn a_dropped_buffer_leaves_the_table_and_tells_the_executor_once() {
        let table = Arc::new(Mutex::new(Table::default()));
        let (errands, mut told) = mpsc::unbounded_channel();
        let enter = |id, start| {
            let pending = Unnamed {
                table: Arc::clone(&table),
                errands: errands.clone(),
                start,
                len_bytes: 16,
            };
            pending.enter(id, true)
        };
        let (kept, mut released) = (enter(7, 0x100), enter(8, 0x200));
        assert_eq!(locked(&table).find(0x108, 8), range(7, 8));
        drop(kept);
        assert_eq!(locked(&table).find(0x108, 8), None);
        assert!(matches!(told.try_recv(), Ok(Errand::Release(7))));
        released.released = true;
        drop(released);
        assert_eq!(locked(&table).find(0x200, 8), None);
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn streams_keep_their_flags_and_count_on() {
        let mut streams = Streams::default();
        let settled = |_| true;
        let [one, other] = [7, 9].map(|key| streams.place(key, settled).unwrap());
        assert_ne!(one, other);
        assert_eq!(streams.place(7, settled), Some(one));
        let counted = [
            streams.next(one).0,
            streams.next(one).0,
            streams.next(other).0,
        ];
        assert_eq!(counted, [1, 2, 1]);
        streams.called(one, 5);
        streams.forget(7);
        // Flags that were given up are taken last, and only when the GPU is done with their last call.
        let placed: Vec<u32> = (100..)
            .map_while(|key| streams.place(key, |sequence| sequence != 5))
            .collect();
        assert_eq!(placed.len(), MAX_STREAMS as usize - 2);
        assert!(!placed.contains(&one));
        // Whoever gets them goes on from where they stood: flags never go back.
        assert_eq!(streams.place(11, settled), Some(one));
        assert_eq!(streams.next(one).0, 3);
    }

    #[test]
    fn reductions_are_forgotten_when_they_are_done_and_not_before() {
        let mut pending = Pending::default();
        let in_flight = |sequence| InFlight {
            sequence,
            place: 0,
            value: sequence as u32,
            dst: 0,
            len_bytes: 0,
        };
        let mut done = 0;
        for sequence in 1..=10 * MAX_REMEMBERED as u64 {
            // As many as may be enqueued are not done.
            done = sequence.saturating_sub(MAX_QUEUED);
            pending.entered(in_flight(sequence), |one| one <= done);
            let kept: Vec<u64> = pending.in_flight.iter().map(|one| one.sequence).collect();
            let first = *kept.first().unwrap();
            assert!(first <= done + 1 && kept.len() <= MAX_REMEMBERED + 1);
            assert!(kept.iter().copied().eq(first..=sequence), "none is missing");
        }
        assert!(done > 0);
    }

    #[test]
    fn values_stay_comparable_however_long_a_stream_is_idle() {
        let mut streams = Streams::default();
        let place = streams.place(1, |_| true).unwrap();
        assert_eq!(streams.next(place), (1, false));
        streams.flags.get_mut(place as usize).unwrap().counted = MAX_UNWRITTEN - 2;
        assert_eq!(streams.next(place), (MAX_UNWRITTEN - 1, false));
        assert_eq!(streams.next(place), (MAX_UNWRITTEN, true));
        streams.wrote(place, MAX_UNWRITTEN);
        assert_eq!(streams.next(place), (MAX_UNWRITTEN + 1, false));
    }

    #[test]
    fn default_streams_have_one_name() {
        let raw = |addr| StreamHandle::from_raw(std::ptr::without_provenance_mut(addr));
        assert_eq!(raw(0), raw(LEGACY));
        assert_ne!(raw(0), raw(PER_THREAD));
        assert_eq!(raw(0x50).raw().addr(), 0x50);
    }

    #[test]
    fn a_machine_without_a_gpu_says_why() {
        match devices() {
            Ok(devices) => assert!(devices.iter().all(|device| !device.uuid().is_empty())),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert_eq!(default_device(), Err(error));
            }
        }
    }

    #[test]
    fn handles_have_their_length() {
        assert!(handle(&[1; IPC_HANDLE_LEN]).is_ok());
        assert!(handle(&[1; IPC_HANDLE_LEN - 1]).is_err());
    }

    #[tokio::test]
    async fn a_helper_thread_answers() {
        assert_eq!(on_helper_thread(|| 7).await, Ok(7));
    }

    #[test]
    fn the_futures_can_move_between_threads() {
        fn is_send<T: Send>(_: &T) {}
        fn try_it(communicator: &Communicator, stream: StreamHandle) {
            let options = AllReduceOptions::default();
            // SAFETY: the futures are never polled.
            unsafe {
                is_send(&communicator.all_reduce_on(stream, 0, 0, 0, Dtype::F32, Op::Sum, options));
                is_send(&communicator.register_device(0));
            }
        }
        let _ = try_it;
    }
}
