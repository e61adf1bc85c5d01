//! Lane resident on backend host: a thread of the executor that waits for calls in shared memory, and reduces.
//!
//! Owns the thread, its table of buffers and its counts. The executor's task keeps the table as it gives buffers out and
//! takes them back. Refuses to trust an entry: it is copied once, and whatever it names is looked up in the table,
//! which only the task writes. Anything wrong is told to every rank and consumes the sequence, as on lane rpc.
//!
//! ```text
//!            all ranks' entries of the next sequence          no abort
//!   Waiting -------------------------------------> Claimed ------------> Reduced: answered --> Waiting
//!      |                      | wrong                 | abort
//!      | abort                v                       v
//!      +------> (ends)     answered, Waiting       unclaimed (ends)
//! ```
//!
//! A rank whose wait ends takes its tensors back only if its call is not claimed, else it waits for the answer: what
//! is claimed is reduced.
#![allow(unsafe_code)] // room: shared memory

use crate::backend::host_lanes::EpochLanes;
use crate::communicator::{Signature, Stats};
use allreduce_contract::lane::protocol::{Found, RANK_BELLS, Reply, Stopped};
use allreduce_contract::lane::{
    Abort, AbortCause, Call, SpinThenSleep, monotonic_ns, resident_algorithm,
};
use allreduce_contract::memory::Mapping;
use allreduce_contract::v1::ErrorCode;
use allreduce_contract::{Lane, Rank, WorldSize};
use allreduce_kernels::Reducer;
use std::collections::HashMap;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The longest sleep without a call: who rings wakes it.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Where a buffer is.
#[derive(Debug, Clone)]
struct Place {
    mapping: Arc<Mapping>,
    offset_bytes: u64,
    len_bytes: u64,
}

/// The buffers of all sessions, as the thread sees them.
#[derive(Debug, Clone, Default)]
pub(crate) struct BufferTable(Arc<Mutex<HashMap<(u64, u64), Place>>>);

impl BufferTable {
    fn places(&self) -> MutexGuard<'_, HashMap<(u64, u64), Place>> {
        // No step below panics half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session was given a buffer.
    pub(crate) fn insert(
        &self,
        session: u64,
        buffer_id: u64,
        mapping: &Arc<Mapping>,
        offset_bytes: u64,
        len_bytes: u64,
    ) {
        let mapping = Arc::clone(mapping);
        let place = Place {
            mapping,
            offset_bytes,
            len_bytes,
        };
        self.places().insert((session, buffer_id), place);
    }

    /// A session gave a buffer back.
    pub(crate) fn remove(&self, session: u64, buffer_id: u64) {
        self.places().remove(&(session, buffer_id));
    }

    /// A session is gone.
    pub(crate) fn forget(&self, session: u64) {
        self.places().retain(|(owner, _), _| *owner != session);
    }

    /// Where `len_bytes` from `offset_bytes` of a buffer are, with what keeps them mapped.
    fn find(
        &self,
        session: u64,
        buffer_id: u64,
        offset_bytes: u64,
        len_bytes: u64,
        elem_bytes: u64,
    ) -> Result<(Arc<Mapping>, NonNull<u8>), ErrorCode> {
        let place = self
            .places()
            .get(&(session, buffer_id))
            .cloned()
            .ok_or(ErrorCode::UnknownBuffer)?;
        if !offset_bytes.is_multiple_of(elem_bytes) {
            return Err(ErrorCode::Misaligned);
        }
        let end = offset_bytes.checked_add(len_bytes);
        let start = end
            .filter(|end| *end <= place.len_bytes)
            .and_then(|_| place.offset_bytes.checked_add(offset_bytes))
            .and_then(|start| place.mapping.range(start, len_bytes))
            .ok_or(ErrorCode::OutOfBounds)?;
        Ok((place.mapping, start))
    }
}

/// What the thread has counted, for the task to read.
pub(crate) type ResidentStats = Arc<Mutex<Stats>>;

/// One epoch's thread.
struct Resident {
    world_size: WorldSize,
    lanes: Arc<EpochLanes>,
    /// In rank order.
    sessions: Vec<u64>,
    table: BufferTable,
    stats: ResidentStats,
}

/// Starts an epoch's thread. It ends with the epoch; `stopped` is called if it ends for another reason.
pub(crate) fn start(
    world_size: WorldSize,
    lanes: Arc<EpochLanes>,
    sessions: Vec<u64>,
    table: BufferTable,
    stats: ResidentStats,
    stopped: impl FnOnce(Abort) + Send + 'static,
) -> io::Result<()> {
    let resident = Resident {
        world_size,
        lanes,
        sessions,
        table,
        stats,
    };
    std::thread::Builder::new()
        .name("resident".to_owned())
        .spawn(move || {
            if let Some(abort) = resident.serve() {
                stopped(abort);
            }
        })
        .map(drop)
}

/// What a rank's call is about, found in the table.
struct Arrived {
    rank: Rank,
    call: Call,
    src: (Arc<Mapping>, NonNull<u8>),
    dst: (Arc<Mapping>, NonNull<u8>),
}

/// A call cannot be reduced: why, and the rank it is about.
type Wrong = (ErrorCode, u32);

impl Resident {
    /// Serves calls until the epoch is over; the abort that it has set itself, if one.
    fn serve(&self) -> Option<Abort> {
        let board = self.lanes.board();
        for sequence in 1.. {
            let calls = match self.next_calls(sequence) {
                Ok(calls) => calls,
                Err(own) => return own,
            };
            let arrived = self.check(&calls);
            let reply = match arrived {
                Ok(arrived) => {
                    for lane in self.lanes.lanes() {
                        lane.words().claim(sequence);
                    }
                    if board.words().is_aborted_after_claim() {
                        for lane in self.lanes.lanes() {
                            lane.words().claim(0);
                        }
                        board.words().ring(0..RANK_BELLS);
                        return None;
                    }
                    match self.reduce(&arrived) {
                        Some(took) => self.reduced(&arrived, took),
                        None => vec![Reply::wrong(ErrorCode::Internal as u64, 0); calls.len()],
                    }
                }
                Err((code, rank)) => {
                    vec![Reply::wrong(code as u64, u64::from(rank)); calls.len()]
                }
            };
            for (lane, reply) in self.lanes.lanes().zip(&reply) {
                lane.words().answer(sequence, reply);
            }
            board.words().ring(0..self.world_size.as_usize());
        }
        None
    }

    /// Waits for every rank's call of a sequence, in rank order; none for what is no call.
    fn next_calls(&self, sequence: u64) -> Result<Vec<Option<Call>>, Option<Abort>> {
        let board = self.lanes.board().words();
        let mut calls = Vec::with_capacity(self.world_size.as_usize());
        for (rank, lane) in self.world_size.ranks().zip(self.lanes.lanes()) {
            let mut patience = SpinThenSleep::new(&self.lanes.geometry, Duration::MAX)
                .sleeping_at_most(LONGEST_SLEEP);
            let look = || lane.words().entry(sequence);
            let found = board.wait(
                allreduce_contract::lane::protocol::EXECUTOR_BELL,
                &mut patience,
                look,
            );
            match found {
                Ok(Found::Here(entry)) => calls.push(Call::from_entry(&entry)),
                Ok(Found::Broken { .. }) => {
                    let abort = Abort::of(AbortCause::Broken, Some(rank.get()), sequence);
                    board.set_abort(abort.to_word());
                    return Err(Some(abort));
                }
                Err(Stopped::Aborted(_) | Stopped::Expired) => return Err(None),
            }
        }
        Ok(calls)
    }

    /// Whether all agree, and what they name is theirs.
    fn check(&self, calls: &[Option<Call>]) -> Result<Vec<Arrived>, Wrong> {
        let ranks = || self.world_size.ranks().zip(&self.sessions).zip(calls);
        for ((rank, _), call) in ranks() {
            call.ok_or((ErrorCode::InvalidField, rank.get()))?;
        }
        let found =
            || ranks().filter_map(|((rank, session), call)| Some((rank, session, (*call)?)));
        let first = found().next().map(|(_, _, call)| call.signature);
        if let Some((rank, ..)) = found().find(|(_, _, call)| Some(call.signature) != first) {
            return Err((ErrorCode::Mismatch, rank.get()));
        }
        let mut arrived = Vec::with_capacity(calls.len());
        for (rank, session, call) in found() {
            let wrong = |code| (code, rank.get());
            let signature = call.signature;
            if resident_algorithm(signature.algorithm).is_err()
                || Reducer::new(signature.dtype, signature.op).is_err()
            {
                return Err(wrong(ErrorCode::Refused));
            }
            let elem_bytes = signature.dtype.size_bytes() as u64;
            let len_bytes = signature
                .num_elems
                .checked_mul(elem_bytes)
                .ok_or(wrong(ErrorCode::Refused))?;
            let find = |buffer: u64, offset: u64| {
                let found = self
                    .table
                    .find(*session, buffer, offset, len_bytes, elem_bytes);
                found.map_err(wrong)
            };
            let src = find(call.src_buffer, call.src)?;
            let dst = find(call.dst_buffer, call.dst)?;
            let (src_at, dst_at) = (src.1.addr().get() as u64, dst.1.addr().get() as u64);
            let apart = src_at == dst_at || src_at.abs_diff(dst_at) >= len_bytes;
            if !apart {
                return Err(wrong(ErrorCode::Overlap));
            }
            arrived.push(Arrived {
                rank,
                call,
                src,
                dst,
            });
        }
        Ok(arrived)
    }

    /// Reduces, in one pass; how long it took.
    fn reduce(&self, arrived: &[Arrived]) -> Option<Duration> {
        let began_ns = monotonic_ns();
        let signature = arrived.first()?.call.signature;
        let reducer = Reducer::new(signature.dtype, signature.op).ok()?;
        let num_elems = usize::try_from(signature.num_elems).ok()?;
        let srcs: Vec<*const u8> = arrived
            .iter()
            .map(|arrived| arrived.src.1.as_ptr().cast_const())
            .collect();
        let dsts: Vec<*mut u8> = arrived
            .iter()
            .map(|arrived| arrived.dst.1.as_ptr())
            .collect();
        // SAFETY: `check` found num_elems elements from each pointer inside a mapping that `arrived` holds, aligned
        // (mappings are page-aligned, buffers to 16 bytes, offsets to the element). A rank's source and destination are
        // equal or apart (checked); different ranks' buffers are in different memories, or ranges that the arena gave out
        // once. Ranks may write meanwhile, which the reducer allows.
        let done = unsafe { reducer.run(&srcs, &dsts, num_elems) };
        done.ok()?;
        Some(Duration::from_nanos(
            monotonic_ns().saturating_sub(began_ns),
        ))
    }

    /// Counts a reduction, and says how it went, to each rank.
    fn reduced(&self, arrived: &[Arrived], took: Duration) -> Vec<Reply> {
        let now = monotonic_ns();
        // A rank may claim any time.
        let at = |arrived: &Arrived| arrived.call.arrived_ns.min(now);
        let first = arrived.iter().map(at).min().unwrap_or(now);
        let last = arrived.iter().map(at).max().unwrap_or(now);
        let skew_ns = last - first;
        let last_rank = arrived
            .iter()
            .max_by_key(|arrived| at(arrived))
            .map_or(0, |arrived| arrived.rank.get());
        if let Some(one) = arrived.first() {
            let signature = Signature {
                num_elems: one.call.signature.num_elems,
                dtype: one.call.signature.dtype,
                op: one.call.signature.op,
                algorithm: one.call.signature.algorithm,
            };
            let lateness: Vec<(Rank, Duration)> = arrived
                .iter()
                .map(|arrived| (arrived.rank, Duration::from_nanos(at(arrived) - first)))
                .collect();
            let algorithm = allreduce_contract::Algorithm::OneShot;
            self.stats
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .record_reduction(signature, Lane::Resident, algorithm, &lateness, took);
        }
        arrived
            .iter()
            .map(|arrived| Reply {
                code: 0,
                detail: u64::from(last_rank),
                reduce_ns: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
                skew_ns,
                waited_ns: last - at(arrived),
            })
            .collect()
    }
}
