//! A worker's tensors: in shared memory or on a GPU, of any element type.
//!
//! Owns their memory, and what a worker does with them: fill, reduce, check. `demo` and `tune` use it. Refuses to time.

use crate::demo::verify::{BitsOf, Sample, TensorId, fill, fingerprint, wrong_elements};
use crate::device::{DeviceError, DeviceTensor, WorkerStream};
use crate::workload::ReductionSpec;
use allreduce_client::blocking::Communicator;
use allreduce_client::{AllReduceError, AllReduceOptions, Buffer, BufferError, bf16, f16};
use allreduce_contract::cuda::{CudaError, Graph, Unavailable};
use allreduce_contract::{Algorithm, Dtype, Op};

/// A reduction of a worker's that did not go well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TensorError {
    #[error(transparent)]
    AllReduce(#[from] AllReduceError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

fn no_device() -> TensorError {
    DeviceError::Unavailable(Unavailable::NoDevice).into()
}

/// Where a worker's tensors are.
pub(crate) struct Rank<'a> {
    pub(crate) communicator: &'a Communicator,
    /// On backend cuda.
    pub(crate) stream: Option<&'a WorkerStream>,
}

/// A tensor of the worker's.
pub(crate) enum Tensor<T: Sample> {
    /// In shared memory.
    Host(Buffer<T>),
    /// In GPU memory, with what it holds (or is to hold) on the host.
    Device(DeviceTensor<T>, Vec<T>),
}

impl<T: Sample + BitsOf> Tensor<T> {
    fn allocate(rank: &Rank, num_elems: usize) -> Result<Self, BufferError> {
        Ok(match rank.stream {
            None => Self::Host(rank.communicator.allocate(num_elems)?),
            Some(_) => Self::Device(
                DeviceTensor::allocate(rank.communicator, num_elems)?,
                vec![T::from_bits(0); num_elems],
            ),
        })
    }

    fn fill(&mut self, rank: &Rank, id: TensorId, number: u32) -> Result<(), CudaError> {
        match (self, rank.stream) {
            (Self::Host(buffer), _) => fill(buffer.as_mut_slice(), id, number),
            (Self::Device(tensor, host), Some(stream)) => {
                fill(host, id, number);
                tensor.upload(stream, host)?;
            }
            (Self::Device(..), None) => {}
        }
        Ok(())
    }

    /// Reduces in place, and waits until the result is there; the algorithm that did it.
    fn reduce(
        self,
        rank: &Rank,
        op: Op,
        options: AllReduceOptions,
    ) -> Result<(Self, Algorithm), TensorError> {
        match (self, rank.stream) {
            (Self::Device(tensor, host), Some(stream)) => {
                let reduction = tensor.reduce(rank.communicator, stream, op, options)?;
                stream.synchronize()?;
                Ok((Self::Device(tensor, host), reduction.algorithm))
            }
            (Self::Host(buffer), _) => {
                let reduced = rank.communicator.all_reduce_with(buffer, op, options);
                let (buffer, reduction) = reduced.map_err(AllReduceError::from)?;
                Ok((Self::Host(buffer), reduction.algorithm))
            }
            (Self::Device(..), None) => Err(no_device()),
        }
    }

    /// Its elements, brought to the host.
    fn fetch(&mut self, rank: &Rank) -> Result<&[T], CudaError> {
        match self {
            Self::Host(buffer) => Ok(buffer.as_slice()),
            Self::Device(tensor, host) => {
                if let Some(stream) = rank.stream {
                    tensor.download(stream, host)?;
                }
                Ok(host)
            }
        }
    }
}

/// A tensor of any element type.
pub(crate) enum AnyTensor {
    F32(Tensor<f32>),
    F64(Tensor<f64>),
    F16(Tensor<f16>),
    Bf16(Tensor<bf16>),
    I32(Tensor<i32>),
    I64(Tensor<i64>),
}

/// Runs `$body` with `$tensor` bound to the typed tensor.
macro_rules! typed {
    ($any:expr, $tensor:ident => $body:expr) => {
        match $any {
            AnyTensor::F32($tensor) => $body,
            AnyTensor::F64($tensor) => $body,
            AnyTensor::F16($tensor) => $body,
            AnyTensor::Bf16($tensor) => $body,
            AnyTensor::I32($tensor) => $body,
            AnyTensor::I64($tensor) => $body,
        }
    };
}

impl AnyTensor {
    pub(crate) fn allocate(rank: &Rank, spec: ReductionSpec) -> Result<Self, BufferError> {
        let num_elems = spec.num_elems;
        Ok(match spec.dtype {
            Dtype::F32 => Self::F32(Tensor::allocate(rank, num_elems)?),
            Dtype::F64 => Self::F64(Tensor::allocate(rank, num_elems)?),
            Dtype::F16 => Self::F16(Tensor::allocate(rank, num_elems)?),
            Dtype::Bf16 => Self::Bf16(Tensor::allocate(rank, num_elems)?),
            Dtype::I32 => Self::I32(Tensor::allocate(rank, num_elems)?),
            Dtype::I64 => Self::I64(Tensor::allocate(rank, num_elems)?),
        })
    }

    pub(crate) fn fill(&mut self, rank: &Rank, id: TensorId, number: u32) -> Result<(), CudaError> {
        typed!(self, tensor => tensor.fill(rank, id, number))
    }

    /// Reduces in place, and waits until the result is there; the algorithm that did it.
    pub(crate) fn reduce(
        self,
        rank: &Rank,
        op: Op,
        options: AllReduceOptions,
    ) -> Result<(Self, Algorithm), TensorError> {
        fn run<T: Sample + BitsOf>(
            rank: &Rank,
            tensor: Tensor<T>,
            op: Op,
            options: AllReduceOptions,
            wrap: fn(Tensor<T>) -> AnyTensor,
        ) -> Result<(AnyTensor, Algorithm), TensorError> {
            let (tensor, algorithm) = tensor.reduce(rank, op, options)?;
            Ok((wrap(tensor), algorithm))
        }
        match self {
            Self::F32(tensor) => run(rank, tensor, op, options, Self::F32),
            Self::F64(tensor) => run(rank, tensor, op, options, Self::F64),
            Self::F16(tensor) => run(rank, tensor, op, options, Self::F16),
            Self::Bf16(tensor) => run(rank, tensor, op, options, Self::Bf16),
            Self::I32(tensor) => run(rank, tensor, op, options, Self::I32),
            Self::I64(tensor) => run(rank, tensor, op, options, Self::I64),
        }
    }

    /// On a GPU: a graph of so many reductions in place, one after the other.
    pub(crate) fn capture(
        &self,
        rank: &Rank,
        op: Op,
        options: &AllReduceOptions,
        count: usize,
    ) -> Result<Graph, TensorError> {
        typed!(self, tensor => match (tensor, rank.stream) {
            (Tensor::Device(tensor, _), Some(stream)) => stream.capture(|| {
                for _ in 0..count {
                    tensor.reduce(rank.communicator, stream, op, options.clone())?;
                }
                Ok::<(), TensorError>(())
            }),
            (Tensor::Device(..) | Tensor::Host(_), _) => Err(no_device()),
        })
    }

    /// The result's fingerprint and, where this rank checks it, how many elements are wrong.
    pub(crate) fn check(
        &mut self,
        rank: &Rank,
        id: TensorId,
        world_size: u32,
        op: Op,
        is_mine: bool,
    ) -> Result<(u64, Option<usize>), CudaError> {
        fn of<T: Sample + BitsOf>(
            result: &[T],
            id: TensorId,
            world_size: u32,
            op: Op,
            is_mine: bool,
        ) -> (u64, Option<usize>) {
            let wrong = is_mine.then(|| wrong_elements(result, id, world_size, op));
            (fingerprint(result), wrong)
        }
        typed!(self, tensor => tensor.fetch(rank).map(|result| of(result, id, world_size, op, is_mine)))
    }
}
