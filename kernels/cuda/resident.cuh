// The resident kernel: stays, and reduces whenever a rank rings. And the kernel that rings.
//
// Shapes      as one_shot.cuh; at most the in-band part's bytes.
// Launch      resident: grid (blocks of a rank <= MAX_RING_BLOCKS, ranks on this GPU), block (data threads +
//             SERVICE_THREADS), no dynamic shared memory; the executor's. ring: one warp; the rank's, in its stream.
// Algorithm   one_shot_pull_inband, call after call.
// Memory      between two calls of a rank there is no kernel boundary. What stands in its place: a block's stores, then
//             its done word (release); the ringing warp has seen every block's (acquire) before its kernel ends, so
//             before the next one rings; blocks see the bell (acquire) before they read. So a rank begins a call only
//             when all its blocks have completed the one before, which is the invariant of kernels/README.md.
//             Headers need no release: what they stand for was performed system-wide before the done words were written.
// Parking     a block without commands for idle_ns, or told to stop, unless a peer has begun the call to come, says so
//             (parked), looks at the bell once more, and ends (exited). So while a call waits for a rank, no block that it
//             needs ends, and two launches at a time are enough. Who rings looks at `parked` after ringing, and has the executor launch again. A block of the
//             next launch begins when the one in its place has ended: each command is taken once.
// Abort       as everywhere: NaN, abort and status words; the done word says so too.
// SYNC        bell, parked, exited, done (ring)
#pragma once
#include "one_shot.cuh"

namespace allreduced {

// What the service threads tell the data threads of a resident block.
struct alignas(16) Bell {
    Call call;
    u64 capacity_bytes;
    RingBuffer buffers[MAX_RING_BUFFERS];  // of the ResidentState, as the launch found it
    u32 words[COMMAND_WORDS];
    u32 dtype;
    u32 what;  // BellSays
};
enum BellSays : u32 { BELL_REDUCE = 0, BELL_REFUSE = 1, BELL_END = 2 };

// Polls of an idle block between two looks at the clock and the stop word.
#if AR_CUDA
constexpr u32 IDLE_LOOK_EVERY = 64;
#else
constexpr u32 IDLE_LOOK_EVERY = 4;
#endif

// One rank's memory range of a command; 0 if it is not wholly inside.
AR_DEV u64 ring_address(const Bell& bell, u32 memory, u64 offset, u64 len_bytes, u32 elem_bytes) {
    const RingBuffer& buffer = bell.buffers[memory & (MAX_RING_BUFFERS - 1)];
    const bool inside = memory < MAX_RING_BUFFERS && offset <= buffer.len_bytes && len_bytes <= buffer.len_bytes - offset &&
                        (offset & (elem_bytes - 1)) == 0;
    return inside && buffer.start != 0 ? buffer.start + offset : 0;
}

// A service thread: what the executor says of a memory now, if it has been told of it since the launch.
AR_DEV_COLD void look_up(Bell& bell, u64 state, u32 memory) {
    const u64 entry = state + AR_OFFSETOF(ResidentState, buffers) + (memory & (MAX_RING_BUFFERS - 1)) * sizeof(RingBuffer);
    bell.buffers[memory & (MAX_RING_BUFFERS - 1)] = {ld_acquire_u64(entry), ld_acquire_u64(entry + AR_OFFSETOF(RingBuffer, len_bytes))};
}

// A service thread: the call that a command asks for; none if it is a bad one. No loads but from shared memory: this is
// between the bell and everything else.
AR_DEV u32 decode(Bell& bell, u64 control, u64 state, u32 blocks, u32 threads) {
    const u32 memories[2] = {bell.words[0] >> 16 & 0xff, bell.words[0] >> 24};
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (AR_UNLIKELY(bell.buffers[memories[i] & (MAX_RING_BUFFERS - 1)].start == 0)) look_up(bell, state, memories[i]);
    const u32 dtype = bell.words[0] & 0xff, op = bell.words[0] >> 8 & 0xff;
    const u32 elem_bytes = dtype == DTYPE_F32 ? 4 : 2;
    const u64 num_elems = bell.words[1], len_bytes = num_elems * elem_bytes;
    const u64 src = ring_address(bell, memories[0], bell.words[2] | (u64)bell.words[3] << 32, len_bytes, elem_bytes);
    const u64 dst = ring_address(bell, memories[1], bell.words[4] | (u64)bell.words[5] << 32, len_bytes, elem_bytes);
    const bool apart = src == dst || src + len_bytes <= dst || dst + len_bytes <= src;
    const bool good = dtype <= DTYPE_BF16 && op <= OP_MAX && src != 0 && dst != 0 && apart && len_bytes <= bell.capacity_bytes;
    if (AR_UNLIKELY(!good)) return BELL_REFUSE;
    bell.dtype = dtype;
    bell.call = make_call(control, src, dst, num_elems, elem_bytes, op, CALL_RUNG, blocks, threads);
    return BELL_REDUCE;
}
// A service thread: ends the epoch on every rank instead of the call, which it counts.
AR_DEV_COLD void refuse_command(u64 control, u32 sequence) {
    raise_on_all(control, sequence, REASON_BAD_CALL, ld_weak_u32(control + AR_OFFSETOF(Control, rank)));
    const Pack state = ld_weak_pack(control + AR_OFFSETOF(Control, blocks) + block_x() * sizeof(BlockState));
    store_state(control, block_x(), {sequence, state.w[1], state.w[2], state.w[3]});
}

// Service threads: whether a peer has begun this call; then the rank will be rung, and its blocks must be there.
AR_DEV bool peers_wait(u64 control, u64 window, u32 sequence, u32 lane) {
    const u32 world_size = ld_weak_u32(control + AR_OFFSETOF(Control, world_size));
    const u64 headers = window + AR_OFFSETOF(Signal, header) + (sequence & 1u) * MAX_WORLD_SIZE * sizeof(Header);
    bool waits = false;
#pragma unroll 1
    for (u32 r = lane; r < world_size && r < MAX_WORLD_SIZE; r += SERVICE_THREADS)
        waits = waits || (u32)ld_relaxed_u64(headers + r * sizeof(Header)) == sequence;
    return service_any(waits);
}

// Service threads: waits for the command of call `sequence`. False: none came, and the block ends.
AR_DEV bool await_bell(Bell* bell, const ResidentLaunch& launch, u64 control, u64 window, u64 state, u32 sequence, u32 lane) {
    const u64 ring = window + RING_OFFSET;
    const u64 parked = ring + AR_OFFSETOF(Ring, parked) + 4 * block_x();
    u64 idle_since = 0, peer_since = 0;
    u32 polls = 0;
    bool ends = false;
    while (true) {
        bool here = true;
#pragma unroll 1
        for (u32 i = lane; i < COMMAND_WORDS; i += SERVICE_THREADS) {
            const u64 word = ld_bell_u64(ring + 8 * i);  // SYNC: bell
            bell->words[i] = (u32)word;
            here = here && (u32)(word >> 32) == sequence;
        }
        if (service_all(here)) {
            if (ends && lane == 0) st_parked_u32(parked, 0);
            return true;
        }
        if (ends) return false;
        pause();
        if (AR_LIKELY((polls++ & (IDLE_LOOK_EVERY - 1)) != IDLE_LOOK_EVERY - 1)) continue;
        const u32 stop = ld_relaxed_u32(state + AR_OFFSETOF(ResidentState, stop));
        const u64 now = now_ns();
        // SYNC: abort. The rank can write its window; the executor's word, and the deadline, end this all the same.
        const bool over = service_any(stop == STOP_ALL || ld_relaxed_u64(window + AR_OFFSETOF(Signal, abort)) != 0);
        if (!over && peers_wait(control, window, sequence, lane)) {
            if (peer_since == 0) peer_since = now;
            if (!service_any(now - peer_since > ld_weak_u64(control + AR_OFFSETOF(Control, timeout_ns)))) {
                idle_since = 0;
                continue;
            }
        }
        bool done = false;
        if (lane == 0) {
            if (idle_since == 0) idle_since = now;
            done = now - idle_since > launch.idle_ns || stop >= launch.launch;
        }
        if (!service_any(done)) continue;
#if defined(AR_MUTATE_NO_LAST_LOOK)
        sim::nap();
#endif
        // SYNC: parked. Said before the last look: who rings meanwhile sees it, or is seen.
        if (lane == 0) st_parked_u32(parked, launch.launch + 1);
        bell_fence();
        service_sync();
#if defined(AR_MUTATE_NO_LAST_LOOK)
        return false;
#endif
        ends = true;
    }
}

template <class T, int W, bool EXACT>
AR_DEV bool run_rung(Shared* sh, const Call& call) {
    Block b;
    enter(b, sh, &call);
    if (AR_LIKELY(call.num_packs <= b.stride))
        one_shot_pull_inband_as<T, W, EXACT, true>(b);
    else
        one_shot_pull_inband_as<T, W, EXACT, false>(b);
    return b.failed;
}

template <int W, bool EXACT>
AR_DEV void resident(Shared* sh, Bell* bell, const ResidentLaunch& launch) {
    const ResidentRank me = launch.ranks[block_y()];
    const u32 threads = block_dim() - SERVICE_THREADS, t = thread_x();
    const bool service = t >= threads;
    const u32 lane = t - threads;
    const u32 rank = ld_weak_u32(me.control + AR_OFFSETOF(Control, rank)) & (MAX_WORLD_SIZE - 1);
    const u64 window = ld_weak_u64(me.control + AR_OFFSETOF(Control, window) + 8 * rank), ring = window + RING_OFFSET;
    const u64 exited = me.state + AR_OFFSETOF(ResidentState, exited) + 4 * block_x();
    if (service && lane == 0) {
        // SYNC: exited. The block of the launch before has taken its last command.
#if !defined(AR_MUTATE_NO_TAKEOVER)
        while (ld_acquire_u32(exited) != launch.launch - 1) pause();
#endif
        st_parked_u32(ring + AR_OFFSETOF(Ring, parked) + 4 * block_x(), 0);
        bell->capacity_bytes = ld_weak_u64(me.control + AR_OFFSETOF(Control, inband_part_bytes));
    }
    if (service)
#pragma unroll 1
        for (u32 i = lane; i < MAX_RING_BUFFERS; i += SERVICE_THREADS) {
            const u64 entry = me.state + AR_OFFSETOF(ResidentState, buffers) + i * sizeof(RingBuffer);
            bell->buffers[i] = {ld_weak_u64(entry), ld_weak_u64(entry + AR_OFFSETOF(RingBuffer, len_bytes))};
        }
    sync_block();
    u32 sequence = ld_weak_u32(me.control + AR_OFFSETOF(Control, blocks) + block_x() * sizeof(BlockState));
    sync_block();
    while (true) {
        sequence++;
        if (service) {
            const bool rung = await_bell(bell, launch, me.control, window, me.state, sequence, lane);
            service_sync();
            if (lane == 0) {
                bell->what = rung ? decode(*bell, me.control, me.state, grid_x(), threads) : (u32)BELL_END;
                if (AR_UNLIKELY(bell->what == BELL_REFUSE)) refuse_command(me.control, sequence);
            }
        }
        sync_block();
        const u32 what = bell->what;
        if (AR_UNLIKELY(what == BELL_END)) break;
        bool failed = true;
        if (AR_UNLIKELY(what == BELL_REFUSE)) {
        } else if (bell->dtype == DTYPE_BF16)
            failed = run_rung<BF16, W, EXACT>(sh, bell->call);
        else if (bell->dtype == DTYPE_F16)
            failed = run_rung<F16, W, EXACT>(sh, bell->call);
        else
            failed = run_rung<F32, W, EXACT>(sh, bell->call);
#if !defined(AR_MUTATE_DONE_EARLY)
        sync_block();
#endif
        // SYNC: done (ring). Release: the block's output, and what it emptied, are visible to who has seen it.
        if (service && lane == 0)
            st_release_u32(ring + AR_OFFSETOF(Ring, done) + 4 * block_x(), (sequence & ~RING_FAILED) | (failed ? RING_FAILED : 0));
    }
    // SYNC: exited
    if (service && lane == 0) st_release_u32(exited, launch.launch);
}

// The rank's side: one warp, which rings, waits, and says whether the reduction failed.
template <class T>
AR_DEV void fill_nan(u64 dst, u64 num_elems, u32 lane) {
    const u32 packs = (u32)((num_elems + T::ELEMS - 1) / T::ELEMS);
    const Tensor<T> out(dst, num_elems, dst % PACK_BYTES ? 0 : (u32)(num_elems / T::ELEMS));
    Pack nan;
#pragma unroll
    for (int i = 0; i < 4; i++) nan.w[i] = T::NAN_WORD;
#pragma unroll 1
    for (u32 k = lane; k < packs; k += SERVICE_THREADS) out.store(k, nan);
}
AR_DEV_COLD void fail_ring(const RingLaunch& launch, u32 lane) {
    service_sync();  // what the blocks that other lanes looked after have stored comes before any lane's NaN
    const u32 dtype = launch.command[0] & 0xff;
    const u64 num_elems = launch.command[1];
    if (lane == 0) st_failed_u32(launch.control + AR_OFFSETOF(Control, failed), 1);
    if (dtype == DTYPE_F32)
        fill_nan<F32>(launch.dst, num_elems, lane);
    else if (dtype == DTYPE_F16)
        fill_nan<F16>(launch.dst, num_elems, lane);
    else
        fill_nan<BF16>(launch.dst, num_elems, lane);
}

// Polls for the answer of a kernel that is there, before the ring looks whether it has parked.
constexpr u32 WAKE_POLLS = 16;
// Beyond the deadline that the resident kernel keeps: the executor does not answer.
constexpr u64 RING_GRACE_NS = 2000000000;
// Beyond the end of the epoch: what the blocks of the executor's kernel take to give up, many times over.
constexpr u64 RING_ABORT_NS = 100000000;

AR_DEV void ring(const RingLaunch& launch) {
    wait_for_previous_kernel();
    const u32 lane = thread_x();
    const u64 control = launch.control, own = control + AR_OFFSETOF(Control, blocks);
    const u32 failed = ld_failed_u32(control + AR_OFFSETOF(Control, failed));
    const u32 rank = ld_weak_u32(control + AR_OFFSETOF(Control, rank)) & (MAX_WORLD_SIZE - 1);
    const u32 sequence = ld_weak_u32(own) + 1;
    const u64 window = ld_weak_u64(control + AR_OFFSETOF(Control, window) + 8 * rank);
    const u64 ring = window + RING_OFFSET;
#if !defined(AR_MUTATE_NO_WARP_BARRIER)
    service_sync();  // lanes need not go in step: all have read what lane 0 writes from here on
#endif
    if (lane == 0) st_rung_u32(own, sequence);
    if (AR_UNLIKELY(failed)) {
        fail_ring(launch, lane);
        return;
    }
    // What the stream wrote to the source is visible: kernel boundary.
    // SYNC: bell
#pragma unroll 1
    for (u32 i = lane; i < COMMAND_WORDS; i += SERVICE_THREADS) st_bell_u64(ring + 8 * i, (u64)sequence << 32 | launch.command[i]);
    u32 polls = 0;
    u64 start = 0, over_since = 0;
    bool bad = false;
    while (true) {
        // SYNC: done (ring)
        bool done = true;
#pragma unroll 1
        for (u32 block = lane; block < launch.blocks; block += SERVICE_THREADS) {
            const u32 word = ld_acquire_u32(ring + AR_OFFSETOF(Ring, done) + 4 * block);
            done = done && (word & ~RING_FAILED) == (sequence & ~RING_FAILED);
            bad = bad || (done && (word & RING_FAILED) != 0);
        }
        // All lanes go on together: they look at `parked` together.
        if (service_all(done)) break;
        pause();
        polls++;
        if (AR_UNLIKELY(polls == WAKE_POLLS)) {
            service_sync();  // every lane's part of the bell, before each lane's fence
            // SYNC: parked. Looked at after ringing: a block that was about to end has seen the bell, or is seen here.
            bell_fence();
            u32 parked = 0;
#pragma unroll 1
            for (u32 block = lane; block < launch.blocks; block += SERVICE_THREADS) {
                const u32 word = ld_parked_u32(ring + AR_OFFSETOF(Ring, parked) + 4 * block);
                parked = word > parked ? word : parked;
            }
            parked = service_max(parked);
            if (parked != 0 && lane == 0) st_wake_u32(ld_weak_u64(control + AR_OFFSETOF(Control, wake)), parked);
        }
        if (AR_LIKELY((polls & (LOOK_EVERY - 1)) != FIRST_LOOK)) continue;
        const u64 now = now_ns();
        if (start == 0) start = now;
        // SYNC: abort. Blocks that are at the call give up and say so, soon; until then the tensors are theirs. If they do
        // not, none is there any more.
        const u64 over = ld_relaxed_u64(window + AR_OFFSETOF(Signal, abort));
        if (over != 0 && over_since == 0) over_since = now;
        if (service_any(over != 0 && now - over_since > RING_ABORT_NS)) {
            st_relaxed_u64(ld_weak_u64(control + AR_OFFSETOF(Control, status)), over);
            bad = true;
            break;
        }
        if (service_any(now - start > ld_weak_u64(control + AR_OFFSETOF(Control, timeout_ns)) + RING_GRACE_NS)) {
            // SYNC: abort
            const u64 why = abort_word(REASON_TIMEOUT, rank, ld_weak_u32(control + AR_OFFSETOF(Control, epoch)), sequence);
            st_relaxed_u64(window + AR_OFFSETOF(Signal, abort), why);
            st_relaxed_u64(ld_weak_u64(control + AR_OFFSETOF(Control, status)), why);
            bad = true;
            break;
        }
    }
    if (AR_UNLIKELY(service_any(bad))) fail_ring(launch, lane);
}

}  // namespace allreduced
