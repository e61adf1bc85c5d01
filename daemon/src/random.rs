//! Numbers that nobody can guess: tokens and sessions.

use std::fs::File;
use std::io::{self, Read};

/// Bytes from the kernel's generator.
///
/// # Errors
/// If /dev/urandom cannot be read, as in a badly built chroot.
pub(crate) fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0_u8; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
