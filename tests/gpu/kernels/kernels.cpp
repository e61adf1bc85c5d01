// The CUDA kernels on a GPU: conformance, aborts, and latency in CUDA graphs.
//
//   kernels IMAGE conform            virtual ranks in one launch, all variants, islands of each size, reduce_copied, bit for bit
//   kernels IMAGE sanitize           a sample of the same, for compute-sanitizer
//   kernels IMAGE abort              stalled rank, mismatch, capacity, abort word; time to return
//   kernels IMAGE processes N        one process per rank (MPS): changing inputs, overwritten at once
//   kernels IMAGE bench N [tune|best] [FLOOR_IMAGE]   one process per rank, graphs of 122 calls
//   kernels IMAGE fused N [tune|best]   the same in one launch per call
//   kernels IMAGE compare N LIST IMAGE...   bench for several images in turn, in the same processes; LIST: lines
//                                    "n variant bytes pdl blocks threads", variant as in VARIANTS
//
// Driver API only. Needs a device; run says "skipped: no GPU" where there is none.
#include <cuda.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../../../kernels/cuda/abi.h"
#include "../../../kernels/cuda/sim/reference.hpp"

using namespace allreduced;

namespace {

#define CU(x)                                                                         \
    do {                                                                              \
        CUresult e_ = (x);                                                            \
        if (e_ != CUDA_SUCCESS) {                                                     \
            const char* s_ = "?";                                                     \
            cuGetErrorString(e_, &s_);                                                \
            printf("FAIL CUDA %s: %s (line %d)\n", #x, s_, __LINE__);                 \
            fflush(stdout);                                                           \
            _exit(1);                                                                 \
        }                                                                             \
    } while (0)

struct Variant {
    u32 algorithm;
    bool direct;
    const char* name;
    const char* kernel;
};
const Variant VARIANTS[] = {
    {ONE_SHOT_PUSH, false, "one_shot_push", "one_shot_push"},
    {ONE_SHOT_PULL, false, "one_shot_pull", "one_shot_pull"},
    {ONE_SHOT_PULL, true, "one_shot_pull/direct", "one_shot_pull"},
    {ONE_SHOT_PULL_INBAND, false, "one_shot_pull_inband", "one_shot_pull_inband"},
    {TWO_SHOT_PUSH, false, "two_shot_push", "two_shot_push"},
    {TWO_SHOT_PULL, false, "two_shot_pull", "two_shot_pull"},
    {TWO_SHOT_PULL, true, "two_shot_pull/direct", "two_shot_pull"},
    {TWO_SHOT_PULL_INBAND, false, "two_shot_pull_inband", "two_shot_pull_inband"},
    {TWO_SHOT_PULL_INBAND, true, "two_shot_pull_inband/dir", "two_shot_pull_inband"},
    {HIERARCHICAL, false, "hierarchical", "hierarchical"},
};
constexpr int NUM_VARIANTS = sizeof VARIANTS / sizeof *VARIANTS;
const char* DTYPES[] = {"f32", "f16", "bf16"};
constexpr u32 SERVICE = 32;

double now_us() { return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Device {
    CUdevice dev;
    CUcontext ctx;
    CUstream stream;
    CUmodule module;
    int sms;
    std::map<std::string, CUfunction> functions;
    explicit Device(const char* image) {
        CU(cuInit(0));
        CU(cuDeviceGet(&dev, 0));
        CU(cuDevicePrimaryCtxRetain(&ctx, dev));
        CU(cuCtxSetCurrent(ctx));
        CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CU(cuModuleLoad(&module, image));
        CU(cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev));
    }
    static std::string entry(const char* kernel, u32 dtype, u32 n) {
        const std::string world = n == 2 || n == 4 || n == 8 ? "n" + std::to_string(n) : n < 4 ? "w4" : n < 8 ? "w8" : "w16";
        return std::string("allreduced_") + kernel + "_" + DTYPES[dtype] + "_" + world;
    }
    CUfunction get(const char* kernel, u32 dtype, u32 n) { return named(entry(kernel, dtype, n)); }
    CUfunction named(const std::string& name) {
        CUfunction& f = functions[name];
        if (!f) CU(cuModuleGetFunction(&f, module, name.c_str()));
        return f;
    }
    // Blocks of this shape that can be resident at once: what a launch of waiting ranks must not exceed.
    long resident_blocks(CUfunction f, u32 block_threads) {
        int per_sm = 0, most = 0;
        CU(cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f));
        if ((int)block_threads > most) return 0;
        CU(cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, f, (int)block_threads, 0));
        return (long)per_sm * sms;
    }
};

// Island sizes that a world of n ranks is tried with; the last one is the one to measure.
std::vector<u32> island_sizes(u32 n) {
    if (n == 4) return {2};
    if (n == 6) return {2, 3};
    if (n == 8) return {2, 4};
    return {n % 4 == 0 ? 4 : n};
}
// What a variant gives, bit for bit.
std::vector<uint8_t> expected(const Variant& v, reference::Dtype d, reference::Op op, const std::vector<const uint8_t*>& in, u64 num, u32 island_size) {
    return v.algorithm == HIERARCHICAL ? reference::reduce_tree(d, op, in, num, island_size) : reference::reduce(d, op, in, num);
}

struct Geometry {
    u32 n;
    u64 slot, inband, staging, arena;
    u32 island_size() const { return island_sizes(n).back(); }
    u64 push_offset() const { return SIGNAL_BYTES; }
    u64 inband_offset() const { return push_offset() + 2 * n * slot; }
    u64 staging_offset() const { return inband_offset() + 8 * inband; }
    u64 arena_offset() const { return staging_offset() + 4 * staging; }
    u64 window_bytes() const { return arena_offset() + arena; }
};

void init_window(const Geometry& g, CUdeviceptr w) {
    CU(cuMemsetD8(w, 0, SIGNAL_BYTES));
    CU(cuMemsetD8(w + g.push_offset(), 0xff, g.staging_offset() - g.push_offset()));
    CU(cuMemsetD8(w + g.staging_offset(), 0x5a, g.window_bytes() - g.staging_offset()));
}
Control make_control(const Geometry& g, u32 rank, u32 epoch, u64 timeout_ns, u64 status, const CUdeviceptr* windows) {
    Control c;
    memset(&c, 0, sizeof c);
    c.abi_version = ABI_VERSION;
    c.world_size = g.n;
    c.rank = rank;
    c.epoch = epoch;
    c.timeout_ns = timeout_ns;
    c.status = status;
    c.push_offset = g.push_offset();
    c.push_slot_bytes = g.slot;
    c.inband_offset = g.inband_offset();
    c.inband_part_bytes = g.inband;
    c.staging_offset = g.staging_offset();
    c.staging_part_bytes = g.staging;
    c.island_size = g.island_size();
    for (u32 r = 0; r < g.n; r++) {
        c.window[r] = windows[r];
        c.arena[r] = windows[r] + g.arena_offset();
    }
    return c;
}

struct Shape {
    u32 blocks, threads;  // data threads
};

// A call before its launch shape is known.
struct Request {
    u64 control, src, dst, num_elems;
    u32 op, flags;
};
Call complete(const Request& q, u32 elem_bytes, Shape s) {
    return make_call(q.control, q.src, q.dst, q.num_elems, elem_bytes, q.op, q.flags, s.blocks, s.threads);
}

// All ranks of a communicator in this process.
struct World {
    Device& d;
    Geometry g;
    u32 epoch = 0;
    u64 timeout_ns;
    std::vector<CUdeviceptr> windows;
    std::vector<CUdeviceptr> controls;
    u64* status;
    CUdeviceptr status_device;
    World(Device& dev, Geometry geometry, u64 timeout) : d(dev), g(geometry), timeout_ns(timeout), windows(g.n), controls(g.n) {
        for (u32 r = 0; r < g.n; r++) {
            CU(cuMemAlloc(&windows[r], g.window_bytes()));
            CU(cuMemAlloc(&controls[r], sizeof(Control)));
        }
        CU(cuMemHostAlloc((void**)&status, 8 * MAX_WORLD_SIZE, CU_MEMHOSTALLOC_DEVICEMAP));
        CU(cuMemHostGetDevicePointer(&status_device, status, 0));
        form();
    }
    void form() {
        epoch++;
        memset(status, 0, 8 * MAX_WORLD_SIZE);
        for (u32 r = 0; r < g.n; r++) {
            init_window(g, windows[r]);
            const Control c = make_control(g, r, epoch, timeout_ns, status_device + 8 * r, windows.data());
            CU(cuMemcpyHtoD(controls[r], &c, sizeof c));
        }
        CU(cuCtxSynchronize());
    }
    // While no call is in flight.
    void set_island_size(u32 island_size) {
        for (u32 r = 0; r < g.n; r++) CU(cuMemcpyHtoD(controls[r] + offsetof(Control, island_size), &island_size, sizeof island_size));
    }
    ~World() {
        for (u32 r = 0; r < g.n; r++) {
            cuMemFree(windows[r]);
            cuMemFree(controls[r]);
        }
        cuMemFreeHost(status);
    }
    CUdeviceptr arena(u32 r) const { return windows[r] + g.arena_offset(); }
    // One launch of the ranks in `calls`.
    void launch(CUfunction f, u32 elem_bytes, Shape s, const std::vector<Request>& calls, CUstream stream) {
        if (d.resident_blocks(f, s.threads + SERVICE) < (long)s.blocks * (long)calls.size()) {
            printf("FAIL %u x %u x %zu blocks cannot be resident together\n", s.blocks, s.threads, calls.size());
            _exit(1);
        }
        Launch l;
        memset(&l, 0, sizeof l);
        for (size_t i = 0; i < calls.size(); i++) l.calls[i] = complete(calls[i], elem_bytes, s);
        void* params[] = {&l};
        CU(cuLaunchKernel(f, s.blocks, (unsigned)calls.size(), 1, s.threads + SERVICE, 1, 1, 0, stream, params, nullptr));
    }
};

int failures = 0;
#define FAIL(...)                            \
    do {                                     \
        if (failures++ < 25) {               \
            printf("FAIL ");                 \
            printf(__VA_ARGS__);             \
            printf("\n");                    \
            fflush(stdout);                  \
        }                                    \
    } while (0)

// reduce_copied: no communicator, tensors of this process.
long copied(Device& d, bool few) {
    const u64 room = 1 << 20;
    long checks = 0;
    std::vector<CUdeviceptr> memories(MAX_WORLD_SIZE + 1);
    for (CUdeviceptr& m : memories) CU(cuMemAlloc(&m, room));
    for (u32 n : {1u, 2u, 3u, 4u, 5u, 8u, 15u, 16u})
        for (u32 dt = 0; dt < 3; dt++)
            for (u32 op = 0; op < 4; op++)
                for (u64 num : {(u64)0, (u64)1, (u64)7, (u64)4099, (u64)21504, (u64)200001}) {
                    if (few && (num > 4099 || op != dt)) continue;
                    const auto dtype = (reference::Dtype)dt;
                    const u64 size = reference::size_of(dtype), bytes = num * size;
                    std::vector<std::vector<uint8_t>> in(n, std::vector<uint8_t>(bytes + 1));
                    std::vector<const uint8_t*> ptr;
                    for (u32 r = 0; r < n; r++) {
                        reference::fill(dtype, in[r].data(), num, (n * 131 + dt * 17 + op) * 991 + num * 31 + r, n > 4 ? 32 : 12);
                        ptr.push_back(in[r].data());
                    }
                    const auto want = reference::reduce(dtype, (reference::Op)op, ptr, num);
                    for (u32 place = 0; place < 4; place++) {  // aligned; in place; one source an element off; all, and the destination
                        ReduceCopied p;
                        memset(&p, 0, sizeof p);
                        for (u32 r = 0; r < n; r++) {
                            p.sources[r] = memories[r] + 256 + (place == 3 || (place == 2 && r == n / 2) ? size : 0);
                            CU(cuMemsetD8Async(p.sources[r] - 16, 0xcc, bytes + 32, d.stream));
                            if (bytes) CU(cuMemcpyHtoDAsync(p.sources[r], in[r].data(), bytes, d.stream));
                        }
                        p.dst = place == 1 ? p.sources[op % n] : memories[MAX_WORLD_SIZE] + 256 + (place == 3 ? 3 * size : 0);
                        if (place != 1) CU(cuMemsetD8Async(p.dst - 16, 0xcc, bytes + 32, d.stream));
                        p.num_elems = num;
                        p.world_size = n;
                        p.op = op;
                        const Shape shapes[] = {{1, 32}, {7, 100}, {132, 512}};
                        const Shape s = shapes[checks % 3];
                        void* params[] = {&p};
                        CU(cuLaunchKernel(d.named(std::string("allreduced_reduce_copied_") + DTYPES[dt]), s.blocks, 1, 1, s.threads, 1, 1, 0, d.stream, params, nullptr));
                        std::vector<uint8_t> got(bytes + 32);
                        CU(cuMemcpyDtoHAsync(got.data(), p.dst - 16, bytes + 32, d.stream));
                        CU(cuStreamSynchronize(d.stream));
                        bool ok = memcmp(got.data() + 16, want.data(), bytes) == 0;
                        for (int i = 0; i < 16; i++) ok &= got[i] == 0xcc && got[bytes + 16 + i] == 0xcc;
                        if (!ok) FAIL("reduce_copied %s n=%u op=%u elems=%llu place=%u %ux%u", DTYPES[dt], n, op, num, place, s.blocks, s.threads);
                        checks++;
                    }
                }
    {  // What does not exist becomes NaN.
        const u64 num = 1001;
        for (u32 bad = 0; bad < 4; bad++) {
            ReduceCopied p;
            memset(&p, 0, sizeof p);
            if (bad == 3) {  // An abort word that is set.
                p.abort = memories[1];
                CU(cuMemsetD8Async(p.abort, 1, 8, d.stream));
            }
            for (u64& source : p.sources) source = memories[0] + 256;
            p.dst = memories[MAX_WORLD_SIZE] + 256;
            p.num_elems = num;
            p.world_size = bad == 0 ? 0 : bad == 1 ? MAX_WORLD_SIZE + 1 : 2;
            p.op = bad == 2 ? 4 : 0;
            void* params[] = {&p};
            CU(cuLaunchKernel(d.named("allreduced_reduce_copied_bf16"), 2, 1, 1, 64, 1, 1, 0, d.stream, params, nullptr));
            std::vector<uint8_t> got(2 * num);
            CU(cuMemcpyDtoHAsync(got.data(), p.dst, 2 * num, d.stream));
            CU(cuStreamSynchronize(d.stream));
            for (u64 i = 0; i < num; i++)
                if (reference::get(reference::Dtype::bf16, got.data(), i) != 0x7fc0) {
                    FAIL("reduce_copied refused (%u): element %llu is not NaN", bad, i);
                    break;
                }
            checks++;
        }
    }
    for (CUdeviceptr m : memories) CU(cuMemFree(m));
    printf("reduce_copied: %ld calls, %d failures\n", checks, failures);
    return checks;
}

// few: a sample that ends in time under a memory checker.
int conform(const char* image, bool few) {
    Device d(image);
    const u64 big = few ? 64u << 10 : 8u << 20;
    long checks = 0;
    const double start = now_us();
    for (u32 n : {2u, 3u, 4u, 5u, 6u, 7u, 8u, 16u}) {
        if (few && n != 2 && n != 3 && n != 8) continue;
        World w(d, {n, big + 256, big + 256, big + 256, 3 * big}, 10000000000ull);
        for (u32 dt = 0; dt < 3; dt++) {
            const auto dtype = (reference::Dtype)dt;
            const u64 size = reference::size_of(dtype);
            for (u32 op = 0; op < 4; op++)
                for (u64 num : {(u64)0, (u64)1, (u64)7, (u64)21504, (u64)21505, (u64)4099, (u64)30011, big / size}) {
                    if (few && (num > 4099 || op != dt)) continue;
                    if (num == big / size && ((op + dt) % 4 != 2 || (n != 2 && n != 4 && n != 7))) continue;
                    const u64 bytes = num * size;
                    std::vector<std::vector<uint8_t>> in(n, std::vector<uint8_t>(bytes + 1));
                    std::vector<const uint8_t*> ptr;
                    for (u32 r = 0; r < n; r++) {
                        reference::fill(dtype, in[r].data(), num, (n * 131 + dt * 17 + op) * 977 + num * 31 + r, n > 4 ? 32 : 12);
                        ptr.push_back(in[r].data());
                    }
                    const std::vector<uint8_t> flat = reference::reduce(dtype, (reference::Op)op, ptr, num);
                    const auto check_variant = [&](int v, u32 island_size, const std::vector<uint8_t>& want) {
                        for (int place = 0; place < 4; place++) {
                            if (num == big / size && place > 1) continue;
                            const bool in_place = place & 1;
                            // Odd alignment: one element off a pack; 4099 elements stand for it.
                            const u64 skew = place >= 2 || num == 4099 ? size : 0, dst_skew = in_place ? skew : place >= 2 ? 3 * size : skew;
                            std::vector<Request> calls;
                            std::vector<CUdeviceptr> dst(n);
                            for (u32 r = 0; r < n; r++) {
                                const CUdeviceptr src = w.arena(r) + 256 + skew;
                                dst[r] = in_place ? src : w.arena(r) + 256 + (big + 256) + 256 + dst_skew;
                                CU(cuMemsetD8Async(dst[r] - 16, 0xcc, bytes + 32, d.stream));
                                if (bytes) CU(cuMemcpyHtoDAsync(src, in[r].data(), bytes, d.stream));
                                const bool arena = (num + r) % 2;
                                Request c = {w.controls[r], src - (arena ? w.arena(r) : 0), dst[r] - (arena ? w.arena(r) : 0), num, op,
                                          (VARIANTS[v].direct ? CALL_DIRECT : 0) | (arena ? CALL_SRC_IN_ARENA | CALL_DST_IN_ARENA : 0)};
                                calls.push_back(c);
                            }
                            const Shape shapes[] = {{3, 96}, {1, 160}, {8, 160}, {5, 64}};
                            w.launch(d.get(VARIANTS[v].kernel, dt, n), (u32)size, shapes[(checks + place) % 4], calls, d.stream);
                            std::vector<uint8_t> got(bytes + 32);
                            for (u32 r = 0; r < n; r++) {
                                CU(cuMemcpyDtoHAsync(got.data(), dst[r] - 16, bytes + 32, d.stream));
                                CU(cuStreamSynchronize(d.stream));
                                bool ok = memcmp(got.data() + 16, want.data(), bytes) == 0;
                                for (int i = 0; i < 16; i++) ok &= got[i] == 0xcc && got[bytes + 16 + i] == 0xcc;
                                if (!ok) {
                                    u64 i = 0;
                                    while (i < num && memcmp(&got[16 + i * size], &want[i * size], size) == 0) i++;
                                    FAIL("%s %s n=%u/%u op=%u elems=%llu place=%d rank=%u: from element %llu: got %x want %x, status %llx", VARIANTS[v].name,
                                         DTYPES[dt], n, island_size, op, num, place, r, i, i < num ? reference::get(dtype, got.data() + 16, i) : 0,
                                         i < num ? reference::get(dtype, want.data(), i) : 0, (u64)w.status[r]);
                                    break;
                                }
                            }
                            checks++;
                        }
                    };
                    for (int v = 0; v < NUM_VARIANTS; v++) {
                        if (VARIANTS[v].algorithm != HIERARCHICAL) {
                            check_variant(v, n, flat);
                            continue;
                        }
                        for (u32 island_size : island_sizes(n)) {
                            w.set_island_size(island_size);
                            check_variant(v, island_size, reference::reduce_tree(dtype, (reference::Op)op, ptr, num, island_size));
                        }
                    }
                }
        }
        for (u32 r = 0; r < n; r++)
            if (w.status[r]) FAIL("n=%u rank %u status %llx", n, r, (u64)w.status[r]);
        printf("conform n=%u: %ld calls, %d failures, %.1f s\n", n, checks, failures, (now_us() - start) * 1e-6);
        fflush(stdout);
        if (failures) break;
    }
    checks += copied(d, few);
    printf("SUMMARY %s: %s, %ld calls\n", few ? "sanitize" : "conform", failures ? "FAILED" : "passed", checks);
    return failures != 0;
}

int abort_tests(const char* image) {
    Device d(image);
    const u32 n = 4, dt = DTYPE_BF16;
    const u64 num = 21504, bytes = num * 2;
    long cases = 0;
    CUstream other;
    CU(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    const Shape shape = {6, 128};
    double worst_repeat = 0, worst_abort = 0;
    for (int v = 0; v < NUM_VARIANTS; v++) {
        World w(d, {n, 65536, 65536, 65536, 1 << 20}, 30000000ull);
        auto calls_for = [&](int absent, int different, u64 elems) {
            std::vector<Request> calls;
            for (u32 r = 0; r < n; r++) {
                if ((int)r == absent) continue;
                Request c = {w.controls[r], w.arena(r), w.arena(r) + 262144, elems, (u32)((int)r == different), VARIANTS[v].direct ? CALL_DIRECT : 0};
                calls.push_back(c);
            }
            return calls;
        };
        CUfunction f = d.get(VARIANTS[v].kernel, dt, n);
        std::vector<std::vector<uint8_t>> in(n, std::vector<uint8_t>(bytes));
        std::vector<const uint8_t*> ptr;
        for (u32 r = 0; r < n; r++) {
            reference::fill(reference::Dtype::bf16, in[r].data(), num, 77 + r, 0);
            ptr.push_back(in[r].data());
        }
        const auto want = expected(VARIANTS[v], reference::Dtype::bf16, reference::Op::sum, ptr, num, w.g.island_size());
        auto reset = [&] {
            for (u32 r = 0; r < n; r++) {
                CU(cuMemcpyHtoD(w.arena(r), in[r].data(), bytes));
                CU(cuMemsetD8(w.arena(r) + 262144, 0xcc, bytes));
            }
            memset(w.status, 0, 8 * MAX_WORLD_SIZE);
        };
        auto expect = [&](const char* what, int absent, bool nan, u32 reason, int blamed) {
            cases++;
            for (u32 r = 0; r < n; r++) {
                if ((int)r == absent) continue;
                std::vector<uint8_t> got(bytes);
                CU(cuMemcpyDtoH(got.data(), w.arena(r) + 262144, bytes));
                u64 bad = 0;
                for (u64 i = 0; i < num; i++)
                    bad += reference::get(reference::Dtype::bf16, got.data(), i) != (nan ? 0x7fc0 : reference::get(reference::Dtype::bf16, want.data(), i));
                const u64 s = ((volatile u64*)w.status)[r];
                u64 word = 0;
                CU(cuMemcpyDtoH(&word, w.windows[r], 8));
                if (bad) FAIL("%s %s rank %u: %llu elements are not %s", VARIANTS[v].name, what, r, bad, nan ? "NaN" : "exact");
                if (s >> 60 != reason || (blamed >= 0 && (s >> 56 & 15) != (u64)blamed) || (nan && word == 0))
                    FAIL("%s %s rank %u: status %llx abort %llx, want reason %u rank %d", VARIANTS[v].name, what, r, s, word, reason, blamed);
            }
        };
        reset();
        w.launch(f, 2, shape, calls_for(-1, -1, num), d.stream);
        CU(cuStreamSynchronize(d.stream));
        expect("good call", -1, false, 0, -1);
        reset();
        w.launch(f, 2, shape, calls_for(2, -1, num), d.stream);
        CU(cuStreamSynchronize(d.stream));
        expect("stalled rank", 2, true, REASON_TIMEOUT, 2);
        reset();
        double t = now_us();
        w.launch(f, 2, shape, calls_for(2, -1, num), d.stream);
        CU(cuStreamSynchronize(d.stream));
        worst_repeat = std::max(worst_repeat, now_us() - t);
        expect("call after failure", 2, true, REASON_TIMEOUT, 2);
        w.form();
        reset();
        w.launch(f, 2, shape, calls_for(-1, -1, num), d.stream);
        CU(cuStreamSynchronize(d.stream));
        expect("re-formed", -1, false, 0, -1);
        reset();
        w.launch(f, 2, shape, calls_for(-1, 1, num), d.stream);
        CU(cuStreamSynchronize(d.stream));
        expect("mismatch", -1, true, REASON_MISMATCH, -1);
        if (!(VARIANTS[v].direct && VARIANTS[v].algorithm == ONE_SHOT_PULL)) {
            w.form();
            reset();
            w.launch(f, 2, shape, calls_for(-1, -1, 262144), d.stream);  // output reaches past what is checked
            CU(cuStreamSynchronize(d.stream));
            expect("capacity", -1, true, REASON_BAD_CALL, -1);
        }
        if (VARIANTS[v].algorithm == HIERARCHICAL) {
            for (u32 island_size : {0u, 3u, 8u}) {  // four ranks are not cut like that
                w.form();
                reset();
                w.set_island_size(island_size);
                w.launch(f, 2, shape, calls_for(-1, -1, num), d.stream);
                CU(cuStreamSynchronize(d.stream));
                expect("islands", -1, true, REASON_BAD_CALL, -1);
            }
            w.form();
            reset();
            const u32 other = n;
            CU(cuMemcpyHtoD(w.controls[1] + offsetof(Control, island_size), &other, sizeof other));
            w.launch(f, 2, shape, calls_for(-1, -1, num), d.stream);
            CU(cuStreamSynchronize(d.stream));
            expect("other islands", -1, true, REASON_MISMATCH, -1);
        }
        w.timeout_ns = 5000000000ull;
        w.form();
        reset();
        w.launch(f, 2, shape, calls_for(3, -1, num), d.stream);
        usleep(3000);
        const u64 word = abort_word(REASON_HOST, 3, w.epoch, 0);
        t = now_us();
        for (u32 r = 0; r < n; r++) CU(cuMemcpyHtoDAsync(w.windows[r], &word, 8, other));
        CU(cuStreamSynchronize(d.stream));
        worst_abort = std::max(worst_abort, now_us() - t);
        expect("abort word", 3, true, REASON_HOST, 3);
        w.timeout_ns = 30000000ull;
    }
    printf("a call of a failed epoch returns within %.0f us, a waiting one within %.0f us of the abort word\n", worst_repeat, worst_abort);
    printf("SUMMARY abort: %s, %ld cases\n", failures ? "FAILED" : "passed", cases);
    return failures != 0;
}

// ---- one process per rank -------------------------------------------------------------------------

struct Board {
    std::atomic<int> arrived, generation, failed;
    CUipcMemHandle handle[MAX_WORLD_SIZE];
    double median[MAX_WORLD_SIZE];
    int bad[MAX_WORLD_SIZE];
};
void meet(Board* b, int n) {
    const int gen = b->generation.load();
    if (b->arrived.fetch_add(1) + 1 == n) {
        b->arrived = 0;
        b->generation++;
    } else {
        const double t = now_us();
        while (b->generation.load() == gen) {
            if (now_us() - t > 60e6 || b->failed.load()) {
                b->failed = 1;
                printf("FAIL a process did not come\n");
                fflush(stdout);
                _exit(2);
            }
        }
    }
}

struct Config {
    int variant;
    u64 bytes;
    Shape shape;
    bool pdl;
    double us;
};

constexpr int OPS = 122;

struct Peer {
    Device d;
    Geometry g;
    u32 rank;
    Board* board;
    std::vector<CUdeviceptr> windows;
    CUdeviceptr control, status_device;
    u64* status;
    Peer(const char* image, Geometry geometry, u32 r, Board* b) : d(image), g(geometry), rank(r), board(b), windows(g.n) {
        CUdeviceptr mine;
        CU(cuMemAlloc(&mine, std::max<u64>(g.window_bytes(), 4 << 20)));
        init_window(g, mine);
        CU(cuCtxSynchronize());
        CU(cuIpcGetMemHandle(&board->handle[rank], mine));
        ::meet(board, g.n);
        for (u32 p = 0; p < g.n; p++) {
            if (p == rank)
                windows[p] = mine;
            else
                CU(cuIpcOpenMemHandle(&windows[p], board->handle[p], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        }
        CU(cuMemHostAlloc((void**)&status, 8, CU_MEMHOSTALLOC_DEVICEMAP));
        CU(cuMemHostGetDevicePointer(&status_device, status, 0));
        *status = 0;
        const Control c = make_control(g, rank, 1, 4000000000ull, status_device, windows.data());
        control = windows[rank] + 24576;  // behind the signal area's structs: its page is hot anyway
        CU(cuMemcpyHtoD(control, &c, sizeof c));
        CU(cuCtxSynchronize());
    }
    CUdeviceptr arena() const { return windows[rank] + g.arena_offset(); }
};

void enqueue(Device& d, CUfunction f, Shape s, u32 ranks, const Launch& l, bool pdl) {
    void* params[] = {(void*)&l};
    CUlaunchConfig cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.gridDimX = s.blocks;
    cfg.gridDimY = ranks;
    cfg.gridDimZ = 1;
    cfg.blockDimX = s.threads + SERVICE;
    cfg.blockDimY = cfg.blockDimZ = 1;
    cfg.hStream = d.stream;
    CUlaunchAttribute a;
    memset(&a, 0, sizeof a);
    a.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    a.value.programmaticStreamSerializationAllowed = 1;
    cfg.attrs = &a;
    cfg.numAttrs = pdl ? 1 : 0;
    CU(cuLaunchKernelEx(&cfg, f, params, nullptr));
}

double time_graph(Device& d, CUfunction f, Shape s, u32 ranks, const Launch& l, bool pdl, int reps) {
    CUgraph graph;
    CUgraphExec exec;
    CU(cuStreamBeginCapture(d.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (int i = 0; i < OPS; i++) enqueue(d, f, s, ranks, l, pdl);
    CU(cuStreamEndCapture(d.stream, &graph));
    CU(cuGraphInstantiate(&exec, graph, 0));
    CU(cuGraphUpload(exec, d.stream));
    CU(cuStreamSynchronize(d.stream));
    std::vector<double> t;
    for (int i = 0; i < reps + 3; i++) {
        const double a = now_us();
        CU(cuGraphLaunch(exec, d.stream));
        CU(cuStreamSynchronize(d.stream));
        if (i >= 3) t.push_back((now_us() - a) / OPS);
    }
    CU(cuGraphExecDestroy(exec));
    CU(cuGraphDestroy(graph));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

const u64 BENCH_SIZES[] = {1024, 43008, 131072, 1 << 20, 16 << 20};
const char* size_name(u64 b) { return b == 1024 ? "1 KB" : b == 43008 ? "43,008 B" : b == 131072 ? "128 KB" : b == 1 << 20 ? "1 MB" : "16 MB"; }

// Launch shapes worth trying: the work spread over one to eight packs per thread, within what can be
// resident: every rank's blocks together fill at most the registers of the GPU.
std::vector<Shape> shapes_for(u32 n, const Variant& v, u64 bytes, bool wide) {
    const bool two = v.algorithm >= TWO_SHOT_PUSH;
    const u32 slices = v.algorithm == HIERARCHICAL ? island_sizes(n).back() : n;
    const u64 work = std::max<u64>(1, (two ? (bytes / 16 + slices - 1) / slices : bytes / 16));
    std::vector<Shape> out;
    for (u32 threads : {32u, 64u, 96u, 128u, 160u, 224u, 256u, 352u, 480u})
        for (u32 blocks : {1u, 2u, 3u, 4u, 6u, 8u, 11u, 12u, 16u, 21u, 24u, 28u, 32u, 42u, 48u, 64u, 96u, 128u}) {
            const u64 total = (u64)threads * blocks;
            if ((u64)n * blocks * (threads + SERVICE) > 132ull * 1024) continue;
            if (n > 4 && threads > 352) continue;
            if (blocks > 1 && total > work + work / 3 + 32) continue;
            if (blocks == 1 && threads > work + 31) continue;
            const u64 cap = 132ull * 512 / n;
            const u64 most = bytes >= (1 << 20) ? 16 : 6;
            if (total * most < std::min(work, cap * most / 3)) continue;
            if (!wide && bytes >= (16 << 20) && threads != 480 && threads != 256 && threads != 352) continue;
            out.push_back({blocks, threads});
        }
    return out;
}

int verify(const Variant& v, CUdeviceptr dst, u32 n, u64 num) {
    // The reduction is element-wise: the first elements and the last are enough for long tensors.
    const u64 head = std::min<u64>(num, 65536), tail = num > head ? 4096 : 0;
    int bad = 0;
    for (int part = 0; part < 2; part++) {
        const u64 len = part ? tail : head, at = part ? num - tail : 0;
        if (!len) continue;
        std::vector<std::vector<uint8_t>> in(n, std::vector<uint8_t>(len * 2));
        std::vector<const uint8_t*> ptr;
        for (u32 r = 0; r < n; r++) {
            for (u64 i = 0; i < len; i++) {
                const uint32_t x = (uint32_t)((at + i) * 2654435761u + r * 40503u);
                const uint16_t h = (uint16_t)((x >> 16 & 0x807f) | (124 + (x >> 8 & 7)) << 7);
                memcpy(&in[r][i * 2], &h, 2);
            }
            ptr.push_back(in[r].data());
        }
        const auto want = expected(v, reference::Dtype::bf16, reference::Op::sum, ptr, len, island_sizes(n).back());
        std::vector<uint8_t> got(len * 2);
        CU(cuMemcpyDtoH(got.data(), dst + at * 2, len * 2));
        for (u64 i = 0; i < len; i++) bad += memcmp(&got[i * 2], &want[i * 2], 2) != 0;
    }
    return bad;
}
void bench_input(CUdeviceptr src, u32 r, u64 num) {
    std::vector<uint16_t> h(num);
    for (u64 i = 0; i < num; i++) {
        const uint32_t x = (uint32_t)(i * 2654435761u + r * 40503u);
        h[i] = (uint16_t)((x >> 16 & 0x807f) | (124 + (x >> 8 & 7)) << 7);
    }
    CU(cuMemcpyHtoD(src, h.data(), num * 2));
}

std::vector<Config> best_configs(u32 n, bool fused);

int reps_for(u64 bytes) { return bytes >= (16 << 20) ? 5 : bytes >= (1 << 20) ? 13 : 21; }

void print_table(u32 n, const char* how, std::vector<Config> all) {
    for (u64 bytes : BENCH_SIZES) {
        std::vector<Config> best;
        for (int v = -2; v < NUM_VARIANTS; v++)
            for (int pdl = 0; pdl < 2; pdl++) {
                Config b = {v, 0, {0, 0}, false, 1e30};
                for (const Config& c : all)
                    if (c.variant == v && c.bytes == bytes && c.pdl == (pdl != 0) && c.us > 0 && c.us < b.us) b = c;
                if (b.us < 1e30) best.push_back(b);
            }
        std::sort(best.begin(), best.end(), [](const Config& a, const Config& b) { return a.us < b.us; });
        for (const Config& b : best)
            printf("ROW %-9s N=%-2u %-9s %-25s%-4s %3u x %-3u %8.2f us\n", how, n, size_name(bytes),
                   b.variant == -2 ? "(empty kernel, 40 B)" : b.variant == -1 ? "(empty kernel, 640 B)" : VARIANTS[b.variant].name, b.pdl ? " pdl" : "",
                   b.shape.blocks, b.shape.threads, b.us);
    }
}

std::vector<Config> configs(u32 n, bool tune) {
    std::vector<Config> list;
    if (!tune) return best_configs(n, false);
    for (u64 bytes : BENCH_SIZES)
        for (int v = 0; v < NUM_VARIANTS; v++)
            for (Shape s : shapes_for(n, VARIANTS[v], bytes, false)) list.push_back({v, bytes, s, false, 0});
    return list;
}

Geometry bench_geometry(u32 n) { return {n, 16 << 20, 16 << 20, 16 << 20, 2 * (16 << 20)}; }

int bench_rank(const char* image, const char* floor_image, u32 n, u32 rank, Board* board, bool tune, FILE* csv) {
    Peer p(image, bench_geometry(n), rank, board);
    const CUdeviceptr src = p.arena(), dst = p.arena() + (16 << 20);
    bench_input(src, rank, (16 << 20) / 2);
    CU(cuCtxSynchronize());
    ::meet(board, n);
    std::vector<Config> done;
    auto run = [&](Config c) {
        const Variant& v = VARIANTS[c.variant];
        CUfunction f = p.d.get(v.kernel, DTYPE_BF16, n);
        const long room = p.d.resident_blocks(f, c.shape.threads + SERVICE);
        if (room < (long)n * c.shape.blocks * (c.pdl ? 2 : 1)) return;  // the same on every rank
        CU(cuMemsetD8(dst, 0xcc, c.bytes));
        CU(cuCtxSynchronize());
        ::meet(board, n);
        Launch l;
        memset(&l, 0, sizeof l);
        l.calls[0] = complete({p.control, v.direct ? (u64)0 : (u64)src, (u64)dst, c.bytes / 2, OP_SUM, v.direct ? CALL_DIRECT | CALL_SRC_IN_ARENA : 0}, 2, c.shape);
        board->median[rank] = time_graph(p.d, f, c.shape, 1, l, c.pdl, reps_for(c.bytes));
        board->bad[rank] = (tune && c.bytes > 131072) ? 0 : verify(v, dst, n, c.bytes / 2);
        if (*(volatile u64*)p.status) board->bad[rank] = -1;
        ::meet(board, n);
        double worst = 0;
        int bad = 0;
        for (u32 r = 0; r < n; r++) {
            worst = std::max(worst, board->median[r]);
            bad |= board->bad[r];
        }
        c.us = worst;
        if (bad) {
            if (rank == 0) FAIL("bench n=%u %s %llu B %ux%u: wrong output (status %llx)", n, v.name, c.bytes, c.shape.blocks, c.shape.threads, *(u64*)p.status);
            board->failed = bad == -1;
        }
        done.push_back(c);
        if (rank == 0 && csv) {
            fprintf(csv, "%u,%s,%llu,%u,%u,%d,%.3f,%d\n", n, v.name, c.bytes, c.shape.blocks, c.shape.threads, c.pdl, c.us, bad);
            fflush(csv);
        }
        ::meet(board, n);
    };
    if (!getenv("FLOOR_ONLY"))
        for (const Config& c : configs(n, tune)) run(c);
    if (tune) {  // again with programmatic launch, best shapes only
        std::vector<Config> again;
        for (u64 bytes : BENCH_SIZES)
            for (int v = 0; v < NUM_VARIANTS; v++) {
                std::vector<Config> mine;
                for (const Config& c : done)
                    if (c.variant == v && c.bytes == bytes) mine.push_back(c);
                std::sort(mine.begin(), mine.end(), [](const Config& a, const Config& b) { return a.us < b.us; });
                for (size_t i = 0; i < mine.size() && i < 3 && bytes <= 131072; i++) {
                    Config c = mine[i];
                    c.pdl = true;
                    again.push_back(c);
                }
            }
        for (const Config& c : again) run(c);
    }
    if (floor_image) {
        CUmodule m;
        CU(cuModuleLoad(&m, floor_image));
        CUdeviceptr scratch;
        CU(cuMemAlloc(&scratch, 1 << 20));
        CU(cuMemsetD8(scratch, 0, 1 << 20));
        for (const char* name : {"floor_small", "floor_large", "floor_code_256", "floor_code_1024", "floor_code_4096", "floor_loads_1", "floor_loads_5", "floor_store",
                                 "floor_release", "floor_atomic"}) {
            CUfunction f;
            CU(cuModuleGetFunction(&f, m, name));
            for (Shape s : {Shape{1, 64}, Shape{12, 224}})
                for (int pdl = 0; pdl < 1; pdl++) {
                    Launch l;
                    memset(&l, 0, sizeof l);
                    l.calls[0].control = scratch;
                    ::meet(board, n);
                    board->median[rank] = time_graph(p.d, f, s, 1, l, pdl, 21);
                    ::meet(board, n);
                    double worst = 0;
                    for (u32 r = 0; r < n; r++) worst = std::max(worst, board->median[r]);
                    if (rank == 0) printf("ROW %-9s N=%-2u floor     %-25s%-4s %3u x %-3u %8.2f us\n", "processes", n, name, pdl ? " pdl" : "", s.blocks, s.threads, worst);
                    ::meet(board, n);
                }
        }
    }
    if (rank == 0) {
        print_table(n, "processes", done);
        printf("SUMMARY bench N=%u: %s\n", n, failures ? "FAILED" : "passed");
    }
    fflush(stdout);
    ::meet(board, n);
    return failures != 0;
}

// The configurations of a list under each image, three times in turn so that a drift of the machine meets all
// alike; prints the middle times, and their ratios to the first image's.
int compare_rank(const char* image, const char* list, const std::vector<const char*>& others, u32 n, u32 rank, Board* board) {
    Peer p(image, bench_geometry(n), rank, board);
    std::vector<CUmodule> modules = {p.d.module};
    for (const char* other : others) {
        modules.emplace_back();
        CU(cuModuleLoad(&modules.back(), other));
    }
    const CUdeviceptr src = p.arena(), dst = p.arena() + (16 << 20);
    bench_input(src, rank, (16 << 20) / 2);
    FILE* f = fopen(list, "r");
    if (!f) return 1;
    char line[256];
    int variant, pdl;
    u64 bytes;
    Shape s;
    u32 world;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%u %d %llu %d %u %u", &world, &variant, &bytes, &pdl, &s.blocks, &s.threads) != 6 || world != n) continue;
        const Variant& v = VARIANTS[variant];
        std::vector<std::vector<double>> us(modules.size());
        std::string row;
        for (int round = 0; round < 3; round++)
            for (size_t m = 0; m < modules.size(); m++) {
                CUfunction kernel;
                if (cuModuleGetFunction(&kernel, modules[m], Device::entry(v.kernel, DTYPE_BF16, n).c_str()) != CUDA_SUCCESS) continue;
                if (p.d.resident_blocks(kernel, s.threads + SERVICE) < (long)n * s.blocks * (pdl ? 2 : 1)) continue;  // the same on every rank
                if (round == 0) CU(cuMemsetD8(dst, 0xcc, bytes));
                CU(cuCtxSynchronize());
                ::meet(board, n);
                Launch l;
                memset(&l, 0, sizeof l);
                l.calls[0] = complete({p.control, v.direct ? (u64)0 : (u64)src, (u64)dst, bytes / 2, OP_SUM, v.direct ? CALL_DIRECT | CALL_SRC_IN_ARENA : 0}, 2, s);
                board->median[rank] = time_graph(p.d, kernel, s, 1, l, pdl, 11);
                board->bad[rank] = round == 0 ? verify(v, dst, n, bytes / 2) : 0;
                if (*(volatile u64*)p.status) board->bad[rank] = -1;
                ::meet(board, n);
                double worst = 0;
                for (u32 r = 0; r < n; r++) {
                    worst = std::max(worst, board->median[r]);
                    if (rank == 0 && board->bad[r])
                        FAIL("compare n=%u %s %llu B %ux%u image %zu: wrong output (status %llx)", n, v.name, bytes, s.blocks, s.threads, m, *(u64*)p.status);
                    if (board->bad[r] == -1) board->failed = 1;
                }
                us[m].push_back(worst);
                ::meet(board, n);
            }
        for (auto& t : us) {
            char cell[64] = "         -        ";
            std::sort(t.begin(), t.end());
            if (t.size()) snprintf(cell, sizeof cell, " %8.2f", t[1]);
            if (t.size() && &t != &us[0] && us[0].size()) snprintf(cell + 9, sizeof cell - 9, " (x%4.2f)", t[1] / us[0][1]);
            row += cell;
        }
        if (rank == 0) printf("ROW compare   N=%-2u %-9s %-25s%-4s %3u x %-3u %s\n", n, size_name(bytes), v.name, pdl ? " pdl" : "", s.blocks, s.threads, row.c_str());
    }
    fclose(f);
    if (rank == 0) printf("SUMMARY compare N=%u: %s\n", n, failures ? "FAILED" : "passed");
    fflush(stdout);
    ::meet(board, n);
    return failures != 0;
}

// With an image built with -DAR_TRACE: cycles between the stages of the one-shots, one data and one
// service thread of block 0 of each rank, means over graph replays.
int trace_rank(const char* image, u32 n, u32 rank, Board* board) {
    Peer p(image, bench_geometry(n), rank, board);
    bench_input(p.arena(), rank, (16 << 20) / 2);
    for (const Config& c : {Config{0, 1024, {1, 64}, false, 0}, Config{3, 1024, {1, 64}, false, 0}, Config{0, 43008, {12, 224}, false, 0}, Config{3, 43008, {12, 224}, false, 0}, Config{0, 43008, {12, 224}, true, 0}}) {
        ::meet(board, n);
        const Variant& v = VARIANTS[c.variant];
        Launch l;
        memset(&l, 0, sizeof l);
        l.calls[0] = complete({p.control, (u64)p.arena(), (u64)p.arena() + (16 << 20), c.bytes / 2, OP_SUM, 0}, 2, c.shape);
        double sum[14] = {};
        const int reps = 20;
        double us = 0;
        for (int i = 0; i < reps; i++) {
            us += time_graph(p.d, p.d.get(v.kernel, DTYPE_BF16, n), c.shape, 1, l, c.pdl, 1) / reps;
            long long t[16];
            CU(cuMemcpyDtoH(t, p.windows[rank] + 20480, sizeof t));
            for (int k = 0; k < 7; k++) sum[k] += (double)(t[k] - t[0]) / reps, sum[7 + k] += (double)(t[8 + k] - t[8]) / reps;
        }
        for (u32 r = 0; r < n; r++) {
            ::meet(board, n);
            if (r == rank && (r == 0 || r == n - 1)) {
                printf("TRACE N=%u rank %u %s %llu B%s %.2f us | data: control %.0f sent %.0f arrived %.0f verdict %.0f stored %.0f end %.0f | service: control %.0f greeted %.0f met %.0f verdict %.0f end %.0f\n", n, r,
                       v.name, c.bytes, c.pdl ? " pdl" : "", us, sum[1], sum[2], sum[3], sum[4], sum[5], sum[6], sum[8], sum[9], sum[10], sum[11], sum[13]);
                fflush(stdout);
            }
            ::meet(board, n);
        }
    }
    return 0;
}

int processes_rank(const char* image, u32 n, u32 rank, Board* board) {
    Peer p(image, {n, 1 << 20, 1 << 20, 1 << 20, 4 << 20}, rank, board);
    const CUdeviceptr src = p.arena() + 256, dst = p.arena() + (2 << 20);
    uint8_t *h_in, *h_out;
    CU(cuMemHostAlloc((void**)&h_in, 1 << 20, 0));
    CU(cuMemHostAlloc((void**)&h_out, 1 << 20, 0));
    ::meet(board, n);
    long checks = 0;
    const u64 sizes[] = {21504, 1, 0, 8191, 262144, 7, 64, 5000};
    for (int round = 0; round < 6; round++)
        for (int v = 0; v < NUM_VARIANTS; v++)
            for (int i = 0; i < 8; i++) {
                const u32 dt = (u32)(round + i) % 3, op = (u32)(v + i) % 4;
                const auto dtype = (reference::Dtype)dt;
                const u64 num = sizes[i], bytes = num * reference::size_of(dtype), skew = i == 7 ? reference::size_of(dtype) : 0;
                std::vector<std::vector<uint8_t>> in(n, std::vector<uint8_t>(bytes + 1));
                std::vector<const uint8_t*> ptr;
                for (u32 r = 0; r < n; r++) {
                    reference::fill(dtype, in[r].data(), num, ((round * 64 + v) * 16 + i) * 16 + r, 32);
                    ptr.push_back(in[r].data());
                }
                const auto want = expected(VARIANTS[v], dtype, (reference::Op)op, ptr, num, p.g.island_size());
                if (bytes) memcpy(h_in, in[rank].data(), bytes);
                Launch l;
                memset(&l, 0, sizeof l);
                const Shape shape = round % 2 ? Shape{6, 96} : Shape{2, 224};
                l.calls[0] = complete({p.control, src + skew, dst + skew, num, op, VARIANTS[v].direct ? CALL_DIRECT : 0}, (u32)reference::size_of(dtype), shape);
                if (bytes) CU(cuMemcpyHtoDAsync(src + skew, h_in, bytes, p.d.stream));
                if ((round + i) % (int)n == (int)rank) usleep(500);  // the slow rank
                enqueue(p.d, p.d.get(VARIANTS[v].kernel, dt, n), shape, 1, l, false);
                if (bytes) {  // the caller may overwrite its input right behind the call
                    CU(cuMemsetD8Async(src + skew, 0xa5, bytes, p.d.stream));
                    CU(cuMemcpyDtoHAsync(h_out, dst + skew, bytes, p.d.stream));
                }
                CU(cuStreamSynchronize(p.d.stream));
                checks++;
                if (memcmp(h_out, want.data(), bytes) != 0)
                    FAIL("processes n=%u rank %u round %d %s %s op=%u elems=%llu: wrong, status %llx", n, rank, round, VARIANTS[v].name, DTYPES[dt], op, num, *(u64*)p.status);
            }
    board->bad[rank] = failures;
    ::meet(board, n);
    if (rank == 0) {
        int all = 0;
        for (u32 r = 0; r < n; r++) all += board->bad[r];
        printf("SUMMARY processes N=%u: %s, %ld calls per rank\n", n, all ? "FAILED" : "passed", checks);
        fflush(stdout);
    }
    ::meet(board, n);
    return failures != 0;
}

// What the memory gives: a copy far larger than the cache, in bytes read and written.
void copy_row(Device& d) {
    const u64 bytes = 256u << 20;
    CUdeviceptr from, to;
    CU(cuMemAlloc(&from, bytes));
    CU(cuMemAlloc(&to, bytes));
    std::vector<double> us;
    for (int i = 0; i < 12; i++) {
        CU(cuCtxSynchronize());
        const double start = now_us();
        for (int k = 0; k < 4; k++) CU(cuMemcpyDtoDAsync(to, from, bytes, d.stream));
        CU(cuStreamSynchronize(d.stream));
        if (i >= 2) us.push_back((now_us() - start) / 4);
    }
    std::sort(us.begin(), us.end());
    const double p50 = us[us.size() / 2];
    printf("ROW copy                256 MB    cuMemcpyDtoD %10.2f us %8.0f GB/s read and written\n", p50, 2 * bytes / p50 * 1e-3);
    CU(cuMemFree(from));
    CU(cuMemFree(to));
}

int fused(const char* image, u32 n, bool tune) {
    Device d(image);
    if (n == 2) copy_row(d);
    World w(d, bench_geometry(n), 4000000000ull);
    for (u32 r = 0; r < n; r++) bench_input(w.arena(r), r, (16 << 20) / 2);
    std::vector<Config> done;
    for (Config c : tune ? configs(n, true) : best_configs(n, true)) {
        const Variant& v = VARIANTS[c.variant];
        CUfunction f = d.get(v.kernel, DTYPE_BF16, n);
        if (d.resident_blocks(f, c.shape.threads + SERVICE) < (long)n * c.shape.blocks * (c.pdl ? 2 : 1)) continue;
        Launch l;
        memset(&l, 0, sizeof l);
        for (u32 r = 0; r < n; r++)
            l.calls[r] = complete({w.controls[r], w.arena(r), w.arena(r) + (16 << 20), c.bytes / 2, OP_SUM, v.direct ? CALL_DIRECT : 0}, 2, c.shape);
        for (u32 r = 0; r < n; r++) CU(cuMemsetD8(w.arena(r) + (16 << 20), 0xcc, c.bytes));
        CU(cuCtxSynchronize());
        c.us = time_graph(d, f, c.shape, n, l, c.pdl, reps_for(c.bytes));
        if (!tune || c.bytes <= 131072)
            for (u32 r = 0; r < n; r++)
                if (int bad = verify(v, w.arena(r) + (16 << 20), n, c.bytes / 2))
                    FAIL("fused n=%u %s %llu B %ux%u rank %u: %d wrong, status %llx", n, v.name, c.bytes, c.shape.blocks, c.shape.threads, r, bad, (u64)w.status[r]);
        done.push_back(c);
    }
    print_table(n, "fused", done);
    printf("SUMMARY fused N=%u: %s\n", n, failures ? "FAILED" : "passed");
    return failures != 0;
}

#include "best.inc"

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 64;
    const char* image = argv[1];
    const std::string mode = argv[2];
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const u32 n = argc > 3 ? (u32)atoi(argv[3]) : 0;
    const bool tune = argc > 4 && std::string(argv[4]) == "tune";
    if (mode == "conform") return conform(image, false);
    if (mode == "sanitize") return conform(image, true);
    if (mode == "abort") return abort_tests(image);
    if (mode == "fused") return fused(image, n, tune);
    Board* board = (Board*)mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    std::vector<pid_t> pids;
    for (u32 r = 0; r < n; r++) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(300);
            FILE* csv = r == 0 && argc > 6 && mode == "bench" ? fopen(argv[6], "a") : nullptr;
            const int rc = mode == "trace" ? trace_rank(image, n, r, board) : mode == "compare" ? compare_rank(image, argv[4], std::vector<const char*>(argv + 5, argv + argc), n, r, board) : mode == "bench" ? bench_rank(image, argc > 5 && argv[5][0] ? argv[5] : nullptr, n, r, board, tune, csv) : processes_rank(image, n, r, board);
            if (csv) fclose(csv);
            fflush(stdout);
            _exit(rc);
        }
        pids.push_back(pid);
    }
    int rc = 0;
    for (pid_t p : pids) {
        int s = 0;
        waitpid(p, &s, 0);
        if (s) rc = 1;
    }
    return rc;
}
