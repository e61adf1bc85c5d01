//! A graph of several reductions, of tensors in memory of the rank's own, and what must be in them after a replay.
//!
//! Owns the tensors and the graph. Used by ranks that are processes (lane `delegated`).
#![allow(unsafe_code)] // room: CUDA

use crate::harness::bits::expected;
use crate::rank::Rank;
use allreduce_client::{AllReduceError, AllReduceOptions, Dtype, Op};
use allreduce_contract::cuda::{DeviceMemory, Graph, Stream};

/// Kind, elements, and by how many elements source and destination are off a pack's alignment; none for in place.
const REDUCTIONS: [(Dtype, Op, usize, Option<[usize; 2]>); 6] = [
    (Dtype::Bf16, Op::Sum, 21_504, Some([0, 0])),
    (Dtype::F32, Op::Max, 251, Some([1, 3])),
    (Dtype::F16, Op::Avg, 70_001, Some([0, 5])),
    (Dtype::F32, Op::Sum, 0, Some([0, 0])),
    // Longer than what one launch takes.
    (Dtype::F32, Op::Sum, 1_300_003, Some([0, 0])),
    (Dtype::Bf16, Op::Min, 1000, Some([7, 0])),
];

struct Tensor {
    kind: (Dtype, Op),
    num_elems: usize,
    memory: DeviceMemory,
    src: u64,
    dst: u64,
    expected: Vec<u8>,
}

pub struct Captured {
    tensors: Vec<Tensor>,
    graph: Graph,
}

impl Captured {
    /// Captures the reductions on the rank's first stream.
    pub fn new(rank: &Rank) -> Result<Self, AllReduceError> {
        let (own, world_size) = (rank.communicator.rank(), rank.communicator.world_size());
        let stream = rank.stream();
        let mut tensors = Vec::new();
        for (seed, (dtype, op, num_elems, offsets)) in REDUCTIONS.into_iter().enumerate() {
            let [src_off, dst_off] = offsets.unwrap_or_default();
            let size = dtype.size_bytes();
            let room = (num_elems * size + 64).next_multiple_of(256) as u64;
            let memory = DeviceMemory::allocate(&rank.context, 2 * room).unwrap();
            let src = memory.start() + (src_off * size) as u64;
            let dst = memory.start() + room + (dst_off * size) as u64;
            let (all, expected) = expected(dtype, op, num_elems, seed as u64 + 11, world_size);
            rank.upload(stream, src, &all[own as usize]);
            tensors.push(Tensor {
                kind: (dtype, op),
                num_elems,
                memory,
                src,
                dst,
                expected,
            });
        }
        stream.synchronize().unwrap();
        stream.begin_capture().unwrap();
        let called = tensors.iter().try_for_each(|tensor| {
            let ends = [tensor.src, tensor.dst];
            let options = AllReduceOptions::default();
            rank.call(stream, ends, tensor.num_elems, tensor.kind, options)
                .map(|_| ())
        });
        // Ended in any case: the stream could not be used otherwise.
        let graph = stream.end_capture();
        called?;
        Ok(Self {
            tensors,
            graph: graph.unwrap(),
        })
    }

    /// Enqueues replays, over destinations that hold something else.
    pub fn replay(&self, rank: &Rank, times: usize) {
        self.replay_on(rank, rank.stream(), times);
    }

    /// The same on another stream.
    pub fn replay_on(&self, rank: &Rank, stream: &Stream, times: usize) {
        for tensor in &self.tensors {
            rank.fill(stream, tensor.dst, 0x11, tensor.expected.len());
        }
        for _ in 0..times {
            // SAFETY: the tensors live as long as self, which is dropped when the streams are idle.
            unsafe { stream.replay(&self.graph) }.unwrap();
        }
    }

    /// The first reduction outside of the graph.
    pub fn eager(&self, rank: &Rank) -> Result<(), AllReduceError> {
        let tensor = &self.tensors[0];
        let ends = [tensor.src, tensor.dst];
        let options = AllReduceOptions::default();
        rank.call(rank.stream(), ends, tensor.num_elems, tensor.kind, options)
            .map(|_| ())
    }

    /// "right", "nan" (all of it), or what is wrong.
    pub fn found(&self, rank: &Rank) -> String {
        let mut nans = 0;
        let mut rights = 0;
        let mut with_elements = 0;
        for (index, tensor) in self.tensors.iter().enumerate() {
            if tensor.num_elems == 0 {
                continue;
            }
            with_elements += 1;
            let found = rank.download(rank.stream(), tensor.dst, tensor.expected.len());
            let nan: &[u8] = match tensor.kind.0 {
                Dtype::F32 => &[0, 0, 0xc0, 0x7f],
                Dtype::F16 => &[0, 0x7e],
                Dtype::Bf16 => &[0xc0, 0x7f],
                other => panic!("{other}"),
            };
            if found == tensor.expected {
                rights += 1;
            } else if found.chunks(nan.len()).all(|element| element == nan) {
                nans += 1;
            } else {
                return format!("wrong: reduction {index}");
            }
        }
        let _keep = self.tensors.iter().map(|tensor| tensor.memory.start());
        match (rights, nans) {
            (rights, 0) if rights == with_elements => "right".to_owned(),
            (0, nans) if nans == with_elements => "nan".to_owned(),
            (rights, nans) => format!("{rights} right, {nans} nan"),
        }
    }
}
