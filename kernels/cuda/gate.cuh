// The gate: lets one run of a rank's calls through at a time. A run is what one captured graph calls, or one call outside of
// graphs; the calls of a run are ordered by their stream, but two graphs on two streams are not.
//
// Launch      one warp; the rank's, in its stream, before the first call of a run. Not with programmatic serialization, so that
//             the calls before it on the stream have completed.
// Why         a call takes its number from BlockState, or from `blocks[0]` where the rank rings. Two at once would take the
//             same, write to the same slots, and leave wrong sums that look right. A check in every call would have to come
//             before its first store, so on the way that is measured in tenths of a microsecond; this is once a graph.
// Memory      Gate.until is the number at which the newest run that was let through ends; compare-and-swap, so one of several
//             gates wins, whenever they begin. That run is over when the rank's calls have got to that number and none is under
//             way: all BlockStates say so and the own header is not of the next call; where the rank rings, every block's done word.
// Refusal     who finds a run under way ends the epoch on every rank with OVERLAP, which names this rank, before any call of its
//             own run has sent anything: ranks that wait in order would otherwise sum what belongs to different calls. It then
//             waits until the run is over (its calls give up), so that failing calls overlap neither, and marks the control
//             block as failed: the calls behind it leave NaN.
// Ends        by the deadline of the control block at the latest. Then the run that was let through is given up.
// SYNC        gate, finished, header, done (ring)
#pragma once
#include "resident.cuh"

namespace allreduced {

// Many times what a failing call takes from its last block's state to its end, but for the NaN.
#if AR_CUDA
constexpr u64 GATE_SETTLE_NS = 300000;
#else
constexpr u64 GATE_SETTLE_NS = 10000000;
#endif

// Service threads, all of which call it: whether the epoch is over for the rank. From then on its window is not touched: it
// may be unmapped.
AR_DEV bool is_over(const GateLaunch& launch, u32 lane) {
    return service_any(lane == 0 && ld_relaxed_u32(launch.control + AR_OFFSETOF(Control, failed)) != 0);
}

// Service threads, all of which call it: whether calls of the rank are under way, or a run that was let through is to go on.
AR_DEV bool run_is_under_way(const GateLaunch& launch, u64 window, u32 rank, u32 sequence, u32 until, u32 lane, bool over) {
    const u64 blocks = launch.control + AR_OFFSETOF(Control, blocks);
    bool busy = (int)(until - sequence) > 0;
    if (launch.ring_blocks != 0) {
        // Once a ring has failed those behind it do not ring, and nothing is said to be done. Each then touches nothing but
        // its own tensor.
        if (!over)
#pragma unroll 1
            for (u32 block = lane; block < launch.ring_blocks; block += SERVICE_THREADS) {
                // SYNC: done (ring)
                const u32 word = ld_acquire_u32(window + RING_OFFSET + AR_OFFSETOF(Ring, done) + 4 * block);
                busy = busy || ((word ^ sequence) & ~RING_FAILED) != 0;
            }
    } else {
#pragma unroll 1
        for (u32 block = lane; block < MAX_BLOCKS; block += SERVICE_THREADS)
            busy = busy || ld_finished_u32(blocks + block * sizeof(BlockState)) != sequence;  // SYNC: finished
        // SYNC: header. A call outside of any run.
        const u64 header = window + AR_OFFSETOF(Signal, header) + (((sequence + 1) & 1) * MAX_WORLD_SIZE + rank) * sizeof(Header);
        if (!over) busy = busy || (u32)ld_relaxed_u64(header) == sequence + 1;
    }
    return service_any(busy);
}

// One thread: ends the epoch, unless it is over.
// SYNC: abort
AR_DEV_COLD void refuse_run(const GateLaunch& launch, u64 window, u32 rank, u32 sequence) {
    if (ld_relaxed_u64(window + AR_OFFSETOF(Signal, abort)) != 0) return;
    const u64 why = abort_word(REASON_OVERLAP, rank, ld_weak_u32(launch.control + AR_OFFSETOF(Control, epoch)), sequence + 1);
    if (launch.ring_blocks == 0) {
        spread_abort(launch.control, why);
        return;
    }
    // The only window that this process has; its blocks, and the executor, pass it on.
    st_relaxed_u64(window + AR_OFFSETOF(Signal, abort), why);
    st_relaxed_u64(ld_weak_u64(launch.control + AR_OFFSETOF(Control, status)), why);
}

AR_DEV void gate(const GateLaunch& launch) {
    wait_for_previous_kernel();
    const u32 lane = thread_x();
    const u32 rank = ld_weak_u32(launch.control + AR_OFFSETOF(Control, rank)) & (MAX_WORLD_SIZE - 1);
    const u64 window = ld_weak_u64(launch.control + AR_OFFSETOF(Control, window) + 8 * rank);
    u32 calls = launch.num_calls;
    if (launch.calls != 0) calls = ld_relaxed_u32(launch.calls);
    if (calls == 0) calls = 1;
    bool contended = false, over = false;
    u64 start = 0;
    while (true) {
        // One lane's, for all: they may change in between. In this order: who has seen a run end sees the calls it made.
        const u32 until = service_max(lane == 0 ? ld_acquire_u32(launch.gate) : 0);
        const u32 sequence = service_max(lane == 0 ? ld_finished_u32(launch.control + AR_OFFSETOF(Control, blocks)) : 0);
        bool mine = false;
#if defined(AR_MUTATE_NO_GATE)
        break;
#endif
        over = is_over(launch, lane);
        if (!run_is_under_way(launch, window, rank, sequence, until, lane, over)) {
            // SYNC: gate
            if (lane == 0) mine = gate_cas_u32(launch.gate, until, sequence + calls) == until;
            if (service_any(mine)) break;
        }
        if (!contended) {
            contended = true;
            start = now_ns();
            if (lane == 0 && !over) refuse_run(launch, window, rank, sequence);
#if defined(AR_MUTATE_NO_WAIT)
            break;
#endif
        } else if (service_any(now_ns() - start > ld_weak_u64(launch.control + AR_OFFSETOF(Control, timeout_ns)))) {
            if (lane == 0) st_release_u32(launch.gate, sequence + calls);
            break;
        }
        pause();
    }
    // A call that fails says that it has finished before it writes NaN (abandon_call): it is left alone with its words.
    if (!over) over = service_any(lane == 0 && ld_relaxed_u64(window + AR_OFFSETOF(Signal, abort)) != 0);
    if (AR_UNLIKELY(contended || over)) {
        const u64 settle = now_ns();
        while (now_ns() - settle < GATE_SETTLE_NS) pause();
    }
    if (AR_UNLIKELY(contended) && lane == 0) st_failed_u32(launch.control + AR_OFFSETOF(Control, failed), 1);
}

}  // namespace allreduced
