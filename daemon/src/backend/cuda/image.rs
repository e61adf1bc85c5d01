//! The kernels as code that a GPU can load: the fatbin of the build, else compiled here by NVRTC.
//!
//! Owns the run-time compiler and its cache of cubins, keyed by source, options, architecture and compiler.
//! Called on the CUDA thread when a GPU is opened. Refuses a cache that others can write: what is in it runs
//! with this process's rights.
#![allow(unsafe_code)] // room: CUDA bindings

use crate::communicator::GpuError;
use crate::config::CudaConfig;
use allreduce_contract::kernel::{HEADERS, Instance, MAIN_SOURCE};
use cudarc::nvrtc::sys;
use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_int};
use std::hash::{Hash, Hasher};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::ptr;

/// Where NVRTC is looked for before the loader's own path: (directory of the configuration), CUDA_HOME, and
/// where the toolkit installs itself.
fn library_dirs(config: &CudaConfig) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    if !config.nvrtc_dir.as_os_str().is_empty() {
        dirs.push(config.nvrtc_dir.clone());
    }
    let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
    for home in home.into_iter().chain([PathBuf::from("/usr/local/cuda")]) {
        dirs.push(home.join("lib64"));
    }
    dirs
}

/// Loads NVRTC and its builtins, so that they are found by name from then on.
fn preload(config: &CudaConfig) {
    for dir in library_dirs(config) {
        let Ok(entries) = std::fs::read_dir(&dir) else {
            continue;
        };
        let mut found: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("libnvrtc") && name.contains(".so.") && !name.contains("alt")
            })
            .collect();
        // The builtins first ("libnvrtc-" sorts before "libnvrtc."): the compiler looks for them by name.
        found.sort();
        let mut loaded = false;
        for path in found {
            use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
            // SAFETY: loading a library runs its initialisers; this one is NVIDIA's, from a directory that the
            // administrator named or the toolkit installed.
            if let Ok(library) = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                // Stays loaded: its name is now known to the loader.
                std::mem::forget(library);
                loaded = true;
            }
        }
        if loaded {
            return;
        }
    }
}

fn explain(call: &str, result: sys::nvrtcResult) -> GpuError {
    // SAFETY: the library is loaded, since it gave the result; the string is static.
    let name = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    GpuError::NoKernels(format!("{call}: {}", name.to_string_lossy()))
}

fn check(call: &str, result: sys::nvrtcResult) -> Result<(), GpuError> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS {
        Ok(())
    } else {
        Err(explain(call, result))
    }
}

/// A cubin of the kernels for one architecture (10 x major + minor) and one instance.
///
/// # Errors
/// [`GpuError::NoKernels`]: no NVRTC, or it refuses the architecture.
pub(crate) fn compile(
    config: &CudaConfig,
    arch: i32,
    instance: Instance,
) -> Result<Vec<u8>, GpuError> {
    preload(config);
    // SAFETY: looking for the library loads it.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoKernels(
            "this build has no CUDA kernels (no nvcc was found), and NVRTC was not found either: install libnvrtc, or set cuda.nvrtc_dir".to_owned(),
        ));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the places are ints.
    check("nvrtcVersion", unsafe {
        sys::nvrtcVersion(&raw mut major, &raw mut minor)
    })?;
    let options = [
        "--std=c++17".to_owned(),
        "--fmad=false".to_owned(),
        format!("--gpu-architecture=sm_{arch}"),
        format!("-DAR_ONLY_WORLD={}", instance.name()),
    ];
    let cache = cache_dir(config).map(|dir| dir.join(cache_name(&options, (major, minor))));
    if let Some(cubin) = cache.as_ref().and_then(|file| std::fs::read(file).ok()) {
        return Ok(cubin);
    }
    let start = std::time::Instant::now();
    let cubin = run_compiler(&options)?;
    tracing::info!(
        arch,
        instance = instance.name(),
        bytes = cubin.len(),
        seconds = start.elapsed().as_secs_f32(),
        "compiled the CUDA kernels with NVRTC {major}.{minor}"
    );
    if let Some(file) = cache {
        // Whole or not at all: several executors may compile at once.
        let temporary = file.with_extension(format!("tmp{}", std::process::id()));
        let stored =
            std::fs::write(&temporary, &cubin).and_then(|()| std::fs::rename(&temporary, &file));
        if let Err(error) = stored {
            tracing::warn!(%error, file = %file.display(), "cannot keep compiled kernels");
        }
    }
    Ok(cubin)
}

/// Forgets a cached cubin that does not load.
pub(crate) fn forget_cached(config: &CudaConfig) {
    if let Some(dir) = cache_dir(config) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|ext| ext == "cubin") {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by this value's maker and destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn run_compiler(options: &[String]) -> Result<Vec<u8>, GpuError> {
    let text = |text: &str| CString::new(text).map_err(|_| GpuError::NoKernels("NUL".to_owned()));
    let main = (text(MAIN_SOURCE.0)?, text(MAIN_SOURCE.1)?);
    let headers = HEADERS
        .iter()
        .map(|(name, source)| Ok((text(name)?, text(source)?)))
        .collect::<Result<Vec<_>, GpuError>>()?;
    let names: Vec<_> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
    let sources: Vec<_> = headers.iter().map(|(_, source)| source.as_ptr()).collect();
    let options = options
        .iter()
        .map(|option| text(option))
        .collect::<Result<Vec<_>, GpuError>>()?;
    let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let count = |len: usize| c_int::try_from(len).unwrap_or(c_int::MAX);
    let mut raw = ptr::null_mut();
    // SAFETY: every pointer is to a NUL-terminated string, or to as many of them as the count says, alive for
    // the call; NVRTC copies what it keeps.
    check("nvrtcCreateProgram", unsafe {
        sys::nvrtcCreateProgram(
            &raw mut raw,
            main.1.as_ptr(),
            main.0.as_ptr(),
            count(sources.len()),
            sources.as_ptr(),
            names.as_ptr(),
        )
    })?;
    let program = Program(raw);
    // SAFETY: as above.
    let compiled =
        unsafe { sys::nvrtcCompileProgram(program.0, count(options.len()), options.as_ptr()) };
    if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
        let mut len = 0;
        // SAFETY: len is a place for a length.
        check("nvrtcGetProgramLogSize", unsafe {
            sys::nvrtcGetProgramLogSize(program.0, &raw mut len)
        })?;
        let mut log = vec![0_u8; len];
        // SAFETY: log has the length that was asked for.
        check("nvrtcGetProgramLog", unsafe {
            sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast())
        })?;
        let log = String::from_utf8_lossy(&log);
        let first: String = log
            .trim_end_matches('\0')
            .lines()
            .take(5)
            .collect::<Vec<_>>()
            .join("; ");
        let GpuError::NoKernels(reason) = explain("nvrtcCompileProgram", compiled) else {
            return Err(GpuError::NoKernels(first));
        };
        return Err(GpuError::NoKernels(format!("{reason}: {first}")));
    }
    let mut len = 0;
    // SAFETY: len is a place for a length.
    check("nvrtcGetCUBINSize", unsafe {
        sys::nvrtcGetCUBINSize(program.0, &raw mut len)
    })?;
    let mut cubin = vec![0_u8; len];
    // SAFETY: cubin has the length that was asked for.
    check("nvrtcGetCUBIN", unsafe {
        sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast())
    })?;
    Ok(cubin)
}

/// "<hash>.cubin": of everything that the cubin depends on.
fn cache_name(options: &[String], version: (c_int, c_int)) -> String {
    let mut hasher = DefaultHasher::new();
    (MAIN_SOURCE, HEADERS, options, version).hash(&mut hasher);
    format!("{:016x}.cubin", hasher.finish())
}

/// A directory of this user's alone; none if there is no such place.
fn cache_dir(config: &CudaConfig) -> Option<PathBuf> {
    let dir = if config.kernel_cache_dir.as_os_str().is_empty() {
        default_cache_dir()?
    } else {
        config.kernel_cache_dir.clone()
    };
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir);
    let is_own = made.is_ok() && is_private(&dir);
    if !is_own {
        tracing::warn!(dir = %dir.display(), "not a directory that only this user can write: compiled kernels are not kept");
    }
    is_own.then_some(dir)
}

fn is_private(dir: &Path) -> bool {
    std::fs::metadata(dir).is_ok_and(|found| {
        found.is_dir()
            && found.uid() == nix::unistd::geteuid().as_raw()
            && found.mode() & 0o022 == 0
    })
}

fn default_cache_dir() -> Option<PathBuf> {
    if nix::unistd::geteuid().is_root() {
        return Some(PathBuf::from("/var/cache/allreduced"));
    }
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    Some(base.join("allreduced"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_cache_knows_its_key_and_its_owner() {
        let options = |arch: &str| vec![format!("sm_{arch}")];
        let name = cache_name(&options("90"), (13, 0));
        assert_eq!(name, cache_name(&options("90"), (13, 0)));
        assert_ne!(name, cache_name(&options("100"), (13, 0)));
        assert_ne!(name, cache_name(&options("90"), (13, 1)));
        let dir = std::env::temp_dir().join(format!("allreduced-cache-{}", std::process::id()));
        let config = CudaConfig {
            kernel_cache_dir: dir.join("kernels"),
            ..CudaConfig::default()
        };
        assert_eq!(cache_dir(&config), Some(dir.join("kernels")));
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(dir.join("kernels"), open).unwrap();
        assert_eq!(cache_dir(&config), None);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
