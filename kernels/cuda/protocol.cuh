// One call's life in a block: enter, greet, wait, leave; and what happens when a wait has no end.
//
// Used by the algorithms in one_shot.cuh, two_shot.cuh and hierarchical.cuh. The whole protocol (states, orders, why no
// barrier is missing) is described in kernels/README.md, "CUDA"; SYNC names are the same there.
#pragma once
#include "num.cuh"

namespace allreduced {

// What the service threads tell the data threads of a direct call, before the barrier that ends the wait.
struct alignas(16) Shared {
    u64 source[MAX_WORLD_SIZE];  // absolute address of each rank's input
    u64 dest;                    // where results go: own output, or the staging that holds them
    u32 whole;                   // packs up to this one are single aligned accesses everywhere
    u32 verdict;                 // Verdict
};
enum Verdict : u32 { VERDICT_GO = 0, VERDICT_HOLD = 1, VERDICT_FAILED = 2 };

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
    u64 control;   // address of the rank's Control
    u32 world_size, rank, epoch, sequence;
    u32 threads;   // data threads of the block
    bool service;  // this thread belongs to the service threads...
    u32 lane;      // ...and is number `lane` of them
    u32 first, stride;  // this data thread's first pack and the step to its next
    u64 signal;    // own window's signal area
    u64 source;    // own input: address
    u64 dest;      // own output: address
    u32 expected;  // signature of this call
    u32 turn, dirty_input_packs, dirty_result_packs;  // of the BlockState this call leaves
    u32 turn_before, dirty_input_packs_before, dirty_result_packs_before;  // of the one it found
    u32 polls;
    u64 wait_start_ns;
    bool failed;
    // On their way from the control block: its first words, the block's state, `failed`, a service thread's peer.
    Pack head, state;
    u32 failed_word;
    u64 peer_window, peer_arena;
#if AR_CUDA && defined(AR_TRACE)
    long long stamps[8];
#endif

    AR_DEV u32 parity() const { return sequence & 1u; }
    AR_DEV u64 control_u64(u64 offset) const { return ld_weak_u64(control + offset); }
    AR_DEV u64 window(u32 r) const { return control_u64(AR_OFFSETOF(Control, window) + 8 * r); }
    AR_DEV u64 arena(u32 r) const { return control_u64(AR_OFFSETOF(Control, arena) + 8 * r); }
    // A service thread's: on a GPU there is one for each rank.
#if AR_CUDA
    AR_DEV u64 service_window(u32) const { return peer_window; }
    AR_DEV u64 service_arena(u32) const { return peer_arena; }
#else
    u64 service_window(u32 r) const { return window(r); }
    u64 service_arena(u32 r) const { return arena(r); }
#endif
};
static_assert(AR_OFFSETOF(Control, abi_version) == 0 && AR_OFFSETOF(Control, world_size) == 4 && AR_OFFSETOF(Control, rank) == 8 &&
                  AR_OFFSETOF(Control, epoch) == 12 && AR_OFFSETOF(BlockState, sequence) == 0 && AR_OFFSETOF(BlockState, turn) == 4,
              "head and state are read as packs");

// Offset and size of a region of the windows.
struct Region {
    u64 offset, bytes;
};
AR_DEV Region ld_region(const Block& b, u64 which) {
    const Pack p = ld_weak_pack(b.control + which);
    return {p.w[0] | (u64)p.w[1] << 32, p.w[2] | (u64)p.w[3] << 32};
}

AR_DEV void enter(Block& b, Shared* sh, const Call* call) {
    b.sh = sh;
    b.call = call;
    b.control = call->control;
    b.threads = block_dim() - SERVICE_THREADS;
    const u32 t = thread_x();
    b.service = t >= b.threads;
    b.lane = t - b.threads;
    b.first = block_x() * b.threads + t;
    b.stride = grid_x() * b.threads;
    b.polls = 0;
    b.wait_start_ns = 0;
    b.failed = false;
    wait_for_previous_kernel();
    AR_STAMP(b, 0);
}

// Starts loading the control block: every thread for itself, from lines that the first one brings into the
// multiprocessor's cache. The caller may load more before enter_wait(), so that all latencies overlap.
template <bool DIRECT>
AR_DEV void enter_load(Block& b) {
    b.head = ld_weak_pack(b.control);
    b.state = ld_weak_pack(b.control + AR_OFFSETOF(Control, blocks) + block_x() * sizeof(BlockState));
    b.failed_word = ld_failed_u32(b.control + AR_OFFSETOF(Control, failed));
    b.peer_window = b.window(b.lane & (MAX_WORLD_SIZE - 1));  // and all others' are in that line
    b.peer_arena = DIRECT ? b.arena(b.lane & (MAX_WORLD_SIZE - 1)) : 0;
}

// Every rank's window, for the data threads of a pull; two in one access.
template <int W>
AR_DEV void ld_windows(const Block& b, u64 (&windows)[W]) {
#pragma unroll
    for (int r = 0; r < W; r += 2) {
        const Pack p = ld_weak_pack(b.control + AR_OFFSETOF(Control, window) + 8 * r);
        windows[r] = p.w[0] | (u64)p.w[1] << 32;
        windows[r + 1] = p.w[2] | (u64)p.w[3] << 32;
    }
}

// The source address where it does not depend on the control block, else 0.
AR_DEV bool source_is_address(const Call& call) { return (call.flags & CALL_SRC_IN_ARENA) == 0; }

// EXACT: the instance serves world_size W only, a constant from here on; else any up to W.
template <class T, int W, bool EXACT>
AR_DEV void enter_wait(Block& b, u32 algorithm) {
    b.world_size = EXACT ? (u32)W : b.head.w[1];
    b.rank = b.head.w[2];
    b.epoch = b.head.w[3];
    b.sequence = b.state.w[0] + 1;
    b.turn = b.turn_before = b.state.w[1];
    b.dirty_input_packs = b.dirty_input_packs_before = b.state.w[2];
    b.dirty_result_packs = b.dirty_result_packs_before = b.state.w[3];
    b.expected = (b.call->signature ^ b.epoch * 0x85ebca6bu) + (algorithm << 8 | T::DTYPE) * 0x9e3779b1u;
    b.failed = b.failed_word != 0;
    const u32 me = b.rank & (MAX_WORLD_SIZE - 1);
    b.signal = b.window(me);
}
// Addresses of the own tensors, for those who need them: the arena costs one more load.
AR_DEV void find_tensors(Block& b) {
    b.source = b.call->src;
    b.dest = b.call->dst;
    if (AR_UNLIKELY((b.call->flags & (CALL_SRC_IN_ARENA | CALL_DST_IN_ARENA)) != 0)) {
        const u64 arena = b.arena(b.rank & (MAX_WORLD_SIZE - 1));
        if (b.call->flags & CALL_SRC_IN_ARENA) b.source += arena;
        if (b.call->flags & CALL_DST_IN_ARENA) b.dest += arena;
    }
}

// Ends the epoch on every rank: own and peers' abort words, own status word. Any number of threads and
// ranks may do so at once; each word names a rank at fault, the last writer's stays.
// SYNC: abort (relaxed both ways: the word carries all it says)
AR_DEV_COLD void spread_abort(u64 control, u64 word) {
    const u32 world_size = ld_weak_u32(control + AR_OFFSETOF(Control, world_size));
#pragma unroll 1
    for (u32 r = 0; r < world_size && r < MAX_WORLD_SIZE; r++)
        st_relaxed_u64(ld_weak_u64(control + AR_OFFSETOF(Control, window) + 8 * r) + AR_OFFSETOF(Signal, abort), word);
    st_relaxed_u64(ld_weak_u64(control + AR_OFFSETOF(Control, status)), word);
}
AR_DEV_COLD void raise_on_all(u64 control, u32 sequence, u32 reason, u32 blamed) {
    spread_abort(control, abort_word(reason, blamed, ld_weak_u32(control + AR_OFFSETOF(Control, epoch)), sequence));
}
AR_DEV void raise(Block& b, u32 reason, u32 blamed) {
    raise_on_all(b.control, b.sequence, reason, blamed);
    b.failed = true;
}

// Passes an abort on before acting on it: whoever then reads what this rank's caller does to its
// buffers after the failed call finds its own abort word set.
// SYNC: abort
AR_DEV bool aborted(u64 control, u64 signal) {
    const u64 word = ld_relaxed_u64(signal + AR_OFFSETOF(Signal, abort));
    if (AR_LIKELY(word == 0)) return false;
    spread_abort(control, word);
    return true;
}

// The look behind give_up: at the abort word, then at the clock. Returns when the wait began, or
// WAIT_OVER. By value, so that the caller's state stays in registers.
constexpr u64 WAIT_OVER = ~0ull;
AR_DEV_COLD u64 look(u64 control, u64 signal, u32 sequence, u64 wait_start_ns, u32 waiting_for) {
    if (aborted(control, signal)) return WAIT_OVER;
    const u64 now = now_ns();
    if (wait_start_ns == 0) return now;
    if (now - wait_start_ns <= ld_weak_u64(control + AR_OFFSETOF(Control, timeout_ns))) return wait_start_ns;
#if defined(AR_MUTATE_NO_DEADLINE)
    (void)sequence, (void)waiting_for;
    return wait_start_ns;
#else
    raise_on_all(control, sequence, REASON_TIMEOUT, waiting_for);
    return WAIT_OVER;
#endif
}

// One more poll found nothing. True: stop waiting, the call has failed.
AR_DEV bool give_up(Block& b, u32 waiting_for) {
    pause();
    if (AR_LIKELY((b.polls++ & (LOOK_EVERY - 1)) != FIRST_LOOK)) return false;
    const u64 start = look(b.control, b.signal, b.sequence, b.wait_start_ns, waiting_for);
    if (start == WAIT_OVER) return b.failed = true;
    b.wait_start_ns = start;
    return false;
}

// Host-side mistakes end in an error on every rank, not in a wild access: before a block touches any
// window. (Block size and registers are bounded by the launch itself, grid.x <= MAX_BLOCKS by the host.)
template <int W, bool EXACT>
AR_DEV void check_call(Block& b, u32 packs, u64 capacity_bytes) {
    const u32 abi = b.head.w[0], world_size = b.head.w[1];
    const bool fits = EXACT ? world_size == (u32)W : world_size - 1u < (u32)W;
    if (AR_LIKELY(abi == ABI_VERSION && fits && (u64)packs * PACK_BYTES <= capacity_bytes && b.call->num_packs <= MAX_PACKS)) return;
    b.failed = true;
    if (abi == ABI_VERSION && b.service && b.lane == 0) raise_on_all(b.control, b.sequence, REASON_BAD_CALL, b.rank);
}

// The state after this call, of every block that this call does not have: block 0's service threads, when
// they have nothing else to do. The blocks of this call store their own when they have finished (leave). The next kernel sees
// it: kernel boundary.
AR_DEV BlockState next_state(const Block& b) { return {b.sequence, b.turn, b.dirty_input_packs, b.dirty_result_packs}; }
AR_DEV void store_state(u64 control, u32 block, const BlockState& s) {
    st_finished_pack(control + AR_OFFSETOF(Control, blocks) + block * sizeof(BlockState),
                     Pack{{s.sequence, s.turn, s.dirty_input_packs, s.dirty_result_packs}});
}
AR_DEV void advance_absent_blocks(Block& b) {
    if (block_x() != 0) return;
#pragma unroll 1
    for (u32 block = grid_x() + b.lane; block < MAX_BLOCKS; block += SERVICE_THREADS) store_state(b.control, block, next_state(b));
    if (b.lane == 0) st_abandoned_u32(b.control + AR_OFFSETOF(Control, abandoned) + 4 * ((b.sequence + 1) & 1), 0);
}

// Service threads, first thing, block 0 for all: hello to every peer.
// SYNC: header
template <bool DIRECT>
AR_DEV void greet(Block& b) {
    if (block_x() != 0 || b.failed) return;
    const u64 header = AR_OFFSETOF(Signal, header) + (b.parity() * MAX_WORLD_SIZE + b.rank) * sizeof(Header);
    const u64 hello = ((u64)b.expected << 32) | b.sequence;
    const u64 offset = DIRECT ? b.call->src - (source_is_address(*b.call) ? b.arena(b.rank) : 0) : 0;
#pragma unroll 1
    for (u32 r = b.lane; r < b.world_size; r += SERVICE_THREADS) {
        const u64 to = b.service_window(r) + header;
        if (DIRECT) {
            st_after_boundary_u64x2(to, hello, (offset << 32) | b.sequence);
            st_after_boundary_u64(to + AR_OFFSETOF(Header, source_hi), (offset & 0xffffffff00000000ull) | b.sequence);
        } else {
            st_after_boundary_u64(to, hello);
        }
    }
}

// Per-block flags of the flag protocols. `which` is the offset of Signal::ready or Signal::done.
AR_DEV u64 flag_address(u64 window, u64 which, u32 block, u32 source) {
    return window + which + (block * MAX_WORLD_SIZE + source) * 4;
}
AR_DEV bool flag_is_old(u32 v, u32 sequence) { return (int)(v - sequence) < 0; }

// Service threads: each looks after one rank (the harness' few after several) and one more after the
// abort word; their first loads go out together, so the wait costs one round trip where everything
// has arrived. Waits for the rank's header; with READY also for its ready flag for this block; with
// DIRECT puts the sources' addresses in shared memory, and returns whether one of them is not that of a pack.
// SYNC: header, ready
template <bool DIRECT, bool READY>
AR_DEV bool meet(Block& b) {
    const u64 headers = b.signal + AR_OFFSETOF(Signal, header) + b.parity() * MAX_WORLD_SIZE * sizeof(Header);
    bool odd = false;
#pragma unroll 1
    for (u32 r = b.lane; r <= b.world_size; r += SERVICE_THREADS) {
        const bool is_rank = r < b.world_size;
        const u64 address = is_rank ? headers + r * sizeof(Header) : b.signal + AR_OFFSETOF(Signal, abort);
        const u64 want = is_rank ? ((u64)b.expected << 32) | b.sequence : 0;
        const u64 flag = flag_address(b.signal, AR_OFFSETOF(Signal, ready), block_x(), r & (MAX_WORLD_SIZE - 1));
        u64 word, lo = 0, hi = 0;
        while (true) {
            bool here = true;
            if (DIRECT) {
                ld_header_u64x2(address, word, lo);
                hi = ld_header_u64(address + AR_OFFSETOF(Header, source_hi));
                here = (u32)lo == b.sequence && (u32)hi == b.sequence;
            } else {
                word = ld_relaxed_u64(address);
            }
            if (READY) here = !flag_is_old(ld_acquire_u32(flag), b.sequence);
            if (AR_WAIT_SITE(b.rank, WAIT_HEADER) || (READY && AR_WAIT_SITE(b.rank, WAIT_READY))) here = false;
            if ((here && word == want) || !is_rank || b.failed) break;
            // Neither there nor of an older call: the end of this one.
            const int ahead = (int)((u32)word - b.sequence);
            if (AR_UNLIKELY(ahead >= 0 && word != want)) {
                raise(b, ahead > 0 ? REASON_SEQUENCE : REASON_MISMATCH, r);
                break;
            }
            if (give_up(b, r)) break;
        }
        if (AR_UNLIKELY(!is_rank && word != 0)) {
            spread_abort(b.control, word);
            b.failed = true;
        }
        if (DIRECT && is_rank) {
            const u64 source = b.service_arena(r) + (lo >> 32 | (hi & 0xffffffff00000000ull));
            b.sh->source[r] = source;
            odd |= (source & (PACK_BYTES - 1)) != 0;
        }
    }
    return odd;
}

// Service threads: tells every peer that this block has done with `which`, then waits for theirs, and
// looks at the abort word in the same breath. The flag publishes what the block wrote.
// SYNC: ready, done
AR_DEV void send_flags(Block& b, u64 which) {
#pragma unroll 1
    for (u32 r = b.lane; r < b.world_size && !b.failed; r += SERVICE_THREADS) {
        const u64 flag = flag_address(b.service_window(r), which, block_x(), b.rank);
        st_release_u32(flag, b.sequence);
    }
}
// Waits until every peer is done: `load` reads its flag. Not `go`: a rehearsal, which looks once, without effect.
template <class Load>
AR_DEV void await_done_flags(Block& b, u32 go, Load load) {
#pragma unroll 1
    for (u32 r = b.lane; r <= b.world_size; r += SERVICE_THREADS) {
        const bool is_rank = r < b.world_size;
        const u64 flag = flag_address(b.signal, AR_OFFSETOF(Signal, done), block_x(), r & (MAX_WORLD_SIZE - 1));
        while (true) {
            // The abort word's lane too: a peer that has failed may have returned, and its caller
            // overwritten a direct input after this block read it; it set this abort word before.
            const u64 word = ld_relaxed_u64(b.signal + AR_OFFSETOF(Signal, abort));
            const u32 v = load(flag);
            if (!go) break;
            if (!is_rank || b.failed) {
                if (AR_UNLIKELY(word != 0)) {
                    spread_abort(b.control, word);
                    b.failed = true;
                }
                break;
            }
            if (!flag_is_old(v, b.sequence) && !AR_WAIT_SITE(b.rank, WAIT_DONE)) break;
            if (give_up(b, r)) break;
        }
    }
}
AR_DEV void await_done(Block& b) {
    await_done_flags(b, 1, [](u64 flag) { return ld_acquire_u32(flag); });
}

// Makes this call an in-band pull: what it will leave in its slot for the next one to empty.
AR_DEV void begin_turn(Block& b, u32 input_packs, u32 result_packs) {
    b.turn++;
    b.dirty_input_packs = input_packs;
    b.dirty_result_packs = result_packs;
}

// Service threads, one of them: the abort word once.
AR_DEV void check_abort(Block& b) {
    if (b.lane == SERVICE_THREADS - 1 && aborted(b.control, b.signal)) b.failed = true;
}

// The service threads of a block whose call failed, after a barrier behind the block's last store to the
// output. Other blocks may have had all they needed and be writing good values still, so wait until each has
// finished or failed; then one block fills the whole output with NaN.
// SYNC: finished
template <class T>
AR_DEV_COLD void abandon_call(u64 control, u32 lane, BlockState next, u64 dest, u64 num_elems, u32 num_packs, bool rung) {
    if (block_x() == 0) {  // as advance_absent_blocks, which a call that fails early has not reached
        for (u32 block = grid_x() + lane; block < MAX_BLOCKS; block += SERVICE_THREADS) store_state(control, block, next);
        if (lane == 0) st_abandoned_u32(control + AR_OFFSETOF(Control, abandoned) + 4 * ((next.sequence + 1) & 1), 0);
    }
    if (lane == 0) store_state(control, block_x(), next);
    if (rung) return;  // CALL_RUNG: who has rung waits for every block, and fills
    bool fill = false;
    if (lane == 0) {
        const u64 start = now_ns(), timeout_ns = ld_weak_u64(control + AR_OFFSETOF(Control, timeout_ns));
        for (u32 block = 0; block < grid_x(); block++) {
            const u64 a = control + AR_OFFSETOF(Control, blocks) + block * sizeof(BlockState);
            while (ld_finished_u32(a) != next.sequence && now_ns() - start < timeout_ns) pause();
        }
#if AR_CUDA
        // st_finished_pack is relaxed on the GPU; stores issued before it by another block land well within this.
        const u64 settle = now_ns();
        while (now_ns() - settle < 100000) {
        }
#endif
        fill = abandon_add(control + AR_OFFSETOF(Control, abandoned) + 4 * (next.sequence & 1)) == 0;
        if (fill) st_failed_u32(control + AR_OFFSETOF(Control, failed), 1);
    }
    if (!service_any(fill)) return;
    const Tensor<T> out(dest, num_elems, dest % PACK_BYTES ? 0 : (u32)(num_elems / T::ELEMS));
    Pack nan;
#pragma unroll
    for (int i = 0; i < 4; i++) nan.w[i] = T::NAN_WORD;
#pragma unroll 1
    for (u32 k = lane; k < num_packs; k += SERVICE_THREADS) out.store(k, nan);
}
// All threads, right behind a barrier.
AR_DEV u64 output_address(const Block& b) {
    return b.call->dst + (b.call->flags & CALL_DST_IN_ARENA ? b.arena(b.rank & (MAX_WORLD_SIZE - 1)) : 0);
}
template <class T>
AR_DEV void abandon(Block& b) {
#if !defined(AR_MUTATE_ONE_KNOWS)
    b.failed = true;  // one thread may have been the only one to know; who has rung is told by another
#endif
    if (b.service) abandon_call<T>(b.control, b.lane, next_state(b), output_address(b), b.call->num_elems, b.call->num_packs, (b.call->flags & CALL_RUNG) != 0);
}

// End of a call, behind a barrier that follows the block's last access.
// SYNC: finished
AR_DEV void finish(Block& b) {
#if defined(AR_MUTATE_EMPTY_CALL_STAYS)
    if (b.call->num_elems == 0) return;
#endif
    if (b.service && b.lane == 0) store_state(b.control, block_x(), next_state(b));
#if AR_CUDA && defined(AR_TRACE)
    AR_STAMP(b, 6);
    if (block_x() == 0 && (thread_x() == 0 || (b.service && b.lane == 0)))
        for (int i = 0; i < 7; i++) st_relaxed_u64(b.signal + 20480 + (b.service ? 64 : 0) + 8 * i, (u64)b.stamps[i]);
#endif
}
// The end of a direct call, by the service threads: when the block has read, tells every peer so and waits until
// they have. Gone through twice: the first time before the barrier, without effect, to have the code at hand.
// The block's state is stored before the wait (but with `late`, where output remains to be written): a store behind
// it would keep the kernel from ending. If the wait fails, abandon stores the same again.
// SYNC: done, finished
AR_DEV void meet_again(Block& b, bool late) {
    for (u32 go = opaque(0);; go = opaque(1)) {
        if (go) sync_block();
#pragma unroll 1
        for (u32 r = b.lane; r <= b.world_size; r += SERVICE_THREADS) {
            const bool is_rank = r < b.world_size;
            if (is_rank && go) st_after_reads_u32(flag_address(b.service_window(r), AR_OFFSETOF(Signal, done), block_x(), b.rank), b.sequence);
        }
        if (go && !late) finish(b);
        await_done_flags(b, go, [](u64 flag) { return ld_before_end_u32(flag); });
        if (go) break;
    }
}

// The same where a thread may have failed since the last such barrier.
template <class T>
AR_DEV void leave(Block& b) {
    if (AR_UNLIKELY(sync_block_or(b.failed))) {
        abandon<T>(b);
        return;
    }
    finish(b);
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
// loaded, then again what had not arrived. What is not wanted keeps its value. See exchange_once. `rank_of(r)` is the
// rank to name when v[r] does not come.
template <bool DEPENDENT, int W, class Wanted, class Address, class RankOf>
AR_DEV void await_row_of(Block& b, Pack (&v)[W], Wanted wanted, Address address, [[maybe_unused]] u32 site, RankOf rank_of) {
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
        if (AR_UNLIKELY((b.polls++ & (LOOK_EVERY - 1)) == FIRST_LOOK)) {
            u32 from = 0;
#pragma unroll
            for (int r = W - 1; r >= 0; r--)
                if (missing[r]) from = r;
            const u64 start = look(b.control, b.signal, b.sequence, b.wait_start_ns, rank_of(from));
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
template <bool DEPENDENT, int W, class Wanted, class Address>
AR_DEV void await_row(Block& b, Pack (&v)[W], Wanted wanted, Address address, u32 site) {
    await_row_of<DEPENDENT, W>(b, v, wanted, address, site, [](u32 r) { return r; });
}

}  // namespace allreduced
