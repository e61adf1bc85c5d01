//! What a kernel is given.
//!
//! Owns the argument block of one reduction and states once what its pointers must be, so that each
//! kernel can refer to it. Made by [`reduce`](mod@crate::reduce), read by `scalar` and `simd`. Refuses to validate:
//! that is done before.

/// One reduction's memory.
///
/// INVARIANTS, upheld by the caller of [`Reducer::run`](crate::Reducer::run) where they concern memory and by that
/// function where they concern counts:
/// - READ: every `srcs` pointer is valid for reads of `len_bytes`.
/// - WRITE: every `dsts` pointer is valid for writes of `len_bytes`.
/// - ALIGNED: every pointer is aligned to the element.
/// - WHOLE: `len_bytes` is a multiple of the element's size and at most `isize::MAX`.
/// - OVERLAP: a destination is equal to a source or disjoint from it, and destinations are disjoint
///   from each other.
/// - COUNT: there is a source and a destination.
pub(crate) struct Job<'a> {
    /// One pointer into each rank's data, in rank order.
    pub(crate) srcs: &'a [*const u8],
    /// Where the result goes, to each of them.
    pub(crate) dsts: &'a [*mut u8],
    /// Bytes of each source and destination.
    pub(crate) len_bytes: usize,
    /// Whether stores may bypass the caches.
    pub(crate) streaming: bool,
}

/// A reduction for one dtype, operator and path.
///
/// # Safety
/// The job's invariants hold, and the CPU has the path's features.
pub(crate) type Kernel = unsafe fn(&Job<'_>);
