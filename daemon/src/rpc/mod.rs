//! The gRPC services: messages in, messages out.
//!
//! Owns the translation between messages and what the executor's task and the supervisor understand.
//! Nothing below this module knows tonic. Refuses to hold state.

mod admin;
mod buffers;
mod collectives;
mod communicator;
mod control;
mod status;

pub(crate) use admin::{ExecutorAdmin, SupervisorAdmin};
pub(crate) use buffers::BuffersService;
pub(crate) use collectives::CollectivesService;
pub(crate) use communicator::CommunicatorService;
pub(crate) use control::ControlService;
pub(crate) use status::ToStatus;

use allreduce_contract::MAX_MESSAGE_LEN_BYTES;
use allreduce_contract::v1::FILE_DESCRIPTOR_SET;
use allreduce_contract::v1::admin_server::AdminServer;
use allreduce_contract::v1::buffers_server::BuffersServer;
use allreduce_contract::v1::collectives_server::CollectivesServer;
use allreduce_contract::v1::communicator_server::CommunicatorServer;
use allreduce_contract::v1::control_server::ControlServer;
use tonic::service::{Routes, RoutesBuilder};
use tonic_health::pb::health_server::HealthServer;

use crate::executor::{ExecutorSpec, Handle};
use crate::health::{HealthService, HealthTable};
use crate::supervisor::Placement;
use std::sync::Arc;

/// Services under these names, by reflection v1 and v1alpha.
fn add_reflection(routes: &mut RoutesBuilder, names: &[&str]) {
    let builder = || {
        names.iter().fold(
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET),
            |builder, name| builder.with_service_name(*name),
        )
    };
    // The descriptor sets are constants of this build, and a test builds both.
    match builder().build_v1() {
        Ok(service) => {
            routes.add_service(service.max_decoding_message_size(MAX_MESSAGE_LEN_BYTES));
        }
        Err(error) => tracing::error!(%error, "no reflection v1"),
    }
    match builder().build_v1alpha() {
        Ok(service) => {
            routes.add_service(service.max_decoding_message_size(MAX_MESSAGE_LEN_BYTES));
        }
        Err(error) => tracing::error!(%error, "no reflection v1alpha"),
    }
}

const HEALTH: &str = <HealthServer<HealthService> as tonic::server::NamedService>::NAME;

/// What an executor serves.
pub(crate) fn executor_routes(
    spec: &Arc<ExecutorSpec>,
    handle: &Handle,
    health: &HealthTable,
) -> Routes {
    let mut routes = RoutesBuilder::default();
    let limit = MAX_MESSAGE_LEN_BYTES;
    routes
        .add_service(
            CollectivesServer::new(CollectivesService::new(spec, handle.clone()))
                .max_decoding_message_size(limit),
        )
        .add_service(
            BuffersServer::new(BuffersService::new(handle.clone()))
                .max_decoding_message_size(limit),
        )
        .add_service(
            CommunicatorServer::new(CommunicatorService::new(Arc::clone(spec), handle.clone()))
                .max_decoding_message_size(limit),
        )
        .add_service(
            AdminServer::new(ExecutorAdmin::new(Arc::clone(spec), handle.clone()))
                .max_decoding_message_size(limit),
        )
        .add_service(health.server());
    add_reflection(
        &mut routes,
        &[
            "allreduced.v1.Collectives",
            "allreduced.v1.Buffers",
            "allreduced.v1.Communicator",
            "allreduced.v1.Admin",
            HEALTH,
        ],
    );
    routes.routes()
}

/// What the supervisor serves.
pub(crate) fn supervisor_routes(placement: &Arc<Placement>, health: &HealthTable) -> Routes {
    let mut routes = RoutesBuilder::default();
    let limit = MAX_MESSAGE_LEN_BYTES;
    routes
        .add_service(
            ControlServer::new(ControlService::new(Arc::clone(placement)))
                .max_decoding_message_size(limit),
        )
        .add_service(
            AdminServer::new(SupervisorAdmin::new(Arc::clone(placement)))
                .max_decoding_message_size(limit),
        )
        .add_service(health.server());
    add_reflection(
        &mut routes,
        &["allreduced.v1.Control", "allreduced.v1.Admin", HEALTH],
    );
    routes.routes()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    #[test]
    fn reflection_can_be_built() {
        let builder = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(super::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        assert!(builder().build_v1().is_ok());
        assert!(builder().build_v1alpha().is_ok());
    }
}
