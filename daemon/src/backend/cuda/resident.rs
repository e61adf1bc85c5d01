//! The kernel that stays on a GPU and reduces whenever a rank rings (lane `resident`).
//!
//! Owns, for each GPU of an epoch, a thread that launches it: when a rank's ring finds the kernel parked it leaves the
//! number of the launch it needs in the wake word of its control page, at which the thread looks. The kernel parks by
//! itself when nobody has rung for a while, and when it is told to ([`Resident::hold`]): what frees or unmaps memory
//! would wait for it. Launches may overlap, on streams of their own: a block of the later one begins when the block in its
//! place has ended (kernels/README.md, "The resident kernel"). Refuses to know tensors.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::{Gpu, Kernels};
use crate::backend::cuda::window::Window;
use allreduce_contract::cuda::{CudaError, DeviceMemory, Stream};
use allreduce_contract::kernel::{
    ControlBlock, ResidentLaunch, ResidentRank, ResidentState, RingBuffer, STOP_ALL,
};
use nix::sys::prctl::set_timerslack;
use std::mem::offset_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long what would block behind the kernel waits for it to park. Longer, a rank rings and its peers do not.
const HOLD_LIMIT: Duration = Duration::from_millis(100);

/// How the kernel is launched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResidentShape {
    /// Of each rank.
    pub(crate) blocks: u32,
    pub(crate) data_threads: u32,
    /// After how long without a ring it parks.
    pub(crate) idle: Duration,
    /// How often the thread looks whether a rank wants it.
    pub(crate) wake_poll: Duration,
}

/// A memory that commands of a rank may name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingMemory {
    /// By this number.
    pub(crate) number: u32,
    /// Where it starts in this process; 0 if it is gone.
    pub(crate) start: u64,
    pub(crate) len_bytes: u64,
}

/// A rank on the GPU.
#[derive(Debug)]
pub(crate) struct ResidentPlace {
    pub(crate) window: Arc<Window>,
    /// The executor's control block for the rank's window of the lane.
    pub(crate) control: Arc<DeviceMemory>,
    /// Its [`ResidentState`].
    pub(crate) state: Arc<DeviceMemory>,
}

#[derive(Debug, Default)]
struct Schedule {
    launched: u32,
    /// A launch that was asked for ([`Resident::arm`]).
    armed: u32,
    /// Those who want it parked.
    holds: u32,
    ending: bool,
    /// Why there will be no launch any more.
    failure: Option<String>,
}

/// One GPU's resident kernel. Dropping it ends the kernel, and waits for that.
#[derive(Debug)]
pub(crate) struct Resident {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    gpu: Arc<Gpu>,
    kernels: Arc<Kernels>,
    shape: ResidentShape,
    places: Vec<ResidentPlace>,
    /// Launch n runs on stream n modulo 3. Two overlap: one that waits for a call's last rank, and the next.
    streams: [Stream; 3],
    schedule: Mutex<Schedule>,
}

impl Resident {
    /// Starts the thread; the kernel comes with the first ring.
    pub(crate) fn start(
        gpu: &Arc<Gpu>,
        kernels: Arc<Kernels>,
        shape: ResidentShape,
        places: Vec<ResidentPlace>,
    ) -> Result<Self, String> {
        let text = |error: CudaError| error.to_string();
        let shared = Arc::new(Shared {
            streams: [
                Stream::create(&gpu.context).map_err(text)?,
                Stream::create(&gpu.context).map_err(text)?,
                Stream::create(&gpu.context).map_err(text)?,
            ],
            gpu: Arc::clone(gpu),
            kernels,
            shape,
            places,
            schedule: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("resident".to_owned())
            .spawn(move || own.run())
            .map_err(|error| error.to_string())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Launches the kernel before anybody rings, unless it is there.
    pub(crate) fn arm(&self) {
        let mut schedule = self.shared.schedule();
        if self.shared.is_parked() {
            schedule.armed = schedule.launched + 1;
        }
    }

    /// Why the kernel cannot be launched any more, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.shared.schedule().failure.clone()
    }

    /// Has the kernel park as soon as no rank has rung; the next ring wakes it.
    pub(crate) fn disarm(&self) {
        self.shared.stop(&self.shared.schedule());
    }

    /// Parks it until the guard is dropped; rings wait meanwhile.
    pub(crate) fn hold(&self) -> Held {
        self.shared.schedule().holds += 1;
        let held = Held(Arc::clone(&self.shared));
        let deadline = Instant::now() + HOLD_LIMIT;
        let mut stopped = None;
        loop {
            {
                let schedule = self.shared.schedule();
                // Again if there is another: a call that was half taken needs the next launch, whoever holds it.
                if stopped.replace(schedule.launched) != Some(schedule.launched) {
                    self.shared.stop(&schedule);
                }
            }
            if self.shared.is_parked() || Instant::now() >= deadline {
                return held;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// How long its calls wait for peers from now on.
    pub(crate) fn set_timeout(&self, timeout: Duration) {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        for place in &self.shared.places {
            let at = place.control.start() + offset_of!(ControlBlock, timeout_ns) as u64;
            // SAFETY: the word is inside the control block; the kernel reads the old or the new.
            let set = unsafe {
                self.shared
                    .gpu
                    .side_stream
                    .upload(at, &timeout_ns.to_le_bytes())
            };
            if let Err(error) = set {
                tracing::warn!(%error, "cannot set the resident kernel's timeout");
            }
        }
    }

    /// What commands of the window's rank may name by a number from now on. A launch that is there keeps what it has
    /// found, so one that has found another is told to park.
    pub(crate) fn set_memory(&self, window: &Arc<Window>, memory: RingMemory) {
        let places = self.shared.places.iter();
        for place in places.filter(|place| Arc::ptr_eq(&place.window, window)) {
            let entry = offset_of!(ResidentState, buffers)
                + memory.number as usize * size_of::<RingBuffer>();
            let at = place.state.start() + entry as u64;
            let [start, len_bytes] = [memory.start, memory.len_bytes].map(u64::to_le_bytes);
            let bytes: Vec<u8> = start.into_iter().chain(len_bytes).collect();
            // SAFETY: the entry is inside the state (its number was checked); the kernel reads it at any time.
            if let Err(error) = unsafe { self.shared.gpu.side_stream.upload(at, &bytes) } {
                tracing::warn!(%error, "cannot tell the resident kernel of a memory");
            }
        }
        self.shared.stop(&self.shared.schedule());
    }

    /// Has it end. Waits for nothing.
    pub(crate) fn end(&self) {
        let mut schedule = self.shared.schedule();
        schedule.ending = true;
        self.shared.write_stop(STOP_ALL);
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            // It ends within a poll; a panic there has been printed.
            let _ = thread.join();
        }
        // Who waits for peers gives up by the epoch's abort words, or the deadline.
        for stream in &self.shared.streams {
            // Were the context lost, nothing would run there any more.
            let _ = stream.synchronize();
        }
    }
}

/// As long as it lives, the kernel is not launched.
#[derive(Debug)]
pub(crate) struct Held(Arc<Shared>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.schedule().holds -= 1;
    }
}

impl Shared {
    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        // Nothing can panic half way while it is held.
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_parked(&self) -> bool {
        // An error: nothing runs in a lost context.
        let is_idle = |stream: &Stream| stream.is_idle().unwrap_or(true);
        self.streams.iter().all(is_idle)
    }

    /// Tells launches so far to end as soon as no command is there. Under the schedule's lock, so that the word never
    /// goes back.
    fn stop(&self, schedule: &Schedule) {
        if !schedule.ending {
            self.write_stop(schedule.launched);
        }
    }

    fn write_stop(&self, launch: u32) {
        for place in &self.places {
            let at = place.state.start() + offset_of!(ResidentState, stop) as u64;
            let word = launch.to_le_bytes();
            // SAFETY: the word is inside the state; the kernel reads it at any time.
            if let Err(error) = unsafe { self.gpu.side_stream.upload(at, &word) } {
                tracing::warn!(%error, "cannot tell the resident kernel to end");
            }
        }
    }

    fn run(&self) {
        // Sleeps are short, and not to be rounded up. Without, the first ring of a burst waits longer.
        let _ = set_timerslack(1_000);
        loop {
            {
                let mut schedule = self.schedule();
                if schedule.ending {
                    return;
                }
                let next = schedule.launched + 1;
                let mut pages = self.places.iter().map(|place| &place.window.control);
                // Nothing else that a rank may write there.
                let is_wanted =
                    schedule.armed == next || pages.any(|page| page.wanted_launch() == next);
                // While one is there, a call that it has half taken may need the next.
                if is_wanted && (schedule.holds == 0 || !self.is_parked()) {
                    match self.launch(next) {
                        Ok(true) => schedule.launched = next,
                        // The stream's last has not ended.
                        Ok(false) => {}
                        Err(error) => {
                            let failure =
                                format!("the resident kernel cannot be launched: {error}");
                            tracing::error!("{failure}");
                            schedule.failure = Some(failure);
                            return;
                        }
                    }
                }
            }
            std::thread::sleep(self.shape.wake_poll);
        }
    }

    /// Launches number `number`, if the one before the last has ended.
    fn launch(&self, number: u32) -> Result<bool, CudaError> {
        let [first, second, third] = &self.streams;
        let stream = match number % 3 {
            0 => first,
            1 => second,
            _ => third,
        };
        if !stream.is_idle()? {
            return Ok(false);
        }
        let mut launch = ResidentLaunch {
            launch: number,
            idle_ns: u64::try_from(self.shape.idle.as_nanos()).unwrap_or(u64::MAX),
            ..ResidentLaunch::default()
        };
        for (to, place) in launch.ranks.iter_mut().zip(&self.places) {
            *to = ResidentRank {
                control: place.control.start(),
                state: place.state.start(),
            };
        }
        let entered = self.gpu.context.enter()?;
        let ranks = u32::try_from(self.places.len()).unwrap_or(0);
        // SAFETY: the stream is live and of the context that is entered; memories and windows are freed only when
        // this value is dropped, which waits for the kernel.
        unsafe {
            self.kernels.launch_resident(
                &entered,
                stream.raw().cast(),
                launch,
                (self.shape.blocks, self.shape.data_threads),
                ranks,
            )
        }?;
        Ok(true)
    }
}
