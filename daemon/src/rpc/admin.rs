//! allreduced.v1.Admin, for the supervisor and for executors.
//!
//! An executor answers for its communicator from its task. The supervisor asks every executor, at the
//! same time and with a deadline, and marks who did not answer as stale.

use crate::communicator::Quantiles;
use crate::executor::{ExecutorSpec, Handle, StatsReport};
use crate::rpc::ToStatus;
use crate::supervisor::{OpenError, Placed, Placement};
use allreduce_contract::VERSION;
use allreduce_contract::transport::dial;
use allreduce_contract::v1::admin_client::AdminClient;
use allreduce_contract::v1::admin_server::Admin;
use allreduce_contract::v1::{
    self, ClientInfo, CommunicatorInfo, CommunicatorStats, ErrorCount, GetStatsRequest,
    GetStatsResponse, GetVersionRequest, GetVersionResponse, ListClientsRequest,
    ListClientsResponse, ListCommunicatorsRequest, ListCommunicatorsResponse, RankStats,
    ReductionCount,
};
use allreduce_contract::window::ABI_VERSION;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// How long the supervisor waits for an executor's answer.
const EXECUTOR_DEADLINE: Duration = Duration::from_millis(500);

/// How long an executor waits for its GPUs to say how many calls the ranks have made; less than its supervisor waits.
const COUNT_DEADLINE: Duration = Duration::from_millis(200);

/// How many questions to all executors may be under way at once; more wait.
const MAX_ROUNDS: usize = 4;

/// Answers for one executor.
#[derive(Debug)]
pub(crate) struct ExecutorAdmin {
    spec: Arc<ExecutorSpec>,
    handle: Handle,
    started: Instant,
}

impl ExecutorAdmin {
    pub(crate) fn new(spec: Arc<ExecutorSpec>, handle: Handle) -> Self {
        Self {
            spec,
            handle,
            started: Instant::now(),
        }
    }

    fn check_name(&self, communicator: &str) -> Result<(), Status> {
        if communicator.is_empty() || communicator == self.spec.communicator_name {
            Ok(())
        } else {
            Err(OpenError::Unknown(communicator.to_owned()).to_status())
        }
    }
}

#[tonic::async_trait]
impl Admin for ExecutorAdmin {
    async fn get_stats(
        &self,
        request: Request<GetStatsRequest>,
    ) -> Result<Response<GetStatsResponse>, Status> {
        self.check_name(&request.into_inner().communicator)?;
        // What a GPU does not answer in time is as it was read last.
        let _ = tokio::time::timeout(COUNT_DEADLINE, self.handle.count_calls()).await;
        let report = self
            .handle
            .stats()
            .await
            .map_err(|error| error.to_status())?;
        Ok(Response::new(GetStatsResponse {
            communicators: vec![stats_message(&self.spec, report)],
        }))
    }

    async fn list_communicators(
        &self,
        _request: Request<ListCommunicatorsRequest>,
    ) -> Result<Response<ListCommunicatorsResponse>, Status> {
        let spec = &self.spec;
        Ok(Response::new(ListCommunicatorsResponse {
            communicators: vec![CommunicatorInfo {
                communicator: spec.communicator_name.clone(),
                world_size: spec.world_size().get(),
                backend: v1::Backend::from(spec.backend()) as i32,
                backend_reason: spec.backend_reason.clone(),
                incarnation: spec.incarnation,
                executor_pid: std::process::id(),
                executor_socket: spec.socket.to_string_lossy().into_owned(),
                serving: true,
            }],
        }))
    }

    async fn list_clients(
        &self,
        request: Request<ListClientsRequest>,
    ) -> Result<Response<ListClientsResponse>, Status> {
        self.check_name(&request.into_inner().communicator)?;
        let sessions = self
            .handle
            .clients()
            .await
            .map_err(|error| error.to_status())?;
        let clients = sessions
            .into_iter()
            .map(|info| ClientInfo {
                communicator: self.spec.communicator_name.clone(),
                rank: info.rank.get(),
                epoch: info.epoch,
                pid: info.pid,
                client_name: info.client_name,
                arena_len_bytes: info.arena_len_bytes,
                buffers: info.buffers,
                buffer_bytes: info.buffer_bytes,
                ended: info.ended,
            })
            .collect();
        Ok(Response::new(ListClientsResponse {
            clients,
            stale_communicators: Vec::new(),
        }))
    }

    async fn get_version(
        &self,
        _request: Request<GetVersionRequest>,
    ) -> Result<Response<GetVersionResponse>, Status> {
        Ok(Response::new(version(self.started)))
    }
}

fn version(started: Instant) -> GetVersionResponse {
    GetVersionResponse {
        version: VERSION.to_owned(),
        abi: ABI_VERSION,
        pid: std::process::id(),
        uptime_s: started.elapsed().as_secs(),
    }
}

fn quantiles(quantiles: Quantiles) -> Option<v1::Quantiles> {
    let Quantiles {
        count,
        p50,
        p99,
        max,
    } = quantiles;
    Some(v1::Quantiles {
        count,
        p50,
        p99,
        max,
    })
}

fn stats_message(spec: &ExecutorSpec, report: StatsReport) -> CommunicatorStats {
    let (lane, lane_reason) = report.lane.map_or((0, String::new()), |choice| {
        (v1::Lane::from(choice.lane) as i32, choice.reason)
    });
    CommunicatorStats {
        communicator: spec.communicator_name.clone(),
        stale: false,
        epoch: report.epoch,
        world_size: spec.world_size().get(),
        backend: v1::Backend::from(spec.backend()) as i32,
        lane,
        lane_reason,
        reductions: report
            .reductions
            .into_iter()
            .map(|((dtype, op, lane, algorithm), count)| ReductionCount {
                dtype: v1::Dtype::from(dtype) as i32,
                op: v1::Op::from(op) as i32,
                lane: v1::Lane::from(lane) as i32,
                algorithm: v1::Algorithm::from(algorithm) as i32,
                operations: count.operations,
                bytes: count.bytes,
            })
            .collect(),
        reduction_us: quantiles(report.reduction),
        skew_us: quantiles(report.skew),
        ranks: (0..)
            .zip(report.ranks)
            .map(|(rank, stats)| RankStats {
                rank,
                operations: stats.operations,
                bytes: stats.bytes,
                lateness_us: quantiles(stats.lateness),
                times_last: stats.times_last,
                joined: stats.joined,
                lane_calls: stats.lane_calls,
                ring_calls: stats.rings.calls,
                ring_calls_staged: stats.rings.staged,
            })
            .collect(),
        errors: report
            .errors
            .into_iter()
            .map(|(code, count)| ErrorCount {
                code: code as i32,
                count,
            })
            .collect(),
        incarnation: spec.incarnation,
        rss_bytes: rss_bytes(),
        window_bytes: report.window_bytes,
        warnings: report.warnings,
        topology: report.topology,
        lane_calls: report.lane_calls,
    }
}

/// Resident memory of this process, from /proc/self/statm; 0 if it cannot be read.
fn rss_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|bytes| u64::try_from(bytes).ok());
    pages.zip(page).map_or(0, |(pages, page)| pages * page)
}

/// Answers for all executors.
#[derive(Debug)]
pub(crate) struct SupervisorAdmin {
    placement: Arc<Placement>,
    started: Instant,
    /// Rounds of questions to all executors that may be under way.
    rounds: Semaphore,
}

impl SupervisorAdmin {
    pub(crate) fn new(placement: Arc<Placement>) -> Self {
        Self {
            placement,
            started: Instant::now(),
            rounds: Semaphore::new(MAX_ROUNDS),
        }
    }

    /// The communicators asked about: all, or the one named.
    fn asked(&self, communicator: &str) -> Result<Vec<Placed>, Status> {
        let all = self.placement.list();
        if communicator.is_empty() {
            return Ok(all);
        }
        let one: Vec<Placed> = all
            .into_iter()
            .filter(|placed| placed.name == communicator)
            .collect();
        if one.is_empty() {
            Err(OpenError::Unknown(communicator.to_owned()).to_status())
        } else {
            Ok(one)
        }
    }
}

/// Asks every executor at once; `None` where there is no answer in time.
async fn ask_all<R, F>(
    placed: Vec<Placed>,
    ask: impl Fn(AdminClient<Channel>) -> F + Copy + Send + 'static,
) -> Vec<(Placed, Option<R>)>
where
    F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    R: Send + 'static,
{
    let asking: Vec<_> = placed
        .into_iter()
        .map(|placed| {
            let socket = placed.serving.as_ref().map(|at| at.socket.clone());
            let task = tokio::spawn(async move {
                let asked = async move {
                    let admin = AdminClient::new(dial(&socket?).await.ok()?);
                    let asking = ask(admin);
                    asking.await.ok()
                };
                let answer = tokio::time::timeout(EXECUTOR_DEADLINE, asked).await;
                answer.ok()?.map(Response::into_inner)
            });
            (placed, task)
        })
        .collect();
    let mut answers = Vec::with_capacity(asking.len());
    for (placed, task) in asking {
        answers.push((placed, task.await.ok().flatten()));
    }
    answers
}

#[tonic::async_trait]
impl Admin for SupervisorAdmin {
    async fn get_stats(
        &self,
        request: Request<GetStatsRequest>,
    ) -> Result<Response<GetStatsResponse>, Status> {
        let asked = self.asked(&request.into_inner().communicator)?;
        // The semaphore is never closed; were it, asking would still be right.
        let _round = self.rounds.acquire().await;
        let answers = ask_all(asked, |mut admin| async move {
            admin.get_stats(GetStatsRequest::default()).await
        })
        .await;
        let communicators = answers
            .into_iter()
            .map(|(placed, answer)| {
                let fresh = answer.and_then(|stats| stats.communicators.into_iter().next());
                self.placement.remember_stats(&placed, fresh)
            })
            .collect();
        Ok(Response::new(GetStatsResponse { communicators }))
    }

    async fn list_communicators(
        &self,
        _request: Request<ListCommunicatorsRequest>,
    ) -> Result<Response<ListCommunicatorsResponse>, Status> {
        let communicators = self
            .placement
            .list()
            .into_iter()
            .map(|placed| CommunicatorInfo {
                communicator: placed.name,
                world_size: placed.world_size.get(),
                backend: v1::Backend::from(placed.backend) as i32,
                backend_reason: placed.backend_reason,
                incarnation: placed.incarnation,
                serving: placed.serving.is_some(),
                executor_pid: placed.serving.as_ref().map_or(0, |at| at.pid),
                executor_socket: placed
                    .serving
                    .map(|at| at.socket.to_string_lossy().into_owned())
                    .unwrap_or_default(),
            })
            .collect();
        Ok(Response::new(ListCommunicatorsResponse { communicators }))
    }

    async fn list_clients(
        &self,
        request: Request<ListClientsRequest>,
    ) -> Result<Response<ListClientsResponse>, Status> {
        let asked = self.asked(&request.into_inner().communicator)?;
        let _round = self.rounds.acquire().await;
        let answers = ask_all(asked, |mut admin| async move {
            admin.list_clients(ListClientsRequest::default()).await
        })
        .await;
        let mut response = ListClientsResponse::default();
        for (placed, answer) in answers {
            match answer {
                Some(list) => response.clients.extend(list.clients),
                None => response.stale_communicators.push(placed.name),
            }
        }
        Ok(Response::new(response))
    }

    async fn get_version(
        &self,
        _request: Request<GetVersionRequest>,
    ) -> Result<Response<GetVersionResponse>, Status> {
        Ok(Response::new(version(self.started)))
    }
}
