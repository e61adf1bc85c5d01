//! Blocks that kernels which stay may have on a GPU, over all executors of a daemon.
//!
//! Owns one file for each GPU, `<UUID>.slots` in the executors' directory, of which each byte stands for a block: who holds a
//! lock on it has the block. The locks belong to the open file (F_OFD_SETLK), so the kernel gives them back when a
//! process ends, however it ends; no process needs to be asked, and the supervisor need not live. Executors take blocks when
//! lane `resident` is chosen and keep them until its kernels have ended; the supervisor removes files that nobody uses. Refuses to
//! wait: who finds too few gets by with fewer, or does without the lane. Two that take at the same moment may each find fewer
//! than if they had come one after the other.

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const EXTENSION: &str = "slots";

/// A GPU, and how many ranks of the communicator are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) gpu_uuid: String,
    pub(crate) ranks: u32,
}

/// Not one block for each rank.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SlotsError {
    #[error("{free} of {budget} blocks of {gpu_uuid} are free, and {ranks} ranks need one each")]
    Full {
        gpu_uuid: String,
        budget: u32,
        free: u32,
        ranks: u32,
    },
    #[error("{path}: {source}")]
    Io { path: String, source: io::Error },
}

/// The blocks that a communicator has, of every GPU it is on. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct BlockSlots {
    dir: PathBuf,
    by_gpu: Mutex<BTreeMap<String, GpuSlots>>,
}

#[derive(Debug)]
struct GpuSlots {
    file: File,
    held: BTreeSet<u32>,
}

/// Sets a lock of this open file on bytes from `start` on, `len` of them (0: all); whether that could be had.
fn set_lock(file: &File, kind: i32, start: u32, len: u32) -> io::Result<bool> {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start.into(),
        l_len: len.into(),
        // Must be 0 for locks of open files.
        l_pid: 0,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&lock)) {
        Ok(_) => Ok(true),
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl GpuSlots {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        Ok(Self {
            file,
            held: BTreeSet::new(),
        })
    }

    /// Takes blocks until it has `wanted`, or none is free; those that are new.
    fn take(&mut self, wanted: u32, budget: u32) -> io::Result<Vec<u32>> {
        let mut new = Vec::new();
        for block in 0..budget {
            if self.num_held() >= wanted {
                break;
            }
            if !self.held.contains(&block) && set_lock(&self.file, libc::F_WRLCK, block, 1)? {
                self.held.insert(block);
                new.push(block);
            }
        }
        Ok(new)
    }

    fn num_held(&self) -> u32 {
        u32::try_from(self.held.len()).unwrap_or(u32::MAX)
    }

    fn give_back(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            if self.held.remove(&block) {
                // A failure keeps the block until the file is closed.
                let _ = set_lock(&self.file, libc::F_UNLCK, block, 1);
            }
        }
    }
}

impl BlockSlots {
    /// None yet. `dir` is the executors' directory.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            by_gpu: Mutex::default(),
        }
    }

    /// Takes `blocks` blocks for each rank, or fewer, the same for every rank, of the `budget` that a GPU has. What is held
    /// already counts, and is not given back: kernels of an epoch that has ended may still be there. How many each rank has.
    ///
    /// # Errors
    /// [`SlotsError`]; then nothing was taken.
    pub(crate) fn take(&self, needs: &[Need], blocks: u32, budget: u32) -> Result<u32, SlotsError> {
        let mut by_gpu = self.by_gpu.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken: Vec<(&Need, Vec<u32>)> = Vec::new();
        let mut each = blocks;
        let mut failed = None;
        for need in needs {
            let ranks = need.ranks.max(1);
            let path = self.dir.join(&need.gpu_uuid).with_extension(EXTENSION);
            let new = match by_gpu.get_mut(&need.gpu_uuid) {
                Some(slots) => slots.take(blocks.saturating_mul(ranks), budget),
                None => GpuSlots::open(&path).and_then(|mut slots| {
                    let new = slots.take(blocks.saturating_mul(ranks), budget);
                    by_gpu.insert(need.gpu_uuid.clone(), slots);
                    new
                }),
            };
            let held = by_gpu.get(&need.gpu_uuid).map_or(0, GpuSlots::num_held);
            each = each.min(held / ranks);
            match new {
                Ok(new) => taken.push((need, new)),
                Err(source) => {
                    let path = path.display().to_string();
                    failed = Some(SlotsError::Io { path, source });
                    break;
                }
            }
            if each == 0 {
                failed = Some(SlotsError::Full {
                    gpu_uuid: need.gpu_uuid.clone(),
                    budget,
                    free: held,
                    ranks,
                });
                break;
            }
        }
        for (need, new) in taken {
            if let Some(slots) = by_gpu.get_mut(&need.gpu_uuid) {
                // What no rank can have, since all have the same: the newest first.
                let needed = match failed {
                    Some(_) => 0,
                    None => each.saturating_mul(need.ranks.max(1)),
                };
                let excess = slots.num_held().saturating_sub(needed) as usize;
                slots.give_back(new.into_iter().rev().take(excess));
            }
        }
        failed.map_or(Ok(each), Err)
    }
}

/// Removes the files that no executor uses any more. By the supervisor, when its executors have ended.
pub(crate) fn remove_unused(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension() != Some(OsStr::new(EXTENSION)) {
            continue;
        }
        let Ok(slots) = GpuSlots::open(&path) else {
            continue;
        };
        if set_lock(&slots.file, libc::F_WRLCK, 0, 0).unwrap_or(false) {
            // Gone already: it is in nobody's way.
            let _ = std::fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    fn dir(name: &str) -> PathBuf {
        let dir =
            std::env::temp_dir().join(format!("allreduced-slots-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn on(gpu_uuid: &str, ranks: u32) -> Need {
        Need {
            gpu_uuid: gpu_uuid.to_owned(),
            ranks,
        }
    }

    fn free(error: SlotsError) -> u32 {
        match error {
            SlotsError::Full { free, .. } => free,
            SlotsError::Io { .. } => panic!("{error}"),
        }
    }

    #[test]
    fn who_comes_late_gets_by_with_fewer_or_none() {
        let dir = dir("late");
        let [first, second, third, fourth] = [(); 4].map(|()| BlockSlots::new(dir.clone()));
        assert_eq!(first.take(&[on("GPU-a", 2)], 6, 17).unwrap(), 6);
        // Five are left: two for each, and the odd one is given back.
        assert_eq!(second.take(&[on("GPU-a", 2)], 6, 17).unwrap(), 2);
        assert_eq!(free(third.take(&[on("GPU-a", 2)], 6, 17).unwrap_err()), 1);
        assert_eq!(third.take(&[on("GPU-a", 1)], 6, 17).unwrap(), 1);
        assert_eq!(free(fourth.take(&[on("GPU-a", 1)], 6, 17).unwrap_err()), 0);
        // Another GPU has its own.
        assert_eq!(fourth.take(&[on("GPU-b", 1)], 6, 17).unwrap(), 6);
        drop(first);
        assert_eq!(fourth.take(&[on("GPU-a", 2)], 6, 17).unwrap(), 6);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn every_rank_has_the_same_on_all_gpus_and_what_is_left_over_is_free() {
        let dir = dir("same");
        let [first, second, third] = [(); 3].map(|()| BlockSlots::new(dir.clone()));
        assert_eq!(first.take(&[on("GPU-a", 1)], 5, 8).unwrap(), 5);
        assert_eq!(
            second
                .take(&[on("GPU-b", 1), on("GPU-a", 1)], 8, 8)
                .unwrap(),
            3
        );
        assert_eq!(third.take(&[on("GPU-b", 1)], 8, 8).unwrap(), 5);
        // Nothing on one: nothing is kept on the other.
        let fourth = BlockSlots::new(dir.clone());
        drop(third);
        fourth
            .take(&[on("GPU-b", 1), on("GPU-a", 1)], 8, 8)
            .unwrap_err();
        assert_eq!(
            BlockSlots::new(dir.clone())
                .take(&[on("GPU-b", 1)], 8, 8)
                .unwrap(),
            5
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_next_epoch_has_what_the_one_before_had() {
        let dir = dir("again");
        let slots = BlockSlots::new(dir.clone());
        for _ in 0..3 {
            assert_eq!(slots.take(&[on("GPU-a", 4)], 6, 24).unwrap(), 6);
        }
        // With fewer ranks too; with more, what is free as well.
        assert_eq!(slots.take(&[on("GPU-a", 2)], 6, 24).unwrap(), 6);
        assert_eq!(slots.take(&[on("GPU-a", 5)], 6, 30).unwrap(), 6);
        assert_eq!(slots.take(&[on("GPU-a", 31)], 6, 30).map_err(free), Err(30));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn without_a_budget_there_is_none_and_a_bad_directory_says_so() {
        let dir = dir("none");
        let slots = BlockSlots::new(dir.clone());
        assert_eq!(free(slots.take(&[on("GPU-a", 1)], 6, 0).unwrap_err()), 0);
        std::fs::remove_dir_all(&dir).unwrap();
        let error = slots.take(&[on("GPU-b", 1)], 6, 8).unwrap_err();
        assert!(error.to_string().contains("GPU-b.slots: "), "{error}");
    }

    const TEST_DIR: &str = "ALLREDUCED_SLOTS_TEST_DIR";

    /// The process of [`a_killed_process_gives_its_blocks_back`]; else nothing.
    #[test]
    fn holds_blocks_until_it_is_killed() {
        let Some(dir) = std::env::var_os(TEST_DIR) else {
            return;
        };
        let slots = BlockSlots::new(dir.into());
        let taken = slots.take(&[on("GPU-a", 2)], 6, 24).unwrap();
        println!("\ntaken {taken}");
        // Killed long before.
        std::thread::sleep(std::time::Duration::from_secs(120));
        drop(slots);
    }

    fn holder(dir: &Path) -> (Child, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "slots::tests::holds_blocks_until_it_is_killed",
                "--nocapture",
            ])
            .env(TEST_DIR, dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let mut lines = says.lines().map(Result::unwrap);
        let taken = lines.find(|line| line.starts_with("taken "));
        (child, taken.unwrap())
    }

    #[test]
    fn a_killed_process_gives_its_blocks_back() {
        let dir = dir("killed");
        let (mut first, taken) = holder(&dir);
        assert_eq!(taken, "taken 6");
        let (mut second, taken) = holder(&dir);
        assert_eq!(taken, "taken 6");
        let own = BlockSlots::new(dir.clone());
        assert_eq!(free(own.take(&[on("GPU-a", 1)], 6, 24).unwrap_err()), 0);
        remove_unused(&dir);
        assert!(dir.join("GPU-a.slots").exists(), "it is in use");
        first.kill().unwrap();
        first.wait().unwrap();
        assert_eq!(own.take(&[on("GPU-a", 3)], 6, 24).unwrap(), 4);
        second.kill().unwrap();
        second.wait().unwrap();
        assert_eq!(own.take(&[on("GPU-a", 3)], 6, 24).unwrap(), 6);
        remove_unused(&dir);
        assert!(dir.join("GPU-a.slots").exists(), "it is in use");
        drop(own);
        remove_unused(&dir);
        assert!(!dir.join("GPU-a.slots").exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
