//! What a reduction on a GPU answers: the reference's result, bit for bit, on every rank.
//!
//! Every dtype x operator x algorithm x place that the kernels have, in worlds of 1 to 8, over lengths around
//! the packs, aligned and not; through windows in host memory too, which the daemons of these tests always make. Each case is a run of calls without a wait in between: a copy on the stream makes
//! the source, the call follows at once, and out of place the source is overwritten right after it. Then the
//! whole buffer is compared, guards included. Broken by another order of accumulation, a NaN that is not made
//! canonical, a tail off by one, a byte written beside a tensor, and a reduction that runs before its source is
//! there or after it is overwritten.

use crate::harness::bits::tensor;
use crate::harness::{daemon, ranks};
use crate::rank::{Rank, gpu_of, gpus, options};
use allreduce_client::cuda::{Device, DeviceBuffer};
use allreduce_client::{Algorithm, AllReduceOptions, Backend, Dtype, Op};
use allreduce_kernels::reference::{reduce_bytes, reduce_bytes_tree};
use std::path::Path;
use std::time::Instant;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const OPS: [Op; 4] = [Op::Sum, Op::Avg, Op::Min, Op::Max];

/// What is around tensors, and in sources and destinations before a call.
const GUARD: u8 = 0xa5;
/// What a source is overwritten with after a call.
const AFTER: u8 = 0x5a;

/// Which ranks reduce in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    In,
    Out,
    /// Rank 0 in place, the others out of place.
    Mixed,
}

/// One call of a run.
#[derive(Debug, Clone, Copy)]
struct Call {
    algorithm: Option<Algorithm>,
    place: Place,
}

/// Has the daemon make windows in host memory whatever the GPUs can reach.
const HOST_WINDOWS: (&str, &str) = ("ALLREDUCED_CUDA__HOST_STAGED", "always");

/// Ranks of an island where no topology is known: the largest part of the world, if it has parts.
fn island_size(world_size: u32) -> Option<u32> {
    (2..world_size)
        .rev()
        .find(|size| world_size.is_multiple_of(*size))
}

/// Every algorithm that such a world can have, and the plan's own choice, in every place.
fn calls(world_size: u32) -> Vec<Call> {
    let has_islands = island_size(world_size).is_some();
    let cuda = Algorithm::ALL.into_iter().filter(|algorithm| {
        algorithm.backend() == Backend::Cuda
            && (has_islands || *algorithm != Algorithm::Hierarchical)
    });
    let mut calls = Vec::new();
    for algorithm in cuda.map(Some).chain([None]) {
        for place in [Place::Out, Place::In] {
            calls.push(Call { algorithm, place });
        }
    }
    calls.push(Call {
        algorithm: None,
        place: Place::Mixed,
    });
    assert_eq!(calls.len(), if has_islands { 21 } else { 19 });
    calls
}

/// What tensors reduce to.
struct Reduced {
    op: Op,
    /// In rank order.
    flat: Vec<u8>,
    /// By islands, if there are any.
    tree: Option<Vec<u8>>,
}

impl Reduced {
    fn by(&self, algorithm: Option<Algorithm>) -> &[u8] {
        match algorithm {
            Some(Algorithm::Hierarchical) => self.tree.as_ref().unwrap(),
            Some(_) | None => &self.flat,
        }
    }
}

/// A tensor of every rank, and what it reduces to by each operator.
struct Tensors {
    dtype: Dtype,
    num_elems: usize,
    /// Elements by which sources and destinations are off their alignment.
    skew: usize,
    by_rank: Vec<Vec<u8>>,
    reduced: Vec<Reduced>,
}

impl Tensors {
    fn make(dtype: Dtype, num_elems: usize, skew: usize, world_size: u32, ops: &[Op]) -> Self {
        let seed = num_elems as u64 + u64::from(world_size);
        let by_rank: Vec<Vec<u8>> = (0..world_size)
            .map(|rank| tensor(dtype, num_elems, seed, rank))
            .collect();
        let views: Vec<&[u8]> = by_rank.iter().map(Vec::as_slice).collect();
        let reduced = ops.iter().map(|op| Reduced {
            op: *op,
            flat: reduce_bytes(dtype, *op, &views).unwrap(),
            tree: island_size(world_size)
                .map(|size| reduce_bytes_tree(dtype, *op, &views, size as usize).unwrap()),
        });
        let reduced = reduced.collect();
        Self {
            dtype,
            num_elems,
            skew,
            by_rank,
            reduced,
        }
    }

    fn len_bytes(&self) -> usize {
        self.num_elems * self.dtype.size_bytes()
    }

    /// Room for one tensor with guards around it.
    fn stride(&self) -> usize {
        (self.len_bytes() + 256).next_multiple_of(256)
    }
}

/// Where a call's tensors are in the buffer, which begins with the pristine tensor.
fn places(tensors: &Tensors, index: usize, rank: u32, in_place: bool) -> (usize, usize) {
    let elem_bytes = tensors.dtype.size_bytes();
    let at = |room: usize, skew: usize| room * tensors.stride() + 64 + skew * elem_bytes;
    let src = at(1 + 2 * index, tensors.skew);
    if in_place {
        return (src, src);
    }
    let dst_skew = tensors.skew * (1 + rank as usize % 2);
    (src, at(2 + 2 * index, dst_skew))
}

/// A run of calls on one rank: all are enqueued, then the whole buffer is compared.
fn run(rank: &Rank, buffer: &DeviceBuffer, tensors: &Tensors, which: usize, calls: &[Call]) {
    let number = rank.communicator.rank();
    let (dtype, len_bytes) = (tensors.dtype, tensors.len_bytes());
    let reduced = &tensors.reduced[which];
    let op = reduced.op;
    let pristine = &tensors.by_rank[number as usize];
    let mut image = vec![GUARD; (1 + 2 * calls.len()) * tensors.stride()];
    assert!(image.len() <= buffer.len_bytes());
    image[..len_bytes].copy_from_slice(pristine);
    let start = buffer.ptr();
    rank.upload(&rank.streams[0], start, &image);
    rank.streams[0].synchronize().unwrap();
    for (index, call) in calls.iter().enumerate() {
        let stream = &rank.streams[index % 2];
        let in_place = match call.place {
            Place::In => true,
            Place::Out => false,
            Place::Mixed => number == 0,
        };
        let (src, dst) = places(tensors, index, number, in_place);
        let at = [start + src as u64, start + dst as u64];
        rank.copy(stream, at[0], start, len_bytes);
        let options = AllReduceOptions {
            algorithm: call.algorithm,
            ..AllReduceOptions::default()
        };
        let reduction = rank
            .call(stream, at, tensors.num_elems, (dtype, op), options)
            .unwrap_or_else(|error| panic!("rank {number} {dtype} {op} {call:?}: {error}"));
        if let Some(asked) = call.algorithm {
            assert_eq!(reduction.algorithm, asked);
        }
        if !in_place {
            rank.fill(stream, at[0], AFTER, len_bytes);
            image[src..src + len_bytes].fill(AFTER);
        }
        image[dst..dst + len_bytes].copy_from_slice(reduced.by(call.algorithm));
    }
    rank.streams[1].synchronize().unwrap();
    let found = rank.download(&rank.streams[0], start, image.len());
    rank.communicator.check().unwrap();
    if found == image {
        return;
    }
    let at = (0..image.len())
        .find(|at| found[*at] != image[*at])
        .unwrap();
    let room = at / tensors.stride();
    let call = room.checked_sub(1).and_then(|room| calls.get(room / 2));
    let wrong = (0..image.len())
        .filter(|at| found[*at] != image[*at])
        .count();
    panic!(
        "world_size {} rank {number} {dtype} {op} {} elements (skew {}) {call:?}: byte {} of room {room} is {:#04x}, not {:#04x}; {wrong} bytes are wrong",
        rank.communicator.world_size(),
        tensors.num_elems,
        tensors.skew,
        at % tensors.stride(),
        found[at],
        image[at],
    );
}

/// All runs of one world; `at_once` calls in each.
fn conform(
    socket: &Path,
    devices: &[Device],
    name: &str,
    world_size: u32,
    (cases, at_once): (&[Tensors], usize),
) {
    let started = Instant::now();
    let calls = calls(world_size);
    let rooms = 1 + 2 * at_once.min(calls.len());
    let needed = cases
        .iter()
        .map(|case| rooms * case.stride())
        .max()
        .unwrap();
    // Kept until all are through: who leaves ends the epoch.
    let joined = ranks(world_size, |number| {
        let device = gpu_of(devices, number);
        let options =
            options(name, number, world_size, device).arena_len_bytes(needed as u64 + (1 << 20));
        let rank = Rank::join(socket, options, device);
        let buffer = rank.communicator.allocate_device(needed).unwrap();
        for case in cases {
            for which in 0..case.reduced.len() {
                for chunk in calls.chunks(at_once) {
                    run(&rank, &buffer, case, which, chunk);
                }
            }
        }
        (buffer, rank)
    });
    let runs: usize = cases.iter().map(|case| case.reduced.len()).sum();
    println!(
        "world_size {world_size}: {} reductions in {:.1} s",
        runs * calls.len(),
        started.elapsed().as_secs_f32()
    );
    for (buffer, rank) in joined {
        assert_eq!(rank.communicator.epoch(), 1);
        drop(buffer);
        rank.communicator.leave();
    }
}

/// 11,376 reductions of 0 to 21,505 elements.
#[test]
fn worlds_of_1_to_8_equal_the_reference() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[HOST_WINDOWS]);
    // The last: one element off 16 bytes.
    let lengths = [(0, 0), (1, 0), (7, 0), (21_504, 0), (21_505, 0), (4099, 1)];
    for world_size in 1..=8 {
        let mut cases = Vec::new();
        for dtype in DTYPES {
            for (num_elems, skew) in lengths {
                cases.push(Tensors::make(dtype, num_elems, skew, world_size, &OPS));
            }
        }
        let name = format!("conform-{world_size}");
        conform(daemon.socket(), &devices, &name, world_size, (&cases, 21));
    }
}

/// The kernels for many ranks.
#[test]
fn worlds_of_11_and_16_equal_the_reference() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[HOST_WINDOWS]);
    for world_size in [11, 16] {
        let cases = [
            Tensors::make(Dtype::Bf16, 21_504, 0, world_size, &OPS),
            Tensors::make(Dtype::F32, 4099, 1, world_size, &OPS),
        ];
        let name = format!("conform-{world_size}");
        conform(daemon.socket(), &devices, &name, world_size, (&cases, 21));
    }
}

/// 8 MiB: longer than a push slot, an in-band part and a staging region, so of several pieces by every algorithm that
/// has any.
#[test]
fn tensors_longer_than_a_window_equal_the_reference() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[
        HOST_WINDOWS,
        ("ALLREDUCED_CUDA__STAGING_PART_BYTES", "1048576"),
    ]);
    for world_size in [1, 2, 3, 4, 6, 8] {
        let cases: Vec<Tensors> = [
            (Dtype::F32, Op::Sum, 0),
            (Dtype::Bf16, Op::Avg, 0),
            (Dtype::F16, Op::Max, 1),
        ]
        .into_iter()
        .map(|(dtype, op, skew)| {
            // Not a multiple of anything.
            let num_elems = (8 << 20) / dtype.size_bytes() + 5;
            Tensors::make(dtype, num_elems, skew, world_size, &[op])
        })
        .collect();
        let name = format!("large-{world_size}");
        conform(daemon.socket(), &devices, &name, world_size, (&cases, 1));
    }
}

/// The same call, many times, gives the same bits: no dependence on who calls or gets through first.
#[test]
fn repeats_are_identical() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[]);
    let case = Tensors::make(Dtype::Bf16, 4099, 0, 4, &[Op::Sum]);
    let call = Call {
        algorithm: None,
        place: Place::Out,
    };
    let repeats = [call; 16];
    let needed = (1 + 2 * repeats.len()) * case.stride();
    let joined = ranks(4, |number| {
        let device = gpu_of(&devices, number);
        let rank = Rank::join(
            daemon.socket(),
            options("repeats", number, 4, device),
            device,
        );
        let buffer = rank.communicator.allocate_device(needed).unwrap();
        for _ in 0..20 {
            run(&rank, &buffer, &case, 0, &repeats);
        }
        (buffer, rank)
    });
    drop(joined);
}
