//! A rank on a GPU that speaks plain gRPC, for what the client crate would never do.
//!
//! Owns its mapping of the arena, and frees it before the executor does. As the ranks of `harness::raw`, it sends
//! no heartbeats.
#![allow(unsafe_code)] // room: CUDA

use crate::harness::SOON;
use crate::harness::raw::{Stream as Membership, attach_with, call, dial, hello, try_open};
use allreduce_contract::cuda::{
    Context, IPC_HANDLE_LEN, ImportedMemory, Stream, wait_flags, write_flags,
};
use allreduce_contract::v1::attach_request::Message as FromRank;
use allreduce_contract::v1::attach_response::Message as ToRank;
use allreduce_contract::v1::buffers_client::BuffersClient;
use allreduce_contract::v1::collectives_client::CollectivesClient;
use allreduce_contract::v1::{
    self, AllReduceRequest, AllReduceResponse, AllocateRequest, Backend, BufferRange, Dtype,
    Joined, Mapped, OpenResponse, RegionKind, ReleaseRequest,
};
use allreduce_contract::window::{FLAGS_LEN_BYTES, done_flag, ready_flag};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tonic::Status;
use tonic::transport::Channel;

/// The stream, as its calls name it: the last that can have flags.
const STREAM: u32 = 64;

/// Elements of its calls.
const NUM_ELEMS: usize = 8;

pub async fn open(socket: &Path, name: &str, world_size: u32) -> OpenResponse {
    let backend = Backend::Cuda as i32;
    try_open(socket, name, world_size, backend).await.unwrap()
}

/// A rank that is joined and has not said whether it has mapped its window.
pub struct Joining {
    pub joined: Joined,
    pub membership: Membership,
}

impl Joining {
    pub async fn start(opened: &OpenResponse, rank: u32, world_size: u32, uuid: &str) -> Self {
        let mut hello = hello(opened, rank, world_size);
        uuid.clone_into(&mut hello.device_uuid);
        let mut membership = attach_with(opened, FromRank::Hello(hello)).await.unwrap();
        let Ok(Some(ToRank::Joined(joined))) = membership.next().await else {
            panic!("the first message is not Joined");
        };
        Self { joined, membership }
    }

    pub fn mapped(&self, error: &str) {
        let error = error.to_owned();
        self.membership.send(FromRank::Mapped(Mapped { error }));
    }

    /// The status with which joining fails.
    pub async fn refusal(&mut self) -> Status {
        match self.membership.next().await {
            Err(status) => status,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// Maps the arena and answers the nonce there.
    pub fn map(&self, context: &Arc<Context>) -> (ImportedMemory, Stream) {
        let arena = self
            .joined
            .regions
            .iter()
            .find(|region| region.kind() == RegionKind::Arena)
            .unwrap();
        let shared = arena.cuda.as_ref().unwrap();
        assert_eq!(shared.device_uuid, context.device().uuid());
        let handle = handle(&shared.ipc_handle);
        let memory = ImportedMemory::open(context, handle).unwrap();
        assert!(memory.len_bytes() >= arena.len_bytes + FLAGS_LEN_BYTES);
        let stream = Stream::create(context).unwrap();
        let mut nonce = [0; 8];
        // SAFETY: the arena is mapped, as long as `memory` lives; nobody uses it before Mapped is sent.
        unsafe {
            stream.download(memory.start(), &mut nonce).unwrap();
            let nonce = u64::from_le_bytes(nonce);
            assert_eq!(nonce, self.joined.nonce);
            stream
                .upload(memory.start(), &(!nonce).to_le_bytes())
                .unwrap();
        }
        stream.synchronize().unwrap();
        (memory, stream)
    }
}

fn handle(bytes: &[u8]) -> [u8; IPC_HANDLE_LEN] {
    bytes.try_into().unwrap()
}

/// A rank that is alone in its communicator, which is Ready.
pub struct RawGpu {
    pub joined: Joined,
    pub collectives: CollectivesClient<Channel>,
    pub buffers: BuffersClient<Channel>,
    buffer_id: u64,
    /// Where the buffer is mapped here.
    start: u64,
    sequence: u64,
    /// Where its flags begin.
    flags: u64,
    value: u32,
    stream: Stream,
    _arena: ImportedMemory,
    _membership: Membership,
}

impl RawGpu {
    pub async fn alone(socket: &Path, name: &str, context: &Arc<Context>) -> Self {
        let opened = open(socket, name, 1).await;
        let mut joining = Joining::start(&opened, 0, 1, context.device().uuid()).await;
        let (arena, stream) = joining.map(context);
        joining.mapped("");
        match joining.membership.next().await {
            Ok(Some(ToRank::Ready(ready))) => assert_eq!(ready.backend(), Backend::Cuda),
            other => panic!("not Ready: {other:?}"),
        }
        let Joining { joined, membership } = joining;
        let session = joined.session;
        let channel = dial(&opened.executor_socket).await;
        let mut buffers = BuffersClient::new(channel.clone());
        let request = AllocateRequest {
            session,
            len_bytes: 4096,
        };
        let allocated = buffers.allocate(request).await.unwrap().into_inner();
        let collectives = CollectivesClient::new(channel);
        let arena_len_bytes = joined
            .regions
            .iter()
            .find(|region| region.kind() == RegionKind::Arena)
            .map_or(0, |region| region.len_bytes);
        Self {
            buffer_id: allocated.buffer_id,
            start: arena.start() + allocated.offset_bytes,
            sequence: 0,
            flags: arena.start() + arena_len_bytes,
            value: 0,
            stream,
            joined,
            collectives,
            buffers,
            _arena: arena,
            _membership: membership,
        }
    }

    /// A good call with the next sequence number, in place, behind what is on the stream.
    pub fn call(&mut self) -> AllReduceRequest {
        self.sequence += 1;
        self.value = self.value.wrapping_add(1);
        let flag = self.flags + ready_flag(STREAM - 1);
        let entered = self.stream.context().enter().unwrap();
        // SAFETY: the stream is of the context that is entered; the flag is behind the mapped arena.
        unsafe { write_flags(&entered, self.stream.raw().cast(), [(flag, self.value)]) }.unwrap();
        drop(entered);
        AllReduceRequest {
            num_elems: NUM_ELEMS as u64,
            dtype: Dtype::F32 as i32,
            event: Some(v1::Event {
                ready_value: 0,
                stream: STREAM,
                value: self.value,
                idle: false,
            }),
            ..call(&self.joined, self.sequence, self.buffer_id)
        }
    }

    pub async fn all_reduce(&self, request: AllReduceRequest) -> Result<AllReduceResponse, Status> {
        let mut collectives = self.collectives.clone();
        let answer = collectives.all_reduce(request).await?;
        Ok(answer.into_inner())
    }

    /// A reduction, from flag to flag. Alone, the sum of a number is the number, and that of a NaN the
    /// canonical one.
    pub async fn reduce_well(&mut self) {
        let mut values = [1.5_f32; NUM_ELEMS];
        values[3] = f32::from_bits(0xffff_ffff);
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        // SAFETY: the buffer is in the mapped arena and this rank's.
        unsafe { self.stream.upload(self.start, &bytes) }.unwrap();
        let request = self.call();
        self.all_reduce(request).await.unwrap();
        let mut found = vec![0; bytes.len()];
        // SAFETY: the stream is of the context that is entered; the flag and the buffer are mapped.
        unsafe {
            let entered = self.stream.context().enter().unwrap();
            let flag = self.flags + done_flag(STREAM - 1);
            wait_flags(&entered, self.stream.raw().cast(), [(flag, self.value)]).unwrap();
            drop(entered);
            self.stream.download(self.start, &mut found).unwrap();
        }
        let expected: Vec<u8> = values
            .iter()
            .map(|value| {
                if value.is_nan() {
                    0x7fc0_0000
                } else {
                    value.to_bits()
                }
            })
            .flat_map(u32::to_le_bytes)
            .collect();
        assert!(found == expected, "{found:?}");
    }

    /// The same without an event, as a caller without CUDA would: the result comes some time later.
    pub async fn reduce_without_event(&mut self) {
        let bytes: Vec<u8> = [2.5_f32; NUM_ELEMS]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let mut request = self.call();
        request.event = None;
        // To another place of the buffer.
        request.dst = Some(BufferRange {
            buffer_id: self.buffer_id,
            offset_bytes: 1024,
        });
        // SAFETY: the buffer is in the mapped arena and this rank's.
        unsafe {
            self.stream.fill(self.start + 1024, 0, 32).unwrap();
            self.stream.upload(self.start, &bytes).unwrap();
        }
        self.stream.synchronize().unwrap();
        self.all_reduce(request).await.unwrap();
        let deadline = Instant::now() + SOON;
        loop {
            let mut found = vec![0; bytes.len()];
            // SAFETY: as above.
            unsafe { self.stream.download(self.start + 1024, &mut found) }.unwrap();
            if found == bytes {
                return;
            }
            assert!(Instant::now() < deadline, "in vain: {found:?}");
        }
    }

    pub async fn release(&mut self, buffer_id: u64) {
        let session = self.joined.session;
        let request = ReleaseRequest { session, buffer_id };
        self.buffers.release(request).await.unwrap();
    }
}
