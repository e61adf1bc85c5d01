//! How much memory may still be allocated, by the machine's and the cgroups' account.
//!
//! Owns the reading of /proc/meminfo and of the memory controller, v2 and v1. Called before any
//! shared memory is allocated. It is a look, not a reservation: two who look at once may both be told
//! yes; the margin is for them.

use std::fs;
use std::path::{Path, PathBuf};

/// Kept free, so that a window is never what makes the machine run out.
const MARGIN_BYTES: u64 = 32 << 20;

/// Bytes that may be allocated: the least of MemAvailable and of what each cgroup above this process
/// has left, less a margin. Unknown limits do not count.
pub fn available_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = cgroup_dirs(&cgroups)
        .iter()
        .filter_map(|dir| left_in(dir))
        .fold(mem_available(&meminfo).unwrap_or(u64::MAX), u64::min);
    left.saturating_sub(MARGIN_BYTES)
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The directories of this process's memory cgroup and of all above it, from /proc/self/cgroup: v2
/// ("0::/path") and v1 ("N:memory:/path"). In a container the path may not exist below the mount, the
/// root of which is then the container's own cgroup: so the root is always looked at.
fn cgroup_dirs(cgroups: &str) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let root = if controllers.is_empty() {
            Path::new("/sys/fs/cgroup")
        } else if controllers.split(',').any(|name| name == "memory") {
            Path::new("/sys/fs/cgroup/memory")
        } else {
            continue;
        };
        let relative = Path::new(path.trim_start_matches('/'));
        dirs.extend(relative.ancestors().map(|ancestor| root.join(ancestor)));
    }
    dirs
}

/// What one cgroup has left; none if it has no limit or no memory controller.
fn left_in(dir: &Path) -> Option<u64> {
    let number = |file: &str| -> Option<u64> {
        fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
    };
    // "max" (v2) does not parse, and so is no limit; v1 says a number near 2^63.
    let (limit, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (
            number("memory.limit_in_bytes")?,
            number("memory.usage_in_bytes")?,
        ),
    };
    // Clean page cache counts as used but is given up under pressure; what is dirty or in use is not.
    let reclaimable = fs::read_to_string(dir.join("memory.stat"))
        .ok()
        .and_then(|stat| inactive_file(&stat))
        .unwrap_or(0);
    Some(limit.saturating_sub(used).saturating_add(reclaimable))
}

fn inactive_file(stat: &str) -> Option<u64> {
    stat.lines()
        .find_map(|line| {
            line.strip_prefix("total_inactive_file ")
                .or_else(|| line.strip_prefix("inactive_file "))
        })?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24 kB\nMemAvailable:   12 kB\n";
        assert_eq!(mem_available(text), Some(12 * 1024));
        assert_eq!(mem_available("MemTotal: 24 kB\n"), None);
    }

    #[test]
    fn every_ancestor_is_looked_at() {
        let dirs = cgroup_dirs("12:cpu,cpuacct:/x\n4:memory:/a/b\n0::/c\n");
        let expected = [
            "/sys/fs/cgroup/memory/a/b",
            "/sys/fs/cgroup/memory/a",
            "/sys/fs/cgroup/memory/",
            "/sys/fs/cgroup/c",
            "/sys/fs/cgroup/",
        ];
        assert_eq!(dirs, expected.map(PathBuf::from));
    }

    #[test]
    fn limits_are_read_from_both_versions() {
        let dir = std::env::temp_dir().join(format!("allreduced-cgroup-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let write = |file: &str, text: &str| fs::write(dir.join(file), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(left_in(&dir), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        assert_eq!(left_in(&dir), Some(300));
        write("memory.stat", "anon 1\ninactive_file 50\n");
        assert_eq!(left_in(&dir), Some(350));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn this_machine_has_some() {
        let available = available_bytes();
        assert!(available > 0 && available < 1 << 50, "{available}");
    }
}
