//! allreduced.v1.Collectives: the `rpc` lane.

use crate::communicator::{AskedRange, BadStream, Call, Signature, Ticket};
use crate::executor::{ExecutorSpec, Handle};
use crate::plan::Shape;
use crate::rpc::ToStatus;
use allreduce_contract::v1::collectives_server::Collectives;
use allreduce_contract::v1::{
    AllReduceRequest, AllReduceResponse, ArmRequest, ArmResponse, BadEnum, BufferRange,
    DisarmRequest, DisarmResponse, ErrorCode, Event, PingRequest, PingResponse, PlanRequest,
    PlanResponse,
};
use allreduce_contract::window::MAX_STREAMS;
use allreduce_contract::{Algorithm, Dtype, Op};
use std::time::Duration;
use tonic::{Request, Response, Status};

/// Answers AllReduce, Plan and Ping.
#[derive(Debug)]
pub(crate) struct CollectivesService {
    handle: Handle,
    default_timeout_ms: u32,
}

impl CollectivesService {
    pub(crate) fn new(spec: &ExecutorSpec, handle: Handle) -> Self {
        Self {
            handle,
            default_timeout_ms: spec.communicator.default_timeout_ms,
        }
    }

    async fn set_armed(&self, session: u64, armed: bool) -> Result<(), Status> {
        match self.handle.set_armed(session, armed).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.to_status()),
            Err(stopped) => Err(stopped.to_status()),
        }
    }

    /// The status, after it was counted.
    async fn counted(&self, error: &impl ToStatus) -> Status {
        if let Ok(code) = ErrorCode::try_from(error.parts().1.code) {
            self.handle.record_error(code).await;
        }
        error.to_status()
    }
}

fn range(range: BufferRange) -> AskedRange {
    AskedRange {
        buffer_id: range.buffer_id,
        offset_bytes: range.offset_bytes,
    }
}

fn ticket(event: &Event) -> Result<Option<Ticket>, BadStream> {
    match event.stream {
        0 => Ok(None),
        stream @ 1..=MAX_STREAMS => Ok(Some(Ticket {
            stream: stream - 1,
            value: event.value,
            wait_ready: !event.idle,
        })),
        stream => Err(BadStream {
            stream,
            reason: "is not in 0..=64",
        }),
    }
}

fn signature(num_elems: u64, dtype: i32, op: i32, algorithm: i32) -> Result<Signature, BadEnum> {
    Ok(Signature {
        num_elems,
        dtype: Dtype::from_wire(dtype)?,
        op: Op::from_wire(op)?,
        algorithm: match algorithm {
            0 => None,
            asked => Some(Algorithm::from_wire(asked)?),
        },
    })
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[tonic::async_trait]
impl Collectives for CollectivesService {
    async fn all_reduce(
        &self,
        request: Request<AllReduceRequest>,
    ) -> Result<Response<AllReduceResponse>, Status> {
        let AllReduceRequest {
            session,
            epoch,
            sequence,
            src,
            dst,
            num_elems,
            dtype,
            op,
            timeout_ms,
            event,
            algorithm,
        } = request.into_inner();
        let timeout_ms = match timeout_ms {
            0 => self.default_timeout_ms,
            given => given,
        };
        let answer = self.handle.all_reduce(|reply_to| Call {
            reply_to,
            session,
            epoch,
            sequence,
            src: src.map(range),
            dst: dst.map(range),
            num_elems,
            dtype: Dtype::from_wire(dtype),
            op: Op::from_wire(op),
            algorithm: match algorithm {
                0 => Ok(None),
                asked => Algorithm::from_wire(asked).map(Some),
            },
            timeout: Duration::from_millis(u64::from(timeout_ms)),
            unsignalled: event.map(|event| event.ready_value),
            ticket: event.map_or(Ok(None), |event| ticket(&event)),
        });
        let reduced = match answer.await {
            Ok(Ok(reduced)) => reduced,
            Ok(Err(error)) => return Err(self.counted(&error).await),
            Err(stopped) => return Err(stopped.to_status()),
        };
        Ok(Response::new(AllReduceResponse {
            algorithm: allreduce_contract::v1::Algorithm::from(reduced.algorithm) as i32,
            reduce_ns: nanos(reduced.took),
            skew_ns: nanos(reduced.skew),
            last_rank: reduced.last_rank.get(),
            waited_ns: nanos(reduced.waited),
        }))
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Result<Response<PlanResponse>, Status> {
        let PlanRequest {
            session,
            num_elems,
            dtype,
            op,
            algorithm,
        } = request.into_inner();
        let signature =
            signature(num_elems, dtype, op, algorithm).map_err(|error| error.to_status())?;
        let plan = match self.handle.plan(session, signature).await {
            Ok(Ok(plan)) => plan,
            Ok(Err(error)) => return Err(error.to_status()),
            Err(stopped) => return Err(stopped.to_status()),
        };
        let (blocks, data_threads, launch_elems) = match plan.shape {
            Shape::Cuda {
                blocks,
                data_threads,
                launch_elems,
                // Ranks that launch have put theirs into their windows.
                staging: _,
            } => (blocks, data_threads, launch_elems),
            Shape::Copies {
                blocks,
                threads,
                launch_elems,
            } => (blocks, threads, launch_elems),
            Shape::Host { threads } => (u32::try_from(threads).unwrap_or(u32::MAX), 1, num_elems),
        };
        Ok(Response::new(PlanResponse {
            algorithm: allreduce_contract::v1::Algorithm::from(plan.algorithm) as i32,
            blocks,
            data_threads,
            launch_elems,
        }))
    }

    async fn arm(&self, request: Request<ArmRequest>) -> Result<Response<ArmResponse>, Status> {
        self.set_armed(request.into_inner().session, true).await?;
        Ok(Response::new(ArmResponse {}))
    }

    async fn disarm(
        &self,
        request: Request<DisarmRequest>,
    ) -> Result<Response<DisarmResponse>, Status> {
        self.set_armed(request.into_inner().session, false).await?;
        Ok(Response::new(DisarmResponse {}))
    }

    async fn ping(&self, _request: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
        Ok(Response::new(PingResponse {}))
    }
}
