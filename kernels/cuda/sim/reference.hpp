// Scalar reference of the reductions, written independently of the kernels: doubles and std::nearbyint
// where they round by bits. Used by this harness and by tests/gpu/kernels.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace reference {

enum class Dtype { f32 = 0, f16 = 1, bf16 = 2 };
enum class Op { sum = 0, avg = 1, min = 2, max = 3 };

inline size_t size_of(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

inline float widen(Dtype d, uint32_t bits) {
    if (d == Dtype::f32 || d == Dtype::bf16) {
        const uint32_t w = d == Dtype::f32 ? bits : bits << 16;
        float f;
        memcpy(&f, &w, 4);
        return f;
    }
    const int exp = bits >> 10 & 31, man = bits & 1023;
    double v = exp == 31 ? (man ? NAN : INFINITY) : exp ? std::ldexp(1024 + man, exp - 25) : std::ldexp(man, -24);
    return (float)(bits & 0x8000 ? -v : v);
}

// Rounds to `digits` significand bits, smallest exponent `emin`, overflow above `max`; ties to even.
inline double round_to(double v, int digits, int emin, double max_finite) {
    if (v == 0 || std::isinf(v)) return v;
    int e;
    std::frexp(v, &e);  // v = m * 2^e, 0.5 <= |m| < 1
    const int q = std::max(e - digits, emin - digits + 1);
    const double r = std::ldexp(std::nearbyint(std::ldexp(v, -q)), q);
    return std::fabs(r) > max_finite ? std::copysign(INFINITY, v) : r;
}

inline uint32_t narrow(Dtype d, float f) {
    uint32_t w;
    if (f != f) return d == Dtype::f32 ? 0x7fc00000u : d == Dtype::f16 ? 0x7e00u : 0x7fc0u;
    if (d == Dtype::f32) {
        memcpy(&w, &f, 4);
        return w;
    }
    if (d == Dtype::bf16) {
        const float r = (float)round_to(f, 8, -126, 0x1.fep127);
        memcpy(&w, &r, 4);
        return w >> 16;
    }
    const double r = round_to(f, 11, -14, 65504.0), a = std::fabs(r);
    const uint32_t sign = std::signbit(r) ? 0x8000u : 0;
    if (std::isinf(r)) return sign | 0x7c00u;
    if (a < 0x1p-14) return sign | (uint32_t)(a * 0x1p24);
    int e;
    const double m = std::frexp(a, &e);
    return sign | (uint32_t)(e + 14) << 10 | ((uint32_t)(m * 2048) & 1023u);
}

inline float combine(Op op, float a, float b) {
    if (op == Op::sum || op == Op::avg) return a + b;
    if (a != a || b != b) return NAN;
    if (a == b) return (op == Op::min) == std::signbit(a) ? a : b;
    return (op == Op::min) == (a < b) ? a : b;
}

inline uint32_t get(Dtype d, const uint8_t* p, size_t i) {
    uint32_t w = 0;
    memcpy(&w, p + i * size_of(d), size_of(d));
    return w;
}

// inputs[r] has num_elems elements; returns the bytes of the result. A fixed tree: islands of island_size consecutive ranks,
// each reduced in rank order, then their partials in order; rounded once.
inline std::vector<uint8_t> reduce_tree(Dtype d, Op op, const std::vector<const uint8_t*>& inputs, size_t num_elems, size_t island_size) {
    std::vector<uint8_t> out(num_elems * size_of(d));
    const float scale = 1.0f / (float)inputs.size();
    for (size_t i = 0; i < num_elems; i++) {
        volatile float acc = 0;
        for (size_t first = 0; first < inputs.size(); first += island_size) {
            volatile float partial = widen(d, get(d, inputs[first], i));
            for (size_t r = first + 1; r < first + island_size; r++) partial = combine(op, partial, widen(d, get(d, inputs[r], i)));
            acc = first == 0 ? partial : combine(op, acc, partial);
        }
        if (op == Op::avg) acc = acc * scale;
        const uint32_t bits = narrow(d, acc);
        memcpy(&out[i * size_of(d)], &bits, size_of(d));
    }
    return out;
}
// All in rank order.
inline std::vector<uint8_t> reduce(Dtype d, Op op, const std::vector<const uint8_t*>& inputs, size_t num_elems) {
    return reduce_tree(d, op, inputs, num_elems, inputs.size());
}

struct Rng {
    uint64_t s;
    explicit Rng(uint64_t seed) : s(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
    uint32_t next() {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        return (uint32_t)(s >> 32);
    }
};

// Values that break things, one in `special` elements: zeros of both signs, subnormals, infinities, NaNs
// of many payloads, and runs of all-ones.
inline void fill(Dtype d, uint8_t* p, size_t num_elems, uint64_t seed, unsigned special = 4) {
    static const uint32_t f32s[] = {0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00400000, 0x7f800000, 0xff800000,
                                    0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff, 0xffffffff, 0x7fffffff, 0x7f7fffff,
                                    0x3f800000, 0xbf800000};
    static const uint32_t f16s[] = {0x0000, 0x8000, 0x0001, 0x83ff, 0x0200, 0x7c00, 0xfc00, 0x7e00,
                                    0xfe00, 0x7c01, 0xffff, 0xffff, 0x7fff, 0x7bff, 0x3c00, 0xbc00};
    static const uint32_t bf16s[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x0040, 0x7f80, 0xff80, 0x7fc0,
                                     0xffc0, 0x7f81, 0xffff, 0xffff, 0x7fff, 0x7f7f, 0x3f80, 0xbf80};
    Rng rng(seed);
    for (int i = 0; i < 4; i++) rng.next();
    size_t run = 0;
    for (size_t i = 0; i < num_elems; i++) {
        uint32_t bits;
        const uint32_t x = rng.next();
        if (run) {
            run--;
            bits = 0xffffffff;
        } else if (special && x % (special * 16) == 1) {
            run = 5;
            bits = 0xffffffff;
        } else if (special && x % special == 0) {
            const uint32_t k = (x >> 8) & 15;
            bits = d == Dtype::f32 ? f32s[k] : d == Dtype::f16 ? f16s[k] : bf16s[k];
        } else {
            // Moderate magnitudes, full mantissas.
            bits = d == Dtype::f32   ? (x & 0x807fffffu) | ((120 + (x >> 23) % 16) << 23)
                   : d == Dtype::f16 ? (x & 0x83ffu) | ((8 + (x >> 10 & 15)) << 10)
                                     : (x & 0x807fu) | ((120 + (x >> 7 & 15)) << 7);
        }
        memcpy(p + i * size_of(d), &bits, size_of(d));
    }
}

inline uint32_t canonical_nan(Dtype d) { return d == Dtype::f32 ? 0x7fc00000u : d == Dtype::f16 ? 0x7e00u : 0x7fc0u; }

}  // namespace reference
