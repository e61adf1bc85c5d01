// What the host and the kernels agree on: launch parameters, control block, window layout, abort word.
//
// Owns the layout and nothing else; every struct is mirrored field by field by the host side, and both
// sides assert sizes and offsets. Included by nvcc, NVRTC and g++, so it includes nothing itself.
//
// Terms: *epoch* is the incarnation of the communicator's membership, written by the host. *sequence*
// is the number of the call within the epoch; it lives on the device and advances by one on every
// call, whatever its grid or count, empty calls and failed calls too. Ranks run the same calls in the
// same order, so equal sequence numbers name the same call on every rank.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AR_BOTH __host__ __device__
#else
#define AR_BOTH
#endif
#if defined(__CUDACC_RTC__)
#define AR_OFFSETOF(type, member) __INTADDR__(&(((type*)0)->member))
#else
#define AR_OFFSETOF(type, member) __builtin_offsetof(type, member)
#endif

namespace allreduced {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ABI_VERSION = 2;
constexpr u32 MAX_WORLD_SIZE = 16;
// Upper bound of gridDim.x, the blocks of one rank; the flag arrays of a window have this many rows.
constexpr u32 MAX_BLOCKS = 128;
// Bytes of a pack, the unit of every fast path: staging is addressed in packs, and a call's last pack
// is padded with zeros.
constexpr u32 PACK_BYTES = 16;

enum Algorithm : u32 {
    ONE_SHOT_PUSH = 0,
    ONE_SHOT_PULL = 1,
    ONE_SHOT_PULL_INBAND = 2,
    TWO_SHOT_PUSH = 3,
    TWO_SHOT_PULL = 4,
    TWO_SHOT_PULL_INBAND = 5,
    HIERARCHICAL = 6,
};

enum Dtype : u32 { DTYPE_F32 = 0, DTYPE_F16 = 1, DTYPE_BF16 = 2 };

enum Op : u32 { OP_SUM = 0, OP_AVG = 1, OP_MIN = 2, OP_MAX = 3 };

// Why a call failed. Fits four bits and is never zero: a zero abort word means "none".
enum Reason : u32 {
    // The deadline passed while waiting for the named rank.
    REASON_TIMEOUT = 1,
    // The named rank runs another call: algorithm, launch shape, count, dtype, op or epoch differ.
    REASON_MISMATCH = 2,
    // The named rank is ahead by a whole call: it skipped one, or ran one too many.
    REASON_SEQUENCE = 3,
    // The named rank's own launch is outside the limits of its control block (capacity, world size,
    // grid).
    REASON_BAD_CALL = 4,
    // Written by the host: the named rank left or was evicted, or the executor stops.
    REASON_HOST = 5,
    // The named rank began calls while others of its own were under way: two graphs at once, or a call beside a graph.
    REASON_OVERLAP = 6,
};

// Abort word and status word: one 64-bit store, so a reader sees all of it or nothing.
//   bits  0..31  sequence of the call that failed
//   bits 32..55  epoch, modulo 2^24
//   bits 56..59  rank that is missing or at fault
//   bits 60..63  Reason
AR_BOTH constexpr u64 abort_word(u32 reason, u32 rank, u32 epoch, u32 sequence) {
    return (u64)sequence | ((u64)(epoch & 0xffffffu) << 32) | ((u64)(rank & 15u) << 56) |
           ((u64)(reason & 15u) << 60);
}

// Call::flags.
// The source is readable by every peer (window arena, or memory that the launching process has mapped
// for all ranks): pull it in place instead of staging it. All ranks set it or none does; it is part
// of the signature. Ignored by the push algorithms.
constexpr u32 CALL_DIRECT = 1u << 0;
// `src` / `dst` are byte offsets from the rank's own arena base instead of addresses, so that a
// captured call survives re-forming, which moves the arena.
constexpr u32 CALL_SRC_IN_ARENA = 1u << 1;
constexpr u32 CALL_DST_IN_ARENA = 1u << 2;
// A call of the resident kernel: if it fails, who has rung fills the output, once every block has said so.
constexpr u32 CALL_RUNG = 1u << 3;

// One rank's part of one all-reduce. The last four words follow from the others and the launch shape;
// the host computes them (make_call), because what a kernel runs before its first load is its slowest code.
struct Call {
    u64 control;    // device address of the rank's Control
    u64 src;        // address (or arena offset) of num_elems elements; element-aligned
    u64 dst;        // likewise; equal to src (in place) or disjoint from it
    u64 num_elems;  // elements, may be 0
    u32 op;         // Op
    u32 flags;      // CALL_*
    u32 signature;  // call_signature
    u32 num_packs;  // ceil(num_elems / elements of a pack)
    u32 src_whole_packs;  // packs of src that are one aligned access: 0 if src is not 16-byte aligned,
    u32 dst_whole_packs;  // else floor(num_elems / elements of a pack); arenas are 16-byte aligned
};
static_assert(sizeof(Call) == 56, "ABI");
static_assert(AR_OFFSETOF(Call, op) == 32, "ABI");
static_assert(AR_OFFSETOF(Call, src_whole_packs) == 48, "ABI");

// Most packs of one call: 32 GiB.
constexpr u32 MAX_PACKS = 0x7fffffffu;

// What all ranks must agree on before any data is used; the kernel adds algorithm, dtype and epoch.
AR_BOTH constexpr u32 signature_mix(u32 h, u32 v) { return ((h ^ v) * 0x9e3779b1u) ^ (((h ^ v) * 0x9e3779b1u) >> 15); }
AR_BOTH constexpr u32 call_signature(u32 op, u32 flags, u64 num_elems, u32 blocks, u32 data_threads) {
    return signature_mix(
        signature_mix(signature_mix(signature_mix(0x811c9dc5u, op | (flags & CALL_DIRECT) << 8), (u32)num_elems), (u32)(num_elems >> 32)),
        blocks | data_threads << 16);
}
// num_elems must not exceed MAX_PACKS packs.
AR_BOTH constexpr Call make_call(u64 control, u64 src, u64 dst, u64 num_elems, u32 elem_bytes, u32 op, u32 flags, u32 blocks,
                                 u32 data_threads) {
    const u32 pack = PACK_BYTES / elem_bytes;
    return Call{control, src, dst, num_elems, op, flags, call_signature(op, flags, num_elems, blocks, data_threads),
                (u32)((num_elems + pack - 1) / pack), src % PACK_BYTES ? 0u : (u32)(num_elems / pack),
                dst % PACK_BYTES ? 0u : (u32)(num_elems / pack)};
}

// The single kernel parameter. blockIdx.y selects the entry: ranks that share a GPU go into one launch
// of gridDim.y ranks; a lone rank uses entry 0.
struct Launch {
    Call calls[MAX_WORLD_SIZE];
};
static_assert(sizeof(Launch) == 896, "ABI");

// What a block carries from call to call. Each block reads its own at the start of a call and writes it
// at the end; block 0 writes those of blocks that this call's grid does not have, so all advance alike.
struct BlockState {
    u32 sequence;  // of the last call; stored last: it also says that the block has finished it
    u32 turn;      // of the last in-band pull
    u32 dirty_input_packs;  // what that turn left behind in its slot's two parts
    u32 dirty_result_packs;
};
static_assert(sizeof(BlockState) == 16, "ABI");

// A rank's control block, in device memory of the process that launches, 16-byte aligned. Captured graphs hold its
// address only; re-forming rewrites what it points to. The host writes it while no call is in flight.
struct Control {
    u32 abi_version;
    u32 world_size;
    u32 rank;
    u32 epoch;
    u64 timeout_ns;  // longest wait of one call, by %globaltimer
    u64 status;      // address of the rank's status word in host-mapped memory; written, never read
    // Regions of a window: offsets from its base, the same for every rank, multiples of 16; sizes in
    // bytes, multiples of 32. See "Window" below.
    u64 push_offset;
    u64 push_slot_bytes;
    u64 inband_offset;
    u64 inband_part_bytes;
    u64 staging_offset;
    u64 staging_part_bytes;
    u32 failed;      // set by the device: a call of this epoch failed here, later ones touch no window
    // HIERARCHICAL: ranks of an island. Rank r is at place r % island_size of island r / island_size; it divides world_size,
    // else (0 too) the call is a BAD_CALL. Part of the signature. Others do not read it.
    u32 island_size;
    u64 wake;        // lane resident, the rank's: address of the wake word in host-mapped memory
    u32 reserved1[8];
    u64 window[MAX_WORLD_SIZE];  // base of each rank's window, as mapped in this process
    u64 arena[MAX_WORLD_SIZE];   // base of each rank's arena, likewise; direct sources are relative to it

    // From here on owned by the device; zeroed by the host when an epoch begins.
    u32 abandoned[2];        // blocks that have failed and seen all others finish, by sequence parity
    u32 reserved2[30];
    BlockState blocks[MAX_BLOCKS];
};
constexpr u32 CONTROL_COPY_BYTES = 384;  // what a call reads, most of it: all before `abandoned`
static_assert(sizeof(Control) == 2560, "ABI");
static_assert(AR_OFFSETOF(Control, timeout_ns) == 16, "ABI");
static_assert(AR_OFFSETOF(Control, push_offset) == 32, "ABI");
static_assert(AR_OFFSETOF(Control, failed) == 80, "ABI");
static_assert(AR_OFFSETOF(Control, island_size) == 84, "ABI");
static_assert(AR_OFFSETOF(Control, wake) == 88, "ABI");
static_assert(AR_OFFSETOF(Control, window) == 128, "ABI");
static_assert(AR_OFFSETOF(Control, arena) == 256, "ABI");
static_assert(AR_OFFSETOF(Control, abandoned) == CONTROL_COPY_BYTES, "ABI");
static_assert(AR_OFFSETOF(Control, blocks) == 512, "ABI");

// Window of a rank: signal area, then the regions named by Control, then the arena.
//
//   signal   SIGNAL_BYTES, zeroed at the start of an epoch
//   push     2 parities x world_size sources x push_slot_bytes, all bytes 0xff at the start
//   inband   4 turns x 2 parts (input, result) x inband_part_bytes, all bytes 0xff at the start
//   staging  2 parities x 2 parts (input, result) x staging_part_bytes, any content
//
// Largest tensor (padded to packs) per algorithm:
//   one_shot_push         push_slot_bytes
//   two_shot_push         world_size slices of push_slot_bytes / 2
//   hierarchical          island_size slices of push_slot_bytes / 2
//   one/two_shot_pull_inband   inband_part_bytes (direct two-shot: world_size slices of it)
//   one/two_shot_pull     staging_part_bytes (direct, not in place: one-shot unlimited,
//                         two-shot world_size slices of it)

// One 32-byte header per (parity, source), written by the source into every peer's window: its hello
// for a call. Each word carries the sequence in its low half, so no word depends on another's arrival.
struct Header {
    u64 call;       // sequence | signature << 32
    u64 source_lo;  // sequence | low half of the source's arena offset << 32 (direct only)
    u64 source_hi;  // sequence | high half << 32 (direct only)
    u64 reserved;
};

struct Signal {
    u64 abort;  // 0, or the abort_word that ended the epoch
    u64 reserved0[15];
    Header header[2][MAX_WORLD_SIZE];           // by sequence parity and source
    u32 ready[MAX_BLOCKS][MAX_WORLD_SIZE];      // sequence, by block and source
    u32 done[MAX_BLOCKS][MAX_WORLD_SIZE];       // likewise
};
constexpr u64 SIGNAL_BYTES = 32768;
static_assert(sizeof(Header) == 32, "ABI");
static_assert(AR_OFFSETOF(Signal, header) == 128, "ABI");
static_assert(AR_OFFSETOF(Signal, ready) == 1152, "ABI");
static_assert(AR_OFFSETOF(Signal, done) == 9344, "ABI");
static_assert(sizeof(Signal) == 17536 && sizeof(Signal) <= SIGNAL_BYTES, "ABI");

// Lane resident: a kernel of the executor that stays, rung by a kernel of the rank through the rank's window.
// kernels/README.md, "The resident kernel", has the protocol.

// Most blocks that a resident kernel has for a rank: a lane of the ringing warp looks after each.
constexpr u32 MAX_RING_BLOCKS = 32;
// Memories of a rank that a resident kernel may be told to read and write.
constexpr u32 MAX_RING_BUFFERS = 64;
// Words of a command, by index:
//   0  dtype | op << 8 | source's memory << 16 | destination's memory << 24
//   1  num_elems
//   2, 3  byte offset of the source in its memory, low and high half
//   4, 5  byte offset of the destination
constexpr u32 COMMAND_WORDS = 6;

// In the rank's window at RING_OFFSET; the rank's process has it mapped.
struct Ring {
    u64 command[8];  // sequence << 32 | word, each by itself; COMMAND_WORDS of them
    u64 reserved[8];
    u32 done[MAX_RING_BLOCKS];    // by block: the sequence, modulo 2^31, | RING_FAILED
    u32 parked[MAX_RING_BLOCKS];  // by block: 0, or, as it is about to end, the launch that the next command needs
};
constexpr u64 RING_OFFSET = 24576;
constexpr u32 RING_FAILED = 1u << 31;
static_assert(sizeof(Ring) == 384 && RING_OFFSET >= sizeof(Signal) && RING_OFFSET + sizeof(Ring) <= SIGNAL_BYTES, "ABI");
static_assert(AR_OFFSETOF(Ring, done) == 128, "ABI");
static_assert(AR_OFFSETOF(Ring, parked) == 256, "ABI");

// A memory, as the executor has it mapped. Offsets of a command must lie inside.
struct RingBuffer {
    u64 start;
    u64 len_bytes;
};

// What a rank's blocks of resident kernels leave for the next, and what the executor tells them. The executor's alone.
struct ResidentState {
    u32 exited[MAX_RING_BLOCKS];  // by block: the last launch of which it has ended
    u32 stop;                     // launches up to this one end as soon as no command is there; STOP_ALL: whatever peers do
    u32 reserved[31];
    RingBuffer buffers[MAX_RING_BUFFERS];
};
static_assert(sizeof(ResidentState) == 1280, "ABI");
static_assert(AR_OFFSETOF(ResidentState, stop) == 128, "ABI");
static_assert(AR_OFFSETOF(ResidentState, buffers) == 256, "ABI");

constexpr u32 STOP_ALL = 0xffffffffu;

struct ResidentRank {
    u64 control;  // of the executor
    u64 state;    // ResidentState
};
// The parameter of a resident kernel. blockIdx.y selects the rank.
struct ResidentLaunch {
    u32 launch;   // counts from 1 in the epoch
    u32 reserved;
    u64 idle_ns;  // a block ends when no command has come for so long
    ResidentRank ranks[MAX_WORLD_SIZE];
};
static_assert(sizeof(ResidentLaunch) == 272, "ABI");

// The parameter of the kernel that rings: one warp of the rank.
struct RingLaunch {
    u64 control;  // the rank's own
    u64 dst;      // the destination in the rank's process, for NaN if the reduction fails
    u32 command[COMMAND_WORDS];
    u32 blocks;   // of the resident kernel, for this rank
    u32 reserved;
};
static_assert(sizeof(RingLaunch) == 48, "ABI");

// Lets one run of a rank's calls through at a time. In memory of the process that launches; zero when an epoch begins.
struct Gate {
    u32 until;  // the number of the last call of the newest run that was let through
    u32 reserved[3];
};
static_assert(sizeof(Gate) == 16, "ABI");

// The parameter of allreduced_gate: one warp of the rank, before the first call of a run. See gate.cuh.
struct GateLaunch {
    u64 control;      // the rank's own
    u64 gate;         // Gate
    u64 calls;        // address of a u32, the calls of the run, for one that is being captured; 0: num_calls has them
    u32 num_calls;
    u32 ring_blocks;  // lane resident: blocks of the kernel that stays, for this rank; 0: the rank launches
};
static_assert(sizeof(GateLaunch) == 32, "ABI");

// The parameter of allreduced_reduce_copied_<dtype>: tensors that are all here already, reduced in rank order. No rank is
// waited for, no window touched. world_size 1..=MAX_WORLD_SIZE and op an Op, else the whole of dst becomes NaN.
struct ReduceCopied {
    u64 sources[MAX_WORLD_SIZE];  // addresses of num_elems elements, element-aligned; in rank order
    u64 dst;                      // likewise; equal to any source or disjoint from it
    u64 num_elems;                // may be 0
    u32 world_size;
    u32 op;                       // Op
    u64 abort;                    // address of the rank's own abort word (Signal::abort): the output is NaN if it is set; 0: none
};
static_assert(sizeof(ReduceCopied) == 160, "ABI");
static_assert(AR_OFFSETOF(ReduceCopied, dst) == 128, "ABI");
static_assert(AR_OFFSETOF(ReduceCopied, num_elems) == 136, "ABI");
static_assert(AR_OFFSETOF(ReduceCopied, world_size) == 144, "ABI");
static_assert(AR_OFFSETOF(ReduceCopied, op) == 148, "ABI");
static_assert(AR_OFFSETOF(ReduceCopied, abort) == 152, "ABI");
// Most threads of its blocks.
constexpr u32 REDUCE_COPIED_THREADS = 512;

// The word that marks "not yet arrived" in the push and inband regions.
constexpr u32 EMPTY_WORD = 0xffffffffu;

}  // namespace allreduced
