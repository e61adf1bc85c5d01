// The second implementation of mem.cuh: GPU memory operations and threads as std::atomic and std::thread.
//
// Included by mem.cuh when the compiler is not a CUDA one. Owns the mapping of each operation to a C++
// memory order; the harness (harness.cpp) starts the threads. No stand-alone fences.
#pragma once
#include <sched.h>

#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

namespace allreduced {

// Of a GPU's 32 these few: enough for one to know what another does not.
constexpr u32 SERVICE_THREADS = 2;

namespace sim {

// A block: its barrier, and an OR over its threads in three rotating cells (the cell of two barriers
// ahead is emptied once everybody has passed this one, so also read the last one).
struct BlockState {
    explicit BlockState(int threads) : barrier(threads) {}
    std::barrier<> barrier;
    std::atomic<int> any[3] = {0, 0, 0};
    // Of the service threads alone: a barrier, and votes (round in the upper half, by round modulo 2 and thread).
    std::barrier<> service{SERVICE_THREADS};
    std::atomic<u64> votes[2][SERVICE_THREADS] = {};
    u32 vote_round[SERVICE_THREADS] = {};  // each thread's own
};

struct Thread {
    BlockState* block = nullptr;
    u32 thread_x = 0, block_x = 0, block_y = 0, grid_x = 1, block_dim = 1;
    u32 or_phase = 0;
};
inline thread_local Thread self;

// A vote of the service threads, as a warp's: each learns what all said, and nothing else. Relaxed, since a vote orders no
// memory; who needs that calls service_sync.
template <class Join>
inline u32 vote(u32 mine, Join join) {
    BlockState& block = *self.block;
    const u32 lane = self.thread_x - (self.block_dim - SERVICE_THREADS), round = ++block.vote_round[lane];
    block.votes[round % 2][lane].store((u64)round << 32 | mine, std::memory_order_relaxed);
    u32 all = mine;
    for (u32 other = 0; other < SERVICE_THREADS; other++) {
        u64 word;
        while ((word = block.votes[round % 2][other].load(std::memory_order_relaxed)) >> 32 != round) sched_yield();
        all = join(all, (u32)word);
    }
    return all;
}

// Abort raised at a wait: while armed, the wait of `rank` at `site` is never satisfied, and reaching
// it writes `word` into every window's abort word, as a failing peer or the host would.
struct Armed {
    std::atomic<bool> on{false};
    std::atomic<bool> hit{false};
    u32 rank = 0, site = 0, world_size = 0;
    u64 word = 0;
    u64 abort_address[MAX_WORLD_SIZE] = {};
};
inline Armed armed;

inline bool wait_site(u32 rank, u32 site) {
    if (!armed.on.load(std::memory_order_acquire) || armed.rank != rank || armed.site != site) return false;
    if (!armed.hit.exchange(true))
        for (u32 r = 0; r < armed.world_size; r++)
            std::atomic_ref<u64>(*(u64*)armed.abort_address[r]).store(armed.word, std::memory_order_relaxed);
    return true;
}

// A mutation's time to lose a race.
inline void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(3)); }

// Numbers, as the PTX instructions of num.cuh behave; built without fast-math and contraction.
inline float as_float(u32 v) { return std::bit_cast<float>(v); }
inline u32 as_u32(float v) { return std::bit_cast<u32>(v); }
inline float add_rn(float a, float b) { return a + b; }
inline float mul_rn(float a, float b) { return a * b; }
inline float reciprocal_rn(float a) { return 1.0f / a; }
inline float maximum(float a, float b) {
    if (a != a || b != b) return as_float(0x7fffffffu);
    if (a == 0.0f && b == 0.0f) return as_float(as_u32(a) & as_u32(b));
    return a > b ? a : b;
}
inline float f16_to_f32(u32 h) {
    const u32 sign = (h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3ffu;
    if (exp == 31) return as_float(sign | 0x7f800000u | man << 13);
    if (exp != 0) return as_float(sign | (exp + 112) << 23 | man << 13);
    const float tiny = (float)man * 0x1p-24f;
    return as_float(sign | as_u32(tiny));
}
inline u32 f32_to_f16(float f) {
    const u32 v = as_u32(f), sign = v >> 16 & 0x8000u, mag = v & 0x7fffffffu;
    if (mag > 0x7f800000u) return 0x7fffu;
    if (mag >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    if (mag < 0x38800000u) {                        // below 2^-14: subnormal, by the adder's own rounding
        const float r = as_float(mag) + as_float(0x3f000000u);  // 0.5's ulp is 2^-24
        return sign | (as_u32(r) - 0x3f000000u);
    }
    const u32 odd = mag >> 13 & 1u;
    return sign | ((mag - 0x38000000u + 0xfffu + odd) >> 13);
}
inline u32 f32_to_bf16(float f) {
    const u32 v = as_u32(f);
    if ((v & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (v + 0x7fffu + (v >> 16 & 1u)) >> 16;
}
inline void f16x2_to_f32(u32 w, float& lo, float& hi) {
    lo = f16_to_f32(w & 0xffffu);
    hi = f16_to_f32(w >> 16);
}
inline u32 f32_to_f16x2(float lo, float hi) { return f32_to_f16(lo) | f32_to_f16(hi) << 16; }
inline u32 f32_to_bf16x2(float lo, float hi) { return f32_to_bf16(lo) | f32_to_bf16(hi) << 16; }

}  // namespace sim

#define AR_WAIT_SITE(rank, site) ::allreduced::sim::wait_site(rank, site)

inline u32 thread_x() { return sim::self.thread_x; }
inline u32 block_x() { return sim::self.block_x; }
inline u32 block_y() { return sim::self.block_y; }
inline u32 grid_x() { return sim::self.grid_x; }
inline u32 block_dim() { return sim::self.block_dim; }

inline void sync_block() { sim::self.block->barrier.arrive_and_wait(); }
inline bool sync_block_or(bool v) {
    sim::Thread& t = sim::self;
    const u32 phase = t.or_phase++ % 3;
    if (v) t.block->any[phase].store(1, std::memory_order_relaxed);
    t.block->barrier.arrive_and_wait();
    const bool any = t.block->any[phase].load(std::memory_order_relaxed) != 0;
    if (t.thread_x == 0) t.block->any[(phase + 2) % 3].store(0, std::memory_order_relaxed);
    return any;
}
inline u32 opaque(u32 v) { return v; }
inline bool service_any(bool v) {
    return sim::vote(v, [](u32 a, u32 b) { return a | b; }) != 0;
}
inline void wait_for_previous_kernel() {}
inline u64 now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void pause() { sched_yield(); }

inline u64 ld_weak_u64(u64 a) { return *(const u64*)a; }
inline u32 ld_weak_u32(u64 a) { return *(const u32*)a; }
inline u32 ld_weak_u16(u64 a) { return *(const u16*)a; }
inline void st_weak_u64(u64 a, u64 v) { *(u64*)a = v; }
inline void st_weak_u32(u64 a, u32 v) { *(u32*)a = v; }
inline void st_weak_u16(u64 a, u32 v) { *(u16*)a = (u16)v; }

inline u64 ld_relaxed_u64(u64 a) { return std::atomic_ref<u64>(*(u64*)a).load(std::memory_order_relaxed); }
inline void st_relaxed_u64(u64 a, u64 v) { std::atomic_ref<u64>(*(u64*)a).store(v, std::memory_order_relaxed); }
inline u32 ld_relaxed_u32(u64 a) { return std::atomic_ref<u32>(*(u32*)a).load(std::memory_order_relaxed); }
inline u64 ld_acquire_u64(u64 a) { return std::atomic_ref<u64>(*(u64*)a).load(std::memory_order_acquire); }
inline u32 ld_acquire_u32(u64 a) { return std::atomic_ref<u32>(*(u32*)a).load(std::memory_order_acquire); }
inline void st_release_u32(u64 a, u32 v) { std::atomic_ref<u32>(*(u32*)a).store(v, std::memory_order_release); }
// Here a "kernel" begins and ends at an ordinary barrier of its rank's threads, which peers do not take
// part in: what the GPU's kernel boundary gives for nothing is a release and an acquire.
inline void st_after_boundary_u64(u64 a, u64 v) { std::atomic_ref<u64>(*(u64*)a).store(v, std::memory_order_release); }
inline void st_after_boundary_u64x2(u64 a, u64 v0, u64 v1) {
    st_after_boundary_u64(a + 8, v1);
    st_after_boundary_u64(a, v0);
}
inline u64 ld_header_u64(u64 a) { return ld_acquire_u64(a); }
inline void ld_header_u64x2(u64 a, u64& v0, u64& v1) {
    v0 = ld_acquire_u64(a);
    v1 = ld_acquire_u64(a + 8);
}
inline void st_after_reads_u32(u64 a, u32 v) { st_release_u32(a, v); }
inline u32 ld_before_end_u32(u64 a) { return ld_acquire_u32(a); }
inline u32 abandon_add(u64 a) { return std::atomic_ref<u32>(*(u32*)a).fetch_add(1, std::memory_order_acq_rel); }
inline u32 ld_finished_u32(u64 a) { return ld_acquire_u32(a); }
inline u32 gate_cas_u32(u64 a, u32 expected, u32 v) {
    std::atomic_ref<u32>(*(u32*)a).compare_exchange_strong(expected, v, std::memory_order_acq_rel);
    return expected;
}
inline void st_rung_u32(u64 a, u32 v) { st_release_u32(a, v); }
inline u32 ld_failed_u32(u64 a) { return ld_relaxed_u32(a); }
inline void st_abandoned_u32(u64 a, u32 v) { std::atomic_ref<u32>(*(u32*)a).store(v, std::memory_order_relaxed); }
inline void st_failed_u32(u64 a, u32 v) { std::atomic_ref<u32>(*(u32*)a).store(v, std::memory_order_relaxed); }
// Sequentially consistent: what the fence between does on the GPU.
inline void st_bell_u64(u64 a, u64 v) { std::atomic_ref<u64>(*(u64*)a).store(v); }
inline u64 ld_bell_u64(u64 a) { return std::atomic_ref<u64>(*(u64*)a).load(); }
inline void st_parked_u32(u64 a, u32 v) { std::atomic_ref<u32>(*(u32*)a).store(v); }
inline u32 ld_parked_u32(u64 a) { return std::atomic_ref<u32>(*(u32*)a).load(); }
inline void st_wake_u32(u64 a, u32 v) { st_release_u32(a, v); }
inline void bell_fence() {}
inline bool service_all(bool v) {
    return sim::vote(v, [](u32 a, u32 b) { return a & b; }) != 0;
}
inline u32 service_max(u32 v) {
    return sim::vote(v, [](u32 a, u32 b) { return a > b ? a : b; });
}
inline void service_sync() { sim::self.block->service.arrive_and_wait(); }

}  // namespace allreduced
