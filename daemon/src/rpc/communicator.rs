//! allreduced.v1.Communicator: membership is a stream.
//!
//! Owns one task for each Attach: it joins the rank, answers its heartbeats, passes on what the
//! communicator tells, and detaches the rank when the stream ends for whatever reason.

use crate::communicator::{EndCause, EpochEnd, Gone};
use crate::config::ms;
use crate::executor::{ArenaAt, ExecutorSpec, Handle, JoinedAs, SharedRegion, Tell};
use crate::rpc::ToStatus;
use crate::rpc::status::BadMessage;
use allreduce_contract::Rank;
use allreduce_contract::v1::attach_request::Message as FromRank;
use allreduce_contract::v1::attach_response::Message as ToRank;
use allreduce_contract::v1::communicator_server::Communicator;
use allreduce_contract::v1::{
    AttachRequest, AttachResponse, Backend, CudaWindows, Heartbeat, Hello, Joined, Lane, Leave,
    Mapped, Notice, NoticeKind, Peer, Peers, Ready, Region, RegionKind,
};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// How long a client may take to say Hello after it opened the stream.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a stream stays open for its session's memory to be freed.
const DETACH_TIMEOUT: Duration = Duration::from_secs(10);

/// Messages that may wait for a client that does not read. One that lets them pile up is gone.
const OUTBOUND: usize = 64;

/// Answers Attach.
#[derive(Debug)]
pub(crate) struct CommunicatorService {
    spec: Arc<ExecutorSpec>,
    handle: Handle,
}

impl CommunicatorService {
    pub(crate) fn new(spec: Arc<ExecutorSpec>, handle: Handle) -> Self {
        Self { spec, handle }
    }
}

#[tonic::async_trait]
impl Communicator for CommunicatorService {
    type AttachStream = Pin<Box<dyn Stream<Item = Result<AttachResponse, Status>> + Send>>;

    async fn attach(
        &self,
        request: Request<Streaming<AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut inbound = request.into_inner();
        let hello = first_message(&mut inbound).await?;
        let joined = self
            .handle
            .join(hello)
            .await
            .map_err(|stopped| stopped.to_status())?
            .map_err(|error| error.to_status())?;
        let (outbound, messages) = mpsc::channel(OUTBOUND);
        let mut attachment = Attachment {
            inbound,
            outbound,
            heartbeat_timeout: ms(self.spec.communicator.heartbeat_timeout_ms),
        };
        let (spec, handle) = (Arc::clone(&self.spec), self.handle.clone());
        tokio::spawn(async move {
            let session = joined.session;
            let how = attachment.serve(&spec, &handle, joined).await;
            // The stream stays open until the session's memory is free, so that a rank that has left knows
            // that its own registered memory is unmapped; a GPU that does not go on ends the process.
            let _ = tokio::time::timeout(DETACH_TIMEOUT, handle.detach(session, how)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

async fn first_message(inbound: &mut Streaming<AttachRequest>) -> Result<Hello, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, inbound.message())
        .await
        .map_err(|_| BadMessage("no Hello came within 5 s of Attach").to_status())??;
    match first.and_then(|request| request.message) {
        Some(FromRank::Hello(hello)) => Ok(hello),
        Some(
            FromRank::Heartbeat(_)
            | FromRank::Leave(_)
            | FromRank::Mapped(_)
            | FromRank::Shared(_)
            | FromRank::GaveUp(_),
        )
        | None => Err(BadMessage("the first message on Attach must be Hello").to_status()),
    }
}

struct Attachment {
    inbound: Streaming<AttachRequest>,
    outbound: mpsc::Sender<Result<AttachResponse, Status>>,
    heartbeat_timeout: Duration,
}

impl Attachment {
    /// Serves one rank until it is gone; says how it went.
    async fn serve(&mut self, spec: &ExecutorSpec, handle: &Handle, mut joined: JoinedAs) -> Gone {
        if !self.send(ToRank::Joined(joined_message(spec, &joined))) {
            return Gone::Disconnected;
        }
        let mut deadline = Instant::now() + self.heartbeat_timeout;
        loop {
            tokio::select! {
                message = timeout_at(deadline, self.inbound.message()) => match message {
                    // The timer itself is late: this process did not run, and the heartbeats that came
                    // meanwhile are still to be read.
                    Err(_) if deadline.elapsed() > self.heartbeat_timeout / 4 => {
                        deadline = Instant::now() + self.heartbeat_timeout;
                    }
                    Err(_) => {
                        // It may only have been stopped: when it goes on, it reads why it is out.
                        let (rank, how) = (joined.rank, Gone::Silent);
                        let cause = EndCause::RankGone { rank, how };
                        let epoch = joined.epoch;
                        self.close(EpochEnd { epoch, cause }.to_status());
                        return how;
                    }
                    Ok(Err(_) | Ok(None)) => return Gone::Disconnected,
                    Ok(Ok(Some(request))) => match request.message {
                        Some(FromRank::Heartbeat(heartbeat)) => {
                            deadline = Instant::now() + self.heartbeat_timeout;
                            let Heartbeat { nonce, ring } = heartbeat;
                            if let Some(counts) = ring {
                                handle.rung(joined.session, joined.rank, counts).await;
                            }
                            if !self.send(ToRank::Heartbeat(Heartbeat { nonce, ring: None })) {
                                return Gone::Silent;
                            }
                        }
                        Some(FromRank::Mapped(Mapped { error })) => {
                            let error = (!error.is_empty()).then(|| printable(&error));
                            handle.mapped(joined.session, error).await;
                        }
                        Some(FromRank::Shared(mut shared)) => {
                            shared.error = printable(&shared.error);
                            handle.shared(joined.session, shared).await;
                        }
                        Some(FromRank::GaveUp(mut gave_up)) => {
                            gave_up.reason = printable(&gave_up.reason);
                            handle.gave_up(joined.session, gave_up).await;
                        }
                        Some(FromRank::Leave(Leave { ring })) => {
                            if let Some(counts) = ring {
                                handle.rung(joined.session, joined.rank, counts).await;
                            }
                            return Gone::Left;
                        }
                        Some(FromRank::Hello(_)) | None => {
                            let bad = BadMessage("after Hello, only Heartbeat, Mapped, Shared, GaveUp and Leave may follow");
                            self.close(bad.to_status());
                            return Gone::Disconnected;
                        }
                    },
                },
                Some(tell) = joined.told.recv() => {
                    if !self.tell(spec, tell) {
                        return Gone::Silent;
                    }
                }
            }
        }
    }

    /// Whether it could be sent: a client that lets messages pile up does not live.
    fn send(&self, message: ToRank) -> bool {
        let message = Some(message);
        self.outbound
            .try_send(Ok(AttachResponse { message }))
            .is_ok()
    }

    fn close(&self, status: Status) {
        // If the queue is full or closed, the client learns it from the end of the stream.
        let _ = self.outbound.try_send(Err(status));
    }

    fn tell(&self, spec: &ExecutorSpec, tell: Tell) -> bool {
        match tell {
            Tell::Ready {
                epoch,
                lane,
                warnings,
            } => self.send(ToRank::Ready(Ready {
                epoch,
                lane: Lane::from(lane.lane) as i32,
                reason: lane.reason,
                backend: Backend::from(spec.backend()) as i32,
                warnings,
            })),
            Tell::Peers {
                epoch,
                lane,
                peers,
                resident_blocks,
                island_size,
                host,
            } => {
                let region = |region: SharedRegion| Region {
                    kind: region.kind as i32,
                    len_bytes: region.len_bytes,
                    cuda: region.cuda,
                };
                let peers = peers.into_iter().map(|regions| Peer {
                    regions: regions.into_iter().map(region).collect(),
                });
                self.send(ToRank::Peers(Peers {
                    epoch,
                    lane: Lane::from(lane) as i32,
                    peers: peers.collect(),
                    cuda: match spec.backend() {
                        allreduce_contract::Backend::Host => None,
                        allreduce_contract::Backend::Cuda => Some(CudaWindows {
                            push_slot_bytes: spec.cuda.push_slot_bytes,
                            inband_part_bytes: spec.cuda.inband_part_bytes,
                            staging_part_bytes: spec.cuda.staging_part_bytes,
                            timeout_ms: spec.communicator.default_timeout_ms,
                            resident_blocks,
                            island_size,
                        }),
                    },
                    host,
                }))
            }
            // An epoch that never formed has no members to notify: the stream itself fails, with the
            // missing ranks in its status, as a refused Hello would.
            Tell::Ended(end) if end.cause.is_of_forming() => {
                self.close(end.to_status());
                true
            }
            Tell::Ended(end) => self.send(ToRank::Notice(Notice {
                kind: NoticeKind::Abort as i32,
                reason: end.to_string(),
                rank: end.cause.rank().map(Rank::get),
                epoch: end.epoch,
            })),
            Tell::Drain => self.send(ToRank::Notice(Notice {
                kind: NoticeKind::Drain as i32,
                reason: "the daemon is draining: finish and leave".to_owned(),
                rank: None,
                epoch: 0,
            })),
        }
    }
}

fn joined_message(spec: &ExecutorSpec, joined: &JoinedAs) -> Joined {
    let region = |kind: RegionKind, len_bytes, cuda| Region {
        kind: kind as i32,
        len_bytes,
        cuda,
    };
    let (cuda, nonce) = match &joined.arena {
        ArenaAt::Companion => (None, 0),
        ArenaAt::Cuda { memory, nonce } => (Some(memory.clone()), *nonce),
    };
    Joined {
        session: joined.session,
        epoch: joined.epoch,
        regions: vec![
            region(RegionKind::Control, joined.control_len_bytes, None),
            region(RegionKind::Arena, joined.arena_len_bytes, cuda),
        ],
        heartbeat_interval_ms: spec.communicator.heartbeat_interval_ms,
        heartbeat_timeout_ms: spec.communicator.heartbeat_timeout_ms,
        max_in_flight: spec.communicator.max_in_flight,
        default_timeout_ms: spec.communicator.default_timeout_ms,
        nonce,
    }
}

/// A client's words, fit for a terminal and a log.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(500).collect()
}
