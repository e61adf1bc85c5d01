//! The CUDA backend: windows in GPU memory, reductions by kernels.
//!
//! Owns the CUDA thread, on which everything that may block runs (opening devices, allocating, mapping,
//! testing, freeing), and what the executor's task launches on: windows, mapped memory. Enqueueing
//! a reduction happens on the task's own thread and waits for nothing. Refuses to decide: the plan says which
//! kernel, in which shape.
//!
//! What a reduction uses is in use until the GPU is through with it, which the host learns from *fences*: one
//! event for each GPU, recorded behind the newest launch whenever the last record is done. What was asked for
//! meanwhile (saying "done", freeing) is deferred until every fence has passed the launch that was newest then.

mod copies;
mod gpu;
mod host_window;
mod image;
mod lane;
mod launch;
mod resident;
mod test;
mod window;
mod work;

pub(crate) use gpu::probe_kernels;
pub(crate) use lane::{EpochLane, LaneSpec, LaneWindow};
pub(crate) use resident::{ResidentShape, RingMemory};
pub(crate) use test::{Tested, Verdict};
pub(crate) use window::{Window, WindowSpec};

use crate::backend::Fault;
use crate::backend::cuda::gpu::{Gpu, failed};
use crate::backend::cuda::launch::Accepted;
use crate::backend::cuda::work::{Part, Site, Work};
use crate::backend::jobs::JobThread;
use crate::communicator::{ARENA, BufferError, GpuError, Launch, Place, RankLaunch};
use crate::config::{CudaConfig, TopologyConfig};
use crate::plan::{NoStaying, ResidentBlocks, default_island_size};
use crate::slots::{BlockSlots, Need, SlotsError};
use crate::topology::Machine;
use allreduce_contract::cuda::{CudaError, Driver, IPC_HANDLE_LEN, ImportedMemory};
use allreduce_contract::kernel::{Instance, Regions};
use allreduce_contract::window::{Abort, AbortReason};
use allreduce_contract::{Rank, WorldSize};
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often a GPU that is at work is looked at.
const POLL: Duration = Duration::from_millis(1);
/// How often ranks that launch themselves are looked at.
const LANE_POLL: Duration = Duration::from_millis(20);

/// What the GPU may take beyond the deadline of what it was given, before it is taken for stuck.
const GPU_GRACE: Duration = Duration::from_secs(2);

/// What the CUDA thread is at, and since when.
type Busy = Arc<Mutex<Option<(Instant, &'static str)>>>;

fn lock(busy: &Busy) -> MutexGuard<'_, Option<(Instant, &'static str)>> {
    // Nothing can panic while it is held.
    busy.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What only the CUDA thread touches.
#[derive(Debug)]
pub(crate) struct Devices {
    config: CudaConfig,
    machine: Machine,
    gpus: HashMap<String, Arc<Gpu>>,
    /// By GPU, handle and generation: a process cannot open one twice, and two ranks may live in one allocation.
    imported: HashMap<(String, [u8; IPC_HANDLE_LEN], u64), Weak<ImportedMemory>>,
}

impl Devices {
    fn gpu(&mut self, uuid: &str) -> Result<Arc<Gpu>, GpuError> {
        if let Some(gpu) = self.gpus.get(uuid) {
            return Ok(Arc::clone(gpu));
        }
        let driver = Driver::get().map_err(GpuError::Unavailable)?;
        let devices = driver.devices().map_err(failed("devices"))?;
        let visible = devices.iter().map(|device| device.uuid().to_owned());
        let visible: Vec<String> = visible.collect();
        let device = devices.into_iter().find(|device| device.uuid() == uuid);
        let device = device.ok_or_else(|| GpuError::UnknownDevice {
            uuid: uuid.chars().filter(|c| !c.is_control()).take(64).collect(),
            visible,
        })?;
        tracing::info!(%device, mps = device.has_mps(), "opening GPU");
        let gpu = Gpu::open(device)?;
        self.gpus.insert(uuid.to_owned(), Arc::clone(&gpu));
        Ok(gpu)
    }

    /// A session's window on the GPU of this UUID, with the kernels loaded.
    pub(crate) fn create_window(
        &mut self,
        uuid: &str,
        spec: &WindowSpec,
    ) -> Result<Window, GpuError> {
        let gpu = self.gpu(uuid)?;
        // Loaded now, so that neither the test nor a reduction has to wait for it: this world's, and pairs'.
        gpu.kernels(&self.config, Instance::of(spec.world_size))?;
        if spec.world_size > WorldSize::ONE {
            gpu.kernels(&self.config, Instance::N2)?;
        }
        Window::create(gpu, spec)
    }

    /// Tests the windows of an epoch, in rank order, and leaves them as the epoch starts from.
    pub(crate) fn test(
        &mut self,
        windows: &[Arc<Window>],
        epoch: u64,
        timeout: Duration,
    ) -> Verdict {
        let uuids: Vec<String> = windows
            .iter()
            .map(|window| window.gpu.device().uuid().to_owned())
            .collect();
        let placed = self.machine.place(&uuids);
        test::test(windows, &self.config, placed.as_ref(), epoch, timeout)
    }

    /// What a lane has that ranks can reach; `windows` are all ranks', in rank order.
    pub(crate) fn create_lane(
        &mut self,
        windows: &[Arc<Window>],
        spec: &LaneSpec,
    ) -> Result<EpochLane, GpuError> {
        lane::create(windows, &self.config, spec)
    }

    /// Maps an allocation of a rank.
    pub(crate) fn import(
        &mut self,
        window: &Window,
        device_uuid: &str,
        handle: [u8; IPC_HANDLE_LEN],
        generation: u64,
    ) -> Result<Arc<ImportedMemory>, BufferError> {
        let own = window.gpu.device().uuid();
        if device_uuid != own {
            return Err(BufferError::BadMemory(format!(
                "it is on another device than {own}, with which the rank joined"
            )));
        }
        let key = (own.to_owned(), handle, generation);
        self.imported.retain(|_, memory| memory.strong_count() > 0);
        if let Some(memory) = self.imported.get(&key).and_then(Weak::upgrade) {
            return Ok(memory);
        }
        let memory = ImportedMemory::open(&window.gpu.context, handle)
            .map_err(|error| BufferError::BadMemory(error.to_string()))?;
        let memory = Arc::new(memory);
        self.imported.insert(key, Arc::downgrade(&memory));
        Ok(memory)
    }
}

/// An IPC handle from the wire.
pub(crate) fn ipc_handle(bytes: &[u8]) -> Result<[u8; IPC_HANDLE_LEN], BufferError> {
    bytes.try_into().map_err(|_| {
        BufferError::BadHandle(format!(
            "an IPC handle has {IPC_HANDLE_LEN} bytes, not {}",
            bytes.len()
        ))
    })
}

/// Something that waits for the GPUs.
enum Deferred {
    /// Say that the session's sequences up to this one are done.
    Done { session: u64, sequence: u64 },
    /// Say that the session's epoch is over.
    Ended(u64),
    /// Free, then tell whoever waits for it.
    Free(Garbage, Option<Freed>),
    /// The same, and the session's window.
    FreeSession(u64, Garbage, Option<Freed>),
}

/// Told when memory was freed.
pub(crate) type Freed = Box<dyn FnOnce() + Send>;

/// What is to be freed, in this order.
#[derive(Debug, Default)]
struct Garbage {
    imports: Vec<Arc<ImportedMemory>>,
    window: Option<Arc<Window>>,
    lane: Option<Arc<EpochLane>>,
}

impl Garbage {
    fn free(self) {
        drop(self.imports);
        drop(self.lane);
        drop(self.window);
    }
}

/// One GPU's part of the launches.
#[derive(Debug)]
struct Lane {
    site: Site,
    /// The epoch of the newest launch here.
    epoch: u64,
    /// Newest launch that is wholly enqueued here, and newest that is known to be done.
    launched: u64,
    done: u64,
    /// What was enqueued here, in entries of the stream, and what of it is known to be done. A launch may be many.
    entries_enqueued: u64,
    entries_done: u64,
    fence: Option<Fence>,
    /// Whether the streams that hold it up were let go already.
    released: bool,
}

/// What the GPU has done once its fence event has passed.
#[derive(Debug, Clone, Copy)]
struct Fence {
    launch: u64,
    entries: u64,
    since: Instant,
}

impl Lane {
    fn is_idle(&self) -> bool {
        self.done >= self.launched && self.entries_done >= self.entries_enqueued
    }
}

/// The epoch that launches belong to.
#[derive(Debug)]
struct Epoch {
    number: u64,
    /// In rank order.
    sessions: Vec<u64>,
}

/// How a look at the GPUs went badly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GpuTrouble {
    /// A kernel gave up, or a rank cheats: the epoch is over, the GPU is well.
    Aborted {
        epoch: u64,
        rank: Option<Rank>,
        reason: String,
    },
    /// The GPU has not come through in time: somebody's stream holds it up. To be found out by
    /// [`CudaBackend::ask_who_is_late`], which may block.
    Stuck(Stuck),
    /// The GPU does not go on, or its context is lost: only another process helps.
    Lost { rank: Option<Rank>, reason: String },
}

/// A GPU that waits for somebody's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stuck {
    pub(crate) epoch: u64,
    device: String,
    limit_ms: u128,
}

impl Stuck {
    /// In words, with the ranks whose streams are late.
    pub(crate) fn reason(&self, late: &[Rank]) -> String {
        let Self {
            device, limit_ms, ..
        } = self;
        if late.is_empty() {
            return format!("{device} did not finish a reduction within {limit_ms} ms");
        }
        let names: Vec<String> = late.iter().map(Rank::to_string).collect();
        format!(
            "the stream of rank {} did not get to its reduction on {device} within {limit_ms} ms",
            names.join(", ")
        )
    }
}

/// The backend of one executor.
pub(crate) struct CudaBackend {
    config: CudaConfig,
    world_size: WorldSize,
    thread: JobThread<Devices>,
    busy: Busy,
    windows: HashMap<u64, Arc<Window>>,
    /// By session and memory.
    imports: HashMap<(u64, u64), Arc<ImportedMemory>>,
    /// By session and memory: the number that commands to the kernel that stays name it by.
    ring_memories: HashMap<(u64, u64), u32>,
    /// By session: the windows of its epoch's lane, all of which the rank may have mapped.
    lanes_of: HashMap<u64, Arc<EpochLane>>,
    /// Where blocks of kernels that stay are counted.
    slots_dir: PathBuf,
    /// Those that this communicator has, from the choice of lane `resident` until its ranks have left or have another lane.
    /// The lanes' kernels share it, and may end later.
    slots: Option<Arc<BlockSlots>>,
    epoch: Option<Epoch>,
    /// The one before, of which reductions may still be on the GPU.
    ended: Option<Epoch>,
    lanes: Vec<Lane>,
    /// Reductions that were promised to be launched.
    accepted: u64,
    launches: u64,
    longest_timeout: Duration,
    /// In order of the launch they wait for.
    deferred: VecDeque<(u64, Deferred)>,
    /// By session and stream: the newest value that the GPU waits for.
    awaited: HashMap<(u64, u32), u32>,
    /// By session and stream: the value of the newest call.
    values: HashMap<(u64, u32), u32>,
    /// Accepted, and not wholly launched, in order.
    queue: VecDeque<Accepted>,
}

impl CudaBackend {
    /// Starts the CUDA thread, which touches no GPU until it is asked to.
    pub(crate) fn start(
        config: CudaConfig,
        topology: TopologyConfig,
        world_size: WorldSize,
        slots_dir: PathBuf,
    ) -> std::io::Result<Self> {
        let devices = Devices {
            config: config.clone(),
            machine: Machine::new(topology),
            gpus: HashMap::new(),
            imported: HashMap::new(),
        };
        Ok(Self {
            config,
            world_size,
            thread: JobThread::start("cuda", devices)?,
            busy: Busy::default(),
            windows: HashMap::new(),
            imports: HashMap::new(),
            ring_memories: HashMap::new(),
            lanes_of: HashMap::new(),
            slots_dir,
            slots: None,
            epoch: None,
            ended: None,
            lanes: Vec::new(),
            accepted: 0,
            launches: 0,
            longest_timeout: Duration::ZERO,
            deferred: VecDeque::new(),
            awaited: HashMap::new(),
            values: HashMap::new(),
            queue: VecDeque::new(),
        })
    }

    pub(crate) fn config(&self) -> &CudaConfig {
        &self.config
    }

    /// Runs `work` on the CUDA thread, after what was asked before, and `done` with its result there. `what`
    /// is told if it never ends.
    pub(crate) fn submit<R>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut Devices) -> R + Send + 'static,
        done: impl FnOnce(R) + Send + 'static,
    ) {
        let busy = Arc::clone(&self.busy);
        let lane = self.lane().cloned();
        self.thread.run(move |devices| {
            *lock(&busy) = Some((Instant::now(), what));
            // What frees or unmaps would wait for a kernel that stays.
            let residents = lane.iter().flat_map(|lane| lane.residents());
            let held: Vec<_> = residents.map(resident::Resident::hold).collect();
            let result = work(devices);
            drop(held);
            drop(lane);
            *lock(&busy) = None;
            done(result);
        });
    }

    /// As [`Self::submit`], for what neither frees nor unmaps: kernels that stay do not notice.
    fn look<R>(
        &self,
        what: &'static str,
        work: impl FnOnce() -> R + Send + 'static,
        done: impl FnOnce(R) + Send + 'static,
    ) {
        let busy = Arc::clone(&self.busy);
        self.thread.run(move |_| {
            *lock(&busy) = Some((Instant::now(), what));
            let result = work();
            *lock(&busy) = None;
            done(result);
        });
    }

    /// Has the CUDA thread read how many calls each rank has begun in an epoch whose lane is still there, in rank order and
    /// modulo 2^32. `done` is told none if that cannot be read. Whether there is a lane, and so an answer.
    pub(crate) fn count_calls(
        &self,
        epoch: u64,
        done: impl FnOnce(Option<Vec<u32>>) + Send + 'static,
    ) -> bool {
        let session = self
            .epoch_of(epoch)
            .and_then(|epoch| epoch.sessions.first());
        let Some(lane) = session.and_then(|session| self.lanes_of.get(session)) else {
            return false;
        };
        let lane = Arc::clone(lane);
        self.look(
            "counting the ranks' calls",
            move || {
                let calls = lane.newest_calls();
                if let Err(error) = &calls {
                    tracing::warn!(%error, "cannot read how many calls the ranks have made");
                }
                calls.ok()
            },
            done,
        );
        true
    }

    /// What the CUDA thread has been at for longer than the configured time, if it has.
    pub(crate) fn stuck_in(&self) -> Option<&'static str> {
        let limit = crate::config::ms(self.config.setup_timeout_ms);
        let busy = *lock(&self.busy);
        busy.and_then(|(since, what)| (since.elapsed() > limit).then_some(what))
    }

    /// Whether somebody has to come back and look.
    pub(crate) fn is_active(&self) -> bool {
        !self.deferred.is_empty()
            || self.launches < self.accepted
            || self.lanes.iter().any(|lane| !lane.is_idle())
            || self.thread.is_busy()
    }

    pub(crate) fn regions(&self) -> Regions {
        Regions {
            world_size: self.world_size.get(),
            island_size: default_island_size(self.world_size),
            push_slot_bytes: self.config.push_slot_bytes,
            inband_part_bytes: self.config.inband_part_bytes,
            staging_part_bytes: self.config.staging_part_bytes,
        }
    }

    pub(crate) fn keep_window(&mut self, session: u64, window: Window) {
        self.windows.insert(session, Arc::new(window));
    }

    pub(crate) fn window(&self, session: u64) -> Option<&Arc<Window>> {
        self.windows.get(&session)
    }

    /// Keeps the windows of the epoch's lane, until the last of its sessions is gone.
    pub(crate) fn keep_lane(&mut self, lane: &Arc<EpochLane>) {
        let sessions = self.epoch.iter().flat_map(|epoch| &epoch.sessions);
        for session in sessions {
            self.lanes_of.insert(*session, Arc::clone(lane));
        }
    }

    /// The kernels that stay, of the current epoch.
    pub(crate) fn lane(&self) -> Option<&Arc<EpochLane>> {
        let session = self.epoch.as_ref()?.sessions.first()?;
        self.lanes_of.get(session)
    }

    /// The session's own window of its epoch's lane.
    pub(crate) fn lane_window(&self, session: u64) -> Option<&LaneWindow> {
        let rank = self.windows.get(&session)?.rank;
        self.lanes_of.get(&session)?.windows.get(rank.as_usize())
    }

    /// Takes blocks of the GPUs for kernels that stay, for as many of `asked` as are free.
    pub(crate) fn take_blocks(
        &mut self,
        sessions: &[u64],
        asked: ResidentBlocks,
    ) -> Result<ResidentBlocks, NoStaying> {
        let windows: Vec<&Arc<Window>> = sessions
            .iter()
            .filter_map(|session| self.windows.get(session))
            .collect();
        let needs: Vec<Need> = test::gpus_of(windows.iter().copied())
            .into_iter()
            .map(|gpu| {
                let here = windows.iter().filter(|of| Arc::ptr_eq(&of.gpu, gpu));
                Need {
                    gpu_uuid: gpu.device().uuid().to_owned(),
                    ranks: u32::try_from(here.count()).unwrap_or(u32::MAX),
                }
            })
            .collect();
        let budget = self.config.resident_blocks_per_gpu.min(asked.room);
        let slots = self
            .slots
            .get_or_insert_with(|| Arc::new(BlockSlots::new(self.slots_dir.clone())));
        match slots.take(&needs, asked.blocks, budget) {
            Ok(blocks) => Ok(ResidentBlocks { blocks, ..asked }),
            Err(error) => {
                tracing::warn!(%error, "no blocks for lane resident");
                Err(match error {
                    SlotsError::Full {
                        budget,
                        free,
                        ranks,
                        ..
                    } => NoStaying::Full {
                        budget,
                        free,
                        ranks,
                    },
                    SlotsError::Io { .. } => NoStaying::NotCounted,
                })
            }
        }
    }

    /// The blocks that this communicator has taken.
    pub(crate) fn slots(&self) -> Option<&Arc<BlockSlots>> {
        self.slots.as_ref()
    }

    /// Gives the blocks back, once the kernels that have them have ended.
    pub(crate) fn give_blocks_back(&mut self) {
        self.slots = None;
    }

    /// How often somebody has to look: ranks that launch themselves fail without a word to this process.
    pub(crate) fn poll_interval(&self) -> Option<Duration> {
        let has_lane = |epoch: &Epoch| {
            let mut sessions = epoch.sessions.iter();
            sessions.any(|session| self.lanes_of.contains_key(session))
        };
        if self.is_active() {
            Some(POLL)
        } else if self.epoch.as_ref().is_some_and(has_lane) {
            Some(LANE_POLL)
        } else {
            None
        }
    }

    pub(crate) fn keep_import(
        &mut self,
        session: u64,
        memory: u64,
        import: Arc<ImportedMemory>,
        ring: Option<RingMemory>,
    ) {
        self.imports.insert((session, memory), import);
        if let Some(ring) = ring {
            self.set_ring_memory(session, ring);
            self.ring_memories.insert((session, memory), ring.number);
        }
    }

    /// Tells the kernel that stays what commands of the session's rank may name by a number.
    fn set_ring_memory(&self, session: u64, ring: RingMemory) {
        let (Some(window), Some(lane)) = (self.windows.get(&session), self.lanes_of.get(&session))
        else {
            return;
        };
        for resident in lane.residents() {
            resident.set_memory(window, ring);
        }
    }

    /// Memory of all windows.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.windows
            .values()
            .map(|window| window.len_bytes())
            .chain(
                self.lanes_of
                    .keys()
                    .filter_map(|session| Some(self.lane_window(*session)?.len_bytes())),
            )
            .sum()
    }

    /// Whether each GPU that several ranks are on is shared by MPS, by what the processes say.
    pub(crate) fn is_shared_by_mps(&self, sessions: &[u64], has_mps: &HashMap<u64, bool>) -> bool {
        self.warnings(sessions, has_mps).is_empty()
    }

    /// What keeps ranks and executor from sharing their GPUs at full speed. `has_mps`: by rank, whether its
    /// process is a client of MPS.
    pub(crate) fn warnings(&self, sessions: &[u64], has_mps: &HashMap<u64, bool>) -> Vec<String> {
        let mut warnings = Vec::new();
        let windows: Vec<(&Arc<Window>, bool)> = sessions
            .iter()
            .filter_map(|session| {
                let window = self.windows.get(session)?;
                Some((window, has_mps.get(session) == Some(&true)))
            })
            .collect();
        for gpu in test::gpus_of(windows.iter().map(|(window, _)| *window)) {
            let device = gpu.device();
            let without: Vec<String> = windows
                .iter()
                .filter(|(window, has_mps)| Arc::ptr_eq(&window.gpu, gpu) && !has_mps)
                .map(|(window, _)| window.rank.to_string())
                .collect();
            if !device.has_mps() {
                warnings.push(format!(
                    "no MPS on {device}: the kernels of this executor and of the ranks take turns, at some 140 us for each change (measured); start nvidia-cuda-mps-control -d as the user of daemon and workers, with one CUDA_MPS_PIPE_DIRECTORY for all, then restart them"
                ));
            } else if !without.is_empty() {
                warnings.push(format!(
                    "ranks {} are no clients of MPS on {device}, the executor is: their kernels take turns with its, at some 140 us for each change (measured); start the workers as the daemon's user and with its CUDA_MPS_PIPE_DIRECTORY",
                    without.join(", ")
                ));
            }
        }
        warnings
    }

    /// The tested epoch begins: what launches go to.
    pub(crate) fn begin_epoch(&mut self, number: u64, sessions: Vec<u64>) -> Result<(), GpuError> {
        let windows: Vec<Arc<Window>> = sessions
            .iter()
            .filter_map(|session| self.windows.get(session).cloned())
            .collect();
        for gpu in test::gpus_of(&windows) {
            if self
                .lanes
                .iter()
                .any(|lane| Arc::ptr_eq(&lane.site.gpu, gpu))
            {
                continue;
            }
            self.lanes.push(Lane {
                site: Site {
                    gpu: Arc::clone(gpu),
                    kernels: gpu.kernels(&self.config, Instance::of(self.world_size))?,
                },
                epoch: number,
                launched: 0,
                done: 0,
                entries_enqueued: 0,
                entries_done: 0,
                fence: None,
                released: false,
            });
        }
        self.awaited.clear();
        self.values.clear();
        self.epoch = Some(Epoch { number, sessions });
        Ok(())
    }

    /// The epoch is over. Unless it ended in peace, what is still on the GPU is to give up.
    pub(crate) fn end_epoch(&mut self, number: u64, blamed: Option<Rank>, is_orderly: bool) {
        let Some(epoch) = self.epoch.take_if(|epoch| epoch.number == number) else {
            return;
        };
        let is_idle = self.newest_done() >= self.accepted;
        if !is_orderly && !is_idle {
            self.let_go(&epoch, AbortReason::Host, blamed);
        }
        self.abort_lane(&epoch, blamed);
        self.ended = Some(epoch);
    }

    /// Nothing comes of an epoch's lane: kernels by which ranks still try it give up.
    pub(crate) fn unshare(&self, number: u64) {
        if let Some(epoch) = self.epoch_of(number) {
            self.abort_lane(epoch, None);
        }
    }

    /// Kernels that the ranks have launched, or replay later, give up.
    fn abort_lane(&self, epoch: &Epoch, blamed: Option<Rank>) {
        let abort = Abort {
            reason: AbortReason::Host,
            rank: blamed.map_or(0, Rank::get),
            epoch: epoch.number as u32,
            // Which one it hits is not known here.
            sequence: 0,
        };
        for session in &epoch.sessions {
            if let Some(window) = self.lane_window(*session)
                && let Err(error) = window.abort(abort)
            {
                tracing::warn!(%error, "cannot tell a rank's kernels that the epoch is over");
            }
        }
        let sessions = epoch.sessions.first();
        let lane = sessions.and_then(|session| self.lanes_of.get(session));
        for resident in lane.iter().flat_map(|lane| lane.residents()) {
            resident.end();
        }
    }

    /// The ended or current epoch of this number.
    fn epoch_of(&self, number: u64) -> Option<&Epoch> {
        let epochs = self.epoch.iter().chain(&self.ended);
        epochs.into_iter().find(|epoch| epoch.number == number)
    }

    /// Finds out, on the CUDA thread, whose streams have not got to what the GPU waits for.
    pub(crate) fn ask_who_is_late(
        &self,
        stuck: &Stuck,
        done: impl FnOnce(Vec<Rank>) + Send + 'static,
    ) {
        let sessions = self
            .epoch_of(stuck.epoch)
            .map(|epoch| epoch.sessions.clone());
        let awaited: Vec<(Arc<Window>, u32, u32)> = self
            .awaited
            .iter()
            .filter(|((session, _), _)| {
                sessions
                    .as_ref()
                    .is_some_and(|sessions| sessions.contains(session))
            })
            .filter_map(|((session, stream), value)| {
                let window = self.windows.get(session)?;
                Some((Arc::clone(window), *stream, *value))
            })
            .collect();
        self.submit(
            "asking whose stream is late",
            move |_| {
                let mut late: Vec<Rank> = awaited
                    .iter()
                    // A flag that cannot be read says nothing about its rank.
                    .filter(|(window, stream, value)| {
                        window.has_reached(*stream, *value) == Ok(false)
                    })
                    .map(|(window, _, _)| window.rank)
                    .collect();
                late.sort();
                late.dedup();
                late
            },
            done,
        );
    }

    /// Lets go what holds up the GPUs in an epoch, because of these ranks.
    pub(crate) fn let_go_late(&self, number: u64, late: &[Rank]) {
        if let Some(epoch) = self.epoch_of(number) {
            self.let_go(epoch, AbortReason::Timeout, late.first().copied());
        }
    }

    /// Has kernels of the epoch give up, and lets go the GPUs that wait for a rank's stream: the word that
    /// says so goes first, so a kernel that starts then gives up too.
    fn let_go(&self, epoch: &Epoch, reason: AbortReason, blamed: Option<Rank>) {
        let abort = Abort {
            reason,
            rank: blamed.map_or(0, Rank::get),
            epoch: epoch.number as u32,
            // Which one it hits is not known here.
            sequence: 0,
        };
        let windows = epoch.sessions.iter().filter_map(|session| {
            let window = self.windows.get(session)?;
            Some((*session, window))
        });
        for (_, window) in windows.clone() {
            if let Err(error) = window.abort(abort) {
                tracing::warn!(%error, "cannot tell the GPU that the epoch is over");
            }
        }
        for (session, window) in windows {
            for ((_, stream), value) in self.awaited.iter().filter(|((of, _), _)| *of == session) {
                if let Err(error) = window.let_go(*stream, *value) {
                    tracing::warn!(%error, "cannot let a stream go");
                }
            }
        }
    }

    /// Says that sequences are done, once the GPU is through with what was launched so far.
    pub(crate) fn done_later(&mut self, session: u64, sequence: u64) {
        self.defer(Deferred::Done { session, sequence });
    }

    /// Says that the session's epoch is over, likewise.
    pub(crate) fn ended_later(&mut self, session: u64) {
        self.defer(Deferred::Ended(session));
    }

    /// Unmaps a memory, likewise.
    pub(crate) fn forget_memory(&mut self, session: u64, memory: u64, freed: Option<Freed>) {
        let imports = self.imports.remove(&(session, memory));
        if let Some(number) = self.ring_memories.remove(&(session, memory)) {
            // Before it is unmapped, for which the kernel parks.
            let gone = RingMemory {
                number,
                start: 0,
                len_bytes: 0,
            };
            self.set_ring_memory(session, gone);
        }
        let garbage = Garbage {
            imports: imports.into_iter().collect(),
            ..Garbage::default()
        };
        self.defer(Deferred::Free(garbage, freed));
    }

    /// Frees everything of a session, likewise. Until then it can be let go.
    pub(crate) fn forget(&mut self, session: u64, freed: Option<Freed>) {
        let memories: Vec<_> = self.imports.keys().copied().collect();
        let garbage = Garbage {
            imports: memories
                .into_iter()
                .filter(|(owner, _)| *owner == session)
                .filter_map(|key| self.imports.remove(&key))
                .collect(),
            window: None,
            lane: None,
        };
        self.defer(Deferred::FreeSession(session, garbage, freed));
    }

    /// Frees what came to nothing. On the CUDA thread: freeing may wait for the GPU.
    pub(crate) fn discard(&self, window: Option<Window>, import: Option<Arc<ImportedMemory>>) {
        let garbage = Garbage {
            imports: import.into_iter().collect(),
            window: window.map(Arc::new),
            lane: None,
        };
        self.free(garbage, None);
    }

    /// Frees a lane's windows that came too late.
    pub(crate) fn discard_lane(&self, lane: Arc<EpochLane>) {
        let garbage = Garbage {
            lane: Some(lane),
            ..Garbage::default()
        };
        self.free(garbage, None);
    }

    fn free(&self, garbage: Garbage, freed: Option<Freed>) {
        self.submit(
            "freeing GPU memory",
            move |_| garbage.free(),
            move |()| {
                if let Some(freed) = freed {
                    freed();
                }
            },
        );
    }

    fn defer(&mut self, what: Deferred) {
        if self.deferred.is_empty() && self.newest_done() >= self.accepted {
            self.carry_out(what);
        } else {
            self.deferred.push_back((self.accepted, what));
        }
    }

    fn carry_out(&mut self, what: Deferred) {
        match what {
            Deferred::Done { session, sequence } => {
                if let Some(window) = self.windows.get(&session) {
                    window.control.set_done(sequence);
                }
            }
            Deferred::Ended(session) => {
                if let Some(window) = self.windows.get(&session) {
                    window.control.set_ended();
                }
            }
            Deferred::Free(garbage, freed) => self.free(garbage, freed),
            Deferred::FreeSession(session, mut garbage, freed) => {
                garbage.window = self.windows.remove(&session);
                garbage.lane = self.lanes_of.remove(&session);
                self.awaited.retain(|(owner, _), _| *owner != session);
                self.ring_memories.retain(|(owner, _), _| *owner != session);
                self.values.retain(|(owner, _), _| *owner != session);
                self.free(garbage, freed);
            }
        }
    }

    /// The launch up to which everything is known to be done on every GPU.
    fn newest_done(&self) -> u64 {
        let behind = self.lanes.iter().filter(|lane| lane.done < lane.launched);
        behind.map(|lane| lane.done).min().unwrap_or(self.launches)
    }

    /// Looks at the GPUs, and carries out what waited for them. Waits for nothing.
    #[allow(unsafe_code)] // room: CUDA bindings
    pub(crate) fn poll(&mut self) -> Result<(), GpuTrouble> {
        let lost = |error: CudaError| GpuTrouble::Lost {
            rank: None,
            reason: format!("the GPU failed: {error}"),
        };
        let mut trouble = None;
        for lane in &mut self.lanes {
            if let Some(Fence {
                launch,
                entries,
                since,
            }) = lane.fence
            {
                if lane.site.gpu.fence.is_done().map_err(lost)? {
                    lane.done = launch;
                    lane.entries_done = entries;
                    lane.fence = None;
                    lane.released = false;
                } else if since.elapsed() > self.longest_timeout + GPU_GRACE {
                    let stuck = Stuck {
                        epoch: lane.epoch,
                        device: lane.site.gpu.device().to_string(),
                        limit_ms: (self.longest_timeout + GPU_GRACE).as_millis(),
                    };
                    // Once, whoever holds it up is let go; should that not help, nothing of ours will.
                    trouble = Some(if lane.released {
                        GpuTrouble::Lost {
                            rank: None,
                            reason: stuck.reason(&[]),
                        }
                    } else {
                        GpuTrouble::Stuck(stuck)
                    });
                    lane.released = true;
                    lane.fence = Some(Fence {
                        launch,
                        entries,
                        since: Instant::now(),
                    });
                }
            }
            if lane.fence.is_none() && !lane.is_idle() {
                // SAFETY: the stream is the GPU's own, of the fence's context.
                unsafe {
                    lane.site
                        .gpu
                        .fence
                        .record_on(lane.site.gpu.stream.raw().cast())
                }
                .map_err(lost)?;
                lane.fence = Some(Fence {
                    launch: lane.launched,
                    entries: lane.entries_enqueued,
                    since: Instant::now(),
                });
            }
        }
        let done = self.newest_done();
        if done >= self.accepted {
            self.longest_timeout = Duration::ZERO;
        }
        // By session, the newest: saying each would wake the rank each time.
        let mut sequences: HashMap<u64, u64> = HashMap::new();
        while let Some((launch, _)) = self.deferred.front()
            && *launch <= done
            && let Some((_, what)) = self.deferred.pop_front()
        {
            match what {
                Deferred::Done { session, sequence } => {
                    sequences.insert(session, sequence);
                }
                Deferred::Ended(_) | Deferred::Free(..) | Deferred::FreeSession(..) => {
                    self.carry_out(what);
                }
            }
        }
        for (session, sequence) in sequences {
            self.carry_out(Deferred::Done { session, sequence });
        }
        if let Some(trouble) = trouble {
            return Err(trouble);
        }
        self.launch_accepted()?;
        self.check_status()
    }

    /// Whether a kernel of the epoch has given up.
    fn check_status(&self) -> Result<(), GpuTrouble> {
        let residents = self.lane().into_iter().flat_map(|lane| lane.residents());
        if let Some(reason) = residents.filter_map(resident::Resident::failure).next() {
            return Err(GpuTrouble::Lost { rank: None, reason });
        }
        let Some(epoch) = &self.epoch else {
            return Ok(());
        };
        for session in &epoch.sessions {
            let status = self
                .windows
                .get(session)
                .and_then(|window| window.control.status());
            if let Some(abort) = status {
                return Err(GpuTrouble::Aborted {
                    epoch: epoch.number,
                    rank: self.world_size.rank(abort.rank).ok(),
                    reason: abort.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Promises to launch a reduction: from here on nobody frees what it uses, even if its buffers are given
    /// back before it is launched. Refused if a kernel of the epoch has given up, or a rank miscounts.
    pub(crate) fn accept(
        &mut self,
        launch: Launch,
        fault: Option<Fault>,
    ) -> Result<(), GpuTrouble> {
        self.check_status()?;
        let epoch = self.epoch.as_ref().map_or(0, |epoch| epoch.number);
        for rank in &launch.ranks {
            let Some(ticket) = rank.ticket else { continue };
            let key = (rank.session, ticket.stream);
            let is_newer = |last: &u32| (ticket.value.wrapping_sub(*last) as i32) > 0;
            if !self.values.get(&key).is_none_or(is_newer) {
                return Err(GpuTrouble::Aborted {
                    epoch,
                    rank: Some(rank.rank),
                    reason: format!(
                        "rank {} counts back on its stream {}: {}",
                        rank.rank,
                        ticket.stream + 1,
                        ticket.value
                    ),
                });
            }
        }
        let parts = launch.ranks.iter().map(|rank| self.part(rank));
        let parts = parts.collect::<Result<Vec<_>, _>>().map_err(not_enqueued)?;
        let work = Work::new(launch.plan, launch.signature, parts).map_err(not_enqueued)?;
        for rank in &launch.ranks {
            let Some(ticket) = rank.ticket else { continue };
            let key = (rank.session, ticket.stream);
            self.values.insert(key, ticket.value);
            if ticket.wait_ready {
                self.awaited.insert(key, ticket.value);
            }
        }
        self.accepted += 1;
        self.longest_timeout = self.longest_timeout.max(launch.timeout);
        self.queue.push_back(Accepted::new(work, fault));
        Ok(())
    }

    /// Whether something accepted is still to be launched.
    pub(crate) fn is_launching(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Enqueues what was accepted, as far as the GPUs' queues have room; [`Self::poll`] goes on with the rest.
    pub(crate) fn launch_accepted(&mut self) -> Result<(), GpuTrouble> {
        let epoch = self.epoch.as_ref().map(|epoch| epoch.number);
        while let Some(next) = self.queue.front_mut() {
            if !next.advance(&mut self.lanes).map_err(not_enqueued)? {
                break;
            }
            self.launches += 1;
            for lane in &mut self.lanes {
                if next.is_on(lane) {
                    lane.launched = self.launches;
                    lane.epoch = epoch.unwrap_or(lane.epoch);
                }
            }
            self.queue.pop_front();
        }
        Ok(())
    }

    fn part(&self, rank: &RankLaunch) -> Result<Part, GpuError> {
        let missing = |what: &str| GpuError::NotMapped(format!("rank {}: {what}", rank.rank));
        let window = self
            .windows
            .get(&rank.session)
            .ok_or_else(|| missing("its window"))?;
        let address = |place: Place| {
            if place.memory == ARENA {
                return Some(window.arena_start() + place.offset_bytes);
            }
            let import = self.imports.get(&(rank.session, place.memory))?;
            Some(import.start() + place.offset_bytes)
        };
        Ok(Part {
            src: address(rank.src).ok_or_else(|| missing("its source"))?,
            dst: address(rank.dst).ok_or_else(|| missing("its destination"))?,
            window: Arc::clone(window),
            ticket: rank.ticket,
        })
    }
}

fn not_enqueued(error: GpuError) -> GpuTrouble {
    GpuTrouble::Lost {
        rank: None,
        reason: format!("the reduction could not be enqueued: {error}"),
    }
}
