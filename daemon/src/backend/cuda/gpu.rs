//! One GPU, as the executor uses it: context, stream, kernels.
//!
//! Owns the loaded modules and their functions. Opened on the CUDA thread; launched on from the executor's
//! task. Refuses a launch with more blocks than the GPU holds at once, since they wait for each other.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::image;
use crate::communicator::GpuError;
use crate::config::CudaConfig;
use allreduce_contract::cuda::{Context, CudaError, Device, Entered, Event, Stream, check};
use allreduce_contract::kernel::{
    self, Call, Instance, Launch, SERVICE_THREADS, algorithm_name, dtype_name,
};
use allreduce_contract::{Algorithm, Dtype};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

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
    multiprocessors: u32,
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
        let multiprocessors = device.multiprocessors().map_err(failed("device"))?;
        let context = Context::retain(device).map_err(failed("context"))?;
        let stream = Stream::create(&context).map_err(failed("stream"))?;
        let side_stream = Stream::create(&context).map_err(failed("stream"))?;
        let fence = Event::create(&context).map_err(failed("event"))?;
        Ok(Arc::new(Self {
            context,
            stream,
            side_stream,
            fence,
            multiprocessors,
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

/// A loaded module.
#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

impl Module {
    fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the image is a fatbin or cubin made by NVIDIA's compilers, whose own header gives its
        // length; raw is a place for a handle; Drop unloads it.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&raw mut raw, image.as_ptr().cast())
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction, CudaError> {
        let _entered = self.context.enter()?;
        let name = CString::new(name).unwrap_or_default();
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, the name is terminated, function is a place for a handle.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, self.raw, name.as_ptr())
        })?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: loaded by this value and unloaded once; Kernels, which owns it, is dropped only when nothing
        // launched from it runs.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

const ALGORITHMS: usize = Algorithm::ALL.len();
const DTYPES: usize = Dtype::ALL.len();

/// The kernels of one instance.
#[derive(Debug)]
pub(crate) struct Kernels {
    instance: Instance,
    /// By algorithm and dtype, in the order of the wire enums.
    functions: [[Option<sys::CUfunction>; DTYPES]; ALGORITHMS],
    /// Blocks of the largest size, of the kernel that needs most, that the GPU holds at once.
    pub(crate) resident_blocks: u32,
    _module: Module,
}

// SAFETY: functions are handles of the module, which any thread may launch.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    fn load(gpu: &Gpu, config: &CudaConfig, instance: Instance) -> Result<Self, GpuError> {
        let mut reasons = Vec::new();
        if let Some(fatbin) = kernel::fatbin().filter(|_| !config.use_nvrtc) {
            match Module::load(&gpu.context, fatbin) {
                Ok(module) => return Self::of(gpu, module, instance),
                Err(error) => reasons.push(format!("the build's image: {error}")),
            }
        }
        let arch = gpu
            .device()
            .compute_capability()
            .map_err(failed("device"))?;
        let compiled = image::compile(config, arch, instance);
        match compiled.map(|cubin| Module::load(&gpu.context, &cubin)) {
            Ok(Ok(module)) => return Self::of(gpu, module, instance),
            Ok(Err(error)) => {
                // A cached one may be damaged: the next attempt compiles.
                image::forget_cached(config);
                reasons.push(format!("NVRTC's image for sm_{arch}: {error}"));
            }
            Err(error) => reasons.push(error.to_string()),
        }
        Err(GpuError::NoKernels(reasons.join("; ")))
    }

    fn of(gpu: &Gpu, module: Module, instance: Instance) -> Result<Self, GpuError> {
        let mut functions = [[None; DTYPES]; ALGORITHMS];
        let mut resident_blocks = u32::MAX;
        let threads = instance.max_data_threads() + SERVICE_THREADS;
        for (algorithm, by_dtype) in Algorithm::ALL.into_iter().zip(&mut functions) {
            let Some(algorithm) = algorithm_name(algorithm) else {
                continue;
            };
            for (dtype, function) in Dtype::ALL.into_iter().zip(by_dtype) {
                let Some(dtype) = dtype_name(dtype) else {
                    continue;
                };
                let name = format!("allreduced_{algorithm}_{dtype}_{}", instance.name());
                let found = module.function(&name).map_err(failed(name))?;
                let per_multiprocessor =
                    occupancy(&gpu.context, found, threads).map_err(failed("occupancy"))?;
                resident_blocks =
                    resident_blocks.min(per_multiprocessor.saturating_mul(gpu.multiprocessors));
                *function = Some(found);
            }
        }
        Ok(Self {
            instance,
            functions,
            resident_blocks,
            _module: module,
        })
    }

    /// Enqueues one launch of `calls` (the ranks on this GPU).
    ///
    /// # Safety
    /// `entered` is of the GPU's context. Every call's control block, windows and tensors are live until the stream has done it, as the kernels'
    /// headers say.
    ///
    /// # Errors
    /// [`GpuError`]: no such kernel, a shape that could not be resident, a driver error.
    pub(crate) unsafe fn launch(
        &self,
        gpu: &Gpu,
        _entered: &Entered<'_>,
        (algorithm, dtype): (Algorithm, Dtype),
        calls: &[Call],
        (blocks, data_threads): (u32, u32),
    ) -> Result<(), GpuError> {
        let by_algorithm = Algorithm::ALL
            .into_iter()
            .zip(&self.functions)
            .find(|(known, _)| *known == algorithm);
        let function = by_algorithm.and_then(|(_, by_dtype)| {
            let found = Dtype::ALL.into_iter().zip(by_dtype);
            found
                .filter(|(known, _)| *known == dtype)
                .find_map(|(_, function)| *function)
        });
        let ranks = u32::try_from(calls.len()).unwrap_or(u32::MAX);
        let (Some(function), true) = (
            function,
            blocks.saturating_mul(ranks) <= self.resident_blocks
                && data_threads <= self.instance.max_data_threads(),
        ) else {
            // The plan is to prevent this; a launch that waits for itself must never happen.
            return Err(GpuError::NoKernels(format!(
                "{algorithm} {dtype} {}, {blocks} x {data_threads} x {ranks}: at most {} blocks are resident",
                self.instance.name(),
                self.resident_blocks
            )));
        };
        let mut launch = Launch::default();
        for (place, call) in launch.calls.iter_mut().zip(calls) {
            *place = *call;
        }
        let mut parameters = [(&raw mut launch).cast()];
        // SAFETY: the function takes one Launch by value, which is copied during the call; grid and block are
        // within its limits (checked above); the rest is the caller's.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                ranks,
                1,
                data_threads + SERVICE_THREADS,
                1,
                1,
                0,
                gpu.stream.raw(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
        .map_err(failed("launch"))
    }
}

fn occupancy(context: &Context, function: sys::CUfunction, threads: u32) -> Result<u32, CudaError> {
    let _entered = context.enter()?;
    let mut blocks = 0;
    // SAFETY: blocks is a place for an int, function a handle of a loaded module.
    check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &raw mut blocks,
            function,
            i32::try_from(threads).unwrap_or(i32::MAX),
            0,
        )
    })?;
    Ok(u32::try_from(blocks).unwrap_or(0))
}
