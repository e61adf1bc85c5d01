//! grpc.health.v1 for the supervisor and the executors.
//!
//! Owns the table of services and their states. tonic-health's own server answers NOT_FOUND to a Watch
//! of a service that does not exist (yet); the protocol says SERVICE_UNKNOWN and go on, which is what
//! one who waits for a communicator needs (<https://github.com/grpc/grpc/blob/master/doc/health-checking.md>).
//! So the messages are tonic-health's and the service is this.

use allreduce_contract::MAX_MESSAGE_LEN_BYTES;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt, wrappers::WatchStream};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

type Table = BTreeMap<String, bool>;

/// Sets states, and makes the service that answers them.
#[derive(Debug, Clone)]
pub(crate) struct HealthTable(Arc<watch::Sender<Table>>);

impl HealthTable {
    /// With the overall service "" not serving.
    pub(crate) fn new() -> Self {
        let table = BTreeMap::from([(String::new(), false)]);
        Self(Arc::new(watch::Sender::new(table)))
    }

    /// Sets whether a service is serving; "" is the whole.
    pub(crate) fn set(&self, service: &str, serving: bool) {
        self.0
            .send_if_modified(|table| table.insert(service.to_owned(), serving) != Some(serving));
    }

    /// The service exists no more.
    pub(crate) fn remove(&self, service: &str) {
        self.0
            .send_if_modified(|table| table.remove(service).is_some());
    }

    /// Nothing is serving any more.
    pub(crate) fn set_all_not_serving(&self) {
        self.0.send_modify(|table| {
            for serving in table.values_mut() {
                *serving = false;
            }
        });
    }

    /// The gRPC service.
    pub(crate) fn server(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService(self.0.subscribe()))
            .max_decoding_message_size(MAX_MESSAGE_LEN_BYTES)
    }
}

/// Answers Check and Watch.
#[derive(Debug)]
pub(crate) struct HealthService(watch::Receiver<Table>);

fn status_in(table: &Table, service: &str) -> ServingStatus {
    match table.get(service) {
        Some(true) => ServingStatus::Serving,
        Some(false) => ServingStatus::NotServing,
        None => ServingStatus::ServiceUnknown,
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status as i32,
    }
}

#[tonic::async_trait]
impl Health for HealthService {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        match status_in(&self.0.borrow(), &service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found(format!(
                "there is no service {service:?}"
            ))),
            known => Ok(Response::new(response(known))),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let service = request.into_inner().service;
        let mut last = None;
        let changes = WatchStream::new(self.0.clone()).filter_map(move |table| {
            let status = status_in(&table, &service);
            let changed = last.replace(status) != Some(status);
            changed.then(|| Ok(response(status)))
        });
        Ok(Response::new(Box::pin(changes)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn asked(service: &str) -> Request<HealthCheckRequest> {
        Request::new(HealthCheckRequest {
            service: service.to_owned(),
        })
    }

    #[tokio::test]
    async fn check_and_watch_follow_the_table() {
        let table = HealthTable::new();
        let service = HealthService(table.0.subscribe());
        let unknown = service.check(asked("executor/a")).await;
        assert_eq!(unknown.unwrap_err().code(), tonic::Code::NotFound);
        let mut watch = service
            .watch(asked("executor/a"))
            .await
            .unwrap()
            .into_inner();
        let mut next = async || {
            let response = watch.next().await.unwrap().unwrap();
            ServingStatus::try_from(response.status).unwrap()
        };
        assert_eq!(next().await, ServingStatus::ServiceUnknown);
        table.set("executor/b", true);
        table.set("executor/a", true);
        assert_eq!(next().await, ServingStatus::Serving);
        let known = service.check(asked("executor/a")).await.unwrap();
        assert_eq!(known.into_inner().status, ServingStatus::Serving as i32);
        table.set_all_not_serving();
        assert_eq!(next().await, ServingStatus::NotServing);
        table.remove("executor/a");
        assert_eq!(next().await, ServingStatus::ServiceUnknown);
    }
}
