// One-shot all-reduce: every rank reads every other rank's whole input and reduces it all itself.
//
// Shapes      num_elems elements of T per rank, any count, any element alignment; 16-byte packs where
//             an address is 16-byte aligned, element by element else and in the tail. W is the largest
//             world size of the instance; world_size 1..=W.
// Launch      grid (blocks of a rank <= MAX_BLOCKS, ranks in this launch), block (data threads +
//             SERVICE_THREADS, data threads a multiple of 32). All ranks use the same grid.x and block.
//             All blocks of all ranks must be resident at once: they wait for each other.
// Mapping     pack k belongs to data thread k mod (blocks x data threads), on every rank.
// Determinism rank order, f32: bit-identical on all ranks and runs, whatever the launch shape.
// In place    src == dst allowed (see one_shot_pull for direct sources); other overlap is not.
// Abort       every wait ends by deadline or abort word; then the whole output is NaN, abort and status
//             words say who and why (protocol.cuh).
#pragma once
#include "protocol.cuh"

namespace allreduced {

// Packs per thread and round where a thread has several; more would cost registers, and so blocks per SM.
template <int W>
constexpr int BATCH = W <= 2 ? 2 : 1;
// The same for direct sources, where all loads of a round go out together.
template <int W>
constexpr u32 PULL_BATCH = W <= 4 ? 2 : 1;

template <class T, int U>
AR_DEV void load_batch(Pack (&own)[U], const Tensor<T>& in, const Block& b, u32 k, u32 packs) {
#pragma unroll
    for (int u = 0; u < U; u++)
        if (k + u * b.stride < packs) own[u] = in.load(k + u * b.stride);
}

// Both in-band one-shots: send, wait, reduce. `send(k, pack, self)` stores a pack where peers look for
// it, and where this rank does with `self`; `address(r, k)` is where rank r's appears. `clear(k, self)`
// empties the slots of a pack that has been reduced, `tidy()` whatever else is left to empty.
//
// exchange_once: at most one pack per thread, the latency-bound case, where what counts is how much code lies between
// one message and the next. For that reason it also sends to itself: no rank is a special case.
//
// Data and service threads go their own ways, each through code in one piece; and while its own pack is on its way,
// a data thread goes through what it will do when the others' are here, without effect.
template <class T, int W, class Send, class Address, class Clear, class Tidy>
AR_DEV void exchange_once(Block& b, const Tensor<T>& out, const Pack& own, Send send, Address address, Clear clear, Tidy tidy) {
    AR_STAMP(b, 1);
    if (b.service) {
        greet<false>(b);
        AR_STAMP(b, 2);
        meet<false, false>(b);
        AR_STAMP(b, 3);
        if (AR_UNLIKELY(sync_block_or(b.failed))) {
            abandon<T>(b);
            return;
        }
        AR_STAMP(b, 4);
        advance_absent_blocks(b);
        AR_STAMP(b, 5);
        sync_block();
        finish(b);
        return;
    }
    const u32 k = b.first;
    const bool busy = k < b.call->num_packs && !b.failed;
    if (busy) send(k, without_empty<T>(own), true);
    AR_STAMP(b, 2);
    Pack v[W];
#pragma unroll
    for (int r = 0; r < W; r++) v[r] = own;
    for (u32 go = opaque(0);; go = opaque(1)) {
        if (go) {
            if (busy) await_row<false, W>(b, v, [](int) { return true; }, [&](int r) { return address(r, k); }, WAIT_INPUT);
            AR_STAMP(b, 3);
            // The one barrier between arrival and use: headers agree, nobody aborted.
            if (AR_UNLIKELY(sync_block_or(b.failed))) return;
            AR_STAMP(b, 4);
        }
        const Pack result = reduce<T, W>(v, b.world_size, b.call->op);
        if (go & busy) out.store(k, result);
        if (go) {
            if (busy) clear(k, true);
            tidy();
            break;
        }
    }
    AR_STAMP(b, 5);
    sync_block();
#if AR_CUDA && defined(AR_TRACE)
    finish(b);
#endif
}

// exchange: any number of packs, U of them in flight per thread.
template <class T, int W, int U, class Send, class Address, class Clear, class Tidy>
AR_DEV void exchange(Block& b, const Tensor<T>& in, const Tensor<T>& out, Send send, Address address, Clear clear, Tidy tidy) {
    const u32 packs = b.call->num_packs;
    const bool single_round = packs <= U * b.stride;  // then `own` still holds the input when it is reduced
    Pack own[U], v[U][W];
    if (b.service) {
        greet<false>(b);
        meet<false, false>(b);
    } else if (!b.failed) {
#pragma unroll 1
        for (u32 k = b.first; k < packs; k += U * b.stride) {
            load_batch(own, in, b, k, packs);
#pragma unroll
            for (int u = 0; u < U; u++)
                if (k + u * b.stride < packs) send(k + u * b.stride, without_empty<T>(own[u]), false);
        }
    }
    bool first_round = true;
#pragma unroll 1
    for (u32 k = b.first;; k += U * b.stride) {
        const bool busy = !b.service && k < packs && !b.failed;
        if (busy) {
            if (!single_round) load_batch(own, in, b, k, packs);
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int r = 0; r < W; r++) v[u][r] = own[u];  // stays where r is this rank
            await_packs(
                b, v, [&](int u, int r) { return k + u * b.stride < packs && r < (int)b.world_size && r != (int)b.rank; },
                [&](int u, int r) { return address(r, k + u * b.stride); }, WAIT_INPUT);
        }
        if (first_round) {
            if (AR_UNLIKELY(sync_block_or(b.failed))) {
                abandon<T>(b);
                return;
            }
            first_round = false;
        }
        if (!busy || b.failed) break;
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 i = k + u * b.stride;
            if (i >= packs) continue;
            out.store(i, reduce<T, W>(v[u], b.world_size, b.call->op));
            clear(i, false);
        }
    }
    if (b.service)
        advance_absent_blocks(b);
    else
        tidy();
    leave<T>(b);
}

// What an in-band one-shot begins with. ONCE or not: two pieces of code with nothing in common, so that neither is
// in the other's way. A source address that does not depend on the control block is read while that is on its way.
template <class T>
struct Entered {
    Region region;
    Tensor<T> in, out;
    Pack own;
};
template <class T, int W, bool EXACT, bool ONCE>
AR_DEV Entered<T> enter_inband(Block& b, u32 algorithm, u64 which) {
    const Call& call = *b.call;
    enter_load<false>(b);
    const Region region = ld_region(b, which);
    const bool early = ONCE && source_is_address(call), loads = ONCE && !b.service && b.first < call.num_packs;
    Pack own = {};
    if (AR_LIKELY(early) && loads) own = Tensor<T>(call.src, call.num_elems, call.src_whole_packs).load(b.first);
    enter_wait<T, W, EXACT>(b, algorithm);
    find_tensors(b);
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs);
    if (AR_UNLIKELY(!early) && loads) own = in.load(b.first);
    return {region, in, Tensor<T>(b.dest, call.num_elems, call.dst_whole_packs), own};
}

// Writes its input into a slot of every peer's window; peers poll their own memory, word by word, for
// words that are not EMPTY_WORD (in-band arrival: no flag, no fence), reduce, and empty the slots.
// Memory order: data relaxed.sys, each word stands for itself. Slots alternate by sequence parity.
// SYNC: push-data
template <class T, int W, bool EXACT, bool ONCE>
AR_DEV void one_shot_push_as(Block& b) {
    const Entered<T> entered = enter_inband<T, W, EXACT, ONCE>(b, ONE_SHOT_PUSH, AR_OFFSETOF(Control, push_offset));
    const Region push = entered.region;
    const Tensor<T> in = entered.in, out = entered.out;
    const Pack own = entered.own;
    const u64 slot_bytes = push.bytes;
    const u64 parity_base = push.offset + b.parity() * b.world_size * slot_bytes;
    const u64 mine = b.signal + parity_base;
    check_call<W, EXACT>(b, b.call->num_packs, slot_bytes);
    const auto send = [&](u32 k, const Pack& p, bool self) {
        const u64 at = parity_base + b.rank * slot_bytes + (u64)k * PACK_BYTES;
        u32 to = b.rank;
#pragma unroll 1
        for (u32 j = self ? 0 : 1; j < b.world_size; j++) {
            to = to + 1 == b.world_size ? 0 : to + 1;
            st_relaxed_pack(b.window(to) + at, p);  // SYNC: push-data
        }
    };
    const auto address = [&](int r, u32 k) { return mine + r * slot_bytes + (u64)k * PACK_BYTES; };  // SYNC: push-data
    const auto clear = [&]([[maybe_unused]] u32 k, [[maybe_unused]] bool self) {
#if !defined(AR_MUTATE_NO_CLEAR)
        u64 at = mine + (u64)k * PACK_BYTES;
#pragma unroll 1
        for (u32 r = 0; r < b.world_size; r++, at += slot_bytes)
            if (self || r != b.rank) st_relaxed_pack(at, empty_pack());
#endif
    };
    if constexpr (ONCE)
        exchange_once<T, W>(b, out, own, send, address, clear, [] {});
    else
        exchange<T, W, BATCH<W>>(b, in, out, send, address, clear, [] {});
}
template <class T, int W, bool EXACT>
AR_DEV void one_shot_push(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    if (AR_LIKELY(call.num_packs <= b.stride))
        one_shot_push_as<T, W, EXACT, true>(b);
    else
        one_shot_push_as<T, W, EXACT, false>(b);
}

// Empties what the previous in-band pull left in this rank's slots. Called once the headers of this
// call are in: every peer has then completed that turn and read all it will. Slots rotate over four
// turns, so the next writer and readers of these bytes come only after this kernel has completed.
AR_DEV void clear_previous_turn([[maybe_unused]] Block& b, [[maybe_unused]] const Region& inband) {
#if !defined(AR_MUTATE_NO_CLEAR)
    const u64 slot = b.signal + inband.offset + (b.turn_before & 3) * 2 * inband.bytes;
#pragma unroll 1
    for (u32 k = b.first; k < b.dirty_input_packs_before; k += b.stride) st_relaxed_pack(slot + (u64)k * PACK_BYTES, empty_pack());
#pragma unroll 1
    for (u32 k = b.first; k < b.dirty_result_packs_before; k += b.stride)
        st_relaxed_pack(slot + inband.bytes + (u64)k * PACK_BYTES, empty_pack());
#endif
}

// Writes its input once, into a slot of its own window; peers poll that memory, word by word, as in
// one_shot_push. 1/(N-1) of the bytes written by a push, but the polls cross the link.
// Memory order: data relaxed.sys. Slots rotate over four turns; the owner empties a slot one in-band
// pull later.
// SYNC: pull-data
template <class T, int W, bool EXACT, bool ONCE>
AR_DEV void one_shot_pull_inband_as(Block& b) {
    const Entered<T> entered = enter_inband<T, W, EXACT, ONCE>(b, ONE_SHOT_PULL_INBAND, AR_OFFSETOF(Control, inband_offset));
    const Region inband = entered.region;
    const Tensor<T> in = entered.in, out = entered.out;
    const Pack own = entered.own;
    u64 windows[W];
    if (!b.service) ld_windows(b, windows);
    begin_turn(b, b.call->num_packs, 0);
    const u64 slot = inband.offset + (b.turn & 3) * 2 * inband.bytes;
    check_call<W, EXACT>(b, b.call->num_packs, inband.bytes);
    const auto send = [&](u32 k, const Pack& p, bool) { st_relaxed_pack(b.signal + slot + (u64)k * PACK_BYTES, p); };  // SYNC: pull-data
    const auto address = [&](int r, u32 k) { return windows[r] + slot + (u64)k * PACK_BYTES; };                 // SYNC: pull-data
    const auto tidy = [&] { clear_previous_turn(b, inband); };
    if constexpr (ONCE)
        exchange_once<T, W>(b, out, own, send, address, [](u32, bool) {}, tidy);
    else
        exchange<T, W, BATCH<W>>(b, in, out, send, address, [](u32, bool) {}, tidy);
}
template <class T, int W, bool EXACT>
AR_DEV void one_shot_pull_inband(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    if (AR_LIKELY(call.num_packs <= b.stride))
        one_shot_pull_inband_as<T, W, EXACT, true>(b);
    else
        one_shot_pull_inband_as<T, W, EXACT, false>(b);
}

// Flag arrival. Staged: copies its input to its own staging area, releases one flag per block to every
// peer, acquires theirs, reads their staging. Direct: reads peers' inputs where they are; the header
// says that an input is ready, and a `done` flag per block keeps it until everybody has read.
// Memory order: staging written by ordinary stores; flag st.release.sys after sync_block by one thread
// per peer, ld.acquire.sys by one thread, then sync_block, then ordinary loads. Direct: see ld_header_u64x2.
// Staging alternates by sequence parity: a peer that is two calls ahead knows this call complete.
// Direct and in place: results wait in staging until every peer has read the input.
// SYNC: header, ready, done

// U packs of this thread from every rank at once: all loads before the first use. Not `go`: a rehearsal, which
// stores nothing.
template <class T, int W, int U>
AR_DEV void pull_batch(const u64 (&source)[W], u32 world_size, u32 op, u32 go, u64 to, u32 k, u32 stride) {
    Pack v[U][W];
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
        for (int r = 0; r < W; r++)
            if (r < (int)world_size) v[u][r] = ld_peer_pack(source[r] + (u64)(k + u * stride) * PACK_BYTES);
#pragma unroll
    for (int u = 0; u < U; u++) {
        const Pack result = reduce<T, W>(v[u], world_size, op);
        if (go) st_weak_pack(to + (u64)(k + u * stride) * PACK_BYTES, result);
    }
}
// Packs from `k` on that are no single accesses: an odd address, the tensor's end.
template <class T, int W>
AR_DEV_COLD void pull_odd(const Shared* sh, const Call* call, u32 world_size, bool hold, u32 k, u32 stride) {
    const Tensor<T> out(sh->dest, call->num_elems, call->dst_whole_packs);
#pragma unroll 1
    for (; k < call->num_packs; k += stride) {
        Pack v[W];
#pragma unroll 1
        for (u32 r = 0; r < world_size; r++) v[r] = load_peer<T>(sh->source[r], call->num_elems, k);
        const Pack result = reduce<T, W>(v, world_size, call->op);
        if (hold)
            st_weak_pack(sh->dest + (u64)k * PACK_BYTES, result);
        else
            out.store(k, result);
    }
}
// Direct and in place, once everybody has read: the results to where they belong.
template <class T>
AR_DEV_COLD void copy_held(const Shared* sh, const Call* call, u32 k, u32 stride) {
    const u32 rank = ld_weak_u32(call->control + AR_OFFSETOF(Control, rank)) & (MAX_WORLD_SIZE - 1);
    const u64 arena = ld_weak_u64(call->control + AR_OFFSETOF(Control, arena) + 8 * rank);
    const Tensor<T> out(call->dst + (call->flags & CALL_DST_IN_ARENA ? arena : 0), call->num_elems, call->dst_whole_packs);
#pragma unroll 1
    for (; k < call->num_packs; k += stride) out.store(k, ld_weak_pack(sh->dest + (u64)k * PACK_BYTES));
}

// The service threads enter, greet and wait, and leave. The data threads know nothing but what they find in shared
// memory behind the barrier; while they wait for it they rehearse (see exchange_once).
template <class T, int W, bool EXACT>
AR_DEV void serve_direct(Block& b) {
    const Call& call = *b.call;
    enter_load<true>(b);
    const Region staging = ld_region(b, AR_OFFSETOF(Control, staging_offset));
    enter_wait<T, W, EXACT>(b, ONE_SHOT_PULL);
    // In place is a property of the rank's own call; peers need not know.
    b.dest = call.dst;
    bool hold = call.src == call.dst;
    if (AR_UNLIKELY(hold || (call.flags & (CALL_SRC_IN_ARENA | CALL_DST_IN_ARENA)) != 0)) {
        find_tensors(b);
        hold = b.source == b.dest;
    }
    check_call<W, EXACT>(b, hold ? call.num_packs : 0, staging.bytes);
    greet<true>(b);
    if (b.lane == 0) {
        b.sh->dest = hold ? b.signal + staging.offset + (b.parity() * 2 + 1) * staging.bytes : b.dest;
        b.sh->whole = hold ? call.src_whole_packs : call.dst_whole_packs;
        b.sh->verdict = hold ? VERDICT_HOLD : VERDICT_GO;
    }
    advance_absent_blocks(b);  // while the headers are on their way
    const bool odd = meet<true, false>(b);
    if (AR_UNLIKELY(service_any(odd || b.failed))) {
        b.failed = service_any(b.failed);
        if (b.lane == 0) {
            b.sh->whole = 0;
            if (b.failed) b.sh->verdict = VERDICT_FAILED;
        }
    }
    sync_block();
    if (AR_UNLIKELY(b.failed)) {
        abandon<T>(b);
        return;
    }
#if !defined(AR_MUTATE_NO_END_BARRIER)
    meet_again(b, hold);
    b.failed = service_any(b.failed);
    if (AR_UNLIKELY(hold) && !sync_block_or(b.failed)) {
        sync_block();
        finish(b);
    }
    if (AR_UNLIKELY(b.failed)) abandon<T>(b);
#else
    finish(b);
#endif
}
template <class T, int W, bool EXACT>
AR_DEV void pull_direct(Block& b) {
    const Call& call = *b.call;
    constexpr int U = PULL_BATCH<W>;
    const u32 op = opaque(call.op), packs = opaque(call.num_packs);
    const u32 world_size = EXACT ? (u32)W : ld_weak_u32(b.control + AR_OFFSETOF(Control, world_size));
    // Rehearsed with this block's first packs, all at the control block's address.
    u32 whole = 1, first = 0, verdict = VERDICT_GO, k;
    u64 to = 0, source[W];
#pragma unroll
    for (int r = 0; r < W; r++) source[r] = b.control;
    u32 stride = 1;
    if (U > 1 && packs > b.stride) whole = U;
    for (u32 go = opaque(0);; go = opaque(1)) {
        if (go) {
            sync_block();
            to = b.sh->dest;
            whole = b.sh->whole;
            verdict = b.sh->verdict;
#pragma unroll
            for (int r = 0; r < W; r++)
                if (r < (int)world_size) source[r] = b.sh->source[r];
            first = b.first;
            stride = b.stride;
            if (AR_UNLIKELY(verdict == VERDICT_FAILED)) return;
        }
        k = first;
        if constexpr (U > 1)
#pragma unroll 1
            for (; AR_UNLIKELY(k + (U - 1) * stride < whole); k += U * stride) pull_batch<T, W, U>(source, world_size, op, go, to, k, stride);
#pragma unroll 1
        for (; k < whole; k += stride) pull_batch<T, W, 1>(source, world_size, op, go, to, k, stride);
        if (go) break;
    }
    if (AR_UNLIKELY(k < packs)) pull_odd<T, W>(b.sh, &call, world_size, verdict == VERDICT_HOLD, k, b.stride);
#if !defined(AR_MUTATE_NO_END_BARRIER)
    sync_block();
    if (AR_UNLIKELY(verdict == VERDICT_HOLD) && !sync_block_or(false)) {
        copy_held<T>(b.sh, &call, b.first, b.stride);
        sync_block();
    }
#endif
}

template <class T, int W, bool EXACT>
AR_DEV void one_shot_pull_staged(Block& b) {
    enter_load<false>(b);
    const Region region = ld_region(b, AR_OFFSETOF(Control, staging_offset));
    enter_wait<T, W, EXACT>(b, ONE_SHOT_PULL);
    find_tensors(b);
    const u32 packs = b.call->num_packs;
    const Tensor<T> in(b.source, b.call->num_elems, b.call->src_whole_packs), out(b.dest, b.call->num_elems, b.call->dst_whole_packs);
    const u64 staging = region.offset + b.parity() * 2 * region.bytes;
    check_call<W, EXACT>(b, packs, region.bytes);
    if (b.service) {
        greet<false>(b);
#if defined(AR_MUTATE_FLAG_ORDER)
        send_flags(b, AR_OFFSETOF(Signal, ready));
#endif
    } else if (!b.failed) {
#pragma unroll 1
        for (u32 k = b.first; k < packs; k += b.stride) st_weak_pack(b.signal + staging + (u64)k * PACK_BYTES, in.load(k));
    }
    sync_block();
    if (b.service) {
        send_flags(b, AR_OFFSETOF(Signal, ready));
        meet<false, true>(b);
    }
#if defined(AR_MUTATE_NO_BARRIER)
    const bool bad = false;
#else
    const bool bad = sync_block_or(b.failed);
#endif
    if (AR_UNLIKELY(bad)) {
        abandon<T>(b);
        return;
    }
    if (!b.service)
#pragma unroll 1
        for (u32 k = b.first; k < packs; k += b.stride) {
            Pack v[W];
#pragma unroll
            for (int r = 0; r < W; r++)
                if (r < (int)b.world_size) v[r] = ld_weak_pack(b.window(r) + staging + (u64)k * PACK_BYTES);
            out.store(k, reduce<T, W>(v, b.world_size, b.call->op));
        }
    else
        advance_absent_blocks(b);
    sync_block();
    finish(b);
}

template <class T, int W, bool EXACT>
AR_DEV void one_shot_pull(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    if (AR_UNLIKELY((call.flags & CALL_DIRECT) == 0))
        one_shot_pull_staged<T, W, EXACT>(b);
    else if (b.service)
        serve_direct<T, W, EXACT>(b);
    else
        pull_direct<T, W, EXACT>(b);
}

}  // namespace allreduced
