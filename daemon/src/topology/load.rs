//! The topology that a configuration means.
//!
//! Owns the choice: the file it names, else what this machine shows. Called by executors and `explain`. Refuses to fall back from a
//! file that is wrong.

use super::{DiscoverError, FileError, PRESETS, Topology, TopologyError, discover, preset};
use crate::config::{TopologyConfig, ms};
use std::path::Path;

/// There is no topology.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// The file cannot be used.
    #[error("topology.file: {0}")]
    File(#[from] FileError),
    /// Neither a name nor a file.
    #[error("--topology {name:?} is neither a preset ({known}) nor a topology file: {error}")]
    Nowhere {
        /// What was asked for.
        name: String,
        /// The presets.
        known: String,
        /// Why it is no file.
        error: Box<FileError>,
    },
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

/// A preset by name, or a file, and where it is from.
///
/// # Errors
/// [`LoadError::Nowhere`].
pub(crate) fn find(name: &str) -> Result<(Topology, String), LoadError> {
    if let Ok(preset) = preset(name) {
        return Ok((preset, "preset".to_owned()));
    }
    match Topology::read(Path::new(name)) {
        Ok(topology) => Ok((topology, name.to_owned())),
        Err(error) => Err(LoadError::Nowhere {
            name: name.to_owned(),
            known: PRESETS.map(|(known, _)| known).join(", "),
            error: Box::new(error),
        }),
    }
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
