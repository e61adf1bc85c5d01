//! allreduced.v1.Buffers: memory that reductions work on.

use crate::executor::{Handle, RegisterCuda};
use crate::rpc::ToStatus;
use allreduce_contract::v1::buffers_server::Buffers;
use allreduce_contract::v1::{
    AllocateRequest, AllocateResponse, RegisterRequest, RegisterResponse, ReleaseRequest,
    ReleaseResponse,
};
use tonic::{Request, Response, Status};

/// Answers Allocate, Register and Release.
#[derive(Debug)]
pub(crate) struct BuffersService {
    handle: Handle,
}

impl BuffersService {
    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle }
    }
}

#[tonic::async_trait]
impl Buffers for BuffersService {
    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let AllocateRequest { session, len_bytes } = request.into_inner();
        let answer = self.handle.allocate(session, len_bytes).await;
        let (buffer_id, offset_bytes) = answer
            .map_err(|stopped| stopped.to_status())?
            .map_err(|error| error.to_status())?;
        Ok(Response::new(AllocateResponse {
            buffer_id,
            offset_bytes,
        }))
    }

    async fn register(
        &self,
        request: Request<RegisterRequest>,
    ) -> Result<Response<RegisterResponse>, Status> {
        let RegisterRequest {
            session,
            memory_handle,
            offset_bytes,
            len_bytes,
            cuda,
            ring_memory,
        } = request.into_inner();
        let answer = match cuda {
            Some(memory) => {
                let request = RegisterCuda {
                    session,
                    memory,
                    offset_bytes,
                    len_bytes,
                    ring_memory,
                };
                self.handle.register_cuda(request).await
            }
            None => {
                self.handle
                    .register(session, memory_handle, offset_bytes, len_bytes)
                    .await
            }
        };
        let buffer_id = answer
            .map_err(|stopped| stopped.to_status())?
            .map_err(|error| error.to_status())?;
        Ok(Response::new(RegisterResponse { buffer_id }))
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        let ReleaseRequest { session, buffer_id } = request.into_inner();
        let answer = self.handle.release(session, buffer_id).await;
        answer
            .map_err(|stopped| stopped.to_status())?
            .map_err(|error| error.to_status())?;
        Ok(Response::new(ReleaseResponse {}))
    }
}
