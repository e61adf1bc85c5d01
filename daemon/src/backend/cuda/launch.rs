//! One reduction on its way to the GPUs.
//!
//! Owns what is enqueued for it, and in which order: waits for the ranks' ready flags, the pieces of its [`Work`], writes
//! of their done flags, on each GPU that its ranks are on. [`CudaBackend`](super::CudaBackend) launches reductions in the
//! order in which it accepted them. Refuses to block: a stream takes some thousand entries, and the call for one
//! more waits until there is room; so a reduction of many pieces goes on when earlier ones are done.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::Fault;
use crate::backend::cuda::Lane;
use crate::backend::cuda::gpu::failed;
use crate::backend::cuda::work::{Part, Site, Work};
use crate::communicator::{GpuError, Signature};
use allreduce_contract::cuda::{CudaError, wait_flags, write_flags};

/// Entries that may wait on a GPU, a fraction of what its queue takes. A piece that takes more goes alone.
const MAX_ENQUEUED: u64 = 640;

/// A reduction that was promised to its ranks.
pub(crate) struct Accepted {
    work: Work,
    fault: Option<Fault>,
    /// Elements whose pieces are enqueued; none before the waits are.
    enqueued_elems: Option<u64>,
}

impl Accepted {
    pub(super) fn new(work: Work, fault: Option<Fault>) -> Self {
        Self {
            work,
            fault,
            enqueued_elems: None,
        }
    }

    /// Whether a rank of it is on the lane's GPU.
    pub(super) fn is_on(&self, lane: &Lane) -> bool {
        self.work.is_on(&lane.site.gpu)
    }

    /// Enqueues as much as there is room for; whether that was all. Piece by piece on all GPUs, since what is enqueued
    /// for a piece waits for each other.
    pub(super) fn advance(&mut self, lanes: &mut [Lane]) -> Result<bool, GpuError> {
        let num_elems = self.work.signature.num_elems;
        let mut lanes: Vec<&mut Lane> = lanes.iter_mut().filter(|lane| self.is_on(lane)).collect();
        let mut first = match self.enqueued_elems {
            Some(first) => first,
            None => {
                for lane in &lanes {
                    self.wait_ready(&lane.site)?;
                }
                0
            }
        };
        self.enqueued_elems = Some(first);
        while first < num_elems {
            let is_full = |lane: &&mut Lane| {
                let waiting = lane.entries_enqueued - lane.entries_done;
                waiting > 0 && waiting + self.work.entries(&lane.site.gpu) > MAX_ENQUEUED
            };
            if lanes.iter().any(is_full) {
                return Ok(false);
            }
            let sites: Vec<&Site> = lanes.iter().map(|lane| &lane.site).collect();
            first += self.work.enqueue(&sites, first)?;
            for lane in &mut lanes {
                lane.entries_enqueued += self.work.entries(&lane.site.gpu);
            }
            self.enqueued_elems = Some(first);
        }
        for lane in &lanes {
            self.write_done(&lane.site)?;
        }
        Ok(true)
    }

    fn wait_ready(&self, site: &Site) -> Result<(), GpuError> {
        let entered = site.gpu.context.enter().map_err(failed("context"))?;
        let ready = self.work.parts_on(&site.gpu).filter_map(|part| {
            let ticket = part.ticket.filter(|ticket| ticket.wait_ready)?;
            Some((part.window.ready_flag(ticket.stream), ticket.value))
        });
        // SYNC: ready flag. The rank's stream writes it behind what writes its source; from here on this stream
        // sees that.
        // SAFETY: the stream is live, its context is entered, and the flags are the windows', which are freed
        // only behind a fence (`defer`).
        unsafe { wait_flags(&entered, site.gpu.stream.raw().cast(), ready) }
            .map_err(failed("ready flags"))
    }

    fn write_done(&self, site: &Site) -> Result<(), GpuError> {
        let entered = site.gpu.context.enter().map_err(failed("context"))?;
        let here = self.work.parts_on(&site.gpu);
        if let Some(fault) = self.fault {
            let damaged = here
                .clone()
                .find(|part| part.window.rank.get() == fault.rank);
            if let Some(part) = damaged {
                damage(part, self.work.signature, fault).map_err(failed("fault"))?;
            }
        }
        let done = here.filter_map(|part| {
            let ticket = part.ticket?;
            Some((part.window.done_flag(ticket.stream), ticket.value))
        });
        // SYNC: done flag. The rank's stream that waits for it sees the result.
        // SAFETY: as for the ready flags.
        unsafe { write_flags(&entered, site.gpu.stream.raw().cast(), done) }
            .map_err(failed("done flags"))
    }
}

/// Carries out a fault: flips a bit of a result, behind it on the stream. For tests of who must notice.
fn damage(part: &Part, signature: Signature, fault: Fault) -> Result<(), CudaError> {
    let len_bytes = signature.num_elems * signature.dtype.size_bytes() as u64;
    if fault.bit / 8 >= len_bytes {
        return Ok(());
    }
    let stream = &part.window.gpu.stream;
    let place = part.dst + fault.bit / 8;
    let mut byte = [0];
    // SAFETY: the byte is inside the destination, which is mapped.
    unsafe {
        stream.download(place, &mut byte)?;
        let damaged = byte.map(|byte| byte ^ (1 << (fault.bit % 8)));
        stream.upload(place, &damaged)?;
    }
    stream.synchronize()
}
