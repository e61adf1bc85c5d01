//! A joined communicator: buffers and reductions.
//!
//! Owns the data connection and the sequence numbers. Refuses what can be refused without a round trip:
//! foreign buffers and ranges that leave them.

use crate::attach::{Arena, Attachment, Errand, ExecutorAt, Membership, Over, Window, exchange};
use crate::buffer::{Buffer, Element, Memory};
use crate::error::{AllReduceError, BufferError, Failed, Refused, StillRunning, connection_ended};
use crate::host_lane::{self, LaneFront};
use crate::sequence::{Sequences, Ticket};
use allreduce_contract::companion::{Kind, Reply, Request};
use allreduce_contract::lane::Signature;
use allreduce_contract::memory::Mapping;
use allreduce_contract::v1::buffers_client::BuffersClient;
use allreduce_contract::v1::collectives_client::CollectivesClient;
use allreduce_contract::v1::{
    self, AllReduceRequest, AllReduceResponse, AllocateRequest, AllocateResponse, BufferRange,
    ErrorCode, Event, PingRequest, Ready, RegisterRequest,
};
use allreduce_contract::window::{AbortReason, Settled};
use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinHandle};
use tonic::transport::Channel;

/// Beyond a call's deadline, which the executor keeps: how long it may take to say so. An executor that
/// stays silent longer is lost.
pub(crate) const ANSWER_GRACE: Duration = Duration::from_secs(5);

/// What a reduction may differ in from the whole buffer with the daemon's deadline.
#[derive(Debug, Clone, Default)]
pub struct AllReduceOptions {
    /// Only these elements; all of the buffer by default.
    pub range: Option<Range<usize>>,
    /// How long to wait for the other ranks; the daemon's `default_timeout_ms` by default.
    pub timeout: Option<Duration>,
    /// Asks for an algorithm, which all ranks must name, instead of letting the plan choose; one that the
    /// backend has not is refused.
    pub algorithm: Option<Algorithm>,
}

impl AllReduceOptions {
    /// Only the first `num_elems` elements: for one buffer that serves tensors of several lengths.
    pub fn prefix(num_elems: usize) -> Self {
        Self {
            range: Some(0..num_elems),
            ..Self::default()
        }
    }

    /// With this deadline.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// With this algorithm.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// For the wire, where 0 means the default.
    fn timeout_ms(&self) -> u32 {
        self.timeout.map_or(0, |timeout| {
            u32::try_from(timeout.as_millis())
                .unwrap_or(u32::MAX)
                .max(1)
        })
    }
}

/// What is known about a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// What reduced.
    pub algorithm: Algorithm,
    /// Time spent reducing: the executor's; on lane delegated this rank's, with its waits for peers in between. This and
    /// what follows are 0 where ranks launch themselves on a GPU: no clock of a host sees it.
    pub reduce_time: Duration,
    /// Time between the first and the last rank's call.
    pub skew: Duration,
    /// How much of that this rank waited for the last one: the call's time less this is what the
    /// reduction cost.
    pub waited: Duration,
    /// The rank that called last.
    pub last_rank: u32,
}

/// The buffers of a reduction come back in either case: with how it went, or with why it did not.
pub type Outcome<B> = Result<(B, Reduction), Box<Failed<B>>>;

/// One rank's membership of one epoch of a communicator. Dropping it leaves.
///
/// All ranks must make the same calls in the same order. Calls may overlap (up to the daemon's
/// `max_in_flight`); the order is that of their first poll. On a lane that shares memory they run one after the other, each
/// on a thread of the runtime that may block.
#[derive(Debug)]
pub struct Communicator {
    rank: u32,
    world_size: u32,
    backend: Backend,
    lane: Lane,
    lane_reason: String,
    warnings: Vec<String>,
    at: ExecutorAt,
    pub(crate) collectives: CollectivesClient<Channel>,
    pub(crate) buffers: BuffersClient<Channel>,
    pub(crate) window: Arc<Window>,
    pub(crate) sequences: Arc<Sequences>,
    /// Where this rank reduces itself.
    host_lane: Option<LaneFront>,
    /// None on backend host. Dropped before `attachment`, which leaves: the executor's memory outlives
    /// this side's.
    #[cfg(feature = "cuda")]
    pub(crate) gpu: Option<crate::cuda::GpuState>,
    pub(crate) attachment: Attachment,
}

impl Communicator {
    pub(crate) fn new(
        attachment: Attachment,
        at: ExecutorAt,
        channel: Channel,
        window: Arc<Window>,
        (rank, world_size): (u32, u32),
        (lane, ready): (Lane, &Ready),
    ) -> Self {
        Self {
            rank,
            world_size,
            backend: window.arena.backend(),
            lane,
            lane_reason: ready.reason.clone(),
            warnings: ready.warnings.clone(),
            at,
            collectives: CollectivesClient::new(channel.clone()),
            buffers: BuffersClient::new(channel),
            sequences: Sequences::new(window.joined.max_in_flight),
            host_lane: window.host_lane.get().map(|lane| {
                LaneFront::new(
                    Arc::clone(lane),
                    window.joined.max_in_flight,
                    window.joined.epoch,
                    attachment.errands.clone(),
                    attachment.membership.clone(),
                )
            }),
            #[cfg(feature = "cuda")]
            gpu: crate::cuda::GpuState::new(&window),
            window,
            attachment,
        }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.window.joined.epoch
    }

    /// The backend in use.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// The lane in use.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// Why this lane.
    pub fn lane_reason(&self) -> &str {
        &self.lane_reason
    }

    /// What makes this communicator slower than it could be, and what to do about it; for people.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Whether the daemon is draining: finish and leave.
    pub fn is_draining(&self) -> bool {
        *self.attachment.draining.borrow()
    }

    pub(crate) fn session(&self) -> u64 {
        self.window.joined.session
    }

    fn owns<T: Element>(&self, buffer: &Buffer<T>) -> bool {
        buffer.is_of(&self.attachment.errands)
    }

    pub(crate) fn errands(&self) -> mpsc::UnboundedSender<Errand> {
        self.attachment.errands.clone()
    }

    /// The arena that this process can write to.
    fn host_arena(&self) -> Result<&Arc<Mapping>, BufferError> {
        match &self.window.arena {
            Arena::Host(mapping) => Ok(mapping),
            #[cfg(feature = "cuda")]
            Arena::Cuda(_) => Err(BufferError::WrongBackend(Backend::Cuda)),
        }
    }

    /// Takes a buffer of `num_elems` elements from the window. Its contents are whatever was there.
    ///
    /// # Errors
    /// [`BufferError`]: the arena is full, the epoch is over, the backend is not host.
    pub async fn allocate<T: Element>(&self, num_elems: usize) -> Result<Buffer<T>, BufferError> {
        let arena = self.host_arena()?;
        let elem_bytes = size_of::<T>();
        let len_bytes = num_elems
            .checked_mul(elem_bytes)
            .and_then(|len_bytes| u64::try_from(len_bytes).ok())
            .ok_or(BufferError::TooLarge {
                num_elems,
                elem_bytes,
            })?;
        let allocated = self.allocate_range(len_bytes).await?;
        Buffer::new(
            allocated.buffer_id,
            Arc::clone(arena),
            allocated.offset_bytes,
            num_elems,
            None,
            self.errands(),
        )
        .ok_or_else(|| BufferError::Window(format!("{allocated:?}")))
    }

    /// Takes a range of the arena.
    pub(crate) async fn allocate_range(
        &self,
        len_bytes: u64,
    ) -> Result<AllocateResponse, BufferError> {
        let session = self.session();
        let request = AllocateRequest { session, len_bytes };
        let mut allocated = bounded(self.buffers.clone().allocate(request)).await;
        if let Err(status) = &allocated
            && matches!(
                Refused::new(status).kind,
                ErrorCode::NoMemory | ErrorCode::Limit
            )
        {
            // Buffers dropped just now may still be on their way back.
            self.flush().await;
            allocated = bounded(self.buffers.clone().allocate(request)).await;
        }
        allocated
            .map(tonic::Response::into_inner)
            .map_err(|status| buffer_error(&status))
    }

    /// Waits until the executor has been told of every buffer dropped so far.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.attachment.errands.send(Errand::Flush(done)).is_ok() {
            // The thread may end instead: then there is nothing left to wait for.
            let _ = tokio::time::timeout(ANSWER_GRACE, flushed).await;
        }
    }

    /// Makes the worker's own memory a buffer: as many whole elements as fit. The executor maps it; the
    /// memory comes back with [`Buffer::into_memory`].
    ///
    /// # Errors
    /// [`BufferError`].
    pub async fn register<T: Element>(&self, memory: Memory) -> Result<Buffer<T>, BufferError> {
        self.host_arena()?;
        let session = self.session();
        let memory_len_bytes = memory.len_bytes().get();
        let request = Request {
            kind: Kind::Hand,
            token: self.at.token,
            session,
            rank: self.rank,
            peer: self.rank,
            len_bytes: memory_len_bytes as u64,
        };
        let companion = self.at.companion.clone();
        // The companion socket is blocking, and mapping takes the executor a while.
        let handed = tokio::task::spawn_blocking(move || {
            let reply = exchange(&companion, &request, Some(memory.sealed().as_fd()));
            (memory, reply)
        });
        let (memory, reply) = handed
            .await
            .map_err(|error| BufferError::Window(error.to_string()))?;
        let memory_handle = match reply {
            Ok((Reply::Kept { handle }, _)) => handle,
            Ok((Reply::Refused(refusal), _)) => {
                return Err(BufferError::Window(refusal.to_string()));
            }
            Ok((reply, _)) => return Err(BufferError::Window(format!("{reply:?}"))),
            Err(reason) => return Err(BufferError::ExecutorLost(reason)),
        };
        let num_elems = memory_len_bytes / size_of::<T>();
        let request = RegisterRequest {
            session,
            memory_handle,
            offset_bytes: 0,
            len_bytes: (num_elems * size_of::<T>()) as u64,
            cuda: None,
            ring_memory: 0,
        };
        let registered = bounded(self.buffers.clone().register(request))
            .await
            .map_err(|status| buffer_error(&status))?
            .into_inner();
        let mapping = memory
            .sealed()
            .map()
            .map_err(|error| BufferError::Window(error.to_string()))?;
        Buffer::new(
            registered.buffer_id,
            Arc::new(mapping),
            0,
            num_elems,
            Some(memory),
            self.errands(),
        )
        .ok_or_else(|| BufferError::Window(format!("{registered:?}")))
    }

    /// Reduces a buffer over all ranks, in place.
    ///
    /// On lane delegated of backend host this rank reduces itself, in shared memory; on lane resident a thread of the executor
    /// does; on lane rpc the executor does, after a round trip.
    ///
    /// If the future is dropped, the call goes on (the other ranks count on it), and the buffer is
    /// released when it is done.
    ///
    /// # Errors
    /// [`Failed`], with the buffer unless the executor is lost.
    pub async fn all_reduce<T: Element>(
        &self,
        buffer: Buffer<T>,
        op: Op,
    ) -> Result<Buffer<T>, Box<Failed<Buffer<T>>>> {
        self.all_reduce_with(buffer, op, AllReduceOptions::default())
            .await
            .map(|(buffer, _)| buffer)
    }

    /// Reduces a buffer over all ranks, in place, with options; says how it went.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub async fn all_reduce_with<T: Element>(
        &self,
        buffer: Buffer<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Outcome<Buffer<T>> {
        if let Some(lane) = &self.host_lane {
            let request = self.lane_request(&buffer, &buffer, op, &options);
            return lane.run(buffer, request).await;
        }
        let id = buffer.id();
        let (owned, num_elems) = (self.owns(&buffer), buffer.len());
        let request = self.request::<T>(owned, [id, id], num_elems, op, &options);
        self.run(buffer, request, &options).await
    }

    /// [`Self::all_reduce_with`] on the calling thread.
    pub(crate) fn all_reduce_with_here<T: Element>(
        &self,
        runtime: &Runtime,
        buffer: Buffer<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Outcome<Buffer<T>> {
        match &self.host_lane {
            Some(lane) => {
                let request = self.lane_request(&buffer, &buffer, op, &options);
                lane.run_here(buffer, request, runtime)
            }
            None => runtime.block_on(self.all_reduce_with(buffer, op, options)),
        }
    }

    /// [`Self::all_reduce_into`] on the calling thread.
    pub(crate) fn all_reduce_into_here<T: Element>(
        &self,
        runtime: &Runtime,
        src: Buffer<T>,
        dst: Buffer<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Outcome<(Buffer<T>, Buffer<T>)> {
        match &self.host_lane {
            Some(lane) => {
                let request = self.lane_request(&src, &dst, op, &options);
                lane.run_here((src, dst), request, runtime)
            }
            None => runtime.block_on(self.all_reduce_into(src, dst, op, options)),
        }
    }

    /// A reduction that this rank runs itself.
    fn lane_request<T: Element>(
        &self,
        src: &Buffer<T>,
        dst: &Buffer<T>,
        op: Op,
        options: &AllReduceOptions,
    ) -> Result<host_lane::Request, AllReduceError> {
        self.check_membership()?;
        if !(self.owns(src) && self.owns(dst)) {
            return Err(AllReduceError::ForeignBuffer);
        }
        let Range { start, end } = range_of(src.len().min(dst.len()), options)?;
        same_len(src, dst)?;
        Ok(host_lane::Request {
            signature: Signature {
                num_elems: (end - start) as u64,
                dtype: T::DTYPE,
                op,
                algorithm: options.algorithm,
            },
            src: src.tensor(start),
            dst: dst.tensor(start),
            // As on the wire.
            timeout: self.timeout(options).max(Duration::from_millis(1)),
        })
    }

    /// Reduces `src` over all ranks into `dst`, which must have as many elements.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub async fn all_reduce_into<T: Element>(
        &self,
        src: Buffer<T>,
        dst: Buffer<T>,
        op: Op,
        options: AllReduceOptions,
    ) -> Outcome<(Buffer<T>, Buffer<T>)> {
        if let Some(lane) = &self.host_lane {
            let request = self.lane_request(&src, &dst, op, &options);
            return lane.run((src, dst), request).await;
        }
        let num_elems = src.len().min(dst.len());
        let owned = self.owns(&src) && self.owns(&dst);
        let request = self
            .request::<T>(owned, [src.id(), dst.id()], num_elems, op, &options)
            .and_then(|request| same_len(&src, &dst).map(|()| request));
        self.run((src, dst), request, &options).await
    }

    fn request<T: Element>(
        &self,
        owned: bool,
        [src, dst]: [u64; 2],
        num_elems: usize,
        op: Op,
        options: &AllReduceOptions,
    ) -> Result<AllReduceRequest, AllReduceError> {
        if !owned {
            return Err(AllReduceError::ForeignBuffer);
        }
        let Range { start, end } = range_of(num_elems, options)?;
        let range = |buffer_id| {
            Some(BufferRange {
                buffer_id,
                offset_bytes: (start * size_of::<T>()) as u64,
            })
        };
        let num_elems = (end - start) as u64;
        Ok(AllReduceRequest {
            src: range(src),
            dst: range(dst),
            ..self.call(num_elems, T::DTYPE, op, options)
        })
    }

    /// A request that lacks its sequence number, its ranges and its event.
    pub(crate) fn call(
        &self,
        num_elems: u64,
        dtype: Dtype,
        op: Op,
        options: &AllReduceOptions,
    ) -> AllReduceRequest {
        AllReduceRequest {
            session: self.session(),
            epoch: self.epoch(),
            num_elems,
            dtype: v1::Dtype::from(dtype) as i32,
            op: v1::Op::from(op) as i32,
            timeout_ms: options.timeout_ms(),
            algorithm: options
                .algorithm
                .map_or(0, |algorithm| v1::Algorithm::from(algorithm) as i32),
            ..AllReduceRequest::default()
        }
    }

    /// The next sequence number, once the executor takes it; or why no call can be made any more.
    pub(crate) async fn take_sequence(&self) -> Result<Ticket, AllReduceError> {
        if let Some(ticket) = self.sequences.take_now() {
            return Ok(ticket);
        }
        let mut membership = self.attachment.membership.clone();
        tokio::select! {
            biased;
            ticket = self.sequences.take() => Ok(ticket),
            // The executor may be lost without an answer to any call that is in flight here.
            error = over(&mut membership) => Err(error),
        }
    }

    /// Why no call can be made any more, if so.
    fn check_membership(&self) -> Result<(), AllReduceError> {
        match &*self.attachment.membership.borrow() {
            Membership::Over(over) => Err(over.to_error()),
            Membership::Joining | Membership::Joined | Membership::Ready(..) => Ok(()),
        }
    }

    /// Whether this rank can go on: no reduction of its own has failed on the GPU, and the epoch is not
    /// over. Costs two loads: no call to the executor, none to CUDA.
    ///
    /// # Errors
    /// [`AllReduceError::Device`] or another for which [`AllReduceError::is_epoch_over`] holds.
    pub fn check(&self) -> Result<(), AllReduceError> {
        match (self.window.control.status(), self.check_membership()) {
            // The kernel was told by who ended the epoch, and the executor's words say more.
            (Some(abort), Err(over)) if abort.reason == AbortReason::Host => Err(over),
            (Some(abort), _) => Err(AllReduceError::Device(abort)),
            (None, membership) => membership,
        }?;
        match &self.host_lane {
            Some(lane) => lane.check(),
            None => Ok(()),
        }
    }

    /// How long the other ranks have to make a call.
    pub(crate) fn timeout(&self, options: &AllReduceOptions) -> Duration {
        options.timeout.unwrap_or_else(|| {
            Duration::from_millis(u64::from(self.window.joined.default_timeout_ms))
        })
    }

    /// Sends a request in a task of its own, which holds `held` until it is answered: the other ranks count
    /// on the call, whether or not who made it still waits.
    pub(crate) fn send<B: Send + 'static>(
        &self,
        ticket: Ticket,
        request: AllReduceRequest,
        timeout: Duration,
        held: B,
    ) -> JoinHandle<(B, Result<AllReduceResponse, AllReduceError>)> {
        let collectives = self.collectives.clone();
        let membership = self.attachment.membership.clone();
        tokio::spawn(async move {
            let limit = timeout.saturating_add(ANSWER_GRACE);
            let answer = answer(collectives, request, membership, limit).await;
            drop(ticket);
            (held, answer)
        })
    }

    /// Makes a call with buffers that come back when it is answered.
    async fn run<B: Send + 'static>(
        &self,
        buffers: B,
        request: Result<AllReduceRequest, AllReduceError>,
        options: &AllReduceOptions,
    ) -> Outcome<B> {
        let failed = |error, buffers| Box::new(Failed { error, buffers });
        let mut request = match request.and_then(|request| {
            self.check_membership()?;
            Ok(request)
        }) {
            Ok(request) => request,
            Err(error) => return Err(failed(error, Some(buffers))),
        };
        let ticket = match self.take_sequence().await {
            Ok(ticket) => ticket,
            Err(error) => return Err(failed(error, Some(buffers))),
        };
        let sequence = ticket.sequence();
        request.sequence = sequence;
        request.event = Some(Event {
            ready_value: sequence,
            ..Event::default()
        });
        // SYNC: ready. What the worker wrote to the buffers is visible to the executor when it sees
        // this.
        self.window.control.set_ready(sequence);
        match self
            .send(ticket, request, self.timeout(options), buffers)
            .await
        {
            Ok((buffers, Ok(response))) => match reduction(&response) {
                Ok(reduction) => Ok((buffers, reduction)),
                Err(error) => Err(failed(error, Some(buffers))),
            },
            Ok((_, Err(error @ AllReduceError::ExecutorLost(_)))) => Err(failed(error, None)),
            Ok((buffers, Err(error))) => Err(failed(error, Some(buffers))),
            Err(error) => Err(failed(cut_off(&error), None)),
        }
    }

    /// Sleeps, without a runtime, until the executor is done with every reduction that was called so
    /// far, so that registered memory may be used for something else after a future was dropped.
    ///
    /// # Errors
    /// [`StillRunning`] after `timeout`.
    pub fn wait_settled(&self, timeout: Duration) -> Result<(), StillRunning> {
        if let Some(lane) = &self.host_lane
            && !lane.wait_settled(timeout)
        {
            return Err(StillRunning(timeout));
        }
        let last = self.sequences.last();
        match self.window.control.wait_settled(last, timeout) {
            Settled::Done | Settled::Ended => Ok(()),
            Settled::Deadline => Err(StillRunning(timeout)),
        }
    }

    /// Lane `resident` of backend cuda: launches the executor's kernel before anybody rings, so that the first ring of a
    /// burst need not wake it. It parks again by itself when nobody rings. On another lane nothing happens.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn arm(&self) -> Result<(), Refused> {
        let request = v1::ArmRequest {
            session: self.session(),
        };
        let armed = bounded(self.collectives.clone().arm(request)).await;
        armed.map(|_| ()).map_err(|status| Refused::new(&status))
    }

    /// Lane `resident` of backend cuda: has the executor's kernel park as soon as no rank has rung. It then takes nothing
    /// from the GPU, and the next ring wakes it.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn disarm(&self) -> Result<(), Refused> {
        let request = v1::DisarmRequest {
            session: self.session(),
        };
        let disarmed = bounded(self.collectives.clone().disarm(request)).await;
        disarmed.map(|_| ()).map_err(|status| Refused::new(&status))
    }

    /// A round trip to the executor that does nothing.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn ping(&self) -> Result<(), Refused> {
        match bounded(self.collectives.clone().ping(PingRequest {})).await {
            Ok(_) => Ok(()),
            Err(status) => Err(Refused::new(&status)),
        }
    }

    /// Leaves the communicator, and waits until the executor knows. The other ranks' next call answers
    /// that this rank left.
    ///
    /// On backend cuda the window is unmapped first, so whatever the rank's streams do with buffers of it must
    /// be done: synchronise them before. The same goes for dropping the communicator.
    pub async fn leave(mut self) {
        #[cfg(feature = "cuda")]
        drop(self.gpu.take());
        // Joining the thread blocks, at most for the leave timeout.
        let left = tokio::task::spawn_blocking(move || self.attachment.leave());
        // It does not panic; were it cut off, the connection would have ended all the same.
        let _ = left.await;
    }
}

impl Over {
    pub(crate) fn to_error(&self) -> AllReduceError {
        match self {
            Over::Refused(refused) => AllReduceError::from_refused(refused.clone()),
            Over::Ended(end) => AllReduceError::EpochEnded(end.clone()),
            Over::Lost(reason) | Over::Window(reason) => {
                AllReduceError::ExecutorLost(reason.clone())
            }
            #[cfg(feature = "cuda")]
            Over::Cuda(error) => AllReduceError::ExecutorLost(error.to_string()),
            Over::Left => AllReduceError::ExecutorLost("this rank has left".to_owned()),
        }
    }
}

/// The elements that are meant, if the buffer has them.
fn range_of(num_elems: usize, options: &AllReduceOptions) -> Result<Range<usize>, AllReduceError> {
    let Range { start, end } = options.range.clone().unwrap_or(0..num_elems);
    if start > end || end > num_elems {
        return Err(AllReduceError::OutOfRange {
            start,
            end,
            num_elems,
        });
    }
    Ok(start..end)
}

fn same_len<T: Element>(src: &Buffer<T>, dst: &Buffer<T>) -> Result<(), AllReduceError> {
    match src.len() == dst.len() {
        true => Ok(()),
        false => Err(AllReduceError::OutOfRange {
            start: 0,
            end: src.len(),
            num_elems: dst.len(),
        }),
    }
}

/// Waits until no call can be made any more, and says why.
pub(crate) async fn over(membership: &mut watch::Receiver<Membership>) -> AllReduceError {
    let state = membership
        .wait_for(|state| matches!(state, Membership::Over(_)))
        .await;
    match state.as_deref() {
        Ok(Membership::Over(over)) => over.to_error(),
        Ok(Membership::Joining | Membership::Joined | Membership::Ready(..)) | Err(_) => {
            AllReduceError::ExecutorLost("the client's thread ended".to_owned())
        }
    }
}

/// A call's task ended without an answer.
pub(crate) fn cut_off(error: &JoinError) -> AllReduceError {
    AllReduceError::ExecutorLost(format!("the call was cut off: {error}"))
}

/// The answer, or that the executor is lost.
async fn answer(
    mut collectives: CollectivesClient<Channel>,
    request: AllReduceRequest,
    mut membership: watch::Receiver<Membership>,
    limit: Duration,
) -> Result<AllReduceResponse, AllReduceError> {
    let lost = async {
        let is_lost = |state: &Membership| matches!(state, Membership::Over(Over::Lost(_)));
        // The thread gone without having lost the executor: this side has left, and the call is
        // answered or times out.
        let state = membership
            .wait_for(is_lost)
            .await
            .map(|state| state.clone());
        match state {
            Ok(Membership::Over(over)) => over.to_error(),
            Ok(Membership::Joining | Membership::Joined | Membership::Ready(..)) | Err(_) => {
                std::future::pending().await
            }
        }
    };
    tokio::select! {
        biased;
        answer = collectives.all_reduce(request) => match answer {
            Ok(response) => Ok(response.into_inner()),
            Err(status) => Err(AllReduceError::from_refused(Refused::new(&status))),
        },
        error = lost => Err(error),
        () = tokio::time::sleep(limit) => Err(AllReduceError::ExecutorLost(format!(
            "no answer within {} ms",
            limit.as_millis()
        ))),
    }
}

/// An answer within [`ANSWER_GRACE`]: a hung executor is reported like a dead one.
pub(crate) async fn bounded<R>(
    answer: impl Future<Output = Result<R, tonic::Status>>,
) -> Result<R, tonic::Status> {
    within(ANSWER_GRACE, answer).await
}

/// An answer within a limit.
pub(crate) async fn within<R>(
    limit: Duration,
    answer: impl Future<Output = Result<R, tonic::Status>>,
) -> Result<R, tonic::Status> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(tonic::Status::unavailable(format!(
            "no answer within {} ms",
            limit.as_millis()
        ))),
    }
}

pub(crate) fn reduction(response: &AllReduceResponse) -> Result<Reduction, AllReduceError> {
    Ok(Reduction {
        algorithm: Algorithm::from_wire(response.algorithm)
            .map_err(|error| AllReduceError::ExecutorLost(error.to_string()))?,
        reduce_time: Duration::from_nanos(response.reduce_ns),
        skew: Duration::from_nanos(response.skew_ns),
        waited: Duration::from_nanos(response.waited_ns),
        last_rank: response.last_rank,
    })
}

pub(crate) fn buffer_error(status: &tonic::Status) -> BufferError {
    let refused = Refused::new(status);
    if refused.is_transport() {
        BufferError::ExecutorLost(connection_ended(&refused))
    } else {
        BufferError::Refused(refused)
    }
}
