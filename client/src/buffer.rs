//! Buffers: typed memory that reductions work on.
//!
//! Owns the typed view of a range of shared memory. A buffer is moved into a reduction and comes back
//! when it is done, so that no slice of it can exist while the executor writes. Dropping one tells the
//! executor, which reuses the bytes only when nothing in flight names them.
#![allow(unsafe_code)] // room: shared memory

use crate::attach::Errand;
use crate::host_lane::Tensor;
use allreduce_contract::Dtype;
use allreduce_contract::memory::{Mapping, MemoryError, SealedMemory};
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use tokio::sync::mpsc;

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is an element type of the contract.
///
/// # Safety
/// The type has exactly the size of its dtype, an alignment of at most that, and every bit pattern is a
/// value.
pub unsafe trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its element type.
    const DTYPE: Dtype;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),+) => {
        $(
            impl sealed::Sealed for $type {}
            const _: () = assert!(size_of::<$type>() == Dtype::$dtype.size_bytes());
            const _: () = assert!(align_of::<$type>() <= Dtype::$dtype.size_bytes());
            // SAFETY: size and alignment are asserted above; integers, floats and half's wrappers of
            // u16 have no invalid bit patterns.
            unsafe impl Element for $type {
                const DTYPE: Dtype = Dtype::$dtype;
            }
        )+
    };
}

element!(f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => Bf16, i32 => I32, i64 => I64);

/// The worker's own memory, to be registered with one communicator after the other; its contents outlive
/// each. It cannot be made from, nor turned into, a file descriptor: nobody but this value and the executor
/// it is registered with can reach the bytes, which is what makes a buffer's slices sound.
#[derive(Debug)]
pub struct Memory(SealedMemory);

impl Memory {
    /// Allocates `len_bytes` (at least 1) zero bytes.
    ///
    /// # Errors
    /// [`MemoryError`]: the machine or the cgroup has not that much.
    pub fn create(len_bytes: NonZeroUsize) -> Result<Self, MemoryError> {
        SealedMemory::create(c"allreduce-client", len_bytes).map(Self)
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> NonZeroUsize {
        self.0.len_bytes()
    }

    pub(crate) fn sealed(&self) -> &SealedMemory {
        &self.0
    }
}

/// Memory for `len()` elements that reductions can work on, and that only this value gives access to.
pub struct Buffer<T: Element> {
    id: u64,
    start: NonNull<u8>,
    num_elems: usize,
    /// The worker's own memory, if the buffer was registered.
    memory: Option<Memory>,
    errands: mpsc::UnboundedSender<Errand>,
    // Keeps `start` mapped.
    mapping: Arc<Mapping>,
    _elements: PhantomData<T>,
}

// SAFETY: the buffer is the only access of this process to its bytes, like a Box<[T]>, and T is Send.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: shared references give shared slices only, and T is Sync.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    /// A view of `num_elems` elements at `offset_bytes` of a mapping; none if they leave it or are not
    /// aligned.
    ///
    /// The caller has got this range from the executor, which gives no range twice, and makes no other
    /// buffer of it.
    pub(crate) fn new(
        id: u64,
        mapping: Arc<Mapping>,
        offset_bytes: u64,
        num_elems: usize,
        memory: Option<Memory>,
        errands: mpsc::UnboundedSender<Errand>,
    ) -> Option<Self> {
        let len_bytes = num_elems.checked_mul(size_of::<T>())?;
        let start = mapping.range(offset_bytes, u64::try_from(len_bytes).ok()?)?;
        if !start.cast::<T>().is_aligned() {
            return None;
        }
        Some(Self {
            id,
            start,
            num_elems,
            memory,
            errands,
            mapping,
            _elements: PhantomData,
        })
    }

    /// Where element `start` is.
    pub(crate) fn tensor(&self, start: usize) -> Tensor {
        let offset_bytes = start.min(self.num_elems) * size_of::<T>();
        // SAFETY: at most the end of the buffer, whose elements are mapped as long as self.
        let at = unsafe { self.start.add(offset_bytes) };
        let in_mapping = at.addr().get() - self.mapping.start().addr().get();
        Tensor {
            start: at,
            in_arena: self.memory.is_none().then_some(in_mapping as u64),
            buffer_id: self.id,
            in_buffer: offset_bytes as u64,
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether it is of the membership whose thread takes these errands. Ids do not say so: each
    /// executor counts sessions and buffers from 1.
    pub(crate) fn is_of(&self, errands: &mpsc::UnboundedSender<Errand>) -> bool {
        self.errands.same_channel(errands)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.num_elems
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.num_elems == 0
    }

    /// Its elements.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `start` is aligned for T and num_elems elements from it are mapped as long as self
        // (new checked, the mapping is held); every bit pattern is a T. Nobody writes them while the
        // reference lives: this process only through &mut self, and the executor only during a
        // reduction, for which self would have been moved away.
        unsafe { std::slice::from_raw_parts(self.start.cast::<T>().as_ptr(), self.num_elems) }
    }

    /// Its elements, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as for as_slice; and nobody else reads them either: no other buffer of this process
        // has them (the executor gives no range twice), and the executor reads only in a reduction.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast::<T>().as_ptr(), self.num_elems) }
    }

    /// Gives a registered buffer's memory back; none for an allocated buffer, which is released.
    /// The contents stay, so that they can be registered again in the next epoch.
    pub fn into_memory(mut self) -> Option<Memory> {
        self.memory.take()
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        // If the thread is gone, the session is, and the buffer with it.
        let _ = self.errands.send(Errand::Release(self.id));
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("id", &self.id)
            .field("dtype", &T::DTYPE)
            .field("num_elems", &self.num_elems)
            .finish_non_exhaustive()
    }
}
