//! The companion protocol: how file descriptors cross between client and executor.
//!
//! gRPC carries no descriptors, so each executor listens on a second Unix socket, SOCK_SEQPACKET. A
//! client connects, sends one [`Request`], gets one [`Reply`], with a descriptor in one of them, and
//! disconnects. This module owns the packets and the two system calls; who may ask for what is the
//! executor's business.
//!
//! | request | descriptor in | reply | descriptor out |
//! | --- | --- | --- | --- |
//! | [`Kind::Control`] | | length | the region of the session's own window |
//! | [`Kind::Arena`], [`Kind::Lane`] | | length | the region of the peer that is named, read-only unless it is the session's own |
//! | [`Kind::Board`] | | length | the board of the session's epoch |
//! | [`Kind::Kernels`] | | length | the image of the kernels, to be read |
//! | [`Kind::Hand`] | a sealed memfd | handle for Buffers.Register | |
//!
//! Numbers are little endian.

use crate::v1::RegionKind;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Length of the token that Open answers.
pub const TOKEN_LEN: usize = 16;

/// "ARFD", little endian: first word of each packet.
const MAGIC: u32 = 0x4446_5241;
const REQUEST_LEN: usize = 4 + 4 + 4 + 4 + 4 + 8 + 8 + TOKEN_LEN;
const REPLY_LEN: usize = 4 + 4 + 8 + 8;

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Send me the control page of my window.
    Control,
    /// Send me the arena of my window, or of a peer's.
    Arena,
    /// Send me the image of the kernels.
    Kernels,
    /// Send me my lane, or a peer's.
    Lane,
    /// Send me the board of my epoch.
    Board,
    /// Here is a memory of mine, to be registered.
    Hand,
}

impl Kind {
    const ALL: [Kind; 6] = [
        Kind::Control,
        Kind::Arena,
        Kind::Lane,
        Kind::Board,
        Kind::Kernels,
        Kind::Hand,
    ];

    const fn code(self) -> u32 {
        match self {
            Kind::Control => RegionKind::Control as u32,
            Kind::Arena => RegionKind::Arena as u32,
            Kind::Kernels => RegionKind::Kernels as u32,
            Kind::Lane => RegionKind::Lane as u32,
            Kind::Board => RegionKind::Board as u32,
            Kind::Hand => 0x100,
        }
    }
}

/// What a client asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What it is about.
    pub kind: Kind,
    /// The executor's token, from Open.
    pub token: [u8; TOKEN_LEN],
    /// The session, from Joined.
    pub session: u64,
    /// The session's rank.
    pub rank: u32,
    /// With [`Kind::Arena`] and [`Kind::Lane`]: the rank whose region is wanted, of the same epoch.
    pub peer: u32,
    /// With [`Kind::Hand`]: length of the memory, bytes.
    pub len_bytes: u64,
}

/// What the executor answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The region follows as a descriptor.
    Region {
        /// Its length.
        len_bytes: u64,
    },
    /// The memory is kept under this handle.
    Kept {
        /// For RegisterRequest.memory_handle.
        handle: u64,
    },
    /// No.
    Refused(Refusal),
}

/// Why the executor refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The packet is not a request of this version.
    #[error("the packet is not a request of this version of the companion protocol")]
    Malformed,
    /// The token is not this executor's.
    #[error("the token is not this executor's")]
    BadToken,
    /// No such session, or another rank's.
    #[error("there is no such session, or it is another rank's")]
    UnknownSession,
    /// The memory handed over is not a sealed memfd of the announced length.
    #[error("the memory handed over is not a sealed memfd of the announced length")]
    NotSealed,
    /// The session has handed over as many memories as it may.
    #[error("the session has handed over as many memories as it may")]
    TooMany,
    /// The executor has this memory mapped already, for this rank or another.
    #[error("the executor has this memory already: hand each over once, and no window")]
    Known,
    /// The executor could not keep or allocate it.
    #[error("the executor could not map or allocate the memory")]
    NoMemory,
}

impl Refusal {
    const ALL: [Refusal; 7] = [
        Refusal::Malformed,
        Refusal::BadToken,
        Refusal::UnknownSession,
        Refusal::NotSealed,
        Refusal::TooMany,
        Refusal::Known,
        Refusal::NoMemory,
    ];

    const fn code(self) -> u32 {
        match self {
            Refusal::Malformed => 16,
            Refusal::BadToken => 17,
            Refusal::UnknownSession => 18,
            Refusal::NotSealed => 19,
            Refusal::TooMany => 20,
            Refusal::NoMemory => 21,
            Refusal::Known => 22,
        }
    }
}

const REPLY_REGION: u32 = 0;
const REPLY_KEPT: u32 = 1;

/// A packet could not be sent, received or read.
#[derive(Debug, thiserror::Error)]
pub enum CompanionError {
    /// The system call failed; EAGAIN on a non-blocking socket that is not ready.
    #[error("companion socket: {0}")]
    Socket(Errno),
    /// The peer closed the connection.
    #[error("companion socket: the peer closed the connection")]
    Closed,
    /// The packet is not one of the protocol's.
    #[error("companion socket: the packet is not one of this protocol's")]
    Malformed,
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

impl Request {
    fn encode(&self) -> Vec<u8> {
        let mut packet = Vec::with_capacity(REQUEST_LEN);
        packet.extend(MAGIC.to_le_bytes());
        packet.extend(crate::window::ABI_VERSION.to_le_bytes());
        packet.extend(self.kind.code().to_le_bytes());
        packet.extend(self.rank.to_le_bytes());
        packet.extend(self.peer.to_le_bytes());
        packet.extend(self.session.to_le_bytes());
        packet.extend(self.len_bytes.to_le_bytes());
        packet.extend(self.token);
        packet
    }

    fn decode(packet: &[u8]) -> Option<Self> {
        let mut fields = Fields(packet);
        if packet.len() != REQUEST_LEN
            || fields.u32()? != MAGIC
            || fields.u32()? != crate::window::ABI_VERSION
        {
            return None;
        }
        let kind = fields.u32()?;
        Some(Self {
            kind: Kind::ALL.into_iter().find(|known| known.code() == kind)?,
            rank: fields.u32()?,
            peer: fields.u32()?,
            session: fields.u64()?,
            len_bytes: fields.u64()?,
            token: fields.take()?,
        })
    }

    /// Client: sends the request, with the descriptor that [`Kind::Hand`] takes.
    ///
    /// # Errors
    /// [`CompanionError::Socket`].
    pub fn send(
        &self,
        socket: BorrowedFd<'_>,
        memory: Option<BorrowedFd<'_>>,
    ) -> Result<(), CompanionError> {
        send(socket, &self.encode(), memory)
    }

    /// Executor: receives a request, and the descriptor that came with it.
    ///
    /// # Errors
    /// [`CompanionError`]; Malformed is to be answered with [`Refusal::Malformed`].
    pub fn receive(socket: BorrowedFd<'_>) -> Result<(Self, Option<OwnedFd>), CompanionError> {
        let (packet, fd) = receive::<REQUEST_LEN>(socket)?;
        let request = Self::decode(&packet).ok_or(CompanionError::Malformed)?;
        Ok((request, fd))
    }
}

impl Reply {
    fn encode(self) -> Vec<u8> {
        let (code, number) = match self {
            Reply::Region { len_bytes } => (REPLY_REGION, len_bytes),
            Reply::Kept { handle } => (REPLY_KEPT, handle),
            Reply::Refused(refusal) => (refusal.code(), 0),
        };
        let mut packet = Vec::with_capacity(REPLY_LEN);
        packet.extend(MAGIC.to_le_bytes());
        packet.extend(code.to_le_bytes());
        packet.extend(number.to_le_bytes());
        packet.extend(0_u64.to_le_bytes());
        packet
    }

    fn decode(packet: &[u8]) -> Option<Self> {
        let mut fields = Fields(packet);
        if packet.len() != REPLY_LEN || fields.u32()? != MAGIC {
            return None;
        }
        let (code, number) = (fields.u32()?, fields.u64()?);
        match code {
            REPLY_REGION => Some(Reply::Region { len_bytes: number }),
            REPLY_KEPT => Some(Reply::Kept { handle: number }),
            refusal => Refusal::ALL
                .into_iter()
                .find(|known| known.code() == refusal)
                .map(Reply::Refused),
        }
    }

    /// Executor: sends the reply, with the region's descriptor.
    ///
    /// # Errors
    /// [`CompanionError::Socket`].
    pub fn send(
        self,
        socket: BorrowedFd<'_>,
        region: Option<BorrowedFd<'_>>,
    ) -> Result<(), CompanionError> {
        send(socket, &self.encode(), region)
    }

    /// Client: receives the reply, and the descriptor that came with it.
    ///
    /// # Errors
    /// [`CompanionError`].
    pub fn receive(socket: BorrowedFd<'_>) -> Result<(Self, Option<OwnedFd>), CompanionError> {
        let (packet, fd) = receive::<REPLY_LEN>(socket)?;
        let reply = Self::decode(&packet).ok_or(CompanionError::Malformed)?;
        Ok((reply, fd))
    }
}

fn send(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), CompanionError> {
    let fds: Vec<RawFd> = fd.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control = if fds.is_empty() { &[][..] } else { &rights[..] };
    sendmsg::<UnixAddr>(
        socket.as_fd().as_raw_fd(),
        &[IoSlice::new(packet)],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )
    .map(|_| ())
    .map_err(CompanionError::Socket)
}

/// Descriptors that one packet can carry at most (SCM_MAX_FD of unix(7)).
const MAX_DESCRIPTORS: usize = 253;

/// Receives one packet and at most one descriptor. Whatever came along is owned at once: a peer that
/// sends more, or at a moment when this process has no free descriptor, leaves none open here.
fn receive<const LEN: usize>(
    socket: BorrowedFd<'_>,
) -> Result<(Vec<u8>, Option<OwnedFd>), CompanionError> {
    // One byte more than a packet has, so that a longer one shows.
    let mut packet = vec![0_u8; LEN + 1];
    let mut control = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let (len_bytes, fds) = receive_owned(socket, &mut packet, &mut control)?;
    if len_bytes == 0 {
        return Err(CompanionError::Closed);
    }
    packet.truncate(len_bytes);
    let mut fds = fds.into_iter();
    match (fds.next(), fds.next()) {
        (fd, None) => Ok((packet, fd)),
        // Dropping them closes them.
        (_, Some(_)) => Err(CompanionError::Malformed),
    }
}

/// recvmsg(2) that owns every descriptor which the kernel installed, also where it had to truncate the
/// control data; nix's iterator then gives none of them, and they would stay open for ever.
#[allow(unsafe_code)] // room: file descriptors
fn receive_owned(
    socket: BorrowedFd<'_>,
    packet: &mut [u8],
    control: &mut Vec<u8>,
) -> Result<(usize, Vec<OwnedFd>), CompanionError> {
    let mut part = libc::iovec {
        iov_base: packet.as_mut_ptr().cast(),
        iov_len: packet.len(),
    };
    // SAFETY: msghdr is plain data for which all zeroes is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control.capacity();
    // SAFETY: the message names two live buffers with their lengths, which nobody else uses meanwhile;
    // the capacity of `control` is allocated, and the kernel writes before anything is read.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let len_bytes = Errno::result(received).map_err(CompanionError::Socket)?;
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled msg_control up to msg_controllen with well-formed headers, which the
    // CMSG macros walk without leaving it. Each descriptor in them was made by this call for this
    // process, and nobody else knows it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let is_rights =
                (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS;
            if is_rights {
                let data = libc::CMSG_DATA(header);
                let start = data.addr() - header.addr();
                let count = (*header).cmsg_len.saturating_sub(start) / size_of::<RawFd>();
                for index in 0..count {
                    let fd = data.cast::<RawFd>().add(index).read_unaligned();
                    fds.push(OwnedFd::from_raw_fd(fd));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((usize::try_from(len_bytes).unwrap_or(0), fds))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    use std::num::NonZeroUsize;

    fn sockets() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap()
    }

    fn request(kind: Kind) -> Request {
        Request {
            kind,
            token: [9; TOKEN_LEN],
            session: 3,
            rank: 2,
            peer: 1,
            len_bytes: 4096,
        }
    }

    #[test]
    fn packets_and_descriptors_cross() {
        let (client, executor) = sockets();
        let memory =
            crate::memory::SealedMemory::create(c"test", NonZeroUsize::new(4096).unwrap()).unwrap();
        let sent = request(Kind::Hand);
        sent.send(client.as_fd(), Some(memory.as_fd())).unwrap();
        let (received, fd) = Request::receive(executor.as_fd()).unwrap();
        assert_eq!(received, sent);
        assert!(crate::memory::SealedMemory::adopt(fd.unwrap(), 4096).is_ok());
        for reply in [
            Reply::Region { len_bytes: 1 },
            Reply::Kept { handle: u64::MAX },
            Reply::Refused(Refusal::TooMany),
        ] {
            reply.send(executor.as_fd(), None).unwrap();
            assert_eq!(Reply::receive(client.as_fd()).unwrap().0, reply);
        }
    }

    #[test]
    fn descriptors_too_many_are_closed() {
        let (client, executor) = sockets();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let null = std::fs::File::open("/dev/null").unwrap();
        let packet = request(Kind::Hand).encode();
        let before = open();
        for count in [2, 5, MAX_DESCRIPTORS] {
            let fds = vec![null.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&fds)];
            let part = [IoSlice::new(&packet)];
            sendmsg::<UnixAddr>(client.as_raw_fd(), &part, &rights, MsgFlags::empty(), None)
                .unwrap();
            let received = Request::receive(executor.as_fd());
            assert!(
                matches!(received, Err(CompanionError::Malformed)),
                "{count}"
            );
        }
        // Other tests of this process open and close some meanwhile; 250 would show.
        assert!(open() < before + 100, "{} {}", before, open());
    }

    #[test]
    fn foreign_packets_are_refused() {
        let (client, executor) = sockets();
        let whole = request(Kind::Arena).encode();
        let mut longer = whole.clone();
        longer.push(0);
        let mut other_kind = whole.clone();
        other_kind[8] = 77;
        for packet in [&whole[..20], &longer, &other_kind] {
            send(client.as_fd(), packet, None).unwrap();
            assert!(matches!(
                Request::receive(executor.as_fd()),
                Err(CompanionError::Malformed)
            ));
        }
        drop(client);
        assert!(matches!(
            Request::receive(executor.as_fd()),
            Err(CompanionError::Closed)
        ));
    }
}
