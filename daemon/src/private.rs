//! A daemon of one's own: started as a child, on a socket in a fresh directory, ended with its parent.
//!
//! Owns the child, its directory and the pipe that is its lifetime. `demo`, `bench` and the tests use
//! it, and programs that want to run without a service. The child is this same executable, so main must
//! begin with [`crate::cli::run_as_child`] (the `allreduced` binary knows its own subcommands).

use crate::cli::CHILD_NAME;
use crate::config::ENV_PREFIX;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long the child may take to say "ready".
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How long it may take to end after its lifetime did. Above the default drain timeout.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// A private daemon did not start.
#[derive(Debug, thiserror::Error)]
#[error("the private daemon does not start: {0}")]
pub struct StartError(#[from] io::Error);

/// A running private daemon. Dropping it ends it.
#[derive(Debug)]
pub struct PrivateDaemon {
    child: Child,
    /// Its end is the daemon's.
    lifetime: Option<ChildStdin>,
    dir: PathBuf,
    socket: PathBuf,
}

impl PrivateDaemon {
    /// Starts this very executable as a private daemon that logs warnings only: for `demo` and `bench`. Its kernels that stay
    /// may fill a GPU: several ranks there stand for GPUs of their own, and nobody else is to be left room.
    pub(crate) fn start_own(arguments: &[String]) -> Result<Self, StartError> {
        let own = [
            ("ALLREDUCED_LOG__LEVEL", "warn"),
            ("ALLREDUCED_CUDA__RESIDENT_BLOCKS_PER_GPU", "1024"),
        ];
        Self::start(Path::new("/proc/self/exe"), arguments, &own)
    }

    /// Starts `executable` as a private daemon, with more `arguments` for `serve`.
    ///
    /// # Errors
    /// [`StartError`], if it exits or is not ready in 20 s; its log on standard error says why.
    pub fn start(
        executable: &Path,
        arguments: &[String],
        environment: &[(&str, &str)],
    ) -> Result<Self, StartError> {
        let dir = fresh_dir()?;
        let socket = dir.join("d.sock");
        let mut command = Command::new(executable);
        // Variables that configure the node's daemon are not meant for this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with(ENV_PREFIX) {
                command.env_remove(name);
            }
        }
        let child = command
            .arg0(CHILD_NAME)
            .arg("serve")
            .arg("--until-stdin-closes")
            .arg("--socket")
            .arg(&socket)
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                let _ = std::fs::remove_dir_all(&dir);
                return Err(error.into());
            }
        };
        let lifetime = child.stdin.take();
        let stdout = child.stdout.take();
        // From here on, dropping cleans up.
        let daemon = Self {
            child,
            lifetime,
            dir,
            socket,
        };
        let stdout = stdout.ok_or_else(|| io::Error::other("no pipe"))?;
        let (sender, line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(stdout).read_line(&mut line).map(|_| line);
            // The one who waits may have given up.
            let _ = sender.send(read);
        });
        match line.recv_timeout(START_TIMEOUT) {
            Ok(Ok(line)) if line == "ready\n" => Ok(daemon),
            Ok(Ok(_)) => Err(io::Error::other("it exited; its log says why").into()),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "not ready in time").into()),
        }
    }

    /// The daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The supervisor's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        drop(self.lifetime.take());
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Ok(Some(_)) | Err(_) => break,
            }
        }
        // No effect on a child that has exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A directory that only this user can enter, under the system's directory for temporary files. Short,
/// since a Unix socket's path is.
fn fresh_dir() -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let name = u64::from_le_bytes(crate::random::bytes()?);
    let dir = std::env::temp_dir().join(format!("ard-{name:016x}"));
    std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
    Ok(dir)
}
