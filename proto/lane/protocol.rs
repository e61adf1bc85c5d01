//! How ranks and executor meet in shared memory: what is stored, in which order, and how one waits for it.
//!
//! Owns every atomic of the host lanes. [`lane`](super) puts the words into mappings; the client's and the executor's
//! lanes call it. It is generic over [`Platform`], so that `model` checks this very code with loom. Refuses to
//! trust a word: all that is read here was perhaps written by a hostile rank, and is a number.
//!
//! # Words
//!
//! | word | written by | read by | meaning |
//! | --- | --- | --- | --- |
//! | entry | its rank | peers, executor | the call of this sequence: signature and places; two, by parity |
//! | progress | its rank | peers | how far the rank is in its call |
//! | reply | executor | its rank | resident: the call of this sequence is done, and how |
//! | claimed | executor | its rank | resident: the executor works on the tensors of this sequence; 0: on none |
//! | abort | whoever is first | all | 0, or why nothing can be reduced any more |
//! | failed | all | all | the earliest call that some rank gave up |
//! | bell | its owner, who wakes it | the same | odd while its owner sleeps, or is about to |
//!
//! # Waiting and waking
//!
//! Who publishes stores its word, fences, and looks at the bells: an odd one is made even and its futex woken. Who waits
//! looks for a while, then makes its bell odd, fences, looks once more, and sleeps as long as the bell is the same. Of two
//! fences one is first, so either the sleeper sees what was published, or the publisher sees the odd bell.
//!
//! # Parity
//!
//! A rank publishes call k + 1 only when it is through with call k, and is through with call k only when every peer has
//! published call k. So when it writes call k + 2 every peer is through with call k, and what call k was published in
//! may be used again: entries and staging come in twos.
//!
//! # Giving up
//!
//! A rank whose wait ends without what it waited for marks its call as failed, before it gives the tensors back to
//! its caller, who may write them. A call that went through to its end is good unless it, or an earlier one, is marked then:
//! a peer that read tensors while they were given back has read them after the mark.
//!
//! On lane resident the executor reads and writes the tensors, so a rank that gives up asks whether its call is claimed, and
//! if so waits for the reply. The executor claims, fences, and looks at the abort word; the rank stores the abort word, fences,
//! and looks at the claim. One of them sees the other.

use super::words::{Platform, Word};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Line<T>(pub T);

/// Bells of ranks; one more is the executor's.
pub const RANK_BELLS: usize = crate::MAX_WORLD_SIZE as usize;

/// The bell of the executor.
pub const EXECUTOR_BELL: usize = RANK_BELLS;

/// Words that every rank and the executor write.
#[derive(Debug)]
#[repr(C)]
pub struct BoardWords<P: Platform> {
    pub(super) abort: Line<P::U64>,
    /// The complement of the earliest failed sequence; 0 if none is, which is what new memory holds.
    pub(super) failed: Line<P::U64>,
    pub(super) bells: Line<[P::U32; RANK_BELLS]>,
    pub(super) executor_bell: Line<P::U32>,
}

/// Words that one rank writes, and the executor's replies to it.
#[derive(Debug)]
#[repr(C)]
pub struct RankWords<P: Platform> {
    pub(super) entries: [Line<EntryWords<P>>; 2],
    pub(super) progress: Line<P::U64>,
    pub(super) reply: Line<ReplyWords<P>>,
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct EntryWords<P: Platform> {
    pub(super) sequence: P::U64,
    pub(super) num_elems: P::U64,
    pub(super) kind: P::U64,
    pub(super) src: P::U64,
    pub(super) dst: P::U64,
    pub(super) src_buffer: P::U64,
    pub(super) dst_buffer: P::U64,
    pub(super) arrived_ns: P::U64,
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct ReplyWords<P: Platform> {
    pub(super) sequence: P::U64,
    pub(super) code: P::U64,
    pub(super) detail: P::U64,
    pub(super) reduce_ns: P::U64,
    pub(super) skew_ns: P::U64,
    pub(super) waited_ns: P::U64,
    pub(super) claimed: P::U64,
}

/// A call as its rank publishes it: numbers, which [`Call`](super::Call) gives a meaning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Entry {
    /// Which call, from 1.
    pub sequence: u64,
    /// Elements of the tensor.
    pub num_elems: u64,
    /// Dtype, op, algorithm, and the half of the staging.
    pub kind: u64,
    /// Where the source is in the arena.
    pub src: u64,
    /// Where the destination is in the arena.
    pub dst: u64,
    /// The source's buffer.
    pub src_buffer: u64,
    /// The destination's buffer.
    pub dst_buffer: u64,
    /// When the rank called, by the machine's monotonic clock.
    pub arrived_ns: u64,
}

/// What the executor answers to a call on lane resident.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reply {
    /// 0: reduced; others have a meaning in [`lane`](super).
    pub code: u64,
    /// What `code` is about.
    pub detail: u64,
    /// How long reducing took.
    pub reduce_ns: u64,
    /// Between the first and the last rank's call.
    pub skew_ns: u64,
    /// What of that this rank waited.
    pub waited_ns: u64,
}

impl Reply {
    /// Not reduced: why, and the rank it is about.
    pub fn wrong(code: u64, rank: u64) -> Self {
        Self {
            code,
            detail: rank,
            ..Self::default()
        }
    }
}

/// What [`RankWords::entry`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The call that was looked for.
    Here(Entry),
    /// Another one, which a rank that keeps to the protocol cannot have published.
    Broken {
        /// Its sequence.
        sequence: u64,
    },
}

impl<P: Platform> RankWords<P> {
    fn slot(&self, sequence: u64) -> &EntryWords<P> {
        let [even, odd] = &self.entries;
        if sequence.is_multiple_of(2) {
            &even.0
        } else {
            &odd.0
        }
    }

    /// Rank: publishes its call, which must be one more than the last. Its staging is written before.
    pub fn publish(&self, entry: &Entry) {
        let slot = self.slot(entry.sequence);
        // Relaxed: the sequence, stored last, publishes them.
        slot.num_elems.store(entry.num_elems, Ordering::Relaxed);
        slot.kind.store(entry.kind, Ordering::Relaxed);
        slot.src.store(entry.src, Ordering::Relaxed);
        slot.dst.store(entry.dst, Ordering::Relaxed);
        slot.src_buffer.store(entry.src_buffer, Ordering::Relaxed);
        slot.dst_buffer.store(entry.dst_buffer, Ordering::Relaxed);
        slot.arrived_ns.store(entry.arrived_ns, Ordering::Relaxed);
        // SYNC: entry. Release: who acquires the sequence sees the entry, the tensor and the staging.
        slot.sequence.store(entry.sequence, Ordering::Release);
    }

    /// Peer, executor: the rank's call of this sequence, once it is published.
    pub fn entry(&self, sequence: u64) -> Option<Found> {
        let slot = self.slot(sequence);
        // SYNC: entry. Acquire: pairs with publish.
        let found = slot.sequence.load(Ordering::Acquire);
        if found != sequence {
            // Before it is published the slot holds the call before the last, or nothing.
            let earlier = found < sequence && found.is_multiple_of(2) == sequence.is_multiple_of(2);
            let is_earlier = earlier || found == 0;
            return (!is_earlier).then_some(Found::Broken { sequence: found });
        }
        Some(Found::Here(Entry {
            sequence,
            num_elems: slot.num_elems.load(Ordering::Relaxed),
            kind: slot.kind.load(Ordering::Relaxed),
            src: slot.src.load(Ordering::Relaxed),
            dst: slot.dst.load(Ordering::Relaxed),
            src_buffer: slot.src_buffer.load(Ordering::Relaxed),
            dst_buffer: slot.dst_buffer.load(Ordering::Relaxed),
            arrived_ns: slot.arrived_ns.load(Ordering::Relaxed),
        }))
    }

    /// Rank: it is this far; never less than before.
    pub fn set_progress(&self, progress: u64) {
        // SYNC: progress. Release: what the rank wrote before, and that it has read what it had to, is visible to who
        // acquires.
        self.progress.0.store(progress, Ordering::Release);
    }

    /// Peer: how far the rank is.
    pub fn progress(&self) -> u64 {
        // SYNC: progress. Acquire: pairs with set_progress.
        self.progress.0.load(Ordering::Acquire)
    }

    /// Executor: answers the call of this sequence.
    pub fn answer(&self, sequence: u64, reply: &Reply) {
        let words = &self.reply.0;
        // Relaxed: the sequence, stored last, publishes them.
        words.code.store(reply.code, Ordering::Relaxed);
        words.detail.store(reply.detail, Ordering::Relaxed);
        words.reduce_ns.store(reply.reduce_ns, Ordering::Relaxed);
        words.skew_ns.store(reply.skew_ns, Ordering::Relaxed);
        words.waited_ns.store(reply.waited_ns, Ordering::Relaxed);
        // SYNC: reply. Release: who acquires the sequence sees the reply and the results.
        words.sequence.store(sequence, Ordering::Release);
    }

    /// Executor: from here on it works on the tensors of this sequence, unless
    /// [`BoardWords::is_aborted_after_claim`]; 0 takes that back.
    pub fn claim(&self, sequence: u64) {
        // SYNC: claimed. Release: who acquires a claim that was taken back knows that nothing was touched.
        self.reply.0.claimed.store(sequence, Ordering::Release);
    }

    /// Rank, after the abort word was set: whether the executor works on the tensors of this sequence, or has.
    pub fn is_claimed(&self, sequence: u64) -> bool {
        // SYNC: claimed. The fence pairs with is_aborted_after_claim; Acquire with claim.
        P::fence(Ordering::SeqCst);
        self.reply.0.claimed.load(Ordering::Acquire) == sequence
    }

    /// Rank: the answer to its call of this sequence, once there is one.
    pub fn reply(&self, sequence: u64) -> Option<Reply> {
        let words = &self.reply.0;
        // SYNC: reply. Acquire: pairs with answer.
        (words.sequence.load(Ordering::Acquire) == sequence).then(|| Reply {
            code: words.code.load(Ordering::Relaxed),
            detail: words.detail.load(Ordering::Relaxed),
            reduce_ns: words.reduce_ns.load(Ordering::Relaxed),
            skew_ns: words.skew_ns.load(Ordering::Relaxed),
            waited_ns: words.waited_ns.load(Ordering::Relaxed),
        })
    }
}

/// What to do while there is nothing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Look again.
    Look,
    /// Sleep, at most this long, then look again.
    Sleep(Duration),
    /// Give up.
    Expired,
}

/// How long to look, how long to sleep, and when to give up.
pub trait Patience {
    /// What to do now. It does the pausing itself.
    fn next(&mut self) -> Step;
}

/// A wait ended without what was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The abort word says why.
    Aborted(u64),
    /// Patience was at its end.
    Expired,
}

impl<P: Platform> BoardWords<P> {
    fn bell(&self, owner: usize) -> &P::U32 {
        self.bells.0.get(owner).unwrap_or(&self.executor_bell.0)
    }

    /// Why nothing can be reduced any more; none as long as it can.
    pub fn abort(&self) -> Option<u64> {
        // SYNC: abort. Acquire: pairs with set_abort; who gives up because of it sees what was published before.
        let word = self.abort.0.load(Ordering::Acquire);
        (word != 0).then_some(word)
    }

    /// Executor, after it has claimed a call: whether it must not touch the tensors after all.
    pub fn is_aborted_after_claim(&self) -> bool {
        // SYNC: claimed. SeqCst: either the abort is seen here, or the claim by who has set it (is_claimed).
        P::fence(Ordering::SeqCst);
        self.abort().is_some()
    }

    /// Says why, unless it was said before; answers what stays. Wakes everybody.
    pub fn set_abort(&self, word: u64) -> u64 {
        // SYNC: abort. AcqRel: pairs with abort.
        let stays = match self.abort.0.compare_exchange(0, word, Ordering::AcqRel) {
            Ok(_) => word,
            Err(earlier) => earlier,
        };
        self.ring(0..=EXECUTOR_BELL);
        stays
    }

    /// Rank: gives up the call of this sequence, before it gives its tensors back.
    pub fn fail(&self, sequence: u64) {
        let mark = !sequence;
        let mut found = self.failed.0.load(Ordering::Acquire);
        while found < mark {
            // SYNC: failed. AcqRel, and the fence: what the caller writes to its tensors comes after it.
            match self
                .failed
                .0
                .compare_exchange(found, mark, Ordering::AcqRel)
            {
                Ok(_) => break,
                Err(other) => found = other,
            }
        }
        P::fence(Ordering::SeqCst);
    }

    /// Rank, at the end of a call: whether it is void after all.
    pub fn is_failed(&self, sequence: u64) -> bool {
        // SYNC: failed. The fence: tensors that this call has read come before it, so if one was given back
        // before it was read, the mark is seen.
        P::fence(Ordering::Acquire);
        let mark = self.failed.0.load(Ordering::Acquire);
        mark != 0 && !mark <= sequence
    }

    /// Wakes those of `owners` who sleep; what they wait for was stored before.
    pub fn ring(&self, owners: impl IntoIterator<Item = usize>) {
        // SYNC: bell. SeqCst: either the sleeper's look, after its own fence, sees what was stored before this one, or
        // its odd bell is seen here.
        P::fence(Ordering::SeqCst);
        for owner in owners {
            let bell = self.bell(owner);
            let value = bell.load(Ordering::Relaxed);
            // Who loses the exchange finds the bell rung by another.
            if !value.is_multiple_of(2)
                && bell
                    .compare_exchange(value, value.wrapping_add(1), Ordering::AcqRel)
                    .is_ok()
            {
                P::wake(bell);
            }
        }
    }

    /// Waits until `look` finds something, on the bell of `owner`, on which nobody else may wait.
    ///
    /// # Errors
    /// [`Stopped`], if the epoch is over or patience at its end, and there is nothing even then.
    pub fn wait<T>(
        &self,
        owner: usize,
        patience: &mut impl Patience,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T, Stopped> {
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            if let Some(abort) = self.abort() {
                // What was published before the abort is visible now.
                return look().ok_or(Stopped::Aborted(abort));
            }
            match patience.next() {
                Step::Look => {}
                Step::Sleep(at_most) => {
                    let bell = self.bell(owner);
                    let asleep = bell.load(Ordering::Relaxed) | 1;
                    bell.store(asleep, Ordering::Relaxed);
                    // SYNC: bell. SeqCst: pairs with ring.
                    P::fence(Ordering::SeqCst);
                    let found = look();
                    if found.is_none() && self.abort().is_none() {
                        P::sleep(bell, asleep, at_most);
                    }
                    // Even again, unless who rang has made it so.
                    let _ = bell.compare_exchange(asleep, asleep.wrapping_add(1), Ordering::AcqRel);
                    if let Some(found) = found {
                        return Ok(found);
                    }
                }
                Step::Expired => return look().ok_or(Stopped::Expired),
            }
        }
    }
}
