//! Ranks that are processes, to be killed, stopped and waited for.
//!
//! Owns the worker's side and the test's side of a line protocol. A worker is the test executable
//! itself, run for one test that does nothing else: each file that starts workers has a test
//! `worker_entry` which calls [`run_if_asked`]. A worker ends with its standard input.

use crate::harness::bits::{hash, reduce_any, tensor};
use crate::harness::{SOON, forget_child, options, remember_child, send_signal};
use allreduce_client::blocking::{Client, Communicator};
use allreduce_client::{AllReduceError, JoinError, Lane, Op};
use nix::sys::signal::Signal;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Holds "SOCKET COMMUNICATOR RANK WORLD_SIZE LANE" in a worker's environment.
const SPEC: &str = "ART_WORKER";

/// A worker process, from the test's side.
pub struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Worker {
    /// Starts it; it does nothing until told.
    pub fn start(socket: &Path, communicator: &str, rank: u32, world_size: u32) -> Self {
        Self::start_on(Lane::Rpc, socket, communicator, rank, world_size)
    }

    /// Starts it on a lane.
    pub fn start_on(
        lane: Lane,
        socket: &Path,
        communicator: &str,
        rank: u32,
        world_size: u32,
    ) -> Self {
        let socket = socket.display();
        let spec = format!("{socket} {communicator} {rank} {world_size} {lane}");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker_entry", "--exact", "--nocapture", "--test-threads=1"])
            .env(SPEC, spec)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        remember_child(child.id());
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            // The rest is the test framework's own.
            let said = |line: String| line.strip_prefix('@').map(str::to_owned);
            for line in stdout.lines().map_while(Result::ok).filter_map(said) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            stdin,
            lines,
        }
    }

    /// Starts all ranks of a communicator and has them join.
    pub fn start_all(socket: &Path, communicator: &str, world_size: u32) -> Vec<Self> {
        Self::start_all_on(Lane::Rpc, socket, communicator, world_size)
    }

    /// Starts all ranks on a lane and has them join.
    pub fn start_all_on(
        lane: Lane,
        socket: &Path,
        communicator: &str,
        world_size: u32,
    ) -> Vec<Self> {
        let mut workers: Vec<Self> = (0..world_size)
            .map(|rank| Self::start_on(lane, socket, communicator, rank, world_size))
            .collect();
        for worker in &mut workers {
            worker.tell("join");
        }
        for worker in &mut workers {
            let answer = worker.answer();
            assert!(answer.starts_with("joined "), "{answer}");
        }
        workers
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it what to do.
    pub fn tell(&mut self, what: &str) {
        writeln!(self.stdin, "{what}").unwrap();
    }

    /// What it answers.
    pub fn answer(&mut self) -> String {
        self.answer_within(SOON)
    }

    /// What it answers to something that may take longer.
    pub fn answer_within(&mut self, limit: Duration) -> String {
        self.lines
            .recv_timeout(limit)
            .unwrap_or_else(|_| panic!("worker {} does not answer", self.child.id()))
    }

    /// Tells, and waits for the answer.
    pub fn ask(&mut self, what: &str) -> String {
        self.tell(what);
        self.answer()
    }

    pub fn signal(&self, signal: Signal) {
        send_signal(self.pid(), signal);
    }

    /// kill -9, and waits.
    pub fn kill_hard(&mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        forget_child(self.child.id());
    }
}

/// What a worker process was started as.
pub struct Asked {
    pub socket: PathBuf,
    pub communicator: String,
    pub rank: u32,
    pub world_size: u32,
    pub lane: Lane,
    /// What it is told, line by line.
    pub told: mpsc::Receiver<String>,
}

/// What this process was started as, if as a worker. It then ends with its standard input.
pub fn asked() -> Option<Asked> {
    let spec = std::env::var(SPEC).ok()?;
    let fields: Vec<&str> = spec.split(' ').collect();
    let [socket, communicator, rank, world_size, lane] = fields.as_slice() else {
        panic!("{spec:?}");
    };
    // A thread of its own notices the end of the test while this one waits in a reduction.
    let (sender, told) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        std::process::exit(0);
    });
    Some(Asked {
        socket: PathBuf::from(socket),
        communicator: (*communicator).to_owned(),
        rank: rank.parse().unwrap(),
        world_size: world_size.parse().unwrap(),
        lane: lane.parse().unwrap(),
        told,
    })
}

/// Runs as a worker, and exits, if this process was started as one.
pub fn run_if_asked() {
    let Some(asked) = asked() else {
        return;
    };
    let mut rank = Rank {
        socket: &asked.socket,
        name: &asked.communicator,
        rank: asked.rank,
        world_size: asked.world_size,
        lane: asked.lane,
        joined: None,
    };
    for line in asked.told {
        rank.obey(&line);
    }
}

/// Answers the test.
pub fn say(line: &str) {
    // On a line of its own: the test framework leaves one unfinished.
    println!("\n@{line}");
}

/// An error on one line, which begins with its kind.
pub fn describe(error: &AllReduceError) -> String {
    let over = if error.is_epoch_over() { "over" } else { "on" };
    match error {
        AllReduceError::Timeout {
            missing_ranks,
            message,
        } => format!("timeout {over} {missing_ranks:?} {message}"),
        AllReduceError::EpochEnded(end) => {
            format!("ended {over} rank={:?} epoch={} {end}", end.rank, end.epoch)
        }
        AllReduceError::Device(abort) => format!("device {over} rank={} {abort}", abort.rank),
        AllReduceError::ExecutorLost(reason) => format!("lost {over} {reason}"),
        other => format!("other {over} {other:?}"),
    }
}

struct Rank<'a> {
    socket: &'a Path,
    name: &'a str,
    rank: u32,
    world_size: u32,
    lane: Lane,
    joined: Option<Communicator>,
}

impl Rank<'_> {
    fn join(&self) -> Result<Communicator, JoinError> {
        let client = Client::connect(self.socket)?;
        let options = options(self.name, self.rank, self.world_size).lanes([self.lane]);
        client.join(options.arena_len_bytes(4 << 20).client_name("test-worker"))
    }

    fn obey(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match (words.as_slice(), &self.joined) {
            (["join"], _) => {
                self.joined = None;
                match self.join() {
                    Ok(communicator) => {
                        say(&format!("joined {}", communicator.epoch()));
                        self.joined = Some(communicator);
                    }
                    Err(error) => say(&format!("not joined: {error:?}")),
                }
            }
            (["reduce"], Some(communicator)) => match crate::harness::reduce_one(communicator) {
                Ok(()) => say("reduced"),
                Err(error) => say(&describe(&error)),
            },
            // Reduces until it cannot; says so at the first reduction and at the error.
            (["traffic"], Some(communicator)) => {
                let mut said = false;
                let error = loop {
                    match crate::harness::reduce_one(communicator) {
                        Ok(()) if said => {}
                        Ok(()) => {
                            say("running");
                            said = true;
                        }
                        Err(error) => break error,
                    }
                };
                say(&describe(&error));
            }
            // The same with one buffer of many elements, reduced in place again and again.
            (["traffic", num_elems], Some(communicator)) => {
                let own = i32::try_from(self.rank).unwrap();
                let last = i32::try_from(self.world_size).unwrap() - 1;
                let mut buffer = match communicator.allocate::<i32>(num_elems.parse().unwrap()) {
                    Ok(buffer) => buffer,
                    Err(error) => return say(&describe(&crate::harness::over(error))),
                };
                let mut said = false;
                let error = loop {
                    buffer.as_mut_slice().fill(own);
                    match communicator.all_reduce(buffer, Op::Max) {
                        Ok(reduced) => buffer = reduced,
                        Err(failed) => break failed.error,
                    }
                    assert!(buffer.as_slice().iter().all(|element| *element == last));
                    if !said {
                        say("running");
                        said = true;
                    }
                };
                say(&describe(&error));
            }
            (["hash", dtype, op, num_elems, seed], Some(communicator)) => {
                let dtype = dtype.parse().unwrap();
                let op: Op = op.parse().unwrap();
                let own = tensor(
                    dtype,
                    num_elems.parse().unwrap(),
                    seed.parse().unwrap(),
                    self.rank,
                );
                match reduce_any(communicator, dtype, op, &own, self.rank as usize, true) {
                    Ok((result, _)) => say(&format!("hash {}", hash(&result))),
                    Err(error) => say(&describe(&error)),
                }
            }
            (["draining"], Some(communicator)) => {
                crate::harness::eventually("drain", || communicator.is_draining().then_some(()));
                say("draining");
            }
            (["leave"], Some(_)) => {
                if let Some(communicator) = self.joined.take() {
                    communicator.leave();
                }
                say("left");
            }
            // Without leaving, as a crash would.
            (["exit"], _) => std::process::exit(0),
            (other, _) => panic!("{other:?}"),
        }
    }
}
