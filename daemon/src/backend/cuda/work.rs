//! A reduction as GPUs are given it: the ranks' tensors, and how each piece of them is enqueued.
//!
//! Owns the choice of the way, one [`Route`] for each family of algorithms. The launch queue and the test before Ready
//! both come through here, so what was tested is what runs. Refuses to decide (the plan has), to wait, and to know
//! flags: who enqueues has the streams wait for the sources before, and says that results are there after.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::backend::cuda::copies::Copies;
use crate::backend::cuda::gpu::{Gpu, Kernels, failed};
use crate::backend::cuda::window::{Meeting, Window};
use crate::communicator::{GpuError, Signature, Ticket};
use crate::plan::{Plan, Shape, Staging};
use allreduce_contract::cuda::DevicePtr;
use allreduce_contract::kernel::{CALL_DIRECT, Call, CallParts, op_code};
use allreduce_contract::{Algorithm, Dtype};
use std::sync::Arc;

/// A GPU that a reduction is enqueued on, with the kernels for it.
#[derive(Debug, Clone)]
pub(super) struct Site {
    pub(super) gpu: Arc<Gpu>,
    pub(super) kernels: Arc<Kernels>,
}

/// One rank's part of a reduction, with its addresses.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) window: Arc<Window>,
    pub(super) src: DevicePtr,
    pub(super) dst: DevicePtr,
    pub(super) ticket: Option<Ticket>,
}

impl Part {
    pub(super) fn is_on(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.window.gpu, gpu)
    }
}

/// How a piece gets onto the GPUs.
#[derive(Debug, Clone, Copy)]
enum Route {
    /// Kernels that wait for each other: one launch for the ranks of a GPU.
    Kernels {
        meeting: Meeting,
        flags: u32,
        blocks: u32,
        data_threads: u32,
    },
    /// Copy engines, and kernels that wait for nobody.
    Copies { blocks: u32, threads: u32 },
}

/// What is reduced.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) signature: Signature,
    /// Every rank's, in rank order.
    pub(super) parts: Vec<Part>,
    algorithm: Algorithm,
    route: Route,
    /// Its code in the kernels.
    op: u32,
    /// Of a piece.
    most_elems: u64,
}

/// What a way needs to know of a piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) dtype: Dtype,
    pub(super) op: u32,
    /// Its place in the tensors.
    pub(super) offset_bytes: u64,
    pub(super) num_elems: u64,
}

impl Work {
    /// # Errors
    /// [`GpuError::NoKernels`] for what the plan refuses, or plans for another backend.
    pub(super) fn new(
        plan: Plan,
        signature: Signature,
        parts: Vec<Part>,
    ) -> Result<Self, GpuError> {
        let Plan {
            algorithm, shape, ..
        } = plan;
        let unplanned = || GpuError::NoKernels(format!("{} by {algorithm}", signature.op));
        let (route, most_elems) = match shape {
            Shape::Cuda {
                blocks,
                data_threads,
                launch_elems,
                staging,
            } => {
                let (meeting, flags) = match staging {
                    Staging::Direct => (Meeting::Gpus, CALL_DIRECT),
                    Staging::Window => (Meeting::Gpus, 0),
                    Staging::HostWindow => (Meeting::Host, 0),
                };
                let route = Route::Kernels {
                    meeting,
                    flags,
                    blocks,
                    data_threads,
                };
                (route, launch_elems)
            }
            Shape::Copies {
                blocks,
                threads,
                launch_elems,
            } => (Route::Copies { blocks, threads }, launch_elems),
            Shape::Host { .. } => return Err(unplanned()),
        };
        Ok(Self {
            signature,
            parts,
            algorithm,
            route,
            op: op_code(signature.op).ok_or_else(unplanned)?,
            most_elems: most_elems.max(1),
        })
    }

    pub(super) fn is_on(&self, gpu: &Arc<Gpu>) -> bool {
        self.parts.iter().any(|part| part.is_on(gpu))
    }

    pub(super) fn parts_on(&self, gpu: &Arc<Gpu>) -> impl Iterator<Item = &Part> + Clone {
        self.parts.iter().filter(|part| part.is_on(gpu))
    }

    /// What a piece adds to the queue of a GPU's stream, at most.
    pub(super) fn entries(&self, gpu: &Arc<Gpu>) -> u64 {
        match self.route {
            Route::Kernels { .. } => 1,
            Route::Copies { .. } => Copies::entries(&self.parts, gpu),
        }
    }

    /// Enqueues the piece that begins with element `first`, on every GPU that has a rank; how many elements it has. All at
    /// once, since the GPUs wait for each other.
    pub(super) fn enqueue(&self, sites: &[&Site], first: u64) -> Result<u64, GpuError> {
        let Signature {
            num_elems, dtype, ..
        } = self.signature;
        let count = self.most_elems.min(num_elems.saturating_sub(first));
        let piece = Piece {
            dtype,
            op: self.op,
            offset_bytes: first * dtype.size_bytes() as u64,
            num_elems: count,
        };
        match self.route {
            Route::Kernels {
                meeting,
                flags,
                blocks,
                data_threads,
            } => {
                for site in sites {
                    self.launch(site, piece, (meeting, flags), (blocks, data_threads))?;
                }
            }
            Route::Copies { blocks, threads } => {
                Copies::new(&self.parts, piece, (blocks, threads))?.enqueue(sites)?;
            }
        }
        Ok(count)
    }

    /// Launches a piece's kernel for all ranks of a GPU.
    fn launch(
        &self,
        site: &Site,
        piece: Piece,
        (meeting, flags): (Meeting, u32),
        (blocks, data_threads): (u32, u32),
    ) -> Result<(), GpuError> {
        let calls = self.parts_on(&site.gpu).map(|part| {
            let rank = part.window.rank;
            let control = part.window.control_block(meeting).ok_or_else(|| {
                GpuError::NotMapped(format!("rank {rank}: its window in host memory"))
            })?;
            Ok(Call::new(CallParts {
                control,
                src: part.src + piece.offset_bytes,
                dst: part.dst + piece.offset_bytes,
                num_elems: piece.num_elems,
                elem_bytes: piece.dtype.size_bytes() as u32,
                op: piece.op,
                flags,
                blocks,
                data_threads,
            }))
        });
        let calls = calls.collect::<Result<Vec<Call>, GpuError>>()?;
        let entered = site.gpu.context.enter().map_err(failed("context"))?;
        // SAFETY: the communicator, or the test, checked the ranges against the buffers; windows, imports and control
        // blocks are freed only when the launch is known to be done: behind a fence (`defer`), or when the GPU is idle.
        unsafe {
            site.kernels.launch(
                &site.gpu,
                &entered,
                (self.algorithm, piece.dtype),
                &calls,
                (blocks, data_threads),
            )
        }
    }
}
