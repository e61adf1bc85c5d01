// Hierarchical all-reduce, for ranks that sit in islands (two sockets, two roots): reduce-scatter inside each island, an
// exchange of partials across, all-gather inside. Across the islands each rank sends a slice, in f32, to each island.
//
// Shapes      as one_shot.cuh. world_size = islands x island_size; rank r is at place r % island_size of island
//             r / island_size. Its island-peers are the ranks of its island, its counterparts those at its place elsewhere.
//             The call's packs are cut into island_size slices of ceil(packs / island_size); the last ones may be short or
//             empty. Any island_size that divides world_size, 1 and world_size too; another one is a BAD_CALL on every rank.
// Launch      as one_shot.cuh.
// Mapping     as two_shot.cuh: index i of every slice belongs to data thread i mod (blocks x data threads), on every rank.
// Window      push region, slots by source and sequence parity. An island-peer's slot: its input in the lower half, its result
//             in the upper. A counterpart's, and the own: f32 partials, from the start; a pack of a 16-bit type has two packs
//             of them, so they take the whole slot at most. Slots of other ranks are not touched.
// Memory      data relaxed.sys, each word stands for itself; no flag, no fence, no barrier between ranks. Headers go to all
//             ranks, those that exchange no data too: the invariant (kernels/README.md) rests on them.
// Determinism a fixed tree: each island's inputs in rank order, in f32, then the islands' partials in order, in f32; avg's factor
//             and one rounding at the end, by each island's owner of the slice, all of whom see the same partials. So the same bits
//             on all ranks and runs; with island_size 1 or world_size those of the flat algorithms.
// In place    allowed: slice s of an input is read by its own rank only, pack i by the thread that writes it, before.
// Abort       as one_shot.cuh.
#pragma once
#include "two_shot.cuh"

namespace allreduced {

// Receivers empty what they have read; who has sent a partial to itself is such a receiver too, so no island is a special case.
// SYNC: header, push-data, push-partial, push-result
template <class T, int W, bool EXACT>
AR_DEV void hierarchical(Shared* sh, const Call& call) {
    constexpr u32 PARTS = T::ELEMS / F32::ELEMS;  // packs of partials of a pack
    static_assert(PARTS <= 2, "partials of a slice of half a slot fit the slot");
    Block b;
    enter(b, sh, &call);
    enter_load<false>(b);
    const Region push = ld_region(b, AR_OFFSETOF(Control, push_offset));
    const u32 island_size = ld_weak_u32(b.control + AR_OFFSETOF(Control, island_size));
    enter_wait<T, W, EXACT>(b, HIERARCHICAL);
    b.expected ^= island_size * 0xc2b2ae35u;
    find_tensors(b);
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const bool divides = island_size - 1u < b.world_size && b.world_size % island_size == 0;
    const u32 peers = divides ? island_size : 1, islands = b.world_size / peers;
    const u32 island = b.rank / peers, first_peer = island * peers, place = b.rank - first_peer;
    const u32 packs = call.num_packs, slice = slice_packs(packs, peers);
    const u64 slot_bytes = push.bytes, half = slot_bytes / 2;
    const u64 parity_base = push.offset + b.parity() * b.world_size * slot_bytes;
    check_call<W, EXACT>(b, divides ? slice : 1, divides ? half : 0);
    // Slots that others fill here: island-peers' a slot apart, counterparts' an island. The one that this rank fills elsewhere.
    const u64 from_peers = b.signal + parity_base + first_peer * slot_bytes;
    const u64 from_counterparts = b.signal + parity_base + place * slot_bytes, island_bytes = peers * slot_bytes;
    const u64 at_peer = parity_base + b.rank * slot_bytes;
    const u32 my_slice = place * slice;
    const auto peer = [&](u32 p) { return first_peer + p; };
    const auto counterpart = [&](u32 c) { return c * peers + place; };

    if (b.service) {
        greet<false>(b);
        meet<false, false>(b);
    } else if (!b.failed) {
#pragma unroll 1
        for (u32 i = b.first; i < slice; i += b.stride) {
            Pack v[W];
#pragma unroll
            for (int j = 1; j < W; j++) {
                u32 to = place + j;
                if (to >= peers) to -= peers;
                if (j < (int)peers && to * slice + i < packs) v[j] = in.load(to * slice + i);
            }
#pragma unroll
            for (int j = 1; j < W; j++) {
                u32 to = place + j;
                if (to >= peers) to -= peers;
                if (j < (int)peers && to * slice + i < packs)  // SYNC: push-data
                    st_relaxed_pack(b.window(peer(to)) + at_peer + (u64)i * PACK_BYTES, without_empty<T>(v[j]));
            }
        }
    }
    bool first_round = true;
#pragma unroll 1
    for (u32 i = b.first;; i += b.stride) {
        const bool busy = !b.service && i < slice && my_slice + i < packs && !b.failed;
        Pack v[W];
        if (busy) {
            const Pack own = in.load(my_slice + i);
#pragma unroll
            for (int p = 0; p < W; p++) v[p] = own;  // stays at this rank's place
            await_row_of<false, W>(
                b, v, [&](int p) { return p < (int)peers && p != (int)place; }, [&](int p) { return from_peers + p * slot_bytes + (u64)i * PACK_BYTES; },
                WAIT_INPUT, peer);  // SYNC: push-data
        }
        if (first_round) {
            if (AR_UNLIKELY(sync_block_or(b.failed))) {
                abandon<T>(b);
                return;
            }
            if (b.service) advance_absent_blocks(b);
            first_round = false;
        }
        if (!busy || b.failed) break;
        float acc[T::ELEMS];
        accumulate<T, W>(v, peers, call.op, acc);
#if defined(AR_MUTATE_PARTIAL_ROUNDED)
        T::unpack(rounded<T>(acc), acc);
#endif
        Pack partial[PARTS];
#pragma unroll
        for (u32 h = 0; h < PARTS; h++) partial[h] = partial_pack(acc + h * F32::ELEMS);
        u32 to = island;
#pragma unroll 1
        for (u32 c = 0; c < islands; c++) {
            to = to + 1 == islands ? 0 : to + 1;
            const u64 at = b.window(counterpart(to)) + at_peer + (u64)i * PARTS * PACK_BYTES;
#pragma unroll
            for (u32 h = 0; h < PARTS; h++) st_relaxed_pack(at + h * PACK_BYTES, partial[h]);  // SYNC: push-partial
        }
#if !defined(AR_MUTATE_NO_CLEAR)
#pragma unroll 1
        for (u32 p = 0; p < peers; p++)
            if (p != place) st_relaxed_pack(from_peers + p * slot_bytes + (u64)i * PACK_BYTES, empty_pack());
#endif
    }
    if (!b.service) {
#pragma unroll 1
        for (u32 i = b.first; i < slice && my_slice + i < packs && !b.failed; i += b.stride) {
            float acc[T::ELEMS];
            const u64 partials = from_counterparts + (u64)i * PARTS * PACK_BYTES;
#pragma unroll 1
            for (u32 h = 0; h < PARTS; h++) {
                Pack v[W] = {};
                await_row_of<false, W>(
                    b, v, [&](int c) { return c < (int)islands; }, [&](int c) { return partials + c * island_bytes + h * PACK_BYTES; }, WAIT_PARTIAL,
                    counterpart);  // SYNC: push-partial
                float four[F32::ELEMS];
                accumulate<F32, W>(v, islands, call.op, four);
                // Constant indices, so that acc stays in registers.
#pragma unroll
                for (u32 e = 0; e < T::ELEMS; e++)
                    if (e / F32::ELEMS == h) acc[e] = four[e % F32::ELEMS];
            }
            if (b.failed) break;
            const Pack result = finish_sum<T>(acc, b.world_size, call.op);
            u32 to = place;
#pragma unroll 1
            for (u32 p = 1; p < peers; p++) {
                to = to + 1 == peers ? 0 : to + 1;
                st_relaxed_pack(b.window(peer(to)) + at_peer + half + (u64)i * PACK_BYTES, result);  // SYNC: push-result
            }
            out.store(my_slice + i, result);
#if !defined(AR_MUTATE_NO_CLEAR) && !defined(AR_MUTATE_PARTIAL_STAYS)
#pragma unroll 1
            for (u32 c = 0; c < islands; c++)
#pragma unroll
                for (u32 h = 0; h < PARTS; h++) st_relaxed_pack(partials + c * island_bytes + h * PACK_BYTES, empty_pack());
#endif
        }
#pragma unroll 1
        for (u32 i = b.first; i < slice && !b.failed; i += b.stride) {
            Pack v[W] = {};
            const auto wanted = [&](int p) { return p < (int)peers && p != (int)place && p * slice + i < packs; };
            const auto address = [&](int p) { return from_peers + p * slot_bytes + half + (u64)i * PACK_BYTES; };
            await_row_of<false, W>(b, v, wanted, address, WAIT_RESULT, peer);  // SYNC: push-result
            if (b.failed) break;
#pragma unroll
            for (int p = 0; p < W; p++) {
                if (!wanted(p)) continue;
                out.store(p * slice + i, v[p]);
#if !defined(AR_MUTATE_NO_CLEAR)
                st_relaxed_pack(address(p), empty_pack());
#endif
            }
        }
    }
    leave<T>(b);
}

}  // namespace allreduced
