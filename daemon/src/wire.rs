//! How this executable talks with its children: one JSON value a line, the word "ready", and standard input
//! that is open as long as the parent lives.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, Write};
use tokio::io::AsyncReadExt;

/// Reads the one line that a child is told.
///
/// # Errors
/// If it cannot be read, or is no `T`.
pub(crate) fn read_line<T: DeserializeOwned>() -> io::Result<T> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    serde_json::from_str(&line).map_err(io::Error::other)
}

/// Prints one line, whole and at once.
///
/// # Errors
/// If standard output is closed.
pub(crate) fn print_line(value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value).map_err(io::Error::other)?;
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&line)?;
    stdout.flush()
}

/// Tells the parent that RPCs succeed from now on.
///
/// # Errors
/// If standard output is closed.
pub(crate) fn announce_ready() -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(b"ready\n")?;
    stdout.flush()
}

/// Waits for the end of standard input, which is the parent's, however it ends.
pub(crate) async fn stdin_ended() {
    let mut stdin = tokio::io::stdin();
    let mut ignored = [0_u8; 64];
    while matches!(stdin.read(&mut ignored).await, Ok(read) if read > 0) {}
}
