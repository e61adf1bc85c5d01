//! A thread for what blocks: allocating, freeing, opening devices.
//!
//! Owns the thread and the state its jobs share. The executor's task hands it jobs and goes on answering; a job
//! tells the task what came out. Refuses to run two at once: what is freed first is there for what comes next.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// Runs jobs in the order asked, with `S` at hand.
pub(crate) struct JobThread<S> {
    jobs: mpsc::Sender<Job<S>>,
    /// Jobs that were asked for and have not ended.
    pending: Arc<AtomicUsize>,
}

impl<S: Send + 'static> JobThread<S> {
    pub(crate) fn start(name: &str, mut state: S) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job<S>>();
        let pending = Arc::new(AtomicUsize::new(0));
        let ended = Arc::clone(&pending);
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                for job in queue {
                    job(&mut state);
                    // Release: who sees the job ended sees what it told.
                    ended.fetch_sub(1, Ordering::Release);
                }
            })?;
        Ok(Self { jobs, pending })
    }

    /// Runs a job after those before it.
    pub(crate) fn run(&self, job: impl FnOnce(&mut S) + Send + 'static) {
        // Relaxed: counted and asked by the same thread.
        self.pending.fetch_add(1, Ordering::Relaxed);
        // The thread ends only with this value. Were it gone, who waits for the job's answer would be told.
        let _ = self.jobs.send(Box::new(job));
    }

    /// Whether a job has not ended.
    pub(crate) fn is_busy(&self) -> bool {
        // Acquire: pairs with the end of a job.
        self.pending.load(Ordering::Acquire) > 0
    }
}
