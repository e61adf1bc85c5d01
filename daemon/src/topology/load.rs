//! The topology that a configuration means.
//!
//! Owns the choice: the file it names, else what this machine shows. Called by executors and `explain`. Refuses to fall back from a
//! file that is wrong.

use super::{DiscoverError, FileError, Topology, TopologyError, discover};
use crate::config::{TopologyConfig, ms};

/// There is no topology.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// The file cannot be used.
    #[error("topology.file: {0}")]
    File(#[from] FileError),
    /// This machine cannot be asked.
    #[error("{0}")]
    Discover(#[from] DiscoverError),
    /// It can, and what it shows does not fit together.
    #[error("what this machine shows is no topology: {0}; name one by topology.file")]
    Found(#[from] TopologyError),
}

/// The topology, and where it is from, for people: the file, or that it was discovered, with what could not be seen.
///
/// # Errors
/// [`LoadError`].
pub(crate) fn load(config: &TopologyConfig) -> Result<(Topology, String), LoadError> {
    if let Some(read) = config.read_file() {
        return Ok((read?, config.file.display().to_string()));
    }
    let discovered = discover(ms(config.discover_timeout_ms))?;
    let mut origin = "discovered".to_owned();
    for hint in &discovered.hints {
        origin.push_str("; ");
        origin.push_str(hint);
    }
    Ok((Topology::new(discovered.description)?, origin))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn a_file_goes_before_discovery_and_is_not_replaced() {
        let discovered = load(&TopologyConfig::default()).unwrap();
        assert!(discovered.1.starts_with("discovered"), "{}", discovered.1);
        let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("topologies/l40sx8-gen4.toml");
        let config = |file: PathBuf| TopologyConfig {
            file,
            ..TopologyConfig::default()
        };
        let (topology, origin) = load(&config(file)).unwrap();
        assert_eq!(topology.name(), "l40sx8-gen4");
        assert!(origin.ends_with("l40sx8-gen4.toml"), "{origin}");
        let error = load(&config(PathBuf::from("/nowhere"))).unwrap_err();
        assert!(
            error.to_string().starts_with("topology.file: /nowhere: "),
            "{error}"
        );
    }
}
