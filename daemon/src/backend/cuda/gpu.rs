//! One GPU, as the executor uses it: context, stream, kernels.
//!
//! Owns the loaded kernels. Opened on the CUDA thread; launched on from the executor's task.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::image;
use crate::communicator::GpuError;
use crate::config::CudaConfig;
use allreduce_contract::cuda::{Context, CudaError, Device, Entered, Event, Stream};
use allreduce_contract::kernel::{self, Call, Instance, ReduceCopied, ResidentLaunch};
use allreduce_contract::memory::{MemoryError, SealedMemory};
use allreduce_contract::module::{self, LaunchError, Shape};
use allreduce_contract::{Algorithm, Dtype};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A GPU that is in use.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) context: Arc<Context>,
    /// Carries every reduction, in order.
    pub(crate) stream: Stream,
    /// Carries what must not wait for reductions: abort words, flags in a rank's place, nonces.
    pub(crate) side_stream: Stream,
    /// Recorded behind reductions, to learn that they are done.
    pub(crate) fence: Event,
    /// Recorded where other GPUs' streams are to wait for this one's.
    pub(crate) milestone: Event,
    kernels: Mutex<HashMap<Instance, Arc<Kernels>>>,
}

/// Names the call that failed.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(CudaError) -> GpuError {
    let what = what.into();
    move |error| GpuError::Call { what, error }
}

impl Gpu {
    /// Opens the device.
    pub(crate) fn open(device: Device) -> Result<Arc<Self>, GpuError> {
        let context = Context::retain(device).map_err(failed("context"))?;
        let stream = Stream::create(&context).map_err(failed("stream"))?;
        let side_stream = Stream::create(&context).map_err(failed("stream"))?;
        let fence = Event::create(&context).map_err(failed("event"))?;
        let milestone = Event::create(&context).map_err(failed("event"))?;
        Ok(Arc::new(Self {
            context,
            stream,
            side_stream,
            fence,
            milestone,
            kernels: Mutex::new(HashMap::new()),
        }))
    }

    pub(crate) fn device(&self) -> &Device {
        self.context.device()
    }

    /// The kernels of an instance, loaded when first asked for.
    pub(crate) fn kernels(
        &self,
        config: &CudaConfig,
        instance: Instance,
    ) -> Result<Arc<Kernels>, GpuError> {
        // A panic while loading leaves the map without the instance, no more.
        let mut loaded = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.get(&instance) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(Kernels::load(self, config, instance)?);
        loaded.insert(instance, Arc::clone(&kernels));
        Ok(kernels)
    }
}

/// The kernels of `probe`: of the build's image, else compiled here.
pub(crate) fn probe_kernels(
    context: &Arc<Context>,
    config: &CudaConfig,
) -> Result<module::ProbeKernels, GpuError> {
    let mut reasons = Vec::new();
    if let Some(fatbin) = kernel::fatbin().filter(|_| !config.use_nvrtc) {
        match module::ProbeKernels::load(context, fatbin) {
            Ok(kernels) => return Ok(kernels),
            Err(error) => reasons.push(format!("the build's image: {error}")),
        }
    }
    let arch = context
        .device()
        .compute_capability()
        .map_err(failed("device"))?;
    // Any instance has them.
    let loaded = image::compile(config, arch, Instance::N2).and_then(|cubin| {
        let kernels = module::ProbeKernels::load(context, &cubin);
        kernels.map_err(failed(format!("NVRTC's image for sm_{arch}")))
    });
    loaded.map_err(|error| {
        reasons.push(error.to_string());
        GpuError::NoKernels(reasons.join("; "))
    })
}

/// The kernels of one instance, and the image that they were loaded from.
#[derive(Debug)]
pub(crate) struct Kernels {
    loaded: module::Kernels,
    image: Cow<'static, [u8]>,
    /// The image, for ranks that launch themselves.
    memory: OnceLock<SealedMemory>,
}

impl Kernels {
    fn load(gpu: &Gpu, config: &CudaConfig, instance: Instance) -> Result<Self, GpuError> {
        let mut reasons = Vec::new();
        let of = |loaded, image| Self {
            loaded,
            image,
            memory: OnceLock::new(),
        };
        if let Some(fatbin) = kernel::fatbin().filter(|_| !config.use_nvrtc) {
            match module::Kernels::load(&gpu.context, fatbin, instance) {
                Ok(loaded) => return Ok(of(loaded, Cow::Borrowed(fatbin))),
                Err(error) => reasons.push(format!("the build's image: {error}")),
            }
        }
        let arch = gpu
            .device()
            .compute_capability()
            .map_err(failed("device"))?;
        match image::compile(config, arch, instance) {
            Ok(cubin) => match module::Kernels::load(&gpu.context, &cubin, instance) {
                Ok(loaded) => return Ok(of(loaded, Cow::Owned(cubin))),
                Err(error) => {
                    // A cached one may be damaged: the next attempt compiles.
                    image::forget_cached(config);
                    reasons.push(format!("NVRTC's image for sm_{arch}: {error}"));
                }
            },
            Err(error) => reasons.push(error.to_string()),
        }
        Err(GpuError::NoKernels(reasons.join("; ")))
    }

    pub(crate) fn resident_blocks(&self) -> u32 {
        self.loaded.resident_blocks()
    }

    /// The image in a memory that ranks can map.
    pub(crate) fn memory(&self) -> Result<&SealedMemory, MemoryError> {
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let memory = SealedMemory::of(c"allreduced-kernels", &self.image)?;
        Ok(self.memory.get_or_init(|| memory))
    }

    /// Blocks of the resident kernel that the GPU holds at once.
    pub(crate) fn staying_blocks(&self) -> u32 {
        self.loaded.staying_blocks()
    }

    /// Enqueues the kernel that stays.
    ///
    /// # Safety
    /// That of [`module::Kernels::launch_resident`].
    ///
    /// # Errors
    /// [`CudaError`].
    pub(crate) unsafe fn launch_resident(
        &self,
        entered: &Entered<'_>,
        stream: *mut c_void,
        launch: ResidentLaunch,
        shape: (u32, u32),
        ranks: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe {
            self.loaded
                .launch_resident(entered, stream, launch, shape, ranks)
        }
    }

    /// Enqueues one launch of `calls` (the ranks on this GPU) on its stream.
    ///
    /// # Safety
    /// That of [`module::Kernels::launch`].
    ///
    /// # Errors
    /// [`GpuError`].
    pub(crate) unsafe fn launch(
        &self,
        gpu: &Gpu,
        entered: &Entered<'_>,
        kernel: (Algorithm, Dtype),
        calls: &[Call],
        (blocks, data_threads): (u32, u32),
    ) -> Result<(), GpuError> {
        let shape = Shape {
            blocks,
            data_threads,
            programmatic: false,
        };
        let stream = gpu.stream.raw().cast();
        // SAFETY: the caller's.
        unsafe { self.loaded.launch(entered, stream, kernel, calls, shape) }.map_err(not_launched)
    }

    /// Enqueues the reduction of tensors that are all on this GPU, on its stream.
    ///
    /// # Safety
    /// That of [`module::Kernels::launch_reduce_copied`].
    ///
    /// # Errors
    /// [`GpuError`].
    pub(crate) unsafe fn launch_reduce_copied(
        &self,
        gpu: &Gpu,
        entered: &Entered<'_>,
        dtype: Dtype,
        copied: ReduceCopied,
        shape: (u32, u32),
    ) -> Result<(), GpuError> {
        let stream = gpu.stream.raw().cast();
        // SAFETY: the caller's.
        unsafe {
            self.loaded
                .launch_reduce_copied(entered, stream, dtype, copied, shape)
        }
        .map_err(not_launched)
    }
}

fn not_launched(error: LaunchError) -> GpuError {
    match error {
        LaunchError::Cuda(error) => failed("launch")(error),
        LaunchError::NoKernel { .. } => GpuError::NoKernels(error.to_string()),
    }
}
