//! The sum over the ranks that ends every row-parallel layer: where the model meets allreduced.
//!
//! Owns the communicator, its one buffer and the measurements. Called by the model, on every rank in the
//! same order. This is the file to copy: the model knows [`RankSum`] only.

use allreduce_client::blocking::Communicator;
use allreduce_client::{AllReduceError, AllReduceOptions, Buffer, BufferError, Op};
use candle_core::{Device, Storage, Tensor};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// A partial output was not summed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SumError {
    /// The ranks did not reduce.
    #[error(transparent)]
    AllReduce(#[from] AllReduceError),
    /// The partial output does not fit the buffer.
    #[error("a partial output of {num_elems} elements; the buffer has {capacity}")]
    TooLong {
        /// Elements of the partial output.
        num_elems: usize,
        /// Elements of the buffer.
        capacity: usize,
    },
    /// An earlier reduction failed, and this worker let go of the buffer with it.
    #[error("an earlier reduction failed")]
    NoBuffer,
    /// candle's tensors live on the CPU here.
    #[error("the partial output is not a contiguous f32 tensor in CPU memory")]
    NotInCpuMemory,
    /// candle refused it.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What a row-parallel layer needs: the sum of all ranks' partial outputs.
pub(crate) trait RankSum {
    /// Gives the sum, the same bits on every rank.
    fn sum(&mut self, partial: &Tensor) -> Result<Tensor, SumError>;
}

/// One reduction, as this rank saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Elements reduced.
    pub(crate) num_elems: usize,
    /// From the call to its return.
    pub(crate) call: Duration,
    /// Between the first and the last rank's call: the ranks were computing.
    pub(crate) skew: Duration,
    /// The executor's time for reducing.
    pub(crate) reduce: Duration,
}

/// Sums through a communicator.
#[derive(Debug)]
pub(crate) struct AllReduce {
    communicator: Communicator,
    /// Moved into each reduction, and back out of it.
    buffer: Option<Buffer<f32>>,
    measured: Vec<Measured>,
}

impl AllReduce {
    /// Takes a buffer for partial outputs of up to `capacity` elements. One is enough, for the layers run
    /// one after the other.
    pub(crate) fn new(communicator: Communicator, capacity: usize) -> Result<Self, BufferError> {
        let buffer = communicator.allocate(capacity)?;
        Ok(Self {
            communicator,
            buffer: Some(buffer),
            measured: Vec::new(),
        })
    }

    /// Leaves the communicator; gives what was measured.
    pub(crate) fn leave(self) -> Vec<Measured> {
        self.communicator.leave();
        self.measured
    }
}

impl RankSum for AllReduce {
    fn sum(&mut self, partial: &Tensor) -> Result<Tensor, SumError> {
        let num_elems = partial.elem_count();
        let buffer = self.buffer.as_mut().ok_or(SumError::NoBuffer)?;
        let too_long = SumError::TooLong {
            num_elems,
            capacity: buffer.len(),
        };
        let elems = buffer.as_mut_slice().get_mut(..num_elems);
        copy_out(partial, elems.ok_or(too_long)?)?;
        let options = AllReduceOptions::prefix(num_elems);
        let start = Instant::now();
        let buffer = self.buffer.take().ok_or(SumError::NoBuffer)?;
        let (buffer, reduction) = self
            .communicator
            .all_reduce_with(buffer, Op::Sum, options)
            .map_err(AllReduceError::from)?;
        self.measured.push(Measured {
            num_elems,
            call: start.elapsed(),
            skew: reduction.skew,
            reduce: reduction.reduce_time,
        });
        let elems = buffer.as_slice().get(..num_elems).unwrap_or_default();
        let sum = Tensor::from_slice(elems, partial.shape(), &Device::Cpu)?;
        self.buffer = Some(buffer);
        Ok(sum)
    }
}

/// Copies a tensor's elements, without a vector in between.
fn copy_out(tensor: &Tensor, elems: &mut [f32]) -> Result<(), SumError> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(SumError::NotInCpuMemory);
    };
    let source = layout
        .contiguous_offsets()
        .and_then(|(start, end)| storage.as_slice::<f32>().ok()?.get(start..end))
        .filter(|source| source.len() == elems.len())
        .ok_or(SumError::NotInCpuMemory)?;
    elems.copy_from_slice(source);
    Ok(())
}

/// Sums nothing: every rank keeps its own partial output. Only to show that the check would notice.
#[derive(Debug)]
pub(crate) struct Identity;

impl RankSum for Identity {
    fn sum(&mut self, partial: &Tensor) -> Result<Tensor, SumError> {
        Ok(partial.clone())
    }
}
