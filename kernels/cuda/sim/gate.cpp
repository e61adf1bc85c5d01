// Runs graphs of one rank's calls on two streams at once, behind the gate, on the CPU: ranks, streams, blocks and threads are
// std::threads.
//   gate [SECONDS until the watchdog]
// Whatever the order in which streams come, each call's output is exact or NaN, NaN is explained by every rank's status
// word, and nothing hangs. Runs that come one after the other are all exact.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../gate.cuh"
#include "../two_shot.cuh"
#include "reference.hpp"

using namespace allreduced;

namespace {

constexpr u32 DATA_THREADS = 2, THREADS = DATA_THREADS + SERVICE_THREADS, BLOCKS = 2;
constexpr u64 SLOT_BYTES = 2048, PART_BYTES = 2048, MAX_BYTES = 2048;
std::atomic<int> failures{0};
#define FAIL(...) (failures++, printf("FAIL " __VA_ARGS__), printf("\n"), fflush(stdout))

template <class F>
void run_kernel(u32 grid, u32 threads, F f) {
    std::vector<std::unique_ptr<sim::BlockState>> blocks;
    std::vector<std::unique_ptr<Shared>> shared;
    std::vector<std::thread> all;
    for (u32 b = 0; b < grid; b++) {
        blocks.push_back(std::make_unique<sim::BlockState>(threads));
        shared.push_back(std::make_unique<Shared>());
    }
    for (u32 b = 0; b < grid; b++)
        for (u32 t = 0; t < threads; t++)
            all.emplace_back([&, b, t] {
                sim::self = {blocks[b].get(), t, b, 0, grid, threads, 0};
                f(shared[b].get());
            });
    for (auto& t : all) t.join();
}

struct Rank {
    std::vector<u8> window;
    std::unique_ptr<Control> control;
    std::unique_ptr<Gate> gate;
    u64 status = 0;
};

// A graph: as many calls of so many elements, on blocks of its own number. One of a single call may stand for a call outside of
// graphs; its number is in the launch then.
struct Graph {
    u32 calls;
    u64 elems;
    u32 grid;
    u32 algorithm;  // ONE_SHOT_PUSH or TWO_SHOT_PUSH
    u32 counted;    // what the gate reads
};

struct World {
    u32 n;
    std::vector<Rank> ranks;

    explicit World(u32 n) : n(n), ranks(n) {
        const u64 push = SIGNAL_BYTES, inband = push + 2 * n * SLOT_BYTES, staging = inband + 8 * PART_BYTES;
        for (Rank& r : ranks) {
            r.window.assign(staging + 4 * PART_BYTES + 64, 0);
            memset(window(r) + push, 0xff, staging - push);
        }
        for (u32 i = 0; i < n; i++) {
            Rank& r = ranks[i];
            r.control = std::make_unique<Control>();
            r.gate = std::make_unique<Gate>();
            Control& c = *r.control;
            memset((void*)&c, 0, sizeof c);
            memset((void*)r.gate.get(), 0, sizeof(Gate));
            c.abi_version = ABI_VERSION;
            c.world_size = n;
            c.rank = i;
            c.epoch = 9;
            c.timeout_ns = 20000000000ull;
            c.status = (u64)&r.status;
            c.push_offset = push, c.push_slot_bytes = SLOT_BYTES;
            c.inband_offset = inband, c.inband_part_bytes = PART_BYTES;
            c.staging_offset = staging, c.staging_part_bytes = PART_BYTES;
            for (u32 p = 0; p < n; p++) c.window[p] = (u64)window(ranks[p]);
        }
    }
    static u8* window(Rank& r) { return (u8*)(((u64)r.window.data() + 63) & ~63ull); }

    // One replay on a stream. Answers how many of its calls left NaN.
    u32 replay(u32 me, Graph& graph, u64 seed, u32 pause_us) {
        Rank& r = ranks[me];
        GateLaunch launch{};
        launch.control = (u64)r.control.get();
        launch.gate = (u64)r.gate.get();
        if (graph.calls == 1)
            launch.num_calls = 1;
        else
            launch.calls = (u64)&graph.counted;
        run_kernel(1, SERVICE_THREADS, [&](Shared*) { gate(launch); });
        u32 nans = 0;
        for (u32 i = 0; i < graph.calls; i++) {
            if (pause_us) usleep(rand() % pause_us);
            std::vector<std::vector<u8>> inputs(n);
            std::vector<const u8*> in;
            const u64 bytes = graph.elems * 4;
            for (u32 p = 0; p < n; p++) {
                inputs[p].resize(bytes);
                reference::fill(reference::Dtype::f32, inputs[p].data(), graph.elems, seed * 1000 + i * 10 + p, 12);
                in.push_back(inputs[p].data());
            }
            const auto want = reference::reduce(reference::Dtype::f32, reference::Op::sum, in, graph.elems);
            alignas(16) u8 source[MAX_BYTES], tensor[MAX_BYTES];
            memcpy(source, inputs[me].data(), bytes);
            memset(tensor, 0x5a, bytes);
            const Call call = make_call((u64)r.control.get(), (u64)source, (u64)tensor, graph.elems, 4, OP_SUM, 0, graph.grid, DATA_THREADS);
            run_kernel(graph.grid, THREADS, [&](Shared* shared) {
                if (graph.algorithm == ONE_SHOT_PUSH)
                    one_shot_push<F32, 4, false>(shared, call);
                else
                    two_shot_push<F32, 4, false>(shared, call);
            });
            bool nan = true;
            for (u64 e = 0; e < graph.elems; e++) nan &= reference::get(reference::Dtype::f32, tensor, e) == 0x7fc00000u;
            if (nan)
                nans++;
            else if (memcmp(tensor, want.data(), bytes) != 0)
                FAIL("n=%u rank %u call %u of %llu elements: neither the sum nor NaN (status %llx)", n, me, i, graph.elems, r.status);
        }
        return nans;
    }
};

struct Counts {
    u32 trials = 0, refused = 0, well = 0;
};

// Each rank's two streams replay a graph each. `apart`: one after the other, on every rank in the same order.
void trial(u32 n, Graph first, Graph second, bool apart, u32 skew_us, u64 seed, Counts& counts) {
    World w(n);
    std::atomic<u32> nans{0};
    const auto stream = [&](u32 r, Graph& graph, u64 of) {
        if (skew_us) usleep(rand() % skew_us);
        nans += w.replay(r, graph, of, skew_us ? 60 : 0);
    };
    const auto all = [&](bool one, bool two) {
        std::vector<std::thread> streams;
        for (u32 r = 0; r < n; r++) {
            if (one) streams.emplace_back([&, r] { stream(r, first, seed); });
            if (two) streams.emplace_back([&, r] { stream(r, second, seed + 1); });
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
    counts.trials++;
    u32 overlaps = 0, statuses = 0;
    for (Rank& r : w.ranks) {
        statuses += r.status != 0;
        overlaps += r.status >> 60 == REASON_OVERLAP;
        const u32 reason = (u32)(r.status >> 60);
        // In another order on another rank: sizes differ.
        if (r.status && reason != REASON_OVERLAP && reason != REASON_MISMATCH && reason != REASON_SEQUENCE)
            FAIL("n=%u: status %llx", n, r.status);
    }
    if (nans && !statuses) FAIL("n=%u: NaN, and no status says why", n);
    if (apart && (nans || statuses)) FAIL("n=%u: runs that are apart were refused", n);
    counts.refused += overlaps != 0;
    counts.well += statuses == 0;
}

}  // namespace

int main(int argc, char** argv) {
    const u32 seconds = argc > 1 ? atoi(argv[1]) : 200, trials = argc > 2 ? atoi(argv[2]) : 120;
    std::thread([=] {
        sleep(seconds);
        printf("FAIL watchdog: the harness hangs\n");
        fflush(stdout);
        _exit(1);
    }).detach();
    u64 seed = 1;
    Counts at_once, apart, eager;
    for (u32 i = 0; i < trials && failures < 5; i++) {
        const u32 n = 1 + i % 3, grid = 1 + i / 2 % 2, algorithm = i % 4 < 2 ? ONE_SHOT_PUSH : TWO_SHOT_PUSH;
        Graph first{3, 64, grid, algorithm, 3}, second{2, 33, BLOCKS, ONE_SHOT_PUSH, 2}, single{1, 17, 1, ONE_SHOT_PUSH, 1};
        trial(n, first, second, false, i % 3 == 0 ? 0 : 2000, seed += 2, at_once);
        trial(n, first, single, false, i % 3 == 1 ? 0 : 2000, seed += 2, eager);
        if (i % 4 == 0) trial(n, first, second, true, 200, seed += 2, apart);
    }
    for (const auto& [what, c] : {std::pair("at once", at_once), std::pair("a call beside", eager), std::pair("apart", apart)})
        printf("%s: %u trials, %u refused, %u well\n", what, c.trials, c.refused, c.well);
    if (at_once.refused == 0 || eager.refused == 0) FAIL("nothing overlapped");
    printf("gate: %s\n", failures ? "FAILED" : "passed");
    fflush(stdout);
    _exit(failures ? 1 : 0);
}
