// The kernels' entry points: allreduced_<algorithm>_<dtype>_<world>.
//
// World: n2, n4, n8 for exactly that many ranks; w4, w8, w16 for any number up to that. Take n<N> where
// it exists, else the smallest w. One parameter, a Launch by value. Launch shape, limits and guarantees:
// one_shot.cuh, two_shot.cuh. Dynamic shared memory: 0.
#include "two_shot.cuh"

#if AR_CUDA

#define AR_ENTRY(ALGORITHM, NAME, TYPE, WORLD, W, EXACT)                                                              \
    extern "C" __global__ void __launch_bounds__(allreduced::MAX_DATA_THREADS<W> + allreduced::SERVICE_THREADS, W <= 4 ? 2 : 1) \
        allreduced_##ALGORITHM##_##NAME##_##WORLD(const __grid_constant__ allreduced::Launch launch) {                \
        __shared__ allreduced::Shared shared;                                                                         \
        allreduced::ALGORITHM<allreduced::TYPE, W, EXACT>(&shared, launch.calls[blockIdx.y]);                         \
    }
#define AR_WORLDS(ALGORITHM, NAME, TYPE)          \
    AR_ENTRY(ALGORITHM, NAME, TYPE, n2, 2, true)  \
    AR_ENTRY(ALGORITHM, NAME, TYPE, n4, 4, true)  \
    AR_ENTRY(ALGORITHM, NAME, TYPE, n8, 8, true)  \
    AR_ENTRY(ALGORITHM, NAME, TYPE, w4, 4, false) \
    AR_ENTRY(ALGORITHM, NAME, TYPE, w8, 8, false) \
    AR_ENTRY(ALGORITHM, NAME, TYPE, w16, 16, false)
// AR_DTYPE_MASK: bit 0 f32, bit 1 f16, bit 2 bf16; all unless given. A run-time compiler need not wait
// for types that nobody asked for.
#if !defined(AR_DTYPE_MASK)
#define AR_DTYPE_MASK 7
#endif
#if AR_DTYPE_MASK & 1
#define AR_F32(ALGORITHM) AR_WORLDS(ALGORITHM, f32, F32)
#else
#define AR_F32(ALGORITHM)
#endif
#if AR_DTYPE_MASK & 2
#define AR_F16(ALGORITHM) AR_WORLDS(ALGORITHM, f16, F16)
#else
#define AR_F16(ALGORITHM)
#endif
#if AR_DTYPE_MASK & 4
#define AR_BF16(ALGORITHM) AR_WORLDS(ALGORITHM, bf16, BF16)
#else
#define AR_BF16(ALGORITHM)
#endif
#define AR_DTYPES(ALGORITHM) AR_F32(ALGORITHM) AR_F16(ALGORITHM) AR_BF16(ALGORITHM)

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
#endif

#endif
