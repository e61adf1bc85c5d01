// Numbers: element types, the reduction of one pack in rank order, NaN rules.
//
// Results equal the host backend's bit for bit: the accumulator starts as rank 0's element and takes
// ranks 1.. in order, in f32; avg multiplies the sum by f32(1/world_size); min and max are IEEE-754-2019
// minimum and maximum (NaN propagates, -0 < +0); one rounding, to nearest even; subnormals exact; a NaN
// result is the canonical one. A hierarchical reduction keeps f32 partials of each island's ranks, in rank order, and takes
// those in island order. No toolkit header: conversions are PTX, or integer code in the harness.
#pragma once
#include "mem.cuh"

namespace allreduced {

#if AR_CUDA
AR_DEV float as_float(u32 v) { return __uint_as_float(v); }
AR_DEV u32 as_u32(float v) { return __float_as_uint(v); }
// Explicitly rounded, never contracted into an fma, subnormals kept.
AR_DEV float add_rn(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
AR_DEV float mul_rn(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
AR_DEV float reciprocal_rn(float a) {
    float r;
    asm("rcp.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
// IEEE-754-2019 maximum, but for the payload of a NaN.
AR_DEV float maximum(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
AR_DEV void f16x2_to_f32(u32 w, float& lo, float& hi) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(lo), "=f"(hi)
        : "r"(w));
}
AR_DEV u32 f32_to_f16x2(float lo, float hi) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}
AR_DEV u32 f32_to_bf16x2(float lo, float hi) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}
#else
using sim::add_rn;
using sim::as_float;
using sim::as_u32;
using sim::f16x2_to_f32;
using sim::f32_to_bf16x2;
using sim::f32_to_f16x2;
using sim::maximum;
using sim::mul_rn;
using sim::reciprocal_rn;
#endif

AR_DEV bool is_nan(float v) { return v != v; }

// Element types. ELEMS: elements of a pack. NAN_WORD: a word full of canonical NaNs.
// pack() rounds; a NaN may come out with any payload, fix_nan() makes it canonical.
struct F32 {
    static constexpr u32 DTYPE = DTYPE_F32, SIZE = 4, ELEMS = 4, NAN_WORD = 0x7fc00000u;
    static AR_DEV void unpack(const Pack& p, float* f) {
        for (int i = 0; i < 4; i++) f[i] = as_float(p.w[i]);
    }
    static AR_DEV void pack(const float* f, Pack& p) {
        for (int i = 0; i < 4; i++) p.w[i] = as_u32(f[i]);
    }
    static AR_DEV u32 fix_nan(u32 w, float lo, float) { return is_nan(lo) ? NAN_WORD : w; }
};
struct F16 {
    static constexpr u32 DTYPE = DTYPE_F16, SIZE = 2, ELEMS = 8, NAN_WORD = 0x7e007e00u;
    static AR_DEV void unpack(const Pack& p, float* f) {
        for (int i = 0; i < 4; i++) f16x2_to_f32(p.w[i], f[2 * i], f[2 * i + 1]);
    }
    static AR_DEV void pack(const float* f, Pack& p) {
        for (int i = 0; i < 4; i++) p.w[i] = f32_to_f16x2(f[2 * i], f[2 * i + 1]);
    }
    static AR_DEV u32 fix_nan(u32 w, float lo, float hi) {
        if (is_nan(lo)) w = (w & 0xffff0000u) | 0x7e00u;
        if (is_nan(hi)) w = (w & 0x0000ffffu) | 0x7e000000u;
        return w;
    }
};
struct BF16 {
    static constexpr u32 DTYPE = DTYPE_BF16, SIZE = 2, ELEMS = 8, NAN_WORD = 0x7fc07fc0u;
    static AR_DEV void unpack(const Pack& p, float* f) {
        for (int i = 0; i < 4; i++) {
            f[2 * i] = as_float(p.w[i] << 16);
            f[2 * i + 1] = as_float(p.w[i] & 0xffff0000u);
        }
    }
    static AR_DEV void pack(const float* f, Pack& p) {
        for (int i = 0; i < 4; i++) p.w[i] = f32_to_bf16x2(f[2 * i], f[2 * i + 1]);
    }
    static AR_DEV u32 fix_nan(u32 w, float lo, float hi) {
        if (is_nan(lo)) w = (w & 0xffff0000u) | 0x7fc0u;
        if (is_nan(hi)) w = (w & 0x0000ffffu) | 0x7fc00000u;
        return w;
    }
};

// Minimum is -maximum(-a, -b), zeros included (a NaN's sign does not matter): for OP_MIN the accumulator is kept
// negated.
template <class T>
AR_DEV Pack rounded(const float* acc) {
    Pack out;
    T::pack(acc, out);
    bool any_nan = false;
#pragma unroll
    for (u32 i = 0; i < T::ELEMS; i++) any_nan |= is_nan(acc[i]);
    if (AR_UNLIKELY(any_nan)) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            out.w[i] = T::SIZE == 4 ? T::fix_nan(out.w[i], acc[i % T::ELEMS], 0.0f)
                                    : T::fix_nan(out.w[i], acc[(2 * i) % T::ELEMS], acc[(2 * i + 1) % T::ELEMS]);
    }
    return out;
}

// The accumulator takes the next rank's elements.
template <class T>
AR_DEV void add_pack(float* acc, const Pack& p) {
    float x[T::ELEMS];
    T::unpack(p, x);
#pragma unroll
    for (u32 i = 0; i < T::ELEMS; i++) acc[i] = add_rn(acc[i], x[i]);
}
template <class T>
AR_DEV void maximum_pack(float* acc, const Pack& p, u32 flip) {
    float x[T::ELEMS];
    T::unpack(p, x);
#pragma unroll
    for (u32 i = 0; i < T::ELEMS; i++) acc[i] = maximum(acc[i], as_float(as_u32(x[i]) ^ flip));
}
AR_DEV u32 flip_of(u32 op) { return op == OP_MIN ? 0x80000000u : 0u; }
template <class T>
AR_DEV void flip_all(float* acc, u32 flip) {
#pragma unroll
    for (u32 i = 0; i < T::ELEMS; i++) acc[i] = as_float(as_u32(acc[i]) ^ flip);
}
// What is left when all ranks' elements are in: the average's factor, the one rounding.
template <class T>
AR_DEV Pack finish_sum(float* acc, u32 world_size, u32 op) {
    if (op == OP_AVG) {
        const float scale = reciprocal_rn((float)world_size);
#pragma unroll
        for (u32 i = 0; i < T::ELEMS; i++) acc[i] = mul_rn(acc[i], scale);
    }
    return rounded<T>(acc);
}

// v[0..count) in order, in f32, neither scaled nor rounded. v is indexed by constants only, so it stays in registers. Sums go
// straight through; minimum and maximum are out of line, by way of the stack, so that sums do not fetch their code.
template <class T, int W>
AR_DEV void sum(const Pack (&v)[W], u32 count, float (&acc)[T::ELEMS]) {
    T::unpack(v[0], acc);
#pragma unroll
    for (int r = 1; r < W; r++)
        if (r < (int)count) add_pack<T>(acc, v[r]);
}
template <class T>
AR_DEV void extremum(const Pack* v, u32 count, u32 op, float* acc) {
    const u32 flip = flip_of(op);
    T::unpack(v[0], acc);
    flip_all<T>(acc, flip);
#pragma unroll 1
    for (u32 r = 1; r < count; r++) maximum_pack<T>(acc, v[r], flip);
    flip_all<T>(acc, flip);
}

// Reduces v[0..world_size) in rank order.
template <class T>
AR_DEV_COLD Pack reduce_extremum(const Pack* v, u32 world_size, u32 op) {
    float acc[T::ELEMS];
    extremum<T>(v, world_size, op, acc);
    return rounded<T>(acc);
}
template <class T, int W>
AR_DEV Pack reduce(const Pack (&v)[W], u32 world_size, u32 op) {
    if (AR_UNLIKELY(op > OP_AVG)) {
        Pack copy[W];
#pragma unroll
        for (int r = 0; r < W; r++)
            if (r < (int)world_size) copy[r] = v[r];
        return reduce_extremum<T>(copy, world_size, op);
    }
    float acc[T::ELEMS];
    sum<T, W>(v, world_size, acc);
    return finish_sum<T>(acc, world_size, op);
}

// The same up to where it may go on elsewhere: f32 partials of v[0..count). A partial of partials is one with T = F32;
// the last one goes through finish_sum, whatever the operator.
template <class T>
AR_DEV_COLD void accumulate_extremum(const Pack* v, u32 count, u32 op, float* acc) {
    extremum<T>(v, count, op, acc);
}
template <class T, int W>
AR_DEV void accumulate(const Pack (&v)[W], u32 count, u32 op, float (&acc)[T::ELEMS]) {
    if (AR_UNLIKELY(op > OP_AVG)) {
        Pack copy[W];
        float out[T::ELEMS];
#pragma unroll
        for (int r = 0; r < W; r++)
            if (r < (int)count) copy[r] = v[r];
        accumulate_extremum<T>(copy, count, op, out);
#pragma unroll
        for (u32 i = 0; i < T::ELEMS; i++) acc[i] = out[i];
        return;
    }
    sum<T, W>(v, count, acc);
}
// Four partials as they are sent: a NaN is the canonical one, so no word of them is EMPTY_WORD.
AR_DEV Pack partial_pack(const float* acc) {
    Pack p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.w[i] = is_nan(acc[i]) ? F32::NAN_WORD : as_u32(acc[i]);
    return p;
}

// On the way in: the all-ones word, a NaN in each of its elements, becomes another NaN word. Every
// other word is kept, since the result of a NaN is the canonical NaN whatever payload went in.
template <class T>
AR_DEV Pack without_empty(Pack p) {
#if !defined(AR_MUTATE_NO_CANONICAL)
#pragma unroll
    for (int i = 0; i < 4; i++) p.w[i] = p.w[i] == EMPTY_WORD ? T::NAN_WORD : p.w[i];
#endif
    return p;
}
AR_DEV bool has_empty(const Pack& p) {
    return p.w[0] == EMPTY_WORD || p.w[1] == EMPTY_WORD || p.w[2] == EMPTY_WORD || p.w[3] == EMPTY_WORD;
}
AR_DEV Pack empty_pack() { return Pack{{EMPTY_WORD, EMPTY_WORD, EMPTY_WORD, EMPTY_WORD}}; }

// Element by element: odd alignment, and the last pack. Out of line, so that it costs the fast path
// nothing but a branch.
// PEER: of a direct source.
template <u32 SIZE, bool PEER>
AR_DEV_COLD Pack load_elements(u64 base, u64 num_elems, u64 first) {
    constexpr u32 ELEMS = PACK_BYTES / SIZE;
    Pack p{{0, 0, 0, 0}};
#pragma unroll
    for (u32 i = 0; i < ELEMS; i++) {
        if (first + i >= num_elems) continue;
        const u64 a = base + (first + i) * SIZE;
        if (SIZE == 4)
            p.w[i % 4] = PEER ? ld_peer_u32(a) : ld_weak_u32(a);
        else
            p.w[i / 2] |= (PEER ? ld_peer_u16(a) : ld_weak_u16(a)) << (16 * (i & 1));
    }
    return p;
}
template <u32 SIZE>
AR_DEV_COLD void store_elements(u64 base, u64 num_elems, u64 first, Pack p) {
    constexpr u32 ELEMS = PACK_BYTES / SIZE;
#pragma unroll
    for (u32 i = 0; i < ELEMS; i++) {
        if (first + i >= num_elems) continue;
        const u64 a = base + (first + i) * SIZE;
        if (SIZE == 4)
            st_weak_u32(a, p.w[i % 4]);
        else
            st_weak_u16(a, p.w[i / 2] >> (16 * (i & 1)));
    }
}

// A caller's tensor as packs. Pack k < whole_packs is one aligned access. load() pads the last pack
// with zeros, store() writes the elements that exist.
template <class T>
struct Tensor {
    u64 base;
    u64 num_elems;
    u32 whole_packs;
    AR_DEV Tensor(u64 base_, u64 num_elems_, u32 whole_packs_) : base(base_), num_elems(num_elems_), whole_packs(whole_packs_) {}
    AR_DEV Pack load(u32 k) const {
        if (k < whole_packs) return ld_weak_pack(base + (u64)k * PACK_BYTES);
        return load_elements<T::SIZE, false>(base, num_elems, (u64)k * T::ELEMS);
    }
    AR_DEV void store(u32 k, const Pack& p) const {
        if (k < whole_packs)
            st_weak_pack(base + (u64)k * PACK_BYTES, p);
        else
            store_elements<T::SIZE>(base, num_elems, (u64)k * T::ELEMS, p);
    }
};
// A direct source, of the same length and of unknown alignment.
template <class T>
AR_DEV Pack load_peer(u64 base, u64 num_elems, u32 k) {
    if ((base & (PACK_BYTES - 1)) == 0 && k < (u32)(num_elems / T::ELEMS)) return ld_peer_pack(base + (u64)k * PACK_BYTES);
    return load_elements<T::SIZE, true>(base, num_elems, (u64)k * T::ELEMS);
}

}  // namespace allreduced
