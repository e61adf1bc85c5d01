//! Logging: tracing events to standard error.
//!
//! Owns the one initialisation of the process. Refuses nothing: a level that does not parse was refused
//! by the configuration before.

use crate::config::{Log, LogFormat};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::UtcTime;

/// Starts logging; later calls do nothing.
pub(crate) fn init(log: &Log) {
    let filter = EnvFilter::try_new(&log.level).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Its complaint about a closed standard error would go to standard error, and panic.
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
}
