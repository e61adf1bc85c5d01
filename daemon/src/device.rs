//! The GPU of a worker of our own: a device, a stream, tensors.
//!
//! Owns what the workers of `demo` and `bench` need on backend cuda beyond the client crate: copies to and from
//! the GPU, and waiting for a stream. Refuses to hand out addresses: a [`DeviceTensor`] is copied and reduced
//! through this module, in the order of one stream.
#![allow(unsafe_code)] // room: CUDA bindings

use allreduce_client::blocking::Communicator;
use allreduce_client::cuda::{DeviceBuffer, StreamHandle};
use allreduce_client::{AllReduceError, AllReduceOptions, BufferError, Element, Op, Reduction};
use allreduce_contract::cuda::{
    Context, CudaError, Device, Driver, Event, Graph, Stream, Unavailable,
};
use allreduce_contract::kernel::{dtype_name, op_code};
use allreduce_contract::{Backend, Dtype};
use std::marker::PhantomData;
use std::sync::Arc;

/// Why a worker cannot use its GPU.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("backend cuda: {0}")]
    Unavailable(#[from] Unavailable),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("CUDA shows no GPU {0} to this process (CUDA_VISIBLE_DEVICES)")]
    NotVisible(String),
}

/// Whether the GPU kernels reduce this.
pub(crate) fn has_kernel(dtype: Dtype, op: Op) -> bool {
    dtype_name(dtype).is_some() && op_code(op).is_some()
}

/// The device for a rank: GPUs are dealt out in turn, so that ranks share them where there are fewer. None on
/// backend host, and where no backend is asked for and there is no GPU.
pub(crate) fn of_rank(backend: Option<Backend>, rank: u32) -> Result<Option<Device>, DeviceError> {
    if backend == Some(Backend::Host) {
        return Ok(None);
    }
    let driver = match Driver::get() {
        Ok(driver) => driver,
        Err(_) if backend.is_none() => return Ok(None),
        Err(unavailable) => return Err(unavailable.into()),
    };
    let mut devices = driver.devices()?;
    if devices.is_empty() {
        return Err(Unavailable::NoDevice.into());
    }
    let index = rank as usize % devices.len();
    Ok(Some(devices.swap_remove(index)))
}

/// The device of that UUID.
pub(crate) fn of_uuid(uuid: &str) -> Result<Device, DeviceError> {
    let devices = Driver::get()?.devices()?;
    devices
        .into_iter()
        .find(|device| device.uuid() == uuid)
        .ok_or_else(|| DeviceError::NotVisible(uuid.to_owned()))
}

/// A worker's stream.
#[derive(Debug)]
pub(crate) struct WorkerStream(Stream);

impl WorkerStream {
    pub(crate) fn on(device: Device) -> Result<Self, CudaError> {
        let context: Arc<Context> = Context::retain(device)?;
        Stream::create(&context).map(Self)
    }

    fn handle(&self) -> StreamHandle {
        StreamHandle::from_raw(self.0.raw().cast())
    }

    /// What `enqueue` enqueues, as a graph.
    pub(crate) fn capture<E: From<CudaError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.0.begin_capture()?;
        let enqueued = enqueue();
        let graph = self.0.end_capture();
        enqueued?;
        Ok(graph?)
    }

    /// Replays a graph that was captured here, waits for it, and says how many microseconds it took by the GPU's clock.
    ///
    /// # Safety
    /// What the graph touches lives until this returns.
    pub(crate) unsafe fn time(&self, graph: &Graph) -> Result<f64, CudaError> {
        let start = Event::create_timed(self.0.context())?;
        let end = Event::create_timed(self.0.context())?;
        let stream = self.0.raw().cast();
        // SAFETY: the stream is live; the rest is the caller's.
        unsafe {
            start.record_on(stream)?;
            self.0.replay(graph)?;
            end.record_on(stream)?;
        }
        self.0.synchronize()?;
        end.micros_since(&start)
    }

    /// Waits until everything enqueued is done.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.0.synchronize()
    }
}

/// A tensor in the arena of a rank.
#[derive(Debug)]
pub(crate) struct DeviceTensor<T> {
    buffer: DeviceBuffer,
    num_elems: usize,
    _elements: PhantomData<T>,
}

impl<T: Element> DeviceTensor<T> {
    pub(crate) fn allocate(
        communicator: &Communicator,
        num_elems: usize,
    ) -> Result<Self, BufferError> {
        Ok(Self {
            buffer: communicator.allocate_device(num_elems * size_of::<T>())?,
            num_elems,
            _elements: PhantomData,
        })
    }

    /// Enqueues a copy of as many elements as fit.
    pub(crate) fn upload(&self, stream: &WorkerStream, from: &[T]) -> Result<(), CudaError> {
        let from = from.get(..self.num_elems).unwrap_or(from);
        // SAFETY: elements have no padding and no invalid bytes; the slice is theirs.
        let bytes =
            unsafe { std::slice::from_raw_parts(from.as_ptr().cast::<u8>(), size_of_val(from)) };
        // SAFETY: the buffer has num_elems elements (allocate), from at most as many; only this stream uses it.
        unsafe { stream.0.upload(self.buffer.ptr(), bytes) }
    }

    /// Copies as many elements as fit, behind everything enqueued.
    pub(crate) fn download(&self, stream: &WorkerStream, to: &mut [T]) -> Result<(), CudaError> {
        let count = to.len().min(self.num_elems);
        let to = to.get_mut(..count).unwrap_or_default();
        let len_bytes = size_of_val(to);
        // SAFETY: as in upload; every byte pattern is an element.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast::<u8>(), len_bytes) };
        // SAFETY: as in upload.
        unsafe { stream.0.download(self.buffer.ptr(), bytes) }
    }

    /// Enqueues its reduction, in place.
    pub(crate) fn reduce(
        &self,
        communicator: &Communicator,
        stream: &WorkerStream,
        op: Op,
        options: AllReduceOptions,
    ) -> Result<Reduction, AllReduceError> {
        let start = self.buffer.ptr();
        // SAFETY: the stream is of the primary context of the device that the rank joined with and lives as
        // long as the worker; the buffer has num_elems elements, is used on this stream alone, and is given
        // back by the communicator that made it.
        unsafe {
            communicator.all_reduce_on(
                stream.handle(),
                start,
                start,
                self.num_elems,
                T::DTYPE,
                op,
                options,
            )
        }
    }
}
