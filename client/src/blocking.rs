//! The same client for code without a runtime.
//!
//! Each value owns a current-thread runtime, driven only inside its calls, on the calling thread, and lanes that share
//! memory run on that too: no other thread of this process is woken for a reduction, which is what makes it the fastest
//! front. Do not call it from async code.

use crate::buffer::{Buffer, Element, Memory};
use crate::client::JoinOptions;
#[cfg(feature = "cuda")]
use crate::communicator::Reduction;
use crate::communicator::{AllReduceOptions, Outcome};
#[cfg(feature = "cuda")]
use crate::cuda::{Device, DeviceBuffer, StreamHandle};
use crate::error::{
    AllReduceError, BufferError, ConnectError, Failed, JoinError, Refused, StillRunning,
};
#[cfg(feature = "cuda")]
use allreduce_contract::Dtype;
use allreduce_contract::{Backend, Lane, Op};
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The node's daemon; see [`crate::Client`].
#[derive(Debug, Clone)]
pub struct Client(crate::Client);

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

impl Client {
    /// See [`crate::Client::connect`].
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(socket: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let runtime = runtime().map_err(|error| ConnectError {
            socket: socket.as_ref().to_owned(),
            reason: error.to_string(),
        })?;
        runtime.block_on(crate::Client::connect(socket)).map(Self)
    }

    /// See [`crate::Client::join`].
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn join(&self, options: JoinOptions) -> Result<Communicator, JoinError> {
        let runtime = runtime().map_err(JoinError::Thread)?;
        let communicator = runtime.block_on(self.0.join(options))?;
        Ok(Communicator {
            communicator,
            runtime,
        })
    }
}

/// A joined communicator; see [`crate::Communicator`].
#[derive(Debug)]
pub struct Communicator {
    // Dropped first: its connection belongs to the runtime.
    communicator: crate::Communicator,
    runtime: Runtime,
}

impl Communicator {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.communicator.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u32 {
        self.communicator.world_size()
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.communicator.epoch()
    }

    /// The backend in use.
    pub fn backend(&self) -> Backend {
        self.communicator.backend()
    }

    /// The lane in use.
    pub fn lane(&self) -> Lane {
        self.communicator.lane()
    }

    /// Why this lane.
    pub fn lane_reason(&self) -> &str {
        self.communicator.lane_reason()
    }

    /// See [`crate::Communicator::warnings`].
    pub fn warnings(&self) -> &[String] {
        self.communicator.warnings()
    }

    /// See [`crate::Communicator::check`].
    ///
    /// # Errors
    /// [`AllReduceError`].
    pub fn check(&self) -> Result<(), AllReduceError> {
        self.communicator.check()
    }

    /// See [`crate::Communicator::is_draining`].
    pub fn is_draining(&self) -> bool {
        self.communicator.is_draining()
    }

    /// See [`crate::Communicator::allocate`].
    ///
    /// # Errors
    /// [`BufferError`].
    pub fn allocate<T: Element>(&self, num_elems: usize) -> Result<Buffer<T>, BufferError> {
        self.runtime.block_on(self.communicator.allocate(num_elems))
    }

    /// See [`crate::Communicator::register`].
    ///
    /// # Errors
    /// [`BufferError`].
    pub fn register<T: Element>(&self, memory: Memory) -> Result<Buffer<T>, BufferError> {
        self.runtime.block_on(self.communicator.register(memory))
    }

    /// See [`crate::Communicator::all_reduce`].
    ///
    /// # Errors
    /// [`Failed`].
    pub fn all_reduce<T: Element>(
        &self,
        buffer: Buffer<T>,
        op: Op,
    ) -> Result<Buffer<T>, Box<Failed<Buffer<T>>>> {
        self.all_reduce_with(buffer, op, AllReduceOptions::default())
            .map(|(buffer, _)| buffer)
    }

    /// See [`crate::Communicator::all_reduce_with`].
    ///
    /// # Errors
    /// [`Failed`].
    pub fn all_reduce_with<T: Element>(
        &self,
        buffer: Buffer<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Outcome<Buffer<T>> {
        self.communicator
            .all_reduce_with_here(&self.runtime, buffer, op, options)
    }

    /// See [`crate::Communicator::all_reduce_into`].
    ///
    /// # Errors
    /// [`Failed`].
    pub fn all_reduce_into<T: Element>(
        &self,
        src: Buffer<T>,
        dst: Buffer<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Outcome<(Buffer<T>, Buffer<T>)> {
        self.communicator
            .all_reduce_into_here(&self.runtime, src, dst, op, options)
    }

    /// See [`crate::Communicator::wait_settled`].
    ///
    /// # Errors
    /// [`StillRunning`].
    pub fn wait_settled(&self, timeout: Duration) -> Result<(), StillRunning> {
        self.communicator.wait_settled(timeout)
    }

    /// See [`crate::Communicator::ping`].
    ///
    /// # Errors
    /// [`Refused`].
    pub fn ping(&self) -> Result<(), Refused> {
        self.runtime.block_on(self.communicator.ping())
    }

    /// See [`crate::Communicator::arm`].
    ///
    /// # Errors
    /// [`Refused`].
    pub fn arm(&self) -> Result<(), Refused> {
        self.runtime.block_on(self.communicator.arm())
    }

    /// See [`crate::Communicator::disarm`].
    ///
    /// # Errors
    /// [`Refused`].
    pub fn disarm(&self) -> Result<(), Refused> {
        self.runtime.block_on(self.communicator.disarm())
    }

    /// See [`crate::Communicator::leave`].
    pub fn leave(self) {
        self.runtime.block_on(self.communicator.leave());
    }
}

/// On backend cuda. Each method answers `WrongBackend` on backend host.
#[cfg(feature = "cuda")]
#[allow(unsafe_code)] // room: CUDA
impl Communicator {
    /// See [`crate::Communicator::device`].
    pub fn device(&self) -> Option<&Device> {
        self.communicator.device()
    }

    /// See [`crate::Communicator::allocate_device`].
    ///
    /// # Errors
    /// [`BufferError`].
    pub fn allocate_device(&self, len_bytes: usize) -> Result<DeviceBuffer, BufferError> {
        self.runtime
            .block_on(self.communicator.allocate_device(len_bytes))
    }

    /// See [`crate::Communicator::register_device`].
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// [`BufferError`].
    pub unsafe fn register_device(&self, ptr: u64) -> Result<DeviceBuffer, BufferError> {
        // SAFETY: the caller promises the same.
        let registering = unsafe { self.communicator.register_device(ptr) };
        self.runtime.block_on(registering)
    }

    /// See [`crate::Communicator::release_device`].
    ///
    /// # Errors
    /// [`BufferError`].
    pub fn release_device(&self, buffer: DeviceBuffer) -> Result<(), BufferError> {
        self.runtime
            .block_on(self.communicator.release_device(buffer))
    }

    /// See [`crate::Communicator::all_reduce_on`].
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// [`AllReduceError`].
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of a collective, in the order that NCCL has made familiar"
    )]
    pub unsafe fn all_reduce_on(
        &self,
        stream: StreamHandle,
        src: u64,
        dst: u64,
        num_elems: usize,
        dtype: Dtype,
        op: Op,
        options: AllReduceOptions,
    ) -> Result<Reduction, AllReduceError> {
        let communicator = &self.communicator;
        // SAFETY: the caller promises the same.
        let reducing =
            unsafe { communicator.all_reduce_on(stream, src, dst, num_elems, dtype, op, options) };
        self.runtime.block_on(reducing)
    }

    /// See [`crate::Communicator::close_stream`].
    ///
    /// # Errors
    /// [`AllReduceError`].
    pub fn close_stream(&self, stream: StreamHandle) -> Result<(), AllReduceError> {
        self.runtime
            .block_on(self.communicator.close_stream(stream))
    }
}
