//! CUDA, as far as executor and client share it: devices by UUID, contexts, the memory that crosses a process
//! border, and flags in it that order streams of two processes.
//!
//! Owns the driver calls and their guards: every guard frees what it names, in the context it was made in.
//! Only executors and the client's `cuda` feature call it; nothing here runs unless [`Driver::get`] found a
//! usable libcuda, which is looked for at run time. Refuses to launch kernels (the executor does) and to know
//! the contract's messages.
//!
//! Contexts are the devices' primary ones, so that memory and streams of whatever framework the worker uses
//! fit. No call here synchronises a device.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::window::{CONTROL_LEN_BYTES, Control, STATUS_OFFSET_BYTES, WAKE_OFFSET_BYTES};
use cudarc::driver::sys;
use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, OnceLock};

/// A device address, in a context of this process.
pub type DevicePtr = u64;

/// Length of an IPC handle of memory, bytes.
pub const IPC_HANDLE_LEN: usize = 64;

/// Oldest driver that has every function used here, on every device: CUDA 12.0 (cuStreamBatchMemOp_v2).
const OLDEST_DRIVER: c_int = 12_000;

/// A driver call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError {
    /// The function.
    pub call: &'static str,
    /// The CUresult.
    pub code: u32,
    /// Its name, such as CUDA_ERROR_OUT_OF_MEMORY.
    pub name: String,
}

impl CudaError {
    /// Whether device memory was short.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.name, self.code)
    }
}

impl std::error::Error for CudaError {}

/// Names a result; `Ok` for success.
///
/// # Errors
/// [`CudaError`].
pub fn check(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = ptr::null();
    // SAFETY: name is a place for a pointer to a static string, null if the code is unknown; libcuda is
    // loaded, since it gave the result.
    let name = unsafe {
        sys::cuGetErrorName(result, &raw mut name);
        if name.is_null() {
            "unknown".to_owned()
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    };
    Err(CudaError {
        call,
        code: result as u32,
        name,
    })
}

/// `call!(cuFoo(args))`: calls the function and names its error. The SAFETY comment is the caller's.
macro_rules! call {
    ($function:ident ( $($argument:expr),* $(,)? )) => {
        check(stringify!($function), sys::$function($($argument),*))
    };
}

/// Why there is no CUDA here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// No driver library.
    #[error("no NVIDIA driver: libcuda.so.1 was not found")]
    NoLibrary,
    /// The driver is older than 12.0.
    #[error("the NVIDIA driver supports CUDA {}.{}, 12.0 is needed: update it", .0 / 1000, .0 % 1000 / 10)]
    TooOld(i32),
    /// The driver does not start.
    #[error("{0}")]
    Init(CudaError),
    /// No GPU to be seen.
    #[error("no GPU is visible to this process (CUDA_VISIBLE_DEVICES)")]
    NoDevice,
}

/// The driver, loaded and initialised in this process.
#[derive(Debug, Clone, Copy)]
pub struct Driver(());

impl Driver {
    /// Loads and initialises it, once for the process.
    ///
    /// # Errors
    /// [`Unavailable`].
    pub fn get() -> Result<Self, Unavailable> {
        static STATE: OnceLock<Result<(), Unavailable>> = OnceLock::new();
        STATE.get_or_init(Self::start).clone().map(|()| Self(()))
    }

    fn start() -> Result<(), Unavailable> {
        // SAFETY: looking for the library runs its initialisers, as any use of CUDA does.
        if !unsafe { sys::is_culib_present() } {
            return Err(Unavailable::NoLibrary);
        }
        let mut version = 0;
        // SAFETY: the library is there; version is a place for an int.
        unsafe { call!(cuDriverGetVersion(&raw mut version)) }.map_err(Unavailable::Init)?;
        if version < OLDEST_DRIVER {
            return Err(Unavailable::TooOld(version));
        }
        // SAFETY: the library is there; 0 is the only flag.
        match unsafe { call!(cuInit(0)) } {
            Ok(()) => Ok(()),
            Err(error) if error.code == sys::CUresult::CUDA_ERROR_NO_DEVICE as u32 => {
                Err(Unavailable::NoDevice)
            }
            Err(error) => Err(Unavailable::Init(error)),
        }
    }

    /// CUDA version that the driver supports: 1000 x major + 10 x minor.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn version(self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: version is a place for an int.
        unsafe { call!(cuDriverGetVersion(&raw mut version)) }?;
        Ok(version)
    }

    /// The devices that this process sees, in its own order.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn devices(self) -> Result<Vec<Device>, CudaError> {
        let mut count = 0;
        // SAFETY: count is a place for an int.
        unsafe { call!(cuDeviceGetCount(&raw mut count)) }?;
        (0..count)
            .map(|ordinal| Device::at(ordinal, self))
            .collect()
    }

    /// The device of the context that is current in this thread, if one is.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn current_device(self) -> Result<Option<Device>, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: context is a place for a handle.
        unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
        if context.is_null() {
            return Ok(None);
        }
        let mut raw = 0;
        // SAFETY: a context is current; raw is a place for a device.
        unsafe { call!(cuCtxGetDevice(&raw mut raw)) }?;
        Ok(self.devices()?.into_iter().find(|device| device.raw == raw))
    }
}

/// A GPU, or a MIG instance of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    raw: sys::CUdevice,
    ordinal: i32,
    uuid: String,
    name: String,
}

impl Device {
    fn at(ordinal: c_int, _driver: Driver) -> Result<Self, CudaError> {
        let mut raw = 0;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let mut name = [0_u8; 256];
        // SAFETY: the ordinal was counted; the places have the types and lengths that the calls take, and
        // cuDeviceGetName terminates what it writes.
        unsafe {
            call!(cuDeviceGet(&raw mut raw, ordinal))?;
            call!(cuDeviceGetUuid_v2(&raw mut uuid, raw))?;
            call!(cuDeviceGetName(name.as_mut_ptr().cast(), 255, raw))?;
        }
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(Self {
            raw,
            ordinal,
            uuid: uuid_text(uuid.bytes.map(|byte| byte as u8)),
            name: name.to_string_lossy().into_owned(),
        })
    }

    /// Its place in this process's order (CUDA_VISIBLE_DEVICES renumbers; another process counts differently).
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Its UUID, the same in every process: "GPU-" and 8-4-4-4-12 hexadecimal digits.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Its product name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A number that the driver knows of it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: value is a place for an int; the device is one.
        unsafe { call!(cuDeviceGetAttribute(&raw mut value, attribute, self.raw)) }?;
        Ok(value)
    }

    /// Compute capability: 10 x major + minor.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn compute_capability(&self) -> Result<i32, CudaError> {
        use sys::CUdevice_attribute as A;
        let major = self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(10 * major + minor)
    }

    /// Number of multiprocessors that this process may use.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn multiprocessors(&self) -> Result<u32, CudaError> {
        use sys::CUdevice_attribute as A;
        let count = self.attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Whether this process is a client of MPS on the device. A driver that cannot say counts as no.
    pub fn has_mps(&self) -> bool {
        use sys::CUdevice_attribute as A;
        self.attribute(A::CU_DEVICE_ATTRIBUTE_MPS_ENABLED)
            .is_ok_and(|value| value != 0)
    }

    /// Whether kernels here can address the memory of `peer`, by the driver's account.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn can_access(&self, peer: &Device) -> Result<bool, CudaError> {
        let mut value = 0;
        // SAFETY: value is a place for an int; both are devices.
        unsafe { call!(cuDeviceCanAccessPeer(&raw mut value, self.raw, peer.raw)) }?;
        Ok(value != 0)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.uuid, self.name)
    }
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.into_iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// A device's primary context, retained.
#[derive(Debug)]
pub struct Context {
    device: Device,
    raw: sys::CUcontext,
}

// SAFETY: a context may be used from any thread that makes it current, which every use here does.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the device's primary context, which makes it if there is none.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn retain(device: Device) -> Result<Arc<Self>, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: raw is a place for a handle; Drop releases what is retained.
        unsafe { call!(cuDevicePrimaryCtxRetain(&raw mut raw, device.raw)) }?;
        Ok(Arc::new(Self { device, raw }))
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The handle.
    pub fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Makes it current in this thread until the guard is dropped; then what was current before is again.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context is retained as long as self, which the guard borrows.
        unsafe { call!(cuCtxPushCurrent_v2(self.raw)) }?;
        Ok(Entered(PhantomData))
    }

    /// Lets kernels of this context address memory of `peer`. Done before is no error.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn enable_peer(&self, peer: &Context) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        // SAFETY: both contexts are retained.
        match unsafe { call!(cuCtxEnablePeerAccess(peer.raw, 0)) } {
            Err(error)
                if error.code == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as u32 =>
            {
                Ok(())
            }
            other => other,
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by this value. A failure leaves a reference behind, no more.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device.raw) };
    }
}

/// A context is current in this thread.
#[derive(Debug)]
pub struct Entered<'a>(PhantomData<(&'a Context, *const ())>);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the guard's own push is on top: guards are dropped in reverse order and stay in their
        // thread (they are not Send).
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

/// Keeps this thread's CUDA calls from disturbing a stream capture of another thread: for helper threads.
///
/// # Errors
/// [`CudaError`].
pub fn relax_capture_mode() -> Result<(), CudaError> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: mode is a place that holds the new mode and takes the old.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }
}

/// This thread's CUDA calls do not disturb a stream capture of another thread, until the guard is dropped; then
/// the thread's mode is as before.
#[derive(Debug)]
pub struct Relaxed {
    before: sys::CUstreamCaptureMode,
    // The mode is the thread's.
    _thread: PhantomData<*const ()>,
}

impl Relaxed {
    /// Relaxes this thread.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn begin() -> Result<Self, CudaError> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: mode is a place that holds the new mode and takes the old.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        Ok(Self {
            before: mode,
            _thread: PhantomData,
        })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in begin; the old mode is one that the driver gave.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

/// Device memory of this process, from cuMemAlloc (the kind that can be exported).
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    start: DevicePtr,
    len_bytes: u64,
}

impl DeviceMemory {
    /// Allocates `len_bytes` (at least 1), aligned to 256 bytes; the contents are anything.
    ///
    /// # Errors
    /// [`CudaError`], see [`CudaError::is_out_of_memory`].
    pub fn allocate(context: &Arc<Context>, len_bytes: u64) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let mut start = 0;
        let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        // SAFETY: start is a place for an address; Drop frees what is allocated.
        unsafe { call!(cuMemAlloc_v2(&raw mut start, len)) }?;
        Ok(Self {
            context: Arc::clone(context),
            start,
            len_bytes,
        })
    }

    /// Where it starts.
    pub fn start(&self) -> DevicePtr {
        self.start
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A handle by which another process can map the allocation.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn export(&self) -> Result<[u8; IPC_HANDLE_LEN], CudaError> {
        export(&self.context, self.start)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A context that cannot be entered any more is lost, and its memory with it.
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: allocated by this value in this context and freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.start) };
    }
}

/// Page-locked memory of the host, from cuMemHostAlloc, which kernels of every context of this process reach. It has
/// one address for all of them and the host: on devices with unified addressing, which all 64-bit ones have, the driver
/// maps what it allocates so.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Arc<Context>,
    start: ptr::NonNull<u8>,
    len_bytes: u64,
}

// SAFETY: an address; what is done there is the holders' to order.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `len_bytes` (at least 1), aligned to a page; the contents are anything.
    ///
    /// # Errors
    /// [`CudaError`], see [`CudaError::is_out_of_memory`].
    pub fn allocate(context: &Arc<Context>, len_bytes: u64) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let mut start = ptr::null_mut();
        let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: start is a place for an address; Drop frees what is allocated.
        unsafe { call!(cuMemHostAlloc(&raw mut start, len, flags)) }?;
        // The driver gives no null with success; were it to, that is the code for it.
        let start = ptr::NonNull::new(start.cast()).ok_or_else(|| CudaError {
            call: "cuMemHostAlloc",
            code: sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32,
            name: "no address".to_owned(),
        })?;
        Ok(Self {
            context: Arc::clone(context),
            start,
            len_bytes,
        })
    }

    /// Where it starts, for the host.
    pub fn host_start(&self) -> ptr::NonNull<u8> {
        self.start
    }

    /// Where it starts, for every GPU of this process.
    pub fn start(&self) -> DevicePtr {
        self.start.as_ptr() as u64
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: allocated by this value and freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}

/// The IPC handle of the allocation that starts at `start`.
///
/// # Errors
/// [`CudaError`].
pub fn export(context: &Context, start: DevicePtr) -> Result<[u8; IPC_HANDLE_LEN], CudaError> {
    let _entered = context.enter()?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: handle is a place for one; an address that cannot be exported is refused.
    unsafe { call!(cuIpcGetMemHandle(&raw mut handle, start)) }?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Memory of another process, mapped.
#[derive(Debug)]
pub struct ImportedMemory {
    context: Arc<Context>,
    start: DevicePtr,
    len_bytes: u64,
}

impl ImportedMemory {
    /// Maps the allocation that a handle names. A process cannot open its own, nor the same one twice in
    /// one context.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn open(context: &Arc<Context>, handle: [u8; IPC_HANDLE_LEN]) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(|byte| byte as _),
        };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let (mut start, mut base, mut len) = (0, 0, 0);
        // SAFETY: start is a place for an address, the handle is 64 bytes of which the driver checks each;
        // Drop closes what is opened.
        unsafe { call!(cuIpcOpenMemHandle_v2(&raw mut start, handle, flags)) }?;
        let mut imported = Self {
            context: Arc::clone(context),
            start,
            len_bytes: 0,
        };
        // The driver's length, not the peer's word for it.
        // SAFETY: start is mapped; the places have the types that the call takes.
        unsafe { call!(cuMemGetAddressRange_v2(&raw mut base, &raw mut len, start)) }?;
        imported.len_bytes = (len as u64).saturating_sub(start.saturating_sub(base));
        Ok(imported)
    }

    /// Where it starts.
    pub fn start(&self) -> DevicePtr {
        self.start
    }

    /// Its length, by the driver's account.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: opened by this value in this context and closed once.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.start) };
    }
}

/// The allocation around a pointer of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Where it starts.
    pub start: DevicePtr,
    /// Its length.
    pub len_bytes: u64,
    /// Differs for each allocation of the process (CU_POINTER_ATTRIBUTE_BUFFER_ID).
    pub generation: u64,
}

/// Memory that no other process can map.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotShareable {
    /// Not an address that CUDA knows.
    #[error("{0:#x} is no GPU memory: CUDA does not know the address")]
    Unknown(DevicePtr),
    /// Host memory.
    #[error("{0:#x} is host memory: copy to GPU memory, or use backend host")]
    Host(DevicePtr),
    /// cuMemAllocManaged.
    #[error(
        "{0:#x} is managed memory, which CUDA IPC cannot export: allocate with cuMemAlloc (cudaMalloc)"
    )]
    Managed(DevicePtr),
    /// cudaMallocAsync, or a memory pool.
    #[error(
        "{0:#x} is stream-ordered memory (cudaMallocAsync), which CUDA IPC cannot export: allocate with cuMemAlloc (cudaMalloc)"
    )]
    StreamOrdered(DevicePtr),
    /// cuMemCreate and cuMemMap.
    #[error(
        "{0:#x} is virtual memory (cuMemCreate; PyTorch's expandable_segments), which CUDA IPC cannot export: allocate with cuMemAlloc (cudaMalloc)"
    )]
    Virtual(DevicePtr),
    /// On another GPU.
    #[error("{pointer:#x} is on device {found}, the rank joined with device {joined}")]
    Foreign {
        /// The address.
        pointer: DevicePtr,
        /// The ordinal of its device.
        found: i32,
        /// The ordinal of the rank's device.
        joined: i32,
    },
    /// The driver says no.
    #[error("{pointer:#x} cannot be exported: {error}")]
    Refused {
        /// The address.
        pointer: DevicePtr,
        /// Its answer.
        error: CudaError,
    },
}

/// Finds the allocation around `pointer`, if other processes can map it.
///
/// # Errors
/// [`NotShareable`] says why not.
pub fn allocation_around(
    context: &Context,
    pointer: DevicePtr,
) -> Result<Allocation, NotShareable> {
    use sys::CUpointer_attribute as A;
    let refused = |error| NotShareable::Refused { pointer, error };
    let _entered = context.enter().map_err(refused)?;
    let unknown = |_| NotShareable::Unknown(pointer);
    let kind: u32 = attribute(A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer).map_err(unknown)?;
    let is_managed: u32 =
        attribute(A::CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer).map_err(unknown)?;
    if is_managed != 0 {
        return Err(NotShareable::Managed(pointer));
    }
    if kind != sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
        return Err(NotShareable::Host(pointer));
    }
    let found: i32 = attribute(A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer).map_err(refused)?;
    let joined = context.device().ordinal();
    if found != joined {
        return Err(NotShareable::Foreign {
            pointer,
            found,
            joined,
        });
    }
    let pool: u64 = attribute(A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer).unwrap_or(0);
    if pool != 0 {
        return Err(NotShareable::StreamOrdered(pointer));
    }
    let can_export: u32 =
        attribute(A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer).map_err(refused)?;
    if can_export == 0 {
        return Err(NotShareable::Virtual(pointer));
    }
    let generation = attribute(A::CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer).map_err(refused)?;
    let (mut start, mut len) = (0, 0);
    // SAFETY: the places have the types that the call takes.
    unsafe {
        call!(cuMemGetAddressRange_v2(
            &raw mut start,
            &raw mut len,
            pointer
        ))
    }
    .map_err(refused)?;
    Ok(Allocation {
        start,
        len_bytes: len as u64,
        generation,
    })
}

/// A pointer's attribute, whose size is T's.
fn attribute<T: Copy + Default>(
    attribute: sys::CUpointer_attribute,
    pointer: DevicePtr,
) -> Result<T, CudaError> {
    // Room for the largest attribute asked for.
    let mut value = [0_u64; 2];
    const { assert!(size_of::<T>() <= 16 && align_of::<T>() <= 8) };
    // SAFETY: value has room for every attribute that this module asks for; what it then holds is of the
    // attribute's type, an integer or an address, of which T is the one of its size.
    unsafe {
        call!(cuPointerGetAttribute(
            value.as_mut_ptr().cast(),
            attribute,
            pointer
        ))?;
        Ok(value.as_ptr().cast::<T>().read())
    }
}

/// A stream of this process.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: streams may be used from any thread; the driver serialises.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn create(context: &Arc<Context>) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: raw is a place for a handle; Drop destroys what is made.
        unsafe { call!(cuStreamCreate(&raw mut raw, flags)) }?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// The handle.
    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Blocks until everything enqueued is done.
    ///
    /// # Errors
    /// [`CudaError`], of earlier work too.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive as long as self.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }

    /// Whether everything enqueued is done.
    ///
    /// # Errors
    /// [`CudaError`], of earlier work too.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is alive as long as self.
        is_ready(unsafe { call!(cuStreamQuery(self.raw)) })
    }

    /// Makes the stream wait for an event's last record, also one of another GPU's; for an event that was never recorded
    /// there is nothing to wait for. A later record does not change what is waited for.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream and the event are alive; a wait may cross contexts.
        unsafe { call!(cuStreamWaitEvent(self.raw, event.raw, 0)) }
    }

    /// Begins to capture what is enqueued into a graph, instead of doing it. Until the end, calls of this process that
    /// could be captured by mistake fail in every thread (the global mode, which frameworks use).
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive as long as self.
        unsafe { call!(cuStreamBeginCapture_v2(self.raw, mode)) }
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// [`CudaError`], of what was captured too.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        let _entered = self.context.enter()?;
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the places are for handles, which are destroyed here and by Drop.
        unsafe {
            call!(cuStreamEndCapture(self.raw, &raw mut graph))?;
            let made = call!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            let _ = sys::cuGraphDestroy(graph);
            made?;
        }
        Ok(Graph {
            context: Arc::clone(&self.context),
            exec,
        })
    }

    /// Enqueues a graph.
    ///
    /// # Safety
    /// What the graph touches is alive until the stream has done it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: both are alive; the rest is the caller's.
        unsafe { call!(cuGraphLaunch(graph.exec, self.raw)) }
    }

    /// Enqueues a fill of `len_bytes` at `start` with a byte.
    ///
    /// # Safety
    /// The range is device memory of this context that nothing else uses until the stream has done it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn fill(&self, start: DevicePtr, byte: u8, len_bytes: u64) -> Result<(), CudaError> {
        if len_bytes == 0 {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the caller's.
        unsafe {
            call!(cuMemsetD8Async(
                start,
                byte,
                usize::try_from(len_bytes).unwrap_or(usize::MAX),
                self.raw
            ))
        }
    }

    /// Enqueues a copy from host memory. From pageable memory, as slices are, the driver has taken the bytes
    /// when this returns.
    ///
    /// # Safety
    /// `len` bytes at `to` are device memory of this context that nothing else uses until the stream has
    /// done it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn upload(&self, to: DevicePtr, from: &[u8]) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the slice is live for the call; the rest is the caller's.
        unsafe {
            call!(cuMemcpyHtoDAsync_v2(
                to,
                from.as_ptr().cast(),
                from.len(),
                self.raw
            ))
        }
    }

    /// Copies to host memory behind everything enqueued, and blocks until it is done.
    ///
    /// # Safety
    /// `len` bytes at `from` are device memory of this context.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn download(&self, from: DevicePtr, to: &mut [u8]) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        if !to.is_empty() {
            // SAFETY: the slice is live until the synchronisation below; the rest is the caller's.
            unsafe {
                call!(cuMemcpyDtoHAsync_v2(
                    to.as_mut_ptr().cast(),
                    from,
                    to.len(),
                    self.raw
                ))?;
            }
        }
        // SAFETY: the stream is alive as long as self.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: made by this value and destroyed once; what is enqueued still runs.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// "Not ready" is an answer, not an error.
fn is_ready(result: Result<(), CudaError>) -> Result<bool, CudaError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.code == sys::CUresult::CUDA_ERROR_NOT_READY as u32 => Ok(false),
        Err(error) => Err(error),
    }
}

/// An event without timing, of this process.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: events may be used from any thread; the driver serialises.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes one.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn create(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with_flags(
            context,
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32,
        )
    }

    /// Makes one whose records have a time.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn create_timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with_flags(context, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32)
    }

    /// Microseconds, by the GPU's clock, between `earlier`'s record and this one's; both are timed and done.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn micros_since(&self, earlier: &Event) -> Result<f64, CudaError> {
        let _entered = self.context.enter()?;
        let mut millis = 0.0;
        // SAFETY: millis is a place for one; the events are alive.
        unsafe {
            call!(cuEventElapsedTime_v2(
                &raw mut millis,
                earlier.raw,
                self.raw
            ))?;
        }
        Ok(f64::from(millis) * 1000.0)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: raw is a place for a handle; Drop destroys what is made.
        unsafe { call!(cuEventCreate(&raw mut raw, flags)) }?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Records it behind what the stream holds now.
    ///
    /// # Safety
    /// `stream` is a live stream of this event's context, or null for its legacy default stream.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn record_on(&self, stream: *mut c_void) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's; the event is alive as long as self.
        unsafe { call!(cuEventRecord(self.raw, stream.cast())) }
    }

    /// Makes a stream wait for the last record; for one that was never recorded there is nothing to wait for.
    ///
    /// # Safety
    /// As [`Self::record_on`].
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn await_on(&self, stream: *mut c_void) -> Result<(), CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller's; the event is alive as long as self.
        unsafe { call!(cuStreamWaitEvent(stream.cast(), self.raw, 0)) }
    }

    /// Whether its last record is done; so is an event that was never recorded.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event is alive as long as self.
        is_ready(unsafe { call!(cuEventQuery(self.raw)) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: made by this value and destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// A flag, 4 bytes of device memory (also another process's), and a value for it.
pub type Flag = (DevicePtr, u32);

/// Most flags of one call (the driver's limit is 256).
pub const MAX_FLAGS: usize = crate::MAX_WORLD_SIZE as usize;

/// Enqueues writes of values to flags. What the stream has done before is visible to who sees them.
///
/// # Safety
/// `stream` is a live stream of the context that is entered, or null for its legacy default stream; the flags
/// are mapped there, aligned to 4 bytes, and stay so until the stream has done it.
///
/// # Errors
/// [`CudaError`].
pub unsafe fn write_flags(
    entered: &Entered<'_>,
    stream: *mut c_void,
    flags: impl IntoIterator<Item = Flag>,
) -> Result<(), CudaError> {
    let writes = flags.into_iter().map(|(address, value)| {
        let mut operation = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
        // The union's first field is the operation in each of its forms.
        operation.writeValue.operation =
            sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
        operation.writeValue.address = address;
        operation.writeValue.__bindgen_anon_1.value = value;
        operation
    });
    // SAFETY: the caller's.
    unsafe { operate(entered, stream, writes) }
}

/// Makes a stream wait, on the GPU, until each flag holds at least its value, compared modulo 2^32.
///
/// # Safety
/// As [`write_flags`].
///
/// # Errors
/// [`CudaError`].
pub unsafe fn wait_flags(
    entered: &Entered<'_>,
    stream: *mut c_void,
    flags: impl IntoIterator<Item = Flag>,
) -> Result<(), CudaError> {
    let waits = flags.into_iter().map(|(address, value)| {
        let mut operation = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
        operation.waitValue.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32;
        operation.waitValue.address = address;
        operation.waitValue.__bindgen_anon_1.value = value;
        operation.waitValue.flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        operation
    });
    // SAFETY: the caller's.
    unsafe { operate(entered, stream, waits) }
}

/// One call for all, which costs little more than for one; at most [`MAX_FLAGS`].
unsafe fn operate(
    _entered: &Entered<'_>,
    stream: *mut c_void,
    operations: impl Iterator<Item = sys::CUstreamBatchMemOpParams>,
) -> Result<(), CudaError> {
    let mut batch = [sys::CUstreamBatchMemOpParams { pad: [0; 6] }; MAX_FLAGS];
    let mut count = 0;
    for (place, operation) in batch.iter_mut().zip(operations) {
        *place = operation;
        count += 1;
    }
    if count == 0 {
        return Ok(());
    }
    // SAFETY: the batch has at least `count` operations; the rest is the caller's.
    unsafe {
        call!(cuStreamBatchMemOp_v2(
            stream.cast(),
            count,
            batch.as_mut_ptr(),
            0
        ))
    }
}

/// Whether a stream is being captured into a graph.
///
/// # Safety
/// `stream` is a live stream of the context that is entered, or null for its legacy default stream.
///
/// # Errors
/// [`CudaError`].
pub unsafe fn is_capturing(_entered: &Entered<'_>, stream: *mut c_void) -> Result<bool, CudaError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: status is a place for one; the stream is the caller's.
    unsafe { call!(cuStreamIsCapturing(stream.cast(), &raw mut status)) }?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Whether a stream is being captured, and into which graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capturing {
    /// It is not.
    No,
    /// Into the graph of this number, which no other of the process has or had.
    Graph(u64),
    /// It is, and the driver cannot say into which.
    Unknown,
}

/// Oldest driver that has cuStreamGetCaptureInfo_v3.
const CAPTURE_INFO_DRIVER: c_int = 12_030;

/// Whether a stream is being captured into a graph, and into which.
///
/// # Safety
/// As [`is_capturing`].
///
/// # Errors
/// [`CudaError`].
pub unsafe fn capturing(
    entered: &Entered<'_>,
    stream: *mut c_void,
) -> Result<Capturing, CudaError> {
    static KNOWS: OnceLock<bool> = OnceLock::new();
    let knows = KNOWS.get_or_init(|| {
        let version = Driver::get().map(Driver::version);
        version.is_ok_and(|version| version.is_ok_and(|version| version >= CAPTURE_INFO_DRIVER))
    });
    if !knows {
        // SAFETY: the caller's.
        return Ok(match unsafe { is_capturing(entered, stream) }? {
            true => Capturing::Unknown,
            false => Capturing::No,
        });
    }
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    // SAFETY: status and id are places for one each, what is not asked for may be null; the stream is the caller's.
    unsafe {
        call!(cuStreamGetCaptureInfo_v3(
            stream.cast(),
            &raw mut status,
            &raw mut id,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut()
        ))?;
    }
    Ok(match status {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Capturing::No,
        _ => Capturing::Graph(id),
    })
}

/// Enqueues a copy within device memory.
///
/// # Safety
/// `stream` is a live stream of the context that is entered, or null; both ranges are device memory mapped there, do
/// not overlap, and are touched by nothing that is not ordered with the copy until it is done.
///
/// # Errors
/// [`CudaError`].
pub unsafe fn copy(
    _entered: &Entered<'_>,
    stream: *mut c_void,
    to: DevicePtr,
    from: DevicePtr,
    len_bytes: u64,
) -> Result<(), CudaError> {
    if len_bytes == 0 {
        return Ok(());
    }
    let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    // SAFETY: the caller's.
    unsafe { call!(cuMemcpyDtoDAsync_v2(to, from, len, stream.cast())) }
}

/// Enqueues a copy between the memories of two contexts, on a stream of the first. Where their GPUs cannot reach each
/// other, the driver takes it through host memory.
///
/// # Safety
/// `stream` is a live stream of `to`'s context, which is entered. Each range is memory of its context, they do not
/// overlap, and are touched by nothing that is not ordered with the copy until it is done.
///
/// # Errors
/// [`CudaError`].
pub unsafe fn copy_between(
    entered: &Entered<'_>,
    stream: *mut c_void,
    (to, to_context): (DevicePtr, &Context),
    (from, from_context): (DevicePtr, &Context),
    len_bytes: u64,
) -> Result<(), CudaError> {
    if to_context.raw == from_context.raw {
        // SAFETY: the caller's.
        return unsafe { copy(entered, stream, to, from, len_bytes) };
    }
    if len_bytes == 0 {
        return Ok(());
    }
    let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    // SAFETY: the caller's.
    unsafe {
        call!(cuMemcpyPeerAsync(
            to,
            to_context.raw,
            from,
            from_context.raw,
            len,
            stream.cast()
        ))
    }
}

/// Whether everything that was enqueued on a stream is done.
///
/// # Safety
/// `stream` is a live stream of the context that is entered, or null for its legacy default stream; it is not
/// being captured.
///
/// # Errors
/// [`CudaError`], of earlier work too.
pub unsafe fn is_idle(_entered: &Entered<'_>, stream: *mut c_void) -> Result<bool, CudaError> {
    // SAFETY: the caller's.
    is_ready(unsafe { call!(cuStreamQuery(stream.cast())) })
}

/// A captured graph, ready to be replayed.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: sys::CUgraphExec,
}

// SAFETY: a handle that any thread may use; the driver serialises.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: instantiated by end_capture and destroyed once; the driver waits for replays.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// A control page that kernels can store to: registered with CUDA.
#[derive(Debug)]
pub struct RegisteredPage {
    context: Arc<Context>,
    start: ptr::NonNull<u8>,
    device_start: DevicePtr,
}

// SAFETY: the address is only passed to the driver.
unsafe impl Send for RegisteredPage {}
// SAFETY: as above.
unsafe impl Sync for RegisteredPage {}

impl RegisteredPage {
    /// Registers a page.
    ///
    /// # Safety
    /// The guard is dropped before the page is unmapped, and when no kernel stores there any more.
    ///
    /// # Errors
    /// [`CudaError`].
    pub unsafe fn register(context: &Arc<Context>, control: &Control) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let start = control.page_start();
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the page is mapped, and stays so (the caller's).
        unsafe {
            call!(cuMemHostRegister_v2(
                start.as_ptr().cast(),
                CONTROL_LEN_BYTES.get(),
                flags
            ))?;
        }
        let mut page = Self {
            context: Arc::clone(context),
            start,
            device_start: 0,
        };
        // SAFETY: the page is registered; device_start is a place for an address.
        unsafe {
            call!(cuMemHostGetDevicePointer_v2(
                &raw mut page.device_start,
                start.as_ptr().cast(),
                0
            ))?;
        }
        Ok(page)
    }

    /// Device address of the wake word.
    pub fn wake(&self) -> DevicePtr {
        self.device_start + WAKE_OFFSET_BYTES as u64
    }

    /// Device address of the status word.
    pub fn status(&self) -> DevicePtr {
        self.device_start + STATUS_OFFSET_BYTES as u64
    }
}

impl Drop for RegisteredPage {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else {
            return;
        };
        // SAFETY: registered by this value, unregistered once.
        let _ = unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_written_as_nvidia_smi_does() {
        let bytes = [
            0x0f, 0x1e, 0x2d, 0x3c, 0x4b, 0x5a, 0x69, 0x78, 0x87, 0x96, 0xa5, 0xb4, 0xc3, 0xd2,
            0xe1, 0xf0,
        ];
        assert_eq!(uuid_text(bytes), "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0");
    }

    #[test]
    fn a_machine_without_cuda_says_so() {
        match Driver::get() {
            Ok(driver) => assert!(driver.version().is_ok()),
            Err(unavailable) => assert!(!unavailable.to_string().is_empty()),
        }
    }
}
