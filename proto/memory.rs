//! Shared memory: sealed memfds and their mappings.
//!
//! Owns the system calls. The executor creates, the companion socket passes, the client adopts.
//! A [`SealedMemory`] can neither shrink nor grow, so that nobody who maps it can be given SIGBUS by
//! somebody else's `ftruncate`; its pages are allocated before anybody maps it, so that a full machine
//! shows at creation. Refuses to hand out references: other processes write here.
#![allow(unsafe_code)] // room: shared memory

mod available;

pub use available::available_bytes;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::sys::uio::{pread, pwrite};
use nix::unistd::ftruncate;
use std::ffi::CStr;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// The seals every shared memory carries: its length is final, and so are the seals.
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_SEAL);

/// What can go wrong with shared memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The machine, or the cgroup this process is in, has not that much left. Nothing was tried:
    /// allocating a memfd's pages has no limit of its own and would end in the OOM killer.
    #[error("not enough memory: {needed} bytes needed, {available} available")]
    Exhausted {
        /// Bytes asked for.
        needed: u64,
        /// Bytes to be had, see [`available_bytes`].
        available: u64,
    },
    /// The kernel gave no memory object.
    #[error("cannot create a shared memory of {len_bytes} bytes: {source}")]
    Create {
        /// Length asked for.
        len_bytes: usize,
        /// The errno.
        source: Errno,
    },
    /// The kernel could not allocate the pages.
    #[error("cannot allocate the {len_bytes} bytes of a shared memory: {source}")]
    Reserve {
        /// Length asked for.
        len_bytes: usize,
        /// The errno.
        source: Errno,
    },
    /// The descriptor is no memfd, or lacks seals.
    #[error(
        "the file descriptor is not a memfd sealed with F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL"
    )]
    NotSealed,
    /// The descriptor's length is not the announced one.
    #[error("the shared memory has {actual} bytes, {announced} were announced")]
    Length {
        /// Bytes the file has.
        actual: u64,
        /// Bytes the peer announced.
        announced: u64,
    },
    /// mmap failed.
    #[error("cannot map a shared memory of {len_bytes} bytes: {source}")]
    Map {
        /// Length asked for.
        len_bytes: usize,
        /// The errno.
        source: Errno,
    },
}

/// A memfd whose length is final and whose pages exist.
#[derive(Debug)]
pub struct SealedMemory {
    fd: OwnedFd,
    len_bytes: NonZeroUsize,
}

impl SealedMemory {
    /// Creates, allocates and seals a memory of `len_bytes` zero bytes. `name` shows in /proc only.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`]; [`MemoryError::Create`] and [`MemoryError::Reserve`], with the errno.
    pub fn create(name: &CStr, len_bytes: NonZeroUsize) -> Result<Self, MemoryError> {
        let len = len_bytes.get();
        let create = |source| MemoryError::Create {
            len_bytes: len,
            source,
        };
        let file_len = i64::try_from(len).map_err(|_| create(Errno::EFBIG))?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name, flags).map_err(create)?;
        ftruncate(&fd, file_len).map_err(create)?;
        reserve(&fd, len, file_len)?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SEALS)).map_err(create)?;
        Ok(Self { fd, len_bytes })
    }

    /// Creates a memory that holds `bytes` (at least one) and that nobody can write any more: it can be read
    /// ([`Self::read`]), not mapped.
    ///
    /// # Errors
    /// Those of [`Self::create`].
    pub fn of(name: &CStr, bytes: &[u8]) -> Result<Self, MemoryError> {
        let len_bytes = NonZeroUsize::new(bytes.len()).unwrap_or(NonZeroUsize::MIN);
        let create = |source| MemoryError::Create {
            len_bytes: len_bytes.get(),
            source,
        };
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name, flags).map_err(create)?;
        let file_len = i64::try_from(len_bytes.get()).map_err(|_| create(Errno::EFBIG))?;
        ftruncate(&fd, file_len).map_err(create)?;
        reserve(&fd, len_bytes.get(), file_len)?;
        let mut written = 0;
        while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
            let at = i64::try_from(written).map_err(|_| create(Errno::EFBIG))?;
            written += pwrite(&fd, rest, at).map_err(create)?;
        }
        let seals = SEALS.union(SealFlag::F_SEAL_WRITE);
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).map_err(create)?;
        Ok(Self { fd, len_bytes })
    }

    /// All of its bytes, as they are now.
    ///
    /// # Errors
    /// [`MemoryError::Map`], with the errno of the read.
    pub fn read(&self) -> Result<Vec<u8>, MemoryError> {
        let failed = |source| MemoryError::Map {
            len_bytes: self.len_bytes.get(),
            source,
        };
        let mut bytes = vec![0; self.len_bytes.get()];
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = i64::try_from(done).map_err(|_| failed(Errno::EFBIG))?;
            match pread(&self.fd, rest, at).map_err(failed)? {
                // It cannot have shrunk.
                0 => return Err(failed(Errno::EIO)),
                read => done += read,
            }
        }
        Ok(bytes)
    }

    /// Takes over a memory that another process created, after checking its seals and that it has
    /// `announced` bytes.
    ///
    /// # Errors
    /// [`MemoryError::NotSealed`] and [`MemoryError::Length`].
    pub fn adopt(fd: OwnedFd, announced: u64) -> Result<Self, MemoryError> {
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).map_err(|_| MemoryError::NotSealed)?;
        if !SealFlag::from_bits_retain(seals).contains(SEALS) {
            return Err(MemoryError::NotSealed);
        }
        // Not a hugetlbfs file: a hole in one of those is filled from a pool that may be empty.
        let on_tmpfs = fstatfs(&fd).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC);
        if !on_tmpfs {
            return Err(MemoryError::NotSealed);
        }
        let actual = fstat(&fd)
            .ok()
            .and_then(|stat| u64::try_from(stat.st_size).ok())
            .unwrap_or(0);
        let len_bytes = usize::try_from(actual).ok().and_then(NonZeroUsize::new);
        match len_bytes {
            Some(len_bytes) if actual == announced => Ok(Self { fd, len_bytes }),
            Some(_) | None => Err(MemoryError::Length { actual, announced }),
        }
    }

    /// Allocates the pages of an adopted memory, whose creator may have left holes.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`] and [`MemoryError::Reserve`].
    pub fn reserve(&self) -> Result<(), MemoryError> {
        let len = self.len_bytes.get();
        let file_len = i64::try_from(len).map_err(|_| MemoryError::Reserve {
            len_bytes: len,
            source: Errno::EFBIG,
        })?;
        reserve(&self.fd, len, file_len)
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> NonZeroUsize {
        self.len_bytes
    }

    /// What tells it from every other memory, whatever the descriptor: device and inode.
    pub fn identity(&self) -> Option<(u64, u64)> {
        let stat = fstat(&self.fd).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// A descriptor through which the memory can only be read, for a peer.
    ///
    /// # Errors
    /// What open(2) says; /proc must be mounted.
    pub fn read_only_fd(&self) -> std::io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(std::fs::File::open(path)?.into())
    }

    /// Maps all of it, to be read only.
    ///
    /// # Errors
    /// [`MemoryError::Map`].
    pub fn map_read_only(&self) -> Result<ReadOnlyMapping, MemoryError> {
        self.map_with(ProtFlags::PROT_READ).map(ReadOnlyMapping)
    }

    /// Maps all of it, readable and writable.
    ///
    /// # Errors
    /// [`MemoryError::Map`].
    pub fn map(&self) -> Result<Mapping, MemoryError> {
        self.map_with(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
    }

    fn map_with(&self, prot: ProtFlags) -> Result<Mapping, MemoryError> {
        // SAFETY: no address is asked for, so no existing mapping is replaced; the descriptor is open
        // and sealed against shrinking, and lies on tmpfs (both constructors see to it), so every access
        // to the mapping finds its page, or a zero page in the place of one punched out, or memory has
        // run out for everybody.
        let start = unsafe {
            mmap(
                None,
                self.len_bytes,
                prot,
                MapFlags::MAP_SHARED,
                &self.fd,
                0,
            )
        }
        .map_err(|source| MemoryError::Map {
            len_bytes: self.len_bytes.get(),
            source,
        })?;
        Ok(Mapping {
            start: start.cast(),
            len_bytes: self.len_bytes,
        })
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn reserve(fd: &OwnedFd, len_bytes: usize, file_len: i64) -> Result<(), MemoryError> {
    // Of a memory that somebody has filled, only the holes are still to be allocated.
    let allocated = fstat(fd).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512);
    let needed = (len_bytes as u64).saturating_sub(allocated);
    let available = available_bytes();
    if needed > available {
        return Err(MemoryError::Exhausted { needed, available });
    }
    loop {
        match fallocate(fd, FallocateFlags::empty(), 0, file_len) {
            Ok(()) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(source) => return Err(MemoryError::Reserve { len_bytes, source }),
        }
    }
}

/// A mapping of a whole [`SealedMemory`], unmapped on drop.
///
/// It hands out raw pointers only: another process may write what they point to.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len_bytes: NonZeroUsize,
}

// SAFETY: a mapping belongs to the process, not to a thread: any thread may use and unmap it. Mapping
// gives no references, so sharing it shares nothing but an address and a length.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The first byte; page-aligned.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes.get()
    }

    /// Where `offset_bytes` is, if `len_bytes` from there lie inside.
    pub fn range(&self, offset_bytes: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        let end = offset_bytes.checked_add(len_bytes)?;
        if end > self.len_bytes.get() as u64 {
            return None;
        }
        let offset = usize::try_from(offset_bytes).ok()?;
        // SAFETY: offset <= end <= the mapping's length (just checked), so the result is inside the
        // mapping or one past its end.
        Some(unsafe { self.start.add(offset) })
    }
}

/// A mapping that can only be read: a peer's memory.
#[derive(Debug)]
pub struct ReadOnlyMapping(Mapping);

impl ReadOnlyMapping {
    /// The first byte; page-aligned. Not to be written.
    pub fn start(&self) -> NonNull<u8> {
        self.0.start
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.0.len_bytes()
    }

    /// Where `offset_bytes` is, if `len_bytes` from there lie inside.
    pub fn range(&self, offset_bytes: u64, len_bytes: u64) -> Option<*const u8> {
        self.0
            .range(offset_bytes, len_bytes)
            .map(|start| start.as_ptr().cast_const())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and length are those of one mmap that nobody else unmaps; pointers into it are
        // kept only by holders of this guard (an Arc where several hold it).
        let unmapped = unsafe { munmap(self.start.cast(), self.len_bytes.get()) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn len(bytes: usize) -> NonZeroUsize {
        NonZeroUsize::new(bytes).unwrap()
    }

    #[test]
    fn two_mappings_show_the_same_bytes() {
        let memory = SealedMemory::create(c"test", len(8192)).unwrap();
        let (one, other) = (memory.map().unwrap(), memory.map().unwrap());
        // SAFETY: both pointers are inside live mappings; nobody else writes this memory.
        unsafe {
            one.range(4096, 1).unwrap().write_volatile(7);
            assert_eq!(other.range(4096, 1).unwrap().read_volatile(), 7);
        }
    }

    #[test]
    fn a_read_only_descriptor_maps_read_only() {
        let memory = SealedMemory::create(c"test", len(4096)).unwrap();
        let peer = SealedMemory::adopt(memory.read_only_fd().unwrap(), 4096).unwrap();
        assert!(matches!(
            peer.map(),
            Err(MemoryError::Map {
                source: Errno::EACCES,
                ..
            })
        ));
        let (own, peer) = (memory.map().unwrap(), peer.map_read_only().unwrap());
        assert!(peer.range(4095, 2).is_none());
        // SAFETY: both pointers are inside live mappings; nobody else writes this memory.
        unsafe {
            own.range(8, 1).unwrap().write_volatile(7);
            assert_eq!(peer.range(8, 1).unwrap().read_volatile(), 7);
        }
    }

    #[test]
    fn ranges_are_bounded() {
        let mapping = SealedMemory::create(c"test", len(4096))
            .unwrap()
            .map()
            .unwrap();
        assert!(mapping.range(0, 4096).is_some());
        assert!(mapping.range(4096, 0).is_some());
        assert!(mapping.range(4095, 2).is_none());
        assert!(mapping.range(u64::MAX, 2).is_none());
        assert!(mapping.range(2, u64::MAX).is_none());
    }

    #[test]
    fn length_is_final() {
        let memory = SealedMemory::create(c"test", len(4096)).unwrap();
        assert_eq!(ftruncate(memory.as_fd(), 0), Err(Errno::EPERM));
        assert_eq!(ftruncate(memory.as_fd(), 8192), Err(Errno::EPERM));
    }

    #[test]
    fn adopting_checks_seals_and_length() {
        let memory = SealedMemory::create(c"test", len(4096)).unwrap();
        let dup = || memory.as_fd().try_clone_to_owned().unwrap();
        assert!(SealedMemory::adopt(dup(), 4096).is_ok());
        assert!(matches!(
            SealedMemory::adopt(dup(), 8192),
            Err(MemoryError::Length { actual: 4096, .. })
        ));
        let plain = memfd_create(c"plain", MFdFlags::MFD_CLOEXEC).unwrap();
        assert!(matches!(
            SealedMemory::adopt(plain, 4096),
            Err(MemoryError::NotSealed)
        ));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(
            SealedMemory::adopt(null.into(), 4096),
            Err(MemoryError::NotSealed)
        ));
    }

    #[test]
    fn what_is_allocated_already_is_not_needed_again() {
        let memory = SealedMemory::create(c"test", len(1 << 20)).unwrap();
        let blocks = fstat(memory.as_fd()).unwrap().st_blocks;
        assert_eq!(blocks * 512, 1 << 20);
        memory.reserve().unwrap();
    }

    #[test]
    fn too_much_is_refused_before_it_is_tried() {
        let error = SealedMemory::create(c"test", len(1 << 50)).map(|_| ());
        assert!(matches!(
            error,
            Err(MemoryError::Exhausted { needed, available }) if needed == 1 << 50 && available < needed
        ));
    }
}
