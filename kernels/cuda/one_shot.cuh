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

template <class T, int U>
AR_DEV void load_batch(Pack (&own)[U], const Tensor<T>& in, const Block& b, u32 k, u32 packs) {
#pragma unroll
    for (int u = 0; u < U; u++)
        if (k + u * b.stride < packs) own[u] = in.load(k + u * b.stride);
}

// Both in-band one-shots: send, wait, reduce. `send(k, pack, self)` stores a pack where peers look for
// it, and where this rank does with `self`; `address(r, k)` is where rank r's appears. `clear(k, self)`
// empties the slots of a pack that has been reduced, `finish()` whatever else is left to empty.
//
// exchange_once: at most one pack per thread, the latency-bound case. Kept short: a kernel's first pass
// through its code misses the instruction cache, which costs more than anything else here when several
// processes share the GPU. For that reason it also sends to itself: no rank is a special case.
template <class T, int W, class Send, class Address, class Clear, class Finish>
AR_DEV void exchange_once(Block& b, const Tensor<T>& out, const Pack& own, Send send, Address address, Clear clear, Finish finish) {
    const u32 k = b.first;
    const bool busy = !b.service && k < b.call->num_packs && !b.failed;
    Pack v[W] = {};
    AR_STAMP(b, 1);
    if (b.service) {
        greet(b);
        AR_STAMP(b, 2);
        meet<false>(b);
    } else if (busy) {
        send(k, without_empty<T>(own), true);
        AR_STAMP(b, 2);
        await_row<false, W>(b, v, [](int) { return true; }, [&](int r) { return address(r, k); }, WAIT_INPUT);
    }
    AR_STAMP(b, 3);
    // The one barrier between arrival and use: headers agree, nobody aborted.
    if (sync_block_or(b.failed)) {
        abandon(b, out);
        return;
    }
    AR_STAMP(b, 4);
    if (busy) {
        if constexpr (W >= 8)
            out.store(k, reduce_compact<T, W>(v, b.world_size, b.call->op));
        else
            out.store(k, reduce<T, W>(v, b.world_size, b.call->op));
        clear(k, true);
    }
    if (!b.service) finish();
    AR_STAMP(b, 5);
    advance_absent_blocks(b);
    leave(b, out);
}

// exchange: any number of packs, U of them in flight per thread.
template <class T, int W, int U, class Send, class Address, class Clear, class Finish>
AR_DEV void exchange(Block& b, const Tensor<T>& in, const Tensor<T>& out, Send send, Address address, Clear clear, Finish finish) {
    const u32 packs = b.call->num_packs;
    const bool single_round = packs <= U * b.stride;  // then `own` still holds the input when it is reduced
    Pack own[U], v[U][W];
    if (b.service) {
        greet(b);
        meet<false>(b);
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
            if (sync_block_or(b.failed)) {
                abandon(b, out);
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
    if (!b.service) finish();
    advance_absent_blocks(b);
    leave(b, out);
}

// Enters, and runs the one or the other. A source address that does not depend on the control block is
// read while that is on its way.
template <class T, int W, bool EXACT, class Run>
AR_DEV void enter_and_run(Shared* sh, const Call& call, u32 algorithm, Run run) {
    Block b;
    enter(b, sh, &call);
    const bool early = source_is_address(call);
    const bool once = call.num_packs <= b.stride;
    Pack own = {};
    if (!early) enter_wait<T, W, EXACT>(b, algorithm);
    const Tensor<T> in(early ? call.src : b.source, call.num_elems, call.src_whole_packs);
    if (!b.service && once && b.first < call.num_packs) own = in.load(b.first);
    if (early) enter_wait<T, W, EXACT>(b, algorithm);
    run(b, in, Tensor<T>(b.dest, call.num_elems, call.dst_whole_packs), own, once);
}

// Writes its input into a slot of every peer's window; peers poll their own memory, word by word, for
// words that are not EMPTY_WORD (in-band arrival: no flag, no fence), reduce, and empty the slots.
// Memory order: data relaxed.sys, each word stands for itself. Slots alternate by sequence parity.
// SYNC: push-data
template <class T, int W, bool EXACT>
AR_DEV void one_shot_push(Shared* sh, const Call& call) {
    enter_and_run<T, W, EXACT>(sh, call, ONE_SHOT_PUSH, [&](Block& b, const Tensor<T>& in, const Tensor<T>& out, const Pack& own, bool once) {
        const Control& c = b.control();
        const u64 slot_bytes = c.push_slot_bytes;
        const u64 parity_base = c.push_offset + b.parity() * b.world_size * slot_bytes;
        const u64 mine = b.signal + parity_base;
        check_call<W, EXACT>(b, b.call->num_packs, slot_bytes / PACK_BYTES);
        const auto send = [&](u32 k, const Pack& p, bool self) {
            const u64 at = parity_base + b.rank * slot_bytes + (u64)k * PACK_BYTES;
            u32 to = b.rank;
#pragma unroll 1
            for (u32 j = self ? 0 : 1; j < b.world_size; j++) {
                to = to + 1 == b.world_size ? 0 : to + 1;
                st_relaxed_pack(c.window[to] + at, p);  // SYNC: push-data
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
        if (once)
            exchange_once<T, W>(b, out, own, send, address, clear, [] {});
        else
            exchange<T, W, BATCH<W>>(b, in, out, send, address, clear, [] {});
    });
}

// Empties what the previous in-band pull left in this rank's slots. Called once the headers of this
// call are in: every peer has then completed that turn and read all it will. Slots rotate over four
// turns, so the next writer and readers of these bytes come only after this kernel has completed.
AR_DEV void clear_previous_turn([[maybe_unused]] Block& b) {
#if !defined(AR_MUTATE_NO_CLEAR)
    const Control& c = b.control();
    const BlockState& before = b.sh->state();
    const u64 slot = b.signal + c.inband_offset + (before.turn & 3) * 2 * c.inband_part_bytes;
    const u32 input_packs = before.dirty_input_packs, result_packs = before.dirty_result_packs;
#pragma unroll 1
    for (u32 k = b.first; k < input_packs; k += b.stride) st_relaxed_pack(slot + (u64)k * PACK_BYTES, empty_pack());
#pragma unroll 1
    for (u32 k = b.first; k < result_packs; k += b.stride)
        st_relaxed_pack(slot + c.inband_part_bytes + (u64)k * PACK_BYTES, empty_pack());
#endif
}

// Writes its input once, into a slot of its own window; peers poll that memory, word by word, as in
// one_shot_push. 1/(N-1) of the bytes written by a push, but the polls cross the link.
// Memory order: data relaxed.sys. Slots rotate over four turns; the owner empties a slot one in-band
// pull later.
// SYNC: pull-data
template <class T, int W, bool EXACT>
AR_DEV void one_shot_pull_inband(Shared* sh, const Call& call) {
    enter_and_run<T, W, EXACT>(sh, call, ONE_SHOT_PULL_INBAND, [&](Block& b, const Tensor<T>& in, const Tensor<T>& out, const Pack& own, bool once) {
        const Control& c = b.control();
        begin_turn(b, b.call->num_packs, 0);
        const u64 slot = c.inband_offset + (b.turn & 3) * 2 * c.inband_part_bytes;
        check_call<W, EXACT>(b, b.call->num_packs, c.inband_part_bytes / PACK_BYTES);
        const auto send = [&](u32 k, const Pack& p, bool) { st_relaxed_pack(b.signal + slot + (u64)k * PACK_BYTES, p); };  // SYNC: pull-data
        const auto address = [&](int r, u32 k) { return c.window[r] + slot + (u64)k * PACK_BYTES; };                 // SYNC: pull-data
        const auto finish = [&] { clear_previous_turn(b); };
        if (once)
            exchange_once<T, W>(b, out, own, send, address, [](u32, bool) {}, finish);
        else
            exchange<T, W, BATCH<W>>(b, in, out, send, address, [](u32, bool) {}, finish);
    });
}

// Flag arrival. Staged: copies its input to its own staging area, releases one flag per block to every
// peer, acquires theirs, reads their staging. Direct: reads peers' inputs where they are; the header
// says that an input is ready, and a `done` flag per block keeps it until everybody has read.
// Memory order: staging written by ordinary stores; flag st.release.sys after sync_block by one thread
// per peer, ld.acquire.sys by one thread, then sync_block, then ordinary loads.
// Staging alternates by sequence parity: a peer that is two calls ahead knows this call complete.
// Direct and in place: results wait in staging until every peer has read the input.
// SYNC: ready, done
template <class T, int W, int U>
AR_DEV void pull_and_reduce(Block& b, const Tensor<T>& in, const Tensor<T>& out, u64 staging, u64 held) {
    const Control& c = b.control();
    const bool direct = (b.call->flags & CALL_DIRECT) != 0;
    const u32 packs = b.call->num_packs;
#pragma unroll 1
    for (u32 k = b.first; k < packs; k += U * b.stride) {
        Pack v[U][W];
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int r = 0; r < W; r++) {
                const u32 i = k + u * b.stride;
                if (i >= packs || r >= (int)b.world_size) continue;
                const u64 base = direct || r == (int)b.rank ? b.sh->source[r] : c.window[r] + staging;
                v[u][r] = peer_tensor<T>(base, direct || r == (int)b.rank ? in.num_elems : (u64)packs * T::ELEMS).load(i);
            }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const u32 i = k + u * b.stride;
            if (i >= packs) continue;
            const Pack result = reduce<T, W>(v[u], b.world_size, b.call->op);
            if (held)
                st_weak_pack(held + (u64)i * PACK_BYTES, result);
            else
                out.store(i, result);
        }
        if (U == 1 && packs <= b.stride) break;
    }
}
template <class T, int W, bool EXACT>
AR_DEV void one_shot_pull(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    const bool direct = (call.flags & CALL_DIRECT) != 0;
    enter_wait<T, W, EXACT>(b, ONE_SHOT_PULL);
    const Control& c = b.control();
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = b.call->num_packs;
    const bool hold = direct && b.source == b.dest;
    const u64 staging = c.staging_offset + b.parity() * 2 * c.staging_part_bytes;
    check_call<W, EXACT>(b, direct && !hold ? 0 : packs, c.staging_part_bytes / PACK_BYTES);

    if (b.service) {
        greet(b);
#if defined(AR_MUTATE_FLAG_ORDER)
        if (!direct) send_flags(b, AR_OFFSETOF(Signal, ready), true);
#endif
        if (!direct && b.lane == 0) sh->source[b.rank] = b.source;
    }
    if (!direct) {
        if (!b.service && !b.failed)
            for (u32 k = b.first; k < packs; k += b.stride) st_weak_pack(b.signal + staging + (u64)k * PACK_BYTES, in.load(k));
        sync_block();
    }
    if (b.service) {
        if (direct) {
            meet<false>(b);
        } else {
            send_flags(b, AR_OFFSETOF(Signal, ready), true);
            meet<true>(b);
        }
    }
#if defined(AR_MUTATE_NO_BARRIER)
    const bool bad = false;
#else
    const bool bad = sync_block_or(b.failed);
#endif
    advance_absent_blocks(b);
    if (bad) {
        abandon(b, out);
        return;
    }
    if (!b.service) {
        const u64 held = hold ? b.signal + staging + c.staging_part_bytes : 0;
        if (BATCH<W> == 1 || packs <= b.stride)
            pull_and_reduce<T, W, 1>(b, in, out, staging, held);
        else
            pull_and_reduce<T, W, BATCH<W>>(b, in, out, staging, held);
    }
#if !defined(AR_MUTATE_NO_END_BARRIER)
    if (direct) {
        sync_block();
        if (b.service) {
            send_flags(b, AR_OFFSETOF(Signal, done), false);
            await_done(b, false);
        }
        if (hold) {
            if (sync_block_or(b.failed)) {
                abandon(b, out);
                return;
            }
            if (!b.service)
                for (u32 k = b.first; k < packs; k += b.stride)
                    out.store(k, ld_weak_pack(b.signal + staging + c.staging_part_bytes + (u64)k * PACK_BYTES));
        }
    }
#endif
    leave(b, out);
}

}  // namespace allreduced
