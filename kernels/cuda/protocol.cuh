// One call's life in a block: enter, greet, wait, leave; and what happens when a wait has no end.
//
// Used by the algorithms in one_shot.cuh and two_shot.cuh. The whole protocol (states, orders, why no
// barrier is missing) is described in kernels/README.md, "CUDA"; SYNC names are the same there.
#pragma once
#include "num.cuh"

namespace allreduced {

struct Shared {
    // The start of the control block, then this block's state.
    u64 words[CONTROL_COPY_BYTES / 8 + sizeof(BlockState) / 8];
    // Direct sources: absolute address of each rank's input.
    u64 source[MAX_WORLD_SIZE];
    AR_DEV const Control& control() const { return *(const Control*)words; }
    AR_DEV const BlockState& state() const { return *(const BlockState*)(words + CONTROL_COPY_BYTES / 8); }
};
constexpr u32 ENTRY_WORDS = sizeof(Shared::words) / 8;

// Polls between two looks at the abort word and the clock. The first look comes early, so that calls
// of a dead epoch return at once.
#if AR_CUDA
constexpr u32 LOOK_EVERY = 2048;
constexpr u32 FIRST_LOOK = 63;
#else
constexpr u32 LOOK_EVERY = 32;
constexpr u32 FIRST_LOOK = 7;
#endif

struct Block {
    Shared* sh;
    const Call* call;
    u32 world_size, rank, sequence;
    u32 threads;   // data threads of the block
    bool service;  // this thread belongs to the service threads...
    u32 lane;      // ...and is number `lane` of them
    u32 first, stride;  // this data thread's first pack and the step to its next
    u64 signal;    // own window's signal area
    u64 source;    // own input: address
    u64 dest;      // own output: address
    u32 expected;  // signature of this call
    u32 turn, dirty_input_packs, dirty_result_packs;  // of the BlockState this call leaves
    u32 polls;
    u64 wait_start_ns;
    bool failed;
    u64 entry_word;  // this thread's part of the control block, on its way to shared memory
#if AR_CUDA && defined(AR_TRACE)
    long long stamps[8];
#endif

    AR_DEV u32 parity() const { return sequence & 1u; }
    AR_DEV const Control& control() const { return sh->control(); }
    AR_DEV u64 control_word(u64 offset) const { return call->control + offset; }
};

AR_DEV u64 entry_address(const Call& call, u32 word) {
    constexpr u32 COPIED = CONTROL_COPY_BYTES / 8;
    return call.control + (word < COPIED ? 8 * word : AR_OFFSETOF(Control, blocks) + block_x() * sizeof(BlockState) + 8 * (word - COPIED));
}

// Starts loading the control block, one word a thread. The caller may load its first packs before
// enter_wait(), which puts it in shared memory, so that both loads' latencies overlap.
AR_DEV void enter(Block& b, Shared* sh, const Call* call) {
    b.sh = sh;
    b.call = call;
    b.threads = block_dim() - SERVICE_THREADS;
    const u32 t = thread_x();
    b.service = t >= b.threads;
    b.lane = t - b.threads;
    b.first = block_x() * b.threads + t;
    b.stride = grid_x() * b.threads;
    b.polls = 0;
    b.wait_start_ns = 0;
    wait_for_previous_kernel();
    AR_STAMP(b, 0);
    if (t < ENTRY_WORDS) b.entry_word = ld_weak_u64(entry_address(*call, t));
}

// The source address where it does not depend on the control block, else 0.
AR_DEV bool source_is_address(const Call& call) { return (call.flags & CALL_SRC_IN_ARENA) == 0; }

// EXACT: the instance serves world_size W only, a constant from here on; else any up to W.
template <class T, int W, bool EXACT>
AR_DEV void enter_wait(Block& b, u32 algorithm) {
    if (thread_x() < ENTRY_WORDS) b.sh->words[thread_x()] = b.entry_word;
#if !AR_CUDA  // a block on a GPU has at least 64 threads
    for (u32 i = thread_x() + block_dim(); i < ENTRY_WORDS; i += block_dim()) b.sh->words[i] = ld_weak_u64(entry_address(*b.call, i));
#endif
    sync_block();
    const Control& c = b.control();
    const BlockState& state = b.sh->state();
    b.world_size = EXACT ? (u32)W : c.world_size;
    b.rank = c.rank;
    b.sequence = state.sequence + 1;
    b.expected = (b.call->signature ^ c.epoch * 0x85ebca6bu) + (algorithm << 8 | T::DTYPE) * 0x9e3779b1u;
    b.failed = c.failed != 0;
    b.turn = state.turn;
    b.dirty_input_packs = state.dirty_input_packs;
    b.dirty_result_packs = state.dirty_result_packs;
    const u32 me = b.rank & (MAX_WORLD_SIZE - 1);
    b.signal = c.window[me];
    b.source = b.call->src + (source_is_address(*b.call) ? 0 : c.arena[me]);
    b.dest = b.call->dst + ((b.call->flags & CALL_DST_IN_ARENA) == 0 ? 0 : c.arena[me]);
}

// Ends the epoch on every rank: own and peers' abort words, own status word. Any number of threads and
// ranks may do so at once; each word names a rank at fault, the last writer's stays.
// SYNC: abort (relaxed both ways: the word carries all it says)
AR_DEV_COLD void spread_abort(const Shared* sh, u64 word) {
    const Control& c = sh->control();
#pragma unroll 1
    for (u32 r = 0; r < c.world_size && r < MAX_WORLD_SIZE; r++)
        st_relaxed_u64(c.window[r] + AR_OFFSETOF(Signal, abort), word);
    st_relaxed_u64(c.status, word);
}
AR_DEV void raise_on_all(const Shared* sh, u32 sequence, u32 reason, u32 blamed) {
    spread_abort(sh, abort_word(reason, blamed, sh->control().epoch, sequence));
}
AR_DEV void raise(Block& b, u32 reason, u32 blamed) {
    raise_on_all(b.sh, b.sequence, reason, blamed);
    b.failed = true;
}

// Passes an abort on before acting on it: whoever then reads what this rank's caller does to its
// buffers after the failed call finds its own abort word set.
// SYNC: abort
AR_DEV bool aborted(const Shared* sh, u64 signal) {
    const u64 word = ld_relaxed_u64(signal + AR_OFFSETOF(Signal, abort));
    if (word == 0) return false;
    spread_abort(sh, word);
    return true;
}

// The look behind give_up: at the abort word, then at the clock. Returns when the wait began, or
// WAIT_OVER. By value, so that the caller's state stays in registers.
constexpr u64 WAIT_OVER = ~0ull;
AR_DEV_COLD u64 look(const Shared* sh, u64 signal, u32 sequence, u64 wait_start_ns, u32 waiting_for) {
    if (aborted(sh, signal)) return WAIT_OVER;
    const u64 now = now_ns();
    if (wait_start_ns == 0) return now;
    if (now - wait_start_ns <= sh->control().timeout_ns) return wait_start_ns;
#if defined(AR_MUTATE_NO_DEADLINE)
    (void)sequence, (void)waiting_for;
    return wait_start_ns;
#else
    raise_on_all(sh, sequence, REASON_TIMEOUT, waiting_for);
    return WAIT_OVER;
#endif
}

// One more poll found nothing. True: stop waiting, the call has failed.
AR_DEV bool give_up(Block& b, u32 waiting_for) {
    pause();
    if ((b.polls++ & (LOOK_EVERY - 1)) != FIRST_LOOK) return false;
    const u64 start = look(b.sh, b.signal, b.sequence, b.wait_start_ns, waiting_for);
    if (start == WAIT_OVER) return b.failed = true;
    b.wait_start_ns = start;
    return false;
}

// Host-side mistakes end in an error on every rank, not in a wild access: before a block touches any
// window. (Block size and registers are bounded by the launch itself, grid.x <= MAX_BLOCKS by the host.)
template <int W, bool EXACT>
AR_DEV void check_call(Block& b, u32 packs, u64 capacity_packs) {
    const Control& c = b.control();
    const bool fits = EXACT ? c.world_size == (u32)W : c.world_size - 1u < (u32)W;
    if (c.abi_version == ABI_VERSION && fits && packs <= capacity_packs && b.call->num_packs <= MAX_PACKS) return;
    b.failed = true;
    if (c.abi_version == ABI_VERSION) raise_on_all(b.sh, b.sequence, REASON_BAD_CALL, c.rank);
}

// Service threads, first thing, block 0 for all: hello to every peer.
// SYNC: header
AR_DEV void greet(Block& b) {
    if (block_x() != 0 || b.failed) return;
    const Control& c = b.control();
    const bool direct = (b.call->flags & CALL_DIRECT) != 0;
    const u64 header = AR_OFFSETOF(Signal, header) + (b.parity() * MAX_WORLD_SIZE + b.rank) * sizeof(Header);
#pragma unroll 1
    for (u32 r = b.lane; r < b.world_size; r += SERVICE_THREADS) {
        st_after_boundary_u64(c.window[r] + header, ((u64)b.expected << 32) | b.sequence);
        if (direct) {
            const u64 offset = b.source - c.arena[b.rank];
            st_after_boundary_u64(c.window[r] + header + AR_OFFSETOF(Header, source_lo), (offset << 32) | b.sequence);
            st_after_boundary_u64(c.window[r] + header + AR_OFFSETOF(Header, source_hi),
                                  (offset & 0xffffffff00000000ull) | b.sequence);
        }
    }
}

// Per-block flags of the flag protocols. `which` is the offset of Signal::ready or Signal::done.
AR_DEV u64 flag_address(u64 window, u64 which, u32 block, u32 source) {
    return window + which + (block * MAX_WORLD_SIZE + source) * 4;
}
AR_DEV bool flag_is_old(u32 v, u32 sequence) { return (int)(v - sequence) < 0; }

// A header word that is not what this rank sent itself: not there yet, or the end of the call.
AR_DEV void judge_header(Block& b, u64 word, u32 from) {
    const int ahead = (int)((u32)word - b.sequence);
    if (ahead > 0)
        raise(b, REASON_SEQUENCE, from);
    else if (ahead == 0 && (u32)(word >> 32) != b.expected)
        raise(b, REASON_MISMATCH, from);
}

// Service threads: each looks after one rank (the harness' few after several) and one more after the
// abort word; their first loads go out together, so the wait costs one round trip where everything
// has arrived. Waits for the rank's header; with READY also for its ready flag for this block; with
// direct sources puts their addresses in shared memory.
// SYNC: header, ready
template <bool READY>
AR_DEV void meet(Block& b) {
    const bool direct = (b.call->flags & CALL_DIRECT) != 0;
    const u64 headers = b.signal + AR_OFFSETOF(Signal, header) + b.parity() * MAX_WORLD_SIZE * sizeof(Header);
#pragma unroll 1
    for (u32 r = b.lane; r <= b.world_size; r += SERVICE_THREADS) {
        const bool is_rank = r < b.world_size;
        const u64 address = is_rank ? headers + r * sizeof(Header) : b.signal + AR_OFFSETOF(Signal, abort);
        const u64 want = is_rank ? ((u64)b.expected << 32) | b.sequence : 0;
        if (!direct && !READY) {  // the hot path: nothing but one word
            u64 word = ld_relaxed_u64(address);
            while ((word != want || (is_rank && AR_WAIT_SITE(b.rank, WAIT_HEADER))) && is_rank && !b.failed) {
                judge_header(b, word, r);
                if (b.failed || give_up(b, r)) break;
                word = ld_relaxed_u64(address);
            }
            if (!is_rank && word != 0) {
                spread_abort(b.sh, word);
                b.failed = true;
            }
            continue;
        }
        const u64 flag = flag_address(b.signal, AR_OFFSETOF(Signal, ready), block_x(), r & (MAX_WORLD_SIZE - 1));
        u64 word, lo = b.sequence, hi = b.sequence;
        u32 ready = b.sequence;
        while (true) {
            word = ld_acquire_u64(address);
            if (direct && is_rank) {
                lo = ld_acquire_u64(address + AR_OFFSETOF(Header, source_lo));
                hi = ld_acquire_u64(address + AR_OFFSETOF(Header, source_hi));
            }
            if (READY) ready = ld_acquire_u32(flag);
            if (!is_rank || b.failed) break;
            if (word == want && (u32)lo == b.sequence && (u32)hi == b.sequence && !flag_is_old(ready, b.sequence) &&
                !AR_WAIT_SITE(b.rank, WAIT_HEADER) && !(READY && AR_WAIT_SITE(b.rank, WAIT_READY)))
                break;
            judge_header(b, word, r);
            if (b.failed || give_up(b, r)) break;
        }
        if (!is_rank) {
            if (word != 0) {
                spread_abort(b.sh, word);
                b.failed = true;
            }
        } else if (direct) {
            b.sh->source[r] = b.control().arena[r] + (lo >> 32 | (hi & 0xffffffff00000000ull));
        }
    }
}

// Service threads: tells every peer that this block has done with `which`, then waits for theirs, and
// looks at the abort word in the same breath. RELEASE: the flag publishes what the block wrote; else it
// only says that the block has read.
// SYNC: ready, done
AR_DEV void send_flags(Block& b, u64 which, bool release) {
    const Control& c = b.control();
#pragma unroll 1
    for (u32 r = b.lane; r < b.world_size && !b.failed; r += SERVICE_THREADS) {
        const u64 flag = flag_address(c.window[r], which, block_x(), b.rank);
        if (release)
            st_release_u32(flag, b.sequence);
        else
            st_after_reads_u32(flag, b.sequence);
    }
}
AR_DEV void await_done(Block& b, bool acquire) {
#pragma unroll 1
    for (u32 r = b.lane; r <= b.world_size; r += SERVICE_THREADS) {
        const bool is_rank = r < b.world_size;
        const u64 flag = flag_address(b.signal, AR_OFFSETOF(Signal, done), block_x(), r & (MAX_WORLD_SIZE - 1));
        while (true) {
            // The abort word's lane too: a peer that has failed may have returned, and its caller
            // overwritten a direct input after this block read it; it set this abort word before.
            const u64 word = ld_relaxed_u64(b.signal + AR_OFFSETOF(Signal, abort));
            const u32 v = acquire ? ld_acquire_u32(flag) : ld_before_end_u32(flag);
            if (!is_rank || b.failed) {
                if (word != 0) {
                    spread_abort(b.sh, word);
                    b.failed = true;
                }
                break;
            }
            if (!flag_is_old(v, b.sequence) && !AR_WAIT_SITE(b.rank, WAIT_DONE)) break;
            if (give_up(b, r)) break;
        }
    }
}

// Makes this call an in-band pull: what it will leave in its slot for the next one to empty.
AR_DEV void begin_turn(Block& b, u32 input_packs, u32 result_packs) {
    b.turn++;
    b.dirty_input_packs = input_packs;
    b.dirty_result_packs = result_packs;
}

// Service threads, one of them: the abort word once.
AR_DEV void check_abort(Block& b) {
    if (b.lane == SERVICE_THREADS - 1 && aborted(b.sh, b.signal)) b.failed = true;
}

// The state after this call, of every block that this call does not have: block 0's service threads.
// The blocks of this call store their own when they have finished (finish). The next kernel sees it:
// kernel boundary.
AR_DEV BlockState next_state(const Block& b) { return {b.sequence, b.turn, b.dirty_input_packs, b.dirty_result_packs}; }
AR_DEV void store_state(u64 control, u32 block, const BlockState& s) {
    const u64 a = control + AR_OFFSETOF(Control, blocks) + block * sizeof(BlockState);
    st_weak_u32(a + AR_OFFSETOF(BlockState, turn), s.turn);
    st_weak_u64(a + AR_OFFSETOF(BlockState, dirty_input_packs), s.dirty_input_packs | (u64)s.dirty_result_packs << 32);
    st_finished_u32(a + AR_OFFSETOF(BlockState, sequence), s.sequence);
}
AR_DEV void advance_absent_blocks(Block& b) {
    if (!b.service || block_x() != 0) return;
#pragma unroll 1
    for (u32 block = grid_x() + b.lane; block < MAX_BLOCKS; block += SERVICE_THREADS) store_state(b.call->control, block, next_state(b));
    if (b.lane == 0) st_weak_u32(b.control_word(AR_OFFSETOF(Control, abandoned) + 4 * ((b.sequence + 1) & 1)), 0);
}

// All threads of a block whose call failed. Other blocks may have had all they needed and be writing
// good values still, so wait until each has finished or failed; then one block fills the whole output
// with NaN.
// SYNC: finished
template <class T>
AR_DEV_COLD void abandon_call(u64 control, u64 timeout_ns, BlockState next, u64 dest, u64 num_elems, u32 num_packs) {
    sync_block();
    if (block_x() == 0) {  // as advance_absent_blocks, which a call that fails early has not reached
        for (u32 block = grid_x() + thread_x(); block < MAX_BLOCKS; block += block_dim()) store_state(control, block, next);
        if (thread_x() == 0) st_weak_u32(control + AR_OFFSETOF(Control, abandoned) + 4 * ((next.sequence + 1) & 1), 0);
    }
    bool fill = false;
    if (thread_x() == 0) {
        store_state(control, block_x(), next);
        const u64 start = now_ns();
        for (u32 block = 0; block < grid_x(); block++) {
            const u64 a = control + AR_OFFSETOF(Control, blocks) + block * sizeof(BlockState);
            while (ld_finished_u32(a) != next.sequence && now_ns() - start < timeout_ns) pause();
        }
#if AR_CUDA
        // st_finished_u32 is relaxed on the GPU; stores issued before it by another block land well within this.
        const u64 settle = now_ns();
        while (now_ns() - settle < 100000) {
        }
#endif
        fill = abandon_add(control + AR_OFFSETOF(Control, abandoned) + 4 * (next.sequence & 1)) == 0;
        if (fill) st_weak_u32(control + AR_OFFSETOF(Control, failed), 1);
    }
    if (!sync_block_or(fill)) return;
    const Tensor<T> out = peer_tensor<T>(dest, num_elems);
    Pack nan;
#pragma unroll
    for (int i = 0; i < 4; i++) nan.w[i] = T::NAN_WORD;
#pragma unroll 1
    for (u32 k = thread_x(); k < num_packs; k += block_dim()) out.store(k, nan);
}
template <class T>
AR_DEV void abandon(Block& b, const Tensor<T>& out) {
    abandon_call<T>(b.call->control, b.control().timeout_ns, next_state(b), out.base, out.num_elems, b.call->num_packs);
}

// End of every call: all threads, after their last access.
// SYNC: finished
template <class T>
AR_DEV void leave(Block& b, const Tensor<T>& out) {
    if (sync_block_or(b.failed)) {
        abandon(b, out);
        return;
    }
#if defined(AR_MUTATE_EMPTY_CALL_STAYS)
    if (b.call->num_elems == 0) return;
#endif
    if (thread_x() == 0) store_state(b.call->control, block_x(), next_state(b));
#if AR_CUDA && defined(AR_TRACE)
    AR_STAMP(b, 6);
    if (block_x() == 0 && (thread_x() == 0 || (b.service && b.lane == 0)))
        for (int i = 0; i < 7; i++) st_relaxed_u64(b.signal + 20480 + (b.service ? 64 : 0) + 8 * i, (u64)b.stamps[i]);
#endif
}

// Waits until in-band packs have arrived: all that `wanted(u, r)` names, from `address(u, r)`, into v.
// Each round loads what is still missing, all at once, so a wait costs one round trip and not one per
// peer.
template <int U, int W, class Wanted, class Address>
AR_DEV void await_packs(Block& b, Pack (&v)[U][W], Wanted wanted, Address address, [[maybe_unused]] u32 site) {
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
        for (int r = 0; r < W; r++)
            if (wanted(u, r)) v[u][r] = empty_pack();
    while (true) {
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int r = 0; r < W; r++)
                if (wanted(u, r) && has_empty(v[u][r]))
                    v[u][r] = ld_relaxed_pack(address(u, r));
        u32 missing = MAX_WORLD_SIZE;
#pragma unroll
        for (int u = U - 1; u >= 0; u--)
#pragma unroll
            for (int r = W - 1; r >= 0; r--)
                if (wanted(u, r) && has_empty(v[u][r])) missing = r;
        if (AR_WAIT_SITE(b.rank, site)) missing = 0;
        if (missing == MAX_WORLD_SIZE) break;
        if (b.failed || give_up(b, missing)) break;
    }
}

// The short form of the same: at most one pack of each rank, and no branch per rank. First everything is
// loaded, then again what had not arrived. What is not wanted keeps its value. See exchange_once.
template <bool DEPENDENT, int W, class Wanted, class Address>
AR_DEV void await_row(Block& b, Pack (&v)[W], Wanted wanted, Address address, [[maybe_unused]] u32 site) {
#pragma unroll
    for (int r = 0; r < W; r++)
        if (r < (int)b.world_size) ld_pack_if<DEPENDENT>(v[r], address(r), wanted(r));
    while (true) {
        bool missing[W], any = false;
#pragma unroll
        for (int r = 0; r < W; r++) {
            missing[r] = r < (int)b.world_size && wanted(r) && has_empty(v[r]);
            any |= missing[r];
        }
        if (AR_WAIT_SITE(b.rank, site)) any = true;
        if (!any || b.failed) return;
        pause();
        if ((b.polls++ & (LOOK_EVERY - 1)) == FIRST_LOOK) {
            u32 from = 0;
#pragma unroll
            for (int r = W - 1; r >= 0; r--)
                if (missing[r]) from = r;
            const u64 start = look(b.sh, b.signal, b.sequence, b.wait_start_ns, from);
            b.wait_start_ns = start;
            if (start == WAIT_OVER) {
                b.failed = true;
                return;
            }
        }
#pragma unroll
        for (int r = 0; r < W; r++)
            if (r < (int)b.world_size) ld_pack_if<DEPENDENT>(v[r], address(r), missing[r]);
    }
}

}  // namespace allreduced
