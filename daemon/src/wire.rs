//! One JSON value a line: how this executable talks with its children.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, Write};

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
