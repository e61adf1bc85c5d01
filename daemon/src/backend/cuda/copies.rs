//! A reduction by copy engines: for large tensors, and for GPUs that cannot reach each other's memory.
//!
//! Owns what is enqueued for a piece. A piece has a slice for each rank. *Gather*: slice r of every peer is copied into
//! the staging region of rank r, which a kernel then reduces there, with its own slice, in rank order. *Spread*: every
//! rank copies every slice's result. At step k rank r copies from rank r + k, so no two GPUs copy from the same at a
//! time. Nothing waits but streams for streams: in between all of them *meet* (each waits for what the others hold),
//!
//! - before the gather of the first piece: peers have got to this reduction, so their sources are there, and no kernel of
//!   an earlier one reads this rank's staging any more;
//! - before the spread: all results are there, and nobody reads a source any more, which may be the destination too;
//! - after it: nobody reads results any more, so whatever comes next may write to staging.
//!
//! Ranks of one GPU share its stream, whose order is all they need. Staging may hold anything between calls, as kernels
//! leave it. Nothing waits for a peer's kernel. What was enqueued when its epoch ended, and is let go in the place of a rank
//! that is gone, finds the rank's own abort word set, and its slice becomes NaN everywhere. Refuses pieces that staging has
//! no room for.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::gpu::{Gpu, failed};
use crate::backend::cuda::window::Window;
use crate::backend::cuda::work::{Part, Piece, Site};
use crate::communicator::GpuError;
use allreduce_contract::cuda::{DevicePtr, Entered, copy_between};
use allreduce_contract::kernel::{PACK_BYTES, ReduceCopied};
use std::sync::Arc;

/// A piece, cut into a slice for each rank; the last ones may be short or empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slices {
    num_elems: u64,
    elem_bytes: u64,
    /// Of each slice, whole packs: so results are aligned wherever the tensors are.
    slice_elems: u64,
}

impl Slices {
    fn of(num_elems: u64, elem_bytes: u64, ranks: u64) -> Self {
        let pack_elems = PACK_BYTES / elem_bytes;
        let packs = num_elems.div_ceil(pack_elems).div_ceil(ranks.max(1));
        Self {
            num_elems,
            elem_bytes,
            slice_elems: packs * pack_elems,
        }
    }

    /// From one slice to the next.
    fn stride_bytes(self) -> u64 {
        self.slice_elems * self.elem_bytes
    }

    /// Where a slice is in the piece.
    fn offset_bytes(self, slice: u64) -> u64 {
        (slice * self.slice_elems).min(self.num_elems) * self.elem_bytes
    }

    fn elems(self, slice: u64) -> u64 {
        let before = slice * self.slice_elems;
        self.num_elems.saturating_sub(before).min(self.slice_elems)
    }
}

/// A piece that is to be enqueued.
#[derive(Debug)]
pub(super) struct Copies<'a> {
    /// In rank order.
    parts: &'a [Part],
    piece: Piece,
    slices: Slices,
    shape: (u32, u32),
}

/// Memory of a rank.
type Memory<'a> = (DevicePtr, &'a Window);

impl<'a> Copies<'a> {
    /// `shape`: blocks and threads of the kernel that reduces a slice.
    ///
    /// # Errors
    /// [`GpuError::NoKernels`] if the slices do not fit a staging region: the plan prevents it.
    pub(super) fn new(
        parts: &'a [Part],
        piece: Piece,
        shape: (u32, u32),
    ) -> Result<Self, GpuError> {
        let ranks = parts.len() as u64;
        let slices = Slices::of(piece.num_elems, piece.dtype.size_bytes() as u64, ranks);
        let needed = slices.stride_bytes().saturating_mul(ranks);
        let rooms = parts.iter().map(|part| part.window.staging().1);
        let room = rooms.min().unwrap_or(0);
        if needed > room {
            return Err(GpuError::NoKernels(format!(
                "copies of {needed} bytes, where staging has {room}"
            )));
        }
        Ok(Self {
            parts,
            piece,
            slices,
            shape,
        })
    }

    /// What a piece adds to the queue of a GPU's stream, at most.
    pub(super) fn entries(parts: &[Part], gpu: &Arc<Gpu>) -> u64 {
        let ranks = parts.len() as u64;
        let here = parts.iter().filter(|part| part.is_on(gpu)).count() as u64;
        // A rank gathers a slice from each other, reduces one, spreads all; each of three meetings takes a record, and a
        // wait for each other GPU.
        here * 2 * ranks + 3 * ranks
    }

    pub(super) fn enqueue(&self, sites: &[&Site]) -> Result<(), GpuError> {
        if self.piece.offset_bytes == 0 {
            meet(sites)?;
        }
        for site in sites {
            let entered = site.gpu.context.enter().map_err(failed("context"))?;
            for (rank, part) in self.parts_on(site) {
                self.gather(&entered, rank, part)?;
                self.reduce(site, &entered, rank, part)?;
            }
        }
        meet(sites)?;
        for site in sites {
            let entered = site.gpu.context.enter().map_err(failed("context"))?;
            for (rank, part) in self.parts_on(site) {
                self.spread(&entered, rank, part)?;
            }
        }
        meet(sites)
    }

    fn parts_on(&self, site: &Site) -> impl Iterator<Item = (usize, &'a Part)> {
        let parts = self.parts.iter().enumerate();
        parts.filter(|(_, part)| part.is_on(&site.gpu))
    }

    /// All ranks from `rank` on, in a ring.
    fn ring_from(&self, rank: usize) -> impl Iterator<Item = (usize, &'a Part)> {
        let ranks = self.parts.iter().enumerate();
        ranks.clone().skip(rank).chain(ranks.take(rank))
    }

    /// Where a rank keeps a slice: what it has gathered from the rank of that number, and, in its own place, the result.
    fn slot(&self, part: &Part, rank: usize) -> DevicePtr {
        part.window.staging().0 + rank as u64 * self.slices.stride_bytes()
    }

    /// Where a slice is in a rank's source.
    fn source(&self, part: &Part, slice: usize) -> DevicePtr {
        part.src + self.piece.offset_bytes + self.slices.offset_bytes(slice as u64)
    }

    /// Copies this rank's slice of every peer's source into its staging.
    fn gather(&self, entered: &Entered<'_>, rank: usize, part: &Part) -> Result<(), GpuError> {
        for (peer, from) in self.ring_from(rank).skip(1) {
            let to = (self.slot(part, peer), part.window.as_ref());
            let from = (self.source(from, rank), from.window.as_ref());
            self.copy(entered, to, from, rank)?;
        }
        Ok(())
    }

    /// Reduces what was gathered.
    fn reduce(
        &self,
        site: &Site,
        entered: &Entered<'_>,
        rank: usize,
        part: &Part,
    ) -> Result<(), GpuError> {
        let num_elems = self.slices.elems(rank as u64);
        if num_elems == 0 {
            return Ok(());
        }
        let mut copied = ReduceCopied {
            dst: self.slot(part, rank),
            num_elems,
            world_size: u32::try_from(self.parts.len()).unwrap_or(u32::MAX),
            op: self.piece.op,
            // SYNC: abort. Set before the streams that hold this one up are let go.
            abort: part.window.abort_word(),
            ..ReduceCopied::default()
        };
        for (peer, source) in copied.sources.iter_mut().take(self.parts.len()).enumerate() {
            *source = match peer == rank {
                // Read where it is.
                true => self.source(part, rank),
                false => self.slot(part, peer),
            };
        }
        let (gpu, dtype) = (&site.gpu, self.piece.dtype);
        // SAFETY: the source was checked by the communicator, or the test; slots are apart from it and from each other,
        // and inside the staging region (`new`). All of it is freed only when this is known to be done.
        unsafe {
            site.kernels
                .launch_reduce_copied(gpu, entered, dtype, copied, self.shape)
        }
    }

    /// Copies every slice's result to the rank's destination.
    fn spread(&self, entered: &Entered<'_>, rank: usize, part: &Part) -> Result<(), GpuError> {
        for (peer, from) in self.ring_from(rank) {
            let offset_bytes = self.piece.offset_bytes + self.slices.offset_bytes(peer as u64);
            let to = (part.dst + offset_bytes, part.window.as_ref());
            let from = (self.slot(from, peer), from.window.as_ref());
            self.copy(entered, to, from, peer)?;
        }
        Ok(())
    }

    /// Enqueues the copy of a slice on the stream of the rank that it goes to.
    fn copy(
        &self,
        entered: &Entered<'_>,
        (to, to_window): Memory<'_>,
        (from, from_window): Memory<'_>,
        slice: usize,
    ) -> Result<(), GpuError> {
        let (here, there) = (&to_window.gpu, &from_window.gpu);
        let len_bytes = self.slices.elems(slice as u64) * self.slices.elem_bytes;
        // SAFETY: the stream is live and of the context that is entered; tensors were checked by the communicator, or the
        // test, slots are inside staging (`new`), and never overlap tensors. Streams that touch them otherwise are ordered
        // by flags, or meet. All of it is freed only when this is known to be done.
        unsafe {
            copy_between(
                entered,
                here.stream.raw().cast(),
                (to, &here.context),
                (from, &there.context),
                len_bytes,
            )
        }
        .map_err(failed("copy between GPUs"))
    }
}

/// Makes every GPU's stream wait for all that the others' hold.
fn meet(sites: &[&Site]) -> Result<(), GpuError> {
    if sites.len() < 2 {
        return Ok(());
    }
    for site in sites {
        // SAFETY: the stream is the GPU's own, of the event's context.
        unsafe { site.gpu.milestone.record_on(site.gpu.stream.raw().cast()) }
            .map_err(failed("event"))?;
    }
    for (index, site) in sites.iter().enumerate() {
        for (other, peer) in sites.iter().enumerate() {
            if index != other {
                let waits = site.gpu.stream.wait_for(&peer.gpu.milestone);
                waits.map_err(failed("event"))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_every_element_once_and_begin_at_packs(
            num_elems in 0_u64..5000,
            elem_bytes in prop_oneof![Just(2_u64), Just(4)],
            ranks in 1_u64..=16,
        ) {
            let slices = Slices::of(num_elems, elem_bytes, ranks);
            prop_assert!(slices.stride_bytes().is_multiple_of(PACK_BYTES));
            let mut next = 0;
            for slice in 0..ranks {
                prop_assert_eq!(slices.offset_bytes(slice), next * elem_bytes);
                prop_assert!(slices.elems(slice) <= slices.slice_elems);
                next += slices.elems(slice);
            }
            prop_assert_eq!(next, num_elems);
            // No more room than the piece takes, but for what rounding to packs adds.
            let room = slices.stride_bytes() * ranks;
            prop_assert!(room < num_elems * elem_bytes + PACK_BYTES * (ranks + 1));
        }
    }
}
