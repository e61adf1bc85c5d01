//! The kernels on a GPU: a loaded image, and launches of it.
//!
//! Owns the module and its functions. The executor loads what its build or NVRTC made; a rank of the lane
//! `delegated` loads the image that its executor hands it. Refuses a launch with more blocks than the GPU holds at
//! once, since they wait for each other.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::cuda::{Context, CudaError, DevicePtr, Entered, check};
use crate::kernel::{
    Call, GateLaunch, Instance, Launch, REDUCE_COPIED_THREADS, ReduceCopied, ResidentLaunch,
    RingLaunch, SERVICE_THREADS, algorithm_name, dtype_name,
};
use crate::{Algorithm, Dtype};
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

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

/// The kernels of one instance, in one context.
#[derive(Debug)]
pub struct Kernels {
    instance: Instance,
    /// By algorithm and dtype, in the order of the wire enums.
    functions: [[Option<sys::CUfunction>; DTYPES]; ALGORITHMS],
    /// By dtype: reduces tensors that are all on the GPU.
    reduce_copied: [Option<sys::CUfunction>; DTYPES],
    resident_blocks: u32,
    /// The kernel that stays, and blocks of its largest size that the GPU holds at once.
    resident: (sys::CUfunction, u32),
    ring: sys::CUfunction,
    gate: sys::CUfunction,
    pause: sys::CUfunction,
    has_programmatic_launch: bool,
    _module: Module,
}

// SAFETY: functions are handles of the module, which any thread may launch.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

/// A launch that was not enqueued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The plan is to prevent this; a launch that waits for itself must never happen.
    #[error(
        "{algorithm} {dtype}, {blocks} blocks x {data_threads} threads x {ranks} ranks: there is no such kernel, or more than the {resident_blocks} blocks that are resident at once"
    )]
    NoKernel {
        /// What was asked for.
        algorithm: Algorithm,
        /// The element type.
        dtype: Dtype,
        /// Blocks of a rank.
        blocks: u32,
        /// Data threads of a block.
        data_threads: u32,
        /// Ranks of the launch.
        ranks: u32,
        /// Blocks of the largest size that the GPU holds.
        resident_blocks: u32,
    },
    /// The driver refused it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// How a launch is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Blocks of a rank.
    pub blocks: u32,
    /// Data threads of a block; a multiple of 32.
    pub data_threads: u32,
    /// Whether it may start while its predecessor on the stream drains (programmatic stream serialization), where
    /// the GPU can do that. Twice its blocks must be resident.
    pub programmatic: bool,
}

impl Kernels {
    /// Loads an image, eagerly.
    ///
    /// # Errors
    /// [`CudaError`]: the image is not for this GPU, or lacks a kernel.
    pub fn load(
        context: &Arc<Context>,
        image: &[u8],
        instance: Instance,
    ) -> Result<Self, CudaError> {
        let module = Module::load(context, image)?;
        let multiprocessors = context.device().multiprocessors()?;
        let has_programmatic_launch = context.device().compute_capability()? >= 90;
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
                let found = module.function(&name)?;
                let per_multiprocessor = occupancy(context, found, threads)?;
                resident_blocks =
                    resident_blocks.min(per_multiprocessor.saturating_mul(multiprocessors));
                *function = Some(found);
            }
        }
        let mut reduce_copied = [None; DTYPES];
        for (dtype, function) in Dtype::ALL.into_iter().zip(&mut reduce_copied) {
            let Some(dtype) = dtype_name(dtype) else {
                continue;
            };
            let found = module.function(&format!("allreduced_reduce_copied_{dtype}"))?;
            occupancy(context, found, REDUCE_COPIED_THREADS)?;
            *function = Some(found);
        }
        let resident = module.function(&format!("allreduced_resident_{}", instance.name()))?;
        let ring = module.function("allreduced_ring")?;
        occupancy(context, ring, SERVICE_THREADS)?;
        let gate = module.function("allreduced_gate")?;
        occupancy(context, gate, SERVICE_THREADS)?;
        let pause = module.function("allreduced_pause")?;
        let stays = occupancy(context, resident, threads)?.saturating_mul(multiprocessors);
        Ok(Self {
            instance,
            functions,
            reduce_copied,
            resident_blocks,
            resident: (resident, stays),
            ring,
            gate,
            pause,
            has_programmatic_launch,
            _module: module,
        })
    }

    /// Blocks of the largest size, of the kernel that needs most, that the GPU holds at once.
    pub fn resident_blocks(&self) -> u32 {
        self.resident_blocks
    }

    /// Blocks of the resident kernel, of the largest size, that the GPU holds at once.
    pub fn staying_blocks(&self) -> u32 {
        self.resident.1
    }

    /// Enqueues the kernel that stays, for `ranks` ranks.
    ///
    /// # Safety
    /// `entered` is of the context that the kernels were loaded in, `stream` a live stream of it. Control blocks,
    /// states, windows and memories are live until the kernel has ended.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn launch_resident(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        mut launch: ResidentLaunch,
        (blocks, data_threads): (u32, u32),
        ranks: u32,
    ) -> Result<(), CudaError> {
        let mut parameters = [(&raw mut launch).cast()];
        // SAFETY: the function takes one ResidentLaunch by value, which is copied during the call; the rest is the
        // caller's.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.resident.0,
                blocks,
                ranks,
                1,
                data_threads + SERVICE_THREADS,
                1,
                1,
                0,
                stream.cast(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    /// Enqueues the kernel that rings and waits.
    ///
    /// # Safety
    /// As [`Self::launch`], for the control block, the window and the destination.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn launch_ring(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        mut ring: RingLaunch,
    ) -> Result<(), CudaError> {
        let mut parameters = [(&raw mut ring).cast()];
        // SAFETY: the function takes one RingLaunch by value, which is copied during the call; the rest is the
        // caller's.
        unsafe {
            launch_kernel(
                self.ring,
                stream,
                (1, 1),
                SERVICE_THREADS,
                self.has_programmatic_launch,
                &mut parameters,
            )
        }
    }

    /// Enqueues the kernel behind which one run of calls goes on at a time.
    ///
    /// # Safety
    /// As [`Self::launch`], for the control block, the gate, the word and the windows.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn launch_gate(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        mut gate: GateLaunch,
    ) -> Result<(), CudaError> {
        let mut parameters = [(&raw mut gate).cast()];
        // Not programmatic: what is before it on the stream has completed.
        // SAFETY: the function takes one GateLaunch by value, which is copied during the call; the rest is the
        // caller's.
        unsafe {
            launch_kernel(
                self.gate,
                stream,
                (1, 1),
                SERVICE_THREADS,
                false,
                &mut parameters,
            )
        }
    }

    /// Enqueues a kernel of one warp that takes about `ns`, for benches.
    ///
    /// # Safety
    /// `entered` is of the context that the kernels were loaded in, `stream` a live stream of it, or null.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn launch_pause(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        mut ns: u64,
    ) -> Result<(), CudaError> {
        let mut parameters = [(&raw mut ns).cast()];
        // SAFETY: the function takes one u64; the rest is the caller's.
        unsafe { launch_kernel(self.pause, stream, (1, 1), 32, false, &mut parameters) }
    }

    fn function(&self, algorithm: Algorithm, dtype: Dtype) -> Option<sys::CUfunction> {
        let mut algorithms = Algorithm::ALL.into_iter().zip(&self.functions);
        let (_, by_dtype) = algorithms.find(|(known, _)| *known == algorithm)?;
        of_dtype(by_dtype, dtype)
    }

    /// Enqueues the reduction of tensors that are all on the GPU already. It waits for no peer, so any number of blocks
    /// will do.
    ///
    /// # Safety
    /// `entered` is of the context that the kernels were loaded in, and `stream` a live stream of it. The ranges that
    /// `copied` names are live until the stream has done it; the destination is one of the sources, or apart from all.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub unsafe fn launch_reduce_copied(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        dtype: Dtype,
        mut copied: ReduceCopied,
        (blocks, threads): (u32, u32),
    ) -> Result<(), LaunchError> {
        let fits = threads <= REDUCE_COPIED_THREADS;
        let Some(function) = of_dtype(&self.reduce_copied, dtype).filter(|_| fits) else {
            return Err(LaunchError::NoKernel {
                algorithm: Algorithm::CopyEngineRing,
                dtype,
                blocks,
                data_threads: threads,
                ranks: 1,
                resident_blocks: self.resident_blocks,
            });
        };
        let mut parameters = [(&raw mut copied).cast()];
        // SAFETY: the function takes one ReduceCopied by value, which is copied during the call; the rest is the
        // caller's.
        unsafe {
            launch_kernel(
                function,
                stream,
                (blocks, 1),
                threads,
                false,
                &mut parameters,
            )
        }?;
        Ok(())
    }

    /// Enqueues one launch of `calls`: the ranks of this process on this GPU.
    ///
    /// # Safety
    /// `entered` is of the context that the kernels were loaded in, and `stream` a live stream of it, or null. Every
    /// call's control block, windows and tensors are live until the stream has done it, as the kernels' headers say.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub unsafe fn launch(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        (algorithm, dtype): (Algorithm, Dtype),
        calls: &[Call],
        shape: Shape,
    ) -> Result<(), LaunchError> {
        let Shape {
            blocks,
            data_threads,
            programmatic,
        } = shape;
        let programmatic = programmatic && self.has_programmatic_launch;
        let ranks = u32::try_from(calls.len()).unwrap_or(u32::MAX);
        let at_once = blocks.saturating_mul(ranks) << u32::from(programmatic);
        let fits =
            at_once <= self.resident_blocks && data_threads <= self.instance.max_data_threads();
        let Some(function) = self.function(algorithm, dtype).filter(|_| fits) else {
            return Err(LaunchError::NoKernel {
                algorithm,
                dtype,
                blocks,
                data_threads,
                ranks,
                resident_blocks: self.resident_blocks,
            });
        };
        let mut launch = Launch::default();
        for (place, call) in launch.calls.iter_mut().zip(calls) {
            *place = *call;
        }
        let mut parameters = [(&raw mut launch).cast()];
        // SAFETY: the function takes one Launch by value, which is copied during the call; grid and block are within
        // its limits (checked above); the rest is the caller's.
        unsafe {
            launch_kernel(
                function,
                stream,
                (blocks, ranks),
                data_threads + SERVICE_THREADS,
                programmatic,
                &mut parameters,
            )
        }?;
        Ok(())
    }
}

fn of_dtype(
    functions: &[Option<sys::CUfunction>; DTYPES],
    dtype: Dtype,
) -> Option<sys::CUfunction> {
    let mut dtypes = Dtype::ALL.into_iter().zip(functions);
    *dtypes.find(|(known, _)| *known == dtype)?.1
}

/// Enqueues a kernel; `programmatic` as in [`Shape`].
///
/// # Safety
/// As cuLaunchKernelEx.
unsafe fn launch_kernel(
    function: sys::CUfunction,
    stream: *mut c_void,
    (blocks, ranks): (u32, u32),
    threads: u32,
    programmatic: bool,
    parameters: &mut [*mut c_void],
) -> Result<(), CudaError> {
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: ranks,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream.cast(),
        attrs: &raw mut attribute,
        numAttrs: u32::from(programmatic),
    };
    // SAFETY: the attribute is copied during the call; the rest is the caller's.
    check("cuLaunchKernelEx", unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            function,
            parameters.as_mut_ptr(),
            ptr::null_mut(),
        )
    })
}

/// Also has the driver load the function now: at its first launch, that would block behind kernels that wait for
/// their peers.
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

/// A copy of [`ProbeKernels`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeCopy {
    /// To where; aligned to 16 bytes.
    pub dst: DevicePtr,
    /// From where; aligned to 16 bytes.
    pub src: DevicePtr,
    /// Units of 16 bytes.
    pub packs: u64,
    /// How often, within the launch.
    pub passes: u32,
    /// Blocks of 512 threads.
    pub blocks: u32,
}

/// One role of a flag's round trips.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeFlag {
    /// The word that this role polls, 8 bytes, zero before.
    pub mine: DevicePtr,
    /// The word that it writes: what the other role polls.
    pub peers: DevicePtr,
    /// Two u64 for {rounds done, nanoseconds of all but the first}.
    pub result: DevicePtr,
    /// Round trips.
    pub rounds: u32,
    /// Whether this role answers, instead of asking.
    pub answers: bool,
    /// After which it ends whatever happened.
    pub limit_ns: u64,
}

/// The kernels of `allreduced probe`, in one context (kernels/cuda/probe.cuh).
#[derive(Debug)]
pub struct ProbeKernels {
    copy: sys::CUfunction,
    flag: sys::CUfunction,
    _module: Module,
}

impl ProbeKernels {
    /// Loads an image, eagerly.
    ///
    /// # Errors
    /// [`CudaError`]: the image is not for this GPU, or lacks a kernel.
    pub fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        let module = Module::load(context, image)?;
        let copy = module.function("allreduced_probe_copy")?;
        let flag = module.function("allreduced_probe_flag")?;
        occupancy(context, copy, 512)?;
        occupancy(context, flag, 32)?;
        Ok(Self {
            copy,
            flag,
            _module: module,
        })
    }

    /// Enqueues a copy.
    ///
    /// # Safety
    /// `entered` is of the context that the kernels were loaded in, `stream` a live stream of it. Both ranges are mapped
    /// there, do not overlap, and are used by nothing else until the stream has done it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn launch_copy(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        mut copy: ProbeCopy,
    ) -> Result<(), CudaError> {
        let mut parameters = [
            (&raw mut copy.dst).cast(),
            (&raw mut copy.src).cast(),
            (&raw mut copy.packs).cast(),
            (&raw mut copy.passes).cast(),
        ];
        // SAFETY: the function takes three u64 and one u32, which are copied during the call; the rest is the caller's.
        unsafe {
            launch_kernel(
                self.copy,
                stream,
                (copy.blocks, 1),
                512,
                false,
                &mut parameters,
            )
        }
    }

    /// Enqueues one role of round trips. It waits for the other role, which must be able to run at the same time.
    ///
    /// # Safety
    /// As [`Self::launch_copy`], for the three places.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn launch_flag(
        &self,
        _entered: &Entered<'_>,
        stream: *mut c_void,
        mut flag: ProbeFlag,
    ) -> Result<(), CudaError> {
        let mut answers = u32::from(flag.answers);
        let mut parameters = [
            (&raw mut flag.mine).cast(),
            (&raw mut flag.peers).cast(),
            (&raw mut flag.result).cast(),
            (&raw mut flag.rounds).cast(),
            (&raw mut answers).cast(),
            (&raw mut flag.limit_ns).cast(),
        ];
        // SAFETY: the function takes three u64, two u32 and a u64, which are copied during the call; the rest is the
        // caller's.
        unsafe { launch_kernel(self.flag, stream, (1, 1), 32, false, &mut parameters) }
    }
}
