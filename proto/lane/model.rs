//! The protocol of the host lanes in every order of its steps, with loom.
//!
//! Owns the models: threads stand for ranks and executor, loom's atomics for words in shared memory, its cells for tensors
//! and staging (an access that another does not happen before is an error), and a mutex with a condition variable for
//! futexes (all threads asleep is an error too). The code under test is that of [`protocol`](super::protocol), whole.
//! Each model is also run on a platform with a fault, and must then fail: else it would show nothing.

#![allow(clippy::unwrap_used)]

use super::protocol::{
    BoardWords, EXECUTOR_BELL, Entry, EntryWords, Found, Line, Patience, RankWords, Reply,
    ReplyWords, Step, Stopped,
};
use super::words::{Platform, Word};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering as LoomOrdering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What is wrong with a platform.
const NOTHING: u8 = 0;
/// Fences do nothing.
const NO_FENCES: u8 = 1;
/// Stores release nothing.
const NO_RELEASE: u8 = 2;

/// Loom's words.
#[derive(Debug)]
struct Model<const FAULT: u8>;

#[derive(Debug)]
struct Words32<const FAULT: u8>(AtomicU32);

#[derive(Debug)]
struct Words64<const FAULT: u8>(AtomicU64);

loom::lazy_static! {
    /// Who sleeps on any word.
    static ref FUTEX: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
}

const fn weakened(fault: u8, order: Ordering) -> LoomOrdering {
    match order {
        Ordering::Release if fault == NO_RELEASE => Ordering::Relaxed,
        order => order,
    }
}

macro_rules! word {
    ($word:ident, $value:ty) => {
        impl<const FAULT: u8> Word<$value> for $word<FAULT> {
            fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, weakened(FAULT, order));
            }

            fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                order: Ordering,
            ) -> Result<$value, $value> {
                self.0
                    .compare_exchange(current, new, order, Ordering::Acquire)
            }
        }
    };
}

word!(Words32, u32);
word!(Words64, u64);

impl<const FAULT: u8> Platform for Model<FAULT> {
    type U32 = Words32<FAULT>;
    type U64 = Words64<FAULT>;

    fn fence(order: Ordering) {
        if FAULT != NO_FENCES {
            fence(order);
        }
    }

    fn sleep(word: &Self::U32, expected: u32, _at_most: Duration) {
        let (mutex, asleep) = &*FUTEX;
        let Ok(guard) = mutex.lock() else { return };
        if word.load(Ordering::Relaxed) == expected {
            drop(asleep.wait(guard));
        }
    }

    fn wake(_word: &Self::U32) {
        let (mutex, asleep) = &*FUTEX;
        let guard = mutex.lock();
        asleep.notify_all();
        drop(guard);
    }
}

fn word32<const FAULT: u8>() -> Words32<FAULT> {
    Words32(AtomicU32::new(0))
}

fn word64<const FAULT: u8>() -> Words64<FAULT> {
    Words64(AtomicU64::new(0))
}

fn board<const FAULT: u8>() -> BoardWords<Model<FAULT>> {
    BoardWords {
        abort: Line(word64()),
        failed: Line(word64()),
        bells: Line(std::array::from_fn(|_| word32())),
        executor_bell: Line(word32()),
    }
}

fn lane<const FAULT: u8>() -> RankWords<Model<FAULT>> {
    let entry = || {
        Line(EntryWords {
            sequence: word64(),
            num_elems: word64(),
            kind: word64(),
            src: word64(),
            dst: word64(),
            src_buffer: word64(),
            dst_buffer: word64(),
            arrived_ns: word64(),
        })
    };
    RankWords {
        entries: [entry(), entry()],
        progress: Line(word64()),
        reply: Line(ReplyWords {
            sequence: word64(),
            code: word64(),
            detail: word64(),
            reduce_ns: word64(),
            skew_ns: word64(),
            waited_ns: word64(),
            claimed: word64(),
        }),
    }
}

/// A tensor, or a part of the staging.
struct Tensor(UnsafeCell<u64>);

#[allow(unsafe_code)] // room: a model's cells
impl Tensor {
    fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    fn get(&self) -> u64 {
        // SAFETY: loom ends the model if a write is concurrent.
        self.0.with(|cell| unsafe { *cell })
    }

    fn set(&self, value: u64) {
        // SAFETY: loom ends the model if another access is concurrent.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }
}

/// Sleeps at once, and never gives up: with it every wait must end because of what others do.
struct Sleepy;

impl Patience for Sleepy {
    fn next(&mut self) -> Step {
        Step::Sleep(Duration::MAX)
    }
}

/// Checks a model. Threads are switched at most so often where they need not be; loom's authors find that two or three
/// such switches find what there is to find.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Names a faulty model in the environment of a process that runs it.
const FAULTY: &str = "ALLREDUCE_FAULTY_MODEL";

/// Models that must fail, by name.
fn faulty_model(name: &str) {
    match name {
        "one shot, one half" => check(2, one_shot::<NOTHING>(3, 1)),
        "one shot, no fences" => check(2, one_shot::<NO_FENCES>(2, 2)),
        "one shot, no release" => check(2, one_shot::<NO_RELEASE>(2, 2)),
        "two shot, no end" => check(2, two_shot::<NOTHING>(Way::NoEnd)),
        "two shot, no release" => check(2, two_shot::<NO_RELEASE>(Way::Direct)),
        "short, no release" => check(2, two_shot::<NO_RELEASE>(Way::Short)),
        "abort, no fences" => check(3, abort_wakes::<NO_FENCES>()),
        "void, no fences" => check(3, void_calls::<NO_FENCES>()),
        "resident, no fences" => check(3, resident::<NO_FENCES>()),
        "resident, no release" => check(3, resident::<NO_RELEASE>()),
        "claim, no fences" => check(3, claim::<NO_FENCES>()),
        _ => {}
    }
}

#[test]
fn faulty() {
    if let Ok(name) = std::env::var(FAULTY) {
        faulty_model(&name);
    }
}

/// Whether loom finds something wrong with a faulty model. In a process of its own: all threads asleep abort it.
fn is_found_wrong(name: &str) -> bool {
    let program = std::env::current_exe().unwrap();
    let ran = std::process::Command::new(program)
        .args(["lane::model::faulty", "--exact"])
        .env(FAULTY, name)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(said.contains("running 1 test"), "{said}");
    !ran.status.success()
}

fn entry(sequence: u64, half: u64) -> Entry {
    Entry {
        sequence,
        kind: half,
        num_elems: 10 * sequence,
        ..Entry::default()
    }
}

// One shot: signatures, staging by turns, sleeping and waking.

struct OneShot<const FAULT: u8> {
    board: BoardWords<Model<FAULT>>,
    lanes: [RankWords<Model<FAULT>>; 2],
    /// By rank: two halves.
    stagings: [[Tensor; 2]; 2],
}

impl<const FAULT: u8> OneShot<FAULT> {
    fn new() -> Self {
        let staging = || [Tensor::new(0), Tensor::new(0)];
        Self {
            board: board(),
            lanes: [lane(), lane()],
            stagings: [staging(), staging()],
        }
    }

    /// One rank's calls. With one half of the staging, or two.
    #[allow(clippy::indexing_slicing)]
    fn run(&self, rank: usize, calls: u64, halves: u64) {
        let peer = 1 - rank;
        for sequence in 1..=calls {
            let half = sequence % halves;
            let index = usize::from(half == 1);
            self.stagings[rank][index].set(sequence);
            self.lanes[rank].publish(&entry(sequence, half));
            self.board.ring([peer]);
            let look = || self.lanes[peer].entry(sequence);
            let found = self.board.wait(rank, &mut Sleepy, look);
            assert_eq!(found, Ok(Found::Here(entry(sequence, half))));
            let read = self.stagings[peer][index].get();
            assert_eq!(read, sequence);
        }
    }
}

fn one_shot<const FAULT: u8>(calls: u64, halves: u64) -> impl Fn() + Sync + Send {
    move || {
        let shared = Arc::new(OneShot::<FAULT>::new());
        let other = Arc::clone(&shared);
        let peer = loom::thread::spawn(move || other.run(1, calls, halves));
        shared.run(0, calls, halves);
        let _ = peer.join();
    }
}

#[test]
fn one_shot_reads_what_was_staged() {
    check(2, one_shot::<NOTHING>(3, 2));
    assert!(is_found_wrong("one shot, one half"));
    assert!(is_found_wrong("one shot, no fences"));
    assert!(is_found_wrong("one shot, no release"));
}

// Two shot: progress, and tensors that go back at the end.

struct TwoShot<const FAULT: u8> {
    board: BoardWords<Model<FAULT>>,
    lanes: [RankWords<Model<FAULT>>; 2],
    /// By rank: two slices of a tensor, reduced in place.
    tensors: [[Tensor; 2]; 2],
    /// By rank: its slice, where results go through the staging.
    stagings: [Tensor; 2],
}

/// Where peers find a rank's slice, and whether all wait at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// In its tensor; all wait.
    Direct,
    /// In its tensor; nobody waits. Wrong.
    NoEnd,
    /// In its staging; nobody waits.
    Short,
}

impl<const FAULT: u8> TwoShot<FAULT> {
    fn new() -> Self {
        let tensor = || [Tensor::new(1), Tensor::new(1)];
        Self {
            board: board(),
            lanes: [lane(), lane()],
            tensors: [tensor(), tensor()],
            stagings: [Tensor::new(0), Tensor::new(0)],
        }
    }

    fn wait_step(&self, rank: usize, peer: usize, step: u64) {
        let waited = self.board.wait(rank, &mut Sleepy, || {
            let lane = self.lanes.get(peer)?;
            (lane.progress() >= step).then_some(())
        });
        assert_eq!(waited, Ok(()));
    }

    #[allow(clippy::indexing_slicing)]
    fn run(&self, rank: usize, way: Way) {
        let peer = 1 - rank;
        self.lanes[rank].publish(&entry(1, 0));
        self.board.ring([peer]);
        let look = || self.lanes[peer].entry(1);
        assert!(self.board.wait(rank, &mut Sleepy, look).is_ok());
        // Its slice, which the peer leaves alone.
        let theirs = self.tensors[peer][rank].get();
        let own = self.tensors[rank][rank].get();
        self.tensors[rank][rank].set(own + theirs);
        if way == Way::Short {
            self.stagings[rank].set(own + theirs);
        }
        self.lanes[rank].set_progress(1);
        self.board.ring([peer]);
        self.wait_step(rank, peer, 1);
        let reduced = match way {
            Way::Direct | Way::NoEnd => self.tensors[peer][peer].get(),
            Way::Short => self.stagings[peer].get(),
        };
        assert_eq!(reduced, 2);
        self.tensors[rank][peer].set(reduced);
        self.lanes[rank].set_progress(2);
        self.board.ring([peer]);
        if way == Way::Direct {
            self.wait_step(rank, peer, 2);
        }
        // Back with its caller.
        for slice in &self.tensors[rank] {
            slice.set(7);
        }
    }
}

fn two_shot<const FAULT: u8>(way: Way) -> impl Fn() + Sync + Send {
    move || {
        let shared = Arc::new(TwoShot::<FAULT>::new());
        let other = Arc::clone(&shared);
        let peer = loom::thread::spawn(move || other.run(1, way));
        shared.run(0, way);
        let _ = peer.join();
    }
}

#[test]
fn two_shot_gives_tensors_back_when_all_are_through() {
    check(2, two_shot::<NOTHING>(Way::Direct));
    check(2, two_shot::<NOTHING>(Way::Short));
    assert!(is_found_wrong("short, no release"));
    assert!(is_found_wrong("two shot, no end"));
    assert!(is_found_wrong("two shot, no release"));
}

// The end of an epoch.

fn abort_wakes<const FAULT: u8>() -> impl Fn() + Sync + Send {
    || {
        let shared = Arc::new((board::<FAULT>(), lane::<FAULT>()));
        let other = Arc::clone(&shared);
        let executor = loom::thread::spawn(move || other.0.set_abort(77));
        let (board, lane) = &*shared;
        // The peer never calls.
        let waited = board.wait(0, &mut Sleepy, || lane.entry(1));
        assert_eq!(waited, Err(Stopped::Aborted(77)));
        let _ = executor.join();
    }
}

#[test]
fn an_abort_wakes_who_sleeps() {
    check(3, abort_wakes::<NOTHING>());
    assert!(is_found_wrong("abort, no fences"));
}

/// One rank gives its call up and its tensor back, and the caller writes it; the other has read it, and asks whether its call
/// is good.
fn void_calls<const FAULT: u8>() -> impl Fn() + Sync + Send {
    || {
        let shared = Arc::new((board::<FAULT>(), AtomicU64::new(1)));
        let other = Arc::clone(&shared);
        let gives_up = loom::thread::spawn(move || {
            let (board, tensor) = &*other;
            board.fail(1);
            tensor.store(99, Ordering::Relaxed);
        });
        let (board, tensor) = &*shared;
        let read = tensor.load(Ordering::Relaxed);
        let is_good = !board.is_failed(1);
        assert!(!is_good || read == 1, "a call went well with {read}");
        let _ = gives_up.join();
    }
}

#[test]
fn a_call_that_read_what_was_given_back_is_void() {
    check(3, void_calls::<NOTHING>());
    assert!(is_found_wrong("void, no fences"));
}

// Lane resident.

struct Resident<const FAULT: u8> {
    board: BoardWords<Model<FAULT>>,
    lane: RankWords<Model<FAULT>>,
    tensor: Tensor,
}

/// A rank calls twice; the executor reduces what is called.
fn resident<const FAULT: u8>() -> impl Fn() + Sync + Send {
    || {
        let shared = Arc::new(Resident::<FAULT> {
            board: board(),
            lane: lane(),
            tensor: Tensor::new(0),
        });
        let executor = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || {
                for sequence in 1..=2 {
                    let look = || shared.lane.entry(sequence);
                    let found = shared.board.wait(EXECUTOR_BELL, &mut Sleepy, look);
                    assert_eq!(found, Ok(Found::Here(entry(sequence, 0))));
                    shared.lane.claim(sequence);
                    shared.tensor.set(2 * shared.tensor.get());
                    shared.lane.answer(sequence, &Reply::wrong(sequence, 0));
                    shared.board.ring([0]);
                }
            })
        };
        for sequence in 1..=2 {
            shared.tensor.set(sequence);
            shared.lane.publish(&entry(sequence, 0));
            shared.board.ring([EXECUTOR_BELL]);
            let look = || shared.lane.reply(sequence);
            let reply = shared.board.wait(0, &mut Sleepy, look);
            assert_eq!(reply, Ok(Reply::wrong(sequence, 0)));
            let reduced = shared.tensor.get();
            assert_eq!(reduced, 2 * sequence);
        }
        let _ = executor.join();
    }
}

#[test]
fn a_doorbell_wakes_and_the_reply_shows_the_result() {
    check(3, resident::<NOTHING>());
    assert!(is_found_wrong("resident, no fences"));
    assert!(is_found_wrong("resident, no release"));
}

/// The executor claims a call while its rank gives up: only one of them has the tensor.
fn claim<const FAULT: u8>() -> impl Fn() + Sync + Send {
    || {
        let shared = Arc::new(Resident::<FAULT> {
            board: board(),
            lane: lane(),
            tensor: Tensor::new(0),
        });
        let other = Arc::clone(&shared);
        let executor = loom::thread::spawn(move || {
            other.lane.claim(1);
            if other.board.is_aborted_after_claim() {
                other.lane.claim(0);
                return;
            }
            other.tensor.set(1);
            other.lane.answer(1, &Reply::default());
        });
        shared.board.set_abort(5);
        while shared.lane.is_claimed(1) && shared.lane.reply(1).is_none() {
            loom::thread::yield_now();
        }
        // Given back.
        shared.tensor.set(2);
        let _ = executor.join();
    }
}

#[test]
fn a_claimed_tensor_is_not_given_back() {
    check(3, claim::<NOTHING>());
    assert!(is_found_wrong("claim, no fences"));
}
