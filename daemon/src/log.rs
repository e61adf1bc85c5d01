//! Logging: tracing events to standard error.
//!
//! Owns the one initialisation of the process. Refuses nothing: a level that does not parse was refused
//! by the configuration before.

use crate::config::{Log, LogFormat};
use std::io::IsTerminal;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::UtcTime;

/// Lines that may wait for standard error; more are dropped. Their queue is allocated at once.
const BUFFERED_LINES: usize = 4096;

/// Starts logging, and makes a panic of any thread end the process: a daemon that lives on without the
/// thread that panicked serves nobody, and its supervisor, or systemd, starts a whole one.
///
/// Lines are written by a thread of their own, and dropped while standard error takes none: a full disk or
/// a reader that has stopped must not stop service. Dropping the guard writes what is left.
pub(crate) fn init(log: &Log) -> WorkerGuard {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default_hook(info);
        std::process::abort();
    }));
    let filter = EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"));
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(BUFFERED_LINES)
        .finish(std::io::stderr());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        // Its complaint about a failed write would go to standard error, and panic.
        .log_internal_errors(false)
        .with_timer(UtcTime::rfc_3339());
    // Err means that a subscriber is set already, as in tests: that one stays.
    let _ = match log.format {
        LogFormat::Auto => builder
            .with_ansi(std::io::stderr().is_terminal())
            .try_init(),
        LogFormat::Human => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    guard
}
