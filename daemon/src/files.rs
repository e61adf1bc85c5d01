//! Files that people name: read whole, written whole.
//!
//! Owns the limits of reading (a regular file, at most a megabyte) and the way of writing (a new file beside it, then renamed over it, so that no
//! reader finds half and a failure loses nothing). Called for configurations, topologies, tuned tables, workloads and pictures.
//! Refuses pipes and devices, which may never end or would be replaced.

use std::io;
use std::path::{Path, PathBuf};

/// Longest file that is read.
const MAX_LEN_BYTES: u64 = 1 << 20;

fn check(path: &Path, must_be_short: bool) -> io::Result<()> {
    let found = std::fs::metadata(path)?;
    if found.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !found.is_file() {
        return Err(io::Error::other("is no regular file"));
    }
    if must_be_short && found.len() > MAX_LEN_BYTES {
        let len_bytes = found.len();
        return Err(io::Error::other(format!(
            "{len_bytes} bytes are more than the {MAX_LEN_BYTES} that such a file has at most"
        )));
    }
    Ok(())
}

/// Reads a text.
///
/// # Errors
/// As reading does; and for what is no regular file, or too long.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    check(path, true)?;
    std::fs::read_to_string(path)
}

/// Where a write to `path` would end up: behind symbolic links. It need not exist.
fn target(path: &Path) -> io::Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Ok(target) => check(&target, false).map(|()| target),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.to_owned()),
        Err(error) => Err(error),
    }
}

/// A name beside it that nobody else uses.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

/// Whether [`write_text`] can be expected to work; leaves nothing behind. For who has minutes of work to do before.
///
/// # Errors
/// Why not.
pub(crate) fn check_writable(path: &Path) -> io::Result<()> {
    let beside = beside(&target(path)?);
    std::fs::File::create(&beside).and_then(|_| std::fs::remove_file(&beside))
}

/// Writes a text in the place of what was there.
///
/// # Errors
/// As writing does; what was there is there still.
pub(crate) fn write_text(path: &Path, text: &str) -> io::Result<()> {
    let target = target(path)?;
    let beside = beside(&target);
    std::fs::write(&beside, text)
        .and_then(|()| std::fs::rename(&beside, &target))
        .inspect_err(|_| {
            // It may not be there.
            let _ = std::fs::remove_file(&beside);
        })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn files_are_read_and_replaced_whole_and_others_left_alone() {
        let folder = std::env::temp_dir().join(format!("allreduced-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (file, link) = (folder.join("a"), folder.join("link"));
        check_writable(&file).unwrap();
        assert!(!file.exists());
        write_text(&file, "one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_text(&link, "two").unwrap();
        assert_eq!(read_text(&file).unwrap(), "two");
        assert!(link.is_symlink());
        for bad in [Path::new("/dev/null"), folder.as_path()] {
            assert!(read_text(bad).is_err(), "{}", bad.display());
            assert!(check_writable(bad).is_err(), "{}", bad.display());
            assert!(write_text(bad, "x").is_err(), "{}", bad.display());
        }
        assert!(check_writable(&folder.join("nowhere/a")).is_err());
        std::fs::write(&file, vec![b'x'; (MAX_LEN_BYTES + 1) as usize]).unwrap();
        assert!(
            read_text(&file)
                .unwrap_err()
                .to_string()
                .contains("more than")
        );
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
