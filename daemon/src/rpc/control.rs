//! allreduced.v1.Control: placement.

use crate::rpc::ToStatus;
use crate::supervisor::Placement;
use allreduce_contract::v1::control_server::Control;
use allreduce_contract::v1::{Backend, OpenRequest, OpenResponse};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Answers Open.
#[derive(Debug)]
pub(crate) struct ControlService {
    placement: Arc<Placement>,
}

impl ControlService {
    pub(crate) fn new(placement: Arc<Placement>) -> Self {
        Self { placement }
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn open(&self, request: Request<OpenRequest>) -> Result<Response<OpenResponse>, Status> {
        let OpenRequest {
            communicator,
            world_size,
            backend,
            has_cuda,
        } = request.into_inner();
        let place = self
            .placement
            .open(&communicator, world_size, backend, has_cuda)
            .await
            .map_err(|error| error.to_status())?;
        Ok(Response::new(OpenResponse {
            executor_socket: place.socket.to_string_lossy().into_owned(),
            companion_socket: place.companion.to_string_lossy().into_owned(),
            token: place.token.to_vec(),
            incarnation: place.incarnation,
            backend: Backend::from(place.backend) as i32,
            backend_reason: place.backend_reason,
        }))
    }
}
