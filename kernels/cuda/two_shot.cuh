// Two-shot all-reduce: rank s reduces slice s of everybody's input (reduce-scatter), then everybody
// fetches every slice's result (all-gather). Each rank moves about 2/N of a one-shot's bytes, for one
// more hop.
//
// Shapes      as one_shot.cuh. The call's packs are cut into world_size slices of ceil(packs / N); the
//             last ones may be short or empty.
// Launch      as one_shot.cuh.
// Mapping     index i of every slice belongs to data thread i mod (blocks x data threads), on every
//             rank: the thread that reads in[s][i] is the one that later writes out[s][i].
// Determinism as one_shot.cuh; the result is rounded once, by its owner.
// In place    allowed, direct sources too: slice s of an input is read by rank s only, and out[s][i] is
//             written only once the owner's result i has arrived, that is after it has read in[s][i]
//             of every rank; no rank but s itself reads slice s.
// Abort       as one_shot.cuh.
#pragma once
#include "one_shot.cuh"

namespace allreduced {

AR_DEV u32 slice_packs(u32 packs, u32 world_size) { return world_size ? (packs + world_size - 1) / world_size : 0; }

// Index i of every slice, from this rank's input and to its output. Straight through where all of them are
// aligned and whole; what does not exist is left out.
template <class T, int W>
AR_DEV void load_column(const Block& b, const Tensor<T>& in, Pack (&v)[W], u32 slice, u32 i) {
    if (AR_LIKELY((b.world_size - 1) * slice + i < in.whole_packs)) {
#pragma unroll
        for (int s = 0; s < W; s++)
            if (s < (int)b.world_size) v[s] = ld_weak_pack(in.base + (u64)(s * slice + i) * PACK_BYTES);
    } else {
#pragma unroll
        for (int s = 0; s < W; s++)
            if (s < (int)b.world_size && s * slice + i < b.call->num_packs) v[s] = in.load(s * slice + i);
    }
}
template <class T, int W>
AR_DEV void store_column(const Block& b, const Tensor<T>& out, const Pack (&v)[W], u32 slice, u32 i) {
    if (AR_LIKELY((b.world_size - 1) * slice + i < out.whole_packs)) {
#pragma unroll
        for (int s = 0; s < W; s++)
            if (s < (int)b.world_size && s != (int)b.rank) st_weak_pack(out.base + (u64)(s * slice + i) * PACK_BYTES, v[s]);
    } else {
#pragma unroll
        for (int s = 0; s < W; s++)
            if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < b.call->num_packs) out.store(s * slice + i, v[s]);
    }
}

// Both phases in-band in the receiver's window, destinations rotated by rank, no flag and no barrier
// between ranks. Inputs arrive in the lower half of the source's slot, results in the upper half of
// the owner's. Receivers empty what they have read; slots alternate by sequence parity.
// Memory order: data relaxed.sys.
// SYNC: push-data, push-result
template <class T, int W, bool EXACT>
AR_DEV void two_shot_push(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    enter_load<false>(b);
    const Region push = ld_region(b, AR_OFFSETOF(Control, push_offset));
    enter_wait<T, W, EXACT>(b, TWO_SHOT_PUSH);
    find_tensors(b);
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = call.num_packs, slice = slice_packs(packs, b.world_size);
    const u64 slot_bytes = push.bytes, half = slot_bytes / 2;
    const u64 parity_base = push.offset + b.parity() * b.world_size * slot_bytes;
    check_call<W, EXACT>(b, slice, half);
    const u64 mine = b.signal + parity_base;
    const u32 my_slice = b.rank * slice;

    if (b.service) {
        greet<false>(b);
        meet<false, false>(b);
    } else if (!b.failed) {
#pragma unroll 1
        for (u32 i = b.first; i < slice; i += b.stride) {
            Pack v[W];
#pragma unroll
            for (int j = 1; j < W; j++) {
                u32 to = b.rank + j;
                if (to >= b.world_size) to -= b.world_size;
                if (j < (int)b.world_size && to * slice + i < packs) v[j] = in.load(to * slice + i);
            }
#pragma unroll
            for (int j = 1; j < W; j++) {
                u32 to = b.rank + j;
                if (to >= b.world_size) to -= b.world_size;
                if (j < (int)b.world_size && to * slice + i < packs)  // SYNC: push-data
                    st_relaxed_pack(b.window(to) + parity_base + b.rank * slot_bytes + (u64)i * PACK_BYTES, without_empty<T>(v[j]));
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
            for (int r = 0; r < W; r++) v[r] = own;  // stays where r is this rank
            await_row<false, W>(
                b, v, [&](int r) { return r != (int)b.rank; }, [&](int r) { return mine + r * slot_bytes + (u64)i * PACK_BYTES; }, WAIT_INPUT);  // SYNC: push-data
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
        const Pack result = reduce<T, W>(v, b.world_size, call.op);
#pragma unroll
        for (int j = 1; j < W; j++) {
            u32 to = b.rank + j;
            if (to >= b.world_size) to -= b.world_size;
            if (j < (int)b.world_size)  // SYNC: push-result
                st_relaxed_pack(b.window(to) + parity_base + b.rank * slot_bytes + half + (u64)i * PACK_BYTES, result);
        }
        out.store(my_slice + i, result);
#if !defined(AR_MUTATE_NO_CLEAR)
#pragma unroll
        for (int r = 0; r < W; r++)
            if (r < (int)b.world_size && r != (int)b.rank) st_relaxed_pack(mine + r * slot_bytes + (u64)i * PACK_BYTES, empty_pack());
#endif
    }
    if (!b.service) {
#pragma unroll 1
        for (u32 i = b.first; i < slice && !b.failed; i += b.stride) {
            Pack v[W] = {};
            const auto wanted = [&](int r) { return r < (int)b.world_size && r != (int)b.rank && r * slice + i < packs; };
            const auto address = [&](int r) { return mine + r * slot_bytes + half + (u64)i * PACK_BYTES; };
            await_row<false, W>(b, v, wanted, address, WAIT_RESULT);  // SYNC: push-result
            if (b.failed) break;
#pragma unroll
            for (int r = 0; r < W; r++) {
                if (!wanted(r)) continue;
                out.store(r * slice + i, v[r]);
#if !defined(AR_MUTATE_NO_CLEAR)
                st_relaxed_pack(address(r), empty_pack());
#endif
            }
        }
    }
    leave<T>(b);
}

// Direct: this rank's slice of everybody's input, reduced into `results` and the output. True: the call has
// failed.
// SYNC: header, pull-result
template <class T, int W>
AR_DEV bool reduce_direct_slice(Block& b, const Tensor<T>& out, u32 my_slice, u32 mine, u64 results) {
    bool odd = false;
    if (b.service) {
        greet<true>(b);
        odd = meet<true, false>(b);
    }
    u32 whole = (u32)(out.num_elems / T::ELEMS);
    if (AR_UNLIKELY(sync_block_or(b.failed || odd))) {
        if (sync_block_or(b.failed)) return true;
        whole = 0;
    }
    if (!b.service) {
#pragma unroll 1
        for (u32 i = b.first; i < mine; i += b.stride) {
            const u32 k = my_slice + i;
            Pack v[W];
            if (AR_LIKELY(k < whole)) {
#pragma unroll
                for (int r = 0; r < W; r++)
                    if (r < (int)b.world_size) v[r] = ld_peer_pack(b.sh->source[r] + (u64)k * PACK_BYTES);
            } else {
#pragma unroll
                for (int r = 0; r < W; r++)
                    if (r < (int)b.world_size) v[r] = load_peer<T>(b.sh->source[r], out.num_elems, k);
            }
            const Pack result = reduce<T, W>(v, b.world_size, b.call->op);
            st_dependent_pack(results + (u64)i * PACK_BYTES, result);  // SYNC: pull-result
            out.store(k, result);
        }
    } else {
        advance_absent_blocks(b);
    }
    sync_block();
    // As in one_shot_pull, after the last direct read and while the others fetch results.
    if (b.service) check_abort(b);
    return false;
}

// Inputs are pulled: in place where direct (the header says they are ready), else polled in-band in
// the owner's input part. Results are written once, to the owner's own result part, and polled there.
// No flag and no end barrier: a rank that has polled all results knows all its input read.
// Memory order: data relaxed.sys; direct inputs by ordinary loads after the header.
// SYNC: header, pull-data, pull-result
template <class T, int W, bool EXACT>
AR_DEV void two_shot_pull_inband(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    const bool direct = (call.flags & CALL_DIRECT) != 0;
    enter_load<true>(b);
    const Region inband = ld_region(b, AR_OFFSETOF(Control, inband_offset));
    u64 windows[W];
    ld_windows(b, windows);
    enter_wait<T, W, EXACT>(b, TWO_SHOT_PULL_INBAND);
    find_tensors(b);
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = call.num_packs, slice = slice_packs(packs, b.world_size);
    check_call<W, EXACT>(b, direct ? slice : packs, inband.bytes);
    begin_turn(b, direct ? 0 : packs, slice);
    const u64 slot = inband.offset + (b.turn & 3) * 2 * inband.bytes;
    const u64 results = slot + inband.bytes;
    const u32 my_slice = b.rank * slice, mine = my_slice < packs ? (packs - my_slice < slice ? packs - my_slice : slice) : 0;

    if (direct) {
        if (reduce_direct_slice<T, W>(b, out, my_slice, mine, b.signal + results)) {
            abandon<T>(b);
            return;
        }
    } else {
        if (b.service) {
            greet<false>(b);
            meet<false, false>(b);
        } else if (!b.failed) {
#pragma unroll 1
            for (u32 i = b.first; i < slice; i += b.stride) {
                Pack v[W];
                load_column<T, W>(b, in, v, slice, i);
#pragma unroll
                for (int s = 0; s < W; s++)
                    if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs)  // SYNC: pull-data
                        st_relaxed_pack(b.signal + slot + (u64)(s * slice + i) * PACK_BYTES, without_empty<T>(v[s]));
            }
        }
        bool first_round = true;
#pragma unroll 1
        for (u32 i = b.first;; i += b.stride) {
            const bool busy = !b.service && i < mine && !b.failed;
            const u32 k = my_slice + i;
            Pack v[W];
            if (busy) {
                const Pack own = in.load(k);
#pragma unroll
                for (int r = 0; r < W; r++) v[r] = own;  // stays where r is this rank
                await_row<false, W>(
                    b, v, [&](int r) { return r != (int)b.rank; }, [&](int r) { return windows[r] + slot + (u64)k * PACK_BYTES; }, WAIT_INPUT);  // SYNC: pull-data
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
            const Pack result = reduce<T, W>(v, b.world_size, call.op);
            st_dependent_pack(b.signal + results + (u64)i * PACK_BYTES, result);  // SYNC: pull-result
            out.store(k, result);
        }
    }
    if (!b.service) {
        clear_previous_turn(b, inband);  // while the others' results are on their way
#pragma unroll 1
        for (u32 i = b.first; i < slice && !b.failed; i += b.stride) {
            Pack v[W] = {};
            await_row<true, W>(
                b, v, [&](int r) { return r != (int)b.rank && r * slice + i < packs; }, [&](int r) { return windows[r] + results + (u64)i * PACK_BYTES; },
                WAIT_RESULT);  // SYNC: pull-result
            if (b.failed) break;
            store_column<T, W>(b, out, v, slice, i);
        }
    }
    leave<T>(b);
}

// Flag arrival in both phases, data pulled. Staged: input to own staging, `ready` flag per block,
// pull own slice of everybody; result to own staging, `done` flag per block, pull the others'. Direct:
// the header takes the place of `ready`. `done` also says that this block has read its share of
// everybody's input, so no end barrier is needed.
// Memory order: as one_shot_pull; `done` releases the results.
// SYNC: ready, done
template <class T, int W, bool EXACT>
AR_DEV void two_shot_pull(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    const bool direct = (call.flags & CALL_DIRECT) != 0;
    enter_load<true>(b);
    const Region region = ld_region(b, AR_OFFSETOF(Control, staging_offset));
    enter_wait<T, W, EXACT>(b, TWO_SHOT_PULL);
    find_tensors(b);
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = call.num_packs, slice = slice_packs(packs, b.world_size);
    check_call<W, EXACT>(b, direct ? slice : packs, region.bytes);
    const u64 staging = region.offset + b.parity() * 2 * region.bytes;
    const u64 results = staging + region.bytes;
    const u32 my_slice = b.rank * slice, mine = my_slice < packs ? (packs - my_slice < slice ? packs - my_slice : slice) : 0;

    bool bad;
    if (direct) {
        bad = reduce_direct_slice<T, W>(b, out, my_slice, mine, b.signal + results);
    } else {
        if (b.service) {
            greet<false>(b);
        } else if (!b.failed) {
#pragma unroll 1
            for (u32 i = b.first; i < slice; i += b.stride) {
                Pack v[W];
                load_column<T, W>(b, in, v, slice, i);
#pragma unroll
                for (int s = 0; s < W; s++)
                    if (s < (int)b.world_size && s * slice + i < packs) st_weak_pack(b.signal + staging + (u64)(s * slice + i) * PACK_BYTES, v[s]);
            }
        }
        sync_block();
        if (b.service) {
            send_flags(b, AR_OFFSETOF(Signal, ready));
            meet<false, true>(b);
        }
        bad = sync_block_or(b.failed);
        if (b.service && !bad) advance_absent_blocks(b);
        if (!b.service && !bad) {
#pragma unroll 1
            for (u32 i = b.first; i < mine; i += b.stride) {
                Pack v[W];
#pragma unroll
                for (int r = 0; r < W; r++)
                    if (r < (int)b.world_size) v[r] = ld_weak_pack(b.window(r) + staging + (u64)(my_slice + i) * PACK_BYTES);
                const Pack result = reduce<T, W>(v, b.world_size, call.op);
                st_weak_pack(b.signal + results + (u64)i * PACK_BYTES, result);
                out.store(my_slice + i, result);
            }
        }
    }
    if (AR_UNLIKELY(bad)) {
        abandon<T>(b);
        return;
    }
    sync_block();
    if (b.service) {
        send_flags(b, AR_OFFSETOF(Signal, done));
        await_done(b);
    }
    if (AR_UNLIKELY(sync_block_or(b.failed))) {
        abandon<T>(b);
        return;
    }
    if (!b.service) {
#pragma unroll 1
        for (u32 i = b.first; i < slice; i += b.stride) {
            Pack v[W] = {};
#pragma unroll
            for (int s = 0; s < W; s++)
                if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs)
                    v[s] = ld_weak_pack(b.window(s) + results + (u64)i * PACK_BYTES);
            store_column<T, W>(b, out, v, slice, i);
        }
    }
    sync_block();
    finish(b);
}

}  // namespace allreduced
