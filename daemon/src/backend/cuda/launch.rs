//! One reduction on its way to the GPUs.
//!
//! Owns what is enqueued for it, and in which order: waits for the ranks' ready flags, its kernels, writes of their
//! done flags, on each GPU that its ranks are on. [`CudaBackend`](super::CudaBackend) launches reductions in the
//! order in which it accepted them. Refuses to block: a stream takes some thousand entries, and the call for one
//! more waits until there is room; so a reduction of many kernels goes on when earlier ones are done.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::Fault;
use crate::backend::cuda::Lane;
use crate::backend::cuda::gpu::failed;
use crate::backend::cuda::window::Window;
use crate::communicator::{GpuError, Launch, Signature, Ticket};
use crate::plan::Shape;
use allreduce_contract::cuda::{CudaError, DevicePtr, wait_flags, write_flags};
use allreduce_contract::kernel::{CALL_DIRECT, Call, CallParts, op_code};
use std::sync::Arc;

/// Kernels that may wait on a GPU, a fraction of what its queue takes.
const MAX_ENQUEUED: u64 = 256;

/// A reduction that was promised to its ranks.
pub(crate) struct Accepted {
    launch: Launch,
    parts: Vec<Part>,
    fault: Option<Fault>,
    /// Elements whose kernels are enqueued; none before the waits are.
    enqueued_elems: Option<u64>,
}

/// One rank's part of it, with its addresses.
pub(super) struct Part {
    pub(super) window: Arc<Window>,
    pub(super) src: DevicePtr,
    pub(super) dst: DevicePtr,
    pub(super) ticket: Option<Ticket>,
}

impl Part {
    fn is_on(&self, lane: &Lane) -> bool {
        Arc::ptr_eq(&self.window.gpu, &lane.gpu)
    }
}

impl Accepted {
    pub(super) fn new(launch: Launch, parts: Vec<Part>, fault: Option<Fault>) -> Self {
        Self {
            launch,
            parts,
            fault,
            enqueued_elems: None,
        }
    }

    /// Whether a rank of it is on the lane's GPU.
    pub(super) fn is_on(&self, lane: &Lane) -> bool {
        self.parts.iter().any(|part| part.is_on(lane))
    }

    /// Enqueues as much as there is room for; whether that was all. Piece by piece on all GPUs, since the kernels
    /// of a piece wait for each other.
    pub(super) fn advance(&mut self, lanes: &mut [Lane]) -> Result<bool, GpuError> {
        let Signature { num_elems, .. } = self.launch.signature;
        let mut lanes: Vec<&mut Lane> = lanes.iter_mut().filter(|lane| self.is_on(lane)).collect();
        let mut first = match self.enqueued_elems {
            Some(first) => first,
            None => {
                for lane in &lanes {
                    self.wait_ready(lane)?;
                }
                0
            }
        };
        self.enqueued_elems = Some(first);
        while first < num_elems {
            let is_full =
                |lane: &&mut Lane| lane.kernels_enqueued - lane.kernels_done >= MAX_ENQUEUED;
            if lanes.iter().any(is_full) {
                return Ok(false);
            }
            let mut count = 0;
            for lane in &mut lanes {
                count = self.launch_piece(lane, first)?;
                lane.kernels_enqueued += 1;
            }
            first += count.max(1);
            self.enqueued_elems = Some(first);
        }
        for lane in &lanes {
            self.write_done(lane)?;
        }
        Ok(true)
    }

    fn wait_ready(&self, lane: &Lane) -> Result<(), GpuError> {
        let entered = lane.gpu.context.enter().map_err(failed("context"))?;
        let ready = self.parts.iter().filter(|part| part.is_on(lane));
        let ready = ready.filter_map(|part| {
            let ticket = part.ticket.filter(|ticket| ticket.wait_ready)?;
            Some((part.window.ready_flag(ticket.stream), ticket.value))
        });
        // SYNC: ready flag. The rank's stream writes it behind what writes its source; from here on this stream
        // sees that.
        // SAFETY: the stream is live, its context is entered, and the flags are the windows', which are freed
        // only behind a fence (`defer`).
        unsafe { wait_flags(&entered, lane.gpu.stream.raw().cast(), ready) }
            .map_err(failed("ready flags"))
    }

    fn write_done(&self, lane: &Lane) -> Result<(), GpuError> {
        let entered = lane.gpu.context.enter().map_err(failed("context"))?;
        let here = self.parts.iter().filter(|part| part.is_on(lane));
        if let Some(fault) = self.fault {
            let damaged = here
                .clone()
                .find(|part| part.window.rank.get() == fault.rank);
            if let Some(part) = damaged {
                damage(part, self.launch.signature, fault).map_err(failed("fault"))?;
            }
        }
        let done = here.filter_map(|part| {
            let ticket = part.ticket?;
            Some((part.window.done_flag(ticket.stream), ticket.value))
        });
        // SYNC: done flag. The rank's stream that waits for it sees the result.
        // SAFETY: as for the ready flags.
        unsafe { write_flags(&entered, lane.gpu.stream.raw().cast(), done) }
            .map_err(failed("done flags"))
    }

    /// Launches the kernel for the elements from `first` on, for all ranks of a GPU; how many elements it takes.
    fn launch_piece(&self, lane: &Lane, first: u64) -> Result<u64, GpuError> {
        let Signature {
            num_elems,
            dtype,
            op,
            ..
        } = self.launch.signature;
        let plan = self.launch.plan;
        let (
            Some(op_code),
            Shape::Cuda {
                blocks,
                data_threads,
                launch_elems,
            },
        ) = (op_code(op), plan.shape)
        else {
            // The plan refuses such operators, and makes no host plans for this backend.
            return Err(GpuError::NoKernels(format!("{op} by {}", plan.algorithm)));
        };
        let elem_bytes = dtype.size_bytes() as u64;
        let count = launch_elems.max(1).min(num_elems - first);
        let here = self.parts.iter().filter(|part| part.is_on(lane));
        let calls: Vec<Call> = here
            .map(|part| {
                Call::new(CallParts {
                    control: part.window.control_block.start(),
                    src: part.src + first * elem_bytes,
                    dst: part.dst + first * elem_bytes,
                    num_elems: count,
                    elem_bytes: elem_bytes as u32,
                    op: op_code,
                    flags: CALL_DIRECT,
                    blocks,
                    data_threads,
                })
            })
            .collect();
        let entered = lane.gpu.context.enter().map_err(failed("context"))?;
        // SAFETY: the communicator checked the ranges against the buffers; windows, imports and control blocks are
        // freed only when a fence behind this launch has passed (`defer`).
        unsafe {
            lane.kernels.launch(
                &lane.gpu,
                &entered,
                (plan.algorithm, dtype),
                &calls,
                (blocks, data_threads),
            )
        }?;
        Ok(count)
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
