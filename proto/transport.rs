//! gRPC's byte stream over a Unix socket, without the wake-ups that tokio's own brings.
//!
//! Owns [`UnixIo`], which the client dials with and the daemon accepts. tokio registers every socket for
//! both directions at once; on a Unix socket the kernel then wakes a sender each time its peer reads
//! (unix_write_space), which for small messages is one useless wake-up an RPC and side, of 30 us where
//! the processor was idle (docs/benchmarks.md, "transport"). This one registers for reading, and for
//! writing from the first time that the socket's buffer was full.
#![allow(unsafe_code)] // room: file descriptors

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, UnixAddr, recv, sendmsg, shutdown};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// A connected, non-blocking Unix stream socket on a tokio runtime.
#[derive(Debug)]
pub struct UnixIo {
    reader: AsyncFd<OwnedFd>,
    /// The same socket by another descriptor; exists from the first time its buffer was full.
    writer: Option<AsyncFd<OwnedFd>>,
}

impl UnixIo {
    /// Takes a connected stream socket; makes it non-blocking. On a tokio runtime with I/O.
    ///
    /// # Errors
    /// If the socket cannot be made non-blocking or registered.
    pub fn new(socket: std::os::unix::net::UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            reader: watch(socket.into(), Interest::READABLE)?,
            writer: None,
        })
    }

    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let sent = sendmsg::<UnixAddr>(
                self.reader.as_raw_fd(),
                buffers,
                &[],
                MsgFlags::MSG_NOSIGNAL,
                None,
            );
            match sent {
                Ok(len) => return Poll::Ready(Ok(len)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    let writer = match &mut self.writer {
                        Some(writer) => writer,
                        none => {
                            let again = self.reader.get_ref().as_fd().try_clone_to_owned()?;
                            none.insert(watch(again, Interest::WRITABLE)?)
                        }
                    };
                    // Registering tells the state of now, so room that came since EAGAIN is not missed.
                    ready!(writer.poll_write_ready(context))?.clear_ready();
                }
                Err(errno) => return Poll::Ready(Err(errno.into())),
            }
        }
    }
}

fn watch(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and names the same description until it is dropped, which the AsyncFd
    // that owns it does after it has let go of the registration.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

impl AsyncRead for UnixIo {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let mut ready = ready!(this.reader.poll_read_ready(context))?;
            let space = buffer.initialize_unfilled();
            let capacity = space.len();
            match recv(this.reader.as_raw_fd(), space, MsgFlags::empty()) {
                Ok(len) => {
                    // A short read has emptied the socket; what comes later wakes anew.
                    if len > 0 && len < capacity {
                        ready.clear_ready();
                    }
                    buffer.advance(len);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(errno) => return Poll::Ready(Err(errno.into())),
            }
        }
    }
}

impl AsyncWrite for UnixIo {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_send(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_send(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(shutdown(self.reader.as_raw_fd(), Shutdown::Write).map_err(io::Error::from))
    }
}

/// Dials a gRPC server on a Unix socket, any path. The authority is "localhost": HTTP/2 allows no path
/// there. Redials by itself when the connection was lost.
///
/// # Errors
/// If nobody listens there.
#[cfg(feature = "client")]
pub async fn dial(
    socket: &std::path::Path,
) -> Result<tonic::transport::Channel, tonic::transport::Error> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            let io = UnixIo::new(stream.into_std()?)?;
            Ok::<_, io::Error>(hyper_util::rt::TokioIo::new(io))
        }
    });
    tonic::transport::Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
}

/// An error and its causes, in one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(feature = "server")]
impl tonic::transport::server::Connected for UnixIo {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::net::UnixStream;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn pair() -> (UnixIo, UnixIo) {
        let (one, other) = UnixStream::pair().unwrap();
        (UnixIo::new(one).unwrap(), UnixIo::new(other).unwrap())
    }

    #[tokio::test]
    async fn small_messages_cross_both_ways() {
        let (mut one, mut other) = pair();
        for round in 0..100_u32 {
            one.write_all(&round.to_le_bytes()).await.unwrap();
            assert_eq!(other.read_u32_le().await.unwrap(), round);
            other.write_all(&round.to_le_bytes()).await.unwrap();
            assert_eq!(one.read_u32_le().await.unwrap(), round);
        }
        assert!(one.writer.is_none() && other.writer.is_none());
    }

    #[tokio::test]
    async fn a_full_socket_waits_for_its_reader() {
        let (mut one, mut other) = pair();
        let sent: Vec<u8> = (0..8_000_000_u32).map(|index| index as u8).collect();
        let expected = sent.clone();
        let writing = tokio::spawn(async move {
            one.write_all(&sent).await.unwrap();
            one.shutdown().await.unwrap();
            one
        });
        let mut received = Vec::new();
        other.read_to_end(&mut received).await.unwrap();
        assert!(received == expected);
        let one = writing.await.unwrap();
        assert!(one.writer.is_some(), "the socket was never full");
    }

    #[tokio::test]
    async fn the_end_of_the_peer_is_seen() {
        let (mut one, other) = pair();
        drop(other);
        assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0);
        let error = one.write(b"x").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
