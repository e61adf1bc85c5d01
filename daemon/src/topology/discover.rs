//! Discovery of this machine.
//!
//! Owns the deadline and what a failure means. Called by `load` and `probe`. Refuses to wait for a driver that does not answer, and to
//! fail where there simply is no GPU: that is a description too, with the reason beside it.

use super::found::{Discovered, Found, FoundGpu};
use super::{nvml, sysfs};
use nvml_wrapper::error::NvmlError;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Where the kernel shows the machine.
const SYSFS: &str = "/sys";

/// Discovery has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiscoverError {
    /// NVML did not come back.
    #[error(
        "NVML did not answer in {} ms: the driver hangs (see dmesg for NVRM), or topology.discover_timeout_ms is too short; a topology.file needs no discovery",
        .0.as_millis()
    )]
    Hangs(Duration),
    /// The thread that asked ended without an answer.
    #[error("asking NVML failed: {0}")]
    Thread(String),
}

/// What the machine has, `timeout` from now at the latest.
///
/// # Errors
/// [`DiscoverError`]; the thread that waits for NVML is left behind.
pub(crate) fn discover(timeout: Duration) -> Result<Discovered, DiscoverError> {
    let found = within(timeout, || {
        let mut found = nvml::ask().unwrap_or_else(|error| without(&error));
        sysfs::add(Path::new(SYSFS), &mut found);
        found
    })?;
    Ok(found.describe())
}

/// The same where NVML is not to be had, of GPUs that somebody else has listed: (UUID, product, bus id).
pub(crate) fn discover_listed<'a>(
    gpus: impl Iterator<Item = (&'a str, &'a str, &'a str)>,
) -> Discovered {
    let mut found = Found {
        gpus: gpus
            .map(|(uuid, product, bus_id)| FoundGpu {
                uuid: uuid.to_owned(),
                product: product.to_owned(),
                bus_id: bus_id.to_owned(),
                ..FoundGpu::default()
            })
            .collect(),
        trouble: vec!["NVML does not show the GPUs that CUDA shows: NVLink is not seen, PCIe is what sysfs shows".to_owned()],
        ..Found::default()
    };
    sysfs::add(Path::new(SYSFS), &mut found);
    found.describe()
}

/// No NVML is no GPU.
fn without(error: &NvmlError) -> Found {
    let reason = match error {
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => {
            "no NVIDIA driver here: libnvidia-ml.so.1 was not found".to_owned()
        }
        NvmlError::DriverNotLoaded => {
            "libnvidia-ml.so.1 is here, but the NVIDIA driver is not loaded".to_owned()
        }
        other => format!("NVML: {other}"),
    };
    Found {
        trouble: vec![reason],
        ..Found::default()
    }
}

/// Does `work` on a thread of its own, and gives it up after `timeout`.
fn within<T: Send + 'static>(
    timeout: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DiscoverError> {
    let (sender, answer) = mpsc::channel();
    std::thread::Builder::new()
        .name("discover".to_owned())
        .spawn(move || {
            // Nobody may wait any more.
            let _ = sender.send(work());
        })
        .map_err(|error| DiscoverError::Thread(error.to_string()))?;
    answer.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => DiscoverError::Hangs(timeout),
        RecvTimeoutError::Disconnected => DiscoverError::Thread("it panicked".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;
    use crate::topology::Topology;

    #[test]
    fn a_driver_that_hangs_is_given_up() {
        let (_keep, never) = mpsc::channel::<()>();
        let hang = move || {
            let _ = never.recv();
        };
        let error = within(Duration::from_millis(20), hang).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("NVML did not answer in 20 ms: "),
            "{error}"
        );
    }

    #[test]
    fn this_machine_is_described_whatever_it_is() {
        let discovered = discover(Duration::from_secs(60)).unwrap();
        let topology = Topology::new(discovered.description).unwrap();
        if topology.gpus().is_empty() {
            assert_eq!(topology.name(), "host");
            assert_eq!(discovered.hints.len(), 1, "{:?}", discovered.hints);
        }
    }
}
