//! Worker processes of `demo`, `bench` and `probe`: started from this executable, told one line, heard line by
//! line.
//!
//! Owns the processes: dropping [`Children`] ends their standard input, and kills what runs on. Refuses
//! to wait for ever, also for one that cannot be killed.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long children may take to end after their input did.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the kernel may take to end one that was killed.
const REAP_TIMEOUT: Duration = Duration::from_secs(5);

/// Why children do not do what they should.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChildError {
    #[error("cannot start a worker: {0}")]
    Start(io::Error),
    #[error("worker {index} says what it should not: {line:?}")]
    Line { index: usize, line: String },
    #[error("worker {0} ended before it was done: its error is above, or it was killed")]
    Ended(usize),
    #[error("no worker said anything for {} s", .0.as_secs())]
    Silent(Duration),
}

/// What a child did.
enum Event {
    Line(String),
    End,
}

/// Running children that print messages of type `M`.
pub(crate) struct Children<M> {
    children: Vec<Child>,
    /// Open as long as this lives: a child that serves ends with it, even if this process is killed.
    lifetimes: Vec<ChildStdin>,
    events: mpsc::Receiver<(usize, Event)>,
    _messages: std::marker::PhantomData<M>,
}

impl<M: DeserializeOwned> Children<M> {
    /// Starts one child for each spec, as `subcommand` of this executable, and sends it its spec.
    pub(crate) fn start<S: Serialize>(subcommand: &str, specs: &[S]) -> Result<Self, ChildError> {
        let (sender, events) = mpsc::channel();
        let mut started = Self {
            children: Vec::new(),
            lifetimes: Vec::new(),
            events,
            _messages: std::marker::PhantomData,
        };
        for (index, spec) in specs.iter().enumerate() {
            let mut child = Command::new("/proc/self/exe")
                .arg(subcommand)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(ChildError::Start)?;
            let pipes = (child.stdin.take(), child.stdout.take());
            started.children.push(child);
            let (Some(mut stdin), Some(stdout)) = pipes else {
                return Err(ChildError::Start(io::Error::other("no pipes")));
            };
            let mut line = serde_json::to_vec(spec)
                .map_err(io::Error::other)
                .map_err(ChildError::Start)?;
            line.push(b'\n');
            stdin.write_all(&line).map_err(ChildError::Start)?;
            started.lifetimes.push(stdin);
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send((index, Event::Line(line))).is_err() {
                        return;
                    }
                }
                // Nobody may listen any more.
                let _ = sender.send((index, Event::End));
            });
        }
        Ok(started)
    }

    /// The next message of any child, at most `timeout` from now; `Ok(Err(index))` when one's output
    /// has ended.
    pub(crate) fn next(&self, timeout: Duration) -> Result<Result<(usize, M), usize>, ChildError> {
        match self.events.recv_timeout(timeout) {
            Ok((index, Event::Line(line))) => match serde_json::from_str(&line) {
                Ok(message) => Ok(Ok((index, message))),
                Err(_) => Err(ChildError::Line { index, line }),
            },
            Ok((index, Event::End)) => Ok(Err(index)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(ChildError::Silent(timeout))
            }
        }
    }
}

impl<M> Children<M> {
    /// Ends all at once, for one that hangs: none gets time to leave.
    pub(crate) fn kill(mut self) {
        for child in &mut self.children {
            // No effect on one that has exited.
            let _ = child.kill();
        }
    }
}

impl<M> Drop for Children<M> {
    fn drop(&mut self) {
        // Who waits for the end of its input leaves in peace.
        self.lifetimes.clear();
        let deadline = Instant::now() + LEAVE_TIMEOUT;
        for child in &mut self.children {
            wait_until(child, deadline);
            // No effect on one that has exited.
            let _ = child.kill();
        }
        // A process that a driver holds in the kernel does not even die; waiting for it would hang this one too.
        let deadline = Instant::now() + REAP_TIMEOUT;
        for child in &mut self.children {
            wait_until(child, deadline);
        }
    }
}

fn wait_until(child: &mut Child, deadline: Instant) {
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}
