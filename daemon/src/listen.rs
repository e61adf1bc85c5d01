//! Unix sockets: checking paths, taking over stale ones, binding with the configured owner and mode.
//!
//! Owns the files it makes: the socket, its lock, the executors' directory. The supervisor and the
//! executors call it before they serve. Refuses to displace a live daemon or to remove anything that is
//! not a dead socket.

use allreduce_contract::MAX_SOCKET_PATH_LEN;
use allreduce_contract::transport::UnixIo;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen,
    socket as nix_socket,
};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Gid, Group, chown};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};

/// Bytes that the name of an executor's socket adds to the daemon's: ".d/" and [`executor_name`].
const EXECUTOR_SUFFIX_LEN: usize = ".d/x0123456789abcdef.sock".len();

/// Why a socket is not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// The path is too long for the kernel.
    #[error(
        "socket path {} has {} bytes, at most {MAX_SOCKET_PATH_LEN} fit a Unix socket address",
        .0.display(),
        .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    /// The daemon's own path fits, its executors' would not.
    #[error(
        "socket path {} has {} bytes; with {EXECUTOR_SUFFIX_LEN} more for the executors' sockets it exceeds the {MAX_SOCKET_PATH_LEN} that fit a Unix socket address",
        .0.display(),
        .0.as_os_str().len()
    )]
    NoRoom(PathBuf),
    /// The path is empty, relative, or names a directory.
    #[error("socket path {:?} is not an absolute path to a file", .0.display())]
    NotAbsolute(PathBuf),
    /// A daemon serves here.
    #[error("a daemon{} is serving on {}: stop it first, or use another socket", pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default(), path.display())]
    Live {
        /// The socket.
        path: PathBuf,
        /// The daemon's process id, if it is known.
        pid: Option<u32>,
    },
    /// Something else is at the path.
    #[error("{} exists and is not a socket: it is left alone; move it away or use another path", .0.display())]
    NotASocket(PathBuf),
    /// Another user could replace the socket.
    #[error(
        "the directory {} belongs to uid {uid}, who could replace the socket: use one of this user's or root's",
        path.display()
    )]
    ForeignDirectory {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// The configured group does not exist.
    #[error("there is no group {0:?} (listen.group)")]
    NoSuchGroup(String),
    /// A system call failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ListenError {
    move |source| ListenError::Io {
        what,
        path: path.to_owned(),
        source,
    }
}

/// Checks that a path can be the daemon's socket, without touching it.
///
/// # Errors
/// [`ListenError::NotAbsolute`], [`ListenError::TooLong`], [`ListenError::NoRoom`].
pub(crate) fn check_path(path: &Path) -> Result<(), ListenError> {
    if !path.is_absolute() || path.file_name().is_none() {
        return Err(ListenError::NotAbsolute(path.to_owned()));
    }
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH_LEN {
        Err(ListenError::TooLong(path.to_owned()))
    } else if len + EXECUTOR_SUFFIX_LEN > MAX_SOCKET_PATH_LEN {
        Err(ListenError::NoRoom(path.to_owned()))
    } else {
        Ok(())
    }
}

/// Who may connect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    mode: u32,
    group: Option<Gid>,
}

impl Access {
    /// From the configuration; an empty group leaves the group.
    pub(crate) fn new(mode: u32, group: &str) -> Result<Self, ListenError> {
        let group = if group.is_empty() {
            None
        } else {
            let found = Group::from_name(group).ok().flatten();
            Some(
                found
                    .ok_or_else(|| ListenError::NoSuchGroup(group.to_owned()))?
                    .gid,
            )
        };
        Ok(Self { mode, group })
    }

    /// The numbers, for an executor's command.
    pub(crate) fn to_parts(self) -> (u32, Option<u32>) {
        (self.mode, self.group.map(Gid::as_raw))
    }

    pub(crate) fn from_parts(mode: u32, group: Option<u32>) -> Self {
        Self {
            mode,
            group: group.map(Gid::from_raw),
        }
    }

    /// Runs `bind` such that the file it makes never grants more than configured, and sets it so.
    fn apply<R>(
        self,
        path: &Path,
        bind: impl FnOnce() -> Result<R, ListenError>,
    ) -> Result<R, ListenError> {
        // Until the group is set, nobody but the owner gets in.
        let first = if self.group.is_some() {
            self.mode & 0o700
        } else {
            self.mode
        };
        let before = umask(Mode::from_bits_truncate(0o777 & !first));
        let bound = bind();
        umask(before);
        let bound = bound?;
        if self.group.is_some() {
            chown(path, None, self.group)
                .map_err(io::Error::from)
                .map_err(io_error("cannot set the group of", path))?;
            fs::set_permissions(path, fs::Permissions::from_mode(self.mode))
                .map_err(io_error("cannot set the mode of", path))?;
        }
        Ok(bound)
    }
}

/// A socket file that this process bound; removed on drop if it is still the same file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    inode: Option<(u64, u64)>,
}

impl SocketFile {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            inode: identity(path),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.inode.is_some() && identity(&self.path) == self.inode {
            // Nothing to do about a failure: the next start removes the dead socket.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The daemon's socket, bound and locked.
#[derive(Debug)]
pub(crate) struct DaemonSocket {
    pub(crate) listener: UnixListener,
    // Dropped in this order: the socket goes while the lock is still held.
    _file: SocketFile,
    _lock: Lock,
}

/// Binds the daemon's socket: takes the lock, removes a dead socket, makes the directory.
///
/// # Errors
/// [`ListenError`]; nothing was displaced then.
pub(crate) fn bind_daemon(path: &Path, access: Access) -> Result<DaemonSocket, ListenError> {
    check_path(path)?;
    if let Some(parent) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)
            .map_err(io_error("cannot create the directory", parent))?;
    }
    check_owner(path)?;
    let lock = Lock::take(path)?;
    clear_stale(path)?;
    let (listener, file) = bind_stream(path, access)?;
    Ok(DaemonSocket {
        listener,
        _file: file,
        _lock: lock,
    })
}

/// Refuses a directory of another user, who could replace the socket. Root's is fine.
fn check_owner(path: &Path) -> Result<(), ListenError> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    let metadata = fs::symlink_metadata(parent).map_err(io_error("cannot look at", parent))?;
    let own = nix::unistd::geteuid().as_raw();
    if metadata.uid() == own || metadata.uid() == 0 {
        Ok(())
    } else {
        Err(ListenError::ForeignDirectory {
            path: parent.to_owned(),
            uid: metadata.uid(),
        })
    }
}

/// Binds a gRPC socket at a path that nobody uses.
pub(crate) fn bind_stream(
    path: &Path,
    access: Access,
) -> Result<(UnixListener, SocketFile), ListenError> {
    let listener = access.apply(path, || {
        UnixListener::bind(path).map_err(io_error("cannot bind", path))
    })?;
    let file = SocketFile::new(path);
    listener
        .set_nonblocking(true)
        .map_err(io_error("cannot use", path))?;
    Ok((listener, file))
}

/// The connections of a listener, as tonic serves them. tonic asks again at once after an error; where
/// descriptors have run out that would spin, so there is a pause.
pub(crate) fn accept(
    listener: tokio::net::UnixListener,
) -> impl Stream<Item = io::Result<UnixIo>> + Send {
    UnixListenerStream::new(listener).then(|accepted| async {
        let taken = accepted.and_then(|stream| UnixIo::new(stream.into_std()?));
        if let Err(error) = &taken {
            tracing::warn!(%error, "cannot accept a connection");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        taken
    })
}

/// Binds a companion socket (SOCK_SEQPACKET, non-blocking) at a path that nobody uses.
pub(crate) fn bind_seqpacket(
    path: &Path,
    access: Access,
) -> Result<(OwnedFd, SocketFile), ListenError> {
    let errno = |what| {
        let convert = io_error(what, path);
        move |errno: Errno| convert(io::Error::from(errno))
    };
    let listener = nix_socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
    .map_err(errno("cannot make a socket for"))?;
    access.apply(path, || {
        let address = UnixAddr::new(path).map_err(errno("cannot bind"))?;
        bind(listener.as_raw_fd(), &address).map_err(errno("cannot bind"))
    })?;
    let file = SocketFile::new(path);
    listen(&listener, Backlog::MAXALLOWABLE).map_err(errno("cannot listen on"))?;
    Ok((listener, file))
}

/// An exclusive lock beside the socket. While it is held, the daemon lives, whatever the socket says.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    file: Flock<File>,
}

impl Lock {
    fn take(socket: &Path) -> Result<Self, ListenError> {
        let path = with_suffix(socket, ".lock");
        loop {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(nix::libc::O_NOFOLLOW)
                .open(&path)
                .map_err(io_error("cannot open the lock", &path))?;
            let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((mut file, Errno::EWOULDBLOCK)) => {
                    let mut text = String::new();
                    // Only for the message: a lock whose owner has not written yet has no pid.
                    let _ = file.read_to_string(&mut text);
                    return Err(ListenError::Live {
                        path: socket.to_owned(),
                        pid: text.trim().parse().ok(),
                    });
                }
                Err((_, errno)) => {
                    return Err(io_error("cannot lock", &path)(errno.into()));
                }
            };
            // The owner before may have removed the file between our open and our lock: then the lock
            // is on a file that nobody else will find.
            let same = file
                .metadata()
                .is_ok_and(|held| identity(&path) == Some((held.dev(), held.ino())));
            if !same {
                continue;
            }
            file.set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| writeln!(file, "{}", std::process::id()))
                .map_err(io_error("cannot write the lock", &path))?;
            return Ok(Self { path, file });
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before the lock is released, so that whoever gets it next sees that the file is gone. Not if
        // somebody has removed it, and another daemon has made its own since.
        let own = self
            .file
            .metadata()
            .is_ok_and(|held| identity(&self.path) == Some((held.dev(), held.ino())));
        if own {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that nobody listens on; refuses everything else that exists.
fn clear_stale(path: &Path) -> Result<(), ListenError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("cannot look at", path)(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match probe(path) {
        Err(Errno::ECONNREFUSED) => {
            fs::remove_file(path).map_err(io_error("cannot remove the stale socket", path))
        }
        Err(Errno::ENOENT) => Ok(()),
        // EAGAIN: somebody listens, and its backlog is full.
        Ok(()) | Err(Errno::EAGAIN) => Err(ListenError::Live {
            path: path.to_owned(),
            pid: None,
        }),
        Err(errno) => Err(io_error("cannot tell who is behind", path)(errno.into())),
    }
}

/// Connects and disconnects, without waiting for a listener that does not accept.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = nix_socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(probe.as_raw_fd(), &UnixAddr::new(path)?)
}

/// The directory of the executors' sockets.
pub(crate) fn executor_dir(socket: &Path) -> PathBuf {
    with_suffix(socket, ".d")
}

/// The name of an executor's sockets, without extension: random, so that it is never that of an executor
/// which lives, whoever started it.
pub(crate) fn executor_name() -> io::Result<String> {
    Ok(format!(
        "x{:016x}",
        u64::from_le_bytes(crate::random::bytes()?)
    ))
}

/// Makes the executors' directory, if it is not there.
pub(crate) fn ensure_executor_dir(socket: &Path, access: Access) -> Result<PathBuf, ListenError> {
    let dir = executor_dir(socket);
    // Who may connect may search the directory, no more.
    let search = |bits: u32, class: u32| if access.mode & bits == 0 { 0 } else { class };
    let mode = 0o700 | search(0o060, 0o010) | search(0o006, 0o001);
    match fs::DirBuilder::new().mode(0o700).create(&dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(io_error("cannot create the directory", &dir)(error)),
    }
    let is_dir = fs::symlink_metadata(&dir).is_ok_and(|found| found.is_dir());
    if !is_dir {
        return Err(io_error("cannot use the directory", &dir)(
            io::ErrorKind::NotADirectory.into(),
        ));
    }
    chown(&dir, None, access.group)
        .map_err(io::Error::from)
        .map_err(io_error("cannot set the group of", &dir))?;
    fs::set_permissions(&dir, fs::Permissions::from_mode(mode))
        .map_err(io_error("cannot set the mode of", &dir))?;
    Ok(dir)
}

/// Makes the executors' directory, and removes dead sockets that an earlier daemon left in it.
pub(crate) fn prepare_executor_dir(socket: &Path, access: Access) -> Result<PathBuf, ListenError> {
    let dir = ensure_executor_dir(socket, access)?;
    let entries = fs::read_dir(&dir).map_err(io_error("cannot read", &dir))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let dead = path.extension() == Some(OsStr::new("sock"))
            && probe(&path) == Err(Errno::ECONNREFUSED);
        if dead {
            for leftover in [&path, &path.with_extension("fd")] {
                // Gone already, or not ours to remove: it is in nobody's way.
                let _ = fs::remove_file(leftover);
            }
        }
    }
    Ok(dir)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().as_bytes().to_vec();
    name.extend_from_slice(suffix.as_bytes());
    PathBuf::from(OsStr::from_bytes(&name))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::unix::net::UnixStream;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("ard-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn paths_are_checked() {
        let path = |len: usize| PathBuf::from(format!("/{}", "x".repeat(len - 1)));
        assert!(check_path(&path(82)).is_ok());
        assert!(matches!(
            check_path(&path(107)),
            Err(ListenError::NoRoom(_))
        ));
        assert!(matches!(
            check_path(&path(108)),
            Err(ListenError::TooLong(_))
        ));
        for bad in ["", "relative.sock", "/", "/tmp/.."] {
            let result = check_path(Path::new(bad));
            assert!(matches!(result, Err(ListenError::NotAbsolute(_))), "{bad}");
        }
        let name = format!(".d/{}.sock", executor_name().unwrap());
        assert_eq!(name.len(), EXECUTOR_SUFFIX_LEN);
    }

    #[test]
    fn one_daemon_a_socket_and_leftovers_are_taken_over() {
        let dir = dir("bind");
        let path = dir.join("a.sock");
        let access = Access::new(0o640, "").unwrap();
        let first = bind_daemon(&path, access).unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let second = bind_daemon(&path, access).map(|_| ());
        let own = std::process::id();
        assert!(
            matches!(&second, Err(ListenError::Live { pid: Some(pid), .. }) if *pid == own),
            "{second:?}"
        );
        assert!(UnixStream::connect(&path).is_ok());
        drop(first);
        assert!(!path.exists() && !dir.join("a.sock.lock").exists());
        // What a killed daemon leaves: the socket and the lock's file.
        drop(UnixListener::bind(&path).unwrap());
        fs::write(dir.join("a.sock.lock"), "1\n").unwrap();
        bind_daemon(&path, access).unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_is_no_dead_socket_is_left_alone() {
        let dir = dir("alone");
        let access = Access::new(0o600, "").unwrap();
        let file = dir.join("file");
        fs::write(&file, "precious").unwrap();
        assert!(matches!(
            bind_daemon(&file, access),
            Err(ListenError::NotASocket(_))
        ));
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
        let link = dir.join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(matches!(
            bind_daemon(&link, access),
            Err(ListenError::NotASocket(_))
        ));
        let foreign = dir.join("foreign.sock");
        let _listener = UnixListener::bind(&foreign).unwrap();
        assert!(matches!(
            bind_daemon(&foreign, access),
            Err(ListenError::Live { .. })
        ));
        assert!(Access::new(0o600, "no-such-group-here").is_err());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_executors_directory_is_cleared_of_the_dead_only() {
        let dir = dir("executors");
        let socket = dir.join("a.sock");
        let access = Access::new(0o660, "").unwrap();
        let executors = prepare_executor_dir(&socket, access).unwrap();
        let mode = fs::metadata(&executors).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o710);
        drop(UnixListener::bind(executors.join("x1-1.sock")).unwrap());
        fs::write(executors.join("x1-1.fd"), "").unwrap();
        let _live = UnixListener::bind(executors.join("x1-2.sock")).unwrap();
        fs::write(executors.join("notes"), "").unwrap();
        prepare_executor_dir(&socket, access).unwrap();
        let mut left: Vec<_> = fs::read_dir(&executors)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["notes", "x1-2.sock"]);
        fs::remove_dir_all(&dir).unwrap();
    }
}
