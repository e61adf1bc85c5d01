//! The companion socket: descriptors in and out.
//!
//! Owns the listener and a task for each connection, each with a deadline. Refuses whoever does not
//! show the token and the session's own rank.

use crate::executor::Handle;
use allreduce_contract::companion::{CompanionError, Kind, Refusal, Reply, Request};
use allreduce_contract::memory::SealedMemory;
use nix::sys::socket::{SockFlag, accept4};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How long one exchange may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// Serves the socket; the future ends only with the runtime.
pub(crate) fn serve(
    listener: OwnedFd,
    handle: Handle,
) -> io::Result<impl Future<Output = ()> + Send> {
    let listener = watched(listener)?;
    Ok(async move {
        loop {
            match accept(&listener).await {
                Ok(connection) => {
                    let handle = handle.clone();
                    tokio::spawn(async move {
                        match tokio::time::timeout(DEADLINE, exchange(connection, &handle)).await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => tracing::debug!(%error, "companion"),
                            Err(_) => tracing::debug!("companion: no request in time"),
                        }
                    });
                }
                Err(error) => {
                    // Out of descriptors, say: others may free some.
                    tracing::warn!(%error, "companion: accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    })
}

async fn accept(listener: &AsyncFd<OwnedFd>) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let accepted = listener
        .async_io(Interest::READABLE, |listener| {
            accept4(listener, flags).map_err(io::Error::from)
        })
        .await?;
    watched(accepted)
}

#[allow(unsafe_code)] // room: file descriptors
fn watched(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and names the same description until it is dropped, which the AsyncFd
    // that owns it does after it has let go of the registration.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// The io::Error that makes AsyncFd wait and try again, where the socket was not ready.
fn retryable(error: CompanionError) -> io::Error {
    match error {
        CompanionError::Socket(errno) => errno.into(),
        CompanionError::Closed => io::ErrorKind::UnexpectedEof.into(),
        CompanionError::Malformed => io::ErrorKind::InvalidData.into(),
    }
}

async fn exchange(connection: AsyncFd<OwnedFd>, handle: &Handle) -> io::Result<()> {
    let received = connection
        .async_io(Interest::READABLE, |socket| {
            Request::receive(socket.as_fd()).map_err(retryable)
        })
        .await;
    let (reply, region) = match received {
        Ok((request, memory)) => match answer(request, memory, handle).await {
            Ok((reply, region)) => (reply, region),
            Err(refusal) => (Reply::Refused(refusal), None),
        },
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            (Reply::Refused(Refusal::Malformed), None)
        }
        Err(error) => return Err(error),
    };
    connection
        .async_io(Interest::WRITABLE, |socket| {
            let region = region.as_ref().map(AsFd::as_fd);
            reply.send(socket.as_fd(), region).map_err(retryable)
        })
        .await
}

async fn answer(
    request: Request,
    memory: Option<OwnedFd>,
    handle: &Handle,
) -> Result<(Reply, Option<OwnedFd>), Refusal> {
    if !handle.is_token(&request.token) {
        return Err(Refusal::BadToken);
    }
    let Request {
        kind,
        session,
        rank,
        peer,
        len_bytes,
        token: _,
    } = request;
    match kind {
        Kind::Control | Kind::Arena | Kind::Lane | Kind::Board | Kind::Kernels => {
            let (fd, len_bytes) = handle
                .region(session, rank, kind, peer)
                .await
                .map_err(|_| Refusal::UnknownSession)??;
            Ok((Reply::Region { len_bytes }, Some(fd)))
        }
        Kind::Hand => {
            let memory = memory.ok_or(Refusal::Malformed)?;
            let memory = SealedMemory::adopt(memory, len_bytes).map_err(|_| Refusal::NotSealed)?;
            let kept = handle
                .hand(session, rank, memory)
                .await
                .map_err(|_| Refusal::UnknownSession)??;
            Ok((Reply::Kept { handle: kept }, None))
        }
    }
}
