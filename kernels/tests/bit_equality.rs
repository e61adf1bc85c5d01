//! Every path of this machine against the scalar reference, bit for bit.
#![allow(unsafe_code)] // room: SIMD
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use allreduce_contract::{Dtype, Op};
use allreduce_kernels::{Path, ReduceError, Reducer, Stores, reduce, reference};
use proptest::prelude::*;

/// Bytes on each side of a buffer that nothing may touch.
const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0xa5;

/// Memory for one rank's elements, at a chosen distance from a cache line.
struct Buffer {
    memory: Vec<CacheLine>,
    start: usize,
    len_bytes: usize,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine([u8; 64]);

impl Buffer {
    fn new(contents: &[u8], misalignment_bytes: usize) -> Self {
        let start = GUARD_BYTES + misalignment_bytes;
        let lines = (start + contents.len() + GUARD_BYTES).div_ceil(64);
        let mut buffer = Buffer {
            memory: vec![CacheLine([GUARD; 64]); lines],
            start,
            len_bytes: contents.len(),
        };
        for (index, byte) in contents.iter().enumerate() {
            buffer.memory[(start + index) / 64].0[(start + index) % 64] = *byte;
        }
        buffer
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory
            .as_mut_ptr()
            .cast::<u8>()
            .wrapping_add(self.start)
    }

    fn contents(&self) -> Vec<u8> {
        let bytes: Vec<u8> = self.memory.iter().flat_map(|line| line.0).collect();
        let (before, rest) = bytes.split_at(self.start);
        let (contents, after) = rest.split_at(self.len_bytes);
        let untouched = |bytes: &[u8]| bytes.iter().all(|byte| *byte == GUARD);
        assert!(untouched(before) && untouched(after), "written outside");
        contents.to_vec()
    }
}

/// Where results go: into the source of that rank, or into a buffer of their own.
#[derive(Debug, Clone, Copy)]
enum Destination {
    InPlace { rank: usize },
    OutOfPlace { misalignment_elems: usize },
}

#[derive(Debug, Clone)]
struct Layout {
    src_misalignments_elems: Vec<usize>,
    destinations: Vec<Destination>,
    stores: Stores,
}

impl Layout {
    fn plain(world_size: usize) -> Self {
        Layout {
            src_misalignments_elems: vec![0; world_size],
            destinations: vec![Destination::OutOfPlace {
                misalignment_elems: 0,
            }],
            stores: Stores::Auto,
        }
    }
}

/// Runs one path and compares every destination, every other source and all guards.
fn check(path: Path, dtype: Dtype, op: Op, contents: &[Vec<u8>], layout: &Layout) {
    let size_bytes = dtype.size_bytes();
    let views: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
    let expected = reference::reduce_bytes(dtype, op, &views).unwrap();

    let mut sources: Vec<Buffer> = contents
        .iter()
        .zip(&layout.src_misalignments_elems)
        .map(|(contents, misalignment)| Buffer::new(contents, misalignment * size_bytes))
        .collect();
    let mut results: Vec<Option<Buffer>> = layout
        .destinations
        .iter()
        .map(|destination| match destination {
            Destination::InPlace { .. } => None,
            Destination::OutOfPlace { misalignment_elems } => Some(Buffer::new(
                &vec![0x11; expected.len()],
                misalignment_elems * size_bytes,
            )),
        })
        .collect();
    let src_pointers: Vec<*mut u8> = sources.iter_mut().map(Buffer::as_mut_ptr).collect();
    let dsts: Vec<*mut u8> = layout
        .destinations
        .iter()
        .zip(&mut results)
        .map(|(destination, result)| match destination {
            Destination::InPlace { rank } => src_pointers[*rank],
            Destination::OutOfPlace { .. } => result.as_mut().unwrap().as_mut_ptr(),
        })
        .collect();
    let srcs: Vec<*const u8> = src_pointers.iter().map(|src| src.cast_const()).collect();

    let reducer = Reducer::with_path(dtype, op, path)
        .unwrap()
        .with_stores(layout.stores);
    // SAFETY: every pointer is to a live buffer of the contents' length, aligned to the element and touched
    // only through these pointers meanwhile; destinations are sources or buffers of their own.
    unsafe { reducer.run(&srcs, &dsts, expected.len() / size_bytes) }.unwrap();

    let mut untouched: Vec<bool> = vec![true; sources.len()];
    for (destination, result) in layout.destinations.iter().zip(&results) {
        let written = match destination {
            Destination::InPlace { rank } => {
                untouched[*rank] = false;
                &sources[*rank]
            }
            Destination::OutOfPlace { .. } => result.as_ref().unwrap(),
        };
        let written = written.contents();
        if let Some(at) = (0..expected.len()).find(|at| written[*at] != expected[*at]) {
            let element = at / size_bytes * size_bytes..at / size_bytes * size_bytes + size_bytes;
            let inputs: Vec<&[u8]> = views.iter().map(|view| &view[element.clone()]).collect();
            panic!(
                "{path} {dtype} {op}, byte {at} of {}: {inputs:02x?} gave {:02x?}, not {:02x?}",
                expected.len(),
                &written[element.clone()],
                &expected[element.clone()],
            );
        }
    }
    for (source, contents) in sources
        .iter()
        .zip(contents)
        .zip(untouched)
        .filter_map(|(pair, untouched)| untouched.then_some(pair))
    {
        assert_eq!(&source.contents(), contents, "a source was written");
    }
}

fn available_paths() -> impl Iterator<Item = Path> {
    Path::ALL.into_iter().filter(|path| path.is_available())
}

fn legal(dtype: Dtype, op: Op) -> bool {
    !(dtype.is_integer() && op == Op::Avg)
}

/// SplitMix64's step (Steele, Lea and Flood 2014): enough randomness from one seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// Exponent and mantissa bits; integers use those of a float of their size.
fn float_bits(dtype: Dtype) -> (u32, u32) {
    match dtype {
        Dtype::F16 => (5, 10),
        Dtype::Bf16 => (8, 7),
        Dtype::F32 | Dtype::I32 => (8, 23),
        Dtype::F64 | Dtype::I64 => (11, 52),
    }
}

/// How one element's bits are drawn.
#[derive(Debug, Clone, Copy)]
enum Values {
    /// Around one, so that sums round and stay finite.
    Ordinary,
    /// NaNs of any payload and sign, infinities, zeros, subnormals, largest values.
    Special,
    /// Any bits at all.
    Any,
    /// All three.
    Mixed,
}

fn draw(values: Values, dtype: Dtype, random: &mut Random) -> u64 {
    let (exponent_bits, mantissa_bits) = float_bits(dtype);
    let sign = (random.next() & 1) << (exponent_bits + mantissa_bits);
    let mantissa = random.next() & ((1 << mantissa_bits) - 1);
    let all_exponent = ((1 << exponent_bits) - 1) << mantissa_bits;
    match values {
        Values::Ordinary => {
            let one = (1 << (exponent_bits - 1)) - 1;
            let exponent = one - 3 + random.next() % 6;
            sign | exponent << mantissa_bits | mantissa
        }
        Values::Special => {
            sign | match random.next() % 8 {
                0 => 0,
                1 => mantissa,
                2 => 1,
                3 => 1 << mantissa_bits,
                4 => all_exponent,
                5 => all_exponent | mantissa.max(1),
                6 => all_exponent - 1,
                _ => (all_exponent - (1 << mantissa_bits)) | mantissa,
            }
        }
        Values::Any => random.next(),
        Values::Mixed => {
            let values = [Values::Ordinary, Values::Special, Values::Any];
            draw(values[(random.next() % 3) as usize], dtype, random)
        }
    }
}

fn encode(dtype: Dtype, bits: impl Iterator<Item = u64>) -> Vec<u8> {
    match dtype.size_bytes() {
        2 => bits.flat_map(|bits| (bits as u16).to_ne_bytes()).collect(),
        4 => bits.flat_map(|bits| (bits as u32).to_ne_bytes()).collect(),
        _ => bits.flat_map(u64::to_ne_bytes).collect(),
    }
}

fn layouts(world_size: usize) -> impl Strategy<Value = Layout> {
    let destination = (any::<bool>(), 0..33usize);
    (
        prop_oneof![
            Just(vec![0; world_size]),
            prop::collection::vec(0..33usize, world_size)
        ],
        prop::collection::vec(destination, 1..=16),
        any::<bool>(),
        Just((0..world_size).collect::<Vec<_>>()).prop_shuffle(),
        prop::sample::select(vec![Stores::Auto, Stores::Cached, Stores::Streaming]),
    )
        .prop_map(
            |(src_misalignments_elems, drawn, aligned, mut free_ranks, stores)| Layout {
                src_misalignments_elems,
                destinations: drawn
                    .into_iter()
                    .map(|(in_place, misalignment)| match free_ranks.pop() {
                        Some(rank) if in_place => Destination::InPlace { rank },
                        _ => Destination::OutOfPlace {
                            misalignment_elems: if aligned { 0 } else { misalignment },
                        },
                    })
                    .collect(),
                stores,
            },
        )
}

fn values() -> impl Strategy<Value = Values> {
    prop::sample::select(vec![
        Values::Ordinary,
        Values::Special,
        Values::Any,
        Values::Mixed,
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    /// All dtypes, operators and paths of each drawn case.
    #[test]
    fn every_path_equals_the_reference(
        (world_size, layout) in (1..=16usize).prop_flat_map(|n| (Just(n), layouts(n))),
        num_elems in prop_oneof![8 => 0..300usize, 1 => 300..5000usize],
        values in values(),
        seed in any::<u64>(),
    ) {
        for dtype in Dtype::ALL {
            let mut random = Random(seed);
            let contents: Vec<Vec<u8>> = (0..world_size)
                .map(|_| encode(dtype, (0..num_elems).map(|_| draw(values, dtype, &mut random))))
                .collect();
            for op in Op::ALL.into_iter().filter(|op| legal(dtype, *op)) {
                for path in available_paths() {
                    check(path, dtype, op, &contents, &layout);
                }
            }
        }
    }
}

/// Each 16-bit pattern alone, and with partners that make it round, overflow, cancel or stay.
#[test]
fn every_pattern_of_the_16_bit_types() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let (exponent_bits, mantissa_bits) = float_bits(dtype);
        let all_exponent = ((1u64 << exponent_bits) - 1) << mantissa_bits;
        let one = ((1u64 << (exponent_bits - 1)) - 1) << mantissa_bits;
        let patterns = || 0..=u64::from(u16::MAX);
        let partner_of: [&dyn Fn(u64) -> u64; 10] = [
            &|_| 0x8000,
            &|_| 1,
            &|_| one + 1,
            &|_| all_exponent - 1,
            &|_| all_exponent,
            &|_| all_exponent | 1,
            // Half a unit in the last place of the pattern, where it is large enough; and a little more.
            &|bits| {
                (bits & 0x7fff).saturating_sub((u64::from(mantissa_bits) + 1) << mantissa_bits)
                    & all_exponent
            },
            &|bits| {
                (bits & 0x7fff).saturating_sub((u64::from(mantissa_bits) + 1) << mantissa_bits)
                    & all_exponent
                    | 1
            },
            &|bits| bits ^ 0x8000,
            &|bits| bits.wrapping_mul(0x9e37) & 0xffff,
        ];
        let alone = vec![encode(dtype, patterns())];
        for path in available_paths() {
            for op in Op::ALL {
                check(path, dtype, op, &alone, &Layout::plain(1));
                for partner in partner_of {
                    let partners = encode(dtype, patterns().map(partner));
                    let pair = [alone[0].clone(), partners];
                    check(path, dtype, op, &pair, &Layout::plain(2));
                }
            }
        }
    }
}

/// A destination large enough that stores stream without being asked to.
#[test]
fn large_destinations_stream() {
    let num_elems = allreduce_kernels::reduce::STREAMING_MIN_FOOTPRINT_BYTES / 6 + 37;
    let mut random = Random(7);
    let contents: Vec<Vec<u8>> = (0..2)
        .map(|_| encode(Dtype::Bf16, (0..num_elems).map(|_| random.next())))
        .collect();
    for path in available_paths() {
        let mut layout = Layout::plain(2);
        check(path, Dtype::Bf16, Op::Sum, &contents, &layout);
        layout.destinations = vec![
            Destination::OutOfPlace {
                misalignment_elems: 3
            };
            2
        ];
        check(path, Dtype::Bf16, Op::Sum, &contents, &layout);
        layout.destinations = vec![Destination::InPlace { rank: 1 }];
        check(path, Dtype::Bf16, Op::Sum, &contents, &layout);
    }
}

/// A thread stands in for another process that writes a source meanwhile: whatever is read of it,
/// all destinations must get the same.
#[test]
fn all_destinations_agree_while_a_source_changes() {
    const NUM_ELEMS: usize = 5000;
    let scribbled: Vec<AtomicU16> = (0..NUM_ELEMS).map(|_| AtomicU16::new(0)).collect();
    let steady = vec![0x3c00u16; NUM_ELEMS];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(3);
            while !stop.load(Ordering::Relaxed) {
                for element in &scribbled {
                    element.store(random.next() as u16, Ordering::Relaxed);
                }
            }
        });
        for path in available_paths() {
            for dtype in [Dtype::F16, Dtype::Bf16] {
                for num_elems in [7, 100, NUM_ELEMS] {
                    let mut results = vec![vec![0u16; num_elems]; 8];
                    let dsts: Vec<*mut u8> = results
                        .iter_mut()
                        .map(|result| result.as_mut_ptr().cast())
                        .collect();
                    let srcs = [steady.as_ptr().cast(), scribbled.as_ptr().cast()];
                    let reducer = Reducer::with_path(dtype, Op::Sum, path).unwrap();
                    for _ in 0..50 {
                        // SAFETY: live, aligned buffers of at least num_elems elements; the one
                        // that changes is the point of the test.
                        unsafe { reducer.run(&srcs, &dsts, num_elems) }.unwrap();
                    }
                    assert!(results.iter().all(|result| *result == results[0]));
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn refusals_are_typed_and_touch_nothing() {
    let mut memory = [1u8; 64];
    let dst: *mut u8 = memory.as_mut_ptr();
    let src = dst.cast_const();
    let refused = |dtype, op, srcs: &[*const u8], dsts: &[*mut u8], num_elems| {
        // SAFETY: refused before any memory is touched.
        unsafe { reduce(dtype, op, srcs, dsts, num_elems) }.unwrap_err()
    };
    for dtype in [Dtype::I32, Dtype::I64] {
        let error = refused(dtype, Op::Avg, &[src], &[dst], 1);
        assert_eq!(error, ReduceError::IntegerAvg { dtype });
        for path in available_paths() {
            let error = Reducer::with_path(dtype, Op::Avg, path).unwrap_err();
            assert_eq!(error, ReduceError::IntegerAvg { dtype });
        }
    }
    for given in [0, 17] {
        let error = refused(Dtype::F32, Op::Sum, &vec![src; given], &[dst], 1);
        assert_eq!(error, ReduceError::SourceCount { given });
        let error = refused(Dtype::F32, Op::Sum, &[src], &vec![dst; given], 1);
        assert_eq!(error, ReduceError::DestinationCount { given });
    }
    for num_elems in [usize::MAX, usize::MAX / 4, isize::MAX as usize / 4 + 1] {
        let dtype = Dtype::F32;
        let error = refused(dtype, Op::Sum, &[src], &[dst], num_elems);
        assert_eq!(error, ReduceError::TooLong { dtype, num_elems });
    }
    assert_eq!(memory, [1; 64]);
}

#[test]
fn no_elements_need_no_memory() {
    let aligned_nowhere: *mut u8 = std::ptr::without_provenance_mut(64);
    for path in available_paths() {
        let reducer = Reducer::with_path(Dtype::Bf16, Op::Max, path).unwrap();
        // SAFETY: with no elements any pointer will do.
        unsafe { reducer.run(&[aligned_nowhere.cast_const()], &[aligned_nowhere], 0) }.unwrap();
    }
}

/// Says which paths the other tests covered. Shown with `--nocapture`.
#[test]
fn paths_of_this_machine() {
    for path in Path::ALL {
        if path.is_available() {
            println!("tested: {path}");
        } else {
            println!("skipped: {path}: this machine lacks its instructions");
            let error = Reducer::with_path(Dtype::F32, Op::Sum, path).unwrap_err();
            assert_eq!(error, ReduceError::PathUnavailable { path });
        }
    }
    assert!(Path::best().is_available());
}
