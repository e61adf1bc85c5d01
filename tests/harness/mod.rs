//! What the end-to-end tests share: daemons, ranks as threads, deadlines and a watchdog.
//!
//! Owns the processes it starts: each ends with its owner, and all end when a test hangs. Ranks that
//! are processes are in [`worker`], ranks that speak plain gRPC in [`raw`]. Refuses fixed sleeps: who
//! waits, polls with a deadline.
#![allow(dead_code)] // each test file uses a part of it

pub mod bits;
pub mod raw;
pub mod worker;

use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::{AllReduceError, BufferError, EpochEnd, JoinOptions, Lane};
use allreduce_contract::v1::ErrorCode;
use allreduced::private::PrivateDaemon;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// The daemon under test: that of this build, or the one that ALLREDUCED_BIN names, on a machine where tests run
/// without cargo.
pub fn binary() -> String {
    let built = env!("CARGO_BIN_EXE_allreduced").to_owned();
    std::env::var("ALLREDUCED_BIN").unwrap_or(built)
}

/// How long anything that should happen soon may take on a busy machine.
pub const SOON: Duration = Duration::from_secs(20);

/// How long a test may take before it counts as hung.
const HUNG: Duration = Duration::from_secs(120);

/// Processes to be killed should a test hang; stopped ones would not notice its end.
static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Remembers a process until [`forget_child`].
pub fn remember_child(pid: u32) {
    let mut children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
    children.insert(pid);
}

/// The process is reaped.
pub fn forget_child(pid: u32) {
    let mut children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
    children.remove(&pid);
}

/// Aborts the test process if it is not dropped in time.
pub struct Watchdog {
    _test_over: mpsc::Sender<()>,
}

/// Watches the calling test.
pub fn watchdog() -> Watchdog {
    watchdog_of(HUNG)
}

/// Watches the calling test, which may take longer than others.
pub fn watchdog_of(limit: Duration) -> Watchdog {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let (sender, test_over) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if test_over.recv_timeout(limit) != Err(mpsc::RecvTimeoutError::Timeout) {
            return;
        }
        // Not eprintln!, whose output is kept for a test that ends.
        let message = format!("\ntest {test} hung for {} s: aborting\n", limit.as_secs());
        let _ = std::io::stderr().write_all(message.as_bytes());
        for pid in CHILDREN
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            let _ = kill(pid_of(*pid), Signal::SIGKILL);
        }
        std::process::abort();
    });
    Watchdog { _test_over: sender }
}

/// Looks until there is something, at most [`SOON`].
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap())
}

pub fn send_signal(pid: u32, signal: Signal) {
    kill(pid_of(pid), signal).unwrap();
}

/// Whether a process exists and is no zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may hold anything.
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some(None | Some('Z' | 'X')))
}

/// The children of a process, zombies included.
pub fn children_of(parent: u32) -> Vec<u32> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let ppid = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<u32>().ok());
        if ppid == Some(parent) {
            children.push(pid);
        }
    }
    children
}

/// Resident memory of a process, bytes.
pub fn rss_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.expect("a process that runs") << 10
}

/// How many descriptors a process has open.
pub fn open_fds(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count()
}

/// A directory of this test's, removed when it is dropped. Its path is short: sockets go there.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("art-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        // A private daemon removes an empty directory that its socket was in.
        std::fs::write(dir.join("keep"), "").unwrap();
        Self(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file and answers its path.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A private daemon that logs errors only, so that what a test prints can be read, and that does not
/// wait long for the ranks of a test that is over.
pub fn daemon(environment: &[(&str, &str)]) -> PrivateDaemon {
    let mut all = vec![
        ("ALLREDUCED_LOG__LEVEL", "error"),
        ("ALLREDUCED_SHUTDOWN__DRAIN_TIMEOUT_MS", "200"),
    ];
    all.extend(environment);
    PrivateDaemon::start(Path::new(&binary()), &[], &all).unwrap()
}

/// A command line of the daemon under test, without what configures the machine's own.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ALLREDUCED_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

/// What a command printed, and how it ended.
pub struct Ran {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// The one JSON object on standard output.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {:?} {:?}", self.stdout, self.stderr))
    }
}

/// Runs a command to its end, at most `limit`.
pub fn run_within(mut command: Command, limit: Duration) -> Ran {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    remember_child(pid);
    let collect = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = pipe.read_to_string(&mut text);
            text
        })
    };
    let stdout = collect(Box::new(child.stdout.take().unwrap()));
    let stderr = collect(Box::new(child.stderr.take().unwrap()));
    let status = wait_within(&mut child, limit);
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    forget_child(pid);
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let status = status.unwrap_or_else(|| panic!("{command:?} did not end in {limit:?}: {stderr}"));
    Ran {
        status,
        stdout,
        stderr,
    }
}

/// Runs the daemon's command line to its end.
pub fn run(arguments: &[&str]) -> Ran {
    run_within(command(arguments), SOON)
}

fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return Some(status),
            None if Instant::now() >= deadline => return None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// `serve` on a path of the test's choice. Killed when dropped; its socket and leftovers stay.
pub struct Serve {
    child: Child,
    lifetime: Option<ChildStdin>,
}

impl Serve {
    /// Starts it and waits until it is ready.
    pub fn start(socket: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = command(&["serve", "--until-stdin-closes", "--socket"]);
        command.arg(socket).args(arguments);
        command.env("ALLREDUCED_LOG__LEVEL", "error");
        command.envs(environment.iter().copied());
        Self::start_command(command)
    }

    /// Starts a command that ends up as `serve --until-stdin-closes`.
    pub fn start_command(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        remember_child(child.id());
        let lifetime = child.stdin.take();
        let stdout = child.stdout.take().unwrap();
        let serve = Self { child, lifetime };
        let (sender, line) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(stdout).read_line(&mut line);
            let _ = sender.send(line);
        });
        assert_eq!(line.recv_timeout(SOON).as_deref(), Ok("ready\n"));
        serve
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        send_signal(self.pid(), signal);
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> ExitStatus {
        wait_within(&mut self.child, SOON).expect("the daemon did not end")
    }

    /// kill -9, and waits.
    pub fn kill_hard(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended();
    }

    /// Closes its standard input, which is its lifetime.
    pub fn close(&mut self) {
        self.lifetime = None;
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        forget_child(self.child.id());
    }
}

/// Runs each rank on a thread of its own; answers what they answer, in rank order.
pub fn ranks<R: Send>(world_size: u32, rank: impl Fn(u32) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..world_size)
            .map(|number| scope.spawn(move || rank(number)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

/// Options that join with a small arena and a bounded wait, on lane rpc.
pub fn options(communicator: &str, rank: u32, world_size: u32) -> JoinOptions {
    JoinOptions::new(communicator, rank, world_size)
        .lanes([Lane::Rpc])
        .arena_len_bytes(1 << 20)
        .timeout(SOON)
}

/// Joins, or panics.
pub fn join(socket: &Path, communicator: &str, rank: u32, world_size: u32) -> Communicator {
    Client::connect(socket)
        .unwrap()
        .join(options(communicator, rank, world_size))
        .unwrap()
}

/// Joins every rank from this thread's helpers; in rank order.
pub fn join_all(socket: &Path, communicator: &str, world_size: u32) -> Vec<Communicator> {
    ranks(world_size, |rank| {
        join(socket, communicator, rank, world_size)
    })
}

/// Reduces one i32 (rank + 1) over all ranks, and checks the sum.
pub fn reduce_well(communicators: &[Communicator]) {
    let world_size = u32::try_from(communicators.len()).unwrap();
    ranks(world_size, |rank| {
        reduce_one(&communicators[rank as usize]).unwrap();
    });
}

/// One rank's part of [`reduce_well`].
pub fn reduce_one(communicator: &Communicator) -> Result<(), AllReduceError> {
    let mut buffer = communicator.allocate::<i32>(3).map_err(over)?;
    let own = i32::try_from(communicator.rank()).unwrap() + 1;
    buffer.as_mut_slice().fill(own);
    let buffer = communicator.all_reduce(buffer, allreduce_client::Op::Sum)?;
    let ranks = i32::try_from(communicator.world_size()).unwrap();
    assert_eq!(buffer.as_slice(), [ranks * (ranks + 1) / 2; 3]);
    Ok(())
}

/// What ended the epoch, or the executor, for a buffer as for a reduction.
pub fn over(error: BufferError) -> AllReduceError {
    match error {
        BufferError::Refused(refused) if refused.kind == ErrorCode::EpochEnded => {
            AllReduceError::EpochEnded(EpochEnd {
                epoch: refused.detail.epoch,
                rank: refused.detail.rank,
                message: refused.message,
            })
        }
        BufferError::Refused(refused) => AllReduceError::Refused(refused),
        BufferError::ExecutorLost(reason) => AllReduceError::ExecutorLost(reason),
        other => panic!("{other:?}"),
    }
}
