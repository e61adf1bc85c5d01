//! What the tests do with the driver beside the contract's calls.
//!
//! Owns kinds of memory that CUDA IPC cannot export, a gate that holds a stream up, captures, and a kernel that wants the
//! whole GPU. Every guard frees what it names. Refuses nothing: a call that fails ends the test.
#![allow(unsafe_code)] // room: CUDA

use allreduce_contract::cuda::{Context, DeviceMemory, DevicePtr, Stream, check};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Free memory of the context's device.
pub fn free_bytes(context: &Context) -> u64 {
    let _entered = context.enter().unwrap();
    let (mut free, mut total) = (0, 0);
    // SAFETY: the places are lengths; a context is current.
    let told = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    check("cuMemGetInfo", told).unwrap();
    free as u64
}

/// Enqueues a copy within device memory.
///
/// # Safety
/// Both ranges are device memory of the stream's context, do not overlap, and nothing that is not ordered with
/// the stream uses them.
pub unsafe fn copy(stream: &Stream, to: DevicePtr, from: DevicePtr, len_bytes: usize) {
    if len_bytes == 0 {
        return;
    }
    let _entered = stream.context().enter().unwrap();
    // SAFETY: the caller's.
    let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len_bytes, stream.raw()) };
    check("cuMemcpyDtoDAsync", copied).unwrap();
}

/// A memory of some kind, freed when it is dropped.
pub struct Memory {
    pub start: DevicePtr,
    free: Option<Box<dyn FnOnce()>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(free) = self.free.take() {
            free();
        }
    }
}

impl Memory {
    /// Page-locked host memory.
    pub fn pinned(context: &Arc<Context>, len_bytes: usize) -> Self {
        let _entered = context.enter().unwrap();
        let mut start = ptr::null_mut();
        // SAFETY: start is a place for an address, which `free` frees.
        let allocated = unsafe {
            sys::cuMemHostAlloc(&raw mut start, len_bytes, sys::CU_MEMHOSTALLOC_PORTABLE)
        };
        check("cuMemHostAlloc", allocated).unwrap();
        let context = Arc::clone(context);
        Self {
            start: start as u64,
            free: Some(Box::new(move || {
                let _entered = context.enter().unwrap();
                // SAFETY: allocated above, freed once.
                check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(start) }).unwrap();
            })),
        }
    }

    /// Managed memory.
    pub fn managed(context: &Arc<Context>, len_bytes: usize) -> Self {
        let _entered = context.enter().unwrap();
        let mut start = 0;
        let flags = sys::CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: start is a place for an address, which `free` frees.
        let allocated = unsafe { sys::cuMemAllocManaged(&raw mut start, len_bytes, flags) };
        check("cuMemAllocManaged", allocated).unwrap();
        let context = Arc::clone(context);
        Self {
            start,
            free: Some(Box::new(move || {
                let _entered = context.enter().unwrap();
                // SAFETY: allocated above, freed once.
                check("cuMemFree", unsafe { sys::cuMemFree_v2(start) }).unwrap();
            })),
        }
    }

    /// Memory of the device's pool, in the order of a stream.
    pub fn stream_ordered(context: &Arc<Context>, len_bytes: usize) -> Self {
        let _entered = context.enter().unwrap();
        let stream = Stream::create(context).unwrap();
        let mut start = 0;
        // SAFETY: start is a place for an address, which `free` frees; the stream is alive.
        let allocated = unsafe { sys::cuMemAllocAsync(&raw mut start, len_bytes, stream.raw()) };
        check("cuMemAllocAsync", allocated).unwrap();
        stream.synchronize().unwrap();
        let context = Arc::clone(context);
        Self {
            start,
            free: Some(Box::new(move || {
                let _entered = context.enter().unwrap();
                // SAFETY: allocated above, freed once; the stream is alive.
                let freed = unsafe { sys::cuMemFreeAsync(start, stream.raw()) };
                check("cuMemFreeAsync", freed).unwrap();
                stream.synchronize().unwrap();
            })),
        }
    }

    /// Memory that is made, reserved and mapped by hand, as PyTorch's expandable segments are.
    pub fn mapped(context: &Arc<Context>) -> Self {
        let _entered = context.enter().unwrap();
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.device().ordinal(),
        };
        // SAFETY: plain integers, enums whose first value is 0, and a pointer that may be null.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location;
        let access = sys::CUmemAccessDesc {
            location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let (mut len_bytes, mut handle, mut start) = (0, 0, 0);
        let minimum = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the places have the types that the calls take; what is made is released below.
        unsafe {
            let told = sys::cuMemGetAllocationGranularity(
                &raw mut len_bytes,
                &raw const properties,
                minimum,
            );
            check("cuMemGetAllocationGranularity", told).unwrap();
            let made = sys::cuMemCreate(&raw mut handle, len_bytes, &raw const properties, 0);
            check("cuMemCreate", made).unwrap();
            let reserved = sys::cuMemAddressReserve(&raw mut start, len_bytes, 0, 0, 0);
            check("cuMemAddressReserve", reserved).unwrap();
            check("cuMemMap", sys::cuMemMap(start, len_bytes, 0, handle, 0)).unwrap();
            let allowed = sys::cuMemSetAccess(start, len_bytes, &raw const access, 1);
            check("cuMemSetAccess", allowed).unwrap();
        }
        let context = Arc::clone(context);
        Self {
            start,
            free: Some(Box::new(move || {
                let _entered = context.enter().unwrap();
                // SAFETY: made above, released once and in the reverse order.
                unsafe {
                    check("cuMemUnmap", sys::cuMemUnmap(start, len_bytes)).unwrap();
                    check("cuMemAddressFree", sys::cuMemAddressFree(start, len_bytes)).unwrap();
                    check("cuMemRelease", sys::cuMemRelease(handle)).unwrap();
                }
            })),
        }
    }
}

/// Holds a stream up until it is opened.
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    /// Enqueues it.
    pub fn close(stream: &Stream) -> Self {
        unsafe extern "C" fn wait(open: *mut c_void) {
            // SAFETY: made by into_raw below, for this one call.
            let open = unsafe { Arc::from_raw(open.cast_const().cast::<AtomicBool>()) };
            // Acquire: pairs with `open`; what the test did before is done.
            while !open.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        let open = Arc::new(AtomicBool::new(false));
        let own = Arc::into_raw(Arc::clone(&open));
        let _entered = stream.context().enter().unwrap();
        // SAFETY: the stream is alive; the function makes no CUDA calls and gets a count of its own.
        let enqueued =
            unsafe { sys::cuLaunchHostFunc(stream.raw(), Some(wait), own.cast_mut().cast()) };
        check("cuLaunchHostFunc", enqueued).unwrap();
        Self(open)
    }

    pub fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Drop for Gate {
    /// A test that fails shall not leave a stream that nothing moves.
    fn drop(&mut self) {
        self.open();
    }
}

/// Starts to capture a stream, as frameworks do: in the mode in which calls that disturb a capture fail.
pub fn begin_capture(stream: &Stream) {
    let _entered = stream.context().enter().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream is alive.
    let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) };
    check("cuStreamBeginCapture", begun).unwrap();
}

/// Ends the capture, which must not have been disturbed.
pub fn end_capture(stream: &Stream) {
    let _entered = stream.context().enter().unwrap();
    let mut graph = ptr::null_mut();
    // SAFETY: the stream is alive; graph is a place for a handle, which is destroyed.
    unsafe {
        let ended = sys::cuStreamEndCapture(stream.raw(), &raw mut graph);
        check("cuStreamEndCapture", ended).unwrap();
        check("cuGraphDestroy", sys::cuGraphDestroy(graph)).unwrap();
    }
}

/// A barrier over the whole grid: one thread of each block counts its block, and waits until all are counted.
const GRID_BARRIER: &std::ffi::CStr = cr#"
.version 7.0
.target sm_70
.address_size 64

.visible .entry grid_barrier(.param .u64 param_counter)
{
    .reg .pred %p<3>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<3>;

    ld.param.u64 %rd1, [param_counter];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $done;
    mov.u32 %r2, %nctaid.x;
    atom.global.add.u32 %r3, [%rd2], 1;
$wait:
    ld.volatile.global.u32 %r4, [%rd2];
    setp.lt.u32 %p2, %r4, %r2;
    @%p2 bra $wait;
$done:
    bar.sync 0;
    ret;
}
"#;

/// A cooperative kernel with as many blocks as an empty GPU holds: none of them ends before all have begun.
pub struct Cooperative {
    context: Arc<Context>,
    module: sys::CUmodule,
    function: sys::CUfunction,
    blocks: u32,
    counter: DeviceMemory,
}

const COOPERATIVE_THREADS: u32 = 1024;

impl Cooperative {
    pub fn load(context: &Arc<Context>) -> Self {
        let counter = DeviceMemory::allocate(context, 256).unwrap();
        let _entered = context.enter().unwrap();
        let (mut module, mut function, mut blocks) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the image is PTX with a terminator; the places have the types that the calls take; Drop unloads the
        // module.
        unsafe {
            let loaded = sys::cuModuleLoadData(&raw mut module, GRID_BARRIER.as_ptr().cast());
            check("cuModuleLoadData", loaded).unwrap();
            let found =
                sys::cuModuleGetFunction(&raw mut function, module, c"grid_barrier".as_ptr());
            check("cuModuleGetFunction", found).unwrap();
            // Also has the driver load the code now.
            let told = sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                function,
                COOPERATIVE_THREADS as i32,
                0,
            );
            check("cuOccupancyMaxActiveBlocksPerMultiprocessor", told).unwrap();
        }
        let blocks = u32::try_from(blocks).unwrap() * context.device().multiprocessors().unwrap();
        println!("a cooperative kernel of {blocks} blocks");
        Self {
            context: Arc::clone(context),
            module,
            function,
            blocks,
            counter,
        }
    }

    pub fn launch(&self, stream: &Stream) {
        let _entered = self.context.enter().unwrap();
        let mut counter = self.counter.start();
        let mut parameters: [*mut c_void; 1] = [(&raw mut counter).cast()];
        // SAFETY: the counter is this value's, which is dropped when the stream is idle; the function takes one address.
        unsafe {
            stream.fill(self.counter.start(), 0, 4).unwrap();
            let launched = sys::cuLaunchCooperativeKernel(
                self.function,
                self.blocks,
                1,
                1,
                COOPERATIVE_THREADS,
                1,
                1,
                0,
                stream.raw(),
                parameters.as_mut_ptr(),
            );
            check("cuLaunchCooperativeKernel", launched).unwrap();
        }
    }
}

impl Drop for Cooperative {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: loaded by this value, unloaded once.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}
