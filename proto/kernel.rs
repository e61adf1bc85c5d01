//! The CUDA kernels: their image or source, their names, and what is passed to them.
//!
//! Owns the mirror of kernels/cuda/abi.h: field by field the same, sizes and offsets asserted on both sides,
//! and the signature computed the same way (a test compares with the C++ of the header). Executors and ranks of the
//! lane `delegated` fill these and launch. Refuses to call CUDA.

use crate::{Algorithm, Dtype, Op, WorldSize};
use std::mem::{offset_of, size_of};

/// The fatbin that nvcc made at build time; none if there was no nvcc.
#[cfg(feature = "kernels")]
pub fn fatbin() -> Option<&'static [u8]> {
    const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/all_reduce.fatbin"));
    (!IMAGE.is_empty()).then_some(IMAGE)
}

#[cfg(feature = "kernels")]
macro_rules! source {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/cuda/", $name)),
        )
    };
}

/// The source for a run-time compiler: the file to compile.
#[cfg(feature = "kernels")]
pub const MAIN_SOURCE: (&str, &str) = source!("all_reduce.cu");

/// Its headers, by the names it includes them with. They include nothing else.
#[cfg(feature = "kernels")]
pub const HEADERS: [(&str, &str); 11] = [
    source!("abi.h"),
    source!("mem.cuh"),
    source!("num.cuh"),
    source!("protocol.cuh"),
    source!("one_shot.cuh"),
    source!("probe.cuh"),
    source!("two_shot.cuh"),
    source!("hierarchical.cuh"),
    source!("reduce_copied.cuh"),
    source!("resident.cuh"),
    source!("gate.cuh"),
];

/// Version of this layout, in each control block.
pub const KERNEL_ABI_VERSION: u32 = 2;
/// Most blocks of one rank.
pub const MAX_BLOCKS: u32 = 128;
/// Bytes of a pack, the kernels' unit.
pub const PACK_BYTES: u64 = 16;
/// Bytes at the start of a window that hold flags; zero when an epoch begins.
pub const SIGNAL_BYTES: u64 = 32 * 1024;
/// Threads of a block beyond those that move data.
pub const SERVICE_THREADS: u32 = 32;
/// Source readable by every peer: pulled in place instead of staged.
pub const CALL_DIRECT: u32 = 1;
/// Most packs of one launch.
pub const MAX_PACKS: u64 = 0x7fff_ffff;

const MAX_RANKS: usize = crate::MAX_WORLD_SIZE as usize;

/// The kernel's name for an algorithm; none for those of the host, and for copy engines, whose kernel is one of its
/// own. Through host memory goes the kernel that pulls: what is in host memory are its windows.
pub const fn algorithm_name(algorithm: Algorithm) -> Option<&'static str> {
    match algorithm {
        Algorithm::OneShot
        | Algorithm::OneShotChunked
        | Algorithm::TwoShot
        | Algorithm::CopyEngineRing => None,
        Algorithm::HostStaged => Some(Algorithm::TwoShotPullInband.name()),
        Algorithm::OneShotPush
        | Algorithm::OneShotPull
        | Algorithm::OneShotPullInband
        | Algorithm::TwoShotPush
        | Algorithm::TwoShotPull
        | Algorithm::TwoShotPullInband
        | Algorithm::Hierarchical => Some(algorithm.name()),
    }
}

/// Which instances of the kernels serve a world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Instance {
    /// Exactly 2 ranks.
    N2,
    /// Exactly 4.
    N4,
    /// Exactly 8.
    N8,
    /// Up to 4.
    W4,
    /// Up to 8.
    W8,
    /// Up to 16.
    W16,
}

impl Instance {
    /// The one to use for `world_size` ranks.
    pub const fn of(world_size: WorldSize) -> Self {
        match world_size.get() {
            2 => Instance::N2,
            4 => Instance::N4,
            8 => Instance::N8,
            0..=3 => Instance::W4,
            5..=7 => Instance::W8,
            _ => Instance::W16,
        }
    }

    /// As in the kernels' names, and in the compiler's `AR_ONLY_WORLD`.
    pub const fn name(self) -> &'static str {
        match self {
            Instance::N2 => "n2",
            Instance::N4 => "n4",
            Instance::N8 => "n8",
            Instance::W4 => "w4",
            Instance::W8 => "w8",
            Instance::W16 => "w16",
        }
    }

    /// Most data threads of a block; a multiple of 32.
    pub const fn max_data_threads(self) -> u32 {
        match self {
            Instance::N2 | Instance::N4 | Instance::W4 => 480,
            Instance::N8 | Instance::W8 => 352,
            Instance::W16 => 160,
        }
    }
}

/// The code of an element type that the kernels have; `None` for the others.
pub const fn dtype_name(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Some(dtype.name()),
        Dtype::F64 | Dtype::I32 | Dtype::I64 => None,
    }
}

/// The code of an operator that the kernels have; `None` for the others.
pub const fn op_code(op: Op) -> Option<u32> {
    match op {
        Op::Sum => Some(0),
        Op::Avg => Some(1),
        Op::Min => Some(2),
        Op::Max => Some(3),
        Op::Prod => None,
    }
}

/// `Call` of abi.h: one rank's part of a launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Call {
    control: u64,
    src: u64,
    dst: u64,
    num_elems: u64,
    op: u32,
    flags: u32,
    signature: u32,
    num_packs: u32,
    src_whole_packs: u32,
    dst_whole_packs: u32,
}

const _: () = {
    assert!(size_of::<Call>() == 56);
    assert!(offset_of!(Call, op) == 32);
    assert!(offset_of!(Call, src_whole_packs) == 48);
};

/// What [`Call::new`] takes.
#[derive(Debug, Clone, Copy)]
pub struct CallParts {
    /// Device address of the rank's [`ControlBlock`].
    pub control: u64,
    /// Address of `num_elems` elements, element-aligned.
    pub src: u64,
    /// Likewise; equal to `src` or apart from it.
    pub dst: u64,
    /// At most [`MAX_PACKS`] packs.
    pub num_elems: u64,
    /// Bytes of an element.
    pub elem_bytes: u32,
    /// From [`op_code`].
    pub op: u32,
    /// `CALL_*`.
    pub flags: u32,
    /// Blocks of a rank.
    pub blocks: u32,
    /// Data threads of a block.
    pub data_threads: u32,
}

impl Call {
    /// `make_call` of abi.h.
    pub const fn new(parts: CallParts) -> Self {
        let CallParts {
            control,
            src,
            dst,
            num_elems,
            elem_bytes,
            op,
            flags,
            blocks,
            data_threads,
        } = parts;
        let pack = PACK_BYTES / elem_bytes as u64;
        Self {
            control,
            src,
            dst,
            num_elems,
            op,
            flags,
            signature: call_signature(op, flags, num_elems, blocks, data_threads),
            num_packs: num_elems.div_ceil(pack) as u32,
            src_whole_packs: whole(src, num_elems, pack),
            dst_whole_packs: whole(dst, num_elems, pack),
        }
    }
}

const fn whole(address: u64, num_elems: u64, pack: u64) -> u32 {
    if address.is_multiple_of(PACK_BYTES) {
        (num_elems / pack) as u32
    } else {
        0
    }
}

const fn signature_mix(hash: u32, value: u32) -> u32 {
    let mixed = (hash ^ value).wrapping_mul(0x9e37_79b1);
    mixed ^ (mixed >> 15)
}

const fn call_signature(
    op: u32,
    flags: u32,
    num_elems: u64,
    blocks: u32,
    data_threads: u32,
) -> u32 {
    let hash = signature_mix(0x811c_9dc5, op | (flags & CALL_DIRECT) << 8);
    let hash = signature_mix(hash, num_elems as u32);
    let hash = signature_mix(hash, (num_elems >> 32) as u32);
    signature_mix(hash, blocks | data_threads << 16)
}

/// `Launch` of abi.h: the kernels' only parameter. blockIdx.y selects the call.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Launch {
    /// By place in the launch: the ranks that share the GPU.
    pub calls: [Call; MAX_RANKS],
}

const _: () = assert!(size_of::<Launch>() == 896);

/// `Control` of abi.h without the part that the device owns, which is zero when an epoch begins.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct ControlBlock {
    /// [`KERNEL_ABI_VERSION`].
    pub abi_version: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// This rank.
    pub rank: u32,
    /// The epoch; its lower 24 bits are in abort words.
    pub epoch: u32,
    /// Longest wait of one launch.
    pub timeout_ns: u64,
    /// Device address of the rank's status word in host memory.
    pub status: u64,
    /// Regions of every rank's window: offsets from its start, multiples of 16.
    pub push_offset: u64,
    /// Multiple of 32.
    pub push_slot_bytes: u64,
    /// Offset.
    pub inband_offset: u64,
    /// Multiple of 32.
    pub inband_part_bytes: u64,
    /// Offset.
    pub staging_offset: u64,
    /// Multiple of 32.
    pub staging_part_bytes: u64,
    /// The device's; 0 here.
    pub failed: u32,
    /// Kernel `hierarchical`: ranks of an island, which are consecutive; divides `world_size`, else every rank's
    /// launch of it ends in BAD_CALL. 0 where that kernel is not launched.
    pub island_size: u32,
    /// Lane `resident`, the rank's own block: device address of its wake word in host memory.
    pub wake: u64,
    /// 0.
    pub reserved1: [u32; 8],
    /// By rank: where its window starts, in this process.
    pub window: [u64; MAX_RANKS],
    /// By rank: where its arena starts; direct sources are relative to it.
    pub arena: [u64; MAX_RANKS],
}

impl ControlBlock {
    /// What a rank begins an epoch with: no failure, no arenas, nobody to wake. `status` is the device address of its
    /// status word; `windows` are where all ranks' start in this process, in rank order.
    pub fn new(
        regions: &Regions,
        rank: u32,
        epoch: u64,
        timeout_ns: u64,
        status: u64,
        windows: impl IntoIterator<Item = u64>,
    ) -> Self {
        let mut block = Self {
            abi_version: KERNEL_ABI_VERSION,
            world_size: regions.world_size,
            rank,
            // The kernels keep 32 bits, abort words 24: enough to tell neighbours apart.
            epoch: epoch as u32,
            timeout_ns,
            status,
            push_offset: regions.push_offset(),
            push_slot_bytes: regions.push_slot_bytes,
            inband_offset: regions.inband_offset(),
            inband_part_bytes: regions.inband_part_bytes,
            staging_offset: regions.staging_offset(),
            staging_part_bytes: regions.staging_part_bytes,
            island_size: regions.island_size,
            ..Self::default()
        };
        for (to, start) in block.window.iter_mut().zip(windows) {
            *to = start;
        }
        block
    }

    /// As the device reads it.
    #[allow(unsafe_code)] // room: plain integers as bytes
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: plain integers without padding (the sizes and offsets below), borrowed as long as self.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}

/// Length of a control block in device memory, the device's part included.
pub const CONTROL_BLOCK_BYTES: u64 = 2560;

const _: () = {
    assert!(size_of::<ControlBlock>() == 384);
    assert!(offset_of!(ControlBlock, timeout_ns) == 16);
    assert!(offset_of!(ControlBlock, push_offset) == 32);
    assert!(offset_of!(ControlBlock, failed) == 80);
    assert!(offset_of!(ControlBlock, island_size) == 84);
    assert!(offset_of!(ControlBlock, wake) == 88);
    assert!(offset_of!(ControlBlock, window) == 128);
    assert!(offset_of!(ControlBlock, arena) == 256);
};

/// `ReduceCopied` of abi.h: the parameter of `allreduced_reduce_copied_<dtype>`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ReduceCopied {
    /// Addresses of `num_elems` elements each, element-aligned, in rank order; `world_size` of them.
    pub sources: [u64; MAX_RANKS],
    /// Likewise; equal to a source or apart from all of them.
    pub dst: u64,
    /// May be 0.
    pub num_elems: u64,
    /// 1 to 16, else the whole output becomes NaN.
    pub world_size: u32,
    /// From [`op_code`].
    pub op: u32,
    /// Address of the rank's own abort word: the output becomes NaN if it is set. 0: there is none.
    pub abort: u64,
}

/// Most threads of a block of `allreduced_reduce_copied_<dtype>`.
pub const REDUCE_COPIED_THREADS: u32 = 512;

const _: () = {
    assert!(size_of::<ReduceCopied>() == 160);
    assert!(offset_of!(ReduceCopied, dst) == 128);
    assert!(offset_of!(ReduceCopied, num_elems) == 136);
    assert!(offset_of!(ReduceCopied, world_size) == 144);
    assert!(offset_of!(ReduceCopied, op) == 148);
    assert!(offset_of!(ReduceCopied, abort) == 152);
};

/// Where a window has the headers by which ranks announce their calls, `Signal::header` of abi.h: 2 parities of
/// 16 sources, 32 bytes each, the first of which are the call's number in the epoch.
pub const HEADERS_OFFSET: u64 = 128;
/// Length of all headers.
pub const HEADERS_LEN_BYTES: usize = 2 * MAX_RANKS * HEADER_LEN_BYTES;
const HEADER_LEN_BYTES: usize = 32;

/// By source: the number of the newest call, modulo 2^32, of a window's headers.
pub fn newest_calls(headers: &[u8]) -> Vec<u32> {
    let number = |header: &[u8]| {
        header
            .first_chunk::<4>()
            .copied()
            .map_or(0, u32::from_le_bytes)
    };
    let all: Vec<u32> = headers.chunks(HEADER_LEN_BYTES).map(number).collect();
    let (even, odd) = all.split_at(all.len().min(MAX_RANKS));
    let both = even.iter().zip(odd);
    both.map(|(even, odd)| match odd.wrapping_sub(*even) as i32 {
        ..0 => *even,
        0.. => *odd,
    })
    .collect()
}

/// Most blocks that a resident kernel has for a rank.
pub const MAX_RING_BLOCKS: u32 = 32;
/// Memories of a rank that a resident kernel may be told to read and write.
pub const MAX_RING_BUFFERS: usize = 64;
/// Where a window's ring is.
pub const RING_OFFSET: u64 = 24576;
/// Where in a window the blocks of a resident kernel say that they have parked, 4 bytes each.
pub const RING_PARKED_OFFSET: u64 = RING_OFFSET + 256;
/// Words of a command.
pub const COMMAND_WORDS: usize = 6;
/// The memory of a command that is the rank's arena.
pub const RING_ARENA: u8 = 0;
/// The memory of a command through which the client passes tensors that the executor has not mapped.
pub const RING_STAGING: u8 = 1;

/// `RingBuffer` of abi.h: a memory, as the executor has it mapped.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct RingBuffer {
    /// Where it starts; 0 for none.
    pub start: u64,
    /// Its length.
    pub len_bytes: u64,
}

/// `ResidentState` of abi.h: all zero but for the buffers when an epoch begins.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ResidentState {
    /// By block: the last launch of which it has ended. The device's.
    pub exited: [u32; MAX_RING_BLOCKS as usize],
    /// Launches up to this one end as soon as no command is there.
    pub stop: u32,
    /// 0.
    pub reserved: [u32; 31],
    /// What commands may name.
    pub buffers: [RingBuffer; MAX_RING_BUFFERS],
}

/// In [`ResidentState::stop`]: every launch ends, whatever peers do.
pub const STOP_ALL: u32 = u32::MAX;

/// `ResidentRank` of abi.h.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct ResidentRank {
    /// Device address of the executor's [`ControlBlock`] for the rank.
    pub control: u64,
    /// Of its [`ResidentState`].
    pub state: u64,
}

/// `ResidentLaunch` of abi.h: the parameter of a resident kernel.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct ResidentLaunch {
    /// Counts from 1 in the epoch.
    pub launch: u32,
    /// 0.
    pub reserved: u32,
    /// A block ends when no command has come for so long.
    pub idle_ns: u64,
    /// By place in the launch: the ranks that share the GPU.
    pub ranks: [ResidentRank; MAX_RANKS],
}

/// `RingLaunch` of abi.h: the parameter of the kernel that rings.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct RingLaunch {
    /// Device address of the rank's own [`ControlBlock`].
    pub control: u64,
    /// The destination in the rank's process, for NaN if the reduction fails.
    pub dst: u64,
    /// See abi.h.
    pub command: [u32; COMMAND_WORDS],
    /// Blocks that the resident kernel has for the rank.
    pub blocks: u32,
    /// 0.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<RingBuffer>() == 16);
    assert!(size_of::<ResidentState>() == 1280);
    assert!(offset_of!(ResidentState, stop) == 128);
    assert!(offset_of!(ResidentState, buffers) == 256);
    assert!(size_of::<ResidentLaunch>() == 272);
    assert!(size_of::<RingLaunch>() == 48);
};

/// Length of `Gate` of abi.h, which is zero when an epoch begins.
pub const GATE_BYTES: u64 = 16;

/// `GateLaunch` of abi.h: the parameter of the kernel that lets one run of a rank's calls through at a time.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct GateLaunch {
    /// Device address of the rank's own [`ControlBlock`].
    pub control: u64,
    /// Of its gate.
    pub gate: u64,
    /// Of a word that has the number of calls of the run, for one that is being captured; 0 for the next field.
    pub calls: u64,
    /// Calls of the run.
    pub num_calls: u32,
    /// Lane `resident`: blocks that the resident kernel has for the rank; 0: the rank launches itself.
    pub ring_blocks: u32,
}

const _: () = assert!(size_of::<GateLaunch>() == 32);

/// A tensor of a command: a memory, and where in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// [`RING_ARENA`] or another.
    pub memory: u8,
    /// Multiple of the element's size.
    pub offset_bytes: u64,
}

/// The words of a command; `num_elems` fits 32 bits, since a slot does.
pub const fn command(
    dtype_code: u32,
    op: u32,
    src: RingPlace,
    dst: RingPlace,
    num_elems: u32,
) -> [u32; COMMAND_WORDS] {
    [
        dtype_code | op << 8 | (src.memory as u32) << 16 | (dst.memory as u32) << 24,
        num_elems,
        src.offset_bytes as u32,
        (src.offset_bytes >> 32) as u32,
        dst.offset_bytes as u32,
        (dst.offset_bytes >> 32) as u32,
    ]
}

/// The number that the kernels have for an element type; `None` for those they have not.
pub const fn dtype_code(dtype: Dtype) -> Option<u32> {
    match dtype {
        Dtype::F32 => Some(0),
        Dtype::F16 => Some(1),
        Dtype::Bf16 => Some(2),
        Dtype::F64 | Dtype::I32 | Dtype::I64 => None,
    }
}

/// Whether ranks are in islands that a hierarchical reduction is for: of more than one rank, and fewer than all.
pub const fn has_islands(world_size: u32, island_size: u32) -> bool {
    1 < island_size && island_size < world_size && world_size.is_multiple_of(island_size)
}

/// The regions of a window, by the capacities that are configured, and who shares it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regions {
    /// Number of ranks.
    pub world_size: u32,
    /// Ranks of an island, which are consecutive; divides `world_size`. Takes no room.
    pub island_size: u32,
    /// Bytes of one peer's push slot; a multiple of 32.
    pub push_slot_bytes: u64,
    /// Bytes of one in-band part; a multiple of 32.
    pub inband_part_bytes: u64,
    /// Bytes of one staging part; a multiple of 32.
    pub staging_part_bytes: u64,
}

impl Regions {
    /// Offset of the push region: 2 parities of a slot for each rank, all ones when an epoch begins.
    pub const fn push_offset(&self) -> u64 {
        SIGNAL_BYTES
    }

    /// Offset of the in-band region: 4 turns of 2 parts, all ones when an epoch begins.
    pub const fn inband_offset(&self) -> u64 {
        self.push_offset() + 2 * self.world_size as u64 * self.push_slot_bytes
    }

    /// Offset of the staging region: 2 parities of 2 parts.
    pub const fn staging_offset(&self) -> u64 {
        self.inband_offset() + 8 * self.inband_part_bytes
    }

    /// Length of the window.
    pub const fn len_bytes(&self) -> u64 {
        self.staging_offset() + 4 * self.staging_part_bytes
    }
}

#[cfg(all(test, feature = "kernels"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::Command;

    /// What abi.h says, by a C++ compiler.
    const PROGRAM: &str = r#"
#include "abi.h"
#include <cstdio>
#include <initializer_list>
using namespace allreduced;
int main() {
    printf("%u %u %llu %zu\n", ABI_VERSION, MAX_BLOCKS, SIGNAL_BYTES, sizeof(Control));
    const u64 counts[] = {0, 1, 7, 21504, 5000000000ull};
    for (u64 n : counts)
        for (u32 e : {2u, 4u}) {
            const Call c = make_call(16, 4096 + e, 8192, n, e, 3, CALL_DIRECT, 12, 224);
            printf("%u %u %u %u\n", c.signature, c.num_packs, c.src_whole_packs, c.dst_whole_packs);
        }
    printf("%llu\n", abort_word(REASON_SEQUENCE, 9, 0x1234567u, 77));
    printf("%zu %zu\n", AR_OFFSETOF(Signal, header), sizeof(Signal::header));
    printf("%zu %zu\n", sizeof(Gate), sizeof(GateLaunch));
}
"#;

    #[test]
    fn the_mirror_is_the_header() {
        let dir = std::env::temp_dir().join(format!("allreduced-abi-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("abi.cpp"), PROGRAM).unwrap();
        let built = Command::new("g++")
            .args(["-std=c++17", "-I"])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/cuda"))
            .arg(dir.join("abi.cpp"))
            .arg("-o")
            .arg(dir.join("abi"))
            .status();
        let Ok(built) = built else {
            println!("skipped: no g++");
            return;
        };
        assert!(built.success());
        let output = Command::new(dir.join("abi")).output().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        let mut expected =
            format!("{KERNEL_ABI_VERSION} {MAX_BLOCKS} {SIGNAL_BYTES} {CONTROL_BLOCK_BYTES}\n");
        for num_elems in [0, 1, 7, 21504, 5_000_000_000] {
            for elem_bytes in [2, 4] {
                let call = Call::new(CallParts {
                    control: 16,
                    src: 4096 + u64::from(elem_bytes),
                    dst: 8192,
                    num_elems,
                    elem_bytes,
                    op: 3,
                    flags: CALL_DIRECT,
                    blocks: 12,
                    data_threads: 224,
                });
                expected += &format!(
                    "{} {} {} {}\n",
                    call.signature, call.num_packs, call.src_whole_packs, call.dst_whole_packs
                );
            }
        }
        let abort = crate::window::Abort {
            reason: crate::window::AbortReason::Sequence,
            rank: 9,
            epoch: 0x0123_4567,
            sequence: 77,
        };
        expected += &format!("{}\n", abort.to_word());
        expected += &format!("{HEADERS_OFFSET} {HEADERS_LEN_BYTES}\n");
        expected += &format!("{GATE_BYTES} {}\n", size_of::<GateLaunch>());
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }

    #[test]
    fn the_build_has_an_image_where_it_found_nvcc() {
        let built_with_nvcc = env!("ALLREDUCED_BUILT_WITH_NVCC") == "true";
        println!("built with nvcc: {built_with_nvcc}");
        assert_eq!(fatbin().is_some(), built_with_nvcc);
        // The magic number of a fatbin, 0xba55ed50.
        let magic = fatbin().map(|image| image.starts_with(&[0x50, 0xed, 0x55, 0xba]));
        assert_ne!(magic, Some(false));
    }

    #[test]
    fn every_header_that_is_included_is_embedded() {
        let sources = HEADERS.iter().chain([&MAIN_SOURCE]);
        for (name, text) in sources {
            for line in text.lines().filter(|line| line.starts_with("#include \"")) {
                let included = line.split('"').nth(1).unwrap();
                // The other implementation of the memory operations, for a CPU.
                if included.starts_with("sim/") {
                    continue;
                }
                let known = HEADERS.iter().any(|(header, _)| *header == included);
                assert!(known, "{name}: {included}");
            }
        }
    }

    #[test]
    fn the_newest_call_is_that_of_the_later_parity() {
        let mut headers = vec![0_u8; HEADERS_LEN_BYTES];
        let mut write = |parity: usize, source: usize, number: u32, signature: u32| {
            let word = u64::from(number) | u64::from(signature) << 32;
            let at = (parity * MAX_RANKS + source) * 32;
            headers
                .get_mut(at..at + 8)
                .unwrap()
                .copy_from_slice(&word.to_le_bytes());
        };
        write(0, 0, 4, 9);
        write(1, 0, 5, u32::MAX);
        write(0, 1, 6, 1);
        write(1, 1, 5, 1);
        // The numbers wrap.
        write(0, 15, 0, 7);
        write(1, 15, u32::MAX, 7);
        let newest = newest_calls(&headers);
        let mut expected = vec![0; MAX_RANKS];
        expected.splice(..2, [5, 6]);
        assert_eq!(newest, expected);
        assert_eq!(newest_calls(&[]), Vec::<u32>::new());
    }

    #[test]
    fn every_world_size_has_an_instance() {
        let names: Vec<&str> = (1..=16)
            .map(|ranks| Instance::of(WorldSize::new(ranks).unwrap()).name())
            .collect();
        let expected = [
            "w4", "n2", "w4", "n4", "w8", "w8", "w8", "n8", "w16", "w16", "w16", "w16", "w16",
            "w16", "w16", "w16",
        ];
        assert_eq!(names, expected);
    }
}
