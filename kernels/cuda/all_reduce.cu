// The kernels' entry points: allreduced_<algorithm>_<dtype>_<world>.
//
// World: n2, n4, n8 for exactly that many ranks; w4, w8, w16 for any number up to that. Take n<N> where
// it exists, else the smallest w. One parameter, a Launch by value. Launch shape, limits and guarantees:
// one_shot.cuh, two_shot.cuh, hierarchical.cuh. allreduced_reduce_copied_<dtype>: reduce_copied.cuh. Dynamic shared memory: 0.
#include "gate.cuh"
#include "hierarchical.cuh"
#include "probe.cuh"
#include "reduce_copied.cuh"
#include "resident.cuh"

#if AR_CUDA

#define AR_ENTRY(ALGORITHM, NAME, TYPE, WORLD, W, EXACT)                                                              \
    extern "C" __global__ void __launch_bounds__(allreduced::MAX_DATA_THREADS<W> + allreduced::SERVICE_THREADS, W <= 8 ? 2 : 1) \
        allreduced_##ALGORITHM##_##NAME##_##WORLD(const __grid_constant__ allreduced::Launch launch) {                \
        __shared__ allreduced::Shared shared;                                                                         \
        allreduced::ALGORITHM<allreduced::TYPE, W, EXACT>(&shared, launch.calls[blockIdx.y]);                         \
    }
// -DAR_ONLY_DTYPE=f32|f16|bf16 and -DAR_ONLY_WORLD=n2|n4|n8|w4|w8|w16, either or both: these entry points
// only, so that a run-time compiler need not wait for what its communicator cannot call.
#if !defined(AR_ONLY_DTYPE)
#define AR_ONLY_DTYPE all
#endif
#if !defined(AR_ONLY_WORLD)
#define AR_ONLY_WORLD all
#endif
#define AR_JOIN_NOW(a, b) a##b
#define AR_JOIN(a, b) AR_JOIN_NOW(a, b)
#define AR_DTYPES_all 7
#define AR_DTYPES_f32 1
#define AR_DTYPES_f16 2
#define AR_DTYPES_bf16 4
#define AR_WORLDS_all 63
#define AR_WORLDS_n2 1
#define AR_WORLDS_n4 2
#define AR_WORLDS_n8 4
#define AR_WORLDS_w4 8
#define AR_WORLDS_w8 16
#define AR_WORLDS_w16 32
#define AR_WANTED_DTYPES AR_JOIN(AR_DTYPES_, AR_ONLY_DTYPE)
#define AR_WANTED_WORLDS AR_JOIN(AR_WORLDS_, AR_ONLY_WORLD)
#if AR_WANTED_DTYPES == 0
#error "AR_ONLY_DTYPE: f32, f16 or bf16"
#endif
#if AR_WANTED_WORLDS == 0
#error "AR_ONLY_WORLD: n2, n4, n8, w4, w8 or w16"
#endif
#if AR_WANTED_WORLDS & 1
#define AR_N2(ALGORITHM, NAME, TYPE) AR_ENTRY(ALGORITHM, NAME, TYPE, n2, 2, true)
#else
#define AR_N2(ALGORITHM, NAME, TYPE)
#endif
#if AR_WANTED_WORLDS & 2
#define AR_N4(ALGORITHM, NAME, TYPE) AR_ENTRY(ALGORITHM, NAME, TYPE, n4, 4, true)
#else
#define AR_N4(ALGORITHM, NAME, TYPE)
#endif
#if AR_WANTED_WORLDS & 4
#define AR_N8(ALGORITHM, NAME, TYPE) AR_ENTRY(ALGORITHM, NAME, TYPE, n8, 8, true)
#else
#define AR_N8(ALGORITHM, NAME, TYPE)
#endif
#if AR_WANTED_WORLDS & 8
#define AR_W4(ALGORITHM, NAME, TYPE) AR_ENTRY(ALGORITHM, NAME, TYPE, w4, 4, false)
#else
#define AR_W4(ALGORITHM, NAME, TYPE)
#endif
#if AR_WANTED_WORLDS & 16
#define AR_W8(ALGORITHM, NAME, TYPE) AR_ENTRY(ALGORITHM, NAME, TYPE, w8, 8, false)
#else
#define AR_W8(ALGORITHM, NAME, TYPE)
#endif
#if AR_WANTED_WORLDS & 32
#define AR_W16(ALGORITHM, NAME, TYPE) AR_ENTRY(ALGORITHM, NAME, TYPE, w16, 16, false)
#else
#define AR_W16(ALGORITHM, NAME, TYPE)
#endif
#define AR_WORLDS(ALGORITHM, NAME, TYPE)                                                                         \
    AR_N2(ALGORITHM, NAME, TYPE) AR_N4(ALGORITHM, NAME, TYPE) AR_N8(ALGORITHM, NAME, TYPE) AR_W4(ALGORITHM, NAME, TYPE) \
    AR_W8(ALGORITHM, NAME, TYPE) AR_W16(ALGORITHM, NAME, TYPE)
#if AR_WANTED_DTYPES & 1
#define AR_F32(ALGORITHM) AR_WORLDS(ALGORITHM, f32, F32)
#else
#define AR_F32(ALGORITHM)
#endif
#if AR_WANTED_DTYPES & 2
#define AR_F16(ALGORITHM) AR_WORLDS(ALGORITHM, f16, F16)
#else
#define AR_F16(ALGORITHM)
#endif
#if AR_WANTED_DTYPES & 4
#define AR_BF16(ALGORITHM) AR_WORLDS(ALGORITHM, bf16, BF16)
#else
#define AR_BF16(ALGORITHM)
#endif
#define AR_DTYPES(ALGORITHM) AR_F32(ALGORITHM) AR_F16(ALGORITHM) AR_BF16(ALGORITHM)

// allreduced_resident_<world> and allreduced_ring: see resident.cuh.
#define AR_RESIDENT(WORLD, W, EXACT)                                                                                   \
    extern "C" __global__ void __launch_bounds__(allreduced::MAX_DATA_THREADS<W> + allreduced::SERVICE_THREADS, 1)     \
        allreduced_resident_##WORLD(const __grid_constant__ allreduced::ResidentLaunch launch) {                       \
        __shared__ allreduced::Shared shared;                                                                          \
        __shared__ allreduced::Bell bell;                                                                              \
        allreduced::resident<W, EXACT>(&shared, &bell, launch);                                                        \
    }
#if AR_WANTED_WORLDS & 1
AR_RESIDENT(n2, 2, true)
#endif
#if AR_WANTED_WORLDS & 2
AR_RESIDENT(n4, 4, true)
#endif
#if AR_WANTED_WORLDS & 4
AR_RESIDENT(n8, 8, true)
#endif
#if AR_WANTED_WORLDS & 8
AR_RESIDENT(w4, 4, false)
#endif
#if AR_WANTED_WORLDS & 16
AR_RESIDENT(w8, 8, false)
#endif
#if AR_WANTED_WORLDS & 32
AR_RESIDENT(w16, 16, false)
#endif
extern "C" __global__ void __launch_bounds__(allreduced::SERVICE_THREADS) allreduced_ring(const __grid_constant__ allreduced::RingLaunch launch) {
    allreduced::ring(launch);
}

// allreduced_gate: see gate.cuh.
extern "C" __global__ void __launch_bounds__(allreduced::SERVICE_THREADS) allreduced_gate(const __grid_constant__ allreduced::GateLaunch launch) {
    allreduced::gate(launch);
}

// allreduced_reduce_copied_<dtype>: see reduce_copied.cuh.
#define AR_REDUCE_COPIED(NAME, TYPE)                                                                                \
    extern "C" __global__ void __launch_bounds__(allreduced::REDUCE_COPIED_THREADS)                                  \
        allreduced_reduce_copied_##NAME(const __grid_constant__ allreduced::ReduceCopied parameters) {               \
        allreduced::reduce_copied<allreduced::TYPE>(parameters);                                                     \
    }
#if AR_WANTED_DTYPES & 1
AR_REDUCE_COPIED(f32, F32)
#endif
#if AR_WANTED_DTYPES & 2
AR_REDUCE_COPIED(f16, F16)
#endif
#if AR_WANTED_DTYPES & 4
AR_REDUCE_COPIED(bf16, BF16)
#endif

// For benches: a kernel of the worker's that takes about `ns`.
extern "C" __global__ void __launch_bounds__(32) allreduced_pause(const unsigned long long ns) {
    allreduced::wait_for_previous_kernel();
    const unsigned long long start = allreduced::now_ns();
    while (allreduced::now_ns() - start < ns) {
    }
}

#if defined(AR_TRACE)
AR_WORLDS(one_shot_push, bf16, BF16)
AR_WORLDS(one_shot_pull_inband, bf16, BF16)
#else
AR_DTYPES(one_shot_push)
AR_DTYPES(one_shot_pull)
AR_DTYPES(one_shot_pull_inband)
AR_DTYPES(two_shot_push)
AR_DTYPES(two_shot_pull)
AR_DTYPES(two_shot_pull_inband)
AR_DTYPES(hierarchical)
#endif

// For `allreduced probe`: see probe.cuh.
extern "C" __global__ void __launch_bounds__(512) allreduced_probe_copy(const unsigned long long dst, const unsigned long long src,
                                                                        const unsigned long long packs, const unsigned passes) {
    allreduced::probe_copy(dst, src, packs, passes);
}
extern "C" __global__ void __launch_bounds__(32)
    allreduced_probe_flag(const unsigned long long mine, const unsigned long long peers, const unsigned long long result,
                          const unsigned rounds, const unsigned answers, const unsigned long long limit_ns) {
    allreduced::probe_flag(mine, peers, result, rounds, answers != 0, limit_ns);
}

#endif
