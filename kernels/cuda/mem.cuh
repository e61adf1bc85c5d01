// Every access to memory that another thread, block, GPU or process may touch, and the thread model.
//
// Two implementations of one set of functions: inline PTX, and std::atomic for the g++ harness in
// sim/. The kernels use nothing else, so the protocol that is run under ThreadSanitizer is the one
// that runs on the GPU. No stand-alone fences: ThreadSanitizer cannot see them.
//
// Scope is .sys throughout for words that peers see (they may sit on another GPU), .gpu for words that
// only blocks of one launch share. `weak` accesses are ordinary ones: legal only where a named
// release/acquire pair or a kernel boundary orders them.
#pragma once
#include "abi.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define AR_CUDA 1
#define AR_DEV __device__ __forceinline__
#define AR_DEV_COLD __device__ __noinline__
#define AR_WAIT_SITE(rank, site) false
#else
#define AR_CUDA 0
#define AR_DEV inline
#define AR_DEV_COLD inline
#include "sim/model.hpp"
#endif

// Code that a call runs lies in one piece, the rest behind it: a taken branch to code that is not cached costs
// as much as a load.
#define AR_LIKELY(x) __builtin_expect(!!(x), 1)
#define AR_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace allreduced {

struct alignas(16) Pack {
    u32 w[4];
};

// Where a block can wait; the harness raises an abort at each of them.
enum WaitSite : u32 {
    WAIT_HEADER = 0,
    WAIT_INPUT = 1,
    WAIT_RESULT = 2,
    WAIT_READY = 3,
    WAIT_DONE = 4,
    WAIT_PARTIAL = 5,
    WAIT_SITES = 6,
};

#if !AR_CUDA
}  // namespace allreduced
#include "sim/model_pack.hpp"
namespace allreduced {
#endif

#if AR_CUDA

// Threads of a block that carry no data: one warp that greets peers, waits for their headers and
// flags, and looks at the abort word, so that those loads overlap with the data's.
constexpr u32 SERVICE_THREADS = 32;

AR_DEV u32 thread_x() { return threadIdx.x; }
AR_DEV u32 block_x() { return blockIdx.x; }
AR_DEV u32 block_y() { return blockIdx.y; }
AR_DEV u32 grid_x() { return gridDim.x; }
AR_DEV u32 block_dim() { return blockDim.x; }

// Barrier of the block: orders all its threads' accesses before against all after.
AR_DEV void sync_block() { __syncthreads(); }
AR_DEV bool sync_block_or(bool v) { return __syncthreads_or(v) != 0; }
// A value that the compiler cannot know.
AR_DEV u32 opaque(u32 v) {
    u32 r;
    asm volatile("mov.u32 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
// Whether any of the service threads, all of which call it, says so.
AR_DEV bool service_any(bool v) { return __any_sync(0xffffffffu, v) != 0; }

// Launched with programmatic serialization: waits until the previous kernel in the stream has
// completed and its writes are visible, then lets the next one be scheduled (it waits here in turn, so
// at most one is ahead). Without that launch attribute both do nothing.
AR_DEV void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Most data threads of a block of an instance for up to W ranks, by registers: up to W = 8, two such blocks fit
// on a multiprocessor.
template <int W>
constexpr u32 MAX_DATA_THREADS = W <= 4 ? 480 : W <= 8 ? 352 : 160;

AR_DEV u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
AR_DEV void pause() {}

AR_DEV Pack ld_weak_pack(u64 a) {
    Pack v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(a)
                 : "memory");
    return v;
}
AR_DEV void st_weak_pack(u64 a, const Pack& v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(a), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
}
AR_DEV u64 ld_weak_u64(u64 a) {
    u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV u32 ld_weak_u32(u64 a) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV u32 ld_weak_u16(u64 a) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV void st_weak_u64(u64 a, u64 v) { asm volatile("st.global.u64 [%0], %1;" ::"l"(a), "l"(v) : "memory"); }
AR_DEV void st_weak_u32(u64 a, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory"); }
AR_DEV void st_weak_u16(u64 a, u32 v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(a), "h"((u16)v) : "memory");
}

// In-band data. A pack is four words that may become visible one by one and in any order.
AR_DEV Pack ld_relaxed_pack(u64 a) {
    Pack v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(a)
                 : "memory");
    return v;
}
// Loads only where `when`, by a predicate and not a branch. DEPENDENT: the other half of
// st_dependent_pack.
template <bool DEPENDENT>
AR_DEV void ld_pack_if(Pack& v, u64 a, bool when) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0;\n\t"
        "@p ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
        : "+r"(v.w[0]), "+r"(v.w[1]), "+r"(v.w[2]), "+r"(v.w[3])
        : "l"(a), "r"((u32)when)
        : "memory");
}
AR_DEV void st_relaxed_pack(u64 a, const Pack& v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(a), "r"(v.w[0]), "r"(v.w[1]),
                 "r"(v.w[2]), "r"(v.w[3])
                 : "memory");
}
// A result that tells its reader "what I was computed from has been read": the value cannot exist
// before the loads it depends on have returned, and a load that has returned cannot see a later write.
// Relaxed is enough for that on a GPU; the harness, where such dependencies order nothing, releases.
AR_DEV void st_dependent_pack(u64 a, const Pack& v) { st_relaxed_pack(a, v); }
AR_DEV u64 ld_relaxed_u64(u64 a) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV void st_relaxed_u64(u64 a, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(a), "l"(v) : "memory");
}
AR_DEV u32 ld_relaxed_u32(u64 a) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV u64 ld_acquire_u64(u64 a) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV u32 ld_acquire_u32(u64 a) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV void st_release_u32(u64 a, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}

// Publishes what earlier kernels of this stream wrote: the kernel boundary already made those writes
// visible system-wide, so a relaxed store after it is enough. The harness, whose "kernels" begin at an
// ordinary barrier, releases here.
AR_DEV void st_after_boundary_u64(u64 a, u64 v) { st_relaxed_u64(a, v); }
// A header's first two words at once, each whole by itself.
AR_DEV void st_after_boundary_u64x2(u64 a, u64 v0, u64 v1) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(a), "l"(v0), "l"(v1) : "memory");
}
// The reader's half, where it goes on to read memory that the header's sender wrote before: with
// ld_peer_pack, which is relaxed.sys too and so is served behind every cache, after a barrier that this
// load's value decided. An acquire would empty the multiprocessor's cache instead. The harness acquires.
AR_DEV void ld_header_u64x2(u64 a, u64& v0, u64& v1) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(v0), "=l"(v1) : "l"(a) : "memory");
}
AR_DEV u64 ld_header_u64(u64 a) { return ld_relaxed_u64(a); }
AR_DEV Pack ld_peer_pack(u64 a) { return ld_relaxed_pack(a); }
AR_DEV u32 ld_peer_u32(u64 a) { return ld_relaxed_u32(a); }
AR_DEV u32 ld_peer_u16(u64 a) {
    u16 v;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(a) : "memory");
    return v;
}
// Says "this block has read": ordered after the loads of the whole block, because sync_block came
// between and each load's value was consumed before it. It publishes no data.
AR_DEV void st_after_reads_u32(u64 a, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory");
}
// The other half: the kernel's end follows, nothing is read on the strength of it.
AR_DEV u32 ld_before_end_u32(u64 a) { return ld_relaxed_u32(a); }

// "This block has finished", in the pack's first word: after its stores to the output, which a failing block
// must not meet later. Relaxed on the GPU, where a fence at every call's end would cost more than the flag;
// the failing block waits long enough instead (abandon_call).
AR_DEV void st_finished_pack(u64 a, const Pack& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(a), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
                 : "memory");
}
// Adds 1, returns the old value; any one of several failing blocks.
AR_DEV u32 abandon_add(u64 a) {
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(a) : "memory");
    return v;
}
AR_DEV u32 ld_finished_u32(u64 a) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(a) : "memory");
    return v;
}

// The word by which one of several gates is let through. What calls before it did is visible to who wins.
AR_DEV u32 gate_cas_u32(u64 a, u32 expected, u32 v) {
    u32 found;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(found) : "l"(a), "r"(expected), "r"(v) : "memory");
    return found;
}
// `Control.failed` and `Control.abandoned`. Behind a call that fails, the gate of another stream may let calls through while its
// last block still writes NaN: they meet at these words, where any order will do (abandon_call). Ordinary accesses on the GPU.
AR_DEV u32 ld_failed_u32(u64 a) { return ld_weak_u32(a); }
AR_DEV void st_failed_u32(u64 a, u32 v) { st_weak_u32(a, v); }
AR_DEV void st_abandoned_u32(u64 a, u32 v) { st_weak_u32(a, v); }

// The number of the rank's newest ring, which the gate of another stream may look at. An ordinary store on the GPU.
AR_DEV void st_rung_u32(u64 a, u32 v) { st_weak_u32(a, v); }

// The bell and the word that says that a block is about to end: whoever writes one and then reads the other, on both
// sides, cannot both miss what the other wrote (Dekker). On the GPU by a fence between; in the harness the four
// accesses are sequentially consistent.
AR_DEV void st_bell_u64(u64 a, u64 v) { st_relaxed_u64(a, v); }
AR_DEV u64 ld_bell_u64(u64 a) { return ld_acquire_u64(a); }
AR_DEV void st_parked_u32(u64 a, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(a), "r"(v) : "memory"); }
AR_DEV u32 ld_parked_u32(u64 a) { return ld_relaxed_u32(a); }
// To host memory, for the executor's processor.
AR_DEV void st_wake_u32(u64 a, u32 v) { st_parked_u32(a, v); }
AR_DEV void bell_fence() { asm volatile("fence.sc.sys;" ::: "memory"); }
// Whether all of the service threads, all of which call it, say so.
AR_DEV bool service_all(bool v) { return __all_sync(0xffffffffu, v) != 0; }
AR_DEV u32 service_max(u32 v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, v);
#else
    return v;
#endif
}
AR_DEV void service_sync() { __syncwarp(); }

#endif  // AR_CUDA

#if AR_CUDA && defined(AR_TRACE)
// Measuring aid: cycle counts of one data thread and one service thread, left in the signal area's tail.
#define AR_STAMP(b, i) ((b).stamps[i] = clock64())
#else
#define AR_STAMP(b, i) ((void)0)
#endif

}  // namespace allreduced
