//! Lanes `delegated` and `resident` on backend cuda: the rank itself launches the kernels, in its own streams, or one that
//! rings the executor's.
//!
//! Owns the rank's mapping of every rank's window (of its own, on lane `resident`), its control block, the loaded
//! kernels, and the plan's answers.
//! [`Communicator::all_reduce_on`](crate::Communicator::all_reduce_on) launches through it; membership opens and
//! closes it. The windows are the executor's, and so are epochs: at the end of one it writes the abort words, and
//! kernels give up. Refuses to choose kernels or shapes: the executor's plan does, asked once for each kind of call.
//!
//! Captured graphs name the control block and the kernels, so those outlive communicators: a process has one control
//! block for each (communicator, rank, GPU), which joining again rewrites, and never unloads kernels. Between epochs the
//! control block says that all calls have failed: they touch no window, and leave NaN.
#![allow(unsafe_code)] // room: CUDA

use crate::attach::Window;
use crate::communicator::AllReduceOptions;
use crate::cuda::{StreamHandle, locked};
use crate::error::AllReduceError;
use allreduce_contract::cuda::{
    Capturing, Context, CudaError, DeviceMemory, Entered, Event, IPC_HANDLE_LEN, ImportedMemory,
    RegisteredPage, Relaxed, Stream, allocation_around, capturing, copy,
};
use allreduce_contract::kernel::{
    CONTROL_BLOCK_BYTES, Call, CallParts, ControlBlock, GATE_BYTES, GateLaunch, Instance,
    MAX_RING_BUFFERS, RING_ARENA, RING_STAGING, Regions, RingLaunch, RingPlace, command,
    dtype_code, has_islands, op_code,
};
use allreduce_contract::module::{Kernels, LaunchError, Shape};
use allreduce_contract::v1::{
    self, CudaMemory, CudaWindows, Peers, PlanResponse, RegionKind, RingCounts,
};
use allreduce_contract::window::{Abort, AbortReason, Control};
use allreduce_contract::{Algorithm, Dtype, Op, WorldSize};
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How long a kernel of the test waits for its peers, which may still be loading theirs.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Elements of the test's tensors: several blocks, and a tail that is no whole pack.
const TEST_ELEMS: usize = 1003;
/// Launch shape of the test.
const TEST_SHAPE: Shape = Shape {
    blocks: 2,
    data_threads: 64,
    programmatic: true,
};
/// Slower than this, a ring says that processes take turns on the GPU, at some 140 us a turn; else it takes some 10 us.
const RING_LIMIT: Duration = Duration::from_micros(130);
/// Rings that are timed.
const RINGS: u32 = 32;
/// Room for a status word.
const STATUS_LEN_BYTES: u64 = 256;
/// Kinds of calls whose plan is remembered.
const MAX_PLANS: usize = 4096;

/// What a rank's captured graphs refer to: its control block, in the place of which no other comes.
#[derive(Debug)]
struct Anchor {
    memory: DeviceMemory,
    /// Held while a lane is opened and tried.
    opening: Mutex<()>,
    /// Lane `resident`: where tensors are copied to, and from: captured copies name it.
    staging: Mutex<Option<Arc<Staging>>>,
    runs: Runs,
    /// The session whose epoch it is in, 0 for none.
    owner: Mutex<u64>,
}

/// What lets one run of calls through at a time: those of a captured graph, or one that is not captured
/// (kernels/cuda/gate.cuh). Calls that are enqueued are ordered by [`Lane::order`]; where graphs are launched only the GPU
/// sees. So on lane `resident` it is passed once in each graph, and, as soon as there is one, by each other call.
#[derive(Debug)]
struct Runs {
    /// The gate, then for each graph how many calls it has.
    memory: DeviceMemory,
    /// Carries those numbers.
    stream: Stream,
    captured: Mutex<Captured>,
}

/// The graphs that calls were captured into.
#[derive(Debug, Default)]
struct Captured {
    /// By the driver's number: place and calls.
    graphs: BTreeMap<u64, (u64, u32)>,
}

/// Length of the gate's memory, and so how many graphs can be told apart; calls in others pass no gate.
const RUNS_LEN_BYTES: u64 = 64 << 10;
const MAX_GRAPHS: u64 = (RUNS_LEN_BYTES - GATE_BYTES) / 4;

impl Runs {
    fn create(context: &Arc<Context>) -> Result<Self, CudaError> {
        let runs = Self {
            memory: DeviceMemory::allocate(context, RUNS_LEN_BYTES)?,
            stream: Stream::create(context)?,
            captured: Mutex::default(),
        };
        // SAFETY: the memory is its own, and nobody knows it yet.
        unsafe { runs.stream.fill(runs.memory.start(), 0, RUNS_LEN_BYTES) }?;
        runs.stream.synchronize()?;
        Ok(runs)
    }

    fn gate(&self) -> u64 {
        self.memory.start()
    }

    /// Where a graph's number of calls is.
    fn word(&self, place: u64) -> u64 {
        self.memory.start() + GATE_BYTES + 4 * place
    }

    /// What a call of `calls` launches has to pass, if anything: it is not captured, or the first of its graph.
    fn gate_of(&self, capture: Capturing, calls: u32) -> Option<GateLaunch> {
        let mut captured = locked(&self.captured);
        let gate = GateLaunch {
            gate: self.gate(),
            ..GateLaunch::default()
        };
        match capture {
            Capturing::No => (!captured.graphs.is_empty()).then_some(GateLaunch {
                num_calls: calls,
                ..gate
            }),
            Capturing::Graph(number) => {
                let place = captured.graphs.len() as u64;
                if captured.graphs.contains_key(&number) || place >= MAX_GRAPHS {
                    return None;
                }
                captured.graphs.insert(number, (place, 0));
                Some(GateLaunch {
                    calls: self.word(place),
                    ..gate
                })
            }
            Capturing::Unknown => None,
        }
    }

    /// A call was launched. If the number does not get to the GPU before the graph does, a gate sees the graph end too soon, no
    /// more.
    fn count(&self, capture: Capturing) -> Result<(), CudaError> {
        let Capturing::Graph(number) = capture else {
            return Ok(());
        };
        let mut captured = locked(&self.captured);
        let Some((place, calls)) = captured.graphs.get_mut(&number) else {
            return Ok(());
        };
        *calls += 1;
        // The thread may be the one that captures.
        let _relaxed = Relaxed::begin()?;
        // SAFETY: the word is in the memory; gates read it when graphs run, which this one does not yet.
        unsafe { self.stream.upload(self.word(*place), &calls.to_le_bytes()) }
    }
}

/// What a process has once, by key.
type Registry<K, V> = Mutex<BTreeMap<K, V>>;

/// Memory that the executor maps for as long as the epoch lasts.
#[derive(Debug)]
struct Staging {
    memory: DeviceMemory,
    generation: u64,
    handle: [u8; IPC_HANDLE_LEN],
}

/// Length of the staging memory, in whole allocations of the driver's; halves for sources and destinations.
const STAGING_LEN_BYTES: u64 = 4 << 20;

/// Numbers of memories in commands; each is the same for the same address, whatever the epoch. [`RING_STAGING`] first.
static NUMBERS: Registry<(String, u64), u8> = Mutex::new(BTreeMap::new());

/// By which number commands name an allocation that starts there; none if all numbers are taken.
pub(crate) fn ring_number(context: &Context, start: u64) -> Option<u8> {
    let mut numbers = locked(&NUMBERS);
    let key = (context.device().uuid().to_owned(), start);
    if let Some(number) = numbers.get(&key) {
        return Some(*number);
    }
    let taken: Vec<u8> = numbers.values().copied().collect();
    let first = RING_STAGING + 1;
    let number = (first..MAX_RING_BUFFERS as u8).find(|number| !taken.contains(number))?;
    numbers.insert(key, number);
    Some(number)
}

/// By communicator, rank and GPU.
static ANCHORS: Registry<(String, u32, String), Arc<Anchor>> = Mutex::new(BTreeMap::new());
/// By GPU, instance and image. Never unloaded: a graph may have captured them.
static KERNELS: Registry<(String, Instance, u64), Arc<Kernels>> = Mutex::new(BTreeMap::new());
/// By GPU, handle and generation: a process cannot open a window twice, and may be several ranks.
static IMPORTS: Registry<(String, [u8; IPC_HANDLE_LEN], u64), Weak<ImportedMemory>> =
    Mutex::new(BTreeMap::new());

/// Which rank of a communicator launches on a GPU from this process, by communicator and GPU, and how many epochs it
/// has open: the one before may not be dropped yet.
static SEATS: Registry<(String, String), (u32, u32)> = Mutex::new(BTreeMap::new());

/// The only rank of a communicator that launches on a GPU from this process: kernels of two could wait for each other
/// in one hardware queue, behind each other.
#[derive(Debug)]
struct Seat((String, String));

impl Seat {
    fn take(context: &Context, communicator: &str, rank: u32) -> Result<Self, String> {
        let key = (communicator.to_owned(), context.device().uuid().to_owned());
        let mut seats = locked(&SEATS);
        let (seated, epochs) = seats.entry(key.clone()).or_insert((rank, 0));
        if *seated != rank {
            return Err(format!(
                "rank {seated} of this process launches on {} already: give each rank a process, or a GPU",
                context.device()
            ));
        }
        *epochs += 1;
        Ok(Self(key))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = locked(&SEATS);
        if let Some((_, epochs)) = seats.get_mut(&self.0) {
            *epochs -= 1;
            if *epochs == 0 {
                seats.remove(&self.0);
            }
        }
    }
}

fn anchor(context: &Arc<Context>, communicator: &str, rank: u32) -> Result<Arc<Anchor>, CudaError> {
    let key = (
        communicator.to_owned(),
        rank,
        context.device().uuid().to_owned(),
    );
    let mut anchors = locked(&ANCHORS);
    if let Some(anchor) = anchors.get(&key) {
        return Ok(Arc::clone(anchor));
    }
    let anchor = Arc::new(Anchor {
        memory: DeviceMemory::allocate(context, CONTROL_BLOCK_BYTES)?,
        opening: Mutex::new(()),
        staging: Mutex::default(),
        runs: Runs::create(context)?,
        owner: Mutex::new(0),
    });
    anchors.insert(key, Arc::clone(&anchor));
    Ok(anchor)
}

/// What the executor is to map for a rank of lane `resident`, as a registration of memory [`RING_STAGING`] names it.
pub(crate) fn staging(
    context: &Arc<Context>,
    communicator: &str,
    rank: u32,
) -> Result<CudaMemory, String> {
    let text = |error: CudaError| error.to_string();
    let _relaxed = Relaxed::begin().map_err(text)?;
    let anchor = anchor(context, communicator, rank).map_err(text)?;
    let mut staging = locked(&anchor.staging);
    let staging = match &*staging {
        Some(staging) => Arc::clone(staging),
        None => {
            let memory = DeviceMemory::allocate(context, STAGING_LEN_BYTES).map_err(text)?;
            let allocation = allocation_around(context, memory.start());
            let generation = allocation.map_err(|error| error.to_string())?.generation;
            let handle = memory.export().map_err(text)?;
            let made = Arc::new(Staging {
                memory,
                generation,
                handle,
            });
            *staging = Some(Arc::clone(&made));
            made
        }
    };
    Ok(CudaMemory {
        ipc_handle: staging.handle.to_vec(),
        generation: staging.generation,
        len_bytes: STAGING_LEN_BYTES,
        device_uuid: context.device().uuid().to_owned(),
    })
}

fn kernels(
    context: &Arc<Context>,
    instance: Instance,
    image: &[u8],
) -> Result<Arc<Kernels>, CudaError> {
    let mut hasher = DefaultHasher::new();
    image.hash(&mut hasher);
    let key = (
        context.device().uuid().to_owned(),
        instance,
        hasher.finish(),
    );
    let mut loaded = locked(&KERNELS);
    if let Some(kernels) = loaded.get(&key) {
        return Ok(Arc::clone(kernels));
    }
    let kernels = Arc::new(Kernels::load(context, image, instance)?);
    loaded.insert(key, Arc::clone(&kernels));
    Ok(kernels)
}

fn import(
    context: &Arc<Context>,
    handle: [u8; IPC_HANDLE_LEN],
    generation: u64,
) -> Result<Arc<ImportedMemory>, CudaError> {
    let key = (context.device().uuid().to_owned(), handle, generation);
    let mut imports = locked(&IMPORTS);
    imports.retain(|_, memory| memory.strong_count() > 0);
    if let Some(memory) = imports.get(&key).and_then(Weak::upgrade) {
        return Ok(memory);
    }
    let memory = Arc::new(ImportedMemory::open(context, handle)?);
    imports.insert(key, Arc::downgrade(&memory));
    Ok(memory)
}

/// Who opens a lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opener<'a> {
    /// Names the communicator in this process: the daemon's socket and its name there.
    pub(crate) communicator: &'a str,
    pub(crate) rank: u32,
    pub(crate) session: u64,
    /// The rank's arena: where it starts in this process, and its length.
    pub(crate) arena: (u64, u64),
}

/// What a lane is tried with, once it is open.
struct Trial {
    stream: Stream,
    /// Where kernels put their status meanwhile.
    status: DeviceMemory,
    /// Where they are to put it then.
    settled: u64,
    world_size: WorldSize,
    layout: CudaWindows,
}

/// What is mapped while the epoch lasts.
#[derive(Debug)]
struct Opened {
    /// The own one.
    window: Arc<ImportedMemory>,
    _others: Vec<Arc<ImportedMemory>>,
    _seat: Seat,
    /// Unregistered before the lane's owner unmaps the control page.
    _page: RegisteredPage,
}

/// Which stream the last call was made on.
#[derive(Debug, Default)]
enum LastUse {
    #[default]
    None,
    /// On a stream that was not captured, or was.
    Stream {
        stream: StreamHandle,
        capture: Capturing,
    },
    /// On one that was closed since; the event is behind it.
    Closed,
}

type PlanKey = (u64, Dtype, Op, Option<Algorithm>);

/// How to make a kind of call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LanePlan {
    pub(crate) algorithm: Algorithm,
    blocks: u32,
    data_threads: u32,
    launch_elems: u64,
}

impl LanePlan {
    /// From the executor's answer.
    pub(crate) fn of(response: &PlanResponse) -> Result<Self, AllReduceError> {
        Ok(Self {
            algorithm: Algorithm::from_wire(response.algorithm)
                .map_err(|error| AllReduceError::ExecutorLost(error.to_string()))?,
            blocks: response.blocks,
            data_threads: response.data_threads,
            launch_elems: response.launch_elems,
        })
    }
}

/// Who reduces.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// This rank's kernels, with its peers'.
    Delegated,
    /// The executor's, which stays.
    Resident(Bell),
}

/// What a ring names.
#[derive(Debug, Clone, Copy)]
struct Bell {
    /// Of the kernel that stays.
    blocks: u32,
    /// The arena, in this process: tensors there are read and written where they are, as those in registered memory.
    arena: (u64, u64),
    /// Where others are copied to, and from: the first half for sources, the second for destinations.
    staging: u64,
}

/// Where a range is in a memory that starts at `start` and has `has` bytes.
fn offset_in((start, has): (u64, u64), at: u64, len_bytes: u64) -> Option<u64> {
    let offset_bytes = at.checked_sub(start)?;
    let end = offset_bytes.checked_add(len_bytes)?;
    (end <= has).then_some(offset_bytes)
}

/// Lane `resident`: reductions that were enqueued or captured, and those of them that are copied. Whoever shows them reads
/// them when it likes.
#[derive(Debug, Default)]
struct Rings {
    calls: AtomicU64,
    staged: AtomicU64,
}

impl Rings {
    fn count(&self, staged: bool) {
        // Relaxed: counts, which order nothing.
        self.staged.fetch_add(u64::from(staged), Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> RingCounts {
        let staged = self.staged.load(Ordering::Relaxed);
        RingCounts {
            calls: self.calls.load(Ordering::Relaxed).max(staged),
            staged,
        }
    }

    /// Nobody counts meanwhile.
    fn forget(&self) {
        self.calls.store(0, Ordering::Relaxed);
        self.staged.store(0, Ordering::Relaxed);
    }
}

/// A rank's side of the lane, for one epoch.
#[derive(Debug)]
pub(crate) struct Lane {
    way: Way,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    anchor: Arc<Anchor>,
    session: u64,
    rank: u32,
    /// None once closed.
    opened: Mutex<Option<Opened>>,
    plans: Mutex<HashMap<PlanKey, LanePlan>>,
    /// Lane `resident`, by where they start: length and number of registered memories.
    registered: Mutex<BTreeMap<u64, (u64, u8)>>,
    /// Held while a call is launched: calls of several streams are made one after the other.
    last: Mutex<LastUse>,
    rings: Rings,
    /// Recorded on the stream of the last call when another stream makes the next.
    event: Event,
}

/// One tensor's reduction, in pointers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensors {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    pub(crate) num_elems: u64,
    pub(crate) dtype: Dtype,
    pub(crate) op: Op,
    /// Whether source and destination are inside registered memory, or the arena.
    pub(crate) known: [bool; 2],
}

impl Lane {
    /// Opens the lane of a window's rank, with which it is closed. How many calls it has been tried with.
    ///
    /// # Errors
    /// For the executor.
    pub(crate) fn open_in(
        window: &Window,
        context: &Arc<Context>,
        opener: Opener<'_>,
        peers: &Peers,
        image: &[u8],
    ) -> Result<u32, String> {
        let anchor =
            anchor(context, opener.communicator, opener.rank).map_err(|error| error.to_string())?;
        // One at a time: the control block is the process's.
        let _opening = locked(&anchor.opening);
        // SAFETY: the window drops its lane before its control page.
        let (lane, trial) = unsafe { Self::open(context, opener, &window.control, peers, image) }?;
        // Before it is tried, so that leaving ends the trial. Peers comes once.
        let lane = window.lane.get_or_init(|| lane);
        let tried = lane.try_out(&trial);
        if tried.is_err() {
            lane.close();
        }
        tried
    }

    /// Maps every rank's window, begins the epoch in the control block, and reduces with the other ranks, to see that
    /// it works. Blocks until they do too; to be called on a thread of the client's own.
    ///
    /// # Errors
    /// For the executor.
    ///
    /// # Safety
    /// `control` is the session's control page, which stays mapped until the lane is closed or dropped.
    unsafe fn open(
        context: &Arc<Context>,
        opener: Opener<'_>,
        control: &Control,
        peers: &Peers,
        image: &[u8],
    ) -> Result<(Self, Trial), String> {
        let text = |error: CudaError| error.to_string();
        let _relaxed = Relaxed::begin().map_err(text)?;
        let layout = peers.cuda.ok_or("Peers names no layout of the windows")?;
        let world_size = u32::try_from(peers.peers.len())
            .ok()
            .and_then(|ranks| WorldSize::new(ranks).ok())
            .ok_or("Peers names no rank, or too many")?;
        let regions = Regions {
            world_size: world_size.get(),
            island_size: layout.island_size,
            push_slot_bytes: layout.push_slot_bytes,
            inband_part_bytes: layout.inband_part_bytes,
            staging_part_bytes: layout.staging_part_bytes,
        };
        let seat = Seat::take(context, opener.communicator, opener.rank)?;
        let kernels = kernels(context, Instance::of(world_size), image)
            .map_err(|error| format!("the executor's kernels: {error}"))?;
        let is_resident = peers.lane() == v1::Lane::Resident;
        let mut windows = BTreeMap::new();
        for (rank, peer) in (0_u32..).zip(&peers.peers) {
            if is_resident && rank != opener.rank {
                continue;
            }
            let region = peer
                .regions
                .iter()
                .find(|region| region.kind() == RegionKind::Window);
            let shared = region
                .and_then(|region| region.cuda.as_ref())
                .ok_or_else(|| format!("Peers names no window of rank {rank}"))?;
            let handle = <[u8; IPC_HANDLE_LEN]>::try_from(shared.ipc_handle.as_slice())
                .map_err(|_| format!("the handle of the window of rank {rank} is malformed"))?;
            let memory = import(context, handle, shared.generation).map_err(|error| {
                format!(
                    "the window of rank {rank} on {}, from {}: {error}",
                    shared.device_uuid,
                    context.device()
                )
            })?;
            if memory.len_bytes() < regions.len_bytes() {
                return Err(format!(
                    "the window of rank {rank} has {} bytes, {} are needed",
                    memory.len_bytes(),
                    regions.len_bytes()
                ));
            }
            windows.insert(rank, memory);
        }
        let anchor = anchor(context, opener.communicator, opener.rank).map_err(text)?;
        let own = windows.get(&opener.rank).cloned();
        let own = own.ok_or("Peers names no window of this rank")?;
        let way = match is_resident {
            false => Way::Delegated,
            true => Way::Resident(Bell {
                blocks: layout.resident_blocks,
                arena: opener.arena,
                staging: locked(&anchor.staging)
                    .as_ref()
                    .map(|staging| staging.memory.start())
                    .ok_or("there is no staging memory")?,
            }),
        };
        // SAFETY: the lane unregisters the page when it is closed or dropped (the caller's).
        let page = unsafe { RegisteredPage::register(context, control) }
            .map_err(|error| format!("the control page: {error}"))?;
        let lane = Self {
            way,
            registered: Mutex::default(),
            anchor,
            context: Arc::clone(context),
            kernels,
            session: opener.session,
            rank: opener.rank,
            opened: Mutex::default(),
            plans: Mutex::default(),
            last: Mutex::default(),
            rings: Rings::default(),
            event: Event::create(context).map_err(text)?,
        };
        let stream = Stream::create(context).map_err(text)?;
        // In the place of the status word while the lane is tried: what fails then is no failure of the epoch's.
        let status = DeviceMemory::allocate(context, STATUS_LEN_BYTES).map_err(text)?;
        lane.begin_epoch(&stream, &regions, peers, &windows, (&page, &status))
            .map_err(text)?;
        let settled = page.status();
        *locked(&lane.opened) = Some(Opened {
            window: own,
            _others: windows.into_values().collect(),
            _seat: seat,
            _page: page,
        });
        let trial = Trial {
            stream,
            status,
            settled,
            world_size,
            layout,
        };
        Ok((lane, trial))
    }

    /// Reduces with the other ranks, which may still be opening theirs.
    fn try_out(&self, trial: &Trial) -> Result<u32, String> {
        let _relaxed = Relaxed::begin().map_err(|error| error.to_string())?;
        let calls = self.test(trial)?;
        self.settle(&trial.stream, &trial.layout, trial.settled)
            .map_err(|error| error.to_string())?;
        self.rings.forget();
        Ok(calls)
    }

    /// Lane `resident`: what the worker has enqueued or captured.
    pub(crate) fn ring_counts(&self) -> Option<RingCounts> {
        match self.way {
            Way::Delegated => None,
            Way::Resident(_) => Some(self.rings.counts()),
        }
    }

    /// Rewrites the control block: no call is in flight (joining again is documented to need that).
    fn begin_epoch(
        &self,
        stream: &Stream,
        regions: &Regions,
        peers: &Peers,
        windows: &BTreeMap<u32, Arc<ImportedMemory>>,
        (page, status): (&RegisteredPage, &DeviceMemory),
    ) -> Result<(), CudaError> {
        let starts = (0..regions.world_size)
            .map(|rank| windows.get(&rank).map_or(0, |window| window.start()));
        let block = ControlBlock {
            wake: page.wake(),
            ..ControlBlock::new(
                regions,
                self.rank,
                peers.epoch,
                nanos(TEST_TIMEOUT),
                status.start(),
                starts,
            )
        };
        let mut owner = locked(&self.anchor.owner);
        let start = self.anchor.memory.start();
        // SAFETY: the ranges are inside the control block, the gate and the status; no kernel uses them now.
        unsafe {
            stream.fill(self.anchor.runs.gate(), 0, GATE_BYTES)?;
            stream.fill(status.start(), 0, STATUS_LEN_BYTES)?;
            stream.fill(start, 0, CONTROL_BLOCK_BYTES)?;
            stream.upload(start, block.bytes())?;
        }
        stream.synchronize()?;
        *owner = self.session;
        Ok(())
    }

    /// The lane works: from now on with the epoch's deadline and the page's status word.
    fn settle(&self, stream: &Stream, layout: &CudaWindows, status: u64) -> Result<(), CudaError> {
        let timeout = Duration::from_millis(u64::from(layout.timeout_ms));
        let words = [nanos(timeout), status].map(u64::to_le_bytes);
        const {
            let timeout = offset_of!(ControlBlock, timeout_ns);
            assert!(offset_of!(ControlBlock, status) == timeout + 8);
        }
        let at = self.anchor.memory.start() + offset_of!(ControlBlock, timeout_ns) as u64;
        // SAFETY: the words are inside the control block; no kernel is under way.
        unsafe { stream.upload(at, words.as_flattened()) }?;
        stream.synchronize()
    }

    /// Reduces with all ranks by the real kernels, from this process, and compares. How many calls that took.
    fn test(&self, trial: &Trial) -> Result<u32, String> {
        let Trial {
            stream,
            status,
            world_size,
            layout,
            ..
        } = trial;
        let text = |error: CudaError| error.to_string();
        // Small integers: exact in any order.
        let value = |rank: u32, index: usize| (rank * 37 + 1) as f32 + (index % 101) as f32;
        let ranks = || world_size.ranks().map(|rank| rank.get());
        let own: Vec<u8> = (0..TEST_ELEMS)
            .flat_map(|index| value(self.rank, index).to_le_bytes())
            .collect();
        let expected: Vec<u8> = (0..TEST_ELEMS)
            .flat_map(|index| {
                let sum: f32 = ranks().map(|rank| value(rank, index)).sum();
                sum.to_le_bytes()
            })
            .collect();
        let len_bytes = own.len() as u64;
        let memory = DeviceMemory::allocate(&self.context, 2 * len_bytes.next_multiple_of(256))
            .map_err(text)?;
        let (src, dst) = (
            memory.start(),
            memory.start() + len_bytes.next_multiple_of(256),
        );
        let mut found = vec![0; own.len()];
        let islands = has_islands(world_size.get(), layout.island_size);
        let algorithms: &[Algorithm] = match self.way {
            Way::Delegated => &[
                Algorithm::OneShotPush,
                Algorithm::OneShotPullInband,
                Algorithm::TwoShotPush,
                Algorithm::TwoShotPullInband,
                Algorithm::Hierarchical,
            ],
            Way::Resident(_) => &[Algorithm::OneShotPullInband],
        };
        let algorithms = algorithms
            .iter()
            .filter(|algorithm| islands || **algorithm != Algorithm::Hierarchical);
        let tensors = Tensors {
            src,
            dst,
            num_elems: TEST_ELEMS as u64,
            dtype: Dtype::F32,
            op: Op::Sum,
            known: [false; 2],
        };
        let stream_handle = StreamHandle::from_raw(stream.raw().cast());
        let plan_of = |algorithm| LanePlan {
            algorithm,
            blocks: TEST_SHAPE.blocks,
            data_threads: TEST_SHAPE.data_threads,
            launch_elems: TEST_ELEMS as u64,
        };
        // Each is one launch, or ring: the tensors fit.
        let mut calls = 0;
        for algorithm in algorithms.copied() {
            calls += 1;
            let plan = plan_of(algorithm);
            // SAFETY: src and dst are of the memory above, used on this stream alone, which is of the lane's context.
            unsafe {
                stream.upload(src, &own).map_err(text)?;
                stream.fill(dst, 0xff, len_bytes).map_err(text)?;
                self.launch(stream_handle, tensors, &plan)
                    .map_err(|error| error.to_string())?;
                stream.download(dst, &mut found).map_err(text)?;
            }
            stream.synchronize().map_err(text)?;
            let mut word = [0; 8];
            // SAFETY: the word is in the memory; the kernels that write it are done.
            unsafe { stream.download(status.start(), &mut word) }.map_err(text)?;
            if let Some(abort) = Abort::from_word(u64::from_le_bytes(word)) {
                return Err(format!("the test with {algorithm}: {abort}"));
            }
            if found != expected {
                let wrong = found.chunks(4).zip(expected.chunks(4));
                let wrong = wrong.filter(|(found, expected)| found != expected).count();
                return Err(format!(
                    "the test with {algorithm}: {wrong} of {TEST_ELEMS} sums are wrong"
                ));
            }
        }
        if let Way::Resident(_) = self.way {
            // Behind each other on the stream, so that how the ranks' hosts are scheduled does not count; twice, since the
            // first waits for the last rank.
            let mut fastest = Duration::MAX;
            for _ in 0..2 {
                let started = Instant::now();
                for _ in 0..RINGS {
                    calls += 1;
                    let plan = plan_of(Algorithm::OneShotPullInband);
                    // SAFETY: as above.
                    unsafe { self.launch(stream_handle, tensors, &plan) }
                        .map_err(|error| error.to_string())?;
                }
                stream.synchronize().map_err(text)?;
                fastest = fastest.min(started.elapsed() / RINGS);
            }
            if fastest > RING_LIMIT {
                return Err(format!(
                    "ringing the executor's kernel takes {} us: the GPU is not shared by one MPS server, and processes take turns on it",
                    fastest.as_micros()
                ));
            }
        }
        *locked(&self.last) = LastUse::None;
        Ok(calls)
    }

    /// The plan's answer for a kind of call, if it was asked before.
    pub(crate) fn planned(
        &self,
        tensors: &Tensors,
        options: &AllReduceOptions,
    ) -> Option<LanePlan> {
        locked(&self.plans).get(&key(tensors, options)).copied()
    }

    /// Remembers the plan's answer.
    pub(crate) fn remember(&self, tensors: &Tensors, options: &AllReduceOptions, plan: LanePlan) {
        let mut plans = locked(&self.plans);
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        plans.insert(key(tensors, options), plan);
    }

    /// Launches a reduction on a stream: as many kernels as the plan says.
    ///
    /// # Safety
    /// `stream` is a live stream of the lane's context, or null; `src` and `dst` each have `num_elems` elements, are
    /// equal or apart, and are touched by nothing but work ordered with the launch until it is done.
    ///
    /// # Errors
    /// [`AllReduceError`].
    pub(crate) unsafe fn launch(
        &self,
        stream: StreamHandle,
        tensors: Tensors,
        plan: &LanePlan,
    ) -> Result<(), AllReduceError> {
        let Tensors {
            src,
            dst,
            num_elems,
            dtype,
            op,
            ..
        } = tensors;
        let Some(op_code) = op_code(op) else {
            return Err(AllReduceError::NoKernel { dtype, op });
        };
        let elem_bytes = dtype.size_bytes() as u64;
        let shape = Shape {
            blocks: plan.blocks,
            data_threads: plan.data_threads,
            programmatic: true,
        };
        let mut last = locked(&self.last);
        let entered = self.context.enter().map_err(AllReduceError::Cuda)?;
        // SAFETY: the caller's; earlier streams live until they are closed (all_reduce_on says so).
        let capture = unsafe { self.order(&mut last, stream) }.map_err(AllReduceError::Cuda)?;
        let place = (stream, capture);
        // Before it is tried: a part of it may be enqueued when the rest cannot be.
        *last = LastUse::Stream { stream, capture };
        if let Way::Resident(bell) = self.way {
            // SAFETY: the caller's.
            return unsafe { self.ring(&entered, place, tensors, plan, &bell) };
        }
        // No gate here: with one, graphs of calls whose blocks fill the GPU did not get all of them resident (an H200, 2 and 4
        // ranks, 1 MB), so two graphs that run at once are not noticed on this lane (kernels/README.md).
        let mut first = 0;
        loop {
            let count = plan.launch_elems.max(1).min(num_elems - first);
            let call = Call::new(CallParts {
                control: self.anchor.memory.start(),
                src: src + first * elem_bytes,
                dst: dst + first * elem_bytes,
                num_elems: count,
                elem_bytes: elem_bytes as u32,
                op: op_code,
                flags: 0,
                blocks: plan.blocks,
                data_threads: plan.data_threads,
            });
            // SAFETY: the caller's for stream and tensors; the control block lives for ever, and the windows while it
            // names them (close).
            let launched = unsafe {
                self.kernels.launch(
                    &entered,
                    stream.raw(),
                    (plan.algorithm, dtype),
                    &[call],
                    shape,
                )
            };
            launched.map_err(|error| match error {
                LaunchError::Cuda(error) => AllReduceError::Cuda(error),
                LaunchError::NoKernel { .. } => AllReduceError::NotLaunched(error.to_string()),
            })?;
            first += count;
            if first >= num_elems {
                return Ok(());
            }
        }
    }

    /// Enqueues the gate before a call of `launches` launches, or rings, where it has to pass one.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn pass_gate(
        &self,
        entered: &Entered<'_>,
        (stream, capture): (StreamHandle, Capturing),
        launches: u64,
        ring_blocks: u32,
    ) -> Result<(), CudaError> {
        let calls = u32::try_from(launches.max(1)).unwrap_or(u32::MAX);
        let Some(gate) = self.anchor.runs.gate_of(capture, calls) else {
            return Ok(());
        };
        let gate = GateLaunch {
            control: self.anchor.memory.start(),
            ring_blocks,
            ..gate
        };
        // SAFETY: the caller's for the stream; the control block and the gate live for ever, and the windows while the
        // control block names them (close).
        unsafe { self.kernels.launch_gate(entered, stream.raw(), gate) }
    }

    /// A memory of the worker's that the executor has mapped: commands may name it, by this number.
    /// Without one, it is copied like others. What was registered there before is gone.
    pub(crate) fn set_registered(&self, start: u64, len_bytes: u64, number: Option<u8>) {
        let mut registered = locked(&self.registered);
        let end = start.saturating_add(len_bytes);
        registered.retain(|other, (has, _)| *other >= end || other.saturating_add(*has) <= start);
        if let Some(number) = number {
            registered.insert(start, (len_bytes, number));
        }
    }

    /// How a command names a tensor, if it is where the executor's kernel can reach it.
    fn place(&self, bell: &Bell, at: u64, len_bytes: u64) -> Option<RingPlace> {
        if let Some(offset_bytes) = offset_in(bell.arena, at, len_bytes) {
            return Some(RingPlace {
                memory: RING_ARENA,
                offset_bytes,
            });
        }
        let registered = locked(&self.registered);
        let (start, (has, memory)) = registered.range(..=at).next_back()?;
        let offset_bytes = offset_in((*start, *has), at, len_bytes)?;
        Some(RingPlace {
            memory: *memory,
            offset_bytes,
        })
    }

    /// Lane `resident`: rings, once for each piece; tensors that are neither in the arena nor in registered memory are
    /// copied to where the executor's kernel can read them, and from there.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn ring(
        &self,
        entered: &Entered<'_>,
        (stream, capture): (StreamHandle, Capturing),
        tensors: Tensors,
        plan: &LanePlan,
        bell: &Bell,
    ) -> Result<(), AllReduceError> {
        let Tensors {
            src,
            dst,
            num_elems,
            dtype,
            op,
            known,
        } = tensors;
        let (Some(dtype_code), Some(op_code)) = (dtype_code(dtype), op_code(op)) else {
            return Err(AllReduceError::NoKernel { dtype, op });
        };
        let elem_bytes = dtype.size_bytes() as u64;
        let staging = bell.staging;
        let half = STAGING_LEN_BYTES / 2;
        let most = plan.launch_elems.min(half / elem_bytes).max(1);
        // Before the staging memory is written, which is of all runs.
        // SAFETY: the caller's.
        unsafe {
            self.pass_gate(
                entered,
                (stream, capture),
                num_elems.div_ceil(most),
                bell.blocks,
            )
        }
        .map_err(AllReduceError::Cuda)?;
        let mut first = 0;
        let mut is_staged = false;
        loop {
            let count = most.min(num_elems - first);
            let len_bytes = count * elem_bytes;
            let (src, dst) = (src + first * elem_bytes, dst + first * elem_bytes);
            let staged = |offset_bytes| RingPlace {
                memory: RING_STAGING,
                offset_bytes,
            };
            let place = |at| self.place(bell, at, len_bytes);
            let [src_place, dst_place] = [(src, known[0]), (dst, known[1])]
                .map(|(at, known)| known.then(|| place(at)).flatten());
            is_staged |= len_bytes > 0 && (src_place.is_none() || dst_place.is_none());
            let rung_dst = dst_place.map_or(staging + half, |_| dst);
            let ring = RingLaunch {
                control: self.anchor.memory.start(),
                dst: rung_dst,
                command: command(
                    dtype_code,
                    op_code,
                    src_place.unwrap_or_else(|| staged(0)),
                    dst_place.unwrap_or_else(|| staged(half)),
                    // A piece fits a slot.
                    u32::try_from(count).unwrap_or(u32::MAX),
                ),
                blocks: bell.blocks,
                reserved: 0,
            };
            // SAFETY: the caller's for stream and tensors; the staging region is this rank's, and used in the order of
            // its calls; the control block lives for ever, and the window while it names it (close).
            unsafe {
                if src_place.is_none() {
                    copy(entered, stream.raw(), staging, src, len_bytes)
                        .map_err(AllReduceError::Cuda)?;
                }
                self.kernels
                    .launch_ring(entered, stream.raw(), ring)
                    .map_err(AllReduceError::Cuda)?;
                if dst_place.is_none() {
                    copy(entered, stream.raw(), dst, rung_dst, len_bytes)
                        .map_err(AllReduceError::Cuda)?;
                }
            }
            self.anchor
                .runs
                .count(capture)
                .map_err(AllReduceError::Cuda)?;
            first += count;
            if first >= num_elems {
                self.rings.count(is_staged);
                return Ok(());
            }
        }
    }

    /// Orders a call on `stream` behind the one before, where that was made on another stream; whether `stream` is
    /// being captured. Calls in a graph are not ordered with calls outside of it, nor in another: its launch is the worker's, and
    /// the gate sees what runs at once.
    ///
    /// # Safety
    /// Both streams are live, of the lane's context, or null.
    unsafe fn order(
        &self,
        last: &mut LastUse,
        stream: StreamHandle,
    ) -> Result<Capturing, CudaError> {
        let entered = self.context.enter()?;
        // SAFETY: the caller's.
        let capture_of = |stream: StreamHandle| unsafe { capturing(&entered, stream.raw()) };
        let capture = capture_of(stream)?;
        match *last {
            LastUse::Stream {
                stream: before,
                capture: capture_before,
            } if before != stream && capture_before == capture => {
                // A capture that has ended since is over and done with.
                if capture == Capturing::No || capture_of(before)? == capture {
                    // SAFETY: the caller's; the event is of the lane's context.
                    unsafe {
                        self.event.record_on(before.raw())?;
                        self.event.await_on(stream.raw())?;
                    }
                }
            }
            LastUse::Closed if capture == Capturing::No => {
                // SAFETY: the caller's.
                unsafe { self.event.await_on(stream.raw()) }?;
            }
            LastUse::None | LastUse::Closed | LastUse::Stream { .. } => {}
        }
        Ok(capture)
    }

    /// Forgets a stream, which is about to be destroyed.
    ///
    /// # Safety
    /// It is live, or was never used here.
    pub(crate) unsafe fn close_stream(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let mut last = locked(&self.last);
        match *last {
            LastUse::Stream {
                stream: before,
                capture,
            } if before == stream => {
                if capture != Capturing::No {
                    *last = LastUse::None;
                } else {
                    let _entered = self.context.enter()?;
                    // SAFETY: the caller's.
                    unsafe { self.event.record_on(stream.raw()) }?;
                    *last = LastUse::Closed;
                }
            }
            LastUse::None | LastUse::Closed | LastUse::Stream { .. } => {}
        }
        Ok(())
    }

    /// Ends the epoch for this rank's kernels: those that wait give up, those to come touch no window.
    pub(crate) fn abort(&self) -> Result<(), CudaError> {
        let _relaxed = Relaxed::begin()?;
        let stream = Stream::create(&self.context)?;
        let opened = locked(&self.opened);
        let Some(opened) = opened.as_ref() else {
            return Ok(());
        };
        let abort = Abort {
            reason: AbortReason::Host,
            rank: self.rank,
            epoch: 0,
            sequence: 0,
        };
        // SYNC: abort, in the executor's place.
        // SAFETY: the window is mapped; its first word is its abort word, which anybody may set at any time.
        unsafe { stream.upload(opened.window.start(), &abort.to_word().to_le_bytes()) }?;
        let owner = locked(&self.anchor.owner);
        if *owner == self.session {
            let at = self.anchor.memory.start() + offset_of!(ControlBlock, failed) as u64;
            // SAFETY: the word is inside the control block; kernels look at it when they begin.
            unsafe { stream.upload(at, &1_u32.to_le_bytes()) }?;
        }
        stream.synchronize()
    }

    /// Unmaps the windows, behind what this process's kernels still do with them (the driver waits). What is replayed
    /// later finds that the epoch is over.
    pub(crate) fn close(&self) {
        let aborted = self.abort();
        let mut opened = locked(&self.opened);
        if aborted.is_err() {
            // The context is lost, and with it what could be unmapped. Kernels that ran on would find nothing.
            std::mem::forget(opened.take());
            return;
        }
        drop(opened.take());
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Closed already, unless the executor was lost.
        if locked(&self.opened).is_some() {
            self.close();
        }
    }
}

fn key(tensors: &Tensors, options: &AllReduceOptions) -> PlanKey {
    let Tensors {
        num_elems,
        dtype,
        op,
        ..
    } = *tensors;
    (num_elems, dtype, op, options.algorithm)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
