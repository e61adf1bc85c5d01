// Runs the CUDA kernel sources on the CPU: ranks, blocks and threads are std::threads.
//
//   harness [quick|full] [conform|abort|all]
//
// Conform: every algorithm, dtype, op, world size 2..=8, every island size that divides it, odd sizes, odd alignment, in and out
// of place, alternating sizes and grids, repeated calls, a slow rank; results bit for bit against a scalar
// reference, guard bytes around every output. And reduce_copied, likewise. Abort: an abort raised at every wait, a stalled
// rank, mismatching calls, capacity, island sizes that are none, re-forming. Exit 0: all passed. A watchdog ends what hangs.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "../hierarchical.cuh"
#include "../reduce_copied.cuh"
#include "../two_shot.cuh"
#include "reference.hpp"

using namespace allreduced;

namespace {

constexpr u32 DATA_THREADS = 2, THREADS = DATA_THREADS + SERVICE_THREADS, BLOCKS = 2;
constexpr u64 SLOT_BYTES = 4096, PART_BYTES = 2048, ARENA_BYTES = 16384;
constexpr u64 GUARD = 64;
#if !defined(AR_TIMEOUT_MS)
#define AR_TIMEOUT_MS 60000
#endif
#if !defined(AR_ONLY)  // a mutation's build needs only the variant it breaks
#define AR_ONLY -1
#endif

using Kernel = void (*)(Shared*, const Call&);
template <class T>
Kernel pick(u32 algorithm, u32 w) {
#define ROW(F)                                                                                                     \
    (w == 2 ? F<T, 2, true> : w == 4 ? F<T, 4, true> : w == 8 ? F<T, 8, true> : w < 4 ? F<T, 4, false> : w < 8 ? F<T, 8, false> : F<T, 16, false>)
    switch (algorithm) {
        case ONE_SHOT_PUSH: return ROW(one_shot_push);
        case ONE_SHOT_PULL: return ROW(one_shot_pull);
        case ONE_SHOT_PULL_INBAND: return ROW(one_shot_pull_inband);
        case TWO_SHOT_PUSH: return ROW(two_shot_push);
        case TWO_SHOT_PULL: return ROW(two_shot_pull);
        case HIERARCHICAL: return ROW(hierarchical);
        default: return ROW(two_shot_pull_inband);
    }
#undef ROW
}
Kernel pick(u32 algorithm, u32 dtype, u32 w) {
    return dtype == DTYPE_F32 ? pick<F32>(algorithm, w) : dtype == DTYPE_F16 ? pick<F16>(algorithm, w) : pick<BF16>(algorithm, w);
}

struct Variant {
    u32 algorithm;
    bool direct;
    const char* name;
};
const Variant VARIANTS[] = {
    {ONE_SHOT_PUSH, false, "one_shot_push"},
    {ONE_SHOT_PULL, false, "one_shot_pull"},
    {ONE_SHOT_PULL, true, "one_shot_pull/direct"},
    {ONE_SHOT_PULL_INBAND, false, "one_shot_pull_inband"},
    {TWO_SHOT_PUSH, false, "two_shot_push"},
    {TWO_SHOT_PULL, false, "two_shot_pull"},
    {TWO_SHOT_PULL, true, "two_shot_pull/direct"},
    {TWO_SHOT_PULL_INBAND, false, "two_shot_pull_inband"},
    {TWO_SHOT_PULL_INBAND, true, "two_shot_pull_inband/direct"},
    {HIERARCHICAL, false, "hierarchical"},
};
constexpr u32 NUM_VARIANTS = sizeof VARIANTS / sizeof *VARIANTS;
const char* DTYPE_NAMES[] = {"f32", "f16", "bf16"};

enum class Expect { exact, exact_or_nan, nan };

struct Step {
    u32 algorithm = 0;
    bool direct = false;
    u32 dtype = 0, op = 0;
    u64 num_elems = 0;
    u32 grid = BLOCKS;
    bool in_place = false, in_arena = false;
    u32 src_skew = 0, dst_skew = 0;  // elements off 16-byte alignment
    int slow_rank = -1;
    int absent_rank = -1;    // does not run this call
    int different_rank = -1;  // runs it with another op
    int arm_site = -1;       // abort raised when arm_rank waits here
    u32 arm_rank = 0;
    Expect expect = Expect::exact;
    Expect expect_armed = Expect::exact;  // of arm_rank / different_rank
    bool reform = false;     // before the call: new windows, next epoch
    u64 seed = 0;
    std::vector<std::vector<uint8_t>> inputs;
    std::vector<uint8_t> want;
};

int failures = 0;
std::atomic<long> calls_run{0};
std::mutex* print_lock = new std::mutex;
#define FAIL(...)                                  \
    do {                                           \
        std::lock_guard<std::mutex> l(*print_lock); \
        if (failures++ < 20) {                     \
            printf("FAIL ");                       \
            printf(__VA_ARGS__);                   \
            printf("\n");                          \
            fflush(stdout);                        \
        }                                          \
    } while (0)

struct Free {
    void operator()(uint8_t* p) const { free(p); }
};
using Bytes = std::unique_ptr<uint8_t, Free>;
Bytes make_bytes(size_t n) { return Bytes((uint8_t*)aligned_alloc(256, (n + 255) / 256 * 256)); }

// A communicator of virtual ranks and the threads that run its steps.
struct World {
    std::string name;
    u32 n;
    u64 timeout_ns = AR_TIMEOUT_MS * 1000000ull;
    u32 first_sequence = 0;
    std::vector<Step> steps;
    std::vector<Bytes> windows, retired;
    std::vector<std::unique_ptr<Control>> controls;
    std::vector<u64> status;
    u64 arena_offset = 0;
    u32 epoch = 0;
    u32 island_size = 1;  // of all ranks, but for:
    int odd_rank = -1;
    u32 odd_island_size = 0;

    struct RankState {
        std::vector<std::unique_ptr<sim::BlockState>> blocks;
        std::vector<std::unique_ptr<Shared>> shared;
        std::unique_ptr<std::barrier<>> boundary;
        Launch launch;
        uint8_t* dst = nullptr;
        uint8_t* src = nullptr;
    };
    std::vector<RankState> ranks;
    std::unique_ptr<std::barrier<>> step_barrier;  // of rank leaders, only around re-forming and arming

    World(std::string name_, u32 n_, u32 island_size_ = 1) : name(std::move(name_)), n(n_), island_size(island_size_) {}

    void form() {
        epoch++;
        for (auto& w : windows) retired.push_back(std::move(w));
        windows.clear();
        const u64 push = SIGNAL_BYTES, inband = push + 2 * n * SLOT_BYTES, staging = inband + 8 * PART_BYTES;
        arena_offset = staging + 4 * PART_BYTES;
        status.assign(n, 0);
        for (u32 r = 0; r < n; r++) {
            windows.push_back(make_bytes(arena_offset + ARENA_BYTES));
            memset(windows[r].get(), 0, SIGNAL_BYTES);
            memset(windows[r].get() + push, 0xff, staging - push);
            memset(windows[r].get() + staging, 0x5a, 4 * PART_BYTES + ARENA_BYTES);
            Signal* s = (Signal*)windows[r].get();
            if (first_sequence)
                for (u32 p = 0; p < 2; p++)
                    for (u32 q = 0; q < n; q++) s->header[p][q] = {first_sequence, first_sequence, first_sequence, 0};
            for (u32 b = 0; b < MAX_BLOCKS; b++)
                for (u32 q = 0; q < n; q++) s->ready[b][q] = s->done[b][q] = first_sequence;
        }
        if (controls.empty())
            for (u32 r = 0; r < n; r++) controls.push_back(std::make_unique<Control>());
        for (u32 r = 0; r < n; r++) {
            Control& c = *controls[r];
            memset(&c, 0, sizeof c);
            c.abi_version = ABI_VERSION;
            c.world_size = n;
            c.rank = r;
            c.epoch = epoch;
            c.timeout_ns = timeout_ns;
            c.status = (u64)&status[r];
            c.push_offset = push;
            c.push_slot_bytes = SLOT_BYTES;
            c.inband_offset = inband;
            c.inband_part_bytes = PART_BYTES;
            c.staging_offset = staging;
            c.staging_part_bytes = PART_BYTES;
            c.island_size = (int)r == odd_rank ? odd_island_size : island_size;
            for (u32 p = 0; p < n; p++) {
                c.window[p] = (u64)windows[p].get();
                c.arena[p] = c.window[p] + arena_offset;
            }
            for (BlockState& state : c.blocks) state.sequence = first_sequence;
        }
    }

    // Leader of a rank, before the call: fills its input and the guard bytes, builds the launch.
    void prepare(u32 r, Step& s) {
        RankState& rank = ranks[r];
        const u64 size = reference::size_of((reference::Dtype)s.dtype), bytes = s.num_elems * size;
        uint8_t* arena = windows[r].get() + arena_offset;
        rank.src = arena + GUARD + s.src_skew * size;
        rank.dst = s.in_place ? rank.src : arena + ARENA_BYTES / 2 + GUARD + s.dst_skew * size;
        memset(arena, 0xcc, ARENA_BYTES);
        if (bytes) memcpy(rank.src, s.inputs[r].data(), bytes);
        rank.launch.calls[0] = make_call((u64)controls[r].get(), (u64)rank.src - (s.in_arena ? (u64)arena : 0),
                                         (u64)rank.dst - (s.in_arena ? (u64)arena : 0), s.num_elems, (u32)size, s.different_rank == (int)r ? (s.op ^ 1) : s.op,
                                         (s.direct ? CALL_DIRECT : 0) | (s.in_arena ? CALL_SRC_IN_ARENA | CALL_DST_IN_ARENA : 0), s.grid, DATA_THREADS);
    }

    void check(u32 r, const Step& s, size_t index) {
        RankState& rank = ranks[r];
        const auto d = (reference::Dtype)s.dtype;
        const u64 size = reference::size_of(d), bytes = s.num_elems * size;
        const bool special = (s.arm_site >= 0 && r == s.arm_rank) || (int)r == s.different_rank;
        const Expect expect = special ? s.expect_armed : s.expect;
        bool exact = bytes == 0 || memcmp(rank.dst, s.want.data(), bytes) == 0, nan = true;
        for (u64 i = 0; i < s.num_elems; i++) nan &= reference::get(d, rank.dst, i) == reference::canonical_nan(d);
        const bool ok = expect == Expect::exact ? exact : expect == Expect::nan ? nan : exact || nan;
        if (!ok) {
            u64 bad = 0, first = 0;
            for (u64 i = s.num_elems; i-- > 0;)
                if (memcmp(rank.dst + i * size, &s.want[i * size], size) != 0) bad++, first = i;
            FAIL("%s step %zu rank %u (elems %llu op %u grid %u): %llu wrong from %llu, expected %s; got %x want %x", name.c_str(), index, r,
                 s.num_elems, s.op, s.grid, bad, first, expect == Expect::exact ? "exact" : expect == Expect::nan ? "NaN" : "exact or NaN",
                 bad ? reference::get(d, rank.dst, first) : 0, bad ? reference::get(d, s.want.data(), first) : 0);
        }
        for (u64 i = 1; i <= 16; i++)
            if (rank.dst[-(long)i] != 0xcc || rank.dst[bytes + i - 1] != 0xcc) {
                FAIL("%s step %zu rank %u: guard bytes written", name.c_str(), index, r);
                break;
            }
        // The caller may overwrite its input as soon as the call is over.
        if (bytes) memset(rank.src, 0xa5, bytes);
    }

    void thread_main(u32 r, u32 block, u32 t) {
        RankState& rank = ranks[r];
        const bool leader = block == 0 && t == 0;
        for (size_t i = 0; i < steps.size(); i++) {
            Step& s = steps[i];
            if (leader) {
                if (s.reform || s.arm_site >= 0 || s.absent_rank >= 0) {
                    step_barrier->arrive_and_wait();
                    if (r == 0) {
                        sim::armed.on = false;
                        if (s.reform) form();
                        if (s.arm_site >= 0) {
                            sim::armed.hit = false;
                            sim::armed.rank = s.arm_rank;
                            sim::armed.site = (u32)s.arm_site;
                            sim::armed.world_size = n;
                            sim::armed.word = abort_word(REASON_HOST, s.arm_rank, epoch, 0);
                            for (u32 p = 0; p < n; p++) sim::armed.abort_address[p] = (u64)windows[p].get();
                            sim::armed.on.store(true, std::memory_order_release);
                        }
                    }
                    step_barrier->arrive_and_wait();
                }
                prepare(r, s);
                if (s.slow_rank == (int)r) usleep(3000);
            }
            rank.boundary->arrive_and_wait();
            if (block < s.grid && s.absent_rank != (int)r) {
                sim::self = {rank.blocks[block].get(), t, block, 0, s.grid, THREADS, 0};
                pick(s.algorithm, s.dtype, n)(rank.shared[block].get(), rank.launch.calls[0]);
                // Phases of the OR barrier restart with each call: empty its cells for the next.
            }
            rank.boundary->arrive_and_wait();
            if (leader) {
                for (auto& b : rank.blocks)
                    for (auto& a : b->any) a.store(0, std::memory_order_relaxed);
#if defined(__SANITIZE_THREAD__)
                // A failed rank's caller overwrites a direct input while a peer, whose call fails too, may
                // still read it: meant, and tested without the sanitizer, which would call it a race.
                if (s.direct && s.expect != Expect::exact) step_barrier->arrive_and_wait();
#endif
                if (s.absent_rank != (int)r) {
                    check(r, s, i);
                    calls_run++;
                }
            }
        }
    }

    void run() {
        if (first_sequence == 0 || epoch == 0) form();
        for (Step& s : steps) {
            const auto d = (reference::Dtype)s.dtype;
            const u64 size = reference::size_of(d);
            std::vector<const uint8_t*> in;
            s.inputs.resize(n);
            for (u32 r = 0; r < n; r++) {
                s.inputs[r].resize(s.num_elems * size + 1);
                reference::fill(d, s.inputs[r].data(), s.num_elems, s.seed * 64 + r, n > 4 ? 32 : 12);
                in.push_back(s.inputs[r].data());
            }
            const bool tree = s.algorithm == HIERARCHICAL && island_size != 0 && n % island_size == 0;
            s.want = reference::reduce_tree(d, (reference::Op)s.op, in, s.num_elems, tree ? island_size : n);
            if (tree && (island_size == 1 || island_size == n) && s.want != reference::reduce(d, (reference::Op)s.op, in, s.num_elems))
                FAIL("%s: the reference's tree is not flat", name.c_str());
        }
        ranks.resize(n);
        step_barrier = std::make_unique<std::barrier<>>(n);
        std::vector<std::thread> threads;
        for (u32 r = 0; r < n; r++) {
            ranks[r].boundary = std::make_unique<std::barrier<>>(BLOCKS * THREADS);
            for (u32 b = 0; b < BLOCKS; b++) {
                ranks[r].blocks.push_back(std::make_unique<sim::BlockState>(THREADS));
                ranks[r].shared.push_back(std::make_unique<Shared>());
            }
        }
        for (u32 r = 0; r < n; r++)
            for (u32 b = 0; b < BLOCKS; b++)
                for (u32 t = 0; t < THREADS; t++) threads.emplace_back([=, this] { thread_main(r, b, t); });
        for (auto& t : threads) t.join();
        sim::armed.on = false;
    }
};

void expect_status(World& w, u32 reason, int blamed, const char* what, int except_rank = -1) {
    for (u32 r = 0; r < w.n; r++) {
        if ((int)r == except_rank) continue;
        const u64 s = w.status[r];
        if ((s >> 60) != reason || (blamed >= 0 && (s >> 56 & 15) != (u64)blamed))
            FAIL("%s %s: rank %u status %016llx, want reason %u rank %d", w.name.c_str(), what, r, s, reason, blamed);
    }
}

const u64 SIZES[] = {257, 0, 1, 64, 7, 511, 33, 8, 129, 0, 500, 3, 256, 65};
constexpr u32 NUM_SIZES = sizeof SIZES / sizeof *SIZES;

// One communicator, one algorithm.
void conform_world(const Variant& v, u32 d, u32 n, u32 island_size, u32 count, u64& seed) {
    World w(std::string(v.name) + " " + DTYPE_NAMES[d] + " n=" + std::to_string(n) + "/" + std::to_string(island_size), n, island_size);
    if (d == 1) w.first_sequence = 0xfffffff8u;  // wraps during the test
    for (u32 i = 0; i < count; i++) {
        Step s;
        s.algorithm = v.algorithm;
        s.direct = v.direct;
        s.dtype = d;
        s.op = (i + i / 4) % 4;
        s.num_elems = SIZES[(i + n) % NUM_SIZES];
        s.grid = 1 + (i % 3 != 1);
        s.in_place = i % 2;
        s.in_arena = i % 4 >= 2;
        s.src_skew = i % 5 == 3 ? 1 : 0;
        s.dst_skew = i % 5 == 4 ? 3 : 0;
        s.slow_rank = i % 3 == 0 ? (int)(i / 3 % n) : -1;
        s.seed = seed++;
#if defined(AR_MUTATE_STALLED_RANK)
        if (i == 5) s.absent_rank = 1;
#endif
        w.steps.push_back(s);
    }
    w.run();
    for (u32 r = 0; r < n; r++)
        if (w.status[r]) FAIL("%s rank %u: status %016llx", w.name.c_str(), r, w.status[r]);
}

void conform(bool full) {
    const u32 count = full ? 2 * NUM_SIZES : NUM_SIZES;
    u64 seed = 1;
    for (u32 n = 2; n <= MAX_WORLD_SIZE; n++)
        for (u32 d = 0; d < 3; d++)
            for (const Variant& v : VARIANTS) {
                if (AR_ONLY >= 0 && &v != &VARIANTS[AR_ONLY < 0 ? 0 : AR_ONLY]) continue;
                const bool islands = v.algorithm == HIERARCHICAL;
                // Quick: each world size meets each algorithm with one dtype, rotating; the one with islands with all. Worlds of
                // more than 8 (full: 9) are for islands only, where they have many.
                if (n > (full ? 9u : 8u) && !(islands && d == n / 4 % 3 && (n == 12 || n == 16))) continue;
                if (!full && !islands && (n + v.algorithm + v.direct) % 3 != d) continue;
                for (u32 island_size = islands ? 1 : n; island_size <= n; island_size++)
                    if (n % island_size == 0) conform_world(v, d, n, island_size, count, seed);
            }
    // One communicator, all algorithms in turn: they share sequence, parity and slots.
    const u32 mixed[][2] = {{2, 2}, {3, 1}, {5, 5}, {6, 2}};
    for (const auto& [n, island_size] : mixed) {
        if (AR_ONLY >= 0) break;
        World w("mixed n=" + std::to_string(n) + "/" + std::to_string(island_size), n, island_size);
        for (u32 i = 0; i < (full ? 80u : 30u); i++) {
            const Variant& v = VARIANTS[(i * 3) % NUM_VARIANTS];
            Step s;
            s.algorithm = v.algorithm;
            s.direct = v.direct;
            s.dtype = i % 3;
            s.op = i % 4;
            s.num_elems = SIZES[i % NUM_SIZES];
            s.grid = 1 + i % 2;
            s.in_place = i % 2;
            s.slow_rank = i % 4 == 0 ? (int)(i % n) : -1;
            s.seed = seed++;
            w.steps.push_back(s);
        }
        w.run();
    }
}

// No communicator: each thread of each block in turn.
void copied(bool full) {
    const u64 sizes[] = {0, 1, 7, 8, 33, 257, 1000};
    u64 seed = 5000;
    std::vector<Bytes> memories;
    for (u32 r = 0; r <= MAX_WORLD_SIZE; r++) memories.push_back(make_bytes(8192));
    for (u32 n = 0; n <= MAX_WORLD_SIZE + 1; n++)
        for (u32 d = 0; d < 3; d++)
            for (u32 op = 0; op <= 4; op++)
                for (u32 i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                    if (!full && (n + d + op + i) % 3 != 0) continue;
                    const auto dtype = (reference::Dtype)d;
                    const u64 size = reference::size_of(dtype), num = sizes[i], bytes = num * size;
                    // An abort word: none, one that is not set, one that is.
                    static const u64 abort_words[] = {0, 0, abort_word(REASON_HOST, 1, 1, 1)};
                    const u32 abort = (n + d + op + i / 2) % 3;
                    const bool bad = n == 0 || n > MAX_WORLD_SIZE || op > OP_MAX || abort == 2;
                    std::vector<std::vector<uint8_t>> inputs(n);
                    std::vector<const uint8_t*> in;
                    ReduceCopied p = {};
                    const u32 in_place = (op + i) % 4 == 1 && !bad ? (d + i) % n : MAX_WORLD_SIZE;
                    for (u32 r = 0; r < n && r < MAX_WORLD_SIZE; r++) {
                        // All aligned, one of them not, none.
                        const u64 skew = i % 3 == 1 ? (r == n / 2) : i % 3 == 2 ? r + 1 : 0;
                        inputs[r].resize(bytes + 1);
                        reference::fill(dtype, inputs[r].data(), num, seed++, n > 4 ? 32 : 12);
                        in.push_back(inputs[r].data());
                        uint8_t* at = memories[r].get() + GUARD + skew * size;
                        memset(memories[r].get(), 0xcc, 8192);
                        memcpy(at, inputs[r].data(), bytes);
                        p.sources[r] = (u64)at;
                    }
                    memset(memories[MAX_WORLD_SIZE].get(), 0xcc, 8192);
                    p.dst = in_place < MAX_WORLD_SIZE ? p.sources[in_place] : (u64)(memories[MAX_WORLD_SIZE].get() + GUARD + (op == 2) * size);
                    p.num_elems = num;
                    p.world_size = n;
                    p.op = op;
                    p.abort = abort ? (u64)&abort_words[abort] : 0;
                    const u32 grid = 1 + i % 3, threads = 3 + i;
                    for (u32 block = 0; block < grid; block++)
                        for (u32 t = 0; t < threads; t++) {
                            sim::self = {nullptr, t, block, 0, grid, threads, 0};
                            d == DTYPE_F32 ? reduce_copied<F32>(p) : d == DTYPE_F16 ? reduce_copied<F16>(p) : reduce_copied<BF16>(p);
                        }
                    const uint8_t* out = (const uint8_t*)p.dst;
                    bool ok = true;
                    if (bad)
                        for (u64 e = 0; e < num; e++) ok &= reference::get(dtype, out, e) == reference::canonical_nan(dtype);
                    else
                        ok = bytes == 0 || memcmp(out, reference::reduce(dtype, (reference::Op)op, in, num).data(), bytes) == 0;
                    for (u32 r = 0; r < n && r < MAX_WORLD_SIZE; r++)
                        if (r != in_place) ok &= memcmp((const void*)p.sources[r], inputs[r].data(), bytes) == 0;
                    for (u64 e = 1; e <= 16; e++) ok &= out[-(long)e] == 0xcc && out[bytes + e - 1] == 0xcc;
                    if (!ok) FAIL("reduce_copied %s n=%u op=%u elems=%llu", DTYPE_NAMES[d], n, op, num);
                    calls_run++;
                }
}

void abort_tests() {
    u64 seed = 1000;
    auto step = [&](const Variant& v, Expect e) {
        Step s;
        s.algorithm = v.algorithm;
        s.direct = v.direct;
        s.dtype = DTYPE_BF16;
        s.num_elems = 300;
        s.seed = seed++;
        s.expect = s.expect_armed = e;
        return s;
    };
    const char* site_names[] = {"header", "input", "result", "ready", "done", "partial"};
    for (const Variant& v : VARIANTS) {
        if (AR_ONLY >= 0 && &v != &VARIANTS[AR_ONLY < 0 ? 0 : AR_ONLY]) continue;
        u32 hits = 0;
        const bool islands = v.algorithm == HIERARCHICAL;  // two of two ranks
        for (u32 site = 0; site < WAIT_SITES; site++) {
            for (u32 rank : {0u, 2u}) {
                World w(std::string(v.name) + " abort at " + site_names[site], islands ? 4 : 3, 2);
                Step s = step(v, Expect::exact);
                w.steps.push_back(s);
                s = step(v, Expect::exact_or_nan);
                s.grid = 1;  // and the call after it has more blocks
                s.arm_site = (int)site;
                s.arm_rank = rank;
                s.expect_armed = Expect::nan;
                w.steps.push_back(s);
                w.steps.push_back(step(v, Expect::nan));
                s = step(v, Expect::exact);
                s.reform = true;
                w.steps.push_back(s);
                w.steps.push_back(step(v, Expect::exact));
                // Sites that this algorithm does not have are never reached, and nothing fails then.
                const bool has = site == WAIT_HEADER ||
                                 (site == WAIT_INPUT && !v.direct && v.algorithm != ONE_SHOT_PULL && v.algorithm != TWO_SHOT_PULL) ||
                                 (site == WAIT_RESULT && (v.algorithm == TWO_SHOT_PUSH || v.algorithm == TWO_SHOT_PULL_INBAND || islands)) ||
                                 (site == WAIT_PARTIAL && islands) ||
                                 (site == WAIT_READY && !v.direct && (v.algorithm == ONE_SHOT_PULL || v.algorithm == TWO_SHOT_PULL)) ||
                                 (site == WAIT_DONE && ((v.direct && v.algorithm == ONE_SHOT_PULL) || v.algorithm == TWO_SHOT_PULL));
                if (!has) continue;
                sim::armed.hit = false;
                w.run();
                if (!sim::armed.hit.load()) FAIL("%s: wait never reached", w.name.c_str());
                hits++;
            }
        }
        if (hits == 0) FAIL("%s: no waits", v.name);

        {  // A rank that does not come: the others time out, name it, and stay failed until re-forming.
            World w(std::string(v.name) + " stalled rank", 4, 2);
            w.timeout_ns = 150 * 1000000ull;
            Step s = step(v, Expect::exact);
            w.steps.push_back(s);
            s = step(v, Expect::nan);
            s.absent_rank = 2;
            s.grid = 1;
            w.steps.push_back(s);
            s.grid = BLOCKS;
            s.seed = seed++;
            w.steps.push_back(s);
            w.run();
            expect_status(w, REASON_TIMEOUT, 2, "stalled rank", 2);
        }
        {  // A rank that runs another call.
            World w(std::string(v.name) + " mismatch", 3, 3);
            Step s = step(v, Expect::exact);
            w.steps.push_back(s);
            s = step(v, Expect::nan);
            s.different_rank = 1;
            w.steps.push_back(s);
            w.steps.push_back(step(v, Expect::nan));
            w.run();
            expect_status(w, REASON_MISMATCH, -1, "mismatch");
        }
        for (u32 island_size : {0u, 3u, 5u, ~0u}) {  // Not a division into islands.
            if (!islands) break;
            World w(std::string(v.name) + " islands of " + std::to_string((int)island_size), 4, island_size);
            w.steps.push_back(step(v, Expect::nan));
            w.run();
            expect_status(w, REASON_BAD_CALL, -1, "islands");
        }
        if (islands) {  // A rank with other islands, or with none.
            for (u32 other : {4u, 0u}) {
                World w(std::string(v.name) + " other islands", 4, 2);
                w.odd_rank = 1;
                w.odd_island_size = other;
                w.steps.push_back(step(v, Expect::nan));
                w.run();
                if (other) expect_status(w, REASON_MISMATCH, -1, "other islands");
                else expect_status(w, REASON_BAD_CALL, 1, "other islands");
            }
        }
        for (u32 island_size : {1u, 2u}) {  // Larger than the windows.
            if (!islands && island_size == 1) continue;
            World w(std::string(v.name) + " capacity", 2, island_size);
            Step s = step(v, Expect::nan);
            s.num_elems = 2200;
            s.in_place = true;  // direct one-shot stages its results then
            w.steps.push_back(s);
            w.run();
            expect_status(w, REASON_BAD_CALL, -1, "capacity");
        }
    }
}

void watchdog(int) {
    const char m[] = "FAIL watchdog: the harness hangs\n";
    if (write(1, m, sizeof m - 1)) {
    }
    _exit(3);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string depth = argc > 1 ? argv[1] : "quick", part = argc > 2 ? argv[2] : "all";
    setvbuf(stdout, nullptr, _IOLBF, 0);
    signal(SIGALRM, watchdog);
    alarm(argc > 3 ? (unsigned)atoi(argv[3]) : 240);
    const u64 start = now_ns();
    if (part != "abort") conform(depth == "full");
    if (part != "abort" && AR_ONLY < 0) copied(depth == "full");
    if (part != "conform") abort_tests();
    printf("%s: %ld calls, %d failures, %.1f s\n", failures ? "FAILED" : "passed", calls_run.load(), failures, (now_ns() - start) * 1e-9);
    return failures ? 1 : 0;
}
