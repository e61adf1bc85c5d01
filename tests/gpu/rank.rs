//! A rank that is a thread: its communicator, its streams, and reductions that are checked.
//!
//! Owns the unsafe calls of the client: what they ask for is true by how a rank is built. Refuses to go on where
//! there is no GPU: see [`gpus`].
#![allow(unsafe_code)] // room: CUDA

use crate::cuda::copy;
use crate::harness::bits::expected;
use crate::harness::{self, watchdog_of};
use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::cuda::{Device, DeviceBuffer, StreamHandle, devices};
use allreduce_client::{
    AllReduceError, AllReduceOptions, Backend, Dtype, JoinError, JoinOptions, Lane, Op, Reduction,
};
use allreduce_contract::cuda::{Context, Event, Stream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long joining may take: a build without kernels compiles them first.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(100);

/// How long a test on a GPU may take before it counts as hung.
const HUNG: Duration = Duration::from_secs(180);

/// Bytes of a rank's scratch buffer.
pub const SCRATCH_BYTES: usize = 64 << 10;

/// The GPUs, with a watchdog over the calling test; none, said aloud, if there is none.
pub fn gpus() -> Option<(harness::Watchdog, Vec<Device>)> {
    match devices() {
        Ok(devices) if !devices.is_empty() => Some((watchdog_of(HUNG), devices)),
        Ok(_) => {
            println!("skipped: no GPU");
            None
        }
        Err(error) => {
            println!("skipped: no GPU ({error})");
            None
        }
    }
}

/// Which of the GPUs a rank uses: they are dealt out in turn.
pub fn gpu_of(devices: &[Device], rank: u32) -> &Device {
    &devices[rank as usize % devices.len()]
}

pub struct Rank {
    // Dropped before the streams: it leaves.
    pub communicator: Communicator,
    /// In the arena.
    pub scratch: DeviceBuffer,
    pub streams: [Stream; 2],
    pub context: Arc<Context>,
}

pub fn options(name: &str, rank: u32, world_size: u32, device: &Device) -> JoinOptions {
    JoinOptions::new(name, rank, world_size)
        .device(device.clone())
        .lanes([Lane::Rpc])
        .arena_len_bytes(4 << 20)
        .timeout(JOIN_TIMEOUT)
}

impl Rank {
    pub fn join(socket: &Path, options: JoinOptions, device: &Device) -> Self {
        Self::try_join(socket, options, device).unwrap()
    }

    pub fn try_join(
        socket: &Path,
        options: JoinOptions,
        device: &Device,
    ) -> Result<Self, JoinError> {
        let communicator = Client::connect(socket).unwrap().join(options)?;
        assert_eq!(communicator.backend(), Backend::Cuda);
        assert_eq!(communicator.device(), Some(device));
        let context = Context::retain(device.clone()).unwrap();
        Ok(Self {
            scratch: communicator.allocate_device(SCRATCH_BYTES).unwrap(),
            communicator,
            streams: [(); 2].map(|()| Stream::create(&context).unwrap()),
            context,
        })
    }

    pub fn stream(&self) -> &Stream {
        &self.streams[0]
    }

    /// Calls all_reduce_on.
    pub fn call(
        &self,
        stream: &Stream,
        [src, dst]: [u64; 2],
        num_elems: usize,
        (dtype, op): (Dtype, Op),
        options: AllReduceOptions,
    ) -> Result<Reduction, AllReduceError> {
        let handle = StreamHandle::from_raw(stream.raw().cast());
        // SAFETY: the stream is of the device's primary context and borrowed for the call; the tests touch
        // tensors by work on that stream only, or after having synchronised it.
        unsafe {
            self.communicator
                .all_reduce_on(handle, src, dst, num_elems, dtype, op, options)
        }
    }

    /// Makes one of the two streams wait for what the other holds.
    pub fn order(&self, event: &Event, first: usize, then: usize) {
        // SAFETY: the streams are alive, and of the event's context.
        unsafe {
            event.record_on(self.streams[first].raw().cast()).unwrap();
            event.await_on(self.streams[then].raw().cast()).unwrap();
        }
    }

    /// Has the executor map an allocation, and unmap it.
    pub fn register_and_release(&self, at: u64) {
        // SAFETY: the caller's memory is freed after the release has answered.
        let buffer = unsafe { self.communicator.register_device(at) }.unwrap();
        self.communicator.release_device(buffer).unwrap();
    }

    /// Forgets the first stream.
    pub fn close_stream(&self) -> Result<(), AllReduceError> {
        let handle = StreamHandle::from_raw(self.stream().raw().cast());
        self.communicator.close_stream(handle)
    }

    /// Writes bytes in the order of a stream.
    pub fn upload(&self, stream: &Stream, to: u64, bytes: &[u8]) {
        // SAFETY: the tests write to buffers and memory of their own, which are alive.
        unsafe { stream.upload(to, bytes) }.unwrap();
    }

    /// Copies within the GPU, in the order of a stream.
    pub fn copy(&self, stream: &Stream, to: u64, from: u64, len_bytes: usize) {
        // SAFETY: the tests copy within buffers and memory of their own, which are alive, to where nothing
        // else is under way.
        unsafe { copy(stream, to, from, len_bytes) };
    }

    /// Fills with a byte, in the order of a stream.
    pub fn fill(&self, stream: &Stream, to: u64, byte: u8, len_bytes: usize) {
        // SAFETY: as in `copy`.
        unsafe { stream.fill(to, byte, len_bytes as u64) }.unwrap();
    }

    /// Reads bytes behind everything on a stream.
    pub fn download(&self, stream: &Stream, from: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: the tests read buffers and memory of their own, which are alive.
        unsafe { stream.download(from, &mut bytes) }.unwrap();
        bytes
    }

    /// Reduces a tensor in place at an address; answers what is there then.
    pub fn reduce_at(
        &self,
        at: u64,
        (dtype, op): (Dtype, Op),
        tensor: &[u8],
    ) -> Result<Vec<u8>, AllReduceError> {
        let num_elems = tensor.len() / dtype.size_bytes();
        self.upload(self.stream(), at, tensor);
        let options = AllReduceOptions::default();
        self.call(self.stream(), [at, at], num_elems, (dtype, op), options)?;
        let result = self.download(self.stream(), at, tensor.len());
        self.communicator.check()?;
        Ok(result)
    }

    /// One rank's part of a reduction at an address, checked.
    pub fn reduce_one_at(&self, at: u64, seed: u64) -> Result<(), AllReduceError> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        let kind = (Dtype::F32, Op::Sum);
        let (tensors, sum) = expected(kind.0, kind.1, 251, seed, world_size);
        let result = self.reduce_at(at, kind, &tensors[rank as usize])?;
        assert!(result == sum, "rank {rank} of {world_size}: a wrong sum");
        Ok(())
    }

    /// One rank's part of [`reduce_well`].
    pub fn reduce_one(&self) -> Result<(), AllReduceError> {
        self.reduce_one_at(self.scratch.ptr(), 7)
    }
}

/// A rank of the async client, whose calls can be given up.
pub struct AsyncRank {
    // Dropped before the stream: it leaves.
    pub communicator: allreduce_client::Communicator,
    /// In the arena.
    scratch: DeviceBuffer,
    pub stream: Stream,
}

impl AsyncRank {
    pub async fn join(socket: &Path, options: JoinOptions, device: &Device) -> Self {
        let client = allreduce_client::Client::connect(socket).await.unwrap();
        let communicator = client.join(options).await.unwrap();
        let context = Context::retain(device.clone()).unwrap();
        Self {
            scratch: communicator.allocate_device(SCRATCH_BYTES).await.unwrap(),
            communicator,
            stream: Stream::create(&context).unwrap(),
        }
    }

    /// Writes the tensor in the order of the stream.
    pub fn upload(&self, bytes: &[u8]) {
        // SAFETY: the scratch buffer is this rank's, alive, and longer; the tests use it on this stream only, or when
        // nothing is under way.
        unsafe { self.stream.upload(self.scratch.ptr(), bytes) }.unwrap();
    }

    /// Reads the tensor behind everything on the stream.
    pub fn download(&self, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        // SAFETY: as in upload.
        unsafe { self.stream.download(self.scratch.ptr(), &mut bytes) }.unwrap();
        bytes
    }

    /// Calls all_reduce_on, in place.
    pub async fn call(
        &self,
        num_elems: usize,
        (dtype, op): (Dtype, Op),
    ) -> Result<Reduction, AllReduceError> {
        let handle = StreamHandle::from_raw(self.stream.raw().cast());
        let (at, options) = (self.scratch.ptr(), AllReduceOptions::default());
        // SAFETY: the stream is of the device's primary context and borrowed for the call; the tensor as in upload.
        unsafe {
            self.communicator
                .all_reduce_on(handle, at, at, num_elems, dtype, op, options)
        }
        .await
    }
}

/// Joins every rank, each from a thread of its own; in rank order.
pub fn join_all(socket: &Path, name: &str, world_size: u32, devices: &[Device]) -> Vec<Rank> {
    harness::ranks(world_size, |rank| {
        let device = gpu_of(devices, rank);
        Rank::join(socket, options(name, rank, world_size, device), device)
    })
}

/// Reduces over all ranks, and checks every rank's result.
pub fn reduce_well(ranks: &[Rank]) {
    on_each(ranks, |rank| rank.reduce_one().unwrap());
}

/// Does something on every rank at the same time; what they answer, in rank order.
pub fn on_each<R: Send>(ranks: &[Rank], what: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    harness::ranks(u32::try_from(ranks.len()).unwrap(), |rank| {
        what(&ranks[rank as usize])
    })
}

/// Whether an error says that the epoch is over because of a rank.
pub fn blames(error: &AllReduceError, rank: u32) -> bool {
    error.is_epoch_over()
        && match error {
            AllReduceError::EpochEnded(end) => end.rank == Some(rank),
            AllReduceError::Device(abort) => abort.rank == rank,
            AllReduceError::Timeout { missing_ranks, .. } => *missing_ranks == [rank],
            _ => false,
        }
}
