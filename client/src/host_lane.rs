//! The lanes of backend host that share memory. Delegated: the rank reduces there itself, on the calling thread.
//! Resident: it has a thread of the executor reduce, and waits for the reply there.
//!
//! Owns the mappings of what ranks share, the order of this rank's calls, and delegated's two algorithms. The communicator calls
//! it with tensors that it was given by value. Refuses to choose (the executor's plan has, see [`Geometry`]) and to
//! trust: whatever a peer writes is checked before it becomes an address.
//!
//! Every delegated call begins with the exchange of signatures: each rank publishes its entry and waits for all others'. If they
//! differ, or the plan refuses, every rank sees the same entries and comes to the same error; the epoch goes on.
//!
//! **One shot.** Each rank has copied its tensor to its staging before it publishes; then it reduces what is in all
//! stagings to its destination. Nothing else is waited for: a half of the staging is used again two uses later
//! ([`protocol`](allreduce_contract::lane::protocol), "Parity").
//!
//! **Two shot, short** (all tensors in arenas and fit a half of the staging, where the plan finds waits dear). Each rank reduces its slice of the ranks'
//! sources to its destination and to its staging, publishes its progress, and copies the other slices from its
//! peers' stagings. Who has published reads nobody's source any more, and stagings are used in turns: when a rank has all
//! slices it is through, and waits for nobody.
//!
//! **Two shot, direct** (all tensors in arenas). Block by block, each rank reduces its slice of the ranks' sources to its
//! own destination and publishes its progress; one block later it copies the other slices from its peers'
//! destinations. In place is safe: of a source, slice s is read by rank s alone, and overwritten when that has
//! published. At the end all wait until all have copied, since then the tensors go back to their callers.
//!
//! **Two shot, staged** (some tensor is elsewhere). The same through the stagings, one half of them after the other: copy in,
//! publish, reduce the own slice in the own staging, publish, copy out.
#![allow(unsafe_code)] // room: shared memory

use crate::attach::{Errand, Membership, Over};
use crate::communicator::{ANSWER_GRACE, Outcome, Reduction, cut_off, over};
use crate::error::{AllReduceError, EpochEnd, Failed, Refused};
use crate::sequence::{Sequences, Ticket};
use allreduce_contract::lane::counts::Seen;
use allreduce_contract::lane::protocol::{EXECUTOR_BELL, Found, Reply, Stopped};
use allreduce_contract::lane::{
    Abort, AbortCause, Board, Call, Geometry, Identity, LAST_STEP, Lane, NOT_IN_ARENA, PeerLane,
    Signature, SpinThenSleep, monotonic_ns, progress_of, rank_bit, resident_algorithm,
};
use allreduce_contract::memory::{ReadOnlyMapping, SealedMemory};
use allreduce_contract::v1::{ErrorCode, ErrorDetail, GaveUp};
use allreduce_contract::{Algorithm, Dtype, MAX_WORLD_SIZE};
use allreduce_kernels::{ReduceError, Reducer, chunk};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

const MOST_RANKS: usize = MAX_WORLD_SIZE as usize;

/// How long the executor may take to say why an epoch is over, once the shared memory says that it is.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// A tensor of this rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) start: NonNull<u8>,
    /// Where it is in the arena, if it is there.
    pub(crate) in_arena: Option<u64>,
    pub(crate) buffer_id: u64,
    /// Where it is in the buffer.
    pub(crate) in_buffer: u64,
}

// SAFETY: it is an address and an offset; whoever uses the address shows why that is valid.
unsafe impl Send for Tensor {}

/// One reduction, with tensors that nobody of this process touches until it is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) signature: Signature,
    pub(crate) src: Tensor,
    pub(crate) dst: Tensor,
    pub(crate) timeout: Duration,
}

impl Request {
    fn len_bytes(&self) -> usize {
        // The buffers have as many bytes.
        usize::try_from(self.signature.num_elems).unwrap_or(0) * self.signature.dtype.size_bytes()
    }
}

/// Why a call did not reduce.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Every rank gets the same, and the epoch goes on.
    Refused(Refused),
    /// The epoch is over.
    Over {
        abort: Abort,
        /// This very rank found it.
        is_own: bool,
        /// It was over before the call.
        is_late: bool,
    },
    /// The executor works on the tensors, and does not say that it is done: they cannot be given back.
    Stuck,
}

impl Stop {
    fn own(abort: Abort) -> Self {
        Stop::Over {
            abort,
            is_own: true,
            is_late: false,
        }
    }
}

/// A peer's memory.
#[derive(Debug)]
pub(crate) struct Peer {
    lane: PeerLane,
    arena: ReadOnlyMapping,
}

impl Peer {
    /// Maps and checks it.
    pub(crate) fn open(
        lane: &SealedMemory,
        arena: &SealedMemory,
        identity: Identity,
        stage_len_bytes: usize,
    ) -> Result<Self, String> {
        Ok(Self {
            lane: PeerLane::open(lane, identity, stage_len_bytes)
                .map_err(|error| error.to_string())?,
            arena: arena.map_read_only().map_err(|error| error.to_string())?,
        })
    }
}

/// What ranks share, as this rank has it mapped.
#[derive(Debug)]
pub(crate) struct HostLane {
    kind: LaneKind,
    rank: u32,
    geometry: Geometry,
    stage_len_bytes: usize,
    board: Board,
    own: Lane,
    /// By rank; none in the own place.
    peers: Vec<Option<Peer>>,
    turns: Turns,
    /// Uses of the staging so far; only the thread whose turn it is touches it.
    stagings: AtomicU64,
}

/// Which call runs: those of one rank run one after the other, in the order of their sequences.
#[derive(Debug)]
struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Debug)]
struct TurnState {
    next: u64,
    waiting: usize,
    /// A call that was announced will not run, so later ones cannot.
    broken: bool,
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, TurnState> {
        // No step below panics half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn; false if it will not come.
    fn wait(&self, sequence: u64) -> bool {
        let mut state = self.state();
        while state.next != sequence && !state.broken {
            state.waiting += 1;
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        !state.broken
    }

    fn end(&self, sequence: u64) {
        let mut state = self.state();
        state.next = state.next.max(sequence + 1);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    fn break_off(&self) {
        self.state().broken = true;
        self.changed.notify_all();
    }

    /// Waits until every call up to `last` has ended; whether they have.
    fn wait_ended(&self, last: u64, timeout: Duration) -> bool {
        let mut state = self.state();
        state.waiting += 1;
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| state.next <= last && !state.broken)
            .unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state.next > last || state.broken
    }
}

/// Every rank's call of one sequence, in rank order.
struct Calls([Option<Call>; MOST_RANKS]);

impl Calls {
    fn all(&self) -> impl Iterator<Item = (u32, &Call)> {
        (0..)
            .zip(&self.0)
            .filter_map(|(rank, call)| Some((rank, call.as_ref()?)))
    }

    fn half(&self, rank: usize) -> u64 {
        let call = self.0.get(rank).and_then(Option::as_ref);
        call.map_or(0, |call| call.half)
    }

    /// The time between the first and the last call, how long after this rank's the last was, and whose that was.
    fn skew(&self, own_ns: u64) -> (Duration, Duration, u32) {
        let first = self.all().map(|(_, call)| call.arrived_ns).min();
        let last = self
            .all()
            .map(|(rank, call)| (call.arrived_ns, rank))
            .max_by_key(|(at, _)| *at);
        let (first, (last, last_rank)) = (first.unwrap_or(0), last.unwrap_or((0, 0)));
        (
            Duration::from_nanos(last.saturating_sub(first)),
            Duration::from_nanos(last.saturating_sub(own_ns)),
            last_rank,
        )
    }
}

/// One pointer for each rank, in rank order.
struct Pointers {
    at: [*const u8; MOST_RANKS],
    len: usize,
}

impl Pointers {
    fn collect(pointers: impl Iterator<Item = *const u8>) -> Self {
        let mut found = Self {
            at: [std::ptr::null(); MOST_RANKS],
            len: 0,
        };
        for (place, pointer) in found.at.iter_mut().zip(pointers) {
            *place = pointer;
            found.len += 1;
        }
        found
    }

    /// Each of them, `skip` bytes on.
    fn skip(&self, skip: usize) -> Self {
        Self::collect(self.as_slice().iter().map(|at| at.wrapping_add(skip)))
    }

    fn as_slice(&self) -> &[*const u8] {
        self.at.get(..self.len).unwrap_or_default()
    }

    fn of(&self, rank: usize) -> *const u8 {
        self.at.get(rank).copied().unwrap_or(std::ptr::null())
    }
}

/// A running call, for the steps below.
struct Running<'a> {
    lane: &'a HostLane,
    sequence: u64,
    timeout: Duration,
}

impl HostLane {
    pub(crate) fn new(
        kind: LaneKind,
        rank: u32,
        geometry: Geometry,
        stage_len_bytes: usize,
        board: Board,
        own: Lane,
        peers: Vec<Option<Peer>>,
    ) -> Self {
        Self {
            kind,
            rank,
            geometry,
            stage_len_bytes,
            board,
            own,
            peers,
            turns: Turns {
                state: Mutex::new(TurnState {
                    next: 1,
                    waiting: 0,
                    broken: false,
                }),
                changed: Condvar::new(),
            },
            stagings: AtomicU64::new(0),
        }
    }

    /// The executor is gone: whoever waits in the shared memory learns it.
    pub(crate) fn executor_lost(&self) {
        let abort = Abort::of(AbortCause::ExecutorLost, None, 0);
        self.board.words().set_abort(abort.to_word());
    }

    /// Why the epoch is over, if the shared memory says that it is.
    fn abort(&self) -> Option<Abort> {
        self.board.words().abort().map(Abort::from_word)
    }

    /// Bytes of the longest two-shot reduction that gathers through the stagings.
    fn short_max_bytes(&self) -> usize {
        let planned = usize::try_from(self.geometry.short_max_bytes).unwrap_or(usize::MAX);
        planned.min(self.stage_len_bytes)
    }

    fn me(&self) -> usize {
        self.rank as usize
    }

    /// Peers, beginning behind this rank: so that not all look at the same one.
    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let (before, after) = self.peers.split_at_checked(self.me()).unwrap_or_default();
        let behind = (self.me()..).zip(after);
        let ahead = (0..).zip(before);
        behind
            .chain(ahead)
            .filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    /// What was stored is visible; wakes peers who sleep.
    fn ring(&self) {
        self.board.words().ring(self.others().map(|(rank, _)| rank));
    }

    /// Pointers to a half of each rank's staging, `uses` after the one that the calls began with.
    fn stages(&self, calls: &Calls, uses: u64) -> Pointers {
        Pointers::collect((0..).zip(&self.peers).map(|(rank, peer)| {
            let half = calls.half(rank).wrapping_add(uses);
            match peer {
                Some(peer) => peer.lane.stage(half),
                None => self.own.stage(half).as_ptr().cast_const(),
            }
        }))
    }

    /// Runs one reduction. It is this call's turn.
    fn reduce(&self, sequence: u64, request: &Request) -> Result<Reduction, Stop> {
        let words = self.board.words();
        if let Some(abort) = self.abort() {
            return Err(Stop::Over {
                abort,
                is_own: false,
                is_late: true,
            });
        }
        let arrived_ns = monotonic_ns();
        let running = Running {
            lane: self,
            sequence,
            timeout: request.timeout,
        };
        let reduced = match self.kind {
            LaneKind::Delegated => running.run(request, arrived_ns),
            LaneKind::Resident => return running.ask(request, arrived_ns),
        };
        match reduced {
            // The last look: a peer may have given this very call up, and its tensor back to its caller, while it was
            // read.
            Ok(_) if words.is_failed(sequence) => {
                let word = words.abort().unwrap_or_default();
                Err(Stop::Over {
                    abort: Abort::from_word(word),
                    is_own: false,
                    is_late: false,
                })
            }
            Ok(reduction) => {
                self.own.counts().add(&Seen {
                    kind: (
                        request.signature.dtype,
                        request.signature.op,
                        reduction.algorithm,
                    ),
                    bytes: request.len_bytes() as u64,
                    late: reduction.skew.saturating_sub(reduction.waited),
                    skew: reduction.skew,
                    reduce: reduction.reduce_time,
                    is_last: reduction.last_rank == self.rank,
                });
                Ok(reduction)
            }
            Err(stop) => {
                if matches!(stop, Stop::Over { .. }) {
                    // Before the tensors go back to the caller.
                    words.fail(sequence);
                }
                Err(stop)
            }
        }
    }
}

/// Who reduces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneKind {
    /// The ranks.
    Delegated,
    /// A thread of the executor.
    Resident,
}

/// A refusal that every rank comes to.
fn refused(kind: ErrorCode, message: String, rank: Option<u32>) -> Stop {
    Stop::Refused(Refused {
        code: tonic::Code::InvalidArgument,
        kind,
        message,
        detail: ErrorDetail {
            code: kind as i32,
            rank,
            ..ErrorDetail::default()
        },
    })
}

impl Running<'_> {
    /// Waits until `look` finds something; `late` says, when the deadline passes, which ranks are waited for.
    fn wait<T>(
        &self,
        look: impl FnMut() -> Option<T>,
        late: impl FnOnce() -> u16,
    ) -> Result<T, Stop> {
        // Each wait anew: others may reduce for long, but not be silent for long.
        let mut patience = SpinThenSleep::new(&self.lane.geometry, self.timeout);
        let words = self.lane.board.words();
        let waited = words.wait(self.lane.me(), &mut patience, look);
        waited.map_err(|stopped| self.stop(stopped, late))
    }

    /// Ends the epoch if a deadline has passed; says why it is over.
    fn stop(&self, stopped: Stopped, late: impl FnOnce() -> u16) -> Stop {
        match stopped {
            Stopped::Aborted(word) => Stop::Over {
                abort: Abort::from_word(word),
                is_own: false,
                is_late: false,
            },
            Stopped::Expired => match late() {
                // All ranks have called: the executor does not answer.
                0 => self.abort(AbortCause::Failed, 0),
                ranks => self.abort(AbortCause::Timeout, ranks),
            },
        }
    }

    /// Ends the epoch, unless somebody has before.
    fn abort(&self, cause: AbortCause, ranks: u16) -> Stop {
        let abort = Abort {
            cause,
            ranks,
            sequence: self.sequence,
        };
        let word = self.lane.board.words().set_abort(abort.to_word());
        match word == abort.to_word() {
            true => Stop::own(abort),
            false => Stop::Over {
                abort: Abort::from_word(word),
                is_own: false,
                is_late: false,
            },
        }
    }

    fn broken(&self, rank: usize) -> Stop {
        self.abort(AbortCause::Broken, bit(rank))
    }

    fn publish(&self, step: u64) {
        let progress = progress_of(self.sequence, step);
        self.lane.own.words().set_progress(progress);
        self.lane.ring();
    }

    /// Waits until a peer has got to `step`.
    fn wait_step(&self, rank: usize, peer: &Peer, step: u64) -> Result<(), Stop> {
        let wanted = progress_of(self.sequence, step);
        self.wait(
            || (peer.lane.progress() >= wanted).then_some(()),
            || bit(rank),
        )
    }

    fn wait_all(&self, step: u64) -> Result<(), Stop> {
        for (rank, peer) in self.lane.others() {
            self.wait_step(rank, peer, step)?;
        }
        Ok(())
    }

    /// Publishes this rank's call, and waits for all others'.
    fn exchange(&self, own: Call) -> Result<Calls, Stop> {
        let lane = self.lane;
        lane.own.words().publish(&own.to_entry());
        lane.ring();
        let mut calls = Calls([None; MOST_RANKS]);
        if let Some(place) = calls.0.get_mut(lane.me()) {
            *place = Some(own);
        }
        for (rank, peer) in lane.others() {
            let late = || self.late() | bit(rank);
            let call = match self.wait(|| peer.lane.entry(self.sequence), late)? {
                Found::Here(entry) => Call::from_entry(&entry),
                Found::Broken { .. } => None,
            };
            let call = call.ok_or_else(|| self.broken(rank))?;
            if let Some(place) = calls.0.get_mut(rank) {
                *place = Some(call);
            }
        }
        Ok(calls)
    }

    /// Lane resident: has the executor reduce.
    fn ask(&self, request: &Request, arrived_ns: u64) -> Result<Reduction, Stop> {
        let lane = self.lane;
        let words = lane.own.words();
        let call = Call {
            sequence: self.sequence,
            signature: request.signature,
            half: 0,
            src: request.src.in_buffer,
            dst: request.dst.in_buffer,
            src_buffer: request.src.buffer_id,
            dst_buffer: request.dst.buffer_id,
            arrived_ns,
        };
        words.publish(&call.to_entry());
        lane.board.words().ring([EXECUTOR_BELL]);
        let look = || words.reply(self.sequence);
        // Late is who has not called; none if all have, and the executor is.
        let mut patience = SpinThenSleep::new(&lane.geometry, self.timeout);
        let board = lane.board.words();
        let mut waited = board.wait(lane.me(), &mut patience, look);
        if waited == Err(Stopped::Expired) && self.late() == 0 {
            // All ranks have called in time, and the executor reduces.
            let grace = self.timeout.saturating_add(ANSWER_GRACE);
            let mut patience = SpinThenSleep::new(&lane.geometry, grace);
            waited = board.wait(lane.me(), &mut patience, look);
        }
        let reply = match waited.map_err(|stopped| self.stop(stopped, || self.late())) {
            Ok(reply) => reply,
            Err(stop) => self.wait_claimed(stop)?,
        };
        if reply.code != 0 {
            return Err(self.wrong(&reply, request));
        }
        Ok(Reduction {
            algorithm: Algorithm::OneShot,
            reduce_time: Duration::from_nanos(reply.reduce_ns),
            skew: Duration::from_nanos(reply.skew_ns),
            waited: Duration::from_nanos(reply.waited_ns),
            last_rank: u32::try_from(reply.detail).unwrap_or(u32::MAX),
        })
    }

    /// The epoch is over. If the executor has claimed the call it answers all the same, unless it is stopped or dead,
    /// or takes the claim back.
    fn wait_claimed(&self, stop: Stop) -> Result<Reply, Stop> {
        let words = self.lane.own.words();
        let deadline = std::time::Instant::now() + REASON_TIMEOUT;
        loop {
            if !words.is_claimed(self.sequence) {
                return Err(stop);
            }
            if let Some(reply) = words.reply(self.sequence) {
                return Ok(reply);
            }
            if std::time::Instant::now() >= deadline {
                return Err(Stop::Stuck);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// What the executor found wrong, which it tells every rank.
    fn wrong(&self, reply: &Reply, request: &Request) -> Stop {
        let sequence = self.sequence;
        let rank = u32::try_from(reply.detail).unwrap_or(u32::MAX);
        let code = i32::try_from(reply.code).unwrap_or(0);
        let kind = ErrorCode::try_from(code).unwrap_or(ErrorCode::Internal);
        let signature = |rank: u32| {
            let index = rank as usize;
            let peer = self.lane.peers.get(index).and_then(Option::as_ref);
            match peer.map(|peer| peer.lane.entry(sequence)) {
                None => Some(request.signature),
                Some(Some(Found::Here(entry))) => {
                    Call::from_entry(&entry).map(|call| call.signature)
                }
                Some(_) => None,
            }
        };
        let text = |rank: u32| {
            signature(rank).map_or_else(|| "something else".to_owned(), |known| known.to_string())
        };
        let message = match kind {
            ErrorCode::Mismatch => format!(
                "sequence {sequence}: rank 0 reduces {}, rank {rank} reduces {}",
                text(0),
                text(rank)
            ),
            ErrorCode::Refused => {
                let asked = request.signature;
                match (
                    resident_algorithm(asked.algorithm),
                    Reducer::new(asked.dtype, asked.op),
                ) {
                    (Err(error), _) => error.to_string(),
                    (Ok(_), Err(error)) => refusal_text(&error),
                    (Ok(_), Ok(_)) => format!("{asked} is more bytes than 64 bits count"),
                }
            }
            ErrorCode::UnknownBuffer => {
                format!("sequence {sequence}: rank {rank} names a buffer that its session has not")
            }
            ErrorCode::OutOfBounds => {
                format!("sequence {sequence}: rank {rank} names a range that leaves its buffer")
            }
            ErrorCode::Misaligned => format!(
                "sequence {sequence}: rank {rank} names an offset that is no multiple of the element size"
            ),
            ErrorCode::Overlap => format!(
                "sequence {sequence}: src and dst of rank {rank} overlap without being the same range"
            ),
            ErrorCode::InvalidField => {
                format!("sequence {sequence}: rank {rank} called with what is no call")
            }
            _ => format!("sequence {sequence}: the executor could not reduce ({reply:?})"),
        };
        refused(kind, message, Some(rank))
    }

    /// Peers that have not published their call.
    fn late(&self) -> u16 {
        let others = self.lane.others();
        others
            .filter(|(_, peer)| peer.lane.entry(self.sequence).is_none())
            .fold(0, |bits, (rank, _)| bits | bit(rank))
    }

    fn run(&self, request: &Request, arrived_ns: u64) -> Result<Reduction, Stop> {
        let lane = self.lane;
        let signature = request.signature;
        let len_bytes = request.len_bytes();
        let planned = lane
            .geometry
            .algorithm(len_bytes as u64, signature.algorithm);
        // Relaxed: only the thread whose turn it is, and turns are ordered by a mutex.
        let half = lane.stagings.load(Ordering::Relaxed);
        let offset = |tensor: Tensor| tensor.in_arena.unwrap_or(NOT_IN_ARENA);
        if planned == Ok(Algorithm::OneShot) {
            self.stage(half, request.src, 0..len_bytes.min(lane.stage_len_bytes));
        }
        let calls = self.exchange(Call {
            sequence: self.sequence,
            signature,
            half,
            src: offset(request.src),
            dst: offset(request.dst),
            src_buffer: 0,
            dst_buffer: 0,
            arrived_ns,
        })?;
        let (skew, waited, last_rank) = calls.skew(arrived_ns);
        let began_ns = monotonic_ns();
        let algorithm = self.agreed(&calls, request, planned)?;
        let reducer = Reducer::new(signature.dtype, signature.op)
            .map_err(|error| refused(ErrorCode::Refused, refusal_text(&error), None))?;
        match algorithm {
            Algorithm::TwoShot => match self.direct(&calls, request)? {
                Some((srcs, _)) if len_bytes <= lane.short_max_bytes() => {
                    self.two_shot_short(&reducer, request, &srcs, &calls)?;
                }
                Some((srcs, dsts)) => self.two_shot_direct(&reducer, request, &srcs, &dsts)?,
                None => self.two_shot_staged(&reducer, request, &calls)?,
            },
            // Geometry::algorithm answers no other.
            _ => self.one_shot(&reducer, request, &calls)?,
        }
        Ok(Reduction {
            algorithm,
            reduce_time: Duration::from_nanos(monotonic_ns().saturating_sub(began_ns)),
            skew,
            waited,
            last_rank,
        })
    }

    /// The algorithm, if all ranks ask for the same reduction and the plan has one.
    fn agreed(
        &self,
        calls: &Calls,
        request: &Request,
        planned: Result<Algorithm, allreduce_contract::lane::NotDelegated>,
    ) -> Result<Algorithm, Stop> {
        let sequence = self.sequence;
        // Compared with the first rank's, so that all name the same two.
        let first = calls
            .all()
            .next()
            .map_or(request.signature, |(_, call)| call.signature);
        if let Some((rank, call)) = calls.all().find(|(_, call)| call.signature != first) {
            let message = format!(
                "sequence {sequence}: rank 0 reduces {first}, rank {rank} reduces {}",
                call.signature
            );
            return Err(refused(ErrorCode::Mismatch, message, Some(rank)));
        }
        planned.map_err(|error| refused(ErrorCode::Refused, error.to_string(), None))
    }

    /// Copies a part of the source to the own staging.
    fn stage(&self, half: u64, src: Tensor, part: Range<usize>) {
        debug_assert!(part.len() <= self.lane.stage_len_bytes);
        let stage = self.lane.own.stage(half).as_ptr();
        // SAFETY: the part lies inside the source, whose bytes are this call's; it is at most as long as a half of the
        // staging, which only this rank writes, in one call at a time. They are in different memories.
        unsafe {
            let from = src.start.as_ptr().add(part.start);
            std::ptr::copy_nonoverlapping(from, stage, part.len());
        }
        self.lane.stagings.store(half + 1, Ordering::Relaxed);
    }

    /// Reduces `elems` of what `srcs` point to, to the same place of each of `dsts`, one or two.
    fn reduce(
        &self,
        reducer: &Reducer,
        srcs: &Pointers,
        dsts: &[*mut u8],
        elems: Range<usize>,
    ) -> Result<(), Stop> {
        if elems.is_empty() {
            return Ok(());
        }
        let skip = elems.start * reducer.dtype().size_bytes();
        let srcs = srcs.skip(skip);
        let mut at = [std::ptr::null_mut(); 2];
        for (at, dst) in at.iter_mut().zip(dsts) {
            *at = dst.wrapping_add(skip);
        }
        let dsts = at.get(..dsts.len()).unwrap_or_default();
        // SAFETY: the elements lie inside every source (peers' places were checked in `direct`; stagings hold a part of
        // at most their length) and inside each destination, which is this call's own or a part of the own staging that
        // nobody else writes or reads now. Offsets are multiples of the element size (checked, or ours). Each
        // destination is the own source or apart from every source and from the other: peers' memory is other memory,
        // and so is the staging. Peers that break the protocol may write meanwhile, which the reducer allows.
        let done = unsafe { reducer.run(srcs.as_slice(), dsts, elems.len()) };
        done.map_err(|_| self.abort(AbortCause::Failed, bit(self.lane.me())))
    }

    /// Copies a slice from `from` to the same place of `to`.
    fn copy(from: *const u8, to: *mut u8, bytes: Range<usize>) {
        // SAFETY: as in `reduce`: the slice lies inside both, which are different memories or, of the own staging, the
        // destination and the staging.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.wrapping_add(bytes.start),
                to.wrapping_add(bytes.start),
                bytes.len(),
            );
        }
    }

    fn one_shot(&self, reducer: &Reducer, request: &Request, calls: &Calls) -> Result<(), Stop> {
        let lane = self.lane;
        let elem_bytes = reducer.dtype().size_bytes();
        let len_bytes = request.len_bytes();
        let mut start = 0;
        for uses in 0.. {
            let part = start..len_bytes.min(start + lane.stage_len_bytes);
            // The first part was staged before the call was published.
            if uses > 0 {
                let half = lane.stagings.load(Ordering::Relaxed);
                self.stage(half, request.src, part.clone());
                self.publish(uses);
                self.wait_all(uses)?;
            }
            let srcs = lane.stages(calls, uses);
            let dst = request.dst.start.as_ptr().wrapping_add(part.start);
            self.reduce(reducer, &srcs, &[dst], 0..part.len() / elem_bytes)?;
            start = part.end;
            if start == len_bytes {
                break;
            }
        }
        Ok(())
    }

    /// Where all ranks' sources and destinations are, if all are in arenas.
    fn direct(
        &self,
        calls: &Calls,
        request: &Request,
    ) -> Result<Option<(Pointers, Pointers)>, Stop> {
        let is_direct = |call: &Call| call.src != NOT_IN_ARENA && call.dst != NOT_IN_ARENA;
        if !calls.all().all(|(_, call)| is_direct(call)) {
            return Ok(None);
        }
        let len_bytes = request.len_bytes() as u64;
        let elem_bytes = request.signature.dtype.size_bytes() as u64;
        let mut srcs = [request.src.start.as_ptr().cast_const(); MOST_RANKS];
        let mut dsts = [request.dst.start.as_ptr().cast_const(); MOST_RANKS];
        for (rank, peer) in self.lane.others() {
            let call = calls.0.get(rank).and_then(Option::as_ref);
            let find = |offset: u64| {
                let aligned = offset.is_multiple_of(elem_bytes);
                aligned.then(|| peer.arena.range(offset, len_bytes))?
            };
            let found = call.and_then(|call| Some((find(call.src)?, find(call.dst)?)));
            let (src, dst) = found.ok_or_else(|| self.broken(rank))?;
            if let (Some(src_at), Some(dst_at)) = (srcs.get_mut(rank), dsts.get_mut(rank)) {
                (*src_at, *dst_at) = (src, dst);
            }
        }
        let ranks = self.lane.peers.len();
        Ok(Some((
            Pointers::collect(srcs.into_iter().take(ranks)),
            Pointers::collect(dsts.into_iter().take(ranks)),
        )))
    }

    /// Elements `of` a block that rank `rank` reduces, as a range of the tensor.
    fn slice(&self, dtype: Dtype, block: &Range<usize>, rank: usize) -> Range<usize> {
        let ranks = NonZeroUsize::new(self.lane.peers.len()).unwrap_or(NonZeroUsize::MIN);
        let slice = chunk(dtype, block.len(), rank, ranks);
        block.start + slice.start..block.start + slice.end
    }

    fn two_shot_short(
        &self,
        reducer: &Reducer,
        request: &Request,
        srcs: &Pointers,
        calls: &Calls,
    ) -> Result<(), Stop> {
        let lane = self.lane;
        let dtype = reducer.dtype();
        let elem_bytes = dtype.size_bytes();
        let elems = 0..request.len_bytes() / elem_bytes;
        let own_dst = request.dst.start.as_ptr();
        let half = lane.stagings.load(Ordering::Relaxed);
        let own_stage = lane.own.stage(half).as_ptr();
        let slice = self.slice(dtype, &elems, lane.me());
        self.reduce(reducer, srcs, &[own_dst, own_stage], slice)?;
        lane.stagings.store(half + 1, Ordering::Relaxed);
        self.publish(1);
        let stages = lane.stages(calls, 0);
        for (rank, peer) in lane.others() {
            self.wait_step(rank, peer, 1)?;
            let slice = self.slice(dtype, &elems, rank);
            let bytes = slice.start * elem_bytes..slice.end * elem_bytes;
            Self::copy(stages.of(rank), own_dst, bytes);
        }
        Ok(())
    }

    fn two_shot_direct(
        &self,
        reducer: &Reducer,
        request: &Request,
        srcs: &Pointers,
        dsts: &Pointers,
    ) -> Result<(), Stop> {
        let lane = self.lane;
        let dtype = reducer.dtype();
        let elem_bytes = dtype.size_bytes();
        let num_elems = request.len_bytes() / elem_bytes;
        // Steps must suffice for the blocks of the longest tensor.
        let configured = usize::try_from(lane.geometry.block_len_bytes).unwrap_or(usize::MAX);
        let least = request.len_bytes().div_ceil(1 << 23);
        let block_elems = configured.max(least.next_multiple_of(4096)) / elem_bytes;
        let block = |index: usize| {
            let start = num_elems.min(index * block_elems);
            start..num_elems.min(start + block_elems)
        };
        let blocks = num_elems.div_ceil(block_elems);
        let own_dst = request.dst.start.as_ptr();
        for index in 0..=blocks {
            if index < blocks {
                let slice = self.slice(dtype, &block(index), lane.me());
                self.reduce(reducer, srcs, &[own_dst], slice)?;
                self.publish(index as u64 + 1);
            }
            let Some(before) = index.checked_sub(1) else {
                continue;
            };
            for (rank, peer) in lane.others() {
                self.wait_step(rank, peer, index as u64)?;
                let slice = self.slice(dtype, &block(before), rank);
                let bytes = slice.start * elem_bytes..slice.end * elem_bytes;
                Self::copy(dsts.of(rank), own_dst, bytes);
            }
        }
        self.publish(LAST_STEP);
        self.wait_all(LAST_STEP)
    }

    fn two_shot_staged(
        &self,
        reducer: &Reducer,
        request: &Request,
        calls: &Calls,
    ) -> Result<(), Stop> {
        let lane = self.lane;
        let dtype = reducer.dtype();
        let elem_bytes = dtype.size_bytes();
        let len_bytes = request.len_bytes();
        let mut step = 0;
        let mut start = 0;
        for uses in 0.. {
            let part = start..len_bytes.min(start + lane.stage_len_bytes);
            let elems = 0..part.len() / elem_bytes;
            let half = lane.stagings.load(Ordering::Relaxed);
            self.stage(half, request.src, part.clone());
            step += 1;
            self.publish(step);
            self.wait_all(step)?;
            let stages = lane.stages(calls, uses);
            let own_stage = lane.own.stage(half).as_ptr();
            // In place: nobody else reads this slice of this staging.
            self.reduce(
                reducer,
                &stages,
                &[own_stage],
                self.slice(dtype, &elems, lane.me()),
            )?;
            step += 1;
            self.publish(step);
            self.wait_all(step)?;
            let dst = request.dst.start.as_ptr().wrapping_add(part.start);
            for rank in 0..lane.peers.len() {
                let slice = self.slice(dtype, &elems, rank);
                let bytes = slice.start * elem_bytes..slice.end * elem_bytes;
                Self::copy(stages.of(rank), dst, bytes);
            }
            start = part.end;
            if start == len_bytes {
                break;
            }
        }
        Ok(())
    }
}

fn refusal_text(error: &ReduceError) -> String {
    match error {
        ReduceError::IntegerAvg { dtype } => {
            format!("op avg is not defined for the integer dtype {dtype}: use sum and divide")
        }
        ReduceError::SourceCount { .. }
        | ReduceError::DestinationCount { .. }
        | ReduceError::TooLong { .. }
        | ReduceError::PathUnavailable { .. } => error.to_string(),
    }
}

fn bit(rank: usize) -> u16 {
    u32::try_from(rank).map_or(0, rank_bit)
}

/// A sequence that is taken on the lane. Dropped without having run, it ends the epoch: the peers wait for it.
#[derive(Debug)]
struct Turn {
    ticket: Ticket,
    lane: Arc<HostLane>,
    errands: mpsc::UnboundedSender<Errand>,
    has_run: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let sequence = self.ticket.sequence();
        if self.has_run {
            self.lane.turns.end(sequence);
        } else {
            let abort = Abort::of(AbortCause::Abandoned, Some(self.lane.rank), sequence);
            let words = self.lane.board.words();
            words.set_abort(abort.to_word());
            words.fail(sequence);
            // Without the thread there is no membership either, and the executor has seen that end.
            let _ = self.errands.send(Errand::GaveUp(gave_up(abort, 0)));
            self.lane.turns.break_off();
        }
    }
}

/// The lane, as a communicator uses it.
#[derive(Debug, Clone)]
pub(crate) struct LaneFront {
    lane: Arc<HostLane>,
    sequences: Arc<Sequences>,
    epoch: u64,
    errands: mpsc::UnboundedSender<Errand>,
    membership: watch::Receiver<Membership>,
}

impl LaneFront {
    pub(crate) fn new(
        lane: Arc<HostLane>,
        max_in_flight: u32,
        epoch: u64,
        errands: mpsc::UnboundedSender<Errand>,
        membership: watch::Receiver<Membership>,
    ) -> Self {
        Self {
            lane,
            sequences: Sequences::new(max_in_flight),
            epoch,
            errands,
            membership,
        }
    }

    /// Whether the shared memory says that the epoch is over; then why.
    pub(crate) fn check(&self) -> Result<(), AllReduceError> {
        match self.lane.abort() {
            Some(abort) => Err(self.ended(abort)),
            None => Ok(()),
        }
    }

    /// Waits until no call that was made so far touches a buffer; whether none does.
    pub(crate) fn wait_settled(&self, timeout: Duration) -> bool {
        self.lane.turns.wait_ended(self.sequences.last(), timeout)
    }

    /// Reduces on this thread.
    pub(crate) fn run_here<B>(
        &self,
        buffers: B,
        request: Result<Request, AllReduceError>,
        runtime: &tokio::runtime::Runtime,
    ) -> Outcome<B> {
        let request = match request {
            Ok(request) => request,
            Err(error) => return Err(failed(error, Some(buffers))),
        };
        let ticket = match self.sequences.take_now() {
            Some(ticket) => Ok(ticket),
            None => runtime.block_on(self.take()),
        };
        let answer = match ticket {
            Ok(ticket) => self.reduce(self.turn(ticket), &request),
            Err(error) => Err((error, true)),
        };
        answered(buffers, answer)
    }

    /// Reduces on a thread that may block: other tasks of this one's thread may be ranks too.
    pub(crate) async fn run<B: Send + 'static>(
        &self,
        buffers: B,
        request: Result<Request, AllReduceError>,
    ) -> Outcome<B> {
        let request = match request {
            Ok(request) => request,
            Err(error) => return Err(failed(error, Some(buffers))),
        };
        let turn = match self.take().await {
            Ok(ticket) => self.turn(ticket),
            Err(error) => return Err(failed(error, Some(buffers))),
        };
        let front = self.clone();
        // Dropping the future leaves the call running, with its buffers.
        let running = tokio::task::spawn_blocking(move || {
            let answer = front.reduce(turn, &request);
            (buffers, answer)
        });
        match running.await {
            Ok((buffers, answer)) => answered(buffers, answer),
            Err(error) => Err(failed(cut_off(&error), None)),
        }
    }

    fn turn(&self, ticket: Ticket) -> Turn {
        Turn {
            ticket,
            lane: Arc::clone(&self.lane),
            errands: self.errands.clone(),
            has_run: false,
        }
    }

    async fn take(&self) -> Result<Ticket, AllReduceError> {
        let mut membership = self.membership.clone();
        tokio::select! {
            biased;
            ticket = self.sequences.take() => Ok(ticket),
            error = over(&mut membership) => Err(error),
        }
    }

    /// With an error: whether the tensors can be given back.
    fn reduce(
        &self,
        mut turn: Turn,
        request: &Request,
    ) -> Result<Reduction, (AllReduceError, bool)> {
        let sequence = turn.ticket.sequence();
        let reduced = match self.lane.turns.wait(sequence) {
            true => self.lane.reduce(sequence, request),
            false => Err(Stop::Over {
                abort: Abort::of(AbortCause::Abandoned, Some(self.lane.rank), sequence),
                is_own: false,
                is_late: true,
            }),
        };
        turn.has_run = true;
        drop(turn);
        reduced.map_err(|stop| {
            let is_free = !matches!(stop, Stop::Stuck);
            (self.error(stop, request.timeout), is_free)
        })
    }

    fn error(&self, stop: Stop, timeout: Duration) -> AllReduceError {
        let (abort, is_own, is_late) = match stop {
            Stop::Refused(refused) if refused.kind == ErrorCode::Mismatch => {
                return AllReduceError::Mismatch(refused);
            }
            Stop::Refused(refused) => return AllReduceError::Refused(refused),
            Stop::Stuck => {
                return AllReduceError::ExecutorLost(
                    "it has begun a reduction and does not end it".to_owned(),
                );
            }
            Stop::Over {
                abort,
                is_own,
                is_late,
            } => (abort, is_own, is_late),
        };
        let ranks = abort.rank_list();
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        if is_own {
            let is_timeout = abort.cause == AbortCause::Timeout;
            self.give_up(abort, if is_timeout { timeout_ms.max(1) } else { 0 });
        }
        // Who waited gets this; who was waited for, or comes later, gets the epoch's end.
        let waited = !is_late && !ranks.contains(&self.lane.rank);
        if abort.cause == AbortCause::Timeout && waited {
            return AllReduceError::Timeout {
                message: format!("epoch {} is over: {abort}; join again", self.epoch),
                missing_ranks: ranks,
            };
        }
        self.why_over(abort)
    }

    /// Why the epoch is over, in the executor's words if they come.
    fn why_over(&self, abort: Abort) -> AllReduceError {
        let deadline = std::time::Instant::now() + REASON_TIMEOUT;
        loop {
            if let Membership::Over(over) = &*self.membership.borrow() {
                return match over {
                    // What an executor says that is about to go is not better than that it has gone.
                    Over::Left => AllReduceError::ExecutorLost("this rank has left".to_owned()),
                    over => over.to_error(),
                };
            }
            if std::time::Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // It does not know: who said so in the shared memory has not told it.
        self.give_up(abort, 0);
        self.ended(abort)
    }

    fn give_up(&self, abort: Abort, timeout_ms: u32) {
        // As in Turn's drop.
        let _ = self
            .errands
            .send(Errand::GaveUp(gave_up(abort, timeout_ms)));
    }

    /// As the shared memory has it.
    fn ended(&self, abort: Abort) -> AllReduceError {
        let ranks = abort.rank_list();
        let message = format!("epoch {} is over: {abort}; join again", self.epoch);
        match abort.cause {
            AbortCause::ExecutorLost => AllReduceError::ExecutorLost(message),
            AbortCause::Timeout
            | AbortCause::Broken
            | AbortCause::Abandoned
            | AbortCause::Ended
            | AbortCause::Failed
            | AbortCause::Unknown(_) => AllReduceError::EpochEnded(EpochEnd {
                epoch: self.epoch,
                rank: match ranks.as_slice() {
                    [rank] => Some(*rank),
                    [] | [_, _, ..] => None,
                },
                message,
            }),
        }
    }
}

fn gave_up(abort: Abort, timeout_ms: u32) -> GaveUp {
    GaveUp {
        sequence: abort.sequence,
        ranks: abort.rank_list(),
        timeout_ms,
        reason: abort.to_string(),
    }
}

fn answered<B>(buffers: B, answer: Result<Reduction, (AllReduceError, bool)>) -> Outcome<B> {
    match answer {
        Ok(reduction) => Ok((buffers, reduction)),
        Err((error, true)) => Err(failed(error, Some(buffers))),
        Err((error, false)) => Err(failed(error, None)),
    }
}

fn failed<B>(error: AllReduceError, buffers: Option<B>) -> Box<Failed<B>> {
    Box::new(Failed { error, buffers })
}
