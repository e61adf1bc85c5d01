//! Memory of the worker's own: what can be registered, what is refused, and that everything comes back.
#![allow(unsafe_code)] // room: CUDA

use crate::cuda::{Memory, free_bytes};
use crate::harness::bits::expected;
use crate::harness::raw::{NO_HEARTBEATS, block_on, executor_pid, refused};
use crate::harness::{daemon, eventually, open_fds};
use crate::rank::{Rank, gpu_of, gpus, join_all, on_each, reduce_well};
use crate::raw::RawGpu;
use allreduce_client::cuda::{DeviceBuffer, NotShareable};
use allreduce_client::{AllReduceError, AllReduceOptions, BufferError, Dtype, Op};
use allreduce_contract::cuda::{Context, DeviceMemory, IPC_HANDLE_LEN};
use allreduce_contract::v1::{CudaMemory, ErrorCode, RegisterRequest};
use tonic::Code;

const MIB: u64 = 1 << 20;

/// What other things may take or give of the device's memory while a test runs; a leak in each cycle is more.
const NOISE_BYTES: u64 = 16 * MIB;

/// Registers the allocation around an address.
fn register(rank: &Rank, ptr: u64) -> Result<DeviceBuffer, BufferError> {
    // SAFETY: the tests free what is registered only after release_device has answered, or after leaving.
    unsafe { rank.communicator.register_device(ptr) }
}

/// A pointer into the middle registers the whole allocation, of which every part can be reduced until it is
/// released; then it may be freed.
#[test]
fn a_workers_own_memory_is_reduced() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "own", 2, &devices);
    on_each(&joined, |rank| {
        let memory = DeviceMemory::allocate(&rank.context, 4 * MIB).unwrap();
        let middle = memory.start() + 3 * MIB + 20;
        let options = AllReduceOptions::default;
        let kind = (Dtype::F32, Op::Sum);
        let call = |at: [u64; 2]| rank.call(rank.stream(), at, 251, kind, options());
        match call([middle, middle]) {
            Err(AllReduceError::NotABuffer { pointer, .. }) => assert_eq!(pointer, middle),
            other => panic!("{other:?}"),
        }
        let buffer = register(rank, middle).unwrap();
        assert!(buffer.is_registered());
        assert_eq!(buffer.ptr(), memory.start());
        assert_eq!(buffer.len_bytes() as u64, memory.len_bytes());
        match register(rank, memory.start()) {
            Err(BufferError::Registered { start, .. }) => assert_eq!(start, memory.start()),
            other => panic!("{other:?}"),
        }
        // In place in the middle, at the start, at the very end; then from there into the arena.
        let end = memory.start() + memory.len_bytes() - 4 * 251;
        for (seed, at) in (0..).zip([middle, memory.start(), end]) {
            rank.reduce_one_at(at, seed).unwrap();
        }
        let (tensors, sum) = expected(kind.0, kind.1, 251, 9, 2);
        rank.upload(
            rank.stream(),
            middle,
            &tensors[rank.communicator.rank() as usize],
        );
        let dst = rank.scratch.ptr() + 4;
        call([middle, dst]).unwrap();
        assert!(rank.download(rank.stream(), dst, sum.len()) == sum);
        // One byte more than there is.
        match call([end + 4, end + 4]) {
            Err(AllReduceError::NotABuffer { len_bytes, .. }) => assert_eq!(len_bytes, 4 * 251),
            other => panic!("{other:?}"),
        }
        rank.communicator.release_device(buffer).unwrap();
        drop(memory);
        rank.reduce_one().unwrap();
    });
}

/// The driver cuts small allocations out of larger ones, and a handle names the larger: a tensor is right where
/// it is, or refused.
#[test]
fn small_allocations_are_right_or_refused() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "small", 2, &devices);
    let memories: Vec<Vec<DeviceMemory>> = joined
        .iter()
        .map(|rank| {
            let small = |_| DeviceMemory::allocate(&rank.context, 4096).unwrap();
            (0..3).map(small).collect()
        })
        .collect();
    let buffers = on_each(&joined, |rank| {
        let own = &memories[rank.communicator.rank() as usize];
        let registered = own.iter().map(|memory| register(rank, memory.start()));
        registered.collect::<Vec<_>>()
    });
    for index in 0..3 {
        let registered: Vec<_> = buffers.iter().map(|buffers| &buffers[index]).collect();
        match registered.as_slice() {
            [Ok(_), Ok(_)] => {
                println!("small allocation {index}: registered");
                on_each(&joined, |rank| {
                    let at = memories[rank.communicator.rank() as usize][index].start();
                    rank.reduce_one_at(at, index as u64).unwrap();
                });
            }
            others => {
                for other in others.iter().filter_map(|other| other.as_ref().err()) {
                    println!("small allocation {index}: {other}");
                    assert!(!other.is_epoch_over(), "{other}");
                }
            }
        }
    }
    reduce_well(&joined);
    for (rank, buffers) in joined.iter().zip(buffers) {
        for buffer in buffers.into_iter().flatten() {
            rank.communicator.release_device(buffer).unwrap();
        }
    }
    drop(memories);
    reduce_well(&joined);
}

/// 200 cycles of registering and releasing, 200 of allocating and dropping, on two ranks. Broken by a mapping
/// that stays (the freed memory then is still in use), by an arena that fills up, and by descriptors that stay.
#[test]
fn memory_and_descriptors_come_back() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    const CYCLES: usize = 200;
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "cycles", 2, &devices);
    let executor = executor_pid(daemon.socket(), "cycles");
    let register_release = |rank: &Rank| {
        let memory = DeviceMemory::allocate(&rank.context, 2 * MIB).unwrap();
        let buffer = register(rank, memory.start() + MIB).unwrap();
        rank.communicator.release_device(buffer).unwrap();
    };
    // A quarter of the arena: after three that stay there is no fourth.
    let allocate_drop = |rank: &Rank| drop(rank.communicator.allocate_device(1 << 20).unwrap());
    let cycles = |count: usize| {
        on_each(&joined, |rank| {
            for _ in 0..count {
                register_release(rank);
                allocate_drop(rank);
            }
        });
        reduce_well(&joined);
    };
    cycles(20);
    let held = || (free_bytes(&joined[0].context), open_fds(executor));
    let before = held();
    cycles(CYCLES);
    println!("free memory and descriptors: {before:?}, then {:?}", held());
    eventually("memory and descriptors come back", || {
        let (free, fds) = held();
        (free + NOISE_BYTES >= before.0 && fds <= before.1).then_some(())
    });
    assert_eq!(executor_pid(daemon.socket(), "cycles"), executor);
    reduce_well(&joined);
}

/// So do windows and executors when communicators come and go.
#[test]
fn joining_and_leaving_leaves_nothing() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let cycle = || {
        let joined = join_all(daemon.socket(), "again", 2, &devices);
        reduce_well(&joined);
    };
    for _ in 0..3 {
        cycle();
    }
    let executor = executor_pid(daemon.socket(), "again");
    let context = Context::retain(gpu_of(&devices, 0).clone()).unwrap();
    let held = || (free_bytes(&context), open_fds(executor));
    let before = held();
    for _ in 0..20 {
        cycle();
    }
    println!("free memory and descriptors: {before:?}, then {:?}", held());
    eventually("memory and descriptors come back", || {
        let (free, fds) = held();
        (free + NOISE_BYTES >= before.0 && fds <= before.1).then_some(())
    });
    assert_eq!(executor_pid(daemon.socket(), "again"), executor);
}

/// What CUDA IPC cannot export is refused by the client, with the reason and what to do, and harms nobody.
#[test]
fn memory_that_cannot_be_shared_is_refused_with_its_reason() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let joined = join_all(daemon.socket(), "refused", 2, &devices);
    let rank = &joined[0];
    let context = &rank.context;
    let refusal = |what: &str, ptr: u64| match register(rank, ptr) {
        Err(error @ BufferError::NotShareable(_)) => {
            println!("{what}: {error}");
            assert!(!error.is_epoch_over());
            assert!(error.to_string().contains(&format!("{ptr:#x}")), "{error}");
            let BufferError::NotShareable(reason) = error else {
                unreachable!()
            };
            reason
        }
        other => panic!("{what}: {other:?}"),
    };
    // The driver may take pageable memory for unknown, or (with HMM) for the host's.
    let pageable = vec![0_u8; 4096];
    refusal("pageable host memory", pageable.as_ptr() as u64);
    refusal("null", 0);
    refusal("no address", 0xdead_beef_0000);

    let pinned = Memory::pinned(context, 4096);
    let reason = refusal("page-locked host memory", pinned.start);
    assert!(matches!(reason, NotShareable::Host(_)), "{reason:?}");
    let managed = Memory::managed(context, 4096);
    let reason = refusal("managed memory", managed.start);
    assert!(matches!(reason, NotShareable::Managed(_)), "{reason:?}");
    let pooled = Memory::stream_ordered(context, 4096);
    let reason = refusal("cuMemAllocAsync", pooled.start);
    assert!(
        matches!(reason, NotShareable::StreamOrdered(_)),
        "{reason:?}"
    );
    let mapped = Memory::mapped(context);
    let reason = refusal("cuMemCreate and cuMemMap", mapped.start);
    assert!(matches!(reason, NotShareable::Virtual(_)), "{reason:?}");
    drop((pinned, managed, pooled, mapped));

    // Freed memory is no address any more, or still the driver's: in no case does it end the epoch.
    let freed = DeviceMemory::allocate(context, 2 * MIB).unwrap().start();
    match register(rank, freed) {
        Ok(_) => panic!("freed memory was registered"),
        Err(error) => {
            println!("freed memory: {error}");
            assert!(!error.is_epoch_over(), "{error}");
        }
    }
    assert!(joined.iter().all(|rank| rank.communicator.epoch() == 1));
    reduce_well(&joined);
}

/// What a client of another make may send instead of a handle is refused by the executor, alone.
#[test]
fn handles_that_do_not_open_are_refused() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_HEARTBEATS]);
    let executor = |name| executor_pid(daemon.socket(), name);
    let context = Context::retain(gpu_of(&devices, 0).clone()).unwrap();
    let neighbours = join_all(daemon.socket(), "neighbours", 2, &devices);
    let memory = DeviceMemory::allocate(&context, 2 * MIB).unwrap();
    let exported = memory.export().unwrap();
    let pid = block_on(async {
        let mut rank = RawGpu::alone(daemon.socket(), "handles", &context).await;
        let pid = crate::harness::raw::executor_pid_of(daemon.socket(), "handles").await;
        let good = CudaMemory {
            ipc_handle: exported.to_vec(),
            generation: 1,
            len_bytes: memory.len_bytes(),
            device_uuid: context.device().uuid().to_owned(),
        };
        let session = rank.joined.session;
        let request = |memory: CudaMemory| RegisterRequest {
            session,
            memory_handle: 0,
            offset_bytes: 0,
            len_bytes: memory.len_bytes,
            cuda: Some(memory),
            ring_memory: 0,
        };
        let scrambled = (0..IPC_HANDLE_LEN as u64).map(|at| (at * 151 + 89) as u8);
        for bytes in [
            scrambled.collect(),
            vec![0; IPC_HANDLE_LEN],
            vec![0xff; IPC_HANDLE_LEN],
        ] {
            let bad = CudaMemory {
                ipc_handle: bytes,
                ..good.clone()
            };
            let status = rank.buffers.register(request(bad)).await.unwrap_err();
            println!("bad handle: {}", status.message());
            let words = ["cannot be mapped", "CUDA_ERROR"];
            refused(&status, Code::InvalidArgument, ErrorCode::BadMemory, &words);
        }
        for len in [0, IPC_HANDLE_LEN - 1, IPC_HANDLE_LEN + 1] {
            let bad = CudaMemory {
                ipc_handle: vec![1; len],
                ..good.clone()
            };
            let status = rank.buffers.register(request(bad)).await.unwrap_err();
            let words = ["64 bytes", &format!("{len}")];
            refused(
                &status,
                Code::InvalidArgument,
                ErrorCode::InvalidField,
                &words,
            );
        }
        let elsewhere = CudaMemory {
            device_uuid: "GPU-00000000-0000-0000-0000-000000000000".to_owned(),
            ..good.clone()
        };
        let status = rank.buffers.register(request(elsewhere)).await.unwrap_err();
        let words = ["another device", context.device().uuid()];
        refused(&status, Code::InvalidArgument, ErrorCode::BadMemory, &words);
        // Longer than it is, by the driver's account.
        let longer = CudaMemory {
            len_bytes: 1 << 40,
            ..good.clone()
        };
        let status = rank.buffers.register(request(longer)).await.unwrap_err();
        refused(
            &status,
            Code::InvalidArgument,
            ErrorCode::BadMemory,
            &["announced"],
        );
        // A buffer that leaves it.
        let mut leaves = request(good.clone());
        leaves.offset_bytes = 16;
        let status = rank.buffers.register(leaves).await.unwrap_err();
        refused(&status, Code::InvalidArgument, ErrorCode::OutOfBounds, &[]);

        let registered = rank.buffers.register(request(good)).await.unwrap();
        rank.reduce_well().await;
        rank.release(registered.into_inner().buffer_id).await;
        rank.reduce_well().await;
        pid
    });
    assert_eq!(executor("handles"), pid, "the executor lives");
    drop(memory);
    reduce_well(&neighbours);
}
