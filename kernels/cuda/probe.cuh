// What `allreduced probe` measures with: a copy, and a flag that goes to and fro. Neither reduces.
//
// allreduced_probe_copy
//   Shapes      `packs` packs of 16 bytes from src to dst, both aligned to 16; `passes` times over. The two do not overlap.
//   Launch      any grid, at most 512 threads; no dynamic shared memory. Blocks do not wait for each other.
//   Mode        write: src is this GPU's, dst a peer's. read: src is a peer's, dst this GPU's. Within the GPU: both its own.
//   Order       sources are read by relaxed.sys loads, which no cache of the multiprocessor serves: a second pass goes to the
//               peer again. Stores are weak: the kernel's end makes them visible.
//   Abort       none; it ends with its last pass. A link that hangs is for who launched it: it is a process of its own.
//
// allreduced_probe_flag
//   Shapes      mine, peers: 8 bytes each, aligned to 8, zero before; mine in this GPU's memory, peers in that of the other, which
//               runs the other role. result: 16 bytes of this GPU's: {rounds done, ns of all but the first}.
//   Launch      one warp, of which one thread works; both roles must run at the same time, `answers` 0 on one and 1 on the other.
//   Order       a round is: the asking role writes its number to the peer, the answering one sees it and writes it back.
//               SYNC: probe-flag. Relaxed: the number is all there is to see.
//   Abort       after limit_ns by globaltimer both end, each by itself; result says how far they came.
#pragma once
#include "mem.cuh"

namespace allreduced {

AR_DEV void probe_copy(u64 dst, u64 src, u64 packs, u32 passes) {
    const u64 stride = (u64)grid_x() * block_dim();
    for (u32 pass = 0; pass < passes; pass++)
        for (u64 i = (u64)block_x() * block_dim() + thread_x(); i < packs; i += stride)
            st_weak_pack(dst + i * PACK_BYTES, ld_relaxed_pack(src + i * PACK_BYTES));
}

AR_DEV void probe_flag(u64 mine, u64 peers, u64 result, u32 rounds, bool answers, u64 limit_ns) {
    if (thread_x() != 0) return;
    const u64 begin = now_ns();
    u64 timed_from = begin;
    u32 round = 0;
    bool is_late = false;
    while (round < rounds && !is_late) {
        const u64 number = (u64)round + 1;
        if (!answers) st_relaxed_u64(peers, number);  // SYNC: probe-flag
        u32 polls = 0;
        while (ld_relaxed_u64(mine) != number) {  // SYNC: probe-flag
            polls += 1;
            if (polls % 1024 == 0 && now_ns() - begin > limit_ns) {
                is_late = true;
                break;
            }
        }
        if (is_late) break;
        if (answers) st_relaxed_u64(peers, number);  // SYNC: probe-flag
        round += 1;
        // The first waited until the other kernel ran.
        if (round == 1) timed_from = now_ns();
    }
    st_weak_u64(result, round);
    st_weak_u64(result + 8, now_ns() - timed_from);
}

}  // namespace allreduced
