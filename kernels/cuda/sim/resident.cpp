// Runs the resident kernel and the kernel that rings it on the CPU: blocks and threads of each launch, the ranks' streams
// and the executor's watch are std::threads.
//   resident [SECONDS until the watchdog]
// Ranks pause between commands, so that the kernel parks, and is launched again, at every point of a call. At last, two streams of
// each rank ring at once, each behind a gate.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../gate.cuh"
#include "reference.hpp"

using namespace allreduced;

namespace {

constexpr u32 DATA_THREADS = 2, THREADS = DATA_THREADS + SERVICE_THREADS, BLOCKS = 2;
constexpr u64 SLOT_BYTES = 2048, PART_BYTES = 2048, ARENA_BYTES = 8192;
std::atomic<int> failures{0};
#define FAIL(...) (failures++, printf("FAIL " __VA_ARGS__), printf("\n"), fflush(stdout))

// A kernel of one warp, from its begin to its end.
template <class F>
void run_warp(F f) {
    sim::BlockState block(SERVICE_THREADS);
    std::vector<std::thread> threads;
    for (u32 t = 0; t < SERVICE_THREADS; t++)
        threads.emplace_back([&, t] {
            sim::self = {&block, t, 0, 0, 1, SERVICE_THREADS, 0};
            f();
        });
    for (auto& t : threads) t.join();
}
void run_ring(const RingLaunch& launch) {
    run_warp([&] { allreduced::ring(launch); });
}

struct Rank {
    std::vector<u8> window, arena;
    std::unique_ptr<Control> executor, own;
    std::unique_ptr<ResidentState> state;
    Gate gate = {};
    u64 status = 0;
    u32 wake = 0;
};

struct World {
    u32 n;
    std::vector<Rank> ranks;
    std::atomic<bool> over{false};
    u64 idle_ns;

    World(u32 n, u64 idle_ns) : n(n), ranks(n), idle_ns(idle_ns) {
        const u64 push = SIGNAL_BYTES, inband = push + 2 * n * SLOT_BYTES, staging = inband + 8 * PART_BYTES;
        for (Rank& r : ranks) {
            r.window.assign(staging + 4 * PART_BYTES + 64, 0);
            r.arena.assign(ARENA_BYTES + 64, 0);
            memset(window(r) + push, 0xff, staging - push);
            for (u32 b = 0; b < MAX_RING_BLOCKS; b++) ring(r)->parked[b] = 1;
        }
        for (u32 i = 0; i < n; i++) {
            Rank& r = ranks[i];
            for (auto* made : {&r.executor, &r.own}) {
                *made = std::make_unique<Control>();
                Control& c = **made;
                memset((void*)&c, 0, sizeof c);
                c.abi_version = ABI_VERSION;
                c.world_size = n;
                c.rank = i;
                c.epoch = 5;
                c.timeout_ns = 20000000000ull;
                c.status = (u64)&r.status;
                c.push_offset = push, c.push_slot_bytes = SLOT_BYTES;
                c.inband_offset = inband, c.inband_part_bytes = PART_BYTES;
                c.staging_offset = staging, c.staging_part_bytes = PART_BYTES;
                for (u32 p = 0; p < n; p++) c.window[p] = (u64)window(ranks[p]);
            }
            r.own->wake = (u64)&r.wake;
            r.state = std::make_unique<ResidentState>();
            memset((void*)r.state.get(), 0, sizeof(ResidentState));
            r.state->buffers[0] = {(u64)arena(r), ARENA_BYTES};
        }
    }
    static u8* aligned(std::vector<u8>& v) { return (u8*)(((u64)v.data() + 63) & ~63ull); }
    static u8* window(Rank& r) { return aligned(r.window); }
    static u8* arena(Rank& r) { return aligned(r.arena); }
    static Ring* ring(Rank& r) { return (Ring*)(window(r) + RING_OFFSET); }

    // One launch: its threads end when their block does.
    struct Running {
        std::vector<std::unique_ptr<sim::BlockState>> blocks;
        std::vector<std::unique_ptr<Shared>> shared;
        std::vector<std::unique_ptr<Bell>> bells;
        std::vector<std::thread> threads;
        ResidentLaunch launch;
    };
    std::unique_ptr<Running> start(u32 number) {
        auto running = std::make_unique<Running>();
        memset((void*)&running->launch, 0, sizeof running->launch);
        running->launch.launch = number;
        running->launch.idle_ns = idle_ns;
        for (u32 r = 0; r < n; r++) running->launch.ranks[r] = {(u64)ranks[r].executor.get(), (u64)ranks[r].state.get()};
        for (u32 i = 0; i < n * BLOCKS; i++) {
            running->blocks.push_back(std::make_unique<sim::BlockState>(THREADS));
            running->shared.push_back(std::make_unique<Shared>());
            running->bells.push_back(std::make_unique<Bell>());
        }
        for (u32 i = 0; i < n * BLOCKS; i++) {
            sim::BlockState* block = running->blocks[i].get();
            Shared* shared = running->shared[i].get();
            Bell* bell = running->bells[i].get();
            const ResidentLaunch* launch = &running->launch;
            for (u32 t = 0; t < THREADS; t++)
                running->threads.emplace_back([=] {
                    sim::self = {block, t, i % BLOCKS, i / BLOCKS, BLOCKS, THREADS, 0};
                    resident<16, false>(shared, bell, *launch);
                });
        }
        return running;
    }
    // The executor: launches what a ring asks for; at the end, tells the last to stop.
    void watch() {
        std::vector<std::unique_ptr<Running>> launches;
        u32 launched = 0;
        while (!over) {
            u32 wanted = 0;
            for (Rank& r : ranks) wanted = std::max(wanted, ld_acquire_u32((u64)&r.wake));
            if (wanted > launched) launches.push_back(start(++launched));
            u64 status = 0;
            for (Rank& r : ranks) status |= ld_relaxed_u64((u64)&r.status);
            // The epoch is over.
            if (status != 0)
                for (Rank& r : ranks)
                    if (ld_relaxed_u64((u64)window(r)) == 0) st_relaxed_u64((u64)window(r), status);
            usleep(50);
        }
        for (Rank& r : ranks) std::atomic_ref<u32>(r.state->stop).store(STOP_ALL);
        for (auto& l : launches)
            for (auto& t : l->threads) t.join();
        printf("n=%u idle %llu us: %u launches\n", n, idle_ns / 1000, launched);
    }
    void stream(u32 me, u32 commands) {
        Rank& r = ranks[me];
        for (u32 i = 0; i < commands; i++) {
            const u32 dtype = i % 3, op = i / 3 % 4;
            const auto d = (reference::Dtype)dtype;
            const u64 sizes[] = {64, 0, 257, 1, 500, 33}, elems = sizes[i % 6], bytes = elems * reference::size_of(d);
            const bool in_place = i % 2 == 0;
            std::vector<std::vector<u8>> inputs(n);
            std::vector<const u8*> in;
            for (u32 p = 0; p < n; p++) {
                inputs[p].resize(bytes + 1);
                reference::fill(d, inputs[p].data(), elems, i * 64 + p, 12);
                in.push_back(inputs[p].data());
            }
            const auto want = reference::reduce(d, (reference::Op)op, in, elems);
            const u64 src = 0, dst = in_place ? 0 : ARENA_BYTES / 2;
            if (bytes) memcpy(arena(r) + src, inputs[me].data(), bytes);
            // Sometimes one is late, sometimes all.
            if (i % 4 == 3 || i % 5 == me) usleep(rand() % 900);
            RingLaunch launch{};
            launch.control = (u64)r.own.get();
            launch.dst = (u64)arena(r) + dst;
            const u32 words[COMMAND_WORDS] = {dtype | op << 8, (u32)elems, (u32)src, 0, (u32)dst, 0};
            memcpy(launch.command, words, sizeof words);
            launch.blocks = BLOCKS;
            run_ring(launch);
            if (bytes && memcmp(arena(r) + dst, want.data(), bytes) != 0) FAIL("n=%u rank %u command %u: wrong (status %llx)", n, me, i, r.status);
            if (failures > 5) break;
        }
    }
    void run(u32 commands) {
        std::thread watcher([this] { watch(); });
        std::vector<std::thread> streams;
        for (u32 r = 0; r < n; r++) streams.emplace_back([=, this] { stream(r, commands); });
        for (auto& s : streams) s.join();
        over = true;
        watcher.join();
        for (u32 r = 0; r < n; r++)
            if (ranks[r].status) FAIL("n=%u rank %u: status %llx", n, r, ranks[r].status);
    }
};

// Commands that the kernel must refuse: NaN, and BAD_CALL on every rank. With three ranks, one service thread of ranks 0 and 2
// waits in vain and the other knows of nothing.
void refuse(u32 n) {
    World w(n, 200000);
    std::thread watcher([&] { w.watch(); });
    std::vector<std::thread> streams;
    for (u32 r = 0; r < n; r++)
        streams.emplace_back([&, r] {
            RingLaunch launch{};
            launch.control = (u64)w.ranks[r].own.get();
            launch.dst = (u64)World::arena(w.ranks[r]);
            // Rank 1's source leaves its memory by one element.
            const u32 words[COMMAND_WORDS] = {0, 64, r == 1 ? (u32)ARENA_BYTES - 252 : 0, 0, 0, 0};
            memcpy(launch.command, words, sizeof words);
            launch.blocks = BLOCKS;
            run_ring(launch);
            float first;
            memcpy(&first, World::arena(w.ranks[r]), 4);
            if (first == first) FAIL("refuse: rank %u has a number", r);
            if (w.ranks[r].status >> 60 != REASON_BAD_CALL) FAIL("refuse: rank %u status %llx", r, w.ranks[r].status);
            if ((w.ranks[r].status >> 56 & 15) != 1) FAIL("refuse: rank %u blames %llu", r, w.ranks[r].status >> 56 & 15);
        });
    for (auto& s : streams) s.join();
    w.over = true;
    watcher.join();
}

// Two streams of each rank, with graphs of several rings. `apart`: one after the other.
u32 overlap(u32 n, bool apart, u32 seed) {
    World w(n, 100000);
    std::thread watcher([&] { w.watch(); });
    std::atomic<u32> nans{0};
    const auto stream = [&](u32 me, u32 which) {
        Rank& r = w.ranks[me];
        const u32 rings = 3 - which, elems = which ? 33 : 64, count = rings;
        if (!apart) usleep(rand() % 800);
        GateLaunch gate{};
        gate.control = (u64)r.own.get();
        gate.gate = (u64)&r.gate;
        gate.calls = (u64)&count;
        gate.ring_blocks = BLOCKS;
        run_warp([&] { allreduced::gate(gate); });
        for (u32 i = 0; i < rings; i++) {
            std::vector<std::vector<u8>> inputs(n);
            std::vector<const u8*> in;
            for (u32 p = 0; p < n; p++) {
                inputs[p].resize(elems * 4);
                reference::fill(reference::Dtype::f32, inputs[p].data(), elems, seed * 100 + which * 10 + i * 40 + p, 12);
                in.push_back(inputs[p].data());
            }
            const auto want = reference::reduce(reference::Dtype::f32, reference::Op::sum, in, elems);
            const u64 src = which * 2048, dst = src + 1024;
            memcpy(World::arena(r) + src, inputs[me].data(), elems * 4);
            RingLaunch launch{};
            launch.control = (u64)r.own.get();
            launch.dst = (u64)World::arena(r) + dst;
            const u32 words[COMMAND_WORDS] = {0, elems, (u32)src, 0, (u32)dst, 0};
            memcpy(launch.command, words, sizeof words);
            launch.blocks = BLOCKS;
            run_ring(launch);
            const u8* out = World::arena(r) + dst;
            bool nan = true;
            for (u32 e = 0; e < elems; e++) nan &= reference::get(reference::Dtype::f32, out, e) == 0x7fc00000u;
            if (nan)
                nans++;
            else if (memcmp(out, want.data(), elems * 4) != 0)
                FAIL("overlap n=%u rank %u stream %u ring %u: neither the sum nor NaN (status %llx)", n, me, which, i, r.status);
        }
    };
    const auto all = [&](bool one, bool two) {
        std::vector<std::thread> streams;
        for (u32 r = 0; r < n; r++) {
            if (one) streams.emplace_back([&, r] { stream(r, 0); });
            if (two) streams.emplace_back([&, r] { stream(r, 1); });
        }
        for (auto& s : streams) s.join();
    };
    if (apart) {
        all(true, false);
        all(false, true);
        all(true, false);
    } else {
        all(true, true);
    }
    w.over = true;
    watcher.join();
    u32 overlaps = 0, statuses = 0;
    for (Rank& r : w.ranks) overlaps += r.status >> 60 == REASON_OVERLAP, statuses += r.status != 0;
    if (nans && !statuses) FAIL("overlap n=%u: NaN, and no status says why", n);
    if (apart && (nans || statuses)) FAIL("overlap n=%u: runs that are apart were refused (status %llx)", n, w.ranks[0].status);
    return overlaps != 0;
}

}  // namespace

int main(int argc, char** argv) {
    const u32 seconds = argc > 1 ? atoi(argv[1]) : 200;
    std::thread([=] {
        sleep(seconds);
        printf("FAIL watchdog: the harness hangs\n");
        fflush(stdout);
        _exit(1);
    }).detach();
    for (u64 idle_ns : {20000ull, 200000ull, 1000000000ull})
        for (u32 n : {1u, 2u, 3u}) World(n, idle_ns).run(60);
    for (u32 n : {2u, 3u}) refuse(n);
    u32 refused = 0;
    for (u32 i = 0; i < 24 && failures < 5; i++) {
        refused += overlap(1 + i % 3, false, i);
        if (i % 4 == 0) overlap(1 + i % 3, true, i);
    }
    printf("at once: %u of 24 refused\n", refused);
    if (refused == 0) FAIL("nothing overlapped");
    printf("resident: %s\n", failures ? "FAILED" : "passed");
    fflush(stdout);
    _exit(failures ? 1 : 0);
}
