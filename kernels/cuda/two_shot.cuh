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

// Both phases in-band in the receiver's window, destinations rotated by rank, no flag and no barrier
// between ranks. Inputs arrive in the lower half of the source's slot, results in the upper half of
// the owner's. Receivers empty what they have read; slots alternate by sequence parity.
// Memory order: data relaxed.sys.
// SYNC: push-data, push-result
template <class T, int W, bool EXACT>
AR_DEV void two_shot_push(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    enter_wait<T, W, EXACT>(b, TWO_SHOT_PUSH);
    const Control& c = b.control();
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = call.num_packs, slice = slice_packs(packs, b.world_size);
    const u64 slot_bytes = c.push_slot_bytes, half = slot_bytes / 2;
    const u64 parity_base = c.push_offset + b.parity() * b.world_size * slot_bytes;
    check_call<W, EXACT>(b, slice, half / PACK_BYTES);
    const u64 mine = b.signal + parity_base;
    const u32 my_slice = b.rank * slice;

    if (b.service) {
        greet(b);
        meet<false>(b);
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
                    st_relaxed_pack(c.window[to] + parity_base + b.rank * slot_bytes + (u64)i * PACK_BYTES, without_empty<T>(v[j]));
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
            const bool bad = sync_block_or(b.failed);
            advance_absent_blocks(b);
            if (bad) {
                abandon(b, out);
                return;
            }
            first_round = false;
        }
        if (!busy || b.failed) break;
        const Pack result = reduce<T, W>(v, b.world_size, call.op);
#pragma unroll
        for (int j = 1; j < W; j++) {
            u32 to = b.rank + j;
            if (to >= b.world_size) to -= b.world_size;
            if (j < (int)b.world_size)  // SYNC: push-result
                st_relaxed_pack(c.window[to] + parity_base + b.rank * slot_bytes + half + (u64)i * PACK_BYTES, result);
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
    leave(b, out);
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
    enter_wait<T, W, EXACT>(b, TWO_SHOT_PULL_INBAND);
    const Control& c = b.control();
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = call.num_packs, slice = slice_packs(packs, b.world_size);
    check_call<W, EXACT>(b, direct ? slice : packs, c.inband_part_bytes / PACK_BYTES);
    begin_turn(b, direct ? 0 : packs, slice);
    const u64 slot = c.inband_offset + (b.turn & 3) * 2 * c.inband_part_bytes;
    const u64 results = slot + c.inband_part_bytes;
    const u32 my_slice = b.rank * slice;

    if (b.service) {
        greet(b);
        meet<false>(b);
    } else if (!b.failed && !direct) {
#pragma unroll 1
        for (u32 i = b.first; i < slice; i += b.stride) {
            Pack v[W];
#pragma unroll
            for (int s = 0; s < W; s++)
                if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs) v[s] = in.load(s * slice + i);
#pragma unroll
            for (int s = 0; s < W; s++)
                if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs)  // SYNC: pull-data
                    st_relaxed_pack(b.signal + slot + (u64)(s * slice + i) * PACK_BYTES, without_empty<T>(v[s]));
        }
    }
    if (direct) {
        const bool bad = sync_block_or(b.failed);
        advance_absent_blocks(b);
        if (bad) {
            abandon(b, out);
            return;
        }
    }
    bool first_round = !direct;
#pragma unroll 1
    for (u32 i = b.first;; i += b.stride) {
        const bool busy = !b.service && i < slice && my_slice + i < packs && !b.failed;
        const u32 k = my_slice + i;
        Pack v[W];
        if (busy) {
            const Pack own = in.load(k);
#pragma unroll
            for (int r = 0; r < W; r++) v[r] = own;  // stays where r is this rank
            if (direct) {
#pragma unroll
                for (int r = 0; r < W; r++)
                    if (r < (int)b.world_size && r != (int)b.rank) v[r] = peer_tensor<T>(sh->source[r], call.num_elems).load(k);
            } else {
                await_row<false, W>(
                b, v, [&](int r) { return r != (int)b.rank; }, [&](int r) { return c.window[r] + slot + (u64)k * PACK_BYTES; }, WAIT_INPUT);  // SYNC: pull-data
            }
        }
        if (first_round) {
            const bool bad = sync_block_or(b.failed);
            advance_absent_blocks(b);
            if (bad) {
                abandon(b, out);
                return;
            }
            first_round = false;
        }
        if (!busy || b.failed) break;
        const Pack result = reduce<T, W>(v, b.world_size, call.op);
        st_dependent_pack(b.signal + results + (u64)i * PACK_BYTES, result);  // SYNC: pull-result
        out.store(k, result);
    }
    if (direct) {
        sync_block();
        if (b.service) check_abort(b);  // as in one_shot_pull, while the others fetch results
    }
    if (!b.service) {
        clear_previous_turn(b);
#pragma unroll 1
        for (u32 i = b.first; i < slice && !b.failed; i += b.stride) {
            Pack v[W] = {};
            const auto wanted = [&](int r) { return r < (int)b.world_size && r != (int)b.rank && r * slice + i < packs; };
            await_row<true, W>(
                b, v, wanted, [&](int r) { return c.window[r] + results + (u64)i * PACK_BYTES; }, WAIT_RESULT);  // SYNC: pull-result
            if (b.failed) break;
#pragma unroll
            for (int r = 0; r < W; r++)
                if (wanted(r)) out.store(r * slice + i, v[r]);
        }
    }
    leave(b, out);
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
    enter_wait<T, W, EXACT>(b, TWO_SHOT_PULL);
    const Control& c = b.control();
    const Tensor<T> in(b.source, call.num_elems, call.src_whole_packs), out(b.dest, call.num_elems, call.dst_whole_packs);
    const u32 packs = call.num_packs, slice = slice_packs(packs, b.world_size);
    check_call<W, EXACT>(b, direct ? slice : packs, c.staging_part_bytes / PACK_BYTES);
    const u64 staging = c.staging_offset + b.parity() * 2 * c.staging_part_bytes;
    const u64 results = staging + c.staging_part_bytes;
    const u32 my_slice = b.rank * slice;

    if (b.service) greet(b);
    if (!direct) {
        if (!b.service && !b.failed)
#pragma unroll 1
            for (u32 i = b.first; i < slice; i += b.stride) {
                Pack v[W];
#pragma unroll
                for (int s = 0; s < W; s++)
                    if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs) v[s] = in.load(s * slice + i);
#pragma unroll
                for (int s = 0; s < W; s++)
                    if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs)
                        st_weak_pack(b.signal + staging + (u64)(s * slice + i) * PACK_BYTES, v[s]);
            }
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
    bool bad = sync_block_or(b.failed);
    advance_absent_blocks(b);
    if (bad) {
        abandon(b, out);
        return;
    }
    if (!b.service) {
#pragma unroll 1
        for (u32 i = b.first; i < slice && my_slice + i < packs; i += b.stride) {
            const u32 k = my_slice + i;
            Pack v[W];
#pragma unroll
            for (int r = 0; r < W; r++) {
                if (r >= (int)b.world_size) continue;
                if (r == (int)b.rank)
                    v[r] = in.load(k);
                else if (direct)
                    v[r] = peer_tensor<T>(sh->source[r], call.num_elems).load(k);
                else
                    v[r] = ld_weak_pack(c.window[r] + staging + (u64)k * PACK_BYTES);
            }
            const Pack result = reduce<T, W>(v, b.world_size, call.op);
            st_weak_pack(b.signal + results + (u64)i * PACK_BYTES, result);
            out.store(k, result);
        }
    }
    sync_block();
    if (b.service) {
        send_flags(b, AR_OFFSETOF(Signal, done), true);
        await_done(b, true);
    }
    bad = sync_block_or(b.failed);
    if (bad) {
        abandon(b, out);
        return;
    }
    if (!b.service) {
#pragma unroll 1
        for (u32 i = b.first; i < slice; i += b.stride) {
            Pack v[W];
#pragma unroll
            for (int s = 0; s < W; s++)
                if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs)
                    v[s] = ld_weak_pack(c.window[s] + results + (u64)i * PACK_BYTES);
#pragma unroll
            for (int s = 0; s < W; s++)
                if (s < (int)b.world_size && s != (int)b.rank && s * slice + i < packs) out.store(s * slice + i, v[s]);
        }
    }
    leave(b, out);
}

}  // namespace allreduced
