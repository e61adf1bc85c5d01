// Reduces tensors that are all in this GPU's reach already: what an all-reduce by copy engines ends in. No communication:
// the executor has copied the ranks' slices here, and this kernel, behind those copies in the stream, sums them.
//
// Shapes      num_elems elements of T from each of world_size sources, any count, any element alignment; straight through where
//             all addresses are 16-byte aligned, element by element else and in the tail.
// Launch      any grid.x, blocks of up to REDUCE_COPIED_THREADS; no dynamic shared memory. Nobody is waited for, so blocks need
//             not be resident at once. Threads take packs in turn, a grid apart.
// Memory      ordinary loads and stores; stream order is all the order there is. The abort word is looked at once, relaxed.
// Determinism rank order, f32, as num.cuh: the same bits as the other algorithms, whatever the launch shape.
// In place    dst may be one of the sources (each pack is read and written by one thread); other overlap is not allowed.
// Abort       there is nothing to wait for. A world size or operator that does not exist makes the whole output NaN, and so does an
//             abort word that is set when a thread begins: who ends an epoch sets it before it lets go of the streams that a
//             rank which is gone held up, so no slice of such a rank's is summed.
#pragma once
#include "num.cuh"

namespace allreduced {

// Loads of a thread that go out together.
constexpr u32 COPIED_BATCH = 4;

// Pack k of the result. `load(r)` is rank r's.
template <class T, bool EXTREMUM, class Load>
AR_DEV Pack reduce_loaded(u32 world_size, u32 op, Load load) {
    const u32 flip = EXTREMUM ? flip_of(op) : 0;
    float acc[T::ELEMS];
#pragma unroll 1
    for (u32 r = 0; r < world_size; r += COPIED_BATCH) {
        Pack v[COPIED_BATCH];
#pragma unroll
        for (u32 j = 0; j < COPIED_BATCH; j++)
            if (r + j < world_size) v[j] = load(r + j);
#pragma unroll
        for (u32 j = 0; j < COPIED_BATCH; j++) {
            if (r + j >= world_size) continue;
            if (j == 0 && r == 0) {
                T::unpack(v[0], acc);
                flip_all<T>(acc, flip);
            } else if (EXTREMUM) {
                maximum_pack<T>(acc, v[j], flip);
            } else {
                add_pack<T>(acc, v[j]);
            }
        }
    }
    flip_all<T>(acc, flip);
    return finish_sum<T>(acc, world_size, op);
}

template <class T, bool EXTREMUM>
AR_DEV void reduce_copied_as(const ReduceCopied& p) {
    u64 addresses = p.dst;
#pragma unroll 1
    for (u32 r = 0; r < p.world_size; r++) addresses |= p.sources[r];
    const u64 packs = (p.num_elems + T::ELEMS - 1) / T::ELEMS;
    const u64 whole = addresses % PACK_BYTES ? 0 : p.num_elems / T::ELEMS;
    const u64 stride = (u64)grid_x() * block_dim();
#pragma unroll 1
    for (u64 k = (u64)block_x() * block_dim() + thread_x(); k < packs; k += stride) {
        if (AR_LIKELY(k < whole)) {
            const Pack result = reduce_loaded<T, EXTREMUM>(p.world_size, p.op, [&](u32 r) { return ld_weak_pack(p.sources[r] + k * PACK_BYTES); });
            st_weak_pack(p.dst + k * PACK_BYTES, result);
        } else {
            const Pack result =
                reduce_loaded<T, EXTREMUM>(p.world_size, p.op, [&](u32 r) { return load_elements<T::SIZE, false>(p.sources[r], p.num_elems, k * T::ELEMS); });
            store_elements<T::SIZE>(p.dst, p.num_elems, k * T::ELEMS, result);
        }
    }
}

template <class T>
AR_DEV_COLD void refuse_copied(const ReduceCopied& p) {
    Pack nan;
#pragma unroll
    for (int i = 0; i < 4; i++) nan.w[i] = T::NAN_WORD;
    const u64 stride = (u64)grid_x() * block_dim() * T::ELEMS;
#pragma unroll 1
    for (u64 first = ((u64)block_x() * block_dim() + thread_x()) * T::ELEMS; first < p.num_elems; first += stride)
        store_elements<T::SIZE>(p.dst, p.num_elems, first, nan);
}

template <class T>
AR_DEV void reduce_copied(const ReduceCopied& p) {
    wait_for_previous_kernel();
    const bool is_over = p.abort != 0 && ld_relaxed_u64(p.abort) != 0;  // SYNC: abort
    if (AR_UNLIKELY(is_over || p.world_size - 1u >= MAX_WORLD_SIZE || p.op > OP_MAX))
        refuse_copied<T>(p);
    else if (p.op > OP_AVG)
        reduce_copied_as<T, true>(p);
    else
        reduce_copied_as<T, false>(p);
}

}  // namespace allreduced
